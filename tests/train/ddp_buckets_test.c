/* SPDX-License-Identifier: Apache-2.0 */
/* Which parameter lies in which bucket, and what the ranks must agree on. */
#include "anyrank/context.h"
#include "ref/comm/comm_private.h"
#include "ref/train/ddp_private.h"
#include "tests/support/row.h"
#include "tests/support/test.h"
#include "tests/train/ddp_toy.h"

static const ar_parallel two = {.dp = 2};

/* Sizes in elements; a capacity of 100 of them is 400 bytes. */
#define BY_SIZE(elements) .capacity = (elements), .order = AR_BUCKETS_BY_SIZE
#define REVERSE(elements) .capacity = (elements)

static const struct {
    size_t n, size[5], capacity;
    ar_bucket_order order;
    unsigned frozen, bf16, spread; /* bit i: parameter i */
    int tp;
    const char *buckets;
} cases[] = {
    /* by size the next bucket begins where one does not fit */
    ROW(.n = 5, .size = {100, 50, 30, 20, 15}, BY_SIZE(100), .buckets = "[p0] [p1 p2 p3] [p4]"),
    ROW(.n = 4, .size = {60, 50, 40, 30}, BY_SIZE(100), .buckets = "[p0] [p1 p2] [p3]"),
    ROW(.n = 3, .size = {120, 90, 10}, BY_SIZE(100), .buckets = "[p0] [p1 p2]"),
    /* the largest first, and equal ones as registered */
    ROW(.n = 5, .size = {15, 20, 100, 30, 50}, BY_SIZE(100), .buckets = "[p2] [p4 p3 p1] [p0]"),
    ROW(.n = 4, .size = {7, 9, 7, 9}, BY_SIZE(1000), .buckets = "[p1 p3 p0 p2]"),
    /* in reverse the last registered first; without capacity each has its own */
    ROW(.n = 5, .size = {100, 50, 30, 20, 15}, REVERSE(100), .buckets = "[p4 p3 p2] [p1] [p0]"),
    ROW(.n = 3, .size = {40, 120, 50}, REVERSE(100), .buckets = "[p2] [p1] [p0]"),
    ROW(.n = 3, .size = {1, 2, 3}, REVERSE(0), .buckets = "[p2] [p1] [p0]"),
    /* one parameter, none, and frozen ones */
    ROW(.n = 1, .size = {5}, REVERSE(100), .buckets = "[p0]"),
    ROW(.n = 0, REVERSE(100), .buckets = ""),
    ROW(.n = 3, .size = {5, 6, 7}, .frozen = 2, REVERSE(100), .buckets = "[p2 p0]"),
    ROW(.n = 2, .size = {5, 6}, .frozen = 3, REVERSE(100), .buckets = ""),
    /* storages and groups apart; nothing is spread over one rank */
    ROW(.n = 4, .size = {5, 6, 7, 8}, .bf16 = 5, REVERSE(100), .buckets = "[p3 p1] [p2 p0]"),
    ROW(.n = 4, .size = {5, 6, 7, 8}, .spread = 10, .tp = 2, REVERSE(100), .buckets = "[p3 p1] [p2 p0]"),
    ROW(.n = 4, .size = {5, 6, 7, 8}, .spread = 10, .tp = 1, REVERSE(100), .buckets = "[p3 p2 p1 p0]"),
    /* numbered as they become complete: that of p1 and p3 with p1, before p0's */
    ROW(.n = 5, .size = {9, 5, 9, 5, 9}, .spread = 10, .tp = 2, REVERSE(10), .buckets = "[p4] [p2] [p3 p1] [p0]"),
};

Test(ddp_buckets, hold_the_parameters_that_their_order_and_capacity_give_them)
{
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        static toy t;
        t = (toy){.n = cases[i].n,
                  .run.parallel = {.tp = cases[i].tp, .dp = 2},
                  .run.numerics = cases[i].bf16 ? AR_NUMERICS_NATIVE : AR_NUMERICS_EXACT,
                  .ddp = {.bucket_bytes = 4 * cases[i].capacity, .order = cases[i].order}};
        for (size_t k = 0; k < t.n; k++) {
            t.size[k] = cases[i].size[k];
            t.frozen[k] = cases[i].frozen >> k & 1;
            t.bf16[k] = cases[i].bf16 >> k & 1;
            t.spread[k] = cases[i].spread >> k & 1;
        }
        cr_assert_ok(toy_run(&t));
        for (int r = 0; r < ar_parallel_world(&t.run.parallel); r++)
            cr_expect_str_eq(t.rank[r].buckets, cases[i].buckets, "case %zu, rank %d has %s", i, r, t.rank[r].buckets);
    }
}

