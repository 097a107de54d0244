/* SPDX-License-Identifier: Apache-2.0 */
/* The fused operators of anyrank/module.h. Bias and activation against their formulas in binary64: values, and gradients
 * as differences of sum(dy*y), which know no formula of a backward pass. The norms are those of the layers. */
#include "anyrank/activation.h"
#include "anyrank/module.h"
#include "ref/core/tensor_private.h"
#include "tests/support/test.h"

enum { ROWS = 6, N = 9, ALL = ROWS * N };
#define EPS 1e-5
#define STEP 1e-5 /* of a difference: its error is of the order of STEP^2 */

typedef struct alone {
    ar_device *device;
    ar_ctx *ctx;
    ar_param gain, offset; /* [N] */
} alone;

static void set_param(alone *a, ar_param *p, const char *name, const float *values)
{
    const size_t n = N;
    cr_assert_ok(ar_param_init_whole(p, a->ctx, "m", name, 1, &n, AR_INIT_ONES));
    cr_assert_ok(ar_ctx_upload(a->ctx, &p->value, values));
    p->version++;
}

/* Values between -2 and 2, none of them near 0, where ReLU has no derivative. */
static void draw(float *x, size_t n, unsigned seed)
{
    for (size_t i = 0; i < n; i++) {
        const float v = 0.05f + 1.95f * (float)((i * 7919u + seed * 104729u + i * i * 31u) % 1009u) / 1009.0f;
        x[i] = (i * 13u + seed) % 5u < 2u ? -v : v;
    }
}

static alone begin(ar_numerics numerics, const float *gain, const float *offset)
{
    alone a = {NULL};
    cr_assert_ok(ar_device_cpu_create(&a.device, 2));
    cr_assert_ok(ar_ctx_create(&a.ctx, &(ar_ctx_options){.device = a.device, .numerics = numerics}));
    set_param(&a, &a.gain, "gain", gain);
    set_param(&a, &a.offset, "offset", offset);
    return a;
}

static void end(alone *a)
{
    ar_param_fini(&a->gain);
    ar_param_fini(&a->offset);
    ar_ctx_destroy(a->ctx);
    ar_device_destroy(a->device);
}

/* Rows [from, from + rows) of values, as a tensor of three dimensions where their number allows it. */
static ar_tensor tensor(alone *a, const float *values, size_t from, size_t rows)
{
    const size_t shape[3] = {rows % 2 == 0 ? 2 : 1, rows % 2 == 0 ? rows / 2 : rows, N};
    ar_tensor t;
    cr_assert_ok(ar_ctx_tensor(a->ctx, &t, AR_F32, 3, shape));
    cr_assert_ok(ar_ctx_upload(a->ctx, &t, values + from * N));
    return t;
}

static void read_back(alone *a, float *to, const ar_tensor *t)
{
    cr_assert_ok(ar_ctx_download(a->ctx, to, t));
}

static void read_gradient(alone *a, float *to, const ar_param *p)
{
    const size_t n = N;
    ar_tensor g;
    cr_assert_ok(ar_ctx_tensor(a->ctx, &g, AR_F32, 1, &n));
    cr_assert_ok(ar_ctx_arith(a->ctx)->grad_value(a->ctx, &g, p));
    read_back(a, to, &g);
}

/* Each result has a few roundings of 2^-24 of terms below `size`, and the difference its own error. */
static void expect_near(const float *got, const double *expected, size_t n, double size, const char *what)
{
    for (size_t i = 0; i < n; i++)
        cr_expect(fabs((double)got[i] - expected[i]) <= size * (16.0 * 0x1p-24 + 1e-8), "%s: element %zu is %g, not %g",
                  what, i, (double)got[i], expected[i]);
}

static double act64(ar_activation act, double x)
{
    switch (act) {
    case AR_ACT_GELU_ERF:
        return 0.5 * x * (1.0 + erf(x / sqrt(2.0)));
    case AR_ACT_GELU_TANH:
        return 0.5 * x * (1.0 + tanh(sqrt(2.0 / acos(-1.0)) * (x + 0.044715 * x * x * x)));
    case AR_ACT_SILU:
        return x / (1.0 + exp(-x));
    default:
        return x > 0.0 ? x : 0.0;
    }
}

/* What is differentiated: x [ROWS, N], offset [N]. */
typedef struct point {
    double x[ALL], offset[N];
} point;

static point point_of(const float *x, const float *offset)
{
    point p;
    for (size_t i = 0; i < ALL; i++)
        p.x[i] = (double)x[i];
    for (size_t j = 0; j < N; j++)
        p.offset[j] = (double)offset[j];
    return p;
}

typedef void (*formula)(double *y, const point *p, int kind);

static void bias_act64(double *y, const point *p, int kind)
{
    for (size_t i = 0; i < ALL; i++)
        y[i] = act64((ar_activation)kind, p->x[i] + p->offset[i % N]);
}

