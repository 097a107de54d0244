/* SPDX-License-Identifier: Apache-2.0 */
/* Entry points: a full model on one batch, and a single block. */
#include "anyrank/config.h"
#include "ref/baseline/run.h"

#include <stdio.h>

#include "ref/baseline/baseline_private.h"
#include "ref/core/size.h"
#include "ref/numerics/philox.h"

static ar_status report_progress(const ari_bl_run *run, size_t done_count, size_t total_count)
{
    const ar_baseline_options *o = run->o;
    const double steps = o->steps > 0 ? (double)o->steps : 1.0;
    const double fraction = ((double)(run->step - 1) + (double)done_count / (double)total_count) / steps;
    if (o->progress != NULL && !o->progress(o->progress_user, fraction))
        return ar_error_set(AR_ERR_ABORTED, "baseline: stopped by the caller at %zu of %zu of step %u", done_count,
                            total_count, (unsigned)run->step);
    return AR_OK;
}

/* --- parameters, in the order of their first use ------------------------------------------------------------------ */

static ar_status load_table(ari_bl_run *run, const double **values, const char *name, size_t rows)
{
    char part[200];
    double *table = NULL;
    snprintf(part, sizeof part, "%s.weight", name);
    AR_TRY(ari_bl_parameter(run, &table, part, rows, run->c->hidden, AR_INIT_NORMAL, rows, run->c->hidden));
    ari_bl_training_add(run, part, rows, run->c->hidden, table, run->c->hidden, 1);
    *values = table;
    return AR_OK;
}

static ar_status load_block(ari_bl_run *run, ari_bl_params *p, size_t layer)
{
    snprintf(run->prefix, sizeof run->prefix, "%s.%zu", run->names->blocks, layer);
    AR_TRY(ari_bl_load_block(run, p, layer));
    run->prefix[0] = '\0';
    return AR_OK;
}

static ar_status load_head(ari_bl_run *run, ari_bl_model *m)
{
    const size_t h = run->c->hidden, v = run->c->vocab;
    const char *name = run->names->head;
    char part[200];
    double *weight = NULL;
    m->head = (ari_bl_linear){
        .in_features = h, .out = v, .parts = 1, .name = {name}, .width = {v}, .weight = m->embed, .peaked = true};
    if (run->c->tied)
        return AR_OK;
    snprintf(part, sizeof part, "%s.weight", name);
    AR_TRY(ari_bl_parameter(run, &weight, part, v, h, AR_INIT_XAVIER_NORMAL, h, v));
    ari_bl_training_add(run, part, v, h, weight, h, 1);
    m->head.weight = weight;
    return AR_OK;
}

ar_status ari_bl_load_model(ari_bl_run *run, ari_bl_model *m)
{
    const ar_config *c = run->c;
    AR_TRY(load_table(run, &m->embed, run->names->embed, c->vocab));
    if (c->learned_positions)
        AR_TRY(load_table(run, &m->positions, run->names->positions, c->max_positions));
    m->block = ari_bl_take(run, c->layers, 1, sizeof *m->block);
    AR_TRY(run->memory);
    for (size_t layer = 0; layer < c->layers; layer++)
        AR_TRY(load_block(run, &m->block[layer], layer));
    if (c->final_norm)
        AR_TRY(ari_bl_load_norm(run, &m->final_norm, run->names->final_norm, c->hidden, 1));
    if (run->names->head != NULL)
        AR_TRY(load_head(run, m));
    return ari_bl_load_mtp(run, m);
}

/* Allocated before the blocks' activations, so that these can be released one by one. */
ar_status ari_bl_take_buffers(ari_bl_run *run, ari_bl_model *m)
{
    const size_t h = run->c->hidden;
    m->ids = ari_bl_take(run, run->tokens, 1, sizeof *m->ids);
    m->head_x = ari_bl_doubles(run, run->tokens, h);
    m->dx = ari_bl_doubles(run, run->tokens, h);
    AR_TRY(run->memory);
    for (size_t t = 0; t < run->tokens; t++)
        m->ids[t] = (size_t)run->batch->input_ids[t];
    if (run->names->head == NULL)
        return AR_OK;
    m->dlogits = ari_bl_doubles(run, run->tokens, run->c->vocab);
    if (run->c->logit_cap > 0.0)
        m->bare = ari_bl_doubles(run, run->tokens, run->c->vocab);
    return run->memory != AR_OK ? run->memory : ari_bl_take_mtp(run, m);
}

