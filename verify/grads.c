/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/grads.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "ref/core/size.h"
#include "ref/models/names.h"
#include "ref/models/param_list.h"
#include "run/cluster_run.h"
#include "run/positions.h"
#include "run/weights.h"
#include "verify/block_case.h"
#include "verify/estimate.h"
#include "verify/gather.h"
#include "verify/grads_fault.h"
#include "verify/input_batch.h"

enum { OUTPUTS_FILE, GRADS_FILE };

static ar_status make_folder(const char *path)
{
    if (mkdir(path, 0777) != 0 && errno != EEXIST)
        return ar_error_set(AR_ERR_IO, "%s: cannot make the folder: %s", path, strerror(errno));
    struct stat s;
    if (stat(path, &s) != 0 || !S_ISDIR(s.st_mode))
        return ar_error_set(AR_ERR_IO, "%s: is not a folder", path);
    return AR_OK;
}

static ar_status want_gradient(void *user, const char *name, int ndim, const size_t *shape)
{
    return ari_gather_want(user, name, 'g', name, ndim, shape, GRADS_FILE);
}

/* Logits, loss, hidden states as Hugging Face returns them, and every gradient. */
static ar_status want_all(ari_gatherer *g, const ar_config *c, const ar_batch *b)
{
    const ari_outer_names *n = ari_outer_names_of(c->arch);
    const size_t hidden[3] = {b->batch, b->seq, c->hidden}, logits[3] = {b->batch, b->seq, c->vocab}, one[1] = {1};
    if (n->head)
        AR_TRY(ari_gather_want(g, n->head, 'f', "logits", 3, logits, OUTPUTS_FILE));
    AR_TRY(ari_gather_want(g, "loss", 'f', "loss", 1, one, OUTPUTS_FILE));
    for (size_t i = 0; i <= c->layers; i++) {
        char tap[96], name[48];
        ar_block_options unused;
        const ar_plan plan = {0};
        if (i == 0)
            snprintf(tap, sizeof tap, "%s", n->embedded);
        else if (i == c->layers && c->final_norm)
            snprintf(tap, sizeof tap, "%s", n->final_norm);
        else
            AR_TRY(ar_config_block(c, i - 1, &plan, &unused, tap, sizeof tap));
        snprintf(name, sizeof name, "hidden_states.%zu", i);
        AR_TRY(ari_gather_want(g, tap, 'f', name, 3, hidden, OUTPUTS_FILE));
    }
    return ari_param_list(c, want_gradient, g);
}

static ar_status run(const ar_grads_options *o, ari_cluster_options *run_options, ari_gatherer *g,
                     ar_grads_result *result)
{
    const int world = ar_parallel_world(&o->parallel);
    void **users = NULL;
    AR_TRY(ari_alloc((void **)&users, (size_t)world, sizeof *users, "listeners of the ranks"));
    for (int r = 0; r < world; r++)
        users[r] = g;
    ari_cluster_result done;
    run_options->parallel = o->parallel;
    run_options->ddp = o->ddp;
    run_options->numerics = o->numerics;
    run_options->fault = o->fault;
    run_options->seed = o->seed;
    run_options->threads = o->threads;
    run_options->sim = (ar_sim_options){
        .algorithm = o->algorithm, .timeout_ns = o->timeout_ns, .cluster = o->cluster, .trace = o->trace};
    run_options->tap = ari_gather_tap;
    run_options->tap_user = users;
    const ar_status st = ari_cluster_run(&done, run_options);
    free(users);
    free(done.reports);
    if (done.loss)
        result->loss = done.loss[0];
    free(done.loss);
    result->batch = run_options->batch->batch;
    result->seconds = done.seconds;
    result->bytes = done.bytes;
    result->has_predicted = done.has_predicted;
    result->predicted = done.predicted;
    return st;
}

static ar_status write_files(const ari_gatherer *g, const char *folder, int files, const char *const *names,
                             char path[][600])
{
    const char *list[2] = {NULL};
    for (int i = 0; i < files; i++) {
        if (snprintf(path[i], 600, "%s/%s", folder, names[i]) >= 600)
            return ar_error_set(AR_ERR_ARG, "%s: the path is too long", folder);
        list[i] = path[i];
    }
    AR_TRY(make_folder(folder));
    return ari_gather_write(g, files, list);
}