/* d sum(dy*y) / d v for the n numbers v of p. */
static void differences(double *d, double *v, size_t n, point *p, formula f, int kind, const float *dy)
{
    for (size_t i = 0; i < n; i++) {
        const double at = v[i];
        double up[ALL], down[ALL], sum = 0.0;
        v[i] = at + STEP;
        f(up, p, kind);
        v[i] = at - STEP;
        f(down, p, kind);
        v[i] = at;
        for (size_t k = 0; k < ALL; k++)
            sum += (double)dy[k] * (up[k] - down[k]);
        d[i] = sum / (2.0 * STEP);
    }
}

typedef struct inputs {
    float x[ALL], dy[ALL], residual[ALL], gain[N], offset[N];
} inputs;

static inputs draw_inputs(void)
{
    inputs in;
    draw(in.x, ALL, 1);
    draw(in.dy, ALL, 2);
    draw(in.residual, ALL, 3);
    draw(in.gain, N, 4);
    draw(in.offset, N, 5);
    return in;
}

static void norm_rows(alone *a, const inputs *in, ar_norm_kind kind, size_t from, size_t rows, ar_tensor *y,
                      ar_tensor *dx, ar_tensor *sum)
{
    ar_norm_saved saved;
    ar_param *offset = kind == AR_NORM_LAYER ? &a->offset : NULL;
    ar_tensor x = tensor(a, in->x, from, rows);
    const ar_tensor dy = tensor(a, in->dy, from, rows);
    const ar_tensor residual = tensor(a, in->residual, from, rows);
    cr_assert_ok(ar_norm_forward(a->ctx, kind, y, &saved, &x, &a->gain, offset, EPS));
    cr_assert_ok(ar_norm_backward(a->ctx, kind, dx, sum, &dy, &x, &saved, &a->gain, offset, sum ? &residual : NULL));
}

/* In exact numerics the gradients are of the rows, whoever brings them in whatever order; native ones of their order. */
Test(operators, gradients_over_rows_have_the_bits_of_any_order_in_exact_and_of_the_rows_in_native)
{
    const inputs in = draw_inputs();
    float whole[2][N], parts[2][N], plain[N] = {0};
    ar_tensor y, dx;
    alone a = begin(AR_NUMERICS_EXACT, in.gain, in.offset), b = begin(AR_NUMERICS_EXACT, in.gain, in.offset);
    norm_rows(&a, &in, AR_NORM_LAYER, 0, ROWS, &y, &dx, NULL);
    norm_rows(&b, &in, AR_NORM_LAYER, 4, 2, &y, &dx, NULL);
    norm_rows(&b, &in, AR_NORM_LAYER, 0, 4, &y, &dx, NULL);
    read_gradient(&a, whole[0], &a.gain);
    read_gradient(&a, whole[1], &a.offset);
    read_gradient(&b, parts[0], &b.gain);
    read_gradient(&b, parts[1], &b.offset);
    cr_expect_eq(memcmp(whole, parts, sizeof whole), 0);
    end(&a);
    end(&b);
    a = begin(AR_NUMERICS_NATIVE, in.gain, in.offset);
    norm_rows(&a, &in, AR_NORM_LAYER, 0, ROWS, &y, &dx, NULL);
    read_gradient(&a, whole[1], &a.offset);
    for (size_t i = 0; i < ALL; i++)
        plain[i % N] += in.dy[i];
    cr_expect_eq(memcmp(plain, whole[1], sizeof plain), 0);
    end(&a);
}

/* --- bias and activation ------------------------------------------------------------------------------------------ */

static void check_bias_act(ar_numerics numerics, ar_activation act, bool biased)
{
    const float nothing[N] = {0};
    const inputs in = draw_inputs();
    const float *offset = biased ? in.offset : nothing;
    SCOPED(end) alone a = begin(numerics, in.gain, offset);
    point p = point_of(in.x, offset);
    float y[ALL], left[ALL], dx[ALL], dbias[N];
    double expected[ALL];
    ar_tensor ty, tdx;
    ar_tensor x = tensor(&a, in.x, 0, ROWS);
    const ar_tensor dy = tensor(&a, in.dy, 0, ROWS);
    ar_param *bias = biased ? &a.offset : NULL;
    cr_assert_ok(ar_bias_act_forward(a.ctx, &ty, &x, bias, act));
    cr_assert_ok(ar_bias_act_backward(a.ctx, &tdx, &dy, &x, bias, act));
    read_back(&a, y, &ty);
    read_back(&a, left, &x);
    read_back(&a, dx, &tdx);
    for (size_t i = 0; i < ALL; i++)
        cr_expect_eq(left[i], in.x[i] + offset[i % N], "x + bias is left in x");
    bias_act64(expected, &p, (int)act);
    expect_near(y, expected, ALL, 4.0, "y");
    differences(expected, p.x, ALL, &p, bias_act64, (int)act, in.dy);
    expect_near(dx, expected, ALL, 4.0, "dx");
    if (biased) {
        read_gradient(&a, dbias, &a.offset);
        differences(expected, p.offset, N, &p, bias_act64, (int)act, in.dy);
        expect_near(dbias, expected, N, 30.0, "the bias's gradient");
    }
}

