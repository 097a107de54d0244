/* SPDX-License-Identifier: Apache-2.0 */
/* Share of the reference in values that are wrong as a whole: parts of sums, sums of other parts, noise. */
#include <stdio.h>

#include "verify/diagnose/hypothesis.h"
#include "verify/diagnose/replay/replay.h"

double ari_cosine(const ari_tally *t)
{
    return t->vr / sqrt(t->vv * t->rr);
}

/* --- a bias ------------------------------------------------------------------------------------------------------- */

/* True if on every rank the local gradient is zero from exactly this element on or, with `every`, at just the last
 * token of each sample, which predicts nothing. A handful of zeros is no evidence. */
static bool are_zero(const ari_case *c, size_t end, size_t every)
{
    for (int r = 0; r < c->d->ranks; r++) {
        const ari_rank_copy *copy = &c->d->copy[r];
        if (c->survey.rank[r].held > 0 && copy->shape[0] < (every > 0 ? every : end + 8))
            return false;
        for (size_t i = 0; c->survey.rank[r].held > 0 && i < copy->shape[0]; i++) {
            if ((every > 0 || i + 1 >= end) && (copy->local[i] == 0.0f) != (every ? i % every == every - 1 : i >= end))
                return false;
        }
    }
    return true;
}

/* The number of elements before the trailing zeros, on the first rank that has any. */
static size_t end_of_values(const ari_case *c)
{
    const ari_rank_copy *copy = c->d->copy;
    for (size_t r = 0; c->survey.rank[r].held == 0; r++)
        copy++;
    size_t n = copy->shape[0];
    while (n > 0 && copy->local[n - 1] == 0.0f)
        n--;
    return n;
}

/* Tokens that go through a rank at once: of all samples, of a data-parallel rank's, or of a micro-batch. The last token
 * has no target, so that its own zero belongs to the tail. */
static bool ends_at_tokens(const ari_difference *d, size_t end, size_t *tokens)
{
    const size_t dp = (size_t)ari_along(d, ARI_CUTS_SAMPLES),
                 micro = d->micro_batches > 1 ? (size_t)d->micro_batches : 1;
    const size_t of_rank = (d->batch + dp - 1) / dp, samples[] = {d->batch, of_rank, (of_rank + micro - 1) / micro};
    for (size_t i = 0; i < 3; i++) {
        *tokens = samples[i] * d->seq;
        if (*tokens > 0 && (end == *tokens || end + 1 == *tokens))
            return true;
    }
    return false;
}

ar_status ari_measure_bias(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->d;
    const ari_tally *all = &c->survey.total;
    size_t tokens = 0;
    if (!ari_is_bias(d) || all->kept * 10 > all->held || all->different < 16 || !(fabs(ari_cosine(all)) < 0.7))
        return AR_OK;
    const size_t end = end_of_values(c);
    const bool ends = end > 0 && are_zero(c, end, 0), last = d->seq > 1 && are_zero(c, 0, d->seq);
    const bool exact = ends && ends_at_tokens(d, end, &tokens);
    if (d->hidden && !ends && !last) /* without ranks a part of a sum looks the same */
        return AR_OK;
    ari_trace_set(t, ARI_FOUND_BIAS_AXIS, last ? ARI_IF(LAST) : exact ? ARI_IF(TOKENS) : ends ? ARI_IF(SOME) : 0);
    t->penalty = exact || last ? 0 : 25;
    ARI_FACTS(t, {"end", .count = end}, {"tokens", .count = tokens}, {"first", .count = d->seq - 1},
              {"second", .count = 2 * d->seq - 1});
    return AR_OK;
}

/* --- parts of sums ------------------------------------------------------------------------------------------------ */

/* The reference's share in the values. A part of a sum unrelated to the rest is orthogonal to it: v*r is v*v, and
 * `over` 1; it is larger if something foreign was added, and n if a part replaces a mean of n. */
typedef struct part {
    double share; /* v*r / r*r */
    double over;  /* v*v / v*r */
    double angle; /* their cosine */
} part;

