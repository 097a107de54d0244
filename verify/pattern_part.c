/* SPDX-License-Identifier: Apache-2.0 */
/* What a loss, an embedding, a gradient or a place suggest: the findings that lean on the tensor's name and pass. */
#include "verify/pattern_impl.h"

static bool is_off(const void *user, int rank)
{
    const ari_survey *s = user;
    return s->rank[rank].different > 0;
}

/* --- the loss
 * --------------------------------------------------------------------------------------------------------- */

ar_status ari_detect_loss(ari_clue *f, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    if (d->pass != 'f' || c->grid.count != 1 || !ari_name_has(d, "loss") || c->survey.total.nan > 0)
        return AR_OK;
    const double ref = (double)d->reference[0];
    double low = INFINITY, high = -INFINITY;
    ari_runs it = ari_runs_of(&c->grid);
    ari_run run;
    while (ari_runs_next(&it, &run)) {
        low = (double)run.value[0] < low ? (double)run.value[0] : low;
        high = (double)run.value[0] > high ? (double)run.value[0] : high;
    }
    ari_text t = ari_find(f, ARI_TRACE + 2);
    if (c->survey.disagree > 0) {
        ari_say(
            &t,
            "softmax maximum: the ranks do not agree on the loss (from %.9g to %.9g, reference %.9g); each took the "
            "exponentials relative to its own shard's maximum, but denominators add up only under one maximum (an "
            "all-reduce(max)); or each rank has the loss of its own tokens",
            low, high, ref);
        return AR_OK;
    }
    if (d->ranks > 1 && fabs(low - ref - log((double)d->ranks)) <= 1e-5) {
        f->confidence = ARI_IDENTITY;
        ari_say(
            &t,
            "the loss is the reference plus log(%d) = %.6f: softmax denominators added over ranks that each hold the "
            "whole vocabulary",
            d->ranks, log((double)d->ranks));
        return AR_OK;
    }
    ari_say(
        &t,
        "target logit: the loss is off by %.3g (%.2g%%) and equal on every rank; if the logits are right, the target's "
        "logit came from the wrong shard (check ids at a shard's edge), labels were shifted inside a shard, or the "
        "number of targets is another",
        low - ref, 100.0 * (low - ref) / fabs(ref));
    return AR_OK;
}

/* --- whole rows of an embedding
 * ---------------------------------------------------------------------------------------- */

enum { ROWS_COMPARED = 64 };

static bool row_has_difference(const ari_case *c, size_t row)
{
    for (size_t i = 0; i < c->grid.cols; i++) {
        if (ari_survey_bit(&c->survey, row * c->grid.cols + i))
            return true;
    }
    return false;
}

static bool same_reference_row(const ari_grid *g, size_t a, size_t b)
{
    return memcmp(g->d->reference + a * g->cols, g->d->reference + b * g->cols, g->cols * sizeof(float)) == 0;
}

/* Tokens with equal reference rows looked up one id. */
typedef struct looked_up {
    size_t row[ROWS_COMPARED]; /* a wrong token of each id */
    size_t ids, wrong, right;  /* right: tokens of these ids without a difference */
    bool many;
} looked_up;

static void find_ids(looked_up *l, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    for (size_t row = 0; row < g->rows && !l->many; row++) {
        size_t i = 0;
        if (!row_has_difference(c, row))
            continue;
        l->wrong++;
        while (i < l->ids && !same_reference_row(g, row, l->row[i]))
            i++;
        if (i < l->ids)
            continue;
        l->many = l->ids == ROWS_COMPARED;
        if (!l->many)
            l->row[l->ids++] = row;
    }
    for (size_t row = 0; row < g->rows && !l->many; row++) {
        for (size_t i = 0; i < l->ids; i++)
            l->right += same_reference_row(g, row, l->row[i]) && !row_has_difference(c, row);
    }
}

static void detect_lookup(ari_clue *f, const ari_case *c)
{
    const ari_survey *s = &c->survey;
    looked_up l = {.ids = 0};
    find_ids(&l, c);
    if (l.many || l.right > 0 || l.ids > (size_t)c->grid.d->ranks || l.wrong == c->grid.rows)
        return;
    const bool none = s->total.zero == s->total.different;
    ari_text t = ari_find(f, ARI_TRACE + 8);
    ari_say(
        &t,
        "ids at a shard's edge: the %zu wrong token%s hold%s %zu id%s (equal reference rows), and no token with %s is "
        "right; the first or last id of a shard belongs to %s",
        l.wrong, l.wrong == 1 ? "" : "s", l.wrong == 1 ? "s" : "", l.ids, l.ids == 1 ? "" : "s",
        l.ids == 1 ? "it" : "them", none ? "no shard" : "two shards, whose rows were added");
    if (s->total.max_difference > 1e6 * s->max_reference)
        ari_say(&t, " as bit patterns (differences up to %.1e)", s->total.max_difference);
}

