/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/grads/grads.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "anyrank/safetensors.h"
#include "ref/core/text.h"
#include "ref/io/safetensors_private.h"
#include "ref/layers/batch_private.h"
#include "ref/models/family.h"

static ar_status expect_shape(const char *path, const ar_st_entry *e, size_t b, size_t s)
{
    if (e->ndim != 2 || e->shape[0] != b || e->shape[1] != s)
        return ar_error_set(AR_ERR_SHAPE, "%s: %s must be [%zu, %zu], as input_ids is", path, e->name, b, s);
    return AR_OK;
}

/* The integers of a tensor. */
static ar_status load_integers(int64_t *out, const ar_st_entry *e, const char *path)
{
    const ar_status st = ari_st_to_i64(e, out);
    return st == AR_OK ? st : ar_error_set(st, "%s: %s", path, ar_error_message());
}

static ar_status load_ids(ari_input_batch *b, const ar_config *c, const ar_st_file *f, const char *path)
{
    const ar_st_entry *e = ari_st_find(f, "input_ids");
    if (!e)
        return ar_error_set(AR_ERR_NOT_FOUND, "%s: there is no tensor input_ids", path);
    if (e->ndim != 2 || e->count == 0)
        return ar_error_set(AR_ERR_SHAPE, "%s: input_ids is %s, expected [batch, seq], both at least 1", path,
                            ARI_SHOW_SHAPE(e->ndim, e->shape));
    b->batch.batch = e->shape[0];
    b->batch.seq = e->shape[1];
    int64_t *ids = NULL;
    AR_TRY(ARI_TAKE(&ids, &b->arena, e->count, "input_ids"));
    AR_TRY(load_integers(ids, e, path));
    for (size_t i = 0; i < e->count; i++) {
        if (ids[i] < 0 || (size_t)ids[i] >= c->vocab)
            return ar_error_set(AR_ERR_DATA, "%s: input_ids[%zu, %zu] is %lld, the vocabulary has %zu ids", path,
                                i / e->shape[1], i % e->shape[1], (long long)ids[i], c->vocab);
    }
    b->batch.input_ids = ids;
    return AR_OK;
}

static ar_status load_labels(ari_input_batch *b, const ar_config *c, const ar_st_file *f, const char *path)
{
    const ar_st_entry *e = ari_st_find(f, "labels");
    if (!e)
        return AR_OK;
    if (!ari_part_path(ari_family_of(c->arch), ARI_HEAD))
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "%s: holds labels, and the model has no logits: its loss is the sum of its output", path);
    AR_TRY(expect_shape(path, e, b->batch.batch, b->batch.seq));
    int64_t *labels = NULL;
    AR_TRY(ARI_TAKE(&labels, &b->arena, e->count, "labels"));
    AR_TRY(load_integers(labels, e, path));
    for (size_t i = 0; i < e->count; i++) {
        if (labels[i] != AR_IGNORE_INDEX && (labels[i] < 0 || (size_t)labels[i] >= c->vocab))
            return ar_error_set(AR_ERR_DATA, "%s: labels[%zu, %zu] is %lld, neither an id below %zu nor %d", path,
                                i / e->shape[1], i % e->shape[1], (long long)labels[i], c->vocab, AR_IGNORE_INDEX);
    }
    b->batch.labels = labels;
    return AR_OK;
}

static bool has_positions(const ar_config *c)
{
    return c->rope.kind || c->learned_positions;
}

/* Loads the positions. A single row applies to all samples. */
static ar_status load_positions(ari_input_batch *b, const ar_config *c, const ar_st_file *f, const char *path)
{
    const ar_st_entry *e = ari_st_find(f, "position_ids");
    const size_t s = b->batch.seq, n = b->batch.batch * s;
    if (!e)
        return AR_OK;
    if (!has_positions(c))
        return ar_error_set(AR_ERR_UNSUPPORTED, "%s: holds position_ids, and the model has no positions", path);
    if (e->ndim != 2 || (e->shape[0] != b->batch.batch && e->shape[0] != 1) || e->shape[1] != s)
        return ar_error_set(AR_ERR_SHAPE, "%s: position_ids must be [%zu or 1, %zu], as input_ids is", path,
                            b->batch.batch, s);
    int64_t *positions = NULL;
    AR_TRY(ARI_TAKE(&positions, &b->arena, n, "position_ids"));
    AR_TRY(ari_st_to_i64(e, positions));
    for (size_t i = e->count; i < n; i++)
        positions[i] = positions[i - s];
    for (size_t i = 0; i < n; i++) {
        if (positions[i] < 0 || (size_t)positions[i] >= c->max_positions)
            return ar_error_set(AR_ERR_DATA, "%s: position_ids[%zu, %zu] is %lld, the model has %zu positions", path,
                                i / s, i % s, (long long)positions[i], c->max_positions);
    }
    b->batch.position_ids = positions;
    return AR_OK;
}

