/* SPDX-License-Identifier: Apache-2.0 */
/* What was added: the same to every element, row or sample, or another tensor; and values that are another tensor's. */
#include <ctype.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/hypothesis.h"
#include "verify/diagnose/roles.h"

/* --- the same for all --------------------------------------------------------------------------------------------- */

/* The mean difference at each place: of a constant there is one, of a vector one for each feature, of a table one for each
 * position and feature, of a number added to rows one for each row. */
typedef struct places {
    ari_trace_kind kind;
    size_t length, apart; /* places, and how many elements on the same one is again */
    double *mean;         /* [length] */
    size_t *n;            /* [length] elements that have the place, over all copies */
    double size;          /* root mean square of the differences */
} places;

static size_t place_of(const places *p, const ari_case *c, size_t index)
{
    return p->kind == ARI_FOUND_ROW_ADDED ? index / c->grid.cols : index % p->length;
}

/* Dropout zeroes an element on both sides, and says nothing of the difference there. */
static bool is_dropped(const places *p, const ari_case *c, const ari_run *run, size_t i)
{
    return p->kind == ARI_FOUND_TABLE_ADDED && c->grid.d->pass == 'f' && run->value[i] == 0.0f && run->ref[i] == 0.0f;
}

static double moved_by_place(const ari_hypothesis *h, const ari_run *run, size_t i)
{
    const places *p = h->of;
    return is_dropped(p, h->c, run, i) ? (double)NAN : (double)run->ref[i] + p->mean[place_of(p, h->c, run->index + i)];
}

static void add_differences(places *p, const ari_case *c)
{
    double all = 0.0;
    size_t n = 0;
    for (ari_run run = ari_runs_of(&c->grid); ari_runs_next(&run);) {
        size_t at = place_of(p, c, run.index);
        for (size_t i = 0; i < run.count; i++) {
            const double apart = (double)run.value[i] - (double)run.ref[i];
            const bool counts = !is_dropped(p, c, &run, i);
            p->mean[at] += apart;
            p->n[at] += counts;
            n += counts;
            all += apart * apart;
            at = p->kind == ARI_FOUND_ROW_ADDED ? at : at + 1 < p->length ? at + 1 : 0;
        }
    }
    for (size_t i = 0; i < p->length; i++)
        p->mean[i] /= (double)p->n[i];
    p->size = sqrt(all / (double)n);
}

/* Whether there is much to compare: a place that one element alone has agrees with itself. */
static bool has_many(const places *p)
{
    size_t there = 0, all = 0;
    for (size_t i = 0; i < p->length; i++) {
        there += p->n[i] > 0;
        all += p->n[i];
    }
    return all >= there + there / 2;
}

/* --- whose vector it is ------------------------------------------------------------------------------------------- */

/* A vector is another tensor's where that leaves this share of its squares; a difference of two tensors, each rounded,
 * ten times that. */
#define OTHERS 1e-4

/* The factor that takes y to the mean differences, where those are any; 0 if there is none. */
static double times(const places *p, const float *y)
{
    ari_fit f = {0};
    double by;
    size_t from = 0, to = p->length;
    while (from < to && fabs(p->mean[from]) < 1e-3 * p->size)
        from++;
    while (to > from && fabs(p->mean[to - 1]) < 1e-3 * p->size)
        to--;
    if (to - from < 4 || (to - from) * 16 < p->length)
        return 0.0;
    for (size_t i = from; i < to; i++)
        ari_fit_add(&f, p->mean[i], (double)y[i], 0.0);
    return ari_fit_one(&by, &f) <= OTHERS ? by : 0.0;
}

