/* SPDX-License-Identifier: Apache-2.0 */
/* Exponentials and quotients of rows in vectors of fp32 numbers. One file per vector width includes this file and
 * acts.h after defining:
 *
 *  LANES                number of lanes in a vector
 *  ROOTS(of, t)         for each lane, the entry of a table of 16 numbers selected by the four lowest bits of t
 *  FMA(a, b, c)         a*b + c, rounded once
 *  MASK                 a truth value for each lane; if not defined: a vector of all ones or zeros
 *  LESS, SAME(a, b)     comparisons of fp32 numbers; UNDER(a, b): of unsigned numbers
 *  PICK(mask, a, b)     lanes of a where the mask is true, otherwise of b
 *  SIGNS(mask)          one bit per lane
 *  TARGET               the attribute with which the compiler uses these instructions
 *  CURVES(x, slopes, sure)  GELU (erf) or its slope, and the lanes in which it is certain; if not defined: the
 * definition */

#include "ref/cpu/row_sum.h"

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t words __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));

#define ALL(number) ((vec){0} + (number))
#if !defined(MASK)
#define MASK words
#define LESS(a, b) ((a) < (b))
#define SAME(a, b) ((a) == (b))
#define UNDER(a, b) ((a) < (b))
#define PICK(mask, a, b) (vec)(((mask) & (words)(a)) | (~(mask) & (words)(b)))
#endif

#define INLINE TARGET static inline __attribute__((always_inline))

/* 2^(j/16) rounded to fp32, and the logarithm of 2^(j/16) divided by that, less the bound of the error. */
static const _Alignas(64) float roots[16] = {0x1p+0f,        0x1.0b5586p+0f, 0x1.172b84p+0f, 0x1.2387a6p+0f,
                                             0x1.306fep+0f,  0x1.3dea64p+0f, 0x1.4bfdaep+0f, 0x1.5ab07ep+0f,
                                             0x1.6a09e6p+0f, 0x1.7a1148p+0f, 0x1.8ace54p+0f, 0x1.9c4918p+0f,
                                             0x1.ae89fap+0f, 0x1.c199bep+0f, 0x1.d5818ep+0f, 0x1.ea4afap+0f};
static const _Alignas(64) float lost[16] = {-0x1p-33f,        0x1.8c96d4p-25f,  -0x1.a00c22p-27f, 0x1.954902p-25f,
                                            0x1.115002p-25f,  0x1.360be4p-25f,  -0x1.0b3552p-25f, -0x1.04d8acp-27f,
                                            0x1.24055cp-26f,  -0x1.06cb44p-25f, 0x1.5fa1cap-28f,  0x1.9bb5e4p-28f,
                                            -0x1.fdc306p-27f, -0x1.7161b4p-28f, -0x1.ad217cp-28f, 0x1.59428ep-28f};

/* Sum of two fp32 numbers, of which low is small. */
typedef struct pair {
    vec high, low;
} pair;

/* Returns e^-d for a pair d >= 0 without its power of two, which is added to its bits afterwards. With -d = k*ln(2)/16
 * + r_high + rest, where `r_high` is exact and less than 2^-5.5 in magnitude, the result is 2^(k/16) * (1 + r_high +
 * p). p is at most 2^-12, and fp32 keeps its bits above 2^-35, so the result is correct within 2^-33 times the root,
 * which the table's logarithms subtract. */
INLINE pair powers(pair d, bits *power)
{
    const vec magic = ALL(0x1.8p23f), t = FMA(d.high, ALL(-0x1.715476p+4f), magic), k = t - magic;
    const vec r_high = FMA(k, ALL(-0x1.62e430p-5f), -d.high);
    const vec rest = FMA(k, ALL(0x1.05c610p-33f), ROOTS(lost, t)) - d.low, r = r_high + rest;
    const vec q = FMA(FMA(r_high, ALL(0x1.55576cp-5f), ALL(0x1.55572p-3f)), r, ALL(0.5f));
    const vec p = FMA(r * r, q, rest), root = ROOTS(roots, t), sum = FMA(root, r_high, root);
    *power = ((bits)t & ~15u) * (1u << 19); /* wraps if the result is replaced later */
    return (pair){sum, FMA(root, p, FMA(root, r_high, root - sum))};
}

