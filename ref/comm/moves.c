/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/comm/moves.h"

#include <stdlib.h>

#include "anyrank/device.h"
#include "ref/core/queue_impl.h"
#include "ref/core/size.h"

size_t ari_next_op(const ari_call *call, size_t index, bool sends, int peer)
{
    while (index < call->count && !(call->p2p[index].send == sends && call->p2p[index].peer == peer))
        index++;
    return index;
}

/* Returns the counts by which a buffer is split into parts, one for each rank; NULL: it is not split. */
static const size_t *cut_of(const ari_call *call, ari_buffer_extent extent)
{
    return extent == ARI_EXTENT_PARTS ? call->counts : extent == ARI_EXTENT_RECV_PARTS ? call->recv_counts : NULL;
}

static ari_buffer_extent extent_of(const ari_call *call, bool sends)
{
    return sends ? ari_kind_of(call->kind)->input : ari_kind_of(call->kind)->out;
}

/* Returns the number of elements of a part, for kinds other than a batch. */
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

/* Does the same with `peer` only. */
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
    const ar_buf buffer = s->sends ? (ar_buf){(void *)(uintptr_t)call->input.ptr} : call->out;
    for (; s->peer < s->end; s->peer++) {
        const size_t count = part_count(call, s->rank, s->peer, s->sends), start = s->start;
        s->start += cut ? cut[s->peer] : 0;
        if (count == 0)
            continue;
        *part = (ari_part){s->peer++, ar_buf_at(buffer, start * element), start, count};
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
                       .dst = ari_parts_of(ari_group_call(g, index), index, ari_group_size(g), false),
                       .src = {.rank = -1}};
}

ari_moves ari_moves_within(const ari_call *call, int rank)
{
    return (ari_moves){.dst = parts_with(call, rank, rank, false), .src = parts_with(call, rank, rank, true)};
}

/* Returns the next move. Receives and sends have been checked to match, so the k-th part of one is the k-th part of the
 * other. If nothing is sent, the calls differ: this call is a recv, and its peer is the other rank of the channel. */
bool ari_next_move(ari_moves *s, ari_move *move)
{
    ari_part dst, src;
    while (ari_next_part(&s->dst, &dst)) {
        if (s->src.rank != dst.peer)
            s->src = parts_with(ari_group_call(s->group, dst.peer), dst.peer, s->dst.rank, true);
        if (!ari_next_part(&s->src, &src))
            continue;
        *move = (ari_move){dst.peer, dst.buf, ar_const(src.buf), src.start, dst.count};
        return true;
    }
    return false;
}

/* Returns the number of elements of a buffer on a rank that has it. */
static size_t count_of(const ari_call *call, ari_buffer_extent extent, int rank, int n)
{
    const size_t *cut = cut_of(call, extent);
    if (cut)
        return ari_counts_before(cut, n);
    return extent == ARI_EXTENT_OWN_PART ? call->counts[rank] : extent == ARI_EXTENT_COUNT ? call->count : 0;
}

