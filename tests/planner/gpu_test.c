/* SPDX-License-Identifier: Apache-2.0 */
/* Seconds of operations by their shapes, where a cluster names its GPU. */
#include "ref/core/gpu.h"

#include "support/together.h"
#include "tests/planner/shapes.h"
#include "verify/plan/cost.h"
#include "verify/run/cluster_run.h"

static ari_time_options on(const char *cluster)
{
    ari_time_options o = {.fp32_sums = false};
    cr_assert_ok(ar_sim_cluster_parse(&o.cluster, cluster));
    return o;
}

/* Operations a second. */
static double rate(const ari_rates *r, double m, double n, double k, bool accumulates)
{
    const ari_gpu_product p = {1.0, m, n, k, accumulates};
    return 2.0 * m * n * k / ari_rates_product(r, &p);
}

static double scores(const ari_rates *r, bool older, double positions, double head, bool backward)
{
    return ari_rates_scores(r, &(ari_gpu_scores){1e13, positions, head, backward, older});
}

/* A rate of the caller's knows no shapes; element-wise work is the production account's. */
CLAIM(a_rate_that_is_given_is_every_products)
{
    const ari_time_options named = on("h100 memory=40GB");
    const ari_time_options given = on("h100 flops=400T");
    const ari_time_options words = on("inside=1us:10GB/s flops=1T");
    cr_expect_not_null(ari_time_rates(&named).gpu);
    cr_expect_null(ari_time_rates(&given).gpu);
    cr_expect_null(ari_time_rates(&words).gpu);
    const ar_config c = shape_bundled("llama-3-8b");
    const ari_planned p = shape_planned(&c, 1, false, 2, 2048);
    ari_time t, u;
    cr_assert_ok(ari_time_of(&t, &p, &given));
    cr_assert_ok(ari_time_of(&u, &p, &named));
    cr_expect_eq(t.seconds[ARI_TIME_MEMORY], 0.0);
    cr_expect_gt(u.seconds[ARI_TIME_MEMORY], 0.0);
}

/* Large products reach the share of the peak that the table has, less what the host adds; small ones, short sums and
 * sums that gradients of few tokens read and write again less, and none more. */
CLAIM(products_are_slower_the_smaller_they_are)
{
    for (size_t i = 0; ar_sim_cluster_names[i]; i++) {
        const ari_time_options o = on(ar_sim_cluster_names[i]);
        const ari_rates r = ari_time_rates(&o);
        const ari_gpu *g = r.gpu;
        const double most = g->peak * g->product / g->host, large = rate(&r, 16384, 16384, 16384, false);
        cr_expect(large <= most && large > 0.95 * most, "%s: %g of %g", ar_sim_cluster_names[i], large, most);
        double before = large;
        for (double m = 4096; m >= 64; m /= 2) {
            const double now = rate(&r, m, 8192, 8192, false);
            cr_expect_leq(now, 1.05 * before, "%s, %g rows: %g after %g", ar_sim_cluster_names[i], m, now, before);
            before = now;
        }
        cr_expect_lt(before, 0.5 * large);
        cr_expect_lt(rate(&r, 8192, 8192, 256, true), rate(&r, 8192, 8192, 256, false));
        cr_expect_geq(ari_rates_moves(&r, 1.0), 3e-6);
        cr_expect_eq(ari_rates_moves(&r, 0.0), 0.0);
        cr_expect_lt(scores(&r, false, 16384, 128, false), scores(&r, false, 16384, 64, false));
        cr_expect_lt(scores(&r, false, 16384, 128, true), scores(&r, false, 512, 128, true));
        const double older = scores(&r, true, 16384, 128, false) / scores(&r, false, 16384, 128, false);
        cr_expect(fabs(older - (g->older < g->scores[0] ? g->scores[0] / g->older : 1.0)) < 1e-9);
    }
}

