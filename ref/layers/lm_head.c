/* SPDX-License-Identifier: Apache-2.0 */
/* LM head and cross-entropy: the logits stay sharded along the vocabulary, or are gathered, or every rank makes all. */
#include <stdlib.h>

#include "ref/core/size.h"
#include "ref/layers/faults.h"
#include "ref/layers/linear.h"
#include "ref/layers/loss.h"
#include "ref/layers/parts.h"
#include "ref/placement/axis.h"

struct ar_lm_head {
    ar_head_split split;
    char name[96];
    ari_linear linear;
    ari_cross_entropy entropy;
    ar_param loss; /* of which only the gradient is used */
};

ar_status ar_lm_head_create(ar_lm_head **gives, ar_ctx *ctx, ar_head_split split, const char *name, size_t vocab,
                            size_t h, ar_param *tied)
{
    ar_lm_head *l = NULL;
    AR_TRY(ari_alloc_zero((void **)&l, 1, sizeof *l, name));
    const bool whole = split == AR_HEAD_WHOLE;
    const ari_linear_spec spec = {.style = whole ? ARI_WHOLE : ARI_COLUMN,
                                  .n = 1,
                                  .part = {{.name = name, .out = vocab, .tied = tied}},
                                  .in = h,
                                  .uneven = true,
                                  .sequence = ari_ctx_sp(ctx) && !whole};
    ar_status st = AR_OK;
    l->split = split;
    AR_TRY_TO(failed, st, ari_path(l->name, sizeof l->name, name, NULL));
    ari_cross_entropy_init(&l->entropy, ctx, vocab, split == AR_HEAD_VOCAB);
    AR_TRY_TO(failed, st, ari_loss_init(&l->loss, ctx, false));
    AR_TRY_TO(failed, st, ari_linear_init(&l->linear, ctx, &spec));
    if (split == AR_HEAD_VOCAB)
        l->entropy.rows = l->linear.local_total;
    *gives = l;
    return AR_OK;
failed:
    ar_param_fini(&l->loss);
    free(l);
    return st;
}

void ar_lm_head_destroy(ar_lm_head *l)
{
    if (!l)
        return;
    ari_linear_fini(&l->linear);
    ar_param_fini(&l->loss);
    free(l);
}

ar_param *ar_lm_head_weight(ar_lm_head *l)
{
    return l->linear.weight[0];
}

/* Position s predicts labels[s+1] of its own sample; the last one and AR_IGNORE_INDEX predict nothing. */
static ar_status next_labels(const ar_lm_head *l, const ar_batch *batch, int64_t *ids)
{
    const int64_t *labels = batch->labels ? batch->labels : batch->input_ids;
    const size_t vocab = l->entropy.classes;
    for (size_t i = 0; i < batch->batch * batch->seq; i++) {
        const bool last = i % batch->seq + 1 == batch->seq;
        ids[i] = last ? AR_IGNORE_INDEX : labels[i + 1];
        if (ids[i] != AR_IGNORE_INDEX && (ids[i] < 0 || (size_t)ids[i] >= vocab))
            return ar_error_set(AR_ERR_DATA, "labels[%zu, %zu] is %lld, neither an id below %zu nor %d", i / batch->seq,
                                i % batch->seq + 1, (long long)ids[i], vocab, AR_IGNORE_INDEX);
    }
    return AR_OK;
}

static ar_status add_terms(ar_lm_head *l, ar_ctx *ctx, ar_saved *saved, const ar_tensor *logits, const ar_batch *batch)
{
    const size_t n = batch->batch * batch->seq;
    int64_t *ids = NULL;
    ar_tensor terms;
    AR_TRY(ari_alloc((void **)&ids, n, sizeof *ids, "targets"));
    ar_status st = next_labels(l, batch, ids);
    if (st == AR_OK)
        st = ari_cross_entropy_forward(&l->entropy, ctx, saved, &terms, logits, ids, n);
    if (st == AR_OK)
        st = ari_loss_add(&l->loss, ctx, &terms);
    free(ids);
    AR_TRY(st);
    ar_ctx_release(ctx, &terms);
    return AR_OK;
}

ar_status ar_lm_head_zero(ar_lm_head *l, ar_ctx *ctx)
{
    return ar_param_zero_grad(&l->loss, ctx);
}

ar_status ar_lm_head_loss(ar_lm_head *l, ar_ctx *ctx, float *loss, size_t targets)
{
    return ari_loss_value(&l->loss, ctx, loss, (double)targets);
}

