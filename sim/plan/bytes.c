/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/plan/ops.h"

#include "ref/core/context_private.h"
#include "ref/core/size.h"
#include "ref/core/tensor_private.h"

/* The number of calls of each kind in a run. */
typedef struct tally {
    const ari_step_case *c;
    size_t dp, cp, tp, replicas, copies; /* copies: ranks with the same experts */
    size_t micro, own_micro; /* micro-batches of the rank that has most; of all dp ranks those with samples */
    size_t times[ARI_EACH_VERIFIED_STEP + 1];
    size_t alike;                       /* tp ranks that this walk stands for */
    bool once_a_group;                  /* the first of the group is among them */
    bool once_a_pipeline;               /* they are of the first stage */
    size_t bytes[ARI_OVER_COPIES + 1];  /* over each; those of the experts' groups times their ranks: */
    size_t divide[ARI_OVER_COPIES + 1]; /* which these are; 0: no bytes */
    size_t products, rows, row_bytes;   /* of experts whose rows move: rows of one, bytes of a row of all of them */
} tally;

/* Groups that make the call at once, as far as this walk stands for them. In the passes it stands for all data-parallel
 * ranks, since a call's elements are proportional to the samples; but each makes its own exponents of the weights. */
static size_t groups(const tally *t, const ari_operation *op, const ari_op_call *call)
{
    const bool passes = op->pass == ARI_PASS_FORWARD || op->pass == ARI_PASS_BACKWARD;
    const size_t with_samples = t->dp < t->c->run.batch ? t->dp : t->c->run.batch;
    if (call->sliced > 0 && call->over == ARI_OVER_TP)
        return t->once_a_group ? t->replicas : 0;
    if (call->sliced > 0 && call->over == ARI_OVER_ENDS)
        return t->once_a_pipeline ? t->alike * t->replicas : 0;
    if (call->often == ARI_EACH_MICRO && call->over == ARI_OVER_TP)
        return t->once_a_group ? t->cp * t->own_micro : 0;
    switch (call->over) {
    case ARI_OVER_SHARD:
        return t->alike * t->replicas * (call->often == ARI_EACH_MICRO ? t->micro : 1);
    case ARI_OVER_REPLICATE:
        return t->alike;
    case ARI_OVER_DP:
        return t->alike * (call->often == ARI_EACH_MICRO ? t->micro : 1);
    case ARI_OVER_EXPERT_REPLICATE: /* of these, divided by the ranks with the same experts */
        return t->alike * t->cp * t->dp;
    case ARI_OVER_EDP: /* and of these, by the group's */
    case ARI_OVER_EXPERT_SHARD:
        return t->alike * t->cp * t->dp * (call->often == ARI_EACH_MICRO ? t->micro : 1);
    case ARI_OVER_EP:
    case ARI_OVER_EXPERT_CP:
        return t->alike * t->cp;
    case ARI_OVER_CP:
    case ARI_OVER_RING:
    case ARI_OVER_INNER: /* of each tp rank */
        return t->alike * t->cp / call->ranks;
    case ARI_OVER_PP:
    case ARI_OVER_ENDS:
        if (call->kind == ARI_CALL_SEND)
            return t->alike * t->cp;
        return t->once_a_pipeline ? t->alike * t->cp * t->dp : 0;
    case ARI_OVER_COPIES:
        return t->once_a_group ? t->cp * t->tp / call->ranks : 0;
    default:
        return !t->once_a_group ? 0 : t->cp * (call->often == ARI_EACH_VERSION ? with_samples : passes ? 1 : t->dp);
    }
}

/* After the ranks have told each other the rows of a product their exponents move. */
static void add_row(tally *t, const ari_op_call *call, const ari_op_call *before)
{
    const bool first = before && before->dtype == AR_I64;
    const size_t moved = call->elements * (call->kind == ARI_CALL_ALL_GATHER ? call->ranks - 1 : 1);
    t->products += first;
    t->rows = first ? moved : t->rows;
    t->row_bytes += t->rows > 0 ? moved * ar_dtype_bytes(call->dtype) / t->rows : 0;
}

