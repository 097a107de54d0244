/* SPDX-License-Identifier: Apache-2.0 */
/* The training step of a module and its loss. */
#include "ref/core/context.h"
#include "ref/layers/parts.h"
#include "ref/train/step.h"

typedef struct judged_module {
    ar_module *module;
    ar_loss *loss;
} judged_module;

static size_t targets(const void *self, const ar_batch *batch)
{
    return ar_loss_targets(((const judged_module *)self)->loss, batch);
}

static ar_status forward(void *self, ar_ctx *ctx, ar_saved *saved, const ar_batch *batch)
{
    const judged_module *m = self;
    ar_tensor x, y;
    AR_TRY(ar_batch_input(ctx, &x, batch));
    AR_TRY(ar_module_forward(m->module, ctx, saved, &y, &x, batch));
    return ar_loss_forward(m->loss, ctx, saved, &y, batch);
}

static ar_status backward(void *self, ar_ctx *ctx, ar_saved *saved, const ar_batch *batch)
{
    const judged_module *m = self;
    ar_tensor dy;
    AR_TRY(ar_loss_backward(m->loss, ctx, saved, &dy, batch));
    return ar_module_backward(m->module, ctx, saved, NULL, &dy, batch);
}

static ar_status loss_value(void *self, ar_ctx *ctx, float *loss, size_t t)
{
    return ar_loss_value(((const judged_module *)self)->loss, ctx, loss, t);
}

static ar_status zero(void *self, ar_ctx *ctx)
{
    const judged_module *m = self;
    AR_TRY(ar_module_zero_grad(m->module, ctx));
    return ar_loss_zero(m->loss, ctx);
}

static ar_status list(ar_param ***gives, size_t *n, void *self)
{
    return ari_module_list(gives, n, ((const judged_module *)self)->module);
}

static ar_status check_batch(const ar_ctx *ctx, const ar_batch *global)
{
    if (!global->input)
        return ar_error_set(AR_ERR_ARG, "the training step of a module takes its input from the batch, which has none");
    if (ari_ctx_sp(ctx))
        return ar_error_set(
            AR_ERR_UNSUPPORTED,
            "sequence parallelism shares out the positions of a model's input; a module of one's own is "
            "given all of it on every rank: leave sp out");
    return AR_OK;
}

ar_status ar_module_train_step(ar_train_result *result, ar_module *m, ar_loss *loss, ar_ctx *ctx,
                               ar_optimizer *optimizer, const ar_batch *global, uint32_t step,
                               const ar_train_options *o)
{
    judged_module self = {m, loss};
    const ari_trained what = {&self, targets, forward, backward, loss_value, zero, list};
    AR_TRY(check_batch(ctx, global));
    return ari_train_step(result, &what, ctx, optimizer, global, step, o);
}
