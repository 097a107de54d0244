/* SPDX-License-Identifier: Apache-2.0 */
/* Findings from the ranks' claims: the same everywhere, since all ranks judge the same table. */
#include <stdio.h>
#include <string.h>

#include "ref/context/context.h"
#include "ref/core/size.h"
#include "ref/core/text.h"
#include "ref/train/gradients.h"

/* --- findings ----------------------------------------------------------------------------------------------------- */

static ar_status add_finding(ar_finding **gives, ar_gradients *g, ar_finding_kind kind, const char *param)
{
    AR_TRY(ARI_GROW(&g->finding, &g->capacity, g->findings, "findings"));
    ar_finding *f = &g->finding[g->findings++];
    *f = (ar_finding){.kind = kind, .warning = kind == AR_FOUND_ZERO, .against = -1};
    snprintf(f->param, sizeof f->param, "%s", param);
    *gives = f;
    return AR_OK;
}

static void add_rank(ar_finding *f, const ari_claims *t, size_t r)
{
    if (f->ranks < AR_FINDING_RANKS)
        f->rank[f->ranks] = (int)ari_claims_header_of(t, r)->rank;
    f->ranks++;
}

/* The ranks that hold elements of parameter i and say all of `these` flags and none of `not`; r: where to begin.
 * t->ranks where there is none any more. */
static size_t next_rank(const ari_claims *t, size_t i, size_t r, uint64_t these, uint64_t not )
{
    these |= ARI_CLAIM_HOLDS;
    while (r < t->ranks && (ari_claim_of(t, r, i)->flags & (these | not )) != these)
        r++;
    return r;
}

static size_t count_ranks(const ari_claims *t, size_t i, uint64_t these)
{
    size_t n = 0;
    for (size_t r = next_rank(t, i, 0, these, 0); r < t->ranks; r = next_rank(t, i, r + 1, these, 0))
        n++;
    return n;
}

/* A finding that names those ranks, if there are any. */
static ar_status find_ranks(ar_finding **gives, ar_gradients *g, const ari_claims *t, size_t i, ar_finding_kind kind,
                            uint64_t these, uint64_t not )
{
    ar_finding *f = NULL;
    for (size_t r = next_rank(t, i, 0, these, not ); r < t->ranks; r = next_rank(t, i, r + 1, these, not )) {
        if (!f)
            AR_TRY(add_finding(&f, g, kind, t->params[i]->name));
        add_rank(f, t, r);
    }
    *gives = f;
    return AR_OK;
}

/* --- gradients ---------------------------------------------------------------------------------------------------- */

static ar_status judge_bad(ar_gradients *g, const ari_claims *t, size_t i)
{
    ar_finding *f = NULL;
    for (size_t r = 0; r < t->ranks; r++) {
        const ari_claim *s = ari_claim_of(t, r, i);
        float first = 0.0f;
        if (s->bad == 0)
            continue;
        memcpy(&first, &s->first_bad, sizeof first);
        if (!f) {
            AR_TRY(add_finding(&f, g, AR_FOUND_NOT_FINITE, t->params[i]->name));
            f->value = (double)first;
        }
        f->elements += s->bad;
        add_rank(f, t, r);
    }
    return AR_OK;
}

static ar_status judge_gradient(ar_gradients *g, const ari_claims *t, size_t i, bool allow_unused)
{
    const uint64_t trains = ARI_CLAIM_TRAINABLE, has = ARI_CLAIM_TRAINABLE | ARI_CLAIM_GRADIENT;
    const size_t training = count_ranks(t, i, trains), with = count_ranks(t, i, has);
    ar_finding *f = NULL;
    if (training == 0)
        return AR_OK;
    AR_TRY(find_ranks(&f, g, t, i, AR_FOUND_FROZEN, 0, trains));
    AR_TRY(find_ranks(&f, g, t, i, AR_FOUND_MISSING, trains, ARI_CLAIM_GRADIENT));
    if (f)
        f->warning = with == 0 && allow_unused;
    AR_TRY(judge_bad(g, t, i));
    if (with > 0 && count_ranks(t, i, has | ARI_CLAIM_NONZERO) == 0)
        AR_TRY(find_ranks(&f, g, t, i, AR_FOUND_ZERO, has, 0));
    return AR_OK;
}

/* --- copies ------------------------------------------------------------------------------------------------------- */

/* What each rank, copy[r], has of something that all with the same `place` should have alike; place 0: nothing. */

