/* SPDX-License-Identifier: Apache-2.0 */
/* LM head and cross-entropy, which works on shards of the logits or on all of them. */
#include <stdlib.h>

#include "ref/core/size.h"
#include "ref/layers/faults.h"
#include "ref/layers/linear/linear.h"
#include "ref/layers/loss.h"

struct ar_lm_head {
    char name[96];
    ari_linear linear;
    ari_cross_entropy entropy;
    ar_param loss; /* of which only the gradient is used */
    double cap;    /* of the logits; 0: none */
    float scale;   /* likewise */
    double weight; /* of its loss in the whole */
};

enum { SAVED_LOGITS };
static const char CAPPED[] = "capped", SCALED[] = "scaled"; /* parts of the head's path */

/* True if the loss works on shards of the logits. */
static bool loss_parallel(const ar_lm_head *l)
{
    return ari_placed_by_features(l->linear.split.to);
}

ar_status ar_lm_head_create(ar_lm_head **gives, ar_ctx *ctx, const ar_linear_split *split, const char *name,
                            size_t vocab, size_t h, ar_param *tied)
{
    ar_lm_head *l = NULL;
    AR_TRY(ari_alloc_zero((void **)&l, 1, sizeof *l, name));
    const ari_linear_spec spec = {
        .split = split ? *split : (ar_linear_split){AR_STYLE_COLWISE, ari_placed_stream(ctx), ari_shard_features},
        .n = 1,
        .part = {{.name = name, .out = vocab, .tied = tied}},
        .in = h,
        .uneven = true};
    ar_status st = AR_OK;
    AR_TRY_TO(failed, st, ari_path(l->name, sizeof l->name, name, NULL));
    AR_TRY_TO(failed, st, ari_loss_init(&l->loss, ctx, false));
    AR_TRY_TO(failed, st, ari_linear_init(&l->linear, ctx, &spec));
    l->weight = 1.0;
    ari_cross_entropy_init(&l->entropy, ctx, vocab, loss_parallel(l));
    if (loss_parallel(l))
        l->entropy.rows = l->linear.output_total;
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

void ar_lm_head_cap(ar_lm_head *l, double cap)
{
    l->cap = cap;
}

ar_param *ar_lm_head_weight(ar_lm_head *l)
{
    return l->linear.weight[0];
}

/* The targets of the own positions. */
static ar_status next_labels(const ar_lm_head *l, const ar_ctx *ctx, const ar_batch *batch, const ar_positions *own,
                             int64_t *ids)
{
    const size_t vocab = l->entropy.classes, n = ar_positions_count(own);
    for (size_t i = 0; i < batch->batch * n; i++) {
        const size_t row = i / n, position = ar_positions_at(own, i % n);
        ids[i] = ari_own_target(ctx, batch, row, own, i % n);
        if (ids[i] != AR_IGNORE_INDEX && (ids[i] < 0 || (size_t)ids[i] >= vocab))
            return ar_error_set(AR_ERR_DATA, "labels[%zu, %zu] is %lld, neither an id below %zu nor %d", row,
                                position + 1, (long long)ids[i], vocab, AR_IGNORE_INDEX);
    }
    return AR_OK;
}

static ar_status add_terms(ar_lm_head *l, ar_ctx *ctx, ar_saved *saved, const ar_tensor *logits, const ar_batch *batch)
{
    const ar_positions own = ari_own_positions(ctx, batch->seq, false);
    const size_t n = batch->batch * ar_positions_count(&own);
    int64_t *ids = NULL;
    ar_tensor terms;
    if (ar_tensor_rows(logits).shape[0] != n)
        return ar_error_set(AR_ERR_SHAPE, "%s: logits of %zu tokens, expected %zu samples of %zu positions", l->name,
                            ar_tensor_rows(logits).shape[0], batch->batch, ar_positions_count(&own));
    AR_TRY(ari_alloc((void **)&ids, n, sizeof *ids, "targets"));
    ar_status st = next_labels(l, ctx, batch, &own, ids);
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

ar_status ar_lm_head_loss(ar_lm_head *l, ar_ctx *ctx, float *loss, size_t targets, double more)
{
    return ari_loss_value(&l->loss, ctx, loss, (double)targets, more);
}

void ari_lm_head_weigh(ar_lm_head *l, double weight)
{
    l->weight = weight;
}

ar_status ari_lm_head_share(ar_lm_head *l, ar_ctx *ctx, double *share, size_t targets)
{
    float total = 0.0f;
    AR_TRY(ari_loss_total(&l->loss, ctx, &total));
    *share = targets > 0 ? l->weight * ((double)total / (double)targets) : 0.0;
    return AR_OK;
}

void ar_lm_head_scale(ar_lm_head *l, double factor)
{
    l->scale = (float)factor;
}

/* --- forward and backward ----------------------------------------------------------------------------------------- */

static ar_status tap_logits(const ar_lm_head *l, ar_ctx *ctx, const char *part, char pass, const ar_tensor *t)
{
    return ari_tap_placed(ctx, l->name, part, pass, t, l->entropy.classes, l->linear.split.to);
}

ar_status ar_lm_head_forward(ar_lm_head *l, ar_ctx *ctx, ar_saved *saved, const ar_tensor *x, const ar_batch *batch)
{
    ar_tensor logits;
    ar_ctx_place(ctx, batch);
    AR_TRY(ari_linear_forward(&l->linear, ctx, saved, &logits, x, AR_ACT_NONE, NULL));
    ctx->use = ARI_USE_LOGITS;
    ari_step_claim(ctx, &logits);
    if (saved)
        ar_param_use(l->linear.weight[0]);
    if (loss_parallel(l))
        AR_TRY(ari_fault_logits(ctx, &logits, l->entropy.owned));
    AR_TRY(tap_logits(l, ctx, NULL, 'f', &logits));
    if (l->cap > 0.0) {
        const ar_tensor bare = logits;
        AR_TRY(ar_saved_push(saved, l, SAVED_LOGITS, &bare));
        AR_TRY(ar_like(ctx, &logits, &bare));
        AR_TRY(ARI_KERNEL(ctx, softcap, &logits, &bare, 1.0f, l->cap));
        AR_TRY(tap_logits(l, ctx, CAPPED, 'f', &logits));
    }
    if (l->scale != 0.0f) {
        AR_TRY(ARI_KERNEL(ctx, scale, &logits, &logits, l->scale));
        AR_TRY(tap_logits(l, ctx, SCALED, 'f', &logits));
    }
    return add_terms(l, ctx, saved, &logits, batch);
}

ar_status ar_lm_head_backward(ar_lm_head *l, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_batch *batch)
{
    const size_t targets = batch->global_batch > 0 ? batch->targets : ar_batch_targets(batch);
    ar_tensor dlogits;
    ar_ctx_place(ctx, batch);
    AR_TRY(ari_cross_entropy_backward(&l->entropy, ctx, saved, &dlogits, (double)targets / l->weight / ctx->loss_scale,
                                      true));
    if (l->cap > 0.0) {
        ar_tensor bare;
        AR_TRY(tap_logits(l, ctx, CAPPED, 'b', &dlogits));
        AR_TRY(ar_saved_pop(saved, l, SAVED_LOGITS, &bare));
        AR_TRY(ARI_KERNEL(ctx, softcap_backward, &dlogits, &dlogits, &bare, 1.0f, l->cap));
        ar_ctx_release(ctx, &bare);
    }
    if (l->scale != 0.0f) {
        AR_TRY(tap_logits(l, ctx, SCALED, 'b', &dlogits));
        AR_TRY(ARI_KERNEL(ctx, scale, &dlogits, &dlogits, l->scale));
    }
    AR_TRY(tap_logits(l, ctx, "logits", 'b', &dlogits));
    AR_TRY(ari_linear_backward(&l->linear, ctx, saved, dx, &dlogits, l->name, NULL));
    ar_ctx_release(ctx, &dlogits);
    return ar_param_done(l->linear.weight[0], ctx);
}
