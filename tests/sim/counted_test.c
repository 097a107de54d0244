/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>

#include "tests/sim/plain.h"

/* Bytes of other ranks' memory, summed over the ranks, against closed forms: D is the whole buffer.
 *   all_reduce 2(N-1)D;  reduce_scatter, all_gather, broadcast (N-1)D;  all_to_all and exchange: what is sent to
 *   others. The same for both ways of moving data, for sizes on both sides of the one below which one rank works for
 *   all. */
TestSuite(counted, .timeout = 60);

typedef struct counted_run {
    coll_case k;
    int times;
    uint64_t read[8], written[8], calls[8], other_calls[8];
} counted_run;

static const char *const kind_names[] = {"all_reduce", "reduce_scatter", "all_gather",
                                         "all_to_all", "broadcast",      "exchange"};

static ar_status run_case(ar_comm *c, void *arg)
{
    counted_run *run = arg;
    const int r = ar_comm_rank(c);
    ar_queue *q = NULL;
    AR_TRY(ar_queue_create(&q, AR_QUEUE_INLINE, "test"));
    ar_status st = AR_OK;
    for (int i = 0; i < run->times && st == AR_OK; i++)
        st = case_call(&run->k, c, q, "counted");
    ar_comm_counted(c, &run->read[r], &run->written[r]);
    for (size_t i = 0; i < CASE_KINDS; i++) {
        if (i == run->k.kind)
            run->calls[r] = ar_comm_calls(c, kind_names[i]);
        else
            run->other_calls[r] += ar_comm_calls(c, kind_names[i]);
    }
    run->other_calls[r] += ar_comm_calls(c, "barrier") + ar_comm_calls(c, "no such kind");
    ar_queue_destroy(q);
    return st;
}

static uint64_t closed_form(const coll_case *k)
{
    const uint64_t others = (uint64_t)k->n - 1, e = plain_size(k->dtype);
    uint64_t sent = 0;
    for (int p = 0; p < k->n; p++) {
        for (int q = 0; q < k->n; q++)
            sent += p == q ? 0 : k->sends[p][q] * e;
    }
    switch (k->kind) {
    case ALL_REDUCE:
        return 2 * others * k->count * e;
    case REDUCE_SCATTER:
    case ALL_GATHER:
        return others * plain_before(k->counts, k->n) * e;
    case BROADCAST:
        return others * k->count * e;
    case ALL_TO_ALL:
        return sent;
    default:
        return 2 * sent;
    }
}

static void check_kind(case_kind kind, int n, size_t count, ar_sim_algorithm algorithm)
{
    counted_run run = {.k = {.kind = kind, .dtype = AR_F64, .op = AR_SUM, .n = n, .root = n - 1, .count = count},
                       .times = 3};
    for (int p = 0; p < n; p++) {
        run.k.counts[p] = (count + (size_t)p) % 5 == 0 ? 0 : count / (size_t)n + (size_t)p;
        for (int q = 0; q < n; q++)
            run.k.sends[p][q] = (count + (size_t)(p + 3 * q)) % 11;
    }
    case_init(&run.k, 9);
    const ar_sim_options o = {.algorithm = algorithm};
    cr_assert_eq(ar_sim_run(n, &o, run_case, &run, NULL), AR_OK, "%s", ar_error_message());
    uint64_t total = 0;
    for (int r = 0; r < n; r++) {
        total += run.read[r] + run.written[r];
        cr_assert_eq(run.calls[r], 3);
        cr_assert_eq(run.other_calls[r], 0);
    }
    cr_assert_eq(total, 3 * closed_form(&run.k), "%s N %d count %zu algorithm %d: %llu bytes, %llu expected",
                 kind_names[kind], n, count, (int)algorithm, (unsigned long long)total,
                 (unsigned long long)(3 * closed_form(&run.k)));
    case_fini(&run.k);
}

Test(counted, bytes_over_all_ranks_are_the_closed_forms)
{
    static const size_t counts[] = {0, 1, 7, 1000, 10007};
    for (int n = 1; n <= 8; n++) {
        for (int kind = 0; kind < CASE_KINDS; kind++) {
            for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
                check_kind((case_kind)kind, n, counts[i], AR_SIM_DIRECT);
                check_kind((case_kind)kind, n, counts[i], AR_SIM_RING);
            }
        }
    }
}

/* direct credits each rank with its own slice, whoever did the work: r reads N-1 inputs and writes N-1 outputs. */
Test(counted, direct_all_reduce_credits_each_rank_with_its_slice)
{
    static const size_t counts[] = {10, 10001};
    for (size_t i = 0; i < 2; i++) {
        counted_run run = {.k = {.kind = ALL_REDUCE, .dtype = AR_F32, .op = AR_SUM, .n = 3, .count = counts[i]},
                           .times = 1};
        case_init(&run.k, 9);
        cr_assert_eq(ar_sim_run(3, NULL, run_case, &run, NULL), AR_OK, "%s", ar_error_message());
        for (int r = 0; r < 3; r++) {
            size_t start, size;
            ar_comm_slice(counts[i], 3, r, &start, &size);
            cr_assert_eq(run.read[r], 2 * 4 * size);
            cr_assert_eq(run.written[r], 2 * 4 * size);
        }
        case_fini(&run.k);
    }
}

typedef struct split_bytes {
    uint64_t world[4], group[4];
} split_bytes;

static ar_status reduce_in_group(ar_comm *c, void *arg)
{
    split_bytes *b = arg;
    const int r = ar_comm_rank(c);
    ar_comm *g = NULL;
    ar_queue *q = NULL;
    float x[6] = {0};
    AR_TRY(ar_queue_create(&q, AR_QUEUE_INLINE, "test"));
    ar_status st = ar_comm_split(&g, c, r % 2, r);
    if (st == AR_OK)
        st = ar_comm_all_reduce(g, q, (ar_buf){x}, (ar_cbuf){x}, 6, AR_F32, AR_SUM, "group");
    if (st == AR_OK) {
        uint64_t read, written;
        ar_comm_counted(c, &read, &written);
        b->world[r] = read + written;
        ar_comm_counted(g, &read, &written);
        b->group[r] = read + written;
    }
    ar_comm_destroy(g);
    ar_queue_destroy(q);
    return st;
}

Test(counted, a_group_counts_its_own_bytes)
{
    split_bytes b = {{0}, {0}};
    cr_assert_eq(ar_sim_run(4, NULL, reduce_in_group, &b, NULL), AR_OK, "%s", ar_error_message());
    for (int r = 0; r < 4; r++) {
        cr_assert_eq(b.world[r], 0);
        cr_assert_eq(b.group[r], 24); /* reads 12 and writes 12 of its partner's */
    }
}
