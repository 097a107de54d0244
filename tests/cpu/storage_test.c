/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels whose operands are in memory as bf16: the result of a slot is that of the same slot in fp32, which other
 * files compare with the scalar definitions, of the same numbers, rounded once. Rounding is done here by looking for
 * the nearest of the neighbouring bf16 numbers in binary64. */
#include "anyrank/activation.h"
#include "ref/core/tensor_private.h"
#include "tests/cpu/row_support.h"
#include "tests/sim/plain_number.h"

/* The value of a bf16 number's bits. */
static float plain_wide(uint16_t half)
{
    return ari_float32((uint32_t)half << 16);
}

/* A NaN keeps its sign and its highest bits. */
static uint16_t plain_narrow(float x)
{
    return isnan(x) ? (uint16_t)(ari_bits32(x) >> 16 | 0x40u) : plain_half_nearest(AR_BF16, (double)x);
}

/* n numbers as they are in memory and as fp32. */
typedef struct stored_values {
    uint16_t *half;
    float *wide;
    size_t n;
} stored_values;

static stored_values new_stored(size_t n, enum values kind, uint64_t seed)
{
    stored_values v = {calloc(n + 1, sizeof *v.half), new_values(n, kind, seed), n};
    for (size_t i = 0; i < n; i++) {
        v.half[i] = plain_narrow(v.wide[i]);
        v.wide[i] = plain_wide(v.half[i]);
    }
    v.half[n] = 0xdead; /* what comes after is not written */
    return v;
}

static void free_stored(const stored_values *v)
{
    free(v->half);
    free(v->wide);
}

/* The address of one view or the other, of `rows` rows. */
#define of_wide(v, rows) rows_of((v).wide, rows, (v).n / (rows))
#define of_half(v, rows) half_rows((ar_tensor[1]){0}, (v), rows)
static ar_tensor *half_rows(ar_tensor *t, stored_values v, size_t rows)
{
    *t = *rows_of(v.half, rows, v.n / rows);
    t->dtype = AR_BF16;
    return t;
}

/* half is what wide rounds to. */
static void expect_rounded(stored_values v, const char *what)
{
    for (size_t i = 0; i < v.n; i++)
        cr_assert(v.half[i] == plain_narrow(v.wide[i]), "%s: element %zu of %zu is 0x%04x, expected 0x%04x", what, i,
                  v.n, v.half[i], plain_narrow(v.wide[i]));
    cr_assert_eq(v.half[v.n], 0xdead, "%s: the element after the last", what);
}

Test(storage, rounding_is_to_nearest_with_ties_to_even_and_widening_is_exact)
{
    const uint32_t edges[] = {0x3f808000u, 0x3f818000u, 0x3f807fffu, 0x3f808001u, 0x80000000u,
                              0x7f7fffffu, 0x7f7f7fffu, 0xff7f8000u, 0x00000001u, 0x00008000u,
                              0x00018000u, 0x7f800001u, 0xffc12345u, 0xff800000u};
    const size_t n = 2 * 8192 + 77, some = sizeof edges / sizeof *edges;
    OWNED(free) float *x = new_values(n, SPECIAL, 1), *back = new_values(n, ORDINARY, 2);
    OWNED(free) uint16_t *y = calloc(n, sizeof *y);
    for (size_t i = 0; i < some; i++)
        x[i] = ari_float32(edges[i]);
    ar_tensor wide = *rows_of(x, 1, n), narrow = *rows_of(y, 1, n), again = *rows_of(back, 1, n);
    narrow.dtype = AR_BF16;
    ar_device d = test_device(2);
    assert_ok(ari_cpu_copy_strided(&d, NULL, &narrow, &wide));
    assert_ok(ari_cpu_copy_strided(&d, NULL, &again, &narrow));
    for (size_t i = 0; i < n; i++) {
        cr_assert(y[i] == plain_narrow(x[i]), "0x%08x becomes 0x%04x, expected 0x%04x", ari_bits32(x[i]), y[i],
                  plain_narrow(x[i]));
        cr_assert_eq(ari_bits32(back[i]), (uint32_t)y[i] << 16);
    }
}

