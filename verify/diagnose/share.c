/* SPDX-License-Identifier: Apache-2.0 */
/* How much of the reference there is where values are whole and wrong: parts of sums, sums of other parts, noise. */
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/case.h"
#include "verify/diagnose/roles.h"

double ari_cosine(const ari_tally *t)
{
    return t->vr / sqrt(t->vv * t->rr);
}

/* --- a bias ------------------------------------------------------------------------------------------------------- */

/* What the local gradients look like if element t stands for token t. */
typedef struct per_token {
    bool ends;      /* on every rank zero from element `end` on, and the reference is not */
    bool last_only; /* zero exactly at the last token of each sample, which predicts nothing */
    size_t end;
} per_token;

static bool zero_at_last_tokens(const ari_difference *d, int r)
{
    const size_t n = d->copy[r].shape[0];
    if (d->seq < 2 || n < d->seq)
        return false;
    for (size_t i = 0; i < n; i++) {
        if ((d->copy[r].local[i] == 0.0f) != (i % d->seq == d->seq - 1))
            return false;
    }
    return true;
}

static per_token look_per_token(const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    per_token p = {.ends = true, .last_only = true, .end = SIZE_MAX};
    for (int r = 0; r < d->ranks; r++) {
        if (c->survey.rank[r].held == 0)
            continue;
        size_t n = d->copy[r].shape[0];
        p.last_only = p.last_only && zero_at_last_tokens(d, r);
        while (n > 0 && d->copy[r].local[n - 1] == 0.0f)
            n--;
        /* A handful of zeros at the end is no evidence. */
        p.ends = p.ends && n > 0 && n + 8 <= d->copy[r].shape[0] && (p.end == SIZE_MAX || p.end == n);
        p.end = n;
    }
    return p;
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
    const ari_difference *d = c->grid.d;
    const ari_tally *all = &c->survey.total;
    size_t tokens = 0;
    if (d->pass != 'g' || !ari_is_bias(d) || all->kept * 10 > all->held || all->different < 16 ||
        !(fabs(ari_cosine(all)) < 0.7))
        return AR_OK;
    const per_token p = look_per_token(c);
    const bool exact = p.ends && ends_at_tokens(d, p.end, &tokens);
    if (d->hidden && !exact && !p.last_only && !p.ends) /* without ranks a part of a sum looks the same */
        return AR_OK;
    ari_found(t, ARI_FOUND_BIAS_AXIS, p.last_only ? ARI_IF(LAST) : exact ? ARI_IF(TOKENS) : p.ends ? ARI_IF(SOME) : 0);
    t->less = exact || p.last_only ? 0 : 25;
    ari_count(t, "end", p.end);
    ari_count(t, "tokens", tokens);
    ari_count(t, "first", d->seq - 1);
    ari_count(t, "second", 2 * d->seq - 1);
    return AR_OK;
}

/* --- a weight ----------------------------------------------------------------------------------------------------- */

/* A row-parallel layer reads x [tokens, in/N] and writes y [tokens, out]. If y was put where x lay, the tokens that it
 * did not reach are right, a share of 1 - out/(in/N); 0 if this is not such a weight or nothing is left. */
static double share_after_overwriting(const ari_difference *d, size_t *out, size_t *in)
{
    const size_t *local = d->copy[0].shape;
    if (d->ndim != 2 || d->copy[0].layout->nbox != 1)
        return 0.0;
    const int split = local[0] < d->shape[0] ? 0 : 1; /* [in, out] or [out, in] */
    *out = d->shape[1 - split];
    *in = local[split];
    return local[split] < d->shape[split] && *out < *in ? 1.0 - (double)*out / (double)*in : 0.0;
}

/* How many times too large or too small: log of the ratio, without sign. */
static double distance(double share, double expected)
{
    return expected > 0.0 ? fabs(log(share / expected)) : HUGE_VAL;
}

