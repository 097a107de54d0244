/* SPDX-License-Identifier: Apache-2.0 */
/* Launches the exact contraction's own kernel. ANYRANK_SM90: this file is compiled for sm_90a; elsewhere there is no
 * such kernel. */
#include "gpu/sm90/gemm.h"

#if defined(ANYRANK_SM90)
#include <stdlib.h>

#include "gpu/cuda/wgmma.h"
#include "ref/core/size.h"

namespace ari_cuda
{
namespace sm90
{
namespace
{

template <class OUT>
__global__ void __launch_bounds__(BLOCK_THREADS, 1)
    contract(const __grid_constant__ CUtensorMap left, const __grid_constant__ CUtensorMap right,
             const __grid_constant__ work w, const __grid_constant__ OUT out)
{
    extern __shared__ int8_t memory[];
    const uint32_t past = static_cast<uint32_t>(__cvta_generic_to_shared(memory)) % SHARED_ALIGNMENT;
    machine m(&left, &right, memory + (past ? SHARED_ALIGNMENT - past : 0), w.shape.size());
    run(m, w, out);
}

typedef decltype(&cuTensorMapEncodeTiled) encoder;

/* The driver's function: the library is not linked with the driver. */
ar_status find_encoder(encoder *gives)
{
    void *found = nullptr;
    cudaDriverEntryPointQueryResult how = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    const cudaError_t e =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &how);
#else
    const cudaError_t e = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &how);
#endif
    if (e != cudaSuccess || how != cudaDriverEntryPointSuccess || !found) {
        (void)cudaGetLastError();
        return ar_error_set(AR_ERR_DEVICE, "the driver has no cuTensorMapEncodeTiled, which CUDA 12.0's has");
    }
    *gives = reinterpret_cast<encoder>(found);
    return AR_OK;
}

ar_status encode(CUtensorMap *map, encoder call, const tensor &t)
{
    const cuuint32_t box_extent[4] = {STEP, 1, t.box_rows, 1}, steps[4] = {1, 1, 1, 1};
    cuuint64_t extent[4], stride[3];
    for (int i = 0; i < 4; i++)
        extent[i] = t.extent[i];
    for (int i = 0; i < 3; i++)
        stride[i] = t.stride[i];
    const CUresult r = call(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, const_cast<int8_t *>(t.data), extent, stride,
                            box_extent, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                            CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r != CUDA_SUCCESS)
        return ar_error_set(AR_ERR_DEVICE,
                            "the driver refuses a tensor map (error %d): %zu terms in %zu runs of %zu rows of %zu "
                            "matrices, %zu, %zu and %zu bytes apart",
                            static_cast<int>(r), static_cast<size_t>(t.extent[0]), static_cast<size_t>(t.extent[1]),
                            static_cast<size_t>(t.extent[2]), static_cast<size_t>(t.extent[3]),
                            static_cast<size_t>(t.stride[0]), static_cast<size_t>(t.stride[1]),
                            static_cast<size_t>(t.stride[2]));
    return AR_OK;
}

const int SHARED = SHARED_BYTES + SHARED_ALIGNMENT;
enum { SIZES = 3 }; /* of a cluster: 1, 2, 4 blocks */

/* The launch of so many clusters of 1 << size blocks. */
struct shape_of_launch {
    cudaLaunchAttribute cluster = {};
    cudaLaunchConfig_t config = {};

    shape_of_launch(int size, size_t clusters, cudaStream_t stream)
    {
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim = {1u << size, 1, 1};
        config.gridDim = dim3(static_cast<unsigned>(clusters << size));
        config.blockDim = dim3(BLOCK_THREADS);
        config.dynamicSmemBytes = SHARED;
        config.stream = stream;
        config.attrs = &cluster;
        config.numAttrs = 1;
    }
};

} // namespace
} // namespace sm90

struct sm90_launcher {
    sm90::encoder encode;
    int resident[sm90::SIZES]; /* clusters of each size that the GPU has at a time */
};

