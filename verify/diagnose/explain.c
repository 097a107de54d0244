/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/diagnose/explain.h"

#include <stdio.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/explain_impl.h"
#include "verify/diagnose/explain_sample.h"
#include "verify/diagnose/order.h"

/* Of two findings of equal confidence the first here is told. */
static const ari_seeker seekers[] = {
    ari_seek_bits,     ari_seek_other,   ari_seek_order, ari_seek_transposed, ari_seek_loss,   ari_seek_factor,
    ari_seek_function, ari_seek_dropped, ari_seek_rope,  ari_seek_precision,  ari_seek_scales, ari_seek_added,
    ari_seek_sum,      ari_seek_shift,   ari_seek_ids,   ari_seek_mask,       ari_seek_zero,   ari_seek_share,
    ari_seek_norm,     ari_seek_place,   ari_seek_noise,
};

/* A box of the tensor alone has places of its own; seekers that need the names of its dimensions look at all of it. */
static const ari_seeker inner_seekers[] = {ari_seek_order, ari_seek_transposed, ari_seek_shift};

/* --- the data ----------------------------------------------------------------------------------------------------- */

typedef struct held {
    float *ref, *val, *beside, *earlier;
    size_t shape[AR_MAX_DIMS];
    char name[256]; /* without suffixes */
    ar_layout layout;
    ari_rank_copy copy;
    ari_difference d;
    size_t first_row, rows; /* the stretch that is looked at, in rows of the full tensor; rows 0: all of it */
    ari_whole w;
} held;

static void held_fini(held *h)
{
    free(h->ref);
    free(h->val);
    free(h->beside);
    free(h->earlier);
}

/* All dimensions but the last AR_MAX_DIMS - 1 become one. */
static void choose_shape(held *h, const ar_dump_tensor *t)
{
    const int folded = t->ndim > AR_MAX_DIMS ? t->ndim - AR_MAX_DIMS : 0;
    h->d.ndim = t->ndim - folded;
    for (int dim = 0; dim < h->d.ndim; dim++)
        h->shape[dim] = t->shape[dim + folded];
    for (int dim = 0; dim < folded; dim++)
        h->shape[0] *= t->shape[dim];
    h->w.count = t->count;
}

/* A stretch of rows with the first difference in it, some of it before. */
static void choose_stretch(held *h, const ar_dump_tensor *t, size_t first)
{
    const size_t last = t->shape[t->ndim - 1], cols = last <= ARI_EXPLAIN_SAMPLED ? last : 1, rows = t->count / cols;
    h->rows = ARI_EXPLAIN_SAMPLED / cols;
    const size_t before = h->rows / 8, at = first / cols;
    h->first_row = at > before ? at - before : 0;
    h->first_row = h->first_row + h->rows > rows ? rows - h->rows : h->first_row;
    h->d.ndim = cols > 1 ? 2 : 1;
    h->shape[0] = h->rows;
    h->shape[1] = cols;
    h->w.start = h->first_row * cols;
    h->w.count = h->rows * cols;
}

static ar_status read_both(held *h, const ar_dump_tensor *reference, const ar_dump_tensor *other)
{
    AR_TRY(ari_alloc((void **)&h->ref, h->w.count, sizeof *h->ref, reference->name));
    AR_TRY(ari_alloc((void **)&h->val, h->w.count, sizeof *h->val, reference->name));
    AR_TRY(ar_dump_read_f32(reference, h->w.start, h->w.count, h->ref));
    return ar_dump_read_f32(other, h->w.start, h->w.count, h->val);
}

/* The reference's tensor of the step before: of new weights what they were, of a gradient the last one. */
static const ar_dump_tensor *find_earlier(const held *h, const ari_explain_case *c)
{
    const int before = h->d.step - 1;
    char name[sizeof h->name + 24];
    if (!c->reference || (h->d.pass != 'n' && (h->d.pass != 'g' || before < 1)))
        return NULL;
    if (before < 1)
        snprintf(name, sizeof name, "%s:init", h->name);
    else if (before == 1)
        snprintf(name, sizeof name, "%s:%s", h->name, h->d.pass == 'n' ? "new" : "grad");
    else
        snprintf(name, sizeof name, "%s:%s@%d", h->name, h->d.pass == 'n' ? "new" : "grad", before);
    const ar_dump_tensor *t = ar_dump_find(c->reference, name);
    return t && t->count == h->w.full->count && (!h->w.step || t->parts > 0) ? t : NULL;
}

