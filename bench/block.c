/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/model.h"
#include "bench/harness.h"
#include "gpu/profile/profile.h"

#define PARAMS ((size_t)16) /* a block has fewer */

#define GPT                                                                                                      \
    .layers = 1, .max_positions = 4096, .activation = AR_ACT_GELU_TANH, .norm = AR_NORM_LAYER, .norm_eps = 1e-5, \
    .qkv_bias = true, .out_bias = true, .mlp_bias = true, .causal = true
#define LLAMA                                                                                                  \
    .arch = AR_ARCH_LLAMA, .name = "llama", .layers = 1, .max_positions = 4096, .activation = AR_ACT_SILU,     \
    .gated = true, .norm = AR_NORM_RMS, .norm_eps = 1e-6, .rope = {.kind = AR_ROPE_DEFAULT, .theta = 10000.0}, \
    .causal = true
#define SMALL .hidden = 768, .heads = 12, .kv_heads = 12, .head_dim = 64
#define LARGE .hidden = 4096, .heads = 32, .kv_heads = 8, .head_dim = 128, .ffn = 11008

const ar_config *ari_bench_block_config(bool large, size_t i)
{
    enum { BLOCKS = 2 };
    /* GPT-2's own form has as many KV heads as heads. */
    static const ar_config configs[2][BLOCKS] = {
        {{GPT, .arch = AR_ARCH_GPT2, .name = "gpt2", SMALL, .ffn = 3072}, {LLAMA, SMALL, .ffn = 2048}},
        {{GPT, .arch = AR_ARCH_STACK, .name = "gpt", LARGE}, {LLAMA, LARGE}},
    };
    return i < BLOCKS ? &configs[large][i] : NULL;
}

/* One block in one of the numerics, with its input and the gradient of its output. */
typedef struct side {
    ar_device *d; /* of its own, as in a run that does nothing else */
    ar_ctx *ctx;
    ar_module *block;
    ar_saved *saved;
    ar_param *params[PARAMS];
    size_t n;
    ar_tensor x, dy; /* [batch, seq, hidden] */
} side;

static ari_bench_device place_of(const side *s)
{
    return (ari_bench_device){s->d, ar_ctx_queue(s->ctx)};
}

/* Values as activations are stored. */
static ar_status store(side *s, ar_tensor *t, const size_t shape[3], uint64_t seed)
{
    const ari_bench_device on = place_of(s);
    ar_tensor values;
    AR_TRY(ari_bench_tensor(&on, &values, 3, shape, seed));
    *t = values;
    if (ar_ctx_activations(s->ctx) == AR_F32)
        return AR_OK;
    t->dtype = ar_ctx_activations(s->ctx);
    t->data.ptr = NULL;
    ar_status st = s->d->ops->alloc(s->d, on.q, &t->data, ar_tensor_count(t) * ar_dtype_bytes(t->dtype));
    if (st == AR_OK)
        st = s->d->ops->copy_strided(s->d, on.q, t, &values);
    s->d->ops->free(s->d, on.q, values.data);
    return st;
}

static ar_status side_create(side *s, ar_numerics numerics, ar_precision precision, const ar_config *config,
                             const ar_batch *batch, const ar_device_choice *which, int threads)
{
    AR_TRY(ar_device_create(&s->d, which, threads));
    const ar_ctx_options options = {.device = s->d, .numerics = numerics, .precision = precision};
    ar_block_options o;
    char name[96];
    AR_TRY(ar_config_block(config, 0, &o, name, sizeof name));
    AR_TRY(ar_ctx_create(&s->ctx, &options));
    AR_TRY(ar_block_create(&s->block, s->ctx, name, &o));
    AR_TRY(ar_saved_create(&s->saved));
    AR_TRY(ar_module_fresh(s->block, s->ctx, 1));
    s->n = ar_module_params(s->block, s->params, PARAMS, true);
    if (s->n > PARAMS)
        return ar_error_set(AR_ERR_MEMORY, "no memory to list the parameters of a block");
    const size_t shape[3] = {batch->batch, batch->seq, config->hidden};
    AR_TRY(store(s, &s->x, shape, 1));
    return store(s, &s->dy, shape, 2);
}

static void side_destroy(side *s)
{
    if (!s->d)
        return;
    s->d->ops->free(s->d, NULL, s->x.data);
    s->d->ops->free(s->d, NULL, s->dy.data);
    ar_saved_destroy(s->saved);
    ar_module_destroy(s->block);
    ar_ctx_destroy(s->ctx);
    ar_device_destroy(s->d);
}

static ar_status pass(side *s, const ar_batch *batch, double *seconds)
{
    ar_tensor y, dx;
    AR_TRY(ar_module_zero_grad(s->block, s->ctx));
    for (size_t i = 0; i < s->n; i++)
        s->params[i]->version++;
    const ari_bench_device on = place_of(s);
    double start = 0.0, end = 0.0;
    AR_TRY(ari_bench_clock(&on, &start));
    AR_TRY(ar_module_forward(s->block, s->ctx, s->saved, &y, &s->x, batch));
    AR_TRY(ar_module_backward(s->block, s->ctx, s->saved, &dx, &s->dy, batch));
    ar_saved_clear(s->saved);
    ar_ctx_end_step(s->ctx);
    AR_TRY(ari_bench_clock(&on, &end));
    *seconds = end - start;
    return AR_OK;
}

