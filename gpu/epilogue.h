/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Epilogues of the slots of the exact contraction, shared by all kernels that compute the sums. Each one gets the sum
 * of column `col` in row `row` of result matrix `matrix` once, or the sums of up to four columns of a row that it has
 * prepared. */
#include "gpu/packed.h"
#include "ref/numerics/activation.h"

namespace ARI_GPU
{

/* A result [.., m, n]. */
struct result {
    size_t m, n;
};

/* Output of integers. */
struct integers_out {
    int64_t *s; /* [.., m, n, limbs] */
    size_t limbs;
    bool add;

    ARI_ON_GPU int64_t *line(const result &x, size_t matrix, size_t row) const
    {
        return s + (matrix * x.m + row) * x.n * limbs;
    }
    ARI_ON_GPU static int64_t join_limbs(const wide_sum &sum)
    {
        return ari_add64(static_cast<int64_t>(static_cast<uint64_t>(sum.high) << 32), sum.low);
    }
    ARI_ON_GPU void write_sum(int64_t *line, size_t col, const wide_sum &sum) const
    {
        int64_t *dst = line + col * limbs;
        if (limbs == 1) {
            *dst = add ? ari_add64(*dst, join_limbs(sum)) : join_limbs(sum);
            return;
        }
        dst[0] = add ? ari_add64(dst[0], sum.high) : sum.high;
        dst[1] = add ? ari_add64(dst[1], sum.low) : sum.low;
    }
    ARI_ON_GPU void operator()(const result &x, size_t matrix, size_t row, size_t col, const wide_sum &sum) const
    {
        write_sum(line(x, matrix, row), col, sum);
    }
    ARI_ON_GPU void put_four(int64_t *line, size_t col, const wide_sum (&sum)[4], size_t n) const
    {
        if (limbs == 2) {
            for (size_t i = 0; i < 4; i++)
                if (i < n)
                    write_sum(line, col + i, sum[i]);
            return;
        }
        four<int64_t> total = {{0, 0, 0, 0}};
        if (add)
            total = load_four(line + col, n);
        for (size_t i = 0; i < 4; i++)
            total.lane[i] = ari_add64(total.lane[i], join_limbs(sum[i]));
        store_four(line + col, total, n);
    }
};

/* Writes rounded values, with bias and activation if FINISH is set. */
template <bool FINISH> struct values_out {
    view<float> y, z;     /* z: pre-activation, unless act is AR_ACT_NONE */
    const int32_t *e, *f; /* exponents [.., m] and [.., n] */
    const float *bias;    /* [n]; NULL: none */
    ar_activation act;

    struct line_of {
        float *y, *z;
        const int32_t *f;
        int32_t e;
    };
    ARI_ON_GPU static float *row_of(const view<float> &t, size_t matrix, size_t row)
    {
        return t.matrix(matrix) + static_cast<ptrdiff_t>(row) * t.stride[2];
    }
    ARI_ON_GPU line_of line(const result &x, size_t matrix, size_t row) const
    {
        return {row_of(y, matrix, row), FINISH && act != AR_ACT_NONE ? row_of(z, matrix, row) : nullptr,
                f + matrix * x.n, e[matrix * x.m + row]};
    }
    ARI_ON_GPU float biased(float value, float bias_value) const
    {
        return FINISH && bias ? ari_add32(value, bias_value) : value;
    }
    ARI_ON_GPU static float rounded(const wide_sum &sum, int32_t row, int32_t col)
    {
        return ari_contract_value2(sum.high, sum.low, row, col);
    }
    ARI_ON_GPU void operator()(const result &x, size_t matrix, size_t row, size_t col, const wide_sum &sum) const
    {
        const line_of l = line(x, matrix, row);
        const float value = biased(rounded(sum, l.e, l.f[col]), FINISH && bias ? bias[col] : 0.0f);
        l.y[static_cast<ptrdiff_t>(col) * y.stride[3]] = value;
        if (FINISH && act != AR_ACT_NONE)
            l.z[static_cast<ptrdiff_t>(col) * z.stride[3]] = ari_act32(act, value);
    }
    ARI_ON_GPU void put_four(const line_of &l, size_t col, const wide_sum (&sum)[4], size_t n) const
    {
        const four<int32_t> of_col = load_four(l.f + col, n);
        four<float> value = {{0.0f, 0.0f, 0.0f, 0.0f}}, biases = value;
        if (FINISH && bias)
            biases = load_four(bias + col, n);
        for (size_t i = 0; i < 4; i++)
            value.lane[i] = biased(rounded(sum[i], l.e, of_col.lane[i]), biases.lane[i]);
        store_apart(l.y, y.stride[3], col, value, n);
        if (FINISH && act != AR_ACT_NONE) {
            for (size_t i = 0; i < 4; i++)
                value.lane[i] = ari_act32(act, value.lane[i]);
            store_apart(l.z, z.stride[3], col, value, n);
        }
    }
    ARI_ON_GPU static void store_apart(float *line, ptrdiff_t stride, size_t col, const four<float> &x, size_t n)
    {
        if (stride == 1) {
            store_four(line + col, x, n);
            return;
        }
        for (size_t i = 0; i < 4; i++)
            if (i < n)
                line[static_cast<ptrdiff_t>(col + i) * stride] = x.lane[i];
    }
};

/* Adds rounded values to an accumulator of one matrix, to which every matrix of the batch contributes. */
struct accumulator_state {
    uint8_t top;
    int64_t high, low;
};
struct accumulator_out {
    uint8_t *tops; /* [m, n], as are the other two */
    int64_t *highs, *lows;
    const int32_t *of_row, *of_col; /* exponents, [.., m] and [.., n] */
    bool narrow;                    /* true if its slices are narrow */

