/* SPDX-License-Identifier: Apache-2.0 */
/* One step of AdamW in two dumps: what is wrong with the other's is named, and what rounding makes of it is let pass. */
#include <criterion/criterion.h>

#include "verify/verify_support.h"

TestSuite(update, .timeout = 300);

enum { N = 96, NOISE = 8, KINDS = 6 };

typedef struct adam {
    double lr, beta1, beta2, decay, clip;
    bool sgd, decay_in_gradient, twice;
    int ahead;    /* steps that the counter has had */
    bool resumed; /* its moments have a history */
} adam;

static const adam right = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .decay = 0.5, .clip = 0.2};

typedef struct run {
    float init[N], grad[N], m[N], v[N], new[N], norm;
} run;

/* Of the last elements the gradient is rounding alone, of `sign`. */
static void begin(run *r, double sign)
{
    for (int i = 0; i < N; i++) {
        r->init[i] = (float)(0.5 + 0.3 * sin(1.0 + 3.7 * i));
        r->grad[i] = (float)((0.02 + 0.01 * sin(2.9 * i)) * (i % 3 ? 1.0 : -1.0));
        if (i >= N - NOISE)
            r->grad[i] = (float)(sign * 1e-9 * (1 + i % 3));
    }
    r->norm = 5.0f;
}

static void step(run *r, adam a)
{
    for (int i = 0; i < N; i++) {
        double w = (double)r->init[i], m = 0.0, v = 0.0, g = (double)r->grad[i] * a.clip;
        if (a.resumed)
            m = 1e-3 * cos(5.1 * i), v = 1e-6 * (2.0 + sin(4.3 * i));
        g += a.decay_in_gradient ? a.decay * w : 0.0;
        for (int t = 1; t <= (a.twice ? 2 : 1); t++) {
            const int as = t + a.ahead;
            m = a.beta1 * m + (1.0 - a.beta1) * g;
            v = a.beta2 * v + (1.0 - a.beta2) * g * g;
            w -= a.decay_in_gradient ? 0.0 : a.lr * a.decay * w;
            w -= a.sgd ? a.lr * g : a.lr * m / (1.0 - pow(a.beta1, as)) / (sqrt(v / (1.0 - pow(a.beta2, as))) + 1e-12);
        }
        r->m[i] = (float)m;
        r->v[i] = (float)v;
        r->new[i] = (float)w;
    }
}

static void write_run(const char *path, const run *r)
{
    const ar_st_tensor t[] = {
        vector_of("w.weight:init", AR_F32, N, r->init), vector_of("w.weight:grad", AR_F32, N, r->grad),
        vector_of("w.weight:new", AR_F32, N, r->new),   vector_of("w.weight:m", AR_F32, N, r->m),
        vector_of("w.weight:v", AR_F32, N, r->v),       vector_of("grad_norm:clip", AR_F32, 1, &r->norm)};
    write_tensors(path, t, KINDS);
}

static ar_verify_report *verify_runs(const run *a, const run *b)
{
    const two_files f = two_files_make();
    const ar_verify_options o = {
        .reference = f.reference, .other = f.other, .rule = AR_VERIFY_TOLERANCE, .rtol = 1e-5, .atol = 1e-7};
    ar_verify_report *r = NULL;
    write_run(f.reference, a);
    write_run(f.other, b);
    cr_assert_eq(ar_verify(&r, &o), AR_OK, "%s", ar_error_message());
    two_files_remove(&f);
    return r;
}

