/* SPDX-License-Identifier: Apache-2.0 */
/* Which of the fastest layouts is advised, and why. Predictions of layouts that differ by less than planner.md's errors
 * say nothing about their order: of those the simplest comes first. */
#include <math.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "ref/core/text.h"
#include "ref/models/model_private.h"
#include "verify/plan/search.h"

/* Longest sequence that few cut, fewest tokens of a rank, parameters from which tp fills a node, and its memory. */
static const double SHORT_SEQ = 8192.0, FEW_TOKENS = 1024.0, LARGE = 70e9, USUAL_BYTES = 80e9, USUAL_TP = 8.0;

typedef struct measured {
    int unusual, parts;
    ari_candidate candidate;
} measured;

unsigned ari_unusual_of(const ari_search *s, const ari_choice *c)
{
    const ar_run *run = &s->base.step.run;
    const double memory = s->time.cluster.memory_bytes, samples = ceil((double)run->batch / c->dp / c->micro_batches);
    size_t n = 0;
    const bool large = ari_config_parameters(s->base.step.config, &n) == AR_OK && (double)n >= LARGE;
    unsigned is = 0;
    if (c->cp > 1 && (double)run->seq <= SHORT_SEQ)
        is |= ARI_UNUSUAL_CP;
    if (large && c->tp < USUAL_TP && memory > 0.0 && memory <= USUAL_BYTES && s->ranks >= USUAL_TP)
        is |= ARI_UNUSUAL_TP;
    if (s->time.cluster.ranks_per_node > 0 && c->tp > s->time.cluster.ranks_per_node)
        is |= ARI_UNUSUAL_NODES;
    if (samples * (double)run->seq / c->cp < FEW_TOKENS && (double)run->seq >= FEW_TOKENS)
        is |= ARI_UNUSUAL_TOKENS;
    if (c->zero == 3 && c->pp > 1)
        is |= ARI_UNUSUAL_ZERO;
    return is;
}

/* How many things somebody has to set up who wants it. */
static int parts_of(const ari_choice *c)
{
    return (c->tp > 1) + (c->cp > 1) + (c->pp > 1) + (c->ep > 1) + (c->cp_inner > 1) + (c->virtual_stages > 1) +
           (c->schedule == AR_PP_ZERO_BUBBLE) + (c->zero > 1) + (c->dp_replicate > 1) +
           (c->recompute != AR_RECOMPUTE_NONE);
}

static int by_simplicity(const void *a, const void *b)
{
    const measured *x = a, *y = b;
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
        ari_candidate other = *f;
        ari_time t;
        other.choice.overlap = chunks[i];
        AR_TRY(time_of(&t, s, &other));
        other.seconds = ari_time_step(&t);
        other.bound = ari_bound_of(&t);
        *f = other.seconds < f->seconds ? other : *f;
    }
    return AR_OK;
}

ar_status ari_ranking_prefer(ari_ranking *r, const ari_search *s)
{
    ARI_OWNED measured *of = NULL;
    if (s->time.cluster.gpu == 0 || r->fitting == 0)
        return AR_OK;
    while (r->equal < r->fitting && r->at[r->equal].seconds <= (1.0 + ARI_EQUAL) * r->at[0].seconds)
        r->equal++;
    AR_TRY(ARI_ALLOC_ZERO(&of, r->equal, "layouts"));
    for (size_t i = 0; i < r->equal; i++) {
        const ari_choice *c = &r->at[i].choice;
        of[i] = (measured){__builtin_popcount(ari_unusual_of(s, c)), parts_of(c), r->at[i]};
    }
    qsort(of, r->equal, sizeof *of, by_simplicity);
    for (size_t i = 0; i < r->equal; i++)
        r->at[i] = of[i].candidate;
    return s->chunks && !s->first && !s->every ? choose_chunks(&r->at[0], s) : AR_OK;
}

/* --- why ---------------------------------------------------------------------------------------------------------- */

static const double LEAST = 1e-3; /* of the largest difference: less explains nothing, and may be rounding alone */

