/* SPDX-License-Identifier: Apache-2.0 */
/* Whole programs in virtual time: queues and events, and one timeline whatever moves the data. Layers' times are what the
 * planner predicts, and overlap is held by train/ddp_overlap_test.c. */
#include <unistd.h>

#include "anyrank/comm.h"
#include "anyrank/queue.h"
#include "ref/comm/call.h"
#include "ref/core/clock.h"
#include "tests/sim/virtual_support.h"

typedef struct clocks {
    double first, second, third;
} clocks;

static ar_status two_tasks(ar_comm *c, void *arg)
{
    clocks *to = arg;
    OWNED(ar_queue_destroy) ar_queue *q = NULL, *other = NULL;
    OWNED(ar_event_destroy) ar_event *e = NULL;
    float x = 1, y = 1;
    AR_TRY(ar_queue_create(&q, AR_QUEUE_THREAD, "comm"));
    AR_TRY(ar_queue_create(&other, AR_QUEUE_THREAD, "other"));
    AR_TRY(ar_event_create(&e));
    AR_TRY(small_all_reduce(c, q, &x, "first"));
    AR_TRY(ar_event_record(e, q));
    AR_TRY(small_all_reduce(c, q, &y, "second"));
    usleep(20000); /* both are over by now, by the real clock */
    AR_TRY(ar_event_sync(e, 0));
    to[ar_comm_rank(c)].first = now_us();
    AR_TRY(ar_queue_wait(other, e));
    AR_TRY(ar_queue_sync(other, 0));
    to[ar_comm_rank(c)].second = now_us();
    AR_TRY(ar_queue_sync(q, 0));
    to[ar_comm_rank(c)].third = now_us();
    return AR_OK;
}

Test(virtual_run, an_event_is_reached_when_what_it_stands_for_has_ended_and_no_later)
{
    clocks at[4];
    const ar_sim_cluster cluster = cluster_of(4, 100);
    const ar_sim_options o = {.cluster = &cluster};
    cr_assert_ok(ar_sim_run(4, &o, two_tasks, at, NULL));
    for (int r = 0; r < 4; r++) {
        expect_us(at[r].first * 1e-6, 100, "the first task");
        expect_us(at[r].second * 1e-6, 100, "a queue that waits for it");
        expect_us(at[r].third * 1e-6, 200, "both tasks");
    }
}

/* --- paced links -------------------------------------------------------------------------------------------------- */

static ar_status three_all_reduces(ar_comm *c, void *arg)
{
    float x = (float)(1 + ar_comm_rank(c));
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    ar_status st = AR_OK;
    AR_TRY(ar_queue_create(&q, AR_QUEUE_INLINE, "main"));
    for (int i = 0; i < 3 && st == AR_OK; i++)
        st = ar_comm_all_reduce(c, q, (ar_buf){&x}, (ar_cbuf){&x}, 1, AR_F32, AR_SUM, "paced");
    ((float *)arg)[ar_comm_rank(c)] = x;
    return st;
}

/* At least: a busy machine takes longer, never less. */
Test(virtual_run, paced_links_take_their_time_by_the_real_clock_too)
{
    const ar_sim_cluster cluster = cluster_of(2, 5000);
    const ar_sim_options o = {.cluster = &cluster, .paced = true};
    float sum[2];
    const uint64_t start = ari_now_ns();
    cr_assert_ok(ar_sim_run(2, &o, three_all_reduces, sum, NULL));
    cr_expect_geq(ari_now_ns() - start, 3 * 5000000u);
    cr_expect(sum[0] == 12.0f && sum[1] == 12.0f, "%g, %g", (double)sum[0], (double)sum[1]);
}

Test(virtual_run, links_are_paced_by_a_cluster_and_not_where_time_stands_still)
{
    const ar_sim_cluster cluster = cluster_of(2, 5000);
    const ar_sim_options wrong[] = {{.paced = true}, {.paced = true, .cluster = &cluster, .explore = true}};
    float sum[2];
    for (size_t i = 0; i < 2; i++) {
        cr_expect_refused(ar_sim_run(2, &wrong[i], three_all_reduces, sum, NULL), AR_ERR_ARG, "paced");
    }
}

