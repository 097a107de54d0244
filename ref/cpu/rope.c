/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/cpu/row_sum.h"
#include "ref/numerics/rope_check.h"

/* Rotary positions (Su et al. 2021, arXiv:2104.09864), in the form of Hugging Face's Llama: the pairs are (i, i +
 * d/2). */

/* The slower of the two dimensions is the outer loop: a frequency takes an exp and a log. */
static void table_column(float *cos, float *sin, float inv_freq, size_t positions, size_t half)
{
    for (size_t s = 0; s < positions; s++) {
        const float angle = ari_rope_angle(s, inv_freq);
        cos[s * half] = ari_cos32(angle);
        sin[s * half] = ari_sin32(angle);
    }
}

/** Slot rope_tables. Errors: those of ari_rope_check; nothing is written then. */
ar_status ari_cpu_rope_tables(ar_device *d, ARI_AT_ONCE, ar_buf cos, ar_buf sin, size_t positions, size_t head_dim,
                              double theta, double factor, const ar_rope_llama3 *llama3)
{
    AR_TRY(ari_rope_check(positions, head_dim, theta, factor, llama3));
    const size_t half = head_dim / 2;
    float *c = cos.ptr, *sn = sin.ptr;
    ARI_PARALLEL_FOR (i, half, d, half * positions) {
        const float inv_freq = ari_rope_frequency(theta, factor, llama3, i, head_dim);
        table_column(c + i, sn + i, inv_freq, positions, half);
    }
    return AR_OK;
}

/* One head: y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin; flip is the sign bit that makes sin -sin. y may be x. */
ARI_ROW_KERNEL void rotate(float *y, const float *x, const float *cos, const float *sin, uint32_t flip, size_t half)
{
#pragma GCC ivdep
    for (size_t i = 0; i < half; i++) {
        const float x1 = x[i], x2 = x[half + i], c = cos[i];
        const float s = ari_float32(ari_bits32(sin[i]) ^ flip);
        y[i] = ari_rope_first(x1, x2, c, s);
        y[half + i] = ari_rope_second(x1, x2, c, s);
    }
}

/** Slot rope. y may be x with x's strides; no other overlap. */
ar_status ari_cpu_rope(ar_device *d, ARI_AT_ONCE, const ar_tensor *y, const ar_tensor *x, ar_cbuf cos, ar_cbuf sin,
                       int direction)
{
    const size_t positions = x->shape[1], heads = x->shape[2], half = x->shape[3] / 2;
    const size_t rows = x->shape[0] * positions;
    const uint32_t flip = direction < 0 ? 0x80000000u : 0;
    const float *c = cos.ptr, *sn = sin.ptr;
    ARI_PARALLEL_FOR (r, rows, d, rows * heads * half) {
        const ptrdiff_t b = (ptrdiff_t)(r / positions), s = (ptrdiff_t)(r % positions);
        const float *from = (const float *)x->data.ptr + b * x->stride[0] + s * x->stride[1];
        float *to = (float *)y->data.ptr + b * y->stride[0] + s * y->stride[1];
        const size_t row = (size_t)s * half;
        for (ptrdiff_t head = 0; head < (ptrdiff_t)heads; head++)
            rotate(to + head * y->stride[2], from + head * x->stride[2], c + row, sn + row, flip, half);
    }
    return AR_OK;
}
