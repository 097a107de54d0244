/* SPDX-License-Identifier: Apache-2.0 */
/* The diagnosis: the views of a tensor, the measures that look at each, and the choice of the trace that says most. */
#include "verify/diagnose/diagnose.h"

#include "ref/core/tensor_private.h"
#include "verify/diagnose/hypothesis.h"

/* --- measures ----------------------------------------------------------------------------------------------------- */

static const struct {
    ari_measure measure;
    int most;
    unsigned on;
    const char *passes;
    size_t different;
    unsigned needs;
} measures[] = {
#define ROW(name, ...) {ari_measure_##name, __VA_ARGS__},
    ARI_MEASURES(ROW)};

/* The measures' requirements that a case meets. */
static unsigned has(const ari_case *c)
{
    return (c->survey.total.nan == 0 ? ARI_NEEDS_NUMBERS : 0u) | (c->val ? ARI_NEEDS_VALUES : 0u) |
           (!c->step && c->start == 0 && !c->inner ? ARI_NEEDS_ALL : 0u) |
           (c->known->reference && c->reference ? ARI_NEEDS_DUMP : 0u) | (c->d->before ? ARI_NEEDS_BEFORE : 0u) |
           (c->survey.disagree > 0 ? ARI_NEEDS_APART : 0u);
}

/* The residual of a factor alone, which the survey has counted. It says nothing for few elements, nor for values that
 * do not follow the reference, however much of the differences a small factor removes. */
static void consider_factor(const ari_case *c)
{
    const ari_fit f = ari_fit_of(&c->survey.total);
    double factor;
    const double left = ari_fit_one(&factor, &f);
    if (f.n >= 16 && left <= 1.0 - ARI_NEAR)
        ari_consider(c, ARI_FOUND_FACTOR, 0, left * f.yy / c->survey.total.dd);
}

static ar_status best_of(ari_trace *best, const ari_case *c, unsigned on)
{
    const unsigned there = has(c);
    consider_factor(c);
    *best = (ari_trace){.kind = ARI_FOUND_NOTHING};
    for (size_t i = 0; i < sizeof measures / sizeof *measures; i++) {
        ari_trace t = {.kind = ARI_FOUND_NOTHING};
        if (best->confidence > measures[i].most)
            break;
        if (!(measures[i].on & on) || (measures[i].needs & ~there) || c->survey.different < measures[i].different ||
            (measures[i].passes && !strchr(measures[i].passes, c->d->pass)))
            continue;
        ARI_ARENA_SCOPE(c->arena);
        AR_TRY(measures[i].measure(&t, c));
        if (t.kind == ARI_FOUND_NOTHING)
            continue;
        ari_match_cause(&t, c);
        if (t.weighed)
            ari_consider(c, t.kind, t.flags, t.unexplained);
        if (t.confidence > best->confidence)
            *best = t;
    }
    return AR_OK;
}

/* --- a tensor, or a box of it, in one copy ------------------------------------------------------------------------ */

ar_status ari_view_survey(ari_view *v)
{
    v->d.shape = v->shape;
    v->d.reference = v->c.ref;
    v->d.ranks = 1;
    v->d.hidden = true;
    AR_TRY(ari_layout_replicate(&v->layout, v->d.ndim, v->shape, 0, 1));
    v->copy = (ari_rank_copy){.local = v->c.val, .ndim = v->d.ndim, .layout = &v->layout};
    memcpy(v->copy.shape, v->shape, sizeof v->shape);
    v->d.copy = &v->copy;
    AR_TRY(ari_case_init(&v->c, &v->d));
    v->c.count = v->c.grid.count;
    return AR_OK;
}

/* Copies the box of v's shape that begins at `from` out of a tensor of the grid's shape. */
static ar_status cut_out(float **gives, const ari_view *v, const ari_grid *g, const float *data, const size_t *from)
{
    const size_t count = ari_volume(v->shape, g->nd);
    AR_TRY(ARI_TAKE(gives, v->c.arena, count, g->d->name));
    for (size_t i = 0; i < count; i++)
        (*gives)[i] = data[ari_box_index(g->shape, from, v->shape, g->nd, i)];
    return AR_OK;
}

