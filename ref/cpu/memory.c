/* SPDX-License-Identifier: Apache-2.0 */

#include "ref/cpu/device.h"
#include "ref/cpu/storage.h"

/* Memory of the CPU device, which is host memory: copies, and sums of buffers. */

static ari_pool *pool_of(ar_device *d)
{
    return &((ari_cpu_device *)d)->pool;
}

/** Slot alloc. A size of 0 also returns a valid pointer. Errors: AR_ERR_MEMORY, AR_ERR_OVERFLOW. */
ar_status ari_cpu_alloc(ar_device *d, ARI_AT_ONCE, ar_buf *out, size_t bytes)
{
    return ari_pool_alloc(pool_of(d), &out->ptr, bytes);
}

/** Slot free. */
void ari_cpu_free(ar_device *d, ARI_AT_ONCE, ar_buf b)
{
    ari_pool_free(pool_of(d), b.ptr);
}

/** Slot copy: memory of the device is memory of the host. */
ar_status ari_cpu_copy(ar_device *d, ARI_AT_ONCE, ar_buf dst, ar_cbuf src, size_t bytes)
{
    (void)d;
    if (bytes > 0)
        memcpy(dst.ptr, src.ptr, bytes);
    return AR_OK;
}

/** Slot zero. */
ar_status ari_cpu_zero(ar_device *d, ARI_AT_ONCE, ar_buf dst, size_t bytes)
{
    (void)d;
    if (bytes > 0)
        memset(dst.ptr, 0, bytes);
    return AR_OK;
}

/* --- strided copies ----------------------------------------------------------------------------------------------- */

/* A 2-D plane of `width`-byte elements; strides in bytes. */
typedef struct plane {
    size_t rows, cols, width;
    ptrdiff_t to_row, to_col, from_row, from_col;
} plane;

/* Side of a tile of a transposing copy. The copy uses a small array so that both sides move full cache lines: the lines
 * of a column may all fall into one set of the cache, and none has to stay there. */
#define TILE ((size_t)64)

/* Transposes one tile, contiguous along columns in `from` and along rows in `to`; both pointers are at the tile's
 * corner. */
#define TRANSPOSE_TILE(name, type)                                                                                 \
    static void name(char *to, ptrdiff_t to_col, const char *from, ptrdiff_t from_row, size_t rows, size_t cols)   \
    {                                                                                                              \
        type tile[TILE][TILE];                                                                                     \
        for (size_t r = 0; r < rows; r++)                                                                          \
            for (size_t c = 0; c < cols; c++)                                                                      \
                memcpy(&tile[c][r], from + (ptrdiff_t)r * from_row + (ptrdiff_t)(c * sizeof(type)), sizeof(type)); \
        for (size_t c = 0; c < cols; c++)                                                                          \
            memcpy(to + (ptrdiff_t)c * to_col, tile[c], rows * sizeof(type));                                      \
    }

/* Copies element by element with any strides. */
#define COPY_ELEMENTS(name, type)                                                                     \
    static void name(char *to, const char *from, const plane *p)                                      \
    {                                                                                                 \
        for (size_t r = 0; r < p->rows; r++)                                                          \
            for (size_t c = 0; c < p->cols; c++)                                                      \
                memcpy(to + (ptrdiff_t)r * p->to_row + (ptrdiff_t)c * p->to_col,                      \
                       from + (ptrdiff_t)r * p->from_row + (ptrdiff_t)c * p->from_col, sizeof(type)); \
    }

TRANSPOSE_TILE(transpose_tile1, uint8_t)
TRANSPOSE_TILE(transpose_any2, uint16_t)
TRANSPOSE_TILE(transpose_any4, uint32_t)
TRANSPOSE_TILE(transpose_tile8, uint64_t)
COPY_ELEMENTS(copy_elements1, uint8_t)
COPY_ELEMENTS(copy_elements2, uint16_t)
COPY_ELEMENTS(copy_elements4, uint32_t)
COPY_ELEMENTS(copy_elements8, uint64_t)

