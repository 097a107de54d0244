/* SPDX-License-Identifier: Apache-2.0 */
/* Search of layouts: all meshes of a number of ranks, and all layouts of a mesh. It computes time and memory of each
 * legal layout, and keeps the fastest layout of each mesh that fits. preferred.c orders layouts of equal speed.
 *
 * A mesh is a product tp x cp x pp x dp. A family of its layouts has one way to connect the context-parallel ranks, one
 * way to shard experts, and one choice of sequence parallelism; a micro-batch with a given number of samples costs the
 * same in all its layouts. A variant is a ZeRO stage with its number of replicas, whose gradient reductions are the
 * same for all micro-batches. The cost of a layout is a sum of these parts. */
#include "verify/plan/search.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "anyrank/config.h"
#include "ref/core/size.h"
#include "ref/models/model_private.h"
#include "verify/plan/cost.h"

enum { MOST_MICRO = 96, MOST_PIPELINES = 18, MOST_DIVISORS = 512, MOST_VARIANTS = 5 };

/* Key of micro-batch costs among meshes with the same tp and cp. dp and the number of micro-batches matter only if they
 * do not divide the batch. */
typedef struct cost_key {
    size_t samples;
    int inner, ep, etp, sp, zigzag, dp, micros;
    int unused; /* fills the padding, so that keys can be compared as bytes */
} cost_key;
typedef struct known_cost {
    cost_key key;
    ari_micro_cost cost;
    size_t next_cost; /* next entry with the same hash; 0: none */
} known_cost;
enum { COST_LISTS = 1024 };

typedef struct seeker {
    const ari_search *search;
    ari_ranking *ranking;
    ari_choice mesh;
    int micro[MOST_MICRO], micros;
    ari_pipeline *pipeline; /* [MOST_PIPELINES] */
    int pipelines;
    int divisor[MOST_DIVISORS], divisors; /* divisors of the number of ranks */
    int tp, cp;                           /* key of the cost */
    known_cost *cost;                     /* [costs]; element 0 is unused */
    size_t costs, cost_room, list[COST_LISTS];
    size_t cost_of[MOST_MICRO]; /* index of the cost for each number of micro-batches */
    double parameters;
    /* of the mesh: the fastest layout that fits, the fastest one similar to published runs, and the one with the least
     * memory */
    ari_candidate fastest, usual, lightest;
    bool has_fastest, has_usual, has_lightest;
} seeker;

static bool allows_extent(int fixed, int value)
{
    return fixed <= 0 || fixed == value;
}

/* Lists the divisors of n in ascending order, at most `limit`. */
static int list_divisors(int *list, int limit, size_t n)
{
    int count = 0;
    for (size_t d = 1; d <= n / d && count < limit; d++) {
        if (n % d == 0)
            list[count++] = (int)d;
    }
    for (int i = count - 1; i >= 0 && count < limit; i--) {
        const size_t cofactor = n / (size_t)list[i];
        if (cofactor > (size_t)list[i] && cofactor <= INT_MAX)
            list[count++] = (int)cofactor;
    }
    return count;
}

/* --- pipelines and micro-batches of a mesh ------------------------------------------------------------------------ */

/* Lists the numbers of micro-batches that divide a rank's samples, or the largest rank's samples if dp does not divide
 * the batch. */
static void list_micro(seeker *k)
{
    const size_t batch = k->search->base.step.run.batch, dp = (size_t)k->mesh.dp, n = (batch + dp - 1) / dp;
    k->micros = 1;
    if (k->search->fixed.micro_batches > 0)
        k->micro[0] = k->search->fixed.micro_batches;
    else
        k->micros = list_divisors(k->micro, MOST_MICRO, n);
}

static void add_pipeline(seeker *k, int virtual_stages, ar_pp_schedule schedule)
{
    ari_choice c = k->mesh;
    if (k->pipelines == MOST_PIPELINES)
        return;
    c.virtual_stages = virtual_stages;
    c.schedule = schedule;
    ari_pipeline *l = &k->pipeline[k->pipelines++];
    const ari_planned p = ari_choice_planned(&k->search->base, &c);
    *l = (ari_pipeline){.stages = virtual_stages, .schedule = schedule}; /* a pipeline refused by its check has no
                                                                            classes */
    if ((double)c.pp * virtual_stages <= (double)p.step.config->layers || p.step.run.parallel.stages.n > 0)
        ari_pipeline_of(l, &p);
}

