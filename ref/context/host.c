/* SPDX-License-Identifier: Apache-2.0 */
/* Copies device tensors to the host. */
#include <stdlib.h>

#include "anyrank/queue.h"
#include "ref/context/context.h"
#include "ref/core/float_bits.h"
#include "ref/core/tensor_private.h"

ar_status ar_ctx_upload(ar_ctx *c, const ar_tensor *t, const void *host)
{
    return c->device->ops->copy(c->device, c->queue, t->data, (ar_cbuf){host},
                                ar_tensor_count(t) * ar_dtype_bytes(t->dtype));
}

ar_status ar_ctx_download(ar_ctx *c, void *host, const ar_tensor *t)
{
    AR_TRY(c->device->ops->copy(c->device, c->queue, (ar_buf){host}, ar_const(t->data),
                                ar_tensor_count(t) * ar_dtype_bytes(t->dtype)));
    return ar_queue_sync(c->queue, 0);
}

/* --- 16-bit numbers as the host has them -------------------------------------------------------------------------- */

static void widen_values(float *dst, const uint16_t *src, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dst[i] = ari_f32_of_bf16(src[i]);
}

static void narrow(uint16_t *dst, const float *src, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dst[i] = ari_bf16_of_f32(src[i]);
}

static ar_status check_floats(const ar_tensor *t)
{
    return t->dtype == AR_F32 || t->dtype == AR_BF16
               ? AR_OK
               : ar_error_set(AR_ERR_DTYPE, "fp32 numbers of the host for a tensor of %s, expected F32 or BF16",
                              ar_dtype_name(t->dtype));
}

ar_status ar_ctx_upload_floats(ar_ctx *c, const ar_tensor *t, const float *host, size_t count)
{
    const size_t n = ar_tensor_count(t);
    ARI_OWNED uint16_t *rounded = NULL;
    AR_TRY(check_floats(t));
    if (count != n)
        return ar_error_set(AR_ERR_SHAPE, "upload of %zu numbers to a tensor of %zu elements, expected as many", count,
                            n);
    if (t->dtype == AR_F32)
        return ar_ctx_upload(c, t, host);
    AR_TRY(ARI_ALLOC(&rounded, n, "numbers of 16 bits"));
    narrow(rounded, host, n);
    return ar_ctx_upload(c, t, rounded);
}

ar_status ar_ctx_download_floats(ar_ctx *c, float *host, size_t cap, const ar_tensor *t)
{
    const size_t n = ar_tensor_count(t);
    ARI_OWNED uint16_t *stored = NULL;
    AR_TRY(check_floats(t));
    if (n > cap)
        return ar_error_set(AR_ERR_SHAPE, "download of a tensor of %zu elements to memory for %zu numbers", n, cap);
    if (t->dtype == AR_F32)
        return ar_ctx_download(c, host, t);
    AR_TRY(ARI_ALLOC(&stored, n, "numbers of 16 bits"));
    const ar_status st = ar_ctx_download(c, stored, t);
    if (st == AR_OK)
        widen_values(host, stored, n);
    return st;
}

/* --- numbers of the host that ranks share --- */

ar_status ari_numbers(ar_ctx *ctx, ar_tensor *t, ar_dtype dtype, size_t n, const void *host)
{
    AR_TRY(ar_ctx_tensor(ctx, t, dtype, 1, &n));
    return ar_ctx_upload(ctx, t, host);
}

ar_status ari_equal_counts(size_t **out, const ar_comm *group, size_t count)
{
    const size_t n = (size_t)ar_comm_size(group);
    AR_TRY(ARI_ALLOC(out, n, "sizes of the ranks' parts"));
    for (size_t i = 0; i < n; i++)
        (*out)[i] = count;
    return AR_OK;
}

ar_status ari_combine(ar_ctx *ctx, ar_comm *group, void *numbers, size_t n, ar_dtype type, ar_op op, const char *tag)
{
    ar_tensor t;
    AR_TRY(ari_numbers(ctx, &t, type, n, numbers));
    AR_TRY(ar_comm_all_reduce(group, ctx->queue, t.data, ar_const(t.data), n, type, op, tag));
    AR_TRY(ar_ctx_download(ctx, numbers, &t));
    ar_ctx_release(ctx, &t);
    return AR_OK;
}

