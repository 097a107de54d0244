/* SPDX-License-Identifier: Apache-2.0 */
/* The table of causes, and the sentences that a trace's numbers fill. */
#include <stdio.h>

#include "verify/diagnose/case.h"

/* --- traces ------------------------------------------------------------------------------------------------------- */

void ari_trace_set(ari_trace *t, ari_trace_kind kind, ari_properties flags)
{
    t->kind = kind;
    t->flags = flags;
    t->penalty = 0;
    t->weighed = false;
    t->unexplained = 0.0;
    t->facts = 0;
}

void ari_trace_clear(ari_trace *t)
{
    ari_trace_set(t, ARI_FOUND_NOTHING, 0);
}

/* The fact of that name, a new one if there is none. */
static ari_fact *fact_of(ari_trace *t, const char *name)
{
    size_t i = 0;
    while (i < t->facts && strcmp(t->fact[i].name, name) != 0)
        i++;
    i = i < ARI_MOST_FACTS ? i : ARI_MOST_FACTS - 1; /* no measure states so many */
    t->facts += i == t->facts;
    t->fact[i].name = name;
    return &t->fact[i];
}

ari_text ari_list(ari_trace *t, const char *name)
{
    ari_fact *f = fact_of(t, name);
    f->is = ARI_FACT_TEXT;
    return ari_text_in(f->text, sizeof f->text);
}

void ari_facts(ari_trace *t, const ari_statement *facts)
{
    for (const ari_statement *s = facts; s->name; s++) {
        ari_fact *f = fact_of(t, s->name);
        ari_text text = ari_text_in(f->text, sizeof f->text);
        f->is = s->text ? ARI_FACT_TEXT : s->count > 0 ? ARI_FACT_INTEGER : ARI_FACT_NUMBER;
        f->number = s->count > 0 ? (double)s->count : s->number;
        ari_say(&text, "%s", s->text ? s->text : "");
    }
}

void ari_words(ari_trace *t, const char *name, const char *format, ...)
{
    char words[sizeof t->fact->text];
    ARI_FORMAT(words, format);
    ARI_FACTS(t, {name, .text = words});
}

double ari_value(const ari_trace *t, const char *name)
{
    for (size_t i = 0; i < t->facts; i++) {
        if (strcmp(t->fact[i].name, name) == 0)
            return t->fact[i].number;
    }
    return 0.0;
}

/* --- which row ---------------------------------------------------------------------------------------------------- */

/* Properties that every trace of a case has. */
static ari_properties properties_of(const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    const struct {
        bool has;
        ari_properties flags;
    } all[] = {
        {!d->hidden, ARI_IF(SEEN)},
        {d->hidden, ARI_IF(HIDDEN)},
        {ari_along(d, ARI_CUTS_SAMPLES) > 1, ARI_IF(DP)},
        {ari_along(d, ARI_CUTS_FEATURES) > 1, ARI_IF(TP)},
        {d->sp, ARI_IF(SP)},
        {d->gathers, ARI_IF(GATHERED)},
        {c->survey.disagree > 0, ARI_IF(APART)},
        {c->survey.shared > 0 && c->survey.disagree == 0, ARI_IF(EQUAL)},
        {ari_is_alone(c), ARI_IF(LONE)},
        {d->micro_batches > 1, ARI_IF(MICRO)},
        {d->step > 1, ARI_IF(LATER)},
        {d->recomputed, ARI_IF(RECOMPUTED)},
        {d->batch > 1, ARI_IF(BATCH)},
        {d->ndim == 2, ARI_IF(MATRIX)},
        {isfinite(ari_cosine(&c->survey.total)), ARI_IF(FINITE)},
    };
    ari_properties flags = 0;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        flags |= all[i].has ? all[i].flags : 0;
    return flags;
}

static bool is_pass(const char *passes, char pass)
{
    return !passes || (passes[0] == '^' ? !strchr(passes + 1, pass) : strchr(passes, pass) != NULL);
}

static bool meets(const ari_cause *row, ari_properties flags, unsigned name, char pass)
{
    return (flags & row->needs) == row->needs && !(flags & row->without) && (!row->is || (row->is & name)) &&
           is_pass(row->passes, pass);
}

/* --- the sentence ------------------------------------------------------------------------------------------------- */

ari_axes ari_axes_of_ranks(const ari_case *c, int n)
{
    ari_axes has = 0, several = 0;
    for (int i = ARI_LAYOUT_DP; i < ARI_LAYOUT_AXES; i++) {
        const ari_axes axes = ari_layout_axes[i].axes;
        const int ranks = ari_ranks_along(&c->known->mesh, axes);
        several |= ranks > 1 || ari_along(c->grid.d, axes) > 1 ? axes : 0;
        has |= ranks > 1 && ranks == n ? axes : 0;
    }
    return has ? has : several ? several : ARI_CUTS_SAMPLES | ARI_CUTS_FEATURES;
}

