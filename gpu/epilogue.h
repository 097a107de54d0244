/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_GPU_EPILOGUE_H
#define ARI_GPU_EPILOGUE_H

/* What the slots of the exact contraction do with an element's sum, whichever kernel made it. Each is given the sum of
 * column `col` in row `row` of matrix `matrix` of the result, once. */
#include "gpu/packed.h"

namespace ARI_GPU
{

/* Of a result [.., m, n]. */
struct result {
    size_t m, n;
};

/* Integers out. */
struct integers_out {
    int64_t *s; /* [.., m, n, limbs] */
    size_t limbs;
    bool add;

    ARI_KERNEL void operator()(const result &x, size_t matrix, size_t row, size_t col, const wide_sum &sum) const
    {
        int64_t *to = s + ((matrix * x.m + row) * x.n + col) * limbs;
        if (limbs == 1) {
            const int64_t one = ari_add64(static_cast<int64_t>(static_cast<uint64_t>(sum.high) << 32), sum.low);
            *to = add ? ari_add64(*to, one) : one;
            return;
        }
        to[0] = add ? ari_add64(to[0], sum.high) : sum.high;
        to[1] = add ? ari_add64(to[1], sum.low) : sum.low;
    }
};

/* Rounded values out, with bias and activation where FINISH. */
template <bool FINISH> struct values_out {
    view<float> y, z;     /* z: where act is not AR_ACT_NONE */
    const int32_t *e, *f; /* [.., m], [.., n] */
    const float *bias;    /* [n]; NULL: none */
    ar_activation act;

    ARI_KERNEL void operator()(const result &x, size_t matrix, size_t row, size_t col, const wide_sum &sum) const
    {
        const float value = ari_contract_value2(sum.high, sum.low, e[matrix * x.m + row], f[matrix * x.n + col]);
        const float biased = FINISH && bias ? ari_add32(value, bias[col]) : value;
        const size_t line = matrix * x.m + row;
        y.row(line)[static_cast<ptrdiff_t>(col) * y.stride[3]] = biased;
        if (FINISH && act != AR_ACT_NONE)
            z.row(line)[static_cast<ptrdiff_t>(col) * z.stride[3]] = ari_act32(act, biased);
    }
};

/* Rounded values into an accumulator of one matrix, to which every matrix of the batch adds. */
struct accumulator_state {
    uint8_t top;
    int64_t high, low;
};
struct accumulator_out {
    uint8_t *tops; /* [m, n], and the two others */
    int64_t *highs, *lows;
    const int32_t *of_row, *of_col; /* exponents, [.., m] and [.., n] */

    ARI_KERNEL accumulator_state load(const result &x, size_t row, size_t col) const
    {
        const size_t at = row * x.n + col;
        return {tops[at], highs[at], lows[at]};
    }
    ARI_KERNEL void add(accumulator_state *to, const result &x, size_t matrix, size_t row, size_t col,
                        const wide_sum &sum) const
    {
        ari_acc_add(&to->top, &to->high, &to->low,
                    ari_contract_value2(sum.high, sum.low, of_row[matrix * x.m + row], of_col[matrix * x.n + col]));
    }
    ARI_KERNEL void store(const result &x, size_t row, size_t col, const accumulator_state &state) const
    {
        const size_t at = row * x.n + col;
        tops[at] = state.top;
        highs[at] = state.high;
        lows[at] = state.low;
    }
};

} // namespace ARI_GPU

#endif
