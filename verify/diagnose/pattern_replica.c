/* SPDX-License-Identifier: Apache-2.0 */
/* Copies of one value that should be equal: left partial, left ungathered, drifted apart. */
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/pattern_impl.h"

/* --- a sum (or an average) over the copies is the reference ------------------------------------------------------- */

/* Over the elements that several ranks hold. */
typedef struct fold {
    double sum_error, mean_error; /* squared: sum - reference, mean - reference */
    double apart;                 /* squared: copy - reference, averaged over the copies */
    double scale;                 /* squared: reference */
    double worst;                 /* |sum - reference|, or |mean - reference| for means */
    double worst_mean;
    size_t lone; /* different elements that one rank alone holds */
} fold;

/* One row: sums over its holders. */
typedef struct fold_row {
    double *sum, *apart; /* [cols] */
    int *holders;        /* [cols] */
} fold_row;

static void end_fold_row(fold *f, const ari_case *c, fold_row *row, size_t at)
{
    for (size_t i = 0; i < c->grid.cols; i++) {
        const size_t index = at * c->grid.cols + i;
        const double ref = (double)c->grid.d->reference[index], n = row->holders[i];
        if (row->holders[i] > 1) {
            const double sum = fabs(row->sum[i] - ref), mean = fabs(row->sum[i] / n - ref);
            f->sum_error += sum * sum;
            f->mean_error += mean * mean;
            f->apart += row->apart[i] / n;
            f->scale += ref * ref;
            f->worst = sum > f->worst ? sum : f->worst;
            f->worst_mean = mean > f->worst_mean ? mean : f->worst_mean;
        } else if (row->holders[i] == 1) {
            f->lone += ari_survey_bit(&c->survey, index);
        }
        row->sum[i] = row->apart[i] = 0.0;
        row->holders[i] = 0;
    }
}

/* Over the ranks of one group; ends the row's sums. */
static void fold_copies(fold *f, const ari_case *c, fold_row *row, ari_over over, int key)
{
    ari_runs it = ari_runs_of(&c->grid);
    ari_run run;
    size_t current = 0;
    while (ari_runs_next(&it, &run)) {
        if (run.row != current)
            end_fold_row(f, c, row, current);
        current = run.row;
        for (size_t i = 0; i < run.count && ari_in_group(c->grid.d, run.rank, over, key); i++) {
            const double v = (double)run.value[i], delta = v - (double)run.ref[i];
            row->sum[run.col + i] += v;
            row->apart[run.col + i] += delta * delta;
            row->holders[run.col + i]++;
        }
    }
    end_fold_row(f, c, row, current);
}

static bool is_right(const void *user, int rank)
{
    const ari_survey *s = user;
    return s->rank[rank].different == 0 && s->rank[rank].kept > 0;
}

static bool others_are_zero(const ari_survey *s, int ranks)
{
    for (int r = 0; r < ranks; r++) {
        if (s->rank[r].different > 0 && s->rank[r].zero < s->rank[r].different)
            return false;
    }
    return true;
}

static void say_sum(ari_clue *f, const ari_case *c, const fold *sums, const char *over)
{
    const ari_difference *d = c->grid.d;
    const ari_survey *s = &c->survey;
    const double worst = sums->worst / s->max_reference;
    const int right = s->holding_ranks - s->wrong_ranks;
    ari_text t = ari_find(f, ARI_IDENTITY + 2);
    if (right == 1 && others_are_zero(s, d->ranks)) {
        ari_say(&t, "looks like a missing broadcast or all-reduce over %s: ", over);
        ari_say_ranks(&t, d->ranks, is_right, s);
        ari_say(&t, " has the value, the others hold zeros where the reference does not");
        return;
    }
    ari_say(&t,
            "looks like a missing all-reduce over %s: the values of %s add up to the reference (largest difference "
            "%.1e of its largest value), ",
            over, s->whole ? "the ranks" : "the ranks that hold copies of an element", worst);
    if (right > 0)
        ari_say_ranks(&t, d->ranks, is_right, s);
    ari_say(&t, right > 0 ? " alone agrees with it" : "no rank has it");
    if (d->pass == 'b')
        ari_say(&t, "; the input gradient of a column-parallel layer, or of a head held by several ranks, is partial "
                    "until it is reduced");
    else if (d->pass == 'f')
        ari_say(&t, "; a row-parallel output is partial until it is reduced");
    else if (d->pass == 'g' && strcmp(over, "dp") == 0)
        ari_say(&t, "; each data-parallel rank saw its own samples: gradients are added over dp before the update%s",
                d->step > 1 ? "; in the step before they were: what said so then was not reset" : "");
    else if (d->pass == 'g' && d->sp)
        ari_say(&t, "; a replicated parameter of which each rank saw its own positions only (sequence parallelism): "
                    "its gradient is spread over the ranks and must be added over tp");
    else if (d->pass == 'g')
        ari_say(&t, "; a replicated parameter whose ranks saw different tokens or heads needs its gradients added");
}