    ARI_ON_GPU accumulator_state load(const result &x, size_t row, size_t col) const
    {
        const size_t index = row * x.n + col;
        return {tops[index], highs[index], lows[index]};
    }
    ARI_ON_GPU void add(accumulator_state *state, const result &x, size_t matrix, size_t row, size_t col,
                        const wide_sum &sum) const
    {
        ari_acc_add(&state->top, &state->high, &state->low,
                    ari_contract_value2(sum.high, sum.low, of_row[matrix * x.m + row], of_col[matrix * x.n + col]),
                    narrow);
    }
    ARI_ON_GPU void store(const result &x, size_t row, size_t col, const accumulator_state &state) const
    {
        const size_t index = row * x.n + col;
        tops[index] = state.top;
        highs[index] = state.high;
        lows[index] = state.low;
    }

    /* States of four elements. */
    struct states {
        four<uint8_t> top;
        four<int64_t> high, low;
    };
    ARI_ON_GPU states load_four_states(const result &x, size_t row, size_t col, size_t n) const
    {
        const size_t index = row * x.n + col;
        return {load_four(tops + index, n), load_four(highs + index, n), load_four(lows + index, n)};
    }
    ARI_ON_GPU void add_four(states *state, const result &x, size_t matrix, size_t row, size_t col,
                             const wide_sum (&sum)[4], size_t n) const
    {
        const int32_t e = of_row[matrix * x.m + row];
        const four<int32_t> f = load_four(of_col + matrix * x.n + col, n);
        for (size_t i = 0; i < 4; i++)
            ari_acc_add(&state->top.lane[i], &state->high.lane[i], &state->low.lane[i],
                        ari_contract_value2(sum[i].high, sum[i].low, e, f.lane[i]), narrow);
    }
    ARI_ON_GPU void store_four_states(const result &x, size_t row, size_t col, const states &s, size_t n) const
    {
        const size_t index = row * x.n + col;
        store_four(tops + index, s.top, n);
        store_four(highs + index, s.high, n);
        store_four(lows + index, s.low, n);
    }
};

} // namespace ARI_GPU
