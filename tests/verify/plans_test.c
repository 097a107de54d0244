/* SPDX-License-Identifier: Apache-2.0 */
/* Plans that users write, run: every tensor has the baseline's bits and the bytes are those predicted, or check refutes
 * the plan. */
#include <fnmatch.h>

#include "ref/comm/call.h"
#include "ref/models/plan_private.h"
#include "ref/record/ledger.h"
#include "support/plan_draw.h"
#include "support/row.h"
#include "tests/verify/support.h"
#include "verify/lint/lint_private.h"

enum { BATCH = 3, SEQ = 12 };

/* Types give the verdict that numbers give. first: of the first finding; NULL: any. */
static void expect_lint(const char *json, const ar_run *checked, ar_parallel parallel, bool clean, const char *first)
{
    const ar_config c = config_of(json);
    ar_run run = *checked;
    OWNED(ari_lint_report_destroy) ar_lint_report *r = NULL;
    run.parallel = parallel;
    cr_assert_ok(ari_lint(&r, &run, &c));
    cr_expect_eq(r->count == 0, clean, "lint has %zu findings: %s", r->count, clean ? r->finding[0].module : "");
    if (first && r->count > 0)
        cr_expect_str_eq(r->finding[0].module, first);
}

static ar_check_report *check_plan(const char *json, const ar_plan *plan, ar_parallel parallel, int steps)
{
    OWNED(end_folder) char *folder = new_model(json);
    ar_check_options o = check_layouts(folder, &parallel, 1, BATCH, SEQ);
    o.run.plan = *plan;
    o.run.steps = (uint64_t)steps;
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    ar_check_report *r = check_or_fail(&o);
    expect_lint(json, &o.run, parallel, r->run[0].result == AR_CHECK_SAME, NULL);
    return r;
}

/* Whether a tensor is the output of the module, or of one in it. A module of several that are one product is called by
 * all of them, "self_attn.q_proj, k_proj"; GPT-2's c_attn makes q, k and v. */
static bool is_of(const char *tensor, const char *module)
{
    const char *const of_packed[] = {"q", "k", "v"}, *last = strrchr(module, '.');
    const size_t stem = last ? (size_t)(last + 1 - module) : 0;
    const bool packed = strcmp(module + stem, "c_attn") == 0;
    char glob[256], leaves[128];
    bool found = false;
    snprintf(leaves, sizeof leaves, "%s", module + stem);
    char *rest = leaves, *leaf = NULL;
    for (int i = 0; packed && i < 3; i++) {
        snprintf(glob, sizeof glob, "%.*s%s:*", (int)stem, module, of_packed[i]);
        found = found || fnmatch(glob, tensor, 0) == 0;
    }
    while ((leaf = strsep(&rest, ",")) != NULL) {
        leaf += strspn(leaf, " ");
        snprintf(glob, sizeof glob, "%.*s%s:*", (int)stem, module, leaf);
        found = found || fnmatch(glob, tensor, 0) == 0;
        snprintf(glob, sizeof glob, "%.*s%s.*:*", (int)stem, module, leaf);
        found = found || fnmatch(glob, tensor, 0) == 0;
    }
    return found;
}

/* The first thing that lint finds is in the module whose output is the first that differs, or in one around it. */
static void expect_refuted(const char *json, const ar_plan *plan, ar_parallel parallel, const ar_check_run *run,
                           const char *what)
{
    const ar_config c = config_of(json);
    const ar_run asked = {.model = "wrong", .plan = *plan, .parallel = parallel, .batch = BATCH, .seq = SEQ};
    OWNED(ari_lint_report_destroy) ar_lint_report *r = NULL;
    cr_expect_eq(run->result, AR_CHECK_DIFFERENT, "%s", what);
    cr_expect_eq(run->bytes_counted, run->bytes_predicted, "%s", what);
    cr_assert_ok(ari_lint(&r, &asked, &c));
    cr_assert(r->count > 0 && run->has_difference, "%s", what);
    cr_expect(is_of(run->first.tensor, r->finding[0].module), "lint names %s, but %s differs first; %s",
              r->finding[0].module, run->first.tensor, what);
}

