/* SPDX-License-Identifier: Apache-2.0 */
/* Elements times bytes times calls times ranks of every collective of a run, in the order in which a model's parameters
 * are registered: the ends, then block by block, then what a step moves besides the passes. */
#include "verify/bytes/bytes.h"

#include <stdlib.h>
#include <string.h>

#include "ref/core/context_private.h"
#include "ref/core/size.h"
#include "ref/core/tensor_private.h"
#include "ref/models/parallel_private.h"
#include "ref/models/plan_private.h"
#include "ref/placement/context_private.h"
#include "ref/placement/parallel_private.h"

/* A product of sizes that does not overflow. */
__extension__ typedef unsigned __int128 wide;
#define ANY ((wide)1 << 100) /* any number of values */

/* How a value lies on the tensor-parallel ranks; SUM: each has a term. */
typedef enum spread { WHOLE, BY_TOKENS, BY_FEATURES, SUM } spread;

/* Properties of a parameter. Those that have the first of these in common, down to UNEVEN, share buckets. */
enum {
    OF_EXPERTS = 1, /* one of each for every expert; summed over the ranks with copies of these */
    AT_ENDS = 2,    /* on both ends of a pipeline */
    SPREAD = 4,     /* each tp rank has a term, of its own tokens */
    MATRIX = 8,     /* updated by Muon */
    TABLE = 16,     /* of tokens or positions: in bf16 their sums have more bytes an element than others */
    NARROW = 32,    /* stored in bf16 */
    UNEVEN = 64,    /* tp ranks have different numbers of elements */
    KINDS = 128,
    FROZEN = 128, /* no gradient */
    BY_TOKEN = 256,
    HEAD = 512 /* logits, whose gradients have 25 bits in bf16 too */
};

/* Weights [outputs, inputs] that share an input: the linear layer Y = X W^T. */
typedef struct linear {
    wide inputs, outputs[3];
    wide copies;     /* tp ranks that hold the same part of the second and third weight: KV heads; else 1 */
    ar_style style;  /* column-parallel, row-parallel, else whole */
    spread from, to; /* X as it arrives, Y as it is wanted */
    bool packed, bias;
    unsigned flags, bias_flags;
} linear;

typedef struct parameter {
    wide unit, order[2]; /* of ZeRO-2; the order of packing is by the first number, then the second */
    wide most, all;      /* elements of the tp rank that has most; of all tp ranks together */
    unsigned flags;
    bool vector;
} parameter;

typedef struct prediction {
    const ari_bytes_case *c;
    const ar_config *config;
    const ar_parallel *layout;
    ar_outer_split outer;
    wide tp, dp, cp, ring, inner, pp, ep, stages;
    wide summing[2], shards[2];          /* ranks that sum gradients, that share them out (ZeRO); [1] of experts */
    wide tokens;                         /* of a step, at the positions of one cp rank */
    wide element, matrix;                /* bytes of one of an activation, of a matrix */
    wide steps, forwards, back;          /* passes of a step; forwards: 2 where the first counts routes */
    wide full, attention;                /* passes again of the block, of its attention up to the last layer */
    wide micro, all_micro, versions;     /* micro-batches of the first dp rank, of all; exchanges of exponents */
    bool exact, sp, head, whole_experts; /* whole: not cut over tp */
    bool apart, first, last;             /* experts have groups of their own; the rank is a pipeline's first, last */
    int zero;                            /* 1 where one rank has all shares */
    wide moved, moved_by_ep, moved_by_copies; /* bytes; of all ranks instead of groups over ep, over copies */
    wide routed_row, routed_linears;          /* bytes of an expert's row in so many linear layers */
    parameter *parameters;                    /* of a pipeline rank, in the order of registration */
    size_t n, capacity, frozen, unit;
    ar_status st;
} prediction;

typedef enum collective { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL } collective;

static void add(wide *sum, collective kind, wide ranks, wide calls, wide elements, wide width)
{
    const wide times = kind == ALL_TO_ALL ? 1 : kind == ALL_REDUCE ? 2 * (ranks - 1) : ranks - 1;
    *sum += times * calls * elements * width;
}

/* --- linear layers (Shoeybi et al. 2019, arXiv:1909.08053; by tokens Korthikanti et al. 2022, arXiv:2205.05198) ------ */

/* In passes there is a tp group for each cp rank, and a call's elements are those of all dp ranks. */
static void over_tp(prediction *p, collective kind, wide passes, wide elements, wide width)
{
    add(&p->moved, kind, p->tp, p->cp * p->steps * passes, elements, width);
}

/* A shard is gathered, a sum is reduced; a rank's own part of the whole costs nothing. */
static void redistribute(prediction *p, wide passes, spread from, spread to, wide features)
{
    if (from != to && from != WHOLE)
        over_tp(p, from == SUM ? ALL_REDUCE : ALL_GATHER, passes, p->tokens * features, p->element);
}

/* The gradient of a partial sum is whole, as that of a whole value is. */
static spread gradient_of(spread s)
{
    return s == SUM ? WHOLE : s;
}

/* A redistribution, and backward its transpose. */
static void change(prediction *p, wide passes, spread from, spread to)
{
    redistribute(p, passes, from, to, p->config->hidden);
    redistribute(p, p->back, gradient_of(to), gradient_of(from), p->config->hidden);
}

static spread spread_of(ar_placement s)
{
    if (s.kind == AR_SHARD)
        return s.dim == 2 || s.dim == -1 ? BY_FEATURES : BY_TOKENS;
    return s.kind == AR_PARTIAL_SUM ? SUM : WHOLE;
}

static spread stream(const prediction *p)
{
    return p->sp ? BY_TOKENS : WHOLE;
}

static linear linear_of(const ar_linear_split *s, wide inputs, wide outputs, bool bias, unsigned flags)
{
    const bool spread_bias = s->style == AR_STYLE_ROWWISE && spread_of(s->to) == BY_TOKENS;
    return (linear){.inputs = inputs,
                    .outputs = {outputs},
                    .copies = 1,
                    .style = s->style,
                    .from = spread_of(s->from),
                    .to = spread_of(s->to),
                    .bias = bias,
                    .flags = flags,
                    .bias_flags = (flags & OF_EXPERTS) + (spread_bias ? SPREAD : 0u)};
}

/* int64 of an exact sum (numerics.md, section 2): narrow terms have few enough bits for one. */
static wide limbs(wide terms, bool narrow)
{
    return narrow || terms <= 8191 ? 1 : 2;
}