typedef struct bench {
    ari_bench_device on; /* of the products */
    ar_batch batch;
    side native, exact;
    ari_gemm_list list;
} bench;

/* times: native, the products alone, exact. */
static ar_status repetition(void *user, double times[3])
{
    bench *b = user;
    AR_TRY(pass(&b->native, &b->batch, &times[0]));
    AR_TRY(ari_gemm_list_run(&b->list, &times[1]));
    return pass(&b->exact, &b->batch, &times[2]);
}

/* --- the slots of a pass ------------------------------------------------------------------------------------------ */

static ar_status read_profile(ar_bench_block_row *row, ari_profile *profile, double whole)
{
    ari_profile_row found[ARI_PROFILE_ROWS];
    size_t n = 0;
    double inside = 0.0;
    AR_TRY(ari_profile_read(profile, found, &n));
    for (size_t i = 0; i < n; i++) {
        row->slots[i] = (ar_bench_slot_row){
            found[i].name, found[i].part, found[i].calls, found[i].seconds, found[i].seconds / whole, found[i].bytes};
        inside += found[i].part ? 0.0 : found[i].seconds;
    }
    const double between = whole > inside ? whole - inside : 0.0;
    row->slots[n] = (ar_bench_slot_row){.slot = "between slots", .seconds = between, .share = between / whole};
    row->n_slots = n + 1;
    return AR_OK;
}

_Static_assert(ARI_PROFILE_ROWS < ARI_BENCH_SLOTS, "one row more");

/* A pass, the gradients' zeroing included. */
static ar_status profile_pass(ar_bench_block_row *row, side *s, ari_profile *profile, const ar_batch *batch)
{
    const ari_bench_device on = place_of(s);
    double start = 0.0, end = 0.0, seconds = 0.0;
    AR_TRY(ari_bench_clock(&on, &start));
    AR_TRY(pass(s, batch, &seconds));
    AR_TRY(ari_bench_clock(&on, &end));
    return read_profile(row, profile, end - start);
}

static ar_status profile_side(ar_bench_block_row *row, side *s, const ar_batch *batch)
{
    enum { PASSES = 2 }; /* the first one makes the events of the second */
    ari_profile *profile = NULL;
    AR_TRY(ari_profile_begin(&profile, s->d));
    ar_status st = AR_OK;
    for (int i = 0; i < PASSES && st == AR_OK; i++)
        st = profile_pass(row, s, profile, batch);
    ari_profile_end(profile);
    return st;
}

static size_t parameters_of(const side *s)
{
    size_t n = 0;
    for (size_t i = 0; i < s->n; i++)
        n += ar_tensor_count(&s->params[i]->value);
    return n;
}

ar_status ari_bench_block(ar_bench_block_row row[2], const ar_bench_block_options *o)
{
    const ar_device_choice cpu = {AR_DEVICE_CPU, 0}, *const choice = o->which ? o->which : &cpu;
    bench b = {.batch = {.batch = o->batch, .seq = o->seq}};
    ar_bench_side_row times[2] = {0};
    ar_status st = AR_OK;
    if (o->batch == 0 || o->seq == 0 || o->repetitions == 0)
        return ar_error_set(AR_ERR_ARG, "bench block: batch %zu, seq %zu, repetitions %zu: all must be > 0", o->batch,
                            o->seq, o->repetitions);
    AR_TRY(ari_bench_device_create(&b.on, choice, o->threads));
    AR_TRY_TO(done, st,
              side_create(&b.native, AR_NUMERICS_NATIVE, o->precision, o->config, &b.batch, choice, o->threads));
    AR_TRY_TO(done, st,
              side_create(&b.exact, AR_NUMERICS_EXACT, AR_PRECISION_F32, o->config, &b.batch, choice, o->threads));
    AR_TRY_TO(done, st, ari_gemm_list_create(&b.list, &b.on, o->config, o->batch, o->seq, false));
    AR_TRY_TO(done, st, ari_bench_sides(times, ari_gemm_list_operations(&b.list), o->repetitions, 2, repetition, &b));
    for (size_t i = 0; i < 2; i++) {
        side *s = i == 0 ? &b.native : &b.exact;
        row[i] = (ar_bench_block_row){.time = times[i], .parameters = parameters_of(s)};
        if (o->profile)
            AR_TRY_TO(done, st, profile_side(&row[i], s, &b.batch));
    }
done:
    ari_gemm_list_destroy(&b.list);
    side_destroy(&b.exact);
    side_destroy(&b.native);
    ari_bench_device_destroy(&b.on);
    return st;
}
