/* SPDX-License-Identifier: Apache-2.0 */
/* What anyrank itself holds: of each parameter and bucket, and of a step the replay of its operations. */
#include "planner/own.h"

#include <math.h>
#include <string.h>

#include "anyrank/model.h"
#include "ref/core/size.h"

static const double FLOAT = 4.0, LONG = 8.0;
/* An accumulator (t, H, L); the same in a bucket, with the t that the ranks agree on. */
static const double ACCUMULATOR = 17.0, BUCKETED = 18.0;

/* --- passes ------------------------------------------------------------------------------------------------------- */

static void clear(ari_account *a)
{
    a->now = 0.0;
    for (int k = 0; k < ARI_MEMORY_KINDS; k++)
        a->held[k] = 0.0;
}

/* With all forward passes first everything stays until the last backward one. */
static void end_pass(ari_account *a)
{
    const bool first = a->c->run.parallel.forward_first;
    if (a->pass == ARI_PASS_FORWARD && a->now > a->stored) {
        a->stored = a->now;
        for (int k = 0; k < ARI_MEMORY_KINDS; k++)
            a->most[k] = a->held[k];
    }
    if (a->pass == ARI_PASS_BACKWARD)
        ari_account_backward_end(a);
    if (!first && (a->pass == ARI_PASS_BACKWARD || a->c->forward_only))
        clear(a);
    a->fresh[a->pass == ARI_PASS_BACKWARD] = false;
}

static bool is_pass(ari_operation_pass pass)
{
    return pass == ARI_PASS_FORWARD || pass == ARI_PASS_BACKWARD;
}

/* Whether an MLP's first layer leaves something else than it makes. */
static ar_status see_first(ari_account *a, const ari_operation *op)
{
    const ar_placement made = op->output[0].at[ARI_AXIS_TP];
    ar_block_split block;
    const bool forward = op->pass == ARI_PASS_FORWARD || op->recomputed;
    if (op->kind != ARI_OPERATION_PRODUCT || op->role != ARI_FIRST || !forward)
        return AR_OK;
    AR_TRY(ar_plan_block(&a->c->run.plan, a->config, op->layer, a->sequence, &block));
    const ar_placement left = block.mlp.first.to;
    const bool whole = made.kind != AR_SHARD && left.kind != AR_SHARD;
    a->moves = a->tp > 1 && !whole && !ar_placement_same(made, left, 3);
    return AR_OK;
}

static ar_status visit(void *user, const ari_operation *op)
{
    ari_account *a = user;
    AR_TRY(see_first(a, op));
    if (is_pass(a->pass) && (op->pass != a->pass || op->micro != a->micro))
        end_pass(a);
    if (op->pass == ARI_PASS_STEP)
        clear(a);
    a->pass = op->pass;
    a->micro = op->micro;
    if (op->pass == ARI_PASS_FORWARD)
        return ari_account_forward(a, op);
    else if (op->pass == ARI_PASS_BACKWARD)
        return ari_account_backward(a, op);
    else if (op->kind == ARI_OPERATION_AGREEMENT) /* what all ranks say */
        ari_account_touch(a, (double)op->call[0].elements * LONG);
    else if (op->kind == ARI_OPERATION_VERIFY)
        ari_account_touch(a, (double)ar_parallel_world(&a->c->run.parallel) * ari_account_bytes(&op->input[0]));
    return AR_OK;
}

/* --- parts that are computed again -------------------------------------------------------------------------------- */

void ari_account_leave(ari_account *a)
{
    if (a->within == AR_RECOMPUTE_NONE)
        return;
    a->within = AR_RECOMPUTE_NONE;
    a->now = a->x.bytes;
    memcpy(a->held, a->outside, sizeof a->held);
    for (int k = 0; k < ARI_MEMORY_KINDS; k++)
        a->now += a->held[k];
    a->held[a->x.kind] += a->x.bytes;
}

void ari_account_part(ari_account *a, const ari_operation *op)
{
    if (op->within != a->within || op->layer != a->part_layer)
        ari_account_leave(a);
    if (op->within == a->within)
        return;
    a->within = op->within;
    a->part_layer = op->layer;
    memcpy(a->outside, a->held, sizeof a->held);
}

/* --- parameters and buckets --------------------------------------------------------------------------------------- */

typedef struct held {
    ari_account *a;
    ari_memory *m;
    double states;           /* of the optimizer, numbers an element */
    bool shares;             /* of them each data-parallel rank has a part: by bucket */
    double largest, counted; /* elements: of a parameter; of one that counts for the norm of the gradients */
    double bucket, gradient; /* bytes of a bucket's weights; elements of the own share of one */
} held;

static void add_state(held *h, double n, ar_dtype storage)
{
    h->m->of[ARI_MEMORY_OPTIMIZER] += FLOAT * h->states * n;
    if (storage == AR_BF16 && h->a->c->run.steps > 0)
        h->m->of[ARI_MEMORY_MASTER] += FLOAT * n;
}

static ar_status add_param(void *user, size_t layer, const ari_op_value *v)
{
    held *h = user;
    const ari_account *a = h->a;
    const double n = ari_op_elements(v);
    (void)layer;
    h->m->of[ARI_MEMORY_WEIGHTS] += ari_account_bytes(v);
    if (!a->c->forward_only)
        h->m->of[ARI_MEMORY_GRADIENTS] += a->exact ? ACCUMULATOR * n : ari_account_bytes(v);
    if (!h->shares)
        add_state(h, n, v->dtype);
    h->largest = fmax(h->largest, n);
    if (v->at[ARI_AXIS_TP].kind == AR_SHARD ? a->tp_rank % v->copies == 0 : a->tp_rank == 0)
        h->counted = fmax(h->counted, n);
    return AR_OK;
}

