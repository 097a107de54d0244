/* SPDX-License-Identifier: Apache-2.0 */
/* What verify says of two runs of sketches. */
#include "anyrank/verify.h"
#include "ref/io/safetensors_private.h"
#include "tests/support/sketch_file.h"
#include "verify/sketches/sketches.h"

enum { ROWS = 64, COLUMNS = 64, ELEMENTS = ROWS * COLUMNS };

static uint64_t state;

static double draw(void)
{
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (double)(state >> 40) * 0x1p-23 - 1.0;
}

static void fill(float *x, size_t n, uint64_t seed)
{
    state = seed;
    for (size_t i = 0; i < n; i++)
        x[i] = (float)draw();
}

static sketch_part matrix(const char *name, const float *values)
{
    return (sketch_part){name, AR_F32, 2, {ROWS, COLUMNS}, values, 0, 0, NULL, NULL, 0, NULL};
}

static void write_one(const char *run, const sketch_part *parts, size_t n)
{
    write_sketches(run, 0, 1, 1, parts, n);
}

/* Compares runs "a" and "b" of the test's folder under a tolerance. For ari_sketch_report_fini. */
static ari_sketch_report compared(ar_verify_options o)
{
    ari_sketch_report r = {0};
    o.reference = o.reference != NULL ? o.reference : in_folder("a");
    o.other = o.other != NULL ? o.other : in_folder("b");
    if (o.rtol == 0.0 && o.atol == 0.0 && o.rule == AR_VERIFY_TOLERANCE)
        o.rtol = 1e-4, o.atol = 1e-5;
    cr_assert_ok(ari_sketches_compare(&r, &o));
    return r;
}

#define TOLERANCE ((ar_verify_options){.rule = AR_VERIFY_TOLERANCE})
#define BITS ((ar_verify_options){.rule = AR_VERIFY_BITS})

/* The state of the one tensor that both runs have. */
static ar_verify_state state_of(const float *a, const float *b, const char *name)
{
    const sketch_part x = matrix(name, a), y = matrix(name, b);
    write_one("a", &x, 1);
    write_one("b", &y, 1);
    ari_sketch_report r = compared(TOLERANCE);
    const ar_verify_state result = r.row[0].state;
    cr_expect(r.rows == 1 && r.row[0].unjudged[0] == '\0');
    ari_sketch_report_fini(&r);
    cr_assert_eq(remove_all(in_folder("a")) + remove_all(in_folder("b")), 0);
    return result;
}

TestSuite(sketch_runs, .init = folder_begin, .fini = folder_end);

/* --- values ------------------------------------------------------------------------------------------------------- */

Test(sketch_runs, rounding_is_the_same_and_few_elements_are_not)
{
    static float a[ELEMENTS], b[ELEMENTS];
    fill(a, ELEMENTS, 1);
    memcpy(b, a, sizeof a);
    for (size_t i = 0; i < ELEMENTS; i++)
        b[i] += (float)(3e-5 * draw());
    cr_expect_eq(state_of(a, b, "x:fwd"), AR_VERIFY_SAME);
    memcpy(b, a, sizeof a);
    b[700] += 3e-3f; /* the norm of what all elements may be off by is larger: 7e-3 */
    cr_expect_eq(state_of(a, b, "x:fwd"), AR_VERIFY_DIFFERENT);
    memcpy(b, a, sizeof a);
    for (size_t i = 0; i < 3; i++)
        b[1000 + i] = 0.0f;
    cr_expect_eq(state_of(a, b, "x:new"), AR_VERIFY_DIFFERENT);
}

/* Exchanges are seen at all distances: the bucket and the sign of two elements do not go together. */
Test(sketch_runs, two_elements_that_are_exchanged_are_seen_at_any_distance)
{
    static float a[ELEMENTS], b[ELEMENTS];
    fill(a, ELEMENTS, 2);
    for (size_t distance = 1; distance <= 64; distance++) {
        int seen = 0;
        enum { EXCHANGES = 16 };
        for (size_t k = 0; k < EXCHANGES; k++) {
            const size_t i = k * 193 + distance % 7, j = i + distance;
            memcpy(b, a, sizeof a);
            b[i] = a[j] + 1.0f;
            b[j] = a[i] + 1.0f;
            float x[ELEMENTS];
            memcpy(x, a, sizeof a);
            x[i] = a[i] + 1.0f;
            x[j] = a[j] + 1.0f;
            seen += state_of(x, b, "x:fwd") == AR_VERIFY_DIFFERENT;
        }
        cr_expect(seen >= EXCHANGES - 3, "distance %zu: %d of %d", distance, seen, (int)EXCHANGES);
    }
}

Test(sketch_runs, a_factor_of_all_elements_is_seen_within_their_tolerance)
{
    static float a[ELEMENTS], b[ELEMENTS];
    static const struct {
        double factor;
        const char *name;
        ar_verify_state state;
    } cases[] = {{1.0 + 5e-5, "x:grad", AR_VERIFY_SAME},
                 {1.0 + 2e-4, "x:grad", AR_VERIFY_DIFFERENT},
                 {1.0 - 2e-4, "x:fwd", AR_VERIFY_DIFFERENT},
                 {1.0 + 2e-4, "x:new", AR_VERIFY_SAME}};
    fill(a, ELEMENTS, 3);
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        for (size_t i = 0; i < ELEMENTS; i++)
            b[i] = (float)((double)a[i] * cases[k].factor);
        const sketch_part x = matrix(cases[k].name, a), y = matrix(cases[k].name, b);
        write_one("a", &x, 1);
        write_one("b", &y, 1);
        ari_sketch_report r = compared((ar_verify_options){.rule = AR_VERIFY_TOLERANCE, .rtol = 1e-4, .atol = 1e-3});
        cr_expect_eq(r.row[0].state, cases[k].state, "%s times %g", cases[k].name, cases[k].factor);
        ari_sketch_report_fini(&r);
        cr_assert_eq(remove_all(in_folder("a")) + remove_all(in_folder("b")), 0);
    }
}

