/* SPDX-License-Identifier: Apache-2.0 */
/* Writes model.json, which describes a run besides its tensors. anyrank.capture writes the same file
 * (docs/guide/pytorch.md). */
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/axis.h"
#include "ref/core/device_private.h"
#include "ref/core/optimizer_private.h"
#include "ref/core/text.h"
#include "ref/io/file.h"
#include "ref/io/json.h"
#include "ref/train/optimizer_private.h"
#include "verify/writer/dump_ranks.h"

#define FORMAT "anyrank model"
#define MOST_RATES 1000 /* number of steps; learning rates of a longer run are omitted */

bool ari_dump_model_is(const char *path)
{
    unsigned char head[64] = {0};
    size_t bytes = 0;
    int fd = -1;
    if (ari_file_open(&fd, &bytes, path) != AR_OK)
        return false;
    bytes = bytes < sizeof head - 1 ? bytes : sizeof head - 1;
    const bool is_model =
        ari_file_pread(fd, head, bytes, 0, path) == AR_OK && strstr((char *)head, "\"" FORMAT "\"") != NULL;
    ari_file_close(&fd);
    return is_model;
}

static json_t *count(size_t n)
{
    return json_integer((json_int_t)n);
}

/* Returns the config under Hugging Face's names, so that it can be compared with a captured config. */
static json_t *config_json(const ar_config *c)
{
    return json_pack(
        "{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:b, s:b, s:o, s:o, s:o}", "name",
        ari_json_text(c->name), "vocab_size", count(c->vocab), "hidden_size", count(c->hidden), "num_hidden_layers",
        count(c->layers), "num_attention_heads", count(c->heads), "num_key_value_heads", count(c->kv_heads), "head_dim",
        count(c->head_dim), "intermediate_size", count(c->ffn), "max_position_embeddings", count(c->max_positions),
        "norm_eps", ari_json_number(c->norm_eps), "rope_theta", ari_json_number(c->rope.theta), "rope_factor",
        ari_json_number(c->rope.factor), "tie_word_embeddings", c->tied, "causal", c->causal, "sliding_window",
        count(c->window), "num_experts", count(c->experts.n), "num_experts_per_tok", count(c->experts.per_token));
}

static json_t *settings_json(const ar_run *r)
{
    return json_pack("{s:o, s:o, s:o, s:o, s:o, s:o}", "batch", count(r->batch), "seq", count(r->seq), "clip",
                     ari_json_number(r->clip), "dropout", ari_json_number(r->dropout), "label_smoothing",
                     ari_json_number(r->loss.label_smoothing), "z_loss", ari_json_number(r->loss.z_loss));
}

static json_t *mesh_json(const ar_parallel *p)
{
    const ar_dump_place place = ar_dump_place_of(p, 0);
    json_t *mesh = json_object();
    for (int i = 0; i < place.mesh.ndim; i++)
        json_object_set_new(mesh, place.mesh.dim[i].name, json_integer(place.mesh.dim[i].size));
    return mesh;
}

/* Returns an array with the same value for each rank. */
static json_t *by_rank(const ar_parallel *p, uint64_t value)
{
    json_t *list = json_array();
    for (int r = 0; r < ar_parallel_world(p); r++)
        json_array_append_new(list, json_integer((json_int_t)value));
    return list;
}

static json_t *optimizer_json(const ar_optimizer_options *o)
{
    json_t *options = json_pack("{s:o, s:o, s:b, s:[o, o], s:o, s:o, s:b, s:b}", "lr", ari_json_number(o->lr),
                                "momentum", ari_json_number(o->momentum), "nesterov", o->nesterov, "betas",
                                ari_json_number(o->beta1), ari_json_number(o->beta2), "eps", ari_json_number(o->eps),
                                "weight_decay", ari_json_number(o->weight_decay), "match_rms", o->match_rms,
                                "decays_matrices_alone", o->decay == AR_DECAY_MATRICES);
    json_t *groups = json_pack("[{s:o, s:[]}]", "options", options, "parameters");
    for (size_t i = 0; i < o->groups; i++)
        json_array_append_new(groups,
                              json_pack("{s:{s:o, s:o, s:o}, s:[]}", "options", "glob", ari_json_text(o->group[i].glob),
                                        "lr_scale", ari_json_number(o->group[i].lr_scale), "weight_decay",
                                        ari_json_number(o->group[i].weight_decay), "parameters"));
    return json_pack("[{s:s, s:o}]", "class", ari_optimizer_name(o->kind), "groups", groups);
}

