/* SPDX-License-Identifier: Apache-2.0 */
/* What each injectable fault must look like from outside: the expectations stand here, written by hand from
 * docs/names.md and the fault's own text; nothing that explains a difference knows which fault is on. */
#include "tests/verify/support.h"

typedef struct expected {
    ar_fault fault;
    const char *model;
    int tp;
    ar_mlp_order order;
    ar_sim_algorithm algorithm;
    const char *tensor; /* the first in execution order */
    const char *pass;
    int layer, rank;
    const char *hint; /* words that it must contain */
} expected;

#define CR AR_MLP_COLUMN_ROW
#define RC AR_MLP_ROW_COLUMN
#define DIRECT AR_SIM_DIRECT
#define RING AR_SIM_RING
#define F(name) AR_FAULT_##name

/* Small enough to be fast; every text below has, early on, the ids at which 2, 3 and 4 ranks split 256 of them. */
enum { BATCH = 2, SEQ = 24 };

static const expected two_ranks[] = {
    {F(column_dx_not_reduced), "llama-demo", 2, CR, DIRECT, "lm_head:bwd", "backward", -1, 0, "missing all-reduce"},
    {F(row_bias_every_rank), "gpt2-demo", 2, CR, DIRECT, "transformer.h.0.attn.c_proj:fwd", "forward", 0, 0, "bias"},
    {F(row_input_grad_not_gathered), "gpt2-demo", 2, RC, DIRECT, "transformer.h.3.mlp.c_fc:bwd", "backward", 3, 1,
     "missing all-gather"},
    {F(heads_divided_twice), "llama-demo", 2, CR, DIRECT, "model.layers.0.self_attn.context:fwd", "forward", 0, 0,
     "local head count"},
    {F(allreduce_aliases_input), "llama-demo", 2, CR, DIRECT, "model.layers.3.mlp.down_proj.weight:grad", "backward", 3,
     0, "overwritten"},
    {F(init_local_fan), "llama-demo", 2, CR, DIRECT, "model.layers.0.self_attn.q_proj.weight:init", "init", 0, 0,
     "fans of the shard"},
    {F(init_per_shard_seed), "llama-demo", 2, CR, DIRECT, "model.embed_tokens.weight:init", "init", -1, 1,
     "seeded alike"},
    {F(vocab_target_off_by_shard), "llama-demo", 2, CR, DIRECT, "loss:fwd", "forward", -1, 0, "target"},
    {F(loss_parallel_no_max), "llama-demo", 2, CR, DIRECT, "loss:fwd", "forward", -1, 0, "maximum"},
    {F(embedding_edge_twice), "llama-demo", 2, CR, DIRECT, "model.embed_tokens:fwd", "forward", -1, 0, "shard's edge"},
    {F(weight_grad_leading_dims), "llama-demo", 2, CR, DIRECT, "lm_head.weight:grad", "backward", -1, 0, "samples"},
    {F(bias_grad_wrong_axis), "gpt2-demo", 2, CR, DIRECT, "transformer.h.3.mlp.c_proj.bias:grad", "backward", 3, 0,
     "wrong axis"},
    {F(norm_backward_missing), "gpt2-demo", 2, CR, DIRECT, "transformer.h.3.ln_2:bwd", "backward", 3, 0, "norm"},
};
enum { TWO_RANKS = sizeof two_ranks / sizeof *two_ranks };

/* The same on other models, numbers of ranks, orders of the MLP, and with the ring. */
static const char *const small_names[] = {"llama", "gpt2", "stack"};
static const char *const small_models[] = {LLAMA(256, 64, 96, 2, 8, 2, 8, false), GPT2(256, 96, 192, 2, 12),
                                           STACK(256, 64, 96, 2, 8, 4)};
enum { SMALL_MODELS = 3 };

