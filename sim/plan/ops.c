/* SPDX-License-Identifier: Apache-2.0 */
/* The walk: its arithmetic, visits and collectives, the values of a model and how they are placed. */
#include "sim/plan/ops_impl.h"

#include "ref/core/size.h"

const char *ari_operation_name(ari_operation_kind k)
{
    static const char *const names[] = {
#define ARI_OPERATION_NAME(name, text) text,
        ARI_OPERATION_TABLE(ARI_OPERATION_NAME)
#undef ARI_OPERATION_NAME
    };
    return (unsigned)k < ARI_OPERATION_KINDS ? names[k] : "?";
}

const char *ari_call_name(ari_call_kind k)
{
    static const char *const names[] = {[ARI_CALL_ALL_REDUCE] = "all_reduce",
                                        [ARI_CALL_REDUCE_SCATTER] = "reduce_scatter",
                                        [ARI_CALL_ALL_GATHER] = "all_gather",
                                        [ARI_CALL_BROADCAST] = "broadcast",
                                        [ARI_CALL_ALL_TO_ALL] = "all_to_all",
                                        [ARI_CALL_EXCHANGE] = "exchange",
                                        [ARI_CALL_SEND] = "send",
                                        [ARI_CALL_RECV] = "recv"};
    return (unsigned)k < sizeof names / sizeof *names ? names[k] : "?";
}

bool ari_call_group_has(ari_over g, int axis)
{
    return ari_over_axes(g) >> axis & 1;
}

const char *ari_call_queue_name(ari_call_queue q)
{
    static const char *const names[ARI_CALL_QUEUES] = {[ARI_ON_MAIN] = "main",
                                                       [ARI_ON_BUCKETS] = "buckets",
                                                       [ARI_ON_TP] = "tp",
                                                       [ARI_ON_WEIGHTS] = "weights",
                                                       [ARI_ON_SEND_ACTIVATION] = "send activations",
                                                       [ARI_ON_RECV_ACTIVATION] = "recv activations",
                                                       [ARI_ON_SEND_GRADIENT] = "send gradients",
                                                       [ARI_ON_RECV_GRADIENT] = "recv gradients"};
    return (unsigned)q < sizeof names / sizeof *names ? names[q] : "?";
}

size_t ari_axis_ranks(const ar_parallel *p, int axis)
{
    return (size_t)ari_extent(p, 1u << axis);
}

const char *ari_operation_pass_name(ari_operation_pass p)
{
    static const char *const names[] = {[ARI_PASS_START] = "start",
                                        [ARI_PASS_FORWARD] = "forward",
                                        [ARI_PASS_BACKWARD] = "backward",
                                        [ARI_PASS_STEP] = "step"};
    return (unsigned)p < sizeof names / sizeof *names ? names[p] : "?";
}

/* --- arithmetic, visits ------------------------------------------------------------------------------------------- */

size_t ari_walk_mul(ari_walk *w, size_t a, size_t b)
{
    size_t product = 0;
    if (w->st == AR_OK)
        w->st = ari_mul_size(&product, a, b);
    return w->st == AR_OK ? product : 0;
}

size_t ari_walk_add(ari_walk *w, size_t a, size_t b)
{
    size_t sum = 0;
    if (w->st == AR_OK)
        w->st = ari_add_size(&sum, a, b);
    return w->st == AR_OK ? sum : 0;
}

ari_operation *ari_walk_begin(ari_walk *w, ari_operation_kind kind, ari_role role)
{
    w->op = (ari_operation){.kind = kind,
                            .pass = w->recomputed ? ARI_PASS_BACKWARD : w->pass,
                            .layer = w->layer,
                            .stage = w->stage,
                            .part = w->part,
                            .micro = w->micro,
                            .absent = w->absent,
                            .times = w->times,
                            .role = role,
                            .again = w->again,
                            .stays = w->stays,
                            .recomputed = w->recomputed,
                            .within = w->within,
                            .made = ari_walk_stream(w)};
    return &w->op;
}

/* Of a backward pass in two the one leaves out what the other has; without samples there is what is shared out alone. */
void ari_walk_visit(ari_walk *w)
{
    const bool other = w->part == AR_PP_BACKWARD_INPUT    ? w->puts_off
                       : w->part == AR_PP_BACKWARD_WEIGHT ? !w->puts_off
                                                          : false;
    if (w->st == AR_OK && !other && (w->unit || !w->absent))
        w->st = w->visit(w->user, &w->op);
}

