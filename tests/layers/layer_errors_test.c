/* SPDX-License-Identifier: Apache-2.0 */
/* What layers refuse, and that the message says which parameter, which dimension and both numbers. */
#include "anyrank/activation.h"
#include "ref/layers/layers_private.h"
#include "ref/models/model_private.h"
#include "support/match.h"
#include "tests/support/test.h"

/* Runs fn on `ranks` ranks and expects its error with all of the words in the message. */
static void expect_error(int ranks, rank_fn fn, void *user, ar_status expected, const char *const words[])
{
    const ar_run o = {.parallel.tp = ranks};
    const ar_status st = rank_run(&o, fn, user);
    cr_assert_eq(st, expected, "%s, expected %s: %s", ar_status_name(st), ar_status_name(expected), ar_error_message());
    for (size_t i = 0; words[i]; i++)
        cr_assert_says(words[i]);
}
#define WORDS(...) ((const char *const[]){__VA_ARGS__, NULL})

/* --- dimensions that do not divide -------------------------------------------------------------------------------- */

static const ar_linear_options plain = {.bias = true};

static ar_status column_of_6(ar_ctx *ctx, void *user)
{
    (void)user;
    OWNED(ar_module_destroy) ar_module *m = NULL;
    return ar_column_linear_create(&m, ctx, "up.proj", 8, 6, &plain);
}

static ar_status row_of_6(ar_ctx *ctx, void *user)
{
    (void)user;
    OWNED(ar_module_destroy) ar_module *m = NULL;
    return ar_row_linear_create(&m, ctx, "down.proj", 6, 8, &plain);
}

Test(layer_errors, linear_layers_name_the_dimension_that_does_not_divide)
{
    expect_error(4, column_of_6, NULL, AR_ERR_INDIVISIBLE, WORDS("up.proj.weight", "output", "6", "4 ranks"));
    expect_error(4, row_of_6, NULL, AR_ERR_INDIVISIBLE, WORDS("down.proj.weight", "input", "6", "4 ranks"));
}

static ar_status create_mlp(ar_ctx *ctx, void *user)
{
    OWNED(ar_module_destroy) ar_module *m = NULL;
    return ar_mlp_create(&m, ctx, "mlp", user);
}

Test(layer_errors, mlps_name_the_weight_that_does_not_divide)
{
    ar_mlp_options o = {.hidden = 8, .ffn = 6, .activation = AR_ACT_SILU, .gated = true, .first = "gate_proj"};
    expect_error(4, create_mlp, &o, AR_ERR_INDIVISIBLE, WORDS("mlp.gate_proj.weight", "6", "4 ranks"));
    const ar_branch_split other = ari_branch_of(AR_STYLE_ROWWISE, AR_STYLE_COLWISE, (ar_placement){AR_REPLICATE, 0});
    o = (ar_mlp_options){.hidden = 6, .ffn = 8, .activation = AR_ACT_RELU, .split = &other};
    expect_error(4, create_mlp, &o, AR_ERR_INDIVISIBLE, WORDS("mlp.fc1.weight", "input", "6", "4 ranks"));
}

/* Terms of a sum are what rowwise weights make. */
Test(layer_errors, only_rowwise_layers_leave_terms)
{
    const ar_placement whole = {AR_REPLICATE, 0};
    ar_branch_split split = ari_branch_of(AR_STYLE_ROWWISE, AR_STYLE_COLWISE, whole);
    split.second.output = (ar_placement){AR_PARTIAL_SUM, 0};
    ar_mlp_options o = {.hidden = 8, .ffn = 8, .activation = AR_ACT_RELU, .split = &split};
    expect_error(2, create_mlp, &o, AR_ERR_ARG, WORDS("mlp.fc2", "only a rowwise layer", "colwise"));
    split.second.style = AR_STYLE_REPLICATE;
    expect_error(2, create_mlp, &o, AR_ERR_ARG, WORDS("mlp.fc2", "only a rowwise layer", "replicate"));
    split = ari_branch_of(AR_STYLE_REPLICATE, AR_STYLE_ROWWISE, whole);
    split.first.output = split.second.input = (ar_placement){AR_SHARD, -1};
    o.ffn = 7;
    expect_error(2, create_mlp, &o, AR_ERR_INDIVISIBLE, WORDS("mlp.fc1", "7", "2 ranks"));
}

static ar_status create_attention(ar_ctx *ctx, void *user)
{
    OWNED(ar_module_destroy) ar_module *m = NULL;
    return ar_attention_create(&m, ctx, "attn", user);
}

