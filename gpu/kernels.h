/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_GPU_KERNELS_H
#define ARI_GPU_KERNELS_H

/* The slots of the device's table that are kernels; include/anyrank/device.h says what each does. */
#include "gpu/runtime.h"

namespace ARI_GPU
{

ar_status copy_strided(ar_device *d, ar_queue *q, const ar_tensor *dst, const ar_tensor *src);
ar_status combine(ar_device *d, ar_queue *q, ar_buf out, const ar_cbuf *in, int n, size_t count, ar_dtype t, ar_op op);
ar_status gemm_f32(ar_device *d, ar_queue *q, const ar_tensor *c, const ar_tensor *a, const ar_tensor *b, bool add,
                   ar_precision operands);
ar_status bias_act(ar_device *d, ar_queue *q, const ar_tensor *y, ar_cbuf bias, ar_activation act, const ar_tensor *z);
ar_status col_exponents(ar_device *d, ar_queue *q, ar_buf c, const ar_tensor *b, bool max_into);
ar_status row_exponents(ar_device *d, ar_queue *q, ar_buf e, const ar_tensor *a, ar_cbuf c, int sign, bool max_into);
ar_status packed_create(ar_device *d, ar_packed **gives, size_t batch, size_t rows, size_t k, bool split);
void packed_destroy(ar_device *d, ar_packed *p);
ar_status pack(ar_device *d, ar_queue *q, ar_packed *p, size_t row_at, size_t k_at, const ar_tensor *a, ar_cbuf c,
               int sign, ar_cbuf e);
ar_status gemm_i64(ar_device *d, ar_queue *q, ar_buf s, const ar_packed *a, const ar_packed *b, int limbs);
ar_status gemm_round(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_packed *a, const ar_packed *b, ar_cbuf e,
                     ar_cbuf f, ar_cbuf bias, ar_activation act, const ar_tensor *z);
ar_status gemm_acc(ar_device *d, ar_queue *q, ar_buf t, ar_buf hl, const ar_packed *a, const ar_packed *b, ar_cbuf e,
                   ar_cbuf f);
ar_status round_i64(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf s, int limbs, size_t start, size_t count, size_t n,
                    ar_cbuf e, ar_cbuf f);
ar_status acc_add(ar_device *d, ar_queue *q, ar_buf t, ar_buf hl, size_t rows_in_acc, const ar_tensor *terms,
                  ar_cbuf row_of);
ar_status acc_raise(ar_device *d, ar_queue *q, ar_buf t, ar_buf hl, ar_cbuf t_new, size_t n);
ar_status acc_value(ar_device *d, ar_queue *q, const ar_tensor *y, ar_cbuf t, ar_cbuf hl, size_t n);
ar_status sum_rows_f32(ar_device *d, ar_queue *q, ar_buf acc, size_t rows_in_acc, const ar_tensor *terms,
                       ar_cbuf row_of);
ar_status add(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf a, ar_cbuf b, size_t n);
ar_status mul(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf a, ar_cbuf b, size_t n);
ar_status fill(ar_device *d, ar_queue *q, ar_buf y, float value, size_t n);
ar_status act_backward(ar_device *d, ar_queue *q, ar_buf dx, ar_cbuf dy, ar_cbuf x, ar_activation act, size_t n);
ar_status gated_forward(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *gate, const ar_tensor *up,
                        ar_activation act);
ar_status gated_backward(ar_device *d, ar_queue *q, const ar_tensor *dgate, const ar_tensor *dup, const ar_tensor *dy,
                         const ar_tensor *gate, const ar_tensor *up, ar_activation act);
ar_status dropout(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *x, const ar_dropout *which);
ar_status norm_forward(ar_device *d, ar_queue *q, ar_norm_kind kind, ar_buf y, ar_buf mean, ar_buf rstd, ar_cbuf x,
                       ar_cbuf gamma, ar_cbuf beta, double eps, size_t rows, size_t h);
ar_status norm_backward(ar_device *d, ar_queue *q, ar_norm_kind kind, ar_buf dx, ar_buf sum, ar_buf dgamma_terms,
                        ar_cbuf dy, ar_cbuf x, ar_cbuf mean, ar_cbuf rstd, ar_cbuf gamma, ar_cbuf residual, size_t rows,
                        size_t h);
ar_status rope_tables(ar_device *d, ar_queue *q, ar_buf cos, ar_buf sin, size_t positions, size_t head_dim,
                      double theta, double factor, const ar_rope_llama3 *llama3);
ar_status rope(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *x, ar_cbuf cos, ar_cbuf sin,
               int direction);
ar_status softmax_forward(ar_device *d, ar_queue *q, ar_buf probs, ar_cbuf scores, size_t b, size_t heads, size_t s,
                          float scale, const ar_mask *mask);
ar_status softmax_backward(ar_device *d, ar_queue *q, ar_buf ds, ar_cbuf probs, ar_buf dprobs, size_t b, size_t heads,
                           size_t s, float scale, const ar_mask *mask);
ar_status rows_in_range(ar_device *d, ar_queue *q, ar_buf row_of, ar_cbuf ids, size_t n, int64_t start, int64_t count);
ar_status gather_rows(ar_device *d, ar_queue *q, ar_buf y, const ar_tensor *w, ar_cbuf row_of, size_t n);
ar_status ce_max(ar_device *d, ar_queue *q, ar_buf key, ar_cbuf logits, size_t n, size_t v_local);
ar_status ce_sum(ar_device *d, ar_queue *q, ar_buf sum, ar_cbuf logits, ar_cbuf key, size_t n, size_t v_local,
                 size_t v);
ar_status ce_target(ar_device *d, ar_queue *q, ar_buf bits, ar_cbuf logits, ar_cbuf row_of, size_t n, size_t v_local);
ar_status ce_terms(ar_device *d, ar_queue *q, ar_buf terms, ar_cbuf key, ar_cbuf sum, ar_cbuf bits, ar_cbuf valid,
                   size_t n, size_t v);
ar_status ce_backward(ar_device *d, ar_queue *q, ar_buf dlogits, ar_cbuf logits, ar_cbuf key, ar_cbuf sum,
                      ar_cbuf row_of, ar_cbuf valid, double targets, size_t n, size_t v_local, size_t v);
ar_status sum_squares(ar_device *d, ar_queue *q, ar_buf sums, ar_cbuf g, ar_cbuf e, size_t n);
ar_status scale(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf x, float factor, size_t n);
ar_status round_bf16(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf x, size_t n);
ar_status round_bits(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *x, int bits);
ar_status take_bf16(ar_device *d, ar_queue *q, ar_buf master, ar_cbuf weight, size_t n);
ar_status narrow_bf16(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf x, size_t n);
ar_status widen_bf16(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf x, size_t n);
ar_status optimizer_step(ar_device *d, ar_queue *q, ar_buf w, ar_buf m, ar_buf v, ar_cbuf g,
                         const struct ari_optimizer_constants *k, size_t n);

} // namespace ARI_GPU

#endif
