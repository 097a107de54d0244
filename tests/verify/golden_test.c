/* SPDX-License-Identifier: Apache-2.0 */
/* ar_grads against tensors that others computed, at every number of ranks that the heads allow. The models'
 * come from PyTorch in fp32 on a CPU. The blocks' were computed in binary64 from fp32 inputs; a block's tensor passes
 * through D <= 20 contractions, norms and sums (10 forward, as many back) of at most K = 384 terms, whose rounding
 * errors of 2^-24 of the largest element, of either sign, add up to about sqrt(D*K)*2^-24. A model's embedding is rounded
 * once: PyTorch's bits. */
#include "tests/verify/support.h"

#include "anyrank/grads.h"
#include "ref/io/safetensors_private.h"
#include "ref/models/parallel_private.h"
#include "ref/models/plan_private.h"
#include "tests/support/golden_loss.h"
#include "verify/bytes/bytes.h"

#define MODEL_BOUND 1e-5
#define BLOCK_BOUND 5.23e-6 /* sqrt(20 * 384) * 2^-24 */

enum { MOST_LAYOUTS = 4, MOST_NAMES = 26 };

/* By the numbers of ranks, of which 0 ends a list; blocks have names that say so. Batches with labels, masks and positions,
 * and other losses: tests/golden/make_golden.py says which has what. "defaults" are files of sizes alone. */
static const struct {
    int tp[MOST_LAYOUTS];
    const char *names[MOST_NAMES];
} cases[] = {
    {{1, 2, 4},
     {"gpt2-tiny",
      "llama-mqa-tied-tiny",
      "qwen2-tiny",
      "qwen2-window-tiny",
      "mistral-window-tiny",
      "llama-bias-headdim-tiny",
      "mistral-yarn-mscale-tiny",
      "qwen3-tiny",
      "olmo2-tiny",
      "gemma-tiny",
      "gemma2-tiny",
      "gemma3-tiny",
      "gpt2-padding-tiny",
      "llama-padding-tiny",
      "llama-padding-labels-tiny",
      "gpt2-additive-tiny",
      "llama-additive-tiny",
      "gpt2-labels-tiny",
      "llama-labels-tiny",
      "gpt2-documents-tiny",
      "llama-documents-tiny",
      "gpt2-positions-tiny",
      "llama-positions-tiny",
      "gpt2-flattened-tiny"}},
    {{1, 2, 4},
     {"llama-packed-tiny", "llama-mtp-packed-tiny", "gpt2-packed-tiny", "llama-smoothing-tiny", "gpt2-z-loss-tiny",
      "gpt2-smoothing-z-loss-tiny", "block-mha"}},
    {{1, 2},
     {"qwen2-layers-tiny", "llama3-rope-tiny", "llama-dynamic-tiny", "qwen2-yarn-tiny", "llama-longrope-tiny",
      "llama-longrope-long-tiny", "phi3-tiny", "phi3-longrope-tiny", "phi3-longrope-short-tiny", "qwen3-defaults-tiny",
      "gemma-defaults-tiny", "gemma3-defaults-tiny", "block-mqa-bidirectional"}},
    {{1, 4},
     {"llama-defaults-tiny", "qwen2-defaults-tiny", "olmo2-defaults-tiny", "gemma2-defaults-tiny", "phi3-defaults-tiny",
      "gpt2-defaults-tiny", "gpt2-packed-ends-tiny"}},
    {{1, 8}, {"mistral-defaults-tiny"}},
    {{1, 2, 4, 8}, {"llama-gqa-tiny"}},
    {{1, 3, 6, 12}, {"block-gqa"}},
    {{1, 2, 4},
     {"experts/mixtral-tiny", "experts/mixtral-padding-tiny", "experts/mixtral-defaults-tiny", "experts/olmoe-tiny",
      "experts/mixtral-balance-padding-tiny", "experts/mixtral-sequence-padding-tiny", "experts/olmoe-batch-tiny"}},
    {{1, 2, 4},
     {"variants/ministral-tiny", "variants/olmo3-tiny", "variants/exaone4-tiny", "variants/smollm3-tiny",
      "variants/smollm3-window-tiny", "variants/seed-oss-tiny", "variants/granite-tiny", "variants/glm4-tiny",
      "variants/glm-tiny", "variants/ernie4-5-tiny", "variants/cohere-tiny", "variants/cohere2-tiny",
      "variants/stablelm-parallel-tiny", "variants/starcoder2-tiny"}},
    {{1, 2}, {"variants/stablelm-tiny", "variants/gpt-neox-tiny"}},
    {{1, 2},
     {"experts/qwen2moe-tiny", "experts/qwen3moe-tiny", "experts/qwen3moe-balance-tiny", "experts/glm4moe-tiny",
      "experts/dots1-tiny", "experts/deepseek-v3-tiny", "experts/deepseek-v2-tiny", "experts/deepseek-v2-lite-tiny",
      "experts/deepseek-v3-mtp-tiny", "experts/glm4moelite-tiny", "experts/minimaxm2-tiny"}},
    {{1, 2, 4}, {"experts/gpt-oss-tiny", "experts/gpt-oss-padding-tiny", "experts/gpt-oss-defaults-tiny"}},
    {{1, 3}, {"experts/deepseek-v3-plain-tiny"}},
};
enum { CASES = 92 };

