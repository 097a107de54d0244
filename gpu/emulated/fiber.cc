/* SPDX-License-Identifier: Apache-2.0 */
/* As in gpu/emulated/team.cc: setcontext enters a stack and _longjmp leaves it. */
#undef _FORTIFY_SOURCE
#include "gpu/emulated/fiber.h"

#if ARI_WATCHED
#include <pthread.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

namespace ari_emulated
{

namespace
{

const size_t STACK = 512 << 10; /* a kernel's threads have their own stacks */

} // namespace

struct worker {
    pthread_mutex_t lock; /* marks by a thread what another thread does for it */
    fiber *self, *caller;
    char *stack;
    jmp_buf back;
    ar_status (*run)(const void *arg);
    void *arg; /* own copy: the caller's memory may be reused before anything waits */
    ar_status status;
    char called, done; /* synchronisation points */
};

namespace
{

thread_local worker *current;

ARI_UNWATCHED void work(void)
{
    worker *w = current;
    ordered_after(&w->called);
    w->status = w->run(w->arg);
    free(w->arg);
    if (w->status != AR_OK)
        ordered_before(&w->done);
    fiber_go(w->caller);
    _longjmp(w->back, 1);
}

/* Separate function, so that none of its variables is read when _setjmp returns the second time. */
ARI_UNWATCHED __attribute__((noinline)) void enter_stack(worker *w)
{
    ucontext_t begin;
    if (_setjmp(w->back) != 0)
        return;
    fiber_go(w->self);
    (void)getcontext(&begin);
    begin.uc_stack.ss_sp = w->stack;
    begin.uc_stack.ss_size = STACK;
    begin.uc_link = nullptr;
    makecontext(&begin, work, 0);
    (void)setcontext(&begin);
    abort(); /* a newly made context */
}

} // namespace

ar_status worker_create(worker **out)
{
    worker *w = static_cast<worker *>(calloc(1, sizeof *w));
    if (w)
        w->stack = static_cast<char *>(malloc(STACK));
    if (!w || !w->stack) {
        free(w);
        return ar_error_set(AR_ERR_MEMORY, "no memory for a stream's stack");
    }
    pthread_mutex_init(&w->lock, nullptr);
    w->self = fiber_create();
    *out = w;
    return AR_OK;
}

void worker_destroy(worker *w)
{
    if (!w)
        return;
    fiber_destroy(w->self);
    pthread_mutex_destroy(&w->lock);
    free(w->stack);
    free(w);
}

ARI_UNWATCHED ar_status worker_call(worker *w, ar_status (*run)(const void *arg), const void *arg, size_t bytes)
{
    void *copy = malloc(bytes);
    if (!copy)
        return ar_error_set(AR_ERR_MEMORY, "no memory for what a stream is to do");
    memcpy(copy, arg, bytes);
    pthread_mutex_lock(&w->lock);
    w->run = run;
    w->arg = copy;
    w->caller = fiber_running();
    current = w;
    ordered_before(&w->called);
    enter_stack(w);
    const ar_status st = w->status;
    if (st != AR_OK)
        ordered_after(&w->done);
    pthread_mutex_unlock(&w->lock);
    return st;
}

ARI_UNWATCHED void worker_before(worker *w, const void *address)
{
    pthread_mutex_lock(&w->lock);
    fiber *caller = fiber_running();
    fiber_go(w->self);
    ordered_before(address);
    fiber_go(caller);
    pthread_mutex_unlock(&w->lock);
}

ARI_UNWATCHED void worker_after(worker *w, const void *address)
{
    pthread_mutex_lock(&w->lock);
    fiber *caller = fiber_running();
    fiber_go(w->self);
    ordered_after(address);
    fiber_go(caller);
    pthread_mutex_unlock(&w->lock);
}

} // namespace ari_emulated
#endif
