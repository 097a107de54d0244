/* SPDX-License-Identifier: Apache-2.0 */
/* Words: names of dimensions, heads and packed parts, lists of indices and ranks, chunks of context-parallel ranks, the
 * line that locates the differences. */
#include "verify/diagnose/case.h"

enum { RUNS_SHOWN = 3, ROWS_SHOWN = 6 }; /* a line has about 250 characters */

/* --- names -------------------------------------------------------------------------------------------------------- */

bool ari_is_bias(const ari_difference *d)
{
    const char *dot = strrchr(d->name, '.');
    return d->ndim == 1 && strstr(dot ? dot : d->name, "bias") != NULL;
}

/* True if an activation is [s, b, h]. */
static bool is_tokens_first(const ari_difference *d)
{
    return d->ndim > 2 && d->batch != d->seq && d->shape[0] == d->seq && d->shape[1] == d->batch;
}

const char *ari_dim_name(const ari_grid *g, int dim, bool plural)
{
    static const char *const words[][2] = {
        {"sample", "samples"}, {"token", "tokens"},     {"feature", "features"}, {"head", "heads"},
        {"query", "queries"},  {"key", "keys"},         {"lane", "lanes"},       {"row", "rows"},
        {"column", "columns"}, {"element", "elements"}, {"id", "ids"},           {"channel", "channels"},
    };
    enum { SAMPLE, TOKEN, FEATURE, HEAD, QUERY, KEY, LANE, ROW, COLUMN, ELEMENT, ID, CHANNEL };
    const ari_difference *d = g->d;
    const unsigned is = ari_name_is(d->name);
    const bool scores = is & ARI_IS_SCORES, vocabulary = is & (ARI_IS_EMBEDDING | ARI_IS_HEAD);
    const bool logits = (is & ARI_IS_LOGITS) || ((is & ARI_IS_HEAD) && d->pass == 'f');
    const bool heads = d->seq == g->shape[1] || ari_module_of(d->name, strlen(d->name)).role != ARI_NO_ROLE;
    const int activation[7][4] = {{ELEMENT},
                                  {ELEMENT},
                                  {d->batch == g->shape[0] ? SAMPLE : TOKEN, FEATURE},
                                  {SAMPLE, TOKEN, logits ? ID : FEATURE},
                                  {SAMPLE, HEAD, QUERY, KEY},
                                  {SAMPLE, TOKEN, HEAD, LANE},
                                  {SAMPLE, CHANNEL, ROW, COLUMN}}; /* of an image */
    const int form = d->ndim < 4 || scores ? d->ndim : heads ? 5 : 6;
    int word = activation[form][dim < 2 && is_tokens_first(d) ? 1 - dim : dim];
    if (!ari_is_activation(d))
        word = d->ndim < 2 ? ELEMENT : dim == d->ndim - 1 ? COLUMN : dim == 0 && vocabulary ? ID : ROW;
    return words[word][plural];
}

/* --- heads -------------------------------------------------------------------------------------------------------- */

/* The dimension of a module's outputs (inputs: the other one); -1: none. */
static int feature_dim(const ari_difference *d, bool inputs)
{
    if (ari_is_activation(d))
        return d->ndim - 1;
    if (d->ndim == 2)
        return (int)ari_module_within(d->name).in_out ^ (int)inputs;
    return d->ndim == 1 && !inputs ? 0 : -1;
}

enum { PACKED_HEADS = ARI_IS_QUERY_HEADS | ARI_IS_KV_HEADS };

/* Whose heads are along a dimension; 0: none's. */
static unsigned heads_along(const ari_difference *d, int dim)
{
    const ari_role role = ari_module_within(d->name).role;
    const unsigned is = ari_role_place_of(role)->is;
    const bool parameter = !ari_is_activation(d);
    if (dim != feature_dim(d, role == ARI_OUT) || (is & ARI_IS_NORM))
        return 0;
    if (role == ARI_OUT && (d->pass == 'f' || (parameter && d->ndim != 2)))
        return 0;
    /* "q_proj:bwd" is the gradient of its input, which has no heads. */
    const bool projects = role == ARI_QKV || role == ARI_Q || role == ARI_K || role == ARI_V;
    return projects && !parameter && d->pass != 'f' ? 0 : is & PACKED_HEADS;
}

