/* SPDX-License-Identifier: Apache-2.0 */

#include "anyrank/queue.h"
#include "ref/comm/comm_private.h"
#include "tests/sim/fail_run.h"

/* Sends and recvs are an affair of two ranks: the k-th send meets the k-th recv, nobody else is asked, and a peer that
 * is not there any more is noticed. */
static ar_status run_world(fail_run *run, int n, ar_sim_algorithm algorithm)
{
    const ar_sim_options o = {.algorithm = algorithm, .timeout_ns = 600000 * MS}; /* beside any other work */
    return run_with(run, n, &o, NULL);
}

static ar_status send_one(ar_comm *c, ar_queue *q, int64_t x, int peer)
{
    return ar_comm_send(c, q, (ar_cbuf){&x}, 1, AR_I64, peer, "one");
}

static ar_status expect_one(ar_comm *c, ar_queue *q, int64_t expected, int peer)
{
    int64_t x = -1;
    AR_TRY(ar_comm_recv(c, q, (ar_buf){&x}, 1, AR_I64, peer, "one"));
    if (x != expected)
        return ar_error_set(AR_ERR_DATA, "%lld from rank %d, %lld expected", (long long)x, peer, (long long)expected);
    return AR_OK;
}

/* --- who takes part ----------------------------------------------------------------------------------------------- */

BODY(only_two)
{
    for (int i = 0; i < 100; i++) {
        if (r == 1)
            AR_TRY(send_one(c, q, 7 * i, 3));
        if (r == 3)
            AR_TRY(expect_one(c, q, 7 * i, 1));
    }
    return AR_OK;
}

Test(channels, ranks_that_neither_send_nor_receive_are_not_asked)
{
    for (int a = AR_SIM_AUTO; a <= AR_SIM_LAST; a++) {
        fail_run run = {.body = only_two};
        cr_assert_ok(run_world(&run, 5, (ar_sim_algorithm)a));
    }
}

enum { ROUNDS = 50 };

/* Every rank sends to its right and receives from its left at once, each on a queue of its own. */
static ar_status ring_of_sends(ar_comm *c, ar_queue *out, fail_run *run, int r)
{
    (void)run;
    const int n = ar_comm_size(c), right = (r + 1) % n, left = (r + n - 1) % n;
    static _Thread_local int64_t sent[ROUNDS], got[ROUNDS];
    ar_queue *in = NULL;
    AR_TRY(ar_queue_create(&in, AR_QUEUE_THREAD, "receive"));
    ar_status st = AR_OK;
    for (int i = 0; i < ROUNDS && st == AR_OK; i++) {
        sent[i] = 1000 * r + i;
        st = ar_comm_send(c, out, (ar_cbuf){&sent[i]}, 1, AR_I64, right, "right");
        if (st == AR_OK)
            st = ar_comm_recv(c, in, (ar_buf){&got[i]}, 1, AR_I64, left, "left");
    }
    if (st == AR_OK)
        st = ar_queue_sync(in, 0);
    if (st == AR_OK)
        st = ar_queue_sync(out, 0);
    for (int i = 0; i < ROUNDS && st == AR_OK; i++) {
        if (got[i] != 1000 * left + i)
            st = ar_error_set(AR_ERR_DATA, "message %d: %lld", i, (long long)got[i]);
    }
    ar_queue_destroy(in);
    uint64_t read = 0, written = 0;
    ar_comm_counted(c, &read, &written);
    if (st == AR_OK && (read != ROUNDS * sizeof(int64_t) || written != 0))
        st = ar_error_set(AR_ERR_DATA, "%llu bytes read", (unsigned long long)read);
    return st;
}

Test(channels, a_ring_of_sends_on_queues_of_their_own_goes_round)
{
    for (int n = 2; n <= MOST; n++) {
        fail_run run = {.body = ring_of_sends, .queue = AR_QUEUE_THREAD};
        cr_assert_ok(run_world(&run, n, AR_SIM_AUTO));
    }
}

/* Rank 0 sends to 1 first and to 2 then, but 1 receives only after it has heard of 2, which has heard of 0. */
BODY(out_of_order)
{
    int64_t x = 5;
    if (r == 1) {
        AR_TRY(expect_one(c, q, 6, 2));
        return expect_one(c, q, 5, 0);
    }
    if (r == 2) {
        AR_TRY(expect_one(c, q, 5, 0));
        return send_one(c, q, 6, 1);
    }
    OWNED(ar_queue_destroy) ar_queue *first = NULL;
    AR_TRY(ar_queue_create(&first, AR_QUEUE_THREAD, "first"));
    AR_TRY(ar_comm_send(c, first, (ar_cbuf){&x}, 1, AR_I64, 1, "first"));
    AR_TRY(send_one(c, q, 5, 2));
    return ar_queue_sync(first, 0);
}

