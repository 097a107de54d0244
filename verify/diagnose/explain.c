/* SPDX-License-Identifier: Apache-2.0 */
/* The diagnosis of a tensor of two dumps: reads it, decides which elements count as different, and explains its full
 * copy and the copies of its ranks. */
#include "verify/diagnose/case.h"

/* --- what is read of two dumps ------------------------------------------------------------------------------------ */

bool ari_same_shape(const ar_dump_tensor *a, const ar_dump_tensor *b)
{
    return ari_same_extents(a->ndim, a->shape, b->ndim, b->shape);
}

/* All dimensions but the last AR_MAX_DIMS - 1 become one. */
static void choose_shape(ari_view *v, const ar_dump_tensor *t)
{
    const int folded = t->ndim > AR_MAX_DIMS ? t->ndim - AR_MAX_DIMS : 0;
    v->d.ndim = t->ndim - folded;
    for (int dim = 0; dim < v->d.ndim; dim++)
        v->shape[dim] = t->shape[dim + folded];
    v->shape[0] *= ari_volume(t->shape, folded);
    v->c.count = t->count;
}

/* A stretch of rows with the first difference in it, some of it before. */
static void choose_stretch(ari_view *v, const ar_dump_tensor *t, size_t first)
{
    const size_t last = t->shape[t->ndim - 1], cols = last <= ARI_EXPLAIN_SAMPLED ? last : 1, rows = t->count / cols;
    v->rows = ARI_EXPLAIN_SAMPLED / cols;
    const size_t before = v->rows / 8, at = first / cols;
    v->first_row = at > before ? at - before : 0;
    v->first_row = v->first_row + v->rows > rows ? rows - v->rows : v->first_row;
    v->d.ndim = cols > 1 ? 2 : 1;
    v->shape[0] = v->rows;
    v->shape[1] = cols;
    v->c.start = v->first_row * cols;
    v->c.count = v->rows * cols;
}

static ar_status read_values(float **gives, const ari_view *v, const ar_dump_tensor *t)
{
    AR_TRY(ARI_TAKE(gives, v->c.arena, v->c.count, t->name));
    return ar_dump_read_f32(t, v->c.start, v->c.count, *gives);
}

static ar_status read_earlier(ari_view *v, const ari_explain_case *known)
{
    const ar_dump_tensor *t = ari_tensor_before(known->reference, v->name, v->d.pass, v->d.step);
    if (!t || t->count != v->c.full->count || (v->c.step && t->parts == 0) || v->rows > 0)
        return AR_OK;
    ari_sample thin = {.tensor = *t};
    if (v->c.step)
        AR_TRY(ari_sample_init(&thin, t, v->c.step, v->c.arena));
    AR_TRY(read_values(&v->earlier, v, &thin.tensor));
    if (v->d.pass == 'n') {
        v->d.before = v->earlier;
        v->d.beta1 = 0.9; /* where they are others, no correction of Adam's fits */
        v->d.beta2 = 0.999;
    } else {
        v->d.last = v->earlier;
    }
    return AR_OK;
}

/* Elements that ranks hold, copies included. */
static size_t held(const ar_dump_tensor *t)
{
    size_t n = 0;
    for (size_t i = 0; t && i < t->parts; i++) {
        for (size_t b = 0; b < t->part[i].boxes; b++)
            n += ari_volume(t->part[i].box[b].extent, t->ndim);
    }
    return n;
}

/* True if ranks have more copies of a new weight than of its moments, and each has some moments: each updates its share
 * (ZeRO). One without any made no step. */
static bool updates_shares(const ari_view *v, const ar_dump *other)
{
    const size_t n = strlen(v->name), moments = held(ari_tensor_of_step(other, v->name, n, "m", v->d.step));
    const ar_dump_tensor *t = ari_tensor_of_step(other, v->name, n, "new", v->d.step);
    bool shares = v->d.pass == 'n' && moments > 0 && moments < held(t);
    for (size_t i = 0; shares && i < t->parts; i++) {
        shares = false;
        for (ari_walk w = ari_walk_of(other, v->c.path, "m", v->d.step); !shares && ari_walk_next(&w);) {
            for (size_t k = 0; !shares && k < w.t->parts; k++)
                shares = w.t->part[k].rank == t->part[i].rank;
        }
    }
    return shares;
}