/* Facts of the case, available to every trace. */
static bool fact_of_case(ari_fact *f, const ari_case *c, const char *name, size_t n)
{
    const ari_difference *d = c->grid.d;
    const ari_grid *g = &c->grid;
    const ari_tally *all = &c->survey.total;
    const struct {
        const char *name;
        double number;
        bool whole;
    } numbers[] = {
        {"ranks", d->ranks, true},
        {"batch", (double)d->batch, true},
        {"micro", d->micro_batches, true},
        {"different", (double)c->survey.different, true},
        {"count", (double)g->count, true},
        {"row_count", (double)g->rows, true},
        {"row_samples", (double)g->shape[0], true},
        {"angle", ari_cosine(all), false},
        {"size", sqrt(all->vv / all->rr), false},
    };
    for (int i = 0; i < ARI_LAYOUT_AXES; i++) {
        const ari_layout_axis *axis = &ari_layout_axes[i];
        if (strlen(axis->name) != n || strncmp(axis->name, name, n) != 0)
            continue;
        *f = (ari_fact){axis->name, ARI_FACT_INTEGER, ari_along(d, axis->axes), ""};
        return true;
    }
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        if (strlen(numbers[i].name) != n || strncmp(numbers[i].name, name, n) != 0)
            continue;
        *f = (ari_fact){numbers[i].name, numbers[i].whole ? ARI_FACT_INTEGER : ARI_FACT_NUMBER, numbers[i].number, ""};
        return true;
    }
    static const char *const words[] = {"row", "rows", "columns", "wrong", "right", "part", "mesh", "data"};
    const int rows = g->nd < 2 ? 0 : g->nd - 2;
    char axes[ARI_AXES_TEXT];
    ari_text text = ari_text_in(f->text, sizeof f->text);
    f->is = ARI_FACT_TEXT;
    size_t i = 0;
    while (i < 8 && (strlen(words[i]) != n || strncmp(words[i], name, n) != 0))
        i++;
    if (i < 3)
        ari_say(&text, "%s", ari_dim_name(g, i < 2 ? rows : g->nd - 1, i > 0));
    else if (i < 5)
        ari_say_ranks(&text, c, i == 4);
    else if (i == 5)
        ari_say_part(&text, c);
    else if (i == 7)
        ari_say(&text, "%s", ari_extent_text(axes, c->known->other, ARI_LAYOUT_DP));
    else
        ari_say(&text, "%s", ari_axes_text(axes, c, ari_axes_of_ranks(c, 0), " or "));
    return i < 8;
}

static bool find_fact(ari_fact *f, const ari_trace *t, const ari_case *c, const char *name, size_t n)
{
    for (size_t i = 0; i < t->facts; i++) {
        if (strlen(t->fact[i].name) == n && strncmp(t->fact[i].name, name, n) == 0) {
            *f = t->fact[i];
            return true;
        }
    }
    return fact_of_case(f, c, name, n);
}

static void keep_evidence(ar_evidence *e, const ari_fact *f)
{
    for (size_t i = 0; i < e->numbers; i++) {
        if (strcmp(e->number[i].name, f->name) == 0)
            return;
    }
    if (e->numbers < AR_EVIDENCE_NUMBERS && isfinite(f->number)) {
        e->number[e->numbers].name = f->name;
        e->number[e->numbers++].value = f->number;
    }
}

/* `form` is ".3g", "" for the number's own. */
static void say_fact(ari_text *out, const ari_fact *f, const char *form)
{
    const int precision = form[0] == '.' ? form[1] - '0' : 6;
    const char how = form[0] == '.' ? form[2] : f->is == ARI_FACT_INTEGER ? 'f' : 'g';
    if (f->is == ARI_FACT_TEXT)
        ari_say(out, "%s", f->text);
    else if (how == 'f')
        ari_say(out, "%.*f", form[0] == '.' ? precision : 0, f->number);
    else if (how == 'e')
        ari_say(out, "%.*e", precision, f->number);
    else
        ari_say(out, "%.*g", precision, f->number);
}