static const expected elsewhere[] = {
    {F(column_dx_not_reduced), "stack", 4, CR, RING, "layers.1.mlp.w1:bwd", "backward", 1, 0, "missing all-reduce"},
    {F(column_dx_not_reduced), "gpt2", 3, CR, RING, "lm_head:bwd", "backward", -1, 0, "missing all-reduce"},
    {F(row_bias_every_rank), "stack", 2, CR, RING, "layers.0.mlp.w2:fwd", "forward", 0, 0, "bias"},
    {F(row_bias_every_rank), "gpt2", 4, CR, DIRECT, "transformer.h.0.attn.c_proj:fwd", "forward", 0, 0, "bias"},
    {F(row_bias_every_rank), "gpt2", 4, RC, RING, "transformer.h.0.attn.c_proj:fwd", "forward", 0, 0, "bias"},
    {F(row_input_grad_not_gathered), "stack", 4, RC, DIRECT, "layers.1.mlp.w1:bwd", "backward", 1, 1,
     "missing all-gather"},
    {F(row_input_grad_not_gathered), "llama", 2, RC, RING, "model.layers.1.mlp:bwd", "backward", 1, 1,
     "missing all-gather"},
    {F(heads_divided_twice), "gpt2", 3, CR, RING, "transformer.h.0.attn.context:fwd", "forward", 0, 0, "heads"},
    {F(heads_divided_twice), "gpt2", 4, CR, DIRECT, "transformer.h.0.attn.context:fwd", "forward", 0, 0,
     "local head count"},
    {F(heads_divided_twice), "stack", 2, CR, DIRECT, "layers.0.attn.context:fwd", "forward", 0, 0, "local head count"},
    {F(allreduce_aliases_input), "gpt2", 4, CR, RING, "transformer.h.1.mlp.c_proj.weight:grad", "backward", 1, 0,
     "overwritten"},
    {F(allreduce_aliases_input), "stack", 2, CR, DIRECT, "layers.1.mlp.w2.weight:grad", "backward", 1, 0,
     "overwritten"},
    {F(init_local_fan), "gpt2", 3, CR, DIRECT, "transformer.h.0.attn.c_attn.weight:init", "init", 0, 0,
     "fans of the shard"},
    {F(init_local_fan), "stack", 4, CR, RING, "layers.0.attn.wq.weight:init", "init", 0, 0, "fans of the shard"},
    {F(init_per_shard_seed), "gpt2", 4, CR, RING, "transformer.wte.weight:init", "init", -1, 1, "seeded alike"},
    {F(init_per_shard_seed), "stack", 2, CR, DIRECT, "embed.weight:init", "init", -1, 1, "seeded alike"},
    {F(vocab_target_off_by_shard), "gpt2", 3, CR, RING, "loss:fwd", "forward", -1, 0, "target"},
    {F(vocab_target_off_by_shard), "gpt2", 4, CR, DIRECT, "loss:fwd", "forward", -1, 0, "target"},
    {F(loss_parallel_no_max), "gpt2", 3, CR, RING, "loss:fwd", "forward", -1, 0, "maximum"},
    {F(embedding_edge_twice), "gpt2", 3, CR, DIRECT, "transformer.wte:fwd", "forward", -1, 0, "shard's edge"},
    {F(embedding_edge_twice), "stack", 4, CR, RING, "embed:fwd", "forward", -1, 0, "shard's edge"},
    /* A tied head's weight gradient is complete after the embedding's, so that a block's comes first. */
    {F(weight_grad_leading_dims), "gpt2", 4, CR, DIRECT, "transformer.h.1.mlp.c_proj.weight:grad", "backward", 1, 0,
     "samples"},
    {F(weight_grad_leading_dims), "stack", 2, CR, RING, "layers.1.mlp.w2.weight:grad", "backward", 1, 0, "samples"},
    /* dY is 1 everywhere: 48 elements of 64 in place of 64 of 48, close to the reference. */
    {F(bias_grad_wrong_axis), "stack", 4, CR, DIRECT, "layers.1.mlp.w2.bias:grad", "backward", 1, 0, "sum over tokens"},
    {F(bias_grad_wrong_axis), "gpt2", 3, RC, RING, "transformer.h.1.mlp.c_proj.bias:grad", "backward", 1, 0,
     "wrong axis"},
    {F(norm_backward_missing), "llama", 2, CR, RING, "model.layers.1.post_attention_layernorm:bwd", "backward", 1, 0,
     "norm"},
    {F(norm_backward_missing), "stack", 4, RC, DIRECT, "layers.1.ln2:bwd", "backward", 1, 0, "norm"},
};
enum { ELSEWHERE = sizeof elsewhere / sizeof *elsewhere };

/* The text of all cases, and the small models, each in a folder of its own. */
typedef struct place {
    char folder[64], model[SMALL_MODELS][64], text[80];
} place;

static void place_init(place *p)
{
    static const char edges[] = "\x80V@\xac\xc0";
    char text[BATCH * SEQ + 1];
    for (size_t i = 0; i < sizeof text - 1; i++)
        text[i] = i % 5 == 2 ? edges[i / 5 % 5] : (char)(1 + i * i * 7 % 97);
    text[sizeof text - 1] = '\0';
    make_folder(p->folder);
    write_file(p->folder, "text", text);
    snprintf(p->text, sizeof p->text, "%s/text", p->folder);
    for (int m = 0; m < SMALL_MODELS; m++) {
        make_folder(p->model[m]);
        write_file(p->model[m], "config.json", small_models[m]);
    }
}

static void place_fini(const place *p)
{
    remove_folder(p->folder);
    for (int m = 0; m < SMALL_MODELS; m++)
        remove_folder(p->model[m]);
}

/* "gpt2-demo" and "gpt2" alike. */
static ar_arch arch_of(const char *model)
{
    return model[0] == 'l' ? AR_ARCH_LLAMA : model[0] == 'g' ? AR_ARCH_GPT2 : AR_ARCH_STACK;
}

