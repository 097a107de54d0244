/* SPDX-License-Identifier: Apache-2.0 */
/* Sums of fp32 terms over ranks, and what a redistribution refuses. */
#include "anyrank/context.h"
#include "anyrank/redistribute.h"
#include "ref/placement/placement_private.h"
#include "support/rank_run.h"
#include "support/together.h"

enum { TERMS = 6, WIDTH = 7 };

/* Terms whose fp32 sum depends on the order. By column: 1e8 and its negative hide a 1; a sum beyond 24 bits; a negative
 * zero; a NaN; an overflow that is none, for the terms cancel; infinities, which do not; one alone. */
static const float terms[TERMS][WIDTH] = {{1e8f, 16777216.0f, -0.0f, 1.0f, 3e38f, INFINITY, 1.0f},
                                          {1.0f, 1.0f, -0.0f, 2.0f, 3e38f, 2.0f, 2.0f},
                                          {-1e8f, 1.0f, -0.0f, NAN, -3e38f, -INFINITY, INFINITY},
                                          {0.5f, 1.0f, -0.0f, 3.0f, -3e38f, 3.0f, 3.0f},
                                          {1e8f, 1.0f, -0.0f, 4.0f, 3e38f, 4.0f, 4.0f},
                                          {-1e8f, 0.0f, -0.0f, 5.0f, -3e38f, 5.0f, 5.0f}};
/* 1.5, 16777220, 0, NaN, 0, NaN, NaN */
static const uint32_t sum_bits[WIDTH] = {0x3fc00000, 0x4b800002, 0, 0x7fc00000, 0, 0x7fc00000, 0x7fc00000};

typedef struct sum_job {
    ar_mesh mesh;
    const char *from, *to;
    int shift;                  /* rank r has terms[(r + shift) % TERMS] */
    uint32_t sum[TERMS][WIDTH]; /* by rank */
    size_t count[TERMS], start[TERMS];
} sum_job;

static ar_status add_up(ar_ctx *ctx, void *user)
{
    sum_job *j = user;
    const int rank = ar_comm_rank(ar_ctx_tp(ctx));
    ar_redistribution r = {.ndim = 1, .shape = {WIDTH}};
    SCOPED(ar_mesh_groups_fini) ar_mesh_groups g = {0};
    ar_tensor x, y;
    AR_TRY(ar_mesh_groups_init(&g, &j->mesh, ar_ctx_tp(ctx)));
    AR_TRY(ar_placements_parse(r.src, j->mesh.ndim, j->from));
    AR_TRY(ar_placements_parse(r.dst, j->mesh.ndim, j->to));
    AR_TRY(rank_upload(ctx, &x, 1, r.shape, terms[(rank + j->shift) % TERMS]));
    AR_TRY(ar_redistribute(ctx, &g, &y, &x, &r, NULL));
    AR_TRY(ar_placements_region(&j->start[rank], &j->count[rank], &g.mesh, g.coords, r.dst, 1, r.shape, true));
    return ar_ctx_download(ctx, j->sum[rank], &y);
}

static void check_sums(sum_job *j, const char *from, const char *to)
{
    const ar_run o = {.parallel.tp = TERMS};
    j->from = from;
    j->to = to;
    cr_assert_ok(rank_run(&o, add_up, j));
    for (int r = 0; r < TERMS; r++) {
        for (size_t i = 0; i < j->count[r]; i++)
            cr_assert_eq(j->sum[r][i], sum_bits[j->start[r] + i],
                         "%s to %s, shift %d, rank %d, element %zu: %08x, "
                         "expected %08x",
                         from, to, j->shift, r, j->start[r] + i, j->sum[r][i], sum_bits[j->start[r] + i]);
    }
}

CLAIM(neither_the_order_of_ranks_nor_the_shape_of_the_mesh_decides_a_bit)
{
    sum_job j = {.mesh = {1, {{"tp", 6}}}};
    for (j.shift = 0; j.shift < TERMS; j.shift++) {
        check_sums(&j, "[P(sum)]", "[R]");
        check_sums(&j, "[P(sum)]", "[S(0)]");
    }
    j.mesh = (ar_mesh){2, {{"dp", 2}, {"tp", 3}}};
    for (j.shift = 0; j.shift < TERMS; j.shift++) {
        check_sums(&j, "[P(sum), P(sum)]", "[R, R]");
        check_sums(&j, "[P(sum), P(sum)]", "[S(0), I]");
        check_sums(&j, "[P(sum), P(sum)]", "[S(0), S(0)]");
    }
    j.mesh = (ar_mesh){2, {{"dp", 3}, {"tp", 2}}};
    check_sums(&j, "[P(sum), P(sum)]", "[R, S(0)]");
}

typedef struct refused {
    const char *what;
    ar_numerics numerics;
    ar_dtype dtype;
    const char *from, *to;
    size_t length; /* of the tensor; x has 4 elements */
    ar_status status;
    const char *says;
} refused;

