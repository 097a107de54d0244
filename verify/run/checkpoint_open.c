/* SPDX-License-Identifier: Apache-2.0 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "anyrank/config.h"
#include "anyrank/param.h"
#include "anyrank/safetensors.h"
#include "anyrank/train.h"
#include "ref/context/context.h"
#include "ref/core/optimizer_private.h"
#include "ref/core/size.h"
#include "ref/io/file.h"
#include "ref/io/hash.h"
#include "ref/io/json.h"
#include "ref/io/safetensors_private.h"
#include "ref/models/family.h"
#include "verify/run/checkpoint.h"
#include "verify/run/checkpoint_private.h"
#include "verify/run/run.h"

ARI_OWNER(ar_checkpoint, ar_checkpoint_close)

struct ar_checkpoint {
    char *path;
    ari_checkpoint_read read;
    ar_st_file *weights, *optimizer; /* the files of weights and of optimizer state; optimizer NULL: the checkpoint
                                        has no state */
    ari_weights
        *unstacked_weights; /* the weights of a model whose files stack experts, unstacked; NULL: `weights` has each
                               expert by name */
};

/* --- which folder ------------------------------------------------------------------------------------------------- */
/* Resolves the path once, so that a `latest` that changes meanwhile cannot mix two checkpoints. */
static ar_status find_folder(char **out, const char *path)
{
    ARI_OWNED char *latest = NULL;
    bool has_training = false;
    if (path == NULL || path[0] == '\0')
        return ar_error_set(AR_ERR_ARG, "the checkpoint to read has no name");
    if (access(path, F_OK) != 0)
        return ari_io_fail("find the checkpoint", path);
    AR_TRY(ari_file_path(&latest, path, ARI_CHECKPOINT_LATEST));
    *out = realpath(latest, NULL);
    if (*out != NULL)
        AR_TRY(ari_file_is_in(&has_training, *out, ARI_CHECKPOINT_TRAINING));
    if (has_training)
        return AR_OK;
    free(*out);
    *out = realpath(path, NULL);
    if (*out == NULL)
        return ari_io_fail("find the checkpoint", path);
    AR_TRY(ari_file_is_in(&has_training, *out, ARI_CHECKPOINT_TRAINING));
    if (has_training)
        return AR_OK;
    return ar_error_set(AR_ERR_NOT_FOUND,
                        "%s: is no checkpoint: it has no " ARI_CHECKPOINT_TRAINING " and no '" ARI_CHECKPOINT_LATEST
                        "' that leads to one",
                        ARI_SHOW(path));
}

/* --- verifying ---------------------------------------------------------------------------------------------------- */
static ar_status check_entry(const char *path, const ar_st_entry *e)
{
    if (e->dtype != AR_F32)
        return ar_error_set(AR_ERR_DTYPE, "%s: tensor '%s' is %s, expected F32", ARI_SHOW(path), ARI_SHOW(e->name),
                            ar_dtype_name(e->dtype));
    if (e->ndim > AR_MAX_DIMS)
        return ar_error_set(AR_ERR_SHAPE, "%s: tensor '%s' has %d dimensions, at most %d are read", ARI_SHOW(path),
                            ARI_SHOW(e->name), e->ndim, AR_MAX_DIMS);
    if ((uintptr_t)e->data % sizeof(float) != 0)
        return ar_error_set(AR_ERR_FORMAT, "%s: tensor '%s' does not lie at a multiple of 4 bytes", ARI_SHOW(path),
                            ARI_SHOW(e->name));
    return AR_OK;
}

static ar_status hash_file(char hash[65], const char *path, const ar_st_file *f)
{
    const size_t n = ari_st_tensor_count(f);
    ARI_OWNED ar_st_tensor *list = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&list, n, "a list of tensors"));
    for (size_t i = 0; i < n; i++) {
        const ar_st_entry *e = ari_st_at(f, i);
        AR_TRY(check_entry(path, e));
        list[i] = (ar_st_tensor){.name = e->name, .dtype = e->dtype, .ndim = e->ndim, .data = e->data};
        memcpy(list[i].shape, e->shape, sizeof e->shape);
    }
    return ari_tensors_hash(hash, list, n);
}

