/* SPDX-License-Identifier: Apache-2.0 */
/* What a production system holds, against formulas that others have published or that are worked out by hand. */
#include <limits.h>

#include "anyrank/config.h"
#include "ref/models/model_private.h"
#include "support/together.h"
#include "tests/planner/counted.h"
#include "tests/planner/shapes.h"
#include "verify/plan/time.h"

/* Table 2 of Korthikanti et al. 2022 (arXiv:2205.05198), bytes of a layer: s, b, h, a, t as there. */
static double korthikanti(const ari_planned *p)
{
    const ar_config *c = p->step.config;
    const double s = (double)p->step.run.seq, b = (double)p->step.run.batch, h = (double)c->hidden;
    const double scores = 5.0 * (double)c->heads * s * s * b, t = p->step.run.parallel.tp;
    const bool sp = p->step.run.parallel.sp;
    switch (p->step.run.parallel.recompute.part) {
    case AR_RECOMPUTE_NONE:
        return sp ? (34.0 * s * b * h + scores) / t : s * b * h * (10.0 + 24.0 / t) + scores / t;
    case AR_RECOMPUTE_SELECTIVE:
        return sp ? 34.0 * s * b * h / t : s * b * h * (10.0 + 24.0 / t);
    default:
        return 2.0 * s * b * h / (sp ? t : 1.0);
    }
}

static double kept(const ari_planned *p)
{
    const ari_memory m = shape_memory(p);
    return shape_kept(&m);
}

static double held(const ari_planned *p, ari_memory_kind kind)
{
    return shape_memory(p).bytes[kind];
}

CLAIM(blocks_keep_what_korthikanti_et_al_count_to_the_byte)
{
    static const char *const models[] = {"gpt-22b", "gpt3-175b", "gpt-530b", "gpt-1t"};
    static const int tp[] = {1, 2, 8};
    for (size_t i = 0; i < 4 * 3 * 2 * 2 * 3; i++) {
        const ar_config c = shape_bundled(models[i % 4]);
        const bool sp = i / 24 % 2 != 0;
        ari_planned p = shape_planned(&c, tp[i / 4 % 3], sp, i / 12 % 2 != 0 ? 4 : 1, 2048);
        p.step.run.parallel.recompute.part = (ar_recompute)(i / 48);
        p.step.run.dropout = 0.1;
        const ari_memory m = shape_memory(&p);
        cr_expect_eq(shape_kept(&m), (double)c.layers * korthikanti(&p), "%s tp=%d sp=%d batch %zu recompute %d: %.0f",
                     c.name, p.step.run.parallel.tp, sp, p.step.run.batch, (int)p.step.run.parallel.recompute.part,
                     shape_kept(&m));
    }
}

CLAIM(outside_of_the_blocks_are_mask_norm_projection_and_logits)
{
    const ar_config c = shape_bundled("gpt3-175b");
    ari_planned p = shape_planned(&c, 8, true, 2, 2048);
    p.step.run.dropout = 0.1;
    const ari_memory m = shape_memory(&p);
    const double sbh = 2048.0 * 2.0 * 12288.0;
    cr_expect_eq(m.bytes[ARI_MEMORY_OUTER], sbh / 8.0 * (1.0 + 2.0 + 2.0));
    cr_expect_eq(m.bytes[ARI_MEMORY_LOGITS], 4.0 * 2048.0 * 2.0 * 51200.0 / 8.0);
}

/* The first stage of a pipeline has most: the paper's section 4.2.3. */
static ari_planned pipeline(const ar_config *c, int chunks, int micro_batches)
{
    ari_planned p = shape_planned(c, 8, true, (size_t)micro_batches, 2048);
    p.step.run.dropout = 0.1;
    p.step.run.parallel.micro_batches = micro_batches;
    p.step.run.parallel.pp = 8;
    p.step.run.parallel.virtual_stages = chunks;
    p.step.run.parallel.schedule = chunks > 1 ? AR_PP_INTERLEAVED : AR_PP_1F1B;
    return p;
}

