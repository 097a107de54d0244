/* SPDX-License-Identifier: Apache-2.0 */
/* The ends of a model: token and position embedding, LM head, loss. */
#include "ref/baseline/run.h"

#include <stdio.h>

#include "ref/numerics/elementary.h"

/* Returns the token's row, or its gradient, times a factor that is rounded to fp32 once. */
static double scaled(const ari_bl_run *run, double x)
{
    const double factor = (double)(float)run->c->embed_scale;
    return factor > 0.0 ? ari_bl_keep(run, ari_bl_stream(run, x * factor)) : x;
}

ar_status ari_bl_embed(ari_bl_run *run, const ari_bl_model *m, double *x)
{
    const size_t h = run->c->hidden;
    for (size_t t = 0; t < run->tokens; t++)
        for (size_t i = 0; i < h; i++)
            x[t * h + i] = scaled(run, m->embed[m->ids[t] * h + i]);
    AR_TRY(ari_bl_emit_tokens(run, run->names->embed, 'f', x, h, 0, h));
    if (m->positions == NULL)
        return AR_OK;
    for (size_t t = 0; t < run->tokens; t++)
        for (size_t i = 0, position = ari_bl_position(run->batch, t / run->s, t % run->s); i < h; i++)
            x[t * h + i] = ari_bl_keep(run, ari_bl_stream(run, x[t * h + i] + m->positions[position * h + i]));
    if (run->names->drop_embed != NULL && run->o->dropout > 0.0)
        AR_TRY(ari_bl_dropout(run, run->names->drop_embed, 'f', x, x, 0, h));
    ari_bl_keep_all(run, x, run->tokens * h);
    if (run->names->drop_embed != NULL && run->o->dropout > 0.0)
        return AR_OK;
    return ari_bl_emit_tokens(run, run->names->embedded, 'f', x, h, 0, h);
}

static ar_status table_gradient(ari_bl_run *run, const char *name, size_t rows, const ari_bl_terms *terms)
{
    const size_t h = run->c->hidden;
    ARI_BL_SCOPE(run);
    double *gradient = ari_bl_doubles(run, rows, h);
    AR_TRY(run->memory);
    AR_TRY(ari_bl_gradient(run, gradient, rows, h, terms));
    return ari_bl_emit_gradient(run, name, "weight", rows, h, gradient);
}

ar_status ari_bl_embed_gradients(ari_bl_run *run, const ari_bl_model *m)
{
    if (run->names->drop_embed != NULL && run->o->dropout > 0.0)
        AR_TRY(ari_bl_dropout(run, run->names->drop_embed, 0, m->dx, m->dx, 0, run->c->hidden));
    const size_t h = run->c->hidden;
    ari_bl_terms terms[1 + AR_MAX_MTP];
    for (size_t k = 0; k <= run->c->mtp; k++) {
        const ari_bl_model *model = k == 0 ? m : &m->mtp[k - 1].model;
        ari_bl_keep_all(run, model->dx, run->tokens * h);
        for (size_t i = 0; i < run->tokens * h; i++)
            model->dx[i] = run->c->pads && model->ids[i / h] == run->c->pad_id ? 0.0 : scaled(run, model->dx[i]);
        terms[k] = (ari_bl_terms){
            .values = model->dx, .row_of = model->ids, .stream = true, .next = k < run->c->mtp ? &terms[k + 1] : NULL};
        if (run->names->head != NULL && run->c->tied) { /* all uses of a tied matrix are added to the same sums */
            terms[k].stream = false;
            terms[k].dy = model->dlogits;
            terms[k].ld = run->c->vocab;
            terms[k].x = model->head_x;
        }
    }
    AR_TRY(table_gradient(run, run->names->embed, run->c->vocab, terms));
    if (m->positions == NULL)
        return AR_OK;
    ARI_BL_SCOPE(run);
    size_t *position = ari_bl_take(run, run->tokens, 1, sizeof *position);
    AR_TRY(run->memory);
    for (size_t t = 0; t < run->tokens; t++)
        position[t] = ari_bl_position(run->batch, t / run->s, t % run->s);
    const ari_bl_terms rows = {.values = m->dx, .row_of = position, .stream = true};
    return table_gradient(run, run->names->positions, run->c->max_positions, &rows);
}

