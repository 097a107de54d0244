/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/activation.h"
#include "ref/numerics/activation.h"
#include "tests/cpu/row_support.h"

/* The scalar functions by name, not through the dispatch that the kernels use. */
static float plain_act(ar_activation act, float x)
{
    switch (act) {
    case AR_ACT_GELU_ERF:
        return ari_gelu_erf32(x);
    case AR_ACT_GELU_TANH:
        return ari_gelu_tanh32(x);
    case AR_ACT_SILU:
        return ari_silu32(x);
    case AR_ACT_RELU:
        return x < 0.0f ? 0.0f : x;
    case AR_ACT_CLAMPED:
        return ari_clamped32(x);
    case AR_ACT_NONE:
        break;
    }
    return x;
}

static float plain_dact(ar_activation act, float x)
{
    switch (act) {
    case AR_ACT_GELU_ERF:
        return ari_dgelu_erf32(x);
    case AR_ACT_GELU_TANH:
        return ari_dgelu_tanh32(x);
    case AR_ACT_SILU:
        return ari_dsilu32(x);
    case AR_ACT_RELU:
        return isnan(x) ? x : x > 0.0f ? 1.0f : 0.0f;
    case AR_ACT_CLAMPED:
        return ari_dclamped32(x);
    case AR_ACT_NONE:
        break;
    }
    return isnan(x) ? x : 1.0f; /* no NaN is hidden, not even by a constant derivative */
}

/* Lengths of flat arrays: odd ones, and one that spans several blocks and threads. */
static const size_t lengths[] = {0, 1, 3, 7, 33, 100, 257, 8192, 40001};
#define LENGTHS (sizeof lengths / sizeof *lengths)

static void check_add_mul(size_t n, enum values kind, int threads)
{
    ar_device d = test_device(threads);
    OWNED(free) float *a = new_values(n, kind, 1), *b = new_values(n, kind, 2);
    OWNED(free) float *sum = new_values(n, ORDINARY, 3), *product = new_copy(a, n);
    OWNED(free) float *expected_sum = new_copy(a, n), *expected_product = new_copy(a, n);
    for (size_t i = 0; i < n; i++) {
        expected_sum[i] = stored(a[i] + b[i]);
        expected_product[i] = stored(a[i] * b[i]);
    }
    assert_ok(ari_cpu_add(&d, NULL, rows_of(sum, 1, n), rows_of(a, 1, n), rows_of(b, 1, n)));
    assert_ok(ari_cpu_mul(&d, NULL, rows_of(product, 1, n), rows_of(product, 1, n), rows_of(b, 1, n))); /* in place */
    assert_bits(sum, expected_sum, n, "add");
    assert_bits(product, expected_product, n, "mul");
}

Test(elementwise, add_and_mul_round_once_and_store_one_nan)
{
    for (size_t i = 0; i < LENGTHS; i++)
        for (int kind = 0; kind < VALUE_KINDS; kind++)
            for (int threads = 1; threads <= 2; threads++)
                check_add_mul(lengths[i], (enum values)kind, threads);
}

Test(elementwise, fill_sets_every_element_and_only_those)
{
    const uint32_t given[] = {0x3fc00000u, 0x80000000u, 0xffc00001u};
    const uint32_t expected[] = {0x3fc00000u, 0x80000000u, 0x7fc00000u};
    for (size_t i = 0; i < LENGTHS; i++)
        for (size_t v = 0; v < 3; v++) {
            const size_t n = lengths[i];
            ar_device d = test_device(2);
            OWNED(free) uint32_t *y = calloc(n + 1, sizeof *y);
            y[n] = 0xdeadbeefu;
            assert_ok(ari_cpu_fill(&d, NULL, rows_of(y, 1, n), ari_float32(given[v])));
            for (size_t j = 0; j < n; j++)
                cr_assert_eq(y[j], expected[v]);
            cr_assert_eq(y[n], 0xdeadbeefu);
        }
}