/* A reference that is nothing but rounding has no factor. */
Test(sketch_runs, no_factor_is_judged_of_a_reference_within_the_tolerance)
{
    static float a[ELEMENTS], b[ELEMENTS];
    fill(a, ELEMENTS, 4);
    for (size_t i = 0; i < ELEMENTS; i++)
        a[i] *= 1e-9f;
    cr_expect_eq(state_of(a, b, "x:grad"), AR_VERIFY_SAME);
    cr_expect_eq(state_of(b, a, "x:grad"), AR_VERIFY_SAME);
}

Test(sketch_runs, nan_and_infinities_are_compared_by_place_and_sign)
{
    static float a[ELEMENTS], b[ELEMENTS];
    static const struct {
        size_t at[2];
        float value[2];
        ar_verify_state state;
    } cases[] = {{{5, 5}, {NAN, NAN}, AR_VERIFY_SAME},
                 {{5, 6}, {NAN, NAN}, AR_VERIFY_DIFFERENT},
                 {{5, 5}, {INFINITY, -INFINITY}, AR_VERIFY_DIFFERENT},
                 {{5, 5}, {INFINITY, NAN}, AR_VERIFY_DIFFERENT},
                 {{5, 5}, {-INFINITY, -INFINITY}, AR_VERIFY_SAME},
                 {{5, 5}, {NAN, 0.5f}, AR_VERIFY_DIFFERENT}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        fill(a, ELEMENTS, 5);
        memcpy(b, a, sizeof a);
        b[9] += 1e-6f; /* so that not all bits are the same */
        a[cases[k].at[0]] = cases[k].value[0];
        b[cases[k].at[1]] = cases[k].value[1];
        cr_expect_eq(state_of(a, b, "x:fwd"), cases[k].state, "case %zu", k);
    }
}

Test(sketch_runs, squares_that_overflow_are_judged)
{
    double a[ROWS], b[ROWS], c[ROWS];
    for (size_t i = 0; i < ROWS; i++) {
        a[i] = 1e160 * (1.0 + (double)i);
        b[i] = a[i] * (1.0 + 1e-9);
        c[i] = a[i] * 1.5;
    }
    const sketch_part x = {"x:fwd", AR_F64, 1, {ROWS, 0}, a, 0, 0, NULL, NULL, 0, NULL};
    const double *const other[] = {b, c};
    for (int k = 0; k < 2; k++) {
        sketch_part y = x;
        y.values = other[k];
        write_one("a", &x, 1);
        write_one("b", &y, 1);
        ari_sketch_report r = compared(TOLERANCE);
        cr_expect_eq(r.row[0].state, k == 0 ? AR_VERIFY_SAME : AR_VERIFY_DIFFERENT);
        cr_expect_eq(r.row[0].unjudged[0], '\0');
        ari_sketch_report_fini(&r);
        cr_assert_eq(remove_all(in_folder("a")) + remove_all(in_folder("b")), 0);
    }
}

Test(sketch_runs, integers_are_exact_under_a_tolerance_also_beside_floats)
{
    int64_t a[ROWS], b[ROWS];
    float floats[ROWS];
    for (int i = 0; i < ROWS; i++)
        floats[i] = (float)(b[i] = a[i] = 1000000 + i);
    const sketch_part x = {"input.0:fwd", AR_I64, 1, {ROWS, 0}, a, 0, 0, NULL, NULL, 0, NULL};
    for (int k = 0; k < 4; k++) {
        sketch_part y = x;
        y.dtype = k < 2 ? AR_I64 : AR_F32;
        y.values = k < 2 ? (const void *)b : floats;
        b[7] += k == 1;
        floats[7] += k == 3 ? 1.0f : 0.0f;
        write_one("a", &x, 1);
        write_one("b", &y, 1);
        ari_sketch_report r = compared(TOLERANCE);
        cr_expect_eq(r.row[0].state, k % 2 ? AR_VERIFY_DIFFERENT : AR_VERIFY_SAME, "case %d", k);
        ari_sketch_report_fini(&r);
        cr_assert_eq(remove_all(in_folder("a")) + remove_all(in_folder("b")), 0);
    }
}

/* --- layouts ------------------------------------------------------------------------------------------------------ */

/* Rank r of n holds a share of the values as a summand, in two parts. */
static void write_summands(const char *run, int world, const float *values, double lost)
{
    static float x[ELEMENTS];
    for (int rank = 0; rank < world; rank++) {
        char term[16];
        snprintf(term, sizeof term, "tp%d", rank);
        for (size_t i = 0; i < ELEMENTS; i++)
            x[i] = values[i] / (float)world * (float)(rank == 1 ? 1.0 - lost : 1.0);
        sketch_part parts[2] = {matrix("x:grad", x), matrix("x:grad", x + ELEMENTS / 2)};
        for (size_t k = 0; k < 2; k++) {
            parts[k].row = k * ROWS / 2;
            parts[k].rows = ROWS / 2;
            parts[k].term = term;
        }
        write_sketches(run, rank, world, 1, parts, 2);
    }
}

Test(sketch_runs, summands_have_the_size_of_their_sum)
{
    static float x[ELEMENTS];
    fill(x, ELEMENTS, 6);
    for (int lost = 0; lost < 2; lost++) {
        const sketch_part full = matrix("x:grad", x);
        write_summands("a", 8, x, 0.0);
        write_one("b", &full, 1);
        if (lost) {
            cr_assert_eq(remove_all(in_folder("a")), 0);
            write_summands("a", 8, x, 0.01); /* of one summand: an eighth of a hundredth of all */
        }
        ari_sketch_report r = compared((ar_verify_options){.rule = AR_VERIFY_TOLERANCE, .rtol = 5e-4});
        cr_expect_eq(r.row[0].state, lost ? AR_VERIFY_DIFFERENT : AR_VERIFY_SAME, "%g of %g", r.row[0].d.norm,
                     r.row[0].allowed.norm);
        cr_expect(fabs(r.row[0].d.norm_a / sqrt(ELEMENTS / 3.0) - 1.0) < 0.4, "the size: %g", r.row[0].d.norm_a);
        ari_sketch_report_fini(&r);
        r = compared(BITS);
        cr_expect(r.unjudged == 1 && r.different == 0, "of a sum there are no bits");
        ari_sketch_report_fini(&r);
        cr_assert_eq(remove_all(in_folder("a")) + remove_all(in_folder("b")), 0);
    }
}

