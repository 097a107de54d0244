/* SPDX-License-Identifier: Apache-2.0 */
/* From a config to the options of its blocks, and whether a layout can hold it. */
#include <stdio.h>

#include "anyrank/model.h"
#include "ref/core/size.h"
#include "ref/models/family.h"

static void name_parts(const ari_family *f, ar_block_options *o)
{
    const bool fused = ari_part_path(f, ARI_QKV) != NULL, gated = ari_part_path(f, ARI_GATE) != NULL;
    o->norm1 = ari_part_path(f, ARI_NORM1);
    o->norm2 = ari_part_path(f, ARI_NORM2);
    o->attention_name = f->attention;
    o->mlp_name = f->mlp;
    o->attention.q = ari_part_leaf(f, fused ? ARI_QKV : ARI_Q);
    o->attention.k = ari_part_leaf(f, ARI_K);
    o->attention.v = ari_part_leaf(f, ARI_V);
    o->attention.out = ari_part_leaf(f, ARI_OUT);
    o->mlp.first = ari_part_leaf(f, gated ? ARI_GATE : ARI_FIRST);
    o->mlp.up = ari_part_leaf(f, ARI_UP);
    o->mlp.second = ari_part_leaf(f, ARI_DOWN);
}

ar_status ar_config_block(const ar_config *c, size_t layer, const ar_plan *plan, ar_block_options *o, char *name,
                          size_t cap)
{
    const ari_family *f = ari_family_of(c->arch);
    *o = (ar_block_options){.norm = c->norm, .norm_eps = c->norm_eps};
    o->attention = (ar_attention_options){.hidden = c->hidden,
                                          .heads = c->heads,
                                          .kv_heads = c->kv_heads,
                                          .head_dim = c->head_dim,
                                          .qkv_bias = c->qkv_bias,
                                          .out_bias = c->out_bias,
                                          .causal = c->causal,
                                          .window = ar_config_window(c, layer),
                                          .rope = c->rope,
                                          .rope_theta = c->rope_theta,
                                          .rope_factor = c->rope_factor,
                                          .rope_llama3 = c->rope_llama3,
                                          .max_positions = c->max_positions};
    o->mlp = (ar_mlp_options){.hidden = c->hidden,
                              .ffn = c->ffn,
                              .activation = c->activation,
                              .gated = c->gated,
                              .bias = c->mlp_bias,
                              .transposed = f->transposed};
    o->attention.fused = ari_part_path(f, ARI_QKV) != NULL;
    name_parts(f, o);
    ar_block_split split;
    AR_TRY(ar_plan_block(plan, c, layer, &split));
    o->mlp.order = split.mlp;
    o->mlp.leaves_partial = split.mlp_partial;
    o->attention.whole = split.attention_whole;
    o->attention.leaves_partial = split.attention_partial;
    const int n = snprintf(name, cap, "%s.%zu", f->blocks, layer);
    if (n < 0 || (size_t)n >= cap)
        return ar_error_set(AR_ERR_ARG, "a block's name does not fit %zu bytes", cap);
    return AR_OK;
}

static ar_status divides(const char *what, size_t extent, int ranks)
{
    if (extent % (size_t)ranks != 0)
        return ar_error_set(AR_ERR_INDIVISIBLE, "%s = %zu cannot be split over tp=%d; use a tp that divides %zu", what,
                            extent, ranks, extent);
    return AR_OK;
}

/* What a block's attention and MLP split has to divide. */
static ar_status check_block(const ar_config *c, int ranks, const ar_block_split *split)
{
    if (!split->attention_whole && (size_t)ranks > c->heads)
        return ar_error_set(AR_ERR_INDIVISIBLE, "tp=%d is more than the %zu query heads of %s; every rank needs a head",
                            ranks, c->heads, c->name);
    if (!split->attention_whole)
        AR_TRY(divides("the number of query heads", c->heads, ranks));
    if (!split->attention_whole && c->kv_heads % (size_t)ranks != 0 && (size_t)ranks % c->kv_heads != 0)
        return ar_error_set(AR_ERR_INDIVISIBLE,
                            "the number of KV heads = %zu cannot be split over tp=%d, nor copied to it evenly; use a "
                            "tp that divides %zu, or a multiple of it that divides the %zu query heads",
                            c->kv_heads, ranks, c->kv_heads, c->heads);
    if (split->mlp != AR_MLP_WHOLE)
        AR_TRY(divides("the MLP's width", c->ffn, ranks));
    return split->mlp == AR_MLP_ROW_COLUMN ? divides("the hidden size (MLP rowwise then colwise)", c->hidden, ranks)
                                           : AR_OK;
}

ar_status ar_config_check_tp(const ar_config *c, int ranks, const ar_plan *plan)
{
    ar_outer_split outer;
    if (ranks < 1)
        return ar_error_set(AR_ERR_ARG, "tp=%d is not a number of ranks", ranks);
    for (size_t i = 0; i < c->layers; i++) {
        ar_block_split split;
        AR_TRY(ar_plan_block(plan, c, i, &split));
        AR_TRY(check_block(c, ranks, &split));
    }
    AR_TRY(ar_plan_outer(plan, c, &outer));
    return outer.tokens == AR_EMBEDDING_HIDDEN ? divides("the hidden size (embedding by hidden)", c->hidden, ranks)
                                               : AR_OK;
}

static ar_status add_elements(void *user, const char *name, int ndim, const size_t *shape)
{
    (void)name;
    size_t *total = user, product = 1;
    for (int d = 0; d < ndim; d++)
        AR_TRY(ari_mul_size(&product, product, shape[d]));
    return ari_add_size(total, *total, product);
}

ar_status ar_config_parameters(const ar_config *c, size_t *out)
{
    *out = 0;
    return ari_param_list(c, add_elements, out);
}
