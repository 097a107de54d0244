/* SPDX-License-Identifier: Apache-2.0 */
/* From a config to the options of its blocks, and whether a layout can hold it. */
#include <stdio.h>

#include "anyrank/model.h"
#include "ref/core/size.h"
#include "ref/models/names.h"
#include "ref/models/param_list.h"

static void block_names(const ar_config *c, ar_block_options *o)
{
    switch (c->arch) {
    case AR_ARCH_LLAMA:
        o->norm1 = "input_layernorm";
        o->norm2 = "post_attention_layernorm";
        o->attention_name = "self_attn";
        o->attention.q = "q_proj";
        o->attention.k = "k_proj";
        o->attention.v = "v_proj";
        o->attention.out = "o_proj";
        o->mlp.first = "gate_proj";
        o->mlp.up = "up_proj";
        o->mlp.second = "down_proj";
        break;
    case AR_ARCH_GPT2:
        o->norm1 = "ln_1";
        o->norm2 = "ln_2";
        o->attention_name = "attn";
        o->attention.fused = true;
        o->attention.q = "c_attn";
        o->attention.out = "c_proj";
        o->mlp.first = "c_fc";
        o->mlp.second = "c_proj";
        o->mlp.transposed = true;
        break;
    case AR_ARCH_STACK:
        o->norm1 = "ln1";
        o->norm2 = "ln2";
        o->attention_name = "attn";
        o->attention.q = "wq";
        o->attention.k = "wk";
        o->attention.v = "wv";
        o->attention.out = "wo";
        o->mlp.first = "w1";
        o->mlp.second = "w2";
        break;
    }
    o->mlp_name = "mlp";
}

ar_status ar_config_block(const ar_config *c, size_t layer, const ar_plan *plan, ar_block_options *o, char *name,
                          size_t cap)
{
    *o = (ar_block_options){.norm = c->norm, .norm_eps = c->norm_eps};
    o->attention = (ar_attention_options){.hidden = c->hidden,
                                          .heads = c->heads,
                                          .kv_heads = c->kv_heads,
                                          .head_dim = c->head_dim,
                                          .qkv_bias = c->qkv_bias,
                                          .out_bias = c->out_bias,
                                          .causal = c->causal,
                                          .rope = c->rope,
                                          .rope_theta = c->rope_theta,
                                          .rope_factor = c->rope_factor,
                                          .max_positions = c->max_positions};
    o->mlp = (ar_mlp_options){.hidden = c->hidden,
                              .ffn = c->ffn,
                              .activation = c->activation,
                              .gated = c->gated,
                              .bias = c->mlp_bias,
                              .order = plan->mlp_order};
    block_names(c, o);
    const int n = snprintf(name, cap, "%s.%zu", ari_outer_names_of(c->arch)->blocks, layer);
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

ar_status ar_config_check_tp(const ar_config *c, int ranks, const ar_plan *plan)
{
    if (ranks < 1)
        return ar_error_set(AR_ERR_ARG, "tp=%d is not a number of ranks", ranks);
    if ((size_t)ranks > c->heads)
        return ar_error_set(AR_ERR_INDIVISIBLE, "tp=%d is more than the %zu query heads of %s; every rank needs a head",
                            ranks, c->heads, c->name);
    AR_TRY(divides("the number of query heads", c->heads, ranks));
    if (c->kv_heads % (size_t)ranks != 0)
        return ar_error_set(
            AR_ERR_INDIVISIBLE,
            "the number of KV heads = %zu cannot be split over tp=%d (replicas of KV heads: not in this "
            "version); use a tp that divides %zu",
            c->kv_heads, ranks, c->kv_heads);
    AR_TRY(divides("the MLP's width", c->ffn, ranks));
    if (plan->mlp_order == AR_MLP_ROW_COLUMN)
        AR_TRY(divides("the hidden size (row-column MLP)", c->hidden, ranks));
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

ar_status ar_config_parameters(const ar_config *c, size_t *out)
{
    *out = 0;
    return ari_param_list(c, add_elements, out);
}