/* Each micro-batch adds latencies, and its products have fewer rows. */
CLAIM(more_micro_batches_never_compute_faster)
{
    const ari_time_options o = on("h100");
    const ar_config c = shape_bundled("llama-3-8b");
    double before = 0.0;
    for (int micro = 1; micro <= 16; micro *= 2) {
        ari_planned p = shape_planned(&c, 2, true, 16, 1024);
        ari_time t;
        p.flash = true;
        p.step.run.parallel.micro_batches = micro;
        cr_assert_ok(ari_time_of(&t, &p, &o));
        const double now = ari_time_step(&t);
        cr_expect_geq(now, before * (1.0 - 1e-12), "%d micro-batches: %g after %g", micro, now, before);
        before = now;
    }
}

/* Members of a group in one node each have a port: an all-gather of eight over two nodes is slower than in one, but not
 * by the ratio of the links. A short all-reduce of many goes over a tree. */
CLAIM(collectives_use_every_port_of_a_node)
{
    const ari_time_options o = on("h100");
    const ar_config c = shape_bundled("llama-3-8b");
    const ari_gpu *g = ari_time_rates(&o).gpu;
    double seconds[3];
    for (int i = 0; i < 3; i++) {
        ari_planned p = shape_planned(&c, 1, false, 2048, 64);
        p.step.run.parallel.dp = 8 << i;
        const ari_links l = ari_links_of(&p, &o, ARI_OVER_DP);
        seconds[i] = ari_links_call(&l, ARI_MOVES_ALL_GATHER, 1e9, 2.0);
    }
    cr_expect_float_eq(seconds[0], 8 * 3.4e-6 + 2e9 * 7.0 / 8.0 / (450e9 * g->inside), 1e-9);
    cr_expect_lt(seconds[1], 1.2 * seconds[0]);
    ari_planned p = shape_planned(&c, 8, false, 2048, 64);
    p.step.run.parallel.dp = 1024;
    const ari_links l = ari_links_of(&p, &o, ARI_OVER_DP);
    cr_expect_float_eq(ari_links_call(&l, ARI_MOVES_ALL_GATHER, 1e9, 2.0),
                       1024 * 9.6e-6 + 2e9 * 1023.0 / 1024.0 / (50e9 * g->inter_node), 1e-9);
    cr_expect_float_eq(ari_links_call(&l, ARI_MOVES_ALL_REDUCE, 1.0, 4.0), 2.0 * 10.0 * 9.6e-6, 1e-9);
}

/* Seconds in virtual time of a step of a few layers on one H100, forward alone or with its backward pass. */
static double virtual_seconds(size_t layers, bool forward_only)
{
    static const int64_t ids[16] = {0};
    ar_config c = shape_llama(layers, 64, 128, 4, 4, 128);
    const ar_sim_cluster cluster = on("h100").cluster;
    const ar_batch batch = {.batch = 1, .seq = 16, .input_ids = ids};
    const ari_cluster_options o = {.run = {.batch = 1,
                                           .seq = 16,
                                           .steps = !forward_only,
                                           .threads = 1,
                                           .numerics = AR_NUMERICS_NATIVE,
                                           .parallel = {.tp = 1},
                                           .optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW),
                                           .sim = {.cluster = &cluster, .timeout_ns = UINT64_C(60000000000)}},
                                   .config = &c,
                                   .batch = &batch,
                                   .forward_only = forward_only};
    ari_cluster_result result;
    cr_assert_ok(ari_cluster_run(&result, &o));
    free(result.loss);
    return result.predicted.seconds;
}

/* All kernels are as short as a launch, so that virtual time counts them. Forward a layer has four GEMMs, of which
 * those of an input are one, attention, two norms, rotary positions, an activation and two residuals. Backward the
 * GEMMs are eleven, one for each gradient of an input and of a weight. */
CLAIM(virtual_time_has_the_kernels_of_both_passes)
{
    const ari_time_options o = on("h100");
    const ari_rates r = ari_time_rates(&o);
    const double launch = ari_rates_moves(&r, 1.0);
    const double forward = virtual_seconds(3, true) - virtual_seconds(2, true);
    const double both = virtual_seconds(3, false) - virtual_seconds(2, false);
    cr_expect_eq(round(forward / launch), 4.0 + 1.0 + 6.0, "%g", forward / launch);
    cr_expect_eq(round((both - forward) / launch), 11.0 + 1.0 + 6.0, "%g", (both - forward) / launch);
}

EVERY_CLAIM(gpu)
