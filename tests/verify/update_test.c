/* SPDX-License-Identifier: Apache-2.0 */
/* One step of AdamW in two dumps: what rounding makes of it passes, and what is wrong does not. */
#include "anyrank/verify.h"
#include "tests/verify/two_dumps.h"

enum { N = 96, NOISE = 8 };

typedef struct adam {
    double lr, beta1, beta2, decay, clip;
    bool sgd;
} adam;

static const adam right = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .decay = 0.5, .clip = 0.2};

typedef struct run {
    float init[N], grad[N], m[N], v[N], new[N], norm;
} run;

/* Before the step. Of the last elements the gradient is rounding alone, of `sign`. */
static run before_step(double sign)
{
    run r = {.norm = 5.0f};
    for (int i = 0; i < N; i++) {
        r.init[i] = (float)(0.5 + 0.3 * sin(1.0 + 3.7 * i));
        r.grad[i] = (float)((0.02 + 0.01 * sin(2.9 * i)) * (i % 3 ? 1.0 : -1.0));
        if (i >= N - NOISE)
            r.grad[i] = (float)(sign * 1e-9 * (1 + i % 3));
    }
    return r;
}

static void step(run *r, adam a)
{
    for (int i = 0; i < N; i++) {
        const double g = (double)r->grad[i] * a.clip, m = (1.0 - a.beta1) * g, v = (1.0 - a.beta2) * g * g;
        const double root = sqrt(v / (1.0 - a.beta2)) + 1e-12, w = (1.0 - a.lr * a.decay) * (double)r->init[i];
        r->m[i] = (float)m;
        r->v[i] = (float)v;
        r->new[i] = (float)(w - (a.sgd ? a.lr * g : a.lr * m / (1.0 - a.beta1) / root));
    }
}

static run stepped(adam a)
{
    run r = before_step(1.0);
    step(&r, a);
    return r;
}

static const ar_verify_options close_to = {.rule = AR_VERIFY_TOLERANCE, .rtol = 1e-5, .atol = 1e-7};

/* What a step leaves of a parameter: its initial value, gradient, new value and moments. */
typedef const char *const names[5];
static names of_w = {"w.weight:init", "w.weight:grad", "w.weight:new", "w.weight:m", "w.weight:v"};

static void put_run(made *m, names name, const run *a, const run *b, size_t n)
{
    const float *const of_a[] = {a->init, a->grad, a->new, a->m, a->v};
    const float *const of_b[] = {b->init, b->grad, b->new, b->m, b->v};
    for (size_t i = name[0] ? 0 : 1; i < n; i++)
        put_vectors(m, name[i], N, of_a[i], of_b[i]);
}

/* The dumps of a step of one parameter each, n of the five. */
static made runs(const run *a, const run *b, size_t n)
{
    made m = {.n = 0};
    put_vectors(&m, "grad_norm:clip", 1, &a->norm, &b->norm);
    put_run(&m, of_w, a, b, n);
    return m;
}

static void round_to_bf16(float *x)
{
    for (int i = 0; i < N; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        bits = (bits + 0x8000) & 0xffff0000;
        memcpy(&x[i], &bits, sizeof bits);
    }
}

/* The moments of so many parameters, of which the other dump's are in bf16. */
static made short_moments(size_t parameters)
{
    static const char moments[12][2][24] = {{"a:m", "a:v"}, {"b:m", "b:v"}, {"c:m", "c:v"}, {"d:m", "d:v"},
                                            {"e:m", "e:v"}, {"f:m", "f:v"}, {"g:m", "g:v"}, {"h:m", "h:v"},
                                            {"i:m", "i:v"}, {"j:m", "j:v"}, {"k:m", "k:v"}, {"l:m", "l:v"}};
    made m = {.n = 0};
    const run a = stepped(right);
    run b = a;
    round_to_bf16(b.m);
    round_to_bf16(b.v);
    for (size_t i = 0; i < parameters; i++) {
        put_vectors(&m, moments[i][0], N, a.m, b.m);
        put_vectors(&m, moments[i][1], N, a.v, b.v);
    }
    return m;
}

static const ar_verify_options loose = {.rule = AR_VERIFY_TOLERANCE, .rtol = 1e-2, .atol = 1e-3};

/* Within a tolerance, but the other optimizer's: all of 1,152 second moments are numbers of bf16, as are the first. */
Test(update, moments_of_16_bits_are_told)
{
    made m = short_moments(12);
    OWNED(ar_verify_report_destroy) ar_verify_report *r = judge(&m, loose);
    cr_expect(!r->same && r->row[r->first].pass == 'm');
}

