/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/input_batch.h"

#include <math.h>
#include <stdlib.h>

#include "anyrank/safetensors.h"
#include "ref/core/size.h"

static ar_status expect_shape(const char *path, const ar_st_entry *e, size_t b, size_t s)
{
    if (e->ndim != 2 || e->shape[0] != b || e->shape[1] != s)
        return ar_error_set(AR_ERR_SHAPE, "%s: %s must be [%zu, %zu], as input_ids is", path, e->name, b, s);
    return AR_OK;
}

static ar_status load_ids(ari_input_batch *b, const ar_config *c, const ar_st_file *f, const char *path)
{
    const ar_st_entry *e = ar_st_find(f, "input_ids");
    if (!e)
        return ar_error_set(AR_ERR_NOT_FOUND, "%s: there is no tensor input_ids", path);
    if (e->ndim != 2 || e->count == 0)
        return ar_error_set(AR_ERR_SHAPE, "%s: input_ids must be [batch, seq], both at least 1", path);
    b->batch.batch = e->shape[0];
    b->batch.seq = e->shape[1];
    AR_TRY(ari_alloc((void **)&b->ids, e->count, sizeof *b->ids, "input_ids"));
    AR_TRY(ar_st_to_i64(e, b->ids));
    for (size_t i = 0; i < e->count; i++) {
        if (b->ids[i] < 0 || (size_t)b->ids[i] >= c->vocab)
            return ar_error_set(AR_ERR_DATA, "%s: input_ids[%zu, %zu] is %lld, the vocabulary has %zu ids", path,
                                i / e->shape[1], i % e->shape[1], (long long)b->ids[i], c->vocab);
    }
    b->batch.input_ids = b->ids;
    return AR_OK;
}

static ar_status load_labels(ari_input_batch *b, const ar_config *c, const ar_st_file *f, const char *path)
{
    const ar_st_entry *e = ar_st_find(f, "labels");
    if (!e)
        return AR_OK;
    AR_TRY(expect_shape(path, e, b->batch.batch, b->batch.seq));
    AR_TRY(ari_alloc((void **)&b->labels, e->count, sizeof *b->labels, "labels"));
    AR_TRY(ar_st_to_i64(e, b->labels));
    for (size_t i = 0; i < e->count; i++) {
        if (b->labels[i] != AR_IGNORE_INDEX && (b->labels[i] < 0 || (size_t)b->labels[i] >= c->vocab))
            return ar_error_set(AR_ERR_DATA, "%s: labels[%zu, %zu] is %lld, neither an id below %zu nor %d", path,
                                i / e->shape[1], i % e->shape[1], (long long)b->labels[i], c->vocab, AR_IGNORE_INDEX);
    }
    b->batch.labels = b->labels;
    return AR_OK;
}

static ar_status load_padding(ari_input_batch *b, const ar_st_entry *e, const char *path)
{
    AR_TRY(expect_shape(path, e, b->batch.batch, b->batch.seq));
    int64_t *wide = NULL;
    float *reals = NULL;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ari_alloc((void **)&b->padding, e->count, 1, "attention_mask"));
    AR_TRY_TO(done, st, ari_alloc((void **)&wide, e->count, sizeof *wide, "attention_mask"));
    if (e->dtype == AR_F32 || e->dtype == AR_F64 || e->dtype == AR_F16 || e->dtype == AR_BF16) {
        AR_TRY_TO(done, st, ari_alloc((void **)&reals, e->count, sizeof *reals, "attention_mask"));
        AR_TRY_TO(done, st, ar_st_to_f32(e, reals));
        for (size_t i = 0; i < e->count; i++)
            wide[i] = reals[i] == 0.0f ? 0 : reals[i] == 1.0f ? 1 : -1;
    } else {
        AR_TRY_TO(done, st, ar_st_to_i64(e, wide));
    }
    for (size_t i = 0; i < e->count; i++) {
        if (wide[i] != 0 && wide[i] != 1) {
            st = ar_error_set(AR_ERR_DATA, "%s: attention_mask[%zu, %zu] is neither 0 nor 1", path, i / e->shape[1],
                              i % e->shape[1]);
            goto done;
        }
        b->padding[i] = (uint8_t)wide[i];
    }
    b->batch.padding_mask = b->padding;
done:
    free(wide);
    free(reals);
    return st;
}

static ar_status load_additive(ari_input_batch *b, const ar_config *c, const ar_st_entry *e, const char *path)
{
    const size_t s = b->batch.seq;
    if ((e->shape[0] != b->batch.batch && e->shape[0] != 1) || (e->shape[1] != c->heads && e->shape[1] != 1) ||
        e->shape[2] != s || e->shape[3] != s)
        return ar_error_set(AR_ERR_SHAPE, "%s: attention_mask must be [%zu or 1, %zu or 1, %zu, %zu]", path,
                            b->batch.batch, c->heads, s, s);
    AR_TRY(ari_alloc((void **)&b->additive, e->count, sizeof(float), "attention_mask"));
    AR_TRY(ar_st_to_f32(e, b->additive));
    for (size_t i = 0; i < e->count; i++) {
        if (isnan(b->additive[i]) || b->additive[i] == INFINITY)
            return ar_error_set(AR_ERR_DATA,
                                "%s: attention_mask holds %s at element %zu; it is added to scores, -inf masks", path,
                                isnan(b->additive[i]) ? "NaN" : "+inf", i);
    }
    b->batch.additive_mask = b->additive;
    b->batch.mask_batch = e->shape[0];
    b->batch.mask_heads = e->shape[1];
    return AR_OK;
}

ar_status ari_input_batch_load(ari_input_batch *b, const ar_config *c, const char *path)
{
    ar_st_file *f = NULL;
    *b = (ari_input_batch){0};
    AR_TRY(ar_st_open(&f, path));
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, load_ids(b, c, f, path));
    AR_TRY_TO(done, st, load_labels(b, c, f, path));
    const ar_st_entry *mask = ar_st_find(f, "attention_mask");
    if (mask && mask->ndim == 4)
        st = load_additive(b, c, mask, path);
    else if (mask)
        st = load_padding(b, mask, path);
done:
    ar_st_close(f);
    if (st != AR_OK)
        ari_input_batch_fini(b);
    return st;
}

void ari_input_batch_fini(ari_input_batch *b)
{
    free(b->ids);
    free(b->labels);
    free(b->padding);
    free(b->additive);
    *b = (ari_input_batch){0};
}
