/* SPDX-License-Identifier: Apache-2.0 */
#include "run/train_rank.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "anyrank/train.h"
#include "ref/core/clock.h"
#include "ref/core/context.h"
#include "ref/core/size.h"
#include "ref/models/model.h"

/* What a rank trains with. */
typedef struct trainer {
    ar_model *model;
    ar_param **params; /* [n] */
    size_t n;
    ar_optimizer *optimizer;
    int64_t *ids; /* [batch, seq] of the step under way */
} trainer;

static ar_status create(trainer *t, const ari_training *j, ar_ctx *ctx)
{
    const ar_training_options *o = j->o;
    size_t count = 0;
    AR_TRY(ar_model_create(&t->model, ctx, &j->report->config, &o->plan));
    AR_TRY(ari_model_list(&t->params, &t->n, t->model));
    if (j->weights)
        AR_TRY(ar_model_set(t->model, ctx, j->weights, j->weights_user));
    else
        AR_TRY(ar_model_fresh(t->model, ctx, o->seed));
    AR_TRY(ar_optimizer_create(&t->optimizer, ctx, t->params, t->n, &o->optimizer));
    AR_TRY(ari_mul_size(&count, o->batch, o->seq));
    return ari_alloc((void **)&t->ids, count, sizeof *t->ids, "token ids");
}

static void destroy(trainer *t)
{
    free(t->ids);
    ar_optimizer_destroy(t->optimizer);
    free(t->params);
    ar_model_destroy(t->model);
}

static bool is_first(const ar_ctx *ctx)
{
    return ar_comm_rank(ctx->world) == 0;
}

/* Rank 0 asks, and all learn what it was told: they end after the same step. */
static ar_status asked_to_stop(bool *stop, const ari_training *j, ar_ctx *ctx)
{
    int32_t answer = 0;
    const size_t one = 1;
    ar_tensor t;
    *stop = false;
    if (!j->o->stop)
        return AR_OK;
    if (is_first(ctx))
        answer = j->o->stop(j->o->user);
    AR_TRY(ar_ctx_tensor(ctx, &t, AR_I32, 1, &one));
    AR_TRY(ar_ctx_upload(ctx, &t, &answer));
    AR_TRY(ar_comm_broadcast(ctx->world, ctx->queue, t.data, one, AR_I32, 0, "stop"));
    AR_TRY(ar_ctx_download(ctx, &answer, &t));
    ar_ctx_release(ctx, &t);
    *stop = answer != 0;
    return AR_OK;
}

static void make_batch(ar_batch *batch, const trainer *t, const ari_training *j, uint64_t step)
{
    const ar_training_options *o = j->o;
    const size_t count = o->batch * o->seq;
    for (size_t i = 0; i < count; i++)
        t->ids[i] = (int64_t)j->text[((step - 1) * count + i) % j->length];
    *batch = (ar_batch){.batch = o->batch, .seq = o->seq, .input_ids = t->ids};
}

/* Keeps what the step told, and tells the listener. */
static void record(const ari_training *j, uint64_t step, const ar_train_result *r, double seconds)
{
    const ar_training_options *o = j->o;
    ar_training_report *report = j->report;
    report->loss[step - 1] = r->loss;
    report->norm[step - 1] = r->norm;
    report->lr[step - 1] = o->optimizer.lr;
    report->steps = step;
    report->seconds += seconds;
    const ar_training_step s = {.step = step,
                                .steps = o->steps,
                                .loss = r->loss,
                                .norm = r->norm,
                                .lr = report->lr[step - 1],
                                .tokens = o->batch * o->seq,
                                .seconds = seconds};
    if (o->step)
        o->step(o->user, &s);
}

/* Says which of the two it was; every rank has the same ones. */
static void record_divergence(const ari_training *j, uint64_t step, const ar_train_result *r)
{
    const bool loss = !isfinite(r->loss);
    j->report->end = AR_TRAINING_DIVERGED;
    snprintf(j->report->message, sizeof j->report->message,
             "the %s of step %llu is %s: training has diverged; a smaller learning rate, a warm-up%s may help",
             loss ? "loss" : "gradient norm", (unsigned long long)step,
             isnan(loss ? r->loss : r->norm) ? "NaN" : "infinite", j->o->clip > 0 ? "" : " or clipping");
}

/* *go_on: whether another step follows. */
static ar_status run_step(bool *go_on, const trainer *t, const ari_training *j, ar_ctx *ctx, uint64_t step)
{
    const ar_train_options options = {.parallel = j->o->parallel, .clip = j->o->clip};
    const uint64_t start = ari_now_ns();
    ar_train_result result;
    ar_batch batch;
    make_batch(&batch, t, j, step);
    const ar_status st = ar_train_step(&result, t->model, ctx, t->optimizer, &batch, (uint32_t)step, &options);
    *go_on = isfinite(result.loss) && isfinite(result.norm);
    if (st != AR_OK && (st != AR_ERR_DATA || *go_on))
        return st;
    if (is_first(ctx) && *go_on)
        record(j, step, &result, (double)(ari_now_ns() - start) * 1e-9);
    else if (is_first(ctx))
        record_divergence(j, step, &result);
    return AR_OK;
}

static ar_status run_steps(const trainer *t, const ari_training *j, ar_ctx *ctx)
{
    bool stop = false, go_on = true;
    for (uint64_t step = j->report->first + 1; step <= j->o->steps && go_on; step++) {
        AR_TRY(asked_to_stop(&stop, j, ctx));
        if (stop || (j->o->stop_after > 0 && step > j->o->stop_after)) {
            if (is_first(ctx))
                j->report->end = AR_TRAINING_STOPPED;
            break;
        }
        AR_TRY(run_step(&go_on, t, j, ctx, step));
    }
    return AR_OK;
}

ar_status ari_train_rank(void *user, ar_ctx *ctx)
{
    const ari_training *j = user;
    trainer t = {0};
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, create(&t, j, ctx));
    if (is_first(ctx) && j->o->begin)
        j->o->begin(j->o->user, j->report);
    AR_TRY_TO(done, st, run_steps(&t, j, ctx));
    AR_TRY_TO(done, st, ari_full_weights_take(j->full, ctx, t.params, t.n));
done:
    destroy(&t);
    return st;
}