/* --- forward and backward ------------------------------------------------------------------------------------------ */

/* A whole head takes all positions, though others hold the own ones. */
static bool gathers(const ar_lm_head *l, const ar_ctx *ctx)
{
    return ari_ctx_sp(ctx) && l->split == AR_HEAD_WHOLE;
}

/* Shards of the vocabulary, uneven where it does not divide, from all ranks. */
static ar_status gather_logits(const ar_lm_head *l, ar_ctx *ctx, ar_tensor *logits)
{
    ar_tensor own = *logits;
    if (l->split != AR_HEAD_GATHER)
        return AR_OK;
    AR_TRY(ari_like(ctx, logits, &own, l->entropy.classes));
    const ari_axis a = ari_axis_of(3, logits->shape, 2, ar_comm_size(ctx->tp));
    AR_TRY(ari_axis_gather(ctx, ctx->tp, logits->data, ar_const(own.data), &a, AR_F32, l->name));
    ar_ctx_release(ctx, &own);
    return AR_OK;
}

static ar_status own_logits(const ar_lm_head *l, ar_ctx *ctx, ar_tensor *dlogits)
{
    ar_tensor all = *dlogits;
    if (l->split != AR_HEAD_GATHER)
        return AR_OK;
    const ari_axis a = ari_axis_of(3, all.shape, 2, ar_comm_size(ctx->tp));
    AR_TRY(ari_like(ctx, dlogits, &all, l->linear.local_total));
    AR_TRY(ari_axis_take(ctx, dlogits->data, ar_const(all.data), &a, ar_comm_rank(ctx->tp), AR_F32));
    ar_ctx_release(ctx, &all);
    return AR_OK;
}

static ar_status tap_logits(const ar_lm_head *l, ar_ctx *ctx, const char *name, char pass, const ar_tensor *t)
{
    return l->split == AR_HEAD_VOCAB ? ari_tap_shard(ctx, name, NULL, pass, t, 2, l->entropy.classes)
                                     : ari_tap_whole(ctx, name, NULL, pass, t);
}

ar_status ar_lm_head_forward(ar_lm_head *l, ar_ctx *ctx, ar_saved *saved, const ar_tensor *x, const ar_batch *batch)
{
    ar_tensor in, logits;
    ar_ctx_place(ctx, batch);
    AR_TRY(ari_all_tokens(ctx, &in, x, gathers(l, ctx), l->name)); /* kept by the layer */
    AR_TRY(ari_linear_forward(&l->linear, ctx, saved, &logits, &in, AR_ACT_NONE, NULL));
    if (saved)
        ar_param_use(l->linear.weight[0]);
    if (l->split == AR_HEAD_VOCAB)
        AR_TRY(ari_fault_logits(ctx, &logits, l->entropy.owned));
    AR_TRY(gather_logits(l, ctx, &logits));
    AR_TRY(tap_logits(l, ctx, l->name, 'f', &logits));
    return add_terms(l, ctx, saved, &logits, batch);
}

size_t ar_batch_targets(const ar_batch *batch)
{
    const int64_t *labels = batch->labels ? batch->labels : batch->input_ids;
    size_t count = 0;
    for (size_t row = 0; row < batch->batch; row++) {
        for (size_t s = 1; s < batch->seq; s++)
            count += labels[row * batch->seq + s] != AR_IGNORE_INDEX;
    }
    return count;
}

ar_status ar_lm_head_backward(ar_lm_head *l, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_batch *batch)
{
    const size_t targets = batch->global_batch > 0 ? batch->targets : ar_batch_targets(batch);
    ar_tensor dlogits, whole;
    ar_ctx_place(ctx, batch);
    AR_TRY(ari_cross_entropy_backward(&l->entropy, ctx, saved, &dlogits, (double)targets / ctx->loss_scale, true));
    char part[112];
    AR_TRY(ari_path(part, sizeof part, l->name, "logits"));
    AR_TRY(tap_logits(l, ctx, part, 'b', &dlogits));
    AR_TRY(own_logits(l, ctx, &dlogits));
    AR_TRY(ari_linear_backward(&l->linear, ctx, saved, &whole, &dlogits, l->name));
    ar_ctx_release(ctx, &dlogits);
    AR_TRY(ari_only_own_tokens(ctx, dx, &whole, gathers(l, ctx)));
    return ar_param_done(l->linear.weight[0], ctx);
}