static uint64_t next_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

/* Work and collectives over the world and over a part of it, some on queues, of sizes on both sides of every choice
 * that is made by size; ranks come at times of their own. */
static ar_status random_program(ar_comm *world, void *arg)
{
    enum { STEPS = 30, MOST_COUNT = 20000 };
    const int r = ar_comm_rank(world), n = ar_comm_size(world);
    uint64_t shared = *(const uint64_t *)arg, own = shared + 1000003u * (uint64_t)(r + 1);
    OWNED(free) float *x = calloc(3 * MOST_COUNT, sizeof *x);
    OWNED(ar_comm_destroy) ar_comm *part = NULL;
    OWNED(ar_event_destroy) ar_event *e = NULL;
    OWNED(ar_queue_destroy) ar_queue *inline_q = NULL;
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    if (!x)
        return AR_ERR_MEMORY;
    AR_TRY(ar_comm_split(&part, world, r % 2, r));
    AR_TRY(ar_queue_create(&q, AR_QUEUE_THREAD, "comm"));
    AR_TRY(ar_queue_create(&inline_q, AR_QUEUE_INLINE, "main"));
    AR_TRY(ar_event_create(&e));
    for (int i = 0; i < STEPS; i++) {
        const size_t count = next_random(&shared) % MOST_COUNT;
        const int root = (int)(next_random(&shared) % (uint64_t)n);
        const uint64_t kind = next_random(&shared) % 6;
        work_us((double)(next_random(&own) % 100000) * 1e-3);
        const ar_buf a = {x}, b = {x + MOST_COUNT};
        if (kind == 0)
            AR_TRY(ar_comm_all_reduce(world, inline_q, a, ar_const(a), count, AR_F32, AR_SUM, "world"));
        else if (kind == 1)
            AR_TRY(ar_comm_broadcast(world, inline_q, a, count, AR_F32, root, "broadcast"));
        else if (kind == 2)
            AR_TRY(ar_comm_barrier(world, inline_q, "barrier"));
        else
            AR_TRY(ar_comm_all_reduce(part, q, b, ar_const(b), count, AR_F32, AR_SUM, "part"));
        if (kind == 3)
            AR_TRY(ar_event_record(e, q));
        if (kind == 5)
            AR_TRY(ar_event_sync(e, 0));
    }
    return ar_queue_sync(q, 0);
}

/* What a timeline shows of one lane: all that took virtual time. Waits shorter than a microsecond may be left out. */
typedef struct shown {
    int rank, track;
    ari_record_kind kind;
    ari_kind op;
    char name[24];
    uint64_t begin, end;
    int from;
} shown;

static int by_lane(const void *a, const void *b)
{
    const shown *x = a, *y = b;
    if (x->rank != y->rank || x->track != y->track)
        return x->rank != y->rank ? x->rank - y->rank : x->track - y->track;
    return x->end < y->end ? -1 : x->end > y->end ? 1 : x->begin < y->begin ? -1 : x->begin > y->begin;
}

static size_t timeline_of(const ar_trace *t, shown *to, size_t most)
{
    size_t n = 0;
    for (size_t l = 0; l < ari_trace_lanes(t); l++) {
        const ari_trace_lane lane = ari_trace_lane_at(t, l);
        for (size_t i = 0; i < lane.count; i++) {
            const ari_record *r = &lane.records[i];
            const uint64_t shortest = r->kind == ARI_RECORD_WAIT ? 1000 : 1;
            if (r->kind == ARI_RECORD_TRANSFER || r->virtual_end_ns - r->virtual_begin_ns < shortest)
                continue;
            cr_assert_lt(n, most);
            memset(&to[n], 0, sizeof to[n]);
            to[n].rank = lane.rank;
            to[n].track = lane.track;
            to[n].kind = r->kind;
            to[n].op = r->op_kind;
            strncpy(to[n].name, r->name, sizeof to[n].name - 1);
            to[n].begin = r->virtual_begin_ns;
            to[n].end = r->virtual_end_ns;
            to[n].from = r->virtual_from;
            n++;
        }
    }
    qsort(to, n, sizeof *to, by_lane);
    return n;
}

