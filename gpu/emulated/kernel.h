/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* gpu/kernel.h for a C++ compiler: grids and blocks are loops. */
#include <stdint.h>
#include <string.h>

#include "anyrank/device.h"
#include "gpu/emulated/fiber.h"

#define ARI_GPU ari_emulated
#define ARI_ON_GPU
/* Declares arrays in the memory that each host thread has once for the block that it runs, like a GPU's multiprocessor.
 * Separate arrays for each kernel would need 340 KB in every thread. A second use in a kernel does not compile. */
#define ARI_SHARED(type, name, extents)                                                             \
    constexpr bool one_shared_array_a_kernel = sizeof(type extents) <= sizeof ::ari_emulated::room; \
    static_assert(one_shared_array_a_kernel, "a GPU's block has no more");                          \
    type(&name) extents = *reinterpret_cast<type(*) extents>(::ari_emulated::room)

/* A function's hot loop is compiled once per x86-64 level; the loader picks. The bits are the same. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(ARI_SANITIZED) && defined(__OPTIMIZE__)
#define ARI_HOT __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), optimize("O3")))
#else
#define ARI_HOT
#endif

namespace ari_emulated
{

alignas(64) inline thread_local unsigned char room[48 * 1024];

/* Order of execution: blocks, elements and members ascending; all of these descending; or the threads of a block
 * interleaved. */
enum class order { forward, backward, threads };

/* Called before a launch. Errors: AR_ERR_DEVICE (an address given to dev<>() since this thread's last launch is not
 * device memory, which a GPU would call an illegal address); the error of a kernel that ran late. */
ar_status enter(ar_device *d, ar_queue *q, order *o);

/* Runs run(arg) on a stream, now or later; the stream keeps a copy of arg until then. */
ar_status submit(ar_queue *q, ar_status (*run)(const void *arg), const void *arg, size_t bytes);
template <class T> ar_status submit(ar_queue *q, const T &call)
{
    static_assert(__is_trivially_copyable(T) && alignof(T) <= 16, "it is copied as its bytes");
    return submit(q, T::run, &call, sizeof call);
}

/* The host's address of the device's memory, which only kernels know. NULL stays NULL. */
void *reach(const void *device_address);

/* Returns a buffer's memory as a pointer for kernels. */
template <class T> T *dev(ar_buf b)
{
    return static_cast<T *>(reach(b.ptr));
}
template <class T> const T *dev(ar_cbuf b)
{
    return static_cast<const T *>(reach(b.ptr));
}

/* Threads of a block as on a GPU, each with its own copy of every variable, run in turns on one host thread: a thread
 * runs until it reaches a barrier, then the next one runs. This reveals what a kernel leaves to chance: a variable that
 * one thread writes and another reads, threads that diverge at a branch and wait at different barriers, an element that
 * is read before another thread has written it. */

/* Barrier in a kernel, identified by its position in the source. */
struct barrier {
    const char *name;
};

struct team {
    static const unsigned max_threads = 512; /* as in a GPU's block (gpu/cuda/kernel.h) */
    unsigned count, self;                    /* number of threads, and of the running thread */
    uint64_t *part;                          /* one word per thread, for combined results */

    /* Waits until all threads have arrived with the same n. From one barrier to the next, the threads run in ascending
     * order, then in descending order. */
    void meet(const barrier *sync_point, size_t n);
};

/* Runs body(arg, team) in each of `count` threads, at most team::most. Errors: AR_ERR_DEVICE (threads met at different
 * barriers, or some did not end); AR_ERR_MEMORY. */
ar_status team_run(unsigned count, void (*body)(const void *arg, team *t), const void *arg);
/* The number of threads of a block of this device in the order `threads`. */
unsigned team_size(const ar_device *d);

class block
{
  public:
    size_t index;
    bool backward;
    team *threads; /* NULL: one thread does the work of all */

    template <class F> void each(size_t n, F f) const
    {
        static const barrier sync_point = {__PRETTY_FUNCTION__};
        meet(&sync_point, n);
        for (size_t i = first_index(); i < n; i += step())
            f(backward ? n - 1 - i : i);
        meet(&sync_point, n);
    }
    template <class F> uint64_t sum(size_t n, F f) const
    {
        static const barrier sync_point = {__PRETTY_FUNCTION__};
        uint64_t s = 0;
        meet(&sync_point, n);
        for (size_t i = first_index(); i < n; i += step())
            s += static_cast<uint64_t>(f(backward ? n - 1 - i : i));
        if (!threads)
            return s;
        threads->part[threads->self] = s;
        meet(&sync_point, n);
        s = 0;
        for (unsigned t = 0; t < threads->count; t++)
            s += threads->part[t];
        return s;
    }
    template <class F> int32_t max(size_t n, F f) const
    {
        static const barrier sync_point = {__PRETTY_FUNCTION__};
        int32_t m = INT32_MIN;
        meet(&sync_point, n);
        for (size_t i = first_index(); i < n; i += step()) {
            const int32_t v = f(backward ? n - 1 - i : i);
            m = v > m ? v : m;
        }
        if (!threads)
            return m;
        threads->part[threads->self] = static_cast<uint32_t>(m);
        meet(&sync_point, n);
        for (unsigned t = 0; t < threads->count; t++) {
            const int32_t v = static_cast<int32_t>(static_cast<uint32_t>(threads->part[t]));
            m = v > m ? v : m;
        }
        return m;
    }

