/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/activation.h"
#include "anyrank/context.h"
#include "anyrank/param.h"
#include "verify/grads/grads.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/baseline/baseline_private.h"
#include "ref/context/context.h"
#include "ref/io/json.h"
#include "ref/io/safetensors_private.h"
#include "ref/layers/module_private.h"
#include "ref/layers/parts.h"
#include "ref/models/model_private.h"
#include "ref/models/plan_private.h"

/* Tensors of inputs.safetensors: the parameter, and the sizes of the config that make up its shape. */
typedef enum extent { END, BATCH, SEQ, HIDDEN, QUERIES, KEYS, FFN } extent;
static const struct {
    const char *name, *parameter;
    extent shape[4];
} inputs[] = {
    {"x", NULL, {BATCH, SEQ, HIDDEN}},           {"dy", NULL, {BATCH, SEQ, HIDDEN}},
    {"ln1_weight", "ln1.weight", {HIDDEN}},      {"ln1_bias", "ln1.bias", {HIDDEN}},
    {"wq", "attn.wq.weight", {QUERIES, HIDDEN}}, {"wk", "attn.wk.weight", {KEYS, HIDDEN}},
    {"wv", "attn.wv.weight", {KEYS, HIDDEN}},    {"wo", "attn.wo.weight", {HIDDEN, QUERIES}},
    {"ln2_weight", "ln2.weight", {HIDDEN}},      {"ln2_bias", "ln2.bias", {HIDDEN}},
    {"w1", "mlp.w1.weight", {FFN, HIDDEN}},      {"b1", "mlp.w1.bias", {FFN}},
    {"w2", "mlp.w2.weight", {HIDDEN, FFN}},      {"b2", "mlp.w2.bias", {HIDDEN}},
};
enum { INPUTS = sizeof inputs / sizeof *inputs, X = 0, DY = 1, FIRST_PARAMETER = 2 };
static const char block_name[] = "layers.0";

static size_t extent_of(const ari_block_case *b, extent e)
{
    switch (e) {
    case BATCH:
        return b->batch.batch;
    case SEQ:
        return b->batch.seq;
    case HIDDEN:
        return b->config.hidden;
    case QUERIES:
        return b->config.heads * b->config.head_dim;
    case KEYS:
        return b->config.kv_heads * b->config.head_dim;
    case FFN:
        return b->config.ffn;
    case END:
        break;
    }
    return 0;
}

static int shape_of(const ari_block_case *b, size_t i, size_t shape[4])
{
    int ndim = 0;
    while (ndim < 4 && inputs[i].shape[ndim] != END) {
        shape[ndim] = extent_of(b, inputs[i].shape[ndim]);
        ndim++;
    }
    return ndim;
}

static ar_status parse_activation(ar_activation *a, const char *name, const char *path)
{
    static const struct {
        const char *name;
        ar_activation activation;
    } activations[] = {{"gelu_tanh", AR_ACT_GELU_TANH},
                       {"gelu", AR_ACT_GELU_ERF},
                       {"gelu_erf", AR_ACT_GELU_ERF},
                       {"silu", AR_ACT_SILU},
                       {"relu", AR_ACT_RELU}};
    for (size_t i = 0; i < sizeof activations / sizeof *activations; i++) {
        if (strcmp(name, activations[i].name) == 0) {
            *a = activations[i].activation;
            return AR_OK;
        }
    }
    return ar_error_set(AR_ERR_CONFIG, "%s: activation '%s' is not one of gelu_tanh, gelu, silu, relu", path, name);
}

