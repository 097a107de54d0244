/* SPDX-License-Identifier: Apache-2.0 */
/* The entry points: a whole model on one batch, and one block alone. */
#include "ref/baseline/model.h"

#include <stdio.h>

#include "ref/core/size.h"

bool ari_bl_has_head(const ar_config *c)
{
    return c->arch != AR_ARCH_STACK;
}

static ar_status progress(const ari_bl_run *run, size_t done, size_t all)
{
    const ar_baseline_options *o = run->o;
    if (o->progress != NULL && !o->progress(o->progress_user, (double)done / (double)all))
        return ar_error_set(AR_ERR_ABORTED, "baseline: stopped by the caller at %zu of %zu", done, all);
    return AR_OK;
}

/* --- parameters, in the order of their first use
 * ------------------------------------------------------------------------ */

static ar_status load_table(ari_bl_run *run, const double **values, const char *name, size_t rows)
{
    char part[200];
    double *table = NULL;
    snprintf(part, sizeof part, "%s.weight", name);
    AR_TRY(ari_bl_parameter(run, &table, part, rows, run->c->hidden, AR_INIT_NORMAL, rows, run->c->hidden));
    *values = table;
    return AR_OK;
}

static ar_status load_block(ari_bl_run *run, ari_bl_params *p, size_t layer)
{
    snprintf(run->prefix, sizeof run->prefix, "%s.%zu", run->names->blocks, layer);
    AR_TRY(ari_bl_load_block(run, p));
    run->prefix[0] = '\0';
    return AR_OK;
}

static ar_status load_model(ari_bl_run *run, ari_bl_model *m)
{
    const ar_config *c = run->c;
    AR_TRY(load_table(run, &m->embed, run->names->embed, c->vocab));
    if (c->learned_positions)
        AR_TRY(load_table(run, &m->positions, run->names->positions, c->max_positions));
    m->block = ari_bl_take(run, c->layers, 1, sizeof *m->block);
    if (m->block == NULL)
        return run->memory;
    for (size_t layer = 0; layer < c->layers; layer++)
        AR_TRY(load_block(run, &m->block[layer], layer));
    if (c->final_norm)
        AR_TRY(ari_bl_load_norm(run, &m->final_norm, run->names->final_norm));
    m->head = (ari_bl_linear){
        .in = c->hidden, .out = c->vocab, .parts = 1, .name = {"lm_head"}, .width = {c->vocab}, .weight = m->embed};
    if (!ari_bl_has_head(c) || c->tied)
        return AR_OK;
    double *weight = NULL;
    AR_TRY(ari_bl_parameter(run, &weight, "lm_head.weight", c->vocab, c->hidden, AR_INIT_XAVIER_NORMAL, c->hidden,
                            c->vocab));
    m->head.weight = weight;
    return AR_OK;
}

/* What lives through the whole pass, taken before the blocks' activations so that these can be released one by one. */
static ar_status take_buffers(ari_bl_run *run, ari_bl_model *m)
{
    const size_t h = run->c->hidden;
    m->ids = ari_bl_take(run, run->tokens, 1, sizeof *m->ids);
    m->head_x = ari_bl_doubles(run, run->tokens, h);
    m->dx = ari_bl_doubles(run, run->tokens, h);
    if (m->ids == NULL || m->head_x == NULL || m->dx == NULL)
        return run->memory;
    for (size_t t = 0; t < run->tokens; t++)
        m->ids[t] = (size_t)run->batch->input_ids[t];
    if (!ari_bl_has_head(run->c))
        return AR_OK;
    m->dlogits = ari_bl_doubles(run, run->tokens, run->c->vocab);
    return m->dlogits == NULL ? run->memory : AR_OK;
}

/* --- a model
 * -------------------------------------------------------------------------------------------------------------- */

/* The final norm (or none), the loss, and back: m->dx is then the gradient of x, the last block's output. */
static ar_status run_end(ari_bl_run *run, ari_bl_model *m, const double *x, double *loss)
{
    const size_t h = run->c->hidden;
    const ari_bl_memory *mark = run->top;
    ari_bl_norm_saved normed;
    if (run->c->final_norm)
        AR_TRY(ari_bl_norm_forward(run, &m->final_norm, &normed, x));
    for (size_t i = 0; i < run->tokens * h; i++)
        m->head_x[i] = run->c->final_norm ? normed.y[i] : x[i];
    AR_TRY(ari_bl_loss_forward(run, m, loss));
    if (run->o->forward_only)
        return AR_OK;
    if (run->c->final_norm) {
        double *dnormed = ari_bl_doubles(run, run->tokens, h);
        if (dnormed == NULL)
            return run->memory;
        AR_TRY(ari_bl_loss_backward(run, m, dnormed));
        AR_TRY(ari_bl_norm_backward(run, &m->final_norm, m->dx, dnormed, &normed));
        AR_TRY(ari_bl_norm_gradients(run, &m->final_norm, dnormed, &normed));
    } else {
        AR_TRY(ari_bl_loss_backward(run, m, m->dx));
    }
    ari_bl_release(run, mark);
    return AR_OK;
}

