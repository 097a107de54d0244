/* SPDX-License-Identifier: Apache-2.0 */
/* What differences over context-parallel ranks and packed documents look like. */
#include "tests/verify/pattern_support.h"

/* Each of n parts of a sum has as much of it as its number says, and something of its own; all of them add up. */
static float part_of(size_t i, float x, int part, int n)
{
    const float own = 0.25f * noise(i * 64 + (size_t)part + 1),
                last = 0.25f * noise(i * 64 + (size_t)(part + 1) % (size_t)n + 1);
    return x / (float)n + own - last;
}

VALUE(over_cp, part_of(i, x, cp_rank(w, r), cp_of(w)))
VALUE(over_dp, part_of(i, x, dp_rank(w, r), dp_of(w)))
VALUE(over_both, part_of(i, x, dp_rank(w, r) * cp_of(w) + cp_rank(w, r), cp_of(w) * dp_of(w)))
VALUE(times_cp, x *(float)cp_of(w))
VALUE(by_cp, x / (float)cp_of(w))
/* Of 63 targets the last rank has 15, the others 16. */
VALUE(by_own_targets, x * 63.0f / (cp_rank(w, r) == cp_of(w) - 1 ? 15.0f : 16.0f))

static float wrong_if(bool wrong, size_t i, float x)
{
    return wrong ? 3.0f * noise(i + 5000) : x;
}

VALUE(upper_half, wrong_if(token(w, i) >= 8, i, x))
/* Of the four of a zigzag. */
VALUE(of_rank_one, wrong_if(token(w, i) / 2 == 1 || token(w, i) / 2 == 6, i, x))
VALUE(at_ends, wrong_if(token(w, i) % 2 == 1, i, x))
VALUE(at_beginnings, wrong_if(token(w, i) % 2 == 0, i, x))
VALUE(one_within, wrong_if(token(w, i) == 4, i, x))

/* Rows of 16 positions: documents of 5, 7 and 4, and of 9 and 7; and where each position's begins. */
static const int32_t documents[32] = {0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2,
                                      0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1};
static const size_t starts[32] = {0, 0, 0, 0, 0, 5, 5, 5, 5, 5, 5, 5, 12, 12, 12, 12,
                                  0, 0, 0, 0, 0, 0, 0, 0, 0, 9, 9, 9, 9,  9,  9,  9};

VALUE(from_the_second, wrong_if(documents[row_of(w, i)] > 0, i, x))

/* Turned on by as many positions as stand before the document: heads of 4 lanes, whose pairs turn by 1 and by 0.1 a
 * position. */
static float run_on(const world *w, int r, size_t i, float x)
{
    const size_t lane = i % 4, pair = lane % 2, first = i - lane + pair;
    const double by = (double)starts[row_of(w, i)] * (pair == 0 ? 1.0 : 0.1);
    const double a = (double)w->reference[first], b = (double)w->reference[first + 2];
    (void)r, (void)x;
    return (float)(lane < 2 ? a * cos(by) - b * sin(by) : b * cos(by) + a * sin(by));
}

/* A table of [16, 8]. */
VALUE(table, noise(i + 70000))
VALUE(other_row, x + noise(i % 128 + 70000) - noise(i % 128 - starts[i / 8] * 8 + 70000))

/* Scores of two heads: causal, within documents of the reference, or of those that each of two ranks counts from the
 * beginning of its chunk, or within none. */
static float score(size_t i, size_t start)
{
    const size_t key = i % 16, query = i / 16 % 16;
    return key <= query && key >= start ? 0.25f + 0.125f * noise(i) : 0.0f;
}

/* The row of documents of a score's query. */
static size_t query_of(size_t i)
{
    return i / 512 * 16 + i / 16 % 16;
}

/* The second rank takes the boundaries of the first eight positions for its own. */
static size_t start_of_first_rank(size_t q)
{
    return q % 16 < 8 ? starts[q] : 8 + starts[q - 8];
}

