/* SPDX-License-Identifier: Apache-2.0 */
/* Generates the four schedules by one loop: a rank runs `warm` forward passes, then alternates forward and backward,
 * then runs the remaining backward passes. The schedules differ in `warm` and in whether weight gradients are computed
 * later. */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/schedule_private.h"
#include "ref/pipeline/schedule.h"
#include "ref/pipeline/schedule_private.h"

/* --- transfers ---------------------------------------------------------------------------------------------------- */

/* Inserts SEND and RECV into lists of computations. SEND follows the operation that produces the value. RECV precedes
 * the computation before its consumer, so that the transfer overlaps with that computation; it is earlier if the sender
 * produces a later value first, because both ends need the same order. */

/* A rank's receives in one direction, in the order of the sends. */
typedef struct receives {
    ar_pp_operation *op;
    size_t *positions; /* index of the computation before which each receive is inserted */
    size_t count, next_op;
} receives;

/* Finds the receives of a rank. consumers: for each (stage, micro-batch), the index of the rank's computation that uses
 * the value. */
static ar_status receives_find(receives *out, ari_arena *arena, const ar_pipeline_schedule *s, int rank,
                               ari_pp_direction d, const size_t *consumers)
{
    const ar_pipeline_shape *shape = &s->shape;
    const int peer = (rank + (d == ARI_PP_ACTIVATION ? shape->ranks - 1 : 1)) % shape->ranks;
    const ari_pp_list *peer_list = &s->lists[peer];
    AR_TRY(ARI_TAKE(&out->op, arena, peer_list->count, "a schedule"));
    AR_TRY(ARI_TAKE(&out->positions, arena, peer_list->count, "a schedule"));
    for (size_t i = 0; i < peer_list->count; i++) {
        const ar_pp_operation *o = &peer_list->operations[i];
        const int target = ari_pp_target(shape, d, o->stage);
        if (!ari_pp_takes(o->kind) || ari_pp_direction_of(o->kind) != d ||
            !ari_pp_on_different_ranks(shape, o->stage, target))
            continue;
        const size_t user = consumers[ari_pp_item(shape, target, o->micro)];
        out->op[out->count] = (ar_pp_operation){ari_pp_recv(d), target, o->micro};
        out->positions[out->count++] = user > 0 ? user - 1 : 0;
    }
    for (size_t k = out->count; k-- > 1;)
        if (out->positions[k - 1] > out->positions[k])
            out->positions[k - 1] = out->positions[k];
    return AR_OK;
}

static ar_status receives_put(ari_pp_list *list, receives *r, size_t before)
{
    for (; r->next_op < r->count && r->positions[r->next_op] <= before; r->next_op++)
        AR_TRY(ari_pp_append(list, r->op[r->next_op].kind, r->op[r->next_op].stage, r->op[r->next_op].micro));
    return AR_OK;
}

static bool sends(const ar_pipeline_schedule *s, const ar_pp_operation *o)
{
    return ari_pp_takes(o->kind) && ari_pp_peer(&s->shape, ari_pp_send(ari_pp_direction_of(o->kind)), o->stage) >= 0;
}

static ar_status merge(ari_pp_list *list, const ar_pipeline_schedule *s, int rank, receives r[ARI_PP_DIRECTIONS])
{
    size_t n = s->lists[rank].count + r[ARI_PP_ACTIVATION].count + r[ARI_PP_GRADIENT].count;
    for (size_t i = 0; i < s->lists[rank].count; i++)
        n += sends(s, &s->lists[rank].operations[i]);
    AR_TRY(ARI_ALLOC(&list->operations, n, "a schedule"));
    list->capacity = n;
    for (size_t i = 0; i < s->lists[rank].count; i++) {
        const ar_pp_operation *o = &s->lists[rank].operations[i];
        AR_TRY(receives_put(list, &r[ARI_PP_ACTIVATION], i));
        AR_TRY(receives_put(list, &r[ARI_PP_GRADIENT], i));
        AR_TRY(ari_pp_append(list, o->kind, o->stage, o->micro));
        if (sends(s, o))
            AR_TRY(ari_pp_append(list, ari_pp_send(ari_pp_direction_of(o->kind)), o->stage, o->micro));
    }
    return AR_OK;
}

