/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "anyrank/device.h"
#include "ref/comm/moves.h"
#include "ref/comm/rendezvous_impl.h"
#include "ref/core/queue_impl.h"

/* --- calls as text ------------------------------------------------------------------------------------------------ */

static void put_counts(ari_text *l, const char *label, const size_t *counts, int n)
{
    const int shown = n <= 8 ? n : 8;
    ari_say(l, ", %s [", label);
    for (int i = 0; i < shown; i++)
        ari_say(l, "%s%zu", i > 0 ? ", " : "", counts[i]);
    ari_say(l, "%s]", shown < n ? ", ..." : "");
}

static void put_extents(ari_text *l, const ari_call *call, int n)
{
    const ari_kind_row *k = ari_kind_of(call->kind);
    if (k->input == ARI_EXTENT_COUNT || k->out == ARI_EXTENT_COUNT)
        ari_say(l, ", count %zu", call->count);
    if (k->out == ARI_EXTENT_RECV_PARTS) {
        put_counts(l, "send", call->counts, n);
        put_counts(l, "receive", call->recv_counts, n);
    } else if (k->input == ARI_EXTENT_PARTS || k->out == ARI_EXTENT_PARTS) {
        put_counts(l, "counts", call->counts, n);
    }
}

void ari_call_describe(const ari_call *call, int n, char *text, size_t size)
{
    const ari_kind_row *k = ari_kind_of(call->kind);
    ari_text l = ari_plain_text_in(text, size);
    ari_say(&l, "%s(", k->name);
    if (call->kind != ARI_BARRIER && call->kind != ARI_SPLIT)
        ari_say(&l, "%s", ar_dtype_name(call->dtype));
    put_extents(&l, call, n);
    if (k->combines)
        ari_say(&l, ", %s", ari_op_name(call->op));
    if (ari_kind_of(call->kind)->from_root)
        ari_say(&l, ", root %d", call->root);
    if (k->has_peer)
        ari_say(&l, ", peer %d", call->peer);
    if (call->kind == ARI_EXCHANGE)
        ari_say(&l, ", %zu operations", call->count);
    if (call->kind == ARI_SPLIT)
        ari_say(&l, "color %d, key %d", call->color, call->key);
    ari_say(&l, ")%s%s%s", call->tag[0] ? " '" : "", call->tag, call->tag[0] ? "'" : "");
}

/* The memory of the call's data: "host", or the device's name. */
static const char *memory_of(const ari_call *call)
{
    const ari_stream *s = call->queue ? ari_queue_stream(call->queue) : NULL;
    return s ? s->device->ops->name : "host";
}

static bool in_one_memory(const ari_call *x, const ari_call *y)
{
    const char *a = memory_of(x), *b = memory_of(y);
    return a == b || strcmp(a, b) == 0;
}

static void put_memory(ari_text *l, const ari_call *x, const ari_call *y)
{
    ari_say(l, "data in memory of '%s' against '%s'", memory_of(x), memory_of(y));
}

/* --- the comparison ----------------------------------------------------------------------------------------------- */

static ar_status disagree(const ari_group *g, int a, int b, char *why, size_t size, const char *difference)
{
    char call_a[160], call_b[160], group[96];
    const char *const meeting = g->slot[0].call.kind == ARI_SEND ? "message" : "collective";
    ari_call_describe(&g->slot[a].call, g->n, call_a, sizeof call_a);
    ari_call_describe(&g->slot[b].call, g->n, call_b, sizeof call_b);
    ari_ranks_describe(g->rank, g->n, group, sizeof group);
    snprintf(why, size, "ranks %d and %d disagree in %s #%llu of ranks %s: rank %d calls %s, rank %d calls %s: %s",
             g->rank[a], g->rank[b], meeting, (unsigned long long)atomic_load(&g->slot[a].entered), group, g->rank[a],
             call_a, g->rank[b], call_b, difference);
    return AR_ERR_MISMATCH;
}

/* Writes the first field in which y differs from x; "" if none. */
static void difference(const ari_call *x, const ari_call *y, int n, char *text, size_t size)
{
    ari_text l = ari_plain_text_in(text, size);
    /* Nothing is formatted if calls agree: that would take a seventh of a short collective. */
    if (x->kind != y->kind) {
        ari_say(&l, "kind %s against %s", ari_kind_name(x->kind), ari_kind_name(y->kind));
    } else if (x->dtype != y->dtype) {
        ari_say(&l, "dtype %s against %s", ar_dtype_name(x->dtype), ar_dtype_name(y->dtype));
    } else if (x->op != y->op) {
        ari_say(&l, "operation %s against %s", ari_op_name(x->op), ari_op_name(y->op));
    } else if (x->root != y->root) {
        ari_say(&l, "root %d against %d", x->root, y->root);
    } else if (!in_one_memory(x, y)) {
        put_memory(&l, x, y);
    } else if (x->kind != ARI_EXCHANGE && x->count != y->count) {
        ari_say(&l, "count %zu against %zu", x->count, y->count);
    } else if (x->counts && x->kind != ARI_ALL_TO_ALL) {
        for (int i = 0; i < n && l.used == 0; i++) {
            if (x->counts[i] != y->counts[i])
                ari_say(&l, "count of rank %d: %zu against %zu", i, x->counts[i], y->counts[i]);
        }
    }
}