/* --- what counts as different ------------------------------------------------------------------------------------- */

/* A 16-bit format adds two of its steps to the differences of sums in another order. */
static double step_of(ar_dtype t)
{
    return t == AR_BF16 ? 0x1p-7 : t == AR_F16 ? 0x1p-10 : 0.0;
}

/* Sets the tolerance of relations. */
static void set_tolerance(ari_view *v, const ari_explain_case *known)
{
    ari_case *c = &v->c;
    c->max_ref = 0.0;
    for (size_t i = 0; i < c->count; i++) {
        const double r = fabs((double)v->ref[i]);
        c->max_ref = isfinite(r) && r > c->max_ref ? r : c->max_ref;
    }
    c->absolute = fmax(known->atol, ARI_SUMS * c->max_ref);
    c->relative = fmax(known->rtol, fmax(step_of(c->reference->dtype), step_of(c->other->dtype)));
}

/* Elements by what they are, for the choice of what counts. */
typedef struct counted {
    size_t large, small, equal; /* beyond rounding; within it; of equal bits and not zero */
} counted;

static counted count_differences(const ari_view *v)
{
    counted n = {0};
    for (size_t i = 0; i < v->c.count; i++) {
        if (ari_same_bits(v->ref[i], v->val[i]))
            n.equal += v->ref[i] != 0.0f;
        else if (ari_holds(&v->c, v->val[i], (double)v->ref[i]))
            n.small++;
        else
            n.large++;
    }
    return n;
}

/* A difference that the rule allows counts as none. If the rule asks for equal bits, background rounding and a fault
 * are distinguished by size, if both are present. */
static ar_status choose_allowed(ari_view *v, const ari_explain_case *known, const counted *n)
{
    double relative = known->rtol;
    v->c.noisy = n->large > 0 && n->small * 4 > n->equal + n->small && n->small * 50 > v->c.count;
    v->d.allowed = v->c.noisy ? v->c.absolute : known->atol;
    v->d.noise = v->c.noisy ? v->c.absolute : 0.0;
    v->d.beside = NULL;
    if (v->c.noisy)
        relative = v->c.relative;
    if (relative == 0.0 && !v->doubt)
        return AR_OK;
    AR_TRY(ARI_TAKE(&v->beside, v->c.arena, v->c.count, v->d.name));
    for (size_t i = 0; i < v->c.count; i++)
        v->beside[i] = (float)(relative * fabs((double)v->ref[i]) + (v->doubt ? v->doubt[i] : 0.0));
    v->d.beside = v->beside;
    return AR_OK;
}

/* --- the case of two dumps ---------------------------------------------------------------------------------------- */

static void name_case(ari_view *v, const ar_verify_row *row, const ari_explain_case *known)
{
    v->c.path = known->other ? ar_dump_path(known->other) : NULL;
    const ari_order_key key = ari_order_of(row->name, v->c.path);
    const size_t n = key.stem < sizeof v->name ? key.stem : sizeof v->name - 1;
    memcpy(v->name, row->name, n);
    v->name[n] = '\0';
    v->d.name = v->name;
    v->d.pass = row->pass ? row->pass : key.pass;
    v->d.step = row->step > 0 ? row->step : key.step;
}

/* Head size of an activation whose last dimension is heads side by side; samples and positions. */
static void set_sizes(ari_view *v)
{
    const bool activation = v->d.ndim >= 3 && ari_is_activation(&v->d);
    v->d.head_dim = activation && v->d.ndim == 3 ? ari_head_size(&v->c, 2) : 0;
    const bool tokens_first = activation && v->shape[0] == v->c.facts.seq && v->shape[1] == v->c.facts.batch;
    v->d.batch = activation && !tokens_first ? v->shape[0] : v->c.facts.batch;
    v->d.seq =
        activation && !tokens_first && (v->d.ndim == 3 || v->d.documents) ? v->shape[v->d.ndim - 2] : v->c.facts.seq;
}