/* Inserts the transfers of a rank. consumers: [directions][stages * micro-batches]. */
static ar_status rank_with_transfers(ari_pp_list *list, const ar_pipeline_schedule *s, int rank,
                                     size_t *const consumers[ARI_PP_DIRECTIONS])
{
    ARI_ENDED(ari_arena_free) ari_arena arena = {0};
    receives r[ARI_PP_DIRECTIONS] = {0};
    for (size_t i = 0; i < s->lists[rank].count; i++) {
        const ar_pp_operation *o = &s->lists[rank].operations[i];
        if (ari_pp_takes(o->kind))
            consumers[ari_pp_direction_of(o->kind)][ari_pp_item(&s->shape, o->stage, o->micro)] = i;
    }
    for (int d = 0; d < ARI_PP_DIRECTIONS; d++)
        AR_TRY(receives_find(&r[d], &arena, s, rank, (ari_pp_direction)d, consumers[d]));
    return merge(list, s, rank, r);
}

/* Replaces lists of computations by lists with transfers. The lists must be legal except for deadlocks. Errors:
 * AR_ERR_OVERFLOW, AR_ERR_MEMORY. */
static ar_status schedule_add_transfers(ar_pipeline_schedule *s)
{
    ar_status st = AR_OK;
    size_t items = 0, *consumers[ARI_PP_DIRECTIONS] = {NULL, NULL};
    ari_pp_list lists[AR_MAX_STAGES] = {0};
    AR_TRY(ari_mul_size(&items, (size_t)s->shape.stages, (size_t)s->shape.micro_batches));
    for (int d = 0; d < ARI_PP_DIRECTIONS; d++)
        AR_TRY_TO(done, st, ARI_ALLOC_ZERO(&consumers[d], items, "a schedule"));
    for (int r = 0; r < s->shape.ranks; r++)
        AR_TRY_TO(done, st, rank_with_transfers(&lists[r], s, r, consumers));
    for (int r = 0; r < s->shape.ranks; r++) { /* the old lists are freed below */
        const ari_pp_list old = s->lists[r];
        s->lists[r] = lists[r];
        lists[r] = old;
    }
done:
    for (int r = 0; r < s->shape.ranks; r++)
        free(lists[r].operations);
    for (int d = 0; d < ARI_PP_DIRECTIONS; d++)
        free(consumers[d]);
    return st;
}

/* --- checks of a schedule ----------------------------------------------------------------------------------------- */

/* State for checking that a schedule is legal: each rank's list alone, the order of transfers between two ranks, and
 * deadlocks. */

/* A rank's list while it is read. */
typedef struct reader {
    const ar_pipeline_shape *shape;
    int rank;
    bool transfers;
    size_t op_index;      /* index of the operation */
    uint16_t *seen_kinds; /* [stages * micro-batches] bit k: an operation of kind k has occurred */
} reader;

static unsigned bit(ar_pp_kind k)
{
    return 1u << k;
}

static ar_status wrong(const reader *r, const ar_pp_operation *o, const char *format, ...) AR_PRINTF(3, 4);
static ar_status wrong(const reader *r, const ar_pp_operation *o, const char *format, ...)
{
    char problem[256];
    va_list args;
    va_start(args, format);
    vsnprintf(problem, sizeof problem, format, args);
    va_end(args);
    return ar_error_set(AR_ERR_FORMAT, "the schedule of rank %d, operation %zu: %d%s%d (stage %d, micro-batch %d) %s",
                        r->rank, r->op_index + 1, o->stage, ari_pp_kind_name(o->kind), o->micro, o->stage, o->micro,
                        problem);
}

