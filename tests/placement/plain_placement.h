/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <limits.h>

#include "anyrank/placement.h"

/* Placements by their definition, in plain loops over all elements of a whole tensor of small integers. Nothing here
 * calls the code under test: what a rank has is what is left when everything else is cut away. */

enum { PLAIN_MOST = 64, PLAIN_RANKS = 16 }; /* elements of a whole tensor, ranks */

static inline int plain_world(const ar_mesh *m)
{
    int ranks = 1;
    for (int d = 0; d < m->ndim; d++)
        ranks *= m->dim[d].size;
    return ranks;
}

static inline void plain_coords(const ar_mesh *m, int rank, int *at)
{
    for (int d = 0, left = plain_world(m); d < m->ndim; d++) {
        left /= m->dim[d].size;
        at[d] = rank / left;
        rank %= left;
    }
}

static inline size_t plain_count(int ndim, const size_t *shape)
{
    size_t n = 1;
    for (int d = 0; d < ndim; d++)
        n *= shape[d];
    return n;
}

/* Whether the rank at these coordinates has element e: along each dimension it is cut from outside in, into parts of
 * ceil(n / size). */
static inline bool plain_has(const ar_mesh *m, const int *at, const ar_placement *p, int ndim, const size_t *shape,
                             size_t e)
{
    size_t low[4] = {0}, high[4] = {0}, index[4] = {0};
    for (int d = ndim - 1; d >= 0; e /= shape[d], d--) {
        index[d] = e % shape[d];
        high[d] = shape[d];
    }
    for (int k = 0; k < m->ndim; k++) {
        if (p[k].kind != AR_SHARD)
            continue;
        const int d = p[k].dim < 0 ? ndim + p[k].dim : p[k].dim;
        const size_t parts = (size_t)m->dim[k].size, each = (high[d] - low[d] + parts - 1) / parts;
        const size_t first = low[d] + each * (size_t)at[k], end = first + each;
        low[d] = first < high[d] ? first : high[d];
        high[d] = end < high[d] ? end : high[d];
    }
    for (int d = 0; d < ndim; d++) {
        if (index[d] < low[d] || index[d] >= high[d])
            return false;
    }
    return true;
}

/* The number of a rank among those that differ along dimensions of some kinds alone, and how many these are. */
static inline int plain_among(const ar_mesh *m, const int *at, const ar_placement *p, unsigned kinds, int *all)
{
    int number = 0;
    *all = 1;
    for (int k = 0; k < m->ndim; k++) {
        if (kinds >> p[k].kind & 1u) {
            number = number * m->dim[k].size + at[k];
            *all *= m->dim[k].size;
        }
    }
    return number;
}
#define PLAIN_PARTIAL (1u << AR_PARTIAL_SUM | 1u << AR_PARTIAL_MAX)
#define PLAIN_COPIES (1u << AR_REPLICATE | 1u << AR_INVARIANT)

static inline bool plain_lists(const ar_mesh *m, const ar_placement *p, ar_placement_kind kind)
{
    bool any = false;
    for (int k = 0; k < m->ndim; k++)
        any |= p[k].kind == kind;
    return any;
}

/* What rank number `term` of `terms` adds to the value v of element e: small numbers that come to v. */
static inline long plain_term(long v, size_t e, int term, int terms, bool maximum)
{
    if (maximum)
        return v - (((long)e + term) % terms == 0 ? 0 : 1 + ((long)e * 5 + term) % 4);
    long rest = v;
    for (int i = 1; i < terms; i++) {
        const long other = ((long)e * 3 + i * 5) % 7 - 3;
        if (i == term)
            return other;
        rest -= other;
    }
    return rest;
}

/* What `rank` has of the whole tensor, in row-major order. Returns how many elements. */
static inline size_t plain_part(long *part, const ar_mesh *m, int rank, const ar_placement *p, int ndim,
                                const size_t *shape, const long *whole)
{
    int at[AR_MESH_DIMS], terms = 1;
    size_t n = 0;
    plain_coords(m, rank, at);
    const int term = plain_among(m, at, p, PLAIN_PARTIAL, &terms);
    for (size_t e = 0; e < plain_count(ndim, shape); e++) {
        if (plain_has(m, at, p, ndim, shape, e))
            part[n++] = plain_term(whole[e], e, term, terms, plain_lists(m, p, AR_PARTIAL_MAX));
    }
    return n;
}

/* Whether the ranks' parts are this whole tensor: each copy of it has every element once, as the sum or the maximum of
 * its terms. */
static inline bool plain_is_whole(const ar_mesh *m, const ar_placement *p, int ndim, const size_t *shape,
                                  const long *whole, long parts[][PLAIN_MOST], const size_t *counts)
{
    static long joined[PLAIN_RANKS][PLAIN_MOST];
    const bool maximum = plain_lists(m, p, AR_PARTIAL_MAX);
    const size_t all = plain_count(ndim, shape);
    int copies = 1;
    for (int c = 0; c < PLAIN_RANKS; c++) {
        for (size_t e = 0; e < all; e++)
            joined[c][e] = maximum ? LONG_MIN : 0;
    }
    for (int rank = 0; rank < plain_world(m); rank++) {
        int at[AR_MESH_DIMS];
        size_t n = 0;
        plain_coords(m, rank, at);
        long *into = joined[plain_among(m, at, p, PLAIN_COPIES, &copies)];
        for (size_t e = 0; e < all; e++) {
            if (!plain_has(m, at, p, ndim, shape, e))
                continue;
            const long v = parts[rank][n++];
            into[e] = maximum ? (v > into[e] ? v : into[e]) : into[e] + v;
        }
        if (n != counts[rank])
            return false;
    }
    for (int c = 0; c < copies; c++) {
        for (size_t e = 0; e < all; e++) {
            if (joined[c][e] != whole[e])
                return false;
        }
    }
    return true;
}

/* <value, gradient> over all ranks; what is invariant along a dimension counts on its first rank. */
static inline long plain_inner(const ar_mesh *m, const ar_placement *p, long value[][PLAIN_MOST],
                               long gradient[][PLAIN_MOST], const size_t *counts)
{
    long sum = 0;
    for (int rank = 0; rank < plain_world(m); rank++) {
        int at[AR_MESH_DIMS], all = 1;
        plain_coords(m, rank, at);
        if (plain_among(m, at, p, 1u << AR_INVARIANT, &all) != 0)
            continue;
        for (size_t i = 0; i < counts[rank]; i++)
            sum += value[rank][i] * gradient[rank][i];
    }
    return sum;
}
