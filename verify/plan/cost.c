/* SPDX-License-Identifier: Apache-2.0 */
/* What a micro-batch costs a rank, formula by formula: seconds of GEMMs, attention, element-wise kernels and
 * collectives, bytes that the backward pass needs, and parameters. Letters: T tokens of a rank's micro-batch, t ranks
 * of tensor parallelism, h width. A function is a module of the model: its forward pass, its backward pass and what it
 * saves between them. step.c adds these up to a step.
 *
 * Sources: tensor parallelism Shoeybi et al. 2019 (arXiv:1909.08053); sequence parallelism and saved bytes
 * Korthikanti et al. 2022 (arXiv:2205.05198), table 2; flash attention Dao 2023 (arXiv:2307.08691); rings Liu et al.
 * 2023 (arXiv:2310.01889); exchanged heads Jacobs et al. 2023 (arXiv:2309.14509); latent attention DeepSeek-V2
 * (arXiv:2405.04434); experts as Megatron-LM's dispatcher moves them. */
#include "verify/plan/cost.h"

#include <math.h>
#include <string.h>

#include "anyrank/config.h"
#include "ref/core/size.h"
#include "ref/models/family.h"
#include "ref/models/parallel_private.h"
#include "ref/models/plan_private.h"
#include "ref/placement/parallel_private.h"

static const double VALUE = 2.0, FLOAT = 4.0, COUNT = 8.0; /* bytes of a value, a sum and a count */

/* Bytes for each element that an operation saves: its input, of dropout the mask, of the loss fp32 logits, of a router
 * fp32 probabilities (Korthikanti et al., section 4.1). */
static const double SAVED_INPUT = 2.0, SAVED_MASK = 1.0, SAVED_FLOAT = 4.0;
/* For each score that is stored: its probability, and with dropout a mask and what it leaves. Flash attention saves a
 * number for each query of each head. Both gradients of a score in the backward pass. */
static const double SAVED_SCORE = 2.0, SAVED_DROPPED_SCORE = 5.0, SCORE_GRADIENTS = 4.0;
/* Bytes that pass through memory for each stored score: scaling, mask, softmax and dropout. */
static const double SCORE_MOVES[ARI_PASSES] = {7.0, 9.0};

/* How a value lies on the ranks of tensor parallelism. */
typedef enum placed { WHOLE, BY_TOKENS, BY_FEATURES, SUM } placed;

typedef struct model {
    const ari_planned *planned;
    const ari_time_options *options;
    const ar_config *config;
    ari_rates rates;
    ari_links tp, ep, inner, ring, copies;
    double samples, seq;
    double tokens;      /* T */
    double t;           /* ranks of tensor parallelism */
    double ring_ranks;  /* places that keys and values go round */
    double inner_ranks; /* neighbours that exchange heads */
    double chunks;      /* of a collective beside GEMMs; 1: none */
    double seen;        /* share of the scores that no mask hides */
    bool experts_whole; /* experts are not cut over tp */
    bool experts_apart; /* experts have copies on other ranks than the rest */
    placed stream;      /* of values between the branches */
    ar_block_split split;
    ar_outer_split outer;
    size_t layer; /* that the split is of */
    ari_part_cost *part;
    ari_memory_kind kind; /* of what is saved */
    bool in_end;          /* outside of blocks */
    ari_traffic *traffic; /* of the part; NULL: not counted */
} model;

/* --- collectives, kernels and saved bytes ------------------------------------------------------------------------- */

static placed place_of(ar_placement p)
{
    if (p.kind == AR_SHARD)
        return p.dim == 1 || p.dim == -2 ? BY_TOKENS : BY_FEATURES;
    return p.kind == AR_PARTIAL_SUM ? SUM : WHOLE;
}

/* The gradient of a term is whole on each rank. */
static placed gradient_place(placed p)
{
    return p == SUM ? WHOLE : p;
}

/* A collective that nothing hides. */
static void call(model *m, int pass, ari_time_kind over, const ari_links *l, ari_collective kind, double elements,
                 double width)
{
    if (l->ranks <= 1.0)
        return;
    const double seconds = ari_links_call(l, kind, elements, width);
    m->part->pass[pass].seconds[over] += seconds;
    ari_traffic_count(m->traffic, over, l, kind, 1.0, ari_links_sent(l, kind, elements, width), seconds);
}

/* Changes the placement of a value of that many elements on all ranks together: to the whole by an all-gather or an
 * all-reduce; from the whole to a part nothing moves. */
static void redistribute(model *m, int pass, placed from_place, placed to_place, double elements)
{
    if (from_place == to_place || from_place == WHOLE)
        return;
    call(m, pass, ARI_TIME_TP, &m->tp, from_place == SUM ? ARI_MOVES_ALL_REDUCE : ARI_MOVES_ALL_GATHER, elements,
         VALUE);
}

/* There and back. */
static void redistribute_both(model *m, placed from_place, placed to_place, double elements)
{
    redistribute(m, ARI_FORWARD, from_place, to_place, elements);
    redistribute(m, ARI_BACKWARD, gradient_place(to_place), gradient_place(from_place), elements);
}

/* An element-wise kernel: elements that it makes in the forward pass, and that come in the backward pass. */
static void kernel(model *m, ari_gpu_moves what, double forward_elements, double backward_elements)
{
    m->part->pass[ARI_FORWARD].seconds[ARI_TIME_MEMORY] += ari_rates_kernel(&m->rates, what, false, forward_elements);
    m->part->pass[ARI_BACKWARD].seconds[ARI_TIME_MEMORY] += ari_rates_kernel(&m->rates, what, true, backward_elements);
}

static void save(model *m, ari_memory_kind kind, double bytes)
{
    m->part->saved.bytes[m->in_end && kind != ARI_MEMORY_LOGITS ? ARI_MEMORY_OUTER : kind] += bytes;
}

/* Values that an operation works on at a time, in elements. */
static void work(model *m, double backward_elements, double forward_elements)
{
    m->part->workspace = fmax(m->part->workspace, VALUE * backward_elements);
    m->part->forward_workspace = fmax(m->part->forward_workspace, VALUE * forward_elements);
}

