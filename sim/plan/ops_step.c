/* SPDX-License-Identifier: Apache-2.0 */
/* Operations outside the passes: parameters made equal at the start; in a step the sums over ranks, bucket by bucket,
 * the shares of gradients and weights, and the update. */
#include "sim/plan/ops_impl.h"

/* --- sums over ranks ---------------------------------------------------------------------------------------------- */

/* Parameters whose gradients are summed over the ranks with the same experts, and (false) over all that have data. */
static bool of_experts(const ari_op_builder_bucket *b)
{
    return (b->kind & ARI_KIND_EXPERT) != 0;
}

static ari_over summing_group(bool experts)
{
    return experts ? ARI_OVER_EDP : ARI_OVER_DP;
}

/* True if several ranks share out what ZeRO does not keep whole of them. */
static bool has_shares(const ari_op_builder *w, bool experts)
{
    return w->c->run.parallel.zero > 0 && w->sharing[experts] > 1;
}

/* The group that does, and that of the ranks with the same share. */
static ari_over sharing_group(const ari_op_builder *w, bool experts)
{
    if (w->sharing[experts] == w->summing[experts])
        return summing_group(experts);
    return experts ? ARI_OVER_EXPERT_SHARD : ARI_OVER_SHARD;
}

static ari_over replicate_group(bool experts)
{
    return experts ? ARI_OVER_EXPERT_REPLICATE : ARI_OVER_REPLICATE;
}

/* A sum of n terms. Exact: states of at most so many values before go to shares, and to all as values or, where sums
 * follow, as states of so many. */
static void call_sum(ari_op_builder *w, ari_over over, size_t n, ar_dtype dtype, bool shares, size_t before,
                     size_t after, ari_call_often often, ari_role role, const char *tag)
{
    const bool narrow = dtype == AR_BF16;
    if (!w->form.exact) {
        ari_op_builder_call(w, shares ? ARI_CALL_REDUCE_SCATTER : ARI_CALL_ALL_REDUCE, over, n, dtype, often, role,
                            tag);
        return;
    }
    ari_op_builder_send_sums(w, over, n, ari_op_builder_state_bytes(before, narrow), often, role, tag);
    if (!shares && after == 0)
        ari_op_builder_gather_sums(w, over, n, 1, dtype, often, role, tag);
    else if (!shares)
        ari_op_builder_gather_sums(w, over, n, ari_op_builder_state_bytes(after, narrow), AR_U8, often, role, tag);
}

/* Places a value over all axes along which gradients are summed. */
static void place_over_dp(ari_op_value *v, ar_placement p)
{
    for (int axis = ARI_AXIS_DP; axis <= ARI_AXIS_INNER; axis++)
        v->at[axis] = p;
}

/* Each of the N ranks that share has its slice, the first (n mod N) of one element more. */
static size_t own_slice(const ari_op_builder *w, size_t n, bool experts)
{
    return n / w->sharing[experts] + (w->sharing_rank[experts] < n % w->sharing[experts]);
}

/* A run of n elements; whole on each rank, or each has so many of them. */
static ari_op_value run_of(size_t n, ar_dtype dtype, const size_t *share)
{
    ari_op_value v = {.dtype = dtype, .ndim = 1, .shape = {n}, .local = {n}, .copies = 1};
    for (int axis = 0; axis < ARI_PLACED_AXES; axis++)
        v.at[axis] = ari_whole;
    if (share) {
        place_over_dp(&v, (ar_placement){AR_SHARD, 0});
        v.local[0] = *share;
    }
    return v;
}

/* An operation that is nothing but its calls: experts of which there is one copy move nowhere. */
static void visit_if_moved(ari_op_builder *w)
{
    if (w->op.calls > 0)
        ari_op_builder_visit(w);
}

/* --- buckets ------------------------------------------------------------------------------------------------------ */