/* Four ranks, dp 2 x tp 2: the second replica of one shard is off. */
static void write_shards(const char *run, const float *values, float off)
{
    static float x[ELEMENTS];
    for (int rank = 0; rank < 4; rank++) {
        memcpy(x, values, sizeof x);
        if (rank == 3)
            x[ELEMENTS - 5] += off;
        sketch_part part = matrix("x.weight:init", x + (rank % 2) * ELEMENTS / 2);
        part.row = (size_t)(rank % 2) * ROWS / 2;
        part.rows = ROWS / 2;
        write_sketches(run, rank, 4, 1, &part, 1);
    }
}

Test(sketch_runs, copies_of_shards_are_judged_by_the_rule)
{
    static float x[ELEMENTS];
    static const struct {
        float off;
        ar_verify_state tolerance, bits;
    } cases[] = {{0.0f, AR_VERIFY_SAME, AR_VERIFY_SAME},
                 {1e-6f, AR_VERIFY_SAME, AR_VERIFY_REPLICAS},
                 {0.1f, AR_VERIFY_REPLICAS, AR_VERIFY_REPLICAS}};
    fill(x, ELEMENTS, 7);
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        const sketch_part full = matrix("x.weight:init", x);
        write_one("a", &full, 1);
        write_shards("b", x, cases[k].off);
        ari_sketch_report r = compared(TOLERANCE);
        cr_expect_eq(r.row[0].state, cases[k].tolerance, "off by %g", (double)cases[k].off);
        cr_expect(k < 2 || (r.row[0].copies->first_rank == 1 && r.row[0].copies->rank == 3));
        ari_sketch_report_fini(&r);
        r = compared(BITS);
        cr_expect_eq(r.row[0].state, cases[k].bits, "off by %g, bits", (double)cases[k].off);
        ari_sketch_report_fini(&r);
        cr_assert_eq(remove_all(in_folder("a")) + remove_all(in_folder("b")), 0);
    }
}

/* Each shard's copies are judged, by what the rule allows of their own size. */
Test(sketch_runs, any_shard_may_have_the_copy_that_differs)
{
    static float x[ELEMENTS], copy[ELEMENTS];
    static const struct {
        float factor[2];
        ar_verify_state state;
    } cases[] = {{{1.00005f, 1.00005f}, AR_VERIFY_SAME},
                 {{1.00005f, 1.01f}, AR_VERIFY_REPLICAS},
                 {{1.01f, 1.0f}, AR_VERIFY_REPLICAS}};
    fill(x, ELEMENTS, 32);
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        const sketch_part full = matrix("x.weight:init", x);
        write_one("a", &full, 1);
        for (int rank = 0; rank < 4; rank++) {
            for (size_t i = 0; i < ELEMENTS; i++)
                copy[i] = x[i] * (rank < 2 ? 1.0f : cases[k].factor[rank % 2]);
            sketch_part part = matrix("x.weight:init", copy + (rank % 2) * ELEMENTS / 2);
            part.row = (size_t)(rank % 2) * ROWS / 2;
            part.rows = ROWS / 2;
            write_sketches("b", rank, 4, 1, &part, 1);
        }
        ari_sketch_report r = compared(TOLERANCE);
        cr_expect_eq(r.row[0].state, cases[k].state, "case %zu", k);
        ari_sketch_report_fini(&r);
        cr_assert_eq(remove_all(in_folder("a")) + remove_all(in_folder("b")), 0);
    }
}

/* Activations are left out only where the runs have the same samples, in another order. */
Test(sketch_runs, other_samples_are_no_other_order)
{
    static float x[ELEMENTS], y[ELEMENTS];
    static const json_int_t samples[][2] = {{1, 7}, {2, 7}, {3, 8}};
    fill(x, ELEMENTS, 33);
    fill(y, ELEMENTS, 34);
    for (size_t k = 1; k < 3; k++) {
        const sketch_part parts[] = {matrix("x:fwd", x), matrix("x.weight:init", x)},
                          others[] = {matrix("x:fwd", y), matrix("x.weight:init", x)};
        memcpy(sketch_samples, samples[0], sizeof sketch_samples);
        write_one("a", parts, 2);
        memcpy(sketch_samples, samples[k], sizeof sketch_samples);
        write_one("b", others, 2);
        ari_sketch_report r = compared(TOLERANCE);
        cr_expect(k == 1 ? r.reordered == 1 && r.different == 0 : r.reordered == 0 && r.different == 1);
        ari_sketch_report_fini(&r);
        cr_assert_eq(remove_all(in_folder("a")) + remove_all(in_folder("b")), 0);
    }
}

/* An earlier run of more ranks has left a file, which is no rank's of this run. */
Test(sketch_runs, files_of_ranks_beyond_the_run_are_not_read)
{
    static float x[ELEMENTS], y[ELEMENTS];
    fill(x, ELEMENTS, 8);
    fill(y, ELEMENTS, 9);
    const sketch_part full = matrix("x:fwd", x), stale = matrix("x:fwd", y);
    write_one("a", &full, 1);
    write_one("b", &full, 1);
    write_sketches("b", 1, 2, 1, &stale, 1);
    ari_sketch_report r = compared(BITS);
    cr_expect(r.different == 0 && r.compared == 1);
    ari_sketch_report_fini(&r);
}