Test(virtual_run, the_timeline_is_the_same_whatever_moves_the_data_and_whoever_runs_when)
{
    enum { RECORDS = 4096, WAYS = 9 };
    const ar_sim_cluster cluster = {
        .ranks_per_node = 2, .inside = {1e-6, 10e9}, .between = {4e-6, 2e9}, .flops = FLOPS};
    const ar_sim_options ways[WAYS] = {{.algorithm = AR_SIM_AUTO},
                                       {.algorithm = AR_SIM_AUTO},
                                       {.algorithm = AR_SIM_DIRECT},
                                       {.algorithm = AR_SIM_RING},
                                       {.algorithm = AR_SIM_LAST},
                                       {.verify_transfers = true},
                                       {.explore = true, .schedule_seed = 1},
                                       {.explore = true, .schedule_seed = 2},
                                       {.explore = true, .schedule_seed = 3, .algorithm = AR_SIM_RING}};
    static shown first[RECORDS], now[RECORDS];
    for (uint64_t seed = 1; seed <= 4; seed++) {
        size_t n = 0;
        for (int w = 0; w < WAYS; w++) {
            ar_sim_options o = ways[w];
            o.cluster = &cluster;
            OWNED(ar_trace_destroy) ar_trace *t = traced(5, &o, random_program, &seed);
            const size_t here = timeline_of(t, w == 0 ? first : now, RECORDS);
            n = w == 0 ? here : n;
            cr_expect_eq(here, n, "seed %d, way %d: %zu records, not %zu", (int)seed, w, here, n);
            cr_expect_gt(n, 150);
            for (size_t i = 0; w > 0 && i < n && i < here; i++)
                cr_assert_eq(memcmp(&first[i], &now[i], sizeof *now), 0,
                             "seed %d, way %d, record %zu: rank %d track %d kind %d %s %llu-%llu from %d, not %s "
                             "%llu-%llu from %d",
                             (int)seed, w, i, now[i].rank, now[i].track, (int)now[i].kind, now[i].name,
                             (unsigned long long)now[i].begin, (unsigned long long)now[i].end, now[i].from,
                             first[i].name, (unsigned long long)first[i].begin, (unsigned long long)first[i].end,
                             first[i].from);
            (void)summary_of(t, AR_TRACE_VIRTUAL);
            (void)summary_of(t, AR_TRACE_REAL);
        }
    }
}

static ar_status three_times(ar_comm *c, void *arg)
{
    float x = 0;
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    AR_TRY(ar_queue_create(&q, AR_QUEUE_INLINE, "main"));
    ar_status st = AR_OK;
    for (int i = 0; i < 3 && st == AR_OK; i++)
        st = small_all_reduce(c, q, &x, "x");
    ((double *)arg)[ar_comm_rank(c)] = now_us();
    return st;
}

Test(virtual_run, a_rank_that_the_transport_delays_is_late_by_the_virtual_clock_too)
{
    double end_us[4];
    const ar_sim_cluster cluster = cluster_of(4, 100);
    const ar_sim_fault faults[] = {{.kind = AR_SIM_DELAY, .rank = 2, .collective = 2, .ns = 500000},
                                   {.kind = AR_SIM_SLOW, .rank = 1, .collective = 3, .ns = 20000}};
    const ar_sim_options o = {.cluster = &cluster, .faults = faults, .fault_count = 2};
    OWNED(ar_trace_destroy) ar_trace *t = traced(4, &o, three_times, end_us);
    for (int r = 0; r < 4; r++)
        expect_us(end_us[r] * 1e-6, 100 + 500 + 100 + 20 + 100, "three all-reduces and the delays");
    const ar_trace_summary s = summary_of(t, AR_TRACE_VIRTUAL);
    expect_us(s.path_wait, 520, "the delays");
    cr_expect_str_eq(s.longest[0].what, "wait");
    cr_expect_eq(s.longest[0].rank, 2);
}

