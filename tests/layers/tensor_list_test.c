/* SPDX-License-Identifier: Apache-2.0 */
/* Which tensors are compared, in which order (gradients of parameters and the loss: in any): written here by hand for
 * one layer of each architecture (models.md), so that a tensor that nobody reports cannot pass for one that agrees.
 * "B" stands for the block's path. */
#include "support/match.h"
#include "support/rank_run.h"
#include "tests/support/test.h"

enum { B = 2, S = 6, MOST = 128 };

static const char *const llama_list[] = {
    "model.embed_tokens.weight:init", "B.input_layernorm.weight:init", "B.self_attn.q_proj.weight:init",
    "B.self_attn.k_proj.weight:init", "B.self_attn.v_proj.weight:init", "B.self_attn.o_proj.weight:init",
    "B.post_attention_layernorm.weight:init", "B.mlp.gate_proj.weight:init", "B.mlp.up_proj.weight:init",
    "B.mlp.down_proj.weight:init", "model.norm.weight:init", "lm_head.weight:init",
    /* forward */
    "model.embed_tokens:fwd", "B.input_layernorm:fwd", "B.self_attn.q_proj:fwd", "B.self_attn.k_proj:fwd",
    "B.self_attn.v_proj:fwd", "B.self_attn.q_rope:fwd", "B.self_attn.k_rope:fwd", "B.self_attn.probs:fwd",
    "B.self_attn.context:fwd", "B.self_attn.o_proj:fwd", "B.attn_residual:fwd", "B.post_attention_layernorm:fwd",
    "B.mlp.gate_proj:fwd", "B.mlp.up_proj:fwd", "B.mlp.act:fwd", "B.mlp.down_proj:fwd", "B:fwd", "model.norm:fwd",
    "lm_head:fwd", "loss:fwd",
    /* backward */
    "lm_head.logits:bwd", "lm_head:bwd", "lm_head.weight:grad", "model.norm:bwd", "model.norm.weight:grad",
    "B.mlp.down_proj:bwd", "B.mlp.down_proj.weight:grad", "B.mlp.gate:bwd", "B.mlp.up:bwd", "B.mlp:bwd",
    "B.mlp.gate_proj.weight:grad", "B.mlp.up_proj.weight:grad", "B.post_attention_layernorm:bwd",
    "B.post_attention_layernorm.weight:grad", "B.attn_residual:bwd", "B.self_attn.o_proj:bwd",
    "B.self_attn.o_proj.weight:grad", "B.self_attn.probs:bwd", "B.self_attn.q_rope:bwd", "B.self_attn.k_rope:bwd",
    "B.self_attn.v:bwd", "B.self_attn.q:bwd", "B.self_attn.k:bwd", "B.self_attn:bwd", "B.self_attn.q_proj.weight:grad",
    "B.self_attn.k_proj.weight:grad", "B.self_attn.v_proj.weight:grad", "B.input_layernorm:bwd",
    "B.input_layernorm.weight:grad", "B:bwd", "model.embed_tokens.weight:grad", NULL};

static const char *const gpt2_list[] = {
    "transformer.wte.weight:init", "transformer.wpe.weight:init", "B.ln_1.weight:init", "B.ln_1.bias:init",
    "B.attn.c_attn.weight:init", "B.attn.c_attn.bias:init", "B.attn.c_proj.weight:init", "B.attn.c_proj.bias:init",
    "B.ln_2.weight:init", "B.ln_2.bias:init", "B.mlp.c_fc.weight:init", "B.mlp.c_fc.bias:init",
    "B.mlp.c_proj.weight:init", "B.mlp.c_proj.bias:init", "transformer.ln_f.weight:init", "transformer.ln_f.bias:init",
    /* forward */
    "transformer.wte:fwd", "transformer.drop:fwd", "B.ln_1:fwd", "B.attn.q:fwd", "B.attn.k:fwd", "B.attn.v:fwd",
    "B.attn.probs:fwd", "B.attn.context:fwd", "B.attn.c_proj:fwd", "B.attn_residual:fwd", "B.ln_2:fwd",
    "B.mlp.c_fc:fwd", "B.mlp.act:fwd", "B.mlp.c_proj:fwd", "B:fwd", "transformer.ln_f:fwd", "lm_head:fwd", "loss:fwd",
    /* backward; the tied weight's gradient comes last */
    "lm_head.logits:bwd", "lm_head:bwd", "transformer.ln_f:bwd", "transformer.ln_f.weight:grad",
    "transformer.ln_f.bias:grad", "B.mlp.c_proj:bwd", "B.mlp.c_proj.weight:grad", "B.mlp.c_proj.bias:grad",
    "B.mlp.fc:bwd", "B.mlp.c_fc:bwd", "B.mlp.c_fc.weight:grad", "B.mlp.c_fc.bias:grad", "B.ln_2:bwd",
    "B.ln_2.weight:grad", "B.ln_2.bias:grad", "B.attn_residual:bwd", "B.attn.c_proj:bwd", "B.attn.c_proj.weight:grad",
    "B.attn.c_proj.bias:grad", "B.attn.probs:bwd", "B.attn.v:bwd", "B.attn.q:bwd", "B.attn.k:bwd", "B.attn.c_attn:bwd",
    "B.attn.c_attn.weight:grad", "B.attn.c_attn.bias:grad", "B.ln_1:bwd", "B.ln_1.weight:grad", "B.ln_1.bias:grad",
    "B:bwd", "transformer.wte.weight:grad", "transformer.wpe.weight:grad", NULL};

