/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/arith/exact.h"

#define FILL(slot) .slot = ari_exact_##slot,

const ar_arith_ops *ar_arith_exact(void)
{
    static const ar_arith_ops ops = {
        .name = "exact",
        .operand_done = ari_operand_done,
        .contract_groups = ari_exact_contract_groups,
        .grad_groups = ari_exact_grad_groups,
        .bucket_arrays = 3,
        .bucket_array = {{0, AR_I64}, {sizeof(int64_t), AR_I64}, {2 * sizeof(int64_t), AR_U8}},
        .bucket_put = ari_exact_bucket_put,
        ARI_ARITH_SLOTS(FILL)};
    return &ops;
}
