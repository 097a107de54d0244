/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <string.h>

#include "anyrank/comm.h"

/* The public boundary (arguments, slices) and the group of one. */
TestSuite(comm, .timeout = 30);

typedef struct fixture {
    ar_comm *c;
    ar_queue *q;
} fixture;

static fixture make(ar_queue_kind kind)
{
    fixture f = {NULL, NULL};
    cr_assert_eq(ar_comm_self(&f.c), AR_OK);
    cr_assert_eq(ar_queue_create(&f.q, kind, "test"), AR_OK);
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
                ar_comm_slice(count, n, c, &start, &size);
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
        fixture f = make((ar_queue_kind)kind);
        const float in[3] = {1, 2, 3};
        float a[3] = {0}, b[3] = {0}, c[3] = {0}, d[3] = {0}, e[3] = {0};
        const size_t three[1] = {3};
        const ar_cbuf from = {in};
        cr_assert_eq(ar_comm_rank(f.c), 0);
        cr_assert_eq(ar_comm_size(f.c), 1);
        cr_assert_eq(ar_comm_all_reduce(f.c, f.q, (ar_buf){a}, from, 3, AR_F32, AR_SUM, "t"), AR_OK);
        cr_assert_eq(ar_comm_reduce_scatter(f.c, f.q, (ar_buf){b}, from, three, AR_F32, AR_SUM, "t"), AR_OK);
        cr_assert_eq(ar_comm_all_gather(f.c, f.q, (ar_buf){c}, from, three, AR_F32, NULL), AR_OK);
        cr_assert_eq(ar_comm_all_to_all(f.c, f.q, (ar_buf){d}, from, three, three, AR_F32, "t"), AR_OK);
        cr_assert_eq(ar_comm_broadcast(f.c, f.q, (ar_buf){d}, 3, AR_F32, 0, "t"), AR_OK);
        float out[3] = {1, 2, 3};
        const ar_p2p ops[2] = {{0, false, {e}, 3}, {0, true, {out}, 3}};
        cr_assert_eq(ar_comm_exchange(f.c, f.q, ops, 2, AR_F32, "t"), AR_OK);
        cr_assert_eq(ar_comm_barrier(f.c, f.q, "t"), AR_OK);
        cr_assert_eq(ar_queue_sync(f.q, 0), AR_OK);
        const void *const wanted = in, *const got[5] = {a, b, c, d, e};
        for (int i = 0; i < 5; i++)
            cr_assert_eq(memcmp(got[i], wanted, sizeof in), 0, "collective %d", i);
        uint64_t read = 1, written = 1;
        ar_comm_counted(f.c, &read, &written);
        cr_assert_eq(read + written, 0);
        cr_assert_eq(ar_comm_calls(f.c, "all_reduce"), 1);
        cr_assert_eq(ar_comm_calls(f.c, "barrier"), 1);
        cr_assert_eq(ar_comm_calls(f.c, "x"), 0);
        cr_assert_str_eq(ar_comm_error(f.c), "");
        end(&f);
    }
}

Test(comm, a_group_of_one_finds_messages_that_do_not_meet)
{
    float a[4] = {0}, b[4] = {0};
    const size_t two[1] = {2}, three[1] = {3};
    for (int variant = 0; variant < 4; variant++) {
        fixture f = make(AR_QUEUE_INLINE);
        const ar_p2p ops[2] = {{0, true, {a}, 2}, {0, false, {b}, 3}};
        ar_status st;
        if (variant == 0)
            st = ar_comm_all_to_all(f.c, f.q, (ar_buf){a}, (ar_cbuf){b}, two, three, AR_F32, "t");
        else
            st = ar_comm_exchange(f.c, f.q, ops + (variant == 2), variant == 3 ? 2 : 1, AR_F32, "t");
        cr_assert_eq(st, AR_ERR_MISMATCH);
        cr_assert(strstr(ar_comm_error(f.c), "'t'"), "%s", ar_comm_error(f.c));
        end(&f);
    }
}

Test(comm, a_group_split_from_one_shares_its_failure)
{
    fixture f = make(AR_QUEUE_INLINE);
    ar_comm *g = NULL, *none = f.c;
    cr_assert_eq(ar_comm_split(&g, f.c, 0, 0), AR_OK);
    cr_assert_eq(ar_comm_split(&none, f.c, -1, 0), AR_OK);
    cr_assert_null(none);
    ar_comm_abort(g, AR_ERR_IO, "disk");
    cr_assert_eq(ar_comm_barrier(f.c, f.q, "t"), AR_ERR_ABORTED);
    cr_assert_str_eq(ar_comm_error(f.c), "disk");
    cr_assert_eq(ar_comm_split(&none, f.c, 0, 0), AR_ERR_ABORTED);
    cr_assert_null(none);
    ar_comm_destroy(g);
    end(&f);
    ar_comm_destroy(NULL);
    ar_comm_abort(NULL, AR_OK, NULL);
}

