/* SPDX-License-Identifier: Apache-2.0 */
/* What is outside of the passes: parameters made equal at the start; of a step the sums over ranks and the update. */
#include "sim/plan/ops_impl.h"

/* An operation that is nothing but its collectives. */
static void begin_sum(ari_walk *w, ari_operation_kind kind, size_t n, ar_dtype dtype)
{
    ari_operation *op = ari_walk_begin(w, kind, ARI_NO_ROLE);
    op->made = ari_whole;
    op->input[op->inputs++] = ari_walk_run(w, n, dtype, false);
    ari_walk_over_dp(&op->input[0], (ar_placement){AR_PARTIAL_SUM, 0});
    op->output[op->outputs++] = ari_walk_run(w, n, dtype, false);
}

static void visit_if_moved(ari_walk *w)
{
    if (w->op.calls > 0)
        ari_walk_visit(w);
}

/* --- the start ---------------------------------------------------------------------------------------------------- */

/* Two words: a hash of the parameters, and their number. */
static void agree(ari_walk *w)
{
    begin_sum(w, ARI_OPERATION_AGREEMENT, 2, AR_I64);
    ari_walk_call(w, ARI_CALL_ALL_GATHER, ARI_OVER_DP, ari_walk_mul(w, 2, w->summing), AR_I64, ARI_AT_START,
                  ARI_NO_ROLE, "parameters of data parallelism");
    visit_if_moved(w);
}

void ari_walk_start(ari_walk *w)
{
    const ari_params all = ari_walk_all_params(w);
    w->pass = ARI_PASS_START;
    for (size_t i = 0; i < all.n && w->summing > 1 && w->st == AR_OK; i++) {
        const ari_one_param p = ari_walk_param_at(w, &all, i);
        ari_operation *op = ari_walk_begin(w, ARI_OPERATION_BROADCAST, p.of.role);
        op->made = p.value.at[ARI_AXIS_TP];
        op->input[op->inputs++] = op->output[op->outputs++] = p.value;
        ari_walk_call(w, ARI_CALL_BROADCAST, ARI_OVER_DP, p.elements, p.value.dtype, ARI_AT_START, p.of.role,
                      ari_part_suffix(p.of));
        ari_walk_visit(w);
    }
    ari_walk_layer(w, ARI_NO_LAYER);
    if (!w->c->forward_only)
        agree(w);
}

/* --- the step ----------------------------------------------------------------------------------------------------- */

void ari_walk_before(ari_walk *w)
{
    w->pass = ARI_PASS_STEP;
    begin_sum(w, ARI_OPERATION_TARGETS, 1, AR_I64);
    ari_walk_call(w, ARI_CALL_ALL_REDUCE, ARI_OVER_DP, 1, AR_I64, ARI_EACH_STEP, ARI_NO_ROLE, "targets");
    visit_if_moved(w);
    ari_walk_unit_begins(w, ARI_NO_LAYER);
}

/* Without a head each rank's terms are those of its own tokens. The last stage has it, and tells the others. */
static void sum_loss(ari_walk *w)
{
    const ar_placement partial = {AR_PARTIAL_SUM, 0};
    const bool spread = w->last && w->sp && !w->head;
    begin_sum(w, ARI_OPERATION_LOSS_SUM, 1, AR_F32);
    ari_walk_over_dp(&w->op.input[0], w->last ? partial : ari_whole);
    w->op.input[0].at[ARI_AXIS_TP] = spread ? partial : ari_whole;
    w->op.input[0].at[ARI_AXIS_PP] = partial;
    if (spread)
        ari_walk_sum(w, ARI_OVER_TP, 1, AR_F32, false, ARI_EACH_STEP, ARI_NO_ROLE, "loss");
    if (w->last)
        ari_walk_sum(w, ARI_OVER_DP, 1, AR_F32, false, ARI_EACH_STEP, ARI_NO_ROLE, "loss");
    ari_walk_call(w, ARI_CALL_BROADCAST, ARI_OVER_PP, 1, AR_F32, ARI_EACH_STEP, ARI_NO_ROLE, "loss");
    visit_if_moved(w);
}

/* A byte for each parameter. */
static void find_unused(ari_walk *w, const ari_params *all)
{
    begin_sum(w, ARI_OPERATION_UNUSED, all->n, AR_U8);
    ari_walk_call(w, ARI_CALL_ALL_REDUCE, ARI_OVER_DP, all->n, AR_U8, ARI_EACH_STEP, ARI_NO_ROLE, "used parameters");
    ari_walk_beside_passes(w);
    visit_if_moved(w);
}

