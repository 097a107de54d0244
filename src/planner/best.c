/* SPDX-License-Identifier: Apache-2.0 */
/* The best layout of a mesh, by branch and bound: what waits with the least bound is looked at next. The bound of a
 * family is its passes shared out to the pipeline ranks, that of a group what its passes and pipeline take at least,
 * with the passes of the fewest micro-batches; that of a layout the same with its own passes, before its schedule is run
 * through. A layout that is fully computed and comes next is then the fastest. */
#include <math.h>
#include <stdlib.h>

#include "planner/search_impl.h"
#include "ref/core/size.h"

/* Sums in another order differ by less than this share; bounds are lowered by it. */
static const double ROUNDING = 1e-9;

typedef enum level { FAMILY, GROUP, VARIANT } level;

typedef struct waiting {
    double least; /* seconds */
    level level;
    size_t at;    /* family; number of the group; variant */
    size_t order; /* of a variant, in the search */
    bool settled; /* its time is known: */
    double first; /* what it took at least without its sums of gradients */
} waiting;

typedef struct queue {
    waiting *at; /* [n], a heap */
    size_t n, room;
} queue;

/* --- what waits --------------------------------------------------------------------------------------------------- */

/* Of several that take the same, the one with the largest bound that is less, and then the last. Those of equal bound
 * come behind, the first first. */
static bool preferred(const waiting *a, const waiting *b)
{
    const bool below = a->first < a->least, other = b->first < b->least;
    if (below != other)
        return below;
    if (!below)
        return a->order < b->order;
    return a->first != b->first ? a->first > b->first : a->order > b->order;
}

static bool sooner(const waiting *a, const waiting *b)
{
    if (a->least != b->least)
        return a->least < b->least;
    return a->settled && b->settled ? preferred(a, b) : !a->settled && b->settled;
}

static ar_status push(queue *q, waiting w)
{
    AR_TRY(ari_grow(&q->at, &q->room, q->n, sizeof *q->at, "layouts"));
    size_t i = q->n++;
    for (; i > 0 && sooner(&w, &q->at[(i - 1) / 2]); i = (i - 1) / 2)
        q->at[i] = q->at[(i - 1) / 2];
    q->at[i] = w;
    return AR_OK;
}

static waiting pop(queue *q)
{
    const waiting first = q->at[0], last = q->at[--q->n];
    size_t i = 0;
    for (size_t child = 1; child < q->n; child = 2 * i + 1) {
        child += child + 1 < q->n && sooner(&q->at[child + 1], &q->at[child]);
        if (!sooner(&q->at[child], &last))
            break;
        q->at[i] = q->at[child];
        i = child;
    }
    q->at[i] = last;
    return first;
}

/* --- bounds ------------------------------------------------------------------------------------------------------- */

static size_t groups_of(const ari_seeker *k)
{
    return (size_t)(k->micros * k->pipelines);
}

static ari_planned planned_of(const ari_seeker *k, const ari_choice *c)
{
    return ari_choice_planned(&k->s->base, c);
}

/* The passes by which the layouts of a family are bounded, those of the fewest micro-batches; but chunks of overlapped
 * collectives are cut in another way there. micros: of how many they are; 0: of the i-th number alone. */
static ar_status fewest(ari_passes **borrows, int *micros, ari_seeker *k, size_t f, int i)
{
    ari_choice of[ARI_MOST_VARIANTS];
    (void)ari_seeker_variants(of, k, f, i, 0);
    ari_planned p = planned_of(k, &of[0]);
    const bool one = k->micros == 1 || ari_planned_overlap(&p) == 1;
    *micros = one ? k->micro[0] : 0;
    if (one)
        p.step.run.parallel.micro_batches = k->micro[0];
    return ari_mesh_parts_passes(borrows, &k->parts, f, one ? 0 : i, &p, &k->s->time);
}