/* Virtual stages that cut the layers evenly, or as evenly as if embedding and head were a layer each. */
static void add_interleaved(seeker *k)
{
    const size_t layers = k->search->base.step.config->layers, pp = (size_t)k->mesh.pp;
    const int fixed = k->search->fixed.virtual_stages;
    for (size_t v = 2; v <= layers / pp || (int)v == fixed; v++) {
        const bool even = layers % (pp * v) == 0 || (layers + 2) % (pp * v) == 0;
        if (fixed > 0 ? (int)v == fixed : even)
            add_pipeline(k, (int)v, AR_PP_INTERLEAVED);
    }
}

/* Lists the pipelines to try. GPipe is tried only on request, because 1F1B is never slower and needs less memory. */
static void list_pipelines(seeker *k)
{
    const int fixed = k->search->fixed.virtual_stages, schedule = k->search->schedule;
    k->pipelines = 0;
    for (int kind = 0; kind < AR_PP_SCHEDULES && k->mesh.pp > 1; kind++) {
        if (schedule >= 0 ? kind != schedule : kind == AR_PP_GPIPE)
            continue;
        if (kind == AR_PP_INTERLEAVED)
            add_interleaved(k);
        else if (fixed <= 1)
            add_pipeline(k, 1, (ar_pp_schedule)kind);
    }
    if (k->pipelines == 0) /* no pipeline, or a pipeline refused by its check */
        add_pipeline(k, ari_at_least_one(fixed),
                     schedule > 0 && k->mesh.pp > 1 ? (ar_pp_schedule)schedule : AR_PP_1F1B);
}

/* --- which are legal ---------------------------------------------------------------------------------------------- */

bool ari_is_verdict(ar_status st)
{
    return st != AR_ERR_MEMORY && st != AR_ERR_INTERNAL;
}

static ar_status add_candidate(ari_ranking *r, const ari_candidate *f)
{
    AR_TRY(ARI_GROW(&r->layout, &r->room, r->n, "layouts"));
    r->layout[r->n++] = *f;
    return AR_OK;
}

/* The first reason is kept for the case that nothing is legal. */
static ar_status refuse(seeker *k, const ari_choice *c, ar_status why)
{
    ari_ranking *r = k->ranking;
    if (r->refused[0] == '\0')
        snprintf(r->refused, sizeof r->refused, "%s", ar_error_message());
    if (!k->search->every)
        return AR_OK;
    AR_TRY(ARI_GROW(&r->why, &r->why_room, r->whys, "reasons"));
    AR_TRY(ari_alloc((void **)&r->why[r->whys], 1, ARI_REASON, "a reason"));
    snprintf(r->why[r->whys], ARI_REASON, "%s", ar_error_message());
    return add_candidate(r, &(ari_candidate){.choice = *c, .legal = why, .reason = r->why[r->whys++]});
}

/* Legality of a variant's layouts in a pipeline: a legal layout stays legal with fewer micro-batches, and recomputation
 * makes no difference. */
typedef enum verdict { ALL_LEGAL, NONE_LEGAL, EACH_DIFFERS } verdict;

/* The verdict on a layout with so many micro-batches. A failure of the machine is returned. */
static ar_status check_micro(ar_status *legal, seeker *k, ari_choice c, int micro_batches)
{
    c.micro_batches = micro_batches;
    const ari_planned p = ari_choice_planned(&k->search->base, &c);
    *legal = ari_planned_check(&p);
    if (*legal == AR_OK || !ari_is_verdict(*legal))
        return *legal;
    return k->search->every ? AR_OK : refuse(k, &c, *legal);
}

static ar_status judge(verdict *v, seeker *k, const ari_choice *c)
{
    ar_status max_status = AR_ERR_ARG, fewest = AR_ERR_ARG;
    *v = EACH_DIFFERS;
    if (k->search->every)
        return AR_OK;
    AR_TRY(check_micro(&fewest, k, *c, k->micro[0]));
    if (fewest == AR_OK)
        AR_TRY(check_micro(&max_status, k, *c, k->micro[k->micros - 1]));
    *v = max_status == AR_OK ? ALL_LEGAL : fewest == AR_OK ? EACH_DIFFERS : NONE_LEGAL;
    return AR_OK;
}

