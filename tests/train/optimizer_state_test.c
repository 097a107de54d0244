/* SPDX-License-Identifier: Apache-2.0 */
/* An optimizer's state, saved after some steps and put back under another layout: training goes on with the same
 * bits. */
#include "anyrank/context.h"
#include "ref/core/optimizer_private.h"
#include "ref/train/train_private.h"
#include "tests/support/test.h"
#include "tests/train/two_params.h"

enum { KINDS = 4 };
static const char *const kinds[KINDS] = {"momentum_buffer", "exp_avg", "exp_avg_sq", "master"};

typedef struct saved_state {
    two_values of[KINDS];
    bool has[KINDS]; /* kinds that there are */
} saved_state;

/* Steps [from, to): what they begin with, and what they leave. */
typedef struct job {
    ar_optimizer_options options;
    size_t from, to;
    uint64_t claimed;   /* steps that load is told; 0: `from` */
    bool forget_vector; /* load finds no state of it */
    two_values start, weights;
    saved_state given, state;
    uint64_t steps;           /* at the end */
    size_t saved[MOST_RANKS]; /* calls of emit */
} job;

static float *place(two_values *f, const char *param)
{
    return strcmp(param, "matrix") == 0 ? f->matrix : f->vector;
}

typedef struct saver {
    job *j;
    ar_ctx *ctx;
} saver;

/* Rows of the matrix come from all ranks, each its own; the vector's copies are the same. */
static ar_status save(void *user, const ar_param *p, const char *state, const ar_tensor *local, const ar_layout *layout)
{
    const saver *s = user;
    const bool matrix = strcmp(p->name, "matrix") == 0;
    size_t kind = 0;
    while (kind < KINDS && strcmp(kinds[kind], state) != 0)
        kind++;
    if (kind == KINDS || layout->nbox != 1)
        return ar_error_set(AR_ERR_INTERNAL, "state '%s' in %zu boxes", state, layout->nbox);
    s->j->saved[rank_of(s->ctx)]++;
    if (rank_of(s->ctx) == 0)
        s->j->state.has[kind] = true;
    if (!matrix && rank_of(s->ctx) > 0)
        return AR_OK;
    const size_t at = matrix ? layout->box[0].global[0] * COLS : 0;
    return ar_ctx_download(s->ctx, place(&s->j->state.of[kind], p->name) + at, local);
}

static const float *find(void *user, const char *param, const char *state, size_t count)
{
    job *j = user;
    for (size_t kind = 0; kind < KINDS; kind++)
        if (strcmp(kinds[kind], state) == 0 && j->given.has[kind] && count == (param[0] == 'm' ? MATRIX : VECTOR))
            return j->forget_vector && param[0] == 'v' ? NULL : place(&j->given.of[kind], param);
    return NULL;
}

static ar_status steps(ar_ctx *ctx, job *j, ar_optimizer *o, ar_param *matrix, ar_param *vector)
{
    const size_t own = own_rows(ctx);
    for (size_t t = j->from; t < j->to; t++) {
        const two_values g = two_values_of((unsigned)(10 * t) + 1, (unsigned)(10 * t) + 2, 0.5);
        AR_TRY(set_gradient(ctx, matrix, g.matrix + own));
        AR_TRY(set_gradient(ctx, vector, g.vector));
        AR_TRY(ar_optimizer_step(o, ctx, 1.0f));
        ar_ctx_end_step(ctx);
    }
    AR_TRY(ar_ctx_download_floats(ctx, j->weights.matrix + own, ar_tensor_count(&matrix->value), &matrix->value));
    if (rank_of(ctx) == 0) {
        j->steps = ari_optimizer_steps(o);
        AR_TRY(ar_ctx_download(ctx, j->weights.vector, &vector->value));
    }
    saver s = {j, ctx};
    return ar_optimizer_save(o, ctx, save, &s);
}

static ar_status train(ar_ctx *ctx, void *user, ar_param *matrix, ar_param *vector)
{
    job *j = user;
    ar_param *const all[2] = {matrix, vector};
    OWNED(ar_optimizer_destroy) ar_optimizer *o = NULL;
    AR_TRY(ar_optimizer_create(&o, ctx, all, 2, &j->options));
    if (j->from > 0 || j->claimed > 0)
        AR_TRY(ar_optimizer_load(o, ctx, j->claimed ? j->claimed : j->from, find, j));
    return steps(ctx, j, o, matrix, vector);
}

