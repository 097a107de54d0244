/* SPDX-License-Identifier: Apache-2.0 */
/* The walk: its arithmetic, where it is, the operations that it visits with their collectives, and the values that they
 * take and make. */
#include "sim/plan/ops_impl.h"

#include <string.h>

#include "ref/core/size.h"
#include "ref/core/tensor_private.h"
#include "ref/models/parallel_private.h"
#include "ref/models/plan_private.h"
#include "ref/placement/context_private.h"

/* --- arithmetic --------------------------------------------------------------------------------------------------- */

size_t ari_op_builder_mul(ari_op_builder *w, size_t a, size_t b)
{
    size_t product = 0;
    if (w->st == AR_OK)
        w->st = ari_mul_size(&product, a, b);
    return w->st == AR_OK ? product : 0;
}

size_t ari_op_builder_add(ari_op_builder *w, size_t a, size_t b)
{
    size_t sum = 0;
    if (w->st == AR_OK)
        w->st = ari_add_size(&sum, a, b);
    return w->st == AR_OK ? sum : 0;
}

/* --- where it is ------------------------------------------------------------------------------------------------- */

void ari_op_builder_stage_layers(const ari_op_builder *w, size_t stage, size_t *begin, size_t *end)
{
    ari_stage_layers(begin, end, &w->c->run.parallel.stages, w->config->layers, w->stages, stage);
    *end += *begin;
}

void ari_op_builder_stage_blocks(const ari_op_builder *w, size_t stage, size_t *begin, size_t *end)
{
    ari_op_builder_stage_layers(w, stage, begin, end);
    *end += stage + 1 == w->stages ? w->config->mtp : 0;
}

void ari_op_builder_layer(ari_op_builder *w, size_t layer)
{
    const bool alike = w->split != ARI_NO_LAYER && layer != ARI_NO_LAYER && w->c->run.plan.rules == 0 &&
                       ar_config_has_experts(w->config, w->split) == ar_config_has_experts(w->config, layer);
    w->layer = layer;
    if (w->st != AR_OK || layer == ARI_NO_LAYER || alike)
        return;
    w->split = layer;
    w->st = ari_plan_block(&w->c->run.plan, w->config, layer, w->form.by_tokens, &w->block);
}

int ari_op_builder_zero(const ari_op_builder *w)
{
    const int zero = w->c->forward_only ? 0 : w->c->run.parallel.zero;
    return zero > 1 && w->sharing[false] == 1 ? 1 : zero;
}

bool ari_op_builder_by_heads(const ari_op_builder *w)
{
    return ari_op_builder_same(ari_op_builder_placed(w->block.attention.first.to), ari_by_features);
}

size_t ari_op_builder_kv_copies(const ari_op_builder *w, bool heads)
{
    const size_t ranks =
                     (ari_op_builder_by_heads(w) ? w->ranks[ARI_AXIS_TP] : 1) * (heads ? w->ranks[ARI_AXIS_INNER] : 1),
                 kv = w->config->kv_heads;
    return kv > 0 && ranks > kv ? ranks / kv : 1;
}

/* --- which value is which ---------------------------------------------------------------------------------------- */

/* Those of a micro-batch: of each section what its forward pass makes, what is made again, and gradients; then what
 * goes from stage to stage. Number 0 of the first and the last of these is what enters the section, and its gradient.
 * */
enum { MOST_MADE = 128 };

size_t ari_operations_values(const ari_step_case *c)
{
    return ((ar_config_blocks(c->config) + 2) * ARI_SCOPES + (size_t)ari_parallel_stages(&c->run.parallel)) * MOST_MADE;
}

static size_t number(const ari_op_builder *w, size_t scope, size_t n)
{
    return w->micro * w->edges.values + scope * MOST_MADE + n + 1;
}

size_t ari_op_builder_stream_value(const ari_op_builder *w, size_t section)
{
    return number(w, section * ARI_SCOPES + (w->pass == ARI_PASS_BACKWARD ? ARI_SCOPE_GRADIENTS : ARI_SCOPE_FORWARD),
                  0);
}

size_t ari_op_builder_message_value(const ari_op_builder *w, size_t stage, bool received)
{
    return number(w, (ar_config_blocks(w->config) + 2) * ARI_SCOPES + stage,
                  (w->pass == ARI_PASS_BACKWARD ? 2u : 0u) + (received ? 1u : 0u));
}

