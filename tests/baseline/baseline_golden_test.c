/* SPDX-License-Identifier: Apache-2.0 */
/* The baseline against tensors that PyTorch computed. The models' come from fp32 on a CPU, so the allowed difference is
 * that of fp32: a tensor of such a model passes through D < 40 contractions and norms, each with at most 256 terms
 * whose rounding errors, of either sign, add up to about sqrt(256)*2^-24 of the largest element; their sum in
 * quadrature is below sqrt(40)*16*2^-24 = 6.1e-6. The blocks' were computed in binary64 from fp32 inputs. */
#include "tests/baseline/support.h"

#include "anyrank/config.h"

#define FP32_BOUND 6.1e-6

static double worse(double worst, const taped *a, const ar_st_entry *expected, const char *mode)
{
    const double error = worst_error(a, expected);
    cr_expect(error < FP32_BOUND, "%s, %s:%c: %.3g of the largest element", mode, a->name, a->pass, error);
    return fmax(worst, error);
}

/* Hugging Face's hidden_states.i: the input of block i; the last one, the final norm's output. */
static double check_hidden(const ar_config *c, const tape *t, const ar_st_file *outputs, const char *mode)
{
    const bool llama = c->arch == AR_ARCH_LLAMA;
    double worst = 0.0;
    for (size_t i = 0; i <= c->layers; i++) {
        char name[64];
        snprintf(name, sizeof name, "hidden_states.%zu", i);
        const ar_st_entry *expected = ar_st_find(outputs, name);
        cr_assert_not_null(expected);
        const taped *a = i == 0          ? tape_find(t, llama ? "model.embed_tokens" : "transformer.drop", 'f')
                         : i < c->layers ? tape_find_layer(t, llama ? "model.layers.#" : "transformer.h.#", i - 1, 'f')
                                         : tape_find(t, llama ? "model.norm" : "transformer.ln_f", 'f');
        worst = worse(worst, a, expected, mode);
    }
    return worst;
}

static void check_model(const char *folder, ar_number_mode mode, const char *mode_name)
{
    char path[600];
    static tape t;
    int64_t ids[256];
    ar_config c;
    snprintf(path, sizeof path, "%s/%s", TEST_GOLDEN_DIR, folder);
    cr_assert_eq(ar_config_load(&c, path), AR_OK, "%s", ar_error_message());
    ar_st_file *weights = open_golden(folder, "model.safetensors"),
               *batch_file = open_golden(folder, "batch.safetensors");
    ar_st_file *outputs = open_golden(folder, "outputs.safetensors"), *grads = open_golden(folder, "grads.safetensors");
    const ar_st_entry *input = ar_st_find(batch_file, "input_ids");
    cr_assert(input != NULL && input->ndim == 2 && input->count <= 256);
    cr_assert_eq(ar_st_to_i64(input, ids), AR_OK);
    given g = {.file = weights};
    const ar_batch batch = {.batch = input->shape[0], .seq = input->shape[1], .input_ids = ids};
    const ar_baseline_options o = {
        .mode = mode, .weights = given_weight, .weights_user = &g, .emit = tape_emit, .emit_user = &t};
    double loss = NAN;
    cr_assert_eq(ar_baseline_run(&c, &o, &batch, &loss), AR_OK, "%s", ar_error_message());

    cr_assert_eq(tape_find(&t, "loss", 'f')->values[0], loss);
    double worst = worse(0.0, tape_find(&t, "loss", 'f'), ar_st_find(outputs, "loss"), mode_name);
    worst = worse(worst, tape_find(&t, "lm_head", 'f'), ar_st_find(outputs, "logits"), mode_name);
    worst = fmax(worst, check_hidden(&c, &t, outputs, mode_name));
    for (size_t i = 0; i < ar_st_count(grads); i++)
        worst = worse(worst, tape_find(&t, ar_st_at(grads, i)->name, 'g'), ar_st_at(grads, i), mode_name);
    fprintf(stderr, "%s, %s: worst error %.3g of the largest element of a tensor (allowed %.3g)\n", folder, mode_name,
            worst, FP32_BOUND);
    size_t gradients = 0;
    for (size_t i = 0; i < t.n; i++)
        gradients += t.at[i].pass == 'g';
    cr_assert_eq(gradients, ar_st_count(grads), "%zu gradients emitted, %zu in the file", gradients,
                 ar_st_count(grads));
    tape_clear(&t);
    given_clear(&g);
    ar_st_close(weights);
    ar_st_close(batch_file);
    ar_st_close(outputs);
    ar_st_close(grads);
}

TestSuite(baseline_golden, .timeout = 300);

Test(baseline_golden, gpt2_tiny_agrees_with_pytorch_in_every_mode)
{
    check_model("gpt2-tiny", AR_MODE_F64, "binary64");
    check_model("gpt2-tiny", AR_MODE_EXACT, "exact");
    check_model("gpt2-tiny", AR_MODE_FP32, "fp32");
}

Test(baseline_golden, llama_gqa_tiny_agrees_with_pytorch_in_every_mode)
{
    check_model("llama-gqa-tiny", AR_MODE_F64, "binary64");
    check_model("llama-gqa-tiny", AR_MODE_EXACT, "exact");
    check_model("llama-gqa-tiny", AR_MODE_FP32, "fp32");
}

Test(baseline_golden, llama_mqa_tied_tiny_agrees_with_pytorch_in_every_mode)
{
    check_model("llama-mqa-tied-tiny", AR_MODE_F64, "binary64");
    check_model("llama-mqa-tied-tiny", AR_MODE_EXACT, "exact");
    check_model("llama-mqa-tied-tiny", AR_MODE_FP32, "fp32");
}

/* Biases of q, k and v, sliding windows, heads wider and narrower than hidden / heads, scaled rotary frequencies:
 * tests/golden/make_golden.py says which has what. */
static const char *const others[] = {"qwen2-tiny",          "qwen2-window-tiny", "qwen2-layers-tiny",
                                     "mistral-window-tiny", "llama3-rope-tiny",  "llama-bias-headdim-tiny"};

Test(baseline_golden, other_models_agree_with_pytorch_in_every_mode)
{
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        check_model(others[i], AR_MODE_F64, "binary64");
        check_model(others[i], AR_MODE_EXACT, "exact");
        check_model(others[i], AR_MODE_FP32, "fp32");
    }
}
