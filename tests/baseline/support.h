/* SPDX-License-Identifier: Apache-2.0 */
/* What the baseline's tests share: a recording of everything a run emits, weights from a file, tiny configs. */
#pragma once

#include "anyrank/baseline.h"
#include "ref/io/safetensors_private.h"
#include "tests/support/test.h"
#include "tests/support/tiny_config.h"

typedef struct taped {
    char name[200];
    char pass;
    int step; /* 0 where nobody counts them */
    int ndim;
    size_t shape[4];
    size_t count;
    double *values;
} taped;

typedef struct tape {
    size_t n;
    int step;
    taped at[1500];
} tape;

static inline void tape_begin(void *user, int step)
{
    tape *t = user;
    t->step = step;
}

static inline ar_status tape_emit(void *user, const char *name, char pass, int ndim, const size_t *shape,
                                  const double *values)
{
    tape *t = user;
    if (t->n == sizeof t->at / sizeof t->at[0] || ndim > 4)
        return ar_error_set(AR_ERR_INTERNAL, "tape: too many tensors or dimensions");
    taped *to = &t->at[t->n++];
    *to = (taped){.pass = pass, .step = t->step, .ndim = ndim, .count = 1};
    snprintf(to->name, sizeof to->name, "%s", name);
    for (int i = 0; i < ndim; i++) {
        to->shape[i] = shape[i];
        to->count *= shape[i];
    }
    to->values = malloc(to->count * sizeof *to->values);
    if (to->values == NULL)
        return ar_error_set(AR_ERR_MEMORY, "tape: no memory");
    memcpy(to->values, values, to->count * sizeof *to->values);
    return AR_OK;
}

static inline void tape_clear(tape *t)
{
    for (size_t i = 0; i < t->n; i++)
        free(t->at[i].values);
    t->n = 0;
    t->step = 0;
}

/* The first of step `step`; -1: of any. */
static inline const taped *tape_find_step(const tape *t, const char *name, char pass, int step)
{
    for (size_t i = 0; i < t->n; i++)
        if (t->at[i].pass == pass && (step < 0 || t->at[i].step == step) && strcmp(t->at[i].name, name) == 0)
            return &t->at[i];
    cr_assert_fail("no tensor %s:%c in step %d among %zu", name, pass, step, t->n);
    return NULL;
}

static inline const taped *tape_find(const tape *t, const char *name, char pass)
{
    return tape_find_step(t, name, pass, -1);
}

/* The same tensor with the layer's number in its name. */
static inline const taped *tape_find_layer(const tape *t, const char *format, size_t layer, char pass)
{
    char name[200];
    const char *mark = strchr(format, '#');
    snprintf(name, sizeof name, "%.*s%zu%s", (int)(mark - format), format, layer, mark + 1);
    return tape_find(t, name, pass);
}

typedef struct given {
    const ar_st_file *file;
    size_t kept;
    float *keep[200];
} given;

static inline const float *given_weight(void *user, const char *name, size_t count)
{
    given *g = user;
    const ar_st_entry *e = ari_st_find(g->file, name);
    if (e == NULL || e->count != count || g->kept == sizeof g->keep / sizeof g->keep[0])
        return NULL;
    float *values = malloc(count * sizeof *values);
    if (values == NULL || ari_st_to_f32(e, values) != AR_OK) {
        free(values);
        return NULL;
    }
    g->keep[g->kept++] = values;
    return values;
}

static inline void given_clear(given *g)
{
    while (g->kept > 0)
        free(g->keep[--g->kept]);
}

static inline ar_st_file *open_golden(const char *folder, const char *file)
{
    char path[600];
    ar_st_file *f = NULL;
    snprintf(path, sizeof path, "%s/%s/%s", TEST_GOLDEN_DIR, folder, file);
    cr_assert_eq(ari_st_open(&f, path), AR_OK, "%s: %s", path, ar_error_message());
    return f;
}

/* Reads element i of an F32, F64 or I64 entry. */
static inline double entry_value(const ar_st_entry *e, size_t i)
{
    const char *at = (const char *)e->data;
    double d;
    float f;
    if (e->dtype == AR_F64) {
        memcpy(&d, at + i * sizeof d, sizeof d);
        return d;
    }
    cr_assert_eq(e->dtype, AR_F32);
    memcpy(&f, at + i * sizeof f, sizeof f);
    return (double)f;
}

/* max |a - expected| / max |expected|. */
static inline double worst_error(const taped *a, const ar_st_entry *expected)
{
    double difference = 0.0, largest = 0.0;
    cr_assert_eq(a->count, expected->count, "%s has %zu elements, expected %zu", a->name, a->count, expected->count);
    for (size_t i = 0; i < a->count; i++) {
        const double want = entry_value(expected, i);
        cr_assert(isfinite(a->values[i]), "%s[%zu] is not finite", a->name, i);
        difference = fmax(difference, fabs(a->values[i] - want));
        largest = fmax(largest, fabs(want));
    }
    return largest > 0.0 ? difference / largest : difference;
}

static const int64_t tiny_ids[] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9};

/* Of them: two, one, and three, of which the first and the last have one token. */
static const int32_t tiny_documents[] = {0, 0, 1, 1, 1, /**/ 0, 0, 0, 0, 0, /**/ 0, 1, 1, 1, 2};

/* 3 samples of 5 tokens. */
static inline ar_batch tiny_batch(void)
{
    return (ar_batch){.batch = 3, .seq = 5, .input_ids = tiny_ids};
}

static inline double run_or_fail(const ar_config *c, ar_number_mode mode, const ar_batch *batch, tape *t)
{
    const ar_baseline_options o = {.mode = mode, .seed = 7, .emit = t != NULL ? tape_emit : NULL, .emit_user = t};
    double loss = NAN;
    cr_assert_ok(ar_baseline_run(c, &o, batch, &loss));
    return loss;
}
