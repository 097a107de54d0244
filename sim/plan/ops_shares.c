/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients summed over ranks, bucket by bucket, and what ranks share out of them and of the weights. */
#include "sim/plan/ops_impl.h"

/* --- sums over ranks ---------------------------------------------------------------------------------------------- */

bool ari_walk_shares(const ari_walk *w)
{
    return w->c->run.parallel.zero > 0 && w->sharing > 1;
}

ari_over ari_walk_sharing(const ari_walk *w)
{
    return w->sharing < w->summing ? ARI_OVER_SHARD : ARI_OVER_DP;
}

void ari_walk_sum(ari_walk *w, ari_over over, size_t n, ar_dtype dtype, bool shares, ari_call_often often,
                  ari_role role, const char *tag)
{
    const ari_call_kind kind = shares ? ARI_CALL_REDUCE_SCATTER : ARI_CALL_ALL_REDUCE;
    if (!w->exact) {
        ari_walk_call(w, kind, over, n, dtype, often, role, tag);
        return;
    }
    ari_walk_call(w, ARI_CALL_ALL_REDUCE, over, n, AR_U8, often, role, tag);
    ari_walk_call(w, kind, over, shares ? n : ari_walk_mul(w, 2, n), AR_I64, often, role, tag);
    if (shares)
        ari_walk_call(w, kind, over, n, AR_I64, often, role, tag);
}

void ari_walk_over_dp(ari_op_value *v, ar_placement p)
{
    for (int axis = ARI_AXIS_DP; axis <= ARI_AXIS_INNER; axis++)
        v->at[axis] = p;
}

static size_t own_slice(const ari_walk *w, size_t n)
{
    return n / w->sharing + (w->sharing_rank < n % w->sharing);
}

ari_op_value ari_walk_run(const ari_walk *w, size_t n, ar_dtype dtype, bool share)
{
    ari_op_value v = {.dtype = dtype, .ndim = 1, .shape = {n}, .local = {n}, .copies = 1};
    for (int axis = 0; axis < ARI_PLACED_AXES; axis++)
        v.at[axis] = ari_whole;
    if (share) {
        ari_walk_over_dp(&v, (ar_placement){AR_SHARD, 0});
        v.local[0] = own_slice(w, n);
    }
    return v;
}

/* --- buckets ------------------------------------------------------------------------------------------------------ */

static ari_operation *begin_bucket(ari_walk *w, ari_operation_kind kind, const ari_walk_bucket *b, size_t index)
{
    ari_operation *op = ari_walk_begin(w, kind, b->first.of.role);
    op->bucket = index;
    op->params = b->params;
    op->last = b->latest;
    op->made = ari_whole;
    return op;
}

static ar_dtype stored_as(const ari_walk_bucket *b)
{
    return b->kind & ARI_KIND_NARROW ? AR_BF16 : AR_F32;
}

void ari_walk_beside_passes(ari_walk *w)
{
    for (int i = 0; i < w->op.calls; i++)
        w->op.call[i].queue = w->c->run.ddp.mode == AR_BUCKETS_OVERLAP ? ARI_ON_BUCKETS : ARI_ON_MAIN;
}

/* Its values before and after. */
static ari_operation *begin_sum_of(ari_walk *w, const ari_walk_bucket *b, size_t index)
{
    const bool spread = (b->kind & ARI_KIND_SPREAD) != 0, ends = (b->kind & ARI_KIND_ENDS) != 0;
    const ar_placement partial = {AR_PARTIAL_SUM, 0};
    ari_operation *op = begin_bucket(w, ARI_OPERATION_GRADIENT_SUM, b, index);
    ari_op_value *in = &op->input[op->inputs++];
    *in = ari_walk_run(w, b->elements, stored_as(b), false);
    ari_walk_over_dp(in, partial);
    in->at[ARI_AXIS_TP] = op->made = spread ? partial : ari_whole;
    in->at[ARI_AXIS_PP] = ends ? partial : ari_whole;
    op->output[op->outputs++] = ari_walk_run(w, b->elements, stored_as(b), ari_walk_shares(w));
    op->output[0].bias = b->first.of.bias;
    return op;
}

/* Of n elements over a group; slices: the rank's own of a whole of so many. */
static void sum_over(ari_walk *w, const ari_walk_bucket *b, ari_over over, bool slices)
{
    const int first = w->op.calls;
    const size_t n = slices ? own_slice(w, b->elements) : b->elements;
    if (n > 0 || !slices)
        ari_walk_sum(w, over, n, stored_as(b), false, ARI_EACH_STEP, b->first.of.role, ari_part_suffix(b->first.of));
    for (int i = first; i < w->op.calls && slices; i++)
        w->op.call[i].sliced = w->op.call[i].elements / n * b->elements;
}

/* What is spread is complete before it is shared out. */
static void sum_before(ari_walk *w, const ari_walk_bucket *b, bool slices)
{
    if (b->kind & ARI_KIND_SPREAD)
        sum_over(w, b, ARI_OVER_TP, slices);
    if (b->kind & ARI_KIND_ENDS)
        sum_over(w, b, ARI_OVER_ENDS, slices);
}