/* Lengths of several blocks, of one, and of a part of one. */
static const size_t lengths[] = {1, 33, 2048, 5 * 2048 + 3};
#define LENGTHS (sizeof lengths / sizeof *lengths)

Test(storage, element_wise_kernels_round_once)
{
    ar_device d = test_device(2);
    for (size_t i = 0; i < LENGTHS; i++) {
        const size_t n = lengths[i];
        SCOPED(free_stored) const stored_values a = new_stored(n, SPECIAL, 1), b = new_stored(n, ORDINARY, 2);
        SCOPED(free_stored) const stored_values y = new_stored(n, WIDE, 3);
        SCOPED(free_stored) const stored_values c = new_stored(n, WIDE, 4);
        assert_ok(ari_cpu_add(&d, NULL, of_wide(y, 1), of_wide(a, 1), of_wide(b, 1)));
        assert_ok(ari_cpu_add(&d, NULL, of_half(y, 1), of_half(a, 1), of_half(b, 1)));
        expect_rounded(y, "add");
        assert_ok(ari_cpu_mul(&d, NULL, of_wide(y, 1), of_wide(a, 1), of_wide(b, 1)));
        assert_ok(ari_cpu_mul(&d, NULL, of_half(y, 1), of_half(a, 1), of_half(b, 1)));
        expect_rounded(y, "mul");
        assert_ok(ari_cpu_scale(&d, NULL, of_wide(y, 1), of_wide(a, 1), 0.3f));
        assert_ok(ari_cpu_scale(&d, NULL, of_half(y, 1), of_half(a, 1), 0.3f));
        expect_rounded(y, "scale");
        assert_ok(ari_cpu_gated_forward(&d, NULL, of_wide(y, 1), of_wide(a, 1), of_wide(b, 1), AR_ACT_SILU));
        assert_ok(ari_cpu_gated_forward(&d, NULL, of_half(y, 1), of_half(a, 1), of_half(b, 1), AR_ACT_SILU));
        expect_rounded(y, "gated_forward");
        const ar_dropout which = {.key = 7, .threshold = 0x40000000u, .scale = 1.25f, .first = 3, .stride = {n, 1}};
        assert_ok(ari_cpu_dropout(&d, NULL, of_wide(y, 1), of_wide(c, 1), of_wide(b, 1), of_wide(a, 1), &which));
        assert_ok(ari_cpu_dropout(&d, NULL, of_half(y, 1), of_half(c, 1), of_half(b, 1), of_half(a, 1), &which));
        expect_rounded(y, "dropout");
        expect_rounded(c, "dropout and residual");
        assert_ok(ari_cpu_fill(&d, NULL, of_wide(y, 1), 1.00390625f)); /* a tie */
        assert_ok(ari_cpu_fill(&d, NULL, of_half(y, 1), 1.00390625f));
        expect_rounded(y, "fill");
    }
}

Test(storage, an_output_may_be_an_input)
{
    ar_device d = test_device(2);
    const size_t n = 3 * 2048 + 5;
    SCOPED(free_stored) const stored_values a = new_stored(n, ORDINARY, 1), b = new_stored(n, ORDINARY, 2);
    assert_ok(ari_cpu_add(&d, NULL, of_wide(a, 1), of_wide(a, 1), of_wide(b, 1)));
    assert_ok(ari_cpu_add(&d, NULL, of_half(a, 1), of_half(a, 1), of_half(b, 1)));
    expect_rounded(a, "add in the first one's place");
}