size_t ari_op_builder_new_value(ari_op_builder *w)
{
    const bool repeated = w->op.regathered || w->op.recomputed;
    const ari_scope scope = w->op.pass == ARI_PASS_FORWARD ? ARI_SCOPE_FORWARD
                            : repeated                     ? ARI_SCOPE_RECOMPUTED
                                                           : ARI_SCOPE_GRADIENTS;
    if (++w->edges.made[scope] == MOST_MADE)
        w->st = ar_error_set(AR_ERR_INTERNAL, "a section of more than %d values", MOST_MADE);
    return number(w, w->edges.section * ARI_SCOPES + (size_t)scope, w->edges.made[scope]);
}

ari_op_value ari_op_builder_held(const ari_op_builder *w, ari_op_value v, int i)
{
    const ari_op_value *now = &w->edges.now.at[i < w->edges.now.n ? i : 0];
    v.id = now->id;
    v.of = now->of;
    return v;
}

ari_forward *ari_op_builder_forward_of(ari_op_builder *w, ari_operation_kind kind, ari_role role)
{
    int i = 0;
    while (i < w->edges.forwards && (w->edges.forward[i].kind != kind || w->edges.forward[i].role != role))
        i++;
    return i < w->edges.forwards ? &w->edges.forward[i] : NULL;
}

/* A recomputed value replaces the one that was computed first. */
static void remember(ari_op_builder *w)
{
    const ari_operation *op = &w->op;
    ari_forward *f = ari_op_builder_forward_of(w, op->kind, op->role);
    if (!f && w->edges.forwards == ARI_FORWARDS) {
        w->st = ar_error_set(AR_ERR_INTERNAL, "a section of more than %d operations", ARI_FORWARDS);
        return;
    }
    f = f ? f : &w->edges.forward[w->edges.forwards++];
    *f = (ari_forward){.kind = op->kind, .role = op->role};
    for (int i = 0; i < op->inputs; i++)
        f->in[i] = op->input[i].id;
    for (int i = 0; i < op->outputs; i++)
        f->out[i] = op->output[i].id;
}

/* Refers a gradient to its value. An operation that only moves gradients leaves them referring to the same values. */
static void refer(ari_op_builder *w)
{
    static const bool reads[ARI_OPERATION_KINDS] = {[ARI_OPERATION_NORM] = true,
                                                    [ARI_OPERATION_ACTIVATION] = true,
                                                    [ARI_OPERATION_GATE] = true,
                                                    [ARI_OPERATION_ROUTE] = true,
                                                    [ARI_OPERATION_COMBINE] = true};
    ari_operation *op = &w->op;
    const ari_forward *f = ari_op_builder_forward_of(w, op->kind, op->role);
    for (int i = 0; i < op->inputs && f; i++)
        op->input[i].of = f->out[i];
    for (int i = 0; i < op->outputs; i++)
        op->output[i].of = f ? f->in[i] : op->input[i < op->inputs ? i : 0].of;
    for (int i = 0; i < op->outputs && reads[op->kind]; i++)
        op->saved[op->saves++] = op->output[i].of;
}

/* --- operations -------------------------------------------------------------------------------------------------- */

ari_operation *ari_op_builder_begin(ari_op_builder *w, ari_operation_kind kind, ari_role role)
{
    w->op = (ari_operation){.kind = kind,
                            .pass = w->recomputed ? ARI_PASS_BACKWARD : w->pass,
                            .layer = w->layer,
                            .stage = w->stage,
                            .part = w->part,
                            .micro = w->micro,
                            .times = w->times,
                            .role = role,
                            .regathered = w->regathered,
                            .stays = w->stays,
                            .recomputed = w->recomputed,
                            .counting = w->counting,
                            .within = w->within,
                            .produced_as = ari_op_builder_stream(w)};
    return &w->op;
}

/* A backward pass in two parts: each leaves out the other's operations. Without samples only the shared-out operations
 * remain. */
void ari_op_builder_visit(ari_op_builder *w)
{
    const bool other = w->part == AR_PP_BACKWARD_INPUT    ? w->deferred
                       : w->part == AR_PP_BACKWARD_WEIGHT ? !w->deferred
                                                          : false;
    if (w->st == AR_OK && !w->edges.unseen && !other && (w->unit || !w->absent))
        w->st = w->visit(w->user, &w->op);
}