/* --- a model ------------------------------------------------------------------------------------------------------ */

ar_status ari_bl_end(ari_bl_run *run, ari_bl_model *m, const double *x, double *loss)
{
    const size_t h = run->c->hidden;
    ARI_BL_SCOPE(run);
    ari_bl_norm_saved normed;
    if (run->c->final_norm)
        AR_TRY(ari_bl_norm_forward(run, &m->final_norm, &normed, x));
    for (size_t i = 0; i < run->tokens * h; i++)
        m->head_x[i] = run->c->final_norm ? normed.y[i] : x[i];
    AR_TRY(ari_bl_loss_forward(run, m, loss));
    if (run->o->forward_only)
        return AR_OK;
    double *dnormed = run->c->final_norm ? ari_bl_doubles(run, run->tokens, h) : m->dx;
    double *further = ari_bl_doubles(run, run->c->mtp > 0 ? run->tokens : 0, h);
    AR_TRY(run->memory);
    AR_TRY(ari_bl_mtp_backward(run, m, further));
    AR_TRY(ari_bl_loss_backward(run, m, dnormed));
    AR_TRY(ari_bl_head_gradient(run, m));
    for (size_t i = 0; run->c->mtp > 0 && i < run->tokens * h; i++)
        dnormed[i] = ari_bl_keep(run, ari_bl_stream(run, dnormed[i] + further[i]));
    if (run->c->final_norm) {
        AR_TRY(ari_bl_norm_backward(run, &m->final_norm, m->dx, NULL, NULL, dnormed, &normed));
        AR_TRY(ari_bl_norm_gradients(run, &m->final_norm, dnormed, &normed));
    }
    return AR_OK;
}

/* Runs forward, loss and backward on run->batch. */
static ar_status run_pass(ari_bl_run *run, ari_bl_model *m, double *loss)
{
    const size_t layers = run->c->layers;
    AR_TRY(ari_bl_take_buffers(run, m));
    ari_bl_block *saved = ari_bl_take(run, layers, 1, sizeof *saved);
    const ari_bl_memory **mark = ari_bl_take(run, layers, 1, sizeof *mark);
    double *embedded = ari_bl_doubles(run, run->tokens, run->c->hidden);
    AR_TRY(run->memory);
    AR_TRY(ari_bl_embed(run, m, embedded));
    const double *x = embedded;
    for (size_t layer = 0; layer < layers; layer++) {
        mark[layer] = run->top;
        AR_TRY(ari_bl_block_forward(run, layer, &m->block[layer], &saved[layer], x));
        x = saved[layer].y;
        AR_TRY(report_progress(run, layer + 1, 3 * layers)); /* a block costs twice as much backwards */
    }
    AR_TRY(ari_bl_end(run, m, x, loss));
    if (run->o->forward_only)
        return AR_OK;
    for (size_t layer = layers; layer-- > 0;) {
        AR_TRY(ari_bl_block_backward(run, layer, &m->block[layer], m->dx, m->dx, &saved[layer]));
        ari_bl_release(run, mark[layer]);
        AR_TRY(report_progress(run, layers + 2 * (layers - layer), 3 * layers));
    }
    return ari_bl_embed_gradients(run, m);
}

ar_status ari_bl_enter_step(ari_bl_run *run, const ar_batch *batch, uint32_t step)
{
    if (run->o->begin_step != NULL)
        run->o->begin_step(run->o->emit_user, (int)step);
    run->step = step;
    run->batch = batch;
    run->b = batch->batch;
    run->s = batch->seq;
    return ari_mul_size(&run->tokens, run->b, run->s);
}

/* loss and batch: [max(steps, 1)]. */
static ar_status run_steps(ari_bl_run *run, const ar_batch *batch, double *loss)
{
    const bool trains = run->o->steps > 0;
    const uint32_t steps = trains ? (uint32_t)run->o->steps : 1;
    ari_bl_model m = {0};
    for (uint32_t step = 1; step <= steps; step++) {
        AR_TRY(ari_bl_enter_step(run, &batch[step - 1], step));
        if (step == 1) {
            if (trains)
                AR_TRY(ari_bl_training_open(run));
            AR_TRY(ari_bl_load_model(run, &m));
            if (trains)
                AR_TRY(ari_bl_training_take(run));
        }
        const ari_bl_memory *mark = run->top;
        AR_TRY(run_pass(run, &m, &loss[step - 1]));
        ari_bl_release(run, mark);
        if (trains)
            AR_TRY(ari_bl_training_update(run));
    }
    return AR_OK;
}

