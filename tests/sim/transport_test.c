/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/comm.h"
#include "anyrank/queue.h"
#include "sim/sim_private.h"
#include "tests/sim/fail_run.h"

/* What goes wrong between ranks: where it strikes, what it does, and what everybody hears of it. */
#define TIMEOUT_NS (150 * MS)

static ar_sim_options options_of(ar_sim_algorithm algorithm, const ar_sim_fault *fault, bool verify)
{
    return (ar_sim_options){.algorithm = algorithm, .faults = fault, .fault_count = 1, .verify_transfers = verify};
}

static ar_status run_fault(fail_run *run, int n, ar_sim_algorithm algorithm, const ar_sim_fault *fault, bool verify)
{
    const ar_sim_options o = options_of(algorithm, fault, verify);
    return run_with(run, n, &o, NULL);
}

/* With a fault that takes time: the scheduler's. */
static ar_status run_late(fail_run *run, int n, ar_sim_algorithm algorithm, const ar_sim_fault *fault, uint64_t seed)
{
    ar_sim_options o = options_of(algorithm, fault, false);
    o.timeout_ns = TIMEOUT_NS;
    return run_scheduled(run, n, o, seed);
}

/* Every rank failed, with this status or AR_ERR_ABORTED, and says the world's first line. */
static void assert_all_hear(const fail_run *run, int n, ar_status st)
{
    char line[512];
    snprintf(line, sizeof line, "%.*s", (int)strcspn(ar_error_message(), "\n"), ar_error_message());
    for (int r = 0; r < n; r++) {
        cr_assert(run->st[r] == st || run->st[r] == AR_ERR_ABORTED, "rank %d: %s", r, run->message[r]);
        cr_assert(strstr(run->message[r], line), "rank %d says '%s', the world '%s'", r, run->message[r], line);
    }
}

/* --- what arrives wrong, unseen: message_test.c has what verification says of it ---------------------------------- */

/* Rank 0 sends {1, 2, 3, 4}; the others begin with {9, 9, 9, 9}. */
BODY(broadcast_four)
{
    int32_t *x = run->result[r];
    for (int i = 0; i < 4; i++)
        x[i] = r == 0 ? i + 1 : 9;
    return ar_comm_broadcast(c, q, (ar_buf){x}, 4, AR_I32, 0, "layers.0");
}

static const ar_sim_fault corrupt = {.kind = AR_SIM_CORRUPT, .rank = 1, .collective = 1, .transfer = 0, .bit = 65};
static const ar_sim_fault drop = {.kind = AR_SIM_DROP, .rank = 1, .collective = 1, .transfer = 0};

Test(transport, a_corrupted_bit_changes_that_element_and_nothing_else)
{
    static const int32_t wrong[4] = {1, 2, 1, 4}, right[4] = {1, 2, 3, 4};
    fail_run run = {.body = broadcast_four};
    cr_assert_ok(run_fault(&run, 3, AR_SIM_DIRECT, &corrupt, false));
    cr_assert_arr_eq(run.result[1], wrong, sizeof wrong);
    cr_assert_arr_eq(run.result[2], right, sizeof right);
}

Test(transport, a_dropped_transfer_leaves_the_receivers_memory_as_it_was)
{
    static const int32_t nothing[4] = {9, 9, 9, 9};
    fail_run run = {.body = broadcast_four};
    cr_assert_ok(run_fault(&run, 3, AR_SIM_DIRECT, &drop, false));
    cr_assert_arr_eq(run.result[1], nothing, sizeof nothing);
}

/* Rank r gives {10 r, 10 r + 1}; rank 0 reads rank 1 (transfer 0), then rank 2 (transfer 1). */
BODY(gather_pairs)
{
    static const size_t counts[3] = {2, 2, 2};
    const int32_t own[2] = {10 * r, 10 * r + 1};
    AR_TRY(ar_comm_all_gather(c, q, (ar_buf){run->result[r]}, (ar_cbuf){own}, counts, AR_I32, "x"));
    return ar_queue_sync(q, 0);
}