/* The tensor of either dump whose values these are, times what; the same module's rather than another's. */
static ar_status find_source(const ar_dump_tensor **found, double *factor, const places *p, const ari_case *c)
{
    const ar_dump *dumps[] = {c->known->reference, c->known->other};
    const char *own = c->grid.d->name;
    float *y = NULL;
    size_t alike = 0;
    *found = NULL;
    AR_TRY(ARI_ALLOC(&y, p->length, own));
    for (size_t k = 0; k < 2; k++) {
        for (size_t i = 0; dumps[k] && i < ar_dump_count(dumps[k]); i++) {
            const ar_dump_tensor *t = ar_dump_at(dumps[k], i);
            size_t same = 1;
            if (t->count != p->length || t->count < 4 || ar_dump_read_f32(t, 0, t->count, y) != AR_OK)
                continue;
            const double by = times(p, y);
            while (t->name[same - 1] && t->name[same - 1] == own[same - 1])
                same++;
            if (by == 0.0 || same <= alike)
                continue;
            alike = same;
            *found = t;
            *factor = by;
        }
    }
    free(y);
    return AR_OK;
}

static ar_status say_source(ari_trace *t, const ari_case *c, const places *p)
{
    const ar_dump_tensor *source = NULL;
    double factor = 0.0;
    AR_TRY(find_source(&source, &factor, p, c));
    const double whole = nearbyint(factor);
    const bool integer = fabs(factor - whole) <= ARI_KNOWN * fabs(factor);
    t->is |= source ? ARI_IF(NAMED) : 0;
    t->less = t->kind == ARI_FOUND_VECTOR_ADDED ? source ? 0 : 6 : c->val ? 0 : 14;
    ari_text text = ari_list(t, "source");
    if (source)
        ari_say(&text, integer ? "; it is %.0f times %s" : "; it is %.5g times %s", factor, source->name);
    if (source && factor > 0.5 && integer)
        ari_say(&text,
                ari_is_alone(c) ? ", which counts %.0f times in place of once"
                                : ", which counts %.0f times in place of once (added on every one of %.0f ranks "
                                  "before the sum)",
                whole + 1.0, whole + 1.0);
    else if (source && ari_is_near(factor, -1.0, ARI_KNOWN))
        ari_say(&text, ", which was left out");
    return AR_OK;
}

/* --- what is added ------------------------------------------------------------------------------------------------ */

/* Whether differences on one place are alike in most of a few: most tensors are ruled out by that. */
static bool may_repeat(const ari_case *c, size_t apart)
{
    const size_t few = 64;
    size_t asked = 0, far = 0;
    for (size_t k = 0; c->val && k < few; k++) {
        const size_t at = (c->count - apart) / few * k;
        const double a = (double)c->val[at] - (double)c->ref[at];
        const double b = (double)c->val[at + apart] - (double)c->ref[at + apart];
        if (fabs(a) <= 4.0 * c->absolute || b == 0.0)
            continue;
        asked++;
        far += fabs(a - b) > 0.5 * (fabs(a) + fabs(b));
    }
    return far * 2 <= asked;
}

static ar_status look(ari_trace *t, const ari_case *c, places *p)
{
    const ari_difference *d = c->grid.d;
    const ari_hypothesis h = {moved_by_place, .c = c, .of = p, .beside = ARI_SUMS * c->survey.max_reference};
    ar_status st = AR_OK;
    ari_residual left;
    AR_TRY_TO(done, st, ARI_ALLOC_ZERO(&p->mean, p->length, d->name));
    AR_TRY_TO(done, st, ARI_ALLOC_ZERO(&p->n, p->length, d->name));
    add_differences(p, c);
    if (!(p->size > 4.0 * c->absolute) || !isfinite(p->size) || !has_many(p) || !ari_holds_all(&left, &h))
        goto done;
    ari_found(t, p->kind,
              (ari_name_is(d->name) & ARI_IS_ROW_PARALLEL) && ari_along(d, ARI_CUTS_FEATURES) > 1 ? ARI_IF(OF_TP) : 0);
    ari_number(t, "size", p->size);
    ari_number(t, "spread", sqrt(left.left / left.all));
    ari_number(t, "added", p->mean[0]);
    ari_count(t, "samples", c->grid.shape[0]);
    if (p->kind == ARI_FOUND_VECTOR_ADDED || p->kind == ARI_FOUND_TABLE_ADDED)
        st = say_source(t, c, p);
done:
    free(p->mean);
    free(p->n);
    return st;
}

