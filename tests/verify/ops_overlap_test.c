/* SPDX-License-Identifier: Apache-2.0 */
/* The list of a step's operations where collectives of tokens go beside products: what is cut into chunks and how, in
 * which order, and that nothing else changes. Random layouts are compared with what runs record in
 * random_layouts_test. */
#include "support/layout_draw.h"
#include "tests/verify/ops_find.h"

/* The collectives of layer 0 in one pass on one queue, in the order of the list. */
enum { MOST_CALLS = 32 };
typedef struct calls {
    ari_operation_pass pass;
    ari_call_queue queue;
    size_t layer;
    int n;
    ari_op_call call[MOST_CALLS];
} calls;

static ar_status add_calls(void *user, const ari_operation *op)
{
    calls *c = user;
    for (int i = 0; i < op->calls && op->pass == c->pass && op->layer == c->layer; i++) {
        if (op->call[i].queue == c->queue && c->n < MOST_CALLS)
            c->call[c->n++] = op->call[i];
    }
    return AR_OK;
}

static calls calls_of(const ari_step_case *t, ari_operation_pass pass, ari_call_queue queue, size_t layer)
{
    calls c = {.pass = pass, .queue = queue, .layer = layer};
    cr_assert_ok(ari_operations(t, 0, add_calls, &c));
    cr_assert_lt(c.n, MOST_CALLS);
    return c;
}

static ari_step_case chunked(const ar_config *c, int overlap, size_t seq, ar_numerics numerics)
{
    return case_of(c, (ar_parallel){.tp = 2, .sp = true, .overlap = overlap}, 3, seq, numerics);
}

/* Hidden 24, q 32, k and v 16 of all ranks, a middle of 48; 3 samples. */
#define MODEL LLAMA(32, 24, 48, 2, 8, 4, 4, false)
enum { RANKS = 2, SAMPLES = 3, HIDDEN = 24 };

static void expect_call(const ari_op_call *c, ari_call_kind kind, ari_role role, size_t chunk, size_t chunks, int line)
{
    cr_expect(c->kind == kind && c->role == role && c->chunk == chunk && ari_call_chunks(c) == chunks,
              "line %d: %s of role %d in %zu chunks of %zu, expected %s of role %d in %zu of %zu", line,
              ari_call_name(c->kind), (int)c->role, ari_call_chunks(c), c->chunk, ari_call_name(kind), (int)role,
              chunks, chunk);
}
#define CALL(c, kind, role, chunk, chunks) expect_call(&(c), kind, role, chunk, chunks, __LINE__)

/* 11 own positions in 4 chunks: 3, 3, 3, 2, of both ranks and all samples. q, k, v and gate, up take what was gathered,
 * o and down scatter what they made: in int64 where sums are exact, whose exponents stay whole on the main queue. */
Test(ops_overlap, forward_chunks_are_runs_of_the_own_positions)
{
    const ar_config config = config_of(MODEL);
    const size_t position = RANKS * SAMPLES * HIDDEN, chunk = 3 * position;
    for (int numerics = AR_NUMERICS_EXACT; numerics <= AR_NUMERICS_NATIVE; numerics++) {
        const ari_step_case t = chunked(&config, 4, 22, (ar_numerics)numerics);
        const calls c = calls_of(&t, ARI_PASS_FORWARD, ARI_ON_TP, 0);
        cr_assert_eq(c.n, 4);
        CALL(c.call[0], ARI_CALL_ALL_GATHER, ARI_Q, chunk, 4);
        CALL(c.call[1], ARI_CALL_REDUCE_SCATTER, ARI_OUT, chunk, 4);
        CALL(c.call[2], ARI_CALL_ALL_GATHER, ARI_GATE, chunk, 4);
        CALL(c.call[3], ARI_CALL_REDUCE_SCATTER, ARI_DOWN, chunk, 4);
        for (int i = 0; i < c.n; i++) {
            cr_expect_eq(ari_call_chunk(&c.call[i], 0), chunk);
            cr_expect_eq(ari_call_chunk(&c.call[i], 3), 2 * position);
            cr_expect_eq(c.call[i].elements, 11 * position);
            cr_expect_eq(c.call[i].dtype, i % 2 == 1 && numerics == AR_NUMERICS_EXACT ? AR_I64 : AR_F32);
        }
        const calls main = calls_of(&t, ARI_PASS_FORWARD, ARI_ON_MAIN, 0);
        cr_expect_eq(main.n, numerics == AR_NUMERICS_EXACT ? 6 : 0);
        for (int i = 0; i < main.n; i++)
            cr_expect(main.call[i].dtype == AR_I32 && ari_call_chunks(&main.call[i]) == 1);
    }
}

/* Backward o and down gather dY in chunks; behind it, for a later sum over all tokens, goes the input of the layers
 * that follow, whole; then dX of those is scattered. The head's own input goes behind its own products. */
