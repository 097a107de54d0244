/* SPDX-License-Identifier: Apache-2.0 */
/* Copies of one value that should be equal: left partial, drifted apart, or summed over other ranks than share it. */
#include "verify/diagnose/hypothesis.h"

/* --- a sum (or an average) over the copies is the reference ------------------------------------------------------- */

enum { LEAST_ROWS = 8 }; /* in which a vector that is the same in all is no accident */

/* Relation of a group's copies to the reference; the last: none. */
typedef enum relation { ADD_UP, AVERAGE, ADD_UP_BESIDE_A_VECTOR, UNRELATED } relation;

/* Over the copies of one group's ranks. */
typedef struct fold {
    double *sum, *holders; /* [count] */
    double *first, *equal; /* [count]: the first copy; how many are equal to it */
    double *vector;        /* [cols]: what the sum has besides, the mean over the rows */
    double apart, scale;   /* squared, over all copies: copy - reference, reference */
    size_t rows;           /* in which there are several copies */
} fold;

static void fold_copies(fold *f, const ari_case *c, ari_axes over, int key)
{
    const ari_grid *g = &c->grid;
    memset(f->sum, 0, (4 * g->count + g->cols) * sizeof *f->sum);
    f->apart = f->scale = 0.0;
    f->rows = 0;
    for (ari_run run = ari_runs_of(g); ari_runs_next(&run);) {
        for (size_t i = 0; i < run.count && ari_in_group(g->d, run.rank, over, key); i++) {
            const double ref = (double)run.ref[i], apart = (double)run.value[i] - ref;
            const size_t at = run.index + i;
            f->first[at] = f->holders[at] > 0.0 ? f->first[at] : (double)run.value[i];
            f->equal[at] += f->first[at] == (double)run.value[i] ? 1.0 : 0.0;
            f->sum[at] += (double)run.value[i];
            f->holders[at] += 1.0;
            f->apart += apart * apart;
            f->scale += ref * ref;
        }
    }
    for (size_t i = 0; i < g->count; i++) {
        f->vector[i % g->cols] += f->holders[i] > 1.0 ? f->sum[i] - (double)g->d->reference[i] : 0.0;
        f->rows += i % g->cols == 0 && f->holders[i] > 1.0;
    }
}

/* The residual's squares under a relation; a part that only one rank holds has to be right, and of a part whose copies
 * are equal and right the reduction was not left out. */
static double left_by(double *worst, const fold *f, const ari_case *c, relation is)
{
    double left = 0.0;
    *worst = 0.0;
    for (size_t i = 0; i < c->grid.count; i++) {
        const double n = f->holders[i], vector = f->vector[i % c->grid.cols] / (double)f->rows;
        const double beside = is == ADD_UP_BESIDE_A_VECTOR && n > 1.0 ? vector : 0.0;
        const double off = fabs(f->sum[i] / (is == AVERAGE ? n : 1.0) - beside - (double)c->d->reference[i]);
        if ((n > 1.0 && f->equal[i] < n) || (n > 0.0 && ari_survey_bit(&c->survey, i))) {
            left += n * off * off;
            *worst = fmax(*worst, off);
        }
    }
    return left;
}

/* Copies 1% apart whose sum is within 0.1% of the reference: of many elements that is no accident; of few, ask for what
 * rounding of the copies to fp32 leaves, or for far less than the copies are apart. */
static relation relation_of(double *worst, const fold *f, const ari_case *c)
{
    const double tolerance = c->survey.shared >= 64 ? fmax(ARI_KNOWN, 0.25 * c->relative) : ARI_SUMS,
                 off = fmax(c->absolute, c->d->allowed);
    const double noise = c->survey.shared < 8 ? 0.0 : off * off * (double)c->survey.shared;
    const double rounding = fmin(noise, ARI_KNOWN * f->apart), exact = tolerance * tolerance;
    const bool far = isfinite(f->apart) && f->apart >= 1e-4 * f->scale && f->scale > 0.0;
    const bool rows = f->rows >= LEAST_ROWS && ari_is_activation(c->d);
    relation is = far ? ADD_UP : UNRELATED;
    while (is < UNRELATED && left_by(worst, f, c, is) > fmax(exact * (is == AVERAGE ? f->apart : f->scale), rounding))
        is += is == AVERAGE && !rows ? 2 : 1;
    return is;
}

