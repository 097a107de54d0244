/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "ref/context/context.h"
#include "ref/core/size.h"
#include "ref/io/config_parts.h"
#include "ref/io/file.h"
#include "ref/io/hash.h"
#include "ref/io/json.h"
#include "ref/io/safetensors_private.h"
#include "ref/models/placement.h"
#include "verify/run/checkpoint.h"
#include "verify/run/checkpoint_private.h"
#include "verify/run/full_set.h"

ARI_OWNER(ar_checkpoint_writer, ar_checkpoint_writer_destroy)

struct ar_checkpoint_writer {
    ari_checkpoint_folder folder;
    size_t keep_count;
    unsigned char *config; /* text of config.json; NULL: none */
    size_t config_bytes;
    char config_hash[65];
    ar_config model; /* model of the config's text */
    ari_full_set *set;
    char *written; /* path of the last written checkpoint; NULL before the first */
};

static ar_status read_config(ar_checkpoint_writer *w, const char *path, const ar_config *changed)
{
    ARI_OWNED char *file = NULL;
    AR_TRY(ari_config_path(&file, path));
    AR_TRY(ari_file_read(&w->config, &w->config_bytes, file, ARI_JSON_MAX_BYTES));
    if (changed)
        w->model = *changed;
    else if (ar_config_load(&w->model, path) != AR_OK)
        w->model = (ar_config){.layers = 0}; /* config.json is copied, whatever its model is */
    if (changed || w->model.within || w->model.quantized[0] != '\0')
        AR_TRY(ari_config_rewrite(&w->config, &w->config_bytes, &w->model));
    ari_sha256_of(w->config_hash, w->config, w->config_bytes);
    return AR_OK;
}

ar_status ar_checkpoint_writer_create(ar_checkpoint_writer **out, const ar_checkpoint_options *o)
{
    ARI_OWNED_BY(ar_checkpoint_writer_destroy) ar_checkpoint_writer *w = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&w, 1, "a writer of checkpoints"));
    w->keep_count = o->max_checkpoints;
    w->folder.fd = -1;
    if (o->config != NULL)
        AR_TRY(read_config(w, o->config, o->changed));
    AR_TRY(ari_full_set_create(&w->set, o->process));
    if (!o->process || ar_process_rank(o->process) == 0)
        AR_TRY(ari_checkpoint_folder_open(&w->folder, o->folder, o->fresh));
    ARI_GIVE(out, w);
    return AR_OK;
}

void ar_checkpoint_writer_destroy(ar_checkpoint_writer *w)
{
    if (w == NULL)
        return;
    ari_checkpoint_folder_close(&w->folder);
    ari_full_set_destroy(w->set);
    free(w->config);
    free(w->written);
    free(w);
}

const char *ari_checkpoint_written(const ar_checkpoint_writer *w)
{
    return w->written == NULL ? "" : w->written;
}

/* --- the files of one --------------------------------------------------------------------------------------------- */

/* Adds a parameter to the stack of its layer's experts, among n existing stacks. A new stack owns its values, followed
 * by its name. */
static ar_status stack_one(ar_st_tensor *stacks, size_t *n, const ari_stacked *s, const ar_st_tensor *t)
{
    const size_t stack_size = ari_volume(s->shape, s->ndim), cols = t->ndim == 2 ? t->shape[1] : 1;
    const float *src = t->data;
    float *values = NULL;
    size_t k = *n;
    while (k > 0 && strcmp(stacks[k - 1].name, s->name) != 0)
        k--;
    if (k == 0) {
        AR_TRY(ARI_ALLOC_ZERO(&values, stack_size + sizeof s->name, s->name));
        stacks[*n] = (ar_st_tensor){.name = memcpy(values + stack_size, s->name, sizeof s->name),
                                    .dtype = t->dtype,
                                    .ndim = s->ndim,
                                    .data = values};
        memcpy(stacks[*n].shape, s->shape, sizeof s->shape);
        k = ++*n;
    }
    values = (float *)(uintptr_t)stacks[k - 1].data + stack_size / s->shape[0] * s->expert + s->row;
    for (size_t i = 0; i < t->shape[0] * cols; i++)
        values[i / cols * s->step[0] + i % cols * s->step[1]] = src[i];
    return AR_OK;
}

/* Stacks the experts of each layer as transformers does for GPT-OSS, one tensor for all experts. The stacked tensors
 * are the last ones in the list, from *owned_begin on. */