static void say_mean(ari_clue *f, const ari_case *c, const fold *sums, const char *over)
{
    ari_text t = ari_find(f, ARI_IDENTITY + 1);
    ari_say(&t,
            "looks like a missing average over %s: the mean of the ranks' values is the reference (largest difference "
            "%.1e of its largest value), as if each rank had divided by its own part's count, or multiplied by N",
            over, sums->worst_mean / c->survey.max_reference);
}

/* What the copies are, if they are that in every group of this kind. */
typedef enum relation { UNRELATED, ADD_UP, AVERAGE } relation;

static relation relation_in(fold *sums, const ari_case *c, fold_row *row, ari_over over)
{
    /* Copies 1% apart whose sum is within 0.1% of the reference: of many elements that is no accident; of few, ask for
     * what rounding of the copies to fp32 leaves. */
    const double tolerance = c->survey.shared >= 64 ? 1e-3 : 1e-5;
    relation all = UNRELATED;
    for (int key = 0; key < ari_groups(c->grid.d, over); key++) {
        fold one = {0};
        fold_copies(&one, c, row, over, key);
        const bool far = isfinite(one.apart) && one.apart >= 1e-4 * one.scale && one.scale > 0.0 && one.lone == 0;
        const relation mine = far && one.sum_error <= tolerance * tolerance * one.scale    ? ADD_UP
                              : far && one.mean_error <= tolerance * tolerance * one.apart ? AVERAGE
                                                                                           : UNRELATED;
        if (mine == UNRELATED || (key > 0 && mine != all))
            return UNRELATED;
        all = mine;
        sums->worst = fmax(sums->worst, one.worst);
        sums->worst_mean = fmax(sums->worst_mean, one.worst_mean);
    }
    return all;
}

ar_status ari_detect_sum(ari_clue *f, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    static const ari_over kinds[] = {ARI_OVER_BOTH, ARI_OVER_TP, ARI_OVER_DP};
    if (c->survey.disagree == 0 || c->survey.total.nan > 0)
        return AR_OK;
    ar_status st = AR_OK;
    fold_row row = {NULL, NULL, NULL};
    AR_TRY_TO(done, st, ari_alloc_zero((void **)&row.sum, g->cols, sizeof *row.sum, g->d->name));
    AR_TRY_TO(done, st, ari_alloc_zero((void **)&row.apart, g->cols, sizeof *row.apart, g->d->name));
    AR_TRY_TO(done, st, ari_alloc_zero((void **)&row.holders, g->cols, sizeof *row.holders, g->d->name));
    for (size_t i = 0; i < 3 && f->confidence == ARI_SILENT; i++) {
        fold sums = {0};
        const relation is = relation_in(&sums, c, &row, kinds[i]);
        const char *over = ari_over_name(kinds[i] == ARI_OVER_BOTH ? ari_apart_over(g->d) : kinds[i]);
        if (is == ADD_UP)
            say_sum(f, c, &sums, over);
        else if (is == AVERAGE)
            say_mean(f, c, &sums, over);
    }
done:
    free(row.sum);
    free(row.apart);
    free(row.holders);
    return st;
}

/* --- each rank has its own block alone ---------------------------------------------------------------------------- */

typedef struct own_block {
    bool zero, right;    /* still possible: zeros outside, anything outside; right inside both ways */
    size_t outside, off; /* elements outside; of those different */
} own_block;

