/* SPDX-License-Identifier: Apache-2.0 */
/* All layouts of a number of ranks. Those of one mesh share parts of their time. */
#include "verify/plan/search.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "ref/models/model_private.h"
#include "verify/plan/search_impl.h"

/* --- variants of a mesh ------------------------------------------------------------------------------------------- */

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
static void list_micro(ari_seeker *k)
{
    const size_t batch = k->s->base.step.run.batch, dp = (size_t)k->mesh.dp, n = (batch + dp - 1) / dp;
    k->micros = 1;
    if (k->s->fixed.micro_batches > 0)
        k->micro[0] = k->s->fixed.micro_batches;
    else
        k->micros = list_divisors(k->micro, ARI_PARTS_MICRO, n);
}

static void add_pipeline(ari_seeker *k, int virtual_stages, ar_pp_schedule schedule)
{
    if (k->pipelines == ARI_PARTS_PIPELINES)
        return;
    k->pipeline[k->pipelines++] = (ari_seeker_pipeline){virtual_stages, schedule};
}

/* Virtual stages that cut the layers evenly, or as evenly as if embedding and head were a layer each. */
static void add_interleaved(ari_seeker *k)
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
static void list_pipelines(ari_seeker *k)
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

static ar_status add_variant(ari_seeker *k, const ari_choice *c)
{
    AR_TRY(ARI_GROW(&k->variant, &k->room, k->n, "layouts"));
    ari_candidate *f = &k->variant[k->n++];
    *f = (ari_candidate){.choice = *c, .reason = ""};
    return AR_OK;
}

/* The first reason is kept for the case that nothing is legal. */
static ar_status refuse(ari_seeker *k, const ari_choice *c, ar_status why)
{
    if (k->r->refused[0] == '\0')
        snprintf(k->r->refused, sizeof k->r->refused, "%s", ar_error_message());
    if (!k->s->every)
        return AR_OK;
    AR_TRY(add_variant(k, c));
    ari_ranking *r = k->r;
    AR_TRY(ARI_GROW(&r->why, &r->why_room, r->whys, "reasons"));
    AR_TRY(ari_alloc((void **)&r->why[r->whys], 1, ARI_REASON, "a reason"));
    snprintf(r->why[r->whys], ARI_REASON, "%s", ar_error_message());
    k->variant[k->n - 1].legal = why;
    k->variant[k->n - 1].reason = r->why[r->whys++];
    return AR_OK;
}

bool ari_is_verdict(ar_status st)
{
    return st != AR_ERR_MEMORY && st != AR_ERR_INTERNAL;
}

/* Replicas that share out within a node, where the ranks that sum gradients span nodes; 1: none. */
static int replicas(const ari_seeker *k, const ari_choice *c)
{
    ari_choice one = *c;
    one.dp_replicate = 1;
    const ari_planned p = ari_choice_planned(&k->s->base, &one);
    const ari_links l = ari_links_of(&p, &k->s->time, ARI_OVER_DP);
    const double nodes = l.in_node > 1.0 ? l.n / l.in_node : 1.0;
    const int each = ari_extent(&p.step.run.parallel, ari_expert_axes(&p.step.run.parallel)) / (int)nodes;
    const bool whole = nodes == floor(nodes) && c->dp % (int)nodes == 0 && each % ari_at_least_one(c->ep) == 0;
    return whole ? (int)nodes : 1;
}

/* With flash attention selective recomputation has nothing to compute again. What the system lacks is not looked at. */
static int add_recomputed(ari_choice of[ARI_MOST_VARIANTS], int n, const ari_seeker *k, ari_choice c)
{
    const ari_search *s = k->s;
    if (ari_system_lacks(s, &c))
        return n;
    for (int again = AR_RECOMPUTE_NONE; again <= AR_RECOMPUTE_FULL; again++) {
        c.recompute = (ar_recompute)again;
        if (s->recompute >= 0 ? s->recompute == again : again != AR_RECOMPUTE_SELECTIVE || !s->base.flash)
            of[n++] = c;
    }
    return n;
}

