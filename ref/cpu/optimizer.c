/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/numerics/optimizer.h"

#include "ref/cpu/row_sum.h"
#include "ref/cpu/storage.h"

/* Elementwise operations on gradients and weights: the norm's integer sums, clipping, and the optimizers' updates.
 * ref/numerics/optimizer.h defines each element's value. */

/* --- the gradient norm -------------------------------------------------------------------------------------------- */

typedef struct halves {
    uint64_t high, low;
} halves;

ARI_ROW_KERNEL halves square_loop(const float *g, int32_t e, size_t n)
{
    uint64_t high = 0, low = 0;
    for (size_t j = 0; j < n; j++) {
        const int64_t square = ari_norm_square(g[j], e);
        high += (uint64_t)ari_norm_high(square);
        low += (uint64_t)ari_norm_low(square);
    }
    return (halves){high, low};
}

/** Implements slot sum_squares with integers, so that the order of the threads does not change the sums. Errors:
 *  none. */
ar_status ari_cpu_sum_squares(ar_device *d, ARI_AT_ONCE, ar_buf sums, const ar_tensor *g, ar_cbuf e)
{
    const size_t n = ar_tensor_count(g);
    const size_t blocks = ari_blocks_of(n);
    const int threads = ari_threads_for(d, blocks, n);
    (void)threads;
    const int32_t exponent = *(const int32_t *)e.ptr;
    uint64_t high = 0, low = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(+ : high, low)
    for (size_t i = 0; i < blocks; i++) {
        const size_t length = ari_block_length(n, i);
        float scratch[ARI_BLOCK];
        const halves sum = square_loop(ari_run_load(g, (ptrdiff_t)(i * ARI_BLOCK), length, scratch), exponent, length);
        high += sum.high;
        low += sum.low;
    }
    int64_t *out = sums.ptr;
    out[0] = ari_add64(out[0], (int64_t)high);
    out[1] = ari_add64(out[1], (int64_t)low);
    return AR_OK;
}

/* --- clipping ----------------------------------------------------------------------------------------------------- */

ARI_ROW_KERNEL void scale_loop(float *y, const float *x, float factor, size_t n)
{
#pragma GCC ivdep
    for (size_t j = 0; j < n; j++)
        y[j] = ari_clipped(x[j], factor);
}

/** Implements slot scale. y may be x. Errors: none. */
ar_status ari_cpu_scale(ar_device *d, ARI_AT_ONCE, const ar_tensor *y, const ar_tensor *x, float factor)
{
    const size_t n = ar_tensor_count(x), blocks = ari_blocks_of(n);
    ARI_PARALLEL_FOR (i, blocks, d, n) {
        const size_t length = ari_block_length(n, i);
        const ptrdiff_t offset = (ptrdiff_t)(i * ARI_BLOCK);
        float scratch[ARI_BLOCK], *out = ari_run_at(y, offset, scratch);
        scale_loop(out, ari_run_load(x, offset, length, scratch), factor, length);
        ari_run_store(y, offset, length, out);
    }
    return AR_OK;
}

/* --- updates ------------------------------------------------------------------------------------------------------ */

/* A weight that differs from its rounded master copy was set by somebody since. */
ARI_ROW_KERNEL void take_bf16_loop(float *master, const float *weight, size_t n)
{
#pragma GCC ivdep
    for (size_t j = 0; j < n; j++) {
        const float rounded = ari_f32_of_bf16(ari_bf16_of_f32(master[j]));
        master[j] = ari_bits32(rounded) == ari_bits32(weight[j]) ? master[j] : weight[j];
    }
}

/* Reads values that are constant within a step once, so that the compiler moves branches out of the loops. */
ARI_ROW_KERNEL void plain_loop(const ari_optimizer_constants *k, float *w, const float *g, size_t n)
{
    ari_optimizer_constants constants = *k;
    constants.has_momentum = 0;
#pragma GCC ivdep
    for (size_t j = 0; j < n; j++)
        ari_sgd_update(&constants, w + j, NULL, g[j]);
}

ARI_ROW_KERNEL void momentum_loop(const ari_optimizer_constants *k, float *w, float *m, const float *g, size_t n)
{
    ari_optimizer_constants constants = *k;
    constants.has_momentum = 1;
#pragma GCC ivdep
    for (size_t j = 0; j < n; j++)
        ari_sgd_update(&constants, w + j, m + j, g[j]);
}

ARI_ROW_KERNEL void adam_loop(const ari_optimizer_constants *k, float *w, float *m, float *v, const float *g, size_t n)
{
    const ari_optimizer_constants constants = *k;
#pragma GCC ivdep
    for (size_t j = 0; j < n; j++)
        ari_adam_update(&constants, w + j, m + j, v + j, g[j]);
}

static void step_block(const ari_optimizer_constants *k, float *w, float *m, float *v, const float *g, size_t n)
{
    if (v)
        adam_loop(k, w, m, v, g, n);
    else if (m)
        momentum_loop(k, w, m, g, n);
    else
        plain_loop(k, w, g, n);
}

/** Implements slot optimizer_step. Errors: none. */
ar_status ari_cpu_optimizer_step(ar_device *d, ARI_AT_ONCE, const ar_tensor *w, ar_buf master, ar_buf m, ar_buf v,
                                 const ar_tensor *g, const struct ari_optimizer_constants *k)
{
    const size_t n = ar_tensor_count(w), blocks = ari_blocks_of(n);
    float *master_weights = master.ptr, *first_moment = m.ptr, *second = v.ptr;
    ARI_PARALLEL_FOR (i, blocks, d, n) {
        const size_t offset = i * ARI_BLOCK, length = ari_block_length(n, i);
        float scratch[2][ARI_BLOCK], *weight = ari_run_at(w, (ptrdiff_t)offset, scratch[0]);
        float *stepped = master_weights ? master_weights + offset : weight;
        const float *stored_weight = ari_run_load(w, (ptrdiff_t)offset, length, scratch[0]);
        const float *gradient = ari_run_load(g, (ptrdiff_t)offset, length, scratch[1]);
        if (master_weights)
            take_bf16_loop(stepped, stored_weight, length);
        step_block(k, stepped, first_moment ? first_moment + offset : NULL, second ? second + offset : NULL, gradient,
                   length);
        ari_run_store(w, (ptrdiff_t)offset, length, stepped);
    }
    return AR_OK;
}
