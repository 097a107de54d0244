/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <string.h>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "anyrank/device.h"
#include "ref/core/float_bits.h"

/* Queue argument of a slot. CPU kernels run at once and do not use it. */
#define ARI_AT_ONCE ar_queue *q __attribute__((unused))

/* Kernels of the CPU device. ari_cpu_X fills slot X of ar_device_ops and behaves as anyrank/device.h describes. Further
 * promises of a kernel (in-place use, errors) are documented at its definition. All kernels run at once on the calling
 * thread, with up to d->threads OpenMP threads. No result depends on the number of threads, except for the native
 * product. A row is read a few times while it is in the first two cache levels, and once from memory. */
#define ARI_DECLARE_SLOT(slot) extern __typeof__(*((ar_device_ops *)0)->slot) ari_cpu_##slot;
AR_DEVICE_SLOTS(ARI_DECLARE_SLOT)
#undef ARI_DECLARE_SLOT

/* --- threads ------------------------------------------------------------------------------------------------------ */

/* The number of this thread inside a parallel region; 0 outside and without OpenMP. */
static inline size_t ari_thread_number(void)
{
#if defined(_OPENMP)
    return (size_t)omp_get_thread_num();
#else
    return 0;
#endif
}

/* Returns the number of threads for `items` independent pieces with `work` element operations in total: 1 below the
 * size at which fork and join (some microseconds) cost more than they save, and 1 in a build without OpenMP. */
static inline int ari_threads_for(const ar_device *d, size_t items, size_t work)
{
#if defined(_OPENMP)
    if (d->threads <= 1 || items <= 1 || work < 32768)
        return 1;
    return items < (size_t)d->threads ? (int)items : d->threads;
#else
    (void)d;
    (void)items;
    (void)work;
    return 1;
#endif
}

/* Runs for (size_t i = 0; i < n; i++) with n independent iterations distributed over the threads of d. by: OpenMP's
 * schedule, such as (dynamic, 16). */
#if defined(_OPENMP)
#define ARI_PRAGMA(text) _Pragma(#text)
#define ARI_PARALLEL_BY(by, i, n, d, work)                                            \
    ARI_PRAGMA(omp parallel for schedule by num_threads(ari_threads_for(d, n, work))) \
    for (size_t i = 0; i < (n); i++)
#else
#define ARI_PARALLEL_BY(by, i, n, d, work) for (size_t i = ((void)(d), (void)(work), 0u); i < (n); i++)
#endif
#define ARI_PARALLEL_FOR(i, n, d, work) ARI_PARALLEL_BY ((static), i, n, d, work)

/* Elements that a thread of an element-wise kernel processes at a time: 4 KiB of fp32. The first cache level holds
 * three such operands between two loops, and their bf16 form. */
#define ARI_BLOCK ((size_t)1024)

static inline size_t ari_blocks_of(size_t n)
{
    return n / ARI_BLOCK + (n % ARI_BLOCK != 0);
}

static inline size_t ari_block_length(size_t n, size_t block)
{
    const size_t remaining = n - block * ARI_BLOCK;
    return remaining < ARI_BLOCK ? remaining : ARI_BLOCK;
}

/* Prefetches the next n numbers into the L2 cache: no hardware prefetcher follows a row into another page. */
static inline void ari_fetch(const void *p, size_t n)
{
    for (size_t i = 0; i < n; i += 16)
        __builtin_prefetch((const float *)p + i, 0, 2);
}

/* --- sums over rows ----------------------------------------------------------------------------------------------- */

static inline bool ari_sum_requested(const ar_row_sum *s)
{
    return s->t.ptr || s->f32.ptr;
}

/* Terms of a sum over rows. */
typedef struct ari_row_terms {
    const ar_row_sum *target;
    ar_tensor terms; /* term rows side by side: from row 0 on, or from the block's first row */
    bool of_block;
} ari_row_terms;

/* Kernel that computes rows and adds terms of them to sums, in blocks of rows. The threads first share the rows of a
 * block, and then the columns of the sums while the terms are in the caches. So each element of a sum adds its terms in
 * row order, and memory holds only one block's terms. */
typedef struct ari_row_pass {
    size_t rows, cols;
    void (*make_row)(const void *user, size_t row, size_t in_block);
    const void *user;
    int sums;
    ari_row_terms sum[2];
} ari_row_pass;

/** Rows of a block. cols > 0. */
size_t ari_block_rows(const ar_device *d, size_t rows, size_t cols);
void ari_make_rows(ar_device *d, const ari_row_pass *p);

/* --- views -------------------------------------------------------------------------------------------------------- */

