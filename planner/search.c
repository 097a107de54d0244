/* SPDX-License-Identifier: Apache-2.0 */
/* All layouts of a number of ranks. Those of one mesh, tp x cp x pp x dp, share the passes and the sums of gradients, so
 * that the list of operations is walked once for each of these. */
#include "planner/search.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "planner/time_impl.h"
#include "ref/core/size.h"

ari_planned ari_choice_planned(const ari_planned *base, const ari_choice *c)
{
    ari_planned p = *base;
    ar_parallel *layout = &p.step.run.parallel;
    layout->tp = c->tp;
    layout->dp = c->dp;
    layout->sp = c->sp && c->tp > 1;
    layout->zero = c->zero;
    layout->micro_batches = c->micro_batches;
    layout->cp = c->cp;
    layout->cp_inner = c->cp_inner;
    layout->zigzag = c->zigzag && c->cp > ari_at_least_one(c->cp_inner);
    p.pp = c->pp;
    p.chunks = c->chunks;
    layout->recompute.what = c->recompute;
    return p;
}

/* --- variants of a mesh ------------------------------------------------------------------------------------------- */

enum { MOST_MICRO = 96, MOST_CHUNKS = 16, MOST_DIVISORS = 512 };

/* What the layouts of a mesh share: passes by sp and micro-batches; sums by sp, by whether optimizer states are shared,
 * and by chunks, of which the first stage's layers depend. */
typedef struct mesh_parts {
    ari_passes passes[2][MOST_MICRO];
    ari_outside outside[2][2][MOST_CHUNKS];
    bool has_passes[2][MOST_MICRO], has_outside[2][2][MOST_CHUNKS];
} mesh_parts;