CLAIM(first_stage_keeps_the_worth_of_all_layers)
{
    const ar_config c = shape_bundled("gpt3-175b");
    const double sbh = 2048.0 * 12288.0, layer = sbh / 8.0 * (34.0 + 5.0 * 96.0 * 2048.0 / 12288.0);
    ari_planned p = pipeline(&c, 1, 64);
    cr_expect_eq(kept(&p), 96.0 * layer);
    cr_expect_eq(held(&p, ARI_MEMORY_OUTER), 8.0 * sbh / 8.0); /* the masks of 8 micro-batches */
    cr_expect_eq(held(&p, ARI_MEMORY_LOGITS), 0.0);
    p = pipeline(&c, 6, 64); /* L (1 + (p - 1) / (p m)) */
    cr_expect_eq(kept(&p), 96.0 * (1.0 + 7.0 / 48.0) * layer);
    p = pipeline(&c, 1, 3); /* fewer micro-batches than stages */
    cr_expect_eq(kept(&p), 96.0 / 8.0 * 3.0 * layer);
    p.step.run.parallel.schedule = AR_PP_GPIPE;
    p.step.run.parallel.micro_batches = 64;
    p.step.run.batch = 64;
    cr_expect_eq(kept(&p), 96.0 / 8.0 * 64.0 * layer);
}

CLAIM(more_stages_than_layers_are_refused)
{
    const ar_config c = shape_bundled("llama-3-8b");
    ari_planned p = shape_planned(&c, 1, false, 2, 128);
    ari_memory m;
    p.step.run.parallel.pp = 32;
    cr_expect_ok(ari_memory_production(&m, &p));
    p.step.run.parallel.virtual_stages = 2;
    cr_expect_eq(ari_memory_production(&m, &p), AR_ERR_INDIVISIBLE);
    p.step.run.parallel.pp = p.step.run.parallel.virtual_stages = INT_MAX;
    cr_expect_eq(ari_memory_production(&m, &p), AR_ERR_INDIVISIBLE);
}

/* bf16 weights and gradients, fp32 master weights and two moments. */
CLAIM(states_divide_only_where_they_are_sharded)
{
    static const struct {
        int tp;
        double parameters; /* norms and the biases of row-parallel layers on each rank, KV heads copied beyond tp 8 */
    } ranks[] = {{1, 4754202624.0}, {8, 594848768.0}, {16, 314529280.0}, {32, 174369536.0}};
    const ar_config c = shape_bundled("stack-4.8b");
    for (size_t i = 0; i < sizeof ranks / sizeof *ranks; i++) {
        const ari_planned p = shape_planned(&c, ranks[i].tp, true, 2, 4096);
        const ari_memory m = shape_memory(&p);
        const double n = ranks[i].parameters;
        cr_expect_eq(m.bytes[ARI_MEMORY_WEIGHTS], 2.0 * n, "tp=%d: %.0f", ranks[i].tp,
                     m.bytes[ARI_MEMORY_WEIGHTS] / 2.0);
        cr_expect_eq(m.bytes[ARI_MEMORY_GRADIENTS], 2.0 * n);
        cr_expect_eq(m.bytes[ARI_MEMORY_MASTER], 4.0 * n);
        cr_expect_eq(m.bytes[ARI_MEMORY_OPTIMIZER], 8.0 * n);
    }
}