/* Returns a missing predecessor of an operation; AR_PP_KINDS: none is missing. */
static ar_pp_kind lacks(const reader *r, const ar_pp_operation *o, unsigned seen_kinds)
{
    const ari_pp_direction d = ari_pp_direction_of(o->kind);
    unsigned required_kinds = 0;
    if (o->kind == AR_PP_BACKWARD || o->kind == AR_PP_BACKWARD_INPUT || o->kind == AR_PP_SEND_ACTIVATION)
        required_kinds = bit(AR_PP_FORWARD);
    if (o->kind == AR_PP_BACKWARD_WEIGHT || (o->kind == AR_PP_SEND_GRADIENT && !(seen_kinds & bit(AR_PP_BACKWARD))))
        required_kinds = bit(AR_PP_BACKWARD_INPUT);
    if (r->transfers && ari_pp_takes(o->kind) && ari_pp_peer(r->shape, ari_pp_recv(d), o->stage) >= 0)
        required_kinds |= bit(ari_pp_recv(d));
    for (int k = 0; k < AR_PP_KINDS; k++)
        if (required_kinds & ~seen_kinds & bit((ar_pp_kind)k))
            return (ar_pp_kind)k;
    return AR_PP_KINDS;
}

static ar_status check_named(const reader *r, const ar_pp_operation *o)
{
    if ((unsigned)o->kind >= AR_PP_KINDS)
        return ar_error_set(AR_ERR_FORMAT, "the schedule of rank %d, operation %zu: of kind %d, expected 0 to %d",
                            r->rank, r->op_index + 1, (int)o->kind, AR_PP_KINDS - 1);
    if (o->stage < 0 || o->stage >= r->shape->stages || o->micro < 0 || o->micro >= r->shape->micro_batches)
        return wrong(r, o, "is none of %d stages and %d micro-batches, which count from 0", r->shape->stages,
                     r->shape->micro_batches);
    if (o->stage % r->shape->ranks != r->rank)
        return wrong(r, o, "is rank %d's: stage s is rank s mod %d's", o->stage % r->shape->ranks, r->shape->ranks);
    return AR_OK;
}

static ar_status check_operation(const reader *r, const ar_pp_operation *o)
{
    AR_TRY(check_named(r, o));
    uint16_t *seen_kinds = &r->seen_kinds[ari_pp_item(r->shape, o->stage, o->micro)];
    if (*seen_kinds & bit(o->kind))
        return wrong(r, o, "is there twice");
    if (!ari_pp_computes(o->kind) && ari_pp_peer(r->shape, o->kind, o->stage) < 0)
        return wrong(r, o, "moves nothing: no other rank has the stage %s it",
                     (o->kind == AR_PP_SEND_ACTIVATION || o->kind == AR_PP_RECV_GRADIENT) ? "after" : "before");
    const unsigned parts = bit(AR_PP_BACKWARD_INPUT) | bit(AR_PP_BACKWARD_WEIGHT);
    const unsigned conflicting_kinds = o->kind == AR_PP_BACKWARD ? parts
                                       : (bit(o->kind) & parts)  ? bit(AR_PP_BACKWARD)
                                                                 : 0;
    if (*seen_kinds & conflicting_kinds)
        return wrong(r, o, "follows %s of the same micro-batch: a backward pass is B, or I and W",
                     o->kind == AR_PP_BACKWARD ? "I or W" : "B");
    const ar_pp_kind before = lacks(r, o, *seen_kinds);
    if (before < AR_PP_KINDS)
        return wrong(r, o, "is before %d%s%d, which it needs", o->stage, ari_pp_kind_name(before), o->micro);
    *seen_kinds = (uint16_t)(*seen_kinds | bit(o->kind));
    return AR_OK;
}