/* Between its forward and its backward pass other micro-batches go forward through a layer, and it keeps an input for
 * each. */
static bool keeps_several_inputs(const ari_difference *d)
{
    return d->forward_first && d->micro_batches > 1 && d->ndim == 2;
}

/* Whether the share is about 1/n; what is nearer than `within`. */
static bool is_one_of(double share, double n, double within)
{
    return n > 1.0 && distance(share, 1.0 / n) < log(within);
}

static void found_part(ari_trace *t, const ari_case *c, double angle, double share)
{
    const ari_difference *d = c->grid.d;
    /* What samples leave out of a sum is at worst unrelated to what they leave in: then cosine^2 = share, and larger if
     * samples agree. A smaller one means that something foreign was added. */
    const bool foreign = angle * angle < 0.8 * share;
    size_t out = 0, in = 0;
    const double overwritten = distance(share, share_after_overwriting(d, &out, &in));
    const double samples = d->batch > 1 ? distance(share, 1 / (double)d->batch) : HUGE_VAL;
    const bool all_shared = c->survey.shared == c->grid.count;
    if (overwritten < log(1.4) && (foreign || overwritten < samples))
        t->is |= ARI_IF(CUT) | (!foreign && samples < log(1.25) ? ARI_IF(SAMPLES) : 0);
    else if (foreign)
        t->is |= ARI_IF(FOREIGN);
    else if (!d->forward_first && is_one_of(share, d->micro_batches, 1.3))
        t->is |= ARI_IF(OF_MICRO);
    else if (samples < log(1.5)) /* samples differ, and this still tells 1/8 from 1/2 */
        t->is |= ARI_IF(SAMPLES) | (keeps_several_inputs(d) ? ARI_IF(OF_INPUT) : 0);
    else if (all_shared && is_one_of(share, d->ranks, 1.5))
        t->is |= ARI_IF(COUNT);
    if (!(t->is & (ARI_IF(CUT) | ARI_IF(FOREIGN))) && overwritten < log(1.25))
        t->is |= ARI_IF(PERHAPS);
    /* A foreign input may by chance leave a share and an angle that a part of the sum would have. */
    t->is |= d->recomputed && d->ndim == 2 && !foreign ? ARI_IF(TWICE) : 0;
    ari_count(t, "out", out);
    ari_count(t, "in", in);
    ari_number(t, "sample", 1.0 / (double)(d->batch > 0 ? d->batch : 1));
}

ar_status ari_measure_gradient(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    const ari_tally *all = &c->survey.total;
    if (d->pass != 'g' || all->different < 64 || all->kept * 10 > all->held)
        return AR_OK;
    const double angle = ari_cosine(all), share = all->vr / all->rr;
    /* A part of a sum, as in found_part; with other samples' inputs the foreign is alike, and less of it is enough. */
    const bool part = share < 0.9 && angle * angle >= 0.91 * share, along = angle >= 0.2 && share > 0.0;
    /* A second forward pass may be nearly right, but for the masks of a dropout. */
    const bool again = d->recomputed && d->ndim == 2 && along && share < 2.0 && angle * angle < 0.96 * share;
    if (!again && !(along && share < 0.9) && !(keeps_several_inputs(d) && along && share < 2.0) && !(fabs(angle) < 0.2))
        return AR_OK;
    ari_found(t, ARI_FOUND_GRADIENT, 0);
    ari_number(t, "share", share);
    if (again && !part)
        t->is |= ARI_IF(TWICE) | ARI_IF(FOREIGN); /* its input was computed twice */
    else if (keeps_several_inputs(d) && along && share < 2.0 && !part)
        t->is |= ARI_IF(OF_INPUT) | ARI_IF(FOREIGN);
    else if (along)
        found_part(t, c, angle, share);
    else
        t->is |= ARI_IF(ALL);
    return AR_OK;
}

/* --- a part of a sum of a run whose ranks are not seen ------------------------------------------------------------ */

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
    ari_say(&t, "what one of some %.0f to %.0f ranks, samples or micro-batches contributes", low, high);
}