typedef struct seeker {
    const ari_search *s;
    ari_ranking *r;
    ari_choice mesh;
    int micro[MOST_MICRO], micros;
    int chunk[MOST_CHUNKS], chunks;
    int alike[MOST_CHUNKS];               /* the first number of chunks whose first stage has as many layers */
    int divisor[MOST_DIVISORS], divisors; /* of the ranks */
    ari_found *variant;                   /* [n] of the mesh */
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
        for (int i = 0; i < 2 * MOST_CHUNKS; i++) {
            bool *has = &parts->has_outside[sp][i / MOST_CHUNKS][i % MOST_CHUNKS];
            if (*has)
                ari_outside_fini(&parts->outside[sp][i / MOST_CHUNKS][i % MOST_CHUNKS]);
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

/* Chunks that cut the layers evenly, or as evenly as if embedding and head were a layer each. */
static void list_chunks(seeker *k)
{
    const size_t layers = k->s->base.step.config->layers, pp = (size_t)k->mesh.pp;
    k->chunks = 0;
    k->chunk[k->chunks++] = k->s->fixed.chunks > 0 ? k->s->fixed.chunks : 1;
    for (size_t v = 2; k->s->fixed.chunks == 0 && pp > 1 && v <= layers / pp && k->chunks < MOST_CHUNKS; v++) {
        if (layers % (pp * v) == 0 || (layers + 2) % (pp * v) == 0)
            k->chunk[k->chunks++] = (int)v;
    }
    size_t first[MOST_CHUNKS];
    for (int i = 0; i < k->chunks && pp <= layers; i++) {
        ari_choice c = k->mesh;
        c.chunks = k->chunk[i];
        const ari_planned p = ari_choice_planned(&k->s->base, &c);
        first[i] = ari_stage_count(&p, 0);
        for (k->alike[i] = 0; first[k->alike[i]] != first[i]; k->alike[i]++)
            ;
    }
}

static ar_status add(seeker *k, const ari_choice *c)
{
    AR_TRY(ari_grow(&k->variant, &k->room, k->n, sizeof *k->variant, "layouts"));
    ari_found *f = &k->variant[k->n++];
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
    AR_TRY(add(k, c));
    k->variant[k->n - 1].legal = why;
    snprintf(k->variant[k->n - 1].reason, ARI_REASON, "%s", ar_error_message());
    return AR_OK;
}

bool ari_is_verdict(ar_status st)
{
    return st != AR_ERR_MEMORY && st != AR_ERR_INTERNAL;
}

/* Layout c, of the m-th number of micro-batches and the v-th of chunks. */
static ar_status time_variant(seeker *k, const ari_choice *c, int m, int v)
{
    const ari_planned p = ari_choice_planned(&k->s->base, c);
    const ari_time_options *o = &k->s->time;
    ari_passes *passes = &k->parts->passes[c->sp][m];
    ari_outside *outside = &k->parts->outside[c->sp][c->zero > 0][k->alike[v]];
    bool *has_passes = &k->parts->has_passes[c->sp][m],
         *has_outside = &k->parts->has_outside[c->sp][c->zero > 0][k->alike[v]];
    ari_time t;
    const ar_status legal = ari_planned_check(&p);
    k->r->layouts++;
    if (legal != AR_OK)
        return ari_is_verdict(legal) ? refuse(k, c, legal) : legal;
    k->r->legal++;
    if (!*has_passes)
        AR_TRY(ari_passes_init(passes, &p, o));
    *has_passes = true;
    if (!*has_outside)
        AR_TRY(ari_outside_init(outside, &p, o));
    *has_outside = true;
    ari_time_compose(&t, &p, o, passes, outside);
    AR_TRY(add(k, c));
    k->variant[k->n - 1].seconds = ari_time_step(&t);
    k->variant[k->n - 1].bound = ari_bound_of(&t);
    return AR_OK;
}

/* With flash attention selective recomputation has nothing to compute again. */
static ar_status time_family(seeker *k, ari_choice c, int m, int v)
{
    const ari_search *s = k->s;
    for (c.zero = 0; c.zero <= 3; c.zero++) {
        if (s->zero >= 0 ? s->zero != c.zero : c.zero > 0 && c.dp * c.cp == 1)
            continue;
        for (int again = AR_RECOMPUTE_NONE; again <= AR_RECOMPUTE_FULL; again++) {
            c.recompute = (ar_recompute)again;
            if (s->recompute >= 0 ? s->recompute == again : again != AR_RECOMPUTE_SELECTIVE || !s->base.flash)
                AR_TRY(time_variant(k, &c, m, v));
        }
    }
    return AR_OK;
}

/* All layouts of a mesh whose context-parallel ranks are joined in one way. */
static ar_status time_form(seeker *k)
{
    forget_parts(k->parts);
    for (int sp = 0; sp <= (k->mesh.tp > 1); sp++) {
        for (int i = 0; i < k->micros * k->chunks && (k->s->sp < 0 || k->s->sp == sp || k->mesh.tp == 1); i++) {
            ari_choice c = k->mesh;
            c.sp = sp;
            c.micro_batches = k->micro[i / k->chunks];
            c.chunks = k->chunk[i % k->chunks];
            AR_TRY(time_family(k, c, i / k->chunks, i % k->chunks));
        }
    }
    return AR_OK;
}

/* The ring alone, the all-to-all alone, and both; a ring of causal attention zig-zag where the sequence can be cut so. */
static ar_status time_mesh(seeker *k)
{
    const ari_search *s = k->s;
    const int cp = k->mesh.cp;
    k->n = 0;
    list_micro(k);
    list_chunks(k);
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
    const ari_found *x = a, *y = b;
    if ((x->legal != AR_OK) != (y->legal != AR_OK))
        return x->legal != AR_OK ? 1 : -1;
    return x->seconds < y->seconds ? -1 : x->seconds > y->seconds;
}

static ar_status weigh(const seeker *k, ari_found *f)
{
    const ari_planned p = ari_choice_planned(&k->s->base, &f->choice);
    ari_memory m;
    AR_TRY(ari_memory_production(&m, &p));
    f->bytes = ari_memory_sum(&m);
    f->fits = k->r->memory_bytes <= 0.0 || f->bytes <= k->r->memory_bytes;
    return AR_OK;
}

static ar_status keep(ari_ranking *r, const ari_found *f)
{
    AR_TRY(ari_grow(&r->at, &r->room, r->n, sizeof *r->at, "layouts"));
    r->at[r->n++] = *f;
    return AR_OK;
}

/* What of a mesh needs least: of those that share and compute again most the one of the smallest micro-batches. */
static const ari_found *lightest(const seeker *k)
{
    const ari_found *best = NULL;
    for (size_t i = 0; i < k->n && k->variant[i].legal == AR_OK; i++) {
        const ari_choice *a = &k->variant[i].choice, *b = best ? &best->choice : NULL;
        const int sharing =
            !b ? 1 : 8 * (a->zero - b->zero) + 4 * ((int)a->recompute - (int)b->recompute) + 2 * (a->sp - b->sp);
        if (sharing > 0 || (sharing == 0 && (a->micro_batches > b->micro_batches ||
                                             (a->micro_batches == b->micro_batches && a->chunks < b->chunks))))
            best = &k->variant[i];
    }
    return best;
}

/* The fastest that fits, or where none does the one that needs least; all with `every`. */
static ar_status choose(seeker *k)
{
    if (k->n > 0)
        qsort(k->variant, k->n, sizeof *k->variant, by_seconds);
    const bool legal = k->n > 0 && k->variant[0].legal == AR_OK;
    if (legal && (!k->r->has_fastest || k->variant[0].seconds < k->r->fastest.seconds))
        k->r->fastest = k->variant[0];
    k->r->has_fastest = k->r->has_fastest || legal;
    const ari_found *least = lightest(k);
    ari_found light = least ? *least : (ari_found){.legal = AR_ERR_ARG};
    if (least)
        AR_TRY(weigh(k, &light));
    for (size_t i = 0; i < k->n; i++) {
        ari_found *f = &k->variant[i];
        if (f->legal == AR_OK && (k->s->every || light.fits))
            AR_TRY(weigh(k, f));
        if (k->s->every || f->fits)
            AR_TRY(keep(k->r, f));
        if (!k->s->every && f->fits)
            return AR_OK;
    }
    return !k->s->every && least ? keep(k->r, &light) : AR_OK;
}

/* --- meshes ------------------------------------------------------------------------------------------------------- */

static ar_status search_mesh(seeker *k)
{
    k->r->meshes++;
    AR_TRY(time_mesh(k));
    return choose(k);
}

static void tell(const seeker *k, double fraction)
{
    char what[64];
    snprintf(what, sizeof what, "tp=%d cp=%d", k->mesh.tp, k->mesh.cp);
    if (k->s->progress)
        k->s->progress(k->s->user, fraction, what);
}

/* The divisors of what tp leaves are among those of all ranks. */
static ar_status search_tp(seeker *k, int tp, double begin, double end)
{
    const ari_search *s = k->s;
    const int of_tp = s->ranks / tp;
    for (int i = 0; i < k->divisors; i++) {
        const int cp = k->divisor[i];
        if (of_tp % cp != 0 || !wanted(s->fixed.cp, cp))
            continue;
        k->mesh = (ari_choice){.tp = tp, .cp = cp};
        tell(k, begin + (end - begin) * i / k->divisors);
        for (int j = 0; j < k->divisors; j++) {
            const int pp = k->divisor[j], dp = of_tp / cp / pp;
            k->mesh = (ari_choice){.tp = tp, .cp = cp, .pp = pp, .dp = dp};
            if (of_tp / cp % pp == 0 && wanted(s->fixed.pp, pp) && wanted(s->fixed.dp, dp))
                AR_TRY(search_mesh(k));
        }
    }
    return AR_OK;
}

static ar_status check_tp(seeker *k, int tp, bool *can)
{
    const ari_choice alone = {.tp = tp, .cp = 1, .cp_inner = 1, .pp = 1, .dp = 1, .chunks = 1, .micro_batches = 1};
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
    return keep(k->r, &k->variant[0]);
}

static int by_rank(const void *a, const void *b)
{
    const ari_found *x = a, *y = b;
    if (x->legal != AR_OK || y->legal != AR_OK || (x->fits && y->fits))
        return by_seconds(a, b);
    if (x->fits != y->fits)
        return x->fits ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

static ar_status search_all(seeker *k)
{
    const ari_search *s = k->s;
    const double all = k->divisors;
    for (int i = 0; i < k->divisors; i++) {
        const int tp = k->divisor[i];
        bool can = false;
        if (!wanted(s->fixed.tp, tp))
            continue;
        AR_TRY(check_tp(k, tp, &can));
        if (can)
            AR_TRY(search_tp(k, tp, i / all, (i + 1) / all));
    }
    return AR_OK;
}

ar_status ari_search_run(ari_ranking *r, const ari_search *s)
{
    seeker k = {.s = s, .r = r};
    *r = (ari_ranking){.memory_bytes = s->time.cluster.memory_bytes};
    if (s->ranks < 1 || s->ranks > ARI_MOST_RANKS)
        return ar_error_set(AR_ERR_ARG, "%d ranks: from 1 to %d are expected", s->ranks, ARI_MOST_RANKS);
    k.divisors = list_divisors(k.divisor, MOST_DIVISORS, (size_t)s->ranks);
    AR_TRY(ari_alloc_zero((void **)&k.parts, 1, sizeof *k.parts, "parts of a mesh"));
    ar_status st = search_all(&k);
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
