/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/verify.h"
#include "ref/io/safetensors_private.h"
#include "support/together.h"
#include "tests/verify/two_dumps.h"

static const float ones[6] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f};

/* What the reference's file holds, what the other's, and what is allowed. */
typedef struct files {
    const ar_st_tensor *a, *b;
    size_t na, nb;
    const ar_st_tensor *allowed;
    size_t n_allowed;
} files;

static ar_status try_tensors(ar_verify_report **r, ar_verify_options o, files t)
{
    SCOPED(two_files_end) const two_files f = two_files_make();
    write_tensors(f.reference, t.a, t.na);
    write_tensors(f.other, t.b, t.nb);
    o.reference = f.reference;
    o.other = f.other;
    if (t.allowed) {
        write_tensors(f.allowed, t.allowed, t.n_allowed);
        o.allowed = f.allowed;
    }
    ar_error_clear();
    return ar_verify(r, &o);
}

static ar_verify_report *verify_tensors(ar_verify_options o, files t)
{
    ar_verify_report *r = NULL;
    cr_assert_ok(try_tensors(&r, o, t));
    return r;
}

static void expect_refused(ar_verify_options o, files t, ar_status status, const char *words)
{
    ar_verify_report *r = NULL;
    cr_expect_refused(try_tensors(&r, o, t), status, words);
}

CLAIM(ulps_allow_so_many_steps_and_no_more)
{
    const uint32_t a[] = {0x3f800000u}, b[] = {0x3f800003u};
    for (uint64_t ulp = 2; ulp <= 3; ulp++) {
        OWNED(ar_verify_report_destroy)
        ar_verify_report *r = verify_vectors((ar_verify_options){.rule = AR_VERIFY_ULP, .ulp = ulp}, AR_F32, 1, a, b);
        cr_expect_eq(r->same, ulp == 3);
        cr_expect_float_eq(r->row[0].ratio, 3.0 / (double)ulp, 1e-15);
        cr_expect_float_eq(r->row[0].allowed, (double)ulp * 0x1p-23, 1e-20);
        cr_expect_eq(r->row[0].bits_different, 1);
    }
}

CLAIM(tolerances_are_relative_to_the_reference)
{
    const float a[] = {100.0f, 1.0f}, b[] = {101.0f, 1.0f};
    const struct {
        double rtol, atol;
        bool same;
    } cases[] = {{0.01, 0.0, true}, {0.0099, 0.0, false}, {0.0, 1.0, true}, {0.0, 0.99, false}, {0.005, 0.5, true}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const ar_verify_options o = {.rule = AR_VERIFY_TOLERANCE, .rtol = cases[i].rtol, .atol = cases[i].atol};
        OWNED(ar_verify_report_destroy) ar_verify_report *r = verify_vectors(o, AR_F32, 2, a, b);
        cr_expect_eq(r->same, cases[i].same, "case %zu", i);
        cr_expect_float_eq(r->row[0].ratio, 1.0 / (cases[i].atol + cases[i].rtol * 100.0), 1e-12);
    }
}

CLAIM(sensitivity_reads_what_each_tensor_is_allowed)
{
    const float b[] = {1.0f, 1.25f, 1.0f, 1.0f, 1.0f, 1.0f};
    const double allowed[] = {0.25, 0.2};
    const ar_st_tensor reference[] = {vector_of("x", AR_F32, 6, ones), vector_of("y", AR_F32, 6, ones)};
    const ar_st_tensor other[] = {vector_of("x", AR_F32, 6, b), vector_of("y", AR_F32, 6, b)};
    const ar_st_tensor allows[] = {{.name = "x", .dtype = AR_F64, .ndim = 0, .data = &allowed[0]},
                                   vector_of("y", AR_F64, 1, &allowed[1])};
    const ar_verify_options o = {.rule = AR_VERIFY_SENSITIVITY};
    ar_verify_report *r = verify_tensors(o, (files){reference, other, 2, 2, allows, 2});
    cr_expect(r->different == 1 && r->row[0].state == AR_VERIFY_SAME && r->row[0].ratio == 1.0);
    cr_expect_float_eq(r->row[1].ratio, 1.25, 1e-15);
    ar_verify_report_destroy(r);
    expect_refused(o, (files){reference, other, 2, 2, allows, 1}, AR_ERR_NOT_FOUND, "y");
    const double nothing = NAN;
    const ar_st_tensor bad[] = {vector_of("x", AR_F64, 1, &nothing), allows[1]};
    expect_refused(o, (files){reference, other, 2, 2, bad, 2}, AR_ERR_DATA, "");
    const ar_st_tensor two[] = {vector_of("x", AR_F64, 2, allowed), allows[1]};
    expect_refused(o, (files){reference, other, 2, 2, two, 2}, AR_ERR_FORMAT, "");
}