static part part_of(const ari_tally *t)
{
    return (part){t->vr / t->rr, t->vv / t->vr, ari_cosine(t)};
}

/* From this many elements on, a share and an angle are significant. */
enum { ENOUGH = 64 };
/* Shares differ if half their size apart, since parts of a sum vary in size; if 0.3 apart where they are numbers of
 * samples, which are similar. */
#define ABOUT 1.5
#define NEARLY 1.3

/* True if enough elements differ, and all but one in `but` of those held: the rest are right by accident. */
static bool all_differ(const ari_tally *t, size_t but)
{
    return t->different >= ENOUGH && t->kept * but <= t->held;
}

/* The ratio between share and expectation, as an absolute logarithm. */
static double distance(double share, double expected)
{
    return expected > 0.0 ? fabs(log(share / expected)) : HUGE_VAL;
}

/* True if the share is about 1/n, nearer than the factor `within`. */
static bool is_one_of(double share, double n, double within)
{
    return n > 1.0 && distance(share, 1.0 / n) < log(within);
}

/* Parts of a sum are not all of one size: a share of 1/n may be one of these. */
static void say_how_many(ari_trace *trace, const ari_case *c, double share)
{
    const double low = fmax(2.0, floor(1.0 / (share * 1.4))), high = ceil(1.4 / share);
    ari_text t = ari_list(trace, "contributes");
    for (int i = ARI_LAYOUT_AXES - 1; i >= ARI_LAYOUT_DP; i--) {
        const int ranks = ari_ranks_along(&c->known->mesh, ari_layout_axes[i].axes);
        if (ranks > 1 && ranks >= low && ranks <= high) {
            ari_say(&t, "what one of %d ranks contributes", ranks);
            return;
        }
    }
    const char *of = ari_is_alone(c) ? "" : "ranks, ";
    if (low < high)
        ari_say(&t, "what one of some %.0f to %.0f %ssamples or micro-batches contributes", low, high, of);
    else
        ari_say(&t, "what one of %.0f %ssamples or micro-batches contributes", low, of);
}

/* Looks at a run whose ranks are not seen. */
ar_status ari_measure_share(ari_trace *t, const ari_case *c)
{
    const ari_tally *all = &c->survey.total;
    const part p = part_of(all);
    if (!all_differ(all, 20) || all->zero * 4 > all->different || !isfinite(p.angle))
        return AR_OK;
    const double apart = (all->rr - 2.0 * all->vr + all->vv) / all->rr, along = p.share - 1.0;
    const double within = p.share <= 0.62 ? 0.3 : 0.1; /* of a sum less a part, more is known */
    const bool less = p.share >= 0.04 && p.share <= 0.9 && p.angle > 0.15 && fabs(p.over - 1.0) <= within;
    const bool twice = along >= 0.04 && along <= 0.62 && fabs(apart / along - 1.0) <= 0.3;
    const bool of_micro = c->d->pass == 'g' && is_one_of(p.share, c->d->micro_batches, ABOUT);
    const bool added =
        c->other && c->other->parts > 0 && c->other->part[0].partial; /* by the dump: no part is missing */
    if ((!less && !twice) || added ||
        (ari_is_activation(c->d) && c->known->mesh.along[ARI_AXIS_TP] == 1 &&
         !c->d->gathers)) /* sums over tp alone are partial */
        return AR_OK;
    ARI_FINDING(t, ARI_FOUND_SHARE,
                !less      ? ARI_IF(TWICE)
                : of_micro ? ARI_IF(OF_MICRO)
                           : 0,
                {"share", .number = less ? p.share : along});
    say_how_many(t, c, less ? p.share : along);
    return AR_OK;
}

/* A part that is unrelated to the rest has the other sign, or is zero where the rest is not, about as often as the
 * angle says. A factor of each element of the sum never changes a sign. */
