/* SPDX-License-Identifier: Apache-2.0 */
/* What was added: the same to every element, row or sample, or another tensor; and values that are another tensor's. */
#include <ctype.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/case.h"
#include "verify/diagnose/roles.h"

/* --- the same for all --------------------------------------------------------------------------------------------- */

/* The mean difference at each place of a period of consecutive elements. */
typedef struct period {
    size_t length;
    double *mean;  /* [length] */
    size_t *n;     /* [length] elements that have the place, over all copies */
    double size;   /* root mean square of the differences */
    double spread; /* root mean square of what the means leave of them, relative to that */
} period;

/* Dropout zeroes an element on both sides, and says nothing of the difference there. */
static bool is_dropped(const period *p, const ari_case *c, const ari_run *run, size_t i)
{
    return p->length > c->grid.cols && c->grid.d->pass == 'f' && run->value[i] == 0.0f && run->ref[i] == 0.0f;
}

static void add_differences(period *p, const ari_case *c)
{
    ari_runs it = ari_runs_of(&c->grid);
    ari_run run;
    while (ari_runs_next(&it, &run)) {
        size_t at = run.index % p->length; /* a row never crosses the end of a period but that of one element */
        for (size_t i = 0; i < run.count; i++, at = at + 1 < p->length ? at + 1 : 0) {
            p->mean[at] += (double)run.value[i] - (double)run.ref[i];
            p->n[at] += !is_dropped(p, c, &run, i);
        }
    }
    for (size_t i = 0; i < p->length; i++)
        p->mean[i] /= (double)p->n[i];
}

static void measure_spread(period *p, const ari_case *c)
{
    ari_runs it = ari_runs_of(&c->grid);
    ari_run run;
    double left = 0.0, all = 0.0;
    size_t n = 0;
    while (ari_runs_next(&it, &run)) {
        size_t at = run.index % p->length;
        for (size_t i = 0; i < run.count; i++, at = at + 1 < p->length ? at + 1 : 0) {
            const double apart = (double)run.value[i] - (double)run.ref[i], off = apart - p->mean[at];
            if (is_dropped(p, c, &run, i))
                continue;
            left += off * off;
            all += apart * apart;
            n++;
        }
    }
    p->size = sqrt(all / (double)n);
    p->spread = sqrt(left / all);
}

/* Whether there is much to compare: a place that one period alone has agrees with itself. Rounding of sums beside the
 * reference leaves the spread at its own size. */
static bool repeats(const period *p, const ari_case *c)
{
    size_t places = 0, all = 0;
    for (size_t i = 0; i < p->length; i++) {
        places += p->n[i] > 0;
        all += p->n[i];
    }
    return all >= places + places / 2 && isfinite(p->spread) && p->size > 4.0 * c->absolute &&
           p->spread <= 1e-3 + 0.3 * c->absolute / p->size;
}

/* --- whose vector it is ------------------------------------------------------------------------------------------- */

/* The factor that takes y to the mean differences, where those are any; 0 if there is none. */
static double times(const period *p, const float *y)
{
    double my = 0.0, yy = 0.0, mm = 0.0;
    size_t from = 0, to = p->length;
    while (from < to && fabs(p->mean[from]) < 1e-3 * p->size)
        from++;
    while (to > from && fabs(p->mean[to - 1]) < 1e-3 * p->size)
        to--;
    if (to - from < 4 || (to - from) * 16 < p->length)
        return 0.0;
    for (size_t i = from; i < to; i++) {
        my += p->mean[i] * (double)y[i];
        yy += (double)y[i] * (double)y[i];
        mm += p->mean[i] * p->mean[i];
    }
    return yy > 0.0 && my * my >= 0.9999 * yy * mm ? my / yy : 0.0;
}

