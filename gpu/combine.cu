/* SPDX-License-Identifier: Apache-2.0 */
/* Reductions over the ranks that share the device, one thread an element; the operations are those of
 * ref/core/reduce.h. */
#include "gpu/kernels.h"
#include "ref/core/reduce.h"

namespace ARI_GPU
{

/* NOLINTBEGIN(bugprone-macro-parentheses): types and names cannot be put in parentheses. */
#define NUMBERS(name, type)                                       \
    struct name##_numbers {                                       \
        typedef type element;                                     \
        ARI_ON_GPU static type combined(ar_op op, type x, type y) \
        {                                                         \
            switch (op) {                                         \
            case AR_MAX:                                          \
                return ari_max_##name(x, y);                      \
            case AR_MIN:                                          \
                return ari_min_##name(x, y);                      \
            case AR_SUM:                                          \
                break;                                            \
            }                                                     \
            return ari_sum_##name(x, y);                          \
        }                                                         \
    };
NUMBERS(f32, float)
NUMBERS(f64, double)
NUMBERS(bf16, uint16_t)
NUMBERS(f16, uint16_t)
NUMBERS(i64, int64_t)
NUMBERS(i32, int32_t)
NUMBERS(u8, uint8_t)
/* NOLINTEND(bugprone-macro-parentheses) */

/* Inputs of one launch: their addresses travel with the kernel's arguments. */
static const int most_inputs = 64;

template <class N> struct combine_each {
    typedef typename N::element element;
    element *out;
    const element *in[most_inputs];
    int n;
    ar_op op;
    ARI_ON_GPU void operator()(size_t i) const
    {
        element sum = in[0][i];
        for (int k = 1; k < n; k++)
            sum = N::combined(op, sum, in[k][i]);
        out[i] = sum;
    }
};

/* More inputs than one launch takes: what the first ones gave, in memory of its own since `out` may be an input yet to
 * come, is the first input of the next launch. */
template <class N>
ar_status combine_all(ar_device *d, ar_queue *q, ar_buf out, const ar_cbuf *in, int n, size_t count, ar_op op)
{
    typedef typename N::element element;
    scratch partial(d, q);
    if (n > most_inputs)
        AR_TRY(partial.take(count * sizeof(element)));
    for (int done = 0; done < n;) {
        combine_each<N> kernel = {};
        if (done > 0)
            kernel.in[kernel.n++] = dev<element>(ar_const(partial.buf()));
        while (kernel.n < most_inputs && done < n)
            kernel.in[kernel.n++] = dev<element>(in[done++]);
        kernel.out = dev<element>(done < n ? partial.buf() : out);
        kernel.op = op;
        AR_TRY(launch_each(d, q, count, kernel));
    }
    return AR_OK;
}

ar_status combine(ar_device *d, ar_queue *q, ar_buf out, const ar_cbuf *in, int n, size_t count, ar_dtype t, ar_op op)
{
    if (n < 1)
        return ar_error_set(AR_ERR_ARG, "combine: %d inputs, expected at least 1", n);
    switch (t) {
    case AR_F64:
        return combine_all<f64_numbers>(d, q, out, in, n, count, op);
    case AR_BF16:
        return combine_all<bf16_numbers>(d, q, out, in, n, count, op);
    case AR_F16:
        return combine_all<f16_numbers>(d, q, out, in, n, count, op);
    case AR_I64:
        return combine_all<i64_numbers>(d, q, out, in, n, count, op);
    case AR_I32:
        return combine_all<i32_numbers>(d, q, out, in, n, count, op);
    case AR_U8:
        return combine_all<u8_numbers>(d, q, out, in, n, count, op);
    default: /* F32: the boundary lets no other type pass */
        return combine_all<f32_numbers>(d, q, out, in, n, count, op);
    }
}

} // namespace ARI_GPU
