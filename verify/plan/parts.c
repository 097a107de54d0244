/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/plan/search_impl.h"

#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"
#include "ref/models/parallel_private.h"
#include "ref/pipeline/schedule_private.h"

/* --- what is kept ------------------------------------------------------------------------------------------------- */

typedef enum kind { PASSES, SECTIONS, OUTSIDE, SCHEDULE, ALONE } kind;

/* A kind, and what tells parts of it apart; those that differ in the last of these alone are in one list. */
enum { KEYS = 14 };
typedef struct key {
    size_t kind, of[KEYS];
} key;

struct ari_mesh_part {
    ari_mesh_part *next;
    key key;
    union {
        ari_passes passes;
        ari_outside outside;
        ari_sections *sections;
        ar_pipeline_schedule *schedule;
        double alone; /* seconds of a schedule without transfers */
    } is;
};

/* Passes of micro-batches through stages beyond which schedules are not kept: megabytes. */
enum { MOST_OPERATIONS = 1 << 16 };

static void part_destroy(ari_mesh_part *s)
{
    if (s->key.kind == PASSES)
        ari_passes_fini(&s->is.passes);
    else if (s->key.kind == OUTSIDE)
        ari_outside_fini(&s->is.outside);
    else if (s->key.kind == SECTIONS)
        ari_sections_destroy(s->is.sections);
    else if (s->key.kind == SCHEDULE)
        ari_pipeline_schedule_destroy(s->is.schedule);
    free(s);
}

static void forget(ari_mesh_parts *a, kind first, kind last)
{
    for (int i = 0; i < ARI_PARTS_LISTS; i++) {
        for (ari_mesh_part **at = &a->list[i], *s; (s = *at);) {
            if (s->key.kind < first || s->key.kind > last) {
                at = &s->next;
                continue;
            }
            *at = s->next;
            part_destroy(s);
        }
    }
    a->operations = first <= SCHEDULE ? 0 : a->operations;
}

void ari_mesh_parts_begin(ari_mesh_parts *a, int tp, int cp)
{
    forget(a, a->tp != tp || a->cp != cp ? PASSES : OUTSIDE, ALONE);
    a->tp = tp;
    a->cp = cp;
}

/* The part of that key; known: it has been made before. */
static ar_status part_of(ari_mesh_part **borrows, bool *known, ari_mesh_parts *a, key k)
{
    size_t hash = k.kind;
    for (int i = 0; i + 1 < KEYS; i++)
        hash = 31 * hash + k.of[i];
    ari_mesh_part **list = &a->list[hash % ARI_PARTS_LISTS], *s = *list;
    while (s && memcmp(&s->key, &k, sizeof k) != 0)
        s = s->next;
    *known = s != NULL;
    if (!s) {
        if (k.kind == SCHEDULE && a->operations > MOST_OPERATIONS)
            forget(a, SCHEDULE, SCHEDULE);
        AR_TRY(ARI_ALLOC_ZERO(&s, 1, "parts of a mesh"));
        s->key = k;
        s->next = *list;
        *list = s;
    }
    *borrows = s;
    return AR_OK;
}

/* --- each kind ---------------------------------------------------------------------------------------------------- */

/* What tells a layout's micro-batches apart. dp and their number matter where they do not divide the batch. */
static key micro_key(kind of, const ari_planned *p)
{
    const ar_parallel *l = &p->step.run.parallel;
    const size_t dp = (size_t)ari_at_least_one(l->dp), micros = (size_t)ari_at_least_one(l->micro_batches);
    const size_t batch = p->step.run.batch, samples = batch / (dp * micros);
    const bool even = samples * dp * micros == batch;
    return (key){of,
                 {samples, (size_t)l->ep, (size_t)l->etp, (size_t)l->cp_inner, (size_t)l->overlap, l->sp, l->zigzag,
                  even ? 0 : dp, even ? 0 : micros}};
}

ar_status ari_mesh_parts_passes(const ari_passes **borrows, ari_mesh_parts *a, const ari_planned *p,
                                const ari_time_options *o)
{
    ari_mesh_part *s = NULL;
    bool known = false;
    AR_TRY(part_of(&s, &known, a, micro_key(PASSES, p)));
    if (!known)
        AR_TRY(ari_passes_init(&s->is.passes, p, o));
    *borrows = &s->is.passes;
    return AR_OK;
}

