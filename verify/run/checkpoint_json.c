/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/context_private.h"
#include "ref/core/names.h"
#include "ref/core/size.h"
#include "ref/core/text.h"
#include "ref/io/hash.h"
#include "ref/io/json.h"
#include "ref/train/optimizer_private.h"
#include "verify/run/checkpoint.h"

/* One set of functions both writes and reads: each function takes a key and the address of its value, and either writes
 * or reads the value. Keys are written in the order of the calls. */

#define MAX_COUNT ((size_t)INT64_MAX) /* largest integer that JSON stores here */
#define UNKNOWN "which this program does not know"
_Static_assert(sizeof(size_t) == sizeof(uint64_t), "counts are sizes");

/* An object of the file. */
typedef struct object {
    json_t *out;          /* object to write to; NULL: read from `location` */
    ari_json_at location; /* location to read; its name is the path in both cases */
    const char *context;  /* " of 'KEY'" for messages about a nested object, otherwise "" */
} object;

static ar_status check_memory(const object *o, int failed)
{
    return failed == 0 ? AR_OK : ar_error_set(AR_ERR_MEMORY, "%s: no memory for its JSON", ARI_SHOW(o->location.name));
}

/* Stores a new value under a key; value NULL: memory is short. */
static ar_status put_value(const object *o, const char *key, json_t *value)
{
    return check_memory(o, json_object_set_new(o->out, key, value));
}

/* --- values ------------------------------------------------------------------------------------------------------- */
/* Reads a number, or one of the strings that represent values without a JSON number. */
static ar_status number_of(double *out, const ari_json_at *location, const char *key, const json_t *value)
{
    static const char *const names[] = {"NaN", "Infinity", "-Infinity"};
    const double values[] = {(double)NAN, (double)INFINITY, -(double)INFINITY};
    const size_t named = ari_word_of(json_string_value(value), names, 3);
    if (named == 3 && !json_is_number(value))
        return ari_json_wrong(location, key, " is missing or no number");
    *out = named < 3 ? values[named] : json_number_value(value);
    return AR_OK;
}

static ar_status read_number(const object *o, const char *key, double *x)
{
    return o->out ? put_value(o, key, ari_json_number(*x))
                  : number_of(x, &o->location, key, ari_json_get(&o->location, key));
}

static ar_status read_count(const object *o, const char *key, size_t *n)
{
    return o->out ? put_value(o, key, json_integer((json_int_t)*n)) : ari_json_size(&o->location, key, 0, MAX_COUNT, n);
}

/* uint64_t has another type on Darwin. */
static ar_status count64(const object *o, const char *key, uint64_t *n)
{
    size_t value = (size_t)*n;
    AR_TRY(read_count(o, key, &value));
    *n = value;
    return AR_OK;
}

static ar_status flag(const object *o, const char *key, bool *x)
{
    return o->out ? put_value(o, key, json_boolean(*x)) : ari_json_bool(&o->location, key, x);
}

/* Writes or reads one of the names in a NULL-terminated list; *value is its index. message: follows an unknown text in
 * an error. */
static ar_status choice(const object *o, const char *key, const char *const *names, int *value, const char *message)
{
    const char *text = NULL;
    if (o->out)
        return put_value(o, key, json_string(names[*value]));
    AR_TRY(ari_json_string(&o->location, key, &text));
    for (int i = 0; names[i] != NULL; i++) {
        if (strcmp(text, names[i]) == 0) {
            *value = i;
            return AR_OK;
        }
    }
    return ari_json_wrong(&o->location, key, "%s is '%s', %s", o->context, ARI_SHOW(text), message);
}

/* Reads a text, borrowed from the JSON. */
static ar_status text(const object *o, const char *key, const char **x)
{
    return o->out ? put_value(o, key, *x ? ari_json_text(*x) : json_null()) : ari_json_string_or(&o->location, key, x);
}

static ar_status hash(const object *o, const char *key, char hex[65])
{
    const char *stored_hash = NULL;
    if (o->out)
        return put_value(o, key, hex[0] == '\0' ? json_null() : json_string(hex));
    AR_TRY(ari_json_string_or(&o->location, key, &stored_hash));
    if (stored_hash != NULL && (strlen(stored_hash) != 64 || strspn(stored_hash, "0123456789abcdef") != 64))
        return ari_json_wrong(&o->location, key, " is '%s', expected 64 hexadecimal digits", ARI_SHOW(stored_hash));
    snprintf(hex, 65, "%s", stored_hash == NULL ? "" : stored_hash);
    return AR_OK;
}

