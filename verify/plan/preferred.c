/* SPDX-License-Identifier: Apache-2.0 */
/* Advice among the fastest layouts, with reasons in sentences. Layouts whose predictions differ by less than the errors
 * in planner.md are not ordered by time: a layout similar to a published run comes first, then the simplest one. */
#include <math.h>
#include <stdlib.h>

#include "ref/core/schedule_private.h"
#include "ref/core/size.h"
#include "ref/core/text.h"
#include "ref/models/model_private.h"
#include "verify/plan/search.h"

/* --- what people run ---------------------------------------------------------------------------------------------- */

/* Published layouts: docs/evidence/planner-runs.tsv, and DeepSeek-V3 (arXiv:2412.19437, section 3.2; its DualPipe fills
 * bubbles as the zero-bubble schedule does). */
typedef struct published {
    double parameters;
    int tp, cp, pp, virtual_stages, zero;
    bool zero_bubble;
} published;
static const published runs[] = {
    {7e9, 1, 1, 1, 1, 3, false},     {13e9, 1, 1, 1, 1, 3, false},   {15e9, 4, 1, 1, 1, 1, false},
    {22e9, 8, 1, 1, 1, 0, false},    {30e9, 1, 1, 1, 1, 3, false},   {70e9, 1, 1, 1, 1, 3, false},
    {70e9, 2, 1, 1, 1, 3, false},    {70e9, 4, 2, 4, 5, 1, false},   {175e9, 8, 1, 8, 3, 0, false},
    {340e9, 8, 1, 8, 12, 1, false},  {405e9, 8, 1, 16, 4, 2, false}, {405e9, 8, 16, 16, 4, 2, false},
    {405e9, 8, 2, 9, 7, 1, false},   {530e9, 8, 1, 35, 3, 0, false}, {671e9, 1, 1, 16, 2, 1, true},
    {1000e9, 8, 1, 64, 1, 0, false},
};
enum { RUNS = sizeof runs / sizeof *runs };
static const double ALIKE = 2.0; /* factor within which two sizes or extents count as similar */

static bool is_similar(double a, double b)
{
    return fmax(a, b) <= ALIKE * fmin(a, b);
}

/* Counts the axes in which a layout differs from a published run; ZeRO's first stage counts as equal to no ZeRO. */
static int unlike_axes(const ari_choice *c, const published *run)
{
    const int zero = c->zero > 1 ? c->zero : 1, run_zero = run->zero > 1 ? run->zero : 1;
    const bool zero_bubble = c->pp > 1 && c->schedule == AR_PP_ZERO_BUBBLE;
    return !is_similar(c->tp, run->tp) + !is_similar(c->cp, run->cp) + !is_similar(c->pp, run->pp) +
           !is_similar(ari_at_least_one(c->virtual_stages), run->virtual_stages) + (zero != run_zero) +
           (zero_bubble != run->zero_bubble);
}

bool ari_choice_is_published(const ari_choice *c, double parameters)
{
    bool any = false, like = false;
    for (size_t i = 0; i < RUNS; i++) {
        any = any || is_similar(runs[i].parameters, parameters);
        like = like || (is_similar(runs[i].parameters, parameters) && unlike_axes(c, &runs[i]) < 2);
    }
    return like || !any;
}

/* --- the order ---------------------------------------------------------------------------------------------------- */

/* Usual limits: the longest sequence that is rarely split, the fewest tokens per rank, the model size from which tp
 * fills a node, a GPU's memory, and tp. */
static const double SHORT_SEQ = 8192.0, FEW_TOKENS = 1024.0, LARGE = 70e9, USUAL_BYTES = 80e9, USUAL_TP = 8.0;

typedef struct measured {
    int unlike, unusual, parts;
    ari_candidate candidate;
} measured;

double ari_search_parameters(const ari_search *s)
{
    size_t n = 0;
    return ari_config_parameters(s->base.step.config, &n) == AR_OK ? (double)n : 0.0;
}

