/* SPDX-License-Identifier: Apache-2.0 */
/* What differences over context-parallel ranks and packed documents look like. */
#include "support/together.h"
#include "tests/verify/pattern_support.h"

TestSuite(pattern_context, .timeout = 60);

static int cp_rank(const world *w, int r)
{
    return r / w->d.tp % w->d.cp;
}

static int data_rank(const world *w, int r)
{
    return r / w->d.tp / w->d.cp;
}

/* --- gradients ---------------------------------------------------------------------------------------------------- */

/* Each of n parts of a sum has as much of it as its number says, and something of its own; all of them add up. */
static float part_of(size_t i, float x, int part, int n)
{
    const float own = 0.25f * noise(i * 64 + (size_t)part + 1),
                last = 0.25f * noise(i * 64 + (size_t)(part + 1) % (size_t)n + 1);
    return x / (float)n + own - last;
}

static float over_cp(const world *w, int r, size_t i, float x)
{
    return part_of(i, x, cp_rank(w, r), w->d.cp);
}

static float over_both(const world *w, int r, size_t i, float x)
{
    return part_of(i, x, data_rank(w, r) * w->d.cp + cp_rank(w, r), w->d.cp * w->d.dp);
}

static float over_dp(const world *w, int r, size_t i, float x)
{
    return part_of(i, x, data_rank(w, r), w->d.dp);
}

static void a_sum_left_out_names_the_axes(void)
{
    static const struct {
        float (*f)(const world *, int, size_t, float);
        const char *over, *seen;
    } cases[] = {{over_cp, "over cp: ", "each context-parallel rank saw its own positions"},
                 {over_dp, "over dp: ", "each data-parallel rank saw its own samples"},
                 {over_both, "over cp and dp: ", "each context-parallel rank saw its own positions"}};
    const ar_parallel p = {.dp = 3, .cp = 4, .tp = 2};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        world w;
        parallel_mesh(&w, "model.layers.0.mlp.up_proj.weight", 'g', &p, 2, SHAPE(8, 16), 0);
        spoil(&w, cases[i].f);
        expect_cause(&w, "missing_all_reduce");
        expect_hint(&w, cases[i].over);
        expect_hint(&w, cases[i].seen);
        world_free(&w);
    }
}

/* --- factors ------------------------------------------------------------------------------------------------------ */

static float times_cp(const world *w, int r, size_t i, float x)
{
    (void)r, (void)i;
    return x * (float)w->d.cp;
}

static float by_cp(const world *w, int r, size_t i, float x)
{
    (void)r, (void)i;
    return x / (float)w->d.cp;
}

static void a_factor_of_their_number_is_named(void)
{
    world w;
    parallel_mesh(&w, "lm_head.weight", 'g', &(ar_parallel){.cp = 4, .tp = 2}, 2, SHAPE(16, 8), 0);
    spoil(&w, times_cp);
    expect_cause(&w, "reduced_again");
    expect_hint(&w, "4 = cp (cp = 4 ranks)");
    spoil(&w, by_cp);
    expect_cause(&w, "averaged_again");
    expect_hint(&w, "0.25 = 1/cp (cp = 4 ranks)");
    expect_no_hint(&w, "or the same over");
    world_free(&w);
    parallel_mesh(&w, "lm_head.weight", 'g', &(ar_parallel){.dp = 2, .cp = 2}, 2, SHAPE(16, 8), -1);
    spoil(&w, times_cp);
    expect_hint(&w, ", or the same over cp");
    world_free(&w);
    /* Of values of positions it is each rank's own count. */
    parallel_mesh(&w, "lm_head.logits", 'b', &(ar_parallel){.cp = 4, .tp = 2}, 3, SHAPE(2, 16, 8), 2);
    spoil(&w, times_cp);
    expect_cause(&w, "sum_of_local_means");
    expect_hint(&w, "4 context-parallel ranks");
    world_free(&w);
}

/* Of 63 targets the last rank has 15, the others 16. */
static float by_own_targets(const world *w, int r, size_t i, float x)
{
    (void)i;
    return x * 63.0f / (cp_rank(w, r) == w->d.cp - 1 ? 15.0f : 16.0f);
}

static void means_of_each_rank_are_told_from_one_mean(void)
{
    static const ar_parallel layouts[] = {{.cp = 4}, {.dp = 2, .cp = 4}, {.cp = 4, .zigzag = true, .tp = 2}};
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        world w;
        parallel_mesh(&w, "lm_head.logits", 'b', &layouts[i], 3, SHAPE(2, 16, 8), -1);
        spoil(&w, by_own_targets);
        expect_cause(&w, "sum_of_local_means");
        expect_hint(&w, "each of the 4 context-parallel ranks divided by its own number of target tokens");
        world_free(&w);
        parallel_mesh(&w, "loss", 'f', &layouts[i], 0, SHAPE(1), -1);
        spoil(&w, by_own_targets);
        expect_cause(&w, "sum_of_local_means");
        expect_hint(&w, "4 context-parallel ranks");
        world_free(&w);
    }
}

/* --- chunks ------------------------------------------------------------------------------------------------------- */

