/* SPDX-License-Identifier: Apache-2.0 */
/* Plans as files: what is read, what is refused and in which words, and what fits a model. */
#include "anyrank/config.h"
#include "ref/models/plan.h"
#include "ref/models/plan_private.h"
#include "ref/placement/placement_private.h"
#include "support/quoted.h"
#include "support/together.h"

static ar_config llama(void)
{
    return (ar_config){.arch = AR_ARCH_LLAMA,
                       .name = "tiny",
                       .layers = 2,
                       .hidden = 12,
                       .heads = 6,
                       .kv_heads = 6,
                       .ffn = 24,
                       .head_dim = 2,
                       .final_norm = true,
                       .vocab = 7};
}

/* Of a text in which ' stands for ". */
static ar_status parse(ar_plan *p, const char *text)
{
    OWNED(free) char *json = quoted(text);
    *p = (ar_plan){0};
    return ar_plan_parse(p, json, strlen(json), "p.json");
}

/* from, to: which of the two the rule's style has. */
static bool same_value(const ar_plan_value *a, const ar_plan_value *b, bool from, bool to)
{
    return a->is_declared == b->is_declared && strcmp(a->name, b->name) == 0 &&
           (!from || ari_placement_same(a->src, b->src, 3)) && (!to || ari_placement_same(a->dst, b->dst, 3));
}

/* Shipped plans and the default ones are the same rules. */
CLAIM(the_shipped_default_plans_are_the_default_plans)
{
    static const struct {
        ar_arch arch;
        const char *file;
    } all[] = {{AR_ARCH_LLAMA, "llama"}, {AR_ARCH_GPT2, "gpt2"}, {AR_ARCH_STACK, "stack"}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        char path[512];
        SCOPED(ar_plan_fini) ar_plan p, d;
        snprintf(path, sizeof path, "%s/ref/data/plans/%s.json", TEST_SOURCE_DIR, all[i].file);
        cr_assert_ok(ar_plan_load(&p, path));
        cr_assert_ok(ari_plan_default(&d, all[i].arch));
        cr_assert_eq(p.rules, d.rules, "%s", path);
        for (size_t k = 0; k < p.rules; k++) {
            cr_expect_str_eq(p.rule[k].glob, d.rule[k].glob);
            cr_expect_eq(p.rule[k].style, d.rule[k].style, "%s", p.rule[k].glob);
        }
    }
}

CLAIM(rules_styles_placements_and_aliases_are_read)
{
    SCOPED(ar_plan_fini) ar_plan p;
    const ar_config c = llama();
    ar_block_split block;
    ar_outer_split outer;
    cr_assert_ok(parse(&p, "{'aliases': {'a':'b', 'b':'layers.*.self_attn.o_proj'}, 'rules': ["
                           "{'modules':'layers.*.self_attn.[qkv]_proj', 'style':'colwise', 'input':'R',"
                           " 'output':'Shard(-1)', 'use_local_output': false},"
                           "{'modules':'a', 'style':'rowwise', 'input':'S(2)', 'output':'P(sum)'},"
                           "{'modules':'*.self_attn', 'style':'prepare', 'input': [['R', 'R'], null],"
                           " 'named_input': {'mask': ['R', 'R']}, 'output': ['P(sum)', 'R']},"
                           "{'modules':'lm_head', 'style':'colwise', 'output':'R'}]}"));
    cr_assert_eq(p.rules, 4);
    cr_expect_str_eq(p.rule[1].glob, "layers.*.self_attn.o_proj");
    cr_expect(p.rule[0].global_output && p.rule[0].output.dst.kind == AR_SHARD && p.rule[0].output.dst.dim == -1);
    cr_expect_str_eq(p.rule[2].input[2].name, "mask");
    cr_expect(p.rule[2].input[0].is_declared && !p.rule[2].input[1].is_declared);
    cr_assert_ok(ari_plan_check(&p, &c, false));
    cr_assert_ok(ari_plan_block(&p, &c, 1, false, &block));
    cr_assert_ok(ari_plan_outer(&p, &c, false, &outer));
    cr_expect(block.attention.first.output.kind == AR_SHARD && block.mlp.first.style == AR_STYLE_REPLICATE);
    cr_expect(block.attention.second.output.kind == AR_REPLICATE, "the module adds up what its last layer leaves");
    cr_expect(outer.tokens == AR_EMBEDDING_WHOLE && outer.head.style == AR_STYLE_COLWISE);
    cr_expect_eq(outer.head.output.kind, AR_REPLICATE);
}

