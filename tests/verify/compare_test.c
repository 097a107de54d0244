/* SPDX-License-Identifier: Apache-2.0 */
/* The comparator must be able to say "different": one bit anywhere, a sign of zero, a NaN, a tensor that is not there,
 * an element that nobody holds or two ranks claim. */
#include "tests/verify/support.h"

#include <math.h>

#include "verify/check_run.h"
#include "verify/compare.h"
#include "verify/coverage.h"

enum { ROWS = 6, COLS = 4, COUNT = ROWS * COLS, RANKS = 2 };
static const size_t full_shape[2] = {ROWS, COLS};

/* A reference of one tensor "w" with values of their own, and its comparators. */
typedef struct fixture {
    ari_reference ref;
    ari_comparator rank[RANKS];
    float values[COUNT];
} fixture;

static void fixture_init(fixture *f)
{
    double wide[COUNT];
    *f = (fixture){.ref = {0}};
    for (int i = 0; i < COUNT; i++)
        wide[i] = f->values[i] = (float)(i + 1) * 0.25f;
    cr_assert_eq(ari_reference_emit(&f->ref, "w", 'f', 2, full_shape, wide), AR_OK);
    cr_assert_eq(ari_reference_finish(&f->ref), AR_OK);
    for (int r = 0; r < RANKS; r++)
        cr_assert_eq(ari_comparator_init(&f->rank[r], &f->ref, NULL), AR_OK);
}

static void fixture_fini(fixture *f)
{
    for (int r = 0; r < RANKS; r++)
        ari_comparator_fini(&f->rank[r]);
    ari_reference_fini(&f->ref);
}

static void tap(ari_comparator *c, const char *name, const float *local, const ar_layout *layout)
{
    const size_t shape[2] = {ar_layout_local(layout, 0), ar_layout_local(layout, 1)};
    float copy[COUNT];
    ar_tensor t;
    memcpy(copy, local, shape[0] * shape[1] * sizeof *copy);
    cr_assert_eq(ar_tensor_view(&t, AR_F32, 2, shape, (ar_buf){copy}), AR_OK);
    const ar_tap_event e = {.name = name, .pass = 'f', .step = 1, .local = &t, .layout = layout};
    cr_assert_eq(ari_comparator_tap(c, &e), AR_OK);
}

/* Rank r of `parts` reports rows of the full values. */
static void tap_rows(ari_comparator *c, const float *full, int part, int parts)
{
    ar_layout o;
    cr_assert_eq(ar_layout_shard(&o, 2, full_shape, 0, part, parts), AR_OK);
    tap(c, "w", full + (size_t)part * COUNT / (size_t)parts, &o);
}

static void tap_whole(ari_comparator *c, const float *full, int replica, int replicas)
{
    ar_layout o;
    cr_assert_eq(ar_layout_replicate(&o, 2, full_shape, replica, replicas), AR_OK);
    tap(c, "w", full, &o);
}

TestSuite(compare, .timeout = 60);

Test(compare, equal_shards_are_complete_and_the_same)
{
    fixture f;
    fixture_init(&f);
    for (int r = 0; r < RANKS; r++)
        tap_rows(&f.rank[r], f.values, r, RANKS);
    const ari_verdict v = ari_verdict_of(f.rank, RANKS, 0);
    cr_expect(v.complete && v.different == 0 && v.rank == -1 && v.max_ulp == 0);
    fixture_fini(&f);
}

Test(compare, any_single_flipped_bit_is_found_with_its_place)
{
    for (size_t i = 0; i < COUNT; i++) {
        for (unsigned bit = 0; bit < 32; bit++) {
            fixture f;
            float wrong[COUNT];
            uint32_t u = 0;
            fixture_init(&f);
            memcpy(wrong, f.values, sizeof wrong);
            memcpy(&u, &wrong[i], sizeof u);
            u ^= 1u << bit;
            memcpy(&wrong[i], &u, sizeof u);
            for (int r = 0; r < RANKS; r++)
                tap_rows(&f.rank[r], wrong, r, RANKS);
            const ari_verdict v = ari_verdict_of(f.rank, RANKS, 0);
            cr_assert(v.complete && v.different == 1 && v.first == i, "element %zu, bit %u", i, bit);
            cr_assert_eq(v.rank, (int)(i / (COUNT / RANKS)));
            cr_assert_eq(v.first_local, i % (COUNT / RANKS));
            cr_assert(memcmp(&v.actual, &wrong[i], sizeof v.actual) == 0 && v.max_ulp > 0);
            fixture_fini(&f);
        }
    }
}

