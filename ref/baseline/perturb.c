/* SPDX-License-Identifier: Apache-2.0 */
/* Computes the loss as a function of one weight. */
#include "ref/baseline/perturb.h"

#include <string.h>

#include "anyrank/config.h"
#include "ref/baseline/run.h"

typedef struct trial {
    ari_bl_run run;
    ari_bl_model model;
    double **input; /* [layers + 1]: inputs of each block and of the part after the last one */
} trial;

/* Computes from a block's input to the loss; is_saving: keeps later inputs too. */
static ar_status run_forward(trial *t, size_t first_layer, bool is_saving, double *loss)
{
    ari_bl_run *run = &t->run;
    const size_t layers = run->c->layers, count = run->tokens * run->c->hidden;
    ARI_BL_SCOPE(run);
    const double *x = t->input[first_layer];
    for (size_t layer = first_layer; layer < layers; layer++) {
        ari_bl_block saved;
        AR_TRY(ari_bl_block_forward(run, layer, &t->model.block[layer], &saved, x));
        x = saved.y;
        if (is_saving)
            memcpy(t->input[layer + 1], x, count * sizeof *x);
    }
    return ari_bl_end(run, &t->model, x, loss);
}

static ar_status load(trial *t)
{
    ari_bl_run *run = &t->run;
    const size_t layers = run->c->layers;
    double loss;
    AR_TRY(ari_bl_training_open(run)); /* creates the list of names */
    AR_TRY(ari_bl_load_model(run, &t->model));
    AR_TRY(ari_bl_take_buffers(run, &t->model));
    t->input = ari_bl_take(run, layers + 1, 1, sizeof *t->input);
    for (size_t i = 0; t->input != NULL && i <= layers; i++)
        t->input[i] = ari_bl_doubles(run, run->tokens, run->c->hidden);
    AR_TRY(run->memory);
    AR_TRY(ari_bl_embed(run, &t->model, t->input[0]));
    return run_forward(t, 0, true, &loss);
}

/* Returns the block of a weight; the number of blocks for weights after them, 0 for those before them. */
static size_t block_of(const trial *t, const ari_bl_trained *p, bool *embeds)
{
    const ari_bl_names *names = t->run.names;
    const size_t length = strlen(names->blocks), layers = t->run.c->layers;
    *embeds = false;
    if (memcmp(p->name, names->blocks, length) == 0 && p->name[length] == '.') {
        size_t layer = 0;
        for (const char *digit = p->name + length + 1; *digit >= '0' && *digit <= '9'; digit++)
            layer = layer * 10 + (size_t)(*digit - '0');
        return layer < layers ? layer : layers;
    }
    *embeds = p->data == t->model.embed || p->data == t->model.positions;
    return *embeds ? 0 : layers;
}

static ar_status find_trained(const trial *t, const ari_bl_trained **out, const ari_perturbation *p)
{
    const ari_bl_training *list = t->run.training;
    for (size_t i = 0; i < list->n; i++) {
        const ari_bl_trained *param = &list->params[i];
        if (strcmp(param->name, p->name) != 0)
            continue;
        if (p->element >= param->rows * (param->cols > 0 ? param->cols : 1))
            return ar_error_set(AR_ERR_ARG, "baseline: no element %zu in '%s'", p->element, p->name);
        *out = param;
        return AR_OK;
    }
    return ar_error_set(AR_ERR_NOT_FOUND, "baseline: no parameter '%s' to perturb", p->name);
}

static ar_status perturb(trial *t, ari_perturbation *p)
{
    const ari_bl_trained *param = NULL;
    AR_TRY(find_trained(t, &param, p));
    const size_t width = param->cols > 0 ? param->cols : 1;
    double *w = &param->data[p->element / width * param->row + p->element % width * param->col];
    const double before = *w;
    bool embeds;
    const size_t first_layer = block_of(t, param, &embeds);
    *w = p->value = before + p->delta;
    if (embeds)
        AR_TRY(ari_bl_embed(&t->run, &t->model, t->input[0]));
    AR_TRY(run_forward(t, first_layer, false, &p->loss));
    *w = before;
    return embeds ? ari_bl_embed(&t->run, &t->model, t->input[0]) : AR_OK;
}

static ar_status run_all(trial *t, const ar_batch *batch, ari_perturbation *p, size_t n)
{
    const ar_baseline_options *o = t->run.o;
    AR_TRY(ari_bl_check_batch(t->run.c, o, batch));
    AR_TRY(ari_bl_check_tokens(t->run.c, batch));
    AR_TRY(ari_bl_enter_step(&t->run, batch, 1));
    AR_TRY(load(t));
    for (size_t i = 0; i < n; i++) {
        AR_TRY(perturb(t, &p[i]));
        if (o->progress != NULL && !o->progress(o->progress_user, (double)(i + 1) / (double)n))
            return ar_error_set(AR_ERR_ABORTED, "baseline: stopped by the caller at %zu of %zu losses", i + 1, n);
    }
    return AR_OK;
}

ar_status ari_baseline_perturb(const ar_config *c, const ar_baseline_options *o, const ar_batch *batch,
                               ari_perturbation *p, size_t n)
{
    trial t = {0};
    if (o == NULL || o->mode != AR_MODE_F64 || (p == NULL && n > 0))
        return ar_error_set(AR_ERR_ARG, "baseline: perturbations need options of the binary64 mode");
    ar_baseline_options quiet = *o;
    quiet.forward_only = true;
    quiet.steps = 0;
    quiet.emit = NULL;
    quiet.begin_step = NULL;
    quiet.noise_seed = 0;
    ar_status st = ari_bl_begin(&t.run, c, &quiet, batch);
    if (st == AR_OK)
        st = run_all(&t, batch, p, n);
    ari_bl_release(&t.run, NULL);
    return st;
}