/* Checks that a (stage, micro-batch) had all its operations at the end. */
static ar_status check_complete(const reader *r, int stage, int micro)
{
    const unsigned seen_kinds = r->seen_kinds[ari_pp_item(r->shape, stage, micro)];
    unsigned required_kinds = bit(AR_PP_FORWARD);
    required_kinds |= seen_kinds & bit(AR_PP_BACKWARD_INPUT) ? bit(AR_PP_BACKWARD_INPUT) | bit(AR_PP_BACKWARD_WEIGHT)
                                                             : bit(AR_PP_BACKWARD);
    for (int k = AR_PP_SEND_ACTIVATION; r->transfers && k < AR_PP_KINDS; k++)
        required_kinds |= ari_pp_peer(r->shape, (ar_pp_kind)k, stage) >= 0 ? bit((ar_pp_kind)k) : 0;
    for (int k = 0; k < AR_PP_KINDS; k++) {
        if (!(required_kinds & ~seen_kinds & bit((ar_pp_kind)k)))
            continue;
        const char *name = ari_pp_kind_name((ar_pp_kind)k);
        if (ari_pp_computes((ar_pp_kind)k))
            return ar_error_set(AR_ERR_FORMAT, "the schedule of rank %d: %d%s%d (stage %d, micro-batch %d) is missing",
                                r->rank, stage, name, micro, stage, micro);
        const int peer = ari_pp_peer(r->shape, (ar_pp_kind)k, stage);
        const bool is_receive = ari_pp_receives((ar_pp_kind)k);
        const ar_pp_kind peer_kind = (ar_pp_kind)(is_receive ? k - 1 : k + 1);
        return ar_error_set(AR_ERR_FORMAT,
                            "the schedule of rank %d: %d%s%d (stage %d, micro-batch %d) is missing: rank %d %s it with "
                            "%d%s%d",
                            r->rank, stage, name, micro, stage, micro, peer % r->shape->ranks,
                            is_receive ? "sends" : "waits for", peer, ari_pp_kind_name(peer_kind), micro);
    }
    return AR_OK;
}

/* Checks that each list is legal; transfers false: the lists contain neither SEND nor RECV. Errors: AR_ERR_FORMAT,
 * AR_ERR_MEMORY. */
static ar_status schedule_check_lists(const ar_pipeline_schedule *s, bool transfers)
{
    ARI_OWNED uint16_t *seen_kinds = NULL;
    size_t items = 0;
    reader r = {.shape = &s->shape, .transfers = transfers};
    AR_TRY(ari_mul_size(&items, (size_t)s->shape.stages, (size_t)s->shape.micro_batches));
    AR_TRY(ARI_ALLOC_ZERO(&seen_kinds, items, "a schedule"));
    r.seen_kinds = seen_kinds;
    for (r.rank = 0; r.rank < s->shape.ranks; r.rank++) {
        for (r.op_index = 0; r.op_index < s->lists[r.rank].count; r.op_index++)
            AR_TRY(check_operation(&r, &s->lists[r.rank].operations[r.op_index]));
        for (int micro = 0; micro < s->shape.micro_batches; micro++)
            for (int stage = r.rank; stage < s->shape.stages; stage += s->shape.ranks)
                AR_TRY(check_complete(&r, stage, micro));
    }
    return AR_OK;
}

/* Returns the next operation of a kind in a list from *cursor on, and moves *cursor after it; NULL: none. */
static const ar_pp_operation *next_of(const ari_pp_list *list, size_t *cursor, ar_pp_kind k)
{
    while (*cursor < list->count)
        if (list->operations[(*cursor)++].kind == k)
            return &list->operations[*cursor - 1];
    return NULL;
}

/* Checks the order of transfers: both ends identify a transfer by its index among those of the two ranks in that
 * direction. */