Test(compare, the_lowest_index_and_of_copies_the_lowest_rank_is_told)
{
    fixture f;
    float wrong[COUNT];
    fixture_init(&f);
    memcpy(wrong, f.values, sizeof wrong);
    wrong[7] = wrong[20] = 100.0f;
    for (int r = 0; r < RANKS; r++)
        tap_whole(&f.rank[r], wrong, r, RANKS);
    const ari_verdict v = ari_verdict_of(f.rank, RANKS, 0);
    cr_expect(v.complete && v.different == 2 && v.first == 7 && v.rank == 0);
    fixture_fini(&f);
}

Test(compare, a_copy_that_differs_is_found_though_the_first_copy_is_right)
{
    fixture f;
    float wrong[COUNT];
    fixture_init(&f);
    memcpy(wrong, f.values, sizeof wrong);
    wrong[COUNT - 1] = -wrong[COUNT - 1];
    tap_whole(&f.rank[0], f.values, 0, RANKS);
    tap_whole(&f.rank[1], wrong, 1, RANKS);
    const ari_verdict v = ari_verdict_of(f.rank, RANKS, 0);
    cr_expect(v.complete && v.different == 1 && v.first == COUNT - 1 && v.rank == 1);
    fixture_fini(&f);
}

Test(compare, what_no_rank_holds_is_incomplete)
{
    fixture f;
    fixture_init(&f);
    tap_rows(&f.rank[0], f.values, 0, 3);
    tap_rows(&f.rank[1], f.values, 1, 3);
    cr_expect(!ari_verdict_of(f.rank, RANKS, 0).complete, "the last third was never reported");
    fixture_fini(&f);
}

Test(compare, a_rank_that_reports_nothing_is_incomplete)
{
    fixture f;
    fixture_init(&f);
    tap_whole(&f.rank[0], f.values, 0, RANKS);
    cr_expect(!ari_verdict_of(f.rank, RANKS, 0).complete, "rank 1's copy was never compared");
    fixture_fini(&f);
}

Test(compare, one_part_claimed_twice_does_not_stand_for_the_other)
{
    fixture f;
    fixture_init(&f);
    tap_rows(&f.rank[0], f.values, 0, RANKS);
    tap_rows(&f.rank[1], f.values, 0, RANKS);
    cr_expect(!ari_verdict_of(f.rank, RANKS, 0).complete, "nobody reported the last half");
    fixture_fini(&f);
}

Test(compare, one_rank_reporting_twice_does_not_stand_for_the_other)
{
    fixture f;
    ar_layout nothing;
    fixture_init(&f);
    cr_assert_eq(ar_layout_shard(&nothing, 2, full_shape, 0, 1, RANKS), AR_OK);
    nothing.nbox = 0;
    tap_rows(&f.rank[0], f.values, 0, RANKS);
    tap_rows(&f.rank[0], f.values, 0, RANKS);
    tap(&f.rank[1], "w", f.values, &nothing);
    cr_expect(!ari_verdict_of(f.rank, RANKS, 0).complete, "nobody reported the last half");
    fixture_fini(&f);
}

/* --- micro-batches: a rank reports a tensor once for each ------------------------------------------------------- */

/* Rank r of two reports rows [from, to) of the full values, as copy `replica` of `replicas`. */
static void tap_some(ari_comparator *c, const float *full, size_t from, size_t to, int replica, int replicas)
{
    ar_layout o;
    cr_assert_eq(ar_layout_replicate(&o, 2, full_shape, replica, replicas), AR_OK);
    o.box[0].global[0] = from;
    o.box[0].extent[0] = to - from;
    tap(c, "w", full + from * COLS, &o);
}

static ari_verdict verdict_of(fixture *f)
{
    return ari_verdict_of(f->rank, RANKS, 0);
}

