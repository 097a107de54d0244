/* SPDX-License-Identifier: Apache-2.0 */
/* Block for a further token (multi-token prediction): two norms, a matrix that combines both values, a block, a norm.
 * Its tokens' rows come from the model's embedding table, which thus has one more use. */
#include <stddef.h>
#include <stdlib.h>

#include "anyrank/loss.h"
#include "ref/layers/batch_private.h"
#include "ref/layers/layers_private.h"
#include "ref/layers/linear/linear.h"
#include "ref/layers/loss.h"
#include "ref/layers/param_private.h"

enum { TOKENS_NORM, ENTERED_NORM, JOINED, BLOCK, MADE_NORM, PARTS };
typedef struct mtp_module {
    ar_module base;
    ar_module *part[PARTS];
    ar_module *embedding; /* borrowed */
    char tokens_name[112];
    size_t h;
} mtp_module;

/* The halves of a tensor of twice the width. */
static ar_tensor half(const mtp_module *m, const ar_tensor *t, int i)
{
    return ar_tensor_slice(t, 2, (size_t)i * m->h, m->h);
}

/* Concatenates the two by features and ends them. */
static ar_status join(const mtp_module *m, ar_ctx *ctx, ar_tensor *joined, ar_tensor *tokens, ar_tensor *entered)
{
    ar_tensor *const sources[2] = {tokens, entered};
    AR_TRY(ari_like(ctx, joined, tokens, 2 * m->h));
    for (int i = 0; i < 2; i++) {
        const ar_tensor dst = half(m, joined, i);
        AR_TRY(ARI_KERNEL(ctx, copy_strided, &dst, sources[i]));
        ar_ctx_release(ctx, sources[i]);
    }
    return AR_OK;
}

static ar_status mtp_forward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                             const ar_batch *batch)
{
    mtp_module *m = (mtp_module *)base;
    ar_tensor rows, tokens, entered, joined, z, block_out;
    if (saved && !ctx->recomputing)
        ari_param_use(ari_embedding_token(m->embedding));
    AR_TRY(ari_embedding_forward_as(m->embedding, ctx, saved, &rows, batch, m->tokens_name));
    AR_TRY(ar_module_forward(m->part[TOKENS_NORM], ctx, saved, &tokens, &rows, batch));
    AR_TRY(ar_module_forward(m->part[ENTERED_NORM], ctx, saved, &entered, x, batch));
    AR_TRY(join(m, ctx, &joined, &tokens, &entered));
    AR_TRY(ar_module_forward(m->part[JOINED], ctx, saved, &z, &joined, batch));
    AR_TRY(ar_module_forward(m->part[BLOCK], ctx, saved, &block_out, &z, batch));
    return ar_module_forward(m->part[MADE_NORM], ctx, saved, y, &block_out, batch);
}

/* Turns dy into the gradient of m's input. */
static ar_status back_through(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dy, const ar_batch *batch)
{
    ar_tensor dx;
    AR_TRY(ar_module_backward(m, ctx, saved, &dx, dy, batch));
    ar_ctx_release(ctx, dy);
    *dy = dx;
    return AR_OK;
}

static ar_status mtp_backward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                              const ar_batch *batch)
{
    mtp_module *m = (mtp_module *)base;
    ar_tensor d, part[2], *rows = &part[0];
    AR_TRY(ar_module_backward(m->part[MADE_NORM], ctx, saved, &d, dy, batch));
    AR_TRY(back_through(m->part[BLOCK], ctx, saved, &d, batch));
    AR_TRY(back_through(m->part[JOINED], ctx, saved, &d, batch));
    for (int i = 0; i < 2; i++) {
        const ar_tensor src = half(m, &d, i);
        AR_TRY(ari_copy_of(ctx, &part[i], &src));
    }
    ar_ctx_release(ctx, &d);
    AR_TRY(back_through(m->part[ENTERED_NORM], ctx, saved, &part[1], batch));
    AR_TRY(back_through(m->part[TOKENS_NORM], ctx, saved, rows, batch));
    if (dx)
        *dx = part[1];
    AR_TRY(ari_embedding_backward(m->embedding, ctx, saved, NULL, rows, batch));
    ar_ctx_release(ctx, rows);
    return ari_param_done(ari_embedding_token(m->embedding), ctx);
}

