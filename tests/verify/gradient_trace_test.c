/* SPDX-License-Identifier: Apache-2.0 */
/* Parts of sums in gradients and elsewhere, gradients that are not there, and norms of clipped ones. */
#include "ref/io/safetensors_private.h"
#include "tests/verify/two_dumps.h"

enum { ROWS = 40, COLS = 24, N = ROWS * COLS };

static ar_st_tensor matrix_of(const char *name, const float *data)
{
    return (ar_st_tensor){.name = name, .dtype = AR_F32, .ndim = 2, .shape = {ROWS, COLS}, .data = data};
}

/* The cause of the first difference of the other dump, which may say how many micro-batches there are. */
static void expect_cause_of(const ar_st_tensor *a, size_t na, const ar_st_tensor *b, size_t nb, const char *micro,
                            const char *cause, size_t number)
{
    SCOPED(two_files_end) const two_files f = two_files_make();
    const char *const meta[] = {"micro_batches", micro};
    const ar_verify_options o = {
        .reference = f.reference, .other = f.other, .rule = AR_VERIFY_TOLERANCE, .rtol = 1e-5, .atol = 1e-7, .tp = 1};
    OWNED(ar_verify_report_destroy) ar_verify_report *r = NULL;
    write_tensors(f.reference, a, na);
    cr_assert_ok(ari_st_write(f.other, b, nb, meta, micro ? 1 : 0));
    cr_assert_ok(ar_verify(&r, &o));
    expect_row(&r->row[r->first], cause, NULL, number);
}

/* In [-1, 1), unrelated for different i. */
static double term(uint32_t i)
{
    i = (i ^ (i >> 16)) * 0x7feb352du;
    i = (i ^ (i >> 15)) * 0x846ca68bu;
    return (double)(i ^ (i >> 16)) * 0x1p-31 - 1.0;
}

/* Terms of a sum that are unrelated to each other. */
static void fill_parts(float *sum, float *part, int parts)
{
    for (int i = 0; i < N; i++) {
        sum[i] = part[i] = (float)term((uint32_t)i + 1);
        for (int k = 1; k < parts; k++)
            sum[i] += (float)term((uint32_t)(i + 1 + k * N));
    }
}

Test(gradient_trace, one_micro_batch_alone_is_told_where_the_dump_counts_them)
{
    const struct {
        const char *name, *micro, *cause;
        int parts;
    } cases[] = {
        {"layers.3.mlp.up_proj.weight:grad", "2", "one_micro_batch", 2},
        {"layers.3.mlp.up_proj.weight:grad", "4", "one_micro_batch", 4},
        {"layers.3.mlp.up_proj.weight:grad", "8", "partial_sum", 2}, /* half is not one of eight */
        {"layers.3.mlp.up_proj.weight:grad", "two", "partial_sum", 2},
        {"layers.3.mlp.up_proj.weight:grad", NULL, "partial_sum", 2},
        {"layers.3.mlp.down_proj:fwd", NULL, "unknown", 2}, /* tp is 1: no value is a sum over ranks */
    };
    float sum[N], part[N];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fill_parts(sum, part, cases[i].parts);
        const ar_st_tensor a = matrix_of(cases[i].name, sum), b = matrix_of(cases[i].name, part);
        expect_cause_of(&a, 1, &b, 1, cases[i].micro, cases[i].cause, i);
    }
}

/* Of two ranks of T1 and T2 targets each divided by its own number: the first's gradient is T/(2 T1) times what it
 * belongs to, the second's T/(2 T2), or twice that where they were added. */
Test(gradient_trace, means_of_parts_are_seen_in_rows_of_ids_that_one_part_alone_has)
{
    const struct {
        double first, second;
        const char *cause;
    } cases[] = {
        {2.0, 2.0 / 3.0, "mean_of_means"},      /* 5 and 15 of 20 */
        {4.0, 4.0 / 3.0, "sum_of_local_means"}, /* the same, added */
        {3.0, 0.8, "unknown"},                  /* no counts have these factors */
    };
    float sum[N], part[N], whole[N], other[N], ids[N], other_ids[N];
    fill_parts(sum, part, 2);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (int k = 0; k < N; k++) {
            const int id = k / COLS; /* the first 10 are the first's, the next 10 the second's, others both have */
            const double a = (double)part[k], b = (double)sum[k] - a;
            const double x = id < 10 || id >= 20 ? a : 0.0, y = id >= 10 ? b : 0.0;
            whole[k] = (float)(a + 0.7 * b);
            other[k] = (float)(cases[i].first * a + cases[i].second * 0.7 * b);
            ids[k] = (float)(x + y);
            other_ids[k] = (float)(cases[i].first * x + cases[i].second * y);
        }
        const ar_st_tensor a[] = {matrix_of("lm_head.weight:grad", whole), matrix_of("embed_tokens.weight:grad", ids)};
        const ar_st_tensor b[] = {matrix_of(a[0].name, other), matrix_of(a[1].name, other_ids)};
        expect_cause_of(a, 2, b, 2, NULL, cases[i].cause, i);
    }
}

