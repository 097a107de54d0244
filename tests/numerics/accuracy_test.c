/* SPDX-License-Identifier: Apache-2.0 */
/* How accurate contractions are (numerics.md, section 2), up to K = 4096; tests/extended/accuracy_table.c prints more.
 * The documented error of the exact contraction may be missed by a factor of 2 (one draw of 48 x 48 results stands for
 * the distribution), sgemm's by a factor of 3 (its blocking differs between processors). */
#include "tests/numerics/accuracy.h"
#include "tests/support/test.h"

typedef struct claim {
    accuracy_row row;
    double sgemm, exact, unscaled; /* as documented; unscaled 0: nothing is claimed */
} claim;

static void expect_documented(const claim *c)
{
    const accuracy_result r = accuracy_measure(&c->row, 48);
    printf("%-20s sgemm %.2e, exact %.2e, without step 0 %.2e\n", c->row.name, r.sgemm, r.exact, r.unscaled);
    cr_assert(r.exact <= 2.0 * c->exact, "exact: %g, documented %g", r.exact, c->exact);
    cr_assert(r.sgemm <= 3.0 * c->sgemm && r.sgemm >= c->sgemm / 3.0, "sgemm: %g, documented %g", r.sgemm, c->sgemm);
    cr_assert(c->unscaled == 0.0 || r.unscaled >= 0.5 * c->unscaled, "without step 0: %g, documented %g", r.unscaled,
              c->unscaled);
}

Test(accuracy, gaussian_is_better_than_sgemm)
{
    const claim c = {{"Gaussian", ACCURACY_GAUSSIAN, 4096}, 2e-7, 0.8e-7, 0.0};
    expect_documented(&c);
}

Test(accuracy, scaled_channels_cost_nothing_because_of_step_0)
{
    const claim c = {{"1 % of channels", ACCURACY_CHANNELS, 4096}, 2e-7, 0.8e-7, 3e-6};
    expect_documented(&c);
}

Test(accuracy, a_massive_activation_costs_nothing_because_of_step_0)
{
    const claim c = {{"massive activation", ACCURACY_MASSIVE, 4096}, 2e-7, 0.8e-7, 3.3e-5};
    expect_documented(&c);
}

Test(accuracy, an_attention_sink_costs_a_few_units)
{
    const claim c = {{"attention sink", ACCURACY_SINK, 4096}, 2.5e-7, 1e-6, 6e-5};
    expect_documented(&c);
}

Test(accuracy, log_normal_tokens_cost_a_few_units)
{
    const claim c = {{"log-normal tokens", ACCURACY_TOKENS, 4096}, 1.9e-7, 5e-7, 0.0};
    expect_documented(&c);
}
