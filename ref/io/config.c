/* SPDX-License-Identifier: Apache-2.0 */
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

#include "ref/io/config_parts.h"
#include "ref/io/file.h"

/* --- between keys ------------------------------------------------------------------------------------------------- */

/* Parameters, counted a little high, so that no later sum of sizes can wrap: below 2^60 elements, 2^62 bytes. */
static bool size_is_sane(const ar_config *c)
{
    size_t q = 0, kv = 0, context = 0, low = 0, attention = 0, experts = 0, mlp = 0, block = 0, all = 0, table = 0;
    const size_t rows = c->vocab > c->max_positions ? c->vocab : c->max_positions;
    if (__builtin_mul_overflow(c->heads, c->head_dim, &q) || q > ARI_CONFIG_MAX_DIM)
        return false;
    kv = c->kv_heads * c->head_dim; /* at most q */
    if (__builtin_mul_overflow(c->heads, ar_config_value_dim(c), &context) || context > ARI_CONFIG_MAX_DIM)
        return false;
    if (c->latent.kv_rank > 0) { /* what is between hidden size and heads, and behind it, counts as wider heads */
        const size_t ranks = c->latent.kv_rank + c->latent.q_rank;
        if (__builtin_mul_overflow((q + context + c->hidden) / c->hidden + 1, ranks, &low) || low > ARI_CONFIG_MAX_DIM)
            return false;
        kv = context + low + c->latent.rope_dim;
    }
    if (__builtin_mul_overflow(2 * q + 2 * kv + 4, c->hidden, &attention) ||
        __builtin_mul_overflow(c->experts.n, 3 * c->experts.ffn + 1, &experts) ||
        __builtin_add_overflow(3 * c->ffn + 3 * c->experts.shared + 5, experts, &mlp) ||
        __builtin_mul_overflow(mlp, c->hidden, &mlp) || __builtin_add_overflow(attention, mlp, &block) ||
        __builtin_mul_overflow(block, c->layers, &all) || __builtin_mul_overflow(3 * rows, c->hidden, &table) ||
        __builtin_add_overflow(all, table, &all))
        return false;
    return all < (size_t)1 << 60;
}

/* Checks the relations between the members of a config, whichever reader filled it in. */
static ar_status check_config(const ar_config *c, const ari_json_at *at)
{
    const char *name = ARI_SHOW(at->name);
    if (c->kv_heads > c->heads || c->heads % c->kv_heads != 0)
        return ari_json_wrong(at, "num_key_value_heads", " is %zu, expected a divisor of the %zu heads", c->kv_heads,
                              c->heads);
    if (c->rope.kind && ar_rope_dim(&c->rope, c->head_dim) % 2 != 0)
        return ari_json_wrong(at, "head_dim", " is %zu, expected an even number for rotary positions", c->head_dim);
    if (!(c->norm_eps >= 0) || isinf(c->norm_eps))
        return ar_error_set(AR_ERR_CONFIG, "%s: the normalisation's eps is %g, expected a finite number from 0", name,
                            c->norm_eps);
    if (!(c->initializer_range >= 0) || isinf(c->initializer_range))
        return ari_json_wrong(at, "initializer_range", " is %g, expected a finite number from 0", c->initializer_range);
    if (!size_is_sane(c))
        return ar_error_set(AR_ERR_CONFIG,
                            "%s: absurd sizes: vocabulary %zu, hidden %zu, %zu layers, %zu heads of %zu, MLP %zu", name,
                            c->vocab, c->hidden, c->layers, c->heads, c->head_dim, c->ffn);
    return AR_OK;
}

/* --- a file ------------------------------------------------------------------------------------------------------- */

/* "GPT-2" and "gpt2". */
static bool same_letters(const char *a, const char *b)
{
    for (;; a++, b++) {
        while (*a == '-' || *a == '_' || *a == ' ')
            a++;
        while (*b == '-')
            b++;
        if (tolower((unsigned char)*a) != tolower((unsigned char)*b))
            return false;
        if (*a == '\0')
            return true;
    }
}

/* "GemmaForCausalLM" with a model_type of llama: a file whose model_type was changed, and whose weights are another
 * architecture's. */
