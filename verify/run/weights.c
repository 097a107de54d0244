/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/config.h"
#include "verify/run/run.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "anyrank/safetensors.h"
#include "ref/core/size.h"
#include "ref/core/text.h"
#include "ref/io/file.h"
#include "ref/io/safetensors_private.h"
#include "ref/models/family.h"
#include "ref/models/placement.h"

typedef struct weight {
    char name[160];
    size_t count;
    float *values;
} weight;

struct ari_weights {
    weight *list; /* [weights] sorted by name once the list is complete */
    size_t count, capacity;
};

void ari_weights_destroy(ari_weights *w)
{
    if (!w)
        return;
    for (size_t i = 0; i < w->count; i++)
        free(w->list[i].values);
    free(w->list);
    free(w);
}

const float *ari_weights_find(void *user, const char *name, size_t count)
{
    const ari_weights *w = user;
    weight key;
    snprintf(key.name, sizeof key.name, "%s", name);
    const weight *found = bsearch(&key, w->list, w->count, sizeof *w->list, ari_by_text);
    return found && found->count == count && strcmp(found->name, name) == 0 ? found->values : NULL;
}

typedef struct loading {
    ari_weights *w;
    const ar_config *config;
    ar_st_model *file;
    const char *folder;
    const char *prefix;       /* the prefix that the file's names lack: "transformer." for GPT-2 files of the Hugging
                                 Face hub, otherwise "" */
    const ar_st_entry **read; /* [reads] the file's entries that contain weights, sorted by address once the list is
                                 complete */
    size_t reads, capacity;
} loading;

/* Prefix of tensor names in a file that holds more than a language model, in transformers 4 and 5. */
#define WITHIN "language_model."
#define WITHIN_MODEL "model." WITHIN

static const ar_st_entry *find_named(const loading *l, const char *name)
{
    char nested_name[200];
    const ar_st_entry *e = ari_st_model_find(l->file, name);
    if (e || !l->config->within)
        return e;
    snprintf(nested_name, sizeof nested_name, WITHIN "%s", name);
    e = ari_st_model_find(l->file, nested_name);
    if (e || strncmp(name, "model.", 6) != 0)
        return e;
    snprintf(nested_name, sizeof nested_name, WITHIN_MODEL "%s", name + 6);
    return ari_st_model_find(l->file, nested_name);
}

/* Returns the name under which find_named looks up a tensor; NULL if the tensor does not belong to the language
 * model. */
static const char *own_name(char *out, size_t cap, const loading *l, const char *name)
{
    if (!l->config->within || strncmp(name, "lm_head.", 8) == 0)
        return name;
    if (strncmp(name, WITHIN, strlen(WITHIN)) == 0)
        return name + strlen(WITHIN);
    if (strncmp(name, WITHIN_MODEL, strlen(WITHIN_MODEL)) != 0)
        return NULL;
    snprintf(out, cap, "model.%s", name + strlen(WITHIN_MODEL));
    return out;
}

static const ar_st_entry *find_entry(const loading *l, const char *name)
{
    const size_t skip = strlen(l->prefix);
    const ari_family *f = ari_family_of(l->config->arch);
    const size_t head = f->older_head ? strlen(ari_part_path(f, ARI_HEAD)) : 0;
    const ar_st_entry *e = find_named(l, strncmp(name, l->prefix, skip) == 0 ? name + skip : name);
    char older[64];
    if (e || head == 0 || strncmp(name, ari_part_path(f, ARI_HEAD), head) != 0)
        return e;
    snprintf(older, sizeof older, "%s%s", f->older_head, name + head);
    return find_named(l, older);
}

static ar_status check_shape(const loading *l, const ar_st_entry *e, int ndim, const size_t *shape)
{
    if (ari_same_extents(e->ndim, e->shape, ndim, shape))
        return AR_OK;
    return ar_error_set(AR_ERR_SHAPE, "%s: tensor '%s' has shape %s, its config makes it %s", l->folder, e->name,
                        ARI_SHOW_SHAPE(e->ndim, e->shape), ARI_SHOW_SHAPE(ndim, shape));
}

static ar_status check_finite(const loading *l, const ar_st_entry *e, const float *v)
{
    for (size_t i = 0; i < e->count; i++) {
        if (!isfinite(v[i]))
            return ar_error_set(AR_ERR_DATA, "%s: tensor '%s' holds %s at element %zu", l->folder, e->name,
                                isnan(v[i]) ? "NaN" : "an infinity", i);
    }
    return AR_OK;
}

