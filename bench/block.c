/* SPDX-License-Identifier: Apache-2.0 */
/* Time of a transformer block on one rank, forward and backward, native and exact. Weights count as changed before each
 * pass: the exact arithmetic quantises them anew, as in a training step.
 *
 *   build/bench/block [--blocks WHICH] [--precision bf16] [--profile] [--device cuda] [--json FILE]
 *
 * gflops       rate of the operations of the block's matrix products in that time
 * over_native  over the time of the native block in fp32
 * bits         SHA-256 of output and gradients; exact: the same on every device
 *
 * --profile adds one more pass, of which each slot of the device's table is timed: on a GPU from the first of its
 * kernels to the last. part: of a slot's calls; share: of the pass, which takes longer than without being timed so;
 * bytes: of the tensors that the calls were given. */
#include <stdlib.h>
#include <string.h>

#include "anyrank/activation.h"
#include "anyrank/config.h"
#include "anyrank/param.h"
#include "bench/harness.h"
#include "ref/arith/arith_private.h"
#include "ref/context/context_private.h"
#include "ref/core/device_private.h"
#include "ref/core/names.h"
#include "ref/layers/module_private.h"
#include "ref/models/model_private.h"
#include "verify/run/run.h"

#define GPT                                                                                                      \
    .layers = 1, .max_positions = 4096, .activation = AR_ACT_GELU_TANH, .norm = AR_NORM_LAYER, .norm_eps = 1e-5, \
    .qkv_bias = true, .out_bias = true, .mlp_bias = true, .causal = true
#define LLAMA                                                                                                  \
    .arch = AR_ARCH_LLAMA, .name = "llama", .layers = 1, .max_positions = 4096, .activation = AR_ACT_SILU,     \
    .gated = true, .norm = AR_NORM_RMS, .norm_eps = 1e-6, .rope = {.kind = AR_ROPE_DEFAULT, .theta = 10000.0}, \
    .causal = true
#define EXPERTS                                                                                                       \
    .layers = 1, .max_positions = 4096, .activation = AR_ACT_SILU, .gated = true, .norm = AR_NORM_RMS,                \
    .norm_eps = 1e-6, .rope = {.kind = AR_ROPE_DEFAULT, .theta = 10000.0}, .causal = true, .hidden = 512, .heads = 8, \
    .head_dim = 64
#define SMALL .hidden = 768, .heads = 12, .kv_heads = 12, .head_dim = 64
#define LARGE .hidden = 4096, .heads = 32, .kv_heads = 8, .head_dim = 128, .ffn = 11008

enum { BLOCKS = 6, SIDES = 4 };
/* The blocks that stand for the usual ones, of which bench/torch_block.py has the same. small: width 768, 12 heads,
 * "gpt2" with LayerNorm, GELU and an MLP of 3072, "llama" with RMSNorm, rotary positions and a gated MLP of 2048.
 * large: width 4096, 32 heads, 8 KV heads, an MLP of 11008: "gpt" with LayerNorm, GELU and two matrices in the MLP (132
 * M parameters), "llama" with three (177 M). experts: Mixtral-8x7B's at an eighth of its width, Qwen3-30B-A3B's at a
 * quarter. GPT-2's own form has as many KV heads as heads. */
static const struct {
    const char *which;
    ar_config config;
} blocks[BLOCKS] = {
    {"small", {GPT, .arch = AR_ARCH_GPT2, .name = "gpt2", SMALL, .ffn = 3072}},
    {"small", {LLAMA, SMALL, .ffn = 2048}},
    {"large", {GPT, .arch = AR_ARCH_STACK, .name = "gpt", LARGE}},
    {"large", {LLAMA, LARGE}},
    {"experts",
     {EXPERTS, .arch = AR_ARCH_MIXTRAL, .name = "mixtral", .kv_heads = 2, .ffn = 1792,
      .experts = {.n = 8, .per_token = 2, .ffn = 1792, .normalised = true, .w123 = true}}},
    {"experts",
     {EXPERTS, .arch = AR_ARCH_QWEN3_MOE, .name = "qwen3-moe", .kv_heads = 1, .qk_norm = AR_QK_NORM_HEAD, .ffn = 192,
      .experts = {.n = 128, .per_token = 8, .ffn = 192, .normalised = true}}},
};

