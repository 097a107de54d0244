/* SPDX-License-Identifier: Apache-2.0 */
/* Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, equations 21 to 25, with the order of its weights). For depth
 * d = 1 .. D and token i within its document:
 *
 *   h_d = norm(block(M [norm(Emb(t_(i+d))) | norm(h_(d-1))])), h_0 = the final norm's output
 *   loss += w/D * (sum over i of the cross-entropy of head(h_d) and t_(i+d+1)) / (number of such targets)
 *
 * Beyond the end of a document t is id 0 and there is no target. Embedding and head are the model's. */
#include "ref/baseline/run.h"

#include <stdio.h>
#include <string.h>

/* The names of a depth's values, under its block's. */
typedef struct mtp_scope {
    const ari_bl_names *names;
    const ar_batch *batch;
    double share;
    ari_bl_names depth_names;
} mtp_scope;

static void enter(ari_bl_run *run, mtp_scope *s, const ari_bl_mtp *d)
{
    *s = (mtp_scope){.names = run->names, .batch = run->batch, .share = run->share, .depth_names = *run->names};
    s->depth_names.head = "shared_head.head";
    s->depth_names.embed = "embed_tokens";
    snprintf(run->prefix, sizeof run->prefix, "%s.%zu", run->names->blocks, d->layer);
    run->names = &s->depth_names;
    run->batch = &d->batch;
    run->share = run->c->mtp_weight / (double)run->c->mtp;
}

static void leave(ari_bl_run *run, const mtp_scope *s)
{
    run->names = s->names;
    run->batch = s->batch;
    run->share = s->share;
    run->prefix[0] = '\0';
}

ar_status ari_bl_load_mtp(ari_bl_run *run, ari_bl_model *m)
{
    const size_t h = run->c->hidden, width[3] = {h, 0, 0};
    static const char *const joined[3] = {"eh_proj", NULL, NULL};
    m->mtp = ari_bl_take(run, run->c->mtp, 1, sizeof *m->mtp);
    AR_TRY(run->memory);
    for (size_t i = 0; i < run->c->mtp; i++) {
        ari_bl_mtp *d = &m->mtp[i];
        d->layer = run->c->layers + i;
        snprintf(run->prefix, sizeof run->prefix, "%s.%zu", run->names->blocks, d->layer);
        AR_TRY(ari_bl_load_norm(run, &d->tokens_norm, "enorm", h, 1));
        AR_TRY(ari_bl_load_norm(run, &d->entered_norm, "hnorm", h, 1));
        AR_TRY(ari_bl_load_linear(run, &d->joined, 2 * h, joined, width, false));
        AR_TRY(ari_bl_load_block(run, &d->block, d->layer));
        AR_TRY(ari_bl_load_norm(run, &d->made_norm, "shared_head.norm", h, 1));
        run->prefix[0] = '\0';
    }
    return AR_OK;
}

/* The batch `shift` places further on. */
static ar_status roll(ari_bl_run *run, ari_bl_mtp *d, size_t shift)
{
    const ar_batch *b = run->batch;
    const int64_t *labels = b->labels != NULL ? b->labels : b->input_ids;
    int64_t *ids = ari_bl_take(run, run->tokens, 1, sizeof *ids),
            *targets = ari_bl_take(run, run->tokens, 1, sizeof *targets);
    d->model.ids = ari_bl_take(run, run->tokens, 1, sizeof *d->model.ids);
    AR_TRY(run->memory);
    for (size_t t = 0; t < run->tokens; t++) {
        const size_t place = t % run->s + shift;
        const bool is_past_end = place >= run->s,
                   is_separate = !is_past_end && ari_bl_in_different_documents(b, t / run->s, t % run->s, place);
        ids[t] = is_past_end || is_separate ? 0 : b->input_ids[t + shift];
        targets[t] = is_past_end || (is_separate && !b->targets_cross) ? AR_IGNORE_INDEX : labels[t + shift];
        d->model.ids[t] = (size_t)ids[t];
    }
    d->batch = *b;
    d->batch.input_ids = ids;
    d->batch.labels = targets;
    return AR_OK;
}

ar_status ari_bl_take_mtp(ari_bl_run *run, ari_bl_model *m)
{
    for (size_t i = 0; i < run->c->mtp; i++) {
        ari_bl_mtp *d = &m->mtp[i];
        d->model = (ari_bl_model){.embed = m->embed, .head = m->head};
        AR_TRY(roll(run, d, i + 1));
        d->model.head.name[0] = "shared_head.head";
        d->model.head_x = ari_bl_doubles(run, run->tokens, run->c->hidden);
        d->model.dx = ari_bl_doubles(run, run->tokens, run->c->hidden);
        d->model.dlogits = ari_bl_doubles(run, run->tokens, run->c->vocab);
        if (run->c->logit_cap > 0.0)
            d->model.bare = ari_bl_doubles(run, run->tokens, run->c->vocab);
        AR_TRY(run->memory);
    }
    return AR_OK;
}

