/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of a production system, by a walk over the operations of one micro-batch on the first tensor-parallel rank,
 * which never has less than another. planner.md has the sums as formulas. */
#include <math.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "ref/models/family.h"
#include "ref/models/parallel_private.h"
#include "ref/pipeline/schedule.h"
#include "ref/pipeline/schedule_private.h"
#include "verify/plan/planner.h"

ARI_OWNER(ari_sections, ari_sections_destroy)

/* Bytes of a value, a gradient and a weight in 16 bits; of a master weight and of each moment in fp32. */
static const double VALUE = 2.0, FLOAT = 4.0;

/* Bytes that an operation of the forward pass keeps for each element of its inputs: the input itself, or of dropout
 * the mask, of the loss logits in fp32, of a router the probabilities. An output is the input of what follows, which
 * keeps it where it must; rotary positions, biases and residuals need nothing of their inputs. Weights of a token's
 * experts, means and deviations of norms are left out, as Korthikanti et al. do. */
static const double of_inputs[ARI_OPERATION_KINDS] = {
    [ARI_OPERATION_NORM] = 2.0, [ARI_OPERATION_PRODUCT] = 2.0,    [ARI_OPERATION_ATTENTION] = 2.0,
    [ARI_OPERATION_GATE] = 2.0, [ARI_OPERATION_ACTIVATION] = 2.0, [ARI_OPERATION_DROPOUT] = 1.0,
    [ARI_OPERATION_LOSS] = 4.0, [ARI_OPERATION_ROUTE] = 4.0,      [ARI_OPERATION_COMBINE] = 2.0,
};
/* And for each score: the probability; with dropout its mask and what it leaves. Flash attention keeps instead one fp32
 * number for each query of each head, the logarithm of its sum (Dao 2023, arXiv:2307.08691). */
static const double OF_SCORE = 2.0, OF_DROPPED_SCORE = 5.0, OF_FLASH_ROW = 4.0;
/* Gradients of probabilities and of scores, both at once. */
static const double OF_SCORE_BACKWARD = 4.0;

/* A block, or the part before the blocks or after them; or the sum of several. widest, recomputed, unit: of the largest
 * of these, since they are worked on one at a time. */
typedef struct section {
    ari_memory kept;   /* of a micro-batch, between the passes */
    ari_memory linear; /* inputs and output gradients of products: what their weights' gradients need, if those wait */
    double recomputed; /* bytes that are not kept but computed again in the backward pass */
    double widest;     /* bytes of the largest operation's values */
    double parameters, experts; /* experts: of them, those of experts that only some of the ranks have */
    double matrices;            /* of the parameters, what Muon updates */
    double frozen;              /* and those without a gradient, which each rank has whole */
    double unit;                /* of a sum: of the parameters that ZeRO divides */
} section;

typedef struct ari_sections {
    ari_planned p;      /* that was walked */
    ari_step_case step; /* one micro-batch */
    double tp, ring, pp;
    bool head;
    bool blocks_begun;
    size_t routed; /* the value that the router takes, which a shared expert takes too */
    size_t layer;
    double again;     /* of the layer so far, bytes that are recomputed */
    bool gathered;    /* the operation before has made the next one's input, which is not kept but made again */
    section *section; /* [blocks.n + 2] */
    ari_walked blocks;
} account;

/* A layout of these sections: its ZeRO and replicas, its stages and their schedule. */
typedef struct layout_of {
    const account *sections;
    const ari_planned *p;
    double shards, expert_shards; /* ranks that ZeRO divides over; of experts, those with the same ones */
    const ar_pipeline_schedule *schedule;
} layout_of;

static section *section_of(account *a, const ari_operation *op)
{
    const bool block = !ari_outside_layers(&a->blocks.config, op->layer);
    a->blocks_begun = a->blocks_begun || block;
    const bool outside_first = !a->blocks_begun, backward = op->pass == ARI_PASS_BACKWARD;
    return &a->section[block ? op->layer : a->blocks.n + (outside_first == backward)];
}

/* --- the forward pass --------------------------------------------------------------------------------------------- */

/* A rank's own part of keys and values that go round a ring. */
static double own_elements(const account *a, const ari_op_value *v)
{
    const bool round = v->ndim == 3 && v->at[ARI_AXIS_RING].kind == AR_REPLICATE;
    return ari_op_elements(v) / (round ? a->ring : 1.0);
}

