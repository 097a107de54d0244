/* SPDX-License-Identifier: Apache-2.0 */
/* Samples of several parts, of each of which a matrix's gradient is rounded (ari_gradient_parts): bits, calls, bytes and
 * memory where every part is one rank's, where ranks share parts, and where a rank has nothing of some. */
#include "ref/placement/parallel_private.h"
#include "tests/verify/support.h"

#define MIXTRAL_OF_ONE_LAYER                                                                                \
    "{\"architectures\": [\"MixtralForCausalLM\"], \"model_type\": \"mixtral\", \"vocab_size\": 11, "       \
    "\"hidden_size\": 8, \"intermediate_size\": 48, \"num_hidden_layers\": 1, \"num_attention_heads\": 2, " \
    "\"num_key_value_heads\": 2, \"num_local_experts\": 4, \"num_experts_per_tok\": 2, "                    \
    "\"max_position_embeddings\": 8192, \"rms_norm_eps\": 1e-5, \"rope_theta\": 10000.0, \"hidden_act\": \"silu\"}"

static void check_parts(const ar_parallel *layout, size_t layouts, size_t batch, size_t seq, ar_precision precision)
{
    OWNED(end_folder) char *folder = new_model(MIXTRAL_OF_ONE_LAYER);
    ar_check_options o = check_layouts(folder, layout, layouts, batch, seq);
    o.run.precision = precision;
    OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(&o);
    expect_same(r, precision == AR_PRECISION_BF16 ? "bf16" : "f32");
}

static const ar_parallel of_two[] = {
    {.dp = 2, .tp = 2, .sp = true, .zero = 1},
    {.cp = 2}, /* a part is a rank's own */
    {.cp = 2, .zigzag = true},
    {.cp = 4}, /* half of the ranks have nothing of a part */
    {.cp = 4, .cp_inner = 2},
};

Test(long_samples, of_two_parts)
{
    check_parts(of_two, sizeof of_two / sizeof *of_two, 1, 1024, AR_PRECISION_F32);
    check_parts(of_two, sizeof of_two / sizeof *of_two, 2, 1024, AR_PRECISION_BF16);
}

static const ar_parallel of_four[] = {
    {.cp = 4}, /* a part is a rank's own */
    {.cp = 2, .zigzag = true, .dp = 2, .zero = 2},
};

Test(long_samples, whose_parts_are_the_ranks_own)
{
    check_parts(of_four, sizeof of_four / sizeof *of_four, 1, 2048, AR_PRECISION_BF16);
}

/* One rank computes the gradients of an expert and a sample, the next one those of the next. */
static const ar_parallel of_shared_experts[] = {
    {.cp = 2},
    {.cp = 4, .zigzag = true, .ep = 2},
    {.cp = 4, .ep = 2, .dp = 2, .micro_batches = 2},
    {.tp = 2, .sp = true, .etp = 1},
};

Test(long_samples, of_experts_that_ranks_share)
{
    check_parts(of_shared_experts, sizeof of_shared_experts / sizeof *of_shared_experts, 4, 16, AR_PRECISION_F32);
    check_parts(of_shared_experts, sizeof of_shared_experts / sizeof *of_shared_experts, 6, 16, AR_PRECISION_BF16);
}

Test(long_samples, are_halved_while_the_halves_are_long)
{
    static const size_t of[][2] = {{1, 1},    {1023, 1}, {1024, 2}, {1026, 2}, {1536, 2},
                                   {2048, 4}, {2050, 2}, {3072, 4}, {4096, 8}, {131072, 256}};
    for (size_t i = 0; i < sizeof of / sizeof *of; i++)
        cr_expect_eq(ari_gradient_parts(of[i][0]), of[i][1], "%zu positions", of[i][0]);
}

/* Rows that move are those that the ranks with most of a part have not; who computes it changes from sample to sample. */
Test(long_samples, are_shared_out_by_who_has_most)
{
    static const struct {
        ar_parallel p;
        size_t seq, parts, moves;
        int owner[2][2]; /* of parts 0 and 1, of samples 0 and 1 */
    } of[] = {{{.cp = 2, .zigzag = true}, 2048, 2, 0, {{0, 0}, {1, 1}}},
              {{.cp = 4}, 2048, 1, 0, {{0, 0}, {1, 1}}},
              {{.cp = 4, .zigzag = true}, 2048, 4, 1024, {{0, 1}, {3, 2}}}, /* a zigzag's chunks are half a part */
              {{.cp = 3}, 1536, 2, 512, {{0, 0}, {2, 2}}},
              {{.cp = 2}, 64, 1, 32, {{0, 1}, {0, 0}}},
              {{.cp = 4, .cp_inner = 2, .zigzag = true}, 1024, 2, 512, {{0, 2}, {3, 1}}},
              {{.cp = 1}, 1024, 2, 0, {{0, 0}, {0, 0}}}};
    for (size_t i = 0; i < sizeof of / sizeof *of; i++) {
        size_t parts = 0;
        cr_expect_eq(ari_gradient_moves(&of[i].p, of[i].seq, &parts), of[i].moves, "case %zu", i);
        cr_expect_eq(parts, of[i].parts, "case %zu: %zu", i, parts);
        for (size_t part = 0; part < ari_gradient_parts(of[i].seq) && part < 2; part++) {
            for (size_t sample = 0; sample < 2; sample++)
                cr_expect_eq(ari_gradient_part_owner(&of[i].p, of[i].seq, sample, part), of[i].owner[part][sample],
                             "case %zu: part %zu of sample %zu", i, part, sample);
        }
    }
}

/* Each rank asked for each part, as the moves are defined. */
Test(long_samples, move_what_the_ranks_with_most_lack)
{
    for (int k = 0; k < 6 * 4 * 2; k++) {
        const ar_parallel p = {.cp = (int[]){1, 2, 3, 4, 6, 12}[k / 8], .cp_inner = 1 + k / 2 % 4, .zigzag = k % 2};
        if (p.cp % p.cp_inner != 0)
            continue;
        for (size_t seq = 24; seq <= 24 * 512; seq *= 2) {
            const size_t all = ari_gradient_parts(seq), each = seq / all;
            size_t parts = 0, moved = 0;
            for (size_t part = 0; part < all; part++) {
                size_t most = 0;
                for (int rank = 0; rank < p.cp; rank++) {
                    const size_t rows = ari_gradient_part_rows(&p, seq, part, rank);
                    most = rows > most ? rows : most;
                }
                moved += each - most;
            }
            cr_expect_eq(ari_gradient_moves(&p, seq, &parts), moved, "cp %d inner %d zigzag %d seq %zu", p.cp,
                         p.cp_inner, p.zigzag, seq);
        }
    }
}