/* A few moments have the bits of bf16 in right runs too, as those of gradients that are zero but for rounding. */
Test(update, a_few_moments_of_16_bits_are_compared_by_the_tolerance)
{
    made m = short_moments(10);
    OWNED(ar_verify_report_destroy) ar_verify_report *few = judge(&m, loose);
    cr_expect(few->same, "960 second moments");
    m = short_moments(12);
    const run a = stepped(right);
    put_vectors(&m, "last:v", N, a.v, a.v);
    OWNED(ar_verify_report_destroy) ar_verify_report *one_of_fp32 = judge(&m, loose);
    cr_expect(one_of_fp32->same);
}

/* What a module puts out in the second step, beside the bias of that its gradients of rounding moved either way; and
 * what one without weights hands on of that, which is smaller and off by as much. */
Test(update, outputs_of_a_bias_that_rounding_moved_are_let_pass)
{
    enum { ROWS = 3 };
    static const float off[] = {0.0f, 1e-4f};
    const ar_verify_options o = {.rule = AR_VERIFY_TOLERANCE, .rtol = 1e-5, .atol = 1e-6};
    for (size_t k = 0; k < 2; k++) {
        run a = before_step(1.0), b = before_step(-1.0);
        float out[2][ROWS * N], part[2][ROWS * N];
        step(&a, right);
        step(&b, right);
        for (int i = 0; i < ROWS * N; i++) {
            out[0][i] = (float)sin(1.7 * i) + a.new[i % N];
            out[1][i] = (float)sin(1.7 * i) + b.new[i % N] + off[k];
            for (int side = 0; side < 2; side++)
                part[side][i] = out[side][i] - 0.95f * (float)sin(1.7 * i) - 0.9f * a.new[i % N];
        }
        made m = {.n = 0};
        put_vectors(&m, "k.bias:init", N, a.init, b.init);
        put_vectors(&m, "k.bias:grad", N, a.grad, b.grad);
        put_vectors(&m, "k.bias:new", N, a.new, b.new);
        put_pair(&m, (ar_st_tensor){.name = "k:fwd@2", .dtype = AR_F32, .ndim = 2, .shape = {ROWS, N}}, out[0], out[1]);
        put_pair(&m, (ar_st_tensor){.name = "p:fwd@2", .dtype = AR_F32, .ndim = 2, .shape = {ROWS, N}}, part[0],
                 part[1]);
        OWNED(ar_verify_report_destroy) ar_verify_report *r = judge(&m, o);
        cr_expect_eq(r->same, k == 0);
        if (k == 0)
            cr_expect_eq(r->elements_doubted, NOISE + 2 * 3 * NOISE);
        else
            cr_expect_geq(r->elements_different, 3 * (N - NOISE));
    }
}

/* y = W x of the second step and a sum z that has it, where some of W, the last of its rows, moved either way; `off` is
 * added to the other dump's y in its first or last column, or to z. */
static size_t different_outputs(float off, size_t column, size_t in_sum)
{
    enum { ROWS = 3, IN = 4, OUT = N / IN };
    const ar_verify_options o = {.rule = AR_VERIFY_TOLERANCE, .rtol = 1e-5, .atol = 1e-6};
    const size_t shape[] = {OUT, IN};
    run r[2] = {before_step(1.0), before_step(-1.0)};
    float y[2][ROWS * OUT] = {{0}}, z[2][ROWS * OUT];
    for (size_t k = 0; k < 2; k++) {
        step(&r[k], right);
        for (size_t i = 0; i < ROWS * OUT; i++) {
            for (size_t c = 0; c < IN; c++)
                y[k][i] += r[k].new[i % OUT * IN + c] * (float)sin(1.7 * (double)(i / OUT * IN + c + 1));
            z[k][i] = 2.0f * y[k][i] + (float)cos(0.9 * (double)i);
        }
        y[k][column] += k && !in_sum ? off : 0.0f;
        z[k][column] += k && in_sum ? off : 0.0f;
    }
    made m = {.n = 0};
    put_vectors(&m, "k.weight:grad", N, r[0].grad, r[1].grad);
    put_vectors(&m, "k.weight:init", N, r[0].init, r[1].init);
    put_pair(&m, (ar_st_tensor){.name = "k.weight:new", .dtype = AR_F32, .ndim = 2, .shape = {shape[0], shape[1]}},
             r[0].new, r[1].new);
    put_pair(&m, (ar_st_tensor){.name = "k:fwd@2", .dtype = AR_F32, .ndim = 2, .shape = {ROWS, OUT}}, y[0], y[1]);
    put_pair(&m, (ar_st_tensor){.name = "z:fwd@2", .dtype = AR_F32, .ndim = 2, .shape = {ROWS, OUT}}, z[0], z[1]);
    OWNED(ar_verify_report_destroy) ar_verify_report *report = judge(&m, o);
    cr_expect(report->elements_doubted > NOISE);
    return report->elements_different;
}

