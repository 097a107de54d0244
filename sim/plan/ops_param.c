/* SPDX-License-Identifier: Apache-2.0 */
/* The parameters of a model: what shape each has, and how the plan places it. */
#include "sim/plan/ops_impl.h"

#include "ref/core/size.h"

/* Between the tensor-parallel regions a value is the same on all ranks, or each has its own tokens of it. Of a
 * parameter that meets such a value the gradient is whole on each rank, or a sum over them. */
static ar_placement for_parameters(ar_placement stream)
{
    return stream.kind == AR_SHARD ? (ar_placement){AR_REPLICATE, 0} : ari_whole;
}

/* The plan's linear layer of a weight; NULL: in none. */
static const ar_linear_split *linear_of(const ari_op_builder *w, ari_role role)
{
    switch (role) {
    case ARI_HEAD:
        return &w->outer.head;
    case ARI_QKV:
    case ARI_Q:
    case ARI_Q_B:
    case ARI_K:
    case ARI_V:
    case ARI_KV_B:
        return &w->block.attention.first;
    case ARI_OUT:
        return &w->block.attention.second;
    case ARI_FIRST:
    case ARI_GATE_UP:
    case ARI_GATE:
    case ARI_UP:
    case ARI_EXPERT_GATE:
    case ARI_EXPERT_UP:
        return &w->block.mlp.first;
    case ARI_SHARED_GATE:
    case ARI_SHARED_UP:
        return w->block.mlp.shared_whole ? NULL : &w->block.mlp.first;
    case ARI_DOWN:
    case ARI_EXPERT_DOWN:
        return &w->block.mlp.second;
    case ARI_SHARED_DOWN:
        return w->block.mlp.shared_whole ? NULL : &w->block.mlp.second;
    default:
        return NULL;
    }
}

/* The dimension of the matrix [out, in] that tp cuts; -1: none. */
static int cut_of(const ari_op_builder *w, ari_role role)
{
    static const int of_tokens[] = {[AR_EMBEDDING_VOCAB] = 0, [AR_EMBEDDING_HIDDEN] = 1, [AR_EMBEDDING_WHOLE] = -1};
    const ar_linear_split *l = linear_of(w, role);
    if (w->whole && ari_is_expert_part(role))
        return -1;
    if (role == ARI_SINKS)
        return ari_op_builder_by_heads(w) ? 0 : -1;
    if (role == ARI_TOKENS)
        return of_tokens[w->outer.tokens];
    return !l ? -1 : l->style == AR_STYLE_COLWISE ? 0 : l->style == AR_STYLE_ROWWISE ? 1 : -1;
}

/* The values that a parameter meets which every rank has all of: those that a norm or the positions are applied to,
 * and the sum that a row-parallel layer's bias is added to. A whole matrix has all tokens. */
static ar_placement applied_to(const ari_op_builder *w, ari_role role, bool bias)
{
    const ar_linear_split *l = linear_of(w, role);
    const ar_placement to = l ? ari_op_builder_placed(l->to) : ari_whole;
    switch (role) {
    case ARI_NORM1:
        return ari_op_builder_placed(w->block.norm1);
    case ARI_NORM2:
        return ari_op_builder_placed(w->block.norm2);
    case ARI_FINAL_NORM:
        return ari_op_builder_placed(w->outer.final_norm);
    case ARI_POSITIONS:
    case ARI_ATTENTION_NORM:
    case ARI_MLP_NORM:
    case ARI_TOKENS_NORM:
    case ARI_ENTERED_NORM:
    case ARI_MTP_NORM:
        return ari_op_builder_stream(w);
    case ARI_Q_NORM:
    case ARI_K_NORM: /* of heads, of which each rank has its own */
        return ari_op_builder_by_heads(w) && w->config->qk_norm == AR_QK_NORM_HEAD ? ari_by_features : ari_whole;
    default:
        return bias && cut_of(w, role) == 1 && ari_op_builder_same(to, ari_by_tokens) ? to : ari_whole;
    }
}

