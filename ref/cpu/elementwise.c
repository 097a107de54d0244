/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "ref/cpu/row_kernels.h"
#include "ref/cpu/row_sum.h"

/* Element-wise kernels and strided copies. Definitions of the functions: ref/numerics/scalar.h. Every loop reads an
 * element of all its inputs before it writes that element, so outputs may be inputs (same address and strides). */

/* Elements a thread takes at a time: 32 KiB of fp32, which stays in the first two cache levels between two loops. */
#define BLOCK ((size_t)8192)

static size_t blocks_of(size_t n)
{
    return n / BLOCK + (n % BLOCK != 0);
}

static size_t block_length(size_t n, size_t block)
{
    const size_t left = n - block * BLOCK;
    return left < BLOCK ? left : BLOCK;
}

/* --- add, mul, fill ----------------------------------------------------------------------------------------------- */
ARI_ROW_KERNEL void add_loop(float *y, const float *a, const float *b, size_t n)
{
#pragma GCC ivdep
    for (size_t j = 0; j < n; j++)
        y[j] = ari_add32(a[j], b[j]);
}

ARI_ROW_KERNEL void mul_loop(float *y, const float *a, const float *b, size_t n)
{
#pragma GCC ivdep
    for (size_t j = 0; j < n; j++)
        y[j] = ari_mul32(a[j], b[j]);
}

/** Slot add. y may be a or b. */
ar_status ari_cpu_add(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf a, ar_cbuf b, size_t n)
{
    (void)q;
    const int threads = ari_threads_for(d, blocks_of(n), n);
    (void)threads;
    const size_t blocks = blocks_of(n);
    float *out = y.ptr;
    const float *l = a.ptr, *r = b.ptr;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (size_t i = 0; i < blocks; i++)
        add_loop(out + i * BLOCK, l + i * BLOCK, r + i * BLOCK, block_length(n, i));
    return AR_OK;
}

/** Slot mul. y may be a or b. */
ar_status ari_cpu_mul(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf a, ar_cbuf b, size_t n)
{
    (void)q;
    const int threads = ari_threads_for(d, blocks_of(n), n);
    (void)threads;
    const size_t blocks = blocks_of(n);
    float *out = y.ptr;
    const float *l = a.ptr, *r = b.ptr;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (size_t i = 0; i < blocks; i++)
        mul_loop(out + i * BLOCK, l + i * BLOCK, r + i * BLOCK, block_length(n, i));
    return AR_OK;
}

/** Slot fill. */
ar_status ari_cpu_fill(ar_device *d, ar_queue *q, ar_buf y, float value, size_t n)
{
    (void)q;
    const int threads = ari_threads_for(d, blocks_of(n), n);
    (void)threads;
    const size_t blocks = blocks_of(n);
    const float stored = ari_canonical32(value);
    float *out = y.ptr;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (size_t i = 0; i < blocks; i++) {
        const size_t end = i * BLOCK + block_length(n, i);
        for (size_t j = i * BLOCK; j < end; j++)
            out[j] = stored;
    }
    return AR_OK;
}

/* --- activations: one set of loops for each, so that the choice is made outside the loop -------------------------- */
typedef struct act_loops {
    void (*act)(float *z, const float *x, size_t n);
    void (*dact)(float *dx, const float *dy, const float *x, size_t n);
    void (*gated)(float *y, const float *gate, const float *up, size_t n);
    void (*dgated)(float *dgate, float *dup, const float *dy, const float *gate, const float *up, size_t n);
} act_loops;

#define ACT_LOOPS(name, ACT)                                                                                         \
    ARI_ROW_KERNEL void name##_act(float *z, const float *x, size_t n)                                               \
    {                                                                                                                \
        _Pragma("GCC ivdep") for (size_t j = 0; j < n; j++) z[j] = ari_act32(ACT, x[j]);                             \
    }                                                                                                                \
    ARI_ROW_KERNEL void name##_dact(float *dx, const float *dy, const float *x, size_t n)                            \
    {                                                                                                                \
        _Pragma("GCC ivdep") for (size_t j = 0; j < n; j++) dx[j] = ari_mul32(dy[j], ari_dact32(ACT, x[j]));         \
    }                                                                                                                \
    ARI_ROW_KERNEL void name##_gated(float *y, const float *gate, const float *up, size_t n)                         \
    {                                                                                                                \
        _Pragma("GCC ivdep") for (size_t j = 0; j < n; j++) y[j] = ari_gated_act(ACT, gate[j], up[j]);               \
    }                                                                                                                \
    ARI_ROW_KERNEL void name##_dgated(float *dgate, float *dup, const float *dy, const float *gate, const float *up, \
                                      size_t n)                                                                      \
    {                                                                                                                \
        _Pragma("GCC ivdep") for (size_t j = 0; j < n; j++)                                                          \
        {                                                                                                            \
            const float by_up = ari_gated_dup(ACT, dy[j], gate[j]);                                                  \
            const float by_gate = ari_gated_dgate(ACT, dy[j], up[j], gate[j]);                                       \
            dup[j] = by_up;                                                                                          \
            dgate[j] = by_gate;                                                                                      \
        }                                                                                                            \
    }