/* A GEMM of tokens and the collective of its input or output (elements; NOTHING: none). With K chunks, each of t_a
 * seconds beside a product of t_g, both take t_a + (K-1) max(t_a, t_g) + t_g (parallelism.md). */
static double multiply(model *m, int pass, ari_gpu_product g, ari_collective kind, double elements)
{
    ari_pass_cost *c = &m->part->pass[pass];
    const bool cut = kind == ARI_MOVES_ALL_GATHER || kind == ARI_MOVES_REDUCE_SCATTER;
    const double chunks = cut && m->tp.ranks > 1.0 ? m->chunks : 1.0;
    g.m /= chunks;
    const double product = ari_rates_product(&m->rates, &g);
    c->seconds[ARI_TIME_PRODUCTS] += chunks * product;
    if (kind == ARI_MOVES_NOTHING || m->tp.ranks <= 1.0)
        return chunks * product;
    const double one = ari_links_call(&m->tp, kind, elements / chunks, VALUE);
    const double exposed = one + (chunks - 1.0) * fmax(0.0, one - product);
    c->seconds[ARI_TIME_TP] += exposed;
    m->part->hidden += chunks * one - exposed;
    ari_traffic_count(m->traffic, ARI_TIME_TP, &m->tp, kind, chunks, ari_links_sent(&m->tp, kind, elements, VALUE),
                      chunks * one);
    return chunks * product;
}

/* --- linear layers ------------------------------------------------------------------------------------------------ */

#define WHOLE_VALUE ((ar_placement){AR_INVARIANT, 0})
#define CUT_NOWHERE ((ar_linear_split){AR_STYLE_REPLICATE, WHOLE_VALUE, WHOLE_VALUE})
enum { MOST_OUTPUTS = 3 };
/* Layers that share an input: Y_i = X W_i^T, W_i [out_i, in]. */
typedef struct linear {
    ar_style style;
    placed input, output; /* of X, and of what leaves the layer */
    double rows, in;      /* rows: of X on all ranks of tp together, or of one where X stays as it is */
    int outputs;
    double out[MOST_OUTPUTS]; /* features of all ranks */
    double cut[MOST_OUTPUTS]; /* ranks with different features of it; 0: t. KV heads have copies where t is larger */
    double experts;           /* matrices of a rank, which the rows are divided among; 0: one */
    double earlier;           /* seconds of GEMMs that hide the second gather of X; 0: those of its own dX */
    bool bias, stays;         /* stays: no rank needs another's rows */
    bool no_muon;
    bool saved_already; /* another layer saves X */
    double savers;      /* ranks that save a part of X each; 0: one, or as the style says */
    bool shared;        /* the weight is counted elsewhere */
} linear;

static linear linear_of(ar_linear_split s, double rows, double in, double out)
{
    return (linear){s.style, place_of(s.input), place_of(s.output), .rows = rows, .in = in, .outputs = 1, .out = {out}};
}

static bool gathers(const linear *l)
{
    return !l->stays && l->style != AR_STYLE_ROWWISE && (l->input == BY_TOKENS || l->input == BY_FEATURES);
}

static double muon_products(const model *m, double out, double in, double cut)
{
    const double small = fmin(out, in), large = fmax(out, in);
    const bool stays_cut = m->planned->step.run.optimizer.shards && cut > 1.0;
    const ari_gpu_product gram = {1.0, small, small, large / (stays_cut ? cut : 1.0), false},
                          square = {1.0, small, small, small, false},
                          last = {1.0, small, large / (stays_cut ? cut : 1.0), small, false};
    const double iteration = ari_rates_product(&m->rates, &gram) + ari_rates_product(&m->rates, &square) +
                             ari_rates_product(&m->rates, &last);
    const double sums = stays_cut   ? 5.0 * ari_links_call(&m->tp, ARI_MOVES_ALL_REDUCE, small * small, FLOAT)
                        : cut > 1.0 ? ari_links_call(&m->tp, ARI_MOVES_ALL_REDUCE, small * large, FLOAT)
                                    : 0.0;
    return 5.0 * iteration + sums; /* Newton-Schulz, five times (Jordan et al. 2024) */
}

/* Parameters of the layers, and Muon's work on them. */
static void count_weights(model *m, const linear *l, double in, const double out[])
{
    const double experts = fmax(1.0, l->experts);
    for (int i = 0; i < l->outputs && !l->shared; i++) {
        const double n = experts * out[i] * in, whole = l->style == AR_STYLE_ROWWISE ? l->out[i] : out[i];
        const double all = n + (l->bias ? experts * whole : 0.0), tensors = experts * (l->bias ? 2.0 : 1.0);
        const bool apart = l->experts > 0.0 && m->experts_apart;
        m->part->parameters += all;
        m->part->experts += apart ? all : 0.0;
        *(apart ? &m->part->expert_tensors : &m->part->tensors) += tensors;
        if (m->planned->step.run.optimizer.kind != AR_OPTIMIZER_MUON || l->no_muon)
            continue;
        m->part->matrices += n;
        m->part->muon += experts * muon_products(m, l->out[i], l->in, l->out[i] * l->in / (out[i] * in));
    }
}

/* The input as it is saved, and for a pipeline that defers gradients of weights the gradients of the outputs. */
static void save_input(model *m, const linear *l, double rows, double in, double out)
{
    const ar_parallel *layout = &m->planned->step.run.parallel;
    const bool again = gathers(l) && !layout->keep_gathered;
    const double outputs = l->style == AR_STYLE_ROWWISE && l->output == BY_TOKENS ? out / m->t : out;
    const double bytes = l->saved_already ? 0.0 : SAVED_INPUT * rows * in / (again ? m->t : fmax(1.0, l->savers));
    save(m, m->kind, bytes);
    if (l->experts == 0.0)
        m->part->deferred.bytes[m->in_end ? ARI_MEMORY_OUTER : m->kind] += bytes + VALUE * rows * outputs;
}

