/* SPDX-License-Identifier: Apache-2.0 */
/* Elements, width, ranks, groups and times of every collective of a run. A rank's parameters are gone through in the
 * order of their registration, and with each layer what its passes move; then what a step moves besides. */
#include "verify/bytes/bytes.h"

#include <stdlib.h>

#include "anyrank/config.h"
#include "ref/core/context_private.h"
#include "ref/core/size.h"
#include "ref/models/parallel_private.h"
#include "ref/models/plan_private.h"
#include "ref/placement/context_private.h"
#include "ref/placement/parallel_private.h"

__extension__ typedef unsigned __int128 wide; /* a product of sizes that does not overflow */
#define ANY ((wide)1 << 100)                  /* any number of values */

typedef enum collective { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL } collective;
typedef enum spread { WHOLE, BY_TOKENS, BY_FEATURES, SUM } spread; /* over tp; SUM: each rank has a term */

/* Properties of parameters. Those that have the first seven in common share buckets. */
enum {
    OF_EXPERTS = 1, /* one of each for every expert; summed over the ranks with copies of these */
    AT_ENDS = 2,    /* on both ends of a pipeline */
    SPREAD = 4,     /* each tp rank has a term of its gradient, of its own tokens */
    MATRIX = 8,     /* updated by Muon */
    TABLE = 16,     /* in bf16 sums of a table have more bytes an element than others */
    NARROW = 32,    /* stored in bf16 */
    UNEVEN = 64,    /* tp ranks have different numbers of elements */
    KINDS = 128,
    FROZEN = 128,   /* no gradient */
    BY_TOKEN = 256, /* a gradient of a value a token */
    VECTOR = 512,
    PACKED = 1024,       /* weights in one parameter */
    HEAD = 2048,         /* makes logits, whose gradients have 25 bits in bf16 too; no block's */
    SHARED = 4096,       /* another layer has the parameter */
    ROOT = (1 << 20) - 1 /* the unit of what no block has, with ZeRO-2 */
};

/* Weights [outputs, inputs] that share an input: Y = X W^T. */
typedef struct linear {
    ar_linear_split split;
    wide inputs, outputs[3], copies; /* copies: tp ranks with the same part of the second and third weight (KV heads) */
    bool bias;
    unsigned flags;
} linear;

typedef struct parameter {
    wide key, most, all; /* the order of packing; elements of the tp rank that has most, of all tp ranks */
    unsigned flags;
} parameter;

typedef struct prediction {
    const ari_step_case *c;
    const ar_config *config;
    const ar_parallel *layout;
    ar_outer_split outer;
    wide tp, dp, cp, ring, inner, pp, ep;
    wide experts;                    /* of a rank, of each layer that has some */
    wide summing[2], shards[2];      /* ranks that sum gradients, that share them out; [1] of experts */
    wide tokens;                     /* of a step: of all dp ranks, at the positions of one cp rank */
    wide element, matrix;            /* bytes of one of an activation, of a matrix */
    wide steps, forwards, back;      /* passes of a step; forwards: 2 where the first counts routes */
    wide full, attention;            /* passes again of the block, of its attention up to the last layer */
    wide samples, summed;            /* of the first dp rank, which has most: all, and those of one sum with ZeRO-2 */
    wide micro, all_micro;           /* micro-batches with samples: of the first dp rank, of all */
    wide versions;                   /* exchanges of a weight's exponents: one for each version and dp rank */
    spread stream;                   /* of values between the branches of blocks */
    bool exact, whole, apart;        /* whole: experts are not cut over tp; apart: they have groups of their own */
    int zero;                        /* 1 where one rank has all shares */
    wide moved;                      /* bytes */
    wide by_ep, by_copies;           /* bytes of all ranks instead of groups: over ep, over copies of experts */
    wide routed_row, routed_linears; /* bytes of an expert's row in so many linear layers */
    /* Of the pipeline rank: its place, its parameters by their registration, and how many it has of what. */
    bool first, last;
    parameter *parameters; /* [n] */
    size_t n, frozen, blocks, routers;
    size_t unit; /* that the next parameter belongs to */
    ar_status st;
} prediction;

static void add(wide *sum, collective kind, wide ranks, wide calls, wide elements, wide width)
{
    const wide times = kind == ALL_TO_ALL ? 1 : kind == ALL_REDUCE ? 2 * (ranks - 1) : ranks - 1;
    *sum += times * calls * elements * width;
}

/* Each cp rank has a tp group. In passes the elements are those of all dp ranks; in a step each of these has a call. */
static void over_tp(prediction *p, collective kind, wide calls, wide elements, wide width)
{
    add(&p->moved, kind, p->tp, p->cp * p->steps * calls, elements, width);
}

/* In a step: over each dp group of a pipeline rank. */
static void dp_step(prediction *p, collective kind, wide elements, wide width)
{
    add(&p->moved, kind, p->summing[0], p->steps * p->tp, elements, width);
}

/* A sum of n terms on each of the ranks, scattered or to all. Exact (numerics.md, section 2): its exponents, sums in
 * one int64 or, of more than 8191 terms with more bits than bf16, two, and rounded values. */
static void fold(prediction *p, wide ranks, wide calls, wide exponents, wide n, wide terms, wide width, bool scatter)
{
    if (!p->exact) {
        add(&p->moved, scatter ? REDUCE_SCATTER : ALL_REDUCE, ranks, calls, n, width);
        return;
    }
    add(&p->moved, ALL_REDUCE, ranks, calls, exponents, sizeof(int32_t));
    add(&p->moved, REDUCE_SCATTER, ranks, calls, n, (terms > 8191 ? 2 : 1) * sizeof(int64_t));
    add(&p->moved, ALL_GATHER, ranks, calls, scatter ? 0 : n, width);
}

/* Terms as fold counts them: as one where bf16 leaves room for so many. */
static wide terms_of(const prediction *p, wide terms, wide room)
{
    return p->element < sizeof(float) && terms <= room ? 1 : terms;
}