/* Sums [rows, features] of terms on all ranks. Exact: the exponents of the rows of X, the integers, the rounded values
 * unless each rank keeps its own tokens. */
static void fold(prediction *p, wide passes, wide rows, wide features, wide integers, spread to)
{
    const wide n = rows * features;
    if (!p->exact) {
        over_tp(p, to == BY_TOKENS ? REDUCE_SCATTER : ALL_REDUCE, passes, n, p->element);
        return;
    }
    over_tp(p, ALL_REDUCE, passes, rows, sizeof(int32_t));
    over_tp(p, REDUCE_SCATTER, passes, n * integers, sizeof(int64_t));
    over_tp(p, ALL_GATHER, passes, to == BY_TOKENS ? 0 : n, p->element);
}

/* Exact numerics (numerics.md, section 3): the gradient of a weight is one sum over each part of a sample, so one of the
 * cp ranks gets the others' rows of dY, of X and of X's exponents. Ranks with copies of an expert first tell each other
 * how many rows each has. */
static void share_rows(prediction *p, const linear *l, wide passes, bool cut_x, bool cut_y)
{
    const wide cut = l->outputs[0] + l->copies * (l->outputs[1] + l->outputs[2]);
    const wide y = cut_y ? cut : p->tp * (l->outputs[0] + l->outputs[1] + l->outputs[2]);
    const wide row = p->tp * sizeof(float) + ((cut_x ? 1 : p->tp) * l->inputs + y) * p->element; /* of all tp ranks */
    const wide copies = p->apart ? (wide)ari_expert_sequence(p->layout) : p->cp, batch = p->c->run.batch;
    size_t parts = 0;
    if (p->exact && !(l->flags & OF_EXPERTS) && p->cp > 1)
        p->moved += p->steps * passes * batch * ari_gradient_moves(p->layout, p->c->run.seq, &parts) * row;
    if (!p->exact || !(l->flags & OF_EXPERTS) || copies == 1)
        return;
    const wide rows = p->tokens / (p->whole_experts ? p->tp : 1) * p->config->experts.per_token;
    const wide counts = batch * (p->config->experts.n / p->ep) * copies;
    add(&p->moved_by_copies, ALL_GATHER, copies, p->cp * p->tp * p->steps * passes, counts, sizeof(int64_t));
    p->moved_by_copies += p->c->routed ? 0 : p->cp * p->steps * passes * rows * (copies - 1) * row;
    p->routed_row += p->back * row / p->tp;
    p->routed_linears += p->back;
}

/* Y = X W^T, dX = dY W and dW = dY^T X. input_again: recomputation ends with the input. A gathered input is not kept for
 * dW unless asked for. Exact numerics exchange the exponents of a weight that is summed over, once a version of it. */
static void pass_through(prediction *p, const linear *l, wide forwards, wide back, wide input_again)
{
    const wide outputs = l->outputs[0] + l->outputs[1] + l->outputs[2];
    const bool experts = l->flags & OF_EXPERTS, local = experts && p->whole_experts;
    const bool rows_cut = !local && l->style == AR_STYLE_COLWISE, columns_cut = !local && l->style == AR_STYLE_ROWWISE;
    const spread x = local ? l->from : columns_cut ? BY_FEATURES : WHOLE;
    const spread y = local ? l->from : rows_cut ? BY_FEATURES : columns_cut ? SUM : WHOLE;
    const spread dx = gradient_of(l->from), sum = l->to == BY_FEATURES ? WHOLE : l->to;
    const bool again = !columns_cut && (l->from == BY_TOKENS || l->from == BY_FEATURES) && !p->layout->keep_gathered;
    const wide rows = p->tokens * (experts ? p->config->experts.per_token : 1);
    const bool narrow = p->element < sizeof(float), folds = columns_cut && sum != SUM;
    redistribute(p, forwards + (again ? back : input_again), l->from, x, l->inputs);
    redistribute(p, back, gradient_of(l->to), gradient_of(y), outputs);
    if (folds)
        fold(p, forwards, rows, outputs, limbs(l->inputs, narrow), sum);
    else if (!columns_cut)
        redistribute(p, forwards, y, l->to, outputs);
    if (rows_cut)
        fold(p, back, rows, l->inputs, limbs(outputs, narrow && !(l->flags & HEAD)), dx == BY_FEATURES ? WHOLE : dx);
    if (columns_cut)
        redistribute(p, back, BY_FEATURES, dx, l->inputs);
    if (columns_cut && p->exact)
        over_tp(p, ALL_REDUCE, back, rows, sizeof(int32_t)); /* exponents of X for dW */
    share_rows(p, l, back, x == BY_FEATURES, y == BY_FEATURES);
    if (!p->exact || !(rows_cut || columns_cut))
        return;
    const bool renewed = p->zero == 3 && !(l->flags & HEAD); /* gathered anew in every pass of every micro-batch */
    const wide times = renewed ? p->steps * p->all_micro * ((rows_cut || folds ? forwards : 0) + back)
                               : p->versions * ((rows_cut || folds ? 1u : 0u) + (back > 0 ? 1u : 0u));
    add(&p->moved, ALL_REDUCE, p->tp, p->cp * times * (experts ? p->config->experts.n / p->ep : 1),
        rows_cut ? l->inputs : outputs, sizeof(int32_t));
}

/* --- parameters ------------------------------------------------------------------------------------------------------- */

/* [rows, cols], or a vector (cols 0), cut over tp along a dimension (-1: none), and its broadcast at the start. */
static void add_parameter(prediction *p, wide rows, wide cols, int cut, wide copies, unsigned flags)
{
    const wide parts = cut < 0 ? 1 : p->tp / copies, along = cut == 1 ? cols : rows, width = cols > 0 ? p->matrix : 4;
    const wide most = (along + parts - 1) / parts * (cut == 1 ? rows : cols > 0 ? cols : 1);
    const wide all = rows * (cols > 0 ? cols : 1) * (p->tp / parts), i = p->n;
    const bool by_size = p->c->run.ddp.order == AR_BUCKETS_BY_SIZE, frozen = flags & FROZEN;
    flags &= ~(p->apart ? 0u : OF_EXPERTS) & ~(p->tp > 1 ? 0u : SPREAD) &
             ~(p->c->run.optimizer.kind == AR_OPTIMIZER_MUON ? 0u : MATRIX) & ~(width < 4 ? 0u : TABLE);
    flags |= (width < 4 ? NARROW : 0u) | (along % parts > 0 ? UNEVEN : 0u);
    const wide ranks = p->summing[flags & OF_EXPERTS];
    add(&p->moved, ALL_GATHER, ranks, 1, all * p->cp * p->dp / ranks, width);
    p->frozen += frozen;
    if (p->n == p->capacity && !frozen && p->st == AR_OK) {
        parameter *larger = realloc(p->parameters, 2 * (p->n + 32) * sizeof *larger);
        p->st = larger ? AR_OK : ar_error_set(AR_ERR_MEMORY, "no memory for %zu parameters", p->n);
        p->capacity = larger ? 2 * (p->n + 32) : p->capacity;
        p->parameters = larger ? larger : p->parameters;
    }
    if (!frozen && p->st == AR_OK)
        p->parameters[p->n++] = (parameter){.unit = p->zero >= 2 ? p->unit : 0,
                                            .order = {by_size ? ANY - most : 0, by_size ? i : ANY - i},
                                            .most = most,
                                            .all = all,
                                            .flags = flags,
                                            .vector = cols == 0};
}

