/* SPDX-License-Identifier: Apache-2.0 */
/* A data-parallel object among modules, and what a user's hook makes of a gradient. */
#include <stdlib.h>

#include "anyrank/arith.h"
#include "ref/core/size.h"
#include "ref/layers/parts.h"
#include "ref/train/bucket.h"
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
    if (o->zero >= 2)
        return ar_error_set(AR_ERR_UNSUPPORTED, "a hook of buckets with ZeRO stage %d, which keeps none", o->zero);
    if (o->hook_terms && ctx->arith == ar_arith_exact())
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "a hook of terms in exact numerics: which terms a rank has depends on the layout, and so "
                            "would the bits of what is made of them; let it take the sums");
    return AR_OK;
}

/* p's gradient, in the form of a bucket of it alone, as numbers and back. */
static ar_status call_hook(const ar_ddp *d, const ar_bucket_info *b, ar_param *p, const ar_tensor *form,
                           const ar_tensor *g, float *host)
{
    ar_ctx *ctx = d->ctx;
    const ar_arith_ops *arith = ctx->arith;
    const size_t n = ar_tensor_count(g);
    AR_TRY(arith->bucket_pack(ctx, ctx->queue, form->data, n, 0, b->storage, p));
    AR_TRY(arith->bucket_take(ctx, ctx->queue, g->data, ar_const(form->data), n, 0, n, b->storage));
    AR_TRY(ar_ctx_download(ctx, host, g));
    AR_TRY(d->options.hook(d->options.hook_user, b, p, p->own_start, host + p->own_start, p->own_count));
    AR_TRY(ar_ctx_upload(ctx, g, host));
    const ar_tensor numbers = ar_tensor_flat(b->storage, form->data, n);
    AR_TRY(arith->bucket_put ? arith->bucket_put(ctx, ctx->queue, form->data, ar_const(g->data), n)
                             : ctx->device->ops->copy_strided(ctx->device, ctx->queue, &numbers, g));
    return arith->bucket_unpack(ctx, ctx->queue, p, ar_const(form->data), n, 0, b->storage);
}

static ar_status hook_param(const ar_ddp *d, const ar_bucket_info *b, ar_param *p)
{
    const size_t n = ar_tensor_count(&p->value), bytes = d->ctx->arith->bucket_bytes(n, b->storage);
    ar_tensor form = {.data = {NULL}}, g = {.data = {NULL}};
    float *host = NULL;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ari_alloc((void **)&host, n, sizeof *host, p->name));
    AR_TRY_TO(done, st, ar_ctx_tensor(d->ctx, &form, AR_U8, 1, &bytes));
    AR_TRY_TO(done, st, ar_ctx_tensor(d->ctx, &g, AR_F32, 1, &n));
    AR_TRY_TO(done, st, call_hook(d, b, p, &form, &g, host));
done:
    ar_ctx_release(d->ctx, &g);
    ar_ctx_release(d->ctx, &form);
    free(host);
    return st;
}

ar_status ari_ddp_hook(const ar_ddp *d, const ari_bucket *b, bool terms)
{
    if (!d->options.hook || d->options.hook_terms != terms)
        return AR_OK;
    for (size_t i = 0; i < b->info.params; i++) {
        if (b->info.param[i]->has_grad)
            AR_TRY(hook_param(d, &b->info, b->info.param[i]));
    }
    return AR_OK;
}
