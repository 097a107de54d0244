/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/nccl/tcp.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gpu/nccl/launch.h"
#include "gpu/nccl/net.h"
#include "ref/core/clock.h"
#include "ref/core/size.h"

/* Processes without MPI. Each has two connections to process 0: the control's, and one for the bytes of broadcast and
 * gather, which go straight from memory to memory. */
enum { CONTROL, DATA, CHANNELS };
/* All others wait for process 0 alone, which waits for them: it is to find out first who keeps it waiting. */
#define PATIENCE_NS UINT64_C(250000000)
/* Where a connection ends, the control says who is gone and why, within this. */
enum { WORD_MS = 1000 };

typedef struct tcp_process {
    ar_process base;
    ari_control *control; /* NULL: there is no other process */
    int *data;            /* process 0: [size], [0] none; the others: [1], to process 0 */
    uint64_t calls;
} tcp_process;

/* Before the bytes of a call. */
typedef struct notice {
    uint32_t what;
    uint32_t unused;
    uint64_t number; /* of the call */
    uint64_t bytes;
} notice;
enum { BROADCAST = 1, GATHER = 2 };

static tcp_process *tcp_of(ar_process *p)
{
    return (tcp_process *)p;
}

static const char *name_of(uint32_t what)
{
    return what == BROADCAST ? "broadcast" : "gather";
}

/* --- what ends a call --------------------------------------------------------------------------------------------- */

/* Ends the world, for all wait in this call or will in the next; returns what everybody gets. */
static ar_status fail(tcp_process *t, ar_status st, const char *why)
{
    ari_control_fail(t->control, st, why);
    AR_TRY(ari_control_status(t->control));
    return ar_error_set(st, "%s", why);
}

static ar_status ended(tcp_process *t, ari_net_end end, uint32_t what, int peer)
{
    char why[256];
    if (end == ARI_NET_OK)
        return AR_OK;
    if (end == ARI_NET_WOKEN) {
        AR_TRY(ari_control_status(t->control));
        return ar_error_set(AR_ERR_INTERNAL, "woken in a %s for no reason", name_of(what));
    }
    if (end == ARI_NET_TIMEOUT) {
        snprintf(why, sizeof why, "rank %d waited %.3f s in a %s of the processes for rank %d", t->base.rank,
                 (double)t->base.options.timeout_ns * 1e-9, name_of(what), peer);
        return fail(t, AR_ERR_TIMEOUT, why);
    }
    /* Who has gone: the control hears it too, and of one that failed first it has heard more. */
    for (int ms = 0; ms < WORD_MS; ms += 10) {
        AR_TRY(ari_control_status(t->control));
        usleep(10000);
    }
    snprintf(why, sizeof why, "rank %d is gone: its connection was closed in a %s of the processes", peer,
             name_of(what));
    return fail(t, AR_ERR_ABORTED, why);
}

static ari_net_limit limit_of(tcp_process *t)
{
    const uint64_t longer = t->base.rank == 0 ? 0 : PATIENCE_NS;
    return (ari_net_limit){.idle_ns = ari_deadline_ns(t->base.options.timeout_ns, longer),
                           .wake_fd = ari_control_wake_fd(t->control)};
}

static ar_status put(tcp_process *t, int fd, int peer, uint32_t what, const void *bytes, size_t n)
{
    const notice head = {.what = what, .number = t->calls, .bytes = n};
    const ari_net_limit l = limit_of(t);
    ari_net_end end = ari_net_write(fd, &head, sizeof head, &l);
    if (end == ARI_NET_OK)
        end = ari_net_write(fd, bytes, n, &l);
    return ended(t, end, what, peer);
}

/* The head of what comes from the peer, which must be in the same call. */
static ar_status take_head(tcp_process *t, int fd, int peer, uint32_t what, size_t *n)
{
    const ari_net_limit l = limit_of(t);
    notice head;
    char why[256];
    AR_TRY(ended(t, ari_net_read(fd, &head, sizeof head, &l), what, peer));
    if (head.what == what && head.number == t->calls) {
        *n = (size_t)head.bytes;
        return AR_OK;
    }
    snprintf(why, sizeof why, "processes disagree: rank %d is in call %llu, a %s, and rank %d in call %llu, a %s",
             t->base.rank, (unsigned long long)t->calls, name_of(what), peer, (unsigned long long)head.number,
             name_of(head.what));
    return fail(t, AR_ERR_MISMATCH, why);
}

static ar_status take_bytes(tcp_process *t, int fd, int peer, uint32_t what, void *to, size_t n)
{
    const ari_net_limit l = limit_of(t);
    return ended(t, ari_net_read(fd, to, n, &l), what, peer);
}

static ar_status begin(tcp_process *t)
{
    t->calls++;
    return t->control ? ari_control_status(t->control) : AR_OK;
}

/* --- calls -------------------------------------------------------------------------------------------------------- */

static ar_status tcp_broadcast(ar_process *p, void *bytes, size_t n)
{
    tcp_process *t = tcp_of(p);
    AR_TRY(begin(t));
    if (p->rank == 0) {
        for (int r = 1; r < p->size; r++)
            AR_TRY(put(t, t->data[r], r, BROADCAST, bytes, n));
        return AR_OK;
    }
    size_t comes = 0;
    AR_TRY(take_head(t, t->data[0], 0, BROADCAST, &comes));
    if (comes != n) {
        char why[160];
        snprintf(why, sizeof why, "processes disagree: rank 0 broadcasts %zu bytes, rank %d expects %zu", comes,
                 p->rank, n);
        return fail(t, AR_ERR_MISMATCH, why);
    }
    return take_bytes(t, t->data[0], 0, BROADCAST, bytes, n);
}

