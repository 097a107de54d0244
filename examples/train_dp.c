/* SPDX-License-Identifier: Apache-2.0 */
/* Ten training steps of a small Llama: on one rank; on four, two groups of samples, each on two tensor-parallel ranks;
 * and on four that share every sequence, each with a chunk from its beginning and one from its end. Every loss has the
 * same bits, so the weights have gone the same way. */
#include "anyrank/config.h"
#include "anyrank/sim.h"
#include "anyrank/train.h"
#include <stdio.h>
#include <string.h>

enum { BATCH = 3, SEQ = 16, STEPS = 10, MOST_PARAMS = 64 };
static const char config_json[] =
    "{\"model_type\": \"llama\", \"vocab_size\": 256, \"hidden_size\": 32, \"intermediate_size\": 48,"
    " \"num_hidden_layers\": 2, \"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"hidden_act\": \"silu\","
    " \"max_position_embeddings\": 16, \"rms_norm_eps\": 1e-5, \"tie_word_embeddings\": false}";
static const char text[] = "One byte is one token: the model reads this sentence over and over.";
static int64_t tokens[BATCH * SEQ]; /* [BATCH, SEQ]; three samples, which two groups share as 2 and 1 */

typedef struct run {
    ar_config config;
    ar_parallel parallel;
    float loss[STEPS]; /* of rank 0; every rank has the same */
} run;

/* One rank's training: the model's shard, its optimizer state, and the steps. */
static ar_status train(ar_ctx *ctx, run *r, bool first)
{
    const ar_batch batch = {.batch = BATCH, .seq = SEQ, .input_ids = tokens};
    const ar_optimizer_options adamw = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    const ar_train_options options = {.parallel = r->parallel, .clip = 1.0};
    ar_param *params[MOST_PARAMS];
    ar_model *model = NULL;
    ar_optimizer *optimizer = NULL;
    size_t n;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ar_model_create(&model, ctx, &r->config, NULL));
    AR_TRY_TO(done, st, ar_model_fresh(model, ctx, 42));
    n = ar_module_params(ar_model_module(model), params, MOST_PARAMS, false);
    AR_TRY_TO(done, st, ar_optimizer_create(&optimizer, ctx, params, n, &adamw));
    for (uint32_t step = 1; step <= STEPS; step++) {
        ar_train_result result;
        AR_TRY_TO(done, st, ar_train_step(&result, model, ctx, optimizer, &batch, step, &options));
        if (first)
            r->loss[step - 1] = result.loss;
    }
done:
    ar_optimizer_destroy(optimizer);
    ar_model_destroy(model);
    return st;
}

/* A rank finds its groups: tensor-parallel ranks are neighbours; those that hold the same shard, with other samples or
 * other positions, sum its gradient. */
static ar_status rank_main(ar_comm *world, void *user)
{
    run *r = (run *)user;
    ar_ctx_options o = {.world = world, .sp = r->parallel.sp};
    ar_parallel_groups groups = {0};
    ar_ctx *ctx = NULL;
    ar_status st = ar_device_cpu_create(&o.device, 1);
    AR_TRY_TO(done, st, ar_parallel_groups_begin(&groups, world, &r->parallel));
    ar_parallel_groups_use(&o, &groups);
    AR_TRY_TO(done, st, ar_ctx_create(&ctx, &o));
    AR_TRY_TO(done, st, train(ctx, r, ar_comm_rank(world) == 0));
done:
    ar_ctx_destroy(ctx);
    ar_device_destroy(o.device);
    ar_parallel_groups_end(&groups);
    return st;
}

int main(void)
{
    static run runs[] = {
        {.parallel = {.tp = 1}}, {.parallel = {.tp = 2, .dp = 2, .sp = true}}, {.parallel = {.cp = 4, .zigzag = true}}};
    const run *one = &runs[0];
    bool same = true;
    for (size_t i = 0; i < (size_t)(BATCH * SEQ); i++)
        tokens[i] = (unsigned char)text[i % (sizeof text - 1)];
    ar_status st = AR_OK;
    for (size_t i = 0; i < sizeof runs / sizeof *runs && st == AR_OK; i++) {
        st = ar_config_parse(&runs[i].config, config_json, strlen(config_json), "example");
        if (st == AR_OK)
            st = ar_sim_run(ar_parallel_world(&runs[i].parallel), NULL, rank_main, &runs[i], NULL);
        same = same && memcmp(one->loss, runs[i].loss, sizeof one->loss) == 0;
    }
    for (int i = 0; i < STEPS && st == AR_OK; i++)
        printf("step %2d: loss %.6f on one rank, %.6f on 2 x 2, %.6f on 4 that share sequences\n", i + 1,
               (double)one->loss[i], (double)runs[1].loss[i], (double)runs[2].loss[i]);
    same = same && st == AR_OK;
    printf("1 rank, 2 x 2 ranks, 4 with cp: %s\n", same          ? "the same bits"
                                                   : st == AR_OK ? "other bits"
                                                                 : ar_error_message());
    return same ? 0 : 1;
}