static void check_bias_act(ar_activation act, bool with_bias, size_t cols, enum values kind, int threads)
{
    ar_device d = test_device(threads);
    const size_t n = ROWS * cols;
    OWNED(free) float *y = new_values(n, kind, 4), *bias = new_values(cols, kind, 5), *z = new_values(n, ORDINARY, 6);
    OWNED(free) float *expected_y = new_copy(y, n), *expected_z = new_copy(z, n);
    for (size_t i = 0; i < n; i++) {
        if (with_bias)
            expected_y[i] = stored(y[i] + bias[i % cols]);
        if (act != AR_ACT_NONE)
            expected_z[i] = stored(plain_act(act, expected_y[i]));
    }
    const ar_tensor ty = view2(y, ROWS, cols, cols), tz = view2(z, ROWS, cols, cols);
    assert_ok(ari_cpu_bias_act(&d, NULL, &ty, cbuf(with_bias ? bias : NULL), act, act == AR_ACT_NONE ? NULL : &tz));
    assert_bits(y, expected_y, n, "y of bias_act");
    assert_bits(z, expected_z, n, "z of bias_act");
}

Test(elementwise, bias_act_adds_the_bias_then_applies_the_activation)
{
    for (ar_activation act = 0; act < AR_ACTIVATIONS; act++)
        for (size_t i = 0; i < ROW_LENGTHS; i++)
            for (int kind = 0; kind < VALUE_KINDS; kind++)
                for (int variant = 0; variant < 4; variant++)
                    check_bias_act(act, variant & 1, row_lengths[i], (enum values)kind, 1 + variant / 2);
}

Test(elementwise, bias_act_goes_on_past_one_block_of_columns)
{
    check_bias_act(AR_ACT_RELU, true, 8195, ORDINARY, 1);
    check_bias_act(AR_ACT_SILU, true, 16385, SPECIAL, 2);
}

/* What becomes of a sum over rows. */
enum sums { NO_SUM, EXACT_SUM, NATIVE_SUM, SUM_KINDS };

static plain_sum new_sum(size_t n, enum sums kind)
{
    return kind == NO_SUM ? (plain_sum){0, unsummed} : plain_sum_new(n, kind == EXACT_SUM);
}

static void check_act_backward(ar_activation act, size_t rows, size_t cols, enum values kind, enum sums sums,
                               int threads)
{
    ar_device d = test_device(threads);
    const size_t n = rows * cols;
    OWNED(free) float *x = new_values(n, kind, 7), *dy = new_values(n, kind, 8), *dx = new_values(n, ORDINARY, 9);
    OWNED(free) float *expected = new_copy(dy, n);
    SCOPED(plain_sum_free) plain_sum sum = new_sum(cols, sums), same = new_sum(cols, sums), added = new_sum(cols, sums);
    for (size_t i = 0; i < n; i++) {
        expected[i] = stored(dy[i] * plain_dact(act, x[i]));
        if (sums != NO_SUM)
            plain_add(&added, i % cols, expected[i]);
    }
    const ar_tensor tx = view2(x, rows, cols, cols), tdy = view2(dy, rows, cols, cols),
                    tdx = view2(dx, rows, cols, cols);
    assert_ok(ari_cpu_act_backward(&d, NULL, &tdx, &tdy, &tx, act, &sum.at));
    assert_bits(dx, expected, n, "act_backward");
    assert_ok(ari_cpu_act_backward(&d, NULL, &tdy, &tdy, &tx, act, &same.at));
    assert_bits(dy, expected, n, "act_backward in place");
    if (sums != NO_SUM) {
        assert_sum(&sum, &added, "the bias's gradient");
        assert_sum(&same, &added, "the bias's gradient, dx in dy's place");
    }
}

Test(elementwise, act_backward_multiplies_by_the_derivative)
{
    for (ar_activation act = 0; act < AR_ACTIVATIONS; act++)
        for (size_t i = 0; i < LENGTHS; i++)
            for (int kind = 0; kind < VALUE_KINDS; kind++)
                check_act_backward(act, 1, lengths[i], (enum values)kind, NO_SUM, 1 + (int)(i & 1u));
}

Test(elementwise, act_backward_adds_its_rows_to_the_gradient_of_the_bias)
{
    for (ar_activation act = 0; act < AR_ACTIVATIONS; act++)
        for (size_t i = 0; i < ROW_LENGTHS; i++)
            for (int kind = 0; kind < VALUE_KINDS; kind++)
                for (int sums = EXACT_SUM; sums < SUM_KINDS; sums++)
                    check_act_backward(act, ROWS, row_lengths[i], (enum values)kind, (enum sums)sums,
                                       1 + (int)((act + i) & 1u));
    check_act_backward(AR_ACT_SILU, 700, 523, SPECIAL, EXACT_SUM, 2); /* several blocks of rows and columns */
    check_act_backward(AR_ACT_SILU, 700, 523, WIDE, NATIVE_SUM, 4);
}