static bool signs_are_as_far(const ari_case *c, int rank)
{
    const ari_tally *own = &c->survey.rank[rank];
    size_t other = own->zero;
    for (ari_run run = ari_runs_of_rank(&c->grid, rank); ari_runs_next(&run);) {
        for (size_t i = 0; i < run.count; i++)
            other += run.value[i] * run.ref[i] < 0.0f;
    }
    return (double)other * 3.14159 > 0.5 * acos(fmin(ari_cosine(own), 1.0)) * (double)own->different;
}

/* Some ranks have the sum or the mean, the others their own part of it. */
ar_status ari_measure_own_part(ari_trace *t, const ari_case *c)
{
    const ari_survey *s = &c->survey;
    const int dp = ari_along(c->d, ARI_CUTS_DATA);
    bool sum = true, mean = true;
    if (dp < 2 || s->wrong_ranks == s->holding_ranks)
        return AR_OK;
    for (int r = 0; r < c->d->ranks; r++) {
        const part p = part_of(&s->rank[r]);
        if (s->rank[r].different == 0)
            continue;
        if (!all_differ(&s->rank[r], 20) || !(p.angle > 0.15) || !signs_are_as_far(c, r))
            return AR_OK;
        sum = sum && p.share <= 0.9 && fabs(p.over - 1.0) <= 0.3;
        mean = mean && fabs(p.share - 1.0) <= 0.3 && fabs(p.over / dp - 1.0) <= 0.3;
    }
    if (!sum && !mean)
        return AR_OK;
    ARI_FINDING(t, ARI_FOUND_OWN_PART, mean ? ARI_IF(AVERAGE) : 0, {"share", .number = s->total.vr / s->total.rr});
    return AR_OK;
}

/* --- the largest or the smallest part ----------------------------------------------------------------------------- */

/* Bounds on the elements that differ: sign times what they exceed the reference's nth part by. The bias that is added
 * after a reduction is in neither. */
typedef struct extreme {
    double n, sign;
    const float *bias; /* [cols]; NULL: none */
} extreme;

/* True if no element is on the other side of the mean of n parts, and nearly all are well away from it: a sum that
 * lacks parts, a multiple or noise has both sides wherever the reference has both signs. */
static bool is_extreme(const ari_case *c, const extreme *e)
{
    const double largest = c->survey.max_reference;
    const double near = c->absolute + ARI_SUMS * largest + c->relative * largest / 2.0;
    size_t signs[2] = {0, 0}, away = 0;
    for (ari_run run = ari_runs_of(&c->grid); ari_runs_next(&run);) {
        for (size_t i = 0; i < run.count; i++) {
            const double bias = e->bias ? (double)e->bias[run.col + i] : 0.0, ref = (double)run.ref[i] - bias;
            const double beyond = e->sign * ((double)run.value[i] - bias - ref / e->n);
            if (!ari_run_differs(&c->grid, &run, i))
                continue;
            if (!(beyond >= -near))
                return false;
            signs[ref > 0.0]++;
            away += beyond > near;
        }
    }
    const size_t all = signs[0] + signs[1];
    return signs[0] >= ENOUGH / 8 && signs[1] >= ENOUGH / 8 && all >= ENOUGH / 2 && away * 10 >= all * 9;
}

/* The largest of n ranks' parts is never less than their sum over n, and the smallest never more. */
ar_status ari_measure_extreme(ari_trace *t, const ari_case *c)
{
    const ari_tally *all = &c->survey.total;
    const ar_dump_tensor *own = c->d->pass == 'f' ? ari_replay_parameter(c, ARI_NO_ROLE, ".bias") : NULL;
    float *bias = NULL;
    if (all->different < ENOUGH / 2 || all->different * 2 < all->held) /* one part may be all of an element */
        return AR_OK;
    if (own && own->count == c->grid.cols)
        AR_TRY(ari_read_values(&bias, own, c->arena));
    for (size_t i = 0; i < 2 * ARI_LAYOUT_AXES && t->kind == ARI_FOUND_NOTHING; i++) {
        const ari_axes axes = ari_layout_axes[i / 2].axes;
        const int along = ari_along(c->d, axes), known = ari_ranks_along(&c->known->mesh, axes),
                  n = along > known ? along : known;
        const extreme e = {.n = n, .sign = i % 2 ? -1.0 : 1.0, .bias = bias};
        const extreme of_mean = {.n = 1.0, .sign = e.sign};
        if (n > 1 && (is_extreme(c, &e) || (c->d->pass == 'g' && is_extreme(c, &of_mean))))
            ARI_FINDING(t, ARI_FOUND_EXTREME, 0, {"n", .count = (size_t)n},
                        {"which", .text = i % 2 ? "smallest" : "largest"}, {"op", .text = i % 2 ? "MIN" : "MAX"});
    }
    return AR_OK;
}

