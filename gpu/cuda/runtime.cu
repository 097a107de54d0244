/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA device's memory, queues and streams. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "gpu/blas.h"
#include "gpu/cuda/pool.h"
#include "gpu/device_private.h"
#include "gpu/kernels.h"
#include "gpu/report/sticky.h"
#include "ref/core/clock.h"
#include "ref/core/queue_impl.h"
#include "ref/core/size.h"

namespace ari_cuda
{

namespace
{

/* Stream of a device. It lives as long as the device: a destroyed queue leaves it to the next queue, so that a
 * library's state for the stream (gpu/cuda/blas.cu) stays valid. */
struct stream {
    ari_stream base; /* must be the first field, since an ari_stream * points to it */
    cudaStream_t handle;
    pool_stream in_pool;
    bool in_use; /* true if a queue uses it */
    stream *next;
};

struct mark {
    ari_mark base; /* first */
    int gpu;
    cudaEvent_t event;
};

struct cuda_device {
    ar_device base; /* first */
    ar_device_ops ops;
    int gpu;
    pool *memory;
    void *blas;
    ari_imma imma;
    uint64_t timeout_ns; /* longest wait for memory */
    pthread_mutex_t lock;
    stream *streams; /* guarded by `lock`: the list and `taken` */
};

cuda_device *cuda_of(ar_device *d)
{
    return reinterpret_cast<cuda_device *>(d);
}

/* --- marks and streams -------------------------------------------------------------------------------------------- */

/* Selects the GPU, before every call of CUDA: otherwise CUDA would initialise GPU 0. No call is made after a sticky
 * error. */
ar_status choose(int gpu)
{
    AR_TRY(ari_gpu_check_lost());
    return check(cudaSetDevice(gpu), "choosing the GPU");
}

void mark_destroy(ari_mark *m)
{
    if (!ari_gpu_is_lost() && choose(reinterpret_cast<mark *>(m)->gpu) == AR_OK)
        (void)cudaEventDestroy(reinterpret_cast<mark *>(m)->event);
    ::free(m);
}

ar_status mark_create(ari_mark **out, const ari_stream *s, unsigned flags)
{
    mark *m = nullptr;
    AR_TRY(ari_alloc_zero(reinterpret_cast<void **>(&m), 1, sizeof *m, "a mark in a stream"));
    m->base.ops = s->ops;
    m->gpu = cuda_of(s->device)->gpu;
    const ar_status st = check(cudaEventCreateWithFlags(&m->event, flags), "making an event");
    if (st == AR_OK)
        *out = &m->base;
    else
        ::free(m);
    return st;
}

ar_status stream_mark(ari_stream *s, ari_mark **m)
{
    const bool is_new = !*m;
    const int gpu = cuda_of(s->device)->gpu;
    AR_TRY(choose(gpu));
    if (*m && reinterpret_cast<mark *>(*m)->gpu != gpu) { /* an event belongs to one GPU */
        mark_destroy(*m);
        *m = nullptr;
    }
    if (!*m)
        AR_TRY(mark_create(m, s, cudaEventDisableTiming));
    const ar_status st =
        check(cudaEventRecord(reinterpret_cast<mark *>(*m)->event, reinterpret_cast<stream *>(s)->handle), "recording");
    if (st != AR_OK && is_new) {
        mark_destroy(*m);
        *m = nullptr;
    }
    return st;
}

ar_status stream_wait(ari_stream *s, const ari_mark *m)
{
    AR_TRY(choose(cuda_of(s->device)->gpu));
    return check(
        cudaStreamWaitEvent(reinterpret_cast<stream *>(s)->handle, reinterpret_cast<const mark *>(m)->event, 0),
        "waiting for another stream");
}

ar_status mark_poll(const ari_mark *m, bool *is_done)
{
    AR_TRY(choose(reinterpret_cast<const mark *>(m)->gpu));
    const cudaError_t e = cudaEventQuery(reinterpret_cast<const mark *>(m)->event);
    *is_done = e == cudaSuccess;
    if (e == cudaErrorNotReady) {
        (void)cudaGetLastError(); /* clears the status, which is no error */
        return AR_OK;
    }
    return check(e, "work enqueued before");
}

/* Spins as long as a short kernel takes, then sleeps, because ranks that share few cores wait at the same time. */
ar_status mark_await(const ari_mark *m, uint64_t timeout_ns)
{
    const uint64_t spin_ns = 100000, since = ari_now_ns();
    const struct timespec nap = {0, 20000};
    for (;;) {
        bool is_done;
        AR_TRY(mark_poll(m, &is_done));
        if (is_done)
            return AR_OK;
        const uint64_t waited = ari_now_ns() - since;
        if (timeout_ns && waited >= timeout_ns)
            return ar_error_set(AR_ERR_TIMEOUT, "GPU %d has not done what was enqueued after %.3f s",
                                reinterpret_cast<const mark *>(m)->gpu, static_cast<double>(waited) * 1e-9);
        if (waited > spin_ns)
            (void)nanosleep(&nap, nullptr); /* if woken early, it checks earlier */
    }
}

/* Nothing is in flight, since the stream's queue has waited. */
void stream_leave(ari_stream *base)
{
    stream *s = reinterpret_cast<stream *>(base);
    cuda_device *d = cuda_of(base->device);
    pthread_mutex_lock(&d->lock);
    s->in_use = false;
    pthread_mutex_unlock(&d->lock);
}

ar_status stream_stamp(ari_stream *s, ari_mark **m)
{
    AR_TRY(choose(cuda_of(s->device)->gpu));
    if (!*m)
        AR_TRY(mark_create(m, s, cudaEventDefault));
    return stream_mark(s, m);
}

ar_status mark_elapsed(const ari_mark *begin_mark, const ari_mark *end_mark, double *seconds)
{
    float ms = 0.0f;
    AR_TRY(choose(reinterpret_cast<const mark *>(end_mark)->gpu));
    AR_TRY(check(cudaEventElapsedTime(&ms, reinterpret_cast<const mark *>(begin_mark)->event,
                                      reinterpret_cast<const mark *>(end_mark)->event),
                 "the time between two events"));
    *seconds = 1e-3 * static_cast<double>(ms);
    return AR_OK;
}

const ari_stream_ops stream_ops = {stream_mark,  stream_wait,  mark_await,   mark_poll,
                                   mark_destroy, stream_leave, stream_stamp, mark_elapsed};

/* `lock` held. */
ar_status stream_create(cuda_device *d, stream **out)
{
    stream *s = nullptr;
    AR_TRY(ari_alloc_zero(reinterpret_cast<void **>(&s), 1, sizeof *s, "a stream"));
    s->base.ops = &stream_ops;
    s->base.device = &d->base;
    /* not synchronised with stream 0, which other libraries may use */
    const ar_status st = check(cudaStreamCreateWithFlags(&s->handle, cudaStreamNonBlocking), "making a stream");
    if (st != AR_OK) {
        ::free(s);
        return st;
    }
    s->in_pool.handle = s->handle;
    pool_join(d->memory, &s->in_pool);
    s->next = d->streams;
    d->streams = s;
    *out = s;
    return AR_OK;
}

ar_status stream_take(cuda_device *d, stream **out)
{
    AR_TRY(choose(d->gpu));
    pthread_mutex_lock(&d->lock);
    stream *s = d->streams;
    while (s && s->in_use)
        s = s->next;
    const ar_status st = s ? AR_OK : stream_create(d, &s);
    if (st == AR_OK)
        s->in_use = true;
    pthread_mutex_unlock(&d->lock);
    *out = s;
    return st;
}

/* Returns the stream of an inline queue of this GPU; NULL: the queue is not inline. */
stream *stream_of(ar_device *d, ar_queue *q)
{
    ari_stream *s = q ? ari_queue_stream(q) : nullptr;
    const bool is_same_gpu =
        s && s->ops == &stream_ops && ari_queue_is_inline(q) && cuda_of(s->device)->gpu == cuda_of(d)->gpu;
    return is_same_gpu ? reinterpret_cast<stream *>(s) : nullptr;
}

} // namespace

/* --- what kernels call -------------------------------------------------------------------------------------------- */

#define SAME(name, number) static_assert(name == number, #name);
ARI_GPU_STICKY(SAME)
#if CUDART_VERSION >= 13000
ARI_GPU_STICKY_NEWER(SAME)
#endif

ar_status check(cudaError_t e, const char *label)
{
    if (e == cudaSuccess)
        return AR_OK;
    (void)cudaGetLastError(); /* otherwise the next launch would report it */
    return ari_gpu_failed(e, label, cudaGetErrorString(e), cudaGetErrorName(e));
}

ar_status enter(ar_device *d, ar_queue *q, cudaStream_t *handle)
{
    const stream *s = stream_of(d, q);
    if (!s)
        return ar_error_set(AR_ERR_ARG, "a kernel of GPU %d was given a queue that is not an inline one of this GPU",
                            cuda_of(d)->gpu);
    AR_TRY(choose(cuda_of(d)->gpu));
    *handle = s->handle;
    return AR_OK;
}

ar_status launched(const char *label)
{
    return check(cudaGetLastError(), label);
}

ari_imma imma_of(const ar_device *d)
{
    return reinterpret_cast<const cuda_device *>(d)->imma;
}

void *blas_of(ar_device *d)
{
    return cuda_of(d)->blas;
}

/* --- slots -------------------------------------------------------------------------------------------------------- */

ar_status queue_create(ar_device *d, ar_queue **out, ar_queue_kind kind, const char *name)
{
    stream *s = nullptr;
    AR_TRY(stream_take(cuda_of(d), &s));
    ar_status st = ari_queue_create_on(out, kind, name, &s->base);
    if (st != AR_OK) {
        stream_leave(&s->base);
        return st;
    }
    if (kind == AR_QUEUE_INLINE) /* a thread's queue runs collectives and no products */
        st = blas_prepare(d, *out);
    if (st != AR_OK)
        ar_queue_destroy(*out);
    return st;
}

ar_status alloc(ar_device *d, ar_queue *q, ar_buf *out, size_t bytes)
{
    cudaStream_t s;
    AR_TRY(enter(d, q, &s));
    return pool_take(cuda_of(d)->memory, &out->ptr, bytes, s, cuda_of(d)->timeout_ns);
}

/* Waits on the host for all streams of d. `*any`: one of them. */
static void wait_for_all(cuda_device *d, cudaStream_t *any)
{
    pthread_mutex_lock(&d->lock);
    for (const stream *s = d->streams; s; s = s->next) {
        (void)cudaStreamSynchronize(s->handle);
        *any = s->handle;
    }
    pthread_mutex_unlock(&d->lock);
}

/* Errors belong to work enqueued earlier; the caller that waits for that work gets them. */
void free(ar_device *d, ar_queue *q, ar_buf b)
{
    if (!b.ptr || ari_gpu_is_lost() || cudaSetDevice(cuda_of(d)->gpu) != cudaSuccess)
        return;
    const stream *s = stream_of(d, q);
    cudaStream_t handle = s ? s->handle : nullptr;
    if (!s)
        wait_for_all(cuda_of(d), &handle);
    (void)cudaFreeAsync(b.ptr, handle);
    (void)cudaGetLastError();
}

static bool is_host(const void *address)
{
    cudaPointerAttributes a = {};
    if (cudaPointerGetAttributes(&a, address) != cudaSuccess) {
        (void)cudaGetLastError();
        return true;
    }
    return a.type == cudaMemoryTypeUnregistered || a.type == cudaMemoryTypeHost;
}

ar_status copy(ar_device *d, ar_queue *q, ar_buf dst, ar_cbuf src, size_t bytes)
{
    cudaStream_t s;
    AR_TRY(enter(d, q, &s));
    if (bytes == 0)
        return AR_OK;
    AR_TRY(check(cudaMemcpyAsync(dst.ptr, src.ptr, bytes, cudaMemcpyDefault, s), "copying"));
    /* A copy from or to pageable host memory may still be running. The memory must outlive it, also when the caller
     * returns after an error. */
    return is_host(src.ptr) || is_host(dst.ptr) ? check(cudaStreamSynchronize(s), "copying from or to the host")
                                                : AR_OK;
}

ar_status zero(ar_device *d, ar_queue *q, ar_buf dst, size_t bytes)
{
    cudaStream_t s;
    AR_TRY(enter(d, q, &s));
    return bytes > 0 ? check(cudaMemsetAsync(dst.ptr, 0, bytes, s), "zeroing") : AR_OK;
}

/* --- the device --------------------------------------------------------------------------------------------------- */

/* Looks for a sticky error without waiting: cuBLAS and streams are not released on a lost GPU. */
static void find_sticky(const cuda_device *d)
{
    if (choose(d->gpu) != AR_OK)
        return;
    for (const stream *s = d->streams; s; s = s->next) {
        const cudaError_t e = cudaStreamQuery(s->handle);
        if (ari_gpu_error_is_sticky(e))
            (void)check(e, "work enqueued before");
    }
    (void)cudaGetLastError(); /* clears "not ready", which is no error */
}

void destroy(ar_device *base)
{
    cuda_device *d = cuda_of(base);
    find_sticky(d);
    blas_destroy(d->blas);
    while (d->streams) {
        stream *s = d->streams;
        d->streams = s->next;
        pool_leave(d->memory, &s->in_pool);
        if (!ari_gpu_is_lost())
            (void)cudaStreamDestroy(s->handle);
        ::free(s);
    }
    (void)cudaGetLastError();
    pool_close(d->memory);
    pthread_mutex_destroy(&d->lock);
    ::free(d);
}

static ar_status fill(cuda_device *d)
{
    AR_TRY(choose(d->gpu));
    AR_TRY(pool_open(&d->memory, d->gpu));
    return blas_create(&d->blas);
}

} // namespace ari_cuda

