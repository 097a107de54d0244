/* SPDX-License-Identifier: Apache-2.0 */
/* The list of a step's operations: worked numbers by hand (shapes, placements, volumes), and what runs record. Random
 * layouts are compared with their traces in random_layouts_test. */
#include "run/cluster_run.h"
#include "support/row.h"
#include "tests/support/plan_draw.h"
#include "tests/verify/ops_find.h"
#include "verify/check/check_calls.h"

static ari_step_case native_of(const ar_config *c, ar_parallel parallel, size_t batch, size_t seq)
{
    return case_of(c, parallel, batch, seq, AR_NUMERICS_NATIVE);
}

static void expect_at(const char *what, ar_placement p, const char *text)
{
    char got[AR_PLACEMENT_TEXT];
    cr_expect_str_eq(ar_placement_text(got, p), text, "%s", what);
}
#define AT(placement, text) expect_at(#placement, (placement), (text))

/* Elements that a rank of the group sends in a ring. */
static uint64_t sent(const ari_op_call *c)
{
    size_t bytes = 0;
    cr_assert_ok(ari_call_bytes(&bytes, c));
    return bytes / c->ranks / ar_dtype_bytes(c->dtype);
}

#define PAPER_STACK(layers) STACK(32000, 768, 2048, layers, 12, 12)
static const ar_parallel tp2 = {.tp = 2}, sp2 = {.tp = 2, .sp = true};

/* --- a small model on two ranks ----------------------------------------------------------------------------------- */

/* W [2048, 768] is [1024, 768] on each, Y [4, 512, 1024]. */
Test(ops, column_parallel_weights_are_cut_by_rows)
{
    const ar_config c = config_of(PAPER_STACK(1));
    const ari_step_case t = native_of(&c, tp2, 4, 512);
    const ari_operation op = the_only(&t, ARI_OPERATION_PRODUCT, ARI_PASS_FORWARD, ARI_FIRST, 0);
    LOCAL(op.input[0], 4, 512, 768);
    LOCAL(op.weight[0], 1024, 768);
    LOCAL(op.output[0], 4, 512, 1024);
    AT(op.input[0].at[ARI_AXIS_TP], "R");
    AT(op.weight[0].at[ARI_AXIS_TP], "S(0)");
    AT(op.output[0].at[ARI_AXIS_TP], "S(2)");
    cr_expect_eq(op.calls, 0);
    cr_expect_eq(op.multiply_adds, 4.0 * 512 * 1024 * 768);
}

/* W [512, 2048] is [512, 1024] on each, Y a sum that is whole on both, or by tokens. */
Test(ops, row_parallel_weights_are_cut_by_columns)
{
    const ar_config c = config_of(STACK(32000, 512, 2048, 1, 8, 8));
    ari_step_case t = native_of(&c, tp2, 4, 512);
    ari_operation op = the_only(&t, ARI_OPERATION_PRODUCT, ARI_PASS_FORWARD, ARI_DOWN, 0);
    LOCAL(op.input[0], 4, 512, 1024);
    LOCAL(op.weight[0], 512, 1024);
    LOCAL(op.output[0], 4, 512, 512);
    AT(op.input[0].at[ARI_AXIS_TP], "S(2)");
    AT(op.weight[0].at[ARI_AXIS_TP], "S(1)");
    AT(op.produced_as, "P(sum)");
    AT(op.output[0].at[ARI_AXIS_TP], "I");
    cr_expect(op.calls == 1 && op.call[0].kind == ARI_CALL_ALL_REDUCE);
    t.run.parallel.sp = true;
    op = the_only(&t, ARI_OPERATION_PRODUCT, ARI_PASS_FORWARD, ARI_DOWN, 0);
    LOCAL(op.output[0], 4, 256, 512);
    AT(op.output[0].at[ARI_AXIS_TP], "S(1)");
    cr_expect(op.calls == 1 && op.call[0].kind == ARI_CALL_REDUCE_SCATTER);
}

