/* SPDX-License-Identifier: Apache-2.0 */
/* Transformer blocks, native and exact, and what their slots take. */
#include <stdlib.h>

#include "anyrank/model.h"
#include "bench/bench.h"
#include "bench/harness.h"
#include "gpu/profile/profile.h"
#include "ref/core/size.h"
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

enum { BLOCKS = 4, SIDES = 4, LINES = BLOCKS * SIDES };
/* The blocks that stand for the usual ones. Width 768, 12 heads: "gpt2" with LayerNorm, GELU and an MLP of 3072,
 * "llama" with RMSNorm, rotary positions and a gated MLP of 2048. large: width 4096, 32 heads, 8 KV heads, an MLP of
 * 11008: "gpt" with LayerNorm, GELU and two matrices in the MLP (132 M parameters), "llama" with three (177 M).
 * bench/torch_block.py has the same. Small ones with experts: Mixtral-8x7B's at an eighth of its width, and
 * Qwen3-30B-A3B's at a quarter. NULL after the last. */
static const ar_config *block_config(bool large, size_t i)
{
    /* GPT-2's own form has as many KV heads as heads. */
    static const ar_config configs[2][BLOCKS] = {
        {{GPT, .arch = AR_ARCH_GPT2, .name = "gpt2", SMALL, .ffn = 3072},
         {LLAMA, SMALL, .ffn = 2048},
         {EXPERTS, .arch = AR_ARCH_MIXTRAL, .name = "mixtral", .kv_heads = 2, .ffn = 1792,
          .experts = {.n = 8, .per_token = 2, .ffn = 1792, .normalised = true, .w123 = true}},
         {EXPERTS, .arch = AR_ARCH_QWEN3_MOE, .name = "qwen3-moe", .kv_heads = 1, .qk_norm = AR_QK_NORM_HEAD,
          .ffn = 192, .experts = {.n = 128, .per_token = 8, .ffn = 192, .normalised = true}}},
        {{GPT, .arch = AR_ARCH_STACK, .name = "gpt", LARGE}, {LLAMA, LARGE}},
    };
    return i < BLOCKS && configs[large][i].layers > 0 ? &configs[large][i] : NULL;
}

/* One block in one of the numerics, with its input and the gradient of its output. */
typedef struct side {
    ari_bench_device on; /* of its own, as in a run that does nothing else; the queue is the context's */
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
    const ar_dtype dtype = ar_ctx_activations(s->ctx);
    AR_TRY(ari_bench_tensor(&s->on, &values, 3, shape, seed));
    *t = values;
    return dtype == AR_F32 ? AR_OK : ari_bench_tensor_as(&s->on, t, &values, dtype);
}

static ar_status side_create(side *s, const ar_ctx_options *of, const ar_config *config, const ar_batch *batch,
                             const ari_bench_session *session)
{
    AR_TRY(ar_device_create(&s->on.d, &session->device, session->threads));
    ar_ctx_options options = *of;
    options.device = s->on.d;
    ar_block_options o;
    char name[96];
    AR_TRY(ar_config_block(config, 0, &o, name, sizeof name));
    AR_TRY(ar_ctx_create(&s->ctx, &options));
    s->on.q = ar_ctx_queue(s->ctx);
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
    ari_bench_free(&s->on);
    free(s->params);
    ar_saved_destroy(s->saved);
    ar_module_destroy(s->block);
    ar_ctx_destroy(s->ctx);
    ar_device_destroy(s->on.d);
}

