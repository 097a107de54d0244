/* SPDX-License-Identifier: Apache-2.0 */
/* Models of every family, or of those with experts, as their files have them, in small, and layouts whose numbers of
 * ranks divide little: 3, 5 and 7 data-parallel ranks, half of them without tensor-parallel ones, and each stage of
 * ZeRO. */
#include <stdlib.h>
#include <string.h>

#include "support/layout_draw.h"
#include "support/plan_draw.h"

#define PICK(seed, list) ((list)[plan_draw_below((seed), (unsigned)(sizeof(list) / sizeof *(list)))])

static const char *const families[LAYOUT_DRAW_FAMILIES] = {
    "llama",      "mistral", "qwen2",     "qwen3", "olmo2",    "gemma",   "gemma2",   "gemma3_text",
    "phi3",       "gpt2",    "ministral", "olmo3", "exaone4",  "smollm3", "seed_oss", "stablelm",
    "starcoder2", "granite", "glm4",      "glm",   "ernie4_5", "cohere",  "cohere2",  "gpt_neox"};
static const char *const with_experts[LAYOUT_DRAW_EXPERTS] = {"mixtral",  "qwen2_moe", "qwen3_moe",   "olmoe",
                                                              "glm4_moe", "dots1",     "deepseek_v3", "deepseek_v2",
                                                              "gpt_oss",  "minimax_m2"};

static void draw_ranks(layout_draw *d, uint64_t *seed)
{
    static const int tps[] = {1, 1, 1, 2, 3, 4}, dps[] = {1, 3, 3, 5, 5, 7, 7}, cps[] = {1, 1, 1, 1, 2, 3};
    static const int pps[] = {1, 1, 1, 1, 2, 3}, zeros[] = {0, 1, 1, 2, 2, 2, 3, 3, 3};
    ar_parallel *p = &d->run.parallel;
    p->tp = PICK(seed, tps);
    p->dp = PICK(seed, dps);
    p->cp = PICK(seed, cps);
    p->cp_inner = p->cp > 1 && plan_draw_below(seed, 2) ? p->cp : 1;
    p->zero = PICK(seed, zeros);
    p->zigzag = p->cp > p->cp_inner && plan_draw_below(seed, 2);
    p->pp = PICK(seed, pps);
    p->schedule = (ar_pp_schedule)plan_draw_below(seed, AR_PP_SCHEDULES);
    p->virtual_stages = p->pp > 1 && p->schedule == AR_PP_INTERLEAVED ? 2 : 1;
    p->micro_batches = 1 + (int)plan_draw_below(seed, 3);
    p->sp = plan_draw_below(seed, 2);
    p->keep_gathered = plan_draw_below(seed, 2);
    p->forward_first = p->pp == 1 && plan_draw_below(seed, 2);
    p->overlap = d->kind == DRAW_EXPERTS && p->sp ? 1 + (int)plan_draw_below(seed, 3) : 1;
    d->run.plan.mlp_order = p->tp > 1 ? d->run.plan.mlp_order : AR_MLP_COLUMN_ROW;
    d->run.batch = (size_t)(p->dp * p->micro_batches) + plan_draw_below(seed, 3) - (p->dp > 1);
    d->run.seq = (size_t)(2 * p->cp * p->tp) * (1 + plan_draw_below(seed, 2));
}

/* Experts shared out among the ranks of a sample's positions, among all that there are, or not; what ZeRO shares out,
 * among those of a sample alone where these have all experts. */
static void draw_expert_ranks(layout_draw *d, uint64_t *seed)
{
    ar_parallel *p = &d->run.parallel;
    p->etp = p->sp && p->tp > 1 && plan_draw_below(seed, 2);
    const int sharers = p->cp * (p->etp == 1 ? p->tp : 1), eps[] = {1, sharers, sharers * p->dp};
    p->ep = PICK(seed, eps);
    if (p->ep > sharers)
        d->run.batch = (size_t)(p->dp * p->micro_batches);
    p->dispatch = p->ep > 1 ? (ar_dispatch)plan_draw_below(seed, AR_DISPATCHES) : AR_DISPATCH_ALL_TO_ALL;
    p->dp_replicate = p->ep <= sharers && p->zero > 0 && plan_draw_below(seed, 3) == 0 ? p->dp : 1;
}

static const char *truth(uint64_t *seed)
{
    return plan_draw_below(seed, 2) ? "true" : "false";
}

