/* SPDX-License-Identifier: Apache-2.0 */
/* Schedules of a pipeline as lists. */
#include "ref/pipeline/schedule.h"
#include "ref/pipeline/schedule_private.h"

#include <stdlib.h>

static const char *const kinds[AR_PP_KINDS] = {
#define AR_PP_OPERATION_TEXT(name, text) text,
    AR_PP_OPERATION_TABLE(AR_PP_OPERATION_TEXT)
#undef AR_PP_OPERATION_TEXT
};

const char *ari_pp_kind_name(ar_pp_kind k)
{
    return (unsigned)k < AR_PP_KINDS ? kinds[k] : "?";
}

ar_status ari_schedule_begin(ar_pipeline_schedule **out, ar_pipeline_shape shape)
{
    ARI_OWNED_BY(ari_pipeline_schedule_destroy) ar_pipeline_schedule *s = NULL;
    if (shape.ranks < 1 || shape.stages < 1 || shape.micro_batches < 1)
        return ar_error_set(AR_ERR_ARG, "a pipeline of %d ranks, %d stages, %d micro-batches: each is at least 1",
                            shape.ranks, shape.stages, shape.micro_batches);
    if (shape.stages % shape.ranks != 0)
        return ar_error_set(AR_ERR_ARG, "%d stages on %d ranks: every rank has as many stages as the others",
                            shape.stages, shape.ranks);
    if (shape.stages > AR_MAX_STAGES)
        return ar_error_set(AR_ERR_ARG, "%d stages of a pipeline, at most %d", shape.stages, AR_MAX_STAGES);
    if ((size_t)shape.stages * (size_t)shape.micro_batches > AR_MAX_STAGE_MICRO_BATCHES)
        return ar_error_set(AR_ERR_OVERFLOW, "%d stages of %d micro-batches: at most %d of both multiplied",
                            shape.stages, shape.micro_batches, AR_MAX_STAGE_MICRO_BATCHES);
    AR_TRY(ARI_ALLOC_ZERO(&s, 1, "a schedule"));
    s->shape = shape;
    AR_TRY(ARI_ALLOC_ZERO(&s->lists, (size_t)shape.ranks, "a schedule"));
    ARI_GIVE(out, s);
    return AR_OK;
}

ar_status ari_pp_append(ari_pp_list *list, ar_pp_kind kind, int stage, int micro)
{
    AR_TRY(ARI_GROW(&list->operations, &list->capacity, list->count, "a schedule"));
    list->operations[list->count++] = (ar_pp_operation){.kind = kind, .stage = stage, .micro = micro};
    return AR_OK;
}

void ari_pipeline_schedule_destroy(ar_pipeline_schedule *s)
{
    for (int r = 0; s && s->lists && r < s->shape.ranks; r++)
        free(s->lists[r].operations);
    if (s)
        free(s->lists);
    free(s);
}

ar_pipeline_shape ari_pipeline_schedule_shape(const ar_pipeline_schedule *s)
{
    return s->shape;
}

const ar_pp_operation *ari_pipeline_schedule_rank(const ar_pipeline_schedule *s, int rank, size_t *count)
{
    *count = s->lists[rank].count;
    return s->lists[rank].operations;
}