static void found_sum(ari_trace *t, const ari_case *c, ari_axes over, bool beside)
{
    const ari_survey *s = &c->survey;
    const int right = s->holding_ranks - s->wrong_ranks;
    ari_trace_set(t, ARI_FOUND_SUM, right > 0 && s->total.zero == s->total.different ? ARI_IF(ONE) : 0);
    for (int i = 0; i < ARI_LAYOUT_AXES; i++) /* what is of tensor-parallel ranks needs no saying */
        t->flags |= over & ari_layout_axes[i].axes & ~(ari_axes)ARI_CUTS_FEATURES ? ari_of_axis(i) : 0;
    t->flags |= beside ? ARI_IF(ROWS) : 0;
    ARI_FACTS(t, {"holders", .text = s->whole ? "the ranks" : "the ranks that hold copies of an element"});
    ari_text who = ari_list(t, "who");
    if (right == 0)
        ari_say(&who, "no rank");
    else
        ari_say_ranks(&who, c, ARI_RANKS_RIGHT);
    ari_say(&who, right > 1 ? " have" : " has");
}

/* The relation that holds in every group of this kind. */
static relation relation_in(double *worst, fold *f, const ari_case *c, ari_axes over)
{
    relation all = UNRELATED;
    for (int key = 0; key < ari_groups(c->d, over); key++) {
        double own;
        fold_copies(f, c, over, key);
        const relation is = relation_of(&own, f, c);
        if (is == UNRELATED || (key > 0 && is != all))
            return UNRELATED;
        *worst = fmax(*worst, own);
        all = is;
    }
    return all;
}

/* --- of one branch alone ------------------------------------------------------------------------------------------ */

enum { MOST_BRANCHES = 8 };

/* What the module's own parts give its input's gradient: part[i], [count] of floats each. */
typedef struct branches {
    const char *name[MOST_BRANCHES];
    float *part[MOST_BRANCHES];
    size_t n;
} branches;

/* True if the copies add up to the reference, and to these branches once for each copy but one. */
static bool are_whole(const branches *b, unsigned mask, const fold *f, const ari_case *c)
{
    double left = 0.0;
    for (size_t i = 0; i < c->grid.count; i++) {
        double off = f->sum[i] - (double)c->d->reference[i];
        for (size_t k = 0; k < b->n; k++)
            off -= mask >> k & 1u ? (f->holders[i] - 1.0) * (double)b->part[k][i] : 0.0;
        left += off * off;
    }
    return left <= ARI_SEEN * ARI_SEEN * f->apart;
}

