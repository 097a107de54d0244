/* SPDX-License-Identifier: Apache-2.0 */
/* The closed formulas of verify/bytes have the bytes of the list of operations (sim/plan). This file goes with that
 * list: nothing else of the tests of verify/bytes needs it. */
#include <glob.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/optimizer_private.h"
#include "ref/models/parallel_private.h"
#include "ref/models/plan_private.h"
#include "sim/plan/ops.h"
#include "support/layout_draw.h"
#include "support/plan_draw.h"
#include "tests/verify/support.h"
#include "verify/bytes/bytes.h"

static const ari_routed some_routed = {12345, 6789};

static uint64_t of_environment(const char *name, uint64_t usual)
{
    const char *given = getenv(name);
    return given ? strtoull(given, NULL, 10) : usual;
}

/* Compares both for a case, with what seed's bits choose besides. */
static bool same(const ari_step_case *s, const char *what, uint64_t seed)
{
    const ari_bytes_case c = {.run = s->run,
                              .config = s->config,
                              .forward_only = s->forward_only,
                              .verified = s->verified,
                              .routed = s->routed,
                              .repeats = s->repeats};
    char layout[160];
    uint64_t formula = 0, list = 0;
    const ar_status a = ari_traffic_bytes(&list, s), b = ari_bytes_predict(&formula, &c);
    ari_parallel_text(layout, sizeof layout, &s->run.parallel);
    cr_expect(
        a == b && list == formula,
        "seed %llu: formula %llu (%s), list %llu (%s), %lld more%s%s%s%s, zero %d, %zu rules, b %zu s %zu\n%s\n%s",
        (unsigned long long)seed, (unsigned long long)formula, ar_status_name(b), (unsigned long long)list,
        ar_status_name(a), (long long)(formula - list), s->run.numerics == AR_NUMERICS_NATIVE ? " native" : "",
        s->forward_only ? " forward" : "", s->routed ? " routed" : "", s->verified ? " verified" : "",
        s->run.parallel.zero, s->run.plan.rules, s->run.batch, s->run.seq, layout, what);
    return a == b && list == formula;
}

static void choose(ari_step_case *s, uint64_t *seed)
{
    s->repeats = plan_draw_below(seed, 2);
    s->run.numerics = (ar_numerics)plan_draw_below(seed, 2);
    s->forward_only = plan_draw_below(seed, 8) == 0;
    s->verified = plan_draw_below(seed, 3);
    s->routed = plan_draw_below(seed, 2) ? &some_routed : NULL;
    s->run.steps = plan_draw_below(seed, 4);
}

Test(bytes_oracle, draws_have_the_bytes_of_the_list)
{
    const uint64_t begin = of_environment("ANYRANK_TEST_SEED", 1);
    const uint64_t end = begin + of_environment("ANYRANK_TEST_DRAWS", 3000);
    char text[LAYOUT_DRAW_TEXT];
    int different = 0;
    for (uint64_t i = begin; i < end && different < 10; i++) {
        layout_draw d;
        uint64_t seed = i;
        layout_draw_make(&d, (layout_draw_kind)(i % 5), i);
        if (i % 2)
            cr_assert_ok(layout_draw_add_plan(&d, &seed));
        if (i % 3 == 0 && d.config.experts.n == 0)
            layout_draw_add_experts(&d, i);
        layout_draw_add_more(&d);
        ari_step_case s = {.run = d.run, .config = &d.config};
        choose(&s, &seed);
        layout_draw_text(text, sizeof text, &d);
        different += !same(&s, text, i);
        ar_plan_fini(&d.run.plan);
    }
}

/* --- models of real sizes, and plans of files -------------------------------------------------------------------- */

/* Of each model or plan; thousands were compared when the formulas were written. */
#define LAYOUTS of_environment("ANYRANK_TEST_LAYOUTS", 3)
#define PICK(seed, list) (list)[plan_draw_below(seed, (unsigned)(sizeof(list) / sizeof *(list)))]

