/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/record/ledger.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/comm/call.h"
#include "ref/context/context.h"
#include "ref/context/context_private.h"
#include "ref/core/queue_private.h"
#include "ref/core/size.h"
#include "ref/placement/placement_private.h"

typedef struct ari_ledger_memory {
    const void *ptr;
    ar_placement at;
} ledger_memory;

static const ar_placement whole = {AR_REPLICATE, 0};

void ari_ledger_fini(ari_ledger *f)
{
    free(f->value);
    free(f->record);
    free(f->call);
}

static void destroy(ari_ledger *f)
{
    ari_ledger_fini(f);
    free(f);
}

static bool is_on(const ar_ctx *c)
{
    return c->ledger && ar_comm_size(c->tp) > 1;
}

/* --- values ------------------------------------------------------------------------------------------------------- */

static ar_placement from_end(ar_placement p, int ndim)
{
    if (p.kind == AR_INVARIANT)
        return whole;
    return p.kind == AR_SHARD && p.dim >= 0 ? (ar_placement){AR_SHARD, p.dim - ndim} : p;
}

static void forget(ari_ledger *f, const void *ptr)
{
    for (size_t i = f->values; i-- > 0;) {
        if (!ptr || f->value[i].ptr == ptr)
            f->value[i] = f->value[--f->values];
    }
}

static ari_ledger_value value_of(const ari_ledger *f, const ar_tensor *t)
{
    ari_ledger_value v = {.ndim = t ? t->ndim : 0};
    for (int d = 0; d < v.ndim; d++)
        v.shape[d] = t->shape[d];
    for (size_t i = f->values; t && !v.known && i-- > 0;) {
        if (f->value[i].ptr == t->data.ptr)
            v = (ari_ledger_value){.known = true, .at = f->value[i].at, .ndim = v.ndim};
    }
    for (int d = 0; d < v.ndim; d++)
        v.shape[d] = t->shape[d];
    return v;
}

static ar_status place_value(ari_ledger *f, const ar_tensor *t, ar_placement at)
{
    if (!t || !t->data.ptr)
        return AR_OK;
    forget(f, t->data.ptr);
    AR_TRY(ARI_GROW(&f->value, &f->value_room, f->values, "placements"));
    f->value[f->values++] = (ledger_memory){t->data.ptr, from_end(at, t->ndim)};
    return AR_OK;
}

void ari_ledger_use(ar_ctx *c, ari_ledger *l)
{
    c->ledger = l;
    c->forget = forget;
}

ar_status ari_ledger_check(ar_ctx *c)
{
    ari_ledger *l = NULL;
    if (c->ledger)
        return AR_OK;
    AR_TRY(ARI_ALLOC_ZERO(&l, 1, "placements"));
    l->strict = true;
    ari_ledger_use(c, l);
    c->end_ledger = destroy;
    return AR_OK;
}

/* --- collectives -------------------------------------------------------------------------------------------------- */

ar_status ari_ledger_call_add(ari_ledger *l, const ari_call *call, int ranks, uint64_t bytes)
{
    const bool counts = call->counts && call->kind != ARI_ALL_TO_ALL;
    ari_ledger_call c = {.kind = call->kind,
                         .dtype = call->dtype,
                         .ranks = ranks,
                         .count = counts ? ari_counts_before(call->counts, ranks) : call->count,
                         .bytes = bytes};
    snprintf(c.tag, sizeof c.tag, "%s", call->tag);
    snprintf(c.queue, sizeof c.queue, "%s", call->on ? ari_queue_name(call->on) : "");
    AR_TRY(ARI_GROW(&l->call, &l->call_room, l->calls, "collectives"));
    l->call[l->calls++] = c;
    return AR_OK;
}

/* --- operations --------------------------------------------------------------------------------------------------- */

ari_ledger_place ari_ledger_enter(ar_ctx *c, const char *module, char pass)
{
    const ari_ledger_place outer = {c->ledger ? c->ledger->module : NULL, c->ledger ? c->ledger->pass : 'f'};
    if (c->ledger) {
        c->ledger->module = module;
        c->ledger->pass = pass;
    }
    return outer;
}