Test(storage, norms_round_once_and_keep_their_sums_in_full)
{
    ar_device d = test_device(2);
    for (int kind = AR_NORM_LAYER; kind <= AR_NORM_RMS; kind++)
        for (size_t i = 0; i < ROW_LENGTHS; i++) {
            const size_t h = row_lengths[i], n = ROWS * h;
            const stored_values x = new_stored(n, SPECIAL, 4), y = new_stored(n, ORDINARY, 5);
            float *gamma = new_values(h, ORDINARY, 6), rstd[2][ROWS];
            double mean[2][ROWS] = {{0}};
            assert_ok(ari_cpu_norm_forward(&d, NULL, (ar_norm_kind)kind, of_wide(y, ROWS), buf(mean[0]), buf(rstd[0]),
                                           of_wide(x, ROWS), cbuf(gamma), cbuf(gamma), 1e-5));
            assert_ok(ari_cpu_norm_forward(&d, NULL, (ar_norm_kind)kind, of_half(y, ROWS), buf(mean[1]), buf(rstd[1]),
                                           of_half(x, ROWS), cbuf(gamma), cbuf(gamma), 1e-5));
            expect_rounded(y, "norm_forward");
            assert_bits(rstd[1], rstd[0], ROWS, "rstd");
            assert_bits(mean[1], mean[0], 2 * ROWS, "mean");
            free_stored(&x), free_stored(&y), free(gamma);
        }
}

/* The halves of `from`, widened. */
static void take_halves(stored_values v)
{
    for (size_t i = 0; i < v.n; i++)
        v.wide[i] = plain_wide(v.half[i]);
}

/* To sums of each kind that hold something already: dgamma's terms are not rounded, those of a bias are what is
 * stored. */
static void check_backward_sums(bool exact, size_t h)
{
    ar_device d = test_device(2);
    const size_t n = ROWS * h;
    const stored_values x = new_stored(n, ORDINARY, 20), dy = new_stored(n, ORDINARY, 21),
                        up = new_stored(n, ORDINARY, 22);
    const stored_values dx = new_stored(n, WIDE, 23), sum = new_stored(n, WIDE, 24);
    float *gamma = new_values(h, ORDINARY, 25), rstd[ROWS];
    double mean[ROWS];
    plain_sum s[4], p[4];
    for (size_t i = 0; i < ROWS; i++) {
        rstd[i] = 1.0f + (float)i / 100.0f;
        mean[i] = (double)i / 1000.0;
    }
    for (int i = 0; i < 4; i++) {
        s[i] = plain_sum_new(h, exact);
        p[i] = plain_sum_new(h, exact);
    }
    for (int half = 0; half < 2; half++) {
        const plain_sum *to = half ? s : p;
        assert_ok(ari_cpu_norm_backward(&d, NULL, AR_NORM_LAYER, half ? of_half(dx, ROWS) : of_wide(dx, ROWS),
                                        half ? of_half(sum, ROWS) : of_wide(sum, ROWS),
                                        half ? of_half(dy, ROWS) : of_wide(dy, ROWS),
                                        half ? of_half(x, ROWS) : of_wide(x, ROWS), cbuf(mean), cbuf(rstd), cbuf(gamma),
                                        half ? of_half(up, ROWS) : of_wide(up, ROWS), &to[0].at, &to[1].at));
    }
    expect_rounded(dx, "norm_backward");
    expect_rounded(sum, "norm_backward's sum");
    assert_sum(&s[0], &p[0], "dgamma");
    assert_sum(&s[1], &p[1], "dbeta");
    assert_ok(ari_cpu_act_backward(&d, NULL, of_wide(dx, ROWS), of_wide(dy, ROWS), of_wide(x, ROWS), AR_ACT_GELU_ERF,
                                   &unsummed));
    assert_ok(ari_cpu_act_backward(&d, NULL, of_half(dx, ROWS), of_half(dy, ROWS), of_half(x, ROWS), AR_ACT_GELU_ERF,
                                   &s[2].at));
    expect_rounded(dx, "act_backward");
    take_halves(dx);
    for (size_t i = 0; i < n; i++)
        plain_add(&p[2], i % h, dx.wide[i]);
    assert_sum(&s[2], &p[2], "a bias behind an activation");
    assert_ok(ari_cpu_gated_backward(&d, NULL, of_wide(dx, ROWS), of_wide(sum, ROWS), of_wide(dy, ROWS),
                                     of_wide(x, ROWS), of_wide(up, ROWS), AR_ACT_SILU, &unsummed, &unsummed));
    assert_ok(ari_cpu_gated_backward(&d, NULL, of_half(dx, ROWS), of_half(sum, ROWS), of_half(dy, ROWS),
                                     of_half(x, ROWS), of_half(up, ROWS), AR_ACT_SILU, &s[3].at, &unsummed));
    expect_rounded(dx, "gated_backward, gate");
    expect_rounded(sum, "gated_backward, up");
    take_halves(dx);
    for (size_t i = 0; i < n; i++)
        plain_add(&p[3], i % h, dx.wide[i]);
    assert_sum(&s[3], &p[3], "the gate's bias");
    for (int i = 0; i < 4; i++)
        plain_sum_free(&s[i]), plain_sum_free(&p[i]);
    free_stored(&x), free_stored(&dy), free_stored(&up), free_stored(&dx), free_stored(&sum), free(gamma);
}

