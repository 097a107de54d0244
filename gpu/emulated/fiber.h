/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Annotations for ThreadSanitizer. One host thread runs in turns what a GPU runs at once. The sanitizer treats each as
 * a fiber, equivalent to a thread, and only these calls order two fibers. So it finds two accesses that a GPU could
 * make in either order, whatever the turns were. In other builds they are empty. */

#if defined(__SANITIZE_THREAD__)
#define ARI_WATCHED 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define ARI_WATCHED 1
#endif
#endif
#ifndef ARI_WATCHED
#define ARI_WATCHED 0
#endif

/* For functions that pass turns: they belong to no fiber. */
#if ARI_WATCHED
#define ARI_UNWATCHED __attribute__((no_sanitize("thread")))
extern "C" {
void *__tsan_get_current_fiber(void);
void *__tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void *fiber);
void __tsan_switch_to_fiber(void *fiber, unsigned flags);
void __tsan_acquire(void *address);
void __tsan_release(void *address);
}
#else
#define ARI_UNWATCHED
#endif

#include <stddef.h>

#include "anyrank/status.h"

namespace ari_emulated
{

struct fiber; /* NULL in other builds */

#if ARI_WATCHED
/* Returns the running fiber, which may be a host thread. */
ARI_UNWATCHED inline fiber *fiber_running()
{
    return static_cast<fiber *>(__tsan_get_current_fiber());
}
/* Creates a fiber, ordered after what its creator did. */
ARI_UNWATCHED inline fiber *fiber_create()
{
    return static_cast<fiber *>(__tsan_create_fiber(0));
}
ARI_UNWATCHED inline void fiber_destroy(fiber *f)
{
    __tsan_destroy_fiber(f);
}
/* Control passes to f at once, whose stack runs from here on. It orders nothing. */
ARI_UNWATCHED inline void fiber_go(fiber *f)
{
    const unsigned no_sync = 1;
    __tsan_switch_to_fiber(f, no_sync);
}
/* Orders the running fiber's past before what follows ordered_after(address) in other fibers. */
ARI_UNWATCHED inline void ordered_before(const void *address)
{
    __tsan_release(const_cast<void *>(address));
}
ARI_UNWATCHED inline void ordered_after(const void *address)
{
    __tsan_acquire(const_cast<void *>(address));
}
#else
inline fiber *fiber_running()
{
    return nullptr;
}
inline fiber *fiber_create()
{
    return nullptr;
}
inline void fiber_destroy(fiber *)
{
}
inline void fiber_go(fiber *)
{
}
inline void ordered_before(const void *)
{
}
inline void ordered_after(const void *)
{
}
#endif

/* Fiber with a stack, which runs a stream's tasks. A task starts after everything that its caller did before, but the
 * caller does not wait for it. */
struct worker;

#if ARI_WATCHED
/* Errors: AR_ERR_MEMORY. */
ar_status worker_create(worker **out);
void worker_destroy(worker *w); /* accepts NULL */
/* Runs run(a copy of arg) on the worker's stack. After an error, the caller is ordered after all work of the worker.
 * Errors: those of run, AR_ERR_MEMORY. */
ar_status worker_call(worker *w, ar_status (*run)(const void *arg), const void *arg, size_t bytes);
/* Order the caller after what a worker has done, and a worker after what the caller has done. */
void worker_before(worker *w, const void *address);
void worker_after(worker *w, const void *address);
#else
inline ar_status worker_create(worker **result)
{
    *result = nullptr;
    return AR_OK;
}
inline void worker_destroy(worker *)
{
}
inline ar_status worker_call(worker *, ar_status (*run)(const void *arg), const void *arg, size_t)
{
    return run(arg);
}
inline void worker_before(worker *, const void *)
{
}
inline void worker_after(worker *, const void *)
{
}
#endif

} // namespace ari_emulated
