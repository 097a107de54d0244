/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/config.h"
#include "ref/io/config_parts.h"
#include "ref/io/config_private.h"
#include "ref/io/file.h"
#include "ref/models/model_private.h"
#include "support/together.h"

static ar_config bundled(const char *name)
{
    char path[512];
    ar_config c;
    cr_assert_ok(ar_model_path(path, sizeof path, name));
    cr_assert_ok(ar_config_load(&c, path));
    return c;
}

/* Every tp up to 64 is legal for the one as for the other, with either split of the embedding. */
static void expect_same_layouts(const ar_config *small, const ar_config *large)
{
    SCOPED(ar_plan_fini) ar_plan by_hidden = {0};
    cr_assert_ok(
        ar_plan_add(&by_hidden, large->arch, large->arch == AR_ARCH_GPT2 ? "*wte" : "*embed_tokens", AR_STYLE_HIDDEN));
    for (int tp = 1; tp <= 64; tp++) {
        const ar_plan plain = {0};
        cr_expect_eq(ari_config_check_ranks(small, tp, &plain), ari_config_check_ranks(large, tp, &plain),
                     "%s: tp=%d: %s", small->name, tp, ar_error_message());
        cr_expect_eq(ari_config_check_ranks(small, tp, &by_hidden), ari_config_check_ranks(large, tp, &by_hidden),
                     "%s: tp=%d: %s", small->name, tp, ar_error_message());
    }
}

/* All but sizes and names. */
static void expect_same_form(const ar_config *small, const ar_config *large)
{
    ar_config like = *small;
    memcpy(like.name, large->name, sizeof like.name);
    memcpy(like.changed, large->changed, sizeof like.changed);
    memcpy(like.full_attention, large->full_attention, sizeof like.full_attention);
    like.vocab = large->vocab;
    like.hidden = large->hidden;
    like.layers = large->layers;
    like.head_dim = large->head_dim;
    like.rope.rotary_dim = large->rope.rotary_dim;
    like.ffn = large->ffn;
    like.latent = large->latent;
    like.query_scalar = large->query_scalar; /* that of a head's features */
    like.experts.ffn = large->experts.ffn;
    like.experts.shared = large->experts.shared;
    memcpy(like.dense, large->dense, sizeof like.dense);
    memcpy(like.unturned, large->unturned, sizeof like.unturned);
    like.embed_scale = large->embed_scale; /* that of the hidden size */
    cr_expect(!like.pads || like.pad_id < small->vocab);
    like.pads = large->pads; /* not of an id that is gone */
    like.pad_id = large->pad_id;
    cr_expect_arr_eq(&like, large, sizeof like, "%s", small->name);
}

CLAIM(bundled_models_are_split_as_before)
{
    static const size_t parts[] = {2, 8, 16, 32};
    for (const char *const *name = ari_model_names; *name; name++) {
        const ar_config large = bundled(*name);
        for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
            ar_config c = large;
            if (parts[i] > large.head_dim / 2)
                continue;
            cr_assert_ok(ari_config_shrink(&c, parts[i]));
            expect_same_layouts(&c, &large);
            expect_same_form(&c, &large);
        }
    }
}

/* Also where the nearest number would have other divisors: an MLP of 280 by 12 heads may have 4 in common, not 12. */
CLAIM(every_width_keeps_its_divisors)
{
    const ar_plan plain = {0};
    ar_config large = bundled("llama-3-8b");
    large.heads = large.kv_heads = 12;
    large.head_dim = 32;
    large.hidden = 12 * 32;
    for (large.ffn = 1; large.ffn <= 600; large.ffn++) {
        ar_config c = large;
        cr_assert_ok(ari_config_shrink(&c, 4));
        cr_expect(c.ffn * 4 + 4 * 4 * 12 >= large.ffn && c.ffn * 4 <= large.ffn + 4 * 4 * 12, "%zu of %zu", c.ffn,
                  large.ffn);
        for (int tp = 1; tp <= 12; tp++)
            cr_expect_eq(ari_config_check_ranks(&c, tp, &plain), ari_config_check_ranks(&large, tp, &plain),
                         "tp=%d of %zu and %zu", tp, c.ffn, large.ffn);
    }
}

/* The file of the small model, read again, is the small model. */
static void expect_same_file(const char *path, size_t n)
{
    char file[640];
    OWNED(free) unsigned char *text = NULL;
    size_t bytes = 0;
    ar_config c, again;
    snprintf(file, sizeof file, "%s/config.json", path);
    cr_assert_ok(ar_config_load(&c, path));
    cr_expect_eq(c.unknown_keys, 0, "%s: %s", path, c.unknown[0]); /* all that Hugging Face writes is known */
    cr_assert_ok(ari_file_read(&text, &bytes, file, 1 << 20));
    cr_assert_ok(ari_config_shrink(&c, n));
    cr_assert_eq(ari_config_rewrite(&text, &bytes, &c), AR_OK, "%s: %s", path, ar_error_message());
    cr_assert_ok(ar_config_parse(&again, (const char *)text, bytes, "again"));
    expect_same_form(&again, &c);
    cr_expect(again.hidden == c.hidden && again.ffn == c.ffn && again.layers == c.layers && again.vocab == c.vocab &&
                  again.head_dim == c.head_dim,
              "%s", path);
    cr_expect(again.experts.ffn == c.experts.ffn && again.experts.shared == c.experts.shared, "%s", path);
    for (size_t i = 0; i < c.layers; i++) {
        cr_expect_eq(ar_config_window(&again, i), ar_config_window(&c, i), "%s: layer %zu", path, i);
        cr_expect_eq(ar_config_has_experts(&again, i), ar_config_has_experts(&c, i), "%s: layer %zu", path, i);
    }
}

