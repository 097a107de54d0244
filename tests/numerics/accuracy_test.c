/* SPDX-License-Identifier: Apache-2.0 */
/* How accurate contractions are (numerics.md, section 2), up to K = 4096; tests/extended/accuracy_table.c prints more.
 * The documented error of the exact contraction may be missed by a factor of 2 (one draw of 48 x 48 results stands for
 * the distribution), sgemm's by a factor of 6 (its blocking differs between processors: 3.1 was seen). */
#include "tests/numerics/accuracy.h"
#include "tests/support/test.h"

typedef struct claim {
    accuracy_row row;
    double sgemm, exact, unscaled; /* as documented; unscaled 0: nothing is claimed */
} claim;

static const claim claims[] = {
    {{"Gaussian", ACCURACY_GAUSSIAN, 4096}, 2e-7, 0.8e-7, 0.0}, /* better than sgemm */
    /* step 0 makes these cost nothing, or a few units */
    {{"1 % of channels", ACCURACY_CHANNELS, 4096}, 2e-7, 0.8e-7, 3e-6},
    {{"massive activation", ACCURACY_MASSIVE, 4096}, 2e-7, 0.8e-7, 3.3e-5},
    {{"attention sink", ACCURACY_SINK, 4096}, 2.5e-7, 1e-6, 6e-5},
    {{"log-normal tokens", ACCURACY_TOKENS, 4096}, 1.9e-7, 5e-7, 0.0},
};

Test(accuracy, of_contractions_is_as_documented)
{
    for (size_t i = 0; i < sizeof claims / sizeof *claims; i++) {
        const claim *c = &claims[i];
        const accuracy_result r = accuracy_measure(&c->row, 48);
        cr_expect(r.exact <= 2.0 * c->exact, "%s, exact: %g, documented %g", c->row.name, r.exact, c->exact);
        cr_expect(r.sgemm <= 6.0 * c->sgemm && r.sgemm >= c->sgemm / 6.0, "%s, sgemm: %g, documented %g", c->row.name,
                  r.sgemm, c->sgemm);
        cr_expect(c->unscaled == 0.0 || r.unscaled >= 0.5 * c->unscaled, "%s, without step 0: %g, documented %g",
                  c->row.name, r.unscaled, c->unscaled);
    }
}
