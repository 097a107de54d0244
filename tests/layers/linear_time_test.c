/* SPDX-License-Identifier: Apache-2.0 */
/* Linear layers whose collectives go beside their products, by the virtual clock: K chunks that take t_a to gather (or
 * scatter) and t_g to multiply take t_a + (K-1) max(t_a, t_g) + t_g, within 1 %. */
#include "tests/layers/linear_case.h"

#include "ref/core/lane.h"

enum { IN = 8, OUT = 12 };

/* A layer on ranks of which each has n positions of every sample, and the seconds that the links and the products of a
 * rank take for one of them. */
typedef struct timed_case {
    style style;
    int ranks;
    size_t samples, n, overlap;
    double t_a, t_g;
} timed_case;

typedef struct timed_job {
    timed_case c;
    double forward[MOST_RANKS], backward[MOST_RANKS]; /* seconds */
} timed_job;

static double now(void)
{
    return (double)ari_lane_self()->virtual_ns * 1e-9;
}

static ar_status passes(ar_ctx *ctx, timed_job *j, ar_module *m, ar_saved *saved)
{
    const timed_case *c = &j->c;
    const size_t ranks = ranks_of(ctx), r = rank_of(ctx);
    const bool column = c->style == COLUMN;
    const size_t x_shape[] = {c->samples, column ? c->n : c->n * ranks, column ? IN : IN / ranks};
    const size_t y_shape[] = {c->samples, column ? c->n * ranks : c->n, column ? OUT / ranks : OUT};
    ar_tensor x, y, dx, dy;
    AR_TRY(ar_module_fresh(m, ctx, 1));
    AR_TRY(ar_ctx_tensor(ctx, &x, AR_F32, 3, x_shape));
    AR_TRY(ar_ctx_tensor(ctx, &dy, AR_F32, 3, y_shape));
    const double begin = now();
    AR_TRY(ar_module_forward(m, ctx, saved, &y, &x, NULL));
    const double between = now();
    AR_TRY(ar_module_backward(m, ctx, saved, &dx, &dy, NULL));
    j->forward[r] = between - begin;
    j->backward[r] = now() - between;
    return AR_OK;
}

static ar_status timed_rank(ar_ctx *ctx, void *user)
{
    timed_job *j = user;
    const ar_linear_options o = {.input_is_sharded = true};
    ar_module *m = NULL;
    ar_saved *saved = NULL;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ar_saved_create(&saved));
    AR_TRY_TO(done, st,
              (j->c.style == COLUMN ? ar_column_linear_create : ar_row_linear_create)(&m, ctx, "l", IN, OUT, &o));
    AR_TRY_TO(done, st, passes(ctx, j, m, saved));
done:
    ar_module_destroy(m);
    ar_saved_destroy(saved);
    return st;
}

/* Of each position the N-1 steps of a ring pass on the samples' features that lie whole between the layers, those of X
 * or Y; a rank multiplies the positions of all. */
static ar_sim_cluster cluster_of(const timed_case *c)
{
    const double samples = (double)c->samples, steps = c->ranks - 1;
    const double bytes = steps * samples * (c->style == COLUMN ? IN : OUT) * sizeof(float);
    return (ar_sim_cluster){.inside = {0.0, bytes / c->t_a}, .flops = 2.0 * samples * IN * OUT / c->t_g};
}

/* `first` and `second` of a position, as the two follow each other in a chunk. */
static double closed_form(const timed_case *c, double first, double second)
{
    const size_t each = (c->n + c->overlap - 1) / c->overlap, k = (c->n + each - 1) / each;
    const double e = (double)each, last = (double)(c->n - (k - 1) * each);
    if (k == 1)
        return e * (first + second);
    return e * first + (double)(k - 2) * e * fmax(first, second) + fmax(e * second, last * first) + last * second;
}

static void expect_seconds(const timed_case *c, const char *pass, int rank, double got, double want)
{
    cr_expect(fabs(got - want) <= 0.01 * want, "%s %s, rank %d of %d, %zu positions in %zu: %.9f s, expected %.9f",
              c->style == COLUMN ? "column" : "row", pass, rank, c->ranks, c->n, c->overlap, got, want);
}

/* Forward a column layer gathers X, then multiplies; a row layer multiplies, then scatters Y. Backward the other way
 * round, and then the gradient of the weight, which is as many products again. */
static void expect_closed_form(timed_case c)
{
    timed_job j = {.c = c};
    const ar_sim_cluster cluster = cluster_of(&c);
    const rank_run_options o = {.ranks = c.ranks,
                                .sp = true,
                                .keep_gathered = true,
                                .overlap = (int)c.overlap,
                                .numerics = AR_NUMERICS_NATIVE,
                                .cluster = &cluster};
    cr_assert_ok(rank_run(&o, timed_rank, &j));
    const double in = closed_form(&c, c.t_a, c.t_g), out = closed_form(&c, c.t_g, c.t_a);
    const double weight = (double)c.n * c.t_g;
    for (int r = 0; r < c.ranks; r++) {
        expect_seconds(&c, "forward", r, j.forward[r], c.style == COLUMN ? in : out);
        expect_seconds(&c, "backward", r, j.backward[r], (c.style == COLUMN ? out : in) + weight);
    }
}

static const double us = 1e-6;

Test(linear_time, four_chunks_of_two_and_three_take_fourteen)
{
    for (int layer = COLUMN; layer <= ROW; layer++) {
        expect_closed_form((timed_case){(style)layer, 2, 1, 4, 4, 2 * us, 3 * us});
        expect_closed_form((timed_case){(style)layer, 2, 1, 4, 4, 3 * us, 2 * us});
    }
    const timed_case c = {COLUMN, 2, 1, 4, 4, 2 * us, 3 * us};
    cr_expect_float_eq(closed_form(&c, 2.0, 3.0), 14.0, 1e-12);
    cr_expect_float_eq(closed_form(&c, 3.0, 2.0), 14.0, 1e-12);
}

/* 11 positions, so that most K leave a shorter last chunk; links faster, as fast and slower than products. */
Test(linear_time, layers_in_chunks_take_what_the_closed_form_says)
{
    static const double t_a[] = {1.0, 3.0, 7.0};
    for (int layer = COLUMN; layer <= ROW; layer++) {
        for (size_t k = 1; k <= 9; k++) {
            for (size_t i = 0; i < sizeof t_a / sizeof *t_a; i++)
                expect_closed_form(
                    (timed_case){(style)layer, 2 + 2 * (int)(k % 2), 1 + k % 2, 11, k, t_a[i] * us, 3 * us});
        }
    }
}
