/* SPDX-License-Identifier: Apache-2.0 */
/* The four schedules. They are one loop: a rank goes forward `warm` times, then forward and backward by turns, then
 * backward; they differ in `warm`, and in whether the gradients of the weights follow later. */
#include <stdint.h>

#include "ref/pipeline/schedule.h"

typedef struct turns {
    ari_pp_list *list;
    ar_pipeline_shape shape;
    int rank, parts; /* stages of a rank */
    size_t total;    /* turns in one direction, those of micro-batches that there are not included */
} turns;

/* The stage and micro-batch of the k-th turn: p micro-batches go through the rank's first stage, then the same through
 * its second, and so on; back the last stage is first. False: a micro-batch that there is not. Where p does not divide
 * their number, the schedule is that of more without the last: what is left of a legal order is one. */
static bool pass_of_turn(int *stage, int *micro, const turns *t, size_t k, bool back)
{
    const size_t p = (size_t)t->shape.ranks, round = p * (size_t)t->parts, within = k % round;
    const int part = (int)(within / p);
    const size_t m = k / round * p + within % p;
    if (k >= t->total || m >= (size_t)t->shape.micro_batches)
        return false;
    *stage = (back ? t->parts - 1 - part : part) * t->shape.ranks + t->rank;
    *micro = (int)m;
    return true;
}

/* warm: turns forward before the first one back. late: turns by which W is behind I; SIZE_MAX: they are one, B. */
static ar_status take_turns(const turns *t, size_t warm, size_t late)
{
    const bool parted = late != SIZE_MAX;
    const size_t last = t->total + warm + (parted ? late : 0);
    int stage = 0, micro = 0;
    for (size_t k = 0; k < last; k++) {
        if (pass_of_turn(&stage, &micro, t, k, false))
            AR_TRY(ari_pp_append(t->list, AR_PP_FORWARD, stage, micro));
        if (k >= warm && pass_of_turn(&stage, &micro, t, k - warm, true))
            AR_TRY(ari_pp_append(t->list, parted ? AR_PP_BACKWARD_INPUT : AR_PP_BACKWARD, stage, micro));
        if (parted && k >= warm + late && pass_of_turn(&stage, &micro, t, k - warm - late, true))
            AR_TRY(ari_pp_append(t->list, AR_PP_BACKWARD_WEIGHT, stage, micro));
    }
    return AR_OK;
}

static ar_status fill_rank(ar_pipeline_schedule *s, ar_pp_schedule kind, int rank)
{
    turns t = {.list = &s->of[rank], .shape = s->shape, .rank = rank, .parts = s->shape.stages / s->shape.ranks};
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

ar_status ar_pipeline_schedule_create(ar_pipeline_schedule **gives, ar_pp_schedule kind, int ranks, int virtual_stages,
                                      int micro_batches)
{
    ARI_OWNED_BY(ar_pipeline_schedule_destroy) ar_pipeline_schedule *s = NULL;
    if ((unsigned)kind >= AR_PP_SCHEDULES)
        return ar_error_set(AR_ERR_ARG, "schedule %d, expected 0 (1f1b) to %d", (int)kind, AR_PP_SCHEDULES - 1);
    if (ranks < 1 || ranks > AR_MAX_STAGES || virtual_stages < 1 || virtual_stages > AR_MAX_STAGES)
        return ar_error_set(AR_ERR_ARG, "a pipeline of %d ranks with %d stages each: 1 to %d stages in all", ranks,
                            virtual_stages, AR_MAX_STAGES);
    if (virtual_stages > 1 && kind != AR_PP_INTERLEAVED)
        return ar_error_set(AR_ERR_ARG, "%d stages of each rank in %s; they take turns in interleaved alone",
                            virtual_stages, ar_pp_schedule_name(kind));
    AR_TRY(ari_schedule_begin(&s, (ar_pipeline_shape){ranks, ranks * virtual_stages, micro_batches}));
    for (int r = 0; r < ranks; r++)
        AR_TRY(fill_rank(s, kind, r));
    AR_TRY(ari_schedule_add_transfers(s));
    ARI_GIVE(gives, s);
    return AR_OK;
}

/* --- of one's own ------------------------------------------------------------------------------------------------- */

static ar_status copy_lists(ar_pipeline_schedule *s, const ar_pp_operation *const *lists, const size_t *counts)
{
    for (int r = 0; r < s->shape.ranks; r++)
        for (size_t i = 0; i < counts[r]; i++)
            AR_TRY(ari_pp_append(&s->of[r], lists[r][i].kind, lists[r][i].stage, lists[r][i].micro));
    return AR_OK;
}

static bool has_transfers(const ar_pipeline_schedule *s)
{
    for (int r = 0; r < s->shape.ranks; r++)
        for (size_t i = 0; i < s->of[r].count; i++)
            if (!ari_pp_computes(s->of[r].at[i].kind))
                return true;
    return false;
}

ar_status ari_schedule_finish(ar_pipeline_schedule *s)
{
    const bool transfers = has_transfers(s);
    AR_TRY(ari_schedule_check_lists(s, transfers));
    if (!transfers)
        AR_TRY(ari_schedule_add_transfers(s));
    return ari_schedule_check_together(s);
}

ar_status ar_pipeline_schedule_own(ar_pipeline_schedule **gives, ar_pipeline_shape shape,
                                   const ar_pp_operation *const *lists, const size_t *counts)
{
    ARI_OWNED_BY(ar_pipeline_schedule_destroy) ar_pipeline_schedule *s = NULL;
    AR_TRY(ari_schedule_begin(&s, shape));
    AR_TRY(copy_lists(s, lists, counts));
    AR_TRY(ari_schedule_finish(s));
    ARI_GIVE(gives, s);
    return AR_OK;
}
