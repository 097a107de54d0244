/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/plan/bytes_impl.h"

#include "ref/core/size.h"

size_t ari_tally_mul(ari_byte_tally *t, size_t a, size_t b)
{
    size_t product = 0;
    if (t->st == AR_OK)
        t->st = ari_mul_size(&product, a, b);
    return t->st == AR_OK ? product : 0;
}

size_t ari_tally_add(ari_byte_tally *t, size_t a, size_t b)
{
    size_t sum = 0;
    if (t->st == AR_OK)
        t->st = ari_add_size(&sum, a, b);
    return t->st == AR_OK ? sum : 0;
}

void ari_tally_pass(ari_byte_tally *t, size_t elements, size_t width)
{
    const size_t bytes = ari_tally_mul(t, elements, width);
    t->bytes = ari_tally_add(t, t->bytes, ari_tally_mul(t, t->links, bytes));
}

void ari_tally_all_reduce(ari_byte_tally *t, size_t elements, size_t width)
{
    ari_tally_pass(t, elements, width);
    ari_tally_pass(t, elements, width);
}

/* Forward and backward passes: at least the one without an update. */
static size_t steps_of(const ari_traffic_case *c)
{
    return c->run.steps > 1 ? (size_t)c->run.steps : 1;
}

static ar_status shape_of(ari_step_shape *s, const ari_traffic_case *c)
{
    const size_t tp = (size_t)ari_at_least_one(c->run.parallel.tp), kv = c->config->kv_heads;
    *s = (ari_step_shape){.config = c->config,
                          .packed = c->config->arch == AR_ARCH_GPT2,
                          .head = c->config->arch != AR_ARCH_STACK,
                          .exact = c->run.numerics == AR_NUMERICS_EXACT,
                          .backward = !c->forward_only,
                          .sp = c->run.parallel.sp && tp > 1,
                          .keep_gathered = c->run.parallel.keep_gathered,
                          .matrix = c->run.storage == AR_BF16 ? 2 : 4,
                          .tp = tp,
                          .samples = c->run.batch,
                          .seq = c->run.seq,
                          .replicas = kv > 0 && tp > kv ? tp / kv : 1};
    return ari_mul_size(&s->tokens, c->run.batch, c->run.seq);
}

/* The layers, over tp. Weights are new at the start and after each update; each of the dp groups has its own copies,
 * and says so where it has samples. */
static ar_status count_layers(ari_byte_tally *total, const ari_traffic_case *c, const ari_step_shape *s)
{
    const size_t dp = (size_t)ari_at_least_one(c->run.parallel.dp), steps = steps_of(c);
    const size_t groups = s->tp / s->replicas; /* of replicas, in a group of tp */
    ari_layer_tally t = {.shape = s,
                         .weights.links = s->tp - 1,
                         .tokens.links = s->tp - 1,
                         .replicas.links = (s->replicas - 1) * groups};
    ari_count_embedding(&t);
    for (size_t i = 0; i < c->config->layers && t.tokens.st == AR_OK; i++) {
        ar_mlp_order order;
        AR_TRY(ar_plan_mlp_order(&c->run.plan, c->config, i, &order));
        ari_count_block(&t, order);
    }
    if (s->head)
        ari_count_head(&t);
    AR_TRY(t.weights.st);
    AR_TRY(t.tokens.st);
    AR_TRY(t.replicas.st);
    const size_t versions = c->forward_only ? 1 : steps;
    const size_t groups_at_work = dp < c->run.batch ? dp : c->run.batch;
    const size_t weights = ari_tally_mul(total, ari_tally_mul(total, t.weights.bytes, groups_at_work), versions);
    const size_t tokens = ari_tally_mul(total, ari_tally_add(total, t.tokens.bytes, t.replicas.bytes), steps);
    total->bytes = ari_tally_add(total, total->bytes, ari_tally_add(total, weights, tokens));
    return total->st;
}

/* A sum of terms. Exact: the accumulator's index (u8) and its two int64. */
static void reduce_terms(ari_byte_tally *t, const ari_step_shape *s, size_t elements, size_t width)
{
    if (!s->exact) {
        ari_tally_all_reduce(t, elements, width);
        return;
    }
    ari_tally_all_reduce(t, elements, 1);
    ari_tally_all_reduce(t, elements, 2 * 8);
}

static void reduce_gradients(ari_byte_tally *t, const ari_step_shape *s, size_t elements, size_t vectors)
{
    reduce_terms(t, s, elements - vectors, s->matrix);
    reduce_terms(t, s, vectors, 4);
}

/* The same, of which each rank gets its share only: the index is still needed whole, to which the own terms are raised
 * before they are added. */
static void scatter_gradients(ari_byte_tally *t, const ari_step_shape *s, size_t elements, size_t width)
{
    if (s->exact)
        ari_tally_all_reduce(t, elements, 1);
    ari_tally_pass(t, elements, s->exact ? 2 * 8 : width);
}

