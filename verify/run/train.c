/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/cluster/process/process_private.h"
#include "ref/core/atomic_file.h"
#include "ref/models/model_private.h"
#include "ref/models/parallel_private.h"
#include "ref/train/optimizer_private.h"
#include "ref/train/train_private.h"
#include "verify/bytes/bytes.h"
#include "verify/run/checkpoint.h"
#include "verify/run/checkpoint_private.h"
#include "verify/run/data_private.h"
#include "verify/run/process_run.h"
#include "verify/run/train_rank.h"

ar_training_options ar_training_defaults(void)
{
    return (ar_training_options){.run.steps = 100,
                                 .run.batch = 8,
                                 .run.seq = 64,
                                 .run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW),
                                 .run.clip = 1.0,
                                 .packing.separator = AR_NO_SEPARATOR,
                                 .run.ddp = ar_ddp_defaults(),
                                 .run.sim.algorithm = AR_SIM_DIRECT};
}

static ar_status check_steps(const ar_training_options *o)
{
    if (o->run.steps == 0)
        return ar_error_set(AR_ERR_ARG, "steps, batch and seq are at least 1");
    if (o->run.seed > INT64_MAX)
        return ar_error_set(AR_ERR_ARG, "seed %" PRIu64 ": at most %" PRId64 ", which checkpoints can hold",
                            o->run.seed, INT64_MAX);
    if (o->scale_loss && o->run.numerics == AR_NUMERICS_EXACT)
        return ar_error_set(AR_ERR_ARG, "loss scaling is of native numerics: exact ones have none");
    if (o->run.ddp.hook && o->run.ddp.hook_state && (o->save || o->resume))
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "a hook's state is in no checkpoint, and a resumed run would have other "
                            "bits: neither save nor resume, or take a hook without state");
    return o->scale_loss ? ari_loss_scaling_check(&o->scaling) : AR_OK;
}

static ar_status check_options(const ar_training_options *o, const ar_config *c)
{
    AR_TRY(ar_run_check(&o->run, c));
    AR_TRY(ari_run_check_declared(&o->run, c));
    return check_steps(o);
}

ar_status ari_train_config(ar_config *c, char *folder, size_t cap, const ar_training_options *o)
{
    ar_run run = o->run;
    if (!run.model)
        run.model = ari_checkpoint_path(o->resume);
    if ((run.shrink > 1 || run.mtp > 0) && o->resume)
        return ar_error_set(AR_ERR_ARG,
                            "a checkpoint's model has the size and blocks that it was trained in: resume it "
                            "without scale and mtp");
    AR_TRY(ari_run_config(c, folder, cap, &run));
    const char *name = o->run.model ? NULL : ar_checkpoint_state_of(o->resume)->model;
    if (name)
        ari_printable(c->name, sizeof c->name, name);
    return AR_OK;
}

static ar_status read_model(ari_training *j)
{
    const ar_training_options *o = j->o;
    ar_training_report *r = j->report;
    if (!o->run.model && !o->resume)
        return ar_error_set(AR_ERR_ARG, "a training run needs a model, or a checkpoint to resume");
    if (!o->run.model && !ari_checkpoint_has_config(o->resume))
        return ar_error_set(AR_ERR_ARG, "%s: is of a module of one's own, '%s': it goes on with that module",
                            ari_checkpoint_path(o->resume), ar_checkpoint_state_of(o->resume)->model);
    AR_TRY(ari_train_config(&r->config, r->folder, sizeof r->folder, o));
    AR_TRY(check_options(o, &r->config));
    AR_TRY(ari_config_parameters(&r->config, &r->parameters));
    if (!o->resume)
        AR_TRY(ari_weights_load(&j->weights, &r->config, r->folder));
    r->fresh = !o->resume && !j->weights;
    return AR_OK;
}

/* Opens the data and reads it once to get its hash, tokens and windows. */
static ar_status read_data(ari_training *j)
{
    const ar_training_options *o = j->o;
    ar_training_report *r = j->report;
    ar_loader *loader = NULL;
    AR_TRY(ari_data_open(&j->data, o->data, o->data_format));
    /* The bundled text has no recorded path, because it may be elsewhere when the run resumes. */
    j->data_path = o->data ? realpath(o->data, NULL) : NULL;
    if (o->data && !j->data_path)
        return ar_error_set(AR_ERR_IO, "%s: cannot be found again", ari_data_path(j->data));
    if (o->save || o->resume)
        AR_TRY(ari_data_hash(j->data, j->data_hash));
    AR_TRY(ari_train_loader(&loader, j->data, o, r->config.vocab));
    snprintf(r->data_path, sizeof r->data_path, "%s", ari_data_path(j->data));
    r->data_tokens = ari_data_tokens(j->data);
    r->windows = ari_loader_windows(loader);
    r->epochs = (double)o->run.steps * (double)o->run.batch / (double)r->windows;
    ari_loader_destroy(loader);
    return AR_OK;
}