/* X once more for dW: beside the products before it where chunks are overlapped. */
static void gather_again(model *m, const linear *l, double products)
{
    const double elements = l->rows * l->in;
    if (m->tp.ranks <= 1.0)
        return;
    const double seconds = ari_links_call(&m->tp, ARI_MOVES_ALL_GATHER, elements, VALUE);
    const double exposed = m->chunks > 1.0 ? fmax(0.0, seconds - (l->earlier > 0.0 ? l->earlier : products)) : seconds;
    m->part->pass[ARI_BACKWARD].seconds[ARI_TIME_TP] += exposed;
    m->part->hidden += seconds - exposed;
    ari_traffic_count(m->traffic, ARI_TIME_TP, &m->tp, ARI_MOVES_ALL_GATHER, 1.0,
                      ari_links_sent(&m->tp, ARI_MOVES_ALL_GATHER, elements, VALUE), seconds);
}

/* Forward: X is gathered or already as the layer takes it, and a row-parallel layer's terms are summed. Backward:
 * dX = dY W with the transposed collectives, then dW = dY^T X, for which a gathered X is gathered again. Returns the
 * seconds of dW. */
static double linear_layer(model *m, const linear *l)
{
    const bool by_rows = l->style == AR_STYLE_COLWISE, by_columns = l->style == AR_STYLE_ROWWISE;
    const double experts = fmax(1.0, l->experts), rows = l->rows / experts,
                 in = by_columns ? ceil(l->in / m->t) : l->in;
    double out[MOST_OUTPUTS], all = 0.0, whole = 0.0, weights = 0.0;
    for (int i = 0; i < l->outputs; i++) {
        out[i] = by_rows ? ceil(l->out[i] / (l->cut[i] > 0.0 ? l->cut[i] : m->t)) : l->out[i];
        all += out[i];
        whole += l->out[i];
    }
    const bool gathered = gathers(l), again = gathered && !m->planned->step.run.parallel.keep_gathered;
    const ari_collective sum = l->output == BY_TOKENS ? ARI_MOVES_REDUCE_SCATTER : ARI_MOVES_ALL_REDUCE,
                         sum_back = l->input == BY_TOKENS ? ARI_MOVES_REDUCE_SCATTER : ARI_MOVES_ALL_REDUCE;
    ari_collective forward = ARI_MOVES_NOTHING, backward = ARI_MOVES_NOTHING;
    if (gathered)
        forward = ARI_MOVES_ALL_GATHER;
    else if (by_columns && l->output != SUM)
        forward = sum;
    if (by_rows)
        backward = sum_back;
    else if (by_columns && l->output == BY_TOKENS)
        backward = ARI_MOVES_ALL_GATHER;
    multiply(m, ARI_FORWARD, (ari_gpu_product){experts, rows, all, in, false}, forward,
             l->rows * (gathered ? l->in : whole));
    if (!by_columns && !l->stays)
        redistribute_both(m, by_rows ? BY_FEATURES : WHOLE, l->output, l->rows * whole);
    const double back = multiply(m, ARI_BACKWARD, (ari_gpu_product){experts, rows, in, all, false}, backward,
                                 l->rows * (by_rows ? l->in : whole));
    if (by_columns && l->input == WHOLE)
        redistribute(m, ARI_BACKWARD, BY_FEATURES, WHOLE, l->rows * l->in);
    for (int i = 0; i < l->outputs; i++)
        weights += ari_rates_product(&m->rates, &(ari_gpu_product){experts, out[i], in, rows, true});
    m->part->pass[ARI_BACKWARD].seconds[ARI_TIME_PRODUCTS] += weights;
    m->part->pass[ARI_BACKWARD].weights += l->experts > 0.0 ? 0.0 : weights;
    if (again)
        gather_again(m, l, back);
    save_input(m, l, l->rows, in, all);
    work(m, fmax(l->rows * (all + in), l->rows * (all / l->outputs + (again ? l->in : 0.0))), l->rows * (all + in));
    count_weights(m, l, in, out);
    return weights;
}

/* Norms scale and, LayerNorm's, shift: parameters that every rank has. */
static double norm_parameters(const model *m, double features)
{
    const ar_config *c = m->config;
    return features * (c->norm == AR_NORM_LAYER && !c->norm_no_bias ? 2.0 : 1.0);
}

/* parameters: of its weights; 0: those of a norm of the stream. */
static void norm_layer(model *m, placed place, double features, double parameters)
{
    const double rows = place == BY_TOKENS ? m->tokens / m->t : m->tokens;
    if (place != m->stream && features == (double)m->config->hidden)
        redistribute_both(m, m->stream, place, m->tokens * features);
    kernel(m, ARI_GPU_MOVES_NORM, rows * features, rows * features);
    save(m, ARI_MEMORY_BETWEEN, SAVED_INPUT * rows * features);
    work(m, 2.0 * rows * features, 2.0 * rows * features);
    m->part->parameters += parameters > 0.0 ? parameters : norm_parameters(m, features);
}

/* --- attention ---------------------------------------------------------------------------------------------------- */

/* Keys that the first n queries of a sequence see of a window's. */
static double keys_before(double n, double window)
{
    return n <= window ? n * (n + 1.0) / 2.0 : window * (window + 1.0) / 2.0 + (n - window) * window;
}

static double keys_seen(size_t first, size_t count, size_t window)
{
    const double end = (double)(first + count), w = window > 0 ? (double)window : end;
    return keys_before(end, w) - keys_before((double)first, w);
}

/* The share of the scores that no mask hides, over all layers, at the last place of a ring, which has most: those that
 * flash attention computes. */
static double seen_scores(const ari_planned *p)
{
    const ar_config *c = p->step.config;
    const ar_parallel *layout = &p->step.run.parallel;
    const size_t places = (size_t)ari_extent(layout, 1u << ARI_AXIS_RING);
    const ar_positions own = ari_positions_ring(places, layout->zigzag, p->step.run.seq, places - 1);
    double sum = 0.0, last = -1.0;
    size_t last_window = 0;
    if (!c->causal)
        return 1.0;
    for (size_t i = 0; i < c->layers; i++) {
        const size_t window = ar_config_window(c, i);
        if (last < 0.0 || window != last_window)
            last = keys_seen(own.first[0], own.count[0], window) + keys_seen(own.first[1], own.count[1], window);
        last_window = window;
        sum += last;
    }
    return sum / (double)c->layers / ((double)p->step.run.seq * (double)ari_positions_count(&own));
}

