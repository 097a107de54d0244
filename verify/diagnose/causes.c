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
    const ari_difference *d = c->d;
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

static bool meets(const ari_cause *row, const ari_case *c, ari_properties flags)
{
    const char *passes = row->passes, pass = c->d->pass;
    return (flags & row->needs) == row->needs && !(flags & row->without) && (!row->is || (row->is & c->is)) &&
           (!passes || (passes[0] == '^' ? !strchr(passes + 1, pass) : strchr(passes, pass) != NULL));
}

/* --- the sentence ------------------------------------------------------------------------------------------------- */

ari_axes ari_axes_of_ranks(const ari_case *c, int n)
{
    ari_axes has = 0, several = 0;
    for (int i = ARI_LAYOUT_DP; i < ARI_LAYOUT_AXES; i++) {
        const ari_axes axes = ari_layout_axes[i].axes;
        const int ranks = ari_ranks_along(&c->known->mesh, axes);
        several |= ranks > 1 || ari_along(c->d, axes) > 1 ? axes : 0;
        has |= ranks > 1 && ranks == n ? axes : 0;
    }
    return has ? has : several ? several : ARI_CUTS_SAMPLES | ARI_CUTS_FEATURES;
}

/* Facts of the case, available to every trace. */
static ari_trace facts_of_case(const ari_case *c)
{
    const ari_difference *d = c->d;
    const ari_grid *g = &c->grid;
    const ari_tally *all = &c->survey.total;
    const int rows = g->nd < 2 ? 0 : g->nd - 2;
    char mesh[ARI_AXES_TEXT], data[ARI_AXES_TEXT];
    ari_trace t = {.facts = 0};
    ARI_FACTS(&t, {"ranks", .number = d->ranks}, {"batch", .count = d->batch}, {"micro", .number = d->micro_batches},
              {"different", .count = c->survey.different}, {"count", .count = g->count},
              {"row_count", .count = g->rows}, {"row_samples", .count = g->shape[0]},
              {"angle", .number = ari_cosine(all)}, {"size", .number = sqrt(all->vv / all->rr)},
              {"row", .text = ari_dim_name(g, rows, false)}, {"rows", .text = ari_dim_name(g, rows, true)},
              {"columns", .text = ari_dim_name(g, g->nd - 1, true)},
              {"mesh", .text = ari_axes_text(mesh, c, ari_axes_of_ranks(c, 0), " or ")},
              {"data", .text = ari_extent_text(data, c->known->other, ARI_LAYOUT_DP)});
    for (int i = 0; i < ARI_LAYOUT_AXES; i++)
        ARI_FACTS(&t, {ari_layout_axes[i].name, .number = ari_along(d, ari_layout_axes[i].axes)});
    for (int right = 0; right < 2; right++) {
        ari_text ranks = ari_list(&t, right ? "right" : "wrong");
        ari_say_ranks(&ranks, c, right ? ARI_RANKS_RIGHT : ARI_RANKS_WRONG);
    }
    ari_text part = ari_list(&t, "part");
    ari_say_part(&part, c);
    return t;
}

static const ari_fact *find_fact(const ari_trace *t, const char *name, size_t n)
{
    size_t i = 0;
    while (i < t->facts && (strlen(t->fact[i].name) != n || strncmp(t->fact[i].name, name, n) != 0))
        i++;
    return i < t->facts ? &t->fact[i] : NULL;
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

/* Adds a row's text up to its newline, with what the trace states, else what the case does. */
static void fill_sentence(ari_text *out, ari_trace *t, const ari_case *c, const char *text)
{
    const ari_trace of_case = facts_of_case(c);
    while (*text) {
        const size_t plain = strcspn(text, "{\n");
        ari_say(out, "%.*s", (int)plain, text);
        text += plain;
        if (*text != '{')
            return;
        const char *name = text + 1, *end = strchr(name, '}');
        const size_t n = strcspn(name, ":}");
        const ari_fact *own = find_fact(t, name, n), *f = own ? own : find_fact(&of_case, name, n);
        text = end + 1;
        if (!f) { /* no row asks for what its measure does not state */
            ari_say(out, "{?}");
            continue;
        }
        say_fact(out, f, name[n] == ':' ? name + n + 1 : "");
        if (f->is != ARI_FACT_TEXT)
            keep_evidence(&t->evidence, f);
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

/* The first row of that kind whose conditions are met; *i is its number. */
static const ari_cause *row_of(size_t *i, const ari_case *c, ari_trace_kind kind, ari_properties flags)
{
    const ari_cause *row;
    *i = 0;
    while ((row = ari_cause_at(*i)) != NULL && !(row->id && row->kind == kind && meets(row, c, flags)))
        ++*i;
    return row;
}

void ari_match_cause(ari_trace *t, const ari_case *c)
{
    const ari_properties flags = t->flags | properties_of(c);
    ari_text looks = ari_text_in(t->looks, sizeof t->looks), hint = ari_text_in(t->hint, sizeof t->hint);
    bool own = true;
    size_t i;
    t->cause = row_of(&i, c, t->kind, flags);
    t->confidence = t->cause ? t->cause->confidence - t->penalty : ARI_SILENT;
    if (!t->cause)
        return;
    t->evidence = (ar_evidence){.cause = t->cause->id};
    fill_sentence(&hint, t, c, t->cause->text);
    fill_sentence(&looks, t, c, t->cause->looks);
    for (const ari_cause *row; (row = ari_cause_at(++i)) != NULL;) { /* what rows after it add */
        own = own && !row->id && row->kind == ARI_FOUND_NOTHING;
        if (!row->id && (own || row->kind == t->kind) && meets(row, c, flags))
            fill_sentence(&hint, t, c, row->text);
    }
}

/* --- what was considered ------------------------------------------------------------------------------------------ */

void ari_consider(const ari_case *c, ari_trace_kind kind, ari_properties flags, double left)
{
    ar_evidence *e = c->considered;
    const double explained = 1.0 - left;
    size_t i;
    if (!e || !(explained >= ARI_NEAR))
        return;
    const ari_cause *row = row_of(&i, c, kind, flags | properties_of(c));
    if (!row || strcmp(row->id, "unknown") == 0)
        return;
    i = 0; /* in the place that it has with less, else of the last */
    while (i < e->considered && i + 1 < AR_EVIDENCE_CONSIDERED && strcmp(e->consider[i].cause, row->id) != 0)
        i++;
    if (i < e->considered && e->consider[i].explained >= explained)
        return;
    e->considered += i == e->considered;
    for (; i > 0 && e->consider[i - 1].explained < explained; i--)
        e->consider[i] = e->consider[i - 1];
    e->consider[i].cause = row->id;
    e->consider[i].explained = explained;
}

void ari_say_considered(ari_text *why, ar_evidence *e, const ar_evidence *considered)
{
    e->considered = considered->considered;
    memcpy(e->consider, considered->consider, sizeof e->consider);
    for (size_t i = 0; i < 2 && i < e->considered && e->cause && strcmp(e->cause, "unknown") == 0; i++)
        ari_say(why, i == 0 ? "; nearest: %s, which leaves %.2g of it unexplained" : ", and %s, %.2g",
                e->consider[i].cause, 1.0 - e->consider[i].explained);
}