/* The last of the steps before the checkpoint. */
static ar_status begin_curves(ari_training *j, const ar_training_options *o)
{
    const ar_checkpoint_state *s = o->resume ? ar_checkpoint_state_of(o->resume) : NULL;
    const uint64_t unknown = s ? s->step - s->losses : 0;
    j->report->resumed_steps = s ? s->step : 0;
    for (uint64_t i = 0; i < j->report->resumed_steps; i++)
        AR_TRY(ari_train_remember(j, i < unknown ? NAN : s->loss[i - unknown], NAN,
                                  ari_optimizer_lr(&o->run.optimizer, i + 1)));
    return AR_OK;
}

/* Finds the step that need not be saved again: the checkpoint's step, if the checkpoint is in the folder to which the
 * run saves. */
static ar_status find_saved(ari_training *j)
{
    const ar_training_options *o = j->o;
    const char *resume_path = o->resume ? ari_checkpoint_path(o->resume) : "", *name = strrchr(resume_path, '/');
    if (!o->save || !o->resume)
        return AR_OK;
    ARI_OWNED char *save_path = realpath(o->save, NULL);
    if (!save_path)
        return ari_io_fail("find the folder", o->save);
    const size_t length = strlen(save_path);
    if (name && (size_t)(name - resume_path) == length && strncmp(resume_path, save_path, length) == 0)
        j->saved = j->report->resumed_steps;
    return AR_OK;
}

/* config: the folder of the model's config; NULL: a module has no config. */
static ar_status begin_writer(ari_training *j, const char *config)
{
    const ar_training_options *o = j->o;
    const ar_checkpoint_options save = {.folder = o->save,
                                        .config = config,
                                        .changed = j->report->config.changed[0] ? &j->report->config : NULL,
                                        .max_checkpoints = o->max_checkpoints,
                                        .fresh = o->resume == NULL,
                                        .process = o->run.process};
    AR_TRY(ari_full_set_create(&j->full, o->run.process));
    if (o->save)
        AR_TRY(ar_checkpoint_writer_create(&j->writer, &save));
    return find_saved(j);
}

static ar_status begin_training(ari_training *j)
{
    const ar_training_options *o = j->o;
    ar_training_report *r = j->report;
    AR_TRY(read_model(j));
    AR_TRY(read_data(j));
    if (o->resume)
        AR_TRY(ari_train_check_resume(r->note, sizeof r->note, j));
    AR_TRY(begin_curves(j, o));
    j->cluster = (ari_cluster_options){.run = o->run,
                                       .config = &r->config,
                                       .weights = o->resume    ? ari_checkpoint_find
                                                  : j->weights ? ari_weights_find
                                                               : NULL,
                                       .weights_user = o->resume ? (void *)o->resume : (void *)j->weights,
                                       .body = ari_train_rank,
                                       .body_user = j};
    return begin_writer(j, r->folder);
}

/* A module defines its own sizes, weights and batches. */
static ar_status begin_module(ari_training *j)
{
    const ar_training_options *o = j->o;
    const ar_module_case *c = o->module;
    AR_TRY(ari_module_case_check(c));
    AR_TRY(check_steps(o));
    AR_TRY(ari_run_check_training(&o->run, c->name));
    AR_TRY(ari_run_check_numerics(&o->run));
    AR_TRY(ari_parallel_check_ranks(&o->run.parallel));
    snprintf(j->report->config.name, sizeof j->report->config.name, "%s", c->name);
    j->report->fresh = !c->own_weights && !o->resume;
    if (o->resume)
        AR_TRY(ari_train_check_resume(j->report->note, sizeof j->report->note, j));
    AR_TRY(begin_curves(j, o));
    AR_TRY(ari_module_batches(&j->batch, c, (size_t)o->run.steps));
    j->cluster =
        (ari_cluster_options){.run = o->run, .batch = j->batch, .module = c, .body = ari_train_rank, .body_user = j};
    return begin_writer(j, NULL);
}

