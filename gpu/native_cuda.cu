/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/native.h"

#include "gpu/kernel.h"

ar_status ari_gpu_native_stream(ar_device *d, ar_queue *q, void **borrows)
{
    cudaStream_t stream;
    AR_TRY(ari_cuda::enter(d, q, &stream));
    *borrows = stream;
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