Test(operators, bias_and_activation_have_their_formulas_values_and_gradients)
{
    for (int numerics = AR_NUMERICS_EXACT; numerics <= AR_NUMERICS_NATIVE; numerics++)
        for (ar_activation act = AR_ACT_GELU_ERF; act < AR_ACT_NONE; act++)
            for (int biased = 0; biased < 2; biased++)
                check_bias_act((ar_numerics)numerics, (ar_activation)act, biased);
}

Test(operators, a_frozen_parameter_gets_no_gradient)
{
    const inputs in = draw_inputs();
    SCOPED(end) alone a = begin(AR_NUMERICS_EXACT, in.gain, in.offset);
    ar_tensor y, dx;
    a.gain.requires_grad = false;
    norm_rows(&a, &in, AR_NORM_LAYER, 0, ROWS, &y, &dx, NULL);
    cr_expect_eq(ar_ctx_arith(a.ctx)->grad_bytes(&a.gain), 0u);
    cr_expect_gt(ar_ctx_arith(a.ctx)->grad_bytes(&a.offset), 0u);
}

Test(operators, wrong_shapes_types_and_parameters_are_refused)
{
    const inputs in = draw_inputs();
    const size_t narrow[2] = {ROWS, N - 1}, line[1] = {N}, words[2] = {ROWS, N};
    SCOPED(end) alone a = begin(AR_NUMERICS_EXACT, in.gain, in.offset);
    ar_tensor y, dx, thin, flat, integers;
    ar_norm_saved saved;
    ar_tensor x = tensor(&a, in.x, 0, ROWS), swapped = ari_tensor_transposed(&x);
    cr_assert_ok(ar_ctx_tensor(a.ctx, &thin, AR_F32, 2, narrow));
    cr_assert_ok(ar_ctx_tensor(a.ctx, &flat, AR_F32, 1, line));
    cr_assert_ok(ar_ctx_tensor(a.ctx, &integers, AR_I32, 2, words));
    cr_expect_eq(ar_bias_act_forward(a.ctx, &y, &x, &a.offset, AR_ACT_NONE), AR_ERR_ARG);
    cr_expect_eq(ar_bias_act_forward(a.ctx, &y, &thin, &a.offset, AR_ACT_SILU), AR_ERR_SHAPE);
    cr_expect_eq(ar_bias_act_forward(a.ctx, &y, &swapped, NULL, AR_ACT_SILU), AR_ERR_SHAPE);
    cr_expect_eq(ar_bias_act_forward(a.ctx, &y, &integers, NULL, AR_ACT_SILU), AR_ERR_DTYPE);
    cr_expect_eq(ar_bias_act_backward(a.ctx, &dx, &flat, &x, &a.offset, AR_ACT_SILU), AR_ERR_SHAPE);
    cr_expect_eq(ar_norm_forward(a.ctx, AR_NORM_RMS, &y, &saved, &x, &a.gain, &a.offset, EPS), AR_ERR_ARG);
    cr_expect_eq(ar_norm_forward(a.ctx, AR_NORM_RMS, &y, &saved, &x, &a.gain, NULL, -1.0), AR_ERR_ARG);
    cr_expect_eq(ar_norm_forward(a.ctx, AR_NORM_RMS, &y, &saved, &x, &a.gain, NULL, (double)NAN), AR_ERR_ARG);
    cr_expect_eq(ar_norm_forward(a.ctx, AR_NORM_RMS, &y, &saved, &thin, &a.gain, NULL, EPS), AR_ERR_SHAPE);
    cr_assert_ok(ar_norm_forward(a.ctx, AR_NORM_RMS, &y, &saved, &x, &a.gain, NULL, EPS));
    cr_expect_eq(ar_norm_backward(a.ctx, AR_NORM_RMS, &dx, NULL, &thin, &x, &saved, &a.gain, NULL, NULL), AR_ERR_SHAPE);
    cr_expect_eq(ar_norm_backward(a.ctx, AR_NORM_RMS, &dx, &y, &x, &x, &saved, &a.gain, NULL, &thin), AR_ERR_SHAPE);
    saved.rstd.shape[0]--;
    cr_expect_eq(ar_norm_backward(a.ctx, AR_NORM_RMS, &dx, NULL, &x, &x, &saved, &a.gain, NULL, NULL), AR_ERR_SHAPE);
    cr_expect_eq(ar_ctx_arith(a.ctx)->grad_bytes(&a.gain), 0u, "what is refused leaves nothing");
}