static ar_status read_earlier(held *h, const ari_explain_case *c)
{
    const ar_dump_tensor *t = find_earlier(h, c);
    if (!t || h->rows > 0)
        return AR_OK;
    ari_sample thin = {.tensor = *t};
    if (h->w.step)
        AR_TRY(ari_sample_init(&thin, t, h->w.step));
    ar_status st = ari_alloc((void **)&h->earlier, thin.tensor.count, sizeof *h->earlier, t->name);
    if (st == AR_OK)
        st = ar_dump_read_f32(&thin.tensor, 0, thin.tensor.count, h->earlier);
    ari_sample_fini(&thin);
    AR_TRY(st);
    if (h->d.pass == 'n') {
        h->d.before = h->earlier;
        h->d.beta1 = 0.9; /* where they are others, no correction of Adam's fits */
        h->d.beta2 = 0.999;
    } else {
        h->d.last = h->earlier;
    }
    return AR_OK;
}

/* --- what counts as different ------------------------------------------------------------------------------------- */

/* Differences of fp32 sums in another order are some 1e-6 of the largest element; a format of 16 bits leaves two of its
 * steps beside. */
static const double SUMS = 1e-5;

static double step_of(ar_dtype t)
{
    return t == AR_BF16 ? 0x1p-7 : t == AR_F16 ? 0x1p-10 : 0.0;
}

static void weigh(held *h, const ar_dump_tensor *reference, const ar_dump_tensor *other, const ari_explain_case *c)
{
    ari_whole *w = &h->w;
    for (size_t i = 0; i < w->count; i++) {
        const double r = fabs((double)h->ref[i]);
        w->max_ref = isfinite(r) && r > w->max_ref ? r : w->max_ref;
    }
    w->absolute = fmax(c->atol, SUMS * w->max_ref);
    w->relative = fmax(c->rtol, fmax(step_of(reference->dtype), step_of(other->dtype)));
}

/* Elements by what they are, for the choice of what counts. */
typedef struct counted {
    size_t large, small, equal; /* beyond rounding; within it; of equal bits and not zero */
} counted;

static counted count_differences(const held *h)
{
    counted n = {0};
    for (size_t i = 0; i < h->w.count; i++) {
        if (ari_same_bits(h->ref[i], h->val[i]))
            n.equal += h->ref[i] != 0.0f;
        else if (ari_holds(&h->w, h->val[i], (double)h->ref[i]))
            n.small++;
        else
            n.large++;
    }
    return n;
}

/* Where the rule allows something, what it allows is none. Where it asks for bits, rounding in the background is told
 * from a mistake by its size, if both are there. */
static ar_status choose_allowed(held *h, const ari_explain_case *c, const counted *n)
{
    double relative = c->rtol;
    h->d.allowed = c->atol;
    h->w.noisy = n->large > 0 && n->small * 4 > n->equal + n->small && n->small * 50 > h->w.count;
    if (h->w.noisy) {
        h->d.allowed = h->w.absolute;
        h->d.noise = h->w.absolute;
        relative = h->w.relative;
    }
    if (relative == 0.0)
        return AR_OK;
    AR_TRY(ari_alloc((void **)&h->beside, h->w.count, sizeof *h->beside, h->d.name));
    for (size_t i = 0; i < h->w.count; i++)
        h->beside[i] = (float)(relative * fabs((double)h->ref[i]));
    h->d.beside = h->beside;
    return AR_OK;
}

/* --- the case ----------------------------------------------------------------------------------------------------- */

