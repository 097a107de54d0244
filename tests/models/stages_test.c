/* SPDX-License-Identifier: Apache-2.0 */
/* Which layers the stages of a pipeline have, and what its ranks are called. */
#include "anyrank/config.h"
#include "ref/models/parallel_private.h"
#include "ref/models/stages.h"
#include "ref/pipeline/schedule_private.h"
#include "ref/placement/context_private.h"
#include "support/together.h"

/* "3,5,4" of so many layers over n stages. */
static void expect_counts(size_t layers, size_t n, const char *expected)
{
    ar_stages s = {.n = (int)n};
    char text[ARI_STAGES_TEXT];
    size_t next = 0;
    for (size_t i = 0; i < n; i++) {
        size_t first, count;
        ari_stage_layers(&first, &count, NULL, layers, n, i);
        cr_expect_eq(first, next, "stage %zu of %zu", i, n);
        next += count;
        s.layers[i] = (uint16_t)count;
    }
    cr_expect_eq(next, layers);
    ari_stages_text(text, &s);
    cr_expect_str_eq(text, expected);
}

CLAIM(layers_left_over_go_to_the_middle)
{
    expect_counts(8, 4, "2,2,2,2");
    expect_counts(7, 3, "2,3,2");
    expect_counts(8, 3, "3,3,2");
    expect_counts(4, 4, "1,1,1,1");
    expect_counts(126, 16, "7,8,8,8,8,8,8,8,8,8,8,8,8,8,8,7"); /* Llama 3, arXiv:2407.21783, section 3.3.2 */
}

CLAIM(stages_that_no_model_has_are_refused)
{
    const ar_config c = {.arch = AR_ARCH_LLAMA, .layers = 8, .final_norm = true};
    const ar_parallel short_of = {.pp = 3, .stages = {3, {3, 2, 2}}}, empty = {.pp = 3, .stages = {3, {4, 0, 4}}};
    cr_expect_refused(ari_stages_check(&(ar_parallel){.pp = 9}, &c), AR_ERR_INDIVISIBLE, "8 layers");
    cr_expect_refused(ari_stages_check(&short_of, &c), AR_ERR_ARG, "are 7; the model has 8");
    cr_expect_refused(ari_stages_check(&empty, &c), AR_ERR_ARG, "stage 1 has no layers");
}

static void expect_rank(const ar_parallel *p, size_t layers, int rank, const char *expected)
{
    char text[AR_RANK_TEXT];
    ari_parallel_rank_text(text, p, layers, rank);
    cr_expect_str_eq(text, expected);
}

CLAIM(a_rank_is_called_by_its_place_and_its_stages)
{
    const ar_parallel flat = {.tp = 4}, two = {.pp = 2, .dp = 2, .tp = 2};
    const ar_parallel turns = {.pp = 2, .virtual_stages = 3, .cp = 2};
    const ar_parallel none = {.pp = 3, .stages = {3, {0, 1, 3}}};
    expect_rank(&flat, 4, 3, "rank 3");
    expect_rank(&two, 4, 5, "rank 5 (pp 1, dp 0, tp 1; stage 1, layers 2..3)");
    expect_rank(&two, 4, 8, "rank 8");
    expect_rank(&turns, 6, 3, "rank 3 (pp 1, dp 0, cp 1, tp 0; stages 1, 3 and 5, layers 1, 3 and 5)");
    expect_rank(&none, 4, 0, "rank 0 (pp 0, dp 0, tp 0; stage 0)");
    expect_rank(&none, 4, 1, "rank 1 (pp 1, dp 0, tp 0; stage 1, layers 0)");
    expect_rank(&none, 4, 2, "rank 2 (pp 2, dp 0, tp 0; stage 2, layers 1..3)");
}

static void expect_named(const char *message, const char *expected)
{
    const ar_parallel p = {.pp = 4, .tp = 2};
    char text[1024];
    ari_name_ranks(text, sizeof text, message, &p, 8);
    cr_expect_str_eq(text, expected);
}

#define RANK(n, pp, tp, layers) "\n  rank " #n " (pp " #pp ", dp 0, tp " #tp "; stage " #pp ", layers " layers ")"

CLAIM(a_message_says_which_stages_its_ranks_have)
{
    expect_named("rank 3 was killed before recv(F32, count 8, peer 0) 'x', message #1 of ranks 1-3\n   rank  last",
                 "rank 3 was killed before recv(F32, count 8, peer 0) 'x', message #1 of ranks 1-3" RANK(
                     3, 1, 1, "2..3") "\n   rank  last");
    expect_named("rank 0 waited 0.1 s in barrier() 'x', collective #1 of ranks 0-7, for ranks 2, 5 and 6",
                 "rank 0 waited 0.1 s in barrier() 'x', collective #1 of ranks 0-7, for ranks 2, 5 and 6" RANK(
                     0, 0, 0, "0..1") RANK(2, 1, 0, "2..3") RANK(5, 2, 1, "4..5") RANK(6, 3, 0, "6..7"));
    expect_named("no rank of them", "no rank of them");
    expect_named("the copies of ranks 0 and 4 differ",
                 "the copies of ranks 0 and 4 differ" RANK(0, 0, 0, "0..1") RANK(4, 2, 0, "4..5"));
    expect_named("ranks 1 and 1", "ranks 1 and 1" RANK(1, 0, 1, "0..1"));
    expect_named("rank 99999999999999999999 and rank 9", "rank 99999999999999999999 and rank 9");
    const ar_parallel flat = {.tp = 4};
    char text[64];
    ari_name_ranks(text, sizeof text, "rank 1 is gone", &flat, 8);
    cr_expect_str_eq(text, "rank 1 is gone");
}

static void expect_fits(const ar_parallel *p, ar_status st, const char *says)
{
    const ar_config c = {.layers = 4};
    cr_expect_eq(ari_stages_check(p, &c), st);
    cr_expect(st == AR_OK || strstr(ar_error_message(), says) != NULL, "%s", ar_error_message());
}

CLAIM(a_schedule_of_ones_own_fits_its_layout)
{
    OWNED(ari_pipeline_schedule_destroy) ar_pipeline_schedule *s = NULL, *copy = NULL;
    size_t n = 0, m = 0;
    cr_assert_ok(ari_pipeline_schedule_create(&s, AR_PP_INTERLEAVED, 2, 2, 3));
    const ar_parallel fits = {.pp = 2, .virtual_stages = 2, .micro_batches = 3, .own_schedule = s};
    expect_fits(&fits, AR_OK, "");
    expect_fits(&(ar_parallel){.pp = 4, .micro_batches = 3, .own_schedule = s}, AR_ERR_ARG,
                "one of 2 ranks, 4 stages and 3 micro-batches, the layout (pp=4) of 4 ranks, 4 stages");
    expect_fits(&(ar_parallel){.pp = 2, .micro_batches = 3, .own_schedule = s}, AR_ERR_ARG, "2 stages");
    expect_fits(&(ar_parallel){.pp = 2, .virtual_stages = 2, .own_schedule = s}, AR_ERR_ARG, "1 micro-batches");
    expect_fits(&(ar_parallel){.own_schedule = s}, AR_ERR_ARG, "a schedule without a pipeline");
    cr_assert_ok(ari_parallel_schedule(&copy, &fits));
    const ar_pp_operation *a = ari_pipeline_schedule_rank(s, 1, &n), *b = ari_pipeline_schedule_rank(copy, 1, &m);
    cr_expect(a != b && n == m && memcmp(a, b, n * sizeof *a) == 0);
}

EVERY_CLAIM(stages)