Test(storage, backward_kernels_round_once_and_add_what_is_stored_to_sums)
{
    for (int exact = 0; exact < 2; exact++)
        for (size_t i = 0; i < ROW_LENGTHS; i++)
            check_backward_sums(exact, row_lengths[i]);
    check_backward_sums(false, 2048 + 300);
}

Test(storage, rotations_round_once_in_place_and_apart)
{
    ar_device d = test_device(2);
    const size_t shape[4] = {2, 5, 3, 2 * 300}, half = shape[3] / 2, n = 2 * 5 * 3 * 600;
    SCOPED(free_stored) const stored_values x = new_stored(n, ORDINARY, 7), y = new_stored(n, ORDINARY, 8);
    OWNED(free) float *cos = new_values(5 * half, ORDINARY, 9), *sin = new_values(5 * half, ORDINARY, 10);
    ar_tensor t[4];
    for (int i = 0; i < 4; i++)
        assert_ok(ar_tensor_view(&t[i], i < 2 ? AR_F32 : AR_BF16, 4, shape,
                                 buf(i == 0   ? (void *)y.wide
                                     : i == 1 ? (void *)x.wide
                                     : i == 2 ? (void *)y.half
                                              : (void *)x.half)));
    for (int direction = -1; direction <= 1; direction += 2) {
        assert_ok(ari_cpu_rope(&d, NULL, &t[0], &t[1], cbuf(cos), cbuf(sin), direction));
        assert_ok(ari_cpu_rope(&d, NULL, &t[2], &t[3], cbuf(cos), cbuf(sin), direction));
        expect_rounded(y, "rope");
    }
    assert_ok(ari_cpu_rope(&d, NULL, &t[3], &t[3], cbuf(cos), cbuf(sin), 1));
    cr_assert_eq(memcmp(x.half, y.half, n * sizeof *x.half), 0, "in place");
}