static ar_status push_families(queue *q, ari_seeker *k)
{
    for (size_t f = 0; f < k->families; f++) {
        ari_passes *passes = NULL;
        bool legal = false;
        int micros = 0;
        for (size_t g = f * groups_of(k); g < (f + 1) * groups_of(k) && !legal; g++)
            legal = k->legal[g] != 0;
        if (!legal)
            continue;
        AR_TRY(fewest(&passes, &micros, k, f, 0));
        const double least = micros * ari_passes_seconds(passes) / k->mesh.pp;
        AR_TRY(push(q, (waiting){.least = (1.0 - ROUNDING) * least, .level = FAMILY, .at = f}));
    }
    return AR_OK;
}

static ar_status push_groups(queue *q, ari_seeker *k, size_t f)
{
    ari_choice of[ARI_MOST_VARIANTS];
    ari_passes *passes = NULL;
    int micros = 0;
    for (size_t g = 0; g < groups_of(k); g++) {
        const int i = (int)g / k->pipelines, j = (int)g % k->pipelines;
        const size_t at = f * groups_of(k) + g;
        if (k->legal[at] == 0)
            continue;
        (void)ari_seeker_variants(of, k, f, i, j);
        of[0].zero = 0; /* all that a stage of ZeRO gathers in the passes comes on top */
        of[0].dp_replicate = 1;
        const ari_planned p = planned_of(k, &of[0]);
        AR_TRY(fewest(&passes, &micros, k, f, i));
        const double least = ari_time_least(&p, &k->s->time, passes, micros ? micros : k->micro[i], false, 0.0).step;
        AR_TRY(push(q, (waiting){.least = (1.0 - ROUNDING) * least, .level = GROUP, .at = at}));
    }
    return AR_OK;
}

static ar_status push_variants(queue *q, ari_seeker *k, size_t group)
{
    ari_choice of[ARI_MOST_VARIANTS];
    ari_passes *passes = NULL;
    const size_t f = group / groups_of(k), g = group % groups_of(k);
    const int i = (int)g / k->pipelines, j = (int)g % k->pipelines, n = ari_seeker_variants(of, k, f, i, j);
    for (int v = 0; v < n; v++) {
        const ari_choice *c = &of[v];
        const ari_planned p = planned_of(k, c);
        if (!(k->legal[group] >> v & 1))
            continue;
        AR_TRY(ari_mesh_parts_passes(&passes, &k->parts, f, i, &p, &k->s->time));
        const ari_time_bounds least = ari_time_least(&p, &k->s->time, passes, c->micro_batches, true, 0.0);
        AR_TRY(ari_grow(&k->variant, &k->room, k->n, sizeof *k->variant, "layouts"));
        k->variant[k->n] = (ari_candidate){
            .choice = *c, .reason = "", .seconds = least.passes, .family = f, .micro = i, .pipeline = j};
        AR_TRY(push(q, (waiting){.least = (1.0 - ROUNDING) * least.step,
                                 .level = VARIANT,
                                 .at = k->n++,
                                 .order = group * ARI_MOST_VARIANTS + (size_t)v,
                                 .first = least.passes}));
    }
    return AR_OK;
}

/* --- the lightest ------------------------------------------------------------------------------------------------- */

/* Of the lightest layouts the one that takes least, or takes at least. */
static ar_status lightest(ari_candidate *light, ari_seeker *k)
{
    for (size_t i = 0; i < k->lights; i++) {
        ari_candidate *f = &k->light[i];
        const ari_planned p = planned_of(k, &f->choice);
        ari_passes *passes = NULL;
        if (k->lights > 1 && k->mesh.pp == 1) {
            AR_TRY(ari_seeker_settle(k, f));
        } else if (k->lights > 1) {
            AR_TRY(ari_mesh_parts_passes(&passes, &k->parts, f->family, f->micro, &p, &k->s->time));
            f->seconds = ari_time_least(&p, &k->s->time, passes, f->choice.micro_batches, false, 0.0).passes;
        }
        if (i == 0 || f->seconds < light->seconds)
            *light = *f;
    }
    return AR_OK;
}