CLAIM(another_dtype_differs_by_bits_and_is_compared_by_value)
{
    const uint16_t bf16[] = {0x3f80u, 0x3f80u};
    const int64_t whole[] = {1, 1};
    const ar_st_tensor a[] = {vector_of("x", AR_F32, 2, ones), vector_of("y", AR_F32, 2, ones)};
    const ar_st_tensor b[] = {vector_of("x", AR_BF16, 2, bf16), vector_of("y", AR_I64, 2, whole)};
    const ar_verify_rule rules[] = {AR_VERIFY_BITS, AR_VERIFY_ULP, AR_VERIFY_TOLERANCE};
    for (size_t i = 0; i < 3; i++) {
        OWNED(ar_verify_report_destroy)
        ar_verify_report *r = verify_tensors((ar_verify_options){.rule = rules[i]}, (files){a, b, 2, 2, NULL, 0});
        cr_expect_eq(r->same, rules[i] == AR_VERIFY_TOLERANCE);
        cr_expect_eq(r->row[0].state, r->same ? AR_VERIFY_SAME : AR_VERIFY_DTYPE);
        cr_expect(r->row[1].dtype == AR_F32 && r->row[1].other_dtype == AR_I64);
    }
}

/* Ids, indices, counts, masks: a token that is another one is no rounding, however large its number is. */
CLAIM(no_tolerance_lets_another_integer_pass)
{
    static const int64_t ids[2][2] = {{50000, 7}, {50001, 7}};
    static const int32_t counts[2][2] = {{50000, 7}, {50001, 7}};
    static const uint8_t bytes[2][2] = {{200, 7}, {201, 7}}, masks[2][2] = {{1, 1}, {0, 1}};
    static const float values[2][2] = {{50000.0f, 7.0f}, {50001.0f, 7.0f}};
    const struct {
        ar_dtype dtype[2];
        const void *data[2];
        bool same;
    } cases[] = {{{AR_I64, AR_I64}, {ids[0], ids[1]}, false},    {{AR_I32, AR_I32}, {counts[0], counts[1]}, false},
                 {{AR_U8, AR_U8}, {bytes[0], bytes[1]}, false},  {{AR_BOOL, AR_BOOL}, {masks[0], masks[1]}, false},
                 {{AR_I64, AR_I32}, {ids[0], counts[0]}, true},  {{AR_I64, AR_I32}, {ids[0], counts[1]}, false},
                 {{AR_I64, AR_F32}, {ids[0], values[1]}, false}, {{AR_F32, AR_F32}, {values[0], values[1]}, true}};
    const double much = 2.0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const ar_st_tensor a = vector_of("x", cases[i].dtype[0], 2, cases[i].data[0]),
                           b = vector_of("x", cases[i].dtype[1], 2, cases[i].data[1]),
                           allows = {.name = "x", .dtype = AR_F64, .ndim = 0, .data = &much};
        const ar_verify_options tolerance = {.rule = AR_VERIFY_TOLERANCE, .rtol = 1.0, .atol = 2.0};
        for (int measured = 0; measured < 2; measured++) {
            OWNED(ar_verify_report_destroy)
            ar_verify_report *r =
                verify_tensors(measured ? (ar_verify_options){.rule = AR_VERIFY_SENSITIVITY} : tolerance,
                               (files){&a, &b, 1, 1, measured ? &allows : NULL, (size_t)measured});
            cr_expect_eq(r->same, cases[i].same, "case %zu, measured %d", i, measured);
        }
    }
    const ar_st_tensor a = vector_of("x", AR_I64, 2, ids[0]), b = vector_of("x", AR_I64, 2, ids[1]);
    for (uint64_t ulp = 0; ulp < 2; ulp++) {
        OWNED(ar_verify_report_destroy)
        ar_verify_report *r =
            verify_tensors((ar_verify_options){.rule = AR_VERIFY_ULP, .ulp = ulp}, (files){&a, &b, 1, 1, NULL, 0});
        cr_expect_eq(r->same, ulp == 1);
    }
    const ar_st_tensor on = vector_of("x", AR_BOOL, 2, masks[0]), off = vector_of("x", AR_BOOL, 2, masks[1]);
    OWNED(ar_verify_report_destroy)
    ar_verify_report *r =
        verify_tensors((ar_verify_options){.rule = AR_VERIFY_ULP, .ulp = 1}, (files){&on, &off, 1, 1, NULL, 0});
    cr_expect(!r->same, "a mask has no steps");
    ar_verify_report_destroy(r);
    /* An allowance says nothing of integers, and need not. */
    const ar_st_tensor two[] = {a, vector_of("y", AR_F32, 2, values[0])},
                       allows = {.name = "y", .dtype = AR_F64, .ndim = 0, .data = &much};
    r = verify_tensors((ar_verify_options){.rule = AR_VERIFY_SENSITIVITY}, (files){two, two, 2, 2, &allows, 1});
    cr_expect(r->same);
}