static bool is_block(const char *name)
{
    return strncmp(name, "block-", 6) == 0;
}

/* Layouts that would need part of a head, and the thing that stands in the way. */
static const struct {
    const char *name;
    int tp;
    const char *says;
} refused[] = {
    {"phi3-tiny", 4, "KV heads"},
    {"llama-gqa-tiny", 3, "query heads"},
    {"block-gqa", 2, "KV heads"},
    {"block-gqa", 4, "KV heads"},
    {"gpt2-tiny", 3, "query heads"},
    {"block-mha", 3, "query heads"},
    {"llama-mqa-tied-tiny", 3, "query heads"},
};

/* run: layout, numerics, algorithm and order. */
static ar_status grads_as(ar_grads_result *result, const char *name, const ar_run *run, const char *out)
{
    const bool block = is_block(name);
    char folder[600], input[700];
    snprintf(folder, sizeof folder, "%s/%s", TEST_GOLDEN_DIR, name);
    snprintf(input, sizeof input, "%s/batch.safetensors", folder);
    ar_grads_options o = {.run = *run, .block = block ? folder : NULL, .input = block ? NULL : input, .out = out};
    o.run.model = block ? NULL : folder;
    o.run.loss = golden_loss(name);
    o.run.threads = 1;
    return ar_grads(result, &o);
}

static ar_status grads_of(ar_grads_result *result, const char *name, int tp, ar_sim_algorithm algorithm,
                          const char *out)
{
    const ar_run run = {.parallel = {.tp = tp}, .sim.algorithm = algorithm};
    return grads_as(result, name, &run, out);
}

/* Element i of an F32 or F64 entry. */
static double value_at(const ar_st_entry *e, size_t i)
{
    double d = 0.0;
    float f = 0.0f;
    if (e->dtype == AR_F64) {
        memcpy(&d, (const char *)e->data + i * sizeof d, sizeof d);
        return d;
    }
    cr_assert_eq(e->dtype, AR_F32, "%s", e->name);
    memcpy(&f, (const char *)e->data + i * sizeof f, sizeof f);
    return (double)f;
}

/* max |actual - expected| / max |expected|. */
static double relative_error(const ar_st_entry *actual, const ar_st_entry *expected)
{
    double difference = 0.0, largest = 0.0;
    cr_assert_eq(actual->ndim, expected->ndim, "%s", expected->name);
    for (int d = 0; d < actual->ndim; d++)
        cr_assert_eq(actual->shape[d], expected->shape[d], "%s", expected->name);
    for (size_t i = 0; i < actual->count; i++) {
        const double a = value_at(actual, i), e = value_at(expected, i);
        cr_assert(isfinite(a), "%s[%zu] is not finite", expected->name, i);
        difference = fmax(difference, fabs(a - e));
        largest = fmax(largest, fabs(e));
    }
    cr_assert(largest > 0.0 || strstr(expected->name, ".experts."), "%s is all zero", expected->name);
    return largest > 0.0 ? difference / largest : difference;
}

/* The worst of a file; both files hold the same names. */
static double worst_of_file(const char *out, const char *file, const char *golden, const char *golden_file,
                            double bound)
{
    double worst = 0.0;
    OWNED(ari_st_close) ar_st_file *actual = open_in(out, file), *expected = open_in(golden, golden_file);
    cr_expect_eq(ari_st_tensor_count(actual), ari_st_tensor_count(expected), "%s", golden);
    for (size_t i = 0; i < ari_st_tensor_count(expected); i++) {
        const ar_st_entry *e = ari_st_at(expected, i), *a = ari_st_find(actual, e->name);
        cr_assert_not_null(a, "%s: no tensor %s", file, e->name);
        const double error = relative_error(a, e), allowed = strcmp(e->name, "hidden_states.0") == 0 ? 0.0 : bound;
        cr_expect(error <= allowed, "%s, %s: %.3g of the largest element, allowed %.3g", golden, e->name, error,
                  allowed);
        worst = fmax(worst, error);
    }
    return worst;
}

