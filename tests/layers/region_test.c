/* SPDX-License-Identifier: Apache-2.0 */
/* The conjugate operators, f, f*, g, g* and those of features: each backward is the transpose of its forward, <A x,
 * y> = <x, A^T y>. The values are small integers, so that every sum is exact and the two sides are equal as
 * integers. */
#include "anyrank/layers.h"
#include "support/rank_run.h"
#include "tests/support/test.h"

enum { MOST_RANKS = 4, SAMPLES = 2, EACH = 3, TOKENS = SAMPLES * EACH, WIDTH = 2, MOST = TOKENS * WIDTH * MOST_RANKS };

typedef ar_status (*map)(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x);
typedef struct operator_case {
    const char *name;
    map forward, backward;
    bool x_whole, y_whole; /* every rank holds the one value: it counts once; else the ranks' values side by side */
    bool x_wide, y_wide;   /* WIDTH*N features in place of WIDTH */
    bool x_long, y_long;   /* EACH*N positions in place of EACH */
} operator_case;

/* f copies one x to N places; f* adds N values up to one. What is gathered along features is one value; what
 * is gathered along the sequence (g) has N copies, each with a gradient of its own. */
static const operator_case cases[] = {
    {"copy", ar_copy_to_region, ar_copy_to_region_backward, true, false, false, false, false, false},
    {"reduce", ar_reduce_from_region, ar_reduce_from_region_backward, false, true, false, false, false, false},
    {"gather", ar_gather_from_region, ar_gather_from_region_backward, false, true, false, true, false, false},
    {"scatter", ar_scatter_to_region, ar_scatter_to_region_backward, true, false, true, false, false, false},
    {"gather tokens", ar_gather_tokens, ar_gather_tokens_backward, false, false, false, false, false, true},
    {"scatter tokens", ar_scatter_tokens, ar_scatter_tokens_backward, false, false, false, false, true, false},
};

typedef struct region_job {
    const operator_case *c;
    int ranks;
    float x[MOST_RANKS][MOST], y[MOST_RANKS][MOST];    /* given */
    float ax[MOST_RANKS][MOST], aty[MOST_RANKS][MOST]; /* A x, A^T y */
} region_job;

static size_t features(const region_job *j, bool wide)
{
    return wide ? WIDTH * (size_t)j->ranks : WIDTH;
}

static size_t positions(const region_job *j, bool all)
{
    return all ? EACH * (size_t)j->ranks : EACH;
}

/* -4 .. 4, other values on every rank unless the ranks hold one value. */
static void fill(float v[MOST_RANKS][MOST], int salt, bool whole)
{
    for (int r = 0; r < MOST_RANKS; r++) {
        for (int i = 0; i < MOST; i++)
            v[r][i] = (float)(((i * 7 + salt) * 5 + (whole ? 0 : r * 3)) % 9 - 4);
    }
}

typedef struct extents {
    size_t positions, features;
} extents;

static ar_status apply(ar_ctx *ctx, map a, float *to, extents out, const float *from, extents in)
{
    const size_t shape[3] = {SAMPLES, in.positions, in.features};
    ar_tensor x, y;
    AR_TRY(rank_upload(ctx, &x, 3, shape, from));
    AR_TRY(a(ctx, &y, &x));
    if (y.ndim != 3 || y.shape[0] != SAMPLES || y.shape[1] != out.positions || y.shape[2] != out.features)
        return ar_error_set(AR_ERR_SHAPE, "[%zu, %zu, %zu], expected [%d, %zu, %zu]", y.shape[0], y.shape[1],
                            y.shape[2], SAMPLES, out.positions, out.features);
    return ar_ctx_download(ctx, to, &y);
}

static ar_status both(ar_ctx *ctx, void *user)
{
    region_job *j = user;
    const size_t r = rank_of(ctx);
    const extents x = {positions(j, j->c->x_long), features(j, j->c->x_wide)};
    const extents y = {positions(j, j->c->y_long), features(j, j->c->y_wide)};
    AR_TRY(apply(ctx, j->c->forward, j->ax[r], y, j->x[r], x));
    return apply(ctx, j->c->backward, j->aty[r], x, j->y[r], y);
}

/* <a, b> over the group: a whole value counts once, and is the same on every rank. */
static long inner(const region_job *j, float a[MOST_RANKS][MOST], float b[MOST_RANKS][MOST], size_t n, bool whole)
{
    long sum = 0;
    for (int r = 0; r < j->ranks; r++) {
        cr_assert(!whole || (memcmp(a[r], a[0], n * sizeof(float)) == 0 && memcmp(b[r], b[0], n * sizeof(float)) == 0),
                  "%s: rank %d holds another value than rank 0", j->c->name, r);
        for (size_t i = 0; i < n && (!whole || r == 0); i++)
            sum += (long)a[r][i] * (long)b[r][i];
    }
    return sum;
}

