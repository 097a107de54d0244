/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/run/train_rank.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "anyrank/gradients.h"
#include "ref/core/clock.h"
#include "ref/core/context_private.h"
#include "ref/layers/parts.h"
#include "ref/models/stages.h"
#include "ref/train/gradients_private.h"
#include "ref/train/optimizer_private.h"
#include "ref/train/train_private.h"
#include "verify/run/checkpoint_private.h"
#include "verify/run/data_private.h"

ar_status ari_train_loader(ar_loader **out, const ar_data *data, const ar_training_options *o, size_t vocab)
{
    const ar_loader_options options = {.batch = o->run.batch,
                                       .seq = o->run.seq,
                                       .vocab = vocab,
                                       .seed = o->run.seed,
                                       .in_order = o->in_order,
                                       .packing = o->packing};
    return ari_loader_create(out, data, &options);
}

/* The list grows with the steps: a run may ask for more steps than memory can record, and stop early. */
ar_status ari_train_remember(ari_training *j, float loss, float norm, double lr)
{
    ar_training_report *r = j->report;
    const size_t index = (size_t)r->steps;
    AR_TRY(ARI_GROW(&r->loss, &j->losses, index, "losses"));
    AR_TRY(ARI_GROW(&r->norm, &j->norms, index, "norms"));
    AR_TRY(ARI_GROW(&r->lr, &j->rates, index, "learning rates"));
    r->loss[index] = loss;
    r->norm[index] = norm;
    r->lr[index] = lr;
    r->steps++;
    return AR_OK;
}

/* The state of one rank. */
typedef struct member {
    ari_training *job;
    ar_ctx *ctx;
    ari_trainer trainer;
    ar_loader *loader;
    ar_gradients *gradients; /* NULL: nothing is verified */
    ar_loss_scaling scaling;
    uint64_t step;  /* taken */
    uint64_t saved; /* the last step for which a checkpoint was requested */
    bool diverged;  /* or found wrong */
} member;

static bool is_first(const member *m)
{
    return ar_comm_rank(m->ctx->world) == 0;
}

static ar_status create(member *m)
{
    const ari_training *j = m->job;
    const ar_training_options *o = j->o;
    if (!o->module)
        AR_TRY(ari_train_loader(&m->loader, j->data, o, 0));
    AR_TRY(ari_trainer_create(&m->trainer, m->ctx, &j->cluster));
    m->scaling = o->scaling;
    m->trainer.step.scaling = o->scale_loss ? &m->scaling : NULL;
    if (o->verify_every > 0)
        AR_TRY(ar_gradients_create(&m->gradients, m->ctx, m->trainer.params, m->trainer.n));
    if (o->resume)
        AR_TRY(ar_checkpoint_load(o->resume, m->ctx, m->trainer.params, m->trainer.n, m->trainer.optimizer));
    m->step = j->report->resumed_steps;
    m->saved = j->saved;
    return AR_OK;
}

/* Finds out whether the user asked to stop. Rank 0 asks; so does each rank that is a separate process, since a signal
 * reaches only one process. All ranks exchange the answers and end after the same step. */
static ar_status asked_to_stop(bool *stop, const member *m)
{
    const ar_training_listener *l = &m->job->o->listener;
    int32_t answer = 0;
    *stop = m->job->o->stop_after > 0 && m->step >= m->job->o->stop_after;
    if (*stop || !l->stop)
        return AR_OK;
    if (is_first(m) || m->job->o->run.process)
        answer = l->stop(l->user);
    AR_TRY(ari_combine(m->ctx, m->ctx->world, &answer, 1, AR_I32, AR_MAX, "stop"));
    *stop = answer != 0;
    return AR_OK;
}

/* --- steps -------------------------------------------------------------------------------------------------------- */

