/* SPDX-License-Identifier: Apache-2.0 */
/* What ranks report of one tensor, piece by piece: micro-batches, copies, steps, what is allowed and what is kept. */
#include "tests/verify/compare_support.h"

#include "verify/check/check_run.h"

/* --- micro-batches: a rank reports a tensor once for each --------------------------------------------------------- */

/* Rank r of two reports rows [from, to) of the full values, as copy `replica` of `replicas`. */
static void tap_some(ari_comparator *c, const float *full, size_t from, size_t to, int replica, int replicas)
{
    ar_layout o;
    cr_assert_ok(ar_layout_replicate(&o, 2, full_shape, replica, replicas));
    o.box[0].global[0] = from;
    o.box[0].extent[0] = to - from;
    tap(c, "w", full + from * COLS, &o);
}

static ari_verdict verdict_of(fixture *f)
{
    return ari_verdict_of(f->rank, RANKS, 0);
}

/* Rows 0..2 are rank 0's, 3..5 rank 1's, in pieces of one and two rows. */
Test(reports, micro_batches_forward_and_in_reverse_join_to_the_ranks_part)
{
    for (int reverse = 0; reverse < 2; reverse++) {
        SCOPED(fixture_fini) fixture f;
        fixture_init(&f);
        tap_some(&f.rank[0], f.values, reverse ? 2 : 0, reverse ? 3 : 2, 0, 1);
        tap_some(&f.rank[0], f.values, reverse ? 0 : 2, reverse ? 2 : 3, 0, 1);
        tap_some(&f.rank[1], f.values, 3, 6, 0, 1);
        const ari_verdict v = verdict_of(&f);
        cr_expect(v.complete && v.different == 0, "reverse %d", reverse);
        cr_expect(f.rank[0].finding[0].shape[0] == 3 && f.rank[0].finding[0].layout.nbox == 1);
    }
}

Test(reports, a_flipped_bit_of_any_micro_batch_is_found_with_its_place_and_its_copy_is_whole)
{
    for (size_t i = 0; i < COUNT; i++) {
        for (int reverse = 0; reverse < 2; reverse++) {
            SCOPED(fixture_fini) fixture f;
            float wrong[COUNT], *copy = NULL;
            fixture_init(&f);
            memcpy(wrong, f.values, sizeof wrong);
            wrong[i] = -wrong[i];
            for (size_t k = 0; k < 3; k++) {
                const size_t row = reverse ? 2 - k : k;
                tap_some(&f.rank[0], wrong, row, row + 1, 0, 1);
                tap_some(&f.rank[1], wrong, 3 + row, 4 + row, 0, 1);
            }
            const ari_verdict v = verdict_of(&f);
            const int owner = i < COUNT / 2 ? 0 : 1;
            cr_assert(v.complete && v.different == 1 && v.first == i && v.rank == owner, "element %zu", i);
            cr_assert_eq(v.first_local, i % (COUNT / 2), "element %zu: local %zu", i, v.first_local);
            cr_assert_ok(ari_comparator_copy(&copy, &f.rank[owner], 0));
            cr_assert_eq(memcmp(copy, wrong + (size_t)owner * COUNT / 2, sizeof wrong / 2), 0, "element %zu", i);
            free(copy);
        }
    }
}

Test(reports, a_micro_batch_that_is_missing_doubled_or_anothers_is_incomplete)
{
    static const size_t from[][4] = {
        {0, 1, 3, 4}, /* row 2 is missing */
        {0, 2, 3, 4}, /* row 1 is */
        {0, 0, 3, 4}, /* row 0 twice */
        {0, 3, 3, 4}, /* row 3 is the other rank's too */
    };
    for (size_t k = 0; k < sizeof from / sizeof *from; k++) {
        fixture f;
        fixture_init(&f);
        for (int r = 0; r < RANKS; r++) {
            tap_some(&f.rank[r], f.values, from[k][2 * r], from[k][2 * r] + 1, 0, 1);
            tap_some(&f.rank[r], f.values, from[k][2 * r + 1], from[k][2 * r + 1] + (r == 0 ? 1 : 2), 0, 1);
        }
        cr_expect(!verdict_of(&f).complete, "case %zu", k);
        fixture_fini(&f);
    }
}

