/* SPDX-License-Identifier: Apache-2.0 */
/* Describes the machine's GPUs and driver in words. */
#include <cuda_runtime.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "gpu/device_private.h"
#include "gpu/kernels.h"
#include "gpu/native.h"

namespace ari_cuda
{

namespace
{

/* Oldest GPU with the features that kernels use: integer warp reductions, and bf16 and TF32 products. */
enum { OLDEST_MAJOR = 8 };

/* "13.0" of 13000. */
struct version {
    char text[16];
    explicit version(int v)
    {
        snprintf(text, sizeof text, "%d.%d", v / 1000, v % 1000 / 10);
    }
};

static_assert(static_cast<int>(cudaErrorInsufficientDriver) == ARI_CUDA_INSUFFICIENT_DRIVER &&
                  static_cast<int>(cudaErrorNoDevice) == ARI_CUDA_NO_DEVICE,
              "CUDA's numbers");

/* Counts the GPUs, or returns why there is none. */
ar_status count(int *n)
{
    *n = 0;
    const cudaError_t e = cudaGetDeviceCount(n);
    if (e == cudaSuccess && *n > 0)
        return AR_OK;
    (void)cudaGetLastError();
    *n = 0;
    ari_gpu_machine m = {CUDART_VERSION,
                         0,
                         e,
                         cudaGetErrorString(e),
                         cudaGetErrorName(e),
                         access("/proc/driver/nvidia/version", F_OK) == 0};
    (void)cudaDriverGetVersion(&m.driver); /* 0 without a driver */
    return ari_gpu_why_none(&m);
}

ar_status attribute(int *value, cudaDeviceAttr which, int index)
{
    const cudaError_t e = cudaDeviceGetAttribute(value, which, index);
    if (e == cudaSuccess)
        return AR_OK;
    (void)cudaGetLastError();
    return ar_error_set(AR_ERR_UNSUPPORTED, "GPU %d does not answer: %s", index, cudaGetErrorString(e));
}

} // namespace

ar_status check_gpu(int index)
{
    int n, major, minor, pools;
    AR_TRY(count(&n));
    if (index < 0 || index >= n)
        return ar_error_set(AR_ERR_UNSUPPORTED, "there is no GPU %d: this machine has %d, counted from 0", index, n);
    AR_TRY(attribute(&major, cudaDevAttrComputeCapabilityMajor, index));
    AR_TRY(attribute(&minor, cudaDevAttrComputeCapabilityMinor, index));
    if (major < OLDEST_MAJOR)
        return ar_error_set(AR_ERR_UNSUPPORTED, "GPU %d has compute capability %d.%d; %d.0 is the oldest that will do",
                            index, major, minor, OLDEST_MAJOR);
    AR_TRY(attribute(&pools, cudaDevAttrMemoryPoolsSupported, index));
    if (!pools)
        return ar_error_set(AR_ERR_UNSUPPORTED, "GPU %d has no memory pools in stream order (cudaMallocAsync)", index);
    return AR_OK;
}

} // namespace ari_cuda

using namespace ari_cuda;

void ari_gpu_describe(char *text, size_t size)
{
    int n, driver = 0;
    if (count(&n) != AR_OK) {
        snprintf(text, size, "%s, but %s", version(CUDART_VERSION).text, ar_error_message());
        return;
    }
    (void)cudaDriverGetVersion(&driver);
    snprintf(text, size, "%s, driver for %s, %d GPU%s", version(CUDART_VERSION).text, version(driver).text, n,
             n == 1 ? "" : "s");
}

int ari_gpu_count(void)
{
    int n;
    return count(&n) == AR_OK ? n : 0;
}

bool ari_gpu_reaches(int gpu, int peer)
{
    int can = 0;
    if (cudaDeviceCanAccessPeer(&can, gpu, peer) == cudaSuccess)
        return can != 0;
    (void)cudaGetLastError();
    return false;
}

ar_status ari_gpu_info_get(ar_gpu_info *out, int index)
{
    int n;
    cudaDeviceProp p;
    AR_TRY(count(&n));
    if (index < 0 || index >= n)
        return ar_error_set(AR_ERR_ARG, "there is no GPU %d: this machine has %d, counted from 0", index, n);
    /* avoids cudaSetDevice and cudaMemGetInfo, which create a context and take hundreds of megabytes on every GPU */
    const cudaError_t e = cudaGetDeviceProperties(&p, index);
    if (e != cudaSuccess) {
        (void)cudaGetLastError();
        return ar_error_set(AR_ERR_UNSUPPORTED, "GPU %d does not answer: %s", index, cudaGetErrorString(e));
    }
    *out = {};
    snprintf(out->name, sizeof out->name, "%.95s", p.name);
    out->major = p.major;
    out->minor = p.minor;
    out->processors = p.multiProcessorCount;
    out->memory = p.totalGlobalMem;
    return AR_OK;
}

ar_status ari_gpu_bus_id(char *text, int size)
{
    int gpu = 0;
    cudaError_t e = cudaGetDevice(&gpu);
    if (e == cudaSuccess)
        e = cudaDeviceGetPCIBusId(text, size, gpu);
    return e == cudaSuccess ? AR_OK : ar_error_set(AR_ERR_DEVICE, "the bus id of a GPU: %s", cudaGetErrorString(e));
}
