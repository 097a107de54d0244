/* SPDX-License-Identifier: Apache-2.0 */
/* Checks that a schedule is legal: each rank's list by itself, the order of transfers between two ranks, deadlocks. */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/pipeline/schedule.h"

/* A rank's list while it is gone through. */
typedef struct reader {
    const ar_pipeline_shape *shape;
    int rank;
    bool transfers;
    size_t at;      /* the operation's place */
    uint16_t *done; /* [stages * micro-batches]: bit k: the operation of kind k has been */
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
                        r->rank, r->at + 1, o->stage, ar_pp_kind_name(o->kind), o->micro, o->stage, o->micro, problem);
}

/* A missing predecessor of an operation; AR_PP_KINDS: none is missing. */
static ar_pp_kind lacks(const reader *r, const ar_pp_operation *o, unsigned done)
{
    const ari_pp_direction d = ari_pp_direction_of(o->kind);
    unsigned needs = 0;
    if (o->kind == AR_PP_BACKWARD || o->kind == AR_PP_BACKWARD_INPUT || o->kind == AR_PP_SEND_ACTIVATION)
        needs = bit(AR_PP_FORWARD);
    if (o->kind == AR_PP_BACKWARD_WEIGHT || (o->kind == AR_PP_SEND_GRADIENT && !(done & bit(AR_PP_BACKWARD))))
        needs = bit(AR_PP_BACKWARD_INPUT);
    if (r->transfers && ari_pp_takes(o->kind) && ari_pp_peer(r->shape, ari_pp_recv(d), o->stage) >= 0)
        needs |= bit(ari_pp_recv(d));
    for (int k = 0; k < AR_PP_KINDS; k++)
        if (needs & ~done & bit((ar_pp_kind)k))
            return (ar_pp_kind)k;
    return AR_PP_KINDS;
}

static ar_status check_named(const reader *r, const ar_pp_operation *o)
{
    if ((unsigned)o->kind >= AR_PP_KINDS)
        return ar_error_set(AR_ERR_FORMAT, "the schedule of rank %d, operation %zu: of kind %d, expected 0 to %d",
                            r->rank, r->at + 1, (int)o->kind, AR_PP_KINDS - 1);
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
    uint16_t *done = &r->done[ari_pp_item(r->shape, o->stage, o->micro)];
    if (*done & bit(o->kind))
        return wrong(r, o, "is there twice");
    if (!ari_pp_computes(o->kind) && ari_pp_peer(r->shape, o->kind, o->stage) < 0)
        return wrong(r, o, "moves nothing: no other rank has the stage %s it",
                     (o->kind == AR_PP_SEND_ACTIVATION || o->kind == AR_PP_RECV_GRADIENT) ? "after" : "before");
    const unsigned parts = bit(AR_PP_BACKWARD_INPUT) | bit(AR_PP_BACKWARD_WEIGHT);
    const unsigned other = o->kind == AR_PP_BACKWARD ? parts : (bit(o->kind) & parts) ? bit(AR_PP_BACKWARD) : 0;
    if (*done & other)
        return wrong(r, o, "follows %s of the same micro-batch: a backward pass is B, or I and W",
                     o->kind == AR_PP_BACKWARD ? "I or W" : "B");
    const ar_pp_kind before = lacks(r, o, *done);
    if (before < AR_PP_KINDS)
        return wrong(r, o, "is before %d%s%d, which it needs", o->stage, ar_pp_kind_name(before), o->micro);
    *done = (uint16_t)(*done | bit(o->kind));
    return AR_OK;
}

