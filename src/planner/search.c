/* SPDX-License-Identifier: Apache-2.0 */
/* All layouts of a number of ranks. Those of one mesh share parts of their time. */
#include "planner/search.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "planner/parts.h"
#include "ref/core/size.h"

/* --- variants of a mesh ------------------------------------------------------------------------------------------- */

enum { MOST_MICRO = ARI_PARTS_MICRO, MOST_PIPELINES = ARI_PARTS_PIPELINES, MOST_DIVISORS = 512 };

/* Order in which a pipeline's ranks process their layers. */
typedef struct pipeline {
    int virtual_stages;
    ar_pp_schedule schedule;
} pipeline;

typedef struct seeker {
    const ari_search *s;
    ari_ranking *r;
    ari_choice mesh;
    int micro[MOST_MICRO], micros;
    pipeline pipeline[MOST_PIPELINES];
    int pipelines;
    int divisor[MOST_DIVISORS], divisors; /* of the ranks */
    ari_candidate *variant;               /* [n] of the mesh */
    ari_candidate **order;                /* [n]: the variants by what they take, or take at least */
    size_t n, room;
    ari_mesh_parts parts;
    bool counting; /* layouts are counted, and not looked at */
} seeker;

static bool wanted(int fixed, int value)
{
    return fixed <= 0 || fixed == value;
}

/* The divisors of n, rising; at most `most` of them. */
static int list_divisors(int *list, int most, size_t n)
{
    int count = 0;
    for (size_t d = 1; d <= n / d && count < most; d++) {
        if (n % d == 0)
            list[count++] = (int)d;
    }
    for (int i = count - 1; i >= 0 && count < most; i--) {
        const size_t other = n / (size_t)list[i];
        if (other > (size_t)list[i] && other <= INT_MAX)
            list[count++] = (int)other;
    }
    return count;
}

/* Micro-batches that divide the samples of a rank; of a batch that dp does not divide those of the fullest rank. */
static void list_micro(seeker *k)
{
    const size_t batch = k->s->base.step.run.batch, dp = (size_t)k->mesh.dp, n = (batch + dp - 1) / dp;
    k->micros = 1;
    if (k->s->fixed.micro_batches > 0)
        k->micro[0] = k->s->fixed.micro_batches;
    else
        k->micros = list_divisors(k->micro, MOST_MICRO, n);
}

static void add_pipeline(seeker *k, int virtual_stages, ar_pp_schedule schedule)
{
    if (k->pipelines == MOST_PIPELINES)
        return;
    k->pipeline[k->pipelines++] = (pipeline){virtual_stages, schedule};
}

/* Virtual stages that cut the layers evenly, or as evenly as if embedding and head were a layer each. */
static void add_interleaved(seeker *k)
{
    const size_t layers = k->s->base.step.config->layers, pp = (size_t)k->mesh.pp;
    const int fixed = k->s->fixed.virtual_stages;
    for (size_t v = 2; v <= layers / pp || (int)v == fixed; v++) {
        const bool even = layers % (pp * v) == 0 || (layers + 2) % (pp * v) == 0;
        if (fixed > 0 ? (int)v == fixed : even)
            add_pipeline(k, (int)v, AR_PP_INTERLEAVED);
    }
}

/* GPipe is looked at where it is asked for: it is never faster than 1F1B, which holds less. */
static void list_pipelines(seeker *k)
{
    const int fixed = k->s->fixed.virtual_stages, schedule = k->s->schedule;
    k->pipelines = 0;
    for (int kind = 0; kind < AR_PP_SCHEDULES && k->mesh.pp > 1; kind++) {
        if (schedule >= 0 ? kind != schedule : kind == AR_PP_GPIPE)
            continue;
        if (kind == AR_PP_INTERLEAVED)
            add_interleaved(k);
        else if (fixed <= 1)
            add_pipeline(k, 1, (ar_pp_schedule)kind);
    }
    if (k->pipelines == 0) /* no pipeline, or one that its check refuses */
        add_pipeline(k, ari_at_least_one(fixed),
                     schedule > 0 && k->mesh.pp > 1 ? (ar_pp_schedule)schedule : AR_PP_1F1B);
}

static ar_status add_variant(seeker *k, const ari_choice *c)
{
    AR_TRY(ari_grow(&k->variant, &k->room, k->n, sizeof *k->variant, "layouts"));
    ari_candidate *f = &k->variant[k->n++];
    memset(f, 0, sizeof *f);
    f->choice = *c;
    return AR_OK;
}