/* Like TRANSPOSE_TILE, but the part of a tile that is written consists of step by step pieces in registers. Meanwhile
 * the lines of the next tile and of the destination are prefetched. */
#define TRANSPOSE_IN_REGISTERS(name, any, type, step, transpose)                                             \
    ARI_SIMD static void name(char *to, ptrdiff_t to_col, const char *from, ptrdiff_t from_row, size_t rows, \
                              size_t cols)                                                                   \
    {                                                                                                        \
        type tile[TILE][TILE];                                                                               \
        if (rows % (step) != 0 || cols % (step) != 0 || to_col < 0) {                                        \
            any(to, to_col, from, from_row, rows, cols);                                                     \
            return;                                                                                          \
        }                                                                                                    \
        for (size_t r = 0; r < rows; r++) {                                                                  \
            ari_fetch(from + (ptrdiff_t)r * from_row + sizeof tile[r], cols * sizeof(type) / sizeof(float)); \
            ari_fetch(to + (ptrdiff_t)r * to_col, r < cols ? rows * sizeof(type) / sizeof(float) : 0);       \
            memcpy(tile[r], from + (ptrdiff_t)r * from_row, cols * sizeof(type));                            \
        }                                                                                                    \
        transpose((type *)(void *)to, (size_t)to_col / sizeof(type), tile[0], TILE, rows, cols);             \
    }

TRANSPOSE_IN_REGISTERS(transpose_tile2, transpose_any2, uint16_t, 8, ari_transpose16)
TRANSPOSE_IN_REGISTERS(transpose_tile4, transpose_any4, uint32_t, 4, ari_transpose32)

/* The two by the width of an element in bytes. */
static const struct {
    void (*transpose_tile)(char *, ptrdiff_t, const char *, ptrdiff_t, size_t, size_t);
    void (*copy_elements)(char *, const char *, const plane *);
} by_width[9] = {[1] = {transpose_tile1, copy_elements1},
                 [2] = {transpose_tile2, copy_elements2},
                 [4] = {transpose_tile4, copy_elements4},
                 [8] = {transpose_tile8, copy_elements8}};

static void transpose_plane(char *dst, const char *src, const plane *p)
{
    const ptrdiff_t width = (ptrdiff_t)p->width;
    for (size_t r = 0; r < p->rows; r += TILE)
        for (size_t c = 0; c < p->cols; c += TILE) {
            const size_t rows = p->rows - r < TILE ? p->rows - r : TILE, cols = p->cols - c < TILE ? p->cols - c : TILE;
            char *out = dst + (ptrdiff_t)r * width + (ptrdiff_t)c * p->to_col;
            const char *src_tile = src + (ptrdiff_t)r * p->from_row + (ptrdiff_t)c * width;
            by_width[p->width].transpose_tile(out, p->to_col, src_tile, p->from_row, rows, cols);
        }
}

static void copy_plane(char *dst, const char *src, const plane *p)
{
    const ptrdiff_t width = (ptrdiff_t)p->width;
    if (p->to_col == width && p->from_col == width) {
        for (size_t r = 0; r < p->rows; r++)
            memcpy(dst + (ptrdiff_t)r * p->to_row, src + (ptrdiff_t)r * p->from_row, p->cols * p->width);
    } else if (p->to_row == width && p->from_col == width) {
        transpose_plane(dst, src, p);
    } else if (p->to_col == width && p->from_row == width) {
        const plane swapped = {p->cols, p->rows, p->width, p->to_col, p->to_row, p->from_col, p->from_row};
        transpose_plane(dst, src, &swapped);
    } else {
        by_width[p->width].copy_elements(dst, src, p);
    }
}

/* Returns t with dimensions of extent 1 in front if it has fewer than two. */
static ar_tensor two_dimensions(const ar_tensor *t)
{
    ar_tensor v = *t;
    for (; v.ndim < 2; v.ndim++) {
        v.shape[1] = v.ndim > 0 ? v.shape[0] : 1;
        v.stride[1] = v.ndim > 0 ? v.stride[0] : 1;
        v.shape[0] = 1;
        v.stride[0] = 0;
    }
    return v;
}

