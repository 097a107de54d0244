/* SPDX-License-Identifier: Apache-2.0 */
#include "run/trainer.h"

#include <stdlib.h>

#include "ref/models/model.h"

static ar_status create_optimizer(ari_trainer *t, ar_ctx *ctx, const ari_trainer_options *o)
{
    if (o->forward_only || o->run.steps == 0)
        return AR_OK;
    if (o->run.parallel.zero)
        return ar_optimizer_create_sharded(&t->optimizer, ctx, t->ddp, &o->run.optimizer);
    return ar_optimizer_create(&t->optimizer, ctx, t->params, t->n, &o->run.optimizer);
}

static ar_status create_ddp(ari_trainer *t, ar_ctx *ctx, const ari_trainer_options *o)
{
    if (o->forward_only)
        return AR_OK;
    ar_ddp_options ddp = o->run.ddp;
    ddp.zero = o->run.parallel.zero;
    ddp.keep_weights = true; /* ar_model_set and ar_model_fresh have broadcast them */
    AR_TRY(ar_ddp_create_params(&t->ddp, ctx, "model", t->params, t->n, &ddp));
    t->step.ddp = t->ddp;
    return AR_OK;
}

ar_status ari_trainer_create(ari_trainer *t, ar_ctx *ctx, const ari_trainer_options *o)
{
    ar_status st = AR_OK;
    *t = (ari_trainer){.step = {.parallel = o->run.parallel, .clip = o->run.clip, .forward_only = o->forward_only}};
    AR_TRY_TO(failed, st, ar_model_create(&t->model, ctx, o->config, &o->run.plan));
    AR_TRY_TO(failed, st, ari_model_list(&t->params, &t->n, t->model));
    if (o->weights)
        AR_TRY_TO(failed, st, ar_model_set(t->model, ctx, o->weights, o->weights_user));
    else
        AR_TRY_TO(failed, st, ar_model_fresh(t->model, ctx, o->run.seed));
    AR_TRY_TO(failed, st, create_ddp(t, ctx, o));
    AR_TRY_TO(failed, st, create_optimizer(t, ctx, o));
    return AR_OK;
failed:
    ari_trainer_destroy(t);
    return st;
}

ar_status ari_trainer_step(ar_train_result *result, ari_trainer *t, ar_ctx *ctx, const ar_batch *global, uint32_t step)
{
    return ar_train_step(result, t->model, ctx, t->optimizer, global, step, &t->step);
}

void ari_trainer_destroy(ari_trainer *t)
{
    ar_optimizer_destroy(t->optimizer);
    ar_ddp_destroy(t->ddp);
    free(t->params);
    ar_model_destroy(t->model);
    *t = (ari_trainer){0};
}