/* What only some families have. Keys that one of them does not know are not written for it. */
static void write_own(char *out, size_t cap, const char *family, uint64_t *seed)
{
    static const char *const activations[] = {"gelu", "gelu_pytorch_tanh", "silu", "relu"};
    const unsigned window = 1 + plan_draw_below(seed, 9), pattern = 1 + plan_draw_below(seed, 3);
    const char *act = PICK(seed, activations);
    if (strcmp(family, "llama") == 0)
        snprintf(out, cap, "\"attention_bias\": %s, \"mlp_bias\": %s, \"hidden_act\": \"%s\"", truth(seed), truth(seed),
                 act);
    else if (strcmp(family, "mistral") == 0 || strcmp(family, "phi3") == 0)
        snprintf(out, cap, "\"sliding_window\": %u, \"pad_token_id\": %d, \"hidden_act\": \"%s\"", window,
                 pattern > 1 ? 0 : -1, act);
    else if (strcmp(family, "qwen2") == 0 || strcmp(family, "qwen3") == 0)
        snprintf(
            out, cap,
            "\"use_sliding_window\": %s, \"sliding_window\": %u, \"max_window_layers\": %u, \"hidden_act\": \"%s\"",
            truth(seed), window, pattern, act);
    else if (strcmp(family, "ministral") == 0 || strcmp(family, "olmo3") == 0)
        snprintf(out, cap, "\"sliding_window\": %u, \"hidden_act\": \"%s\"", window, act);
    else if (strcmp(family, "exaone4") == 0)
        snprintf(out, cap, "\"sliding_window\": %u, \"sliding_window_pattern\": %u", window, pattern);
    else if (strcmp(family, "smollm3") == 0)
        snprintf(out, cap, "\"use_sliding_window\": %s, \"sliding_window\": %u, \"no_rope_layer_interval\": %u",
                 truth(seed), window, pattern);
    else if (strcmp(family, "granite") == 0)
        snprintf(out, cap,
                 "\"embedding_multiplier\": %u, \"attention_multiplier\": 0.3, \"residual_multiplier\": 0.%u, "
                 "\"logits_scaling\": 0.7",
                 1 + pattern, window);
    else if (strcmp(family, "seed_oss") == 0)
        snprintf(out, cap, "\"attention_out_bias\": %s, \"mlp_bias\": %s", truth(seed), truth(seed));
    else if (strcmp(family, "glm") == 0 || strcmp(family, "glm4") == 0)
        snprintf(out, cap, "\"attention_bias\": %s, \"partial_rotary_factor\": 1", truth(seed));
    else if (strcmp(family, "stablelm") == 0)
        snprintf(out, cap, "\"use_qkv_bias\": %s, \"use_parallel_residual\": %s, \"partial_rotary_factor\": 1",
                 truth(seed), truth(seed));
    else if (strcmp(family, "ernie4_5") == 0)
        snprintf(out, cap, "\"use_bias\": %s", truth(seed));
    else if (strcmp(family, "gpt_neox") == 0)
        snprintf(out, cap,
                 "\"attention_bias\": %s, \"use_parallel_residual\": %s, \"rotary_pct\": 1, "
                 "\"hidden_act\": \"%s\"",
                 truth(seed), pattern > 1 ? "true" : "false", act);
    else if (strcmp(family, "cohere") == 0)
        snprintf(out, cap, "\"attention_bias\": %s, \"logit_scale\": 0.7", truth(seed));
    else if (strcmp(family, "cohere2") == 0)
        snprintf(out, cap, "\"sliding_window\": %u, \"sliding_window_pattern\": %u, \"logit_scale\": 0.7", window,
                 pattern);
    else if (strcmp(family, "starcoder2") == 0)
        snprintf(out, cap, "\"use_bias\": %s, \"sliding_window\": %u, \"hidden_act\": \"%s\"", truth(seed), window,
                 act);
    else if (strcmp(family, "olmo2") == 0)
        snprintf(out, cap, "\"attention_bias\": %s, \"hidden_act\": \"%s\"", truth(seed), act);
    else if (strcmp(family, "gemma") == 0)
        snprintf(out, cap, "\"attention_bias\": %s", truth(seed));
    else if (strcmp(family, "gemma2") == 0)
        snprintf(out, cap, "\"query_pre_attn_scalar\": %u, \"attn_logit_softcapping\": 0.75, \"sliding_window\": %u",
                 1 + pattern, window);
    else
        snprintf(out, cap,
                 "\"query_pre_attn_scalar\": %u, \"final_logit_softcapping\": 0.5, \"sliding_window\": %u, "
                 "\"sliding_window_pattern\": %u",
                 1 + pattern, window, pattern);
}

static bool is_latent(const char *family)
{
    return strncmp(family, "deepseek", 8) == 0;
}