void ari_fill_sentence(ari_text *out, ari_trace *t, const ari_case *c, const char *text)
{
    while (*text) {
        const size_t plain = strcspn(text, "{\n");
        ari_say(out, "%.*s", (int)plain, text);
        text += plain;
        if (*text != '{')
            return;
        const char *name = text + 1, *end = strchr(name, '}');
        const size_t n = strcspn(name, ":}");
        ari_fact f = {.name = ""};
        if (!find_fact(&f, t, c, name, n)) /* no row asks for what its measure does not state */
            ari_say(out, "{?}");
        say_fact(out, &f, name[n] == ':' ? name + n + 1 : "");
        if (f.is != ARI_FACT_TEXT)
            keep_evidence(&t->evidence, &f);
        text = end + 1;
    }
}

const ari_cause *ari_cause_at(size_t i)
{
    static const ari_cause *(*const parts[])(size_t * n) = {
        ari_causes_of_numbers, ari_causes_of_step, ari_causes_of_again, ari_causes_of_experts, ari_causes_of_places};
    for (size_t part = 0, n = 0; part < sizeof parts / sizeof *parts; part++, i -= n) {
        const ari_cause *rows = parts[part](&n);
        if (i < n)
            return &rows[i];
    }
    return NULL;
}

/* The sentence of row i, and what rows after it add. */
static void say_cause(ari_trace *t, const ari_case *c, size_t i, ari_properties flags, unsigned name)
{
    ari_text looks = ari_text_in(t->looks, sizeof t->looks), hint = ari_text_in(t->hint, sizeof t->hint);
    t->evidence = (ar_evidence){.cause = t->cause->id};
    ari_fill_sentence(&hint, t, c, t->cause->text);
    ari_fill_sentence(&looks, t, c, t->cause->looks);
    bool own = true;
    for (const ari_cause *row; (row = ari_cause_at(++i)) != NULL;) {
        own = own && !row->id && row->kind == ARI_FOUND_NOTHING;
        if (!row->id && (own || row->kind == t->kind) && meets(row, flags, name, c->grid.d->pass))
            ari_fill_sentence(&hint, t, c, row->text);
    }
}

/* The first row of that kind whose conditions are met; *i is its number. */
static const ari_cause *row_of(size_t *i, ari_trace_kind kind, ari_properties flags, unsigned name, char pass)
{
    const ari_cause *row;
    *i = 0;
    while ((row = ari_cause_at(*i)) != NULL && !(row->id && row->kind == kind && meets(row, flags, name, pass)))
        ++*i;
    return row;
}

void ari_match_cause(ari_trace *t, const ari_case *c)
{
    const unsigned name = ari_name_is(c->grid.d->name);
    const ari_properties flags = t->flags | properties_of(c);
    size_t i;
    t->cause = row_of(&i, t->kind, flags, name, c->grid.d->pass);
    t->confidence = t->cause ? t->cause->confidence - t->penalty : ARI_SILENT;
    if (t->cause)
        say_cause(t, c, i, flags, name);
}

/* --- what was considered ------------------------------------------------------------------------------------------ */

void ari_consider(const ari_case *c, ari_trace_kind kind, ari_properties flags, double left)
{
    ar_evidence *e = c->considered;
    const double explained = 1.0 - left;
    size_t i, at = 0;
    if (!e || !(explained >= ARI_NEAR))
        return;
    const ari_cause *row = row_of(&i, kind, flags | properties_of(c), ari_name_is(c->grid.d->name), c->grid.d->pass);
    if (!row || strcmp(row->id, "unknown") == 0)
        return;
    for (i = 0; i < e->considered; i++) { /* once, with the most that it explains */
        if (strcmp(e->consider[i].cause, row->id) != 0)
            continue;
        if (e->consider[i].explained >= explained)
            return;
        memmove(&e->consider[i], &e->consider[i + 1], (--e->considered - i) * sizeof *e->consider);
    }
    while (at < e->considered && e->consider[at].explained >= explained)
        at++;
    if (at == AR_EVIDENCE_CONSIDERED)
        return;
    e->considered -= e->considered == AR_EVIDENCE_CONSIDERED;
    memmove(&e->consider[at + 1], &e->consider[at], (e->considered++ - at) * sizeof *e->consider);
    e->consider[at].cause = row->id;
    e->consider[at].explained = explained;
}

void ari_say_considered(ari_text *why, ar_evidence *e, const ar_evidence *considered)
{
    e->considered = considered->considered;
    memcpy(e->consider, considered->consider, sizeof e->consider);
    for (size_t i = 0; i < 2 && i < e->considered && e->cause && strcmp(e->cause, "unknown") == 0; i++)
        ari_say(why, i == 0 ? "; nearest: %s, which leaves %.2g of it unexplained" : ", and %s, %.2g",
                e->consider[i].cause, 1.0 - e->consider[i].explained);
}