/* An input's gradient of which a part is shared out over the ranks and was not summed; the rest is whole on each. */
static ar_status look_at_branches(ari_trace *t, const ari_case *c, fold *f)
{
    branches b = {.n = 0};
    unsigned mask = 1;
    for (ari_walk w = ari_walk_of(c->known->reference, c->path, "b", c->own.step);
         b.n < MOST_BRANCHES && ari_walk_next(&w);) {
        if (w.t->count != c->grid.count || !ari_is_part_of(&w.key, c->own.name, c->own.stem))
            continue;
        AR_TRY(ari_read_values(&b.part[b.n], w.t, c->arena));
        b.name[b.n++] = w.t->name;
    }
    fold_copies(f, c, ARI_ALL_AXES, 0);
    while (mask < 1u << b.n && !are_whole(&b, mask, f, c))
        mask++;
    if (mask >= 1u << b.n || !(f->apart >= 1e-4 * f->scale))
        return AR_OK;
    found_sum(t, c, ari_apart_over(c->d), false);
    t->flags |= ARI_IF(SOME);
    ari_text parts = ari_list(t, "parts");
    for (size_t k = 0, said = 0; k < b.n; k++) {
        if (mask >> k & 1u)
            ari_say(&parts, "%s%s", said++ ? ", " : "", b.name[k]);
    }
    return AR_OK;
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
    char text[ARI_AXES_TEXT];
    double *sums;
    AR_TRY(ARI_TAKE(&sums, c->arena, 4 * g->count + g->cols, g->d->name));
    fold f = {.sum = sums,
              .holders = sums + g->count,
              .first = sums + 2 * g->count,
              .equal = sums + 3 * g->count,
              .vector = sums + 4 * g->count};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds && t->kind == ARI_FOUND_NOTHING; i++) {
        double worst = 0.0;
        const relation is = ari_along(g->d, kinds[i]) > 1 ? relation_in(&worst, &f, c, kinds[i]) : UNRELATED;
        const ari_axes over = kinds[i] == ARI_ALL_AXES ? ari_apart_over(g->d) : kinds[i];
        if (is == AVERAGE)
            ari_trace_set(t, ARI_FOUND_MEAN, 0);
        else if (is != UNRELATED)
            found_sum(t, c, over, is != ADD_UP);
        ARI_FACTS(t, {"over", .text = ari_axes_text(text, c, over, " and ")},
                  {"worst", .number = worst / c->survey.max_reference});
    }
    if (t->kind == ARI_FOUND_NOTHING && g->d->pass == 'b' && c->reference && c->known->reference) {
        AR_TRY(look_at_branches(t, c, &f));
        ARI_FACTS(t, {"over", .text = ari_axes_text(text, c, ari_apart_over(g->d), " and ")});
    }
    return AR_OK;
}

/* --- shards of a gradient were added to each other ---------------------------------------------------------------- */

/* Each of n blocks of a dimension is so many times the sum of all of them in the reference. */
typedef struct block_sum {
    int dim;
    size_t n;
    double factor;
} block_sum;

static double of_blocks(const ari_hypothesis *h, const ari_run *run, size_t i)
{
    const block_sum *b = h->of;
    const ari_grid *g = &h->c->grid;
    const size_t inner = ari_grid_inner(g, b->dim), index = run->index + i, at = index % (g->shape[b->dim] * inner);
    const size_t block = g->shape[b->dim] / b->n * inner, first = index - at + at % block;
    double sum = 0.0;
    for (size_t k = 0; k < b->n; k++)
        sum += (double)g->d->reference[first + k * block];
    return b->factor * sum;
}

/* True if so many ranks lie along a dimension of the mesh, so that a shard may be a single index. */
static bool has_ranks(const ari_case *c, size_t n)
{
    for (int i = ARI_LAYOUT_DP; i < ARI_LAYOUT_AXES; i++) {
        const ari_axes axes = ari_layout_axes[i].axes;
        if ((size_t)ari_ranks_along(&c->known->mesh, axes) == n || (size_t)ari_along(c->d, axes) == n)
            return true;
    }
    return false;
}

/* Every tensor-parallel rank's shard is the sum or the mean of all shards: a reduction over tp or the world of values
 * that are not replicated there. */
ar_status ari_measure_shards_added(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    const size_t tp = g->d->hidden ? ARI_MOST_RANKS : (size_t)ari_along(g->d, ARI_CUTS_FEATURES);
    block_sum b = {.dim = 0};
    ari_hypothesis h = {of_blocks, .c = c, .of = &b, .beside = ARI_SUMS * c->survey.max_reference};
    ari_residual left;
    for (; b.dim < g->nd; b.dim++) {
        const size_t size = g->shape[b.dim];
        for (size_t i = g->d->hidden ? 4 : 2 * tp; i <= 2 * tp + 1; i++) { /* of i / 2 shards the sum or the mean */
            b.n = i / 2;
            h.factor = i % 2 ? 1.0 : (double)b.n;
            b.factor = h.factor / (double)b.n;
            if (b.n < 2 || size % b.n != 0 || (size < 2 * b.n && !has_ranks(c, b.n)) || !ari_holds_all(&left, &h))
                continue;
            ari_trace_set(t, ARI_FOUND_SHARDS_ADDED, i % 2 ? ARI_IF(AVERAGE) : 0);
            ari_explained(t, &left);
            ARI_FACTS(t, {"tp", .count = b.n});
            return AR_OK;
        }
    }
    return AR_OK;
}