/* Source from which a weight is read. */
typedef struct source {
    const ar_st_entry *e;
    const ar_st_entry *scales; /* the scales of a tensor e with 4-bit values, otherwise NULL */
    ar_st_entry part;          /* the part of e that contains the weight */
    ari_stacked s;
} source;

/* MXFP4 (OCP Microscaling Formats 1.0) of GPT-OSS's files, by the names of the experts' matrices: "_blocks" [experts,
 * out, in/32, 16], two values a byte, and "_scales" [experts, out, in/32]. */
static ar_status find_blocks(const loading *l, source *src)
{
    const ari_stacked *s = &src->s;
    const size_t shape[4] = {s->shape[0], s->shape[2], s->shape[1] / 32, 16};
    const ar_st_entry *found[2];
    for (int i = 0; i < 2; i++) {
        char name[sizeof s->name + 8];
        snprintf(name, sizeof name, "%s%s", s->name, i == 0 ? "_blocks" : "_scales");
        found[i] = find_named(l, name);
        if (!found[i])
            return i == 0
                       ? AR_OK
                       : ar_error_set(AR_ERR_NOT_FOUND, "%s: tensor '%s' is missing from the weights", l->folder, name);
        AR_TRY(check_shape(l, found[i], i == 0 ? 4 : 3, shape));
        if (found[i]->dtype != AR_U8 || s->shape[1] % 32 != 0)
            return ar_error_set(AR_ERR_FORMAT,
                                "%s: tensor '%s' is %s, of rows of %zu elements: in MXFP4 it is U8, and rows are whole "
                                "blocks of 32",
                                l->folder, name, ar_dtype_name(found[i]->dtype), s->shape[1]);
    }
    src->e = found[0];
    src->scales = found[1];
    return AR_OK;
}

static ar_status find_weight(const loading *l, source *src, const char *name, int ndim, const size_t *shape)
{
    ari_stacked *s = &src->s;
    *src = (source){.e = find_entry(l, name), .s = {.ndim = ndim}};
    if (!src->e && ari_stacked_of(s, l->config, name, ndim, shape)) {
        src->e = find_named(l, s->name);
        if (!src->e && s->step[0] > 0 && ndim == 2)
            AR_TRY(find_blocks(l, src));
    }
    if (!src->e)
        return ar_error_set(AR_ERR_NOT_FOUND, "%s: tensor '%s' is missing from the weights", l->folder, name);
    src->part = *src->e;
    if (src->scales)
        return AR_OK;
    AR_TRY(check_shape(l, src->e, s->ndim, s->ndim == ndim ? shape : s->shape));
    if (s->ndim == ndim)
        return AR_OK;
    ar_st_entry *part = &src->part;
    const size_t expert = part->count / s->shape[0], width = part->bytes / part->count;
    const size_t start = s->expert * expert + (s->step[0] > 0 ? 0 : s->row * s->shape[2]);
    part->count = s->step[0] > 0 ? expert : ari_volume(shape, ndim);
    part->data = (const char *)part->data + width * start;
    part->bytes = width * part->count;
    return AR_OK;
}