/* Whether row `id` is the first or the last of some rank's shard, and not of the whole. */
static bool is_edge(const ari_difference *d, size_t id)
{
    for (int r = 0; r < d->ranks; r++) {
        const ar_layout *o = d->copy[r].layout;
        for (size_t k = 0; k < o->nbox; k++) {
            const size_t start = o->box[k].global[0], end = start + o->box[k].extent[0];
            if ((id == start && start > 0) || (id + 1 == end && end < d->shape[0]))
                return true;
        }
    }
    return false;
}

static void detect_edge_rows(ari_clue *f, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    const ari_survey *s = &c->survey;
    if (s->hit[0] > 2 * (size_t)g->d->ranks)
        return;
    for (size_t id = 0; id < g->shape[0]; id++) {
        if (s->hits[0][id] > 0 && !is_edge(g->d, id))
            return;
    }
    ari_text t = ari_find(f, ARI_TRACE + 6), *text = &t;
    ari_say(text, "ids at a shard's edge: only ");
    ari_say_indices(text, g, s, 0);
    ari_say(text, " differ%s, the first or last of a shard: they belong to two shards, or to none",
            s->hit[0] == 1 ? "s" : "");
}

ar_status ari_detect_rows(ari_clue *f, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    if (d->pass == 'f' && d->ndim >= 2 && ari_is_embedding(d))
        detect_lookup(f, c);
    else if (d->pass == 'g' && d->ndim == 2 && (ari_is_embedding(d) || ari_name_has(d, "lm_head")))
        detect_edge_rows(f, c);
    return AR_OK;
}

/* --- gradients of parameters
 * ------------------------------------------------------------------------------------------- */

static double cosine(const ari_tally *t)
{
    return t->vr / sqrt(t->vv * t->rr);
}

/* Elements of rank r up to the last that is not zero, if the reference goes on. */
static size_t written(const ari_difference *d, int r)
{
    size_t n = d->copy[r].shape[0];
    while (n > 0 && d->copy[r].local[n - 1] == 0.0f)
        n--;
    return n;
}

ar_status ari_detect_bias(ari_clue *f, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    const ari_tally *all = &c->survey.total;
    const size_t tokens = d->batch * d->seq;
    if (d->pass != 'g' || d->ndim != 1 || !ari_leaf_has(d, "bias") || all->kept * 10 > all->held ||
        all->different < 16 || !(fabs(cosine(all)) < 0.7))
        return AR_OK;
    size_t first = SIZE_MAX, extent = 0;
    bool tail = true;
    for (int r = 0; r < d->ranks; r++) {
        const size_t n = c->survey.rank[r].held > 0 ? written(d, r) : first;
        tail = tail && (first == SIZE_MAX || n == first);
        first = n;
        extent = d->copy[r].shape[0];
    }
    tail = tail && first < extent && first > 0;
    ari_text t = ari_find(f, tail && first == tokens ? ARI_TRACE + 5 : ARI_SHAPE);
    ari_say(
        &t,
        "a bias gradient summed over the wrong axis: it is unrelated to the reference (cosine %.2f over %zu elements)",
        cosine(all), all->different);
    if (tail && first == tokens)
        ari_say(
            &t,
            ", and exactly the first %zu elements, one a token, are written: features were summed in place of tokens",
            first);
    else if (tail)
        ari_say(&t, ", and zero from element %zu on, as if an element were a token", first);
    else
        ari_say(&t, "; a bias gradient sums dY over all tokens of all samples, one sum a feature");
    return AR_OK;
}

/* "about 1/8: one of 8 samples", where a size of the run is near the ratio. */
static void say_share(ari_text *t, const ari_difference *d, double share)
{
    const double b = (double)d->batch, n = d->ranks;
    /* Single samples differ; half as much again either way still tells 1/8 from 1/2. */
    if (b > 1 && share * b > 2.0 / 3 && share * b < 1.5)
        ari_say(t,
                ", about 1/%zu: what one of %zu samples contributes; leading dimensions not flattened, or the last "
                "micro-batch alone counted",
                d->batch, d->batch);
    else if (n > 1 && share * n > 2.0 / 3 && share * n < 1.5)
        ari_say(t, ", about 1/%d: what one of %d ranks contributes; a reduction is missing", d->ranks, d->ranks);
    else
        ari_say(t, ": samples, tokens or one of two uses of a tied weight are left out");
}