static json_t *schedulers_json(const ar_optimizer_options *o)
{
    return json_pack("[{s:s, s:{s:o, s:o, s:o}}]", "class", ari_schedule_name(o->schedule), "options", "warmup_steps",
                     count(o->warmup_steps), "total_steps", count(o->total_steps), "min_lr",
                     ari_json_number(o->min_lr));
}

/* Returns {"1": [[0.001]], ..}: the rates of the only optimizer's first parameter group by step. */
static json_t *rates_json(const ar_optimizer_options *o, uint64_t steps)
{
    json_t *rates = json_object();
    for (uint64_t step = 1; step <= steps; step++) {
        char key[24];
        snprintf(key, sizeof key, "%" PRIu64, step);
        json_object_set_new(rates, key, json_pack("[[o]]", ari_json_number(ari_optimizer_lr(o, step))));
    }
    return rates;
}

static json_t *numerics_json(const ar_run *r)
{
    const bool bf16 = r->storage == AR_BF16 || r->precision == AR_PRECISION_BF16;
    return json_pack("{s:s, s:s, s:s}", "numerics", r->numerics == AR_NUMERICS_NATIVE ? "native" : "exact", "precision",
                     ari_precision_name(r->precision), "storage", ar_dtype_name(bf16 ? AR_BF16 : AR_F32));
}

ar_status ari_dump_model_write(const char *folder, const ar_config *c, const ar_run *r)
{
    ARI_OWNED char *path = NULL;
    bool exists = false;
    AR_TRY(ari_file_path(&path, folder, ARI_DUMP_MODEL));
    AR_TRY(ari_file_is_in(&exists, folder, ARI_DUMP_MODEL));
    if (exists && !ari_dump_model_is(path)) /* a file that another program wrote */
        return AR_OK;
    const ar_parallel *p = &r->parallel;
    json_t *o = json_pack("{s:s, s:i, s:s, s:{s:s}, s:i, s:o, s:i, s:{s:o}, s:o, s:{s:o, s:o, s:o}}", "format", FORMAT,
                          "version", 1, "by", "anyrank", "versions", "anyrank", ANYRANK_VERSION, "world",
                          ar_parallel_world(p), "mesh", mesh_json(p), "first_step", 1, "config", "run",
                          settings_json(r), "numerics", numerics_json(r), "ranks", "seed", by_rank(p, r->seed), "steps",
                          by_rank(p, r->steps > 0 ? r->steps : 1), "micro_batches",
                          by_rank(p, (uint64_t)ari_at_least_one(p->micro_batches)));
    int failed = o == NULL;
    if (!failed && c->hidden > 0)
        failed |= json_object_set_new(json_object_get(o, "config"), "config", config_json(c));
    if (!failed && r->steps > 0) {
        failed |= json_object_set_new(o, "optimizers", optimizer_json(&r->optimizer));
        failed |= json_object_set_new(o, "schedulers", schedulers_json(&r->optimizer));
    }
    if (!failed && r->steps > 0 && r->steps <= MOST_RATES)
        failed |= json_object_set_new(o, "learning_rates", rates_json(&r->optimizer, r->steps));
    const ar_status st =
        failed ? ar_error_set(AR_ERR_MEMORY, "%s: no memory for its JSON", path) : ari_json_save(o, path);
    json_decref(o);
    return st;
}
