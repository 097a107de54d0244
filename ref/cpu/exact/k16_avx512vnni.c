/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/cpu/gemm.h"

#if ARI_HAVE_X86_PATHS
#include <immintrin.h>

/* Digits in int16 with AVX-512 VNNI: vpdpwssd of 16 lanes. Of 32 registers 24 hold sums. */
#define K16_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"
#define K16_FEATURES "avx512f avx512bw avx512dq avx512vl avx512_vnni"
#define K16_NEEDS "AVX-512 VNNI"
#define K16_NAME "avx512vnni"
#define K16_PATH ari_exact_avx512vnni
#define K16_LANES 16
#define K16_ROWS 8
#define K16_VECTORS 3
#define K16_WORDS __m512i
#define K16_DOT(sum, a, b) _mm512_dpwssd_epi32(sum, a, b)

#include "ref/cpu/exact/k16.h"
#endif