/* Records the result of the step and passes it to the listener. */
static ar_status record(const member *m, const ar_train_result *r, const ar_batch *batch, double seconds)
{
    const ar_training_options *o = m->job->o;
    ar_training_report *report = m->job->report;
    /* The learning rate of the step's update, or of the update that was skipped: the schedule counts updates, not
     * skipped steps. */
    const double lr = ari_optimizer_lr(&o->run.optimizer, ari_optimizer_steps(m->trainer.optimizer) + r->skipped);
    AR_TRY(ari_train_remember(m->job, r->loss, r->norm, lr));
    report->seconds += seconds;
    const ar_training_step s = {.step = m->step,
                                .loss = r->loss,
                                .norm = r->norm,
                                .lr = lr,
                                .skipped = r->skipped,
                                .tokens = batch->batch * batch->seq,
                                .seconds = seconds};
    if (o->listener.step)
        o->listener.step(o->listener.user, &s);
    return AR_OK;
}

/* Records whether loss or gradient diverged; all ranks have the same values. */
static void record_divergence(const member *m, const ar_train_result *r)
{
    ar_training_report *report = m->job->report;
    const bool loss = !isfinite(r->loss);
    report->end = AR_TRAINING_DIVERGED;
    snprintf(report->message, sizeof report->message,
             "the %s of step %" PRIu64 " is %s: training has diverged; a smaller learning rate, a warm-up%s may help",
             loss ? "loss" : "gradient norm", m->step + 1, isnan(loss ? r->loss : r->norm) ? "NaN" : "infinite",
             m->job->o->run.clip > 0.0 ? "" : " or clipping");
}

/* Returns true if this step is to be verified. */
static bool is_verified(const member *m, uint64_t step)
{
    return m->gradients && step % m->job->o->verify_every == 0;
}

/* Records the verdict after a verified step is complete. */
static void record_verdict(const member *m)
{
    ar_training_report *report = m->job->report;
    const ar_verdict v = ari_gradients_last(m->gradients);
    char text[256];
    report->verified++;
    if (v.warnings == 0 || report->warning[0])
        return;
    ari_finding_text(text, sizeof text, &v.finding[0]);
    snprintf(report->warning, sizeof report->warning, "step %" PRIu64 ": %s", m->step, text);
}

/* All ranks have reached the same verdict, with the same text. */
static void record_wrong(const member *m)
{
    ar_training_report *report = m->job->report;
    report->end = AR_TRAINING_WRONG;
    snprintf(report->message, sizeof report->message, "%s", ar_error_message());
}

static ar_status run_step(member *m)
{
    const uint64_t start = ari_now_ns();
    ar_train_result result = {0};
    ar_batch batch;
    if (m->loader)
        AR_TRY(ari_loader_batch(m->loader, &batch, m->step + 1));
    else
        batch = m->job->batch[m->step];
    const bool verified = is_verified(m, m->step + 1);
    ari_trainer *t = &m->trainer;
    t->step.verify = verified ? m->gradients : NULL;
    const ar_status st = ari_trainer_step(&result, t, m->ctx, &batch, (uint32_t)(m->step + 1));
    if (st == AR_ERR_DATA && verified && !ari_gradients_last(m->gradients).ok) {
        m->diverged = true;
        if (is_first(m))
            record_wrong(m);
        return AR_OK;
    }
    m->diverged = (!isfinite(result.loss) && result.targets > 0) || (!isfinite(result.norm) && !result.skipped);
    /* A norm that is not finite is an error of the step, on every rank. */
    if (st != AR_OK && (st != AR_ERR_DATA || !m->diverged))
        return st;
    if (m->diverged) {
        if (is_first(m))
            record_divergence(m, &result);
        return AR_OK;
    }
    m->step++;
    if (is_first(m))
        AR_TRY(record(m, &result, &batch, (double)(ari_now_ns() - start) * 1e-9));
    if (is_first(m) && verified && !result.skipped)
        record_verdict(m);
    return AR_OK;
}

/* --- checkpoints -------------------------------------------------------------------------------------------------- */