static void add_norm(prediction *p, wide features, spread input)
{
    const bool bias = p->config->norm == AR_NORM_LAYER && !p->config->norm_no_bias;
    for (int i = 0; i <= bias; i++)
        add_parameter(p, features, 0, -1, 1, input == BY_TOKENS ? SPREAD : 0);
}

/* Over each tp group of a pipeline rank, or over each of its dp groups, in a step. */
static void tp_step(prediction *p, collective kind, wide elements, wide width)
{
    add(&p->moved, kind, p->tp, p->steps * p->cp * p->dp, elements, width);
}

static void dp_step(prediction *p, collective kind, wide elements, wide width)
{
    add(&p->moved, kind, p->summing[0], p->steps * p->tp, elements, width);
}

/* Muon (Jordan et al. 2024) needs whole matrices: ranks lay their parts into zeros and add them. On request matrices whose
 * longer side is cut stay so: their norms, and five times the terms of X X^T and exponents of rows, are summed. */
static void update_matrix(prediction *p, const wide *block, int blocks, wide cols, int cut, wide copies, bool experts)
{
    const bool is_cut = cut >= 0 && p->tp > copies;
    const wide ranks = p->shards[experts];
    bool stays = p->c->run.optimizer.shards && copies == 1 && is_cut;
    wide rows = 0;
    for (int i = 0; i < blocks; i++) {
        rows += block[i];
        stays = stays && (block[i] > cols) == (cut == 0);
    }
    const wide n = rows * cols / (stays ? p->tp : 1);
    tp_step(p, ALL_REDUCE, is_cut && !stays ? n : 0, sizeof(int32_t));
    if (p->layout->zero > 0)
        add(&p->moved, ALL_REDUCE, ranks, p->steps * p->tp * p->cp * p->dp / ranks, n, sizeof(int32_t));
    for (int i = 0; stays && i < blocks; i++) {
        const wide longer = block[i] > cols ? block[i] : cols, m = block[i] + cols - longer;
        const bool narrow = p->element < sizeof(float) && longer <= 16384;
        tp_step(p, ALL_REDUCE, 1, sizeof(int32_t) + 2 * sizeof(int64_t));
        tp_step(p, ALL_REDUCE, 5 * (p->exact ? 3 * m : m * m), 4);
        tp_step(p, REDUCE_SCATTER, p->exact ? 5 * m * m * limbs(longer, narrow) : 0, sizeof(int64_t));
        tp_step(p, ALL_GATHER, p->exact ? 5 * m * m : 0, sizeof(float));
    }
}

static void add_weights(prediction *p, const linear *l)
{
    const int cut = l->style == AR_STYLE_COLWISE ? 0 : l->style == AR_STYLE_ROWWISE ? 1 : -1;
    const bool updates = p->c->run.optimizer.kind == AR_OPTIMIZER_MUON && p->c->run.steps > 0 && p->back > 0;
    const bool interleaved = p->config->arch == AR_ARCH_GPT_NEOX; /* q, k and v of each head in turn: one matrix */
    const int weights = l->outputs[2] > 0 ? 3 : l->outputs[1] > 0 ? 2 : 1;
    for (int i = 0; i < (l->packed ? 1 : weights); i++) {
        const wide copies = i > 0 ? l->copies : 1;
        const wide rows = l->packed ? l->outputs[0] + l->outputs[1] + l->outputs[2] : l->outputs[i];
        add_parameter(p, rows, l->inputs, cut, copies, l->flags);
        if (l->bias)
            add_parameter(p, rows, 0, cut == 0 ? 0 : -1, copies, l->bias_flags);
        if (updates && l->flags & MATRIX)
            update_matrix(p, l->packed && !interleaved ? l->outputs : &rows, l->packed && !interleaved ? weights : 1,
                          l->inputs, cut, copies, p->apart && l->flags & OF_EXPERTS);
    }
}

static void add_linear(prediction *p, const linear *l, wide forwards, wide input_again)
{
    pass_through(p, l, forwards, p->back, input_again);
    add_weights(p, l);
}

/* --- attention: heads for positions among neighbours (Jacobs et al. 2023, arXiv:2309.14509), keys and values round a ring
 *     (Liu et al. 2023, arXiv:2310.01889) ----------------------------------------------------------------------------- */

/* A sum of gradients that `ranks` have terms of, in so many groups: of each exponents, and n elements. */
static void sum_over(prediction *p, wide ranks, wide groups, wide exponents, wide n, wide integers, bool scatter)
{
    const wide calls = groups * p->steps * p->back;
    if (!p->exact) {
        add(&p->moved, scatter ? REDUCE_SCATTER : ALL_REDUCE, ranks, calls, n, p->element);
        return;
    }
    add(&p->moved, ALL_REDUCE, ranks, calls, exponents, sizeof(int32_t));
    add(&p->moved, REDUCE_SCATTER, ranks, calls, n * integers, sizeof(int64_t));
    add(&p->moved, ALL_GATHER, ranks, calls, scatter ? 0 : n, p->element);
}

/* Each KV head is on `copies` of the ranks that share heads. dK and dV [s, d] are sums over the queries of all heads that
 * share them, on the ring and on the copies. */