static void spoil_tokens(world *w, bool (*off)(size_t token))
{
    world_refresh(w);
    for (int r = 0; r < w->d.ranks; r++) {
        for (size_t i = 0; i < w->count; i++) {
            if (at(w, r, i) && off(i / w->shape[2] % w->shape[1]))
                *at(w, r, i) = 3.0f * noise(i + 5000);
        }
    }
}

static bool upper_half(size_t token)
{
    return token >= 8;
}

static bool of_rank_one(size_t token) /* of the four of a zigzag */
{
    return token / 2 == 1 || token / 2 == 6;
}

static bool at_ends(size_t token)
{
    return token % 2 == 1;
}

static bool at_beginnings(size_t token)
{
    return token % 2 == 0;
}

static bool one_within(size_t token)
{
    return token == 4;
}

static void tokens_are_named_by_the_chunks_that_they_are(void)
{
    world w;
    parallel_mesh(&w, "model.layers.1.mlp", 'f', &(ar_parallel){.dp = 2, .cp = 4, .zigzag = true, .tp = 2}, 3,
                  SHAPE(2, 16, 8), -1);
    spoil_tokens(&w, upper_half);
    expect_pattern(&w, "tokens 8 onward, the second chunk of every cp rank");
    spoil_tokens(&w, of_rank_one);
    expect_pattern(&w, "tokens 2..3, 12..13, the chunks of cp rank 1");
    spoil_tokens(&w, at_ends);
    expect_pattern(&w, "where chunks of cp ranks end");
    spoil_tokens(&w, at_beginnings);
    expect_pattern(&w, "where chunks of cp ranks begin");
    world_free(&w);
    parallel_mesh(&w, "model.layers.1.mlp", 'f', &(ar_parallel){.cp = 2}, 3, SHAPE(2, 16, 8), -1);
    spoil_tokens(&w, upper_half);
    expect_pattern(&w, "tokens 8 onward, the chunks of cp rank 1");
    spoil_tokens(&w, one_within);
    const ari_diagnosis p = found(&w);
    cr_expect(!strstr(p.pattern, "cp rank"), "%s", p.pattern);
    world_free(&w);
}

/* --- documents ---------------------------------------------------------------------------------------------------- */

/* Rows of 16 positions: documents of 5, 7 and 4, and of 9 and 7. */
static int32_t documents[2 * 16];
static size_t starts[2 * 16];

static void pack(world *w)
{
    static const size_t first[2][3] = {{0, 5, 12}, {0, 9, 16}};
    for (size_t i = 0; i < 32; i++) {
        for (size_t k = 0; k < 3; k++) {
            if (i % 16 >= first[i / 16][k]) {
                documents[i] = (int32_t)k;
                starts[i] = first[i / 16][k];
            }
        }
    }
    w->d.documents = documents;
    w->d.batch = 2;
    w->d.seq = 16;
}

/* Turned on by as many positions as stand before the document. */
static float run_on(const world *w, int r, size_t i, float x)
{
    const size_t token = i / w->shape[2], head = 4, at = i % head, pair = at % 2, start = i - at + pair;
    const double by = (double)starts[token] * (pair == 0 ? 1.0 : 0.1);
    const double a = (double)w->reference[start], b = (double)w->reference[start + 2];
    (void)r, (void)x;
    return (float)(at < 2 ? a * cos(by) - b * sin(by) : b * cos(by) + a * sin(by));
}

static float from_the_second(const world *w, int r, size_t i, float x)
{
    (void)r;
    return starts[i / w->shape[2]] > 0 ? 3.0f * noise(i + 900) : x;
}

static void documents_after_the_first_are_told(void)
{
    world w;
    parallel_mesh(&w, "model.layers.1.mlp", 'f', &(ar_parallel){.cp = 2}, 3, SHAPE(2, 16, 8), -1);
    pack(&w);
    spoil(&w, from_the_second);
    expect_cause(&w, "later_documents");
    expect_pattern(&w, "rows from document 1 on (from 0)");
    w.d.documents = NULL;
    const ari_diagnosis p = found(&w);
    cr_expect(!strstr(p.pattern, "document") && strcmp(cause_of(&p), "later_documents") != 0, "%s", p.pattern);
    world_free(&w);
}

/* Heads of 4 lanes, whose pairs turn by 1 and by 0.1 a position. */
static void positions_that_run_on_over_documents_are_told_by_the_angle(void)
{
    world w;
    parallel_mesh(&w, "model.layers.0.self_attn.k_rope", 'f', &(ar_parallel){.cp = 2}, 3, SHAPE(2, 16, 8), -1);
    pack(&w);
    w.d.head_dim = 4;
    spoil(&w, run_on);
    expect_beside(&w, "model.layers.0.self_attn.k_rope:fwd", NULL, "positions_over_documents");
    world_free(&w);
}

static float table[16 * 8];

static float other_row(const world *w, int r, size_t i, float x)
{
    const size_t token = i / 8, position = token % 16;
    (void)w, (void)r;
    return x + table[position * 8 + i % 8] - table[(position - starts[token]) * 8 + i % 8];
}

