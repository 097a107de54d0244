/* SPDX-License-Identifier: Apache-2.0 */
/* Native numerics. A product's order of additions is the device's own, so two devices differ, and each is held to
 *     |y - sum| <= (k + 1) * u * (sum of |a||b| + |c|)
 * of the sum in binary64, with u = 2^-24 for additions that round to nearest, 2^-23 for tensor cores, which cut off; a
 * bf16 result is rounded once more, by 2^-8 of it at most.
 * Products of small integers are exact in any order, and so are compared by their bits. */
#include <math.h>

#include "gpu/conformance.h"
#include "ref/core/float_bits.h"
#include "tests/support/scoped.h"

typedef struct native {
    size_t shape[4]; /* batch, batch, m, n */
    size_t k;
    ar_precision operands;
    bool add, integers, shared; /* shared: b's first batch dimension has stride 0 */
} native;

/* Numbers of the precision alone. */
static void narrow(pair_tensor t, const native *o, device_pair *p)
{
    static const int bits[AR_PRECISION_COUNT] = {24, 11, 8};
    for (size_t i = 0; i < pair_count(t) && t.buf.host; i++) {
        float *x = pair_element(t, i);
        if (o->integers)
            *x = (float)(1 + pair_below(p, 60)) * (pair_below(p, 2) ? 1.0f : -1.0f);
        else if (bits[o->operands] < 24)
            *x = ari_f32_to_bits(*x, bits[o->operands]);
    }
}

/* to: the result, which began as c. */
static void bound_product(device_pair *p, const native *o, pair_tensor to, pair_tensor c, pair_tensor a, pair_tensor b)
{
    const size_t n = pair_count(c), cols = o->shape[3], rows = o->shape[2];
    OWNED(free) double *expected = calloc(n + 1, sizeof *expected), *bound = calloc(n + 1, sizeof *bound);
    if (!expected || !bound)
        abort();
    for (size_t i = 0; i < n && c.buf.host && a.buf.host && b.buf.host; i++) {
        const size_t row = i / cols, matrix = row / rows, col = matrix * cols + i % cols;
        double sum = o->add ? (double)*pair_element(c, i) : 0.0, size = fabs(sum);
        for (size_t k = 0; k < o->k; k++) {
            const double term = (double)*pair_element(a, row * o->k + k) * (double)*pair_element(b, col * o->k + k);
            sum += term;
            size += fabs(term);
        }
        expected[i] = sum;
        bound[i] = ((double)o->k + 1.0) * (o->operands == AR_PRECISION_F32 ? 0x1p-24 : 0x1p-23) * size + 0x1p-140;
        if (to.at[0].dtype == AR_BF16) /* rounded once more, at the end */
            bound[i] += 0x1p-8 * (fabs(sum) + bound[i]);
    }
    pair_within(p, to, expected, bound);
}