/* Of copies of ranks a vector or a table is sought in activations alone. */
ar_status ari_measure_added(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    const size_t table = g->nd == 3 ? g->shape[1] * g->cols : 0;
    const places all[] = {
        {.kind = ARI_FOUND_CONSTANT_ADDED, .length = c->val ? 1 : 0, .apart = 1},
        {.kind = ARI_FOUND_VECTOR_ADDED, .length = g->nd > 1 ? g->cols : 0, .apart = g->cols},
        {.kind = ARI_FOUND_TABLE_ADDED, .length = table, .apart = table},
        {.kind = ARI_FOUND_ROW_ADDED, .length = c->val && g->nd > 1 && g->cols >= 4 ? g->rows : 0, .apart = 1}};
    if (!(c->survey.total.max_difference > 0x1p-18 * c->survey.max_reference) ||
        (c->val ? c->count < 8 : !ari_is_activation(g->d)))
        return AR_OK;
    for (size_t i = 0; i < sizeof all / sizeof *all && t->kind == ARI_FOUND_NOTHING; i++) {
        places p = all[i];
        const bool rows = p.kind == ARI_FOUND_ROW_ADDED;
        if (p.length == 0 || p.length * 2 > g->count || (i == 2 && p.length == all[1].length) ||
            (!rows && ari_reference_repeats(c, p.length)) || !may_repeat(c, p.apart))
            continue;
        AR_TRY(look(t, c, &p));
    }
    return AR_OK;
}

/* --- other tensors ------------------------------------------------------------------------------------------------ */

enum { SAMPLES = 64, FIRST_SAMPLES = 6, CHUNK = 4096 };

/* Elements that differ, spread over the tensor. */
typedef struct samples {
    size_t at[SAMPLES], n;
    bool vary; /* their values do, and are well above rounding: equal ones prove something */
} samples;

static void take_samples(samples *s, const ari_case *c)
{
    const size_t step = c->survey.different / SAMPLES + 1;
    size_t seen = 0, large = 0, distinct = 0;
    *s = (samples){.n = 0};
    for (size_t i = 0; i < c->count && s->n < SAMPLES; i++) {
        if (!ari_off(c, i) || seen++ % step != 0)
            continue;
        s->at[s->n++] = i;
        large += fabs((double)c->val[i]) > 16.0 * c->absolute && isfinite(c->val[i]);
        distinct += s->n > 1 && !ari_same_bits(c->val[i], c->val[s->at[s->n - 2]]);
    }
    s->vary = s->n >= 4 && distinct * 2 >= s->n && large * 2 >= s->n;
}

static bool is_comparable(const ari_case *c, const ar_dump_tensor *t)
{
    return strcmp(t->name, c->full->name) != 0 && ari_same_shape(t, c->full) && (!c->step || t->parts > 0);
}

/* One that may say what the values are; `shared`: of the other dump. */
typedef ar_status (*try_tensor)(ari_trace *t, const ari_case *c, const samples *s, const ar_dump_tensor *other,
                                bool shared);

/* Another tensor of the dumps, thinned as this one is; nothing where it is another shape's. */
static ar_status try_one(ari_trace *t, const ari_case *c, const samples *s, const ar_dump_tensor *other, bool shared,
                         try_tensor try)
{
    ari_sample thin = {.part = NULL};
    if (!is_comparable(c, other))
        return AR_OK;
    if (c->step)
        AR_TRY(ari_sample_init(&thin, other, c->step));
    const ar_status st = try(t, c, s, c->step ? &thin.tensor : other, shared);
    ari_sample_fini(&thin);
    return st;
}

