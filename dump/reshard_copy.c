/* SPDX-License-Identifier: Apache-2.0 */
/* Moving elements of resharding: from where the input has them to where the output does, some megabytes at a time. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "dump/reshard.h"
#include "ref/core/out.h"
#include "ref/core/size.h"

#define CHUNK_BYTES ((size_t)8 << 20)

void ari_rs_drop(const void *data, size_t bytes)
{
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), from = (uintptr_t)data / page * page;
    if (bytes > 0) /* advice: where it is not taken, nothing is wrong */
        (void)madvise((void *)from, (uintptr_t)data - from + bytes, MADV_DONTNEED);
}

/* A tensor whose values are read from. */
typedef struct origin {
    const ari_rs_tensor *tensor;
    size_t width;      /* bytes of an element */
    const char *whole; /* row-major; NULL: in its parts */
    char *owned;       /* a sum of partial parts */
} origin;

static ar_status open_origin(origin *o, const ari_rs_tensor *t)
{
    const ar_dump_tensor *from = t->from;
    *o = (origin){.tensor = t, .width = ar_dtype_bytes(from->dtype), .whole = from->whole};
    bool partial = false;
    for (size_t i = 0; i < from->parts; i++)
        partial = partial || from->part[i].partial;
    if (!partial)
        return AR_OK;
    AR_TRY(ari_alloc((void **)&o->owned, from->count + 1, o->width, from->name));
    o->whole = o->owned;
    return ar_dump_read(from, 0, from->count, o->owned);
}

/* What two boxes have in common, as a loop over `ndim` extents with strides on both sides, in elements. */
typedef struct common {
    int ndim;
    size_t extent[AR_ST_MAX_DIMS], from_stride[AR_ST_MAX_DIMS], to_stride[AR_ST_MAX_DIMS];
    size_t from, to; /* the first element */
} common;

static bool intersect(common *c, const ar_dump_box *from, const ar_dump_box *to, int ndim, size_t rows)
{
    *c = (common){.ndim = ndim, .from = from->at, .to = to->at};
    for (int d = 0; d < ndim; d++) {
        const size_t end =
            d == 0 && from->global[0] + from->extent[0] > rows ? rows : from->global[d] + from->extent[d];
        const size_t extent = end > from->global[d] ? end - from->global[d] : 0;
        size_t start;
        if (!ari_overlap(&start, &c->extent[d], from->global[d], extent, to->global[d], to->extent[d]))
            return false;
        c->from += (start - from->global[d]) * from->stride[d];
        c->to += (start - to->global[d]) * to->stride[d];
        c->from_stride[d] = from->stride[d];
        c->to_stride[d] = to->stride[d];
    }
    return true;
}

/* Joins dimensions that follow each other without a gap on both sides. */
static void join_dims(common *c)
{
    int n = 0;
    for (int d = 0; d < c->ndim; d++) {
        if (c->extent[d] == 1)
            continue;
        const bool joins = n > 0 && c->from_stride[n - 1] == c->extent[d] * c->from_stride[d] &&
                           c->to_stride[n - 1] == c->extent[d] * c->to_stride[d];
        const int at = joins ? n - 1 : n++;
        c->extent[at] = joins ? c->extent[at] * c->extent[d] : c->extent[d];
        c->from_stride[at] = c->from_stride[d];
        c->to_stride[at] = c->to_stride[d];
    }
    c->ndim = n;
}

static void copy_run(char *to, size_t to_stride, const char *from, size_t from_stride, size_t n, size_t width)
{
    if (to_stride == 1 && from_stride == 1) {
        memcpy(to, from, n * width);
        return;
    }
    for (size_t i = 0; i < n; i++)
        memcpy(to + i * to_stride * width, from + i * from_stride * width, width);
}

static void copy_common(char *to, const char *from, const common *c, size_t width)
{
    size_t index[AR_ST_MAX_DIMS] = {0};
    const int last = c->ndim - 1;
    if (c->ndim == 0) {
        memcpy(to, from, width);
        return;
    }
    for (;;) {
        copy_run(to, c->to_stride[last], from, c->from_stride[last], c->extent[last], width);
        int d = last - 1;
        for (; d >= 0; d--) {
            to += c->to_stride[d] * width;
            from += c->from_stride[d] * width;
            if (++index[d] < c->extent[d])
                break;
            to -= c->extent[d] * c->to_stride[d] * width;
            from -= c->extent[d] * c->from_stride[d] * width;
            index[d] = 0;
        }
        if (d < 0)
            return;
    }
}

/* Bytes from the first to the last element. */
static size_t reach(const common *c, size_t width)
{
    size_t last = 0;
    for (int d = 0; d < c->ndim; d++)
        last += (c->extent[d] - 1) * c->from_stride[d];
    return (last + 1) * width;
}

