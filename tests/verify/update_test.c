/* SPDX-License-Identifier: Apache-2.0 */
/* One step of AdamW in two dumps: what is wrong with the other's is named, and what rounding makes of it passes. */
#include "tests/verify/two_dumps.h"

enum { N = 96, NOISE = 8 };

typedef struct adam {
    double lr, beta1, beta2, decay, clip;
    bool sgd, decay_in_gradient, twice;
    int ahead;   /* steps that the counter has had */
    int history; /* whose its moments have; 0: none */
    double eps;  /* beside the root; inside of it where it is negative */
    double most; /* of an element of the gradient; 0: any */
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
        double w = (double)r->init[i], m = 0.0, v = 0.0, g = (double)r->grad[i] * a.clip;
        if (a.history > 0)
            m = 1e-3 * cos((4.1 + a.history) * i), v = 1e-6 * (2.0 + sin((3.3 + a.history) * i));
        g = a.most > 0.0 ? fmax(-a.most, fmin(g, a.most)) : g;
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
static names of_x = {"x.weight:init", "x.weight:grad", "x.weight:new", "x.weight:m", "x.weight:v"};
static names next_of_w = {NULL, "w.weight:grad@2", "w.weight:new@2", "w.weight:m@2", "w.weight:v@2"};

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

static void expect_step(const run *a, const run *b, const char *cause, const char *words, size_t number)
{
    made m = runs(a, b, 5);
    expect_first(&m, close_to, cause, words, number);
}

/* The right step with moments that have a history. */
#define RESUMED .lr = 1e-3, .beta2 = 0.95, .decay = 0.5, .history = 1
#define RIGHT .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .decay = 0.5, .clip = 0.2

Test(update, mistakes_are_named_by_the_state)
{
    static const struct {
        adam right, wrong;
        const char *cause, *words;
    } cases[] = {
        {{RIGHT}, {2e-3, 0.9, 0.95, 0.5, .clip = 0.2}, "other_learning_rate", NULL},
        {{RIGHT}, {1e-3, 0.95, 0.9, 0.5, .clip = 0.2}, "other_betas", NULL},
        {{RIGHT}, {1e-3, 0.9, 0.999, 0.5, .clip = 0.2}, "other_betas", NULL},
        {{RIGHT}, {1e-3, 0.9, 0.95, 0.0, .clip = 0.2}, "weight_decay", NULL},
        {{RIGHT}, {1e-3, 0.9, 0.95, 0.5, .clip = 1.0}, "clip_factor", NULL},
        {{RIGHT}, {1e-3, 0.9, 0.95, 0.5, .clip = 0.04}, "clip_factor", NULL},
        {{RIGHT}, {RIGHT, .decay_in_gradient = true}, "decay_in_gradient", NULL},
        {{RIGHT},
         {1e-3, 0.9, 0.95, 0.5, .clip = 1.0, .most = 0.015},
         "clipped",
         "here the optimizer got them cut at 0.015"},
        {{1e-3, 0.9, 0.95, 0.5, .clip = 1.0, .most = 0.025}, {RIGHT}, "clipped", "in the reference"},
        {{RIGHT}, {RIGHT, .twice = true}, "update_twice", NULL},
        {{RIGHT}, {RIGHT, .ahead = 1}, "adam_step_counter", NULL},
        {{RIGHT}, {RIGHT, .eps = 1e-3}, "adam_eps", NULL},
        {{RIGHT}, {RIGHT, .eps = -1e-5}, "adam_eps", NULL},
        {{RESUMED, .beta1 = 0.9, .clip = 0.2}, {RESUMED, .beta1 = 0.9, .clip = 1.0}, "clip_factor", NULL},
        /* a difference that is not along the gradient alone */
        {{RESUMED, .beta1 = 0.9, .clip = 0.2}, {RESUMED, .beta1 = 0.8, .clip = 1.0}, "!clip_factor", NULL},
        /* the third step of the moments, the first of a counter that was not loaded with them */
        {{RIGHT, .history = 1, .ahead = 2},
         {RIGHT, .history = 1},
         "adam_step_counter",
         "as that of step 1 would be in step 3"},
        {{RIGHT, .history = 1}, {RIGHT}, "optimizer_state_lost", "moments are"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const run a = stepped(cases[i].right), b = stepped(cases[i].wrong);
        expect_step(&a, &b, cases[i].cause, cases[i].words, i);
    }
    const run a = stepped((adam){RIGHT, .history = 1});
    run b = stepped(right);
    memcpy(b.m, a.m, sizeof a.m);
    expect_step(&a, &b, "optimizer_state_lost", "second moment is", sizeof cases / sizeof *cases);
}

/* Zeros, after which weights have moved by their decay alone, or others'. */
Test(update, gradients_that_the_optimizer_did_not_get_are_told)
{
    const run a = stepped(right);
    for (size_t k = 0; k < 2; k++) {
        run b = before_step(1.0), given = b;
        for (int i = 0; i < N; i++)
            b.grad[i] = k ? given.grad[(i + 1) % N] : 0.0f;
        step(&b, right);
        memcpy(b.grad, given.grad, sizeof b.grad);
        expect_step(&a, &b, k ? "shares_misaligned" : "zeros_for_gradient", "first moment is", k);
    }
}

Test(update, nesterov_s_momentum_is_told)
{
    run r[2];
    for (int k = 0; k < 2; k++) {
        r[k] = before_step(1.0);
        for (int i = 0; i < N; i++) {
            r[k].m[i] = r[k].grad[i];
            r[k].new[i] = r[k].init[i] - (k == 0 ? 0.1f : 0.19f) * r[k].grad[i];
        }
    }
    made m = runs(&r[0], &r[1], 4); /* SGD has no second moment */
    expect_first(&m, close_to, "nesterov", "momentum of 0.9", 0);
}

Test(update, decay_that_sgd_s_momentum_lacks_is_told)
{
    run r[2];
    for (int k = 0; k < 2; k++) {
        r[k] = before_step(1.0);
        for (int i = 0; i < N; i++) {
            r[k].m[i] = (float)((double)r[k].grad[i] + (k == 0 ? 0.01 : 0.0) * (double)r[k].init[i]);
            r[k].new[i] = r[k].init[i] - 0.1f * r[k].m[i];
        }
    }
    made m = runs(&r[0], &r[1], 4);
    expect_first(&m, close_to, "weight_decay", "the reference's less 0.01 times the weight", 0);
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
    expect_first(&m, loose, "fewer_bits", "keeps its state in 16 bits", 0);
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

/* What leaves the tolerance is an output of the next step, as much in proportion as the weights, which are within. */
Test(update, an_update_within_the_tolerance_is_asked_before_an_output_of_the_next_step)
{
    const ar_verify_options o = {.rule = AR_VERIFY_TOLERANCE, .rtol = 1e-3};
    const run a = stepped(right), b = stepped((adam){1e-3, 0.9, 0.95, 0.0, .clip = 0.2});
    float y[2][N];
    for (int i = 0; i < N; i++) {
        y[0][i] = (float)(1.5 + sin(2.3 * i));
        y[1][i] = y[0][i] * (float)(1.0 + 1.4e-3 * cos(5.9 * i * i));
    }
    made m = runs(&a, &b, 5);
    put_vectors(&m, "y:fwd@2", N, y[0], y[1]);
    expect_first(&m, o, "weight_decay", "w.weight:new before it is off as much", 0);
}

Test(update, state_of_another_parameter_is_told)
{
    adam with[2] = {right, right};
    run a[2], b[2];
    for (int k = 0; k < 2; k++) {
        with[k].history = k + 1;
        a[k] = before_step(1.0);
        for (int i = 0; i < N; i++)
            a[k].grad[i] *= k > 0 ? (float)(1.0 + 0.5 * sin(0.7 * i)) : 1.0f;
        b[k] = a[k];
        step(&a[k], with[k]);
    }
    step(&b[0], with[1]);
    step(&b[1], with[0]);
    made m = runs(&a[0], &b[0], 5);
    put_run(&m, of_x, &a[1], &b[1], 5);
    expect_first(&m, close_to, "optimizer_state_misplaced", "history of x.weight", 0);
}

Test(update, a_norm_of_gradients_that_differ_is_right)
{
    run r[2];
    for (int k = 0; k < 2; k++) {
        double square = 0.0;
        r[k] = before_step(1.0);
        for (int i = 0; i < N; i++) {
            r[k].grad[i] += k > 0 ? 0.01f * (float)cos(7.1 * i) : 0.0f;
            square += (double)r[k].grad[i] * (double)r[k].grad[i];
        }
        r[k].norm = (float)sqrt(square);
        step(&r[k], right);
    }
    made m = runs(&r[0], &r[1], 5);
    OWNED(ar_verify_report_destroy) ar_verify_report *report = judge(&m, close_to);
    size_t i = 0;
    while (i < report->rows && strcmp(report->row[i].name, "grad_norm:clip") != 0)
        i++;
    cr_assert_lt(i, report->rows);
    expect_row(&report->row[i], "norm_of_own_gradients", NULL, 0);
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

/* Steps 1 and 2 of a run, whose correction in the second is that of `as`. */
static void two_steps(run r[2], int as)
{
    for (int t = 0; t < 2; t++) {
        r[t] = before_step(1.0);
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
}

/* Decay rates that nobody tells are what the second moments keep of the first ones. */
Test(update, a_counter_is_told_by_what_moments_keep)
{
    run a[2], b[2];
    made m = {.n = 0};
    two_steps(a, 2);
    two_steps(b, 5);
    put_run(&m, of_w, &a[0], &b[0], 5);
    put_run(&m, next_of_w, &a[1], &b[1], 5);
    expect_first(&m, close_to, "adam_step_counter", "as that of step 5 would be in step 2", 0);
}

/* A second step of SGD with a batch that is nearly the first: m = keeps * m + takes * gradient. */
Test(update, dampening_of_sgd_is_told_from_a_factor)
{
    float first[N], grad[N], moment[2][N];
    made m = {.n = 0};
    for (int i = 0; i < N; i++) {
        const double was = 0.02 + 0.01 * sin(2.9 * i), now = was * (1.0 + 1e-3 * sin(1.7 * i));
        first[i] = (float)was;
        grad[i] = (float)now;
        for (int k = 0; k < 2; k++)
            moment[k][i] = (float)(0.9 * was + (k ? 0.1 : 1.0) * now);
    }
    put_vectors(&m, "w.weight:m", N, first, first);
    put_vectors(&m, "w.weight:grad@2", N, grad, grad);
    put_vectors(&m, "w.weight:m@2", N, moment[0], moment[1]);
    expect_first(&m, (ar_verify_options){.rule = AR_VERIFY_TOLERANCE, .rtol = 1e-5}, "sgd_dampening",
                 "keeps 0.9 of what it was", 0);
}

/* Resumed with the weights of before the step that the optimizer's state is of. */
Test(update, weights_of_before_a_step_are_told)
{
    const run at = stepped(right);
    made m = {.n = 0};
    put_vectors(&m, "w.weight:init", N, at.new, at.init);
    expect_first(&m, (ar_verify_options){.rule = AR_VERIFY_TOLERANCE, .rtol = 1e-5}, "other_point_of_step",
                 "one step apart: what differs is moved up or down by 0.001 each", 0);
}

Test(update, outputs_that_got_no_gradient_are_told)
{
    enum { OUT = 48, IN = 16, TOKENS = 32 };
    float weight[2][OUT * IN], input[2][TOKENS * IN];
    made m = {.n = 0};
    for (int i = 0; i < OUT * IN; i++) {
        const bool of_keys = i >= IN * IN && i < 2 * IN * IN;
        weight[0][i] = (float)sin(1.3 * i);
        weight[1][i] = of_keys ? 0.0f : weight[0][i];
    }
    for (int i = 0; i < TOKENS * IN; i++) {
        input[0][i] = (float)(sin(2.1 * i) + 0.4 * cos(0.37 * i * i));
        input[1][i] = (float)sin(2.1 * i);
    }
    put_pair(&m, (ar_st_tensor){.name = "h.attn.qkv:bwd", .dtype = AR_F32, .ndim = 3, .shape = {2, TOKENS / 2, IN}},
             input[0], input[1]);
    put_pair(&m, (ar_st_tensor){.name = "h.attn.qkv.weight:grad", .dtype = AR_F32, .ndim = 2, .shape = {OUT, IN}},
             weight[0], weight[1]);
    expect_first(&m, (ar_verify_options){.atol = 0.0}, "no_gradient", "rows 16..31 of 48 of h.attn.qkv.weight's", 0);
}

/* Decay moves weights by less than the rule allows, and what the next step computes with them by more. */
Test(update, a_step_within_the_rule_is_told_by_what_follows)
{
    const run a = stepped((adam){RIGHT}), b = stepped((adam){1e-3, 0.9, 0.95, 0.2, .clip = 0.2});
    made m = runs(&a, &b, 5);
    const float *y = put_tokens(&m, "y:fwd@2");
    for (size_t i = 0; i < (size_t)B * S * H; i++) /* one vector is added, which has a cause of its own */
        other_of(&m)[i] = y[i] + 4e-4f * noise(i % H + 13);
    expect_first(&m, (ar_verify_options){.rule = AR_VERIFY_TOLERANCE, .rtol = 3e-4, .atol = 1e-6}, "weight_decay",
                 "w.weight:new before it is off as much", 0);
}

/* A parameter's gradient alone says nothing, its module's says whose it is: of reversed samples. */
Test(update, a_gradient_is_told_by_that_of_its_module)
{
#define ORDER {"ANYRANK_PLACEMENT", "{\"version\":1,\"order\":[\"h.w.weight:grad\",\"h.w:bwd\"]}"}
    made m = {.metadata = {ORDER, ORDER}};
    const float *w = put(&m, "h.w.weight:grad", 2, H, H, 0);
    for (size_t i = 0; i < (size_t)H * H; i++)
        other_of(&m)[i] = w[i] + 0.1f * sinf(1.0f + 3.7f * (float)(i * i % 1009));
    const float *d = put(&m, "h.w:bwd", 3, 4, S, H);
    for (size_t i = 0; i < (size_t)4 * S * H; i++)
        other_of(&m)[i] = d[(3 - i / (S * H)) * S * H + i % (S * H)];
    expect_first(&m, close_to, "reversed", "its gradient h.w:bwd says: ", 0);
}

Test(update, a_term_of_the_loss_is_told_from_all_of_it)
{
    for (int terms = 0; terms < 2; terms++) {
        made m = {.n = 0};
        put_vectors(&m, "loss:fwd", 1, (const float[]){2.5f}, (const float[]){4.1234f});
        const float *d = put_tokens(&m, "a:bwd");
        for (size_t i = 0; i < (size_t)B * S * H; i++)
            other_of(&m)[i] = 3.0f * d[i];
        if (terms > 0)
            put_tokens(&m, "b:bwd");
        for (size_t i = 0; terms > 0 && i < (size_t)B * S * H; i++)
            other_of(&m)[i] = data_of(&m, 0, m.n - 1)[i];
        expect_first(&m, close_to, "reduced_again",
                     terms > 0 ? "one term of the loss alone" : "its gradient a:bwd says", 0);
    }
}
