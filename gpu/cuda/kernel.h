/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* gpu/kernel.h for nvcc. */
#include <cuda_runtime.h>
#include <stdint.h>

#include "anyrank/device.h"

#define ARI_GPU ari_cuda
#define ARI_ON_GPU __device__
#define ARI_SHARED(type, name, extents) __shared__ type name extents

namespace ari_cuda
{

/* Selects the queue's GPU for the calling thread, and returns the queue's stream. */
ar_status enter(ar_device *d, ar_queue *q, cudaStream_t *stream);
/* Checks that the library can compute on this GPU. Errors: AR_ERR_UNSUPPORTED, which names what is missing. */
ar_status check_gpu(int index);
/* Returns AR_ERR_DEVICE with the failed operation and the reason if e is an error. */
ar_status check(cudaError_t e, const char *label);
/* Checks a launch: AR_ERR_DEVICE if the GPU refused it. */
ar_status launched(const char *label);

/* Returns a buffer's memory as a pointer for kernels. */
template <class T> T *dev(ar_buf b)
{
    return static_cast<T *>(b.ptr);
}
template <class T> const T *dev(ar_cbuf b)
{
    return static_cast<const T *>(b.ptr);
}

class block
{
  public:
    size_t index;

    template <class F> __device__ void each(size_t n, F f) const
    {
        __syncthreads(); /* earlier reads must finish before the next writes */
        for (size_t i = threadIdx.x; i < n; i += blockDim.x)
            f(i);
        __syncthreads();
    }
    template <class F> __device__ uint64_t sum(size_t n, F f) const
    {
        unsigned long long s = 0;
        __syncthreads(); /* as must reads of an earlier sum's parts */
        for (size_t i = threadIdx.x; i < n; i += blockDim.x)
            s += static_cast<unsigned long long>(f(i));
        for (int step = 16; step > 0; step /= 2)
            s += __shfl_xor_sync(0xffffffffu, s, step);
        __shared__ unsigned long long part[32];
        if (threadIdx.x % 32 == 0)
            part[threadIdx.x / 32] = s;
        __syncthreads();
        s = 0;
        for (unsigned w = 0; w < blockDim.x / 32; w++)
            s += part[w];
        return s;
    }
    template <class F> __device__ int32_t max(size_t n, F f) const
    {
        int32_t m = INT32_MIN;
        __syncthreads();
        for (size_t i = threadIdx.x; i < n; i += blockDim.x) {
            const int32_t v = f(i);
            m = v > m ? v : m;
        }
        m = __reduce_max_sync(0xffffffffu, m);
        __shared__ int32_t part[32];
        if (threadIdx.x % 32 == 0)
            part[threadIdx.x / 32] = m;
        __syncthreads();
        m = part[0];
        for (unsigned w = 1; w < blockDim.x / 32; w++)
            m = part[w] > m ? part[w] : m;
        return m;
    }
};

__device__ inline void atomic_add(int64_t *dst, int64_t v)
{
    atomicAdd(reinterpret_cast<unsigned long long *>(dst), static_cast<unsigned long long>(v));
}
__device__ inline void atomic_max(int32_t *dst, int32_t v)
{
    atomicMax(dst, v);
}

template <size_t N, class T> __device__ ari_lanes<T, N> load_whole(const T *src)
{
    return *reinterpret_cast<const ari_lanes<T, N> *>(src);
}
template <class T, size_t N> __device__ void store_whole(T *dst, const ari_lanes<T, N> &x)
{
    *reinterpret_cast<ari_lanes<T, N> *>(dst) = x;
}

/* Returns sum plus the dot product of the four signed bytes of a and of b. */
__device__ inline int32_t dot_bytes(int32_t sum, uint32_t a, uint32_t b)
{
    return __dp4a(static_cast<int>(a), static_cast<int>(b), sum);
}

__device__ inline void fault()
{
    __trap();
}

template <class F> __global__ void run_each(size_t n, F f)
{
    for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < n;
         i += gridDim.x * static_cast<size_t>(blockDim.x))
        f(i);
}
template <class F> __global__ void run_blocks(size_t n, F f)
{
    for (size_t i = blockIdx.x; i < n; i += gridDim.x) {
        const block b{i};
        f(b);
        __syncthreads(); /* the next sum uses the same shared memory */
    }
}

/* Enqueues f(i) for i in [0, n). */
template <class F> ar_status launch_each(ar_device *d, ar_queue *q, size_t n, const F &f)
{
    const unsigned threads = 256, max_blocks = 1u << 20;
    const size_t wanted = (n + threads - 1) / threads;
    cudaStream_t stream;
    AR_TRY(enter(d, q, &stream));
    if (n == 0)
        return AR_OK;
    run_each<<<static_cast<unsigned>(wanted < max_blocks ? wanted : max_blocks), threads, 0, stream>>>(n, f);
    return launched("run_each");
}

/* Enqueues f(b) for n blocks; width: iterations of most of their loops, which determines the number of threads. */
template <class F> ar_status launch_blocks(ar_device *d, ar_queue *q, size_t n, size_t width, const F &f)
{
    const unsigned max_blocks = 1u << 30;
    const unsigned threads = width <= 32 ? 32 : width <= 128 ? 64 : width <= 512 ? 128 : width <= 4096 ? 256 : 512;
    cudaStream_t stream;
    AR_TRY(enter(d, q, &stream));
    if (n == 0)
        return AR_OK;
    run_blocks<<<static_cast<unsigned>(n < max_blocks ? n : max_blocks), threads, 0, stream>>>(n, f);
    return launched("run_blocks");
}

} // namespace ari_cuda