bool ari_op_builder_is_norm(ari_role role)
{
    return role == ARI_NORM1 || role == ARI_NORM2 || role == ARI_FINAL_NORM || role == ARI_ATTENTION_NORM ||
           role == ARI_MLP_NORM || role == ARI_Q_NORM || role == ARI_K_NORM || role == ARI_Q_A_NORM ||
           role == ARI_KV_A_NORM || role == ARI_TOKENS_NORM || role == ARI_ENTERED_NORM || role == ARI_MTP_NORM;
}

bool ari_op_by_muon(const ari_step_case *c, ari_role role, bool bias)
{
    const bool other = role == ARI_TOKENS || role == ARI_POSITIONS || role == ARI_HEAD || role == ARI_ROUTER ||
                       role == ARI_ROUTER_BIAS || role == ARI_SHARED_SHARE || role == ARI_SINKS;
    return c->run.optimizer.kind == AR_OPTIMIZER_MUON && !bias && !other && !ari_op_builder_is_norm(role);
}

/* Width of the MLP that a weight belongs to, or of the expert. */
static size_t ffn_of(const ar_config *c, ari_role role)
{
    const bool shared = role == ARI_SHARED_GATE || role == ARI_SHARED_UP || role == ARI_SHARED_DOWN;
    const bool expert = role == ARI_EXPERT_GATE || role == ARI_EXPERT_UP || role == ARI_EXPERT_DOWN;
    return shared ? c->experts.shared : expert ? c->experts.ffn : c->ffn;
}

/* False: no weight of latent attention. */
static bool shape_of_latent(ari_op_builder *w, ari_role role, size_t *out, size_t *in)
{
    const ar_config *c = w->config;
    const ar_latent *l = &c->latent;
    const size_t up = ari_op_builder_add(w, c->head_dim - l->rope_dim, l->value_dim);
    switch (role) {
    case ARI_Q_A:
    case ARI_Q_A_NORM:
        *out = l->q_rank;
        return true;
    case ARI_Q_B:
        *out = ari_op_builder_mul(w, c->heads, c->head_dim);
        *in = l->q_rank;
        return true;
    case ARI_KV_A:
        *out = ari_op_builder_add(w, l->kv_rank, l->rope_dim);
        return true;
    case ARI_KV_A_NORM:
        *out = l->kv_rank;
        return true;
    case ARI_KV_B:
        *out = ari_op_builder_mul(w, c->heads, up);
        *in = l->kv_rank;
        return true;
    default:
        return false;
    }
}

/* [out, in]; of a norm as many as it has features. */
static void shape_of(ari_op_builder *w, ari_op_value *v)
{
    const ar_config *c = w->config;
    const size_t q = ari_op_builder_mul(w, c->heads, c->head_dim), kv = ari_op_builder_mul(w, c->kv_heads, c->head_dim);
    size_t out = c->hidden, in = c->hidden;
    v->ndim = 2;
    if (ari_op_builder_is_norm(v->role) || v->role == ARI_ROUTER_BIAS || v->role == ARI_SINKS)
        v->ndim = 1;
    if ((v->role == ARI_Q_NORM || v->role == ARI_K_NORM) && c->qk_norm == AR_QK_NORM_HEAD)
        out = c->head_dim;
    else if (v->role == ARI_Q_NORM)
        out = q;
    else if (v->role == ARI_K_NORM)
        out = kv;
    else if (shape_of_latent(w, v->role, &out, &in))
        v->ndim = v->role == ARI_Q_A_NORM || v->role == ARI_KV_A_NORM ? 1 : 2;
    else if (v->role == ARI_SINKS)
        out = c->heads;
    else if (v->role == ARI_ROUTER_BIAS)
        out = c->experts.n;
    else if (v->ndim == 1)
        out = c->hidden;
    else if (v->role == ARI_TOKENS || v->role == ARI_HEAD)
        out = c->vocab;
    else if (v->role == ARI_POSITIONS)
        out = c->max_positions;
    else if (v->role == ARI_QKV)
        out = ari_op_builder_add(w, q, ari_op_builder_mul(w, 2, kv));
    else if (v->role == ARI_Q)
        out = q;
    else if (v->role == ARI_K || v->role == ARI_V)
        out = kv;
    else if (v->role == ARI_OUT)
        in = ari_op_builder_mul(w, c->heads, ar_config_value_dim(c));
    else if (v->role == ARI_JOINED)
        in = ari_op_builder_mul(w, 2, c->hidden);
    else if (v->role == ARI_ROUTER)
        out = c->experts.n;
    else if (v->role == ARI_SHARED_SHARE)
        out = 1;
    else if (v->role == ARI_DOWN || v->role == ARI_EXPERT_DOWN || v->role == ARI_SHARED_DOWN)
        in = ffn_of(c, v->role);
    else if (v->role == ARI_GATE_UP)
        out = ari_op_builder_mul(w, 2, c->ffn);
    else
        out = ffn_of(c, v->role);
    v->shape[0] = out;
    v->shape[1] = in;
}

