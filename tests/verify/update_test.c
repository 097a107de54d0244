/* SPDX-License-Identifier: Apache-2.0 */
/* One step of AdamW in two dumps: what is wrong with the other's is named, and what rounding makes of it is let pass. */
#include "tests/support/test.h"
#include "verify/verify_support.h"

enum { N = 96, NOISE = 8, KINDS = 5 };

typedef struct adam {
    double lr, beta1, beta2, decay, clip;
    bool sgd, decay_in_gradient, twice;
    int ahead;   /* steps that the counter has had */
    int history; /* whose its moments have; 0: none */
    double eps;  /* beside the root; inside of it where it is negative */
} adam;

static const adam right = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .decay = 0.5, .clip = 0.2};

typedef struct run {
    float init[N], grad[N], m[N], v[N], new[N], norm;
    bool sgd; /* which has no second moment */
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
    r->sgd = false;
}

static void step(run *r, adam a)
{
    for (int i = 0; i < N; i++) {
        double w = (double)r->init[i], m = 0.0, v = 0.0, g = (double)r->grad[i] * a.clip;
        if (a.history > 0)
            m = 1e-3 * cos((4.1 + a.history) * i), v = 1e-6 * (2.0 + sin((3.3 + a.history) * i));
        g += a.decay_in_gradient ? a.decay * w : 0.0;
        for (int t = 1; t <= (a.twice ? 2 : 1); t++) {
            const int as = t + a.ahead;
            m = a.beta1 * m + (1.0 - a.beta1) * g;
            v = a.beta2 * v + (1.0 - a.beta2) * g * g;
            w -= a.decay_in_gradient ? 0.0 : a.lr * a.decay * w;
            const double second = v / (1.0 - pow(a.beta2, as));
            const double root = a.eps < 0.0 ? sqrt(second - a.eps) : sqrt(second) + 1e-12 + a.eps;
            w -= a.sgd ? a.lr * g : a.lr * m / (1.0 - pow(a.beta1, as)) / root;
        }
        r->m[i] = (float)m;
        r->v[i] = (float)v;
        r->new[i] = (float)w;
    }
}

/* Of one parameter, or of two. */
static void write_run(const char *path, const run *r, const run *other)
{
    const ar_st_tensor t[] = {vector_of("grad_norm:clip", AR_F32, 1, &r->norm),
                              vector_of("w.weight:init", AR_F32, N, r->init),
                              vector_of("w.weight:grad", AR_F32, N, r->grad),
                              vector_of("w.weight:new", AR_F32, N, r->new),
                              vector_of("w.weight:m", AR_F32, N, r->m),
                              vector_of("w.weight:v", AR_F32, N, r->v),
                              vector_of("x.weight:init", AR_F32, N, other ? other->init : NULL),
                              vector_of("x.weight:grad", AR_F32, N, other ? other->grad : NULL),
                              vector_of("x.weight:new", AR_F32, N, other ? other->new : NULL),
                              vector_of("x.weight:m", AR_F32, N, other ? other->m : NULL),
                              vector_of("x.weight:v", AR_F32, N, other ? other->v : NULL)};
    write_tensors(path, t, other ? 1 + 2 * KINDS : r->sgd ? KINDS : 1 + KINDS);
}

static ar_verify_report *verify_two(const run *a, const run *b, const run *a2, const run *b2)
{
    const two_files f = two_files_make();
    const ar_verify_options o = {
        .reference = f.reference, .other = f.other, .rule = AR_VERIFY_TOLERANCE, .rtol = 1e-5, .atol = 1e-7};
    ar_verify_report *r = NULL;
    write_run(f.reference, a, a2);
    write_run(f.other, b, b2);
    cr_assert_ok(ar_verify(&r, &o));
    two_files_remove(&f);
    return r;
}

static ar_verify_report *verify_runs(const run *a, const run *b)
{
    return verify_two(a, b, NULL, NULL);
}

