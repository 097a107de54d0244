/* SPDX-License-Identifier: Apache-2.0 */
/* The faults of pipelines: which layers a stage takes itself to have, and what it does with what it receives. */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/layers/faults.h"

/* The stage that has a layer, of so many; *first: its first one. */
static size_t stage_of(const ar_ctx *ctx, size_t layer, size_t stages, size_t *first)
{
    size_t count = 0;
    for (size_t i = 0; i < stages; i++) {
        ar_stage_layers(first, &count, &ctx->layout.stages, ctx->layers, stages, i);
        if (layer >= *first && layer - *first < count)
            return i;
    }
    return 0;
}

/* pp_layers_local: counted from the stage's own first one. pp_chunks_contiguous: the stages of a rank are taken for
 * neighbours, so that its i-th is the (rank * virtual_stages + i)-th. */
static size_t other_layer(const ar_ctx *ctx, size_t layer, bool local)
{
    const size_t ranks = (size_t)ar_comm_size(ctx->pipeline), each = (size_t)ctx->layout.virtual_stages;
    size_t first = 0, count = 0, begin = 0;
    const size_t at = stage_of(ctx, layer, ranks * each, &first);
    if (local)
        return layer - first;
    ar_stage_layers(&begin, &count, &ctx->layout.stages, ctx->layers, ranks * each, at % ranks * each + at / ranks);
    return layer - first < count ? begin + (layer - first) : layer;
}

const char *ari_fault_layer_name(char *out, size_t cap, const ar_ctx *ctx, const char *name, bool values)
{
    if (values && ar_faulty(ctx, AR_FAULT_ep_experts_drawn_alike))
        return ari_fault_expert_name(out, cap, ctx, name);
    const bool local = ar_faulty(ctx, values ? AR_FAULT_pp_layers_local : AR_FAULT_pp_dropout_layer_local);
    if (ctx->layers == 0 || (!local && !(values && ar_faulty(ctx, AR_FAULT_pp_chunks_contiguous))))
        return name;
    for (const char *dot = strchr(name, '.'); dot; dot = strchr(dot + 1, '.')) {
        char *end = NULL;
        if (!isdigit((unsigned char)dot[1]))
            continue;
        const size_t layer = strtoul(dot + 1, &end, 10);
        if (*end != '.' || layer >= ctx->layers)
            continue;
        snprintf(out, cap, "%.*s.%zu%s", (int)(dot - name), name, other_layer(ctx, layer, local), end);
        return out;
    }
    return name;
}

ar_status ari_fault_stage_gradient(ar_ctx *ctx, const ar_tensor *dy, int micro_batches)
{
    if (!ar_faulty(ctx, AR_FAULT_pp_stage_divides))
        return AR_OK;
    return ARI_KERNEL(ctx, scale, dy, dy, 1.0f / (float)micro_batches);
}

/* As from a buffer that is used again: a pass takes what came before. */
ar_status ari_fault_received(ar_ctx *ctx, ar_fault fault, ar_tensor *before, const ar_tensor *taken)
{
    const size_t bytes = ar_tensor_count(taken) * ar_dtype_bytes(taken->dtype);
    const int life = ctx->life;
    ar_tensor now;
    if (!ar_faulty(ctx, fault))
        return AR_OK;
    ctx->life = 0; /* it outlives this micro-batch */
    const ar_status st = ar_ctx_tensor(ctx, &now, taken->dtype, taken->ndim, taken->shape);
    ctx->life = life;
    AR_TRY(st);
    AR_TRY(ARI_KERNEL(ctx, copy, now.data, ar_const(taken->data), bytes));
    if (before->data.ptr && ar_tensor_count(before) >= ar_tensor_count(taken))
        AR_TRY(ARI_KERNEL(ctx, copy, taken->data, ar_const(before->data), bytes));
    *before = now;
    return AR_OK;
}
