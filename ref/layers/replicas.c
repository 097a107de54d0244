/* SPDX-License-Identifier: Apache-2.0 */
/* Whether copies of a parameter are copies: each rank hashes its own, all compare the hashes. */
#include <stdlib.h>

#include "anyrank/param.h"
#include "ref/core/context.h"
#include "ref/core/size.h"
#include "ref/numerics/philox.h"

/* FNV-1a in 64 bits, word by word. */
static void mix(uint64_t *hash, uint64_t word)
{
    *hash = (*hash ^ word) * ARI_FNV1A_PRIME;
}

/* Which elements of the full tensor these are: copies of the same ones have the same number. */
static uint64_t place_of(const ar_layout *o)
{
    uint64_t hash = ARI_FNV1A_BASIS;
    for (size_t k = 0; k < o->nbox; k++) {
        for (int d = 0; d < o->ndim; d++) {
            mix(&hash, o->box[k].global[d]);
            mix(&hash, o->box[k].extent[d]);
        }
    }
    return hash;
}

static ar_status hash_value(uint64_t *hash, ar_ctx *ctx, const ar_param *p)
{
    const size_t n = ar_tensor_count(&p->value);
    uint32_t *bits = NULL;
    AR_TRY(ari_alloc((void **)&bits, n, sizeof *bits, p->name));
    const ar_status st = ar_ctx_download(ctx, bits, &p->value);
    *hash = ARI_FNV1A_BASIS;
    for (size_t i = 0; i < n && st == AR_OK; i++)
        mix(hash, bits[i]);
    free(bits);
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
    const size_t shape[3] = {ranks, n, 2};
    size_t *counts = NULL;
    copy *said = NULL;
    ar_tensor t;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ar_ctx_tensor(ctx, &t, AR_I64, 3, shape));
    AR_TRY_TO(done, st, ari_alloc_zero((void **)&said, ranks * n, sizeof *said, "hashes of parameters"));
    AR_TRY_TO(done, st, ari_alloc((void **)&counts, ranks, sizeof *counts, "counts of hashes"));
    for (size_t r = 0; r < ranks; r++)
        counts[r] = 2 * n;
    for (size_t i = 0; i < n; i++) {
        if (params[i]->layout.replicas == 1)
            continue;
        said[me * n + i].place = place_of(&params[i]->layout);
        AR_TRY_TO(done, st, hash_value(&said[me * n + i].hash, ctx, params[i]));
    }
    AR_TRY_TO(done, st, ar_ctx_upload(ctx, &t, said));
    AR_TRY_TO(done, st,
              ar_comm_all_gather(ctx->tp, ctx->queue, t.data, ar_cbuf_at(ar_const(t.data), me * n * sizeof *said),
                                 counts, AR_I64, "replicas"));
    AR_TRY_TO(done, st, ar_ctx_download(ctx, said, &t));
    ar_ctx_release(ctx, &t);
    AR_TRY_TO(done, st, compare(said, params, n, ranks));
done:
    free(counts);
    free(said);
    return st;
}
