/* SPDX-License-Identifier: Apache-2.0 */
#include <stdatomic.h>

#include "anyrank/queue.h"
#include "gpu/device_private.h"
#include "tests/sim/batch.h"
#include "tests/support/small.h"
#include "tests/support/test.h"

/* Collectives whose buffers are the emulated device's memory, which kills whoever touches it from the host; where its
 * streams do their work late, a wait that is missing shows. */
typedef enum where { EMULATED, LATE } where;

/* Devices that are made from here on, while there is none. Before there are threads. */
static void choose(where w)
{
    OWNED(ar_device_destroy) ar_device *d = NULL;
    setenv("ANYRANK_EMULATED_STREAMS", w == LATE ? "latest:7" : "eager", 1);
    if (ari_device_emulated_create(&d) != AR_OK)
        cr_skip("this build has no emulated device");
}

/* A device's table, whose copy number `fails_at` fails. */
typedef struct failing {
    ar_device_ops ops; /* first: a device's table is found at the same address */
    const ar_device_ops *real;
    int fails_at;
    atomic_int calls;
} failing;

static ar_status copy_or_fail(ar_device *d, ar_queue *q, ar_buf to, ar_cbuf from, size_t bytes)
{
    failing *f = (failing *)(uintptr_t)d->ops;
    const int call = atomic_fetch_add(&f->calls, 1) + 1;
    return call == f->fails_at ? ar_error_set(AR_ERR_DEVICE, "the device fails in copy %d", call)
                               : f->real->copy(d, q, to, from, bytes);
}

typedef struct device_batch {
    batch b;
    where w;
    int fails_at, fails_on; /* the device of rank fails_on */
} device_batch;

/* All calls one after the other; the host looks when all are done. */
static ar_status run_cases(const batch *b, ar_comm *c, ar_device *d, ar_queue *q, ar_queue *inline_queue)
{
    const int r = ar_comm_rank(c);
    OWNED(free) placed *p = calloc(b->n, sizeof *p);
    ar_status st = AR_OK;
    for (size_t i = 0; i < b->n && st == AR_OK; i++)
        st = place(&p[i], &b->k[i], r, d, inline_queue);
    if (st == AR_OK && q != inline_queue)
        st = ar_queue_sync(inline_queue, 0);
    for (size_t i = 0; i < b->n && st == AR_OK; i++)
        st = case_call(&p[i].k, c, q, "case");
    if (st == AR_OK && q != inline_queue)
        st = ar_queue_sync(q, 0);
    for (size_t i = 0; i < b->n && st == AR_OK; i++)
        st = fetch(&p[i], &b->k[i], r, d, inline_queue);
    if (st == AR_OK)
        st = ar_queue_sync(inline_queue, 0);
    for (size_t i = 0; i < b->n; i++)
        take_away(&p[i], d, inline_queue);
    return st;
}

static ar_status run_on_device(ar_comm *c, void *arg)
{
    device_batch *b = arg;
    const int r = ar_comm_rank(c);
    OWNED(ar_device_destroy) ar_device *d = NULL;
    ar_queue *own = NULL, *q = NULL;
    AR_TRY(ari_device_emulated_create(&d));
    failing own_table = {.ops = *d->ops, .real = d->ops, .fails_at = r == b->fails_on ? b->fails_at : 0};
    own_table.ops.copy = copy_or_fail;
    atomic_init(&own_table.calls, 0);
    d->ops = &own_table.ops;
    ar_status st = d->ops->queue_create(d, &own, AR_QUEUE_INLINE, "own");
    if (st == AR_OK && b->b.queue == AR_QUEUE_THREAD)
        st = d->ops->queue_create(d, &q, AR_QUEUE_THREAD, "thread");
    if (st == AR_OK)
        st = run_cases(&b->b, c, d, q ? q : own, own);
    ar_queue_destroy(q);
    ar_queue_destroy(own);
    d->ops = own_table.real;
    return st;
}

static void fini(device_batch *b)
{
    end_batch(&b->b);
    free(b->b.k);
}

