/* SPDX-License-Identifier: Apache-2.0 */
#include "dump/read_box.h"

#include <stdint.h>
#include <string.h>

/* A box as rows of the full tensor, the longest possible: dimensions that lie without a gap in the full tensor and in
 * the file are one. */
typedef struct rows {
    int dims;                                                                   /* over which the rows are counted */
    size_t extent[AR_ST_MAX_DIMS], full[AR_ST_MAX_DIMS], local[AR_ST_MAX_DIMS]; /* steps, in elements */
    size_t full_start, local_start;
    size_t width, step; /* of a row; in the file */
    size_t count;
} rows;

size_t ari_dump_box_count(int ndim, const ar_dump_box *b)
{
    size_t n = 1;
    for (int k = 0; k < ndim; k++) {
        if (b->extent[k] == 0)
            return 0;
        n *= b->extent[k];
    }
    return n;
}

/* Adds a dimension outside of those there are, or lengthens the outermost. Dimensions stand innermost first. */
static void add_dim(rows *r, size_t extent, size_t full, size_t local)
{
    const int last = r->dims - 1;
    if (extent == 1)
        return;
    if (last >= 0 && full == r->full[last] * r->extent[last] && local == r->local[last] * r->extent[last]) {
        r->extent[last] *= extent;
        return;
    }
    r->extent[r->dims] = extent;
    r->full[r->dims] = full;
    r->local[r->dims] = local;
    r->dims++;
}

/* Of a box that is not empty. */
static rows rows_of(const ar_dump_tensor *t, const ar_dump_box *b)
{
    rows r = {.local_start = b->at, .width = 1, .step = 1, .count = 1};
    size_t stride = 1;
    for (int k = t->ndim - 1; k >= 0; k--) {
        add_dim(&r, b->extent[k], stride, b->stride[k]);
        r.full_start += b->global[k] * stride;
        stride *= t->shape[k];
    }
    if (r.dims > 0 && r.full[0] == 1) { /* the innermost dimension is the row */
        r.width = r.extent[0];
        r.step = r.local[0];
        r.dims--;
        memmove(r.extent, r.extent + 1, (size_t)r.dims * sizeof *r.extent);
        memmove(r.full, r.full + 1, (size_t)r.dims * sizeof *r.full);
        memmove(r.local, r.local + 1, (size_t)r.dims * sizeof *r.local);
    }
    for (int k = 0; k < r.dims; k++)
        r.count *= r.extent[k];
    return r;
}

/* Where row `i` begins; index: its coordinates. */
static void row_at(const rows *r, size_t i, size_t *index, size_t *full, size_t *local)
{
    *full = r->full_start;
    *local = r->local_start;
    for (int k = 0; k < r->dims; k++) {
        index[k] = i % r->extent[k];
        i /= r->extent[k];
        *full += index[k] * r->full[k];
        *local += index[k] * r->local[k];
    }
}

static void next_row(const rows *r, size_t *index, size_t *full, size_t *local)
{
    for (int k = 0; k < r->dims; k++) {
        *full += r->full[k];
        *local += r->local[k];
        if (++index[k] < r->extent[k])
            return;
        *full -= r->full[k] * r->extent[k];
        *local -= r->local[k] * r->extent[k];
        index[k] = 0;
    }
}

/* The first row that ends behind `start`; rows ascend. */
static size_t first_row(const rows *r, size_t start)
{
    size_t low = 0, high = r->count, index[AR_ST_MAX_DIMS], full, local;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        row_at(r, middle, index, &full, &local);
        if (full + r->width > start)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

ar_status ari_dump_each_run(const ar_dump_tensor *t, const ar_dump_part *p, const ar_dump_box *b, size_t start,
                            size_t count, ar_status (*f)(void *user, const ari_dump_run *run), void *user)
{
    if (ari_dump_box_count(t->ndim, b) == 0 || count == 0)
        return AR_OK;
    const rows r = rows_of(t, b);
    const size_t bytes = ar_dtype_bytes(t->dtype), end = start + count;
    size_t index[AR_ST_MAX_DIMS] = {0}, full = 0, local = 0;
    if (r.full_start >= end)
        return AR_OK;
    size_t i = first_row(&r, start);
    if (i < r.count)
        row_at(&r, i, index, &full, &local);
    for (; i < r.count && full < end; i++) {
        const size_t skip = full < start ? start - full : 0;
        const size_t stop = full + r.width < end ? r.width : end - full;
        const ari_dump_run run = {(const char *)p->entry->data + (local + skip * r.step) * bytes, r.step * bytes,
                                  full + skip, stop - skip};
        AR_TRY(f(user, &run));
        next_row(&r, index, &full, &local);
    }
    return AR_OK;
}

#define GATHER(type)                                                                     \
    for (size_t i = 0; i < run->count; i++)                                              \
        memcpy((char *)out + i * sizeof(type), run->data + i * run->step, sizeof(type)); \
    return

void ari_dump_copy_run(void *out, const ari_dump_run *run, size_t bytes)
{
    if (run->step == bytes) {
        memcpy(out, run->data, run->count * bytes);
        return;
    }
    switch (bytes) {
    case 1:
        GATHER(uint8_t);
    case 2:
        GATHER(uint16_t);
    case 4:
        GATHER(uint32_t);
    default:
        GATHER(uint64_t);
    }
}