/* E2M1, the lower half of a byte first, times the block's power of two, in E8M0. */
static ar_status read_blocks(float *values, const source *src, const size_t *shape)
{
    static const float magnitude[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    const uint8_t *blocks = src->e->data;
    const ari_stacked *s = &src->s;
    float scale = 0.0f;
    for (size_t i = 0; i < shape[0] * shape[1]; i++) {
        const size_t row = s->expert * s->shape[2] + i / shape[1] * s->step[0] + s->row;
        const size_t element_index = row * shape[1] + i % shape[1];
        const int bits = blocks[element_index / 2] >> (element_index % 2 * 4) & 15;
        if (i % 32 == 0)
            AR_TRY(ari_values_to_f32(AR_F8_E8M0, (const uint8_t *)src->scales->data + element_index / 32, 1, &scale));
        values[i] = (bits & 8 ? -scale : scale) * magnitude[bits & 7];
    }
    return AR_OK;
}

/* Reads the part of an entry's elements column by column. */
static ar_status read_values(float *values, const source *src, int ndim, const size_t *shape)
{
    const ari_stacked *s = &src->s;
    const size_t cols = ndim == 2 ? shape[1] : 1;
    ARI_OWNED float *expert_values = NULL;
    if (src->scales)
        return read_blocks(values, src, shape);
    if (s->ndim == ndim || s->step[0] == 0)
        return ari_st_to_f32(&src->part, values);
    AR_TRY(ARI_ALLOC(&expert_values, src->part.count, "an expert's weights"));
    const ar_status st = ari_st_to_f32(&src->part, expert_values);
    for (size_t i = 0; st == AR_OK && i < shape[0] * cols; i++)
        values[i] = expert_values[s->row + i / cols * s->step[0] + i % cols * s->step[1]];
    return st;
}

static ar_status note_read(loading *l, const ar_st_entry *e)
{
    AR_TRY(ARI_GROW(&l->read, &l->capacity, l->reads, "the list of weights"));
    l->read[l->reads++] = e;
    return AR_OK;
}

static ar_status load_one(void *user, const char *name, int ndim, const size_t *shape)
{
    loading *l = user;
    source src;
    AR_TRY(find_weight(l, &src, name, ndim, shape));
    AR_TRY(ARI_GROW(&l->w->list, &l->w->capacity, l->w->count, "the list of weights"));
    weight *w = &l->w->list[l->w->count];
    *w = (weight){.count = ari_volume(shape, ndim)};
    snprintf(w->name, sizeof w->name, "%s", name);
    AR_TRY(ari_alloc((void **)&w->values, w->count, sizeof(float), name));
    l->w->count++;
    AR_TRY(note_read(l, src.e));
    if (src.scales)
        AR_TRY(note_read(l, src.scales));
    AR_TRY(read_values(w->values, &src, ndim, shape));
    src.part.count = w->count;
    return check_finite(l, &src.part, w->values);
}

/* Buffers that old checkpoints carry and no model computes with. */
static bool is_known_extra(const char *name)
{
    static const char *const endings[] = {".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"};
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++) {
        if (ari_ends_in(name, endings[i]))
            return true;
    }
    return false;
}

/* A file may contain a weight twice only with equal bits. With different bits the file belongs to another model, and
 * one of the two tensors would be ignored. */
static ar_status check_again(const loading *l, const ar_config *c, const ar_st_entry *duplicate, ari_role role)
{
    const size_t shape[2] = {c->vocab, c->hidden};
    char original_name[160];
    snprintf(original_name, sizeof original_name, "%s.weight", ari_part_path(ari_family_of(c->arch), role));
    AR_TRY(check_shape(l, duplicate, 2, shape));
    const float *want = ari_weights_find(l->w, original_name, duplicate->count);
    if (!want)
        return ar_error_set(AR_ERR_INTERNAL, "%s: tensor '%s' was not loaded", l->folder, original_name);
    ARI_OWNED float *got = NULL;
    AR_TRY(ARI_ALLOC(&got, duplicate->count, duplicate->name));
    ar_status st = ari_st_to_f32(duplicate, got);
    for (size_t i = 0; st == AR_OK && i < duplicate->count; i++) {
        if (memcmp(&got[i], &want[i], sizeof *got) != 0)
            st = ar_error_set(AR_ERR_DATA,
                              "%s: tensors '%s' and '%s' differ at element %zu (%.9g and %.9g), but the config ties "
                              "them, expected the same bits",
                              l->folder, duplicate->name, find_entry(l, original_name)->name, i, (double)got[i],
                              (double)want[i]);
    }
    return st;
}

/* Returns the role of the weight that a second name repeats: a tied head, or the embedding table and head of a block
 * that predicts a further token. */
static ari_role first_of(const ar_config *c, const char *name)
{
    const char *head = ari_part_path(ari_family_of(c->arch), ARI_HEAD);
    const ari_role of_head = c->tied ? ARI_TOKENS : ARI_HEAD;
    const size_t n = head ? strlen(head) : 0;
    char role_path[160], layer[24];
    if (c->tied && head && strncmp(name, head, n) == 0 && strcmp(name + n, ".weight") == 0)
        return ARI_TOKENS;
    for (size_t i = 0; i < 2 * c->mtp; i++) {
        snprintf(layer, sizeof layer, "%zu", c->layers + i / 2);
        ari_role_path(role_path, sizeof role_path, c->arch, layer, i % 2 == 0 ? ARI_MTP_TOKENS : ARI_MTP_HEAD);
        if (strncmp(name, role_path, strlen(role_path)) == 0 && strcmp(name + strlen(role_path), ".weight") == 0)
            return i % 2 == 0 ? ARI_TOKENS : of_head;
    }
    return ARI_NO_ROLE;
}