/* A batch of equally shaped matrices inside an ar_tensor: the last two dimensions are rows and columns. */
typedef struct ari_matrices {
    size_t batch, rows, cols;
    ptrdiff_t row_stride, col_stride; /* elements */
} ari_matrices;

static inline ari_matrices ari_matrices_of(const ar_tensor *t)
{
    ari_matrices v = {1, t->shape[t->ndim - 2], t->shape[t->ndim - 1], t->stride[t->ndim - 2], t->stride[t->ndim - 1]};
    for (int i = 0; i + 2 < t->ndim; i++)
        v.batch *= t->shape[i];
    return v;
}

/* Returns the offset of matrix `matrix` of the batch from t's start, in row-major order of the batch dimensions. */
static inline ptrdiff_t ari_matrix_offset(const ar_tensor *t, size_t matrix)
{
    ptrdiff_t offset = 0;
    for (int i = t->ndim - 3; i >= 0; i--) {
        offset += (ptrdiff_t)(matrix % t->shape[i]) * t->stride[i];
        matrix /= t->shape[i];
    }
    return offset;
}

/* Element (0, 0) of an fp32 matrix. */
static inline float *ari_matrix_at(const ar_tensor *t, size_t matrix)
{
    return (float *)t->data.ptr + ari_matrix_offset(t, matrix);
}

/* --- transposition ------------------------------------------------------------------------------------------------ */

/* Four words that the compiler keeps in a register with any instruction set. */
typedef uint32_t ari_words4 __attribute__((vector_size(16)));

static inline ari_words4 ari_words4_at(const uint32_t *p)
{
    ari_words4 v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* The upper or lower halves of two vectors, their lanes by turns. */
typedef uint16_t ari_halves8 __attribute__((vector_size(16)));
#define ARI_LOW(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define ARI_HIGH(a, b) __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)

/* Transposes like ari_transpose32, in multiples of 8. Interleaving rows i and i + 4 three times gives the columns. */
static inline __attribute__((always_inline)) void ari_transpose16(uint16_t *restrict dst, size_t to_ld,
                                                                  const uint16_t *restrict src, size_t from_ld,
                                                                  size_t rows, size_t cols)
{
    for (size_t c = 0; c < cols; c += 8)
        for (size_t r = 0; r < rows; r += 8) {
            ari_halves8 x[8], y[8];
            for (size_t i = 0; i < 8; i++)
                memcpy(&x[i], src + (r + i) * from_ld + c, sizeof x[i]);
            for (size_t turn = 0; turn < 3; turn++) {
                for (size_t i = 0; i < 4; i++) {
                    y[2 * i] = ARI_LOW(x[i], x[i + 4]);
                    y[2 * i + 1] = ARI_HIGH(x[i], x[i + 4]);
                }
                memcpy(x, y, sizeof x);
            }
            for (size_t i = 0; i < 8; i++)
                memcpy(dst + (c + i) * to_ld + r, &x[i], sizeof x[i]);
        }
}

/* dst[c*to_ld + r] = src[r*from_ld + c] for r in [0, rows), c in [0, cols), both multiples of 4. The ranges do not
 * overlap. It is inlined so that it is compiled for the instruction set of the calling ARI_SIMD function. */
static inline __attribute__((always_inline)) void ari_transpose32(uint32_t *restrict dst, size_t to_ld,
                                                                  const uint32_t *restrict src, size_t from_ld,
                                                                  size_t rows, size_t cols)
{
    for (size_t c = 0; c < cols; c += 4)
        for (size_t r = 0; r < rows; r += 4) {
            const uint32_t *src_tile = src + r * from_ld + c;
            const ari_words4 a = ari_words4_at(src_tile), b = ari_words4_at(src_tile + from_ld);
            const ari_words4 d = ari_words4_at(src_tile + 2 * from_ld), e = ari_words4_at(src_tile + 3 * from_ld);
            const ari_words4 low_ab = __builtin_shufflevector(a, b, 0, 4, 1, 5);
            const ari_words4 low_de = __builtin_shufflevector(d, e, 0, 4, 1, 5);
            const ari_words4 high_ab = __builtin_shufflevector(a, b, 2, 6, 3, 7);
            const ari_words4 high_de = __builtin_shufflevector(d, e, 2, 6, 3, 7);
            const ari_words4 out[4] = {__builtin_shufflevector(low_ab, low_de, 0, 1, 4, 5),
                                       __builtin_shufflevector(low_ab, low_de, 2, 3, 6, 7),
                                       __builtin_shufflevector(high_ab, high_de, 0, 1, 4, 5),
                                       __builtin_shufflevector(high_ab, high_de, 2, 3, 6, 7)};
            for (size_t i = 0; i < 4; i++)
                memcpy(dst + (c + i) * to_ld + r, &out[i], sizeof out[i]);
        }
}