static spread spread_of(ar_placement s)
{
    const spread cut = s.dim == 2 || s.dim == -1 ? BY_FEATURES : BY_TOKENS;
    return s.kind == AR_SHARD ? cut : s.kind == AR_PARTIAL_SUM ? SUM : WHOLE;
}

/* The gradient of a partial sum is whole, as that of a whole value is. */
static spread gradient_of(spread s)
{
    return s == SUM ? WHOLE : s;
}

/* A shard is gathered, a sum is reduced; a rank's own part of the whole costs nothing. */
static void redistribute(prediction *p, wide passes, spread source, spread target, wide features)
{
    if (source != target && source != WHOLE)
        over_tp(p, source == SUM ? ALL_REDUCE : ALL_GATHER, passes, p->tokens * features, p->element);
}

/* Of a value of the model's width, and backward the transpose, of its gradient. */
static void redistribute_hidden(prediction *p, wide passes, spread source, spread target)
{
    redistribute(p, passes, source, target, p->config->hidden);
    redistribute(p, p->back, gradient_of(target), gradient_of(source), p->config->hidden);
}

/* The order of packing: by unit, then the last registered first, or the largest first and equal ones as registered. */
static wide packing_key(const prediction *p, wide most)
{
    const wide unit = p->zero >= 2 ? p->unit : 0, last = ((wide)1 << 40) - 1, largest = ((wide)1 << 60) - 1;
    const bool by_size = p->c->run.ddp.order == AR_BUCKETS_BY_SIZE;
    return (unit << 100) + (by_size ? ((largest - most) << 40) + p->n : last - p->n);
}

/* [rows, cols], or a vector (cols 0), cut over tp along a dimension (-1: none), and its broadcast at the start. */
static void add_parameter(prediction *p, wide rows, wide cols, int cut, wide copies, unsigned flags)
{
    const wide parts = cut < 0 ? 1 : p->tp / copies, along = cut == 1 ? cols : rows, width = cols > 0 ? p->matrix : 4;
    const wide whole = rows * (cols > 0 ? cols : 1), all = whole * (p->tp / parts);
    const wide most = (along + parts - 1) / parts * (along > 0 ? whole / along : 0);
    const bool muon = p->c->run.optimizer.kind == AR_OPTIMIZER_MUON;
    const unsigned absent = (p->apart ? 0u : OF_EXPERTS) | (p->tp > 1 ? 0u : SPREAD) | (muon ? 0u : MATRIX);
    flags &= ~(absent | (width < 4 ? 0u : TABLE));
    flags |= (width < 4 ? NARROW : 0u) | (along % parts > 0 ? UNEVEN : 0u) | (cols > 0 ? 0u : VECTOR);
    const wide ranks = p->summing[flags & OF_EXPERTS];
    add(&p->moved, ALL_GATHER, ranks, 1, all * p->cp * p->dp / ranks, width);
    p->parameters[p->n] = (parameter){packing_key(p, most), most, all, flags};
    p->frozen += (flags & FROZEN) > 0;
    p->n += !(flags & FROZEN);
}

static void add_vector(prediction *p, wide n, bool spreads)
{
    add_parameter(p, n, 0, -1, 1, spreads ? SPREAD : 0);
}

/* Muon (Jordan et al. 2024) needs whole matrices: ranks lay their parts into zeros and add them. On request matrices
 * whose longer side is cut stay so: their norms, and five times the terms of X X^T and exponents of rows, are
 * summed. */
static void update_matrix(prediction *p, const wide *block, int blocks, wide cols, int cut, wide copies, bool experts)
{
    const bool is_cut = cut >= 0 && p->tp > copies;
    const wide ranks = p->shards[experts], calls = p->steps * p->cp * p->dp;
    bool stays = p->c->run.optimizer.shards && copies == 1 && is_cut;
    wide rows = 0;
    for (int i = 0; i < blocks; rows += block[i++])
        stays = stays && (block[i] > cols) == (cut == 0);
    const wide n = rows * cols / (stays ? p->tp : 1);
    over_tp(p, ALL_REDUCE, p->dp, is_cut && !stays ? n : 0, sizeof(int32_t));
    add(&p->moved, ALL_REDUCE, ranks, p->layout->zero > 0 ? calls * p->tp / ranks : 0, n, sizeof(int32_t));
    for (int i = 0; stays && i < blocks; i++) {
        const wide longer = block[i] > cols ? block[i] : cols, m = block[i] + cols - longer;
        over_tp(p, ALL_REDUCE, p->dp, 1, sizeof(int32_t) + 2 * sizeof(int64_t));
        fold(p, p->tp, 5 * calls, 3 * m, m * m, terms_of(p, longer, 16384), sizeof(float), false);
    }
}

static void add_weights(prediction *p, const linear *l)
{
    const int cut = l->split.style == AR_STYLE_COLWISE ? 0 : l->split.style == AR_STYLE_ROWWISE ? 1 : -1;
    const bool packed = l->flags & PACKED, one = packed && p->config->arch == AR_ARCH_GPT_NEOX; /* heads in turn */
    const bool updates = p->c->run.optimizer.kind == AR_OPTIMIZER_MUON && p->c->run.steps > 0 && p->back > 0;
    const unsigned spreads = cut == 1 && spread_of(l->split.output) == BY_TOKENS ? SPREAD : 0;
    const int weights = l->outputs[2] > 0 ? 3 : l->outputs[1] > 0 ? 2 : 1;
    for (int i = 0; i < (packed ? 1 : weights); i++) {
        const wide copies = i > 0 && l->copies > 0 ? l->copies : 1;
        const wide rows = packed ? l->outputs[0] + l->outputs[1] + l->outputs[2] : l->outputs[i];
        add_parameter(p, rows, l->inputs, cut, copies, l->flags);
        if (l->bias)
            add_parameter(p, rows, 0, cut == 0 ? 0 : -1, copies, (l->flags & OF_EXPERTS) | spreads);
        if (updates && l->flags & MATRIX)
            update_matrix(p, packed && !one ? l->outputs : &rows, packed && !one ? weights : 1, l->inputs, cut, copies,
                          p->apart && l->flags & OF_EXPERTS);
    }
}