static ar_status outside_of(const ari_outside **borrows, ari_mesh_parts *a, const ari_planned *p,
                            const ari_time_options *o)
{
    const ar_parallel *l = &p->step.run.parallel;
    key k = {OUTSIDE, {(size_t)l->ep, (size_t)l->etp, (size_t)l->cp_inner, l->sp, l->zigzag, l->zero > 0}};
    ari_mesh_part *s = NULL;
    bool known = false;
    k.of[KEYS - 1] = (size_t)l->virtual_stages;
    AR_TRY(part_of(&s, &known, a, k));
    const ari_mesh_part *other = s->next;
    while (other && memcmp(&other->key, &k, offsetof(key, of[KEYS - 1])) != 0)
        other = other->next;
    if (!known)
        AR_TRY(ari_outside_init(&s->is.outside, p, o, other && l->stages.n == 0 ? &other->is.outside : NULL));
    *borrows = &s->is.outside;
    return AR_OK;
}

static ar_status schedule_of(const ar_pipeline_schedule **borrows, ari_mesh_parts *a, const ari_planned *p,
                             int micro_batches)
{
    ar_parallel of = p->step.run.parallel;
    ari_mesh_part *s = NULL;
    bool known = false;
    of.micro_batches = micro_batches;
    AR_TRY(part_of(&s, &known, a,
                   (key){SCHEDULE, {(size_t)micro_batches, (size_t)of.virtual_stages, (size_t)of.schedule}}));
    if (!known) {
        AR_TRY(ari_parallel_schedule(&s->is.schedule, &of));
        a->operations += (size_t)ari_parallel_stages(&of) * (size_t)micro_batches;
    }
    *borrows = s->is.schedule;
    return AR_OK;
}

/* --- of a layout -------------------------------------------------------------------------------------------------- */

ar_status ari_mesh_parts_alone(double *seconds, ari_mesh_parts *a, const ari_planned *p, const ari_time_options *o)
{
    const ar_parallel *l = &p->step.run.parallel;
    const ari_passes *passes = NULL;
    const ar_pipeline_schedule *schedule = NULL;
    ari_mesh_part *s = NULL;
    bool known = false;
    key k = micro_key(ALONE, p);
    k.of[9] = (size_t)l->recompute.what;
    k.of[10] = l->zero == 3 ? (size_t)l->dp_replicate : 0; /* among which it gathers within the passes */
    k.of[11] = (size_t)l->schedule;
    k.of[12] = (size_t)l->virtual_stages;
    k.of[13] = (size_t)l->micro_batches;
    AR_TRY(part_of(&s, &known, a, k));
    if (!known) {
        AR_TRY(ari_mesh_parts_passes(&passes, a, p, o));
        AR_TRY(schedule_of(&schedule, a, p, l->micro_batches));
        AR_TRY(ari_time_alone(&s->is.alone, p, o, passes, schedule));
    }
    *seconds = s->is.alone;
    return AR_OK;
}

ar_status ari_mesh_parts_time(ari_time *t, ari_mesh_parts *a, const ari_planned *p, const ari_time_options *o,
                              double alone)
{
    const ari_passes *passes = NULL;
    const ari_outside *outside = NULL;
    const ar_pipeline_schedule *schedule = NULL;
    AR_TRY(ari_mesh_parts_passes(&passes, a, p, o));
    AR_TRY(outside_of(&outside, a, p, o));
    if (p->step.run.parallel.pp > 1)
        AR_TRY(schedule_of(&schedule, a, p, p->step.run.parallel.micro_batches));
    return ari_time_compose(t, p, o, passes, outside, schedule, alone);
}

ar_status ari_mesh_parts_memory(ari_memory *m, ari_mesh_parts *a, const ari_planned *p, double enough)
{
    const ar_parallel *l = &p->step.run.parallel;
    const ar_pipeline_schedule *few = NULL;
    ari_mesh_part *s = NULL;
    bool known = false;
    key k = micro_key(SECTIONS, p);
    k.of[9] = (size_t)l->recompute.what;
    k.of[10] = l->pp > 1;
    if (l->zero > 1) { /* which has operations of its own in the passes */
        k.of[11] = (size_t)l->zero;
        k.of[12] = (size_t)l->dp;
        k.of[13] = (size_t)l->dp_replicate;
    }
    AR_TRY(part_of(&s, &known, a, k));
    if (!known)
        AR_TRY(ari_sections_create(&s->is.sections, p));
    AR_TRY(schedule_of(&few, a, p, ari_memory_micro_batches(l)));
    *m = ari_sections_memory(s->is.sections, p, few, enough);
    return AR_OK;
}
