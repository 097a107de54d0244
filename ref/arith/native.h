/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_ARITH_NATIVE_H
#define ARI_ARITH_NATIVE_H

#include "anyrank/arith.h"

struct ar_param_grad {
    size_t n;
    ar_buf sum; /* fp32 [n], in the order of the layer's matrix [out, in] */
};

/* Buckets of the native arithmetic (native_bucket.c); the slots of ar_arith_ops say what each does. */
size_t ari_native_bucket_bytes(size_t n, ar_dtype storage);
AR_NODISCARD ar_status ari_native_bucket_pack(ar_ctx *ctx, ar_queue *q, ar_buf bucket, size_t n, size_t at,
                                              ar_dtype storage, const ar_param *p);
AR_NODISCARD ar_status ari_native_bucket_zero(ar_ctx *ctx, ar_queue *q, ar_buf bucket, size_t n, ar_dtype storage);
AR_NODISCARD ar_status ari_native_bucket_reduce(ar_ctx *ctx, ar_queue *q, ar_buf bucket, size_t n, ar_dtype storage,
                                                ar_comm *over, const size_t *counts, const char *tag);
AR_NODISCARD ar_status ari_native_bucket_unpack(ar_ctx *ctx, ar_queue *q, ar_param *p, ar_cbuf bucket, size_t n,
                                                size_t at, ar_dtype storage);

#endif