static ar_status check_case(const ar_config *c, const ar_batch *b, const ar_grads_options *o, ar_plan *plan)
{
    *plan = (ar_plan){0};
    AR_TRY(ari_estimate_layers(c));
    AR_TRY(ari_grads_fault_check(o));
    if (o->mlp_order != AR_MLP_COLUMN_ROW)
        AR_TRY(ar_plan_add_mlp_order(plan, c->arch, o->mlp_order));
    AR_TRY(ar_parallel_check(&o->parallel, c, plan, b->batch, b->seq));
    if ((c->learned_positions || c->rope) && b->seq > c->max_positions)
        return ar_error_set(AR_ERR_SHAPE, "a sequence of %zu is longer than the %zu positions of %s", b->seq,
                            c->max_positions, c->name);
    AR_TRY(ari_check_angles(c, b->seq));
    ari_estimate e;
    const ari_estimate_case size = {.config = c,
                                    .plan = plan,
                                    .batch = b->batch,
                                    .seq = b->seq,
                                    .parallel = &o->parallel,
                                    .layouts = 1,
                                    .numerics = o->numerics,
                                    .alone = true};
    AR_TRY(ari_estimate_check(&e, &size));
    return ari_estimate_fits(&e);
}

static ar_status grads_of_model(ar_grads_result *result, const ar_grads_options *o)
{
    static const char *const names[] = {[OUTPUTS_FILE] = "outputs.safetensors", [GRADS_FILE] = "grads.safetensors"};
    char folder[512];
    ar_config c;
    ar_plan plan;
    ari_input_batch input = {0};
    ari_weights *weights = NULL;
    ari_gatherer g = {0};
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ar_model_path(folder, sizeof folder, o->model));
    AR_TRY_TO(done, st, ar_config_load(&c, folder));
    AR_TRY_TO(done, st, ari_input_batch_load(&input, &c, o->input));
    AR_TRY_TO(done, st, check_case(&c, &input.batch, o, &plan));
    AR_TRY_TO(done, st, ari_weights_load(&weights, &c, folder));
    AR_TRY_TO(done, st, want_all(&g, &c, &input.batch));
    ari_cluster_options run_options = {.config = &c,
                                       .plan = plan,
                                       .batch = &input.batch,
                                       .weights = weights ? ari_weights_find : NULL,
                                       .weights_user = weights};
    AR_TRY_TO(done, st, run(o, &run_options, &g, result));
    AR_TRY_TO(done, st, ari_gather_check(&g));
    AR_TRY_TO(done, st, write_files(&g, o->out, 2, names, result->file));
    AR_TRY_TO(done, st, ari_gather_hash(&g, result->outputs_hash));
    result->tensors = g.count;
done:
    ari_gatherer_fini(&g);
    ari_weights_destroy(weights);
    ari_input_batch_fini(&input);
    return st;
}

/* Its input is given whole, and there is no step around it. */
static ar_status check_block_layout(const ar_parallel *p)
{
    if (p->dp > 1 || p->micro_batches > 1 || p->sp || p->zero > 0)
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "a block runs on tensor-parallel ranks alone: dp, micro-batches, sp and zero need a model");
    return AR_OK;
}

static ar_status grads_of_block(ar_grads_result *result, const ar_grads_options *o)
{
    ari_block_case block = {0};
    ari_gatherer g = {0};
    ar_status st = AR_OK;
    AR_TRY(check_block_layout(&o->parallel));
    AR_TRY_TO(done, st, ari_block_case_load(&block, o->block));
    AR_TRY_TO(done, st, check_case(&block.config, &block.batch, o, &block.plan));
    AR_TRY_TO(done, st, ari_block_case_want(&block, &g));
    ari_cluster_options run_options = {
        .config = &block.config, .batch = &block.batch, .body = ari_block_case_run, .body_user = &block};
    AR_TRY_TO(done, st, run(o, &run_options, &g, result));
    AR_TRY_TO(done, st, ari_gather_check(&g));
    AR_TRY_TO(done, st, write_files(&g, o->out, 1, (const char *const[]){"block.safetensors"}, result->file));
    AR_TRY_TO(done, st, ari_gather_hash(&g, result->outputs_hash));
    result->tensors = g.count;
done:
    ari_gatherer_fini(&g);
    ari_block_case_fini(&block);
    return st;
}

ar_status ar_grads(ar_grads_result *result, const ar_grads_options *o)
{
    *result = (ar_grads_result){0};
    if (!o->out || (o->model != NULL) == (o->block != NULL) || (o->model != NULL) != (o->input != NULL))
        return ar_error_set(AR_ERR_ARG, "gradients need an output folder, and a model with an input or a block");
    return o->model ? grads_of_model(result, o) : grads_of_block(result, o);
}