/* --- linear layers (Shoeybi et al. 2019, arXiv:1909.08053; by tokens Korthikanti et al. 2022, arXiv:2205.05198) --- */

/* Exact numerics (numerics.md, section 3): the gradient of a weight is one sum over each part of a sample, so one of
 * the cp ranks gets the others' rows of dY, of X and of X's exponents. Ranks with copies of an expert first tell
 * each other how many rows each has. */
static void share_rows(prediction *p, const linear *l, bool cut_x, bool cut_y)
{
    const wide k = l->copies > 0 ? l->copies : 1, y = l->outputs[0] + (cut_y ? k : 1) * (l->outputs[1] + l->outputs[2]);
    const wide features = (cut_x ? 1 : p->tp) * l->inputs + (cut_y ? 1 : p->tp) * y; /* of all tp ranks */
    const wide row = p->tp * sizeof(int32_t) + features * p->element;
    const wide copies = p->apart ? (wide)ari_expert_sequence(p->layout) : p->cp, passes = p->steps * p->back;
    size_t parts = 0;
    if (!(l->flags & OF_EXPERTS)) {
        const wide moved = p->cp > 1 ? ari_gradient_moves(p->layout, p->c->run.seq, &parts) : 0;
        p->moved += passes * p->c->run.batch * moved * row;
    } else if (copies > 1) {
        const wide rows = p->tokens / (p->whole ? p->tp : 1) * p->config->experts.per_token;
        add(&p->by_copies, ALL_GATHER, copies, p->cp * p->tp * passes, p->c->run.batch * p->experts * copies, 8);
        p->by_copies += p->c->routed ? 0 : p->cp * passes * rows * (copies - 1) * row;
        p->routed_row += p->back * row / p->tp;
        p->routed_linears += p->back;
    }
}

/* Y = X W^T, dX = dY W and dW = dY^T X. input_again: recomputation ends with the input. A gathered input is not kept
 * for dW unless asked for. Exact numerics exchange the exponents of a weight that is summed over, once a version of
 * it: with ZeRO-3, which gathers weights anew, in every pass of every micro-batch. */
static void add_linear(prediction *p, const linear *l, wide forwards, wide input_again)
{
    const spread from = spread_of(l->split.input), to = spread_of(l->split.output), dx = gradient_of(from);
    const wide outputs = l->outputs[0] + l->outputs[1] + l->outputs[2], calls = p->cp * p->steps;
    const bool experts = l->flags & OF_EXPERTS, local = experts && p->whole;
    const bool rows_cut = !local && l->split.style == AR_STYLE_COLWISE;
    const bool columns_cut = !local && l->split.style == AR_STYLE_ROWWISE, folds = columns_cut && to != SUM;
    const spread x = local ? from : columns_cut ? BY_FEATURES : WHOLE;
    const spread y = local ? from : rows_cut ? BY_FEATURES : columns_cut ? SUM : WHOLE;
    const bool again = !columns_cut && (from == BY_TOKENS || from == BY_FEATURES) && !p->layout->keep_gathered;
    const wide rows = p->tokens * (experts ? p->config->experts.per_token : 1);
    if (!(l->flags & SHARED))
        add_weights(p, l);
    if (forwards == 0)
        return;
    redistribute(p, forwards + (again ? p->back : input_again), from, x, l->inputs);
    redistribute(p, p->back, gradient_of(to), gradient_of(y), outputs);
    if (folds)
        fold(p, p->tp, calls * forwards, rows, rows * outputs, terms_of(p, l->inputs, SIZE_MAX), p->element,
             to == BY_TOKENS);
    else if (!columns_cut)
        redistribute(p, forwards, y, to, outputs);
    if (rows_cut)
        fold(p, p->tp, calls * p->back, rows, rows * l->inputs,
             l->flags & HEAD ? outputs : terms_of(p, outputs, SIZE_MAX), p->element, dx == BY_TOKENS);
    if (columns_cut)
        redistribute(p, p->back, BY_FEATURES, dx, l->inputs);
    if (!p->exact)
        return;
    const bool anew = p->zero == 3 && !(l->flags & HEAD);
    const wide times = (anew ? p->steps * p->all_micro : p->versions) * (experts ? p->experts : 1) * p->cp;
    const wide exponents = rows_cut ? l->inputs : columns_cut ? outputs : 0, once = anew ? forwards : 1;
    add(&p->moved, ALL_REDUCE, p->tp, times * ((rows_cut || folds ? once : 0) + p->back), exponents, sizeof(int32_t));
    over_tp(p, ALL_REDUCE, columns_cut ? p->back : 0, rows, sizeof(int32_t)); /* exponents of X for dW */
    share_rows(p, l, x == BY_FEATURES, y == BY_FEATURES);
}

static void add_norm(prediction *p, wide passes, spread input)
{
    const bool bias = p->config->norm == AR_NORM_LAYER && !p->config->norm_no_bias;
    redistribute_hidden(p, passes, p->stream, input);
    for (int i = 0; i <= bias; i++)
        add_vector(p, p->config->hidden, input == BY_TOKENS);
}

/* --- attention: all-to-all (Jacobs et al. 2023, arXiv:2309.14509), ring (Liu et al. 2023, arXiv:2310.01889) ------- */

/* Neighbours exchange heads for positions; keys and values go round the ring, in either pass. Each KV head is on
 * `copies` of the ranks that share heads; backward these share out whom they send to. dK and dV [s, d] are sums over
 * the queries of all heads that share them, on the ring and on the copies. */