static ar_status compare_hash(const char *path, const char *got, const char *want)
{
    if (strcmp(got, want) == 0)
        return AR_OK;
    return ar_error_set(AR_ERR_DATA, "%s: damaged: its hash is %.12s, " ARI_CHECKPOINT_TRAINING " says %.12s",
                        ARI_SHOW(path), got, want);
}

static ar_status open_tensors(ar_st_file **out, const char *folder, const char *name, const char *want)
{
    ARI_OWNED char *path = NULL;
    char hash[65];
    AR_TRY(ari_file_path(&path, folder, name));
    AR_TRY(ari_st_open(out, path));
    AR_TRY(hash_file(hash, path, *out));
    return compare_hash(path, hash, want);
}

static ar_status check_config(const char *folder, const char *want)
{
    ARI_OWNED char *path = NULL;
    char hash[65];
    ARI_OWNED unsigned char *text = NULL;
    size_t bytes = 0;
    AR_TRY(ari_file_path(&path, folder, ARI_CHECKPOINT_CONFIG));
    ar_status st = ari_file_read(&text, &bytes, path, ARI_JSON_MAX_BYTES);
    if (st == AR_OK) {
        ari_sha256_of(hash, text, bytes);
        st = compare_hash(path, hash, want);
    }
    return st;
}

static ar_status take_apart(ar_checkpoint *c)
{
    ar_config config;
    const bool stacked = ar_config_load(&config, c->path) == AR_OK && ari_family_of(config.arch)->interleaved;
    return stacked ? ari_weights_load(&c->unstacked_weights, &config, c->path) : AR_OK;
}

static ar_status open_all(ar_checkpoint *c, const char *path)
{
    const ari_checkpoint_hashes *h = &c->read.hashes;
    ARI_OWNED char *training = NULL;
    bool split = false;
    AR_TRY(find_folder(&c->path, path));
    AR_TRY(ari_file_is_in(&split, c->path, "rank-00000.safetensors"));
    if (split)
        return ar_error_set(AR_ERR_NOT_FOUND, "%s: is split among ranks; python3 -m anyrank.convert merges it",
                            ARI_SHOW(c->path));
    AR_TRY(ari_file_path(&training, c->path, ARI_CHECKPOINT_TRAINING));
    AR_TRY(ari_checkpoint_read_json(&c->read, training));
    if (h->weights[0] == '\0')
        return ar_error_set(AR_ERR_FORMAT, "%s/" ARI_CHECKPOINT_TRAINING ": key 'weights_hash' is missing",
                            ARI_SHOW(c->path));
    if (h->config[0] != '\0')
        AR_TRY(check_config(c->path, h->config));
    AR_TRY(open_tensors(&c->weights, c->path, ARI_CHECKPOINT_WEIGHTS, h->weights));
    if (h->config[0] != '\0')
        AR_TRY(take_apart(c));
    return h->optimizer[0] == '\0' ? AR_OK
                                   : open_tensors(&c->optimizer, c->path, ARI_CHECKPOINT_OPTIMIZER, h->optimizer);
}

ar_status ar_checkpoint_open(ar_checkpoint **out, const char *path)
{
    ARI_OWNED_BY(ar_checkpoint_close) ar_checkpoint *c = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&c, 1, "a checkpoint"));
    AR_TRY(open_all(c, path));
    ARI_GIVE(out, c);
    return AR_OK;
}

void ar_checkpoint_close(ar_checkpoint *c)
{
    if (c == NULL)
        return;
    ari_st_close(c->weights);
    ari_st_close(c->optimizer);
    ari_weights_destroy(c->unstacked_weights);
    ari_checkpoint_read_fini(&c->read);
    free(c->path);
    free(c);
}

