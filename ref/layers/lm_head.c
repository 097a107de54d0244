/* SPDX-License-Identifier: Apache-2.0 */
/* LM head and vocab-parallel cross-entropy: the logits stay sharded; what crosses ranks is a maximum, an integer sum
 * and the target's logit per token. */
#include <math.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "ref/layers/linear.h"
#include "ref/layers/loss.h"
#include "ref/layers/parts.h"

struct ar_lm_head {
    size_t vocab, h;
    size_t rows;         /* logits of this rank */
    size_t start, owned; /* its ids */
    char name[96];
    ari_linear linear;
    ari_loss loss;
};

enum { SAVED_LOGITS, SAVED_KEY, SAVED_SUM, SAVED_TARGET_ROWS, SAVED_VALID };

ar_status ar_lm_head_create(ar_lm_head **gives, ar_ctx *ctx, const char *name, size_t vocab, size_t h, ar_param *tied)
{
    ar_lm_head *l = NULL;
    AR_TRY(ari_alloc_zero((void **)&l, 1, sizeof *l, name));
    l->vocab = vocab;
    l->h = h;
    ari_own_ids(ctx, vocab, &l->start, &l->owned);
    const ari_linear_spec spec = {.style = ARI_COLUMN,
                                  .n = 1,
                                  .part = {{.name = name, .out = vocab, .tied = tied}},
                                  .in = h,
                                  .uneven = true,
                                  .sequence = ari_ctx_sp(ctx)};
    ar_status st = AR_OK;
    AR_TRY_TO(failed, st, ari_path(l->name, sizeof l->name, name, NULL));
    AR_TRY_TO(failed, st, ari_loss_init(&l->loss, ctx, false));
    AR_TRY_TO(failed, st, ari_linear_init(&l->linear, ctx, &spec));
    l->rows = l->linear.local_total;
    *gives = l;
    return AR_OK;
failed:
    ari_loss_fini(&l->loss);
    free(l);
    return st;
}

void ar_lm_head_destroy(ar_lm_head *l)
{
    if (!l)
        return;
    ari_linear_fini(&l->linear);
    ari_loss_fini(&l->loss);
    free(l);
}

ar_param *ar_lm_head_weight(ar_lm_head *l)
{
    return l->linear.weight[0];
}

/* Position s predicts labels[s+1] of its own sample; the last one and AR_IGNORE_INDEX predict nothing. */
typedef struct target_rows {
    ar_tensor row_of; /* int64 [n]: local row of the target, -1 where another rank holds it */
    ar_tensor valid;  /* u8 [n] */
} target_rows;

static ar_status host_targets(const ar_lm_head *l, const ar_batch *batch, int64_t *ids, uint8_t *valid)
{
    const int64_t *labels = batch->labels ? batch->labels : batch->input_ids;
    for (size_t i = 0; i < batch->batch * batch->seq; i++) {
        const bool last = i % batch->seq + 1 == batch->seq;
        ids[i] = last ? AR_IGNORE_INDEX : labels[i + 1];
        valid[i] = ids[i] != AR_IGNORE_INDEX;
        if (valid[i] && (ids[i] < 0 || (size_t)ids[i] >= l->vocab))
            return ar_error_set(AR_ERR_DATA, "labels[%zu, %zu] is %lld, neither an id below %zu nor %d", i / batch->seq,
                                i % batch->seq + 1, (long long)ids[i], l->vocab, AR_IGNORE_INDEX);
    }
    return AR_OK;
}

