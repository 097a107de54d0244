/* SPDX-License-Identifier: Apache-2.0 */
/* What the layout suggests: means taken over parts, norms of parts, ranks counted in the wrong group. */
#include "anyrank/parallel.h"
#include "verify/diagnose/pattern_impl.h"

/* --- a mean over each part in place of the whole ------------------------------------------------------------------ */

/* If part k of the tokens was divided by its own count T_k in place of T, what belongs to it is the reference times
 * f_k = T/T_k, or T/(P T_k) where the P parts were averaged after that. Then the sum of 1/f_k is 1, or P. */
typedef struct parts {
    int n;
    double inverse, low, high; /* sum of 1/f, smallest and largest f */
} parts;

static void add_part(parts *p, double factor)
{
    p->inverse += 1.0 / factor;
    p->low = p->n == 0 || factor < p->low ? factor : p->low;
    p->high = p->n == 0 || factor > p->high ? factor : p->high;
    p->n++;
}

static bool is_near(double a, double b)
{
    return fabs(a - b) <= 1e-4 * b;
}

/* Sums over one sample, or over one rank's copy. */
typedef struct sums {
    double vr, rr, vv;
} sums;

/* The factor of values to reference: 0 where it is not one number; values of which the reference is zero say
 * nothing. */
static double factor_of(const sums *s)
{
    const double factor = s->vr / s->rr, left = s->vv - s->vr * factor;
    return s->rr > 0.0 && factor > 0.0 && left <= 1e-10 * s->vv ? factor : 0.0;
}

/* The factor of samples [start, start + count): NAN if they say nothing, 0 if they have none in common. */
static double factor_of_samples(const ari_case *c, size_t start, size_t count)
{
    double factor = NAN;
    for (size_t i = start; i < start + count; i++) {
        sums s = {0.0, 0.0, 0.0};
        ari_runs it = ari_runs_of(&c->grid);
        ari_run run;
        it.row = i * (c->grid.rows / c->grid.shape[0]);
        while (ari_runs_next(&it, &run) && run.row < (i + 1) * (c->grid.rows / c->grid.shape[0])) {
            for (size_t k = 0; k < run.count; k++) {
                const double v = (double)run.value[k], r = (double)run.ref[k];
                s.vr += v * r;
                s.rr += r * r;
                s.vv += v * v;
            }
        }
        if (s.rr == 0.0 && s.vv == 0.0)
            continue;
        const double own = factor_of(&s);
        if (!(own > 0.0) || (!isnan(factor) && !is_near(own, factor)))
            return 0.0;
        factor = own;
    }
    return factor;
}

/* Activations: part k are the samples of a data-parallel rank, or of one of its micro-batches. */
static bool parts_of_samples(parts *p, const ari_case *c, int micro_batches)
{
    const ar_parallel layout = {.dp = ari_dp_of(c->grid.d), .micro_batches = micro_batches};
    for (int rank = 0; rank < layout.dp; rank++) {
        for (int micro = 0; micro < micro_batches; micro++) {
            size_t start = 0, count = 0;
            ar_parallel_rows(&layout, c->grid.shape[0], rank, micro, &start, &count);
            const double factor = count > 0 ? factor_of_samples(c, start, count) : (double)NAN;
            if (factor == 0.0)
                return false;
            if (factor > 0.0)
                add_part(p, factor);
        }
    }
    return true;
}

/* One value of all samples, of which every data-parallel rank has its own. */
static bool parts_of_ranks(parts *p, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    const int tp = ari_tp_of(d);
    for (int rank = 0; rank < d->ranks; rank += tp) {
        sums s = {0.0, 0.0, 0.0};
        ari_runs it = ari_runs_of_rank(&c->grid, rank);
        ari_run run;
        while (ari_runs_next(&it, &run)) {
            for (size_t i = 0; i < run.count; i++) {
                s.vr += (double)run.value[i] * (double)run.ref[i];
                s.rr += (double)run.ref[i] * (double)run.ref[i];
                s.vv += (double)run.value[i] * (double)run.value[i];
            }
        }
        const double factor = factor_of(&s);
        if (!(factor > 0.0))
            return false;
        add_part(p, factor);
    }
    return true;
}

static void say_means(ari_clue *f, const parts *p, bool micro, bool averaged)
{
    ari_text t = ari_find(f, ARI_IDENTITY + 3);
    ari_say(&t, averaged ? "mean of means" : "sum of local means");
    if (is_near(p->low, p->high))
        ari_say(&t, ": all is the reference times %.6g", p->low);
    else
        ari_say(&t, ": what belongs to each %s is the reference times a factor of its own, from %.6g to %.6g",
                micro ? "micro-batch" : "data-parallel rank", p->low, p->high);
    ari_say(&t,
            ", and the sum of 1/factor is %.6g: each of the %d %s divided by its own number of target tokens, and the "
            "results were %s; all must divide by T, the count of the global batch",
            p->inverse, p->n, micro ? "micro-batches" : "data-parallel ranks", averaged ? "averaged" : "added");
}