static void attend(prediction *p, bool by_heads, wide passes)
{
    const ar_config *c = p->config;
    const wide tp = by_heads ? p->tp : 1, ranks = tp * p->inner, kv = c->kv_heads, d = c->head_dim, seq = p->c->run.seq;
    const wide copies = ranks > kv ? ranks / kv : 1, tp_copies = tp > kv ? tp / kv : 1, both = passes + p->back;
    const wide value = ar_config_value_dim(c), keys = kv * copies * (d + value), local = keys / ranks;
    const wide sent = (p->inner - 1) * (c->heads * (d + value) * both + keys * passes) +
                      (p->inner / (copies / tp_copies) - 1) * keys * p->back;
    const wide hops = (p->ring - 1) * p->inner * keys * both, batch = p->c->run.batch, calls = p->steps * p->back;
    p->moved += p->tp * p->steps * p->tokens * p->inner * (p->ring * (sent + hops) / ranks) * p->element;
    if (c->qk_norm == AR_QK_NORM_WIDTH && by_heads)
        over_tp(p, ALL_GATHER, both, p->tokens * (c->heads + kv * tp_copies) * d, p->element);
    const wide exponents = batch * local + 2 * batch * seq * (kv * copies / ranks), n = batch * seq * local;
    const wide terms = terms_of(p, c->heads / kv * seq, 16384);
    fold(p, p->ring, calls * p->tp * p->inner, exponents, n, terms, p->element, true);
    fold(p, copies, calls * p->cp * p->tp / copies, exponents, n / p->ring, terms, p->element, false);
}

/* Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1): small whole matrices, norms,
 * matrices cut by heads. The gradient of the features of keys that all heads share is a sum over heads. */
static void latent(prediction *p, const ar_linear_split *first, bool by_heads, wide passes)
{
    const ar_config *c = p->config;
    const ar_latent *a = &c->latent;
    const ar_linear_split small = {AR_STYLE_REPLICATE, first->input, {AR_INVARIANT, 0}};
    const ar_linear_split large = {first->style, {AR_INVARIANT, 0}, first->output};
    const wide kv = c->heads * (c->head_dim - a->rope_dim + a->value_dim), q = c->heads * c->head_dim;
    const wide keys = a->kv_rank + a->rope_dim, rank = a->q_rank, shared = p->tokens * a->rope_dim;
    const linear queries = {rank > 0 ? large : *first, rank > 0 ? rank : c->hidden, {q}, .flags = MATRIX};
    if (rank == 0)
        add_linear(p, &queries, passes, 0);
    add_linear(p, &(linear){small, c->hidden, {rank > 0 ? rank : keys, rank > 0 ? keys : 0}, 1, c->qkv_bias, MATRIX},
               passes, 0);
    if (rank > 0) {
        add_vector(p, rank, false);
        add_linear(p, &queries, passes, 0);
    }
    add_vector(p, a->kv_rank, false);
    add_linear(p, &(linear){large, a->kv_rank, {kv}, .flags = MATRIX}, passes, 0);
    fold(p, by_heads ? p->tp : 1, p->cp * p->steps * p->back, p->c->run.batch + shared, shared,
         terms_of(p, c->heads, SIZE_MAX), p->element, false);
}

static void attention(prediction *p, const ar_branch_split *s)
{
    const ar_config *c = p->config;
    const bool by_heads = spread_of(s->first.output) == BY_FEATURES, each = c->qk_norm == AR_QK_NORM_HEAD;
    const bool packed = c->arch == AR_ARCH_GPT2 || c->arch == AR_ARCH_PHI3 || c->arch == AR_ARCH_GPT_NEOX;
    const wide q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim, passes = p->forwards + p->attention;
    const wide copies = by_heads && p->tp > c->kv_heads ? p->tp / c->kv_heads : 1;
    redistribute_hidden(p, passes, spread_of(s->enter.src), spread_of(s->enter.dst));
    if (c->latent.kv_rank > 0)
        latent(p, &s->first, by_heads, passes);
    else
        add_linear(p, &(linear){s->first, c->hidden, {q, kv, kv}, copies, c->qkv_bias, MATRIX | (packed ? PACKED : 0u)},
                   passes, 0);
    for (int i = 0; i < 2 && c->qk_norm != AR_QK_NORM_NONE; i++)
        add_vector(p, each ? c->head_dim : i == 0 ? q : kv, by_heads && each);
    if (c->sinks)
        add_parameter(p, c->heads, 0, by_heads ? 0 : -1, 1, 0);
    attend(p, by_heads, passes);
    add_linear(p, &(linear){s->second, c->heads * ar_config_value_dim(c), {c->hidden}, 1, c->out_bias, MATRIX},
               p->forwards + p->full, p->attention - p->full);
    redistribute_hidden(p, p->forwards + p->full, spread_of(s->leave.src), spread_of(s->leave.dst));
}

/* --- MLP and experts (GShard: Lepikhin et al. 2020, arXiv:2006.16668) --------------------------------------------- */

/* Tokens go to their experts and come back, in either pass, and backward with their weights; each pass routes anew.
 * Rows are as many as if every expert had as many tokens, unless the routes are given. */
static void dispatch(prediction *p, wide passes)
{
    const ar_config *c = p->config;
    const bool gathers = p->layout->dispatch == AR_DISPATCH_ALL_GATHER;
    const wide tokens = p->tokens / (p->whole ? p->tp : 1), slots = tokens * c->experts.per_token;
    const wide calls = p->tp * p->cp * p->steps, both = passes + p->back;
    const wide rows = p->c->routed ? 0 : slots * c->hidden * (p->ep - 1);
    const bool balances = ar_config_balance(c, &p->c->run.loss) == AR_BALANCE_SEQUENCE;
    const wide counts = balances ? p->c->run.batch * (wide)c->experts.n : 0;
    add(&p->by_ep, ALL_GATHER, p->ep, calls * passes, slots * p->ep, sizeof(int32_t));
    add(&p->by_ep, ALL_TO_ALL, p->ep, calls * both * (gathers ? 1 : 2), rows, p->element);
    add(&p->by_ep, ALL_GATHER, p->ep, gathers ? calls * both : 0, tokens * p->ep * c->hidden, p->element);
    add(&p->by_ep, ALL_GATHER, p->ep, gathers ? calls * p->back : 0, slots * p->ep, sizeof(float));
    add(&p->moved, ALL_REDUCE, p->cp, p->tp * p->steps * passes, counts, sizeof(int64_t));
    over_tp(p, ALL_REDUCE, p->whole ? passes : 0, counts, sizeof(int64_t));
}

