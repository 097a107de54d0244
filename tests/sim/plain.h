/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_SIM_PLAIN_H
#define TESTS_SIM_PLAIN_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "anyrank/sim.h"

/* The collectives by their definition, in one thread, in plain loops, and a harness that runs the same cases on a
 * simulated cluster. Nothing here uses the code under test except ar_sim_run itself; slices are cut here again. */

enum { PLAIN_RANKS = 16, GUARD = 64 };

typedef enum case_kind {
    ALL_REDUCE,
    REDUCE_SCATTER,
    ALL_GATHER,
    ALL_TO_ALL,
    BROADCAST,
    EXCHANGE,
    CASE_KINDS
} case_kind;

/* One collective with the memory of every rank. Everything belongs to the main thread; rank r touches in[r], out[r]. */
typedef struct coll_case {
    case_kind kind;
    ar_dtype dtype;
    ar_op op;
    int n, root;
    bool in_place;
    size_t count;                           /* all_reduce, broadcast */
    size_t counts[PLAIN_RANKS];             /* reduce_scatter, all_gather */
    size_t sends[PLAIN_RANKS][PLAIN_RANKS]; /* [from][to]: all_to_all, and exchange: messages of this size, twice */
    size_t in_bytes[PLAIN_RANKS], out_bytes[PLAIN_RANKS];
    unsigned char *in[PLAIN_RANKS], *before[PLAIN_RANKS]; /* before: what `in` held */
    unsigned char *out[PLAIN_RANKS], *want[PLAIN_RANKS];  /* out[r] lies in in[r], or the other way, where in_place */
    unsigned char *store[PLAIN_RANKS];                    /* out's own memory, with guards at its end */
} coll_case;

static inline size_t plain_size(ar_dtype t)
{
    return t == AR_U8 ? 1 : t == AR_F32 || t == AR_I32 ? 4 : 8;
}

/* splitmix64: Steele, Lea, Flood 2014. */
static inline uint64_t plain_hash(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Element i of rank r: depends on both, spans the whole range of integers (sums wrap), and fractions whose sum depends
 * on the order (exponents -4 .. 3, full significands). */
static inline void plain_fill(void *to, ar_dtype t, uint64_t seed, int r, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const uint64_t h = plain_hash(seed ^ plain_hash((uint64_t)r * 1000003u + i));
        const double f = ((double)(h >> 11) * 0x1p-53 + 0.5) * (double)(1 << (h & 7)) * (h & 8 ? -0.0625 : 0.0625);
        const float f32 = (float)f;
        const int32_t i32 = (int32_t)(uint32_t)h;
        char *at = (char *)to + i * plain_size(t);
        if (t == AR_F32)
            memcpy(at, &f32, 4);
        else if (t == AR_F64)
            memcpy(at, &f, 8);
        else if (t == AR_I32)
            memcpy(at, &i32, 4);
        else
            memcpy(at, &h, plain_size(t));
    }
}

#define PLAIN_COMBINE(type, sum)                                                     \
    do {                                                                             \
        type x, y;                                                                   \
        memcpy(&x, acc, sizeof x);                                                   \
        memcpy(&y, value, sizeof y);                                                 \
        x = op == AR_SUM ? (sum) : op == AR_MAX ? (y > x ? y : x) : (y < x ? y : x); \
        memcpy(acc, &x, sizeof x);                                                   \
    } while (0)

/* acc = acc op value, one element. */
static inline void plain_combine(void *acc, const void *value, ar_dtype t, ar_op op)
{
    switch ((int)t) {
    case AR_F32:
        PLAIN_COMBINE(float, x + y);
        break;
    case AR_F64:
        PLAIN_COMBINE(double, x + y);
        break;
    case AR_I64:
        PLAIN_COMBINE(int64_t, (int64_t)((uint64_t)x + (uint64_t)y));
        break;
    case AR_I32:
        PLAIN_COMBINE(int32_t, (int32_t)((uint32_t)x + (uint32_t)y));
        break;
    default:
        PLAIN_COMBINE(uint8_t, (uint8_t)(x + y));
    }
}

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

/* Where message `which` (0 or 1) from a to b lies in a's input and b's output: packed by the other rank, then which. */
static inline size_t plain_sent_at(const coll_case *k, int a, int b, int which)
{
    return 2 * plain_before(k->sends[a], b) + (which ? k->sends[a][b] : 0);
}

static inline size_t plain_received_at(const coll_case *k, int a, int b, int which)
{
    size_t at = which ? k->sends[a][b] : 0;
    for (int i = 0; i < a; i++)
        at += 2 * k->sends[i][b];
    return at;
}

static inline void plain_want(coll_case *k)
{
    const size_t e = plain_size(k->dtype);
    for (int r = 0; r < k->n; r++) {
        unsigned char *w = k->want[r];
        if (k->kind == ALL_REDUCE) {
            for (size_t i = 0; i < k->count; i++)
                plain_element(k, w + i * e, i, plain_owner(k->count, k->n, i));
        } else if (k->kind == REDUCE_SCATTER) {
            for (size_t i = 0; i < k->counts[r]; i++)
                plain_element(k, w + i * e, plain_before(k->counts, r) + i, r);
        } else if (k->kind == BROADCAST) {
            memcpy(w, k->before[k->root], k->count * e);
        }
        size_t column = 0;
        for (int p = 0; p < k->n; p++) {
            if (k->kind == ALL_GATHER) {
                memcpy(w + plain_before(k->counts, p) * e, k->before[p], k->counts[p] * e);
            } else if (k->kind == ALL_TO_ALL) {
                memcpy(w + column * e, k->before[p] + plain_before(k->sends[p], r) * e, k->sends[p][r] * e);
                column += k->sends[p][r];
            } else if (k->kind == EXCHANGE) {
                for (int which = 0; which < 2; which++)
                    memcpy(w + plain_received_at(k, p, r, which) * e, k->before[p] + plain_sent_at(k, p, r, which) * e,
                           k->sends[p][r] * e);
            }
        }
    }
}