/* --- entry points ------------------------------------------------------------------------------------------------- */

static bool is_fp32(const ar_noise_units *u)
{
    return u->weight == 0.0 && u->operand == 0.0 && u->product == 0.0 && u->branch == 0.0 && u->stream == 0.0 &&
           u->inner == 0.0;
}

ar_status ari_bl_begin(ari_bl_run *run, const ar_config *c, const ar_baseline_options *o, const ar_batch *batch)
{
    AR_TRY(ari_bl_check(c, o, batch));
    *run = (ari_bl_run){.c = c, .o = o, .step = 1, .threads = o->kink == NULL ? o->threads : 1};
    run->names = ari_bl_names_of(c->arch);
    const ar_noise_units fp32 = {.product = 0x1p-24, .branch = 0x1p-24, .stream = 0x1p-24, .inner = 0x1p-24};
    if (o->noise_seed == 0)
        return AR_OK;
    run->noise = ari_bl_take(run, 1, 1, sizeof *run->noise);
    AR_TRY(run->memory);
    run->noise->key = ari_stream_key(o->noise_seed, "noise");
    run->noise->unit = is_fp32(&o->noise) ? fp32 : o->noise;
    return AR_OK;
}

static ar_status run_model(ari_bl_run *run, const ar_batch *batch, double *loss)
{
    const size_t steps = run->o->steps > 0 ? (size_t)run->o->steps : 1;
    for (size_t i = 0; i < steps; i++) {
        AR_TRY(ari_bl_check_batch(run->c, run->o, &batch[i]));
        AR_TRY(ari_bl_check_tokens(run->c, &batch[i]));
    }
    double *value = ari_bl_doubles(run, steps, 1); /* *loss is unchanged if a later step fails */
    AR_TRY(run->memory);
    AR_TRY(run_steps(run, batch, value));
    for (size_t i = 0; i < steps; i++)
        loss[i] = value[i];
    return AR_OK;
}

ar_status ar_baseline_run(const ar_config *c, const ar_baseline_options *o, const ar_batch *batch, double *loss)
{
    ari_bl_run run = {0};
    ar_status st = ari_bl_begin(&run, c, o, batch);
    if (st == AR_OK)
        st = loss != NULL ? run_model(&run, batch, loss) : ar_error_set(AR_ERR_ARG, "baseline: loss is NULL");
    ari_bl_release(&run, NULL);
    return st;
}

static ar_status run_block(ari_bl_run *run, const ar_batch *batch, const float *x, const float *dy)
{
    AR_TRY(ari_bl_check_batch(run->c, run->o, batch));
    AR_TRY(ari_bl_enter_step(run, batch, 1));
    const size_t count = run->tokens * run->c->hidden;
    ari_bl_params p = {0};
    ari_bl_block saved;
    AR_TRY(load_block(run, &p, 0));
    double *input = ari_bl_doubles(run, run->tokens, run->c->hidden);
    double *gradient = ari_bl_doubles(run, run->tokens, run->c->hidden);
    AR_TRY(run->memory);
    for (size_t i = 0; i < count; i++)
        input[i] = (double)x[i];
    AR_TRY(ari_bl_block_forward(run, 0, &p, &saved, input));
    if (run->o->forward_only)
        return AR_OK;
    for (size_t i = 0; i < count; i++)
        gradient[i] = (double)dy[i];
    return ari_bl_block_backward(run, 0, &p, gradient, gradient, &saved);
}

ar_status ari_baseline_block(const ar_config *c, const ar_baseline_options *o, const ar_batch *batch, const float *x,
                             const float *dy)
{
    ari_bl_run run = {0};
    ar_status st = ari_bl_begin(&run, c, o, batch);
    if (st == AR_OK && (x == NULL || (dy == NULL && !o->forward_only)))
        st = ar_error_set(AR_ERR_ARG, "baseline: x or dy is NULL");
    if (st == AR_OK)
        st = run_block(&run, batch, x, dy);
    ari_bl_release(&run, NULL);
    return st;
}