/* True for a tensor of a block for a further token that is not trained. */
static bool is_unused(const ar_config *c, const char *name)
{
    ar_config full_config = *c;
    full_config.mtp = c->mtp_unused;
    const size_t layer = ari_layer_of_name(&full_config, name);
    return layer != SIZE_MAX && layer >= c->layers && c->mtp == 0;
}

static int compare_entries(const void *a, const void *b)
{
    const ar_st_entry *x = *(const ar_st_entry *const *)a, *y = *(const ar_st_entry *const *)b;
    return (x > y) - (x < y);
}

static ar_status check_extras(const loading *l, const ar_config *c)
{
    for (size_t i = 0; i < ari_st_model_count(l->file); i++) {
        const ar_st_entry *e = ari_st_model_at(l->file, i);
        char name_buffer[200];
        const char *name = own_name(name_buffer, sizeof name_buffer, l, e->name);
        if (!name)
            continue;
        const ari_role original_role = first_of(c, name);
        const bool is_known = is_known_extra(name) || is_unused(c, name) || original_role != ARI_NO_ROLE;
        if (original_role != ARI_NO_ROLE)
            AR_TRY(check_again(l, c, e, original_role));
        if (!is_known && !bsearch(&e, l->read, l->reads, sizeof *l->read, compare_entries))
            return ar_error_set(AR_ERR_FORMAT,
                                "%s: tensor '%s' is in the weights, but the model of config.json has none of that name",
                                l->folder, e->name);
    }
    return AR_OK;
}

/* Returns true if the file omits its family's optional prefix, as the embedding's name shows. */
static bool lacks_prefix(const ar_st_model *file, const ari_family *f)
{
    char token[160];
    if (!f->prefix)
        return false;
    snprintf(token, sizeof token, "%s.weight", ari_part_path(f, ARI_TOKENS) + strlen(f->prefix));
    return ari_st_model_find(file, token) != NULL;
}

/* Opens the weights; *out is NULL if the folder has none. */
static ar_status open_weights(ar_st_model **out, const char *folder)
{
    struct stat info;
    *out = NULL;
    if (stat(folder, &info) == 0 && S_ISREG(info.st_mode))
        return AR_OK; /* a config file alone */
    AR_TRY(ari_st_model_open(out, folder));
    return *out ? AR_OK : ari_unsupported_format_check_folder(folder);
}

ar_status ari_weights_exist(bool *exists, const char *folder)
{
    ar_st_model *file;
    AR_TRY(open_weights(&file, folder));
    *exists = file != NULL;
    ari_st_model_close(file);
    return AR_OK;
}

static void loading_fini(loading *l)
{
    ari_weights_destroy(l->w);
    free(l->read);
    ari_st_model_close(l->file);
}

ar_status ari_weights_load(ari_weights **out, const ar_config *c, const char *folder)
{
    ARI_ENDED(loading_fini) loading l = {.config = c, .folder = folder, .prefix = ""};
    *out = NULL;
    AR_TRY(open_weights(&l.file, folder));
    if (!l.file)
        return AR_OK;
    if (c->quantized[0] != '\0' && (strcmp(c->quantized, "mxfp4") != 0 || c->arch != AR_ARCH_GPT_OSS))
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "%s: key 'quantization_config' of config.json says that the weights are stored in few bits "
                            "(%s), which are read of GPT-OSS in mxfp4 alone; save them in bf16 first",
                            folder, c->quantized);
    if (lacks_prefix(l.file, ari_family_of(c->arch)))
        l.prefix = ari_family_of(c->arch)->prefix;
    AR_TRY(ARI_ALLOC_ZERO(&l.w, 1, "weights"));
    AR_TRY(ari_param_list(c, load_one, &l));
    qsort(l.w->list, l.w->count, sizeof *l.w->list, ari_by_text);
    qsort(l.read, l.reads, sizeof *l.read, compare_entries);
    AR_TRY(check_extras(&l, c));
    ARI_GIVE(out, l.w);
    return AR_OK;
}