ar_status ari_gather_words(ar_ctx *ctx, ar_comm *group, uint64_t *gathered, size_t words, const char *tag)
{
    const size_t ranks = (size_t)ar_comm_size(group), me = (size_t)ar_comm_rank(group);
    ARI_OWNED size_t *counts = NULL;
    ar_tensor t;
    AR_TRY(ari_equal_counts(&counts, group, words));
    AR_TRY(ari_new_rows(ctx, &t, AR_I64, ranks, words));
    AR_TRY(ar_ctx_upload(ctx, &t, gathered));
    AR_TRY(ar_comm_all_gather(group, ctx->queue, t.data, ar_cbuf_at(ar_const(t.data), me * words * sizeof *gathered),
                              counts, AR_I64, tag));
    AR_TRY(ar_ctx_download(ctx, gathered, &t));
    ar_ctx_release(ctx, &t);
    return AR_OK;
}

/* --- tensors as the host reads them ------------------------------------------------------------------------------- */

static ar_status get(ar_ctx *c, void *host, const ar_tensor *t)
{
    return t->dtype == AR_BF16 ? ar_ctx_download_floats(c, host, ar_tensor_count(t), t) : ar_ctx_download(c, host, t);
}

static ar_status download(ar_ctx *c, void *host, const ar_tensor *t)
{
    ar_tensor packed;
    if (c->device->ops->host_reaches) {
        ari_pack_elements(host, t);
        return AR_OK;
    }
    if (ari_tensor_is_contiguous(t))
        return get(c, host, t);
    AR_TRY(ari_copy_of(c, &packed, t));
    const ar_status st = get(c, host, &packed);
    ar_ctx_release(c, &packed);
    return st;
}

/* Counts the device memory that a download needs. */
static ar_status pass_download(ar_ctx *c, const ar_tensor *t)
{
    ar_tensor packed;
    if (c->device->ops->host_reaches || ari_tensor_is_contiguous(t))
        return AR_OK;
    AR_TRY(ar_ctx_tensor(c, &packed, t->dtype, t->ndim, t->shape));
    ar_ctx_release(c, &packed);
    return AR_OK;
}

ar_status ari_host_view(ar_ctx *c, ar_tensor *view, const ar_tensor *t)
{
    const ar_dtype host_dtype = t->dtype == AR_BF16 ? AR_F32 : t->dtype;
    ARI_OWNED void *host = NULL;
    *view = *t;
    if (c->device->hollow)
        return pass_download(c, t);
    if (c->device->ops->host_reaches && host_dtype == t->dtype)
        return AR_OK;
    AR_TRY(ari_alloc(&host, ar_tensor_count(t), ar_dtype_bytes(host_dtype), "a tensor's values on the host"));
    AR_TRY(ar_tensor_view(view, host_dtype, t->ndim, t->shape, (ar_buf){host}));
    AR_TRY(download(c, host, t));
    host = NULL; /* the view's */
    return AR_OK;
}

void ari_host_view_end(ar_tensor *view, const ar_tensor *t)
{
    if (view->data.ptr != t->data.ptr)
        free(view->data.ptr);
}

void ari_pack_elements(float *dst, const ar_tensor *t)
{
    const size_t count = ar_tensor_count(t);
    for (size_t i = 0; i < count; i++) {
        size_t coords[AR_MAX_DIMS];
        ptrdiff_t offset = 0;
        ari_coordinates(coords, i, t->ndim, t->shape);
        for (int d = 0; d < t->ndim; d++)
            offset += (ptrdiff_t)coords[d] * t->stride[d];
        dst[i] = t->dtype == AR_BF16 ? ari_f32_of_bf16(((const uint16_t *)t->data.ptr)[offset])
                                     : ((const float *)t->data.ptr)[offset];
    }
}

void ari_for_each_run(const ar_tensor *local, const ar_layout *o, void (*f)(void *user, const ari_box_run *run),
                      void *user)
{
    const int nd = o->ndim;
    for (size_t k = 0; k < o->nbox; k++) {
        const ar_box *b = &o->box[k];
        const size_t runs = ari_volume(b->extent, nd - 1);
        const size_t width = nd > 0 ? b->extent[nd - 1] : 1;
        for (size_t i = 0; i < runs && width > 0; i++) {
            size_t rest = i, full = 0, full_stride = 1, index = 0, index_stride = 1;
            ptrdiff_t offset = 0;
            for (int d = nd - 1; d >= 0; d--) {
                const size_t x = d == nd - 1 ? 0 : rest % b->extent[d];
                rest = d == nd - 1 ? rest : rest / b->extent[d];
                full += (b->global[d] + x) * full_stride;
                index += (b->local[d] + x) * index_stride;
                offset += (ptrdiff_t)(b->local[d] + x) * local->stride[d];
                full_stride *= o->shape[d];
                index_stride *= local->shape[d];
            }
            const ari_box_run run = {(const float *)local->data.ptr + offset, nd > 0 ? local->stride[nd - 1] : 1, width,
                                     full, index};
            f(user, &run);
        }
    }
}
