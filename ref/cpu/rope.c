/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/cpu/row_sum.h"
#include "ref/cpu/storage.h"
#include "ref/numerics/rope_check.h"

/* Rotary positions (Su et al. 2021, arXiv:2104.09864), in the form of Hugging Face's Llama: the pairs are (i, i +
 * d/2). */

/* The outer loop is over frequencies, because each needs an exp and a log. */
static void table_column(float *cos, float *sin, float inv_freq, float scale, size_t positions, size_t half)
{
    for (size_t s = 0; s < positions; s++) {
        const float angle = ari_rope_angle(s, inv_freq);
        cos[s * half] = ari_cos32(angle) * scale;
        sin[s * half] = ari_sin32(angle) * scale;
    }
}

/** Implements slot rope_tables. Errors: those of ari_rope_check; nothing is written then. */
ar_status ari_cpu_rope_tables(ar_device *d, ARI_AT_ONCE, ar_buf cos, ar_buf sin, size_t positions, size_t head_dim,
                              const ar_rope *rope)
{
    AR_TRY(ari_rope_check(positions, head_dim, rope));
    const size_t turning = ar_rope_dim(rope, head_dim), half = turning / 2;
    const float scale = ari_rope_attention(rope);
    float *c = cos.ptr, *sn = sin.ptr;
    ARI_PARALLEL_FOR (i, half, d, half * positions) {
        const float inv_freq = ari_rope_frequency(rope, i, turning);
        table_column(c + i, sn + i, inv_freq, scale, positions, half);
    }
    return AR_OK;
}

/* Rotates pairs: y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin; flip: a sign bit that turns sin into -sin. y1 may be x1,
 * and y2 may be x2. */
ARI_ROW_KERNEL void rotate(float *y1, float *y2, const float *x1, const float *x2, const float *cos, const float *sin,
                           uint32_t flip, size_t n)
{
#pragma GCC ivdep
    for (size_t i = 0; i < n; i++) {
        const float first = x1[i], second = x2[i], c = cos[i];
        const float s = ari_float32(ari_bits32(sin[i]) ^ flip);
        y1[i] = ari_rope_first(first, second, c, s);
        y2[i] = ari_rope_second(first, second, c, s);
    }
}

/* Rotates one head with contiguous elements, from `y_offset` of y and `x_offset` of x on. */
static void rotate_head(const ar_tensor *y, ptrdiff_t y_offset, const ar_tensor *x, ptrdiff_t x_offset,
                        const float *cos, const float *sin, uint32_t flip, size_t half)
{
    float scratch[2][256];
    for (size_t i = 0; i < half; i += 256) {
        const size_t n = half - i < 256 ? half - i : 256;
        const ptrdiff_t first = (ptrdiff_t)i, second = (ptrdiff_t)(half + i);
        float *y1 = ari_run_at(y, y_offset + first, scratch[0]), *y2 = ari_run_at(y, y_offset + second, scratch[1]);
        rotate(y1, y2, ari_run_load(x, x_offset + first, n, scratch[0]),
               ari_run_load(x, x_offset + second, n, scratch[1]), cos + i, sin + i, flip, n);
        ari_run_store(y, y_offset + first, n, y1);
        ari_run_store(y, y_offset + second, n, y2);
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
        const ptrdiff_t x_offset = b * x->stride[0] + s * x->stride[1], y_offset = b * y->stride[0] + s * y->stride[1];
        const size_t row = (size_t)s * half;
        for (ptrdiff_t head = 0; head < (ptrdiff_t)heads; head++)
            rotate_head(y, y_offset + head * y->stride[2], x, x_offset + head * x->stride[2], c + row, sn + row, flip,
                        half);
    }
    return AR_OK;
}
