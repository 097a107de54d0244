/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/lint/flow.h"

#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"
#include "ref/placement/placement_private.h"

/* The rows of one layer, and of the one before it. */
typedef struct builder {
    ari_flow *flow;
    const ari_flow_options *o;
    size_t ranks;                    /* of the pipeline */
    size_t layer;                    /* of the rows that are being added */
    size_t first, before_first;      /* where its rows begin, and those of the layer before; SIZE_MAX: there is none */
    size_t shown[ARI_PASS_STEP + 1]; /* the micro-batch that came first in a pass; SIZE_MAX: none yet */
} builder;

double ari_call_sent(const ari_op_call *call)
{
    size_t bytes = 0;
    const size_t senders = call->kind == ARI_CALL_SEND ? 1 : call->ranks;
    return ari_call_bytes(&bytes, call) == AR_OK ? (double)bytes / (double)senders : 0.0;
}

static bool same_values(int n, int m, const ari_op_value *a, const ari_op_value *b)
{
    for (int i = 0; i < n && n == m; i++) {
        const ari_op_value *x = &a[i], *y = &b[i];
        if (x->role != y->role || x->bias != y->bias || x->dtype != y->dtype || x->ndim != y->ndim ||
            x->copies != y->copies || x->experts != y->experts || memcmp(x->shape, y->shape, sizeof x->shape) != 0 ||
            memcmp(x->local, y->local, sizeof x->local) != 0)
            return false;
        for (int axis = 0; axis < ARI_PLACED_AXES; axis++) {
            if (!ari_placement_same(x->at[axis], y->at[axis], x->ndim))
                return false;
        }
    }
    return n == m;
}

static bool same_calls(const ari_operation *a, const ari_operation *b)
{
    for (int i = 0; i < a->calls && a->calls == b->calls; i++) {
        const ari_op_call *x = &a->call[i], *y = &b->call[i];
        if (x->kind != y->kind || x->over != y->over || x->elements != y->elements || x->dtype != y->dtype ||
            x->often != y->often || x->queue != y->queue || x->chunk != y->chunk || x->repeats != y->repeats ||
            x->experts != y->experts || x->role != y->role || strcmp(x->tag, y->tag) != 0)
            return false;
    }
    return a->calls == b->calls;
}

/* But for the layer. */
static bool same(const ari_operation *a, const ari_operation *b)
{
    return a->kind == b->kind && a->pass == b->pass && a->recomputed == b->recomputed && a->role == b->role &&
           a->params == b->params && same_values(a->inputs, b->inputs, a->input, b->input) &&
           same_values(a->weights, b->weights, a->weight, b->weight) &&
           same_values(a->outputs, b->outputs, a->output, b->output) && same_calls(a, b);
}

/* The layer's rows end: where the layer before has the same, that one stands for it too. */
static void end_layer(builder *b)
{
    ari_flow *f = b->flow;
    const size_t n = f->count - b->first, before = b->first - b->before_first;
    bool equal = !b->o->each_layer && b->layer != ARI_NO_LAYER && b->before_first != SIZE_MAX && n == before;
    for (size_t i = 0; equal && i < n; i++)
        equal = same(&f->row[b->before_first + i].op, &f->row[b->first + i].op);
    if (!equal) {
        b->before_first = b->layer == ARI_NO_LAYER ? SIZE_MAX : b->first;
        b->first = f->count;
        return;
    }
    for (size_t i = 0; i < n; i++) {
        ari_flow_row *row = &f->row[b->before_first + i];
        row->op.layer = b->layer < row->op.layer ? b->layer : row->op.layer;
        row->layers++;
    }
    f->count = b->first;
}

static void add_total(ari_flow_total *t, const ari_operation *op)
{
    t->multiply_adds += op->multiply_adds * (double)op->times;
    for (int i = 0; i < op->calls; i++) {
        t->calls += op->call[i].repeats * ari_call_chunks(&op->call[i]) * op->times;
        t->bytes += ari_call_sent(&op->call[i]) * (double)op->times;
    }
}

static bool begins_stage(const ari_operation *op)
{
    return op->kind == ARI_OPERATION_EMBEDDING || op->kind == ARI_OPERATION_RECEIVE;
}

/* Broadcasts of the experts' parameters come expert by expert; those of a part are one row. */
static bool joins_row(ari_flow *f, const ari_operation *op)
{
    enum { PARTS_OF_EACH = 3 };
    for (size_t i = 1; i <= PARTS_OF_EACH && i <= f->count && op->kind == ARI_OPERATION_BROADCAST; i++) {
        ari_operation *before = &f->row[f->count - i].op;
        if (!ari_is_expert_part(op->role) || before->kind != op->kind || before->role != op->role ||
            before->layer != op->layer)
            continue;
        before->input[0].experts = before->output[0].experts = op->expert - before->expert + 1;
        for (int k = 0; k < before->calls; k++)
            before->call[k].repeats = before->call[k].experts = before->output[0].experts;
        return true;
    }
    return false;
}

static ar_status add_row(void *user, const ari_operation *op)
{
    builder *b = user;
    ari_flow *f = b->flow;
    const bool in_pass = op->pass == ARI_PASS_FORWARD || op->pass == ARI_PASS_BACKWARD;
    if (b->o->passes_only && op->pass != ARI_PASS_FORWARD)
        return AR_OK;
    add_total(&f->total[op->pass], op);
    if (op->counting) /* the same operations follow */
        return AR_OK;
    if (op->pass == ARI_PASS_FORWARD && op->stage < b->ranks && begins_stage(op))
        f->micro_batches += op->times;
    if (in_pass && b->shown[op->pass] == SIZE_MAX)
        b->shown[op->pass] = op->micro;
    if (in_pass && b->shown[op->pass] != op->micro)
        return AR_OK;
    if (op->layer != b->layer)
        end_layer(b);
    b->layer = op->layer;
    if (joins_row(f, op))
        return AR_OK;
    AR_TRY(ARI_GROW(&f->row, &f->capacity, f->count, "the rows of a flow table"));
    f->row[f->count++] = (ari_flow_row){*op, 1};
    return AR_OK;
}

ar_status ari_flow_init(ari_flow *f, const ari_step_case *c, const ari_flow_options *o)
{
    builder b = {.flow = f,
                 .o = o,
                 .ranks = ari_axis_ranks(&c->run.parallel, ARI_AXIS_PP),
                 .layer = ARI_NO_LAYER,
                 .before_first = SIZE_MAX};
    for (int i = 0; i <= ARI_PASS_STEP; i++)
        b.shown[i] = SIZE_MAX;
    *f = (ari_flow){0};
    AR_TRY(ari_operations(c, ARI_OPS_ONCE, o->rank, add_row, &b));
    end_layer(&b);
    return AR_OK;
}

void ari_flow_fini(ari_flow *f)
{
    free(f->row);
    *f = (ari_flow){0};
}