static ari_operation *begin_bucket(ari_op_builder *w, ari_operation_kind kind, const ari_op_builder_bucket *b,
                                   size_t index)
{
    ari_operation *op = ari_op_builder_begin(w, kind, b->first.of.role);
    op->expert = b->first.expert;
    op->bucket = index;
    op->params = b->params;
    op->last = b->latest;
    op->produced_as = ari_whole;
    return op;
}

static ar_dtype stored_as(const ari_op_builder_bucket *b)
{
    return b->kind & ARI_KIND_NARROW ? AR_BF16 : AR_F32;
}

/* With buckets that overlap the backward pass the operation's collectives are on their queue. */
static void put_beside_passes(ari_op_builder *w)
{
    for (int i = 0; i < w->op.calls; i++)
        w->op.call[i].queue = w->c->run.ddp.mode == AR_BUCKETS_OVERLAP ? ARI_ON_BUCKETS : ARI_ON_MAIN;
}

static ari_operation *begin_sum_of(ari_op_builder *w, const ari_op_builder_bucket *b, size_t index)
{
    const bool spread = (b->kind & ARI_KIND_SPREAD) != 0, ends = (b->kind & ARI_KIND_ENDS) != 0;
    const ar_placement partial = {AR_PARTIAL_SUM, 0};
    ari_operation *op = begin_bucket(w, ARI_OPERATION_GRADIENT_SUM, b, index);
    ari_op_value *in = &op->input[op->inputs++];
    const size_t own = own_slice(w, b->elements, of_experts(b));
    *in = run_of(b->elements, stored_as(b), NULL);
    place_over_dp(in, partial);
    in->at[ARI_AXIS_TP] = op->produced_as = spread ? partial : ari_whole;
    in->at[ARI_AXIS_PP] = ends ? partial : ari_whole;
    op->output[op->outputs++] = run_of(b->elements, stored_as(b), has_shares(w, of_experts(b)) ? &own : NULL);
    op->output[0].bias = b->first.of.bias;
    op->input[0].by_expert = op->output[0].by_expert = of_experts(b) ? ari_op_builder_apart(w) : 0;
    return op;
}

static const char *suffix_of(ari_param_part p)
{
    return ari_param_suffix(p.role, p.bias);
}

/* Sums n elements over a group; slices: the rank's own slice of the whole. before, after: as of call_sum. */
static void sum_over(ari_op_builder *w, const ari_op_builder_bucket *b, ari_over over, bool slices, size_t before,
                     size_t after)
{
    const int first = w->op.calls;
    const size_t n = slices ? own_slice(w, b->elements, of_experts(b)) : b->elements;
    if (n > 0 || !slices)
        call_sum(w, over, n, stored_as(b), false, before, after, ARI_EACH_STEP, b->first.of.role,
                 suffix_of(b->first.of));
    for (int i = first; i < w->op.calls && slices; i++)
        w->op.call[i].sliced = w->op.call[i].elements / n * b->elements;
}

static void sum_last(ari_op_builder *w, const ari_op_builder_bucket *b, ari_over over, bool slices)
{
    sum_over(w, b, over, slices, ari_op_builder_most_values(w, b, over, ARI_EACH_STEP), 0);
}

/* SIZE_MAX: nobody knows how many. */
static size_t values_on(size_t values, size_t ranks)
{
    return values <= SIZE_MAX / ranks ? values * ranks : SIZE_MAX;
}

/* A spread value is complete before it is summed over `next`, or shared out, if it is. */
static void sum_before(ari_op_builder *w, const ari_op_builder_bucket *b, ari_over next, bool slices)
{
    const bool ends = (b->kind & ARI_KIND_ENDS) != 0, alone = ari_op_builder_ranks(w, next) == 1;
    size_t before = ari_op_builder_most_values(w, b, next, ARI_EACH_STEP);
    if (b->kind & ARI_KIND_SPREAD) {
        const size_t after = values_on(before, ari_op_builder_ranks(w, ARI_OVER_TP));
        sum_over(w, b, ARI_OVER_TP, slices, before, alone && !ends ? 0 : after);
        before = after;
    }
    if (ends)
        sum_over(w, b, ARI_OVER_ENDS, slices, before, alone ? 0 : values_on(before, 2));
}

