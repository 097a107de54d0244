/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "ref/comm/comm_impl.h"
#include "ref/comm/comm_private.h"
#include "ref/comm/moves.h"
#include "ref/core/size.h"
#include "ref/record/dry.h"
#include "ref/record/ledger.h"

/* Returns the number of elements of a sum that this rank computes, reading the terms of every other rank. */
static size_t combined_count(const ar_comm *c, const ari_call *call)
{
    size_t start, count = call->count;
    if (call->kind == ARI_REDUCE_SCATTER)
        return call->counts[c->rank];
    ari_comm_slice(call->count, c->size, c->rank, &start, &count);
    return 2 * count; /* and sends the result to all of them */
}

/* A rank's communicator, or one split off from it. */
typedef struct dry_comm {
    ar_comm base;
    ari_ledger *ledger; /* ledger for calls; borrowed; NULL: calls are not recorded */
} dry_comm;

/* Runs a call without data. Bytes are counted at the rank that would send them, or that would compute part of a sum, so
 * that all ranks together count each byte once. */
static ar_status dry_run(ar_comm *c, const ari_call *call)
{
    size_t count = 0;
    ari_part part;
    if (ari_kind_of(call->kind)->combines) {
        count = combined_count(c, call) * (size_t)(c->size - 1);
    } else if (call->kind == ARI_SEND) {
        count = call->count;
    } else if (call->kind != ARI_RECV && call->kind != ARI_BARRIER) {
        ari_parts sent = ari_parts_of(call, c->rank, c->size, true);
        while (ari_next_part(&sent, &part))
            count += part.peer != c->rank ? part.count : 0;
    }
    const uint64_t bytes = count * ar_dtype_bytes(call->dtype);
    ari_ledger *ledger = ((dry_comm *)c)->ledger;
    ari_moved_add(&c->moved, 0, bytes);
    return ledger && c->size > 1 ? ari_ledger_call_add(ledger, call, c->group_kind, c->size, bytes) : AR_OK;
}

static ar_status dry_split(ar_comm **out, ar_comm *c, int color, int key)
{
    (void)out, (void)c, (void)color, (void)key;
    return ar_error_set(AR_ERR_UNSUPPORTED, "a rank without peers does not know which of them give its color: join");
}

static ar_status dry_join(ar_comm **out, ar_comm *c, int rank, int size)
{
    return ari_dry_comm_create(out, rank, size, ((dry_comm *)c)->ledger);
}

static ar_status dry_error(const ar_comm *c, const char **message)
{
    (void)c;
    *message = "";
    return AR_OK;
}

/* Aborts nothing, since no other rank waits for this one. */
static void dry_abort(ar_comm *c, ar_status st, const char *why)
{
    (void)c, (void)st, (void)why;
}

static void dry_destroy(ar_comm *c)
{
    free(c);
}

ar_status ari_dry_comm_create(ar_comm **out, int rank, int size, ari_ledger *ledger)
{
    static const ari_comm_ops ops = {.run = dry_run,
                                     .split = dry_split,
                                     .join = dry_join,
                                     .error = dry_error,
                                     .abort = dry_abort,
                                     .destroy = dry_destroy};
    dry_comm *c = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&c, 1, "a communicator"));
    ari_comm_init(&c->base, &ops, rank, size);
    c->ledger = ledger;
    *out = &c->base;
    return AR_OK;
}
