/* SPDX-License-Identifier: Apache-2.0 */
/* After the headers of others: a compiler that is told that the processor has the instructions uses them for plain C. */
#include "tests/cpu/emulated/avx.h"
#define target(features)
#include "tests/cpu/emulated/avx_steps.h"

const steps test_emulated_avx_steps[STEP_GROUPS] = AVX_STEPS;