/* True if nothing exceeds rounding: all differences are small or, where most elements are slightly off, none is much
 * larger than the others. A rule's allowance is no measure of rounding, and exact numerics have none. */
static bool is_rounding(const ari_view *v, const ari_explain_case *known, const counted *n)
{
    if (known->atol > 0.0 || known->rtol > 0.0 || v->d.exact)
        return false;
    return n->large == 0 || (v->c.noisy && n->large * 2 < v->c.count && v->c.survey.total.nan == 0 &&
                             v->c.survey.total.max_difference <= 10.0 * v->c.absolute);
}

static void say_extent(ari_text *where, const ari_view *v)
{
    const ari_case *c = &v->c;
    if (v->rows > 0)
        ari_say(where, "; looked at %s %zu..%zu alone, the tensor is too large for all of it",
                v->d.ndim == 1 ? "elements" : "rows", v->first_row, v->first_row + v->rows - 1);
    for (int d = 0, said = 0; c->step && d < c->full->ndim; d++) {
        if (c->step[d] > 1)
            ari_say(where, "%s1 in %zu of %zu", said++ ? " by " : "; seen in a sample, with its indices: ", c->step[d],
                    c->full->shape[d]);
    }
}

/* Explains the ranks' copies; nothing if every rank is off by rounding alone. */
static ar_status explain_ranks(ari_trace *best, ari_text *where, const ari_view *v, const ari_rank_copies *r,
                               double rounding)
{
    ari_difference d = v->d;
    ari_case c = {.arena = v->c.arena,
                  .considered = v->c.considered,
                  .known = v->c.known,
                  .path = v->c.path,
                  .reference = v->c.reference,
                  .step = v->c.step};
    ari_trace own = {.kind = ARI_FOUND_NOTHING};
    d.ranks = r->ranks;
    d.copy = r->copy;
    d.mesh = r->mesh;
    d.sp = v->c.facts.sp;
    d.hidden = false;
    d.allowed = rounding > 0.0 ? fmax(d.allowed, v->c.absolute) : d.allowed; /* the first copy is right but for that */
    ari_narrow_to_stage(&d);
    AR_TRY(ari_case_init(&c, &d));
    const bool far = c.survey.total.max_difference > rounding || c.survey.total.nan > 0;
    if (c.survey.different > 0 && far) {
        AR_TRY(ari_look_at_ranks(&own, &c));
        const bool nan = c.survey.total.nan > 0 && v->c.survey.total.nan == 0; /* which the first copy hides */
        const bool more = nan || ari_ranks_say_more(&own, best, &c);
        const bool equal = !more && r->ranks > 1 && c.survey.shared == c.grid.count && c.survey.disagree == 0;
        const bool apart = best->kind == ARI_FOUND_ROUNDING && c.survey.disagree > 0; /* of the first copy alone */
        *best = more || apart ? own : *best;
        best->flags |= equal ? ARI_IF(EQUAL) : 0;
        /* One about one full copy is judged again where the copies are equal; one about a part is left. */
        if (equal && best->cause && best->confidence == best->cause->confidence - best->penalty)
            ari_match_cause(best, &v->c);
        ari_say_where(where, &c, best->looks);
    }
    return AR_OK;
}

/* Progress of a look; its finding's confidence is added. */
enum { SEEN_NOTHING = -2, SEEN_ROUNDING = -1, SEEN_DIFFERENCE = 0 };

