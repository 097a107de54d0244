/* SPDX-License-Identifier: Apache-2.0 */
/* One block against values computed in binary64 by PyTorch from inputs that fp32 represents. */
#include "support/together.h"
#include "tests/baseline/support.h"

typedef struct block_case {
    const char *folder;
    ar_config c;
    size_t batch, seq;
} block_case;

static ar_config block_config(size_t hidden, size_t heads, size_t kv_heads, size_t ffn, bool causal)
{
    return (ar_config){.arch = AR_ARCH_STACK,
                       .vocab = 1,
                       .hidden = hidden,
                       .layers = 1,
                       .heads = heads,
                       .kv_heads = kv_heads,
                       .head_dim = hidden / heads,
                       .ffn = ffn,
                       .max_positions = 64,
                       .activation = AR_ACT_GELU_TANH,
                       .norm = AR_NORM_LAYER,
                       .norm_eps = 1e-5,
                       .mlp_bias = true,
                       .causal = causal};
}

/* The baseline's names and the files' names. */
static const char *const parameters[][2] = {
    {"layers.0.ln1.weight", "ln1_weight"}, {"layers.0.ln1.bias", "ln1_bias"}, {"layers.0.attn.wq.weight", "wq"},
    {"layers.0.attn.wk.weight", "wk"},     {"layers.0.attn.wv.weight", "wv"}, {"layers.0.attn.wo.weight", "wo"},
    {"layers.0.ln2.weight", "ln2_weight"}, {"layers.0.ln2.bias", "ln2_bias"}, {"layers.0.mlp.w1.weight", "w1"},
    {"layers.0.mlp.w1.bias", "b1"},        {"layers.0.mlp.w2.weight", "w2"},  {"layers.0.mlp.w2.bias", "b2"},
};
enum { PARAMETERS = sizeof parameters / sizeof parameters[0] };

static const char *file_name(const char *name)
{
    for (size_t i = 0; i < PARAMETERS; i++)
        if (strcmp(parameters[i][0], name) == 0)
            return parameters[i][1];
    return name;
}

static float *read_f32(const ar_st_file *f, const char *name)
{
    const ar_st_entry *e = ar_st_find(f, name);
    cr_assert_not_null(e, "no %s", name);
    float *values = malloc(e->count * sizeof *values);
    cr_assert(values != NULL && ar_st_to_f32(e, values) == AR_OK);
    return values;
}

static void check_block(const block_case *at, ar_number_mode mode, double bound)
{
    static tape t;
    OWNED(ar_st_close) ar_st_file *inputs = open_golden(at->folder, "inputs.safetensors");
    OWNED(ar_st_close) ar_st_file *expected = open_golden(at->folder, "expected_f64.safetensors");
    OWNED(free) float *x = read_f32(inputs, "x"), *dy = read_f32(inputs, "dy");
    given g = {.file = inputs, .rename = file_name};
    const ar_batch batch = {.batch = at->batch, .seq = at->seq};
    const ar_baseline_options o = {
        .mode = mode, .weights = given_weight, .weights_user = &g, .emit = tape_emit, .emit_user = &t};
    cr_assert_ok(ar_baseline_block(&at->c, &o, &batch, x, dy));
    double worst = fmax(worst_error(tape_find(&t, "layers.0", 'f'), ar_st_find(expected, "y")),
                        worst_error(tape_find(&t, "layers.0", 'b'), ar_st_find(expected, "dx")));
    for (size_t i = 0; i < PARAMETERS; i++) {
        char name[40];
        snprintf(name, sizeof name, "d%s", parameters[i][1]);
        const ar_st_entry *e = ar_st_find(expected, name);
        cr_assert_not_null(e, "no %s", name);
        worst = fmax(worst, worst_error(tape_find(&t, parameters[i][0], 'g'), e));
    }
    cr_assert_eq(ar_st_count(expected), PARAMETERS + 2);
    cr_expect(worst < bound, "%s, mode %d: %.3g of the largest element, allowed %.3g", at->folder, (int)mode, worst,
              bound);
    fprintf(stderr, "%s, mode %d: worst error %.3g of the largest element (allowed %.3g)\n", at->folder, (int)mode,
            worst, bound);
    tape_clear(&t);
    given_clear(&g);
}

/* binary64: 16 operations in a row, contractions of at most 384 terms: sqrt(16*384)*2^-53 = 9e-15, and 1e-12 leaves
 * room for the condition of the norms. fp32 storage: the same count at 2^-24, 4.7e-6. */
#define F64_BOUND 1e-12
#define FP32_BOUND 4.7e-6

CLAIM(multi_head_block_agrees)
{
    const block_case at = {"block-mha", block_config(64, 4, 4, 256, true), 2, 16};
    check_block(&at, AR_MODE_F64, F64_BOUND);
    check_block(&at, AR_MODE_EXACT, FP32_BOUND);
    check_block(&at, AR_MODE_FP32, FP32_BOUND);
}

CLAIM(grouped_query_block_agrees)
{
    const block_case at = {"block-gqa", block_config(96, 12, 3, 384, true), 2, 16};
    check_block(&at, AR_MODE_F64, F64_BOUND);
    check_block(&at, AR_MODE_EXACT, FP32_BOUND);
    check_block(&at, AR_MODE_FP32, FP32_BOUND);
}

CLAIM(bidirectional_multi_query_block_agrees)
{
    const block_case at = {"block-mqa-bidirectional", block_config(64, 8, 1, 128, false), 1, 24};
    check_block(&at, AR_MODE_F64, F64_BOUND);
    check_block(&at, AR_MODE_EXACT, FP32_BOUND);
    check_block(&at, AR_MODE_FP32, FP32_BOUND);
}

EVERY_CLAIM(baseline_block)
