/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/cpu/gemm.h"

#if ARI_HAVE_X86_PATHS
#include <immintrin.h>

/* Digits in int16 with AVX-VNNI: vpdpwssd in the encoding of AVX, on processors without AVX-512. */
#define K16_TARGET "avx2,avxvnni"
#define K16_FEATURES "avx2 avx_vnni"
#define K16_NEEDS "AVX-VNNI"
#define K16_NAME "avxvnni"
#define K16_PATH ari_exact_avxvnni
#define K16_LANES 8
#define K16_ROWS 6
#define K16_VECTORS 2
#define K16_WORDS __m256i
#define K16_DOT(sum, a, b) _mm256_dpwssd_avx_epi32(sum, a, b)

#include "ref/cpu/exact/k16.h"
#endif