/* The box of shape v->shape at `from` as a tensor; its values are `val`, or those of the whole. */
static ar_status look_at_box(ari_trace *best, ari_view *v, const ari_case *whole, const size_t *from, const float *val)
{
    v->c = *whole;
    v->c.inner = true;
    v->c.considered = NULL; /* of a part alone */
    v->d = *whole->grid.d;
    v->d.beside = v->d.before = v->d.last = NULL;
    ARI_ARENA_SCOPE(whole->arena);
    AR_TRY(cut_out(&v->ref, v, &whole->grid, whole->grid.d->reference, from));
    if (!val)
        AR_TRY(cut_out(&v->val, v, &whole->grid, whole->val, from));
    v->c.ref = v->ref;
    v->c.val = val ? val : v->val;
    v->c.absolute = val ? v->d.allowed : whole->absolute;
    v->c.noisy = val ? v->d.allowed > 0.0 : whole->noisy;
    AR_TRY(ari_view_survey(v));
    v->c.max_ref = v->c.survey.max_reference;
    if (v->c.survey.different > 0)
        AR_TRY(best_of(best, &v->c, ARI_ON_BOX));
    return AR_OK;
}

/* The smallest of the even blocks of n indices that holds all of [*from, *to): a head, a shard, or all. */
static void enclose(size_t *from, size_t *to, size_t n)
{
    size_t size = *to - *from;
    while (size < n && (n % size != 0 || *from / size != (*to - 1) / size))
        size++;
    *from = *from / size * size;
    *to = *from + size;
}

/* The part of a tensor in which a map may hold that is not seen in the whole: blocks around all differences, since what
 * moved may have left the ends unchanged; or all of one dimension, since values may have come from outside. */
enum { IN_BLOCKS = -1 }; /* else: all of this dimension */

static ar_status look_inside(ari_trace *best, const ari_case *c, int part)
{
    ari_view v = {.ref = NULL};
    ari_trace own = {.kind = ARI_FOUND_NOTHING};
    size_t from[AR_MAX_DIMS], to;
    for (int dim = 0; dim < c->grid.nd; dim++) {
        const size_t n = c->grid.shape[dim];
        ari_bounding_range(c, dim, &from[dim], &to);
        enclose(&from[dim], &to, n);
        if (part == dim && to - from[dim] == n)
            return AR_OK; /* it was looked at */
        if (part == dim)
            from[dim] = 0, to = n;
        v.shape[dim] = to - from[dim];
    }
    const size_t count = ari_volume(v.shape, c->grid.nd);
    if (count == c->count || count < 4)
        return AR_OK;
    AR_TRY(look_at_box(&own, &v, c, from, NULL));
    own.confidence--;
    if (own.confidence > best->confidence) {
        *best = own;
        ari_text t = ari_text_in(best->hint, sizeof best->hint);
        ari_say(&t, "within the part that differs (indices counted from its start): %s", own.hint);
    }
    return AR_OK;
}

ar_status ari_look_at_whole(ari_trace *best, const ari_case *c)
{
    AR_TRY(best_of(best, c, ARI_ON_WHOLE));
    if (best->confidence < ARI_IDENTITY + 7)
        AR_TRY(look_inside(best, c, IN_BLOCKS));
    for (int dim = 0; dim < c->grid.nd && best->confidence < ARI_IDENTITY; dim++)
        AR_TRY(look_inside(best, c, dim));
    return AR_OK;
}

/* --- copies of ranks ---------------------------------------------------------------------------------------------- */

/* Looks at each rank's box as a tensor of its own, if on every wrong rank the values are the reference's in another
 * place. */