Test(reports, rows_that_every_rank_holds_do_not_stand_for_those_of_nobody)
{
    SCOPED(fixture_fini) fixture f;
    fixture_init(&f);
    for (int r = 0; r < RANKS; r++)
        tap_some(&f.rank[r], f.values, 0, 3, 0, 1);
    cr_expect(!verdict_of(&f).complete);
}

/* Of two copies each must be whole: rank 0 has all of copy 0, rank 1 half of copy 1. */
Test(reports, a_copy_of_which_rows_are_missing_is_incomplete)
{
    SCOPED(fixture_fini) fixture f;
    fixture_init(&f);
    tap_some(&f.rank[0], f.values, 0, 6, 0, 2);
    tap_some(&f.rank[1], f.values, 0, 3, 1, 2);
    cr_expect(!verdict_of(&f).complete);
    tap_some(&f.rank[1], f.values, 3, 6, 1, 2);
    cr_expect(verdict_of(&f).complete);
}

Test(reports, a_rank_without_samples_reports_nothing_and_the_others_are_the_whole)
{
    SCOPED(fixture_fini) fixture f;
    fixture_init(&f);
    tap_some(&f.rank[1], f.values, 0, 6, 0, 1);
    cr_expect(verdict_of(&f).complete);
}

/* A rank may come to a later tensor first: the backward pass of one micro-batch is before the forward pass of the
 * next. */
Test(reports, copies_are_kept_of_the_first_tensors_in_execution_order_whatever_comes_first)
{
    enum { TENSORS = 7 };
    SCOPED(ari_reference_fini) ari_reference ref = {0};
    ari_comparator c;
    double wide[COUNT] = {0.0};
    float wrong[COUNT], *copy = NULL;
    ar_layout o;
    char name[16];
    for (int i = 0; i < TENSORS; i++) {
        snprintf(name, sizeof name, "w%d", i);
        cr_assert_ok(ari_reference_emit(&ref, name, 'f', 2, full_shape, wide));
    }
    cr_assert_ok(ari_reference_finish(&ref));
    cr_assert_ok(ari_comparator_init(&c, &ref, NULL));
    cr_assert_ok(ar_layout_replicate(&o, 2, full_shape, 0, 1));
    for (int i = TENSORS - 1; i >= 0; i--) {
        for (int k = 0; k < COUNT; k++)
            wrong[k] = (float)(i + 1);
        snprintf(name, sizeof name, "w%d", i);
        tap(&c, name, wrong, &o);
    }
    for (size_t i = 0; i < TENSORS; i++) {
        const ar_status st = ari_comparator_copy(&copy, &c, i);
        cr_assert_eq(st, i < ARI_KEPT_COPIES ? AR_OK : AR_ERR_NOT_FOUND, "tensor %zu", i);
        if (st != AR_OK)
            continue;
        cr_expect(copy[0] == (float)(i + 1) && copy[COUNT - 1] == (float)(i + 1), "tensor %zu", i);
        free(copy);
    }
    ari_comparator_fini(&c);
}

static void expect_coverage(fixture *f, const char *pattern, const char *hint)
{
    ar_first_difference d = {.step = 1};
    cr_expect(!verdict_of(f).complete);
    ari_explain_coverage(&d, f->rank, RANKS, 0);
    cr_expect(strstr(d.pattern, pattern), "no \"%s\" in \"%s\"", pattern, d.pattern);
    cr_expect(strstr(d.hint, hint), "no \"%s\" in \"%s\"", hint, d.hint);
    fixture_fini(f);
}

