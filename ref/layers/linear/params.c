/* SPDX-License-Identifier: Apache-2.0 */
/* The parameters of a parallel linear layer: which blocks of each weight and bias a rank holds. */
#include <string.h>

#include "ref/context/context_private.h"
#include "ref/core/param_private.h"
#include "ref/core/tensor_private.h"
#include "ref/layers/layers_private.h"
#include "ref/layers/linear/linear.h"

/* Gets the blocks of a column-parallel part's dimension, each of which is divided separately. Returns their number. */
static int blocks_of(size_t block[AR_MAX_PARTS], const ari_linear_part *part, size_t extent)
{
    block[0] = extent;
    for (int i = 0; i < part->blocks; i++)
        block[i] = part->block[i];
    return part->blocks > 0 ? part->blocks : 1;
}

/* Returns the first block that cannot be sharded evenly; 0: none. */
static size_t indivisible(const size_t *block, int blocks, size_t ranks)
{
    for (int i = 0; i < blocks; i++) {
        if (block[i] % ranks != 0)
            return block[i];
    }
    return 0;
}

/* Describes the part of a column-parallel dimension that this rank holds, and which copy it is. */
static ar_status column_layout(ar_layout *o, ar_ctx *ctx, const ari_linear_part *part, int ndim, const size_t *shape,
                               int dim)
{
    const int n = ar_comm_size(ctx->tp), r = ar_comm_rank(ctx->tp), copies = part->copies > 1 ? part->copies : 1;
    size_t block[AR_MAX_PARTS];
    const int blocks = blocks_of(block, part, shape[dim]);
    if (ari_layout_packed(o, ndim, shape, dim, block, blocks, r / copies, n / copies) != AR_OK)
        return ar_error_set(
            AR_ERR_INDIVISIBLE,
            "%s.weight: its output dimension of %zu cannot be split over %d ranks; use a tp that divides it",
            part->name, indivisible(block, blocks, (size_t)(n / copies)), n / copies);
    o->replica = r % copies;
    o->replicas = copies;
    return AR_OK;
}

/* Shards the weight along its output (column) or input (row) dimension, in whichever position the storage has it. */
static ar_status weight_layout(ar_layout *o, ar_ctx *ctx, const ari_linear_spec *s, const ari_linear_part *part)
{
    const int n = ar_comm_size(ctx->tp), r = ar_comm_rank(ctx->tp);
    const size_t shape[2] = {s->transposed ? s->in_features : part->out, s->transposed ? part->out : s->in_features};
    const int dim = ari_is_colwise(&s->split) == s->transposed ? 1 : 0;
    if (s->split.style == AR_STYLE_REPLICATE)
        return ari_layout_replicate(o, 2, shape, r, n);
    if (s->uneven && ari_is_colwise(&s->split))
        return ari_layout_shard_uneven(o, 2, shape, dim, r, n);
    if (ari_is_colwise(&s->split))
        return column_layout(o, ctx, part, 2, shape, dim);
    if (ar_layout_shard(o, 2, shape, dim, r, n) != AR_OK)
        return ar_error_set(
            AR_ERR_INDIVISIBLE,
            "%s.weight: its input dimension of %zu cannot be split over %d ranks; use a tp that divides it", part->name,
            shape[dim], n);
    return AR_OK;
}

ar_status ari_linear_weight_init(ar_param *p, ar_ctx *ctx, const ari_linear_spec *s, int i)
{
    const ari_linear_part *part = &s->part[i];
    char name[160];
    ar_layout layout;
    AR_TRY(ari_path(name, sizeof name, part->name, "weight"));
    AR_TRY(weight_layout(&layout, ctx, s, part));
    AR_TRY(ar_param_init(p, ctx, name, &layout, s->transposed));
    /* A rank without rows still has columns; otherwise its matrix would be [0, 0]. */
    if (s->uneven && layout.nbox == 0)
        p->value.shape[s->transposed ? 0 : 1] = s->in_features;
    p->init = AR_INIT_XAVIER_NORMAL;
    p->fan_in = s->in_features;
    p->fan_out = part->out;
    p->matrix = !s->uneven && !s->chooses;
    p->adds = AR_ADDS_BY_SAMPLE;
    p->blocks = part->blocks;
    memcpy(p->block, part->block, sizeof p->block);
    return AR_OK;
}