static void draw_parallel(ar_parallel *p, uint64_t *seed)
{
    static const int tps[] = {1, 2, 4, 8, 16}, dps[] = {1, 2, 3, 4, 6, 8}, cps[] = {1, 1, 2, 4, 8},
                     pps[] = {1, 1, 2, 4}, eps[] = {1, 2, 4, 8};
    *p = (ar_parallel){.tp = PICK(seed, tps), .dp = PICK(seed, dps), .cp = PICK(seed, cps), .pp = PICK(seed, pps)};
    p->cp_inner = p->cp > 1 && plan_draw_below(seed, 2) ? 2 : 1;
    p->zigzag = p->cp > p->cp_inner && plan_draw_below(seed, 2);
    p->ep = PICK(seed, eps);
    p->sp = plan_draw_below(seed, 3) > 0;
    p->etp = p->sp && plan_draw_below(seed, 2) ? 1 : 0;
    p->dispatch = (ar_dispatch)plan_draw_below(seed, 2);
    p->micro_batches = 1 + (int)plan_draw_below(seed, 4);
    p->virtual_stages = 1;
    p->schedule = (ar_pp_schedule)plan_draw_below(seed, AR_PP_SCHEDULES);
    if (p->pp > 1 && p->schedule == AR_PP_INTERLEAVED)
        p->virtual_stages = 2;
    p->keep_gathered = plan_draw_below(seed, 2);
    p->zero = (int)plan_draw_below(seed, 4);
    p->dp_replicate = p->zero > 0 && p->dp % 2 == 0 && plan_draw_below(seed, 2) ? 2 : 1;
    p->recompute =
        (ar_recomputation){(ar_recompute)plan_draw_below(seed, AR_RECOMPUTES), 1 + (int)plan_draw_below(seed, 3)};
}

static void draw_run(ari_step_case *s, uint64_t *seed)
{
    static const size_t buckets[] = {0, 1000, 4000000, AR_BUCKET_BYTES, 1000000000}, seqs[] = {32, 64, 512, 2048, 8192};
    static const ar_optimizer_kind kinds[] = {AR_OPTIMIZER_SGD, AR_OPTIMIZER_ADAMW, AR_OPTIMIZER_MUON};
    ar_run *r = &s->run;
    choose(s, seed);
    draw_parallel(&r->parallel, seed);
    r->batch = 1 + plan_draw_below(seed, 40);
    r->seq = PICK(seed, seqs);
    r->optimizer = ar_optimizer_defaults(PICK(seed, kinds));
    r->optimizer.shards = plan_draw_below(seed, 2);
    r->optimizer.qk_clip = r->optimizer.kind == AR_OPTIMIZER_MUON && plan_draw_below(seed, 2) ? 100.0 : 0.0;
    r->clip = plan_draw_below(seed, 2) ? 1.0 : 0.0;
    r->ddp.bucket_bytes = PICK(seed, buckets);
    r->ddp.order = (ar_bucket_order)plan_draw_below(seed, 2);
    r->ddp.mode = (ar_bucket_mode)plan_draw_below(seed, 2);
    r->ddp.find_unused = plan_draw_below(seed, 2);
    r->precision = plan_draw_below(seed, 2) ? AR_PRECISION_BF16 : AR_PRECISION_F32;
    r->storage = r->numerics == AR_NUMERICS_NATIVE && plan_draw_below(seed, 2) ? AR_BF16 : (ar_dtype)0;
    r->loss.label_smoothing = plan_draw_below(seed, 2) ? 0.1 : 0.0;
    r->loss.router.balance = (ar_balance)plan_draw_below(seed, AR_BALANCES);
    r->loss.router.z_loss = plan_draw_below(seed, 2) ? 0.1 : 0.0;
    r->loss.router.bias_update = plan_draw_below(seed, 2) ? 0.1 : 0.0;
}

/* Compares legal layouts of a model, under its own plan or one of a file, until there are `n`. */
static void compare_layouts(const char *model, const char *plan, size_t n)
{
    ar_config c;
    size_t legal = 0;
    uint64_t seed = of_environment("ANYRANK_TEST_SEED", 1);
    cr_assert_ok(ar_config_load(&c, model));
    ari_step_case s = {.config = &c};
    if (plan)
        cr_assert_ok(ar_plan_load(&s.run.plan, plan));
    for (size_t tries = 0; tries < 10000 && legal < n; tries++) {
        const uint64_t begin = seed;
        draw_run(&s, &seed);
        c.mtp = !plan && c.arch != AR_ARCH_STACK && plan_draw_below(&seed, 4) == 0; /* the list knows none of a stack */
        if (ar_run_check(&s.run, &c) != AR_OK)
            continue;
        legal++;
        if (!same(&s, plan ? plan : model, begin))
            break;
    }
    ar_plan_fini(&s.run.plan);
    ar_error_clear();
    cr_expect(legal > 0, "no layout of %s with %s is legal", model, plan ? plan : "its own plan");
}

