/* SPDX-License-Identifier: Apache-2.0 */
/* How many elements of the parameters the ranks hold, by where each parameter is sharded. */
#include "sim/plan/bytes_impl.h"

typedef struct counter {
    ari_byte_tally sum; /* only its arithmetic and status are used */
    ari_param_elements n;
    size_t tp;
} counter;

/* `copies` on all ranks together of [rows, cols]. */
static void held(counter *k, size_t copies, size_t rows, size_t cols)
{
    const size_t elements = ari_tally_mul(&k->sum, ari_tally_mul(&k->sum, rows, cols), copies);
    k->n.held = ari_tally_add(&k->sum, k->n.held, elements);
}

/* The same of a norm's or a bias's vector, which is stored in fp32 whatever the matrices are in. */
static void held_vector(counter *k, size_t copies, size_t cols)
{
    const size_t before = k->n.held;
    held(k, copies, 1, cols);
    k->n.held_vectors = ari_tally_add(&k->sum, k->n.held_vectors, k->n.held - before);
}

/* So many tensors, whatever their size. */
static void tensors(counter *k, size_t n)
{
    k->n.params = ari_tally_add(&k->sum, k->n.params, n);
}

static void spread_over_tp(counter *k, size_t elements, bool vectors)
{
    k->n.spread = ari_tally_add(&k->sum, k->n.spread, elements);
    if (vectors)
        k->n.spread_vectors = ari_tally_add(&k->sum, k->n.spread_vectors, elements);
}

/* Replicated; spread: each rank has the terms of its own tokens. */
static void replicated_vector(counter *k, size_t n, size_t cols, bool spread)
{
    held_vector(k, k->tp, ari_tally_mul(&k->sum, n, cols));
    if (spread)
        spread_over_tp(k, ari_tally_mul(&k->sum, n, cols), true);
}

static void norm(counter *k, const ari_step_shape *s)
{
    const size_t vectors = s->config->norm == AR_NORM_LAYER ? 2 : 1;
    replicated_vector(k, vectors, s->config->hidden, s->sp);
    tensors(k, vectors);
}

static void attention(counter *k, const ari_step_shape *s)
{
    const ar_config *c = s->config;
    const size_t q = ari_tally_mul(&k->sum, c->heads, c->head_dim);
    const size_t kv = ari_tally_mul(&k->sum, 2 * c->kv_heads, c->head_dim);
    const size_t inputs = s->packed ? 1 : 3;
    tensors(k, inputs * (c->qkv_bias ? 2 : 1) + (c->out_bias ? 2 : 1));
    held(k, 1, c->hidden, q);
    held(k, s->replicas, c->hidden, kv);
    held(k, 1, c->hidden, q);
    if (c->qkv_bias) {
        held_vector(k, 1, q);
        held_vector(k, s->replicas, kv);
    }
    if (c->out_bias)
        replicated_vector(k, 1, c->hidden, s->sp);
}

static void mlp(counter *k, const ari_step_shape *s, ar_mlp_order order)
{
    const ar_config *c = s->config;
    const size_t firsts = c->gated ? 2 : 1, wide = ari_tally_mul(&k->sum, firsts, c->ffn);
    held(k, 1, c->hidden, ari_tally_add(&k->sum, wide, c->ffn));
    tensors(k, (firsts + 1) * (c->mlp_bias ? 2 : 1));
    if (!c->mlp_bias)
        return;
    if (order == AR_MLP_COLUMN_ROW) {
        held_vector(k, 1, wide);
        replicated_vector(k, 1, c->hidden, s->sp);
    } else {
        replicated_vector(k, 1, wide, false); /* added where every rank has all tokens */
        held_vector(k, 1, c->hidden);
    }
}

ar_status ari_count_params(ari_param_elements *n, const ari_step_shape *s, const ar_plan *plan)
{
    const ar_config *c = s->config;
    counter k = {.sum = {.st = AR_OK}, .tp = s->tp};
    held(&k, 1, c->vocab, c->hidden);
    if (c->learned_positions) {
        held(&k, k.tp, c->max_positions, c->hidden);
        if (s->sp)
            spread_over_tp(&k, ari_tally_mul(&k.sum, c->max_positions, c->hidden), false);
    }
    tensors(&k, c->learned_positions ? 2 : 1);
    for (size_t i = 0; i < c->layers && k.sum.st == AR_OK; i++) {
        ar_mlp_order order;
        AR_TRY(ar_plan_mlp_order(plan, c, i, &order));
        norm(&k, s);
        attention(&k, s);
        norm(&k, s);
        mlp(&k, s, order);
    }
    if (c->final_norm)
        norm(&k, s);
    if (s->head && !c->tied) {
        held(&k, 1, c->vocab, c->hidden);
        tensors(&k, 1);
    }
    *n = k.n;
    return k.sum.st;
}
