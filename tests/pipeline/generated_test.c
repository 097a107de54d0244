/* SPDX-License-Identifier: Apache-2.0 */
/* Schedules that are generated: legal with any number of ranks, stages and micro-batches, as long as the formulas say,
 * with as many activations as they say. */
#include "ref/core/schedule_private.h"
#include "ref/pipeline/schedule_private.h"
#include "support/together.h"

typedef struct schedule_case {
    ar_pp_schedule kind;
    int p, v, m;
    ar_pipeline_schedule *s;
} schedule_case;

/* Calls a function with every schedule of a kind on up to 8 ranks, with up to 4 stages each where it has several. */
static void each_case(ar_pp_schedule kind, void (*use)(const schedule_case *))
{
    for (int p = 1; p <= 8; p++)
        for (int v = 1; v <= (kind == AR_PP_INTERLEAVED ? 4 : 1); v++)
            for (int m = 1; m <= 17; m++) {
                schedule_case c = {kind, p, v, m, NULL};
                cr_assert_ok(ari_pipeline_schedule_create(&c.s, kind, p, v, m));
                use(&c);
                ari_pipeline_schedule_destroy(c.s);
            }
}

static ar_pp_run run_of(const schedule_case *c, ar_pp_times times)
{
    ar_pp_times each[32];
    ar_pp_run run;
    for (int i = 0; i < c->p * c->v; i++)
        each[i] = times;
    cr_assert_ok(ari_pipeline_schedule_run(&run, c->s, each, NULL, NULL));
    return run;
}

static int min(int a, int b)
{
    return a < b ? a : b;
}

/* Transfers of a rank's stages: each forward and each back, from or to another rank. */
static size_t transfers_of(const schedule_case *c, int rank)
{
    size_t n = 0;
    for (int stage = rank; c->p > 1 && stage < c->p * c->v; stage += c->p)
        n += 2 * (size_t)((stage > 0) + (stage + 1 < c->p * c->v));
    return n * (size_t)c->m;
}

static void expect_complete(const schedule_case *c)
{
    static unsigned char seen[32][17][AR_PP_KINDS];
    const bool parted = c->kind == AR_PP_ZERO_BUBBLE;
    memset(seen, 0, sizeof seen);
    for (int r = 0; r < c->p; r++) {
        size_t n = 0;
        const ar_pp_operation *o = ari_pipeline_schedule_rank(c->s, r, &n);
        cr_assert_eq(n, (size_t)(c->v * c->m * (parted ? 3 : 2)) + transfers_of(c, r));
        for (size_t i = 0; i < n; i++) {
            cr_assert(o[i].stage % c->p == r && o[i].stage < c->p * c->v && o[i].micro < c->m);
            cr_assert_eq(seen[o[i].stage][o[i].micro][o[i].kind]++, 0, "twice");
            cr_assert(parted ? o[i].kind != AR_PP_BACKWARD
                             : o[i].kind != AR_PP_BACKWARD_INPUT && o[i].kind != AR_PP_BACKWARD_WEIGHT);
        }
    }
}

/* The checker takes what the generator makes, with and without its transfers, and puts the same ones in. */
static void expect_legal(const schedule_case *c)
{
    const ar_pp_operation *lists[8], *again;
    ar_pp_operation *bare[8];
    size_t counts[8], bare_counts[8] = {0}, n = 0;
    OWNED(ari_pipeline_schedule_destroy) ar_pipeline_schedule *copy = NULL, *lowered = NULL;
    for (int r = 0; r < c->p; r++) {
        lists[r] = ari_pipeline_schedule_rank(c->s, r, &counts[r]);
        bare[r] = malloc(counts[r] * sizeof *bare[r]);
        for (size_t i = 0; i < counts[r]; i++)
            if (lists[r][i].kind <= AR_PP_BACKWARD_WEIGHT)
                bare[r][bare_counts[r]++] = lists[r][i];
    }
    const ar_pipeline_shape shape = ari_pipeline_schedule_shape(c->s);
    cr_assert_ok(ari_pipeline_schedule_from_lists(&copy, shape, lists, counts));
    cr_assert_ok(ari_pipeline_schedule_from_lists(&lowered, shape, (const ar_pp_operation *const *)bare, bare_counts));
    for (int r = 0; r < c->p; r++) {
        again = ari_pipeline_schedule_rank(lowered, r, &n);
        cr_assert(n == counts[r] && memcmp(again, lists[r], n * sizeof *again) == 0);
        free(bare[r]);
    }
}

