/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/cpu/gemm.h"

#if ARI_HAVE_X86_PATHS
#include <immintrin.h>

#define LANES 8
#define TARGET __attribute__((target("avx2,fma")))
#define HALF(table, t) _mm256_permutevar8x32_ps(_mm256_load_ps(table), (__m256i)(t))
#define ROOTS(table, t) (vec) _mm256_blendv_ps(HALF(table, t), HALF((table) + 8, t), (__m256)((words)(t) << 28))
#define FMA(a, b, c) (vec) _mm256_fmadd_ps(a, b, c)
#define SIGNS(mask) (uint32_t) _mm256_movemask_ps((__m256)(mask))

#include "ref/cpu/rows/exps.h"

#include "ref/cpu/rows/acts.h"

const ari_row_kernels ari_rows_avx2 = {exp_row, quotient_row, act_rows, false};
#endif