bool ari_has_heads(const ari_case *c, int dim)
{
    return heads_along(c->d, dim) != 0;
}

bool ari_is_by_heads(const ari_difference *d)
{
    const unsigned of = d->ndim == 3 && ari_is_activation(d) ? heads_along(d, 2) : 0;
    return of && of != PACKED_HEADS && d->head_dim > 0 && d->shape[2] % d->head_dim == 0;
}

size_t ari_head_size(const ari_case *c, int dim)
{
    const size_t n = c->grid.shape[dim], heads = c->facts.heads, kv = c->facts.kv_heads;
    const unsigned of = heads_along(c->d, dim);
    const size_t all = of == PACKED_HEADS ? heads + 2 * kv : of == ARI_IS_KV_HEADS ? kv : of ? heads : 0;
    return all > 0 && n % all == 0 && !c->inner ? n / all : 0;
}

int ari_packed(const ari_case *c, int dim, const char *part[3], size_t size[3])
{
    const ari_difference *d = c->d;
    const ari_role role = ari_module_within(d->name).role;
    const size_t n = c->grid.shape[dim], head = ari_head_size(c, dim);
    const bool qkv = role == ARI_QKV;
    if (c->inner || dim != feature_dim(d, false) || (ari_is_activation(d) && d->pass != 'f'))
        return 0;
    if (qkv && head > 0) {
        size[0] = head * c->facts.heads;
        size[1] = size[2] = head * c->facts.kv_heads;
    } else if (qkv && n % 3 == 0) {
        size[0] = size[1] = size[2] = n / 3;
    } else if (role == ARI_GATE_UP && n % 2 == 0) {
        part[0] = "gate", part[1] = "up";
        size[0] = size[1] = n / 2;
        return 2;
    } else {
        return 0;
    }
    part[0] = "q", part[1] = "k", part[2] = "v";
    return 3;
}

/* --- parts of a dimension ----------------------------------------------------------------------------------------- */

void ari_bounding_range(const ari_case *c, int dim, size_t *from, size_t *to)
{
    const size_t *hits = c->survey.hits[dim], n = c->grid.shape[dim];
    *from = 0;
    *to = n;
    while (*from < n && hits[*from] == 0)
        (*from)++;
    while (*to > *from && hits[*to - 1] == 0)
        (*to)--;
}

size_t ari_block_of(size_t n, size_t from, size_t to, size_t *which)
{
    const size_t size = to - from;
    if (size == 0 || size == n || n % size != 0 || from % size != 0)
        return 0;
    *which = from / size;
    return n / size;
}

int ari_packed_part(const ari_case *c, int dim, size_t from, size_t to, const char **name, size_t *start, size_t *size)
{
    const char *part[3];
    size_t sizes[3];
    const int parts = ari_packed(c, dim, part, sizes);
    *start = 0;
    for (int i = 0; i < parts; *start += sizes[i++]) {
        *name = part[i];
        *size = sizes[i];
        if (from >= *start && to <= *start + sizes[i])
            return parts;
    }
    return 0;
}

static void say_block(ari_text *t, const ari_case *c, int dim)
{
    size_t from, to, which = 0, n = c->grid.shape[dim];
    ari_bounding_range(c, dim, &from, &to);
    if (n < 2 || to - from == n || to == from || c->survey.hit[dim] * 10 < (to - from) * 9)
        return;
    const char *part[3], *name = "";
    size_t sizes[3], start, size;
    const bool is_packed = ari_packed(c, dim, part, sizes) > 0;
    const int packed = ari_packed_part(c, dim, from, to, &name, &start, &size);
    if (packed) {
        ari_say(t, "; that is %s%s of %s", to - from == size ? "" : "within ", name, packed == 3 ? "q|k|v" : "gate|up");
        from -= start;
        to -= start;
        n = size;
    }
    const size_t blocks = ari_block_of(n, from, to, &which), head = ari_head_size(c, dim);
    if (head > 0 && (packed || !is_packed) && from % head == 0 && to % head == 0 && to - from < n) {
        ari_say(t, to - from == head ? "; head %zu" : "; heads %zu", from / head);
        if (to - from > head)
            ari_say(t, "..%zu", to / head - 1);
        ari_say(t, " of %zu", n / head);
    }
    if (blocks > 1 && blocks <= 64 && (to - from > 1 || blocks <= 8))
        ari_say(t, "; shard %zu of %zu%s%s (from 0)", which, blocks, packed ? "" : " of the ",
                packed ? "" : ari_dim_name(&c->grid, dim, true));
}