static void expect_same_file(const char *a, const char *b)
{
    size_t na = 0, nb = 0;
    OWNED(free) unsigned char *x = NULL, *y = NULL;
    cr_assert_ok(ari_file_read(&x, &na, a, 1 << 28));
    cr_assert_ok(ari_file_read(&y, &nb, b, 1 << 28));
    cr_expect(na == nb && na > 0 && memcmp(x, y, na) == 0, "%s and %s differ", a, b);
}

static void check_values(const char *name, const char *out)
{
    char golden[600];
    snprintf(golden, sizeof golden, "%s/%s", TEST_GOLDEN_DIR, name);
    if (is_block(name)) {
        const double worst = worst_of_file(out, "block.safetensors", golden, "expected_f64.safetensors", BLOCK_BOUND);
        fprintf(stderr, "%s: worst %.2e of the largest element of a tensor (allowed %.2e)\n", name, worst, BLOCK_BOUND);
        return;
    }
    const double outputs = worst_of_file(out, "outputs.safetensors", golden, "outputs.safetensors", MODEL_BOUND);
    const double grads = worst_of_file(out, "grads.safetensors", golden, "grads.safetensors", MODEL_BOUND);
    fprintf(stderr, "%s: worst %.2e (outputs), %.2e (gradients) of the largest element of a tensor (allowed %.0e)\n",
            name, outputs, grads, MODEL_BOUND);
}

static void expect_same_bits(const char *name, int tp, ar_sim_algorithm algorithm, const char *one,
                             const ar_grads_result *expected)
{
    static const char *const files[2][3] = {{"outputs.safetensors", "grads.safetensors", NULL},
                                            {"block.safetensors", NULL, NULL}};
    char a[700], b[700];
    ar_grads_result r;
    OWNED(end_folder) char *out = new_folder();
    cr_assert_ok(grads_of(&r, name, tp, algorithm, out));
    cr_expect_str_eq(r.outputs_hash, expected->outputs_hash, "%s, tp=%d", name, tp);
    cr_expect(r.loss == expected->loss && r.tensors == expected->tensors);
    for (size_t f = 0; files[is_block(name)][f]; f++) {
        snprintf(a, sizeof a, "%s/%s", one, files[is_block(name)][f]);
        snprintf(b, sizeof b, "%s/%s", out, files[is_block(name)][f]);
        expect_same_file(a, b);
        cr_expect_str_eq(r.file[f], b);
    }
}

/* How many there are. */
static int check_row(size_t row)
{
    int names = 0;
    for (; names < MOST_NAMES && cases[row].names[names]; names++) {
        const char *name = cases[row].names[names];
        const int *tp = cases[row].tp;
        OWNED(end_folder) char *one = new_folder();
        ar_grads_result r;
        cr_assert_ok(grads_of(&r, name, 1, AR_SIM_DIRECT, one));
        check_values(name, one);
        for (size_t k = 0; k < MOST_LAYOUTS && tp[k]; k++) {
            if (tp[k] > 1 && (!small_only() || k % 2 == 0)) /* else each layout with one of them */
                expect_same_bits(name, tp[k], AR_SIM_DIRECT, one, &r);
            if (!small_only() || k % 2 == 1)
                expect_same_bits(name, tp[k], AR_SIM_RING, one, &r);
        }
    }
    return names;
}

Test(golden, models_agree_with_the_reference_in_the_same_bytes_on_any_number_of_ranks)
{
    cr_expect_eq(check_row(0), 24);
}

Test(golden, the_others_do_and_blocks_as_well)
{
    int names = 24;
    for (size_t row = 1; row < sizeof cases / sizeof *cases; row++)
        names += check_row(row);
    cr_expect_eq(names, CASES);
}