static ar_status inner_object(object *inner, const object *o, const char *key)
{
    *inner = *o;
    if (o->out == NULL)
        return ari_json_object(&o->location, key, &inner->location.object);
    inner->out = json_object();
    return put_value(o, key, inner->out);
}

/* Reports an error in values that were read as an error of the file. */
static ar_status believed(const object *o, const char *key, ar_status st)
{
    return st == AR_ERR_ARG ? ari_json_wrong(&o->location, key, ": %s", ARI_SHOW(ar_error_message())) : st;
}

/* --- the optimizer ------------------------------------------------------------------------------------------------ */
static ar_status group(const object *o, ar_param_group *g)
{
    const char *glob = g->glob;
    if (o->out == NULL)
        AR_TRY(ari_json_string(&o->location, "glob", &glob));
    if (strlen(glob) >= sizeof g->glob)
        return ari_json_wrong(&o->location, "glob", " has %zu bytes, at most %zu are read", strlen(glob),
                              sizeof g->glob - 1);
    if (o->out)
        AR_TRY(put_value(o, "glob", json_string(glob)));
    else
        strcpy(g->glob, glob);
    AR_TRY(read_number(o, "lr_scale", &g->lr_scale));
    return read_number(o, "weight_decay", &g->weight_decay);
}

static ar_status groups(const object *o, ar_optimizer_options *options)
{
    const json_t *list = NULL;
    json_t *out = NULL;
    if (o->out)
        AR_TRY(put_value(o, "groups", out = json_array()));
    else
        AR_TRY(ari_json_array(&o->location, "groups", &list));
    const size_t n = o->out ? options->groups : json_array_size(list);
    if (n > AR_PARAM_GROUPS)
        return ari_json_wrong(&o->location, "groups", " has %zu entries, at most %d are read", n, AR_PARAM_GROUPS);
    for (size_t i = 0; i < n; i++) {
        const object group_object = {
            o->out ? json_object() : NULL, {json_array_get(list, i), o->location.name, o->location.code}, ""};
        if (o->out)
            AR_TRY(check_memory(o, json_array_append_new(out, group_object.out)));
        AR_TRY(group(&group_object, &options->group[i]));
    }
    options->groups = n;
    return AR_OK;
}

static ar_status optimizer(const object *parent, ar_optimizer_options *options)
{
    int kind = (int)options->kind, schedule = (int)options->schedule, decay = (int)options->decay;
    object o;
    AR_TRY(inner_object(&o, parent, "optimizer"));
    AR_TRY(choice(&o, "kind", ari_optimizer_names, &kind, UNKNOWN));
    AR_TRY(read_number(&o, "lr", &options->lr));
    AR_TRY(read_number(&o, "momentum", &options->momentum));
    AR_TRY(flag(&o, "nesterov", &options->nesterov));
    AR_TRY(read_number(&o, "beta1", &options->beta1));
    AR_TRY(read_number(&o, "beta2", &options->beta2));
    AR_TRY(read_number(&o, "eps", &options->eps));
    AR_TRY(read_number(&o, "weight_decay", &options->weight_decay));
    AR_TRY(choice(&o, "schedule", ari_lr_schedule_names, &schedule, UNKNOWN));
    AR_TRY(count64(&o, "warmup_steps", &options->warmup_steps));
    AR_TRY(count64(&o, "total_steps", &options->total_steps));
    AR_TRY(read_number(&o, "min_lr", &options->min_lr));
    AR_TRY(choice(&o, "decay", ari_decay_names, &decay, UNKNOWN));
    AR_TRY(groups(&o, options));
    if (kind == (int)AR_OPTIMIZER_MUON)
        AR_TRY(flag(&o, "match_rms", &options->match_rms));
    if (o.out ? options->qk_clip > 0.0 : ari_json_get(&o.location, "qk_clip") != NULL)
        AR_TRY(read_number(&o, "qk_clip", &options->qk_clip));
    options->kind = (ar_optimizer_kind)kind;
    options->schedule = (ar_schedule)schedule;
    options->decay = (ar_decay)decay;
    return believed(&o, "optimizer", o.out ? AR_OK : ari_optimizer_check(options));
}

