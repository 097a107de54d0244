/* SPDX-License-Identifier: Apache-2.0 */
/* One training step on one rank. */
#include "ref/train/step.h"
#include "ref/record/ledger.h"

#include <math.h>
#include <string.h>

#include "anyrank/arith.h"
#include "anyrank/gradients.h"
#include "ref/arith/arith_private.h"
#include "ref/context/context_private.h"
#include "ref/core/record.h"
#include "ref/layers/batch_private.h"
#include "ref/layers/experts/balance.h"
#include "ref/layers/experts/scores.h"
#include "ref/layers/module_private.h"
#include "ref/layers/param_private.h"
#include "ref/layers/parts.h"
#include "ref/models/model.h"
#include "ref/models/parallel_private.h"
#include "ref/models/stages.h"
#include "ref/train/ddp_private.h"
#include "ref/train/faults.h"
#include "ref/train/train_private.h"
#include "ref/train/units.h"

/* --- loss scaling ------------------------------------------------------------------------------------------------- */

/* The largest loss scale. Its reciprocal is a normal fp32 number; the smallest scale is 1. */
#define LARGEST_SCALE 0x1p126

ar_loss_scaling ar_loss_scaling_defaults(bool dynamic)
{
    return (ar_loss_scaling){.dynamic = dynamic, .growth = 2.0, .backoff = 0.5, .interval = 2000, .scale = 65536.0};
}

static ar_status refuse_scaling(const char *option, double value, const char *range)
{
    return ar_error_set(AR_ERR_ARG, "loss scaling: %s is %g, expected %s", option, value, range);
}

ar_status ari_loss_scaling_check(const ar_loss_scaling *s)
{
    if (!(s->scale >= 1.0 && s->scale <= LARGEST_SCALE))
        return refuse_scaling("scale", s->scale, "a number from 1 to 2^126");
    if (!s->dynamic)
        return AR_OK;
    if (!(s->growth > 1.0 && isfinite(s->growth)))
        return refuse_scaling("growth", s->growth, "a finite number above 1");
    if (!(s->backoff > 0.0 && s->backoff < 1.0))
        return refuse_scaling("backoff", s->backoff, "a number between 0 and 1");
    return s->interval > 0 ? AR_OK : refuse_scaling("interval", 0.0, "at least 1 step");
}

/* Checks loss scaling. Errors: AR_ERR_ARG (ari_loss_scaling_check; exact numerics). */
static ar_status scaling_check(const ar_loss_scaling *s, const ar_ctx *ctx)
{
    if (ctx->arith == ari_arith_exact(ctx->arith->precision))
        return ar_error_set(AR_ERR_ARG,
                            "loss scaling in exact numerics: its gradients are sums of integers that lose "
                            "nothing however small they are, and its baseline scales none; give native numerics");
    return ari_loss_scaling_check(s);
}

/* Makes ar_param_grad_value return gradients without the scale from here on. */
static void scaling_unscale(const ar_loss_scaling *s, ar_param *const *params, size_t n)
{
    const float inverse = (float)(1.0 / s->scale);
    for (size_t i = 0; i < n; i++)
        params[i]->grad_scale *= inverse;
}

ar_status ari_scaling_finite(bool *finite, ar_ctx *ctx, float norm)
{
    int32_t wrong = !isfinite(norm);
    AR_TRY(ari_combine(ctx, ctx->tp, &wrong, 1, AR_I32, AR_MAX, "loss scale"));
    AR_TRY(ari_combine(ctx, ctx->dp, &wrong, 1, AR_I32, AR_MAX, "loss scale"));
    AR_TRY(ari_combine(ctx, ctx->pipeline, &wrong, 1, AR_I32, AR_MAX, "loss scale"));
    *finite = wrong == 0;
    return AR_OK;
}