static void name_case(held *h, const ar_verify_row *row, const ari_explain_case *c)
{
    const char *path = c->other ? ar_dump_path(c->other) : NULL;
    const ari_order_key key = ari_order_of(row->name, path);
    size_t n = key.stem < sizeof h->name ? key.stem : sizeof h->name - 1;
    memcpy(h->name, row->name, n);
    h->name[n] = '\0';
    h->w.path = path;
    h->d.name = h->name;
    h->d.pass = row->pass ? row->pass : key.pass;
    h->d.step = row->step > 0 ? row->step : key.step;
    h->d.hidden = true;
    h->d.head_dim = 0;
}

/* Head size of an activation whose last dimension is heads side by side. */
static void set_heads(held *h)
{
    ari_whole *w = &h->w;
    if (h->d.ndim == 3 && (h->d.pass == 'f' || h->d.pass == 'b'))
        h->d.head_dim = ari_head_size(w, 2);
    const bool activation = h->d.ndim >= 3 && (h->d.pass == 'f' || h->d.pass == 'b');
    h->d.batch = activation ? h->shape[0] : w->facts.batch;
    h->d.seq = activation && h->d.ndim == 3 ? h->shape[1] : w->facts.seq;
}

/* One rank that holds all. */
static ar_status make_view(held *h, const ari_explain_case *c)
{
    ari_whole *w = &h->w;
    w->ref = h->ref;
    w->val = h->val;
    w->known = c;
    w->facts = ari_facts_of(c);
    h->d.shape = h->shape;
    h->d.reference = h->ref;
    h->d.ranks = 1;
    AR_TRY(ar_layout_replicate(&h->layout, h->d.ndim, h->shape, 0, 1));
    h->copy = (ari_rank_copy){.local = h->val, .ndim = h->d.ndim, .layout = &h->layout};
    memcpy(h->copy.shape, h->shape, sizeof h->shape);
    h->d.copy = &h->copy;
    AR_TRY(ari_grid_init(&w->view.grid, &h->d));
    set_heads(h);
    return AR_OK;
}

/* --- looking ------------------------------------------------------------------------------------------------------ */

static void keep_better(ari_clue *best, const ari_clue *f)
{
    if (f->confidence > best->confidence)
        *best = *f;
}

/* The box that holds all differences as a tensor of its own. Errors: AR_ERR_MEMORY. */
static ar_status cut_out(held *in, const held *h)
{
    const ari_grid *g = &h->w.view.grid;
    size_t from[AR_MAX_DIMS], count = 1;
    for (int dim = 0; dim < g->nd; dim++) {
        size_t to;
        ari_hull(&h->w, dim, &from[dim], &to);
        in->shape[dim] = to - from[dim];
        count *= in->shape[dim];
    }
    in->w = h->w;
    in->w.count = count;
    in->w.inner = true;
    in->d = h->d;
    in->d.beside = in->d.before = in->d.last = NULL;
    AR_TRY(ari_alloc((void **)&in->ref, count, sizeof *in->ref, h->d.name));
    AR_TRY(ari_alloc((void **)&in->val, count, sizeof *in->val, h->d.name));
    for (size_t i = 0; i < count; i++) {
        size_t rest = i, at = 0, stride = 1;
        for (int dim = g->nd - 1; dim >= 0; dim--) {
            at += (from[dim] + rest % in->shape[dim]) * stride;
            rest /= in->shape[dim];
            stride *= g->shape[dim];
        }
        in->ref[i] = h->ref[at];
        in->val[i] = h->val[at];
    }
    return AR_OK;
}

static ar_status look_inside(ari_clue *best, const held *h)
{
    held in = {0};
    ari_clue own = {0};
    ar_status st = AR_OK;
    bool surveyed = false;
    AR_TRY_TO(done, st, cut_out(&in, h));
    if (in.w.count == h->w.count || in.w.count < 4)
        goto done;
    AR_TRY_TO(done, st, make_view(&in, h->w.known));
    AR_TRY_TO(done, st, ari_survey_init(&in.w.view.survey, &in.w.view.grid));
    surveyed = true;
    for (size_t i = 0; i < sizeof inner_seekers / sizeof *inner_seekers; i++) {
        ari_clue f = {0};
        AR_TRY_TO(done, st, inner_seekers[i](&f, &in.w));
        keep_better(&own, &f);
    }
    own.confidence -= own.confidence > 0;
    if (own.confidence > best->confidence) {
        *best = own;
        ari_text t = ari_text_in(best->hint, sizeof best->hint);
        ari_say(&t, "within the part that differs (indices counted from its start): %s", own.hint);
    }
done:
    if (surveyed)
        ari_survey_fini(&in.w.view.survey);
    held_fini(&in);
    return st;
}

