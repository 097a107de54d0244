/* SPDX-License-Identifier: Apache-2.0 */
/* Values that are another tensor's of the dumps, or have another tensor added. */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/explain_impl.h"
#include "verify/diagnose/explain_sample.h"
#include "verify/diagnose/order.h"

enum { SAMPLES = 64, FIRST_SAMPLES = 6, CHUNK = 4096 };

/* Elements that differ, spread over the tensor. */
typedef struct samples {
    size_t at[SAMPLES], n;
    bool vary; /* their values do, and are well above rounding: equal ones prove something */
} samples;

static void take_samples(samples *s, const ari_whole *w)
{
    const size_t step = w->view.survey.different / SAMPLES + 1;
    size_t seen = 0, large = 0, distinct = 0;
    *s = (samples){.n = 0};
    for (size_t i = 0; i < w->count && s->n < SAMPLES; i++) {
        if (!ari_off(w, i) || seen++ % step != 0)
            continue;
        s->at[s->n++] = i;
        large += fabs((double)w->val[i]) > 16.0 * w->absolute && isfinite(w->val[i]);
        distinct += s->n > 1 && !ari_same_bits(w->val[i], w->val[s->at[s->n - 2]]);
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

static bool is_comparable(const ari_whole *w, const ar_dump_tensor *t)
{
    return strcmp(t->name, w->full->name) != 0 && same_shape(t, w->full) && (!w->step || t->parts > 0);
}

static ar_status see(seen *out, const ari_whole *w, const ar_dump_tensor *t)
{
    *out = (seen){.tensor = t};
    if (!w->step)
        return AR_OK;
    AR_TRY(ari_sample_init(&out->sample, t, w->step));
    out->tensor = &out->sample.tensor;
    return AR_OK;
}

static void unsee(seen *s)
{
    ari_sample_fini(&s->sample);
}

/* Whether data's sampled elements are those of a tensor. */
static bool samples_hold(const ari_whole *w, const samples *s, const float *data, const ar_dump_tensor *t)
{
    for (size_t k = 0; k < s->n; k++) {
        float y;
        if (ar_dump_read_f32(t, w->start + s->at[k], 1, &y) != AR_OK || !ari_holds(w, data[s->at[k]], (double)y))
            return false;
    }
    return true;
}

/* Whether the reference's sampled elements are those of a tensor, if it is there. */
static bool holds_reference(const ari_whole *w, const samples *s, const ar_dump_tensor *t)
{
    seen other;
    if (!t || !is_comparable(w, t) || see(&other, w, t) != AR_OK)
        return false;
    const bool holds = samples_hold(w, s, w->ref, other.tensor);
    unsee(&other);
    return holds;
}

/* Whether all different elements are those of a tensor. */
static ar_status all_hold(bool *held, double *worst, const ari_whole *w, const ar_dump_tensor *t)
{
    float y[CHUNK];
    *held = false;
    *worst = 0.0;
    for (size_t at = 0; at < w->count; at += CHUNK) {
        const size_t n = w->count - at < CHUNK ? w->count - at : CHUNK;
        AR_TRY(ar_dump_read_f32(t, w->start + at, n, y));
        for (size_t i = 0; i < n; i++) {
            if (!ari_off(w, at + i))
                continue;
            if (!ari_holds(w, w->val[at + i], (double)y[i]))
                return AR_OK;
            if (!ari_same_bits(w->val[at + i], y[i]))
                *worst = fmax(*worst, fabs((double)w->val[at + i] - (double)y[i]));
        }
    }
    *held = ari_explains(w, *worst);
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

static void say_relation(ari_text *t, const ari_whole *w, const char *own, const char *theirs)
{
    const ari_order_key a = ari_order_of(own, w->path), b = ari_order_of(theirs, w->path);
    const bool stem = a.stem == b.stem && memcmp(own, theirs, a.stem) == 0;
    if (stem && a.pass == 'n' && (b.pass == 'i' || b.pass == 'n') && (b.pass == 'i' || b.step < a.step))
        ari_say(t,
                "; the weights before the step: no update (the optimizer does not have this parameter, or its result "
                "was lost)");
    else if (stem && a.pass == b.pass && a.step != b.step)
        ari_say(t, "; stale: the value of step %d at step %d (not written again, or read too early)", b.step, a.step);
    else if (stem)
        ari_say(t, "; the same tensor at another point of the step");
    else if (strstr(own, "_rope") && !strstr(theirs, "_rope") && strchr("fb", a.pass) && a.pass == b.pass &&
             a.layer == b.layer)
        ari_say(t, "; RoPE's rotation is missing");
    else if (differ_by_number(own, theirs))
        ari_say(t, "; another layer's: layers exchanged, or counted from another start");
    else if (a.layer == b.layer && a.section == b.section)
        ari_say(t, "; another module of the same layer: two were exchanged, or one name stands for the other");
    else
        ari_say(t, "; a buffer that was used again, or one name in place of another");
}

/* --- the same values ---------------------------------------------------------------------------------------------- */

static void say_values(ari_clue *f, const ari_whole *w, const samples *s, const ar_dump_tensor *t, double worst)
{
    const bool swapped = holds_reference(w, s, ar_dump_find(w->known->other, t->name));
    ari_text text = ari_find(f, ARI_IDENTITY + 9);
    snprintf(f->value, sizeof f->value, "each another tensor's value");
    ari_say(&text, "these are the values of %s in the reference: all %zu different elements, ", t->name,
            w->view.survey.different);
    ari_say_exactness(&text, w, worst);
    if (swapped)
        ari_say(&text, "; and that one has this one's: the two are exchanged");
    say_relation(&text, w, w->reference->name, t->name);
}

static void say_shared(ari_clue *f, const ari_whole *w, const ar_dump_tensor *t, double worst)
{
    ari_text text = ari_find(f, ARI_TRACE + 5);
    ari_say(&text, "the other dump has the same values under %s (", t->name);
    ari_say_exactness(&text, w, worst);
    ari_say(&text, "), where the reference has two different tensors: one buffer for both, or one name saved twice");
    say_relation(&text, w, w->reference->name, t->name);
}

/* Whether the reference's two tensors differ where the other's do not. */
static bool differ_in_reference(const ari_whole *w, const samples *s, const char *name)
{
    const ar_dump_tensor *r = ar_dump_find(w->known->reference, name);
    return r && is_comparable(w, r) && !holds_reference(w, s, r);
}

/* One tensor that may be the one whose values these are: of the reference, or of the other dump. */
static ar_status try_other(ari_clue *f, const ari_whole *w, const samples *s, const ar_dump_tensor *t, bool shared)
{
    samples first = *s;
    bool held = false;
    double worst = 0.0;
    first.n = s->n < FIRST_SAMPLES ? s->n : FIRST_SAMPLES;
    if (!samples_hold(w, &first, w->val, t) || !samples_hold(w, s, w->val, t) ||
        (shared && !differ_in_reference(w, s, t->name)))
        return AR_OK;
    AR_TRY(all_hold(&held, &worst, w, t));
    if (held && !shared)
        say_values(f, w, s, t, worst);
    else if (held)
        say_shared(f, w, t, worst);
    return AR_OK;
}

ar_status ari_seek_other(ari_clue *f, const ari_whole *w)
{
    const ar_dump *dumps[] = {w->known->reference, w->known->other};
    samples s;
    take_samples(&s, w);
    if (!dumps[0] || !dumps[1] || !s.vary)
        return AR_OK;
    for (size_t k = 0; k < 2 && f->confidence == ARI_SILENT; k++) {
        for (size_t i = 0; i < ar_dump_count(dumps[k]) && f->confidence == ARI_SILENT; i++) {
            seen t;
            if (!is_comparable(w, ar_dump_at(dumps[k], i)))
                continue;
            AR_TRY(see(&t, w, ar_dump_at(dumps[k], i)));
            const ar_status st = try_other(f, w, &s, t.tensor, k == 1);
            unsee(&t);
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

static products sampled_products(const ari_whole *w, const samples *s, const ar_dump_tensor *t)
{
    products p = {0};
    for (size_t k = 0; k < s->n; k++) {
        const size_t i = s->at[k];
        float y;
        if (ar_dump_read_f32(t, w->start + i, 1, &y) != AR_OK)
            return (products){0};
        add_product(&p, (double)w->val[i] - (double)w->ref[i], (double)y);
    }
    return p;
}

/* Whether the differences are a multiple of a tensor everywhere; the multiple. */
static ar_status find_multiple(double *factor, const ari_whole *w, const ar_dump_tensor *t)
{
    float y[CHUNK];
    products p = {0};
    *factor = 0.0;
    for (size_t at = 0; at < w->count; at += CHUNK) {
        const size_t n = w->count - at < CHUNK ? w->count - at : CHUNK;
        AR_TRY(ar_dump_read_f32(t, w->start + at, n, y));
        for (size_t i = 0; i < n; i++)
            add_product(&p, (double)w->val[at + i] - (double)w->ref[at + i], (double)y[i]);
    }
    if (is_multiple(&p, 0.999))
        *factor = p.dy / p.yy;
    return AR_OK;
}

static void say_added(ari_clue *f, const ari_whole *w, const ar_dump_tensor *t, double factor)
{
    const ari_order_key a = ari_order_of(w->reference->name, w->path), b = ari_order_of(t->name, w->path);
    const bool own = a.stem == b.stem && memcmp(a.name, b.name, a.stem) == 0;
    const bool weight = b.pass == 'i' || b.pass == 'w' || b.pass == 'n';
    ari_text text = ari_find(f, ARI_IDENTITY + 1);
    if (fabs(factor - 1.0) < 1e-3)
        ari_say(&text, "%s was added: the difference is that tensor", t->name);
    else if (fabs(factor + 1.0) < 1e-3)
        ari_say(&text, "%s is missing: the difference is that tensor, subtracted", t->name);
    else
        ari_say(&text, "the difference is %.6g times %s", factor, t->name);
    if (a.pass == 'g' && own && weight)
        ari_say(&text, ": weight decay of %.4g was added to the gradient", factor);
    else if (a.pass == 'n' && own && b.pass == 'g')
        ari_say(&text, ": another learning rate, or a step more or less along the gradient");
    else if (a.pass == 'g' && own && b.pass == 'g')
        ari_say(&text, ": a gradient of another step is in it (not zeroed before it was added to)");
    else if (a.pass == 'f' || a.pass == 'b')
        ari_say(&text, ": a residual or a second use of a value counted twice, or left out");
}

ar_status ari_seek_sum(ari_clue *f, const ari_whole *w)
{
    const ar_dump *dump = w->known->reference; /* the other's may carry the same mistake */
    samples s;
    take_samples(&s, w);
    if (!dump || s.n < 8 || w->view.survey.total.nan > 0)
        return AR_OK;
    const products own = sampled_products(w, &s, w->reference);
    if (is_multiple(&own, 0.9)) /* a factor, and other tensors may be much like this one */
        return AR_OK;
    for (size_t i = 0; i < ar_dump_count(dump) && f->confidence == ARI_SILENT; i++) {
        seen t;
        double factor = 0.0;
        if (!is_comparable(w, ar_dump_at(dump, i)))
            continue;
        AR_TRY(see(&t, w, ar_dump_at(dump, i)));
        const products p = sampled_products(w, &s, t.tensor);
        const ar_status st = is_multiple(&p, 0.99) ? find_multiple(&factor, w, t.tensor) : AR_OK;
        if (st == AR_OK && fabs(factor) > 1e-9)
            say_added(f, w, t.tensor, factor);
        unsee(&t);
        AR_TRY(st);
    }
    return AR_OK;
}
