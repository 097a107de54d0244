/* SPDX-License-Identifier: Apache-2.0 */
/* ar_grads against tensors that others computed, at every number of ranks that the heads allow. The models'
 * come from PyTorch in fp32 on a CPU. The blocks' were computed in binary64 from fp32 inputs; a block's tensor passes
 * through D <= 20 contractions, norms and sums (10 forward, as many back) of at most K = 384 terms, whose rounding
 * errors of 2^-24 of the largest element, of either sign, add up to about sqrt(D*K)*2^-24. A model's embedding is rounded
 * once: PyTorch's bits. */
#include "tests/verify/support.h"

#include "anyrank/grads.h"
#include "anyrank/safetensors.h"
#include "sim/plan/bytes.h"
#include "tests/support/golden_loss.h"

#define MODEL_BOUND 1e-5
#define BLOCK_BOUND 5.23e-6 /* sqrt(20 * 384) * 2^-24 */

enum { MOST_LAYOUTS = 4 };

typedef struct golden_case {
    const char *name;
    bool block;
    int tp[MOST_LAYOUTS]; /* 0 ends */
} golden_case;

static const golden_case cases[] = {
    {"gpt2-tiny", false, {1, 2, 4}},
    {"llama-gqa-tiny", false, {1, 2, 4, 8}},
    {"llama-mqa-tied-tiny", false, {1, 2, 4}},
    {"qwen2-tiny", false, {1, 2, 4}},
    {"qwen2-window-tiny", false, {1, 2, 4}},
    {"qwen2-layers-tiny", false, {1, 2}},
    {"mistral-window-tiny", false, {1, 2, 4}},
    {"llama3-rope-tiny", false, {1, 2}},
    {"llama-bias-headdim-tiny", false, {1, 2, 4}},
    {"llama-dynamic-tiny", false, {1, 2}},
    {"qwen2-yarn-tiny", false, {1, 2}},
    {"mistral-yarn-mscale-tiny", false, {1, 2, 4}},
    {"llama-longrope-tiny", false, {1, 2}},
    {"llama-longrope-long-tiny", false, {1, 2}},
    {"qwen3-tiny", false, {1, 2, 4}},
    {"olmo2-tiny", false, {1, 2, 4}},
    {"gemma-tiny", false, {1, 2, 4}},
    {"gemma2-tiny", false, {1, 2, 4}},
    {"gemma3-tiny", false, {1, 2, 4}},
    {"phi3-tiny", false, {1, 2}},
    {"phi3-longrope-tiny", false, {1, 2}},
    {"phi3-longrope-short-tiny", false, {1, 2}},
    /* Files of sizes alone. */
    {"llama-defaults-tiny", false, {1, 4}},
    {"mistral-defaults-tiny", false, {1, 8}},
    {"qwen2-defaults-tiny", false, {1, 4}},
    {"qwen3-defaults-tiny", false, {1, 2}},
    {"olmo2-defaults-tiny", false, {1, 4}},
    {"gemma-defaults-tiny", false, {1, 2}},
    {"gemma2-defaults-tiny", false, {1, 4}},
    {"gemma3-defaults-tiny", false, {1, 2}},
    {"phi3-defaults-tiny", false, {1, 4}},
    {"gpt2-defaults-tiny", false, {1, 4}},
    /* Batches with labels, masks and positions: tests/golden/make_golden.py says which has what. */
    {"gpt2-padding-tiny", false, {1, 2, 4}},
    {"llama-padding-tiny", false, {1, 2, 4}},
    {"llama-padding-labels-tiny", false, {1, 2, 4}},
    {"gpt2-additive-tiny", false, {1, 2, 4}},
    {"llama-additive-tiny", false, {1, 2, 4}},
    {"gpt2-labels-tiny", false, {1, 2, 4}},
    {"llama-labels-tiny", false, {1, 2, 4}},
    {"gpt2-documents-tiny", false, {1, 2, 4}},
    {"llama-documents-tiny", false, {1, 2, 4}},
    {"gpt2-positions-tiny", false, {1, 2, 4}},
    {"llama-positions-tiny", false, {1, 2, 4}},
    {"gpt2-flattened-tiny", false, {1, 2, 4}},
    {"llama-packed-tiny", false, {1, 2, 4}},
    {"gpt2-packed-tiny", false, {1, 2, 4}},
    {"gpt2-packed-ends-tiny", false, {1, 4}},
    /* Another loss, which provenance.json names. */
    {"llama-smoothing-tiny", false, {1, 2, 4}},
    {"gpt2-z-loss-tiny", false, {1, 2, 4}},
    {"gpt2-smoothing-z-loss-tiny", false, {1, 2, 4}},
    {"block-mha", true, {1, 2, 4}},
    {"block-gqa", true, {1, 3, 6, 12}},
    {"block-mqa-bidirectional", true, {1, 2}},
};
enum { CASES = sizeof cases / sizeof *cases };

