/* SPDX-License-Identifier: Apache-2.0 */
/* Copies of one value that should be equal: left partial, left ungathered, drifted apart; shards of ranks that are
 * another rank's. */
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/case.h"

/* --- a sum (or an average) over the copies is the reference ------------------------------------------------------- */

/* Over the elements that several ranks hold. */
typedef struct fold {
    double sum_error, mean_error; /* squared: sum - reference, mean - reference */
    double apart;                 /* squared: copy - reference, averaged over the copies */
    double scale;                 /* squared: reference */
    double worst;                 /* |sum - reference|, or |mean - reference| for means */
    double worst_mean;
    double beside_vector; /* squared: sum - reference, less the vector that it is in every row */
    size_t lone;          /* different elements that one rank alone holds */
    size_t shared;        /* elements that several hold */
} fold;

enum { LEAST_ROWS = 8 }; /* in which a vector that is the same in all is no accident */

/* One row: sums over its holders. */
typedef struct fold_row {
    double *sum, *apart; /* [cols] */
    double *excess;      /* [cols]: sum - reference, of all rows so far */
    int *holders;        /* [cols] */
} fold_row;

static void end_fold_row(fold *f, const ari_case *c, fold_row *row, size_t at)
{
    for (size_t i = 0; i < c->grid.cols; i++) {
        const size_t index = at * c->grid.cols + i;
        const double ref = (double)c->grid.d->reference[index], n = row->holders[i];
        if (row->holders[i] > 1) {
            const double sum = fabs(row->sum[i] - ref), mean = fabs(row->sum[i] / n - ref);
            row->excess[i] += row->sum[i] - ref;
            f->shared++;
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
static void fold_copies(fold *f, const ari_case *c, fold_row *row, ari_axes over, int key)
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
    f->beside_vector = f->sum_error;
    for (size_t i = 0; i < c->grid.cols; i++) {
        f->beside_vector -= row->excess[i] * row->excess[i] * (double)c->grid.cols / (double)(f->shared + !f->shared);
        row->excess[i] = 0.0;
    }
}

static bool others_are_zero(const ari_survey *s, int ranks)
{
    for (int r = 0; r < ranks; r++) {
        if (s->rank[r].different > 0 && s->rank[r].zero < s->rank[r].different)
            return false;
    }
    return true;
}

static void say_over(ari_trace *t, ari_axes over)
{
    char text[ARI_AXES_TEXT];
    ari_words(t, "over", "%s", ari_axes_text(text, over, " and "));
}

static void found_sum(ari_trace *t, const ari_case *c, const fold *sums, ari_axes over, bool beside)
{
    const ari_difference *d = c->grid.d;
    const ari_survey *s = &c->survey;
    const int right = s->holding_ranks - s->wrong_ranks;
    ari_found(t, ARI_FOUND_SUM, right == 1 && others_are_zero(s, d->ranks) ? ARI_IF(ONE) : 0);
    for (int i = 0; i < ARI_LAYOUT_AXES; i++) /* what is of tensor-parallel ranks needs no saying */
        t->is |= over & ari_layout_axes[i].axes & ~(ari_axes)ARI_CUTS_FEATURES ? ari_of_axis(i) : 0;
    t->is |= beside ? ARI_IF(ROWS) : 0;
    say_over(t, over);
    ari_words(t, "holders", "%s", s->whole ? "the ranks" : "the ranks that hold copies of an element");
    ari_number(t, "worst", sums->worst / s->max_reference);
    ari_text who = ari_list(t, "who");
    if (right == 0)
        ari_say(&who, "no rank");
    else
        ari_say_ranks(&who, c, true);
    ari_say(&who, right > 1 ? " have" : " has");
}

static void found_mean(ari_trace *t, const ari_case *c, const fold *sums, ari_axes over)
{
    ari_found(t, ARI_FOUND_MEAN, 0);
    say_over(t, over);
    ari_number(t, "worst", sums->worst_mean / c->survey.max_reference);
}

/* What the copies are, if they are that in every group of this kind. */
typedef enum relation { UNRELATED, ADD_UP, ADD_UP_BESIDE_A_VECTOR, AVERAGE } relation;

static relation relation_in(fold *sums, const ari_case *c, fold_row *row, ari_axes over)
{
    /* Copies 1% apart whose sum is within 0.1% of the reference: of many elements that is no accident; of few, ask for
     * what rounding of the copies to fp32 leaves. */
    const double tolerance = c->survey.shared >= 64 ? 1e-3 : 1e-5;
    relation all = UNRELATED;
    for (int key = 0; key < ari_groups(c->grid.d, over); key++) {
        fold one = {0};
        fold_copies(&one, c, row, over, key);
        const bool far = isfinite(one.apart) && one.apart >= 1e-4 * one.scale && one.scale > 0.0 && one.lone == 0;
        /* What rounding may leave, and far less than the copies are apart: of many elements no accident either. */
        const double off = fmax(c->absolute, c->grid.d->allowed);
        const double noise = c->survey.shared < 64 ? 0.0 : off * off * (double)c->survey.shared;
        const double rounding = fmin(noise, 1e-3 * one.apart), exact = tolerance * tolerance;
        const relation mine = far && one.sum_error <= fmax(exact * one.scale, rounding)    ? ADD_UP
                              : far && one.mean_error <= fmax(exact * one.apart, rounding) ? AVERAGE
                              : far && ari_is_activation(c->grid.d) && one.shared >= LEAST_ROWS * c->grid.cols &&
                                      one.beside_vector <= fmax(exact * one.scale, rounding)
                                  ? ADD_UP_BESIDE_A_VECTOR
                                  : UNRELATED;
        if (mine == UNRELATED || (key > 0 && mine != all))
            return UNRELATED;
        all = mine;
        sums->worst = fmax(sums->worst, one.worst);
        sums->worst_mean = fmax(sums->worst_mean, one.worst_mean);
    }
    return all;
}

ar_status ari_measure_sum(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    /* All ranks first, then groups along one axis, then along two. */
    static const ari_axes kinds[] = {ARI_ALL_AXES,
                                     ARI_CUTS_FEATURES,
                                     ARI_CUTS_POSITIONS,
                                     ARI_CUTS_SAMPLES,
                                     ARI_CUTS_LAYERS,
                                     ARI_CUTS_DATA,
                                     ARI_CUTS_FEATURES | ARI_CUTS_POSITIONS,
                                     ARI_CUTS_FEATURES | ARI_CUTS_SAMPLES};
    if (c->survey.disagree == 0 || c->survey.total.nan > 0)
        return AR_OK;
    ar_status st = AR_OK;
    fold_row row = {NULL, NULL, NULL, NULL};
    AR_TRY_TO(done, st, ari_alloc_zero((void **)&row.sum, g->cols, sizeof *row.sum, g->d->name));
    AR_TRY_TO(done, st, ari_alloc_zero((void **)&row.apart, g->cols, sizeof *row.apart, g->d->name));
    AR_TRY_TO(done, st, ari_alloc_zero((void **)&row.excess, g->cols, sizeof *row.excess, g->d->name));
    AR_TRY_TO(done, st, ari_alloc_zero((void **)&row.holders, g->cols, sizeof *row.holders, g->d->name));
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds && t->kind == ARI_FOUND_NOTHING; i++) {
        fold sums = {0};
        const relation is = relation_in(&sums, c, &row, kinds[i]);
        const ari_axes over = kinds[i] == ARI_ALL_AXES ? ari_apart_over(g->d) : kinds[i];
        if (is == ADD_UP || is == ADD_UP_BESIDE_A_VECTOR)
            found_sum(t, c, &sums, over, is != ADD_UP);
        else if (is == AVERAGE)
            found_mean(t, c, &sums, over);
    }
done:
    free(row.sum);
    free(row.apart);
    free(row.excess);
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

static void found_own_block(ari_trace *t, const ari_case *c, int dim, bool zero)
{
    const ari_grid *g = &c->grid;
    const int n = g->d->ranks;
    size_t start = 0, count = 0;
    ar_split_uneven(g->shape[dim], n, n - 1, &start, &count);
    ari_found(t, ARI_FOUND_OWN_BLOCK, zero ? ARI_IF(ZERO) : 0);
    ari_words(t, "axis", "%s", ari_dim_name(g, dim, true));
    ari_words(t, "range", count > 0 ? " (rank %d: %zu..%zu)" : "", g->d->first_rank + n - 1, start, start + count - 1);
}

ar_status ari_measure_own_block(ari_trace *t, const ari_case *c)
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
            found_own_block(t, c, dim, own[dim].zero);
            return AR_OK;
        }
    }
    return AR_OK;
}

