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

/* One training step of one layer, with clipping, in execution order. */
#define L "model.layers.0."
static const char *const llama_names[] = {
    "model.embed_tokens.weight:init",
    L "input_layernorm.weight:init",
    L "self_attn.q_proj.weight:init",
    L "self_attn.k_proj.weight:init",
    L "self_attn.v_proj.weight:init",
    L "self_attn.o_proj.weight:init",
    L "post_attention_layernorm.weight:init",
    L "mlp.gate_proj.weight:init",
    L "mlp.up_proj.weight:init",
    L "mlp.down_proj.weight:init",
    "model.norm.weight:init",
    "lm_head.weight:init",
    "model.embed_tokens:fwd",
    L "input_layernorm:fwd",
    L "self_attn.q_proj:fwd",
    L "self_attn.k_proj:fwd",
    L "self_attn.v_proj:fwd",
    L "self_attn.q_rope:fwd",
    L "self_attn.k_rope:fwd",
    L "self_attn.probs:fwd",
    L "self_attn.context:fwd",
    L "self_attn.o_proj:fwd",
    L "attn_residual:fwd",
    L "post_attention_layernorm:fwd",
    L "mlp.gate_proj:fwd",
    L "mlp.up_proj:fwd",
    L "mlp.act:fwd",
    L "mlp.down_proj:fwd",
    "model.layers.0:fwd",
    "model.norm:fwd",
    "lm_head:fwd",
    "loss:fwd",
    "lm_head.logits:bwd",
    "lm_head:bwd",
    "lm_head.weight:grad",
    "model.norm:bwd",
    "model.norm.weight:grad",
    L "mlp.down_proj:bwd",
    L "mlp.down_proj.weight:grad",
    L "mlp.gate:bwd",
    L "mlp.up:bwd",
    L "mlp:bwd",
    L "mlp.gate_proj.weight:grad",
    L "mlp.up_proj.weight:grad",
    L "post_attention_layernorm:bwd",
    L "post_attention_layernorm.weight:grad",
    L "attn_residual:bwd",
    L "self_attn.o_proj:bwd",
    L "self_attn.o_proj.weight:grad",
    L "self_attn.probs:bwd",
    L "self_attn.q_rope:bwd",
    L "self_attn.k_rope:bwd",
    L "self_attn.v:bwd",
    L "self_attn.q:bwd",
    L "self_attn.k:bwd",
    L "self_attn:bwd",
    L "self_attn.q_proj.weight:grad",
    L "self_attn.k_proj.weight:grad",
    L "self_attn.v_proj.weight:grad",
    L "input_layernorm:bwd",
    L "input_layernorm.weight:grad",
    "model.layers.0:bwd",
    "model.embed_tokens.weight:grad",
    "grad_norm:clip",
    "model.embed_tokens.weight:new",
    "model.embed_tokens.weight:m",
    "model.embed_tokens.weight:v",
    L "input_layernorm.weight:new",
    L "input_layernorm.weight:m",
    L "input_layernorm.weight:v",
    L "self_attn.q_proj.weight:new",
    L "self_attn.q_proj.weight:m",
    L "self_attn.q_proj.weight:v",
    L "self_attn.k_proj.weight:new",
    L "self_attn.k_proj.weight:m",
    L "self_attn.k_proj.weight:v",
    L "self_attn.v_proj.weight:new",
    L "self_attn.v_proj.weight:m",
    L "self_attn.v_proj.weight:v",
    L "self_attn.o_proj.weight:new",
    L "self_attn.o_proj.weight:m",
    L "self_attn.o_proj.weight:v",
    L "post_attention_layernorm.weight:new",
    L "post_attention_layernorm.weight:m",
    L "post_attention_layernorm.weight:v",
    L "mlp.gate_proj.weight:new",
    L "mlp.gate_proj.weight:m",
    L "mlp.gate_proj.weight:v",
    L "mlp.up_proj.weight:new",
    L "mlp.up_proj.weight:m",
    L "mlp.up_proj.weight:v",
    L "mlp.down_proj.weight:new",
    L "mlp.down_proj.weight:m",
    L "mlp.down_proj.weight:v",
    "model.norm.weight:new",
    "model.norm.weight:m",
    "model.norm.weight:v",
    "lm_head.weight:new",
    "lm_head.weight:m",
    "lm_head.weight:v",
};
#undef L
/* With dropout, and without clipping. */
#define L "transformer.h.0."
static const char *const gpt2_names[] = {
    "transformer.wte.weight:init",
    "transformer.wpe.weight:init",
    L "ln_1.weight:init",
    L "ln_1.bias:init",
    L "attn.c_attn.weight:init",
    L "attn.c_attn.bias:init",
    L "attn.c_proj.weight:init",
    L "attn.c_proj.bias:init",
    L "ln_2.weight:init",
    L "ln_2.bias:init",
    L "mlp.c_fc.weight:init",
    L "mlp.c_fc.bias:init",
    L "mlp.c_proj.weight:init",
    L "mlp.c_proj.bias:init",
    "transformer.ln_f.weight:init",
    "transformer.ln_f.bias:init",
    "transformer.wte:fwd",
    "transformer.drop:fwd",
    L "ln_1:fwd",
    L "attn.q:fwd",
    L "attn.k:fwd",
    L "attn.v:fwd",
    L "attn.probs:fwd",
    L "attn.attn_dropout:fwd",
    L "attn.context:fwd",
    L "attn.c_proj:fwd",
    L "attn.resid_dropout:fwd",
    L "attn_residual:fwd",
    L "ln_2:fwd",
    L "mlp.c_fc:fwd",
    L "mlp.act:fwd",
    L "mlp.c_proj:fwd",
    L "mlp.dropout:fwd",
    "transformer.h.0:fwd",
    "transformer.ln_f:fwd",
    "lm_head:fwd",
    "loss:fwd",
    "lm_head.logits:bwd",
    "lm_head:bwd",
    "transformer.ln_f:bwd",
    "transformer.ln_f.weight:grad",
    "transformer.ln_f.bias:grad",
    L "mlp.dropout:bwd",
    L "mlp.c_proj:bwd",
    L "mlp.c_proj.weight:grad",
    L "mlp.c_proj.bias:grad",
    L "mlp.fc:bwd",
    L "mlp.c_fc:bwd",
    L "mlp.c_fc.weight:grad",
    L "mlp.c_fc.bias:grad",
    L "ln_2:bwd",
    L "ln_2.weight:grad",
    L "ln_2.bias:grad",
    L "attn_residual:bwd",
    L "attn.resid_dropout:bwd",
    L "attn.c_proj:bwd",
    L "attn.c_proj.weight:grad",
    L "attn.c_proj.bias:grad",
    L "attn.probs:bwd",
    L "attn.v:bwd",
    L "attn.q:bwd",
    L "attn.k:bwd",
    L "attn.c_attn:bwd",
    L "attn.c_attn.weight:grad",
    L "attn.c_attn.bias:grad",
    L "ln_1:bwd",
    L "ln_1.weight:grad",
    L "ln_1.bias:grad",
    "transformer.h.0:bwd",
    "transformer.wte.weight:grad",
    "transformer.wpe.weight:grad",
    "transformer.wte.weight:new",
    "transformer.wte.weight:m",
    "transformer.wte.weight:v",
    "transformer.wpe.weight:new",
    "transformer.wpe.weight:m",
    "transformer.wpe.weight:v",
    L "ln_1.weight:new",
    L "ln_1.weight:m",
    L "ln_1.weight:v",
    L "ln_1.bias:new",
    L "ln_1.bias:m",
    L "ln_1.bias:v",
    L "attn.c_attn.weight:new",
    L "attn.c_attn.weight:m",
    L "attn.c_attn.weight:v",
    L "attn.c_attn.bias:new",
    L "attn.c_attn.bias:m",
    L "attn.c_attn.bias:v",
    L "attn.c_proj.weight:new",
    L "attn.c_proj.weight:m",
    L "attn.c_proj.weight:v",
    L "attn.c_proj.bias:new",
    L "attn.c_proj.bias:m",
    L "attn.c_proj.bias:v",
    L "ln_2.weight:new",
    L "ln_2.weight:m",
    L "ln_2.weight:v",
    L "ln_2.bias:new",
    L "ln_2.bias:m",
    L "ln_2.bias:v",
    L "mlp.c_fc.weight:new",
    L "mlp.c_fc.weight:m",
    L "mlp.c_fc.weight:v",
    L "mlp.c_fc.bias:new",
    L "mlp.c_fc.bias:m",
    L "mlp.c_fc.bias:v",
    L "mlp.c_proj.weight:new",
    L "mlp.c_proj.weight:m",
    L "mlp.c_proj.weight:v",
    L "mlp.c_proj.bias:new",
    L "mlp.c_proj.bias:m",
    L "mlp.c_proj.bias:v",
    "transformer.ln_f.weight:new",
    "transformer.ln_f.weight:m",
    "transformer.ln_f.weight:v",
    "transformer.ln_f.bias:new",
    "transformer.ln_f.bias:m",
    "transformer.ln_f.bias:v",
};
#undef L
/* Without an update. */
#define L "layers.0."
static const char *const stack_names[] = {
    "embed.weight:init",
    L "ln1.weight:init",
    L "ln1.bias:init",
    L "attn.wq.weight:init",
    L "attn.wk.weight:init",
    L "attn.wv.weight:init",
    L "attn.wo.weight:init",
    L "ln2.weight:init",
    L "ln2.bias:init",
    L "mlp.w1.weight:init",
    L "mlp.w1.bias:init",
    L "mlp.w2.weight:init",
    L "mlp.w2.bias:init",
    "embed:fwd",
    L "ln1:fwd",
    L "attn.wq:fwd",
    L "attn.wk:fwd",
    L "attn.wv:fwd",
    L "attn.probs:fwd",
    L "attn.context:fwd",
    L "attn.wo:fwd",
    L "attn_residual:fwd",
    L "ln2:fwd",
    L "mlp.w1:fwd",
    L "mlp.act:fwd",
    L "mlp.w2:fwd",
    "layers.0:fwd",
    "loss:fwd",
    L "mlp.w2:bwd",
    L "mlp.w2.weight:grad",
    L "mlp.w2.bias:grad",
    L "mlp.fc:bwd",
    L "mlp.w1:bwd",
    L "mlp.w1.weight:grad",
    L "mlp.w1.bias:grad",
    L "ln2:bwd",
    L "ln2.weight:grad",
    L "ln2.bias:grad",
    L "attn_residual:bwd",
    L "attn.wo:bwd",
    L "attn.wo.weight:grad",
    L "attn.probs:bwd",
    L "attn.v:bwd",
    L "attn.q:bwd",
    L "attn.k:bwd",
    L "attn:bwd",
    L "attn.wq.weight:grad",
    L "attn.wk.weight:grad",
    L "attn.wv.weight:grad",
    L "ln1:bwd",
    L "ln1.weight:grad",
    L "ln1.bias:grad",
    "layers.0:bwd",
    "embed.weight:grad",
};
#undef L