/* The output, the input's gradient and those of the parameters, in the order of their list. */
static ar_status take_bits(side *s, ari_sha256 *to, const ar_tensor *y, const ar_tensor *dx)
{
    AR_TRY(ari_bench_take_bits(to, &s->on, y));
    AR_TRY(ari_bench_take_bits(to, &s->on, dx));
    for (size_t i = 0; i < s->n; i++) {
        ar_tensor g = s->params[i]->value;
        g.dtype = AR_F32;
        AR_TRY(s->on.d->ops->alloc(s->on.d, s->on.q, &g.data, ar_tensor_count(&g) * sizeof(float)));
        ar_status st = ar_param_grad_value(s->params[i], s->ctx, &g);
        if (st == AR_OK)
            st = ari_bench_take_bits(to, &s->on, &g);
        s->on.d->ops->free(s->on.d, s->on.q, g.data);
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
    AR_TRY(ari_bench_clock(&s->on, &start));
    AR_TRY(ar_module_forward(s->block, s->ctx, s->saved, &y, &s->x, batch));
    AR_TRY(ar_module_backward(s->block, s->ctx, s->saved, &dx, &s->dy, batch));
    if (bits)
        AR_TRY(take_bits(s, bits, &y, &dx));
    ar_saved_clear(s->saved);
    ar_ctx_end_step(s->ctx);
    AR_TRY(ari_bench_clock(&s->on, &end));
    *seconds = end - start;
    return AR_OK;
}

static ar_status hash_pass(side *s, const ar_batch *batch, char hex[65])
{
    double seconds = 0.0;
    ari_sha256 bits;
    ari_sha256_init(&bits);
    AR_TRY(pass(s, batch, &seconds, &bits));
    ari_sha256_final(&bits, hex);
    return AR_OK;
}

typedef struct bench {
    ari_bench_device on; /* of the products */
    ar_batch batch;
    side side[SIDES];
    size_t sides;
    ari_gemm_list list;
} bench;

/* times: the first side, the products alone, the other sides. */
static ar_status repetition(void *user, double *times)
{
    bench *b = user;
    AR_TRY(pass(&b->side[0], &b->batch, &times[0], NULL));
    AR_TRY(ari_gemm_list_run(&b->list, &times[1]));
    for (size_t i = 1; i < b->sides; i++)
        AR_TRY(pass(&b->side[i], &b->batch, &times[1 + i], NULL));
    return AR_OK;
}

/* --- the slots of a pass ------------------------------------------------------------------------------------------ */

/* A slot of the device's table in one pass. */
typedef struct slot_row {
    const char *block, *numerics, *precision, *slot;
    const char *part; /* of its calls; NULL: the slot */
    size_t calls;
    double seconds, share; /* of the pass, which takes longer than without being timed so */
    size_t bytes;          /* of the tensors that the calls were given; 0: none, or buffers of unknown size */
} slot_row;

#define ARI_ROW slot_row
static const ari_field slot_fields[] = {
    ARI_FIELD("block", "block", TEXT, block),
    ARI_FIELD("numerics", "numerics", TEXT, numerics),
    ARI_FIELD("precision", "precision", TEXT, precision),
    ARI_FIELD("slot", "slot", TEXT, slot),
    ARI_FIELD("part", "of it", TEXT, part),
    ARI_FIELD("calls", "calls", COUNT, calls),
    ARI_FIELD("seconds", "time", MILLISECONDS, seconds),
    ARI_FIELD("share", "share", SHARE, share),
    ARI_FIELD("bytes", "MB of tensors", MEGABYTES, bytes),
};
#undef ARI_ROW

enum { SLOTS = ARI_PROFILE_ROWS + 1 };
/* Slots of all passes: longest first, then the time between slots. */
typedef struct slot_list {
    slot_row row[LINES * SLOTS];
    size_t n;
} slot_list;

static ar_status read_profile(slot_list *l, const slot_row *head, ari_profile *profile, double whole)
{
    ari_profile_row found[ARI_PROFILE_ROWS];
    size_t n = 0;
    double inside = 0.0;
    AR_TRY(ari_profile_read(profile, found, &n));
    for (size_t i = 0; i < n; i++) {
        const ari_profile_row *f = &found[i];
        l->row[l->n++] = (slot_row){head->block, head->numerics, head->precision,    f->name, f->part,
                                    f->calls,    f->seconds,     f->seconds / whole, f->bytes};
        inside += f->part ? 0.0 : f->seconds;
    }
    const double between = whole > inside ? whole - inside : 0.0;
    l->row[l->n++] = (slot_row){head->block,        head->numerics,          head->precision, .slot = "between slots",
                                .seconds = between, .share = between / whole};
    return AR_OK;
}

/* A pass, the gradients' zeroing included. */
static ar_status profile_pass(slot_list *l, const slot_row *head, side *s, ari_profile *profile, const ar_batch *batch)
{
    double start = 0.0, end = 0.0, seconds = 0.0;
    AR_TRY(ari_bench_clock(&s->on, &start));
    AR_TRY(pass(s, batch, &seconds, NULL));
    AR_TRY(ari_bench_clock(&s->on, &end));
    return read_profile(l, head, profile, end - start);
}

/* One more pass, of which each slot is timed. */
static ar_status profile_side(slot_list *l, const slot_row *head, side *s, const ar_batch *batch)
{
    enum { PASSES = 2 }; /* the first one makes the events of the second */
    const size_t n = l->n;
    ARI_OWNED_BY(ari_profile_end) ari_profile *profile = NULL;
    AR_TRY(ari_profile_begin(&profile, s->on.d));
    for (int i = 0; i < PASSES; i++) {
        l->n = n;
        AR_TRY(profile_pass(l, head, s, profile, batch));
    }
    return AR_OK;
}

/* --- the benchmark ------------------------------------------------------------------------------------------------ */

/* A block in one of the numerics. */
typedef struct block_row {
    const char *block, *numerics, *precision;
    size_t batch, seq, parameters;
    ari_bench_side time;
    char bits[65]; /* SHA-256 of output and gradients; exact: the same on every device */
} block_row;

#define ARI_ROW block_row
static const ari_field block_fields[] = {
    ARI_FIELD("block", "block", TEXT, block),
    ARI_FIELD("parameters", "parameters", COUNT, parameters),
    ARI_FIELD("numerics", "numerics", TEXT, numerics),
    ARI_FIELD("precision", "precision", TEXT, precision),
    ARI_FIELD("batch", "batch", COUNT, batch),
    ARI_FIELD("seq", "seq", COUNT, seq),
    ARI_FIELD("seconds", "time", SECONDS, time.seconds),
    ARI_FIELD("gflops", "GF/s", RATE, time.gflops),
    ARI_FIELD("gemm_fraction", "products", RATIO, time.gemm_fraction),
    ARI_FIELD("over_native", "of native", RATIO, time.over_first),
    ARI_FIELD("spread", "spread", SHARE, time.spread),
    ARI_FIELD("bits", NULL, WORDS, bits),
};
#undef ARI_ROW

static size_t parameters_of(const side *s)
{
    size_t n = 0;
    for (size_t i = 0; i < s->n; i++)
        n += ar_tensor_count(&s->params[i]->value);
    return n;
}

/* Native and exact in fp32, then both in the other precision, exact numerics where they have it. */
static size_t list_sides(ar_ctx_options of[SIDES], ar_precision other)
{
    size_t n = 2;
    of[0] = (ar_ctx_options){.numerics = AR_NUMERICS_NATIVE};
    of[1] = (ar_ctx_options){.numerics = AR_NUMERICS_EXACT};
    if (other == AR_PRECISION_F32)
        return n;
    of[n++] = (ar_ctx_options){.numerics = AR_NUMERICS_NATIVE, .precision = other};
    if (ar_arith_exact(other))
        of[n++] = (ar_ctx_options){.numerics = AR_NUMERICS_EXACT, .precision = other};
    return n;
}

static void bench_destroy(bench *b)
{
    for (size_t i = 0; i < SIDES; i++)
        side_destroy(&b->side[i]);
    ari_bench_device_destroy(&b->on);
}

/* slots NULL: not asked for. Adds to rows. */
static ar_status time_block(block_row *rows, size_t *n, slot_list *slots, const ar_config *config,
                            const ari_bench_session *s)
{
    const ar_run *run = &s->v->r.run;
    ARI_ENDED(bench_destroy)
    bench b = {.batch = {.batch = run->batch ? run->batch : 2, .seq = run->seq ? run->seq : 512}};
    ar_ctx_options of[SIDES];
    ari_bench_side times[SIDES] = {0};
    const size_t sides = list_sides(of, run->precision);
    AR_TRY(ari_bench_device_create(&b.on, &s->device, s->threads));
    for (; b.sides < sides; b.sides++)
        AR_TRY(side_create(&b.side[b.sides], &of[b.sides], config, &b.batch, s));
    AR_TRY(ari_gemm_list_create(&b.list, &b.on, config, b.batch.batch, b.batch.seq));
    AR_TRY(ari_bench_sides(times, sides, ari_gemm_list_operations(&b.list), s->repetitions, 2, repetition, &b));
    for (size_t i = 0; i < sides; i++) {
        side *one = &b.side[i];
        block_row *row = &rows[(*n)++];
        const slot_row head = {.block = config->name,
                               .numerics = ari_numerics_names[of[i].numerics],
                               .precision = ar_precision_name(of[i].precision)};
        *row = (block_row){head.block,  head.numerics,      head.precision, b.batch.batch,
                           b.batch.seq, parameters_of(one), times[i],       ""};
        AR_TRY(hash_pass(one, &b.batch, row->bits));
        if (slots)
            AR_TRY(profile_side(slots, &head, one, &b.batch));
    }
    return AR_OK;
}

/* Number i of the blocks to time: the model's, where one is given; NULL after the last. */
static const ar_config *block_at(const ari_bench_session *s, size_t i)
{
    return !s->v->model ? block_config(s->v->block_size == 1, i) : i == 0 ? &s->config : NULL;
}

ar_status ari_bench_block(ari_bench_session *s)
{
    block_row rows[LINES];
    slot_list slots = {.n = 0};
    char folder[512];
    const ar_config *config = NULL;
    size_t n = 0;
    if (s->v->model)
        AR_TRY(ari_run_config(&s->config, folder, sizeof folder, &(ar_run){.model = s->v->model}));
    for (size_t i = 0; (config = block_at(s, i)); i++) {
        ari_bench_progress(s, i, BLOCKS);
        AR_TRY(time_block(rows, &n, s->v->profile ? &slots : NULL, config, s));
    }
    s->more = s->v->profile ? ARI_ROWS(slot_fields, slots.row, slots.n) : NULL;
    s->more_key = "profile";
    return ari_bench_end(
        s, ARI_ROWS(block_fields, rows, n), s->threads,
        "\nOne transformer block forward and backward, %d thread%s; medians. 'products': time of its matrix "
        "products\nalone, by sgemm, over that of the block. 'of native': over the time of the native block in fp32. "
        "'spread': of the\ntimes, (largest - smallest)/median.\n%s",
        s->threads, ARI_PLURAL(s->threads),
        s->v->profile
            ? "\nThe slots of the device's table in one more pass: 'of it': a part of a slot's calls; 'share': "
              "of the pass.\n\n"
            : "");
}