/* --- the tokens that a rank has between the tensor-parallel regions ----------------------------------------------- */

/* Whether element i of a run, which lies in [.., positions, features] of its rank, is among the rank's own positions: of
 * those that a tensor-parallel group has at once each rank owns as many, one after the other. */
static bool is_own_token(const ari_case *c, const ari_run *run, size_t i)
{
    const ari_rank_copy *copy = &c->grid.d->copy[run->rank];
    const size_t features = copy->shape[copy->ndim - 1], positions = copy->shape[copy->ndim - 2];
    const size_t tp = (size_t)ari_along(c->grid.d, ARI_CUTS_FEATURES), at = (run->at + i) / features % positions;
    return at / (positions / tp) == (size_t)run->rank % tp;
}

/* Every rank's own tokens are right, and all others are zero. */
ar_status ari_measure_own_tokens(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    ari_runs it = ari_runs_of(&c->grid);
    ari_run run;
    size_t others = 0;
    if (!d->sp || !ari_is_activation(d) || d->ndim < 3 || c->survey.total.zero < c->survey.total.different)
        return AR_OK;
    for (int r = 0; r < d->ranks; r++) {
        if (d->copy[r].ndim < 3 || d->copy[r].shape[d->copy[r].ndim - 2] % (size_t)ari_along(d, ARI_CUTS_FEATURES) != 0)
            return AR_OK;
    }
    while (ari_runs_next(&it, &run)) {
        for (size_t i = 0; i < run.count; i++) {
            const bool own = is_own_token(c, &run, i);
            if (own ? ari_run_differs(&c->grid, &run, i) : !(run.value[i] == 0.0f))
                return AR_OK;
            others += !own;
        }
    }
    if (others > 0)
        ari_found(t, ARI_FOUND_OWN_TOKENS, 0);
    return AR_OK;
}