/* Names of lists with document boundaries, for queries and keys: those of flash-attn's varlen functions and of
 * transformers' keyword arguments. */
#define BOUNDS_LIST "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k"
static const char *const bounds_names[] = {BOUNDS_LIST};
#define BOUNDS_NAMES (sizeof bounds_names / sizeof *bounds_names)

/* Marks the first token of each document in a list of boundaries for `length` tokens. Empty documents are ignored. */
static ar_status mark_documents(bool *is_start, const int64_t *bounds, size_t n, size_t length, const char *location)
{
    if (n < 2 || bounds[0] != 0 || bounds[n - 1] < 0 || (size_t)bounds[n - 1] != length)
        return ar_error_set(AR_ERR_DATA, "%s goes from %lld to %lld, expected from 0 to the %zu tokens", location,
                            n > 0 ? (long long)bounds[0] : 0, n > 0 ? (long long)bounds[n - 1] : 0, length);
    for (size_t i = 0; i + 1 < n; i++) {
        if (bounds[i + 1] < bounds[i])
            return ar_error_set(AR_ERR_DATA, "%s falls from %lld to %lld at place %zu, expected bounds in their order",
                                location, (long long)bounds[i], (long long)bounds[i + 1], i + 1);
        if (bounds[i + 1] > bounds[i])
            is_start[bounds[i]] = true;
    }
    return AR_OK;
}

/* Numbers the documents of each row. */
static ar_status number_documents(ari_input_batch *b, const bool *is_start, const char *path, const char *name)
{
    const size_t s = b->batch.seq, n = b->batch.batch * s;
    int32_t *documents = NULL;
    AR_TRY(ARI_TAKE(&documents, &b->arena, n, name));
    for (size_t i = 0; i < n; i++) {
        if (i % s == 0 && !is_start[i])
            return ar_error_set(AR_ERR_DATA,
                                "%s: in %s a document goes on from row %zu to the next: every row's end, %zu, must be "
                                "the end of one",
                                ARI_SHOW(path), name, i / s - 1, i);
        documents[i] = i % s == 0 ? 0 : documents[i - 1] + is_start[i];
    }
    b->batch.documents = documents;
    return AR_OK;
}

/* Loads document boundaries: [n + 1] for all tokens, row after row, or [b, n + 1] for each row. */
static ar_status load_documents(ari_input_batch *b, const ar_st_entry *e, const char *path)
{
    const size_t s = b->batch.seq, tokens = b->batch.batch * s;
    const size_t lists = e->ndim == 2 ? b->batch.batch : 1, n = e->count / lists;
    int64_t *bounds = NULL;
    bool *is_start = NULL;
    if (e->ndim < 1 || e->ndim > 2 || (e->ndim == 2 && e->shape[0] != b->batch.batch))
        return ar_error_set(AR_ERR_SHAPE,
                            "%s: %s must be [documents + 1] of all tokens, or [%zu, documents + 1] of "
                            "each row",
                            ARI_SHOW(path), e->name, b->batch.batch);
    AR_TRY(ARI_TAKE(&bounds, &b->arena, e->count, e->name));
    AR_TRY(ARI_TAKE(&is_start, &b->arena, tokens, e->name));
    AR_TRY(ari_st_to_i64(e, bounds));
    for (size_t i = 0; i < lists; i++) {
        char location[400];
        snprintf(location, sizeof location, lists > 1 ? "%s: %s[%zu]" : "%s: %s", ARI_SHOW(path), e->name, i);
        AR_TRY(mark_documents(is_start + i * s, bounds + i * n, n, tokens / lists, location));
    }
    return number_documents(b, is_start, path, e->name);
}