/* --- the state ---------------------------------------------------------------------------------------------------- */
static ar_status seed(const object *o, uint64_t *value)
{
    const char *text = NULL, *end = NULL;
    if (o->out)
        return put_value(o, "seed", json_sprintf("%" PRIu64, *value));
    AR_TRY(ari_json_string(&o->location, "seed", &text));
    if (!ari_natural(value, text, &end) || *end != '\0')
        return ari_json_wrong(&o->location, "seed", " is '%s', expected an integer from 0 to 2^64 - 1", ARI_SHOW(text));
    return AR_OK;
}

/* A missing key, as in older checkpoints, means not packed. */
static ar_status packing(const object *parent, ar_packing *p)
{
    object o;
    if (!parent->out)
        *p = (ar_packing){ari_json_get(&parent->location, "packing") != NULL, AR_NO_SEPARATOR};
    if (!p->enabled)
        return AR_OK;
    AR_TRY(inner_object(&o, parent, "packing"));
    if (o.out ? p->separator != AR_NO_SEPARATOR : ari_json_get(&o.location, "separator") != NULL)
        return read_count(&o, "separator", &p->separator);
    return AR_OK;
}

static bool has_router_losses(const ar_router_losses *r)
{
    return r->balance != AR_BALANCE_NONE || !(fabs(r->z_loss) <= 0.0) || !(fabs(r->bias_update) <= 0.0);
}

static ar_status router_losses(const object *o, ar_router_losses *r)
{
    int value = (int)r->balance;
    AR_TRY(choice(o, "balance", ari_balance_names, &value, "expected none, sequence, batch or layers"));
    r->balance = (ar_balance)value;
    AR_TRY(read_number(o, "balance_weight", &r->balance_weight));
    AR_TRY(read_number(o, "router_z_loss", &r->z_loss));
    if (o->out ? fabs(r->bias_update) <= 0.0 : !ari_json_get(&o->location, "router_bias_update"))
        return AR_OK; /* or of a version without */
    return read_number(o, "router_bias_update", &r->bias_update);
}

/* A missing key means a version without these options. */
static ar_status loss_options(const object *parent, ar_loss_options *options)
{
    object o;
    if (!parent->out && !ari_json_get(&parent->location, "loss"))
        return AR_OK;
    AR_TRY(inner_object(&o, parent, "loss"));
    AR_TRY(read_number(&o, "label_smoothing", &options->label_smoothing));
    AR_TRY(read_number(&o, "z_loss", &options->z_loss));
    if (o.out ? has_router_losses(&options->router) : ari_json_get(&o.location, "balance") != NULL)
        AR_TRY(router_losses(&o, &options->router));
    return believed(&o, "loss", o.out ? AR_OK : ari_loss_options_check(options, "cross-entropy"));
}

static ar_status storage(const object *o, ar_dtype *dtype)
{
    const char *const names[] = {ar_dtype_name(AR_F32), ar_dtype_name(AR_BF16), NULL};
    int value = *dtype == AR_BF16;
    AR_TRY(choice(o, "storage", names, &value, "expected F32 or BF16"));
    *dtype = value == 0 ? AR_F32 : AR_BF16;
    return AR_OK;
}

/* A missing key means a version that trained only in f32. */
static ar_status precision(const object *o, ar_precision *p)
{
    int value = (int)*p;
    if (!o->out && !ari_json_get(&o->location, "precision"))
        return AR_OK;
    AR_TRY(choice(o, "precision", ari_precision_names, &value, "expected f32, tf32 or bf16"));
    *p = (ar_precision)value;
    return AR_OK;
}

/* The number of samples trained on follows from the step. */
static ar_status samples(const object *o, const ar_checkpoint_state *s)
{
    size_t want = s->step * s->batch, sample_count = want;
    AR_TRY(read_count(o, "samples", &sample_count));
    if (o->out == NULL && (__builtin_mul_overflow(s->step, s->batch, &want) || sample_count != want))
        return ari_json_wrong(&o->location, "samples", " is %zu, expected %" PRIu64 " steps of %zu", sample_count,
                              s->step, s->batch);
    return AR_OK;
}