/* Heads of a rank, before and after neighbours have exchanged some of them for positions. */
typedef struct heads {
    double queries, keys; /* before; ranks with different KV heads are keys_cut */
    double keys_cut;
    double own_queries, own_keys; /* after */
    double positions;             /* after: of the queries */
    double head, value;           /* features */
} heads;

static heads heads_of(const model *m, bool by_heads)
{
    const ar_config *c = m->config;
    const double t = by_heads ? m->t : 1.0, kv = (double)c->kv_heads, queries = (double)c->heads / t;
    const double cut = fmin(m->t, kv), inner = m->inner_ranks; /* of weights, also where heads are gathered */
    return (heads){.queries = queries,
                   .keys = kv / fmin(t, kv),
                   .keys_cut = cut,
                   .own_queries = queries / inner,
                   .own_keys = fmax(1.0, kv / (t * inner)),
                   .positions = m->seq / m->ring_ranks,
                   .head = (double)c->head_dim,
                   .value = (double)ar_config_value_dim(c)};
}

/* Seconds of scores and of their products with the values: two GEMMs, four backward, with flash attention five, since
 * it computes the scores once more and of them only what no mask hides. */
static double score_seconds(const model *m, const heads *a, int pass)
{
    const bool flash = m->planned->flash, backward = pass == ARI_BACKWARD;
    const double products = !backward ? 2.0 : flash ? 5.0 : 4.0;
    const double pairs = m->samples * a->positions * a->own_queries * m->seq * (flash ? m->seen : 1.0);
    const double count = m->samples * a->own_queries;
    const ari_gpu_product scores = {count, a->positions, m->seq, a->head, false},
                          sums = {count, a->positions, a->head, m->seq, false};
    if (m->rates.gpu && !flash)
        return (backward ? 2.0 : 1.0) * (ari_rates_product(&m->rates, &scores) + ari_rates_product(&m->rates, &sums)) +
               ari_rates_moves(&m->rates, SCORE_MOVES[pass] * pairs);
    return ari_rates_scores(&m->rates, &(ari_gpu_scores){products * pairs * (a->head + a->value), a->positions, a->head,
                                                         backward, m->options->flash_2});
}

/* Keys and values of one place go round beside the scores of those before, backward with their gradients. */
static void go_round(model *m, int pass, double bytes, double attention)
{
    const double hops = m->ring_ranks - 1.0, send = ari_links_send(&m->ring, bytes);
    const double exposed = hops * fmax(0.0, send - attention / m->ring_ranks);
    if (hops == 0.0)
        return;
    m->part->pass[pass].seconds[ARI_TIME_CP] += exposed;
    m->part->hidden += hops * send - exposed;
    ari_traffic_count(m->traffic, ARI_TIME_CP, &m->ring, ARI_MOVES_MESSAGE, hops, hops * bytes, hops * send);
}

/* Neighbours exchange heads for positions, in both passes. */
static void exchange_heads(model *m, double elements)
{
    for (int pass = 0; pass < ARI_PASSES; pass++)
        call(m, pass, ARI_TIME_CP, &m->inner, ARI_MOVES_ALL_TO_ALL, (m->inner_ranks - 1.0) * elements, VALUE);
}

/* What is between the projections and the output layer. Returns seconds of the backward pass. */
static double attend(model *m, const heads *a)
{
    const ar_config *c = m->config;
    const double rows = m->samples * a->positions;
    const double q = rows * a->own_queries * a->head, k = rows * a->own_keys * a->head,
                 v = rows * a->own_keys * a->value, context = rows * a->own_queries * a->value;
    const bool packed = ari_part_path(ari_family_of(c->arch), ARI_QKV) && m->inner_ranks * m->ring_ranks == 1.0;
    if (ar_config_turns(c, m->layer)) {
        const double turned = m->tokens * (a->queries * a->head + a->keys * a->head * (packed ? 2.0 : 1.0));
        kernel(m, ARI_GPU_MOVES_ROPE, turned, turned);
    }
    exchange_heads(m, q + k + v);
    exchange_heads(m, context);
    for (int pass = 0; pass < ARI_PASSES; pass++) {
        const double seconds = score_seconds(m, a, pass);
        m->part->pass[pass].seconds[ARI_TIME_PRODUCTS] += seconds;
        m->part->pass[pass].attention += seconds;
        go_round(m, pass, VALUE * (k + v) * (pass + 1), seconds);
    }
    call(m, ARI_BACKWARD, ARI_TIME_TP, &m->copies, ARI_MOVES_ALL_REDUCE, k, VALUE);
    call(m, ARI_BACKWARD, ARI_TIME_TP, &m->copies, ARI_MOVES_ALL_REDUCE, v, VALUE);
    const double scores = rows * a->own_queries * m->seq;
    const bool dropped = m->planned->step.run.dropout > 0.0;
    const double saved_scores =
        m->planned->flash ? FLOAT * rows * a->own_queries : (dropped ? SAVED_DROPPED_SCORE : SAVED_SCORE) * scores;
    save(m, ARI_MEMORY_ATTENTION, SAVED_INPUT * (q + k + v) + saved_scores);
    m->part->scores += m->planned->flash ? 0.0 : saved_scores;
    work(m, q + k + v + context + (m->planned->flash ? 0.0 : SCORE_GRADIENTS / VALUE * scores),
         q + (k + v) * m->ring_ranks + context);
    m->part->parameters += c->sinks ? a->queries : 0.0;
    return score_seconds(m, a, ARI_BACKWARD);
}

