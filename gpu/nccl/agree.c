/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "gpu/nccl/comm.h"
#include "ref/comm/rendezvous_impl.h"
#include "ref/core/size.h"

/* What members tell each other of a call: this, then counts, what is expected, operations, and the tag with its 0. */
typedef struct told {
    int32_t kind, dtype, op, root, peer;
    uint32_t counts, recv_counts, p2p; /* elements */
    uint64_t count;
} told;
typedef struct told_op {
    int32_t peer, send;
    uint64_t count;
} told_op;

static void *put(char **at, const void *from, size_t bytes)
{
    void *to = *at;
    ari_copy_bytes(to, from, bytes);
    *at += bytes;
    return to;
}

/* Gives; free(). */
static ar_status tell(char **gives, size_t *size, const ari_call *call, int n)
{
    const told t = {.kind = (int32_t)call->kind,
                    .dtype = (int32_t)call->dtype,
                    .op = (int32_t)call->op,
                    .root = call->root,
                    .peer = call->peer,
                    .counts = call->counts ? (uint32_t)n : 0,
                    .recv_counts = call->recv_counts ? (uint32_t)n : 0,
                    .p2p = call->p2p ? (uint32_t)call->count : 0,
                    .count = call->count};
    const size_t tag = strlen(call->tag) + 1;
    *size = sizeof t + (t.counts + (size_t)t.recv_counts) * sizeof(size_t) + t.p2p * sizeof(told_op) + tag;
    AR_TRY(ari_alloc((void **)gives, *size, 1, "what is told of a collective"));
    char *at = *gives;
    put(&at, &t, sizeof t);
    put(&at, call->counts, t.counts * sizeof(size_t));
    put(&at, call->recv_counts, t.recv_counts * sizeof(size_t));
    for (uint32_t i = 0; i < t.p2p; i++) {
        const told_op op = {call->p2p[i].peer, call->p2p[i].send, call->p2p[i].count};
        put(&at, &op, sizeof op);
    }
    put(&at, call->tag, tag);
    return AR_OK;
}

/* The call that `bytes` tell of. Its arrays are `store`, to be freed. False: they tell of none. */
static bool understand(ari_call *call, void **store, const char *bytes, size_t size, int n)
{
    told t;
    *store = NULL;
    if (size < sizeof t)
        return false;
    memcpy(&t, bytes, sizeof t);
    const size_t counts = (t.counts + (size_t)t.recv_counts) * sizeof(size_t), ops = t.p2p * sizeof(told_op);
    const bool whole =
        (t.counts == 0 || t.counts == (uint32_t)n) && (t.recv_counts == 0 || t.recv_counts == (uint32_t)n);
    if (!whole || size < sizeof t + counts + ops + 1 || bytes[size - 1] != '\0')
        return false;
    char *at = malloc(counts + t.p2p * sizeof(ar_p2p) + 1);
    if (!at)
        return false;
    *store = at;
    bytes += sizeof t;
    *call = (ari_call){.kind = (ari_kind)t.kind,
                       .dtype = (ar_dtype)t.dtype,
                       .op = (ar_op)t.op,
                       .root = t.root,
                       .peer = t.peer,
                       .count = (size_t)t.count,
                       .tag = bytes + counts + ops};
    const size_t *numbers = put(&at, bytes, counts);
    call->counts = t.counts ? numbers : NULL;
    call->recv_counts = t.recv_counts ? numbers + t.counts : NULL;
    ar_p2p *p2p = (ar_p2p *)(void *)at;
    for (uint32_t i = 0; i < t.p2p; i++) {
        told_op op;
        memcpy(&op, bytes + counts + i * sizeof op, sizeof op);
        p2p[i] = (ar_p2p){.peer = op.peer, .send = op.send != 0, .count = (size_t)op.count};
    }
    call->p2p = t.p2p ? p2p : NULL;
    return true;
}

/* The comparison is that of ranks that meet in one process: it sees a group whose members have all called. */
static ar_status compare(const ari_flight_group *g, uint64_t seq, const ari_gifts *gifts)
{
    const size_t n = (size_t)g->n;
    char why[768];
    ar_status st = AR_OK;
    void **store = NULL;
    ari_slot *slot = aligned_alloc(_Alignof(ari_slot), n * sizeof *slot);
    if (!slot)
        return ar_error_set(AR_ERR_MEMORY, "no memory to compare %zu calls", n);
    memset(slot, 0, n * sizeof *slot);
    AR_TRY_TO(done, st, ari_alloc_zero((void **)&store, n, sizeof *store, "calls to compare"));
    for (size_t i = 0; i < n && st == AR_OK; i++) {
        atomic_init(&slot[i].entered, seq);
        if (!understand(&slot[i].call, &store[i], gifts->at + gifts->start[i], gifts->start[i + 1] - gifts->start[i],
                        g->n))
            st = ar_error_set(AR_ERR_INTERNAL, "rank %d tells of no collective, or no memory is left", g->rank[i]);
    }
    if (st == AR_OK) {
        const ari_group group = {.n = g->n, .rank = g->rank, .slot = slot};
        st = ari_calls_compare(&group, why, sizeof why);
        if (st != AR_OK)
            st = ar_error_set(st, "%s", why);
    }
done:
    for (size_t i = 0; store && i < n; i++)
        free(store[i]);
    free(store);
    free(slot);
    return st;
}

static int index_in(const ari_flight_group *g, int rank)
{
    int i = 0;
    while (i < g->n && g->rank[i] != rank)
        i++;
    return i;
}

ar_status ari_nccl_agree(ari_nccl_comm *c, const ari_flight_group *g, const ari_call *call)
{
    char *bytes = NULL;
    size_t size = 0;
    ari_gifts gifts;
    const uint64_t seq = g->entered;
    AR_TRY(tell(&bytes, &size, call, g->n));
    ar_status st =
        ari_control_exchange(c->world->control, g->id, seq, index_in(g, c->world->rank), g->n, bytes, size, &gifts);
    free(bytes);
    AR_TRY(st);
    st = compare(g, seq, &gifts);
    ari_gifts_fini(&gifts);
    if (st != AR_OK) /* every member finds the same, and keeps it */
        ari_control_agree_failed(c->world->control, st);
    return st;
}