size_t ari_op_builder_copies(const ari_op_builder *w, ari_role role)
{
    return role == ARI_K || role == ARI_V ? ari_op_builder_kv_copies(w, false) : 1;
}

bool ari_op_builder_has_bias(const ari_op_builder *w, ari_role role)
{
    const ar_config *c = w->config;
    if (role == ARI_Q_NORM || role == ARI_K_NORM)
        return false;
    if (ari_op_builder_is_norm(role))
        return c->norm == AR_NORM_LAYER && !c->norm_no_bias;
    switch (role) {
    case ARI_Q:
        return c->qkv_bias && c->latent.kv_rank == 0;
    case ARI_QKV:
    case ARI_K:
    case ARI_V:
    case ARI_Q_A:
    case ARI_KV_A:
        return c->qkv_bias;
    case ARI_OUT:
        return c->out_bias;
    case ARI_FIRST:
    case ARI_GATE_UP:
    case ARI_GATE:
    case ARI_UP:
    case ARI_DOWN:
        return c->mlp_bias;
    case ARI_ROUTER:
    case ARI_EXPERT_GATE:
    case ARI_EXPERT_UP:
    case ARI_EXPERT_DOWN:
        return c->experts.bias;
    default:
        return false;
    }
}

ari_op_value ari_op_builder_param(ari_op_builder *w, ari_role role, bool bias)
{
    const int cut = cut_of(w, role);
    ari_op_value v = {.role = role, .bias = bias, .dtype = AR_F32, .copies = ari_op_builder_copies(w, role)};
    shape_of(w, &v);
    /* Both ends of a pipeline use the table that a tied head shares, or blocks for further tokens. */
    const bool ends = role == ARI_TOKENS && (w->config->tied || w->config->mtp > 0) && w->ranks[ARI_AXIS_PP] > 1;
    v.at[ARI_AXIS_PP] = ends ? (ar_placement){AR_REPLICATE, 0} : ari_whole;
    v.at[ARI_AXIS_TP] =
        cut == 0 || (cut == 1 && !bias) ? (ar_placement){AR_SHARD, cut} : for_parameters(applied_to(w, role, bias));
    if (bias)
        v.ndim = 1;
    if (v.ndim == 2)
        v.dtype = w->form.matrices;
    v.experts = w->in_experts ? w->experts : 0;
    v.expert = w->in_experts ? w->first_expert : 0;
    v.by_expert = ari_is_expert_part(role) ? ari_op_builder_apart(w) : 0;
    ari_op_builder_place(w, &v);
    return v;
}

/* --- Muon --------------------------------------------------------------------------------------------------------- */

static const char muon[] = "muon"; /* tag of its calls */

static ari_op_value block_of(size_t out, size_t in, size_t copies)
{
    ari_op_value v = {.dtype = AR_F32, .ndim = 2, .shape = {out, in}, .local = {out, in}, .copies = copies};
    for (int axis = 0; axis < ARI_PLACED_AXES; axis++)
        v.at[axis] = ari_whole;
    return v;
}

/* One more input: so many blocks [out, in] of the weight, each made orthogonal: Newton-Schulz's three products, five
 * times. */