/* --- summed over other ranks than those that share a part --------------------------------------------------------- */

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

/* For each rank, the first rank with the same part, and the first with the same bits. */
typedef struct alike {
    int part[ARI_MOST_RANKS], bits[ARI_MOST_RANKS];
} alike;

/* False unless all ranks hold one box each, of one extent. */
static bool find_alike(alike *a, const ari_difference *d)
{
    const size_t bytes = ari_volume(d->copy[0].shape, d->ndim) * sizeof(float);
    const size_t place = (size_t)d->ndim * sizeof *d->shape;
    for (int r = 0; r < d->ranks; r++) {
        const ar_layout *o = d->copy[r].layout;
        if (o->nbox != 1 || memcmp(o->box[0].extent, d->copy[0].layout->box[0].extent, place) != 0)
            return false;
        int *p = &a->part[r], *q = &a->bits[r];
        for (*p = 0; memcmp(d->copy[*p].layout->box[0].global, o->box[0].global, place) != 0;)
            ++*p;
        for (*q = 0; memcmp(d->copy[*q].local, d->copy[r].local, bytes) != 0;)
            ++*q;
    }
    return true;
}

/* True if every rank has the bits of a rank with another part; lists these groups. */
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

/* True if the ranks' parts of an activation, of other samples each, are bit for bit one, which in the reference they are
 * not. What a rank's samples have in common, as the rows of a table of positions, is no matter of samples. */
static bool are_one(const ari_case *c, const alike *a)
{
    const ari_difference *d = c->d;
    bool one = ari_is_activation(d) && c->survey.total.different >= 16, apart = false, varies = false;
    for (int r = 1; r < d->ranks; r++)
        one = one && a->bits[r] == a->bits[a->part[r]] && (a->part[r] == 0 || a->bits[r] == 0);
    for (ari_run run = ari_runs_of_rank(&c->grid, 0); one && !(apart && varies) && ari_runs_next(&run);) {
        for (size_t i = 0; i < run.count; i++) {
            apart = apart || reference_in(d, d->ranks - 1, run.index + i) != (double)run.ref[i];
            varies = varies || run.value[i] != d->copy[0].local[(run.at + i) % ari_grid_inner(&c->grid, 0)];
        }
    }
    return apart && varies;
}

/* Ranks that share a part each contribute to it. If the sum runs over another group, its ranks hold one value of
 * different parts, and the groups' values add up to all parts of the reference. */
ar_status ari_measure_group(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->d;
    alike a;
    bool all_differ = true;
    double left = 0.0, all = 0.0;
    for (int r = 0; r < d->ranks; r++)
        all_differ = all_differ && c->survey.rank[r].different > 0;
    if (!all_differ || d->ranks < 2 || d->ranks > ARI_MOST_RANKS || !find_alike(&a, d))
        return AR_OK;
    if (ari_along(d, ARI_CUTS_SAMPLES) > 1 && are_one(c, &a)) {
        ari_trace_set(t, ARI_FOUND_GROUP, ARI_IF(SAME));
        (void)are_grouped(t, &a, d->ranks);
    }
    if (d->ranks < 4 || c->survey.disagree == 0 || ari_along(d, ARI_CUTS_SAMPLES) > 1)
        return AR_OK;
    for (ari_run run = ari_runs_of_rank(&c->grid, 0); ari_runs_next(&run);) {
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
    ari_trace_set(t, ARI_FOUND_GROUP, 0);
    if (!are_grouped(t, &a, d->ranks))
        ari_trace_clear(t);
    return AR_OK;
}