/* Computes the next step's scale. Errors: AR_ERR_DATA (gradients are not finite, and the scale cannot decrease). */
static ar_status scaling_next(ar_loss_scaling *s, const ar_ctx *ctx, bool finite)
{
    if (!finite && (!s->dynamic || s->scale * s->backoff < 1.0))
        return ar_error_set(
            AR_ERR_DATA,
            "the gradient norm is not finite at step %u, with a %s loss scale of %g%s; no weight was changed",
            (unsigned)ctx->step, s->dynamic ? "dynamic" : "static", s->scale,
            s->dynamic ? ", which does not fall below 1" : "");
    if (!finite) {
        s->scale *= s->backoff;
        s->good = 0;
        s->skipped++;
    } else if (s->dynamic && ++s->good >= s->interval) {
        s->scale = s->scale * s->growth <= LARGEST_SCALE ? s->scale * s->growth : s->scale;
        s->good = 0;
    }
    return AR_OK;
}

/* --- the step ----------------------------------------------------------------------------------------------------- */

enum { MADE_TEXT = 256 };
/* Describes the layout for which the context's groups and layers were made. */
static void describe_made(char text[MADE_TEXT], ar_parallel layout)
{
    layout.schedule = AR_PP_1F1B;
    layout.own_schedule = NULL;
    layout.stages.n = 0;
    layout.zero = layout.micro_batches = 0;
    layout.keep_gathered = false;
    ari_parallel_text(text, MADE_TEXT, &layout);
}

static ar_status check_options(const ar_ctx *ctx, const ar_train_options *o)
{
    const int inner = ari_at_least_one(o->parallel.cp_inner);
    char requested[MADE_TEXT], actual[MADE_TEXT];
    ar_parallel actual_layout = ctx->layout;
    actual_layout.sp = ctx->sp;
    actual_layout.overlap = ctx->overlap;
    actual_layout.recompute = ctx->recompute;
    describe_made(requested, o->parallel);
    describe_made(actual, actual_layout);
    if (strcmp(requested, actual) != 0)
        return ar_error_set(AR_ERR_ARG, "a training step of layout %s in a context of %s", requested, actual);
    if (inner != actual_layout.cp_inner)
        return ar_error_set(AR_ERR_ARG, "a training step of inner %d in a context whose inner group has %d ranks",
                            inner, actual_layout.cp_inner);
    AR_TRY(ari_given_schedule_check(&o->parallel));
    if (!(o->clip >= 0.0))
        return ar_error_set(AR_ERR_ARG, "the largest gradient norm is %g, expected at least 0", o->clip);
    return o->scaling ? scaling_check(o->scaling, ctx) : AR_OK;
}

/* Counts the targets T over all micro-batches and the ranks that reduce gradients. T is needed before the first
 * backward pass, since all gradients are divided by T. */
static ar_status count_targets(size_t *targets, const ari_trained *trained, ar_ctx *ctx, ar_batch *micro, size_t n,
                               size_t pieces)
{
    const size_t counts = 1 + ari_trained_depths(trained->module);
    ARI_OWNED int64_t *micro_targets = NULL;
    int64_t sum[1 + AR_MAX_MTP] = {0};
    size_t totals[1 + AR_MAX_MTP];
    ar_status st = AR_OK;
    AR_TRY(ARI_ALLOC_ZERO(&micro_targets, pieces, "counts of targets"));
    for (size_t i = 0; i < n && st == AR_OK; i++) {
        size_t count[1 + AR_MAX_MTP] = {0};
        st = ari_trained_targets(count, trained->module, trained->loss, ctx, &micro[i]);
        micro_targets[i] = (int64_t)count[0];
        for (size_t k = 0; k < counts; k++)
            sum[k] += (int64_t)count[k];
    }
    if (st == AR_OK)
        st = ari_combine(ctx, ctx->dp, sum, counts, AR_I64, AR_SUM, "targets");
    if (st == AR_OK)
        st = ARI_NOTE(ctx, .kind = ARI_LEDGER_TARGETS, .name = "");
    for (size_t k = 0; k < counts; k++)
        totals[k] = (size_t)sum[ari_faulty(ctx, "mtp_mean_over_all") ? 0 : k];
    *targets = totals[0];
    for (size_t i = 0; i < n; i++) {
        micro[i].targets = totals[0];
        memcpy(micro[i].mtp_targets, totals + 1, (counts - 1) * sizeof *totals);
    }
    ari_trained_further(trained->module, totals + 1);
    if (st == AR_OK)
        st = ari_fault_divisors(targets, ctx, micro, micro_targets, n, pieces);
    return st;
}