static ar_status run_ranks(ari_training *j)
{
    ar_training_report *r = j->report;
    ARI_ENDED(ari_cluster_result_fini) ari_cluster_result result = {0};
    const ar_status st = ari_cluster_run(&result, &j->cluster);
    r->bytes = result.bytes;
    j->routed = result.routed;
    r->routed = result.routed.rows;
    r->has_predicted = result.has_predicted;
    r->predicted = result.predicted;
    return st;
}

/* Shares the run's end among processes. */
static ar_status share_end(ar_training_report *r, ar_process *p)
{
    const bool is_first = ar_process_rank(p) == 0;
    ar_training_report end = *r;
    AR_TRY(ari_process_broadcast(p, &end, sizeof end));
    if (is_first)
        return AR_OK;
    /* The lists are process 0's, and stay there. */
    end.loss = r->loss;
    end.norm = r->norm;
    end.lr = r->lr;
    *r = end;
    return AR_OK;
}

/* Returns true if the run ended before the step that it was about to take. */
static bool ended_early(const ar_training_report *r)
{
    return r->end == AR_TRAINING_DIVERGED || r->end == AR_TRAINING_WRONG;
}

/* Counts the steps after `first` that are multiples of verify_every. */
static uint64_t verified_steps(const ar_training_report *r, const ar_training_options *o)
{
    return o->verify_every > 0 ? r->steps / o->verify_every - r->resumed_steps / o->verify_every : 0;
}

/* Predicts the bytes of a module's step by a dry run of each rank. */
static ar_status dry_bytes(uint64_t *bytes, const ari_training *j)
{
    ari_cluster_options steps = j->cluster;
    steps.batch += j->report->resumed_steps;
    steps.run.steps = j->report->steps - j->report->resumed_steps;
    steps.body = NULL; /* a step alone */
    for (int r = 0; r < ar_parallel_world(&j->o->run.parallel); r++) {
        ari_dry_memory m;
        AR_TRY(ari_cluster_dry(&m, &steps, r, NULL));
        *bytes += m.bytes;
    }
    return AR_OK;
}

/* Predicts the bytes of a run that ended in good order. */
static ar_status predict_bytes(const ari_training *j)
{
    ar_training_report *r = j->report;
    const ar_training_options *o = j->o;
    const uint64_t step_count = r->steps - r->resumed_steps;
    ari_step_case traffic = {.run = o->run,
                             .config = &r->config,
                             .verified = verified_steps(r, o),
                             .routed = &j->routed,
                             .repeats = o->packing.enabled};
    traffic.run.steps = step_count;
    if (step_count == 0 || step_count > INT_MAX || o->scale_loss || ended_early(r))
        return AR_OK;
    if (o->module && (o->verify_every > 0 || o->listener.stop))
        return AR_OK;
    AR_TRY(o->module ? dry_bytes(&r->bytes_predicted, j) : ari_bytes_predict(&r->bytes_predicted, &traffic));
    r->bytes_differ = r->bytes != r->bytes_predicted;
    if (r->bytes_differ && !r->message[0])
        snprintf(r->message, sizeof r->message,
                 "%" PRIu64 " bytes were moved between ranks, the layout predicts %" PRIu64
                 ": a collective is missing or one too many",
                 r->bytes, r->bytes_predicted);
    return AR_OK;
}

static void training_fini(ari_training *j)
{
    ar_checkpoint_writer_destroy(j->writer);
    ari_full_set_destroy(j->full);
    free(j->data_path);
    free(j->batch);
    ari_data_close(j->data);
    ari_weights_destroy(j->weights);
    ar_training_report_destroy(j->report);
}

ar_status ar_train_run(ar_training_report **out, const ar_training_options *o)
{
    ARI_ENDED(training_fini) ari_training job = {.o = o};
    if (!o)
        return ar_error_set(AR_ERR_ARG, "a training run without options");
    AR_TRY(ARI_ALLOC_ZERO(&job.report, 1, "a report"));
    const ar_status begun = (o->module ? begin_module : begin_training)(&job);
    AR_TRY(o->run.process ? ari_process_agree(o->run.process, begun) : begun);
    AR_TRY(run_ranks(&job));
    if (o->run.process) /* process 0 has recorded the results */
        AR_TRY(share_end(job.report, o->run.process));
    AR_TRY(predict_bytes(&job));
    if (!ended_early(job.report) && (!o->run.process || ar_process_rank(o->run.process) == 0))
        AR_TRY(ari_full_set_hash(job.full, job.report->weights_hash));
    ARI_GIVE(out, job.report);
    return AR_OK;
}

void ar_training_report_destroy(ar_training_report *r)
{
    if (!r)
        return;
    free(r->loss);
    free(r->norm);
    free(r->lr);
    free(r);
}
