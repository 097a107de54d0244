/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of exponentials in vectors of fp32 numbers. exponentials.c includes this file once for each width and says with
 * what, which is undefined again at the end:
 *
 *   LANES                of a vector
 *   ROOTS(of, t)         each lane's entry of a table of 16 numbers, by the four lowest bits of t
 *   FMA(a, b, c)         a*b + c, rounded once
 *   SIGNS(v)             the signs of v's lanes, one bit each
 *   TARGET               the attribute that has the compiler use such instructions
 *   EXPS                 the function's name */

#define OF_WIDTH_(name, lanes) name##lanes
#define OF_WIDTH(name, lanes) OF_WIDTH_(name, lanes)
#define vec OF_WIDTH(vec, LANES)
#define words OF_WIDTH(words, LANES)
#define bits OF_WIDTH(bits, LANES)
#define exps OF_WIDTH(exps, LANES)
#define put_exps OF_WIDTH(put_exps, LANES)

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t words __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));

/* e^x in pairs of fp32 numbers, and in which lanes these are not sure to be ari_exp32's bits: negative. With x =
 * k*ln(2)/16 + most + rest, `most` exact and its magnitude below 2^-5.5, e^x = 2^(k/16) * (1 + most + p), and of p, at
 * most 2^-12, fp32 keeps what lies above 2^-35: the pair is right within 2^-33 times the root, which the table's
 * logarithms take off. Where it rounds alike above, nothing between does otherwise: tests/extended/rows_sweep.c compares
 * all inputs. */
TARGET static inline __attribute__((always_inline)) vec exps(vec x, words *unsure)
{
#define ALL(number) ((vec){0} + (number))
    const vec magic = ALL(0x1.8p23f), t = FMA(x, ALL(0x1.715476p+4f), magic), k = t - magic;
    const vec most = FMA(k, ALL(-0x1.62e430p-5f), x);
    const vec rest = FMA(k, ALL(0x1.05c610p-33f), ROOTS(lost, t)), r = most + rest;
    const vec q = FMA(FMA(r, ALL(0x1.55576cp-5f), ALL(0x1.55572p-3f)), r, ALL(0.5f));
    const vec p = FMA(r * r, q, rest), root = ROOTS(roots, t), sum = FMA(root, most, root);
    const vec tail = FMA(root, p, FMA(root, most, root - sum));
    const vec below = sum + tail, above = sum + (tail + 0x1.8p-32f);
    /* Below -104 it rounds to 0; between are subnormal numbers, and whatever is no number at all. */
    const words none = x < -104.0f, normal = (x > -87.0f) & (x < 87.0f);
    const bits power = ((bits)t & ~15u) * (1u << 19); /* wraps where the result is replaced */
    *unsure = ~(none | (normal & (below == above)));
    return (vec)(((bits)below + power) & ~(bits)none);
#undef ALL
}

/* A vector of a row, and the signs of the unsure lanes, which hold x until the definition has replaced it. */
TARGET static inline __attribute__((always_inline)) uint32_t put_exps(float *e, const float *x, float m)
{
    vec given;
    words unsure;
    memcpy(&given, x, sizeof given);
    const vec found = exps(given - m, &unsure);
    const words kept = ((words)given & unsure) | ((words)found & ~unsure);
    memcpy(e, &kept, sizeof kept);
    return SIGNS(unsure);
}

TARGET static void EXPS(float *e, const float *x, float m, size_t n)
{
    enum { RUN = 1024 };
    for (size_t from = 0; from < n; from += RUN) {
        const size_t end = n - from < RUN ? n : from + RUN;
        uint32_t signs[RUN / LANES + 1];
        size_t at[RUN / LANES + 1], unsure = 0, j = from; /* the vectors with such lanes */
        for (; j + LANES <= end; j += LANES) {
            const uint32_t found = put_exps(e + j, x + j, m);
            at[unsure] = j;
            signs[unsure] = found;
            unsure += found != 0;
        }
        if (j < end) {
            float last[LANES] = {0.0f};
            memcpy(last, x + j, (end - j) * sizeof *x);
            at[unsure] = j;
            signs[unsure++] = put_exps(last, last, m) & ((1u << (end - j)) - 1u);
            memcpy(e + j, last, (end - j) * sizeof *e);
        }
        for (size_t i = 0; i < unsure; i++)
            for (uint32_t rest = signs[i]; rest != 0; rest &= rest - 1) {
                float *one = e + at[i] + __builtin_ctz(rest);
                *one = ari_softmax_exp(*one, m);
            }
    }
}

#undef vec
#undef words
#undef bits
#undef exps
#undef put_exps
#undef LANES
#undef ROOTS
#undef FMA
#undef SIGNS
#undef TARGET
#undef EXPS
