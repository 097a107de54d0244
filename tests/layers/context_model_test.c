/* SPDX-License-Identifier: Apache-2.0 */
/* Models whose sequences context-parallel ranks share: every tensor, the loss and every gradient have the bits of the
 * independent baseline's, and stand where it has them. Without layers they have all but the attention: embedding,
 * positions, dropout, norm, LM head, loss. */
#include "support/match.h"
#include "tests/support/test.h"

enum { B = 3, S = 8 };
static const int64_t ids[B * S] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 1, 2};
/* Targets at the edges of chunks of 1, 2 and 4 positions, and ignored ones beside them. */
static const int64_t labels[B * S] = {3, 1, -100, 4, 5,    -100, 7,    8,    9, 10,   0, 1,
                                      2, 3, 4,    5, -100, 7,    -100, -100, 1, -100, 0, 2};
static const ar_batch plain = {.batch = B, .seq = S, .input_ids = ids};

static const ar_parallel layouts[] = {
    {.tp = 1, .cp = 2},
    {.tp = 1, .cp = 4},
    {.tp = 1, .cp = 2, .zigzag = true},
    {.tp = 1, .cp = 4, .zigzag = true},
    {.tp = 1, .cp = 2, .cp_inner = 2},
    {.tp = 1, .cp = 4, .cp_inner = 2, .zigzag = true, .micro_batches = 2},
    {.tp = 2, .cp = 2, .zigzag = true, .dp = 2},
    {.tp = 2, .cp = 2, .sp = true, .cp_inner = 2, .dp = 2},
    {.tp = 2, .cp = 4, .sp = true, .dp = 2, .micro_batches = 2},
};

/* Every layout of a case. */
static void expect_same_bits(const match_case *c)
{
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        const int tp[] = {layouts[i].tp, 0};
        match_case m = *c;
        m.run.parallel = layouts[i];
        cr_expect_eq(match(&m, tp, NULL), AR_OK, "arch %d, layout %zu: %s", (int)c->config.arch, i, ar_error_message());
    }
}

Test(context_model, all_but_the_attention_has_the_baselines_bits)
{
    for (int arch = AR_ARCH_LLAMA; arch <= AR_ARCH_STACK; arch++) {
        const match_case c = {.config = match_config((ar_arch)arch, 0), .batch = plain, .seed = 5, .run.dropout = 0.2};
        expect_same_bits(&c);
    }
}

/* The labels that a position predicts may be another rank's, and a document may end at a chunk's edge. */
Test(context_model, labels_and_documents_that_cross_a_chunk_have_the_baselines_bits)
{
    const ar_batch labelled = {.batch = B, .seq = S, .input_ids = ids, .labels = labels};
    for (int arch = AR_ARCH_LLAMA; arch <= AR_ARCH_GPT2; arch++) {
        const match_case c = {.config = match_config((ar_arch)arch, 0), .batch = labelled, .seed = 6};
        expect_same_bits(&c);
    }
}