/* Norms of queries and keys: of a head's features, or of those of all heads, which each rank gathers. */
static void qk_norms(model *m, const heads *a)
{
    const ar_config *c = m->config;
    const bool width = c->qk_norm == AR_QK_NORM_WIDTH;
    const double all[] = {(double)c->heads * a->head, (double)c->kv_heads * a->head},
                 local[] = {a->queries * a->head, a->keys * a->head};
    for (int i = 0; i < 2 && c->qk_norm != AR_QK_NORM_NONE; i++) {
        const double features = width ? all[i] : local[i];
        if (width && local[i] < all[i])
            call(m, ARI_FORWARD, ARI_TIME_TP, &m->tp, ARI_MOVES_ALL_GATHER, m->tokens * local[i] * m->t, VALUE);
        kernel(m, ARI_GPU_MOVES_NORM, m->tokens * features, m->tokens * features);
        save(m, ARI_MEMORY_BETWEEN, SAVED_INPUT * m->tokens * features);
        m->part->parameters += width ? all[i] : a->head;
    }
}

/* Latent attention: small whole matrices make low-rank queries and keys, norms follow, and matrices cut by heads make
 * queries, keys and values of them (DeepSeek-V2, section 2.1). Features of a key that all heads share get the sum of
 * their gradients. */
static void latent_projections(model *m, const ar_linear_split *first, double earlier)
{
    const ar_config *c = m->config;
    const ar_latent *latent = &c->latent;
    const double h = (double)c->hidden, n = (double)c->heads, q_rank = (double)latent->q_rank,
                 kv_rank = (double)latent->kv_rank, shared = (double)latent->rope_dim;
    const double up = n * ((double)c->head_dim - shared + (double)latent->value_dim);
    const double queries = n * (double)c->head_dim;
    linear down =
        linear_of((ar_linear_split){AR_STYLE_REPLICATE, first->input, WHOLE_VALUE}, m->tokens, h, kv_rank + shared);
    down.bias = c->qkv_bias;
    down.earlier = earlier;
    if (q_rank > 0.0)
        down.out[down.outputs++] = q_rank;
    linear_layer(m, &down);
    norm_layer(m, WHOLE, kv_rank, kv_rank);
    if (q_rank > 0.0)
        norm_layer(m, WHOLE, q_rank, q_rank);
    const ar_linear_split low = {first->style, WHOLE_VALUE, first->output};
    const linear q = linear_of(q_rank > 0.0 ? low : *first, m->tokens, q_rank > 0.0 ? q_rank : h, queries);
    const linear kv = linear_of(low, m->tokens, kv_rank, up);
    linear_layer(m, &q);
    linear_layer(m, &kv);
    if (place_of(first->output) == BY_FEATURES)
        call(m, ARI_BACKWARD, ARI_TIME_TP, &m->tp, ARI_MOVES_ALL_REDUCE, m->tokens * shared, VALUE);
}

static void projections(model *m, const heads *a, const ar_linear_split *first, double earlier)
{
    const ar_config *c = m->config;
    const bool packed = ari_part_path(ari_family_of(c->arch), ARI_QKV) != NULL;
    const double q = (double)c->heads * a->head, kv = (double)c->kv_heads * a->head;
    linear qkv = linear_of(*first, m->tokens, (double)c->hidden, packed ? q + 2.0 * kv : q);
    for (; !packed && qkv.outputs < MOST_OUTPUTS; qkv.outputs++) {
        qkv.out[qkv.outputs] = kv;
        qkv.cut[qkv.outputs] = a->keys_cut;
    }
    qkv.bias = c->qkv_bias;
    qkv.earlier = earlier;
    linear_layer(m, &qkv);
}

static void attention(model *m)
{
    const ar_config *c = m->config;
    const ar_branch_split *s = &m->split.attention;
    const heads a = heads_of(m, place_of(s->first.output) == BY_FEATURES);
    const double stream = m->tokens * (double)c->hidden;
    m->kind = ARI_MEMORY_ATTENTION;
    redistribute_both(m, place_of(s->enter.src), place_of(s->enter.dst), stream);
    linear out = linear_of(s->second, m->tokens, (double)c->heads * a.value, (double)c->hidden);
    out.bias = c->out_bias;
    const double weights = linear_layer(m, &out);
    redistribute_both(m, place_of(s->leave.src), place_of(s->leave.dst), stream);
    const double earlier = weights + attend(m, &a);
    if (c->latent.kv_rank > 0)
        latent_projections(m, &s->first, earlier);
    else
        projections(m, &a, &s->first, earlier);
    qk_norms(m, &a);
}

/* --- MLP and experts ---------------------------------------------------------------------------------------------- */

/* act(gate) * up, or an activation; saves its inputs. */
static void activation(model *m, double elements, bool gated)
{
    kernel(m, gated ? ARI_GPU_MOVES_GATE : ARI_GPU_MOVES_ACTIVATION, elements, elements);
    save(m, ARI_MEMORY_MLP, SAVED_INPUT * elements * (gated ? 2.0 : 1.0));
    work(m, (gated ? 3.0 : 2.0) * elements, (gated ? 3.0 : 2.0) * elements);
}

/* Two linear layers with an activation between them, for `rows` rows. */
typedef struct mlp_form {
    ar_linear_split first, second;
    double rows, ffn, experts;
    bool gated, packed, bias, stays, saved_already;
} mlp_form;

static void mlp_layers(model *m, const mlp_form *f)
{
    const double h = (double)m->config->hidden;
    const bool cut = f->first.style == AR_STYLE_COLWISE && !f->stays;
    const double wide = f->rows * ceil(f->ffn / (cut ? m->t : 1.0));
    linear first = linear_of(f->first, f->rows, h, f->gated && f->packed ? 2.0 * f->ffn : f->ffn),
           second = linear_of(f->second, f->rows, f->ffn, h);
    if (f->gated && !f->packed)
        first.out[first.outputs++] = f->ffn;
    first.experts = second.experts = f->experts;
    first.bias = second.bias = f->bias;
    first.stays = second.stays = f->stays;
    first.saved_already = f->saved_already;
    first.earlier =
        linear_layer(m, &second) + ari_rates_kernel(&m->rates, ARI_GPU_MOVES_GATE, true, f->gated ? wide : 0.0);
    activation(m, wide, f->gated);
    linear_layer(m, &first);
}