/* The first reason is kept for the case that nothing is legal. */
static ar_status refuse(seeker *k, const ari_choice *c, ar_status why)
{
    if (k->r->refused[0] == '\0')
        snprintf(k->r->refused, sizeof k->r->refused, "%s", ar_error_message());
    if (!k->s->every)
        return AR_OK;
    AR_TRY(add_variant(k, c));
    k->variant[k->n - 1].legal = why;
    snprintf(k->variant[k->n - 1].reason, ARI_REASON, "%s", ar_error_message());
    return AR_OK;
}

bool ari_is_verdict(ar_status st)
{
    return st != AR_ERR_MEMORY && st != AR_ERR_INTERNAL;
}

/* The time of a candidate, for what it takes at least. */
static ar_status settle(seeker *k, ari_candidate *f)
{
    const ari_planned p = ari_choice_planned(&k->s->base, &f->choice);
    ari_time t;
    AR_TRY(ari_mesh_parts_time(&t, &k->parts, f, &p, &k->s->time));
    f->seconds = ari_time_step(&t);
    f->bound = ari_bound_of(&t);
    f->settled = true;
    return AR_OK;
}

/* Layout c, of the m-th number of micro-batches and the i-th pipeline. */
static ar_status time_variant(seeker *k, const ari_choice *c, int m, int i)
{
    k->r->layouts++;
    if (k->counting)
        return AR_OK;
    const ari_planned p = ari_choice_planned(&k->s->base, c);
    const ar_status legal = ari_planned_check(&p);
    if (legal != AR_OK)
        return ari_is_verdict(legal) ? refuse(k, c, legal) : legal;
    k->r->legal++;
    AR_TRY(add_variant(k, c));
    ari_candidate *f = &k->variant[k->n - 1];
    f->form = k->parts.n - 1;
    f->micro = m;
    f->pipeline = i;
    if (c->pp == 1 || k->s->every)
        return settle(k, f);
    return ari_mesh_parts_least(&f->seconds, &k->parts, f, &p, &k->s->time);
}

/* With flash attention selective recomputation has nothing to compute again. */
static ar_status time_recomputed(seeker *k, ari_choice c, int m, int i)
{
    const ari_search *s = k->s;
    for (int again = AR_RECOMPUTE_NONE; again <= AR_RECOMPUTE_FULL; again++) {
        c.recompute = (ar_recompute)again;
        if (s->recompute >= 0 ? s->recompute == again : again != AR_RECOMPUTE_SELECTIVE || !s->base.flash)
            AR_TRY(time_variant(k, &c, m, i));
    }
    return AR_OK;
}

/* Replicas that share out within a node, where the ranks that sum gradients span nodes; 1: none. */
static int replicas(const seeker *k, const ari_choice *c)
{
    ari_choice one = *c;
    one.dp_replicate = 1;
    const ari_planned p = ari_choice_planned(&k->s->base, &one);
    const ari_links l = ari_links_of(&p, &k->s->time, ARI_OVER_DP);
    const double nodes = l.in_node > 1.0 && !ari_experts_apart(&p.step.run.parallel) ? l.n / l.in_node : 1.0;
    return nodes == floor(nodes) && c->dp % (int)nodes == 0 ? (int)nodes : 1;
}

/* ZeRO-3 also shares out within nodes alone. */
static ar_status time_family(seeker *k, ari_choice c, int m, int i)
{
    const ari_search *s = k->s;
    const ari_planned p = ari_choice_planned(&s->base, &c);
    const int hybrid = replicas(k, &c), given = s->fixed.dp_replicate;
    const int sharers = ari_extent(&p.step.run.parallel, ARI_CUTS_DATA);
    for (c.zero = 0; c.zero <= 3; c.zero++) {
        if (s->zero >= 0 ? s->zero != c.zero : c.zero > 0 && sharers == 1)
            continue;
        c.dp_replicate = c.zero > 0 ? ari_at_least_one(given) : 1;
        AR_TRY(time_recomputed(k, c, m, i));
        c.dp_replicate = hybrid;
        if (c.zero == 3 && hybrid > 1 && given == 0)
            AR_TRY(time_recomputed(k, c, m, i));
    }
    return AR_OK;
}