static void look_at_run(own_block *own, const ari_case *c, const ari_run *run)
{
    const ari_grid *g = &c->grid;
    const int last = g->nd - 1;
    size_t at[AR_MAX_DIMS] = {0}, start[AR_MAX_DIMS] = {0}, count[AR_MAX_DIMS] = {0};
    for (int dim = 0; dim < g->nd; dim++) {
        ar_split_uneven(g->shape[dim], g->d->ranks, run->rank, &start[dim], &count[dim]);
        at[dim] = ari_grid_index(g, run->index, dim);
    }
    for (size_t i = 0; i < run->count; i++, at[last]++) {
        const bool off = ari_run_differs(g, run, i), zero = run->value[i] == 0.0f;
        for (int dim = 0; dim < g->nd; dim++) {
            const bool inside = at[dim] >= start[dim] && at[dim] - start[dim] < count[dim];
            own[dim].right = own[dim].right && (!inside || !off);
            own[dim].zero = own[dim].zero && (inside || zero);
            own[dim].outside += !inside;
            own[dim].off += !inside && off;
        }
    }
}

static void say_gather(ari_clue *f, const ari_case *c, int dim, bool zero)
{
    const ari_grid *g = &c->grid;
    const int n = g->d->ranks;
    size_t start = 0, count = 0;
    ar_split_uneven(g->shape[dim], n, n - 1, &start, &count);
    ari_text t = ari_find(f, zero ? ARI_IDENTITY + 5 : ARI_TRACE + 5);
    ari_say(&t, "a missing all-gather along %s: every rank has its own 1/%d of them right", ari_dim_name(g, dim, true),
            n);
    if (count > 0)
        ari_say(&t, " (rank %d: %zu..%zu)", n - 1, start, start + count - 1);
    ari_say(&t, zero ? " and zeros elsewhere" : " and is wrong elsewhere: the other ranks' parts never arrived");
    if (g->d->pass == 'b')
        ari_say(&t, "; a layer that slices a replicated input must gather that input's gradient");
}

ar_status ari_detect_gather(ari_clue *f, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    own_block own[AR_MAX_DIMS] = {{false, false, 0, 0}};
    if (!c->survey.whole || c->survey.disagree == 0 || c->survey.wrong_ranks < g->d->ranks)
        return AR_OK;
    for (int dim = 0; dim < g->nd; dim++)
        own[dim].right = own[dim].zero = g->shape[dim] >= (size_t)g->d->ranks;
    ari_runs it = ari_runs_of(g);
    ari_run run;
    while (ari_runs_next(&it, &run))
        look_at_run(own, c, &run);
    for (int dim = g->nd - 1; dim >= 0; dim--) {
        /* Without zeros "right inside" says something only if most of the outside is wrong. */
        if (own[dim].right && (own[dim].zero || own[dim].off * 2 > own[dim].outside)) {
            say_gather(f, c, dim, own[dim].zero);
            return AR_OK;
        }
    }
    return AR_OK;
}

/* --- some copies are right, some are not -------------------------------------------------------------------------- */

static bool is_off(const void *user, int rank)
{
    const ari_survey *s = user;
    return s->rank[rank].different > 0;
}

ar_status ari_detect_drift(ari_clue *f, const ari_case *c)
{
    const ari_survey *s = &c->survey;
    const ari_difference *d = c->grid.d;
    if (s->disagree == 0 || s->wrong_ranks == s->holding_ranks)
        return AR_OK;
    ari_text t = ari_find(f, ARI_SHAPE - 10);
    ari_say(&t, "replicas apart: the copy of ");
    ari_say_ranks(&t, d->ranks, is_right, s);
    ari_say(&t, " is right, that of ");
    ari_say_ranks(&t, d->ranks, is_off, s);
    ari_say(&t, " is not (largest difference %.2g); ", s->total.max_difference);
    if (d->pass == 'i')
        ari_say(&t, "a replicated parameter must start equal: is the rank in its seed, or was it never broadcast?");
    else if (d->pass == 'n')
        ari_say(&t, "optimizer state, weight decay or clipping that is not the same on every replica");
    else
        ari_say(&t,
                "a replicated value needs equal inputs, weights and masks on every rank: look for a collective that "
                "this rank skipped, or a buffer that was overwritten there");
    return AR_OK;
}