/* One rank's bits, and in native numerics PyTorch's values. */
static void expect_layout(const char *name, const ar_parallel *p)
{
    char layout[96];
    ar_grads_result one, r;
    ar_run run = {.parallel = *p};
    OWNED(end_folder) char *out = new_folder();
    ari_parallel_text(layout, sizeof layout, p);
    cr_assert_ok(grads_of(&one, name, 1, AR_SIM_DIRECT, out));
    cr_assert_eq(grads_as(&r, name, &run, out), AR_OK, "%s: %s", layout, ar_error_message());
    cr_expect_str_eq(r.outputs_hash, one.outputs_hash, "%s, %s", name, layout);
    run.numerics = AR_NUMERICS_NATIVE;
    cr_assert_eq(grads_as(&r, name, &run, out), AR_OK, "%s: %s", layout, ar_error_message());
    check_values(name, out);
}

/* Documents of 1 to 12 tokens, cut by chunks of 1 to 14: a ring, a zigzag, heads against positions, all with tp and
 * dp. */
static const struct {
    const char *name;
    ar_parallel p;
} packed[] = {
    {"llama-packed-tiny", {.cp = 2}},
    {"llama-packed-tiny", {.cp = 14}},
    {"llama-mtp-packed-tiny", {.cp = 14}},
    {"llama-mtp-packed-tiny", {.pp = 2, .cp = 2, .tp = 2, .micro_batches = 2, .zero = 3}},
    {"llama-packed-tiny", {.dp = 2, .cp = 2, .cp_inner = 2, .tp = 2}},
    {"gpt2-packed-tiny", {.cp = 7, .zigzag = true}},
    {"gpt2-flattened-tiny", {.dp = 2, .cp = 7}},
    {"gpt2-packed-tiny", {.cp = 4, .cp_inner = 2, .zigzag = true, .tp = 2}},
    {"gpt2-packed-tiny", {.cp = 2, .zigzag = true, .tp = 2, .sp = true}},
    {"gpt2-packed-ends-tiny", {.cp = 14}},
};

Test(golden, packed_documents_that_ranks_share_have_one_ranks_bits_and_pytorchs_values)
{
    for (size_t i = 0; i < sizeof packed / sizeof *packed; i++)
        expect_layout(packed[i].name, &packed[i].p);
}

/* Experts of ranks that share tokens, samples, layers and the weights themselves. */
static const struct {
    const char *name;
    ar_parallel p;
} experts[] = {
    {"experts/mixtral-tiny", {.cp = 7, .zigzag = true, .tp = 2}},
    {"experts/mixtral-tiny", {.dp = 2, .tp = 4, .zero = 3}},
    {"experts/mixtral-padding-tiny", {.cp = 7, .tp = 2}},
    {"experts/mixtral-defaults-tiny", {.cp = 2, .cp_inner = 2, .tp = 2, .sp = true, .overlap = 3}},
    {"experts/olmoe-tiny", {.pp = 2, .tp = 2, .sp = true, .micro_batches = 2}},
    {"experts/qwen2moe-tiny", {.cp = 7, .dp = 2, .zero = 2}},
    {"experts/qwen2moe-tiny", {.tp = 2, .sp = true, .recompute = {AR_RECOMPUTE_FULL, 1}}},
    {"experts/glm4moe-tiny", {.pp = 3, .tp = 2, .micro_batches = 2, .schedule = AR_PP_ZERO_BUBBLE}},
    {"experts/glm4moe-tiny", {.tp = 2, .sp = true, .recompute = {AR_RECOMPUTE_FULL, 1}}},
    {"experts/dots1-tiny", {.cp = 7, .dp = 2, .zero = 2}},
    {"experts/deepseek-v3-tiny", {.pp = 3, .tp = 2, .sp = true, .schedule = AR_PP_ZERO_BUBBLE, .micro_batches = 2}},
    {"experts/deepseek-v3-tiny", {.cp = 2, .tp = 2, .recompute = {AR_RECOMPUTE_SELECTIVE, 1}}},
    {"experts/deepseek-v3-mtp-tiny", {.pp = 2, .tp = 2, .sp = true, .schedule = AR_PP_ZERO_BUBBLE, .micro_batches = 2}},
    {"experts/deepseek-v3-mtp-tiny", {.cp = 7, .zigzag = true, .dp = 2, .zero = 3}},
    {"experts/minimaxm2-tiny", {.tp = 2, .sp = true, .dp = 2, .zero = 2}},
    {"experts/glm4moelite-tiny", {.cp = 2, .tp = 2, .dp = 2, .ep = 2, .zero = 1}},
    {"experts/deepseek-v3-plain-tiny", {.tp = 3, .dp = 2, .zero = 3}},
    {"experts/deepseek-v2-tiny", {.cp = 2, .tp = 2, .dp = 2, .ep = 4, .zero = 2}},
    {"experts/deepseek-v2-lite-tiny", {.cp = 2, .cp_inner = 2, .tp = 2, .dp = 2}},
    {"experts/qwen3moe-tiny", {.pp = 3, .tp = 2, .micro_batches = 2, .schedule = AR_PP_ZERO_BUBBLE}},
    {"experts/gpt-oss-tiny", {.cp = 2, .cp_inner = 2, .tp = 2, .dp = 2}},
    {"experts/gpt-oss-padding-tiny", {.tp = 2, .sp = true, .ep = 4, .etp = 1, .dp = 2, .zero = 1}},
    {"experts/gpt-oss-padding-tiny", {.cp = 7, .tp = 2, .dp = 2, .zero = 3}},
    {"experts/mixtral-balance-padding-tiny", {.cp = 2, .tp = 2, .dp = 2, .ep = 4}},
    {"experts/mixtral-balance-padding-tiny", {.pp = 2, .micro_batches = 2, .zero = 3}},
    {"experts/mixtral-sequence-padding-tiny", {.cp = 7, .tp = 2, .sp = true, .micro_batches = 2}},
    {"experts/mixtral-sequence-padding-tiny", {.tp = 2, .sp = true, .ep = 4, .etp = 1, .dp = 2}},
    {"experts/olmoe-batch-tiny", {.dp = 2, .ep = 2, .dispatch = AR_DISPATCH_ALL_GATHER, .zero = 2}},
    {"experts/olmoe-batch-tiny", {.tp = 2, .sp = true, .micro_batches = 2, .recompute = {AR_RECOMPUTE_FULL, 1}}},
    {"experts/qwen3moe-balance-tiny", {.pp = 3, .tp = 2, .micro_batches = 2, .schedule = AR_PP_ZERO_BUBBLE}},
};

