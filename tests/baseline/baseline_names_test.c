/* SPDX-License-Identifier: Apache-2.0 */
/* What a run emits, in which order, and fresh weights. */
#include "tests/baseline/support.h"

#include "ref/numerics/philox.h"
#include "support/together.h"
#include "tests/support/tensor_lists.h"

/* A name, pass and shape; finite, and not all zero. */
static void check_tensor(const taped *a, ar_number_mode mode, const listed_tensor *want)
{
    size_t zeros = 0;
    cr_assert(strcmp(a->name, want->name) == 0 && a->pass == want->pass, "%s:%c, expected %s:%c", a->name, a->pass,
              want->name, want->pass);
    cr_assert_eq(a->ndim, want->ndim, "%s has %d dimensions", a->name, a->ndim);
    for (int d = 0; d < a->ndim; d++)
        cr_assert_eq(a->shape[d], want->shape[d], "%s: dimension %d is %zu", a->name, d, a->shape[d]);
    for (size_t k = 0; k < a->count; k++) {
        cr_assert(isfinite(a->values[k]), "%s[%zu] is not finite", a->name, k);
        cr_assert(mode == AR_MODE_F64 || (double)(float)a->values[k] == a->values[k], "%s[%zu]: more than fp32",
                  a->name, k);
        zeros += a->values[k] == 0.0;
    }
    cr_assert(zeros < a->count, "%s:%c is all zero", a->name, a->pass);
}

static void check_list(const tensor_list *list, ar_number_mode mode)
{
    SCOPED(tape_clear) tape t = {0};
    ar_config c = tiny_config(list->arch, 1);
    const ar_batch batch = tiny_batch();
    c.experts = list->experts;
    const double loss = run_or_fail(&c, mode, &batch, &t);
    listed_tensor want = {.list = list};
    size_t n = 0;
    for (; n < t.n && next_listed(&want); n++)
        check_tensor(&t.at[n], mode, &want);
    cr_assert(n == list->tensors && t.n == n && !next_listed(&want), "%zu tensors, %zu in the list", t.n, n);
    cr_assert_eq(tape_find(&t, "loss", 'f')->values[0], loss);
}

CLAIM(each_family_emits_its_list_in_every_mode)
{
    for (size_t i = 0; i < TENSOR_LISTS; i++) {
        check_list(&tensor_lists[i], AR_MODE_EXACT);
        check_list(&tensor_lists[i], AR_MODE_FP32);
        check_list(&tensor_lists[i], AR_MODE_F64);
    }
}

CLAIM(tied_llama_has_no_head_weight)
{
    SCOPED(tape_clear) tape t = {0};
    ar_config c = tiny_config(AR_ARCH_LLAMA, 1);
    const ar_batch batch = tiny_batch();
    c.tied = true;
    run_or_fail(&c, AR_MODE_EXACT, &batch, &t);
    cr_assert_eq(t.n, tensor_lists[0].tensors - 2);
    for (size_t i = 0; i < t.n; i++)
        cr_assert_neq(strcmp(t.at[i].name, "lm_head.weight"), 0);
}

CLAIM(forward_only_stops_after_the_loss)
{
    SCOPED(tape_clear) tape t = {0};
    const ar_config c = tiny_config(AR_ARCH_LLAMA, 1);
    const ar_batch batch = tiny_batch();
    const ar_baseline_options o = {.seed = 7, .forward_only = true, .emit = tape_emit, .emit_user = &t};
    double loss = NAN;
    cr_assert_ok(ar_baseline_run(&c, &o, &batch, &loss));
    cr_assert_str_eq(t.at[t.n - 1].name, "loss");
    cr_assert_eq(t.at[t.n - 1].values[0], loss);
}

/* The block inside a one-layer stack and the block alone, fed with its input and the gradient of its output. */
CLAIM(block_alone_emits_what_it_emits_inside_a_model)
{
    SCOPED(tape_clear) tape model = {0}, block = {0};
    const ar_config c = tiny_config(AR_ARCH_STACK, 1);
    const ar_batch batch = tiny_batch();
    float x[3 * 5 * 8], dy[3 * 5 * 8];
    run_or_fail(&c, AR_MODE_EXACT, &batch, &model);
    for (size_t i = 0; i < sizeof x / sizeof *x; i++) {
        x[i] = (float)tape_find(&model, "embed", 'f')->values[i];
        dy[i] = 1.0F;
    }
    const ar_baseline_options o = {.seed = 7, .emit = tape_emit, .emit_user = &block};
    cr_assert_ok(ar_baseline_block(&c, &o, &batch, x, dy));
    cr_assert_eq(block.n, tensor_lists[2].tensors - 4); /* without embed three times and loss */
    for (size_t i = 0; i < block.n; i++) {
        const taped *a = &block.at[i], *b = tape_find(&model, a->name, a->pass);
        cr_assert_eq(memcmp(a->values, b->values, a->count * sizeof *a->values), 0, "%s:%c differs", a->name, a->pass);
    }
}

/* --- fresh weights: numerics.md section 5 -------------------------------------------------------------------- */

CLAIM(fresh_matrix_is_xavier_normal_with_the_full_fans)
{
    SCOPED(tape_clear) tape t = {0};
    const ar_config c = tiny_config(AR_ARCH_LLAMA, 1);
    const ar_batch batch = tiny_batch();
    const char *name = "model.layers.0.self_attn.k_proj.weight";
    run_or_fail(&c, AR_MODE_F64, &batch, &t);
    const taped *a = tape_find(&t, name, 'i');
    for (size_t i = 0; i < a->count; i++) /* [8 out, 8 in] */
        cr_assert_eq(a->values[i], (double)ari_random_normal(ari_stream_key(7, name), i, sqrt(2.0 / (8 + 8))));
    a = tape_find(&t, "model.embed_tokens.weight", 'i');
    for (size_t i = 0; i < a->count; i++)
        cr_assert_eq(a->values[i], (double)ari_random_normal(ari_stream_key(7, a->name), i, 0.3));
    a = tape_find(&t, "model.norm.weight", 'i');
    for (size_t i = 0; i < a->count; i++)
        cr_assert_eq(a->values[i], 1.0);
}

CLAIM(fresh_gpt2_counts_the_inputs_of_a_transposed_weight)
{
    SCOPED(tape_clear) tape t = {0};
    const ar_config c = tiny_config(AR_ARCH_GPT2, 1);
    const ar_batch batch = tiny_batch();
    run_or_fail(&c, AR_MODE_EXACT, &batch, &t);
    const taped *a = tape_find(&t, "transformer.h.0.mlp.c_proj.weight", 'i'); /* [12 in, 8 out] */
    for (size_t i = 0; i < a->count; i++)
        cr_assert_eq(a->values[i], (double)ari_random_normal(ari_stream_key(7, a->name), i, sqrt(2.0 / (12 + 8))));
    a = tape_find(&t, "transformer.h.0.mlp.c_proj.bias", 'i');
    for (size_t i = 0; i < a->count; i++)
        cr_assert_eq(a->values[i], (double)ari_random_uniform(ari_stream_key(7, a->name), i, 1.0 / sqrt(12.0)));
    a = tape_find(&t, "transformer.h.0.ln_2.bias", 'i');
    for (size_t i = 0; i < a->count; i++)
        cr_assert_eq(a->values[i], (double)ari_random_uniform(ari_stream_key(7, a->name), i, 1.0 / sqrt(8.0)));
}

EVERY_CLAIM(baseline_names)