void ari_op_builder_make(ari_op_builder *w)
{
    ari_operation *op = &w->op;
    const bool moves = op->kind == ARI_OPERATION_REDISTRIBUTE || op->kind == ARI_OPERATION_HEADS;
    for (int i = 0; i < op->outputs; i++)
        op->output[i].id = op->output[i].id > 0 ? op->output[i].id : ari_op_builder_new_value(w);
    if (op->pass == ARI_PASS_FORWARD || op->recomputed) {
        if ((w->edges.unseen || op->recomputed) && !moves)
            remember(w);
    } else if (!op->regathered && op->kind != ARI_OPERATION_RESIDUAL) {
        refer(w);
    }
    w->edges.now.n = op->outputs;
    memcpy(w->edges.now.at, op->output, sizeof w->edges.now.at);
    ari_op_builder_visit(w);
}

ari_operation *ari_op_builder_local(ari_op_builder *w, ari_operation_kind kind, ari_role role, int inputs,
                                    size_t features, ar_placement at)
{
    ari_operation *op = ari_op_builder_begin(w, kind, role);
    op->produced_as = at;
    op->output[op->outputs++] = ari_op_builder_activation(w, features, at, 1);
    for (; op->inputs < inputs; op->inputs++)
        op->input[op->inputs] = ari_op_builder_held(w, op->output[0], op->inputs);
    return op;
}

size_t ari_op_builder_cp(const ari_op_builder *w)
{
    return w->ranks[ARI_AXIS_RING] * w->ranks[ARI_AXIS_INNER];
}

size_t ari_op_builder_ranks(const ari_op_builder *w, ari_over over)
{
    size_t ranks = 1;
    if (over == ARI_OVER_COPIES)
        return ari_op_builder_kv_copies(w, true);
    if (over == ARI_OVER_SHARD || over == ARI_OVER_EXPERT_SHARD)
        return w->sharing[ari_over_experts(over)];
    if (over == ARI_OVER_REPLICATE || over == ARI_OVER_EXPERT_REPLICATE)
        return w->summing[ari_over_experts(over)] / w->sharing[ari_over_experts(over)];
    if (over == ARI_OVER_EP || over == ARI_OVER_EDP)
        return over == ARI_OVER_EP ? w->ep : w->summing[true];
    if (over == ARI_OVER_EXPERT_CP)
        return (size_t)ari_expert_sequence(&w->c->run.parallel);
    if (over == ARI_OVER_ENDS)
        return w->ranks[ARI_AXIS_PP] > 1 ? 2 : 1;
    for (int axis = 0; axis < ARI_PLACED_AXES; axis++)
        ranks *= ari_over_axes(over) >> axis & 1 ? w->ranks[axis] : 1;
    return ranks;
}

/* True if the pass has multiplied by this weight already: all heads have one. */
static bool used_before(const ari_op_builder *w, ari_role role)
{
    const size_t end = w->config->layers + 1, first = w->pass == ARI_PASS_BACKWARD ? end + w->config->mtp : end;
    return (role == ARI_HEAD || role == ARI_TOKENS) && w->edges.section != first;
}

void ari_op_builder_call(ari_op_builder *w, ari_call_kind kind, ari_over over, size_t elements, ar_dtype dtype,
                         ari_call_often often, ari_role role, const char *tag)
{
    const bool message = kind == ARI_CALL_SEND || kind == ARI_CALL_RECV;
    const size_t ranks = message ? 2 : ari_op_builder_ranks(w, over);
    const bool backward = w->pass == ARI_PASS_BACKWARD, passed = w->passed[backward][w->stage];
    const bool own = w->layer != ARI_NO_LAYER && role != ARI_HEAD && role != ARI_TOKENS; /* of a unit of its own */
    const bool remade = often == ARI_EACH_VERSION && ari_op_builder_zero(w) == 3 && own;
    const bool counted = w->passed[2][w->stage] && w->pass == ARI_PASS_FORWARD && own;
    const bool known =
        often == ARI_EACH_VERSION && (used_before(w, role) || (!remade && (w->recomputed || passed || counted)));
    const size_t experts = w->in_experts && often == ARI_EACH_VERSION ? w->experts : 0;
    if (ranks <= 1 || known)
        return;
    if (w->op.calls == ARI_OP_CALLS)
        w->st = ar_error_set(AR_ERR_INTERNAL, "an operation '%s' of more than %d collectives",
                             ari_operation_name(w->op.kind), ARI_OP_CALLS);
    else
        w->op.call[w->op.calls++] = (ari_op_call){.kind = kind,
                                                  .over = over,
                                                  .ranks = ranks,
                                                  .elements = elements,
                                                  .chunk = elements,
                                                  .dtype = dtype,
                                                  .often = remade ? ARI_EACH_MICRO : often,
                                                  .repeats = experts > 0 ? experts : 1,
                                                  .experts = experts,
                                                  .expert = w->first_expert,
                                                  .role = role,
                                                  .tag = tag};
}

