/* SPDX-License-Identifier: Apache-2.0 */
/* Training runs on one rank and on many: the one rank's tensors are kept, those of the others compared with them. */
#pragma once

#include "anyrank/baseline.h"
#include "run/cluster_run.h"
#include "run/run.h"
#include "tests/support/test.h"

enum { RECORDED_MOST = 4000, RECORDED_RANKS = 12, RECORDED_STEPS = 4 };

/* A full tensor of the one-rank run. */
typedef struct recorded_tensor {
    char name[128], pass;
    uint32_t step;
    size_t count;
    float *values;
} recorded_tensor;

typedef struct recorded {
    size_t n;
    recorded_tensor at[RECORDED_MOST];
    float loss[RECORDED_STEPS];
} recorded;

static inline const recorded_tensor *recorded_find(const recorded *r, const char *name, char pass, uint32_t step)
{
    for (size_t i = 0; i < r->n; i++) {
        const recorded_tensor *t = &r->at[i];
        if (t->step == step && t->pass == pass && strcmp(t->name, name) == 0)
            return t;
    }
    return NULL;
}

static inline void recorded_free(recorded *r)
{
    for (size_t i = 0; r && i < r->n; i++)
        free(r->at[i].values);
    free(r);
}
OWNER(recorded, recorded_free)

/* What a rank makes of its tensors: a record, or a comparison with one. */
typedef struct watcher {
    recorded *write;
    const recorded *whole;
    size_t covered; /* elements of which this rank holds the first copy */
    size_t different;
    size_t first;      /* number in the record of the first tensor with other bits */
    char unknown[160]; /* a tensor that the record does not have */
} watcher;

static inline size_t recorded_count(const ar_tap_event *e, const ar_box *b)
{
    size_t count = 1;
    for (int d = 0; d < e->layout->ndim; d++)
        count *= b->extent[d];
    return count;
}

/* Element i of a box, row-major: where it lies in the local view and in the full tensor. */
static inline void recorded_place(const ar_tap_event *e, const ar_box *b, size_t i, ptrdiff_t *local, size_t *global)
{
    size_t step = 1;
    *local = 0;
    *global = 0;
    for (int d = e->layout->ndim - 1; d >= 0; d--) {
        const size_t x = i % b->extent[d];
        i /= b->extent[d];
        *local += (ptrdiff_t)(b->local[d] + x) * e->local->stride[d];
        *global += (b->global[d] + x) * step;
        step *= e->layout->shape[d];
    }
}

/* The whole tensor, row-major. */
static inline ar_status recorded_append(recorded *r, const ar_tap_event *e)
{
    const size_t n = ar_tensor_count(e->local);
    if (r->n == RECORDED_MOST)
        return ar_error_set(AR_ERR_INTERNAL, "more than %d tensors: no room for %s", RECORDED_MOST, e->name);
    recorded_tensor *t = &r->at[r->n++];
    snprintf(t->name, sizeof t->name, "%s", e->name);
    t->pass = e->pass;
    t->step = e->step;
    t->count = n;
    t->values = malloc((n + 1) * sizeof(float));
    if (!t->values)
        return ar_error_set(AR_ERR_MEMORY, "no memory for %s", e->name);
    for (size_t k = 0; k < e->layout->nbox; k++) {
        for (size_t i = 0; i < recorded_count(e, &e->layout->box[k]); i++) {
            ptrdiff_t local = 0;
            size_t global = 0;
            recorded_place(e, &e->layout->box[k], i, &local, &global);
            t->values[global] = ((const float *)e->local->data.ptr)[local];
        }
    }
    return AR_OK;
}

static inline void watch_box(watcher *w, const ar_tap_event *e, const ar_box *b, const recorded_tensor *t)
{
    const size_t count = recorded_count(e, b);
    w->covered += e->layout->replica == 0 ? count : 0;
    for (size_t i = 0; i < count; i++) {
        ptrdiff_t local = 0;
        size_t global = 0;
        recorded_place(e, b, i, &local, &global);
        if (global < t->count && memcmp((float *)e->local->data.ptr + local, t->values + global, sizeof(float)) == 0)
            continue;
        const size_t at = (size_t)(t - w->whole->at);
        w->first = w->different++ == 0 || at < w->first ? at : w->first;
    }
}

