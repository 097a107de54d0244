/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "tests/support/test.h"

/* Claims that need no process of their own, which one Test of the file checks in their order: Criterion starts a process
 * for each Test, which takes longer than most claims do. The first that fails ends the Test, and says where it stands. */
typedef struct claim {
    void (*check)(void);
    struct claim *next;
} claim;

static claim *first_claim, **next_claim = &first_claim;

#define CLAIM(name)                                             \
    static void name(void);                                     \
    __attribute__((constructor)) static void claim_##name(void) \
    {                                                           \
        static claim this = {name, NULL};                       \
        *next_claim = &this;                                    \
        next_claim = &this.next;                                \
    }                                                           \
    static void name(void)

#define EVERY_CLAIM(suite)                                 \
    Test(suite, every_claim)                               \
    {                                                      \
        for (const claim *c = first_claim; c; c = c->next) \
            c->check();                                    \
    }