static ar_status try_it(ar_ctx *ctx, void *user)
{
    const refused *c = user;
    const ar_mesh mesh = {1, {{"tp", ar_comm_size(ar_ctx_tp(ctx))}}};
    ar_redistribution r = {.ndim = 1, .shape = {c->length}};
    SCOPED(ar_mesh_groups_fini) ar_mesh_groups g = {0};
    ar_tensor x, y;
    AR_TRY(ar_mesh_groups_init(&g, &mesh, ar_ctx_tp(ctx)));
    AR_TRY(ar_placements_parse(r.src, 1, c->from));
    AR_TRY(ar_placements_parse(r.dst, 1, c->to));
    AR_TRY(ar_ctx_tensor(ctx, &x, c->dtype, 1, (const size_t[]){4}));
    return ar_redistribute(ctx, &g, &y, &x, &r, "a.layer");
}

CLAIM(what_cannot_be_is_refused_with_the_reason)
{
    static const refused cases[] = {
        {"part", 0, AR_F32, "S(0)", "R", 9, AR_ERR_SHAPE, "the part by [S(0)] is [5]"},
        {"whole", 0, AR_F32, "R", "S(0)", 5, AR_ERR_SHAPE, "a.layer: x is [4]"},
        {"dimension", 0, AR_F32, "R", "S(1)", 4, AR_ERR_ARG, "-1 to 0"},
        {"bf16", AR_NUMERICS_EXACT, AR_BF16, "P(sum)", "R", 4, AR_ERR_DTYPE, "accumulator takes F32"},
        {"f64", AR_NUMERICS_EXACT, AR_F64, "P(sum)", "S(0)", 4, AR_ERR_DTYPE, "native numerics"},
        {"bytes", AR_NUMERICS_NATIVE, AR_U8, "P(sum)", "R", 4, AR_ERR_DTYPE, "would wrap at 256"},
        {"int16", AR_NUMERICS_NATIVE, AR_I16, "P(max)", "R", 4, AR_ERR_DTYPE, "dtype I16"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const ar_run o = {.parallel.tp = 2, .numerics = cases[i].numerics};
        cr_assert_eq(rank_run(&o, try_it, (void *)(uintptr_t)&cases[i]), cases[i].status, "%s: %s", cases[i].what,
                     ar_error_message());
        cr_assert_says(cases[i].says);
    }
}

CLAIM(sums_and_maxima_do_not_mix_and_a_maximum_has_no_gradient)
{
    const ar_mesh mesh = {2, {{"dp", 2}, {"tp", 2}}};
    ar_redistribution r = {.ndim = 1, .shape = {4}};
    ar_redistribution_step steps[AR_REDISTRIBUTION_STEPS];
    size_t n = 0;
    cr_assert_ok(ar_placements_parse(r.src, 2, "[P(sum), P(max)]"));
    cr_assert_refused(ari_redistribution_steps(steps, &n, &mesh, &r), AR_ERR_ARG, "[P(sum), P(max)]");
    cr_assert_eq(ar_redistribution_backward(&r, &mesh, &r), AR_ERR_UNSUPPORTED);
    r.src[0].kind = AR_PARTIAL_MAX;
    cr_assert_ok(ari_redistribution_steps(steps, &n, &mesh, &r));
    r.ndim = AR_MAX_DIMS + 1;
    cr_assert_eq(ari_redistribution_steps(steps, &n, &mesh, &r), AR_ERR_ARG);
}

/* Ranks that do not mean the same. */
static ar_status other_mesh(ar_ctx *ctx, void *user)
{
    const ar_mesh *both = user;
    SCOPED(ar_mesh_groups_fini) ar_mesh_groups g;
    return ar_mesh_groups_init(&g, &both[ar_comm_rank(ar_ctx_tp(ctx)) == 2], ar_ctx_tp(ctx));
}

CLAIM(ranks_with_different_meshes_get_an_error)
{
    static const ar_mesh pairs[][2] = {{{2, {{"dp", 2}, {"tp", 2}}}, {1, {{"tp", 4}}}},
                                       {{2, {{"dp", 1}, {"tp", 4}}}, {2, {{"dp", 4}, {"tp", 1}}}},
                                       {{1, {{"tp", 4}}}, {1, {{"cp", 4}}}}};
    const ar_run o = {.parallel.tp = 4};
    for (size_t i = 0; i < 3; i++) {
        cr_assert_refused(rank_run(&o, other_mesh, (void *)(uintptr_t)pairs[i]), AR_ERR_MISMATCH,
                          "of 4 ranks have rank");
    }
    static const ar_mesh wrong[2] = {{1, {{"tp", 3}}}, {1, {{"tp", 3}}}};
    cr_assert_eq(rank_run(&o, other_mesh, (void *)(uintptr_t)wrong), AR_ERR_INDIVISIBLE, "%s", ar_error_message());
}

static ar_status other_target(ar_ctx *ctx, void *user)
{
    (void)user;
    refused c = {.dtype = AR_F32, .from = "P(sum)", .to = "R", .length = 4};
    c.to = ar_comm_rank(ar_ctx_tp(ctx)) == 1 ? "S(0)" : c.to;
    return try_it(ctx, &c);
}

CLAIM(ranks_with_different_placements_get_an_error)
{
    const ar_run o = {.parallel.tp = 3, .numerics = AR_NUMERICS_NATIVE};
    cr_assert_eq(rank_run(&o, other_target, NULL), AR_ERR_MISMATCH, "%s", ar_error_message());
}

EVERY_CLAIM(redistribute_sums)
