/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/queue.h"
#include "ref/comm/comm_impl.h"
#include "ref/comm/comm_private.h"
#include "tests/support/test.h"

/* The public boundary (arguments, slices), the group of one, and what a queue hands to a communicator. */
typedef struct fixture {
    ar_comm *c;
    ar_queue *q;
} fixture;

static fixture make(ar_queue_kind kind)
{
    fixture f = {NULL, NULL};
    cr_assert_ok(ari_comm_self(&f.c));
    cr_assert_ok(ar_queue_create(&f.q, kind, "test"));
    return f;
}

static void end(fixture *f)
{
    ar_queue_destroy(f->q);
    ar_comm_destroy(f->c);
}

Test(comm, slices_cover_the_buffer_in_order_and_differ_by_one_at_most)
{
    for (size_t count = 0; count < 40; count++) {
        for (int n = 1; n <= 9; n++) {
            size_t next = 0;
            for (int c = 0; c < n; c++) {
                size_t start, size;
                ari_comm_slice(count, n, c, &start, &size);
                cr_assert_eq(start, next);
                cr_assert_eq(size, count / (size_t)n + ((size_t)c < count % (size_t)n ? 1 : 0));
                next += size;
            }
            cr_assert_eq(next, count);
        }
    }
}

Test(comm, a_group_of_one_copies)
{
    for (int kind = 0; kind < 2; kind++) {
        SCOPED(end) fixture f = make((ar_queue_kind)kind);
        const float in[3] = {1, 2, 3};
        float a[3] = {0}, b[3] = {0}, c[3] = {0}, d[3] = {0}, e[3] = {0};
        const size_t three[1] = {3};
        const ar_cbuf from = {in};
        cr_assert_eq(ar_comm_rank(f.c), 0);
        cr_assert_eq(ar_comm_size(f.c), 1);
        cr_assert_ok(ar_comm_all_reduce(f.c, f.q, (ar_buf){a}, from, 3, AR_F32, AR_SUM, "t"));
        cr_assert_ok(ar_comm_reduce_scatter(f.c, f.q, (ar_buf){b}, from, three, AR_F32, AR_SUM, "t"));
        cr_assert_ok(ar_comm_all_gather(f.c, f.q, (ar_buf){c}, from, three, AR_F32, NULL));
        cr_assert_ok(ar_comm_all_to_all(f.c, f.q, (ar_buf){d}, from, three, three, AR_F32, "t"));
        cr_assert_ok(ar_comm_broadcast(f.c, f.q, (ar_buf){d}, 3, AR_F32, 0, "t"));
        float out[3] = {1, 2, 3};
        const ar_p2p ops[2] = {{0, false, {e}, 3}, {0, true, {out}, 3}};
        cr_assert_ok(ar_comm_exchange(f.c, f.q, ops, 2, AR_F32, "t"));
        cr_assert_ok(ar_comm_barrier(f.c, f.q, "t"));
        cr_assert_ok(ar_queue_sync(f.q, 0));
        const void *const wanted = in, *const got[5] = {a, b, c, d, e};
        for (int i = 0; i < 5; i++)
            cr_assert_eq(memcmp(got[i], wanted, sizeof in), 0, "collective %d", i);
        uint64_t read = 1, written = 1;
        ar_comm_counted(f.c, &read, &written);
        cr_assert_eq(read + written, 0);
        cr_assert_eq(ari_comm_calls(f.c, "all_reduce"), 1);
        cr_assert_eq(ari_comm_calls(f.c, "barrier"), 1);
        cr_assert_eq(ari_comm_calls(f.c, "x"), 0);
        cr_assert_str_eq(ari_comm_error(f.c), "");
    }
}

Test(comm, a_group_of_one_finds_messages_that_do_not_meet)
{
    float a[4] = {0}, b[4] = {0};
    const size_t two[1] = {2}, three[1] = {3};
    for (int variant = 0; variant < 4; variant++) {
        SCOPED(end) fixture f = make(AR_QUEUE_INLINE);
        const ar_p2p ops[2] = {{0, true, {a}, 2}, {0, false, {b}, 3}};
        ar_status st;
        if (variant == 0)
            st = ar_comm_all_to_all(f.c, f.q, (ar_buf){a}, (ar_cbuf){b}, two, three, AR_F32, "t");
        else
            st = ar_comm_exchange(f.c, f.q, ops + (variant == 2), variant == 3 ? 2 : 1, AR_F32, "t");
        cr_assert_eq(st, AR_ERR_MISMATCH);
        cr_assert(strstr(ari_comm_error(f.c), "'t'"), "%s", ari_comm_error(f.c));
    }
}

