/* SPDX-License-Identifier: Apache-2.0 */
/* What the reference's values in another place are called: chunks of tokens in any order, on ranks that hold chunks, in a
 * part of a tensor, and where tokens come before samples. */
#include "tests/verify/pattern_support.h"

static size_t inner_of(const world *w, int dim)
{
    return ari_volume(w->shape + dim + 1, w->d.ndim - dim - 1);
}

static size_t index_of(const world *w, size_t i, int dim)
{
    return i / inner_of(w, dim) % w->shape[dim];
}

/* The reference's element where the index along a dimension is another one. */
static float from_index(const world *w, size_t i, int dim, size_t index)
{
    return w->reference[i + (index - index_of(w, i, dim)) * inner_of(w, dim)];
}

/* Of by[0] chunks, chunk k has those of the k-th digit: four of by[1], then four of by[2]. */
static float in_chunks(const world *w, size_t i, int dim)
{
    static const size_t tens[] = {1000, 100, 10, 1};
    const size_t size = w->shape[dim] / (size_t)w->by[0], at = index_of(w, i, dim), k = at / size;
    return from_index(w, i, dim, (size_t)w->by[1 + k / 4] / tens[k % 4] % 10 * size + at % size);
}

/* Neighbours of a head of 8 lanes in place of its halves. */
static float paired(const world *w, size_t i)
{
    const size_t at = index_of(w, i, 0), lane = at % 8;
    return from_index(w, i, 0, at - lane + lane % 2 * 4 + lane / 2);
}

/* The same of the first or the last 4 lanes alone. */
static float paired_in_part(const world *w, size_t i)
{
    const size_t at = index_of(w, i, 0), lane = at % 8, first = (size_t)w->by[0], own = lane - first;
    return from_index(w, i, 0, lane < first || own >= 4 ? at : at - own + own % 2 * 2 + own / 2);
}

/* Of which head, where heads lie along the first dimension. */
static size_t head_of(const world *w, size_t i)
{
    return index_of(w, i, 0) / 8;
}

VALUE(chunks, in_chunks(w, i, w->by[3] > 0.0f ? 0 : 1))
VALUE(chunks_of_sample_1, index_of(w, i, 0) == 1 ? in_chunks(w, i, 1) : x)
VALUE(dealt_to_4, from_index(w, i, 0, index_of(w, i, 0) % 4 * (w->shape[0] / 4) + index_of(w, i, 0) / 4))
VALUE(pairs_of_one_head, head_of(w, i) == 2 ? paired(w, i) : x)
VALUE(pairs_of_two_heads, head_of(w, i) == 1 || head_of(w, i) == 4 ? paired(w, i) : x)
VALUE(pairs_of_part, paired_in_part(w, i))
VALUE(pairs_of_q_and_k, i < w->count / 3 * 2 ? paired(w, i) : x)

/* Where the rank's box begins that a token is in; *other: the rank's other one. */
static size_t box_at(const world *w, int r, size_t t, size_t *local, size_t *other)
{
    const ar_layout *o = &w->layout[r];
    const size_t k = o->nbox > 1 && t - o->box[1].global[1] < o->box[1].extent[1];
    *local = o->box[k].local[1] + t - o->box[k].global[1];
    *other = o->box[1 - k].global[1];
    return o->box[k].global[1];
}

/* Consecutive positions, those of a zigzag, or each chunk the rank's other one. */
static float held(const world *w, int r, size_t i)
{
    const size_t n = (size_t)cp_of(w), q = (size_t)cp_rank(w, r), own = w->shape[1] / n, chunk = own / 2;
    size_t local, other;
    const size_t begin = box_at(w, r, token(w, i), &local, &other);
    const size_t zigzag = local < chunk ? q * chunk + local : (2 * n - 1 - q) * chunk + local - chunk;
    const size_t from[] = {q * own + local, zigzag, token(w, i) - begin + other};
    return from_index(w, i, 1, from[(size_t)w->by[0]]);
}