size_t ari_walk_cp(const ari_walk *w)
{
    return w->ranks[ARI_AXIS_RING] * w->ranks[ARI_AXIS_INNER];
}

size_t ari_walk_ranks(const ari_walk *w, ari_over over)
{
    size_t ranks = 1;
    if (over == ARI_OVER_COPIES)
        return ari_walk_kv_copies(w, true);
    if (over == ARI_OVER_SHARD)
        return w->sharing;
    if (over == ARI_OVER_REPLICATE)
        return w->summing / w->sharing;
    if (over == ARI_OVER_ENDS)
        return w->ranks[ARI_AXIS_PP] > 1 ? 2 : 1;
    for (int axis = 0; axis < ARI_PLACED_AXES; axis++)
        ranks *= ari_call_group_has(over, axis) ? w->ranks[axis] : 1;
    return ranks;
}

void ari_walk_call(ari_walk *w, ari_call_kind kind, ari_over over, size_t elements, ar_dtype dtype,
                   ari_call_often often, ari_role role, const char *tag)
{
    const bool message = kind == ARI_CALL_SEND || kind == ARI_CALL_RECV;
    const size_t ranks = message ? 2 : ari_walk_ranks(w, over);
    const bool passed = w->passed[w->pass == ARI_PASS_BACKWARD][w->stage];
    const bool remade = often == ARI_EACH_VERSION && ari_walk_zero(w) == 3 && w->layer != ARI_NO_LAYER;
    const bool known = often == ARI_EACH_VERSION && !remade && (w->recomputed || passed);
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
                                                  .repeats = 1,
                                                  .role = role,
                                                  .tag = tag};
}

size_t ari_walk_positions(const ari_walk *w)
{
    return w->c->run.seq / ari_walk_cp(w) / w->ranks[ARI_AXIS_TP];
}

/* K chunks of n positions are of ceil(n/K), and fewer than K where that many are enough. */
void ari_walk_beside(ari_walk *w, bool cut)
{
    const size_t n = ari_walk_positions(w), k = (size_t)w->c->run.parallel.overlap;
    if (w->op.calls == 0 || !w->overlaps)
        return;
    ari_op_call *call = &w->op.call[w->op.calls - 1];
    call->queue = ARI_ON_TP;
    call->chunk = cut ? call->elements / n * ((n + k - 1) / k) : call->elements;
}

void ari_walk_repeat(ari_walk *w, size_t times)
{
    if (w->op.calls > 0)
        w->op.call[w->op.calls - 1].repeats = times;
}

bool ari_step_recomputes(const ari_step_case *c, size_t layer)
{
    const ar_recomputation *r = &c->run.parallel.recompute;
    return r->what != AR_RECOMPUTE_NONE && layer != ARI_NO_LAYER && layer % (size_t)ari_at_least_one(r->every) == 0;
}

double ari_op_elements(const ari_op_value *v)
{
    double n = 1.0;
    for (int d = 0; d < v->ndim; d++)
        n *= (double)v->local[d];
    return n;
}

size_t ari_call_chunks(const ari_op_call *call)
{
    return call->chunk > 0 ? (call->elements - 1) / call->chunk + 1 : 1;
}

size_t ari_call_chunk(const ari_op_call *call, size_t i)
{
    const size_t before = i * call->chunk;
    return call->elements - before < call->chunk ? call->elements - before : call->chunk;
}

ar_status ari_call_bytes(size_t *bytes, const ari_op_call *call)
{
    const size_t others = call->ranks - 1, passed[] = {[ARI_CALL_ALL_REDUCE] = 2 * others,
                                                       [ARI_CALL_REDUCE_SCATTER] = others,
                                                       [ARI_CALL_ALL_GATHER] = others,
                                                       [ARI_CALL_BROADCAST] = others,
                                                       [ARI_CALL_ALL_TO_ALL] = 1,
                                                       [ARI_CALL_EXCHANGE] = call->ranks,
                                                       [ARI_CALL_SEND] = 1,
                                                       [ARI_CALL_RECV] = 0};
    size_t product = 0;
    AR_TRY(ari_mul_size(&product, call->elements, ar_dtype_bytes(call->dtype)));
    AR_TRY(ari_mul_size(&product, product, call->repeats));
    return ari_mul_size(bytes, product, passed[call->kind]);
}

/* --- values ------------------------------------------------------------------------------------------------------- */

const ar_placement ari_whole = {AR_INVARIANT, 0}, ari_by_tokens = {AR_SHARD, 1}, ari_by_features = {AR_SHARD, 2};