static void attend(prediction *p, bool by_heads, wide passes)
{
    const ar_config *c = p->config;
    const wide tp = by_heads ? p->tp : 1, ranks = tp * p->inner, kv = c->kv_heads, batch = p->c->run.batch;
    const wide copies = ranks > kv ? ranks / kv : 1, tp_copies = tp > kv ? tp / kv : 1, d = c->head_dim;
    const wide value = ar_config_value_dim(c), q = c->heads * d, keys = kv * copies * (d + value);
    const wide out = c->heads * value, senders = p->inner / (copies / tp_copies), positions = p->tokens * p->inner;
    const wide exchanged = (p->inner - 1) * (q + out) * (passes + p->back) + (p->inner - 1) * keys * passes +
                           (senders - 1) * keys * p->back; /* backward copies share out whom they send to */
    const wide around = (p->ring - 1) * p->inner * keys * (passes + p->back);
    p->moved += p->tp * p->steps * positions * ((p->ring * (exchanged + around)) / ranks) * p->element;
    if (c->qk_norm == AR_QK_NORM_WIDTH && by_heads)
        over_tp(p, ALL_GATHER, passes + p->back, p->tokens * (q + kv * tp_copies * d), p->element);
    const wide seq = p->c->run.seq, terms = c->heads / kv * seq, local = keys / ranks;
    const wide exponents = batch * local + 2 * batch * seq * (kv * copies / ranks);
    const wide integers = limbs(terms, p->element < sizeof(float) && terms <= 16384);
    sum_over(p, p->ring, p->tp * p->inner, exponents, batch * seq * local, integers, true);
    sum_over(p, copies, p->cp * p->tp / copies, exponents, batch * (seq / p->ring) * local, integers, false);
}

/* Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1): small whole matrices, norms, matrices cut
 * by heads. The gradient of the features of keys that all heads share is a sum over heads. */
static void latent_attention(prediction *p, const ar_linear_split *first, wide passes)
{
    const ar_config *c = p->config;
    const ar_latent *a = &c->latent;
    const ar_linear_split small = {AR_STYLE_REPLICATE, first->from, {AR_INVARIANT, 0}};
    const ar_linear_split large = {first->style, {AR_INVARIANT, 0}, first->to};
    const wide q = c->heads * c->head_dim, kv = c->heads * (c->head_dim - a->rope_dim + a->value_dim);
    const wide keys = a->kv_rank + a->rope_dim, shared = p->tokens * a->rope_dim;
    linear down = linear_of(&small, c->hidden, a->q_rank > 0 ? a->q_rank : keys, c->qkv_bias, MATRIX);
    down.outputs[1] = a->q_rank > 0 ? keys : 0;
    const linear queries =
        linear_of(a->q_rank > 0 ? &large : first, a->q_rank > 0 ? a->q_rank : c->hidden, q, false, MATRIX);
    const linear up = linear_of(&large, a->kv_rank, kv, false, MATRIX);
    if (a->q_rank == 0)
        add_linear(p, &queries, passes, 0);
    add_linear(p, &down, passes, 0);
    if (a->q_rank > 0) {
        add_parameter(p, a->q_rank, 0, -1, 1, 0);
        add_linear(p, &queries, passes, 0);
    }
    add_parameter(p, a->kv_rank, 0, -1, 1, 0);
    add_linear(p, &up, passes, 0);
    if (spread_of(first->to) == BY_FEATURES)
        sum_over(p, p->tp, p->cp, p->c->run.batch + shared, shared, limbs(c->heads, p->element < sizeof(float)), false);
}

static void attention(prediction *p, const ar_branch_split *s)
{
    const ar_config *c = p->config;
    const wide q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim, passes = p->forwards + p->attention;
    const bool by_heads = spread_of(s->first.to) == BY_FEATURES, each = c->qk_norm == AR_QK_NORM_HEAD;
    const linear out = linear_of(&s->second, c->heads * ar_config_value_dim(c), c->hidden, c->out_bias, MATRIX);
    linear qkv = linear_of(&s->first, c->hidden, q, c->qkv_bias, MATRIX);
    qkv.outputs[1] = qkv.outputs[2] = kv;
    qkv.packed = c->arch == AR_ARCH_GPT2 || c->arch == AR_ARCH_PHI3 || c->arch == AR_ARCH_GPT_NEOX;
    qkv.copies = by_heads && p->tp > c->kv_heads ? p->tp / c->kv_heads : 1;
    change(p, passes, spread_of(s->enter.from), spread_of(s->enter.to));
    if (c->latent.kv_rank > 0)
        latent_attention(p, &s->first, passes);
    else
        add_linear(p, &qkv, passes, 0);
    for (int i = 0; i < 2 && c->qk_norm != AR_QK_NORM_NONE; i++)
        add_parameter(p, each ? c->head_dim : i == 0 ? q : kv, 0, -1, 1, by_heads && each ? SPREAD : 0);
    if (c->sinks)
        add_parameter(p, c->heads, 0, by_heads ? 0 : -1, 1, 0);
    attend(p, by_heads, passes);
    add_linear(p, &out, p->forwards + p->full, p->attention - p->full);
    change(p, p->forwards + p->full, spread_of(s->leave.from), spread_of(s->leave.to));
}

/* --- MLP and experts (GShard: Lepikhin et al. 2020, arXiv:2006.16668) ------------------------------------------------- */

/* Recomputation ends with the last layer's input, unless a norm follows. */
static void mlp(prediction *p, const ar_branch_split *s)
{
    const ar_config *c = p->config;
    const wide whole = p->forwards + (c->norm_place == AR_NORM_BEFORE ? 0 : p->full);
    const linear second = linear_of(&s->second, c->ffn, c->hidden, c->mlp_bias, MATRIX);
    linear first = linear_of(&s->first, c->hidden, c->ffn, c->mlp_bias, MATRIX);
    first.outputs[1] = c->gated ? c->ffn : 0;
    first.packed = c->arch == AR_ARCH_PHI3 || c->arch == AR_ARCH_GLM4;
    change(p, p->forwards + p->full, spread_of(s->enter.from), spread_of(s->enter.to));
    add_linear(p, &first, p->forwards + p->full, 0);
    add_linear(p, &second, whole, p->forwards + p->full - whole);
    change(p, whole, spread_of(s->leave.from), spread_of(s->leave.to));
}

/* Of all ranks together; divided by ep at the end. */
static void over_ep(prediction *p, collective kind, wide passes, wide elements, wide width)
{
    add(&p->moved_by_ep, kind, p->ep, p->tp * p->cp * p->steps * passes, elements, width);
}

/* Tokens go to their experts and come back, in either pass, and backward with their weights; each pass routes anew. Of
 * rows there are as many as if every expert had as many tokens, unless the routes are given. */
