/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/read/dump.h"

#include <stdint.h>
#include <string.h>

/* A box as a set of rows of the full tensor, as long as possible: dimensions that are contiguous both in the full
 * tensor and in the file are merged. */
typedef struct rows {
    int dims;                                                                   /* number of dimensions over which
                                                                                   rows are counted */
    size_t extent[AR_ST_MAX_DIMS], full[AR_ST_MAX_DIMS], local[AR_ST_MAX_DIMS]; /* steps, in elements */
    size_t full_start, local_start;
    size_t width, step; /* elements in a row; distance of elements in the file */
    size_t count;
} rows;

size_t ari_dump_box_count(int ndim, const ar_dump_box *b)
{
    return ari_volume(b->extent, ndim);
}

bool ari_dump_box_cut(ar_dump_box *out, const ar_dump_box *b, int ndim, const size_t *start, const size_t *extent)
{
    *out = *b;
    for (int k = 0; k < ndim; k++) {
        if (!ari_overlap(&out->global[k], &out->extent[k], b->global[k], b->extent[k], start[k], extent[k]))
            return false;
        out->offset += (out->global[k] - b->global[k]) * b->stride[k];
    }
    return true;
}

const char *ari_dump_box_data(const ar_dump_tensor *t, const ar_dump_part *p, const ar_dump_box *b)
{
    const size_t bytes = ar_dtype_bytes(t->dtype);
    size_t stride = 1;
    for (int k = t->ndim - 1; k >= 0; k--) {
        if (b->stride[k] != stride && b->extent[k] > 1)
            return NULL;
        stride *= b->extent[k];
    }
    return bytes == 0 && b->offset != 0 ? NULL : (const char *)p->entry->data + b->offset * bytes;
}

/* Adds a dimension outside of the existing ones, or extends the outermost one. Dimensions are ordered from the
 * innermost. */
static void add_dim(rows *r, size_t extent, size_t full, size_t local)
{
    const int outermost = r->dims - 1;
    if (extent == 1)
        return;
    if (outermost >= 0 && full == r->full[outermost] * r->extent[outermost] &&
        local == r->local[outermost] * r->extent[outermost]) {
        r->extent[outermost] *= extent;
        return;
    }
    r->extent[r->dims] = extent;
    r->full[r->dims] = full;
    r->local[r->dims] = local;
    r->dims++;
}

/* Describes the rows of a nonempty box. */
static rows rows_of(const ar_dump_tensor *t, const ar_dump_box *b)
{
    rows r = {.local_start = b->offset, .width = 1, .step = 1};
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
    r.count = ari_volume(r.extent, r.dims);
    return r;
}

/* Computes the start of row `i`; index: its coordinates. */
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

/* Finds the first row that ends after `start`; rows ascend. */
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

/* Returns the part of the row that lies within the full tensor's elements [start, end). */
static ari_dump_run run_of(const rows *r, const char *data, size_t bytes, size_t full, size_t local, size_t start,
                           size_t end)
{
    const size_t skip = full < start ? start - full : 0, stop = full + r->width < end ? r->width : end - full;
    return (ari_dump_run){data + (local + skip * r->step) * bytes, r->step * bytes, full + skip, stop - skip};
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
        const ari_dump_run run = run_of(&r, p->entry->data, bytes, full, local, start, end);
        AR_TRY(f(user, &run));
        next_row(&r, index, &full, &local);
    }
    return AR_OK;
}

/* --- copies ------------------------------------------------------------------------------------------------------- */

/* Number of columns that are copied for all rows before the next columns. So many lines of the file are used at a time,
 * and each is read completely before the copy moves on. */
#define TILE 16

#define TRANSPOSE(type)                                                                                  \
    for (size_t i = 0; i < n; i++)                                                                       \
        for (size_t k = 0; k < width; k++)                                                               \
            memcpy(out + (i * full + k) * sizeof(type), in + i * sizeof(type) + k * step, sizeof(type)); \
    return

/* Copies n rows of `width` elements that are `full` elements apart in the output and stored column by column in the
 * file, `step` bytes apart. */
static void copy_tile(char *out, size_t full, const char *in, size_t step, size_t n, size_t width, size_t bytes)
{
    switch (bytes) {
    case 1:
        TRANSPOSE(uint8_t);
    case 2:
        TRANSPOSE(uint16_t);
    case 4:
        TRANSPOSE(uint32_t);
    default:
        TRANSPOSE(uint64_t);
    }
}

void ari_dump_copy_run(void *out, const ari_dump_run *run, size_t bytes)
{
    if (run->step == bytes)
        memcpy(out, run->data, run->count * bytes);
    else
        copy_tile(out, 0, run->data, run->step, 1, run->count, bytes);
}

/* Returns how many rows from row i on are copied together: whole rows along the innermost dimension over which rows are
 * counted. */
static size_t rows_together(const rows *r, const size_t *index, size_t full, size_t start, size_t end)
{
    if (r->dims == 0 || r->local[0] != 1 || r->step == 1 || full < start || end - full < r->width)
        return 0;
    const size_t fit = (end - full - r->width) / r->full[0] + 1, remaining = r->extent[0] - index[0];
    return fit < remaining ? fit : remaining;
}

void ari_dump_copy_box(char *out, const ar_dump_tensor *t, const char *data, const ar_dump_box *b, size_t start,
                       size_t count)
{
    if (ari_dump_box_count(t->ndim, b) == 0 || count == 0)
        return;
    const rows r = rows_of(t, b);
    const size_t bytes = ar_dtype_bytes(t->dtype), end = start + count;
    size_t index[AR_ST_MAX_DIMS] = {0}, full = 0, local = 0;
    for (size_t i = r.full_start < end ? first_row(&r, start) : r.count; i < r.count;) {
        row_at(&r, i, index, &full, &local);
        if (full >= end)
            return;
        const char *src = data + local * bytes;
        const size_t n = rows_together(&r, index, full, start, end);
        for (size_t k = 0; k < r.width && n > 1; k += TILE)
            copy_tile(out + (full - start + k) * bytes, r.full[0], src + k * r.step * bytes, r.step * bytes, n,
                      r.width - k < TILE ? r.width - k : TILE, bytes);
        if (n <= 1) {
            const ari_dump_run run = run_of(&r, data, bytes, full, local, start, end);
            ari_dump_copy_run(out + (run.full - start) * bytes, &run, bytes);
        }
        i += n > 1 ? n : 1;
    }
}
