/* SPDX-License-Identifier: Apache-2.0 */

#include "anyrank/activation.h"
#include "anyrank/block.h"
#include "ref/numerics/activation.h"
/* Rows of activations and of their backward passes in vectors of fp32 numbers: after exps.h, of the same width. */

/* --- x*sigmoid(w) of some w of x, and its slope, sigmoid(w)*(1 + x*w'*sigmoid(-w)) -------------------------------- */

INLINE pair times(pair a, pair b)
{
    const vec high = a.high * b.high;
    return (pair){high, FMA(a.low, b.high, FMA(a.high, b.low, FMA(a.high, b.high, -high)))};
}

INLINE pair scaled(vec a, pair b)
{
    const vec high = a * b.high;
    return (pair){high, FMA(a, b.low, FMA(a, b.high, -high))};
}

INLINE pair constant(double a)
{
    const float high = (float)a;
    return (pair){ALL(high), ALL((float)(a - (double)high))};
}

/* a + b, a a constant. */
INLINE pair plus(double a, pair b)
{
    const float a_high = (float)a, rest = (float)(a - (double)a_high);
    const vec high = b.high + a_high, of_b = high - a_high, low = (a_high - (high - of_b)) + (b.high - of_b) + b.low;
    return (pair){high, rest != 0.0f ? low + rest : low};
}

/* w, and x*w'. */
INLINE pair argument(vec x, ar_activation kind, pair *slope)
{
    if (kind == AR_ACT_CLAMPED)
        return *slope = scaled(x, constant(ARI_CLAMPED_SLOPE));
    if (kind == AR_ACT_SILU)
        return *slope = (pair){x, ALL(0.0f)};
    const double factor = 2.0 * ARI_SQRT_2_PI, cubic = ARI_GELU_CUBIC * factor;
    const vec square = x * x;
    const pair exact = {square, FMA(x, x, -square)};
    *slope = scaled(x, plus(factor, times(exact, constant(3.0 * cubic))));
    return scaled(x, plus(factor, times(exact, constant(cubic))));
}

/* Computes sigmoid(w) and sigmoid(-w) with relative error below 2^-34.06; |w| < 64. For SiLU w is a single number. */
INLINE pair sigmoid(pair w, ar_activation kind, pair *opposite)
{
    const MASK negative = LESS(w.high, ALL(0.0f));
    /* Restores what the logarithms subtracted, so that errors are on both sides. */
    const vec lower = ALL(-0x1p-33f), low = kind == AR_ACT_SILU ? lower : lower + PICK(negative, -w.low, w.low);
    bits power;
    const pair e = powers((pair){PICK(negative, -w.high, w.high), low}, &power);
    const vec sum = e.high + e.low, scale = (vec)(power + 0x3f800000u);
    const pair exp = {sum * scale, (e.low - (sum - e.high)) * scale};
    const vec divisor = exp.high + 1.0f, divisor_low = (exp.high - (divisor - 1.0f)) + exp.low,
              inverse = 1.0f / divisor;
    const pair larger = {inverse, FMA(-inverse, divisor_low, FMA(-inverse, divisor, ALL(1.0f))) * inverse};
    const pair rest = times(exp, larger);
    *opposite = (pair){PICK(negative, larger.high, rest.high), PICK(negative, larger.low, rest.low)};
    return (pair){PICK(negative, rest.high, larger.high), PICK(negative, rest.low, larger.low)};
}

/* Rounds x, and determines the lanes in which all numbers within `error` of x round to the same value. */
INLINE vec rounded(pair x, vec error, MASK *sure)
{
    const vec below = x.high + (x.low - error), above = x.high + (x.low + error);
    *sure = SAME(below, above);
    return below;
}

/* Activation, its slope (the compiler may drop either), and the lanes in which they are certain. */
typedef struct found {
    vec value, slope;
    MASK value_sure, slope_sure;
} found;

