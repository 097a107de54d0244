/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/comm/moves.h"

#include <stdlib.h>

size_t ari_next_op(const ari_call *call, size_t at, bool sends, int peer)
{
    while (at < call->count && !(call->p2p[at].send == sends && call->p2p[at].peer == peer))
        at++;
    return at;
}

/* The counts by which a buffer is cut into parts, one for each rank; NULL: it is not. */
static const size_t *cut_of(const ari_call *call, ari_buffer_extent extent)
{
    return extent == ARI_EXTENT_PARTS ? call->counts : extent == ARI_EXTENT_RECV_PARTS ? call->recv_counts : NULL;
}

static ari_buffer_extent extent_of(const ari_call *call, bool sends)
{
    return sends ? ari_kind_of(call->kind)->in : ari_kind_of(call->kind)->out;
}

/* Number of elements of a part, for kinds other than a batch. */
static size_t part_count(const ari_call *call, int rank, int peer, bool sends)
{
    const ari_kind_row *k = ari_kind_of(call->kind);
    const ari_buffer_extent extent = extent_of(call, sends);
    const size_t *cut = cut_of(call, extent);
    if (extent == ARI_EXTENT_NOTHING || (k->from_root && (sends ? rank : peer) != call->root))
        return 0;
    return cut ? cut[peer] : extent == ARI_EXTENT_OWN_PART ? call->counts[rank] : call->count;
}

ari_parts ari_parts_of(const ari_call *call, int rank, int n, bool sends)
{
    return (ari_parts){.call = call, .rank = rank, .sends = sends, .end = n};
}

/* The same with `peer` alone. */
static ari_parts parts_with(const ari_call *call, int rank, int peer, bool sends)
{
    const size_t *cut = cut_of(call, extent_of(call, sends));
    ari_parts s = {.call = call, .rank = rank, .sends = sends, .peer = peer, .end = peer + 1};
    s.start = cut ? ari_counts_before(cut, peer) : 0;
    return s;
}

static bool next_of_batch(ari_parts *s, ari_part *part)
{
    const ari_call *call = s->call;
    for (; s->peer < s->end; s->peer++, s->op = 0) {
        while ((s->op = ari_next_op(call, s->op, s->sends, s->peer)) < call->count) {
            const ar_p2p *o = &call->p2p[s->op++];
            *part = (ari_part){.peer = s->peer, .buf = o->buf, .count = o->count};
            if (o->count > 0)
                return true;
        }
    }
    return false;
}

bool ari_next_part(ari_parts *s, ari_part *part)
{
    const ari_call *call = s->call;
    if (call->kind == ARI_EXCHANGE)
        return next_of_batch(s, part);
    const size_t *cut = cut_of(call, extent_of(call, s->sends)), element = ar_dtype_bytes(call->dtype);
    const ar_buf whole = s->sends ? (ar_buf){(void *)(uintptr_t)call->in.ptr} : call->out;
    for (; s->peer < s->end; s->peer++) {
        const size_t count = part_count(call, s->rank, s->peer, s->sends), start = s->start;
        s->start += cut ? cut[s->peer] : 0;
        if (count == 0)
            continue;
        *part = (ari_part){s->peer++, ar_buf_at(whole, start * element), start, count};
        return true;
    }
    return false;
}

size_t ari_sent_count(const ari_call *call, int rank, int peer)
{
    size_t sum = 0;
    if (call->kind != ARI_EXCHANGE)
        return part_count(call, rank, peer, true);
    for (size_t k = 0; (k = ari_next_op(call, k, true, peer)) < call->count; k++)
        sum += call->p2p[k].count;
    return sum;
}

ari_moves ari_moves_to(const ari_group *g, int index)
{
    return (ari_moves){.group = g,
                       .to = ari_parts_of(ari_group_call(g, index), index, ari_group_size(g), false),
                       .from = {.rank = -1}};
}

ari_moves ari_moves_within(const ari_call *call, int rank)
{
    return (ari_moves){.to = parts_with(call, rank, rank, false), .from = parts_with(call, rank, rank, true)};
}

/* Receives and sends are agreed to match, so the k-th part of the one is the k-th of the other. If nothing is sent the
 * calls differ: this one is a recv, and its peer is the other rank of the channel. */
bool ari_next_move(ari_moves *s, ari_move *move)
{
    ari_part to, from;
    while (ari_next_part(&s->to, &to)) {
        if (s->from.rank != to.peer)
            s->from = parts_with(ari_group_call(s->group, to.peer), to.peer, s->to.rank, true);
        if (!ari_next_part(&s->from, &from))
            continue;
        *move = (ari_move){to.peer, to.buf, ar_const(from.buf), from.start, to.count};
        return true;
    }
    return false;
}

/* Elements of a buffer, of a rank that has it. */
static size_t count_of(const ari_call *call, ari_buffer_extent extent, int rank, int n)
{
    const size_t *cut = cut_of(call, extent);
    if (cut)
        return ari_counts_before(cut, n);
    return extent == ARI_EXTENT_OWN_PART ? call->counts[rank] : extent == ARI_EXTENT_COUNT ? call->count : 0;
}

size_t ari_input_count(const ari_call *call, int rank, int n)
{
    const ari_kind_row *k = ari_kind_of(call->kind);
    return k->from_root && call->root != rank ? 0 : count_of(call, k->in, rank, n);
}

size_t ari_output_count(const ari_call *call, int rank, int n)
{
    return count_of(call, ari_kind_of(call->kind)->out, rank, n);
}

size_t ari_two_parts(const ari_call *call, int n)
{
    size_t largest = 0;
    for (int i = 0; i < n; i++)
        largest = call->counts[i] > largest ? call->counts[i] : largest;
    /* The sum of the counts fits, but twice the largest may not. */
    const size_t place = (largest * ar_dtype_bytes(call->dtype) + 63) / 64 * 64;
    return place > SIZE_MAX / 2 ? SIZE_MAX : 2 * place;
}

ar_status ari_scratch_reserve(void **scratch, size_t *has, size_t bytes, const char *of)
{
    if (bytes <= *has)
        return AR_OK;
    void *larger = malloc(bytes);
    if (!larger)
        return ar_error_set(AR_ERR_MEMORY, "no memory for %zu bytes %s", bytes, of);
    free(*scratch);
    *scratch = larger;
    *has = bytes;
    return AR_OK;
}