/* Of rows of 2, and of several blocks: the loss's row values are what they are of the same numbers in fp32. */
Test(storage, the_loss_reads_bf16_and_its_gradient_rounds_once)
{
    ar_device d = test_device(2);
    static const size_t vocabularies[] = {2, 257, 2 * 2048 + 9};
    const ar_loss_options o = {.label_smoothing = 0.1, .z_loss = 1e-4};
    for (size_t i = 0; i < 3; i++) {
        enum { N = 7 };
        const size_t v = vocabularies[i];
        SCOPED(free_stored) const stored_values x = new_stored(N * v, i == 1 ? SPECIAL : ORDINARY, 11);
        SCOPED(free_stored) const stored_values dx = new_stored(N * v, WIDE, 12);
        int32_t key[2][N], bits[2][N], e[2][N];
        int64_t sum[2][N], values[2][N], target[N] = {0, -1, 1, 0, 1, -1, 0};
        const uint8_t valid[N] = {1, 1, 1, 0, 1, 1, 1};
        target[4] = (int64_t)v - 1;
        for (int half = 0; half < 2; half++) {
            const ar_tensor *logits = half ? of_half(x, N) : of_wide(x, N);
            assert_ok(ari_cpu_ce_max(&d, NULL, buf(key[half]), logits));
            assert_ok(ari_cpu_row_exponents(&d, NULL, buf(e[half]), logits, cbuf(NULL), 1, false, false));
            assert_ok(ari_cpu_ce_sum(&d, NULL, buf(sum[half]), logits, cbuf(key[half]), v));
            assert_ok(ari_cpu_ce_logits(&d, NULL, buf(values[half]), logits, cbuf(e[half]), v));
            assert_ok(ari_cpu_ce_target(&d, NULL, buf(bits[half]), logits, cbuf(target)));
            assert_ok(ari_cpu_ce_backward(&d, NULL, half ? of_half(dx, N) : of_wide(dx, N), logits, cbuf(key[half]),
                                          cbuf(sum[half]), cbuf(target), cbuf(valid), &o, 5.0, v));
        }
        assert_bits(key[1], key[0], N, "keys");
        assert_bits(e[1], e[0], N, "exponents");
        assert_bits(sum[1], sum[0], 2 * N, "sums of exponentials");
        assert_bits(values[1], values[0], 2 * N, "sums of logits");
        assert_bits(bits[1], bits[0], N, "targets");
        expect_rounded(dx, "ce_backward");
    }
}

Test(storage, rows_of_bf16_are_selected_by_their_bits_and_added_up_in_fp32)
{
    ar_device d = test_device(2);
    const size_t cols = 300, rows = 9;
    SCOPED(free_stored) const stored_values w = new_stored(rows * cols, SPECIAL, 13);
    SCOPED(free_stored) const stored_values y = new_stored(ROWS * cols, ORDINARY, 14);
    SCOPED(free_stored) const stored_values terms = new_stored(ROWS * cols, ORDINARY, 15);
    float *acc[2] = {new_values(rows * cols, ORDINARY, 16), new_values(rows * cols, ORDINARY, 16)};
    uint8_t *t[2] = {calloc(rows * cols, 1), calloc(rows * cols, 1)};
    int64_t *hl[2] = {calloc(2 * rows * cols, 8), calloc(2 * rows * cols, 8)}, row_of[ROWS];
    for (size_t i = 0; i < ROWS; i++)
        row_of[i] = (int64_t)(i * 7 % (rows + 1)) - 1;
    for (int half = 0; half < 2; half++) {
        const ar_tensor *from = half ? of_half(w, rows) : of_wide(w, rows);
        const ar_tensor *added = half ? of_half(terms, ROWS) : of_wide(terms, ROWS);
        assert_ok(ari_cpu_gather_rows(&d, NULL, half ? of_half(y, ROWS) : of_wide(y, ROWS), from, cbuf(row_of),
                                      cbuf(NULL), 1));
        assert_ok(ari_cpu_sum_rows_f32(&d, NULL, buf(acc[half]), rows, added, cbuf(row_of)));
        assert_ok(ari_cpu_acc_add(&d, NULL, buf(t[half]), buf(hl[half]), false, rows, added, cbuf(row_of)));
    }
    for (size_t i = 0; i < y.n; i++)
        cr_assert_eq((uint32_t)y.half[i] << 16, ari_bits32(y.wide[i]));
    assert_bits(acc[1], acc[0], rows * cols, "sums");
    cr_assert_eq(memcmp(t[1], t[0], rows * cols), 0);
    assert_bits(hl[1], hl[0], 4 * rows * cols, "accumulators");
    for (int half = 0; half < 2; half++)
        free(acc[half]), free(t[half]), free(hl[half]);
}