/* Gets this rank's micro-batches that contain samples; these are the first ones. Data-parallel ranks may have different
 * numbers; unless units are sharded, the ranks communicate only before the first and after the last. *max_batches: the
 * first rank's number, which is the largest. The caller releases the result with free(). */
static ar_status own_batches(ar_batch **out, size_t *n, size_t *max_batches, const ar_ctx *ctx, const ar_batch *global,
                             const ar_parallel *p)
{
    const int pieces = ari_at_least_one(p->micro_batches);
    ar_batch *micro = NULL;
    AR_TRY(ARI_ALLOC(&micro, (size_t)pieces, "micro-batches"));
    *n = *max_batches = 0;
    for (int i = 0; i < pieces; i++) {
        size_t start = 0, count = 0;
        ari_parallel_rows(p, global->batch, 0, i, &start, &count);
        *max_batches += count > 0;
        ari_parallel_slice(&micro[*n], p, global, ari_ctx_data_rank(ctx), i);
        *n += micro[*n].batch > 0;
    }
    *out = micro;
    return AR_OK;
}

static ar_status forward_micro(const ari_trained *trained, ar_ctx *ctx, ar_saved *saved, const ar_batch *batch,
                               size_t index, ar_train_result *result)
{
    ari_span_begin("micro-batch %zu:fwd", index);
    AR_TRY(ari_span_end(ari_stage_forward(trained->module, trained->loss, ctx, saved, 0, NULL, NULL, batch)));
    ari_step_stored(ctx, &result->stored_bytes);
    return AR_OK;
}

static ar_status backward_micro(const ari_trained *trained, ar_ctx *ctx, ar_saved *saved, const ar_batch *batch,
                                size_t index, const ar_train_options *o)
{
    AR_TRY(ari_fault_accumulated(trained->params, trained->n, ctx, ari_at_least_one(o->parallel.micro_batches)));
    ari_span_begin("micro-batch %zu:bwd", index);
    AR_TRY(ari_ddp_begin_backward(o->ddp, 0, false));
    AR_TRY(ari_span_end(ari_stage_backward(trained->module, trained->loss, ctx, saved, 0, NULL, NULL, batch)));
    return ari_ddp_end_backward(o->ddp, 0);
}

/* Handles a micro-batch that other ranks have and this one does not. */
static ar_status backward_absent(const ar_train_options *o)
{
    AR_TRY(ari_ddp_absent_backward(o->ddp, 0));
    return ari_ddp_end_backward(o->ddp, 0);
}

/* The buckets are reduced while the last backward pass runs. */
static void sync_in_last(const ar_train_options *o, bool is_last)
{
    if (o->ddp)
        ar_ddp_set_sync(o->ddp, is_last);
}

/* Runs each micro-batch forward and backward and frees its memory before the next; or all forward and then all
 * backward. */
