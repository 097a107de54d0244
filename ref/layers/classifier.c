/* SPDX-License-Identifier: Apache-2.0 */
/* Softmax cross-entropy with one label for each row of logits. */
#include <stdlib.h>

#include "anyrank/loss.h"
#include "ref/core/size.h"
#include "ref/layers/cross_entropy.h"
#include "ref/layers/parts.h"

typedef struct classifier {
    char name[112]; /* of the logits */
    bool sharded;
    ari_cross_entropy loss;
} classifier;

static size_t labels_of(const ar_batch *batch)
{
    return batch->batch * batch->seq;
}

static size_t targets(const void *self, const ar_batch *batch)
{
    (void)self;
    size_t count = 0;
    for (size_t i = 0; batch->labels && i < labels_of(batch); i++)
        count += batch->labels[i] != AR_IGNORE_INDEX;
    return count;
}

static ar_status check(const classifier *c, const ar_tensor *y, const ar_batch *batch)
{
    AR_TRY(ari_check_features(c->name, "logits", y, c->loss.rows));
    const size_t rows = ar_tensor_rows(y).shape[0], n = batch->labels ? labels_of(batch) : 0;
    if (rows != n)
        return ar_error_set(AR_ERR_SHAPE,
                            "%s: %zu rows and %zu labels (batch %zu x seq %zu), expected one for each row", c->name,
                            rows, n, batch->batch, batch->seq);
    for (size_t i = 0; i < n; i++) {
        const int64_t label = batch->labels[i];
        if (label != AR_IGNORE_INDEX && (label < 0 || (size_t)label >= c->loss.classes))
            return ar_error_set(AR_ERR_DATA, "%s: labels[%zu, %zu] is %lld, neither a class below %zu nor %d", c->name,
                                i / batch->seq, i % batch->seq, (long long)label, c->loss.classes, AR_IGNORE_INDEX);
    }
    return AR_OK;
}

static ar_status forward(void *self, ar_loss *loss, ar_ctx *ctx, ar_saved *saved, const ar_tensor *y,
                         const ar_batch *batch)
{
    classifier *c = self;
    ar_tensor terms;
    AR_TRY(check(c, y, batch));
    AR_TRY(ari_cross_entropy_forward(&c->loss, ctx, saved, &terms, y, batch->labels, labels_of(batch)));
    return ar_loss_add(loss, ctx, &terms);
}

static ar_status backward(void *self, ar_loss *loss, ar_ctx *ctx, ar_saved *saved, ar_tensor *dy, const ar_batch *batch,
                          double t)
{
    (void)loss, (void)batch;
    classifier *c = self;
    AR_TRY(ari_cross_entropy_backward(&c->loss, ctx, saved, dy, t));
    return ar_tap_value(ctx, c->name, 'b', dy, c->sharded ? AR_HELD_SHARD : AR_HELD_WHOLE);
}

ar_status ar_cross_entropy_create(ar_loss **gives, ar_ctx *ctx, const char *name, size_t classes, ar_held held)
{
    static const ar_loss_ops ops = {
        .kind = "cross_entropy", .targets = targets, .forward = forward, .backward = backward, .destroy = free};
    const size_t ranks = (size_t)ar_comm_size(ctx->tp);
    classifier *c = NULL;
    ar_status st = AR_OK;
    if (held == AR_HELD_UNTOLD || classes < 1)
        return ar_error_set(
            AR_ERR_ARG,
            "%s: cross-entropy of %zu classes needs at least one, and to know whether the logits are whole or a shard",
            name, classes);
    if (held == AR_HELD_SHARD && classes % ranks != 0)
        return ar_error_set(AR_ERR_INDIVISIBLE, "%s: %zu classes cannot be split over %zu ranks", name, classes, ranks);
    AR_TRY(ari_alloc_zero((void **)&c, 1, sizeof *c, name));
    c->sharded = held == AR_HELD_SHARD;
    AR_TRY_TO(failed, st, ari_path(c->name, sizeof c->name, name, "logits"));
    ari_cross_entropy_init(&c->loss, ctx, classes, c->sharded);
    return ar_loss_create(gives, ctx, name, &ops, c);
failed:
    free(c);
    return st;
}
