/* SPDX-License-Identifier: Apache-2.0 */
/* Programs of ranks in virtual time, made of work and collectives whose lengths are given. */
#pragma once

#include "anyrank/sim.h"
#include "ref/core/lane.h"
#include "tests/support/test.h"

/* The rate of computation of the clusters here: 1e12 flops take a second, so that a number of flops is a number of
 * picoseconds. */
#define FLOPS 1e12

static inline void work_us(double us)
{
    ar_trace_work(us * 1e-6 * FLOPS);
}

/* The calling lane's virtual clock. */
static inline double now_us(void)
{
    return (double)ari_lane_self()->virtual_ns * 1e-3;
}

/* An all-reduce of one element over the whole group: with a ring's latency of a and no time for bytes, 2(N-1)a. */
static inline ar_status small_all_reduce(ar_comm *c, ar_queue *q, float *x, const char *tag)
{
    return ar_comm_all_reduce(c, q, (ar_buf){x}, (ar_cbuf){x}, 1, AR_F32, AR_SUM, tag);
}

/* A cluster on one node on which n ranks take so long for an all-reduce of any size. */
static inline ar_sim_cluster cluster_of(int n, double all_reduce_us)
{
    return (ar_sim_cluster){.ranks_per_node = 0,
                            .inside = {all_reduce_us * 1e-6 / (2 * (n - 1)), HUGE_VAL},
                            .between = {0, 1},
                            .flops = FLOPS};
}

/* Runs with a trace. Gives the trace. */
static inline ar_trace *traced(int n, const ar_sim_options *options, ar_rank_fn fn, void *arg)
{
    ar_sim_options o = *options;
    cr_assert_ok(ar_trace_create(&o.trace));
    cr_assert_ok(ar_sim_run(n, &o, fn, arg, NULL));
    return o.trace;
}

static inline ar_trace_summary summary_of(const ar_trace *t, ar_trace_clock clock)
{
    ar_trace_summary s;
    cr_assert_ok(ar_trace_summarise(&s, t, clock));
    const double path = s.path_compute + s.path_communication + s.path_wait;
    cr_expect(fabs(path - s.seconds) <= 1e-9, "the path's parts make up %.9f s of %.9f", path, s.seconds);
    return s;
}

static inline void expect_us(double got_s, double want_us, const char *what)
{
    cr_expect(fabs(got_s * 1e6 - want_us) <= 0.01 * want_us + 1e-6, "%s: %.3f us, not %.3f", what, got_s * 1e6,
              want_us);
}