/* --- some copies are right, some are not -------------------------------------------------------------------------- */

ar_status ari_measure_drift(ari_trace *t, const ari_case *c)
{
    const ari_survey *s = &c->survey;
    if (s->disagree == 0 || s->wrong_ranks == s->holding_ranks)
        return AR_OK;
    ari_found(t, ARI_FOUND_DRIFT, 0);
    ari_number(t, "largest", s->total.max_difference);
    return AR_OK;
}

/* --- a rank kept its own part of a sum --------------------------------------------------------------------------- */

/* Some ranks have the sum or the mean, the others their own part of it: unrelated to what the rest adds, v*r is v*v of a
 * sum of dp parts, v*v/dp of a mean. */
ar_status ari_measure_own_part(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    const ari_survey *s = &c->survey;
    const int dp = ari_along(d, ARI_CUTS_DATA);
    bool sum = true, mean = true;
    if (d->pass != 'g' || dp < 2 || s->disagree == 0 || s->wrong_ranks == s->holding_ranks || s->total.nan > 0)
        return AR_OK;
    for (int r = 0; r < d->ranks; r++) {
        const ari_tally *own = &s->rank[r];
        const double share = own->vr / own->rr, over = own->vv / own->vr;
        if (own->different == 0)
            continue;
        if (own->different < 64 || own->kept * 20 > own->held || !(ari_cosine(own) > 0.15))
            return AR_OK;
        sum = sum && share <= 0.9 && fabs(over - 1.0) <= 0.3;
        mean = mean && fabs(share - 1.0) <= 0.3 && fabs(over / dp - 1.0) <= 0.3;
    }
    if (!sum && !mean)
        return AR_OK;
    ari_found(t, ARI_FOUND_OWN_PART, mean ? ARI_IF(AVERAGE) : 0);
    ari_number(t, "share", s->total.vr / s->total.rr);
    return AR_OK;
}

/* --- a rank holds another rank's shard ---------------------------------------------------------------------------- */

/* Rows that every rank's box k has: where the parts are uneven, the smallest one's. */
static size_t common_rows(const ari_grid *g, size_t k)
{
    size_t rows = SIZE_MAX;
    for (int r = 0; r < g->d->ranks; r++) {
        const ar_layout *o = g->d->copy[r].layout;
        if (k < o->nbox && o->box[k].extent[0] < rows)
            rows = o->box[k].extent[0];
    }
    return rows;
}