/* The view with differences of some size allowed. */
static ar_status explain_view(ari_diagnosis *found, int *seen, ari_view *v, const ari_rank_copies *r,
                              const ari_explain_case *known)
{
    ari_trace best = {.kind = ARI_FOUND_NOTHING};
    char ranks[sizeof found->pattern];
    ari_text of_ranks = ari_text_in(ranks, sizeof ranks);
    ari_text where = ari_text_in(found->pattern, sizeof found->pattern);
    ari_text why = ari_text_in(found->hint, sizeof found->hint);
    ar_evidence considered = {0};
    v->c.known = known;
    v->c.considered = &considered;
    set_tolerance(v, known);
    const counted n = count_differences(v);
    AR_TRY(choose_allowed(v, known, &n));
    AR_TRY(ari_view_survey(v));
    set_sizes(v);
    const bool different = v->c.survey.different > 0, update = v->d.pass == 'n'; /* of which a weight hides much */
    bool rounding = is_rounding(v, known, &n);
    if (different && (!rounding || update))
        AR_TRY(ari_look_at_whole(&best, &v->c));
    if (rounding && (best.kind == ARI_FOUND_STATE || best.kind == ARI_FOUND_UPDATE))
        rounding = false;
    else if (rounding)
        best = (ari_trace){.kind = ARI_FOUND_NOTHING};
    const double step = fmin(step_of(v->c.reference->dtype), step_of(v->c.other->dtype)); /* of both */
    if (r->copy)
        AR_TRY(explain_ranks(&best, &of_ranks, v, r, rounding ? fmax(10.0 * v->c.absolute, step * v->c.max_ref) : 0.0));
    *seen = of_ranks.used > 0 ? SEEN_DIFFERENCE + best.confidence
            : !different      ? SEEN_NOTHING
            : rounding        ? SEEN_ROUNDING
                              : SEEN_DIFFERENCE + best.confidence;
    const bool all_rounding = of_ranks.used == 0 && rounding && n.small + n.large > 0;
    if (all_rounding) {
        const double largest = v->c.survey.total.max_difference; /* 0: of signs of zeros */
        ARI_FINDING(&best, ARI_FOUND_ROUNDING, 0, {"largest", .number = largest > 0.0 ? largest / v->c.max_ref : 0.0});
        ari_match_cause(&best, &v->c);
        ari_say(&where, "%zu of %zu elements differ in bits, all within rounding", n.small + n.large, v->c.count);
    } else if (of_ranks.used > 0)
        ari_say(&where, "%s", ranks);
    else if (different)
        ari_say_where(&where, &v->c, best.looks);
    else
        ari_say(&where, "no element differs");
    if (different && !all_rounding && v->c.start == 0)
        ari_say_part(&where, &v->c);
    if (v->c.noisy && n.small > 0 && !all_rounding)
        ari_say(&where, "; %zu others differ by less than %.0e of the largest value", n.small,
                v->c.absolute / v->c.max_ref);
    say_extent(&where, v);
    ari_say(&why, "%s", best.confidence > 0 ? best.hint : "no known pattern");
    found->evidence = best.confidence > 0 ? best.evidence : (ar_evidence){.cause = "unknown"};
    ari_say_considered(&why, &found->evidence, &considered);
    v->c.considered = NULL;
    return AR_OK;
}

/* --- what is looked at of a tensor -------------------------------------------------------------------------------- */

/* All of it, a sample of it, or a stretch of rows. */
typedef struct extent {
    const ar_dump_tensor *reference, *other; /* or samples of them */
    const ar_dump_tensor *full;
    const size_t *step; /* of samples */
    bool stretch;
} extent;

/* A rule may allow far more than the noise that is there: relations are sought as if bits were asked for first, then in
 * noise between that and what is allowed, then in as much as is allowed. */