static ar_status load_sizes(ari_block_case *b, const char *folder)
{
    enum { LARGEST = 1 << 24 };
    char path[600];
    json_auto_t *json = NULL;
    snprintf(path, sizeof path, "%.580s/case.json", folder);
    AR_TRY(ari_json_load(&json, path));
    const ari_json_at location = {json, path, AR_ERR_CONFIG};
    ar_config *c = &b->config;
    const char *activation = "gelu_tanh";
    *c = (ar_config){.arch = AR_ARCH_STACK,
                     .layers = 1,
                     .vocab = 1,
                     .norm = AR_NORM_LAYER,
                     .norm_eps = 1e-5,
                     .mlp_bias = true,
                     .causal = true,
                     .max_positions = SIZE_MAX};
    snprintf(c->name, sizeof c->name, "%.60s", folder);
    AR_TRY(ari_json_size(&location, "batch", 1, LARGEST, &b->batch.batch));
    AR_TRY(ari_json_size(&location, "seq", 1, LARGEST, &b->batch.seq));
    AR_TRY(ari_json_size(&location, "hidden", 1, LARGEST, &c->hidden));
    AR_TRY(ari_json_size(&location, "heads", 1, LARGEST, &c->heads));
    c->kv_heads = c->heads;
    AR_TRY(ari_json_size_or(&location, "kv_heads", 1, LARGEST, &c->kv_heads));
    AR_TRY(ari_json_size(&location, "ffn", 1, LARGEST, &c->ffn));
    AR_TRY(ari_json_bool_or(&location, "causal", &c->causal));
    AR_TRY(ari_json_real_or(&location, "eps", &c->norm_eps));
    AR_TRY(ari_json_string_or(&location, "activation", &activation));
    AR_TRY(parse_activation(&c->activation, activation, path));
    if (c->hidden % c->heads != 0 || c->heads % c->kv_heads != 0 || c->norm_eps < 0.0)
        return ar_error_set(AR_ERR_CONFIG, "%s: hidden %zu, heads %zu, kv_heads %zu, eps %g do not make a block", path,
                            c->hidden, c->heads, c->kv_heads, c->norm_eps);
    c->head_dim = c->hidden / c->heads;
    return AR_OK;
}

static ar_status load_input(ari_block_case *b, const ar_st_file *f, const char *path, size_t i)
{
    size_t shape[4];
    const int ndim = shape_of(b, i, shape);
    const ar_st_entry *e = ari_st_find(f, inputs[i].name);
    if (!e)
        return ar_error_set(AR_ERR_NOT_FOUND, "%s: there is no tensor '%s'", path, inputs[i].name);
    if (!ari_same_extents(e->ndim, e->shape, ndim, shape))
        return ar_error_set(AR_ERR_SHAPE,
                            "%s: tensor '%s' does not have the shape that case.json makes it (first extent %zu)", path,
                            e->name, shape[0]);
    AR_TRY(ARI_ALLOC(&b->values[i], e->count, e->name));
    AR_TRY(ari_st_to_f32(e, b->values[i]));
    for (size_t k = 0; k < e->count; k++) {
        if (!isfinite(b->values[i][k]))
            return ar_error_set(AR_ERR_DATA, "%s: tensor '%s' holds a NaN or infinity at element %zu", path, e->name,
                                k);
    }
    return AR_OK;
}

ar_status ari_block_case_load(ari_block_case *b, const char *folder)
{
    char path[600];
    ar_st_file *f = NULL;
    *b = (ari_block_case){0};
    AR_TRY(load_sizes(b, folder));
    snprintf(path, sizeof path, "%.570s/inputs.safetensors", folder);
    AR_TRY(ari_st_open(&f, path));
    ar_status st = AR_OK;
    for (size_t i = 0; i < INPUTS && st == AR_OK; i++)
        st = load_input(b, f, path, i);
    if (st == AR_OK && ari_st_tensor_count(f) != INPUTS)
        st = ar_error_set(AR_ERR_FORMAT, "%s: holds %zu tensors, a block has %d inputs and parameters", path,
                          ari_st_tensor_count(f), (int)INPUTS);
    ari_st_close(f);
    if (st != AR_OK)
        ari_block_case_fini(b);
    return st;
}

void ari_block_case_fini(ari_block_case *b)
{
    for (size_t i = 0; i < INPUTS; i++)
        free(b->values[i]);
    *b = (ari_block_case){0};
}

