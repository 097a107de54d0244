/* SPDX-License-Identifier: Apache-2.0 */
/* The ZeRO optimizer over the buckets of a DDP object. A bucket contains its parameters' matrices one after the other,
 * and every data-parallel rank has one slice of the gradient (complete only there), of the state, and of the update.
 * Then the slices are gathered, unless the weights are sharded too. The new value of an element does not depend on the
 * rank that computes it. */
#include "anyrank/param.h"
#include "ref/context/context_private.h"
#include "ref/core/tensor_private.h"
#include "ref/layers/parts.h"
#include "ref/record/ledger.h"
#include "ref/train/ddp.h"
#include "ref/train/ddp_private.h"
#include "ref/train/optimizer.h"

/* Memory of a step, large enough for each bucket. */
typedef struct workspace {
    ar_buf weights;     /* a bucket's weights in its storage; empty if ranks keep their slices */
    ar_tensor gradient; /* gradient of a slice */
    ar_tensor value;    /* a parameter's gradient */
} workspace;

/* --- making ------------------------------------------------------------------------------------------------------- */

/* Adds state for the part of a bucket's parameter i that lies in this rank's slice, if any. */
static ar_status add_state(ar_optimizer *o, ar_ctx *ctx, const ar_bucket_info *b, size_t i)
{
    ar_param *p = b->param[i];
    size_t begin = 0, count = 0;
    if (!ari_overlap(&begin, &count, b->offset[i], ar_tensor_count(&p->value), b->own_start, b->own_count))
        return AR_OK;
    ari_state *s = &o->states[o->n++]; /* counted first, so that destroy frees a partly built state */
    *s = (ari_state){
        .param = p, .start = begin - b->offset[i], .count = count, .bucket = b->index, .bucket_offset = begin};
    return ari_state_create(s, &o->bytes, ctx, &o->options);
}

ar_status ari_zero_init(ar_optimizer *o, ar_ctx *ctx)
{
    size_t params = 0;
    if (ari_ddp_options_of(o->ddp).zero == 0)
        return ar_error_set(
            AR_ERR_ARG,
            "an optimizer of shares of %s, whose gradients are not shared out: its DDP options need a zero of 1 to 3",
            ar_ddp_name(o->ddp));
    for (size_t i = 0; i < ar_ddp_buckets(o->ddp); i++)
        params += ari_ddp_bucket(o->ddp, i).params;
    AR_TRY(ARI_ALLOC_ZERO(&o->states, params, "shares of parameters"));
    for (size_t i = 0; i < ar_ddp_buckets(o->ddp); i++) {
        const ar_bucket_info b = ari_ddp_bucket(o->ddp, i);
        for (size_t k = 0; k < b.params; k++)
            AR_TRY(add_state(o, ctx, &b, k));
    }
    return AR_OK;
}

/* --- a step ------------------------------------------------------------------------------------------------------- */

/* Allocates all memory before the first weight changes, so that no allocation can fail later. */
static ar_status alloc_workspace(workspace *w, ar_ctx *ctx, const ar_ddp *ddp)
{
    size_t weights = 0, gradient = 0, value = 0;
    for (size_t i = 0; i < ar_ddp_buckets(ddp); i++) {
        const ar_bucket_info b = ari_ddp_bucket(ddp, i);
        const size_t bytes = b.elements * ar_dtype_bytes(b.storage);
        weights = bytes > weights && ddp->stage < 3 ? bytes : weights;
        gradient = b.own_count > gradient ? b.own_count : gradient;
        for (size_t k = 0; k < b.params; k++) {
            const size_t count = ar_tensor_count(&b.param[k]->value);
            value = count > value ? count : value;
        }
    }
    AR_TRY(ari_step_alloc(ctx, &w->weights, weights));
    AR_TRY(ar_ctx_tensor(ctx, &w->gradient, AR_F32, 1, &gradient));
    return ar_ctx_tensor(ctx, &w->value, AR_F32, 1, &value);
}

static void free_workspace(workspace *w, ar_ctx *ctx)
{
    ARI_RELEASE(ctx, &w->value, &w->gradient);
    ari_step_free(ctx, w->weights);
}

/* Gets elements [start, start + count) of a parameter's gradient, directly from this rank's shard if the shard contains
 * them. */
