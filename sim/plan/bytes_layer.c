/* SPDX-License-Identifier: Apache-2.0 */
/* What the layers move over tp, forward and backward. T tokens, [rows, cols] a matrix in its full size. */
#include "sim/plan/bytes_impl.h"

/* Longer sums take two int64 an element (docs/numerics.md, section 2). */
enum { TERMS_OF_ONE_INT64 = 8191 };

static size_t sum_width(size_t terms)
{
    return terms > TERMS_OF_ONE_INT64 ? 16 : 8;
}

/* Exponents of a weight's rows or columns: exchanged when its values are new. */
static void weight_exponents(ari_layer_tally *t, size_t n)
{
    if (t->shape->exact)
        ari_tally_all_reduce(&t->weights, n, 4);
}

static void token_exponents(ari_layer_tally *t)
{
    if (t->shape->exact)
        ari_tally_all_reduce(&t->tokens, t->shape->tokens, 4);
}

/* Between shards of positions and all of them, or between shards of features: an fp32 all-gather. */
static void gather(ari_layer_tally *t, size_t features)
{
    ari_tally_pass(&t->tokens, ari_tally_mul(&t->tokens, t->shape->tokens, features), 4);
}

/* A product [T, cols] of `terms` terms, partial over the group, is made complete: on every rank, or (scatter) each
 * rank's own positions. Exact: exponents of B's rows and of A's, int64 partial sums scattered, rounded fp32
 * gathered. */
static void fold(ari_layer_tally *t, size_t cols, size_t terms, bool scatter)
{
    const size_t n = ari_tally_mul(&t->tokens, t->shape->tokens, cols);
    weight_exponents(t, cols);
    token_exponents(t);
    ari_tally_pass(&t->tokens, n, t->shape->exact ? sum_width(terms) : 4);
    if (!scatter)
        ari_tally_pass(&t->tokens, n, 4);
}

/* B's rows, the output features, are sharded: its columns' exponents are the maximum over all of them. */
static void column_forward(ari_layer_tally *t, size_t in, bool sp)
{
    if (sp)
        gather(t, in);
    weight_exponents(t, in);
}

/* out: over all the weights that share the input, since they share dX. */
static void column_backward(ari_layer_tally *t, size_t in, size_t out, bool sp)
{
    fold(t, in, out, sp);
    if (sp && !t->shape->keep_gathered)
        gather(t, in);
}

static void row_forward(ari_layer_tally *t, size_t in, size_t out, bool sp)
{
    fold(t, out, in, sp);
}

/* dX from a weight whose rows (as B) are sharded, and for each of the weights the tokens' exponents of its sharded
 * input. */
static void row_backward(ari_layer_tally *t, size_t out, size_t weights, bool sp)
{
    if (sp)
        gather(t, out);
    weight_exponents(t, out);
    for (size_t i = 0; i < weights; i++)
        token_exponents(t);
}

static void column_row_mlp(ari_layer_tally *t)
{
    const ar_config *c = t->shape->config;
    const bool sp = t->shape->sp;
    column_forward(t, c->hidden, sp);
    row_forward(t, c->ffn, c->hidden, sp);
    if (!t->shape->backward)
        return;
    row_backward(t, c->hidden, 1, sp);
    column_backward(t, c->hidden, ari_tally_mul(&t->tokens, c->gated ? 2 : 1, c->ffn), sp);
}

/* The middle is whole on every rank, whoever holds the positions outside: with sequence parallelism the positions are
 * gathered before and cut after, and so are their gradients. */
static void row_column_mlp(ari_layer_tally *t)
{
    const ar_config *c = t->shape->config;
    const size_t weights = c->gated ? 2 : 1, wide = ari_tally_mul(&t->tokens, weights, c->ffn);
    if (t->shape->sp)
        gather(t, c->hidden);
    row_forward(t, c->hidden, wide, false);
    column_forward(t, c->ffn, false);
    gather(t, c->hidden);
    if (!t->shape->backward)
        return;
    if (t->shape->sp)
        gather(t, c->hidden);
    column_backward(t, c->ffn, c->hidden, false);
    row_backward(t, wide, weights, false);
    gather(t, c->hidden);
}

/* dK and dV [s, d] of a KV head are one sum over the queries of all its query heads, which its replicas share. */
static void fold_replicas(ari_layer_tally *t)
{
    const ari_step_shape *s = t->shape;
    ari_byte_tally *r = &t->replicas;
    const size_t d = s->config->head_dim, group = s->config->heads / s->config->kv_heads;
    const size_t n = ari_tally_mul(r, s->tokens, d), terms = ari_tally_mul(r, group, s->seq);
    for (int i = 0; i < 2; i++) {
        if (s->exact) {
            ari_tally_all_reduce(r, s->tokens, 4);
            ari_tally_all_reduce(r, ari_tally_mul(r, s->samples, d), 4);
        }
        ari_tally_pass(r, n, s->exact ? sum_width(terms) : 4);
        ari_tally_pass(r, n, 4);
    }
}

static void attention(ari_layer_tally *t)
{
    const ar_config *c = t->shape->config;
    const bool sp = t->shape->sp;
    const size_t q = ari_tally_mul(&t->tokens, c->heads, c->head_dim);
    const size_t kv = ari_tally_mul(&t->tokens, 2 * c->kv_heads, c->head_dim);
    column_forward(t, c->hidden, sp);
    row_forward(t, q, c->hidden, sp);
    if (!t->shape->backward)
        return;
    row_backward(t, c->hidden, 1, sp);
    if (t->shape->replicas > 1)
        fold_replicas(t);
    column_backward(t, c->hidden, ari_tally_add(&t->tokens, q, kv), sp);
}

void ari_count_block(ari_layer_tally *t, ar_mlp_order order)
{
    attention(t);
    if (order == AR_MLP_COLUMN_ROW)
        column_row_mlp(t);
    else
        row_column_mlp(t);
}

/* A selection of bit patterns, in 4 bytes. With sequence parallelism each rank takes its positions, and the table's
 * gradient needs those of all. */
void ari_count_embedding(ari_layer_tally *t)
{
    const size_t n = ari_tally_mul(&t->tokens, t->shape->tokens, t->shape->config->hidden);
    if (!t->shape->sp) {
        ari_tally_all_reduce(&t->tokens, n, 4);
        return;
    }
    ari_tally_pass(&t->tokens, n, 4);
    if (t->shape->backward)
        gather(t, t->shape->config->hidden);
}

/* Logits stay sharded: per token a maximum (int32), a denominator (int64), the target's bits (int32). */
void ari_count_head(ari_layer_tally *t)
{
    const ar_config *c = t->shape->config;
    column_forward(t, c->hidden, t->shape->sp);
    ari_tally_all_reduce(&t->tokens, t->shape->tokens, 4 + 8 + 4);
    if (t->shape->backward)
        column_backward(t, c->hidden, c->vocab, t->shape->sp);
}
