/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/model.h"
#include "bench/harness.h"

#define PARAMS ((size_t)16) /* a block has fewer */

const ar_config *ari_bench_block_config(size_t i)
{
    static const ar_config configs[] = {
        {.arch = AR_ARCH_GPT2,
         .name = "gpt2",
         .hidden = 768,
         .layers = 1,
         .heads = 12,
         .kv_heads = 12,
         .head_dim = 64,
         .ffn = 3072,
         .max_positions = 4096,
         .activation = AR_ACT_GELU_TANH,
         .norm = AR_NORM_LAYER,
         .norm_eps = 1e-5,
         .qkv_bias = true,
         .out_bias = true,
         .mlp_bias = true,
         .causal = true},
        {.arch = AR_ARCH_LLAMA,
         .name = "llama",
         .hidden = 768,
         .layers = 1,
         .heads = 12,
         .kv_heads = 12,
         .head_dim = 64,
         .ffn = 2048,
         .max_positions = 4096,
         .activation = AR_ACT_SILU,
         .gated = true,
         .norm = AR_NORM_RMS,
         .norm_eps = 1e-6,
         .rope = true,
         .rope_theta = 10000.0,
         .rope_factor = 1.0,
         .causal = true},
    };
    return i < sizeof configs / sizeof *configs ? &configs[i] : NULL;
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
    ar_status st = s->d->ops->alloc(s->d, &t->data, ar_tensor_count(t) * ar_dtype_bytes(t->dtype));
    if (st == AR_OK)
        st = s->d->ops->copy_strided(s->d, on.q, t, &values);
    s->d->ops->free(s->d, values.data);
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
    s->d->ops->free(s->d, s->x.data);
    s->d->ops->free(s->d, s->dy.data);
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

ar_status ari_bench_block(ar_bench_side_row row[2], const ar_config *config, size_t batch, size_t seq,
                          const ar_device_choice *which, ar_precision precision, int threads, size_t repetitions)
{
    const ar_device_choice cpu = {AR_DEVICE_CPU, 0}, *const choice = which ? which : &cpu;
    bench b = {.batch = {.batch = batch, .seq = seq}};
    ar_status st = AR_OK;
    if (batch == 0 || seq == 0 || repetitions == 0)
        return ar_error_set(AR_ERR_ARG, "bench block: batch %zu, seq %zu, repetitions %zu: all must be > 0", batch, seq,
                            repetitions);
    AR_TRY(ari_bench_device_create(&b.on, choice, threads));
    AR_TRY_TO(done, st, side_create(&b.native, AR_NUMERICS_NATIVE, precision, config, &b.batch, choice, threads));
    AR_TRY_TO(done, st, side_create(&b.exact, AR_NUMERICS_EXACT, AR_PRECISION_F32, config, &b.batch, choice, threads));
    AR_TRY_TO(done, st, ari_gemm_list_create(&b.list, &b.on, config, batch, seq, false));
    st = ari_bench_sides(row, ari_gemm_list_operations(&b.list), repetitions, 2, repetition, &b);
done:
    ari_gemm_list_destroy(&b.list);
    side_destroy(&b.exact);
    side_destroy(&b.native);
    ari_bench_device_destroy(&b.on);
    return st;
}