static ar_status look_at_boxes(ari_trace *best, const ari_case *c)
{
    const ari_difference *d = c->d;
    ari_trace first = {.kind = ARI_FOUND_NOTHING};
    for (int r = 0; r < d->ranks && d->ndim > 0; r++) {
        const ar_box *b = d->copy[r].layout->box;
        ari_view v = {.ref = NULL};
        ari_trace own = {.kind = ARI_FOUND_NOTHING};
        if (c->survey.rank[r].different == 0)
            continue;
        for (int dim = 0; dim < d->ndim; dim++) {
            v.shape[dim] = b->extent[dim];
            if (d->copy[r].layout->nbox != 1 || d->copy[r].shape[dim] != b->extent[dim])
                return AR_OK;
        }
        AR_TRY(look_at_box(&own, &v, c, b->global, d->copy[r].local));
        if (!own.cause)
            return AR_OK;
        if (first.cause)
            continue;
        first = own;
        ari_text t = ari_text_in(first.hint, sizeof first.hint);
        ari_say(&t, "on rank %d: %s", d->first_rank + r, own.hint);
    }
    if (first.confidence > best->confidence)
        *best = first;
    return AR_OK;
}

/* A finding that one full copy shows too is not sought again if copies agree and ari_explain looked at it. */
static ar_status look_at_copies(ari_trace *best, const ari_case *c)
{
    const bool seen = c->known->other && c->survey.disagree == 0;
    AR_TRY(best_of(best, c, seen ? ARI_ON_RANKS : ARI_ON_RANKS | ARI_ON_VALUES));
    return !seen && best->confidence < ARI_IDENTITY && c->survey.total.nan == 0 ? look_at_boxes(best, c) : AR_OK;
}

/* What the copies of the ranks with the samples of `rank` show. */
static ar_status look_in_group(ari_trace *best, const ari_case *c, int rank)
{
    ari_difference d;
    bool seen;
    ari_case own = *c;
    ARI_ARENA_SCOPE(c->arena);
    own.considered = NULL;
    AR_TRY(ari_one_group(&d, &seen, c->d, rank, c->arena));
    if (!seen)
        return AR_OK;
    AR_TRY(ari_case_init(&own, &d));
    if (own.survey.different > 0)
        AR_TRY(look_at_copies(best, &own));
    ari_text text = {.at = best->hint, .cap = sizeof best->hint, .used = strlen(best->hint)};
    if (best->cause && rank >= d.ranks)
        ari_say(&text, "; ranks are counted from %d, the first of this %s", rank / d.ranks * d.ranks,
                ari_along(&d, ARI_CUTS_POSITIONS) == 1 ? "tensor-parallel group" : "data-parallel rank's");
    return AR_OK;
}

/* Traces that the ranks of one data-parallel rank leave are sought among them alone too, where the others would hide
 * them. One that only says where differences are must be that of every data-parallel rank with any. Where some values
 * are NaN, ranks without any say nothing of them. */
static ar_status look_in_one_group(ari_trace *best, const ari_case *c)
{
    ari_trace first = {.kind = ARI_FOUND_NOTHING};
    for (int rank = 0; rank < c->d->ranks; rank++) {
        ari_trace t = {.kind = ARI_FOUND_NOTHING};
        if (c->survey.rank[rank].different == 0 || (c->survey.total.nan > 0 && c->survey.rank[rank].nan == 0))
            continue;
        AR_TRY(look_in_group(&t, c, rank));
        if (first.kind != ARI_FOUND_NOTHING && first.kind != t.kind)
            return AR_OK;
        first = first.kind == ARI_FOUND_NOTHING ? t : first;
        if (first.confidence <= best->confidence || first.confidence >= ARI_STATISTIC)
            break;
    }
    if (first.confidence > best->confidence)
        *best = first;
    return AR_OK;
}

ar_status ari_look_at_ranks(ari_trace *best, const ari_case *c)
{
    AR_TRY(look_at_copies(best, c));
    return look_in_one_group(best, c);
}

/* The layouts' view of the tensor, if that has another shape of the same count; ari_case_init reports its errors. */
static ari_difference in_layout_shape(const ari_difference *d)
{
    ari_difference own = *d;
    const ar_layout *o = d->ranks > 0 && d->copy ? d->copy[0].layout : NULL;
    if (!o || !d->shape || o->ndim == d->ndim || o->ndim < 1 || o->ndim > AR_MAX_DIMS || d->ndim > AR_MAX_DIMS)
        return own;
    if (ari_volume(d->shape, d->ndim) == ari_volume(o->shape, o->ndim)) {
        own.ndim = o->ndim;
        own.shape = o->shape;
    }
    return own;
}