CLAIM(zero_divides_states_then_gradients_then_weights_over_dp_and_cp)
{
    const ar_config c = shape_bundled("llama-3-8b");
    const double n = 8030261248.0;
    for (int stage = 0; stage <= 3; stage++) {
        ari_planned p = shape_planned(&c, 1, false, 8, 8192);
        p.step.run.parallel.dp = 8;
        p.step.run.parallel.zero = stage;
        p.step.run.parallel.cp = 4;
        const ari_memory m = shape_memory(&p);
        cr_expect_eq(m.bytes[ARI_MEMORY_OPTIMIZER], 8.0 * n / (stage >= 1 ? 32.0 : 1.0));
        cr_expect_eq(m.bytes[ARI_MEMORY_MASTER], 4.0 * n / (stage >= 1 ? 32.0 : 1.0));
        cr_expect_eq(m.bytes[ARI_MEMORY_GRADIENTS], 2.0 * n / (stage >= 2 ? 32.0 : 1.0));
        cr_expect_eq(m.bytes[ARI_MEMORY_WEIGHTS], 2.0 * n / (stage >= 3 ? 32.0 : 1.0));
    }
    ari_planned p = shape_planned(&c, 1, false, 1, 128);
    p.step.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_SGD);
    cr_expect_eq(held(&p, ARI_MEMORY_OPTIMIZER), 0.0);
    p.step.run.optimizer.momentum = 0.9;
    cr_expect_eq(held(&p, ARI_MEMORY_OPTIMIZER), 4.0 * n);
    p.step.forward_only = true;
    const ari_memory m = shape_memory(&p);
    cr_expect_eq(ari_memory_sum(&m), 2.0 * n + m.bytes[ARI_MEMORY_WORKSPACE]);
}

/* Of working copies the largest is that of the embedding or the head here: V h parameters, weights and gradients. */
CLAIM(zero_3_works_on_whole_copies)
{
    const ar_config c = shape_bundled("llama-3-8b");
    ari_planned p = shape_planned(&c, 1, false, 8, 8192);
    p.flash = true;
    p.step.run.parallel.dp = 8;
    const ari_memory whole = shape_memory(&p);
    p.step.run.parallel.zero = 3;
    const ari_memory divided = shape_memory(&p);
    cr_expect_eq(divided.bytes[ARI_MEMORY_WORKSPACE] - whole.bytes[ARI_MEMORY_WORKSPACE],
                 (2.0 + 2.0) * (128256.0 * 4096.0 + 4096.0));
}

/* A token of a layer, in units of a value: the inputs of two norms, of q|k|v, of gate|up and of the output projection,
 * each h; q, k and v; gate, up and their product. Flash attention adds an fp32 number for each head. */
CLAIM(a_llama_keeps_its_own_terms)
{
    const ar_config c = shape_bundled("llama-3-8b");
    const double h = 4096.0, kv = 1024.0, ffn = 14336.0, heads = 32.0, tokens = 2.0 * 8192.0;
    const double sharded = 2.0 * (h + h + 2.0 * kv + 3.0 * ffn), streams = 2.0 * 4.0 * h;
    ari_planned p = shape_planned(&c, 8, true, 2, 8192);
    p.flash = true;
    cr_expect_eq(kept(&p), 32.0 * tokens / 8.0 * (sharded + streams + 4.0 * heads));
    p.step.run.parallel.sp = false;
    cr_expect_eq(kept(&p), 32.0 * tokens * ((sharded + 4.0 * heads) / 8.0 + streams));
    p.flash = false; /* probabilities in 16 bits, no dropout */
    cr_expect_eq(kept(&p), 32.0 * tokens * ((sharded + 2.0 * heads * 8192.0) / 8.0 + streams));
    p.step.run.parallel.cp = 4; /* a quarter of the queries, each with all keys */
    cr_expect_eq(kept(&p), 32.0 * tokens / 4.0 * ((sharded + 2.0 * heads * 8192.0) / 8.0 + streams));
}

/* The gathered input of a column-parallel layer is there whole while it is worked on, beside the layer's shard of the
 * MLP: sequence parallelism does not divide the peak by tp. */
CLAIM(workspace_has_the_gathered_input_of_a_column_parallel_layer)
{
    const ar_config c = shape_bundled("stack-4.8b");
    ari_planned p = shape_planned(&c, 8, true, 2, 4096);
    p.flash = true;
    const double before = kept(&p);
    cr_expect_eq(held(&p, ARI_MEMORY_WORKSPACE), 2.0 * (33554432.0 + 11272192.0));
    p.step.run.parallel.keep_gathered = true; /* then it is kept, twice a layer */
    cr_expect_eq(kept(&p) - before, 32.0 * 2.0 * 2.0 * 33554432.0 * 7.0 / 8.0);
}