static void share_out(ari_op_builder *w, const ari_op_builder_bucket *b, ari_call_often often)
{
    const ari_over over = sharing_group(w, of_experts(b));
    call_sum(w, over, b->elements, stored_as(b), true, ari_op_builder_most_values(w, b, over, often), 0, often,
             b->first.of.role, suffix_of(b->first.of));
}

/* Moves of a bucket, or of its completion, are operations of the step. */
static void sum_bucket(ari_op_builder *w, const ari_op_builder_bucket *b, size_t index)
{
    const ari_operation *op = begin_sum_of(w, b, index);
    sum_before(w, b, summing_group(of_experts(b)), false);
    if (w->c->run.parallel.zero == 0)
        sum_last(w, b, summing_group(of_experts(b)), false);
    else if (has_shares(w, of_experts(b)))
        share_out(w, b, ARI_EACH_STEP);
    if (w->c->run.parallel.zero > 0)
        sum_last(w, b, replicate_group(of_experts(b)), true);
    put_beside_passes(w);
    if (op->calls > 0 || w->every_bucket)
        ari_op_builder_visit(w);
}

/* Completes the shares that the passes have left. */
static void complete_bucket(ari_op_builder *w, const ari_op_builder_bucket *b, size_t index)
{
    ari_operation *op = begin_sum_of(w, b, index);
    place_over_dp(&op->input[0], (ar_placement){AR_SHARD, 0});
    op->input[0].local[0] = op->output[0].local[0];
    sum_before(w, b, replicate_group(of_experts(b)), true);
    sum_last(w, b, replicate_group(of_experts(b)), true);
    put_beside_passes(w);
    visit_if_moved(w);
}

static ari_operation *begin_gather(ari_op_builder *w, const ari_op_builder_bucket *b, size_t index)
{
    ari_operation *op = begin_bucket(w, ARI_OPERATION_WEIGHT_GATHER, b, index);
    const size_t own = own_slice(w, b->elements, of_experts(b));
    op->input[op->inputs++] = run_of(b->elements, stored_as(b), &own);
    op->output[op->outputs++] = run_of(b->elements, stored_as(b), NULL);
    op->output[0].bias = b->first.of.bias;
    op->input[0].by_expert = op->output[0].by_expert = of_experts(b) ? ari_op_builder_apart(w) : 0;
    return op;
}

static void gather_bucket(ari_op_builder *w, const ari_op_builder_bucket *b, size_t index)
{
    begin_gather(w, b, index);
    ari_op_builder_call(w, ARI_CALL_ALL_GATHER, sharing_group(w, of_experts(b)), b->elements, stored_as(b),
                        ARI_EACH_STEP, ARI_NO_ROLE, "model");
    visit_if_moved(w);
}

/* --- units -------------------------------------------------------------------------------------------------------- */

static void each_of_unit(ari_op_builder *w, size_t unit, ari_bucket_fn f)
{
    const ari_params all = ari_op_builder_all_params(w);
    w->unit = true;
    w->deferred = w->part == AR_PP_BACKWARD_WEIGHT;
    ari_op_builder_each_bucket(w, &all, unit, f);
    w->unit = w->deferred = false;
}

static void reduce_bucket(ari_op_builder *w, const ari_op_builder_bucket *b, size_t index)
{
    begin_sum_of(w, b, index);
    share_out(w, b, ARI_EACH_MICRO);
    put_beside_passes(w);
    visit_if_moved(w);
}

