/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"
#include "ref/core/text.h"
#include "ref/io/config_parts.h"
#include "ref/io/config_private.h"

/* The tokens of a text are bytes, and two blocks have a boundary. */
enum { LEAST_VOCABULARY = 256, LEAST_LAYERS = 2, LEAST_HEAD = 2 };

static size_t gcd(size_t a, size_t b)
{
    while (b != 0) {
        const size_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static size_t rounded(size_t n, size_t by)
{
    return n / by + (n % by >= by - by / 2);
}

/* The number nearest to `wanted` among those that have the same divisors in common with `heads` as x. A tp is a divisor
 * of the heads, so it divides the one if and only if it divides the other. */
static size_t same_divisors(size_t x, size_t wanted, size_t heads)
{
    const size_t common = gcd(x, heads), others = heads / common, k = ari_larger(rounded(wanted, common), 1);
    for (size_t away = 0;; away++) { /* k = 1 would do, and some k above within `others` */
        if (k > away && gcd(k - away, others) == 1)
            return (k - away) * common;
        if (gcd(k + away, others) == 1)
            return (k + away) * common;
    }
}

/* The layer of the more ones that layer i of the fewer is like: the first like the first and the last like the last. */
static size_t layer_like(const ar_config *c, const ar_config *from, size_t i)
{
    const size_t at = i < c->layers ? i : c->layers - 1;
    return c->layers > 1 ? at * (from->layers - 1) / (c->layers - 1) : 0;
}

/* The sets of layers, each layer as the one that it is like. */
static void shrink_layers(ar_config *c, const ar_config *from)
{
    memset(c->full_attention, 0, sizeof c->full_attention);
    memset(c->dense, 0, sizeof c->dense);
    memset(c->unturned, 0, sizeof c->unturned);
    for (size_t i = 0; i < AR_CONFIG_LAYER_BITS; i++) {
        const uint64_t bit = (uint64_t)1 << (i % 64);
        const size_t like = layer_like(c, from, i);
        c->full_attention[i / 64] |= from->window > 0 && ar_config_window(from, like) == 0 ? bit : 0;
        c->dense[i / 64] |= from->experts.n > 0 && !ar_config_has_experts(from, like) ? bit : 0;
        c->unturned[i / 64] |= from->rope.kind != AR_ROPE_NONE && !ar_config_turns(from, like) ? bit : 0;
    }
}

/* The same share of a smaller head turns, by every n-th factor. */
static void shrink_rope(ar_rope *r, size_t head_dim, size_t from)
{
    const size_t pairs = ar_rope_dim(r, from) / 2, least = r->kind == AR_ROPE_DYNAMIC ? 2 : 1;
    if (r->kind == AR_ROPE_NONE)
        return;
    if (r->rotary_dim > 0)
        r->rotary_dim = 2 * ari_larger(rounded(pairs * head_dim, from), least);
    const size_t kept = ar_rope_dim(r, head_dim) / 2;
    for (size_t i = 0; r->kind == AR_ROPE_LONGROPE && i < AR_ROPE_PAIRS; i++) {
        r->short_factor[i] = i < kept ? r->short_factor[i * pairs / kept] : 0.0f;
        r->long_factor[i] = i < kept ? r->long_factor[i * pairs / kept] : 0.0f;
    }
}

/* Whether experts have a width of their own in the file; of Mixtral and OLMoE it is intermediate_size. */
static bool has_own_width(const ar_config *c)
{
    return c->arch == AR_ARCH_QWEN2_MOE || c->arch == AR_ARCH_GLM4_MOE || c->arch == AR_ARCH_DEEPSEEK ||
           (c->arch == AR_ARCH_QWEN3_MOE && c->qk_norm == AR_QK_NORM_HEAD);
}

static void describe_shrunk(ar_config *c, const ar_config *from, size_t n)
{
    const ar_experts *e = &c->experts;
    ari_text text = ari_text_in(c->changed, sizeof c->changed);
    ari_say(&text, "%s shrunk to 1/%zu: %zu of %zu layers, hidden %zu of %zu, heads of %zu of %zu", from->name, n,
            c->layers, from->layers, c->hidden, from->hidden, c->head_dim, from->head_dim);
    if (e->n == 0 || has_own_width(c))
        ari_say(&text, ", MLP %zu of %zu", c->ffn, from->ffn);
    if (e->n > 0)
        ari_say(&text, ", experts %zu of %zu", e->ffn, from->experts.ffn);
    if (e->shared > 0)
        ari_say(&text, " (the shared one %zu of %zu)", e->shared, from->experts.shared);
    ari_say(&text, ", vocabulary %zu of %zu; %zu heads (%zu KV) as before, fresh weights", c->vocab, from->vocab,
            c->heads, c->kv_heads);
    snprintf(c->name, sizeof c->name, "%.*s at 1/%zu", (int)sizeof c->name - 28, from->name, n);
}

/* A head's features keep their two kinds, and the scores their factor. */
static void shrink_latent(ar_config *c, const ar_config *from, size_t n, size_t least)
{
    const ar_latent *l = &from->latent;
    if (l->kv_rank == 0)
        return;
    c->latent = (ar_latent){.kv_rank = ari_larger(rounded(l->kv_rank, n), 1),
                            .q_rank = l->q_rank > 0 ? ari_larger(rounded(l->q_rank, n), 1) : 0,
                            .rope_dim = ari_larger(2 * rounded(l->rope_dim, 2 * n), least),
                            .value_dim = ari_larger(rounded(l->value_dim, n), 1)};
    c->head_dim = ari_larger(rounded(from->head_dim - l->rope_dim, n), 1) + c->latent.rope_dim;
    c->query_scalar = from->query_scalar / (double)from->head_dim * (double)c->head_dim;
    c->rope.rotary_dim = c->latent.rope_dim;
}

ar_status ari_config_shrink(ar_config *c, size_t n)
{
    const ar_config from = *c;
    if (n == 0)
        return ar_error_set(AR_ERR_ARG, "%s: cannot be shrunk to 1/0", c->name);
    if (n == 1)
        return AR_OK;
    const size_t least =
        c->rope.kind == AR_ROPE_DYNAMIC ? 2 * LEAST_HEAD : LEAST_HEAD; /* of which one pair would not do */
    if (n > from.head_dim / least)
        return ar_error_set(AR_ERR_ARG,
                            "%s: cannot be shrunk to 1/%zu: its heads have %zu features and keep at least %zu; the "
                            "smallest is 1/%zu%s",
                            c->name, n, from.head_dim, least, ari_larger(from.head_dim / least, 1),
                            from.head_dim / least > 1 ? "" : ", the model itself");
    c->head_dim = ari_larger(2 * rounded(from.head_dim, 2 * n), least); /* rotary positions turn pairs */
    c->hidden = from.hidden == from.heads * from.head_dim
                    ? c->heads * c->head_dim
                    : same_divisors(from.hidden, rounded(from.hidden, n), c->heads);
    shrink_latent(c, &from, n, least);
    if (from.embed_scale > 0.0 && from.norm_plus_one) /* Gemma's */
        c->embed_scale = sqrt((double)c->hidden);
    c->ffn = same_divisors(from.ffn, rounded(from.ffn, n), c->heads);
    if (from.experts.n > 0)
        c->experts.ffn = same_divisors(from.experts.ffn, rounded(from.experts.ffn, n), c->heads);
    if (from.experts.shared > 0)
        c->experts.shared = from.experts.ungated
                                ? from.experts.shared / from.experts.ffn * c->experts.ffn /* so many of those */
                                : same_divisors(from.experts.shared, rounded(from.experts.shared, n), c->heads);
    if (from.vocab > LEAST_VOCABULARY)
        c->vocab = same_divisors(from.vocab, ari_larger(rounded(from.vocab, n), LEAST_VOCABULARY), c->heads);
    c->pads = from.pads && from.pad_id < c->vocab;
    c->pad_id = c->pads ? from.pad_id : 0;
    if (from.layers > LEAST_LAYERS)
        c->layers = ari_larger(rounded(from.layers, n), LEAST_LAYERS);
    shrink_layers(c, &from);
    if (c->latent.kv_rank == 0)
        shrink_rope(&c->rope, c->head_dim, from.head_dim);
    shrink_rope(&c->local_rope, c->head_dim, from.head_dim);
    describe_shrunk(c, &from, n);
    return AR_OK;
}

/* --- its config.json ---------------------------------------------------------------------------------------------- */

/* Keys of the sizes that shrink; another name of one is there only where the file has it. */
static const struct size_key {
    ar_arch arch;
    bool another;
    char name[24];
    size_t at;
} size_keys[] = {{AR_ARCH_LLAMA, false, "hidden_size", offsetof(ar_config, hidden)},
                 {AR_ARCH_LLAMA, false, "intermediate_size", offsetof(ar_config, ffn)},
                 {AR_ARCH_LLAMA, false, "num_hidden_layers", offsetof(ar_config, layers)},
                 {AR_ARCH_LLAMA, false, "vocab_size", offsetof(ar_config, vocab)},
                 {AR_ARCH_LLAMA, false, "head_dim", offsetof(ar_config, head_dim)},
                 {AR_ARCH_STACK, false, "hidden_size", offsetof(ar_config, hidden)},
                 {AR_ARCH_STACK, false, "intermediate_size", offsetof(ar_config, ffn)},
                 {AR_ARCH_STACK, false, "num_hidden_layers", offsetof(ar_config, layers)},
                 {AR_ARCH_STACK, false, "vocab_size", offsetof(ar_config, vocab)},
                 {AR_ARCH_STACK, true, "head_dim", offsetof(ar_config, head_dim)},
                 {AR_ARCH_GPT2, false, "n_embd", offsetof(ar_config, hidden)},
                 {AR_ARCH_GPT2, false, "n_inner", offsetof(ar_config, ffn)},
                 {AR_ARCH_GPT2, false, "n_layer", offsetof(ar_config, layers)},
                 {AR_ARCH_GPT2, false, "vocab_size", offsetof(ar_config, vocab)},
                 {AR_ARCH_GPT2, true, "hidden_size", offsetof(ar_config, hidden)},
                 {AR_ARCH_GPT2, true, "num_hidden_layers", offsetof(ar_config, layers)}};

/* The experts' widths, and each layer without them by its number. */
static void set_experts(json_t *object, const ar_config *c)
{
    json_t *dense = NULL;
    if (!has_own_width(c))
        return;
    json_object_set_new(object, "moe_intermediate_size", json_integer((json_int_t)c->experts.ffn));
    if (c->experts.scores.groups > 0) {
        size_t first = 0;
        while (first < c->layers && !ar_config_has_experts(c, first))
            first++;
        json_object_set_new(object, "first_k_dense_replace", json_integer((json_int_t)first));
        if (json_is_array(json_object_get(object, "mlp_layer_types"))) {
            json_t *types = json_array();
            for (size_t i = 0; i < c->layers; i++)
                json_array_append_new(types, json_string(ar_config_has_experts(c, i) ? "sparse" : "dense"));
            json_object_set_new(object, "mlp_layer_types", types);
        }
        return;
    }
    dense = json_array();
    for (size_t i = 0; i < c->layers; i++) {
        if (!ar_config_has_experts(c, i))
            json_array_append_new(dense, json_integer((json_int_t)i));
    }
    json_object_set_new(object, "mlp_only_layers", dense);
    json_object_set_new(object, "decoder_sparse_step", json_integer(1));
    if (c->experts.shared > 0)
        json_object_set_new(object, "shared_expert_intermediate_size", json_integer((json_int_t)c->experts.shared));
}

static void set_latent(json_t *object, const ar_config *c)
{
    const ar_latent *l = &c->latent;
    const struct {
        const char *key;
        size_t n;
    } sizes[] = {{"kv_lora_rank", l->kv_rank},
                 {"q_lora_rank", l->q_rank},
                 {"qk_rope_head_dim", l->rope_dim},
                 {"qk_nope_head_dim", c->head_dim - l->rope_dim},
                 {"v_head_dim", l->value_dim}};
    if (l->kv_rank == 0)
        return;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        json_object_set_new(object, sizes[i].key, sizes[i].n > 0 ? json_integer((json_int_t)sizes[i].n) : json_null());
    json_object_del(object, "head_dim"); /* these two the classes make of the others, unless a file has them */
    json_object_del(object, "qk_head_dim");
}

static json_t *layer_types(const ar_config *c)
{
    json_t *types = json_array();
    for (size_t i = 0; i < c->layers; i++)
        json_array_append_new(types, json_string(ar_config_window(c, i) > 0 ? "sliding_attention" : "full_attention"));
    return types;
}

/* SmolLM3's key; of EXAONE the windows say it. */
static json_t *turned_layers(const ar_config *c)
{
    json_t *turned = json_array();
    for (size_t i = 0; i < c->layers; i++)
        json_array_append_new(turned, json_integer(ar_config_turns(c, i)));
    return turned;
}

/* Sets a rotation's keys that depend on the head size. The share of rotated features is one that truncates to them.
 * outside: its key beside the object. */
static void set_rope(json_t *object, const char *key, const ar_rope *r, size_t head_dim, const char *outside)
{
    json_t *rope = json_object_get(object, key);
    if (json_is_object(rope) && r->kind == AR_ROPE_LONGROPE) {
        json_object_set_new(rope, "short_factor", ari_json_floats(r->short_factor, ar_rope_dim(r, head_dim) / 2));
        json_object_set_new(rope, "long_factor", ari_json_floats(r->long_factor, ar_rope_dim(r, head_dim) / 2));
    }
    json_t *const places[2] = {object, rope};
    const char *const names[2] = {outside, "partial_rotary_factor"};
    const bool part = ar_rope_dim(r, head_dim) < head_dim;
    const double share = part ? ((double)r->rotary_dim + 0.25) / (double)head_dim : 1.0;
    bool said = r->rotary_dim == 0 || r->last; /* those of latent attention have a key of their own */
    json_object_del(object, "rotary_dim");     /* MiniMax's name of the share */
    for (int i = 0; i < 2; i++) {
        if (r->last)
            json_object_del(places[i], names[i]);
        else if (json_is_number(json_object_get(places[i], names[i]))) {
            json_object_set_new(places[i], names[i], json_real(share));
            said = true;
        }
    }
    if (!said) /* the model's own share need not be an even number of the fewer features */
        json_object_set_new(object, outside, json_real(share));
}

static void set_sizes(json_t *object, const ar_config *c)
{
    const bool own = c->arch == AR_ARCH_GPT2 || c->arch == AR_ARCH_STACK;
    const ar_arch arch = own ? c->arch : AR_ARCH_LLAMA;
    const char *const share = c->arch == AR_ARCH_GPT_NEOX ? "rotary_pct" : "partial_rotary_factor";
    for (size_t i = 0; i < sizeof size_keys / sizeof *size_keys; i++) {
        const struct size_key *k = &size_keys[i];
        size_t n = 0;
        memcpy(&n, (const char *)c + k->at, sizeof n);
        if (k->arch == arch && (!k->another || json_is_integer(json_object_get(object, k->name))))
            json_object_set_new(object, k->name, json_integer((json_int_t)n));
    }
    if (!own)
        json_object_set_new(object, "pad_token_id", c->pads ? json_integer((json_int_t)c->pad_id) : json_null());
    json_object_del(object, "quantization_config"); /* what is written is not */
    set_experts(object, c);
    set_latent(object, c);
    set_rope(object, "rope_parameters", &c->rope, c->head_dim, share);
    set_rope(object, "rope_scaling", &c->rope, c->head_dim, share);
    if (strcmp(json_string_value(json_object_get(object, "model_type")), "smollm3") == 0)
        json_object_set_new(object, "no_rope_layers", turned_layers(c));
    if (c->window > 0 || json_is_array(json_object_get(object, "layer_types")))
        json_object_set_new(object, "layer_types", layer_types(c));
}

static bool same_experts(const ar_config *a, const ar_config *b)
{
    const ar_experts *x = &a->experts, *y = &b->experts;
    bool same = x->n == y->n && x->per_token == y->per_token && x->ffn == y->ffn && x->shared == y->shared;
    for (size_t i = 0; i < a->layers; i++)
        same = same && ar_config_has_experts(a, i) == ar_config_has_experts(b, i);
    return same;
}

static bool same_sizes(const ar_config *a, const ar_config *b)
{
    if (a->hidden != b->hidden || a->ffn != b->ffn || a->layers != b->layers || a->vocab != b->vocab ||
        a->heads != b->heads || a->kv_heads != b->kv_heads || a->head_dim != b->head_dim || a->pads != b->pads ||
        a->mtp != b->mtp || a->pad_id != b->pad_id ||
        ar_rope_dim(&a->rope, a->head_dim) != ar_rope_dim(&b->rope, b->head_dim) ||
        memcmp(&a->latent, &b->latent, sizeof a->latent) != 0)
        return false;
    for (size_t i = 0; i < a->layers; i++) {
        if (ar_config_window(a, i) != ar_config_window(b, i) || ar_config_turns(a, i) != ar_config_turns(b, i))
            return false;
    }
    return same_experts(a, b);
}

ar_status ari_config_rewrite(unsigned char **text, size_t *bytes, const ar_config *c)
{
    json_auto_t *object = NULL;
    ar_config read;
    AR_TRY(ari_json_parse(&object, (const char *)*text, *bytes, c->name));
    (void)ari_config_language_model(&object);
    set_sizes(object, c);
    if (c->mtp > 0) {
        json_object_set_new(object, "num_nextn_predict_layers", json_integer((json_int_t)c->mtp));
        json_object_set_new(object, "mtp_loss_scaling_factor", json_real(c->mtp_weight));
    }
    ARI_OWNED char *resized = json_dumps(object, JSON_INDENT(2));
    if (!resized)
        return ar_error_set(AR_ERR_MEMORY, "%s: no memory for its config.json", c->name);
    AR_TRY(ar_config_parse(&read, resized, strlen(resized), c->name));
    if (!same_sizes(&read, c))
        return ar_error_set(AR_ERR_INTERNAL, "%s: its config.json describes another model", c->name);
    free(*text);
    *text = (unsigned char *)resized;
    *bytes = strlen(resized);
    resized = NULL;
    return AR_OK;
}