/* --- what is compared --------------------------------------------------------------------------------------------- */

static void write_step(const char *run, int step, const float *values)
{
    char name[32];
    snprintf(name, sizeof name, step > 1 ? "x:fwd@%d" : "x:fwd", step);
    const sketch_part x = matrix(name, values);
    write_sketches(run, 0, 1, step, &x, 1);
}

static void expect_refused(ar_verify_options o, ar_status status, const char *words)
{
    ari_sketch_report r = {0};
    o.reference = o.reference != NULL ? o.reference : in_folder("a");
    o.other = o.other != NULL ? o.other : in_folder("b");
    cr_expect_refused(ari_sketches_compare(&r, &o), status, words);
    ari_sketch_report_fini(&r);
}

Test(sketch_runs, steps_that_one_run_has_are_named_and_no_common_step_is_refused)
{
    static float x[ELEMENTS];
    fill(x, ELEMENTS, 10);
    for (int step = 1; step <= 4; step++)
        write_step(step <= 3 ? "a" : "b", step, x);
    expect_refused(BITS, AR_ERR_NOT_FOUND, "the reference has 1 to 3, the other run 4 to 4");
    write_step("b", 2, x);
    ari_sketch_report r = compared(BITS);
    cr_expect(r.common_steps == 1 && r.rows == 1 && r.alone[0].count == 2 && r.alone[1].count == 1);
    cr_expect(r.alone[0].step[1] == 3 && r.alone[1].step[0] == 4);
    json_t *json = ari_sketch_report_json(&r, &(ar_verify_options){.reference = "a", .other = "b"});
    cr_expect_eq(json_array_size(json_object_get(json_object_get(json, "steps"), "only_reference")), 2u);
    json_decref(json);
    ari_sketch_report_fini(&r);
}

Test(sketch_runs, filters_that_leave_nothing_are_refused)
{
    static float x[ELEMENTS];
    const char *const none[] = {"zzz*"}, *const all[] = {"*"};
    fill(x, ELEMENTS, 11);
    write_step("a", 1, x);
    write_step("b", 1, x);
    ar_verify_options o = BITS;
    o.only = none;
    o.only_count = 1;
    expect_refused(o, AR_ERR_NOT_FOUND, "matches none of the 1 tensor");
    o = BITS;
    o.leave = all;
    o.leave_count = 1;
    expect_refused(o, AR_ERR_NOT_FOUND, "leave none");
}

Test(sketch_runs, all_tensors_left_out_is_refused_and_some_is_counted)
{
    static float x[ELEMENTS];
    fill(x, ELEMENTS, 12);
    sketch_part parts[2] = {matrix("x:fwd", x), matrix("y:fwd", x)};
    parts[0].left_out = "ranks have other lengths";
    write_one("a", parts, 1);
    write_one("b", parts, 1);
    expect_refused(BITS, AR_ERR_NOT_FOUND, "nothing was compared");
    cr_assert_eq(remove_all(in_folder("a")) + remove_all(in_folder("b")), 0);
    write_one("a", parts, 2);
    write_one("b", parts, 2);
    ari_sketch_report r = compared(BITS);
    cr_expect(r.left_out == 1 && r.compared == 1 && r.unjudged == 0);
    ari_sketch_report_fini(&r);
}

Test(sketch_runs, a_run_without_records_is_refused)
{
    static float x[ELEMENTS];
    char path[256];
    fill(x, ELEMENTS, 13);
    write_step("a", 1, x);
    cr_assert_ok(ari_folder_make(in_folder("b")));
    snprintf(path, sizeof path, "%s/rank-00000.sketch", in_folder("b"));
    cr_assert_ok(ari_file_write(path, AR_SKETCH_MAGIC, 16));
    expect_refused(BITS, AR_ERR_NOT_FOUND, "holds no tensors");
}

/* Rank 1 of run "b" lacks step `missing`, which rank 0 has twice. */
static void write_with_missing(const float *x, int last, int missing)
{
    for (int rank = 0; rank < 2; rank++) {
        for (int step = 1; step <= last; step++) {
            char name[32];
            snprintf(name, sizeof name, step > 1 ? "x:fwd@%d" : "x:fwd", step);
            const sketch_part part = matrix(name, x);
            write_sketches("a", rank, 2, step, &part, 1);
            for (int times = step == missing ? 2 - 2 * rank : 1; times > 0; times--)
                write_sketches("b", rank, 2, step, &part, 1);
        }
    }
}

Test(sketch_runs, a_step_that_a_rank_lacks_is_not_judged_however_often_another_has_it)
{
    static float x[ELEMENTS];
    fill(x, ELEMENTS, 14);
    write_with_missing(x, 3, 2);
    ari_sketch_report r = compared(BITS);
    cr_expect(r.unjudged == 1 && r.compared == 2);
    cr_expect_str_eq(r.row[1].unjudged, "1 of 2 ranks have step 2");
    ari_sketch_report_fini(&r);
}

Test(sketch_runs, steps_at_the_end_of_a_killed_run_are_named)
{
    static float x[ELEMENTS];
    fill(x, ELEMENTS, 14);
    write_with_missing(x, 2, 2);
    ari_sketch_report r = compared(BITS);
    cr_expect(r.unjudged == 0 && r.compared == 1 && r.incomplete[1].count == 1 && r.incomplete[1].step[0] == 2);
    ari_sketch_report_fini(&r);
    cr_assert_eq(remove_all(in_folder("a")) + remove_all(in_folder("b")), 0);
    write_with_missing(x, 1, 1);
    char path[256];
    snprintf(path, sizeof path, "%s/rank-00001.sketch", in_folder("b"));
    cr_assert_ok(ari_file_write(path, AR_SKETCH_MAGIC, 16));
    expect_refused(BITS, AR_ERR_NOT_FOUND, "no step has a record of all 2 ranks");
}

