/* SPDX-License-Identifier: Apache-2.0 */
/* What a check must compare, by hand: a tensor that nobody compares cannot be wrong. */
#include "tests/verify/support.h"

#include "anyrank/baseline.h"

#define ONE_LLAMA LLAMA(11, 16, 24, 1, 4, 2, 4, false)
#define TWO_LLAMA LLAMA(11, 16, 24, 2, 4, 2, 4, false)
#define ONE_GPT2 GPT2(11, 16, 24, 1, 4)
#define TWO_GPT2 GPT2(11, 16, 24, 2, 4)
#define ONE_STACK STACK(11, 16, 24, 1, 4, 2)
#define TWO_STACK STACK(11, 16, 24, 2, 4, 2)

/* What one training step of one layer has, in execution order: each name of a row has each of the row's passes, or its
 * own. ~ is the layer. */
typedef struct row {
    const char *passes, *names;
} row;

#define LLAMA_PARAMETERS                                                                                        \
    "model.embed_tokens.weight ~input_layernorm.weight ~self_attn.q_proj.weight ~self_attn.k_proj.weight "      \
    "~self_attn.v_proj.weight ~self_attn.o_proj.weight ~post_attention_layernorm.weight ~mlp.gate_proj.weight " \
    "~mlp.up_proj.weight ~mlp.down_proj.weight model.norm.weight lm_head.weight"
static const row llama_rows[] = {
    {":init", LLAMA_PARAMETERS},
    {":fwd", "model.embed_tokens ~input_layernorm ~self_attn.q_proj ~self_attn.k_proj ~self_attn.v_proj "
             "~self_attn.q_rope ~self_attn.k_rope ~self_attn.probs ~self_attn.context ~self_attn.o_proj ~attn_residual "
             "~post_attention_layernorm ~mlp.gate_proj ~mlp.up_proj ~mlp.act ~mlp.down_proj ~ model.norm lm_head loss"},
    {"", "lm_head.logits:bwd lm_head:bwd lm_head.weight:grad model.norm:bwd model.norm.weight:grad ~mlp.down_proj:bwd "
         "~mlp.down_proj.weight:grad ~mlp.gate:bwd ~mlp.up:bwd ~mlp:bwd ~mlp.gate_proj.weight:grad "
         "~mlp.up_proj.weight:grad ~post_attention_layernorm:bwd ~post_attention_layernorm.weight:grad "
         "~attn_residual:bwd ~self_attn.o_proj:bwd ~self_attn.o_proj.weight:grad ~self_attn.probs:bwd "
         "~self_attn.q_rope:bwd ~self_attn.k_rope:bwd ~self_attn.v:bwd ~self_attn.q:bwd ~self_attn.k:bwd "
         "~self_attn:bwd ~self_attn.q_proj.weight:grad ~self_attn.k_proj.weight:grad ~self_attn.v_proj.weight:grad "
         "~input_layernorm:bwd ~input_layernorm.weight:grad ~:bwd model.embed_tokens.weight:grad grad_norm:clip"},
    {":new :m :v", LLAMA_PARAMETERS},
    {NULL, NULL},
};

#define GPT2_PARAMETERS                                                                                                 \
    "transformer.wte.weight transformer.wpe.weight ~ln_1.weight ~ln_1.bias ~attn.c_attn.weight ~attn.c_attn.bias "      \
    "~attn.c_proj.weight ~attn.c_proj.bias ~ln_2.weight ~ln_2.bias ~mlp.c_fc.weight ~mlp.c_fc.bias ~mlp.c_proj.weight " \
    "~mlp.c_proj.bias transformer.ln_f.weight transformer.ln_f.bias"
