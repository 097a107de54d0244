/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/out.h"
#include "ref/core/size.h"
#include "ref/io/json.h"
#include "run/checkpoint_text.h"

#define MAX_COUNT ((size_t)INT64_MAX) /* what a JSON integer holds here */

/* A number, or one of the strings that stand for what JSON has no number for. */
static ar_status number_of(double *out, const ari_json_at *at, const char *key, const json_t *value)
{
    static const char *const names[] = {"NaN", "Infinity", "-Infinity"};
    const double values[] = {(double)NAN, (double)INFINITY, -(double)INFINITY};
    for (size_t i = 0; json_is_string(value) && i < 3; i++) {
        if (strcmp(json_string_value(value), names[i]) == 0) {
            *out = values[i];
            return AR_OK;
        }
    }
    if (!json_is_number(value))
        return ar_error_set(at->code, "%s: key '%s' is missing or no number", ARI_SHOW(at->name), key);
    *out = json_number_value(value);
    return AR_OK;
}

static ar_status get_number(const ari_json_at *at, const char *key, double *out)
{
    return number_of(out, at, key, ari_json_get(at, key));
}

static ar_status get_count(const ari_json_at *at, const char *key, uint64_t *out)
{
    size_t value = 0;
    AR_TRY(ari_json_size(at, key, 0, MAX_COUNT, &value));
    *out = value;
    return AR_OK;
}

static ar_status get_choice(const ari_json_at *at, const char *key, const char *const *names, size_t n, int *out)
{
    const char *text = NULL;
    AR_TRY(ari_json_string(at, key, &text));
    for (size_t i = 0; i < n; i++) {
        if (strcmp(text, names[i]) == 0) {
            *out = (int)i;
            return AR_OK;
        }
    }
    return ar_error_set(at->code, "%s: key '%s' is '%s', which this program does not know", ARI_SHOW(at->name), key,
                        ARI_SHOW(text));
}

static ar_status get_hash(const ari_json_at *at, const char *key, char hash[65])
{
    const char *text = NULL;
    hash[0] = '\0';
    AR_TRY(ari_json_string_or(at, key, &text));
    if (text == NULL)
        return AR_OK;
    if (strlen(text) != 64 || strspn(text, "0123456789abcdef") != 64)
        return ar_error_set(at->code, "%s: key '%s' is '%s', expected 64 hexadecimal digits", ARI_SHOW(at->name), key,
                            ARI_SHOW(text));
    memcpy(hash, text, 65);
    return AR_OK;
}

static ar_status get_groups(const ari_json_at *at, ar_optimizer_options *o)
{
    const json_t *list = NULL;
    AR_TRY(ari_json_array(at, "groups", &list));
    if (json_array_size(list) > AR_PARAM_GROUPS)
        return ar_error_set(at->code, "%s: key 'groups' has %zu entries, at most %d are read", ARI_SHOW(at->name),
                            json_array_size(list), AR_PARAM_GROUPS);
    for (size_t i = 0; i < json_array_size(list); i++) {
        const ari_json_at group = {json_array_get(list, i), at->name, at->code};
        const char *glob = NULL;
        AR_TRY(ari_json_string(&group, "glob", &glob));
        const int n = snprintf(o->group[i].glob, sizeof o->group[i].glob, "%s", glob);
        if (n < 0 || (size_t)n >= sizeof o->group[i].glob)
            return ar_error_set(at->code, "%s: key 'glob' has %d bytes, at most %zu are read", ARI_SHOW(at->name), n,
                                sizeof o->group[i].glob - 1);
        AR_TRY(get_number(&group, "lr_scale", &o->group[i].lr_scale));
        AR_TRY(get_number(&group, "weight_decay", &o->group[i].weight_decay));
    }
    o->groups = json_array_size(list);
    return AR_OK;
}