ar_status ari_measure_share(ari_trace *t, const ari_case *c)
{
    const ari_tally *all = &c->survey.total;
    const double share = all->vr / all->rr, cosine = ari_cosine(all);
    if (all->different < 64 || all->nan > 0 || all->zero * 4 > all->different || !isfinite(cosine) ||
        all->kept * 20 > all->held)
        return AR_OK;
    const double apart = (all->rr - 2.0 * all->vr + all->vv) / all->rr, along = (all->vr - all->rr) / all->rr;
    const double within = share <= 0.62 ? 0.3 : 0.1; /* of a sum less a part, more is known */
    const bool part = share >= 0.04 && share <= 0.9 && cosine > 0.15 && fabs(all->vv / all->vr - 1.0) <= within;
    const bool twice = along >= 0.04 && along <= 0.62 && fabs(apart / along - 1.0) <= 0.3;
    const bool of_micro = c->grid.d->pass == 'g' && is_one_of(share, c->grid.d->micro_batches, 1.5);
    if ((!part && !twice) ||
        (ari_is_activation(c->grid.d) && c->known->mesh.along[ARI_AXIS_TP] == 1)) /* sums over tp alone are partial */
        return AR_OK;
    ari_found(t, ARI_FOUND_SHARE, !part ? ARI_IF(TWICE) : of_micro ? ARI_IF(OF_MICRO) : 0);
    ari_number(t, "share", part ? share : along);
    say_how_many(t, c, part ? share : along);
    return AR_OK;
}

/* --- a sum that was not taken before its tokens were shared out --------------------------------------------------- */

/* Whether every rank holds some of the positions only. */
static bool positions_are_shared(const ari_difference *d)
{
    for (int r = 0; r < d->ranks; r++) {
        if (d->copy[r].shape[1] >= d->shape[1])
            return false;
    }
    return true;
}

/* Keys' and values' gradients are sums over the queries of all places of a ring: what one place's queries leave is a part
 * of the reference, unrelated to what is missing or of its kind where all queries pull alike: v*v is about v*r, or less.
 * A multiple of the reference is another mistake. Few values of a rank tell less than those of all. The last keys have
 * queries of one place alone, and may be right. */
static bool is_part_of_ring(const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    const ari_tally *all = &c->survey.total;
    const ari_role role = ari_module_of(d->name, strlen(d->name)).role;
    const double over = all->vv / all->vr;
    if (ari_along(d, ARI_CUTS_POSITIONS) < 2 || d->pass != 'b' || d->ndim != 3 || !positions_are_shared(d) ||
        (role != ARI_K_ROPE && role != ARI_K_HEADS && role != ARI_V_HEADS && role != ARI_K && role != ARI_V))
        return false;
    if (all->different < 64 || !(over >= 0.25 && over <= 1.5) || !(ari_cosine(all) < 0.97))
        return false;
    for (int r = 0; r < d->ranks; r++) {
        const ari_tally *own = &c->survey.rank[r];
        const double share = own->vr / own->rr;
        if (own->different > 0 && (own->different < 32 || own->nan > 0 || !(share > 0.02 && share < 1.0)))
            return false;
    }
    return true;
}

/* No rank has a second copy of its tokens to add up. But one of N contributions to a sum, unrelated to the others, is
 * orthogonal to what is missing: of the reference its share is about 1/N, and v*r = v*v. */