static const char *const stack_list[] = {
    "embed.weight:init", "B.ln1.weight:init", "B.ln1.bias:init", "B.attn.wq.weight:init", "B.attn.wk.weight:init",
    "B.attn.wv.weight:init", "B.attn.wo.weight:init", "B.ln2.weight:init", "B.ln2.bias:init", "B.mlp.w1.weight:init",
    "B.mlp.w1.bias:init", "B.mlp.w2.weight:init", "B.mlp.w2.bias:init",
    /* forward */
    "embed:fwd", "B.ln1:fwd", "B.attn.wq:fwd", "B.attn.wk:fwd", "B.attn.wv:fwd", "B.attn.probs:fwd",
    "B.attn.context:fwd", "B.attn.wo:fwd", "B.attn_residual:fwd", "B.ln2:fwd", "B.mlp.w1:fwd", "B.mlp.act:fwd",
    "B.mlp.w2:fwd", "B:fwd", "loss:fwd",
    /* backward */
    "B.mlp.w2:bwd", "B.mlp.w2.weight:grad", "B.mlp.w2.bias:grad", "B.mlp.fc:bwd", "B.mlp.w1:bwd",
    "B.mlp.w1.weight:grad", "B.mlp.w1.bias:grad", "B.ln2:bwd", "B.ln2.weight:grad", "B.ln2.bias:grad",
    "B.attn_residual:bwd", "B.attn.wo:bwd", "B.attn.wo.weight:grad", "B.attn.probs:bwd", "B.attn.v:bwd", "B.attn.q:bwd",
    "B.attn.k:bwd", "B.attn:bwd", "B.attn.wq.weight:grad", "B.attn.wk.weight:grad", "B.attn.wv.weight:grad",
    "B.ln1:bwd", "B.ln1.weight:grad", "B.ln1.bias:grad", "B:bwd", "embed.weight:grad", NULL};

typedef struct family {
    ar_arch arch;
    const char *blocks;
    const char *const *list;
    size_t tensors;                                      /* of a model of one layer */
    size_t block_init, block_fwd, block_bwd, block_grad; /* of each layer */
} family;

static const family families[] = {
    {AR_ARCH_LLAMA, "model.layers", llama_list, 63, 9, 16, 16, 9},
    {AR_ARCH_GPT2, "transformer.h", gpt2_list, 66, 12, 13, 13, 12},
    {AR_ARCH_STACK, "layers", stack_list, 54, 12, 13, 13, 12},
};

/* --- what a run reports ------------------------------------------------------------------------------------------- */

typedef struct report {
    size_t count;
    char name[MOST][96];
    char bad[120]; /* the first tensor that is not finite, or all zero where the rank holds something */
} report;

static ar_status note(report *r, const char *name, char pass, const float *values, size_t n, ptrdiff_t stride)
{
    if (r->count == MOST)
        return ar_error_set(AR_ERR_INTERNAL, "more than %d tensors", (int)MOST);
    snprintf(r->name[r->count], sizeof r->name[0], "%.80s%s", name, ari_pass_suffix(pass));
    bool finite = true, zero = true;
    for (size_t i = 0; i < n; i++) {
        finite = finite && isfinite(values[(ptrdiff_t)i * stride]);
        zero = zero && values[(ptrdiff_t)i * stride] == 0.0f;
    }
    if ((!finite || (n > 0 && zero)) && !r->bad[0])
        snprintf(r->bad, sizeof r->bad, "%.90s is %s", r->name[r->count], finite ? "all zero" : "not finite");
    r->count++;
    return AR_OK;
}

static ar_status note_tap(void *user, const ar_tap_event *e)
{
    /* Contiguous tensors only: a view's values stand in the tensor it views. */
    const bool whole = ar_tensor_is_contiguous(e->local);
    return note(user, e->name, e->pass, whole ? e->local->data.ptr : NULL, whole ? ar_tensor_count(e->local) : 0, 1);
}

static ar_status note_baseline(void *user, const char *name, char pass, int ndim, const size_t *shape,
                               const double *values)
{
    float narrow[4096];
    size_t n = 1;
    for (int d = 0; d < ndim; d++)
        n *= shape[d];
    for (size_t i = 0; i < n && i < 4096; i++)
        narrow[i] = (float)values[i];
    return n > 4096 ? AR_ERR_INTERNAL : note(user, name, pass, narrow, n, 1);
}