Test(update, outputs_of_a_weight_that_rounding_moved_are_let_pass_and_what_has_them_after)
{
    cr_expect_eq(different_outputs(0.0f, 0, 0), 0);
    cr_expect_geq(different_outputs(1e-4f, 0, 0), 1, "a column whose weights did not move");
    cr_expect_geq(different_outputs(0.02f, N / 4 - 1, 0), 1, "more than the weights moved");
    cr_expect_eq(different_outputs(0.02f, 0, 1), 1, "more of a sum than of what is in it");
}

/* Adam makes a step of lr of any gradient, of rounding either way. A weight of a right gradient may not be off. */
Test(update, steps_of_rounding_are_let_pass)
{
    run a = before_step(1.0), b = before_step(-1.0);
    step(&a, right);
    step(&b, right);
    for (size_t off = 0; off < 2; off++) {
        b.new[3] += off ? 1e-5f : 0.0f; /* a hundredth of a step */
        made m = runs(&a, &b, 5);
        OWNED(ar_verify_report_destroy) ar_verify_report *r = judge(&m, close_to);
        cr_expect(r->same == !off && r->elements_doubted == NOISE && r->elements_different == off,
                  "%zu doubted, %zu different", r->elements_doubted, r->elements_different);
    }
}

Test(update, gradients_that_are_left_out_excuse_nothing)
{
    static const char *const only[] = {"*:new"};
    ar_verify_options o = close_to;
    run a = before_step(1.0), b = before_step(-1.0);
    step(&a, right);
    step(&b, right);
    made m = runs(&a, &b, 5);
    o.only = only;
    o.only_count = 1;
    OWNED(ar_verify_report_destroy) ar_verify_report *r = judge(&m, o);
    cr_expect(!r->same && r->elements_different == NOISE && r->elements_doubted == 0, "%zu different, %zu doubted",
              r->elements_different, r->elements_doubted);
}

/* Gradients of 1e-6, of which a tolerance of 6e-6 sees nothing, beside one of 1e-2: `off` times their size is off. */
static ar_verify_report *of_small_gradients(float off)
{
    const ar_verify_options o = {.rule = AR_VERIFY_TOLERANCE, .rtol = 1e-6, .atol = 6e-6};
    run a = before_step(1.0), b;
    made m = {.n = 0};
    put_vectors(&m, "x.weight:grad", N, a.grad, a.grad);
    for (int i = 0; i < N; i++)
        a.grad[i] *= i < N - NOISE ? 1e-4f : 0.0f;
    b = a;
    for (int i = 0; i < N; i++)
        b.grad[i] *= 1.0f + off * (float)sin(1.0 + 2.3 * i * i);
    step(&a, right);
    memcpy(b.new, a.new, sizeof b.new);
    for (int i = 0; i < N - NOISE; i++)
        b.new[i] += 1e-3f * off *(float)sin(1.0 + 2.3 * i * i);
    put_run(&m, of_w, &a, &b, 3);
    return judge(&m, o);
}

Test(update, gradients_that_are_neither_right_nor_rounding_excuse_nothing)
{
    OWNED(ar_verify_report_destroy) ar_verify_report *wrong = of_small_gradients(1.9f);
    cr_expect(!wrong->same && wrong->elements_doubted == 0, "%zu doubted", wrong->elements_doubted);
    cr_expect_str_eq(wrong->row[wrong->first].name, "w.weight:new");
    OWNED(ar_verify_report_destroy) ar_verify_report *all = of_small_gradients(0.1f);
    cr_expect(!all->same && all->elements_doubted == 0, "more than an eighth is excused: %zu", all->elements_doubted);
}

Test(update, a_wrong_rate_of_sgd_is_not_hidden)
{
    const adam with = {1.0, 0.9, 0.95, 1e-4, 0.2, .sgd = true}, wrong = {1.5, 0.9, 0.95, 1e-4 / 1.5, 0.2, .sgd = true};
    run a = before_step(1.0), b = a;
    for (int i = 0; i < N - NOISE; i++)
        b.grad[i] *= 1.000001f; /* rounding */
    step(&a, with);
    step(&b, wrong);
    made m = runs(&a, &b, 5);
    OWNED(ar_verify_report_destroy) ar_verify_report *r = judge(&m, close_to);
    cr_expect(!r->same);
    cr_expect_geq(r->elements_different, N / 2);
}
