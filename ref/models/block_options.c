/* SPDX-License-Identifier: Apache-2.0 */
/* Derives a block's options from a config, and checks whether a layout supports it. */
#include <stdio.h>
#include <string.h>

#include "ref/core/size.h"
#include "ref/core/text.h"
#include "ref/models/family.h"
#include "ref/models/model.h"
#include "ref/models/model_private.h"
#include "ref/models/plan_private.h"

/* Returns the last component of a role's path: "q_proj". */
static const char *leaf_of(const ari_family *f, ari_role role)
{
    const char *path = ari_part_path(f, role), *dot = path ? strrchr(path, '.') : NULL;
    return dot ? dot + 1 : path;
}

static void name_parts(const ari_family *f, ar_block_options *o)
{
    const bool fused = ari_part_path(f, ARI_QKV) != NULL, gated = ari_part_path(f, ARI_GATE) != NULL;
    const bool packed = ari_part_path(f, ARI_GATE_UP) != NULL;
    o->norm1 = ari_part_path(f, ARI_NORM1);
    o->norm2 = ari_part_path(f, ARI_NORM2);
    o->attention_norm = ari_part_path(f, ARI_ATTENTION_NORM);
    o->mlp_norm = ari_part_path(f, ARI_MLP_NORM);
    o->attention_name = f->attention;
    o->mlp_name = f->mlp;
    o->attention.q = leaf_of(f, fused ? ARI_QKV : ARI_Q);
    o->attention.k = leaf_of(f, ARI_K);
    o->attention.v = leaf_of(f, ARI_V);
    o->attention.q_norm = leaf_of(f, ARI_Q_NORM);
    o->attention.k_norm = leaf_of(f, ARI_K_NORM);
    o->attention.out = leaf_of(f, ARI_OUT);
    o->attention.q_a = leaf_of(f, ARI_Q_A);
    o->attention.q_a_norm = leaf_of(f, ARI_Q_A_NORM);
    o->attention.q_b = leaf_of(f, ARI_Q_B);
    o->attention.kv_a = leaf_of(f, ARI_KV_A);
    o->attention.kv_a_norm = leaf_of(f, ARI_KV_A_NORM);
    o->attention.kv_b = leaf_of(f, ARI_KV_B);
    o->mlp.first = leaf_of(f, packed ? ARI_GATE_UP : gated ? ARI_GATE : ARI_FIRST);
    o->mlp.up = leaf_of(f, ARI_UP);
    o->mlp.second = leaf_of(f, ARI_DOWN);
    o->experts.router = leaf_of(f, ARI_ROUTER);
    if (ari_part_path(f, ARI_ROUTER_BIAS))
        o->experts.router_bias = ari_part_path(f, ARI_ROUTER_BIAS) + strlen(f->mlp) + 1;
    o->experts.gate = leaf_of(f, ARI_EXPERT_GATE);
    o->experts.up = leaf_of(f, ARI_EXPERT_UP);
    o->experts.down = leaf_of(f, ARI_EXPERT_DOWN);
    o->experts.shared_name = f->shared_experts ? "shared_experts" : NULL;
}

ar_status ari_config_block(const ar_config *c, size_t layer, ar_block_options *o, char *name, size_t cap)
{
    AR_TRY(ari_arch_expect(c->arch));
    const ari_family *f = ari_family_of(c->arch);
    *o = (ar_block_options){.norm = c->norm,
                            .norm_eps = c->norm_eps,
                            .norm_place = c->norm_place,
                            .norm_plus_one = c->norm_plus_one,
                            .norm_no_bias = c->norm_no_bias,
                            .residual = c->residual,
                            .branch_scale = c->branch_scale,
                            .index = layer};
    o->attention = (ar_attention_options){.hidden = c->hidden,
                                          .heads = c->heads,
                                          .kv_heads = c->kv_heads,
                                          .head_dim = c->head_dim,
                                          .qkv_bias = c->qkv_bias,
                                          .out_bias = c->out_bias,
                                          .causal = c->causal,
                                          .window = ar_config_window(c, layer),
                                          .max_positions = c->max_positions,
                                          .qk_norm = c->qk_norm,
                                          .norm_plus_one = c->norm_plus_one,
                                          .norm_eps = c->norm_eps,
                                          .query_scalar = c->query_scalar,
                                          .score_cap = c->score_cap,
                                          .sinks = c->sinks,
                                          .latent = c->latent};
    if (ar_config_turns(c, layer))
        o->attention.rope = *ar_config_layer_rope(c, layer);
    o->mlp = (ar_mlp_options){.hidden = c->hidden,
                              .ffn = c->ffn,
                              .activation = c->activation,
                              .gated = c->gated,
                              .bias = c->mlp_bias,
                              .transposed = f->transposed,
                              .fused = ari_part_path(f, ARI_GATE_UP) != NULL};
    if (ar_config_has_experts(c, layer))
        o->experts = (ar_experts_options){.hidden = c->hidden,
                                          .n = c->experts.n,
                                          .per_token = c->experts.per_token,
                                          .ffn = c->experts.ffn,
                                          .bias = c->experts.bias,
                                          .shared = c->experts.shared,
                                          .ungated = c->experts.ungated,
                                          .normalised = c->experts.normalised,
                                          .scores = c->experts.scores,
                                          .balance_weight = c->experts.balance_weight,
                                          .activation = c->activation};
    o->attention.fused = ari_part_path(f, ARI_QKV) != NULL;
    o->attention.by_head = f->by_head;
    o->attention.transposed = f->transposed;
    name_parts(f, o);
    const int n = snprintf(name, cap, "%s.%zu", f->blocks, layer);
    if (n < 0 || (size_t)n >= cap)
        return ar_error_set(AR_ERR_ARG, "a block's name does not fit %zu bytes", cap);
    return AR_OK;
}