/* Those of the root unit once a step. */
static void gather_weights(ari_op_builder *w, const ari_op_builder_bucket *b, size_t index)
{
    const ari_call_often often = b->unit == ARI_NO_LAYER ? ARI_EACH_STEP : ARI_EACH_MICRO;
    begin_gather(w, b, index);
    ari_op_builder_call(w, ARI_CALL_ALL_GATHER, sharing_group(w, of_experts(b)), b->elements, stored_as(b), often,
                        b->first.of.role, suffix_of(b->first.of));
    w->op.call[0].queue = w->c->run.ddp.mode == AR_BUCKETS_OVERLAP ? ARI_ON_WEIGHTS : ARI_ON_MAIN;
    visit_if_moved(w);
}

void ari_op_builder_unit_begins(ari_op_builder *w, size_t unit)
{
    if (ari_op_builder_zero(w) < 3 || w->part == AR_PP_BACKWARD_WEIGHT)
        return;
    each_of_unit(w, unit, gather_weights);
    ari_op_builder_layer(w, unit);
}

/* By its hook, unless all wait for the end of the stage. */
void ari_op_builder_unit_ends(ari_op_builder *w, size_t unit)
{
    const bool waits = w->c->run.ddp.mode == AR_BUCKETS_EAGER || w->part != AR_PP_BACKWARD;
    if (ari_op_builder_zero(w) >= 2 && !waits)
        each_of_unit(w, unit, reduce_bucket);
}

void ari_op_builder_stage_ends(ari_op_builder *w, size_t begin, size_t end)
{
    const bool waited = w->c->run.ddp.mode == AR_BUCKETS_EAGER || w->part != AR_PP_BACKWARD;
    const bool root = w->first ? w->stage == 0 : w->stage + 1 == w->stages;
    if (ari_op_builder_zero(w) < 2 || w->part == AR_PP_BACKWARD_INPUT)
        return;
    for (size_t i = end; waited && i-- > begin;)
        each_of_unit(w, i, reduce_bucket);
    if (root)
        each_of_unit(w, ARI_NO_LAYER, reduce_bucket);
}

/* --- sums of numbers ---------------------------------------------------------------------------------------------- */

/* An operation that is nothing but its collectives. */
static void begin_sum(ari_op_builder *w, ari_operation_kind kind, size_t n, ar_dtype dtype)
{
    ari_operation *op = ari_op_builder_begin(w, kind, ARI_NO_ROLE);
    op->produced_as = ari_whole;
    op->input[op->inputs++] = run_of(n, dtype, NULL);
    place_over_dp(&op->input[0], (ar_placement){AR_PARTIAL_SUM, 0});
    op->output[op->outputs++] = run_of(n, dtype, NULL);
}

/* --- the start ---------------------------------------------------------------------------------------------------- */

/* Two words: a hash of the parameters, and their number. */
static void agree(ari_op_builder *w)
{
    begin_sum(w, ARI_OPERATION_AGREEMENT, 2, AR_I64);
    ari_op_builder_call(w, ARI_CALL_ALL_GATHER, ARI_OVER_DP, ari_op_builder_mul(w, 2, w->summing[false]), AR_I64,
                        ARI_AT_START, ARI_NO_ROLE, "parameters of data parallelism");
    visit_if_moved(w);
}

void ari_op_builder_start(ari_op_builder *w)
{
    const ari_params all = ari_op_builder_all_params(w);
    w->pass = ARI_PASS_START;
    for (size_t i = 0; i < all.n && w->st == AR_OK; i++) {
        const ari_one_param p = ari_op_builder_param_at(w, &all, i);
        ari_operation *op = ari_op_builder_begin(w, ARI_OPERATION_BROADCAST, p.of.role);
        op->expert = p.expert;
        op->produced_as = p.value.at[ARI_AXIS_TP];
        op->input[op->inputs++] = op->output[op->outputs++] = p.value;
        const bool experts = w->apart && ari_is_expert_part(p.of.role);
        ari_op_builder_call(w, ARI_CALL_BROADCAST, summing_group(experts), p.elements, p.value.dtype, ARI_AT_START,
                            p.of.role, suffix_of(p.of));
        visit_if_moved(w);
    }
    ari_op_builder_layer(w, ARI_NO_LAYER);
    if (!w->c->forward_only)
        agree(w);
}