static void positions_that_run_on_over_documents_are_told_by_the_table(void)
{
    const ar_dump_tensor weight = {.name = "transformer.wpe.weight:init",
                                   .dtype = AR_F32,
                                   .ndim = 2,
                                   .shape = {16, 8},
                                   .count = 128,
                                   .whole = table};
    world w;
    for (size_t i = 0; i < 128; i++)
        table[i] = noise(i + 70000);
    parallel_mesh(&w, "transformer.drop", 'f', &(ar_parallel){.cp = 2, .zigzag = true}, 3, SHAPE(2, 16, 8), -1);
    pack(&w);
    spoil(&w, other_row);
    expect_beside(&w, "transformer.drop:fwd", &weight, "positions_over_documents");
    world_free(&w);
}

/* Scores of two heads: causal, within documents of the reference, or of those that each of two ranks counts from the
 * beginning of its chunk, or within none. */
static bool is_seen(size_t query, size_t key, const size_t *start)
{
    return key <= query && (!start || key >= start[query]);
}

static void score(world *w, const size_t *there, const size_t *here)
{
    for (size_t i = 0; i < w->count; i++) {
        const size_t key = i % 16, query = i / 16 % 16, sample = i / 512;
        const float x = 0.25f + 0.125f * noise(i);
        w->reference[i] = is_seen(query, key, there + sample * 16) ? x : 0.0f;
        *at(w, query < 8 ? 0 : 1, i) = is_seen(query, key, here ? here + sample * 16 : NULL) ? x : 0.0f;
    }
}

static void masks_across_documents_are_told_from_boundaries_elsewhere(void)
{
    size_t local[32];
    world w;
    world_begin(&w, "model.layers.0.self_attn.probs", 'f', 2, 4, SHAPE(2, 2, 16, 16));
    w.d.tp = w.d.dp = 1;
    w.d.cp = 2;
    for (int r = 0; r < 2; r++)
        cr_assert_eq(ar_layout_shard(&w.layout[r], 4, w.shape, 2, r, 2), AR_OK);
    pack(&w);
    world_end(&w);
    for (size_t i = 0; i < 32; i++) /* the second rank takes the boundaries of the first eight positions for its own */
        local[i] = i % 16 < 8 ? starts[i] : 8 + starts[i - 8];
    score(&w, starts, NULL);
    expect_beside(&w, "model.layers.0.self_attn.probs:fwd", NULL, "attention_across_documents");
    score(&w, starts, local);
    expect_beside(&w, "model.layers.0.self_attn.probs:fwd", NULL, "document_boundaries");
    for (size_t i = 0; i < 32; i++) /* its own begin is one more, of a document that goes on */
        local[i] = i % 16 < 8 || starts[i] > i / 16 * 16 + 8 ? starts[i] : 8;
    score(&w, starts, local);
    expect_beside(&w, "model.layers.0.self_attn.probs:fwd", NULL, "document_boundaries");
    for (size_t i = 0; i < 32; i++) /* a window of three keys cuts no document: here keys are lost, no more */
        local[i] = i % 16 < starts[i] + 3 ? starts[i] : i % 16 - 2;
    score(&w, starts, local);
    expect_beside(&w, "model.layers.0.self_attn.probs:fwd", NULL, "partly_written");
    world_free(&w);
}

/* --- order -------------------------------------------------------------------------------------------------------- */

/* Tokens of places one after the other: chunks r and 2n-1-r of 2n; back: the sequence's order, where places' is
 * wanted. */
static float zigzagged(const world *w, int places, size_t i, bool back)
{
    const size_t n = 2 * (size_t)places, chunk = w->shape[1] / n, token = i / w->shape[2] % w->shape[1];
    const size_t at = token / chunk;
    const size_t to = back ? (at < n / 2 ? 2 * at : 2 * (n - 1 - at) + 1) : at % 2 == 0 ? at / 2 : n - 1 - at / 2;
    return w->reference[i + (to * chunk + token % chunk) * w->shape[2] - token * w->shape[2]];
}

static void the_order_of_a_zigzag_is_named(void)
{
    for (int places = 2; places <= 4; places++) {
        for (int back = 0; back < 2; back++) {
            world w;
            replicated(&w, "model.layers.1.mlp", 'f', 1, 3, SHAPE(2, 24, 8));
            for (size_t i = 0; i < w.count; i++)
                *at(&w, 0, i) = zigzagged(&w, places, i, back == 1);
            expect_beside(&w, "model.layers.1.mlp:fwd", NULL, "zigzag_order");
            world_free(&w);
        }
    }
}

Test(pattern_context, every_claim)
{
    TOGETHER(a_sum_left_out_names_the_axes, a_factor_of_their_number_is_named,
             means_of_each_rank_are_told_from_one_mean, tokens_are_named_by_the_chunks_that_they_are,
             documents_after_the_first_are_told, positions_that_run_on_over_documents_are_told_by_the_angle,
             positions_that_run_on_over_documents_are_told_by_the_table,
             masks_across_documents_are_told_from_boundaries_elsewhere, the_order_of_a_zigzag_is_named);
}
