/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix products by cuBLAS. A handle belongs to one stream of one device, which cuBLAS requires for results that are
 * equal from run to run; no product uses atomic additions. */
#include <cublas_v2.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "gpu/blas.h"
#include "gpu/library.h"
#include "gpu/native.h"
#include "gpu/report/sticky.h"
#include "ref/core/os/os.h"
#include "ref/core/size.h"

namespace ari_cuda
{

namespace
{

/* Functions of cuBLAS in use. The library is loaded with the first device, because linking it would delay every command
 * by the relocation of several hundred thousand addresses. The types are those of the functions in cublas_v2.h, some of
 * which have C++ overloads. */
struct cublas {
    decltype(&cublasCreate) create;
    decltype(&cublasDestroy) destroy;
    decltype(&cublasSetStream) set_stream;
    decltype(&cublasSetAtomicsMode) set_atomics_mode;
    decltype(&cublasSetMathMode) set_math_mode;
    decltype(&cublasGetStatusString) status_string;
    cublasStatus_t (*gemm)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k, const void *alpha,
                           const void *a, cudaDataType, int lda, const void *b, cudaDataType, int ldb, const void *beta,
                           void *c, cudaDataType, int ldc, cublasComputeType_t, cublasGemmAlgo_t);
    cublasStatus_t (*gemm_batched)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                                   const void *alpha, const void *a, cudaDataType, int lda, long long a_step,
                                   const void *b, cudaDataType, int ldb, long long b_step, const void *beta, void *c,
                                   cudaDataType, int ldc, long long c_step, int batch, cublasComputeType_t,
                                   cublasGemmAlgo_t);
};

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

ar_status load(cublas *f)
{
    static const ari_library cublas_library = {"cuBLAS",
                                               "ANYRANK_CUBLAS",
                                               "the CUDA toolkit or Python's nvidia-cublas",
                                               ANYRANK_BUILT_WITH_CUBLAS,
                                               {"libcublas.so." TEXT(CUBLAS_VER_MAJOR), nullptr}};
    const struct {
        const char *name;
        void *slot;
    } slots[] = {{TEXT(cublasCreate), &f->create},
                 {TEXT(cublasDestroy), &f->destroy},
                 {TEXT(cublasSetStream), &f->set_stream},
                 {TEXT(cublasSetAtomicsMode), &f->set_atomics_mode},
                 {TEXT(cublasSetMathMode), &f->set_math_mode},
                 {TEXT(cublasGetStatusString), &f->status_string},
                 {TEXT(cublasGemmEx), &f->gemm},
                 {TEXT(cublasGemmStridedBatchedEx), &f->gemm_batched}};
    void *library = nullptr;
    AR_TRY(ari_library_open(&library, &cublas_library));
    for (const auto &s : slots)
        if (!ari_library_find(library, s.name, s.slot))
            return ar_error_set(AR_ERR_UNSUPPORTED, "%s has no %s", ari_library_place(library), s.name);
    return AR_OK;
}

struct stream_handle {
    cudaStream_t stream;
    cublasHandle_t handle;
    stream_handle *next;
};

/* The cuBLAS handles of one device, created when a stream first needs one. */
struct handles {
    cublas call;
    bool pedantic; /* ARI_SGEMM_VARIABLE */
    pthread_mutex_t lock;
    stream_handle *head;
    ari_tile_machine machine;
};

/* cuBLAS's largest int8 kernels: 128 x 256 per processor. */
const size_t PART_ROWS = 128, PART_COLS = 256;
/* Maximum bytes of planes for results with short rows of terms, whose products would be too short if divided into
 * smaller tiles. */
const size_t PLANE_BYTES = static_cast<size_t>(384) << 20;

/* Describes the calling thread's GPU; the cache counts as three quarters of its size, because operands pass through it
 * too. */
ar_status machine_of(ari_tile_machine *m)
{
    int gpu = 0, processors = 0, cache = 0;
    cudaError_t e = cudaGetDevice(&gpu);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, gpu);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&cache, cudaDevAttrL2CacheSize, gpu);
    if (e != cudaSuccess || processors < 1 || cache < 0)
        return ar_error_set(AR_ERR_DEVICE, "the GPU's processors and cache: %s", cudaGetErrorString(e));
    *m = {static_cast<size_t>(processors), PART_ROWS, PART_COLS, static_cast<size_t>(cache) / 4 * 3, PLANE_BYTES};
    return AR_OK;
}

/* Largest batch of one call: the limit of a grid's third dimension. */
const size_t BATCH_MAX = 65535;

/* Returns true if cuBLAS has no kernel for a shape; for int8 it returns the documented status or three others. A sticky
 * error left by an earlier kernel is reported first. */