/* Multiplications and additions of the matrix products, forward and backward: of each weight three products with all
 * tokens, or those that come to an expert if all get as many, and six of [seq, seq, head_dim] for each head. */
static double operations_of(const ar_config *c, const ar_batch *b)
{
    const ar_experts *e = &c->experts;
    const double h = (double)c->hidden, heads = (double)(c->heads * c->head_dim), seq = (double)b->seq;
    const double tokens = (double)b->batch * seq, matrices = c->gated ? 3.0 : 2.0;
    double mlp = tokens * matrices * h * (double)c->ffn;
    if (ar_config_has_experts(c, 0)) {
        const size_t rows = (b->batch * b->seq * e->per_token + e->n - 1) / e->n;
        mlp = tokens * h * (double)e->n + (double)(e->n * rows) * matrices * h * (double)e->ffn;
        mlp += e->shared > 0 ? tokens * h * (matrices * (double)e->shared + 1.0) : 0.0;
    }
    return 6.0 * (tokens * 2.0 * h * (heads + (double)(c->kv_heads * c->head_dim)) + mlp + 2.0 * tokens * seq * heads);
}

/* One block in one of the numerics, with its input and the gradient of its output. */
typedef struct side {
    ari_bench_device device; /* of its own, as in a run that does nothing else; the queue is the context's */
    ar_ctx *ctx;
    ar_module *block;
    ar_saved *saved;
    ar_param **params; /* [n]; owned */
    size_t n;
    ar_tensor x, dy; /* [batch, seq, hidden] */
} side;

/* Values as activations are stored. */
static ar_status store(side *s, ar_tensor *t, const size_t shape[3], uint64_t seed)
{
    ar_tensor values;
    const ar_dtype dtype = ari_ctx_activations(s->ctx);
    AR_TRY(ari_bench_tensor(&s->device, &values, 3, shape, seed));
    *t = values;
    return dtype == AR_F32 ? AR_OK : ari_bench_tensor_as(&s->device, t, &values, dtype);
}

static ar_status side_create(side *s, const ar_ctx_options *base_options, const ar_config *config,
                             const ar_batch *batch, const ari_bench *bench)
{
    AR_TRY(ar_device_create(&s->device.d, &bench->device, (int)bench->threads));
    ar_ctx_options options = *base_options;
    options.device = s->device.d;
    ar_block_options o;
    char name[96];
    AR_TRY(ari_config_block(config, 0, &o, name, sizeof name));
    AR_TRY(ar_ctx_create(&s->ctx, &options));
    s->device.q = ar_ctx_queue(s->ctx);
    AR_TRY(ar_block_create(&s->block, s->ctx, name, &o));
    AR_TRY(ar_saved_create(&s->saved));
    AR_TRY(ar_module_fresh(s->block, s->ctx, 1));
    const size_t n = ar_module_params(s->block, NULL, 0, true);
    AR_TRY(ARI_ALLOC(&s->params, n, "a block's parameters"));
    s->n = ar_module_params(s->block, s->params, n, true);
    const size_t shape[3] = {batch->batch, batch->seq, config->hidden};
    AR_TRY(store(s, &s->x, shape, 1));
    return store(s, &s->dy, shape, 2);
}

static void side_destroy(side *s)
{
    ari_bench_free(&s->device);
    free(s->params);
    ar_saved_destroy(s->saved);
    ar_module_destroy(s->block);
    ar_ctx_destroy(s->ctx);
    ar_device_destroy(s->device.d);
}

/* The output, the input's gradient and those of the parameters, in the order of their list. */
static ar_status take_bits(side *s, ari_sha256 *hash, const ar_tensor *y, const ar_tensor *dx)
{
    AR_TRY(ari_bench_take_bits(hash, &s->device, y));
    AR_TRY(ari_bench_take_bits(hash, &s->device, dx));
    for (size_t i = 0; i < s->n; i++) {
        ar_tensor g = s->params[i]->value;
        g.dtype = AR_F32;
        AR_TRY(s->device.d->ops->alloc(s->device.d, s->device.q, &g.data, ar_tensor_count(&g) * sizeof(float)));
        ar_status st = ar_param_grad_value(s->params[i], s->ctx, &g);
        if (st == AR_OK)
            st = ari_bench_take_bits(hash, &s->device, &g);
        s->device.d->ops->free(s->device.d, s->device.q, g.data);
        AR_TRY(st);
    }
    return AR_OK;
}