static ar_status create_parts(mtp_module *m, ar_ctx *ctx, const ari_mtp_options *o)
{
    const ar_placement stream = ari_placed_stream(ctx);
    char name[96];
    m->embedding = o->embedding;
    m->h = o->block->attention.hidden;
    ari_embedding_token(m->embedding)->uses++;
    AR_TRY(ari_path(m->tokens_name, sizeof m->tokens_name, m->base.name, o->tokens));
    AR_TRY(ari_block_norm(&m->part[TOKENS_NORM], ctx, m->base.name, o->tokens_norm, o->block, stream));
    AR_TRY(ari_block_norm(&m->part[ENTERED_NORM], ctx, m->base.name, o->entered_norm, o->block, stream));
    AR_TRY(ari_path(name, sizeof name, m->base.name, o->joined));
    AR_TRY(ari_linear_module_create(&m->part[JOINED], ctx, name, 2 * m->h, m->h, false,
                                    (ar_linear_split){AR_STYLE_REPLICATE, stream, stream}));
    AR_TRY(ar_block_create(&m->part[BLOCK], ctx, m->base.name, o->block));
    return ari_block_norm(&m->part[MADE_NORM], ctx, m->base.name, o->made_norm, o->block, stream);
}

ar_status ari_mtp_create(ar_module **out, ar_ctx *ctx, const char *name, const ari_mtp_options *o)
{
    static const ar_module_ops ops = {.kind = "mtp",
                                      .forward = mtp_forward,
                                      .backward = mtp_backward,
                                      .children_at = offsetof(mtp_module, part),
                                      .children_count = PARTS};
    mtp_module *m = NULL;
    AR_TRY(ARI_MODULE_BEGIN(&m, &ops, name, AR_HELD_UNKNOWN));
    return ari_module_end(out, &m->base, create_parts(m, ctx, o));
}

/* --- a chain of them ---------------------------------------------------------------------------------------------- */

typedef struct further_module {
    ar_module base;
    size_t n;
    ar_module *block[AR_MAX_MTP], *head[AR_MAX_MTP];
    ar_loss *loss[AR_MAX_MTP];
    size_t targets[AR_MAX_MTP];
    double weight;   /* weight of all losses together */
    ar_tensor x, dx; /* in the current pass: the first block's input, and its gradient */
} further_module;

static ar_status begin_forward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                               const ar_batch *batch)
{
    (void)ctx, (void)saved, (void)batch;
    *y = ((further_module *)base)->x = *x;
    return AR_OK;
}

static ar_status end_backward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                              const ar_batch *batch)
{
    further_module *m = (further_module *)base;
    (void)saved, (void)batch;
    *dx = *dy;
    return ari_add_gradient(ctx, dx, &m->dx);
}

static void further_destroy(ar_module *base)
{
    further_module *m = (further_module *)base;
    for (size_t i = 0; i < m->n; i++)
        ar_loss_destroy(m->loss[i]);
    free(m);
}

ar_status ari_further_create(ar_module **out, ar_ctx *ctx, const char *name, double weight)
{
    static const ar_module_ops ops = {
        .kind = "further", .forward = begin_forward, .backward = end_backward, .destroy = further_destroy};
    further_module *m = NULL;
    (void)ctx;
    AR_TRY(ARI_MODULE_BEGIN(&m, &ops, name, AR_HELD_UNKNOWN));
    m->weight = weight;
    *out = &m->base;
    return AR_OK;
}

