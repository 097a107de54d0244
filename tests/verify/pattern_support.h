/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Tables of traces: a tensor, how ranks hold it, what a mistake makes of their copies, and what is said of that. */

#include "anyrank/parallel.h"
#include "ref/core/tensor_private.h"
#include "ref/placement/parallel_private.h"
#include "tests/support/noise.h"
#include "tests/support/test.h"
#include "verify/diagnose/case.h"
#include "verify/dump/dump.h"

enum { MAX_RANKS = 64, MAX_COUNT = 8192, MAX_TEXTS = 4 };

typedef struct world world;

/* The element with index i of the full tensor in rank r's copy, where the reference has x. Of what every rank has, as
 * the reference itself, r is 0; of the reference, x is noise. */
typedef float element_of(const world *w, int r, size_t i, float x);
#define VALUE(name, expression)                                 \
    static float name(const world *w, int r, size_t i, float x) \
    {                                                           \
        (void)w, (void)r, (void)i, (void)x;                     \
        return (float)(expression);                             \
    }

/* How ranks hold a tensor. */
typedef struct place {
    enum { ON_ALL, IN_SHARDS, IN_GROUPS, IN_BLOCKS, ON_MESH } how;
    int ranks, parts, dim, ndim;
    size_t shape[AR_MAX_DIMS];
    ar_parallel over;
} place;

#define DIMS(...) .ndim = (int)(sizeof(const size_t[]){__VA_ARGS__} / sizeof(size_t)), .shape = {__VA_ARGS__}
/* A value of no dimension. */
#define ONE_VALUE(n) .on = {.how = ON_ALL, .ranks = (n)}
#define WHOLE(n, ...) .on = {.how = ON_ALL, .ranks = (n), DIMS(__VA_ARGS__)}
/* Cut along a dimension, unevenly if need be. */
#define SHARDED(n, d, ...) .on = {.how = IN_SHARDS, .ranks = (n), .dim = (d), DIMS(__VA_ARGS__)}
/* KV heads: so many shards, each on neighbouring ranks. */
#define GROUPED(n, p, d, ...) .on = {.how = IN_GROUPS, .ranks = (n), .parts = (p), .dim = (d), DIMS(__VA_ARGS__)}
/* The first dimension is two halves, each of which is cut. */
#define PACKED(n, ...) .on = {.how = IN_BLOCKS, .ranks = (n), DIMS(__VA_ARGS__)}
/* An activation's samples lie over dp, in runs whose lengths differ by one, its positions over cp, dimension d over tp
 * (-1: all of it on every rank). A parameter is whole on every dp and cp rank. */
#define MESH(n, m, d, ...) CP_MESH(n, 1, false, m, d, __VA_ARGS__)
#define MESH_VALUE(n, m) CP_VALUE(n, 1, false, m)
#define CP_MESH(n, c, z, m, d, ...) .on = {.how = ON_MESH, OVER(n, c, z, m), .dim = (d), DIMS(__VA_ARGS__)}
#define CP_VALUE(n, c, z, m) .on = {.how = ON_MESH, OVER(n, c, z, m)}
#define OVER(n, c, z, m) .over = {.dp = (n), .cp = (c), .zigzag = (z), .tp = (m)}

typedef struct trace {
    const char *claim, *name;
    char pass;
    place on;
    element_of *is; /* what the copies hold; NULL: the reference */
    /* What is said: the cause (causes.md), words of the hint and of the pattern, and words of neither. */
    const char *cause, *hint[MAX_TEXTS], *pattern[MAX_TEXTS], *no[MAX_TEXTS];
    /* If that element becomes as much larger, the cause is another. */
    struct {
        int rank;
        size_t i;
        float by;
        const char *cause;
    } near;
    float by[4];                     /* what `is` may read as w->by */
    element_of *of;                  /* the reference; NULL: noise */
    element_of *before, *last;       /* the fields of ari_difference */
    const char *full;                /* the tensor's name in the reference's dump; NULL: there is none */
    const char *other;               /* of another tensor in it, NULL: none, */
    element_of *other_is;            /* its values, NULL: the reference's, */
    size_t other_shape[AR_MAX_DIMS]; /* and its shape; 0: the same */
    ari_difference d;                /* what else is known */
    int also[8];                     /* other numbers of ranks of which all is the same */
} trace;

