/* SPDX-License-Identifier: Apache-2.0 */
/* The list of a step's operations where collectives of tokens go beside products: that chunks change
 * nothing else. Which there are, random layouts hold against what runs record in
 * random_layouts_test. */
#include "support/layout_draw.h"
#include "tests/verify/ops_find.h"

/* Hidden 24, q 32, k and v 16 of all ranks, a middle of 48; 3 samples. */
#define MODEL LLAMA(32, 24, 48, 2, 8, 4, 4, false)

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

/* Without sequence parallelism over several ranks there is nothing to cut; with it elements, bytes and products are
 * those of the plain list. */
Test(ops_overlap, chunks_change_neither_bytes_nor_products)
{
    enum { DRAWS = 60 };
    int cut = 0;
    for (int i = 0; i < DRAWS; i++) {
        layout_draw d;
        layout_draw_make(&d, i % 3 == 2 ? DRAW_CONTEXTS : DRAW_TENSORS, 2100 + (uint64_t)i);
        ari_step_case t = {.config = &d.config, .run = d.run};
        t.run.numerics = i % 2 ? AR_NUMERICS_NATIVE : AR_NUMERICS_EXACT;
        uint64_t bytes[2];
        sums s[2] = {{0}, {0}};
        for (int k = 0; k < 2; k++) {
            t.run.parallel.overlap = k == 0 ? 1 : 2 + i % 8;
            cr_assert_ok(ari_traffic_bytes(&bytes[k], &t));
            cr_assert_ok(ari_operations(&t, ARI_OPS_STEP, 0, add_sums, &s[k]));
        }
        const bool beside = d.run.parallel.sp && d.run.parallel.tp > 1;
        cr_expect_eq(bytes[0], bytes[1], "draw %d", i);
        cr_expect(s[0].elements == s[1].elements && s[0].multiply_adds == s[1].multiply_adds, "draw %d", i);
        cr_expect(beside ? s[1].calls >= s[0].calls : s[1].calls == s[0].calls, "draw %d", i);
        cut += s[1].calls > s[0].calls;
        ar_plan_fini(&d.run.plan);
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
    ari_step_case t = case_of(&c, (ar_parallel){.tp = 2, .sp = true, .overlap = 4}, 3, 22, AR_NUMERICS_NATIVE);
    t.run.parallel.pp = 2;
    t.run.parallel.micro_batches = 3;
    t.run.parallel.schedule = AR_PP_ZERO_BUBBLE;
    deferred_calls n = {0};
    cr_assert_ok(ari_operations(&t, ARI_OPS_STEP, 0, add_deferred, &n));
    cr_expect_eq(n.all, 2 * 3);
    cr_expect_eq(n.main, n.all);
}