CLAIM(what_one_side_lacks_makes_the_result_different)
{
    const ar_st_tensor a[] = {vector_of("x", AR_F32, 2, ones), vector_of("y", AR_F32, 2, ones)};
    const ar_st_tensor b[] = {vector_of("x", AR_F32, 2, ones), vector_of("z", AR_F32, 2, ones)};
    OWNED(ar_verify_report_destroy)
    ar_verify_report *r = verify_tensors((ar_verify_options){0}, (files){a, b, 2, 2, NULL, 0});
    cr_expect(!r->same && r->compared == 1 && r->different == 0 && r->missing == 1 && r->unexpected == 1);
    cr_expect(r->worst == SIZE_MAX && r->first != SIZE_MAX && r->row[r->first].state == AR_VERIFY_MISSING);
    ar_verify_report_destroy(r);
    const char *only[] = {"x"};
    r = verify_tensors((ar_verify_options){.only = only, .only_count = 1}, (files){a, b, 2, 2, NULL, 0});
    cr_expect(r->same && r->rows == 1);
}

/* Both have x and y, and the gradient of y; that of x only one has. */
static ar_verify_report *verify_lost(ar_verify_options o, const float *gradient, bool in_reference, bool known)
{
    const ar_st_tensor has[] = {vector_of("y:init", AR_F32, 2, ones), vector_of("y:grad", AR_F32, 2, ones),
                                vector_of(known ? "x:init" : "z:init", AR_F32, 2, ones),
                                vector_of("x:grad", AR_F32, 2, gradient)};
    return verify_tensors(o, in_reference ? (files){has, has, 4, 3, NULL, 0} : (files){has, has, 3, 4, NULL, 0});
}