/* A row of logits with a target. With e of label smoothing and c of the z-loss, fl32(((1 - e)*(lse - x_target) + e*(lse
 * - mean of x)) + c*lse*lse) is added to the loss; x = fl32(fl32(p*(1 + 2*c*lse) - ((1 - e)*onehot + e/V))/T). */
static void cross_entropy_row(const ari_bl_run *run, ari_bl_sums *loss, double *x, double *p, size_t target, double t)
{
    const size_t v = run->c->vocab;
    const double e = run->o->loss.label_smoothing, c = run->o->loss.z_loss;
    double m, l;
    ari_bl_softmax(run, p, x, NULL, v, &m, &l);
    const double lse = m + ari_log64(l);
    const double mean = e > 0.0 ? ari_bl_row_sum(run, x, v) / (double)v : 0.0;
    const double labels = (1.0 - e) * (lse - x[target]) + e * (lse - mean);
    const double term = ari_bl_fl(run, labels + c * lse * lse);
    ari_bl_sums_add(loss, 0, &term, 1);
    for (size_t i = 0; i < v; i++) {
        const double label = (i == target ? 1.0 - e : 0.0) + e / (double)v;
        x[i] = ari_bl_keep(run, ari_bl_branch(run, ari_bl_fl(run, p[i] * (1.0 + 2.0 * c * lse) - label) / t));
    }
}

/* Logits in m->dlogits become their gradient. */
static ar_status cross_entropy(ari_bl_run *run, ari_bl_model *m, double *loss)
{
    ARI_BL_SCOPE(run);
    const size_t v = run->c->vocab;
    double *p = ari_bl_doubles(run, 1, v);
    ari_bl_sums sums;
    AR_TRY(run->memory);
    AR_TRY(ari_bl_sums_open(run, &sums, 1, false));
    const double share = run->share > 0.0 ? run->share : 1.0;
    size_t targets = 0;
    for (size_t t = 0; t < run->tokens; t++)
        targets += ari_bl_target(run->batch, t / run->s, t % run->s) != AR_IGNORE_INDEX;
    for (size_t t = 0; t < run->tokens; t++) {
        const int64_t target = ari_bl_target(run->batch, t / run->s, t % run->s);
        double *row = m->dlogits + t * v;
        if (target != AR_IGNORE_INDEX)
            cross_entropy_row(run, &sums, row, p, (size_t)target, (double)targets / share);
        else
            for (size_t i = 0; i < v; i++)
                row[i] = 0.0;
    }
    const double mean = ari_bl_sums_value(&sums, 0) / (double)targets;
    if (run->share > 0.0)
        *loss = targets == 0 ? 0.0 : share * mean;
    else
        *loss = targets == 0 ? (double)ari_nan32() : ari_bl_fl(run, mean);
    return AR_OK;
}

static ar_status emit_of_head(ari_bl_run *run, const char *part, char pass, const double *logits)
{
    char name[200];
    snprintf(name, sizeof name, "%s.%s", run->names->head, part);
    return ari_bl_emit_tokens(run, name, pass, logits, run->c->vocab, 0, run->c->vocab);
}

/* Caps the logits; the uncapped ones are kept in m->bare. */
static ar_status cap_logits(ari_bl_run *run, ari_bl_model *m)
{
    for (size_t i = 0; i < run->tokens * run->c->vocab; i++) {
        m->bare[i] = m->dlogits[i];
        m->dlogits[i] = ari_bl_keep(run, ari_bl_branch(run, ari_bl_cap(m->bare[i], run->c->logit_cap)));
    }
    return emit_of_head(run, "capped", 'f', m->dlogits);
}

