/* SPDX-License-Identifier: Apache-2.0 */
/* Another tensor of the dumps that explains the values: they are its own, or differ by a multiple of it. */
#include <ctype.h>

#include "verify/diagnose/hypothesis.h"

/* --- the search --------------------------------------------------------------------------------------------------- */

enum { SAMPLES = 64, FEWEST = 4 };

/* A difference is another tensor's where that leaves this share of its squares: both runs' values are rounded. */
#define OTHERS ARI_KNOWN

/* Numbers that are sought in the tensors of the dumps. */
typedef struct search search;
struct search {
    const ari_case *c;
    const double *wanted; /* [n]; NAN: anything may be there */
    size_t n, from, to;   /* from, to: where the numbers are any */
    size_t at[SAMPLES], samples;
    bool equal; /* the numbers themselves are sought, else a multiple of them */
    /* Takes a tensor that may hold them, seen as this case is, or not. */
    void (*judge)(search *s, const ar_dump_tensor *t, const float *y, bool shared);
    const ar_dump_tensor *found;
    bool shared; /* found in the other's dump */
    double factor;
    ari_residual left;
    size_t alike, masked;
};

static bool is_any(const search *s, size_t i, double above)
{
    return fabs(s->wanted[i]) > above;
}

/* Elements spread over all that are not zero. */
static void take_samples(search *s)
{
    size_t there = 0, seen = 0;
    double squares = 0.0;
    for (size_t i = 0; i < s->n; i++) {
        there += is_any(s, i, 0.0);
        squares += isnan(s->wanted[i]) ? 0.0 : s->wanted[i] * s->wanted[i];
    }
    const double small = ARI_KNOWN * sqrt(squares / (double)s->n);
    s->to = s->n;
    while (s->from < s->to && !is_any(s, s->from, small))
        s->from++;
    while (s->to > s->from && !is_any(s, s->to - 1, small))
        s->to--;
    for (size_t i = 0; i < s->n && s->samples < SAMPLES; i++) {
        if (is_any(s, i, 0.0) && seen++ % (there / SAMPLES + 1) == 0)
            s->at[s->samples++] = i;
    }
}

static bool is_comparable(const ari_case *c, const ar_dump_tensor *t)
{
    return strcmp(t->name, c->full->name) != 0 && ari_same_shape(t, c->full) && (!c->step || t->parts > 0);
}

/* True if a tensor's elements at the sampled places may be the numbers. */
static bool samples_tell(const search *s, const ar_dump_tensor *t, size_t start)
{
    ari_fit f = {0};
    double by;
    float y;
    for (size_t k = 0; k < s->samples; k++) {
        const double wanted = s->wanted[s->at[k]];
        if (ar_dump_read_f32(t, start + s->at[k], 1, &y) != AR_OK ||
            (s->equal && !ari_holds(s->c, (float)wanted, (double)y)))
            return false;
        ari_fit_add(&f, wanted, (double)y, 0.0);
    }
    return s->equal || ari_fit_one(&by, &f) <= 10.0 * OTHERS;
}

/* A tensor that has as many elements; one of this case's shape is thinned as the case is. */
static ar_status try_tensor(search *s, const ar_dump_tensor *t, bool shared)
{
    const ari_case *c = s->c;
    const bool whole = s->n == c->count;
    ari_sample thin;
    float *y = NULL;
    if (whole ? !is_comparable(c, t) : t->count != s->n)
        return AR_OK;
    ARI_ARENA_SCOPE(c->arena);
    if (whole && c->step)
        AR_TRY(ari_sample_init(&thin, t, c->step, c->arena));
    const ar_dump_tensor *seen = whole && c->step ? &thin.tensor : t;
    const size_t start = whole ? c->start : 0;
    if (samples_tell(s, seen, start)) {
        AR_TRY(ARI_TAKE(&y, c->arena, s->n, t->name));
        AR_TRY(ar_dump_read_f32(seen, start, s->n, y));
        s->judge(s, t, y, shared);
    }
    return AR_OK;
}

/* Of the other dump all, or what the reference lacks alone. */
static ar_status try_all(search *s, bool all)
{
    const ar_dump *dumps[] = {s->c->known->reference, s->c->known->other};
    for (size_t k = 0; k < 2; k++) {
        for (size_t i = 0; dumps[k] && i < ar_dump_count(dumps[k]) && !(s->equal && s->found); i++) {
            const ar_dump_tensor *t = ar_dump_at(dumps[k], i);
            if (k == 0 || all || !ar_dump_find(dumps[0], t->name))
                AR_TRY(try_tensor(s, t, k == 1));
        }
    }
    return AR_OK;
}