static ar_status look(ari_clue *best, const held *h)
{
    AR_TRY(ari_best_finding(best, &h->w.view));
    for (size_t i = 0; i < sizeof seekers / sizeof *seekers; i++) {
        ari_clue f = {0};
        AR_TRY(seekers[i](&f, &h->w));
        keep_better(best, &f);
    }
    return look_inside(best, h);
}

/* A loss that is a little off, and the same everywhere, is off as little in 16 bits: no cause is told. */
static bool is_slightly_off(const ari_case *c)
{
    return c->grid.count == 1 && c->grid.d->pass == 'f' && c->survey.disagree == 0 &&
           c->survey.total.max_relative < 5e-3;
}

/* What the copies of the ranks say: it is told where it is about as sure, for it names ranks. Nothing where all that
 * any of them is off by is rounding. */
static ar_status look_at_ranks(ari_clue *best, ari_text *where, const held *h, const ari_rank_copies *r,
                               double rounding)
{
    ari_difference d = h->d;
    ari_case c;
    ari_clue own = {0};
    d.ranks = r->ranks;
    d.copy = r->copy;
    d.tp = r->tp;
    d.dp = r->dp;
    d.sp = h->w.facts.sp;
    d.hidden = false;
    AR_TRY(ari_grid_init(&c.grid, &d));
    AR_TRY(ari_survey_init(&c.survey, &c.grid));
    d.hidden = is_slightly_off(&c);
    const bool far = c.survey.total.max_difference > rounding || c.survey.total.nan > 0;
    const ar_status st = c.survey.different > 0 && far ? ari_best_finding(&own, &c) : AR_OK;
    if (st == AR_OK && own.confidence > 0 && own.confidence + 10 >= best->confidence)
        *best = own;
    if (st == AR_OK && c.survey.different > 0 && far)
        ari_say_where(where, &c.grid, &c.survey, best->value);
    ari_survey_fini(&c.survey);
    return st;
}

/* --- words -------------------------------------------------------------------------------------------------------- */

static double worst_difference(const held *h)
{
    double worst = 0.0;
    for (size_t i = 0; i < h->w.count; i++) {
        const double apart = fabs((double)h->val[i] - (double)h->ref[i]);
        worst = apart > worst ? apart : worst;
    }
    return worst;
}

/* Whether nothing is beyond rounding: all of it small, or, where most elements are a little off, none by much more.
 * What a rule allows is no measure of rounding. */
static bool is_rounding(const held *h, const counted *n)
{
    if (h->w.known->atol > 0.0 || h->w.known->rtol > 0.0)
        return false;
    return n->large == 0 || (h->w.noisy && n->large * 2 < h->w.count && worst_difference(h) <= 10.0 * h->w.absolute &&
                             h->w.view.survey.total.nan == 0);
}

static void say_rounding(ari_text *where, ari_text *why, const held *h, const counted *n)
{
    ari_say(where, "%zu of %zu elements differ in bits, all within rounding", n->small + n->large, h->w.count);
    ari_say(why,
            "rounding: the largest difference is %.1e of the largest value%s; sums taken in another order, a fused "
            "multiply-add, or another exp or rsqrt",
            worst_difference(h) / h->w.max_ref,
            h->w.relative > 0.0 ? " or a step of the 16-bit format" : " (fp32 noise)");
}

static void say_extent(ari_text *where, const held *h)
{
    if (h->rows > 0)
        ari_say(where, "; looked at %s %zu..%zu alone, the tensor is too large for all of it",
                h->d.ndim == 1 ? "elements" : "rows", h->first_row, h->first_row + h->rows - 1);
    for (int d = 0, said = 0; h->w.step && d < h->w.full->ndim; d++) {
        if (h->w.step[d] > 1)
            ari_say(where, "%s1 in %zu of %zu",
                    said++ ? " by " : "; seen in a sample, with its indices: ", h->w.step[d], h->w.full->shape[d]);
    }
}