/* All layouts of a mesh whose context-parallel ranks are joined in one way, and share experts out in one. */
static ar_status time_form(seeker *k)
{
    if (!k->counting)
        AR_TRY(ari_mesh_parts_add(&k->parts));
    for (int sp = 0; sp <= (k->mesh.tp > 1); sp++) {
        const bool given = k->s->sp < 0 || k->s->sp == sp || k->mesh.tp == 1;
        const bool can = k->mesh.etp != 1 || k->mesh.tp == 1 || sp || k->s->fixed.etp == 1;
        for (int i = 0; i < k->micros * k->pipelines && given && can; i++) {
            ari_choice c = k->mesh;
            c.sp = sp;
            c.micro_batches = k->micro[i / k->pipelines];
            c.virtual_stages = k->pipeline[i % k->pipelines].virtual_stages;
            c.schedule = k->pipeline[i % k->pipelines].schedule;
            AR_TRY(time_family(k, c, i / k->pipelines, i % k->pipelines));
        }
    }
    return AR_OK;
}

/* True if the ranks that have a layer's experts between them can share them out to ep. */
static bool can_share(const seeker *k, int ep)
{
    const size_t experts = k->s->base.step.config->experts.n;
    const int sharers = k->mesh.etp == 1 ? k->mesh.cp * k->mesh.tp : k->mesh.cp;
    return ep == 1 || (experts > 0 && experts % (size_t)ep == 0 && k->mesh.dp * sharers % ep == 0 &&
                       (ep % sharers == 0 || sharers % ep == 0));
}

static ar_status time_shared(seeker *k)
{
    const int fixed = k->s->fixed.ep;
    for (int i = 0; i < k->divisors; i++) {
        k->mesh.ep = fixed > 0 ? fixed : k->divisor[i];
        if (fixed > 0 ? i == 0 : can_share(k, k->mesh.ep))
            AR_TRY(time_form(k));
    }
    return AR_OK;
}

/* Experts are cut over tp as all else is, or with sequence parallelism not at all. */
static ar_status time_experts(seeker *k)
{
    const ari_search *s = k->s;
    const bool whole = s->base.step.config->experts.n > 0 && k->mesh.tp > 1 && s->sp != 0;
    for (int etp = 0; etp <= whole; etp++) {
        k->mesh.etp = s->fixed.etp > 0 ? s->fixed.etp : etp;
        if (etp == 0 || s->fixed.etp == 0)
            AR_TRY(time_shared(k));
    }
    return AR_OK;
}

/* The ring alone, the all-to-all alone, and both; a ring of causal attention zig-zag where the sequence can be cut so.
 * */
