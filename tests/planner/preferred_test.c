/* SPDX-License-Identifier: Apache-2.0 */
/* Which of the fastest layouts is advised. */
#include "support/together.h"
#include "tests/planner/shapes.h"
#include "verify/plan/search.h"

static ari_search search_of(const ar_config *c, const char *cluster, size_t batch, size_t seq)
{
    ari_search s = {.base = shape_planned(c, 1, false, batch, seq), .ranks = 64};
    s.base.flash = true;
    s.base.step.run.ddp.bucket_bytes = ARI_BUCKETS_USUAL;
    cr_assert_ok(ar_sim_cluster_parse(&s.time.cluster, cluster));
    return s;
}

static ari_candidate fitting(ari_choice c, double seconds)
{
    c.cp_inner = c.ep = c.virtual_stages = c.micro_batches = 1;
    return (ari_candidate){.choice = c, .seconds = seconds, .fits = true};
}

/* A twentieth above the fastest, and no more, the simpler comes first; what few would take after others, and last what
 * differs in two axes from every published run, here in tp and cp from one of 15 billion parameters with tp=4. */
CLAIM(of_equal_layouts_the_simplest_is_first)
{
    const ar_config c = shape_bundled("llama-3-8b");
    ari_search s = search_of(&c, "h100", 512, 8192);
    ari_candidate list[] = {
        fitting((ari_choice){.tp = 1, .cp = 4, .pp = 1, .dp = 16}, 1.00),
        fitting((ari_choice){.tp = 2, .cp = 1, .pp = 2, .dp = 16}, 1.02),
        fitting((ari_choice){.tp = 2, .cp = 2, .pp = 1, .dp = 16}, 1.03),
        fitting((ari_choice){.tp = 2, .cp = 1, .pp = 1, .dp = 32}, 1.04),
        fitting((ari_choice){.tp = 1, .cp = 1, .pp = 1, .dp = 64}, 1.06),
    };
    ari_ranking r = {.layout = list, .n = 5, .fitting = 5};
    cr_assert_ok(ari_ranking_prefer(&r, &s));
    cr_expect_eq(r.equal, 4u);
    const double order[] = {1.04, 1.02, 1.03, 1.00, 1.06};
    for (size_t i = 0; i < r.n; i++)
        cr_expect_eq(list[i].seconds, order[i], "%zu: %g", i, list[i].seconds);
    r.equal = 0;
    cr_assert_ok(ar_sim_cluster_parse(&s.time.cluster, "h100 flops=989T"));
    cr_assert_ok(ari_ranking_prefer(&r, &s));
    cr_expect_eq(r.equal, 0u);
}

CLAIM(unusual_is_what_few_would_take)
{
    const ar_config small = shape_bundled("llama-3-8b"), large = shape_bundled("llama-3-70b");
    const struct {
        const ar_config *config;
        const char *cluster;
        size_t batch, seq;
        ari_choice choice;
        unsigned is;
    } cases[] = {
        {&small, "h100", 64, 8192, {.tp = 1, .cp = 1, .pp = 1, .dp = 64, .micro_batches = 1}, 0},
        {&small, "h100", 64, 8192, {.tp = 1, .cp = 2, .pp = 1, .dp = 32, .micro_batches = 2}, ARI_UNUSUAL_CP},
        {&small, "h100", 64, 16384, {.tp = 1, .cp = 2, .pp = 1, .dp = 32, .micro_batches = 2}, 0},
        {&small, "h100", 64, 16384, {.tp = 1, .cp = 32, .pp = 1, .dp = 2, .micro_batches = 32}, ARI_UNUSUAL_TOKENS},
        {&small, "h100", 64, 16384, {.tp = 1, .cp = 32, .pp = 1, .dp = 2, .micro_batches = 8}, 0},
        {&small, "h100", 64, 8192, {.tp = 16, .cp = 1, .pp = 1, .dp = 4, .micro_batches = 1}, ARI_UNUSUAL_NODES},
        {&large, "h100", 64, 8192, {.tp = 4, .cp = 1, .pp = 4, .dp = 4, .micro_batches = 1}, ARI_UNUSUAL_TP},
        {&large, "h200", 64, 8192, {.tp = 4, .cp = 1, .pp = 4, .dp = 4, .micro_batches = 1}, 0},
        {&large, "h100", 64, 8192, {.tp = 8, .cp = 1, .pp = 4, .dp = 2, .micro_batches = 1}, 0},
        {&large,
         "h100",
         64,
         8192,
         {.tp = 8, .pp = 4, .dp = 2, .zero = 3, .cp = 1, .micro_batches = 1},
         ARI_UNUSUAL_ZERO},
        {&large, "h100", 64, 8192, {.tp = 8, .pp = 1, .dp = 8, .zero = 3, .cp = 1, .micro_batches = 1}, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const ari_search s = search_of(cases[i].config, cases[i].cluster, cases[i].batch, cases[i].seq);
        cr_expect_eq(ari_unusual_of(&s, &cases[i].choice), cases[i].is, "case %zu", i);
    }
}

/* Published: Llama 3 405B with tp=8 pp=16 and 4 stages of a rank, DeepSeek-V3 with pp=16; none of 2 billion
 * parameters. */
CLAIM(published_is_what_differs_in_one_axis)
{
    static const struct {
        double parameters;
        ari_choice choice;
        bool is;
    } cases[] = {
        {405e9, {.tp = 8, .cp = 1, .pp = 16, .virtual_stages = 4, .zero = 1, .schedule = AR_PP_INTERLEAVED}, true},
        {405e9, {.tp = 8, .cp = 1, .pp = 16, .virtual_stages = 16, .zero = 2, .schedule = AR_PP_INTERLEAVED}, true},
        {405e9, {.tp = 8, .cp = 1, .pp = 2, .virtual_stages = 32, .zero = 1, .schedule = AR_PP_INTERLEAVED}, false},
        {671e9, {.tp = 1, .cp = 1, .pp = 16, .zero = 1, .schedule = AR_PP_ZERO_BUBBLE}, true},
        {671e9, {.tp = 1, .cp = 1, .pp = 1, .zero = 3}, false},
        {70e9, {.tp = 8, .cp = 1, .pp = 2, .virtual_stages = 20, .zero = 2, .schedule = AR_PP_INTERLEAVED}, false},
        {2e9, {.tp = 8, .cp = 8, .pp = 8, .zero = 3}, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        cr_expect_eq(ari_choice_is_published(&cases[i].choice, cases[i].parameters), cases[i].is, "case %zu", i);
}

EVERY_CLAIM(preferred)