/* --- costs of micro-batches --------------------------------------------------------------------------------------- */

static void forget_costs(seeker *k)
{
    memset(k->list, 0, sizeof k->list);
    k->costs = 1;
    k->tp = k->mesh.tp;
    k->cp = k->mesh.cp;
}

static ar_status find_cost(size_t *found, seeker *k, const ari_planned *p)
{
    const ar_parallel *l = &p->step.run.parallel;
    const size_t batch = p->step.run.batch, pieces = (size_t)l->dp * (size_t)l->micro_batches, samples = batch / pieces;
    const bool even = samples * pieces == batch;
    const cost_key key = {.samples = samples,
                          .inner = l->cp_inner,
                          .ep = l->ep,
                          .etp = l->etp,
                          .sp = l->sp,
                          .zigzag = l->zigzag,
                          .dp = even ? 0 : l->dp,
                          .micros = even ? 0 : l->micro_batches};
    size_t hash = 0;
    for (size_t i = 0; i < sizeof key; i++)
        hash = 31 * hash + ((const unsigned char *)&key)[i];
    size_t *chain_head = &k->list[hash % COST_LISTS];
    for (*found = *chain_head; *found; *found = k->cost[*found].next_cost) {
        if (memcmp(&k->cost[*found].key, &key, sizeof key) == 0)
            return AR_OK;
    }
    AR_TRY(ARI_GROW(&k->cost, &k->cost_room, k->costs, "costs of micro-batches"));
    *found = k->costs++;
    k->cost[*found].key = key;
    k->cost[*found].next_cost = *chain_head;
    *chain_head = *found;
    return ari_micro_cost_of(&k->cost[*found].cost, p, &k->search->time, NULL);
}

/* --- layouts of a family ------------------------------------------------------------------------------------------ */

/* Returns the number of replicas if ZeRO shards within a node while gradients are reduced across nodes; 1: no
 * replicas. */
static int replicas(const seeker *k, const ari_choice *c)
{
    ari_choice unreplicated = *c;
    unreplicated.dp_replicate = 1;
    const ari_planned p = ari_choice_planned(&k->search->base, &unreplicated);
    const ari_links l = ari_links_of(&p, &k->search->time, ARI_OVER_DP);
    const double nodes = l.node_ranks > 1.0 ? l.ranks / l.node_ranks : 1.0;
    const int ranks_per_node = ari_extent(&p.step.run.parallel, ari_expert_axes(&p.step.run.parallel)) / (int)nodes;
    const bool is_divisible =
        nodes == floor(nodes) && c->dp % (int)nodes == 0 && ranks_per_node % ari_at_least_one(c->ep) == 0;
    return is_divisible ? (int)nodes : 1;
}

typedef struct variant {
    int zero, dp_replicate;
} variant;

/* Lists the ZeRO stages that the system supports; the third stage also with shards within nodes only. */
static int list_variants(variant list[MOST_VARIANTS], const seeker *k, ari_choice c)
{
    const ari_search *s = k->search;
    const ari_planned p = ari_choice_planned(&s->base, &c);
    const int fixed_replicas = s->fixed.dp_replicate, sharers = ari_extent(&p.step.run.parallel, ARI_CUTS_DATA),
              hybrid = replicas(k, &c);
    int n = 0;
    for (c.zero = 0; c.zero <= 3; c.zero++) {
        if (s->zero >= 0 ? s->zero != c.zero : c.zero > 0 && sharers == 1)
            continue;
        c.dp_replicate = c.zero > 0 ? ari_at_least_one(fixed_replicas) : 1;
        if (!ari_system_lacks(s, &c))
            list[n++] = (variant){c.zero, c.dp_replicate};
        c.dp_replicate = hybrid;
        if (c.zero == 3 && hybrid > 1 && fixed_replicas == 0 && !ari_system_lacks(s, &c))
            list[n++] = (variant){c.zero, c.dp_replicate};
    }
    return n;
}

