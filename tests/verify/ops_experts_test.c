/* SPDX-License-Identifier: Apache-2.0 */
/* The list of a step's operations with experts in the MLPs' place: shapes, collectives, products, parameters and buckets
 * by hand. */
#include "support/together.h"
#include "tests/verify/ops_find.h"

/* 5 experts of 40, of which a token goes to 2; h = 24, 4 heads of 6 on 2 KV heads. */
#define MODEL MIXTRAL(32, 24, 40, 2, 4, 2, 5, 2)
enum { H = 24, F = 40, E = 5, K = 2, B = 2, S = 8, SLOTS = B * S * K };

static ari_step_case exact_of(const ar_config *c, ar_parallel parallel)
{
    return case_of(c, parallel, B, S, AR_NUMERICS_EXACT);
}

static bool is_call(const ari_op_call *call, ari_call_kind kind, size_t elements, ar_dtype dtype, ari_role role)
{
    return call->kind == kind && call->elements == elements && call->dtype == dtype && call->role == role;
}

/* The exponents of each expert's own operand, once for each version of the weights. */
static bool is_of_each(const ari_op_call *call, size_t elements, ari_role role)
{
    return is_call(call, ARI_CALL_ALL_REDUCE, elements, AR_I32, role) && call->repeats == E && call->experts == E &&
           call->often == ARI_EACH_VERSION;
}

/* A sum over tp that is whole afterwards. */
static bool is_fold(const ari_op_call *call)
{
    return is_call(&call[0], ARI_CALL_ALL_REDUCE, SLOTS, AR_I32, ARI_EXPERTS) &&
           is_call(&call[1], ARI_CALL_REDUCE_SCATTER, SLOTS * H, AR_I64, ARI_EXPERTS) &&
           is_call(&call[2], ARI_CALL_ALL_GATHER, SLOTS * H, AR_F32, ARI_NO_ROLE) && call[0].repeats == 1;
}

CLAIM(rows_of_experts_are_whole_and_their_features_cut)
{
    const ar_config c = config_of(MODEL);
    const ari_step_case t = exact_of(&c, (ar_parallel){.tp = 2, .sp = true});
    const ari_operation in = found_on(0, &t, ARI_OPERATION_REDISTRIBUTE, ARI_PASS_FORWARD, ARI_MLP, 0).op[0];
    const ari_operation route = the_only(&t, ARI_OPERATION_ROUTE, ARI_PASS_FORWARD, ARI_ROUTES, 0);
    const ari_operation rows = the_only(&t, ARI_OPERATION_DISPATCH, ARI_PASS_FORWARD, ARI_EXPERTS, 0);
    const ari_operation first = the_only(&t, ARI_OPERATION_PRODUCT, ARI_PASS_FORWARD, ARI_EXPERT_GATE, 0);
    const ari_operation down = the_only(&t, ARI_OPERATION_PRODUCT, ARI_PASS_FORWARD, ARI_EXPERT_DOWN, 0);
    const ari_operation sum = the_only(&t, ARI_OPERATION_COMBINE, ARI_PASS_FORWARD, ARI_EXPERTS, 0);
    LOCAL(in.output[0], B, S, H);
    cr_expect(in.calls == 1 && is_call(in.call, ARI_CALL_ALL_GATHER, B * S * H, AR_F32, ARI_MLP));
    LOCAL(route.output[0], B, S, E);
    LOCAL(rows.output[0], B, S * K, H);
    LOCAL(first.weight[1], F / 2, H);
    cr_expect_eq(first.weight[1].experts, E);
    LOCAL(first.output[1], B, S * K, F / 2);
    LOCAL(down.weight[0], H, F / 2);
    LOCAL(down.output[0], B, S * K, H);
    LOCAL(sum.output[0], B, S, H);
    cr_expect_eq(first.multiply_adds, 2.0 * SLOTS * H * F / 2);
    cr_expect_eq(down.multiply_adds, 1.0 * SLOTS * H * F / 2);
}

