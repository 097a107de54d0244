/* SPDX-License-Identifier: Apache-2.0 */
/* The exact contraction's own kernel for compute capability 9.0, on the model of that machine. */
#include "gpu/emulated/sm90.h"
#include "gpu/sm90/gemm.h"

namespace ari_emulated
{
namespace sm90
{
namespace
{

template <class OUT> struct kernel {
    work w;
    tensor left, right;
    OUT out;

    static void body(const void *arg, machine &m)
    {
        const kernel *k = static_cast<const kernel *>(arg);
        run(m, k->w, k->out);
    }
};

template <class OUT> ar_status launch(ar_device *d, ar_queue *q, const packed &a, const packed &b, const OUT &out)
{
    const work w = work_of(a, b, is_serial<OUT>::value);
    const kernel<OUT> k = {w, tensor_of(a, dev<int8_t>(a.runs), w.shape.cols),
                           tensor_of(b, dev<int8_t>(b.runs), w.shape.rows), out};
    return launch_blocks(d, q, cluster_count(w), 1, [=](const block &one) {
        one.each(1, [&](size_t) {
            run_cluster(k.w, k.left, k.right, static_cast<uint32_t>(one.index), kernel<OUT>::body, &k);
        });
    });
}

} // namespace
} // namespace sm90

bool sm90_takes(const ar_device *d, const packed &a, const packed &b)
{
    return imma_of(d).own && sm90::fits(a, b);
}

ar_status sm90_gemm(ar_device *d, ar_queue *q, const packed &a, const packed &b, const integers_out &out)
{
    return sm90::launch(d, q, a, b, out);
}

ar_status sm90_gemm(ar_device *d, ar_queue *q, const packed &a, const packed &b, const values_out<false> &out)
{
    return sm90::launch(d, q, a, b, out);
}

ar_status sm90_gemm(ar_device *d, ar_queue *q, const packed &a, const packed &b, const values_out<true> &out)
{
    return sm90::launch(d, q, a, b, out);
}

ar_status sm90_gemm(ar_device *d, ar_queue *q, const packed &a, const packed &b, const accumulator_out &out)
{
    return sm90::launch(d, q, a, b, out);
}

} // namespace ari_emulated
