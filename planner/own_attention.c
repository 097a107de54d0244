/* SPDX-License-Identifier: Apache-2.0 */
/* What an attention takes: queries, keys and values head by head, the integers of products with them, and of the scores a
 * block at a time; where values are reported, all of them at once. */
#include "planner/own.h"

#include <math.h>

#include "anyrank/device.h"
#include "ref/numerics/integer_sum.h"

static const double WORD = 4.0, LONG = 8.0, ROW_SUMS = 12.0, KEYS = 8.0;

static void take(ari_account *a, double bytes)
{
    ari_account_take(a, ARI_MEMORY_WORKSPACE, bytes);
}

static void give(ari_account *a, double bytes)
{
    ari_account_give(a, ARI_MEMORY_WORKSPACE, bytes);
}

/* The largest block of scores, in bytes: its scores, and what its rows and its keys have of d features. */
typedef struct block {
    double scores, exponents, rows, keys; /* exponents: of its rows */
} block;

/* Whole matrices where they fit, or some rows of one head. */
static block block_of(const ari_account_heads *h)
{
    const double most = (double)AR_CPU_BLOCK_BYTES / WORD, matrix = h->group * h->seq * h->seq, all = h->batch * h->kv;
    const double fit = matrix > 0.0 && matrix <= most ? floor(most / matrix) : 1.0;
    const double matrices = fit < all ? fit : all;
    const double rows = matrix <= most ? matrices * h->group * h->seq : floor(most / h->seq);
    return (block){.scores = WORD * rows * h->seq,
                   .exponents = WORD * rows,
                   .rows = WORD * rows * h->dim,
                   .keys = WORD * matrices * h->seq * h->dim};
}

/* What the product of a block with all its keys takes: exact: the integers of one of them. */
static void multiply_block(ari_account *a, const block *b)
{
    if (a->exact)
        ari_account_touch(a, b->scores + b->exponents);
    ari_account_round(a, b->scores, b->keys);
}

/* Exact: integers of an operand of as many words, with an exponent of each row and column. */
static double operand(const ari_account *a, double words, double rows, double columns)
{
    return a->exact ? words + WORD * (rows + columns) : 0.0;
}

static double reported(const ari_account *a, const ari_account_heads *h)
{
    return a->c->tapped ? h->probs : 0.0;
}

static double kept_of(const ari_account_heads *h)
{
    return ROW_SUMS * h->batch * h->heads * h->seq + KEYS * h->batch * h->seq;
}

void ari_account_attention(ari_account *a, const ari_operation *op)
{
    const ari_account_heads h = ari_account_heads_of(a, op->input, op->inputs);
    const block b = block_of(&h);
    const bool drops = a->c->run.dropout > 0.0;
    const double matrices = h.batch * h.kv, queries = matrices * h.group * h.seq, keys = matrices * h.seq;
    const double operands = operand(a, h.k, keys, 0.0) + operand(a, h.q, queries, 0.0) +
                            operand(a, h.k, matrices * h.dim, keys) + (drops ? 2.0 : 1.0) * reported(a, &h);
    const double block_bytes = (drops ? 2.0 : 1.0) * b.scores;
    ari_account_take(a, ARI_MEMORY_ATTENTION, h.q + 2.0 * h.k);
    ari_account_finish(a, &a->x);
    if (a->c->tapped && a->config->rope)
        ari_account_touch(a, h.q);
    ari_account_take(a, ARI_MEMORY_ATTENTION, kept_of(&h));
    take(a, h.q + operands + b.scores);
    ari_account_round(a, b.rows, b.keys);
    take(a, block_bytes - b.scores);
    multiply_block(a, &b);
    give(a, block_bytes + operands);
    ari_account_take(a, ARI_MEMORY_ATTENTION, h.q);
    give(a, h.q);
    a->x = (ari_account_value){h.q, ARI_MEMORY_ATTENTION, false};
}

/* One of dK and dV is complete: its sums, or the own slice of them, become values. */
static void end_sums(ari_account *a, const ari_account_heads *h, const ari_op_call *fold, double sums, double b)
{
    const double n = h->batch * h->kv * h->seq * h->dim;
    take(a, h->k);
    if (a->exact && fold) {
        const size_t all = (size_t)n, ranks = fold->ranks, rank = a->tp_rank % ranks;
        ari_account_touch(a, sums / n * (double)(all / ranks + (rank < all % ranks)));
    }
    give(a, sums + b);
}

/* Twice: probabilities and gradients of the scores, from which dQ is made and then dK and dV are. */
static void go_back(ari_account *a, const block *b, double sums)
{
    const bool drops = a->c->run.dropout > 0.0;
    const double block_bytes = (drops ? 3.0 : 2.0) * b->scores;
    take(a, b->scores);
    ari_account_round(a, b->rows, b->keys);
    take(a, block_bytes - b->scores);
    ari_account_round(a, b->rows, b->keys);
    if (a->c->tapped)
        ari_account_touch(a, b->scores);
    multiply_block(a, b);
    take(a, a->exact ? 2.0 * sums : 0.0);
    if (a->exact)
        ari_account_touch(a, b->scores);
    ari_account_round(a, b->scores, b->rows);
    give(a, block_bytes);
}

void ari_account_attention_back(ari_account *a, const ari_operation *op)
{
    const ari_account_heads h = ari_account_heads_of(a, op->output, op->outputs);
    const block b = block_of(&h);
    const ari_op_call *fold = ari_account_fold(a, op);
    const double made = h.q + 2.0 * h.k, matrices = h.batch * h.kv, queries = matrices * h.group * h.seq;
    const double keys = matrices * h.seq, features = matrices * h.dim;
    const double limbs = (double)ari_contract_limbs(a->config->heads / a->config->kv_heads * a->c->run.seq);
    const double sums = a->exact ? LONG * limbs * keys * h.dim : h.k;
    const double right = operand(a, h.q, features, queries) + (a->exact ? WORD * keys : 0.0); /* of a sum */
    const double operands = 2.0 * operand(a, h.k, keys, 0.0) + 2.0 * operand(a, h.q, queries, 0.0) +
                            operand(a, h.k, features, keys) + reported(a, &h);
    take(a, 2.0 * h.q + operands + 2.0 * right + (a->exact ? 0.0 : 2.0 * sums) + LONG * queries);
    go_back(a, &b, sums);
    give(a, operands + LONG * queries);
    end_sums(a, &h, fold, sums, right);
    end_sums(a, &h, fold, sums, right);
    give(a, h.q);
    ari_account_give(a, ARI_MEMORY_ATTENTION, made + kept_of(&h));
    take(a, made);
    if (a->c->tapped)
        ari_account_touch(a, h.q);
    give(a, made);
    ari_account_finish(a, &a->x);
    a->x = (ari_account_value){made, ARI_MEMORY_WORKSPACE, false};
}
