/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/host_view.h"

#include <stdlib.h>

#include "ref/core/context.h"
#include "ref/core/size.h"

static ar_status download(ar_ctx *c, void *host, const ar_tensor *t)
{
    ar_tensor packed;
    if (ar_tensor_is_contiguous(t))
        return ar_ctx_download(c, host, t);
    AR_TRY(ar_ctx_tensor(c, &packed, t->dtype, t->ndim, t->shape));
    ar_status st = c->device->ops->copy_strided(c->device, c->queue, &packed, t);
    if (st == AR_OK)
        st = ar_ctx_download(c, host, &packed);
    ar_ctx_release(c, &packed);
    return st;
}

ar_status ari_host_view(ar_ctx *c, ar_tensor *view, const ar_tensor *t)
{
    void *host = NULL;
    *view = *t;
    if (c->device->ops->host_reaches)
        return AR_OK;
    AR_TRY(ari_alloc(&host, ar_tensor_count(t), ar_dtype_bytes(t->dtype), "a tensor's values on the host"));
    ar_status st = ar_tensor_view(view, t->dtype, t->ndim, t->shape, (ar_buf){host});
    if (st == AR_OK)
        st = download(c, host, t);
    if (st != AR_OK)
        free(host);
    return st;
}

void ari_host_view_end(ar_tensor *view, const ar_tensor *t)
{
    if (view->data.ptr != t->data.ptr)
        free(view->data.ptr);
}

void ari_pack_elements(float *to, const ar_tensor *t)
{
    const size_t count = ar_tensor_count(t);
    for (size_t i = 0; i < count; i++) {
        size_t rest = i;
        ptrdiff_t offset = 0;
        for (int d = t->ndim - 1; d >= 0; d--) {
            offset += (ptrdiff_t)(rest % t->shape[d]) * t->stride[d];
            rest /= t->shape[d];
        }
        to[i] = ((const float *)t->data.ptr)[offset];
    }
}