/* --- sums that were not taken before their tokens were shared out ------------------------------------------------- */

/* Gradients of keys and values are sums over the queries of all places of a ring. The queries of one place leave a part
 * of the reference that is unrelated to the missing part, or similar to it if all queries agree: `over` is 1, or less.
 * A multiple of the reference is another fault. One rank's few values say less than those of all. The last keys have
 * queries of one place alone in any order of tokens, and are right. */
static bool is_part_of_ring(const ari_case *c, const part *p)
{
    const ari_difference *d = c->d;
    if (ari_along(d, ARI_CUTS_POSITIONS) < 2 || d->pass != 'b' || c->survey.total.different < ENOUGH ||
        (c->is & (ARI_IS_QUERY_HEADS | ARI_IS_KV_HEADS)) != ARI_IS_KV_HEADS || !(p->over >= 0.25 && p->over <= ABOUT) ||
        !(p->angle < 0.97))
        return false;
    const size_t chunks = 2 * (size_t)ari_along(d, ARI_CUTS_POSITIONS); /* two a place, as in zigzag order */
    for (size_t i = (d->shape[1] + chunks - 1) / chunks * (chunks - 1); i < d->shape[1]; i++) {
        if (c->survey.hits[1][i] > 0)
            return false;
    }
    for (int r = 0; r < d->ranks; r++) {
        const ari_tally *own = &c->survey.rank[r];
        const double share = own->vr / own->rr;
        if (own->different > 0 && (own->different < ENOUGH / 2 || own->nan > 0 || !(share > 0.02 && share < 1.0)))
            return false;
    }
    return true;
}

/* No rank has a second copy of its tokens to add up. But one of N contributions to a sum, unrelated to the others, is
 * about 1/N of the reference: more of it on one rank's tokens is less on another's, unlike a sum that lacks a head. */
ar_status ari_measure_scatter(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->d;
    const ari_tally *all = &c->survey.total;
    const part p = part_of(all);
    const int tp = ari_along(d, ARI_CUTS_FEATURES);
    if (!ari_is_activation(d) || d->ndim < 3 || d->copy[0].shape[1] >= d->shape[1])
        return AR_OK;
    const bool ring = is_part_of_ring(c, &p);
    const bool every = all_differ(all, 20) && all->nan == 0 && c->survey.wrong_ranks == c->survey.holding_ranks;
    if (!ring && !(d->sp && every && is_one_of(p.share, tp, NEARLY) && distance(p.over, 1.0) <= log(ABOUT)))
        return AR_OK;
    ARI_FINDING(t, ARI_FOUND_SCATTER, ring ? ARI_IF(OF_CP) : 0, {"share", .number = p.share});
    return AR_OK;
}

/* --- a weight ----------------------------------------------------------------------------------------------------- */

/* A row-parallel layer reads x [tokens, in/N] and writes y [tokens, out]. If y was put where x lay, the tokens that it
 * did not reach are right, a share of 1 - out/(in/N); 0 if this is not such a weight or nothing is left. */
