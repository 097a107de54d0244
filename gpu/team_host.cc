/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/team_host.h"

#include <stdlib.h>
#include <ucontext.h>

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
    ucontext_t caller, thread[team::most];
    position waits[team::most];
    unsigned arrived;
    bool downwards;
    unsigned stray; /* a thread that is not where thread 0 is; 0: none is */
};

/* Whose threads the calling one runs. */
thread_local stage *current;

/* Where all have come, the last one goes on at once; its turn is the first on the way back. */
void arrive(stage *s, const barrier *at, size_t n)
{
    team *t = &s->base;
    const unsigned self = t->self;
    s->waits[self] = {at, n};
    if (++s->arrived < t->count) {
        t->self = s->downwards ? self - 1 : self + 1;
        (void)swapcontext(&s->thread[self], &s->thread[t->self]);
        return;
    }
    for (unsigned i = 1; i < t->count && s->stray == 0; i++)
        if (s->waits[i].at != s->waits[0].at || s->waits[i].n != s->waits[0].n)
            s->stray = i;
    s->arrived = 0;
    s->downwards = !s->downwards;
    if (!at || s->stray != 0)
        (void)swapcontext(&s->thread[self], &s->caller); /* for good */
}

void run_thread(void)
{
    stage *s = current;
    s->body(s->arg, &s->base);
    arrive(s, nullptr, 0);
    (void)setcontext(&s->caller); /* not reached: nobody resumes a thread that has ended */
}

const char *name_of(const position &p)
{
    return p.at ? p.at->name : "the end";
}

ar_status parted(const stage *s)
{
    const position &first = s->waits[0], &other = s->waits[s->stray];
    return ar_error_set(AR_ERR_DEVICE,
                        "a kernel's threads part: thread 0 waits at %.200s with n = %zu, thread %u at %.200s with "
                        "n = %zu",
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
    for (unsigned i = 0; i < count; i++) {
        (void)getcontext(&s->thread[i]);
        s->thread[i].uc_stack.ss_sp = stacks + i * STACK;
        s->thread[i].uc_stack.ss_size = STACK;
        makecontext(&s->thread[i], run_thread, 0);
    }
    current = s;
    (void)swapcontext(&s->caller, &s->thread[0]);
    const ar_status st = s->stray != 0 ? parted(s) : AR_OK;
    free(stacks);
    free(s);
    return st;
}

} // namespace ari_emulated