/* Multiplies the two norms' outputs, side by side, by the matrix, and runs the block. */
static ar_status forward_one(ari_bl_run *run, ari_bl_mtp *d, const double *entered, double *loss)
{
    const size_t h = run->c->hidden;
    mtp_scope s;
    double *rows = ari_bl_doubles(run, run->tokens, h), *z = ari_bl_doubles(run, run->tokens, h), part = 0.0;
    d->concat = ari_bl_doubles(run, run->tokens, 2 * h);
    AR_TRY(run->memory);
    enter(run, &s, d);
    AR_TRY(ari_bl_embed(run, &d->model, rows));
    AR_TRY(ari_bl_norm_forward(run, &d->tokens_norm, &d->tokens, rows));
    AR_TRY(ari_bl_norm_forward(run, &d->entered_norm, &d->entered, entered));
    for (size_t t = 0; t < run->tokens; t++) {
        memcpy(d->concat + t * 2 * h, d->tokens.y + t * h, h * sizeof *z);
        memcpy(d->concat + (t * 2 + 1) * h, d->entered.y + t * h, h * sizeof *z);
    }
    AR_TRY(ari_bl_linear_forward(run, &d->joined, z, d->concat, run->tokens));
    AR_TRY(ari_bl_emit_tokens(run, d->joined.name[0], 'f', z, h, 0, h));
    AR_TRY(ari_bl_block_forward(run, d->layer, &d->block, &d->saved, z));
    leave(run, &s);
    enter(run, &s, d);
    AR_TRY(ari_bl_norm_forward(run, &d->made_norm, &d->output, d->saved.y));
    memcpy(d->model.head_x, d->output.y, run->tokens * h * sizeof *z);
    AR_TRY(ari_bl_logits(run, &d->model, &part));
    *loss += part;
    leave(run, &s);
    return AR_OK;
}

ar_status ari_bl_mtp_forward(ari_bl_run *run, ari_bl_model *m, double *loss)
{
    const double *entered = m->head_x;
    for (size_t i = 0; i < run->c->mtp; i++) {
        AR_TRY(forward_one(run, &m->mtp[i], entered, loss));
        entered = m->mtp[i].model.head_x;
    }
    return AR_OK;
}

/* Turns d->model.dx into the gradient of the rows and dentered into the gradient of the input. dnext is the gradient of
 * this depth's output except for its own head; NULL: none. */
static ar_status backward_one(ari_bl_run *run, ari_bl_mtp *d, double *dentered, const double *dnext)
{
    const size_t h = run->c->hidden;
    ARI_BL_SCOPE(run);
    mtp_scope s;
    double *dmade = ari_bl_doubles(run, run->tokens, h), *dz = ari_bl_doubles(run, run->tokens, h);
    double *dboth = ari_bl_doubles(run, run->tokens, 2 * h), *dtokens = ari_bl_doubles(run, run->tokens, h);
    AR_TRY(run->memory);
    enter(run, &s, d);
    AR_TRY(ari_bl_loss_backward(run, &d->model, dmade));
    for (size_t i = 0; dnext != NULL && i < run->tokens * h; i++)
        dmade[i] = ari_bl_keep(run, ari_bl_stream(run, dmade[i] + dnext[i]));
    AR_TRY(ari_bl_norm_backward(run, &d->made_norm, dz, NULL, NULL, dmade, &d->output));
    AR_TRY(ari_bl_norm_gradients(run, &d->made_norm, dmade, &d->output));
    AR_TRY(ari_bl_block_backward(run, d->layer, &d->block, dz, dz, &d->saved));
    leave(run, &s);
    enter(run, &s, d);
    AR_TRY(ari_bl_linear_backward(run, &d->joined, dboth, dz, run->tokens));
    AR_TRY(ari_bl_emit_tokens(run, d->joined.name[0], 'b', dboth, 2 * h, 0, 2 * h));
    AR_TRY(ari_bl_linear_gradients(run, &d->joined, dz, d->concat, NULL));
    for (size_t t = 0; t < run->tokens; t++) {
        memcpy(dtokens + t * h, dboth + t * 2 * h, h * sizeof *dz);
        memcpy(dmade + t * h, dboth + (t * 2 + 1) * h, h * sizeof *dz);
    }
    AR_TRY(ari_bl_norm_backward(run, &d->entered_norm, dentered, NULL, NULL, dmade, &d->entered));
    AR_TRY(ari_bl_norm_gradients(run, &d->entered_norm, dmade, &d->entered));
    AR_TRY(ari_bl_norm_backward(run, &d->tokens_norm, d->model.dx, NULL, NULL, dtokens, &d->tokens));
    AR_TRY(ari_bl_norm_gradients(run, &d->tokens_norm, dtokens, &d->tokens));
    leave(run, &s);
    return AR_OK;
}

ar_status ari_bl_mtp_backward(ari_bl_run *run, const ari_bl_model *m, double *dx)
{
    for (size_t i = run->c->mtp; i-- > 0;)
        AR_TRY(backward_one(run, &m->mtp[i], dx, i + 1 < run->c->mtp ? dx : NULL));
    return AR_OK;
}