static ar_status check_classes(const ari_json_at *at, const ari_model_reader *m)
{
    static const char *const ends[] = {"For", "LMHead", "DoubleHeads", "Model", "PreTrained"};
    const json_t *classes = json_object_get(at->object, "architectures");
    for (size_t i = 0; i < json_array_size(classes) && m->class[0]; i++) {
        const char *name = json_string_value(json_array_get(classes, i));
        size_t n = name ? strlen(name) : 0;
        for (size_t k = 0; name && k < sizeof ends / sizeof ends[0]; k++) {
            const char *end = strstr(name, ends[k]);
            n = end && (size_t)(end - name) < n ? (size_t)(end - name) : n;
        }
        if (name && (n != strlen(m->class) || strncasecmp(name, m->class, n) != 0))
            return ari_json_wrong(
                at, "architectures",
                " is '%s', and 'model_type' is '%s': one of the two is another model's, and its weights would be "
                "computed with wrongly",
                ARI_SHOW(name), m->name);
    }
    return AR_OK;
}

/* Models with experts that are not computed, and what of them is not, as transformers has it. */
static const char *lacking(const char *type)
{
    static const char apart[] = "its tensors of experts and routers are others, with other names";
    static const struct {
        const char *type, *lacks;
    } all[] = {
        {"phimoe", "sparsemixer routes: each expert of a token by a softmax of its own, of logits near the largest"},
        {"llama4", "an expert's input is multiplied by a sigmoid, and layers differ in positions and masks"},
        {"llama4_text", "an expert's input is multiplied by a sigmoid, and layers differ in positions and masks"},
        {"jamba", "layers of a state-space model stand between those of attention"},
        {"dbrx", "q, k and v are clamped, and a token's weights have a norm of another kind"},
        {"granitemoe", apart},
        {"granitemoeshared", apart},
        {"qwen3_next", "layers of linear attention stand between those of attention"},
        {"lfm2_moe", "layers of convolution stand between those of attention"},
        {"ernie4_5_moe", apart},
        {"exaone_moe", apart},
        {"flex_olmo", "layers with experts have their norms behind them"},
        {"switch_transformers", "it has an encoder and experts of limited capacity"},
        {"nllb-moe", "it has an encoder and experts of limited capacity"}};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        if (strcmp(type, all[i].type) == 0)
            return all[i].lacks;
    }
    return NULL;
}

/* type: NULL where there is none. */
static ar_status unknown_model(const ari_json_at *at, const char *type)
{
    /* Another spelling is suggested, never another architecture: that would invite to rename it. */
    size_t n;
    const ari_model_reader *models = ari_model_readers(&n);
    const char *near = NULL;
    char names[512];
    ari_text list = ari_plain_text_in(names, sizeof names);
    for (size_t i = 0; i < n; i++) {
        near = type && same_letters(type, models[i].name) ? models[i].name : near;
        ari_say(&list, "%s'%s'", i ? ", " : "", models[i].name);
    }
    if (type == NULL)
        return ari_json_wrong(at, "model_type", " is missing, expected one of %s", names);
    const char *lacks = lacking(type);
    if (lacks != NULL)
        return ari_json_wrong(at, "model_type", " is '%s', which is not computed: %s; expected one of %s",
                              ARI_SHOW(type), lacks, names);
    return ari_json_wrong(at, "model_type", " is '%s', expected one of %s%s%s%s", ARI_SHOW(type), names,
                          near == NULL ? "" : "; did you mean '", near == NULL ? "" : near, near == NULL ? "" : "'?");
}

static const ari_model_reader *reader_of(const json_t *object)
{
    size_t n;
    const ari_model_reader *models = ari_model_readers(&n);
    const char *type = json_string_value(json_object_get(object, "model_type"));
    for (size_t i = 0; type && i < n; i++) {
        if (strcmp(type, models[i].name) == 0)
            return &models[i];
    }
    return NULL;
}