/* --- the best ----------------------------------------------------------------------------------------------------- */

/* By its schedule, at first without transfers. */
static ar_status bound_alone(ari_seeker *k, ari_candidate *f, waiting *w)
{
    const ari_planned p = planned_of(k, &f->choice);
    ari_passes *passes = NULL;
    AR_TRY(ari_mesh_parts_passes(&passes, &k->parts, f->family, f->micro, &p, &k->s->time));
    AR_TRY(ari_mesh_parts_alone(&f->alone, &k->parts, f, &p, &k->s->time));
    w->least = (1.0 - ROUNDING) * ari_time_least(&p, &k->s->time, passes, f->choice.micro_batches, true, f->alone).step;
    return AR_OK;
}

/* Nothing waits without a pipeline: its time is then a bound for itself. */
static ar_status settle_next(queue *q, ari_seeker *k, waiting w)
{
    ari_candidate *f = &k->variant[w.at];
    if (k->mesh.pp > 1 && f->alone == 0.0) {
        AR_TRY(bound_alone(k, f, &w));
        return push(q, w);
    }
    AR_TRY(ari_seeker_settle(k, f));
    w.least = f->seconds;
    w.first = k->mesh.pp > 1 ? w.first : w.least;
    w.settled = true;
    return push(q, w);
}

/* A layout whose turn has come. */
static ar_status look_at(queue *q, ari_seeker *k, waiting w, bool can_fit, bool *chosen)
{
    ari_candidate *f = &k->variant[w.at];
    const bool faster = !k->r->has_fastest || w.least < k->r->fastest.seconds;
    if (can_fit && !f->weighed)
        AR_TRY(ari_seeker_weigh(k, f, false));
    if (!f->settled && (f->fits || faster))
        return settle_next(q, k, w);
    ari_seeker_note(k->r, f);
    *chosen = f->fits;
    if (f->fits && k->s->first)
        k->enough = fmin(k->enough, (1.0 + ARI_EQUAL) * f->seconds);
    return *chosen ? ari_seeker_keep(k->r, f) : AR_OK;
}

/* The fastest that fits. If none does, only the fastest of all is of interest. */
static ar_status choose_one(queue *q, ari_seeker *k, bool can_fit, bool *chosen)
{
    *chosen = false;
    while (q->n > 0 && !*chosen) {
        const waiting w = pop(q);
        if (w.least > k->enough)
            return AR_OK;
        if (!can_fit && k->r->has_fastest && w.least >= k->r->fastest.seconds)
            return AR_OK;
        AR_TRY(w.level == FAMILY  ? push_groups(q, k, w.at)
               : w.level == GROUP ? push_variants(q, k, w.at)
                                  : look_at(q, k, w, can_fit, chosen));
    }
    return AR_OK;
}

ar_status ari_seeker_best(ari_seeker *k)
{
    queue q = {.n = 0};
    ari_candidate light = {.legal = AR_OK};
    bool chosen = false;
    ar_status st = AR_OK;
    if (k->lights == 0)
        return AR_OK;
    AR_TRY_TO(done, st, push_families(&q, k));
    if (q.n == 0 || q.at[0].least > k->enough)
        goto done;
    AR_TRY_TO(done, st, lightest(&light, k));
    AR_TRY_TO(done, st, ari_seeker_weigh(k, &light, isinf(k->enough)));
    AR_TRY_TO(done, st, choose_one(&q, k, light.fits, &chosen));
    if (!chosen && !light.settled && isinf(k->enough))
        AR_TRY_TO(done, st, ari_seeker_settle(k, &light));
    if (!chosen && isinf(k->enough))
        AR_TRY_TO(done, st, ari_seeker_keep(k->r, &light));
done:
    free(q.at);
    return st;
}