Test(region, every_backward_is_the_transpose_of_its_forward)
{
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        for (int ranks = 1; ranks <= 4; ranks++) {
            static region_job j;
            j = (region_job){.c = &cases[k], .ranks = ranks};
            fill(j.x, 1, cases[k].x_whole);
            fill(j.y, 2, cases[k].y_whole);
            const ar_run o = {.parallel.tp = ranks};
            cr_assert_eq(rank_run(&o, both, &j), AR_OK, "%s: %s", cases[k].name, ar_error_message());
            const size_t nx = SAMPLES * positions(&j, cases[k].x_long) * features(&j, cases[k].x_wide);
            const size_t ny = SAMPLES * positions(&j, cases[k].y_long) * features(&j, cases[k].y_wide);
            const long left = inner(&j, j.ax, j.y, ny, cases[k].y_whole);
            const long right = inner(&j, j.x, j.aty, nx, cases[k].x_whole);
            cr_assert_eq(left, right, "%s on %d ranks: <Ax, y> = %ld, <x, A'y> = %ld", cases[k].name, ranks, left,
                         right);
            cr_assert_neq(left, 0, "%s on %d ranks: these values show nothing", cases[k].name, ranks);
        }
    }
}

/* The transpose alone does not say which map it is: the values of each. */
Test(region, gather_puts_blocks_in_rank_order_and_scatter_takes_them_back)
{
    static region_job j;
    j = (region_job){.c = &cases[2], .ranks = 3};
    fill(j.x, 1, false);
    fill(j.y, 2, true);
    const ar_run o = {.parallel.tp = 3};
    cr_assert_ok(rank_run(&o, both, &j));
    for (size_t i = 0; i < TOKENS * WIDTH * 3; i++) {
        const size_t t = i / (WIDTH * 3), r = i % (WIDTH * 3) / WIDTH, f = i % WIDTH;
        cr_assert_eq(j.ax[1][i], j.x[r][t * WIDTH + f]);
        cr_assert_eq(j.aty[r][t * WIDTH + f], j.y[r][i]);
    }
    j.c = &cases[3];
    fill(j.x, 1, true);
    fill(j.y, 2, false);
    cr_assert_ok(rank_run(&o, both, &j));
    for (size_t i = 0; i < TOKENS * WIDTH * 3; i++) {
        const size_t t = i / (WIDTH * 3), r = i % (WIDTH * 3) / WIDTH, f = i % WIDTH;
        cr_assert_eq(j.ax[r][t * WIDTH + f], j.x[0][i]);
        cr_assert_eq(j.aty[1][i], j.y[r][t * WIDTH + f]);
    }
}

Test(region, copy_keeps_the_value_and_reduce_adds_the_ranks)
{
    static region_job j;
    j = (region_job){.c = &cases[1], .ranks = 4};
    fill(j.x, 1, false);
    fill(j.y, 2, true);
    const ar_run o = {.parallel.tp = 4};
    cr_assert_ok(rank_run(&o, both, &j));
    for (size_t i = 0; i < TOKENS * WIDTH; i++) {
        cr_assert_eq(j.ax[3][i], j.x[0][i] + j.x[1][i] + j.x[2][i] + j.x[3][i]);
        cr_assert_eq(j.aty[3][i], j.y[0][i]);
    }
}

/* Positions of one sample stay together, whichever rank had them. */
Test(region, tokens_are_gathered_in_the_order_of_the_sequences)
{
    static region_job j;
    j = (region_job){.c = &cases[4], .ranks = 3};
    fill(j.x, 1, false);
    fill(j.y, 2, false);
    const ar_run o = {.parallel.tp = 3};
    cr_assert_ok(rank_run(&o, both, &j));
    for (size_t i = 0; i < TOKENS * WIDTH * 3; i++) {
        const size_t f = i % WIDTH, sample = i / WIDTH / (EACH * 3), at = i / WIDTH % (EACH * 3);
        const size_t r = at / EACH, own = (sample * EACH + at % EACH) * WIDTH + f;
        cr_assert_eq(j.ax[1][i], j.x[r][own]);
        cr_assert_eq(j.aty[r][own], j.y[0][i] + j.y[1][i] + j.y[2][i]);
    }
}