VALUE(other_chunks, held(w, r, i))
VALUE(of_neighbour, from_index(w, i, 1, (token(w, i) / 4 ^ 1u) * 4 + token(w, i) % 4))
/* What the first of the context-parallel ranks has; or the first rank alone what the third has. */
VALUE(of_first, from_index(w, i, 1, token(w, i) % 4))
VALUE(one_of_third, token(w, i) < 4 ? from_index(w, i, 1, token(w, i) + 8) : x)
VALUE(shard_of_next, w->reference[(i + w->count / 4) % w->count])
VALUE(sample_of_next, i / (w->count / 4) == 2 ? w->reference[i + w->count / 4] : x)
VALUE(drawn_alike, noise(i % (w->count / 2) + 700))
VALUE(one_for_all, noise(i % (w->count / 4) + 700))
VALUE(samples_exchanged, from_index(w, i, 0, index_of(w, i, 0) ^ 1u))
VALUE(of_next, from_index(w, i, 1, (token(w, i) + 4) % 16))

#define MLP "model.layers.1.mlp"
#define Q "model.layers.1.self_attn.q_proj.weight"
#define QKV "model.layers.1.self_attn.qkv_proj.weight"
#define TOKENS WHOLE(1, 2, 24, 8), chunks
#define CONSECUTIVE BY(0)
#define IN_ZIGZAG BY(1)
#define OWN_EXCHANGED BY(2)

#define ON_4 MLP, 'f', CP_MESH(1, 4, false, 1, -1, 2, 16, 8)
#define BESIDE_TP MLP, 'f', CP_MESH(1, 4, false, 2, -1, 2, 16, 8)
#define SAMPLES_OF_4 MLP, 'f', MESH(4, 1, -1, 4, 12, 8)
#define ONE_SAMPLE MLP, 'f', WHOLE(1, 2, 24, 8), chunks_of_sample_1
#define TOKENS_FIRST(which) MLP, 'f', WHOLE(1, 24, 2, 8), which, KNOWN(.batch = 2, .seq = 24)
#define HEADS(name, which) name, 'g', WHOLE(1, 48, 16), which, CAUSE("rope_pairing")

static float drawn_anew(const world *w, int r, size_t i, float x)
{
    static const size_t of[] = {5, 0, 1, 1, 4, 3};
    (void)r, (void)x;
    return from_index(w, i, 0, of[index_of(w, i, 0)]);
}

/* A token or an id further on, with or without the end coming round; the first two dimensions exchanged, or the last. */
VALUE(one_on, i / 8 % 24 == 23 ? noise(i + 900) : w->reference[i + 8])
VALUE(rolled, from_index(w, i, 1, (token(w, i) + 1) % w->shape[1]))
VALUE(next_id, index_of(w, i, 0) + 1 < w->shape[0] ? from_index(w, i, 0, index_of(w, i, 0) + 1) : noise(i + 900))
VALUE(first_exchanged, w->reference[(i / 8 % 4 * 6 + i / 32) * 8 + i % 8])
VALUE(last_exchanged, w->reference[i % 6 * 8 + i / 6 % 8 + i / 48 * 48])
VALUE(matrix_exchanged, w->reference[i % 24 * 8 + i / 24])
VALUE(sum_of_shards,
      w->reference[i % 48] + w->reference[i % 48 + 48] + w->reference[i % 48 + 96] + w->reference[i % 48 + 144])
#define WEIGHT "model.layers.1.mlp.up_proj.weight", 'i', WHOLE(1, 24, 8)

