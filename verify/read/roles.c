/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/read/roles.h"

#include <ctype.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* --- roles -------------------------------------------------------------------------------------------------------- */

static const ari_role_place places[ARI_ROLES] = {
    [ARI_TOKENS] = {1, 1},
    [ARI_POSITIONS] = {2, 2},
    [ARI_EMBEDDED] = {3, 0},
    [ARI_MTP_TOKENS] = {-4, 63},
    [ARI_TOKENS_NORM] = {-3, 62},
    [ARI_ENTERED_NORM] = {-2, 61},
    [ARI_JOINED] = {-1, 60},
    [ARI_NORM1] = {1, 52},
    [ARI_Q_A] = {2, 48},
    [ARI_KV_A] = {4, 49},
    [ARI_Q_A_NORM] = {5, 46},
    [ARI_Q_B] = {6, 45},
    [ARI_KV_A_NORM] = {7, 44},
    [ARI_KV_B] = {7, 43},
    [ARI_K_SHARED] = {0, 42},
    [ARI_QKV] = {2, 47},
    [ARI_Q] = {3, 48},
    [ARI_Q_HEADS] = {3, 40},
    [ARI_K] = {4, 49},
    [ARI_K_HEADS] = {4, 41},
    [ARI_V] = {5, 50},
    [ARI_V_HEADS] = {5, 39},
    [ARI_SINKS] = {9, 35},
    [ARI_Q_NORM] = {6, 38},
    [ARI_K_NORM] = {7, 38},
    [ARI_Q_ROPE] = {8, 36},
    [ARI_K_ROPE] = {9, 37},
    [ARI_PROBS] = {10, 35},
    [ARI_PROBS_DROPPED] = {11, 34},
    [ARI_PROBS_DIGESTS] = {10, 35},
    [ARI_DROPPED_DIGESTS] = {11, 34},
    [ARI_CONTEXT] = {12, 33},
    [ARI_OUT] = {13, 32},
    [ARI_OUT_DROPPED] = {14, 31},
    [ARI_ATTENTION] = {15, 47},
    [ARI_ATTENTION_NORM] = {15, 31},
    [ARI_ATTENTION_SUM] = {16, 30},
    [ARI_NORM2] = {17, 29},
    [ARI_FIRST] = {18, 25},
    [ARI_GATE_UP] = {18, 25},
    [ARI_FIRST_SUM] = {18, 13},
    [ARI_GATE] = {19, 26},
    [ARI_GATE_SUM] = {19, 13},
    [ARI_UP] = {20, 27},
    [ARI_UP_SUM] = {20, 23},
    [ARI_ACTIVATION] = {21, 12},
    [ARI_DOWN] = {22, 11},
    [ARI_ROUTER] = {23, 22}, /* "mlp.gate": the GATE_SUM of a gated MLP, which is followed by UP_SUM */
    [ARI_ROUTER_BIAS] = {23, 22},
    [ARI_CHOSEN] = {24, 0},
    [ARI_ROUTES] = {25, 20},
    [ARI_ROUTER_LOGITS] = {23, 21},
    [ARI_EXPERT_GATE] = {26, 12},
    [ARI_EXPERT_UP] = {26, 13},
    [ARI_EXPERT_DOWN] = {27, 11},
    [ARI_EXPERTS] = {28, 14},
    [ARI_SHARED_GATE] = {29, 16},
    [ARI_SHARED_UP] = {30, 17},
    [ARI_SHARED_ACTIVATION] = {31, 15},
    [ARI_SHARED_DOWN] = {32, 15},
    [ARI_SHARED_EXPERT] = {33, 18},
    [ARI_SHARED_SHARE] = {34, 19},
    [ARI_MLP_DROPPED] = {35, 10},
    [ARI_MLP] = {36, 24},
    [ARI_MLP_NORM] = {36, 10},
    [ARI_MTP_NORM] = {39, 4},
    [ARI_MTP_HEAD] = {40, 2},
    [ARI_MTP_LOGITS] = {40, 1},
    [ARI_LAYER] = {38, 59},
    [ARI_FINAL_NORM] = {1, 4},
    [ARI_HEAD_LOGITS] = {2, 1},
    [ARI_HEAD] = {2, 2},
    [ARI_LOGITS] = {3, 1},
    [ARI_LOSS] = {4, 0},
};

