/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/cpu/gemm.h"

#if ARI_HAVE_X86_PATHS
#include "ref/cpu/rows/gelu.h"

#define LANES 16
#define TARGET __attribute__((target("avx512f,avx512dq")))
#define ROOTS(table, t) (vec) _mm512_permutexvar_ps((__m512i)(t), _mm512_load_ps(table))
#define FMA(a, b, c) (vec) _mm512_fmadd_ps(a, b, c)
#define MASK __mmask16
#define LESS(a, b) _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ)
#define SAME(a, b) _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ)
#define UNDER(a, b) _mm512_cmplt_epu32_mask((__m512i)(a), (__m512i)(b))
#define PICK(mask, a, b) (vec) _mm512_mask_blend_ps(mask, b, a)
#define SIGNS(mask) (uint32_t)(uint16_t)(mask)
#define CURVES(x, slopes, sure) (vec) ari_curves(x, slopes, sure)

#include "ref/cpu/rows/exps.h"

#include "ref/cpu/rows/acts.h"

const ari_row_kernels ari_rows_avx512 = {exp_row, quotient_row, act_rows, true};
#endif
