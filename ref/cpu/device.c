/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/device.h"

#include <stdlib.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "ref/core/size.h"
#include "ref/cpu/contract_kernels.h"
#include "ref/cpu/cpu_device.h"
#include "ref/cpu/gemm_paths.h"
#include "ref/cpu/row_kernels.h"

static ar_status cpu_queue_create(ar_device *d, ar_queue **gives, ar_queue_kind kind, const char *name)
{
    (void)d;
    return ar_queue_create(gives, kind, name);
}

static void cpu_destroy(ar_device *d)
{
    ari_pool_fini(&((ari_cpu_device *)d)->pool);
    free(d);
}

static const ar_device_ops cpu_ops = {
    .name = "cpu",
    .host_reaches = true,
    .queue_create = cpu_queue_create,
    .destroy = cpu_destroy,
    .alloc = ari_cpu_alloc,
    .free = ari_cpu_free,
    .copy = ari_cpu_copy,
    .zero = ari_cpu_zero,
    .copy_strided = ari_cpu_copy_strided,
    .combine = ari_cpu_combine,
    .gemm_f32 = ari_cpu_gemm_f32,
    .bias_act = ari_cpu_bias_act,
    .col_exponents = ari_cpu_col_exponents,
    .row_exponents = ari_cpu_row_exponents,
    .packed_create = ari_cpu_packed_create,
    .packed_destroy = ari_cpu_packed_destroy,
    .pack = ari_cpu_pack,
    .round_i64 = ari_cpu_round_i64,
    .acc_add = ari_cpu_acc_add,
    .acc_raise = ari_cpu_acc_raise,
    .acc_value = ari_cpu_acc_value,
    .sum_rows_f32 = ari_cpu_sum_rows_f32,
    .add = ari_cpu_add,
    .mul = ari_cpu_mul,
    .fill = ari_cpu_fill,
    .act_backward = ari_cpu_act_backward,
    .gated_forward = ari_cpu_gated_forward,
    .gated_backward = ari_cpu_gated_backward,
    .dropout = ari_cpu_dropout,
    .norm_forward = ari_cpu_norm_forward,
    .norm_backward = ari_cpu_norm_backward,
    .rope_tables = ari_cpu_rope_tables,
    .rope = ari_cpu_rope,
    .softmax_forward = ari_cpu_softmax_forward,
    .softmax_backward = ari_cpu_softmax_backward,
    .rows_in_range = ari_cpu_rows_in_range,
    .gather_rows = ari_cpu_gather_rows,
    .ce_max = ari_cpu_ce_max,
    .ce_sum = ari_cpu_ce_sum,
    .ce_target = ari_cpu_ce_target,
    .ce_terms = ari_cpu_ce_terms,
    .ce_backward = ari_cpu_ce_backward,
    .sum_squares = ari_cpu_sum_squares,
    .scale = ari_cpu_scale,
    .round_bf16 = ari_cpu_round_bf16,
    .round_bits = ari_cpu_round_bits,
    .take_bf16 = ari_cpu_take_bf16,
    .narrow_bf16 = ari_cpu_narrow_bf16,
    .widen_bf16 = ari_cpu_widen_bf16,
    .optimizer_step = ari_cpu_optimizer_step,
};

/* Subnormals are part of the numbers that are promised: bits 15 (flush to zero) and 6 (denormals are zero) of MXCSR
 * must be clear. They are per thread; a library linked with -ffast-math sets them behind one's back. */
static ar_status check_subnormals(void)
{
#if defined(__SSE__)
    const unsigned int flags = _mm_getcsr() & 0x8040u;
    if (flags != 0)
        return ar_error_set(AR_ERR_DATA, "cpu device: flush-to-zero is on in this thread (MXCSR bits %#x)", flags);
#endif
    return AR_OK;
}

ar_status ar_device_cpu_create(ar_device **gives, int threads)
{
    void *memory = NULL;
    if (!gives || threads < 1)
        return ar_error_set(AR_ERR_ARG, "cpu device: %d threads, expected at least 1", threads);
    ari_exact_choice exact = ARI_EXACT_PORTABLE;
    AR_TRY(check_subnormals());
    AR_TRY(ari_exact_choose(&exact));
    AR_TRY(ari_alloc(&memory, 1, sizeof(ari_cpu_device), "the cpu device"));
    ari_cpu_device *d = memory;
    d->ops = cpu_ops;
    ari_pool_init(&d->pool);
    ari_exact_fill(&d->ops, exact);
    d->base = (ar_device){.ops = &d->ops, .threads = threads};
    *gives = &d->base;
    return AR_OK;
}