static ar_status init_weight(ari_linear *l, ar_ctx *ctx, const ari_linear_spec *s, int i)
{
    const ari_linear_part *part = &s->part[i];
    l->weight[i] = part->tied ? part->tied : &l->own_weight[i];
    if (!part->tied)
        return ari_linear_weight_init(l->weight[i], ctx, s, i);
    part->tied->uses++;
    part->tied->adds = part->tied->adds == AR_ADDS_BY_TOKEN ? AR_ADDS_BY_BOTH : part->tied->adds;
    return AR_OK;
}

ar_status ari_linear_bias_init(ar_param *p, ar_ctx *ctx, const ari_linear_spec *s, int i)
{
    const ari_linear_part *part = &s->part[i];
    const int n = ar_comm_size(ctx->tp), r = ar_comm_rank(ctx->tp);
    char name[160];
    ar_layout layout;
    AR_TRY(ari_path(name, sizeof name, part->name, "bias"));
    AR_TRY(ari_is_colwise(&s->split) ? column_layout(&layout, ctx, part, 1, &part->out, 0)
                                     : ari_layout_replicate(&layout, 1, &part->out, r, n));
    AR_TRY(ar_param_init(p, ctx, name, &layout, false));
    p->init = AR_INIT_UNIFORM_BIAS;
    p->matrix = false;
    p->fan_in = s->in_features;
    p->fan_out = part->out;
    /* The bias of a sum scattered along the sequence is added only to the rank's own positions. */
    p->spread = n > 1 && ari_is_rowwise(&s->split) && ari_placed_by_tokens(s->split.output) &&
                !ari_faulty(ctx, "sp_row_bias_grad_local");
    return AR_OK;
}

/* Sets the widths of part i and its blocks. A column-parallel weight's rows may be copies of another rank's. */
static ar_status set_widths(ari_linear *l, ar_ctx *ctx, const ari_linear_spec *s, int i)
{
    const ari_linear_part *part = &s->part[i];
    const size_t n = (size_t)ar_comm_size(ctx->tp);
    const bool column = ari_is_colwise(&s->split);
    size_t block[AR_MAX_PARTS], start = 0;
    const int blocks = blocks_of(block, part, part->out);
    for (int k = 0; k < blocks; k++)
        l->out.width[l->out.n++] = block[k];
    l->local_width[i] = column ? ari_param_matrix(l->weight[i]).shape[0] : part->out;
    l->output_width[i] = part->out;
    if (ari_placed_by_features(s->split.output) && column)
        l->output_width[i] = l->local_width[i];
    else if (ari_placed_by_features(s->split.output))
        ari_split_uneven(part->out, (int)n, ar_comm_rank(ctx->tp), &start, &l->output_width[i]);
    if (ari_placed_by_features(s->split.output) && !s->uneven && !column && indivisible(block, blocks, n) > 0)
        return ar_error_set(AR_ERR_INDIVISIBLE,
                            "%s: its output of %zu features cannot be split over %zu ranks; use a tp that divides it",
                            part->name, indivisible(block, blocks, n), n);
    l->local_total += l->local_width[i];
    l->output_total += l->output_width[i];
    return AR_OK;
}

ar_status ari_linear_init(ari_linear *l, ar_ctx *ctx, const ari_linear_spec *s)
{
    *l = (ari_linear){.split = s->split,
                      .n = s->n,
                      .in_features = {1, {s->in_features}},
                      .has_bias = s->bias,
                      .owns_input = s->owns_input,
                      .peaked = s->uneven};
    ar_status st = AR_OK;
    if (!ari_is_rowwise(&s->split) && s->split.output.kind == AR_PARTIAL_SUM)
        return ar_error_set(AR_ERR_ARG, "%s: only a rowwise layer makes a partial sum; this one is %s", s->part[0].name,
                            ari_style_name(s->split.style));
    for (int i = 0; i < s->n; i++) {
        AR_TRY_TO(failed, st, init_weight(l, ctx, s, i));
        AR_TRY_TO(failed, st, set_widths(l, ctx, s, i));
        if (s->bias)
            AR_TRY_TO(failed, st, ari_linear_bias_init(&l->bias[i], ctx, s, i));
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
