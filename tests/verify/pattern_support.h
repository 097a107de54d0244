/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_VERIFY_PATTERN_SUPPORT_H
#define TESTS_VERIFY_PATTERN_SUPPORT_H

/* A small world: one tensor, its reference and every rank's copy, right until a test spoils it. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "anyrank/dump.h"
#include "anyrank/parallel.h"
#include "dump/dump.h"
#include "tests/support/noise.h"
#include "verify/diagnose/diagnose.h"

enum { MAX_RANKS = 64, MAX_COUNT = 8192 };

typedef struct world {
    ari_difference d;
    size_t shape[AR_MAX_DIMS], count;
    float *reference, *local[MAX_RANKS];
    ar_layout layout[MAX_RANKS];
    ari_rank_copy copy[MAX_RANKS];
} world;

static inline void world_begin(world *w, const char *name, char pass, int ranks, int ndim, const size_t *shape)
{
    memset(w, 0, sizeof *w);
    w->count = 1;
    for (int i = 0; i < ndim; i++) {
        w->shape[i] = shape[i];
        w->count *= shape[i];
    }
    cr_assert(w->count <= MAX_COUNT && ranks <= MAX_RANKS);
    w->reference = malloc((w->count + 1) * sizeof *w->reference);
    cr_assert_not_null(w->reference);
    for (size_t i = 0; i < w->count; i++)
        w->reference[i] = noise(i);
    w->d = (ari_difference){.name = name,
                            .pass = pass,
                            .ndim = ndim,
                            .shape = w->shape,
                            .reference = w->reference,
                            .ranks = ranks,
                            .copy = w->copy};
}

/* The element of the full tensor in rank r's copy; NULL where it holds none. */
static inline float *at(world *w, int r, size_t index)
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

/* Copies of what the layouts say, equal to the reference. */
static inline void world_end(world *w)
{
    for (int r = 0; r < w->d.ranks; r++) {
        size_t count = 1;
        w->copy[r].ndim = w->d.ndim;
        w->copy[r].layout = &w->layout[r];
        for (int i = 0; i < w->d.ndim; i++) {
            w->copy[r].shape[i] = ar_layout_local(&w->layout[r], i);
            count *= w->copy[r].shape[i];
        }
        w->local[r] = calloc(count + 1, sizeof *w->local[r]);
        cr_assert_not_null(w->local[r]);
        w->copy[r].local = w->local[r];
        for (size_t i = 0; i < w->count; i++) {
            if (at(w, r, i))
                *at(w, r, i) = w->reference[i];
        }
    }
}

/* Again equal to the reference, after a test changed that. */
static inline void world_refresh(world *w)
{
    for (int r = 0; r < w->d.ranks; r++)
        free(w->local[r]);
    world_end(w);
}

static inline void world_free(world *w)
{
    for (int r = 0; r < w->d.ranks; r++)
        free(w->local[r]);
    free(w->reference);
}

static inline void replicated(world *w, const char *name, char pass, int ranks, int ndim, const size_t *shape)
{
    world_begin(w, name, pass, ranks, ndim, shape);
    for (int r = 0; r < ranks; r++)
        cr_assert_eq(ar_layout_replicate(&w->layout[r], ndim, shape, r, ranks), AR_OK);
    world_end(w);
}

static inline void sharded(world *w, const char *name, char pass, int ranks, int ndim, const size_t *shape, int dim)
{
    world_begin(w, name, pass, ranks, ndim, shape);
    for (int r = 0; r < ranks; r++)
        cr_assert_eq(ar_layout_shard_uneven(&w->layout[r], ndim, shape, dim, r, ranks), AR_OK);
    world_end(w);
}

/* KV heads: `parts` shards along `dim`, each on ranks/parts neighbouring ranks. */
static inline void grouped(world *w, const char *name, char pass, int ranks, int parts, int ndim, const size_t *shape,
                           int dim)
{
    world_begin(w, name, pass, ranks, ndim, shape);
    for (int r = 0; r < ranks; r++) {
        cr_assert_eq(ar_layout_shard(&w->layout[r], ndim, shape, dim, r * parts / ranks, parts), AR_OK);
        w->layout[r].replicas = ranks / parts;
        w->layout[r].replica = r % (ranks / parts);
    }
    world_end(w);
}

#define SHAPE(...) ((const size_t[]){__VA_ARGS__})

/* The layout's ranks: an activation's samples lie over dp, in runs whose lengths differ by one, its positions over cp,
 * dimension `dim` over tp (-1: all of it on every rank). A parameter is whole on every dp and cp rank. */