/* Two of five wrong. */
Test(plans, random_ones_have_the_baselines_bits_or_are_refuted)
{
    static const int tp[] = {2, 3, 4, 6};
    int wrong = 0, drawn = by_scale(16, 32, 500);
    for (uint64_t i = 0; i < (uint64_t)drawn; i++) {
        uint64_t seed = i + 1;
        char text[PLAN_DRAW_TEXT], what[PLAN_DRAW_TEXT + 64];
        const char *json = tiny_models[i % TINY_MODELS];
        const ar_config c = config_of(json);
        ar_parallel p = {.tp = tp[plan_draw_below(&seed, 4)], .dp = (int)plan_draw_below(&seed, 8) / 7 + 1};
        p.sp = plan_draw_below(&seed, 3) == 0;
        p.keep_gathered = p.sp && plan_draw_below(&seed, 3) == 0;
        p.zero = p.dp > 1;
        SCOPED(ar_plan_fini) ar_plan plan;
        const plan_draw_options o = {.sp = p.sp, .wrong = i % 5 < 2};
        plan_draw(text, &seed, &c, o);
        cr_assert_eq(ar_plan_parse(&plan, text, strlen(text), "drawn"), AR_OK, "%s: %s", ar_error_message(), text);
        snprintf(what, sizeof what, "seed %d, %s, tp=%d sp=%d: %s", (int)i + 1, tiny_names[i % TINY_MODELS], p.tp, p.sp,
                 text);
        OWNED(ar_check_report_destroy) ar_check_report *r = check_plan(json, &plan, p, i % 3 == 0);
        if (o.wrong)
            expect_refuted(json, &plan, p, &r->run[0], what);
        else
            expect_same(r, what);
        wrong += o.wrong;
    }
    cr_expect(wrong * 3 >= drawn, "%d of %d are wrong", wrong, drawn);
}

/* As Hugging Face writes them, on models of their forms. */
#define MISTRAL                                                                                                 \
    "{\"model_type\": \"mistral\", \"vocab_size\": 61, \"hidden_size\": 24, \"intermediate_size\": 36, "        \
    "\"num_hidden_layers\": 2, \"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"sliding_window\": 5, " \
    "\"max_position_embeddings\": 64, \"rms_norm_eps\": 1e-5, \"hidden_act\": \"silu\", \"initializer_range\": 0.2}"
#define QWEN2                                                                                                         \
    "{\"model_type\": \"qwen2\", \"vocab_size\": 61, \"hidden_size\": 24, \"intermediate_size\": 36, "                \
    "\"num_hidden_layers\": 2, \"num_attention_heads\": 4, \"num_key_value_heads\": 2, "                              \
    "\"max_position_embeddings\": 64, \"rms_norm_eps\": 1e-6, \"hidden_act\": \"silu\", \"initializer_range\": 0.2, " \
    "\"tie_word_embeddings\": false}"
#define EXPERTS(type, more)                                                                                               \
    "{\"model_type\": \"" type "\", \"vocab_size\": 61, \"hidden_size\": 24, \"intermediate_size\": 20, "                 \
    "\"num_hidden_layers\": 2, \"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"initializer_range\": 0.2, " more \
    "}"
#define OF_SIX "\"num_experts\": 6, \"num_experts_per_tok\": 2, \"moe_intermediate_size\": 12, "
static const char *const small_llama = LLAMA(61, 24, 36, 2, 4, 2, 6, false);
static const char *const small_gpt2 = GPT2(61, 24, 36, 2, 4);

/* With a plan's own way between the branches. */
static void expect_plan_same(const char *file, const char *json, ar_parallel layout, bool steps)
{
    char path[600];
    SCOPED(ar_plan_fini) ar_plan plan;
    snprintf(path, sizeof path, "%s/%s.json", TEST_SOURCE_DIR, file);
    cr_assert_ok(ar_plan_load(&plan, path));
    layout.sp = ari_plan_sequence(&plan);
    OWNED(ar_check_report_destroy) ar_check_report *r = check_plan(json, &plan, layout, steps);
    expect_same(r, file);
}