/* Returns t with dimensions of extent 1 in front until it has four; strides in bytes. */
static ar_tensor four_dimensions(const ar_tensor *t, size_t width)
{
    ar_tensor v = *t;
    const int missing = AR_MAX_DIMS - t->ndim;
    for (int i = 0; i < AR_MAX_DIMS; i++) {
        v.shape[i] = i < missing ? 1 : t->shape[i - missing];
        v.stride[i] = i < missing ? 0 : t->stride[i - missing] * (ptrdiff_t)width;
    }
    return v;
}

/* Between F32 and BF16. */
static ar_status convert(const ar_device *d, const ar_tensor *dst, const ar_tensor *src)
{
    const ar_tensor dst_view = two_dimensions(dst), src_view = two_dimensions(src);
    const ari_matrices m = ari_matrices_of(&dst_view);
    ARI_PARALLEL_FOR (i, m.batch, d, m.batch * m.rows * m.cols) {
        const ar_tensor y = ari_matrix_view(&dst_view, i), x = ari_matrix_view(&src_view, i);
        ari_convert(&y, &x);
    }
    return AR_OK;
}

/* Returns true if a copy between these dtypes has to convert. */
static bool converts(ar_dtype dst_dtype, ar_dtype src_dtype)
{
    return (dst_dtype == AR_F32 && src_dtype == AR_BF16) || (dst_dtype == AR_BF16 && src_dtype == AR_F32);
}

/** Slot copy_strided. Errors: AR_ERR_DTYPE (elements smaller than a byte, or of other widths than F32 and BF16);
 *  nothing is written then. */
ar_status ari_cpu_copy_strided(ar_device *d, ARI_AT_ONCE, const ar_tensor *dst, const ar_tensor *src)
{
    const size_t width = ar_dtype_bytes(dst->dtype);
    if (converts(dst->dtype, src->dtype))
        return convert(d, dst, src);
    if (width == 0 || width != ar_dtype_bytes(src->dtype))
        return ar_error_set(AR_ERR_DTYPE,
                            "copy_strided: %s from %s, expected one dtype of whole bytes, or F32 and BF16",
                            ar_dtype_name(dst->dtype), ar_dtype_name(src->dtype));
    const ar_tensor dst_view = four_dimensions(dst, width), src_view = four_dimensions(src, width);
    const size_t planes = dst_view.shape[0] * dst_view.shape[1];
    const plane p = {.rows = dst_view.shape[2],
                     .cols = dst_view.shape[3],
                     .width = width,
                     .to_row = dst_view.stride[2],
                     .to_col = dst_view.stride[3],
                     .from_row = src_view.stride[2],
                     .from_col = src_view.stride[3]};
    /* Threads share out the planes, and of fewer planes than threads the rows, in whole tiles. */
    const size_t plane_threads = planes > 0 && planes < (size_t)d->threads ? (size_t)d->threads / planes : 1;
    const size_t chunk = (p.rows + plane_threads * TILE - 1) / (plane_threads * TILE) * TILE,
                 pieces = plane_threads > 1 ? (p.rows + chunk - 1) / chunk : 1;
    ARI_PARALLEL_FOR (i, planes * pieces, d, planes * p.rows * p.cols) {
        const size_t plane_index = i / pieces, row = i % pieces * chunk, remaining_rows = p.rows - row;
        const ptrdiff_t i0 = (ptrdiff_t)(plane_index / dst_view.shape[1]),
                        i1 = (ptrdiff_t)(plane_index % dst_view.shape[1]), r = (ptrdiff_t)row;
        plane piece = p;
        piece.rows = pieces > 1 && remaining_rows > chunk ? chunk : remaining_rows;
        copy_plane((char *)dst_view.data.ptr + i0 * dst_view.stride[0] + i1 * dst_view.stride[1] + r * p.to_row,
                   (const char *)src_view.data.ptr + i0 * src_view.stride[0] + i1 * src_view.stride[1] + r * p.from_row,
                   &piece);
    }
    return AR_OK;
}