/* 32,000 rows are 16,000 on each rank. A reduce-scatter sends 786,432 elements a rank, an all-reduce 1,572,864. */
Test(ops, embeddings_are_cut_by_the_vocabulary)
{
    const ar_config c = config_of(PAPER_STACK(1));
    ari_step_case t = native_of(&c, sp2, 4, 512);
    ari_operation op = the_only(&t, ARI_OPERATION_EMBEDDING, ARI_PASS_FORWARD, ARI_TOKENS, ARI_NO_LAYER);
    LOCAL(op.input[0], 4, 512);
    LOCAL(op.weight[0], 16000, 768);
    LOCAL(op.output[0], 4, 256, 768);
    AT(op.output[0].at[ARI_AXIS_TP], "S(1)");
    cr_expect_eq(sent(&op.call[0]), 786432);
    t.run.parallel.sp = false;
    op = the_only(&t, ARI_OPERATION_EMBEDDING, ARI_PASS_FORWARD, ARI_TOKENS, ARI_NO_LAYER);
    LOCAL(op.output[0], 4, 512, 768);
    cr_expect_eq(sent(&op.call[0]), 1572864);
}

/* Split along the hidden dimension: [32000, 384] on each, and the output parts of features without communication; then
 * an all-to-all makes them parts of the tokens, which sends half of what a rank has. */
Test(ops, embeddings_may_be_cut_by_features)
{
    const ar_config c = config_of(LLAMA(32000, 768, 2048, 1, 12, 12, 64, false));
    ari_step_case t = native_of(&c, sp2, 4, 512);
    cr_assert_ok(ar_plan_add(&t.run.plan, c.arch, "embed_tokens", AR_STYLE_HIDDEN));
    ari_operation op = the_only(&t, ARI_OPERATION_EMBEDDING, ARI_PASS_FORWARD, ARI_TOKENS, ARI_NO_LAYER);
    LOCAL(op.weight[0], 32000, 384);
    AT(op.weight[0].at[ARI_AXIS_TP], "S(1)");
    LOCAL(op.output[0], 4, 512, 384);
    AT(op.output[0].at[ARI_AXIS_TP], "S(2)");
    cr_expect_eq(op.calls, 0);
    op = the_only(&t, ARI_OPERATION_REDISTRIBUTE, ARI_PASS_FORWARD, ARI_TOKENS, ARI_NO_LAYER);
    LOCAL(op.output[0], 4, 256, 768);
    cr_expect(op.calls == 1 && op.call[0].kind == ARI_CALL_ALL_TO_ALL);
    cr_expect_eq(sent(&op.call[0]), 4 * 512 * 384 / 2);
    t.run.parallel.sp = false;
    op = the_only(&t, ARI_OPERATION_REDISTRIBUTE, ARI_PASS_FORWARD, ARI_TOKENS, ARI_NO_LAYER);
    LOCAL(op.output[0], 4, 512, 768);
    cr_expect(op.calls == 1 && op.call[0].kind == ARI_CALL_ALL_GATHER);
    ar_plan_fini(&t.run.plan);
}

/* x [32, 128, 2048] becomes [32, 256, 2048] before attention; its rotary embedding then is of all 256 positions. */
Test(ops, attention_sees_all_positions)
{
    const ar_config c = config_of(LLAMA(32000, 2048, 2048, 1, 32, 32, 64, false));
    const ari_step_case t = native_of(&c, sp2, 32, 256);
    const ari_operation in = the_only(&t, ARI_OPERATION_REDISTRIBUTE, ARI_PASS_FORWARD, ARI_ATTENTION, 0);
    LOCAL(in.input[0], 32, 128, 2048);
    LOCAL(in.output[0], 32, 256, 2048);
    const ari_operation rope = the_only(&t, ARI_OPERATION_ROPE, ARI_PASS_FORWARD, ARI_NO_ROLE, 0);
    LOCAL(rope.output[0], 32, 256, 1024);
}