static const row gpt2_rows[] = {
    {":init", GPT2_PARAMETERS},
    {":fwd", "transformer.wte transformer.drop ~ln_1 ~attn.q ~attn.k ~attn.v ~attn.probs ~attn.attn_dropout "
             "~attn.context ~attn.c_proj ~attn.resid_dropout ~attn_residual ~ln_2 ~mlp.c_fc ~mlp.act ~mlp.c_proj "
             "~mlp.dropout ~ transformer.ln_f lm_head loss"},
    {"", "lm_head.logits:bwd lm_head:bwd transformer.ln_f:bwd transformer.ln_f.weight:grad transformer.ln_f.bias:grad "
         "~mlp.dropout:bwd ~mlp.c_proj:bwd ~mlp.c_proj.weight:grad ~mlp.c_proj.bias:grad ~mlp.fc:bwd ~mlp.c_fc:bwd "
         "~mlp.c_fc.weight:grad ~mlp.c_fc.bias:grad ~ln_2:bwd ~ln_2.weight:grad ~ln_2.bias:grad ~attn_residual:bwd "
         "~attn.resid_dropout:bwd ~attn.c_proj:bwd ~attn.c_proj.weight:grad ~attn.c_proj.bias:grad ~attn.probs:bwd "
         "~attn.v:bwd ~attn.q:bwd ~attn.k:bwd ~attn.c_attn:bwd ~attn.c_attn.weight:grad ~attn.c_attn.bias:grad "
         "~ln_1:bwd ~ln_1.weight:grad ~ln_1.bias:grad ~:bwd transformer.wte.weight:grad transformer.wpe.weight:grad"},
    {":new :m :v", GPT2_PARAMETERS},
    {NULL, NULL},
};

static const row stack_rows[] = {
    {":init", "embed.weight ~ln1.weight ~ln1.bias ~attn.wq.weight ~attn.wk.weight ~attn.wv.weight ~attn.wo.weight "
              "~ln2.weight ~ln2.bias ~mlp.w1.weight ~mlp.w1.bias ~mlp.w2.weight ~mlp.w2.bias"},
    {":fwd", "embed ~ln1 ~attn.wq ~attn.wk ~attn.wv ~attn.probs ~attn.context ~attn.wo ~attn_residual ~ln2 ~mlp.w1 "
             "~mlp.act ~mlp.w2 ~ loss"},
    {"", "~mlp.w2:bwd ~mlp.w2.weight:grad ~mlp.w2.bias:grad ~mlp.fc:bwd ~mlp.w1:bwd ~mlp.w1.weight:grad "
         "~mlp.w1.bias:grad ~ln2:bwd ~ln2.weight:grad ~ln2.bias:grad ~attn_residual:bwd ~attn.wo:bwd "
         "~attn.wo.weight:grad ~attn.probs:bwd ~attn.v:bwd ~attn.q:bwd ~attn.k:bwd ~attn:bwd ~attn.wq.weight:grad "
         "~attn.wk.weight:grad ~attn.wv.weight:grad ~ln1:bwd ~ln1.weight:grad ~ln1.bias:grad ~:bwd embed.weight:grad"},
    {NULL, NULL},
};

typedef struct tensors_case {
    const char *one, *two; /* the model with one and with two layers */
    const char *layer;
    const row *rows;
    size_t per_layer; /* tensors of another layer */
    int steps;
    double clip, dropout;
} tensors_case;

static const tensors_case cases[] = {
    /* 9 parameters in three passes, 16 forward and 16 backward values */
    {ONE_LLAMA, TWO_LLAMA, "model.layers.0", llama_rows, 5 * 9 + 16 + 16, .steps = 1, .clip = 1e-3},
    {ONE_GPT2, TWO_GPT2, "transformer.h.0", gpt2_rows, 5 * 12 + 16 + 15, .steps = 1, .dropout = 0.2},
    {ONE_STACK, TWO_STACK, "layers.0", stack_rows, 2 * 12 + 13 + 13, .steps = 0},
};
enum { CASES = sizeof cases / sizeof *cases };

static ar_check_options options_of(const tensors_case *c, const char *folder, const int *tp)
{
    ar_check_options o = check_of(folder, tp, 2, 3, 6);
    o.run.steps = (uint64_t)c->steps;
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    o.run.clip = c->clip;
    o.run.dropout = c->dropout;
    return o;
}

enum { MOST = 128, LONGEST = 64 };
typedef struct listing {
    char name[MOST][LONGEST]; /* those of the rows */
    size_t names, count;      /* of them; of what the check lists */
} listing;

static void list_names(listing *l, const tensors_case *c)
{
    char word[LONGEST], pass[8];
    int length;
    for (const row *r = c->rows; r->names; r++) {
        for (const char *at = r->names; sscanf(at, "%63s%n", word, &length) == 1; at += length) {
            const bool of_layer = word[0] == '~', inside = of_layer && word[1] && word[1] != ':';
            const char *passes = r->passes;
            do {
                int n = 0;
                pass[0] = '\0';
                (void)sscanf(passes, "%7s%n", pass, &n);
                passes += n;
                cr_assert_lt(l->names, MOST);
                snprintf(l->name[l->names++], LONGEST, "%s%s%s%s", of_layer ? c->layer : "", inside ? "." : "",
                         word + of_layer, pass);
            } while (*passes);
        }
    }
}