static void gemm_f32_case(device_pair *p, const native *o)
{
    static const char *const kinds[] = {"fp32", "TF32", "bf16"};
    static const pair_layout outputs[] = {PAIR_ROW_MAJOR, PAIR_PADDED, PAIR_HEADS, PAIR_SWAPPED, PAIR_GAPS};
    static const pair_layout inputs[] = {PAIR_ROW_MAJOR, PAIR_PADDED, PAIR_SWAPPED, PAIR_GAPS, PAIR_HEADS};
    const pair_layout lc = outputs[pair_below(p, 5)], la = inputs[pair_below(p, 5)], lb = inputs[pair_below(p, 5)];
    PAIR_CASE(p, "%zu x %zu x [%zu, %zu, %zu] %s%s%s, %s = %s times %s%s", o->shape[0], o->shape[1], o->shape[2],
              o->shape[3], o->k, kinds[o->operands], o->add ? " added" : "", o->integers ? " of integers" : "",
              pair_layout_name(lc), pair_layout_name(la), pair_layout_name(lb), o->shared ? ", b shared" : "");
    const size_t sa[4] = {o->shape[0], o->shape[1], o->shape[2], o->k};
    const size_t sb[4] = {o->shape[0], o->shape[1], o->shape[3], o->k};
    const pair_tensor c =
        o->add ? pair_input(p, "c", 4, o->shape, lc, PAIR_ORDINARY) : pair_output(p, "c", 4, o->shape, lc);
    const pair_tensor a = pair_input(p, "a", 4, sa, la, PAIR_ORDINARY);
    pair_tensor b = pair_input(p, "b", 4, sb, lb, PAIR_ORDINARY);
    if (o->shared)
        b.at[0].stride[0] = b.at[1].stride[0] = 0;
    narrow(a, o, p);
    narrow(b, o, p);
    if (o->integers && o->add)
        narrow(c, o, p);
    const bool all = pair_below(p, 2) != 0; /* or some of them */
    const pair_tensor left = all || pair_below(p, 2) ? pair_stored(p, a) : a;
    pair_tensor right = all || pair_below(p, 2) ? pair_stored(p, b) : b;
    const pair_tensor to = all || pair_below(p, 2) ? pair_stored(p, c) : c;
    if (!o->integers)
        bound_product(p, o, to, c, a, b);
    PAIR_RUN(p, gemm_f32, &to.at[s], &left.at[s], &right.at[s], o->add, o->operands);
}

void gemm_f32_cases(device_pair *p)
{
    static const size_t shapes[][5] = {{1, 1, 1, 1, 1},     {1, 1, 3, 5, 7},    {2, 3, 4, 5, 16},   {1, 1, 33, 65, 31},
                                       {1, 2, 64, 48, 100}, {2, 1, 1, 40, 257}, {3, 1, 17, 1, 33},  {1, 1, 2, 3, 2000},
                                       {1, 1, 4, 3, 0},     {2, 2, 0, 3, 4},    {1, 4, 16, 16, 64}, {2, 4, 7, 7, 8}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int operands = 0; operands < AR_PRECISION_COUNT; operands++)
            for (int form = 0; form < 4 && pair_goes_on(p); form++) {
                native o = {.k = shapes[i][4],
                            .operands = (ar_precision)operands,
                            .add = form % 2,
                            .integers = form / 2,
                            .shared = pair_below(p, 4) == 0};
                for (int d = 0; d < 4; d++)
                    o.shape[d] = p->round > 0 && i < 8 ? 1 + pair_below(p, d < 2 ? 3 : 60) : shapes[i][d];
                gemm_f32_case(p, &o);
            }
}

/* In the order of the rows: the same bits. */
void sum_rows_f32_cases(device_pair *p)
{
    static const size_t counts[] = {0, 1, 2, 33, 300};
    for (size_t i = 0; i < 5; i++)
        for (int layout = 0; layout < PAIR_LAYOUTS; layout++)
            for (int form = 0; form < 3 && pair_goes_on(p); form++) {
                const size_t rows = counts[i], cols = 1 + pair_below(p, 300), n = form == 0 ? 1 : form == 1 ? rows : 7;
                PAIR_CASE(p, "[%zu, %zu] %s into %zu rows%s", rows, cols, pair_layout_name((pair_layout)layout), n,
                          form == 2 ? ", listed" : "");
                const pair_buf acc = pair_rows(p, "acc", n, cols, PAIR_CALM_ROWS);
                const pair_tensor values = pair_input(p, "terms", 2, (const size_t[]){rows, cols}, (pair_layout)layout,
                                                      form == 0 ? PAIR_SQUARES : PAIR_CALM_ROWS);
                const pair_tensor terms = pair_stored(p, values);
                const pair_buf row_of = form == 2 ? pair_integers(p, "row_of", PAIR_W64, rows, -2, 9) : pair_none();
                PAIR_RUN(p, sum_rows_f32, acc.at[s], n, &terms.at[s], ar_const(row_of.at[s]));
            }
}