bool ari_config_language_model(json_t **object)
{
    /* Of configuration_gemma3.py, on which Google's files rely. */
    static const struct {
        char key[24];
        int value;
    } sizes[] = {{"vocab_size", 262208}, {"num_attention_heads", 8}};
    static const char *const outer[] = {"tie_word_embeddings", "quantization_config"};
    const json_t *text = json_object_get(*object, "text_config");
    const ari_model_reader *model = reader_of(text);
    if (model == NULL || reader_of(*object) != NULL)
        return false;
    json_t *made = json_deep_copy(text);
    for (size_t i = 0; i < sizeof outer / sizeof *outer; i++) {
        if (json_object_get(*object, outer[i]) != NULL)
            json_object_set(made, outer[i], json_object_get(*object, outer[i]));
    }
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes && strcmp(model->name, "gemma3_text") == 0; i++) {
        if (json_object_get(made, sizes[i].key) == NULL)
            json_object_set_new(made, sizes[i].key, json_integer(sizes[i].value));
    }
    json_decref(*object);
    *object = made;
    return true;
}

static ar_status read_config(ar_config *c, const ari_json_at *at)
{
    const ari_model_reader *model = reader_of(at->object);
    const char *type = NULL;
    if (!ari_json_get(at, "model_type"))
        return unknown_model(at, NULL);
    AR_TRY(ari_json_string(at, "model_type", &type));
    if (model == NULL)
        return unknown_model(at, type);
    c->initializer_range = 0.02; /* every Hugging Face default so far */
    c->causal = true;
    AR_TRY(ari_config_refuse(at, model));
    AR_TRY(check_classes(at, model));
    AR_TRY(model->form ? ari_config_llama_form(c, at, model->form) : model->read(c, at));
    AR_TRY(ari_json_real_or(at, "initializer_range", &c->initializer_range));
    AR_TRY(ari_config_dropout(c, at));
    AR_TRY(ari_config_quantized(c, at));
    return check_config(c, at);
}

ar_status ar_config_parse(ar_config *c, const char *json, size_t length, const char *name)
{
    if (c == NULL || json == NULL)
        return ar_error_set(AR_ERR_ARG, "config_parse: no %s", c == NULL ? "place for the config" : "text");
    const ari_json_at at0 = {NULL, name == NULL ? "config" : name, AR_ERR_CONFIG};
    json_t *root = NULL;
    AR_TRY(ari_json_parse(&root, json, length, at0.name));
    ar_config read = {.within = ari_config_language_model(&root)};
    const ari_json_at at = {root, at0.name, AR_ERR_CONFIG};
    ar_status st = AR_OK;
    if (!json_is_object(root))
        st = ar_error_set(AR_ERR_CONFIG, "%s: expected a JSON object", ARI_SHOW(at.name));
    else
        st = read_config(&read, &at);
    json_decref(root);
    if (st != AR_OK)
        return st;
    snprintf(read.name, sizeof read.name, "%s", ari_printable((char[sizeof read.name]){0}, sizeof read.name, at.name));
    *c = read; /* last: all or nothing */
    return AR_OK;
}

/* The name a report calls the model by: the folder's, or a .json file's own unless it is config.json. */
static void model_name(char *out, size_t cap, const char *path)
{
    ARI_OWNED char *real = realpath(path, NULL);
    char *text = real != NULL ? real : (char[]){"model"};
    char *base = strrchr(text, '/');
    if (base != NULL && strcmp(base, "/config.json") == 0) {
        *base = '\0';
        base = strrchr(text, '/');
    }
    base = base == NULL ? text : base + 1;
    const size_t n = strlen(base);
    if (n > 5 && strcmp(base + n - 5, ".json") == 0)
        base[n - 5] = '\0';
    (void)ari_printable(out, cap, base[0] == '\0' ? "model" : base);
}

ar_status ar_config_load(ar_config *c, const char *path)
{
    if (c == NULL || path == NULL)
        return ar_error_set(AR_ERR_ARG, "config_load: no %s", c == NULL ? "place for the config" : "path");
    const bool folder = ari_is_folder(path);
    ARI_OWNED char *file = NULL;
    AR_TRY(ari_config_path(&file, path));
    ARI_OWNED unsigned char *text = NULL;
    size_t length = 0;
    ar_config read = {.layers = 0};
    struct stat there;
    if (folder && lstat(file, &there) != 0) /* then what the folder holds says more than that the file is missing */
        AR_TRY(ari_unsupported_format_check_folder(path));
    AR_TRY(ari_file_read_text(&text, &length, file, ARI_JSON_MAX_BYTES));
    AR_TRY(ar_config_parse(&read, (const char *)text, length, file));
    model_name(read.name, sizeof read.name, file);
    *c = read;
    return AR_OK;
}