/* Gathered once for q, k and v; the heads' output is local, [4, 512, 384] and not 768. */
Test(ops, attention_works_on_its_own_heads)
{
    const ar_config c = config_of(PAPER_STACK(1));
    const ari_step_case t = native_of(&c, sp2, 4, 512);
    const ari_operation in = the_only(&t, ARI_OPERATION_REDISTRIBUTE, ARI_PASS_FORWARD, ARI_ATTENTION, 0);
    LOCAL(in.input[0], 4, 256, 768);
    LOCAL(in.output[0], 4, 512, 768);
    cr_expect(in.calls == 1 && in.call[0].kind == ARI_CALL_ALL_GATHER);
    const ari_operation qkv = the_only(&t, ARI_OPERATION_PRODUCT, ARI_PASS_FORWARD, ARI_Q, 0);
    cr_assert_eq(qkv.weights, 3);
    cr_expect_eq(qkv.calls, 0);
    for (int i = 0; i < 3; i++) {
        LOCAL(qkv.weight[i], 384, 768);
        LOCAL(qkv.output[i], 4, 512, 384);
    }
    const ari_operation core = the_only(&t, ARI_OPERATION_ATTENTION, ARI_PASS_FORWARD, ARI_ATTENTION, 0);
    LOCAL(core.output[0], 4, 512, 384);
    cr_expect_eq(core.multiply_adds, 2.0 * 4 * 6 * (512 * 513 / 2) * 64);
    const ari_operation out = the_only(&t, ARI_OPERATION_PRODUCT, ARI_PASS_FORWARD, ARI_OUT, 0);
    LOCAL(out.weight[0], 768, 384);
    LOCAL(out.output[0], 4, 256, 768);
    cr_expect(out.calls == 1 && out.call[0].kind == ARI_CALL_REDUCE_SCATTER);
}

/* --- 8 ranks, 8 KV heads of 128 ----------------------------------------------------------------------------------- */

#define LARGE LLAMA(128256, 4096, 11008, 1, 32, 8, 128, false)

Test(ops, a_rank_of_eight_holds_an_eighth_of_every_matrix)
{
    const ar_config c = config_of(LARGE);
    const ari_step_case t = native_of(&c, (ar_parallel){.tp = 8, .sp = true}, 2, 4096);
    const ari_operation qkv = the_only(&t, ARI_OPERATION_PRODUCT, ARI_PASS_FORWARD, ARI_Q, 0);
    LOCAL(qkv.weight[0], 512, 4096);
    LOCAL(qkv.weight[1], 128, 4096);
    LOCAL(qkv.weight[2], 128, 4096);
    LOCAL(qkv.output[0], 2, 4096, 4 * 128);
    LOCAL(qkv.output[1], 2, 4096, 1 * 128);
    LOCAL(the_only(&t, ARI_OPERATION_PRODUCT, ARI_PASS_FORWARD, ARI_OUT, 0).weight[0], 4096, 512);
    const ari_operation wide = the_only(&t, ARI_OPERATION_PRODUCT, ARI_PASS_FORWARD, ARI_GATE, 0);
    LOCAL(wide.weight[0], 1376, 4096);
    LOCAL(wide.weight[1], 1376, 4096);
    LOCAL(the_only(&t, ARI_OPERATION_PRODUCT, ARI_PASS_FORWARD, ARI_DOWN, 0).weight[0], 4096, 1376);
    const ari_operation tokens = the_only(&t, ARI_OPERATION_EMBEDDING, ARI_PASS_FORWARD, ARI_TOKENS, ARI_NO_LAYER);
    LOCAL(tokens.weight[0], 16032, 4096);
    LOCAL(tokens.output[0], 2, 512, 4096);
    /* Of the middle, in bf16, b*s*1376*2 bytes. */
    cr_expect_eq(wide.output[0].local[0] * wide.output[0].local[1] * wide.output[0].local[2] * 2, 22544384);
}

/* With 16 ranks two hold each KV head, and of dX the first of them alone counts it. */
Test(ops, kv_heads_are_copied_where_they_are_too_few)
{
    const ar_config c = config_of(LARGE);
    const ari_step_case t = native_of(&c, (ar_parallel){.tp = 16}, 2, 4096);
    for (int rank = 0; rank < 2; rank++) { /* of dp */
        const found f = found_on(rank, &t, ARI_OPERATION_PRODUCT, ARI_PASS_BACKWARD, ARI_Q, 0);
        LOCAL(f.op[0].weight[0], 256, 4096);
        LOCAL(f.op[0].weight[1], 128, 4096);
        cr_expect_eq(f.op[0].weight[1].copies, 2);
        cr_expect_eq(f.op[0].multiply_adds, 2.0 * 4096 * 4096 * (rank == 0 ? 256 + 2 * 128 : 256), "rank %d", rank);
    }
}

/* --- volumes of a layer ------------------------------------------------------------------------------------------- */

typedef struct volume {
    size_t layer, calls[ARI_CALL_BROADCAST + 1];
    ari_operation_pass pass;
    uint64_t sent;
} volume;