const char *ari_checkpoint_path(const ar_checkpoint *c)
{
    return c->path;
}

const ar_checkpoint_state *ar_checkpoint_state_of(const ar_checkpoint *c)
{
    return &c->read.state;
}

const char *ari_checkpoint_weights_hash(const ar_checkpoint *c)
{
    return c->read.hashes.weights;
}

bool ari_checkpoint_has_config(const ar_checkpoint *c)
{
    return c->read.hashes.config[0] != '\0';
}

/* --- loading ------------------------------------------------------------------------------------------------------ */
static const float *find_in(const ar_st_file *f, const char *name, size_t count)
{
    const ar_st_entry *e = f == NULL ? NULL : ari_st_find(f, name);
    return e == NULL || e->count != count ? NULL : e->data;
}

const float *ari_checkpoint_find(void *user, const char *name, size_t count)
{
    const ar_checkpoint *c = user;
    return c->unstacked_weights ? ari_weights_find(c->unstacked_weights, name, count)
                                : find_in(c->weights, name, count);
}

static const float *full_of(const ar_checkpoint *c, const ar_param *p)
{
    return ari_checkpoint_find((void *)(uintptr_t)c, p->name, ari_volume(p->layout.shape, p->layout.ndim));
}

static const float *find_state(void *user, const char *param, const char *state, size_t count)
{
    const ar_checkpoint *c = user;
    char name[256];
    const int n = snprintf(name, sizeof name, "%s.%s", param, state);
    return n < 0 || (size_t)n >= sizeof name ? NULL : find_in(c->optimizer, name, count);
}

static ar_status check_shape(const ar_checkpoint *c, const ar_st_entry *e, const ar_param *p)
{
    if (ari_same_extents(e->ndim, e->shape, p->layout.ndim, p->layout.shape))
        return AR_OK;
    return ar_error_set(AR_ERR_SHAPE, "%s: tensor '%s' has shape %s, the model makes it %s", ARI_SHOW(c->path), e->name,
                        ARI_SHOW_SHAPE(e->ndim, e->shape), ARI_SHOW_SHAPE(p->layout.ndim, p->layout.shape));
}

bool ari_checkpoint_keeps(const ar_optimizer_options *o, ar_dtype storage, const char *state)
{
    const bool sgd = o->kind == AR_OPTIMIZER_SGD;
    if (strcmp(state, "master") == 0)
        return storage == AR_BF16;
    if (strcmp(state, "momentum_buffer") == 0)
        return (sgd && o->momentum != 0) || o->kind == AR_OPTIMIZER_MUON;
    return !sgd && (strcmp(state, "exp_avg") == 0 || strcmp(state, "exp_avg_sq") == 0);
}

/* ar_optimizer_load finds missing state. */
static ar_status check_own(const ar_checkpoint *c, const ar_param *p, bool state)
{
    static const char *const state_names[] = {"master", "momentum_buffer", "exp_avg", "exp_avg_sq"};
    const ar_st_entry *e = ari_st_find(c->weights, p->name);
    char name[256];
    if (e != NULL)
        AR_TRY(check_shape(c, e, p));
    else if (full_of(c, p) == NULL)
        return ar_error_set(AR_ERR_NOT_FOUND, "%s: tensor '%s' is missing from the weights", ARI_SHOW(c->path),
                            p->name);
    for (size_t i = 0; state && i < sizeof state_names / sizeof *state_names; i++) {
        snprintf(name, sizeof name, "%s.%s", p->name, state_names[i]);
        e = ari_st_find(c->optimizer, name);
        if (e != NULL)
            AR_TRY(check_shape(c, e, p));
    }
    return AR_OK;
}

/* --- nothing may be there that nobody would read ------------------------------------------------------------------ */
typedef char param_name[sizeof((ar_param *)NULL)->name];
typedef struct param_names {
    param_name *list;
    size_t n, capacity;
} param_names;

