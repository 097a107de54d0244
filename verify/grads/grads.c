/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/grads.h"

#include <stdio.h>
#include <string.h>

#include "ref/core/text.h"
#include "ref/core/wait.h"
#include "ref/io/file.h"
#include "ref/models/family.h"
#include "ref/models/model_private.h"
#include "verify/faults/fault_case.h"
#include "verify/grads/grads.h"
#include "verify/plan/estimate.h"
#include "verify/run/run.h"

ARI_OWNER(ari_weights, ari_weights_destroy)

#define RANKS_NAME "ranks"

static ar_status want_gradient(void *user, const char *name, int ndim, const size_t *shape)
{
    return ari_is_buffer_name(name) ? AR_OK : ari_gather_want(user, name, 'g', name, ndim, shape, ARI_GRADS_FILE);
}

/* Logits, loss, hidden states as Hugging Face returns them, and every gradient. */
static ar_status want_all(ari_gatherer *g, const ar_config *c, const ar_batch *b)
{
    const ari_family *f = ari_family_of(c->arch);
    const char *head = ari_part_path(f, ARI_HEAD);
    const size_t hidden[3] = {b->batch, b->seq, c->hidden}, scalar_shape[1] = {1};
    if (head)
        AR_TRY(ari_gather_want_logits(g, c, b, ARI_OUTPUTS_FILE));
    AR_TRY(ari_gather_want(g, "loss", 'f', "loss", 1, scalar_shape, ARI_OUTPUTS_FILE));
    for (size_t i = 0; i <= c->layers; i++) {
        char tap[96], name[48];
        ar_block_options unused;
        if (i == 0)
            snprintf(tap, sizeof tap, "%s", f->embedded);
        else if (i == c->layers && c->final_norm)
            snprintf(tap, sizeof tap, "%s", ari_part_path(f, ARI_FINAL_NORM));
        else
            AR_TRY(ari_config_block(c, i - 1, &unused, tap, sizeof tap));
        snprintf(name, sizeof name, "hidden_states.%zu", i);
        AR_TRY(ari_gather_want(g, tap, 'f', name, 3, hidden, ARI_OUTPUTS_FILE));
    }
    return ari_param_list(c, want_gradient, g);
}

static ar_status run_grads(ari_cluster_options *o, ari_grads_taps *taps, ar_grads_result *result)
{
    ARI_ENDED(ari_cluster_result_fini) ari_cluster_result cluster_result = {0};
    o->tap = ari_tap_both;
    o->tap_user = taps->user;
    const ar_status st = ari_cluster_run(&cluster_result, o);
    if (cluster_result.loss)
        result->loss = cluster_result.loss[0];
    result->batch = o->batch->batch;
    result->seconds = cluster_result.seconds;
    result->bytes = cluster_result.bytes;
    result->has_predicted = cluster_result.has_predicted;
    result->predicted = cluster_result.predicted;
    return st;
}

static ar_status run_block(void *user, const ar_baseline_options *o)
{
    return ari_block_case_baseline(user, o);
}

/* Computes the baseline's tensors for the run, and their tolerances in the requested arithmetic. */
static ar_status allow_differences(ari_reference *ref, const ari_cluster_options *run, const ar_grads_options *o)
{
    const ari_sensitivity_case c = {.sensitivity = o->sensitivity_of,
                                    .config = run->config,
                                    .batch = run->batch,
                                    .run = run->body ? run_block : NULL,
                                    .user = run->body_user,
                                    .options = {.seed = o->run.seed,
                                                .weights = run->weights,
                                                .weights_user = run->weights_user,
                                                .loss = o->run.loss},
                                    .threads = ari_threads(o->run.threads),
                                    .progress = o->progress,
                                    .progress_user = o->progress_user};
    return ari_sensitivity_allow(ref, &c);
}

/* Obstacles to the ranks' folder are reported before the run. */
static ar_status check_out(const ar_grads_options *o)
{
    char path[600];
    AR_TRY(ari_folder_path(path, sizeof path, o->out, RANKS_NAME));
    return o->per_rank ? ari_dump_folder_check(path) : AR_OK;
}

/* Checks that all tensors are complete. With an injected fault, missing or double parts are an expected result and not
 * an internal error. */
static ar_status check_complete(const ari_gatherer *g, const char *fault)
{
    const ar_status st = ari_gather_check(g);
    if (st != AR_ERR_INTERNAL || !fault)
        return st;
    return ar_error_set(AR_ERR_DATA, "fault %s leaves nothing whole to write: %s", fault, ar_error_message());
}

static ar_status file_path(ar_grads_result *result, int file, const ar_grads_options *o, const char *name)
{
    return ari_folder_path(result->file[file], sizeof result->file[file], o->out, name);
}