CLAIM(rows_of_all_experts_are_summed_together)
{
    const ar_config c = config_of(MODEL);
    ari_step_case t = exact_of(&c, (ar_parallel){.tp = 2});
    const ari_operation first = the_only(&t, ARI_OPERATION_PRODUCT, ARI_PASS_FORWARD, ARI_EXPERT_GATE, 0);
    const ari_operation down = the_only(&t, ARI_OPERATION_PRODUCT, ARI_PASS_FORWARD, ARI_EXPERT_DOWN, 0);
    const ari_operation dx = the_only(&t, ARI_OPERATION_PRODUCT, ARI_PASS_BACKWARD, ARI_EXPERT_GATE, 0);
    const ari_operation dact = the_only(&t, ARI_OPERATION_PRODUCT, ARI_PASS_BACKWARD, ARI_EXPERT_DOWN, 0);
    cr_expect(first.calls == 1 && is_of_each(first.call, H, ARI_EXPERT_GATE));
    cr_expect(down.calls == 4 && is_of_each(down.call, H, ARI_EXPERT_DOWN) && is_fold(&down.call[1]));
    cr_expect(dact.calls == 1 && is_of_each(dact.call, H, ARI_EXPERT_DOWN));
    cr_expect(dx.calls == 4 && is_of_each(dx.call, H, ARI_EXPERT_GATE) && is_fold(&dx.call[1]));
    const ari_operation grad = the_only(&t, ARI_OPERATION_WEIGHT_GRADIENT, ARI_PASS_BACKWARD, ARI_EXPERT_DOWN, 0);
    cr_expect(grad.calls == 1 && is_call(grad.call, ARI_CALL_ALL_REDUCE, SLOTS, AR_I32, ARI_EXPERTS));
    t.run.numerics = AR_NUMERICS_NATIVE;
    const ari_operation native = the_only(&t, ARI_OPERATION_PRODUCT, ARI_PASS_FORWARD, ARI_EXPERT_DOWN, 0);
    cr_expect(native.calls == 1 && is_call(native.call, ARI_CALL_ALL_REDUCE, SLOTS * H, AR_F32, ARI_EXPERTS));
}

/* One of the ranks gets the others' rows; with up's go no exponents, nor x, which gate has met. */
CLAIM(ranks_that_share_positions_bring_every_experts_rows_together)
{
    const ar_config c = config_of(MODEL);
    const ari_step_case t = exact_of(&c, (ar_parallel){.cp = 2});
    static const ari_role roles[] = {ARI_EXPERT_DOWN, ARI_EXPERT_GATE, ARI_EXPERT_UP};
    const size_t features[][2] = {{F, H}, {H, F}, {0, F}}, half = SLOTS / 2;
    for (int i = 0; i < 3; i++) {
        const ari_operation g = the_only(&t, ARI_OPERATION_WEIGHT_GRADIENT, ARI_PASS_BACKWARD, roles[i], 0);
        const ari_op_call *last = &g.call[g.calls - 1];
        cr_expect_eq(g.calls, i < 2 ? 4 : 1);
        cr_expect(is_call(last, ARI_CALL_ALL_TO_ALL, half * features[i][1], AR_F32, ARI_EXPERTS) && last->routed);
        cr_expect_eq(g.output[0].experts, E);
        if (i == 2)
            continue;
        cr_expect(is_call(&g.call[0], ARI_CALL_ALL_GATHER, (size_t)2 * E * B, AR_I64, ARI_EXPERTS));
        cr_expect(is_call(&g.call[1], ARI_CALL_ALL_TO_ALL, half, AR_F32, ARI_EXPERTS));
        cr_expect(is_call(&g.call[2], ARI_CALL_ALL_TO_ALL, half * features[i][0], AR_F32, ARI_EXPERTS));
    }
}

/* --- order and what is made again --------------------------------------------------------------------------------- */

typedef struct step {
    ari_operation_kind kind;
    ari_role role;
    bool recomputed;
} step;
#define OP(kind, role)                          \
    {                                           \
        ARI_OPERATION_##kind, ARI_##role, false \
    }
