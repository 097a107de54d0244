/* SPDX-License-Identifier: Apache-2.0 */
/* However few scores a block has, an attention's output and gradients have the bits of the one that has them all. */
#include "anyrank/context.h"
#include "anyrank/layers.h"
#include "gpu/device_private.h"
#include "support/rank_run.h"
#include "tests/support/test.h"

enum { BATCH = 2, SEQ = 75, HIDDEN = 12, HEADS = 6, HEAD = 4, PARAMS = 4 };
#define TOKENS ((size_t)BATCH * SEQ * HIDDEN)

typedef struct masked {
    size_t kv_heads, window;
    bool causal, documents, padding, additive;
    double dropout;
} masked;

/* Of a run: the output, the gradient of the input, those of the parameters. */
typedef struct values {
    float y[TOKENS], dx[TOKENS], grad[PARAMS][HEADS * HEAD * HIDDEN];
    size_t kept; /* bytes of the step's memory between the passes */
} values;

static void fill(float *x, size_t n, uint32_t seed)
{
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(int32_t)seed / 2147483648.0f;
    }
}

typedef struct inputs {
    float x[TOKENS], dy[TOKENS], additive[SEQ * SEQ];
    int32_t documents[BATCH * SEQ];
    uint8_t padding[BATCH * SEQ];
    ar_batch batch;
} inputs;

static void make_inputs(inputs *in, const masked *o)
{
    fill(in->x, TOKENS, 1);
    fill(in->dy, TOKENS, 2);
    fill(in->additive, SEQ * SEQ, 3);
    for (size_t i = 0; i < SEQ * SEQ; i++)
        in->additive[i] = i % 11 == 3 ? -INFINITY : in->additive[i];
    for (size_t i = 0; i < BATCH * SEQ; i++) {
        in->documents[i] = (int32_t)(i % SEQ / (i < SEQ ? 19 : 50));
        in->padding[i] = i % 7 != 2;
    }
    in->batch = (ar_batch){.batch = BATCH,
                           .seq = SEQ,
                           .documents = o->documents ? in->documents : NULL,
                           .padding_mask = o->padding ? in->padding : NULL,
                           .additive_mask = o->additive ? in->additive : NULL,
                           .mask_batch = 1,
                           .mask_heads = 1};
}

static ar_status run(values *v, ar_ctx *ctx, const masked *o)
{
    static inputs in;
    const size_t shape[3] = {BATCH, SEQ, HIDDEN};
    const ar_attention_options options = {.hidden = HIDDEN,
                                          .heads = HEADS,
                                          .kv_heads = o->kv_heads,
                                          .head_dim = HEAD,
                                          .causal = o->causal,
                                          .window = o->window,
                                          .rope = {.kind = AR_ROPE_DEFAULT, .theta = 10000.0},
                                          .max_positions = SEQ};
    OWNED(ar_module_destroy) ar_module *m = NULL;
    OWNED(ar_saved_destroy) ar_saved *saved = NULL;
    ar_tensor x, y, dy, dx;
    ar_param *params[PARAMS];
    make_inputs(&in, o);
    AR_TRY(ar_attention_create(&m, ctx, "attention", &options));
    AR_TRY(ar_module_fresh(m, ctx, 5));
    AR_TRY(ar_saved_create(&saved));
    AR_TRY(rank_upload(ctx, &x, 3, shape, in.x));
    AR_TRY(rank_upload(ctx, &dy, 3, shape, in.dy));
    AR_TRY(ar_module_forward(m, ctx, saved, &y, &x, &in.batch));
    ar_ctx_memory(ctx, &v->kept, &(size_t){0});
    AR_TRY(ar_ctx_download(ctx, v->y, &y));
    AR_TRY(ar_module_backward(m, ctx, saved, &dx, &dy, &in.batch));
    AR_TRY(ar_ctx_download(ctx, v->dx, &dx));
    const size_t n = ar_module_params(m, params, PARAMS, true);
    for (size_t i = 0; i < n; i++)
        AR_TRY(rank_read_gradient(ctx, v->grad[i], params[i]));
    return AR_OK;
}

/* Ends the device. */
static void on_device(values *v, ar_device *d, const masked *o, size_t bytes)
{
    ar_ctx *ctx = NULL;
    memset(v, 0, sizeof *v);
    d->block_bytes = bytes;
    const ar_ctx_options options = {.device = d, .dropout = o->dropout, .seed = 9};
    cr_assert_ok(ar_ctx_create(&ctx, &options));
    cr_assert_ok(run(v, ctx, o));
    ar_ctx_destroy(ctx);
    ar_device_destroy(d);
}

static void with_blocks_of(values *v, const masked *o, size_t bytes)
{
    ar_device *d = NULL;
    cr_assert_ok(ar_device_cpu_create(&d, 2));
    on_device(v, d, o, bytes);
}

static const masked cases[] = {{HEADS, 0, true, false, false, false, 0.0}, {2, 0, true, false, false, false, 0.0},
                               {1, 20, true, false, true, false, 0.2},     {3, 0, false, false, true, true, 0.0},
                               {2, 7, true, true, false, true, 0.0},       {2, 0, false, true, false, false, 0.3}};

Test(attention_blocks, of_any_size_give_the_bits_of_one_block)
{
    /* Whole matrices one by one, rows of a head, and as few rows as there may be. */
    static const size_t bytes[] = {4 * 6 * SEQ * SEQ * 4, 40 * SEQ * 4, 1};
    static values all, some;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        with_blocks_of(&all, &cases[i], (size_t)1 << 30);
        for (size_t k = 0; k < sizeof bytes / sizeof *bytes; k++) {
            with_blocks_of(&some, &cases[i], bytes[k]);
            cr_expect_arr_eq(some.y, all.y, sizeof all.y, "case %zu, %zu bytes: y", i, bytes[k]);
            cr_expect_arr_eq(some.dx, all.dx, sizeof all.dx, "case %zu, %zu bytes: dx", i, bytes[k]);
            cr_expect_arr_eq(some.grad, all.grad, sizeof all.grad, "case %zu, %zu bytes: gradients", i, bytes[k]);
        }
    }
}

/* There products leave out tiles that no query sees. */
Test(attention_blocks, of_whole_matrices_have_the_same_bits_on_a_gpu)
{
    static values cpu, gpu;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ar_device *d = NULL;
        if (ari_device_emulated_create(&d) != AR_OK)
            cr_skip("%s", ar_error_message());
        with_blocks_of(&cpu, &cases[i], (size_t)1 << 30);
        on_device(&gpu, d, &cases[i], (size_t)1 << 30);
        cr_expect_arr_eq(gpu.y, cpu.y, sizeof cpu.y, "case %zu: y", i);
        cr_expect_arr_eq(gpu.dx, cpu.dx, sizeof cpu.dx, "case %zu: dx", i);
        cr_expect_arr_eq(gpu.grad, cpu.grad, sizeof cpu.grad, "case %zu: gradients", i);
    }
}

Test(attention_blocks, keep_less_than_a_matrix_of_scores)
{
    static values v;
    with_blocks_of(&v, &cases[0], 1);
    cr_expect_lt(v.kept, sizeof(float) * BATCH * HEADS * SEQ * SEQ, "%zu bytes", v.kept);
}
