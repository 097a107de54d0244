/* SPDX-License-Identifier: Apache-2.0 */
/* What module names mean, under everyone's names. */
#include "tests/support/test.h"
#include "verify/read/roles.h"

static ari_role role_of(const char *name)
{
    return ari_module_of(name, strlen(name)).role;
}

/* A path that two families give to different parts is the first one's: a name does not say whose it is. */
static ari_role first_role_of(const char *path)
{
    const ari_family *f;
    for (size_t i = 0; (f = ari_family_at(i)) != NULL; i++) {
        for (const ari_family_part *p = f->part; p->path; p++) {
            if (strcmp(p->path, path) == 0)
                return p->role;
        }
    }
    return ARI_NO_ROLE;
}

Test(roles, every_part_of_a_family_is_in_the_vocabulary)
{
    size_t families = 0;
    for (const ari_family *f; (f = ari_family_at(families)) != NULL; families++) {
        for (const ari_family_part *p = f->part; p->path; p++) {
            char path[64];
            ari_expert_path(path, sizeof path, p->path, 12);
            const size_t n = strlen(path);
            const ari_section section = ari_section_of(p->role);
            const ari_role role =
                section == ARI_IN_BLOCKS ? ari_role_in_layer(path, n) : ari_role_outside(path, n, section);
            cr_expect_eq(role, first_role_of(p->path), "%s", path);
            cr_expect_eq(role_of(path), first_role_of(p->path), "%s", path);
            cr_expect_str_eq(ari_part_path(f, p->role), p->path, "two parts of one role");
            cr_expect_neq(ari_role_place_of(p->role)->forward, 0, "%s has no place", p->path);
        }
    }
    cr_expect_eq(families, 15u);
}

/* One module under the names of Hugging Face's Llama and GPT-2, of the stack, of Megatron and of Meta's Llama. */
Test(roles, a_module_has_one_place_under_everyones_names)
{
    static const char *const names[][5] = {
        {"model.layers.1.input_layernorm", "transformer.h.1.ln_1", "layers.1.ln1", "layers.1.input_layernorm",
         "layers.1.attention_norm"},
        {"model.layers.1.self_attn.o_proj", "transformer.h.1.attn.c_proj", "layers.1.attn.wo",
         "layers.1.self_attention.linear_proj", "layers.1.attention.wo"},
        {"model.layers.1.self_attn.context", "transformer.h.1.attn.context", "layers.1.attn.context",
         "layers.1.self_attention.core_attention", "layers.1.attn.context"},
        {"model.layers.1.post_attention_layernorm", "transformer.h.1.ln_2", "layers.1.ln2",
         "layers.1.pre_mlp_layernorm", "layers.1.ffn_norm"},
        {"model.layers.1.mlp.down_proj", "transformer.h.1.mlp.c_proj", "layers.1.mlp.w2", "layers.1.mlp.dense_4h_to_h",
         "layers.1.feed_forward.w2"},
        {"model.norm", "transformer.ln_f", "norm", "decoder.final_layernorm", "norm"},
        {"model.embed_tokens", "transformer.wte", "embed", "embedding.word_embeddings", "tok_embeddings"},
        {"lm_head", "lm_head", "lm_head", "output_layer", "lm_head"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const ari_order_key first = ari_order_of(names[i][0], NULL);
        for (size_t k = 1; k < 5; k++) {
            const ari_order_key key = ari_order_of(names[i][k], NULL);
            cr_expect(key.section == first.section && key.module == first.module, "%s: %d, expected %d", names[i][k],
                      key.module, first.module);
            cr_expect_eq(role_of(names[i][k]), role_of(names[i][0]), "%s", names[i][k]);
        }
    }
}

Test(roles, a_name_is_known_by_its_end_and_as_much_of_it_as_needed)
{
    cr_expect_eq(role_of("model.layers.0.mlp.experts.11.up_proj.weight"), ARI_EXPERT_UP);
    cr_expect_eq(role_of("model.layers.0.mlp.experts.x.up_proj.weight"), ARI_UP);
    cr_expect_eq(role_of("model.layers.0.mlp.gate.weight"), ARI_ROUTER);
    cr_expect_eq(role_of("model.layers.0.mlp.experts"), ARI_EXPERTS);
    cr_expect_eq(role_of("block.attn.c_proj.weight"), ARI_OUT);
    cr_expect_eq(role_of("ffn.c_proj.weight"), ARI_DOWN);
    cr_expect_eq(role_of("gpt_neox.layers.0.attention.dense.weight"), ARI_OUT);
    cr_expect_eq(role_of("classifier.dense.weight"), ARI_NO_ROLE);
    cr_expect_eq(role_of("encoder.layer.0.attention.self.query.bias"), ARI_Q);
    cr_expect_eq(role_of("layers.0.mlp.xw2"), ARI_NO_ROLE);
    cr_expect_eq(role_of(""), ARI_NO_ROLE);
    cr_expect_eq(role_of("layers.0.self_attn.q_proj.lora_A.weight"), ARI_NO_ROLE);
    cr_expect(ari_module_of("h.0.mlp.c_fc", 12).in_out);
    cr_expect_not(ari_module_of("h.0.mlp.w1", 10).in_out);
}

/* "head" and "embed_tokens" are the last part of a further token's path in DeepSeek-V3, and the whole name in many a
 * model. */
Test(roles, a_head_or_a_table_alone_is_no_further_token_s)
{
    cr_expect_eq(role_of("embed_tokens.weight"), ARI_TOKENS);
    cr_expect_eq(role_of("transformer.embed_tokens"), ARI_TOKENS);
    cr_expect_eq(role_of("model.layers.3.embed_tokens"), ARI_MTP_TOKENS);
    cr_expect_eq(role_of("head"), ARI_NO_ROLE);
    cr_expect_eq(role_of("model.head.weight"), ARI_NO_ROLE);
    cr_expect_eq(role_of("model.layers.3.shared_head.head"), ARI_MTP_HEAD);
}
