/* SPDX-License-Identifier: Apache-2.0 */
/* What anyrank itself holds: of each parameter and bucket, and of a step the replay of its operations. */
#include "planner/own.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "anyrank/model.h"
#include "ref/core/size.h"

static const double FLOAT = 4.0, LONG = 8.0;
/* An accumulator (t, H, L); the same in a bucket, with the t that the ranks agree on. */
static const double ACCUMULATOR = 17.0, BUCKETED = 18.0;

/* --- passes ------------------------------------------------------------------------------------------------------- */

static bool is_last_stage(const ari_account *a)
{
    return a->stage + 1 == (size_t)ar_parallel_stages(&a->c->run.parallel);
}

/* All that the life holds ends, but for what its weights' gradients need. */
static void end_life(ari_account *a)
{
    for (int k = 0; k < ARI_MEMORY_KINDS; k++)
        ari_account_give(a, (ari_memory_kind)k, a->life->held[k] - a->life->later[k]);
}

/* What goes to the next stage is no longer the step's. */
static void end_forward(ari_account *a)
{
    ari_account_leave(a);
    ari_account_unit_ends(a);
    if (!is_last_stage(a))
        ari_account_give(a, a->x.kind, a->x.bytes);
    if (a->now <= a->stored)
        return;
    a->stored = a->now;
    for (int k = 0; k < ARI_MEMORY_KINDS; k++)
        a->most[k] = a->held[k];
}

/* With all forward passes first everything stays until the last backward one. */
static void end_pass(ari_account *a)
{
    const bool backward = a->pass == ARI_PASS_BACKWARD;
    if (!a->passing)
        return;
    a->passing = false;
    if (a->absent)
        return;
    if (backward)
        ari_account_backward_end(a);
    else
        end_forward(a);
    if ((backward || a->c->forward_only) && !a->c->run.parallel.forward_first)
        end_life(a);
    a->passed[backward][a->stage] = true;
}

static ari_account_life *life_of(const ari_account *a, const ari_operation *op)
{
    const ar_parallel *p = &a->c->run.parallel;
    if (ari_at_least_one(p->pp) == 1)
        return a->lives;
    return &a->lives[op->stage / (size_t)p->pp * (size_t)ari_at_least_one(p->micro_batches) + op->micro];
}

/* From here on there is memory for it. */
static void receive(ari_account *a, const ari_operation *op)
{
    const bool backward = op->pass == ARI_PASS_BACKWARD;
    a->life = life_of(a, op);
    a->life->received[backward] = ari_account_bytes(&op->output[0]);
    ari_account_take(a, ARI_MEMORY_BETWEEN, a->life->received[backward]);
}