/* Layouts that would need part of a head, and the thing that stands in the way. */
static const struct {
    const char *name;
    bool block;
    int tp;
    const char *says;
} refused[] = {
    {"phi3-tiny", false, 4, "KV heads"},
    {"llama-gqa-tiny", false, 3, "query heads"},
    {"block-gqa", true, 2, "KV heads"},
    {"block-gqa", true, 4, "KV heads"},
    {"gpt2-tiny", false, 3, "query heads"},
    {"block-mha", true, 3, "query heads"},
    {"llama-mqa-tied-tiny", false, 3, "query heads"},
};

/* run: layout, numerics, algorithm and order. */
static ar_status grads_as(ar_grads_result *result, const char *name, bool block, const ar_run *run, const char *out)
{
    char folder[600], input[700];
    snprintf(folder, sizeof folder, "%s/%s", TEST_GOLDEN_DIR, name);
    snprintf(input, sizeof input, "%s/batch.safetensors", folder);
    ar_grads_options o = {.run = *run, .block = block ? folder : NULL, .input = block ? NULL : input, .out = out};
    o.run.model = block ? NULL : folder;
    o.run.loss = golden_loss(name);
    o.run.threads = 1;
    return ar_grads(result, &o);
}

static ar_status grads_in_order(ar_grads_result *result, const char *name, bool block, int tp,
                                ar_sim_algorithm algorithm, ar_mlp_order order, const char *out)
{
    const ar_run run = {.parallel = {.tp = tp}, .sim.algorithm = algorithm, .plan.mlp_order = order};
    return grads_as(result, name, block, &run, out);
}

static ar_status grads_of(ar_grads_result *result, const char *name, bool block, int tp, ar_sim_algorithm algorithm,
                          const char *out)
{
    return grads_in_order(result, name, block, tp, algorithm, AR_MLP_COLUMN_ROW, out);
}

static ar_st_file *open_in(const char *folder, const char *file)
{
    char path[700];
    ar_st_file *f = NULL;
    snprintf(path, sizeof path, "%s/%s", folder, file);
    cr_assert_ok(ar_st_open(&f, path));
    return f;
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
    cr_assert(largest > 0.0, "%s is all zero", expected->name);
    return difference / largest;
}

/* The worst of a file; both files hold the same names. */
static double worst_of_file(const char *out, const char *file, const char *golden, const char *golden_file,
                            double bound)
{
    double worst = 0.0;
    OWNED(ar_st_close) ar_st_file *actual = open_in(out, file), *expected = open_in(golden, golden_file);
    cr_expect_eq(ar_st_count(actual), ar_st_count(expected), "%s", golden);
    for (size_t i = 0; i < ar_st_count(expected); i++) {
        const ar_st_entry *e = ar_st_at(expected, i), *a = ar_st_find(actual, e->name);
        cr_assert_not_null(a, "%s: no tensor %s", file, e->name);
        const double error = relative_error(a, e), allowed = strcmp(e->name, "hidden_states.0") == 0 ? 0.0 : bound;
        cr_expect(error <= allowed, "%s, %s: %.3g of the largest element, allowed %.3g", golden, e->name, error,
                  allowed);
        worst = fmax(worst, error);
    }
    return worst;
}