Test(plans, those_of_files_have_the_baselines_bits)
{
    const struct {
        const char *file, *json;
    } all[] = {
        {"tests/plans/llama", small_llama},
        {"tests/plans/llama-rep", small_llama},
        {"tests/plans/llama-local", small_llama},
        {"tests/plans/llama-sequence", small_llama},
        {"tests/plans/llama-sequence-loss", small_llama},
        {"tests/plans/mistral-base", MISTRAL},
        {"tests/plans/qwen2-embedding", QWEN2},
        {"tests/plans/qwen2-attention-replicated", QWEN2},
        {"tests/plans/mixtral", EXPERTS("mixtral", "\"num_local_experts\": 3, \"num_experts_per_tok\": 2")},
        {"tests/plans/qwen3moe-apart", EXPERTS("qwen3_moe", OF_SIX "\"mlp_only_layers\": [0]")},
        {"tests/plans/qwen2moe-attention", EXPERTS("qwen2_moe", OF_SIX "\"shared_expert_intermediate_size\": 8")},
        {"tests/plans/deepseek-v2", DEEPSEEK(61, 16, 20, 2, 4, 8, 4, 2)},
        {"tests/plans/gpt2", small_gpt2},
        {"tests/plans/gpt2-sequence", small_gpt2},
        {"ref/data/plans/llama", small_llama},
        {"ref/data/plans/gpt2", small_gpt2},
        {"ref/data/plans/llama-sequence", small_llama},
        {"ref/data/plans/llama-sequence-loss", small_llama}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        const ar_parallel shared[] = {{.tp = 2, .cp = 2, .zigzag = true}, {.tp = 2, .cp = 2, .cp_inner = 2}};
        expect_plan_same(all[i].file, all[i].json, (ar_parallel){.tp = 2}, i % 2 == 0);
        expect_plan_same(all[i].file, all[i].json, shared[i % 2], false);
    }
    /* Every tensor-parallel rank has all heads: copies of a KV head are neighbours'. */
    expect_plan_same("tests/plans/qwen2-attention-replicated", QWEN2, (ar_parallel){.tp = 2, .cp = 4, .cp_inner = 4},
                     true);
}

/* Nobody adds up what the rowwise layers leave: the declared placement is believed, and the first value after it is
 * wrong. */
Test(plans, a_declared_partial_sum_that_nobody_adds_up_is_refuted)
{
    static const struct {
        const char *text, *first, *module;
    } all[] = {{"{\"*.[qkv]_proj\": \"colwise\", \"*.o_proj\": \"local_rowwise\"}", "model.layers.0.self_attn.o_proj",
                "model.layers.*.self_attn.o_proj"},
               {"{\"*.gate_proj\": \"colwise\", \"*.up_proj\": \"colwise\", \"*.1.mlp.down_proj\": \"local_rowwise\","
                " \"*.0.mlp.down_proj\": \"rowwise\"}",
                "model.layers.1.mlp.down_proj", "model.layers.1.mlp.down_proj"}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        SCOPED(ar_plan_fini) ar_plan plan;
        cr_assert_ok(ar_plan_parse(&plan, all[i].text, strlen(all[i].text), "wrong"));
        OWNED(ar_check_report_destroy) ar_check_report *r = check_plan(small_llama, &plan, (ar_parallel){.tp = 2}, 0);
        const ar_check_run *run = &r->run[0];
        const ar_run asked = {.model = "wrong", .plan = plan, .batch = BATCH, .seq = SEQ};
        expect_lint(small_llama, &asked, (ar_parallel){.tp = 2}, false, all[i].module);
        cr_expect_eq(run->result, AR_CHECK_DIFFERENT);
        cr_expect(run->has_difference && strncmp(run->first.tensor, all[i].first, strlen(all[i].first)) == 0,
                  "the first difference is %s", first_of(run));
        cr_expect_eq(run->bytes_counted, run->bytes_predicted);
    }
}

