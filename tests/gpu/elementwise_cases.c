/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels whose elements do not know of each other, and the sum of the gradient's norm. */
#include <stdlib.h>
#include <string.h>

#include "anyrank/activation.h"
#include "gpu/conformance.h"
#include "ref/core/float_bits.h"
#include "ref/numerics/bits.h"

static const char *const acts[] = {"gelu-erf", "gelu-tanh", "silu", "relu", "none", "clamped"};
_Static_assert(sizeof acts / sizeof *acts == AR_ACTIVATIONS, "each activation has a name");

/* Calls one(p, n, values) for sizes and values of every kind; two sizes a kind are enough for what has no others. */
static void sizes_and_values(device_pair *p, void (*one)(device_pair *, size_t, pair_values))
{
    size_t n;
    for (size_t i = 0; (n = pair_size(p, i)) != SIZE_MAX; i++)
        for (int v = 0; v < PAIR_VALUE_KINDS && pair_goes_on(p); v++)
            if ((i + (size_t)v) % 2 == 0)
                one(p, n, (pair_values)v);
}

typedef enum place { APART, IN_FIRST, IN_SECOND, ALL_ONE, PLACES } place;

#define TWO_INPUTS(slot)                                                                                              \
    static void slot##_case(device_pair *p, size_t n, pair_values v)                                                  \
    {                                                                                                                 \
        const place where = (place)pair_below(p, PLACES);                                                             \
        PAIR_CASE(p, "n %zu, %s values, place %d", n, pair_values_name(v), where);                                    \
        const pair_buf a = pair_floats(p, "a", n, v), b = pair_floats(p, "b", n, v);                                  \
        const pair_buf apart = pair_words(p, "y", PAIR_W32, n);                                                       \
        const pair_tensor first = pair_stored(p, pair_view(a, 1, &n)), second = pair_stored(p, pair_view(b, 1, &n));  \
        const pair_tensor other = pair_stored(p, pair_view(apart, 1, &n)), right = where == ALL_ONE ? first : second; \
        const pair_tensor to = where == APART ? other : where == IN_SECOND ? second : first;                          \
        PAIR_RUN(p, slot, &to.at[s], &first.at[s], &right.at[s]);                                                     \
    }                                                                                                                 \
    void slot##_cases(device_pair *p)                                                                                 \
    {                                                                                                                 \
        sizes_and_values(p, slot##_case);                                                                             \
    }
TWO_INPUTS(add)
TWO_INPUTS(mul)

static void fill_case(device_pair *p, size_t n, pair_values v)
{
    const float value = pair_value(p, v);
    PAIR_CASE(p, "n %zu, value 0x%08x", n, ari_bits32(value));
    const pair_buf y = pair_words(p, "y", PAIR_W32, n);
    const pair_tensor to = pair_stored(p, pair_view(y, 1, &n));
    PAIR_RUN(p, fill, &to.at[s], value);
}

PAIR_CASES(fill, sizes_and_values)

static void scale_case(device_pair *p, size_t n, pair_values v)
{
    const float factor = pair_value(p, pair_below(p, 3) ? PAIR_ORDINARY : PAIR_SPECIAL);
    const bool in_place = pair_below(p, 2);
    PAIR_CASE(p, "n %zu, %s values, factor 0x%08x%s", n, pair_values_name(v), ari_bits32(factor),
              in_place ? ", in place" : "");
    const pair_buf x = pair_floats(p, "x", n, v), y = pair_words(p, "y", PAIR_W32, n);
    const pair_tensor from = pair_stored(p, pair_view(x, 1, &n)), apart = pair_stored(p, pair_view(y, 1, &n));
    PAIR_RUN(p, scale, in_place ? &from.at[s] : &apart.at[s], &from.at[s], factor);
}

PAIR_CASES(scale, sizes_and_values)

static double a_cap(device_pair *p)
{
    static const double caps[] = {0.5, 30.0, 50.0};
    return caps[pair_below(p, 3)];
}

static void softcap_case(device_pair *p, size_t n, pair_values v)
{
    const float factor = pair_value(p, PAIR_ORDINARY);
    const double cap = a_cap(p);
    const bool in_place = pair_below(p, 2);
    PAIR_CASE(p, "n %zu, %s values, factor 0x%08x, cap %g%s", n, pair_values_name(v), ari_bits32(factor), cap,
              in_place ? ", in place" : "");
    const pair_buf x = pair_floats(p, "x", n, v), y = pair_words(p, "y", PAIR_W32, n);
    const pair_tensor from = pair_stored(p, pair_view(x, 1, &n)), apart = pair_stored(p, pair_view(y, 1, &n));
    PAIR_RUN(p, softcap, in_place ? &from.at[s] : &apart.at[s], &from.at[s], factor, cap);
}

PAIR_CASES(softcap, sizes_and_values)

static void softcap_backward_case(device_pair *p, size_t n, pair_values v)
{
    const float factor = pair_value(p, PAIR_ORDINARY);
    const double cap = a_cap(p);
    const place where = (place)pair_below(p, ALL_ONE);
    PAIR_CASE(p, "n %zu, %s values, factor 0x%08x, cap %g, place %d", n, pair_values_name(v), ari_bits32(factor), cap,
              where);
    const pair_buf a = pair_floats(p, "dy", n, v), b = pair_floats(p, "x", n, v);
    const pair_buf apart = pair_words(p, "dx", PAIR_W32, n);
    const pair_tensor dy = pair_stored(p, pair_view(a, 1, &n)), x = pair_stored(p, pair_view(b, 1, &n));
    const pair_tensor other = pair_stored(p, pair_view(apart, 1, &n));
    const pair_tensor to = where == APART ? other : where == IN_SECOND ? x : dy;
    PAIR_RUN(p, softcap_backward, &to.at[s], &dy.at[s], &x.at[s], factor, cap);
}

PAIR_CASES(softcap_backward, sizes_and_values)

static void bias_act_case(device_pair *p, const size_t shape[2], ar_activation act, bool bias, bool in_place)
{
    PAIR_CASE(p, "[%zu, %zu] %s%s%s", shape[0], shape[1], acts[act], bias ? " bias" : "", in_place ? " in place" : "");
    const pair_tensor y = pair_stored(p, pair_input(p, "y", 2, shape, PAIR_ROW_MAJOR, PAIR_EACH_ROW));
    const pair_tensor z = pair_stored(p, pair_output(p, "z", 2, shape, PAIR_ROW_MAJOR));
    const pair_buf b = bias ? pair_floats(p, "bias", shape[1], PAIR_SPECIAL) : pair_none();
    PAIR_RUN(p, bias_act, &y.at[s], ar_const(b.at[s]), act, in_place ? &y.at[s] : &z.at[s]);
}

void bias_act_cases(device_pair *p)
{
    size_t cols;
    for (size_t i = 0; (cols = pair_size(p, i)) != SIZE_MAX; i++)
        for (ar_activation act = 0; act <= AR_ACT_NONE; act++)
            for (int bias = 0; bias < 2 && pair_goes_on(p); bias++)
                bias_act_case(p, (const size_t[]){1 + (i + (size_t)act) % 12, cols}, (ar_activation)act, bias,
                              pair_below(p, 4) == 0);
}

static pair_sum bias_sum(device_pair *p, const char *name, size_t cols)
{
    const size_t which = pair_below(p, 3);
    return which == 2 ? pair_no_sum() : pair_new_sum(p, name, cols, which);
}

static void act_backward_case(device_pair *p, const size_t shape[2], ar_activation act, place where)
{
    PAIR_CASE(p, "[%zu, %zu] %s, place %d", shape[0], shape[1], acts[act], where);
    const pair_sum dbias = bias_sum(p, "dbias", shape[1]);
    const pair_tensor dy = pair_stored(p, pair_input(p, "dy", 2, shape, PAIR_ROW_MAJOR, PAIR_EACH_ROW));
    const pair_tensor x = pair_stored(p, pair_input(p, "x", 2, shape, PAIR_ROW_MAJOR, PAIR_EACH_ROW));
    const pair_tensor apart = pair_stored(p, pair_output(p, "dx", 2, shape, PAIR_ROW_MAJOR));
    const pair_tensor dx = where == APART ? apart : where == IN_FIRST ? dy : x;
    PAIR_RUN(p, act_backward, &dx.at[s], &dy.at[s], &x.at[s], act, &dbias.at[s]);
}

void act_backward_cases(device_pair *p)
{
    size_t cols;
    for (size_t i = 0; (cols = pair_size(p, i)) != SIZE_MAX; i++)
        for (ar_activation act = 0; act <= AR_ACT_NONE && pair_goes_on(p); act++)
            act_backward_case(p, (const size_t[]){1 + (i + (size_t)act) % 40, cols}, (ar_activation)act,
                              (place)pair_below(p, 3));
    for (int where = 0; where < 3 && pair_goes_on(p); where++)
        act_backward_case(p, (const size_t[]){700, 70}, AR_ACT_RELU, (place)where);
}

static pair_layout rows_layout(device_pair *p)
{
    return pair_below(p, 2) ? PAIR_ROW_MAJOR : p->skewed ? PAIR_PADDED : PAIR_SPACED;
}

static void gated_forward_case(device_pair *p, const size_t shape[2], ar_activation act, place where)
{
    PAIR_CASE(p, "[%zu, %zu] %s, place %d", shape[0], shape[1], acts[act], where);
    const pair_tensor gate = pair_stored(p, pair_input(p, "gate", 2, shape, rows_layout(p), PAIR_EACH_ROW));
    const pair_tensor up = pair_stored(p, pair_input(p, "up", 2, shape, rows_layout(p), PAIR_EACH_ROW));
    const pair_tensor apart = pair_stored(p, pair_output(p, "y", 2, shape, rows_layout(p)));
    const pair_tensor y = where == APART ? apart : where == IN_FIRST ? gate : up;
    PAIR_RUN(p, gated_forward, &y.at[s], &gate.at[s], &up.at[s], act);
}

/* dgate may be gate, dup may be up, either may be dy. */
static void gated_backward_case(device_pair *p, const size_t shape[2], ar_activation act, size_t where)
{
    PAIR_CASE(p, "[%zu, %zu] %s, place %zu", shape[0], shape[1], acts[act], where);
    const pair_tensor gate = pair_stored(p, pair_input(p, "gate", 2, shape, rows_layout(p), PAIR_EACH_ROW));
    const pair_tensor up = pair_stored(p, pair_input(p, "up", 2, shape, rows_layout(p), PAIR_EACH_ROW));
    const pair_tensor dy = pair_stored(p, pair_input(p, "dy", 2, shape, rows_layout(p), PAIR_EACH_ROW));
    const pair_tensor own_gate = pair_stored(p, pair_output(p, "dgate", 2, shape, rows_layout(p)));
    const pair_tensor own_up = pair_stored(p, pair_output(p, "dup", 2, shape, rows_layout(p)));
    const pair_tensor dgate = where == 1 || where == 3 ? gate : where == 4 ? dy : own_gate;
    const pair_tensor dup = where == 2 || where == 3 ? up : where == 5 ? dy : own_up;
    const pair_sum gate_bias = bias_sum(p, "gate_bias", shape[1]);
    const bool exact = gate_bias.at[0].t.ptr != NULL; /* sums are of one kind */
    const pair_sum up_bias = pair_below(p, 3) ? pair_new_sum(p, "up_bias", shape[1], exact) : pair_no_sum();
    PAIR_RUN(p, gated_backward, &dgate.at[s], &dup.at[s], &dy.at[s], &gate.at[s], &up.at[s], act, &gate_bias.at[s],
             &up_bias.at[s]);
}

void gated_forward_cases(device_pair *p)
{
    size_t cols;
    for (size_t i = 0; (cols = pair_size(p, i)) != SIZE_MAX; i++)
        for (ar_activation act = 0; act < AR_ACTIVATIONS && pair_goes_on(p); act++)
            gated_forward_case(p, (const size_t[]){1 + (i + (size_t)act) % 12, cols}, (ar_activation)act,
                               (place)pair_below(p, 3));
}

void gated_backward_cases(device_pair *p)
{
    size_t cols;
    for (size_t i = 0; (cols = pair_size(p, i)) != SIZE_MAX; i++)
        for (ar_activation act = 0; act < AR_ACTIVATIONS && pair_goes_on(p); act++)
            gated_backward_case(p, (const size_t[]){1 + (i + (size_t)act) % 12, cols}, (ar_activation)act,
                                pair_below(p, 6));
}

static void dropout_case(device_pair *p, int ndim, const size_t *shape, uint64_t first, uint32_t threshold)
{
    ar_dropout w = {.key = pair_random(p),
                    .step = (uint32_t)pair_random(p),
                    .threshold = threshold,
                    .scale = pair_value(p, PAIR_ORDINARY),
                    .first = first};
    for (int d = 0; d < ndim; d++)
        w.stride[d] = d == ndim - 1 ? 1 : pair_random(p) >> (pair_below(p, 2) ? 54 : 20);
    const bool in_place = pair_below(p, 3) == 0, added = pair_below(p, 2), alone = added && pair_below(p, 2);
    PAIR_CASE(p, "%d dimensions, the last %zu, first %llu, threshold 0x%08x%s%s", ndim, shape[ndim - 1],
              (unsigned long long)first, threshold, in_place ? ", in place" : "",
              alone   ? ", added alone"
              : added ? ", added"
                      : "");
    const pair_tensor x = pair_stored(p, pair_input(p, "x", ndim, shape, PAIR_ROW_MAJOR, PAIR_EACH_ROW));
    const pair_tensor residual = pair_stored(p, pair_input(p, "residual", ndim, shape, PAIR_ROW_MAJOR, PAIR_EACH_ROW));
    const pair_tensor own = pair_stored(p, pair_output(p, "sum", ndim, shape, PAIR_ROW_MAJOR)),
                      sum = in_place ? residual : own;
    const pair_tensor apart = pair_stored(p, pair_output(p, "y", ndim, shape, PAIR_ROW_MAJOR)),
                      y = in_place ? x : apart;
    PAIR_RUN(p, dropout, alone ? NULL : &y.at[s], added ? &sum.at[s] : NULL, &x.at[s], added ? &residual.at[s] : NULL,
             &w);
}

void dropout_cases(device_pair *p)
{
    static const uint64_t firsts[] = {0, 1, 2, 3, ((uint64_t)1 << 34) - 40, ((uint64_t)1 << 63) + 1, UINT64_MAX - 257};
    static const uint32_t thresholds[] = {0x60000000u, 0, UINT32_MAX, 0x80000000u, 1};
    static const size_t shapes[][4] = {{1, 1, 1, 1}, {3, 5, 4, 37}, {2, 1, 3, 64}, {2, 2, 2, 9}, {1, 4, 7, 257}};
    size_t turn = 0;
    for (size_t f = 0; f < sizeof firsts / sizeof *firsts; f++)
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
            for (int ndim = 1; ndim <= (f == 6 ? 1 : 4) && pair_goes_on(p); ndim++) /* a number fits 64 bits */
                dropout_case(p, ndim, shapes[i] + 4 - ndim, firsts[f], thresholds[turn++ % 5]);
    dropout_case(p, 2, (const size_t[]){0, 4}, 0, 1);
    for (int i = 0; i < 20 && pair_goes_on(p); i++)
        dropout_case(p, 1, (const size_t[]){1 + pair_below(p, 2000)}, pair_random(p), 0x40000000u);
}

static void sum_squares_case(device_pair *p, size_t n, pair_values v)
{
    PAIR_CASE(p, "n %zu, %s values", n, pair_values_name(v));
    const pair_buf g = pair_floats(p, "g", n, v), e = pair_zeros(p, "e", PAIR_W32, 1);
    const pair_buf sums = pair_integers(p, "sums", PAIR_W64, 2, -1000, 2000);
    const pair_tensor from = pair_stored(p, pair_view(g, 1, &n));
    int32_t top = ARI_EXP_ZERO;
    for (size_t i = 0; i < n && g.host; i++) {
        const int32_t one = ari_exponent32(((float *)g.host)[i]);
        top = one > top ? one : top;
    }
    if (e.host) /* other ranks' gradients may be larger */
        *(int32_t *)e.host = top < 100 && top > ARI_EXP_ZERO ? top + (int32_t)pair_below(p, 20) : top;
    PAIR_RUN(p, sum_squares, sums.at[s], &from.at[s], ar_const(e.at[s]));
}

PAIR_CASES(sum_squares, sizes_and_values)

void round_bits_cases(device_pair *p)
{
    static const size_t shapes[][4] = {{2, 3, 5, 33}, {1, 1, 1, 1}, {1, 2, 0, 7}, {3, 1, 4, 64}};
    for (int bits = 2; bits < 24; bits++)
        for (int from = 0; from < PAIR_LAYOUTS && pair_goes_on(p); from++) {
            const size_t *shape = shapes[(size_t)(bits + from) % 4];
            const int ndim = 1 + (bits + from) % 4;
            const pair_layout to = (pair_layout)pair_below(p, PAIR_LAYOUTS);
            const bool in_place = pair_below(p, 3) == 0;
            PAIR_CASE(p, "%d bits, %d dimensions, %s from %s%s", bits, ndim, pair_layout_name(to),
                      pair_layout_name((pair_layout)from), in_place ? ", in place" : "");
            const pair_tensor x =
                pair_input(p, "x", ndim, shape + 4 - ndim, (pair_layout)from, bits % 2 ? PAIR_EACH_ROW : PAIR_ANY);
            const pair_tensor y = pair_output(p, "y", ndim, shape + 4 - ndim, to);
            PAIR_RUN(p, round_bits, in_place ? &x.at[s] : &y.at[s], &x.at[s], bits);
        }
}