static void dispatch(prediction *p, wide passes)
{
    const ar_config *c = p->config;
    const bool gathers = p->layout->dispatch == AR_DISPATCH_ALL_GATHER;
    const wide tokens = p->tokens / (p->whole_experts ? p->tp : 1), slots = tokens * c->experts.per_token;
    const wide counts = p->c->run.batch * (wide)c->experts.n;
    const wide rows = p->c->routed || p->ep == 1 ? 0 : slots * c->hidden * (p->ep - 1);
    over_ep(p, ALL_GATHER, passes, slots * p->ep, sizeof(int32_t));
    over_ep(p, ALL_TO_ALL, (gathers ? 1 : 2) * (passes + p->back), rows, p->element);
    over_ep(p, ALL_GATHER, gathers ? passes + p->back : 0, tokens * p->ep * c->hidden, p->element);
    over_ep(p, ALL_GATHER, gathers ? p->back : 0, slots * p->ep, sizeof(float));
    if (ar_config_balance(c, &p->c->run.loss) != AR_BALANCE_SEQUENCE)
        return;
    add(&p->moved, ALL_REDUCE, p->cp, p->tp * p->steps * passes, counts, sizeof(int64_t));
    over_tp(p, ALL_REDUCE, p->whole_experts ? passes : 0, counts, sizeof(int64_t));
}

/* The two layers of a gated MLP, of which each expert has its own. */
static void expert(prediction *p, const ar_linear_split *first, const ar_linear_split *second, wide ffn, bool bias,
                   unsigned flags)
{
    const wide passes = p->forwards + p->full;
    const linear down = linear_of(second, ffn, p->config->hidden, bias, MATRIX | flags);
    linear up = linear_of(first, p->config->hidden, ffn, bias, MATRIX | flags);
    up.outputs[1] = ffn;
    pass_through(p, &up, passes, p->back, 0);
    pass_through(p, &down, passes, p->back, 0);
    for (size_t i = 0; i < (flags & OF_EXPERTS ? p->config->experts.n / (size_t)p->ep : 1); i++) {
        add_weights(p, &up);
        add_weights(p, &down);
    }
}

/* Router and experts take all features of tokens: whole, or by positions where experts are not cut over tp. */
static void experts(prediction *p, const ar_branch_split *s)
{
    const ar_config *c = p->config;
    const wide passes = p->forwards + p->full, whole = p->forwards + (c->norm_place == AR_NORM_BEFORE ? 0 : p->full);
    const ar_placement all = {AR_INVARIANT, 0}, input = p->whole_experts ? (ar_placement){AR_SHARD, 1} : all;
    const ar_placement inside = s->first.style == AR_STYLE_COLWISE ? (ar_placement){AR_SHARD, 2} : all;
    const ar_linear_split none = {AR_STYLE_REPLICATE, input, input};
    const ar_linear_split first = {s->first.style, input, inside}, second = {s->second.style, inside, input};
    const linear router = linear_of(&none, c->hidden, c->experts.n, c->experts.bias, 0);
    const linear share = linear_of(&none, c->hidden, 1, false, 0);
    change(p, passes, spread_of(s->enter.from), spread_of(input));
    add_linear(p, &router, passes, 0);
    if (ar_config_router_bias(c))
        add_parameter(p, c->experts.n, 0, -1, 1, FROZEN);
    dispatch(p, passes);
    expert(p, p->whole_experts ? &none : &first, p->whole_experts ? &none : &second, c->experts.ffn, c->experts.bias,
           OF_EXPERTS);
    if (c->experts.shared > 0)
        expert(p, s->shared_whole ? &none : &first, s->shared_whole ? &none : &second, c->experts.shared, false, 0);
    if (c->experts.shared > 0 && !c->experts.ungated)
        add_linear(p, &share, passes, 0);
    change(p, whole, spread_of(input), spread_of(s->leave.to));
}

/* --- a block, and the ends of a model ------------------------------------------------------------------------------------ */

static void block(prediction *p, size_t layer)
{
    const ar_config *c = p->config;
    const ar_plan *plan = &p->c->run.plan;
    const ar_recomputation *r = &p->layout->recompute;
    const bool before = c->norm_place != AR_NORM_AFTER, after = c->norm_place != AR_NORM_BEFORE;
    const bool again = p->back > 0 && layer % (size_t)ari_at_least_one(r->every) == 0;
    const bool further = layer >= c->layers; /* for one more token: DeepSeek-AI 2024, arXiv:2412.19437, section 2.2 */
    const ar_linear_split join = {.style = AR_STYLE_REPLICATE};
    linear joined = linear_of(&join, 2 * (wide)c->hidden, c->hidden, false, MATRIX);
    ar_block_split s;
    if (p->st == AR_OK)
        p->st = ari_plan_block(plan, c, layer, ari_plan_by_tokens(plan, (int)p->tp, p->layout->sp), &s);
    if (p->st != AR_OK)
        return;
    p->unit = layer;
    p->full = again && r->what == AR_RECOMPUTE_FULL;
    p->attention = p->full || (again && r->what == AR_RECOMPUTE_SELECTIVE);
    joined.from = joined.to = stream(p);
    for (int i = 0; i < 2 && further; i++)
        add_norm(p, c->hidden, stream(p));
    if (further)
        add_linear(p, &joined, p->forwards, 0);
    if (before) {
        change(p, p->forwards + p->full, stream(p), spread_of(s.norm1));
        add_norm(p, c->hidden, spread_of(s.norm1));
    }
    attention(p, &s.attention);
    if (after)
        add_norm(p, c->hidden, stream(p));
    if (before && c->residual != AR_RESIDUAL_PARALLEL_ONE_NORM) {
        change(p, p->forwards + p->full, stream(p), spread_of(s.norm2));
        add_norm(p, c->hidden, spread_of(s.norm2));
    }
    (ar_config_has_experts(c, layer) ? experts : mlp)(p, &s.mlp);
    for (int i = 0; i < after + further; i++)
        add_norm(p, c->hidden, stream(p));
}

static void blocks(prediction *p, size_t begin, size_t end)
{
    for (size_t layer = begin; layer < end; layer++)
        block(p, layer);
    p->unit = SIZE_MAX; /* ZeRO's root unit: what no block has */
}

/* By vocabulary one rank has a token's row, and the others zeros; shards along features become shards along tokens by an
 * all-to-all. Blocks for further tokens have embedding and head too. */
