/* SPDX-License-Identifier: Apache-2.0 */
/* As avx_steps.c. */
#include "tests/cpu/emulated/neon.h"
#define target(features)
#include "tests/cpu/emulated/neon_steps.h"

const steps test_emulated_neon_steps[STEP_GROUPS] = NEON_STEPS;