bool has_no_kernel(cublasStatus_t s, bool int8)
{
    return s == CUBLAS_STATUS_NOT_SUPPORTED ||
           (int8 && (s == CUBLAS_STATUS_INVALID_VALUE || s == CUBLAS_STATUS_ARCH_MISMATCH ||
                     s == CUBLAS_STATUS_INTERNAL_ERROR));
}

ar_status refused(const cublas &call, cublasStatus_t s, const char *label, bool int8 = false)
{
    const ar_status code = s == CUBLAS_STATUS_ALLOC_FAILED ? AR_ERR_MEMORY
                           : has_no_kernel(s, int8)        ? AR_ERR_UNSUPPORTED
                                                           : AR_ERR_DEVICE;
    (void)launched(label); /* finds a sticky error, for which cuBLAS has no status */
    AR_TRY(ari_gpu_check_lost());
    return ar_error_set(code, "cuBLAS, %s: %s", label, call.status_string(s));
}

ar_status handle_create(stream_handle **out, ar_device *d, const cublas &call, cudaStream_t stream)
{
    void *memory = nullptr;
    AR_TRY(ari_alloc(&memory, 1, sizeof(stream_handle), "a handle of cuBLAS"));
    stream_handle *h = static_cast<stream_handle *>(memory);
    cublasStatus_t s = call.create(&h->handle);
    if (s == CUBLAS_STATUS_ALLOC_FAILED && ari_gpu_trim(d) == AR_OK) /* the pool may hold all free memory */
        s = call.create(&h->handle);
    if (s != CUBLAS_STATUS_SUCCESS) {
        ::free(memory);
        return refused(call, s, "a handle");
    }
    s = call.set_stream(h->handle, stream);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = call.set_atomics_mode(h->handle, CUBLAS_ATOMICS_NOT_ALLOWED);
    if (s == CUBLAS_STATUS_SUCCESS) /* or partial sums of a bf16 result could be bf16 numbers too */
        s = call.set_math_mode(h->handle, static_cast<cublasMath_t>(CUBLAS_DEFAULT_MATH |
                                                                    CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION));
    if (s != CUBLAS_STATUS_SUCCESS) {
        (void)call.destroy(h->handle);
        ::free(memory);
        return refused(call, s, "a handle's stream");
    }
    h->stream = stream;
    *out = h;
    return AR_OK;
}

/* Returns the handle of q's stream, and makes its device the calling thread's. */
ar_status handle_of(ar_device *d, ar_queue *q, cublasHandle_t *out)
{
    handles *cache = static_cast<handles *>(blas_of(d));
    cudaStream_t stream;
    AR_TRY(enter(d, q, &stream));
    ar_status st = AR_OK;
    pthread_mutex_lock(&cache->lock);
    stream_handle *h = cache->head;
    while (h && h->stream != stream)
        h = h->next;
    if (!h) {
        st = handle_create(&h, d, cache->call, stream);
        if (st == AR_OK) {
            h->next = cache->head;
            cache->head = h;
        }
    }
    if (st == AR_OK)
        *out = h->handle;
    pthread_mutex_unlock(&cache->lock);
    return st;
}

ar_status check_sizes(const blas_shape &s, const blas_matrix &c, const blas_matrix &a, const blas_matrix &b)
{
    const size_t sizes[] = {s.m, s.n, s.k, a.ld, b.ld, c.ld};
    for (size_t x : sizes)
        if (x > INT_MAX)
            return ar_error_set(
                AR_ERR_UNSUPPORTED,
                "a product [%zu, %zu] of %zu terms, rows %zu, %zu and %zu apart: cuBLAS takes numbers below 2^31", s.m,
                s.n, s.k, c.ld, a.ld, b.ld);
    return AR_OK;
}

/* Types of a product. */
struct product_types {
    cudaDataType_t operands, result;
    cublasComputeType_t compute;
    size_t operand_bytes, result_bytes;
};