#define CAUSE(id) .cause = (id)
#define HINT(...) .hint = {__VA_ARGS__}
#define PATTERN(...) .pattern = {__VA_ARGS__}
#define NO(...) .no = {__VA_ARGS__}
#define NEAR(r, i, by, id) .near = {r, i, by, id}
#define BY(...) .by = {__VA_ARGS__}
#define OF(f) .of = (f)
#define AMONG(full_name) .full = (full_name)
#define BESIDE(full_name, name, f) .full = (full_name), .other = (name), .other_is = (f)
#define KNOWN(...) .d = {__VA_ARGS__}
#define RANKS(dp, cp, tp) .mesh = {{1, dp, cp, 1, tp}} /* 0: not known */
#define ALSO(...) .also = {__VA_ARGS__}

struct world {
    const trace *t;
    const float *by;
    ari_difference d;
    size_t shape[AR_MAX_DIMS], count;
    float *reference, *beside[3], *local[MAX_RANKS];
    ar_layout layout[MAX_RANKS];
    ari_rank_copy copy[MAX_RANKS];
};

/* The last index, and what is before it. */
static inline size_t column(const world *w, size_t i)
{
    return i % w->shape[w->d.ndim - 1];
}

static inline size_t row_of(const world *w, size_t i)
{
    return i / w->shape[w->d.ndim - 1];
}

/* Of [samples, tokens, features]. */
static inline size_t token(const world *w, size_t i)
{
    return row_of(w, i) % w->shape[1];
}

static inline int tp_of(const world *w)
{
    return w->d.mesh.along[ARI_AXIS_TP];
}

static inline int cp_of(const world *w)
{
    return w->d.mesh.along[ARI_AXIS_RING];
}

static inline int dp_of(const world *w)
{
    return w->d.mesh.along[ARI_AXIS_DP];
}

static inline int tp_rank(const world *w, int r)
{
    return r % tp_of(w);
}

static inline int cp_rank(const world *w, int r)
{
    return r / tp_of(w) % cp_of(w);
}

static inline int dp_rank(const world *w, int r)
{
    return r / tp_of(w) / cp_of(w);
}

/* The element of the full tensor in rank r's copy; NULL where it holds none. */
static inline float *at(const world *w, int r, size_t index)
{
    const ar_layout *o = &w->layout[r];
    size_t g[AR_MAX_DIMS] = {0};
    for (int i = o->ndim - 1; i >= 0; i--) {
        g[i] = index % w->shape[i];
        index /= w->shape[i];
    }
    for (size_t k = 0; k < o->nbox; k++) {
        size_t local = 0;
        bool in = true;
        for (int i = 0; i < o->ndim; i++) {
            in = in && g[i] >= o->box[k].global[i] && g[i] < o->box[k].global[i] + o->box[k].extent[i];
            local = local * w->copy[r].shape[i] + o->box[k].local[i] + g[i] - o->box[k].global[i];
        }
        if (in)
            return &w->local[r][local];
    }
    return NULL;
}

static inline void lay_on_mesh(ar_layout *o, const world *w, int r)
{
    const ar_parallel *p = &w->t->on.over;
    const int dim = w->t->on.dim, ndim = w->d.ndim, tp = tp_of(w), cp = cp_of(w);
    if (dim < 0)
        cr_assert_ok(ari_layout_replicate(o, ndim, w->shape, r % tp, tp));
    else
        cr_assert_ok(ar_layout_shard(o, ndim, w->shape, dim, r % tp, tp));
    if (ndim < 3 || (w->d.pass != 'f' && w->d.pass != 'b')) {
        o->replica += o->replicas * (r / tp);
        o->replicas *= dp_of(w) * cp;
        return;
    }
    const size_t rank = (size_t)dp_rank(w, r), n = (size_t)dp_of(w), most = w->shape[0] % n;
    const ar_positions own = ari_parallel_positions(p, w->shape[1], cp_rank(w, r));
    o->box[0].global[0] = rank * (w->shape[0] / n) + (rank < most ? rank : most);
    o->box[0].extent[0] = w->shape[0] / n + (rank < most);
    o->nbox = cp > 1 && own.count[1] > 0 ? 2 : 1;
    o->box[1] = o->box[0];
    for (size_t k = 0; cp > 1 && k < o->nbox; k++) {
        o->box[k].global[1] = own.first[k];
        o->box[k].extent[1] = own.count[k];
        o->box[k].local[1] = k * own.count[0];
    }
}

