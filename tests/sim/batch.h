/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/comm.h"
#include "anyrank/device.h"
#include "anyrank/queue.h"
#include "tests/sim/plain.h"
#include "tests/support/scoped.h"

/* Cases of plain.h as every transport's tests run them: drawn at random, one after the other, on the host or in a
 * device's memory, and the bytes that they move. */

static inline uint64_t draw(uint64_t *state, uint64_t below)
{
    *state = plain_hash(*state);
    return *state % below;
}

/* A case of n ranks without memory; its parts have up to twice the share of `size` elements, some none. */
static inline void draw_case(coll_case *k, uint64_t *rng, int n, size_t size)
{
    const size_t share = size / (size_t)n + 1;
    *k = (coll_case){.kind = (case_kind)draw(rng, CASE_KINDS), .dtype = plain_dtypes[draw(rng, PLAIN_DTYPES)], .n = n};
    k->op = (ar_op)draw(rng, PLAIN_OPS);
    k->root = (int)draw(rng, (uint64_t)n);
    k->in_place = draw(rng, 2) != 0;
    k->special = draw(rng, 4) == 0;
    k->count = size;
    const bool equal = draw(rng, 3) == 0;
    for (int p = 0; p < n; p++) {
        k->counts[p] = equal ? size / (size_t)n : draw(rng, 4) == 0 ? 0 : (size_t)draw(rng, 2 * share);
        for (int q = 0; q < n; q++)
            k->sends[p][q] = draw(rng, 4) == 0 ? 0 : (size_t)draw(rng, share);
    }
}

/* Of other ranks' memory, read and written by one rank. */
typedef struct moved {
    uint64_t read, written;
} moved;

static inline size_t slice_of(const coll_case *k, int r)
{
    return k->count / (size_t)k->n + ((size_t)r < k->count % (size_t)k->n ? 1 : 0);
}

static inline size_t received(const coll_case *k, int r)
{
    size_t sum = 0;
    for (int p = 0; p < k->n; p++)
        sum += p == r ? 0 : k->sends[p][r];
    return sum;
}

/* In elements, where each rank reads what it needs. */
static inline moved direct_form(const coll_case *k, int r)
{
    const size_t others = (size_t)k->n - 1, whole = plain_before(k->counts, k->n);
    switch (k->kind) {
    case ALL_REDUCE:
        return (moved){others * slice_of(k, r), others * slice_of(k, r)};
    case REDUCE_SCATTER:
        return (moved){others * k->counts[r], 0};
    case ALL_GATHER:
        return (moved){whole - k->counts[r], 0};
    case BROADCAST:
        return (moved){r == k->root ? 0 : k->count, 0};
    case BARRIER:
        return (moved){0, 0};
    case EXCHANGE:
        return (moved){2 * received(k, r), 0};
    default:
        return (moved){received(k, r), 0};
    }
}

/* Round a ring: all but one chunk in each round, all but the first of a chain; the rest as direct. */
static inline moved ring_form(const coll_case *k, int r)
{
    const size_t whole = plain_before(k->counts, k->n);
    const int left = (r + k->n - 1) % k->n;
    if (k->kind == ALL_REDUCE)
        return (moved){2 * k->count - slice_of(k, left) - slice_of(k, r), 0};
    if (k->kind == REDUCE_SCATTER)
        return (moved){whole - k->counts[left], 0};
    return direct_form(k, r);
}

typedef struct batch {
    coll_case *k;
    size_t n;
    ar_queue_kind queue;
    moved moved[PLAIN_RANKS];
} batch;

/* All cases one after the other on one queue. */
static inline ar_status run_batch(ar_comm *c, void *arg)
{
    batch *b = arg;
    moved *m = &b->moved[ar_comm_rank(c)];
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    AR_TRY(ar_queue_create(&q, b->queue, "test"));
    ar_status st = AR_OK;
    for (size_t i = 0; i < b->n && st == AR_OK; i++)
        st = case_call(&b->k[i], c, q, "case");
    if (st == AR_OK)
        st = ar_queue_sync(q, 0);
    ar_comm_counted(c, &m->read, &m->written);
    return st;
}