/* Router and experts: what is fp32 in both is the same, what is bf16 is rounded once, after the last addition. */
static void check_experts(size_t h, size_t experts, size_t k, bool weighed)
{
    enum { N = 7, MOST = 8 };
    ar_device d = test_device(2);
    const stored_values z = new_stored(N * experts, ORDINARY, 20), dz = new_stored(N * experts, ORDINARY, 21);
    const enum values kind = weighed ? ORDINARY : SPECIAL;
    const stored_values x = new_stored(N * h, kind, 22), xs = new_stored(N * k * h, ORDINARY, 23);
    const stored_values ys = new_stored(N * k * h, kind, 24), y = new_stored(N * h, ORDINARY, 25);
    const stored_values logit = new_stored(N, SPECIAL, 26), dlogit = new_stored(N, ORDINARY, 27);
    const stored_values dx = new_stored(N * h, ORDINARY, 28), sum = new_stored(N * h, kind, 31);
    float *p[2] = {new_values(N * experts, ORDINARY, 29), new_values(N * experts, WIDE, 30)};
    float weight[2][N * MOST], g[2][N * MOST];
    int32_t expert[2][N * MOST];
    int64_t order[N * MOST];
    const ar_route_rule rule = {.k = k, .groups = 1, .kept = 1, .normalised = weighed, .scale = 1.0f};
    for (size_t i = 0; i < N * k; i++)
        order[i] = (int64_t)(N * k - 1 - i); /* its own inverse */
    for (int half = 0; half < 2; half++) {
#define OF(v, rows) (half ? of_half(v, rows) : of_wide(v, rows))
        const ar_cbuf weights = cbuf(weighed ? weight[half] : NULL);
        assert_ok(
            ari_cpu_route(&d, NULL, buf(p[half]), buf(expert[half]), buf(weight[half]), buf(NULL), OF(z, N), &rule));
        assert_ok(ari_cpu_gather_rows(&d, NULL, OF(xs, N * k), OF(x, N), cbuf(order), weights, k));
        assert_ok(ari_cpu_combine_rows(&d, NULL, OF(y, N), OF(ys, N * k), weights, cbuf(order), k));
        assert_ok(ari_cpu_dot_rows(&d, NULL, buf(g[half]), OF(x, N), OF(ys, N * k), cbuf(order), k));
        assert_ok(ari_cpu_route_backward(&d, NULL, OF(dz, N), cbuf(g[half]), cbuf(p[half]), cbuf(expert[half]),
                                         cbuf(weight[half]), &rule));
        assert_ok(ari_cpu_add_gated_backward(&d, NULL, OF(dx, N), OF(dlogit, N), OF(x, N), OF(x, N), OF(logit, N)));
        assert_ok(ari_cpu_add_gated(&d, NULL, OF(sum, N), OF(x, N), OF(logit, N)));
#undef OF
    }
    assert_bits(p[1], p[0], N * experts, "probabilities");
    assert_bits(expert[1], expert[0], N * k, "experts");
    assert_bits(weight[1], weight[0], N * k, "weights");
    assert_bits(g[1], g[0], N * k, "gradients of weights");
    expect_rounded(xs, "gather_rows"), expect_rounded(y, "combine_rows"), expect_rounded(dz, "route_backward");
    expect_rounded(dx, "add_gated_backward"), expect_rounded(dlogit, "add_gated_backward of the logit");
    free_stored(&z), free_stored(&dz), free_stored(&x), free_stored(&xs), free_stored(&ys), free_stored(&y);
    expect_rounded(sum, "add_gated");
    free_stored(&logit), free_stored(&dlogit), free_stored(&dx), free_stored(&sum), free(p[0]), free(p[1]);
}

Test(storage, rows_of_experts_are_added_up_in_fp32_and_rounded_once)
{
    static const size_t shapes[][3] = {{2, 2, 1}, {33, 9, 2}, {257, 64, 8}, {2 * 2048 + 9, 2100, 3}};
    for (size_t i = 0; i < 4; i++)
        for (int weighed = 0; weighed < 2; weighed++)
            check_experts(shapes[i][0], shapes[i][1], shapes[i][2], weighed);
}