static ar_status try_all(ari_trace *t, const ari_case *c, const samples *s, bool both, try_tensor try)
{
    const ar_dump *dumps[] = {c->known->reference, both ? c->known->other : NULL};
    for (size_t k = 0; k < 2; k++) {
        for (size_t i = 0; dumps[k] && i < ar_dump_count(dumps[k]) && t->kind == ARI_FOUND_NOTHING; i++)
            AR_TRY(try_one(t, c, s, ar_dump_at(dumps[k], i), k == 1, try));
    }
    return AR_OK;
}

/* Whether data's sampled elements, the first n, are those of a tensor. */
static bool samples_hold(const ari_case *c, const samples *s, size_t n, const float *data, const ar_dump_tensor *t)
{
    for (size_t k = 0; k < n; k++) {
        float y;
        if (ar_dump_read_f32(t, c->start + s->at[k], 1, &y) != AR_OK || !ari_holds(c, data[s->at[k]], (double)y))
            return false;
    }
    return true;
}

/* Whether the reference's sampled elements are those of a tensor, if it is there. */
static bool holds_reference(const ari_case *c, const samples *s, const ar_dump_tensor *t)
{
    ari_sample thin = {.part = NULL};
    if (!t || !is_comparable(c, t) || (c->step && ari_sample_init(&thin, t, c->step) != AR_OK))
        return false;
    const bool holds = samples_hold(c, s, s->n, c->ref, c->step ? &thin.tensor : t);
    ari_sample_fini(&thin);
    return holds;
}

/* --- what two names have to do with each other -------------------------------------------------------------------- */

/* Whether they are equal but for the first number in which they differ. */
static bool differ_by_number(const char *a, const char *b)
{
    while (*a && *a == *b)
        a++, b++;
    if (!isdigit((unsigned char)*a) && !isdigit((unsigned char)*b))
        return false;
    while (isdigit((unsigned char)*a))
        a++;
    while (isdigit((unsigned char)*b))
        b++;
    return strcmp(a, b) == 0;
}

/* Whether the values are the tokens' embedding where positions should have been added. */
static bool lacks_positions(const ari_case *c, const ari_order_key *a, const ari_order_key *b)
{
    const ar_dump *dump = c->known->reference;
    bool positions = false;
    for (size_t i = 0; dump && i < ar_dump_count(dump) && !positions; i++) {
        const ari_order_key key = ari_order_of(ar_dump_at(dump, i)->name, c->path);
        positions = key.pass == 'f' && ari_module_of(key.name, key.stem).role == ARI_POSITIONS;
    }
    return positions && a->pass == 'f' && b->pass == 'f' && ari_module_of(b->name, b->stem).role == ARI_TOKENS;
}

/* Whether one is a sum with a residual, and the other the sum's other term in the same layer. */
static bool lacks_residual(const ari_order_key *a, const ari_order_key *b)
{
    static const struct {
        ari_role sum, first, last; /* forward, the places of the branch's output */
        ari_role norm;             /* where the branch begins */
    } branch[] = {{ARI_ATTENTION_SUM, ARI_OUT, ARI_ATTENTION, ARI_NORM2}, {ARI_LAYER, ARI_DOWN, ARI_MLP, ARI_NORM1}};
    bool lacks = false;
    if (a->layer != b->layer || a->section != b->section || a->pass != b->pass)
        return false;
    for (size_t i = 0; i < 2; i++) {
        const ari_role_place *sum = ari_role_place_of(branch[i].sum), *norm = ari_role_place_of(branch[i].norm);
        if (a->pass == 'b')
            lacks = lacks || (a->module == sum->backward && b->module == norm->backward);
        else
            lacks = lacks || (a->module == sum->forward && b->module >= ari_role_place_of(branch[i].first)->forward &&
                              b->module <= ari_role_place_of(branch[i].last)->forward);
    }
    return lacks;
}