/* The two layers of an MLP, of which each expert has its own. whole: passes not only up to the second layer's input. */
static void add_mlp(prediction *p, const ar_linear_split *first, const ar_linear_split *second, wide ffn, bool gated,
                    bool bias, unsigned flags, wide whole)
{
    const wide passes = p->forwards + p->full, hidden = p->config->hidden;
    const wide each = flags & OF_EXPERTS ? p->experts : 1;
    for (wide i = 0, once = 1; i < each; i++, once = 0) { /* the first layer's passes are those of all experts */
        add_linear(p, &(linear){*first, hidden, {ffn, gated ? ffn : 0}, 1, bias, flags}, once * passes, 0);
        add_linear(p, &(linear){*second, ffn, {hidden}, 1, bias, flags}, once * whole, passes - whole);
    }
}

/* Router and experts take all features of tokens: whole, or by positions where experts are not cut over tp. */
static void add_experts(prediction *p, const ar_branch_split *s)
{
    const ar_experts *e = &p->config->experts;
    const wide passes = p->forwards + p->full, hidden = p->config->hidden;
    const bool cut = s->first.style == AR_STYLE_COLWISE;
    const ar_placement input = {p->whole ? AR_SHARD : AR_INVARIANT, 1}, inside = {cut ? AR_SHARD : AR_INVARIANT, 2};
    const ar_linear_split none = {AR_STYLE_REPLICATE, input, input};
    const ar_linear_split first = {s->first.style, input, inside}, second = {s->second.style, inside, input};
    const ar_linear_split *const up = p->whole ? &none : &first, *const down = p->whole ? &none : &second;
    const ar_linear_split *const wide_up = s->shared_whole ? &none : &first;
    const ar_linear_split *const wide_down = s->shared_whole ? &none : &second;
    add_linear(p, &(linear){none, hidden, {e->n}, 1, e->bias, 0}, passes, 0);
    if (ar_config_router_bias(p->config))
        add_parameter(p, e->n, 0, -1, 1, FROZEN);
    dispatch(p, passes);
    add_mlp(p, up, down, e->ffn, true, e->bias, MATRIX | OF_EXPERTS, passes);
    if (e->shared > 0)
        add_mlp(p, wide_up, wide_down, e->shared, true, false, MATRIX, passes);
    if (e->shared > 0 && !e->ungated)
        add_linear(p, &(linear){none, hidden, {1}, 1, false, 0}, passes, 0);
}

/* Recomputation of an MLP ends with its second layer's input, unless a norm follows. */
static void feed_forward(prediction *p, const ar_branch_split *s, bool experts)
{
    const ar_config *c = p->config;
    const bool packed = c->arch == AR_ARCH_PHI3 || c->arch == AR_ARCH_GLM4;
    const spread input = !experts ? spread_of(s->enter.dst) : p->whole ? BY_TOKENS : WHOLE;
    const spread output = !experts ? spread_of(s->leave.src) : input;
    const wide whole = p->forwards + (c->norm_place == AR_NORM_BEFORE ? 0 : p->full);
    redistribute_hidden(p, p->forwards + p->full, spread_of(s->enter.src), input);
    if (experts)
        add_experts(p, s);
    else
        add_mlp(p, &s->first, &s->second, c->ffn, c->gated, c->mlp_bias, MATRIX | (packed ? PACKED : 0u), whole);
    redistribute_hidden(p, whole, output, spread_of(s->leave.dst));
}

static void add_block(prediction *p, size_t layer)
{
    const ar_config *c = p->config;
    const ar_plan *plan = &p->c->run.plan;
    const ar_recomputation *r = &p->layout->recompute;
    const bool before = c->norm_place != AR_NORM_AFTER, after = c->norm_place != AR_NORM_BEFORE;
    const bool again = p->back > 0 && layer % (size_t)ari_at_least_one(r->every) == 0, further = layer >= c->layers;
    const ar_placement here = {p->stream == BY_TOKENS ? AR_SHARD : AR_INVARIANT, 1};
    ar_block_split s;
    if (p->st == AR_OK)
        p->st = ari_plan_block(plan, c, layer, ari_plan_by_tokens(plan, (int)p->tp, p->layout->sp), &s);
    if (p->st != AR_OK)
        return;
    p->unit = layer;
    p->full = again && r->part == AR_RECOMPUTE_FULL;
    p->attention = p->full || (again && r->part == AR_RECOMPUTE_SELECTIVE);
    for (int i = 0; i < 2 && further; i++) /* for one more token: DeepSeek-AI 2024, arXiv:2412.19437, section 2.2 */
        add_norm(p, 0, p->stream);
    if (further)
        add_linear(p, &(linear){{AR_STYLE_REPLICATE, here, here}, 2 * (wide)c->hidden, {c->hidden}, .flags = MATRIX},
                   p->forwards, 0);
    if (before)
        add_norm(p, p->forwards + p->full, spread_of(s.norm1));
    attention(p, &s.attention);
    if (after)
        add_norm(p, 0, p->stream);
    if (before && c->residual != AR_RESIDUAL_PARALLEL_ONE_NORM)
        add_norm(p, p->forwards + p->full, spread_of(s.norm2));
    feed_forward(p, &s.mlp, ar_config_has_experts(c, layer));
    for (int i = 0; i < after + further; i++)
        add_norm(p, 0, p->stream);
    p->unit = ROOT;
    p->full = p->attention = 0;
    p->routers += ar_config_has_experts(c, layer);
    p->blocks++;
}

static void add_tokens(prediction *p)
{
    const int cut = p->outer.tokens == AR_EMBEDDING_VOCAB ? 0 : p->outer.tokens == AR_EMBEDDING_HIDDEN ? 1 : -1;
    const bool ends = (p->config->tied || p->config->mtp > 0) && p->pp > 1;
    add_parameter(p, p->config->vocab, p->config->hidden, cut, 1, TABLE | BY_TOKEN | (ends ? AT_ENDS : 0u));
}