ACT_LOOPS(gelu_erf, AR_ACT_GELU_ERF)
ACT_LOOPS(gelu_tanh, AR_ACT_GELU_TANH)
ACT_LOOPS(silu, AR_ACT_SILU)
ACT_LOOPS(relu, AR_ACT_RELU)
ACT_LOOPS(none, AR_ACT_NONE)

#define LOOPS_OF(name)                                       \
    {                                                        \
        name##_act, name##_dact, name##_gated, name##_dgated \
    }
static const act_loops loops[] = {[AR_ACT_GELU_ERF] = LOOPS_OF(gelu_erf),
                                  [AR_ACT_GELU_TANH] = LOOPS_OF(gelu_tanh),
                                  [AR_ACT_SILU] = LOOPS_OF(silu),
                                  [AR_ACT_RELU] = LOOPS_OF(relu),
                                  [AR_ACT_NONE] = LOOPS_OF(none)};

/** Slot bias_act. z may be y (then y's own value is lost). */
ar_status ari_cpu_bias_act(ar_device *d, ar_queue *q, const ar_tensor *y, ar_cbuf bias, ar_activation act,
                           const ar_tensor *z)
{
    (void)q;
    const size_t rows = y->shape[0], cols = y->shape[1], blocks = blocks_of(cols);
    const int threads = ari_threads_for(d, rows, rows * cols);
    (void)threads;
    float *sums = y->data.ptr, *values = act == AR_ACT_NONE ? NULL : z->data.ptr;
    const float *added = bias.ptr;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (size_t i = 0; i < rows; i++)
        for (size_t block = 0; block < blocks; block++) {
            const size_t from = block * BLOCK, at = i * cols + from, n = block_length(cols, block);
            if (added)
                add_loop(sums + at, sums + at, added + from, n);
            if (values)
                loops[act].act(values + at, sums + at, n);
        }
    return AR_OK;
}

/** Slot act_backward. dx may be dy or x. */
ar_status ari_cpu_act_backward(ar_device *d, ar_queue *q, ar_buf dx, ar_cbuf dy, ar_cbuf x, ar_activation act, size_t n)
{
    (void)q;
    const int threads = ari_threads_for(d, blocks_of(n), n);
    (void)threads;
    const size_t blocks = blocks_of(n);
    float *out = dx.ptr;
    const float *gradient = dy.ptr, *input = x.ptr;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (size_t i = 0; i < blocks; i++)
        loops[act].dact(out + i * BLOCK, gradient + i * BLOCK, input + i * BLOCK, block_length(n, i));
    return AR_OK;
}

/* Row i of a 2-D fp32 view. */
static float *row_at(const ar_tensor *t, size_t i)
{
    return (float *)t->data.ptr + (ptrdiff_t)i * t->stride[0];
}

/** Slot gated_forward. y may be gate or up. */
ar_status ari_cpu_gated_forward(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *gate,
                                const ar_tensor *up, ar_activation act)
{
    (void)q;
    const size_t rows = y->shape[0], cols = y->shape[1];
    const int threads = ari_threads_for(d, rows, rows * cols);
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (size_t i = 0; i < rows; i++)
        loops[act].gated(row_at(y, i), row_at(gate, i), row_at(up, i), cols);
    return AR_OK;
}

/** Slot gated_backward. dgate may be gate, dup may be up, either may be dy. */
ar_status ari_cpu_gated_backward(ar_device *d, ar_queue *q, const ar_tensor *dgate, const ar_tensor *dup,
                                 const ar_tensor *dy, const ar_tensor *gate, const ar_tensor *up, ar_activation act)
{
    (void)q;
    const size_t rows = dy->shape[0], cols = dy->shape[1];
    const int threads = ari_threads_for(d, rows, rows * cols);
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (size_t i = 0; i < rows; i++)
        loops[act].dgated(row_at(dgate, i), row_at(dup, i), row_at(dy, i), row_at(gate, i), row_at(up, i), cols);
    return AR_OK;
}

