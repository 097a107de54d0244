/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

/* Every emulated instruction, once. Each of avx_steps.h and neon_steps.h is in two files: one in which its instructions
 * are emulated, and ../emulated_real_test.c, in which they are the processor's own. */
enum { STEPS = 12, STEP_WORDS = 16 };
typedef uint32_t step_words[STEP_WORDS];

/* Steps of instructions that need these features of the processor; out[i] is the result of the i-th. */
typedef struct steps {
    const char *features;
    void (*run)(step_words out[STEPS], const step_words in[3]);
} steps;

enum { STEP_GROUPS = 4 }; /* at most */
extern const steps test_emulated_avx_steps[STEP_GROUPS], test_emulated_neon_steps[STEP_GROUPS];
