/* SPDX-License-Identifier: Apache-2.0 */
/* Positions of a sequence and layers of a model that belong to a rank. */
#include "anyrank/parallel.h"
#include "ref/core/size.h"
#include "ref/placement/context_private.h"
#include "ref/placement/parallel_private.h"

ar_positions ari_positions_full(size_t seq)
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
    const size_t n = ari_positions_count(p) / parts, part_begin = part * n, part_end = part_begin + n;
    ar_positions result = {.first = {0}};
    int runs = 0;
    for (size_t run = 0, run_begin = 0; run < 2; run_begin += p->count[run++]) {
        const size_t begin = part_begin > run_begin ? part_begin : run_begin,
                     end = part_end < run_begin + p->count[run] ? part_end : run_begin + p->count[run];
        if (begin >= end)
            continue;
        result.first[runs] = p->first[run] + (begin - run_begin);
        result.count[runs++] = end - begin;
    }
    return result;
}

ar_positions ari_positions_ring(size_t places, bool zigzag, size_t seq, size_t place)
{
    const size_t chunk = seq / (2 * places);
    const ar_positions full = ari_positions_full(seq);
    if (zigzag && places > 1)
        return (ar_positions){.first = {place * chunk, (2 * places - 1 - place) * chunk}, .count = {chunk, chunk}};
    return ari_positions_part(&full, place, places);
}

ar_positions ari_parallel_positions(const ar_parallel *p, size_t seq, int cp_rank)
{
    const size_t cp = (size_t)ari_at_least_one(p->cp), inner = (size_t)ari_at_least_one(p->cp_inner);
    const ar_positions ring_positions = ari_positions_ring(cp / inner, p->zigzag, seq, (size_t)cp_rank / inner);
    return ari_positions_part(&ring_positions, (size_t)cp_rank % inner, inner);
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
    const size_t part_rows = seq / ari_gradient_parts(seq), part_begin = part * part_rows;
    const ar_positions local = ari_parallel_positions(p, seq, cp_rank);
    size_t rows = 0;
    for (int run = 0; run < 2; run++) {
        const size_t end = local.first[run] + local.count[run];
        const size_t overlap_begin = local.first[run] > part_begin ? local.first[run] : part_begin,
                     overlap_end = end < part_begin + part_rows ? end : part_begin + part_rows;
        rows += overlap_begin < overlap_end ? overlap_end - overlap_begin : 0;
    }
    return rows;
}

/* Returns the largest number of a part's rows on any rank, and how many ranks have that number. */
static size_t most_rows(const ar_parallel *p, size_t seq, size_t part, size_t *ranks)
{
    size_t max_rows = 0;
    *ranks = 0;
    for (int r = 0; r < ari_at_least_one(p->cp); r++) {
        const size_t rows = ari_gradient_part_rows(p, seq, part, r);
        *ranks = rows > max_rows ? 1 : *ranks + (rows == max_rows);
        max_rows = rows > max_rows ? rows : max_rows;
    }
    return max_rows;
}

int ari_gradient_part_owner(const ar_parallel *p, size_t seq, size_t sample, size_t part)
{
    size_t ranks = 0, before = 0;
    const size_t max_rows = most_rows(p, seq, part, &ranks);
    for (int r = 0; r < ari_at_least_one(p->cp) - 1; r++) {
        if (ari_gradient_part_rows(p, seq, part, r) == max_rows && before++ == (sample + part) % ranks)
            return r;
    }
    return ari_at_least_one(p->cp) - 1;
}

/* Returns the rank that has a position among those of ari_parallel_positions, and the end of its run of positions. */
static int holder(size_t *end, const ar_parallel *p, size_t seq, size_t position)
{
    const size_t inner = (size_t)ari_at_least_one(p->cp_inner), places = (size_t)ari_at_least_one(p->cp) / inner;
    const size_t twice = p->zigzag && places > 1 ? 2 : 1, chunk = seq / (twice * places);
    const size_t rank_rows = twice * chunk / inner, chunk_index = position / chunk;
    const bool second = chunk_index >= places;
    const size_t before = position % chunk + (second ? chunk : 0);
    const size_t of_chunk = (chunk_index + 1) * chunk, of_rank = position + rank_rows - before % rank_rows;
    *end = of_chunk < of_rank ? of_chunk : of_rank;
    return (int)((second ? 2 * places - 1 - chunk_index : chunk_index) * inner + before / rank_rows);
}

/* Returns the largest number of a part's rows on any rank. */
static size_t most_of_part(const ar_parallel *p, size_t seq, size_t part, size_t part_rows)
{
    size_t max_rows = 0;
    for (size_t position = part * part_rows, end; position < (part + 1) * part_rows; position = end) {
        const size_t rows = ari_gradient_part_rows(p, seq, part, holder(&end, p, seq, position));
        max_rows = rows > max_rows ? rows : max_rows;
    }
    return max_rows;
}

size_t ari_gradient_moves(const ar_parallel *p, size_t seq, size_t *parts)
{
    const size_t part_count = ari_gradient_parts(seq), cp = (size_t)ari_at_least_one(p->cp);
    size_t moved = 0;
    if (cp > 1 && part_count % (2 * cp) != 0) /* otherwise every rank's chunks consist of whole parts */
        for (size_t part = 0; part < part_count; part++)
            moved += seq / part_count - most_of_part(p, seq, part, seq / part_count);
    *parts = moved > 0 ? part_count : part_count / cp;
    return moved;
}

/* Returns the number of chunks into which the ring divides a sequence. */
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

/* Checks how positions divide among context-parallel ranks; seq 0: the length is not known yet. */
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

void ari_stage_layers(size_t *first_layer, size_t *count, const ar_stages *stages, size_t layers, size_t n, size_t i)
{
    if (stages && stages->n > 0) {
        *first_layer = 0;
        for (size_t k = 0; k < i; k++)
            *first_layer += stages->layers[k];
        *count = stages->layers[i];
        return;
    }
    const size_t min_layers = layers / n, longer = layers % n, begin = (n - longer) / 2;
    const size_t before = i < begin ? 0 : i - begin < longer ? i - begin : longer;
    *first_layer = i * min_layers + before;
    *count = min_layers + (i >= begin && i - begin < longer);
}