void ari_further_add(ar_module *further, ar_module *block, ar_module *head, ar_loss *loss)
{
    further_module *m = (further_module *)further;
    m->block[m->n] = block;
    m->head[m->n] = head;
    m->loss[m->n++] = loss;
}

/* Runs block i, and its head unless routes are being counted. x is replaced by the block's output. */
static ar_status forward_one(further_module *m, size_t i, ar_ctx *ctx, ar_saved *saved, ar_tensor *x,
                             const ar_batch *batch)
{
    ARI_OWNED int64_t *memory = NULL;
    ar_batch rolled;
    ar_tensor y, logits;
    ctx->use = ARI_USE_BETWEEN;
    AR_TRY(ari_batch_roll(&rolled, &memory, batch, i + 1));
    m->targets[i] = batch->global_batch > 0 ? rolled.targets : ari_batch_targets(&rolled);
    ar_status st = ar_module_forward(m->block[i], ctx, saved, &y, x, &rolled);
    ctx->use = ARI_USE_OUTER;
    if (st == AR_OK && !ctx->counting)
        st = ar_module_forward(m->head[i], ctx, saved, &logits, &y, &rolled);
    if (st == AR_OK && !ctx->counting)
        st = ar_loss_forward(m->loss[i], ctx, saved, &logits, &rolled);
    *x = y;
    return st;
}

ar_status ari_further_forward(ar_module *further, ar_ctx *ctx, ar_saved *saved, const ar_batch *batch)
{
    further_module *m = (further_module *)further;
    ar_tensor x = m->x;
    for (size_t i = 0; i < m->n; i++)
        AR_TRY(forward_one(m, i, ctx, saved, &x, batch));
    return AR_OK;
}

/* Backward pass of block i and its head: turns m->dx from the gradient of the block's output into the gradient of its
 * input. The last block's output has a gradient only from its head. */
static ar_status backward_one(further_module *m, size_t i, ar_ctx *ctx, ar_saved *saved, const ar_batch *batch)
{
    ARI_OWNED int64_t *memory = NULL;
    ar_batch rolled;
    ar_tensor d;
    AR_TRY(ari_batch_roll(&rolled, &memory, batch, i + 1));
    ctx->use = ARI_USE_OUTER;
    ar_status st = ar_loss_backward(m->loss[i], ctx, saved, &d, &rolled);
    if (st == AR_OK)
        st = back_through(m->head[i], ctx, saved, &d, &rolled);
    if (st == AR_OK && i + 1 < m->n)
        st = ari_add_gradient(ctx, &d, &m->dx);
    ctx->use = ARI_USE_BETWEEN;
    if (st == AR_OK)
        st = back_through(m->block[i], ctx, saved, &d, &rolled);
    m->dx = d;
    return st;
}

ar_status ari_further_backward(ar_module *further, ar_ctx *ctx, ar_saved *saved, const ar_batch *batch)
{
    further_module *m = (further_module *)further;
    for (size_t i = m->n; i-- > 0;)
        AR_TRY(backward_one(m, i, ctx, saved, batch));
    return AR_OK;
}

ar_status ari_further_loss(ar_module *further, ar_ctx *ctx, double *sum)
{
    further_module *m = (further_module *)further;
    for (size_t i = 0; i < m->n; i++) {
        double part = 0.0;
        AR_TRY(ari_loss_part(m->loss[i], ctx, &part, m->targets[i]));
        *sum += m->weight / (double)m->n * part;
    }
    return AR_OK;
}

void ari_further_set_targets(ar_module *further, const size_t *targets)
{
    further_module *m = (further_module *)further;
    for (size_t i = 0; i < m->n; i++)
        m->targets[i] = targets[i];
}

ar_status ari_further_zero(ar_module *further, ar_ctx *ctx)
{
    further_module *m = (further_module *)further;
    for (size_t i = 0; i < m->n; i++)
        AR_TRY(ar_loss_zero(m->loss[i], ctx));
    return AR_OK;
}