static inline void reset_batch(const batch *b)
{
    for (size_t i = 0; i < b->n; i++) {
        for (int r = 0; r < b->k[i].n; r++)
            case_reset(&b->k[i], r);
    }
}

static inline void end_batch(batch *b)
{
    for (size_t i = 0; i < b->n; i++)
        case_fini(&b->k[i]);
    b->n = 0;
}

typedef struct placed {
    coll_case k; /* with rank r's buffers on the device */
    ar_buf store, in;
} placed;

/* Without a device the case stays where it is. */
static inline ar_status place(placed *p, const coll_case *k, int r, ar_device *d, ar_queue *q)
{
    *p = (placed){.k = *k};
    if (!d)
        return AR_OK;
    AR_TRY(d->ops->alloc(d, q, &p->store, k->store_bytes[r]));
    AR_TRY(d->ops->copy(d, q, p->store, (ar_cbuf){k->store[r]}, k->store_bytes[r]));
    p->k.out[r] = (unsigned char *)p->store.ptr + (k->out[r] - k->store[r]);
    if (case_shares(k)) {
        p->k.in[r] = (unsigned char *)p->store.ptr + (k->in[r] - k->store[r]);
        return AR_OK;
    }
    AR_TRY(d->ops->alloc(d, q, &p->in, k->in_bytes[r] + 1));
    p->k.in[r] = p->in.ptr;
    return d->ops->copy(d, q, p->in, (ar_cbuf){k->in[r]}, k->in_bytes[r]);
}

static inline ar_status fetch(const placed *p, const coll_case *k, int r, ar_device *d, ar_queue *q)
{
    if (d)
        AR_TRY(d->ops->copy(d, q, (ar_buf){k->store[r]}, ar_const(p->store), k->store_bytes[r]));
    if (d && p->in.ptr)
        return d->ops->copy(d, q, (ar_buf){k->in[r]}, ar_const(p->in), k->in_bytes[r]);
    return AR_OK;
}

static inline void take_away(const placed *p, ar_device *d, ar_queue *q)
{
    if (d) {
        d->ops->free(d, q, p->store);
        d->ops->free(d, q, p->in);
    }
}

/* What this rank got of a case is right; every process has the whole case in its own memory. */
static inline ar_status expect_right(const coll_case *k, int r)
{
    char why[256];
    return case_rank_holds(k, r, why, sizeof why) ? AR_OK : ar_error_set(AR_ERR_INTERNAL, "%s", why);
}

/* How a transport of processes moves things, and so what a rank receives: round a ring; or straight, of an all_reduce its
 * slice of all others and then their slices. */
typedef enum way_of_moving { ROUND_A_RING, STRAIGHT } way_of_moving;

static inline size_t expected_moves(const coll_case *k, int r, way_of_moving how)
{
    const moved straight = direct_form(k, r);
    if (how == ROUND_A_RING)
        return ring_form(k, r).read;
    return k->kind == ALL_REDUCE ? straight.read + k->count - slice_of(k, r) : straight.read;
}

/* The case, on q, in the device's memory or without one on the host. `own`: an inline queue of the device. */
static inline ar_status check_case(const coll_case *k, ar_comm *c, way_of_moving how, ar_device *d, ar_queue *own,
                                   ar_queue *q)
{
    const int r = ar_comm_rank(c);
    const uint64_t expected = expected_moves(k, r, how) * plain_size(k->dtype);
    uint64_t before = 0, after = 0;
    placed p = {.store = {NULL}};
    ar_comm_counted(c, &before, NULL);
    ar_status st = place(&p, k, r, d, own);
    if (st == AR_OK)
        st = case_call(&p.k, c, q, k->special ? NULL : case_names[k->kind]);
    if (st == AR_OK)
        st = ar_queue_sync(q, 0);
    if (st == AR_OK)
        st = fetch(&p, k, r, d, own);
    take_away(&p, d, own);
    ar_comm_counted(c, &after, NULL);
    if (st == AR_OK)
        st = expect_right(k, r);
    if (st == AR_OK && after - before != expected)
        st = ar_error_set(AR_ERR_INTERNAL, "%s: rank %d of %d counted %llu bytes, expected %llu", case_names[k->kind],
                          r, k->n, (unsigned long long)(after - before), (unsigned long long)expected);
    return st;
}

