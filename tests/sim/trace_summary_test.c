/* SPDX-License-Identifier: Apache-2.0 */
/* Where the time went: sums over ranks and the critical path, of programs whose path is known by construction. */
#include <inttypes.h>
#include <unistd.h>

#include "anyrank/comm.h"
#include "anyrank/queue.h"
#include "tests/sim/virtual_support.h"

static void expect_part(const ar_trace_summary *s, size_t i, const char *what, int rank, double us)
{
    cr_assert_lt(i, s->parts, "there are %zu parts", s->parts);
    cr_expect_str_eq(s->longest[i].what, what);
    cr_expect_eq(s->longest[i].rank, rank, "%s on rank %d, not %d", what, s->longest[i].rank, rank);
    expect_us(s->longest[i].seconds, us, what);
}

static ar_status late_rank(ar_comm *c, void *arg)
{
    (void)arg;
    const int r = ar_comm_rank(c);
    float x = 0;
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    AR_TRY(ar_queue_create(&q, AR_QUEUE_INLINE, "main"));
    ar_trace_begin("step");
    ar_trace_begin("backward");
    work_us(r == 2 ? 500 : 100);
    ar_trace_end();
    const ar_status st = small_all_reduce(c, q, &x, "grads");
    work_us(r == 0 ? 50 : 20);
    ar_trace_end();
    work_us(r == 0 ? 5 : 0);
    return st;
}

Test(summary, the_path_leads_through_the_rank_that_came_last)
{
    const ar_sim_cluster cluster = cluster_of(4, 150);
    const ar_sim_options o = {.cluster = &cluster};
    OWNED(ar_trace_destroy) ar_trace *t = traced(4, &o, late_rank, NULL);
    const ar_trace_summary s = summary_of(t, AR_TRACE_VIRTUAL);
    expect_us(s.seconds, 705, "all");
    expect_us(s.compute, 520, "rank 2 computes longest");
    expect_us(s.communication, 550, "the others wait 400 and reduce 150");
    expect_us(s.exposed, 550, "nothing hides it");
    cr_expect_float_eq(s.overlap, 0, 1e-9);
    expect_us(s.path_compute, 555, "500 on rank 2, 55 on rank 0");
    expect_us(s.path_communication, 150, "without waiting");
    cr_expect_eq(s.path_wait, 0.0);
    cr_expect_eq(s.parts, 4);
    expect_part(&s, 0, "backward", 2, 500);
    expect_part(&s, 1, "all_reduce grads", 0, 150);
    expect_part(&s, 2, "step", 0, 50);
    expect_part(&s, 3, "compute", 0, 5);
}

static ar_status late_leaf(ar_comm *c, void *arg)
{
    (void)arg;
    const double before_us[] = {100, 10, 200};
    const int r = ar_comm_rank(c);
    float x = 0;
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    AR_TRY(ar_queue_create(&q, AR_QUEUE_INLINE, "main"));
    work_us(before_us[r]);
    const ar_status st = ar_comm_broadcast(c, q, (ar_buf){&x}, 1, AR_F32, 0, "weights");
    work_us(r == 1 ? 500 : 1);
    return st;
}

Test(summary, the_path_leaves_out_a_late_member_that_nobody_on_it_waited_for)
{
    const ar_sim_cluster cluster = {
        .ranks_per_node = 0, .inside = {10e-6, HUGE_VAL}, .between = {0, 1}, .flops = FLOPS};
    const ar_sim_options o = {.cluster = &cluster};
    OWNED(ar_trace_destroy) ar_trace *t = traced(3, &o, late_leaf, NULL);
    const ar_trace_summary s = summary_of(t, AR_TRACE_VIRTUAL);
    expect_us(s.seconds, 610, "all");
    cr_expect_eq(s.parts, 3);
    expect_part(&s, 0, "compute", 1, 500);
    expect_part(&s, 1, "compute", 0, 100);
    expect_part(&s, 2, "broadcast weights", 1, 10);
}

/* A pipeline: rank r works when it has what rank r - 1 made. */
static ar_status pipeline(ar_comm *c, void *arg)
{
    (void)arg;
    static const char *const names[] = {"stage 0", "stage 1", "stage 2"};
    const int r = ar_comm_rank(c), n = ar_comm_size(c);
    float x[250] = {0};
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    AR_TRY(ar_queue_create(&q, AR_QUEUE_INLINE, "main"));
    ar_status st = AR_OK;
    if (r > 0)
        st = ar_comm_recv(c, q, (ar_buf){x}, 250, AR_F32, r - 1, "activations");
    ar_trace_begin(names[r]);
    work_us(10 * (r + 1));
    ar_trace_end();
    if (r < n - 1 && st == AR_OK)
        st = ar_comm_send(c, q, (ar_cbuf){x}, 250, AR_F32, r + 1, "activations");
    return st;
}

