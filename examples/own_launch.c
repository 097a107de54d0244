/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks of one's own, as threads or as processes, train a model of transformer blocks with sequence parallelism.
 *
 *     own_launch                    one rank, then four: threads that share out features, positions and samples
 *     mpirun -n 4 own_launch mpi    the same four as processes, and torchrun with nccl (docs/guide/clusters.md) */
#include "anyrank/activation.h"
#include "anyrank/check_module.h"
#include "anyrank/layers.h"
#include "anyrank/training.h"
#include <stdio.h>
#include <string.h>

enum { BATCH = 4, SEQ = 8, HIDDEN = 8, VOCAB = 13, BLOCKS = 2, MODULES = BLOCKS + 3, STEPS = 10 };

static ar_status build(void *user, ar_ctx *ctx, ar_module **module, ar_loss **loss)
{
    const ar_block_options block = {
        .norm = AR_NORM_RMS,
        .norm_eps = 1e-5,
        .attention = {.hidden = HIDDEN, .heads = 4, .kv_heads = 2, .head_dim = 2, .causal = true, .max_positions = SEQ},
        .mlp = {.hidden = HIDDEN, .ffn = 16, .activation = AR_ACT_SILU, .gated = true}};
    ar_module *m[MODULES] = {NULL};
    char name[] = "block.0";
    ar_status st = AR_OK;
    (void)user;
    AR_TRY(ar_embedding_create(&m[0], ctx, AR_EMBEDDING_VOCAB, "tokens", VOCAB, HIDDEN, 0.5, "places", SEQ, "sum"));
    for (int i = 0; i < BLOCKS; i++, name[6]++)
        AR_TRY_TO(made, st, ar_block_create(&m[1 + i], ctx, name, &block));
    AR_TRY_TO(made, st, ar_norm_create(&m[BLOCKS + 1], ctx, "norm", AR_NORM_RMS, HIDDEN, 1e-5));
    AR_TRY_TO(made, st, ar_logits_create(&m[BLOCKS + 2], ctx, NULL, "logits", VOCAB, HIDDEN, NULL));
made:
    AR_TRY(ar_sequential_made(module, "model", m, MODULES, st));
    return ar_cross_entropy_create(loss, ctx, "loss", VOCAB, AR_HELD_SHARD);
}

static ar_status batch(void *user, int step, ar_batch *b)
{
    static int64_t ids[BATCH * SEQ];
    (void)user, (void)step;
    for (int i = 0; i < BATCH * SEQ; i++)
        ids[i] = i * i % VOCAB;
    *b = (ar_batch){.batch = BATCH, .seq = SEQ, .input_ids = ids};
    return AR_OK;
}

/* Trains under a layout; process NULL: its ranks are threads. */
static ar_training_report *train(const ar_module_case *c, ar_parallel layout, ar_process *process)
{
    ar_training_options o = ar_training_defaults();
    ar_training_report *r = NULL;
    o.module = c;
    o.run.steps = STEPS;
    o.run.parallel = layout;
    o.run.process = process;
    if (ar_train_run(&r, &o) != AR_OK)
        printf("%s\n", ar_error_message());
    return r;
}

int main(int argc, char **argv)
{
    const ar_parallel four = {.tp = 2, .dp = 2, .sp = true},
                      layouts[] = {
                          {.tp = 2, .sp = true, .overlap = 2}, {.cp = 2, .recompute = {AR_RECOMPUTE_FULL, 1}}, four};
    const ar_module_case c = {"model", build, batch, NULL, false};
    ar_check_module_options o = {.run = {.steps = 2}, .parallel = layouts, .layouts = 3};
    ar_process_options how = {.transport = AR_TRANSPORT_SIM};
    ar_process *process = NULL;
    static char text[8192];
    bool right = argc > 1;
    if (argc > 1 && (ar_transport_parse(&how.transport, argv[1]) || ar_process_create(&process, &how)))
        return puts(ar_error_message()), 2;
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    if (!process)
        printf("%s\n", ar_prove_module(&right, text, sizeof text, &c, &o) ? ar_error_message() : text);
    ar_training_report *one = train(&c, (ar_parallel){0}, NULL), *all = train(&c, four, process);
    const bool first = !process || ar_process_rank(process) == 0; /* which has the report's weights */
    right = right && one && all && !all->bytes_differ;
    right = right && (!first || strcmp(one->weights_hash, all->weights_hash) == 0);
    if (one && all && first)
        printf("loss %.4f, after %d steps %.4f; %zu bytes between ranks; weights %.8s, of one rank %.8s\n",
               (double)all->loss[0], STEPS, (double)all->loss[STEPS - 1], (size_t)all->bytes, all->weights_hash,
               one->weights_hash);
    ar_training_report_destroy(one);
    ar_training_report_destroy(all);
    ar_process_destroy(process);
    return right ? 0 : 1;
}