/* What the two names have to do with each other, as a property. */
static ari_properties relation_of(const ari_case *c, const char *own, const char *theirs)
{
    const ari_order_key a = ari_order_of(own, c->path), b = ari_order_of(theirs, c->path);
    const bool stem = a.stem == b.stem && memcmp(own, theirs, a.stem) == 0;
    if (stem && a.pass == 'n' && (b.pass == 'i' || b.pass == 'n') && (b.pass == 'i' || b.step < a.step))
        return ARI_IF(OF_BEFORE);
    if (stem && a.pass == b.pass && a.step != b.step)
        return ARI_IF(OF_STEP);
    if (stem)
        return ARI_IF(SAME);
    if (strstr(own, "_rope") && !strstr(theirs, "_rope") && strchr("fb", a.pass) && a.pass == b.pass &&
        a.layer == b.layer)
        return ARI_IF(PAIRS);
    if (lacks_positions(c, &a, &b))
        return ARI_IF(TOKENS);
    if (lacks_residual(&a, &b))
        return ARI_IF(ALONE);
    if (differ_by_number(own, theirs))
        return ARI_IF(OF_LAYER);
    if (a.layer != b.layer || a.section != b.section)
        return 0;
    const bool unnormed =
        a.pass == 'f' && b.pass == 'f' && (ari_name_is(own) & ARI_IS_NORM) && !(ari_name_is(theirs) & ARI_IS_NORM);
    return ARI_IF(OF_MODULE) | (unnormed ? ARI_IF(OF_INPUT) : 0);
}

/* --- the same values ---------------------------------------------------------------------------------------------- */

static double of_other(const ari_hypothesis *h, const ari_run *run, size_t i)
{
    return (double)((const float *)h->of)[run->index + i];
}

/* Elements that are zero on both sides, where the other tensor has others. */
static size_t count_masked(const ari_case *c, const float *y)
{
    size_t masked = 0;
    for (size_t i = 0; i < c->count; i++)
        masked += c->ref[i] == 0.0f && c->val[i] == 0.0f && y[i] != 0.0f;
    return masked;
}

static void found_other(ari_trace *t, const ari_case *c, const samples *s, const ar_dump_tensor *other, double worst,
                        bool shared)
{
    const char *own = c->reference->name;
    ari_found(t, shared ? ARI_FOUND_SHARED_TENSOR : ARI_FOUND_OTHER_TENSOR, relation_of(c, own, other->name));
    if (!shared && c->known->other && holds_reference(c, s, ar_dump_find(c->known->other, other->name)))
        t->is |= ARI_IF(EXCHANGED);
    ari_words(t, "other", "%s", other->name);
    ari_count(t, "step", (size_t)ari_order_of(own, c->path).step);
    ari_count(t, "of_step", (size_t)ari_order_of(other->name, c->path).step);
    ari_say_exactness(t, c, worst);
}

/* Of a tensor of the other dump: whether the reference's two differ. */
static ar_status try_values(ari_trace *t, const ari_case *c, const samples *s, const ar_dump_tensor *other, bool shared)
{
    const ar_dump_tensor *there = shared ? ar_dump_find(c->known->reference, other->name) : NULL;
    float *y = NULL;
    if (!samples_hold(c, s, s->n < FIRST_SAMPLES ? s->n : FIRST_SAMPLES, c->val, other) ||
        !samples_hold(c, s, s->n, c->val, other) ||
        (shared && (!there || !is_comparable(c, there) || holds_reference(c, s, there))))
        return AR_OK;
    ar_status st = ARI_ALLOC(&y, c->count, other->name);
    AR_TRY_TO(done, st, st);
    AR_TRY_TO(done, st, ar_dump_read_f32(other, c->start, c->count, y));
    const ari_hypothesis h = {of_other, .c = c, .of = y, .differs_only = true};
    ari_residual left;
    if (!ari_holds_all(&left, &h))
        goto done;
    found_other(t, c, s, other, left.worst, shared);
    const size_t masked = count_masked(c, y);
    t->is |= masked >= 16 ? ARI_IF(CUT) : 0; /* fewer may be zero by accident */
    ari_count(t, "masked", masked);
done:
    free(y);
    return st;
}