Test(transport, a_duplicated_transfer_takes_the_place_of_the_next)
{
    static const int32_t twice[6] = {0, 1, 10, 11, 10, 11}, right[6] = {0, 1, 10, 11, 20, 21};
    const ar_sim_fault duplicate = {.kind = AR_SIM_DUPLICATE, .rank = 0, .collective = 1, .transfer = 0};
    const ar_sim_fault last = {.kind = AR_SIM_DUPLICATE, .rank = 0, .collective = 1, .transfer = 1};
    fail_run run = {.body = gather_pairs};
    cr_assert_ok(run_fault(&run, 3, AR_SIM_DIRECT, &duplicate, false));
    cr_assert_arr_eq(run.result[0], twice, sizeof twice);
    cr_assert_arr_eq(run.result[1], right, sizeof right);
    cr_assert_eq(run_fault(&run, 3, AR_SIM_DIRECT, &last, true), AR_OK, "nothing comes after the last transfer: %s",
                 ar_error_message());
    cr_assert_arr_eq(run.result[0], right, sizeof right);
}

BODY(message_to_two)
{
    int32_t *x = run->result[r];
    for (int i = 0; i < 4; i++)
        x[i] = r == 0 ? i + 1 : 9;
    if (r == 0)
        return ar_comm_send(c, q, (ar_cbuf){x}, 4, AR_I32, 2, "act");
    return r == 2 ? ar_comm_recv(c, q, (ar_buf){x}, 4, AR_I32, 0, "act") : AR_OK;
}

Test(transport, messages_between_two_ranks_are_counted_and_verified)
{
    const ar_sim_fault f = {.kind = AR_SIM_CORRUPT, .rank = 2, .collective = 1, .transfer = 0, .bit = 1};
    fail_run run = {.body = message_to_two};
    cr_assert_ok(run_fault(&run, 3, AR_SIM_DIRECT, &f, false));
    cr_assert_eq(run.result[2][0], 3);
    cr_assert_refused(run_fault(&run, 3, AR_SIM_DIRECT, &f, true), AR_ERR_DATA,
                      "rank 2, transfer 0 from rank 0 in recv(");
    cr_assert_says("element 0 of 4 is 0x00000003, 0x00000001 was sent\n");
}

static void draw_verified(coll_case *k, int kind, uint64_t seed)
{
    *k = (coll_case){.kind = (case_kind)kind, .dtype = AR_F32, .op = AR_SUM, .n = 2 + (int)(seed % 5), .count = 5000};
    k->root = (int)(seed % (uint64_t)k->n);
    k->in_place = seed % 2;
    for (int p = 0; p < k->n; p++) {
        k->counts[p] = plain_hash(seed + (uint64_t)p) % 3000;
        for (int q = 0; q < k->n; q++)
            k->sends[p][q] = k->kind == BARRIER ? 0 : plain_hash(seed * 77 + (uint64_t)(p * 16 + q)) % 500;
    }
    case_init(k, seed);
}

/* Whatever one transfer's fault does, verification sees it, or the result is right. */
Test(transport, no_verified_collective_gives_a_wrong_result)
{
    int seen = 0;
    for (uint64_t seed = 0; seed < 600; seed++) {
        static const ar_sim_fault_kind kinds[3] = {AR_SIM_CORRUPT, AR_SIM_DUPLICATE, AR_SIM_DROP};
        SCOPED(case_fini) coll_case k;
        batch b = {.k = &k, .n = 1};
        char why[256] = "";
        draw_verified(&k, (int)(seed % CASE_KINDS), plain_hash(seed + 1) % 1000);
        const ar_sim_fault f = {.kind = kinds[plain_hash(seed + 2) % 3],
                                .rank = (int)(plain_hash(seed + 3) % (uint64_t)k.n),
                                .collective = 1,
                                .transfer = plain_hash(seed + 4) % 6,
                                .bit = plain_hash(seed + 5)};
        const ar_sim_options o = {.algorithm = (ar_sim_algorithm)(plain_hash(seed) % 4),
                                  .verify_transfers = true,
                                  .faults = &f,
                                  .fault_count = 1};
        const ar_status st = ar_sim_run(k.n, &o, run_batch, &b, NULL);
        seen += st != AR_OK;
        cr_assert(st == AR_ERR_DATA || (st == AR_OK && case_holds(&k, why, sizeof why)), "seed %llu: %s: %s%s",
                  (unsigned long long)seed, ar_status_name(st), why, st == AR_OK ? "" : ar_error_message());
    }
    cr_assert_gt(seen, 120, "only %d of 600 faults struck", seen);
}

/* --- ranks that are late or lost ---------------------------------------------------------------------------------- */