static void mlp(model *m)
{
    const ar_config *c = m->config;
    const ar_branch_split *s = &m->split.mlp;
    const double stream = m->tokens * (double)c->hidden;
    const bool packed = ari_part_path(ari_family_of(c->arch), ARI_GATE_UP) != NULL;
    redistribute_both(m, place_of(s->enter.src), place_of(s->enter.dst), stream);
    mlp_layers(m, &(mlp_form){s->first, s->second, m->tokens, (double)c->ffn, 0.0, c->gated, packed, c->mlp_bias, false,
                              false});
    redistribute_both(m, place_of(s->leave.src), place_of(s->leave.dst), stream);
}

/* Counts of rows go to all ranks with other experts, then rows to the ranks of their experts and back, in either
 * pass; with sequence parallelism each rank of tp sends its own tokens' rows. Dispatch by all-gather gives every
 * rank all tokens instead, backward with the weights of their experts. */
static void exchange_with_experts(model *m, double rows)
{
    const bool gathered = m->planned->step.run.parallel.dispatch == AR_DISPATCH_ALL_GATHER;
    const double h = (double)m->config->hidden, others = rows * h * (m->ep.ranks - 1.0), all = rows * m->ep.ranks,
                 tokens = all / (double)m->config->experts.per_token,
                 counts = (double)m->config->experts.n * m->ep.ranks;
    call(m, ARI_FORWARD, ARI_TIME_EP, &m->ep, ARI_MOVES_ALL_GATHER, counts, VALUE);
    for (int pass = 0; pass < ARI_PASSES; pass++) {
        call(m, pass, ARI_TIME_EP, &m->ep, gathered ? ARI_MOVES_ALL_GATHER : ARI_MOVES_ALL_TO_ALL,
             gathered ? tokens * h : others, VALUE);
        if (gathered && pass == ARI_BACKWARD)
            call(m, pass, ARI_TIME_EP, &m->ep, ARI_MOVES_ALL_GATHER, all, VALUE);
        call(m, pass, ARI_TIME_EP, &m->ep, ARI_MOVES_ALL_TO_ALL, others, VALUE);
    }
}

static void shared_expert(model *m, const mlp_form *routed, double tokens)
{
    const ar_experts *e = &m->config->experts;
    const double h = (double)m->config->hidden, local = tokens * h;
    const bool whole = m->split.mlp.shared_whole;
    mlp_form shared = *routed;
    shared.rows = tokens;
    shared.ffn = (double)e->shared;
    shared.experts = 0.0;
    shared.bias = false;
    shared.saved_already = true;
    if (whole) {
        shared.first.style = shared.second.style = AR_STYLE_REPLICATE;
        shared.stays = m->experts_whole;
    } else if (m->experts_whole) { /* each rank of tp has other tokens, and a part of the shared expert */
        shared.first.input = shared.second.output = (ar_placement){AR_SHARD, 1};
        shared.rows = m->tokens;
    }
    mlp_layers(m, &shared);
    kernel(m, ARI_GPU_MOVES_RESIDUAL, local, 2.0 * local);
    if (e->ungated)
        return;
    linear share = linear_of(CUT_NOWHERE, tokens, h, 1.0);
    share.stays = share.no_muon = share.saved_already = true;
    linear_layer(m, &share);
    kernel(m, ARI_GPU_MOVES_GATE, local, local);
    save(m, ARI_MEMORY_MLP, SAVED_INPUT * (local + tokens));
}

/* A router chooses k experts for each token; a row for each of them goes to its expert's rank, through two linear
 * layers and back, and a token's rows are added up. Experts are cut over tp, or whole for each rank's own tokens. */
static void experts(model *m)
{
    const ar_config *c = m->config;
    const ar_experts *e = &c->experts;
    const ar_branch_split *s = &m->split.mlp;
    const double h = (double)c->hidden, k = (double)e->per_token, n = (double)e->n;
    const double tokens = m->experts_whole ? m->tokens / m->t : m->tokens, rows = k * tokens;
    const double routers = m->stream == BY_TOKENS && !m->experts_whole ? m->t : 1.0; /* route their own tokens each */
    const placed inside = m->experts_whole ? BY_TOKENS : WHOLE;
    const mlp_form routed = {.first = {s->first.style, WHOLE_VALUE, s->first.output},
                             .second = {s->second.style, s->second.input, WHOLE_VALUE},
                             .rows = rows,
                             .ffn = (double)e->ffn,
                             .experts = n / m->ep.ranks,
                             .gated = true,
                             .bias = e->bias};
    redistribute_both(m, place_of(s->enter.src), inside, m->tokens * h);
    linear router = linear_of(CUT_NOWHERE, tokens, h, n);
    router.bias = e->bias;
    router.stays = router.no_muon = true;
    router.savers = routers;
    linear_layer(m, &router);
    save(m, ARI_MEMORY_MLP, SAVED_FLOAT * tokens * n / routers);
    kernel(m, ARI_GPU_MOVES_ROUTE, tokens * n, tokens * n);
    m->part->frozen += ar_config_router_bias(c) ? n : 0.0;
    kernel(m, ARI_GPU_MOVES_DISPATCH, rows * h, rows * h + tokens * n);
    exchange_with_experts(m, rows / routers);
    mlp_form cut = routed;
    if (m->experts_whole)
        cut.first.style = cut.second.style = AR_STYLE_REPLICATE;
    cut.stays = m->experts_whole;
    mlp_layers(m, &cut);
    kernel(m, ARI_GPU_MOVES_COMBINE, tokens * h, tokens * h);
    save(m, ARI_MEMORY_MLP, SAVED_INPUT * rows * h / routers);
    kernel(m, ARI_GPU_MOVES_RESIDUAL, 0.0, 2.0 * tokens * h); /* the router's gradient is added */
    if (e->shared > 0)
        shared_expert(m, &routed, tokens);
    redistribute_both(m, inside, place_of(s->leave.dst), m->tokens * h);
}

/* --- parts of the model ------------------------------------------------------------------------------------------- */

static double stream_elements(const model *m)
{
    return m->tokens * (double)m->config->hidden / (m->stream == BY_TOKENS ? m->t : 1.0);
}

static void dropout(model *m, ari_memory_kind kind)
{
    const double n = stream_elements(m);
    if (m->planned->step.run.dropout <= 0.0)
        return;
    kernel(m, ARI_GPU_MOVES_DROPOUT, n, n);
    save(m, kind, SAVED_MASK * n);
}

