/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "anyrank/block.h"

/** e[j] = ari_softmax_exp(x[j], m). e may be x. */
void ari_softmax_exps(float *e, const float *x, float m, size_t n);
/** y[j] = ari_softmax_p(x[j], l), l and 1/l normal numbers. y may be x. */
void ari_quotients(float *y, const float *x, double l, size_t n);

/** A row of an activation, gated or not, or of its backward pass. Outputs may overwrite inputs.
 *   dy NULL, up NULL:  y = act(x)
 *   dy NULL:           y = fl32(act(x)*u)
 *   up NULL:           y = fl32(dy*act'(x))
 *   neither:           y = fl32(fl32(dy*u)*act'(x)), dup = fl32(dy*act(x)), or +0 where up was limited
 *  Here u is up; for AR_ACT_CLAMPED it is 1 + up, limited. */
typedef struct ari_act_row {
    float *y, *dup;
    const float *x, *up, *dy;
} ari_act_row;

/** Computes the elements [begin, end) in full vectors of at most 16. Elements with uncertain bits are left unchanged,
 *  and their numbers are written to `indices`. Returns how many there are. */
typedef size_t ari_acts(const ari_act_row *r, size_t begin, size_t end, ar_activation kind, uint32_t *indices);

/** The implementations, the fastest first; NULL: not in this build, or not supported by this processor. */
typedef struct ari_row_kernels {
    __typeof__(ari_softmax_exps) *exps;
    __typeof__(ari_quotients) *quotients;
    ari_acts *acts; /* NULL: by the definition */
    bool curves;    /* true if it implements GELU (erf) */
} ari_row_kernels;
enum { ARI_ROW_KERNELS = 3 };
const ari_row_kernels *ari_row_kernels_at(size_t i);
const ari_row_kernels *ari_row_kernels_fastest(void);
extern const ari_row_kernels ari_rows_avx512, ari_rows_avx2, ari_rows_neon; /* defined if ARI_HAVE_X86_PATHS or
                                                                               ARI_HAVE_ARM_PATHS is 1 */

/** A row of n <= ARI_BLOCK elements. */
void ari_activations(const ari_row_kernels *way, const ari_act_row *r, size_t n, ar_activation kind);