Test(bytes_oracle, bundled_models_have_the_bytes_of_the_list)
{
    glob_t models;
    cr_assert_eq(glob(TEST_DATA_DIR "/*/config.json", 0, NULL, &models), 0);
    for (size_t i = 0; i < models.gl_pathc; i++)
        compare_layouts(models.gl_pathv[i], NULL, LAYOUTS);
    cr_expect_gt(models.gl_pathc, 20);
    globfree(&models);
}

Test(bytes_oracle, plans_of_files_have_the_bytes_of_the_list)
{
    static const struct {
        const char *model, *plan;
    } all[] = {{"/deepseek-demo", "/tests/plans/deepseek-v2.json"},
               {"/gpt2-demo", "/tests/plans/gpt2-sequence.json"},
               {"/gpt2-demo", "/tests/plans/gpt2.json"},
               {"/gpt2-demo", "/ref/data/plans/gpt2.json"},
               {"/llama-demo", "/tests/plans/llama-local.json"},
               {"/llama-demo", "/tests/plans/llama-rep.json"},
               {"/llama-demo", "/tests/plans/llama-sequence-loss.json"},
               {"/llama-demo", "/tests/plans/llama-sequence.json"},
               {"/llama-3-8b", "/tests/plans/llama.json"},
               {"/llama-demo", "/ref/data/plans/llama-sequence-loss.json"},
               {"/llama-demo", "/ref/data/plans/llama-sequence.json"},
               {"/llama-3-8b", "/ref/data/plans/llama.json"},
               {"/llama-demo", "/tests/plans/mistral-base.json"},
               {"/mixtral-demo", "/tests/plans/mixtral.json"},
               {"/qwen2.5-7b", "/tests/plans/qwen2-attention-replicated.json"},
               {"/qwen2.5-7b", "/tests/plans/qwen2-embedding.json"},
               {"/qwen2-moe-demo", "/tests/plans/qwen2moe-attention.json"},
               {"/qwen3-235b-a22b", "/tests/plans/qwen3moe-apart.json"},
               {"/stack-demo", "/ref/data/plans/stack.json"}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        char model[600], plan[600];
        snprintf(model, sizeof model, "%s%s/config.json", TEST_DATA_DIR, all[i].model);
        snprintf(plan, sizeof plan, "%s%s", TEST_SOURCE_DIR, all[i].plan);
        compare_layouts(model, plan, LAYOUTS);
    }
}

/* Redistributions that a module declares around its layers, and layers that take or leave something else. */
Test(bytes_oracle, declared_modules_have_the_bytes_of_the_list)
{
#define USUAL \
    "{\"modules\": \"*.[qkv]_proj\", \"style\": \"colwise\"}, {\"modules\": \"*.o_proj\", \"style\": \"rowwise\"}"
    static const char *const all[] = {
        USUAL ", {\"modules\": \"*.self_attn\", \"style\": \"prepare\", \"output\": [\"P(sum)\", \"R\"]}",
        USUAL ", {\"modules\": \"*.self_attn\", \"style\": \"prepare\", \"input\": [[\"S(1)\", \"R\"]]}",
        USUAL ", {\"modules\": \"*.self_attn\", \"style\": \"prepare\", \"input\": [[\"R\", \"S(1)\"]]}",
        USUAL ", {\"modules\": \"*.self_attn\", \"style\": \"prepare\", \"output\": [\"S(1)\", \"R\"]}",
        USUAL ", {\"modules\": \"*.mlp\", \"style\": \"prepare\", \"output\": [\"P(sum)\", \"R\"]}"};
    ar_config c;
    size_t legal = 0;
    cr_assert_ok(ar_config_load(&c, TEST_DATA_DIR "/llama-demo/config.json"));
    for (size_t i = 0; i < 8 * sizeof all / sizeof *all; i++) {
        char text[600];
        ari_step_case s = {.config = &c, .run = {.parallel = {.tp = 2}, .batch = 2, .seq = 32}};
        s.run.parallel.sp = i % 2;
        s.run.numerics = (ar_numerics)(i / 2 % 2);
        s.run.parallel.recompute.what = i / 4 % 2 ? AR_RECOMPUTE_FULL : AR_RECOMPUTE_NONE;
        snprintf(text, sizeof text, "{\"rules\": [%s]}", all[i / 8]);
        cr_assert_ok(ar_plan_parse(&s.run.plan, text, strlen(text), "p"));
        if (ari_plan_check(&s.run.plan, &c, s.run.parallel.sp) == AR_OK) {
            legal++;
            same(&s, text, i);
        }
        ar_plan_fini(&s.run.plan);
    }
    ar_error_clear();
    cr_expect_geq(legal, 12);
}
