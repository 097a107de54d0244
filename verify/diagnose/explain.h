/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_DIAGNOSE_EXPLAIN_H
#define ARI_VERIFY_DIAGNOSE_EXPLAIN_H

#include "anyrank/verify.h"

/* Says of a tensor of two dumps where the other one differs and what kind of mistake leaves that trace. Where the other
 * dump is of ranks, their parts are looked at one by one (verify/diagnose/pattern.h); where it is whole, its layout is
 * found from the data. */

/* What is known beside the tensor. All may be left zero. */
typedef struct ari_explain_case {
    const ar_dump *reference, *other; /* for values that are another tensor's; NULL: the tensor alone */
    double atol, rtol;                /* an element may differ by atol + rtol*|reference| without being different; both
                                         0: equal bits or different */
    int tp, dp;                       /* of the other run; 0: not known */
    size_t heads, kv_heads;           /* of the model; 0: not known */
} ari_explain_case;

/* Of tensors with more elements than the first, twice as many as the second are looked at. */
#define ARI_EXPLAIN_ELEMENTS ((size_t)1 << 22)
#define ARI_EXPLAIN_SAMPLED ((size_t)1 << 20)

/** Fills row->pattern and row->hint. Of the row it reads name, pass and step. The same tensors give the same texts.
 *  Memory: up to 40 bytes an element of at most ARI_EXPLAIN_ELEMENTS, and 16 for those of all ranks. Of larger tensors
 * a sample of every dimension's indices is looked at, which shows blocks, heads and shards, and a stretch of rows
 *          around the first difference, which shows neighbours; what says more is told, and the text says which.
 *  Errors: AR_ERR_ARG (other shapes: there is nothing to compare), AR_ERR_MEMORY, those of ar_dump_read_f32. On error
 *          the row is untouched.
 *  Threads: safe for other rows. */
AR_NODISCARD ar_status ari_explain(ar_verify_row *row, const ar_dump_tensor *reference, const ar_dump_tensor *other,
                                   const ari_explain_case *c);

#endif