/* The rank, of those from `first` on that hold copies of the same elements, whose copy the others should have. */
static size_t right_copy(const ari_copy *copy, size_t ranks, size_t first)
{
    const uint64_t place = copy[first].place;
    size_t copies = 0;
    for (size_t r = first; r < ranks; r++)
        copies += copy[r].place == place;
    for (size_t r = first; r < ranks && copies > 2; r++) {
        size_t alike = 0;
        for (size_t k = r; k < ranks && copy[r].place == place; k++)
            alike += copy[k].place == place && copy[k].hash == copy[r].hash;
        if (2 * alike > copies)
            return r;
    }
    return first;
}

static bool has_copy_below(const ari_copy *copy, size_t r)
{
    for (size_t k = 0; k < r; k++) {
        if (copy[k].place == copy[r].place)
            return true;
    }
    return false;
}

/* Judges what rank `first` is the lowest to have; as: the finding's kind, parameter and state. */
static ar_status judge_copies_of(ar_gradients *g, const ari_claims *t, const ari_copy *copy, size_t first,
                                 const ar_finding *as)
{
    const size_t right = right_copy(copy, t->ranks, first);
    ar_finding *f = NULL;
    for (size_t r = first; r < t->ranks; r++) {
        if (copy[r].place != copy[right].place || copy[r].hash == copy[right].hash)
            continue;
        if (!f) {
            AR_TRY(add_finding(&f, g, as->kind, as->param));
            f->against = (int)ari_claims_header_of(t, right)->rank;
            f->value = as->kind == AR_FOUND_STEPS ? (double)copy[r].hash : 0.0;
            memcpy(f->state, as->state, sizeof f->state);
        }
        add_rank(f, t, r);
    }
    return AR_OK;
}

static ar_status judge_copies(ar_gradients *g, const ari_claims *t, size_t i)
{
    static const ar_finding_kind kinds[] = {AR_FOUND_VALUE, AR_FOUND_GRADIENT};
    ARI_OWNED ari_copy *copy = NULL;
    AR_TRY(ARI_ALLOC(&copy, t->ranks, "copies to compare"));
    for (int which = 0; which < ARI_COPIES; which++) {
        const bool state = which >= ARI_COPY_STATE;
        ar_finding as = {.kind = state ? AR_FOUND_STATE : kinds[which]};
        snprintf(as.param, sizeof as.param, "%s", t->params[i]->name);
        snprintf(as.state, sizeof as.state, "%s", state ? ari_state_name[which - ARI_COPY_STATE] : "");
        for (size_t r = 0; r < t->ranks; r++)
            copy[r] = ari_claim_of(t, r, i)->copy[which];
        for (size_t r = 0; r < t->ranks; r++) {
            if (copy[r].place != 0 && !has_copy_below(copy, r))
                AR_TRY(judge_copies_of(g, t, copy, r, &as));
        }
    }
    return AR_OK;
}

/* ------------------------------------------------------------------------------------------------------------------ */

/* Rows that speak of different parameters can be compared no further. */
static ar_status check_lists(const ari_claims *t)
{
    for (size_t i = 0; i < t->n; i++) {
        for (size_t r = 1; r < t->ranks; r++) {
            if (ari_claim_of(t, r, i)->name != ari_claim_of(t, 0, i)->name)
                return ar_error_set(AR_ERR_MISMATCH,
                                    "parameter %zu of %zu is another one on rank %zu than on rank 0 ('%s' here)", i,
                                    t->n, (size_t)ari_claims_header_of(t, r)->rank, t->params[i]->name);
        }
    }
    return AR_OK;
}

static ar_status judge_steps(ar_gradients *g, const ari_claims *t)
{
    const ar_finding as = {.kind = AR_FOUND_STEPS};
    ARI_OWNED ari_copy *copy = NULL;
    AR_TRY(ARI_ALLOC(&copy, t->ranks, "copies to compare"));
    for (size_t r = 0; r < t->ranks; r++)
        copy[r] = (ari_copy){.place = 1, .hash = ari_claims_header_of(t, r)->steps};
    return judge_copies_of(g, t, copy, 0, &as);
}

static ar_status judge_table(ar_gradients *g, const ari_claims *t, size_t i, const ar_gradients_verify_options *o)
{
    if (o->gradients)
        AR_TRY(judge_gradient(g, t, i, o->allow_unused));
    return judge_copies(g, t, i);
}

/* The first stage judges parameters that both ends of a pipeline have, and the steps of all ranks. */
ar_status ari_gradients_judge(ar_gradients *g, const ari_all_claims *t, const ar_gradients_verify_options *o)
{
    const bool first = ar_comm_rank(g->ctx->pipeline) == 0;
    size_t tied = 0;
    g->findings = 0;
    AR_TRY(check_lists(&t->own));
    if (first)
        AR_TRY(judge_steps(g, t->heads.words ? &t->heads : &t->own));
    for (size_t i = 0; i < t->own.n; i++) {
        if (tied == t->ends.n || t->own.params[i] != t->ends.params[tied])
            AR_TRY(judge_table(g, &t->own, i, o));
        else if (tied++, first)
            AR_TRY(judge_table(g, &t->ends, tied - 1, o));
    }
    return AR_OK;
}