unsigned ari_unusual_of(const ari_search *s, const ari_choice *c)
{
    const ar_run *run = &s->base.step.run;
    const double memory = s->time.cluster.memory_bytes, samples = ceil((double)run->batch / c->dp / c->micro_batches);
    const bool large = ari_search_parameters(s) >= LARGE;
    unsigned flags = 0;
    if (c->cp > 1 && (double)run->seq <= SHORT_SEQ)
        flags |= ARI_UNUSUAL_CP;
    if (large && c->tp < USUAL_TP && memory > 0.0 && memory <= USUAL_BYTES && s->ranks >= USUAL_TP)
        flags |= ARI_UNUSUAL_TP;
    if (s->time.cluster.ranks_per_node > 0 && c->tp > s->time.cluster.ranks_per_node)
        flags |= ARI_UNUSUAL_NODES;
    if (samples * (double)run->seq / c->cp < FEW_TOKENS && (double)run->seq >= FEW_TOKENS)
        flags |= ARI_UNUSUAL_TOKENS;
    if (c->zero == 3 && c->pp > 1)
        flags |= ARI_UNUSUAL_ZERO;
    return flags;
}

/* Returns the number of features that a user has to set up for a layout. */
static int parts_of(const ari_choice *c)
{
    return (c->tp > 1) + (c->cp > 1) + (c->pp > 1) + (c->ep > 1) + (c->cp_inner > 1) + (c->virtual_stages > 1) +
           (c->schedule == AR_PP_ZERO_BUBBLE) + (c->zero > 1) + (c->dp_replicate > 1) +
           (c->recompute != AR_RECOMPUTE_NONE);
}

static int by_preference(const void *a, const void *b)
{
    const measured *x = a, *y = b;
    ARI_ASCENDING(x->unlike, y->unlike);
    ARI_ASCENDING(x->unusual, y->unusual);
    ARI_ASCENDING(x->parts, y->parts);
    ARI_ASCENDING(x->candidate.choice.cp, y->candidate.choice.cp);
    return x->candidate.seconds < y->candidate.seconds ? -1 : x->candidate.seconds > y->candidate.seconds;
}

static ar_status time_of(ari_time *t, const ari_search *s, const ari_candidate *f)
{
    const ari_planned p = ari_choice_planned(&s->base, &f->choice);
    return ari_time_of(t, &p, &s->time);
}

/* More chunks hide more of tp's collectives, and make smaller products. */
static ar_status choose_chunks(ari_candidate *f, const ari_search *s)
{
    static const int chunks[] = {1, 2, 8};
    for (size_t i = 0; i < sizeof chunks / sizeof *chunks && f->choice.sp && f->choice.tp > 1; i++) {
        ari_candidate variant = *f;
        ari_time t;
        variant.choice.overlap = chunks[i];
        AR_TRY(time_of(&t, s, &variant));
        variant.seconds = ari_time_step(&t);
        variant.bound = ari_bound_of(&t);
        *f = variant.seconds < f->seconds ? variant : *f;
    }
    return AR_OK;
}

/* Drops extra candidates. A mesh whose fastest layout is unlike published runs has a second candidate, which counts
 * only if it comes first. */
static void drop_others(ari_ranking *r)
{
    size_t n = 0, equal = 0, fitting = 0;
    for (size_t i = 0; i < r->n; i++) {
        if (i > 0 && r->layout[i].has_faster)
            continue;
        equal += i < r->equal;
        fitting += i < r->fitting;
        r->layout[n++] = r->layout[i];
    }
    r->n = n;
    r->equal = equal;
    r->fitting = fitting;
}

ar_status ari_ranking_prefer(ari_ranking *r, const ari_search *s)
{
    ARI_OWNED measured *list = NULL;
    const double parameters = ari_search_parameters(s);
    if (s->time.cluster.gpu == 0 || r->fitting == 0) {
        drop_others(r);
        return AR_OK;
    }
    while (r->equal < r->fitting && r->layout[r->equal].seconds <= (1.0 + ARI_EQUAL) * r->layout[0].seconds)
        r->equal++;
    AR_TRY(ARI_ALLOC_ZERO(&list, r->equal, "layouts"));
    for (size_t i = 0; i < r->equal; i++) {
        const ari_choice *c = &r->layout[i].choice;
        list[i] = (measured){!ari_choice_is_published(c, parameters), __builtin_popcount(ari_unusual_of(s, c)),
                             parts_of(c), r->layout[i]};
    }
    qsort(list, r->equal, sizeof *list, by_preference);
    for (size_t i = 0; i < r->equal; i++)
        r->layout[i] = list[i].candidate;
    drop_others(r);
    return s->chunks && !s->first_only && !s->every ? choose_chunks(&r->layout[0], s) : AR_OK;
}

