/* SPDX-License-Identifier: Apache-2.0 */
/* Which positions of a sequence, and which layers of a model, are a rank's. */
#include "anyrank/parallel.h"
#include "ref/core/size.h"
#include "ref/placement/context_private.h"
#include "ref/placement/parallel_private.h"

ar_positions ari_positions_whole(size_t seq)
{
    return (ar_positions){.first = {0}, .count = {seq}};
}

size_t ari_positions_count(const ar_positions *p)
{
    return p->count[0] + p->count[1];
}

size_t ari_positions_at(const ar_positions *p, size_t i)
{
    return i < p->count[0] ? p->first[0] + i : p->first[1] + (i - p->count[0]);
}

ar_positions ari_positions_part(const ar_positions *p, size_t part, size_t parts)
{
    const size_t n = ari_positions_count(p) / parts, from = part * n, to = from + n;
    ar_positions own = {.first = {0}};
    int runs = 0;
    for (size_t run = 0, at = 0; run < 2; at += p->count[run++]) {
        const size_t first = from > at ? from : at, end = to < at + p->count[run] ? to : at + p->count[run];
        if (first >= end)
            continue;
        own.first[runs] = p->first[run] + (first - at);
        own.count[runs++] = end - first;
    }
    return own;
}

ar_positions ari_positions_ring(size_t places, bool zigzag, size_t seq, size_t place)
{
    const size_t chunk = seq / (2 * places);
    const ar_positions all = ari_positions_whole(seq);
    if (zigzag && places > 1)
        return (ar_positions){.first = {place * chunk, (2 * places - 1 - place) * chunk}, .count = {chunk, chunk}};
    return ari_positions_part(&all, place, places);
}

ar_positions ari_parallel_positions(const ar_parallel *p, size_t seq, int cp_rank)
{
    const size_t cp = (size_t)ari_at_least_one(p->cp), inner = (size_t)ari_at_least_one(p->cp_inner);
    const ar_positions own = ari_positions_ring(cp / inner, p->zigzag, seq, (size_t)cp_rank / inner);
    return ari_positions_part(&own, (size_t)cp_rank % inner, inner);
}

size_t ari_gradient_parts(size_t seq)
{
    enum { LEAST = 512 };
    size_t parts = 1;
    while (seq / parts % 2 == 0 && seq / parts / 2 >= LEAST)
        parts *= 2;
    return parts;
}

size_t ari_gradient_part_rows(const ar_parallel *p, size_t seq, size_t part, int cp_rank)
{
    const size_t each = seq / ari_gradient_parts(seq), from = part * each;
    const ar_positions own = ari_parallel_positions(p, seq, cp_rank);
    size_t rows = 0;
    for (int run = 0; run < 2; run++) {
        const size_t end = own.first[run] + own.count[run];
        const size_t first = own.first[run] > from ? own.first[run] : from,
                     last = end < from + each ? end : from + each;
        rows += first < last ? last - first : 0;
    }
    return rows;
}

/* The most rows of a part that a rank has, and how many ranks have so many. */
static size_t most_rows(const ar_parallel *p, size_t seq, size_t part, size_t *ranks)
{
    size_t most = 0;
    *ranks = 0;
    for (int r = 0; r < ari_at_least_one(p->cp); r++) {
        const size_t rows = ari_gradient_part_rows(p, seq, part, r);
        *ranks = rows > most ? 1 : *ranks + (rows == most);
        most = rows > most ? rows : most;
    }
    return most;
}

int ari_gradient_part_owner(const ar_parallel *p, size_t seq, size_t sample, size_t part)
{
    size_t ranks = 0, before = 0;
    const size_t most = most_rows(p, seq, part, &ranks);
    for (int r = 0; r < ari_at_least_one(p->cp) - 1; r++) {
        if (ari_gradient_part_rows(p, seq, part, r) == most && before++ == (sample + part) % ranks)
            return r;
    }
    return ari_at_least_one(p->cp) - 1;
}

/* The rank that has a position, of those of ari_parallel_positions, and where its run of them ends. */
static int holder(size_t *end, const ar_parallel *p, size_t seq, size_t position)
{
    const size_t inner = (size_t)ari_at_least_one(p->cp_inner), places = (size_t)ari_at_least_one(p->cp) / inner;
    const size_t twice = p->zigzag && places > 1 ? 2 : 1, chunk = seq / (twice * places);
    const size_t each = twice * chunk / inner, at = position / chunk;
    const bool second = at >= places;
    const size_t before = position % chunk + (second ? chunk : 0);
    const size_t of_chunk = (at + 1) * chunk, of_rank = position + each - before % each;
    *end = of_chunk < of_rank ? of_chunk : of_rank;
    return (int)((second ? 2 * places - 1 - at : at) * inner + before / each);
}