typedef struct tensors_case {
    const char *one, *two; /* the model with one and with two layers */
    const char *const *names;
    size_t count, per_layer; /* tensors; of another layer */
    int steps;
    double clip, dropout;
} tensors_case;

#define NAMES(list) .names = list, .count = sizeof list / sizeof *list
static const tensors_case cases[] = {
    /* 9 parameters in three passes, 16 forward and 16 backward values */
    {.one = ONE_LLAMA, .two = TWO_LLAMA, NAMES(llama_names), .per_layer = 5 * 9 + 16 + 16, .steps = 1, .clip = 1e-3},
    {.one = ONE_GPT2, .two = TWO_GPT2, NAMES(gpt2_names), .per_layer = 5 * 12 + 16 + 15, .steps = 1, .dropout = 0.2},
    {.one = ONE_STACK, .two = TWO_STACK, NAMES(stack_names), .per_layer = 2 * 12 + 13 + 13},
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

typedef struct listing {
    const tensors_case *c; /* NULL: only counted */
    size_t count;
} listing;

static ar_status expect_next(void *user, const char *tensor, const char *pass, int ndim, const size_t *shape)
{
    listing *l = user;
    const size_t i = l->count++;
    (void)shape;
    if (!l->c)
        return AR_OK;
    cr_expect(i < l->c->count && strcmp(l->c->names[i], tensor) == 0, "tensor %zu is %s, expected %s", i, tensor,
              i < l->c->count ? l->c->names[i] : "none");
    cr_expect(ndim >= 0 && ndim <= AR_MAX_DIMS && pass[0] != '\0');
    return AR_OK;
}

Test(tensors, are_those_of_the_list_made_by_hand_and_every_layout_compares_them)
{
    static const int tp[] = {1, 2};
    for (size_t i = 0; i < CASES; i++) {
        listing one = {.c = &cases[i]}, two = {0};
        OWNED(end_folder) char *folder = new_model(cases[i].one);
        const ar_check_options o = options_of(&cases[i], folder, tp);
        cr_assert_ok(ar_check_tensors(&o, expect_next, &one));
        cr_expect_eq(one.count, cases[i].count);
        ar_check_report *r = check_or_fail(&o);
        cr_expect_eq(r->tensors, cases[i].count, "case %zu: %zu compared", i, r->tensors);
        expect_same(r, cases[i].names[0]);
        ar_check_report_destroy(r);
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