/* A block: norm, attention and residual, norm, MLP or experts and residual. Backward, gradients of a value that two
 * branches use are added. */
static void block(model *m)
{
    const ar_config *c = m->config;
    const double n = stream_elements(m), h = (double)c->hidden;
    const bool before = c->norm_place != AR_NORM_AFTER, after = c->norm_place != AR_NORM_BEFORE;
    const ari_memory saved_before = m->part->saved;
    const ari_pass_cost forward_before = m->part->pass[ARI_FORWARD];
    if (before)
        norm_layer(m, place_of(m->split.norm1), h, 0.0);
    attention(m);
    if (after)
        norm_layer(m, m->stream, h, 0.0);
    dropout(m, ARI_MEMORY_BETWEEN);
    kernel(m, ARI_GPU_MOVES_RESIDUAL, n, 2.0 * n);
    if (before && c->residual != AR_RESIDUAL_PARALLEL_ONE_NORM)
        norm_layer(m, place_of(m->split.norm2), h, 0.0);
    m->kind = ARI_MEMORY_MLP;
    if (ar_config_has_experts(c, m->layer))
        experts(m);
    else
        mlp(m);
    if (after)
        norm_layer(m, m->stream, h, 0.0);
    dropout(m, ARI_MEMORY_BETWEEN);
    kernel(m, ARI_GPU_MOVES_RESIDUAL, n, 2.0 * n);
    m->part->input += SAVED_INPUT * n;
    for (int k = 0; k < ARI_MEMORY_KINDS; k++)
        m->part->blocks.bytes[k] += m->part->saved.bytes[k] - saved_before.bytes[k];
    for (int k = 0; k < ARI_TIME_KINDS; k++)
        m->part->block.seconds[k] += m->part->pass[ARI_FORWARD].seconds[k] - forward_before.seconds[k];
    m->part->block.attention += m->part->pass[ARI_FORWARD].attention - forward_before.attention;
}

/* Rows of the table of tokens: each rank has some of them, so that the rows are summed over tp; backward each rank gets
 * the gradients of all tokens. */
static void embedding(model *m)
{
    const ar_config *c = m->config;
    const double h = (double)c->hidden, elements = m->tokens * h, n = stream_elements(m);
    const ar_embedding_split how = m->outer.tokens;
    const bool sums = how == AR_EMBEDDING_VOCAB, tokens = m->stream == BY_TOKENS;
    kernel(m, ARI_GPU_MOVES_EMBEDDING, sums ? n : how == AR_EMBEDDING_HIDDEN ? elements / m->t : elements, 0.0);
    if (sums)
        call(m, ARI_FORWARD, ARI_TIME_TP, &m->tp, tokens ? ARI_MOVES_REDUCE_SCATTER : ARI_MOVES_ALL_REDUCE, elements,
             VALUE);
    else if (how == AR_EMBEDDING_HIDDEN)
        call(m, ARI_FORWARD, ARI_TIME_TP, &m->tp, tokens ? ARI_MOVES_ALL_TO_ALL : ARI_MOVES_ALL_GATHER,
             tokens ? elements / m->t * (m->t - 1.0) : elements, VALUE);
    if (tokens)
        call(m, ARI_BACKWARD, ARI_TIME_TP, &m->tp, ARI_MOVES_ALL_GATHER, elements, VALUE);
    if (c->learned_positions) {
        kernel(m, ARI_GPU_MOVES_POSITIONS, n, 0.0);
        dropout(m, ARI_MEMORY_OUTER);
    }
}

static double table_elements(const model *m)
{
    const double cut = m->outer.tokens == AR_EMBEDDING_WHOLE ? 1.0 : m->t;
    return ceil((double)m->config->vocab / (m->outer.tokens == AR_EMBEDDING_VOCAB ? cut : 1.0)) *
           ceil((double)m->config->hidden / (m->outer.tokens == AR_EMBEDDING_HIDDEN ? cut : 1.0));
}

/* The LM head and the loss. Logits that stay cut yield a maximum, a denominator and the target's logit for each
 * token, an all-reduce each. Without a head every element is a term of the loss. */
static void head_and_loss(model *m, bool first)
{
    const ar_config *c = m->config;
    const ar_linear_split *s = &m->outer.head;
    const bool head = ari_part_path(ari_family_of(c->arch), ARI_HEAD) != NULL, cut = place_of(s->output) == BY_FEATURES;
    const double logits = head ? m->tokens * ceil((double)c->vocab / (cut ? m->t : 1.0)) : stream_elements(m);
    const double smoothing = m->planned->step.run.loss.label_smoothing > 0.0 ? 2.0 : 1.0;
    m->kind = ARI_MEMORY_OUTER;
    linear l = linear_of(*s, m->tokens, (double)c->hidden, (double)c->vocab);
    l.no_muon = true;
    l.shared = c->tied || !first;
    if (head)
        linear_layer(m, &l);
    kernel(m, ARI_GPU_MOVES_LOSS, logits, logits);
    if (!head)
        return;
    save(m, ARI_MEMORY_LOGITS, SAVED_FLOAT * logits);
    if (!cut)
        return;
    call(m, ARI_FORWARD, ARI_TIME_TP, &m->tp, ARI_MOVES_ALL_REDUCE, smoothing * m->tokens, FLOAT);
    call(m, ARI_FORWARD, ARI_TIME_TP, &m->tp, ARI_MOVES_ALL_REDUCE, smoothing * m->tokens, COUNT);
    call(m, ARI_FORWARD, ARI_TIME_TP, &m->tp, ARI_MOVES_ALL_REDUCE, m->tokens, FLOAT);
}

/* A block for one more token (DeepSeek-V3, arXiv:2412.19437, section 2.2): the stream and the next token's embedding,
 * normalised and side by side, through a matrix, a block, a norm and the head once more. */