/* --- why ---------------------------------------------------------------------------------------------------------- */

static const double LEAST = 1e-3; /* fraction of the largest difference below which a difference explains nothing and
                                     may be rounding */

/* Writes text such as "bubble +910 ms, tp -95 ms": the two parts of the time that differ most. */
static void say_differences(ari_text *text, const ari_time *than, const ari_time *t)
{
    int largest_kind = 0, second_kind = -1;
    for (int k = 1; k < ARI_TIME_KINDS; k++)
        largest_kind =
            fabs(t->seconds[k] - than->seconds[k]) > fabs(t->seconds[largest_kind] - than->seconds[largest_kind])
                ? k
                : largest_kind;
    for (int k = 0; k < ARI_TIME_KINDS; k++) {
        if (k != largest_kind && (second_kind < 0 || fabs(t->seconds[k] - than->seconds[k]) >
                                                         fabs(t->seconds[second_kind] - than->seconds[second_kind])))
            second_kind = k;
    }
    for (int i = 0; i < 2; i++) {
        const int k = i == 0 ? largest_kind : second_kind;
        const double delta = t->seconds[k] - than->seconds[k];
        if (i == 0 || fabs(delta) > LEAST * fabs(t->seconds[largest_kind] - than->seconds[largest_kind]))
            ari_say(text, "%s%s %+.3g s", i == 0 ? "" : ", ", ari_time_name((ari_time_kind)k), delta);
    }
}

/* "tp=8 cp=1 pp=16 dp=128 interleaved x 4 takes 12 % longer (bubble +0.9 s, tp -0.1 s)". */
static ar_status say_other(ari_text *text, const ari_search *s, const ari_candidate *preferred,
                           const ari_candidate *alternative)
{
    ari_time t, u;
    char layout[ARI_CHOICE_TEXT];
    const double slowdown = alternative->seconds / preferred->seconds - 1.0;
    AR_TRY(time_of(&t, s, preferred));
    AR_TRY(time_of(&u, s, alternative));
    ari_choice_text(layout, &alternative->choice, ARI_LAYOUT_AXES, " ");
    ari_say(text, "%s", layout);
    if (alternative->choice.pp > 1)
        ari_say(text, " %s", ari_pp_schedule_name(alternative->choice.schedule));
    if (alternative->choice.virtual_stages > 1)
        ari_say(text, " x %d", alternative->choice.virtual_stages);
    ari_say(text, " zero=%d takes %.0f %% %s (", alternative->choice.zero, 100.0 * fabs(slowdown),
            slowdown < 0.0 ? "less" : "longer");
    say_differences(text, &t, &u);
    ari_say(text, ")");
    return AR_OK;
}

/* Layouts of another kind use other axes, another schedule, or divide the weights or not. */
static bool same_kind(const ari_choice *a, const ari_choice *b)
{
    return (a->tp > 1) == (b->tp > 1) && (a->cp > 1) == (b->cp > 1) && (a->pp > 1) == (b->pp > 1) &&
           (a->ep > 1) == (b->ep > 1) && a->schedule == b->schedule && (a->zero == 3) == (b->zero == 3);
}

/* Returns the fastest candidate that fits and passes a test; NULL: none. */
static const ari_candidate *fastest_of(const ari_ranking *r, const ari_choice *other_kind)
{
    const ari_candidate *found = NULL;
    for (size_t i = 0; i < r->fitting; i++) {
        const ari_candidate *f = &r->layout[i];
        const bool counts = f != &r->layout[0] && (!other_kind || !same_kind(&f->choice, other_kind));
        if (counts && (!found || f->seconds < found->seconds))
            found = f;
    }
    return found;
}