/* Loads the boundaries under whichever names they have; queries and keys must have equal boundaries. */
static ar_status load_bounds(ari_input_batch *b, const ar_st_file *f, const char *path)
{
    const ar_st_entry *first_entry = NULL;
    for (size_t i = 0; i < BOUNDS_NAMES; i++) {
        const ar_st_entry *e = ari_st_find(f, bounds_names[i]);
        if (e && first_entry &&
            (e->dtype != first_entry->dtype || e->ndim != first_entry->ndim || e->bytes != first_entry->bytes ||
             memcmp(e->data, first_entry->data, e->bytes) != 0))
            return ar_error_set(AR_ERR_UNSUPPORTED,
                                "%s: %s and %s differ, and queries and keys are those of the same "
                                "documents here",
                                ARI_SHOW(path), first_entry->name, e->name);
        first_entry = first_entry ? first_entry : e;
    }
    return first_entry ? load_documents(b, first_entry, path) : AR_OK;
}

/* Refuses unknown tensors. If they were ignored, the gradients would belong to another batch. */
static ar_status refuse_unknown(const ar_st_file *f, const char *path)
{
    static const char *const known_names[] = {"input_ids", "labels", "attention_mask", "position_ids", BOUNDS_LIST};
    for (size_t i = 0; i < ari_st_tensor_count(f); i++) {
        const char *name = ari_st_at(f, i)->name;
        if (!ARI_IS_AMONG(name, known_names))
            return ar_error_set(AR_ERR_UNSUPPORTED,
                                "%s: holds a tensor '%s', which no model here takes; known are input_ids, labels, "
                                "attention_mask, position_ids and cu_seqlens",
                                ARI_SHOW(path), ARI_SHOW(name));
    }
    return AR_OK;
}

static void note_labels(ari_input_batch *b)
{
    if (ari_batch_targets(&b->batch) == 0)
        snprintf(b->note[0], sizeof b->note[0],
                 "no token has a target: the loss is NaN, the mean of nothing, as in PyTorch; all gradients are zero");
}

/* Notes left padding: positions count columns, as in the forward pass of transformers, whose generate() counts them
 * from the mask. */
static void note_left_padding(ari_input_batch *b, const ar_config *c)
{
    const ar_batch *x = &b->batch;
    size_t rows = 0;
    for (size_t i = 0; x->padding_mask && i < x->batch; i++) {
        size_t padding_count = 0;
        while (padding_count < x->seq && !x->padding_mask[i * x->seq + padding_count])
            padding_count++;
        rows += padding_count > 0 && padding_count < x->seq;
    }
    if (rows > 0 && !x->position_ids && has_positions(c))
        snprintf(b->note[1], sizeof b->note[1],
                 "%zu of %zu rows are padded on the left: positions count from the first column, as in a forward pass "
                 "of transformers without position_ids; give position_ids to count from the first token",
                 rows, x->batch);
}

/* Returns the window of the first layer that has one; 0: no layer has a window. */
static size_t window_of(const ar_config *c)
{
    size_t window = 0;
    for (size_t i = 0; i < c->layers && window == 0; i++)
        window = ar_config_window(c, i);
    return window;
}

/* Notes targets predicted at positions that see no key, as with left padding: transformers gives such a position
 * uniform attention. If heads have sinks, both programs give it no attention. All models with targets are causal. */
static void note_blind(ari_input_batch *b, const ar_config *c)
{
    const ar_batch *x = &b->batch;
    const size_t window = window_of(c);
    size_t count = 0, since = 0; /* since: number of positions from the last visible key to this one, both included */
    const bool asks = x->padding_mask && !c->sinks && ari_part_path(ari_family_of(c->arch), ARI_HEAD);
    for (size_t i = 0; asks && i < x->batch * x->seq; i++) {
        const bool is_start = i % x->seq == 0 || (x->documents && x->documents[i] != x->documents[i - 1]);
        since = x->padding_mask[i] ? 1 : !is_start && since > 0 ? since + 1 : 0;
        const bool blind = since == 0 || (window > 0 && since > window);
        count += blind && ari_batch_target(x, i / x->seq, i % x->seq) != AR_IGNORE_INDEX;
    }
    if (count > 0)
        snprintf(
            b->note[3], sizeof b->note[3],
            "%zu target%s predicted where no key is seen: attention is nothing there, and in transformers the mean of "
            "all values, so that loss and gradients differ; label such targets -100",
            count, count == 1 ? " is" : "s are");
}