INLINE found by_sigmoid(vec x, ar_activation kind)
{
    found f;
    const vec clamp = ALL((float)ARI_CLAMP), limited = kind == AR_ACT_CLAMPED ? PICK(LESS(clamp, x), clamp, x) : x;
    pair argument_slope, off;
    const pair w = argument(limited, kind, &argument_slope), gate = sigmoid(w, kind, &off),
               value = scaled(limited, gate);
    const pair moved = kind == AR_ACT_SILU ? scaled(limited, off) : times(argument_slope, off);
    const pair product = times(gate, plus(1.0, moved));
    const vec size = (vec)((bits)argument_slope.high & 0x7fffffffu);
    /* products of smaller numbers are subnormal, as are exponentials of larger ones */
    const MASK fine = UNDER(((bits)x & 0x7fffffffu) - 0x30000000u, (bits){0} + 0x12800000u) &
                      UNDER((bits)w.high << 1, (bits){0} + 0x85000000u);
    f.value = rounded(value, value.high * 0x1.2p-34f, &f.value_sure);
    f.slope = rounded(product, FMA(size, gate.high, gate.high) * 0x1.2p-34f, &f.slope_sure);
    if (kind == AR_ACT_CLAMPED)
        f.slope = PICK(LESS(clamp, x), ALL(0.0f), f.slope);
    f.value_sure &= fine;
    f.slope_sure &= fine;
    return f;
}

INLINE found find(vec x, ar_activation kind)
{
#if defined(CURVES)
    if (kind == AR_ACT_GELU_ERF) {
        found f;
        f.value = CURVES(x, false, &f.value_sure);
        f.slope = CURVES(x, true, &f.slope_sure);
        return f;
    }
#endif
    return by_sigmoid(x, kind);
}

INLINE vec load(const float *x)
{
    vec v;
    memcpy(&v, x, sizeof v);
    return v;
}

/* Uncertain lanes are left unchanged, since they may be inputs that the definition needs. */
INLINE void store(float *y, vec v, MASK sure)
{
    const MASK unsure = (MASK)~sure;
    const vec blended = SIGNS(unsure) == 0 ? v : PICK(sure, v, load(y));
    memcpy(y, &blended, sizeof blended);
}

INLINE vec product(vec a, vec b)
{
    const vec y = a * b;
    return PICK(SAME(y, y), y, ALL(ari_nan32()));
}

/* Returns one bit for each uncertain lane. */
INLINE uint32_t act(const ari_act_row *r, size_t j, ar_activation kind, bool backward, bool gated)
{
    const found f = find(load(r->x + j), kind);
    const vec clamp = ALL((float)ARI_CLAMP), zeros = ALL(0.0f);
    vec up = gated ? load(r->up + j) : zeros;
    MASK moves = SAME(zeros, zeros);
    if (gated && kind == AR_ACT_CLAMPED) {
        const MASK above = LESS(clamp, up), below = LESS(up, -clamp);
        moves = ~(above | below);
        up = PICK(above, clamp, PICK(below, -clamp, up)) + 1.0f;
    }
    if (!backward) {
        store(r->y + j, gated ? product(f.value, up) : f.value, f.value_sure);
        return SIGNS(~f.value_sure);
    }
    const vec dy = load(r->dy + j);
    const MASK sure = gated ? f.value_sure & f.slope_sure : f.slope_sure;
    const vec by_up = gated ? product(dy, f.value) : zeros;
    store(r->y + j, product(gated ? dy * up : dy, f.slope), sure);
    if (gated)
        store(r->dup + j, kind == AR_ACT_CLAMPED ? PICK(moves, by_up, zeros) : by_up, sure);
    return SIGNS(~sure);
}

INLINE size_t act_row(const ari_act_row *r, size_t begin, size_t end, ar_activation kind, bool backward, bool gated,
                      uint32_t *indices)
{
    const ari_act_row row = *r; /* a copy that no store can change */
    size_t unsure = 0;
    for (size_t j = begin; j < end; j += LANES)
        for (uint32_t rest = act(&row, j, kind, backward, gated); rest != 0; rest &= rest - 1)
            indices[unsure++] = (uint32_t)j + (uint32_t)__builtin_ctz(rest);
    return unsure;
}

/* One loop for each case, so that unused results are not computed. */
#define EACH_PASS(kind)                                                     \
    (!r->dy && !r->up ? act_row(r, begin, end, kind, false, false, indices) \
     : !r->dy         ? act_row(r, begin, end, kind, false, true, indices)  \
     : !r->up         ? act_row(r, begin, end, kind, true, false, indices)  \
                      : act_row(r, begin, end, kind, true, true, indices))
TARGET static size_t act_rows(const ari_act_row *r, size_t begin, size_t end, ar_activation kind, uint32_t *indices)
{
#if defined(CURVES)
    if (kind == AR_ACT_GELU_ERF)
        return EACH_PASS(AR_ACT_GELU_ERF);
#endif
    return kind == AR_ACT_SILU      ? EACH_PASS(AR_ACT_SILU)
           : kind == AR_ACT_CLAMPED ? EACH_PASS(AR_ACT_CLAMPED)
                                    : EACH_PASS(AR_ACT_GELU_TANH);
}
#undef EACH_PASS