CLAIM(a_gradient_that_one_dump_lost_is_a_difference_whatever_is_common)
{
    static const float zero[2] = {0.0f, 0.0f};
    const char *leave[] = {"x:grad"};
    const ar_verify_options common = {.common = true}, ignore = {.common = true, .leave = leave, .leave_count = 1};
    for (int in_reference = 0; in_reference < 2; in_reference++) {
        OWNED(ar_verify_report_destroy) ar_verify_report *r = verify_lost(common, ones, in_reference == 1, true);
        cr_expect(!r->same && r->lost_gradients == 1 && r->missing + r->unexpected == 1);
        cr_expect_str_eq(r->row[r->first].name, "x:grad");
        cr_expect_eq(r->row[r->first].state, in_reference ? AR_VERIFY_MISSING : AR_VERIFY_UNEXPECTED);
        ar_verify_report_destroy(r);
        r = verify_lost(common, zero, in_reference == 1, true);
        cr_expect(r->same, "a gradient of zeros is as good as none");
        ar_verify_report_destroy(r);
        r = verify_lost(common, ones, in_reference == 1, false);
        cr_expect(r->same, "a parameter that one dump lacks");
    }
    OWNED(ar_verify_report_destroy) ar_verify_report *r = verify_lost(ignore, ones, true, true);
    cr_expect(r->same);
}

CLAIM(dumps_of_which_one_has_no_gradients_have_lost_none)
{
    const ar_st_tensor a[] = {vector_of("x:init", AR_F32, 2, ones), vector_of("x:grad", AR_F32, 2, ones),
                              vector_of("x:grad@2", AR_F32, 2, ones)};
    OWNED(ar_verify_report_destroy)
    ar_verify_report *r = verify_tensors((ar_verify_options){.common = true}, (files){a, a, 3, 1, NULL, 0});
    cr_expect(r->same && r->left_out[0] == 2);
    ar_verify_report_destroy(r);
    r = verify_tensors((ar_verify_options){.common = true}, (files){a, a, 3, 2, NULL, 0});
    cr_expect(r->same && r->left_out[0] == 1, "a step that only one has");
}

/* 4096 elements of the reference, and times `by` with errors of a hundredth of the largest. */
static ar_verify_report *verify_factor(ar_verify_options o, float by)
{
    enum { N = 4096 };
    static float a[N], b[N];
    for (size_t i = 0; i < N; i++) {
        a[i] = noise(i);
        b[i] = by * a[i] + 0.01f * noise(i + N);
    }
    const ar_st_tensor of_a = vector_of("w:grad", AR_F32, N, a), of_b = vector_of("w:grad", AR_F32, N, b);
    return verify_tensors(o, (files){&of_a, &of_b, 1, 1, NULL, 0});
}

CLAIM(a_factor_on_all_elements_is_seen_beneath_their_errors)
{
    const ar_verify_options o = {.rule = AR_VERIFY_TOLERANCE, .atol = 0.1};
    OWNED(ar_verify_report_destroy) ar_verify_report *r = verify_factor(o, 1.005f);
    const ar_verify_row *row = &r->row[0];
    cr_expect(!r->same && row->off_by_factor && row->state == AR_VERIFY_DIFFERENT, "factor %g, allowed %g", row->scale,
              row->factor_allowed);
    cr_expect_float_eq(row->scale, 1.005, 1e-4);
    /* errors of 0.01 relative to the rms, 8 deviations, and a third of the elements by their size */
    cr_expect_float_eq(row->factor_allowed, 8.0 * 0.01 / sqrt(4096.0 / 3.0), 2e-4);
    ar_verify_report_destroy(r);
    r = verify_factor(o, 1.0f);
    cr_expect(r->same, "factor %g, allowed %g", r->row[0].scale, r->row[0].factor_allowed);
    ar_verify_report_destroy(r);
    r = verify_factor((ar_verify_options){.rule = AR_VERIFY_TOLERANCE, .rtol = 0.01, .atol = 0.1}, 1.005f);
    cr_expect(r->same, "the rule allows a factor");
}

/* A tensor that is the same in both, and one of the same kind, in the reference `size` of it and in the other `other`.
 * allowed: by a file; 0: by a tolerance. */
