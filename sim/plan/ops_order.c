/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks' coordinates, their stages, and the order of stages and micro-batches. */
#include "sim/plan/ops_impl.h"

#include "ref/core/context_private.h"
#include "ref/core/size.h"
#include "ref/models/parallel_private.h"
#include "ref/models/plan_private.h"
#include "ref/pipeline/schedule_private.h"

/* --- a walk ------------------------------------------------------------------------------------------------------- */

/* Goes to a rank of the pipeline, at its first stage. */
static void enter_rank(ari_op_builder *w, size_t rank)
{
    w->at[ARI_AXIS_PP] = w->stage = rank;
    w->first = rank == 0;
    w->last = rank + 1 == w->ranks[ARI_AXIS_PP];
}

/* The coordinates of a rank of the world along each axis. */
static void place_rank(ari_op_builder *w, const ar_parallel *p, int rank)
{
    const ari_ranks ranks = ari_ranks_of(p);
    for (int axis = 0; axis < ARI_PLACED_AXES; axis++) {
        w->ranks[axis] = (size_t)ranks.along[axis];
        w->at[axis] = (size_t)ari_place_along(&ranks, rank, 1u << axis);
    }
    w->ep = (size_t)ari_at_least_one(p->ep);
    w->whole = ari_experts_whole(p);
    w->apart = ari_experts_apart(p);
    const size_t at = (size_t)ari_place_along(&ranks, rank, ari_expert_axes(p));
    const size_t place[2] = {(size_t)ari_place_along(&ranks, rank, ARI_CUTS_DATA), at / w->ep};
    w->summing[false] = (size_t)ari_extent(p, ARI_CUTS_DATA);
    w->summing[true] = (size_t)ari_extent(p, ari_expert_axes(p)) / w->ep;
    for (int experts = 0; experts < 2; experts++) {
        w->sharing[experts] = w->summing[experts] / (size_t)ari_at_least_one(p->dp_replicate);
        w->sharing_rank[experts] = place[experts] % w->sharing[experts];
    }
    w->experts = w->config->experts.n / w->ep;
    w->first_expert = at % w->ep * w->experts;
    w->stages = (size_t)ari_parallel_stages(p);
    enter_rank(w, w->at[ARI_AXIS_PP]);
}

static ari_op_builder walk_of(const ari_step_case *c, int rank, ari_operation_visitor visit, void *user)
{
    const ar_parallel *p = &c->run.parallel;
    const int tp = ari_at_least_one(p->tp);
    ari_op_builder w = {.c = c,
                        .config = c->config,
                        .form = {.exact = c->run.numerics == AR_NUMERICS_EXACT,
                                 .activations = ari_activations_of(c->run.precision),
                                 .matrices = ari_matrix_dtype(c->run.precision, c->run.storage),
                                 .sp = p->sp && tp > 1,
                                 .packed = c->config->arch == AR_ARCH_GPT2 || c->config->arch == AR_ARCH_PHI3 ||
                                           c->config->arch == AR_ARCH_GPT_NEOX,
                                 .gate_up = c->config->arch == AR_ARCH_PHI3 || c->config->arch == AR_ARCH_GLM4,
                                 .head = c->config->arch != AR_ARCH_STACK},
                        .layer = ARI_NO_LAYER,
                        .split = ARI_NO_LAYER,
                        .times = 1,
                        .edges = {.values = ari_operations_values(c)},
                        .visit = visit,
                        .user = user};
    place_rank(&w, p, rank);
    w.form.by_tokens = ari_plan_by_tokens(&c->run.plan, tp, p->sp);
    w.form.overlaps = w.form.sp && p->overlap > 1 && ari_op_builder_positions(&w) > 1;
    if (w.st == AR_OK)
        w.st = ari_plan_outer(&c->run.plan, c->config, w.form.by_tokens, &w.outer);
    return w;
}

static void take_samples(ari_op_builder *w, size_t all, size_t own)
{
    w->all = all;
    w->own = own;
    w->tokens = ari_op_builder_mul(w, own, w->c->run.seq / ari_op_builder_cp(w));
}

/* True if only forward passes have the operation. */
static bool goes_forward(ar_pp_kind k)
{
    return k == AR_PP_FORWARD || k == AR_PP_SEND_ACTIVATION || k == AR_PP_RECV_ACTIVATION;
}