/* Whether what rank r holds in box k is, bit for bit, the reference where `from` begins: all of that block, or, where
 * the parts are uneven, its first part; rows that not every rank has may be right in their own place. Counts distinct
 * neighbours too: a constant block equals many places and proves nothing. */
static bool holds_block(const ari_grid *g, int r, size_t k, const ar_box *from, bool *varies)
{
    const ar_box *mine = &g->d->copy[r].layout->box[k];
    size_t shift_stride[AR_MAX_DIMS], stride = 1;
    const size_t common = g->d->ndim > 1 ? common_rows(g, k) : SIZE_MAX;
    for (int i = g->d->ndim - 1; i >= 0; i--) {
        const size_t extent = i == 0 && mine->extent[i] > common ? common : mine->extent[i];
        if (extent > from->extent[i])
            return false;
        shift_stride[i] = stride;
        stride *= g->shape[i];
    }
    ptrdiff_t shift = 0;
    for (int i = 0; i < g->d->ndim; i++)
        shift += ((ptrdiff_t)from->global[i] - (ptrdiff_t)mine->global[i]) * (ptrdiff_t)shift_stride[i];
    ari_runs it = ari_runs_of_rank(g, r);
    ari_run run;
    bool seen = false;
    float first = 0.0f;
    *varies = false;
    while (ari_runs_next(&it, &run)) {
        if (run.box != k)
            continue;
        const size_t row = g->nd > 1 ? ari_grid_index(g, run.index, 0) - mine->global[0] : 0;
        const bool beyond = row >= common, there = row < from->extent[0];
        for (size_t i = 0; i < run.count; i++) {
            if (beyond && ari_same_bits(run.value[i], run.ref[i]))
                continue;
            if (!there || !ari_same_bits(run.value[i], run.ref[(ptrdiff_t)i + shift]))
                return false;
            *varies = *varies || (seen && !ari_same_bits(first, run.value[i]));
            first = run.value[i];
            seen = true;
        }
    }
    return seen;
}

typedef struct source {
    int rank; /* -1: none */
    size_t box;
} source;

/* Whose block it is that rank r holds in box k; its own if that is right. */
static source find_source(const ari_grid *g, int r, size_t k)
{
    const ari_difference *d = g->d;
    const ar_box *own = &d->copy[r].layout->box[k];
    bool varies = false;
    if (holds_block(g, r, k, own, &varies))
        return (source){r, k};
    for (int q = 0; q < d->ranks; q++) {
        const ar_layout *o = d->copy[q].layout;
        for (size_t i = 0; i < o->nbox; i++) {
            const size_t j = (k + i) % o->nbox; /* the same box first */
            if (holds_block(g, r, k, &o->box[j], &varies) && varies)
                return (source){q, j};
        }
    }
    return (source){-1, 0};
}

/* Fills from[ranks * AR_MAX_BOXES]; false unless every box is some block of the reference and one is not its own. */
static bool find_sources(const ari_grid *g, source *from)
{
    bool moved = false;
    for (int r = 0; r < g->d->ranks; r++) {
        for (size_t k = 0; k < g->d->copy[r].layout->nbox; k++) {
            source *s = &from[(size_t)r * AR_MAX_BOXES + k];
            *s = find_source(g, r, k);
            if (s->rank < 0)
                return false;
            moved = moved || s->rank != r || s->box != k;
        }
    }
    return moved;
}

typedef struct movement {
    bool same_box; /* no block went to a box of another number */
    int repeated;  /* the rank whose shard all wrong ranks hold; -1: several */
    int shift;     /* rank r holds the shard of (r + shift) mod N; 0: no such rule */
    int pairs;
} movement;

static movement describe(const ari_grid *g, const source *from)
{
    const int n = g->d->ranks;
    movement m = {.same_box = true, .repeated = -2, .shift = -1};
    for (int r = 0; r < n; r++) {
        for (size_t k = 0; k < g->d->copy[r].layout->nbox; k++) {
            const source *s = &from[(size_t)r * AR_MAX_BOXES + k];
            const int shift = (s->rank - r + n) % n;
            m.shift = m.shift < 0 || m.shift == shift ? shift : 0;
            m.same_box = m.same_box && s->box == k;
            if (s->rank == r && s->box == k)
                continue;
            m.repeated = m.repeated == -2 || m.repeated == s->rank ? s->rank : -1;
        }
    }
    return m;
}