static ar_status add_volume(void *user, const ari_operation *op)
{
    volume *v = user;
    if (op->layer != v->layer || op->pass != v->pass)
        return AR_OK;
    for (int i = 0; i < op->calls; i++) {
        v->calls[op->call[i].kind]++;
        v->sent += sent(&op->call[i]);
    }
    return AR_OK;
}

static volume volume_of(const ari_step_case *t, ari_operation_pass pass)
{
    volume v = {.layer = 0, .pass = pass};
    cr_assert_ok(ari_operations(t, 0, add_volume, &v));
    return v;
}

/* Elements that a rank sends in a layer; bsh(N-1)/N an all-gather or a reduce-scatter. Forward 2 all-reduces, or 2
 * all-gathers and 2 reduce-scatters; backward again, and 2 all-gathers more where the gathered inputs are not kept. */
Test(ops, a_layer_sends_what_the_papers_say)
{
    const ar_config small = config_of(PAPER_STACK(1)), large = config_of(LARGE);
    const struct {
        const ar_config *config;
        ar_parallel parallel;
        size_t batch, seq;
        uint64_t forward, backward;
        size_t all_reduce, forward_gathers, backward_gathers;
    } all[] = {
        {&small, {.tp = 2}, 4, 512, 3145728, 3145728, 2, 0, 0},
        {&small, {.tp = 2, .sp = true}, 4, 512, 3145728, 4718592, 0, 2, 4},
        {&small, {.tp = 2, .sp = true, .keep_gathered = true}, 4, 512, 3145728, 3145728, 0, 2, 2},
        {&large, {.tp = 8}, 2, 4096, 117440512, 117440512, 2, 0, 0},
        {&large, {.tp = 8, .sp = true}, 2, 4096, 117440512, 176160768, 0, 2, 4},
        {&large, {.tp = 8, .sp = true, .keep_gathered = true}, 2, 4096, 117440512, 117440512, 0, 2, 2},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        const ari_step_case t = native_of(all[i].config, all[i].parallel, all[i].batch, all[i].seq);
        const volume f = volume_of(&t, ARI_PASS_FORWARD), b = volume_of(&t, ARI_PASS_BACKWARD);
        const size_t scatters = all[i].all_reduce > 0 ? 0 : 2;
        cr_expect_eq(f.sent, all[i].forward, "case %zu: %zu", i, (size_t)f.sent);
        cr_expect_eq(b.sent, all[i].backward, "case %zu: %zu", i, (size_t)b.sent);
        cr_expect(f.calls[ARI_CALL_ALL_REDUCE] == all[i].all_reduce &&
                  b.calls[ARI_CALL_ALL_REDUCE] == all[i].all_reduce);
        cr_expect(f.calls[ARI_CALL_REDUCE_SCATTER] == scatters && b.calls[ARI_CALL_REDUCE_SCATTER] == scatters);
        cr_expect_eq(f.calls[ARI_CALL_ALL_GATHER], all[i].forward_gathers, "case %zu", i);
        cr_expect_eq(b.calls[ARI_CALL_ALL_GATHER], all[i].backward_gathers, "case %zu", i);
    }
}

/* An all-reduce in the middle, of the wide features, and an all-gather at the end, against one all-reduce. */
Test(ops, an_mlp_split_the_other_way_needs_two_collectives)
{
    const ar_config c = config_of(PAPER_STACK(1));
    for (int order = AR_MLP_COLUMN_ROW; order <= AR_MLP_ROW_COLUMN; order++) {
        ari_step_case t = native_of(&c, tp2, 4, 512);
        t.run.plan = plan_of(c.arch, (ar_mlp_order)order);
        const ari_operation down = the_only(&t, ARI_OPERATION_PRODUCT, ARI_PASS_FORWARD, ARI_DOWN, 0);
        const ari_operation first = the_only(&t, ARI_OPERATION_PRODUCT, ARI_PASS_FORWARD, ARI_FIRST, 0);
        const volume v = volume_of(&t, ARI_PASS_FORWARD);
        if (order == AR_MLP_COLUMN_ROW) {
            cr_expect(first.calls == 0 && down.calls == 1 && down.call[0].elements == 4 * 512 * 768);
            cr_expect(v.calls[ARI_CALL_ALL_REDUCE] == 2 && v.calls[ARI_CALL_ALL_GATHER] == 0);
        } else {
            cr_expect(down.calls == 0 && first.calls == 1 && first.call[0].elements == 4 * 512 * 2048);
            cr_expect(v.calls[ARI_CALL_ALL_REDUCE] == 2 && v.calls[ARI_CALL_ALL_GATHER] == 1);
        }
    }
}

