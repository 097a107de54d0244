/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/table.h"

#include "gpu/kernels.h"

namespace ARI_GPU
{

ar_device_ops table_of(const char *name)
{
    ar_device_ops o = {};
    o.name = name;
    o.host_reaches = false;
    o.queue_create = queue_create;
    o.destroy = destroy;
    o.alloc = alloc;
    o.free = free;
    o.copy = copy;
    o.zero = zero;
    o.copy_strided = copy_strided;
    o.combine = combine;
    o.gemm_f32 = gemm_f32;
    o.bias_act = bias_act;
    o.col_exponents = col_exponents;
    o.row_exponents = row_exponents;
    o.packed_create = packed_create;
    o.packed_destroy = packed_destroy;
    o.pack = pack;
    o.gemm_i64 = gemm_i64;
    o.gemm_round = gemm_round;
    o.gemm_acc = gemm_acc;
    o.round_i64 = round_i64;
    o.acc_add = acc_add;
    o.acc_raise = acc_raise;
    o.acc_value = acc_value;
    o.sum_rows_f32 = sum_rows_f32;
    o.add = add;
    o.mul = mul;
    o.fill = fill;
    o.act_backward = act_backward;
    o.gated_forward = gated_forward;
    o.gated_backward = gated_backward;
    o.dropout = dropout;
    o.norm_forward = norm_forward;
    o.norm_backward = norm_backward;
    o.rope_tables = rope_tables;
    o.rope = rope;
    o.softmax_forward = softmax_forward;
    o.softmax_backward = softmax_backward;
    o.rows_in_range = rows_in_range;
    o.gather_rows = gather_rows;
    o.ce_max = ce_max;
    o.ce_sum = ce_sum;
    o.ce_target = ce_target;
    o.ce_terms = ce_terms;
    o.ce_backward = ce_backward;
    o.sum_squares = sum_squares;
    o.scale = scale;
    o.round_bf16 = round_bf16;
    o.round_bits = round_bits;
    o.take_bf16 = take_bf16;
    o.narrow_bf16 = narrow_bf16;
    o.widen_bf16 = widen_bf16;
    o.optimizer_step = optimizer_step;
    return o;
}

} // namespace ARI_GPU