Test(comm, a_group_split_from_one_shares_its_failure)
{
    fixture f = make(AR_QUEUE_INLINE);
    ar_comm *g = NULL, *none = f.c;
    cr_assert_ok(ar_comm_split(&g, f.c, 0, 0));
    cr_assert_ok(ar_comm_split(&none, f.c, -1, 0));
    cr_assert_null(none);
    ari_comm_abort(g, AR_ERR_IO, "disk");
    cr_assert_eq(ar_comm_barrier(f.c, f.q, "t"), AR_ERR_ABORTED);
    cr_assert_str_eq(ari_comm_error(f.c), "disk");
    cr_assert_eq(ar_comm_split(&none, f.c, 0, 0), AR_ERR_ABORTED);
    cr_assert_null(none);
    ar_comm_destroy(g);
    end(&f);
    ar_comm_destroy(NULL);
    ari_comm_abort(NULL, AR_OK, NULL);
}

Test(comm, arguments_are_checked_before_anything_moves)
{
    SCOPED(end) fixture f = make(AR_QUEUE_INLINE);
    float x[8] = {0};
    const ar_buf b = {x}, no = {NULL};
    const ar_cbuf in = {x}, other = {x + 2}, none = {NULL};
    const size_t two[1] = {2}, three[1] = {3}, huge[1] = {SIZE_MAX / 2};
    const ar_p2p far = {1, true, {x}, 1}, over[2] = {{0, false, {x}, 2}, {0, true, {x + 1}, 2}};
    ar_comm *g;
    cr_assert_refused(ar_comm_all_reduce(NULL, f.q, b, in, 1, AR_F32, AR_SUM, "t"), AR_ERR_ARG, "communicator");
    cr_assert_refused(ar_comm_all_reduce(f.c, NULL, b, in, 1, AR_F32, AR_SUM, "t"), AR_ERR_ARG, "queue");
    cr_assert_refused(ar_comm_all_reduce(f.c, f.q, b, in, 1, AR_U16, AR_SUM, "t"), AR_ERR_DTYPE,
                      "U16; F32, F64, BF16, F16, I64");
    cr_assert_refused(ar_comm_all_reduce(f.c, f.q, b, in, 1, AR_BOOL, AR_MAX, "t"), AR_ERR_DTYPE, "dtype BOOL");
    cr_assert_refused(ar_comm_all_reduce(f.c, f.q, b, in, 1, AR_F32, (ar_op)5, "t"), AR_ERR_ARG, "operation 5");
    cr_assert_refused(ar_comm_all_reduce(f.c, f.q, b, in, 1, AR_F32, (ar_op)-1, "t"), AR_ERR_ARG, "operation -1");
    cr_assert_refused(ar_comm_all_reduce(f.c, f.q, no, in, 1, AR_F32, AR_SUM, "t"), AR_ERR_ARG,
                      "output buffer is NULL");
    cr_assert_refused(ar_comm_all_reduce(f.c, f.q, b, none, 1, AR_F32, AR_SUM, "t"), AR_ERR_ARG,
                      "input buffer is NULL");
    cr_assert_refused(ar_comm_all_reduce(f.c, f.q, b, other, 3, AR_F32, AR_SUM, "t"), AR_ERR_ARG, "overlap");
    cr_assert_refused(ar_comm_all_reduce(f.c, f.q, b, in, SIZE_MAX / 2, AR_F32, AR_SUM, "t"), AR_ERR_OVERFLOW, "");
    cr_assert_refused(ar_comm_reduce_scatter(f.c, f.q, b, in, NULL, AR_F32, AR_SUM, "t"), AR_ERR_ARG,
                      "counts are missing");
    cr_assert_refused(ar_comm_reduce_scatter(f.c, f.q, b, other, three, AR_F32, AR_SUM, "t"), AR_ERR_ARG, "overlap");
    cr_assert_refused(ar_comm_all_gather(f.c, f.q, b, other, three, AR_F32, "t"), AR_ERR_ARG, "overlap");
    cr_assert_refused(ar_comm_all_gather(f.c, f.q, b, in, huge, AR_F64, "t"), AR_ERR_OVERFLOW, "");
    cr_assert_refused(ar_comm_all_to_all(f.c, f.q, b, in, two, two, AR_F32, "t"), AR_ERR_ARG, "overlap");
    cr_assert_refused(ar_comm_broadcast(f.c, f.q, b, 1, AR_F32, 1, "t"), AR_ERR_ARG, "root 1");
    cr_assert_refused(ar_comm_broadcast(f.c, f.q, b, 1, AR_F32, -1, "t"), AR_ERR_ARG, "root -1");
    cr_assert_refused(ar_comm_exchange(f.c, f.q, NULL, 1, AR_F32, "t"), AR_ERR_ARG, "missing");
    cr_assert_refused(ar_comm_exchange(f.c, f.q, &far, 1, AR_F32, "t"), AR_ERR_ARG, "peer 1");
    cr_assert_refused(ar_comm_exchange(f.c, f.q, over, 2, AR_F32, "t"), AR_ERR_ARG, "overlap");
    cr_assert_refused(ar_comm_barrier(NULL, f.q, "t"), AR_ERR_ARG, "communicator");
    cr_assert_refused(ar_comm_split(NULL, f.c, 0, 0), AR_ERR_ARG, "place");
    cr_assert_refused(ar_comm_split(&g, NULL, 0, 0), AR_ERR_ARG, "communicator");
    cr_assert_refused(ari_comm_self(NULL), AR_ERR_ARG, "place");
    /* Nothing in it: NULL is a buffer. */
    cr_assert_ok(ar_comm_all_reduce(f.c, f.q, no, none, 0, AR_F32, AR_SUM, "t"));
    cr_assert_eq(ari_comm_calls(f.c, "all_reduce"), 1);
}