/* bits NULL: not wanted. */
static ar_status pass(side *s, const ar_batch *batch, double *seconds, ari_sha256 *bits)
{
    ar_tensor y, dx;
    AR_TRY(ar_module_zero_grad(s->block, s->ctx));
    for (size_t i = 0; i < s->n; i++)
        s->params[i]->version++;
    double start = 0.0, end = 0.0;
    AR_TRY(ari_bench_clock(&s->device, &start));
    AR_TRY(ar_module_forward(s->block, s->ctx, s->saved, &y, &s->x, batch));
    AR_TRY(ar_module_backward(s->block, s->ctx, s->saved, &dx, &s->dy, batch));
    if (bits)
        AR_TRY(take_bits(s, bits, &y, &dx));
    ari_saved_clear(s->saved);
    ar_ctx_end_step(s->ctx);
    AR_TRY(ari_bench_clock(&s->device, &end));
    *seconds = end - start;
    return AR_OK;
}

typedef struct block_bench {
    const ar_config *config;
    ar_batch batch;
    ar_ctx_options options[SIDES];
    side side[SIDES];
    size_t sides;
} block_bench;

static ar_status repetition(void *user, double *times)
{
    block_bench *b = user;
    for (size_t i = 0; i < b->sides; i++)
        AR_TRY(pass(&b->side[i], &b->batch, &times[i], NULL));
    return AR_OK;
}

static ar_status add_slot(ari_bench *bench, const block_bench *b, size_t i, const ari_profile_row *row,
                          double pass_seconds)
{
    return ari_bench_add(bench, "profile",
                         json_pack("{s:s, s:s, s:s, s:s, s:s?, s:I, s:f, s:f, s:I}", "block", b->config->name,
                                   "numerics", ari_numerics_names[b->options[i].numerics], "precision",
                                   ari_precision_name(b->options[i].precision), "slot", row->name, "part", row->part,
                                   "calls", (json_int_t)row->calls, "seconds", row->seconds, "share",
                                   row->seconds / pass_seconds, "bytes", (json_int_t)row->bytes));
}

/* The slots of a pass, the gradients' zeroing included: longest first, then the time between slots. */
static ar_status profile_side(ari_bench *bench, block_bench *b, size_t i)
{
    ARI_OWNED_BY(ari_profile_end) ari_profile *profile = NULL;
    side *s = &b->side[i];
    ari_profile_row found[ARI_PROFILE_ROWS], gap = {.name = "between slots"};
    size_t n = 0;
    double start = 0.0, end = 0.0, seconds = 0.0;
    AR_TRY(ari_profile_begin(&profile, s->device.d));
    for (int k = 0; k < 2; k++) { /* the first makes the events of the second */
        AR_TRY(ari_bench_clock(&s->device, &start));
        AR_TRY(pass(s, &b->batch, &seconds, NULL));
        AR_TRY(ari_bench_clock(&s->device, &end));
        AR_TRY(ari_profile_read(profile, found, &n));
    }
    gap.seconds = end - start;
    for (size_t k = 0; k < n; k++) {
        AR_TRY(add_slot(bench, b, i, &found[k], end - start));
        gap.seconds -= found[k].part ? 0.0 : found[k].seconds;
    }
    gap.seconds = gap.seconds > 0.0 ? gap.seconds : 0.0;
    return add_slot(bench, b, i, &gap, end - start);
}

static ar_status add_side(ari_bench *bench, block_bench *b, size_t i, const ari_bench_series *s)
{
    const ari_bench_stat seconds = ari_bench_times_of(s, i), ratio = ari_bench_ratio_of(s, i, 0);
    size_t parameters = 0;
    char bits[65];
    double unused = 0.0;
    ari_sha256 hash;
    ari_sha256_init(&hash);
    AR_TRY(pass(&b->side[i], &b->batch, &unused, &hash));
    ari_sha256_final(&hash, bits);
    for (size_t k = 0; k < b->side[i].n; k++)
        parameters += ar_tensor_count(&b->side[i].params[k]->value);
    return ari_bench_add(bench, "rows",
                         json_pack("{s:s, s:I, s:s, s:s, s:I, s:I, s:f, s:f, s:f, s:f, s:s}", "block", b->config->name,
                                   "parameters", (json_int_t)parameters, "numerics",
                                   ari_numerics_names[b->options[i].numerics], "precision",
                                   ari_precision_name(b->options[i].precision), "batch", (json_int_t)b->batch.batch,
                                   "seq", (json_int_t)b->batch.seq, "seconds", seconds.median, "gflops",
                                   1e-9 * operations_of(b->config, &b->batch) / seconds.median, "over_native",
                                   ratio.median, "spread", i == 0 ? seconds.spread : ratio.spread, "bits", bits));
}