/* --- lists -------------------------------------------------------------------------------------------------------- */

/* A set of 0 .. n-1 given by `in`, as runs: "17", "3..9, 12", "5 onward". */
static void say_set(ari_text *t, size_t first, size_t n, bool (*in)(const void *, size_t), const void *user,
                    bool onward)
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
            ari_say(t, "%zu", first + start);
        else if (onward && i + 1 == n && start > 0)
            ari_say(t, "%zu onward", first + start);
        else
            ari_say(t, "%zu..%zu", first + start, first + i);
    }
    if (runs > RUNS_SHOWN)
        ari_say(t, ", ... (%zu in all)", members);
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

/* True if each block of `unit` indices is hit as a whole or not at all. */
static bool in_units(const size_t *hits, size_t n, size_t unit)
{
    for (size_t i = 0; i < n; i++) {
        if ((hits[i] > 0) != (hits[i / unit * unit] > 0))
            return false;
    }
    return true;
}

struct rank_set {
    const ari_survey *survey;
    ari_ranks_that which;
};

static bool rank_in(const void *user, size_t r)
{
    const struct rank_set *s = user;
    const ari_tally *own = &s->survey->rank[r];
    return s->which == ARI_RANKS_RIGHT ? ari_rank_is_right(s->survey, r)
                                       : (s->which == ARI_RANKS_WITH_NAN ? own->nan : own->different) > 0;
}

void ari_say_ranks(ari_text *t, const ari_case *c, ari_ranks_that which)
{
    const struct rank_set set = {&c->survey, which};
    const size_t ranks = (size_t)c->d->ranks;
    size_t n = 0;
    for (size_t r = 0; r < ranks; r++)
        n += rank_in(&set, r);
    ari_say(t, n == 1 ? "rank" : "ranks");
    say_set(t, (size_t)c->d->first_rank, ranks, rank_in, &set, false);
}

void ari_say_indices(ari_text *t, const ari_case *c, int dim)
{
    const ari_grid *g = &c->grid;
    const ari_survey *s = &c->survey;
    struct index_set set = {s->hits[dim], 1};
    const size_t n = g->shape[dim], unit = g->d->head_dim;
    const bool by_heads = dim == g->nd - 1 && ari_is_by_heads(g->d) && in_units(set.hits, n, unit);
    if (by_heads) {
        set.unit = unit;
        ari_say(t, s->hit[dim] == unit ? "head" : "heads");
        say_set(t, 0, n / unit, index_in, &set, true);
        ari_say(t, " (");
        set.unit = 1;
    }
    ari_say(t, "%s", ari_dim_name(g, dim, s->hit[dim] != 1));
    say_set(t, 0, n, index_in, &set, true);
    if (by_heads)
        ari_say(t, ")");
}

/* --- context-parallel ranks --------------------------------------------------------------------------------------- */

/* The context-parallel rank, of the first data-parallel rank, that holds an index along a dimension; -1: none, or each
 * holds all of it. */
static int holder_of(const ari_case *c, int dim, size_t index)
{
    for (int r = 0; r < ari_along(c->d, ARI_CUTS_FEATURES | ARI_CUTS_POSITIONS); r++) {
        const ar_layout *o = c->d->copy[r].layout;
        for (size_t k = 0; k < o->nbox && o->ndim == c->grid.nd; k++) {
            const ar_box *b = &o->box[k];
            if (index >= b->global[dim] && index < b->global[dim] + b->extent[dim])
                return b->extent[dim] < c->grid.shape[dim] ? r / ari_along(c->d, ARI_CUTS_FEATURES) : -1;
        }
    }
    return -1;
}