/* gate and up stand side by side in rows of 2*cols, as a fused projection leaves them; so do dgate and dup. */
static void check_gated(ar_activation act, size_t cols, enum values kind, enum sums sums, int threads)
{
    ar_device d = test_device(threads);
    const size_t n = ROWS * cols;
    OWNED(free) float *both = new_values(2 * n, kind, 10), *dy = new_values(n, kind, 11);
    OWNED(free) float *y = new_values(n, ORDINARY, 12);
    OWNED(free) float *dboth = new_values(2 * n, ORDINARY, 13), *expected_y = new_copy(y, n);
    OWNED(free) float *expected = new_copy(both, 2 * n);
    SCOPED(plain_sum_free) plain_sum of_gate = new_sum(cols, sums), of_up = new_sum(cols, sums);
    SCOPED(plain_sum_free) plain_sum gate_added = new_sum(cols, sums), up_added = new_sum(cols, sums);
    for (size_t r = 0; r < ROWS; r++)
        for (size_t c = 0; c < cols; c++) {
            const float gate = both[r * 2 * cols + c], up = both[r * 2 * cols + cols + c], g = dy[r * cols + c];
            const bool limits = act == AR_ACT_CLAMPED, beyond = limits && fabsf(up) > 7.0f;
            const float factor = !limits ? up : 1.0f + (beyond ? copysignf(7.0f, up) : up);
            const float a = plain_act(act, gate), by_up = g * factor;
            expected_y[r * cols + c] = stored(a * factor);
            expected[r * 2 * cols + c] = stored(by_up * plain_dact(act, gate));
            expected[r * 2 * cols + cols + c] = beyond ? 0.0f : stored(g * a);
            plain_add(&gate_added, c, expected[r * 2 * cols + c]);
            plain_add(&up_added, c, expected[r * 2 * cols + cols + c]);
        }
    const ar_tensor ty = view2(y, ROWS, cols, cols), tdy = view2(dy, ROWS, cols, cols);
    const ar_tensor gate = view2(both, ROWS, cols, 2 * cols), up = view2(both + cols, ROWS, cols, 2 * cols);
    const ar_tensor dgate = view2(dboth, ROWS, cols, 2 * cols), dup = view2(dboth + cols, ROWS, cols, 2 * cols);
    assert_ok(ari_cpu_gated_forward(&d, NULL, &ty, &gate, &up, act));
    assert_ok(ari_cpu_gated_backward(&d, NULL, &dgate, &dup, &tdy, &gate, &up, act, &of_gate.at, &of_up.at));
    if (sums != NO_SUM) {
        assert_sum(&of_gate, &gate_added, "the gradient of gate's bias");
        assert_sum(&of_up, &up_added, "the gradient of up's bias");
    }
    assert_bits(y, expected_y, n, "gated_forward");
    assert_bits(dboth, expected, 2 * n, "gated_backward");
    assert_ok(ari_cpu_gated_backward(&d, NULL, &gate, &up, &tdy, &gate, &up, act, &unsummed, &unsummed));
    assert_bits(both, expected, 2 * n, "gated_backward in place");
}

Test(elementwise, gated_forward_and_backward_match_the_formula_on_strided_rows)
{
    for (ar_activation act = 0; act < AR_ACTIVATIONS; act++)
        for (size_t i = 0; i < ROW_LENGTHS; i++)
            for (int kind = 0; kind < VALUE_KINDS; kind++)
                for (int threads = 1; threads <= 2; threads++)
                    check_gated(act, row_lengths[i], (enum values)kind,
                                (enum sums)((act + i + (size_t)threads) % SUM_KINDS), threads);
}

/* Element (i, j, k, l) of a view, as an address. */
static char *element(const ar_tensor *t, size_t i, size_t j, size_t k, size_t l)
{
    const size_t at[] = {i, j, k, l};
    ptrdiff_t offset = 0;
    for (int dim = 0; dim < 4; dim++)
        offset += (ptrdiff_t)at[dim] * t->stride[dim];
    return (char *)t->data.ptr + offset * (ptrdiff_t)ar_dtype_bytes(t->dtype);
}