static void expect_near(double value, double formula, const schedule_case *c, const char *what)
{
    cr_assert_lt(fabs(value - formula), 1e-9 * (1 + formula), "%s of %s, p=%d v=%d m=%d: %g, by formula %g", what,
                 ari_pp_schedule_name(c->kind), c->p, c->v, c->m, value, formula);
}

static void gpipe(const schedule_case *c)
{
    const ar_pp_run run = run_of(c, (ar_pp_times){1, 1.25, 0.75, 0});
    expect_near(run.bubble, (c->p - 1.0) / c->m, c, "bubble");
    for (int r = 0; r < c->p; r++)
        cr_assert_eq(run.rank[r].in_flight, (size_t)c->m);
}

static void one_forward_one_backward(const schedule_case *c)
{
    const ar_pp_run run = run_of(c, (ar_pp_times){1, 1.25, 0.75, 0});
    expect_near(run.bubble, (c->p - 1.0) / c->m, c, "bubble");
    for (int r = 0; r < c->p; r++)
        cr_assert_eq(run.rank[r].in_flight, (size_t)min(c->m, c->p - r));
}

/* arXiv:2104.04473, section 2.2. Where p does not divide m it waits at most as long as with the next multiple. */
static void interleaved(const schedule_case *c)
{
    const ar_pp_run run = run_of(c, (ar_pp_times){1, 1.25, 0.75, 0});
    const int more = (c->p - c->m % c->p) % c->p;
    if (more == 0)
        expect_near(run.bubble, (c->p - 1.0) / (c->v * c->m), c, "bubble");
    cr_assert_leq(run.makespan, 3.0 * (c->v * (c->m + more) + c->p - 1) + 1e-9);
    for (int r = 0; r < c->p; r++) {
        const int most = c->v == 1 ? c->p - r : 2 * (c->p - r - 1) + (c->v - 1) * c->p + 1;
        cr_assert_leq(run.rank[r].in_flight, (size_t)min(c->v * c->m, most));
        if (more == 0)
            cr_assert_eq(run.rank[r].in_flight, (size_t)min(c->v * c->m, most));
    }
}

/* arXiv:2401.10241, table 2: ranks wait (p-1)(F+I-W), where W takes no longer than F. No rank has more than the first
 * one of 1F1B. */
static void zero_bubble(const schedule_case *c)
{
    const ar_pp_run run = run_of(c, (ar_pp_times){1, 1, 1, 0}), uneven = run_of(c, (ar_pp_times){1, 1.25, 0.75, 0});
    if (c->m >= c->p) {
        expect_near(run.bubble, (c->p - 1.0) / (3 * c->m), c, "bubble");
        expect_near(uneven.bubble, (c->p - 1.0) * 1.5 / (3 * c->m), c, "bubble");
    } else
        cr_assert_lt(run.bubble, (c->p - 1.0) / c->m);
    for (int r = 0; r < c->p; r++)
        cr_assert_eq(run.rank[r].in_flight, (size_t)min(c->m, c->p));
}

CLAIM(every_operation_is_there_once)
{
    for (int kind = 0; kind < AR_PP_SCHEDULES; kind++)
        each_case((ar_pp_schedule)kind, expect_complete);
}

CLAIM(the_checker_takes_all)
{
    for (int kind = 0; kind < AR_PP_SCHEDULES; kind++)
        each_case((ar_pp_schedule)kind, expect_legal);
}

CLAIM(times_and_activations_are_the_formulas)
{
    each_case(AR_PP_GPIPE, gpipe);
    each_case(AR_PP_1F1B, one_forward_one_backward);
    each_case(AR_PP_INTERLEAVED, interleaved);
    each_case(AR_PP_ZERO_BUBBLE, zero_bubble);
}