static ar_status data(const object *parent, ari_checkpoint_read *r)
{
    ar_checkpoint_state *s = &r->state;
    int format = (int)s->data_format - AR_DATA_BYTES;
    object o;
    if (parent->out && s->data_hash == NULL)
        return put_value(parent, "data", json_null());
    if (!parent->out && ari_json_get(&parent->location, "data") == NULL)
        return AR_OK;
    AR_TRY(inner_object(&o, parent, "data"));
    o.context = " of 'data'";
    AR_TRY(text(&o, "path", &s->data_path));
    AR_TRY(choice(&o, "format", ari_data_format_names + AR_DATA_BYTES, &format,
                  "expected bytes, u16, u32, safetensors or jsonl"));
    AR_TRY(read_count(&o, "tokens", &s->data_tokens));
    AR_TRY(hash(&o, "sha256", r->data_hash));
    if (r->data_hash[0] == '\0')
        return ari_json_wrong(&o.location, "sha256", " is missing");
    s->data_format = (ar_data_format)(format + AR_DATA_BYTES);
    s->data_hash = r->data_hash;
    return AR_OK;
}

static ar_status losses(const object *o, ar_checkpoint_state *s)
{
    const size_t loss_count = s->losses < AR_CHECKPOINT_LOSSES ? s->losses : AR_CHECKPOINT_LOSSES;
    const json_t *list = NULL;
    float *loss = NULL;
    if (o->out)
        return put_value(o, "losses", ari_json_floats(s->loss + (s->losses - loss_count), loss_count));
    AR_TRY(ari_json_array(&o->location, "losses", &list));
    const size_t n = json_array_size(list);
    if (n > AR_CHECKPOINT_LOSSES || n > s->step)
        return ari_json_wrong(&o->location, "losses",
                              " has %zu entries, expected at most one for each of the %" PRIu64 " steps and %zu", n,
                              s->step, AR_CHECKPOINT_LOSSES);
    AR_TRY(ARI_ALLOC(&loss, n, "losses"));
    s->loss = loss;
    for (; s->losses < n; s->losses++) {
        double value = 0;
        AR_TRY(number_of(&value, &o->location, "losses", json_array_get(list, s->losses)));
        loss[s->losses] = (float)value;
    }
    return AR_OK;
}

static ar_status state(const object *o, ari_checkpoint_read *r)
{
    ar_checkpoint_state *s = &r->state;
    int numerics = (int)s->numerics;
    AR_TRY(text(o, "model", &s->model));
    AR_TRY(count64(o, "step", &s->step));
    AR_TRY(count64(o, "optimizer_steps", &s->optimizer_steps));
    AR_TRY(count64(o, "steps", &s->steps));
    AR_TRY(seed(o, &s->seed));
    AR_TRY(optimizer(o, &s->optimizer));
    AR_TRY(read_number(o, "clip", &s->clip));
    AR_TRY(read_number(o, "dropout", &s->dropout));
    AR_TRY(loss_options(o, &s->loss_options));
    AR_TRY(choice(o, "numerics", ari_numerics_names, &numerics, UNKNOWN));
    s->numerics = (ar_numerics)numerics;
    AR_TRY(precision(o, &s->precision));
    AR_TRY(storage(o, &s->storage));
    AR_TRY(read_number(o, "loss_scale", &s->loss_scale));
    AR_TRY(count64(o, "loss_scale_steps", &s->loss_scale_steps));
    if (o->out || ari_json_get(&o->location, "loss_scale_static"))
        AR_TRY(flag(o, "loss_scale_static", &s->loss_scale_static));
    AR_TRY(read_count(o, "batch", &s->batch));
    AR_TRY(read_count(o, "seq", &s->seq));
    AR_TRY(flag(o, "in_order", &s->in_order));
    AR_TRY(packing(o, &s->packing));
    AR_TRY(samples(o, s));
    AR_TRY(data(o, r));
    AR_TRY(hash(o, "config_hash", r->hashes.config));
    AR_TRY(hash(o, "weights_hash", r->hashes.weights));
    AR_TRY(hash(o, "optimizer_hash", r->hashes.optimizer));
    return losses(o, s);
}

