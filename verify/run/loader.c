/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/run/run.h"

#include <stdlib.h>

#include "anyrank/data.h"
#include "ref/core/atomic_file.h"
#include "ref/core/size.h"
#include "ref/numerics/philox.h"
#include "verify/run/data_private.h"

ARI_OWNER(ar_loader, ari_loader_destroy)

#define MAX_WINDOWS ((uint64_t)1 << 32) /* number of positions that a 32-bit word can select */

struct ar_loader {
    ari_arena arena;     /* memory of the lists */
    const ar_data *data; /* borrowed */
    ar_loader_options options;
    uint64_t key;
    size_t per_row, windows;
    size_t *order;      /* [windows] order of the windows in the current epoch; NULL: ascending */
    uint64_t epoch;     /* UINT64_MAX: none yet */
    size_t row;         /* tokens in a row: the length of the data's rows, or all tokens if the rows are packed */
    int64_t *ids;       /* [batch, seq] token ids */
    int32_t *documents; /* [batch, seq] document numbers; NULL: not packed */
    size_t *sample;     /* [batch] */
};

uint64_t ari_shuffle_key(uint64_t seed)
{
    return ari_stream_key(seed, "shuffle");
}

size_t ari_shuffle_draw(uint64_t key, uint32_t epoch, size_t i)
{
    const uint64_t places = (uint64_t)i + 1, limit = (UINT64_C(1) << 32) / places * places;
    uint64_t word = limit;
    for (uint32_t attempt = 0; word >= limit; attempt++)
        word = ari_random_u32(key, i, epoch, attempt);
    return (size_t)(word % places);
}

void ari_shuffle(size_t *order, size_t n, uint64_t key, uint32_t epoch)
{
    for (size_t i = 0; i < n; i++)
        order[i] = i;
    for (size_t i = n; i-- > 1;) {
        const size_t j = ari_shuffle_draw(key, epoch, i), at_j = order[j];
        order[j] = order[i];
        order[i] = at_j;
    }
}

/* Returns the number of rows; packed data form a single row. */
static size_t rows_of(const ar_data *d, const ar_packing *p)
{
    return p->enabled ? 1 : ari_data_rows(d);
}

static ar_status check_packing(const ar_data *d, const ar_loader_options *o)
{
    const ar_packing *p = &o->packing;
    if (!p->enabled)
        return AR_OK;
    if (p->separator == AR_NO_SEPARATOR && ari_data_documents(d) == 1)
        return ar_error_set(AR_ERR_DATA,
                            "%s: is one document, to be packed: say which token ends a document (the separator), or "
                            "give lines of JSON or a tensor with a document in each row",
                            ARI_SHOW(ari_data_path(d)));
    if (p->separator != AR_NO_SEPARATOR && o->vocab > 0 && p->separator >= o->vocab)
        return ar_error_set(AR_ERR_ARG, "token %zu is to end a document, but the vocabulary has %zu entries",
                            p->separator, o->vocab);
    return AR_OK;
}

static ar_status check_options(const ar_data *d, const ar_loader_options *o)
{
    const size_t rows = rows_of(d, &o->packing), row = ari_data_tokens(d) / rows;
    if (o->batch == 0 || o->seq == 0)
        return ar_error_set(AR_ERR_ARG, "a batch of %zu samples of %zu tokens, expected at least 1 of each", o->batch,
                            o->seq);
    if (row < o->seq)
        return ar_error_set(AR_ERR_DATA, "%s: has %zu tokens%s, expected at least the %zu of one sample",
                            ARI_SHOW(ari_data_path(d)), row, rows > 1 ? " in each row" : "", o->seq);
    if ((uint64_t)(row / o->seq) * rows > MAX_WINDOWS)
        return ar_error_set(AR_ERR_UNSUPPORTED, "%s: has %zu samples of %zu tokens, at most 2^32 are supported",
                            ARI_SHOW(ari_data_path(d)), row / o->seq * rows, o->seq);
    AR_TRY(check_packing(d, o));
    return o->vocab == 0 ? AR_OK : ari_data_check_vocab(d, o->vocab);
}