/* The receive of what a rank needs next is posted before it computes what is before. */
CLAIM(transfers_go_on_beside_computations)
{
    OWNED(ari_pipeline_schedule_destroy) ar_pipeline_schedule *s = NULL;
    ar_pp_run slow, fast;
    ar_pp_times times[4];
    cr_assert_ok(ari_pipeline_schedule_create(&s, AR_PP_GPIPE, 4, 1, 8));
    for (int i = 0; i < 4; i++)
        times[i] = (ar_pp_times){1, 1, 1, 1};
    cr_assert_ok(ari_pipeline_schedule_run(&slow, s, times, NULL, NULL));
    for (int i = 0; i < 4; i++)
        times[i].transfer = 0;
    cr_assert_ok(ari_pipeline_schedule_run(&fast, s, times, NULL, NULL));
    cr_expect_eq(fast.makespan, 33); /* (8 + 3) (1 + 2) */
    cr_expect_eq(slow.makespan, 39); /* 3 transfers forward, 3 back; the others go on beside computations */
}

static double makespan_of_two(ar_pp_schedule kind, int micro_batches, double transfer)
{
    const ar_pp_times times[] = {{1, 1, 1, transfer}, {1, 1, 1, transfer}};
    OWNED(ari_pipeline_schedule_destroy) ar_pipeline_schedule *s = NULL;
    ar_pp_run run;
    cr_assert_ok(ari_pipeline_schedule_create(&s, kind, 2, 1, micro_batches));
    cr_assert_ok(ari_pipeline_schedule_run(&run, s, times, NULL, NULL));
    return run.makespan;
}

CLAIM(transfers_of_a_pair_wait_for_one_another_and_for_their_receiver)
{
    /* 4 micro-batches are sent at 1 to 4 and come at 3, 5, 7, 9; the last gradient is sent at 18 and comes at 20 */
    cr_expect_eq(makespan_of_two(AR_PP_GPIPE, 4, 2), 22);
    /* the second one is sent at 2, and can be received from 5 on, when the first has gone forward */
    cr_expect_eq(makespan_of_two(AR_PP_1F1B, 2, 3), 16);
}

CLAIM(stages_may_take_different_times)
{
    const ar_pp_times times[] = {{1, 1, 1, 0.5}, {3, 3, 3, 0.25}};
    OWNED(ari_pipeline_schedule_destroy) ar_pipeline_schedule *s = NULL;
    ar_pp_run run;
    cr_assert_ok(ari_pipeline_schedule_create(&s, AR_PP_1F1B, 2, 1, 2));
    cr_assert_ok(ari_pipeline_schedule_run(&run, s, times, NULL, NULL));
    cr_expect_eq(run.makespan, 1 + 0.5 + 9 + 9 + 0.5 + 2);
    cr_expect(run.rank[0].busy == 6 && run.rank[1].busy == 18 && run.rank[1].end == 19.5);
}

CLAIM(what_cannot_be_is_refused)
{
    OWNED(ari_pipeline_schedule_destroy) ar_pipeline_schedule *s = NULL;
    ar_pp_times times[] = {{1, 1, 1, 0}, {1, 1, -1, 0}};
    ar_pp_run run;
    cr_expect_refused(ari_pipeline_schedule_create(&s, AR_PP_1F1B, 0, 1, 1), AR_ERR_ARG, "0 ranks");
    cr_expect_refused(ari_pipeline_schedule_create(&s, AR_PP_1F1B, 2, 2, 1), AR_ERR_ARG,
                      "2 stages of each rank in 1f1b");
    cr_expect_refused(ari_pipeline_schedule_create(&s, AR_PP_INTERLEAVED, 200, 2, 1), AR_ERR_ARG, "400 stages");
    cr_expect_refused(ari_pipeline_schedule_create(&s, AR_PP_GPIPE, 2, 1, 0), AR_ERR_ARG, "0 micro-batches");
    cr_expect_refused(ari_pipeline_schedule_create(&s, AR_PP_GPIPE, 2, 1, 1 << 30), AR_ERR_OVERFLOW, "1073741824");
    cr_expect_refused(ari_pipeline_schedule_create(&s, AR_PP_SCHEDULES, 2, 1, 1), AR_ERR_ARG, "schedule 4");
    cr_expect_null(s);
    cr_assert_ok(ari_pipeline_schedule_create(&s, AR_PP_GPIPE, 2, 1, 1));
    cr_expect_refused(ari_pipeline_schedule_run(&run, s, times, NULL, NULL), AR_ERR_ARG, "stage 1 takes");
}

EVERY_CLAIM(pipeline_generated)
