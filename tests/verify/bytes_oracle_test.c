/* SPDX-License-Identifier: Apache-2.0 */
/* The closed formulas of verify/bytes have the bytes of the list of operations (sim/plan). This file goes with that
 * list: nothing else of the tests of verify/bytes needs it. */
#include <stdio.h>
#include <stdlib.h>

#include "ref/models/parallel_private.h"
#include "sim/plan/ops.h"
#include "support/layout_draw.h"
#include "tests/verify/support.h"
#include "verify/bytes/bytes.h"

static bool same(const ari_step_case *s, uint64_t *formula, uint64_t *list)
{
    const ari_bytes_case c = {.run = s->run,
                              .config = s->config,
                              .forward_only = s->forward_only,
                              .verified = s->verified,
                              .routed = s->routed,
                              .repeats = s->repeats};
    *formula = *list = 0;
    const ar_status a = ari_traffic_bytes(list, s), b = ari_bytes_predict(formula, &c);
    return a == b && *list == *formula;
}

/* Draws of all kinds, each with everything that a seed's bits choose besides. */
static void vary(ari_step_case *s, layout_draw *d, uint64_t i, const ari_routed *routed)
{
    const uint64_t x = i * 0x9E3779B97F4A7C15u >> 20;
    if (x % 4 == 1 && d->config.experts.n == 0)
        layout_draw_add_experts(d, x >> 3);
    layout_draw_add_more(d);
    *s = (ari_step_case){.run = d->run, .config = &d->config, .repeats = x >> 5 & 1};
    s->run.numerics = x >> 6 & 1 ? AR_NUMERICS_NATIVE : AR_NUMERICS_EXACT;
    s->forward_only = (x >> 7) % 8 == 0;
    s->verified = (x >> 10) % 4 == 0 ? (x >> 12) % 3 : 0;
    s->routed = x >> 14 & 1 ? routed : NULL;
    s->run.steps = (x >> 15) % 3;
}

Test(bytes_oracle, draws_have_the_bytes_of_the_list)
{
    const char *given = getenv("ANYRANK_TEST_DRAWS"), *first = getenv("ANYRANK_TEST_SEED");
    const uint64_t draws = given ? strtoull(given, NULL, 10) : 3000, begin = first ? strtoull(first, NULL, 10) : 1;
    const ari_routed routed = {12345, 6789};
    char text[LAYOUT_DRAW_TEXT];
    int different = 0;
    for (uint64_t i = begin; i < begin + draws; i++) {
        layout_draw d;
        ari_step_case s;
        uint64_t formula = 0, list = 0, seed = i;
        layout_draw_make(&d, (layout_draw_kind)(i % 5), i);
        if (i % 2)
            cr_assert_ok(layout_draw_add_plan(&d, &seed));
        vary(&s, &d, i, &routed);
        if (!same(&s, &formula, &list) && different++ < 10) {
            layout_draw_text(text, sizeof text, &d);
            cr_expect(false, "draw %llu: formula %llu, list %llu (%lld)%s%s%s%s zero %d rules %zu mtp %zu\n%s",
                      (unsigned long long)i, (unsigned long long)formula, (unsigned long long)list,
                      (long long)(formula - list), s.run.numerics == AR_NUMERICS_NATIVE ? " native" : "",
                      s.forward_only ? " forward" : "", s.routed ? " routed" : "", s.verified ? " verified" : "",
                      s.run.parallel.zero, s.run.plan.rules, d.config.mtp, text);
        }
        ar_plan_fini(&d.run.plan);
    }
    cr_expect_eq(different, 0, "%d of %llu", different, (unsigned long long)draws);
}