/* Rows 0..2 are rank 0's, 3..5 rank 1's, in pieces of one and two rows. */
Test(compare, micro_batches_forward_and_in_reverse_join_to_the_ranks_part)
{
    for (int reverse = 0; reverse < 2; reverse++) {
        fixture f;
        fixture_init(&f);
        tap_some(&f.rank[0], f.values, reverse ? 2 : 0, reverse ? 3 : 2, 0, 1);
        tap_some(&f.rank[0], f.values, reverse ? 0 : 2, reverse ? 2 : 3, 0, 1);
        tap_some(&f.rank[1], f.values, 3, 6, 0, 1);
        const ari_verdict v = verdict_of(&f);
        cr_expect(v.complete && v.different == 0, "reverse %d", reverse);
        cr_expect(f.rank[0].finding[0].shape[0] == 3 && f.rank[0].finding[0].layout.nbox == 1);
        fixture_fini(&f);
    }
}

Test(compare, a_flipped_bit_of_any_micro_batch_is_found_with_its_place_and_its_copy_is_whole)
{
    for (size_t i = 0; i < COUNT; i++) {
        for (int reverse = 0; reverse < 2; reverse++) {
            fixture f;
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
            cr_assert_eq(ari_comparator_copy(&copy, &f.rank[owner], 0), AR_OK);
            cr_assert_eq(memcmp(copy, wrong + (size_t)owner * COUNT / 2, sizeof wrong / 2), 0, "element %zu", i);
            free(copy);
            fixture_fini(&f);
        }
    }
}

Test(compare, a_micro_batch_that_is_missing_doubled_or_anothers_is_incomplete)
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

Test(compare, rows_that_every_rank_holds_do_not_stand_for_those_of_nobody)
{
    fixture f;
    fixture_init(&f);
    for (int r = 0; r < RANKS; r++)
        tap_some(&f.rank[r], f.values, 0, 3, 0, 1);
    cr_expect(!verdict_of(&f).complete);
    fixture_fini(&f);
}

/* Of two copies each must be whole: rank 0 has all of copy 0, rank 1 half of copy 1. */
Test(compare, a_copy_of_which_rows_are_missing_is_incomplete)
{
    fixture f;
    fixture_init(&f);
    tap_some(&f.rank[0], f.values, 0, 6, 0, 2);
    tap_some(&f.rank[1], f.values, 0, 3, 1, 2);
    cr_expect(!verdict_of(&f).complete);
    tap_some(&f.rank[1], f.values, 3, 6, 1, 2);
    cr_expect(verdict_of(&f).complete);
    fixture_fini(&f);
}

Test(compare, a_rank_without_samples_reports_nothing_and_the_others_are_the_whole)
{
    fixture f;
    fixture_init(&f);
    tap_some(&f.rank[1], f.values, 0, 6, 0, 1);
    cr_expect(verdict_of(&f).complete);
    fixture_fini(&f);
}

/* A rank may come to a later tensor first: the backward pass of one micro-batch is before the forward pass of the next.
 */
Test(compare, copies_are_kept_of_the_first_tensors_in_execution_order_whatever_comes_first)
{
    enum { TENSORS = 7 };
    ari_reference ref = {0};
    ari_comparator c;
    double wide[COUNT] = {0.0};
    float wrong[COUNT], *copy = NULL;
    ar_layout o;
    char name[8];
    for (int i = 0; i < TENSORS; i++) {
        snprintf(name, sizeof name, "w%d", i);
        cr_assert_eq(ari_reference_emit(&ref, name, 'f', 2, full_shape, wide), AR_OK);
    }
    cr_assert_eq(ari_reference_finish(&ref), AR_OK);
    cr_assert_eq(ari_comparator_init(&c, &ref, NULL), AR_OK);
    cr_assert_eq(ar_layout_replicate(&o, 2, full_shape, 0, 1), AR_OK);
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
    ari_reference_fini(&ref);
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

Test(compare, what_is_not_covered_once_is_told_with_what_does_that)
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
}

/* --- steps and allowances --------------------------------------------------------------------------------------- */