/* What a stage begins with stays forward, as what a block makes does. */
static void begin_pass(ari_account *a, const ari_operation *op)
{
    const bool backward = op->pass == ARI_PASS_BACKWARD;
    a->passing = true;
    a->pass = op->pass;
    a->part = op->part;
    a->stage = op->stage;
    a->micro = op->micro;
    a->absent = op->absent;
    a->life = life_of(a, op);
    ari_account_units_begin(a);
    if (a->absent || ari_at_least_one(a->c->run.parallel.pp) == 1)
        return;
    a->x = (ari_account_value){a->life->received[backward], backward ? ARI_MEMORY_WORKSPACE : ARI_MEMORY_BETWEEN,
                               !backward};
    ari_account_give(a, ARI_MEMORY_BETWEEN, a->x.bytes);
    ari_account_take(a, a->x.kind, a->x.bytes);
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

static ar_status pass_operation(ari_account *a, const ari_operation *op)
{
    if (op->kind == ARI_OPERATION_SEND)
        return AR_OK;
    if (op->kind == ARI_OPERATION_RECEIVE) {
        receive(a, op);
        return AR_OK;
    }
    if (!a->passing)
        begin_pass(a, op);
    ari_account_units_see(a, op);
    if (op->kind == ARI_OPERATION_GRADIENT_SUM || op->kind == ARI_OPERATION_WEIGHT_GATHER)
        return AR_OK;
    if (op->part == AR_PP_BACKWARD_WEIGHT) {
        ari_account_weights(a, op);
        return AR_OK;
    }
    return (op->pass == ARI_PASS_FORWARD ? ari_account_forward : ari_account_backward)(a, op);
}

static ar_status visit(void *user, const ari_operation *op)
{
    ari_account *a = user;
    AR_TRY(see_first(a, op));
    if (!is_pass(op->pass) || op->pass != a->pass || op->part != a->part || op->micro != a->micro ||
        op->stage != a->stage)
        end_pass(a);
    if (is_pass(op->pass))
        return pass_operation(a, op);
    end_life(a); /* the activations of all micro-batches */
    ari_account_units_step(a, op);
    if (op->kind == ARI_OPERATION_AGREEMENT) /* what all ranks say */
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
    for (int k = 0; k < ARI_MEMORY_KINDS; k++)
        ari_account_give(a, (ari_memory_kind)k, a->held[k] - a->outside[k] - (a->life->later[k] - a->later[k]));
    ari_account_take(a, a->x.kind, a->x.bytes);
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
    memcpy(a->later, a->life->later, sizeof a->later);
}

/* --- parameters and buckets --------------------------------------------------------------------------------------- */

typedef struct held {
    ari_account *a;
    ari_memory *m;
    double states;           /* of the optimizer, numbers an element */
    bool shares;             /* of them each data-parallel rank has a part: by bucket */
    bool replicas;           /* and others have the same */
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
    if (a->zero < 3)
        h->m->of[ARI_MEMORY_WEIGHTS] += ari_account_bytes(v);
    if (!a->c->forward_only && a->zero < 2)
        h->m->of[ARI_MEMORY_GRADIENTS] += a->exact ? ACCUMULATOR * n : ari_account_bytes(v);
    if (!h->shares)
        add_state(h, n, v->dtype);
    h->largest = fmax(h->largest, n);
    if (v->at[ARI_AXIS_PP].kind == AR_REPLICATE && !a->first_stage) /* the first stage's copy counts */
        return AR_OK;
    if (v->at[ARI_AXIS_TP].kind == AR_SHARD ? a->tp_rank % v->copies == 0 : a->tp_rank == 0)
        h->counted = fmax(h->counted, n);
    return AR_OK;
}

/* One that is moved has memory of its own, and with replicas one for the own slice. ZeRO-2 keeps that alone, of
 * gradients, ZeRO-3 of weights too. */
static ar_status add_bucket(void *user, const ari_operation *op)
{
    held *h = user;
    const ari_account *a = h->a;
    const ari_op_value *all = &op->input[0], *own = &op->output[0];
    const double n = ari_op_elements(all), share = ari_op_elements(own);
    const double each = a->exact ? BUCKETED : (double)ar_dtype_bytes(all->dtype);
    if (a->zero >= 2)
        h->m->of[ARI_MEMORY_GRADIENTS] += each * share;
    else if (op->calls > 0)
        h->m->of[ARI_MEMORY_BUCKETS] += each * (n + (h->replicas ? share : 0.0));
    if (a->zero == 3)
        h->m->of[ARI_MEMORY_WEIGHTS] += ari_account_bytes(own);
    if (h->shares)
        add_state(h, share, all->dtype);
    h->bucket = fmax(h->bucket, ari_account_bytes(all));
    h->gradient = fmax(h->gradient, share);
    ari_account_unit *u = ari_account_unit_of(a, op->layer);
    u->weights += ari_account_bytes(all);
    u->gradients += a->exact ? ACCUMULATOR * n : ari_account_bytes(all);
    u->bucket = fmax(u->bucket, each * n);
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

/* In a pipeline, and where all go forward first, micro-batch by micro-batch. */
static ar_status replay(ari_account *a, int rank)
{
    const ar_parallel *p = &a->c->run.parallel;
    const int pp = ari_at_least_one(p->pp);
    const size_t lives =
        pp == 1 ? 1 : (size_t)(ar_parallel_stages(p) / pp) * (size_t)ari_at_least_one(p->micro_batches);
    AR_TRY(ari_alloc_zero((void **)&a->lives, lives, sizeof *a->lives, "an account of micro-batches"));
    a->life = a->lives;
    const ar_status st = (p->forward_first || pp > 1 ? ari_operations : ari_operations_once)(a->c, rank, visit, a);
    end_pass(a);
    end_life(a);
    ari_account_units_step(a, NULL);
    return st;
}

static ar_status refuse_planned(const ari_planned *p)
{
    return !p->flash ? AR_OK
                     : ar_error_set(AR_ERR_UNSUPPORTED, "memory of a run of this version: it has no flash attention");
}

static ar_status account(held *h, int rank)
{
    const ari_step_case *c = h->a->c;
    AR_TRY(ari_operations_params(c, rank, add_param, h));
    if (!c->forward_only)
        AR_TRY(ari_operations_buckets(c, rank, add_bucket, h));
    AR_TRY(replay(h->a, rank));
    after(h);
    return AR_OK;
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
                     .first_stage = rank < ar_parallel_world(parallel) / ari_at_least_one(parallel->pp),
                     .exact = c->run.numerics == AR_NUMERICS_EXACT,
                     .activations = ar_activations_of(c->run.precision),
                     .word = (double)ar_dtype_bytes(ar_activations_of(c->run.precision)),
                     .head = c->config->arch != AR_ARCH_STACK,
                     .tokens = outer.tokens,
                     .beside = c->run.ddp.mode == AR_BUCKETS_OVERLAP,
                     .at = ARI_NO_LAYER,
                     .layer = ARI_NO_LAYER,
                     .given = {.kept = true}};
    *m = (ari_memory){{0}};
    held h = {.a = &a, .m = m, .states = c->run.steps > 0 ? ari_optimizer_states(&c->run.optimizer) : 0.0};
    h.shares = parallel->zero > 0;
    h.replicas = h.shares && ari_at_least_one(parallel->dp_replicate) > 1;
    a.zero = c->forward_only ? 0 : parallel->zero;
    if (ari_at_least_one(parallel->dp) * ari_at_least_one(parallel->cp) == ari_at_least_one(parallel->dp_replicate))
        a.zero = h.shares;
    AR_TRY(ari_alloc_zero((void **)&a.unit, c->config->layers + 1, sizeof *a.unit, "an account of units"));
    const ar_status st = account(&h, rank);
    free(a.lives);
    free(a.unit);
    AR_TRY(st);
    for (int k = 0; k < ARI_MEMORY_KINDS; k++)
        m->of[k] += a.most[k];
    m->of[ARI_MEMORY_OPERANDS] = a.zero < 3 ? a.operands : 0.0;
    m->of[ARI_MEMORY_WORKSPACE] += a.peak - a.stored;
    return AR_OK;
}

ar_status ari_memory_own_most(ari_memory *m, const ari_planned *p)
{
    const ar_parallel *layout = &p->step.run.parallel;
    const int pp = ari_at_least_one(layout->pp), each = ar_parallel_world(layout) / pp;
    *m = (ari_memory){{0.0}};
    for (int i = 0; i < pp; i++) {
        ari_memory here;
        AR_TRY(ari_memory_own(&here, p, i * each));
        if (i == 0 || ari_memory_sum(&here) > ari_memory_sum(m))
            *m = here;
    }
    return AR_OK;
}

ar_status ari_memory_own_all(double *bytes, const ari_planned *p)
{
    const ar_parallel *layout = &p->step.run.parallel;
    const int dp = ari_at_least_one(layout->dp), pp = ari_at_least_one(layout->pp);
    const int each = ar_parallel_world(layout) / dp / pp;
    const int longer = (int)(p->step.run.batch % (size_t)dp); /* ranks of one sample more: the first */
    *bytes = 0.0;
    for (int i = 0; i < pp; i++) {
        for (int r = 0; r < dp; r = r < longer ? longer : dp) {
            ari_memory m;
            AR_TRY(ari_memory_own(&m, p, (i * dp + r) * each));
            *bytes += (double)each * (r < longer ? longer : dp - longer) * ari_memory_sum(&m);
        }
    }
    return AR_OK;
}