static ar_status run_model(ari_bl_run *run, double *loss)
{
    const size_t layers = run->c->layers;
    ari_bl_model m = {0};
    AR_TRY(load_model(run, &m));
    AR_TRY(take_buffers(run, &m));
    ari_bl_block *saved = ari_bl_take(run, layers, 1, sizeof *saved);
    const ari_bl_memory **mark = ari_bl_take(run, layers, 1, sizeof *mark);
    double *embedded = ari_bl_doubles(run, run->tokens, run->c->hidden);
    if (saved == NULL || mark == NULL || embedded == NULL)
        return run->memory;
    AR_TRY(ari_bl_embed(run, &m, embedded));
    const double *x = embedded;
    for (size_t layer = 0; layer < layers; layer++) {
        mark[layer] = run->top;
        AR_TRY(ari_bl_block_forward(run, layer, &m.block[layer], &saved[layer], x));
        x = saved[layer].y;
        AR_TRY(progress(run, layer + 1, 3 * layers)); /* a block costs twice as much backwards */
    }
    AR_TRY(run_end(run, &m, x, loss));
    if (run->o->forward_only)
        return AR_OK;
    for (size_t layer = layers; layer-- > 0;) {
        AR_TRY(ari_bl_block_backward(run, layer, &m.block[layer], m.dx, m.dx, &saved[layer]));
        ari_bl_release(run, mark[layer]);
        AR_TRY(progress(run, layers + 2 * (layers - layer), 3 * layers));
    }
    return ari_bl_embed_gradients(run, &m);
}

/* --- entry points
 * --------------------------------------------------------------------------------------------------------- */

static ar_status begin(ari_bl_run *run, const ar_config *c, const ar_baseline_options *o, const ar_batch *batch)
{
    AR_TRY(ari_bl_check(c, o, batch));
    *run = (ari_bl_run){.c = c, .o = o, .batch = batch, .b = batch->batch, .s = batch->seq};
    run->names = ari_bl_names_of(c->arch);
    return ari_mul_size(&run->tokens, run->b, run->s);
}

ar_status ar_baseline_run(const ar_config *c, const ar_baseline_options *o, const ar_batch *batch, double *loss)
{
    ari_bl_run run = {0};
    double value = 0.0;
    AR_TRY(begin(&run, c, o, batch));
    AR_TRY(ari_bl_check_tokens(c, batch));
    if (loss == NULL)
        return ar_error_set(AR_ERR_ARG, "baseline: loss is NULL");
    const ar_status st = run_model(&run, &value);
    ari_bl_release(&run, NULL);
    if (st == AR_OK)
        *loss = value;
    return st;
}

static ar_status run_block(ari_bl_run *run, const float *x, const float *dy)
{
    const size_t count = run->tokens * run->c->hidden;
    ari_bl_params p;
    ari_bl_block saved;
    AR_TRY(load_block(run, &p, 0));
    double *input = ari_bl_doubles(run, run->tokens, run->c->hidden);
    double *gradient = ari_bl_doubles(run, run->tokens, run->c->hidden);
    if (input == NULL || gradient == NULL)
        return run->memory;
    for (size_t i = 0; i < count; i++)
        input[i] = (double)x[i];
    AR_TRY(ari_bl_block_forward(run, 0, &p, &saved, input));
    if (run->o->forward_only)
        return AR_OK;
    for (size_t i = 0; i < count; i++)
        gradient[i] = (double)dy[i];
    return ari_bl_block_backward(run, 0, &p, gradient, gradient, &saved);
}

ar_status ar_baseline_block(const ar_config *c, const ar_baseline_options *o, const ar_batch *batch, const float *x,
                            const float *dy)
{
    ari_bl_run run = {0};
    AR_TRY(begin(&run, c, o, batch));
    if (x == NULL || (dy == NULL && !o->forward_only))
        return ar_error_set(AR_ERR_ARG, "baseline: x or dy is NULL");
    const ar_status st = run_block(&run, x, dy);
    ari_bl_release(&run, NULL);
    return st;
}