namespace sm90
{
namespace
{

/* Before the first launch on this GPU. All kernels take the same shared memory; the fewest clusters count. */
template <class OUT> ar_status prepare(sm90_launcher *l)
{
    AR_TRY(check(cudaFuncSetAttribute(reinterpret_cast<const void *>(&contract<OUT>),
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED),
                 "the shared memory of a contraction"));
    for (int size = 0; size < SIZES; size++) {
        const shape_of_launch one(size, 1, nullptr);
        int clusters = 0;
        AR_TRY(check(cudaOccupancyMaxActiveClusters(&clusters, &contract<OUT>, &one.config), "clusters of blocks"));
        if (l->resident[size] == 0 || clusters < l->resident[size])
            l->resident[size] = clusters > 0 ? clusters : 1;
    }
    return AR_OK;
}

/* As many clusters as the GPU has at a time, each with every so many tiles. */
template <class OUT>
ar_status launch(ar_device *d, ar_queue *q, const packed &a, const packed &b, const ari_tile_part &part, const OUT &out)
{
    const sm90_launcher *l = sm90_of(d);
    const work w = work_of(a, b, part, is_serial<OUT>::value);
    const int size = w.shape.size() == 4 ? 2 : w.shape.size() == 2 ? 1 : 0;
    const uint32_t resident = static_cast<uint32_t>(l->resident[size]);
    cudaStream_t stream;
    CUtensorMap left, right;
    AR_TRY(enter(d, q, &stream));
    AR_TRY(encode(&left, l->encode, tensor_of(a, part, dev<int8_t>(a.runs), w.shape.cols)));
    AR_TRY(encode(&right, l->encode, tensor_of(b, part, dev<int8_t>(b.runs), w.shape.rows)));
    const shape_of_launch how(size, w.clusters < resident ? w.clusters : resident, stream);
    const cudaError_t e = cudaLaunchKernelEx(&how.config, &contract<OUT>, left, right, w, out);
    const ar_status st = launched("contract");
    return st != AR_OK || e == cudaSuccess
               ? st
               : ar_error_set(AR_ERR_DEVICE, "launching a contraction: %s", cudaGetErrorString(e));
}

} // namespace
} // namespace sm90

static ar_status sm90_check(int index)
{
    int major = 0, minor = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index) != cudaSuccess)
        (void)cudaGetLastError();
    if (major == 9 && minor == 0)
        return AR_OK;
    return ar_error_set(AR_ERR_UNSUPPORTED, "%s=own is for compute capability 9.0; GPU %d has %d.%d",
                        ARI_IMMA_KERNEL_VARIABLE, index, major, minor);
}

ar_status sm90_create(sm90_launcher **gives, int index)
{
    sm90_launcher *l = nullptr;
    AR_TRY(sm90_check(index));
    AR_TRY(ari_alloc_zero(reinterpret_cast<void **>(&l), 1, sizeof *l, "a contraction's launches"));
    ar_status st = sm90::find_encoder(&l->encode);
    st = st == AR_OK ? sm90::prepare<integers_out>(l) : st;
    st = st == AR_OK ? sm90::prepare<values_out<false>>(l) : st;
    st = st == AR_OK ? sm90::prepare<values_out<true>>(l) : st;
    st = st == AR_OK ? sm90::prepare<accumulator_out>(l) : st;
    if (st == AR_OK)
        *gives = l;
    else
        ::free(l);
    return st;
}

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

#else

namespace ari_cuda
{

ar_status sm90_create(sm90_launcher **, int)
{
    return ar_error_set(AR_ERR_UNSUPPORTED,
                        "%s=own: this build has no code for sm_90a; configure it with -DCMAKE_CUDA_ARCHITECTURES=90",
                        ARI_IMMA_KERNEL_VARIABLE);
}

bool sm90_takes(const ar_device *, const packed &, const packed &)
{
    return false;
}

#define ARI_SM90_GEMM(OUT)                                                                                           \
    ar_status sm90_gemm(ar_device *, ar_queue *, const packed &, const packed &, const ari_tile_part &, const OUT &) \
    {                                                                                                                \
        return ar_error_set(AR_ERR_INTERNAL, "a contraction for sm_90a in a build without it");                      \
    }

#endif

ARI_SM90_GEMM(integers_out)
ARI_SM90_GEMM(values_out<false>)
ARI_SM90_GEMM(values_out<true>)
ARI_SM90_GEMM(accumulator_out)

} // namespace ari_cuda