/* Native and exact in fp32, then both in the other precision, exact numerics where they have it. */
static ar_status create_sides(block_bench *b, ar_precision precision, const ari_bench *bench)
{
    const ar_ctx_options options[SIDES] = {{.numerics = AR_NUMERICS_NATIVE},
                                           {.numerics = AR_NUMERICS_EXACT},
                                           {.numerics = AR_NUMERICS_NATIVE, .precision = precision},
                                           {.numerics = AR_NUMERICS_EXACT, .precision = precision}};
    const size_t n = precision == AR_PRECISION_F32 ? 2 : ari_arith_exact(precision) ? 4 : 3;
    for (; b->sides < n; b->sides++) {
        b->options[b->sides] = options[b->sides];
        AR_TRY(side_create(&b->side[b->sides], &options[b->sides], b->config, &b->batch, bench));
    }
    return AR_OK;
}

static void destroy_sides(block_bench *b)
{
    for (size_t i = 0; i < SIDES; i++)
        side_destroy(&b->side[i]);
}

typedef struct choice {
    const char *blocks, *precision;
    size_t batch, seq;
    bool profile;
} choice;

static ar_status time_block(ari_bench *bench, const ar_config *config, const choice *c, ar_precision precision)
{
    ARI_ENDED(destroy_sides) block_bench b = {.config = config, .batch = {.batch = c->batch, .seq = c->seq}};
    ARI_ENDED(ari_bench_series_destroy) ari_bench_series s = {0};
    AR_TRY(create_sides(&b, precision, bench));
    AR_TRY(ari_bench_repeat(&s, b.sides, bench->repetitions, 2, repetition, &b));
    for (size_t i = 0; i < b.sides; i++) {
        AR_TRY(add_side(bench, &b, i, &s));
        if (c->profile)
            AR_TRY(profile_side(bench, &b, i));
    }
    return AR_OK;
}

static ar_status time_blocks(ari_bench *bench, const choice *c)
{
    ar_config config;
    char folder[512];
    int precision = 0;
    bool found = false;
    while (ari_precision_names[precision] && strcmp(ari_precision_names[precision], c->precision) != 0)
        precision++;
    if (!ari_precision_names[precision])
        return ar_error_set(AR_ERR_ARG, "--precision %.32s is none of f32, tf32 and bf16", c->precision);
    for (size_t i = 0; i < BLOCKS; i++) {
        if (strcmp(blocks[i].which, c->blocks) == 0) {
            AR_TRY(time_block(bench, &blocks[i].config, c, (ar_precision)precision));
            found = true;
        }
    }
    if (found)
        return AR_OK;
    AR_TRY(ari_run_config(&config, folder, sizeof folder, &(ar_run){.model = c->blocks}));
    return time_block(bench, &config, c, (ar_precision)precision);
}

int main(int argc, char **argv)
{
    choice c = {.blocks = "small", .precision = "f32", .batch = 2, .seq = 512};
    const ari_bench_option options[] = {
        {"blocks", "small, large, experts, or a model, whose first one is timed (default small)", .text = &c.blocks},
        {"batch", "sequences (default 2)", .number = &c.batch},
        {"seq", "tokens of each (default 512)", .number = &c.seq},
        {"precision", "tf32 or bf16: also in this one", .text = &c.precision},
        {"profile", "also how long each slot of the device's table takes", .flag = &c.profile}};
    ari_bench b = {.name = "block", .threads = 1, .repetitions = 15};
    (void)argc;
    ari_bench_begin(&b, argv, options, sizeof options / sizeof *options);
    return ari_bench_end(&b, time_blocks(&b, &c));
}
