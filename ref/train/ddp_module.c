/* SPDX-License-Identifier: Apache-2.0 */
/* A data-parallel object as a module, and the effect of a user's hook on gradients. */
#include <stdlib.h>

#include "anyrank/arith.h"
#include "ref/arith/arith_private.h"
#include "ref/core/tensor_private.h"
#include "ref/layers/parts.h"
#include "ref/train/units.h"

/* --- as a module -------------------------------------------------------------------------------------------------- */

static ar_status forward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                         const ar_batch *batch)
{
    const ar_ddp *d = (ar_ddp *)m;
    return ari_ddp_fail(d, ar_module_forward(d->module, ctx, saved, y, x, batch));
}

static ar_status backward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                          const ar_batch *batch)
{
    ar_ddp *d = (ar_ddp *)m;
    AR_TRY(ari_ddp_begin_backward(d, 0, false));
    AR_TRY(ari_ddp_fail(d, ar_module_backward(d->module, ctx, saved, dx, dy, batch)));
    return ari_ddp_end_backward(d, 0);
}

static void destroy(ar_module *m)
{
    ar_ddp_destroy((ar_ddp *)m);
}

const ar_module_ops ari_ddp_ops = {.kind = "ddp",
                                   .forward = forward,
                                   .backward = backward,
                                   .children_at = offsetof(ar_ddp, module),
                                   .children_count = 1,
                                   .destroy = destroy};

ar_module *ar_ddp_as_module(ar_ddp *d)
{
    return d->module ? &d->base : NULL;
}

/* --- hooks -------------------------------------------------------------------------------------------------------- */

ar_status ari_ddp_check_hook(const ar_ctx *ctx, const ar_ddp_options *o)
{
    if (!o->hook)
        return AR_OK;
    if (o->hook_terms && ctx->arith == ari_arith_exact(ctx->arith->precision))
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "a hook of terms in exact numerics: which terms a rank has depends on the layout, and so "
                            "would the bits of what is made of them; let it take the sums");
    return AR_OK;
}

/* Consecutive gradients in the form of a bucket, converted to numbers for the hook. */
typedef struct hooked {
    ar_buf form;
    ar_tensor g; /* [n] */
    float *host; /* [n] */
} hooked;

/* The hook replaces elements [start, start + count) of a gradient, the first of which is host[at]. */
static ar_status call_hook(const ari_bucket *b, const ari_ddp_slot *s, const hooked *h, size_t start,
                           size_t host_offset, size_t count)
{
    const ar_ddp_options *o = &b->ddp->options;
    ar_bucket_info info = b->info;
    info.hook_state = s->state ? s->state + start : NULL;
    return s->param->has_grad ? o->hook(o->hook_user, &info, s->param, start, h->host + host_offset, count) : AR_OK;
}

/* Calls the hook for this rank's share of each gradient in a bucket. */
static ar_status call_shares(const ari_bucket *b, const hooked *h)
{
    for (const ari_ddp_slot *s = b->slot; s < b->slot + b->info.params; s++)
        AR_TRY(call_hook(b, s, h, s->share.start, s->share.offset, s->share.count));
    return AR_OK;
}

/* Puts a gradient, or (NULL) the bucket's share, through the hook. */
static ar_status through_hook(const ari_bucket *b, const ari_ddp_slot *s, const hooked *h)
{
    ar_ctx *ctx = b->ddp->ctx;
    ar_param *p = s ? s->param : NULL;
    const ar_arith_ops *arith = ctx->arith;
    const ar_dtype storage = b->info.storage;
    const size_t n = ar_tensor_count(&h->g);
    const ar_tensor numbers = ari_tensor_flat(storage, h->form, n);
    if (p)
        AR_TRY(arith->bucket_pack(ctx, ctx->queue, h->form, n, 0, storage, p));
    AR_TRY(arith->bucket_take(ctx, ctx->queue, h->g.data, ar_const(h->form), n, 0, n, storage));
    AR_TRY(ar_ctx_download(ctx, h->host, &h->g));
    AR_TRY(p ? call_hook(b, s, h, p->own_start, p->own_start, p->own_count) : call_shares(b, h));
    AR_TRY(ar_ctx_upload(ctx, &h->g, h->host));
    AR_TRY(arith->bucket_put ? arith->bucket_put(ctx, ctx->queue, h->form, ar_const(h->g.data), n, storage)
                             : ctx->device->ops->copy_strided(ctx->device, ctx->queue, &numbers, &h->g));
    return p ? arith->bucket_unpack(ctx, ctx->queue, p, ar_const(h->form), n, 0, storage) : AR_OK;
}

static ar_status hook_gradients(const ar_ddp *d, const ari_bucket *b, const ari_ddp_slot *s)
{
    const size_t n = s ? ar_tensor_count(&s->param->value) : b->info.own_count;
    const size_t bytes = d->ctx->arith->bucket_bytes(n, b->info.storage);
    ar_tensor form = {.data = {NULL}};
    hooked h = {.form = b->shard};
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ARI_ALLOC(&h.host, n, "a hook's gradients"));
    if (s)
        AR_TRY_TO(done, st, ar_ctx_tensor(d->ctx, &form, AR_U8, 1, &bytes));
    h.form = s ? form.data : h.form;
    AR_TRY_TO(done, st, ar_ctx_tensor(d->ctx, &h.g, AR_F32, 1, &n));
    AR_TRY_TO(done, st, through_hook(b, s, &h));
done:
    ar_ctx_release(d->ctx, &h.g);
    ar_ctx_release(d->ctx, &form);
    free(h.host);
    return st;
}

ar_status ari_ddp_hook(const ar_ddp *d, const ari_bucket *b, bool terms)
{
    if (!d->options.hook || d->options.hook_terms != terms)
        return AR_OK;
    if (d->stage >= 2 && !terms)
        return b->info.own_count > 0 ? hook_gradients(d, b, NULL) : AR_OK;
    for (size_t i = 0; i < b->info.params; i++) {
        ar_param *p = b->info.param[i];
        const size_t start = p->own_start, count = p->own_count;
        if (!p->has_grad)
            continue;
        if (terms) { /* terms of this rank, complete */
            p->own_start = 0;
            p->own_count = ar_tensor_count(&p->value);
        }
        const ar_status st = hook_gradients(d, b, &b->slot[i]);
        p->own_start = start;
        p->own_count = count;
        AR_TRY(st);
    }
    return AR_OK;
}