/* --- a member of a larger group, whose communicator only notes what it is given ----------------------------------- */

typedef struct noting {
    ar_comm base;
    int runs, aborts;
    ari_call call;
    size_t counts[3];
} noting;

static ar_status note(ar_comm *c, const ari_call *call)
{
    noting *n = (noting *)c;
    n->runs++;
    n->call = *call;
    if (call->counts)
        memcpy(n->counts, call->counts, sizeof n->counts);
    return AR_OK;
}

static void note_abort(ar_comm *c, ar_status st, const char *why)
{
    (void)st, (void)why;
    ((noting *)c)->aborts++;
}

static const ari_comm_ops noting_ops = {.run = note, .abort = note_abort};

static ar_comm *member_of_three(noting *n, int rank)
{
    *n = (noting){.runs = 0};
    ari_comm_init(&n->base, &noting_ops, rank, 3);
    return &n->base;
}

Test(comm, calls_check_the_root_and_the_buffers_that_the_rank_has)
{
    noting n;
    ar_comm *c = member_of_three(&n, 1);
    SCOPED(end) fixture f = make(AR_QUEUE_INLINE);
    float x[16] = {0};
    const ar_buf b = {x}, no = {NULL};
    const ar_cbuf in = {x}, other = {x + 2}, none = {NULL};
    const size_t counts[3] = {1, 4, 2}, huge[3] = {SIZE_MAX / 2, SIZE_MAX / 2, 2};
    cr_assert_refused(ar_comm_broadcast(NULL, f.q, b, 1, AR_F32, 0, "t"), AR_ERR_ARG, "communicator");
    cr_assert_refused(ar_comm_broadcast(c, NULL, b, 1, AR_F32, 0, "t"), AR_ERR_ARG, "queue");
    cr_assert_refused(ar_comm_broadcast(c, f.q, b, 1, AR_C64, 0, "t"), AR_ERR_DTYPE, "C64");
    cr_assert_refused(ar_comm_broadcast(c, f.q, b, 1, AR_F32, 3, "t"), AR_ERR_ARG, "root 3; 0 to 2");
    cr_assert_refused(ar_comm_broadcast(c, f.q, b, 1, AR_F32, -1, "t"), AR_ERR_ARG, "root -1");
    cr_assert_refused(ar_comm_broadcast(c, f.q, b, SIZE_MAX / 2, AR_F32, 0, "t"), AR_ERR_OVERFLOW, "");
    cr_assert_refused(ar_comm_broadcast(c, f.q, no, 1, AR_F32, 0, "t"), AR_ERR_ARG, "only buffer is NULL");
    cr_assert_refused(ar_comm_all_reduce(c, f.q, b, in, 1, AR_I8, AR_SUM, "t"), AR_ERR_DTYPE, "I8");
    cr_assert_refused(ar_comm_all_reduce(c, f.q, b, in, 1, AR_F32, (ar_op)9, "t"), AR_ERR_ARG, "operation 9");
    cr_assert_refused(ar_comm_all_reduce(c, f.q, b, none, 1, AR_F32, AR_SUM, "t"), AR_ERR_ARG, "input buffer is NULL");
    cr_assert_refused(ar_comm_all_reduce(c, f.q, b, other, 3, AR_F32, AR_SUM, "t"), AR_ERR_ARG, "overlap");
    cr_assert_refused(ar_comm_all_gather(c, f.q, b, in, NULL, AR_F32, "t"), AR_ERR_ARG,
                      "counts are missing, 3 expected");
    cr_assert_refused(ar_comm_all_gather(c, f.q, b, in, huge, AR_F32, "t"), AR_ERR_OVERFLOW, "");
    cr_assert_refused(ar_comm_all_gather(c, f.q, b, none, counts, AR_F32, "t"), AR_ERR_ARG,
                      "input buffer is NULL, 16 bytes");
    cr_assert_refused(ar_comm_all_gather(c, f.q, no, in, counts, AR_F32, "t"), AR_ERR_ARG,
                      "output buffer is NULL, 28 bytes");
    cr_assert_refused(ar_comm_all_gather(c, f.q, b, other, counts, AR_F32, "t"), AR_ERR_ARG, "overlap");
    cr_assert_eq(n.runs, 0);
    cr_assert_eq(ari_comm_calls(c, "broadcast") + ari_comm_calls(c, "all_reduce") + ari_comm_calls(c, "all_gather"), 0);
}

