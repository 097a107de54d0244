/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/logging.h>

#include "ref/cpu/device.h"
#include "tests/cpu/contract_cases.h"
#include "tests/support/test.h"

/* Emulated instructions against the processor's own, where it has them: the same words out for the same words in. */
#if ARI_HAVE_X86_PATHS
#include "tests/cpu/emulated/avx_steps.h"
static const steps real_steps[STEP_GROUPS] = AVX_STEPS, *const emulated_steps = test_emulated_avx_steps;
#elif ARI_HAVE_ARM_PATHS
#include "tests/cpu/emulated/neon_steps.h"
static const steps real_steps[STEP_GROUPS] = NEON_STEPS, *const emulated_steps = test_emulated_neon_steps;
#endif

#if ARI_HAVE_X86_PATHS || ARI_HAVE_ARM_PATHS
/* Any words, and in every other round halves that are 0, 1, -1, 2^15 - 1 or -2^15: sums of their products wrap around. */
static void fill(step_words in[3], uint64_t *state, int round)
{
    static const uint16_t ends[] = {0, 1, 0xffff, 0x7fff, 0x8000};
    for (size_t i = 0; i < 3; i++)
        for (size_t j = 0; j < STEP_WORDS; j++) {
            const uint32_t any = case_random(state);
            const uint32_t high = ends[any % 5], low = ends[any / 5 % 5];
            in[i][j] = round % 2 == 0 ? any : high << 16 | low;
        }
}

Test(emulated_real, gives_what_the_processor_gives)
{
    uint64_t state = 1;
    for (size_t g = 0; g < STEP_GROUPS && real_steps[g].features; g++) {
        const bool here = ari_cpu_has(real_steps[g].features);
        cr_log_info("%s: %s", real_steps[g].features, here ? "compared" : "not on this processor");
        for (int round = 0; here && round < 200; round++) {
            step_words in[3], want[STEPS] = {{0}}, got[STEPS] = {{0}};
            fill(in, &state, round);
            real_steps[g].run(want, (const step_words *)in);
            emulated_steps[g].run(got, (const step_words *)in);
            for (size_t i = 0; i < STEPS; i++)
                cr_assert_eq(memcmp(got[i], want[i], sizeof got[i]), 0, "%s: step %zu of round %d differs",
                             real_steps[g].features, i, round);
        }
    }
}
#else
Test(emulated_real, gives_what_the_processor_gives)
{
    cr_skip("no instructions of this processor are emulated");
}
#endif
