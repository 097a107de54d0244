/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/comm/call.h"

#include "ref/core/size.h"

static const ari_kind_row kinds[ARI_KIND_COUNT + 1] = {
    [ARI_ALL_REDUCE] =
        {.name = "all_reduce", .input = ARI_EXTENT_COUNT, .out = ARI_EXTENT_COUNT, .combines = true, .ring = true},
    [ARI_REDUCE_SCATTER] = {.name = "reduce_scatter",
                            .input = ARI_EXTENT_PARTS,
                            .out = ARI_EXTENT_OWN_PART,
                            .combines = true,
                            .ring = true},
    [ARI_ALL_GATHER] = {.name = "all_gather", .input = ARI_EXTENT_OWN_PART, .out = ARI_EXTENT_PARTS, .ring = true},
    [ARI_ALL_TO_ALL] = {.name = "all_to_all", .input = ARI_EXTENT_PARTS, .out = ARI_EXTENT_RECV_PARTS},
    [ARI_BROADCAST] =
        {.name = "broadcast", .input = ARI_EXTENT_COUNT, .out = ARI_EXTENT_COUNT, .from_root = true, .ring = true},
    [ARI_SEND] = {.name = "send", .input = ARI_EXTENT_COUNT, .has_peer = true},
    [ARI_RECV] = {.name = "recv", .out = ARI_EXTENT_COUNT, .has_peer = true},
    [ARI_EXCHANGE] = {.name = "exchange"},
    [ARI_BARRIER] = {.name = "barrier"},
    [ARI_SPLIT] = {.name = "split"},
    [ARI_KIND_COUNT] = {.name = "?"},
};

const ari_kind_row *ari_kind_of(ari_kind kind)
{
    return &kinds[(unsigned)kind < ARI_KIND_COUNT ? kind : ARI_KIND_COUNT];
}

const char *ari_kind_name(ari_kind kind)
{
    return ari_kind_of(kind)->name;
}

const char *ari_op_name(ar_op op)
{
    static const char *const names[] = {[AR_SUM] = "sum", [AR_MAX] = "max", [AR_MIN] = "min"};
    return (unsigned)op < sizeof names / sizeof *names ? names[op] : "?";
}

/* --- the check ---------------------------------------------------------------------------------------------------- */

static ar_status check_dtype(const ari_call *call)
{
    const ar_dtype t = call->dtype;
    if (t != AR_F32 && t != AR_F64 && t != AR_BF16 && t != AR_F16 && t != AR_I64 && t != AR_I32 && t != AR_U8)
        return ar_error_set(AR_ERR_DTYPE, "%s '%s': dtype %s; F32, F64, BF16, F16, I64, I32 or U8 expected",
                            ari_kind_name(call->kind), call->tag, ar_dtype_name(t));
    return AR_OK;
}

static ar_status check_op(const ari_call *call)
{
    const ar_op op = call->op;
    if (op != AR_SUM && op != AR_MAX && op != AR_MIN)
        return ar_error_set(AR_ERR_ARG, "%s '%s': unknown operation %d", ari_kind_name(call->kind), call->tag, (int)op);
    return AR_OK;
}

/* label: "root" or "peer". */
static ar_status check_rank(const ari_call *call, const char *label, int rank, int size)
{
    if (rank < 0 || rank >= size)
        return ar_error_set(AR_ERR_ARG, "%s '%s': %s %d; 0 to %d expected", ari_kind_name(call->kind), call->tag, label,
                            rank, size - 1);
    return AR_OK;
}

static ar_status check_peer(const ari_call *call, int rank, int size)
{
    AR_TRY(check_rank(call, "peer", call->peer, size));
    if (call->peer == rank)
        return ar_error_set(AR_ERR_ARG, "%s '%s': peer %d is the rank itself; another one is expected",
                            ari_kind_name(call->kind), call->tag, call->peer);
    return AR_OK;
}

/* Checks a buffer. It may be NULL if it has no bytes. */
static ar_status check_buf(const ari_call *call, const void *ptr, size_t bytes, const char *label)
{
    if (!ptr && bytes > 0)
        return ar_error_set(AR_ERR_ARG, "%s '%s': the %s buffer is NULL, %zu bytes expected", ari_kind_name(call->kind),
                            call->tag, label, bytes);
    return AR_OK;
}

/* Checks that input and output are the same bytes or have none in common: a partial overlap would read overwritten
 * data. */
static ar_status check_overlap(const ari_call *call, const void *out, size_t out_bytes, const void *input,
                               size_t in_bytes, bool in_place)
{
    const uintptr_t o = (uintptr_t)out, i = (uintptr_t)input;
    if (in_place || out_bytes == 0 || in_bytes == 0 || o + out_bytes <= i || i + in_bytes <= o)
        return AR_OK;
    return ar_error_set(AR_ERR_ARG, "%s '%s': input and output overlap, but are not in place as documented",
                        ari_kind_name(call->kind), call->tag);
}

