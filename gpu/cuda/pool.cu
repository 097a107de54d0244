/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/cuda/pool.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "gpu/kernel.h"
#include "gpu/native.h"
#include "gpu/report/sticky.h"
#include "ref/core/clock.h"
#include "ref/core/size.h"

namespace ari_cuda
{

struct pool {
    int gpu;
    cudaMemPool_t handle;
    size_t devices; /* number of devices that have the pool open */
    pool_stream *streams;
    pool *next;
};

namespace
{

/* One pool for each GPU in use. The lock guards the list, and `devices` and `streams`. */
pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
pool *pools;

/* Lets GPU `gpu` read and write the pool's memory, present and future, if it can reach the pool's GPU at all. */
ar_status allow(const pool *p, int gpu)
{
    if (!ari_gpu_reaches(gpu, p->gpu))
        return AR_OK;
    cudaMemAccessDesc access = {};
    access.location.type = cudaMemLocationTypeDevice;
    access.location.id = gpu;
    access.flags = cudaMemAccessFlagsProtReadWrite;
    return check(cudaMemPoolSetAccess(p->handle, &access, 1), "letting another GPU use its memory");
}

/* Lets GPUs access each other's pools. Between ranks that are threads, NCCL reads and writes other ranks' buffers; it
 * enables that itself for memory of cudaMalloc, but not for a pool's memory. */
ar_status allow_each_other(const pool *p)
{
    for (const pool *peer = pools; peer; peer = peer->next) {
        AR_TRY(allow(p, peer->gpu));
        AR_TRY(allow(peer, p->gpu));
    }
    return AR_OK;
}

ar_status create_pool(pool **out, int gpu)
{
    pool *p = nullptr;
    AR_TRY(ari_alloc_zero(reinterpret_cast<void **>(&p), 1, sizeof *p, "the pool of a GPU's memory"));
    p->gpu = gpu;
    cudaMemPoolProps props = {};
    props.allocType = cudaMemAllocationTypePinned;
    props.location.type = cudaMemLocationTypeDevice;
    props.location.id = gpu;
    uint64_t keep_all = UINT64_MAX; /* keep all memory until the pool is trimmed */
    /* Prevents reuse of memory freed by another stream after a wait for that stream: such a wait, which no rank
     * requested, could end up between collectives in a different order than on another rank. */
    int no_waits = 0;
    ar_status st = check(cudaMemPoolCreate(&p->handle, &props), "making a pool of its memory");
    if (st == AR_OK)
        st =
            check(cudaMemPoolSetAttribute(p->handle, cudaMemPoolAttrReleaseThreshold, &keep_all), "keeping its memory");
    if (st == AR_OK)
        st = check(cudaMemPoolSetAttribute(p->handle, cudaMemPoolReuseAllowInternalDependencies, &no_waits),
                   "keeping its streams apart");
    if (st == AR_OK)
        st = allow_each_other(p);
    if (st != AR_OK) {
        if (p->handle)
            (void)cudaMemPoolDestroy(p->handle);
        ::free(p);
        return st;
    }
    p->next = pools;
    pools = p;
    *out = p;
    return AR_OK;
}

ar_status refuse(const pool *p, size_t bytes)
{
    size_t free_bytes = 0, total = 0;
    uint64_t reserved = 0, in_use = 0;
    (void)cudaMemGetInfo(&free_bytes, &total);
    (void)cudaMemPoolGetAttribute(p->handle, cudaMemPoolAttrReservedMemCurrent, &reserved);
    (void)cudaMemPoolGetAttribute(p->handle, cudaMemPoolAttrUsedMemCurrent, &in_use);
    (void)cudaGetLastError();
    return ar_error_set(
        AR_ERR_MEMORY,
        "GPU %d has no memory for %zu bytes: %zu of %zu are free, this process uses %llu and keeps %llu for reuse",
        p->gpu, bytes, free_bytes, total, static_cast<unsigned long long>(in_use),
        static_cast<unsigned long long>(reserved - in_use));
}

/* `lock` held. Records an event on each stream. */
ar_status mark_streams(const pool *p)
{
    for (pool_stream *s = p->streams; s; s = s->next) {
        if (!s->passed)
            AR_TRY(check(cudaEventCreateWithFlags(&s->passed, cudaEventDisableTiming), "making an event"));
        AR_TRY(check(cudaEventRecord(s->passed, s->handle), "recording"));
    }
    return AR_OK;
}

/* `lock` held. */
ar_status poll_streams(const pool *p, bool *is_done)
{
    cudaError_t e = cudaSuccess;
    for (const pool_stream *s = p->streams; s && e == cudaSuccess; s = s->next)
        e = s->passed ? cudaEventQuery(s->passed) : cudaSuccess;
    *is_done = e != cudaErrorNotReady;
    if (*is_done)
        return check(e, "work enqueued before");
    (void)cudaGetLastError(); /* clears the status, which is no error */
    return AR_OK;
}

/* Waits until the joined streams have passed their events. The lock is released between two checks, so that another
 * device on the GPU can be created or destroyed. */
ar_status await_streams(const pool *p, uint64_t timeout_ns)
{
    const struct timespec nap = {0, 20000};
    const uint64_t since = ari_now_ns();
    bool is_done = false;
    pthread_mutex_lock(&lock);
    ar_status st = mark_streams(p);
    while (st == AR_OK && (st = poll_streams(p, &is_done)) == AR_OK && !is_done) {
        pthread_mutex_unlock(&lock);
        (void)nanosleep(&nap, nullptr);
        const uint64_t waited = ari_now_ns() - since;
        if (waited >= timeout_ns)
            st = ar_error_set(AR_ERR_TIMEOUT, "GPU %d needs memory, and has not done what was enqueued after %.3f s",
                              p->gpu, static_cast<double>(waited) * 1e-9);
        pthread_mutex_lock(&lock);
    }
    pthread_mutex_unlock(&lock);
    return st;
}

} // namespace

ar_status pool_open(pool **out, int gpu)
{
    ar_status st = AR_OK;
    pthread_mutex_lock(&lock);
    pool *p = pools;
    while (p && p->gpu != gpu)
        p = p->next;
    if (!p)
        st = create_pool(&p, gpu);
    if (st == AR_OK) {
        p->devices++;
        *out = p;
    }
    pthread_mutex_unlock(&lock);
    return st;
}

void pool_close(pool *p)
{
    if (!p)
        return;
    pthread_mutex_lock(&lock);
    if (--p->devices == 0) {
        pool **slot = &pools;
        while (*slot != p)
            slot = &(*slot)->next;
        *slot = p->next;
        if (!ari_gpu_is_lost())
            (void)cudaMemPoolDestroy(p->handle);
        (void)cudaGetLastError();
        ::free(p);
    }
    pthread_mutex_unlock(&lock);
}

void pool_join(pool *p, pool_stream *s)
{
    pthread_mutex_lock(&lock);
    s->next = p->streams;
    p->streams = s;
    pthread_mutex_unlock(&lock);
}

void pool_leave(pool *p, pool_stream *s)
{
    pthread_mutex_lock(&lock);
    pool_stream **link = &p->streams;
    while (*link != s)
        link = &(*link)->next;
    *link = s->next;
    pthread_mutex_unlock(&lock);
    if (s->passed && !ari_gpu_is_lost())
        (void)cudaEventDestroy(s->passed);
}

ar_status pool_trim(pool *p, uint64_t timeout_ns)
{
    AR_TRY(await_streams(p, timeout_ns));
    return check(cudaMemPoolTrimTo(p->handle, 0), "giving memory back");
}

ar_status pool_take(pool *p, void **out, size_t bytes, cudaStream_t s, uint64_t timeout_ns)
{
    const size_t wanted = bytes > 0 ? bytes : 1; /* so that it has an address */
    cudaError_t e = cudaMallocFromPoolAsync(out, wanted, p->handle, s);
    if (e == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        AR_TRY(pool_trim(p, timeout_ns));
        e = cudaMallocFromPoolAsync(out, wanted, p->handle, s);
    }
    if (e == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        return refuse(p, bytes);
    }
    return check(e, "taking memory");
}

} // namespace ari_cuda