/* A view of shape[4] whose memory order is order[4] (the last varies fastest), with `gap` unused elements a run. */
static ar_tensor permuted(ar_dtype dtype, const size_t *shape, const int *order, size_t gap, unsigned char fill)
{
    ar_tensor t = {.dtype = dtype, .ndim = 4};
    size_t count = 1;
    for (int i = 3; i >= 0; i--) {
        t.shape[order[i]] = shape[order[i]];
        t.stride[order[i]] = (ptrdiff_t)count;
        count *= shape[order[i]];
        count += i == 3 ? gap : 0;
    }
    const size_t bytes = count * ar_dtype_bytes(dtype);
    t.data.ptr = malloc(bytes + 1);
    memset(t.data.ptr, fill, bytes);
    return t;
}

static void check_copy(ar_dtype dtype, const size_t *shape, const int *to_order, const int *from_order, int threads)
{
    ar_device d = test_device(threads);
    const size_t width = ar_dtype_bytes(dtype);
    ar_tensor from = permuted(dtype, shape, from_order, 2, 0), to = permuted(dtype, shape, to_order, 3, 0x5a);
    uint64_t state = 14, *index = malloc(sizeof *index);
    for (size_t n = 0; n < shape[0] * shape[1] * shape[2] * shape[3]; n++) {
        *index = next_random(&state);
        memcpy(element(&from, n / shape[3] / shape[2] / shape[1], n / shape[3] / shape[2] % shape[1],
                       n / shape[3] % shape[2], n % shape[3]),
               index, width);
    }
    assert_ok(ari_cpu_copy_strided(&d, NULL, &to, &from));
    for (size_t n = 0; n < shape[0] * shape[1] * shape[2] * shape[3]; n++) {
        const size_t i = n / shape[3] / shape[2] / shape[1], j = n / shape[3] / shape[2] % shape[1];
        const size_t k = n / shape[3] % shape[2], l = n % shape[3];
        cr_assert(memcmp(element(&to, i, j, k, l), element(&from, i, j, k, l), width) == 0,
                  "element %zu %zu %zu %zu differs", i, j, k, l);
    }
    free(from.data.ptr), free(to.data.ptr), free(index);
}

Test(elementwise, copy_strided_moves_every_element_for_any_order_of_strides)
{
    static const int orders[][4] = {{0, 1, 2, 3}, {0, 2, 1, 3}, {0, 1, 3, 2}, {3, 2, 1, 0}, {2, 0, 3, 1}};
    static const size_t shapes[][4] = {{1, 1, 1, 1}, {2, 3, 5, 7},     {2, 3, 65, 100}, {1, 1, 257, 33},
                                       {2, 0, 3, 4}, {1, 1, 1030, 70}, {1, 2, 513, 65}};
    for (size_t s = 0; s < 7; s++)
        for (size_t a = 0; a < 5; a++)
            for (size_t b = 0; b < 5; b++) {
                check_copy(AR_F32, shapes[s], orders[a], orders[b], 1 + 4 * (int)(a & 1u));
                check_copy(AR_I64, shapes[s], orders[a], orders[b], 1 + (int)(b & 1u));
                check_copy(AR_BF16, shapes[s], orders[a], orders[b], 1);
                check_copy(AR_U8, shapes[s], orders[a], orders[b], 1);
            }
}

Test(elementwise, copy_strided_leaves_gaps_alone_and_takes_fewer_dimensions)
{
    ar_device d = test_device(1);
    float from[] = {1, 2, 3, 4, 5, 6}, to[] = {-1, -1, -1, -1, -1, -1, -1, -1};
    ar_tensor src = view2(from, 2, 3, 3), dst = view2(to, 2, 3, 4);
    assert_ok(ari_cpu_copy_strided(&d, NULL, &dst, &src));
    const float expected[] = {1, 2, 3, -1, 4, 5, 6, -1};
    assert_bits(to, expected, 8, "two rows of three in rows of four");
    const ar_tensor scalar_to = {.dtype = AR_F32, .data = {to}}, scalar_from = {.dtype = AR_F32, .data = {from + 4}};
    assert_ok(ari_cpu_copy_strided(&d, NULL, &scalar_to, &scalar_from));
    cr_assert_eq(ari_bits32(to[0]), ari_bits32(5.0f));
}

Test(elementwise, copy_strided_refuses_elements_of_less_than_a_byte)
{
    ar_device d = test_device(1);
    unsigned char bytes[4] = {0};
    const ar_tensor t = {.dtype = AR_F4, .ndim = 1, .shape = {2}, .stride = {1}, .data = {bytes}};
    cr_assert_eq(ari_cpu_copy_strided(&d, NULL, &t, &t), AR_ERR_DTYPE);
}