static ar_status add_name(void *user, const char *name, int ndim, const size_t *shape)
{
    param_names *names = user;
    (void)ndim;
    (void)shape;
    AR_TRY(ARI_GROW(&names->list, &names->capacity, names->n, "names of parameters"));
    snprintf(names->list[names->n++], sizeof *names->list, "%s", name);
    return AR_OK;
}

static bool has_name(const param_names *names, const char *name, size_t length)
{
    param_name key;
    if (length >= sizeof key || names->n == 0)
        return false;
    snprintf(key, sizeof key, "%.*s", (int)length, name);
    return bsearch(key, names->list, names->n, sizeof *names->list, ari_by_text) != NULL;
}

static ar_status check_names(const ar_checkpoint *c, param_names *names, bool state)
{
    const ar_checkpoint_state *s = &c->read.state;
    ARI_SORT(names->list, names->n, ari_by_text);
    for (size_t i = 0; !c->unstacked_weights && i < ari_st_tensor_count(c->weights); i++) {
        const char *name = ari_st_at(c->weights, i)->name;
        if (!has_name(names, name, strlen(name)))
            return ar_error_set(AR_ERR_FORMAT, "%s: tensor '%s' is in the weights, but the model has none of that name",
                                ARI_SHOW(c->path), ARI_SHOW(name));
    }
    for (size_t i = 0; state && i < ari_st_tensor_count(c->optimizer); i++) {
        const char *name = ari_st_at(c->optimizer, i)->name, *dot = strrchr(name, '.');
        if (dot == NULL || !has_name(names, name, (size_t)(dot - name)) ||
            !ari_checkpoint_keeps(&s->optimizer, s->storage, dot + 1))
            return ar_error_set(AR_ERR_FORMAT, "%s: tensor '%s' is no state of a parameter of the model with %s",
                                ARI_SHOW(c->path), ARI_SHOW(name), ari_optimizer_name(s->optimizer.kind));
    }
    return AR_OK;
}

ar_status ari_checkpoint_check_names(const ar_checkpoint *c, const ar_config *config)
{
    param_names names = {.n = 0};
    ar_status st = ari_param_list(config, add_name, &names);
    if (st == AR_OK)
        st = check_names(c, &names, c->optimizer != NULL);
    free(names.list);
    return st;
}

static ar_status check_listed(const ar_checkpoint *c, ar_param *const *params, size_t n, bool state)
{
    param_names names = {.n = 0};
    ar_status st = AR_OK;
    for (size_t i = 0; i < n && st == AR_OK; i++)
        st = add_name(&names, params[i]->name, 0, NULL);
    if (st == AR_OK)
        st = check_names(c, &names, state);
    free(names.list);
    return st;
}

ar_status ari_checkpoint_check(const ar_checkpoint *c, ar_param *const *params, size_t n, bool state, bool is_complete)
{
    if (state && c->optimizer == NULL)
        return ar_error_set(AR_ERR_NOT_FOUND, "%s: has no optimizer state", ARI_SHOW(c->path));
    for (size_t i = 0; i < n; i++)
        AR_TRY(check_own(c, params[i], state));
    return is_complete ? check_listed(c, params, n, state) : AR_OK;
}

ar_status ar_checkpoint_load(const ar_checkpoint *c, ar_ctx *ctx, ar_param *const *params, size_t n,
                             ar_optimizer *optimizer)
{
    const bool state = optimizer != NULL, is_complete = ar_comm_size(ctx->pipeline) == 1 && ar_comm_size(ctx->ep) == 1;
    AR_TRY(ari_checkpoint_check(c, params, n, state, is_complete));
    for (size_t i = 0; i < n; i++)
        AR_TRY(ar_param_set(params[i], ctx, full_of(c, params[i])));
    if (!state)
        return AR_OK;
    /* find_state does not modify c: the const is cast away only for the callback's type. */
    return ar_optimizer_load(optimizer, ctx, c->read.state.optimizer_steps, find_state, (void *)(uintptr_t)c);
}