/* --- names -------------------------------------------------------------------------------------------------------- */

/* Further names. tail: the end of a name that identifies the entry outside of a layer; NULL: the path's last component
 * identifies it, as in the families. */
static const struct extra_entry {
    ari_role role;
    const char *path; /* NULL: the entry has no position in the order */
    const char *tail;
} extra_entries[] = {
    {ARI_EMBEDDED, "drop", NULL},
    {ARI_ATTENTION_SUM, "attn_residual", NULL},
    {ARI_LAYER, "", NULL},
    {ARI_HEAD_LOGITS, "lm_head.logits", "lm_head.logits"},
    {ARI_LOGITS, "logits", NULL},
    {ARI_LOSS, "loss", NULL},
    {ARI_SHARED_GATE, "mlp.shared_expert.gate", NULL},
    {ARI_SHARED_UP, "mlp.shared_expert.up", NULL},
    {ARI_SHARED_GATE, "mlp.shared_experts.gate", NULL},
    {ARI_SHARED_UP, "mlp.shared_experts.up", NULL},
    /* Other models of Hugging Face's. */
    {ARI_QKV, "self_attn.qkv_proj", NULL},
    {ARI_Q_NORM, "self_attn.q_norm", NULL},
    {ARI_K_NORM, "self_attn.k_norm", NULL},
    {ARI_GATE_UP, "mlp.gate_up_proj", NULL},
    {ARI_FIRST, "mlp.fc1", NULL},
    {ARI_DOWN, "mlp.fc2", NULL},
    {ARI_ACTIVATION, "mlp.act_fn", NULL},
    {ARI_ACTIVATION, "mlp.activation_fn", NULL},
    {ARI_OUT, "self_attn.dense", "self_attn.dense"},
    {ARI_NORM1, "self_attn_layer_norm", NULL}, /* OPT */
    {ARI_OUT, "self_attn.out_proj", NULL},
    {ARI_NORM2, "final_layer_norm", NULL},
    {ARI_FIRST, "fc1", NULL},
    {ARI_ACTIVATION, "activation_fn", NULL},
    {ARI_DOWN, "fc2", NULL},
    {ARI_POSITIONS, "embed_positions", NULL},
    {ARI_Q, NULL, "query"},
    {ARI_K, NULL, "key"},
    {ARI_V, NULL, "value"},
    {ARI_QKV, NULL, "qkv"},
    {ARI_QKV, NULL, "Wqkv"},
    {ARI_QKV, NULL, "wqkv"},
    /* Megatron. */
    {ARI_TOKENS, "word_embeddings", NULL},
    {ARI_POSITIONS, "position_embeddings", NULL},
    {ARI_QKV, "self_attention.query_key_value", NULL},
    {ARI_QKV, "self_attention.linear_qkv", NULL},
    {ARI_CONTEXT, "self_attention.core_attention", NULL},
    {ARI_OUT, "self_attention.dense", "attention.dense"},
    {ARI_OUT, "self_attention.linear_proj", NULL},
    {ARI_ATTENTION, "self_attention", NULL},
    {ARI_NORM2, "pre_mlp_layernorm", NULL},
    {ARI_GATE_UP, "mlp.linear_fc1", NULL},
    {ARI_DOWN, "mlp.linear_fc2", NULL},
    {ARI_FINAL_NORM, "final_layernorm", NULL},
    {ARI_FINAL_NORM, "final_layer_norm", NULL},
    {ARI_HEAD, "output_layer", NULL},
    /* Meta's Llama. */
    {ARI_TOKENS, "tok_embeddings", NULL},
    {ARI_NORM1, "attention_norm", NULL},
    {ARI_Q, "attention.wq", NULL},
    {ARI_K, "attention.wk", NULL},
    {ARI_V, "attention.wv", NULL},
    {ARI_OUT, "attention.wo", NULL},
    {ARI_ATTENTION, "attention", NULL},
    {ARI_NORM2, "ffn_norm", NULL},
    {ARI_GATE, "feed_forward.w1", NULL},
    {ARI_UP, "feed_forward.w3", NULL},
    {ARI_GATE_UP, NULL, "w13"},
    {ARI_DOWN, "feed_forward.w2", NULL},
    {ARI_MLP, "feed_forward", NULL},
};

