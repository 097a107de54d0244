/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/cpu/shifts.h"

#include "ref/core/size.h"
#include "ref/cpu/simd.h"
#include "ref/numerics/bits.h"

/* An exponent of fp32 values lies in -148..128, so the factor is a normal binary64 number either way. */
ARI_SIMD static void factors_of(double *restrict out, const int32_t *restrict c, int32_t sign, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const int special = c[i] == ARI_EXP_ZERO || c[i] == ARI_EXP_NONFINITE;
        const double factor = ari_pow2(sign * (special ? 0 : c[i]));
        out[i] = c[i] == ARI_EXP_ZERO ? 0.0 : factor;
    }
}

ar_status ari_shift_factors(double **gives, const int32_t *c, int sign, size_t batch, size_t k)
{
    size_t n = 0;
    void *memory = NULL;
    AR_TRY(ari_mul_size(&n, batch, k));
    AR_TRY(ari_alloc(&memory, n, sizeof(double), "the factors of equilibration"));
    double *out = memory;
    if (c)
        factors_of(out, c, sign, n);
    else
        for (size_t i = 0; i < n; i++)
            out[i] = 1.0;
    *gives = out;
    return AR_OK;
}