enum { REDUCTIONS = 2 * PLAIN_DTYPES * PLAIN_OPS };

/* A case of the seed, alike in all processes: at first every reduction of every type by every operation, then every
 * kind in turn; the first of each kind are large. */
static inline ar_status check_seed(uint64_t seed, ar_comm *c, way_of_moving how, ar_device *d, ar_queue *own,
                                   ar_queue *q)
{
    static const size_t sizes[] = {0, 1, 2, 3, 5, 8, 37, 100, 1023};
    static const case_kind reductions[] = {ALL_REDUCE, REDUCE_SCATTER};
    const bool later = seed >= REDUCTIONS, large = later ? seed - REDUCTIONS < CASE_KINDS : seed < 2;
    uint64_t rng = seed;
    coll_case k;
    draw_case(&k, &rng, ar_comm_size(c), large ? 100003 : sizes[draw(&rng, 9)]);
    k.kind = later ? (case_kind)((seed - REDUCTIONS) % CASE_KINDS) : reductions[seed % 2];
    k.dtype = plain_dtypes[seed % PLAIN_DTYPES];
    k.op = (ar_op)(seed / 2 % PLAIN_OPS);
    case_init(&k, rng);
    const ar_status st = check_case(&k, c, how, d, own, q);
    case_fini(&k);
    return st;
}

enum { WORLD_CASES = 150, GROUP_CASES = 80 };

/* Cases of the world; then, in turn, of its halves in falling order, of these in rising order, of all ranks but one,
 * and of a rank alone. Every third one is on q. */
static inline ar_status check_groups(ar_comm *world, way_of_moving how, ar_device *d, ar_queue *own, ar_queue *q)
{
    const int r = ar_comm_rank(world), n = ar_comm_size(world);
    ar_comm *comm[4] = {NULL};
    char why[4096];
    ar_status st = ar_comm_split(&comm[0], world, r % 2, -r);
    if (st == AR_OK)
        st = ar_comm_split(&comm[1], comm[0], 0, r);
    if (st == AR_OK)
        st = ar_comm_split(&comm[2], world, r == n / 2 ? -1 : 7, 0);
    if (st == AR_OK)
        st = ar_comm_split(&comm[3], comm[0], r, 0);
    if (st == AR_OK && (ar_comm_size(comm[0]) != (n + 1 - r % 2) / 2 || ar_comm_rank(comm[0]) != (n - 1 - r) / 2 ||
                        ar_comm_rank(comm[1]) != r / 2 || (comm[2] == NULL) != (r == n / 2)))
        st = ar_error_set(AR_ERR_INTERNAL, "split in another way");
    for (int i = 0; i < WORLD_CASES + GROUP_CASES && st == AR_OK; i++) {
        ar_comm *c = i < WORLD_CASES ? world : comm[i % 4];
        if (c)
            st = check_seed((uint64_t)i, c, how, d, own, i % 3 == 0 ? q : own);
    }
    if (st == AR_OK)
        st = ar_comm_exchange(world, own, NULL, 0, AR_F32, "nothing to exchange");
    snprintf(why, sizeof why, "%s", ar_error_message());
    for (int i = 3; i >= 0; i--)
        ar_comm_destroy(comm[i]);
    return st == AR_OK ? AR_OK : ar_error_set(st, "%s", why);
}