#define AGAIN(kind, role)                      \
    {                                          \
        ARI_OPERATION_##kind, ARI_##role, true \
    }

typedef struct steps {
    ari_operation_pass pass;
    const step *of;
    size_t n, at;
} steps;

static ar_status follow(void *user, const ari_operation *op)
{
    steps *s = user;
    const bool experts = (op->role >= ARI_ROUTER && op->role <= ARI_MLP) && op->layer == 0 && op->pass == s->pass;
    if (!experts || op->kind == ARI_OPERATION_REDISTRIBUTE)
        return AR_OK;
    cr_assert_lt(s->at, s->n);
    const step *e = &s->of[s->at++];
    cr_expect(op->kind == e->kind && op->role == e->role && op->recomputed == e->recomputed, "%zu: %s of %d%s", s->at,
              ari_operation_name(op->kind), (int)op->role, op->recomputed ? " again" : "");
    return AR_OK;
}

static void expect_order(const ari_step_case *t, ari_operation_pass pass, const step *of, size_t n)
{
    steps s = {.pass = pass, .of = of, .n = n};
    cr_assert_ok(ari_operations(t, ARI_OPS_STEP, 0, follow, &s));
    cr_expect_eq(s.at, n);
}
#define ORDER(t, pass, of) expect_order((t), (pass), (of), sizeof(of) / sizeof *(of))

#define FORWARD                                                                                                     \
    OP(PRODUCT, ROUTER), OP(ROUTE, ROUTES), OP(DISPATCH, EXPERTS), OP(PRODUCT, EXPERT_GATE), OP(GATE, EXPERT_GATE), \
        OP(PRODUCT, EXPERT_DOWN), OP(COMBINE, EXPERTS), OP(PRODUCT, SHARED_GATE), OP(GATE, SHARED_ACTIVATION),      \
        OP(PRODUCT, SHARED_DOWN), OP(PRODUCT, SHARED_SHARE), OP(GATE, SHARED_EXPERT), OP(RESIDUAL, MLP)
#define BACKWARD                                                                                                     \
    OP(COMBINE, EXPERTS), OP(PRODUCT, EXPERT_DOWN), AGAIN(GATE, EXPERT_GATE), OP(WEIGHT_GRADIENT, EXPERT_DOWN),      \
        OP(GATE, EXPERT_GATE), OP(PRODUCT, EXPERT_GATE), AGAIN(DISPATCH, EXPERTS), OP(WEIGHT_GRADIENT, EXPERT_GATE), \
        OP(WEIGHT_GRADIENT, EXPERT_UP), OP(DISPATCH, EXPERTS), OP(GATE, SHARED_EXPERT), OP(PRODUCT, SHARED_DOWN),    \
        OP(WEIGHT_GRADIENT, SHARED_DOWN), OP(GATE, SHARED_ACTIVATION), OP(PRODUCT, SHARED_GATE),                     \
        OP(WEIGHT_GRADIENT, SHARED_GATE), OP(WEIGHT_GRADIENT, SHARED_UP), OP(RESIDUAL, MLP),                         \
        OP(PRODUCT, SHARED_SHARE), OP(WEIGHT_GRADIENT, SHARED_SHARE), OP(RESIDUAL, MLP), OP(ROUTE, ROUTES),          \
        OP(PRODUCT, ROUTER), OP(WEIGHT_GRADIENT, ROUTER), OP(RESIDUAL, MLP)
/* Neither the sum over a token's experts, nor what is added to it. */
#define FORWARD_AGAIN                                                                                    \
    AGAIN(PRODUCT, ROUTER), AGAIN(ROUTE, ROUTES), AGAIN(DISPATCH, EXPERTS), AGAIN(PRODUCT, EXPERT_GATE), \
        AGAIN(GATE, EXPERT_GATE), AGAIN(PRODUCT, EXPERT_DOWN), AGAIN(PRODUCT, SHARED_GATE),              \
        AGAIN(GATE, SHARED_ACTIVATION), AGAIN(PRODUCT, SHARED_DOWN), AGAIN(PRODUCT, SHARED_SHARE)