static ar_status get_optimizer(const ari_json_at *at, ar_optimizer_options *o)
{
    const char *const kinds[] = {ar_optimizer_name(AR_OPTIMIZER_SGD), ar_optimizer_name(AR_OPTIMIZER_ADAM),
                                 ar_optimizer_name(AR_OPTIMIZER_ADAMW)};
    const char *const schedules[] = {ar_schedule_name(AR_SCHEDULE_CONSTANT), ar_schedule_name(AR_SCHEDULE_COSINE)};
    int kind = 0, schedule = 0, decay = 0;
    ari_json_at in = *at;
    AR_TRY(ari_json_object(at, "optimizer", &in.object));
    AR_TRY(get_choice(&in, "kind", kinds, 3, &kind));
    AR_TRY(get_choice(&in, "schedule", schedules, 2, &schedule));
    AR_TRY(get_choice(&in, "decay", ari_checkpoint_decay, 2, &decay));
    o->kind = (ar_optimizer_kind)kind;
    o->schedule = (ar_schedule)schedule;
    o->decay = (ar_decay)decay;
    AR_TRY(get_number(&in, "lr", &o->lr));
    AR_TRY(get_number(&in, "momentum", &o->momentum));
    AR_TRY(ari_json_bool(&in, "nesterov", &o->nesterov));
    AR_TRY(get_number(&in, "beta1", &o->beta1));
    AR_TRY(get_number(&in, "beta2", &o->beta2));
    AR_TRY(get_number(&in, "eps", &o->eps));
    AR_TRY(get_number(&in, "weight_decay", &o->weight_decay));
    AR_TRY(get_count(&in, "warmup_steps", &o->warmup_steps));
    AR_TRY(get_count(&in, "total_steps", &o->total_steps));
    AR_TRY(get_number(&in, "min_lr", &o->min_lr));
    AR_TRY(get_groups(&in, o));
    const ar_status st = ar_optimizer_check(o);
    if (st != AR_ERR_ARG)
        return st;
    char why[ARI_PRINTABLE];
    ari_printable(why, sizeof why, ar_error_message());
    return ar_error_set(at->code, "%s: key 'optimizer': %s", ARI_SHOW(at->name), why);
}

static ar_status get_seed(const ari_json_at *at, uint64_t *seed)
{
    const char *text = NULL;
    char *end = NULL;
    AR_TRY(ari_json_string(at, "seed", &text));
    errno = 0;
    const unsigned long long value = strtoull(text, &end, 10);
    if (errno != 0 || text[0] < '0' || text[0] > '9' || *end != '\0')
        return ar_error_set(at->code, "%s: key 'seed' is '%s', expected an integer from 0 to 2^64 - 1",
                            ARI_SHOW(at->name), ARI_SHOW(text));
    *seed = value;
    return AR_OK;
}

static ar_status get_text(const ari_json_at *at, const char *key, char **out)
{
    const char *text = NULL;
    AR_TRY(ari_json_string_or(at, key, &text));
    if (text == NULL || (*out = strdup(text)) != NULL)
        return AR_OK;
    return ar_error_set(AR_ERR_MEMORY, "%s: no memory for its key '%s'", ARI_SHOW(at->name), key);
}

static ar_status get_data(const ari_json_at *at, ari_checkpoint_read *r)
{
    const char *format = NULL;
    ari_json_at in = *at;
    if (ari_json_get(at, "data") == NULL)
        return AR_OK;
    AR_TRY(ari_json_object(at, "data", &in.object));
    AR_TRY(get_text(&in, "path", &r->data_path));
    AR_TRY(ari_json_string(&in, "format", &format));
    AR_TRY(ari_json_size(&in, "tokens", 0, MAX_COUNT, &r->state.data_tokens));
    AR_TRY(get_hash(&in, "sha256", r->data_hash));
    if (r->data_hash[0] == '\0')
        return ar_error_set(at->code, "%s: key 'sha256' is missing", ARI_SHOW(at->name));
    if (ar_data_format_parse(&r->state.data_format, format) != AR_OK || r->state.data_format == AR_DATA_AUTO)
        return ar_error_set(at->code, "%s: key 'format' of 'data' is '%s', expected bytes, u16, u32 or safetensors",
                            ARI_SHOW(at->name), ARI_SHOW(format));
    r->state.data_path = r->data_path;
    r->state.data_hash = r->data_hash;
    return AR_OK;
}

static ar_status get_losses(const ari_json_at *at, ari_checkpoint_read *r)
{
    const json_t *list = NULL;
    AR_TRY(ari_json_array(at, "losses", &list));
    const size_t n = json_array_size(list);
    if (n > AR_CHECKPOINT_LOSSES || n > r->state.step)
        return ar_error_set(at->code,
                            "%s: key 'losses' has %zu entries, expected at most one for each of the %" PRIu64
                            " steps and %zu",
                            ARI_SHOW(at->name), n, r->state.step, AR_CHECKPOINT_LOSSES);
    AR_TRY(ari_alloc((void **)&r->loss, n, sizeof *r->loss, "losses"));
    for (size_t i = 0; i < n; i++) {
        double value = 0;
        AR_TRY(number_of(&value, at, "losses", json_array_get(list, i)));
        r->loss[i] = (float)value;
    }
    r->state.loss = r->loss;
    r->state.losses = n;
    return AR_OK;
}

/* Batch, sequence, and how many samples have been trained on, which follows from the step. */
static ar_status get_samples(const ari_json_at *at, ar_checkpoint_state *s)
{
    uint64_t samples = 0, want = 0;
    AR_TRY(ari_json_size(at, "batch", 0, MAX_COUNT, &s->batch));
    AR_TRY(ari_json_size(at, "seq", 0, MAX_COUNT, &s->seq));
    AR_TRY(ari_json_bool(at, "in_order", &s->in_order));
    AR_TRY(get_count(at, "samples", &samples));
    if (__builtin_mul_overflow(s->step, s->batch, &want) || samples != want)
        return ar_error_set(at->code, "%s: key 'samples' is %" PRIu64 ", expected %" PRIu64 " steps of %zu",
                            ARI_SHOW(at->name), samples, s->step, s->batch);
    return AR_OK;
}

