/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_SUPPORT_TOGETHER_H
#define TESTS_SUPPORT_TOGETHER_H

#include <stddef.h>

/* Claims that need no process of their own, void functions without arguments, one after the other in one: Criterion
 * starts a process for each Test, which takes longer than most claims do. The first that fails ends the Test, and says
 * where it stands. */
#define TOGETHER(...)                                                              \
    do {                                                                           \
        void (*const claims[])(void) = {__VA_ARGS__};                              \
        for (size_t claim_ = 0; claim_ < sizeof claims / sizeof *claims; claim_++) \
            claims[claim_]();                                                      \
    } while (0)

#endif