static void share_out(ari_walk *w, const ari_walk_bucket *b, ari_call_often often)
{
    ari_walk_sum(w, ari_walk_sharing(w), b->elements, stored_as(b), true, often, b->first.of.role,
                 ari_part_suffix(b->first.of));
}

void ari_walk_sum_bucket(ari_walk *w, const ari_walk_bucket *b, size_t index)
{
    const ari_operation *op = begin_sum_of(w, b, index);
    sum_before(w, b, false);
    if (w->c->run.parallel.zero == 0)
        sum_over(w, b, ARI_OVER_DP, false);
    else if (ari_walk_shares(w))
        share_out(w, b, ARI_EACH_STEP);
    if (w->c->run.parallel.zero > 0)
        sum_over(w, b, ARI_OVER_REPLICATE, true);
    ari_walk_beside_passes(w);
    if (op->calls > 0 || w->every_bucket)
        ari_walk_visit(w);
}

/* Of the shares that the passes have left. */
void ari_walk_complete_bucket(ari_walk *w, const ari_walk_bucket *b, size_t index)
{
    ari_operation *op = begin_sum_of(w, b, index);
    ari_walk_over_dp(&op->input[0], (ar_placement){AR_SHARD, 0});
    op->input[0].local[0] = op->output[0].local[0];
    sum_before(w, b, true);
    sum_over(w, b, ARI_OVER_REPLICATE, true);
    ari_walk_beside_passes(w);
    if (op->calls > 0)
        ari_walk_visit(w);
}

static ari_operation *begin_gather(ari_walk *w, const ari_walk_bucket *b, size_t index)
{
    ari_operation *op = begin_bucket(w, ARI_OPERATION_WEIGHT_GATHER, b, index);
    op->input[op->inputs++] = ari_walk_run(w, b->elements, stored_as(b), true);
    op->output[op->outputs++] = ari_walk_run(w, b->elements, stored_as(b), false);
    op->output[0].bias = b->first.of.bias;
    return op;
}

void ari_walk_gather_bucket(ari_walk *w, const ari_walk_bucket *b, size_t index)
{
    begin_gather(w, b, index);
    ari_walk_call(w, ARI_CALL_ALL_GATHER, ari_walk_sharing(w), b->elements, stored_as(b), ARI_EACH_STEP, ARI_NO_ROLE,
                  "model");
    ari_walk_visit(w);
}

/* --- units -------------------------------------------------------------------------------------------------------- */

static void each_of_unit(ari_walk *w, size_t unit, ari_bucket_fn f)
{
    const ari_params all = ari_walk_all_params(w);
    w->unit = true;
    w->puts_off = w->part == AR_PP_BACKWARD_WEIGHT;
    ari_walk_each_bucket(w, &all, unit, f);
    w->unit = w->puts_off = false;
}

static void reduce_bucket(ari_walk *w, const ari_walk_bucket *b, size_t index)
{
    begin_sum_of(w, b, index);
    share_out(w, b, ARI_EACH_MICRO);
    ari_walk_beside_passes(w);
    ari_walk_visit(w);
}

/* Those of the root unit once a step. */
static void gather_weights(ari_walk *w, const ari_walk_bucket *b, size_t index)
{
    const ari_call_often often = b->unit == ARI_NO_LAYER ? ARI_EACH_STEP : ARI_EACH_MICRO;
    begin_gather(w, b, index);
    ari_walk_call(w, ARI_CALL_ALL_GATHER, ari_walk_sharing(w), b->elements, stored_as(b), often, b->first.of.role,
                  ari_part_suffix(b->first.of));
    w->op.call[0].queue = w->c->run.ddp.mode == AR_BUCKETS_OVERLAP ? ARI_ON_WEIGHTS : ARI_ON_MAIN;
    ari_walk_visit(w);
}

void ari_walk_unit_begins(ari_walk *w, size_t unit)
{
    if (ari_walk_zero(w) < 3 || w->part == AR_PP_BACKWARD_WEIGHT)
        return;
    each_of_unit(w, unit, gather_weights);
    ari_walk_layer(w, unit);
}

/* By its hook, unless all wait for the end of the stage. */
void ari_walk_unit_ends(ari_walk *w, size_t unit)
{
    const bool waits = w->c->run.ddp.mode == AR_BUCKETS_EAGER || w->part != AR_PP_BACKWARD;
    if (ari_walk_zero(w) >= 2 && !waits)
        each_of_unit(w, unit, reduce_bucket);
}

void ari_walk_stage_ends(ari_walk *w, size_t begin, size_t end)
{
    const bool waited = w->c->run.ddp.mode == AR_BUCKETS_EAGER || w->part != AR_PP_BACKWARD;
    const bool root = w->first ? w->stage == 0 : w->stage + 1 == w->stages;
    if (ari_walk_zero(w) < 2 || w->part == AR_PP_BACKWARD_INPUT)
        return;
    for (size_t i = end; waited && i-- > begin;)
        each_of_unit(w, i, reduce_bucket);
    if (root)
        each_of_unit(w, ARI_NO_LAYER, reduce_bucket);
}