/* Returns the elements of the rank's input; 0 if only the root has an input. */
static size_t input_count(const ari_call *call, int rank, int n)
{
    const ari_kind_row *k = ari_kind_of(call->kind);
    return k->from_root && call->root != rank ? 0 : count_of(call, k->input, rank, n);
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

ar_status ari_scratch_reserve(void **scratch, size_t *capacity, size_t bytes, const char *label)
{
    if (bytes <= *capacity)
        return AR_OK;
    void *larger = malloc(bytes);
    if (!larger)
        return ar_error_set(AR_ERR_MEMORY, "no memory for %zu bytes %s", bytes, label);
    free(*scratch);
    *scratch = larger;
    *capacity = bytes;
    return AR_OK;
}

/* --- staged collectives ------------------------------------------------------------------------------------------- */

#define LINE ((size_t)64) /* alignment of a buffer's start */

/* Moves a device's data through host memory: what the call reads is copied down before it runs, and what it has written
 * is copied up afterwards. */

typedef struct staged {
    ari_call call; /* the call with host buffers */
    ar_device *device;
    ar_p2p pair[2];           /* input and output of a call that is not a batch */
    const ar_p2p *device_ops; /* [n] operations with device buffers */
    ar_p2p *host_ops;         /* [n] the same with host buffers */
    size_t n;
    char *memory;
} staged;

/* Finds the buffers that the rank's part of the call accesses. */
static void find_buffers(staged *s, const ar_comm *c, const ari_call *call)
{
    size_t in_count = input_count(call, c->rank, c->size), out = ari_output_count(call, c->rank, c->size);
    if (ari_kind_of(call->kind)->from_root && in_count > 0) /* the root's buffer, which is read */
        out = 0;
    s->pair[0] = (ar_p2p){.send = true, .buf = {(void *)(uintptr_t)call->input.ptr}, .count = in_count};
    s->pair[1] = (ar_p2p){.send = false, .buf = call->out, .count = out};
    s->device_ops = call->kind == ARI_EXCHANGE ? call->p2p : s->pair;
    s->n = call->kind == ARI_EXCHANGE ? call->count : 2;
}

static size_t bytes_of(const staged *s, size_t i)
{
    return s->device_ops[i].count * ar_dtype_bytes(s->call.dtype);
}

static ar_status copy_staged(const staged *s, ar_buf dst, ar_buf src, size_t bytes)
{
    return bytes > 0 ? s->device->ops->copy(s->device, s->call.queue, dst, ar_const(src), bytes) : AR_OK;
}

static ar_status bring_down(staged *s, bool outputs)
{
    size_t bytes = 0, offset = 0;
    for (size_t i = 0; i < s->n; i++)
        AR_TRY(ari_add_size(&bytes, bytes, ari_round_up(bytes_of(s, i), LINE)));
    AR_TRY(ARI_ALLOC(&s->host_ops, s->n, "the buffers of a collective"));
    AR_TRY(ari_alloc((void **)&s->memory, bytes, 1, "a collective's data on the host"));
    for (size_t i = 0; i < s->n; offset += ari_round_up(bytes_of(s, i++), LINE)) {
        s->host_ops[i] = s->device_ops[i];
        s->host_ops[i].buf.ptr = bytes_of(s, i) > 0 ? s->memory + offset : NULL;
        if (s->device_ops[i].send || outputs)
            AR_TRY(copy_staged(s, s->host_ops[i].buf, s->device_ops[i].buf, bytes_of(s, i)));
    }
    return AR_OK;
}

/* Replaces the call's buffers by host buffers; a broadcast may have its buffer in either field. */
static void put_buffers(staged *s)
{
    if (s->call.kind == ARI_EXCHANGE) {
        s->call.p2p = s->host_ops;
        return;
    }
    const bool is_shared = ari_kind_of(s->call.kind)->from_root;
    const ar_buf input = s->host_ops[0].buf, out = s->host_ops[1].buf;
    s->call.input = ar_const(is_shared && !input.ptr ? out : input);
    s->call.out = is_shared && !out.ptr ? input : out;
}

static ar_status bring_up(const staged *s)
{
    for (size_t i = 0; i < s->n; i++) {
        if (!s->device_ops[i].send)
            AR_TRY(copy_staged(s, s->device_ops[i].buf, s->host_ops[i].buf, bytes_of(s, i)));
    }
    return AR_OK;
}

ar_status ari_staged_run(ar_comm *c, const ari_call *call, bool outputs, ari_run_fn run)
{
    ari_stream *stream = ari_queue_stream(call->queue);
    staged s = {.call = *call, .device = stream->device};
    find_buffers(&s, c, call);
    ar_status st = bring_down(&s, outputs);
    if (st == AR_OK)
        st = ari_stream_sync(stream, 0);
    if (st == AR_OK) {
        put_buffers(&s);
        st = run(c, &s.call);
    }
    if (st == AR_OK)
        st = bring_up(&s);
    free(s.host_ops);
    free(s.memory);
    return st;
}