static void embedding(prediction *p)
{
    const wide ends = 1 + p->config->mtp, all = p->tokens * p->config->hidden, forwards = p->forwards * ends;
    const bool vocab = p->outer.tokens == AR_EMBEDDING_VOCAB, features = p->outer.tokens == AR_EMBEDDING_HIDDEN;
    if (vocab)
        over_tp(p, p->sp ? REDUCE_SCATTER : ALL_REDUCE, forwards, all, p->element);
    if (features && p->sp)
        over_tp(p, ALL_TO_ALL, forwards + p->back * ends, p->tp > 1 ? all / p->tp * (p->tp - 1) : 0, p->element);
    else
        redistribute(p, forwards, features ? BY_FEATURES : WHOLE, stream(p), p->config->hidden);
    if (!features)
        redistribute(p, p->back * ends, stream(p), WHOLE, p->config->hidden);
}

static void tokens_table(prediction *p)
{
    const int cut = p->outer.tokens == AR_EMBEDDING_VOCAB ? 0 : p->outer.tokens == AR_EMBEDDING_HIDDEN ? 1 : -1;
    const bool ends = (p->config->tied || p->config->mtp > 0) && p->pp > 1;
    add_parameter(p, p->config->vocab, p->config->hidden, cut, 1, TABLE | BY_TOKEN | (ends ? AT_ENDS : 0u));
}

/* Over logits cut by vocabulary a maximum, a denominator and a target a token; label smoothing: two of the former. */
static void head_and_loss(prediction *p, const linear *head)
{
    const wide ends = 1 + p->config->mtp, sums = p->tokens * (p->c->run.loss.label_smoothing > 0.0 ? 2 : 1);
    const wide cut = head->to == BY_FEATURES ? ends : 0;
    pass_through(p, head, ends, p->back * ends, 0);
    over_tp(p, ALL_REDUCE, cut, sums + p->tokens, sizeof(int32_t));
    over_tp(p, ALL_REDUCE, cut, sums, sizeof(int64_t));
}

/* --- sums of gradients ---------------------------------------------------------------------------------------------------- */

/* Bytes of the state of an exact sum of at most so many values (numerics.md, section 2): one value itself, else an index
 * and two numbers that have 32 bits of each value. */
static wide state_bytes(wide values, bool narrow)
{
    static const int bits[2][5] = {{0, 7, 15, 23}, {0, 3, 7, 15, 26}},
                     bytes[2][6] = {{4, 11, 13, 15, 17}, {4, 5, 6, 8, 11, 13}};
    int i = 0;
    while (i < (narrow ? 5 : 4) && values > (wide)1 << bits[narrow][i])
        i++;
    return (wide)bytes[narrow][i];
}

/* An all-reduce, or a reduce-scatter. Exact: states of `before` values go to the ranks that add them; results come back
 * as values or, where another sum follows, as states of `after` values. */
static void sum_states(prediction *p, wide ranks, wide n, bool narrow, bool scatter, wide before, wide after)
{
    const wide width = narrow ? 2 : 4, back = after > 0 ? state_bytes(after, narrow) : width;
    if (!p->exact)
        add(&p->moved, scatter ? REDUCE_SCATTER : ALL_REDUCE, ranks, p->steps, n, width);
    else
        add(&p->moved, ALL_GATHER, ranks, p->steps, n, state_bytes(before, narrow) + (scatter ? 0 : back));
}

typedef struct bucket {
    bool used, root, by_token, vectors;
    wide bytes, most, all; /* filled on the tp rank that has most; elements as in `parameter` */
} bucket;

/* The most values that an element is the sum of before it is summed over so many ranks: one for each part of a sample, of
 * a micro-batch or the step; two for each token of a table. */
static wide values_before(const prediction *p, const bucket *b, wide ranks, bool micro)
{
    const ar_parallel whole = {.dp = p->layout->dp}, *cut = micro && ari_passes_apart(p->layout) ? p->layout : &whole;
    size_t start = 0, samples = 0, parts = 0;
    ari_gradient_moves(p->layout, p->c->run.seq, &parts);
    ari_parallel_rows(cut, p->c->run.batch, 0, 0, &start, &samples);
    const wide each = (1 + (wide)p->config->mtp) * (b->by_token ? 2 * p->c->run.seq : parts);
    return b->vectors ? ANY : samples * each * (p->summing[0] > ranks ? p->summing[0] / ranks : 1);
}

/* ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054; replicas: Zhao et al. 2023, arXiv:2304.11277): gradients are scattered
 * to shares, from stage 2 on in every micro-batch; weights are gathered after the update or (3) before the passes. Terms
 * on tp ranks, and on both ends of a pipeline, are summed before what follows. */
static void sum_bucket(prediction *p, const bucket *b, unsigned kind)
{
    const bool narrow = kind & NARROW, micro = p->zero >= 2, ends = kind & AT_ENDS, spreads = kind & SPREAD;
    const wide summing = p->summing[kind & OF_EXPERTS], shards = p->shards[kind & OF_EXPERTS],
               copies = summing / shards;
    const wide next = micro ? copies : summing, sets = p->cp * p->dp / (micro ? shards : 1);
    const wide all = b->all * p->cp * p->dp, before = values_before(p, b, next, false);
    const wide after = spreads ? before * p->tp : before, last = next == 1 ? 0 : after;
    sum_states(p, spreads ? p->tp : 1, b->most * sets, narrow, false, before, ends ? after : last);
    sum_states(p, ends && p->first ? 2 : 1, b->all * sets, narrow, false, after, 2 * last);
    if (p->layout->zero == 0) {
        sum_states(p, summing, all / summing, narrow, false, before, 0);
        return;
    }
    const wide often = micro ? p->micro : 1, gathers = p->zero < 3 ? p->c->run.steps > 0
                                                       : b->root   ? 1
                                                                   : p->micro * (p->forwards + 1);
    sum_states(p, shards, all / shards * often, narrow, true, values_before(p, b, shards, micro), 0);
    sum_states(p, copies, all / summing, narrow, false, values_before(p, b, copies, false), 0);
    add(&p->moved, ALL_GATHER, shards, p->steps * gathers, all / shards, narrow ? 2 : 4);
}

static int by_order(const void *a, const void *b)
{
    const parameter *x = a, *y = b;
    const wide p[] = {x->unit, x->order[0], x->order[1]}, q[] = {y->unit, y->order[0], y->order[1]};
    const int i = p[0] != q[0] ? 0 : p[1] != q[1] ? 1 : 2;
    return p[i] < q[i] ? -1 : p[i] > q[i];
}