ar_status ari_block_case_want(const ari_block_case *b, ari_gatherer *g)
{
    size_t shape[4];
    const int ndim = shape_of(b, X, shape);
    AR_TRY(ari_gather_want(g, block_name, 'f', "y", ndim, shape, 0));
    AR_TRY(ari_gather_want(g, block_name, 'b', "dx", ndim, shape, 0));
    for (size_t i = FIRST_PARAMETER; i < INPUTS; i++) {
        char tap[64], name[64];
        snprintf(tap, sizeof tap, "%s.%s", block_name, inputs[i].parameter);
        snprintf(name, sizeof name, "d%s", inputs[i].name);
        const int n = shape_of(b, i, shape);
        AR_TRY(ari_gather_want(g, tap, 'g', name, n, shape, 0));
    }
    return AR_OK;
}

static const float *baseline_weights(void *user, const char *name, size_t count)
{
    const ari_block_case *b = user;
    (void)count; /* the sizes come from the config, with which the inputs were compared */
    for (size_t i = FIRST_PARAMETER; i < INPUTS; i++) {
        char full[64];
        snprintf(full, sizeof full, "%s.%s", block_name, inputs[i].parameter);
        if (strcmp(full, name) == 0)
            return b->values[i];
    }
    return NULL;
}

ar_status ari_block_case_baseline(const ari_block_case *b, const ar_baseline_options *o)
{
    ari_block_case copy = *b;
    ar_baseline_options options = *o;
    options.weights = baseline_weights;
    options.weights_user = &copy;
    return ari_baseline_block(&b->config, &options, &b->batch, b->values[X], b->values[DY]);
}

static ar_status set_parameters(const ari_block_case *b, ar_ctx *ctx, ar_module *block)
{
    ar_param *params[INPUTS];
    const size_t n = ar_module_params(block, params, INPUTS, false);
    if (n > INPUTS)
        return ar_error_set(AR_ERR_MEMORY, "no memory to list the parameters of a block");
    for (size_t k = 0; k < n; k++) {
        size_t i = FIRST_PARAMETER;
        while (i < INPUTS && strcmp(params[k]->name + sizeof block_name, inputs[i].parameter) != 0)
            i++;
        if (i == INPUTS)
            return ar_error_set(AR_ERR_INTERNAL, "a block has a parameter %s", params[k]->name);
        AR_TRY(ar_param_set(params[k], ctx, b->values[i]));
    }
    return AR_OK;
}

/* Uploads the positions that this rank has of a value that is given as a whole. */
static ar_status upload(const ari_block_case *b, ar_ctx *ctx, ar_tensor *local, const float *values)
{
    ar_batch full_batch = b->batch;
    full_batch.input = values;
    full_batch.sample_ndim = 2;
    full_batch.sample_shape[0] = b->batch.seq;
    full_batch.sample_shape[1] = b->config.hidden;
    return ari_batch_input(ctx, local, &full_batch);
}

static ar_status forward_backward(const ari_block_case *b, ar_ctx *ctx, ar_module *block, ar_saved *saved)
{
    ar_tensor x, y, dy, dx;
    AR_TRY(set_parameters(b, ctx, block));
    AR_TRY(upload(b, ctx, &x, b->values[X]));
    AR_TRY(upload(b, ctx, &dy, b->values[DY]));
    AR_TRY(ar_module_forward(block, ctx, saved, &y, &x, &b->batch));
    AR_TRY(ar_module_backward(block, ctx, saved, &dx, &dy, &b->batch));
    return ar_module_reduce_grads(block, ctx);
}

ar_status ari_block_case_run(void *user, ar_ctx *ctx)
{
    const ari_block_case *b = user;
    const bool sequence = ari_plan_by_tokens(&b->plan, ar_comm_size(ar_ctx_tp(ctx)), ari_ctx_sp(ctx));
    ar_block_options o;
    ar_block_split split;
    char name[96];
    ARI_OWNED_BY(ar_saved_destroy) ar_saved *saved = NULL;
    ARI_OWNED_BY(ar_module_destroy) ar_module *block = NULL;
    AR_TRY(ari_config_block(&b->config, 0, &o, name, sizeof name));
    AR_TRY(ari_plan_block(&b->plan, &b->config, 0, sequence, &split));
    o.split = &split;
    AR_TRY(ar_saved_create(&saved));
    AR_TRY(ar_block_create(&block, ctx, name, &o));
    return forward_backward(b, ctx, block, saved);
}