ar_status ari_measure_other(ari_trace *t, const ari_case *c)
{
    samples s;
    take_samples(&s, c);
    return s.vary ? try_all(t, c, &s, true, try_values) : AR_OK;
}

/* --- a tensor more or less ---------------------------------------------------------------------------------------- */

/* The differences by a tensor, of samples; nothing where it cannot be read. */
static ari_fit fit_samples(const ari_case *c, const samples *s, const ar_dump_tensor *t)
{
    ari_fit f = {0};
    float y;
    for (size_t k = 0; k < s->n && ar_dump_read_f32(t, c->start + s->at[k], 1, &y) == AR_OK; k++)
        ari_fit_add(&f, (double)c->val[s->at[k]] - (double)c->ref[s->at[k]], (double)y, 0.0);
    return f;
}

static void found_added(ari_trace *t, const ari_case *c, const ar_dump_tensor *other, double factor)
{
    const ari_order_key a = ari_order_of(c->reference->name, c->path), b = ari_order_of(other->name, c->path);
    const bool own = a.stem == b.stem && memcmp(a.name, b.name, a.stem) == 0;
    const bool weight = b.pass == 'i' || b.pass == 'w' || b.pass == 'n';
    const bool plus = ari_is_near(factor, 1.0, ARI_KNOWN), minus = ari_is_near(factor, -1.0, ARI_KNOWN);
    ari_found(t, ARI_FOUND_TENSOR_ADDED, 0);
    if (a.pass == 'g' && own && weight)
        t->is |= ARI_IF(OF_WEIGHT);
    else if (a.pass == 'n' && own && b.pass == 'g')
        t->is |= ARI_IF(OF_GRADIENT);
    else if (a.pass == 'g' && own && b.pass == 'g')
        t->is |= ARI_IF(OF_STEP);
    ari_number(t, "factor", factor);
    ari_words(t, "other", "%s", other->name);
    ari_text what = ari_list(t, "what");
    if (plus || minus)
        ari_say(&what,
                plus ? "%s was added: the difference is that tensor"
                     : "%s is missing: the difference is that tensor, subtracted",
                other->name);
    else
        ari_say(&what, "the difference is %.6g times %s", factor, other->name);
}

static ar_status try_added(ari_trace *t, const ari_case *c, const samples *s, const ar_dump_tensor *other, bool shared)
{
    float y[CHUNK];
    double factor;
    ari_fit few = fit_samples(c, s, other), f = {0};
    (void)shared;
    if (few.n < 8 || !(ari_fit_one(&factor, &few) <= 100.0 * OTHERS))
        return AR_OK;
    for (size_t at = 0; at < c->count; at += CHUNK) {
        const size_t n = c->count - at < CHUNK ? c->count - at : CHUNK;
        AR_TRY(ar_dump_read_f32(other, c->start + at, n, y));
        for (size_t i = 0; i < n; i++)
            ari_fit_add(&f, (double)c->val[at + i] - (double)c->ref[at + i], (double)y[i], 0.0);
    }
    if (ari_fit_one(&factor, &f) <= 10.0 * OTHERS)
        found_added(t, c, other, factor);
    return AR_OK;
}

ar_status ari_measure_added_tensor(ari_trace *t, const ari_case *c)
{
    double factor;
    samples s;
    take_samples(&s, c);
    const ari_fit own = fit_samples(c, &s, c->reference);
    if (s.n < 8 || ari_fit_one(&factor, &own) <= 0.1) /* a factor, and other tensors may be much like this one */
        return AR_OK;
    return try_all(t, c, &s, false, try_added); /* the other's tensors may carry the same mistake */
}
