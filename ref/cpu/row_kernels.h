/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CPU_ROW_KERNELS_H
#define ARI_CPU_ROW_KERNELS_H

#include "anyrank/device.h"

/* The element-wise and row kernels of the CPU device. ari_cpu_X fills slot X of ar_device_ops and does what
 * anyrank/device.h says there; what a kernel promises beyond that (in-place use, errors) is said beside its definition.
 * All of them run at once in the calling thread, with up to d->threads OpenMP threads over rows; no result depends on
 * how many. A row is read a few times while it is in the first two cache levels, and once from memory. */

/* elementwise.c */
ar_status ari_cpu_bias_act(ar_device *d, ar_queue *q, const ar_tensor *y, ar_cbuf bias, ar_activation act,
                           const ar_tensor *z);
ar_status ari_cpu_add(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf a, ar_cbuf b, size_t n);
ar_status ari_cpu_mul(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf a, ar_cbuf b, size_t n);
ar_status ari_cpu_fill(ar_device *d, ar_queue *q, ar_buf y, float value, size_t n);
ar_status ari_cpu_act_backward(ar_device *d, ar_queue *q, ar_buf dx, ar_cbuf dy, ar_cbuf x, ar_activation act,
                               size_t n);
ar_status ari_cpu_gated_forward(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *gate,
                                const ar_tensor *up, ar_activation act);
ar_status ari_cpu_gated_backward(ar_device *d, ar_queue *q, const ar_tensor *dgate, const ar_tensor *dup,
                                 const ar_tensor *dy, const ar_tensor *gate, const ar_tensor *up, ar_activation act);
ar_status ari_cpu_copy_strided(ar_device *d, ar_queue *q, const ar_tensor *dst, const ar_tensor *src);

/* dropout.c */
ar_status ari_cpu_dropout(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *x, const ar_dropout *which);

/* norm.c */
ar_status ari_cpu_norm_forward(ar_device *d, ar_queue *q, ar_norm_kind kind, ar_buf y, ar_buf mean, ar_buf rstd,
                               ar_cbuf x, ar_cbuf gamma, ar_cbuf beta, double eps, size_t rows, size_t h);
ar_status ari_cpu_norm_backward(ar_device *d, ar_queue *q, ar_norm_kind kind, ar_buf dx, ar_buf sum,
                                ar_buf dgamma_terms, ar_cbuf dy, ar_cbuf x, ar_cbuf mean, ar_cbuf rstd, ar_cbuf gamma,
                                ar_cbuf residual, size_t rows, size_t h);

/* rope.c */
ar_status ari_cpu_rope_tables(ar_device *d, ar_queue *q, ar_buf cos, ar_buf sin, size_t positions, size_t head_dim,
                              double theta, double factor, const ar_rope_llama3 *llama3);
ar_status ari_cpu_rope(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *x, ar_cbuf cos, ar_cbuf sin,
                       int direction);

/* softmax.c */
ar_status ari_cpu_softmax_forward(ar_device *d, ar_queue *q, ar_buf probs, ar_cbuf scores, size_t b, size_t heads,
                                  size_t s, float scale, const ar_mask *mask);
ar_status ari_cpu_softmax_backward(ar_device *d, ar_queue *q, ar_buf ds, ar_cbuf probs, ar_buf dprobs, size_t b,
                                   size_t heads, size_t s, float scale, const ar_mask *mask);

/* embedding.c */
ar_status ari_cpu_rows_in_range(ar_device *d, ar_queue *q, ar_buf row_of, ar_cbuf ids, size_t n, int64_t start,
                                int64_t count);
ar_status ari_cpu_gather_rows(ar_device *d, ar_queue *q, ar_buf y, const ar_tensor *w, ar_cbuf row_of, size_t n);
ar_status ari_cpu_sum_rows_f32(ar_device *d, ar_queue *q, ar_buf acc, size_t rows_in_acc, const ar_tensor *terms,
                               ar_cbuf row_of);

/* loss.c */
ar_status ari_cpu_ce_max(ar_device *d, ar_queue *q, ar_buf key, ar_cbuf logits, size_t n, size_t v_local);
ar_status ari_cpu_ce_sum(ar_device *d, ar_queue *q, ar_buf sum, ar_cbuf logits, ar_cbuf key, size_t n, size_t v_local,
                         size_t v);
ar_status ari_cpu_ce_target(ar_device *d, ar_queue *q, ar_buf bits, ar_cbuf logits, ar_cbuf row_of, size_t n,
                            size_t v_local);
ar_status ari_cpu_ce_terms(ar_device *d, ar_queue *q, ar_buf terms, ar_cbuf key, ar_cbuf sum, ar_cbuf bits,
                           ar_cbuf valid, size_t n, size_t v);
ar_status ari_cpu_ce_backward(ar_device *d, ar_queue *q, ar_buf dlogits, ar_cbuf logits, ar_cbuf key, ar_cbuf sum,
                              ar_cbuf row_of, ar_cbuf valid, double targets, size_t n, size_t v_local, size_t v);

/* optimizer.c */
ar_status ari_cpu_sum_squares(ar_device *d, ar_queue *q, ar_buf sums, ar_cbuf g, ar_cbuf e, size_t n);
ar_status ari_cpu_scale(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf x, float factor, size_t n);
ar_status ari_cpu_round_bf16(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf x, size_t n);
ar_status ari_cpu_take_bf16(ar_device *d, ar_queue *q, ar_buf master, ar_cbuf weight, size_t n);
ar_status ari_cpu_optimizer_step(ar_device *d, ar_queue *q, ar_buf w, ar_buf m, ar_buf v, ar_cbuf g,
                                 const struct ari_optimizer_constants *k, size_t n);

/* half.c */
ar_status ari_cpu_combine(ar_device *d, ar_queue *q, ar_buf out, const ar_cbuf *in, int n, size_t count, ar_dtype t,
                          ar_op op);
ar_status ari_cpu_round_bits(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *x, int bits);
ar_status ari_cpu_narrow_bf16(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf x, size_t n);
ar_status ari_cpu_widen_bf16(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf x, size_t n);

#endif