static void run_and_check(device_batch *b, int n, const ar_sim_options *o)
{
    char why[256] = "";
    reset_batch(&b->b);
    choose(b->w);
    cr_assert_eq(ar_sim_run(n, o, run_on_device, b, NULL), AR_OK, "n %d: %s", n, ar_error_message());
    for (size_t i = 0; i < b->b.n; i++)
        cr_assert(case_holds(&b->b.k[i], why, sizeof why), "%s, algorithm %d: %s", b->w == LATE ? "late" : "emulated",
                  (int)o->algorithm, why);
}

/* Every kind, of a count or of uneven and empty parts, in place and not; types and operations take turns. */
static void make_cases(device_batch *d, int n, size_t count, unsigned turn)
{
    batch *b = &d->b;
    b->k = calloc((size_t)CASE_KINDS * 2 * PLAIN_OPS, sizeof *b->k);
    b->n = 0;
    for (int i = 0; i < CASE_KINDS * 2 * PLAIN_OPS; i++) {
        coll_case k = {.kind = (case_kind)(i / 2 % CASE_KINDS), .in_place = i % 2, .n = n, .count = count};
        const bool reduces = k.kind == ALL_REDUCE || k.kind == REDUCE_SCATTER;
        const int op = i / (2 * CASE_KINDS);
        if (!reduces && op > 0)
            continue;
        k.op = reduces ? (ar_op)op : AR_SUM;
        k.dtype = plain_dtypes[(turn + (unsigned)i) % PLAIN_DTYPES];
        k.root = (int)((turn + (unsigned)i) % (unsigned)n);
        for (int r = 0; r < n; r++) {
            k.counts[r] = r % 3 == 1 ? 0 : count / (size_t)(r + 1) + (size_t)r;
            for (int p = 0; p < n; p++)
                k.sends[r][p] = k.kind < ALL_TO_ALL || (r + 2 * p) % 5 == 3 ? 0 : (count + (size_t)(3 * r + p)) % 97;
        }
        if (k.kind == BARRIER)
            memset(k.counts, 0, sizeof k.counts);
        case_init(&k, turn * 131 + (unsigned)i);
        b->k[b->n++] = k;
    }
}

static void check_kinds(where w, ar_queue_kind queue, const ar_sim_options *o)
{
    static const size_t counts[] = {0, 1, 3, 701};
    const int most = small_only() ? 3 : 5;
    for (int n = 1; n <= most; n++) {
        for (unsigned c = 0; c < sizeof counts / sizeof *counts; c++) {
            SCOPED(fini) device_batch b = {.b.queue = queue, .w = w};
            make_cases(&b, n, counts[c], (unsigned)n * 5 + c);
            run_and_check(&b, n, o);
        }
    }
}

Test(on_device, every_collective_has_the_bits_of_its_definition)
{
    static const ar_sim_algorithm algorithms[] = {AR_SIM_AUTO, AR_SIM_DIRECT, AR_SIM_RING, AR_SIM_LAST};
    for (size_t a = 0; a < sizeof algorithms / sizeof *algorithms; a++)
        check_kinds(EMULATED, AR_QUEUE_INLINE, &(ar_sim_options){.algorithm = algorithms[a]});
}

Test(on_device, streams_that_are_late_change_nothing)
{
    check_kinds(LATE, AR_QUEUE_INLINE, &(ar_sim_options){.algorithm = AR_SIM_DIRECT});
    check_kinds(LATE, AR_QUEUE_THREAD, &(ar_sim_options){.algorithm = AR_SIM_DIRECT});
}

Test(on_device, verified_transfers_have_the_same_bits)
{
    check_kinds(EMULATED, AR_QUEUE_INLINE, &(ar_sim_options){.verify_transfers = true});
    check_kinds(LATE, AR_QUEUE_INLINE, &(ar_sim_options){.algorithm = AR_SIM_RING, .verify_transfers = true});
}

enum { ROUNDS = 40, RANKS = 3, ELEMENTS = 64 };

typedef struct rounds {
    int32_t gathered[RANKS][ROUNDS][RANKS * ELEMENTS], summed[RANKS][ROUNDS][ELEMENTS];
} rounds;

static int32_t value_of(int round, int rank, int i)
{
    return round * 1000 + rank * 100 + i;
}

