/* SPDX-License-Identifier: Apache-2.0 */
/* The best layout of a mesh, by branch and bound: what waits with the least bound is looked at next. The bound of a group
 * is what its passes and pipeline take at least; that of a layout the same with what it computes or gathers again, and
 * then that of its schedule without transfers. A layout that is fully computed and comes next is then the fastest. */
#include <math.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/plan/search_impl.h"

/* Sums in another order differ by less than this share; bounds are lowered by it. */
static const double ROUNDING = 1e-9;

typedef struct waiting {
    double least; /* seconds */
    bool group;   /* all variants of one */
    size_t at;    /* its number; or that of a variant */
    size_t order; /* of a variant, in the search */
    bool settled; /* its time is known */
} waiting;

typedef struct queue {
    waiting *at; /* [n], a heap */
    size_t n, room;
} queue;

/* --- what waits --------------------------------------------------------------------------------------------------- */

/* Of several that take the same the first in the search, when the times of all are known. */
static bool sooner(const waiting *a, const waiting *b)
{
    if (a->least != b->least)
        return a->least < b->least;
    return a->settled && b->settled ? a->order < b->order : !a->settled && b->settled;
}

static ar_status push(queue *q, waiting w)
{
    AR_TRY(ARI_GROW(&q->at, &q->room, q->n, "layouts"));
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

static ari_planned planned_of(const ari_seeker *k, const ari_choice *c)
{
    return ari_choice_planned(&k->s->base, c);
}

/* Those of each family with each number of micro-batches in each pipeline. */
static ar_status push_groups(queue *q, ari_seeker *k)
{
    ari_choice of[ARI_MOST_VARIANTS];
    const ari_passes *passes = NULL;
    for (size_t at = 0; at < k->groups; at++) {
        if (k->legal[at] == 0)
            continue;
        (void)ari_seeker_variants(of, k, at);
        of[0].zero = 0; /* all that a stage of ZeRO gathers in the passes comes on top */
        of[0].dp_replicate = 1;
        const ari_planned p = planned_of(k, &of[0]);
        AR_TRY(ari_mesh_parts_passes(&passes, &k->parts, &p, &k->s->time));
        const double least = ari_time_least(&p, &k->s->time, passes);
        AR_TRY(push(q, (waiting){.least = (1.0 - ROUNDING) * least, .group = true, .at = at}));
    }
    return AR_OK;
}

static ar_status push_variants(queue *q, ari_seeker *k, size_t group)
{
    ari_choice of[ARI_MOST_VARIANTS];
    const ari_passes *passes = NULL;
    const int n = ari_seeker_variants(of, k, group);
    for (int v = 0; v < n; v++) {
        const ari_choice *c = &of[v];
        const ari_planned p = planned_of(k, c);
        if (!(k->legal[group] >> v & 1))
            continue;
        if (!passes) /* which are those of all of them */
            AR_TRY(ari_mesh_parts_passes(&passes, &k->parts, &p, &k->s->time));
        const double least = ari_time_least(&p, &k->s->time, passes);
        AR_TRY(ARI_GROW(&k->variant, &k->room, k->n, "layouts"));
        k->variant[k->n] = (ari_candidate){.choice = *c, .reason = "", .seconds = least};
        AR_TRY(push(q, (waiting){.least = (1.0 - ROUNDING) * least,
                                 .at = k->n++,
                                 .order = group * ARI_MOST_VARIANTS + (size_t)v}));
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
        const ari_passes *passes = NULL;
        if (k->lights > 1 && k->mesh.pp == 1) {
            AR_TRY(ari_seeker_settle(k, f));
        } else if (k->lights > 1) {
            AR_TRY(ari_mesh_parts_passes(&passes, &k->parts, &p, &k->s->time));
            f->seconds = ari_time_least(&p, &k->s->time, passes);
        }
        if (i == 0 || f->seconds < light->seconds)
            *light = *f;
    }
    return AR_OK;
}

/* --- the best ----------------------------------------------------------------------------------------------------- */

/* By its schedule, at first without transfers, then in whole. */
static ar_status settle_next(queue *q, ari_seeker *k, waiting w)
{
    ari_candidate *f = &k->variant[w.at];
    w.settled = k->mesh.pp == 1 || f->alone > 0.0;
    if (w.settled) {
        AR_TRY(ari_seeker_settle(k, f));
        w.least = f->seconds;
    } else {
        const ari_planned p = planned_of(k, &f->choice);
        AR_TRY(ari_mesh_parts_alone(&f->alone, &k->parts, &p, &k->s->time));
        w.least = fmax(w.least, (1.0 - ROUNDING) * f->alone);
    }
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
        AR_TRY(w.group ? push_variants(q, k, w.at) : look_at(q, k, w, can_fit, chosen));
    }
    return AR_OK;
}

static void queue_fini(queue *q)
{
    free(q->at);
}

ar_status ari_seeker_best(ari_seeker *k)
{
    ARI_ENDED(queue_fini) queue q = {.n = 0};
    ari_candidate light = {.legal = AR_OK};
    bool chosen = false;
    if (k->lights == 0)
        return AR_OK;
    AR_TRY(push_groups(&q, k));
    if (q.n == 0 || q.at[0].least > k->enough)
        return AR_OK;
    AR_TRY(lightest(&light, k));
    AR_TRY(ari_seeker_weigh(k, &light, isinf(k->enough)));
    AR_TRY(choose_one(&q, k, light.fits, &chosen));
    if (!chosen && !light.settled && isinf(k->enough))
        AR_TRY(ari_seeker_settle(k, &light));
    return chosen || !isinf(k->enough) ? AR_OK : ari_seeker_keep(k->r, &light);
}