CLAIM(recomputation_works_on_a_whole_block_at_a_time)
{
    const ar_config c = shape_bundled("gpt-22b");
    const double sbh = 2048.0 * 6144.0, scores = 5.0 * 64.0 * 2048.0 * 2048.0;
    ari_planned p = shape_planned(&c, 8, true, 1, 2048);
    p.step.run.dropout = 0.1;
    const double base = held(&p, ARI_MEMORY_WORKSPACE);
    p.step.run.parallel.recompute.part = AR_RECOMPUTE_SELECTIVE;
    cr_expect_eq(held(&p, ARI_MEMORY_WORKSPACE) - base, scores / 8.0);
    p.step.run.parallel.recompute.part = AR_RECOMPUTE_FULL;
    cr_expect_eq(held(&p, ARI_MEMORY_WORKSPACE) - base, (32.0 * sbh + scores) / 8.0);
}

/* Of a model with two further tokens five blocks are, one at a time. */
CLAIM(blocks_for_further_tokens_are_recomputed_too)
{
    ari_time_options o = {.fp32_sums = false};
    double of[2][AR_RECOMPUTES], works[2][AR_RECOMPUTES], seconds[2][AR_RECOMPUTES];
    ar_config c = shape_bundled("mtp-demo");
    cr_assert_ok(ar_sim_cluster_parse(&o.cluster, "h100 flops=989T"));
    for (size_t i = 0; i < 2 * AR_RECOMPUTES; i++) {
        const size_t further = i / AR_RECOMPUTES, what = i % AR_RECOMPUTES;
        ari_time t;
        c.mtp = 2 * further;
        ari_planned p = shape_planned(&c, 1, false, 2, 64);
        p.step.run.parallel.recompute.part = (ar_recompute)what;
        const ari_memory m = shape_memory(&p);
        cr_assert_ok(ari_time_of(&t, &p, &o));
        of[further][what] = shape_kept(&m);
        works[further][what] = m.bytes[ARI_MEMORY_WORKSPACE];
        seconds[further][what] = t.seconds[ARI_TIME_RECOMPUTE];
    }
    for (size_t what = AR_RECOMPUTE_SELECTIVE; what < AR_RECOMPUTES; what++) {
        const double less = of[0][0] - of[0][what];
        cr_expect(less > 0.0);
        cr_expect_eq(of[1][0] - of[1][what], 5.0 / 3.0 * less);
        cr_expect_eq(works[1][what] - works[1][0], works[0][what] - works[0][0]);
        cr_expect_float_eq(seconds[1][what], 5.0 / 3.0 * seconds[0][what], 1e-9 * seconds[1][what]);
        cr_expect(seconds[0][what] > 0.0);
    }
}

/* A plan that splits the MLPs otherwise makes them alone keep more. */
CLAIM(a_plan_decides_what_is_divided)
{
    ar_config c = shape_bundled("llama-3-8b");
    c.layers = 4;
    ari_planned p = shape_planned(&c, 4, false, 1, 1024);
    p.flash = true;
    const ari_memory plain = shape_memory(&p);
    cr_assert_ok(ar_plan_add(&p.step.run.plan, c.arch, "model.layers.*.mlp.*", AR_STYLE_REPLICATE));
    const ari_memory one = shape_memory(&p);
    cr_expect_eq(one.bytes[ARI_MEMORY_MLP] - plain.bytes[ARI_MEMORY_MLP],
                 4.0 * 2.0 * 1024.0 * 3.0 * 14336.0 * 3.0 / 4.0);
    cr_expect_eq(one.bytes[ARI_MEMORY_WEIGHTS] - plain.bytes[ARI_MEMORY_WEIGHTS],
                 4.0 * 2.0 * 3.0 * 4096.0 * 14336.0 * 3.0 / 4.0);
    cr_expect_eq(one.bytes[ARI_MEMORY_ATTENTION], plain.bytes[ARI_MEMORY_ATTENTION]);
    ar_plan_fini(&p.step.run.plan);
}