/* Properties common to all indices that differ, and to none that does not. */
typedef struct chunk_set {
    bool ranks, first, second, begins, ends;
    bool right[ARI_MOST_RANKS], wrong[ARI_MOST_RANKS]; /* a context-parallel rank has indices that are */
} chunk_set;

/* True if a rank's indices are apart: a zigzag's places have one chunk in either half. */
static bool is_zigzag(const ari_case *c, int dim)
{
    int runs[ARI_MOST_RANKS] = {0};
    bool apart = false;
    for (size_t i = 0; i < c->grid.shape[dim]; i++) {
        const int rank = holder_of(c, dim, i);
        runs[rank] += i == 0 || holder_of(c, dim, i - 1) != rank;
        apart = apart || runs[rank] > 1;
    }
    return apart;
}

/* True if a chunk begins at an index; one begins after the last. */
static bool begins_at(const ari_case *c, int dim, size_t i, bool zigzag)
{
    const size_t n = c->grid.shape[dim];
    return i == 0 || i == n || (zigzag && i == n / 2) || holder_of(c, dim, i) != holder_of(c, dim, i - 1);
}

static chunk_set compare_chunks(const ari_case *c, int dim, bool zigzag)
{
    const size_t n = c->grid.shape[dim], *hits = c->survey.hits[dim];
    chunk_set s = {.ranks = true, .first = zigzag, .second = zigzag, .begins = true, .ends = true};
    for (size_t i = 0; i < n; i++) {
        const int rank = holder_of(c, dim, i);
        const bool hit = hits[i] > 0;
        s.right[rank] = s.right[rank] || !hit;
        s.wrong[rank] = s.wrong[rank] || hit;
        s.ranks = s.ranks && !(s.right[rank] && s.wrong[rank]);
        s.first = s.first && hit == (i < n / 2);
        s.second = s.second && hit == (i >= n / 2);
        s.begins = s.begins && hit == begins_at(c, dim, i, zigzag);
        /* The last position of a sequence predicts nothing, so that it may be right where others are not. */
        s.ends = s.ends && (i + 1 == n || hit == begins_at(c, dim, i + 1, zigzag));
    }
    return s;
}

/* Appends ", the second chunk of every cp rank" for indices along a dimension that context-parallel ranks share out;
 * nothing for other sets. */
static void say_chunks(ari_text *t, const ari_case *c, int dim)
{
    const int ranks = ari_along(c->d, ARI_CUTS_POSITIONS);
    const char *axis = ari_layout_axes[ARI_LAYOUT_CP].name;
    if (ranks < 2 || ranks > ARI_MOST_RANKS || c->survey.hit[dim] == c->grid.shape[dim])
        return;
    for (size_t i = 0; i < c->grid.shape[dim]; i++) {
        if (holder_of(c, dim, i) < 0)
            return;
    }
    const chunk_set s = compare_chunks(c, dim, is_zigzag(c, dim));
    int wrong = 0, said = 0;
    for (int r = 0; r < ranks; r++)
        wrong += s.wrong[r];
    if (s.ranks)
        ari_say(t, ", the chunks of %s rank%s", axis, ARI_PLURAL(wrong));
    else if (s.first || s.second)
        ari_say(t, ", the %s chunk of every %s rank", s.first ? "first" : "second", axis);
    else if (s.begins || s.ends)
        ari_say(t, ", where chunks of %s ranks %s", axis, s.begins ? "begin" : "end");
    for (int r = 0; r < ranks && s.ranks; r++) {
        if (s.wrong[r])
            ari_say(t, said++ ? ", %d" : " %d", r);
    }
}

/* --- the line that locates the differences ------------------------------------------------------------------------ */