/* ZeRO-3 also shares out within nodes alone. */
int ari_seeker_variants(ari_choice of[ARI_MOST_VARIANTS], const ari_seeker *k, size_t group)
{
    const size_t pipelines = (size_t)k->pipelines, each = pipelines * (size_t)k->micros;
    const ari_seeker_pipeline *pipeline = &k->pipeline[group % pipelines];
    const ari_layout_family *family = &k->family[group / each];
    const int given = k->s->fixed.dp_replicate, zero = k->s->zero;
    ari_choice c = family->choice;
    int n = 0;
    c.micro_batches = k->micro[group % each / pipelines];
    c.virtual_stages = pipeline->virtual_stages;
    c.schedule = pipeline->schedule;
    for (c.zero = 0; c.zero <= 3; c.zero++) {
        if (zero >= 0 ? zero != c.zero : c.zero > 0 && family->sharers == 1)
            continue;
        c.dp_replicate = c.zero > 0 ? ari_at_least_one(given) : 1;
        n = add_recomputed(of, n, k, c);
        c.dp_replicate = family->hybrid;
        if (c.zero == 3 && family->hybrid > 1 && given == 0)
            n = add_recomputed(of, n, k, c);
    }
    return n;
}

/* --- which are legal ---------------------------------------------------------------------------------------------- */

/* What a check can distinguish among the variants of a group; recomputation makes no difference to it. */
static size_t class_of(const ari_choice *c)
{
    return c->zero == 0 ? 0 : c->dp_replicate == 1 ? 1 : 2;
}
enum { CLASSES = 3 };

/* What is known of a family's layouts with a pipeline. */
typedef enum verdict { NOT_ASKED, ALL_LEGAL, NONE_LEGAL, EACH_DIFFERS } verdict;

static ar_status check(const ari_seeker *k, const ari_choice *c)
{
    const ari_planned p = ari_choice_planned(&k->s->base, c);
    return ari_planned_check(&p);
}

/* True if a layout is legal with so many micro-batches. */
static ar_status check_micro(bool *legal, ari_seeker *k, ari_choice c, int micro_batches)
{
    c.micro_batches = micro_batches;
    const ar_status st = check(k, &c);
    *legal = st == AR_OK;
    return st != AR_OK && ari_is_verdict(st) ? refuse(k, &c, st) : st;
}

/* A layout that is legal is so with fewer micro-batches. */
static ar_status judge(verdict *v, ari_seeker *k, const ari_choice *c)
{
    bool most = false, fewest = false;
    if (*v != NOT_ASKED || k->s->every)
        return AR_OK;
    AR_TRY(check_micro(&fewest, k, *c, k->micro[0]));
    if (fewest)
        AR_TRY(check_micro(&most, k, *c, k->micro[k->micros - 1]));
    *v = most ? ALL_LEGAL : fewest ? EACH_DIFFERS : NONE_LEGAL;
    return AR_OK;
}

/* A rank has this part of all experts. */
static int parts_of_experts(const ari_choice *c)
{
    return ari_at_least_one(c->ep) * (c->etp == 1 ? 1 : c->tp);
}

/* Positive if a is lighter than b: among those that share and recompute most, the one with the smallest
 * micro-batches. */
static int lighter(const ari_choice *a, const ari_choice *b)
{
    const int sharing = 8 * (a->zero - b->zero) + 4 * ((int)a->recompute - (int)b->recompute) + 2 * (a->sp - b->sp);
    const int cut = parts_of_experts(a) - parts_of_experts(b), micro = a->micro_batches - b->micro_batches;
    return sharing != 0 ? sharing : cut != 0 ? cut : micro != 0 ? micro : b->virtual_stages - a->virtual_stages;
}

static ar_status note_light(ari_seeker *k, const ari_candidate *f)
{
    const int than = k->lights > 0 ? lighter(&f->choice, &k->light[0].choice) : 1;
    if (than < 0)
        return AR_OK;
    k->lights = than > 0 ? 0 : k->lights;
    AR_TRY(ARI_GROW(&k->light, &k->light_room, k->lights, "layouts"));
    k->light[k->lights++] = *f;
    return AR_OK;
}

static ar_status add_legal(ari_seeker *k, const ari_candidate *f)
{
    k->r->legal++;
    if (!k->s->every)
        return note_light(k, f);
    AR_TRY(add_variant(k, &f->choice));
    k->variant[k->n - 1] = *f;
    return ari_seeker_settle(k, &k->variant[k->n - 1]);
}

