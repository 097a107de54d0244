/* SPDX-License-Identifier: Apache-2.0 */
/* The baseline against tensors that PyTorch computed. The models' come from fp32 on a CPU, so the allowed difference is
 * that of fp32: a tensor of such a model passes through D < 40 contractions and norms, each with at most 256 terms
 * whose rounding errors, of either sign, add up to about sqrt(256)*2^-24 of the largest element; their sum in
 * quadrature is below sqrt(40)*16*2^-24 = 6.1e-6. Some models' were computed in fp64 too, where 2^-53 takes the place of
 * 2^-24. The blocks' were computed in binary64 from fp32 inputs. The embedding's output is one product or one sum of two
 * numbers, rounded once: in fp32 it is PyTorch's to the bit. */
#include "tests/baseline/support.h"

#include "ref/io/safetensors_private.h"
#include "support/together.h"
#include "tests/support/golden_loss.h"

#define FP32_BOUND 6.1e-6
#define FP64_BOUND (FP32_BOUND * 0x1p-29)

static double worse(double worst, const taped *a, const ar_st_entry *expected, const char *mode)
{
    const double error = worst_error(a, expected), bound = expected->dtype == AR_F64 ? FP64_BOUND : FP32_BOUND;
    cr_expect(error < bound, "%s, %s:%c: %.3g of the largest element", mode, a->name, a->pass, error);
    return fmax(worst, error);
}

/* Hugging Face's hidden_states.i: the input of block i; the last one, the final norm's output. */
static double check_hidden(const ar_config *c, const tape *t, const ar_st_file *outputs, const char *mode, bool rounded)
{
    const char *const names[3][3] = {{"model.embed_tokens", "model.layers.#", "model.norm"},
                                     {"transformer.drop", "transformer.h.#", "transformer.ln_f"},
                                     {"gpt_neox.embed_in", "gpt_neox.layers.#", "gpt_neox.final_layer_norm"}};
    const char *const *at = names[c->arch == AR_ARCH_GPT2 ? 1 : c->arch == AR_ARCH_GPT_NEOX ? 2 : 0];
    double worst = 0.0;
    for (size_t i = 0; i <= c->layers; i++) {
        char name[64];
        snprintf(name, sizeof name, "hidden_states.%zu", i);
        const ar_st_entry *expected = ari_st_find(outputs, name);
        cr_assert_not_null(expected);
        const taped *a = i == 0          ? tape_find(t, at[0], 'f')
                         : i < c->layers ? tape_find_layer(t, at[1], i - 1, 'f')
                                         : tape_find(t, at[2], 'f');
        worst = worse(worst, a, expected, mode);
        cr_expect(i > 0 || !rounded || worst_error(a, expected) == 0.0, "%s, %s: not PyTorch's bits", mode, a->name);
    }
    return worst;
}

/* What a file holds beside input_ids; the product's own reader has no part in what the baseline is given. */
typedef struct batch_values {
    int64_t ids[256], labels[256], positions[256], seen[256], bounds[256];
    int32_t documents[256];
    uint8_t padding[256];
    float additive[2048];
} batch_values;

static bool read_integers(int64_t values[256], const ar_st_file *f, const char *name)
{
    const ar_st_entry *e = ari_st_find(f, name);
    if (e == NULL)
        return false;
    cr_assert(e->ndim == 2 && e->count <= 256, "%s", name);
    cr_assert_eq(ari_st_to_i64(e, values), AR_OK, "%s: %s", name, ar_error_message());
    return true;
}

static void read_mask(batch_values *v, ar_batch *batch, const ar_st_file *f)
{
    const ar_st_entry *e = ari_st_find(f, "attention_mask");
    if (e != NULL && e->ndim == 4) {
        cr_assert_leq(e->count, sizeof v->additive / sizeof *v->additive);
        cr_assert_ok(ari_st_to_f32(e, v->additive));
        batch->additive_mask = v->additive;
        batch->mask_batch = e->shape[0];
        batch->mask_heads = e->shape[1];
    } else if (read_integers(v->seen, f, "attention_mask")) {
        for (size_t i = 0; i < e->count; i++)
            v->padding[i] = (uint8_t)v->seen[i];
        batch->padding_mask = v->padding;
    }
}

/* Where the documents of a row begin, and where the last ends: [documents + 1], or of each row [rows, documents + 1]. */
static void read_documents(batch_values *v, ar_batch *batch, const ar_st_file *f)
{
    const ar_st_entry *e = ari_st_find(f, "cu_seqlens");
    if (e == NULL)
        return;
    cr_assert(e->count <= 256 && e->count % batch->batch == 0 && ari_st_to_i64(e, v->bounds) == AR_OK);
    const size_t n = e->count / batch->batch;
    for (size_t row = 0; row < batch->batch; row++)
        for (size_t i = 0; i + 1 < n; i++)
            for (int64_t at = v->bounds[row * n + i]; at < v->bounds[row * n + i + 1]; at++)
                v->documents[row * batch->seq + (size_t)at] = (int32_t)i;
    batch->documents = v->documents;
}