static double share_after_overwriting(const ari_difference *d, size_t *out, size_t *in)
{
    const size_t *local = d->copy[0].shape;
    const bool other =
        ari_module_of(d->name, strlen(d->name)).role != ARI_NO_ROLE && !(ari_name_is(d->name) & ARI_IS_ROW_PARALLEL);
    if (d->ndim != 2 || d->copy[0].layout->nbox != 1 || other)
        return 0.0;
    const int split = local[0] < d->shape[0] ? 0 : 1; /* [in, out] or [out, in] */
    *out = d->shape[1 - split];
    *in = local[split];
    return local[split] < d->shape[split] && *out < *in ? 1.0 - (double)*out / (double)*in : 0.0;
}

/* A gradient divided by n after each of n micro-batches holds 1/n of the last, 1/n^2 of the one before, and so on: for
 * unrelated parts of equal size this gives the share and `over`. */
static bool is_divided_each_time(const ari_difference *d, const part *p)
{
    double sum = 0.0, squares = 0.0;
    for (int i = 1; i <= d->micro_batches; i++) {
        sum += pow(d->micro_batches, -i);
        squares += pow(d->micro_batches, -2 * i);
    }
    return d->micro_batches > 1 && distance(p->share, sum / d->micro_batches) < log(1.1) &&
           distance(p->over, squares / sum) < log(1.1);
}

static void found_part(ari_trace *t, const ari_case *c, const part *p, bool keeps_inputs)
{
    const ari_difference *d = c->d;
    const double share = p->share;
    /* The samples left out of a sum are at worst unrelated to those left in; a micro-batch has many, and is nearer. */
    const bool foreign = p->over > 1.25;
    size_t out = 0, in = 0;
    const double overwritten = distance(share, share_after_overwriting(d, &out, &in));
    const double samples = d->batch > 1 ? distance(share, 1 / (double)d->batch) : HUGE_VAL;
    const bool all_shared = c->survey.shared == c->grid.count;
    if (overwritten < log(1.4) && (foreign || overwritten < samples))
        t->flags |= ARI_IF(CUT) | (!foreign && samples < log(NEARLY) ? ARI_IF(SAMPLES) : 0);
    else if (foreign)
        t->flags |= ARI_IF(FOREIGN);
    else if (is_divided_each_time(d, p))
        t->flags |= ARI_IF(OF_MICRO) | ARI_IF(INVERSE);
    else if (!d->forward_first && is_one_of(share, d->micro_batches, NEARLY) && p->over < 1.15 &&
             !(d->zero && is_one_of(share, ari_along(d, ARI_CUTS_DATA), NEARLY)))
        t->flags |= ARI_IF(OF_MICRO);
    else if (d->zero && ari_along(d, ARI_CUTS_DATA) > 1) /* a rank has its share of the sum alone */
        t->flags |= ARI_IF(OF_SHARDS);
    else if (samples < log(ABOUT)) /* samples differ, and 1/8 is still distinct from 1/2 */
        t->flags |= ARI_IF(SAMPLES) | (keeps_inputs ? ARI_IF(OF_INPUT) : 0);
    else if (all_shared && is_one_of(share, d->ranks, ABOUT))
        t->flags |= ARI_IF(COUNT);
    if (!(t->flags & (ARI_IF(CUT) | ARI_IF(FOREIGN))) && overwritten < log(NEARLY))
        t->flags |= ARI_IF(PERHAPS);
    /* A foreign input may by chance leave a share and an angle that a part of the sum would have. */
    t->flags |= d->recomputed && d->ndim == 2 && !foreign ? ARI_IF(TWICE) : 0;
    ARI_FACTS(t, {"out", .count = out}, {"in", .count = in},
              {"sample", .number = 1.0 / (double)(d->batch > 0 ? d->batch : 1)});
}

/* Each rank has its share of the sum of n alone, before the ranks' own parts, which are still where they were, are added
 * to it again: n - 1 of n parts count twice. They are unrelated, or more similar than that. Later, a step's gradient may
 * have an earlier one's added. */
static bool is_counted_again(const ari_case *c)
{
    const ari_difference *d = c->d;
    const ari_tally *all = &c->survey.total;
    const double n = ari_along(d, ARI_CUTS_DATA), more = part_of(all).share - 1.0;
    return d->zero && n > 1.0 && d->micro_batches <= 1 && d->step <= 1 && distance(more, (n - 1.0) / n) < log(NEARLY) &&
           all->dd <= NEARLY * more * all->rr;
}