static void refused(ar_status st, ar_status want, const char *text)
{
    cr_assert_eq(st, want, "%s expected (%s), got %s: %s", ar_status_name(want), text, ar_status_name(st),
                 ar_error_message());
    cr_assert(strstr(ar_error_message(), text), "'%s' is not in: %s", text, ar_error_message());
}

Test(comm, arguments_are_checked_before_anything_moves)
{
    fixture f = make(AR_QUEUE_INLINE);
    float x[8] = {0};
    const ar_buf b = {x}, no = {NULL};
    const ar_cbuf in = {x}, other = {x + 2}, none = {NULL};
    const size_t two[1] = {2}, huge[1] = {SIZE_MAX / 2};
    const ar_p2p far = {1, true, {x}, 1}, over[2] = {{0, false, {x}, 2}, {0, true, {x + 1}, 2}};
    ar_comm *g;
    refused(ar_comm_all_reduce(NULL, f.q, b, in, 1, AR_F32, AR_SUM, "t"), AR_ERR_ARG, "communicator");
    refused(ar_comm_all_reduce(f.c, NULL, b, in, 1, AR_F32, AR_SUM, "t"), AR_ERR_ARG, "queue");
    refused(ar_comm_all_reduce(f.c, f.q, b, in, 1, AR_BF16, AR_SUM, "t"), AR_ERR_DTYPE, "BF16");
    refused(ar_comm_all_reduce(f.c, f.q, b, in, 1, AR_F32, AR_MAX, "t"), AR_ERR_DTYPE, "max of F32");
    refused(ar_comm_all_reduce(f.c, f.q, b, in, 1, AR_F64, AR_MIN, "t"), AR_ERR_DTYPE, "min of F64");
    refused(ar_comm_all_reduce(f.c, f.q, b, in, 1, AR_F32, (ar_op)5, "t"), AR_ERR_ARG, "operation 5");
    refused(ar_comm_all_reduce(f.c, f.q, no, in, 1, AR_F32, AR_SUM, "t"), AR_ERR_ARG, "output buffer is NULL");
    refused(ar_comm_all_reduce(f.c, f.q, b, none, 1, AR_F32, AR_SUM, "t"), AR_ERR_ARG, "input buffer is NULL");
    refused(ar_comm_all_reduce(f.c, f.q, b, other, 3, AR_F32, AR_SUM, "t"), AR_ERR_ARG, "overlap");
    refused(ar_comm_all_reduce(f.c, f.q, b, in, SIZE_MAX / 2, AR_F32, AR_SUM, "t"), AR_ERR_OVERFLOW, "");
    refused(ar_comm_reduce_scatter(f.c, f.q, b, in, NULL, AR_F32, AR_SUM, "t"), AR_ERR_ARG, "counts are missing");
    refused(ar_comm_reduce_scatter(f.c, f.q, b, other, (const size_t[1]){3}, AR_F32, AR_SUM, "t"), AR_ERR_ARG,
            "overlap");
    refused(ar_comm_all_gather(f.c, f.q, b, other, (const size_t[1]){3}, AR_F32, "t"), AR_ERR_ARG, "overlap");
    refused(ar_comm_all_gather(f.c, f.q, b, in, huge, AR_F64, "t"), AR_ERR_OVERFLOW, "");
    refused(ar_comm_all_to_all(f.c, f.q, b, in, two, two, AR_F32, "t"), AR_ERR_ARG, "overlap");
    refused(ar_comm_broadcast(f.c, f.q, b, 1, AR_F32, 1, "t"), AR_ERR_ARG, "root 1");
    refused(ar_comm_broadcast(f.c, f.q, b, 1, AR_F32, -1, "t"), AR_ERR_ARG, "root -1");
    refused(ar_comm_exchange(f.c, f.q, NULL, 1, AR_F32, "t"), AR_ERR_ARG, "missing");
    refused(ar_comm_exchange(f.c, f.q, &far, 1, AR_F32, "t"), AR_ERR_ARG, "peer 1");
    refused(ar_comm_exchange(f.c, f.q, over, 2, AR_F32, "t"), AR_ERR_ARG, "overlap");
    refused(ar_comm_barrier(NULL, f.q, "t"), AR_ERR_ARG, "communicator");
    refused(ar_comm_split(NULL, f.c, 0, 0), AR_ERR_ARG, "place");
    refused(ar_comm_split(&g, NULL, 0, 0), AR_ERR_ARG, "communicator");
    refused(ar_comm_self(NULL), AR_ERR_ARG, "place");
    /* Nothing in it: NULL is a buffer. */
    cr_assert_eq(ar_comm_all_reduce(f.c, f.q, no, none, 0, AR_F32, AR_SUM, "t"), AR_OK);
    cr_assert_eq(ar_comm_calls(f.c, "all_reduce"), 1);
    end(&f);
}