Test(sketch_runs, dimensions_in_one_are_compared_and_other_shapes_are_not)
{
    static float x[ELEMENTS], y[ELEMENTS];
    fill(x, ELEMENTS, 21);
    memcpy(y, x, sizeof x);
    y[100] = 2.0f;
    const struct {
        const char *name;
        size_t shape[2];
        const float *values;
        ar_verify_state state;
    } cases[] = {{"q_norm:fwd", {ELEMENTS, 0}, x, AR_VERIFY_SAME},
                 {"q_norm:fwd", {ELEMENTS, 0}, y, AR_VERIFY_DIFFERENT},
                 {"x.weight:new", {ELEMENTS, 0}, x, AR_VERIFY_SHAPE},
                 {"q_norm:fwd", {ROWS / 2, COLUMNS * 2}, x, AR_VERIFY_SHAPE}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        const sketch_part full = matrix(cases[k].name, x);
        sketch_part other = full;
        other.ndim = cases[k].shape[1] > 0 ? 2 : 1;
        memcpy(other.shape, cases[k].shape, sizeof other.shape);
        other.values = cases[k].values;
        write_one("a", k % 2 ? &other : &full, 1);
        write_one("b", k % 2 ? &full : &other, 1);
        ari_sketch_report r = compared(TOLERANCE);
        cr_expect_eq(r.row[0].state, cases[k].state, "case %zu", k);
        ari_sketch_report_fini(&r);
        cr_assert_eq(remove_all(in_folder("a")) + remove_all(in_folder("b")), 0);
    }
}

Test(sketch_runs, wrappers_of_names_are_left_out)
{
    static float x[ELEMENTS];
    fill(x, ELEMENTS, 20);
    const sketch_part plain[] = {matrix("a.x:fwd", x), matrix("a.y:fwd", x)};
    const sketch_part wrapped[] = {matrix("module.a.x:fwd", x), matrix("module.a.y:fwd", x)};
    write_one("a", plain, 2);
    write_one("b", wrapped, 2);
    ari_sketch_report r = compared(BITS);
    cr_expect(r.compared == 2 && r.different == 0 && r.renamed == 2);
    cr_expect_str_eq(r.wrappers[1], "module.");
    ari_sketch_report_fini(&r);
}

/* --- gradients ---------------------------------------------------------------------------------------------------- */

Test(sketch_runs, a_lost_gradient_differs_with_common_too)
{
    static float x[ELEMENTS];
    fill(x, ELEMENTS, 15);
    const sketch_part parts[] = {matrix("x.weight:init", x), matrix("y.weight:init", x), matrix("y.weight:grad", x),
                                 matrix("x.weight:grad", x), matrix("z:fwd", x)};
    write_one("a", parts, 5);
    write_one("b", parts, 3);
    for (int common = 0; common < 2; common++) {
        ar_verify_options o = BITS;
        o.common = common;
        ari_sketch_report r = compared(o);
        cr_expect_eq(r.different, common ? 1u : 2u);
        cr_assert(r.first_row < r.rows && r.row[r.first_row].lost_gradient);
        cr_expect_str_eq(r.row[r.first_row].name, "x.weight:grad");
        cr_expect_eq(r.skipped[0], common ? 1u : 0u);
        ari_sketch_report_fini(&r);
    }
}

Test(sketch_runs, a_gradient_of_zeros_is_as_good_as_none)
{
    static float x[ELEMENTS], zero[ELEMENTS];
    fill(x, ELEMENTS, 16);
    const sketch_part parts[] = {matrix("x.weight:init", x), matrix("y.weight:init", x), matrix("y.weight:grad", x),
                                 matrix("x.weight:grad", zero)};
    write_one("a", parts, 4);
    write_one("b", parts, 3);
    ar_verify_options o = BITS;
    o.common = true;
    ari_sketch_report r = compared(o);
    cr_expect(r.different == 0 && r.skipped[0] == 1);
    ari_sketch_report_fini(&r);
}

Test(sketch_runs, gradients_that_are_all_zero_or_nan_prove_nothing)
{
    static float x[ELEMENTS], dead[2][ELEMENTS];
    fill(x, ELEMENTS, 17);
    for (size_t i = 0; i < ELEMENTS; i++)
        dead[1][i] = NAN;
    for (int k = 0; k < 2; k++) {
        const sketch_part parts[] = {matrix("x.weight:init", x), matrix("x.weight:grad", dead[k]),
                                     matrix("y.weight:grad", dead[k])};
        write_one("a", parts, 3);
        write_one("b", parts, 3);
        expect_refused(TOLERANCE, AR_ERR_DATA, k == 0 ? "all 2 gradients are zero" : "NaN, infinities and zeros");
        cr_assert_eq(remove_all(in_folder("a")) + remove_all(in_folder("b")), 0);
    }
}

/* --- updates ------------------------------------------------------------------------------------------------------ */

/* A step of 1e-3 in the direction of each gradient's sign, as Adam's first, of `updated` elements. */
static void write_update(const char *run, const float *weight, const float *gradient, size_t n, size_t updated)
{
    float *after = calloc(n, sizeof *after);
    for (size_t i = 0; i < n; i++)
        after[i] = weight[i] - (i >= updated ? 0.0f : gradient[i] > 0.0f ? 1e-3f : gradient[i] < 0.0f ? -1e-3f : 0.0f);
    size_t tiny = 0;
    for (size_t i = 0; i < n; i++)
        tiny += gradient[i] != 0.0f && fabsf(gradient[i]) < 0x1p-18f;
    const size_t rows = n / COLUMNS;
    const sketch_part parts[] = {{"x.weight:init", AR_F32, 2, {rows, COLUMNS}, weight, 0, 0, NULL, NULL, 0, NULL},
                                 {"x.weight:grad", AR_F32, 2, {rows, COLUMNS}, gradient, 0, 0, NULL, NULL, tiny, NULL},
                                 {"x.weight:new", AR_F32, 2, {rows, COLUMNS}, after, 0, 0, NULL, NULL, 0, NULL}};
    write_one(run, parts, 3);
    free(after);
}

