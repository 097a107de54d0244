/* SPDX-License-Identifier: Apache-2.0 */
/* Whether copies of a parameter are copies: each rank hashes its own, all compare the hashes. */
#include "ref/layers/replicas.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/context.h"
#include "ref/core/size.h"
#include "ref/numerics/philox.h"

uint64_t ari_hash_word(uint64_t hash, uint64_t word)
{
    return (hash ^ word) * ARI_FNV1A_PRIME;
}

uint64_t ari_place_of(const ar_layout *o)
{
    uint64_t hash = ARI_FNV1A_BASIS;
    for (size_t k = 0; k < o->nbox; k++) {
        for (int d = 0; d < o->ndim; d++) {
            hash = ari_hash_word(hash, o->box[k].global[d]);
            hash = ari_hash_word(hash, o->box[k].extent[d]);
        }
    }
    return hash;
}

uint64_t ari_hash_values(uint64_t hash, const float *v, size_t n)
{
    static const uint32_t quiet_nan = 0x7fc00000u;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = quiet_nan;
        if (!isnan(v[i]))
            memcpy(&bits, &v[i], sizeof bits);
        hash = ari_hash_word(hash, bits);
    }
    return hash;
}

ar_status ari_gather_words(ar_ctx *ctx, ar_comm *over, uint64_t *all, size_t words, const char *tag)
{
    const size_t ranks = (size_t)ar_comm_size(over), me = (size_t)ar_comm_rank(over);
    const size_t shape[2] = {ranks, words};
    size_t *counts = NULL;
    ar_tensor t = {.data = {NULL}};
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ari_alloc((void **)&counts, ranks, sizeof *counts, "counts of words"));
    for (size_t r = 0; r < ranks; r++)
        counts[r] = words;
    AR_TRY_TO(done, st, ar_ctx_tensor(ctx, &t, AR_I64, 2, shape));
    AR_TRY_TO(done, st, ar_ctx_upload(ctx, &t, all));
    AR_TRY_TO(done, st,
              ar_comm_all_gather(over, ctx->queue, t.data, ar_cbuf_at(ar_const(t.data), me * words * sizeof *all),
                                 counts, AR_I64, tag));
    AR_TRY_TO(done, st, ar_ctx_download(ctx, all, &t));
done:
    ar_ctx_release(ctx, &t);
    free(counts);
    return st;
}

static ar_status hash_value(uint64_t *hash, ar_ctx *ctx, const ar_param *p)
{
    const size_t n = ar_tensor_count(&p->value);
    float *values = NULL;
    AR_TRY(ari_alloc((void **)&values, n, sizeof *values, p->name));
    const ar_status st = ar_ctx_download(ctx, values, &p->value);
    if (st == AR_OK)
        *hash = ari_hash_values(ARI_FNV1A_BASIS, values, n);
    free(values);
    return st;
}

/* What a rank says of one parameter; place 0: it holds the only copy. */
typedef struct copy {
    uint64_t place, hash;
} copy;

/* The nearest rank below r that holds a copy of the same elements, r where there is none. column: what each rank says
 * of one parameter, n apart. */
static size_t copy_below(const copy *column, size_t n, size_t r)
{
    for (size_t other = r; column[r * n].place != 0 && other-- > 0;) {
        if (column[other * n].place == column[r * n].place)
            return other;
    }
    return r;
}

/* said: [ranks, n]. */
static ar_status compare(const copy *said, ar_param *const *params, size_t n, size_t ranks)
{
    for (size_t i = 0; i < n; i++) {
        const copy *column = said + i;
        for (size_t r = 1; r < ranks; r++) {
            const size_t other = copy_below(column, n, r);
            if (column[other * n].hash != column[r * n].hash)
                return ar_error_set(AR_ERR_DATA, "%s: the copies of tensor-parallel ranks %zu and %zu differ",
                                    params[i]->name, other, r);
        }
    }
    return AR_OK;
}

ar_status ar_params_check_replicas(ar_param *const *params, size_t n, ar_ctx *ctx)
{
    const size_t ranks = (size_t)ar_comm_size(ctx->tp), me = (size_t)ar_comm_rank(ctx->tp);
    copy *said = NULL; /* [ranks, n] */
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ari_alloc_zero((void **)&said, ranks * n, sizeof *said, "hashes of parameters"));
    for (size_t i = 0; i < n; i++) {
        if (params[i]->layout.replicas == 1)
            continue;
        said[me * n + i].place = ari_place_of(&params[i]->layout);
        AR_TRY_TO(done, st, hash_value(&said[me * n + i].hash, ctx, params[i]));
    }
    AR_TRY_TO(done, st, ari_gather_words(ctx, ctx->tp, (uint64_t *)said, 2 * n, "replicas"));
    AR_TRY_TO(done, st, compare(said, params, n, ranks));
done:
    free(said);
    return st;
}