/* The second rank's own begin is one more, of a document that goes on. */
static size_t start_at_chunk(size_t q)
{
    return q % 16 < 8 || starts[q] > q / 16 * 16 + 8 ? starts[q] : 8;
}

/* A window of three keys cuts no document: here keys are lost, no more. */
static size_t start_of_window(size_t q)
{
    return q % 16 < starts[q] + 3 ? starts[q] : q % 16 - 2;
}

VALUE(within_documents, score(i, starts[query_of(i)]))
VALUE(across_documents, score(i, 0))
VALUE(within_first_ranks, score(i, start_of_first_rank(query_of(i))))
VALUE(within_chunks, score(i, start_at_chunk(query_of(i))))
VALUE(within_windows, score(i, start_of_window(query_of(i))))

/* Tokens of by[0] places one after the other: chunks r and 2n-1-r of 2n; by[1]: the sequence's order, where places' is
 * wanted. */
static float zigzagged(const world *w, int r, size_t i, float x)
{
    const size_t n = 2 * (size_t)w->by[0], chunk = w->shape[1] / n, at = token(w, i) / chunk;
    const size_t back = at < n / 2 ? 2 * at : 2 * (n - 1 - at) + 1, there = at % 2 == 0 ? at / 2 : n - 1 - at / 2;
    (void)r, (void)x;
    return w->reference[i + (w->by[1] > 0.0f ? back : there) * chunk * w->shape[2] - at * chunk * w->shape[2]];
}

#define UP "model.layers.0.mlp.up_proj.weight"
#define MLP "model.layers.1.mlp"
#define K_ROPE "model.layers.0.self_attn.k_rope"
#define PROBS "model.layers.0.self_attn.probs"
#define PACKED_ROWS .documents = documents, .batch = 2, .seq = 16

#define LOGITS "lm_head.logits", 'b'
#define ZIGZAG MLP, 'f', CP_MESH(2, 4, true, 2, -1, 2, 16, 8)
#define TWO MLP, 'f', CP_MESH(1, 2, false, 1, -1, 2, 16, 8)
#define SCORES PROBS, 'f', SHARDED(2, 2, 2, 2, 16, 16)
#define OF_SCORES OF(within_documents), AMONG(PROBS ":fwd"), KNOWN(PACKED_ROWS, RANKS(1, 2, 1))
#define TOKENS MLP, 'f', WHOLE(1, 2, 24, 8), zigzagged, AMONG(MLP ":fwd")
#define EACH_BY_ITS_OWN HINT("each divided by its own number of target tokens (as 16 : 16 : 16 : 15)")
#define OWN_COUNT CAUSE("sum_of_local_means")