Test(channels, sends_to_different_peers_wait_on_different_queues)
{
    for (int i = 0; i < 20; i++) {
        fail_run run = {.body = out_of_order};
        cr_assert_ok(run_world(&run, 3, AR_SIM_AUTO));
    }
}

/* While one message waits for its recv, the group does other things on another queue. */
BODY(beside_collectives)
{
    int64_t x = 9, sum = 0;
    OWNED(ar_queue_destroy) ar_queue *aside = NULL;
    AR_TRY(ar_queue_create(&aside, AR_QUEUE_THREAD, "aside"));
    ar_status st = r == 0 ? ar_comm_send(c, aside, (ar_cbuf){&x}, 1, AR_I64, 2, "aside") : AR_OK;
    for (int i = 0; i < 20 && st == AR_OK; i++) {
        sum = 1;
        st = ar_comm_all_reduce(c, q, (ar_buf){&sum}, (ar_cbuf){&sum}, 1, AR_I64, AR_SUM, "beside");
    }
    if (st == AR_OK && r == 2)
        st = expect_one(c, q, 9, 0);
    if (st == AR_OK)
        st = ar_queue_sync(aside, 0);
    return st == AR_OK && sum != 3 ? ar_error_set(AR_ERR_DATA, "sum %lld", (long long)sum) : st;
}

Test(channels, a_message_that_waits_does_not_hold_up_collectives)
{
    fail_run run = {.body = beside_collectives};
    cr_assert_ok(run_world(&run, 3, AR_SIM_AUTO));
}

/* --- groups ------------------------------------------------------------------------------------------------------- */

/* Rows and columns of 2 x 4: two ranks may meet in a row, in a column and in the world, one apart from the other. Peers
 * are ranks of the group. */
BODY(rows_and_columns)
{
    ar_comm *g[3] = {c, NULL, NULL};
    ar_status st = ar_comm_split(&g[1], c, r / 4, -r); /* falling ranks */
    if (st == AR_OK)
        st = ar_comm_split(&g[2], c, r % 4, r);
    for (int i = 0; i < 3 && st == AR_OK; i++) {
        const int rank = ar_comm_rank(g[i]), last = ar_comm_size(g[i]) - 1;
        const int other = rank == 0 ? last : 0;
        if (rank == 0)
            st = send_one(g[i], q, 100 * i + r, other);
        if (st == AR_OK && rank == last) {
            const int from = i == 0 ? 0 : i == 1 ? r + 3 : r - 4;
            st = expect_one(g[i], q, 100 * i + from, other);
        }
    }
    ar_comm_destroy(g[1]);
    ar_comm_destroy(g[2]);
    return st;
}

Test(channels, overlapping_groups_have_channels_of_their_own)
{
    for (int i = 0; i < 10; i++) {
        fail_run run = {.body = rows_and_columns};
        cr_assert_ok(run_world(&run, 8, AR_SIM_AUTO));
    }
}

/* Rows of 4, whose last rank also says what is not so: of its number, or of theirs. */
BODY(join_row)
{
    ar_comm *g = NULL, *none = NULL;
    const int place = r % 4, wrong = r == 7 ? run->variant : 0;
    AR_TRY(ari_comm_join(&none, c, -1, place, 4));
    AR_TRY(ari_comm_join(&g, c, r / 4, place, 4));
    ar_status st = place == 0 ? send_one(g, q, r, 3) : place == 3 ? expect_one(g, q, r - 3, 0) : AR_OK;
    if (st == AR_OK && (none || ar_comm_rank(g) != place || ar_comm_size(g) != 4))
        st = ar_error_set(AR_ERR_DATA, "number %d of %d", ar_comm_rank(g), ar_comm_size(g));
    ar_comm_destroy(g);
    if (st != AR_OK || run->variant == 0)
        return st;
    st = ari_comm_join(&g, c, r / 4, wrong == 1 ? 8 : place, wrong == 2 ? 5 : 4);
    if (st == AR_ERR_MISMATCH && g)
        st = ar_error_set(AR_ERR_DATA, "a group that is refused is given");
    ar_comm_destroy(g);
    return st;
}

Test(channels, ranks_that_know_their_group_join_it_or_hear_that_it_is_another)
{
    for (int variant = 0; variant < 3; variant++) {
        fail_run run = {.body = join_row, .variant = variant};
        cr_assert_eq(run_world(&run, 8, AR_SIM_AUTO), variant == 0 ? AR_OK : AR_ERR_MISMATCH, "%s", ar_error_message());
        if (variant > 0)
            cr_assert_says(variant == 1 ? "rank 7 is number 3 of 4 with its color, expected 8 of 4"
                                        : "rank 7 is number 3 of 4 with its color, expected 3 of 5");
    }
}