static ar_status sum_bytes(size_t *bytes, const ari_call *call, const size_t *counts, int n)
{
    if (!counts)
        return ar_error_set(AR_ERR_ARG, "%s '%s': the counts are missing, %d expected", ari_kind_name(call->kind),
                            call->tag, n);
    size_t sum = 0;
    for (int i = 0; i < n; i++)
        AR_TRY(ari_add_size(&sum, sum, counts[i]));
    return ari_mul_size(bytes, sum, ar_dtype_bytes(call->dtype));
}

/* Computes bytes[extent] for the extents of this kind. */
static ar_status measure_extents(size_t bytes[ARI_EXTENTS], const ari_call *call, int rank, int size)
{
    const ari_kind_row *k = ari_kind_of(call->kind);
    const size_t element = ar_dtype_bytes(call->dtype);
    if (k->input == ARI_EXTENT_COUNT || k->out == ARI_EXTENT_COUNT)
        AR_TRY(ari_mul_size(&bytes[ARI_EXTENT_COUNT], call->count, element));
    if (k->input == ARI_EXTENT_PARTS || k->out == ARI_EXTENT_PARTS) {
        AR_TRY(sum_bytes(&bytes[ARI_EXTENT_PARTS], call, call->counts, size));
        bytes[ARI_EXTENT_OWN_PART] = call->counts[rank] * element;
    }
    return k->out == ARI_EXTENT_RECV_PARTS ? sum_bytes(&bytes[ARI_EXTENT_RECV_PARTS], call, call->recv_counts, size)
                                           : AR_OK;
}

/* Checks the rank's buffers, the root's own last. In place: the rank's part must be at its position among all parts. */
static ar_status check_bufs(const ari_call *call, int rank, int size)
{
    const ari_kind_row *k = ari_kind_of(call->kind);
    const bool has_in = !k->from_root || call->root == rank;
    const void *input = call->input.ptr, *out = call->out.ptr;
    size_t bytes[ARI_EXTENTS] = {0};
    AR_TRY(measure_extents(bytes, call, rank, size));
    AR_TRY(check_buf(call, out, bytes[k->out], k->from_root ? "only" : "output"));
    if (!has_in)
        return AR_OK;
    AR_TRY(check_buf(call, input, bytes[k->input], "input"));
    const size_t before = bytes[ARI_EXTENT_PARTS] > 0 ? ari_counts_before(call->counts, rank) : 0;
    const uintptr_t part_offset = before * ar_dtype_bytes(call->dtype);
    const uintptr_t own_in = (uintptr_t)input + (k->input == ARI_EXTENT_PARTS ? part_offset : 0);
    const uintptr_t own_out = (uintptr_t)out + (k->out == ARI_EXTENT_PARTS ? part_offset : 0);
    const bool in_place = own_in == own_out && k->out != ARI_EXTENT_RECV_PARTS;
    return check_overlap(call, out, bytes[k->out], input, bytes[k->input], in_place);
}

/* Checks that a receive buffer overlaps no other buffer of the batch, because the order within a batch is undefined. */
static ar_status check_batch_overlap(const ari_call *call)
{
    const size_t element = ar_dtype_bytes(call->dtype);
    const ar_p2p *ops = call->p2p;
    for (size_t i = 0; i < call->count; i++) {
        for (size_t k = 0; k < call->count; k++) {
            if (k == i || ops[i].send)
                continue;
            AR_TRY(check_overlap(call, ops[i].buf.ptr, ops[i].count * element, ops[k].buf.ptr, ops[k].count * element,
                                 false));
        }
    }
    return AR_OK;
}

static ar_status check_batch(const ari_call *call, int size)
{
    if (call->count > 0 && !call->p2p)
        return ar_error_set(AR_ERR_ARG, "exchange '%s': the %zu operations are missing", call->tag, call->count);
    for (size_t i = 0; i < call->count; i++) {
        const ar_p2p *o = &call->p2p[i];
        size_t bytes = 0;
        if (o->peer < 0 || o->peer >= size)
            return ar_error_set(AR_ERR_ARG, "exchange '%s': operation %zu has peer %d; 0 to %d expected", call->tag, i,
                                o->peer, size - 1);
        AR_TRY(ari_mul_size(&bytes, o->count, ar_dtype_bytes(call->dtype)));
        AR_TRY(check_buf(call, o->buf.ptr, bytes, o->send ? "sent" : "received"));
    }
    return check_batch_overlap(call);
}

ar_status ari_call_check(const ari_call *call, int rank, int size)
{
    const ari_kind_row *k = ari_kind_of(call->kind);
    AR_TRY(check_dtype(call));
    if (k->combines)
        AR_TRY(check_op(call));
    if (k->from_root)
        AR_TRY(check_rank(call, "root", call->root, size));
    if (k->has_peer)
        AR_TRY(check_peer(call, rank, size));
    return call->kind == ARI_EXCHANGE ? check_batch(call, size) : check_bufs(call, rank, size);
}