static ar_status make_targets(ar_lm_head *l, ar_ctx *ctx, target_rows *t, const ar_batch *batch)
{
    const size_t n = batch->batch * batch->seq;
    /* A mistake moves the range by one: the first id of the next shard counts as this one's. */
    const bool off = ar_faulty(ctx, AR_FAULT_vocab_target_off_by_shard) && ar_comm_size(ctx->tp) > 1;
    int64_t *ids = NULL;
    uint8_t *valid = NULL;
    ar_tensor device_ids;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ari_alloc((void **)&ids, n, sizeof *ids, "targets"));
    AR_TRY_TO(done, st, ari_alloc((void **)&valid, n, sizeof *valid, "targets"));
    AR_TRY_TO(done, st, host_targets(l, batch, ids, valid));
    for (size_t i = 0; off && i < n; i++) {
        const int64_t edge = (int64_t)(l->start + l->owned), first = (int64_t)l->start;
        ids[i] = ids[i] == edge && l->owned > 0 ? edge - 1 : ids[i] == first && first > 0 ? AR_IGNORE_INDEX : ids[i];
    }
    AR_TRY_TO(done, st, ar_ctx_tensor(ctx, &device_ids, AR_I64, 1, &n));
    AR_TRY_TO(done, st, ar_ctx_tensor(ctx, &t->row_of, AR_I64, 1, &n));
    AR_TRY_TO(done, st, ar_ctx_tensor(ctx, &t->valid, AR_U8, 1, &n));
    AR_TRY_TO(done, st, ar_ctx_upload(ctx, &device_ids, ids));
    AR_TRY_TO(done, st, ar_ctx_upload(ctx, &t->valid, valid));
    AR_TRY_TO(done, st,
              ctx->device->ops->rows_in_range(ctx->device, ctx->queue, t->row_of.data, ar_const(device_ids.data), n,
                                              (int64_t)l->start, (int64_t)l->owned));
    ar_ctx_release(ctx, &device_ids);
done:
    free(ids);
    free(valid);
    return st;
}

static ar_status cross_entropy(ar_lm_head *l, ar_ctx *ctx, ar_saved *saved, const ar_tensor *logits,
                               const ar_batch *batch)
{
    const ar_device_ops *dev = ctx->device->ops;
    const size_t n = batch->batch * batch->seq;
    ar_tensor key, sum, bits, terms;
    target_rows t;
    AR_TRY(make_targets(l, ctx, &t, batch));
    AR_TRY(ar_ctx_tensor(ctx, &key, AR_I32, 1, &n));
    AR_TRY(ar_ctx_tensor(ctx, &sum, AR_I64, 1, &n));
    AR_TRY(ar_ctx_tensor(ctx, &bits, AR_I32, 1, &n));
    AR_TRY(ar_ctx_tensor(ctx, &terms, AR_F32, 1, &n));
    AR_TRY(dev->ce_max(ctx->device, ctx->queue, key.data, ar_const(logits->data), n, l->rows));
    const bool one_less = ar_faulty(ctx, AR_FAULT_collective_size_mismatch) && ar_comm_rank(ctx->tp) == 1;
    if (!ar_faulty(ctx, AR_FAULT_loss_parallel_no_max))
        AR_TRY(ar_comm_all_reduce(ctx->tp, ctx->queue, key.data, ar_const(key.data), one_less ? n - 1 : n, AR_I32,
                                  AR_MAX, "loss max"));
    AR_TRY(dev->ce_sum(ctx->device, ctx->queue, sum.data, ar_const(logits->data), ar_const(key.data), n, l->rows,
                       l->vocab));
    AR_TRY(ar_comm_all_reduce(ctx->tp, ctx->queue, sum.data, ar_const(sum.data), n, AR_I64, AR_SUM, "loss sum"));
    AR_TRY(dev->ce_target(ctx->device, ctx->queue, bits.data, ar_const(logits->data), ar_const(t.row_of.data), n,
                          l->rows));
    AR_TRY(ar_comm_all_reduce(ctx->tp, ctx->queue, bits.data, ar_const(bits.data), n, AR_I32, AR_SUM, "loss target"));
    AR_TRY(dev->ce_terms(ctx->device, ctx->queue, terms.data, ar_const(key.data), ar_const(sum.data),
                         ar_const(bits.data), ar_const(t.valid.data), n, l->vocab));
    AR_TRY(ari_loss_add(&l->loss, ctx, &terms));
    AR_TRY(ar_saved_push(saved, l, SAVED_KEY, &key));
    AR_TRY(ar_saved_push(saved, l, SAVED_SUM, &sum));
    AR_TRY(ar_saved_push(saved, l, SAVED_TARGET_ROWS, &t.row_of));
    return ar_saved_push(saved, l, SAVED_VALID, &t.valid);
}

