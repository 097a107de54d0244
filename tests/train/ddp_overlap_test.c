/* SPDX-License-Identifier: Apache-2.0 */
/* Reductions while the backward pass goes on: under drawn schedules, in traces, by the virtual clock. */
#include "ref/io/file.h"
#include "ref/layers/param_private.h"
#include "tests/support/small.h"
#include "tests/support/temporary.h"
#include "tests/support/test.h"
#include "tests/train/ddp_toy.h"

/* A bucket for each of five parameters on four ranks, two of them summed over tp first, in two micro-batches. */
static toy five(void)
{
    return (toy){.n = 5,
                 .size = {30, 7, 40, 1, 12},
                 .spread = {[1] = true, [3] = true},
                 .run.parallel = {.tp = 2, .dp = 2, .micro_batches = 2},
                 .micro = 2,
                 .steps = 2,
                 .ddp = {.find_unused = true}};
}

Test(ddp_overlap, gives_the_same_bits_under_every_schedule)
{
    toy plain = five();
    plain.plain = true;
    cr_assert_ok(toy_run(&plain));
    for (uint64_t seed = 1; seed <= (small_only() ? 5 : 40); seed++) {
        toy t = five();
        t.run.sim = (ar_sim_options){.explore = true, .schedule_seed = seed};
        cr_assert_eq(toy_run(&t), AR_OK, "seed %llu: %s", (unsigned long long)seed, ar_error_message());
        for (int r = 0; r < 4; r++)
            cr_expect_eq(memcmp(t.rank[r].grad, plain.rank[r].grad, sizeof plain.rank[r].grad), 0, "seed %llu, rank %d",
                         (unsigned long long)seed, r);
    }
}

Test(ddp_overlap, an_error_ends_all_ranks_under_every_schedule)
{
    for (uint64_t seed = 1; seed <= (small_only() ? 3 : 20); seed++) {
        toy t = five();
        t.ddp.find_unused = false;
        t.skips[1][0] = t.skips[1][1] = 1u << 2;
        t.run.sim = (ar_sim_options){.explore = true, .schedule_seed = seed};
        cr_expect_eq(toy_run(&t), AR_ERR_DATA, "seed %llu", (unsigned long long)seed);
        cr_expect_not_null(strstr(ar_error_message(), "no gradient for 1 of 5 parameters: p2."), "seed %llu: %s",
                           (unsigned long long)seed, ar_error_message());
    }
}

/* A backward pass of 1 ms for each of four parameters, whose sum over two ranks takes 1 ms: 4000 bytes at 4 MB/s. */
static ar_status timed(ar_ctx *ctx, ar_ddp *d, ar_param **params, size_t n, toy_result *out)
{
    (void)out;
    AR_TRY(ar_ddp_start(d));
    for (size_t i = n; i-- > 0;) {
        ari_param_use(params[i]);
        ar_trace_work(1e6);
        AR_TRY(toy_add(ctx, params[i], i, 0, 0));
        AR_TRY(ari_param_done(params[i], ctx));
    }
    return ar_ddp_wait(d);
}

static ar_trace_summary summary_of(ar_ddp_options o, const char *json)
{
    const ar_sim_cluster cluster = {.inside = {0, 4e6}, .flops = 1e9};
    toy t = {.n = 4,
             .size = {1000, 1000, 1000, 1000},
             .run.parallel = {.dp = 2},
             .run.numerics = AR_NUMERICS_NATIVE,
             .ddp = o,
             .body = timed};
    OWNED(ar_trace_destroy) ar_trace *trace = NULL;
    ar_trace_summary s;
    t.ddp.keep_weights = true;
    cr_assert_ok(ar_trace_create(&trace));
    t.run.sim = (ar_sim_options){.cluster = &cluster, .trace = trace};
    cr_assert_ok(toy_run(&t));
    cr_assert_ok(ar_trace_summarise(&s, trace, AR_TRACE_VIRTUAL));
    if (json)
        cr_assert_ok(ar_trace_write_json(trace, AR_TRACE_VIRTUAL, NULL, json));
    return s;
}

#define EXPECT_MS(value, expected)                                                                              \
    cr_expect((value) > (expected - 0.1) * 1e-3 && (value) < (expected + 0.1) * 1e-3, "%g s, not %g ms", value, \
              (double)(expected))

Test(ddp_overlap, hides_all_reductions_but_the_last)
{
    const ar_trace_summary eager = summary_of((ar_ddp_options){.mode = AR_BUCKETS_EAGER}, NULL);
    const ar_trace_summary overlap = summary_of((ar_ddp_options){.mode = AR_BUCKETS_OVERLAP}, NULL);
    const ar_trace_summary one = summary_of(ar_ddp_defaults(), NULL);
    EXPECT_MS(eager.exposed, 4);
    EXPECT_MS(eager.seconds, 8);
    EXPECT_MS(overlap.exposed, 1);
    EXPECT_MS(overlap.communication, 4);
    EXPECT_MS(overlap.seconds, 5);
    EXPECT_MS(one.exposed, 4); /* one bucket is ready with the last gradient */
    cr_expect_eq(eager.bytes, overlap.bytes);
}

Test(ddp_overlap, a_trace_shows_the_buckets_on_a_track_of_their_own)
{
    SCOPED(temp_end) const temp_path trace = temp_file("");
    OWNED(free) unsigned char *bytes = NULL;
    size_t n = 0;
    (void)summary_of((ar_ddp_options){.bucket_bytes = 0}, trace.path);
    cr_assert_ok(ari_file_read(&bytes, &n, trace.path, 1 << 20));
    const char *text = (const char *)bytes;
    cr_expect_not_null(strstr(text, "\"communication\""));
    cr_expect_not_null(strstr(text, "\"bucket 3\""));
    cr_expect_not_null(strstr(text, "bucket 0: p3"));
}