/* --- the step ----------------------------------------------------------------------------------------------------- */

void ari_op_builder_before(ari_op_builder *w)
{
    w->pass = ARI_PASS_STEP;
    const size_t counts = 1 + w->config->mtp;
    begin_sum(w, ARI_OPERATION_TARGETS, counts, AR_I64);
    ari_op_builder_call(w, ARI_CALL_ALL_REDUCE, ARI_OVER_DP, counts, AR_I64, ARI_EACH_STEP, ARI_NO_ROLE, "targets");
    visit_if_moved(w);
    ari_op_builder_unit_begins(w, ARI_NO_LAYER);
}

/* n numbers of every layer that this rank has, or of those with experts. */
static void each_layer(ari_op_builder *w, bool routed, size_t n, ar_dtype dtype,
                       void (*sum)(ari_op_builder *w, ari_over over))
{
    const bool over_tp = !routed || w->whole;
    for (size_t stage = 0; stage < w->stages; stage++) {
        size_t begin = 0, end = 0;
        ari_op_builder_stage_blocks(w, stage, &begin, &end);
        for (size_t i = begin; i < end && stage % w->ranks[ARI_AXIS_PP] == w->at[ARI_AXIS_PP]; i++) {
            if (routed && !ar_config_has_experts(w->config, i))
                continue;
            ari_op_builder_layer(w, i);
            w->pass = ARI_PASS_STEP;
            begin_sum(w, routed ? ARI_OPERATION_ROUTER_SUM : ARI_OPERATION_LOGITS_MAX, n, dtype);
            w->op.input[0].at[ARI_AXIS_TP] = over_tp ? (ar_placement){AR_PARTIAL_SUM, 0} : ari_whole;
            if (over_tp)
                sum(w, ARI_OVER_TP);
            sum(w, ARI_OVER_DP);
            visit_if_moved(w);
        }
    }
    ari_op_builder_layer(w, ARI_NO_LAYER);
}

static void compare_logits(ari_op_builder *w, ari_over over)
{
    ari_op_builder_call(w, ARI_CALL_ALL_REDUCE, over, w->config->heads, AR_I32, ARI_EACH_STEP, ARI_ATTENTION, "");
}

/* A number of each layer, or of each expert of them all. */
static void over_stages(ari_op_builder *w, size_t n, ar_dtype dtype)
{
    begin_sum(w, ARI_OPERATION_ROUTER_SUM, n, dtype);
    place_over_dp(&w->op.input[0], ari_whole);
    w->op.input[0].at[ARI_AXIS_PP] = (ar_placement){AR_PARTIAL_SUM, 0};
    ari_op_builder_call(w, ARI_CALL_ALL_REDUCE, ARI_OVER_PP, n, dtype, ARI_EACH_STEP, ARI_NO_ROLE, "routers");
    visit_if_moved(w);
}

static void count_routes(ari_op_builder *w, ari_over over)
{
    ari_op_builder_call(w, ARI_CALL_ALL_REDUCE, over, w->config->experts.n, AR_I64, ARI_EACH_STEP, ARI_ROUTER, "");
}

void ari_op_builder_counts(ari_op_builder *w)
{
    if (!ari_step_counts(w->c))
        return;
    each_layer(w, true, w->config->experts.n, AR_I64, count_routes);
    if (ar_config_balance(w->config, &w->c->run.loss) == AR_BALANCE_LAYERS)
        over_stages(w, w->config->experts.n, AR_I64);
}

static void sum_terms(ari_op_builder *w, ari_over over)
{
    call_sum(w, over, 1, AR_F32, false, SIZE_MAX, SIZE_MAX, ARI_EACH_STEP, ARI_NO_ROLE, "loss");
}