CLAIM(experts_come_before_the_shared_one_in_both_passes)
{
    static const step forward[] = {FORWARD}, backward[] = {BACKWARD}, again[] = {FORWARD_AGAIN, BACKWARD};
    const ar_config c = config_of(QWEN2_MOE(32, 24, 40, 2, 4, 2, 5, 2));
    ari_step_case t = exact_of(&c, (ar_parallel){.tp = 2, .sp = true});
    ORDER(&t, ARI_PASS_FORWARD, forward);
    ORDER(&t, ARI_PASS_BACKWARD, backward);
    t.run.parallel.recompute.what = AR_RECOMPUTE_FULL;
    ORDER(&t, ARI_PASS_BACKWARD, again);
}

static ar_status expect_half(void *user, const ari_operation *op)
{
    const bool expert = ari_is_expert_part(op->role);
    size_t *seen = user;
    if (op->kind != ARI_OPERATION_WEIGHT_GRADIENT || (op->role != ARI_ROUTER && !expert))
        return AR_OK;
    cr_expect_eq(op->part, expert ? AR_PP_BACKWARD_INPUT : AR_PP_BACKWARD_WEIGHT);
    ++*seen;
    return AR_OK;
}

/* Rows of experts are sorted anew in each pass, and their weights' gradients made in the first half of it. */
CLAIM(experts_gradients_do_not_wait_for_the_second_half)
{
    const ar_config c = config_of(MODEL);
    const ari_step_case t = exact_of(&c, (ar_parallel){.pp = 2, .schedule = AR_PP_ZERO_BUBBLE, .micro_batches = 2});
    size_t seen = 0;
    cr_assert_ok(ari_operations(&t, ARI_OPS_STEP, 0, expect_half, &seen));
    cr_expect_eq(seen, 2 * (1 + 3));
}

/* A shared expert of 60, gate and up and down, its share's weight of one row, of 24 features each: 3*60*24 + 24. */
CLAIM(products_are_of_a_tokens_experts)
{
    const ar_config c = config_of(QWEN2_MOE(32, 24, 40, 2, 4, 2, 5, 2));
    const ari_step_case t = exact_of(&c, (ar_parallel){.tp = 1});
    const double tokens = B * S, router = E * H, experts = K * 3 * F * H, shared = 3 * 60 * H + H;
    static const ari_role roles[] = {ARI_ROUTER,      ARI_EXPERT_GATE, ARI_EXPERT_UP,   ARI_EXPERT_DOWN,
                                     ARI_SHARED_GATE, ARI_SHARED_UP,   ARI_SHARED_DOWN, ARI_SHARED_SHARE};
    double made[3] = {0.0};
    for (int i = 0; i < 3; i++) {
        const ari_operation_kind kind = i < 2 ? ARI_OPERATION_PRODUCT : ARI_OPERATION_WEIGHT_GRADIENT;
        for (size_t r = 0; r < sizeof roles / sizeof *roles; r++) {
            const found f = found_on(0, &t, kind, i == 0 ? ARI_PASS_FORWARD : ARI_PASS_BACKWARD, roles[r], 0);
            for (int k = 0; k < f.n; k++)
                made[i] += f.op[k].multiply_adds;
        }
        cr_expect_eq(made[i], tokens * (router + experts + shared), "%d: %.0f", i, made[i]);
    }
}

/* --- parameters and buckets --------------------------------------------------------------------------------------- */

typedef struct listed {
    ari_role role[64];
    size_t n, elements;
} listed;

static ar_status list_param(void *user, size_t layer, const ari_op_value *v)
{
    listed *l = user;
    (void)layer;
    cr_assert_lt(l->n, 64);
    l->role[l->n++] = v->role;
    l->elements += (size_t)ari_op_elements(v);
    return AR_OK;
}

