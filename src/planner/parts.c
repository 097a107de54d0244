/* SPDX-License-Identifier: Apache-2.0 */
#include "planner/parts.h"

#include <stdlib.h>

#include "ref/core/size.h"

ar_status ari_mesh_parts_add(ari_mesh_parts *a)
{
    AR_TRY(ari_grow(&a->family, &a->room, a->n, sizeof *a->family, "families of a mesh"));
    AR_TRY(ari_alloc_zero((void **)&a->family[a->n], 1, sizeof **a->family, "parts of a mesh"));
    a->n++;
    return AR_OK;
}

static void forget_family(ari_family_parts *family)
{
    for (int i = 0; i < ARI_PARTS_MICRO; i++) {
        if (family->passes[i])
            ari_passes_fini(family->passes[i]);
        free(family->passes[i]);
        for (int j = 0; j < ARI_PARTS_SHARED * AR_RECOMPUTES; j++)
            ari_sections_destroy(family->sections[i][j / AR_RECOMPUTES][j % AR_RECOMPUTES]);
    }
    for (int i = 0; i < 2 * ARI_PARTS_PIPELINES; i++) {
        ari_outside *outside = family->outside[i / ARI_PARTS_PIPELINES][i % ARI_PARTS_PIPELINES];
        if (outside)
            ari_outside_fini(outside);
        free(outside);
    }
    free(family);
}

void ari_mesh_parts_forget(ari_mesh_parts *a)
{
    for (size_t i = 0; i < a->n; i++)
        forget_family(a->family[i]);
    for (int i = 0; i < ARI_PARTS_MICRO * ARI_PARTS_PIPELINES; i++) {
        ar_pipeline_schedule_destroy(a->schedule[i / ARI_PARTS_PIPELINES][i % ARI_PARTS_PIPELINES]);
        ar_pipeline_schedule_destroy(a->few[i % ARI_PARTS_PIPELINES][i / ARI_PARTS_PIPELINES]);
    }
    free(a->family);
    *a = (ari_mesh_parts){.n = 0};
}

ar_status ari_mesh_parts_passes(ari_passes **borrows, ari_mesh_parts *a, size_t family, int i, const ari_planned *p,
                                const ari_time_options *o)
{
    ari_passes **at = &a->family[family]->passes[i], *made = NULL;
    if (!*at) {
        AR_TRY(ari_alloc_zero((void **)&made, 1, sizeof *made, "passes"));
        const ar_status st = ari_passes_init(made, p, o);
        if (st != AR_OK) {
            free(made);
            return st;
        }
        *at = made;
    }
    *borrows = *at;
    return AR_OK;
}

static ar_status outside_of(ari_outside **borrows, ari_mesh_parts *a, const ari_candidate *f, const ari_planned *p,
                            const ari_time_options *o)
{
    ari_outside **at = &a->family[f->family]->outside[f->choice.zero > 0][f->pipeline], *made = NULL;
    if (!*at) {
        AR_TRY(ari_alloc_zero((void **)&made, 1, sizeof *made, "sums of gradients"));
        const ar_status st = ari_outside_init(made, p, o);
        if (st != AR_OK) {
            free(made);
            return st;
        }
        *at = made;
    }
    *borrows = *at;
    return AR_OK;
}

static ar_status schedule_of(ar_pipeline_schedule **borrows, ari_mesh_parts *a, const ari_candidate *f,
                             const ari_planned *p)
{
    ar_pipeline_schedule **at = &a->schedule[f->micro][f->pipeline];
    if (!*at && f->choice.pp > 1)
        AR_TRY(ar_parallel_schedule(at, &p->step.run.parallel));
    *borrows = *at;
    return AR_OK;
}

/* ZeRO-3 alone gathers within the passes. */
ar_status ari_mesh_parts_alone(double *seconds, ari_mesh_parts *a, const ari_candidate *f, const ari_planned *p,
                               const ari_time_options *o)
{
    double *known = &a->family[f->family]->alone[f->pipeline][f->micro][f->choice.recompute];
    ari_passes *passes = NULL;
    ar_pipeline_schedule *schedule = NULL;
    *seconds = f->choice.zero < 3 ? *known : 0.0;
    if (*seconds > 0.0)
        return AR_OK;
    AR_TRY(ari_mesh_parts_passes(&passes, a, f->family, f->micro, p, o));
    AR_TRY(schedule_of(&schedule, a, f, p));
    AR_TRY(ari_time_alone(seconds, p, o, passes, schedule));
    if (f->choice.zero < 3)
        *known = *seconds;
    return AR_OK;
}

ar_status ari_mesh_parts_time(ari_time *t, ari_mesh_parts *a, const ari_candidate *f, const ari_planned *p,
                              const ari_time_options *o)
{
    ari_passes *passes = NULL;
    ari_outside *outside = NULL;
    ar_pipeline_schedule *schedule = NULL;
    AR_TRY(ari_mesh_parts_passes(&passes, a, f->family, f->micro, p, o));
    AR_TRY(outside_of(&outside, a, f, p, o));
    AR_TRY(schedule_of(&schedule, a, f, p));
    return ari_time_compose(t, p, o, passes, outside, schedule, f->alone);
}

/* Of the numbers of micro-batches that are more than memory can tell apart, all have the same one. */
static ar_status few_of(ar_pipeline_schedule **borrows, ari_mesh_parts *a, int pipeline, const ar_parallel *layout)
{
    ar_parallel few = *layout;
    ar_pipeline_schedule **at = a->few[pipeline];
    few.micro_batches = ari_memory_micro_batches(layout);
    while (*at && !few.own_schedule && ar_pipeline_schedule_shape(*at).micro_batches != few.micro_batches)
        at++;
    if (!*at)
        AR_TRY(ar_parallel_schedule(at, &few));
    *borrows = *at;
    return AR_OK;
}

ar_status ari_mesh_parts_memory(ari_memory *m, ari_mesh_parts *a, const ari_candidate *f, const ari_planned *p,
                                double enough)
{
    const int zero = f->choice.zero, shared = zero < 2 ? 0 : zero - 1 + (zero == 3 && f->choice.dp_replicate > 1);
    ari_sections **sections = &a->family[f->family]->sections[f->micro][shared][f->choice.recompute];
    ar_pipeline_schedule *few = NULL;
    if (!*sections)
        AR_TRY(ari_sections_create(sections, p));
    AR_TRY(few_of(&few, a, f->pipeline, &p->step.run.parallel));
    *m = ari_sections_memory(*sections, p, few, enough);
    return AR_OK;
}