ar_placement ari_walk_placed(ar_placement p)
{
    if (p.kind == AR_SHARD && p.dim < 0)
        p.dim += 3;
    return p.kind == AR_REPLICATE ? ari_whole : p;
}

bool ari_walk_same(ar_placement a, ar_placement b)
{
    return a.kind == b.kind && (a.kind != AR_SHARD || a.dim == b.dim);
}

ar_placement ari_walk_stream(const ari_walk *w)
{
    return w->sp ? ari_by_tokens : ari_whole;
}

enum { POSITIONS = 1 }; /* the dimension of an activation of which nobody has copies */

/* Samples are cut as ar_parallel_rows cuts them, everything else by ar_split_uneven. */
void ari_walk_place(const ari_walk *w, ari_op_value *v)
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
            ar_split_uneven(v->shape[d], (int)(parts / copies), (int)(part / copies), &start, &v->local[d]);
    }
    if (v->at[ARI_AXIS_DP].kind == AR_SHARD)
        v->local[0] = w->own;
}

ari_op_value ari_walk_activation(ari_walk *w, size_t features, ar_placement tp, size_t copies)
{
    ari_op_value v = {.dtype = w->activations,
                      .ndim = 3,
                      .shape = {w->all, w->c->run.seq, features},
                      .at = {[ARI_AXIS_PP] = ari_whole,
                             [ARI_AXIS_DP] = {AR_SHARD, 0},
                             [ARI_AXIS_RING] = ari_by_tokens,
                             [ARI_AXIS_INNER] = ari_by_tokens,
                             [ARI_AXIS_TP] = tp},
                      .copies = copies};
    ari_walk_place(w, &v);
    return v;
}

/* Between the tensor-parallel regions a value is the same on all ranks, or each has its own tokens of it. Of a
 * parameter that meets such a value the gradient is whole on each rank, or a sum over them. */
static ar_placement beside(ar_placement stream)
{
    return stream.kind == AR_SHARD ? (ar_placement){AR_REPLICATE, 0} : ari_whole;
}

/* What the plan has for the linear layer of a weight; NULL: it is in none. */
static const ar_linear_split *linear_of(const ari_walk *w, ari_role role)
{
    switch (role) {
    case ARI_HEAD:
        return &w->outer.head;
    case ARI_QKV:
    case ARI_Q:
    case ARI_K:
    case ARI_V:
        return &w->block.attention.first;
    case ARI_OUT:
        return &w->block.attention.second;
    case ARI_FIRST:
    case ARI_GATE_UP:
    case ARI_GATE:
    case ARI_UP:
        return &w->block.mlp.first;
    case ARI_DOWN:
        return &w->block.mlp.second;
    default:
        return NULL;
    }
}

/* The dimension of the matrix [out, in] that tp cuts; -1: none. */
static int cut_of(const ari_walk *w, ari_role role)
{
    static const int of_tokens[] = {[AR_EMBEDDING_VOCAB] = 0, [AR_EMBEDDING_HIDDEN] = 1, [AR_EMBEDDING_WHOLE] = -1};
    const ar_linear_split *l = linear_of(w, role);
    if (role == ARI_TOKENS)
        return of_tokens[w->outer.tokens];
    return !l ? -1 : l->style == AR_STYLE_COLWISE ? 0 : l->style == AR_STYLE_ROWWISE ? 1 : -1;
}

/* The values that a parameter meets which every rank has all of: those that a norm or the positions are applied to,
 * and the sum that a row-parallel layer's bias is added to. A whole matrix has all tokens. */
static ar_placement met_by(const ari_walk *w, ari_role role, bool bias)
{
    const ar_linear_split *l = linear_of(w, role);
    const ar_placement to = l ? ari_walk_placed(l->to) : ari_whole;
    switch (role) {
    case ARI_NORM1:
        return ari_walk_placed(w->block.norm1);
    case ARI_NORM2:
        return ari_walk_placed(w->block.norm2);
    case ARI_FINAL_NORM:
        return ari_walk_placed(w->outer.final_norm);
    case ARI_POSITIONS:
    case ARI_ATTENTION_NORM:
    case ARI_MLP_NORM:
        return ari_walk_stream(w);
    case ARI_Q_NORM:
    case ARI_K_NORM: /* of heads, of which each rank has its own */
        return ari_walk_by_heads(w) && w->config->qk_norm == AR_QK_NORM_HEAD ? ari_by_features : ari_whole;
    default:
        return bias && cut_of(w, role) == 1 && ari_walk_same(to, ari_by_tokens) ? to : ari_whole;
    }
}