/* Looks at one full copy, next to the reference's other tensors; there is none if copies differ. */
static ar_status look_at_one_copy(ari_trace *best, const ari_case *c)
{
    const ari_difference *d = c->d;
    ari_view v = {.d = *d};
    *best = (ari_trace){.kind = ARI_FOUND_NOTHING};
    if (!d->dump || c->survey.disagree > 0)
        return AR_OK;
    memcpy(v.shape, d->shape, (size_t)d->ndim * sizeof *v.shape);
    v.d.mesh = (ari_ranks){{0}};
    v.c = (ari_case){.arena = c->arena,
                     .considered = c->considered,
                     .relative = c->relative,
                     .known = c->known,
                     .ref = d->reference,
                     .reference = d->dump_tensor,
                     .other = d->dump_tensor,
                     .full = d->dump_tensor};
    v.c.facts = ari_facts_of(c->known);
    v.c.facts.dp = ari_along(d, ARI_CUTS_SAMPLES);
    v.c.noisy = d->allowed > 0.0;
    AR_TRY(ARI_TAKE(&v.val, c->arena, c->grid.count, d->name));
    for (ari_run run = ari_runs_of(&c->grid); ari_runs_next(&run);)
        memcpy(v.val + run.index, run.value, run.count * sizeof *v.val);
    v.c.val = v.val;
    AR_TRY(ari_view_survey(&v));
    v.c.max_ref = v.c.survey.max_reference;
    v.c.absolute = fmax(fmax(d->allowed, c->absolute), ARI_SUMS * v.c.max_ref);
    return ari_look_at_whole(best, &v.c);
}

/* Where all values of an fp32 tensor are of bf16, as in a run that computes in it, relations hold up to some roundings
 * of both sides and of typical terms. A few values may have no more digits by chance. */
static void set_rounding(ari_case *c)
{
    enum { FEW = 64 };
    const ari_tally *all = &c->survey.total;
    uint32_t digits = 0, x;
    for (ari_run run = ari_runs_of(&c->grid); ari_runs_next(&run);) {
        for (size_t i = 0; i < 2 * run.count; i++) {
            memcpy(&x, i % 2 ? &run.value[i / 2] : &run.ref[i / 2], sizeof x);
            digits |= x;
        }
    }
    if (digits & 0xffffu || c->grid.count < FEW || all->nan > 0)
        return;
    c->relative = 0x1p-6;
    c->absolute = 0x1p-8 * sqrt((all->rr + all->ss) / (double)all->held);
}

static ar_status diagnose(ari_diagnosis *out, const ari_difference *given, ari_arena *arena)
{
    ari_difference d = in_layout_shape(given);
    const ari_explain_case known = {.reference = given->dump, .mesh = given->mesh};
    ari_case c = {.arena = arena, .known = &known, .reference = given->dump_tensor};
    ari_trace best, whole;
    ari_diagnosis found = {.hint = ""};
    ar_evidence considered = {0};
    c.considered = &considered;
    ari_narrow_to_stage(&d);
    AR_TRY(ari_case_init(&c, &d));
    set_rounding(&c);
    ari_text where = ari_text_in(found.pattern, sizeof found.pattern), why = ari_text_in(found.hint, sizeof found.hint);
    if (c.survey.different == 0) {
        ari_say(&where, "no element differs");
        ari_say(&why, "nothing to explain");
    } else {
        AR_TRY(ari_look_at_ranks(&best, &c));
        AR_TRY(look_at_one_copy(&whole, &c));
        best = ari_ranks_say_more(&best, &whole, &c) ? best : whole;
        ari_say_where(&where, &c, best.looks);
        ari_say(&why, "%s", best.hint);
        found.evidence = best.evidence;
        ari_say_considered(&why, &found.evidence, &considered);
    }
    *out = found;
    return AR_OK;
}

ar_status ari_diagnose(ari_diagnosis *out, const ari_difference *given)
{
    ARI_ENDED(ari_arena_free) ari_arena arena = {NULL};
    return diagnose(out, given, &arena);
}