/* Compares an all_to_all: a must send to b as many elements as b expects from a. */
static ar_status compare_all_to_all(const ari_group *g, char *why, size_t size)
{
    for (int a = 0; a < g->n; a++) {
        for (int b = 0; b < g->n; b++) {
            const size_t sent = g->slot[a].call.counts[b], expected = g->slot[b].call.recv_counts[a];
            if (sent == expected)
                continue;
            char text[128];
            snprintf(text, sizeof text, "rank %d sends %zu elements to rank %d, which expects %zu", g->rank[a], sent,
                     g->rank[b], expected);
            return disagree(g, a, b, why, size, text);
        }
    }
    return AR_OK;
}

/* Compares the two calls of a channel: the sent data must be what the receiver expects. */
static ar_status compare_message(const ari_group *g, char *why, size_t size)
{
    const ari_call *send = &g->slot[0].call, *receive = &g->slot[1].call;
    const bool one_memory = in_one_memory(send, receive);
    if (send->count == receive->count && send->dtype == receive->dtype && one_memory)
        return AR_OK;
    char text[128];
    ari_text l = ari_plain_text_in(text, sizeof text);
    if (!one_memory) {
        put_memory(&l, send, receive);
        return disagree(g, 0, 1, why, size, text);
    }
    ari_say(&l, "rank %d sends %zu elements of %s to rank %d, which expects %zu", g->rank[0], send->count,
            ar_dtype_name(send->dtype), g->rank[1], receive->count);
    if (send->dtype != receive->dtype)
        ari_say(&l, " of %s", ar_dtype_name(receive->dtype));
    return disagree(g, 0, 1, why, size, text);
}

static ar_status compare_batches(const ari_group *g, int a, int b, char *why, size_t size)
{
    const ari_call *sender = &g->slot[a].call, *receiver = &g->slot[b].call;
    size_t s = ari_next_op(sender, 0, true, b), r = ari_next_op(receiver, 0, false, a);
    for (size_t k = 0;; k++) {
        const bool sends = s < sender->count, receives = r < receiver->count;
        char text[128];
        if (!sends && !receives)
            return AR_OK;
        if (sends && receives && sender->p2p[s].count == receiver->p2p[r].count) {
            s = ari_next_op(sender, s + 1, true, b);
            r = ari_next_op(receiver, r + 1, false, a);
            continue;
        }
        if (sends && receives)
            snprintf(text, sizeof text, "message %zu from rank %d to rank %d: %zu elements are sent, %zu expected", k,
                     g->rank[a], g->rank[b], sender->p2p[s].count, receiver->p2p[r].count);
        else
            snprintf(text, sizeof text, "message %zu from rank %d to rank %d has %s", k, g->rank[a], g->rank[b],
                     sends ? "a send but no receive" : "a receive but no send");
        return disagree(g, a, b, why, size, text);
    }
}

static ar_status compare_exchange(const ari_group *g, char *why, size_t size)
{
    for (int a = 0; a < g->n; a++) {
        for (int b = 0; b < g->n; b++)
            AR_TRY(compare_batches(g, a, b, why, size));
    }
    return AR_OK;
}

/* Compares tags. Calls that are equal except for their tags are two collectives in different orders, whose results
 * would be mixed up. A rank without a tag is not compared, and the operations of an exchange are named as each rank
 * sees them. */
static ar_status compare_tags(const ari_group *g, char *why, size_t size)
{
    int named = -1;
    for (int i = 0; i < g->n; i++) {
        const char *tag = g->slot[i].call.tag;
        if (!tag[0])
            continue;
        named = named < 0 ? i : named;
        const char *named_tag = g->slot[named].call.tag;
        if (tag == named_tag || strcmp(tag, named_tag) == 0)
            continue;
        char text[256];
        snprintf(text, sizeof text, "tag '%s' against '%s', so they call in different orders", named_tag, tag);
        return disagree(g, named, i, why, size, text);
    }
    return AR_OK;
}

ar_status ari_calls_compare(const ari_group *g, char *why, size_t size)
{
    const ari_call *first_call = &g->slot[0].call;
    if (g->n == 2 && first_call->kind == ARI_SEND && g->slot[1].call.kind == ARI_RECV)
        return compare_message(g, why, size);
    for (int i = 1; i < g->n; i++) {
        char text[128];
        /* The gate lets each member enter once, so the sequence numbers agree by construction. */
        difference(first_call, &g->slot[i].call, g->n, text, sizeof text);
        if (text[0])
            return disagree(g, 0, i, why, size, text);
    }
    if (first_call->kind == ARI_EXCHANGE)
        return compare_exchange(g, why, size);
    if (first_call->kind == ARI_ALL_TO_ALL)
        AR_TRY(compare_all_to_all(g, why, size));
    return compare_tags(g, why, size);
}