/* An exponent, then two int64, over the ranks that hold different elements. */
static void norm_of_gradients(ari_walk *w)
{
    static const char tag[] = "grad_norm";
    begin_sum(w, ARI_OPERATION_GRADIENT_NORM, 1, AR_F32);
    w->op.input[0].at[ARI_AXIS_TP] = w->op.input[0].at[ARI_AXIS_PP] = (ar_placement){AR_PARTIAL_SUM, 0};
    ari_walk_over_dp(&w->op.input[0], ari_walk_shares(w) ? (ar_placement){AR_PARTIAL_SUM, 0} : ari_whole);
    for (int i = 0; i < 2; i++) {
        const size_t n = i == 0 ? 1 : 2;
        const ar_dtype dtype = i == 0 ? AR_I32 : AR_I64;
        ari_walk_call(w, ARI_CALL_ALL_REDUCE, ARI_OVER_TP, n, dtype, ARI_EACH_STEP, ARI_NO_ROLE, tag);
        ari_walk_call(w, ARI_CALL_ALL_REDUCE, ARI_OVER_PP, n, dtype, ARI_EACH_STEP, ARI_NO_ROLE, tag);
        if (ari_walk_shares(w))
            ari_walk_call(w, ARI_CALL_ALL_REDUCE, ari_walk_sharing(w), n, dtype, ARI_EACH_STEP, ARI_NO_ROLE, tag);
    }
    ari_walk_visit(w);
}

/* `words` of each of the ranks of a group, and of `others` with it. */
static void gather_said(ari_walk *w, ari_over over, size_t others, size_t words)
{
    const size_t said = ari_walk_mul(w, ari_walk_mul(w, ari_walk_ranks(w, over), others), words);
    ari_walk_call(w, ARI_CALL_ALL_GATHER, over, said, AR_I64, ARI_EACH_VERIFIED_STEP, ARI_NO_ROLE, "gradients:verify");
}

/* What each rank says of each of its parameters, and of itself, goes over tp, then over dp (docs/gradients.md). In a
 * pipeline what all these say of a tied weight goes over its ends, what they say of themselves over all stages, and then
 * how much each stage has found. */
static void verify(ari_walk *w, const ari_params *all)
{
    enum { WORDS_OF_A_PARAMETER = 16, WORDS_OF_A_RANK = 2 };
    const size_t words = ari_walk_add(w, ari_walk_mul(w, all->n, WORDS_OF_A_PARAMETER), WORDS_OF_A_RANK);
    const size_t tp = w->ranks[ARI_AXIS_TP], alike = ari_walk_mul(w, w->summing, tp);
    begin_sum(w, ARI_OPERATION_VERIFY, words, AR_I64);
    gather_said(w, ARI_OVER_TP, 1, words);
    gather_said(w, ARI_OVER_DP, tp, words);
    if ((w->first || w->last) && w->head && w->config->tied)
        gather_said(w, ARI_OVER_ENDS, alike, WORDS_OF_A_PARAMETER + WORDS_OF_A_RANK);
    gather_said(w, ARI_OVER_PP, alike, WORDS_OF_A_RANK);
    gather_said(w, ARI_OVER_PP, 1, 1);
    ari_walk_visit(w);
}

/* Of all elements that the rank holds; with ZeRO each rank updates its share of every bucket, then gathers them. */
static void update(ari_walk *w, const ari_params *all)
{
    size_t held = 0;
    for (size_t i = 0; i < all->n && w->st == AR_OK; i++)
        held = ari_walk_add(w, held, ari_walk_param_at(w, all, i).elements);
    ari_walk_layer(w, ARI_NO_LAYER);
    ari_operation *op = ari_walk_begin(w, ARI_OPERATION_UPDATE, ARI_NO_ROLE);
    op->made = ari_whole;
    op->params = all->n;
    op->input[op->inputs++] = op->output[op->outputs++] = ari_walk_run(w, held, AR_F32, ari_walk_shares(w));
    ari_walk_visit(w);
    if (ari_walk_shares(w) && ari_walk_zero(w) < 3)
        ari_walk_each_bucket(w, all, ARI_ALL_UNITS, ari_walk_gather_bucket);
}

void ari_walk_params(ari_walk *w, ari_param_visitor visit)
{
    const ari_params all = ari_walk_all_params(w);
    for (size_t i = 0; i < all.n && w->st == AR_OK; i++) {
        const ari_one_param p = ari_walk_param_at(w, &all, i);
        if (w->st == AR_OK)
            w->st = visit(w->user, p.layer, &p.value);
    }
}

void ari_walk_buckets(ari_walk *w)
{
    const ari_params all = ari_walk_all_params(w);
    w->pass = ARI_PASS_STEP;
    w->every_bucket = true;
    ari_walk_each_bucket(w, &all, ARI_ALL_UNITS, ari_walk_sum_bucket);
}

void ari_walk_after(ari_walk *w)
{
    const ari_params all = ari_walk_all_params(w);
    const bool eager = w->c->run.ddp.mode == AR_BUCKETS_EAGER, updates = w->c->run.steps > 0;
    const int zero = ari_walk_zero(w);
    w->pass = ARI_PASS_STEP;
    w->micro = 0;
    if (!w->c->forward_only && !eager && zero < 2)
        ari_walk_each_bucket(w, &all, ARI_ALL_UNITS, ari_walk_sum_bucket);
    sum_loss(w);
    if (w->c->forward_only)
        return;
    if (eager || zero >= 2)
        ari_walk_each_bucket(w, &all, ARI_ALL_UNITS, zero < 2 ? ari_walk_sum_bucket : ari_walk_complete_bucket);
    if (w->c->run.ddp.find_unused)
        find_unused(w, &all);
    if (w->c->run.clip > 0.0 && updates)
        norm_of_gradients(w);
    if (w->c->verified > 0)
        verify(w, &all);
    if (updates)
        update(w, &all);
}