bool ari_walk_is_norm(ari_role role)
{
    return role == ARI_NORM1 || role == ARI_NORM2 || role == ARI_FINAL_NORM || role == ARI_ATTENTION_NORM ||
           role == ARI_MLP_NORM || role == ARI_Q_NORM || role == ARI_K_NORM;
}

/* [out, in]; of a norm as many as it has features. */
static void shape_of(ari_walk *w, ari_op_value *v)
{
    const ar_config *c = w->config;
    const size_t q = ari_walk_mul(w, c->heads, c->head_dim), kv = ari_walk_mul(w, c->kv_heads, c->head_dim);
    size_t out = c->hidden, in = c->hidden;
    v->ndim = 2;
    if (ari_walk_is_norm(v->role))
        v->ndim = 1;
    if ((v->role == ARI_Q_NORM || v->role == ARI_K_NORM) && c->qk_norm == AR_QK_NORM_HEAD)
        out = c->head_dim;
    else if (v->role == ARI_Q_NORM)
        out = q;
    else if (v->role == ARI_K_NORM)
        out = kv;
    else if (v->ndim == 1)
        out = c->hidden;
    else if (v->role == ARI_TOKENS || v->role == ARI_HEAD)
        out = c->vocab;
    else if (v->role == ARI_POSITIONS)
        out = c->max_positions;
    else if (v->role == ARI_QKV)
        out = ari_walk_add(w, q, ari_walk_mul(w, 2, kv));
    else if (v->role == ARI_Q)
        out = q;
    else if (v->role == ARI_K || v->role == ARI_V)
        out = kv;
    else if (v->role == ARI_OUT)
        in = q;
    else if (v->role == ARI_DOWN)
        in = c->ffn;
    else if (v->role == ARI_GATE_UP)
        out = ari_walk_mul(w, 2, c->ffn);
    else
        out = c->ffn;
    v->shape[0] = out;
    v->shape[1] = in;
}

bool ari_walk_by_heads(const ari_walk *w)
{
    return ari_walk_same(ari_walk_placed(w->block.attention.first.to), ari_by_features);
}

size_t ari_walk_kv_copies(const ari_walk *w, bool heads)
{
    const size_t ranks = (ari_walk_by_heads(w) ? w->ranks[ARI_AXIS_TP] : 1) * (heads ? w->ranks[ARI_AXIS_INNER] : 1),
                 kv = w->config->kv_heads;
    return kv > 0 && ranks > kv ? ranks / kv : 1;
}

size_t ari_walk_copies(const ari_walk *w, ari_role role)
{
    return role == ARI_K || role == ARI_V ? ari_walk_kv_copies(w, false) : 1;
}

bool ari_walk_has_bias(const ari_walk *w, ari_role role)
{
    const ar_config *c = w->config;
    if (role == ARI_Q_NORM || role == ARI_K_NORM)
        return false;
    if (ari_walk_is_norm(role))
        return c->norm == AR_NORM_LAYER;
    switch (role) {
    case ARI_QKV:
    case ARI_Q:
    case ARI_K:
    case ARI_V:
        return c->qkv_bias;
    case ARI_OUT:
        return c->out_bias;
    case ARI_FIRST:
    case ARI_GATE_UP:
    case ARI_GATE:
    case ARI_UP:
    case ARI_DOWN:
        return c->mlp_bias;
    default:
        return false;
    }
}

ari_op_value ari_walk_param(ari_walk *w, ari_role role, bool bias)
{
    const int cut = cut_of(w, role);
    ari_op_value v = {.role = role, .bias = bias, .dtype = AR_F32, .copies = ari_walk_copies(w, role)};
    shape_of(w, &v);
    /* Both ends of a pipeline use the table that a tied head shares. */
    const bool ends = role == ARI_TOKENS && w->config->tied && w->ranks[ARI_AXIS_PP] > 1;
    v.at[ARI_AXIS_PP] = ends ? (ar_placement){AR_REPLICATE, 0} : ari_whole;
    v.at[ARI_AXIS_TP] = cut == 0 || (cut == 1 && !bias) ? (ar_placement){AR_SHARD, cut} : beside(met_by(w, role, bias));
    if (bias)
        v.ndim = 1;
    if (v.ndim == 2)
        v.dtype = w->matrices;
    ari_walk_place(w, &v);
    return v;
}

ar_placement ari_gradient_of(ar_placement p)
{
    ar_placement g = p;
    const ar_status st = ar_placement_gradient(&g, p);
    (void)st; /* no value of the list is a maximum */
    return g;
}