/* One operation of a schedule, of the samples that the walk has taken. */
static void schedule_operation(ari_op_builder *w, ar_pp_kind kind, size_t stage)
{
    const bool sends = kind == AR_PP_SEND_ACTIVATION || kind == AR_PP_SEND_GRADIENT;
    const bool forward = goes_forward(kind);
    w->pass = forward ? ARI_PASS_FORWARD : ARI_PASS_BACKWARD;
    w->part = kind;
    w->stage = stage;
    if (kind > AR_PP_BACKWARD_WEIGHT)
        ari_op_builder_message(w, sends);
    else if (forward)
        ari_op_builder_forward(w);
    else
        ari_op_builder_backward(w);
    if (kind <= AR_PP_BACKWARD_WEIGHT && !w->absent)
        w->passed[w->counting ? 2 : !forward][stage] = true;
}

/* A pass through one stage, with what it takes from its neighbours and sends to them. Of a rank that stands for a whole
 * pipeline without bubbles the backward pass is cut in two as there. */
static void pass(ari_op_builder *w, ari_operation_pass which, size_t stage)
{
    static const ar_pp_kind kinds[][3] = {{AR_PP_RECV_ACTIVATION, AR_PP_FORWARD, AR_PP_SEND_ACTIVATION},
                                          {AR_PP_RECV_GRADIENT, AR_PP_BACKWARD, AR_PP_SEND_GRADIENT},
                                          {AR_PP_BACKWARD_INPUT, AR_PP_SEND_GRADIENT, AR_PP_BACKWARD_WEIGHT}};
    for (int i = 0; i < 3; i++)
        schedule_operation(w, kinds[which == ARI_PASS_FORWARD ? 0 : w->c->halves ? 2 : 1][i], stage);
}

/* The passes of the walk's stages, one after the other. */
static void passes_of(ari_op_builder *w, ari_operation_pass which)
{
    for (size_t i = 0; i < w->stages; i++) {
        const size_t stage = which == ARI_PASS_FORWARD ? i : w->stages - 1 - i, rank = stage % w->ranks[ARI_AXIS_PP];
        if (!w->pipeline && rank != w->at[ARI_AXIS_PP])
            continue;
        enter_rank(w, rank);
        pass(w, which, stage);
    }
    enter_rank(w, w->at[ARI_AXIS_PP]);
}

/* Walks the operations outside the passes (f NULL: none), for each of the walk's ranks. */
static void outside(ari_op_builder *w, void (*f)(ari_op_builder *w))
{
    const size_t ranks = w->ranks[ARI_AXIS_PP];
    for (size_t rank = 0; rank < ranks && f; rank++) {
        if (!w->pipeline && rank != w->at[ARI_AXIS_PP])
            continue;
        enter_rank(w, rank);
        f(w);
    }
}

/* Goes to a micro-batch. Whether the rank does anything in it: it has samples, or shares out what another's pass
 * needs. */
static bool enter_micro(ari_op_builder *w, int micro)
{
    const ar_parallel *p = &w->c->run.parallel;
    const size_t ranks = w->ranks[ARI_AXIS_DP], longer = w->c->run.batch % ranks; /* the first have a sample more */
    size_t start = 0, own = 0, first = 0, last = 0;
    ari_parallel_rows(p, w->c->run.batch, (int)w->at[ARI_AXIS_DP], micro, &start, &own);
    ari_parallel_rows(p, w->c->run.batch, 0, micro, &start, &first);
    ari_parallel_rows(p, w->c->run.batch, (int)ranks - 1, micro, &start, &last);
    w->micro = (size_t)micro;
    w->absent = own == 0;
    take_samples(w, own > 0 ? longer * first + (ranks - longer) * last : 0, own);
    return own > 0 || (first > 0 && ari_op_builder_zero(w) >= 2);
}

static void micro_pass(ari_op_builder *w, ari_operation_pass which, int micro)
{
    if (enter_micro(w, micro))
        passes_of(w, which);
}

/* The number of micro-batches from i on with as many samples as that one: the first ones have one more. */
static int alike(const ari_op_builder *w, int i)
{
    const ar_parallel *p = &w->c->run.parallel;
    const size_t n = (size_t)ari_at_least_one(p->micro_batches);
    size_t own = 0, start = 0;
    ari_parallel_rows(&(ar_parallel){.dp = p->dp}, w->c->run.batch, (int)w->at[ARI_AXIS_DP], 0, &start, &own);
    const size_t longer = own % n, end = (size_t)i < longer ? longer : n;
    return (int)(end - (size_t)i);
}

/* The number of the n micro-batches from i on in which any rank has samples: those of the first rank, which has most.
 * */
static size_t held_by_first(const ari_op_builder *w, int i, int n)
{
    const ar_parallel *p = &w->c->run.parallel;
    size_t start = 0, samples = 0;
    ari_parallel_rows(&(ar_parallel){.dp = p->dp}, w->c->run.batch, 0, 0, &start, &samples);
    const size_t from = (size_t)i, to = from + (size_t)n < samples ? from + (size_t)n : samples;
    return to > from ? to - from : 0;
}

