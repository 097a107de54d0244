/* SPDX-License-Identifier: Apache-2.0 */
/* Words: names of dimensions, lists of indices and ranks, the line that says where. */
#include "verify/diagnose/pattern_impl.h"
#include "verify/diagnose/roles.h"

enum { RUNS_SHOWN = 3, ROWS_SHOWN = 6 }; /* a line has about 250 characters */

/* --- names -------------------------------------------------------------------------------------------------------- */

bool ari_name_has(const ari_difference *d, const char *part)
{
    return strstr(d->name, part) != NULL;
}

static const char *leaf_of(const ari_difference *d)
{
    const char *dot = strrchr(d->name, '.');
    return dot ? dot + 1 : d->name;
}

bool ari_leaf_has(const ari_difference *d, const char *part)
{
    return strstr(leaf_of(d), part) != NULL;
}

bool ari_is_norm(const ari_difference *d)
{
    return (ari_name_is(d->name) & ARI_IS_NORM) != 0;
}

bool ari_is_embedding(const ari_difference *d)
{
    return (ari_name_is(d->name) & ARI_IS_EMBEDDING) != 0;
}

bool ari_is_row_parallel(const ari_difference *d)
{
    return (ari_name_is(d->name) & ARI_IS_ROW_PARALLEL) != 0;
}

static bool is_parameter(const ari_difference *d)
{
    return d->pass != 'f' && d->pass != 'b';
}

bool ari_is_by_heads(const ari_difference *d)
{
    if (is_parameter(d) || d->ndim != 3 || d->head_dim == 0 || d->shape[2] % d->head_dim != 0)
        return false;
    switch (ari_module_of(d->name, strlen(d->name)).role) {
    case ARI_Q_ROPE:
    case ARI_K_ROPE:
    case ARI_Q_HEADS:
    case ARI_K_HEADS:
    case ARI_V_HEADS:
        return true;
    case ARI_Q:
    case ARI_K:
    case ARI_V:
    case ARI_CONTEXT:
        return d->pass == 'f';
    case ARI_OUT: /* its input */
        return d->pass == 'b';
    default:
        return false;
    }
}

const char *ari_dim_name(const ari_grid *g, int dim, bool plural)
{
    static const char *const words[][2] = {
        {"sample", "samples"}, {"token", "tokens"},     {"feature", "features"}, {"head", "heads"},
        {"query", "queries"},  {"key", "keys"},         {"lane", "lanes"},       {"row", "rows"},
        {"column", "columns"}, {"element", "elements"}, {"id", "ids"},
    };
    enum { SAMPLE, TOKEN, FEATURE, HEAD, QUERY, KEY, LANE, ROW, COLUMN, ELEMENT, ID };
    const ari_difference *d = g->d;
    const unsigned is = ari_name_is(d->name);
    const bool scores = is & ARI_IS_SCORES, vocabulary = is & (ARI_IS_EMBEDDING | ARI_IS_HEAD);
    const bool logits = (is & ARI_IS_LOGITS) || ((is & ARI_IS_HEAD) && d->pass == 'f');
    const int activation[5][4] = {{ELEMENT},
                                  {ELEMENT},
                                  {TOKEN, FEATURE},
                                  {SAMPLE, TOKEN, logits ? ID : FEATURE},
                                  {SAMPLE, scores ? HEAD : TOKEN, scores ? QUERY : HEAD, scores ? KEY : LANE}};
    int word = activation[d->ndim][dim];
    if (is_parameter(d))
        word = d->ndim < 2 ? ELEMENT : dim == d->ndim - 1 ? COLUMN : dim == 0 && vocabulary ? ID : ROW;
    return words[word][plural];
}

/* --- lists -------------------------------------------------------------------------------------------------------- */

/* A set of 0 .. n-1 given by `in`, as runs: "17", "3..9, 12", "5 onward". */
static void say_set(ari_text *t, size_t n, bool (*in)(const void *, size_t), const void *user, bool onward)
{
    size_t runs = 0, members = 0;
    for (size_t i = 0; i < n; i++) {
        if (!in(user, i))
            continue;
        const size_t start = i;
        while (i + 1 < n && in(user, i + 1))
            i++;
        members += i - start + 1;
        if (++runs > RUNS_SHOWN)
            continue;
        ari_say(t, runs > 1 ? ", " : " ");
        if (start == i)
            ari_say(t, "%zu", start);
        else if (onward && i + 1 == n && start > 0)
            ari_say(t, "%zu onward", start);
        else
            ari_say(t, "%zu..%zu", start, i);
    }
    if (runs > RUNS_SHOWN)
        ari_say(t, ", ... (%zu in all)", members);
}

struct rank_set {
    bool (*in)(const void *, int);
    const void *user;
};

static bool rank_in(const void *user, size_t i)
{
    const struct rank_set *s = user;
    return s->in(s->user, (int)i);
}

void ari_say_ranks(ari_text *t, int ranks, bool (*in)(const void *, int), const void *user)
{
    const struct rank_set set = {in, user};
    int n = 0;
    for (int r = 0; r < ranks; r++)
        n += in(user, r);
    ari_say(t, n == 1 ? "rank" : "ranks");
    say_set(t, (size_t)ranks, rank_in, &set, false);
}

struct index_set {
    const size_t *hits;
    size_t unit; /* consecutive indices that count as one */
};

static bool index_in(const void *user, size_t i)
{
    const struct index_set *s = user;
    return s->hits[i * s->unit] > 0;
}

