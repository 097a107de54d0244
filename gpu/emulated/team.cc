/* SPDX-License-Identifier: Apache-2.0 */
/* A thread is a stack started by makecontext. From then on turns are passed by _setjmp and _longjmp, which need no
 * system calls; their fortified versions would refuse to jump to another stack. */
#undef _FORTIFY_SOURCE
#include <pthread.h>
#include <setjmp.h>
#include <stdlib.h>
#include <ucontext.h>

#include "gpu/emulated/fiber.h"
#include "gpu/kernel.h"

namespace ari_emulated
{

namespace
{

const size_t STACK = 128 << 10; /* stack size of a thread; kernels have few nested calls and no large arrays */

/* Position at which a thread waits. */
struct position {
    const barrier *sync_point; /* barrier at which the thread waits; NULL: it has ended */
    size_t n;
};

struct member {
    jmp_buf turn;
    bool begun;
    position waits;
    fiber *watched;
};

struct stage {
    team base; /* must be the first field, since a team * points to it */
    void (*body)(const void *arg, team *t);
    const void *arg;
    char *stacks;
    member *members;
    jmp_buf caller;
    fiber *calling;
    unsigned arrived;
    bool downwards; /* changes at each barrier */
    unsigned stray; /* a thread that is not at thread 0's position; 0: none */
    /* Synchronisation points for race detection: the state before the launch, and what each thread did before a barrier
     * and before the next one, so that a thread already at the next barrier is not considered ordered. */
    char start, gates[2];
};

/* Stage whose threads the calling host thread runs. */
thread_local stage *current;

void arrive(stage *s, const barrier *sync_point, size_t n);

ARI_UNWATCHED void run_thread(void)
{
    stage *s = current;
    ordered_after(&s->start);
    s->body(s->arg, &s->base);
    arrive(s, nullptr, 0); /* a thread that has ended is not resumed */
}

/* Leaves the calling stack for thread t's. */
[[noreturn]] ARI_UNWATCHED void resume(stage *s, unsigned t)
{
    member *m = &s->members[t];
    s->base.self = t;
    fiber_go(m->watched);
    if (m->begun)
        _longjmp(m->turn, 1);
    ucontext_t begin;
    m->begun = true;
    (void)getcontext(&begin);
    begin.uc_stack.ss_sp = s->stacks + t * STACK;
    begin.uc_stack.ss_size = STACK;
    begin.uc_link = nullptr;
    makecontext(&begin, run_thread, 0);
    (void)setcontext(&begin);
    abort(); /* a newly made context */
}

ARI_UNWATCHED void look_for_stray(stage *s)
{
    const position &reference = s->members[0].waits;
    for (unsigned t = 1; t < s->base.count && s->stray == 0; t++)
        if (s->members[t].waits.sync_point != reference.sync_point || s->members[t].waits.n != reference.n)
            s->stray = t;
}

/* When all have arrived, the last one continues at once: its turn is the first on the way back. */
ARI_UNWATCHED void arrive(stage *s, const barrier *sync_point, size_t n)
{
    const unsigned self = s->base.self;
    const char *gate = &s->gates[s->downwards];
    s->members[self].waits = {sync_point, n};
    ordered_before(gate);
    if (++s->arrived < s->base.count) {
        if (_setjmp(s->members[self].turn) == 0)
            resume(s, s->downwards ? self - 1 : self + 1);
        ordered_after(gate);
        return;
    }
    look_for_stray(s);
    s->arrived = 0;
    s->downwards = !s->downwards;
    if (!sync_point || s->stray != 0) {
        fiber_go(s->calling);
        _longjmp(s->caller, 1);
    }
    ordered_after(gate);
}

/* Separate function, so that none of its variables is read when _setjmp returns the second time. */
ARI_UNWATCHED __attribute__((noinline)) void run_all(stage *s)
{
    current = s;
    s->calling = fiber_running();
    ordered_before(&s->start);
    if (_setjmp(s->caller) == 0)
        resume(s, 0);
    ordered_after(&current->gates[0]);
    ordered_after(&current->gates[1]);
}

const char *name_of(const position &p)
{
    return p.sync_point ? p.sync_point->name : "the end";
}

ar_status parted(const stage *s)
{
    const position &reference = s->members[0].waits, &stray_position = s->members[s->stray].waits;
    return ar_error_set(
        AR_ERR_DEVICE,
        "a kernel's threads part: thread 0 waits at %.200s with n = %zu, thread %u at %.200s with n = %zu",
        name_of(reference), reference.n, s->stray, name_of(stray_position), stray_position.n);
}

/* --- fibers ------------------------------------------------------------------------------------------------------- */

/* Fibers of a host thread, saved from launch to launch because creating one takes a millisecond. */
struct kept_fibers {
    unsigned count;
    fiber *fibers[team::max_threads];
};

pthread_once_t once = PTHREAD_ONCE_INIT;
pthread_key_t key;
bool have_key;

ARI_UNWATCHED void forget(void *arg)
{
    kept_fibers *pool = static_cast<kept_fibers *>(arg);
    for (unsigned t = 0; t < pool->count; t++)
        fiber_destroy(pool->fibers[t]);
    ::free(pool);
}

void make_key(void)
{
    have_key = pthread_key_create(&key, forget) == 0;
}

/* False: no memory. */
ARI_UNWATCHED bool lend_fibers(stage *s)
{
    pthread_once(&once, make_key);
    kept_fibers *pool = have_key ? static_cast<kept_fibers *>(pthread_getspecific(key)) : nullptr;
    if (!pool && have_key) {
        pool = static_cast<kept_fibers *>(calloc(1, sizeof *pool));
        if (pool && pthread_setspecific(key, pool) != 0) {
            ::free(pool);
            pool = nullptr;
        }
    }
    for (unsigned t = 0; pool && t < s->base.count; t++) {
        if (t == pool->count)
            pool->fibers[pool->count++] = fiber_create();
        s->members[t].watched = pool->fibers[t];
    }
    return pool != nullptr;
}

/* Threads that have not ended leave unfinished fibers. */
void drop_fibers(void)
{
    forget(pthread_getspecific(key));
    (void)pthread_setspecific(key, nullptr);
}

void stage_destroy(stage *s)
{
    if (!s)
        return;
    ::free(s->base.part);
    ::free(s->stacks);
    ::free(s->members);
    ::free(s);
}

/* NULL: no memory. */
stage *stage_create(unsigned count)
{
    stage *s = static_cast<stage *>(calloc(1, sizeof *s));
    if (!s)
        return nullptr;
    s->base.count = count;
    s->base.part = static_cast<uint64_t *>(calloc(count, sizeof *s->base.part));
    s->stacks = static_cast<char *>(malloc(count * STACK));
    s->members = static_cast<member *>(calloc(count, sizeof *s->members));
    if (!s->base.part || !s->stacks || !s->members || (ARI_WATCHED && !lend_fibers(s))) {
        stage_destroy(s);
        return nullptr;
    }
    return s;
}

} // namespace

ARI_UNWATCHED void team::meet(const barrier *sync_point, size_t n)
{
    arrive(reinterpret_cast<stage *>(this), sync_point, n);
}

ar_status team_run(unsigned count, void (*body)(const void *arg, team *t), const void *arg)
{
    stage *s = stage_create(count);
    if (!s)
        return ar_error_set(AR_ERR_MEMORY, "no memory for the %u threads of a kernel's block", count);
    s->body = body;
    s->arg = arg;
    run_all(s);
    const ar_status st = s->stray != 0 ? parted(s) : AR_OK;
    if (ARI_WATCHED && st != AR_OK)
        drop_fibers();
    stage_destroy(s);
    return st;
}

} // namespace ari_emulated