static inline void lay_out(ar_layout *o, const world *w, int r)
{
    const place *on = &w->t->on;
    const int ndim = on->ndim, n = w->d.ranks, p = on->parts;
    const size_t half[2] = {w->shape[0] / 2, w->shape[0] / 2};
    if (on->how == ON_ALL)
        cr_assert_ok(ari_layout_replicate(o, ndim, w->shape, r, n));
    else if (on->how == IN_SHARDS)
        cr_assert_ok(ari_layout_shard_uneven(o, ndim, w->shape, on->dim, r, n));
    else if (on->how == IN_BLOCKS)
        cr_assert_ok(ari_layout_packed(o, ndim, w->shape, 0, half, 2, r, n));
    else if (on->how == ON_MESH)
        lay_on_mesh(o, w, r);
    else {
        cr_assert_ok(ar_layout_shard(o, ndim, w->shape, on->dim, r * p / n, p));
        o->replicas = n / p;
        o->replica = r % (n / p);
    }
}

static inline float *values(const world *w, element_of *f, size_t count)
{
    float *x = malloc((count + 1) * sizeof *x);
    cr_assert_not_null(x);
    for (size_t i = 0; i < count; i++) {
        const float own = w->reference && i < w->count ? w->reference[i] : noise(i);
        x[i] = f ? f(w, 0, i, own) : own;
    }
    return x;
}

static inline void fill_copies(world *w)
{
    for (int r = 0; r < w->d.ranks; r++)
        lay_out(&w->layout[r], w, r);
    for (int r = 0; r < w->d.ranks; r++) {
        w->copy[r].ndim = w->d.ndim;
        w->copy[r].layout = &w->layout[r];
        for (int i = 0; i < w->d.ndim; i++)
            w->copy[r].shape[i] = ari_layout_local(&w->layout[r], i);
        const size_t count = ari_volume(w->copy[r].shape, w->d.ndim);
        w->copy[r].local = w->local[r] = calloc(count + 1, sizeof *w->local[r]);
        cr_assert_not_null(w->local[r]);
        for (size_t i = 0; i < w->count; i++) {
            if (at(w, r, i))
                *at(w, r, i) = w->t->is ? w->t->is(w, r, i, w->reference[i]) : w->reference[i];
        }
    }
}

static inline void world_begin(world *w, const trace *t, int ranks)
{
    *w = (world){.t = t, .by = t->by, .d = t->d, .count = ari_volume(t->on.shape, t->on.ndim)};
    for (int i = 0; i < t->on.ndim; i++)
        w->shape[i] = t->on.shape[i];
    w->d.name = t->name;
    w->d.pass = t->pass;
    w->d.ndim = t->on.ndim;
    w->d.shape = w->shape;
    w->d.ranks = ranks;
    w->d.copy = w->copy;
    if (t->on.how == ON_MESH) {
        const ar_parallel *p = &t->on.over;
        w->d.mesh = (ari_ranks){{1, p->dp ? p->dp : 1, p->cp ? p->cp : 1, 1, p->tp ? p->tp : 1}};
        w->d.ranks = tp_of(w) * cp_of(w) * dp_of(w);
        w->d.batch = t->d.batch ? t->d.batch : w->d.ndim > 0 ? w->shape[0] : 1;
        w->d.seq = t->d.seq ? t->d.seq : w->d.ndim > 1 ? w->shape[1] : 1;
    }
    cr_assert(w->count <= MAX_COUNT && w->d.ranks <= MAX_RANKS);
    w->d.reference = w->reference = values(w, t->of, w->count);
    w->d.before = w->beside[0] = t->before ? values(w, t->before, w->count) : NULL;
    w->d.last = w->beside[1] = t->last ? values(w, t->last, w->count) : NULL;
    fill_copies(w);
}

static inline void world_free(world *w)
{
    for (int r = 0; r < w->d.ranks; r++)
        free(w->local[r]);
    for (size_t k = 0; k < 3; k++)
        free(w->beside[k]);
    free(w->reference);
}

/* What the reference's dump holds beside the tensor. */
static inline ar_dump *dump_of(world *w)
{
    const trace *t = w->t;
    const size_t *shape = t->other_shape[0] ? t->other_shape : w->shape;
    ar_dump *dump = NULL;
    ar_dump_tensor all[2] = {{.name = t->full, .dtype = AR_F32, .ndim = w->d.ndim, .count = w->count},
                             {.name = t->other, .dtype = AR_F32, .count = 1}};
    memcpy(all[0].shape, w->shape, sizeof w->shape);
    all[0].whole = w->reference;
    while (all[1].ndim < AR_MAX_DIMS && shape[all[1].ndim]) {
        all[1].shape[all[1].ndim] = shape[all[1].ndim];
        all[1].count *= shape[all[1].ndim++];
    }
    all[1].whole = w->beside[2] = values(w, t->other_is, all[1].count);
    cr_assert_ok(ari_dump_of_tensors(&dump, "the reference", all, t->other ? 2 : 1));
    w->d.dump = dump;
    w->d.dump_tensor = ar_dump_find(dump, t->full);
    return dump;
}