/* The inputs of a round are overwritten as soon as it is enqueued, and so are its outputs once they are copied. */
static ar_status run_rounds(ar_comm *c, void *arg)
{
    rounds *all = arg;
    const int r = ar_comm_rank(c);
    static const size_t counts[RANKS] = {ELEMENTS, ELEMENTS, ELEMENTS};
    OWNED(ar_device_destroy) ar_device *d = NULL;
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    ar_buf x, y, sum;
    AR_TRY(ari_device_emulated_create(&d));
    AR_TRY(d->ops->queue_create(d, &q, AR_QUEUE_INLINE, "q"));
    AR_TRY(d->ops->alloc(d, q, &x, ELEMENTS * sizeof(int32_t)));
    AR_TRY(d->ops->alloc(d, q, &y, RANKS * ELEMENTS * sizeof(int32_t)));
    AR_TRY(d->ops->alloc(d, q, &sum, ELEMENTS * sizeof(int32_t)));
    for (int k = 0; k < ROUNDS; k++) {
        int32_t values[ELEMENTS];
        for (int i = 0; i < ELEMENTS; i++)
            values[i] = value_of(k, r, i);
        AR_TRY(d->ops->copy(d, q, x, (ar_cbuf){values}, sizeof values));
        AR_TRY(d->ops->copy(d, q, sum, (ar_cbuf){values}, sizeof values));
        AR_TRY(ar_comm_all_gather(c, q, y, ar_const(x), counts, AR_I32, "x"));
        AR_TRY(d->ops->zero(d, q, x, sizeof values));
        AR_TRY(ar_comm_all_reduce(c, q, sum, ar_const(sum), ELEMENTS, AR_I32, AR_SUM, "sum"));
        AR_TRY(d->ops->copy(d, q, (ar_buf){all->gathered[r][k]}, ar_const(y), sizeof all->gathered[r][k]));
        AR_TRY(d->ops->copy(d, q, (ar_buf){all->summed[r][k]}, ar_const(sum), sizeof all->summed[r][k]));
        AR_TRY(d->ops->zero(d, q, y, sizeof all->gathered[r][k]));
        AR_TRY(d->ops->zero(d, q, sum, sizeof values));
    }
    AR_TRY(ar_queue_sync(q, 0));
    d->ops->free(d, q, x);
    d->ops->free(d, q, y);
    d->ops->free(d, q, sum);
    return AR_OK;
}

Test(on_device, what_follows_a_collective_waits_for_all_ranks_parts_of_it)
{
    OWNED(free) rounds *all = calloc(1, sizeof *all);
    choose(LATE);
    cr_assert_ok(ar_sim_run(RANKS, NULL, run_rounds, all, NULL));
    for (int k = 0; k < ROUNDS; k++) {
        for (int r = 0; r < RANKS; r++) {
            for (int i = 0; i < RANKS * ELEMENTS; i++)
                cr_assert_eq(all->gathered[r][k][i], value_of(k, i / ELEMENTS, i % ELEMENTS), "round %d rank %d: %d", k,
                             r, i);
            for (int i = 0; i < ELEMENTS; i++)
                cr_assert_eq(all->summed[r][k][i], value_of(k, 0, i) + value_of(k, 1, i) + value_of(k, 2, i),
                             "round %d rank %d: %d", k, r, i);
        }
    }
}

/* --- what goes wrong ---------------------------------------------------------------------------------------------- */

static ar_status message_or_mixed(ar_comm *c, void *arg)
{
    const bool message = *(const bool *)arg;
    const int r = ar_comm_rank(c);
    OWNED(ar_device_destroy) ar_device *d = NULL;
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    ar_buf x = {NULL};
    int32_t own[4] = {0};
    AR_TRY(ari_device_emulated_create(&d));
    ar_status st =
        r == 1 ? d->ops->queue_create(d, &q, AR_QUEUE_INLINE, "q") : ar_queue_create(&q, AR_QUEUE_INLINE, "host");
    if (st == AR_OK && r == 1)
        st = d->ops->alloc(d, q, &x, sizeof own);
    const ar_buf at = r == 1 ? x : (ar_buf){own};
    if (st == AR_OK && !message)
        st = ar_comm_all_reduce(c, q, at, ar_const(at), 4, AR_I32, AR_SUM, "x");
    else if (st == AR_OK && r == 0)
        st = ar_comm_send(c, q, ar_const(at), 4, AR_I32, 1, "x");
    else if (st == AR_OK)
        st = ar_comm_recv(c, q, at, 4, AR_I32, 0, "x");
    if (x.ptr)
        d->ops->free(d, q, x);
    return st;
}

