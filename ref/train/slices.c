/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients of which each rank that shares a sequence computes a slice (ar_param.sliced): nothing of them is to be summed
 * over these ranks then. For it all of them take all rows of a matrix's input, where each part of a sample had taken
 * one rank's, or the terms of all rows of a table; which moves fewer bytes depends on the number of tokens. */
#include "ref/comm/comm_private.h"
#include "ref/context/context_private.h"
#include "ref/core/param_private.h"
#include "ref/layers/parts.h"
#include "ref/placement/parallel_private.h"
#include "ref/train/ddp.h"

static bool can_be_sliced(const ari_bucket *b)
{
    for (size_t i = 0; i < b->info.params; i++) {
        if (b->info.param[i]->adds == AR_ADDS_ANY)
            return false;
    }
    return b->info.storage == AR_BF16 && !b->expert && !b->info.spread && !b->info.ends;
}

/* The rows of each matrix, slice by slice. The group's ranks are those of dp, one after the other, and of each those of
 * cp. */
static ar_status slice_bucket(ar_ddp *d, ari_bucket *b)
{
    const size_t cp = (size_t)ar_comm_size(d->ctx->sequence), ranks = (size_t)ar_comm_size(d->ctx->dp);
    size_t *first = NULL, n = 0;
    int *kind = NULL;
    ar_bucket_run *run = NULL;
    AR_TRY(ARI_TAKE(&first, &d->lists, cp + 1, "slices of a bucket"));
    AR_TRY(ARI_TAKE(&kind, &d->lists, ranks, "slices of a bucket"));
    AR_TRY(ARI_TAKE(&run, &d->lists, cp * b->info.params, "slices of a bucket"));
    for (size_t r = 0; r < ranks; r++)
        kind[r] = (int)(r % cp);
    for (size_t k = 0; k < cp; k++) {
        for (size_t i = 0; i < b->info.params; i++) {
            const ar_tensor w = ari_param_matrix(b->info.param[i]);
            size_t start = 0, rows = 0;
            ari_comm_slice(w.shape[0], (int)cp, (int)k, &start, &rows);
            run[n++] = (ar_bucket_run){b->info.offset[i] + start * w.shape[1], rows * w.shape[1]};
        }
        first[k + 1] = n;
    }
    b->slices = (ar_bucket_slices){cp, kind, first, run};
    return AR_OK;
}

ar_status ari_buckets_slice(ar_ddp *d)
{
    const bool exact = d->ctx->arith->bucket_arrays > 0;
    for (size_t i = 0; i < d->count && exact && ar_comm_size(d->ctx->sequence) > 1; i++) {
        if (can_be_sliced(&d->buckets[i]))
            AR_TRY(slice_bucket(d, &d->buckets[i]));
    }
    return AR_OK;
}

/* Of a bucket they are all tables, or none is. */
static bool has_tables(const ari_bucket *b)
{
    return b->info.params > 0 && b->info.param[0]->adds != AR_ADDS_BY_SAMPLE;
}

/* A tied table is a matrix too: with one among them the tables are in slices where the matrices are. */
static bool any_is_tied(const ar_ddp *d)
{
    for (size_t i = 0; i < d->trained; i++) {
        if (d->buckets[d->slots[i].bucket].slices.kinds > 0 && d->bucketed[i]->adds == AR_ADDS_BY_BOTH)
            return true;
    }
    return false;
}

bool ari_shares_complete(const ar_ddp *d)
{
    return ar_comm_size(d->ctx->shard) == ar_comm_size(d->ctx->dp) && (d->stage < 2 || d->step.passes == 1);
}

/* Bytes between all ranks of cp, of an element: what a step's sums of states take more than slices do, times 1 - 1/cp.
 * In slices shares are sent once, and where all other terms are on that rank as values. */
static double more_for_sums(const ar_ddp *d)
{
    const double cp = (double)ar_comm_size(d->ctx->sequence), shares = (double)ar_comm_size(d->ctx->shard);
    if (d->stage == 0)
        return 5.0 * cp;
    if (shares == cp && ari_shares_complete(d))
        return 5.0 * cp - 2.0;
    return 5.0 * (cp - cp / shares) * (d->stage < 2 ? 1.0 : (double)d->step.samples / (double)d->step.pass_samples);
}

/* True if the sums over the ranks of cp would take more than all rows of x, or all terms of tables, at two bytes and
 * their rows' numbers at eight. Of experts the ranks have equal slices, so that what moves can be told from the
 * number of their rows. */
static bool takes_fewer_bytes(const ar_ddp *d, bool tables)
{
    const double cp = (double)ar_comm_size(d->ctx->sequence), tokens = (double)d->step.samples * (double)d->step.tokens;
    double elements = 0.0, inputs = 0.0;
    for (size_t i = 0; i < d->count; i++) {
        const ari_bucket *b = &d->buckets[i];
        for (size_t k = 0; k < b->info.params && b->slices.kinds > 0 && has_tables(b) == tables; k++) {
            const ar_param *p = b->info.param[k];
            const ar_tensor w = ari_param_matrix(p);
            if (p->token_share > 0.0 && w.shape[0] % (size_t)ar_comm_size(d->ctx->sequence) != 0)
                return false;
            elements += (double)w.shape[0] * (double)w.shape[1];
            inputs += (double)w.shape[1] * (p->token_share > 0.0 ? p->token_share : 1.0) + (tables ? 4.0 : 0.0);
        }
    }
    return more_for_sums(d) * elements > 2.0 * (cp - 1.0) * tokens * inputs;
}

/* Summed twice, slices would be what they are, and a share that is not summed would be one slice: these mistakes are of
 * sums. */
static bool sums_wrongly(const ar_ddp *d)
{
    return ari_faulty(d->ctx, AR_FAULT_bucket_reduced_twice) ||
           (d->stage > 0 && ari_faulty(d->ctx, AR_FAULT_dp_group_missing));
}

void ari_ddp_choose_slices(ar_ddp *d)
{
    size_t parts = 0;
    const bool can = d->step.samples > 0 && !sums_wrongly(d);
    const bool matrices =
        can && ari_gradient_moves(&d->ctx->layout, d->step.tokens, &parts) > 0 && takes_fewer_bytes(d, false);
    const bool tables = any_is_tied(d) ? matrices : can && takes_fewer_bytes(d, true);
    for (size_t i = 0; i < d->count; i++)
        d->buckets[i].sliced = d->buckets[i].slices.kinds > 0 && (has_tables(&d->buckets[i]) ? tables : matrices);
    for (size_t i = 0; i < d->trained; i++)
        d->bucketed[i]->sliced = d->buckets[d->slots[i].bucket].sliced;
}