/* Of two micro-batches, a sample each, the first is divided by two once more, or by another number, or is alone; the norm
 * calls its weight a gain. */
Test(gradient_trace, a_norm_s_gain_tells_the_weights_of_micro_batches)
{
    static const char *const micro[] = {"micro_batches", "2"};
    static const struct {
        double first, last;
        const char *cause, *words;
    } cases[] = {{0.5, 1.0, "accumulation_divided", "0.5, 1 are in it"},
                 {0.3, 1.0, "micro_batches_weighted", "0.3, 1 are in the gradient"},
                 {1.0, 0.0, "one_micro_batch", "the first micro-batch's gradient alone"},
                 {3.0, 1.0, "reduced_again", "summed over 3 ranks after each of 2 micro-batches"}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        made m = {.n = 0, .metadata = {{micro[0], micro[1]}, {micro[0], micro[1]}}};
        const float *gain = put(&m, "out_norm.gain:init", 1, H, 0, 0), *y = put_tokens(&m, "out_norm:fwd");
        const float *dy = put_tokens(&m, "head:bwd");
        float *d = put(&m, "out_norm.gain:grad", 1, H, 0, 0), *e = other_of(&m);
        for (size_t i = 0; i < H; i++) {
            double of[B] = {0.0};
            for (size_t row = 0; row < B * S; row++)
                of[row / S] += (double)dy[row * H + i] * (double)y[row * H + i] / (double)gain[i];
            d[i] = (float)(of[0] + of[1]);
            e[i] = (float)(cases[k].first * of[0] + cases[k].last * of[1]);
        }
        expect_cause_on(k == 3 ? 3 : 1, &m, cases[k].cause, cases[k].words, k);
    }
}

Test(gradient_trace, a_norm_of_parameters_that_the_reference_does_not_train_is_told)
{
    made m = {.n = 0};
    double square[2] = {0.0};
    for (size_t k = 0; k < 2; k++) {
        const float *x = put(&m, k ? "frozen.weight:grad" : "w:grad", 2, H, H, 0);
        for (size_t i = 0; i < H * H; i++)
            square[k] += (double)x[i] * (double)x[i];
    }
    m.tensor[0][1].name = "other.weight:new";
    *put(&m, "grad_norm:clip", 0, 0, 0, 0) = (float)sqrt(square[0]);
    *other_of(&m) = (float)sqrt(square[0] + square[1]);
    expect_cause(&m, "unknown", "the norm counts 1 parameters that have a gradient here and none in the reference", 0);
}

Test(gradient_trace, gradients_that_are_not_there_are_told_where_the_run_went_backward)
{
    float x[N], y[N];
    fill_parts(x, y, 2);
    const ar_st_tensor a[] = {matrix_of("mlp.up_proj:bwd", x), matrix_of("mlp.up_proj.weight:grad", y)};
    const ar_st_tensor forward[] = {matrix_of("mlp.up_proj:fwd", x), a[1]};
    expect_cause_of(a, 2, a, 1, NULL, "no_gradient", 0);
    expect_cause_of(forward, 2, forward, 1, NULL, "none", 1); /* it may have no backward pass */
}

Test(gradient_trace, the_norm_of_gradients_clipped_by_value_and_of_another_order_is_seen)
{
    float x[N], y[N];
    double norm = 0.0, clipped = 0.0, other = 0.0, largest = 0.0, sum = 0.0;
    fill_parts(x, y, 2);
    for (int i = 0; i < N; i++) {
        const double size = fabs((double)x[i]);
        norm += size * size;
        clipped += pow(fmin(size, 0.5), 2.0);
        other += pow(fmin(size, 0.4321), 2.0); /* no limit that anybody gives */
        largest = fmax(largest, size);
        sum += size;
    }
    const float norms[] = {(float)sqrt(norm), (float)sqrt(clipped), (float)sqrt(other), (float)largest, (float)sum};
    const char *const causes[] = {"clipped", "unknown", "norm_other_order", "norm_other_order"};
    for (int i = 0; i < 4; i++) {
        const ar_st_tensor a[] = {matrix_of("w:grad", x), vector_of("grad_norm:clip", AR_F32, 1, &norms[0])};
        const ar_st_tensor b[] = {a[0], vector_of("grad_norm:clip", AR_F32, 1, &norms[1 + i])};
        expect_cause_of(a, 2, b, 2, NULL, causes[i], (size_t)i);
    }
}