/* By vocabulary one rank has a token's row, and the others zeros; shards along features and along tokens change into
 * each other by an all-to-all. Blocks for further tokens have an embedding too. */
static void embed(prediction *p)
{
    const wide tables = 1 + p->config->mtp, all = p->tokens * p->config->hidden, forwards = p->forwards * tables;
    const bool features = p->outer.tokens == AR_EMBEDDING_HIDDEN, vocab = p->outer.tokens == AR_EMBEDDING_VOCAB;
    const wide others = all / p->tp * (p->tp - 1);
    const bool sp = p->stream == BY_TOKENS;
    over_tp(p, sp ? REDUCE_SCATTER : ALL_REDUCE, vocab ? forwards : 0, all, p->element);
    over_tp(p, ALL_TO_ALL, features && sp ? forwards + p->back * tables : 0, others, p->element);
    over_tp(p, ALL_GATHER, features && !sp ? forwards : 0, all, p->element);
    over_tp(p, ALL_GATHER, !features && sp ? p->back * tables : 0, all, p->element);
}

/* Over logits cut by vocabulary a maximum, a denominator and a target a token; label smoothing: two of the former.
 * All heads have one matrix. */
static void add_heads(prediction *p)
{
    const ar_config *c = p->config;
    const wide sums = p->tokens * (p->c->run.loss.label_smoothing > 0.0 ? 2 : 1), versions = p->versions;
    for (size_t i = 0; i <= c->mtp; i++) {
        const bool shared = c->tied || i > 0, cut = spread_of(p->outer.head.output) == BY_FEATURES;
        p->versions = i == 0 ? versions : 0;
        add_linear(p, &(linear){p->outer.head, c->hidden, {c->vocab}, .flags = HEAD | (shared ? SHARED : 0u)}, 1, 0);
        over_tp(p, ALL_REDUCE, cut, sums + p->tokens, sizeof(int32_t));
        over_tp(p, ALL_REDUCE, cut, sums, sizeof(int64_t));
    }
    p->versions = versions;
}

/* --- sums of gradients -------------------------------------------------------------------------------------------- */

/* Bytes of the state of an exact sum of at most so many values (numerics.md, section 2): one value itself, else an
 * index and two numbers that have 32 bits of each value. */
static wide state_bytes(wide values, bool narrow)
{
    static const int bits[2][6] = {{0, 7, 15, 23, 127}, {0, 3, 7, 15, 26, 127}};
    static const wide bytes[2][6] = {{4, 11, 13, 15, 17}, {4, 5, 6, 8, 11, 13}};
    int i = 0;
    while (values > (wide)1 << bits[narrow][i])
        i++;
    return bytes[narrow][i];
}

/* An all-reduce, or a reduce-scatter. Exact: states of `before` values go to the ranks that add them; results come
 * back as values or, where another sum follows, as states of `after` values. */
static void sum_states(prediction *p, wide ranks, wide n, bool narrow, bool scatter, wide before, wide after)
{
    const wide width = narrow ? 2 : 4, back = scatter ? 0 : after > 0 ? state_bytes(after, narrow) : width;
    if (p->exact)
        add(&p->moved, ALL_GATHER, ranks, p->steps, n, state_bytes(before, narrow) + back);
    else
        add(&p->moved, scatter ? REDUCE_SCATTER : ALL_REDUCE, ranks, p->steps, n, width);
}

/* The most values that an element is the sum of before it is summed over so many ranks: one for each part of a
 * sample, of a micro-batch or the step; two for each token of a table. */
static wide values_before(const prediction *p, unsigned flags, wide ranks, bool micro)
{
    size_t parts = 0;
    ari_gradient_moves(p->layout, p->c->run.seq, &parts);
    const wide each = (1 + p->config->mtp) * (flags & BY_TOKEN ? 2 * p->c->run.seq : parts);
    const wide sums = p->summing[0] > ranks ? p->summing[0] / ranks : 1;
    return flags & VECTOR ? ANY : (micro ? p->summed : p->samples) * each * sums;
}

/* ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054; replicas: Zhao et al. 2023, arXiv:2304.11277): gradients are
 * scattered to shares, from stage 2 on in every micro-batch; weights are gathered after the update or (3) before the
 * passes. Terms on tp ranks, and on both ends of a pipeline, are summed before what follows. */
static void sum_bucket(prediction *p, const parameter *b)
{
    const bool narrow = b->flags & NARROW, micro = p->zero >= 2, ends = b->flags & AT_ENDS, spreads = b->flags & SPREAD;
    const wide summing = p->summing[b->flags & OF_EXPERTS], shards = p->shards[b->flags & OF_EXPERTS];
    const wide copies = summing / shards, next = micro ? copies : summing, sets = p->cp * p->dp / (micro ? shards : 1);
    const wide all = b->all * p->cp * p->dp, before = values_before(p, b->flags, next, false);
    const wide after = spreads ? before * p->tp : before, last = next == 1 ? 0 : after;
    const wide often = b->key >> 100 == ROOT ? 1 : p->micro * (p->forwards + 1); /* weights are gathered with ZeRO-3 */
    const wide gathers = p->zero == 3 ? often : p->c->run.steps > 0;
    sum_states(p, spreads ? p->tp : 1, b->most * sets, narrow, false, before, ends ? after : last);
    sum_states(p, ends && p->first ? 2 : 1, b->all * sets, narrow, false, after, 2 * last);
    if (p->layout->zero == 0) {
        sum_states(p, summing, all / summing, narrow, false, before, 0);
        return;
    }
    sum_states(p, shards, all / shards * (micro ? p->micro : 1), narrow, true,
               values_before(p, b->flags, shards, micro), 0);
    sum_states(p, copies, all / summing, narrow, false, values_before(p, b->flags, copies, false), 0);
    add(&p->moved, ALL_GATHER, shards, p->steps * gathers, all / shards, narrow ? 2 : 4);
}

static int by_key(const void *a, const void *b)
{
    const parameter *x = a, *y = b;
    return x->key < y->key ? -1 : x->key > y->key;
}