ar_status ari_detect_means(ari_clue *f, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    const int dp = ari_dp_of(d), micro = d->micro_batches > 1 ? d->micro_batches : 1;
    const bool samples = (d->pass == 'f' || d->pass == 'b') && d->ndim >= 3;
    const bool value = d->pass == 'f' && c->grid.count == 1;
    if ((!samples && !value) || c->survey.total.nan > 0)
        return AR_OK;
    if (dp > 1) {
        parts p = {.n = 0};
        const bool found = samples ? parts_of_samples(&p, c, 1) : parts_of_ranks(&p, c);
        const bool averaged = found && p.n > 1 && is_near(p.inverse, p.n) && !is_near(p.low, p.high);
        if (averaged || (found && p.n > 1 && is_near(p.inverse, 1.0))) {
            say_means(f, &p, false, averaged);
            return AR_OK;
        }
    }
    if (micro > 1 && samples) {
        parts p = {.n = 0};
        const bool found = parts_of_samples(&p, c, micro);
        const bool averaged =
            found && !is_near(p.low, p.high) && (is_near(p.inverse, p.n) || is_near(p.inverse, micro));
        if (averaged || (found && p.n > 1 && is_near(p.inverse, 1.0)))
            say_means(f, &p, true, averaged);
    }
    return AR_OK;
}

/* --- the norm of the gradients ------------------------------------------------------------------------------------ */

ar_status ari_detect_clip(ari_clue *f, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    if (d->pass != 'c' || c->grid.count != 1 || c->survey.total.nan > 0)
        return AR_OK;
    const double ref = (double)d->reference[0];
    double low = INFINITY, high = -INFINITY, squares = 0.0;
    ari_runs it = ari_runs_of(&c->grid);
    ari_run run;
    while (ari_runs_next(&it, &run)) {
        const double v = (double)run.value[0];
        low = v < low ? v : low;
        high = v > high ? v : high;
        squares += run.rank < ari_tp_of(d) ? v * v : 0.0;
    }
    ari_text t = ari_find(f, ARI_TRACE + 2);
    if (c->survey.disagree > 0)
        ari_say(&t,
                "each rank clips by the norm of its own shards: the ranks' norms differ (from %.6g to %.6g, reference "
                "%.6g; the root of the sum of a tensor-parallel group's squares is %.6g); squares are added over tp "
                "before the root",
                low, high, ref, sqrt(squares));
    else if (low > ref)
        ari_say(&t,
                "the norm counts something twice: it is %.6g on every rank, %.4g times the reference; a parameter that "
                "all ranks hold (norms, row-parallel biases, copies of KV heads, a tied weight) counts once, not once "
                "per rank; clip factor: where it is below 1, gradients are %.4g times the expected",
                low, low / ref, ref / low);
    else
        ari_say(&t,
                "the norm leaves something out: it is %.6g on every rank, %.4g times the reference; squares of other "
                "ranks' shards were not added, or a parameter is not in the list; clip factor: where it is below 1, "
                "gradients are %.4g times the expected",
                low, low / ref, ref / low);
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

/* No rank has a second copy of its tokens to add up. But one of N contributions to a sum, unrelated to the others, is
 * orthogonal to what is missing: of the reference its share is about 1/N, and v*r = v*v. */
ar_status ari_detect_scatter(ari_clue *f, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    const ari_tally *all = &c->survey.total;
    const int tp = ari_tp_of(d);
    const bool activation = (d->pass == 'f' || d->pass == 'b') && d->ndim == 3;
    if (!d->sp || tp < 2 || !activation || !positions_are_shared(d) || all->different < 64 || all->nan > 0 ||
        all->kept * 20 > all->held || c->survey.wrong_ranks < c->survey.holding_ranks)
        return AR_OK;
    const double share = all->vr / all->rr, size = all->vv / all->rr;
    if (!(share > 0.0) || fabs(log(share * tp)) > log(1.5) || fabs(log(size / share)) > log(1.5))
        return AR_OK;
    ari_text t = ari_find(f, ARI_STATISTIC + 6);
    ari_say(&t,
            "looks like a missing reduce-scatter over tp: every token has about 1/%d of the reference (its share is "
            "%.3g, cosine %.2f), what one of %d ranks contributes; ",
            tp, share, ari_cosine(all), tp);
    ari_say(&t, d->pass == 'b' ? "the input gradient of a column-parallel layer is partial until the ranks' are added "
                                 "and each keeps its positions (sequence parallelism)"
                               : "a row-parallel output is partial until the ranks' are added and each keeps its "
                                 "positions (sequence parallelism)");
    return AR_OK;
}

/* --- all but the first tensor-parallel group ---------------------------------------------------------------------- */

ar_status ari_detect_world_rank(ari_clue *f, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    const ari_survey *s = &c->survey;
    const int tp = ari_tp_of(d), dp = ari_dp_of(d);
    /* Of initial values those of another rank's place are somebody's, or there are none: any others were drawn anew. */
    if (dp < 2 || tp < 2 || (d->pass == 'i' && s->total.zero < s->total.different))
        return AR_OK;
    for (int r = 0; r < d->ranks; r++) {
        const ari_tally *t = &s->rank[r];
        if (r < tp ? t->different > 0 : t->held == 0 || t->different * 2 < t->held)
            return AR_OK;
    }
    ari_text t = ari_find(f, ARI_TRACE - 4);
    ari_say(&t,
            "the first tensor-parallel group is right, every rank of all others is wrong%s: the rank in the world was "
            "used where the rank in the tensor-parallel group belongs (in an offset, as an owner, to choose a shard)",
            s->total.zero == s->total.different ? " and has zeros" : "");
    return AR_OK;
}