static ar_status check_order(const ar_pipeline_schedule *s, int sender, ari_pp_direction d)
{
    const int p = s->shape.ranks, receiver = (sender + (d == ARI_PP_ACTIVATION ? 1 : p - 1)) % p;
    size_t i = 0, k = 0;
    for (;;) {
        const ar_pp_operation *out = next_of(&s->lists[sender], &i, ari_pp_send(d));
        const ar_pp_operation *receive_op = next_of(&s->lists[receiver], &k, ari_pp_recv(d));
        if (!out || !receive_op) /* both lists have their end of the transfer */
            return AR_OK;
        if (ari_pp_target(&s->shape, d, out->stage) != receive_op->stage || out->micro != receive_op->micro)
            return ar_error_set(
                AR_ERR_FORMAT,
                "the schedule of rank %d, operation %zu: %d%s%d (stage %d, micro-batch %d) meets %d%s%d "
                "of rank %d, its operation %zu: ranks have to receive in the order in which they are "
                "sent to",
                receiver, k, receive_op->stage, ari_pp_kind_name(receive_op->kind), receive_op->micro,
                receive_op->stage, receive_op->micro, out->stage, ari_pp_kind_name(out->kind), out->micro, sender, i);
    }
}

/* Checks that lists with transfers, each of them legal, are legal together. Errors: AR_ERR_FORMAT, AR_ERR_MEMORY. */
static ar_status schedule_check_together(const ar_pipeline_schedule *s)
{
    ARI_OWNED ar_pp_run *run = NULL;
    for (int r = 0; s->shape.ranks > 1 && r < s->shape.ranks; r++)
        for (int d = 0; d < ARI_PP_DIRECTIONS; d++)
            AR_TRY(check_order(s, r, (ari_pp_direction)d));
    AR_TRY(ARI_ALLOC(&run, 1, "a schedule"));
    return ari_schedule_walk(run, s, NULL, NULL, NULL);
}

/* --- generate ----------------------------------------------------------------------------------------------------- */

typedef struct turns {
    ari_pp_list *list;
    ar_pipeline_shape shape;
    int rank, parts; /* stages of a rank */
    size_t total;    /* turns in one direction, including those of missing micro-batches */
} turns;

/* Returns the stage and micro-batch of the k-th turn: p micro-batches pass the rank's first stage, then the same ones
 * its second stage, and so on; backward starts with the last stage. Returns false for a missing micro-batch. If p does
 * not divide their number, the schedule is that of the next multiple without the missing ones, which remains a legal
 * order. */
static bool pass_of_turn(int *stage, int *micro, const turns *t, size_t k, bool back)
{
    const size_t p = (size_t)t->shape.ranks, round = p * (size_t)t->parts, round_offset = k % round;
    const int part = (int)(round_offset / p);
    const size_t m = k / round * p + round_offset % p;
    if (k >= t->total || m >= (size_t)t->shape.micro_batches)
        return false;
    *stage = (back ? t->parts - 1 - part : part) * t->shape.ranks + t->rank;
    *micro = (int)m;
    return true;
}

/* Generates a rank's list. warm: forward passes before the first backward pass. late: number of turns between I and W;
 * SIZE_MAX: the two are one operation, B. */
static ar_status take_turns(const turns *t, size_t warm, size_t late)
{
    const bool differs = late != SIZE_MAX;
    const size_t turn_count = t->total + warm + (differs ? late : 0);
    int stage = 0, micro = 0;
    for (size_t k = 0; k < turn_count; k++) {
        if (pass_of_turn(&stage, &micro, t, k, false))
            AR_TRY(ari_pp_append(t->list, AR_PP_FORWARD, stage, micro));
        if (k >= warm && pass_of_turn(&stage, &micro, t, k - warm, true))
            AR_TRY(ari_pp_append(t->list, differs ? AR_PP_BACKWARD_INPUT : AR_PP_BACKWARD, stage, micro));
        if (differs && k >= warm + late && pass_of_turn(&stage, &micro, t, k - warm - late, true))
            AR_TRY(ari_pp_append(t->list, AR_PP_BACKWARD_WEIGHT, stage, micro));
    }
    return AR_OK;
}