/* Notes a document whose first position is not 0: position_ids and cu_seqlens may belong to different batches. */
static void note_positions(ari_input_batch *b)
{
    const ar_batch *x = &b->batch;
    size_t documents = 0, odd = 0;
    for (size_t i = 0; i < x->batch * x->seq; i++) {
        const bool is_start = i % x->seq == 0 || x->documents[i] != x->documents[i - 1];
        documents += is_start;
        odd += is_start && x->position_ids[i] != 0;
    }
    if (odd > 0)
        snprintf(b->note[2], sizeof b->note[2],
                 "%zu of %zu documents begin at another position than 0: position_ids are taken as they are; without "
                 "them positions restart in each document",
                 odd, documents);
}

/* Counts the positions in a row that do not follow the preceding position by 1. They begin documents, as each row
 * does. */
static size_t find_jumps(bool *is_start, const ar_batch *x)
{
    size_t count = 0;
    for (size_t i = 0; i < x->batch * x->seq; i++) {
        const bool jumps = i % x->seq > 0 && x->position_ids[i] != x->position_ids[i - 1] + 1;
        is_start[i] = jumps || i % x->seq == 0;
        count += jumps;
    }
    return count;
}

static void note_jumps(ari_input_batch *b, const ar_config *c, size_t jumps)
{
    ar_batch inside = b->batch;
    inside.targets_cross = false;
    const size_t crossing = ari_batch_targets(&b->batch) - ari_batch_targets(&inside);
    const char *attention_text =
        c->arch == AR_ARCH_GPT_OSS
            ? "crosses these places, as transformers' GPT-OSS makes its masks without them; with "
              "cu_seqlens it keeps documents apart"
        : b->batch.padding_mask ? "crosses these places, as in transformers with attention_mask or "
                                  "use_cache; without both, or with cu_seqlens, it keeps documents apart"
                                : "stays inside the documents that begin there, as in transformers without "
                                  "attention_mask and use_cache";
    const int length =
        snprintf(b->note[2], sizeof b->note[2], "position_ids restart or jump %zu time%s within a row: attention %s",
                 jumps, ARI_PLURAL(jumps), attention_text);
    if (crossing > 0)
        snprintf(b->note[2] + length, sizeof b->note[2] - (size_t)length,
                 "; %zu of them %s predicted by the one before: label their first tokens -100 if it should not",
                 crossing, crossing == 1 ? "is" : "are");
}

/* Separates documents that only position_ids show, as transformers 5.23 does (find_packed_sequence_indices): unless a
 * mask is given or the model does not pass the positions on. The labels decide which tokens are targets. */
static ar_status apart_by_positions(ari_input_batch *b, const ar_config *c, const char *path)
{
    ar_batch *x = &b->batch;
    bool *is_start = NULL;
    AR_TRY(ARI_TAKE(&is_start, &b->arena, x->batch * x->seq, "position_ids"));
    const size_t jumps = find_jumps(is_start, x);
    if (jumps > 0 && !x->padding_mask && c->arch != AR_ARCH_GPT_OSS) {
        AR_TRY(number_documents(b, is_start, path, "position_ids"));
        x->targets_cross = true;
    }
    if (jumps > 0)
        note_jumps(b, c, jumps);
    return AR_OK;
}

static ar_status load_padding(ari_input_batch *b, const ar_st_entry *e, const char *path)
{
    AR_TRY(expect_shape(path, e, b->batch.batch, b->batch.seq));
    int64_t *wide = NULL;
    float *reals = NULL;
    uint8_t *padding = NULL;
    AR_TRY(ARI_TAKE(&padding, &b->arena, e->count, "attention_mask"));
    AR_TRY(ARI_TAKE(&wide, &b->arena, e->count, "attention_mask"));
    if (e->dtype == AR_F32 || e->dtype == AR_F64 || e->dtype == AR_F16 || e->dtype == AR_BF16) {
        AR_TRY(ARI_TAKE(&reals, &b->arena, e->count, "attention_mask"));
        AR_TRY(ari_st_to_f32(e, reals));
        for (size_t i = 0; i < e->count; i++)
            wide[i] = reals[i] == 0.0f ? 0 : reals[i] == 1.0f ? 1 : -1;
    } else {
        AR_TRY(ari_st_to_i64(e, wide));
    }
    for (size_t i = 0; i < e->count; i++) {
        if (wide[i] != 0 && wide[i] != 1)
            return ar_error_set(AR_ERR_DATA, "%s: attention_mask[%zu, %zu] is neither 0 nor 1", path, i / e->shape[1],
                                i % e->shape[1]);
        padding[i] = (uint8_t)wide[i];
    }
    b->batch.padding_mask = padding;
    return AR_OK;
}