  private:
    void meet(const barrier *sync_point, size_t n) const
    {
        if (threads)
            threads->meet(sync_point, n);
    }
    size_t first_index() const
    {
        return threads ? threads->self : 0;
    }
    size_t step() const
    {
        return threads ? threads->count : 1;
    }
};

inline void atomic_add(int64_t *target, int64_t v)
{
    __atomic_fetch_add(reinterpret_cast<uint64_t *>(target), static_cast<uint64_t>(v), __ATOMIC_RELAXED);
}
inline void atomic_max(int32_t *target, int32_t v)
{
    int32_t old = __atomic_load_n(target, __ATOMIC_RELAXED);
    while (v > old && !__atomic_compare_exchange_n(target, &old, v, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
}

inline int32_t dot_bytes(int32_t sum, uint32_t a, uint32_t b)
{
    for (int i = 0; i < 32; i += 8)
        sum += static_cast<int8_t>(a >> i) * static_cast<int8_t>(b >> i);
    return sum;
}

/* True after a fault in this thread's launch. */
inline thread_local bool faulted = false;

inline void fault()
{
    __atomic_store_n(&faulted, true, __ATOMIC_RELAXED); /* several threads of a block may write it */
}
/* A GPU fails at unaligned addresses. Copied by bytes, because the compiler could otherwise assume that every address
 * is aligned. */
template <size_t N, class T> ari_lanes<T, N> load_whole(const T *src)
{
    ari_lanes<T, N> x;
    if (reinterpret_cast<uintptr_t>(src) % sizeof x != 0)
        fault();
    memcpy(&x, src, sizeof x);
    return x;
}
template <class T, size_t N> void store_whole(T *dst, const ari_lanes<T, N> &x)
{
    if (reinterpret_cast<uintptr_t>(dst) % sizeof x != 0)
        fault();
    memcpy(dst, &x, sizeof x);
}
inline ar_status launched()
{
    const bool wrong = __atomic_exchange_n(&faulted, false, __ATOMIC_RELAXED);
    return wrong ? ar_error_set(AR_ERR_DEVICE,
                                "a kernel was given an index that is out of range, or an address that is not aligned")
                 : AR_OK;
}

/* A launch of elements. */
template <class F> struct elements {
    F f;
    size_t n;
    order runs;
    unsigned threads; /* threads of a block */

    /* Runs one thread of a team, for ThreadSanitizer, which checks that threads write separate elements. */
    static void run_team(const void *arg, team *t)
    {
        const elements *kernel = static_cast<const elements *>(arg);
        for (size_t i = t->self; i < kernel->n; i += t->count)
            kernel->f(i);
    }
    static ar_status run(const void *arg)
    {
        const elements *kernel = static_cast<const elements *>(arg);
        if (ARI_WATCHED && kernel->runs == order::threads) {
            AR_TRY(team_run(kernel->threads, run_team, arg));
            return launched();
        }
        for (size_t i = 0; i < kernel->n; i++)
            kernel->f(kernel->runs == order::backward ? kernel->n - 1 - i : i);
        return launched();
    }
};

/* A launch of blocks. */
template <class F> struct blocks {
    F f;
    size_t n;
    order runs;
    unsigned threads; /* threads of a block */

    /* Runs one thread of a team: all blocks in order. */
    static void run_team(const void *arg, team *t)
    {
        static const barrier end = {"the end of a block"};
        const blocks *kernel = static_cast<const blocks *>(arg);
        for (size_t i = 0; i < kernel->n; i++) {
            kernel->f(block{i, false, t});
            t->meet(&end, i);
        }
    }
    static ar_status run(const void *arg)
    {
        const blocks *kernel = static_cast<const blocks *>(arg);
        const bool backward = kernel->runs == order::backward;
        if (kernel->runs == order::threads && kernel->n > 0) {
            AR_TRY(team_run(kernel->threads, run_team, arg));
            return launched();
        }
        for (size_t i = 0; i < kernel->n; i++)
            kernel->f(block{backward ? kernel->n - 1 - i : i, backward, nullptr});
        return launched();
    }
};

template <class F> ar_status launch_each(ar_device *d, ar_queue *q, size_t n, const F &f)
{
    order o;
    AR_TRY(enter(d, q, &o));
    return submit(q, elements<F>{f, n, o, team_size(d)});
}

template <class F> ar_status launch_blocks(ar_device *d, ar_queue *q, size_t n, size_t width, const F &f)
{
    order o;
    (void)width;
    AR_TRY(enter(d, q, &o));
    return submit(q, blocks<F>{f, n, o, team_size(d)});
}

} // namespace ari_emulated