static ar_status param_run(ar_buf out, ar_ctx *ctx, const ar_param *p, const workspace *w, size_t start, size_t count)
{
    const ar_param_share *s = p->share;
    ar_tensor g;
    if (!s || p->grad || start < s->start || start + count > s->start + s->count) {
        AR_TRY(ar_tensor_view(&g, AR_F32, p->value.ndim, p->value.shape, w->value.data));
        AR_TRY(ar_param_grad_value(p, ctx, &g));
        return ari_share_get(ctx, out, p, &g, start, count);
    }
    AR_TRY(ctx->arith->bucket_take(ctx, ctx->queue, out, ar_const(s->grad), s->elements, s->offset + start - s->start,
                                   count, p->value.dtype));
    g = ari_tensor_flat(AR_F32, out, count);
    return p->grad_scale == 1.0f ? AR_OK : ARI_KERNEL(ctx, scale, &g, &g, p->grad_scale);
}

/* Elements [start, start + count) of a bucket's gradient, into `out`. */
static ar_status gradient_run(ar_buf out, ar_ctx *ctx, const ar_bucket_info *b, const workspace *w, size_t start,
                              size_t count)
{
    for (size_t i = 0; i < b->params; i++) {
        const ar_param *p = b->param[i];
        size_t begin = 0, n = 0;
        if (!ari_overlap(&begin, &n, b->offset[i], ar_tensor_count(&p->value), start, count))
            continue;
        AR_TRY(param_run(ar_buf_at(out, (begin - start) * sizeof(float)), ctx, p, w, begin - b->offset[i], n));
    }
    return AR_OK;
}

/* Computes the gradient of this rank's slice; with the fault zero_shards_misaligned, the next rank's slice. */
static ar_status slice_gradient(ar_ctx *ctx, const ar_bucket_info *b, const workspace *w, float scale)
{
    const size_t next_start =
        b->own_start + b->own_count + b->own_count <= b->elements ? b->own_start + b->own_count : 0;
    const size_t start = ari_faulty(ctx, "zero_shards_misaligned") ? next_start : b->own_start;
    const ar_buf g = w->gradient.data;
    AR_TRY(gradient_run(g, ctx, b, w, start, b->own_count));
    if (scale == 1.0f)
        return AR_OK;
    const ar_tensor slice = ari_tensor_flat(AR_F32, g, b->own_count);
    return ARI_KERNEL(ctx, scale, &slice, &slice, scale);
}

static ar_status update_run(const ar_optimizer *o, ar_ctx *ctx, const ar_bucket_info *b, const ari_state *s,
                            ari_update_part part, const workspace *w)
{
    const ari_optimizer_constants k = ari_update_constants(&o->clock, &o->options, s->param, ctx);
    const ar_tensor g = ar_tensor_slice(&w->gradient, 0, s->bucket_offset - b->own_start, s->count);
    return ari_update_apply(ctx, &part, &g, &k);
}

/* Updates the weights of this rank's slice, in the bucket or where the slices are kept. */
static ar_status update_slice(const ar_optimizer *o, ar_ctx *ctx, const ar_bucket_info *b, const workspace *w)
{
    for (size_t i = 0; i < o->n; i++) {
        const ari_state *s = &o->states[i];
        if (s->bucket != b->index)
            continue;
        ari_update_part part = s->part;
        if (ari_value_is_shared(s->param)) {
            part.weight = s->param->share->value;
        } else {
            part.weight = ar_buf_at(w->weights, s->bucket_offset * ar_dtype_bytes(b->storage));
            AR_TRY(ari_share_get(ctx, part.weight, s->param, &s->param->value, s->start, s->count));
        }
        if (!ari_is_updated(s->param))
            continue;
        if (ari_update_kind(&o->options, s->param) != AR_OPTIMIZER_MUON)
            AR_TRY(update_run(o, ctx, b, s, part, w));
        AR_TRY(ari_update_clip(ctx, s, &part));
    }
    return AR_OK;
}

/* Gathers each slice from the rank that updated it. */
static ar_status gather_slices(const ar_ddp *ddp, ar_ctx *ctx, const ar_bucket_info *b, const workspace *w)
{
    const size_t *counts = ddp->buckets[b->index].shares;
    const ar_buf slice = ar_buf_at(w->weights, b->own_start * ar_dtype_bytes(b->storage));
    ar_comm *group = ari_ctx_shard(ctx, b->param[0]->expert);
    AR_TRY(ar_comm_all_gather(group, ctx->queue, w->weights, ar_const(slice), counts, b->storage, ar_ddp_name(ddp)));
    return ARI_NOTE(ctx, .kind = ARI_LEDGER_WEIGHT_GATHER, .name = b->param[0]->name, .param = b->param,
                    .params = b->params);
}