static ar_status get_state(const ari_json_at *at, ari_checkpoint_read *r)
{
    ar_checkpoint_state *s = &r->state;
    const char *storage = NULL;
    int numerics = 0;
    AR_TRY(get_text(at, "model", &r->model));
    s->model = r->model;
    AR_TRY(get_count(at, "step", &s->step));
    AR_TRY(get_count(at, "optimizer_steps", &s->optimizer_steps));
    AR_TRY(get_count(at, "steps", &s->steps));
    AR_TRY(get_seed(at, &s->seed));
    AR_TRY(get_optimizer(at, &s->optimizer));
    AR_TRY(get_number(at, "clip", &s->clip));
    AR_TRY(get_number(at, "dropout", &s->dropout));
    AR_TRY(get_choice(at, "numerics", ari_checkpoint_numerics, 2, &numerics));
    s->numerics = (ar_numerics)numerics;
    AR_TRY(ari_json_string(at, "storage", &storage));
    if (ar_dtype_parse(&s->storage, storage) != AR_OK || (s->storage != AR_F32 && s->storage != AR_BF16))
        return ar_error_set(at->code, "%s: key 'storage' is '%s', expected F32 or BF16", ARI_SHOW(at->name),
                            ARI_SHOW(storage));
    AR_TRY(get_number(at, "loss_scale", &s->loss_scale));
    AR_TRY(get_count(at, "loss_scale_steps", &s->loss_scale_steps));
    AR_TRY(ari_json_bool_or(at, "loss_scale_static", &s->loss_scale_static));
    if (!(s->clip >= 0) || !(s->dropout >= 0 && s->dropout < 1) || !(s->loss_scale >= 0) || isinf(s->loss_scale))
        return ar_error_set(at->code,
                            "%s: clip %g, dropout %g, loss scale %g: expected numbers from 0, dropout below 1",
                            ARI_SHOW(at->name), s->clip, s->dropout, s->loss_scale);
    AR_TRY(get_samples(at, s));
    AR_TRY(get_data(at, r));
    AR_TRY(get_hash(at, "config_hash", r->hashes.config));
    AR_TRY(get_hash(at, "weights_hash", r->hashes.weights));
    AR_TRY(get_hash(at, "optimizer_hash", r->hashes.optimizer));
    return get_losses(at, r);
}

/* Before anything is believed: whose file this is, of which version, and whether it is as it was written. */
static ar_status check_whole(const ari_json_at *at, json_t *root)
{
    const char *format = NULL;
    char said[65], own[65];
    size_t version = 0;
    if (!json_is_object(root))
        return ar_error_set(AR_ERR_FORMAT, "%s: expected a JSON object", ARI_SHOW(at->name));
    AR_TRY(ari_json_string(at, "format", &format));
    if (strcmp(format, ARI_CHECKPOINT_FORMAT) != 0)
        return ar_error_set(AR_ERR_FORMAT, "%s: key 'format' is '%s', expected '" ARI_CHECKPOINT_FORMAT "'",
                            ARI_SHOW(at->name), ARI_SHOW(format));
    AR_TRY(ari_json_size(at, "version", 1, MAX_COUNT, &version));
    if (version != ARI_CHECKPOINT_VERSION)
        return ar_error_set(AR_ERR_FORMAT, "%s: has version %zu, this program reads version %d", ARI_SHOW(at->name),
                            version, ARI_CHECKPOINT_VERSION);
    AR_TRY(get_hash(at, ARI_CHECKPOINT_OWN_HASH, said));
    (void)json_object_del(root, ARI_CHECKPOINT_OWN_HASH);
    AR_TRY(ari_checkpoint_text_hash(own, root));
    if (strcmp(said, own) != 0)
        return ar_error_set(AR_ERR_DATA, "%s: damaged: its text has the hash %.12s, it says %.12s", ARI_SHOW(at->name),
                            own, said[0] == '\0' ? "none" : said);
    return AR_OK;
}

ar_status ari_checkpoint_read_json(ari_checkpoint_read *r, const char *path)
{
    json_t *root = NULL;
    *r = (ari_checkpoint_read){.data_path = NULL};
    AR_TRY(ari_json_load(&root, path));
    const ari_json_at at = {root, path, AR_ERR_FORMAT};
    ar_status st = check_whole(&at, root);
    if (st == AR_OK)
        st = get_state(&at, r);
    json_decref(root);
    return st;
}

void ari_checkpoint_read_fini(ari_checkpoint_read *r)
{
    free(r->model);
    free(r->data_path);
    free(r->loss);
    *r = (ari_checkpoint_read){.data_path = NULL};
}