static inline void plain_sizes(coll_case *k, int r)
{
    const size_t e = plain_size(k->dtype);
    size_t in = k->count, out = k->count;
    if (k->kind == REDUCE_SCATTER || k->kind == ALL_GATHER) {
        const size_t whole = plain_before(k->counts, k->n);
        in = k->kind == REDUCE_SCATTER ? whole : k->counts[r];
        out = k->kind == REDUCE_SCATTER ? k->counts[r] : whole;
    } else if (k->kind == ALL_TO_ALL || k->kind == EXCHANGE) {
        const size_t times = k->kind == EXCHANGE ? 2 : 1;
        in = times * plain_before(k->sends[r], k->n);
        out = 0;
        for (int p = 0; p < k->n; p++)
            out += times * k->sends[p][r];
    }
    k->in_bytes[r] = in * e;
    k->out_bytes[r] = out * e;
}

/* Allocates and fills every rank's memory, and computes what must come out. kind .. sends are set. */
static inline void case_init(coll_case *k, uint64_t seed)
{
    const size_t e = plain_size(k->dtype);
    for (int r = 0; r < k->n; r++) {
        plain_sizes(k, r);
        const size_t in = k->in_bytes[r], out = k->out_bytes[r], at = plain_before(k->counts, r) * e;
        k->before[r] = calloc(in + 1, 1);
        k->want[r] = calloc(out + 1, 1);
        k->store[r] = malloc((in > out ? in : out) + GUARD);
        plain_fill(k->before[r], k->dtype, seed, r, in / e);
        memset(k->store[r], 0xa5, (in > out ? in : out) + GUARD);
        k->out[r] = k->store[r];
        if (k->kind == BROADCAST || (k->in_place && k->kind == ALL_REDUCE)) {
            k->in[r] = k->store[r];
        } else if (k->in_place && k->kind == REDUCE_SCATTER) {
            k->in[r] = k->store[r];
            k->out[r] = k->store[r] + at;
        } else if (k->in_place && k->kind == ALL_GATHER) {
            k->in[r] = k->store[r] + at;
        } else {
            k->in[r] = malloc(in + 1);
        }
        memcpy(k->in[r], k->before[r], in);
    }
    plain_want(k);
}

static inline bool case_shares(const coll_case *k)
{
    return k->kind == BROADCAST || (k->in_place && k->kind != ALL_TO_ALL && k->kind != EXCHANGE);
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

/* Rank r's call. */
static inline ar_status case_call(const coll_case *k, ar_comm *c, ar_queue *q, const char *tag)
{
    const int r = ar_comm_rank(c);
    const ar_buf out = {k->out[r]};
    const ar_cbuf in = {k->in[r]};
    const size_t e = plain_size(k->dtype);
    size_t column[PLAIN_RANKS];
    ar_p2p ops[4 * PLAIN_RANKS];
    size_t n = 0;
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
    default:
        /* Peers in falling order and sends mixed with receives: only the order per pair is defined. */
        for (int p = k->n - 1; p >= 0; p--) {
            for (int which = 0; which < 2; which++) {
                ops[n++] = (ar_p2p){p, true, {k->in[r] + plain_sent_at(k, r, p, which) * e}, k->sends[r][p]};
                ops[n++] = (ar_p2p){p, false, {k->out[r] + plain_received_at(k, p, r, which) * e}, k->sends[p][r]};
            }
        }
        return ar_comm_exchange(c, q, ops, n, k->dtype, tag);
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

/* Whether every rank's output has the wanted bits, nothing beyond it was written, and no input was changed. Otherwise
 * says in `why` what is wrong where. */
static inline bool case_holds(const coll_case *k, char *why, size_t size)
{
    for (int r = 0; r < k->n; r++) {
        const size_t larger = k->in_bytes[r] > k->out_bytes[r] ? k->in_bytes[r] : k->out_bytes[r];
        ptrdiff_t at = first_difference(k->out[r], k->want[r], k->out_bytes[r]);
        const char *what = "output";
        if (at < 0 && !case_shares(k)) {
            what = "input";
            at = first_difference(k->in[r], k->before[r], k->in_bytes[r]);
        }
        for (size_t i = 0; at < 0 && i < GUARD; i++) {
            what = "guard";
            at = k->store[r][larger + i] == 0xa5 ? -1 : (ptrdiff_t)i;
        }
        if (at < 0 && k->in_place && k->kind == REDUCE_SCATTER) {
            /* In place, the rest of the input stays what it was. */
            what = "rest of the input";
            const size_t own = (size_t)(k->out[r] - k->in[r]), end = own + k->out_bytes[r];
            at = first_difference(k->in[r], k->before[r], own);
            if (at < 0)
                at = first_difference(k->in[r] + end, k->before[r] + end, k->in_bytes[r] - end);
        }
        if (at >= 0) {
            snprintf(why, size,
                     "kind %d dtype %s op %d n %d count %zu in_place %d: rank %d, %s, byte %td: %02x for %02x",
                     (int)k->kind, ar_dtype_name(k->dtype), (int)k->op, k->n, k->count, k->in_place, r, what, at,
                     what[0] == 'o' ? k->out[r][at] : 0, what[0] == 'o' ? k->want[r][at] : 0);
            return false;
        }
    }
    return true;
}

#endif