static ar_status look(ar_ctx *ctx, ar_ddp *d, ar_param **params, size_t n, toy_result *out)
{
    (void)ctx, (void)n;
    const ar_bucket_info b = ari_ddp_bucket(d, 0), c = ari_ddp_bucket(d, 1);
    const bool right = b.index == 0 && b.capacity == 400 && b.bytes == 4 * 65 && b.elements == 65 && b.params == 3 &&
                       b.offset[0] == 0 && b.offset[1] == 15 && b.offset[2] == 35 && b.param[1] == params[2] &&
                       b.ready == 0 && b.state == AR_BUCKET_FILLING && !b.spread && b.storage == AR_F32 &&
                       b.own_start == 0 && b.own_count == 65 && c.index == 1 && c.capacity == 4 * 120 &&
                       c.elements == 120 && c.storage_bytes > 0;
    out->has[0] = right;
    const size_t exchange = 17 * 120; /* half of the larger one's states go, and half come */
    out->has[1] = ari_ddp_bytes(d) == b.storage_bytes + exchange; /* c, of one gradient, is summed in place */
    out->has[2] =
        strcmp(ar_ddp_name(d), "toy") == 0 && !ar_ddp_as_module(d) && ari_ddp_options_of(d).bucket_bytes == 400;
    return AR_OK;
}

Test(ddp_buckets, tell_their_sizes_and_offsets)
{
    toy t = {.n = 4, .size = {120, 30, 20, 15}, .ddp = {.bucket_bytes = 400}, .body = look, .run.parallel = two};
    cr_assert_ok(toy_run(&t));
    for (int r = 0; r < 2; r++)
        cr_expect(t.rank[r].has[0] && t.rank[r].has[1] && t.rank[r].has[2], "rank %d", r);
}

/* p0 is larger than a bucket, p1 frozen; p3 and p2 share one. */
static ar_status find(ar_ctx *ctx, ar_ddp *d, ar_param **params, size_t n, toy_result *out)
{
    (void)ctx, (void)n;
    const ar_bucket_info b = ari_ddp_bucket(d, 0), c = ari_ddp_bucket(d, 1);
    out->has[0] = b.params == 2 && b.param[0] == params[3] && b.offset[0] == 0 && b.param[1] == params[2] &&
                  b.offset[1] == 15 && b.elements == 35;
    out->has[1] = ar_ddp_buckets(d) == 2 && c.params == 1 && c.param[0] == params[0] && c.elements == 120;
    return AR_OK;
}

Test(ddp_buckets, the_place_of_a_parameter_is_found)
{
    toy t = {.n = 4,
             .size = {120, 30, 20, 15},
             .frozen = {false, true, false, false},
             .ddp = {.bucket_bytes = 400},
             .body = find,
             .run.parallel = two};
    cr_assert_ok(toy_run(&t));
    for (int r = 0; r < 2; r++)
        cr_expect(t.rank[r].has[0] && t.rank[r].has[1], "rank %d: %d %d", r, t.rank[r].has[0], t.rank[r].has[1]);
}

static ar_status shares(ar_ctx *ctx, ar_ddp *d, ar_param **params, size_t n, toy_result *out)
{
    (void)params, (void)n;
    AR_TRY(ar_ddp_start(d));
    AR_TRY(ar_ddp_wait(d));
    const ar_bucket_info b = ari_ddp_bucket(d, 0);
    size_t start = 0, count = 0;
    ari_comm_slice(b.elements, ar_comm_size(ar_ctx_dp(ctx)), ar_comm_rank(ar_ctx_dp(ctx)), &start, &count);
    out->has[0] = b.own_start == start && b.own_count == count;
    size_t own = 0;
    for (size_t i = 0; i < b.params; i++) {
        const ar_param *p = b.param[i];
        own += p->own_count;
        out->has[0] = out->has[0] && (p->own_count == 0 || b.offset[i] + p->own_start >= start);
    }
    out->has[1] = own == count;
    return AR_OK;
}