/* --- data parallelism --------------------------------------------------------------------------------------------- */

/* 5 samples on 2 ranks: 3 and 2; the shapes of all ranks together stay. A rank beyond the samples has no passes. */
Test(ops, samples_are_shared_out_unevenly)
{
    const ar_config c = config_of(PAPER_STACK(1));
    const ari_step_case t = native_of(&c, (ar_parallel){.dp = 2, .tp = 2}, 5, 12);
    const ari_step_case many = native_of(&c, (ar_parallel){.dp = 6}, 5, 12);
    for (int rank = 0; rank < 2; rank++) { /* of dp */
        const found f = found_on(2 * rank, &t, ARI_OPERATION_NORM, ARI_PASS_FORWARD, ARI_NORM1, 0);
        cr_expect_eq(f.op[0].input[0].shape[0], 5);
        LOCAL(f.op[0].input[0], rank == 0 ? 3 : 2, 12, 768);
        AT(f.op[0].input[0].at[ARI_AXIS_DP], "S(0)");
    }
    cr_expect_eq(found_on(5, &many, ARI_OPERATION_NORM, ARI_PASS_FORWARD, ARI_NORM1, 0).n, 0);
}

/* A norm's weight meets whole values, or each rank's own tokens: then its gradient is a sum over tp too. */
Test(ops, placements_say_which_gradients_are_sums)
{
    const ar_config c = config_of(LARGE);
    const ari_step_case tp = native_of(&c, tp2, 4, 512), sp = native_of(&c, sp2, 4, 512);
    AT(the_only(&tp, ARI_OPERATION_NORM, ARI_PASS_FORWARD, ARI_NORM1, 0).weight[0].at[ARI_AXIS_TP], "I");
    AT(the_only(&sp, ARI_OPERATION_NORM, ARI_PASS_FORWARD, ARI_NORM1, 0).weight[0].at[ARI_AXIS_TP], "R");
    const ari_operation whole = the_only(&tp, ARI_OPERATION_WEIGHT_GRADIENT, ARI_PASS_BACKWARD, ARI_NORM1, 0);
    const ari_operation terms = the_only(&sp, ARI_OPERATION_WEIGHT_GRADIENT, ARI_PASS_BACKWARD, ARI_NORM1, 0);
    const ari_operation shard = the_only(&sp, ARI_OPERATION_WEIGHT_GRADIENT, ARI_PASS_BACKWARD, ARI_DOWN, 0);
    AT(whole.output[0].at[ARI_AXIS_DP], "P(sum)");
    AT(whole.output[0].at[ARI_AXIS_TP], "I");
    AT(terms.output[0].at[ARI_AXIS_TP], "P(sum)");
    AT(shard.output[0].at[ARI_AXIS_TP], "S(1)");
}

/* --- against runs ------------------------------------------------------------------------------------------------- */

enum { BATCH = 5, SEQ = 12, STEPS = 2 };

/* The collectives and products that the ranks record are those of the list, and so are the bytes that they count. */
static ar_status run_and_compare(const ar_config *c, ar_run run, bool forward_only)
{
    int64_t ids[BATCH * SEQ];
    for (size_t i = 0; i < BATCH * SEQ; i++)
        ids[i] = (int64_t)(i * 7 % c->vocab);
    const ar_batch one = {.batch = BATCH, .seq = SEQ, .input_ids = ids}, batch[STEPS] = {one, one};
    ar_sim_cluster timed; /* so that products are recorded */
    ari_cluster_result result = {.bytes = 0};
    OWNED(ar_trace_destroy) ar_trace *trace = NULL;
    uint64_t bytes = 0;
    AR_TRY(ar_sim_cluster_parse(&timed, "inside=1us:1GB/s flops=1G"));
    AR_TRY(ar_trace_create(&trace));
    run.batch = BATCH;
    run.seq = SEQ;
    run.threads = 1;
    run.sim =
        (ar_sim_options){.algorithm = run.sim.algorithm, .trace = trace, .cluster = &timed, .timeout_ns = 60000000000u};
    const ari_cluster_options o = {.config = c, .run = run, .batch = batch, .forward_only = forward_only};
    const ari_step_case t = {.run = run, .config = c, .forward_only = forward_only};
    const ar_status st = ari_cluster_run(&result, &o);
    free(result.loss);
    AR_TRY(st);
    AR_TRY(ari_recorded_calls(&(const char *){NULL}, &t, trace));
    AR_TRY(ari_traffic_bytes(&bytes, &t));
    return result.bytes == bytes
               ? AR_OK
               : ar_error_set(AR_ERR_DATA, "%zu bytes counted, %zu predicted", (size_t)result.bytes, (size_t)bytes);
}