Test(ops_overlap, backward_gathers_the_next_input_behind_the_last_products)
{
    const ar_config config = config_of(MODEL);
    ari_step_case t = chunked(&config, 4, 22, AR_NUMERICS_NATIVE);
    const size_t all = 11 * RANKS * SAMPLES * HIDDEN, chunk = 3 * RANKS * SAMPLES * HIDDEN;
    const calls c = calls_of(&t, ARI_PASS_BACKWARD, ARI_ON_TP, 0);
    cr_assert_eq(c.n, 6);
    CALL(c.call[0], ARI_CALL_ALL_GATHER, ARI_DOWN, chunk, 4);
    CALL(c.call[1], ARI_CALL_ALL_GATHER, ARI_GATE, all, 1);
    CALL(c.call[2], ARI_CALL_REDUCE_SCATTER, ARI_GATE, chunk, 4);
    CALL(c.call[3], ARI_CALL_ALL_GATHER, ARI_OUT, chunk, 4);
    CALL(c.call[4], ARI_CALL_ALL_GATHER, ARI_Q, all, 1);
    CALL(c.call[5], ARI_CALL_REDUCE_SCATTER, ARI_Q, chunk, 4);
    const calls head = calls_of(&t, ARI_PASS_BACKWARD, ARI_ON_TP, ARI_NO_LAYER);
    cr_assert_eq(head.n, 2);
    CALL(head.call[0], ARI_CALL_ALL_GATHER, ARI_HEAD, all, 1);
    CALL(head.call[1], ARI_CALL_REDUCE_SCATTER, ARI_HEAD, chunk, 4);
    t.run.parallel.keep_gathered = true;
    const calls kept = calls_of(&t, ARI_PASS_BACKWARD, ARI_ON_TP, 0);
    cr_assert_eq(kept.n, 4);
    for (int i = 0; i < kept.n; i++)
        cr_expect_eq(ari_call_chunks(&kept.call[i]), 4);
}

/* The whole of a step by hand, without a run: calls, and the multiply-adds of a rank. */
typedef struct sums {
    uint64_t calls, elements;
    double multiply_adds;
} sums;

static ar_status add_sums(void *user, const ari_operation *op)
{
    sums *s = user;
    for (int i = 0; i < op->calls; i++) {
        const ari_op_call *call = &op->call[i];
        size_t of_chunks = 0;
        for (size_t k = 0; k < ari_call_chunks(call); k++) {
            cr_expect_gt(ari_call_chunk(call, k), 0, "chunk %zu", k);
            cr_expect_leq(ari_call_chunk(call, k), call->chunk);
            of_chunks += ari_call_chunk(call, k);
        }
        cr_expect_eq(of_chunks, call->elements);
        s->calls += ari_call_chunks(call) * call->repeats;
        s->elements += of_chunks * call->repeats;
    }
    s->multiply_adds += op->multiply_adds;
    return AR_OK;
}

/* How many chunks K of 5 positions makes: of 5, 3, 2, 2, 1, ... */
Test(ops_overlap, no_chunk_is_empty)
{
    const ar_config config = config_of(MODEL);
    const size_t chunks[] = {1, 2, 3, 3, 5, 5, 5, 5, 5};
    for (int k = 2; k <= 9; k++) {
        const ari_step_case t = chunked(&config, k, 10, AR_NUMERICS_NATIVE);
        const calls c = calls_of(&t, ARI_PASS_FORWARD, ARI_ON_TP, 0);
        for (int i = 0; i < c.n; i++)
            cr_expect_eq(ari_call_chunks(&c.call[i]), chunks[k - 1], "K = %d", k);
        cr_expect_eq(c.n, 4);
    }
}

/* Without sequence parallelism over several ranks there is nothing to cut; with it elements, bytes and products are
 * those of the plain list. */
Test(ops_overlap, chunks_change_neither_bytes_nor_products)
{
    enum { DRAWS = 60 };
    int cut = 0;
    for (int i = 0; i < DRAWS; i++) {
        layout_draw d;
        layout_draw_make(&d, i % 3 == 2 ? DRAW_CONTEXTS : DRAW_TENSORS, 2100 + (uint64_t)i);
        ari_step_case t = {.config = &d.config, .run = layout_draw_to_run(&d)};
        t.run.numerics = i % 2 ? AR_NUMERICS_NATIVE : AR_NUMERICS_EXACT;
        uint64_t bytes[2];
        sums s[2] = {{0}, {0}};
        for (int k = 0; k < 2; k++) {
            t.run.parallel.overlap = k == 0 ? 1 : 2 + i % 8;
            cr_assert_ok(ari_traffic_bytes(&bytes[k], &t));
            cr_assert_ok(ari_operations(&t, 0, add_sums, &s[k]));
        }
        const bool beside = d.parallel.sp && d.parallel.tp > 1;
        cr_expect_eq(bytes[0], bytes[1], "draw %d", i);
        cr_expect(s[0].elements == s[1].elements && s[0].multiply_adds == s[1].multiply_adds, "draw %d", i);
        cr_expect(beside ? s[1].calls >= s[0].calls : s[1].calls == s[0].calls, "draw %d", i);
        cut += s[1].calls > s[0].calls;
        ar_plan_fini(&d.plan);
    }
    cr_expect_geq(cut, DRAWS / 10);
}

/* How many collectives the backward passes for weights have, and how many of them on the main queue. */
typedef struct deferred_calls {
    int all, main;
} deferred_calls;

static ar_status add_deferred(void *user, const ari_operation *op)
{
    deferred_calls *n = user;
    for (int i = 0; i < op->calls && op->pass == ARI_PASS_BACKWARD && op->part == AR_PP_BACKWARD_WEIGHT; i++) {
        n->all++;
        n->main += op->call[i].queue == ARI_ON_MAIN && ari_call_chunks(&op->call[i]) == 1;
    }
    return AR_OK;
}

/* Zero bubble: q, k and v's common input, and gate and up's, come again for each of the rank's layers and
 * micro-batches. */
Test(ops_overlap, inputs_come_whole_for_deferred_gradients)
{
    const ar_config c = config_of(MODEL);
    ari_step_case t = chunked(&c, 4, 22, AR_NUMERICS_NATIVE);
    t.run.parallel.pp = 2;
    t.run.parallel.micro_batches = 3;
    t.run.parallel.schedule = AR_PP_ZERO_BUBBLE;
    deferred_calls n = {0};
    cr_assert_ok(ari_operations(&t, 0, add_deferred, &n));
    cr_expect_eq(n.all, 2 * 3);
    cr_expect_eq(n.main, n.all);
}