/* Without a mask a position that is not the one before and 1 begins a document, in transformers. */
static void read_positions(batch_values *v, ar_batch *batch, const ar_st_file *f)
{
    const ar_st_entry *e = ari_st_find(f, "position_ids");
    const size_t s = batch->seq, n = batch->batch * s;
    if (!read_integers(v->positions, f, "position_ids"))
        return;
    for (size_t i = e->count; i < n; i++) /* one row for all samples */
        v->positions[i] = v->positions[i - s];
    batch->position_ids = v->positions;
    if (ari_st_find(f, "attention_mask") != NULL || ari_st_find(f, "cu_seqlens") != NULL)
        return;
    for (size_t i = 0; i < n; i++)
        v->documents[i] = i % s == 0 ? 0 : v->documents[i - 1] + (v->positions[i] - v->positions[i - 1] != 1);
    batch->documents = v->documents;
    batch->targets_cross = true;
}

static ar_batch read_batch(batch_values *v, const ar_st_file *f)
{
    cr_assert(read_integers(v->ids, f, "input_ids"));
    const ar_st_entry *ids = ari_st_find(f, "input_ids");
    ar_batch batch = {.batch = ids->shape[0], .seq = ids->shape[1], .input_ids = v->ids};
    if (read_integers(v->labels, f, "labels"))
        batch.labels = v->labels;
    read_positions(v, &batch, f);
    read_mask(v, &batch, f);
    read_documents(v, &batch, f);
    return batch;
}

/* suffix: of the two files of what PyTorch computed; "64": in fp64. */
static void check_against(const char *folder, ar_number_mode mode, const char *mode_name, const char *suffix)
{
    char outputs_file[40], grads_file[40];
    char path[600];
    SCOPED(tape_clear) tape t = {0};
    static batch_values values;
    ar_config c;
    snprintf(path, sizeof path, "%s/%s", TEST_GOLDEN_DIR, folder);
    cr_assert_ok(ar_config_load(&c, path));
    snprintf(outputs_file, sizeof outputs_file, "outputs%s.safetensors", suffix);
    snprintf(grads_file, sizeof grads_file, "grads%s.safetensors", suffix);
    /* Where files have all experts of a layer in one tensor, which only the product takes apart: the same by itself. */
    const bool stacked = strstr(folder, "gpt-oss") != NULL;
    OWNED(ari_st_close)
    ar_st_file *weights = open_golden(folder, stacked ? "apart.safetensors" : "model.safetensors"),
               *batch_file = open_golden(folder, "batch.safetensors"), *outputs = open_golden(folder, outputs_file),
               *grads = open_golden(folder, grads_file);
    SCOPED(given_clear) given g = {.file = weights};
    const ar_batch batch = read_batch(&values, batch_file);
    const ar_baseline_options o = {.mode = mode,
                                   .weights = given_weight,
                                   .weights_user = &g,
                                   .loss = golden_loss(folder),
                                   .emit = tape_emit,
                                   .emit_user = &t};
    double loss = NAN;
    cr_assert_ok(ar_baseline_run(&c, &o, &batch, &loss));

    cr_assert_eq(tape_find(&t, "loss", 'f')->values[0], loss);
    double worst = worse(0.0, tape_find(&t, "loss", 'f'), ari_st_find(outputs, "loss"), mode_name);
    worst = worse(worst,
                  tape_find(&t,
                            c.logit_cap > 0.0     ? "lm_head.capped"
                            : c.logit_scale > 0.0 ? "lm_head.scaled"
                                                  : "lm_head",
                            'f'),
                  ari_st_find(outputs, "logits"), mode_name);
    worst = fmax(worst, check_hidden(&c, &t, outputs, mode_name, mode != AR_MODE_F64));
    for (size_t i = 0; i < ari_st_tensor_count(grads); i++)
        worst = worse(worst, tape_find(&t, ari_st_at(grads, i)->name, 'g'), ari_st_at(grads, i), mode_name);
    fprintf(stderr, "%s, %s: worst error %.3g of the largest element of a tensor (allowed %.3g)\n", folder, mode_name,
            worst, suffix[0] != '\0' ? FP64_BOUND : FP32_BOUND);
    size_t gradients = 0;
    for (size_t i = 0; i < t.n; i++)
        gradients += t.at[i].pass == 'g';
    cr_assert_eq(gradients, ari_st_tensor_count(grads), "%zu gradients emitted, %zu in the file", gradients,
                 ari_st_tensor_count(grads));
}

/* In every number mode. names: of folders, with spaces between. */
static void check_models(const char *names, const char *suffix)
{
    char *list = strdup(names), *rest = list;
    for (char *folder; (folder = strsep(&rest, " "));) {
        check_against(folder, AR_MODE_F64, "binary64", suffix);
        if (suffix[0] != '\0')
            continue;
        check_against(folder, AR_MODE_EXACT, "exact", suffix);
        check_against(folder, AR_MODE_FP32, "fp32", suffix);
    }
    free(list);
}

/* Biases of q, k and v, sliding windows, heads wider and narrower than hidden / heads, scaled rotary frequencies:
 * tests/golden/make_golden.py says which has what. */
