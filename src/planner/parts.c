/* SPDX-License-Identifier: Apache-2.0 */
#include "planner/parts.h"

#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"

ar_status ari_mesh_parts_add(ari_mesh_parts *a)
{
    AR_TRY(ari_grow(&a->family, &a->room, a->n, sizeof *a->family, "families of a mesh"));
    AR_TRY(ari_alloc_zero((void **)&a->family[a->n], 1, sizeof **a->family, "parts of a mesh"));
    a->n++;
    return AR_OK;
}

/* --- passes ------------------------------------------------------------------------------------------------------- */

/* What a micro-batch's passes depend on besides tp and cp. The groups that call in them lie within those of dp and pp, so
 * these change nothing of their links. */
typedef struct pass_case {
    size_t samples;
    int dp, micros; /* of a batch that they do not divide; else 0 */
    int cp_inner, ep, etp, overlap;
    bool sp, zigzag;
} pass_case;

struct ari_shared_passes {
    ari_shared_passes *next;
    pass_case of;
    ari_passes passes;
};

static pass_case pass_case_of(const ari_planned *p)
{
    const ar_parallel *l = &p->step.run.parallel;
    const size_t dp = (size_t)ari_at_least_one(l->dp), micros = (size_t)ari_at_least_one(l->micro_batches);
    const size_t batch = p->step.run.batch;
    const bool even = batch % (dp * micros) == 0;
    return (pass_case){.samples = batch / dp / micros,
                       .dp = even ? 0 : l->dp,
                       .micros = even ? 0 : l->micro_batches,
                       .cp_inner = l->cp_inner,
                       .ep = l->ep,
                       .etp = l->etp,
                       .overlap = l->overlap,
                       .sp = l->sp,
                       .zigzag = l->zigzag};
}

static bool same_case(const pass_case *a, const pass_case *b)
{
    return a->samples == b->samples && a->dp == b->dp && a->micros == b->micros && a->cp_inner == b->cp_inner &&
           a->ep == b->ep && a->etp == b->etp && a->overlap == b->overlap && a->sp == b->sp && a->zigzag == b->zigzag;
}

static void forget_passes(ari_mesh_parts *a)
{
    for (int i = 0; i < ARI_PARTS_LISTS; i++) {
        for (ari_shared_passes *s = a->passes[i], *next; s; s = next) {
            next = s->next;
            ari_passes_fini(&s->passes);
            free(s);
        }
        a->passes[i] = NULL;
    }
}

ar_status ari_mesh_parts_passes(ari_passes **borrows, ari_mesh_parts *a, size_t family, int i, const ari_planned *p,
                                const ari_time_options *o)
{
    ari_passes **at = &a->family[family]->passes[i];
    ari_shared_passes *made = NULL;
    *borrows = *at;
    if (*at)
        return AR_OK;
    const pass_case of = pass_case_of(p);
    ari_shared_passes **list = &a->passes[of.samples % ARI_PARTS_LISTS], *s = *list;
    while (s && !same_case(&s->of, &of))
        s = s->next;
    if (!s) {
        AR_TRY(ARI_ALLOC_ZERO(&made, 1, "passes"));
        const ar_status st = ari_passes_init(&made->passes, p, o);
        if (st != AR_OK) {
            free(made);
            return st;
        }
        made->of = of;
        made->next = *list;
        *list = s = made;
    }
    *borrows = *at = &s->passes;
    return AR_OK;
}

/* Passes of micro-batches through stages beyond which schedules are not kept: megabytes. */
enum { MOST_OPERATIONS = 1 << 16 };

/* --- a mesh ------------------------------------------------------------------------------------------------------- */

static void forget_family(ari_family_parts *family)
{
    for (int i = 0; i < ARI_PARTS_MICRO * ARI_PARTS_SHARED * AR_RECOMPUTES; i++)
        ari_sections_destroy((&family->sections[0][0][0])[i]);
    for (int i = 0; i < 2 * ARI_PARTS_PIPELINES; i++) {
        ari_outside *outside = family->outside[i / ARI_PARTS_PIPELINES][i % ARI_PARTS_PIPELINES];
        if (outside)
            ari_outside_fini(outside);
        free(outside);
    }
    free(family);
}

static void forget_schedules(ari_mesh_parts *a)
{
    for (int i = 0; i < ARI_PARTS_MICRO * ARI_PARTS_PIPELINES; i++) {
        ar_pipeline_schedule_destroy((&a->schedule[0][0])[i]);
        (&a->schedule[0][0])[i] = NULL;
    }
    a->operations = 0;
}

void ari_mesh_parts_begin(ari_mesh_parts *a, int tp, int cp)
{
    for (size_t i = 0; i < a->n; i++)
        forget_family(a->family[i]);
    forget_schedules(a);
    for (int i = 0; i < ARI_PARTS_MICRO * ARI_PARTS_PIPELINES; i++)
        ar_pipeline_schedule_destroy((&a->few[0][0])[i]);
    free(a->family);
    if (a->tp != tp || a->cp != cp)
        forget_passes(a);
    ari_mesh_parts next = {.tp = tp, .cp = cp};
    memcpy(next.passes, a->passes, sizeof next.passes);
    *a = next;
}

static ar_status outside_of(ari_outside **borrows, ari_mesh_parts *a, const ari_candidate *f, const ari_planned *p,
                            const ari_time_options *o)
{
    ari_outside **all = a->family[f->family]->outside[f->choice.zero > 0], **at = &all[f->pipeline], *made = NULL;
    const ari_outside *other = NULL;
    for (int i = 0; i < ARI_PARTS_PIPELINES && !other && p->step.run.parallel.stages.n == 0; i++)
        other = all[i];
    if (!*at) {
        AR_TRY(ari_alloc_zero((void **)&made, 1, sizeof *made, "sums of gradients"));
        const ar_status st = ari_outside_init(made, p, o, other);
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
    if (!*at && f->choice.pp > 1) {
        if (a->operations > MOST_OPERATIONS)
            forget_schedules(a);
        AR_TRY(ar_parallel_schedule(at, &p->step.run.parallel));
        a->operations += (size_t)ar_parallel_stages(&p->step.run.parallel) * (size_t)f->choice.micro_batches;
    }
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