/* c (+)= a b^T in binary64, of matrices that are cut into pieces in every dimension. fp32 sums are within k*2^-24 of
 * the sum of magnitudes, and what is stored within 2^-8 of the value. */
static void check_product(ar_device *d, size_t m, size_t n, size_t k, bool add, bool turned, ar_dtype result)
{
    SCOPED(free_stored) const stored_values a = new_stored(m * k, ORDINARY, 17), b = new_stored(n * k, ORDINARY, 18);
    SCOPED(free_stored) const stored_values c = new_stored(m * n, ORDINARY, 19);
    ar_tensor tc = result == AR_BF16 ? *of_half(c, m) : *of_wide(c, m), ta = *rows_of(a.half, m, k);
    ar_tensor tb = *rows_of(b.half, turned ? k : n, turned ? n : k);
    ta.dtype = tb.dtype = AR_BF16;
    if (turned)
        tb = ari_tensor_transposed(&tb);
    OWNED(free) float *before = new_copy(c.wide, m * n);
    assert_ok(d->ops->gemm_f32(d, NULL, &tc, &ta, &tb, add, AR_PRECISION_BF16));
    for (size_t i = 0; i < m; i++)
        for (size_t j = 0; j < n; j += 1 + n / 7) {
            double sum = add ? (double)before[i * n + j] : 0.0, size = fabs(sum);
            for (size_t l = 0; l < k; l++) {
                const double term = (double)a.wide[i * k + l] * (double)b.wide[turned ? l * n + j : j * k + l];
                sum += term;
                size += fabs(term);
            }
            const double bound = ((double)k + 1.0) * 0x1p-24 * size;
            const double got = (double)(result == AR_BF16 ? plain_wide(c.half[i * n + j]) : c.wide[i * n + j]);
            const double rounding = result == AR_BF16 ? 0x1p-8 * (fabs(sum) + bound) : 0.0;
            cr_assert(fabs(got - sum) <= bound + rounding, "[%zu, %zu] x %zu at %zu, %zu: %a, expected %a", m, n, k, i,
                      j, got, sum);
        }
    cr_assert_eq(c.half[m * n], 0xdead);
}

Test(storage, products_add_up_in_fp32_and_round_once)
{
    OWNED(ar_device_destroy) ar_device *d = NULL;
    assert_ok(ar_device_cpu_create(&d, 2));
    check_product(d, 5, 3, 0, false, false, AR_BF16);
    check_product(d, 5, 3, 0, true, false, AR_BF16);
    check_product(d, 17, 33, 65, false, true, AR_BF16);
    check_product(d, 600, 7, 1100, true, false, AR_BF16);
    check_product(d, 7, 530, 520, false, true, AR_F32);
}

/* 1 and 2,048 times 2^-18 make the next bf16 number: rounded after each piece of the terms, they would stay 1. */
Test(storage, no_partial_sum_of_a_product_is_rounded)
{
    enum { K = 4 * 512 + 1 };
    OWNED(ar_device_destroy) ar_device *d = NULL;
    assert_ok(ar_device_cpu_create(&d, 1));
    uint16_t a[K], b[K], c = 0;
    for (size_t k = 0; k < K; k++) {
        a[k] = 0x3f80u;                    /* 1 */
        b[k] = k == 0 ? 0x3f80u : 0x3680u; /* 2^-18 */
    }
    const size_t row[2] = {1, K}, one[2] = {1, 1};
    ar_tensor ta, tb, tc;
    assert_ok(ar_tensor_view(&ta, AR_BF16, 2, row, buf(a)));
    assert_ok(ar_tensor_view(&tb, AR_BF16, 2, row, buf(b)));
    assert_ok(ar_tensor_view(&tc, AR_BF16, 2, one, buf(&c)));
    assert_ok(d->ops->gemm_f32(d, NULL, &tc, &ta, &tb, false, AR_PRECISION_BF16));
    cr_assert_eq(c, 0x3f81u, "0x%04x, expected 0x3f81", c);
}
