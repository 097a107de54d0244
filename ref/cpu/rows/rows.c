/* SPDX-License-Identifier: Apache-2.0 */
/* Exponentials and quotients of rows, on which softmax and the loss spend most of their time, and activations. They are
 * computed in vectors where the result certainly rounds to the definition's bits, and by the definition elsewhere. */
#include "anyrank/activation.h"
#include "ref/cpu/gemm.h"
#include "ref/cpu/row_sum.h"
#include "ref/numerics/activation.h"

ARI_ROW_KERNEL void define_exps(float *e, const float *x, float m, size_t n)
{
#pragma GCC ivdep
    for (size_t j = 0; j < n; j++)
        e[j] = ari_softmax_exp(x[j], m);
}

ARI_ROW_KERNEL void define_quotients(float *y, const float *x, double l, size_t n)
{
#pragma GCC ivdep
    for (size_t j = 0; j < n; j++)
        y[j] = ari_softmax_p(x[j], l);
}

const ari_row_kernels *ari_row_kernels_at(size_t i)
{
#if ARI_HAVE_X86_PATHS
    if (i == 0)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") ? &ari_rows_avx512 : NULL;
    if (i == 1)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &ari_rows_avx2 : NULL;
#elif ARI_HAVE_ARM_PATHS
    if (i == 0)
        return &ari_rows_neon;
#endif
    static const ari_row_kernels defined = {define_exps, define_quotients, NULL, false};
    return i == ARI_ROW_KERNELS - 1 ? &defined : NULL;
}

const ari_row_kernels *ari_row_kernels_fastest(void)
{
    size_t i = 0;
    while (!ari_row_kernels_at(i))
        i++;
    return ari_row_kernels_at(i);
}

void ari_softmax_exps(float *e, const float *x, float m, size_t n)
{
    ari_row_kernels_fastest()->exps(e, x, m, n);
}

void ari_quotients(float *y, const float *x, double l, size_t n)
{
    ari_row_kernels_fastest()->quotients(y, x, l, n);
}

/* --- activations -------------------------------------------------------------------------------------------------- */

/* Defines a separate loop for each kind and pass. */
#define DEFINE(name, ACT)                                                                                       \
    ARI_ROW_KERNEL void name(const ari_act_row *r, size_t n)                                                    \
    {                                                                                                           \
        float *y = r->y, *dup = r->dup;                                                                         \
        const float *x = r->x, *up = r->up, *dy = r->dy;                                                        \
        if (!dy && !up) {                                                                                       \
            _Pragma("GCC ivdep") for (size_t j = 0; j < n; j++) y[j] = ari_act32(ACT, x[j]);                    \
        } else if (!dy) {                                                                                       \
            _Pragma("GCC ivdep") for (size_t j = 0; j < n; j++) y[j] = ari_gated_act(ACT, x[j], up[j]);         \
        } else if (!up) {                                                                                       \
            _Pragma("GCC ivdep") for (size_t j = 0; j < n; j++) y[j] = ari_mul32(dy[j], ari_dact32(ACT, x[j])); \
        } else {                                                                                                \
            _Pragma("GCC ivdep") for (size_t j = 0; j < n; j++)                                                 \
            {                                                                                                   \
                const float by_up = ari_gated_dup(ACT, dy[j], up[j], x[j]);                                     \
                const float by_gate = ari_gated_dgate(ACT, dy[j], up[j], x[j]);                                 \
                dup[j] = by_up;                                                                                 \
                y[j] = by_gate;                                                                                 \
            }                                                                                                   \
        }                                                                                                       \
    }
DEFINE(define_gelu_erf, AR_ACT_GELU_ERF)
DEFINE(define_gelu_tanh, AR_ACT_GELU_TANH)
DEFINE(define_silu, AR_ACT_SILU)
DEFINE(define_relu, AR_ACT_RELU)
DEFINE(define_none, AR_ACT_NONE)
DEFINE(define_clamped, AR_ACT_CLAMPED)
static void (*const define[])(const ari_act_row *r, size_t n) = {
    [AR_ACT_GELU_ERF] = define_gelu_erf, [AR_ACT_GELU_TANH] = define_gelu_tanh, [AR_ACT_SILU] = define_silu,
    [AR_ACT_RELU] = define_relu,         [AR_ACT_NONE] = define_none,           [AR_ACT_CLAMPED] = define_clamped};

enum { LANES = 16, TRIAL = 128, MOST = ARI_BLOCK + LANES };

/* Computes elements by the definition in full vectors, which is fastest. */
static void define_some(const ari_act_row *r, const uint32_t *indices, size_t n, ar_activation kind)
{
    float scratch[5][MOST];
    const ari_act_row gathered = {.y = scratch[0],
                                  .dup = r->dup ? scratch[1] : NULL,
                                  .x = scratch[2],
                                  .up = r->up ? scratch[3] : NULL,
                                  .dy = r->dy ? scratch[4] : NULL};
    const size_t padded_count = (n + LANES - 1) / LANES * LANES;
    for (size_t i = 0; i < padded_count; i++) {
        const size_t j = indices[i < n ? i : 0];
        scratch[2][i] = r->x[j];
        scratch[3][i] = r->up ? r->up[j] : 0.0f;
        scratch[4][i] = r->dy ? r->dy[j] : 0.0f;
    }
    define[kind](&gathered, padded_count);
    for (size_t i = 0; i < n; i++) {
        r->y[indices[i]] = gathered.y[i];
        if (r->dup)
            r->dup[indices[i]] = gathered.dup[i];
    }
}

/* Returns the fast kernel; NULL: use the definition, which is equally fast for GELU (tanh)'s slope alone, because its
 * argument takes longest. */
static ari_acts *fast(const ari_row_kernels *way, const ari_act_row *r, ar_activation kind)
{
    switch (kind) {
    case AR_ACT_SILU:
    case AR_ACT_CLAMPED:
        return way->acts;
    case AR_ACT_GELU_TANH:
        return r->dy && !r->up ? NULL : way->acts;
    case AR_ACT_GELU_ERF:
        return way->curves ? way->acts : NULL;
    }
    return NULL;
}

void ari_activations(const ari_row_kernels *way, const ari_act_row *r, size_t n, ar_activation kind)
{
    ari_acts *const acts = fast(way, r, kind);
    if (!acts) {
        define[kind](r, n);
        return;
    }
    uint32_t indices[MOST];
    const size_t vector_end = n - n % LANES, trial = vector_end < TRIAL ? vector_end : TRIAL;
    size_t unsure = acts(r, 0, trial, kind, indices), j = trial;
    if (unsure <= trial / 2) { /* otherwise these numbers are not of the kind that it serves */
        unsure += acts(r, trial, vector_end, kind, indices + unsure);
        j = vector_end;
    }
    for (; j < n; j++)
        indices[unsure++] = (uint32_t)j;
    if (unsure > 0)
        define_some(r, indices, unsure, kind);
}
