/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/record/ledger.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/comm/call.h"
#include "ref/context/context.h"
#include "ref/core/queue_private.h"
#include "ref/core/size.h"
#include "ref/core/tensor_private.h"
#include "ref/placement/placement_private.h"

/* A value in memory [begin, begin + bytes). */
typedef struct ari_ledger_memory {
    const char *begin;
    size_t bytes, id;
    bool placed; /* for strict checks: placement over tp is `placement` */
    ar_placement placement;
} ledger_memory;

const char *ari_ledger_kind_name(ari_ledger_kind k)
{
    static const char *const names[] = {
#define LEDGER_NAME(name, text) text,
        ARI_LEDGER_TABLE(LEDGER_NAME)
#undef LEDGER_NAME
    };
    return (unsigned)k < ARI_LEDGER_KINDS ? names[k] : "?";
}

void ari_ledger_fini(ari_ledger *l)
{
    free(l->memory);
    free(l->operation);
    free(l->param);
    free(l->use);
    free(l->call);
}

static void destroy(ari_ledger *l)
{
    ari_ledger_fini(l);
    free(l);
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

/* The index of the first entry that begins behind `address`. */
static size_t behind(const ari_ledger *l, const char *address)
{
    size_t low = 0, high = l->memories;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (l->memory[middle].begin <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Returns the value that begins at an address or contains it; NULL: none. */
static ledger_memory *memory_at(const ari_ledger *l, const void *address)
{
    const char *byte_address = address;
    for (size_t i = byte_address ? behind(l, byte_address) : 0; i-- > 0;) {
        ledger_memory *m = &l->memory[i];
        if (byte_address < m->begin + m->bytes || byte_address == m->begin)
            return m;
    }
    return NULL;
}

/* Removes entries [begin, end). */
static void remove_memory(ari_ledger *l, size_t begin, size_t end)
{
    if (end > begin) /* without elements there is no array */
        memmove(&l->memory[begin], &l->memory[end], (l->memories - end) * sizeof *l->memory);
    l->memories -= end - begin;
}

/* Records a value in memory where other values may have begun. */
static ar_status put_memory(ari_ledger *l, ledger_memory m)
{
    size_t begin = behind(l, m.begin), end = begin;
    while (begin > 0 && l->memory[begin - 1].begin == m.begin)
        begin--;
    while (end < l->memories && l->memory[end].begin < m.begin + m.bytes)
        end++;
    remove_memory(l, begin, end);
    AR_TRY(ARI_GROW(&l->memory, &l->memory_room, l->memories, "values of a record"));
    memmove(&l->memory[begin + 1], &l->memory[begin], (l->memories - begin) * sizeof *l->memory);
    l->memory[begin] = m;
    l->memories++;
    return AR_OK;
}

/* Forgets the value in some memory; NULL: forgets everything. */
static void forget(ari_ledger *l, const void *address)
{
    const char *byte_address = address;
    size_t end = byte_address ? behind(l, byte_address) : l->memories, begin = byte_address ? end : 0;
    while (byte_address && begin > 0 && l->memory[begin - 1].begin == byte_address)
        begin--;
    remove_memory(l, begin, end);
}

ar_status ari_ledger_copy(ari_ledger *l, const void *dst, size_t bytes, const void *src)
{
    const ledger_memory *m = memory_at(l, src);
    if (!m || m->begin == dst)
        return AR_OK;
    ledger_memory copy = *m;
    copy.begin = dst;
    copy.bytes = bytes;
    return put_memory(l, copy);
}

/* --- collectives -------------------------------------------------------------------------------------------------- */

ar_status ari_ledger_call_add(ari_ledger *l, const ari_call *call, int group, int ranks, uint64_t bytes)
{
    const bool counts = call->counts && call->kind != ARI_ALL_TO_ALL;
    ari_ledger_call c = {.kind = call->kind,
                         .dtype = call->dtype,
                         .group = group,
                         .ranks = ranks,
                         .peer = call->peer,
                         .count = counts ? ari_counts_before(call->counts, ranks) : call->count,
                         .bytes = bytes};
    snprintf(c.tag, sizeof c.tag, "%s", call->tag);
    snprintf(c.queue, sizeof c.queue, "%s", call->queue ? ari_queue_name(call->queue) : "");
    AR_TRY(ARI_GROW(&l->call, &l->call_room, l->calls, "collectives"));
    l->call[l->calls++] = c;
    return AR_OK;
}

/* --- use ---------------------------------------------------------------------------------------------------------- */

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
    l->pass = 's';
    ari_ledger_use(c, l);
    c->end_ledger = destroy;
    return AR_OK;
}

void ari_ledger_work(const ar_ctx *c, double multiply_adds)
{
    if (c->ledger)
        c->ledger->work += multiply_adds;
}

ari_ledger_place ari_ledger_enter(ar_ctx *c, const char *module, char pass)
{
    const ari_ledger_place outer = {c->ledger ? c->ledger->module : NULL, c->ledger ? c->ledger->pass : 's'};
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

/* --- operations --------------------------------------------------------------------------------------------------- */

static ar_placement from_end(ar_placement p, int ndim)
{
    return p.kind == AR_SHARD && p.dim >= 0 ? (ar_placement){AR_SHARD, p.dim - ndim} : p;
}

/* Returns the placement of a parameter over tensor-parallel ranks, in the form [out, in] if a layer has it, derived
 * from this rank's part. */
static ar_placement placement_of(const ar_param *p)
{
    for (int d = 0; d < p->value.ndim && d < p->layout.ndim; d++) {
        if (p->value.shape[d] != p->layout.shape[d])
            return (ar_placement){AR_SHARD, p->transposed ? 1 - d : d};
    }
    return (ar_placement){AR_REPLICATE, 0};
}

static ar_status use_param(ari_ledger *l, ar_param *p, const ar_placement *placed)
{
    if (p->recorded == 0) {
        AR_TRY(ARI_GROW(&l->param, &l->param_room, l->params, "parameters of a record"));
        ari_ledger_param *entry = &l->param[l->params++];
        *entry = (ari_ledger_param){.placement = placement_of(p),
                                    .ndim = p->value.ndim,
                                    .trained = p->requires_grad,
                                    .expert = p->expert,
                                    .is_tied = p->ends};
        snprintf(entry->name, sizeof entry->name, "%s", p->name);
        memcpy(entry->shape, p->layout.shape, (size_t)p->layout.ndim * sizeof *entry->shape);
        memcpy(entry->local, p->value.shape, (size_t)p->value.ndim * sizeof *entry->local);
        p->recorded = l->params;
    }
    AR_TRY(ARI_GROW(&l->use, &l->use_room, l->uses, "parameters of a record"));
    if (placed)
        l->param[p->recorded - 1].placement = *placed;
    l->use[l->uses++] = p->recorded - 1;
    return AR_OK;
}

static ari_ledger_value value_of(const ari_ledger *l, const ar_tensor *t)
{
    ari_ledger_value v = {.dtype = t->dtype, .ndim = t->ndim};
    const ledger_memory *m = memory_at(l, t->data.ptr);
    memcpy(v.shape, t->shape, (size_t)t->ndim * sizeof *v.shape);
    v.id = m ? m->id : 0;
    return v;
}

/* Sets the placement of the value with this number. placement NULL: unknown. */
static ar_status place_value(ari_ledger *l, const ar_tensor *t, size_t id, const ar_placement *placement)
{
    ledger_memory m = {.begin = t->data.ptr, .bytes = ari_tensor_span(t), .id = id, .placed = placement != NULL};
    if (placement)
        m.placement = from_end(*placement, t->ndim);
    return m.begin ? put_memory(l, m) : AR_OK;
}

/* Refuses a value whose placement differs from the declared one. */
static ar_status refuse_placement(const ar_ctx *c, const ari_note *n, const char *name, ar_placement actual,
                                  ar_placement expected)
{
    char text[2][AR_PLACEMENT_TEXT];
    return ar_error_set(AR_ERR_DATA, "rank %d: %s, %s (%s): the value is %s, and is declared %s",
                        ar_comm_rank(c->world), name, n->operation ? n->operation : ari_ledger_kind_name(n->kind),
                        c->ledger->pass == 'b' ? "backward" : "forward", ari_placement_name(text[0], actual),
                        ari_placement_name(text[1], expected));
}

static ar_placement replicated(ar_placement p)
{
    return p.kind == AR_INVARIANT ? (ar_placement){AR_REPLICATE, 0} : p;
}

/* In a checking context, compares the first input with the required placement, and sets the outputs' placements. */
static ar_status check_note(const ar_ctx *c, const ari_note *n, const char *name)
{
    ari_ledger *l = c->ledger;
    const ledger_memory *m = n->input[0] ? memory_at(l, n->input[0]->data.ptr) : NULL;
    const ledger_memory *second_input = n->input[0] && n->input[1] ? memory_at(l, n->input[1]->data.ptr) : NULL;
    const ar_placement *output_placement = n->output_placement;
    ar_placement inherited;
    if (n->input_placement && m && m->placed) {
        const ar_placement actual = replicated(m->placement),
                           expected = replicated(from_end(*n->input_placement, n->input[0]->ndim));
        if (!ari_placement_same(actual, expected, n->input[0]->ndim))
            return refuse_placement(c, n, name, actual, expected);
    }
    if (!output_placement && ((m && m->placed) || (second_input && second_input->placed))) {
        inherited = m && m->placed ? m->placement : second_input->placement;
        output_placement = &inherited;
    }
    for (int i = 0; output_placement && i < ARI_LEDGER_VALUES && n->out[i]; i++)
        AR_TRY(place_value(l, n->out[i], 0, output_placement));
    if (n->kind == ARI_LEDGER_REPORT && n->input_placement && !m)
        AR_TRY(place_value(l, n->input[0], 0, n->input_placement));
    return AR_OK;
}

static ar_status record_note(const ar_ctx *c, const ari_note *n, const char *name)
{
    ari_ledger *l = c->ledger;
    ari_ledger_operation op = {.kind = n->kind,
                               .operation = n->operation ? n->operation : ari_ledger_kind_name(n->kind),
                               .pass = n->pass ? n->pass : l->pass,
                               .is_recomputed = c->recomputing,
                               .counting = c->counting,
                               .multiply_adds = l->work,
                               .sample = c->first_sample,
                               .first_use = l->uses,
                               .uses = n->params,
                               .needs_so = n->input_placement,
                               .makes_so = n->output_placement,
                               .copies = n->copies ? ar_comm_size(n->copies) : 1,
                               .first_call = l->noted,
                               .calls = l->calls - l->noted};
    snprintf(op.name, sizeof op.name, "%s", name);
    for (; op.inputs < ARI_LEDGER_VALUES && n->input[op.inputs]; op.inputs++) {
        const ar_tensor *t = n->input[op.inputs];
        op.input[op.inputs] = value_of(l, t);
        if (n->kind == ARI_LEDGER_REPORT && op.input[0].id == 0) {
            op.input[0].id = ++l->ids;
            AR_TRY(place_value(l, t, op.input[0].id, NULL));
        }
    }
    if (n->input_placement)
        op.input_placement = from_end(*n->input_placement, n->input[0] ? n->input[0]->ndim : 0);
    if (n->output_placement)
        op.output_placement = from_end(*n->output_placement, n->out[0] ? n->out[0]->ndim : 0);
    for (; op.outputs < ARI_LEDGER_VALUES && n->out[op.outputs]; op.outputs++) {
        AR_TRY(place_value(l, n->out[op.outputs], ++l->ids, NULL));
        op.out[op.outputs] = value_of(l, n->out[op.outputs]);
    }
    for (size_t i = 0; i < n->params; i++)
        AR_TRY(use_param(l, n->param[i], n->placed));
    l->noted = l->calls;
    l->work = 0.0;
    AR_TRY(ARI_GROW(&l->operation, &l->operation_room, l->operations, "operations"));
    l->operation[l->operations++] = op;
    return AR_OK;
}

ar_status ari_ledger_note(const ar_ctx *c, const ari_note *n)
{
    char name[128];
    const char *module = c->ledger->module ? c->ledger->module : "";
    snprintf(name, sizeof name, "%s", n->name ? n->name : module);
    return (c->ledger->strict ? check_note : record_note)(c, n, name);
}

void ari_ledger_module(char *out, size_t cap, const ari_ledger_operation *op)
{
    static const char suffix[] = ".weight";
    const size_t n = strlen(op->name), end = sizeof suffix - 1;
    const bool of_param = op->kind == ARI_LEDGER_WEIGHT_GRADIENT || op->kind == ARI_LEDGER_GRADIENT_SUM ||
                          op->kind == ARI_LEDGER_BROADCAST || op->kind == ARI_LEDGER_WEIGHT_GATHER;
    const bool cut = !of_param && n > end && strcmp(op->name + n - end, suffix) == 0;
    snprintf(out, cap, "%.*s", (int)(cut ? n - end : n), op->name);
}