/* Logits become their products with the factor, or gradients of those the gradients of logits. */
static void scale_logits(ari_bl_run *run, const ari_bl_model *m)
{
    const double factor = ari_bl_stored(run, run->c->logit_scale);
    for (size_t i = 0; i < run->tokens * run->c->vocab; i++)
        m->dlogits[i] = ari_bl_keep(run, ari_bl_branch(run, m->dlogits[i] * factor));
}

/* Handles a model without a head: the loss is the sum of all elements of its output. */
static ar_status output_sum(ari_bl_run *run, const ari_bl_model *m, double *loss)
{
    ARI_BL_SCOPE(run);
    ari_bl_sums sums;
    AR_TRY(ari_bl_sums_open(run, &sums, 1, false));
    for (size_t i = 0; i < run->tokens * run->c->hidden; i++)
        ari_bl_sums_add(&sums, 0, &m->head_x[i], 1);
    *loss = ari_bl_sums_value(&sums, 0);
    return AR_OK;
}

ar_status ari_bl_logits(ari_bl_run *run, ari_bl_model *m, double *loss)
{
    const size_t v = run->c->vocab;
    AR_TRY(ari_bl_linear_forward(run, &m->head, m->dlogits, m->head_x, run->tokens));
    AR_TRY(ari_bl_emit_tokens(run, run->names->head, 'f', m->dlogits, v, 0, v));
    if (run->c->logit_cap > 0.0)
        AR_TRY(cap_logits(run, m));
    if (run->c->logit_scale > 0.0) {
        scale_logits(run, m);
        AR_TRY(emit_of_head(run, "scaled", 'f', m->dlogits));
    }
    return cross_entropy(run, m, loss);
}

ar_status ari_bl_loss_forward(ari_bl_run *run, ari_bl_model *m, double *loss)
{
    double of_routers = 0.0, further = 0.0;
    AR_TRY(run->names->head != NULL ? ari_bl_logits(run, m, loss) : output_sum(run, m, loss));
    AR_TRY(ari_bl_mtp_forward(run, m, &further));
    AR_TRY(ari_bl_balance_add(run, &of_routers));
    *loss = ari_bl_fl(run, *loss + (of_routers + further));
    return ari_bl_emit(run, "loss", 'f', 0, NULL, loss);
}

ar_status ari_bl_loss_backward(ari_bl_run *run, const ari_bl_model *m, double *dx)
{
    const size_t h = run->c->hidden, v = run->c->vocab;
    if (run->names->head == NULL) {
        for (size_t i = 0; i < run->tokens * h; i++)
            dx[i] = 1.0;
        return AR_OK;
    }
    if (run->c->logit_cap > 0.0) {
        AR_TRY(emit_of_head(run, "capped", 'b', m->dlogits));
        for (size_t i = 0; i < run->tokens * v; i++)
            m->dlogits[i] =
                ari_bl_keep(run, ari_bl_branch(run, ari_bl_uncap(m->dlogits[i], m->bare[i], run->c->logit_cap)));
    }
    if (run->c->logit_scale > 0.0) {
        AR_TRY(emit_of_head(run, "scaled", 'b', m->dlogits));
        scale_logits(run, m);
    }
    AR_TRY(emit_of_head(run, "logits", 'b', m->dlogits));
    AR_TRY(ari_bl_linear_backward(run, &m->head, dx, m->dlogits, run->tokens));
    return ari_bl_emit_tokens(run, run->names->head, 'b', dx, h, 0, h);
}

ar_status ari_bl_head_gradient(ari_bl_run *run, const ari_bl_model *m)
{
    ari_bl_terms terms[1 + AR_MAX_MTP];
    if (run->names->head == NULL || run->c->tied)
        return AR_OK;
    for (size_t k = 0; k <= run->c->mtp; k++) {
        const ari_bl_model *model = k == 0 ? m : &m->mtp[k - 1].model;
        terms[k] = (ari_bl_terms){.dy = model->dlogits,
                                  .ld = run->c->vocab,
                                  .x = model->head_x,
                                  .next = k < run->c->mtp ? &terms[k + 1] : NULL};
    }
    return table_gradient(run, run->names->head, run->c->vocab, terms);
}