static ar_status divides(const char *label, size_t extent, int ranks)
{
    if (extent % (size_t)ranks != 0)
        return ar_error_set(AR_ERR_INDIVISIBLE, "%s = %zu cannot be split over tp=%d; use a tp that divides %zu", label,
                            extent, ranks, extent);
    return AR_OK;
}

static bool by_features(ar_placement p)
{
    return p.kind == AR_SHARD && p.dim == -1;
}

/* Checks features that are sharded: those along which a layer's weight is sharded, or that arrive or leave sharded. */
static ar_status check_input(const char *name, size_t in_features, int ranks, const ar_linear_split *s)
{
    return s->style == AR_STYLE_ROWWISE || by_features(s->input) ? divides(name, in_features, ranks) : AR_OK;
}

static ar_status check_output(const char *name, size_t out, int ranks, const ar_linear_split *s)
{
    return s->style == AR_STYLE_COLWISE || by_features(s->output) ? divides(name, out, ranks) : AR_OK;
}

/* Heads are not divided internally; neighbouring ranks may have copies of KV heads. */
static ar_status check_heads(const ar_config *c, int ranks, const ar_linear_split *qkv)
{
    const size_t n = (size_t)ranks;
    if (n > c->heads)
        return ar_error_set(AR_ERR_INDIVISIBLE,
                            "tp=%d is more than the %zu query head%s of %s; every rank needs a head", ranks, c->heads,
                            ARI_PLURAL(c->heads), c->name);
    AR_TRY(divides("the number of query heads", c->heads, ranks));
    if (ari_part_path(ari_family_of(c->arch), ARI_QKV))
        return divides("the number of KV heads in one parameter with the queries", c->kv_heads, ranks);
    if (qkv->style != AR_STYLE_COLWISE)
        return divides("the number of KV heads of projections that are not colwise", c->kv_heads, ranks);
    if (c->kv_heads % n != 0 && n % c->kv_heads != 0)
        return ar_error_set(AR_ERR_INDIVISIBLE,
                            "the number of KV heads = %zu cannot be split over tp=%d, nor copied to it evenly; use a "
                            "tp that divides %zu, or a multiple of %zu that divides the %zu query heads",
                            c->kv_heads, ranks, c->kv_heads, c->kv_heads, c->heads);
    return AR_OK;
}

static ar_status check_attention(const ar_config *c, int ranks, const ar_branch_split *s)
{
    const size_t context = c->heads * ar_config_value_dim(c), kv = c->kv_heads * c->head_dim;
    AR_TRY(check_input("the hidden size (q, k, v rowwise)", c->hidden, ranks, &s->first));
    if (by_features(s->first.output))
        AR_TRY(check_heads(c, ranks, &s->first));
    else
        AR_TRY(check_output("the width of the KV heads", kv, ranks, &s->first));
    AR_TRY(check_input("the width of the query heads", context, ranks, &s->second));
    return check_output("the hidden size (attention colwise at its end)", c->hidden, ranks, &s->second);
}

static ar_status check_experts(const ar_config *c, int ranks, int of_expert, const ar_branch_split *s)
{
    AR_TRY(check_output("an expert's width", c->experts.ffn, of_expert, &s->first));
    return check_output("the shared expert's width", c->experts.shared, ranks, &s->first);
}