Test(comm, sends_and_receives_check_their_peer_and_buffer)
{
    noting n;
    ar_comm *c = member_of_three(&n, 1);
    SCOPED(end) fixture f = make(AR_QUEUE_INLINE);
    float x[4] = {0};
    const ar_buf b = {x}, no = {NULL};
    cr_assert_refused(ar_comm_send(NULL, f.q, ar_const(b), 1, AR_F32, 0, "t"), AR_ERR_ARG, "communicator");
    cr_assert_refused(ar_comm_send(c, f.q, ar_const(b), 1, AR_U64, 0, "t"), AR_ERR_DTYPE, "U64");
    cr_assert_refused(ar_comm_send(c, f.q, ar_const(b), 1, AR_F32, 1, "t"), AR_ERR_ARG, "peer 1 is the rank itself");
    cr_assert_refused(ar_comm_send(c, f.q, ar_const(b), 1, AR_F32, 3, "t"), AR_ERR_ARG, "peer 3; 0 to 2");
    cr_assert_refused(ar_comm_send(c, f.q, ar_const(b), 1, AR_F32, -1, "t"), AR_ERR_ARG, "peer -1");
    cr_assert_refused(ar_comm_send(c, f.q, ar_const(no), 2, AR_F32, 0, "t"), AR_ERR_ARG,
                      "input buffer is NULL, 8 bytes");
    cr_assert_refused(ar_comm_send(c, f.q, ar_const(b), SIZE_MAX / 2, AR_F32, 0, "t"), AR_ERR_OVERFLOW, "");
    cr_assert_refused(ar_comm_recv(c, NULL, b, 1, AR_F32, 0, "t"), AR_ERR_ARG, "queue");
    cr_assert_refused(ar_comm_recv(c, f.q, b, 1, AR_F8_E5M2, 0, "t"), AR_ERR_DTYPE, "F8_E5M2");
    cr_assert_refused(ar_comm_recv(c, f.q, b, 1, AR_F32, 1, "t"), AR_ERR_ARG, "peer 1 is the rank itself");
    cr_assert_refused(ar_comm_recv(c, f.q, b, 1, AR_F32, 3, "t"), AR_ERR_ARG, "peer 3");
    cr_assert_refused(ar_comm_recv(c, f.q, no, 2, AR_F32, 0, "t"), AR_ERR_ARG, "output buffer is NULL, 8 bytes");
    cr_assert_refused(ar_comm_recv(c, f.q, b, SIZE_MAX / 2, AR_F32, 0, "t"), AR_ERR_OVERFLOW, "");
    cr_assert_eq(n.runs, 0);
    cr_assert_ok(ar_comm_send(c, f.q, ar_const(no), 0, AR_F32, 0, "t"));
    cr_assert_ok(ar_comm_recv(c, f.q, no, 0, AR_F32, 2, "t"));
    cr_assert_eq(ari_comm_calls(c, "send"), 1);
    cr_assert_eq(ari_comm_calls(c, "recv"), 1);
}

