/* SPDX-License-Identifier: Apache-2.0 */
/* All layouts of a number of ranks. Those of one mesh share the passes and the sums of gradients, so
 * that the list of operations is walked once for each of these. */
#include "planner/search.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "planner/time_impl.h"
#include "ref/core/size.h"

/* --- variants of a mesh ------------------------------------------------------------------------------------------- */

enum { MOST_MICRO = 96, MOST_PIPELINES = 18, MOST_DIVISORS = 512 };

/* Costs common to the layouts of a mesh: passes by sp and micro-batches; sums by sp, by whether optimizer states are
 * shared, and by pipeline. */
typedef struct mesh_parts {
    ari_passes passes[2][MOST_MICRO];
    ari_outside outside[2][2][MOST_PIPELINES];
    bool has_passes[2][MOST_MICRO], has_outside[2][2][MOST_PIPELINES];
} mesh_parts;

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
    size_t n, room;
    mesh_parts *parts;
} seeker;

static void forget_parts(mesh_parts *parts)
{
    for (int sp = 0; sp < 2; sp++) {
        for (int i = 0; i < MOST_MICRO; i++) {
            if (parts->has_passes[sp][i])
                ari_passes_fini(&parts->passes[sp][i]);
            parts->has_passes[sp][i] = false;
        }
        for (int i = 0; i < 2 * MOST_PIPELINES; i++) {
            bool *has = &parts->has_outside[sp][i / MOST_PIPELINES][i % MOST_PIPELINES];
            if (*has)
                ari_outside_fini(&parts->outside[sp][i / MOST_PIPELINES][i % MOST_PIPELINES]);
            *has = false;
        }
    }
}

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

static void note_time(ari_candidate *f, const ari_time *t)
{
    f->seconds = ari_time_step(t);
    f->bound = ari_bound_of(t);
    f->settled = true;
}

