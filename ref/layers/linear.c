/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/layers/linear.h"

#include "ref/layers/parts.h"

/* The blocks of a dimension of a column-parallel part: each is cut by itself. Returns how many. */
static int blocks_of(size_t block[AR_MAX_PARTS], const ari_linear_part *part, size_t extent)
{
    const int blocks = part->blocks > 0 ? part->blocks : 1;
    for (int i = 0; i < blocks; i++)
        block[i] = extent / (size_t)blocks;
    return blocks;
}

/* The part of a column-parallel dimension that this rank holds, and which copy of it. */
static ar_status column_layout(ar_layout *o, ar_ctx *ctx, const ari_linear_part *part, int ndim, const size_t *shape,
                               int dim)
{
    const int n = ar_comm_size(ctx->tp), r = ar_comm_rank(ctx->tp), copies = part->copies > 1 ? part->copies : 1;
    size_t block[AR_MAX_PARTS];
    const int blocks = blocks_of(block, part, shape[dim]);
    if (ar_layout_packed(o, ndim, shape, dim, block, blocks, r / copies, n / copies) != AR_OK)
        return ar_error_set(
            AR_ERR_INDIVISIBLE,
            "%s.weight: its output dimension of %zu cannot be split over %d ranks; use a tp that divides it",
            part->name, block[0], n / copies);
    o->replica = r % copies;
    o->replicas = copies;
    return AR_OK;
}

/* Shards the weight along its output (column) or input (row) dimension, wherever its storage has that. */
static ar_status weight_layout(ar_layout *o, ar_ctx *ctx, const ari_linear_spec *s, const ari_linear_part *part)
{
    const int n = ar_comm_size(ctx->tp), r = ar_comm_rank(ctx->tp);
    const size_t shape[2] = {s->transposed ? s->in : part->out, s->transposed ? part->out : s->in};
    const int dim = (s->style == ARI_COLUMN) == s->transposed ? 1 : 0;
    if (s->uneven)
        return ar_layout_shard_uneven(o, 2, shape, dim, r, n);
    if (s->style == ARI_COLUMN)
        return column_layout(o, ctx, part, 2, shape, dim);
    if (ar_layout_shard(o, 2, shape, dim, r, n) != AR_OK)
        return ar_error_set(
            AR_ERR_INDIVISIBLE,
            "%s.weight: its input dimension of %zu cannot be split over %d ranks; use a tp that divides it", part->name,
            shape[dim], n);
    return AR_OK;
}

static ar_status init_weight(ari_linear *l, ar_ctx *ctx, const ari_linear_spec *s, int i)
{
    const ari_linear_part *part = &s->part[i];
    if (part->tied) {
        l->weight[i] = part->tied;
        part->tied->uses++;
        return AR_OK;
    }
    char name[160];
    ar_layout layout;
    AR_TRY(ari_path(name, sizeof name, part->name, "weight"));
    AR_TRY(weight_layout(&layout, ctx, s, part));
    AR_TRY(ar_param_init(&l->own_weight[i], ctx, name, &layout, s->transposed));
    /* A rank without rows still has columns, or its matrix would be [0, 0]. */
    if (s->uneven && layout.nbox == 0)
        l->own_weight[i].value.shape[s->transposed ? 0 : 1] = s->in;
    l->weight[i] = &l->own_weight[i];
    l->weight[i]->init = AR_INIT_XAVIER_NORMAL;
    l->weight[i]->fan_in = s->in;
    l->weight[i]->fan_out = part->out;
    return AR_OK;
}

static ar_status init_bias(ari_linear *l, ar_ctx *ctx, const ari_linear_spec *s, int i)
{
    const ari_linear_part *part = &s->part[i];
    const int n = ar_comm_size(ctx->tp), r = ar_comm_rank(ctx->tp);
    char name[160];
    ar_layout layout;
    AR_TRY(ari_path(name, sizeof name, part->name, "bias"));
    if (s->style == ARI_ROW) {
        AR_TRY(ar_layout_replicate(&layout, 1, &part->out, r, n));
    } else {
        AR_TRY(column_layout(&layout, ctx, part, 1, &part->out, 0));
    }
    AR_TRY(ar_param_init(&l->bias[i], ctx, name, &layout, false));
    l->bias[i].init = AR_INIT_UNIFORM_BIAS;
    l->bias[i].fan_in = s->in;
    l->bias[i].fan_out = part->out;
    /* A row-parallel bias meets the rank's own positions only. */
    l->bias[i].spread = s->sequence && s->style == ARI_ROW && !ar_faulty(ctx, AR_FAULT_sp_row_bias_grad_local);
    return AR_OK;
}

ar_status ari_linear_init(ari_linear *l, ar_ctx *ctx, const ari_linear_spec *s)
{
    *l = (ari_linear){.style = s->style,
                      .n = s->n,
                      .in = s->in,
                      .has_bias = s->bias,
                      .input_is_sharded = s->input_is_sharded,
                      .sequence = s->sequence};
    ar_status st = AR_OK;
    for (int i = 0; i < s->n; i++) {
        AR_TRY_TO(failed, st, init_weight(l, ctx, s, i));
        l->out[i] = s->part[i].out;
        l->local_out[i] = s->style == ARI_COLUMN ? ar_param_matrix(l->weight[i]).shape[0] : s->part[i].out;
        l->local_total += l->local_out[i];
        if (s->bias)
            AR_TRY_TO(failed, st, init_bias(l, ctx, s, i));
    }
    return AR_OK;
failed:
    ari_linear_fini(l);
    return st;
}

void ari_linear_fini(ari_linear *l)
{
    for (int i = 0; i < l->n; i++) {
        ar_param_fini(&l->own_weight[i]);
        ar_param_fini(&l->bias[i]);
    }
}

size_t ari_linear_params(ari_linear *l, ar_param **out, size_t cap)
{
    size_t count = 0;
    for (int i = 0; i < l->n; i++) {
        if (count < cap)
            out[count] = l->weight[i];
        count++;
        if (!l->has_bias)
            continue;
        if (count < cap)
            out[count] = &l->bias[i];
        count++;
    }
    return count;
}

ar_tensor ari_linear_part_of(const ari_linear *l, const ar_tensor *y, int i)
{
    size_t at = 0;
    for (int k = 0; k < i; k++)
        at += l->local_out[k];
    return ar_tensor_slice(y, y->ndim - 1, at, l->local_out[i]);
}