/* Next fit, one open bucket of each kind (PyTorch's DDP: Li et al. 2020, arXiv:2006.15704), of each unit by itself. */
static void sum_gradients(prediction *p)
{
    const size_t capacity = p->c->run.ddp.bucket_bytes;
    bucket open[KINDS] = {{.used = false}};
    if (p->n > 0)
        qsort(p->parameters, p->n, sizeof *p->parameters, by_order);
    for (size_t i = 0; i < p->n; i++) {
        const parameter *one = &p->parameters[i];
        const unsigned kind = one->flags % KINDS;
        const bool ends = i + 1 == p->n || one[1].unit != one->unit;
        bucket *b = &open[kind];
        if (b->used && (capacity == 0 || b->bytes + one->most * sizeof(float) > capacity)) {
            sum_bucket(p, b, kind);
            *b = (bucket){.used = false};
        }
        *b = (bucket){true,
                      one->unit == SIZE_MAX,
                      b->by_token || one->flags & BY_TOKEN,
                      b->vectors || one->vector,
                      b->bytes + one->most * sizeof(float),
                      b->most + one->most,
                      b->all + one->all};
        for (unsigned k = 0; k < KINDS && ends; k++) {
            if (open[k].used)
                sum_bucket(p, &open[k], k);
            open[k] = (bucket){.used = false};
        }
    }
}

/* --- what else a step moves ------------------------------------------------------------------------------------------------ */

/* Numbers of which each rank of so many groups has a term. */
static void sum_number(prediction *p, wide ranks, wide groups)
{
    sum_states(p, ranks, groups, false, false, ANY, ANY);
}

/* Of each router: counts for balancing and biases, losses; of each attention the largest logits (QK-Clip). Then they are
 * summed over the pipeline. */
static void sum_routers(prediction *p, wide routers, wide attentions)
{
    const ar_config *c = p->config;
    const ar_loss_options *loss = &p->c->run.loss;
    const bool updates = p->c->run.steps > 0 && p->back > 0, biases = updates && loss->router.bias_update > 0.0;
    const wide counts = routers * (p->forwards - 1 + biases) * c->experts.n, w = sizeof(int64_t);
    const wide logits = updates && p->c->run.optimizer.qk_clip > 0.0 ? attentions * c->heads : 0;
    const wide all = p->first ? p->steps * p->tp * p->cp * p->dp : 0;
    const bool losses = ar_config_router_losses(c, loss);
    dp_step(p, ALL_REDUCE, counts * w + logits * sizeof(int32_t), 1);
    tp_step(p, ALL_REDUCE, (p->whole_experts ? counts * w : 0) + logits * sizeof(int32_t), 1);
    add(&p->moved, ALL_REDUCE, p->pp, all, ar_config_balance(c, loss) == AR_BALANCE_LAYERS ? c->experts.n : 0, w);
    add(&p->moved, ALL_REDUCE, p->pp, all, losses ? ar_config_blocks(c) : 0, sizeof(float));
    sum_number(p, p->summing[0], losses ? routers * p->tp : 0);
    sum_number(p, p->whole_experts ? p->tp : 1, losses ? routers * p->cp * p->dp : 0);
}

/* --verify-every: claims about each parameter and each rank go over tp, over dp, and over the pipeline (modules.md). */
static void verify(prediction *p)
{
    enum { OF_PARAMETER = 16, OF_RANK = 2 };
    const wide words = (p->n + p->frozen) * (wide)OF_PARAMETER + OF_RANK, ranks = p->summing[0] * p->tp;
    const wide times = p->c->verified, w = sizeof(int64_t), once = p->first ? times * ranks : 0;
    const bool ends = p->pp > 1 && p->head && (p->config->tied || p->config->mtp > 0);
    add(&p->moved, ALL_GATHER, p->tp, times * p->cp * p->dp, p->tp * words, w);
    add(&p->moved, ALL_GATHER, p->summing[0], times * p->tp, ranks * words, w);
    add(&p->moved, ALL_GATHER, ends ? 2 : 1, once, 2 * ranks * (OF_PARAMETER + OF_RANK), w);
    add(&p->moved, ALL_GATHER, p->pp, once, p->pp * (ranks * OF_RANK + 1), w);
}

/* An exponent and two int64 for the norm of all gradients, over the ranks that have different ones. */
static void clip(prediction *p)
{
    const wide width = sizeof(int32_t) + 2 * sizeof(int64_t), ranks = p->tp * p->cp * p->dp, shards = p->shards[0];
    const bool differ = (p->layout->zero > 0 && shards > 1) || p->apart;
    tp_step(p, ALL_REDUCE, 1, width);
    add(&p->moved, ALL_REDUCE, p->pp, p->first ? p->steps * ranks : 0, 1, width);
    add(&p->moved, ALL_REDUCE, shards, differ ? p->steps * ranks / shards : 0, 1, width);
}

/* --- all of it --------------------------------------------------------------------------------------------------------------- */

/* The parameters of a pipeline rank in the order of registration, with the passes of its layers. */
static void pipeline_rank(prediction *p, size_t pp_rank, const linear *head)
{
    const ar_config *c = p->config;
    wide attentions = 0, routers = 0;
    p->first = pp_rank == 0;
    p->last = pp_rank + 1 == p->pp;
    p->n = p->frozen = 0;
    p->unit = SIZE_MAX;
    if (p->first)
        tokens_table(p);
    if (p->first && c->learned_positions)
        add_parameter(p, c->max_positions, c->hidden, -1, 1,
                      TABLE | (p->sp ? SPREAD : 0u) | (p->c->repeats ? BY_TOKEN : 0u));
    for (size_t stage = pp_rank; stage < p->stages; stage += (size_t)p->pp) {
        size_t begin = 0, n = 0;
        ari_stage_layers(&begin, &n, &p->layout->stages, c->layers, (size_t)p->stages, stage);
        blocks(p, begin, begin + n);
        const size_t end = begin + n + (stage + 1 == p->stages ? c->mtp : 0);
        attentions += end - begin;
        for (size_t layer = begin; layer < end; layer++)
            routers += ar_config_has_experts(c, layer);
    }
    if (p->last && c->final_norm)
        add_norm(p, c->hidden, spread_of(p->outer.final_norm));
    if (p->last && p->head && c->tied && !p->first)
        tokens_table(p);
    if (p->last && p->head && !c->tied)
        add_weights(p, head);
    if (p->last)
        blocks(p, c->layers, ar_config_blocks(c));
    if (p->last && !p->first && c->mtp > 0 && !c->tied)
        tokens_table(p);
    dp_step(p, ALL_REDUCE, 1 + c->mtp, sizeof(int64_t)); /* targets */
    sum_routers(p, routers, attentions);
    sum_number(p, p->last ? p->summing[0] : 1, (1 + c->mtp) * p->tp); /* losses */
    sum_number(p, p->last && p->sp && !p->head ? p->tp : 1, p->cp * p->dp);
    if (p->back == 0)
        return;
    add(&p->moved, ALL_GATHER, p->summing[0], p->tp, 2 * p->summing[0], sizeof(int64_t)); /* same parameters? */
    if (p->c->run.ddp.find_unused)
        dp_step(p, ALL_REDUCE, p->n, 1);
    if (p->c->run.clip > 0.0 && p->c->run.steps > 0)
        clip(p);
    verify(p);
    if (p->st == AR_OK)
        sum_gradients(p);
}