/* What is written says what was read: the same rules, field by field, and the same hash. */
static void expect_same_when_written(const char *text)
{
    SCOPED(ar_plan_fini) ar_plan p, again;
    json_t *rules = NULL;
    char hash[2][65];
    cr_assert_ok(parse(&p, text));
    cr_assert_ok(ari_plan_rules_json(&rules, &p));
    json_t *file = json_pack("{s:o}", "rules", rules);
    OWNED(free) char *written = json_dumps(file, JSON_INDENT(2));
    cr_assert_eq(parse(&again, written), AR_OK, "%s: %s", written, ar_error_message());
    cr_assert_eq(again.rules, p.rules);
    for (size_t i = 0; i < p.rules; i++) {
        const ar_plan_rule *a = &p.rule[i], *b = &again.rule[i];
        const bool prepares = a->style == AR_STYLE_PREPARE;
        cr_expect_str_eq(a->glob, b->glob);
        cr_expect(a->style == b->style && a->global_output == b->global_output, "%s", a->glob);
        cr_expect(same_value(&a->output, &b->output, prepares, true), "%s", a->glob);
        for (size_t k = 0; k < AR_PLAN_ARGUMENTS; k++)
            cr_expect(same_value(&a->input[k], &b->input[k], true, prepares), "%s, input %zu: %s", a->glob, k, written);
    }
    cr_assert_ok(ari_plan_hash(hash[0], &p));
    cr_assert_ok(ari_plan_hash(hash[1], &again));
    cr_expect_str_eq(hash[0], hash[1]);
    json_decref(file);
}

