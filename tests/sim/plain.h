/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdio.h>
#include <stdlib.h>

#include "anyrank/comm.h"
#include "anyrank/sim.h"
#include "tests/sim/plain_number.h"

/* The collectives by their definition, in one thread, in plain loops, and a harness that runs the same cases on a
 * simulated cluster. Nothing here uses the code under test except ar_sim_run itself; slices are cut here again. */

enum { PLAIN_RANKS = 16, GUARD = 64, GUARD_BYTE = 0xa5, PLAIN_OPS = 3, PLAIN_DTYPES = 7 };
static const ar_dtype plain_dtypes[PLAIN_DTYPES] = {AR_F32, AR_F64, AR_BF16, AR_F16, AR_I64, AR_I32, AR_U8};

typedef enum case_kind {
    ALL_REDUCE,
    REDUCE_SCATTER,
    ALL_GATHER,
    ALL_TO_ALL,
    BROADCAST,
    SEND_RECV, /* a message from every rank to every other one */
    EXCHANGE,  /* two from every rank to every rank */
    BARRIER,
    CASE_KINDS
} case_kind;
static const char *const case_names[CASE_KINDS] = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all",
                                                   "broadcast",  "send_recv",      "exchange",   "barrier"};

/* One collective with the memory of every rank. Everything belongs to the main thread; rank r touches in[r], out[r]. */
typedef struct coll_case {
    case_kind kind;
    ar_dtype dtype;
    ar_op op;
    int n, root;
    bool in_place;
    bool special;                           /* NaN, infinities and the like among the inputs */
    size_t count;                           /* all_reduce, broadcast */
    size_t counts[PLAIN_RANKS];             /* reduce_scatter, all_gather */
    size_t sends[PLAIN_RANKS][PLAIN_RANKS]; /* [from][to]: all_to_all, send_recv, exchange */
    size_t in_bytes[PLAIN_RANKS], out_bytes[PLAIN_RANKS];
    unsigned char *in[PLAIN_RANKS], *before[PLAIN_RANKS]; /* before: what `in` held */
    unsigned char *out[PLAIN_RANKS], *want[PLAIN_RANKS];
    unsigned char *store[PLAIN_RANKS]; /* a guard, out's memory (in place: that of both), a guard */
    size_t store_bytes[PLAIN_RANKS];
} coll_case;

static inline size_t plain_before(const size_t *counts, int n)
{
    size_t sum = 0;
    for (int i = 0; i < n; i++)
        sum += counts[i];
    return sum;
}

/* Which slice element i lies in, when `count` elements are cut in n and the first count mod n get one more. */
static inline int plain_owner(size_t count, int n, size_t i)
{
    size_t end = 0;
    for (int c = 0; c < n; c++) {
        end += count / (size_t)n + ((size_t)c < count % (size_t)n ? 1 : 0);
        if (i < end)
            return c;
    }
    return -1;
}

/* Element i over all ranks, in the order of ranks c+1, c+2, ..., c. */
static inline void plain_element(const coll_case *k, unsigned char *to, size_t i, int c)
{
    const size_t e = plain_size(k->dtype);
    memcpy(to, k->before[(c + 1) % k->n] + i * e, e);
    for (int s = 2; s <= k->n; s++)
        plain_combine(to, k->before[(c + s) % k->n] + i * e, k->dtype, k->op);
}

/* Messages lie packed by the other rank; of an exchange's two (`which`) the first one first. In a's input: */
static inline size_t plain_sent_at(const coll_case *k, int a, int b, int which)
{
    return (k->kind == EXCHANGE ? 2 : 1) * plain_before(k->sends[a], b) + (which ? k->sends[a][b] : 0);
}

/* In b's output: */
static inline size_t plain_received_at(const coll_case *k, int a, int b, int which)
{
    size_t at = which ? k->sends[a][b] : 0;
    for (int i = 0; i < a; i++)
        at += (k->kind == EXCHANGE ? 2 : 1) * k->sends[i][b];
    return at;
}

static inline void plain_want_messages(const coll_case *k, unsigned char *w, int r)
{
    const size_t e = plain_size(k->dtype);
    for (int p = 0; p < k->n; p++) {
        for (int which = 0; which < (k->kind == EXCHANGE ? 2 : 1); which++)
            memcpy(w + plain_received_at(k, p, r, which) * e, k->before[p] + plain_sent_at(k, p, r, which) * e,
                   k->sends[p][r] * e);
    }
}

/* What rank r's output must hold. */
static inline void plain_want(const coll_case *k, unsigned char *w, int r)
{
    const size_t e = plain_size(k->dtype), elements = k->out_bytes[r] / e;
    switch (k->kind) {
    case ALL_REDUCE:
        for (size_t i = 0; i < elements; i++)
            plain_element(k, w + i * e, i, plain_owner(k->count, k->n, i));
        break;
    case REDUCE_SCATTER:
        for (size_t i = 0; i < elements; i++)
            plain_element(k, w + i * e, plain_before(k->counts, r) + i, r);
        break;
    case BROADCAST:
        memcpy(w, k->before[k->root], k->out_bytes[r]);
        break;
    case ALL_GATHER:
        for (int p = 0; p < k->n; p++)
            memcpy(w + plain_before(k->counts, p) * e, k->before[p], k->counts[p] * e);
        break;
    case BARRIER:
        break;
    default:
        plain_want_messages(k, w, r);
    }
}