/* --- copies ------------------------------------------------------------------------------------------------------- */
/* A 2-D plane of `width`-byte elements; strides in bytes. */
typedef struct plane {
    size_t rows, cols, width;
    ptrdiff_t to_row, to_col, from_row, from_col;
} plane;

/* Side of a tile of a transposing copy. It goes through a small array, so that both sides move whole cache lines at
 * once: the lines of a column may all fall into one set of the cache, and none has to stay there. */
#define TILE ((size_t)32)

/* One tile, contiguous along columns in `from` and along rows in `to`; `to` and `from` point at its corner. */
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
TRANSPOSE_TILE(transpose_tile4, uint32_t)
TRANSPOSE_TILE(transpose_tile8, uint64_t)

static void transpose_plane(char *to, const char *from, const plane *p)
{
    const ptrdiff_t width = (ptrdiff_t)p->width;
    for (size_t r = 0; r < p->rows; r += TILE)
        for (size_t c = 0; c < p->cols; c += TILE) {
            const size_t rows = p->rows - r < TILE ? p->rows - r : TILE, cols = p->cols - c < TILE ? p->cols - c : TILE;
            char *out = to + (ptrdiff_t)r * width + (ptrdiff_t)c * p->to_col;
            const char *in = from + (ptrdiff_t)r * p->from_row + (ptrdiff_t)c * width;
            if (p->width == 4)
                transpose_tile4(out, p->to_col, in, p->from_row, rows, cols);
            else
                transpose_tile8(out, p->to_col, in, p->from_row, rows, cols);
        }
}

/* Any strides, element by element. */
static void copy_elements(char *to, const char *from, const plane *p)
{
    for (size_t r = 0; r < p->rows; r++)
        for (size_t c = 0; c < p->cols; c++) {
            char *out = to + (ptrdiff_t)r * p->to_row + (ptrdiff_t)c * p->to_col;
            const char *in = from + (ptrdiff_t)r * p->from_row + (ptrdiff_t)c * p->from_col;
            if (p->width == 4)
                memcpy(out, in, 4);
            else
                memcpy(out, in, 8);
        }
}

static void copy_plane(char *to, const char *from, const plane *p)
{
    const ptrdiff_t width = (ptrdiff_t)p->width;
    if (p->to_col == width && p->from_col == width) {
        for (size_t r = 0; r < p->rows; r++)
            memcpy(to + (ptrdiff_t)r * p->to_row, from + (ptrdiff_t)r * p->from_row, p->cols * p->width);
    } else if (p->to_row == width && p->from_col == width) {
        transpose_plane(to, from, p);
    } else if (p->to_col == width && p->from_row == width) {
        const plane swapped = {p->cols, p->rows, p->width, p->to_col, p->to_row, p->from_col, p->from_row};
        transpose_plane(to, from, &swapped);
    } else {
        copy_elements(to, from, p);
    }
}

/* t with dimensions of extent 1 put in front until it has four; strides in bytes. */
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

/** Slot copy_strided. Errors: AR_ERR_DTYPE (elements that are not 4 or 8 bytes wide), nothing is written then. */
ar_status ari_cpu_copy_strided(ar_device *d, ar_queue *q, const ar_tensor *dst, const ar_tensor *src)
{
    (void)q;
    const size_t width = ar_dtype_bytes(dst->dtype);
    if (width != 4 && width != 8)
        return ar_error_set(AR_ERR_DTYPE, "copy_strided: elements of %zu bytes (%s), expected 4 or 8", width,
                            ar_dtype_name(dst->dtype));
    const ar_tensor to = four_dimensions(dst, width), from = four_dimensions(src, width);
    const size_t planes = to.shape[0] * to.shape[1];
    const plane p = {.rows = to.shape[2],
                     .cols = to.shape[3],
                     .width = width,
                     .to_row = to.stride[2],
                     .to_col = to.stride[3],
                     .from_row = from.stride[2],
                     .from_col = from.stride[3]};
    const int threads = ari_threads_for(d, planes, planes * p.rows * p.cols);
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (size_t i = 0; i < planes; i++) {
        const ptrdiff_t i0 = (ptrdiff_t)(i / to.shape[1]), i1 = (ptrdiff_t)(i % to.shape[1]);
        copy_plane((char *)to.data.ptr + i0 * to.stride[0] + i1 * to.stride[1],
                   (const char *)from.data.ptr + i0 * from.stride[0] + i1 * from.stride[1], &p);
    }
    return AR_OK;
}