static ar_status add_group(ari_seeker *k, verdict verdicts[CLASSES])
{
    ari_choice of[ARI_MOST_VARIANTS];
    const int n = ari_seeker_variants(of, k, k->groups);
    uint16_t legal = 0;
    k->r->layouts += (size_t)n;
    for (int v = 0; v < n; v++) {
        verdict *known = &verdicts[class_of(&of[v])];
        const ari_candidate f = {.choice = of[v], .reason = ""};
        AR_TRY(judge(known, k, &of[v]));
        if (*known == NONE_LEGAL)
            continue;
        const ar_status st = *known == ALL_LEGAL ? AR_OK : check(k, &of[v]);
        if (st != AR_OK && !ari_is_verdict(st))
            return st;
        AR_TRY(st == AR_OK ? add_legal(k, &f) : refuse(k, &of[v], st));
        legal |= (uint16_t)(st == AR_OK ? 1u << v : 0u);
    }
    AR_TRY(ARI_GROW(&k->legal, &k->legal_room, k->groups, "groups of layouts"));
    k->legal[k->groups++] = legal;
    return AR_OK;
}

static ar_status add_family(ari_seeker *k, const ari_choice *c)
{
    verdict verdicts[ARI_PARTS_PIPELINES][CLASSES] = {{NOT_ASKED}};
    const ari_planned p = ari_choice_planned(&k->s->base, c);
    AR_TRY(ARI_GROW(&k->family, &k->family_room, k->families, "families of layouts"));
    k->family[k->families++] = (ari_layout_family){
        .choice = *c, .hybrid = replicas(k, c), .sharers = ari_extent(&p.step.run.parallel, ARI_CUTS_DATA)};
    for (int i = 0; i < k->micros * k->pipelines; i++)
        AR_TRY(add_group(k, verdicts[i % k->pipelines]));
    return AR_OK;
}

/* All layouts of a mesh whose context-parallel ranks are joined in one way, and share experts out in one. */
static ar_status add_form(ari_seeker *k)
{
    for (int sp = 0; sp <= (k->mesh.tp > 1); sp++) {
        const bool given = k->s->sp < 0 || k->s->sp == sp || k->mesh.tp == 1;
        const bool can = k->mesh.etp != 1 || k->mesh.tp == 1 || sp || k->s->fixed.etp == 1;
        ari_choice c = k->mesh;
        c.sp = sp;
        if (given && can)
            AR_TRY(add_family(k, &c));
    }
    return AR_OK;
}

/* True if the ranks that have a layer's experts between them can share them out to ep. */
static bool can_share(const ari_seeker *k, int ep)
{
    const size_t experts = k->s->base.step.config->experts.n;
    const int sharers = k->mesh.etp == 1 ? k->mesh.cp * k->mesh.tp : k->mesh.cp;
    return ep == 1 || (experts > 0 && experts % (size_t)ep == 0 && k->mesh.dp * sharers % ep == 0 &&
                       (ep % sharers == 0 || sharers % ep == 0));
}

static ar_status add_shared(ari_seeker *k)
{
    const int fixed = k->s->fixed.ep;
    for (int i = 0; i < k->divisors; i++) {
        k->mesh.ep = fixed > 0 ? fixed : k->divisor[i];
        if (fixed > 0 ? i == 0 : can_share(k, k->mesh.ep))
            AR_TRY(add_form(k));
    }
    return AR_OK;
}

/* Experts are cut over tp as all else is, or with sequence parallelism not at all. */
static ar_status add_experts(ari_seeker *k)
{
    const ari_search *s = k->s;
    const bool whole = s->base.step.config->experts.n > 0 && k->mesh.tp > 1 && s->sp != 0;
    for (int etp = 0; etp <= whole; etp++) {
        k->mesh.etp = s->fixed.etp > 0 ? s->fixed.etp : etp;
        if (etp == 0 || s->fixed.etp == 0)
            AR_TRY(add_shared(k));
    }
    return AR_OK;
}

/* The ring alone, the all-to-all alone, and both; a ring of causal attention zig-zag where the sequence can be cut so.
 * */