ar_status ari_measure_gradient(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->d;
    const part p = part_of(&c->survey.total);
    if (!all_differ(&c->survey.total, 10))
        return AR_OK;
    if (is_counted_again(c)) {
        ARI_FINDING(t, ARI_FOUND_GRADIENT, ARI_IF(OF_SHARDS) | ARI_IF(SAME), {"share", .number = p.share - 1.0});
        return AR_OK;
    }
    /* With other samples' inputs the foreign part is similar, and less of it is enough. */
    const bool less = p.share < 0.9 && p.over <= 1.1, along = p.angle >= 0.2;
    /* Between its forward and its backward pass, other micro-batches pass through a layer, which saves an input for
     * each; a second forward pass may be nearly right, apart from the masks of a dropout. */
    const bool inputs = d->forward_first && d->micro_batches > 1 && d->ndim == 2;
    const bool again = d->recomputed && d->ndim == 2 && along && p.share < 2.0 && p.over > 1.04;
    if (!again && !(along && p.share < 0.9) && !(inputs && along && p.share < 2.0) && !(fabs(p.angle) < 0.2))
        return AR_OK;
    ARI_FINDING(t, ARI_FOUND_GRADIENT, 0, {"share", .number = p.share});
    if (again && !less)
        t->flags |= ARI_IF(TWICE) | ARI_IF(FOREIGN); /* its input was computed twice */
    else if (inputs && along && p.share < 2.0 && !less)
        t->flags |= ARI_IF(OF_INPUT) | ARI_IF(FOREIGN);
    else if (along)
        found_part(t, c, &p, inputs);
    else
        t->flags |= ARI_IF(ALL);
    return AR_OK;
}

/* --- outputs that got no gradient --------------------------------------------------------------------------------- */

/* Rows and columns of a weight's gradient that have any value, a bit for each of the two dumps. */
typedef struct given {
    size_t shape[2];
    unsigned char *any[2]; /* [dimension][shape[dimension]] */
} given;

/* Rows, else columns, that are zero in the other dump alone, one after the other, while others are not. */
static bool find_lost(size_t *from, size_t *to, int *dim, const given *g)
{
    for (*dim = 0; *dim < 2; ++*dim) {
        size_t lost = 0, there = 0;
        for (size_t i = 0; i < g->shape[*dim]; i++) {
            const bool is = g->any[*dim][i] == 1u;
            there += g->any[*dim][i] > 1u;
            *from = is && lost == 0 ? i : *from;
            *to = is ? i + 1 : *to;
            lost += is;
        }
        if (lost > 1 && there > 0 && *to - *from == lost)
            return true;
    }
    return false;
}

/* The gradient of a module's input lacks what those of its outputs give to whose rows of the weight nothing was given
 * either: the keys of a packed q|k|v that were detached. */
ar_status ari_measure_ungiven(ari_trace *t, const ari_case *c)
{
    const ar_dump *dump[] = {c->known->reference, c->known->other};
    const ar_dump_tensor *weight[2];
    char stem[256];
    given g;
    size_t from = 0, to = 0;
    int dim;
    const int n = snprintf(stem, sizeof stem, "%s.weight", c->d->name);
    for (int k = 0; k < 2; k++) {
        weight[k] =
            n > 0 && (size_t)n < sizeof stem ? ari_tensor_of_step(dump[k], stem, (size_t)n, "grad", c->d->step) : NULL;
        if (!weight[k] || weight[k]->ndim != 2 || !ari_same_shape(weight[0], weight[k]))
            return AR_OK;
    }
    memcpy(g.shape, weight[0]->shape, sizeof g.shape);
    AR_TRY(ARI_TAKE(&g.any[0], c->arena, g.shape[0], stem));
    AR_TRY(ARI_TAKE(&g.any[1], c->arena, g.shape[1], stem));
    ari_beside b = ari_beside_of(weight, 2, 0, weight[0]->count);
    while (ari_beside_next(&b)) {
        const unsigned any = (b.x[0] != 0.0 ? 1u : 0u) | (b.x[1] != 0.0 ? 2u : 0u);
        unsigned char *const row = &g.any[0][b.at / g.shape[1]], *const column = &g.any[1][b.at % g.shape[1]];
        *row = (unsigned char)(*row | any);
        *column = (unsigned char)(*column | any);
    }
    AR_TRY(b.status);
    if (find_lost(&from, &to, &dim, &g)) {
        ari_trace_set(t, ARI_FOUND_UNGIVEN, 0);
        ari_words(t, "outputs", "%s %zu..%zu of %zu", dim == 0 ? "rows" : "columns", from, to - 1, g.shape[dim]);
        ARI_FACTS(t, {"weight", .text = stem});
    }
    return AR_OK;
}

