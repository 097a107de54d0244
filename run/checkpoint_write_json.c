/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/out.h"
#include "ref/io/hash.h"
#include "ref/io/json.h"
#include "ref/io/safetensors.h"
#include "run/checkpoint_text.h"

const char *const ari_checkpoint_numerics[2] = {"exact", "native"};
const char *const ari_checkpoint_decay[2] = {"all", "matrices"};

ar_status ari_checkpoint_text_hash(char hex[65], const json_t *o)
{
    char *text = json_dumps(o, JSON_COMPACT | JSON_SORT_KEYS);
    ari_sha256 s = {NULL};
    if (text == NULL)
        return ar_error_set(AR_ERR_MEMORY, "no memory for the text of a checkpoint's state");
    ar_status st = ari_sha256_init(&s);
    if (st == AR_OK)
        st = ari_sha256_update(&s, text, strlen(text));
    if (st == AR_OK)
        st = ari_sha256_final(&s, hex);
    ari_sha256_drop(&s);
    free(text);
    return st;
}

/* Every setter takes a new value, NULL where memory was short; json_object_set_new reports that. */
typedef struct object {
    json_t *o;
    bool failed;
} object;

static void set(object *at, const char *key, json_t *value)
{
    at->failed = json_object_set_new(at->o, key, value) != 0 || at->failed;
}

static void set_count(object *at, const char *key, uint64_t value)
{
    set(at, key, json_integer((json_int_t)value));
}

static json_t *group_json(const ar_param_group *g)
{
    object at = {json_object(), false};
    set(&at, "glob", json_string(g->glob));
    set(&at, "lr_scale", ari_json_number(g->lr_scale));
    set(&at, "weight_decay", ari_json_number(g->weight_decay));
    if (!at.failed)
        return at.o;
    json_decref(at.o);
    return NULL;
}

static json_t *optimizer_json(const ar_optimizer_options *o)
{
    object at = {json_object(), false};
    json_t *groups = json_array();
    set(&at, "kind", json_string(ar_optimizer_name(o->kind)));
    set(&at, "lr", ari_json_number(o->lr));
    set(&at, "momentum", ari_json_number(o->momentum));
    set(&at, "nesterov", json_boolean(o->nesterov));
    set(&at, "beta1", ari_json_number(o->beta1));
    set(&at, "beta2", ari_json_number(o->beta2));
    set(&at, "eps", ari_json_number(o->eps));
    set(&at, "weight_decay", ari_json_number(o->weight_decay));
    set(&at, "schedule", json_string(ar_schedule_name(o->schedule)));
    set_count(&at, "warmup_steps", o->warmup_steps);
    set_count(&at, "total_steps", o->total_steps);
    set(&at, "min_lr", ari_json_number(o->min_lr));
    set(&at, "decay", json_string(ari_checkpoint_decay[o->decay]));
    for (size_t i = 0; i < o->groups; i++)
        at.failed = json_array_append_new(groups, group_json(&o->group[i])) != 0 || at.failed;
    set(&at, "groups", groups);
    if (!at.failed)
        return at.o;
    json_decref(at.o);
    return NULL;
}

/* What is no UTF-8 would make the whole file unreadable. */
static json_t *text_json(const char *text)
{
    char *copy = text == NULL ? NULL : strdup(text);
    if (copy == NULL)
        return text == NULL ? json_null() : NULL;
    for (char *c = copy; !ari_utf8_valid(text, strlen(text)) && *c != '\0'; c++)
        *c = (unsigned char)*c < 0x80 ? *c : '?';
    json_t *value = json_string(copy);
    free(copy);
    return value;
}

static json_t *data_json(const ar_checkpoint_state *s)
{
    object at = {json_object(), false};
    if (s->data_hash == NULL) {
        json_decref(at.o);
        return json_null();
    }
    set(&at, "path", text_json(s->data_path));
    set(&at, "format", json_string(ar_data_format_name(s->data_format)));
    set_count(&at, "tokens", s->data_tokens);
    set(&at, "sha256", json_string(s->data_hash));
    if (!at.failed)
        return at.o;
    json_decref(at.o);
    return NULL;
}

static json_t *loss_json(const ar_checkpoint_state *s)
{
    const size_t n = s->losses < AR_CHECKPOINT_LOSSES ? s->losses : AR_CHECKPOINT_LOSSES;
    return ari_json_floats(s->loss + (s->losses - n), n);
}

static json_t *hash_json(const char *hash)
{
    return hash[0] == '\0' ? json_null() : json_string(hash);
}

static json_t *state_json(const ar_checkpoint_state *s, const ari_checkpoint_hashes *h)
{
    object at = {json_object(), false};
    char seed[24];
    snprintf(seed, sizeof seed, "%" PRIu64, s->seed);
    set(&at, "format", json_string(ARI_CHECKPOINT_FORMAT));
    set(&at, "version", json_integer(ARI_CHECKPOINT_VERSION));
    set(&at, "model", text_json(s->model));
    set_count(&at, "step", s->step);
    set_count(&at, "optimizer_steps", s->optimizer_steps);
    set_count(&at, "steps", s->steps);
    set(&at, "seed", json_string(seed));
    set(&at, "optimizer", optimizer_json(&s->optimizer));
    set(&at, "clip", ari_json_number(s->clip));
    set(&at, "dropout", ari_json_number(s->dropout));
    set(&at, "numerics", json_string(ari_checkpoint_numerics[s->numerics]));
    set(&at, "storage", json_string(ar_dtype_name(s->storage)));
    set(&at, "loss_scale", ari_json_number(s->loss_scale));
    set_count(&at, "loss_scale_steps", s->loss_scale_steps);
    set(&at, "loss_scale_static", json_boolean(s->loss_scale_static));
    set_count(&at, "batch", s->batch);
    set_count(&at, "seq", s->seq);
    set(&at, "in_order", json_boolean(s->in_order));
    set_count(&at, "samples", s->step * s->batch);
    set(&at, "data", data_json(s));
    set(&at, "config_hash", hash_json(h->config));
    set(&at, "weights_hash", hash_json(h->weights));
    set(&at, "optimizer_hash", hash_json(h->optimizer));
    set(&at, "losses", loss_json(s));
    if (!at.failed)
        return at.o;
    json_decref(at.o);
    return NULL;
}

ar_status ari_checkpoint_write_json(const char *path, const ar_checkpoint_state *s, const ari_checkpoint_hashes *hashes)
{
    char own[65];
    json_t *o = state_json(s, hashes);
    if (o == NULL)
        return ar_error_set(AR_ERR_MEMORY, "%s: no memory for its JSON", ARI_SHOW(path));
    ar_status st = ari_checkpoint_text_hash(own, o);
    if (st == AR_OK && json_object_set_new(o, ARI_CHECKPOINT_OWN_HASH, json_string(own)) != 0)
        st = ar_error_set(AR_ERR_MEMORY, "%s: no memory for its JSON", ARI_SHOW(path));
    if (st == AR_OK)
        st = ari_json_save(o, path);
    json_decref(o);
    return st;
}
