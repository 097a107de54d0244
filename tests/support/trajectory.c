/* SPDX-License-Identifier: Apache-2.0 */
#include "support/trajectory.h"
#include "anyrank/checkpoint.h"
#include "anyrank/train.h"

#include <unistd.h>

#include "ref/core/size.h"
#include "tests/support/scoped.h"
#include "verify/reference/reference.h"
#include "verify/run/data_private.h"
#include "verify/run/training_private.h"

#define SEED 2026

ar_training_options trajectory_options(const char *model, uint64_t steps)
{
    ar_training_options o = ar_training_defaults();
    o.run.model = model;
    o.run.steps = steps;
    o.run.batch = 6;
    o.run.seq = 24;
    o.run.seed = SEED;
    o.run.clip = 1.0;
    o.run.dropout = 0.1;
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    o.run.optimizer.lr = 3e-3;
    o.run.optimizer.schedule = AR_SCHEDULE_COSINE;
    o.run.optimizer.warmup_steps = steps / 10 + 1;
    o.run.optimizer.total_steps = steps;
    o.run.optimizer.min_lr = 3e-4;
    o.run.optimizer.decay = AR_DECAY_MATRICES;
    o.run.optimizer.weight_decay = 0.1;
    o.run.sim.timeout_ns = UINT64_C(60000000000);
    return o;
}

const char *trajectory_model(const char *model_type, int layers)
{
    static char path[2][256];
    char own[300];
    const bool llama = strcmp(model_type, "llama") == 0;
    char *const to = path[llama];
    snprintf(to, sizeof path[0], "%s/trajectory-%s-%d.json", TEST_BUILD_DIR, model_type, layers);
    snprintf(own, sizeof own, "%s.%ld", to, (long)getpid()); /* another program may read the file meanwhile */
    FILE *f = fopen(own, "w");
    if (!f)
        return NULL;
    fprintf(f,
            llama ? "{\"model_type\": \"llama\", \"vocab_size\": 256, \"hidden_size\": 32, \"intermediate_size\": 48,"
                    " \"num_hidden_layers\": %d, \"num_attention_heads\": 4, \"num_key_value_heads\": 2,"
                    " \"hidden_act\": \"silu\", \"max_position_embeddings\": 32, \"rms_norm_eps\": 1e-5,"
                    " \"tie_word_embeddings\": false}\n"
                  : "{\"model_type\": \"gpt2\", \"vocab_size\": 256, \"n_embd\": 32, \"n_layer\": %d, \"n_head\": 4,"
                    " \"n_positions\": 32, \"activation_function\": \"gelu_new\", \"layer_norm_epsilon\": 1e-5}\n",
            layers);
    return fclose(f) == 0 && rename(own, to) == 0 ? to : NULL;
}

/* What the baseline told of its last step's weights. */
typedef struct last_weights {
    ari_reference of;
    int steps;
} last_weights;

static void begin_step(void *user, int step)
{
    ari_reference_begin(&((last_weights *)user)->of, step);
}

static ar_status keep_weights(void *user, const char *name, char pass, int ndim, const size_t *shape,
                              const double *values)
{
    last_weights *w = user;
    return pass == 'n' && w->of.step == w->steps ? ari_reference_emit(&w->of, name, pass, ndim, shape, values) : AR_OK;
}

/* All batches of a run, with arrays of their own. Gives both; free(), also after a failure. */
static ar_status read_batches(ar_batch **batch, int64_t **ids, const ar_training_options *o, const ar_config *c)
{
    const ar_loader_options lo = {.batch = o->run.batch, .seq = o->run.seq, .vocab = c->vocab, .seed = o->run.seed};
    const size_t tokens = o->run.batch * o->run.seq;
    OWNED(ari_data_close) ar_data *data = NULL;
    OWNED(ari_loader_destroy) ar_loader *loader = NULL;
    AR_TRY(ari_data_open(&data, o->data, o->data_format));
    AR_TRY(ari_loader_create(&loader, data, &lo));
    AR_TRY(ARI_ALLOC(batch, o->run.steps, "batches"));
    AR_TRY(ARI_ALLOC(ids, o->run.steps * tokens, "batches"));
    for (size_t i = 0; i < o->run.steps; i++) {
        AR_TRY(ari_loader_batch(loader, *batch + i, i + 1));
        memcpy(*ids + i * tokens, (*batch)[i].input_ids, tokens * sizeof **ids);
        (*batch)[i].input_ids = *ids + i * tokens;
    }
    return AR_OK;
}

static void end_weights(last_weights *w)
{
    ari_reference_fini(&w->of);
}

ar_status trajectory_baseline(char hash[65], float *loss, const ar_training_options *o)
{
    ar_config c;
    OWNED(free) ar_batch *batch = NULL;
    OWNED(free) int64_t *ids = NULL;
    OWNED(free) double *losses = NULL;
    SCOPED(end_weights) last_weights weights = {.steps = (int)o->run.steps};
    char gradients[65]; /* of none */
    ar_baseline_options b = ari_reference_options(&o->run, NULL);
    b.emit = keep_weights;
    b.emit_user = &weights;
    b.begin_step = begin_step;
    AR_TRY(ar_config_load(&c, o->run.model));
    AR_TRY(read_batches(&batch, &ids, o, &c));
    AR_TRY(ARI_ALLOC(&losses, o->run.steps, "losses"));
    AR_TRY(ar_baseline_run(&c, &b, batch, losses));
    *loss = (float)losses[o->run.steps - 1];
    return ari_reference_hashes(hash, gradients, &weights.of, NULL);
}

ar_status trajectory_run(char hash[65], float *loss, const ar_training_options *o, const trajectory_layout *l)
{
    ar_training_options with = *o;
    OWNED(ar_training_report_destroy) ar_training_report *report = NULL;
    with.run.parallel = l->parallel;
    with.run.ddp.bucket_bytes = l->bucket_bytes;
    with.run.ddp.mode = l->mode;
    AR_TRY(ar_train_run(&report, &with));
    memcpy(hash, report->weights_hash, 65);
    if (loss && report->steps > 0) /* else it diverged in the first */
        *loss = report->loss[report->steps - 1];
    return AR_OK;
}

ar_status trajectory_resumed(char hash[65], const ar_training_options *o, const trajectory_layout *first, uint64_t stop,
                             const trajectory_layout *then, const char *folder)
{
    ar_training_options with = *o;
    OWNED(ar_checkpoint_close) ar_checkpoint *checkpoint = NULL;
    with.save = folder;
    with.stop_after = stop;
    AR_TRY(trajectory_run(hash, NULL, &with, first));
    AR_TRY(ar_checkpoint_open(&checkpoint, folder));
    with = ar_training_defaults();
    ari_training_resume(&with, checkpoint);
    return trajectory_run(hash, NULL, &with, then);
}