BODY(reduce_twice)
{
    enum { COUNT = 20000 };
    ar_status st = AR_OK;
    OWNED(free) float *x = calloc(COUNT, sizeof *x);
    for (int i = 0; i < 2 && st == AR_OK; i++)
        st = ar_comm_all_reduce(c, q, (ar_buf){x}, (ar_cbuf){x}, COUNT, AR_F32, AR_SUM, i ? "second" : "first");
    const ar_status end = ar_queue_sync(q, 0); /* in any case: the queue may still use x */
    st = st == AR_OK ? end : st;
    return st;
}

Test(transport, a_rank_that_is_killed_or_stands_still_before_a_collective_or_in_it_is_told_of_on_all)
{
#define SECOND "all_reduce(F32, count 20000, sum) 'second', collective #2 of ranks 0-3"
    static const struct {
        ar_sim_fault_kind kind;
        uint64_t transfer;
        const char *says;
    } ways[] = {
        {AR_SIM_KILL, 0, "rank 2 was killed before " SECOND "\n"},
        {AR_SIM_KILL, 3, "rank 2 was killed in the middle of " SECOND},
        {AR_SIM_STALL, 0, " waited 0.150 s in " SECOND ", for rank 2\n"},
        {AR_SIM_STALL, 3, " waited 0.150 s in the middle of " SECOND ", for rank 2\n"},
    };
    for (size_t i = 0; i < 4 * sizeof ways / sizeof *ways; i++) {
        const bool stalls = ways[i / 4].kind == AR_SIM_STALL;
        const ar_status st = stalls ? AR_ERR_TIMEOUT : AR_ERR_ABORTED;
        const ar_sim_fault f = {.kind = ways[i / 4].kind, .rank = 2, .collective = 2, .transfer = ways[i / 4].transfer};
        const ar_sim_algorithm algorithm = i / 2 % 2 ? AR_SIM_RING : AR_SIM_DIRECT;
        fail_run run = {.body = reduce_twice, .queue = i % 2 ? AR_QUEUE_THREAD : AR_QUEUE_INLINE};
        cr_assert_refused(stalls ? run_late(&run, 4, algorithm, &f, i) : run_fault(&run, 4, algorithm, &f, i % 2), st,
                          ways[i / 4].says);
        assert_all_hear(&run, 4, st);
        assert_process_usable();
    }
}

Test(transport, standing_still_in_the_middle_is_missed_where_the_last_rank_does_all)
{
    int struck = 0;
    for (uint64_t seed = 0; seed < 20; seed++) { /* only where rank 2 happens to come last */
        const ar_sim_fault f = {.kind = AR_SIM_STALL, .rank = 2, .collective = 2, .transfer = 1};
        fail_run run = {.body = reduce_twice};
        const ar_status st = run_late(&run, 4, AR_SIM_LAST, &f, seed);
        cr_assert(st == AR_OK || st == AR_ERR_TIMEOUT);
        struck += st != AR_OK;
        if (st != AR_OK)
            cr_assert_says(
                " waited 0.150 s in the middle of all_reduce(F32, count 20000, sum) 'second', collective #2 of "
                "ranks 0-3, for rank 2\n");
    }
    cr_assert_gt(struck, 0);
}

BODY(alone)
{
    OWNED(ar_comm_destroy) ar_comm *g = NULL;
    AR_TRY(ar_comm_split(&g, c, r, 0));
    return ar_comm_barrier(g, q, "own");
}

Test(transport, all_ranks_may_stand_still)
{
    const ar_sim_fault f[2] = {{.kind = AR_SIM_STALL, .rank = 0, .collective = 2},
                               {.kind = AR_SIM_STALL, .rank = 1, .collective = 2}};
    const ar_sim_options o = {.timeout_ns = TIMEOUT_NS, .faults = f, .fault_count = 2}; /* by the real clock */
    fail_run run = {.body = alone};
    cr_assert_eq(run_with(&run, 2, &o, NULL), AR_ERR_TIMEOUT);
}

Test(transport, a_delay_within_the_timeout_harms_nobody_and_a_longer_one_is_told)
{
    ar_sim_fault f = {.kind = AR_SIM_DELAY, .rank = 1, .collective = 2, .ns = 40 * MS};
    fail_run run = {.body = reduce_twice};
    const ar_sim_options patient = {.faults = &f, .fault_count = 1}; /* with a busy machine */
    const uint64_t start = ari_now_ns();
    cr_assert_ok(run_with(&run, 3, &patient, NULL));
    cr_assert_geq(ari_now_ns() - start, 40 * MS);
    f.ns = 3600000 * MS; /* an hour: its sleep ends with the world */
    cr_assert_refused(run_late(&run, 3, AR_SIM_DIRECT, &f, 1), AR_ERR_TIMEOUT, "for rank 1\n");
    assert_all_hear(&run, 3, AR_ERR_TIMEOUT);
}