/* A multiple of the numbers; the same module's tensor rather than another's. */
static void judge_multiple(search *s, const ar_dump_tensor *t, const float *y, bool shared)
{
    const char *own = s->c->d->name;
    size_t same = 1;
    double by;
    ari_fit f = {0};
    for (size_t i = s->from; i < s->to; i++)
        ari_fit_add(&f, s->wanted[i], (double)y[i], 0.0);
    while (t->name[same - 1] && t->name[same - 1] == own[same - 1])
        same++;
    if (!(ari_fit_one(&by, &f) <= OTHERS) || !isfinite(by) || by == 0.0 || same <= s->alike) /* y may be all zeros */
        return;
    s->alike = same;
    s->found = t;
    s->factor = by;
    s->shared = shared;
}

ar_status ari_find_multiple(const ar_dump_tensor **found, double *factor, const ari_case *c, const double *wanted,
                            size_t n)
{
    search s = {.c = c, .wanted = wanted, .n = n, .judge = judge_multiple};
    *found = NULL;
    take_samples(&s);
    if (s.samples < FEWEST || s.to - s.from < FEWEST || (s.to - s.from) * 16 < n)
        return AR_OK;
    AR_TRY(try_all(&s, n != c->count)); /* the other's tensors of this shape may have the same fault */
    *found = s.found;
    *factor = s.factor;
    return AR_OK;
}

/* --- what two names have to do with each other -------------------------------------------------------------------- */

/* True if the values are the tokens' embedding without the positions. */
static bool lacks_positions(const ari_case *c, const ari_order_key *a, const ari_order_key *b)
{
    bool positions = false;
    for (ari_walk w = ari_walk_of(c->known->reference, c->path, "f", 0); !positions && ari_walk_next(&w);)
        positions = ari_module_of(w.key.name, w.key.stem).role == ARI_POSITIONS;
    return positions && a->pass == 'f' && b->pass == 'f' && ari_module_of(b->name, b->stem).role == ARI_TOKENS;
}

/* True if one is a sum with a residual, and the other the sum's other term in the same layer. */
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

/* The relation of the two names, as a property. */
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
    if (ari_alike_but_for_numbers(own, strlen(own), theirs, strlen(theirs)))
        return ARI_IF(OF_LAYER);
    const bool part = a.pass == b.pass && b.stem > a.stem && memcmp(own, theirs, a.stem) == 0 && theirs[a.stem] == '.';
    if (part && a.pass == 'b')
        return ARI_IF(ALONE);
    if (part && a.pass == 'f' && !isdigit((unsigned char)own[a.stem - 1]))
        return ARI_IF(BLOCKS); /* a part of the module, which is no layer */
    const bool unnormed =
        a.pass == 'f' && b.pass == 'f' && (ari_name_is(own) & ARI_IS_NORM) && !(ari_name_is(theirs) & ARI_IS_NORM);
    const bool module = a.layer == b.layer && a.section == b.section, before = ari_order_compare(&b, &a) < 0;
    return (module ? ARI_IF(OF_MODULE) : 0) | (unnormed && (module || before) ? ARI_IF(OF_INPUT) : 0);
}

/* --- the same values ---------------------------------------------------------------------------------------------- */

/* True if a tensor is there and has the reference's sampled elements. */
static bool holds_reference(const search *s, const ar_dump_tensor *t)
{
    const ari_case *c = s->c;
    ari_sample thin;
    size_t k = 0;
    float y;
    if (!t || !is_comparable(c, t) || (c->step && ari_sample_init(&thin, t, c->step, c->arena) != AR_OK))
        return false;
    while (k < s->samples && ar_dump_read_f32(c->step ? &thin.tensor : t, c->start + s->at[k], 1, &y) == AR_OK &&
           ari_holds(c, c->ref[s->at[k]], (double)y))
        k++;
    return k == s->samples;
}

/* Judges a tensor of the other dump by whether the reference's two differ. Elements that are zero on both sides, but
 * not in the other tensor, are masked. */
static void judge_values(search *s, const ar_dump_tensor *t, const float *y, bool shared)
{
    const ari_case *c = s->c;
    const ar_dump_tensor *there = shared ? ar_dump_find(c->known->reference, t->name) : NULL;
    const ari_hypothesis h = {ari_expect_values, .c = c, .of = y, .differs_only = true, .kind = ARI_FOUND_OTHER_TENSOR};
    if ((shared && (!there || !is_comparable(c, there) || holds_reference(s, there))) || !ari_holds_all(&s->left, &h))
        return;
    s->found = t;
    s->shared = shared;
    for (size_t i = 0; i < c->count; i++)
        s->masked += c->ref[i] == 0.0f && c->val[i] == 0.0f && y[i] != 0.0f;
}