ar_status ar_lm_head_zero(ar_lm_head *l, ar_ctx *ctx)
{
    return ari_loss_zero(&l->loss, ctx);
}

ar_status ar_lm_head_loss(ar_lm_head *l, ar_ctx *ctx, float *loss, size_t targets)
{
    return ari_loss_value(&l->loss, ctx, loss, (double)targets);
}

/* A mistake: the rows of ids that belong to nobody have no logits, so they take no part in the softmax. */
static ar_status truncate_logits(const ar_lm_head *l, ar_ctx *ctx, const ar_tensor *logits)
{
    const ar_tensor rows = ar_tensor_rows(logits);
    const ar_tensor lost = ar_tensor_slice(&rows, 1, l->owned, l->rows - l->owned);
    ar_tensor nothing;
    AR_TRY(ar_ctx_tensor(ctx, &nothing, AR_F32, 2, lost.shape));
    AR_TRY(ctx->device->ops->fill(ctx->device, ctx->queue, nothing.data, -INFINITY, ar_tensor_count(&nothing)));
    return ctx->device->ops->copy_strided(ctx->device, ctx->queue, &lost, &nothing);
}

ar_status ar_lm_head_forward(ar_lm_head *l, ar_ctx *ctx, ar_saved *saved, const ar_tensor *x, const ar_batch *batch)
{
    ar_tensor logits;
    ar_ctx_place(ctx, batch);
    AR_TRY(ari_linear_forward(&l->linear, ctx, saved, &logits, x, AR_ACT_NONE, NULL));
    if (saved)
        ar_param_use(l->linear.weight[0]);
    if (ar_faulty(ctx, AR_FAULT_silent_truncation))
        AR_TRY(truncate_logits(l, ctx, &logits));
    AR_TRY(ari_tap_shard(ctx, l->name, NULL, 'f', &logits, 2, l->vocab));
    AR_TRY(cross_entropy(l, ctx, saved, &logits, batch));
    return ar_saved_push(saved, l, SAVED_LOGITS, &logits);
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
    const size_t n = batch->batch * batch->seq;
    const size_t targets = batch->global_batch > 0 ? batch->targets : ar_batch_targets(batch);
    ar_tensor logits, key, sum, row_of, valid, dlogits;
    ar_ctx_place(ctx, batch);
    AR_TRY(ar_saved_pop(saved, l, SAVED_LOGITS, &logits));
    AR_TRY(ar_saved_pop(saved, l, SAVED_VALID, &valid));
    AR_TRY(ar_saved_pop(saved, l, SAVED_TARGET_ROWS, &row_of));
    AR_TRY(ar_saved_pop(saved, l, SAVED_SUM, &sum));
    AR_TRY(ar_saved_pop(saved, l, SAVED_KEY, &key));
    AR_TRY(ari_like(ctx, &dlogits, &logits, l->rows));
    AR_TRY(ctx->device->ops->ce_backward(ctx->device, ctx->queue, dlogits.data, ar_const(logits.data),
                                         ar_const(key.data), ar_const(sum.data), ar_const(row_of.data),
                                         ar_const(valid.data), (double)targets, n, l->rows, l->vocab));
    char part[112];
    AR_TRY(ari_path(part, sizeof part, l->name, "logits"));
    AR_TRY(ari_tap_shard(ctx, part, NULL, 'b', &dlogits, 2, l->vocab));
    AR_TRY(ari_linear_backward(&l->linear, ctx, saved, dx, &dlogits, l->name));
    return ar_param_done(l->linear.weight[0], ctx);
}
