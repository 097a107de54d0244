/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/cluster/process/agree.h"

#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"

/* Followed by counts, expected counts, operations, and the tag with its NUL, filled up to 8 bytes. */
typedef struct encoded {
    uint64_t count;
    int32_t kind, dtype, op, root, peer, color, key;
    uint32_t counts, recv_counts, p2p, tag_bytes; /* elements; bytes of the tag as filled up */
    uint32_t unused;
} encoded;
typedef struct encoded_op {
    int32_t peer, send;
    uint64_t count;
} encoded_op;

/* Counts are decoded where they are. */
_Static_assert(sizeof(size_t) == sizeof(uint64_t) && sizeof(encoded) % 8 == 0, "a machine of 64 bits");

/* --- a call as bytes ---------------------------------------------------------------------------------------------- */

static encoded head_of(const ari_call *call, int n)
{
    return (encoded){.count = call->count,
                     .kind = (int32_t)call->kind,
                     .dtype = (int32_t)call->dtype,
                     .op = (int32_t)call->op,
                     .root = call->root,
                     .peer = call->peer,
                     .color = call->color,
                     .key = call->key,
                     .counts = call->counts ? (uint32_t)n : 0,
                     .recv_counts = call->recv_counts ? (uint32_t)n : 0,
                     .p2p = call->p2p ? (uint32_t)call->count : 0,
                     .tag_bytes = (uint32_t)(strlen(call->tag) / 8 + 1) * 8};
}

ar_status ari_call_encoded_bytes(size_t *bytes, const ari_call *call, int n)
{
    const encoded h = head_of(call, n);
    const size_t counts = (size_t)h.counts + h.recv_counts;
    AR_TRY(ari_mul_size(bytes, call->p2p ? call->count : 0, sizeof(encoded_op)));
    return ari_add_size(bytes, *bytes, sizeof h + counts * sizeof(uint64_t) + h.tag_bytes);
}

static char *append_bytes(char *at, const void *from, size_t bytes)
{
    ari_copy_bytes(at, from, bytes);
    return at + bytes;
}

void ari_call_encode(void *to, const ari_call *call, int n)
{
    const encoded h = head_of(call, n);
    char *at = append_bytes(to, &h, sizeof h);
    at = append_bytes(at, call->counts, h.counts * sizeof *call->counts);
    at = append_bytes(at, call->recv_counts, h.recv_counts * sizeof *call->recv_counts);
    for (uint32_t i = 0; i < h.p2p; i++) {
        const encoded_op op = {call->p2p[i].peer, call->p2p[i].send, call->p2p[i].count};
        at = append_bytes(at, &op, sizeof op);
    }
    memset(at + h.tag_bytes - 8, 0, 8);
    memcpy(at, call->tag, strlen(call->tag));
}

/* True if the header is that of a call of `size` bytes. */
static bool is_whole(const encoded *h, const char *bytes, size_t size, int n)
{
    const size_t counts = ((size_t)h->counts + h->recv_counts) * sizeof(uint64_t), ops = h->p2p * sizeof(encoded_op);
    return (h->counts == 0 || h->counts == (uint32_t)n) && (h->recv_counts == 0 || h->recv_counts == (uint32_t)n) &&
           h->tag_bytes > 0 && size == sizeof *h + counts + ops + h->tag_bytes && bytes[size - 1] == '\0';
}

ar_status ari_call_decode(ari_call *call, ar_p2p **p2p, const void *bytes, size_t size, int n)
{
    encoded h = {.count = 0};
    *p2p = NULL;
    if (size >= sizeof h)
        memcpy(&h, bytes, sizeof h);
    if (!is_whole(&h, bytes, size, n))
        return ar_error_set(AR_ERR_INTERNAL, "%zu bytes are no call of a member of %d", size, n);
    const size_t *counts = (const size_t *)(const void *)((const char *)bytes + sizeof h);
    const char *ops = (const char *)(counts + h.counts + h.recv_counts);
    *call = (ari_call){.kind = (ari_kind)h.kind,
                       .dtype = (ar_dtype)h.dtype,
                       .op = (ar_op)h.op,
                       .root = h.root,
                       .peer = h.peer,
                       .color = h.color,
                       .key = h.key,
                       .count = (size_t)h.count,
                       .counts = h.counts ? counts : NULL,
                       .recv_counts = h.recv_counts ? counts + h.counts : NULL,
                       .tag = ops + h.p2p * sizeof(encoded_op)};
    if (h.p2p == 0)
        return AR_OK;
    AR_TRY(ARI_ALLOC(p2p, h.p2p, "operations of another rank"));
    for (uint32_t i = 0; i < h.p2p; i++) {
        encoded_op op;
        memcpy(&op, ops + i * sizeof op, sizeof op);
        (*p2p)[i] = (ar_p2p){.peer = op.peer, .send = op.send != 0, .count = (size_t)op.count};
    }
    call->p2p = *p2p;
    return AR_OK;
}

/* --- the calls of a group ----------------------------------------------------------------------------------------- */

void ari_calls_fini(ari_calls *k)
{
    for (int i = 0; k->p2p && i < k->group.n; i++)
        free(k->p2p[i]);
    free(k->p2p);
    free(k->group.slot);
    free(k->bytes);
}

ar_status ari_calls_init(ari_calls *k, int *rank, int n)
{
    const size_t bytes = (size_t)n * sizeof *k->group.slot;
    *k = (ari_calls){.group = {.n = n, .rank = rank, .slot = aligned_alloc(_Alignof(ari_slot), bytes)}};
    k->p2p = calloc((size_t)n, sizeof *k->p2p);
    if (k->group.slot && k->p2p) {
        memset(k->group.slot, 0, bytes);
        return AR_OK;
    }
    ari_calls_fini(k);
    return ar_error_set(AR_ERR_MEMORY, "no memory to compare %d calls", n);
}

ar_status ari_calls_take(ari_calls *k, int i, uint64_t seq, const void *bytes, size_t size)
{
    atomic_store(&k->group.slot[i].entered, seq);
    free(k->p2p[i]);
    return ari_call_decode(&k->group.slot[i].call, &k->p2p[i], bytes, size, k->group.n);
}

ar_status ari_calls_exchange(ari_calls *gives, ari_store *c, uint64_t group, uint64_t seq, int *rank, int n,
                             const ari_call *call)
{
    size_t size = 0;
    ARI_OWNED void *bytes = NULL;
    ari_gather_result all;
    AR_TRY(ari_call_encoded_bytes(&size, call, n));
    AR_TRY(ari_alloc(&bytes, size, 1, "a call as bytes"));
    ari_call_encode(bytes, call, n);
    AR_TRY(ari_store_exchange(c, group, seq, rank, n, bytes, size, &all));
    ari_calls k;
    ar_status st = ari_calls_init(&k, rank, n);
    if (st != AR_OK) {
        free(all.memory);
        return st;
    }
    k.bytes = all.memory;
    for (int i = 0; i < n && st == AR_OK; i++)
        st = ari_calls_take(&k, i, seq, all.at + all.start[i], all.start[i + 1] - all.start[i]);
    if (st == AR_OK)
        *gives = k;
    else
        ari_calls_fini(&k);
    return st;
}
