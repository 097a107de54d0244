/* SPDX-License-Identifier: Apache-2.0 */
/* A block for a further token (multi-token prediction): two norms, a matrix that makes one value of both, a block, a
 * norm. The rows of its tokens are the model's own table's, which so has one use more. */
#include <stddef.h>

#include "ref/core/size.h"
#include "ref/layers/faults.h"
#include "ref/layers/linear/linear.h"

enum { TOKENS_NORM, ENTERED_NORM, JOINED, BLOCK, MADE_NORM, PARTS };
typedef struct mtp_module {
    ar_module base;
    ar_module *part[PARTS];
    ar_embedding *embedding; /* borrowed */
    char tokens_name[112];
    size_t h;
} mtp_module;

/* The halves of a tensor of twice the width. */
static ar_tensor half(const mtp_module *m, const ar_tensor *t, int i)
{
    return ar_tensor_slice(t, 2, (size_t)i * m->h, m->h);
}

/* Both side by side. Ends them. */
static ar_status join(const mtp_module *m, ar_ctx *ctx, ar_tensor *both, ar_tensor *tokens, ar_tensor *entered)
{
    ar_tensor *const from[2] = {tokens, entered};
    AR_TRY(ari_like(ctx, both, tokens, 2 * m->h));
    for (int i = 0; i < 2; i++) {
        const ar_tensor to = half(m, both, i);
        AR_TRY(ARI_KERNEL(ctx, copy_strided, &to, from[i]));
        ar_ctx_release(ctx, from[i]);
    }
    return AR_OK;
}

static ar_status mtp_forward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                             const ar_batch *batch)
{
    mtp_module *m = (mtp_module *)base;
    ar_tensor rows, tokens, entered, both, z, made;
    AR_TRY(ari_embedding_forward_as(m->embedding, ctx, saved, &rows, batch, m->tokens_name));
    AR_TRY(ar_module_forward(m->part[TOKENS_NORM], ctx, saved, &tokens, &rows, batch));
    AR_TRY(ar_module_forward(m->part[ENTERED_NORM], ctx, saved, &entered, x, batch));
    AR_TRY(join(m, ctx, &both, &tokens, &entered));
    AR_TRY(ar_module_forward(m->part[JOINED], ctx, saved, &z, &both, batch));
    AR_TRY(ar_module_forward(m->part[BLOCK], ctx, saved, &made, &z, batch));
    return ar_module_forward(m->part[MADE_NORM], ctx, saved, y, &made, batch);
}

/* dx through a part, of dy, which ends. */
static ar_status back(const mtp_module *m, int part, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, ar_tensor *dy,
                      const ar_batch *batch)
{
    AR_TRY(ar_module_backward(m->part[part], ctx, saved, dx, dy, batch));
    ar_ctx_release(ctx, dy);
    return AR_OK;
}

static ar_status mtp_backward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                              const ar_batch *batch)
{
    mtp_module *m = (mtp_module *)base;
    ar_tensor made, z, both, part[2], rows, unwanted;
    AR_TRY(ar_module_backward(m->part[MADE_NORM], ctx, saved, &made, dy, batch));
    AR_TRY(back(m, BLOCK, ctx, saved, &z, &made, batch));
    AR_TRY(back(m, JOINED, ctx, saved, &both, &z, batch));
    for (int i = 0; i < 2; i++) {
        const ar_tensor from = half(m, &both, i);
        AR_TRY(ari_like(ctx, &part[i], &both, m->h));
        AR_TRY(ARI_KERNEL(ctx, copy_strided, &part[i], &from));
    }
    ar_ctx_release(ctx, &both);
    AR_TRY(back(m, ENTERED_NORM, ctx, saved, dx ? dx : &unwanted, &part[1], batch));
    AR_TRY(back(m, TOKENS_NORM, ctx, saved, &rows, &part[0], batch));
    if (ar_faulty(ctx, AR_FAULT_mtp_embedding_grad_lost))
        AR_TRY(ARI_KERNEL(ctx, fill, &rows, 0.0f));
    if (ar_faulty(ctx, AR_FAULT_mtp_embedding_grad_twice))
        AR_TRY(ARI_KERNEL(ctx, add, &rows, &rows, &rows));
    AR_TRY(ar_embedding_backward(m->embedding, ctx, saved, &rows, batch));
    ar_ctx_release(ctx, &rows);
    return AR_OK;
}

static ar_status create_norm(mtp_module *m, int part, ar_ctx *ctx, const ari_mtp_options *o, const char *leaf)
{
    const ari_norm_options norm = {
        .kind = o->norm, .h = m->h, .eps = o->norm_eps, .plus_one = o->norm_plus_one, .no_bias = o->norm_no_bias};
    const ar_placement stream = ari_placed_stream(ctx);
    char name[96];
    AR_TRY(ari_path(name, sizeof name, m->base.name, leaf));
    return ari_norm_create(&m->part[part], ctx, name, &norm, (ar_tp_redistribution){stream, stream});
}

static ar_status create_parts(mtp_module *m, ar_ctx *ctx, const ari_mtp_options *o)
{
    const ar_placement stream = ari_placed_stream(ctx);
    char name[96];
    m->embedding = o->embedding;
    m->h = o->block->attention.hidden;
    ar_embedding_token(m->embedding)->uses++;
    AR_TRY(ari_path(m->tokens_name, sizeof m->tokens_name, m->base.name, o->tokens));
    AR_TRY(create_norm(m, TOKENS_NORM, ctx, o, o->tokens_norm));
    AR_TRY(create_norm(m, ENTERED_NORM, ctx, o, o->entered_norm));
    AR_TRY(ari_path(name, sizeof name, m->base.name, o->joined));
    AR_TRY(ari_linear_module_create(&m->part[JOINED], ctx, name, 2 * m->h, m->h, false,
                                    (ar_linear_split){AR_STYLE_REPLICATE, stream, stream}));
    AR_TRY(ar_block_create(&m->part[BLOCK], ctx, m->base.name, o->block));
    return create_norm(m, MADE_NORM, ctx, o, o->made_norm);
}

ar_status ari_mtp_create(ar_module **gives, ar_ctx *ctx, const char *name, const ari_mtp_options *o)
{
    static const ar_module_ops ops = {.kind = "mtp",
                                      .forward = mtp_forward,
                                      .backward = mtp_backward,
                                      .children_at = offsetof(mtp_module, part),
                                      .children_count = PARTS};
    mtp_module *m = NULL;
    AR_TRY(ari_module_begin((void **)&m, sizeof *m, &ops, name, AR_HELD_UNKNOWN));
    return ari_module_end(gives, &m->base, create_parts(m, ctx, o));
}
