/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/layers/cross_entropy.h"

#include <stdlib.h>

#include "ref/core/size.h"
#include "ref/layers/faults.h"
#include "ref/layers/parts.h"

enum { SAVED_LOGITS, SAVED_KEY, SAVED_SUM, SAVED_TARGET_ROWS, SAVED_VALID };

void ari_cross_entropy_init(ari_cross_entropy *c, ar_ctx *ctx, size_t classes, bool shared)
{
    *c = (ari_cross_entropy){.classes = classes, .owned = classes, .over = shared ? ctx->tp : NULL};
    if (shared)
        ari_own_ids(ctx, classes, &c->start, &c->owned);
    c->rows = c->owned;
}

typedef struct target_rows {
    ar_tensor row_of; /* int64 [n]: local row of the target, -1 where another rank holds it */
    ar_tensor valid;  /* u8 [n] */
} target_rows;

static ar_status make_targets(const ari_cross_entropy *c, ar_ctx *ctx, target_rows *t, const int64_t *given, size_t n)
{
    int64_t *ids = NULL;
    uint8_t *valid = NULL;
    ar_tensor device_ids;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ari_alloc((void **)&ids, n, sizeof *ids, "targets"));
    AR_TRY_TO(done, st, ari_alloc((void **)&valid, n, sizeof *valid, "targets"));
    for (size_t i = 0; i < n; i++) {
        ids[i] = given[i];
        valid[i] = given[i] != AR_IGNORE_INDEX;
    }
    ari_fault_targets_at_edge(ctx, c, ids, n);
    AR_TRY_TO(done, st, ar_ctx_tensor(ctx, &device_ids, AR_I64, 1, &n));
    AR_TRY_TO(done, st, ar_ctx_tensor(ctx, &t->row_of, AR_I64, 1, &n));
    AR_TRY_TO(done, st, ar_ctx_tensor(ctx, &t->valid, AR_U8, 1, &n));
    AR_TRY_TO(done, st, ar_ctx_upload(ctx, &device_ids, ids));
    AR_TRY_TO(done, st, ar_ctx_upload(ctx, &t->valid, valid));
    AR_TRY_TO(done, st,
              ctx->device->ops->rows_in_range(ctx->device, ctx->queue, t->row_of.data, ar_const(device_ids.data), n,
                                              (int64_t)c->start, (int64_t)c->owned));
    ar_ctx_release(ctx, &device_ids);
done:
    free(ids);
    free(valid);
    return st;
}

static ar_status over_ranks(const ari_cross_entropy *c, ar_ctx *ctx, const ar_tensor *t, size_t count, ar_op op,
                            const char *tag)
{
    if (!c->over)
        return AR_OK;
    return ar_comm_all_reduce(c->over, ctx->queue, t->data, ar_const(t->data), count, t->dtype, op, tag);
}

ar_status ari_cross_entropy_forward(ari_cross_entropy *c, ar_ctx *ctx, ar_saved *saved, ar_tensor *terms,
                                    const ar_tensor *logits, const int64_t *ids, size_t n)
{
    const ar_device_ops *dev = ctx->device->ops;
    ar_tensor key, sum, bits;
    target_rows t;
    AR_TRY(make_targets(c, ctx, &t, ids, n));
    AR_TRY(ar_ctx_tensor(ctx, &key, AR_I32, 1, &n));
    AR_TRY(ar_ctx_tensor(ctx, &sum, AR_I64, 1, &n));
    AR_TRY(ar_ctx_tensor(ctx, &bits, AR_I32, 1, &n));
    AR_TRY(ar_ctx_tensor(ctx, terms, AR_F32, 1, &n));
    AR_TRY(dev->ce_max(ctx->device, ctx->queue, key.data, ar_const(logits->data), n, c->rows));
    if (!ar_faulty(ctx, AR_FAULT_loss_parallel_no_max))
        AR_TRY(over_ranks(c, ctx, &key, ari_fault_token_count(ctx, n), AR_MAX, "loss max"));
    AR_TRY(dev->ce_sum(ctx->device, ctx->queue, sum.data, ar_const(logits->data), ar_const(key.data), n, c->rows,
                       c->classes));
    AR_TRY(over_ranks(c, ctx, &sum, n, AR_SUM, "loss sum"));
    AR_TRY(dev->ce_target(ctx->device, ctx->queue, bits.data, ar_const(logits->data), ar_const(t.row_of.data), n,
                          c->rows));
    AR_TRY(over_ranks(c, ctx, &bits, n, AR_SUM, "loss target"));
    AR_TRY(dev->ce_terms(ctx->device, ctx->queue, terms->data, ar_const(key.data), ar_const(sum.data),
                         ar_const(bits.data), ar_const(t.valid.data), n, c->classes));
    AR_TRY(ar_saved_push(saved, c, SAVED_KEY, &key));
    AR_TRY(ar_saved_push(saved, c, SAVED_SUM, &sum));
    AR_TRY(ar_saved_push(saved, c, SAVED_TARGET_ROWS, &t.row_of));
    AR_TRY(ar_saved_push(saved, c, SAVED_VALID, &t.valid));
    return ar_saved_push(saved, c, SAVED_LOGITS, logits);
}

ar_status ari_cross_entropy_backward(ari_cross_entropy *c, ar_ctx *ctx, ar_saved *saved, ar_tensor *dlogits,
                                     double targets)
{
    ar_tensor logits, key, sum, row_of, valid;
    AR_TRY(ar_saved_pop(saved, c, SAVED_LOGITS, &logits));
    AR_TRY(ar_saved_pop(saved, c, SAVED_VALID, &valid));
    AR_TRY(ar_saved_pop(saved, c, SAVED_TARGET_ROWS, &row_of));
    AR_TRY(ar_saved_pop(saved, c, SAVED_SUM, &sum));
    AR_TRY(ar_saved_pop(saved, c, SAVED_KEY, &key));
    AR_TRY(ari_like(ctx, dlogits, &logits, c->rows));
    return ctx->device->ops->ce_backward(ctx->device, ctx->queue, dlogits->data, ar_const(logits.data),
                                         ar_const(key.data), ar_const(sum.data), ar_const(row_of.data),
                                         ar_const(valid.data), targets, row_of.shape[0], c->rows, c->classes);
}