Test(summary, the_path_goes_from_stage_to_stage)
{
    /* 3 us and 1000 bytes at 1 GB/s: 4 us a message; 10, 20, 30 us of work. */
    const ar_sim_cluster cluster = {.ranks_per_node = 0, .inside = {3e-6, 1e9}, .between = {0, 1}, .flops = FLOPS};
    const ar_sim_options o = {.cluster = &cluster};
    OWNED(ar_trace_destroy) ar_trace *t = traced(3, &o, pipeline, NULL);
    const ar_trace_summary s = summary_of(t, AR_TRACE_VIRTUAL);
    expect_us(s.seconds, 68, "all");
    expect_us(s.path_compute, 60, "all stages");
    expect_us(s.path_communication, 8, "both messages");
    expect_part(&s, 0, "stage 2", 2, 30);
    expect_part(&s, 1, "stage 1", 1, 20);
    expect_part(&s, 2, "stage 0", 0, 10);
    expect_part(&s, 3, "recv activations", 1, 4);
    expect_part(&s, 4, "recv activations", 2, 4);
    cr_expect_eq(s.collectives, 4);
    cr_expect_eq(s.bytes, 2000);
}

enum { COUNTED = 4 };
typedef struct counted {
    uint64_t read[COUNTED], written[COUNTED];
} counted;

static ar_status all_reduce_counted(ar_comm *c, void *arg)
{
    counted *n = arg;
    const int r = ar_comm_rank(c);
    static float x[COUNTED][20000];
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    AR_TRY(ar_queue_create(&q, AR_QUEUE_INLINE, "main"));
    const ar_status st = ar_comm_all_reduce(c, q, (ar_buf){x[r]}, (ar_cbuf){x[r]}, 20000, AR_F32, AR_SUM, "grads");
    ar_comm_counted(c, &n->read[r], &n->written[r]);
    return st;
}

/* A rank reads what others have and writes what it has made of it into their memory. */
Test(summary, bytes_are_those_that_ranks_read_and_those_that_they_wrote)
{
    const ar_sim_options o = {.algorithm = AR_SIM_DIRECT};
    counted n = {{0}, {0}};
    uint64_t read = 0, written = 0;
    OWNED(ar_trace_destroy) ar_trace *t = traced(COUNTED, &o, all_reduce_counted, &n);
    const ar_trace_summary s = summary_of(t, AR_TRACE_REAL);
    for (int r = 0; r < COUNTED; r++) {
        read += n.read[r];
        written += n.written[r];
    }
    cr_expect(read > 0 && written > 0, "%" PRIu64 " bytes read, %" PRIu64 " written", read, written);
    cr_expect_eq(s.bytes, read + written, "%" PRIu64 " bytes, not %" PRIu64 " read and %" PRIu64 " written", s.bytes,
                 read, written);
}

/* Two groups at once: pairs on one queue, the world on another; both are enqueued in the middle of work. */
static ar_status two_queues(ar_comm *c, void *arg)
{
    (void)arg;
    const int r = ar_comm_rank(c);
    float x = 0, y = 0;
    OWNED(ar_comm_destroy) ar_comm *pair = NULL;
    OWNED(ar_queue_destroy) ar_queue *other = NULL, *q = NULL;
    AR_TRY(ar_comm_split(&pair, c, r / 2, r));
    AR_TRY(ar_queue_create(&q, AR_QUEUE_THREAD, "world"));
    AR_TRY(ar_queue_create(&other, AR_QUEUE_THREAD, "pairs"));
    work_us(30);
    AR_TRY(small_all_reduce(c, q, &x, "all")); /* 30 .. 90 */
    work_us(30);
    AR_TRY(small_all_reduce(pair, other, &y, "pair")); /* 60 .. 80 */
    work_us(10);
    AR_TRY(ar_queue_sync(other, 0));
    work_us(4);
    AR_TRY(ar_queue_sync(q, 0));
    work_us(10);
    return AR_OK;
}

Test(summary, collectives_that_overlap_count_once_and_the_path_takes_the_one_that_ends_last)
{
    const ar_sim_cluster cluster = {
        .ranks_per_node = 0, .inside = {10e-6, HUGE_VAL}, .between = {0, 1}, .flops = FLOPS};
    const ar_sim_options o = {.cluster = &cluster};
    OWNED(ar_trace_destroy) ar_trace *t = traced(4, &o, two_queues, NULL);
    const ar_trace_summary s = summary_of(t, AR_TRACE_VIRTUAL);
    expect_us(s.seconds, 100, "all");
    expect_us(s.compute, 84, "computation");
    expect_us(s.communication, 60, "30 .. 90");
    expect_us(s.exposed, 16, "70 .. 80 and 84 .. 90");
    cr_expect_float_eq(s.overlap, 44.0 / 60, 1e-9);
    expect_us(s.path_compute, 40, "30 before, 10 after");
    expect_us(s.path_communication, 60, "the longer of the two");
    cr_expect_str_eq(s.longest[0].what, "all_reduce all");
}