static ar_status explain_extent(ari_diagnosis *found, int *seen, const ar_verify_row *row, const extent *e,
                                const ari_explain_case *known, ari_arena *arena)
{
    static const double part[] = {0.0, 1.0 / 32.0, 1.0};
    const bool rule = known->atol > 0.0 || known->rtol > 0.0;
    ari_view v = {
        .c = {.arena = arena, .reference = e->reference, .other = e->other, .full = e->full, .step = e->step}};
    ari_rank_copies ranks = {.copy = NULL};
    int32_t *documents = NULL;
    *seen = SEEN_NOTHING - 1;
    name_case(&v, row, known);
    choose_shape(&v, e->other); /* its ranks' boxes are of it */
    if (e->stretch)
        choose_stretch(&v, e->other, row->first.index);
    AR_TRY(read_values(&v.ref, &v, e->reference));
    AR_TRY(read_values(&v.val, &v, e->other));
    AR_TRY(read_earlier(&v, known));
    if (known->doubt && !e->step) { /* how far the gradients explain the weights */
        AR_TRY(ARI_TAKE(&v.doubt, arena, v.c.count, v.d.name));
        AR_TRY(ari_doubt_read(v.doubt, known->doubt, v.c.start, v.c.count));
    }
    v.c.ref = v.ref;
    v.c.val = v.val;
    v.c.facts = ari_facts_of(known);
    v.d.micro_batches = v.c.facts.micro_batches;
    v.d.exact = v.c.facts.exact_numerics;
    v.d.zero = updates_shares(&v, known->other);
    v.d.pipeline = ari_ranks_along(&known->mesh, ARI_CUTS_LAYERS) > 1;
    if (!e->stretch && !e->step && v.d.ndim >= 3 && ari_is_activation(&v.d))
        AR_TRY(ari_find_documents(&documents, known, v.shape[0], v.shape[v.d.ndim - 2], v.d.step, arena));
    v.d.documents = documents;
    if (!e->stretch)
        AR_TRY(ari_rank_copies_of(&ranks, e->other, known, arena));
    for (size_t i = 0; i < (rule ? 3 : 1) && *seen < SEEN_DIFFERENCE + ARI_SHAPE && *seen != SEEN_ROUNDING; i++) {
        ari_explain_case within = *known;
        ari_diagnosis own = {.hint = ""};
        int own_seen;
        within.atol *= part[i];
        within.rtol *= part[i];
        ARI_ARENA_SCOPE(arena);
        AR_TRY(explain_view(&own, &own_seen, &v, &ranks, &within));
        if (own_seen <= *seen)
            continue;
        *seen = own_seen;
        *found = own;
    }
    return AR_OK;
}

/* The sample; where dimensions of the two, or parts of them, do not allow one, *seen stays as it is. */
static ar_status explain_sample(ari_diagnosis *found, int *seen, const ar_verify_row *row,
                                const ar_dump_tensor *reference, const ar_dump_tensor *other,
                                const ari_explain_case *known, ari_arena *arena)
{
    size_t step[AR_ST_MAX_DIMS];
    ari_sample a = {.box = NULL}, b = {.box = NULL};
    if (reference->parts == 0 || other->parts == 0 || !ari_same_shape(reference, other))
        return AR_OK;
    ari_sample_steps(step, other, ARI_EXPLAIN_SAMPLED);
    AR_TRY(ari_sample_init(&a, reference, step, arena));
    AR_TRY(ari_sample_init(&b, other, step, arena));
    const extent e = {.reference = &a.tensor, .other = &b.tensor, .full = reference, .step = step};
    return explain_extent(found, seen, row, &e, known, arena);
}

/* A sample shows blocks wherever they are, a stretch what is next to each other. */
static ar_status explain(ar_verify_row *row, const ar_dump_tensor *reference, const ar_dump_tensor *other,
                         const ari_explain_case *known, ari_arena *arena)
{
    ari_diagnosis found = {.hint = ""}, sampled = {.hint = ""};
    int seen = SEEN_NOTHING, seen_sampled = SEEN_NOTHING;
    if (reference->count != other->count)
        return ar_error_set(AR_ERR_ARG, "%s: %zu elements against %zu: nothing to compare", row->name, reference->count,
                            other->count);
    if (reference->count == 0)
        return AR_OK;
    const bool large = reference->count > ARI_EXPLAIN_ELEMENTS;
    const extent e = {.reference = reference, .other = other, .full = reference, .stretch = large};
    if (large)
        AR_TRY(explain_sample(&sampled, &seen_sampled, row, reference, other, known, arena));
    ari_arena_end(arena, NULL);
    AR_TRY(explain_extent(&found, &seen, row, &e, known, arena));
    if (seen_sampled > SEEN_NOTHING && seen_sampled >= seen)
        found = sampled;
    memcpy(row->pattern, found.pattern, sizeof row->pattern);
    memcpy(row->hint, found.hint, sizeof row->hint);
    row->evidence = found.evidence;
    return AR_OK;
}

ar_status ari_explain(ar_verify_row *row, const ar_dump_tensor *reference, const ar_dump_tensor *other,
                      const ari_explain_case *known)
{
    ARI_ENDED(ari_arena_free) ari_arena arena = {NULL};
    return explain(row, reference, other, known, &arena);
}