static void sum_router_losses(ari_op_builder *w)
{
    if (!ar_config_router_losses(w->config, &w->c->run.loss))
        return;
    each_layer(w, true, 1, AR_F32, sum_terms);
    over_stages(w, ar_config_blocks(w->config), AR_F32);
}

/* The losses of further tokens, which the last stage has. */
static void sum_further(ari_op_builder *w)
{
    for (size_t i = 0; i < w->config->mtp && w->last; i++) {
        begin_sum(w, ARI_OPERATION_FURTHER_SUM, 1, AR_F32);
        sum_terms(w, ARI_OVER_DP);
        visit_if_moved(w);
    }
}

/* Without a head each rank's terms are those of its own tokens. The last stage has it, and tells the others. */
static void sum_loss(ari_op_builder *w)
{
    const ar_placement partial = {AR_PARTIAL_SUM, 0};
    const bool spread = w->last && w->form.sp && !w->form.head;
    begin_sum(w, ARI_OPERATION_LOSS_SUM, 1, AR_F32);
    place_over_dp(&w->op.input[0], w->last ? partial : ari_whole);
    w->op.input[0].at[ARI_AXIS_TP] = spread ? partial : ari_whole;
    w->op.input[0].at[ARI_AXIS_PP] = partial;
    if (spread)
        call_sum(w, ARI_OVER_TP, 1, AR_F32, false, SIZE_MAX, SIZE_MAX, ARI_EACH_STEP, ARI_NO_ROLE, "loss");
    if (w->last)
        call_sum(w, ARI_OVER_DP, 1, AR_F32, false, SIZE_MAX, SIZE_MAX, ARI_EACH_STEP, ARI_NO_ROLE, "loss");
    ari_op_builder_call(w, ARI_CALL_BROADCAST, ARI_OVER_PP, 1, AR_F32, ARI_EACH_STEP, ARI_NO_ROLE, "loss");
    visit_if_moved(w);
}

/* But for the biases of routers, which have no gradient. */
static size_t trained(const ari_op_builder *w, const ari_params *all)
{
    return all->n - (ar_config_router_bias(w->config) ? all->with_experts : 0);
}

/* A byte for each parameter. */
static void find_unused(ari_op_builder *w, const ari_params *all)
{
    const size_t n = trained(w, all);
    begin_sum(w, ARI_OPERATION_UNUSED, n, AR_U8);
    ari_op_builder_call(w, ARI_CALL_ALL_REDUCE, ARI_OVER_DP, n, AR_U8, ARI_EACH_STEP, ARI_NO_ROLE, "used parameters");
    put_beside_passes(w);
    visit_if_moved(w);
}

/* An exponent, then two int64, over the ranks that hold different elements. */
static void norm_of_gradients(ari_op_builder *w)
{
    static const char tag[] = "grad_norm";
    const bool shares = has_shares(w, false) || w->apart;
    begin_sum(w, ARI_OPERATION_GRADIENT_NORM, 1, AR_F32);
    w->op.input[0].at[ARI_AXIS_TP] = w->op.input[0].at[ARI_AXIS_PP] = (ar_placement){AR_PARTIAL_SUM, 0};
    place_over_dp(&w->op.input[0], shares ? (ar_placement){AR_PARTIAL_SUM, 0} : ari_whole);
    for (int i = 0; i < 2; i++) {
        const size_t n = i == 0 ? 1 : 2;
        const ar_dtype dtype = i == 0 ? AR_I32 : AR_I64;
        ari_op_builder_call(w, ARI_CALL_ALL_REDUCE, ARI_OVER_TP, n, dtype, ARI_EACH_STEP, ARI_NO_ROLE, tag);
        ari_op_builder_call(w, ARI_CALL_ALL_REDUCE, ARI_OVER_PP, n, dtype, ARI_EACH_STEP, ARI_NO_ROLE, tag);
        if (shares)
            ari_op_builder_call(w, ARI_CALL_ALL_REDUCE, sharing_group(w, false), n, dtype, ARI_EACH_STEP, ARI_NO_ROLE,
                                tag);
    }
    ari_op_builder_visit(w);
}