#define COUNT(list) (sizeof(list) / sizeof *(list))

/* Table of names, those of families first, and of these the parts before the values: {0} comes before all. Every name
 * of a dump is compared with all entries, so no name is composed: a path is its last component after the preceding
 * ones, and "*" in it is any number. */
typedef struct entry {
    ari_role role;
    const char *module; /* "self_attn" for "self_attn.probs", whose path is "probs"; NULL: the path contains the
                           module */
    const char *path, *tail;
    bool in_out;
    size_t of_parts, part, of_values, value, extra; /* position of the following entries: family index, and index
                                                       within the family */
} entry;

static const char *leaf_of(const entry *e)
{
    const char *dot = strrchr(e->path, '.');
    return dot ? dot + 1 : e->path;
}

static bool next_part(entry *e, const ari_family *f)
{
    const ari_family_part *p = &f->part[e->part++];
    e->in_out = p->path && f->transposed && ari_part_kind_of(p->role)->form == ARI_FORM_LINEAR;
    e->module = e->tail = NULL;
    e->role = p->role;
    e->path = p->path;
    if (p->path && strcmp(leaf_of(e), "dense") == 0)
        e->tail = p->path; /* without a path it is any layer */
    return p->path != NULL;
}

static bool next_value(entry *e, const ari_family *f)
{
    e->in_out = false;
    if (!ari_family_value(&e->module, &e->path, &e->role, f, e->value++))
        return false;
    e->path = e->path[0] ? e->path : e->module;
    e->module = e->path != e->module && e->module[0] ? e->module : NULL;
    e->tail = e->role == ARI_MTP_HEAD     ? e->path
              : e->role == ARI_MTP_TOKENS ? "*.embed_tokens"
                                          : NULL; /* without a path, any name */
    return true;
}

static bool next_entry(entry *e)
{
    const ari_family *f;
    for (; (f = ari_family_at(e->of_parts)) != NULL; e->of_parts++, e->part = 0) {
        if (next_part(e, f))
            return true;
    }
    for (; (f = ari_family_at(e->of_values)) != NULL; e->of_values++, e->value = 0) {
        if (next_value(e, f))
            return true;
    }
    if (e->extra == COUNT(extra_entries))
        return false;
    const struct extra_entry *o = &extra_entries[e->extra++];
    e->role = o->role;
    e->module = NULL;
    e->path = o->path;
    e->tail = o->tail;
    return true;
}

size_t ari_ending(const char *path, size_t n, const char *suffix)
{
    size_t pos = n;
    for (size_t i = strlen(suffix); i-- > 0;) {
        size_t digits = 0;
        while (suffix[i] == '*' && digits < pos && isdigit((unsigned char)path[pos - digits - 1]))
            digits++;
        if (suffix[i] == '*' ? digits == 0 : pos == 0 || path[pos - 1] != suffix[i])
            return 0;
        pos -= suffix[i] == '*' ? digits : 1;
    }
    return n - pos;
}

/* Returns true if a path of n bytes ends in `suffix`; *before: the byte before the suffix, or 0 if the suffix is the
 * whole path. */
static bool ends_behind(const char *path, size_t n, const char *suffix, char *before)
{
    const size_t m = ari_ending(path, n, suffix);
    if (m == 0)
        return false;
    *before = m < n ? path[n - m - 1] : '\0';
    return true;
}

/* True if a path is `suffix`, or ends in it after a dot. */
static bool ends_in(const char *path, size_t n, const char *suffix)
{
    char before;
    return ends_behind(path, n, suffix, &before) && (before == '\0' || before == '.');
}

/* Returns true if the path ends in an entry's whole path. The first component of a dotted entry may match only as a
 * suffix, as "attn.q" matches "self_attn.q". */
