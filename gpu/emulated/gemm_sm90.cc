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

/* Clusters at a time: few, so that each has several tiles. */
const uint32_t CLUSTERS = 3;

template <class OUT>
ar_status launch(ar_device *d, ar_queue *q, const packed &a, const packed &b, const ari_tile_part &part, const OUT &out)
{
    const work w = work_of(a, b, part, is_serial<OUT>::value);
    const uint32_t clusters = w.clusters < CLUSTERS ? w.clusters : CLUSTERS;
    const kernel<OUT> k = {w, tensor_of(a, part, dev<int8_t>(a.runs), w.shape.cols),
                           tensor_of(b, part, dev<int8_t>(b.runs), w.shape.rows), out};
    return launch_blocks(d, q, clusters, 1, [=](const block &one) {
        one.each(1, [&](size_t) {
            run_cluster(k.w, k.left, k.right, static_cast<uint32_t>(one.index), clusters, kernel<OUT>::body, &k);
        });
    });
}

} // namespace
} // namespace sm90

bool sm90_takes(const ar_device *d, const packed &a, const packed &b)
{
    return imma_of(d).own && sm90::fits(a, b);
}

#define ARI_SM90_GEMM(OUT)                                                                                      \
    ar_status sm90_gemm(ar_device *d, ar_queue *q, const packed &a, const packed &b, const ari_tile_part &part, \
                        const OUT &out)                                                                         \
    {                                                                                                           \
        return sm90::launch(d, q, a, b, part, out);                                                             \
    }
ARI_SM90_GEMM(integers_out)
ARI_SM90_GEMM(values_out<false>)
ARI_SM90_GEMM(values_out<true>)
ARI_SM90_GEMM(accumulator_out)
#undef ARI_SM90_GEMM

} // namespace ari_emulated