static ar_status stack_experts(ar_st_tensor *list, size_t *n, size_t *owned_begin, const ar_config *c)
{
    ARI_OWNED ar_st_tensor *stacks = NULL;
    size_t unstacked = 0, stacked = 0;
    ar_status st = AR_OK;
    AR_TRY(ARI_ALLOC_ZERO(&stacks, *n, "a list of full tensors"));
    for (size_t i = 0; i < *n && st == AR_OK; i++) {
        ari_stacked s;
        if (ari_stacked_of(&s, c, list[i].name, list[i].ndim, list[i].shape) && s.step[0] > 0)
            st = stack_one(stacks, &stacked, &s, &list[i]);
        else
            list[unstacked++] = list[i];
    }
    memcpy(list + unstacked, stacks, stacked * sizeof *stacks);
    *owned_begin = unstacked;
    *n = unstacked + stacked;
    return st;
}

/* Parameters, or the state. */
static ar_status write_tensors(const ar_checkpoint_writer *w, const char *folder, bool state, char hash[65])
{
    static const char *const metadata[] = {"format", "pt"};
    ARI_OWNED ar_st_tensor *list = NULL;
    ARI_OWNED char *path = NULL;
    size_t n = 0, owned_begin = SIZE_MAX;
    AR_TRY(ari_file_path(&path, folder, state ? ARI_CHECKPOINT_OPTIMIZER : ARI_CHECKPOINT_WEIGHTS));
    ar_status st = ari_full_set_entries(w->set, state, &list, &n);
    if (st == AR_OK && !state && w->config)
        st = stack_experts(list, &n, &owned_begin, &w->model);
    if (st == AR_OK)
        st = ari_tensors_hash(hash, list, n);
    if (st == AR_OK)
        st = ari_st_write(path, list, n, metadata, 1);
    for (size_t i = owned_begin; i < n; i++)
        free((void *)(uintptr_t)list[i].data);
    return st;
}

static ar_status write_config(const ar_checkpoint_writer *w, const char *folder)
{
    ARI_OWNED char *path = NULL;
    if (w->config == NULL)
        return AR_OK;
    AR_TRY(ari_file_path(&path, folder, ARI_CHECKPOINT_CONFIG));
    return ari_file_write(path, w->config, w->config_bytes);
}

/* Checks that the written state can be read back, so that an error appears now and not when the run is resumed. */
static ar_status write_training(const char *folder, const ar_checkpoint_state *state, const ari_checkpoint_hashes *h)
{
    ARI_ENDED(ari_checkpoint_read_fini) ari_checkpoint_read readback = {.root = NULL};
    ARI_OWNED char *path = NULL;
    AR_TRY(ari_file_path(&path, folder, ARI_CHECKPOINT_TRAINING));
    AR_TRY(ari_checkpoint_write_json(path, state, h));
    return ari_checkpoint_read_json(&readback, path);
}

static ar_status write_files(const ar_checkpoint_writer *w, const char *folder, const ar_checkpoint_state *state,
                             bool optimizer)
{
    ari_checkpoint_hashes h = {.config = ""};
    memcpy(h.config, w->config_hash, sizeof h.config);
    AR_TRY(write_config(w, folder));
    AR_TRY(write_tensors(w, folder, false, h.weights));
    if (optimizer)
        AR_TRY(write_tensors(w, folder, true, h.optimizer));
    return write_training(folder, state, &h);
}

static ar_status write_checkpoint(ar_checkpoint_writer *w, const ar_checkpoint_state *state, bool optimizer)
{
    char name[ARI_CHECKPOINT_NAME];
    ARI_OWNED char *folder = NULL, *written = NULL;
    if (state == NULL)
        return ar_error_set(AR_ERR_ARG, "rank 0 saves a checkpoint without a state");
    ari_checkpoint_name(name, state->step);
    AR_TRY(ari_file_path(&written, w->folder.path, name));
    AR_TRY(ari_checkpoint_folder_begin(&w->folder, &folder, state->step));
    const ar_status st = write_files(w, folder, state, optimizer);
    if (st != AR_OK)
        ari_checkpoint_folder_abandon(&w->folder);
    AR_TRY(st);
    AR_TRY(ari_checkpoint_folder_publish(&w->folder, state->step));
    free(w->written);
    ARI_GIVE(&w->written, written);
    ari_checkpoint_folder_keep(&w->folder, state->step, w->keep_count);
    return AR_OK;
}

ar_status ar_checkpoint_save(ar_checkpoint_writer *w, ar_ctx *ctx, ar_param *const *params, size_t n,
                             ar_optimizer *optimizer, const ar_checkpoint_state *state)
{
    ar_status st = AR_OK;
    AR_TRY(ari_full_set_take(w->set, ctx, params, n, optimizer));
    if (ar_comm_rank(ctx->world) == 0) {
        st = write_checkpoint(w, state, optimizer != NULL);
        ari_full_set_clear(w->set);
    }
    return ari_full_set_agree(w->set, ctx, st);
}
