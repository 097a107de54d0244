/* SPDX-License-Identifier: Apache-2.0 */
/* The exact product with AVX-512 IFMA once more, as the library has it, but for its instructions: they are those of
 * avx512.h, in plain C, so that every machine runs every line of it. */
#define ARI_HAVE_IFMA 1
/* The library has these names. */
#define ari_exact_ifma emulated_exact_ifma
#define ari_cpu_gemm_i64 emulated_gemm_i64_portable
#define ari_cpu_gemm_round emulated_gemm_round_portable
#define ari_cpu_gemm_acc emulated_gemm_acc_portable
#define ari_cpu_gemm_i64_ifma emulated_gemm_i64
#define ari_cpu_gemm_round_ifma emulated_gemm_round
#define ari_cpu_gemm_acc_ifma emulated_gemm_acc

#include "tests/cpu/emulated/ifma.h"
#include "ref/cpu/cpu_device.h"
#include "ref/cpu/gemm_exact.c"
/* After the headers of others: a compiler that is told that the processor has AVX-512 uses it for plain C as well. */
#define target(features)
#include "ref/cpu/gemm_ifma.c"

void test_emulate_ifma(ar_device *d)
{
    ar_device_ops *ops = &((ari_cpu_device *)d)->ops;
    ops->gemm_i64 = ari_cpu_gemm_i64_ifma;
    ops->gemm_round = ari_cpu_gemm_round_ifma;
    ops->gemm_acc = ari_cpu_gemm_acc_ifma;
}