/* cuBLAS is column-major, so row-major c = a b^T is c^T = b a^T. */
ar_status product(ar_device *d, ar_queue *q, const blas_shape &s, const blas_matrix &c, const blas_matrix &a,
                  const blas_matrix &b, const product_types &t, const void *alpha, const void *factor)
{
    const cublas &call = static_cast<handles *>(blas_of(d))->call;
    cublasHandle_t handle;
    AR_TRY(check_sizes(s, c, a, b));
    AR_TRY(handle_of(d, q, &handle));
    const cublasOperation_t of_b = b.transposed ? CUBLAS_OP_N : CUBLAS_OP_T;
    const cublasOperation_t of_a = a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    const int m = static_cast<int>(s.m), n = static_cast<int>(s.n), k = static_cast<int>(s.k);
    for (size_t begin = 0; begin < s.batch; begin += BATCH_MAX) {
        const size_t batch = s.batch - begin < BATCH_MAX ? s.batch - begin : BATCH_MAX;
        const void *left = ar_buf_at(a.data, begin * a.step * t.operand_bytes).ptr;
        const void *right = ar_buf_at(b.data, begin * b.step * t.operand_bytes).ptr;
        void *dst = ar_buf_at(c.data, begin * c.step * t.result_bytes).ptr;
        const cublasStatus_t status =
            batch == 1 ? call.gemm(handle, of_b, of_a, n, m, k, alpha, right, t.operands, static_cast<int>(b.ld), left,
                                   t.operands, static_cast<int>(a.ld), factor, dst, t.result, static_cast<int>(c.ld),
                                   t.compute, CUBLAS_GEMM_DEFAULT)
                       : call.gemm_batched(handle, of_b, of_a, n, m, k, alpha, right, t.operands,
                                           static_cast<int>(b.ld), static_cast<long long>(b.step), left, t.operands,
                                           static_cast<int>(a.ld), static_cast<long long>(a.step), factor, dst,
                                           t.result, static_cast<int>(c.ld), static_cast<long long>(c.step),
                                           static_cast<int>(batch), t.compute, CUBLAS_GEMM_DEFAULT);
        if (status != CUBLAS_STATUS_SUCCESS) {
            char label[96];
            snprintf(label, sizeof label, "%zu products [%zu, %zu] of %zu terms", batch, s.m, s.n, s.k);
            return refused(call, status, label, t.operands == CUDA_R_8I);
        }
    }
    return AR_OK;
}

} // namespace

ar_status blas_prepare(ar_device *d, ar_queue *q)
{
    cublasHandle_t handle;
    return handle_of(d, q, &handle);
}

ar_status blas_create(void **out)
{
    cublas call;
    ari_tile_machine machine;
    AR_TRY(machine_of(&machine));
    bool pedantic;
    AR_TRY(ari_sgemm_choose(&pedantic));
    AR_TRY(load(&call));
    AR_TRY(ari_alloc_zero(out, 1, sizeof(handles), "the handles of cuBLAS"));
    handles *cache = static_cast<handles *>(*out);
    cache->call = call;
    cache->machine = machine;
    cache->pedantic = pedantic;
    pthread_mutex_init(&cache->lock, nullptr);
    return AR_OK;
}

void blas_destroy(void *blas)
{
    handles *cache = static_cast<handles *>(blas);
    if (!cache)
        return;
    while (cache->head) {
        stream_handle *h = cache->head;
        cache->head = h->next;
        if (!ari_gpu_is_lost())
            (void)cache->call.destroy(h->handle);
        ::free(h);
    }
    pthread_mutex_destroy(&cache->lock);
    ::free(cache);
}

ari_tile_machine blas_machine(ar_device *d)
{
    return static_cast<handles *>(blas_of(d))->machine;
}

ar_status blas_int8(ar_device *d, ar_queue *q, const blas_shape &s, const blas_matrix &c, const blas_matrix &a,
                    const blas_matrix &b)
{
    const product_types types = {CUDA_R_8I, CUDA_R_32I, CUBLAS_COMPUTE_32I, 1, 4};
    const int32_t alpha = 1, zero = 0;
    return product(d, q, s, c, a, b, types, &alpha, &zero);
}

ar_status blas_float(ar_device *d, ar_queue *q, const blas_shape &s, const blas_matrix &c, const blas_matrix &a,
                     const blas_matrix &b, bool add, ar_precision operands, ar_dtype result)
{
    const bool pedantic = static_cast<handles *>(blas_of(d))->pedantic;
    const product_types f32 = {CUDA_R_32F, CUDA_R_32F, pedantic ? CUBLAS_COMPUTE_32F_PEDANTIC : CUBLAS_COMPUTE_32F, 4,
                               4};
    const product_types tf32 = {CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_32F_FAST_TF32, 4, 4};
    const product_types bf16 = {CUDA_R_16BF, CUDA_R_32F, CUBLAS_COMPUTE_32F, 2, 4};
    const product_types rounded = {CUDA_R_16BF, CUDA_R_16BF, CUBLAS_COMPUTE_32F, 2, 2};
    const float alpha = 1.0f, zero = 0.0f;
    return product(d, q, s, c, a, b,
                   result == AR_BF16               ? rounded
                   : operands == AR_PRECISION_BF16 ? bf16
                   : operands == AR_PRECISION_TF32 ? tf32
                                                   : f32,
                   &alpha, add ? &alpha : &zero);
}

} // namespace ari_cuda
