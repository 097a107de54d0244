/* SPDX-License-Identifier: Apache-2.0 */
/* Functions of rows, of all 2^32 numbers, are the definition's bits in every way to compute them: rows_sweep. Prints how
 * many are not, and exits with 1 if there are any. A minute or more a core and function. */
#include <stdio.h>

#include "ref/cpu/row_sum.h"

#define EACH(name, of)                                           \
    ARI_ROW_KERNEL void name(float *y, const float *x, size_t n) \
    {                                                            \
        for (size_t j = 0; j < n; j++)                           \
            y[j] = of;                                           \
    }
EACH(define_exps, ari_softmax_exp(x[j], 0.0f))
EACH(define_gelus, ari_gelu_erf32(x[j]))
EACH(define_slopes, ari_dgelu_erf32(x[j]))

#define BY_WAY(i)                                            \
    static void exps_##i(float *y, const float *x, size_t n) \
    {                                                        \
        ari_row_way_at(i)->exps(y, x, 0.0f, n);              \
    }
BY_WAY(0)
BY_WAY(1)
BY_WAY(2)

static void gelus(float *y, const float *x, size_t n)
{
    ari_gelus(y, x, n, false);
}

static void slopes(float *y, const float *x, size_t n)
{
    ari_gelus(y, x, n, true);
}

typedef void row_fn(float *y, const float *x, size_t n);

static unsigned long long differing(row_fn *fast, row_fn *define)
{
    enum { CHUNK = ARI_BLOCK };
    unsigned long long wrong = 0;
#pragma omp parallel for schedule(dynamic, 64) reduction(+ : wrong)
    for (uint64_t from = 0; from < UINT64_C(1) << 32; from += CHUNK) {
        float x[CHUNK], y[CHUNK], defined[CHUNK];
        for (uint64_t i = 0; i < CHUNK; i++)
            x[i] = ari_float32((uint32_t)(from + i));
        fast(y, x, CHUNK);
        define(defined, x, CHUNK);
        for (size_t i = 0; i < CHUNK; i++)
            wrong += ari_bits32(y[i]) != ari_bits32(defined[i]);
    }
    return wrong;
}

int main(void)
{
    static row_fn *const exps[] = {exps_0, exps_1, exps_2};
    unsigned long long all = 0;
    for (size_t i = 0; i < ARI_ROW_WAYS; i++)
        if (ari_row_way_at(i)) {
            const unsigned long long wrong = differing(exps[i], define_exps);
            printf("%llu of 2^32 exponentials differ in way %zu\n", wrong, i);
            all += wrong;
        }
    const unsigned long long of_gelu = differing(gelus, define_gelus), of_slope = differing(slopes, define_slopes);
    printf("%llu of 2^32 GELUs and %llu of its slopes differ\n", of_gelu, of_slope);
    return all + of_gelu + of_slope != 0;
}