/* Lists the kinds of recomputation. With flash attention, selective recomputation has nothing to recompute. */
static int list_recomputed(ar_recompute list[AR_RECOMPUTES], const ari_search *s)
{
    int n = 0;
    for (int recompute = AR_RECOMPUTE_NONE; recompute <= AR_RECOMPUTE_FULL; recompute++) {
        if (s->recompute >= 0 ? s->recompute == recompute : recompute != AR_RECOMPUTE_SELECTIVE || !s->base.flash)
            list[n++] = (ar_recompute)recompute;
    }
    return n;
}

/* Computes a legal layout's time and memory. For each mesh only the fastest layout that fits is kept, or the one that
 * needs the least memory if none fits. */
static ar_status weigh(seeker *k, const ari_planned *p, ari_choice c, const ari_micro_cost *cost, const ari_pipeline *l,
                       const ari_sync *sync)
{
    ari_ranking *r = k->ranking;
    ari_candidate f = {.choice = c, .reason = ""};
    ari_time t;
    ari_memory m;
    ari_step_time(&t, p, &k->search->time, cost, l, sync, NULL);
    f.seconds = ari_time_step(&t);
    const bool is_fastest = !r->has_fastest || f.seconds < r->fastest.seconds;
    const double enough = k->has_usual ? k->usual.seconds : (1.0 + ARI_EQUAL) * k->fastest.seconds;
    if (!k->search->every && !is_fastest && k->has_fastest && f.seconds >= enough)
        return AR_OK;
    ari_step_memory(&m, p, cost, l);
    f.bytes = ari_memory_sum(&m);
    f.fits = r->memory_bytes <= 0.0 || f.bytes <= r->memory_bytes;
    f.bound = ari_bound_of(&t);
    r->fastest = is_fastest ? f : r->fastest;
    r->has_fastest = true;
    if (k->search->every)
        return add_candidate(r, &f);
    if (f.fits && (!k->has_fastest || f.seconds < k->fastest.seconds)) {
        k->fastest = f;
        k->has_fastest = true;
    }
    if (f.fits && (!k->has_usual || f.seconds < k->usual.seconds) && ari_choice_is_published(&c, k->parameters)) {
        k->usual = f;
        k->has_usual = true;
    }
    if (!k->has_lightest || f.bytes < k->lightest.bytes ||
        (f.bytes == k->lightest.bytes && f.seconds < k->lightest.seconds))
        k->lightest = f;
    k->has_lightest = true;
    return AR_OK;
}

/* Tries all numbers of micro-batches and kinds of recomputation for a variant in a pipeline. p: the family's plan. */
static ar_status add_variant(seeker *k, ari_planned *p, ari_choice c, const ari_pipeline *l)
{
    ar_parallel *layout = &p->step.run.parallel;
    ar_recompute recompute[AR_RECOMPUTES];
    ari_sync sync[AR_MAX_STAGES];
    verdict v = ALL_LEGAL;
    const int recomputed = list_recomputed(recompute, k->search);
    bool synced = false;
    k->ranking->layouts += (size_t)(k->micros * recomputed);
    c.recompute = recompute[0];
    AR_TRY(judge(&v, k, &c));
    for (int i = 0; i < k->micros && v != NONE_LEGAL; i++) {
        ar_status legal = AR_OK;
        c.micro_batches = layout->micro_batches = k->micro[i];
        if (v == EACH_DIFFERS)
            AR_TRY(check_micro(&legal, k, c, k->micro[i]));
        if (legal == AR_OK && k->cost_of[i] == 0)
            AR_TRY(find_cost(&k->cost_of[i], k, p));
        const ari_micro_cost *cost = &k->cost[k->cost_of[i]].cost;
        for (size_t j = 0; j < l->classes && legal == AR_OK && !synced; j++)
            sync[j] = ari_sync_of(p, &k->search->time, cost, l, j, NULL);
        synced = synced || legal == AR_OK;
        for (int j = 0; j < recomputed; j++) {
            c.recompute = layout->recompute.part = recompute[j];
            k->ranking->legal += legal == AR_OK;
            AR_TRY(legal == AR_OK ? weigh(k, p, c, cost, l, sync) : k->search->every ? refuse(k, &c, legal) : AR_OK);
        }
    }
    return AR_OK;
}