ar_status ari_measure_scatter(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    const ari_tally *all = &c->survey.total;
    const int tp = ari_along(d, ARI_CUTS_FEATURES);
    if (is_part_of_ring(c)) {
        ari_found(t, ARI_FOUND_SCATTER, ARI_IF(OF_CP));
        ari_number(t, "share", all->vr / all->rr);
        return AR_OK;
    }
    if (!d->sp || tp < 2 || !ari_is_activation(d) || d->ndim != 3 || !positions_are_shared(d) || all->different < 64 ||
        all->nan > 0 || all->kept * 20 > all->held || c->survey.wrong_ranks < c->survey.holding_ranks)
        return AR_OK;
    const double share = all->vr / all->rr, size = all->vv / all->rr;
    if (!(share > 0.0) || fabs(log(share * tp)) > log(1.5) || fabs(log(size / share)) > log(1.5))
        return AR_OK;
    ari_found(t, ARI_FOUND_SCATTER, 0);
    ari_number(t, "share", share);
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
        AR_TRY(ari_alloc_zero((void **)&sum, n, sizeof *sum, g->d->name));
        for (size_t i = 0; i < c->count; i++) {
            const double apart = (double)c->val[i] - (double)c->ref[i];
            sum[i / inner % n] += apart * apart / (double)size;
        }
        for (size_t k = 0; k < n; k++)
            *out = fmax(*out, sum[k] / all);
        free(sum);
    }
    return AR_OK;
}

/* Whether the differences are large beside the update, of which weights are but a small part. */
static bool is_of_update(const ari_case *c)
{
    const float *before = c->grid.d->before;
    double moved = 0.0;
    if (c->grid.d->pass != 'n' || !before)
        return c->grid.d->pass == 'n';
    for (size_t i = 0; i < c->count; i++) {
        const double by = (double)c->ref[i] - (double)before[i];
        moved += by * by;
    }
    return c->survey.total.dd > 1e-3 * moved;
}

/* Whether a row, or the first position, has the reference's bits: rounding leaves none where it is in all others. */
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
    if (all->nan > 0 || all->different < 64 || (all->different * 2 < c->count && !c->noisy) || !(size < 0.03) ||
        !(fabs(along) * sqrt((double)all->different) < 8.0 * size) || is_of_update(c))
        return AR_OK;
    AR_TRY(concentration(&peak, c));
    if (!(peak < 12.0) || has_exact_rows(c))
        return AR_OK;
    ari_found(t, ARI_FOUND_NOISE, c->grid.d->exact ? ARI_IF(SAME) : 0);
    ari_number(t, "size", size);
    ari_words(t, "arithmetic", "%s", size < 3e-5 ? "long sums of fp32" : size < 1.5e-3 ? "tf32 or fp16" : "bf16");
    return AR_OK;
}

/* --- shards of a gradient were added to each other --------------------------------------------------------------- */

/* Whether two ranks hold one box each, of one extent. */
static bool are_alike(const ari_difference *d, int r, int q)
{
    const ar_layout *a = d->copy[r].layout, *b = d->copy[q].layout;
    return a->nbox == 1 && b->nbox == 1 &&
           memcmp(a->box[0].extent, b->box[0].extent, sizeof *a->box[0].extent * (size_t)d->ndim) == 0;
}

/* Whether two ranks that are alike hold the same part. */
static bool hold_one_part(const ari_difference *d, int r, int q)
{
    const ar_box *a = &d->copy[r].layout->box[0], *b = &d->copy[q].layout->box[0];
    return memcmp(a->global, b->global, sizeof *a->global * (size_t)d->ndim) == 0;
}

/* The reference in rank r's box where rank 0 has element `index` of the full tensor in its own. */
static double reference_in(const ari_difference *d, int r, size_t index)
{
    const ar_box *b = &d->copy[r].layout->box[0], *first = &d->copy[0].layout->box[0];
    size_t stride = 1;
    for (int dim = d->ndim - 1; dim >= 0; dim--) {
        index += (b->global[dim] - first->global[dim]) * stride;
        stride *= d->shape[dim];
    }
    return (double)d->reference[index];
}

/* Every tensor-parallel rank's shard is the sum of all of them: a reduction over the world, or over tp, of what is not
 * replicated there. */