/* The tensor of either dump whose values these are, times what; the same module's rather than another's. */
static ar_status find_source(const ar_dump_tensor **found, double *factor, const period *p, const ari_case *c)
{
    const ar_dump *dumps[] = {c->known->reference, c->known->other};
    const char *own = c->grid.d->name;
    float *y = NULL;
    size_t alike = 0;
    *found = NULL;
    AR_TRY(ari_alloc((void **)&y, p->length, sizeof *y, own));
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

static ar_status say_source(ari_trace *t, const ari_case *c, const period *p)
{
    const ar_dump_tensor *source = NULL;
    double factor = 0.0;
    AR_TRY(find_source(&source, &factor, p, c));
    const double whole = nearbyint(factor);
    const bool integer = fabs(factor - whole) <= 1e-3 * fabs(factor);
    t->is |= source ? ARI_IF(NAMED) : 0;
    t->less = t->kind == ARI_FOUND_VECTOR_ADDED ? source ? 0 : 6 : c->val ? 0 : 14;
    ari_text text = ari_list(t, "source");
    if (source)
        ari_say(&text, integer ? "; it is %.0f times %s" : "; it is %.5g times %s", factor, source->name);
    if (source && factor > 0.5 && integer)
        ari_say(&text, ", which counts %.0f times in place of once (added on every one of %.0f ranks before the sum)",
                whole + 1.0, whole + 1.0);
    else if (source && fabs(factor + 1.0) < 1e-3)
        ari_say(&text, ", which was left out");
    return AR_OK;
}

/* --- what is added ------------------------------------------------------------------------------------------------ */

/* Whether differences a period apart are alike in most places of a few: most tensors are ruled out by that. */
static bool may_repeat(const ari_case *c, size_t length)
{
    const size_t places = 64;
    size_t asked = 0, far = 0;
    for (size_t k = 0; c->val && k < places; k++) {
        const size_t at = (c->count - length) / places * k;
        const double a = (double)c->val[at] - (double)c->ref[at];
        const double b = (double)c->val[at + length] - (double)c->ref[at + length];
        if (fabs(a) <= 4.0 * c->absolute || b == 0.0)
            continue;
        asked++;
        far += fabs(a - b) > 0.5 * (fabs(a) + fabs(b));
    }
    return far * 2 <= asked;
}

static ar_status look(ari_trace *t, const ari_case *c, ari_trace_kind kind, size_t length)
{
    const ari_difference *d = c->grid.d;
    ar_status st = AR_OK;
    period p = {.length = length};
    AR_TRY_TO(done, st, ari_alloc_zero((void **)&p.mean, length, sizeof *p.mean, d->name));
    AR_TRY_TO(done, st, ari_alloc_zero((void **)&p.n, length, sizeof *p.n, d->name));
    add_differences(&p, c);
    measure_spread(&p, c);
    if (!repeats(&p, c))
        goto done;
    ari_found(t, kind,
              (ari_name_is(d->name) & ARI_IS_ROW_PARALLEL) && ari_along(d, ARI_CUTS_FEATURES) > 1 ? ARI_IF(OF_TP) : 0);
    ari_number(t, "size", p.size);
    ari_number(t, "spread", p.spread);
    ari_number(t, "added", p.mean[0]);
    ari_count(t, "samples", c->grid.shape[0]);
    if (kind != ARI_FOUND_CONSTANT_ADDED)
        st = say_source(t, c, &p);
done:
    free(p.mean);
    free(p.n);
    return st;
}

/* Each row has a number of its own added to all its elements. */
static void look_at_rows(ari_trace *t, const ari_case *c)
{
    const size_t rows = c->grid.rows, cols = c->grid.cols;
    double left = 0.0, all = 0.0;
    for (size_t r = 0; r < rows; r++) {
        double mean = 0.0;
        for (size_t i = r * cols; i < (r + 1) * cols; i++)
            mean += ((double)c->val[i] - (double)c->ref[i]) / (double)cols;
        for (size_t i = r * cols; i < (r + 1) * cols; i++) {
            const double apart = (double)c->val[i] - (double)c->ref[i];
            left += (apart - mean) * (apart - mean);
            all += apart * apart;
        }
    }
    const double size = sqrt(all / (double)c->count), spread = sqrt(left / all);
    if (!(size > 4.0 * c->absolute) || !(spread <= 1e-3 + 0.3 * c->absolute / size))
        return;
    ari_found(t, ARI_FOUND_ROW_ADDED, 0);
    ari_number(t, "spread", spread);
    ari_number(t, "size", size);
}

/* Of copies of ranks a vector or a table is sought in activations alone. */
ar_status ari_measure_added(ari_trace *t, const ari_case *c)
{
    static const ari_trace_kind kinds[] = {ARI_FOUND_CONSTANT_ADDED, ARI_FOUND_VECTOR_ADDED, ARI_FOUND_TABLE_ADDED};
    const ari_grid *g = &c->grid;
    const size_t lengths[] = {c->val ? 1 : 0, g->nd > 1 ? g->cols : 0, g->nd == 3 ? g->shape[1] * g->cols : 0};
    if (c->survey.total.nan > 0 || !(c->survey.total.max_difference > 0x1p-18 * c->survey.max_reference) ||
        (c->val ? c->count < 8 : !ari_is_activation(g->d)))
        return AR_OK;
    for (size_t i = 0; i < 3 && t->kind == ARI_FOUND_NOTHING; i++) {
        if (lengths[i] > 0 && lengths[i] * 2 <= g->count && (i == 0 || lengths[i] != lengths[i - 1]) &&
            !ari_reference_repeats(c, lengths[i]) && may_repeat(c, lengths[i]))
            AR_TRY(look(t, c, kinds[i], lengths[i]));
    }
    if (t->kind == ARI_FOUND_NOTHING && c->val && g->nd > 1 && g->cols >= 4)
        look_at_rows(t, c);
    return AR_OK;
}

/* --- another tensor's values -------------------------------------------------------------------------------------- */

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

static bool same_shape(const ar_dump_tensor *a, const ar_dump_tensor *b)
{
    return a->ndim == b->ndim && a->count == b->count &&
           memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0;
}

/* Another tensor of the dumps, thinned as this one is. */
typedef struct seen {
    const ar_dump_tensor *tensor;
    ari_sample sample;
} seen;

static bool is_comparable(const ari_case *c, const ar_dump_tensor *t)
{
    return strcmp(t->name, c->full->name) != 0 && same_shape(t, c->full) && (!c->step || t->parts > 0);
}

static ar_status see(seen *out, const ari_case *c, const ar_dump_tensor *t)
{
    *out = (seen){.tensor = t};
    if (!c->step)
        return AR_OK;
    AR_TRY(ari_sample_init(&out->sample, t, c->step));
    out->tensor = &out->sample.tensor;
    return AR_OK;
}

static void unsee(seen *s)
{
    ari_sample_fini(&s->sample);
}

/* Whether data's sampled elements are those of a tensor. */
static bool samples_hold(const ari_case *c, const samples *s, const float *data, const ar_dump_tensor *t)
{
    for (size_t k = 0; k < s->n; k++) {
        float y;
        if (ar_dump_read_f32(t, c->start + s->at[k], 1, &y) != AR_OK || !ari_holds(c, data[s->at[k]], (double)y))
            return false;
    }
    return true;
}

/* Whether the reference's sampled elements are those of a tensor, if it is there. */
static bool holds_reference(const ari_case *c, const samples *s, const ar_dump_tensor *t)
{
    seen other;
    if (!t || !is_comparable(c, t) || see(&other, c, t) != AR_OK)
        return false;
    const bool holds = samples_hold(c, s, c->ref, other.tensor);
    unsee(&other);
    return holds;
}

/* Whether all different elements are those of a tensor; *masked: it has others where both sides have zeros. */
static ar_status all_hold(bool *held, double *worst, size_t *masked, const ari_case *c, const ar_dump_tensor *t)
{
    float y[CHUNK];
    *held = false;
    *worst = 0.0;
    *masked = 0;
    for (size_t at = 0; at < c->count; at += CHUNK) {
        const size_t n = c->count - at < CHUNK ? c->count - at : CHUNK;
        AR_TRY(ar_dump_read_f32(t, c->start + at, n, y));
        for (size_t i = 0; i < n; i++) {
            *masked += c->ref[at + i] == 0.0f && c->val[at + i] == 0.0f && y[i] != 0.0f;
            if (!ari_off(c, at + i))
                continue;
            if (!ari_holds(c, c->val[at + i], (double)y[i]))
                return AR_OK;
            if (!ari_same_bits(c->val[at + i], y[i]))
                *worst = fmax(*worst, fabs((double)c->val[at + i] - (double)y[i]));
        }
    }
    *held = ari_explains(c, *worst);
    return AR_OK;
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

/* Whether the reference's two tensors differ where the other's do not. */
static bool differ_in_reference(const ari_case *c, const samples *s, const char *name)
{
    const ar_dump_tensor *r = ar_dump_find(c->known->reference, name);
    return r && is_comparable(c, r) && !holds_reference(c, s, r);
}

/* One tensor that may be the one whose values these are: of the reference, or of the other dump. */
static ar_status try_other(ari_trace *t, const ari_case *c, const samples *s, const ar_dump_tensor *other, bool shared)
{
    samples first = *s;
    bool held = false;
    double worst = 0.0;
    size_t masked = 0;
    first.n = s->n < FIRST_SAMPLES ? s->n : FIRST_SAMPLES;
    if (!samples_hold(c, &first, c->val, other) || !samples_hold(c, s, c->val, other) ||
        (shared && !differ_in_reference(c, s, other->name)))
        return AR_OK;
    AR_TRY(all_hold(&held, &worst, &masked, c, other));
    if (!held)
        return AR_OK;
    found_other(t, c, s, other, worst, shared);
    t->is |= masked >= 16 ? ARI_IF(CUT) : 0;
    ari_count(t, "masked", masked);
    return AR_OK;
}

ar_status ari_measure_other(ari_trace *t, const ari_case *c)
{
    const ar_dump *dumps[] = {c->known->reference, c->known->other};
    samples s;
    if (!dumps[0])
        return AR_OK;
    take_samples(&s, c);
    for (size_t k = 0; s.vary && k < 2; k++) {
        for (size_t i = 0; dumps[k] && i < ar_dump_count(dumps[k]) && t->kind == ARI_FOUND_NOTHING; i++) {
            seen other;
            if (!is_comparable(c, ar_dump_at(dumps[k], i)))
                continue;
            AR_TRY(see(&other, c, ar_dump_at(dumps[k], i)));
            const ar_status st = try_other(t, c, &s, other.tensor, k == 1);
            unsee(&other);
            AR_TRY(st);
        }
    }
    return AR_OK;
}

/* --- a tensor more or less ---------------------------------------------------------------------------------------- */

typedef struct products {
    double dy, yy, dd;
    size_t n;
} products;

static void add_product(products *p, double apart, double y)
{
    p->dy += apart * y;
    p->yy += y * y;
    p->dd += apart * apart;
    p->n++;
}

static bool is_multiple(const products *p, double least)
{
    return p->n >= 8 && p->yy > 0.0 && p->dd > 0.0 && p->dy * p->dy >= least * p->yy * p->dd;
}

static products sampled_products(const ari_case *c, const samples *s, const ar_dump_tensor *t)
{
    products p = {0};
    for (size_t k = 0; k < s->n; k++) {
        const size_t i = s->at[k];
        float y;
        if (ar_dump_read_f32(t, c->start + i, 1, &y) != AR_OK)
            return (products){0};
        add_product(&p, (double)c->val[i] - (double)c->ref[i], (double)y);
    }
    return p;
}

/* Whether the differences are a multiple of a tensor everywhere; the multiple. */
static ar_status find_multiple(double *factor, const ari_case *c, const ar_dump_tensor *t)
{
    float y[CHUNK];
    products p = {0};
    *factor = 0.0;
    for (size_t at = 0; at < c->count; at += CHUNK) {
        const size_t n = c->count - at < CHUNK ? c->count - at : CHUNK;
        AR_TRY(ar_dump_read_f32(t, c->start + at, n, y));
        for (size_t i = 0; i < n; i++)
            add_product(&p, (double)c->val[at + i] - (double)c->ref[at + i], (double)y[i]);
    }
    if (is_multiple(&p, 0.999))
        *factor = p.dy / p.yy;
    return AR_OK;
}

static void found_added(ari_trace *t, const ari_case *c, const ar_dump_tensor *other, double factor)
{
    const ari_order_key a = ari_order_of(c->reference->name, c->path), b = ari_order_of(other->name, c->path);
    const bool own = a.stem == b.stem && memcmp(a.name, b.name, a.stem) == 0;
    const bool weight = b.pass == 'i' || b.pass == 'w' || b.pass == 'n';
    const bool plus = fabs(factor - 1.0) < 1e-3, minus = fabs(factor + 1.0) < 1e-3;
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

ar_status ari_measure_added_tensor(ari_trace *t, const ari_case *c)
{
    const ar_dump *dump = c->known->reference; /* the other's may carry the same mistake */
    samples s;
    if (!dump || c->survey.total.nan > 0)
        return AR_OK;
    take_samples(&s, c);
    const products own = sampled_products(c, &s, c->reference);
    if (s.n < 8 || is_multiple(&own, 0.9)) /* a factor, and other tensors may be much like this one */
        return AR_OK;
    for (size_t i = 0; i < ar_dump_count(dump) && t->kind == ARI_FOUND_NOTHING; i++) {
        seen other;
        double factor = 0.0;
        if (!is_comparable(c, ar_dump_at(dump, i)))
            continue;
        AR_TRY(see(&other, c, ar_dump_at(dump, i)));
        const products p = sampled_products(c, &s, other.tensor);
        const ar_status st = is_multiple(&p, 0.99) ? find_multiple(&factor, c, other.tensor) : AR_OK;
        if (st == AR_OK && fabs(factor) > 1e-9)
            found_added(t, c, other.tensor, factor);
        unsee(&other);
        AR_TRY(st);
    }
    return AR_OK;
}