static ar_status add(void *user, const ari_operation *op)
{
    tally *t = user;
    for (int i = 0; i < op->calls; i++) {
        ari_op_call call = op->call[i];
        size_t bytes = 0;
        if (call.routed && op->kind == ARI_OPERATION_WEIGHT_GRADIENT)
            add_row(t, &call, i > 0 ? &op->call[i - 1] : NULL);
        if ((call.routed && t->c->routed) || (op->counting && call.often == ARI_EACH_VERSION)) /* or made once */
            continue;
        if (call.sliced > 0) /* those of the ranks that this one stands for together */
            call.elements = call.sliced;
        AR_TRY(ari_call_bytes(&bytes, &call));
        AR_TRY(ari_mul_size(&bytes, bytes, groups(t, op, &call)));
        AR_TRY(ari_mul_size(&bytes, bytes, t->times[call.often]));
        AR_TRY(ari_add_size(&t->bytes[call.over], t->bytes[call.over], bytes));
        t->divide[call.over] = call.over == ARI_OVER_EXPERT_REPLICATE ? t->copies
                               : ari_over_experts(call.over)          ? call.ranks
                                                                      : 1;
    }
    return AR_OK;
}

/* The number of tp ranks from r on with equal shares: all share matrices evenly except the vocabulary. */
static size_t alike(size_t vocab, int tp, int r)
{
    size_t start = 0, own = 0, other = 0, n = 1;
    ari_split_uneven(vocab, tp, r, &start, &own);
    for (; r + (int)n < tp; n++) {
        ari_split_uneven(vocab, tp, r + (int)n, &start, &other);
        if (other != own)
            break;
    }
    return n;
}

static void count_micro_batches(tally *t)
{
    const ar_run *run = &t->c->run;
    const size_t pieces = (size_t)ari_at_least_one(run->parallel.micro_batches), longer = run->batch % t->dp;
    for (size_t r = 0; r < 2; r++) { /* the first ranks have one sample more */
        const size_t rows = run->batch / t->dp + (r == 0 && longer > 0), n = rows < pieces ? rows : pieces;
        t->micro = r == 0 ? n : t->micro;
        t->own_micro += n * (longer == 0 ? (r == 0 ? t->dp : 0) : r == 0 ? longer : t->dp - longer);
    }
}

/* Counts the calls of rank `rank`, for all ranks that it represents. */
static ar_status walk(tally *t, int rank)
{
    const ari_step_case *c = t->c;
    AR_TRY(ari_operations(c, ARI_OPS_START, rank, add, t));
    AR_TRY(ari_operations(c, ARI_OPS_COUNTING, rank, add, t));
    AR_TRY(ari_operations(c, ARI_OPS_FORWARD, rank, add, t));
    if (!c->forward_only)
        AR_TRY(ari_operations(c, ARI_OPS_BACKWARD, rank, add, t));
    return ari_operations(c, ARI_OPS_OUTSIDE, rank, add, t);
}

ar_status ari_traffic_bytes(uint64_t *bytes, const ari_step_case *c)
{
    const size_t steps = c->run.steps > 1 ? (size_t)c->run.steps : 1; /* at least the one without an update */
    const int tp = ari_at_least_one(c->run.parallel.tp), pp = ari_at_least_one(c->run.parallel.pp);
    const int each = ar_parallel_world(&c->run.parallel) / pp; /* ranks of a stage */
    tally t = {.c = c,
               .copies = (size_t)(ari_extent(&c->run.parallel, ari_expert_axes(&c->run.parallel)) /
                                  ari_at_least_one(c->run.parallel.ep)),
               .dp = (size_t)ari_at_least_one(c->run.parallel.dp),
               .cp = (size_t)ari_at_least_one(c->run.parallel.cp),
               .tp = (size_t)tp,
               .replicas = (size_t)ari_at_least_one(c->run.parallel.dp_replicate),
               .times = {[ARI_AT_START] = 1,
                         [ARI_EACH_PASS] = steps,
                         [ARI_EACH_VERSION] = c->forward_only ? 1 : steps,
                         [ARI_EACH_MICRO] = steps,
                         [ARI_EACH_STEP] = steps,
                         [ARI_EACH_VERIFIED_STEP] = (size_t)c->verified}};
    count_micro_batches(&t);
    for (int stage = 0; stage < pp; stage++) {
        for (int r = 0; r < tp; r += (int)t.alike) { /* what they hold, they make equal, and sum over dp and cp */
            t.once_a_group = r == 0;
            t.once_a_pipeline = stage == 0;
            t.alike = alike(c->config->vocab, tp, r);
            AR_TRY(walk(&t, stage * each + r));
        }
    }
    *bytes = 0;
    for (int over = 0; over <= ARI_OVER_COPIES; over++)
        *bytes += t.divide[over] > 0 ? t.bytes[over] / t.divide[over] : 0;
    if (c->routed)
        *bytes += c->routed->rows * c->config->hidden * ar_dtype_bytes(ari_activations_of(c->run.precision));
    if (c->routed && t.products > 0)
        *bytes += c->routed->gradients * (t.row_bytes / t.products);
    return AR_OK;
}