/* "bubble +910 ms, tp -95 ms": the two kinds of time that differ most. */
static void differences(ari_text *text, const ari_time *than, const ari_time *t)
{
    int most = 0, next = -1;
    for (int k = 1; k < ARI_TIME_KINDS; k++)
        most = fabs(t->of[k] - than->of[k]) > fabs(t->of[most] - than->of[most]) ? k : most;
    for (int k = 0; k < ARI_TIME_KINDS; k++) {
        if (k != most && (next < 0 || fabs(t->of[k] - than->of[k]) > fabs(t->of[next] - than->of[next])))
            next = k;
    }
    for (int i = 0; i < 2; i++) {
        const int k = i == 0 ? most : next;
        const double by = t->of[k] - than->of[k];
        if (i == 0 || fabs(by) > LEAST * fabs(t->of[most] - than->of[most]))
            ari_say(text, "%s%s %+.3g s", i == 0 ? "" : ", ", ari_time_name((ari_time_kind)k), by);
    }
}

/* "; tp=8 cp=1 pp=16 dp=128 takes 12 % longer (bubble +0.9 s, tp -0.1 s)". */
static ar_status say_other(ari_text *text, const ari_search *s, const ari_candidate *best, const ari_candidate *other)
{
    ari_time t, u;
    char layout[ARI_CHOICE_TEXT];
    AR_TRY(time_of(&t, s, best));
    AR_TRY(time_of(&u, s, other));
    ari_choice_text(layout, &other->choice, ARI_LAYOUT_AXES, " ");
    ari_say(text, "%s takes %.0f %% longer (", layout, 100.0 * (other->seconds / best->seconds - 1.0));
    differences(text, &t, &u);
    ari_say(text, ")");
    return AR_OK;
}

static ar_status say_unusual(ari_text *text, const ari_search *s, const ari_ranking *r, unsigned kind)
{
    static const char *const what[] = {"cp in sequences of at most 8,192 tokens", "tp below 8 of a model this large",
                                       "tp over several nodes", "fewer than 1,024 tokens a rank",
                                       "ZeRO-3 in a pipeline, which gathers weights for every micro-batch"};
    const ari_candidate *best = &r->at[0];
    size_t i = 1;
    while (i < r->fitting && ari_unusual_of(s, &r->at[i].choice) & kind)
        i++;
    ari_say(text, "few would take %s: ", what[(int)log2(kind)]);
    if (i < r->fitting)
        return say_other(text, s, best, &r->at[i]);
    ari_say(text, "nothing without it fits");
    return AR_OK;
}

static ar_status say_shares(ari_text *text, const ari_search *s, const ari_candidate *best)
{
    ari_time t;
    AR_TRY(time_of(&t, s, best));
    for (int k = 0, n = 0; k < ARI_TIME_KINDS; k++) {
        if (t.of[k] >= 0.005 * best->seconds)
            ari_say(text, "%s%s %.0f %%", n++ ? ", " : "", ari_time_name((ari_time_kind)k),
                    100.0 * t.of[k] / best->seconds);
    }
    const ari_planned p = ari_choice_planned(&s->base, &best->choice);
    ari_say(text, " of its step");
    if (ari_planned_overlap(&p) > 1)
        ari_say(text, " with --overlap %d", ari_planned_overlap(&p));
    return AR_OK;
}

ar_status ari_ranking_why(char lines[ARI_WHY_LINES][ARI_WHY_TEXT], const ari_search *s, const ari_ranking *r)
{
    const ari_candidate *best = &r->at[0];
    const unsigned unusual = ari_unusual_of(s, &best->choice);
    int n = 0;
    for (int i = 0; i < ARI_WHY_LINES; i++)
        lines[i][0] = '\0';
    if (r->equal == 0)
        return AR_OK;
    ari_text text = ari_text_in(lines[n++], ARI_WHY_TEXT);
    AR_TRY(say_shares(&text, s, best));
    text = ari_text_in(lines[n++], ARI_WHY_TEXT);
    if (r->equal > 1)
        ari_say(&text, "%zu layouts within 5 %% of the fastest are equal, the simplest is first; ", r->equal);
    if (r->equal < r->fitting)
        AR_TRY(say_other(&text, s, best, &r->at[r->equal]));
    else
        ari_say(&text, "no other fits");
    for (unsigned kind = 1; kind <= ARI_UNUSUAL_ZERO && n < ARI_WHY_LINES; kind <<= 1) {
        text = ari_text_in(lines[n], ARI_WHY_TEXT);
        if (unusual & kind) {
            AR_TRY(say_unusual(&text, s, r, kind));
            n++;
        }
    }
    return AR_OK;
}