CLAIM(models_agree_with_pytorch_in_every_mode)
{
    check_models(
        "gpt2-tiny llama-gqa-tiny llama-mqa-tied-tiny qwen2-tiny qwen2-window-tiny qwen2-layers-tiny "
        "mistral-window-tiny llama3-rope-tiny llama-bias-headdim-tiny llama-dynamic-tiny qwen2-yarn-tiny "
        "mistral-yarn-mscale-tiny llama-longrope-tiny llama-longrope-long-tiny qwen3-tiny olmo2-tiny gemma-tiny "
        "gemma2-tiny gemma3-tiny phi3-tiny phi3-longrope-tiny phi3-longrope-short-tiny",
        "");
}

CLAIM(models_that_say_their_sizes_alone_agree_with_pytorch_in_every_mode)
{
    check_models(
        "llama-defaults-tiny mistral-defaults-tiny qwen2-defaults-tiny qwen3-defaults-tiny olmo2-defaults-tiny "
        "gemma-defaults-tiny gemma2-defaults-tiny gemma3-defaults-tiny phi3-defaults-tiny gpt2-defaults-tiny",
        "");
}

/* Layers without rotary positions, two rotations, LayerNorm with gated MLPs, part of a head turned, a plain MLP. */
CLAIM(variants_of_llama_agree_with_pytorch_in_every_mode)
{
    const char *const names = "variants/ministral-tiny variants/olmo3-tiny variants/exaone4-tiny variants/smollm3-tiny "
                              "variants/smollm3-window-tiny variants/seed-oss-tiny variants/stablelm-tiny "
                              "variants/starcoder2-tiny variants/granite-tiny variants/glm4-tiny "
                              "variants/glm-tiny variants/ernie4-5-tiny variants/cohere-tiny variants/cohere2-tiny "
                              "variants/stablelm-parallel-tiny variants/gpt-neox-tiny";
    check_models(names, "");
    check_models(names, "64");
}

/* One and several experts a token, experts with no token and with all of them, weights normalised and not, a shared
 * expert, layers without experts, padding. In fp64 too: a route that is not PyTorch's would be far off. */
CLAIM(models_with_experts_agree_with_pytorch_in_every_mode)
{
    const char *const names = "experts/mixtral-tiny experts/mixtral-padding-tiny experts/mixtral-defaults-tiny "
                              "experts/qwen2moe-tiny experts/qwen3moe-tiny experts/olmoe-tiny "
                              "experts/glm4moe-tiny experts/dots1-tiny experts/deepseek-v3-tiny "
                              "experts/deepseek-v3-plain-tiny experts/deepseek-v2-tiny experts/deepseek-v2-lite-tiny "
                              "experts/gpt-oss-tiny experts/gpt-oss-defaults-tiny experts/deepseek-v3-mtp-tiny "
                              "experts/glm4moelite-tiny experts/minimaxm2-tiny";
    check_models(names, "");
    check_models(names, "64");
}

/* The balance of all layers as transformers has it, with padding and with layers without experts; of a sequence, of the
 * batch, and the z-loss, by PyTorch from the formulas. */
CLAIM(losses_of_routers_agree_with_pytorch_in_every_mode)
{
    const char *const names =
        "experts/mixtral-balance-padding-tiny experts/qwen3moe-balance-tiny "
        "experts/mixtral-sequence-padding-tiny experts/olmoe-batch-tiny experts/gpt-oss-padding-tiny";
    check_models(names, "");
    check_models(names, "64");
}

CLAIM(batches_with_labels_masks_and_positions_agree_with_pytorch_in_every_mode)
{
    check_models(
        "gpt2-padding-tiny llama-padding-tiny llama-padding-labels-tiny gpt2-additive-tiny llama-additive-tiny "
        "gpt2-labels-tiny llama-labels-tiny gpt2-documents-tiny llama-documents-tiny gpt2-positions-tiny "
        "llama-positions-tiny gpt2-flattened-tiny",
        "");
}

/* position_ids, a block-diagonal mask and labels in PyTorch; documents here. */
CLAIM(packed_documents_agree_with_pytorch_in_every_mode_and_in_fp64_to_its_rounding)
{
    static const char packed[] = "llama-packed-tiny gpt2-packed-tiny gpt2-packed-ends-tiny llama-mtp-packed-tiny";
    check_models(packed, "");
    check_models(packed, "64");
}

CLAIM(label_smoothing_and_z_loss_agree_with_pytorch_in_every_mode)
{
    static const char *const smoothed[] = {"llama-smoothing-tiny", "gpt2-z-loss-tiny", "gpt2-smoothing-z-loss-tiny"};
    for (size_t i = 0; i < sizeof smoothed / sizeof *smoothed; i++) {
        const ar_loss_options loss = golden_loss(smoothed[i]);
        cr_assert(loss.label_smoothing > 0.0 || loss.z_loss > 0.0, "%s says no loss of its own", smoothed[i]);
        check_models(smoothed[i], "");
    }
}

EVERY_CLAIM(baseline_golden)