/* Additive masks: transformers uses the mask instead of causality and windows, while here the mask is added to them, so
 * it must hide everything that they hide. A score plus a value below HIDES contributes nothing. */
#define HIDES (-1e4f)
static ar_status check_hidden(const float *added, const ar_config *c, const ar_st_entry *e, const char *path)
{
    const size_t s = e->shape[3], window = window_of(c);
    for (size_t i = 0; i < e->count; i++) {
        const size_t key = i % s, query = i / s % s, plane = i / s / s;
        const bool later = c->causal && key > query, before = window > 0 && key + window <= query;
        if ((later || before) && added[i] > HIDES)
            return ar_error_set(
                AR_ERR_UNSUPPORTED,
                "%s: attention_mask[%zu, %zu, %zu, %zu] is %g, but key %zu is %s query %zu, and the model's "
                "own mask hides it; transformers would take this one instead: expected -inf",
                path, plane / e->shape[1], plane % e->shape[1], query, key, (double)added[i], key,
                later ? "later than" : "beyond the window of", query);
    }
    return AR_OK;
}

static ar_status load_additive(ari_input_batch *b, const ar_config *c, const ar_st_entry *e, const char *path)
{
    const size_t s = b->batch.seq;
    if ((e->shape[0] != b->batch.batch && e->shape[0] != 1) || (e->shape[1] != c->heads && e->shape[1] != 1) ||
        e->shape[2] != s || e->shape[3] != s)
        return ar_error_set(AR_ERR_SHAPE, "%s: attention_mask must be [%zu or 1, %zu or 1, %zu, %zu]", path,
                            b->batch.batch, c->heads, s, s);
    float *added = NULL;
    AR_TRY(ARI_TAKE(&added, &b->arena, e->count, "attention_mask"));
    AR_TRY(ari_st_to_f32(e, added));
    for (size_t i = 0; i < e->count; i++) {
        if (isnan(added[i]) || added[i] == INFINITY)
            return ar_error_set(AR_ERR_DATA,
                                "%s: attention_mask holds %s at element %zu; it is added to scores, -inf masks", path,
                                isnan(added[i]) ? "NaN" : "+inf", i);
    }
    AR_TRY(check_hidden(added, c, e, path));
    b->batch.additive_mask = added;
    b->batch.mask_batch = e->shape[0];
    b->batch.mask_heads = e->shape[1];
    return AR_OK;
}

static ar_status load(ari_input_batch *b, const ar_config *c, const ar_st_file *f, const char *path)
{
    AR_TRY(load_ids(b, c, f, path));
    AR_TRY(refuse_unknown(f, path));
    AR_TRY(load_labels(b, c, f, path));
    AR_TRY(load_positions(b, c, f, path));
    AR_TRY(load_bounds(b, f, path));
    const ar_st_entry *mask = ari_st_find(f, "attention_mask");
    if (mask && mask->ndim == 4)
        AR_TRY(load_additive(b, c, mask, path));
    else if (mask)
        AR_TRY(load_padding(b, mask, path));
    if (b->batch.position_ids && b->batch.documents)
        note_positions(b);
    else if (b->batch.position_ids && !b->batch.additive_mask)
        AR_TRY(apart_by_positions(b, c, path));
    note_labels(b);
    note_left_padding(b, c);
    note_blind(b, c);
    return AR_OK;
}

ar_status ari_input_batch_load(ari_input_batch *b, const ar_config *c, const char *path)
{
    ar_st_file *f = NULL;
    *b = (ari_input_batch){0};
    AR_TRY(ari_st_open(&f, path));
    const ar_status st = load(b, c, f, path);
    ari_st_close(f);
    if (st != AR_OK)
        ari_input_batch_fini(b);
    return st;
}

void ari_input_batch_fini(ari_input_batch *b)
{
    ari_arena_end(&b->arena, NULL);
    *b = (ari_input_batch){0};
}
