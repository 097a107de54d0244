/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "ref/numerics/accumulator.h"
#include "tests/cpu/contract_cases.h"
#include "tests/support/test.h"

/* The state of an accumulator of n elements, to which values are added by their definition. */
typedef struct state {
    size_t n;
    uint8_t *t;
    int64_t *hl;
    bool narrow;
} state;

static inline state state_create(size_t n, bool narrow)
{
    return (state){.n = n, .t = case_alloc(n, 1), .hl = case_alloc(2 * n, sizeof(int64_t)), .narrow = narrow};
}

static inline void state_destroy(state *s)
{
    free(s->t);
    free(s->hl);
}

static inline void add_one(state *s, size_t at, float v)
{
    ari_acc_add(&s->t[at], &s->hl[at], &s->hl[s->n + at], v, s->narrow);
}

static inline void same_state(const state *got, const state *want, const char *what)
{
    for (size_t i = 0; i < want->n; i++)
        cr_assert(got->t[i] == want->t[i] && got->hl[i] == want->hl[i] && got->hl[got->n + i] == want->hl[got->n + i],
                  "%s: element %zu of %zu: t %d H %lld L %lld, expected t %d H %lld L %lld", what, i, got->n, got->t[i],
                  (long long)got->hl[i], (long long)got->hl[got->n + i], want->t[i], (long long)want->hl[i],
                  (long long)want->hl[got->n + i]);
}
