/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/arith/arith_private.h"
#include "ref/arith/exact.h"

#define FILL(slot) .slot = ari_exact_##slot,

/* Tables of the slots, one for each precision. */
#define EXACT(of)                                                                                               \
    {                                                                                                           \
        .name = "exact", .precision = (of), .operand_done = ari_exact_operand_done,                             \
        .contract_groups = ari_exact_contract_groups, .grad_groups = ari_exact_grad_groups, .bucket_arrays = 3, \
        .bucket_array = {{0, AR_I64}, {sizeof(int64_t), AR_I64}, {2 * sizeof(int64_t), AR_U8}},                 \
        .bucket_put = ari_exact_bucket_put, .grad_complete = ari_exact_grad_complete,                           \
        .grad_bucket = ari_exact_grad_bucket, ARI_ARITH_SLOTS(FILL)                                             \
    }

const ar_arith_ops *ari_arith_exact(ar_precision precision)
{
    static const ar_arith_ops f32 = EXACT(AR_PRECISION_F32), bf16 = EXACT(AR_PRECISION_BF16);
    return precision == AR_PRECISION_F32 ? &f32 : precision == AR_PRECISION_BF16 ? &bf16 : NULL;
}