/* Copies the bucket's weights to the parameters; is_local: only this rank's slice. */
static ar_status put_weights(ar_ctx *ctx, const ar_bucket_info *b, const workspace *w, bool is_local)
{
    const size_t start = is_local ? b->own_start : 0, count = is_local ? b->own_count : b->elements;
    for (size_t i = 0; i < b->params; i++) {
        ar_param *p = b->param[i];
        size_t begin = 0, n = 0;
        if (!ari_is_updated(p))
            continue;
        p->version++;
        if (!ari_overlap(&begin, &n, b->offset[i], ar_tensor_count(&p->value), start, count))
            continue;
        const ar_cbuf weights = ar_cbuf_at(ar_const(w->weights), begin * ar_dtype_bytes(b->storage));
        AR_TRY(ari_share_put(ctx, weights, p, &p->value, begin - b->offset[i], n));
    }
    return AR_OK;
}

static ar_status count_versions(const ar_bucket_info *b)
{
    for (size_t i = 0; i < b->params; i++)
        b->param[i]->version += ari_is_updated(b->param[i]);
    return AR_OK;
}

static ar_status step_bucket(const ar_optimizer *o, ar_ctx *ctx, const ar_bucket_info *b, const workspace *w,
                             float scale)
{
    const bool missing = ari_faulty(ctx, "zero_gather_missing");
    AR_TRY(slice_gradient(ctx, b, w, scale));
    AR_TRY(update_slice(o, ctx, b, w));
    if (o->ddp->stage >= 3)
        return count_versions(b);
    if (!missing)
        AR_TRY(gather_slices(o->ddp, ctx, b, w));
    return put_weights(ctx, b, w, missing);
}

/* Returns this rank's state for a parameter; NULL: the rank has no share of it. */
static const ari_state *state_of(const ar_optimizer *o, const ar_param *p)
{
    for (size_t i = 0; i < o->n; i++) {
        if (o->states[i].param == p)
            return &o->states[i];
    }
    return NULL;
}

/* Updates Muon's matrices, which all ranks gather one after the other, whatever bucket they are in. */
static ar_status step_matrices(const ar_optimizer *o, ar_ctx *ctx, const workspace *w, float scale)
{
    for (size_t i = 0; i < o->ddp->n; i++) {
        const ar_param *p = o->ddp->params[i];
        if (!ari_is_updated(p) || ari_update_kind(&o->options, p) != AR_OPTIMIZER_MUON)
            continue;
        const ari_state *s = state_of(o, p);
        const size_t count = s ? s->count : 0;
        ar_tensor g;
        AR_TRY(ar_ctx_tensor(ctx, &g, AR_F32, 1, &count));
        if (s)
            AR_TRY(param_run(g.data, ctx, p, w, s->start, s->count));
        if (s && scale != 1.0f)
            AR_TRY(ARI_KERNEL(ctx, scale, &g, &g, scale));
        AR_TRY(ari_muon_step(o, ctx, p, s, &g));
        ar_ctx_release(ctx, &g);
    }
    return AR_OK;
}

/* Checks that the gradients' buckets match, since they may belong to another object with other slices. */
static ar_status check_shares(const ar_optimizer *o)
{
    for (size_t i = 0; i < o->n; i++) {
        const ari_state *s = &o->states[i];
        const ar_param *p = s->param;
        if (ari_is_updated(p) && p->sharded && (s->start != p->own_start || s->count != p->own_count))
            return ar_error_set(AR_ERR_ARG,
                                "%s: this rank has elements %zu to %zu of the gradient, the optimizer keeps state of "
                                "%zu to %zu: both need the buckets of one DDP object, %s",
                                p->name, p->own_start, p->own_start + p->own_count, s->start, s->start + s->count,
                                ar_ddp_name(o->ddp));
    }
    return AR_OK;
}

ar_status ari_zero_step(ar_optimizer *o, ar_ctx *ctx, float scale)
{
    const size_t n = ar_ddp_buckets(o->ddp);
    workspace w;
    ar_status st = AR_OK;
    AR_TRY(check_shares(o));
    AR_TRY(alloc_workspace(&w, ctx, o->ddp));
    ari_update_begin(&o->clock, &o->options, ctx);
    st = step_matrices(o, ctx, &w, scale);
    for (size_t i = 0; i < n && st == AR_OK; i++) {
        const ar_bucket_info b = ari_ddp_bucket(o->ddp, i);
        st = step_bucket(o, ctx, &b, &w, scale);
    }
    free_workspace(&w, ctx);
    AR_TRY(st);
    for (size_t i = 0; i < n; i++) {
        const ar_bucket_info b = ari_ddp_bucket(o->ddp, i);
        for (size_t k = 0; k < b.params; k++)
            AR_TRY(ari_value_tap(b.param[k], ctx, 'n'));
    }
    for (size_t i = 0; i < o->n; i++)
        AR_TRY(ari_state_tap(&o->states[i], ctx));
    return AR_OK;
}