/* Next fit, one open bucket of each kind (PyTorch's DDP: Li et al. 2020, arXiv:2006.15704), of each unit by itself. */
static void sum_gradients(prediction *p)
{
    const size_t capacity = p->c->run.ddp.bucket_bytes / sizeof(float); /* elements in fp32 */
    parameter open[KINDS] = {{.key = 0}};
    bool used[KINDS] = {false};
    qsort(p->parameters, p->n, sizeof *p->parameters, by_key);
    for (size_t i = 0; i < p->n; i++) {
        const parameter *one = &p->parameters[i];
        parameter *b = &open[one->flags % KINDS];
        bool *const is_used = &used[one->flags % KINDS];
        if (*is_used && b->most + one->most <= capacity && capacity > 0) {
            *b = (parameter){one->key, b->most + one->most, b->all + one->all, b->flags | one->flags};
        } else {
            if (*is_used)
                sum_bucket(p, b);
            *b = *one;
            *is_used = true;
        }
        for (int k = 0; k < KINDS && (i + 1 == p->n || one[1].key >> 100 != one->key >> 100); k++) {
            if (used[k])
                sum_bucket(p, &open[k]);
            used[k] = false;
        }
    }
}

/* --- what else a step moves --------------------------------------------------------------------------------------- */

/* Over so many groups a number of which each rank has a term. */
static void sum_number(prediction *p, wide ranks, wide groups)
{
    sum_states(p, ranks, groups, false, false, ANY, ANY);
}

/* Of routers counts for balancing and biases, and losses; of attentions the largest logits (QK-Clip); and of routers
 * sums over the pipeline. */
static void sum_routers(prediction *p)
{
    const ar_config *c = p->config;
    const ar_loss_options *loss = &p->c->run.loss;
    const bool updates = p->c->run.steps > 0 && p->back > 0, losses = ar_config_router_losses(c, loss);
    const wide biases = updates && loss->router.bias_update > 0.0;
    const wide counts = p->routers * (p->forwards - 1 + biases) * c->experts.n * sizeof(int64_t);
    const wide once = p->first ? p->steps * p->tp * p->cp * p->dp : 0;
    const wide logits = updates && p->c->run.optimizer.qk_clip > 0.0 ? p->blocks * (wide)c->heads * sizeof(int32_t) : 0;
    const bool together = ar_config_balance(c, loss) == AR_BALANCE_LAYERS;
    dp_step(p, ALL_REDUCE, counts + logits, 1);
    over_tp(p, ALL_REDUCE, p->dp, (p->whole ? counts : 0) + logits, 1);
    add(&p->moved, ALL_REDUCE, p->pp, once, together ? c->experts.n : 0, sizeof(int64_t));
    add(&p->moved, ALL_REDUCE, p->pp, once, losses ? ar_config_blocks(c) : 0, sizeof(float));
    sum_number(p, p->summing[0], losses ? p->routers * p->tp : 0);
    sum_number(p, p->whole ? p->tp : 1, losses ? p->routers * p->cp * p->dp : 0);
}

/* --verify-every: claims about each parameter and each rank go over tp, over dp, and over the pipeline (modules.md). */
static void verify(prediction *p)
{
    enum { OF_PARAMETER = 16, OF_RANK = 2 };
    const wide words = (p->n + p->frozen) * (wide)OF_PARAMETER + OF_RANK, ranks = p->summing[0] * p->tp;
    const wide times = p->c->verified * sizeof(int64_t), once = p->first ? times * ranks : 0;
    const bool ends = p->pp > 1 && p->config->arch != AR_ARCH_STACK && (p->config->tied || p->config->mtp > 0);
    add(&p->moved, ALL_GATHER, p->tp, p->cp * p->dp, p->tp * words, times);
    add(&p->moved, ALL_GATHER, p->summing[0], p->tp, ranks * words, times);
    add(&p->moved, ALL_GATHER, ends ? 2 : 1, 2 * ranks, OF_PARAMETER + OF_RANK, once);
    add(&p->moved, ALL_GATHER, p->pp, p->pp, ranks * OF_RANK + 1, once);
}

/* An exponent and two int64 for the norm of all gradients, over the ranks that have different ones. */
static void clip(prediction *p)
{
    const wide width = sizeof(int32_t) + 2 * sizeof(int64_t), shards = p->shards[0];
    const wide calls = p->steps * p->tp * p->cp * p->dp;
    over_tp(p, ALL_REDUCE, p->dp, 1, width);
    add(&p->moved, ALL_REDUCE, p->pp, p->first ? calls : 0, 1, width);
    add(&p->moved, ALL_REDUCE, shards, p->layout->zero > 0 || p->apart ? calls / shards : 0, 1, width);
}

/* Targets, losses (without a head each rank adds those of its own tokens) and all that belongs to the parameters. */
static void take_step(prediction *p)
{
    const wide ends = 1 + p->config->mtp;
    const bool head = p->config->arch != AR_ARCH_STACK;
    dp_step(p, ALL_REDUCE, ends, sizeof(int64_t));
    sum_routers(p);
    sum_number(p, p->last ? p->summing[0] : 1, ends * p->tp);
    sum_number(p, p->last && p->stream == BY_TOKENS && !head ? p->tp : 1, p->cp * p->dp);
    if (p->back == 0)
        return;
    add(&p->moved, ALL_GATHER, p->summing[0], p->tp, 2 * p->summing[0], sizeof(int64_t)); /* equal parameters? */
    dp_step(p, ALL_REDUCE, p->c->run.ddp.find_unused ? p->n : 0, 1);
    if (p->c->run.clip > 0.0 && p->c->run.steps > 0)
        clip(p);
    verify(p);
    sum_gradients(p);
}