/* 0.3 ns each. */
static ar_status ten_thousand(ar_comm *c, void *arg)
{
    (void)c;
    for (int i = 0; i < 10000; i++)
        work_us(3e-4);
    *(double *)arg = now_us();
    return AR_OK;
}

Test(virtual_run, products_of_less_than_a_nanosecond_add_up)
{
    const ar_sim_cluster cluster = {.ranks_per_node = 0, .inside = {1e-6, 1e9}, .between = {0, 1}, .flops = FLOPS};
    const ar_sim_options o = {.cluster = &cluster};
    double end_us = 0;
    cr_assert_ok(ar_sim_run(1, &o, ten_thousand, &end_us, NULL));
    cr_expect_float_eq(end_us, 3, 0.001, "%g us", end_us);
}

/* --- edges -------------------------------------------------------------------------------------------------------- */

static ar_status for_ever(ar_comm *c, void *arg)
{
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    float x = 1;
    AR_TRY(ar_queue_create(&q, AR_QUEUE_INLINE, "main"));
    for (int i = 0; i < 3; i++)
        ar_trace_work(1e300);
    ar_trace_work((double)INFINITY);
    ar_trace_work((double)NAN);
    const ar_status st = small_all_reduce(c, q, &x, "late");
    ((uint64_t *)arg)[ar_comm_rank(c)] = ari_lane_self()->virtual_ns;
    return st;
}

Test(virtual_run, a_clock_stops_at_its_end_and_does_not_run_over)
{
    const ar_sim_cluster cluster = {.ranks_per_node = 0, .inside = {1e200, 1e-200}, .between = {0, 1}, .flops = 1e-200};
    const ar_sim_options o = {.cluster = &cluster};
    uint64_t end[2] = {0};
    cr_assert_ok(ar_sim_run(2, &o, for_ever, end, NULL));
    cr_expect_eq(end[0], (uint64_t)1 << 62);
    cr_expect_eq(end[1], (uint64_t)1 << 62);
}

/* A queue that a task of another queue makes, and the track of its lane. */
typedef struct inner_queue {
    ar_queue *q;
    int track;
} inner_queue;

static ar_status note_track(void *arg)
{
    ((inner_queue *)arg)->track = ari_lane_self()->track;
    return AR_OK;
}

static ar_status make_queue(void *arg)
{
    inner_queue *made = arg;
    AR_TRY(ar_queue_create(&made->q, AR_QUEUE_THREAD, "inner"));
    return ar_queue_host(made->q, note_track, made);
}

static ar_status queues_of_queues(ar_comm *c, void *arg)
{
    (void)c;
    OWNED(ar_queue_destroy) ar_queue *outer = NULL;
    OWNED(ar_queue_destroy) ar_queue *second = NULL;
    inner_queue *made = arg;
    AR_TRY(ar_queue_create(&outer, AR_QUEUE_THREAD, "outer"));
    AR_TRY(ar_queue_create(&second, AR_QUEUE_THREAD, "second"));
    AR_TRY(ar_queue_host(outer, make_queue, made));
    ar_status st = ar_queue_sync(outer, 0);
    if (st == AR_OK)
        st = ar_queue_sync(made->q, 0);
    ar_queue_destroy(made->q);
    return st;
}

Test(virtual_run, a_queue_made_by_another_queue_has_a_track_of_its_own)
{
    const ar_sim_cluster cluster = cluster_of(2, 100);
    const ar_sim_options o = {.cluster = &cluster};
    inner_queue made = {0};
    cr_assert_ok(ar_sim_run(1, &o, queues_of_queues, &made, NULL));
    cr_expect_eq(made.track, 3, "track %d", made.track);
}