ar_status ari_gpu_choose(ar_device *d)
{
    return ari_cuda::choose(ari_cuda::cuda_of(d)->gpu);
}

ar_status ari_gpu_trim(ar_device *d)
{
    AR_TRY(ari_gpu_choose(d));
    return ari_cuda::pool_trim(ari_cuda::cuda_of(d)->memory, ari_cuda::cuda_of(d)->timeout_ns);
}

void ari_gpu_set_timeout(ar_device *d, uint64_t timeout_ns)
{
    ari_cuda::cuda_of(d)->timeout_ns = timeout_ns;
}

ar_status ari_gpu_native_stream(ar_device *d, ar_queue *q, void **borrows)
{
    cudaStream_t stream;
    AR_TRY(ari_cuda::enter(d, q, &stream));
    *borrows = stream;
    return AR_OK;
}

/* Default timeout: as long as ranks wait for each other by default. */
static const uint64_t TIMEOUT_NS = static_cast<uint64_t>(60) * 1000000000;

/* Enough rows of scores to keep every processor busy. */
static const size_t BLOCK_BYTES = static_cast<size_t>(64) << 20;

ar_status ari_device_cuda_create(ar_device **out, int index)
{
    using namespace ari_cuda;
    cuda_device *d = nullptr;
    ari_imma imma;
    AR_TRY(ari_imma_choose(&imma));
    AR_TRY(check_gpu(index));
    AR_TRY(ari_alloc_zero(reinterpret_cast<void **>(&d), 1, sizeof *d, "a CUDA device"));
    d->gpu = index;
    d->imma = imma;
    d->ops = table_of("cuda");
    d->base.ops = &d->ops;
    d->base.threads = 1;
    d->base.block_bytes = BLOCK_BYTES;
    d->timeout_ns = TIMEOUT_NS;
    const int rc = pthread_mutex_init(&d->lock, nullptr);
    if (rc != 0) {
        ::free(d);
        return ar_error_set(AR_ERR_MEMORY, "a CUDA device: no lock: %s", strerror(rc));
    }
    const ar_status st = fill(d);
    if (st != AR_OK) {
        destroy(&d->base);
        return st;
    }
    *out = &d->base;
    return AR_OK;
}
