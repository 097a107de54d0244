/* SPDX-License-Identifier: Apache-2.0 */
/* The order-independent accumulator: what is added to it, in which rows, and what it is read as. */
#include <string.h>

#include "gpu/conformance.h"
#include "ref/numerics/accumulator.h"
#include "ref/numerics/sent_sum.h"

/* A state that earlier additions left: of a few values of each kind. */
static void fill_state(device_pair *p, pair_buf t, pair_buf hl, size_t n, pair_values v, bool narrow)
{
    for (size_t i = 0; i < n && t.host && hl.host; i++) {
        uint8_t top = 0;
        int64_t h = 0, l = 0;
        for (size_t k = pair_below(p, 4); k > 0; k--)
            ari_acc_add(&top, &h, &l, pair_value(p, v), narrow);
        ((uint8_t *)t.host)[i] = top;
        ((int64_t *)hl.host)[i] = h;
        ((int64_t *)hl.host)[n + i] = l;
    }
}

typedef struct acc {
    pair_buf t, hl;
    bool narrow;
} acc;

/* Of either width of slices. */
static acc new_acc(device_pair *p, size_t n, pair_values v)
{
    const acc a = {pair_zeros(p, "t", PAIR_W8, n), pair_zeros(p, "hl", PAIR_W64, 2 * n), pair_below(p, 2) != 0};
    fill_state(p, a.t, a.hl, n, v, a.narrow);
    return a;
}

typedef enum rows { ITSELF, LISTED, RARE, ROWS } rows;

pair_sum pair_new_sum(device_pair *p, const char *name, size_t n, bool exact)
{
    pair_sum sum = pair_no_sum();
    const acc a = exact ? new_acc(p, n, PAIR_ORDINARY) : (acc){pair_none(), pair_none(), false};
    const pair_buf plain = exact ? pair_none() : pair_floats(p, name, n, PAIR_ORDINARY);
    for (int s = 0; s < 2; s++)
        sum.at[s] = (ar_row_sum){.t = a.t.at[s], .hl = a.hl.at[s], .narrow = a.narrow, .f32 = plain.at[s]};
    return sum;
}

pair_sum pair_no_sum(void)
{
    return (pair_sum){{{.t = {NULL}}, {.t = {NULL}}}};
}

/* Rows of the terms go to rows of their own, or into one; to listed ones, many to the same, some to none. */
static void acc_add_case(device_pair *p, size_t in_acc, size_t n, size_t cols, pair_layout layout, rows which)
{
    static const char *const names[] = {"itself", "listed", "listed, few"};
    PAIR_CASE(p, "[%zu, %zu] %s into %zu rows, %s", n, cols, pair_layout_name(layout), in_acc, names[which]);
    const acc a = new_acc(p, in_acc * cols, pair_below(p, 2) ? PAIR_WIDE : PAIR_ORDINARY);
    const pair_tensor terms =
        pair_stored(p, pair_input(p, "terms", 2, (const size_t[]){n, cols}, layout, PAIR_EACH_ROW));
    pair_buf row_of = pair_none();
    if (which == LISTED)
        row_of = pair_integers(p, "row_of", PAIR_W64, n, -1, in_acc + 1);
    else if (which == RARE)
        row_of = pair_integers(p, "row_of", PAIR_W64, n, -3, in_acc < 2 ? 4 : 5);
    for (int twice = 0; twice < 2; twice++)
        PAIR_RUN(p, acc_add, a.t.at[s], a.hl.at[s], a.narrow, in_acc, &terms.at[s], ar_const(row_of.at[s]));
}

void acc_add_cases(device_pair *p)
{
    static const size_t counts[] = {1, 2, 33, 300};
    for (size_t i = 0; i < 4; i++)
        for (int layout = 0; layout < PAIR_LAYOUTS; layout++)
            for (int which = 0; which < ROWS && pair_goes_on(p); which++) {
                const size_t n = p->round > 0 ? 1 + pair_below(p, 400) : counts[i];
                const size_t cols = 1 + pair_below(p, i == 3 ? 40 : 300);
                const size_t in_acc = which == ITSELF ? (pair_below(p, 2) ? n : 1) : 2 + pair_below(p, 20);
                acc_add_case(p, in_acc, n, cols, (pair_layout)layout, (rows)which);
            }
    acc_add_case(p, 1, 0, 7, PAIR_ROW_MAJOR, ITSELF);
    acc_add_case(p, 5, 3, 0, PAIR_ROW_MAJOR, LISTED);
    acc_add_case(p, 1, 2000, 3, PAIR_ROW_MAJOR, ITSELF);
}