size_t ari_op_builder_positions(const ari_op_builder *w)
{
    return w->c->run.seq / ari_op_builder_cp(w) / w->ranks[ARI_AXIS_TP];
}

void ari_op_builder_repeat(ari_op_builder *w, size_t times)
{
    if (w->op.calls > 0)
        w->op.call[w->op.calls - 1].repeats = times;
}

ari_axes ari_op_builder_apart(const ari_op_builder *w)
{
    return w->apart ? ari_expert_axes(&w->c->run.parallel) : 0;
}

/* In products of the experts each position has a row for each of its experts. */
static size_t rows_each(const ari_op_builder *w)
{
    return w->in_experts ? w->config->experts.per_token : 1;
}

size_t ari_op_builder_rows(ari_op_builder *w)
{
    return ari_op_builder_mul(w, w->tokens, rows_each(w));
}

/* --- values ------------------------------------------------------------------------------------------------------- */

const ar_placement ari_whole = {AR_INVARIANT, 0}, ari_by_tokens = {AR_SHARD, 1}, ari_by_features = {AR_SHARD, 2};

ar_placement ari_op_builder_placed(ar_placement p)
{
    if (p.kind == AR_SHARD && p.dim < 0)
        p.dim += 3;
    return p.kind == AR_REPLICATE ? ari_whole : p;
}

bool ari_op_builder_same(ar_placement a, ar_placement b)
{
    return a.kind == b.kind && (a.kind != AR_SHARD || a.dim == b.dim);
}

ar_placement ari_op_builder_stream(const ari_op_builder *w)
{
    return w->form.sp ? ari_by_tokens : ari_whole;
}

enum { POSITIONS = 1 }; /* the dimension of an activation of which nobody has copies */

/* Samples are cut as ari_parallel_rows cuts them, everything else by ari_split_uneven. */
void ari_op_builder_place(const ari_op_builder *w, ari_op_value *v)
{
    for (int d = 0; d < v->ndim; d++) {
        const size_t copies = v->copies > 0 && !(v->ndim == 3 && d == POSITIONS) ? v->copies : 1;
        size_t parts = 1, part = 0, start = 0;
        for (int axis = ARI_AXIS_RING; axis < ARI_PLACED_AXES; axis++) {
            if (v->at[axis].kind != AR_SHARD || v->at[axis].dim != d)
                continue;
            part = part * w->ranks[axis] + w->at[axis];
            parts *= w->ranks[axis];
        }
        v->local[d] = v->shape[d];
        if (parts > 1)
            ari_split_uneven(v->shape[d], (int)(parts / copies), (int)(part / copies), &start, &v->local[d]);
    }
    if (v->at[ARI_AXIS_DP].kind == AR_SHARD)
        v->local[0] = w->own;
}

ari_op_value ari_op_builder_activation(ari_op_builder *w, size_t features, ar_placement tp, size_t copies)
{
    ari_op_value v = {.dtype = w->form.activations,
                      .ndim = 3,
                      .shape = {w->all, ari_op_builder_mul(w, w->c->run.seq, rows_each(w)), features},
                      .at = {[ARI_AXIS_PP] = ari_whole,
                             [ARI_AXIS_DP] = {AR_SHARD, 0},
                             [ARI_AXIS_RING] = ari_by_tokens,
                             [ARI_AXIS_INNER] = ari_by_tokens,
                             [ARI_AXIS_TP] = tp},
                      .copies = copies,
                      .by_expert = w->in_experts ? ari_op_builder_apart(w) : 0};
    ari_op_builder_place(w, &v);
    return v;
}
