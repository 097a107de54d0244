/* SPDX-License-Identifier: Apache-2.0 */
/* How many elements of the parameters the ranks hold, by where each parameter is sharded. */
#include "sim/plan/bytes_impl.h"

typedef struct counter {
    ari_tally sum; /* only its arithmetic and status are used */
    ari_param_elements n;
    size_t tp;
} counter;

/* `copies` on all ranks together of [rows, cols]. */
static void held(counter *k, size_t copies, size_t rows, size_t cols)
{
    const size_t elements = ari_tally_mul(&k->sum, ari_tally_mul(&k->sum, rows, cols), copies);
    k->n.held = ari_tally_add(&k->sum, k->n.held, elements);
}

/* So many tensors, whatever their size. */
static void tensors(counter *k, size_t n)
{
    k->n.params = ari_tally_add(&k->sum, k->n.params, n);
}

/* Replicated; spread: each rank has the terms of its own tokens. */
static void replicated(counter *k, size_t rows, size_t cols, bool spread)
{
    held(k, k->tp, rows, cols);
    if (spread)
        k->n.spread = ari_tally_add(&k->sum, k->n.spread, ari_tally_mul(&k->sum, rows, cols));
}

static void norm(counter *k, const ari_step_shape *s)
{
    const size_t vectors = s->config->norm == AR_NORM_LAYER ? 2 : 1;
    replicated(k, vectors, s->config->hidden, s->sp);
    tensors(k, vectors);
}

static void attention(counter *k, const ari_step_shape *s)
{
    const ar_config *c = s->config;
    const size_t rows = c->hidden + (c->qkv_bias ? 1 : 0);
    const size_t inputs = c->arch == AR_ARCH_GPT2 ? 1 : 3; /* q, k and v are one there */
    tensors(k, inputs * (c->qkv_bias ? 2 : 1) + (c->out_bias ? 2 : 1));
    held(k, 1, rows, ari_tally_mul(&k->sum, c->heads, c->head_dim));
    held(k, s->replicas, rows, ari_tally_mul(&k->sum, 2 * c->kv_heads, c->head_dim));
    held(k, 1, c->hidden, ari_tally_mul(&k->sum, c->heads, c->head_dim));
    if (c->out_bias)
        replicated(k, 1, c->hidden, s->sp);
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
        held(k, 1, 1, wide);
        replicated(k, 1, c->hidden, s->sp);
    } else {
        replicated(k, 1, wide, false); /* added where every rank has all tokens */
        held(k, 1, 1, c->hidden);
    }
}

ar_status ari_count_params(ari_param_elements *n, const ari_step_shape *s, const ar_plan *plan)
{
    const ar_config *c = s->config;
    counter k = {.sum = {.st = AR_OK}, .tp = s->tp};
    held(&k, 1, c->vocab, c->hidden);
    if (c->learned_positions)
        replicated(&k, c->max_positions, c->hidden, s->sp);
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
    if (c->arch != AR_ARCH_STACK && !c->tied) {
        held(&k, 1, c->vocab, c->hidden);
        tensors(&k, 1);
    }
    *n = k.n;
    return k.sum.st;
}