/* The files of names (the first `files`), then activations and ranks as asked for. */
static ar_status write_files(ar_grads_result *result, ari_grads_taps *taps, const ar_grads_options *o,
                             const ari_cluster_options *cluster, const char *const *names, int files,
                             const ari_reference *sensitive)
{
    ari_gatherer *g = taps->outputs;
    ar_run run = o->run;
    const char *path[ARI_GATHER_FILES] = {NULL}, *placement[ARI_GATHER_FILES] = {NULL};
    ARI_OWNED char *order = NULL, *documents = NULL;
    AR_TRY(check_complete(g, o->run.fault));
    AR_TRY(ari_gather_hash(g, files, result->outputs_hash));
    result->tensors = g->count;
    for (int i = 0; i < files; i++)
        AR_TRY(file_path(result, i, o, names[i]));
    if (o->activations) {
        AR_TRY(file_path(result, ARI_ACTIVATIONS_FILE, o, "activations.safetensors"));
        AR_TRY(ari_grads_merge(taps, files, o->per_rank));
        AR_TRY(check_complete(g, o->run.fault));
        AR_TRY(ari_grads_order(&order, g, files));
        placement[files] = order;
        result->activations = g->count - result->tensors;
    }
    for (int i = 0, n = 0; i < ARI_GATHER_FILES; i++) {
        if (result->file[i][0])
            path[n++] = result->file[i];
    }
    AR_TRY(ari_folder_make(o->out));
    AR_TRY(ari_gather_write(g, ari_dump_targets(cluster->batch), files + (o->activations ? 1 : 0), path, placement));
    run.batch = cluster->batch->batch;
    run.seq = cluster->batch->seq;
    AR_TRY(ari_dump_model_write(o->out, cluster->config, &run));
    if (o->per_rank) {
        ari_dump_facts facts;
        AR_TRY(ari_dump_facts_of(&facts, cluster->config, &run, cluster->batch));
        AR_TRY(ari_documents_text(&documents, cluster->batch, 1));
        ari_dump_fact(&facts, "cu_seqlens", documents);
        AR_TRY(file_path(result, ARI_RANKS_FOLDER, o, RANKS_NAME));
        AR_TRY(ari_dump_ranks_write(&taps->ranks, result->file[ARI_RANKS_FOLDER], &facts));
    }
    if (o->sensitivity) {
        AR_TRY(file_path(result, ARI_ALLOWED_FILE, o, "allowed.safetensors"));
        return ari_gather_write_allowed(g, sensitive, result->file[ARI_ALLOWED_FILE], o->sensitivity_of,
                                        result->outputs_hash);
    }
    return AR_OK;
}

static ari_estimate_dump dump_of(const ar_grads_options *o)
{
    if (o->activations)
        return o->per_rank ? ARI_DUMPS_ALL : ARI_DUMPS_FIRST;
    return o->per_rank ? ARI_DUMPS_RESULTS : ARI_DUMPS_NOTHING;
}

static ar_status check_case(const ar_config *c, const ar_batch *b, const ar_grads_options *o, ar_plan *plan)
{
    *plan = o->run.plan;
    AR_TRY(ari_estimate_layers(c));
    ari_estimate e;
    ari_estimate_case size = {.run = o->run,
                              .config = c,
                              .parallel = &o->run.parallel,
                              .layouts = 1,
                              .alone = true,
                              .noise_runs = o->sensitivity ? ARI_NOISE_SEEDS : 0,
                              .dump = dump_of(o),
                              .merges = o->activations};
    size.run.plan = *plan;
    size.run.batch = b->batch;
    size.run.seq = b->seq;
    AR_TRY(ar_run_check(&size.run, c));
    AR_TRY(ari_run_check_declared(&size.run, c));
    AR_TRY(ari_estimate_check(&e, &size));
    return ari_estimate_fits(&e);
}

static ar_status run_and_write(ar_grads_result *result, const ar_grads_options *o, ari_cluster_options *cluster,
                               ari_gatherer *g)
{
    static const char *const names[] = {
        [ARI_OUTPUTS_FILE] = "outputs.safetensors", [ARI_GRADS_FILE] = "grads.safetensors"};
    static const char *const block_names[] = {"block.safetensors"};
    ARI_ENDED(ari_grads_taps_fini) ari_grads_taps taps = {.outputs = NULL};
    ARI_ENDED(ari_reference_fini) ari_reference sensitive = {0};
    AR_TRY(ari_grads_taps_create(&taps, g, o));
    AR_TRY(run_grads(cluster, &taps, result));
    if (o->sensitivity)
        AR_TRY(allow_differences(&sensitive, cluster, o));
    return cluster->body ? write_files(result, &taps, o, cluster, block_names, 1, &sensitive)
                         : write_files(result, &taps, o, cluster, names, 2, &sensitive);
}