/* One that is moved has memory of its own. */
static ar_status add_bucket(void *user, const ari_operation *op)
{
    held *h = user;
    const ari_op_value *all = &op->input[0], *own = &op->output[0];
    const double n = ari_op_elements(all), share = ari_op_elements(own);
    if (op->calls > 0)
        h->m->of[ARI_MEMORY_BUCKETS] += n * (h->a->exact ? BUCKETED : (double)ar_dtype_bytes(all->dtype));
    if (h->shares)
        add_state(h, share, all->dtype);
    h->bucket = fmax(h->bucket, ari_account_bytes(all));
    h->gradient = fmax(h->gradient, share);
    return AR_OK;
}

/* --- the step ----------------------------------------------------------------------------------------------------- */

/* After the passes: the number of targets was summed before them; a gradient is reported, or squared beside an exponent
 * and two sums; the update takes room for a gradient, of shares for a bucket's weights too. */
static void after(held *h)
{
    ari_account *a = h->a;
    const ar_run *r = &a->c->run;
    ari_account_touch(a, LONG);
    if (a->c->forward_only)
        return;
    if (a->c->tapped || a->c->verified > 0)
        ari_account_touch(a, FLOAT * h->largest);
    if (r->clip > 0.0 && r->steps > 0)
        ari_account_touch(a, FLOAT + 2.0 * LONG + FLOAT * h->counted);
    if (r->steps == 0)
        return;
    ari_account_touch(a, FLOAT * h->largest);
    if (h->shares)
        ari_account_touch(a, h->bucket + FLOAT * (h->gradient + h->largest));
}

static ar_status replay(ari_account *a, int rank)
{
    const bool each = a->c->run.parallel.forward_first;
    AR_TRY((each ? ari_operations : ari_operations_once)(a->c, rank, visit, a));
    if (is_pass(a->pass))
        end_pass(a);
    clear(a);
    return AR_OK;
}

static ar_status refuse_planned(const ari_planned *p)
{
    return ari_planned_runs(p) && !p->flash
               ? AR_OK
               : ar_error_set(AR_ERR_UNSUPPORTED,
                              "memory of a run of this version: it has neither pipeline parallelism, flash attention "
                              "nor ZeRO-2 and 3");
}

ar_status ari_memory_own(ari_memory *m, const ari_planned *p, int rank)
{
    const ari_step_case *c = &p->step;
    const ar_parallel *parallel = &c->run.parallel;
    const bool sequence = ar_plan_by_tokens(&c->run.plan, ari_at_least_one(parallel->tp), parallel->sp);
    ar_outer_split outer;
    AR_TRY(refuse_planned(p));
    AR_TRY(ar_plan_outer(&c->run.plan, c->config, sequence, &outer));
    ari_account a = {.c = c,
                     .config = c->config,
                     .sequence = sequence,
                     .tp = (size_t)ari_at_least_one(parallel->tp),
                     .tp_rank = (size_t)(rank % ari_at_least_one(parallel->tp)),
                     .cp_rank = (size_t)(rank / ari_at_least_one(parallel->tp) % ari_at_least_one(parallel->cp)),
                     .exact = c->run.numerics == AR_NUMERICS_EXACT,
                     .activations = ar_activations_of(c->run.precision),
                     .word = (double)ar_dtype_bytes(ar_activations_of(c->run.precision)),
                     .head = c->config->arch != AR_ARCH_STACK,
                     .tokens = outer.tokens,
                     .layer = ARI_NO_LAYER,
                     .fresh = {true, true},
                     .given = {.kept = true}};
    *m = (ari_memory){{0}};
    held h = {.a = &a, .m = m, .states = c->run.steps > 0 ? ari_optimizer_states(&c->run.optimizer) : 0.0};
    h.shares = c->run.parallel.zero > 0;
    AR_TRY(ari_operations_params(c, rank, add_param, &h));
    if (!c->forward_only)
        AR_TRY(ari_operations_buckets(c, rank, add_bucket, &h));
    AR_TRY(replay(&a, rank));
    after(&h);
    for (int k = 0; k < ARI_MEMORY_KINDS; k++)
        m->of[k] += a.most[k];
    m->of[ARI_MEMORY_OPERANDS] = a.operands;
    m->of[ARI_MEMORY_WORKSPACE] += a.peak - a.stored;
    return AR_OK;
}

ar_status ari_memory_own_all(double *bytes, const ari_planned *p)
{
    const int dp = ari_at_least_one(p->step.run.parallel.dp), each = ar_parallel_world(&p->step.run.parallel) / dp;
    const int longer = (int)(p->step.run.batch % (size_t)dp); /* ranks of one sample more: the first */
    *bytes = 0.0;
    for (int r = 0; r < dp; r = r < longer ? longer : dp) {
        ari_memory m;
        AR_TRY(ari_memory_own(&m, p, r * each));
        *bytes += (double)each * (r < longer ? longer : dp - longer) * ari_memory_sum(&m);
    }
    return AR_OK;
}
