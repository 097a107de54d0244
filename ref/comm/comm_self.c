/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "anyrank/device.h"
#include "ref/comm/comm_private.h"
#include "ref/comm/moves.h"
#include "ref/core/queue_impl.h"
#include "ref/core/size.h"

ARI_OWNER(ari_failure, ari_failure_release)

/* Group of one; all groups split from it share a world and a first error. */
typedef struct self_comm {
    ar_comm base;
    ari_failure *world; /* kept */
} self_comm;

static ar_status self_give(ar_comm **out, ari_failure *world);

static ari_failure *world_of(const ar_comm *c)
{
    return ((const self_comm *)c)->world;
}

static ar_status self_error(const ar_comm *c, const char **message)
{
    *message = "";
    return ari_failure_get(world_of(c), message);
}

static void self_abort(ar_comm *c, ar_status st, const char *why)
{
    ari_failure_set(world_of(c), st, why);
}

/* Copies by the device that owns the memory. */
static ar_status copy_local(const ari_call *call, ar_buf dst, ar_cbuf src, size_t bytes)
{
    ari_stream *stream = call->queue ? ari_queue_stream(call->queue) : NULL;
    if (!stream)
        ari_copy_bytes(dst.ptr, src.ptr, bytes);
    else if (bytes > 0 && dst.ptr != src.ptr)
        return stream->device->ops->copy(stream->device, call->queue, dst, src, bytes);
    return AR_OK;
}

/* The k-th send meets the k-th receive. */
static ar_status check_exchange(const ari_call *call)
{
    for (size_t s = 0, r = 0;; s++, r++) {
        s = ari_next_op(call, s, true, 0);
        r = ari_next_op(call, r, false, 0);
        const bool sends = s < call->count, receives = r < call->count;
        if (!sends && !receives)
            return AR_OK;
        if (!sends)
            return ar_error_set(AR_ERR_MISMATCH, "exchange '%s': receive %zu of %zu elements has no send", call->tag, r,
                                call->p2p[r].count);
        if (!receives || call->p2p[r].count != call->p2p[s].count)
            return ar_error_set(AR_ERR_MISMATCH, "exchange '%s': send %zu of %zu elements has no receive", call->tag, s,
                                call->p2p[s].count);
    }
}

/* Checks that the rank receives what it sends to itself. */
static ar_status check_own(const ari_call *call)
{
    if (call->kind == ARI_EXCHANGE)
        return check_exchange(call);
    if (call->kind != ARI_ALL_TO_ALL || call->counts[0] == call->recv_counts[0])
        return AR_OK;
    return ar_error_set(AR_ERR_MISMATCH, "all_to_all '%s': rank 0 sends %zu elements to itself and receives %zu",
                        call->tag, call->counts[0], call->recv_counts[0]);
}

static ar_status self_run(ar_comm *c, const ari_call *call)
{
    const char *why = "";
    if (self_error(c, &why) != AR_OK)
        return ar_error_set(AR_ERR_ABORTED, "%s '%s': aborted: %s", ari_kind_name(call->kind), call->tag, why);
    const ar_status st = check_own(call);
    if (st != AR_OK) {
        self_abort(c, st, ar_error_message());
        return st;
    }
    ari_moves moves = ari_moves_within(call, 0);
    for (ari_move m; ari_next_move(&moves, &m);)
        AR_TRY(copy_local(call, m.dst, m.src, m.count * ar_dtype_bytes(call->dtype)));
    return AR_OK;
}

static ar_status self_split(ar_comm **out, ar_comm *c, int color, int key)
{
    (void)key;
    const ari_call call = {.kind = ARI_SPLIT, .dtype = AR_U8, .tag = ""};
    AR_TRY(self_run(c, &call));
    return color < 0 ? AR_OK : self_give(out, world_of(c));
}

static void self_destroy(ar_comm *c)
{
    ari_failure_release(world_of(c));
    free(c);
}

static const ari_comm_ops self_ops = {
    .run = self_run, .split = self_split, .error = self_error, .abort = self_abort, .destroy = self_destroy};

static ar_status self_give(ar_comm **out, ari_failure *world)
{
    self_comm *c = calloc(1, sizeof *c);
    if (!c)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a communicator");
    ari_comm_init(&c->base, &self_ops, 0, 1);
    c->world = ari_failure_keep(world);
    *out = &c->base;
    return AR_OK;
}

ar_status ari_comm_self(ar_comm **out)
{
    if (!out)
        return ar_error_set(AR_ERR_ARG, "ari_comm_self: no place for the communicator");
    *out = NULL;
    ARI_OWNED_BY(ari_failure_release) ari_failure *world = NULL;
    if (ari_failure_create(&world) != AR_OK)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a communicator");
    return self_give(out, world);
}