Test(update, mistakes_are_named_by_the_state)
{
    const struct {
        adam with;
        const char *cause;
    } cases[] = {
        {{2e-3, 0.9, 0.95, 0.5, 0.2, false, false, false, 0, 0, 0.0}, "other_learning_rate"},
        {{1e-3, 0.95, 0.9, 0.5, 0.2, false, false, false, 0, 0, 0.0}, "other_betas"},
        {{1e-3, 0.9, 0.999, 0.5, 0.2, false, false, false, 0, 0, 0.0}, "other_betas"},
        {{1e-3, 0.9, 0.95, 0.0, 0.2, false, false, false, 0, 0, 0.0}, "weight_decay"},
        {{1e-3, 0.9, 0.95, 0.5, 1.0, false, false, false, 0, 0, 0.0}, "clip_factor"},
        {{1e-3, 0.9, 0.95, 0.5, 0.04, false, false, false, 0, 0, 0.0}, "clip_factor"},
        {{1e-3, 0.9, 0.95, 0.5, 0.2, false, true, false, 0, 0, 0.0}, "decay_in_gradient"},
        {{1e-3, 0.9, 0.95, 0.5, 0.2, false, false, true, 0, 0, 0.0}, "update_twice"},
        {{1e-3, 0.9, 0.95, 0.5, 0.2, false, false, false, 1, 0, 0.0}, "adam_step_counter"},
        {{1e-3, 0.9, 0.95, 0.5, 0.2, false, false, false, 0, 0, 1e-3}, "adam_eps"},
        {{1e-3, 0.9, 0.95, 0.5, 0.2, false, false, false, 0, 0, -1e-5}, "adam_eps"},
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
    resumed.history = 1;
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

static void expect_cause(ar_verify_report *r, const char *cause, const char *words)
{
    cr_assert(!r->same);
    cr_expect_str_eq(r->row[r->first].evidence.cause, cause, "%s", r->row[r->first].hint);
    cr_expect(strstr(r->row[r->first].hint, words), "%s", r->row[r->first].hint);
    ar_verify_report_destroy(r);
}

Test(update, nesterov_s_momentum_is_told)
{
    run r[2];
    for (int k = 0; k < 2; k++) {
        begin(&r[k], 1.0);
        r[k].sgd = true;
        for (int i = 0; i < N; i++) {
            r[k].m[i] = r[k].grad[i];
            r[k].new[i] = r[k].init[i] - (k == 0 ? 0.1f : 0.19f) * r[k].grad[i];
        }
    }
    expect_cause(verify_runs(&r[0], &r[1]), "nesterov", "momentum of 0.9");
}

/* The third step of the moments, the first of a counter that was not loaded with them. */
Test(update, a_counter_that_a_resume_forgot_is_told)
{
    adam resumed = right;
    run a, b;
    resumed.history = 1;
    resumed.ahead = 2;
    begin(&a, 1.0);
    begin(&b, 1.0);
    step(&a, resumed);
    resumed.ahead = 0;
    step(&b, resumed);
    expect_cause(verify_runs(&a, &b), "adam_step_counter", "as that of step 1 would be in step 3");
}

/* Within a tolerance, but the other optimizer's. */
Test(update, moments_of_16_bits_are_told)
{
    run a, b;
    begin(&a, 1.0);
    begin(&b, 1.0);
    step(&a, right);
    step(&b, right);
    for (int i = 0; i < N; i++) {
        uint32_t bits;
        memcpy(&bits, &b.m[i], sizeof bits);
        bits = (bits + 0x8000) & 0xffff0000;
        memcpy(&b.m[i], &bits, sizeof bits);
    }
    const two_files f = two_files_make();
    const ar_verify_options o = {
        .reference = f.reference, .other = f.other, .rule = AR_VERIFY_TOLERANCE, .rtol = 1e-2, .atol = 1e-3};
    ar_verify_report *r = NULL;
    write_run(f.reference, &a, NULL);
    write_run(f.other, &b, NULL);
    cr_assert_ok(ar_verify(&r, &o));
    expect_cause(r, "fewer_bits", "keeps its state in 16 bits");
    write_run(f.reference, &b, NULL); /* both do */
    cr_assert_ok(ar_verify(&r, &o));
    cr_expect(r->same);
    ar_verify_report_destroy(r);
    two_files_remove(&f);
}

/* What a module puts out in the second step, beside the bias of that its gradients of rounding moved either way. */
static void write_output(const char *path, double sign, float off)
{
    enum { ROWS = 3 };
    run r;
    float out[ROWS * N];
    begin(&r, sign);
    step(&r, right);
    for (int i = 0; i < ROWS * N; i++)
        out[i] = (float)sin(1.7 * i) + r.new[i % N] + off;
    const ar_st_tensor t[] = {vector_of("k.bias:init", AR_F32, N, r.init),
                              vector_of("k.bias:grad", AR_F32, N, r.grad),
                              vector_of("k.bias:new", AR_F32, N, r.new),
                              {.name = "k:fwd@2", .dtype = AR_F32, .ndim = 2, .shape = {ROWS, N}, .data = out}};
    write_tensors(path, t, sizeof t / sizeof *t);
}

Test(update, outputs_of_a_bias_that_rounding_moved_are_let_pass)
{
    const two_files f = two_files_make();
    const ar_verify_options o = {
        .reference = f.reference, .other = f.other, .rule = AR_VERIFY_TOLERANCE, .rtol = 1e-5, .atol = 1e-6};
    ar_verify_report *r = NULL;
    write_output(f.reference, 1.0, 0.0f);
    write_output(f.other, -1.0, 0.0f);
    cr_assert_ok(ar_verify(&r, &o));
    cr_expect(r->same);
    cr_expect_eq(r->elements_doubted, NOISE + 3 * NOISE);
    ar_verify_report_destroy(r);
    write_output(f.other, -1.0, 1e-4f);
    cr_assert_ok(ar_verify(&r, &o));
    cr_expect(!r->same);
    cr_expect_geq(r->elements_different, 3 * (N - NOISE));
    ar_verify_report_destroy(r);
    two_files_remove(&f);
}

Test(update, state_that_a_resume_lost_is_told)
{
    adam resumed = right;
    run a, b, both;
    resumed.history = 1;
    begin(&a, 1.0);
    begin(&b, 1.0);
    step(&a, resumed);
    step(&b, right);
    expect_cause(verify_runs(&a, &b), "optimizer_state_lost", "moments are");
    both = b;
    memcpy(both.m, a.m, sizeof a.m);
    expect_cause(verify_runs(&a, &both), "optimizer_state_lost", "second moment is");
}

Test(update, state_of_another_parameter_is_told)
{
    adam with[2] = {right, right};
    run a[2], b[2];
    for (int k = 0; k < 2; k++) {
        with[k].history = k + 1;
        begin(&a[k], 1.0);
        for (int i = 0; i < N; i++)
            a[k].grad[i] *= k > 0 ? (float)(1.0 + 0.5 * sin(0.7 * i)) : 1.0f;
        b[k] = a[k];
        step(&a[k], with[k]);
    }
    step(&b[0], with[1]);
    step(&b[1], with[0]);
    expect_cause(verify_two(&a[0], &b[0], &a[1], &b[1]), "optimizer_state_misplaced", "history of x.weight");
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
    OWNED(ar_verify_report_destroy) ar_verify_report *report = verify_runs(&r[0], &r[1]);
    size_t i = 0;
    while (i < report->rows && strcmp(report->row[i].name, "grad_norm:clip") != 0)
        i++;
    cr_assert_lt(i, report->rows);
    cr_expect_str_eq(report->row[i].evidence.cause, "norm_of_own_gradients", "%s", report->row[i].hint);
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
    OWNED(ar_verify_report_destroy) ar_verify_report *r = verify_runs(&a, &b);
    cr_expect(!r->same);
    cr_expect_geq(r->elements_different, N / 2);
}

/* Steps 1 and 2 of a run, whose correction in the second is that of `as`. */
static void write_two_steps(const char *path, int as)
{
    run r[2];
    for (int t = 0; t < 2; t++) {
        begin(&r[t], 1.0);
        for (int i = 0; i < N; i++) {
            const double g = (double)r[0].grad[i] * (t > 0 ? 1.0 + 0.5 * sin(1.9 * i) : 1.0), by = t > 0 ? as : 1;
            const double m = 0.9 * (t > 0 ? (double)r[0].m[i] : 0.0) + 0.1 * g;
            const double v = 0.95 * (t > 0 ? (double)r[0].v[i] : 0.0) + 0.05 * g * g;
            const double corrected = sqrt(1.0 - pow(0.95, by)) / (1.0 - pow(0.9, by));
            r[t].grad[i] = (float)g;
            r[t].m[i] = (float)m;
            r[t].v[i] = (float)v;
            r[t].new[i] = (float)((double)(t > 0 ? r[0].new : r[0].init)[i] - 1e-3 * corrected * m / sqrt(v));
        }
    }
    const ar_st_tensor all[] = {
        vector_of("w.weight:init", AR_F32, N, r[0].init), vector_of("w.weight:grad", AR_F32, N, r[0].grad),
        vector_of("w.weight:new", AR_F32, N, r[0].new),   vector_of("w.weight:m", AR_F32, N, r[0].m),
        vector_of("w.weight:v", AR_F32, N, r[0].v),       vector_of("w.weight:grad@2", AR_F32, N, r[1].grad),
        vector_of("w.weight:new@2", AR_F32, N, r[1].new), vector_of("w.weight:m@2", AR_F32, N, r[1].m),
        vector_of("w.weight:v@2", AR_F32, N, r[1].v)};
    write_tensors(path, all, sizeof all / sizeof *all);
}

/* Decay rates that nobody tells are what the second moments keep of the first ones. */
Test(update, a_counter_is_told_by_what_moments_keep)
{
    const two_files f = two_files_make();
    const ar_verify_options o = {
        .reference = f.reference, .other = f.other, .rule = AR_VERIFY_TOLERANCE, .rtol = 1e-5, .atol = 1e-7};
    ar_verify_report *r = NULL;
    write_two_steps(f.reference, 2);
    write_two_steps(f.other, 5);
    cr_assert_ok(ar_verify(&r, &o));
    two_files_remove(&f);
    expect_cause(r, "adam_step_counter", "as that of step 5 would be in step 2");
}

/* --- a gradient that did not come --------------------------------------------------------------------------------- */

Test(update, outputs_that_got_no_gradient_are_told)
{
    enum { OUT = 48, IN = 16, TOKENS = 32 };
    float weight[2][OUT * IN], input[2][TOKENS * IN];
    const two_files f = two_files_make();
    for (int i = 0; i < OUT * IN; i++)
        weight[0][i] = weight[1][i] = (float)sin(1.3 * i);
    for (int i = IN * IN; i < 2 * IN * IN; i++) /* the keys' rows */
        weight[1][i] = 0.0f;
    for (int i = 0; i < TOKENS * IN; i++) {
        input[0][i] = (float)(sin(2.1 * i) + 0.4 * cos(0.37 * i * i));
        input[1][i] = (float)sin(2.1 * i);
    }
    for (int k = 0; k < 2; k++) {
        const ar_st_tensor t[] = {
            {.name = "h.attn.qkv:bwd", .dtype = AR_F32, .ndim = 3, .shape = {2, TOKENS / 2, IN}, .data = input[k]},
            {.name = "h.attn.qkv.weight:grad", .dtype = AR_F32, .ndim = 2, .shape = {OUT, IN}, .data = weight[k]}};
        write_tensors(k == 0 ? f.reference : f.other, t, 2);
    }
    const ar_verify_options o = {.reference = f.reference, .other = f.other};
    ar_verify_report *r = NULL;
    cr_assert_ok(ar_verify(&r, &o));
    two_files_remove(&f);
    expect_cause(r, "no_gradient", "rows 16..31 of 48 of h.attn.qkv.weight's");
}

/* A second step of SGD with a batch that is nearly the first: m = keeps * m + takes * gradient. */
static void write_momentum(const char *path, double keeps, double takes)
{
    float first[N], grad[N], m[N];
    for (int i = 0; i < N; i++) {
        const double was = 0.02 + 0.01 * sin(2.9 * i), now = was * (1.0 + 1e-3 * sin(1.7 * i));
        first[i] = (float)was;
        grad[i] = (float)now;
        m[i] = (float)(keeps * was + takes * now);
    }
    const ar_st_tensor t[] = {vector_of("w.weight:m", AR_F32, N, first), vector_of("w.weight:grad@2", AR_F32, N, grad),
                              vector_of("w.weight:m@2", AR_F32, N, m)};
    write_tensors(path, t, 3);
}

Test(update, dampening_of_sgd_is_told_from_a_factor)
{
    const two_files f = two_files_make();
    const ar_verify_options o = {.reference = f.reference, .other = f.other, .rule = AR_VERIFY_TOLERANCE, .rtol = 1e-5};
    ar_verify_report *r = NULL;
    write_momentum(f.reference, 0.9, 1.0);
    write_momentum(f.other, 0.9, 0.1);
    cr_assert_ok(ar_verify(&r, &o));
    two_files_remove(&f);
    expect_cause(r, "sgd_dampening", "keeps 0.9 of what it was");
}

/* Resumed with the weights of before the step that the optimizer's state is of. */
Test(update, weights_of_before_a_step_are_told)
{
    const two_files f = two_files_make();
    const ar_verify_options o = {.reference = f.reference, .other = f.other, .rule = AR_VERIFY_TOLERANCE, .rtol = 1e-5};
    ar_verify_report *r = NULL;
    run at;
    begin(&at, 1.0);
    step(&at, right);
    for (int k = 0; k < 2; k++) {
        const ar_st_tensor t = vector_of("w.weight:init", AR_F32, N, k == 0 ? at.new : at.init);
        write_tensors(k == 0 ? f.reference : f.other, &t, 1);
    }
    cr_assert_ok(ar_verify(&r, &o));
    two_files_remove(&f);
    expect_cause(r, "other_point_of_step", "one step apart: what differs is moved up or down by 0.001 each");
}