Test(ddp_buckets, with_zero_each_rank_has_a_slice_of_each)
{
    toy t = {.n = 3, .size = {5, 3, 9}, .ddp = {.bucket_bytes = 400}, .body = shares, .run.parallel = {.dp = 3}};
    t.ddp.zero = 1;
    cr_assert_ok(toy_run(&t));
    for (int r = 0; r < 3; r++)
        cr_expect(t.rank[r].has[0] && t.rank[r].has[1], "rank %d", r);
}

static void expect_refused(toy t, ar_status st, const char *part)
{
    if (t.run.parallel.dp == 0)
        t.run.parallel = two;
    cr_expect_eq(toy_run(&t), st);
    cr_expect_says(part);
}

Test(ddp_buckets, options_that_do_not_exist_are_refused)
{
    expect_refused((toy){.n = 1, .size = {3}, .ddp = {.mode = (ar_bucket_mode)7}}, AR_ERR_ARG, "bucket mode 7");
    expect_refused((toy){.n = 1, .size = {3}, .ddp = {.order = (ar_bucket_order)7}}, AR_ERR_ARG, "bucket order 7");
    expect_refused((toy){.n = 1, .size = {3}, .ddp = {.zero = 4}}, AR_ERR_ARG, "ZeRO stage 4");
}

static ar_status again(ar_ctx *ctx, ar_ddp *d, ar_param **params, size_t n, toy_result *out)
{
    (void)d, (void)out;
    OWNED(ar_ddp_destroy) ar_ddp *second = NULL;
    const ar_ddp_options o = {0};
    return ar_ddp_create_params(&second, ctx, "second", params, n, &o);
}

static ar_status same_twice(ar_ctx *ctx, ar_ddp *d, ar_param **params, size_t n, toy_result *out)
{
    (void)d, (void)n, (void)out;
    ar_ddp *second = NULL;
    const ar_ddp_options o = {0};
    ar_param *list[2] = {params[0], params[0]};
    return ar_ddp_create_params(&second, ctx, "second", list, 2, &o);
}

Test(ddp_buckets, a_parameter_belongs_to_one_object_once)
{
    expect_refused((toy){.n = 2, .size = {3, 4}, .body = again}, AR_ERR_ARG, "p1 belongs to another");
    expect_refused((toy){.n = 2, .size = {3, 4}, .body = same_twice}, AR_ERR_ARG, "p0 twice");
}

/* Each rank makes lists of its own. */
enum difference { LENGTH, SHAPE, NAME, FROZEN, OPTION };

static ar_status differ(ar_ctx *ctx, ar_ddp *wrapped, ar_param **params, size_t n, toy_result *out)
{
    (void)wrapped;
    const enum difference what = (enum difference)out->how;
    ar_ddp_options o = {0};
    OWNED(ar_ddp_destroy) ar_ddp *d = NULL;
    if (ar_comm_rank(ar_ctx_dp(ctx)) == 2) {
        n -= what == LENGTH;
        if (what == SHAPE)
            params[1] = params[2], n = 2;
        if (what == NAME)
            snprintf(params[1]->name, sizeof params[1]->name, "other");
        if (what == FROZEN)
            params[1]->requires_grad = false;
        o.bucket_bytes = what == OPTION ? 64 : 0;
    }
    return ar_ddp_create_params(&d, ctx, "mine", params, n, &o);
}

Test(ddp_buckets, ranks_that_wrap_different_parameters_are_told_which)
{
    toy t = {.n = 3, .size = {3, 4, 5}, .plain = true, .run.parallel = {.dp = 3}, .body = differ, .how = LENGTH};
    expect_refused(t, AR_ERR_MISMATCH,
                   "ranks 0 and 2 disagree about parameter 2: rank 0 has p2 [5] F32, rank 2 nothing");
    t.how = SHAPE;
    expect_refused(t, AR_ERR_MISMATCH, "parameter 1: rank 0 has p1 [4] F32, rank 2 p2 [5] F32");
    t.how = NAME;
    expect_refused(t, AR_ERR_MISMATCH, "parameter 1: rank 0 has p1 [4] F32, rank 2 other [4] F32");
    t.how = FROZEN;
    expect_refused(t, AR_ERR_MISMATCH, "rank 2 p1 [4] F32, frozen");
    t.how = OPTION;
    expect_refused(t, AR_ERR_MISMATCH, "the options: rank 0 has buckets of 0 bytes");
}