static ar_status add_family(seeker *k, ari_choice c)
{
    variant variants[MOST_VARIANTS];
    memset(k->cost_of, 0, sizeof k->cost_of);
    for (int i = 0; i < k->pipelines; i++) {
        const ari_pipeline *l = &k->pipeline[i];
        c.virtual_stages = l->stages;
        c.schedule = l->schedule;
        const int n = list_variants(variants, k, c);
        for (int j = 0; j < n; j++) {
            c.zero = variants[j].zero;
            c.dp_replicate = variants[j].dp_replicate;
            ari_planned p = ari_choice_planned(&k->search->base, &c);
            AR_TRY(add_variant(k, &p, c, l));
        }
    }
    return AR_OK;
}

/* --- families of a mesh ------------------------------------------------------------------------------------------- */

/* Tries the layout with and without sequence parallelism, which is required for experts that tp does not divide. */
static ar_status add_sequence(seeker *k)
{
    const ari_search *s = k->search;
    for (int sp = 0; sp <= (k->mesh.tp > 1); sp++) {
        const bool is_allowed = s->sp < 0 || s->sp == sp || k->mesh.tp == 1;
        const bool can = k->mesh.etp != 1 || k->mesh.tp == 1 || sp || s->fixed.etp == 1;
        ari_choice c = k->mesh;
        c.sp = sp;
        if (is_allowed && can)
            AR_TRY(add_family(k, c));
    }
    return AR_OK;
}

/* Returns true if the ranks that together hold a layer's experts can divide them among ep ranks. */
static bool can_share(const seeker *k, int ep)
{
    const size_t experts = k->search->base.step.config->experts.n;
    const int sharers = k->mesh.etp == 1 ? k->mesh.cp * k->mesh.tp : k->mesh.cp;
    return ep == 1 || (experts > 0 && experts % (size_t)ep == 0 && k->mesh.dp * sharers % ep == 0 &&
                       (ep % sharers == 0 || sharers % ep == 0));
}

/* Tries experts divided over tp like other weights, and, with sequence parallelism, not divided over tp; ep ranks share
 * the experts. */
static ar_status add_experts(seeker *k)
{
    const ari_search *s = k->search;
    const bool has_uncut = s->base.step.config->experts.n > 0 && k->mesh.tp > 1 && s->sp != 0;
    const int fixed = s->fixed.ep;
    for (int etp = 0; etp <= has_uncut; etp++) {
        k->mesh.etp = s->fixed.etp > 0 ? s->fixed.etp : etp;
        if (etp == 1 && s->fixed.etp > 0)
            continue;
        for (int i = 0; i < k->divisors; i++) {
            k->mesh.ep = fixed > 0 ? fixed : k->divisor[i];
            if (fixed > 0 ? i == 0 : can_share(k, k->mesh.ep))
                AR_TRY(add_sequence(k));
        }
    }
    return AR_OK;
}

/* Tries cp as a ring only, as an all-to-all only, and as both. Causal rings use zigzag if the sequence can be divided
 * accordingly. */
static ar_status search_mesh(seeker *k)
{
    const ari_search *s = k->search;
    const int cp = k->mesh.cp;
    k->ranking->meshes++;
    k->has_fastest = k->has_usual = k->has_lightest = false;
    if (k->tp != k->mesh.tp || k->cp != cp)
        forget_costs(k);
    list_micro(k);
    list_pipelines(k);
    for (int inner = 1; inner <= cp; inner++) {
        if (cp % inner != 0 || !allows_extent(s->fixed.cp_inner, inner))
            continue;
        const size_t pieces = 2 * (size_t)(cp / inner);
        const bool balanced = s->base.step.config->causal && s->base.step.run.seq % pieces == 0;
        k->mesh.cp_inner = inner;
        k->mesh.zigzag = cp > inner && (balanced || s->fixed.zigzag);
        AR_TRY(add_experts(k));
    }
    k->usual.has_faster = true;
    if (k->has_usual && k->usual.seconds > k->fastest.seconds &&
        k->usual.seconds <= (1.0 + ARI_EQUAL) * k->fastest.seconds)
        AR_TRY(add_candidate(k->ranking, &k->usual));
    return k->has_fastest    ? add_candidate(k->ranking, &k->fastest)
           : k->has_lightest ? add_candidate(k->ranking, &k->lightest)
                             : AR_OK;
}