/* With sequence parallelism each rank routes its own tokens alone, and combines their rows (Megatron-LM's dispatcher).
 */
static double routing_ranks(const account *a, const ari_operation *op)
{
    const ar_parallel *layout = &a->step.run.parallel;
    const bool routes = op->kind == ARI_OPERATION_ROUTE || op->kind == ARI_OPERATION_COMBINE || op->role == ARI_ROUTER;
    return routes && layout->sp && !ari_experts_whole(layout) ? a->tp : 1.0;
}

/* A value gathered for a GEMM is kept as it was before; what a router and a shared expert take is kept once. */
static double inputs_kept(account *a, const ari_operation *op)
{
    const bool multiplied = op->kind == ARI_OPERATION_PRODUCT || op->stays, routes = op->role == ARI_ROUTER;
    double n = 0.0;
    if ((op->kind == ARI_OPERATION_LOSS && !a->head) || (op->kind == ARI_OPERATION_PRODUCT && a->gathered))
        return 0.0;
    if (multiplied && !routes && op->input[0].id == a->routed)
        return 0.0;
    a->routed = multiplied && routes ? op->input[0].id : a->routed;
    for (int i = 0; i < op->inputs; i++)
        n += op->input[i].role == ARI_ROUTES ? 0.0 : own_elements(a, &op->input[i]) / routing_ranks(a, op);
    return (op->stays ? VALUE : of_inputs[op->kind]) * n;
}

/* Rows of scores of this rank's queries and heads. Keys are those of the whole sequence. `v`: a value with as many
 * heads as queries have. */
static double score_rows(const account *a, const ari_op_value *v)
{
    return ari_op_elements(v) / (double)ar_config_value_dim(&a->blocks.config);
}

static double scores(const account *a, const ari_op_value *v)
{
    return score_rows(a, v) * (double)v->shape[1];
}

static double scores_kept(const account *a, const ari_operation *op)
{
    if (op->kind != ARI_OPERATION_ATTENTION)
        return 0.0;
    if (a->p.flash)
        return OF_FLASH_ROW * score_rows(a, &op->output[0]);
    return (a->step.run.dropout > 0.0 ? OF_DROPPED_SCORE : OF_SCORE) * scores(a, &op->output[0]);
}

static ari_memory_kind kind_of(const ari_operation *op)
{
    if (op->kind == ARI_OPERATION_LOSS)
        return ARI_MEMORY_LOGITS;
    if (op->layer == ARI_NO_LAYER)
        return ARI_MEMORY_OUTER;
    if (op->kind == ARI_OPERATION_NORM || op->kind == ARI_OPERATION_DROPOUT)
        return ARI_MEMORY_BETWEEN;
    return op->role > ARI_NORM2 ? ARI_MEMORY_MLP : ARI_MEMORY_ATTENTION; /* roles are in the order of a block */
}

static ar_status count_forward(void *user, const ari_operation *op)
{
    account *a = user;
    section *s = section_of(a, op);
    s->frozen += op->kind == ARI_OPERATION_ROUTE && op->weights > 0 ? ari_op_elements(&op->weight[0]) : 0.0;
    const double inputs = inputs_kept(a, op), rows = scores_kept(a, op);
    const bool full = op->within == AR_RECOMPUTE_FULL, selective = op->within != AR_RECOMPUTE_NONE && !a->p.flash;
    const double kept = (full && op->role != ARI_NORM1 ? 0.0 : inputs) + (full || selective ? 0.0 : rows);
    a->gathered = op->stays;
    s->kept.of[kind_of(op)] += kept;
    const bool waits = op->kind == ARI_OPERATION_PRODUCT && op->weight[0].experts == 0; /* the weight's gradient */
    s->linear.of[kind_of(op)] += waits || op->stays ? inputs : 0.0;
    for (int i = 0; i < op->outputs && waits; i++)
        s->linear.of[kind_of(op)] += VALUE * ari_op_elements(&op->output[i]);
    a->again = (op->layer == a->layer ? a->again : 0.0) + inputs + rows - kept;
    a->layer = op->layer;
    s->recomputed = fmax(s->recomputed, a->again);
    if (a->step.forward_only) {
        double n = 0.0;
        for (int i = 0; i < op->inputs; i++)
            n += ari_op_elements(&op->input[i]);
        for (int i = 0; i < op->outputs; i++)
            n += ari_op_elements(&op->output[i]);
        s->widest = fmax(s->widest, VALUE * n);
    }
    return AR_OK;
}

