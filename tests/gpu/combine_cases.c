/* SPDX-License-Identifier: Apache-2.0 */
/* Sums over ranks: every type and operation. */
#include <string.h>

#include "gpu/conformance.h"

#define MOST 130 /* inputs */
#define APART 9  /* of them in buffers of their own; the others are the same again */

static pair_kind kind_of(ar_dtype t, ar_op op)
{
    const bool payload = op == AR_SUM; /* of a NaN: not defined */
    switch (t) {
    case AR_F32:
        return payload ? PAIR_F32_NAN : PAIR_W32;
    case AR_F64:
        return payload ? PAIR_F64_NAN : PAIR_W64;
    case AR_BF16:
        return payload ? PAIR_BF16_NAN : PAIR_W16;
    case AR_F16:
        return payload ? PAIR_F16_NAN : PAIR_W16;
    case AR_I64:
        return PAIR_W64;
    case AR_U8:
        return PAIR_W8;
    default:
        return PAIR_W32;
    }
}

/* Bits of numbers that lie in the middle of the type's range, so that sums of them round, or any bits. */
static uint64_t element(device_pair *p, ar_dtype t, bool any)
{
    const uint64_t r = pair_random(p);
    if (any)
        return r;
    switch (t) {
    case AR_F64:
        return (r & 0x800fffffffffffffu) | (1020 + (r >> 53) % 8) << 52;
    case AR_F32:
        return (r & 0x807fffffu) | (124 + (r >> 53) % 8) << 23;
    case AR_BF16:
        return (r & 0x807fu) | (124 + (r >> 53) % 8) << 7;
    case AR_F16:
        return (r & 0x83ffu) | (12 + (r >> 53) % 8) << 10;
    default:
        return r;
    }
}

static pair_buf elements(device_pair *p, ar_dtype t, pair_kind kind, size_t count, bool any)
{
    const pair_buf b = pair_zeros(p, "in", kind, count);
    for (size_t i = 0; i < count && b.host; i++) {
        const uint64_t bits = element(p, t, any);
        memcpy((char *)b.host + i * ar_dtype_bytes(t), &bits, ar_dtype_bytes(t));
    }
    return b;
}

/* into: the input that is the output too; -1: none. */
static void combine_case(device_pair *p, ar_dtype t, ar_op op, int n, size_t count, bool any, int into)
{
    static const char *const ops[] = {"sum", "max", "min", "prod", "avg"};
    pair_begin(p, "%s %s of %d inputs, count %zu%s, in place of %d", ar_dtype_name(t), ops[op], n, count,
               any ? ", any bits" : "", into);
    const pair_kind kind = kind_of(t, op);
    const pair_buf y = pair_words(p, "out", kind, count);
    pair_buf in[APART];
    for (int i = 0; i < n && i < APART; i++)
        in[i] = elements(p, t, kind, count, any);
    ar_cbuf at[2][MOST];
    for (int s = 0; s < 2; s++)
        for (int i = 0; i < n; i++)
            at[s][i] = ar_const(in[i % APART].at[s]);
    PAIR_RUN(p, combine, into < 0 ? y.at[s] : in[into % APART].at[s], at[s], n, count, t, op);
    pair_end(p);
}

void combine_cases(device_pair *p)
{
    static const ar_dtype types[] = {AR_F32, AR_F64, AR_BF16, AR_F16, AR_I64, AR_I32, AR_U8};
    static const int numbers[] = {1, 2, 3, 4, 5, 8, APART, 64, 65, MOST};
    size_t turn = 0;
    for (size_t t = 0; t < sizeof types / sizeof *types; t++)
        for (int op = AR_SUM; op <= AR_MIN; op++)
            for (size_t k = 0; k < sizeof numbers / sizeof *numbers; k++)
                for (int any = 0; any < 2 && pair_goes_on(p); any++) {
                    const int n = numbers[k];
                    const size_t size = pair_size(p, turn++ % 10);
                    combine_case(p, types[t], (ar_op)op, n, size, any, (int)(turn % (size_t)(n + 1)) - 1);
                }
}