CLAIM(a_config_file_takes_the_smaller_sizes)
{
    char golden[] =
        "gpt2-tiny llama-gqa-tiny llama-mqa-tied-tiny llama3-rope-tiny qwen2-tiny qwen2-layers-tiny "
        "qwen2-window-tiny mistral-window-tiny llama-bias-headdim-tiny llama-dynamic-tiny qwen2-yarn-tiny "
        "llama-longrope-tiny qwen3-tiny olmo2-tiny gemma-tiny gemma2-tiny gemma3-tiny phi3-tiny "
        "phi3-longrope-tiny phi3-longrope-short-tiny experts/mixtral-tiny "
        "experts/qwen2moe-tiny experts/qwen3moe-tiny experts/olmoe-tiny experts/glm4moe-tiny "
        "experts/dots1-tiny experts/deepseek-v3-tiny experts/deepseek-v3-plain-tiny experts/deepseek-v2-tiny "
        "experts/deepseek-v2-lite-tiny experts/glm4moelite-tiny experts/minimaxm2-tiny experts/gpt-oss-tiny variants/ministral-tiny variants/olmo3-tiny variants/exaone4-tiny "
        "variants/stablelm-tiny variants/smollm3-tiny variants/smollm3-window-tiny variants/seed-oss-tiny variants/granite-tiny variants/glm4-tiny variants/starcoder2-tiny "
        "variants/cohere2-tiny variants/ernie4-5-tiny variants/gpt-neox-tiny";
    char path[512];
    for (const char *const *name = ari_model_names; *name; name++) {
        cr_assert_ok(ar_model_path(path, sizeof path, *name));
        expect_same_file(path, 4);
    }
    for (const char *name = strtok(golden, " "); name; name = strtok(NULL, " ")) {
        snprintf(path, sizeof path, TEST_GOLDEN_DIR "/%s", name);
        expect_same_file(path, 2);
    }
}

/* Of 40 features a quarter turns, 10; of 20 it would be 5, which are no pairs, and of 2 all turn: the smaller file says
 * another share, whichever key said it before. */
CLAIM(a_share_of_features_that_the_file_leaves_out_is_said)
{
    static const char *const models[] = {"\"stablelm\"", "\"gpt_neox\", \"rotary_pct\": 0.25",
                                         "\"minimax_m2\", \"head_dim\": 40, \"rotary_dim\": 10"};
    static const size_t by[] = {2, 20};
    for (size_t i = 0; i < 6; i++) {
        OWNED(free) unsigned char *text = malloc(512);
        ar_config c, again;
        size_t bytes = (size_t)snprintf((char *)text, 512,
                                        "{\"model_type\": %s, \"vocab_size\": 512, \"hidden_size\": 80, "
                                        "\"intermediate_size\": 96, \"num_hidden_layers\": 2, "
                                        "\"num_attention_heads\": 2, \"num_key_value_heads\": 2}",
                                        models[i / 2]);
        cr_assert_ok(ar_config_parse(&c, (const char *)text, bytes, "share"));
        cr_expect_eq(c.rope.rotary_dim, 10);
        cr_assert_ok(ari_config_shrink(&c, by[i % 2]));
        cr_assert_ok(ari_config_rewrite(&text, &bytes, &c));
        cr_assert_ok(ar_config_parse(&again, (const char *)text, bytes, "again"));
        cr_expect(again.head_dim == 40 / by[i % 2] && ar_rope_dim(&again.rope, again.head_dim) == c.rope.rotary_dim);
        cr_expect_eq(c.rope.rotary_dim % 2, 0);
    }
}

/* As many experts as before, and as many of them a token; the layers without them are again the first and the last of
 * the large model's. */
CLAIM(experts_become_narrower)
{
    static const char json[] =
        "{\"model_type\": \"qwen2_moe\", \"vocab_size\": 512, \"hidden_size\": 64, \"intermediate_size\": 96, "
        "\"num_hidden_layers\": 12, \"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"num_experts\": 6, "
        "\"moe_intermediate_size\": 24, \"shared_expert_intermediate_size\": 40, \"mlp_only_layers\": [0, 11]}";
    ar_config c;
    cr_assert_ok(ar_config_parse(&c, json, strlen(json), "six"));
    cr_assert_ok(ari_config_shrink(&c, 4));
    cr_expect(c.experts.n == 6 && c.experts.per_token == 4 && c.experts.ffn == 8 && c.experts.shared == 12);
    cr_expect(c.layers == 3 && !ar_config_has_experts(&c, 0) && ar_config_has_experts(&c, 1) &&
              !ar_config_has_experts(&c, 2));
    cr_expect_str_eq(
        c.changed,
        "six shrunk to 1/4: 3 of 12 layers, hidden 16 of 64, heads of 4 of 16, MLP 24 of 96, experts 8 of 24 "
        "(the shared one 12 of 40), vocabulary 256 of 512; 4 heads (2 KV) as before, fresh weights");
}