static inline ar_status watch(void *user, const ar_tap_event *e)
{
    watcher *w = user;
    if (w->write)
        return recorded_append(w->write, e);
    const recorded_tensor *t = recorded_find(w->whole, e->name, e->pass, e->step);
    if (!t) {
        snprintf(w->unknown, sizeof w->unknown, "%s:%c", e->name, e->pass);
        return AR_OK;
    }
    for (size_t k = 0; k < e->layout->nbox; k++)
        watch_box(w, e, &e->layout->box[k], t);
    return AR_OK;
}

/* Runs a layout with one watcher a rank; loss: [steps]. */
static inline ar_status watched_run(const ari_cluster_options *base, const ar_parallel *p, watcher *w, float *loss)
{
    void *users[RECORDED_RANKS] = {NULL};
    ari_cluster_options o = *base;
    ari_cluster_result result;
    o.run.parallel = *p;
    o.run.threads = 1;
    o.tap = watch;
    o.tap_user = users;
    for (int r = 0; r < ar_parallel_world(p); r++)
        users[r] = &w[r];
    const ar_status st = ari_cluster_run(&result, &o);
    if (st == AR_OK)
        memcpy(loss, result.loss, (size_t)(o.run.steps > 1 ? o.run.steps : 1) * sizeof(float));
    free(result.loss);
    free(result.reports);
    return st;
}

/* What the independent baseline does in the same steps, tensor by tensor against a record. */
typedef struct baseline_run {
    const recorded *r;
    uint32_t step;
    size_t found, different, missing;
    char first[200];                                           /* the first that differs or is missing */
    bool (*frozen)(void *user, const char *name, int step);    /* NULL: none */
    bool (*unlisted)(void *user, const char *name, char pass); /* that the record may lack; NULL: none */
    void *user;
} baseline_run;

static inline void baseline_begin(void *user, int step)
{
    ((baseline_run *)user)->step = (uint32_t)step;
}

static inline bool baseline_frozen(void *user, const char *name, int step)
{
    const baseline_run *b = user;
    return b->frozen && b->frozen(b->user, name, step);
}

static inline ar_status baseline_tensor(void *user, const char *name, char pass, int ndim, const size_t *shape,
                                        const double *values)
{
    baseline_run *b = user;
    const recorded_tensor *t = recorded_find(b->r, name, pass, b->step);
    size_t count = 1, wrong = 0;
    for (int d = 0; d < ndim; d++)
        count *= shape[d];
    if (!t && b->unlisted && b->unlisted(b->user, name, pass))
        return AR_OK;
    for (size_t i = 0; t && t->count == count && i < count; i++) {
        const float v = (float)values[i];
        wrong += memcmp(&v, &t->values[i], sizeof v) != 0;
    }
    b->found += t != NULL;
    b->missing += !t;
    b->different += t && (t->count != count || wrong > 0);
    if (!b->first[0] && (!t || t->count != count || wrong > 0))
        snprintf(b->first, sizeof b->first, "%s:%c of step %u%s", name, pass, (unsigned)b->step,
                 t ? "" : " is missing");
    return AR_OK;
}

/* The record has all of the baseline's tensors with its bits, and no others. */
static inline void expect_the_baselines_bits(baseline_run *b, const ari_cluster_options *o)
{
    double loss[RECORDED_STEPS];
    const ar_baseline_options options = {.mode = AR_MODE_EXACT,
                                         .seed = o->run.seed,
                                         .weights = o->weights,
                                         .weights_user = o->weights_user,
                                         .emit = baseline_tensor,
                                         .emit_user = b,
                                         .frozen = baseline_frozen,
                                         .begin_step = baseline_begin,
                                         .dropout = o->run.dropout,
                                         .steps = (int)o->run.steps,
                                         .optimizer = o->run.optimizer,
                                         .clip = o->run.clip};
    cr_assert_ok(ar_baseline_run(o->config, &options, o->batch, loss));
    cr_expect(b->different == 0 && b->missing == 0, "not the baseline's bits: %zu differ, %zu missing, first %s",
              b->different, b->missing, b->first);
    size_t frozen = 0; /* of which the ranks report a gradient of zeros */
    for (size_t i = 0; b->frozen && i < b->r->n; i++) {
        const recorded_tensor *t = &b->r->at[i];
        if (t->pass != 'g' || !b->frozen(b->user, t->name, (int)t->step))
            continue;
        for (size_t k = 0; k < t->count; k++)
            cr_expect(t->values[k] == 0.0f, "%s is frozen and has a gradient", t->name);
        frozen++;
    }
    cr_expect_eq(b->found + frozen, b->r->n, "the baseline has %zu of %zu tensors", b->found, b->r->n);
}