/* Of 64 blocks; `tiny` of 16 gradients are 1e-9, and their signs are rounding's. */
static ar_verify_state state_of_update(size_t tiny, bool turned, bool noise, size_t of_64_updated)
{
    enum { N = 64 * ELEMENTS };
    float *weight = malloc(N * sizeof *weight), *gradient[2] = {malloc(N * sizeof(float)), malloc(N * sizeof(float))};
    fill(weight, N, 18);
    fill(gradient[0], N, 19);
    for (size_t i = 0; i < N; i++) {
        if (i % 16 < tiny)
            gradient[0][i] *= 1e-9f;
        const bool turns = turned && i % 16 < tiny && i % 32 < 16;
        gradient[1][i] = turns ? -gradient[0][i] : gradient[0][i] * (noise ? 1.0f + 1e-6f * (float)draw() : 1.0f);
    }
    write_update("a", weight, gradient[0], N, N);
    write_update("b", weight, gradient[1], N, N / 64 * of_64_updated);
    ari_sketch_report r = compared((ar_verify_options){.rule = AR_VERIFY_TOLERANCE, .rtol = 1e-6, .atol = 1e-6});
    const ar_verify_state result = r.row[2].state;
    cr_expect(strcmp(r.row[2].name, "x.weight:new") == 0 && r.row[1].state == AR_VERIFY_SAME);
    ari_sketch_report_fini(&r);
    cr_assert_eq(remove_all(in_folder("a")) + remove_all(in_folder("b")), 0);
    free(weight);
    free(gradient[0]);
    free(gradient[1]);
    return result;
}

Test(sketch_runs, an_update_is_excused_where_its_own_gradient_is_rounding_alone)
{
    cr_expect_eq(state_of_update(1, true, true, 64), AR_VERIFY_SAME, "a 32nd of the signs turned");
    cr_expect_eq(state_of_update(0, false, true, 64), AR_VERIFY_SAME, "noise in the gradients");
    cr_expect_eq(state_of_update(1, false, false, 32), AR_VERIFY_DIFFERENT, "equal gradients, half not updated");
    cr_expect_eq(state_of_update(1, true, true, 32), AR_VERIFY_DIFFERENT, "half not updated");
    cr_expect_eq(state_of_update(8, true, true, 32), AR_VERIFY_DIFFERENT, "many tiny ones, half not updated");
    cr_expect_eq(state_of_update(8, true, true, 64), AR_VERIFY_DIFFERENT, "a quarter of the signs turned");
}

/* --- a dump beside sketches --------------------------------------------------------------------------------------- */

/* The same tensors in full, as a file that records no order. */
static const char *write_dump(const char *name, const sketch_part *parts, size_t n)
{
    ar_st_tensor tensor[8];
    cr_assert_leq(n, 8u);
    for (size_t i = 0; i < n; i++)
        tensor[i] = (ar_st_tensor){.name = parts[i].name,
                                   .dtype = parts[i].dtype,
                                   .ndim = parts[i].ndim,
                                   .shape = {parts[i].shape[0], parts[i].shape[1]},
                                   .data = parts[i].values};
    cr_assert_ok(ari_st_write(in_folder(name), tensor, n, NULL, 0));
    return in_folder(name);
}

Test(sketch_runs, rows_beside_a_dump_have_the_order_of_the_captured_run)
{
    static float x[ELEMENTS], y[ELEMENTS];
    fill(x, ELEMENTS, 22);
    fill(y, ELEMENTS, 23);
    /* in another order than that of names */
    const sketch_part captured[] = {matrix("c:fwd", y), matrix("a:fwd", y), matrix("b:fwd", x)},
                      dumped[] = {matrix("a:fwd", x), matrix("b:fwd", x), matrix("c:fwd", x), matrix("d:fwd", x)};
    ar_verify_options o = BITS;
    write_one("b", captured, 3);
    o.reference = write_dump("a.safetensors", dumped, 4);
    ari_sketch_report r = compared(o);
    cr_assert_eq(r.rows, 4u);
    const char *const order[] = {"c:fwd", "a:fwd", "b:fwd", "d:fwd"};
    for (size_t i = 0; i < 4; i++)
        cr_expect_str_eq(r.row[i].name, order[i]);
    cr_expect(r.first_row == 0 && r.different == 3 && r.row[3].state == AR_VERIFY_MISSING);
    ari_sketch_report_fini(&r);
    o.other = o.reference;
    o.reference = in_folder("b");
    r = compared(o);
    cr_expect(r.different == 3 && r.row[3].state == AR_VERIFY_UNEXPECTED);
    cr_expect_str_eq(r.row[0].name, "c:fwd");
    ari_sketch_report_fini(&r);
}

Test(sketch_runs, a_gradient_that_only_the_dump_has_is_lost_in_either_direction)
{
    static float x[ELEMENTS];
    fill(x, ELEMENTS, 24);
    const sketch_part parts[] = {matrix("x.weight:init", x), matrix("y.weight:init", x), matrix("y.weight:grad", x),
                                 matrix("u.weight:grad", x), matrix("x.weight:grad", x)};
    write_one("b", parts, 3);
    const char *dump = write_dump("a.safetensors", parts, 5);
    for (int k = 0; k < 2; k++) {
        ar_verify_options o = BITS;
        o.common = true;
        o.reference = k == 0 ? dump : in_folder("b");
        o.other = k == 0 ? in_folder("b") : dump;
        ari_sketch_report r = compared(o);
        cr_assert(r.different == 1 && r.first_row < r.rows, "%zu differ", r.different);
        cr_expect_str_eq(r.row[r.first_row].name, "x.weight:grad");
        cr_expect_eq(r.row[r.first_row].state, k == 0 ? AR_VERIFY_MISSING : AR_VERIFY_UNEXPECTED);
        ari_sketch_report_fini(&r);
    }
}

