/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/check/module_run.h"

#include <stdlib.h>

#include "ref/core/context.h"
#include "ref/core/size.h"
#include "ref/layers/parts.h"
#include "ref/layers/share.h"
#include "run/run.h"
#include "verify/reference/use_names.h"

ar_status ari_module_run_check(const ar_run *r, const char *name)
{
    if (r->numerics != AR_NUMERICS_EXACT || r->precision != AR_PRECISION_F32 || r->storage == AR_BF16 || r->process)
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "%s: a module is checked in exact numerics and fp32, by ranks that are threads", name);
    if (r->sim.trace || r->sim.cluster || r->sim.fault_count > 0 || r->sim.explore)
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "%s: the check of a module has no trace, virtual time, faults of the transport or schedule",
                            name);
    return ari_run_check_training(r, name);
}

ar_status ari_module_build(const ar_module_case *c, uint64_t seed, ar_ctx *ctx, ar_module **module, ar_loss **loss)
{
    *module = NULL;
    *loss = NULL;
    ar_status st = AR_OK;
    AR_TRY_TO(failed, st, c->build(c->user, ctx, module, loss));
    if (!*module || !*loss)
        AR_TRY_TO(failed, st, ar_error_set(AR_ERR_ARG, "%s: build gave no %s", c->name, *module ? "loss" : "module"));
    if (!c->own_weights)
        AR_TRY_TO(failed, st, ar_module_fresh(*module, ctx, seed));
    return AR_OK;
failed:
    ar_loss_destroy(*loss);
    ar_module_destroy(*module);
    *module = NULL;
    *loss = NULL;
    return st;
}

static bool is_first(const ar_ctx *ctx)
{
    return ar_comm_rank(ctx->tp) == 0 && ar_comm_rank(ctx->dp) == 0;
}

typedef struct rank_state {
    ar_module *module;
    ar_loss *loss;
    ar_param **params; /* [n] */
    size_t n;
    ar_ddp *ddp;
    ar_optimizer *optimizer;
} rank_state;

static void fini(rank_state *s)
{
    ar_optimizer_destroy(s->optimizer);
    ar_ddp_destroy(s->ddp);
    free(s->params);
    ar_loss_destroy(s->loss);
    ar_module_destroy(s->module);
}

static ar_status init(rank_state *s, const ari_module_run *run, ar_ctx *ctx)
{
    const ar_check_module_options *o = run->o;
    const bool zero = run->parallel.zero > 0;
    AR_TRY(ari_module_build(run->c, o->run.seed, ctx, &s->module, &s->loss));
    AR_TRY(ari_module_list(&s->params, &s->n, s->module));
    if (o->ddp || zero) {
        ar_ddp_options options = o->ddp ? *o->ddp : ar_ddp_defaults();
        options.zero = run->parallel.zero;
        AR_TRY(ar_ddp_create(&s->ddp, ctx, s->module, &options));
    }
    for (size_t i = 0; i < s->n; i++)
        AR_TRY(ar_param_tap(s->params[i], ctx, 'i', &s->params[i]->value));
    if (o->run.steps == 0)
        return AR_OK;
    return zero ? ar_optimizer_create_sharded(&s->optimizer, ctx, s->ddp, &o->run.optimizer)
                : ar_optimizer_create(&s->optimizer, ctx, s->params, s->n, &o->run.optimizer);
}

static ar_status train(ari_module_run *run, ar_ctx *ctx, const rank_state *s)
{
    const ar_train_options options = {.parallel = run->parallel, .clip = run->o->run.clip, .ddp = s->ddp};
    for (int i = 0; i < (int)ari_run_steps(&run->o->run); i++) {
        ar_train_result result;
        AR_TRY(ar_module_train_step(&result, s->module, s->loss, ctx, s->optimizer, &run->batch[i], (uint32_t)i + 1,
                                    &options));
        if (is_first(ctx))
            run->loss[i] = result.loss;
    }
    return AR_OK;
}

ar_status ari_module_run_rank(void *user, ar_ctx *ctx)
{
    ari_module_run *run = user;
    rank_state s = {0};
    ari_use_names names;
    ari_use_names_begin(&names, ctx);
    ar_status st = init(&s, run, ctx);
    for (size_t i = 0; st == AR_OK && i < s.n && is_first(ctx); i++)
        run->parameters += ari_layout_count(&s.params[i]->layout);
    if (st == AR_OK && is_first(ctx))
        run->parameter_tensors = s.n;
    if (st == AR_OK)
        st = train(run, ctx, &s);
    fini(&s);
    ari_use_names_end(&names, ctx);
    return st;
}