Test(layer_errors, attention_names_the_heads_that_do_not_divide)
{
    ar_attention_options o = {
        .hidden = 12, .heads = 6, .kv_heads = 6, .head_dim = 2, .q = "q", .k = "k", .v = "v", .out = "o"};
    expect_error(4, create_attention, &o, AR_ERR_INDIVISIBLE, WORDS("attn", "6 query heads", "tp=4"));
    o.heads = 12; /* four ranks neither share six KV heads nor are copies of them */
    expect_error(4, create_attention, &o, AR_ERR_INDIVISIBLE, WORDS("attn", "6 KV heads", "tp=4"));
    o.heads = 8;
    o.kv_heads = 3;
    expect_error(1, create_attention, &o, AR_ERR_ARG, WORDS("attn", "8 query heads", "3 KV heads"));
}

static ar_status create_model(ar_ctx *ctx, void *user)
{
    OWNED(ar_model_destroy) ar_model *m = NULL;
    return ar_model_create(&m, ctx, user, NULL);
}

Test(layer_errors, models_name_the_number_that_does_not_divide)
{
    ar_config c = match_config(AR_ARCH_LLAMA, 1);
    expect_error(3, create_model, &c, AR_ERR_INDIVISIBLE, WORDS("query heads", "4", "tp=3"));
    expect_error(5, create_model, &c, AR_ERR_INDIVISIBLE, WORDS("tp=5", "4 query heads"));
    c.heads = 12;
    c.kv_heads = 6;
    expect_error(4, create_model, &c, AR_ERR_INDIVISIBLE, WORDS("KV heads", "6", "tp=4", "12 query heads"));
    c.heads = 4;
    c.kv_heads = 4;
    c.ffn = 10;
    expect_error(4, create_model, &c, AR_ERR_INDIVISIBLE, WORDS("MLP", "10", "tp=4"));
}

/* What a layer of width 8 is given, of a batch of 2 x 3 tokens. */
typedef struct wrong_input {
    const char *layer; /* NULL: each */
    int ndim;
    size_t shape[3], dy_shape[3]; /* without an extent: there is no such pass */
    ar_status status;
    const char *words[2];
} wrong_input;

static ar_status create_layer(ar_module **m, ar_ctx *ctx, const char *layer)
{
    const ar_linear_options o = {.bias = true, .gather_output = true};
    const ar_mlp_options mlp = {.hidden = 8, .ffn = 4, .activation = AR_ACT_RELU};
    const ar_attention_options attention = {
        .hidden = 8, .heads = 2, .kv_heads = 2, .head_dim = 4, .q = "q", .k = "k", .v = "v", .out = "o"};
    if (strcmp(layer, "column") == 0)
        return ar_column_linear_create(m, ctx, "layer", 8, 8, &o);
    if (strcmp(layer, "row") == 0)
        return ar_row_linear_create(m, ctx, "layer", 8, 8, &o);
    if (strcmp(layer, "norm") == 0)
        return ar_norm_create(m, ctx, "layer", AR_NORM_LAYER, 8, 1e-5);
    if (strcmp(layer, "mlp") == 0)
        return ar_mlp_create(m, ctx, "layer", &mlp);
    return ar_attention_create(m, ctx, "layer", &attention);
}

static ar_status wrong_rank(ar_ctx *ctx, void *user)
{
    static const float zeros[256];
    const wrong_input *w = user;
    const ar_batch batch = {.batch = 2, .seq = 3};
    OWNED(ar_module_destroy) ar_module *m = NULL;
    OWNED(ar_saved_destroy) ar_saved *saved = NULL;
    ar_tensor x, y, dx, dy;
    AR_TRY(ar_saved_create(&saved));
    AR_TRY(create_layer(&m, ctx, w->layer));
    AR_TRY(ar_module_fresh(m, ctx, 1));
    if (w->shape[0] > 0) {
        AR_TRY(rank_upload(ctx, &x, w->ndim, w->shape, zeros));
        AR_TRY(ar_module_forward(m, ctx, saved, &y, &x, &batch));
    }
    if (w->dy_shape[0] > 0) {
        AR_TRY(rank_upload(ctx, &dy, w->ndim, w->dy_shape, zeros));
        AR_TRY(ar_module_backward(m, ctx, saved, &dx, &dy, &batch));
    }
    return AR_OK;
}

static const wrong_input inputs[] = {
    {NULL, 3, {2, 3, 10}, {0}, AR_ERR_SHAPE, {"layer", "8"}},
    {NULL, 3, {2, 3, 8}, {2, 3, 8}, AR_OK, {"", ""}},
    {NULL, 3, {2, 3, 8}, {2, 3, 12}, AR_ERR_SHAPE, {"layer", ""}},
    {NULL, 3, {0}, {2, 3, 8}, AR_ERR_ARG, {"backward", "forward"}},
    {"column", 1, {8}, {0}, AR_ERR_SHAPE, {"layer.weight", "1 dimensions"}},
    {"attention", 3, {3, 2, 8}, {0}, AR_ERR_SHAPE, {"layer", "batch"}},
};