CLAIM(rules_written_as_json_say_what_was_read)
{
    static const char *const texts[] = {
        "{'a':'colwise', 'b':'rowwise_rep', 'c':'local_rowwise', 'd':'gather', "
        "'e':'embedding_colwise', 'f':'sequence_parallel', 'g':'colwise_rep'}",
        "{'aliases': {'x':'layers.*.mlp'}, 'rules': [{'modules':'x', 'style':'prepare', "
        "'input': [['S(1)', 'R'], null], 'named_input': {'mask': ['R', 'R'], 'pos': null}, "
        "'output': ['P(sum)', 'S(1)']}]}",
        "{'rules': [{'modules':'*.self_attn', 'style':'prepare', 'input': [null, ['S(1)', 'R']]}, "
        "{'modules':'m', 'style':'prepare', 'named_input': {'x': ['S(0)', 'I']}}, "
        "{'modules':'e', 'style':'vocab', 'input':'Replicate()', 'output':'Shard(1)', "
        "'use_local_output': false}]}"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        expect_same_when_written(texts[i]);
}

CLAIM(a_plans_hash_is_of_what_it_says)
{
    static const char *const same[] = {
        "{'*.q':'colwise', '*.o':'local_rowwise'}",
        "{'note':'n', 'aliases': {'out':'*.o'}, 'rules': [{'style':'colwise', 'modules':'*.q'}, "
        "{'modules':'out', 'style':'rowwise', 'output':'Partial()'}]}"};
    static const char *const other[] = {"{'*.o':'local_rowwise', '*.q':'colwise'}", /* the last decides */
                                        "{'*.q':'colwise', '*.o':'rowwise'}",
                                        "{'*.q':'colwise', '*.p':'local_rowwise'}"};
    char first[65], hash[65];
    ar_plan p;
    for (size_t i = 0; i < 5; i++) {
        cr_assert_ok(parse(&p, i < 2 ? same[i] : other[i - 2]));
        cr_assert_ok(ari_plan_hash(i == 0 ? first : hash, &p));
        cr_expect(i == 0 || (strcmp(first, hash) == 0) == (i < 2), "plan %zu", i);
        ar_plan_fini(&p);
    }
}

#define R(modules, style, more) "{'modules':'" modules "','style':'" style "'" more "}"
#define RULES(list) "{'rules':[" list "]}"

CLAIM(what_is_malformed_is_refused_by_file_and_rule)
{
    static const struct {
        const char *text, *says;
    } all[] = {
        {"[]", "object with 'rules'"},
        {"{'rules':3}", "'rules' has to be an array"},
        {"{'rules':[], 'rule':[]}", "unknown key 'rule'; known are rules, aliases"},
        {"{'rules':[3]}", "rule 1, '?': has to be an object"},
        {"{'rules':[{'style':'colwise'}]}", "'modules' has to be the glob"},
        {RULES(R("", "colwise", "")), "a glob has 1 to 127 bytes"},
        {"{'rules':[{'modules':'x'}]}", "'style' is missing; it has to be replicate, colwise"},
        {RULES(R("x", "col", "")), "'style' is col; it has to be"},
        {RULES(R("x", "colwise", ",'inputs':'R'")), "unknown key 'inputs'"},
        {RULES(R("x", "colwise", ",'input':'S(3)'")), "rule 1, 'x': 'input' is no placement of an activation"},
        {RULES(R("x", "colwise", ",'output':['R','R']")), "'output' has to be a placement"},
        {RULES(R("x", "colwise", ",'named_input':{}")), "'named_input' is for prepare"},
        {RULES(R("x", "prepare", ",'input':'R'")), "is a list with one element for each argument"},
        {RULES(R("x", "prepare", ",'input':[['R']]")), "says what there is and what is wanted"},
        {RULES(R("x", "prepare", ",'input':[null, null, null, null, null, null, null, null, null]")),
         "9 arguments; 8 are possible"},
        {RULES(R("x", "colwise", ",'use_local_output':1")), "true or false"},
        {RULES(R("x", "colwise", "") "," R("x", "rowwise", "")),
         "rule 1 has the same glob and says colwise, this one rowwise"},
        {RULES(R("x", "colwise", ",'output':'R'") "," R("x", "colwise", ",'output':'S(-1)'")),
         "rule 1 has the same glob and says colwise, this one colwise with other inputs or outputs; keep one"},
        {RULES(R("x", "colwise", ",'output':'R'") "," R("x", "colwise", ",'output':'R'") "," R("x", "rowwise", "")),
         "rule 1 has the same glob and says colwise, this one rowwise"}, /* and not the second one */
        {"{'aliases':{'a':'b','b':'a'}, 'rules':[" R("a", "colwise", "") "]}", "the aliases lead from 'a' back to 'a'"},
        {"{'aliases':{'a':1}, 'rules':[" R("a", "colwise", "") "]}", "the alias 'a' has to be a string"},
        {"{'aliases':{'a':'x','b':'y'}, 'rules':[" R("a", "colwise", "") "]}", "no rule has the alias 'b'"},
        {"{'rules':[]}", "has no rules"},
        {"{}", "has no rules"},
        {"{'tp_plan':{'x':'colwise'}, 'aliases':{}}", "unknown key 'aliases'; known are tp_plan and note"},
        {"{'layers.*.mlp':7}", "so it is a tp_plan"},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        ar_plan p;
        cr_expect_eq(parse(&p, all[i].text), AR_ERR_FORMAT, "%s", all[i].text);
        cr_expect_says(all[i].says);
        cr_expect_says("p.json");
    }
    ar_plan p;
    cr_expect_refused(
        parse(&p, "{'layers.*.mlp.experts':'grouped_gemm'}"), AR_ERR_UNSUPPORTED,
        "'layers.*.mlp.experts': the style 'grouped_gemm' shares whole experts out over ranks: a layout's ep does, no "
        "plan; known are colwise, rowwise");
    cr_expect_refused(parse(&p, "{'layers.*.mlp':'wise'}"), AR_ERR_UNSUPPORTED,
                      "the style 'wise' of a tp_plan is not in this version");
}

typedef struct unfit {
    const char *text, *says;
} unfit;

/* What is well written and does not fit the model. */
static const unfit anywhere[] = {
    {"{'layers.*.mlp.gate':'colwise'}", "rule 1, 'layers.*.mlp.gate': no module"},
    {"{'lm_haed':'colwise'}", "lm_head is one"},
    {"{'model.layers.*.mlp.doown_proj':'rowwise'}", "model.layers.0.mlp.down_proj is one"},
    {"{'layers.*.mlp':'colwise'}", "no module of tiny that has parameters"},
    {"{'layers.*.mlp.up_proj':'gather'}", "can be prepared"},
    {"{'*.q_proj':'colwise'}", "model.layers.0.self_attn.k_proj is replicate, but"},
    {"{'*.down_proj':'rowwise'}", "model.layers.0.mlp.down_proj behind it rowwise"},
    {"{'*.1.self_attn.[qkv]_proj':'colwise'}", "model.layers.1.self_attn.o_proj behind it replicate"},
    {"{'embed_tokens':'sequence_parallel'}", "model.embed_tokens is sequence; vocab (rowwise)"},
    {"{'lm_head':'sequence_parallel'}", "lm_head is sequence; vocab (colwise), rowwise and replicate"},
    {"{'norm':'colwise'}", "model.norm is colwise; a norm is"},
    {"{'*norm':'sequence_parallel'}", "needs sequence parallelism"},
    {RULES(R("*.[qkv]_proj", "colwise", ",'output':'R'") "," R("*.o_proj", "rowwise", "")),
     "model.layers.0.self_attn.o_proj behind it rowwise, which takes S(-1) where R arrives; declare its input R, or "
     "the output of the former S(-1)"},
    {RULES(R("*.[qkv]_proj", "colwise", "") "," R("*.o_proj", "rowwise", ",'input':'R'")),
     "the input of model.layers.0.self_attn.o_proj is declared R; S(-1) would fit"},
    {RULES(R("*.[qkv]_proj", "colwise", ",'output':'P(sum)'") "," R("*.o_proj", "rowwise", "")),
     "the output of model.layers.0.self_attn.q_proj is declared P(sum); R or S(-1) would fit"},
    {RULES(R("*.[qk]_proj", "colwise", "") "," R("*.v_proj", "colwise", ",'output':'R'") "," R("*.o_proj", "rowwise",
                                                                                               "")),
     "model.layers.0.self_attn.v_proj has input R and output R, but model.layers.0.self_attn.q_proj, which is one "
     "product with it, R and S(-1)"},
    {RULES(R("*.self_attn", "prepare", ",'output':['R','P(sum)']")),
     "the output that is wanted of model.layers.0.self_attn is declared P(sum); R or S(-1) would fit"},
    {RULES(R("*.self_attn", "prepare", ",'output':['R','S(-1)']")),
     "the output that is wanted of model.layers.0.self_attn is declared S(-1); R would fit"},
    {RULES(R("*.self_attn", "prepare", ",'input':[['P(max)','R']]")),
     "the input that arrives of model.layers.0.self_attn is declared P(max); R would fit"},
    {RULES(R("*.down_proj", "vocab", "")),
     "model.layers.0.mlp.down_proj is vocab; colwise, rowwise and replicate are possible"},
    {RULES(R("*.self_attn", "prepare", ",'input':[['S(1)','R']]")),
     "the input that arrives of model.layers.0.self_attn is declared S(1); R would fit"},
    {RULES(R("*.mlp", "prepare", ",'input':[['R','R'],['S(1)', 'R']]")),
     "another input than the first of model.layers.0.mlp"},
};

static const unfit of_sequences[] = {
    {RULES(R("*.[qkv]_proj", "colwise", "") "," R("*.o_proj", "rowwise", ",'input':'S(-2)'")),
     "the input of model.layers.0.self_attn.o_proj is declared S(1); S(-1) would fit"},
    {RULES(R("*.[qkv]_proj", "colwise", ",'output':'S(1)'") "," R("*.o_proj", "rowwise", "")),
     "the output of model.layers.0.self_attn.q_proj is declared S(1); R or S(-1) would fit"},
    {RULES(R("*.self_attn", "prepare", ",'output':['S(1)','S(1)']") "," R("*.o_proj", "replicate", ",'output':'R'")),
     "the output that there is of model.layers.0.self_attn is declared S(1); R would fit"},
    {RULES(R("*.1.input_layernorm", "sequence", "") "," R("*.1.post_attention_layernorm", "replicate",
                                                          ",'output':'S(1)'")),
     "the output of model.layers.1.post_attention_layernorm is declared S(1); R would fit"},
    {RULES(R("*.[qkv]_proj", "colwise", ",'input':'R'") "," R("*.o_proj", "rowwise", "")),
     "the input of model.layers.0.self_attn.q_proj is declared R; S(1) would fit"},
    {RULES(R("*.[qkv]_proj", "colwise", "") "," R("*.o_proj", "rowwise", ",'output':'R'")),
     "the output of model.layers.0.self_attn.o_proj is declared R; S(1) would fit"},
};

static void expect_unfit(const unfit *all, size_t n, bool sequence)
{
    const ar_config c = llama();
    for (size_t i = 0; i < n; i++) {
        SCOPED(ar_plan_fini) ar_plan p;
        cr_assert_ok(parse(&p, all[i].text));
        cr_expect_neq(ari_plan_check(&p, &c, sequence), AR_OK, "%s", all[i].text);
        cr_expect_says(all[i].says);
    }
}

CLAIM(what_cannot_run_is_refused_by_module)
{
    expect_unfit(anywhere, sizeof anywhere / sizeof *anywhere, false);
    expect_unfit(of_sequences, sizeof of_sequences / sizeof *of_sequences, true);
}

/* What has the shape of what is there and is not it: believed of a local tensor, refused where the maker of the value
 * keeps its placement, or where nothing is compared. */
CLAIM(a_wrong_declaration_is_believed_of_local_tensors_alone)
{
    static const struct {
        const char *made, *rest, *says; /* use_local_output stands between the first two */
    } all[] = {{"{'modules':'*.o_proj', 'style':'rowwise', 'output':'P(sum)'",
                "}, {'modules':'*.[qkv]_proj', 'style':'colwise'}",
                "the output of model.layers.0.self_attn.o_proj is declared P(sum); R would fit"},
               {"{'modules':'*.o_proj', 'style':'rowwise', 'output':'P(sum)'",
                "}, {'modules':'*.[qkv]_proj', 'style':'colwise'},"
                "{'modules':'*.self_attn', 'style':'prepare', 'output': ['R', 'R']}",
                "the output that there is of model.layers.0.self_attn is declared R; P(sum) would fit"},
               {"{'modules':'*.o_proj', 'style':'rowwise', 'output':'R'",
                "}, {'modules':'*.[qkv]_proj', 'style':'colwise'},"
                "{'modules':'*.self_attn', 'style':'prepare', 'output': ['P(sum)', 'R']}",
                "the output that there is of model.layers.0.self_attn is declared P(sum); R would fit"},
               {"{'modules':'*.input_layernorm', 'style':'replicate'",
                "}, {'modules':'*.self_attn', 'style':'prepare', 'input': [['P(sum)', 'R']]}",
                "the input that arrives of model.layers.0.self_attn is declared P(sum); R would fit"},
               {"{'modules':'*.up_proj', 'style':'rowwise', 'output':'P(sum)'}, "
                "{'modules':'*.gate_proj', 'style':'rowwise', 'output':'P(sum)'",
                "}", "model.layers.0.mlp.gate_proj is rowwise and model.layers.0.mlp.down_proj behind it replicate"},
               {"{'modules':'norm', 'style':'replicate'",
                "}, {'modules':'lm_head', 'style':'colwise', 'input':'P(sum)'}",
                "the input of lm_head is declared P(sum); R would fit"},
               {"{'modules':'lm_head', 'style':'rowwise', 'output':'P(sum)'", "}",
                "the output of lm_head is declared P(sum); R or S(-1) would fit"}};
    const ar_config c = llama();
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        for (int global = 0; global < 2; global++) {
            char text[900];
            SCOPED(ar_plan_fini) ar_plan p;
            snprintf(text, sizeof text, "{'rules': [%s%s%s]}", all[i].made, global ? ", 'use_local_output': false" : "",
                     all[i].rest);
            cr_assert_eq(parse(&p, text), AR_OK, "%s: %s", text, ar_error_message());
            cr_expect_eq(ari_plan_check(&p, &c, false), global ? AR_ERR_UNSUPPORTED : AR_OK, "%s: %s", text,
                         ar_error_message());
            cr_expect_refused(ari_plan_check_declared(&p, &c, false), AR_ERR_UNSUPPORTED, all[i].says);
        }
    }
}