/* "all_gather 2592; .." of what a step without data calls in the forward pass of its first layer. */
static void forward_calls_of_layer_0(char *text, size_t cap, const ar_config *c, const ar_run *run)
{
    const int64_t ids[BATCH * SEQ] = {0};
    const ar_batch batch = {.batch = BATCH, .seq = SEQ, .input_ids = ids};
    SCOPED(ari_ledger_fini) ari_ledger l = {.pass = 's'};
    const ari_cluster_options o = {.run = *run, .config = c, .batch = &batch, .ledger = &l};
    ari_dry_memory unused;
    cr_assert_ok(ari_cluster_dry(&unused, &o, 0, NULL));
    text[0] = 0;
    for (size_t i = 0; i < l.operations; i++) {
        const ari_ledger_operation *op = &l.operation[i];
        for (size_t k = 0; k < op->calls && op->pass == 'f' && strstr(op->name, "layers.0."); k++) {
            const size_t used = strlen(text);
            const ari_ledger_call *call = &l.call[op->first_call + k];
            snprintf(text + used, cap - used, "%s%s %zu", used > 0 ? "; " : "", ari_kind_name(call->kind), call->count);
        }
    }
}

#define RULE(modules, style, more) "{\"modules\": \"*." modules "\", \"style\": \"" style "\"" more "}"
#define MLP(first, more, last, last_more) RULE("[gu]*_proj", first, more) ", " RULE("down_proj", last, last_more)
#define ATTENTION(first, more, last, last_more) RULE("[qkv]_proj", first, more) ", " RULE("o_proj", last, last_more)
#define IN(p) ", \"input\": \"" p "\""
#define OUT(p) ", \"output\": \"" p "\""
#define USUAL MLP("colwise", "", "rowwise", "") ", " ATTENTION("colwise", "", "rowwise", "")

/* 3 x 12 tokens of 24 features are 864 elements; gate and up have 36 each, together 2,592; q, k and v 24, 12 and 12,
 * together 1,728. In fp32, where a sum is one collective. */
Test(plans, what_moves_in_a_layer_is_what_its_placements_say)
{
    static const struct {
        const char *rules;
        bool sp;
        const char *calls;
    } all[] = {
        {USUAL, false, "all_reduce 864; all_reduce 864"},
        {MLP("colwise", OUT("R"), "colwise", ""), false, "all_gather 2592; all_gather 864"},
        {MLP("rowwise", "", "rowwise", IN("R")), false, "all_reduce 2592; all_reduce 864"},
        {MLP("rowwise", OUT("S(-1)"), "rowwise", ""), false, "all_reduce 2592; all_reduce 864"},
        {MLP("replicate", OUT("S(-1)"), "rowwise", ""), false, "all_reduce 864"},
        {ATTENTION("colwise", OUT("R"), "rowwise", IN("R")), false, "all_gather 1728; all_reduce 864"},
        {ATTENTION("colwise", OUT("R"), "replicate", ""), false, "all_gather 1728"},
        {ATTENTION("rowwise", OUT("S(-1)"), "colwise", IN("S(-1)")), false,
         "all_reduce 1728; all_gather 864; all_gather 864"},
        {USUAL, true, "all_gather 864; reduce_scatter 864; all_gather 864; reduce_scatter 864"},
        {MLP("colwise", OUT("S(1)"), "replicate", IN("S(1)")), true,
         "all_gather 864; all_gather 864; all_gather 2592; all_gather 1296"},
        {USUAL ", " RULE("input_layernorm", "sequence", ""), true,
         "all_gather 864; reduce_scatter 864; all_gather 864; reduce_scatter 864"},
        {USUAL ", {\"modules\": \"*.mlp\", \"style\": \"prepare\", \"output\": [\"P(sum)\", \"R\"]}", false,
         "all_reduce 864; all_reduce 864; all_reduce 864"},
    };
    const ar_config c = config_of(small_llama);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        char text[800];
        char calls[400];
        ar_run run =
            ROW(.parallel = {.tp = 2, .sp = all[i].sp}, .numerics = AR_NUMERICS_NATIVE, .batch = BATCH, .seq = SEQ);
        snprintf(text, sizeof text, "{\"rules\": [%s]}", all[i].rules);
        cr_assert_ok(ar_plan_parse(&run.plan, text, strlen(text), "p"));
        cr_assert_ok(ari_plan_check(&run.plan, &c, all[i].sp));
        forward_calls_of_layer_0(calls, sizeof calls, &c, &run);
        cr_expect_str_eq(calls, all[i].calls, "%s: %s", text, calls);
        ar_plan_fini(&run.plan);
    }
}