/* Whether input and output share memory. */
static inline bool case_shares(const coll_case *k)
{
    switch (k->kind) {
    case BROADCAST:
        return true;
    case ALL_REDUCE:
    case REDUCE_SCATTER:
    case ALL_GATHER:
        return k->in_place;
    default:
        return false;
    }
}

static inline void case_sizes(coll_case *k, int r)
{
    const size_t e = plain_size(k->dtype), whole = plain_before(k->counts, k->n);
    size_t in = 0, out = 0;
    switch (k->kind) {
    case ALL_REDUCE:
    case BROADCAST:
        in = out = k->count;
        break;
    case REDUCE_SCATTER:
        in = whole;
        out = k->counts[r];
        break;
    case ALL_GATHER:
        in = k->counts[r];
        out = whole;
        break;
    case BARRIER:
        break;
    default:
        in = plain_sent_at(k, r, k->n, 0);
        out = plain_received_at(k, k->n, r, 0);
    }
    k->in_bytes[r] = in * e;
    k->out_bytes[r] = out * e;
}

/* Rank r's memory as it is before the call. */
static inline void case_reset(coll_case *k, int r)
{
    memset(k->store[r], GUARD_BYTE, k->store_bytes[r]);
    memcpy(k->in[r], k->before[r], k->in_bytes[r]);
}

/* Allocates and fills every rank's memory. kind .. sends are set. */
static inline void case_init_memory(coll_case *k, uint64_t seed)
{
    const size_t e = plain_size(k->dtype);
    for (int r = 0; r < k->n; r++) {
        if (k->kind == SEND_RECV)
            k->sends[r][r] = 0; /* no rank is its own peer */
    }
    for (int r = 0; r < k->n; r++) {
        case_sizes(k, r);
        const size_t in = k->in_bytes[r], out = k->out_bytes[r], at = plain_before(k->counts, r) * e;
        k->before[r] = malloc(in + 1);
        plain_fill_with(k->before[r], k->dtype, seed, r, in / e, k->special);
        k->store_bytes[r] = (case_shares(k) && in > out ? in : out) + 2 * GUARD;
        k->store[r] = malloc(k->store_bytes[r]);
        k->out[r] = k->in[r] = k->store[r] + GUARD;
        if (!case_shares(k))
            k->in[r] = malloc(in > 0 ? in : 1); /* no byte more, so that a sanitizer sees one read too many */
        else if (k->kind == REDUCE_SCATTER)
            k->out[r] += at;
        else if (k->kind == ALL_GATHER)
            k->in[r] += at;
        case_reset(k, r);
    }
}

/* The same, and computes what must come out. */
static inline void case_init(coll_case *k, uint64_t seed)
{
    case_init_memory(k, seed);
    for (int r = 0; r < k->n; r++) {
        k->want[r] = malloc(k->out_bytes[r] + 1);
        plain_want(k, k->want[r], r);
    }
}

static inline void case_fini(coll_case *k)
{
    for (int r = 0; r < k->n; r++) {
        if (!case_shares(k))
            free(k->in[r]);
        free(k->before[r]);
        free(k->want[r]);
        free(k->store[r]);
    }
}

/* Every rank goes through the pairs in one order, so the first message that has not arrived can. */
static inline ar_status case_send_recv(const coll_case *k, ar_comm *c, ar_queue *q, const char *tag)
{
    const int r = ar_comm_rank(c);
    const size_t e = plain_size(k->dtype);
    for (int a = 0; a < k->n; a++) {
        for (int b = 0; b < k->n; b++) {
            const ar_cbuf in = {k->in[r] + plain_sent_at(k, r, b, 0) * e};
            const ar_buf out = {k->out[r] + plain_received_at(k, a, r, 0) * e};
            if (a == r && b != r)
                AR_TRY(ar_comm_send(c, q, in, k->sends[r][b], k->dtype, b, tag));
            if (b == r && a != r)
                AR_TRY(ar_comm_recv(c, q, out, k->sends[a][r], k->dtype, a, tag));
        }
    }
    return AR_OK;
}

/* Peers in falling order and sends mixed with receives: only the order per pair is defined. */
static inline ar_status case_exchange(const coll_case *k, ar_comm *c, ar_queue *q, const char *tag)
{
    const int r = ar_comm_rank(c);
    const size_t e = plain_size(k->dtype);
    ar_p2p ops[4 * PLAIN_RANKS];
    size_t n = 0;
    for (int p = k->n - 1; p >= 0; p--) {
        for (int which = 0; which < 2; which++) {
            ops[n++] = (ar_p2p){p, true, {k->in[r] + plain_sent_at(k, r, p, which) * e}, k->sends[r][p]};
            ops[n++] = (ar_p2p){p, false, {k->out[r] + plain_received_at(k, p, r, which) * e}, k->sends[p][r]};
        }
    }
    return ar_comm_exchange(c, q, ops, n, k->dtype, tag);
}