static ar_config with_experts(ar_arch arch)
{
    ar_config c = llama();
    c.arch = arch;
    c.gated = true;
    c.experts = (ar_experts){.n = 3, .per_token = 2, .ffn = 12, .shared = arch == AR_ARCH_QWEN2_MOE ? 6 : 0};
    return c;
}

#define TOGETHER(n) "'layers.*.mlp.experts.gate_up_proj':'packed_colwise', 'layers.*.mlp.experts.down_proj':'rowwise'" n

/* transformers' own plans: of one tensor for all experts, under "mlp" in Mixtral too, and of each expert's. */
CLAIM(experts_are_cut_by_either_of_their_names)
{
    static const struct {
        ar_arch arch;
        const char *text;
        bool cut;
    } all[] = {
        {AR_ARCH_MIXTRAL, "{" TOGETHER(", 'layers.*.mlp.experts':'moe_tp_experts'") "}", true},
        {AR_ARCH_MIXTRAL, "{" TOGETHER("") "}", true},
        {AR_ARCH_MIXTRAL, "{'*.experts.*.w[13]':'colwise', '*.experts.*.w2':'rowwise', '*.gate':'replicate'}", true},
        {AR_ARCH_QWEN3_MOE, "{" TOGETHER(", 'layers.*.mlp.experts':'all_reduce'") "}", true},
        {AR_ARCH_QWEN3_MOE,
         "{'layers.*.mlp.experts.*.gate_proj':'colwise', 'layers.*.mlp.experts.*.up_proj':'colwise',"
         " 'layers.*.mlp.experts.*.down_proj':'rowwise'}",
         true},
        {AR_ARCH_QWEN2_MOE,
         "{" TOGETHER(", 'layers.*.mlp.shared_expert.[gu]*_proj':'colwise', '*.shared_expert.down_proj':'rowwise'") "}",
         true},
        {AR_ARCH_QWEN2_MOE, "{" TOGETHER("") "}", true},
        {AR_ARCH_QWEN2_MOE, "{'lm_head':'colwise_rep'}", false}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        SCOPED(ar_plan_fini) ar_plan p;
        ar_block_split block;
        const ar_config c = with_experts(all[i].arch);
        cr_assert_ok(parse(&p, all[i].text));
        cr_assert_eq(ari_plan_check_declared(&p, &c, false), AR_OK, "%s: %s", all[i].text, ar_error_message());
        cr_assert_ok(ari_plan_block(&p, &c, 1, false, &block));
        cr_expect_eq(block.mlp.first.style, all[i].cut ? AR_STYLE_COLWISE : AR_STYLE_REPLICATE, "%s", all[i].text);
        cr_expect_eq(block.mlp.shared_whole, all[i].cut && !strstr(all[i].text, "shared_expert"), "%s", all[i].text);
        cr_expect_eq(block.mlp.second.style, all[i].cut ? AR_STYLE_ROWWISE : AR_STYLE_REPLICATE, "%s", all[i].text);
    }
}