static void say_pairs(ari_text *t, const ari_grid *g, const source *from)
{
    const int first = g->d->first_rank;
    int shown = 0;
    for (int r = 0; r < g->d->ranks; r++) {
        for (size_t k = 0; k < g->d->copy[r].layout->nbox; k++) {
            const source *s = &from[(size_t)r * AR_MAX_BOXES + k];
            if ((s->rank == r && s->box == k) || shown >= 4)
                continue;
            ari_say(t, shown++ ? ", " : "");
            if (g->d->copy[r].layout->nbox > 1)
                ari_say(t, "rank %d's part %zu is rank %d's part %zu", first + r, k, first + s->rank, s->box);
            else
                ari_say(t, "rank %d has rank %d's", first + r, first + s->rank);
        }
    }
}

/* KV head r mod n_kv in place of floor(r n_kv / N), where every head is held by N / n_kv ranks. */
static bool is_wrong_head(const ari_grid *g, const source *from)
{
    const int n = g->d->ranks, copies = g->d->copy[0].layout->replicas;
    if (copies < 2 || copies >= n || n % copies != 0)
        return false;
    const int heads = n / copies;
    for (int r = 0; r < n; r++) {
        if (from[(size_t)r * AR_MAX_BOXES].rank / copies != r % heads)
            return false;
    }
    return true;
}

static void found_shards(ari_trace *t, const ari_case *c, const source *from)
{
    const ari_grid *g = &c->grid;
    const movement m = describe(g, from);
    ari_found(t, ARI_FOUND_SHARDS, 0);
    if (is_wrong_head(g, from))
        t->is |= ARI_IF(HEADS);
    else if (!m.same_box)
        t->is |= ARI_IF(PACKED);
    else if (m.repeated >= 0)
        t->is |= ARI_IF(SAME);
    else if (m.shift > 0)
        t->is |= ARI_IF(SHIFT);
    const ari_rank_copy *last = &g->d->copy[g->d->ranks - 1];
    if ((m.repeated >= 0 || !m.same_box) && ari_is_activation(g->d) && g->nd > 1 && last->shape[0] < g->shape[0] &&
        last->ndim == g->d->ndim && memcmp(&last->shape[1], &g->shape[1], sizeof *g->shape * (size_t)(g->nd - 1)) == 0)
        t->is |= ARI_IF(SAMPLES);
    ari_count(t, "heads",
              g->d->copy[0].layout->replicas > 0 ? (size_t)(g->d->ranks / g->d->copy[0].layout->replicas) : 0);
    ari_count(t, "shift", m.shift > 0 ? (size_t)m.shift : 0);
    ari_text pairs = ari_list(t, "pairs");
    say_pairs(&pairs, g, from);
}

ar_status ari_measure_shards(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    source *from = NULL;
    if (c->survey.whole || g->d->ranks < 2)
        return AR_OK;
    AR_TRY(ari_alloc((void **)&from, (size_t)g->d->ranks, AR_MAX_BOXES * sizeof *from, g->d->name));
    if (find_sources(g, from))
        found_shards(t, c, from);
    free(from);
    return AR_OK;
}

/* --- all but the first tensor-parallel group ---------------------------------------------------------------------- */

ar_status ari_measure_world_rank(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    const ari_survey *s = &c->survey;
    const int tp = ari_along(d, ARI_CUTS_FEATURES), dp = ari_along(d, ARI_CUTS_SAMPLES);
    /* Of initial values those of another rank's place are somebody's, or there are none: any others were drawn anew. */
    if (dp < 2 || tp < 2 || (d->pass == 'i' && s->total.zero < s->total.different))
        return AR_OK;
    for (int r = 0; r < d->ranks; r++) {
        const ari_tally *own = &s->rank[r];
        if (r < tp ? own->different > 0 : own->held == 0 || own->different * 2 < own->held)
            return AR_OK;
    }
    ari_found(t, ARI_FOUND_WORLD_RANK, 0);
    ari_words(t, "zeros", "%s", s->total.zero == s->total.different ? " and has zeros" : "");
    return AR_OK;
}