Test(compare, a_report_of_a_step_is_compared_with_that_steps_tensor)
{
    fixture f;
    double later[COUNT];
    ar_layout o;
    fixture_init(&f);
    for (int r = 0; r < RANKS; r++)
        ari_comparator_fini(&f.rank[r]);
    for (int i = 0; i < COUNT; i++)
        later[i] = -1.0 - i;
    ari_reference_begin(&f.ref, 2);
    free(f.ref.by_name);
    cr_assert_eq(ari_reference_emit(&f.ref, "w", 'f', 2, full_shape, later), AR_OK);
    cr_assert_eq(ari_reference_finish(&f.ref), AR_OK);
    for (int r = 0; r < RANKS; r++)
        cr_assert_eq(ari_comparator_init(&f.rank[r], &f.ref, NULL), AR_OK);
    cr_assert_eq(ar_layout_replicate(&o, 2, full_shape, 0, 1), AR_OK);
    for (uint32_t step = 1; step <= 3; step++) {
        ar_tensor t;
        float values[COUNT];
        for (int i = 0; i < COUNT; i++)
            values[i] = step == 1 ? f.values[i] : (float)later[i];
        cr_assert_eq(ar_tensor_view(&t, AR_F32, 2, full_shape, (ar_buf){values}), AR_OK);
        const ar_tap_event e = {.name = "w", .pass = 'f', .step = step, .local = &t, .layout = &o};
        cr_assert_eq(ari_comparator_tap(&f.rank[0], &e), AR_OK);
    }
    for (size_t i = 0; i < 2; i++) {
        const ari_verdict v = ari_verdict_of(f.rank, RANKS, i);
        cr_expect(v.complete && v.different == 0, "step %zu", i + 1);
    }
    cr_expect_str_eq(f.rank[0].unexpected, "w:fwd", "the baseline has no third step");
    fixture_fini(&f);
}

/* 0.25 is allowed: 0.125 away is a ratio of a half, 0.5 away one of two. */
Test(compare, differences_up_to_what_is_allowed_are_none_and_their_ratio_is_told)
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

Test(compare, a_tensor_that_the_reference_lacks_is_kept_by_name)
{
    fixture f;
    ar_layout o;
    fixture_init(&f);
    cr_assert_eq(ar_layout_replicate(&o, 2, full_shape, 0, 1), AR_OK);
    tap(&f.rank[1], "v", f.values, &o);
    cr_expect_str_eq(f.rank[1].unexpected, "v:fwd");
    cr_expect_str_eq(f.rank[0].unexpected, "");
    fixture_fini(&f);
}

Test(compare, zeros_of_either_sign_differ_and_nans_do_not_hide)
{
    fixture f;
    float wrong[COUNT];
    fixture_init(&f);
    memcpy(wrong, f.values, sizeof wrong);
    f.ref.tensor[0].values[3] = 0.0f;
    wrong[3] = -0.0f;
    wrong[5] = NAN;
    for (int r = 0; r < RANKS; r++)
        tap_whole(&f.rank[r], wrong, r, RANKS);
    const ari_verdict v = ari_verdict_of(f.rank, RANKS, 0);
    cr_expect(v.different == 2 && v.first == 3 && signbit(v.actual), "%zu different", v.different);
    cr_expect_eq(v.max_ulp, UINT32_MAX);
    fixture_fini(&f);
}

Test(compare, ulp_distance_counts_steps_across_zero)
{
    const float tiny = 0x1p-149f, one = 1.0f;
    cr_expect_eq(ari_ulp_distance(one, one), 0);
    cr_expect_eq(ari_ulp_distance(one, 0x1.000002p+0f), 1);
    cr_expect_eq(ari_ulp_distance(one, 0x1.fffffep-1f), 1);
    cr_expect_eq(ari_ulp_distance(2.0f, one), 1u << 23);
    cr_expect_eq(ari_ulp_distance(0.0f, -0.0f), 1);
    cr_expect_eq(ari_ulp_distance(0.0f, tiny), 1);
    cr_expect_eq(ari_ulp_distance(-0.0f, -tiny), 1);
    cr_expect_eq(ari_ulp_distance(tiny, -tiny), 3);
    cr_expect_eq(ari_ulp_distance(-INFINITY, INFINITY), 2u * 0x7f800000u + 1u);
    cr_expect_eq(ari_ulp_distance(NAN, one), UINT32_MAX);
    cr_expect_eq(ari_ulp_distance(one, NAN), UINT32_MAX);
    cr_expect_eq(ari_ulp_distance(NAN, NAN), 0);
    cr_expect_eq(ari_ulp_distance(NAN, -NAN), UINT32_MAX);
}

/* --- the same in whole runs ------------------------------------------------------------------------------------ */

enum { BATCH = 2, SEQ = 5 };
static const int64_t ids[BATCH * SEQ] = {3, 1, 256, 128, 5, 9, 129, 6, 64, 3};

typedef struct whole_run {
    ar_config config;
    ar_batch batch;
    ari_reference ref;
    ari_cluster_options cluster;
    uint64_t predicted;
} whole_run;