static ar_status rank_main(ar_ctx *ctx, void *user)
{
    const job *j = user;
    return with_two_params(ctx, &j->start, train, user);
}

static ar_status run(job *j, int ranks, ar_dtype storage)
{
    const ar_run o = {.parallel.tp = ranks, .numerics = AR_NUMERICS_NATIVE, .storage = storage};
    return rank_run(&o, rank_main, j);
}

static job job_of(ar_optimizer_kind kind, size_t from, size_t to)
{
    job j = {.options = ar_optimizer_defaults(kind), .from = from, .to = to};
    j.options.lr = 0.02;
    j.options.momentum = kind == AR_OPTIMIZER_SGD ? 0.9 : 0.0;
    j.options.schedule = AR_SCHEDULE_COSINE;
    j.options.warmup_steps = 2;
    j.options.total_steps = STEPS;
    j.start = two_values_of(1, 2, 2.0);
    return j;
}

static void must(job *j, int ranks, ar_dtype storage)
{
    cr_assert_ok(run(j, ranks, storage));
}

static void expect_round_trip(ar_optimizer_kind kind, ar_dtype storage, size_t at, int before, int after)
{
    job whole = job_of(kind, 0, STEPS), first = job_of(kind, 0, at), second = job_of(kind, at, STEPS);
    must(&whole, 1, storage);
    must(&first, before, storage);
    second.start = first.weights;
    second.given = first.state;
    must(&second, after, storage);
    cr_expect_eq(second.steps, STEPS);
    cr_expect_eq(memcmp(&second.weights, &whole.weights, sizeof whole.weights), 0, "%s, after step %zu, %d to %d ranks",
                 ari_optimizer_name(kind), at, before, after);
    for (size_t k = 0; k < KINDS; k++) /* of the master copies there is one of the matrix only */
        cr_expect(second.state.has[k] == whole.state.has[k] &&
                      memcmp(&second.state.of[k], &whole.state.of[k], sizeof whole.state.of[k]) == 0,
                  "%s of %s", kinds[k], ari_optimizer_name(kind));
}

Test(optimizer_state, goes_on_with_the_same_bits_under_another_number_of_ranks)
{
    for (ar_optimizer_kind kind = AR_OPTIMIZER_SGD; kind <= AR_OPTIMIZER_ADAMW; kind++)
        for (size_t at = 1; at < STEPS; at += 2) {
            expect_round_trip(kind, AR_F32, at, 1, 1);
            expect_round_trip(kind, AR_F32, at, 4, 2);
            expect_round_trip(kind, AR_F32, at, 1, 4);
            expect_round_trip(kind, AR_BF16, at, 2, 4);
        }
}

Test(optimizer_state, has_the_kinds_that_the_optimizer_keeps)
{
    job sgd = job_of(AR_OPTIMIZER_SGD, 0, 1), adam = job_of(AR_OPTIMIZER_ADAM, 0, 1), plain = sgd;
    plain.options.momentum = 0.0;
    must(&sgd, 2, AR_F32);
    must(&adam, 2, AR_BF16);
    must(&plain, 2, AR_F32);
    cr_expect(sgd.state.has[0] && !sgd.state.has[1] && !sgd.state.has[2] && !sgd.state.has[3] && sgd.saved[1] == 2);
    cr_expect(!adam.state.has[0] && adam.state.has[1] && adam.state.has[2] && adam.state.has[3] && adam.saved[1] == 5);
    cr_expect(plain.saved[0] == 0 && plain.saved[1] == 0);
}

Test(optimizer_state, that_is_missing_is_named)
{
    job j = job_of(AR_OPTIMIZER_ADAM, 2, STEPS);
    j.given.has[1] = true; /* exp_avg, but no exp_avg_sq */
    cr_expect_refused(run(&j, 1, AR_F32), AR_ERR_NOT_FOUND, "exp_avg_sq of matrix with 24 elements");
    j.given.has[2] = j.forget_vector = true;
    cr_expect_refused(run(&j, 1, AR_F32), AR_ERR_NOT_FOUND, "exp_avg of vector with 5 elements");
}

Test(optimizer_state, of_more_steps_than_training_counts_is_refused_at_once)
{
    job j = job_of(AR_OPTIMIZER_SGD, 0, 1);
    j.given.has[0] = true;
    j.claimed = UINT64_MAX;
    cr_expect_refused(run(&j, 1, AR_F32), AR_ERR_ARG, "18446744073709551615 steps, expected at most 4294967295");
}