/* --- the backward pass -------------------------------------------------------------------------------------------- */

/* An operation's inputs and outputs, before ranks divide a sum among them. Values of the forward pass exist already,
 * unless they were gathered again. The loss writes its gradient over the logits. */
static double values(const account *a, const ari_operation *op)
{
    const bool gradient = op->kind == ARI_OPERATION_WEIGHT_GRADIENT;
    double n = 0.0;
    if (op->kind == ARI_OPERATION_LOSS || op->kind == ARI_OPERATION_RING)
        return 0.0;
    for (int i = 0; i < op->inputs; i++) {
        const bool forward_value = gradient && op->inputs == 2 && i == 0;
        n += forward_value && !a->gathered ? 0.0 : ari_op_elements(&op->input[i]);
    }
    for (int i = 0; i < op->outputs && !gradient; i++) {
        const bool divided = op->produced_as.kind == AR_PARTIAL_SUM && op->output[i].at[ARI_AXIS_TP].kind == AR_SHARD;
        n += ari_op_elements(&op->output[i]) * (divided ? a->tp : 1.0);
    }
    if (op->kind == ARI_OPERATION_ATTENTION && !a->p.flash)
        return VALUE * n + OF_SCORE_BACKWARD * scores(a, &op->input[0]);
    return VALUE * n;
}

/* The table that a tied head shares, or blocks for further tokens, is there once, unless stages hold a copy each; so are
 * the weights that several heads have. */
static bool is_shared(const account *a, const ari_operation *op)
{
    const ar_config *c = &a->blocks.config;
    if (op->role == ARI_TOKENS && a->pp == 1.0)
        return true;
    if (op->role == ARI_TOKENS && c->mtp > 0 && !c->tied)
        return op->layer != c->layers;
    return op->layer != ARI_NO_LAYER && (op->role == ARI_HEAD || op->role == ARI_TOKENS);
}

static ar_status count_backward(void *user, const ari_operation *op)
{
    account *a = user;
    section *s = section_of(a, op);
    if (op->recomputed) /* of experts: it is kept here */
        return AR_OK;
    if (op->kind != ARI_OPERATION_WEIGHT_GRADIENT)
        a->gathered = op->regathered;
    s->widest = fmax(s->widest, values(a, op));
    const bool shared = s == &a->section[a->blocks.n + 1] && is_shared(a, op);
    if (op->kind == ARI_OPERATION_WEIGHT_GRADIENT && !shared) {
        s->parameters += ari_op_elements(&op->output[0]);
        if (ari_op_by_muon(&a->p.step, op->output[0].role, op->output[0].bias))
            s->matrices += ari_op_elements(&op->output[0]);
        if (ari_experts_apart(&a->p.step.run.parallel) && ari_is_expert_part(op->role))
            s->experts += ari_op_elements(&op->output[0]);
    }
    return AR_OK;
}

/* --- stages ------------------------------------------------------------------------------------------------------- */

/* Micro-batches of a schedule that holds as much as that of all of them: what a rank holds but under GPipe does not
 * grow any more when each stage has had a few. Where stages take turns, these do every pp micro-batches. */
int ari_memory_micro_batches(const ar_parallel *layout)
{
    const int micro = ari_at_least_one(layout->micro_batches), pp = ari_at_least_one(layout->pp);
    const int enough = 3 * pp + micro % pp;
    return layout->schedule != AR_PP_GPIPE && micro > enough ? enough : micro;
}

static void add_memory(ari_memory *to, const ari_memory *from, double times)
{
    for (int k = 0; k < ARI_MEMORY_KINDS; k++)
        to->of[k] += times * from->of[k];
}

/* Micro-batches that a pass adds to those of which a stage keeps its activations, and to those that wait for gradients of
 * weights. What is on its way is left out. */
static const double held[AR_PP_KINDS][2] = {[AR_PP_FORWARD] = {1.0, 0.0},
                                            [AR_PP_BACKWARD] = {-1.0, 0.0},
                                            [AR_PP_BACKWARD_INPUT] = {-1.0, 1.0},
                                            [AR_PP_BACKWARD_WEIGHT] = {0.0, -1.0}};