static const char *const models[] = {LLAMA(31, 24, 36, 2, 24, 12, 4, false), LLAMA(31, 12, 36, 2, 12, 2, 2, true),
                                     GPT2(31, 24, 36, 2, 12), STACK(31, 24, 36, 2, 24, 4)};
enum { MODELS = sizeof models / sizeof *models };

/* Native numerics, in which sums stay fp32 or bf16; exact ones are compared in random_layouts_test. Samples are uneven,
 * and KV heads have copies. Exponents of weights and what comes before a backward pass, also without one. */
Test(ops, runs_make_the_collectives_and_products_of_the_list)
{
    static const struct {
        ar_parallel parallel;
        bool forward_only;
    } cases[] = {{{.tp = 2}, false},
                 {{.tp = 3, .sp = true}, false},
                 {{.tp = 4, .sp = true, .keep_gathered = true, .micro_batches = 2}, false},
                 {{.tp = 12}, false},
                 {{.tp = 2, .dp = 3, .micro_batches = 2, .forward_first = true}, false},
                 {{.dp = 4, .zero = 1}, false},
                 {{.tp = 2, .dp = 2, .zero = 1, .sp = true}, false},
                 {{.pp = 2, .dp = 2, .micro_batches = 2}, false},
                 {{.pp = 2, .tp = 4, .sp = true, .stages = {2, {0, 2}}, .micro_batches = 3}, false},
                 {{.tp = 3, .sp = true, .micro_batches = 2}, true},
                 {{.tp = 2, .dp = 2}, true},
                 {{.tp = 12}, true}};
    static const size_t bucket_bytes[] = {0, 3000, AR_BUCKET_BYTES};
    int runs = 0;
    for (size_t m = 0; m < MODELS; m++) {
        const ar_config c = config_of(models[m]);
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            const bool forward_only = cases[i].forward_only, native = !forward_only;
            const ar_run run =
                ROW(.plan = plan_of(c.arch, (m + i) % 2 ? AR_MLP_ROW_COLUMN : AR_MLP_COLUMN_ROW),
                    .parallel = cases[i].parallel, .steps = native ? STEPS : 0,
                    .optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW), .clip = native && i % 2 ? 0.1 : 0.0,
                    .numerics = native ? AR_NUMERICS_NATIVE : AR_NUMERICS_EXACT,
                    .precision = native && i % 3 == 1 ? AR_PRECISION_BF16 : AR_PRECISION_F32,
                    .storage = native && i % 3 == 0 ? AR_BF16 : 0,
                    .ddp = {.bucket_bytes = bucket_bytes[(m + i) % 3],
                            .order = i % 2 ? AR_BUCKETS_BY_SIZE : AR_BUCKETS_REVERSE,
                            .find_unused = m % 2 == 1},
                    .sim.algorithm = (m + i) % 2 ? AR_SIM_DIRECT : AR_SIM_RING);
            if (ar_parallel_check(&run.parallel, &c, &run.plan, BATCH, SEQ) != AR_OK)
                continue; /* GPT-2 has no copies of KV heads */
            runs++;
            cr_expect_eq(run_and_compare(&c, run, forward_only), AR_OK, "model %zu, case %zu: %s", m, i,
                         ar_error_message());
        }
    }
    cr_expect_gt(runs, 34);
}

