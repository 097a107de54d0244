/* SPDX-License-Identifier: Apache-2.0 */
/* What a product takes while it is computed. Exact numerics hold both operands as integers, with an exponent of each
 * row, and the sums that ranks exchange in one or two int64; native ones the sums as they are exchanged, and where
 * products are of fewer bits than their operands have, rounded copies of these (docs/numerics.md). */
#include "planner/own.h"

static const double WORD = 4.0, SUM = 8.0;

double ari_account_bytes(const ari_op_value *v)
{
    return (double)ar_dtype_bytes(v->dtype) * ari_op_elements(v);
}

double ari_account_values(int n, const ari_op_value *v)
{
    double bytes = 0.0;
    for (int i = 0; i < n; i++)
        bytes += ari_account_bytes(&v[i]);
    return bytes;
}

void ari_account_take(ari_account *a, ari_memory_kind kind, double bytes)
{
    a->held[kind] += bytes;
    a->life->held[kind] += bytes;
    a->now += bytes;
    a->peak = a->now > a->peak ? a->now : a->peak;
}

void ari_account_give(ari_account *a, ari_memory_kind kind, double bytes)
{
    a->held[kind] -= bytes;
    a->life->held[kind] -= bytes;
    a->now -= bytes;
}

void ari_account_touch(ari_account *a, double bytes)
{
    ari_account_take(a, ARI_MEMORY_WORKSPACE, bytes);
    ari_account_give(a, ARI_MEMORY_WORKSPACE, bytes);
}

/* Exact numerics reduce the sums as they are, then gather them rounded. */
const ari_op_call *ari_account_fold(const ari_account *a, const ari_operation *op)
{
    for (int i = 0; i < op->calls; i++) {
        if (op->call[i].dtype == (a->exact ? AR_I64 : a->activations))
            return &op->call[i];
    }
    return NULL;
}

/* Elements of a rank's slice: the first ones have one more. */
static double slice_of(const ari_account_product *p, double n)
{
    const size_t all = (size_t)n, ranks = p->fold->ranks;
    return (double)(all / ranks + (p->rank < all % ranks));
}

/* The sums of all elements, then those of the own slice beside them. */
static void fold_exact(ari_account *a, const ari_account_product *p)
{
    const double n = p->batch * p->rows * p->cols, sums = SUM * (double)p->fold->elements;
    const double limbs = n > 0.0 ? (double)p->fold->elements / n : 1.0;
    ari_account_touch(a, sums + SUM * limbs * slice_of(p, n));
}

double ari_account_copied(const ari_account *a, ar_dtype dtype, double n)
{
    const bool copied = !a->exact && a->c->run.precision != AR_PRECISION_F32 && dtype == AR_F32;
    return copied ? a->word * n : 0.0;
}

/* One weight after the other; their sum is in fp32 until it is rounded. */
static void multiply_weights(ari_account *a, const ari_account_product *p)
{
    int counted = 0;
    double most = 0.0;
    for (int i = 0; i < p->of->weights; i++) {
        const ari_op_value *w = &p->of->weight[i];
        const double out = (double)w->local[0], in = (double)w->local[1];
        if (p->along_k && !ari_account_counts(a, w))
            continue;
        const double copies = ari_account_copied(a, a->activations, p->rows * (p->along_k ? out : in)) +
                              ari_account_copied(a, w->dtype, out * in);
        most = copies > most ? copies : most;
        counted++;
    }
    const bool sums = p->along_k && counted > 1 && a->activations != AR_F32;
    ari_account_touch(a, most + (sums ? WORD * p->rows * p->cols : 0.0));
}

/* --- in chunks ---------------------------------------------------------------------------------------------------- */

bool ari_account_is_cut(const ari_operation *op)
{
    return op->calls > 0 && op->call[op->calls - 1].queue == ARI_ON_TP && !op->again;
}

double ari_account_ordered(const ari_operation *op, double rows)
{
    const bool scattered = op->calls > 0 && op->call[op->calls - 1].kind == ARI_CALL_REDUCE_SCATTER &&
                           ari_account_is_shard(&op->output[0], 1);
    return scattered && (ari_account_is_cut(op) || op->input[0].local[0] != 1) ? rows : 0.0;
}