/* Latent attention: ranks and widths of which none has to divide; of the second model another router. */
static void write_latent(char *out, size_t cap, const char *family, uint64_t *seed)
{
    char rank[24] = "null";
    if (plan_draw_below(seed, 3))
        snprintf(rank, sizeof rank, "%u", 1 + plan_draw_below(seed, 9));
    const size_t used = (size_t)snprintf(
        out, cap,
        ", \"q_lora_rank\": %s, \"kv_lora_rank\": %u, \"qk_nope_head_dim\": %u, \"qk_rope_head_dim\": %u, "
        "\"v_head_dim\": %u, \"attention_bias\": %s",
        rank, 1 + plan_draw_below(seed, 9), 1 + plan_draw_below(seed, 6), 2 * (1 + plan_draw_below(seed, 3)),
        1 + plan_draw_below(seed, 9), truth(seed));
    if (strcmp(family, "deepseek_v2") == 0)
        snprintf(out + used, cap - used, ", \"topk_method\": \"%s\"",
                 plan_draw_below(seed, 2) ? "greedy" : "group_limited_greedy");
    else
        snprintf(out + used, cap - used, ", \"rope_interleave\": %s", truth(seed));
}

/* DeepSeek-V3's keys: groups where the experts divide so, of which as many stay as a token needs. */
static void write_scores(char *out, size_t cap, const char *family, unsigned n, unsigned k, unsigned width,
                         uint64_t *seed)
{
    const unsigned groups = n % 3 == 0 && n > 3 ? 3 : n % 2 == 0 && n > 2 ? 2 : 1, each = n / groups;
    const size_t used = (size_t)snprintf(
        out, cap,
        "\"n_routed_experts\": %u, \"num_experts_per_tok\": %u, \"moe_intermediate_size\": %u, \"n_shared_experts\": "
        "%u, \"norm_topk_prob\": %s, \"n_group\": %u, \"topk_group\": %u, \"first_k_dense_replace\": %u",
        n, k, width, 1 + plan_draw_below(seed, 2), strcmp(family, "deepseek_v2") == 0 ? "false" : truth(seed), groups,
        (k + each - 1) / each, plan_draw_below(seed, 2));
    if (is_latent(family)) {
        write_latent(out + used, cap - used, family, seed);
        return;
    }
    if (strcmp(family, "glm4_moe") == 0)
        snprintf(out + used, cap - used, ", \"use_qk_norm\": %s, \"partial_rotary_factor\": 1", truth(seed));
    else
        snprintf(out + used, cap - used, ", \"sliding_window\": %u", 1 + plan_draw_below(seed, 9));
}

/* One of several experts, all of them, or some; of widths that tp divides. Layers without experts begin anywhere. */
static void write_experts(char *out, size_t cap, const layout_draw *d, const char *family, uint64_t *seed)
{
    const unsigned tp = (unsigned)d->run.parallel.tp, ep = (unsigned)d->run.parallel.ep;
    const unsigned n = ep * (1 + plan_draw_below(seed, ep > 1 ? 3 : 7)), some = 1 + plan_draw_below(seed, n);
    const unsigned choice = plan_draw_below(seed, 4), k = choice == 0 ? 1 : choice == 1 ? n : some;
    const unsigned width = tp * (1 + plan_draw_below(seed, 5)), shared = tp * (1 + plan_draw_below(seed, 5));
    const bool gpt_oss = strcmp(family, "gpt_oss") == 0, mixtral = strcmp(family, "mixtral") == 0,
               olmoe = strcmp(family, "olmoe") == 0, minimax = strcmp(family, "minimax_m2") == 0;
    if (strcmp(family, "glm4_moe") == 0 || strcmp(family, "dots1") == 0 || is_latent(family)) {
        write_scores(out, cap, family, n, k, width, seed);
        return;
    }
    size_t used = (size_t)snprintf(out, cap, "\"%s\": %u, \"num_experts_per_tok\": %u",
                                   mixtral || gpt_oss || minimax ? "num_local_experts" : "num_experts", n, k);
    if (gpt_oss)
        snprintf(out + used, cap - used, ", \"sliding_window\": %u, \"attention_bias\": %s",
                 1 + plan_draw_below(seed, 9), truth(seed));
    else if (mixtral)
        snprintf(out + used, cap - used, ", \"sliding_window\": %u", 1 + plan_draw_below(seed, 9));
    else if (!minimax)
        used += (size_t)snprintf(out + used, cap - used, ", \"norm_topk_prob\": %s", truth(seed));
    if (mixtral || olmoe || gpt_oss || minimax)
        return;
    used += (size_t)snprintf(out + used, cap - used,
                             ", \"moe_intermediate_size\": %u, \"decoder_sparse_step\": %u, \"mlp_only_layers\": [%u]",
                             width, 1 + plan_draw_below(seed, 3) / 2, plan_draw_below(seed, 6));
    if (strcmp(family, "qwen2_moe") == 0)
        snprintf(out + used, cap - used, ", \"shared_expert_intermediate_size\": %u, \"qkv_bias\": %s", shared,
                 truth(seed));
}

