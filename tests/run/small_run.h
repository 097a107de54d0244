/* SPDX-License-Identifier: Apache-2.0 */
/* A run of a few steps on simulated ranks, begun afresh or from a checkpoint, and saved at its end. */
#pragma once

#include <dirent.h>

#include "anyrank/checkpoint.h"
#include "anyrank/config.h"
#include "anyrank/train.h"
#include "ref/context/context.h"
#include "support/rank_run.h"
#include "support/row.h"
#include "tests/support/temporary.h"
#include "tests/verify/tiny.h"
#include "verify/run/cluster_run.h"
#include "verify/run/data_private.h"
#include "verify/run/full_set.h"

enum { SMALL_BATCH = 4, SMALL_SEQ = 12, SMALL_SEED = 3 };

typedef struct small_run {
    ar_run run;
    uint64_t first, last;         /* takes steps first + 1 .. last */
    const ar_checkpoint *from;    /* NULL: fresh weights */
    ar_checkpoint_writer *writer; /* NULL: nothing is saved */
    bool every_step;              /* saves after each step, else after the last one */
    bool weights_only;            /* saves no optimizer state */
    ar_status (*before_save)(ar_ctx *ctx, ar_param **params, size_t n); /* NULL: nothing happens */
    /* Filled by small_run_do: */
    ar_config config;
    ar_data *data;
    ari_full_set *set;
    ar_status saved; /* of rank 0's last save */
    char hash[65];   /* of the weights at the end */
    float loss[32];  /* [last - first] */
} small_run;

/* A run of one of tiny_models with AdamW and a cosine schedule. */
static inline small_run small_run_of(int model)
{
    small_run r = {.run = {.clip = 1, .seed = SMALL_SEED, .ddp = {.bucket_bytes = 20000}}, .last = 4};
    ar_optimizer_options *const o = &r.run.optimizer;
    *o = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    o->lr = 0.01;
    o->schedule = AR_SCHEDULE_COSINE;
    o->warmup_steps = 2;
    o->total_steps = 8;
    o->decay = AR_DECAY_MATRICES;
    if (ar_config_parse(&r.config, tiny_models[model], strlen(tiny_models[model]), tiny_names[model]) != AR_OK)
        abort();
    return r;
}

static inline ar_checkpoint_state small_state(const small_run *r, uint64_t step)
{
    static const char hash[] = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
    return (ar_checkpoint_state)ROW(.step = step, .optimizer_steps = step, .steps = 8, .seed = SMALL_SEED,
                                    .optimizer = r->run.optimizer, .clip = 1, .dropout = r->run.dropout,
                                    .storage = AR_F32, .batch = SMALL_BATCH, .seq = SMALL_SEQ, .data_hash = hash,
                                    .data_format = AR_DATA_BYTES, .data_tokens = ari_data_tokens(r->data),
                                    .loss = r->loss, .losses = (size_t)(step - r->first));
}

/* What a rank has while it runs. */
typedef struct small_rank {
    ari_trainer trainer;
    ar_loader *loader;
} small_rank;

static inline ar_status small_create(small_rank *k, const small_run *r, ar_ctx *ctx)
{
    const ar_loader_options l = {.batch = SMALL_BATCH, .seq = SMALL_SEQ, .vocab = r->config.vocab, .seed = SMALL_SEED};
    ari_cluster_options o = {.config = &r->config, .run = r->run};
    o.run.steps = r->last;
    AR_TRY(ari_loader_create(&k->loader, r->data, &l));
    AR_TRY(ari_trainer_create(&k->trainer, ctx, &o));
    if (r->from == NULL)
        return AR_OK;
    return ar_checkpoint_load(r->from, ctx, k->trainer.params, k->trainer.n, k->trainer.optimizer);
}

static inline void small_destroy(small_rank *k)
{
    ari_trainer_destroy(&k->trainer);
    ari_loader_destroy(k->loader);
}

static inline ar_status small_save(small_run *r, small_rank *k, ar_ctx *ctx, uint64_t step)
{
    const bool rank0 = ar_comm_rank(ctx->world) == 0;
    const ari_trainer *t = &k->trainer;
    const ar_checkpoint_state state = small_state(r, step);
    if (r->before_save)
        AR_TRY(r->before_save(ctx, t->params, t->n));
    const ar_status st = ar_checkpoint_save(r->writer, ctx, t->params, t->n, r->weights_only ? NULL : t->optimizer,
                                            rank0 ? &state : NULL);
    if (rank0)
        r->saved = st;
    return st;
}

static inline ar_status small_steps(small_run *r, small_rank *k, ar_ctx *ctx)
{
    for (uint64_t step = r->first + 1; step <= r->last; step++) {
        ar_batch batch;
        ar_train_result result;
        AR_TRY(ari_loader_batch(k->loader, &batch, step));
        AR_TRY(ari_trainer_step(&result, &k->trainer, ctx, &batch, (uint32_t)step));
        if (ar_comm_rank(ctx->world) == 0)
            r->loss[step - r->first - 1] = result.loss;
        if (r->writer != NULL && (r->every_step || step == r->last))
            AR_TRY(small_save(r, k, ctx, step));
    }
    return AR_OK;
}

static inline ar_status small_rank_main(ar_ctx *ctx, void *user)
{
    small_run *r = user;
    SCOPED(small_destroy) small_rank k = {0};
    AR_TRY(small_create(&k, r, ctx));
    AR_TRY(small_steps(r, &k, ctx));
    return ari_full_set_take(r->set, ctx, k.trainer.params, k.trainer.n, NULL);
}

static inline ar_status small_run_do(small_run *r)
{
    ar_status st = ari_data_open(&r->data, NULL, AR_DATA_AUTO);
    if (st == AR_OK)
        st = ari_full_set_create(&r->set, NULL);
    if (st == AR_OK)
        st = rank_run(&r->run, small_rank_main, r);
    if (st == AR_OK)
        st = ari_full_set_hash(r->set, r->hash);
    ari_full_set_destroy(r->set);
    ari_data_close(r->data);
    r->set = NULL;
    r->data = NULL;
    return st;
}

/* A new folder, in memory where the machine has such a place: the tests wait for no disk. */
static inline bool make_folder_in_memory(char path[64])
{
    snprintf(path, 64, "/dev/shm/anyrank-test-XXXXXX");
    if (mkdtemp(path) != NULL)
        return true;
    snprintf(path, 64, "/tmp/anyrank-test-XXXXXX");
    return mkdtemp(path) != NULL;
}

/* The names in a folder but "." and "..", sorted, with a space after each. */
static inline const char *names_in(char *out, size_t cap, const char *path)
{
    OWNED(free) struct dirent **list = NULL;
    const int n = scandir(path, &list, NULL, alphasort);
    out[0] = '\0';
    for (int i = 0; i < n; i++) {
        if (strcmp(list[i]->d_name, ".") != 0 && strcmp(list[i]->d_name, "..") != 0) {
            strncat(out, list[i]->d_name, cap - strlen(out) - 1);
            strncat(out, " ", cap - strlen(out) - 1);
        }
        free(list[i]);
    }
    return out;
}
