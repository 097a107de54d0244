/* SPDX-License-Identifier: Apache-2.0 */
/* A thread is a stack, begun by makecontext. From then on turns are passed by _setjmp and _longjmp, which ask nothing
 * of the kernel of the operating system; fortified, they would refuse to leave for another stack. */
#undef _FORTIFY_SOURCE
#include <setjmp.h>
#include <stdlib.h>
#include <ucontext.h>

#include "gpu/kernel.h"

namespace ari_emulated
{

namespace
{

const size_t STACK = 128 << 10; /* of a thread; a kernel calls little and has no large arrays */

/* Where a thread waits. */
struct position {
    const barrier *at; /* NULL: it has ended */
    size_t n;
};

struct stage {
    team base; /* first: a team is one of these */
    void (*body)(const void *arg, team *t);
    const void *arg;
    char *stacks;
    jmp_buf caller, thread[team::most];
    bool begun[team::most];
    position waits[team::most];
    unsigned arrived;
    bool downwards;
    unsigned stray; /* a thread that is not where thread 0 is; 0: none is */
};

/* Whose threads the calling one runs. */
thread_local stage *current;

void arrive(stage *s, const barrier *at, size_t n);

void run_thread(void)
{
    stage *s = current;
    s->body(s->arg, &s->base);
    arrive(s, nullptr, 0); /* nobody resumes a thread that has ended */
}

/* Leaves the calling stack for thread t's. */
[[noreturn]] void resume(stage *s, unsigned t)
{
    s->base.self = t;
    if (s->begun[t])
        _longjmp(s->thread[t], 1);
    ucontext_t begin;
    s->begun[t] = true;
    (void)getcontext(&begin);
    begin.uc_stack.ss_sp = s->stacks + t * STACK;
    begin.uc_stack.ss_size = STACK;
    begin.uc_link = nullptr;
    makecontext(&begin, run_thread, 0);
    (void)setcontext(&begin);
    abort(); /* a context that was just made */
}

void look_for_stray(stage *s)
{
    for (unsigned t = 1; t < s->base.count && s->stray == 0; t++)
        if (s->waits[t].at != s->waits[0].at || s->waits[t].n != s->waits[0].n)
            s->stray = t;
}

/* Where all have come, the last one goes on at once: its turn is the first on the way back. */
void arrive(stage *s, const barrier *at, size_t n)
{
    const unsigned self = s->base.self;
    s->waits[self] = {at, n};
    if (++s->arrived < s->base.count) {
        if (_setjmp(s->thread[self]) == 0)
            resume(s, s->downwards ? self - 1 : self + 1);
        return;
    }
    look_for_stray(s);
    s->arrived = 0;
    s->downwards = !s->downwards;
    if (!at || s->stray != 0)
        _longjmp(s->caller, 1);
}

/* A function of its own: no variable of it is looked at when _setjmp returns again. */
__attribute__((noinline)) void run_all(stage *s)
{
    current = s;
    if (_setjmp(s->caller) == 0)
        resume(s, 0);
}

const char *name_of(const position &p)
{
    return p.at ? p.at->name : "the end";
}

ar_status parted(const stage *s)
{
    const position &first = s->waits[0], &other = s->waits[s->stray];
    return ar_error_set(
        AR_ERR_DEVICE,
        "a kernel's threads part: thread 0 waits at %.200s with n = %zu, thread %u at %.200s with n = %zu",
        name_of(first), first.n, s->stray, name_of(other), other.n);
}

} // namespace

void team::meet(const barrier *here, size_t n)
{
    arrive(reinterpret_cast<stage *>(this), here, n);
}

ar_status team_run(unsigned count, void (*body)(const void *arg, team *t), const void *arg)
{
    stage *s = static_cast<stage *>(calloc(1, sizeof *s));
    char *stacks = static_cast<char *>(malloc(count * STACK));
    if (!s || !stacks) {
        free(stacks);
        free(s);
        return ar_error_set(AR_ERR_MEMORY, "no memory for the threads of a kernel");
    }
    s->base.count = count;
    s->body = body;
    s->arg = arg;
    s->stacks = stacks;
    run_all(s);
    const ar_status st = s->stray != 0 ? parted(s) : AR_OK;
    free(stacks);
    free(s);
    return st;
}

} // namespace ari_emulated