static ar_status step(ar_ctx *ctx, void *user)
{
    const match_case *c = user;
    OWNED(ar_model_destroy) ar_model *m = NULL;
    OWNED(ar_saved_destroy) ar_saved *saved = NULL;
    float loss = 0.0f;
    AR_TRY(ar_saved_create(&saved));
    AR_TRY(ar_model_create(&m, ctx, &c->config, NULL));
    AR_TRY(ar_model_fresh(m, ctx, 7));
    AR_TRY(ar_model_forward(m, ctx, saved, &c->batch));
    AR_TRY(ar_model_loss(m, ctx, &loss, ar_batch_targets(&c->batch)));
    AR_TRY(ar_model_backward(m, ctx, saved, &c->batch));
    return ar_model_reduce_grads(m, ctx);
}

/* --- the claims --------------------------------------------------------------------------------------------------- */

/* Complete once all micro-batches and ranks have added to it, wherever that is. */
static bool comes_later(const char *name)
{
    return strcmp(strrchr(name, ':'), ":grad") == 0 || strcmp(name, "loss:fwd") == 0;
}

static size_t times(const report *r, const char *name)
{
    size_t n = 0;
    for (size_t i = 0; i < r->count; i++)
        n += strcmp(r->name[i], name) == 0;
    return n;
}

/* Each of the list once and nothing else; all but what comes later in the list's order. */
static void expect_list(const report *r, const family *f, const char *who)
{
    char block[40], expected[96];
    size_t n = 0, at = 0;
    snprintf(block, sizeof block, "%s.0", f->blocks);
    for (; f->list[n]; n++) {
        const bool in_block = f->list[n][0] == 'B';
        snprintf(expected, sizeof expected, "%s%s", in_block ? block : "", f->list[n] + in_block);
        cr_assert_eq(times(r, expected), 1, "%s reports %s %zu times", who, expected, times(r, expected));
        if (comes_later(expected))
            continue;
        while (at < r->count && comes_later(r->name[at]))
            at++;
        cr_assert(at < r->count, "%s ends before %s", who, expected);
        cr_assert_str_eq(r->name[at], expected, "%s reports %s where %s belongs", who, r->name[at], expected);
        at++;
    }
    cr_assert_eq(r->count, n, "%s reports %zu tensors, expected %zu", who, r->count, n);
    cr_assert_eq(n, f->tensors);
    cr_assert_str_eq(r->bad, "", "%s: %s", who, r->bad);
}

static match_case small_case(const family *f, size_t layers)
{
    static const int64_t ids[B * S] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 5};
    return (match_case){.config = match_config(f->arch, layers), .batch = {B, S, ids}};
}

Test(tensor_list, the_model_reports_what_is_listed_on_every_rank)
{
    for (size_t i = 0; i < 3; i++) {
        for (int layout = 0; layout < 3; layout++) {
            const int tp = layout > 0 ? 2 : 1;
            static report r[2];
            void *user[2] = {&r[0], &r[1]};
            match_case c = small_case(&families[i], 1);
            memset(r, 0, sizeof r);
            const rank_run_options o = {.ranks = tp, .sp = layout == 2, .tap = note_tap, .tap_user = user};
            cr_assert_ok(rank_run(&o, step, &c));
            for (int k = 0; k < tp; k++)
                expect_list(&r[k], &families[i], "a rank");
        }
    }
}

Test(tensor_list, the_baseline_reports_what_is_listed)
{
    for (size_t i = 0; i < 3; i++) {
        static report r;
        const match_case c = small_case(&families[i], 1);
        const ar_baseline_options o = {.seed = 7, .emit = note_baseline, .emit_user = &r};
        double loss = 0.0;
        r.count = 0;
        cr_assert_ok(ar_baseline_run(&c.config, &o, &c.batch, &loss));
        expect_list(&r, &families[i], "the baseline");
    }
}

static size_t count_in(const report *r, const char *block, const char *suffix)
{
    size_t n = 0;
    const size_t length = strlen(block);
    for (size_t i = 0; i < r->count; i++) {
        const char *name = r->name[i];
        const bool inside = strncmp(name, block, length) == 0 && (name[length] == '.' || name[length] == ':');
        n += inside && strcmp(strrchr(name, ':'), suffix) == 0;
    }
    return n;
}

Test(tensor_list, every_layer_reports_the_same_number_of_tensors)
{
    for (size_t i = 0; i < 3; i++) {
        static report r;
        void *user[1] = {&r};
        const family *f = &families[i];
        match_case c = small_case(f, 2);
        memset(&r, 0, sizeof r);
        const rank_run_options o = {.ranks = 1, .tap = note_tap, .tap_user = user};
        cr_assert_ok(rank_run(&o, step, &c));
        const size_t per_layer = f->block_init + f->block_fwd + f->block_bwd + f->block_grad;
        cr_assert_eq(r.count, f->tensors + per_layer);
        for (int layer = 0; layer < 2; layer++) {
            char block[40];
            snprintf(block, sizeof block, "%s.%d", f->blocks, layer);
            cr_assert_eq(count_in(&r, block, ":init"), f->block_init, "%s", block);
            cr_assert_eq(count_in(&r, block, ":fwd"), f->block_fwd, "%s", block);
            cr_assert_eq(count_in(&r, block, ":bwd"), f->block_bwd, "%s", block);
            cr_assert_eq(count_in(&r, block, ":grad"), f->block_grad, "%s", block);
        }
    }
}
