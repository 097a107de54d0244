/* SPDX-License-Identifier: Apache-2.0 */
/* Functions of rows, of all 2^32 numbers, are the definition's bits in every way to compute them: rows_sweep. Prints
 * how many are not, and exits with 1 if there are any. A minute or more a core and function. */
#include <stdio.h>

#include "anyrank/activation.h"
#include "ref/cpu/row_sum.h"
#include "ref/numerics/activation.h"

enum { CHUNK = 1024 };
typedef struct rows {
    float x[CHUNK], y[CHUNK], dup[CHUNK], ones[CHUNK], up[CHUNK], wanted[CHUNK], wanted_dup[CHUNK];
} rows;

ARI_ROW_KERNEL void define_exps(rows *r)
{
    for (size_t i = 0; i < CHUNK; i++)
        r->wanted[i] = ari_softmax_exp(r->x[i], 0.0f);
}

ARI_ROW_KERNEL void define(rows *r, ar_activation kind)
{
    for (size_t i = 0; i < CHUNK; i++) {
        r->wanted[i] = ari_dact32(kind, r->x[i]);
        r->wanted_dup[i] = ari_act32(kind, r->x[i]);
    }
}

ARI_ROW_KERNEL size_t differ(const float *y, const float *wanted)
{
    size_t wrong = 0;
    for (size_t i = 0; i < CHUNK; i++)
        wrong += ari_bits32(y[i]) != ari_bits32(wanted[i]);
    return wrong;
}

static size_t wrong_exps(const ari_row_kernels *way, rows *r)
{
    way->exps(r->y, r->x, 0.0f, CHUNK);
    define_exps(r);
    return differ(r->y, r->wanted);
}

/* Values alone, and values beside slopes. */
static size_t wrong_acts(const ari_row_kernels *way, rows *r, ar_activation kind)
{
    for (size_t i = 0; i < CHUNK; i++) {
        r->ones[i] = 1.0f;
        r->up[i] = kind == AR_ACT_CLAMPED ? 0.0f : 1.0f;
    }
    define(r, kind);
    ari_activations(way, &(ari_act_row){.y = r->y, .x = r->x}, CHUNK, kind);
    const size_t wrong = differ(r->y, r->wanted_dup);
    const ari_act_row both = {.y = r->y, .dup = r->dup, .x = r->x, .dy = r->ones, .up = r->up};
    ari_activations(way, &both, CHUNK, kind);
    return wrong + differ(r->y, r->wanted) + differ(r->dup, r->wanted_dup);
}

/* kind < 0: of exponentials. */
static unsigned long long differing(const ari_row_kernels *way, int kind)
{
    unsigned long long wrong = 0;
#pragma omp parallel for schedule(dynamic, 64) reduction(+ : wrong)
    for (uint64_t from = 0; from < UINT64_C(1) << 32; from += CHUNK) {
        rows r;
        for (uint64_t i = 0; i < CHUNK; i++)
            r.x[i] = ari_float32((uint32_t)(from + i));
        wrong += kind < 0 ? wrong_exps(way, &r) : wrong_acts(way, &r, (ar_activation)kind);
    }
    return wrong;
}

int main(void)
{
    static const struct {
        const char *name;
        int kind;
    } functions[] = {{"exponentials", -1},
                     {"GELU (erf)", AR_ACT_GELU_ERF},
                     {"GELU (tanh)", AR_ACT_GELU_TANH},
                     {"SiLU", AR_ACT_SILU},
                     {"clamped", AR_ACT_CLAMPED}};
    unsigned long long all = 0;
    for (size_t i = 0; i < ARI_ROW_KERNELS; i++)
        for (size_t f = 0; ari_row_kernels_at(i) && f < sizeof functions / sizeof *functions; f++) {
            const unsigned long long wrong = differing(ari_row_kernels_at(i), functions[f].kind);
            printf("way %zu: %s: %llu of 2^32 inputs differ\n", i, functions[f].name, wrong);
            fflush(stdout);
            all += wrong;
        }
    return all != 0;
}