static void whole_run_init(whole_run *w, const char *json, int tp)
{
    *w = (whole_run){.config = config_of(json), .batch = {.batch = BATCH, .seq = SEQ, .input_ids = ids}};
    const ar_baseline_options b = {.mode = AR_MODE_EXACT, .emit = ari_reference_emit, .emit_user = &w->ref};
    cr_assert_eq(ar_baseline_run(&w->config, &b, &w->batch, &w->ref.loss), AR_OK, "%s", ar_error_message());
    cr_assert_eq(ari_reference_finish(&w->ref), AR_OK);
    w->cluster = (ari_cluster_options){.config = &w->config,
                                       .parallel = {.tp = tp},
                                       .batch = &w->batch,
                                       .threads = 1,
                                       .sim = {.timeout_ns = 60000000000u}};
    ar_check_run first = {0};
    cr_assert_eq(ari_check_run(&first, &w->ref, &w->cluster), AR_OK, "%s", ar_error_message());
    cr_assert(first.tensors_different == 0 && !first.error);
    w->predicted = first.bytes_counted;
    ari_check_run_fini(&first);
}

static ar_check_run run_of(const whole_run *w)
{
    ar_check_run run = {.bytes_predicted = w->predicted};
    cr_assert_eq(ari_check_run(&run, &w->ref, &w->cluster), AR_OK, "%s", ar_error_message());
    return run;
}

static size_t flat_index(const ar_first_difference *f, const ari_ref_tensor *t)
{
    size_t flat = 0;
    for (int d = 0; d < t->ndim; d++)
        flat = flat * t->shape[d] + f->index[d];
    return flat;
}

/* Flips the lowest bit of one element of each reference tensor in turn: that tensor alone must differ, there. */
static void flip_each(const char *json, int tp)
{
    whole_run w;
    whole_run_init(&w, json, tp);
    for (size_t i = 0; i < w.ref.count; i++) {
        ari_ref_tensor *t = &w.ref.tensor[i];
        const size_t at = i * 2654435761u % t->count;
        uint32_t u = 0;
        char name[200];
        memcpy(&u, &t->values[at], sizeof u);
        u ^= 1u;
        memcpy(&t->values[at], &u, sizeof u);
        ar_check_run run = run_of(&w);
        snprintf(name, sizeof name, "%s%s", t->name, ari_pass_suffix(t->pass));
        cr_expect(run.result == AR_CHECK_DIFFERENT && run.tensors_different == 1 && run.elements_different == 1,
                  "%s: %zu tensors, %zu elements", name, run.tensors_different, run.elements_different);
        cr_expect_str_eq(run.first.tensor, name);
        cr_expect_eq(flat_index(&run.first, t), at, "%s", name);
        cr_expect(run.first.ulp == 1 && run.max_ulp == 1 && run.first.elements_different == 1, "%s", name);
        cr_expect(run.first.reference == t->values[at] && run.first.rank >= 0 && run.first.rank < tp);
        ari_check_run_fini(&run);
        u ^= 1u;
        memcpy(&t->values[at], &u, sizeof u);
    }
    ari_reference_fini(&w.ref);
}

Test(compare, one_flipped_bit_of_any_tensor_is_that_tensors_alone)
{
    flip_each(tiny_models[TINY_LLAMA], 3);
    flip_each(tiny_models[TINY_GPT2], 2);
    flip_each(tiny_models[TINY_STACK], 2);
}

static void flip(whole_run *w, const char *name, char pass, size_t at)
{
    const size_t i = ari_reference_find(&w->ref, name, pass);
    cr_assert(i < w->ref.count && at < w->ref.tensor[i].count, "%s", name);
    float *v = &w->ref.tensor[i].values[at];
    *v = *v == 0.0f ? 1.0f : -*v;
}

static void expect_owner(const char *json, int tp, const char *name, char pass, size_t at, int rank, size_t local)
{
    whole_run w;
    whole_run_init(&w, json, tp);
    flip(&w, name, pass, at);
    ar_check_run run = run_of(&w);
    const ar_first_difference *f = &run.first;
    cr_expect_eq(f->rank, rank, "%s[%zu]: rank %d, expected %d", name, at, f->rank, rank);
    cr_expect_eq(f->local_index[f->local_ndim - 1], local, "%s[%zu]: local index %zu, expected %zu", name, at,
                 f->local_index[f->local_ndim - 1], local);
    ari_check_run_fini(&run);
    ari_reference_fini(&w.ref);
}