/* The run on one rank. Gives; recorded_free. In the exact numerics a model's own step is held to the baseline: what N
 * ranks are compared with is not their own code alone. */
static inline recorded *record(const ari_cluster_options *o)
{
    const ar_parallel one = {.tp = 1};
    recorded *r = calloc(1, sizeof *r);
    cr_assert_not_null(r);
    watcher w = {.write = r};
    cr_assert_ok(watched_run(o, &one, &w, r->loss));
    if (!o->body && o->run.numerics == AR_NUMERICS_EXACT && o->run.fault == AR_FAULT_NONE && !o->forward_only)
        expect_the_baselines_bits(&(baseline_run){.r = r}, o);
    return r;
}

/* What the ranks of a layout found together. */
typedef struct verdict {
    size_t covered, elements; /* by first copies; of the record */
    size_t different;
    char first[160]; /* the first tensor of the record in which a rank has other bits */
    float loss[RECORDED_STEPS];
} verdict;

static inline verdict compare_layout(const recorded *whole, const ari_cluster_options *o, const ar_parallel *p)
{
    watcher w[RECORDED_RANKS] = {{0}};
    verdict v = {0};
    const int n = ar_parallel_world(p);
    size_t first = whole->n;
    for (int r = 0; r < n; r++)
        w[r].whole = whole;
    cr_assert_ok(watched_run(o, p, w, v.loss));
    for (int r = 0; r < n; r++) {
        cr_expect(w[r].unknown[0] == '\0', "one rank has no %s", w[r].unknown);
        first = w[r].different > 0 && w[r].first < first ? w[r].first : first;
        v.different += w[r].different;
        v.covered += w[r].covered;
    }
    for (size_t i = 0; i < whole->n; i++)
        v.elements += whole->at[i].count;
    if (first < whole->n)
        snprintf(v.first, sizeof v.first, "%s:%c", whole->at[first].name, whole->at[first].pass);
    return v;
}

/* Every tensor of every step has the one rank's bits, each element in some rank's first copy once, and so has the
 * loss. */
static inline void expect_one_ranks_bits(const recorded *whole, const ari_cluster_options *o, const ar_parallel *p)
{
    char text[96];
    ar_parallel_text(text, sizeof text, p);
    const verdict v = compare_layout(whole, o, p);
    cr_expect_eq(v.different, 0, "%s: %zu elements differ, first %s", text, v.different, v.first);
    cr_expect_eq(v.covered, v.elements, "%s: %zu of %zu elements", text, v.covered, v.elements);
    for (int i = 0; i < (int)ari_run_steps(&o->run); i++)
        cr_expect_eq(memcmp(&v.loss[i], &whole->loss[i], sizeof(float)), 0, "%s: loss of step %d is %a, not %a", text,
                     i + 1, (double)v.loss[i], (double)whole->loss[i]);
}

static inline void expect_layouts(const ari_cluster_options *o, const ar_parallel *layouts, size_t n)
{
    OWNED(recorded_free) recorded *whole = record(o);
    for (size_t i = 0; i < n; i++)
        expect_one_ranks_bits(whole, o, &layouts[i]);
}

/* AdamW with clipping. */
static inline ari_cluster_options adamw_job(const ar_config *c, const ar_batch *d, uint64_t steps)
{
    ari_cluster_options o = {.config = c, .batch = d, .run.steps = steps, .run.seed = 5, .run.clip = 0.01};
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    o.run.optimizer.lr = 0.05;
    return o;
}