Test(sketch_runs, a_tensor_without_an_allowance_is_refused)
{
    static float x[ELEMENTS], y[ELEMENTS];
    const double each[] = {1e-3};
    fill(x, ELEMENTS, 25);
    for (size_t i = 0; i < ELEMENTS; i++)
        y[i] = x[i] + 3e-4f * (float)draw();
    const ar_st_tensor allowed = {.name = "x:fwd", .dtype = AR_F64, .ndim = 1, .shape = {1}, .data = each};
    cr_assert_ok(ari_st_write(in_folder("allowed.safetensors"), &allowed, 1, NULL, 0));
    const sketch_part parts[] = {matrix("x:fwd", x), matrix("y:fwd", x)}, others[] = {matrix("x:fwd", y)};
    write_one("a", parts, 1);
    write_one("b", others, 1);
    char path[192]; /* in_folder's own do not last */
    snprintf(path, sizeof path, "%s", in_folder("allowed.safetensors"));
    ar_verify_options o = {.rule = AR_VERIFY_SENSITIVITY, .allowed = path};
    ari_sketch_report r = compared(o);
    cr_expect_eq(r.row[0].state, AR_VERIFY_SAME);
    ari_sketch_report_fini(&r);
    cr_assert_eq(remove_all(in_folder("a")) + remove_all(in_folder("b")), 0);
    write_one("a", parts, 2);
    write_one("b", parts, 2);
    expect_refused(o, AR_ERR_NOT_FOUND, "says nothing of y:fwd");
}

Test(sketch_runs, an_allowance_is_a_number_and_integers_need_none)
{
    static float x[ELEMENTS];
    const double none[] = {(double)INFINITY, (double)NAN, -1.0};
    const int64_t ids[] = {3, 1, 2};
    char path[192];
    snprintf(path, sizeof path, "%s", in_folder("allowed.safetensors"));
    fill(x, ELEMENTS, 31);
    const sketch_part number = matrix("x:fwd", x),
                      integers = {"input.0:fwd", AR_I64, 1, {3, 0}, ids, 0, 0, NULL, NULL, 0, NULL};
    const ar_verify_options o = {.rule = AR_VERIFY_SENSITIVITY, .allowed = path};
    for (size_t k = 0; k < sizeof none / sizeof *none; k++) {
        const ar_st_tensor allowed = {.name = "x:fwd", .dtype = AR_F64, .ndim = 1, .shape = {1}, .data = &none[k]};
        cr_assert_ok(ari_st_write(path, &allowed, 1, NULL, 0));
        write_one("a", &number, 1);
        write_one("b", &number, 1);
        expect_refused(o, AR_ERR_DATA, "expected a finite number of 0 or more");
        cr_assert_eq(remove_all(in_folder("a")) + remove_all(in_folder("b")), 0);
    }
    write_one("a", &integers, 1);
    write_one("b", &integers, 1);
    ari_sketch_report r = compared(o);
    cr_expect(r.compared == 1 && r.different == 0);
    ari_sketch_report_fini(&r);
}

/* --- what proves nothing ------------------------------------------------------------------------------------------ */

/* Steps of one loss and three activations, of which a step's may be those of the first. */
static void write_training(const char *run, int steps, const double *loss, bool repeats)
{
    static float x[ELEMENTS];
    for (int step = 1; step <= steps; step++) {
        char name[4][32];
        static const char *const stem[] = {"x:fwd", "y:fwd", "loss:fwd", "x.weight:grad"};
        for (int k = 0; k < 4; k++)
            snprintf(name[k], sizeof name[k], step > 1 ? "%s@%d" : "%s", stem[k], step);
        fill(x, ELEMENTS, repeats ? 26 : (uint64_t)(25 + step));
        sketch_part parts[] = {matrix(name[0], x), matrix(name[1], x), matrix(name[2], x), matrix(name[3], x)};
        const float value = (float)loss[step - 1];
        parts[2] = (sketch_part){name[2], AR_F32, 0, {1, 1}, &value, 0, 0, NULL, NULL, 0, NULL};
        write_sketches(run, 0, 1, step, parts, 4);
    }
}

Test(sketch_runs, losses_and_steps_that_prove_nothing_are_refused)
{
    static const struct {
        double loss[2];
        bool repeats;
        const char *says;
    } cases[] = {{{2.0, 1.5}, false, NULL},
                 {{2.0, 2.0}, true, "activations of later steps have the bits of the first"},
                 {{(double)NAN, (double)NAN}, false, "the loss is NaN or infinite in every step"},
                 {{4.1588830833596715, 4.1588830833596715}, false, "= ln 64 in each of 2 steps"},
                 {{2.0, 2.0}, false, NULL}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        write_training("a", 2, cases[k].loss, cases[k].repeats);
        write_training("b", 2, cases[k].loss, cases[k].repeats);
        if (cases[k].says != NULL) {
            expect_refused(TOLERANCE, AR_ERR_DATA, cases[k].says);
        } else {
            ari_sketch_report r = compared(TOLERANCE);
            cr_expect(r.different == 0 && r.compared == 8, "case %zu", k);
            ari_sketch_report_fini(&r);
        }
        cr_assert_eq(remove_all(in_folder("a")) + remove_all(in_folder("b")), 0);
    }
}