static ar_checkpoint_state state_of(const member *m)
{
    const ari_training *j = m->job;
    const ar_training_options *o = j->o;
    return (ar_checkpoint_state){.model = j->report->config.name,
                                 .step = m->step,
                                 .optimizer_steps = ari_optimizer_steps(m->trainer.optimizer),
                                 .steps = o->run.steps,
                                 .seed = o->run.seed,
                                 .optimizer = o->run.optimizer,
                                 .clip = o->run.clip,
                                 .dropout = o->run.dropout,
                                 .loss_options = o->run.loss,
                                 .numerics = o->run.numerics,
                                 .precision = o->run.precision,
                                 .storage = ari_matrix_dtype(o->run.precision, o->run.storage),
                                 .loss_scale = o->scale_loss ? m->scaling.scale : 0.0,
                                 .loss_scale_steps = m->scaling.good,
                                 .loss_scale_static = o->scale_loss && !m->scaling.dynamic,
                                 .batch = j->data ? o->run.batch : 0,
                                 .seq = j->data ? o->run.seq : 0,
                                 .in_order = o->in_order,
                                 .packing = o->packing,
                                 .data_path = j->data_path,
                                 .data_format = j->data ? ari_data_format_of(j->data) : AR_DATA_AUTO,
                                 .data_tokens = j->data ? ari_data_tokens(j->data) : 0,
                                 .data_hash = j->data ? j->data_hash : NULL,
                                 .loss = j->report->loss,
                                 .losses = (size_t)m->step};
}

static void record_save(const member *m, ar_status st)
{
    const ar_training_listener *l = &m->job->o->listener;
    ar_training_report *report = m->job->report;
    ar_training_save s = {.step = m->step};
    report->save_failed = st != AR_OK;
    if (st == AR_OK) {
        s.folder = ari_checkpoint_written(m->job->writer);
        report->message[0] = '\0'; /* a message of an earlier failure */
        snprintf(report->checkpoint, sizeof report->checkpoint, "%s", s.folder);
    } else {
        s.error = ar_error_message();
        snprintf(report->message, sizeof report->message, "%s", s.error);
    }
    if (l->save)
        l->save(l->user, &s);
}

/* Saves a checkpoint. If the disk is full, the run continues, because the disk may have space at the next save. All
 * ranks have the same status. */
static ar_status save(member *m)
{
    const ari_training *j = m->job;
    const ar_checkpoint_state state = is_first(m) ? state_of(m) : (ar_checkpoint_state){0};
    m->saved = m->step;
    const ar_status st = ar_checkpoint_save(j->writer, m->ctx, m->trainer.params, m->trainer.n, m->trainer.optimizer,
                                            is_first(m) ? &state : NULL);
    if (st != AR_OK && st != AR_ERR_IO)
        return st;
    if (is_first(m))
        record_save(m, st);
    return AR_OK;
}

/* --- the run ------------------------------------------------------------------------------------------------------ */

static ar_status run_steps(member *m)
{
    const ari_training *j = m->job;
    const uint64_t every = j->o->save_every;
    while (m->step < j->o->run.steps && !m->diverged) {
        bool stop = false;
        AR_TRY(asked_to_stop(&stop, m));
        if (stop) {
            if (is_first(m))
                j->report->end = AR_TRAINING_STOPPED;
            break;
        }
        AR_TRY(run_step(m));
        if (j->writer && every > 0 && m->step % every == 0 && m->step > m->saved)
            AR_TRY(save(m));
    }
    return AR_OK;
}

/* Collects the weights for their hash. All ranks have the same status. Copies that differ are reported as a result of
 * the run. */
static ar_status finish(member *m)
{
    ar_training_report *report = m->job->report;
    if (m->diverged)
        return AR_OK;
    const ar_status st = ari_full_set_take(m->job->full, m->ctx, m->trainer.params, m->trainer.n, NULL);
    if (st == AR_ERR_DATA && is_first(m)) {
        report->copies_differ = true;
        ari_name_ranks(report->message, sizeof report->message, ar_error_message(), &m->job->o->run.parallel,
                       report->config.layers);
    }
    if (st == AR_ERR_DATA)
        return AR_OK;
    AR_TRY(st);
    return m->job->writer && m->step > m->saved ? save(m) : AR_OK;
}

static void member_fini(member *m)
{
    ar_gradients_destroy(m->gradients);
    ari_trainer_destroy(&m->trainer);
    ari_loader_destroy(m->loader);
}

ar_status ari_train_rank(void *user, ar_ctx *ctx)
{
    ARI_ENDED(member_fini) member m = {.job = user, .ctx = ctx};
    const ar_training_listener *l = &m.job->o->listener;
    AR_TRY(create(&m));
    if (is_first(&m) && l->begin)
        l->begin(l->user, m.job->report);
    AR_TRY(run_steps(&m));
    return finish(&m);
}
