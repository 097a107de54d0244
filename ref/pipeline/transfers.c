/* SPDX-License-Identifier: Apache-2.0 */
/* Puts SEND and RECV into lists of computations. SEND follows the producer of the value. RECV precedes the computation
 * before its consumer, so that the transfer is overlapped; it is earlier if the sender makes a later value first, for
 * both ends need the same order. */
#include <stdlib.h>

#include "ref/pipeline/schedule.h"

/* A rank's receives in one direction, in the order of the sends. */
typedef struct receives {
    ar_pp_operation *op;
    size_t *at; /* before which of the rank's computations */
    size_t count, next;
} receives;

/* taken: of each (stage, micro-batch), which of the rank's computations takes it. */
static ar_status receives_find(receives *out, ari_arena *arena, const ar_pipeline_schedule *s, int rank,
                               ari_pp_direction d, const size_t *taken)
{
    const ar_pipeline_shape *shape = &s->shape;
    const int peer = (rank + (d == ARI_PP_ACTIVATION ? shape->ranks - 1 : 1)) % shape->ranks;
    const ari_pp_list *from = &s->of[peer];
    AR_TRY(ARI_TAKE(&out->op, arena, from->count, "a schedule"));
    AR_TRY(ARI_TAKE(&out->at, arena, from->count, "a schedule"));
    for (size_t i = 0; i < from->count; i++) {
        const ar_pp_operation *o = &from->at[i];
        const int target = ari_pp_target(shape, d, o->stage);
        if (!ari_pp_takes(o->kind) || ari_pp_direction_of(o->kind) != d || !ari_pp_apart(shape, o->stage, target))
            continue;
        const size_t user = taken[ari_pp_item(shape, target, o->micro)];
        out->op[out->count] = (ar_pp_operation){ari_pp_recv(d), target, o->micro};
        out->at[out->count++] = user > 0 ? user - 1 : 0;
    }
    for (size_t k = out->count; k-- > 1;)
        if (out->at[k - 1] > out->at[k])
            out->at[k - 1] = out->at[k];
    return AR_OK;
}

static ar_status receives_put(ari_pp_list *list, receives *r, size_t before)
{
    for (; r->next < r->count && r->at[r->next] <= before; r->next++)
        AR_TRY(ari_pp_append(list, r->op[r->next].kind, r->op[r->next].stage, r->op[r->next].micro));
    return AR_OK;
}

static bool sends(const ar_pipeline_schedule *s, const ar_pp_operation *o)
{
    return ari_pp_takes(o->kind) && ari_pp_peer(&s->shape, ari_pp_send(ari_pp_direction_of(o->kind)), o->stage) >= 0;
}

static ar_status merge(ari_pp_list *list, const ar_pipeline_schedule *s, int rank, receives r[ARI_PP_DIRECTIONS])
{
    size_t n = s->of[rank].count + r[ARI_PP_ACTIVATION].count + r[ARI_PP_GRADIENT].count;
    for (size_t i = 0; i < s->of[rank].count; i++)
        n += sends(s, &s->of[rank].at[i]);
    AR_TRY(ARI_ALLOC(&list->at, n, "a schedule"));
    list->capacity = n;
    for (size_t i = 0; i < s->of[rank].count; i++) {
        const ar_pp_operation *o = &s->of[rank].at[i];
        AR_TRY(receives_put(list, &r[ARI_PP_ACTIVATION], i));
        AR_TRY(receives_put(list, &r[ARI_PP_GRADIENT], i));
        AR_TRY(ari_pp_append(list, o->kind, o->stage, o->micro));
        if (sends(s, o))
            AR_TRY(ari_pp_append(list, ari_pp_send(ari_pp_direction_of(o->kind)), o->stage, o->micro));
    }
    return AR_OK;
}

/* taken: [directions][stages * micro-batches]. */
static ar_status rank_with_transfers(ari_pp_list *list, const ar_pipeline_schedule *s, int rank,
                                     size_t *const taken[ARI_PP_DIRECTIONS])
{
    ARI_ENDED(ari_arena_free) ari_arena arena = {0};
    receives r[ARI_PP_DIRECTIONS] = {0};
    for (size_t i = 0; i < s->of[rank].count; i++) {
        const ar_pp_operation *o = &s->of[rank].at[i];
        if (ari_pp_takes(o->kind))
            taken[ari_pp_direction_of(o->kind)][ari_pp_item(&s->shape, o->stage, o->micro)] = i;
    }
    for (int d = 0; d < ARI_PP_DIRECTIONS; d++)
        AR_TRY(receives_find(&r[d], &arena, s, rank, (ari_pp_direction)d, taken[d]));
    return merge(list, s, rank, r);
}

ar_status ari_schedule_add_transfers(ar_pipeline_schedule *s)
{
    ar_status st = AR_OK;
    size_t items = 0, *taken[ARI_PP_DIRECTIONS] = {NULL, NULL};
    ari_pp_list lists[AR_MAX_STAGES] = {0};
    AR_TRY(ari_mul_size(&items, (size_t)s->shape.stages, (size_t)s->shape.micro_batches));
    for (int d = 0; d < ARI_PP_DIRECTIONS; d++)
        AR_TRY_TO(done, st, ARI_ALLOC_ZERO(&taken[d], items, "a schedule"));
    for (int r = 0; r < s->shape.ranks; r++)
        AR_TRY_TO(done, st, rank_with_transfers(&lists[r], s, r, taken));
    for (int r = 0; r < s->shape.ranks; r++) { /* the old ones are freed below */
        const ari_pp_list old = s->of[r];
        s->of[r] = lists[r];
        lists[r] = old;
    }
done:
    for (int r = 0; r < s->shape.ranks; r++)
        free(lists[r].at);
    for (int d = 0; d < ARI_PP_DIRECTIONS; d++)
        free(taken[d]);
    return st;
}