/* Adds a section that a stage goes through so often, with those of so many micro-batches. */
static void add_section(const layout_of *a, section *s, const section *from, double times, const double micros[2])
{
    const double whole = from->parameters - from->experts;
    if (times == 0.0)
        return;
    add_memory(&s->kept, &from->kept, times * micros[0]);
    add_memory(&s->kept, &from->linear, times * micros[1]);
    s->parameters += times * from->parameters;
    s->experts += times * from->experts;
    s->matrices += times * from->matrices;
    s->frozen += times * from->frozen;
    s->unit = fmax(s->unit, (a->shards > 1.0 ? whole : 0.0) + (a->expert_shards > 1.0 ? from->experts : 0.0));
    s->widest = fmax(s->widest, from->widest);
    s->recomputed = fmax(s->recomputed, from->recomputed);
}

/* The micro-batches that each of a rank's stages holds when the rank holds most. bytes: of one, of each stage. */
static void find_most(double micros[][2], double bytes[][2], const layout_of *a, size_t rank, int pp)
{
    size_t count = 0, peak = 0;
    const ar_pp_operation *list = ari_pipeline_schedule_rank(a->schedule, (int)rank, &count);
    double now = 0.0, most = 0.0;
    for (size_t i = 0; i < count; i++) {
        const double *of = bytes[list[i].stage / pp], *more = held[list[i].kind];
        now += more[0] * of[0] + more[1] * of[1];
        peak = now > most ? i + 1 : peak;
        most = fmax(most, now);
    }
    for (size_t i = 0; i < peak; i++) {
        for (int k = 0; k < 2; k++)
            micros[list[i].stage / pp][k] += held[list[i].kind][k];
    }
}

/* A rank with all its stages. */
static section rank_of(const layout_of *a, size_t rank)
{
    const ari_walked *b = &a->sections->blocks;
    const ar_parallel *layout = &a->p->step.run.parallel;
    const int pp = ari_at_least_one(layout->pp), stages = ari_parallel_stages(layout) / pp;
    ari_stage of[AR_MAX_STAGES];
    double bytes[AR_MAX_STAGES][2], micros[AR_MAX_STAGES][2];
    section sum = {.parameters = 0.0};
    for (int i = 0; i < stages; i++) {
        of[i] = ari_stage_of(b, a->p, rank + (size_t)(i * pp));
        bytes[i][0] = bytes[i][1] = micros[i][0] = micros[i][1] = 0.0;
        for (size_t k = 0; k < b->n + 2; k++) {
            const section *s = &a->sections->section[k];
            bytes[i][0] += ari_stage_times(b, &of[i], k) * ari_memory_sum(&s->kept);
            bytes[i][1] += ari_stage_times(b, &of[i], k) * ari_memory_sum(&s->linear);
        }
    }
    find_most(micros, bytes, a, rank, pp);
    for (int i = 0; i < stages; i++) {
        for (size_t k = 0; k < b->n + 2; k++)
            add_section(a, &sum, &a->sections->section[k], ari_stage_times(b, &of[i], k), micros[i]);
    }
    return sum;
}

/* A rank's share of a stage's parameters or states, if this stage of ZeRO divides them. */
static double share_of_rank(const layout_of *a, const section *s, int since)
{
    const double experts = s->experts, others = s->parameters - experts;
    const bool divides = a->p->step.run.parallel.zero >= since;
    return divides ? ceil(others / a->shards) + ceil(experts / a->expert_shards) : s->parameters;
}

static ari_memory memory_of(const layout_of *a, const section *s)
{
    const ar_run *run = &a->p->step.run;
    const bool backward_pass = !a->p->step.forward_only, updates = backward_pass && run->steps > 0;
    const double state = updates ? share_of_rank(a, s, 1) : 0.0, whole = VALUE * s->unit;
    const section of_muon = {.parameters = s->matrices, .experts = s->matrices > 0.0 ? s->experts : 0.0};
    const double momenta = updates ? share_of_rank(a, &of_muon, 1) : 0.0; /* kept without a second moment */
    const double gradient = a->p->fp32_gradients && run->parallel.zero < 2 ? FLOAT : VALUE;
    ari_memory m = s->kept;
    if (!backward_pass)
        m = (ari_memory){{0.0}};
    m.of[ARI_MEMORY_WEIGHTS] = VALUE * (share_of_rank(a, s, 3) + s->frozen);
    m.of[ARI_MEMORY_GRADIENTS] = backward_pass ? gradient * share_of_rank(a, s, 2) : 0.0;
    m.of[ARI_MEMORY_RESERVE] = a->p->reserve;
    m.of[ARI_MEMORY_MASTER] = FLOAT * state;
    m.of[ARI_MEMORY_OPTIMIZER] = FLOAT * (ari_optimizer_states(&run->optimizer) * state - momenta);
    m.of[ARI_MEMORY_WORKSPACE] = s->widest + (backward_pass ? s->recomputed : 0.0) +
                                 (run->parallel.zero >= 3 ? whole : 0.0) +
                                 (run->parallel.zero >= 2 && backward_pass ? whole : 0.0);
    return m;
}