/* Owners by hand, for the models of tiny.h: 24 query and 12 KV heads of 4, ffn 72, hidden 48, 257 ids. */
Test(compare, the_owner_is_the_rank_that_holds_the_element)
{
    const char *llama = tiny_models[TINY_LLAMA], *gpt2 = tiny_models[TINY_GPT2];
    expect_owner(llama, 3, "model.layers.1.mlp.act", 'f', 71, 2, 23);             /* column-parallel: 24 a rank */
    expect_owner(llama, 3, "model.layers.1.mlp.down_proj", 'f', 47, 0, 47);       /* replicated */
    expect_owner(llama, 3, "model.layers.0.self_attn.q_proj", 'f', 64, 2, 0);     /* 96 features, 32 a rank */
    expect_owner(llama, 3, "model.layers.0.self_attn.k_rope", 'f', 16, 1, 0);     /* 48 features, head 4 is rank 1's */
    expect_owner(llama, 3, "model.layers.1.mlp.down_proj.weight", 'g', 48, 2, 0); /* [48, 72], columns split */
    expect_owner(llama, 3, "model.layers.1.mlp.up_proj.weight", 'g', 24 * 48, 1, 0);
    expect_owner(llama, 3, "lm_head", 'f', 86, 1, 0); /* 257 ids in parts of 86 */
    expect_owner(llama, 3, "lm_head.weight", 'i', 256 * 48 + 1, 2, 1);
    expect_owner(llama, 3, "model.norm.weight", 'g', 5, 0, 5);
    expect_owner(gpt2, 2, "transformer.h.1.attn.c_attn.bias", 'g', 48 + 24, 1, 24); /* q|k|v packed: 24 of each */
    expect_owner(gpt2, 2, "transformer.h.1.attn.c_attn.weight", 'g', 24, 1, 0);     /* [in, out] */
    expect_owner(gpt2, 2, "transformer.h.0.mlp.c_proj.weight", 'g', 48 * 48, 1, 0); /* [in, out], rows split */
}

Test(compare, a_tensor_that_no_rank_reports_is_a_difference)
{
    whole_run w;
    const double extra = 1.0;
    whole_run_init(&w, tiny_models[TINY_STACK], 2);
    free(w.ref.by_name);
    cr_assert_eq(ari_reference_emit(&w.ref, "model.nobody", 'f', 0, NULL, &extra), AR_OK);
    cr_assert_eq(ari_reference_finish(&w.ref), AR_OK);
    ar_check_run run = run_of(&w);
    cr_expect(run.result == AR_CHECK_DIFFERENT && run.tensors_different == 1 && !run.error);
    cr_expect_str_eq(run.first.tensor, "model.nobody:fwd");
    cr_expect(strstr(run.first.pattern, "did not report"), "%s", run.first.pattern);
    ari_check_run_fini(&run);
    ari_reference_fini(&w.ref);
}

Test(compare, a_tensor_that_only_the_ranks_report_is_an_error)
{
    whole_run w;
    whole_run_init(&w, tiny_models[TINY_STACK], 2);
    const size_t i = ari_reference_find(&w.ref, "layers.1.mlp.act", 'f');
    cr_assert(i < w.ref.count);
    w.ref.tensor[i].name[0] = 'L';
    free(w.ref.by_name);
    cr_assert_eq(ari_reference_finish(&w.ref), AR_OK);
    ar_check_run run = run_of(&w);
    cr_expect_eq(run.result, AR_CHECK_ERROR);
    cr_expect(run.error && strstr(run.error, "layers.1.mlp.act:fwd"), "%s", run.error);
    ari_check_run_fini(&run);
    ari_reference_fini(&w.ref);
}

Test(compare, equal_values_with_other_bytes_than_predicted_are_a_difference)
{
    whole_run w;
    whole_run_init(&w, tiny_models[TINY_GPT2], 2);
    ar_check_run right = run_of(&w);
    cr_expect_eq(right.result, AR_CHECK_SAME);
    w.predicted++;
    ar_check_run run = run_of(&w);
    cr_expect(run.result == AR_CHECK_DIFFERENT && run.tensors_different == 0 && !run.has_difference);
    ari_check_run_fini(&right);
    ari_check_run_fini(&run);
    ari_reference_fini(&w.ref);
}