static bool is_same_beside_larger(const char *kind, double size, double other, double allowed)
{
    enum { N = 1024 };
    float large[N], a[N], b[N];
    char names[2][16];
    const double rule[] = {allowed, allowed};
    for (size_t i = 0; i < N; i++) {
        large[i] = noise(i);
        a[i] = (float)size * noise(i + N);
        b[i] = (float)other * noise(i + N);
    }
    snprintf(names[0], sizeof names[0], "w:%s", kind);
    snprintf(names[1], sizeof names[1], "k:%s", kind);
    const ar_st_tensor reference[] = {vector_of(names[0], AR_F32, N, large), vector_of(names[1], AR_F32, N, a)};
    const ar_st_tensor of_other[] = {reference[0], vector_of(names[1], AR_F32, N, b)};
    const ar_st_tensor allows[] = {{.name = names[0], .dtype = AR_F64, .ndim = 0, .data = &rule[0]},
                                   {.name = names[1], .dtype = AR_F64, .ndim = 0, .data = &rule[1]}};
    const ar_verify_options by_file = {.rule = AR_VERIFY_SENSITIVITY},
                            by_tolerance = {.rule = AR_VERIFY_TOLERANCE, .rtol = 1e-4, .atol = 2e-5};
    OWNED(ar_verify_report_destroy)
    ar_verify_report *r = verify_tensors(allowed > 0.0 ? by_file : by_tolerance,
                                         (files){reference, of_other, 2, 2, allowed > 0.0 ? allows : NULL, 2});
    return r->same;
}

/* The gradient of a router that chooses one expert, of a bias of keys or before a norm, is zero: what a run has of it is
 * rounding, and another run has exact zeros, or a part of it. */
CLAIM(what_rounding_leaves_of_zero_has_no_factor)
{
    static const char *const kinds[] = {"grad", "bwd", "m"};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        for (int file = 0; file < 2; file++) {
            const double allowed = file ? 2e-5 : 0.0;
            cr_expect(is_same_beside_larger(kinds[i], 1e-9, 0.0, allowed), "%s, zeros", kinds[i]);
            cr_expect(is_same_beside_larger(kinds[i], 1e-9, 0.9e-9, allowed), "%s, a part", kinds[i]);
            cr_expect(is_same_beside_larger(kinds[i], 1e-6, -1e-6, allowed), "%s, another sign", kinds[i]);
            cr_expect(!is_same_beside_larger(kinds[i], 1.9e-5, 0.0, allowed), "%s, a 50,000th is a gradient", kinds[i]);
            cr_expect(!is_same_beside_larger(kinds[i], 1e-9, 1.9e-5, allowed), "%s, as the other has", kinds[i]);
        }
    }
    cr_expect(is_same_beside_larger("v", 1e-12, 0.0, 0.0), "a square");
    cr_expect(!is_same_beside_larger("v", 1e-8, 0.0, 0.0), "of a gradient that is a 10,000th");
    cr_expect(!is_same_beside_larger("fwd", 1e-9, 0.0, 0.0), "of outputs nothing is known to be zero");
}

/* The report on a tensor of ones and 0.99 against ones, allowed so much by a file for this arithmetic. */
static ar_verify_report *verify_allowed(double allowed, const char *arithmetic)
{
    static const float off[6] = {1.0f, 0.99f, 1.0f, 1.0f, 1.0f, 1.0f};
    const ar_st_tensor a = vector_of("x:fwd", AR_F32, 6, ones), b = vector_of("x:fwd", AR_F32, 6, off),
                       allows = vector_of("x:fwd", AR_F64, 1, &allowed);
    const char *metadata[] = {"anyrank.allows", arithmetic};
    SCOPED(two_files_end) const two_files f = two_files_make();
    ar_verify_report *r = NULL;
    write_tensors(f.reference, &a, 1);
    write_tensors(f.other, &b, 1);
    cr_assert_ok(ari_st_write(f.allowed, &allows, 1, metadata, arithmetic != NULL));
    cr_assert_ok(ar_verify(
        &r, &(ar_verify_options){
                .reference = f.reference, .other = f.other, .allowed = f.allowed, .rule = AR_VERIFY_SENSITIVITY}));
    return r;
}