static inline void parallel_mesh(world *w, const char *name, char pass, const ar_parallel *p, int ndim,
                                 const size_t *shape, int dim)
{
    const bool activation = (pass == 'f' || pass == 'b') && ndim >= 3;
    const int tp = p->tp ? p->tp : 1, cp = p->cp ? p->cp : 1, dp = p->dp ? p->dp : 1;
    world_begin(w, name, pass, dp * cp * tp, ndim, shape);
    w->d.dp = dp;
    w->d.cp = cp;
    w->d.tp = tp;
    w->d.batch = shape[0];
    w->d.seq = ndim > 1 ? shape[1] : 1;
    for (int r = 0; r < dp * cp * tp; r++) {
        ar_layout *o = &w->layout[r];
        if (dim < 0)
            cr_assert_eq(ar_layout_replicate(o, ndim, shape, r % tp, tp), AR_OK);
        else
            cr_assert_eq(ar_layout_shard(o, ndim, shape, dim, r % tp, tp), AR_OK);
        if (!activation) {
            o->replica += o->replicas * (r / tp);
            o->replicas *= dp * cp;
            continue;
        }
        const size_t rank = (size_t)(r / tp / cp), n = (size_t)dp, most = shape[0] % n;
        const ar_positions own = ar_parallel_positions(p, shape[1], r / tp % cp);
        o->box[0].global[0] = rank * (shape[0] / n) + (rank < most ? rank : most);
        o->box[0].extent[0] = shape[0] / n + (rank < most);
        o->nbox = cp > 1 && own.count[1] > 0 ? 2 : 1;
        o->box[1] = o->box[0];
        for (size_t k = 0; cp > 1 && k < o->nbox; k++) {
            o->box[k].global[1] = own.first[k];
            o->box[k].extent[1] = own.count[k];
            o->box[k].local[1] = k * own.count[0];
        }
    }
    world_end(w);
}

static inline void mesh(world *w, const char *name, char pass, int dp, int tp, int ndim, const size_t *shape, int dim)
{
    parallel_mesh(w, name, pass, &(ar_parallel){.dp = dp, .tp = tp}, ndim, shape, dim);
}

/* Every rank's copy of element i becomes f(rank, i, reference). */
static inline void spoil(world *w, float (*f)(const world *, int, size_t, float))
{
    for (int r = 0; r < w->d.ranks; r++) {
        for (size_t i = 0; i < w->count; i++) {
            if (at(w, r, i))
                *at(w, r, i) = f(w, r, i, w->reference[i]);
        }
    }
}

/* Index of an element of a three-dimensional tensor. */
static inline size_t at3(const world *w, size_t b, size_t t, size_t f)
{
    return (b * w->shape[1] + t) * w->shape[2] + f;
}

static inline ari_diagnosis found(const world *w)
{
    ari_diagnosis p;
    cr_assert_eq(ari_diagnose(&p, &w->d), AR_OK, "%s", ar_error_message());
    return p;
}

static inline const char *cause_of(const ari_diagnosis *p)
{
    return p->evidence.cause ? p->evidence.cause : "none";
}

/* The identifier of docs/causes.md; found twice, all is the same. */
static inline void expect_cause(const world *w, const char *id)
{
    const ari_diagnosis p = found(w), q = found(w);
    cr_expect_str_eq(cause_of(&p), id, "expected %s, not %s\n  pattern %s\n  hint    %s", id, cause_of(&p), p.pattern,
                     p.hint);
    cr_expect(!strstr(p.hint, "{") && !strstr(p.pattern, "{"), "%s", p.hint);
    cr_expect(strcmp(p.hint, q.hint) == 0 && strcmp(p.pattern, q.pattern) == 0);
}

/* The sentence is filled with these words and numbers. */
static inline void expect_hint(const world *w, const char *text)
{
    const ari_diagnosis p = found(w);
    cr_expect(strstr(p.hint, text), "expected '%s'\n  pattern %s\n  hint    %s", text, p.pattern, p.hint);
}

static inline void expect_no_hint(const world *w, const char *text)
{
    const ari_diagnosis p = found(w);
    cr_expect(!strstr(p.hint, text), "unexpected '%s'\n  pattern %s\n  hint    %s", text, p.pattern, p.hint);
}

static inline void expect_pattern(const world *w, const char *text)
{
    const ari_diagnosis p = found(w);
    cr_expect(strstr(p.pattern, text), "expected '%s'\n  pattern %s\n  hint    %s", text, p.pattern, p.hint);
}

/* The cause of a tensor beside another of the reference (NULL: none). */
static inline void expect_beside(world *w, const char *full, const ar_dump_tensor *other, const char *id)
{
    ar_dump *dump = NULL;
    ar_dump_tensor all[2] = {{.name = full, .dtype = AR_F32, .ndim = w->d.ndim, .count = w->count}};
    memcpy(all[0].shape, w->shape, sizeof w->shape);
    all[0].whole = w->reference;
    if (other)
        all[1] = *other;
    cr_assert_eq(ari_dump_of_tensors(&dump, "the reference", all, other ? 2 : 1), AR_OK);
    w->d.known = dump;
    w->d.of = ar_dump_find(dump, full);
    expect_cause(w, id);
    ar_dump_close(dump);
    w->d.known = NULL;
    w->d.of = NULL;
}

#endif