/* --- of all stages ------------------------------------------------------------------------------------------------ */

enum { FINDING_WORDS = (sizeof(ar_finding) + sizeof(uint64_t) - 1) / sizeof(uint64_t) };

/* found: [ranks][most] of FINDING_WORDS, of which rank r has count[r]. */
static ar_status take_findings(ar_gradients *g, const uint64_t *found, const uint64_t *count, size_t ranks, size_t most)
{
    g->findings = 0;
    for (size_t r = 0; r < ranks; r++) {
        for (size_t i = 0; i < count[r]; i++) {
            AR_TRY(ARI_GROW(&g->finding, &g->capacity, g->findings, "findings"));
            memcpy(&g->finding[g->findings++], found + (r * most + i) * FINDING_WORDS, sizeof *g->finding);
        }
    }
    return AR_OK;
}

ar_status ari_gradients_share_findings(ar_gradients *g)
{
    static const char tag[] = "gradients:verify";
    ar_comm *over = g->ctx->pipeline;
    const size_t ranks = (size_t)ar_comm_size(over), me = (size_t)ar_comm_rank(over);
    ARI_OWNED uint64_t *count = NULL, *found = NULL;
    size_t most = 0;
    if (ranks == 1)
        return AR_OK;
    AR_TRY(ARI_ALLOC_ZERO(&count, ranks, "numbers of findings"));
    count[me] = g->findings;
    AR_TRY(ari_gather_words(g->ctx, over, count, 1, tag));
    for (size_t r = 0; r < ranks; r++)
        most = count[r] > most ? (size_t)count[r] : most;
    if (most == 0)
        return AR_OK;
    AR_TRY(ari_alloc_zero((void **)&found, ranks * most, FINDING_WORDS * sizeof *found, "findings"));
    for (size_t i = 0; i < g->findings; i++)
        memcpy(found + (me * most + i) * FINDING_WORDS, &g->finding[i], sizeof *g->finding);
    AR_TRY(ari_gather_words(g->ctx, over, found, most * FINDING_WORDS, tag));
    return take_findings(g, found, count, ranks, most);
}

/* --- as text ------------------------------------------------------------------------------------------------------ */

/* "rank 3", "ranks 0-1, 4", "ranks 0-63 and 12 more". */
static void ranks_text(char *out, size_t cap, const ar_finding *f)
{
    char list[256], more[32] = "";
    const size_t shown = f->ranks < AR_FINDING_RANKS ? f->ranks : AR_FINDING_RANKS;
    ari_ranks_describe(f->rank, (int)shown, list, sizeof list);
    if (f->ranks > shown)
        snprintf(more, sizeof more, " and %zu more", f->ranks - shown);
    snprintf(out, cap, "rank%s %s%s", ARI_PLURAL(f->ranks), list, more);
}

void ar_finding_text(char *out, size_t cap, const ar_finding *f)
{
    char ranks[320];
    ranks_text(ranks, sizeof ranks, f);
    switch (f->kind) {
    case AR_FOUND_MISSING:
        snprintf(out, cap, "%s: no gradient on %s", f->param, ranks);
        return;
    case AR_FOUND_FROZEN:
        snprintf(out, cap, "%s: requires no gradient on %s, but elsewhere", f->param, ranks);
        return;
    case AR_FOUND_NOT_FINITE:
        snprintf(out, cap, "%s: %zu element%s of the gradient not finite on %s, the first %g", f->param, f->elements,
                 ARI_PLURAL(f->elements), ranks, f->value);
        return;
    case AR_FOUND_ZERO:
        snprintf(out, cap, "%s: the gradient is zero everywhere", f->param);
        return;
    case AR_FOUND_VALUE:
        snprintf(out, cap, "%s: the copy of %s differs from that of rank %d", f->param, ranks, f->against);
        return;
    case AR_FOUND_GRADIENT:
        snprintf(out, cap, "%s: the gradient of %s differs from that of rank %d", f->param, ranks, f->against);
        return;
    case AR_FOUND_STATE:
        snprintf(out, cap, "%s: %s of %s differs from that of rank %d", f->param, f->state, ranks, f->against);
        return;
    case AR_FOUND_STEPS:
        snprintf(out, cap, "the optimizer of %s is at step %.0f, not where that of rank %d is", ranks, f->value,
                 f->against);
        return;
    }
}
