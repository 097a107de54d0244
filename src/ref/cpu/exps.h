/* SPDX-License-Identifier: Apache-2.0 */
/* Exponentials and quotients of rows in vectors of fp32 numbers. exponentials.c includes this file once for each width
 * and says with what, which is undefined again at the end:
 *
 *   LANES                of a vector
 *   ROOTS(of, t)         each lane's entry of a table of 16 numbers, by the four lowest bits of t
 *   FMA(a, b, c)         a*b + c, rounded once
 *   MASK                 a truth value for each lane; not defined: a vector of all ones or zeros
 *   LESS, SAME(a, b)     of fp32 numbers; UNDER(a, b): of unsigned ones
 *   PICK(mask, a, b)     a's lanes where that is true, else b's
 *   SIGNS(mask)          one bit a lane
 *   TARGET               the attribute that has the compiler use such instructions
 *   EXPS, QUOTIENTS      the functions' names */

#define OF_WIDTH_(name, lanes) name##lanes
#define OF_WIDTH(name, lanes) OF_WIDTH_(name, lanes)
#define vec OF_WIDTH(vec, LANES)
#define words OF_WIDTH(words, LANES)
#define bits OF_WIDTH(bits, LANES)
#define exps OF_WIDTH(exps, LANES)
#define quotients OF_WIDTH(quotients, LANES)
#define put OF_WIDTH(put, LANES)
#define put_row OF_WIDTH(put_row, LANES)

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

/* e^-d in pairs of fp32 numbers, and in which lanes these are sure to be ari_exp32's bits. With -d = k*ln(2)/16 + most +
 * rest, `most` exact and its magnitude below 2^-5.5, e^-d = 2^(k/16) * (1 + most + p), and of p, at most 2^-12, fp32
 * keeps what lies above 2^-35: the pair is right within 2^-33 times the root, which the table's logarithms take off.
 * Where it rounds alike above, nothing between does otherwise: tests/extended/rows_sweep.c compares all inputs. */
TARGET static inline __attribute__((always_inline)) vec exps(vec d, MASK *sure)
{
    const vec magic = ALL(0x1.8p23f), t = FMA(d, ALL(-0x1.715476p+4f), magic), k = t - magic;
    const vec most = FMA(k, ALL(-0x1.62e430p-5f), -d);
    const vec rest = FMA(k, ALL(0x1.05c610p-33f), ROOTS(lost, t)), r = most + rest;
    const vec q = FMA(FMA(most, ALL(0x1.55576cp-5f), ALL(0x1.55572p-3f)), r, ALL(0.5f));
    const vec p = FMA(r * r, q, rest), root = ROOTS(roots, t), sum = FMA(root, most, root);
    const vec tail = FMA(root, p, FMA(root, most, root - sum));
    const vec below = sum + tail, above = sum + (tail + 0x1.8p-32f);
    /* From 104 on it rounds to 0; between are subnormal numbers. A softmax has no negative d, nor NaN. */
    const MASK none = LESS(ALL(104.0f), d), normal = UNDER((bits)d, (bits){0} + 0x42ae0000u); /* 87 */
    const bits power = ((bits)t & ~15u) * (1u << 19); /* wraps where the result is replaced */
    *sure = none | (normal & SAME(below, above));
    return PICK(none, ALL(0.0f), (vec)((bits)below + power));
}

/* x/l, with high + low + high*2^-45 within 2^-49 of 1/l: within 2^-46.4 of found + rest + found*2^-45 where no product is
 * subnormal, from `least` on. Moved down and up by 2^-45 it rounds alike, or is unsure; so is -0, whose sign is lost. */
TARGET static inline __attribute__((always_inline)) vec quotients(vec x, double l, MASK *sure)
{
    const double inverse = 1.0 / l, least = 0x1p-90 * l;
    const float high = (float)inverse, low = (float)(inverse * (1.0 - 0x1p-45) - (double)high);
    const vec found = x * high, rest = FMA(x, ALL(low), FMA(x, ALL(high), -found));
    const vec below = found + rest, above = found + FMA(found, ALL(0x1p-44f), rest);
    const bits turned = (bits)x << 1 | (bits)x >> 31; /* the sign last: only 0 is 0 */
    *sure = SAME(below, above) & ~UNDER(turned - 1, (bits){0} + (2 * ari_bits32((float)least) + 1));
    return below;
}

/* A vector of a row, and one bit for each unsure lane, which holds x until the definition has replaced it. */
TARGET static inline __attribute__((always_inline)) uint32_t put(float *y, const float *x, double by, bool exp)
{
    vec given;
    MASK sure;
    memcpy(&given, x, sizeof given);
    const vec found = exp ? exps((float)by - given, &sure) : quotients(given, by, &sure);
    const vec kept = PICK(sure, found, given);
    memcpy(y, &kept, sizeof kept);
    return SIGNS(~sure);
}

TARGET static inline __attribute__((always_inline)) void put_row(float *y, const float *x, double by, size_t n,
                                                                 bool exp)
{
    /* Not on the stack: frames that gcc has AddressSanitizer watch after a return are not aligned for 64 bytes (its bug
     * 110027). */
    static _Thread_local float last[LANES];
    enum { RUN = 1024 };
    for (size_t from = 0; from < n; from += RUN) {
        const size_t end = n - from < RUN ? n : from + RUN;
        uint32_t signs[RUN / LANES + 1];
        size_t at[RUN / LANES + 1], unsure = 0, j = from; /* the vectors with such lanes */
        for (; j + LANES <= end; j += LANES) {
            const uint32_t found = put(y + j, x + j, by, exp);
            at[unsure] = j;
            signs[unsure] = found;
            unsure += found != 0;
        }
        if (j < end) {
            memset(last, 0, sizeof last);
            memcpy(last, x + j, (end - j) * sizeof *x);
            at[unsure] = j;
            signs[unsure++] = put(last, last, by, exp) & ((1u << (end - j)) - 1u);
            memcpy(y + j, last, (end - j) * sizeof *y);
        }
        for (size_t i = 0; i < unsure; i++)
            for (uint32_t rest = signs[i]; rest != 0; rest &= rest - 1) {
                float *one = y + at[i] + __builtin_ctz(rest);
                *one = exp ? ari_softmax_exp(*one, (float)by) : ari_softmax_p(*one, by);
            }
    }
}

TARGET static void EXPS(float *e, const float *x, float m, size_t n)
{
    put_row(e, x, (double)m, n, true);
}

TARGET static void QUOTIENTS(float *y, const float *x, double l, size_t n)
{
    put_row(y, x, l, n, false);
}

#undef ALL
#undef vec
#undef words
#undef bits
#undef exps
#undef quotients
#undef put
#undef put_row
#undef LANES
#undef ROOTS
#undef FMA
#undef MASK
#undef LESS
#undef SAME
#undef UNDER
#undef PICK
#undef SIGNS
#undef TARGET
#undef EXPS
#undef QUOTIENTS