static bool is_cut(const ari_account_product *p)
{
    return p->fold && p->fold->queue == ARI_ON_TP;
}

/* Chunk i's part of n, which belongs to all of the call. */
static double part(const ari_op_call *call, size_t i, double n)
{
    return n * (double)ari_call_chunk(call, i) / (double)call->elements;
}

static double chunk_bytes(const ari_op_call *call, size_t i)
{
    return (double)ar_dtype_bytes(call->dtype) * (double)ari_call_chunk(call, i);
}

/* Its sums, then those of the own slice beside them. */
static void begin_chunk(ari_account *a, const ari_account_product *p, size_t i)
{
    const double sums = chunk_bytes(p->fold, i);
    ari_account_product chunk = *p;
    chunk.rows = part(p->fold, i, p->rows);
    ari_account_take(a, ARI_MEMORY_WORKSPACE, sums);
    multiply_weights(a, &chunk);
    ari_account_take(a, ARI_MEMORY_WORKSPACE, sums / (double)p->fold->ranks);
}

static void end_chunk(ari_account *a, const ari_account_product *p, size_t i)
{
    const double sums = chunk_bytes(p->fold, i);
    ari_account_touch(a, part(p->fold, i, p->apart));
    ari_account_give(a, ARI_MEMORY_WORKSPACE, sums + sums / (double)p->fold->ranks);
}

/* A chunk is rounded when the next one has been multiplied. */
static void scatter_chunks(ari_account *a, const ari_account_product *p)
{
    const size_t n = ari_call_chunks(p->fold);
    for (size_t i = 0; i < n; i++) {
        begin_chunk(a, p, i);
        if (i > 0)
            end_chunk(a, p, i - 1);
    }
    end_chunk(a, p, n - 1);
}

void ari_account_multiply_chunks(ari_account *a, const ari_account_product *p, const ari_op_call *gather)
{
    const double two = chunk_bytes(gather, 0) + chunk_bytes(gather, 1), made = part(gather, 0, p->apart);
    ari_account_product chunk = *p;
    chunk.rows = part(gather, 0, p->rows);
    ari_account_take(a, ARI_MEMORY_WORKSPACE, two + made);
    ari_account_multiply(a, &chunk);
    ari_account_give(a, ARI_MEMORY_WORKSPACE, two + made);
}

/* --- at once ------------------------------------------------------------------------------------------------------ */

static void multiply_exact(ari_account *a, const ari_account_product *p)
{
    const double left = WORD * p->batch * p->rows * (1.0 + p->k);
    const double right = p->of ? 0.0 : WORD * p->batch * (p->cols * (1.0 + p->k) + (p->scaled ? p->k : 0.0));
    ari_account_take(a, ARI_MEMORY_WORKSPACE, left + right);
    if (is_cut(p))
        scatter_chunks(a, p);
    else if (p->fold)
        fold_exact(a, p);
    ari_account_give(a, ARI_MEMORY_WORKSPACE, left + right);
}

/* The product is made in memory of its own where ranks add it up; of scattered rows there are the own ones besides. */
static void multiply_native(ari_account *a, const ari_account_product *p)
{
    const double n = p->batch * p->rows * p->cols, folded = p->fold ? a->word * n : 0.0;
    if (is_cut(p)) {
        scatter_chunks(a, p);
        return;
    }
    ari_account_take(a, ARI_MEMORY_WORKSPACE, folded);
    if (p->of)
        multiply_weights(a, p);
    else
        ari_account_touch(a, ari_account_copied(a, a->activations, p->batch * (p->rows + p->cols) * p->k));
    if (p->fold && p->fold->kind == ARI_CALL_REDUCE_SCATTER)
        ari_account_touch(a, folded / (double)p->fold->ranks);
    ari_account_give(a, ARI_MEMORY_WORKSPACE, folded);
}

void ari_account_multiply(ari_account *a, const ari_account_product *p)
{
    if (a->exact)
        multiply_exact(a, p);
    else
        multiply_native(a, p);
}