static void add_blocks(ari_operation *op, size_t blocks, size_t out, size_t in)
{
    const double m = (double)(out < in ? out : in), n = (double)(out < in ? in : out);
    op->input[op->inputs++] = block_of(out, in, blocks);
    op->multiply_adds += (double)blocks * 5.0 * (m * m * n + m * m * m + m * m * n);
}

void ari_op_builder_muon(const ari_op_builder *w, ari_operation *op, const ari_op_value *v)
{
    const ar_config *c = w->config;
    const size_t blocks = v->role == ARI_GATE_UP ? 2 : 1;
    if (v->role != ARI_QKV || c->arch == AR_ARCH_GPT_NEOX) { /* whose heads stand between each other */
        add_blocks(op, blocks, v->shape[0] / blocks, v->shape[1]);
        return;
    }
    add_blocks(op, 1, c->heads * c->head_dim, v->shape[1]);
    add_blocks(op, 2, c->kv_heads * c->head_dim, v->shape[1]);
}

bool ari_op_builder_muon_stays_cut(const ari_op_builder *w, const ari_operation *op, const ari_op_value *v)
{
    const bool by_rows = v->local[0] < v->shape[0];
    bool cut = w->c->run.optimizer.shards && v->copies == 1 && (by_rows || v->local[1] < v->shape[1]);
    for (int i = 1; i < op->inputs; i++)
        cut = cut && (op->input[i].shape[0] > op->input[i].shape[1]) == by_rows;
    return cut;
}

/* A value of the operation of which each rank has a term, and their sum. */
static void add_terms(ari_operation *op, size_t rows, size_t cols)
{
    op->input[op->inputs++] = op->output[op->outputs++] = block_of(rows, cols, 1);
    op->input[0].at[ARI_AXIS_TP] = op->produced_as = (ar_placement){AR_PARTIAL_SUM, 0};
}

static void call_cut(ari_op_builder *w, ari_call_kind kind, size_t n, ar_dtype dtype, const char *tag)
{
    ari_op_builder_call(w, kind, ARI_OVER_TP, n, dtype, ARI_EACH_STEP, ARI_NO_ROLE, tag);
}

static void sum_norm(ari_op_builder *w, ari_role role, size_t n, ar_dtype dtype)
{
    add_terms(ari_op_builder_begin(w, ARI_OPERATION_MATRIX_PRODUCT, role), 1, n);
    call_cut(w, ARI_CALL_ALL_REDUCE, n, dtype, muon);
    ari_op_builder_visit(w);
}

void ari_op_builder_muon_cut(ari_op_builder *w, ari_role role, size_t m, size_t n)
{
    const size_t square = ari_op_builder_mul(w, m, m), own = n / w->ranks[ARI_AXIS_TP];
    sum_norm(w, role, 1, AR_I32);
    sum_norm(w, role, 2, AR_I64);
    for (int i = 0; i < 5; i++) {
        ari_operation *op = ari_op_builder_begin(w, ARI_OPERATION_MATRIX_PRODUCT, role);
        add_terms(op, m, m);
        add_blocks(op, 1, m, n);
        op->input[1].at[ARI_AXIS_TP] = (ar_placement){AR_SHARD, 1};
        op->input[1].local[1] = own;
        op->multiply_adds = (double)square * (2.0 * (double)own + (double)m);
        if (w->form.exact) {
            call_cut(w, ARI_CALL_ALL_REDUCE, m, AR_I32, muon);
            call_cut(w, ARI_CALL_ALL_REDUCE, m, AR_I32, muon);
            ari_op_builder_scatter_sums(w, ARI_OVER_TP, square, n, ari_op_builder_is_narrow(w, n), ARI_NO_ROLE, muon);
            call_cut(w, ARI_CALL_ALL_GATHER, square, AR_F32, "rounded sums");
            call_cut(w, ARI_CALL_ALL_REDUCE, m, AR_I32, muon);
        } else {
            call_cut(w, ARI_CALL_ALL_REDUCE, square, AR_F32, muon);
        }
        ari_op_builder_visit(w);
    }
}