static ar_status fill_rank(ar_pipeline_schedule *s, ar_pp_schedule kind, int rank)
{
    turns t = {.list = &s->lists[rank], .shape = s->shape, .rank = rank, .parts = s->shape.stages / s->shape.ranks};
    const size_t p = (size_t)s->shape.ranks, after = p - (size_t)rank - 1;
    const size_t rounds = ((size_t)s->shape.micro_batches - 1) / p + 1;
    AR_TRY(ari_mul_size(&t.total, rounds, p * (size_t)t.parts));
    switch (kind) {
    case AR_PP_GPIPE:
        return take_turns(&t, t.total, SIZE_MAX);
    case AR_PP_INTERLEAVED:
        return take_turns(&t, t.parts == 1 ? after : 2 * after + (size_t)(t.parts - 1) * p, SIZE_MAX);
    case AR_PP_ZERO_BUBBLE:
        return take_turns(&t, after, (size_t)rank);
    case AR_PP_1F1B:
    case AR_PP_SCHEDULES:
        break;
    }
    return take_turns(&t, after, SIZE_MAX);
}

ar_status ari_pipeline_schedule_create(ar_pipeline_schedule **out, ar_pp_schedule kind, int ranks, int virtual_stages,
                                       int micro_batches)
{
    ARI_OWNED_BY(ari_pipeline_schedule_destroy) ar_pipeline_schedule *s = NULL;
    if ((unsigned)kind >= AR_PP_SCHEDULES)
        return ar_error_set(AR_ERR_ARG, "schedule %d, expected 0 (1f1b) to %d", (int)kind, AR_PP_SCHEDULES - 1);
    if (ranks < 1 || ranks > AR_MAX_STAGES || virtual_stages < 1 || virtual_stages > AR_MAX_STAGES)
        return ar_error_set(AR_ERR_ARG, "a pipeline of %d ranks with %d stages each: 1 to %d stages in all", ranks,
                            virtual_stages, AR_MAX_STAGES);
    if (virtual_stages > 1 && kind != AR_PP_INTERLEAVED)
        return ar_error_set(AR_ERR_ARG, "%d stages of each rank in %s; they take turns in interleaved alone",
                            virtual_stages, ari_pp_schedule_name(kind));
    AR_TRY(ari_schedule_begin(&s, (ar_pipeline_shape){ranks, ranks * virtual_stages, micro_batches}));
    for (int r = 0; r < ranks; r++)
        AR_TRY(fill_rank(s, kind, r));
    AR_TRY(schedule_add_transfers(s));
    ARI_GIVE(out, s);
    return AR_OK;
}

/* --- of one's own ------------------------------------------------------------------------------------------------- */

static ar_status copy_lists(ar_pipeline_schedule *s, const ar_pp_operation *const *lists, const size_t *counts)
{
    for (int r = 0; r < s->shape.ranks; r++)
        for (size_t i = 0; i < counts[r]; i++)
            AR_TRY(ari_pp_append(&s->lists[r], lists[r][i].kind, lists[r][i].stage, lists[r][i].micro));
    return AR_OK;
}

static bool has_transfers(const ar_pipeline_schedule *s)
{
    for (int r = 0; r < s->shape.ranks; r++)
        for (size_t i = 0; i < s->lists[r].count; i++)
            if (!ari_pp_computes(s->lists[r].operations[i].kind))
                return true;
    return false;
}

ar_status ari_schedule_finish(ar_pipeline_schedule *s)
{
    const bool transfers = has_transfers(s);
    AR_TRY(schedule_check_lists(s, transfers));
    if (!transfers)
        AR_TRY(schedule_add_transfers(s));
    return schedule_check_together(s);
}

ar_status ari_pipeline_schedule_from_lists(ar_pipeline_schedule **out, ar_pipeline_shape shape,
                                           const ar_pp_operation *const *lists, const size_t *counts)
{
    ARI_OWNED_BY(ari_pipeline_schedule_destroy) ar_pipeline_schedule *s = NULL;
    AR_TRY(ari_schedule_begin(&s, shape));
    AR_TRY(copy_lists(s, lists, counts));
    AR_TRY(ari_schedule_finish(s));
    ARI_GIVE(out, s);
    return AR_OK;
}