/* --- meshes ------------------------------------------------------------------------------------------------------- */

static void report_progress(const seeker *k, double fraction)
{
    char label[ARI_CHOICE_TEXT];
    ari_choice_text(label, &k->mesh, ARI_LAYOUT_AXES - 1, " ");
    if (k->search->progress)
        k->search->progress(k->search->user, fraction, label);
}

static ar_status check_tp(seeker *k, int tp, bool *can)
{
    const ari_choice alone = {.tp = tp,
                              .cp = 1,
                              .cp_inner = 1,
                              .ep = 1,
                              .pp = 1,
                              .dp = k->search->ranks / tp,
                              .virtual_stages = 1,
                              .micro_batches = 1};
    const ar_plan *plan = &k->search->base.step.run.plan;
    const ar_status st = ari_config_check_ranks(k->search->base.step.config, tp, plan);
    *can = st == AR_OK;
    if (st == AR_OK || !ari_is_verdict(st))
        return st;
    k->ranking->layouts++;
    return refuse(k, &alone, st);
}

/* Searches the meshes whose first i extents are the seeker's, over the remaining ranks. Their divisors are among those
 * of all ranks, and the last extent takes the rest. */
static ar_status search_axis(seeker *k, int i, int ranks, double begin, double end)
{
    const ari_search *s = k->search;
    const double share = (end - begin) / k->divisors;
    if (i + 1 == ARI_LAYOUT_AXES) {
        k->mesh.extent[i] = ranks;
        if (!allows_extent(s->fixed.extent[i], ranks))
            return AR_OK;
        report_progress(k, begin);
        return search_mesh(k);
    }
    for (int j = 0; j < k->divisors; j++) {
        const int n = k->divisor[j];
        bool can = true;
        if (ranks % n != 0 || !allows_extent(s->fixed.extent[i], n))
            continue;
        k->mesh.extent[i] = n;
        if (ari_planned_axes[i] == ARI_LAYOUT_TP)
            AR_TRY(check_tp(k, n, &can));
        if (can)
            AR_TRY(search_axis(k, i + 1, ranks / n, begin + share * j, begin + share * (j + 1)));
    }
    return AR_OK;
}

static int by_rank(const void *a, const void *b)
{
    const ari_candidate *x = a, *y = b;
    ARI_ASCENDING(x->legal != AR_OK, y->legal != AR_OK);
    ARI_ASCENDING(y->fits, x->fits);
    if (x->legal != AR_OK || x->fits)
        return x->seconds < y->seconds ? -1 : x->seconds > y->seconds;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

ar_status ari_search_run(ari_ranking *r, const ari_search *s)
{
    seeker k = {.search = s, .ranking = r, .parameters = ari_search_parameters(s)};
    *r = (ari_ranking){.memory_bytes = s->time.cluster.memory_bytes};
    if (s->ranks < 1 || s->ranks > ARI_MAX_GPUS)
        return ar_error_set(AR_ERR_ARG, "%d ranks: from 1 to %d are expected", s->ranks, ARI_MAX_GPUS);
    k.divisors = list_divisors(k.divisor, MOST_DIVISORS, (size_t)s->ranks);
    ar_status st = ARI_ALLOC_ZERO(&k.pipeline, MOST_PIPELINES, "pipelines");
    if (st == AR_OK)
        st = search_axis(&k, 0, s->ranks, 0.0, 1.0);
    free(k.pipeline);
    free(k.cost);
    AR_TRY(st);
    if (r->n > 0)
        qsort(r->layout, r->n, sizeof *r->layout, by_rank);
    for (size_t i = 0; i < r->n; i++)
        r->fitting += r->layout[i].legal == AR_OK && r->layout[i].fits;
    return ari_ranking_prefer(r, s);
}

void ari_ranking_fini(ari_ranking *r)
{
    for (size_t i = 0; i < r->whys; i++)
        free(r->why[i]);
    free(r->why);
    free(r->layout);
    *r = (ari_ranking){.n = 0};
}