static ar_status run_batches(const ari_trained *trained, ar_ctx *ctx, ar_saved *saved, const ar_batch *micro, size_t n,
                             size_t max_batches, const ar_train_options *o, ar_train_result *result)
{
    const bool all_first = o->parallel.forward_first;
    if (ar_comm_size(ctx->pipeline) > 1)
        return ari_pipeline_run(trained, ctx, micro, n, max_batches, o, result);
    for (size_t i = 0; i < max_batches; i++) {
        if (i < n)
            sync_in_last(o, i + 1 == n);
        AR_TRY(i < n ? forward_micro(trained, ctx, saved, &micro[i], i, result) : ari_ddp_absent_forward(o->ddp, 0));
        if (!o->forward_only && !all_first) {
            AR_TRY(i < n ? backward_micro(trained, ctx, saved, &micro[i], i, o) : backward_absent(o));
        }
        if (!all_first) {
            ari_saved_clear(saved);
            ar_ctx_end_step(ctx);
        }
    }
    for (size_t i = max_batches; all_first && !o->forward_only && i-- > 0;) {
        sync_in_last(o, i == 0);
        AR_TRY(i < n ? backward_micro(trained, ctx, saved, &micro[i], i, o) : backward_absent(o));
    }
    return AR_OK;
}

/* --- what comes before ------------------------------------------------------------------------------------------- */

/* Runs all micro-batches forward without reporting values. */
static ar_status counting_pass(const ari_trained *trained, ar_ctx *ctx, ar_saved *saved, const ar_batch *micro,
                               size_t n, size_t max_batches, const ar_train_options *o)
{
    const ar_tap_fn tap = ctx->tap;
    ar_train_options forward = *o;
    ar_train_result unused = {0};
    forward.forward_only = true;
    forward.parallel.forward_first = false;
    ctx->tap = NULL;
    ctx->counting = ctx->recomputing = true;
    ari_span_begin("count routes");
    const ar_status st = ari_span_end(run_batches(trained, ctx, saved, micro, n, max_batches, &forward, &unused));
    ctx->counting = ctx->recomputing = false;
    ctx->tap = tap;
    ar_ctx_end_step(ctx);
    return st;
}

/* A balance of more tokens than a micro-batch has needs their routes before the first backward pass. */
static ar_status count_routes(const ari_trained *trained, ar_ctx *ctx, ar_saved *saved, const ar_batch *micro, size_t n,
                              size_t max_batches, const ar_train_options *o)
{
    ari_routers routers;
    AR_TRY(ari_balance_routers(&routers, trained->module));
    if (!routers.counts)
        return AR_OK;
    AR_TRY(counting_pass(trained, ctx, saved, micro, n, max_batches, o));
    return ari_balance_share(trained->module, ctx);
}

/* --- what comes after --------------------------------------------------------------------------------------------- */

/* Completes every gradient and reports it to the tap. */
static ar_status reduce_gradients(const ari_trained *trained, ar_ctx *ctx, const ar_train_options *o)
{
    if (!o->ddp) {
        if (o->scaling)
            scaling_unscale(o->scaling, trained->params, trained->n);
        ari_span_begin("reduce gradients");
        return ari_span_end(ari_params_reduce(trained->params, trained->n, ctx));
    }
    AR_TRY(ar_ddp_wait(o->ddp));
    if (o->scaling) /* now, since the wait sets the scale of a mean */
        scaling_unscale(o->scaling, trained->params, trained->n);
    return ari_params_tap_grads(trained->params, trained->n, ctx);
}

static ar_status verify_gradients(const ar_ctx *ctx, ar_optimizer *optimizer, const ar_train_options *o)
{
    const ar_gradients_verify_options everything = {.gradients = true,
                                                    .values = true,
                                                    .optimizer = optimizer,
                                                    .allow_unused = o->ddp && ari_ddp_options_of(o->ddp).find_unused};
    ar_verdict v;
    if (!o->verify)
        return AR_OK;
    ari_span_begin("verify gradients");
    AR_TRY(ari_span_end(ar_gradients_verify(o->verify, &v, &everything)));
    const ar_status st = ar_verdict_status(&v);
    return st == AR_OK
               ? AR_OK
               : ar_error_set(st, "step %u: %s; no weight was changed", (unsigned)ctx->step, ar_error_message());
}