/* How much a look has seen; with the confidence of its finding added. */
enum { SEEN_NOTHING = -2, SEEN_ROUNDING = -1, SEEN_DIFFERENCE = 0 };

static ar_status explain_held(ari_text *where, ari_text *why, int *found, held *h, const ari_rank_copies *r,
                              const counted *n)
{
    ari_clue best = {0};
    char ranks[sizeof((ari_pattern *)NULL)->pattern];
    ari_text of_ranks = ari_text_in(ranks, sizeof ranks);
    const bool rounding = is_rounding(h, n), different = h->w.view.survey.different > 0;
    if (different && !rounding)
        AR_TRY(look(&best, h));
    if (r->copy)
        AR_TRY(look_at_ranks(&best, &of_ranks, h, r, rounding ? 10.0 * h->w.absolute : 0.0));
    *found = !different ? SEEN_NOTHING : rounding ? SEEN_ROUNDING : SEEN_DIFFERENCE + best.confidence;
    if (of_ranks.used == 0 && rounding && n->small + n->large > 0) {
        say_rounding(where, why, h, n);
        return AR_OK;
    }
    if (of_ranks.used > 0)
        ari_say(where, "%s", ranks);
    else if (different)
        ari_say_where(where, &h->w.view.grid, &h->w.view.survey, best.value);
    else
        ari_say(where, "no element differs");
    if (different && h->w.start == 0)
        ari_say_part(where, &h->w);
    if (h->w.noisy && n->small > 0)
        ari_say(where, "; %zu others differ by less than %.0e of the largest value", n->small,
                h->w.absolute / h->w.max_ref);
    ari_say(why, "%s", best.confidence > 0 ? best.hint : "no known pattern");
    return AR_OK;
}

/* What is looked at of a tensor: all of it, a sample of it, or a stretch of rows. */
typedef struct extent {
    const ar_dump_tensor *reference, *other; /* or samples of them */
    const ar_dump_tensor *full;
    const size_t *step; /* of samples */
    bool stretch;
} extent;

static ar_status explain_extent(ari_pattern *found, int *seen, const ar_verify_row *row, const extent *e,
                                const ari_explain_case *c)
{
    held h = {0};
    ari_rank_copies ranks = {0};
    ari_text where = ari_text_in(found->pattern, sizeof found->pattern);
    ari_text why = ari_text_in(found->hint, sizeof found->hint);
    ar_status st = AR_OK;
    bool surveyed = false;
    h.w.reference = e->reference;
    h.w.other = e->other;
    h.w.full = e->full;
    h.w.step = e->step;
    name_case(&h, row, c);
    choose_shape(&h, e->other); /* its ranks' boxes are of it */
    if (e->stretch)
        choose_stretch(&h, e->other, row->first);
    AR_TRY_TO(done, st, read_both(&h, e->reference, e->other));
    AR_TRY_TO(done, st, read_earlier(&h, c));
    weigh(&h, e->reference, e->other, c);
    const counted n = count_differences(&h);
    AR_TRY_TO(done, st, choose_allowed(&h, c, &n));
    AR_TRY_TO(done, st, make_view(&h, c));
    AR_TRY_TO(done, st, ari_survey_init(&h.w.view.survey, &h.w.view.grid));
    surveyed = true;
    if (!e->stretch)
        AR_TRY_TO(done, st, ari_rank_copies_of(&ranks, e->other, c));
    AR_TRY_TO(done, st, explain_held(&where, &why, seen, &h, &ranks, &n));
    say_extent(&where, &h);
done:
    if (surveyed)
        ari_survey_fini(&h.w.view.survey);
    ari_rank_copies_fini(&ranks);
    held_fini(&h);
    return st;
}