Test(layer_errors, inputs_and_gradients_that_do_not_fit_are_refused_by_name)
{
    static const char *const layers[] = {"column", "row", "norm", "mlp", "attention"};
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++) {
        for (size_t k = 0; k < sizeof layers / sizeof *layers; k++) {
            wrong_input w = inputs[i];
            if (w.layer && strcmp(w.layer, layers[k]) != 0)
                continue;
            w.layer = layers[k];
            for (int ranks = 1; ranks <= 2; ranks++) {
                const ar_run o = {.parallel.tp = ranks};
                cr_expect_eq(rank_run(&o, wrong_rank, &w), w.status, "input %zu of %s, %d ranks: %s", i, layers[k],
                             ranks, ar_error_message());
                cr_expect(w.status == AR_OK || (error_says(w.words[0]) && error_says(w.words[1])),
                          "input %zu of %s, %d ranks: %s", i, layers[k], ranks, ar_error_message());
            }
        }
    }
}

/* --- data --------------------------------------------------------------------------------------------------------- */

static ar_status step(ar_ctx *ctx, void *user)
{
    const match_case *c = user;
    OWNED(ar_model_destroy) ar_model *m = NULL;
    OWNED(ar_saved_destroy) ar_saved *saved = NULL;
    AR_TRY(ar_saved_create(&saved));
    AR_TRY(ar_model_create(&m, ctx, &c->config, NULL));
    AR_TRY(ar_model_fresh(m, ctx, 7));
    return ari_model_forward(m, ctx, saved, &c->batch);
}

Test(layer_errors, ids_and_labels_outside_the_vocabulary_are_refused_with_their_place)
{
    static const int64_t good[6] = {1, 2, 3, 4, 5, 6}, high[6] = {1, 2, 3, 4, 11, 6}, low[6] = {1, -1, 3, 4, 5, 6};
    static const int64_t labels[6] = {1, 2, 3, 4, 5, 11};
    match_case c = {.config = match_config(AR_ARCH_LLAMA, 1), .batch = {.batch = 2, .seq = 3, .input_ids = high}};
    expect_error(2, step, &c, AR_ERR_DATA, WORDS("input_ids[1, 1]", "11"));
    c.batch.input_ids = low;
    expect_error(2, step, &c, AR_ERR_DATA, WORDS("input_ids[0, 1]", "-1"));
    c.batch.input_ids = good;
    c.batch.labels = labels;
    expect_error(2, step, &c, AR_ERR_DATA, WORDS("labels[1, 2]", "11"));
}

Test(layer_errors, sequences_longer_than_the_positions_are_refused)
{
    static const int64_t ids[10] = {1};
    for (int arch = AR_ARCH_LLAMA; arch <= AR_ARCH_GPT2; arch++) {
        match_case c = {.config = match_config((ar_arch)arch, 1), .batch = {.batch = 1, .seq = 10, .input_ids = ids}};
        expect_error(2, step, &c, AR_ERR_SHAPE, WORDS("10", "9 positions"));
    }
}

static const float *find_none(void *user, const char *name, size_t count)
{
    (void)user, (void)name, (void)count;
    return NULL;
}

static ar_status set_none(ar_ctx *ctx, void *user)
{
    OWNED(ar_model_destroy) ar_model *m = NULL;
    AR_TRY(ar_model_create(&m, ctx, user, NULL));
    return ari_model_set(m, ctx, find_none, NULL);
}

Test(layer_errors, a_weight_that_is_not_given_is_named)
{
    ar_config c = match_config(AR_ARCH_LLAMA, 1);
    expect_error(1, set_none, &c, AR_ERR_NOT_FOUND, WORDS("model.embed_tokens.weight", "132"));
}

Test(layer_errors, a_context_refuses_a_loss_that_makes_no_sense)
{
    static const ar_loss_options wrong[] = {{.label_smoothing = 1.0},
                                            {.label_smoothing = -0.1},
                                            {.label_smoothing = (double)NAN},
                                            {.z_loss = -1e-4},
                                            {.z_loss = (double)INFINITY},
                                            {.z_loss = (double)NAN},
                                            {.router = {AR_BALANCE_BATCH, -1.0, 0.0}},
                                            {.router = {AR_BALANCE_BATCH, (double)INFINITY, 0.0}},
                                            {.router.z_loss = -0.1},
                                            {.router.z_loss = (double)NAN}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        cr_expect_eq(rank_run(&(ar_run){.parallel.tp = 1, .loss = wrong[i]}, rank_nothing, NULL), AR_ERR_ARG);
        const char *says = i < 3 ? "a number from 0 to below 1" : "a finite number from 0";
        cr_expect_says(says);
    }
}