ar_status ari_loader_create(ar_loader **out, const ar_data *d, const ar_loader_options *o)
{
    ARI_OWNED_BY(ari_loader_destroy) ar_loader *l = NULL;
    size_t tokens = 0;
    AR_TRY(check_options(d, o));
    AR_TRY(ari_mul_size(&tokens, o->batch, o->seq));
    AR_TRY(ARI_ALLOC_ZERO(&l, 1, "a loader"));
    l->data = d;
    l->options = *o;
    l->key = ari_shuffle_key(o->seed);
    l->row = ari_data_tokens(d) / rows_of(d, &o->packing);
    l->per_row = l->row / o->seq;
    l->windows = l->per_row * rows_of(d, &o->packing);
    l->epoch = UINT64_MAX;
    AR_TRY(ARI_TAKE(&l->ids, &l->arena, tokens, "the tokens of a batch"));
    if (o->packing.enabled)
        AR_TRY(ARI_TAKE(&l->documents, &l->arena, tokens, "the documents of a batch"));
    AR_TRY(ARI_TAKE(&l->sample, &l->arena, o->batch, "the samples of a batch"));
    if (!o->in_order)
        AR_TRY(ARI_TAKE(&l->order, &l->arena, l->windows, "the order of an epoch"));
    ARI_GIVE(out, l);
    return AR_OK;
}

void ari_loader_destroy(ar_loader *l)
{
    if (l == NULL)
        return;
    ari_arena_free(&l->arena);
    free(l);
}

size_t ari_loader_windows(const ar_loader *l)
{
    return l->windows;
}

/* Finds the epoch in which a step's batch begins, and the batch's position in the epoch, both from 0. */
static ar_status find_place(const ar_loader *l, uint64_t step, uint64_t *epoch, size_t *place)
{
    size_t first_sample = 0, end = 0;
    if (step == 0)
        return ar_error_set(AR_ERR_ARG, "the batch of step 0: the first step is 1");
    AR_TRY(ari_mul_size(&first_sample, (size_t)(step - 1), l->options.batch));
    AR_TRY(ari_add_size(&end, first_sample, l->options.batch)); /* the samples of the step can be counted, too */
    if ((end - 1) / l->windows > UINT32_MAX)
        return ar_error_set(AR_ERR_OVERFLOW, "step %llu lies in epoch %zu, the last one is 2^32 - 1",
                            (unsigned long long)step, (end - 1) / l->windows);
    *epoch = first_sample / l->windows;
    *place = first_sample % l->windows;
    return AR_OK;
}

static size_t window_of(ar_loader *l, uint64_t epoch, size_t place)
{
    if (l->order == NULL)
        return place;
    if (l->epoch != epoch)
        ari_shuffle(l->order, l->windows, l->key, (uint32_t)epoch);
    l->epoch = epoch;
    return l->order[place];
}

ar_status ari_loader_samples(ar_loader *l, size_t *out, uint64_t step)
{
    uint64_t epoch = 0;
    size_t place = 0;
    AR_TRY(find_place(l, step, &epoch, &place));
    for (size_t i = 0; i < l->options.batch; i++) {
        out[i] = window_of(l, epoch, place);
        place++;
        epoch += place == l->windows;
        place = place == l->windows ? 0 : place;
    }
    return AR_OK;
}

/* Numbers the documents in the window that starts at token `start` of the data. A separator belongs to the document
 * before it. */
static void number_documents(const ar_loader *l, int32_t *documents, const int64_t *ids, size_t start)
{
    const size_t separator = l->options.packing.separator;
    documents[0] = 0;
    for (size_t i = 1; i < l->options.seq; i++)
        documents[i] =
            documents[i - 1] + (ari_data_document_begins(l->data, start + i) || (size_t)ids[i - 1] == separator);
}

ar_status ari_loader_batch(ar_loader *l, ar_batch *out, uint64_t step)
{
    const size_t seq = l->options.seq;
    AR_TRY(ari_loader_samples(l, l->sample, step));
    for (size_t i = 0; i < l->options.batch; i++) {
        const size_t start = l->sample[i] / l->per_row * l->row + l->sample[i] % l->per_row * seq;
        AR_TRY(ari_data_read(l->data, l->ids + i * seq, start, seq));
        if (l->documents != NULL)
            number_documents(l, l->documents + i * seq, l->ids + i * seq, start);
    }
    *out = (ar_batch){.batch = l->options.batch, .seq = seq, .input_ids = l->ids, .documents = l->documents};
    return AR_OK;
}