Test(update, mistakes_are_named_by_the_state)
{
    const struct {
        adam with;
        const char *cause;
    } cases[] = {
        {{2e-3, 0.9, 0.95, 0.5, 0.2, false, false, false, 0, false}, "other_learning_rate"},
        {{1e-3, 0.95, 0.9, 0.5, 0.2, false, false, false, 0, false}, "other_betas"},
        {{1e-3, 0.9, 0.999, 0.5, 0.2, false, false, false, 0, false}, "other_betas"},
        {{1e-3, 0.9, 0.95, 0.0, 0.2, false, false, false, 0, false}, "weight_decay"},
        {{1e-3, 0.9, 0.95, 0.5, 1.0, false, false, false, 0, false}, "clip_factor"},
        {{1e-3, 0.9, 0.95, 0.5, 0.04, false, false, false, 0, false}, "clip_factor"},
        {{1e-3, 0.9, 0.95, 0.5, 0.2, false, true, false, 0, false}, "decay_in_gradient"},
        {{1e-3, 0.9, 0.95, 0.5, 0.2, false, false, true, 0, false}, "update_twice"},
        {{1e-3, 0.9, 0.95, 0.5, 0.2, false, false, false, 1, false}, "adam_step_counter"},
    };
    run a, b;
    begin(&a, 1.0);
    step(&a, right);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        begin(&b, 1.0);
        step(&b, cases[i].with);
        ar_verify_report *r = verify_runs(&a, &b);
        cr_expect(!r->same, "case %zu", i);
        const char *cause = r->same ? NULL : r->row[r->first].evidence.cause;
        cr_expect(cause && strcmp(cause, cases[i].cause) == 0, "case %zu: %s", i, cause ? cause : "none");
        ar_verify_report_destroy(r);
    }
}

Test(update, a_clip_factor_is_named_where_moments_have_a_history)
{
    adam resumed = right;
    run a, b;
    resumed.resumed = true;
    begin(&a, 1.0);
    begin(&b, 1.0);
    step(&a, resumed);
    resumed.clip = 1.0;
    step(&b, resumed);
    ar_verify_report *r = verify_runs(&a, &b);
    cr_assert(!r->same);
    cr_expect_str_eq(r->row[r->first].evidence.cause, "clip_factor", "%s", r->row[r->first].hint);
    ar_verify_report_destroy(r);
    resumed.beta1 = 0.8; /* a difference that is not along the gradient alone */
    step(&b, resumed);
    r = verify_runs(&a, &b);
    cr_assert(!r->same);
    cr_expect_str_neq(r->row[r->first].evidence.cause, "clip_factor", "%s", r->row[r->first].hint);
    ar_verify_report_destroy(r);
}

Test(update, a_norm_of_gradients_that_differ_is_right)
{
    run r[2];
    for (int k = 0; k < 2; k++) {
        double square = 0.0;
        begin(&r[k], 1.0);
        for (int i = 0; i < N; i++) {
            r[k].grad[i] += k > 0 ? 0.01f * (float)cos(7.1 * i) : 0.0f;
            square += (double)r[k].grad[i] * (double)r[k].grad[i];
        }
        r[k].norm = (float)sqrt(square);
        step(&r[k], right);
    }
    ar_verify_report *report = verify_runs(&r[0], &r[1]);
    size_t i = 0;
    while (i < report->rows && strcmp(report->row[i].name, "grad_norm:clip") != 0)
        i++;
    cr_assert_lt(i, report->rows);
    cr_expect_str_eq(report->row[i].evidence.cause, "norm_of_own_gradients", "%s", report->row[i].hint);
    ar_verify_report_destroy(report);
}

/* Adam makes a step of lr of any gradient: of rounding, either way. */
Test(update, steps_of_rounding_are_let_pass)
{
    run a, b;
    begin(&a, 1.0);
    begin(&b, -1.0);
    step(&a, right);
    step(&b, right);
    ar_verify_report *r = verify_runs(&a, &b);
    cr_expect(r->same);
    cr_expect_eq(r->elements_doubted, NOISE);
    ar_verify_report_destroy(r);
    b.new[3] += 1e-5f; /* of a gradient that is right: a hundredth of a step */
    r = verify_runs(&a, &b);
    cr_expect(!r->same);
    cr_expect_eq(r->elements_different, 1);
    ar_verify_report_destroy(r);
}

Test(update, a_wrong_rate_of_sgd_is_not_hidden)
{
    adam with = right;
    run a, b;
    with.sgd = true;
    with.lr = 1.0;
    with.decay = 1e-4;
    begin(&a, 1.0);
    begin(&b, 1.0);
    for (int i = 0; i < N - NOISE; i++)
        b.grad[i] *= 1.000001f; /* rounding */
    step(&a, with);
    with.lr *= 1.5;
    with.decay /= 1.5;
    step(&b, with);
    ar_verify_report *r = verify_runs(&a, &b);
    cr_expect(!r->same);
    cr_expect_geq(r->elements_different, N / 2);
    ar_verify_report_destroy(r);
}