/* --- peers that are not there ------------------------------------------------------------------------------------- */

typedef struct absence {
    const char *name;
    ar_status st;
    const char *says[3];
} absence;

enum { RETURNED, LATE, DROPPED_UNUSED, DROPPED, COLLECTIVE, ABSENCES };
/* What becomes of rank 1's send of 5 elements to rank 3. */
static const absence absences[ABSENCES] = {
    {"returned", AR_ERR_MISMATCH, {"rank 3 returned while rank 1 waits", "send(F32, count 5, peer 3) 'x'", ""}},
    {"late", AR_ERR_TIMEOUT, {"rank 1 waited 0.003 s", "send(F32, count 5, peer 3) 'x'", "for rank 3"}},
    {"group dropped, never used", AR_ERR_MISMATCH, {"rank 3 destroyed its communicator while rank 1", "send(F32", ""}},
    {"group dropped after use", AR_ERR_MISMATCH, {"rank 3 destroyed its communicator while rank 1", "send(F32", ""}},
    {"collective instead", AR_ERR_TIMEOUT, {"waited 0.003 s", "for rank", ""}},
};

BODY(absent_peer)
{
    float x[5] = {0};
    OWNED(ar_comm_destroy) ar_comm *g = NULL;
    const int v = run->variant;
    AR_TRY(ar_comm_split(&g, c, 0, r));
    ar_status st = AR_OK;
    if (v == DROPPED && (r == 1 || r == 3))
        st = r == 1 ? send_one(g, q, 1, 3) : expect_one(g, q, 1, 1);
    if (st == AR_OK && r == 1)
        st = ar_comm_send(v == RETURNED ? c : g, q, (ar_cbuf){x}, 5, AR_F32, 3, "x");
    const bool drops = v == DROPPED || v == DROPPED_UNUSED;
    if (st == AR_OK && r == 3 && drops) {
        ar_comm_destroy(g);
        g = NULL;
    }
    if (st == AR_OK && r != 1 && (drops || v == COLLECTIVE))
        st = ar_comm_barrier(c, q, "elsewhere");
    while (st == AR_OK && r == 3 && v == LATE && !ari_comm_error(c)[0]) {
        /* Looking gives the turn away and moves the scheduler's time on: no core has to be given away too. */
    }
    return st;
}

Test(channels, a_peer_that_is_not_there_is_named)
{
    enum { SCHEDULES = 20 }; /* in some, rank 1 waits before its peer goes; in others, after */
    for (int i = 0; i < ABSENCES * SCHEDULES; i++) {
        const int v = i % ABSENCES;
        const absence *a = &absences[v];
        fail_run run = {.body = absent_peer, .variant = v};
        const ar_sim_options o = {.timeout_ns = a->st == AR_ERR_TIMEOUT ? 3 * MS : 0};
        cr_assert_eq(run_scheduled(&run, 4, o, (uint64_t)i), a->st, "%s: %s", a->name, ar_error_message());
        for (int j = 0; j < 3; j++)
            cr_assert_says(a->says[j]);
        cr_assert(v == COLLECTIVE || run.st[1] == a->st, "%s: %s", a->name, run.message[1]);
        if (i >= ABSENCES || a->st == AR_ERR_TIMEOUT)
            continue; /* once more in time that passes */
        cr_assert_eq(run_world(&run, 4, AR_SIM_AUTO), a->st, "%s: %s", a->name, ar_error_message());
    }
    assert_process_usable();
}

/* Two threads of a rank in one channel: which of the two messages comes first would be anybody's guess. */
BODY(one_channel_twice)
{
    int64_t x = 0;
    if (r == 1)
        return ar_comm_barrier(c, q, "until the end");
    OWNED(ar_queue_destroy) ar_queue *other = NULL;
    AR_TRY(ar_queue_create(&other, AR_QUEUE_THREAD, "other"));
    AR_TRY(ar_comm_send(c, other, (ar_cbuf){&x}, 1, AR_I64, 1, "a"));
    return ar_comm_send(c, q, (ar_cbuf){&x}, 1, AR_I64, 1, "b");
}

Test(channels, two_threads_in_one_channel_are_an_error)
{
    fail_run run = {.body = one_channel_twice};
    cr_assert_refused(run_world(&run, 2, AR_SIM_AUTO), AR_ERR_ARG, "rank 0 calls send(I64, count 1, peer 1)");
    cr_assert_says("another of its threads");
    assert_process_usable();
}
