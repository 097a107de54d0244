/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/models/param_list.h"

#include <stdio.h>

#include "ref/models/names.h"

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

static ar_status final_norm(const walk *w, const ar_config *c, const char *path)
{
    const size_t h = c->hidden;
    char name[160];
    snprintf(name, sizeof name, "%s.weight", path);
    AR_TRY(w->visit(w->user, name, 1, &h));
    if (c->norm != AR_NORM_LAYER)
        return AR_OK;
    snprintf(name, sizeof name, "%s.bias", path);
    return w->visit(w->user, name, 1, &h);
}

static ar_status table(const walk *w, const char *path, size_t rows, size_t cols)
{
    char name[160];
    const size_t shape[2] = {rows, cols};
    snprintf(name, sizeof name, "%s.weight", path);
    return w->visit(w->user, name, 2, shape);
}

ar_status ari_param_list(const ar_config *c,
                         ar_status (*visit)(void *user, const char *name, int ndim, const size_t *shape), void *user)
{
    static ar_status (*const block[])(const walk *, const ar_config *) = {
        [AR_ARCH_LLAMA] = llama_block, [AR_ARCH_GPT2] = gpt2_block, [AR_ARCH_STACK] = stack_block};
    const ari_outer_names *n = ari_outer_names_of(c->arch);
    walk w = {.visit = visit, .user = user};
    AR_TRY(table(&w, n->token, c->vocab, c->hidden));
    if (c->learned_positions)
        AR_TRY(table(&w, n->position, c->max_positions, c->hidden));
    for (size_t i = 0; i < c->layers; i++) {
        snprintf(w.block, sizeof w.block, "%s.%zu", n->blocks, i);
        AR_TRY(block[c->arch](&w, c));
    }
    if (c->final_norm)
        AR_TRY(final_norm(&w, c, n->final_norm));
    return n->head && !c->tied ? table(&w, n->head, c->vocab, c->hidden) : AR_OK;
}