/* Zeros in one run and tiny gradients in the other are alive. */
Test(sketch_runs, gradients_that_only_one_run_has_as_zeros_are_compared)
{
    static float tiny[ELEMENTS], zero[ELEMENTS];
    fill(tiny, ELEMENTS, 27);
    for (size_t i = 0; i < ELEMENTS; i++)
        tiny[i] *= 1e-7f;
    const sketch_part zeros[] = {matrix("x.weight:grad", zero), matrix("y.weight:grad", zero)},
                      others[] = {matrix("x.weight:grad", tiny), matrix("y.weight:grad", tiny)};
    for (int k = 0; k < 2; k++) {
        write_one(k == 0 ? "a" : "b", zeros, 2);
        write_one(k == 0 ? "b" : "a", others, 2);
        ari_sketch_report r = compared(TOLERANCE);
        cr_expect(r.different == 0 && r.compared == 2);
        ari_sketch_report_fini(&r);
        cr_assert_eq(remove_all(in_folder("a")) + remove_all(in_folder("b")), 0);
    }
}

/* Infinities of one run alone, in a sum over ranks, are a difference; of both, their places are not known. */
Test(sketch_runs, infinities_in_a_sum_are_a_difference_or_not_judged)
{
    static float x[ELEMENTS], y[ELEMENTS];
    fill(x, ELEMENTS, 28);
    memcpy(y, x, sizeof x);
    y[3] = INFINITY;
    for (int k = 0; k < 2; k++) {
        const sketch_part full = matrix("x:grad", k == 0 ? x : y);
        write_one("a", &full, 1);
        write_summands("b", 2, y, 0.0);
        ari_sketch_report r = compared(TOLERANCE);
        cr_expect(k == 0 ? r.different == 1 : r.unjudged == 1 && r.different == 0);
        ari_sketch_report_fini(&r);
        cr_assert_eq(remove_all(in_folder("a")) + remove_all(in_folder("b")), 0);
    }
}

/* What the other run alone says of itself holds too. */
Test(sketch_runs, either_run_may_leave_a_tensor_out)
{
    static float x[ELEMENTS];
    fill(x, ELEMENTS, 29);
    const sketch_part plain[] = {matrix("x:fwd", x), matrix("y:fwd", x)};
    sketch_part left_out[] = {plain[0], plain[1]};
    left_out[1].left_out = "ranks have other lengths";
    for (int k = 0; k < 2; k++) {
        write_one(k == 0 ? "a" : "b", plain, 2);
        write_one(k == 0 ? "b" : "a", left_out, 2);
        ari_sketch_report r = compared(BITS);
        cr_expect(r.left_out == 1 && r.compared == 1 && r.different == 0 && r.unjudged == 0);
        ari_sketch_report_fini(&r);
        cr_assert_eq(remove_all(in_folder("a")) + remove_all(in_folder("b")), 0);
    }
}

Test(sketch_runs, json_says_which_steps_of_which_run_are_incomplete)
{
    static float x[ELEMENTS];
    fill(x, ELEMENTS, 30);
    write_with_missing(x, 3, 3);
    ari_sketch_report r = compared(BITS);
    json_t *json = ari_sketch_report_json(&r, &(ar_verify_options){.reference = "a", .other = "b"});
    const json_t *steps = json_object_get(json, "steps"), *incomplete = json_object_get(steps, "incomplete");
    cr_expect_eq(json_integer_value(json_object_get(steps, "common")), 2);
    cr_expect(json_array_size(json_array_get(incomplete, 0)) == 0 &&
              json_array_size(json_array_get(incomplete, 1)) == 1);
    json_decref(json);
    ari_sketch_report_fini(&r);
}

/* A key's bias has a gradient that is rounding: both runs take whole steps of other signs, in each of three steps.
 * Beside a weight that has a true gradient. */
static void write_key_bias(const char *run, uint64_t seed, float rate)
{
    static float weight[ELEMENTS], bias[ELEMENTS], gradient[2][ELEMENTS];
    fill(weight, ELEMENTS, 40);
    fill(bias, ELEMENTS, 41);
    for (int step = 1; step <= 3; step++) {
        static const char *const stem[] = {"k.bias:init",   "w.weight:init", "k.bias:grad",
                                           "w.weight:grad", "k.bias:new",    "w.weight:new"};
        char name[6][32];
        static float before[2][ELEMENTS];
        memcpy(before[0], bias, sizeof bias);
        memcpy(before[1], weight, sizeof weight);
        fill(gradient[1], ELEMENTS, (uint64_t)(50 + step));
        fill(gradient[0], ELEMENTS, seed + (uint64_t)step);
        for (size_t i = 0; i < ELEMENTS; i++) {
            bias[i] -= gradient[0][i] > 0.0f ? rate : -rate;
            weight[i] -= gradient[1][i] > 0.0f ? 1e-3f : -1e-3f;
            gradient[0][i] *= 1e-9f;
        }
        for (int k = 0; k < 6; k++)
            snprintf(name[k], sizeof name[k], step > 1 ? "%s@%d" : "%s", stem[k], step);
        const sketch_part parts[] = {matrix(name[0], before[0]),   matrix(name[1], before[1]),
                                     matrix(name[2], gradient[0]), matrix(name[3], gradient[1]),
                                     matrix(name[4], bias),        matrix(name[5], weight)};
        write_sketches(run, 0, 1, step, parts + (step > 1 ? 2 : 0), step > 1 ? 4 : 6);
    }
}

Test(sketch_runs, an_update_whose_gradient_is_all_rounding_is_excused_in_every_step)
{
    for (int k = 0; k < 2; k++) {
        write_key_bias("a", 60, 1e-3f);
        write_key_bias("b", 70, k == 0 ? 1e-3f : 1e-2f);
        ari_sketch_report r = compared((ar_verify_options){.rule = AR_VERIFY_TOLERANCE, .rtol = 1e-6, .atol = 1e-6});
        cr_expect(k == 0 ? r.different == 0 : r.different > 0, "%zu differ", r.different);
        cr_expect(k == 0 || strncmp(r.row[r.first_row].name, "k.bias:new", 10) == 0);
        ari_sketch_report_fini(&r);
        cr_assert_eq(remove_all(in_folder("a")) + remove_all(in_folder("b")), 0);
    }
}