/* The most rows of a part that a rank has. */
static size_t most_of_part(const ar_parallel *p, size_t seq, size_t part, size_t each)
{
    size_t most = 0;
    for (size_t at = part * each, end; at < (part + 1) * each; at = end) {
        const size_t rows = ari_gradient_part_rows(p, seq, part, holder(&end, p, seq, at));
        most = rows > most ? rows : most;
    }
    return most;
}

size_t ari_gradient_moves(const ar_parallel *p, size_t seq, size_t *parts)
{
    const size_t all = ari_gradient_parts(seq), cp = (size_t)ari_at_least_one(p->cp);
    size_t moved = 0;
    if (cp > 1 && all % (2 * cp) != 0) /* else every rank's chunks are of whole parts */
        for (size_t part = 0; part < all; part++)
            moved += seq / all - most_of_part(p, seq, part, seq / all);
    *parts = moved > 0 ? all : all / cp;
    return moved;
}

/* Into how many chunks the places of the ring cut a sequence. */
static size_t chunks_of(const ar_parallel *p)
{
    const size_t ring = (size_t)ari_at_least_one(p->cp) / (size_t)ari_at_least_one(p->cp_inner);
    return p->zigzag && ring > 1 ? 2 * ring : 1;
}

size_t ari_parallel_sequence_unit(const ar_parallel *p)
{
    const size_t chunks = chunks_of(p);
    const size_t ranks = (size_t)ari_at_least_one(p->cp) * (size_t)(p->sp ? ari_at_least_one(p->tp) : 1);
    size_t unit = ranks;
    while (unit % chunks != 0)
        unit += ranks;
    return unit;
}

/* The positions of a sequence over context-parallel ranks; seq 0: not known yet. */
static ar_status check_context(const ar_parallel *p, size_t seq)
{
    const size_t cp = (size_t)ari_at_least_one(p->cp), inner = (size_t)ari_at_least_one(p->cp_inner);
    const size_t pieces = chunks_of(p), unit = ari_parallel_sequence_unit(p);
    if (cp % inner != 0)
        return ar_error_set(AR_ERR_ARG,
                            "cp=%zu is not a number of groups of %zu neighbours; use an inner cp that "
                            "divides it",
                            cp, inner);
    if (seq % cp != 0)
        return ar_error_set(AR_ERR_INDIVISIBLE, "a sequence of %zu cannot be split over cp=%zu; use a multiple of %zu",
                            seq, cp, unit);
    if (seq % pieces != 0)
        return ar_error_set(
            AR_ERR_INDIVISIBLE,
            "a sequence of %zu cannot be cut into the %zu chunks of a zigzag over %zu places; use a multiple of %zu",
            seq, pieces, cp / inner, unit);
    return AR_OK;
}

ar_status ari_parallel_check_sequence(const ar_parallel *p, size_t seq)
{
    const size_t tp = (size_t)ari_at_least_one(p->tp), cp = (size_t)ari_at_least_one(p->cp);
    AR_TRY(check_context(p, seq));
    if (!p->sp || seq / cp % tp == 0)
        return AR_OK;
    return cp == 1
               ? ar_error_set(AR_ERR_INDIVISIBLE,
                              "a sequence of %zu cannot be split over tp=%zu (sequence parallelism); use a seq that "
                              "tp divides",
                              seq, tp)
               : ar_error_set(AR_ERR_INDIVISIBLE,
                              "a sequence of %zu over cp=%zu leaves %zu positions, which cannot be split over tp=%zu "
                              "(sequence parallelism); use a multiple of %zu",
                              seq, cp, seq / cp, tp, ari_parallel_sequence_unit(p));
}

void ari_stage_layers(size_t *first, size_t *count, const ar_stages *given, size_t layers, size_t n, size_t i)
{
    if (given && given->n > 0) {
        *first = 0;
        for (size_t k = 0; k < i; k++)
            *first += given->layers[k];
        *count = given->layers[i];
        return;
    }
    const size_t least = layers / n, longer = layers % n, begin = (n - longer) / 2;
    const size_t before = i < begin ? 0 : i - begin < longer ? i - begin : longer;
    *first = i * least + before;
    *count = least + (i >= begin && i - begin < longer);
}