static ar_status list_mesh(ari_seeker *k)
{
    const ari_search *s = k->s;
    const int cp = k->mesh.cp;
    ari_mesh_parts_begin(&k->parts, k->mesh.tp, cp);
    k->n = k->families = k->groups = k->lights = 0;
    list_micro(k);
    list_pipelines(k);
    for (int inner = 1; inner <= cp; inner++) {
        if (cp % inner != 0 || !wanted(s->fixed.cp_inner, inner))
            continue;
        const size_t pieces = 2 * (size_t)(cp / inner);
        const bool balanced = s->base.step.config->causal && s->base.step.run.seq % pieces == 0;
        k->mesh.cp_inner = inner;
        k->mesh.zigzag = cp > inner && (balanced || s->fixed.zigzag);
        AR_TRY(add_experts(k));
    }
    return AR_OK;
}

/* --- of a candidate ----------------------------------------------------------------------------------------------- */

ar_status ari_seeker_settle(ari_seeker *k, ari_candidate *f)
{
    const ari_planned p = ari_choice_planned(&k->s->base, &f->choice);
    ari_time t;
    AR_TRY(ari_mesh_parts_time(&t, &k->parts, &p, &k->s->time, f->alone));
    f->seconds = ari_time_step(&t);
    f->bound = ari_bound_of(&t);
    f->settled = true;
    k->r->timed++;
    return AR_OK;
}

ar_status ari_seeker_weigh(ari_seeker *k, ari_candidate *f, bool exactly)
{
    const double room = k->r->memory_bytes > 0.0 && !exactly ? k->r->memory_bytes : (double)INFINITY;
    const ari_planned p = ari_choice_planned(&k->s->base, &f->choice);
    const ari_passes *passes = NULL;
    ari_memory m;
    if (!exactly) {
        AR_TRY(ari_mesh_parts_passes(&passes, &k->parts, &p, &k->s->time));
        f->bytes = ari_memory_least(&p, passes->parameters[ARI_PART_BLOCKS] / k->mesh.pp,
                                    passes->experts[ARI_PART_BLOCKS] / k->mesh.pp);
    }
    if (exactly || f->bytes <= room) {
        AR_TRY(ari_mesh_parts_memory(&m, &k->parts, &p, room));
        f->bytes = ari_memory_sum(&m);
    }
    f->weighed = true;
    f->fits = k->r->memory_bytes <= 0.0 || f->bytes <= k->r->memory_bytes;
    return AR_OK;
}

ar_status ari_seeker_keep(ari_ranking *r, const ari_candidate *f)
{
    AR_TRY(ARI_GROW(&r->at, &r->room, r->n, "layouts"));
    r->at[r->n++] = *f;
    return AR_OK;
}

void ari_seeker_note(ari_ranking *r, const ari_candidate *f)
{
    if (f->legal == AR_OK && f->settled && (!r->has_fastest || f->seconds < r->fastest.seconds))
        r->fastest = *f;
    r->has_fastest = r->has_fastest || (f->legal == AR_OK && f->settled);
}

static int by_seconds(const void *a, const void *b)
{
    const ari_candidate *x = a, *y = b;
    ARI_ASCENDING(x->legal != AR_OK, y->legal != AR_OK);
    return x->seconds < y->seconds ? -1 : x->seconds > y->seconds;
}

static ar_status keep_every(ari_seeker *k)
{
    if (k->n > 0)
        qsort(k->variant, k->n, sizeof *k->variant, by_seconds);
    for (size_t i = 0; i < k->n; i++) {
        ari_candidate *f = &k->variant[i];
        ari_seeker_note(k->r, f);
        if (f->legal == AR_OK)
            AR_TRY(ari_seeker_weigh(k, f, true));
        AR_TRY(ari_seeker_keep(k->r, f));
    }
    return AR_OK;
}

/* --- meshes ------------------------------------------------------------------------------------------------------- */

static ar_status search_mesh(ari_seeker *k)
{
    k->r->meshes++;
    AR_TRY(list_mesh(k));
    return k->s->every ? keep_every(k) : ari_seeker_best(k);
}