/* Further tokens of every second round through the families with experts, and every third through the others. */
static void write_mtp(char *out, size_t cap, const layout_draw *d, const char *family)
{
    const bool experts = d->kind == DRAW_EXPERTS;
    const uint64_t round = d->seed / (experts ? LAYOUT_DRAW_EXPERTS : LAYOUT_DRAW_FAMILIES);
    out[0] = '\0';
    if (round % (experts ? 2 : 3) == 1 && strcmp(family, "gpt_neox") != 0)
        snprintf(out, cap, ", \"num_nextn_predict_layers\": %d, \"mtp_loss_scaling_factor\": 0.3",
                 1 + (int)(d->seed % 3));
}

/* Heads that the ranks share, or hold copies of; features, widths and a vocabulary that mostly divide by none. */
static void write_file(layout_draw *d, const char *family, uint64_t *seed)
{
    static const unsigned vocabularies[] = {1, 2, 3, 7, 13, 31, 64, 97};
    const ar_parallel *p = &d->run.parallel;
    const bool gpt2 = strcmp(family, "gpt2") == 0,
               packed = strcmp(family, "phi3") == 0 || strcmp(family, "gpt_neox") == 0;
    const unsigned ranks = (unsigned)(p->tp * p->cp_inner), copies = gpt2 || packed ? 1 : 1 + plan_draw_below(seed, 2);
    const bool all_heads = is_latent(family) || strcmp(family, "gpt_neox") == 0;
    const unsigned heads = ranks * copies, kv = all_heads ? heads : copies > 1 && ranks % 2 == 0 ? ranks / 2 : ranks;
    const unsigned features = 2 * (1 + plan_draw_below(seed, 5)), vocab = PICK(seed, vocabularies);
    const unsigned layers = (unsigned)(p->pp * p->virtual_stages) + plan_draw_below(seed, 2);
    const bool no_width = strcmp(family, "stablelm") == 0 || strcmp(family, "starcoder2") == 0 ||
                          strncmp(family, "cohere", 6) == 0 || strcmp(family, "gpt_neox") == 0; /* hidden / heads */
    const unsigned hidden = gpt2 || no_width ? heads * features : 1 + plan_draw_below(seed, 30);
    const unsigned ffn = (unsigned)p->tp * (1 + plan_draw_below(seed, 9));
    char own[480] = "", width[32], mtp[96];
    snprintf(width, sizeof width, no_width || is_latent(family) ? "" : "\"head_dim\": %u, ", features);
    if (gpt2) {
        snprintf(d->json, sizeof d->json,
                 "{\"model_type\": \"gpt2\", \"vocab_size\": %u, \"n_embd\": %u, \"n_inner\": %u, \"n_layer\": %u, "
                 "\"n_head\": %u, \"n_positions\": %zu, \"tie_word_embeddings\": %s, \"initializer_range\": 0.3}",
                 vocab, hidden, ffn, layers, heads, d->run.seq + plan_draw_below(seed, 3), truth(seed));
        return;
    }
    if (d->kind == DRAW_EXPERTS)
        write_experts(own, sizeof own, d, family, seed);
    else
        write_own(own, sizeof own, family, seed);
    write_mtp(mtp, sizeof mtp, d, family);
    snprintf(d->json, sizeof d->json,
             "{\"model_type\": \"%s\", \"vocab_size\": %u, \"hidden_size\": %u, \"intermediate_size\": %u, "
             "\"num_hidden_layers\": %u, \"num_attention_heads\": %u, \"num_key_value_heads\": %u, %s"
             "\"tie_word_embeddings\": %s, \"initializer_range\": 0.3, %s%s}",
             family, vocab, hidden, ffn, layers, heads, kv, width, truth(seed), own, mtp);
}

void layout_family_draw(layout_draw *d, uint64_t *seed)
{
    const char *family = d->kind == DRAW_EXPERTS ? with_experts[d->seed % LAYOUT_DRAW_EXPERTS]
                                                 : families[d->seed % LAYOUT_DRAW_FAMILIES];
    d->by_check = true;
    d->given = d->packed = false;
    d->weights = MATCH_USUAL;
    draw_ranks(d, seed);
    if (d->kind == DRAW_EXPERTS)
        draw_expert_ranks(d, seed);
    write_file(d, family, seed);
    if (ar_config_parse(&d->config, d->json, strlen(d->json), family) != AR_OK) {
        fprintf(stderr, "%s\n%s\n", ar_error_message(), d->json);
        abort(); /* the program's own mistake: there is nothing to test */
    }
}