static void further_token(model *m)
{
    const ar_config *c = m->config;
    const double h = (double)c->hidden;
    embedding(m);
    for (int i = 0; i < 3; i++)
        norm_layer(m, m->stream, h, 0.0);
    m->kind = ARI_MEMORY_OUTER;
    linear joined = linear_of(CUT_NOWHERE, m->tokens, 2.0 * h, h);
    joined.input = joined.output = m->stream;
    linear_layer(m, &joined);
    m->in_end = false;
    block(m);
    m->in_end = true;
    head_and_loss(m, false);
}

static void before_layers(model *m)
{
    const ar_config *c = m->config;
    m->kind = ARI_MEMORY_OUTER;
    embedding(m);
    m->part->parameters += table_elements(m);
    if (c->learned_positions)
        m->part->parameters += (double)c->max_positions * (double)c->hidden;
}

static void after_layers(model *m)
{
    const ar_config *c = m->config;
    const double h = (double)c->hidden;
    m->in_end = true;
    if (c->final_norm)
        norm_layer(m, place_of(m->outer.final_norm), h, 0.0);
    head_and_loss(m, true);
    for (size_t i = 0; i < c->mtp; i++)
        further_token(m);
    m->in_end = false;
}

/* --- together ----------------------------------------------------------------------------------------------------- */

/* The samples of a micro-batch: those of the fullest rank, by their mean. */
static double samples_of(const ari_planned *p)
{
    const ar_parallel *layout = &p->step.run.parallel;
    size_t start = 0, samples = 0;
    ari_parallel_rows(&(ar_parallel){.dp = layout->dp}, p->step.run.batch, 0, 0, &start, &samples);
    return (double)samples / ari_at_least_one(layout->micro_batches);
}

static ar_status begin_model(model *m, const ari_planned *p, const ari_time_options *o)
{
    const ar_run *run = &p->step.run;
    const ar_parallel *layout = &run->parallel;
    size_t elements = 0; /* of the largest value of a step, which has to be a size */
    AR_TRY(ari_mul_size(&elements, run->batch, run->seq));
    AR_TRY(ari_mul_size(&elements, elements, p->step.config->hidden));
    const bool sequence = ari_plan_by_tokens(&run->plan, layout->tp, layout->sp);
    *m = (model){.planned = p,
                 .options = o,
                 .config = p->step.config,
                 .rates = ari_time_rates(o),
                 .tp = ari_links_of(p, o, ARI_OVER_TP),
                 .ep = ari_links_of(p, o, ARI_OVER_EP),
                 .inner = ari_links_of(p, o, ARI_OVER_INNER),
                 .ring = ari_links_of(p, o, ARI_OVER_RING),
                 .copies = ari_links_of(p, o, ARI_OVER_COPIES),
                 .samples = samples_of(p),
                 .seq = (double)run->seq,
                 .t = ari_at_least_one(layout->tp),
                 .ring_ranks = ari_extent(layout, 1u << ARI_AXIS_RING),
                 .inner_ranks = ari_extent(layout, 1u << ARI_AXIS_INNER),
                 .seen = seen_scores(p),
                 .experts_whole = ari_experts_unsplit(layout),
                 .experts_apart = ari_experts_separate(layout),
                 .stream = sequence && layout->tp > 1 ? BY_TOKENS : WHOLE};
    m->tokens = m->samples * m->seq / (m->ring_ranks * m->inner_ranks);
    m->chunks = m->tp.inter_node && m->rates.gpu ? 1.0 : ari_planned_overlap(p); /* such overlap copies within a node */
    return ari_plan_outer(&run->plan, p->step.config, sequence, &m->outer);
}

_Static_assert(sizeof(ari_part_cost) % sizeof(double) == 0, "a part's cost has numbers alone");
/* Divides what the blocks of n layers cost together. The largest workspace stays. */
static void take_mean(ari_part_cost *part, ari_traffic *traffic, double n)
{
    const double workspace = part->workspace, forward_workspace = part->forward_workspace;
    double *numbers = (double *)part; /* it has nothing else */
    ari_traffic sum = {.n = 0};
    for (size_t i = 0; i < sizeof *part / sizeof *numbers && n > 1.0; i++)
        numbers[i] /= n;
    part->workspace = workspace;
    part->forward_workspace = forward_workspace;
    if (!traffic || n <= 1.0)
        return;
    ari_traffic_add(&sum, traffic, 1.0 / n);
    *traffic = sum;
}

/* The first layer of a part stands for all; where a plan has rules, which may be of some layers, their mean does. */
static ar_status layers(model *m, ari_model_part part)
{
    const ar_config *c = m->config;
    const ar_plan *plan = &m->planned->step.run.plan;
    double n = 0.0;
    for (m->layer = 0; m->layer < c->layers && (n == 0.0 || plan->rules > 0); m->layer++) {
        if (ar_config_has_experts(c, m->layer) != (part == ARI_PART_EXPERTS))
            continue;
        AR_TRY(ari_plan_block(plan, c, m->layer, m->stream == BY_TOKENS, &m->split));
        block(m);
        n += 1.0;
    }
    take_mean(m->part, m->traffic, n);
    return AR_OK;
}

ar_status ari_micro_cost_of(ari_micro_cost *cost, const ari_planned *p, const ari_time_options *o,
                            ari_traffic traffic[ARI_MODEL_PARTS])
{
    model m;
    const ar_config *c = p->step.config;
    const ar_plan *plan = &p->step.run.plan;
    AR_TRY(begin_model(&m, p, o));
    memset(cost, 0, sizeof *cost);
    for (ari_model_part part = ARI_PART_BEFORE; part < ARI_MODEL_PARTS; part++) {
        m.part = &cost->part[part];
        m.traffic = traffic ? &traffic[part] : NULL;
        if (part == ARI_PART_DENSE || part == ARI_PART_EXPERTS) {
            AR_TRY(layers(&m, part));
            continue;
        }
        m.layer = c->layers + c->mtp - 1;
        AR_TRY(ari_plan_block(plan, c, m.layer, m.stream == BY_TOKENS, &m.split));
        if (part == ARI_PART_BEFORE)
            before_layers(&m);
        else
            after_layers(&m);
    }
    cost->shared_table = c->tied || c->mtp > 0 ? table_elements(&m) : 0.0;
    return AR_OK;
}