static void report_progress(const ari_seeker *k, double fraction)
{
    char what[ARI_CHOICE_TEXT];
    ari_choice_text(what, &k->mesh, ARI_LAYOUT_AXES - 1, " ");
    if (k->s->progress)
        k->s->progress(k->s->user, fraction, what);
}

static ar_status check_tp(ari_seeker *k, int tp, bool *can)
{
    const ari_choice alone = {
        .tp = tp, .cp = 1, .cp_inner = 1, .ep = 1, .pp = 1, .dp = 1, .virtual_stages = 1, .micro_batches = 1};
    const ar_plan *plan = &k->s->base.step.run.plan;
    const ar_status st = ari_config_check_ranks(k->s->base.step.config, tp, plan);
    *can = st == AR_OK;
    if (st == AR_OK || !ari_is_verdict(st))
        return st;
    k->n = 0;
    k->r->layouts++;
    AR_TRY(refuse(k, &alone, st));
    if (k->n == 0)
        return AR_OK;
    k->variant[0].choice.dp = k->s->ranks / tp;
    return ari_seeker_keep(k->r, &k->variant[0]);
}

/* The j-th divisor to try. Where only the first of the list matters, tp of a node's ranks comes first and then fewer:
 * the sooner a good one is found, the more bounds rule out. */
static int likely(const ari_seeker *k, int axis, int j)
{
    int inside = 0;
    while (inside < k->divisors && k->divisor[inside] <= k->s->time.cluster.ranks_per_node)
        inside++;
    return k->s->first && ari_planned_axes[axis] == ARI_LAYOUT_TP && j < inside ? inside - 1 - j : j;
}

/* The meshes whose extents before the i-th are the seeker's, over the ranks that these leave: its divisors are among
 * those of all ranks, and the last extent takes what is left. */
static ar_status search_axis(ari_seeker *k, int i, int left, double begin, double end)
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
        const int n = k->divisor[likely(k, i, j)];
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

static ar_status weigh_fastest(ari_ranking *r, const ari_search *s)
{
    const ari_planned p = ari_choice_planned(&s->base, &r->fastest.choice);
    ari_memory m;
    if (!r->has_fastest)
        return AR_OK;
    AR_TRY(ari_memory_production(&m, &p));
    r->fastest.bytes = ari_memory_sum(&m);
    r->fastest.weighed = true;
    r->fastest.fits = r->memory_bytes <= 0.0 || r->fastest.bytes <= r->memory_bytes;
    return AR_OK;
}

static int by_rank(const void *a, const void *b)
{
    const ari_candidate *x = a, *y = b;
    if (x->legal != AR_OK || y->legal != AR_OK || (x->fits && y->fits))
        return by_seconds(a, b);
    ARI_ASCENDING(y->fits, x->fits);
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

ar_status ari_search_run(ari_ranking *r, const ari_search *s)
{
    ari_seeker k = {.s = s, .r = r, .enough = (double)INFINITY};
    *r = (ari_ranking){.memory_bytes = s->time.cluster.memory_bytes};
    if (s->ranks < 1 || s->ranks > ARI_MOST_GPUS)
        return ar_error_set(AR_ERR_ARG, "%d ranks: from 1 to %d are expected", s->ranks, ARI_MOST_GPUS);
    k.divisors = list_divisors(k.divisor, ARI_MOST_DIVISORS, (size_t)s->ranks);
    ar_status st = search_axis(&k, 0, s->ranks, 0.0, 1.0);
    ari_mesh_parts_begin(&k.parts, 0, 0);
    free(k.variant);
    free(k.family);
    free(k.legal);
    free(k.light);
    if (st == AR_OK)
        st = weigh_fastest(r, s);
    if (st != AR_OK)
        return st;
    if (r->n > 0)
        qsort(r->at, r->n, sizeof *r->at, by_rank);
    for (size_t i = 0; i < r->n; i++)
        r->fitting += r->at[i].legal == AR_OK && r->at[i].fits;
    return ari_ranking_prefer(r, s);
}

void ari_ranking_fini(ari_ranking *r)
{
    for (size_t i = 0; i < r->whys; i++)
        free(r->why[i]);
    free(r->why);
    free(r->at);
    *r = (ari_ranking){.n = 0};
}