/* Messages between stages, the loss from the last stage to all, ends of the model, and each pipeline rank. */
static void sum_all(prediction *p)
{
    const ar_config *c = p->config;
    const ar_plan *plan = &p->c->run.plan;
    p->st = ari_plan_outer(plan, c, ari_plan_by_tokens(plan, (int)p->tp, p->layout->sp), &p->outer);
    if (p->st != AR_OK)
        return;
    const linear head = linear_of(&p->outer.head, c->hidden, c->vocab, false, HEAD);
    const wide messages = (p->stages - 1) * p->steps * (p->forwards + p->back);
    p->moved += messages * (p->sp ? 1 : p->tp) * p->cp * p->tokens * c->hidden * p->element;
    add(&p->moved, ALL_GATHER, p->pp, p->steps * p->tp * p->cp * p->dp, 1, sizeof(float));
    change(p, c->mtp > 0 ? p->forwards : 1, stream(p), spread_of(p->outer.final_norm));
    embedding(p);
    if (p->head)
        head_and_loss(p, &head);
    for (size_t pp_rank = 0; pp_rank < p->pp && p->st == AR_OK; pp_rank++)
        pipeline_rank(p, pp_rank, &head);
}

bool ari_bytes_counts_routes(const ari_bytes_case *c)
{
    return ar_config_balance(c->config, &c->run.loss) >= AR_BALANCE_BATCH;
}

size_t ari_bytes_routed_exchanges(const ari_bytes_case *c, size_t layer)
{
    const ar_recomputation *r = &c->run.parallel.recompute;
    const bool again = r->what == AR_RECOMPUTE_FULL && layer % (size_t)ari_at_least_one(r->every) == 0;
    const size_t ways = c->run.parallel.dispatch == AR_DISPATCH_ALL_GATHER ? 1 : 2; /* there and back, or back alone */
    return ways * ((c->forward_only ? 1u : again ? 3u : 2u) + ari_bytes_counts_routes(c));
}

/* Micro-batches with samples: of the first dp rank, which has most, and of all. */
static void count_micro_batches(prediction *p)
{
    const size_t pieces = (size_t)ari_at_least_one(p->layout->micro_batches);
    for (int r = 0; r < ari_at_least_one(p->layout->dp); r++) {
        size_t start = 0, samples = 0;
        ari_parallel_rows(&(ar_parallel){.dp = p->layout->dp}, p->c->run.batch, r, 0, &start, &samples);
        p->all_micro += samples < pieces ? samples : pieces;
        p->micro = r == 0 ? p->all_micro : p->micro;
    }
}

static prediction prediction_of(const ari_bytes_case *c)
{
    const ar_parallel *l = &c->run.parallel;
    const ari_ranks r = ari_ranks_of(l);
    const size_t dp = (size_t)r.along[ARI_AXIS_DP], cp = (size_t)ari_extent(l, ARI_CUTS_POSITIONS);
    const size_t ep = (size_t)ari_at_least_one(l->ep), replicas = (size_t)ari_at_least_one(l->dp_replicate);
    const size_t summing[2] = {dp * cp, (size_t)ari_extent(l, ari_expert_axes(l)) / ep};
    const wide steps = c->run.steps > 1 ? c->run.steps : 1;
    prediction p = {.c = c,
                    .config = c->config,
                    .layout = l,
                    .tp = (wide)r.along[ARI_AXIS_TP],
                    .dp = dp,
                    .cp = cp,
                    .ring = (wide)r.along[ARI_AXIS_RING],
                    .inner = (wide)r.along[ARI_AXIS_INNER],
                    .pp = (wide)r.along[ARI_AXIS_PP],
                    .ep = ep,
                    .stages = (wide)ari_parallel_stages(l),
                    .summing = {summing[0], summing[1]},
                    .shards = {summing[0] / replicas, summing[1] / replicas},
                    .tokens = (wide)c->run.batch * (c->run.seq / cp),
                    .element = ar_dtype_bytes(ari_activations_of(c->run.precision)),
                    .matrix = ar_dtype_bytes(ari_matrix_dtype(c->run.precision, c->run.storage)),
                    .steps = steps,
                    .forwards = ari_bytes_counts_routes(c) ? 2 : 1,
                    .back = !c->forward_only,
                    .versions = (c->forward_only ? 1 : steps) * (dp < c->run.batch ? dp : c->run.batch),
                    .exact = c->run.numerics == AR_NUMERICS_EXACT,
                    .sp = l->sp && l->tp > 1,
                    .head = c->config->arch != AR_ARCH_STACK,
                    .whole_experts = ari_experts_whole(l),
                    .apart = ari_experts_apart(l)};
    p.zero = c->forward_only ? 0 : l->zero > 1 && p.shards[0] == 1 ? 1 : l->zero;
    count_micro_batches(&p);
    return p;
}

ar_status ari_bytes_predict(uint64_t *bytes, const ari_bytes_case *c)
{
    prediction p = prediction_of(c);
    const wide copies = p.apart ? (wide)ari_expert_sequence(p.layout) : p.cp;
    sum_all(&p);
    free(p.parameters);
    AR_TRY(p.st);
    wide sum = p.moved + p.moved_by_ep / p.ep + p.moved_by_copies / copies;
    sum += c->routed ? c->routed->rows * c->config->hidden * p.element : 0;
    sum += c->routed && p.routed_linears > 0 ? c->routed->gradients * (p.routed_row / p.routed_linears) : 0;
    if (sum > UINT64_MAX)
        return ar_error_set(AR_ERR_OVERFLOW, "more bytes than a number of 64 bits holds");
    *bytes = (uint64_t)sum;
    return AR_OK;
}
