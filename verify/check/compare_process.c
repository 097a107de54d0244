/* SPDX-License-Identifier: Apache-2.0 */
/* What comparators found where each rank is a process: on its way to process 0. */
#include <stdlib.h>

#include "ref/core/boxes.h"
#include "ref/core/size.h"
#include "run/process_run.h"
#include "verify/check/compare.h"

static size_t local_count(const ari_finding *f)
{
    size_t count = f->seen ? 1 : 0;
    for (int d = 0; f->seen && d < f->ndim; d++)
        count *= f->shape[d];
    return count;
}

/* Between a full tensor and the packed parts of it that one rank holds. */
typedef struct moving {
    float *full, *packed;
    bool to_full;
} moving;

static void move_run(void *user, const ari_box_run *r)
{
    const moving *m = user;
    float *full = m->full + r->full, *packed = m->packed + r->local_index;
    for (size_t i = 0; i < r->count; i++)
        *(m->to_full ? &full[i] : &packed[i]) = m->to_full ? packed[i] : full[i];
}

static ar_status move(const ari_finding *f, float *full, float *packed, bool to_full)
{
    ar_tensor view;
    moving m = {full, packed, to_full};
    AR_TRY(ar_tensor_view(&view, AR_F32, f->ndim, f->shape, (ar_buf){packed}));
    ari_for_each_run(&view, &f->layout, move_run, &m);
    return AR_OK;
}

/* The first copy of what is gathered: its holder's values are the run's. */
static bool gives_values(const ari_comparator *c, float *const *gathered, size_t tensor)
{
    const ari_finding *f = &c->finding[tensor];
    return gathered[tensor] && f->seen && !f->broken && f->layout.replica == 0;
}

/* --- sending ------------------------------------------------------------------------------------------------------ */

static ar_status put_values(ari_bytes *b, const ari_comparator *c, float *const *gathered)
{
    for (size_t i = 0; i < c->reference->count; i++) {
        const size_t count = local_count(&c->finding[i]);
        float *packed = NULL;
        if (!gives_values(c, gathered, i))
            continue;
        AR_TRY(ari_alloc_zero((void **)&packed, count, sizeof *packed, "a gathered tensor"));
        ar_status st = move(&c->finding[i], gathered[i], packed, false);
        if (st == AR_OK)
            st = ari_bytes_put(b, packed, count * sizeof *packed);
        free(packed);
        AR_TRY(st);
    }
    return AR_OK;
}

static ar_status put(ari_bytes *b, const ari_comparator *c, float *const *gathered)
{
    AR_TRY(ari_bytes_put(b, c->finding, c->reference->count * sizeof *c->finding));
    AR_TRY(ari_bytes_put(b, c->unexpected, sizeof c->unexpected));
    AR_TRY(ari_bytes_put(b, &c->kept_count, sizeof c->kept_count));
    for (size_t k = 0; k < c->kept_count; k++) {
        const ari_kept *kept = &c->kept[k];
        AR_TRY(ari_bytes_put(b, &kept->tensor, sizeof kept->tensor));
        AR_TRY(ari_bytes_put(b, kept->local, local_count(&c->finding[kept->tensor]) * sizeof *kept->local));
    }
    return gathered ? put_values(b, c, gathered) : AR_OK;
}

/* --- receiving ---------------------------------------------------------------------------------------------------- */

typedef struct receiving {
    ari_comparator *ranks;
    float *const *gathered;
    int holders;
} receiving;

static ar_status take_values(ari_bytes *b, const ari_comparator *c, float *const *gathered)
{
    for (size_t i = 0; i < c->reference->count; i++) {
        const size_t count = local_count(&c->finding[i]);
        float *packed = NULL;
        if (!gives_values(c, gathered, i))
            continue;
        AR_TRY(ari_alloc((void **)&packed, count, sizeof *packed, "a gathered tensor"));
        ar_status st = ari_bytes_take(b, packed, count * sizeof *packed);
        if (st == AR_OK)
            st = move(&c->finding[i], gathered[i], packed, true);
        free(packed);
        AR_TRY(st);
    }
    return AR_OK;
}

static ar_status take_kept(ari_bytes *b, ari_comparator *c, size_t n)
{
    if (n > ARI_KEPT_COPIES)
        return ar_error_set(AR_ERR_INTERNAL, "a process sent %zu copies of tensors, at most %d are kept", n,
                            ARI_KEPT_COPIES);
    for (; c->kept_count < n; c->kept_count++) {
        ari_kept *k = &c->kept[c->kept_count];
        AR_TRY(ari_bytes_take(b, &k->tensor, sizeof k->tensor));
        if (k->tensor >= c->reference->count)
            return ar_error_set(AR_ERR_INTERNAL, "a process sent a copy of tensor %zu of %zu", k->tensor,
                                c->reference->count);
        const size_t count = local_count(&c->finding[k->tensor]);
        AR_TRY(ari_alloc((void **)&k->local, count, sizeof *k->local, "a copy of a tensor that differs"));
        const ar_status st = ari_bytes_take(b, k->local, count * sizeof *k->local);
        if (st != AR_OK) {
            free(k->local);
            return st;
        }
    }
    return AR_OK;
}

static ar_status take(void *user, int rank, ari_bytes *b)
{
    const receiving *r = user;
    ari_comparator *c = &r->ranks[rank];
    size_t kept = 0;
    if (rank == 0) /* what process 0 sends to itself is there */
        return AR_OK;
    AR_TRY(ari_bytes_take(b, c->finding, c->reference->count * sizeof *c->finding));
    AR_TRY(ari_bytes_take(b, c->unexpected, sizeof c->unexpected));
    AR_TRY(ari_bytes_take(b, &kept, sizeof kept));
    AR_TRY(take_kept(b, c, kept));
    return rank < r->holders ? take_values(b, c, r->gathered) : AR_OK;
}

ar_status ari_comparators_collect(ar_process *p, ari_comparator *ranks, int n, float *const *gathered, int holders)
{
    const int rank = ar_process_rank(p);
    receiving r = {ranks, gathered, holders};
    ari_bytes own = {.count = 0};
    ar_status st = AR_OK;
    if (rank > 0 && rank < n)
        st = put(&own, &ranks[rank], rank < holders ? gathered : NULL);
    st = ari_process_agree(p, st);
    if (st == AR_OK)
        st = ari_process_collect(p, &own, take, &r);
    ari_bytes_fini(&own);
    return st;
}
