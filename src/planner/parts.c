/* SPDX-License-Identifier: Apache-2.0 */
#include "planner/parts.h"

#include <stdlib.h>

#include "ref/core/size.h"

ar_status ari_mesh_parts_add(ari_mesh_parts *a)
{
    AR_TRY(ari_grow(&a->form, &a->room, a->n, sizeof *a->form, "forms of a mesh"));
    AR_TRY(ari_alloc_zero((void **)&a->form[a->n], 1, sizeof **a->form, "parts of a mesh"));
    a->n++;
    return AR_OK;
}

static void forget_form(ari_form_parts *form)
{
    for (int i = 0; i < 2 * ARI_PARTS_MICRO; i++) {
        ari_passes *passes = form->passes[i / ARI_PARTS_MICRO][i % ARI_PARTS_MICRO];
        if (passes)
            ari_passes_fini(passes);
        free(passes);
    }
    for (int i = 0; i < 4 * ARI_PARTS_PIPELINES; i++) {
        ari_outside *outside =
            form->outside[i / 2 / ARI_PARTS_PIPELINES][i / ARI_PARTS_PIPELINES % 2][i % ARI_PARTS_PIPELINES];
        if (outside)
            ari_outside_fini(outside);
        free(outside);
    }
    free(form);
}

void ari_mesh_parts_forget(ari_mesh_parts *a)
{
    for (size_t i = 0; i < a->n; i++)
        forget_form(a->form[i]);
    for (int i = 0; i < ARI_PARTS_MICRO * ARI_PARTS_PIPELINES; i++)
        ar_pipeline_schedule_destroy(a->schedule[i / ARI_PARTS_PIPELINES][i % ARI_PARTS_PIPELINES]);
    free(a->form);
    *a = (ari_mesh_parts){.n = 0};
}

static ar_status passes_of(ari_passes **borrows, ari_mesh_parts *a, const ari_candidate *f, const ari_planned *p,
                           const ari_time_options *o)
{
    ari_passes **at = &a->form[f->form]->passes[f->choice.sp][f->micro], *made = NULL;
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
    const ari_choice *c = &f->choice;
    ari_outside **at = &a->form[f->form]->outside[c->sp][c->zero > 0][f->pipeline], *made = NULL;
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

ar_status ari_mesh_parts_least(double *seconds, ari_mesh_parts *a, const ari_candidate *f, const ari_planned *p,
                               const ari_time_options *o)
{
    ari_passes *passes = NULL;
    AR_TRY(passes_of(&passes, a, f, p, o));
    *seconds = ari_time_least(p, o, passes);
    return AR_OK;
}

ar_status ari_mesh_parts_time(ari_time *t, ari_mesh_parts *a, const ari_candidate *f, const ari_planned *p,
                              const ari_time_options *o)
{
    ari_passes *passes = NULL;
    ari_outside *outside = NULL;
    AR_TRY(passes_of(&passes, a, f, p, o));
    AR_TRY(outside_of(&outside, a, f, p, o));
    ar_pipeline_schedule **schedule = &a->schedule[f->micro][f->pipeline];
    if (!*schedule && f->choice.pp > 1)
        AR_TRY(ar_parallel_schedule(schedule, &p->step.run.parallel));
    return ari_time_compose(t, p, o, passes, outside, *schedule);
}