static ar_check_report *run_case(const expected *e, ar_fault fault, const place *p)
{
    const char *model = e->model;
    for (int m = 0; m < SMALL_MODELS; m++)
        model = strcmp(model, small_names[m]) == 0 ? p->model[m] : model;
    ar_check_options o = check_of(model, &e->tp, 1, BATCH, SEQ);
    o.fault = fault;
    o.plan = plan_of(arch_of(e->model), e->order);
    o.algorithm = e->algorithm;
    o.text = p->text;
    return check_or_fail(&o);
}

static void expect_caught(const expected *e, const place *p)
{
    ar_check_report *r = run_case(e, e->fault, p);
    const ar_check_run *run = &r->run[0];
    const ar_first_difference *f = &run->first;
    const char *name = ar_fault_name(e->fault);
    cr_expect_eq(r->result, AR_CHECK_DIFFERENT, "%s, %s tp=%d", name, e->model, e->tp);
    cr_expect(run->result == AR_CHECK_DIFFERENT && run->has_difference && run->tensors_different > 0 && !run->error);
    cr_expect_str_eq(f->tensor, e->tensor, "%s, %s tp=%d: %s, expected %s", name, e->model, e->tp, f->tensor,
                     e->tensor);
    cr_expect_str_eq(f->pass, e->pass);
    cr_expect(f->layer == e->layer && f->step == 1, "%s: layer %d, expected %d", name, f->layer, e->layer);
    cr_expect_eq(f->rank, e->rank, "%s, %s tp=%d: rank %d, expected %d", name, e->model, e->tp, f->rank, e->rank);
    cr_expect(strstr(f->hint, e->hint), "%s, %s tp=%d: no \"%s\" in \"%s\"", name, e->model, e->tp, e->hint, f->hint);
    cr_expect(f->pattern[0] && f->hint[0], "%s, %s tp=%d: says nothing", name, e->model, e->tp);
    cr_expect_str_neq(run->gradients_hash, r->gradients_hash, "%s, %s tp=%d", name, e->model, e->tp);
    ar_check_report_destroy(r);
}

static bool same_run(const expected *a, const expected *b)
{
    return strcmp(a->model, b->model) == 0 && a->tp == b->tp && a->order == b->order && a->algorithm == b->algorithm;
}

/* Each distinct layout of the table once, with no fault. */
static void expect_clean(const expected *table, size_t n, const place *p)
{
    for (size_t i = 0; i < n; i++) {
        size_t before = 0;
        while (before < i && !same_run(&table[before], &table[i]))
            before++;
        if (before < i)
            continue;
        ar_check_report *r = run_case(&table[i], AR_FAULT_NONE, p);
        expect_same(r, table[i].model);
        ar_check_report_destroy(r);
    }
}

TestSuite(fault, .timeout = 280);

Test(fault, table_has_every_fault_once)
{
    cr_assert_eq((int)TWO_RANKS, AR_FAULT_COUNT - 1);
    for (int f = 1; f < AR_FAULT_COUNT; f++) {
        size_t rows = 0;
        for (size_t i = 0; i < TWO_RANKS; i++)
            rows += two_ranks[i].fault == (ar_fault)f;
        cr_expect_eq(rows, 1, "%s", ar_fault_name((ar_fault)f));
    }
}

Test(fault, each_is_caught_where_it_arises_on_two_ranks)
{
    place p;
    place_init(&p);
    for (size_t i = 0; i < TWO_RANKS; i++)
        expect_caught(&two_ranks[i], &p);
    place_fini(&p);
}

Test(fault, each_is_caught_in_other_layouts_and_models)
{
    place p;
    place_init(&p);
    for (size_t i = 0; i < ELSEWHERE; i++)
        expect_caught(&elsewhere[i], &p);
    place_fini(&p);
}

Test(fault, without_one_all_these_layouts_have_the_same_bits)
{
    place p;
    place_init(&p);
    expect_clean(two_ranks, TWO_RANKS, &p);
    expect_clean(elsewhere, ELSEWHERE, &p);
    place_fini(&p);
}

/* A mistake in what ranks do together cannot matter to a rank alone; those of one rank's arithmetic do. */
Test(fault, those_of_communication_change_nothing_on_one_rank)
{
    char folder[64];
    const int one = 1;
    make_folder(folder);
    write_file(folder, "config.json", tiny_models[TINY_GPT2]);
    for (int f = 1; f < AR_FAULT_COUNT; f++) {
        const bool local =
            f == F(weight_grad_leading_dims) || f == F(bias_grad_wrong_axis) || f == F(norm_backward_missing);
        ar_check_options o = check_of(folder, &one, 1, 2, 12);
        o.fault = (ar_fault)f;
        ar_check_report *r = check_or_fail(&o);
        cr_expect_eq(r->result, local ? AR_CHECK_DIFFERENT : AR_CHECK_SAME, "%s: first %s", ar_fault_name((ar_fault)f),
                     first_of(&r->run[0]));
        ar_check_report_destroy(r);
    }
    remove_folder(folder);
}