/* Layout c, of the m-th number of micro-batches and the i-th pipeline. */
static ar_status time_variant(seeker *k, const ari_choice *c, int m, int i)
{
    const ari_planned p = ari_choice_planned(&k->s->base, c);
    const ari_time_options *o = &k->s->time;
    ari_passes *passes = &k->parts->passes[c->sp][m];
    ari_outside *outside = &k->parts->outside[c->sp][c->zero > 0][i];
    bool *has_passes = &k->parts->has_passes[c->sp][m], *has_outside = &k->parts->has_outside[c->sp][c->zero > 0][i];
    ari_time t;
    const ar_status legal = ari_planned_check(&p);
    k->r->layouts++;
    if (legal != AR_OK)
        return ari_is_verdict(legal) ? refuse(k, c, legal) : legal;
    k->r->legal++;
    if (!*has_passes)
        AR_TRY(ari_passes_init(passes, &p, o));
    *has_passes = true;
    AR_TRY(add_variant(k, c));
    ari_candidate *f = &k->variant[k->n - 1];
    f->settled = c->pp == 1 || k->s->every;
    f->seconds = ari_time_least(&p, o, passes);
    if (!f->settled)
        return AR_OK;
    if (!*has_outside)
        AR_TRY(ari_outside_init(outside, &p, o));
    *has_outside = true;
    AR_TRY(ari_time_compose(&t, &p, o, passes, outside));
    note_time(f, &t);
    return AR_OK;
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
    const double nodes = l.in_node > 1.0 ? l.n / l.in_node : 1.0;
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

/* All layouts of a mesh whose context-parallel ranks are joined in one way. */
static ar_status time_form(seeker *k)
{
    forget_parts(k->parts);
    for (int sp = 0; sp <= (k->mesh.tp > 1); sp++) {
        for (int i = 0; i < k->micros * k->pipelines && (k->s->sp < 0 || k->s->sp == sp || k->mesh.tp == 1); i++) {
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

/* The ring alone, the all-to-all alone, and both; a ring of causal attention zig-zag where the sequence can be cut so.
 * */
static ar_status time_mesh(seeker *k)
{
    const ari_search *s = k->s;
    const int cp = k->mesh.cp;
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
        AR_TRY(time_form(k));
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

/* The lightest candidate of a mesh: among those that share and recompute most, the one with the smallest micro-batches.
 * */
static const ari_candidate *lightest(const seeker *k)
{
    const ari_candidate *best = NULL;
    for (size_t i = 0; i < k->n && k->variant[i].legal == AR_OK; i++) {
        const ari_choice *a = &k->variant[i].choice, *b = best ? &best->choice : NULL;
        const int sharing =
            !b ? 1 : 8 * (a->zero - b->zero) + 4 * ((int)a->recompute - (int)b->recompute) + 2 * (a->sp - b->sp);
        if (sharing > 0 ||
            (sharing == 0 && (a->micro_batches > b->micro_batches ||
                              (a->micro_batches == b->micro_batches && a->virtual_stages < b->virtual_stages))))
            best = &k->variant[i];
    }
    return best;
}

/* The time of the i-th variant by its schedule, which may be more than that of those behind it. */
static ar_status refine_time(seeker *k, size_t i)
{
    ari_candidate f = k->variant[i];
    const ari_planned p = ari_choice_planned(&k->s->base, &f.choice);
    ari_time t;
    AR_TRY(ari_time_of(&t, &p, &k->s->time));
    note_time(&f, &t);
    for (; i + 1 < k->n && by_seconds(&k->variant[i + 1], &f) < 0; i++)
        k->variant[i] = k->variant[i + 1];
    k->variant[i] = f;
    return AR_OK;
}

static void note_fastest(ari_ranking *r, const ari_candidate *f)
{
    if (f->legal == AR_OK && f->settled && (!r->has_fastest || f->seconds < r->fastest.seconds))
        r->fastest = *f;
    r->has_fastest = r->has_fastest || (f->legal == AR_OK && f->settled);
}

/* The fastest that fits; false: none does. The variants are in the order of what they take, or take at least. */
static ar_status choose_one(seeker *k, bool can_fit, bool *chosen)
{
    *chosen = false;
    for (size_t i = 0; i < k->n && k->variant[i].legal == AR_OK && !*chosen;) {
        ari_candidate *f = &k->variant[i];
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
        ari_candidate *f = &k->variant[i];
        note_fastest(k->r, f);
        if (f->legal == AR_OK)
            AR_TRY(weigh(k, f));
        AR_TRY(keep_candidate(k->r, f));
    }
    return AR_OK;
}

/* The fastest that fits, or where none does the one that needs least; all with `every`. */
static ar_status choose_layout(seeker *k)
{
    if (k->n > 0)
        qsort(k->variant, k->n, sizeof *k->variant, by_seconds);
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
    if (!light.settled) {
        const ari_planned p = ari_choice_planned(&k->s->base, &light.choice);
        ari_time t;
        AR_TRY(ari_time_of(&t, &p, &k->s->time));
        note_time(&light, &t);
    }
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
        .tp = tp, .cp = 1, .cp_inner = 1, .pp = 1, .dp = 1, .virtual_stages = 1, .micro_batches = 1};
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

ar_status ari_search_run(ari_ranking *r, const ari_search *s)
{
    seeker k = {.s = s, .r = r};
    *r = (ari_ranking){.memory_bytes = s->time.cluster.memory_bytes};
    if (s->ranks < 1 || s->ranks > ARI_MOST_GPUS)
        return ar_error_set(AR_ERR_ARG, "%d ranks: from 1 to %d are expected", s->ranks, ARI_MOST_GPUS);
    k.divisors = list_divisors(k.divisor, MOST_DIVISORS, (size_t)s->ranks);
    AR_TRY(ari_alloc_zero((void **)&k.parts, 1, sizeof *k.parts, "parts of a mesh"));
    ar_status st = search_axis(&k, 0, s->ranks, 0.0, 1.0);
    if (st == AR_OK && r->has_fastest)
        st = weigh(&k, &r->fastest);
    forget_parts(k.parts);
    free(k.parts);
    free(k.variant);
    if (st != AR_OK)
        return st;
    if (r->n > 0)
        qsort(r->at, r->n, sizeof *r->at, by_rank);
    for (size_t i = 0; i < r->n; i++)
        r->fitting += r->at[i].legal == AR_OK && r->at[i].fits;
    return AR_OK;
}

void ari_ranking_fini(ari_ranking *r)
{
    free(r->at);
    *r = (ari_ranking){.n = 0};
}