Test(on_device, ranks_whose_data_lie_in_different_memories_disagree)
{
    bool message = false;
    choose(LATE);
    cr_assert_refused(ar_sim_run(2, NULL, message_or_mixed, &message, NULL), AR_ERR_MISMATCH,
                      "ranks 0 and 1 disagree in collective #1");
    cr_assert_says("data in memory of 'host' against 'emulated'");
    message = true;
    cr_assert_refused(ar_sim_run(2, NULL, message_or_mixed, &message, NULL), AR_ERR_MISMATCH, "disagree in message #1");
    cr_assert_says("data in memory of 'host' against 'emulated'");
}

Test(on_device, a_device_that_fails_ends_the_world_and_names_its_rank)
{
    const ar_sim_options o = {.timeout_ns = 2000000000};
    choose(LATE);
    for (int at = 1; at <= 4; at++) {
        SCOPED(fini) device_batch b = {.w = LATE, .fails_on = 2, .fails_at = 100 + at};
        make_cases(&b, 4, 701, 3);
        cr_assert_refused(ar_sim_run(4, &o, run_on_device, &b, NULL), AR_ERR_DEVICE, "rank 2 ");
        cr_assert_says("the device fails in copy");
    }
}

/* One of each fault, where it strikes on the host too: the same words. */
Test(on_device, faults_of_the_transport_strike_as_on_the_host)
{
    static const ar_sim_fault faults[] = {
        {.kind = AR_SIM_CORRUPT, .rank = 0, .collective = 3, .transfer = 0, .bit = 65},
        {.kind = AR_SIM_DROP, .rank = 2, .collective = 5},
        {.kind = AR_SIM_DUPLICATE, .rank = 1, .collective = 5},
        {.kind = AR_SIM_KILL, .rank = 1, .collective = 5, .transfer = 1},
        {.kind = AR_SIM_KILL, .rank = 2, .collective = 4},
    };
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        const ar_sim_options o = {
            .algorithm = AR_SIM_DIRECT, .verify_transfers = true, .faults = &faults[i], .fault_count = 1};
        SCOPED(fini) device_batch b = {.w = LATE};
        char host[512], device[512];
        choose(b.w);
        make_cases(&b, 3, 701, 7);
        const ar_status on_host = ar_sim_run(3, &o, run_batch, &b.b, NULL);
        snprintf(host, sizeof host, "%.*s", (int)strcspn(ar_error_message(), "\n"), ar_error_message());
        reset_batch(&b.b);
        const ar_status on_device = ar_sim_run(3, &o, run_on_device, &b, NULL);
        snprintf(device, sizeof device, "%.*s", (int)strcspn(ar_error_message(), "\n"), ar_error_message());
        cr_assert_neq(on_host, AR_OK, "fault %zu does not strike", i);
        cr_assert_eq(on_device, on_host);
        cr_assert_str_eq(device, host);
    }
}

Test(on_device, an_output_is_left_as_on_the_host_where_a_transfer_never_arrives)
{
    const ar_sim_fault lost = {.kind = AR_SIM_DROP, .rank = 2, .collective = 5}; /* an all_gather */
    const ar_sim_options o = {.algorithm = AR_SIM_DIRECT, .faults = &lost, .fault_count = 1};
    SCOPED(fini) device_batch b = {.w = LATE};
    unsigned char *left[3];
    char why[256] = "";
    choose(b.w);
    make_cases(&b, 3, 701, 7);
    coll_case *k = &b.b.k[4];
    cr_assert_ok(ar_sim_run(3, &o, run_batch, &b.b, NULL));
    cr_assert(k->kind == ALL_GATHER && !case_holds(k, why, sizeof why), "the fault does not strike");
    for (int r = 0; r < 3; r++) {
        left[r] = malloc(k->store_bytes[r]);
        memcpy(left[r], k->store[r], k->store_bytes[r]);
    }
    reset_batch(&b.b);
    cr_assert_ok(ar_sim_run(3, &o, run_on_device, &b, NULL));
    for (int r = 0; r < 3; r++) {
        cr_assert_eq(memcmp(k->store[r], left[r], k->store_bytes[r]), 0, "rank %d", r);
        free(left[r]);
    }
}