static void found_other(ari_trace *t, const search *s)
{
    const ari_case *c = s->c;
    const char *own = c->reference->name, *name = s->found->name;
    /* A weight before the step, up to more than rounding, is one that moved a little. */
    if ((relation_of(c, own, name) & ARI_IF(OF_BEFORE)) && s->left.worst > ARI_SEEN * c->survey.total.max_difference)
        return;
    ari_trace_set(t, s->shared ? ARI_FOUND_SHARED_TENSOR : ARI_FOUND_OTHER_TENSOR, relation_of(c, own, name));
    if (!s->shared && c->known->other && holds_reference(s, ar_dump_find(c->known->other, name)))
        t->flags |= ARI_IF(EXCHANGED);
    t->flags |= s->masked >= 16 ? ARI_IF(CUT) : 0; /* fewer may be zero by accident */
    t->flags |= c->survey.total.gained == c->survey.different ? ARI_IF(ZERO) : 0;
    ARI_FACTS(t, {"other", .text = name}, {"step", .count = (size_t)ari_order_of(own, c->path).step},
              {"of_step", .count = (size_t)ari_order_of(name, c->path).step}, {"masked", .count = s->masked});
    ari_say_exactness(t, c, s->left.worst);
}

ar_status ari_measure_other(ari_trace *t, const ari_case *c)
{
    search s = {.c = c, .n = c->count, .judge = judge_values, .equal = true};
    double *wanted = NULL;
    size_t large = 0, distinct = 0; /* samples that are well above rounding, and that differ from the one before */
    AR_TRY(ARI_TAKE(&wanted, c->arena, c->count, c->d->name));
    for (size_t i = 0; i < c->count; i++)
        wanted[i] = ari_off(c, i) ? (double)c->val[i] : (double)NAN;
    s.wanted = wanted;
    take_samples(&s);
    for (size_t k = 0; k < s.samples; k++) {
        const double own = wanted[s.at[k]];
        large += fabs(own) > 16.0 * c->absolute && isfinite(own);
        distinct += k > 0 && own != wanted[s.at[k - 1]];
    }
    if (s.samples >= FEWEST && distinct * 2 >= s.samples && large * 2 >= s.samples) /* else equal ones prove nothing */
        AR_TRY(try_all(&s, true));
    if (s.found)
        found_other(t, &s);
    return AR_OK;
}

/* --- a tensor more or less ---------------------------------------------------------------------------------------- */

static void found_added(ari_trace *t, const ari_case *c, const ar_dump_tensor *other, double factor)
{
    const ari_order_key a = ari_order_of(c->reference->name, c->path), b = ari_order_of(other->name, c->path);
    const bool own = a.stem == b.stem && memcmp(a.name, b.name, a.stem) == 0;
    const bool weight = b.pass == 'i' || b.pass == 'w' || b.pass == 'n';
    const bool plus = ari_is_near(factor, 1.0, ARI_KNOWN), minus = ari_is_near(factor, -1.0, ARI_KNOWN);
    ari_trace_set(t, ARI_FOUND_TENSOR_ADDED, 0);
    if (a.pass == 'g' && own && weight)
        t->flags |= ARI_IF(OF_WEIGHT);
    else if (a.pass == 'n' && own && b.pass == 'g')
        t->flags |= ARI_IF(OF_GRADIENT);
    else if (a.pass == 'g' && own && b.pass == 'g')
        t->flags |= ARI_IF(OF_STEP);
    else if (minus && a.pass == 'g' && b.pass == 'g' && !ar_dump_find(c->known->reference, other->name))
        t->flags |= ARI_IF(FOREIGN);             /* its own, and a part of this one's there */
    t->flags |= plus || minus ? ARI_IF(ONE) : 0; /* once more, or not at all */
    ARI_FACTS(t, {"factor", .number = factor}, {"other", .text = other->name});
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
    const ari_tally *all = &c->survey.total;
    const ari_fit own = {.yy = all->dd, .ya = all->vr - all->rr, .aa = all->rr};
    const ar_dump_tensor *found = NULL;
    double factor, *apart = NULL;
    if (all->different < 8)
        return AR_OK;
    const bool alike = ari_fit_one(&factor, &own) <= 0.1; /* a factor: others may be much like this tensor */
    AR_TRY(ARI_TAKE(&apart, c->arena, c->count, c->d->name));
    for (size_t i = 0; i < c->count; i++)
        apart[i] = (double)c->val[i] - (double)c->ref[i];
    AR_TRY(ari_find_multiple(&found, &factor, c, apart, c->count));
    if (found && !(alike && ar_dump_find(c->known->reference, found->name)))
        found_added(t, c, found, factor);
    return AR_OK;
}