Test(reports, what_is_not_covered_once_is_told_with_what_does_that)
{
    fixture f;
    fixture_init(&f);
    expect_coverage(&f, "the ranks did not report this tensor", "was not run");
    fixture_init(&f);
    tap_some(&f.rank[0], f.values, 0, 2, 0, 1);
    tap_some(&f.rank[0], f.values, 0, 2, 0, 1);
    expect_coverage(&f, "rank 0 reported it more than once", "micro-batch went through it twice");
    fixture_init(&f);
    for (int r = 0; r < RANKS; r++)
        tap_some(&f.rank[r], f.values, 3, 6, 0, 1);
    expect_coverage(&f, "ranks 0 and 1 hold the same part", "do not form a mesh");
    fixture_init(&f);
    tap_some(&f.rank[1], f.values, 0, 6, 1, 2);
    expect_coverage(&f, "24 of 48 elements, in 2 copies", "some ranks did not run");
    fixture_init(&f);
    tap_some(&f.rank[0], f.values, 0, 3, 0, 1);
    tap_some(&f.rank[1], f.values, 3, 5, 0, 1);
    expect_coverage(&f, "20 of 24 elements, in 1 copy", "belongs to no rank");
    fixture_init(&f);
    for (int r = 0; r < RANKS; r++) {
        static const size_t other[2] = {ROWS, COLS / RANKS};
        ar_layout o;
        cr_assert_ok(ar_layout_replicate(&o, 2, other, 0, 1));
        tap(&f.rank[r], "w", f.values, &o);
    }
    cr_expect_str_eq(f.rank[1].unexpected, "w:fwd with shape [6,2], which on one rank has [6,4]");
    expect_coverage(&f, "on 2 of 2 ranks its shape is [6,2], on one rank [6,4]", "depends on the number of ranks");
}

/* --- steps and allowances ----------------------------------------------------------------------------------------- */

Test(reports, a_report_of_a_step_is_compared_with_that_steps_tensor)
{
    SCOPED(fixture_fini) fixture f;
    double later[COUNT];
    ar_layout o;
    fixture_init(&f);
    for (int r = 0; r < RANKS; r++)
        ari_comparator_fini(&f.rank[r]);
    for (int i = 0; i < COUNT; i++)
        later[i] = -1.0 - i;
    ari_reference_begin(&f.ref, 2);
    free(f.ref.by_name);
    cr_assert_ok(ari_reference_emit(&f.ref, "w", 'f', 2, full_shape, later));
    cr_assert_ok(ari_reference_finish(&f.ref));
    for (int r = 0; r < RANKS; r++)
        cr_assert_ok(ari_comparator_init(&f.rank[r], &f.ref, NULL));
    cr_assert_ok(ar_layout_replicate(&o, 2, full_shape, 0, 1));
    for (uint32_t step = 1; step <= 3; step++) {
        ar_tensor t;
        float values[COUNT];
        for (int i = 0; i < COUNT; i++)
            values[i] = step == 1 ? f.values[i] : (float)later[i];
        cr_assert_ok(ar_tensor_view(&t, AR_F32, 2, full_shape, (ar_buf){values}));
        const ar_tap_event e = {.name = "w", .pass = 'f', .step = step, .local = &t, .layout = &o};
        cr_assert_ok(ari_comparator_tap(&f.rank[0], &e));
    }
    for (size_t i = 0; i < 2; i++) {
        const ari_verdict v = ari_verdict_of(f.rank, RANKS, i);
        cr_expect(v.complete && v.different == 0, "step %zu", i + 1);
    }
    cr_expect_str_eq(f.rank[0].unexpected, "w:fwd, which the baseline does not have", "the baseline has no third step");
}

/* 0.25 is allowed: 0.125 away is a ratio of a half, 0.5 away one of two. */
Test(reports, differences_up_to_what_is_allowed_are_none_and_their_ratio_is_told)
{
    fixture f;
    float wrong[COUNT];
    fixture_init(&f);
    f.ref.tensor[0].allowed = 0.25;
    memcpy(wrong, f.values, sizeof wrong);
    wrong[9] += 0.125f;
    tap_whole(&f.rank[0], wrong, 0, RANKS);
    tap_whole(&f.rank[1], f.values, 1, RANKS);
    ari_verdict v = verdict_of(&f);
    cr_expect(v.complete && v.different == 0 && v.max_ratio == 0.5, "%g", v.max_ratio);
    fixture_fini(&f);
    fixture_init(&f);
    f.ref.tensor[0].allowed = 0.25;
    wrong[11] -= 0.5f;
    wrong[15] = NAN;
    tap_whole(&f.rank[0], f.values, 0, RANKS);
    tap_whole(&f.rank[1], wrong, 1, RANKS);
    v = verdict_of(&f);
    cr_expect(v.different == 2 && v.first == 11 && v.rank == 1 && isinf(v.max_ratio), "%zu, %g", v.different,
              v.max_ratio);
    fixture_fini(&f);
}
