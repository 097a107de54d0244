/* SPDX-License-Identifier: Apache-2.0 */
/* The shapes of what the ranks of a run held beside those that the list of operations has of the layout. */
#include <stdio.h>
#include <string.h>

#include "ref/core/text.h"
#include "ref/models/family.h"
#include "verify/check/check_run.h"
#include "verify/lint/flow.h"

/* The part of a tensor that a rank should hold. */
typedef struct expected {
    bool is; /* the list has the tensor */
    int ndim;
    size_t shape[AR_MAX_DIMS]; /* in the micro-batch `micro` */
    size_t micro;
    size_t rows; /* along dimension 0 in earlier micro-batches */
} expected;

typedef struct expecting {
    const ari_reference *ref;
    const ar_config *config;
    expected *of;       /* [ref->count] */
    ari_operation last; /* the one before */
} expecting;

/* The tensor with this name; NULL: none. */
static expected *expected_of(const expecting *e, const ari_operation *op, ari_role role, size_t expert, const char *end,
                             char pass)
{
    char layer[24], number[24], path[160], name[192];
    snprintf(layer, sizeof layer, "%zu", op->layer);
    snprintf(number, sizeof number, "%zu", expert);
    ari_path_of(path, sizeof path, e->config, layer, number, role);
    snprintf(name, sizeof name, "%s%s", path, end);
    const size_t i = ari_reference_find(e->ref, name, pass);
    return i < e->ref->count ? &e->of[i] : NULL;
}

static void expect(const expecting *e, const ari_operation *op, ari_role role, size_t expert, const char *end,
                   char pass, const ari_op_value *v)
{
    expected *x = expected_of(e, op, role, expert, end, pass);
    if (!x || e->ref->tensor[x - e->of].ndim != v->ndim)
        return;
    x->rows += x->is && pass == 'f' && x->micro != op->micro ? x->shape[0] : 0;
    x->is = true;
    x->micro = op->micro;
    x->ndim = v->ndim;
    memcpy(x->shape, v->local, sizeof x->shape);
}

/* A matrix of the list is [out, in]; some families store the transpose. */
static void expect_weight(const expecting *e, const ari_operation *op, const ari_op_value *weight)
{
    ari_op_value v = *weight;
    if (v.ndim == 2 && ari_family_of(e->config->arch)->transposed &&
        ari_part_kind_of(v.role)->form == ARI_FORM_LINEAR) {
        v.local[0] = weight->local[1];
        v.local[1] = weight->local[0];
    }
    for (size_t i = 0; i < (v.experts > 0 ? v.experts : 1); i++)
        expect(e, op, v.role, v.expert + i, ari_param_suffix(v.role, v.bias), 'i', &v);
}

static ar_status visit_weights(void *user, const ari_operation *op)
{
    for (int i = 0; i < op->weights; i++)
        expect_weight(user, op, &op->weight[i]);
    return AR_OK;
}

/* The role in an output's name: a head has its own, also if its weight is the embedding's. */
static ari_role output_role(const ari_operation *op, int i)
{
    if (op->kind == ARI_OPERATION_POSITIONS) /* with the tokens' rows: what the first block gets */
        return ARI_EMBEDDED;
    return op->outputs == 1 ? op->role : op->output[i].role;
}

/* If several operations make one tensor (a GEMM, its bias), the last one's output is the tensor. A value that a module
 * redistributes after a GEMM is reported before or after that: it is compared only if it has a name itself. */
static ar_status visit_outputs(void *user, const ari_operation *op)
{
    expecting *e = user;
    const bool product = e->last.kind == ARI_OPERATION_PRODUCT || e->last.kind == ARI_OPERATION_BIAS;
    const bool travels = op->kind == ARI_OPERATION_HEADS || op->kind == ARI_OPERATION_RING ||
                         op->kind == ARI_OPERATION_DISPATCH; /* reported before */
    if (op->pass != ARI_PASS_FORWARD || op->counting || travels)
        return AR_OK;
    for (int i = 0; i < e->last.outputs && product && op->kind == ARI_OPERATION_REDISTRIBUTE; i++) {
        expected *x = expected_of(e, &e->last, output_role(&e->last, i), 0, "", 'f');
        if (x)
            x->is = false;
    }
    for (int i = 0; i < op->outputs; i++)
        expect(e, op, output_role(op, i), 0, "", 'f', &op->output[i]);
    e->last = *op;
    return AR_OK;
}

static void compare_shape(ar_check_run *run, const ari_reference *ref, size_t tensor, int rank, const ari_finding *f,
                          const expected *x)
{
    const ari_ref_tensor *t = &ref->tensor[tensor];
    size_t shape[AR_MAX_DIMS];
    memcpy(shape, x->shape, sizeof shape);
    shape[0] += x->rows;
    run->shapes++;
    const bool same =
        f->seen ? ari_same_extents(f->ndim, f->shape, x->ndim, shape) : shape[0] == 0; /* a rank without samples */
    if (same || run->shape_difference[0])
        return;
    snprintf(run->shape_difference, sizeof run->shape_difference, "rank %d holds %s of %s%s, the layout has %s there",
             rank, ARI_SHOW_INDEX(f->seen ? f->ndim : 0, f->shape), t->name, ari_pass_suffix(t->pass),
             ARI_SHOW_INDEX(x->ndim, shape));
}

ar_status ari_check_shapes(ar_check_run *run, const ari_comparator *ranks, const ari_cluster_options *o)
{
    const ari_reference *ref = ranks[0].reference;
    ari_step_case c = {.run = o->run, .config = o->config, .forward_only = o->forward_only};
    expecting e = {.ref = ref, .config = o->config};
    ARI_OWNED expected *of = NULL;
    if (o->body || o->module) /* no model */
        return AR_OK;
    c.run.batch = o->batch->batch;
    c.run.seq = o->batch->seq;
    AR_TRY(ARI_ALLOC(&of, ref->count, "shapes of a rank"));
    e.of = of;
    for (int r = 0; r < ar_parallel_world(&o->run.parallel); r++) {
        memset(e.of, 0, ref->count * sizeof *e.of);
        e.last = (ari_operation){0};
        /* A rank without samples has weights all the same. */
        AR_TRY(ari_operations(&c, ARI_OPS_FORWARD, r, visit_weights, &e));
        AR_TRY(ari_operations(&c, ARI_OPS_STEP, r, visit_outputs, &e));
        for (size_t i = 0; i < ref->count; i++) {
            if (e.of[i].is)
                compare_shape(run, ref, i, r, &ranks[r].finding[i], &e.of[i]);
        }
    }
    return AR_OK;
}