/* Gradients of a step over dp, already summed over tp, and with ZeRO the weights made of them. */
static void count_gradients(ari_byte_tally *ranks, const ari_traffic_case *c, const ari_step_shape *s,
                            const ari_param_elements *n)
{
    const size_t matrices = n->held - n->held_vectors;
    if (c->run.parallel.zero == 0) {
        reduce_gradients(ranks, s, n->held, n->held_vectors);
        return;
    }
    scatter_gradients(ranks, s, matrices, s->matrix);
    scatter_gradients(ranks, s, n->held_vectors, 4);
    if (c->run.steps == 0)
        return;
    ari_tally_pass(ranks, matrices, s->matrix);
    ari_tally_pass(ranks, n->held_vectors, 4);
}

/* Which parameters got a gradient on any rank: a byte each. */
static void count_unused(ari_byte_tally *dp_groups, const ari_traffic_case *c, const ari_param_elements *n)
{
    if (c->run.ddp.find_unused)
        ari_tally_all_reduce(dp_groups, n->params, 1);
}

/* An exponent, then two int64, where there is an update: over the ranks that hold different elements. */
static void count_norm(ari_byte_tally *tp_groups, ari_byte_tally *dp_groups, const ari_traffic_case *c)
{
    if (!(c->run.clip > 0.0) || c->run.steps == 0)
        return;
    ari_tally_all_reduce(tp_groups, 1, 4 + 2 * 8);
    if (c->run.parallel.zero > 0)
        ari_tally_all_reduce(dp_groups, 1, 4 + 2 * 8);
}

/* Gradients and loss of a step, over tp where their terms are spread over it, then over dp; and the gradient norm. */
static ar_status count_step(ari_byte_tally *total, const ari_traffic_case *c, const ari_step_shape *s,
                            const ari_param_elements *n)
{
    const size_t dp = (size_t)ari_at_least_one(c->run.parallel.dp);
    ari_byte_tally tp_groups = {.st = AR_OK}, dp_groups = {.st = AR_OK}, ranks = {.links = dp - 1, .st = AR_OK};
    tp_groups.links = ari_tally_mul(&tp_groups, s->tp - 1, dp);
    dp_groups.links = ari_tally_mul(&dp_groups, dp - 1, s->tp);
    ari_tally_all_reduce(&dp_groups, 1, 8); /* the number of targets */
    reduce_terms(&dp_groups, s, 1, 4);      /* the loss */
    if (s->sp && !s->head)
        reduce_terms(&tp_groups, s, 1, 4); /* the loss sums all tokens' features */
    if (s->backward) {
        reduce_gradients(&tp_groups, s, n->spread, n->spread_vectors);
        count_gradients(&ranks, c, s, n);
        count_unused(&dp_groups, c, n);
        count_norm(&tp_groups, &dp_groups, c);
    }
    AR_TRY(tp_groups.st);
    AR_TRY(dp_groups.st);
    AR_TRY(ranks.st);
    const size_t step = ari_tally_add(total, ari_tally_add(total, tp_groups.bytes, dp_groups.bytes), ranks.bytes);
    total->bytes = ari_tally_add(total, total->bytes, ari_tally_mul(total, step, steps_of(c)));
    return total->st;
}

/* Data-parallel ranks see whether they mean the same parameters: a hash and a number of each. */
static void count_agreement(ari_byte_tally *total, const ari_traffic_case *c)
{
    const size_t dp = (size_t)ari_at_least_one(c->run.parallel.dp), tp = (size_t)ari_at_least_one(c->run.parallel.tp);
    if (!c->forward_only)
        ari_tally_pass(total, ari_tally_mul(total, dp, tp), 2 * 8);
}

/* What each rank says of each of its parameters, and of itself, goes over tp, then over dp (docs/gradients.md). */
static ar_status count_verified(ari_byte_tally *total, const ari_traffic_case *c, const ari_param_elements *n)
{
    enum { OF_A_PARAMETER = 128, OF_A_RANK = 16 };
    const size_t dp = (size_t)ari_at_least_one(c->run.parallel.dp), tp = (size_t)ari_at_least_one(c->run.parallel.tp);
    ari_byte_tally groups = {.links = (tp - 1) * dp, .st = AR_OK};
    const size_t said = ari_tally_add(&groups, ari_tally_mul(&groups, n->params, OF_A_PARAMETER), OF_A_RANK);
    ari_tally_pass(&groups, tp, said);
    groups.links = (dp - 1) * tp;
    ari_tally_pass(&groups, dp * tp, said);
    AR_TRY(groups.st);
    total->bytes = ari_tally_add(total, total->bytes, ari_tally_mul(total, groups.bytes, (size_t)c->verified));
    return total->st;
}

ar_status ari_traffic_bytes(uint64_t *bytes, const ari_traffic_case *c)
{
    ari_step_shape s;
    ari_param_elements n;
    ari_byte_tally total = {.links = (size_t)ari_at_least_one(c->run.parallel.dp) - 1, .st = AR_OK};
    AR_TRY(shape_of(&s, c));
    AR_TRY(ari_count_params(&n, &s, &c->run.plan));
    /* Parameters are broadcast over dp before the first step. */
    ari_tally_pass(&total, n.held - n.held_vectors, s.matrix);
    ari_tally_pass(&total, n.held_vectors, 4);
    count_agreement(&total, c);
    AR_TRY(count_layers(&total, c, &s));
    AR_TRY(count_step(&total, c, &s, &n));
    AR_TRY(count_verified(&total, c, &n));
    *bytes = total.bytes;
    return AR_OK;
}
