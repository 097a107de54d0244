/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "dump/dump.h"
#include "ref/core/out.h"
#include "ref/core/size.h"
#include "ref/io/safetensors.h"

/* Where one box of a part is the whole tensor in row-major order: its elements. */
static const void *whole_data(const ar_dump_tensor *t, const ar_dump_part *p)
{
    const size_t bytes = ar_dtype_bytes(t->dtype);
    size_t stride = 1;
    if (p->boxes != 1 || p->partial || (bytes == 0 && p->box->at != 0))
        return NULL;
    for (int k = t->ndim - 1; k >= 0; k--) {
        if (p->box->extent[k] != t->shape[k] || (p->box->stride[k] != stride && t->shape[k] > 1))
            return NULL;
        stride *= t->count > 0 ? t->shape[k] : 1;
    }
    return (const char *)p->entry->data + p->box->at * bytes;
}

static ar_status make_tensor(const ar_dump *d, ar_dump_tensor *t, ar_dump_part *part, const ari_piece *piece, size_t n)
{
    *t = (ar_dump_tensor){
        .name = piece->name, .dtype = piece->entry->dtype, .ndim = piece->ndim, .order = SIZE_MAX, .parts = n};
    t->part = part;
    memcpy(t->shape, piece->shape, sizeof t->shape);
    t->count = piece->entry->count;
    for (size_t i = 0; i < n; i++)
        part[i] = (ar_dump_part){.rank = piece[i].rank,
                                 .file = d->file[piece[i].file].path,
                                 .entry = piece[i].entry,
                                 .boxes = piece[i].boxes,
                                 .box = piece[i].box,
                                 .replicas = 1};
    if (n > 1)
        return ar_error_set(AR_ERR_UNSUPPORTED, "%s: tensor '%s' is in %s too: folders of ranks are not read yet",
                            ARI_SHOW(part[0].file), ARI_SHOW(t->name), ARI_SHOW(part[1].file));
    t->whole = whole_data(t, &part[0]);
    return AR_OK;
}

ar_status ari_dump_make_tensors(ar_dump *d)
{
    size_t tensors = 0;
    for (size_t i = 0; i < d->pieces; i++)
        tensors += i == 0 || strcmp(d->piece[i].name, d->piece[i - 1].name) != 0;
    AR_TRY(ari_alloc((void **)&d->tensor, tensors, sizeof *d->tensor, "tensors of a dump"));
    AR_TRY(ari_alloc((void **)&d->part, d->pieces, sizeof *d->part, "parts of a dump"));
    for (size_t i = 0, n = 0; i < d->pieces; i += n) {
        for (n = 1; i + n < d->pieces && strcmp(d->piece[i].name, d->piece[i + n].name) == 0;)
            n++;
        AR_TRY(make_tensor(d, &d->tensor[d->tensors], &d->part[i], &d->piece[i], n));
        d->tensors++;
    }
    d->parts = d->pieces;
    return AR_OK;
}

ar_status ari_dump_set_order(ar_dump *d)
{
    (void)d;
    return AR_OK;
}
