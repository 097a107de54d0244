/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "ref/cpu/kernels.h"

/* Values are stored as fp32 or bf16, and every loop computes in fp32. A run of contiguous fp32 numbers is used in
 * place. A run of bf16 numbers is widened into scratch memory, which stays in the cache, and the loop's output is
 * rounded once when the run is stored.
 *
 *    float room[ARI_BLOCK], *out = ari_run_at(y, at, room);
 *    loop(out, ari_run_load(x, at, n, other), n);
 *    ari_run_store(y, at, n, out);
 *
 * `at` counts elements in the tensor's memory. A loop that supports working in place may also do so in scratch
 * memory. */

/* Floats between the rooms of two threads: a cache line. */
#define ARI_LINE ((size_t)16)

/** Computes y[i] = x[i], rounded to the nearest bf16 number with ties to even; the inverse: y[i] = x[i]. No overlap. */
void ari_narrow(uint16_t *y, const float *x, size_t n);
void ari_widen(float *y, const uint16_t *x, size_t n);

/** Returns the address for writing n values that will be stored at `offset`. */
static inline float *ari_run_at(const ar_tensor *t, ptrdiff_t offset, float *scratch)
{
    return t->dtype == AR_BF16 ? scratch : (float *)t->data.ptr + offset;
}

static inline const float *ari_run_load(const ar_tensor *t, ptrdiff_t offset, size_t n, float *scratch)
{
    if (t->dtype == AR_BF16)
        ari_widen(scratch, (const uint16_t *)t->data.ptr + offset, n);
    return ari_run_at(t, offset, scratch);
}

/** run: from ari_run_at with the same offset. */
static inline void ari_run_store(const ar_tensor *t, ptrdiff_t offset, size_t n, const float *run)
{
    if (t->dtype == AR_BF16)
        ari_narrow((uint16_t *)t->data.ptr + offset, run, n);
}

static inline float ari_value_at(const ar_tensor *t, ptrdiff_t offset)
{
    return t->dtype == AR_BF16 ? ari_f32_of_bf16(((const uint16_t *)t->data.ptr)[offset])
                               : ((const float *)t->data.ptr)[offset];
}

/** Returns the n elements `stride` apart from `offset` on as a contiguous run. */
static inline const float *ari_run_gather(const ar_tensor *t, ptrdiff_t offset, ptrdiff_t stride, size_t n,
                                          float *scratch)
{
    if (stride == 1)
        return ari_run_load(t, offset, n, scratch);
    for (size_t j = 0; j < n; j++)
        scratch[j] = ari_value_at(t, offset + (ptrdiff_t)j * stride);
    return scratch;
}

/* Consecutive values in their storage format, for loops that read each value once: widening bf16 numbers into scratch
 * memory first would take as long as such a loop. */
typedef struct ari_stored_run {
    const void *x;
    bool half; /* bf16 */
} ari_stored_run;

static inline float ari_stored_value(ari_stored_run v, size_t k)
{
    return v.half ? ari_f32_of_bf16(((const uint16_t *)v.x)[k]) : ((const float *)v.x)[k];
}

/** The values from `offset` on, as they are in memory. */
static inline ari_stored_run ari_stored_at(const ar_tensor *t, ptrdiff_t offset)
{
    return (ari_stored_run){(const char *)t->data.ptr + offset * (ptrdiff_t)ar_dtype_bytes(t->dtype),
                            t->dtype == AR_BF16};
}

/** Returns the n values `stride` apart from `offset` on, in room unless they are contiguous already. */
static inline ari_stored_run ari_stored_gather(const ar_tensor *t, ptrdiff_t offset, ptrdiff_t stride, size_t n,
                                               float *scratch)
{
    return stride == 1 ? ari_stored_at(t, offset)
                       : (ari_stored_run){ari_run_gather(t, offset, stride, n, scratch), false};
}

/* --- matrices ----------------------------------------------------------------------------------------------------- */

/** Returns matrix `matrix` of the batch t as a view. */
ar_tensor ari_matrix_view(const ar_tensor *t, size_t matrix);
/** Computes y = x element by element for matrices of one shape with any strides, each F32 or BF16. No overlap. */
void ari_convert(const ar_tensor *y, const ar_tensor *x);