/* Checks that a (stage, micro-batch) has had all its operations in the end. */
static ar_status check_complete(const reader *r, int stage, int micro)
{
    const unsigned done = r->done[ari_pp_item(r->shape, stage, micro)];
    unsigned all = bit(AR_PP_FORWARD);
    all |=
        done & bit(AR_PP_BACKWARD_INPUT) ? bit(AR_PP_BACKWARD_INPUT) | bit(AR_PP_BACKWARD_WEIGHT) : bit(AR_PP_BACKWARD);
    for (int k = AR_PP_SEND_ACTIVATION; r->transfers && k < AR_PP_KINDS; k++)
        all |= ari_pp_peer(r->shape, (ar_pp_kind)k, stage) >= 0 ? bit((ar_pp_kind)k) : 0;
    for (int k = 0; k < AR_PP_KINDS; k++) {
        if (!(all & ~done & bit((ar_pp_kind)k)))
            continue;
        const char *name = ar_pp_kind_name((ar_pp_kind)k);
        if (ari_pp_computes((ar_pp_kind)k))
            return ar_error_set(AR_ERR_FORMAT, "the schedule of rank %d: %d%s%d (stage %d, micro-batch %d) is missing",
                                r->rank, stage, name, micro, stage, micro);
        const int peer = ari_pp_peer(r->shape, (ar_pp_kind)k, stage);
        const bool receives = ari_pp_receives((ar_pp_kind)k);
        const ar_pp_kind other = (ar_pp_kind)(receives ? k - 1 : k + 1);
        return ar_error_set(AR_ERR_FORMAT,
                            "the schedule of rank %d: %d%s%d (stage %d, micro-batch %d) is missing: rank %d %s it with "
                            "%d%s%d",
                            r->rank, stage, name, micro, stage, micro, peer % r->shape->ranks,
                            receives ? "sends" : "waits for", peer, ar_pp_kind_name(other), micro);
    }
    return AR_OK;
}

ar_status ari_schedule_check_lists(const ar_pipeline_schedule *s, bool transfers)
{
    ARI_OWNED uint16_t *done = NULL;
    size_t items = 0;
    reader r = {.shape = &s->shape, .transfers = transfers};
    AR_TRY(ari_mul_size(&items, (size_t)s->shape.stages, (size_t)s->shape.micro_batches));
    AR_TRY(ARI_ALLOC_ZERO(&done, items, "a schedule"));
    r.done = done;
    for (r.rank = 0; r.rank < s->shape.ranks; r.rank++) {
        for (r.at = 0; r.at < s->of[r.rank].count; r.at++)
            AR_TRY(check_operation(&r, &s->of[r.rank].at[r.at]));
        for (int micro = 0; micro < s->shape.micro_batches; micro++)
            for (int stage = r.rank; stage < s->shape.stages; stage += s->shape.ranks)
                AR_TRY(check_complete(&r, stage, micro));
    }
    return AR_OK;
}

/* The next operation of a kind in a list from *at on, which is left behind it; NULL: none. */
static const ar_pp_operation *next_of(const ari_pp_list *list, size_t *at, ar_pp_kind k)
{
    while (*at < list->count)
        if (list->at[(*at)++].kind == k)
            return &list->at[*at - 1];
    return NULL;
}

/* Both ends know a transfer by its place among those of the two ranks in that direction. */
static ar_status check_order(const ar_pipeline_schedule *s, int sender, ari_pp_direction d)
{
    const int p = s->shape.ranks, receiver = (sender + (d == ARI_PP_ACTIVATION ? 1 : p - 1)) % p;
    size_t i = 0, k = 0;
    for (;;) {
        const ar_pp_operation *out = next_of(&s->of[sender], &i, ari_pp_send(d));
        const ar_pp_operation *in = next_of(&s->of[receiver], &k, ari_pp_recv(d));
        if (!out || !in) /* both: each list has what the other's needs */
            return AR_OK;
        if (ari_pp_target(&s->shape, d, out->stage) != in->stage || out->micro != in->micro)
            return ar_error_set(
                AR_ERR_FORMAT,
                "the schedule of rank %d, operation %zu: %d%s%d (stage %d, micro-batch %d) meets %d%s%d "
                "of rank %d, its operation %zu: ranks have to receive in the order in which they are "
                "sent to",
                receiver, k, in->stage, ar_pp_kind_name(in->kind), in->micro, in->stage, in->micro, out->stage,
                ar_pp_kind_name(out->kind), out->micro, sender, i);
    }
}

ar_status ari_schedule_check_together(const ar_pipeline_schedule *s)
{
    ARI_OWNED ar_pp_run *run = NULL;
    for (int r = 0; s->shape.ranks > 1 && r < s->shape.ranks; r++)
        for (int d = 0; d < ARI_PP_DIRECTIONS; d++)
            AR_TRY(check_order(s, r, (ari_pp_direction)d));
    AR_TRY(ARI_ALLOC(&run, 1, "a schedule"));
    return ari_schedule_walk(run, s, NULL, NULL, NULL);
}