/* --- the file ----------------------------------------------------------------------------------------------------- */
ar_status ari_checkpoint_text_hash(char hex[65], const json_t *o)
{
    ARI_OWNED char *json_text = json_dumps(o, JSON_COMPACT | JSON_SORT_KEYS);
    if (json_text == NULL)
        return ar_error_set(AR_ERR_MEMORY, "no memory for the text of a checkpoint's state");
    ari_sha256_of(hex, json_text, strlen(json_text));
    return AR_OK;
}

ar_status ari_checkpoint_write_json(const char *path, const ar_checkpoint_state *s, const ari_checkpoint_hashes *hashes)
{
    ari_checkpoint_read contents = {.state = *s, .hashes = *hashes};
    json_auto_t *root = json_object();
    const object o = {root, {NULL, path, AR_ERR_FORMAT}, ""};
    char text_hash[65];
    snprintf(contents.data_hash, sizeof contents.data_hash, "%s", s->data_hash == NULL ? "" : s->data_hash);
    AR_TRY(put_value(&o, "format", json_string(ARI_CHECKPOINT_FORMAT)));
    AR_TRY(put_value(&o, "version", json_integer(ARI_CHECKPOINT_VERSION)));
    AR_TRY(state(&o, &contents));
    AR_TRY(ari_checkpoint_text_hash(text_hash, o.out));
    AR_TRY(put_value(&o, ARI_CHECKPOINT_OWN_HASH, json_string(text_hash)));
    return ari_json_save(root, path);
}

/* Checks the file's format, version and hash before any value is used. */
static ar_status check_whole(const object *o, json_t *root)
{
    const ari_json_at *location = &o->location;
    const char *format = NULL;
    char stored_hash[65], actual_hash[65];
    size_t version = 0;
    if (!json_is_object(root))
        return ar_error_set(AR_ERR_FORMAT, "%s: expected a JSON object", ARI_SHOW(location->name));
    AR_TRY(ari_json_string(location, "format", &format));
    if (strcmp(format, ARI_CHECKPOINT_FORMAT) != 0)
        return ar_error_set(AR_ERR_FORMAT, "%s: key 'format' is '%s', expected '" ARI_CHECKPOINT_FORMAT "'",
                            ARI_SHOW(location->name), ARI_SHOW(format));
    AR_TRY(ari_json_size(location, "version", 1, MAX_COUNT, &version));
    if (version != ARI_CHECKPOINT_VERSION)
        return ar_error_set(AR_ERR_FORMAT, "%s: has version %zu, this program reads version %d",
                            ARI_SHOW(location->name), version, ARI_CHECKPOINT_VERSION);
    AR_TRY(hash(o, ARI_CHECKPOINT_OWN_HASH, stored_hash));
    (void)json_object_del(root, ARI_CHECKPOINT_OWN_HASH);
    AR_TRY(ari_checkpoint_text_hash(actual_hash, root));
    if (strcmp(stored_hash, actual_hash) != 0)
        return ar_error_set(AR_ERR_DATA, "%s: damaged: its text has the hash %.12s, it says %.12s",
                            ARI_SHOW(location->name), actual_hash, stored_hash[0] == '\0' ? "none" : stored_hash);
    return AR_OK;
}

ar_status ari_checkpoint_read_json(ari_checkpoint_read *r, const char *path)
{
    const ar_checkpoint_state *s = &r->state;
    *r = (ari_checkpoint_read){.root = NULL};
    AR_TRY(ari_json_load(&r->root, path));
    const object o = {NULL, {r->root, path, AR_ERR_FORMAT}, ""};
    AR_TRY(check_whole(&o, r->root));
    AR_TRY(state(&o, r));
    (void)json_object_del(r->root, "losses"); /* up to a million numbers, which nothing borrows */
    if (!(s->clip >= 0) || !(s->dropout >= 0 && s->dropout < 1) || !(s->loss_scale >= 0) || isinf(s->loss_scale))
        return ar_error_set(AR_ERR_FORMAT,
                            "%s: clip %g, dropout %g, loss scale %g: expected numbers from 0, dropout below 1",
                            ARI_SHOW(path), s->clip, s->dropout, s->loss_scale);
    return AR_OK;
}

void ari_checkpoint_read_fini(ari_checkpoint_read *r)
{
    free((void *)(uintptr_t)r->state.loss);
    json_decref(r->root);
    *r = (ari_checkpoint_read){.root = NULL};
}