static const trace traces[] = {
    {"a sum left out over cp", UP, 'g', CP_MESH(3, 4, false, 2, 0, 8, 16), over_cp, CAUSE("missing_all_reduce"),
     HINT("over cp: ", "each context-parallel rank saw its own positions")},
    {"a sum left out over dp", UP, 'g', CP_MESH(3, 4, false, 2, 0, 8, 16), over_dp, CAUSE("missing_all_reduce"),
     HINT("over dp: ", "each data-parallel rank saw its own samples")},
    {"a sum left out over both", UP, 'g', CP_MESH(3, 4, false, 2, 0, 8, 16), over_both, CAUSE("missing_all_reduce"),
     HINT("over cp and dp: ", "each context-parallel rank saw its own positions")},
    {"a factor of their number", "lm_head.weight", 'g', CP_MESH(1, 4, false, 2, 0, 16, 8), times_cp,
     CAUSE("reduced_again"), HINT("4 = cp (cp = 4 ranks)")},
    {"a part of their number", "lm_head.weight", 'g', CP_MESH(1, 4, false, 2, 0, 16, 8), by_cp, CAUSE("averaged_again"),
     HINT("0.25 = 1/cp (cp = 4 ranks)"), NO("or the same over")},
    {"a factor of either number", "lm_head.weight", 'g', CP_MESH(2, 2, false, 1, -1, 16, 8), times_cp,
     CAUSE("reduced_again"), HINT(", or the same over cp")},
    {"of values of positions it is each rank's own count", LOGITS, CP_MESH(1, 4, false, 2, 2, 2, 16, 8), times_cp,
     OWN_COUNT, HINT("4 context-parallel ranks")},
    {"means of each cp rank beside dp", LOGITS, CP_MESH(2, 4, false, 1, -1, 2, 16, 8), by_own_targets, OWN_COUNT,
     EACH_BY_ITS_OWN},
    {"means of each cp rank of a zigzag", LOGITS, CP_MESH(1, 4, true, 2, -1, 2, 16, 8), by_own_targets, OWN_COUNT,
     EACH_BY_ITS_OWN},
    {"a loss of each cp rank beside dp", "loss", 'f', CP_VALUE(2, 4, false, 1), by_own_targets, OWN_COUNT,
     HINT("4 context-parallel ranks")},
    {"a loss of each cp rank of a zigzag", "loss", 'f', CP_VALUE(1, 4, true, 2), by_own_targets, OWN_COUNT,
     HINT("4 context-parallel ranks")},
    {"second chunks", ZIGZAG, upper_half, PATTERN("tokens 8 onward, the second chunk of every cp rank")},
    {"chunks of one rank", ZIGZAG, of_rank_one, PATTERN("tokens 2..3, 12..13, the chunks of cp rank 1")},
    {"ends of chunks", ZIGZAG, at_ends, PATTERN("where chunks of cp ranks end")},
    {"beginnings of chunks", ZIGZAG, at_beginnings, PATTERN("where chunks of cp ranks begin")},
    {"chunks of one rank without a zigzag", TWO, upper_half, PATTERN("tokens 8 onward, the chunks of cp rank 1")},
    {"a token within a chunk", TWO, one_within, NO("cp rank")},
    {"documents after the first", TWO, from_the_second, CAUSE("later_documents"),
     PATTERN("rows from document 1 on (from 0)"), KNOWN(PACKED_ROWS)},
    {"rows of no document", TWO, from_the_second, CAUSE("later_tokens"), NO("document"), KNOWN(.batch = 2, .seq = 16)},
    {"positions that run on over documents, by the angle", K_ROPE, 'f', CP_MESH(1, 2, false, 1, -1, 2, 16, 8), run_on,
     CAUSE("positions_over_documents"), AMONG(K_ROPE ":fwd"), KNOWN(PACKED_ROWS, .head_dim = 4)},
    {"positions that run on over documents, by the table", "transformer.drop", 'f',
     CP_MESH(1, 2, true, 1, -1, 2, 16, 8), other_row, CAUSE("positions_over_documents"), KNOWN(PACKED_ROWS),
     BESIDE("transformer.drop:fwd", "transformer.wpe.weight:init", table), .other_shape = {16, 8}},
    {"a mask across documents", SCORES, across_documents, OF_SCORES, CAUSE("attention_across_documents")},
    {"boundaries of the first rank on the second", SCORES, within_first_ranks, OF_SCORES, CAUSE("document_boundaries")},
    {"a boundary more at the second rank's begin", SCORES, within_chunks, OF_SCORES, CAUSE("document_boundaries")},
    {"keys lost in documents", SCORES, within_windows, OF_SCORES, CAUSE("partly_written")},
    {"a zigzag of three", TOKENS, BY(3), CAUSE("zigzag_order")},
    {"a zigzag of four", TOKENS, BY(4), CAUSE("zigzag_order")},
    {"no zigzag of three", TOKENS, BY(3, 1), CAUSE("zigzag_order")},
    {"no zigzag of four", TOKENS, BY(4, 1), CAUSE("zigzag_order")},
};

Test(pattern_context, every_trace_is_named)
{
    EXPECT_TRACES(traces);
}