/* Whether each block of `unit` indices is hit as a whole or not at all. */
static bool in_units(const size_t *hits, size_t n, size_t unit)
{
    for (size_t i = 0; i < n; i++) {
        if ((hits[i] > 0) != (hits[i / unit * unit] > 0))
            return false;
    }
    return true;
}

void ari_say_indices(ari_text *t, const ari_grid *g, const ari_survey *s, int dim)
{
    struct index_set set = {s->hits[dim], 1};
    const size_t n = g->shape[dim], unit = g->d->head_dim;
    if (dim == g->nd - 1 && ari_is_by_heads(g->d) && in_units(set.hits, n, unit)) {
        set.unit = unit;
        const size_t heads = s->hit[dim] / unit;
        ari_say(t, heads == 1 ? "head" : "heads");
        say_set(t, n / unit, index_in, &set, true);
        ari_say(t, " (");
        set.unit = 1;
    }
    ari_say(t, "%s", ari_dim_name(g, dim, s->hit[dim] != 1));
    say_set(t, n, index_in, &set, true);
    if (unit > 0 && dim == g->nd - 1 && ari_is_by_heads(g->d) && in_units(set.hits, n, unit))
        ari_say(t, ")");
}

/* --- the line that says where ------------------------------------------------------------------------------------- */

/* Rows (tokens) that differ: all of their elements, or some. */
static void count_rows(const ari_grid *g, const ari_survey *s, size_t *full, size_t *touched)
{
    *full = *touched = 0;
    for (size_t row = 0; row < g->rows; row++) {
        size_t n = 0;
        for (size_t c = 0; c < g->cols; c++)
            n += ari_survey_bit(s, row * g->cols + c);
        *full += n == g->cols;
        *touched += n > 0;
    }
}

/* "every feature of 2 tokens: [0, 17], [3, 5]". */
static void say_rows(ari_text *t, const ari_grid *g, const ari_survey *s, size_t rows)
{
    size_t shown = 0;
    ari_say(t, "every %s of %zu %s:", ari_dim_name(g, g->nd - 1, false), rows, ari_dim_name(g, g->nd - 2, rows != 1));
    for (size_t row = 0; row < g->rows && shown < ROWS_SHOWN; row++) {
        if (!ari_survey_bit(s, row * g->cols))
            continue;
        ari_say(t, shown++ ? ", [" : " [");
        for (int dim = 0; dim + 1 < g->nd; dim++)
            ari_say(t, dim ? ", %zu" : "%zu", ari_grid_index(g, row * g->cols, dim));
        ari_say(t, "]");
    }
    if (rows > shown)
        ari_say(t, ", ...");
}

static void say_place(ari_text *t, const ari_grid *g, const ari_survey *s)
{
    size_t full = 0, touched = 0;
    int named = 0;
    if (g->nd >= 3 && !s->product) {
        count_rows(g, s, &full, &touched);
        if (full == touched && touched * 4 <= g->rows) {
            ari_say(t, ": ");
            say_rows(t, g, s, full);
            return;
        }
    }
    for (int dim = 0; dim < g->nd; dim++) {
        if (s->hit[dim] == g->shape[dim])
            continue;
        ari_say(t, named++ ? ", " : s->product ? ": " : ", all within ");
        ari_say_indices(t, g, s, dim);
    }
    if (!named && !s->product)
        ari_say(t, ", scattered");
}

static bool is_wrong(const void *user, int rank)
{
    const ari_survey *s = user;
    return s->rank[rank].different > 0;
}

static void say_wrong_ranks(ari_text *t, const ari_grid *g, const ari_survey *s)
{
    const int n = g->d->ranks;
    if (n == 1)
        return;
    ari_say(t, "; ");
    if (s->wrong_ranks == n)
        ari_say(t, n == 2 ? "on both ranks" : "on all %d ranks", n);
    else {
        ari_say(t, "on ");
        ari_say_ranks(t, n, is_wrong, s);
        ari_say(t, s->wrong_ranks == 1 ? " only" : " of %d", n);
    }
    if (s->shared > 0 && s->disagree == 0)
        ari_say(t, ", whose copies are equal");
    else if (s->disagree == s->different)
        ari_say(t, "; the copies differ from each other");
    else if (s->shared > 0)
        ari_say(t, "; the copies differ from each other in %zu element%s", s->disagree, s->disagree == 1 ? "" : "s");
}

static void say_share(ari_text *t, size_t part, size_t whole)
{
    const double percent = 100.0 * (double)part / (double)whole;
    if (percent < 99.5)
        ari_say(t, "%zu of %zu elements (%.2g%%)", part, whole, percent);
    else
        ari_say(t, "%zu of %zu elements, all but %zu", part, whole, whole - part);
}

void ari_say_where(ari_text *t, const ari_grid *g, const ari_survey *s, const char *value)
{
    if (s->different == g->count)
        ari_say(t, g->count == 1 ? "the one value" : "all %zu elements", g->count);
    else
        say_share(t, s->different, g->count);
    const bool every = s->total.kept == 0 && s->different < g->count;
    if (every)
        ari_say(t, ", every one that is not zero in the reference");
    if (value[0])
        ari_say(t, ", %s", value);
    if (s->different < g->count && !every)
        say_place(t, g, s);
    if (s->total.nan > 0)
        ari_say(t, g->d->hidden ? "; %zu NaN" : "; %zu NaN over the ranks", s->total.nan);
    say_wrong_ranks(t, g, s);
}
