/* SPDX-License-Identifier: Apache-2.0 */
/* The mistakes of buckets: what each makes of the gradients, in every run the same. */
#include "tests/support/test.h"
#include "tests/train/ddp_toy.h"

/* Three parameters of 4, 4 and 2 elements on two ranks, in buckets [p2 p1] [p0]: grad[0], grad[4] and grad[8] are the
 * first elements of each. */
static toy three(const char *fault, int steps)
{
    return (toy){.n = 3,
                 .size = {4, 4, 2},
                 .run.parallel = {.dp = 2},
                 .ddp = {.bucket_bytes = 24},
                 .run.fault = fault,
                 .steps = steps};
}

static const size_t first[3] = {0, 4, 8};

/* The right gradient of a parameter's first element, and rank r's own part of it. */
static float own(int r, size_t param, int step)
{
    return toy_term(r, 0, param, 0, step);
}

static float sum(size_t param, int step)
{
    return own(0, param, step) + own(1, param, step);
}

static void run(toy *t)
{
    cr_assert_ok(toy_run(t));
    cr_assert_str_eq(t->rank[0].buckets, "[p2 p1] [p0]");
}

static void expect(const toy *t, int r, size_t param, float value)
{
    cr_expect_eq(t->rank[r].grad[first[param]], value, "%s, %d steps, rank %d, p%zu: %.9g, not %.9g", t->run.fault,
                 t->steps, r, param, (double)t->rank[r].grad[first[param]], (double)value);
}

/* The sum of both ranks, twice that, nothing, what the rank itself had. */
typedef enum what { SUM, TWICE, NOTHING, OWN } what;

static const struct {
    const char *fault;
    int steps;
    what of[3]; /* p0, p1, p2 */
    bool eager;
} cases[] = {
    {NULL, 2, {SUM, SUM, SUM}, false},
    {"bucket_first_ready", 1, {SUM, NOTHING, SUM}, false},       /* loses what was not written yet */
    {"comm_before_producer", 1, {NOTHING, NOTHING, SUM}, false}, /* loses what was written last */
    {"bucket_reduced_twice", 1, {TWICE, TWICE, TWICE}, false},
    {"bucket_reduced_twice", 1, {TWICE, TWICE, TWICE}, true},
    {"bucket_not_packed", 1, {NOTHING, NOTHING, NOTHING}, false}, /* gives what it held before */
    {"bucket_stale_done", 1, {SUM, SUM, SUM}, false},
    {"bucket_stale_done", 2, {OWN, OWN, OWN}, false},
    {"step_before_copy_back", 1, {OWN, OWN, OWN}, false},
    {"dp_group_missing", 1, {OWN, OWN, OWN}, false},
};

Test(ddp_faults, each_leaves_its_own_gradients_on_every_rank)
{
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        toy t = three(cases[i].fault, cases[i].steps);
        t.ddp.mode = cases[i].eager ? AR_BUCKETS_EAGER : AR_BUCKETS_OVERLAP;
        run(&t);
        for (int r = 0; r < 2; r++) {
            for (size_t p = 0; p < 3; p++) {
                const float both = sum(p, t.steps - 1), mine = own(r, p, t.steps - 1);
                const float expected[] = {[SUM] = both, [TWICE] = 2 * both, [NOTHING] = 0.0f, [OWN] = mine};
                expect(&t, r, p, expected[cases[i].of[p]]);
            }
        }
    }
}

/* Bucket [p2 p1] is overwritten by p0, of 4 elements: both elements of p2, and two of p1. */
Test(ddp_faults, stale_activation_reuse_gives_a_bucket_the_next_ones_values)
{
    toy t = three("stale_activation_reuse", 1);
    run(&t);
    for (int r = 0; r < 2; r++) {
        expect(&t, r, 2, sum(0, 0));
        expect(&t, r, 0, sum(0, 0));
        cr_expect_neq(t.rank[r].grad[4], sum(1, 0));
        cr_expect_eq(t.rank[r].grad[6], toy_term(0, 0, 1, 2, 0) + toy_term(1, 0, 1, 2, 0), "the rest is right");
    }
}
