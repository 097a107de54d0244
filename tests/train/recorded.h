/* SPDX-License-Identifier: Apache-2.0 */
/* Training runs on one rank and on many: the one rank's tensors are kept, those of the others compared with them. */
#pragma once

#include "ref/models/parallel_private.h"
#include "support/match.h"
#include "tests/support/test.h"
#include "verify/check/check_run.h"

enum { RECORDED_RANKS = 12, RECORDED_STEPS = 4 };

/* The one-rank run. */
typedef struct recorded {
    ari_reference of;
    float loss[RECORDED_STEPS];
} recorded;

static inline void recorded_free(recorded *r)
{
    if (r)
        ari_reference_fini(&r->of);
    free(r);
}
OWNER(recorded, recorded_free)

/* NULL: it has none. */
static inline const ari_ref_tensor *recorded_find(const recorded *r, const char *name, char pass, int step)
{
    const size_t at = ari_reference_find_in(&r->of, name, pass, step);
    return at < r->of.count ? &r->of.tensor[at] : NULL;
}

/* Runs a layout, whose ranks' tensors `tap` gets (NULL: nobody); loss: [steps]. */
static inline ar_status tapped_run(const ari_cluster_options *base, const ar_parallel *p, ar_tap_fn tap, void **users,
                                   float *loss)
{
    SCOPED(ari_cluster_result_fini) ari_cluster_result result = {0};
    ari_cluster_options o = *base;
    o.run.parallel = *p;
    o.run.threads = 1;
    o.tap = tap;
    o.tap_user = users;
    AR_TRY(ari_cluster_run(&result, &o));
    memcpy(loss, result.loss, ari_run_steps(&o.run) * sizeof(float));
    return AR_OK;
}

/* What the independent baseline does in the same steps, tensor by tensor against a record. */
typedef struct baseline_run {
    const recorded *r;
    int step;
    size_t found, different, missing;
    char first[200];                                           /* the first that differs or is missing */
    bool (*frozen)(void *user, const char *name, int step);    /* NULL: none */
    bool (*unlisted)(void *user, const char *name, char pass); /* that the record may lack; NULL: none */
    void *user;
} baseline_run;

static inline void baseline_begin(void *user, int step)
{
    ((baseline_run *)user)->step = step;
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
    const ari_ref_tensor *t = recorded_find(b->r, name, pass, b->step);
    const size_t count = ari_volume(shape, ndim);
    size_t wrong = t && t->count != count;
    if (!t && b->unlisted && b->unlisted(b->user, name, pass))
        return AR_OK;
    for (size_t i = 0; t && t->count == count && i < count; i++) {
        const float v = (float)values[i];
        wrong += memcmp(&v, &t->values[i], sizeof v) != 0;
    }
    b->found += t != NULL;
    b->missing += !t;
    b->different += wrong > 0;
    if (!b->first[0] && (!t || wrong > 0))
        snprintf(b->first, sizeof b->first, "%s:%c of step %d%s", name, pass, b->step, t ? "" : " is missing");
    return AR_OK;
}

/* The record has all of the baseline's tensors with its bits, and no others. */
static inline void expect_the_baselines_bits(baseline_run *b, const ari_cluster_options *o)
{
    double loss[RECORDED_STEPS];
    ar_baseline_options options = ari_reference_options(&o->run, NULL);
    options.weights = o->weights;
    options.weights_user = o->weights_user;
    options.emit = baseline_tensor;
    options.emit_user = b;
    options.frozen = baseline_frozen;
    options.begin_step = baseline_begin;
    cr_assert_ok(ar_baseline_run(o->config, &options, o->batch, loss));
    cr_expect(b->different == 0 && b->missing == 0, "not the baseline's bits: %zu differ, %zu missing, first %s",
              b->different, b->missing, b->first);
    size_t frozen = 0; /* of which the ranks report a gradient of zeros */
    for (size_t i = 0; b->frozen && i < b->r->of.count; i++) {
        const ari_ref_tensor *t = &b->r->of.tensor[i];
        if (t->pass != 'g' || !b->frozen(b->user, t->name, t->step))
            continue;
        for (size_t k = 0; k < t->count; k++)
            cr_expect(t->values[k] == 0.0f, "%s is frozen and has a gradient", t->name);
        frozen++;
    }
    cr_expect_eq(b->found + frozen, b->r->of.count, "the baseline has %zu of %zu tensors", b->found, b->r->of.count);
}

/* The run on one rank. Gives; recorded_free. In the exact numerics a model's own step is held to the baseline: what N
 * ranks are compared with is not their own code alone. */
static inline recorded *record(const ari_cluster_options *o)
{
    const ar_parallel one = {.tp = 1};
    recorded *r = calloc(1, sizeof *r);
    cr_assert_not_null(r);
    cr_assert_ok(tapped_run(o, &one, ari_reference_tap, (void *[]){&r->of}, r->loss));
    cr_assert_ok(ari_reference_finish(&r->of));
    if (!o->body && o->run.numerics == AR_NUMERICS_EXACT && !o->run.fault && !o->forward_only)
        expect_the_baselines_bits(&(baseline_run){.r = r}, o);
    return r;
}

/* Every tensor of every step has the one rank's bits, each element in some rank's first copy once, and so has the
 * loss. */
static inline void expect_one_ranks_bits(const recorded *whole, const ari_cluster_options *o, const ar_parallel *p)
{
    ari_comparator ranks[RECORDED_RANKS];
    void *users[RECORDED_RANKS];
    float loss[RECORDED_STEPS];
    char text[96];
    const int n = ar_parallel_world(p);
    ari_parallel_text(text, sizeof text, p);
    for (int r = 0; r < n; r++) {
        cr_assert_ok(ari_comparator_init(&ranks[r], &whole->of, NULL));
        users[r] = &ranks[r];
    }
    cr_assert_ok(tapped_run(o, p, ari_comparator_tap, users, loss));
    cr_expect_eq(match_found(ranks, n, &whole->of), AR_OK, "%s: %s", text, ar_error_message());
    for (int r = 0; r < n; r++)
        ari_comparator_fini(&ranks[r]);
    for (int i = 0; i < (int)ari_run_steps(&o->run); i++)
        cr_expect_eq(memcmp(&loss[i], &whole->loss[i], sizeof(float)), 0, "%s: loss of step %d is %a, not %a", text,
                     i + 1, (double)loss[i], (double)whole->loss[i]);
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