/* Two layers of 4 attention matrices, 2 norms, a router and 15 matrices of experts; the table, the norm, the head. */
CLAIM(experts_parameters_follow_each_other)
{
    const ar_config c = config_of(MODEL);
    const ari_step_case t = exact_of(&c, (ar_parallel){.tp = 1});
    listed l = {.n = 0};
    cr_assert_ok(ari_operations_params(&t, 0, list_param, &l));
    cr_expect_eq(l.n, 2 * (4 + 2 + 1 + 3 * E) + 3);
    cr_expect_eq(l.elements, 2 * (2 * H * H + 2 * 12 * H + 2 * H + E * H + E * 3 * F * H) + 2 * 32 * H + H);
    cr_expect_eq(l.role[7], ARI_ROUTER);
    for (int i = 0; i < E; i++)
        cr_expect(l.role[8 + 3 * i] == ARI_EXPERT_GATE && l.role[9 + 3 * i] == ARI_EXPERT_UP &&
                  l.role[10 + 3 * i] == ARI_EXPERT_DOWN);
    cr_expect_eq(l.role[8 + 3 * E], ARI_NORM1);
}

typedef struct packed {
    const size_t *params;
    size_t n, at, elements;
} packed;

static ar_status check_bucket(void *user, const ari_operation *op)
{
    packed *p = user;
    cr_assert_lt(p->at, p->n);
    cr_expect_eq(op->params, p->params[p->at], "bucket %zu has %zu parameters", p->at, op->params);
    p->at++;
    p->elements += op->input[0].shape[0];
    return AR_OK;
}

/* Buckets of 8000 bytes take two matrices of an expert (3840 each). In reverse: the head (3072), the last norm (96) and
 * an expert's down; pairs; the router (480), norms and the attention's matrices (2304, 1152) of the last layer; and so
 * on. The largest first: 30 matrices of experts; the table and the head; three matrices of 2304 bytes; the fourth, the
 * 1152s, the routers and a norm; the other norms. */
CLAIM(buckets_are_packed_by_hand)
{
    static const size_t reverse[] = {3, 2, 2, 2, 2, 2, 2, 2, 7, 2, 2, 2, 2, 2, 2, 2, 5, 4},
                        by_size[] = {2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 3, 8, 4};
    const ar_config c = config_of(MODEL);
    for (int i = 0; i < 2; i++) {
        ari_step_case t = exact_of(&c, (ar_parallel){.dp = 2});
        packed p = {.params = i ? by_size : reverse,
                    .n = i ? sizeof by_size / sizeof *by_size : sizeof reverse / sizeof *reverse};
        listed l = {.n = 0};
        t.run.ddp = (ar_ddp_options){.bucket_bytes = 8000, .order = i ? AR_BUCKETS_BY_SIZE : AR_BUCKETS_REVERSE};
        cr_assert_ok(ari_operations(&t, ARI_OPS_BUCKETS, 0, check_bucket, &p));
        cr_assert_ok(ari_operations_params(&t, 0, list_param, &l));
        cr_expect_eq(p.at, p.n);
        cr_expect_eq(p.elements, l.elements);
    }
}

/* --- all ranks ---------------------------------------------------------------------------------------------------- */

static ar_status count_visits(void *user, const ari_operation *op)
{
    (void)op;
    ++*(size_t *)user;
    return AR_OK;
}

/* Passes list all experts of a layer at once; outside of them buckets are as many as bytes make them. */
CLAIM(lists_do_not_grow_with_the_number_of_experts)
{
    ar_config c = config_of(MODEL);
    size_t visits[2] = {0};
    c.layers = 94;
    for (int i = 0; i < 2; i++) {
        c.experts.n = i ? 512 : 2;
        ari_step_case t = exact_of(&c, (ar_parallel){.tp = 2, .sp = true});
        t.run.ddp.bucket_bytes = (size_t)1 << 40;
        cr_assert_ok(ari_operations(&t, ARI_OPS_ONCE, 1, count_visits, &visits[i]));
    }
    cr_expect_eq(visits[0], visits[1]);
}

EVERY_CLAIM(ops_experts)