static ar_status time_mesh(seeker *k)
{
    const ari_search *s = k->s;
    const int cp = k->mesh.cp;
    ari_mesh_parts_forget(&k->parts);
    k->n = 0;
    list_micro(k);
    list_pipelines(k);
    for (int inner = 1; inner <= cp; inner++) {
        if (cp % inner != 0 || !wanted(s->fixed.cp_inner, inner))
            continue;
        const size_t pieces = 2 * (size_t)(cp / inner);
        const bool balanced = s->base.step.config->causal && s->base.step.run.seq % pieces == 0;
        k->mesh.cp_inner = inner;
        k->mesh.zigzag = cp > inner && (balanced || s->fixed.zigzag);
        AR_TRY(time_experts(k));
    }
    return AR_OK;
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

static int by_seconds(const void *a, const void *b)
{
    const ari_candidate *x = a, *y = b;
    if ((x->legal != AR_OK) != (y->legal != AR_OK))
        return x->legal != AR_OK ? 1 : -1;
    return x->seconds < y->seconds ? -1 : x->seconds > y->seconds;
}

static int by_order(const void *a, const void *b)
{
    return by_seconds(*(ari_candidate *const *)a, *(ari_candidate *const *)b);
}

static ar_status weigh(const seeker *k, ari_candidate *f)
{
    const ari_planned p = ari_choice_planned(&k->s->base, &f->choice);
    ari_memory m;
    AR_TRY(ari_memory_production(&m, &p));
    f->bytes = ari_memory_sum(&m);
    f->weighed = true;
    f->fits = k->r->memory_bytes <= 0.0 || f->bytes <= k->r->memory_bytes;
    return AR_OK;
}

static ar_status keep_candidate(ari_ranking *r, const ari_candidate *f)
{
    AR_TRY(ari_grow(&r->at, &r->room, r->n, sizeof *r->at, "layouts"));
    r->at[r->n++] = *f;
    return AR_OK;
}

/* A rank has this part of all experts. */
static int parts_of_experts(const ari_choice *c)
{
    return ari_at_least_one(c->ep) * (c->etp == 1 ? 1 : c->tp);
}

/* The lightest candidate of a mesh: among those that share and recompute most, the one with the smallest micro-batches.
 * */
static const ari_candidate *lightest(const seeker *k)
{
    const ari_candidate *best = NULL;
    for (size_t i = 0; i < k->n && k->order[i]->legal == AR_OK; i++) {
        const ari_choice *a = &k->order[i]->choice, *b = best ? &best->choice : NULL;
        const int sharing =
            !b ? 1 : 8 * (a->zero - b->zero) + 4 * ((int)a->recompute - (int)b->recompute) + 2 * (a->sp - b->sp);
        const int cut = b ? parts_of_experts(a) - parts_of_experts(b) : 0;
        if (sharing > 0 || (sharing == 0 && cut > 0) ||
            (sharing == 0 && cut == 0 &&
             (a->micro_batches > b->micro_batches ||
              (a->micro_batches == b->micro_batches && a->virtual_stages < b->virtual_stages))))
            best = k->order[i];
    }
    return best;
}

/* The time of the i-th variant by its schedule, which may be more than that of those behind it. */
static ar_status refine_time(seeker *k, size_t i)
{
    ari_candidate *f = k->order[i];
    size_t behind = i + 1, end = k->n; /* those before `behind` take less, those from `end` on do not */
    AR_TRY(settle(k, f));
    while (behind < end) {
        const size_t middle = behind + (end - behind) / 2;
        if (by_seconds(k->order[middle], f) < 0)
            behind = middle + 1;
        else
            end = middle;
    }
    memmove(&k->order[i], &k->order[i + 1], (behind - 1 - i) * sizeof(ari_candidate *));
    k->order[behind - 1] = f;
    return AR_OK;
}

static void note_fastest(ari_ranking *r, const ari_candidate *f)
{
    if (f->legal == AR_OK && f->settled && (!r->has_fastest || f->seconds < r->fastest.seconds))
        r->fastest = *f;
    r->has_fastest = r->has_fastest || (f->legal == AR_OK && f->settled);
}

/* The fastest that fits; false: none does. */
static ar_status choose_one(seeker *k, bool can_fit, bool *chosen)
{
    *chosen = false;
    for (size_t i = 0; i < k->n && k->order[i]->legal == AR_OK && !*chosen;) {
        ari_candidate *f = k->order[i];
        const bool faster = !k->r->has_fastest || f->seconds < k->r->fastest.seconds;
        if (can_fit && !f->weighed)
            AR_TRY(weigh(k, f));
        if (!f->settled && (f->fits || faster)) {
            AR_TRY(refine_time(k, i));
            continue;
        }
        note_fastest(k->r, f);
        *chosen = f->fits;
        if (*chosen)
            AR_TRY(keep_candidate(k->r, f));
        i++;
    }
    return AR_OK;
}

static ar_status choose_every(seeker *k)
{
    for (size_t i = 0; i < k->n; i++) {
        ari_candidate *f = k->order[i];
        note_fastest(k->r, f);
        if (f->legal == AR_OK)
            AR_TRY(weigh(k, f));
        AR_TRY(keep_candidate(k->r, f));
    }
    return AR_OK;
}

static ar_status sort_variants(seeker *k)
{
    free(k->order);
    k->order = NULL;
    AR_TRY(ari_alloc((void **)&k->order, k->n, sizeof(ari_candidate *), "layouts"));
    for (size_t i = 0; i < k->n; i++)
        k->order[i] = &k->variant[i];
    if (k->n > 0)
        qsort(k->order, k->n, sizeof(ari_candidate *), by_order);
    return AR_OK;
}

/* The fastest that fits, or where none does the one that needs least; all with `every`. */
static ar_status choose_layout(seeker *k)
{
    AR_TRY(sort_variants(k));
    if (k->s->every)
        return choose_every(k);
    const ari_candidate *least = lightest(k);
    ari_candidate light = least ? *least : (ari_candidate){.legal = AR_ERR_ARG};
    bool chosen = false;
    if (!least)
        return AR_OK;
    AR_TRY(weigh(k, &light));
    AR_TRY(choose_one(k, light.fits, &chosen));
    if (chosen)
        return AR_OK;
    if (!light.settled)
        AR_TRY(settle(k, &light));
    return keep_candidate(k->r, &light);
}

/* --- meshes ------------------------------------------------------------------------------------------------------- */

static ar_status search_mesh(seeker *k)
{
    k->r->meshes++;
    AR_TRY(time_mesh(k));
    return choose_layout(k);
}

static void report_progress(const seeker *k, double fraction)
{
    char what[ARI_CHOICE_TEXT];
    ari_choice_text(what, &k->mesh, ARI_LAYOUT_AXES - 1, " ");
    if (k->s->progress)
        k->s->progress(k->s->user, fraction, what);
}

static ar_status check_tp(seeker *k, int tp, bool *can)
{
    const ari_choice alone = {
        .tp = tp, .cp = 1, .cp_inner = 1, .ep = 1, .pp = 1, .dp = 1, .virtual_stages = 1, .micro_batches = 1};
    const ar_plan *plan = &k->s->base.step.run.plan;
    const ar_status st = ar_config_check_tp(k->s->base.step.config, tp, plan);
    *can = st == AR_OK;
    if (st == AR_OK || !ari_is_verdict(st))
        return st;
    k->n = 0;
    k->r->layouts++;
    AR_TRY(refuse(k, &alone, st));
    if (k->n == 0)
        return AR_OK;
    k->variant[0].choice.dp = k->s->ranks / tp;
    return keep_candidate(k->r, &k->variant[0]);
}

/* The meshes whose extents before the i-th are the seeker's, over the ranks that these leave: its divisors are among
 * those of all ranks, and the last extent takes what is left. */
static ar_status search_axis(seeker *k, int i, int left, double begin, double end)
{
    const ari_search *s = k->s;
    const double share = (end - begin) / k->divisors;
    if (i + 1 == ARI_LAYOUT_AXES) {
        k->mesh.extent[i] = left;
        if (!wanted(s->fixed.extent[i], left))
            return AR_OK;
        report_progress(k, begin);
        return search_mesh(k);
    }
    for (int j = 0; j < k->divisors; j++) {
        const int n = k->divisor[j];
        bool can = true;
        if (left % n != 0 || !wanted(s->fixed.extent[i], n))
            continue;
        k->mesh.extent[i] = n;
        if (ari_planned_axes[i] == ARI_LAYOUT_TP)
            AR_TRY(check_tp(k, n, &can));
        if (can)
            AR_TRY(search_axis(k, i + 1, left / n, begin + share * j, begin + share * (j + 1)));
    }
    return AR_OK;
}

static int by_rank(const void *a, const void *b)
{
    const ari_candidate *x = a, *y = b;
    if (x->legal != AR_OK || y->legal != AR_OK || (x->fits && y->fits))
        return by_seconds(a, b);
    if (x->fits != y->fits)
        return x->fits ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

static ar_status search_all(ari_ranking *r, const ari_search *s, bool counting)
{
    seeker k = {.s = s, .r = r, .counting = counting};
    *r = (ari_ranking){.memory_bytes = s->time.cluster.memory_bytes};
    if (s->ranks < 1 || s->ranks > ARI_MOST_GPUS)
        return ar_error_set(AR_ERR_ARG, "%d ranks: from 1 to %d are expected", s->ranks, ARI_MOST_GPUS);
    k.divisors = list_divisors(k.divisor, MOST_DIVISORS, (size_t)s->ranks);
    ar_status st = search_axis(&k, 0, s->ranks, 0.0, 1.0);
    if (st == AR_OK && r->has_fastest)
        st = weigh(&k, &r->fastest);
    ari_mesh_parts_forget(&k.parts);
    free(k.variant);
    free(k.order);
    if (st != AR_OK)
        return st;
    if (r->n > 0)
        qsort(r->at, r->n, sizeof *r->at, by_rank);
    for (size_t i = 0; i < r->n; i++)
        r->fitting += r->at[i].legal == AR_OK && r->at[i].fits;
    return AR_OK;
}

ar_status ari_search_run(ari_ranking *r, const ari_search *s)
{
    return search_all(r, s, false);
}

ar_status ari_search_count(size_t *layouts, size_t *meshes, const ari_search *s)
{
    ari_search quiet = *s;
    ari_ranking r;
    quiet.progress = NULL;
    quiet.every = false;
    const ar_status st = search_all(&r, &quiet, true);
    *layouts = r.layouts;
    *meshes = r.meshes;
    ari_ranking_fini(&r);
    return st;
}

void ari_ranking_fini(ari_ranking *r)
{
    free(r->at);
    *r = (ari_ranking){.n = 0};
}