static char *bytes_of(const char *path, size_t *n)
{
    FILE *f = fopen(path, "rb");
    cr_assert_not_null(f, "%s", path);
    cr_assert_eq(fseek(f, 0, SEEK_END), 0);
    *n = (size_t)ftell(f);
    rewind(f);
    char *bytes = malloc(*n + 1);
    cr_assert(bytes != NULL && fread(bytes, 1, *n, f) == *n);
    fclose(f);
    return bytes;
}

static void expect_same_file(const char *a, const char *b)
{
    size_t na = 0, nb = 0;
    OWNED(free) char *x = bytes_of(a, &na), *y = bytes_of(b, &nb);
    cr_expect(na == nb && na > 0 && memcmp(x, y, na) == 0, "%s and %s differ", a, b);
}

static void check_values(const golden_case *c, const char *out)
{
    char golden[600];
    snprintf(golden, sizeof golden, "%s/%s", TEST_GOLDEN_DIR, c->name);
    if (c->block) {
        const double worst = worst_of_file(out, "block.safetensors", golden, "expected_f64.safetensors", BLOCK_BOUND);
        fprintf(stderr, "%s: worst %.2e of the largest element of a tensor (allowed %.2e)\n", c->name, worst,
                BLOCK_BOUND);
        return;
    }
    const double outputs = worst_of_file(out, "outputs.safetensors", golden, "outputs.safetensors", MODEL_BOUND);
    const double grads = worst_of_file(out, "grads.safetensors", golden, "grads.safetensors", MODEL_BOUND);
    fprintf(stderr, "%s: worst %.2e (outputs), %.2e (gradients) of the largest element of a tensor (allowed %.0e)\n",
            c->name, outputs, grads, MODEL_BOUND);
}

Test(golden, outputs_and_gradients_agree_with_the_reference)
{
    for (size_t i = 0; i < CASES; i++) {
        char out[64];
        ar_grads_result r;
        make_folder(out);
        cr_assert_ok(grads_of(&r, cases[i].name, cases[i].block, 1, AR_SIM_DIRECT, out));
        check_values(&cases[i], out);
        remove_folder(out);
    }
}

static void expect_same_bits(const golden_case *c, int tp, ar_sim_algorithm algorithm, const char *one,
                             const ar_grads_result *expected)
{
    char out[64], a[700], b[700];
    ar_grads_result r;
    make_folder(out);
    cr_assert_ok(grads_of(&r, c->name, c->block, tp, algorithm, out));
    cr_expect_str_eq(r.outputs_hash, expected->outputs_hash, "%s, tp=%d", c->name, tp);
    cr_expect(r.loss == expected->loss && r.tensors == expected->tensors);
    static const char *const files[2][3] = {{"outputs.safetensors", "grads.safetensors", NULL},
                                            {"block.safetensors", NULL, NULL}};
    for (size_t f = 0; files[c->block][f]; f++) {
        snprintf(a, sizeof a, "%s/%s", one, files[c->block][f]);
        snprintf(b, sizeof b, "%s/%s", out, files[c->block][f]);
        expect_same_file(a, b);
        cr_expect_str_eq(r.file[f], b);
    }
    remove_folder(out);
}

Test(golden, files_are_the_same_bytes_on_any_number_of_ranks)
{
    for (size_t i = 0; i < CASES; i++) {
        const golden_case *c = &cases[i];
        char one[64];
        ar_grads_result r;
        make_folder(one);
        cr_assert_ok(grads_of(&r, c->name, c->block, 1, AR_SIM_DIRECT, one));
        for (size_t k = 0; k < MOST_LAYOUTS && c->tp[k]; k++) {
            if (!small_only() || k % 2 == 0) /* else each layout with one of them */
                expect_same_bits(c, c->tp[k], AR_SIM_DIRECT, one, &r);
            if (!small_only() || k % 2 == 1)
                expect_same_bits(c, c->tp[k], AR_SIM_RING, one, &r);
        }
        remove_folder(one);
    }
}

/* Documents of 1 to 12 tokens, cut by chunks of 1 to 14: a ring, a zigzag, heads against positions, all with tp and
 * dp. */