/* `words` of each of the ranks of a group, and of `others` with it. */
static void gather_said(ari_op_builder *w, ari_over over, size_t others, size_t words)
{
    const size_t said = ari_op_builder_mul(w, ari_op_builder_mul(w, ari_op_builder_ranks(w, over), others), words);
    ari_op_builder_call(w, ARI_CALL_ALL_GATHER, over, said, AR_I64, ARI_EACH_VERIFIED_STEP, ARI_NO_ROLE,
                        "gradients:verify");
}

/* Each rank's claims about its parameters, and about itself, go over tp, then over dp (modules.md). In a pipeline all
 * claims about a tied weight go over its ends, those of ranks about themselves over all stages, and then the number of
 * findings of each stage. */
static void verify(ari_op_builder *w, const ari_params *all)
{
    enum { WORDS_OF_A_PARAMETER = 16, WORDS_OF_A_RANK = 2 };
    const size_t words = ari_op_builder_add(w, ari_op_builder_mul(w, all->n, WORDS_OF_A_PARAMETER), WORDS_OF_A_RANK);
    const size_t tp = w->ranks[ARI_AXIS_TP], alike = ari_op_builder_mul(w, w->summing[false], tp);
    begin_sum(w, ARI_OPERATION_VERIFY, words, AR_I64);
    gather_said(w, ARI_OVER_TP, 1, words);
    gather_said(w, ARI_OVER_DP, tp, words);
    if ((w->first || w->last) && w->form.head && (w->config->tied || w->config->mtp > 0))
        gather_said(w, ARI_OVER_ENDS, alike, WORDS_OF_A_PARAMETER + WORDS_OF_A_RANK);
    gather_said(w, ARI_OVER_PP, alike, WORDS_OF_A_RANK);
    gather_said(w, ARI_OVER_PP, 1, 1);
    ari_op_builder_visit(w);
}

/* The ranks that hold parts of a matrix lay them into zeros and add them, so that each has all of it. */
static void update_matrix(ari_op_builder *w, const ari_one_param *p)
{
    const ar_placement partial = {AR_PARTIAL_SUM, 0};
    const bool experts = w->apart && ari_is_expert_part(p->of.role), shares = has_shares(w, experts);
    const ari_op_value *v = &p->value;
    ari_operation *op = ari_op_builder_begin(w, ARI_OPERATION_MATRIX, p->of.role);
    op->inputs = op->outputs = 1;
    ari_op_builder_muon(w, op, v);
    const bool cut = ari_op_builder_muon_stays_cut(w, op, v),
               split = !cut && (v->local[0] < v->shape[0] || v->local[1] < v->shape[1]);
    const size_t n =
        cut ? ari_op_builder_mul(w, v->local[0], v->local[1]) : ari_op_builder_mul(w, v->shape[0], v->shape[1]);
    const ari_operation blocks = *op;
    op->expert = p->expert;
    op->produced_as = split ? partial : ari_whole;
    op->input[0] = op->output[0] = run_of(n, AR_F32, NULL);
    op->multiply_adds *= !cut; /* the products are operations of their own */
    op->inputs = cut ? 1 : op->inputs;
    if (split)
        op->input[0].at[ARI_AXIS_TP] = partial;
    if (shares)
        place_over_dp(&op->input[0], partial);
    op->input[0].by_expert = op->output[0].by_expert = experts ? ari_op_builder_apart(w) : 0;
    if (split)
        ari_op_builder_call(w, ARI_CALL_ALL_REDUCE, ARI_OVER_TP, n, AR_I32, ARI_EACH_STEP, p->of.role,
                            suffix_of(p->of));
    if (shares)
        ari_op_builder_call(w, ARI_CALL_ALL_REDUCE, sharing_group(w, experts), n, AR_I32, ARI_EACH_STEP, p->of.role,
                            suffix_of(p->of));
    ari_op_builder_visit(w);
    for (int i = 1; cut && i < blocks.inputs; i++) {
        const size_t *shape = blocks.input[i].shape, at = shape[0] > shape[1];
        for (size_t k = 0; k < blocks.input[i].copies; k++)
            ari_op_builder_muon_cut(w, p->of.role, shape[at], shape[1 - at]);
    }
}

