/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "anyrank/training.h"
#include "ref/core/size.h"
#include "ref/io/text.h"
#include "run/cluster_run.h"
#include "run/positions.h"
#include "run/train_rank.h"
#include "run/weights.h"

ar_training_options ar_training_defaults(void)
{
    return (ar_training_options){.steps = 100,
                                 .batch = 8,
                                 .seq = 64,
                                 .optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW),
                                 .clip = 1.0,
                                 .ddp = ar_ddp_defaults(),
                                 .algorithm = AR_SIM_DIRECT};
}

static ar_status check_options(const ar_training_options *o, const ar_config *c)
{
    if (o->batch == 0 || o->seq == 0 || o->steps == 0)
        return ar_error_set(AR_ERR_ARG, "steps, batch and seq are at least 1");
    if (o->steps > UINT32_MAX)
        return ar_error_set(AR_ERR_ARG, "%" PRIu64 " steps: at most %u", o->steps, (unsigned)UINT32_MAX);
    if (!(o->clip >= 0.0) || isinf(o->clip))
        return ar_error_set(AR_ERR_ARG, "a largest gradient norm of %g: a finite number from 0 (no clipping)", o->clip);
    if (!(o->dropout >= 0.0 && o->dropout < 1.0))
        return ar_error_set(AR_ERR_ARG, "a dropout of %g: a probability from 0 to below 1", o->dropout);
    AR_TRY(ar_optimizer_check(&o->optimizer));
    if ((c->learned_positions || c->rope) && o->seq > c->max_positions)
        return ar_error_set(AR_ERR_SHAPE, "a sequence of %zu is longer than the %zu positions of %s", o->seq,
                            c->max_positions, c->name);
    AR_TRY(ari_check_angles(c, o->seq));
    return ar_parallel_check(&o->parallel, c, &o->plan, o->batch, o->seq);
}

/* Reads the model, and refuses what cannot be trained. */
static ar_status begin(ar_training_report *r, ari_weights **weights, const ar_training_options *o)
{
    AR_TRY(ar_model_path(r->folder, sizeof r->folder, o->model));
    AR_TRY(ar_config_load(&r->config, r->folder));
    AR_TRY(check_options(o, &r->config));
    AR_TRY(ar_config_parameters(&r->config, &r->parameters));
    AR_TRY(ari_weights_load(weights, &r->config, r->folder));
    r->fresh = *weights == NULL;
    AR_TRY(ari_alloc_zero((void **)&r->loss, (size_t)o->steps, sizeof *r->loss, "losses"));
    AR_TRY(ari_alloc_zero((void **)&r->norm, (size_t)o->steps, sizeof *r->norm, "norms"));
    return ari_alloc_zero((void **)&r->lr, (size_t)o->steps, sizeof *r->lr, "learning rates");
}

static ar_status run_ranks(ar_training_report *r, ari_training *j)
{
    const ar_training_options *o = j->o;
    const ari_cluster_options run = {
        .config = &r->config,
        .parallel = o->parallel,
        .dropout = o->dropout,
        .seed = o->seed,
        .numerics = o->numerics,
        .fault = o->fault,
        .threads = o->threads,
        .sim = {.algorithm = o->algorithm, .timeout_ns = o->timeout_ns, .trace = o->trace, .cluster = o->cluster},
        .body = ari_train_rank,
        .body_user = j};
    ari_cluster_result result;
    const ar_status st = ari_cluster_run(&result, &run);
    free(result.loss);
    free(result.reports);
    r->bytes = result.bytes;
    r->has_predicted = result.has_predicted;
    r->predicted = result.predicted;
    return st;
}

ar_status ar_train_run(ar_training_report **gives, const ar_training_options *o)
{
    ar_training_report *r = NULL;
    ari_weights *weights = NULL;
    unsigned char *text = NULL;
    ari_training job = {.o = o};
    ar_status st = AR_OK;
    AR_TRY(ari_alloc_zero((void **)&r, 1, sizeof *r, "a report"));
    AR_TRY_TO(done, st, begin(r, &weights, o));
    AR_TRY_TO(done, st, ari_text_load(&text, &job.length, o->data));
    AR_TRY_TO(done, st, ari_full_weights_create(&job.full, &r->config));
    r->data_tokens = job.length;
    job.text = text;
    job.weights = weights ? ari_weights_find : NULL;
    job.weights_user = weights;
    job.report = r;
    AR_TRY_TO(done, st, run_ranks(r, &job));
    AR_TRY_TO(done, st, ari_full_weights_hash(job.full, r->weights_hash));
    *gives = r;
    r = NULL;
done:
    ari_full_weights_destroy(job.full);
    ari_weights_destroy(weights);
    free(text);
    ar_training_report_destroy(r);
    return st;
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
