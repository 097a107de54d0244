/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/cpu/gemm.h"

#if ARI_HAVE_X86_PATHS
#include <immintrin.h>

/* Digits in int16 with AVX2: vpmaddwd multiplies and adds a pair, and vpaddd adds the result to the sum. Of 16
 * registers, 12 hold sums, 2 columns, one a row, and one the pair. */
#define K16_TARGET "avx2"
#define K16_FEATURES "avx2"
#define K16_NEEDS "AVX2"
#define K16_NAME "avx2"
#define K16_PATH ari_exact_avx2
#define K16_LANES 8
#define K16_ROWS 6
#define K16_VECTORS 2
#define K16_WORDS __m256i
#define K16_DOT(sum, a, b) _mm256_add_epi32(sum, _mm256_madd_epi16(a, b))

#include "ref/cpu/exact/k16.h"
#endif
