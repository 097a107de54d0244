/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/cpu/gemm.h"

#if ARI_HAVE_ARM_PATHS
#include <arm_neon.h>

#define LANES 4
#define TARGET
/* The bytes of lane j's entry, 4*j + 0..3. */
#define BYTES(t) (uint8x16_t)(((words)(t)&15) * 0x04040404 + 0x03020100)
#define ROOTS(table, t) (vec) vqtbl4q_u8(vld1q_u8_x4((const uint8_t *)(table)), BYTES(t))
#define FMA(a, b, c) (vec) vfmaq_f32(c, a, b)
#define SIGNS(mask) vaddvq_u32((uint32x4_t)(mask) & (uint32x4_t){1, 2, 4, 8})

#include "ref/cpu/rows/exps.h"

#include "ref/cpu/rows/acts.h"

const ari_row_kernels ari_rows_neon = {exp_row, quotient_row, act_rows, false};
#endif