double ari_memory_least(const ari_planned *p, double parameters, double experts)
{
    const layout_of a = {.p = p, .shards = ari_planned_shares(p), .expert_shards = ari_planned_expert_shares(p)};
    const section s = {.parameters = floor(parameters), .experts = floor(experts)};
    const ari_memory m = memory_of(&a, &s);
    return ari_memory_sum(&m);
}

/* --- the account -------------------------------------------------------------------------------------------------- */

static void begin_account(account *a, const ari_planned *p)
{
    const ar_parallel *layout = &p->step.run.parallel;
    size_t start = 0;
    *a = (account){.p = *p,
                   .step = ari_planned_whole(p),
                   .tp = ari_at_least_one(layout->tp),
                   .ring = (double)ari_axis_ranks(layout, ARI_AXIS_RING),
                   .pp = ari_at_least_one(layout->pp),
                   .head = ari_part_path(ari_family_of(p->step.config->arch), ARI_HEAD) != NULL};
    a->blocks = ari_walked_of(&p->step, true);
    a->step.config = &a->blocks.config;
    ari_parallel_rows(layout, p->step.run.batch, 0, 0, &start, &a->step.run.batch);
}

ar_status ari_sections_create(ari_sections **gives, const ari_planned *p)
{
    ARI_OWNED_BY(ari_sections_destroy) ari_sections *a = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&a, 1, "sections of a model"));
    begin_account(a, p);
    AR_TRY(ARI_ALLOC_ZERO(&a->section, a->blocks.n + 2, "sections"));
    AR_TRY(ari_operations(&a->step, ARI_OPS_FORWARD, 0, count_forward, a));
    a->blocks_begun = false;
    AR_TRY(ari_operations(&a->step, ARI_OPS_BACKWARD, 0, count_backward, a));
    ARI_GIVE(gives, a);
    return AR_OK;
}

void ari_sections_destroy(ari_sections *s)
{
    if (s)
        free(s->section);
    free(s);
}

ari_memory ari_sections_memory(const ari_sections *s, const ari_planned *p, const ar_pipeline_schedule *schedule,
                               double enough)
{
    const layout_of a = {.sections = s,
                         .p = p,
                         .shards = ari_planned_shares(p),
                         .expert_shards = ari_planned_expert_shares(p),
                         .schedule = schedule};
    ari_memory m = {{0.0}};
    for (size_t i = 0; i < (size_t)ari_at_least_one(p->step.run.parallel.pp) && ari_memory_sum(&m) <= enough; i++) {
        const section of = rank_of(&a, i);
        const ari_memory here = memory_of(&a, &of);
        if (i == 0 || ari_memory_sum(&here) > ari_memory_sum(&m))
            m = here;
    }
    return m;
}

ar_status ari_memory_production(ari_memory *m, const ari_planned *p)
{
    const ar_parallel *layout = &p->step.run.parallel;
    const size_t layers = p->step.config->layers;
    ar_parallel few = *layout;
    ARI_OWNED_BY(ari_sections_destroy) ari_sections *sections = NULL;
    ARI_OWNED_BY(ari_pipeline_schedule_destroy) ar_pipeline_schedule *schedule = NULL;
    if (layout->stages.n == 0 &&
        (double)ari_at_least_one(layout->pp) * ari_at_least_one(layout->virtual_stages) > (double)layers)
        return ar_error_set(
            AR_ERR_INDIVISIBLE,
            "%zu layers cannot be split into %d stages on each of %d ranks; use at most one stage for each layer",
            layers, ari_at_least_one(layout->virtual_stages), ari_at_least_one(layout->pp));
    few.micro_batches = ari_memory_micro_batches(layout);
    AR_TRY(ari_sections_create(&sections, p));
    AR_TRY(ari_parallel_schedule(&schedule, &few));
    *m = ari_sections_memory(sections, p, schedule, INFINITY);
    return AR_OK;
}
