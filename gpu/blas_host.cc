/* SPDX-License-Identifier: Apache-2.0 */
/* Plain loops in place of a library. */
#include "gpu/blas.h"

namespace ari_emulated
{

ar_status blas_int8(ar_device *d, ar_queue *q, const blas_shape &s, const blas_matrix &c, const blas_matrix &a,
                    const blas_matrix &b, bool add)
{
    bool backward;
    AR_TRY(enter(d, q, &backward));
    for (size_t g = 0; g < s.batch; g++) {
        int32_t *to = dev<int32_t>(c.data) + g * c.step;
        const int8_t *left = dev<int8_t>(a.data) + g * a.step, *right = dev<int8_t>(b.data) + g * b.step;
        for (size_t i = 0; i < s.m; i++) {
            for (size_t j = 0; j < s.n; j++) {
                int32_t sum = add ? to[i * c.ld + j] : 0;
                for (size_t k = 0; k < s.k; k++)
                    sum += left[i * a.ld + k] * right[j * b.ld + k];
                to[i * c.ld + j] = sum;
            }
        }
    }
    return AR_OK;
}

static float element(const float *x, const blas_matrix &m, size_t row, size_t col)
{
    return m.transposed ? x[col * m.ld + row] : x[row * m.ld + col];
}

ar_status blas_float(ar_device *d, ar_queue *q, const blas_shape &s, const blas_matrix &c, const blas_matrix &a,
                     const blas_matrix &b, bool add, ar_precision operands)
{
    bool backward;
    (void)operands;
    AR_TRY(enter(d, q, &backward));
    for (size_t g = 0; g < s.batch; g++) {
        float *to = dev<float>(c.data) + g * c.step;
        const float *left = dev<float>(a.data) + g * a.step, *right = dev<float>(b.data) + g * b.step;
        for (size_t i = 0; i < s.m; i++) {
            for (size_t j = 0; j < s.n; j++) {
                float sum = 0.0f;
                for (size_t k = 0; k < s.k; k++)
                    sum += element(left, a, i, k) * element(right, b, j, k);
                to[i * c.ld + j] = add ? to[i * c.ld + j] + sum : sum;
            }
        }
    }
    return AR_OK;
}

} // namespace ari_emulated