/* The smaller file names the layers without experts one by one if the larger did: they need not be the first. */
CLAIM(layers_that_a_list_calls_dense_stay_so)
{
    OWNED(free) unsigned char *text = malloc(512);
    ar_config c, again;
    size_t bytes = (size_t)snprintf((char *)text, 512,
                                    "{\"model_type\": \"glm4_moe_lite\", \"vocab_size\": 512, \"hidden_size\": 64, "
                                    "\"intermediate_size\": 96, \"num_hidden_layers\": 6, \"num_attention_heads\": 4, "
                                    "\"num_key_value_heads\": 4, \"mlp_layer_types\": [\"dense\", \"dense\", "
                                    "\"sparse\", \"sparse\", \"dense\", \"dense\"]}");
    cr_assert_ok(ar_config_parse(&c, (const char *)text, bytes, "ends"));
    cr_assert_ok(ari_config_shrink(&c, 2));
    cr_assert_ok(ari_config_rewrite(&text, &bytes, &c));
    cr_assert_ok(ar_config_parse(&again, (const char *)text, bytes, "again"));
    cr_expect(again.layers == c.layers && !ar_config_has_experts(&again, 0) &&
              !ar_config_has_experts(&again, c.layers - 1));
    for (size_t i = 0; i < c.layers; i++)
        cr_expect_eq(ar_config_has_experts(&again, i), ar_config_has_experts(&c, i), "layer %zu", i);
}

CLAIM(sizes_become_a_part_of_what_they_were)
{
    ar_config c = bundled("llama-3-8b");
    cr_assert_ok(ari_config_shrink(&c, 16));
    cr_expect(c.layers == 2 && c.hidden == 256 && c.head_dim == 8 && c.ffn == 896 && c.vocab == 8032);
    cr_expect_str_eq(c.name, "llama-3-8b at 1/16");
    cr_expect_str_eq(c.changed, "llama-3-8b shrunk to 1/16: 2 of 32 layers, hidden 256 of 4096, heads of 8 of 128, MLP "
                                "896 of 14336, vocabulary 8032 of 128256; 32 heads (8 KV) as before, fresh weights");
    c = bundled("stack-4.8b"); /* 11008 / 16 = 688, which 32 does not divide */
    cr_assert_ok(ari_config_shrink(&c, 16));
    cr_expect_eq(c.ffn, 704);
    c = bundled("gpt-1t"); /* heads of 160 */
    cr_assert_ok(ari_config_shrink(&c, 64));
    cr_expect(c.head_dim == 2 && c.hidden == 320 && c.layers == 2);
    c = bundled("llama-demo"); /* a vocabulary of bytes stays one */
    cr_assert_ok(ari_config_shrink(&c, 16));
    cr_expect(c.vocab == 256 && c.layers == 2 && c.hidden == 16);
}

CLAIM(what_has_no_smaller_form_is_refused)
{
    const ar_config large = bundled("llama-3-8b");
    ar_config c = large;
    cr_expect_ok(ari_config_shrink(&c, 1));
    cr_expect_arr_eq(&c, &large, sizeof c);
    cr_expect_eq(ari_config_shrink(&c, 0), AR_ERR_ARG);
    cr_expect_refused(ari_config_shrink(&c, 65), AR_ERR_ARG, "heads have 128 features");
    cr_expect_says("the smallest is 1/64");
    cr_expect_eq(ari_config_shrink(&c, SIZE_MAX), AR_ERR_ARG);
    cr_expect_arr_eq(&c, &large, sizeof c);
    cr_expect_ok(ari_config_shrink(&c, 64));
    c.head_dim = 2;
    cr_expect_refused(ari_config_shrink(&c, 2), AR_ERR_ARG, "the smallest is 1/1, the model itself");
}

/* The last layer has the last one's window, the first the first one's. */
CLAIM(layers_keep_their_kinds_of_attention)
{
    ar_config c = bundled("llama-3-8b");
    c.window = 64;
    for (size_t i = 0; i < 20; i++)
        c.full_attention[0] |= (uint64_t)1 << i;
    cr_assert_ok(ari_config_shrink(&c, 8));
    cr_assert_eq(c.layers, 4);
    for (size_t i = 0; i < 4; i++) /* like layers 0, 10, 20, 31 */
        cr_expect_eq(ar_config_window(&c, i), i < 2 ? 0 : 64, "layer %zu", i);
}

EVERY_CLAIM(config_shrink)