/* --- nothing but noise -------------------------------------------------------------------------------------------- */

/* The largest root mean square of the differences over any slice of any dimension, against that of all. */
static ar_status concentration(double *out, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    const double all = c->survey.total.dd / (double)c->count;
    *out = 0.0;
    for (int dim = 0; dim < g->nd; dim++) {
        double *sum = NULL;
        const size_t n = g->shape[dim], inner = ari_grid_inner(g, dim), size = c->count / n;
        if (n < 2 || size < 16)
            continue;
        AR_TRY(ARI_TAKE(&sum, c->arena, n, g->d->name));
        for (size_t i = 0; i < c->count; i++) {
            const double apart = (double)c->val[i] - (double)c->ref[i];
            sum[i / inner % n] += apart * apart / (double)size;
        }
        for (size_t k = 0; k < n; k++)
            *out = fmax(*out, sum[k] / all);
    }
    return AR_OK;
}

/* True if the differences are large compared to the update, which is a small part of the weights. */
static bool is_of_update(const ari_case *c)
{
    const float *before = c->d->before;
    double moved = 0.0;
    if (c->d->pass != 'n' || !before)
        return c->d->pass == 'n';
    for (size_t i = 0; i < c->count; i++) {
        const double by = (double)c->ref[i] - (double)before[i];
        moved += by * by;
    }
    return c->survey.total.dd > ARI_KNOWN * moved;
}

/* True if a row, or the first position, has the reference's bits: rounding that is in all others would leave none. */
static bool has_exact_rows(const ari_case *c)
{
    for (size_t row = 0; row < c->grid.rows && c->grid.rows > 1 && c->grid.cols > 1; row++) {
        const size_t at = row * c->grid.cols, size = c->grid.cols * sizeof *c->ref;
        const float first = c->ref[at];
        bool varies = false;
        for (size_t i = at + 1; i < at + c->grid.cols && !varies; i++)
            varies = !ari_same_bits(c->ref[i], first);
        if (varies && memcmp(c->ref + at, c->val + at, size) == 0)
            return true;
    }
    return false;
}

ar_status ari_measure_noise(ari_trace *t, const ari_case *c)
{
    const ari_tally *all = &c->survey.total;
    const double size = sqrt(all->dd / all->rr), along = all->vr / all->rr - 1.0;
    double peak = 0.0;
    if (all->different < 64 || (all->different * 2 < c->count && !c->noisy) || !(size < 0.01) ||
        !(fabs(along) * sqrt((double)all->different) < 8.0 * size) || is_of_update(c))
        return AR_OK;
    AR_TRY(concentration(&peak, c));
    if (!(peak < 12.0) || has_exact_rows(c))
        return AR_OK;
    ARI_FINDING(t, ARI_FOUND_NOISE, c->d->exact ? ARI_IF(SAME) : 0, {"size", .number = size},
                {"arithmetic", .text = size < 3e-5     ? "long sums of fp32"
                                       : size < 1.5e-3 ? "tf32 or fp16"
                                                       : "bf16"});
    return AR_OK;
}