static void add_pipeline_rank(prediction *p, size_t rank, size_t stages)
{
    const ar_config *c = p->config;
    const bool head = c->arch != AR_ARCH_STACK;
    size_t layer = 0, n = 0;
    p->first = rank == 0;
    p->last = rank + 1 == p->pp;
    p->n = p->frozen = p->blocks = p->routers = 0;
    if (p->first)
        add_tokens(p);
    if (p->first && c->learned_positions)
        add_parameter(p, c->max_positions, c->hidden, -1, 1,
                      TABLE | (p->stream == BY_TOKENS ? SPREAD : 0u) | (p->c->repeats ? BY_TOKEN : 0u));
    for (size_t stage = rank; stage < stages; stage += (size_t)p->pp) {
        ari_stage_layers(&layer, &n, &p->layout->stages, c->layers, stages, stage);
        for (size_t end = layer + n; layer < end; layer++)
            add_block(p, layer);
    }
    if (p->last && c->final_norm)
        add_norm(p, c->mtp > 0 ? p->forwards : 1, spread_of(p->outer.final_norm));
    if (p->last && head && c->tied && !p->first)
        add_tokens(p);
    if (p->last && head)
        add_heads(p);
    for (layer = c->layers; p->last && layer < ar_config_blocks(c); layer++)
        add_block(p, layer);
    if (p->last && !p->first && c->mtp > 0 && !c->tied)
        add_tokens(p);
    if (p->st == AR_OK)
        take_step(p);
}

static prediction prediction_of(const ari_step_case *c)
{
    const ar_parallel *l = &c->run.parallel;
    const ari_ranks r = ari_ranks_of(l);
    const size_t dp = (size_t)ari_at_least_one(l->dp), cp = (size_t)ari_extent(l, ARI_CUTS_POSITIONS);
    const wide ep = (wide)ari_at_least_one(l->ep), replicas = (wide)ari_at_least_one(l->dp_replicate);
    const wide summing = (wide)ari_extent(l, ari_expert_axes(l)) / ep, steps = c->run.steps > 1 ? c->run.steps : 1;
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
                    .experts = c->config->experts.n / ep,
                    .summing = {dp * cp, summing},
                    .shards = {dp * cp / replicas, summing / replicas},
                    .tokens = (wide)c->run.batch * (c->run.seq / cp),
                    .element = ar_dtype_bytes(ari_activations_of(c->run.precision)),
                    .matrix = ar_dtype_bytes(ari_matrix_dtype(c->run.precision, c->run.storage)),
                    .steps = steps,
                    .forwards = ari_bytes_counts_routes(c) ? 2 : 1,
                    .back = !c->forward_only,
                    .versions = (c->forward_only ? 1 : steps) * (dp < c->run.batch ? dp : c->run.batch),
                    .exact = c->run.numerics == AR_NUMERICS_EXACT,
                    .stream = l->sp && l->tp > 1 ? BY_TOKENS : WHOLE,
                    .whole = ari_experts_unsplit(l),
                    .apart = ari_experts_separate(l),
                    .unit = ROOT};
    p.zero = c->forward_only ? 0 : l->zero > 1 && p.shards[0] == 1 ? 1 : l->zero;
    const wide fewest = c->run.batch / dp, longer = c->run.batch % dp; /* samples of the last dp ranks; the others */
    const wide pieces = (wide)ari_at_least_one(l->micro_batches), least = fewest < pieces ? fewest : pieces;
    p.samples = fewest + (longer > 0);
    p.micro = p.samples < pieces ? p.samples : pieces;
    p.all_micro = longer * p.micro + (dp - longer) * least;
    p.summed = ari_passes_separate(l) ? (p.samples + pieces - 1) / pieces : p.samples;
    return p;
}

bool ari_bytes_counts_routes(const ari_step_case *c)
{
    return ar_config_balance(c->config, &c->run.loss) >= AR_BALANCE_BATCH;
}

size_t ari_bytes_routed_exchanges(const ari_step_case *c, size_t layer)
{
    const ar_recomputation *r = &c->run.parallel.recompute;
    const bool again = r->part == AR_RECOMPUTE_FULL && layer % (size_t)ari_at_least_one(r->every) == 0;
    const size_t ways = c->run.parallel.dispatch == AR_DISPATCH_ALL_GATHER ? 1 : 2; /* there and back, or back alone */
    return ways * ((c->forward_only ? 1u : again ? 3u : 2u) + ari_bytes_counts_routes(c));
}

ar_status ari_bytes_predict(uint64_t *bytes, const ari_step_case *c)
{
    prediction p = prediction_of(c);
    const size_t stages = (size_t)ari_parallel_stages(p.layout), most = 32 + 6 * (size_t)p.experts; /* of a block */
    const bool by_tokens = ari_plan_by_tokens(&c->run.plan, (int)p.tp, p.layout->sp);
    const wide copies = p.apart ? (wide)ari_expert_sequence(p.layout) : p.cp, ranks = p.tp * p.cp * p.dp;
    AR_TRY(ari_plan_outer(&c->run.plan, c->config, by_tokens, &p.outer));
    ARI_OWNED parameter *all = NULL;
    AR_TRY(ARI_ALLOC(&all, (ar_config_blocks(c->config) + 1) * most, "parameters"));
    p.parameters = all;
    const wide messages = (stages - 1) * p.steps * (p.forwards + p.back) * (p.stream == BY_TOKENS ? 1 : p.tp) * p.cp;
    p.moved += messages * p.tokens * c->config->hidden * p.element;     /* between stages */
    add(&p.moved, ALL_GATHER, p.pp, p.steps * ranks, 1, sizeof(float)); /* the loss, to all stages */
    embed(&p);
    for (size_t rank = 0; rank < p.pp; rank++)
        add_pipeline_rank(&p, rank, stages);
    AR_TRY(p.st);
    wide sum = p.moved + p.by_ep / p.ep + p.by_copies / copies;
    if (c->routed)
        sum += c->routed->rows * c->config->hidden * p.element +
               (p.routed_linears > 0 ? c->routed->gradients * (p.routed_row / p.routed_linears) : 0);
    *bytes = (uint64_t)sum;
    return sum <= UINT64_MAX ? AR_OK : ar_error_set(AR_ERR_OVERFLOW, "more bytes than a number of 64 bits holds");
}