/* By the real clock the others are there before rank 1 only if it comes late enough: how late that is depends on the
 * machine, so each of these programs runs again, rank 1 later, until it is. */
enum { FIRST_LATE_US = 30000, LAST_LATE_US = 100000000 };

static ar_status rank_1_fails(ar_comm *c, void *arg)
{
    const useconds_t *late_us = arg;
    float x = 0;
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    AR_TRY(ar_queue_create(&q, AR_QUEUE_INLINE, "main"));
    work_us(10);
    ar_status st = small_all_reduce(c, q, &x, "first");
    if (ar_comm_rank(c) == 1)
        usleep(*late_us);
    if (st == AR_OK && ar_comm_rank(c) == 1)
        st = ar_error_set(AR_ERR_DATA, "rank 1 has enough");
    if (st == AR_OK)
        st = small_all_reduce(c, q, &x, "second");
    return st;
}

Test(summary, a_run_that_failed_is_summed_up_as_far_as_it_came)
{
    const ar_sim_cluster cluster = cluster_of(3, 100);
    double waited = 0, late = 0;
    for (useconds_t us = FIRST_LATE_US; us < LAST_LATE_US && !(waited > late / 3); us *= 4) {
        ar_sim_options o = {.cluster = &cluster};
        cr_assert_ok(ar_trace_create(&o.trace));
        cr_expect_eq(ar_sim_run(3, &o, rank_1_fails, &us, NULL), AR_ERR_DATA);
        const ar_trace_summary s = summary_of(o.trace, AR_TRACE_VIRTUAL);
        expect_us(s.seconds, 110, "all");
        late = us * 1e-6;
        waited = summary_of(o.trace, AR_TRACE_REAL).path_wait;
        ar_trace_destroy(o.trace);
    }
    cr_expect_gt(waited, late / 3, "the others waited in vain for %g s of %g s", waited, late);
}

static ar_status late_for_real(ar_comm *c, void *arg)
{
    const useconds_t *late_us = arg;
    float x = 0;
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    AR_TRY(ar_queue_create(&q, AR_QUEUE_INLINE, "main"));
    ar_trace_begin("sleep");
    usleep(ar_comm_rank(c) == 1 ? *late_us : 1000);
    ar_trace_end();
    return small_all_reduce(c, q, &x, "grads");
}

Test(summary, the_real_clock_finds_the_late_rank_too)
{
    const ar_sim_options o = {.algorithm = AR_SIM_AUTO};
    ar_trace *t = NULL, *empty = NULL;
    ar_trace_summary s = {0};
    double late = 0;
    bool found = false; /* a busy machine may keep another rank longer */
    for (useconds_t us = FIRST_LATE_US; us < LAST_LATE_US && !found; us *= 4) {
        ar_trace_destroy(t);
        t = traced(3, &o, late_for_real, &us);
        s = summary_of(t, AR_TRACE_REAL);
        late = us * 1e-6;
        found = s.exposed > late / 3 && s.longest[0].rank == 1 && strcmp(s.longest[0].what, "sleep") == 0;
    }
    cr_expect_geq(s.compute, late, "rank 1 was busy for %g s", s.compute);
    cr_expect_gt(s.communication, late / 3, "the others waited for %g s", s.communication);
    cr_expect_gt(s.exposed, late / 3);
    cr_expect_geq(s.path_compute, late);
    cr_expect_str_eq(s.longest[0].what, "sleep");
    cr_expect_eq(s.longest[0].rank, 1);
    ar_trace_summary none;
    cr_expect_eq(ar_trace_summarise(&none, t, AR_TRACE_VIRTUAL), AR_ERR_ARG, "the run had no cluster");
    cr_expect(strstr(ar_error_message(), "virtual time"), "%s", ar_error_message());
    cr_expect_eq(ar_trace_summarise(NULL, t, AR_TRACE_REAL), AR_ERR_ARG);
    cr_expect_eq(ar_trace_summarise(&none, NULL, AR_TRACE_REAL), AR_ERR_ARG);
    ar_trace_destroy(t);
    cr_assert_ok(ar_trace_create(&empty));
    const ar_trace_summary nothing = summary_of(empty, AR_TRACE_REAL);
    cr_expect(nothing.seconds <= 0 && nothing.collectives == 0 && nothing.parts == 0);
    ar_trace_destroy(empty);
}
