/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CPU_CONTRACT_KERNELS_H
#define ARI_CPU_CONTRACT_KERNELS_H

#include "anyrank/device.h"

/* Memory, contractions and the accumulator on the CPU. ari_cpu_X fills slot X of ar_device_ops and does what
 * anyrank/device.h says there; errors beyond that are said beside its definition. All of them run at once in the
 * calling thread, with up to d->threads OpenMP threads; no result depends on how many (the native product's
 * excepted). */

/* memory.c */
ar_status ari_cpu_alloc(ar_device *d, ar_buf *gives, size_t bytes);
void ari_cpu_free(ar_device *d, ar_buf b);
ar_status ari_cpu_copy(ar_device *d, ar_queue *q, ar_buf dst, ar_cbuf src, size_t bytes);
ar_status ari_cpu_zero(ar_device *d, ar_queue *q, ar_buf dst, size_t bytes);

/* gemm_native.c */
ar_status ari_cpu_gemm_f32(ar_device *d, ar_queue *q, const ar_tensor *c, const ar_tensor *a, const ar_tensor *b,
                           bool add, ar_precision operands);

/* exponents.c */
ar_status ari_cpu_col_exponents(ar_device *d, ar_queue *q, ar_buf c, const ar_tensor *b, bool max_into);
ar_status ari_cpu_row_exponents(ar_device *d, ar_queue *q, ar_buf e, const ar_tensor *a, ar_cbuf c, int sign,
                                bool max_into);

/* pack.c */
ar_status ari_cpu_packed_create(ar_device *d, ar_packed **gives, size_t batch, size_t rows, size_t k, bool split);
void ari_cpu_packed_destroy(ar_device *d, ar_packed *p);
ar_status ari_cpu_pack(ar_device *d, ar_queue *q, ar_packed *p, size_t row_at, size_t k_at, const ar_tensor *a,
                       ar_cbuf c, int sign, ar_cbuf e);

/* gemm_exact.c, round.c */
ar_status ari_cpu_gemm_i64(ar_device *d, ar_queue *q, ar_buf s, const ar_packed *a, const ar_packed *b, int limbs);
ar_status ari_cpu_gemm_round(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_packed *a, const ar_packed *b,
                             ar_cbuf e, ar_cbuf f, ar_cbuf bias, ar_activation act, const ar_tensor *z);
ar_status ari_cpu_gemm_acc(ar_device *d, ar_queue *q, ar_buf t, ar_buf hl, const ar_packed *a, const ar_packed *b,
                           ar_cbuf e, ar_cbuf f);
/* The slots where the processor has AVX-512 IFMA (gemm_paths.h); not defined where the compiler has no x86-64. */
ar_status ari_cpu_gemm_i64_ifma(ar_device *d, ar_queue *q, ar_buf s, const ar_packed *a, const ar_packed *b, int limbs);
ar_status ari_cpu_gemm_round_ifma(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_packed *a, const ar_packed *b,
                                  ar_cbuf e, ar_cbuf f, ar_cbuf bias, ar_activation act, const ar_tensor *z);
ar_status ari_cpu_gemm_acc_ifma(ar_device *d, ar_queue *q, ar_buf t, ar_buf hl, const ar_packed *a, const ar_packed *b,
                                ar_cbuf e, ar_cbuf f);
ar_status ari_cpu_round_i64(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf s, int limbs, size_t start, size_t count,
                            size_t n, ar_cbuf e, ar_cbuf f);

/* accumulator_kernels.c */
ar_status ari_cpu_acc_add(ar_device *d, ar_queue *q, ar_buf t, ar_buf hl, size_t rows_in_acc, const ar_tensor *terms,
                          ar_cbuf row_of);
ar_status ari_cpu_acc_raise(ar_device *d, ar_queue *q, ar_buf t, ar_buf hl, ar_cbuf t_new, size_t n);
ar_status ari_cpu_acc_value(ar_device *d, ar_queue *q, const ar_tensor *y, ar_cbuf t, ar_cbuf hl, size_t n);

#endif