ar_status ari_measure_shards_added(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    const int tp = ari_along(d, ARI_CUTS_FEATURES);
    double left = 0.0, all = 0.0;
    if (d->pass != 'g' || tp < 2 || c->survey.different < 64 || c->survey.total.nan > 0)
        return AR_OK;
    for (int r = 0; r < d->ranks; r++) {
        if (c->survey.rank[r].different == 0 || !are_alike(d, r, 0) || (r > 0 && r < tp && hold_one_part(d, r, 0)))
            return AR_OK;
    }
    ari_runs it = ari_runs_of_rank(&c->grid, 0);
    ari_run run;
    while (ari_runs_next(&it, &run)) {
        for (size_t i = 0; i < run.count; i++) {
            double sum = 0.0;
            for (int r = 0; r < tp; r++)
                sum += reference_in(d, r, run.index + i);
            left += (sum - (double)run.value[i]) * (sum - (double)run.value[i]);
            all += sum * sum;
        }
    }
    if (left <= 1e-8 * all)
        ari_found(t, ARI_FOUND_SHARDS_ADDED, 0);
    return AR_OK;
}

/* --- summed over other ranks than those that share a part --------------------------------------------------------- */

/* Of each rank the first that holds the same part, and the first that holds the same bits. */
typedef struct alike {
    int part[ARI_MOST_RANKS], bits[ARI_MOST_RANKS];
} alike;

static void find_alike(alike *a, const ari_difference *d)
{
    const size_t bytes = ari_volume(d->copy[0].shape, d->ndim) * sizeof(float);
    for (int r = 0; r < d->ranks; r++) {
        int p = 0, q = 0;
        while (!hold_one_part(d, r, p))
            p++;
        while (memcmp(d->copy[r].local, d->copy[q].local, bytes) != 0)
            q++;
        a->part[r] = p;
        a->bits[r] = q;
    }
}

/* Whether every rank has the bits of one with another part; lists these groups. */
static bool are_grouped(ari_trace *t, const alike *a, int ranks)
{
    ari_text groups = ari_list(t, "groups");
    for (int r = 0; r < ranks; r++) {
        bool other = false;
        for (int q = 0; q < ranks; q++) {
            other = other || (a->bits[q] == a->bits[r] && a->part[q] != a->part[r]);
            if (a->bits[r] == r && a->bits[q] == r)
                ari_say(&groups, q > r ? ", %d" : r > 0 ? "; %d" : "%d", q);
        }
        if (!other)
            return false;
    }
    return true;
}

/* Of a part that several ranks hold each has a contribution. Where they are summed over another group, its ranks hold
 * one value of different parts, and the groups' values add up to all parts of the reference. */
ar_status ari_measure_group(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    alike a;
    double left = 0.0, all = 0.0;
    if (d->ranks < 4 || d->ranks > ARI_MOST_RANKS || ari_along(d, ARI_CUTS_SAMPLES) > 1 || c->survey.disagree == 0 ||
        c->survey.different < 64 || c->survey.total.nan > 0)
        return AR_OK;
    for (int r = 0; r < d->ranks; r++) {
        if (c->survey.rank[r].different == 0 || !are_alike(d, r, 0))
            return AR_OK;
    }
    find_alike(&a, d);
    ari_runs it = ari_runs_of_rank(&c->grid, 0);
    ari_run run;
    while (ari_runs_next(&it, &run)) {
        for (size_t i = 0; i < run.count; i++) {
            double sum = 0.0, values = 0.0;
            for (int r = 0; r < d->ranks; r++) {
                sum += a.part[r] == r ? reference_in(d, r, run.index + i) : 0.0;
                values += a.bits[r] == r ? (double)d->copy[r].local[run.at + i] : 0.0;
            }
            left += (sum - values) * (sum - values);
            all += sum * sum;
        }
    }
    if (!(left <= 1e-8 * all))
        return AR_OK;
    ari_found(t, ARI_FOUND_GROUP, 0);
    if (!are_grouped(t, &a, d->ranks))
        ari_lost(t);
    return AR_OK;
}