/* `data` holds elements of the box `from`; those that are in the box `to` are copied to buffer. */
static void copy_box(char *buffer, const ar_dump_box *to, const char *data, const ar_dump_box *from, const origin *o)
{
    common c;
    if (!intersect(&c, from, to, o->tensor->ndim, o->tensor->ndim > 0 ? o->tensor->rows : 1))
        return;
    const size_t bytes = reach(&c, o->width);
    const char *first = data + c.from * o->width;
    join_dims(&c);
    copy_common(buffer + c.to * o->width, first, &c, o->width);
    if (data != o->owned)
        ari_rs_drop(first, bytes);
}

static void copy_into(char *buffer, const ar_dump_box *to, const origin *o)
{
    const ar_dump_tensor *from = o->tensor->from;
    if (o->whole) {
        ar_dump_box all = {.at = 0};
        size_t stride = 1;
        for (int d = from->ndim - 1; d >= 0; d--) {
            all.extent[d] = from->shape[d];
            all.stride[d] = stride;
            stride *= from->shape[d];
        }
        copy_box(buffer, to, o->whole, &all, o);
        return;
    }
    for (size_t i = 0; i < from->parts; i++) {
        for (size_t k = 0; k < from->part[i].boxes && from->part[i].replica == 0; k++)
            copy_box(buffer, to, from->part[i].entry->data, &from->part[i].box[k], o);
    }
}

/* The rows [first, first + rows) of a file's tensor, which is row-major, as a box of a tensor of them alone. */
static ar_dump_box rows_of_box(const ar_dump_box *b, int ndim, size_t first, size_t rows)
{
    ar_dump_box part = *b;
    if (ndim > 0) {
        part.global[0] += first;
        part.extent[0] = rows;
    }
    return part;
}

typedef struct sink {
    ari_rs *r;
    ar_st_writer *writer;
    size_t index; /* of the tensor that is written */
    ari_sha256 *hash;
    char *buffer;
    size_t capacity;
} sink;

static ar_status put(sink *s, const void *data, size_t bytes)
{
    AR_TRY(ari_sha256_update(s->hash, data, bytes));
    return ar_st_writer_put(s->writer, s->index, data, bytes);
}

static ar_status need(sink *s, size_t bytes)
{
    if (bytes <= s->capacity)
        return AR_OK;
    free(s->buffer);
    s->buffer = NULL;
    s->capacity = 0;
    AR_TRY(ari_alloc((void **)&s->buffer, bytes, 1, "a piece of a tensor"));
    s->capacity = bytes;
    return AR_OK;
}

static ar_status copy_rows(sink *s, const ari_rs_item *item, const origin *o)
{
    const int ndim = item->tensor->ndim;
    const size_t rows = ndim > 0 ? item->box.extent[0] : 1, row_bytes = item->bytes / rows;
    const size_t step = row_bytes < CHUNK_BYTES ? CHUNK_BYTES / row_bytes : 1;
    const bool padded = ndim > 0 && item->tensor->shape[0] > item->tensor->rows;
    AR_TRY(need(s, (step < rows ? step : rows) * row_bytes));
    for (size_t first = 0; first < rows; first += step) {
        const size_t n = rows - first < step ? rows - first : step;
        if (padded && s->buffer)
            memset(s->buffer, 0, n * row_bytes);
        const ar_dump_box part = rows_of_box(&item->box, ndim, first, n);
        copy_into(s->buffer, &part, o);
        AR_TRY(put(s, s->buffer, n * row_bytes));
        ari_rs_progress(s->r, n * row_bytes, item->tensor->from->name);
    }
    return AR_OK;
}

/* All bytes as they are: elements smaller than a byte are not taken apart. */
static ar_status copy_bytes(sink *s, const ari_rs_item *item)
{
    const ar_dump_tensor *from = item->tensor->from;
    if (!from->whole)
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "tensor '%s': %s has elements of less than a byte, whose parts are not put together",
                            ARI_SHOW(from->name), ar_dtype_name(from->dtype));
    for (size_t at = 0; at < item->bytes; at += CHUNK_BYTES) {
        const size_t n = item->bytes - at < CHUNK_BYTES ? item->bytes - at : CHUNK_BYTES;
        AR_TRY(put(s, (const char *)from->whole + at, n));
        ari_rs_drop((const char *)from->whole + at, n);
        ari_rs_progress(s->r, n, from->name);
    }
    return AR_OK;
}

static ar_status copy_item(sink *s, const ari_rs_item *item)
{
    origin o;
    if (item->bytes == 0)
        return AR_OK;
    if (ar_dtype_bytes(item->tensor->from->dtype) == 0)
        return copy_bytes(s, item);
    ar_status st = open_origin(&o, item->tensor);
    if (st == AR_OK)
        st = copy_rows(s, item, &o);
    free(o.owned);
    return st;
}

ar_status ari_rs_copy(ari_rs *r, ar_st_writer *w, const ari_rs_item *item, size_t n, ari_sha256 *hash)
{
    sink s = {.r = r, .writer = w, .hash = hash};
    ar_status st = AR_OK;
    for (size_t i = 0; i < n && st == AR_OK; i++) {
        s.index = i;
        st = copy_item(&s, &item[i]);
    }
    free(s.buffer);
    return st;
}