/* The sample; where dimensions of the two, or parts of them, do not allow one, *seen stays as it is. */
static ar_status explain_sample(ari_pattern *found, int *seen, const ar_verify_row *row,
                                const ar_dump_tensor *reference, const ar_dump_tensor *other, const ari_explain_case *c)
{
    size_t step[AR_ST_MAX_DIMS];
    ari_sample a = {.box = NULL}, b = {.box = NULL};
    ar_status st = AR_OK;
    if (reference->parts == 0 || other->parts == 0 || reference->ndim != other->ndim ||
        memcmp(reference->shape, other->shape, (size_t)other->ndim * sizeof *other->shape) != 0)
        return AR_OK;
    ari_sample_steps(step, other, ARI_EXPLAIN_SAMPLED);
    AR_TRY_TO(done, st, ari_sample_init(&a, reference, step));
    AR_TRY_TO(done, st, ari_sample_init(&b, other, step));
    const extent e = {.reference = &a.tensor, .other = &b.tensor, .full = reference, .step = step};
    st = explain_extent(found, seen, row, &e, c);
done:
    ari_sample_fini(&b);
    ari_sample_fini(&a);
    return st;
}

/* A sample shows blocks wherever they are, a stretch what is next to each other. */
static ar_status explain_large(ari_pattern *found, int *seen, const ar_verify_row *row, const ar_dump_tensor *reference,
                               const ar_dump_tensor *other, const ari_explain_case *c)
{
    const extent stretch = {.reference = reference, .other = other, .full = reference, .stretch = true};
    ari_pattern sampled = {{0}, {0}};
    int seen_sampled = SEEN_NOTHING;
    AR_TRY(explain_sample(&sampled, &seen_sampled, row, reference, other, c));
    AR_TRY(explain_extent(found, seen, row, &stretch, c));
    if (seen_sampled > SEEN_NOTHING && seen_sampled >= *seen) {
        *found = sampled;
        *seen = seen_sampled;
    }
    return AR_OK;
}

static ar_status explain_by(ari_pattern *found, int *seen, const ar_verify_row *row, const ar_dump_tensor *reference,
                            const ar_dump_tensor *other, const ari_explain_case *c)
{
    const extent all = {.reference = reference, .other = other, .full = reference};
    *seen = SEEN_NOTHING;
    if (reference->count > ARI_EXPLAIN_ELEMENTS)
        return explain_large(found, seen, row, reference, other, c);
    return explain_extent(found, seen, row, &all, c);
}

/* A rule may allow far more than the noise that is there: relations are sought as if bits were asked for first, then in
 * noise between that and what is allowed, then in as much as is allowed. */
static ar_status explain_in_noise(ari_pattern *found, const ar_verify_row *row, const ar_dump_tensor *reference,
                                  const ar_dump_tensor *other, const ari_explain_case *c)
{
    static const double part[] = {0.0, 1.0 / 32.0, 1.0};
    const bool rule = c->atol > 0.0 || c->rtol > 0.0;
    int best = SEEN_NOTHING;
    for (size_t i = 0; i < (rule ? 3 : 1) && best < SEEN_DIFFERENCE + ARI_SHAPE && best != SEEN_ROUNDING; i++) {
        ari_explain_case within = *c;
        ari_pattern own = {{0}, {0}};
        int seen = SEEN_NOTHING;
        within.atol *= part[i];
        within.rtol *= part[i];
        AR_TRY(explain_by(&own, &seen, row, reference, other, &within));
        if (i > 0 && seen <= best)
            continue;
        best = seen;
        *found = own;
    }
    return AR_OK;
}

ar_status ari_explain(ar_verify_row *row, const ar_dump_tensor *reference, const ar_dump_tensor *other,
                      const ari_explain_case *c)
{
    ari_pattern found = {{0}, {0}};
    if (reference->count != other->count)
        return ar_error_set(AR_ERR_ARG, "%s: %zu elements against %zu: nothing to compare", row->name, reference->count,
                            other->count);
    if (reference->count == 0)
        return AR_OK;
    AR_TRY(explain_in_noise(&found, row, reference, other, c));
    memcpy(row->pattern, found.pattern, sizeof row->pattern);
    memcpy(row->hint, found.hint, sizeof row->hint);
    return AR_OK;
}