/* Makes room for `more` bytes behind `used`. */
static ar_status grow(char **all, size_t used, size_t more)
{
    size_t total = 0;
    AR_TRY(ari_add_size(&total, used, more));
    char *larger = realloc(*all, total > 0 ? total : 1);
    if (!larger)
        return ar_error_set(AR_ERR_MEMORY, "no memory for %zu bytes from all processes", total);
    *all = larger;
    return AR_OK;
}

static ar_status gather_here(tcp_process *t, char **all, size_t *sizes, const void *bytes, size_t n)
{
    size_t used = 0;
    for (int r = 0; r < t->base.size; r++) {
        size_t comes = n;
        if (r > 0)
            AR_TRY(take_head(t, t->data[r], r, GATHER, &comes));
        AR_TRY(grow(all, used, comes));
        if (r > 0)
            AR_TRY(take_bytes(t, t->data[r], r, GATHER, *all + used, comes));
        else if (n > 0)
            memcpy(*all, bytes, n);
        if (sizes)
            sizes[r] = comes;
        used += comes;
    }
    return AR_OK;
}

static ar_status tcp_gather(ar_process *p, void **gives, size_t *sizes, const void *bytes, size_t n)
{
    tcp_process *t = tcp_of(p);
    char *all = NULL;
    *gives = NULL;
    AR_TRY(begin(t));
    if (p->rank != 0)
        return put(t, t->data[0], 0, GATHER, bytes, n);
    const ar_status st = gather_here(t, &all, sizes, bytes, n);
    if (st != AR_OK) {
        free(all);
        return st;
    }
    *gives = all;
    return AR_OK;
}

static void tcp_abort(ar_process *p, ar_status st, const char *why)
{
    char text[1024];
    snprintf(text, sizeof text, "rank %d aborted: %s", p->rank, why);
    if (tcp_of(p)->control)
        ari_control_fail(tcp_of(p)->control, st, text);
}

static void tcp_destroy(ar_process *p)
{
    tcp_process *t = tcp_of(p);
    ari_control_destroy(t->control);
    for (int r = 0; t->data && r < (p->rank == 0 ? p->size : 1); r++) {
        if (t->data[r] >= 0)
            close(t->data[r]);
    }
    free(t->data);
    free(t);
}

static const ari_process_ops tcp_ops = {
    .name = "tcp", .broadcast = tcp_broadcast, .gather = tcp_gather, .abort = tcp_abort, .destroy = tcp_destroy};

ari_control *ari_process_tcp_control(ar_process *p)
{
    return p->ops == &tcp_ops ? tcp_of(p)->control : NULL;
}

/* --- coming together ---------------------------------------------------------------------------------------------- */

/* Process 0's end: fds and names of all. */
static ar_status host_all(tcp_process *t, const ari_gate *g, const ari_launch *l)
{
    int listener = -1, port = 0, *fds = NULL;
    char(*names)[ARI_NAME_BYTES] = NULL;
    const size_t n = (size_t)g->size;
    ar_status st = ari_net_listen(&listener, &port, l->host, l->port);
    if (st != AR_OK)
        return st;
    AR_TRY_TO(done, st, ari_alloc((void **)&fds, 3 * n, sizeof *fds, "connections"));
    AR_TRY_TO(done, st, ari_alloc_zero((void **)&names, n, sizeof *names, "names of processes"));
    AR_TRY_TO(done, st, ari_alloc((void **)&t->data, n, sizeof *t->data, "connections"));
    for (size_t r = 0; r < n; r++)
        t->data[r] = -1;
    AR_TRY_TO(done, st, ari_gate_admit(g, listener, fds, names));
    ari_gate_name(names[0]);
    int *hub = fds + CHANNELS * n;
    for (size_t r = 0; r < n; r++) {
        hub[r] = fds[r * CHANNELS + CONTROL];
        t->data[r] = fds[r * CHANNELS + DATA];
    }
    const ari_control_options o = {.size = g->size, .timeout_ns = g->timeout_ns, .fd = -1, .hub = hub, .names = names};
    st = ari_control_create(&t->control, &o);
done:
    close(listener);
    free(names);
    free(fds);
    return st;
}

static ar_status join_all(tcp_process *t, const ari_gate *g, const ari_launch *l)
{
    int fds[CHANNELS];
    AR_TRY(ari_alloc((void **)&t->data, 1, sizeof *t->data, "connections"));
    t->data[0] = -1;
    AR_TRY(ari_gate_visit(g, l->host, l->port, fds));
    t->data[0] = fds[DATA];
    const ari_control_options o = {.rank = g->rank, .size = g->size, .timeout_ns = g->timeout_ns, .fd = fds[CONTROL]};
    return ari_control_create(&t->control, &o);
}

ar_status ari_process_tcp_create(ar_process **gives, const ar_process_options *o)
{
    ari_launch l;
    tcp_process *t = NULL;
    AR_TRY(ari_launch_read(&l));
    AR_TRY(ari_alloc_zero((void **)&t, 1, sizeof *t, "a process"));
    t->base = (ar_process){.ops = &tcp_ops, .rank = l.rank, .size = l.size, .local_rank = l.local_rank, .options = *o};
    const ari_gate g = {
        .rank = l.rank, .size = l.size, .channels = CHANNELS, .key = l.key, .timeout_ns = o->timeout_ns};
    const ar_status st = l.size == 1 ? AR_OK : l.rank == 0 ? host_all(t, &g, &l) : join_all(t, &g, &l);
    if (st != AR_OK) {
        tcp_destroy(&t->base);
        return st;
    }
    *gives = &t->base;
    return AR_OK;
}
