/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/models/param_list.h"

#include <stdio.h>

typedef struct walk {
    ar_status (*visit)(void *user, const char *name, int ndim, const size_t *shape);
    void *user;
    char block[64]; /* path of the block being walked */
} walk;

static ar_status vector(const walk *w, const char *part, size_t n)
{
    char name[160];
    snprintf(name, sizeof name, "%s.%s", w->block, part);
    return w->visit(w->user, name, 1, &n);
}

static ar_status matrix(const walk *w, const char *part, size_t rows, size_t cols)
{
    char name[160];
    const size_t shape[2] = {rows, cols};
    snprintf(name, sizeof name, "%s.%s", w->block, part);
    return w->visit(w->user, name, 2, shape);
}

static ar_status outer(const walk *w, const char *name, size_t rows, size_t cols)
{
    const size_t shape[2] = {rows, cols};
    return w->visit(w->user, name, cols ? 2 : 1, shape);
}

/* A linear layer: weight in its stored orientation, then the bias. */
static ar_status linear(const walk *w, const char *path, size_t out, size_t in, bool transposed, bool bias)
{
    char part[96];
    snprintf(part, sizeof part, "%s.weight", path);
    AR_TRY(transposed ? matrix(w, part, in, out) : matrix(w, part, out, in));
    if (!bias)
        return AR_OK;
    snprintf(part, sizeof part, "%s.bias", path);
    return vector(w, part, out);
}

static ar_status norm(const walk *w, const ar_config *c, const char *path)
{
    char part[96];
    snprintf(part, sizeof part, "%s.weight", path);
    AR_TRY(vector(w, part, c->hidden));
    if (c->norm != AR_NORM_LAYER)
        return AR_OK;
    snprintf(part, sizeof part, "%s.bias", path);
    return vector(w, part, c->hidden);
}

static ar_status llama_block(const walk *w, const ar_config *c)
{
    const size_t h = c->hidden, q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    AR_TRY(norm(w, c, "input_layernorm"));
    AR_TRY(linear(w, "self_attn.q_proj", q, h, false, c->qkv_bias));
    AR_TRY(linear(w, "self_attn.k_proj", kv, h, false, c->qkv_bias));
    AR_TRY(linear(w, "self_attn.v_proj", kv, h, false, c->qkv_bias));
    AR_TRY(linear(w, "self_attn.o_proj", h, q, false, c->out_bias));
    AR_TRY(norm(w, c, "post_attention_layernorm"));
    AR_TRY(linear(w, "mlp.gate_proj", c->ffn, h, false, c->mlp_bias));
    AR_TRY(linear(w, "mlp.up_proj", c->ffn, h, false, c->mlp_bias));
    return linear(w, "mlp.down_proj", h, c->ffn, false, c->mlp_bias);
}

static ar_status gpt2_block(const walk *w, const ar_config *c)
{
    const size_t h = c->hidden, q = c->heads * c->head_dim;
    AR_TRY(norm(w, c, "ln_1"));
    AR_TRY(linear(w, "attn.c_attn", 3 * q, h, true, true));
    AR_TRY(linear(w, "attn.c_proj", h, q, true, true));
    AR_TRY(norm(w, c, "ln_2"));
    AR_TRY(linear(w, "mlp.c_fc", c->ffn, h, true, true));
    return linear(w, "mlp.c_proj", h, c->ffn, true, true);
}

static ar_status stack_block(const walk *w, const ar_config *c)
{
    const size_t h = c->hidden, q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    AR_TRY(norm(w, c, "ln1"));
    AR_TRY(linear(w, "attn.wq", q, h, false, c->qkv_bias));
    AR_TRY(linear(w, "attn.wk", kv, h, false, c->qkv_bias));
    AR_TRY(linear(w, "attn.wv", kv, h, false, c->qkv_bias));
    AR_TRY(linear(w, "attn.wo", h, q, false, c->out_bias));
    AR_TRY(norm(w, c, "ln2"));
    AR_TRY(linear(w, "mlp.w1", c->ffn, h, false, c->mlp_bias));
    return linear(w, "mlp.w2", h, c->ffn, false, c->mlp_bias);
}

typedef struct family {
    const char *embedding, *positions, *blocks, *final_norm, *head;
    ar_status (*block)(const walk *w, const ar_config *c);
} family;

ar_status ari_param_list(const ar_config *c,
                         ar_status (*visit)(void *user, const char *name, int ndim, const size_t *shape), void *user)
{
    static const family families[] = {
        [AR_ARCH_LLAMA] = {"model.embed_tokens.weight", NULL, "model.layers", "model.norm", "lm_head.weight", llama_block},
        [AR_ARCH_GPT2] = {"transformer.wte.weight", "transformer.wpe.weight", "transformer.h", "transformer.ln_f",
                          "lm_head.weight", gpt2_block},
        [AR_ARCH_STACK] = {"embed.weight", NULL, "layers", NULL, NULL, stack_block},
    };
    const family *f = &families[c->arch];
    walk w = {.visit = visit, .user = user};
    AR_TRY(outer(&w, f->embedding, c->vocab, c->hidden));
    if (c->learned_positions)
        AR_TRY(outer(&w, f->positions, c->max_positions, c->hidden));
    for (size_t i = 0; i < c->layers; i++) {
        snprintf(w.block, sizeof w.block, "%s.%zu", f->blocks, i);
        AR_TRY(f->block(&w, c));
    }
    if (c->final_norm) {
        snprintf(w.block, sizeof w.block, "%s", f->final_norm);
        AR_TRY(vector(&w, "weight", c->hidden));
        if (c->norm == AR_NORM_LAYER)
            AR_TRY(vector(&w, "bias", c->hidden));
    }
    return f->head && !c->tied ? outer(&w, f->head, c->vocab, c->hidden) : AR_OK;
}