/* Clips by the norm of all gradients, then changes the weights. */
static ar_status update_weights(ar_train_result *result, const ari_trained *trained, ar_ctx *ctx,
                                ar_optimizer *optimizer, const ar_train_options *o)
{
    float factor = 1.0f;
    bool finite = true;
    if (o->clip > 0.0 || o->scaling)
        AR_TRY(ar_gradient_norm(&result->norm, ctx, trained->params, trained->n));
    if (o->clip > 0.0)
        AR_TRY(ari_tap_number(ctx, "grad_norm", 'c', result->norm));
    if (o->scaling) {
        AR_TRY(ari_scaling_finite(&finite, ctx, result->norm));
        AR_TRY(scaling_next(o->scaling, ctx, finite));
    }
    result->skipped = !finite;
    if (result->skipped)
        return AR_OK;
    AR_TRY(verify_gradients(ctx, optimizer, o));
    if (o->clip > 0.0) {
        if (!isfinite(result->norm))
            return ar_error_set(AR_ERR_DATA, "the gradient norm is not finite at step %u; no weight was changed",
                                (unsigned)ctx->step);
        factor = ari_clip_factor(o->clip, result->norm);
    }
    AR_TRY(ari_qk_clip_prepare(trained->module, ctx, optimizer->options.qk_clip));
    AR_TRY(ar_optimizer_step(optimizer, ctx, factor));
    return ari_scores_update(trained->module, ctx);
}

/* Ranks with fewer micro-batches, or without gradients of some weights, launch buckets elsewhere in the step. */
static bool is_even(const ar_train_options *o, const ar_batch *global)
{
    return o->ddp->ctx->arith->grad_complete && global->batch % (size_t)ari_at_least_one(o->parallel.dp) == 0 &&
           !ari_ddp_options_of(o->ddp).find_unused;
}

/* Starts a step of the data-parallel object. The first rank has the most samples, and its first micro-batch the most of
 * them. */
static ar_status start_ddp(const ari_trained *trained, const ar_batch *global, const ar_train_options *o)
{
    size_t start = 0;
    ari_ddp_step *step = &o->ddp->step;
    AR_TRY(ar_ddp_start(o->ddp));
    *step = (ari_ddp_step){.passes = (size_t)ari_at_least_one(o->parallel.micro_batches),
                           .tokens = ari_batch_positions(global),
                           .depths = 1 + ari_trained_depths(trained->module),
                           .repeats = global->documents || global->position_ids,
                           .even = is_even(o, global)};
    ari_parallel_rows(&(ar_parallel){.dp = o->parallel.dp}, global->batch, 0, 0, &start, &step->samples);
    step->pass_samples = step->samples;
    if (ari_passes_separate(&o->parallel))
        ari_parallel_rows(&o->parallel, global->batch, 0, 0, &start, &step->pass_samples);
    return AR_OK;
}

/* Checks that each weight is used in one product of the step's forward pass and in one of its backward pass. */
static ar_status look_at_uses(const ari_trained *trained, ar_ctx *ctx, size_t pieces)
{
    ari_routers routers;
    AR_TRY(ari_balance_routers(&routers, trained->module));
    ctx->operands_once = pieces == 1 && !routers.counts && ctx->recompute.part == AR_RECOMPUTE_NONE &&
                         ari_trained_depths(trained->module) == 0;
    return AR_OK;
}