Test(comm, a_queue_hands_over_what_was_given_though_its_counts_are_gone)
{
    for (int kind = 0; kind < 2; kind++) {
        noting n;
        ar_comm *c = member_of_three(&n, 1);
        SCOPED(end) fixture f = make((ar_queue_kind)kind);
        float x[8] = {0}, y[8] = {0};
        size_t counts[3] = {1, 4, 2};
        cr_assert_ok(ar_comm_all_reduce(c, f.q, (ar_buf){y}, (ar_cbuf){x}, 7, AR_F16, AR_MIN, "a"));
        cr_assert_ok(ar_queue_sync(f.q, 0));
        cr_assert(n.call.kind == ARI_ALL_REDUCE && n.call.dtype == AR_F16 && n.call.op == AR_MIN);
        cr_assert(n.call.count == 7 && n.call.out.ptr == y && n.call.input.ptr == x && strcmp(n.call.tag, "a") == 0);
        cr_assert_ok(ar_comm_broadcast(c, f.q, (ar_buf){y}, 7, AR_I32, 2, "b"));
        cr_assert_ok(ar_queue_sync(f.q, 0));
        cr_assert(n.call.kind == ARI_BROADCAST && n.call.dtype == AR_I32 && n.call.root == 2 && n.call.input.ptr == y);
        cr_assert_ok(ar_comm_all_gather(c, f.q, (ar_buf){y}, (ar_cbuf){x}, counts, AR_U8, "c"));
        memset(counts, 0, sizeof counts);
        cr_assert_ok(ar_queue_sync(f.q, 0));
        cr_assert(n.call.kind == ARI_ALL_GATHER && n.call.dtype == AR_U8 && n.call.out.ptr == y);
        cr_assert(n.counts[0] == 1 && n.counts[1] == 4 && n.counts[2] == 2);
        cr_assert_ok(ar_comm_send(c, f.q, (ar_cbuf){x}, 3, AR_BF16, 2, NULL));
        cr_assert_ok(ar_queue_sync(f.q, 0));
        cr_assert(n.call.kind == ARI_SEND && n.call.dtype == AR_BF16 && n.call.peer == 2 && n.call.count == 3);
        cr_assert(n.call.input.ptr == x && strcmp(n.call.tag, "") == 0);
        cr_assert_ok(ar_comm_recv(c, f.q, (ar_buf){y}, 4, AR_F64, 0, "e"));
        cr_assert_ok(ar_queue_sync(f.q, 0));
        cr_assert(n.call.kind == ARI_RECV && n.call.dtype == AR_F64 && n.call.peer == 0 && n.call.count == 4);
        cr_assert(n.call.out.ptr == y && n.runs == 5);
    }
}

static ar_status fail(void *arg)
{
    (void)arg;
    return ar_error_set(AR_ERR_IO, "disk");
}

Test(comm, a_queue_that_has_failed_aborts_for_the_peers_that_wait)
{
    for (int kind = 0; kind < 2; kind++) {
        noting n;
        ar_comm *c = member_of_three(&n, 1);
        SCOPED(end) fixture f = make((ar_queue_kind)kind);
        const ar_status st = ar_queue_host(f.q, fail, NULL);
        cr_assert_eq(st, kind == AR_QUEUE_INLINE ? AR_ERR_IO : AR_OK);
        cr_assert_eq(ar_queue_sync(f.q, 0), AR_ERR_IO);
        cr_assert_refused(ar_comm_barrier(c, f.q, "t"), AR_ERR_IO, "disk");
        cr_assert(n.runs == 0 && n.aborts == 1 && ari_comm_calls(c, "barrier") == 0);
        cr_assert_refused(ar_comm_send(c, f.q, (ar_cbuf){NULL}, 0, AR_F32, 1, "t"), AR_ERR_ARG, "the rank itself");
        cr_assert_eq(n.aborts, 1, "a call that is refused never was one");
    }
}