CLAIM(experts_that_cannot_be_cut_so_are_refused)
{
    static const struct {
        ar_arch arch;
        const char *text, *says;
    } all[] = {
        {AR_ARCH_QWEN2_MOE, "{" TOGETHER(", '*.shared_expert.gate_proj':'colwise'") "}",
         "shared_expert.up_proj is replicate; with the shared expert's gate colwise"},
        {AR_ARCH_QWEN2_MOE, "{" TOGETHER(", '*.shared_expert.down_proj':'rowwise'") "}",
         "shared_expert.down_proj is rowwise; with the shared expert's gate replicate"},
        {AR_ARCH_QWEN3_MOE, "{'*.experts.*.gate_proj':'colwise'}", "experts.*.up_proj is replicate; with the experts'"},
        {AR_ARCH_QWEN3_MOE, "{'*.experts.gate_up_proj':'colwise'}",
         "experts.*.down_proj is replicate; behind a colwise"},
        {AR_ARCH_QWEN3_MOE, "{'*.experts.down_proj':'rowwise'}",
         "down_proj is rowwise; with the experts' gates replicate"},
        {AR_ARCH_MIXTRAL, "{'*.moe.gate':'colwise_rep'}", "no module of tiny"},
        {AR_ARCH_MIXTRAL, "{'*_moe.gate':'colwise_rep'}",
         "block_sparse_moe.gate is colwise; every rank routes all its"},
        {AR_ARCH_MIXTRAL, "{'layers.*.mlp.gate':'colwise_rep'}", "block_sparse_moe.gate is colwise; every rank routes"},
        {AR_ARCH_MIXTRAL, "{'model.layers.0.block_sparse_moe.experts.0.w1':'colwise'}",
         "block_sparse_moe.experts.*.w1 is one"},
        {AR_ARCH_MIXTRAL, "{'layers.*.mlp.experts':'moe_tp_experts'}",
         "the output that there is of model.layers.0.block_sparse_moe.experts is declared P(sum); R would fit"},
        {AR_ARCH_MIXTRAL, "{" TOGETHER(", 'layers.*.mlp':'gather'") "}", "is prepare; a layer's experts take and make"},
        {AR_ARCH_LLAMA, "{'layers.*.mlp.experts':'moe_tp_experts'}", "no module of tiny that has others in it"},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        SCOPED(ar_plan_fini) ar_plan p;
        ar_config c = with_experts(all[i].arch);
        if (all[i].arch == AR_ARCH_LLAMA)
            c.experts.n = 0;
        cr_assert_ok(parse(&p, all[i].text));
        cr_expect_neq(ari_plan_check(&p, &c, false), AR_OK, "%s", all[i].text);
        cr_expect_says(all[i].says);
    }
}

CLAIM(a_tied_head_is_cut_as_its_table_is)
{
    SCOPED(ar_plan_fini) ar_plan p;
    ar_config c = llama();
    c.tied = true;
    cr_assert_ok(parse(&p, "{'lm_head':'colwise_rep'}"));
    cr_expect_refused(ari_plan_check(&p, &c, false), AR_ERR_UNSUPPORTED, "its weight is that of model.embed_tokens");
}

/* 10^5 rules end with a message, and a plan as large as is possible is asked quickly. */
CLAIM(too_many_rules_are_refused)
{
    enum { MANY = 100000, EACH = 24 };
    OWNED(free) char *text = malloc((size_t)MANY * EACH + 16);
    size_t at = 0;
    ar_plan p;
    cr_assert_not_null(text);
    at += (size_t)sprintf(text + at, "{");
    for (int i = 0; i < MANY; i++)
        at += (size_t)sprintf(text + at, "%s'm.%d':'colwise'", i ? "," : "", i);
    sprintf(text + at, "}");
    cr_expect_refused(parse(&p, text), AR_ERR_OVERFLOW, "p.json: more than 4096 rules");
}

EVERY_CLAIM(plan_file)