static const trace traces[] = {
    {"tokens rolled by one", MLP, 'f', WHOLE(1, 2, 24, 8), rolled, CAUSE("tokens_shifted"), HINT("wraps round")},
    {"positions that begin at one", "transformer.wpe", 'f', WHOLE(1, 2, 24, 8), one_on, CAUSE("position_offset"),
     HINT("token i has the position of i + 1")},
    {"rows of a table one id further on", "model.embed_tokens.weight", 'i', WHOLE(1, 24, 8), next_id,
     CAUSE("ids_off_by_one"), HINT("id i has that of i + 1")},
    {"rows dealt out", WEIGHT, dealt_to_4, CAUSE("dimension_flattened")},
    {"rows in a zigzag", WEIGHT, chunks, BY(4, 312, 0, 1), CAUSE("slices_reordered"), HINT("from either end")},
    {"blocks of rows in each other's place", WEIGHT, chunks, BY(4, 2103, 0, 1), CAUSE("shards_misplaced"),
     HINT("exchanged")},
    {"samples after tokens", "x", 'f', WHOLE(1, 6, 4, 8), first_exchanged, CAUSE("transposed"), HINT("[s, b, h]")},
    {"lanes before tokens", "x", 'f', WHOLE(1, 4, 6, 8), last_exchanged, CAUSE("transposed"),
     HINT("not made contiguous")},
    {"an activation transposed", "x", 'f', WHOLE(1, 24, 8), matrix_exchanged, CAUSE("transposed")},
    {"each context-parallel rank's positions from 0", "transformer.wpe", 'f', CP_MESH(1, 4, false, 1, -1, 2, 16, 8),
     of_first, CAUSE("positions"), AMONG("transformer.wpe:fwd")},
    {"a shard that is the sum of all", "model.layers.1.mlp.up_proj.weight", 'g', SHARDED(4, 0, 24, 8), sum_of_shards,
     CAUSE("reduced_again"), HINT("the sum of all 4 shards")},
    {"chunks of two ranks dealt out", MLP, 'f', TOKENS, BY(4, 213), CAUSE("tokens_dealt_out")},
    {"a zigzag of another order of places", MLP, 'f', TOKENS, BY(4, 3021), CAUSE("zigzag_order"), HINT(": 3, 0, 2, 1")},
    {"a zigzag whose chunks are exchanged", MLP, 'f', TOKENS, BY(8, 7061, 5243), CAUSE("zigzag_order")},
    {"a zigzag from the last place on", MLP, 'f', TOKENS, BY(8, 3425, 1607), CAUSE("zigzag_order")},
    {"a zigzag of no order", MLP, 'f', TOKENS, BY(8, 1607, 2534), CAUSE("zigzag_order"),
     HINT(": 1, 6, 0, 7, 2, 5, 3, 4")},
    {"any other order of chunks", MLP, 'f', TOKENS, BY(4, 1302), CAUSE("shards_misplaced"), HINT(": 1, 3, 0, 2")},
    {"neighbours in each other's place", MLP, 'f', TOKENS, BY(8, 1032, 5476), CAUSE("token_blocks_rotated"),
     HINT("two and two", "every 6 tokens")},
    {"the second half from its end", MLP, 'f', TOKENS, BY(8, 123, 7654), CAUSE("sequence_reversed"),
     HINT("within 1 of 2 times 12 tokens")},
    {"each second chunk is the first", MLP, 'f', TOKENS, BY(8, 22, 4466), CAUSE("shard_repeated"),
     HINT(": 0, 0, 2, 2, 4, 4, 6, 6"), NO("shifted")},
    {"a zigzag in one sample", ONE_SAMPLE, BY(4, 312), CAUSE("zigzag_order")},
    {"chunks dealt out in one sample", ONE_SAMPLE, BY(8, 415, 2637), CAUSE("tokens_dealt_out"), NO("[ranks, b, s/N]")},
    {"pairs of one head", HEADS(Q, pairs_of_one_head), HINT("within 1 of 6 times 8 rows")},
    {"pairs of two heads", HEADS(Q, pairs_of_two_heads), HINT("within 2 of 6 times 8 rows")},
    {"pairs of a head's first half", HEADS(Q, pairs_of_part), BY(0), HINT("within every 8 rows")},
    {"pairs of a head's last half", HEADS(Q, pairs_of_part), BY(4), HINT("within every 8 rows")},
    {"pairs of q and k", HEADS(QKV, pairs_of_q_and_k), HINT("within 4 of 6 times 8 rows")},
    {"tokens first in a zigzag", TOKENS_FIRST(chunks), BY(4, 312, 0, 1), CAUSE("zigzag_order")},
    {"tokens first in rotated blocks", TOKENS_FIRST(chunks), BY(4, 1230, 0, 1), CAUSE("token_blocks_rotated")},
    {"tokens first dealt out", TOKENS_FIRST(dealt_to_4), CAUSE("tokens_dealt_out")},
    {"samples dealt out", MLP, 'f', WHOLE(1, 24, 2, 8), dealt_to_4, CAUSE("samples_dealt_out")},
    {"consecutive chunks on a zigzag's ranks", MLP, 'f', CP_MESH(1, 2, true, 1, -1, 2, 16, 8), other_chunks,
     CONSECUTIVE, CAUSE("zigzag_order"), HINT("of 2 context-parallel ranks")},
    {"consecutive chunks beside tp and dp", MLP, 'f', CP_MESH(2, 4, true, 2, -1, 2, 16, 8), other_chunks, CONSECUTIVE,
     CAUSE("zigzag_order")},
    {"a zigzag's chunks on ranks of consecutive ones", ON_4, other_chunks, IN_ZIGZAG, CAUSE("zigzag_order"),
     AMONG(MLP ":fwd")},
    {"a rank's chunks in each other's place", MLP, 'f', CP_MESH(1, 4, true, 1, -1, 2, 16, 8), other_chunks,
     OWN_EXCHANGED, CAUSE("zigzag_order"), NO("packed")},
    {"neighbours' tokens", BESIDE_TP, of_neighbour, CAUSE("shards_misplaced"), HINT("rank 0 has rank 2's")},
    {"the next rank's tokens", ON_4, of_next, CAUSE("shards_rotated"), HINT("rank r + 1 mod 4: ")},
    {"the next rank's tokens beside tp", BESIDE_TP, of_next, CAUSE("shards_rotated"),
     HINT("rank r + 1 mod 4 along cp")},
    {"the next rank's tokens beside dp", MLP, 'f', CP_MESH(2, 4, false, 1, -1, 2, 16, 8), of_next,
     CAUSE("shards_rotated"), HINT("rank r + 1 mod 4 along cp")},
    {"the first rank's tokens on all beside tp", MLP, 'f', CP_MESH(2, 4, false, 2, -1, 2, 16, 8), of_first,
     CAUSE("one_shard_on_all_ranks"), HINT("one shard along cp")},
    {"another rank's tokens on one rank", ON_4, one_of_third, CAUSE("shard_repeated"), HINT("rank 0 has rank 2's"),
     NO("every rank")},
    {"another rank's samples on one rank", SAMPLES_OF_4, sample_of_next, CAUSE("same_samples"),
     HINT("rank 2 has rank 3's"), NO("rank 1")},
    {"samples drawn by each rank anew", "model.embed_tokens", 'f', WHOLE(1, 6, 4, 8), drawn_anew, CAUSE("batch_order"),
     HINT("of 6 moved: 5, 0, 1, 1, 4, 3")},
    {"rows of a batch that is no longer one", MLP, 'f', WHOLE(1, 6, 4, 8), drawn_anew, NO("batch")},
    {"samples that all ranks drew alike", MLP, 'f', MESH(2, 1, -1, 4, 12, 8), drawn_alike, CAUSE("same_samples"),
     HINT("ranks 0, 1;"), NEAR(1, 200, 1.0f, "unknown")},
    {"what all samples have in common", MLP, 'f', MESH(2, 1, -1, 4, 12, 8), one_for_all, CAUSE("unknown")},
    {"samples of two ranks exchanged", SAMPLES_OF_4, samples_exchanged, CAUSE("batch_order")},
    {"the next rank's samples", SAMPLES_OF_4, shard_of_next, CAUSE("batch_order"), HINT("rank r + 1 mod 4")},
    {"the next shards of weights, with copies", Q, 'i', MESH(2, 4, 0, 48, 16), shard_of_next, CAUSE("shards_rotated"),
     HINT("rank r + 1 mod 4 along tp")},
};

Test(pattern_maps, every_trace_is_named)
{
    EXPECT_TRACES(traces);
}
