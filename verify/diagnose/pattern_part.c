/* SPDX-License-Identifier: Apache-2.0 */
/* What a loss, an embedding or a place suggest: the findings that lean on the tensor's name and pass. */
#include "verify/diagnose/pattern_impl.h"
#include "verify/diagnose/roles.h"

static bool is_off(const void *user, int rank)
{
    const ari_survey *s = user;
    return s->rank[rank].different > 0;
}

/* --- the loss ----------------------------------------------------------------------------------------------------- */

ar_status ari_detect_loss(ari_clue *f, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    if (d->pass != 'f' || c->grid.count != 1 || !(ari_name_is(d->name) & ARI_IS_LOSS) || c->survey.total.nan > 0 ||
        d->hidden)
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
            "all-reduce(max)); or each rank has the loss of its own tokens, or divided by their number",
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

/* --- whole rows of an embedding ----------------------------------------------------------------------------------- */

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
    else if (d->pass == 'g' && d->ndim == 2 && (ari_name_is(d->name) & (ARI_IS_EMBEDDING | ARI_IS_HEAD)))
        detect_edge_rows(f, c);
    return AR_OK;
}

/* --- places ------------------------------------------------------------------------------------------------------- */

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
    if (d->allowed > 0.0 && s->total.max_difference < 100.0 * d->allowed) /* where rounding happened to be larger */
        return;
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
    /* A first token whose reference is zero is right by accident; a small difference may begin with the first sum. */
    const bool telling = s->total.kept > 0 && s->total.dd > 4e-4 * s->total.rr;
    if (f->confidence == ARI_SILENT && activation && telling && g->d->ndim == 3 && s->hits[1][0] == 0 &&
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
    else if (d->pass != 'f' && d->pass != 'b')
        ari_say(&t, "no known trace: another tensor, other training, or a conversion that computed");
    else
        ari_say(&t,
                "no known trace; if this is the first difference, its inputs are right: look at this module's own %s",
                d->pass == 'f' ? "weights and arithmetic" : "backward, its saved values and its collective");
    if (c->survey.disagree > 0)
        ari_say(&t, "; copies that should be equal differ, so each rank computed from data of its own");
    if (isfinite(ari_cosine(all)))
        ari_say(&t, " (cosine with the reference %.3f, size %.3g of it)", ari_cosine(all), sqrt(all->vv / all->rr));
    return AR_OK;
}