static ar_status check_mlp(const ar_config *c, int ranks, const ar_branch_split *s)
{
    AR_TRY(check_input("the hidden size (MLP rowwise)", c->hidden, ranks, &s->first));
    AR_TRY(check_output("the MLP's width", c->ffn, ranks, &s->first));
    AR_TRY(check_input("the MLP's width", c->ffn, ranks, &s->second));
    return check_output("the hidden size (MLP colwise at its end)", c->hidden, ranks, &s->second);
}

ar_status ari_config_check_ranks(const ar_config *c, int ranks, const ar_plan *plan)
{
    return ari_config_check_tp(c, ranks, ranks, plan);
}

ar_status ari_config_check_tp(const ar_config *c, int ranks, int of_expert, const ar_plan *plan)
{
    /* Divisibility does not depend on the placement between the branches, so the plan's declared one is used. */
    const bool sequence = ari_plan_by_tokens(plan, 1, false);
    ar_outer_split outer;
    AR_TRY(ari_config_expect(c));
    if (ranks < 1)
        return ar_error_set(AR_ERR_ARG, "tp=%d is not a number of ranks", ranks);
    for (size_t i = 0; i < ar_config_blocks(c); i++) {
        ar_block_split split;
        if (i > 0 && plan->rules == 0 && ar_config_has_experts(c, i) == ar_config_has_experts(c, i - 1))
            continue; /* divided like the preceding layer */
        AR_TRY(ari_plan_block(plan, c, i, sequence, &split));
        AR_TRY(check_attention(c, ranks, &split.attention));
        AR_TRY(ar_config_has_experts(c, i) ? check_experts(c, ranks, of_expert, &split.mlp)
                                           : check_mlp(c, ranks, &split.mlp));
    }
    AR_TRY(ari_plan_outer(plan, c, sequence, &outer));
    AR_TRY(check_input("the hidden size (LM head rowwise)", c->hidden, ranks, &outer.head));
    return outer.tokens == AR_EMBEDDING_HIDDEN ? divides("the hidden size (embedding by hidden)", c->hidden, ranks)
                                               : AR_OK;
}

/* Heads of every tensor-parallel rank, and KV heads or their copies, for the inner neighbours. */
static ar_status check_inner_heads(const ar_config *c, size_t ranks, size_t inner)
{
    const size_t heads = c->heads / ranks, kv = c->kv_heads > ranks ? c->kv_heads / ranks : 1;
    if (heads % inner != 0)
        return ar_error_set(AR_ERR_INDIVISIBLE,
                            "the %zu query heads of a tensor-parallel rank of %s cannot be shared by %zu inner "
                            "neighbours of cp; use an inner cp that divides %zu",
                            heads, c->name, inner, heads);
    if (kv % inner != 0 && inner % kv != 0)
        return ar_error_set(AR_ERR_INDIVISIBLE,
                            "the %zu KV heads of a tensor-parallel rank of %s cannot be shared by %zu inner neighbours "
                            "of cp, nor copied to them evenly; use an inner cp that divides %zu, or a multiple of %zu "
                            "that divides the %zu query heads",
                            kv, c->name, inner, kv, kv, heads);
    return AR_OK;
}

ar_status ari_config_check_inner(const ar_config *c, int ranks, int inner, const ar_plan *plan)
{
    const bool sequence = ari_plan_by_tokens(plan, 1, false);
    if (ranks < 1)
        return ar_error_set(AR_ERR_ARG, "tp=%d is not a number of ranks", ranks);
    if (inner < 1)
        return ar_error_set(AR_ERR_ARG, "an inner cp of %d is not a number of neighbours", inner);
    for (size_t i = 0; inner > 1 && i < ar_config_blocks(c); i++) {
        ar_block_split split;
        AR_TRY(ari_plan_block(plan, c, i, sequence, &split));
        AR_TRY(check_inner_heads(c, by_features(split.attention.first.output) ? (size_t)ranks : 1, (size_t)inner));
    }
    return AR_OK;
}

static ar_status add_elements(void *user, const char *name, int ndim, const size_t *shape)
{
    (void)name;
    size_t *total = user, product = 1;
    for (int d = 0; d < ndim; d++)
        AR_TRY(ari_mul_size(&product, product, shape[d]));
    return ari_add_size(total, *total, product);
}

ar_status ari_config_parameters(const ar_config *c, size_t *out)
{
    *out = 0;
    AR_TRY(ari_config_expect(c));
    return ari_param_list(c, add_elements, out);
}