static ar_status run_step(ar_train_result *result, ari_trained *trained, ar_ctx *ctx, ar_optimizer *optimizer,
                          const ar_batch *global, const ar_train_options *o)
{
    const size_t pieces = (size_t)ari_at_least_one(o->parallel.micro_batches);
    ARI_OWNED ar_param **params = NULL;
    ARI_OWNED ar_batch *micro = NULL;
    ARI_OWNED_BY(ar_saved_destroy) ar_saved *saved = NULL;
    size_t n = 0, max_batches = 0;
    AR_TRY(own_batches(&micro, &n, &max_batches, ctx, global, &o->parallel));
    AR_TRY(ar_saved_create(&saved));
    AR_TRY(ari_module_list(&params, &trained->n, trained->module));
    trained->params = params;
    AR_TRY(ari_ddp_check_step(o->ddp, ctx, trained->params, trained->n));
    AR_TRY(count_targets(&result->targets, trained, ctx, micro, n, pieces));
    AR_TRY(ari_trained_zero(trained->module, trained->loss, ctx));
    if (o->ddp)
        AR_TRY(start_ddp(trained, global, o));
    AR_TRY(look_at_uses(trained, ctx, pieces));
    AR_TRY(count_routes(trained, ctx, saved, micro, n, max_batches, o));
    AR_TRY(run_batches(trained, ctx, saved, micro, n, max_batches, o, result));
    if (o->ddp && o->ddp->step.even)
        AR_TRY(ari_ddp_check_used(o->ddp)); /* the loss is reduced first, and other ranks may wait for one of this
                                               rank's buckets */
    ar_ctx_end_step(ctx); /* frees activations of all micro-batches before memory is allocated below */
    AR_TRY(ari_trained_loss(trained->module, trained->loss, ctx, &result->loss, result->targets));
    if (o->forward_only)
        return AR_OK;
    AR_TRY(reduce_gradients(trained, ctx, o));
    if (!optimizer)
        return verify_gradients(ctx, NULL, o);
    ari_span_begin("optimizer");
    return ari_span_end(update_weights(result, trained, ctx, optimizer, o));
}

static ar_status train_step(ar_train_result *result, ari_trained *trained, ar_ctx *ctx, ar_optimizer *optimizer,
                            const ar_batch *global, uint32_t step, const ar_train_options *o)
{
    *result = (ar_train_result){0};
    AR_TRY(check_options(ctx, o));
    if (!global->input && !global->input_ids)
        return ar_error_set(AR_ERR_ARG, "a training step takes its input from the batch, which has none");
    AR_TRY(ari_batch_check(global, SIZE_MAX)); /* checked before ranks take their rows of the batch */
    ar_ctx_begin_step(ctx, step);
    ctx->loss_scale = o->scaling ? o->scaling->scale : 1.0;
    ctx->tracks_logits = optimizer && optimizer->options.qk_clip > 0.0;
    ari_span_begin("step %u", (unsigned)step);
    ar_status st = ari_span_end(run_step(result, trained, ctx, optimizer, global, o));
    if (o->ddp) /* checked before any rank waits for reductions in which its peers take part */
        st = ari_ddp_fail(o->ddp, st);
    ctx->loss_scale = 1.0;
    ctx->operands_once = ctx->tracks_logits = false;
    ar_ctx_end_step(ctx);
    return st;
}

ar_status ar_train_step(ar_train_result *result, ar_model *m, ar_ctx *ctx, ar_optimizer *optimizer,
                        const ar_batch *global, uint32_t step, const ar_train_options *o)
{
    ari_trained trained = {.module = ar_model_module(m), .loss = ari_model_criterion(m)};
    return train_step(result, &trained, ctx, optimizer, global, step, o);
}

static ar_status check_module(const ar_module *m, const ar_ctx *ctx)
{
    if (ar_comm_size(ctx->pipeline) == 1)
        return AR_OK;
    if (!ari_sequential_stages(m, NULL))
        return ar_error_set(
            AR_ERR_UNSUPPORTED,
            "%s has no stages for a pipeline: cut a list of modules by ar_sequential_cut, or leave %s out", m->name,
            ari_layout_axes[ARI_LAYOUT_PP].name);
    return AR_OK;
}

ar_status ar_module_train_step(ar_train_result *result, ar_module *m, ar_loss *loss, ar_ctx *ctx,
                               ar_optimizer *optimizer, const ar_batch *global, uint32_t step,
                               const ar_train_options *o)
{
    ari_trained trained = {.module = m, .loss = loss};
    AR_TRY(check_module(m, ctx));
    return train_step(result, &trained, ctx, optimizer, global, step, o);
}
