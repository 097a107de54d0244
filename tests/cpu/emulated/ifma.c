/* SPDX-License-Identifier: Apache-2.0 */
/* The sums of an exact product with AVX-512 IFMA once more, as the library has them, but for its instructions: they are
 * those of avx512.h, in plain C, so that every machine runs every line of it. */
#define ARI_HAVE_IFMA 1
/* The library has this name. */
#define ari_exact_ifma emulated_exact_ifma

#include "tests/cpu/emulated/ifma.h"
#include "ref/cpu/device.h"
#include "ref/numerics/integer_sum.h"
/* After the headers of others: a compiler that is told that the processor has AVX-512 uses it for plain C as well. */
#define target(features)
#include "ref/cpu/gemm_ifma.c"

void test_emulate_ifma(ar_device *d)
{
    ((ari_cpu_device *)d)->path = &ari_exact_ifma;
}
