/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_ARITH_EXACT_H
#define ARI_ARITH_EXACT_H

#include "anyrank/arith.h"

struct ar_param_grad {
    size_t n;  /* elements, in the order of the layer's matrix [out, in] */
    ar_buf t;  /* u8 [n] */
    ar_buf hl; /* int64 [2n] */
};

/* The gradient half of the exact arithmetic (exact_grad.c); the slots of ar_arith_ops say what each does. */
AR_NODISCARD ar_status ari_exact_grad_contract(ar_ctx *ctx, ar_param *p, const ar_tensor *dy, const ar_tensor *x,
                                               size_t samples, ar_comm *x_rows_over, const char *tag);
AR_NODISCARD ar_status ari_exact_grad_rows(ar_ctx *ctx, ar_param *p, const ar_tensor *terms, ar_cbuf row_of);
AR_NODISCARD ar_status ari_exact_grad_reduce(ar_ctx *ctx, ar_param *p, ar_comm *over, const char *tag);
AR_NODISCARD ar_status ari_exact_grad_value(ar_ctx *ctx, const ar_tensor *g, const ar_param *p);
AR_NODISCARD ar_status ari_exact_grad_zero(ar_ctx *ctx, ar_param *p);
AR_NODISCARD ar_status ari_exact_grad_ensure(ar_ctx *ctx, ar_param *p);
size_t ari_exact_grad_bytes(const ar_param *p);
void ari_exact_grad_release(ar_param *p);

size_t ari_exact_bucket_bytes(size_t n, ar_dtype storage);
AR_NODISCARD ar_status ari_exact_bucket_pack(ar_ctx *ctx, ar_queue *q, ar_buf bucket, size_t n, size_t at,
                                             ar_dtype storage, const ar_param *p);
AR_NODISCARD ar_status ari_exact_bucket_zero(ar_ctx *ctx, ar_queue *q, ar_buf bucket, size_t n, ar_dtype storage);
AR_NODISCARD ar_status ari_exact_bucket_reduce(ar_ctx *ctx, ar_queue *q, ar_buf bucket, size_t n, ar_dtype storage,
                                               ar_comm *over, const size_t *counts, const char *tag);
AR_NODISCARD ar_status ari_exact_bucket_put(ar_ctx *ctx, ar_queue *q, ar_buf bucket, ar_cbuf x, size_t n);
AR_NODISCARD ar_status ari_exact_bucket_take(ar_ctx *ctx, ar_queue *q, ar_buf y, ar_cbuf bucket, size_t n);
AR_NODISCARD ar_status ari_exact_bucket_unpack(ar_ctx *ctx, ar_queue *q, ar_param *p, ar_cbuf bucket, size_t n,
                                               size_t at, ar_dtype storage);

#endif