/* Stages hold a copy each of a tied table, and each part of the model is on one stage. */
CLAIM(stages_have_the_parameters_of_all)
{
    ar_config c = shape_gpt(2, 256, 4, 1024);
    c.max_positions = 4096; /* more than what the last stage has of logits */
    ari_planned p = shape_planned(&c, 1, false, 2, 64);
    size_t all = 0;
    cr_assert_ok(ari_config_parameters(&c, &all));
    cr_expect_eq(held(&p, ARI_MEMORY_WEIGHTS), 2.0 * (double)all);
    p.step.run.parallel.pp = 2;
    const double table = 1024.0 * 256.0, block = 12.0 * 256.0 * 256.0 + 13.0 * 256.0;
    cr_expect_eq((double)all, table + 4096.0 * 256.0 + 2.0 * block + 512.0);
    cr_expect_eq(held(&p, ARI_MEMORY_WEIGHTS), 2.0 * (table + 4096.0 * 256.0 + block));
}

/* Llama's block with Mixtral's experts, of which a token goes to two: with its vocabulary that is Mixtral 8x7B. */
static ar_config mixtral(void)
{
    ar_config c = shape_bundled("llama-3-8b");
    c.vocab = 32000;
    c.experts = (ar_experts){.n = 8, .per_token = 2, .ffn = 14336, .normalised = true};
    return c;
}

/* Its published parameters; 12.9 billion that a token meets, of which 11.3 are those of its experts and of the routers. */
CLAIM(memory_has_all_experts_and_a_token_meets_its_own)
{
    ar_config c = mixtral();
    ari_planned p = shape_planned(&c, 1, false, 1, 128);
    double model[2], hardware = 0.0;
    cr_expect_eq(held(&p, ARI_MEMORY_WEIGHTS), 2.0 * 46702792704.0);
    cr_expect_eq(ari_mlp_matrices(&c, false), 32.0 * 4096.0 * (8.0 * 3.0 * 14336.0 + 8.0));
    cr_expect_eq(ari_mlp_matrices(&c, true), 32.0 * 4096.0 * (2.0 * 3.0 * 14336.0 + 8.0));
    for (int k = 0; k < 2; k++) {
        c.experts.per_token = (size_t)k + 1;
        flops_counted(&model[k], &hardware, &p);
    }
    cr_expect_float_eq((model[1] - model[0]) / (3.0 * 2.0 * 32.0 * 3.0 * 4096.0 * 14336.0), 1.0, 1e-9);
}

/* In the place of the MLP's values: fp32 probabilities of all experts, and of each of two the row that goes to it, gate,
 * up and their product, and the row that it makes. */
CLAIM(experts_keep_their_rows)
{
    ar_config c = mixtral();
    const double h = 4096.0, kv = 1024.0, ffn = 14336.0, heads = 32.0, tokens = 2.0 * 8192.0;
    const double cut = 2.0 * (2.0 * h + 2.0 * kv + 2.0 * 3.0 * ffn) + 4.0 * heads;
    const double whole = 2.0 * 4.0 * h + 2.0 * 2.0 * 2.0 * h + 4.0 * 8.0;
    ari_planned p = shape_planned(&c, 8, false, 2, 8192);
    p.flash = true;
    cr_expect_eq(kept(&p), 32.0 * tokens * (cut / 8.0 + whole));
    c.dense[0] = 1;
    const double mlp = 2.0 * 3.0 * ffn / 8.0 - (2.0 * 2.0 * 3.0 * ffn / 8.0 + 2.0 * 2.0 * 2.0 * h + 4.0 * 8.0);
    cr_expect_eq(kept(&p), 32.0 * tokens * (cut / 8.0 + whole) + tokens * mlp);
}

EVERY_CLAIM(production)
