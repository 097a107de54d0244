/* SPDX-License-Identifier: Apache-2.0 */
/* Sequence parallelism: between the regions a rank holds its positions of every sequence, and nothing changes: every
 * tensor has the baseline's bits, whatever the number of samples, of ranks, and what is kept for the backward pass; and
 * in how many chunks collectives go beside products. */
#include "support/match.h"
#include "tests/support/test.h"

/* A case on 1, 2 and 4 ranks, its gathered inputs kept and not, at once and in three chunks: of 4 positions 2 and 2, of
 * 2 positions 1 and 1. */
static void expect_match(match_case *c)
{
    static const int tps[] = {1, 2, 4, 0}, chunked[] = {2, 4, 0};
    ar_parallel *const p = &c->run.parallel;
    p->sp = true;
    for (int i = 0; i < 4; i++) {
        p->keep_gathered = i % 2;
        p->overlap = i < 2 ? 1 : 3;
        cr_assert_eq(match(c, i < 2 ? tps : chunked, NULL), AR_OK, "b=%zu s=%zu keep=%d overlap=%d: %s", c->batch.batch,
                     c->batch.seq, p->keep_gathered, p->overlap, ar_error_message());
    }
}

static void fill_ids(int64_t *ids, size_t n)
{
    for (size_t i = 0; i < n; i++)
        ids[i] = (int64_t)(i * i * 7 + i) % 11;
}

Test(sequence_parallel, models_of_every_architecture_have_the_baselines_bits)
{
    int64_t ids[3 * 8];
    fill_ids(ids, 3 * 8);
    for (int arch = 0; arch < 3; arch++) {
        for (size_t batch = 1; batch <= 3; batch += 2) {
            match_case c = {.config = match_config((ar_arch)arch, 2), .batch = {batch, 8, ids}, .seed = 3};
            expect_match(&c);
        }
    }
}

/* Three ranks: heads, the MLP and positions of six; a vocabulary that does not divide. */
Test(sequence_parallel, three_ranks_share_out_what_three_divides)
{
    static const int tps[] = {3, 0};
    int64_t ids[2 * 6];
    fill_ids(ids, 2 * 6);
    for (int arch = 0; arch < 3; arch++) {
        match_case c = {.config = match_config((ar_arch)arch, 1),
                        .batch = {2, 6, ids},
                        .seed = 5,
                        .run.parallel = {.sp = true, .overlap = 2}};
        c.config.heads = c.config.kv_heads = 3;
        c.config.ffn = 9;
        cr_assert_ok(match(&c, tps, NULL));
    }
}

/* The chunks of 3 positions, 2 and 1, under schedules of the ranks and of their queues. */
Test(sequence_parallel, every_schedule_of_chunks_has_the_baselines_bits)
{
    static const int tps[] = {2, 0};
    int64_t ids[2 * 6];
    fill_ids(ids, 2 * 6);
    match_case c = {.config = match_config(AR_ARCH_LLAMA, 1),
                    .batch = {2, 6, ids},
                    .seed = 7,
                    .run = {.parallel = {.sp = true, .overlap = 2}, .sim.explore = true}};
    uint64_t *const seed = &c.run.sim.schedule_seed;
    for (*seed = 1; *seed <= 12; ++*seed)
        cr_assert_eq(match(&c, tps, NULL), AR_OK, "schedule %d: %s", (int)*seed, ar_error_message());
}