/* Computes e^-d and the lanes in which it is certain to have ari_exp32's bits: those in which the largest error does
 * not change the rounding. tests/extended/rows_sweep.c compares all inputs. */
INLINE vec exps(vec d, MASK *sure)
{
    bits power;
    const pair e = powers((pair){d, ALL(0.0f)}, &power);
    const vec below = e.high + e.low, above = e.high + (e.low + 0x1.8p-32f);
    /* from 104 on the result rounds to 0; subnormal numbers lie between. A softmax has neither negative d nor NaN */
    const MASK is_zero = LESS(ALL(104.0f), d), normal = UNDER((bits)d, (bits){0} + 0x42ae0000u); /* 87 */
    *sure = is_zero | (normal & SAME(below, above));
    return PICK(is_zero, ALL(0.0f), (vec)((bits)below + power));
}

/* Computes x/l, with high + low + high*2^-45 within 2^-49 of 1/l: within 2^-46.4 of found + rest + found*2^-45 if no
 * product is subnormal, from `threshold` on. A lane is certain if moving the result down and up by 2^-45 does not
 * change its rounding. -0 is uncertain, because its sign is lost. */
INLINE vec quotients(vec x, double l, MASK *sure)
{
    const double inverse = 1.0 / l, threshold = 0x1p-90 * l;
    const float high = (float)inverse, low = (float)(inverse * (1.0 - 0x1p-45) - (double)high);
    const vec found = x * high, rest = FMA(x, ALL(low), FMA(x, ALL(high), -found));
    const vec below = found + rest, above = found + FMA(found, ALL(0x1p-44f), rest);
    const bits turned = (bits)x << 1 | (bits)x >> 31; /* the sign comes last, so that only 0 is 0 */
    *sure = SAME(below, above) & ~UNDER(turned - 1, (bits){0} + (2 * ari_bits32((float)threshold) + 1));
    return below;
}

/* Computes a vector of a row. Returns one bit for each uncertain lane, which holds x until the definition replaces
 * it. */
INLINE uint32_t map_vector(float *y, const float *x, double operand, bool exp)
{
    vec input;
    MASK sure;
    memcpy(&input, x, sizeof input);
    const vec found = exp ? exps((float)operand - input, &sure) : quotients(input, operand, &sure);
    const vec blended = PICK(sure, found, input);
    memcpy(y, &blended, sizeof blended);
    return SIGNS(~sure);
}

INLINE void put_row(float *y, const float *x, double operand, size_t n, bool exp)
{
    /* not on the stack: if AddressSanitizer watches stack frames after the return, gcc does not align them to 64 bytes
     * (its bug 110027) */
    static _Thread_local float tail[LANES];
    enum { RUN = 1024 };
    for (size_t begin = 0; begin < n; begin += RUN) {
        const size_t end = n - begin < RUN ? n : begin + RUN;
        uint32_t signs[RUN / LANES + 1];
        size_t vector_starts[RUN / LANES + 1], unsure = 0, j = begin; /* the vectors with uncertain lanes */
        for (; j + LANES <= end; j += LANES) {
            const uint32_t found = map_vector(y + j, x + j, operand, exp);
            vector_starts[unsure] = j;
            signs[unsure] = found;
            unsure += found != 0;
        }
        if (j < end) {
            memset(tail, 0, sizeof tail);
            memcpy(tail, x + j, (end - j) * sizeof *x);
            vector_starts[unsure] = j;
            signs[unsure++] = map_vector(tail, tail, operand, exp) & ((1u << (end - j)) - 1u);
            memcpy(y + j, tail, (end - j) * sizeof *y);
        }
        for (size_t i = 0; i < unsure; i++)
            for (uint32_t rest = signs[i]; rest != 0; rest &= rest - 1) {
                float *element = y + vector_starts[i] + __builtin_ctz(rest);
                *element = exp ? ari_softmax_exp(*element, (float)operand) : ari_softmax_p(*element, operand);
            }
    }
}

TARGET static void exp_row(float *e, const float *x, float m, size_t n)
{
    put_row(e, x, (double)m, n, true);
}

TARGET static void quotient_row(float *y, const float *x, double l, size_t n)
{
    put_row(y, x, l, n, false);
}