static ar_status grads_of_model(ar_grads_result *result, const ar_grads_options *o)
{
    char folder[512];
    ARI_ENDED(ari_input_batch_fini) ari_input_batch input = {0};
    ARI_OWNED_BY(ari_weights_destroy) ari_weights *weights = NULL;
    ARI_ENDED(ari_gatherer_fini) ari_gatherer g = {0};
    ar_config *c = &result->config;
    ari_cluster_options cluster = {.run = o->run, .config = c, .batch = &input.batch};
    AR_TRY(ari_run_config(c, folder, sizeof folder, &o->run));
    AR_TRY(ari_input_batch_load(&input, c, o->input));
    memcpy(result->note, input.note, sizeof input.note);
    if (o->activations && ari_scores_note(input.batch.seq, o->run.numerics))
        snprintf(result->note[4], sizeof result->note[4], "%s", ari_scores_note(input.batch.seq, o->run.numerics));
    AR_TRY(check_case(c, &input.batch, o, &cluster.run.plan));
    AR_TRY(ari_weights_load(&weights, c, folder));
    result->fresh = weights == NULL;
    AR_TRY(ari_fault_case_check(&o->run, o->run.plan.mlp_order, c, result->fresh, input.batch.documents));
    AR_TRY(want_all(&g, c, &input.batch));
    g.stacked = o->stacked ? c : NULL;
    cluster.weights = weights ? ari_weights_find : NULL;
    cluster.weights_user = weights;
    return run_and_write(result, o, &cluster, &g);
}

/* Checks options of a block: its input is given as a whole, and the block is not part of a training step. */
static ar_status check_block(const ar_run *r)
{
    const ar_parallel *p = &r->parallel;
    if (r->loss.label_smoothing > 0.0 || r->loss.z_loss > 0.0)
        return ar_error_set(AR_ERR_ARG, "a block has no logits, which label smoothing and z-loss are about");
    if (p->dp > 1 || p->pp > 1 || p->micro_batches > 1 || p->zero > 0)
        return ar_error_set(
            AR_ERR_UNSUPPORTED,
            "a block runs on tensor-parallel and context-parallel ranks alone: dp, pp, micro-batches and zero need a model");
    return AR_OK;
}

static ar_status grads_of_block(ar_grads_result *result, const ar_grads_options *o)
{
    ARI_ENDED(ari_block_case_fini) ari_block_case block = {0};
    ARI_ENDED(ari_gatherer_fini) ari_gatherer g = {0};
    ari_cluster_options cluster = {
        .run = o->run, .config = &block.config, .batch = &block.batch, .body = ari_block_case_run, .body_user = &block};
    AR_TRY(check_block(&o->run));
    if (o->stacked)
        return ar_error_set(AR_ERR_ARG, "a block has no experts whose gradients could be stacked");
    AR_TRY(ari_block_case_load(&block, o->block));
    AR_TRY(check_case(&block.config, &block.batch, o, &block.plan));
    AR_TRY(ari_fault_case_check(&o->run, o->run.plan.mlp_order, &block.config, false, false));
    AR_TRY(ari_block_case_want(&block, &g));
    return run_and_write(result, o, &cluster, &g);
}

/* Refuses options that a file of gradients cannot represent. */
static ar_status check_given(const ar_run *r)
{
    if (r->batch > 0 || r->seq > 0)
        return ar_error_set(AR_ERR_ARG, "batch and seq of gradients are those of the input: leave them 0");
    if (r->steps > 0 || r->clip != 0.0 || r->dropout != 0.0)
        return ar_error_set(AR_ERR_ARG, "gradients are made without an update: steps, clip and dropout are 0");
    if ((r->storage == AR_BF16 && r->precision != AR_PRECISION_BF16) || r->process)
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "gradients are made in fp32 storage or precision bf16, by ranks that are threads");
    return AR_OK;
}

ar_status ar_grads(ar_grads_result *result, const ar_grads_options *o)
{
    *result = (ar_grads_result){0};
    if (!o->logprobs && (o->logits || o->binary64))
        return ar_error_set(AR_ERR_ARG, "rows of logits and binary64 numbers are those of log-probabilities");
    if ((!o->out && !o->logprobs) || (o->run.model != NULL) == (o->block != NULL) ||
        (o->run.model != NULL) != (o->input != NULL))
        return ar_error_set(
            AR_ERR_ARG,
            "gradients need an output folder or a file of log-probabilities, and a model with an input or a block");
    AR_TRY(check_given(&o->run));
    if (o->stacked && o->sensitivity)
        return ar_error_set(AR_ERR_UNSUPPORTED, "allowances have the names of checkpoints: with sensitivity gradients "
                                                "are not stacked");
    AR_TRY(ari_check_choice("arithmetic of the sensitivity", (int)o->sensitivity_of, AR_SENSITIVITY_COUNT));
    AR_TRY(ari_run_check_numerics(&o->run));
    if (o->logprobs)
        return ari_grads_logprobs(result, o);
    AR_TRY(check_out(o));
    return o->run.model ? grads_of_model(result, o) : grads_of_block(result, o);
}