static inline ari_diagnosis found(const world *w)
{
    ari_diagnosis p;
    cr_assert_eq(ari_diagnose(&p, &w->d), AR_OK, "%s: %s", w->t->claim, ar_error_message());
    return p;
}

static inline const char *cause_of(const ari_diagnosis *p)
{
    return p->evidence.cause ? p->evidence.cause : "none";
}

/* Whether a hint has the words of a row's sentence in their order, whatever fills its places. */
static inline bool has_words_of(const char *hint, const ari_cause *row)
{
    char words[sizeof((ari_diagnosis *)0)->hint];
    for (const char *at = row->text; hint && *at && *at != '\n'; at += strcspn(at, "{\n")) {
        at += *at == '{' ? strcspn(at, "}") + 1 : 0;
        snprintf(words, sizeof words, "%.*s", (int)strcspn(at, "{\n"), at);
        hint = strstr(hint, words);
        hint = hint ? hint + strlen(words) : NULL;
    }
    return hint != NULL;
}

/* The identifier and the sentence are those of one row. */
static inline void expect_one_row(const world *w, const ari_diagnosis *p)
{
    bool any = !p->evidence.cause || strcmp(p->hint + strlen(p->hint) - 3, "...") == 0; /* cut */
    const ari_cause *row;
    for (size_t i = 0; !any && (row = ari_cause_at(i)) != NULL; i++)
        any = row->id && strcmp(row->id, p->evidence.cause) == 0 && has_words_of(p->hint, row);
    cr_expect(any, "%s: no row of %s says: %s", w->t->claim, cause_of(p), p->hint);
}

static inline void expect_cause(const world *w, const ari_diagnosis *p, const char *id)
{
    expect_one_row(w, p);
    cr_expect(!id || strcmp(cause_of(p), id) == 0, "%s: expected %s, not %s\n  pattern %s\n  hint    %s", w->t->claim,
              id, cause_of(p), p->pattern, p->hint);
}

static inline void expect_words(const world *w, const ari_diagnosis *p)
{
    for (size_t k = 0; k < MAX_TEXTS; k++) {
        const char *hint = w->t->hint[k], *pattern = w->t->pattern[k], *no = w->t->no[k];
        const char *const missing = hint && !strstr(p->hint, hint)            ? hint
                                    : pattern && !strstr(p->pattern, pattern) ? pattern
                                                                              : NULL;
        cr_expect(!missing, "%s: expected '%s'\n  pattern %s\n  hint    %s", w->t->claim, missing, p->pattern, p->hint);
        cr_expect(!no || (!strstr(p->hint, no) && !strstr(p->pattern, no)),
                  "%s: unexpected '%s'\n  pattern %s\n  hint    %s", w->t->claim, no, p->pattern, p->hint);
    }
    cr_expect(!strstr(p->hint, "{") && !strstr(p->pattern, "{"), "%s: %s", w->t->claim, p->hint);
}

/* What was found with the step before is not found without it. */
static inline void expect_less(const world *w)
{
    world less = *w;
    less.d.before = less.d.last = NULL;
    const ari_diagnosis p = found(&less);
    cr_expect(!strstr(p.hint, w->t->hint[0]), "%s, without the step before: %s", w->t->claim, p.hint);
}

/* Found twice, all is the same. */
static inline void expect_trace(const trace *t, int ranks)
{
    SCOPED(world_free) world w;
    world_begin(&w, t, ranks);
    OWNED(ar_dump_close) ar_dump *dump = t->full ? dump_of(&w) : NULL;
    const ari_diagnosis p = found(&w), q = found(&w);
    expect_cause(&w, &p, t->cause);
    expect_words(&w, &p);
    cr_expect(strcmp(p.hint, q.hint) == 0 && strcmp(p.pattern, q.pattern) == 0, "%s", t->claim);
    if ((t->before || t->last) && t->hint[0])
        expect_less(&w);
    if (t->near.cause) {
        *at(&w, t->near.rank, t->near.i) += t->near.by;
        const ari_diagnosis near = found(&w);
        expect_cause(&w, &near, t->near.cause);
    }
}

static inline void expect_traces(const trace *t, size_t n)
{
    for (size_t k = 0; k < n; k++) {
        expect_trace(&t[k], t[k].on.ranks);
        for (size_t i = 0; t[k].also[i]; i++)
            expect_trace(&t[k], t[k].also[i]);
    }
}

#define EXPECT_TRACES(table) expect_traces(table, sizeof(table) / sizeof *(table))
