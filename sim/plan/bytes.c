/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/plan/bytes.h"

#include "ref/core/size.h"

/* How often each kind of call happens in a run, and what counts it. */
typedef struct tally {
    const ari_step_case *c;
    size_t dp, tp, kv_heads;
    size_t times[ARI_EACH_VERIFIED_STEP + 1];
    size_t alike;      /* tp ranks that this walk stands for */
    bool once_a_group; /* the first of the group is among them */
    size_t bytes;
} tally;

/* Groups that make the call at once, as far as this walk stands for them. In the passes it stands for all dp groups,
 * since a call's elements are proportional to the samples; but each group makes its own exponents of the weights. */
static size_t groups(const tally *t, const ari_operation *op, const ari_op_call *call)
{
    if (call->over == ARI_OVER_DP)
        return t->alike;
    if (!t->once_a_group)
        return 0;
    if (call->often == ARI_EACH_VERSION)
        return t->dp < t->c->run.batch ? t->dp : t->c->run.batch; /* those with samples */
    if (op->pass == ARI_PASS_FORWARD || op->pass == ARI_PASS_BACKWARD)
        return call->over == ARI_OVER_COPIES ? t->kv_heads : 1;
    return t->dp;
}

static ar_status add(void *user, const ari_operation *op)
{
    tally *t = user;
    for (int i = 0; i < op->calls; i++) {
        const ari_op_call *call = &op->call[i];
        size_t bytes = 0;
        AR_TRY(ari_call_bytes(&bytes, call));
        AR_TRY(ari_mul_size(&bytes, bytes, groups(t, op, call)));
        AR_TRY(ari_mul_size(&bytes, bytes, t->times[call->often]));
        AR_TRY(ari_add_size(&t->bytes, t->bytes, bytes));
    }
    return AR_OK;
}

/* How many tp ranks from r on hold as much: all share matrices evenly but for the vocabulary. */
static size_t alike(size_t vocab, int tp, int r)
{
    size_t start = 0, own = 0, other = 0, n = 1;
    ar_split_uneven(vocab, tp, r, &start, &own);
    for (; r + (int)n < tp; n++) {
        ar_split_uneven(vocab, tp, r + (int)n, &start, &other);
        if (other != own)
            break;
    }
    return n;
}

ar_status ari_traffic_bytes(uint64_t *bytes, const ari_step_case *c)
{
    const size_t steps = c->run.steps > 1 ? (size_t)c->run.steps : 1; /* at least the one without an update */
    const int tp = ari_at_least_one(c->run.parallel.tp);
    tally t = {.c = c,
               .dp = (size_t)ari_at_least_one(c->run.parallel.dp),
               .kv_heads = c->config->kv_heads,
               .times = {[ARI_AT_START] = 1,
                         [ARI_EACH_PASS] = steps,
                         [ARI_EACH_VERSION] = c->forward_only ? 1 : steps,
                         [ARI_EACH_STEP] = steps,
                         [ARI_EACH_VERIFIED_STEP] = (size_t)c->verified},
               .once_a_group = true};
    AR_TRY(ari_operations_pass(c, ARI_PASS_FORWARD, 0, add, &t));
    if (!c->forward_only)
        AR_TRY(ari_operations_pass(c, ARI_PASS_BACKWARD, 0, add, &t));
    for (int r = 0; r < tp; r += (int)t.alike) { /* what they hold, they make equal and sum over dp */
        t.once_a_group = r == 0;
        t.alike = alike(c->config->vocab, tp, r);
        AR_TRY(ari_operations_start(c, r, add, &t));
        AR_TRY(ari_operations_step(c, r, add, &t));
    }
    *bytes = t.bytes;
    return AR_OK;
}