static bool ends_in_entry(const char *path, size_t n, const entry *e)
{
    const char *suffix = e->tail ? e->tail : e->path;
    char before;
    bool dots = e->module != NULL;
    if (!ends_behind(path, n, suffix, &before))
        return false;
    if (dots && (before != '.' || !ends_behind(path, n - strlen(suffix) - 1, e->module, &before)))
        return false;
    dots = dots || strchr(suffix, '.') != NULL;
    return before == '\0' || before == '.' || (dots && before == '_');
}

static bool is_entry(const char *path, size_t n, const entry *e)
{
    const size_t m = ari_ending(path, n, e->path), before = e->module ? strlen(e->module) + 1 : 0;
    if (n != before + m || (m == 0 && e->path[0]))
        return false;
    return !e->module || (path[before - 1] == '.' && memcmp(path, e->module, before - 1) == 0);
}

/* --- looking up --------------------------------------------------------------------------------------------------- */

/* All entries, in order. A name can match an entry only if their last components agree, so a byte of the last
 * component's hash selects the few entries to compare. hash[0]: of the path's last component; hash[1]: of the tail's,
 * if there is a tail. */
enum { MOST_ENTRIES = 1024 };
static struct {
    entry entry[MOST_ENTRIES];
    uint8_t hash[2][MOST_ENTRIES];
    size_t n;
} vocabulary;

static uint8_t hash_of_leaf(const char *path, size_t n)
{
    size_t pos = n;
    uint32_t hash = 0;
    while (pos > 0 && path[pos - 1] != '.')
        hash = hash * 31 + (unsigned char)path[--pos];
    return (uint8_t)(hash ^ hash >> 8);
}

static void make_vocabulary(void)
{
    for (entry e = {0}; next_entry(&e) && vocabulary.n < MOST_ENTRIES;) {
        const char *path = e.path ? e.path : e.tail, *tail = e.tail ? e.tail : e.path;
        vocabulary.hash[0][vocabulary.n] = hash_of_leaf(path, strlen(path));
        vocabulary.hash[1][vocabulary.n] = hash_of_leaf(tail, strlen(tail));
        vocabulary.entry[vocabulary.n++] = e;
    }
}

/* Finds the next entry from `index` on whose last component (of the tail or the path) may equal that of a path of n
 * bytes; NULL: none. */
static const entry *find_entry(size_t *index, bool tail, const char *path, size_t n)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_vocabulary);
    const uint8_t *hash = vocabulary.hash[tail], leaf_hash = hash_of_leaf(path, n);
    const uint8_t *found = memchr(hash + *index, leaf_hash, vocabulary.n - *index);
    if (!found)
        return NULL;
    *index = (size_t)(found - hash) + 1;
    return &vocabulary.entry[*index - 1];
}

const ari_role_place *ari_role_place_of(ari_role role)
{
    return &places[role];
}

ari_role ari_role_in_layer(const char *path, size_t n)
{
    const entry *e;
    for (size_t index = 0; (e = find_entry(&index, false, path, n)) != NULL;) {
        if (e->path && ari_section_of(e->role) == ARI_IN_BLOCKS && is_entry(path, n, e))
            return e->role;
    }
    return ARI_NO_ROLE;
}

ari_role ari_role_outside(const char *path, size_t n, ari_section section)
{
    const entry *e;
    for (size_t index = 0; (e = find_entry(&index, true, path, n)) != NULL;) {
        if (e->path && ari_section_of(e->role) == section && ends_in(path, n, e->tail ? e->tail : leaf_of(e)))
            return e->role;
    }
    return ARI_NO_ROLE;
}

/* Finds the longest end of a path in the vocabulary before its last component alone: "attn.c_proj" before "c_proj",
 * which then is the MLP's. */
ari_module_name ari_module_of(const char *name, size_t n)
{
    ari_module_name last_match = {0};
    const size_t weight = ari_ending(name, n, ".weight");
    n -= weight ? weight : ari_ending(name, n, ".bias");
    const entry *e;
    for (size_t index = 0; (e = find_entry(&index, true, name, n)) != NULL;) {
        if (ends_in_entry(name, n, e))
            return (ari_module_name){e->role, e->in_out};
        if (!e->tail && !ari_is_of_experts(e->role) && ends_in(name, n, leaf_of(e)))
            last_match = (ari_module_name){e->role, e->in_out};
    }
    return last_match;
}