/* Sums of states of many values, whose H and L have both signs and more than 32 bits. */
void acc_value_cases(device_pair *p)
{
    static const size_t shapes[][5] = {{1, 257},  {2, 33, 9}, {3, 2, 5, 31}, {4, 2, 3, 2, 17},
                                       {2, 1, 1}, {2, 0, 4},  {2, 600, 3}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int layout = 0; layout < PAIR_LAYOUTS; layout++)
            for (int v = 0; v < PAIR_VALUE_KINDS && pair_goes_on(p); v += 2) {
                const int ndim = (int)shapes[i][0];
                size_t n = 1;
                for (int d = 0; d < ndim; d++)
                    n *= shapes[i][d + 1];
                PAIR_CASE(p, "%d dimensions, %zu elements of %s values, %s", ndim, n, pair_values_name((pair_values)v),
                          pair_layout_name((pair_layout)layout));
                const acc a = new_acc(p, n, (pair_values)v);
                for (size_t k = 0; k < 2 * n && a.hl.host && a.t.host; k++)
                    if (((uint8_t *)a.t.host)[k % n] != ARI_ACC_NONFINITE && pair_below(p, 2))
                        ((int64_t *)a.hl.host)[k] = (int64_t)pair_random(p) >> pair_below(p, 40);
                const pair_tensor y = pair_output(p, "y", ndim, &shapes[i][1], (pair_layout)layout);
                PAIR_RUN(p, acc_value, &y.at[s], ar_const(a.t.at[s]), ar_const(a.hl.at[s]), n, a.narrow);
            }
}

void acc_put_cases(device_pair *p)
{
    size_t n;
    for (size_t i = 0; (n = pair_size(p, i)) != SIZE_MAX; i++)
        for (int v = 0; v < PAIR_VALUE_KINDS && pair_goes_on(p); v++) {
            PAIR_CASE(p, "n %zu, %s", n, pair_values_name((pair_values)v));
            const pair_buf x = pair_floats(p, "x", n, (pair_values)v);
            const acc a = {pair_zeros(p, "t", PAIR_W8, n), pair_zeros(p, "hl", PAIR_W64, 2 * n), pair_below(p, 2) != 0};
            PAIR_RUN(p, acc_put, a.t.at[s], a.hl.at[s], ar_buf_at(a.hl.at[s], n * sizeof(int64_t)), ar_const(x.at[s]),
                     n, a.narrow);
        }
}

/* Integers of every length and both signs. */
static pair_buf numbers(device_pair *p, const char *name, size_t n)
{
    const pair_buf x = pair_integers(p, name, PAIR_W64, n, 0, 1);
    for (size_t k = 0; k < n && x.host; k++)
        ((int64_t *)x.host)[k] = (int64_t)pair_random(p) >> pair_below(p, 64);
    return x;
}

/* Bytes that ranks have sent: an index that there is, or a value, and any bytes after it. */
static void states_case(device_pair *p, size_t n, size_t width, bool merge)
{
    const size_t ranks = 1 + pair_below(p, 5);
    const bool narrow = width <= ARI_SENT_WORD && (width > 4 || pair_below(p, 2) != 0);
    PAIR_CASE(p, "n %zu, %zu bytes, %zu ranks", n, width, ranks);
    const pair_buf sent = merge ? pair_bytes(p, "from", ranks * n * width, 0) : pair_zeros(p, "to", PAIR_W8, n * width);
    const pair_buf t = pair_bytes(p, "t", n, 0), h = numbers(p, "h", n), l = numbers(p, "l", n);
    for (size_t k = 0; merge && k < ranks * n * width && sent.host; k++)
        ((uint8_t *)sent.host)[k] = (uint8_t)pair_below(p, k % width == 0 && width > ARI_SENT_WORD ? 9 : 256);
    for (size_t k = 0; k < n && t.host; k++)
        ((uint8_t *)t.host)[k] = (uint8_t)pair_below(p, 9);
    if (merge) {
        PAIR_RUN(p, states_merge, t.at[s], h.at[s], l.at[s], ar_const(sent.at[s]), ranks, n, width, narrow);
    } else {
        PAIR_RUN(p, states_narrow, sent.at[s], ar_const(t.at[s]), ar_const(h.at[s]), ar_const(l.at[s]), n, width,
                 narrow);
    }
}

static void states_cases(device_pair *p, bool merge)
{
    static const size_t widths[] = {4, 5, 6, 8, 11, 13, 15, 17};
    size_t n;
    for (size_t i = 0; (n = pair_size(p, i)) != SIZE_MAX; i++)
        for (size_t w = 0; w < sizeof widths / sizeof *widths && pair_goes_on(p); w++)
            states_case(p, n, widths[w], merge);
}

void states_narrow_cases(device_pair *p)
{
    states_cases(p, false);
}

void states_merge_cases(device_pair *p)
{
    states_cases(p, true);
}