CLAIM(an_allowance_as_large_as_its_tensor_judges_nothing)
{
    static const struct {
        const char *arithmetic;
        double allowed;
        size_t unjudged;
    } cases[] = {{"f32", 0.13, 1},      {"f32", 0.12, 0}, {"the run's own formats", 0.13, 1},
                 {"bf16-pure", 7.0, 0}, {"bf16", 9.0, 1}, {NULL, 9.0, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        OWNED(ar_verify_report_destroy)
        ar_verify_report *r = verify_allowed(cases[i].allowed, cases[i].arithmetic);
        cr_expect(r->same && r->unjudged == cases[i].unjudged, "case %zu: %zu unjudged", i, r->unjudged);
    }
}

CLAIM(globs_choose_and_slips_are_refused)
{
    const ar_st_tensor a[] = {vector_of("l.0.w", AR_F32, 2, ones), vector_of("l.0.b", AR_F32, 2, ones),
                              vector_of("l.1.w", AR_F32, 2, ones)};
    const char *layer[] = {"l.0.*"}, *bias[] = {"*.b"}, *all[] = {"*"}, *slip[] = {"l.0.*", "l.7.*"};
    const struct {
        const char *const *only, *const *leave;
        size_t n_only, n_leave, rows;
        const char *message;
    } cases[] = {
        {layer, NULL, 1, 0, 2, NULL},
        {NULL, bias, 0, 1, 2, NULL},
        {layer, bias, 1, 1, 1, NULL},
        {slip, NULL, 2, 0, 0, "only 'l.7.*'"},
        {NULL, slip, 0, 2, 0, "ignore 'l.7.*'"},
        {NULL, all, 0, 1, 0, "none"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const ar_verify_options o = {.only = cases[i].only,
                                     .leave = cases[i].leave,
                                     .only_count = cases[i].n_only,
                                     .leave_count = cases[i].n_leave};
        const files t = {a, a, 3, 3, NULL, 0};
        if (cases[i].message) {
            expect_refused(o, t, AR_ERR_NOT_FOUND, cases[i].message);
            continue;
        }
        OWNED(ar_verify_report_destroy) ar_verify_report *r = verify_tensors(o, t);
        cr_expect_eq(r->rows, cases[i].rows, "case %zu: %zu rows", i, r->rows);
    }
}

CLAIM(tensors_without_elements_and_without_dimensions_are_tensors)
{
    const float one = 1.0f, two = 2.0f;
    const ar_st_tensor a[] = {
        {.name = "e", .dtype = AR_F32, .ndim = 3, .shape = {2, 0, 3}, .data = ones},
        {.name = "s", .dtype = AR_F32, .ndim = 0, .data = &one},
        {.name = "t", .dtype = AR_F32, .ndim = 8, .shape = {1, 2, 1, 3, 1, 1, 1, 1}, .data = ones}};
    ar_st_tensor b[] = {a[0], a[1], a[2]};
    b[1].data = &two;
    for (int differs = 0; differs < 2; differs++) {
        OWNED(ar_verify_report_destroy)
        ar_verify_report *r =
            verify_tensors((ar_verify_options){.nan_differs = differs == 1}, (files){a, b, 3, 3, NULL, 0});
        cr_expect(r->compared == 3 && r->different == 1 && strcmp(r->row[r->first].name, "s") == 0);
    }
}

CLAIM(options_that_make_no_sense_are_refused)
{
    const ar_st_tensor a = vector_of("x", AR_F32, 2, ones);
    const files t = {&a, &a, 1, 1, NULL, 0}, none = {&a, &a, 1, 0, NULL, 0};
    const double bad[] = {-1.0, NAN, INFINITY};
    for (size_t i = 0; i < 3; i++) {
        expect_refused((ar_verify_options){.rule = AR_VERIFY_TOLERANCE, .rtol = bad[i]}, t, AR_ERR_ARG, "");
        expect_refused((ar_verify_options){.rule = AR_VERIFY_TOLERANCE, .atol = bad[i]}, t, AR_ERR_ARG, "");
    }
    expect_refused((ar_verify_options){.rule = AR_VERIFY_SENSITIVITY}, t, AR_ERR_ARG, "");
    expect_refused((ar_verify_options){.rule = (ar_verify_rule)4}, t, AR_ERR_ARG, "rule 4, expected 0 to 3");
    expect_refused((ar_verify_options){.rule = AR_VERIFY_BITS}, none, AR_ERR_NOT_FOUND, "");
}

CLAIM(rows_stand_in_execution_order_and_the_worst_come_first_in_theirs)
{
    const float a[] = {1.0f, 1.0f}, b[] = {1.0f, 1.5f}, c[] = {1.0f, 3.0f};
    const char *names[] = {"model.layers.2.mlp.down_proj:fwd", "model.layers.0.mlp.down_proj:fwd",
                           "model.layers.10.mlp.down_proj:fwd"};
    ar_st_tensor reference[3], other[3];
    for (size_t i = 0; i < 3; i++) {
        reference[i] = vector_of(names[i], AR_F32, 2, a);
        other[i] = vector_of(names[i], AR_F32, 2, i == 0 ? a : i == 1 ? b : c);
    }
    OWNED(ar_verify_report_destroy)
    ar_verify_report *r = verify_tensors((ar_verify_options){0}, (files){reference, other, 3, 3, NULL, 0});
    cr_expect_str_eq(r->row[0].name, names[1]);
    cr_expect_str_eq(r->row[1].name, names[0]);
    cr_expect_str_eq(r->row[2].name, names[2]);
    cr_expect(r->first == 0 && r->worst == 2 && r->worst_order[0] == 2 && r->worst_order[1] == 0);
}

CLAIM(a_block_for_a_further_token_comes_after_the_norm)
{
    const float a[] = {1.0f, 1.0f}, b[] = {1.0f, 1.5f};
    const char *names[] = {"model.layers.3.enorm:fwd", "model.norm:fwd", "model.layers.3.mlp.down_proj:fwd"};
    ar_st_tensor reference[3], other[3];
    for (size_t i = 0; i < 3; i++) {
        reference[i] = vector_of(names[i], AR_F32, 2, a);
        other[i] = vector_of(names[i], AR_F32, 2, b);
    }
    OWNED(ar_verify_report_destroy)
    ar_verify_report *r = verify_tensors((ar_verify_options){0}, (files){reference, other, 3, 3, NULL, 0});
    cr_expect_str_eq(r->row[r->first].name, names[1]);
}

CLAIM(a_tensor_under_two_names_of_one_meaning_is_one)
{
    const float other_ones[] = {1.0f, 1.5f};
    const ar_st_tensor a[] = {vector_of("w:grad", AR_F32, 2, ones), vector_of("v:grad@2", AR_F32, 2, ones),
                              vector_of("u:grad", AR_F32, 2, ones)};
    const ar_st_tensor b[] = {vector_of("w", AR_F32, 2, other_ones), vector_of("v", AR_F32, 2, ones),
                              vector_of("u:grad", AR_F32, 2, ones)};
    SCOPED(two_files_end) const two_files f = two_files_make();
    char grads[96];
    snprintf(grads, sizeof grads, "%s/grads.safetensors", f.folder);
    write_tensors(f.reference, a, 3);
    write_tensors(grads, b, 3);
    OWNED(ar_verify_report_destroy) ar_verify_report *r = NULL;
    const ar_verify_options o = {.reference = f.reference, .other = grads};
    cr_assert_ok(ar_verify(&r, &o));
    cr_expect(r->compared == 2 && r->missing == 1 && r->unexpected == 1, "v of step 1 is not v of step 2");
    cr_expect(r->different == 1 && strcmp(r->row[r->first].name, "w:grad") == 0);
}

EVERY_CLAIM(verify_rules)