static const struct {
    const char *name;
    ar_parallel p;
} packed[] = {
    {"llama-packed-tiny", {.cp = 2}},
    {"llama-packed-tiny", {.cp = 14}},
    {"llama-packed-tiny", {.dp = 2, .cp = 2, .cp_inner = 2, .tp = 2}},
    {"gpt2-packed-tiny", {.cp = 7, .zigzag = true}},
    {"gpt2-flattened-tiny", {.dp = 2, .cp = 7}},
    {"gpt2-packed-tiny", {.cp = 4, .cp_inner = 2, .zigzag = true, .tp = 2}},
    {"gpt2-packed-tiny", {.cp = 2, .zigzag = true, .tp = 2, .sp = true}},
    {"gpt2-packed-ends-tiny", {.cp = 14}},
};

Test(golden, packed_documents_that_ranks_share_have_one_ranks_bits_and_pytorchs_values)
{
    for (size_t i = 0; i < sizeof packed / sizeof *packed; i++) {
        const golden_case c = {packed[i].name, false, {0}};
        char out[64], layout[96];
        ar_grads_result one, r;
        ar_run run = {.parallel = packed[i].p};
        make_folder(out);
        ar_parallel_text(layout, sizeof layout, &packed[i].p);
        cr_assert_ok(grads_of(&one, c.name, false, 1, AR_SIM_DIRECT, out));
        cr_assert_eq(grads_as(&r, c.name, false, &run, out), AR_OK, "%s: %s", layout, ar_error_message());
        cr_expect_str_eq(r.outputs_hash, one.outputs_hash, "%s, %s", c.name, layout);
        run.numerics = AR_NUMERICS_NATIVE;
        cr_assert_eq(grads_as(&r, c.name, false, &run, out), AR_OK, "%s: %s", layout, ar_error_message());
        check_values(&c, out);
        remove_folder(out);
    }
}

/* The other order of an MLP moves other bytes and gives the same bits: equal files alone would not tell that it ran. */
Test(golden, the_order_of_the_mlp_reaches_the_run)
{
    static const struct {
        const char *name;
        bool block;
    } of[] = {{"gpt2-tiny", false}, {"llama-gqa-tiny", false}, {"block-mha", true}};
    for (size_t i = 0; i < sizeof of / sizeof *of; i++) {
        char folder[600], out[64];
        ar_grads_result r[2];
        uint64_t expected[2] = {0};
        make_folder(out);
        for (int order = 0; order < 2; order++) {
            cr_assert_ok(
                grads_in_order(&r[order], of[i].name, of[i].block, 2, AR_SIM_DIRECT, (ar_mlp_order)order, out));
            if (of[i].block)
                continue;
            ar_config c;
            snprintf(folder, sizeof folder, "%s/%s", TEST_GOLDEN_DIR, of[i].name);
            cr_assert_ok(ar_config_load(&c, folder));
            ari_step_case t = {.config = &c, .run.parallel = {.tp = 2}, .run.batch = 2, .run.seq = 32};
            cr_assert_ok(ar_plan_add_mlp_order(&t.run.plan, c.arch, (ar_mlp_order)order));
            cr_assert_ok(ari_traffic_bytes(&expected[order], &t));
            cr_expect_eq(r[order].bytes, expected[order], "%s, order %d: %llu bytes, predicted %llu", of[i].name, order,
                         (unsigned long long)r[order].bytes, (unsigned long long)expected[order]);
        }
        cr_expect_str_eq(r[0].outputs_hash, r[1].outputs_hash);
        cr_expect_lt(r[0].bytes, r[1].bytes, "%s: the order changed nothing", of[i].name);
        remove_folder(out);
    }
}

Test(golden, layouts_that_do_not_divide_are_refused_by_name)
{
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        char out[64];
        ar_grads_result r;
        make_folder(out);
        const ar_status st = grads_of(&r, refused[i].name, refused[i].block, refused[i].tp, AR_SIM_DIRECT, out);
        cr_expect_eq(st, AR_ERR_INDIVISIBLE, "%s, tp=%d: %s %s", refused[i].name, refused[i].tp, ar_status_name(st),
                     ar_error_message());
        cr_expect(strstr(ar_error_message(), refused[i].says), "%s, tp=%d: no %s in \"%s\"", refused[i].name,
                  refused[i].tp, refused[i].says, ar_error_message());
        remove_folder(out); /* nothing was written */
    }
}