Test(transport, a_slow_rank_takes_longer_in_each_collective_from_the_first_named)
{
    const ar_sim_fault f = {.kind = AR_SIM_SLOW, .rank = 1, .collective = 1, .ns = 30 * MS};
    const ar_sim_options patient = {.algorithm = AR_SIM_RING, .faults = &f, .fault_count = 1};
    fail_run run = {.body = reduce_twice};
    const uint64_t start = ari_now_ns();
    cr_assert_ok(run_with(&run, 3, &patient, NULL));
    cr_assert_geq(ari_now_ns() - start, 60 * MS);
}

/* --- where they strike -------------------------------------------------------------------------------------------- */

BODY(three_communicators)
{
    OWNED(ar_comm_destroy) ar_comm *g = NULL;
    AR_TRY(ar_comm_split(&g, c, r / 2, r));    /* collective 1 */
    ar_status st = ar_comm_barrier(g, q, "a"); /* 2 */
    if (st == AR_OK)
        st = ar_comm_barrier(c, q, "b"); /* 3 */
    if (st == AR_OK)
        st = ar_comm_barrier(g, q, "c"); /* 4 */
    return st;
}

Test(transport, collectives_are_counted_over_all_communicators_of_the_rank)
{
    static const char *const says[5] = {"before split(", "before barrier() 'a', collective #1 of ranks 2-3",
                                        "before barrier() 'b', collective #2 of ranks 0-3",
                                        "before barrier() 'c', collective #2 of ranks 2-3"};
    for (uint64_t i = 0; i < 5; i++) {
        const ar_sim_fault f = {.kind = AR_SIM_KILL, .rank = 3, .collective = i + 1};
        fail_run run = {.body = three_communicators};
        cr_assert_eq(run_fault(&run, 4, AR_SIM_DIRECT, &f, false), i < 4 ? AR_ERR_ABORTED : AR_OK);
        if (says[i])
            cr_assert_says(says[i]);
    }
}

Test(transport, faults_that_make_no_sense_are_refused)
{
    const ar_sim_fault rank = {.kind = AR_SIM_KILL, .rank = 4, .collective = 1};
    const ar_sim_fault kind = {.kind = AR_SIM_FAULT_KINDS, .rank = 0, .collective = 1};
    const ar_sim_fault none = {.kind = AR_SIM_DROP, .rank = 0, .collective = 0};
    fail_run run = {.body = healthy};
    cr_assert_refused(run_fault(&run, 4, AR_SIM_AUTO, &rank, false), AR_ERR_ARG, "rank 4; 0 to 3 expected");
    cr_assert_refused(run_fault(&run, 4, AR_SIM_AUTO, &kind, false), AR_ERR_ARG, "unknown kind");
    cr_assert_refused(run_fault(&run, 4, AR_SIM_AUTO, &none, false), AR_ERR_ARG, "count from 1");
    const ar_sim_options o = {.fault_count = 1};
    cr_assert_eq(run_with(&run, 4, &o, NULL), AR_ERR_ARG);
}

Test(transport, a_seed_draws_one_fault_and_seeds_draw_every_kind)
{
    int kinds[AR_SIM_FAULT_KINDS] = {0};
    for (uint64_t seed = 0; seed < 1000; seed++) {
        const ar_sim_fault a = ari_sim_fault_draw(seed, 8, 30, 5 * MS), b = ari_sim_fault_draw(seed, 8, 30, 5 * MS);
        cr_assert(a.kind == b.kind && a.rank == b.rank && a.collective == b.collective && a.bit == b.bit);
        cr_assert(a.rank >= 0 && a.rank < 8 && a.collective >= 1 && a.collective <= 30 && a.ns <= 5 * MS);
        kinds[a.kind]++;
    }
    for (int k = 0; k < AR_SIM_FAULT_KINDS; k++)
        cr_assert_gt(kinds[k], 80, "%s: %d of 1000", ari_sim_fault_name((ar_sim_fault_kind)k), kinds[k]);
}