/* Rank r's call. */
static inline ar_status case_call(const coll_case *k, ar_comm *c, ar_queue *q, const char *tag)
{
    const int r = ar_comm_rank(c);
    const ar_buf out = {k->out[r]};
    const ar_cbuf in = {k->in[r]};
    size_t column[PLAIN_RANKS];
    switch (k->kind) {
    case ALL_REDUCE:
        return ar_comm_all_reduce(c, q, out, in, k->count, k->dtype, k->op, tag);
    case REDUCE_SCATTER:
        return ar_comm_reduce_scatter(c, q, out, in, k->counts, k->dtype, k->op, tag);
    case ALL_GATHER:
        return ar_comm_all_gather(c, q, out, in, k->counts, k->dtype, tag);
    case ALL_TO_ALL:
        for (int p = 0; p < k->n; p++)
            column[p] = k->sends[p][r];
        return ar_comm_all_to_all(c, q, out, in, k->sends[r], column, k->dtype, tag);
    case BROADCAST:
        return ar_comm_broadcast(c, q, out, k->count, k->dtype, k->root, tag);
    case SEND_RECV:
        return case_send_recv(k, c, q, tag);
    case EXCHANGE:
        return case_exchange(k, c, q, tag);
    default:
        return ar_comm_barrier(c, q, tag);
    }
}

/* Index of the first byte that differs, or -1: the one comparison that all these tests use. */
static inline ptrdiff_t first_difference(const void *a, const void *b, size_t bytes)
{
    const unsigned char *x = a, *y = b;
    for (size_t i = 0; i < bytes; i++) {
        if (x[i] != y[i])
            return (ptrdiff_t)i;
    }
    return -1;
}

/* Where a sum or product is NaN, any NaN will do: takes the bits that rank r has there into `image` of its output. */
static inline void case_accept_nan(const coll_case *k, int r, unsigned char *image)
{
    const bool reduces = k->kind == ALL_REDUCE || k->kind == REDUCE_SCATTER;
    if (!reduces || !plain_is_float(k->dtype) || k->op == AR_MAX || k->op == AR_MIN)
        return;
    const size_t e = plain_size(k->dtype);
    for (size_t at = 0; at < k->out_bytes[r]; at += e) {
        if (isnan(plain_load_float(image + at, k->dtype)) && isnan(plain_load_float(k->out[r] + at, k->dtype)))
            memcpy(image + at, k->out[r] + at, e);
    }
}

/* The first byte of rank r's memory that is not what it must be: -1, or its place in `what`. */
static inline ptrdiff_t case_wrong_byte(const coll_case *k, int r, const char **what)
{
    unsigned char *image = malloc(k->store_bytes[r]);
    const size_t out = (size_t)(k->out[r] - k->store[r]);
    memset(image, GUARD_BYTE, k->store_bytes[r]);
    if (case_shares(k))
        memcpy(image + (k->in[r] - k->store[r]), k->before[r], k->in_bytes[r]);
    memcpy(image + out, k->want[r], k->out_bytes[r]);
    case_accept_nan(k, r, image + out);
    ptrdiff_t at = first_difference(k->store[r], image, k->store_bytes[r]);
    free(image);
    if (at < 0 && !case_shares(k)) {
        *what = "input";
        return first_difference(k->in[r], k->before[r], k->in_bytes[r]);
    }
    const ptrdiff_t into = at - (ptrdiff_t)out;
    if (at >= 0 && into >= 0 && into < (ptrdiff_t)k->out_bytes[r]) {
        *what = "output";
        return into;
    }
    *what = at < GUARD || at >= (ptrdiff_t)k->store_bytes[r] - GUARD ? "guard" : "rest of the input";
    return at;
}

/* Whether rank r's output has the wanted bits, nothing beside it was written, and its input was not changed. Otherwise
 * says in `why` what is wrong where. */
static inline bool case_rank_holds(const coll_case *k, int r, char *why, size_t size)
{
    const char *what = "";
    const ptrdiff_t at = case_wrong_byte(k, r, &what);
    if (at < 0)
        return true;
    const bool output = strcmp(what, "output") == 0;
    snprintf(why, size, "%s dtype %s op %d n %d count %zu root %d in_place %d: rank %d, %s, byte %td: %02x for %02x",
             case_names[k->kind], ar_dtype_name(k->dtype), (int)k->op, k->n, k->count, k->root, k->in_place, r, what,
             at, output ? k->out[r][at] : 0, output ? k->want[r][at] : 0);
    return false;
}

static inline bool case_holds(const coll_case *k, char *why, size_t size)
{
    bool all = true;
    for (int r = 0; r < k->n && all; r++)
        all = case_rank_holds(k, r, why, size);
    return all;
}