static ar_status say_first(ari_text *text, const ari_search *s, const ari_ranking *r)
{
    const ari_candidate *preferred = &r->layout[0], *alternative = fastest_of(r, NULL);
    const double parameters = ari_search_parameters(s);
    const bool is_published = ari_choice_is_published(&preferred->choice, parameters);
    if (!alternative) {
        ari_say(text, "it is first because no other mesh has a layout that fits");
        return AR_OK;
    }
    if (r->equal <= 1) {
        ari_say(text, "it is first because it is the fastest: ");
        return say_other(text, s, preferred, alternative);
    }
    ari_say(text, "%zu layouts within 5 %% of the fastest are equal by what is known, and it is the simplest of them%s",
            r->equal, is_published ? "" : ", none of which is like a published run of this size");
    if (alternative->seconds < preferred->seconds) {
        ari_say(text, "; ");
        AR_TRY(say_other(text, s, preferred, alternative));
        if (is_published && !ari_choice_is_published(&alternative->choice, parameters))
            ari_say(text, ", but differs from every published run of this size in two axes or more");
    }
    return AR_OK;
}

static ar_status say_bound(ari_text *text, const ari_search *s, const ari_candidate *preferred)
{
    ari_time t;
    AR_TRY(time_of(&t, s, preferred));
    ari_say(text, "its step is bound by %s: ", ari_bound_of(&t));
    for (int k = 0, n = 0; k < ARI_TIME_KINDS; k++) {
        if (t.seconds[k] >= 0.005 * preferred->seconds)
            ari_say(text, "%s%s %.0f %%", n++ ? ", " : "", ari_time_name((ari_time_kind)k),
                    100.0 * t.seconds[k] / preferred->seconds);
    }
    const ari_planned p = ari_choice_planned(&s->base, &preferred->choice);
    if (ari_planned_overlap(&p) > 1)
        ari_say(text, " with --overlap %d", ari_planned_overlap(&p));
    return AR_OK;
}

static ar_status say_unusual(ari_text *text, const ari_search *s, const ari_ranking *r, unsigned kind)
{
    static const char *const descriptions[] = {
        "cp in sequences of at most 8,192 tokens", "tp below 8 of a model this large", "tp over several nodes",
        "fewer than 1,024 tokens a rank", "ZeRO-3 in a pipeline, which gathers weights for every micro-batch"};
    const ari_candidate *preferred = &r->layout[0];
    size_t i = 1;
    while (i < r->fitting && ari_unusual_of(s, &r->layout[i].choice) & kind)
        i++;
    ari_say(text, "few would take %s: ", descriptions[(int)log2(kind)]);
    if (i < r->fitting)
        return say_other(text, s, preferred, &r->layout[i]);
    ari_say(text, "nothing without it fits");
    return AR_OK;
}

ar_status ari_ranking_why(char lines[ARI_WHY_LINES][ARI_WHY_TEXT], const ari_search *s, const ari_ranking *r)
{
    const ari_candidate *preferred = &r->layout[0];
    int n = 0;
    for (int i = 0; i < ARI_WHY_LINES; i++)
        lines[i][0] = '\0';
    if (r->equal == 0)
        return AR_OK;
    const unsigned unusual = ari_unusual_of(s, &preferred->choice);
    const ari_candidate *alternative = fastest_of(r, &preferred->choice);
    ari_text text = ari_text_in(lines[n++], ARI_WHY_TEXT);
    AR_TRY(say_first(&text, s, r));
    text = ari_text_in(lines[n++], ARI_WHY_TEXT);
    AR_TRY(say_bound(&text, s, preferred));
    text = ari_text_in(lines[n++], ARI_WHY_TEXT);
    ari_say(&text, alternative ? "the best of another kind: " : "no layout of another kind fits");
    if (alternative)
        AR_TRY(say_other(&text, s, preferred, alternative));
    for (unsigned kind = 1; kind <= ARI_UNUSUAL_ZERO && n < ARI_WHY_LINES; kind <<= 1) {
        text = ari_text_in(lines[n], ARI_WHY_TEXT);
        if (unusual & kind) {
            AR_TRY(say_unusual(&text, s, r, kind));
            n++;
        }
    }
    return AR_OK;
}