Test(golden, experts_that_ranks_share_have_one_ranks_bits_and_pytorchs_values)
{
    for (size_t i = 0; i < sizeof experts / sizeof *experts; i++)
        expect_layout(experts[i].name, &experts[i].p);
}

/* The other order of an MLP moves other bytes and gives the same bits: equal files alone would not tell that it ran. */
Test(golden, the_order_of_the_mlp_reaches_the_run)
{
    static const char *const names[] = {"gpt2-tiny", "llama-gqa-tiny", "block-mha"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char folder[600];
        ar_grads_result r[2];
        OWNED(end_folder) char *out = new_folder();
        for (int order = 0; order < 2; order++) {
            const ar_run run = {.parallel = {.tp = 2}, .plan.mlp_order = (ar_mlp_order)order};
            uint64_t expected = 0;
            cr_assert_ok(grads_as(&r[order], names[i], &run, out));
            if (is_block(names[i]))
                continue;
            ar_config c;
            snprintf(folder, sizeof folder, "%s/%s", TEST_GOLDEN_DIR, names[i]);
            cr_assert_ok(ar_config_load(&c, folder));
            ari_step_case t = {.config = &c, .run = {.parallel = {.tp = 2}, .batch = 2, .seq = 32}};
            cr_assert_ok(ari_plan_add_mlp_order(&t.run.plan, c.arch, (ar_mlp_order)order));
            cr_assert_ok(ari_bytes_predict(&expected, &t));
            cr_expect_eq(r[order].bytes, expected, "%s, order %d: %zu bytes, predicted %zu", names[i], order,
                         (size_t)r[order].bytes, (size_t)expected);
        }
        cr_expect_str_eq(r[0].outputs_hash, r[1].outputs_hash);
        cr_expect_lt(r[0].bytes, r[1].bytes, "%s: the order changed nothing", names[i]);
    }
}

/* Nothing is written. */
Test(golden, layouts_that_do_not_divide_are_refused_by_name)
{
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        ar_grads_result r;
        char out[64];
        make_folder(out);
        const ar_status st = grads_of(&r, refused[i].name, refused[i].tp, AR_SIM_DIRECT, out);
        cr_expect_eq(st, AR_ERR_INDIVISIBLE, "%s, tp=%d: %s %s", refused[i].name, refused[i].tp, ar_status_name(st),
                     ar_error_message());
        cr_expect(error_says(refused[i].says), "%s, tp=%d: no %s in \"%s\"", refused[i].name, refused[i].tp,
                  refused[i].says, ar_error_message());
        cr_expect_eq(rmdir(out), 0);
    }
}
