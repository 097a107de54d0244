/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "process/bootstrap.h"
#include "process/net.h"
#include "process/process.h"
#include "ref/core/clock.h"
#include "ref/core/size.h"

/* Processes without MPI. Each has two connections to process 0: the control's, and one for the bytes of broadcast and
 * gather, which go straight from memory to memory. */
/* All others wait for process 0 alone, which waits for them: it is to find out first who keeps it waiting. */
#define PATIENCE_NS UINT64_C(250000000)
/* Where a connection ends, the control knows who is gone and why, within this. */
enum { CONTROL_MS = 1000 };

typedef struct tcp_process {
    ar_process base;
    int *data; /* process 0: [size], [0] none; the others: [1], to process 0 */
    uint64_t calls;
} tcp_process;

/* Before the bytes of a call. */
typedef struct call_head {
    uint32_t what;
    uint32_t unused;
    uint64_t number; /* of the call */
    uint64_t bytes;
} call_head;
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

/* Ends the world, for all wait in this call or will in the next; returns what every process gets. */
static ar_status fail(tcp_process *t, ar_status st, const char *why)
{
    ari_control_fail(t->base.control, st, why);
    AR_TRY(ari_control_status(t->base.control));
    return ar_error_set(st, "%s", why);
}

static ar_status ended(tcp_process *t, ari_net_end end, uint32_t what, int peer)
{
    char why[256];
    if (end == ARI_NET_OK)
        return AR_OK;
    if (end == ARI_NET_WOKEN) {
        AR_TRY(ari_control_status(t->base.control));
        return ar_error_set(AR_ERR_INTERNAL, "woken in a %s for no reason", name_of(what));
    }
    if (end == ARI_NET_TIMEOUT) {
        snprintf(why, sizeof why, "rank %d waited %.3f s in a %s of the processes for rank %d", t->base.rank,
                 (double)t->base.options.timeout_ns * 1e-9, name_of(what), peer);
        return fail(t, AR_ERR_TIMEOUT, why);
    }
    /* A process has gone: the control learns it too, and knows more of one that failed first. */
    for (int ms = 0; ms < CONTROL_MS; ms += 10) {
        AR_TRY(ari_control_status(t->base.control));
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
                           .wake_fd = ari_control_wake_fd(t->base.control)};
}

static ar_status send_bytes(tcp_process *t, int fd, int peer, uint32_t what, const void *bytes, size_t n)
{
    const call_head head = {.what = what, .number = t->calls, .bytes = n};
    const ari_net_limit l = limit_of(t);
    ari_net_end end = ari_net_write(fd, &head, sizeof head, &l);
    if (end == ARI_NET_OK)
        end = ari_net_write(fd, bytes, n, &l);
    return ended(t, end, what, peer);
}

/* The head of what comes from the peer, which must be in the same call. */
static ar_status receive_head(tcp_process *t, int fd, int peer, uint32_t what, size_t *n)
{
    const ari_net_limit l = limit_of(t);
    call_head head;
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

static ar_status receive_bytes(tcp_process *t, int fd, int peer, uint32_t what, void *to, size_t n)
{
    const ari_net_limit l = limit_of(t);
    return ended(t, ari_net_read(fd, to, n, &l), what, peer);
}

static ar_status begin(tcp_process *t)
{
    t->calls++;
    return t->base.control ? ari_control_status(t->base.control) : AR_OK;
}

/* --- calls -------------------------------------------------------------------------------------------------------- */

static ar_status tcp_broadcast(ar_process *p, void *bytes, size_t n)
{
    tcp_process *t = tcp_of(p);
    AR_TRY(begin(t));
    if (p->rank == 0) {
        for (int r = 1; r < p->size; r++)
            AR_TRY(send_bytes(t, t->data[r], r, BROADCAST, bytes, n));
        return AR_OK;
    }
    size_t comes = 0;
    AR_TRY(receive_head(t, t->data[0], 0, BROADCAST, &comes));
    if (comes != n) {
        char why[160];
        snprintf(why, sizeof why, "processes disagree: rank 0 broadcasts %zu bytes, rank %d expects %zu", comes,
                 p->rank, n);
        return fail(t, AR_ERR_MISMATCH, why);
    }
    return receive_bytes(t, t->data[0], 0, BROADCAST, bytes, n);
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
            AR_TRY(receive_head(t, t->data[r], r, GATHER, &comes));
        AR_TRY(grow(all, used, comes));
        if (r > 0)
            AR_TRY(receive_bytes(t, t->data[r], r, GATHER, *all + used, comes));
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
        return send_bytes(t, t->data[0], 0, GATHER, bytes, n);
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
    if (p->control)
        ari_control_fail(p->control, st, text);
}

static void tcp_destroy(ar_process *p)
{
    tcp_process *t = tcp_of(p);
    ari_control_destroy(t->base.control);
    for (int r = 0; t->data && r < (p->rank == 0 ? p->size : 1); r++) {
        if (t->data[r] >= 0)
            close(t->data[r]);
    }
    free(t->data);
    free(t);
}

static const ari_process_ops tcp_ops = {
    .name = "tcp", .broadcast = tcp_broadcast, .gather = tcp_gather, .abort = tcp_abort, .destroy = tcp_destroy};

/* --- bootstrap ---------------------------------------------------------------------------------------------------- */

static ar_status connect_all(tcp_process *t, const ari_launch *l)
{
    const ari_bootstrap b = {.rank = l->rank, .size = l->size, .key = l->key, .timeout_ns = t->base.options.timeout_ns};
    const int most = l->rank == 0 ? l->size : 1;
    int listener = -1, port = 0;
    if (l->rank == 0)
        AR_TRY(ari_net_listen(&listener, &port, l->host, l->port));
    int *data = NULL;
    ar_status st = ari_alloc((void **)&data, (size_t)most, sizeof *data, "connections");
    if (st == AR_OK)
        st = l->rank == 0 ? ari_bootstrap_accept(&b, listener, data, &t->base.control)
                          : ari_bootstrap_connect(&b, l->host, l->port, data, &t->base.control);
    if (listener >= 0)
        close(listener);
    if (st == AR_OK)
        t->data = data;
    else
        free(data);
    return st;
}

ar_status ari_process_tcp_create(ar_process **gives, const ar_process_options *o)
{
    ari_launch l;
    tcp_process *t = NULL;
    AR_TRY(ari_launch_read(&l));
    AR_TRY(ari_alloc_zero((void **)&t, 1, sizeof *t, "a process"));
    t->base = (ar_process){.ops = &tcp_ops, .rank = l.rank, .size = l.size, .local_rank = l.local_rank, .options = *o};
    const ar_status st = l.size == 1 ? AR_OK : connect_all(t, &l);
    if (st != AR_OK) {
        tcp_destroy(&t->base);
        return st;
    }
    *gives = &t->base;
    return AR_OK;
}