/* In the order of the micro-batches; or those that do the same as one, in exact numerics the first by itself: its weights
 * are new. */
static void passes(ari_op_builder *w, bool each)
{
    const int n = ari_at_least_one(w->c->run.parallel.micro_batches);
    const bool backward = !w->c->forward_only && !w->counting,
               all_first = backward && each && w->c->run.parallel.forward_first;
    for (int i = 0, step; i < n && w->st == AR_OK; i += step) {
        step = each || (i == 0 && w->form.exact) ? 1 : alike(w, i);
        w->times = each ? 1 : held_by_first(w, i, step);
        micro_pass(w, ARI_PASS_FORWARD, i);
        if (backward && !all_first)
            micro_pass(w, ARI_PASS_BACKWARD, i);
    }
    for (int i = n; all_first && i-- > 0 && w->st == AR_OK;)
        micro_pass(w, ARI_PASS_BACKWARD, i);
    w->times = 1;
    w->absent = false;
}

/* In the order of the rank's list. */
static void follow_schedule(ari_op_builder *w)
{
    ar_pipeline_schedule *s = NULL;
    size_t n = 0;
    if (w->st == AR_OK)
        w->st = ari_parallel_schedule(&s, &w->c->run.parallel);
    const ar_pp_operation *list = w->st == AR_OK ? ari_pipeline_schedule_rank(s, (int)w->at[ARI_AXIS_PP], &n) : NULL;
    for (size_t i = 0; i < n && w->st == AR_OK; i++) {
        if ((goes_forward(list[i].kind) || !(w->c->forward_only || w->counting)) && enter_micro(w, list[i].micro))
            schedule_operation(w, list[i].kind, (size_t)list[i].stage);
    }
    ari_pipeline_schedule_destroy(s);
    w->part = AR_PP_FORWARD; /* what follows belongs to no half of a backward pass */
    w->absent = false;
    enter_rank(w, w->at[ARI_AXIS_PP]);
}

static void all_passes(ari_op_builder *w, bool each)
{
    if (each && w->stages > 1)
        follow_schedule(w);
    else
        passes(w, each);
}

/* alone: nothing outside the passes. */
static ar_status all_of(ari_op_builder *w, bool each, bool alone)
{
    outside(w, alone ? NULL : ari_op_builder_start);
    outside(w, alone ? NULL : ari_op_builder_before);
    w->counting = ari_step_counts(w->c);
    if (w->counting)
        all_passes(w, each);
    w->counting = false;
    outside(w, alone ? NULL : ari_op_builder_counts);
    all_passes(w, each);
    outside(w, alone ? NULL : ari_op_builder_after);
    return w->st;
}

ar_status ari_operations(const ari_step_case *c, ari_op_extent which, int rank, ari_operation_visitor visit, void *user)
{
    ari_op_builder w = walk_of(c, rank, visit, user);
    switch (which) {
    case ARI_OPS_STEP:
        return all_of(&w, true, false);
    case ARI_OPS_PIPELINE:
        w.pipeline = true;
        return all_of(&w, false, false);
    case ARI_OPS_ONCE:
        return all_of(&w, false, false);
    case ARI_OPS_PASSES:
        return all_of(&w, false, true);
    case ARI_OPS_START:
        ari_op_builder_start(&w);
        break;
    case ARI_OPS_COUNTING:
        w.counting = true;
        if (!ari_step_counts(c))
            break;
        /* fall through */
    case ARI_OPS_FORWARD:
    case ARI_OPS_BACKWARD:
        take_samples(&w, c->run.batch, c->run.batch);
        passes_of(&w, which == ARI_OPS_BACKWARD ? ARI_PASS_BACKWARD : ARI_PASS_FORWARD);
        break;
    case ARI_OPS_OUTSIDE:
        ari_op_builder_before(&w);
        ari_op_builder_counts(&w);
        ari_op_builder_after(&w);
        break;
    case ARI_OPS_BUCKETS:
        ari_op_builder_buckets(&w);
        break;
    }
    return w.st;
}

static void visit_params(ari_op_builder *w, ari_param_visitor visit)
{
    const ari_params all = ari_op_builder_all_params(w);
    for (size_t i = 0; i < all.n && w->st == AR_OK; i++) {
        const ari_one_param p = ari_op_builder_param_at(w, &all, i);
        if (w->st == AR_OK)
            w->st = visit(w->user, p.layer, &p.value);
    }
}

ar_status ari_operations_params(const ari_step_case *c, int rank, ari_param_visitor visit, void *user)
{
    ari_op_builder w = walk_of(c, rank, NULL, user);
    visit_params(&w, visit);
    return w.st;
}