static ar_status expect_next(void *user, const char *tensor, const char *pass, int ndim, const size_t *shape)
{
    listing *l = user;
    const size_t i = l->count++;
    (void)shape;
    if (l->names == 0) /* only counted */
        return AR_OK;
    cr_expect(i < l->names && strcmp(l->name[i], tensor) == 0, "tensor %zu is %s, expected %s", i, tensor,
              i < l->names ? l->name[i] : "none");
    cr_expect(ndim >= 0 && ndim <= AR_MAX_DIMS && pass[0] != '\0');
    return AR_OK;
}

Test(tensors, are_those_of_the_list_made_by_hand_and_every_layout_compares_them)
{
    static const int tp[] = {1, 2};
    for (size_t i = 0; i < CASES; i++) {
        listing one = {.names = 0}, two = {.names = 0};
        list_names(&one, &cases[i]);
        OWNED(end_folder) char *folder = new_model(cases[i].one);
        const ar_check_options o = options_of(&cases[i], folder, tp);
        cr_assert_ok(ar_check_tensors(&o, expect_next, &one));
        cr_expect_eq(one.count, one.names);
        OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(&o);
        cr_expect_eq(r->tensors, one.names, "case %zu: %zu compared", i, r->tensors);
        expect_same(r, cases[i].layer);
        write_file(folder, "config.json", cases[i].two);
        cr_assert_ok(ar_check_tensors(&o, expect_next, &two));
        cr_expect_eq(two.count - one.count, cases[i].per_layer, "case %zu: %zu a layer", i, two.count - one.count);
    }
}

/* --- and none of them says nothing -------------------------------------------------------------------------------- */

enum { MOST_PARAMETERS = 64 };
typedef struct seen {
    double *initial[MOST_PARAMETERS]; /* of each parameter, in order */
    size_t initials, news;
} seen;

/* Each is finite and not all zero; a new weight is not the initial one. */
static ar_status look(void *user, const char *name, char pass, int ndim, const size_t *shape, const double *values)
{
    seen *s = user;
    size_t count = 1, zeros = 0;
    for (int d = 0; d < ndim; d++)
        count *= shape[d];
    for (size_t k = 0; k < count; k++) {
        cr_expect(isfinite(values[k]), "%s, pass %c: element %zu is %g", name, pass, k, values[k]);
        zeros += values[k] == 0.0;
    }
    cr_expect_lt(zeros, count, "%s, pass %c: all of it is zero", name, pass);
    if (pass == 'i') {
        cr_assert_lt(s->initials, MOST_PARAMETERS);
        s->initial[s->initials] = malloc(count * sizeof *values);
        memcpy(s->initial[s->initials++], values, count * sizeof *values);
    }
    if (pass == 'n') {
        cr_assert_lt(s->news, s->initials);
        cr_expect_neq(memcmp(s->initial[s->news++], values, count * sizeof *values), 0, "%s did not change", name);
    }
    return AR_OK;
}

Test(tensors, are_finite_not_all_zero_and_weights_leave_their_initial_values)
{
    static const int64_t ids[] = {3, 1, 10, 7, 5, 9, 2, 6, 4, 3, 8, 0, 1, 5, 9, 10, 6, 7};
    for (size_t i = 0; i < CASES; i++) {
        seen s = {{NULL}, 0, 0};
        double loss = 0.0;
        const ar_config c = config_of(cases[i].one);
        const ar_batch batch = {.batch = 3, .seq = 6, .input_ids = ids};
        const ar_baseline_options b = {.mode = AR_MODE_EXACT,
                                       .emit = look,
                                       .emit_user = &s,
                                       .steps = 1,
                                       .optimizer = ar_optimizer_defaults(AR_OPTIMIZER_SGD),
                                       .clip = 1.0,
                                       .dropout = cases[i].dropout};
        cr_assert_ok(ar_baseline_run(&c, &b, &batch, &loss));
        cr_expect(s.news == s.initials && s.news > 0, "%zu of %zu parameters are new", s.news, s.initials);
        for (size_t k = 0; k < s.initials; k++)
            free(s.initial[k]);
    }
}