/* Updates all elements that the rank holds; with ZeRO each rank updates its share of every bucket, then gathers them.
 * */
static void update(ari_op_builder *w, const ari_params *all)
{
    size_t held[2] = {0, 0}; /* of parameters that all have, of experts */
    for (size_t i = 0; i < all->n && w->st == AR_OK; i++) {
        const ari_one_param p = ari_op_builder_param_at(w, all, i);
        if (p.of.role == ARI_ROUTER_BIAS)
            continue;
        size_t *n = &held[w->apart && ari_is_expert_part(p.of.role)];
        *n = ari_op_builder_add(w, *n, ari_op_builder_mul(w, 1 + p.after, p.elements));
        i += p.after;
    }
    for (size_t i = 0; i < all->n && w->st == AR_OK; i++) {
        const ari_one_param p = ari_op_builder_param_at(w, all, i);
        if (ari_op_by_muon(w->c, p.of.role, p.of.bias))
            update_matrix(w, &p);
    }
    const size_t own = own_slice(w, held[0], false) + own_slice(w, held[1], true);
    const bool shares = has_shares(w, false) || (held[1] > 0 && has_shares(w, true));
    ari_op_builder_layer(w, ARI_NO_LAYER);
    ari_operation *op = ari_op_builder_begin(w, ARI_OPERATION_UPDATE, ARI_NO_ROLE);
    op->produced_as = ari_whole;
    op->params = trained(w, all);
    op->input[op->inputs++] = op->output[op->outputs++] = run_of(held[0] + held[1], AR_F32, shares ? &own : NULL);
    ari_op_builder_visit(w);
    if (shares && ari_op_builder_zero(w) < 3)
        ari_op_builder_each_bucket(w, all, ARI_ALL_UNITS, gather_bucket);
}

void ari_op_builder_buckets(ari_op_builder *w)
{
    const ari_params all = ari_op_builder_all_params(w);
    w->pass = ARI_PASS_STEP;
    w->every_bucket = true;
    ari_op_builder_each_bucket(w, &all, ARI_ALL_UNITS, sum_bucket);
}

void ari_op_builder_after(ari_op_builder *w)
{
    const ari_params all = ari_op_builder_all_params(w);
    const bool eager = w->c->run.ddp.mode == AR_BUCKETS_EAGER, updates = w->c->run.steps > 0;
    const int zero = ari_op_builder_zero(w);
    w->pass = ARI_PASS_STEP;
    w->micro = 0;
    if (!w->c->forward_only && !eager && zero < 2)
        ari_op_builder_each_bucket(w, &all, ARI_ALL_UNITS, sum_bucket);
    sum_router_losses(w);
    sum_further(w);
    sum_loss(w);
    if (w->c->forward_only)
        return;
    if (eager || zero >= 2)
        ari_op_builder_each_bucket(w, &all, ARI_ALL_UNITS, zero < 2 ? sum_bucket : complete_bucket);
    if (w->c->run.ddp.find_unused)
        find_unused(w, &all);
    if (w->c->run.clip > 0.0 && updates)
        norm_of_gradients(w);
    if (w->c->verified > 0)
        verify(w, &all);
    if (updates && w->c->run.optimizer.qk_clip > 0.0)
        each_layer(w, false, w->config->heads, AR_I32, compare_logits);
    if (updates)
        update(w, &all);
    if (updates && w->c->run.loss.router.bias_update > 0.0)
        each_layer(w, true, w->config->experts.n, AR_I64, count_routes);
}
