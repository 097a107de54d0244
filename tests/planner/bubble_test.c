/* SPDX-License-Identifier: Apache-2.0 */
/* What pipelines of equal stages wait and keep when they run in virtual time, against the closed forms of their
 * papers. */
#include "ref/core/schedule_private.h"
#include "support/pipeline_measure.h"
#include "support/together.h"

static void expect_within_one_percent(const pipeline_case *c, const char *what, double got, double want)
{
    cr_expect(fabs(got - want) <= 0.01 * want, "%s of %s, p=%d, m=%d: %.6g, by its formula %.6g", what,
              ari_pp_schedule_name(c->schedule), c->ranks, c->micro_batches, got, want);
}

/* A micro-batch's activations are those of GPipe, a part for each. */
CLAIM(waiting_and_memory_are_those_of_the_formulas)
{
    pipeline_measured all[2];
    for (int i = 0; i < 2; i++) {
        const pipeline_case c = {AR_PP_GPIPE, i ? 4 : 2, 1, PIPELINE_MOST_MICRO};
        pipeline_measure(&all[i], &c);
    }
    for (int i = 0; i < PIPELINE_CASES; i++) {
        const pipeline_case c = pipeline_case_of(i);
        pipeline_measured got;
        pipeline_measure(&got, &c);
        expect_within_one_percent(&c, "bubble", got.bubble, pipeline_bubble(&c));
        for (int r = 0; r < c.ranks; r++) {
            const double one = all[c.ranks == 4].kept[r] / PIPELINE_MOST_MICRO;
            expect_within_one_percent(&c, "memory", got.kept[r], pipeline_kept(&c, r, one, pipeline_late(&c)));
        }
    }
}

EVERY_CLAIM(bubble)