ar_status ari_detect_gradient(ari_clue *f, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    const ari_tally *all = &c->survey.total;
    if (d->pass != 'g' || all->different < 64 || all->kept * 10 > all->held)
        return AR_OK;
    const double angle = cosine(all), share = all->vr / all->rr;
    if (angle >= 0.2 && share > 0.0 && share < 0.9) {
        ari_text t = ari_find(f, ARI_STATISTIC + 5);
        ari_say(
            &t,
            "a part of the sum is missing: the gradient points the reference's way (cosine %.2f), its share of it is "
            "%.3g",
            angle, share);
        say_share(&t, d, share);
    } else if (fabs(angle) < 0.2) {
        ari_text t = ari_find(f, ARI_STATISTIC);
        ari_say(&t,
                "computed from other data: the gradient is unrelated to the reference (cosine %.3f, size %.3g of it); "
                "if dY and "
                "this module's dX are right, then the saved input is not: overwritten in place by a reduction or by a "
                "second "
                "forward, or released too early",
                angle, sqrt(all->vv / all->rr));
    }
    return AR_OK;
}

/* --- places
 * ----------------------------------------------------------------------------------------------------------- */

/* The one rank in whose even block along `dim` all differences lie; -1 if there is none. */
static int only_block(const ari_case *c, int dim)
{
    const ari_grid *g = &c->grid;
    if (g->d->ranks < 2 || g->shape[dim] < (size_t)g->d->ranks)
        return -1;
    for (int r = 0; r < g->d->ranks; r++) {
        size_t start = 0, count = 0, inside = 0;
        ar_split_uneven(g->shape[dim], g->d->ranks, r, &start, &count);
        for (size_t i = start; i < start + count; i++)
            inside += c->survey.hits[dim][i] > 0;
        if (inside == c->survey.hit[dim] && inside * 2 > count)
            return r;
    }
    return -1;
}

static void place_of_rank(ari_clue *f, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    const ari_survey *s = &c->survey;
    if (s->wrong_ranks < s->holding_ranks) {
        ari_text t = ari_find(f, ARI_PLACE + 6);
        ari_say(&t, "the shards of all other ranks are right; ");
        ari_say_ranks(&t, d->ranks, is_off, s);
        ari_say(&t, " read other weights, inputs or state, or computed before its data arrived");
        return;
    }
    for (int dim = c->grid.nd - 1; dim >= 0 && s->whole; dim--) {
        const int r = only_block(c, dim);
        if (r < 0)
            continue;
        ari_text t = ari_find(f, ARI_PLACE + 6);
        ari_say(&t, "only ");
        ari_say_indices(&t, &c->grid, s, dim);
        ari_say(
            &t,
            " differ%s, the block that rank %d of %d contributes, and every copy has it so: look at that rank's part "
            "before it was gathered",
            s->hit[dim] == 1 ? "s" : "", r, d->ranks);
        return;
    }
}

ar_status ari_detect_place(ari_clue *f, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    const ari_survey *s = &c->survey;
    const bool activation = (g->d->pass == 'f' || g->d->pass == 'b') && g->d->ndim >= 3;
    if (activation && g->shape[0] > 1 && s->hits[0][0] == 0 && s->hit[0] + 1 == g->shape[0]) {
        ari_text t = ari_find(f, ARI_PLACE + 8);
        ari_say(&t,
                "only the first of %zu samples is right: leading dimensions not flattened, or a mask, a position or an "
                "offset taken from the first sample",
                g->shape[0]);
        return AR_OK;
    }
    place_of_rank(f, c);
    if (f->confidence == ARI_SILENT && activation && g->d->ndim == 3 && s->hits[1][0] == 0 &&
        s->hit[1] * 4 > g->shape[1]) {
        ari_text t = ari_find(f, ARI_PLACE);
        ari_say(&t, "the first tokens are right and later ones are not: a mask, a position offset or a chunk's border");
    }
    return AR_OK;
}

ar_status ari_detect_anything(ari_clue *f, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    const ari_tally *all = &c->survey.total;
    ari_text t = ari_find(f, ARI_LAST_RESORT);
    if (d->pass == 'i')
        ari_say(&t,
                "other initial values: another seed, another name in the random key, or an index that is not the full "
                "tensor's");
    else if (d->pass == 'n')
        ari_say(&t,
                "if the gradient is right, look at the optimizer: step count, state, weight decay, clipping, or a step "
                "taken before the reduced gradient was copied back");
    else if (d->pass == 'g')
        ari_say(
            &t,
            "if this is the first difference, the gradients around it are right: look at this parameter's own sum over "
            "tokens and ranks, and at the saved input");
    else
        ari_say(&t,
                "no known trace; if this is the first difference, its inputs are right: look at this module's own %s",
                d->pass == 'f' ? "weights and arithmetic" : "backward, its saved values and its collective");
    if (isfinite(cosine(all)))
        ari_say(&t, " (cosine with the reference %.3f, size %.3g of it)", cosine(all), sqrt(all->vv / all->rr));
    return AR_OK;
}