void ari_ledger_leave(ar_ctx *c, ari_ledger_place outer)
{
    if (!c->ledger)
        return;
    c->ledger->module = outer.module;
    c->ledger->pass = outer.pass;
}

static ar_status keep(ar_ctx *c, const char *name, ari_ledger_record *r)
{
    ari_ledger *f = c->ledger;
    uint64_t read, written;
    char has[AR_PLACEMENT_TEXT], needs[AR_PLACEMENT_TEXT];
    const char *of = name ? name : f->module ? f->module : "the batch";
    if (f->strict && r->kind == ARI_LEDGER_TAKES && r->in[0].known &&
        !ari_placement_same(r->in[0].at, r->needs, r->in[0].ndim))
        return ar_error_set(AR_ERR_DATA, "rank %d: %s, %s (%s): the value is %s, and is declared %s",
                            ar_comm_rank(c->world), of, r->operation, f->pass == 'b' ? "backward" : "forward",
                            ari_placement_name(has, r->in[0].at), ari_placement_name(needs, r->needs));
    if (f->strict || c->recomputing)
        return AR_OK;
    ari_ctx_counted(c, &read, &written);
    snprintf(r->name, sizeof r->name, "%s", of);
    r->pass = f->pass;
    if (f->records > f->first)
        f->record[f->records - 1].bytes = read + written - f->sent;
    f->sent = read + written;
    AR_TRY(ARI_GROW(&f->record, &f->record_room, f->records, "operations"));
    f->record[f->records++] = *r;
    return AR_OK;
}

ar_status ari_ledger_takes(ar_ctx *c, const char *name, const char *operation, const ar_tensor *x, ar_placement needs,
                           const ar_tensor *y, ar_placement makes)
{
    if (!is_on(c))
        return AR_OK;
    ari_ledger_record r = {.operation = operation, .kind = ARI_LEDGER_TAKES, .needs = from_end(needs, x ? x->ndim : 0)};
    r.in[0] = value_of(c->ledger, x);
    AR_TRY(place_value(c->ledger, y, makes));
    r.out = value_of(c->ledger, y);
    return keep(c, name, &r);
}

ar_status ari_ledger_made(ar_ctx *c, const ar_tensor *y, ar_placement at)
{
    if (!is_on(c))
        return AR_OK;
    AR_TRY(place_value(c->ledger, y, at));
    if (c->ledger->records > 0)
        c->ledger->record[c->ledger->records - 1].out = value_of(c->ledger, y);
    return AR_OK;
}

ar_status ari_ledger_rows(ar_ctx *c, const char *operation, ari_ledger_kind kind, const ar_tensor *x,
                          const ar_tensor *b, const ar_tensor *y)
{
    if (!is_on(c))
        return AR_OK;
    ari_ledger_record r = {.operation = operation, .kind = kind};
    r.in[0] = value_of(c->ledger, x);
    r.in[1] = value_of(c->ledger, b);
    const ari_ledger_value *of = r.in[0].known ? &r.in[0] : &r.in[1];
    if (of->known)
        AR_TRY(place_value(c->ledger, y, of->at));
    r.out = value_of(c->ledger, y);
    return keep(c, NULL, &r);
}

ar_status ari_ledger_gradient(ar_ctx *c, const char *name, const ar_tensor *terms, ar_placement needs)
{
    if (!is_on(c))
        return AR_OK;
    ari_ledger_record r = {.operation = "gradient", .kind = ARI_LEDGER_GRADIENT, .needs = from_end(needs, terms->ndim)};
    r.in[0] = value_of(c->ledger, terms);
    return keep(c, name, &r);
}

ar_status ari_ledger_declares(ar_ctx *c, const char *name, const ar_tensor *t, ar_placement as)
{
    if (!is_on(c))
        return AR_OK;
    ari_ledger_record r = {.operation = "report", .kind = ARI_LEDGER_TAKES, .needs = from_end(as, t->ndim)};
    r.in[0] = r.out = value_of(c->ledger, t);
    if (!r.in[0].known)
        return place_value(c->ledger, t, as);
    return ari_placement_same(r.in[0].at, r.needs, t->ndim) ? AR_OK : keep(c, name, &r);
}
