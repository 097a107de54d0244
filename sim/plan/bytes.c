/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/plan/bytes.h"

#include "ref/core/size.h"

/* A ring over N ranks moves, all ranks together, (N-1)*D bytes for a reduce-scatter or an all-gather of D bytes, and
 * twice that for an all-reduce. Sums are kept in `total`; the first overflow stays in `st`. */
typedef struct tally {
    size_t peers; /* N - 1 */
    size_t total;
    bool exact;
    ar_status st;
} tally;

static void move(tally *t, size_t times, size_t elements, size_t width)
{
    size_t bytes = t->peers;
    if (t->st == AR_OK)
        t->st = ari_mul_size(&bytes, bytes, times * width);
    if (t->st == AR_OK)
        t->st = ari_mul_size(&bytes, bytes, elements);
    if (t->st == AR_OK)
        t->st = ari_add_size(&t->total, t->total, bytes);
}

static void all_reduce(tally *t, size_t elements, size_t width)
{
    move(t, 2, elements, width);
}

static void all_gather(tally *t, size_t elements, size_t width)
{
    move(t, 1, elements, width);
}

/* A sum of `terms` terms that is partial over the group, made complete on every rank: [rows, cols]. Exact: exponents of
 * the rows of A (every time) and of B (once a step), int64 partial sums scattered, rounded fp32 gathered. */
static void fold(tally *t, size_t rows, size_t cols, size_t terms)
{
    if (!t->exact) {
        all_reduce(t, rows * cols, 4);
        return;
    }
    all_reduce(t, cols, 4);
    all_reduce(t, rows, 4);
    move(t, 1, rows * cols, terms > 8191 ? 16 : 8);
    all_gather(t, rows * cols, 4);
}

/* Exponents by which B, whose rows are sharded, equilibrates: one per term. */
static void equilibrate(tally *t, size_t terms)
{
    if (t->exact)
        all_reduce(t, terms, 4);
}

static void column_forward(tally *t, size_t in)
{
    equilibrate(t, in);
}

static void column_backward(tally *t, size_t tokens, size_t in, size_t out)
{
    fold(t, tokens, in, out);
}

static void row_forward(tally *t, size_t tokens, size_t in, size_t out)
{
    fold(t, tokens, out, in);
}

/* dX from a sharded weight, and for each of the group's weights the tokens' exponents of its sharded input. */
static void row_backward(tally *t, size_t tokens, size_t out, size_t weights)
{
    equilibrate(t, out);
    for (size_t i = 0; i < weights; i++)
        equilibrate(t, tokens);
}

static void mlp(tally *t, const ari_traffic_case *c, size_t tokens, ar_mlp_order order)
{
    const ar_config *m = c->config;
    const size_t weights = m->gated ? 2 : 1, h = m->hidden, wide = weights * m->ffn;
    if (order == AR_MLP_COLUMN_ROW) {
        column_forward(t, h);
        row_forward(t, tokens, m->ffn, h);
        if (c->forward_only)
            return;
        row_backward(t, tokens, h, 1);
        column_backward(t, tokens, h, wide);
        return;
    }
    row_forward(t, tokens, h, wide);
    column_forward(t, m->ffn);
    all_gather(t, tokens * h, 4);
    if (c->forward_only)
        return;
    column_backward(t, tokens, m->ffn, h);
    row_backward(t, tokens, wide, weights);
    all_gather(t, tokens * h, 4);
}

static void attention(tally *t, const ari_traffic_case *c, size_t tokens)
{
    const ar_config *m = c->config;
    const size_t q = m->heads * m->head_dim, kv = m->kv_heads * m->head_dim;
    column_forward(t, m->hidden);
    row_forward(t, tokens, q, m->hidden);
    if (c->forward_only)
        return;
    row_backward(t, tokens, m->hidden, 1);
    column_backward(t, tokens, m->hidden, q + 2 * kv);
}

/* Logits stay sharded: per token a maximum (int32), a denominator (int64), the target's bits (int32). */
static void head(tally *t, const ari_traffic_case *c, size_t tokens)
{
    column_forward(t, c->config->hidden);
    all_reduce(t, tokens, 4);
    all_reduce(t, tokens, 8);
    all_reduce(t, tokens, 4);
    if (!c->forward_only)
        column_backward(t, tokens, c->config->hidden, c->config->vocab);
}

ar_status ari_traffic_bytes(uint64_t *bytes, const ari_traffic_case *c)
{
    tally t = {.peers = (size_t)(c->parallel.tp > 1 ? c->parallel.tp : 1) - 1,
               .exact = c->numerics == AR_NUMERICS_EXACT,
               .st = AR_OK};
    size_t tokens = 0, widest = 0;
    const size_t features = c->config->ffn > c->config->hidden ? c->config->ffn : c->config->hidden;
    AR_TRY(ari_mul_size(&tokens, c->batch, c->seq));
    AR_TRY(ari_mul_size(&widest, tokens, 2 * features)); /* so that rows * cols below fits */
    all_reduce(&t, tokens * c->config->hidden, 4);       /* the embedding's selection */
    for (size_t i = 0; i < c->config->layers && t.st == AR_OK; i++) {
        ar_mlp_order order;
        AR_TRY(ar_plan_mlp_order(&c->plan, c->config, i, &order));
        attention(&t, c, tokens);
        mlp(&t, c, tokens, order);
    }
    if (c->config->arch != AR_ARCH_STACK)
        head(&t, c, tokens);
    *bytes = t.total;
    return t.st;
}