/* "every feature of 2 tokens: [0, 17], [3, 5]". */
static void say_rows(ari_text *t, const ari_case *c, size_t rows)
{
    const ari_grid *g = &c->grid;
    size_t shown = 0;
    ari_say(t, "every %s of %zu %s:", ari_dim_name(g, g->nd - 1, false), rows, ari_dim_name(g, g->nd - 2, rows != 1));
    for (size_t row = 0; row < g->rows && shown < ROWS_SHOWN; row++) {
        if (!ari_off(c, row * g->cols))
            continue;
        ari_say(t, shown++ ? ", [" : " [");
        for (int dim = 0; dim + 1 < g->nd; dim++)
            ari_say(t, dim ? ", %zu" : "%zu", ari_grid_index(g, row * g->cols, dim));
        ari_say(t, "]");
    }
    if (rows > shown)
        ari_say(t, ", ...");
}

static void say_place(ari_text *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    const ari_survey *s = &c->survey;
    size_t rows = 0; /* that differ, if they do so in all of their elements */
    int named = 0;
    for (size_t row = 0; g->nd >= 3 && !s->product && row < g->rows; row++)
        rows += ari_row_differs(c, row);
    if (rows > 0 && rows * g->cols == s->different && rows * 4 <= g->rows) {
        ari_say(t, ": ");
        say_rows(t, c, rows);
        return;
    }
    for (int dim = 0; dim < g->nd; dim++) {
        if (s->hit[dim] == g->shape[dim])
            continue;
        ari_say(t, named++ ? ", " : s->product ? ": " : ", all within ");
        ari_say_indices(t, c, dim);
        say_chunks(t, c, dim);
    }
    if (!named && !s->product)
        ari_say(t, ", scattered");
}

static void say_where_ranks(ari_text *t, const ari_case *c)
{
    const ari_survey *s = &c->survey;
    const int n = c->d->ranks;
    if (n == 1)
        return;
    ari_say(t, "; ");
    if (s->wrong_ranks == n)
        ari_say(t, n == 2 ? "on both ranks" : "on all %d ranks", n);
    else {
        ari_say(t, "on ");
        ari_say_ranks(t, c, ARI_RANKS_WRONG);
        ari_say(t, s->wrong_ranks == 1 ? " only" : c->d->first_rank ? " of its stage's %d" : " of %d", n);
    }
    if (s->shared > 0 && s->disagree == 0)
        ari_say(t, ", whose copies are equal");
    else if (s->disagree == s->different)
        ari_say(t, "; the copies differ from each other");
    else if (s->shared > 0)
        ari_say(t, "; the copies differ from each other in %zu element%s", s->disagree, ARI_PLURAL(s->disagree));
}

static void say_share(ari_text *t, size_t part, size_t whole)
{
    const double percent = 100.0 * (double)part / (double)whole;
    if (percent < 99.5)
        ari_say(t, "%zu of %zu elements (%.2g%%)", part, whole, percent);
    else
        ari_say(t, "%zu of %zu elements, all but %zu", part, whole, whole - part);
}

void ari_say_where(ari_text *t, const ari_case *c, const char *looks)
{
    const ari_grid *g = &c->grid;
    const ari_survey *s = &c->survey;
    if (s->different == g->count)
        ari_say(t, g->count == 1 ? "the one value" : "all %zu elements", g->count);
    else
        say_share(t, s->different, g->count);
    const bool every = s->total.kept == 0 && s->different < g->count;
    if (every)
        ari_say(t, ", every one that is not zero in the reference");
    if (looks[0])
        ari_say(t, ", %s", looks);
    if (s->different < g->count && !every)
        say_place(t, c);
    const int document = ari_first_document(c);
    if (document > 0)
        ari_say(t, "; rows from document %d on (from 0)", document);
    if (s->total.nan > 0)
        ari_say(t, g->d->hidden ? "; %zu NaN" : "; %zu NaN on ", s->total.nan);
    if (s->total.nan > 0 && !g->d->hidden)
        ari_say_ranks(t, c, ARI_RANKS_WITH_NAN);
    say_where_ranks(t, c);
}

void ari_say_part(ari_text *t, const ari_case *c)
{
    for (int dim = 0; dim < c->grid.nd; dim++)
        say_block(t, c, dim);
}

void ari_say_exactness(ari_trace *t, const ari_case *c, double worst)
{
    ari_words(t, "exact", worst == 0.0 ? "bit for bit" : "to within %.1e of the largest value", worst / c->max_ref);
}