/* Every collective of every rank under plans of all kinds, which split each layer in its own way, in both numerics. */
Test(ops, runs_of_random_plans_make_the_collectives_of_the_list)
{
    int runs = 0;
    for (uint64_t i = 0; i < (uint64_t)by_scale(12, 24, 200); i++) {
        uint64_t seed = i + 1000;
        char text[PLAN_DRAW_TEXT];
        SCOPED(ar_plan_fini) ar_plan plan;
        const ar_config c = config_of(models[i % MODELS]);
        const ar_parallel p = {.tp = 2 + (int)plan_draw_below(&seed, 3),
                               .dp = 1 + (int)(i % 5 == 0),
                               .sp = plan_draw_below(&seed, 2),
                               .keep_gathered = plan_draw_below(&seed, 2),
                               .micro_batches = 1 + (int)(i % 3 == 0)};
        plan_draw(text, &seed, &c, (plan_draw_options){.sp = p.sp, .wrong = i % 3 == 2});
        cr_assert_ok(ar_plan_parse(&plan, text, strlen(text), "drawn"));
        const ar_run run = ROW(.plan = plan, .parallel = p, .steps = i % 2 ? STEPS : 0,
                               .optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW),
                               .numerics = i / 4 % 2 ? AR_NUMERICS_NATIVE : AR_NUMERICS_EXACT,
                               .precision = i / 4 % 4 == 3 ? AR_PRECISION_BF16 : AR_PRECISION_F32);
        const ar_status fits = ar_parallel_check(&p, &c, &plan, BATCH, SEQ);
        cr_expect(fits == AR_OK || fits == AR_ERR_INDIVISIBLE, "%s", ar_error_message()); /* KV heads */
        if (fits == AR_OK)
            cr_expect_eq(run_and_compare(&c, run, false), AR_OK, "draw %d: %s: %s", (int)i, text, ar_error_message());
        runs += fits == AR_OK;
    }
    cr_expect_geq(runs, by_scale(8, 14, 100));
}

/* A list that is told another layout must not pass. */
Test(ops, another_step_than_the_runs_is_rejected)
{
    const ar_config c = config_of(models[0]);
    ar_run run = {.parallel = {.tp = 2, .dp = 2}};
    cr_expect_ok(run_and_compare(&c, run, false));
    run.fault = AR_FAULT_column_dx_not_reduced;
    cr_expect_eq(run_and_compare(&c, run, false), AR_ERR_DATA);
    run.fault = AR_FAULT_dp_group_missing;
    cr_expect_eq(run_and_compare(&c, run, false), AR_ERR_DATA);
}

/* --- size --------------------------------------------------------------------------------------------------------- */

/* Counts operations, up to a norm where `ends` says so. */
typedef struct count {
    size_t visits;
    bool ends;
} count;

static ar_status tally(void *user, const ari_operation *op)
{
    count *n = user;
    n->visits++;
    return n->ends && op->kind == ARI_OPERATION_NORM ? ar_error_set(AR_ERR_DATA, "enough") : AR_OK;
}

/* Some thousands of operations, whatever the world is. */
Test(ops, the_list_of_a_rank_does_not_grow_with_the_world)
{
    const ar_config c = config_of(LLAMA(128256, 16384, 53248, 126, 128, 8, 128, false));
    size_t visits[2];
    for (int i = 0; i < 2; i++) {
        const ar_parallel p = {.tp = 8, .dp = i == 0 ? 1 : 2048, .sp = true, .micro_batches = i == 0 ? 1 : 1000};
        ari_step_case t = native_of(&c, p, 2048 * 1000, 8192);
        t.run.ddp = ar_ddp_defaults();
        count n = {0};
        uint64_t bytes = 0;
        cr_assert_ok(ari_operations_once(&t, 7, tally, &n));
        cr_assert_ok(ari_traffic_bytes(&bytes, &t));
        visits[i] = n.visits;
    }
    cr_expect_lt(visits[1], 3 * visits[0]);
    cr_expect_lt(visits[1], 20000);
}

Test(ops, a_visitor_ends_the_walk_and_sizes_that_overflow_are_refused)
{
    const ar_config c = config_of(PAPER_STACK(2));
    const ari_step_case t = native_of(&c, tp2, 4, 512), huge = native_of(&c, tp2, (size_t)1 << 40, (size_t)1 << 40);
    count n = {0};
    cr_expect_eq(ari_operations(&huge, 0, tally, &n), AR_ERR_OVERFLOW);
    n = (count){.ends = true};
    cr_expect_eq(ari_operations(&t, 0, tally, &n), AR_ERR_DATA);
    cr_expect_eq(n.visits, 2); /* the embedding, the first norm */
}
