/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_ARITH_EXACT_H
#define ARI_ARITH_EXACT_H

#include "ref/arith/operand.h"

struct ar_operand {
    ari_extents x;
    size_t k_full;
    ar_comm *over[2];  /* groups that shard K; NULL: none */
    ar_packed *packed; /* [batch, rows, k] */
    ar_buf c;          /* int32 [batch, k], of B; ptr NULL: not equilibrated */
    ar_buf e;          /* int32 [batch, rows] */
    bool kept;         /* owned by a parameter's cache: c and e are device memory of their own */
    bool part;         /* of another operand: c and e are its */
    size_t counted;    /* bytes of `packed` in the step's memory; 0: kept */
};

/* Elements [start, start + count) of sums [batch, rows, cols], row-major, and what rounds them. */
typedef struct ari_sum_slice {
    ar_buf s; /* int64 [count] of `limbs` */
    int limbs;
    size_t start, count, rows, cols;
    ar_cbuf e, f;  /* int32, of matrix 0 */
    size_t e_step; /* from one matrix's row exponents to the next's */
} ari_sum_slice;

/** y = the slice rounded, matrix by matrix. */
AR_NODISCARD ar_status ari_exact_round(ar_ctx *ctx, ar_buf y, const ari_sum_slice *s);
/** Sums over the group of all `s->count` elements: each rank keeps a slice. `s->s` was memory of the step, and is the
 *  slice's afterwards. Done on q, where `reduced` is recorded; unless that is the context's queue, what was summed is
 *  then the caller's to end. */
AR_NODISCARD ar_status ari_exact_slice(ar_ctx *ctx, ari_sum_slice *s, ar_queue *q, ar_event *reduced, ar_comm *over,
                                       const char *tag);
/** y, of `total` elements, = all ranks' rounded slices; the own one is at its place. */
AR_NODISCARD ar_status ari_exact_gather(ar_ctx *ctx, ar_buf y, size_t total, ar_comm *over);
/** e = the maximum over a group, of n exponents; NULL: nothing to do. */
AR_NODISCARD ar_status ari_exact_max(ar_ctx *ctx, ar_comm *over, ar_buf e, size_t n, const char *tag);

/* Contractions in blocks (exact_blocks.c); the slots of ar_arith_ops say what each does. */
AR_NODISCARD ar_status ari_exact_blocks_begin(ar_ctx *ctx, ar_blocks **gives, const ar_tensor *b,
                                              const ar_blocks_options *o);
AR_NODISCARD ar_status ari_exact_blocks_measure(ar_ctx *ctx, ar_blocks *s, const ar_part *at, const ar_tensor *a);
AR_NODISCARD ar_status ari_exact_blocks_measured(ar_ctx *ctx, ar_blocks *s);
AR_NODISCARD ar_status ari_exact_blocks_add(ar_ctx *ctx, ar_blocks *s, const ar_part *at, const ar_tensor *a);
AR_NODISCARD ar_status ari_exact_blocks_end(ar_ctx *ctx, const ar_tensor *y, ar_blocks *s, ar_fold replicas);
/** operand_b over terms that the ranks of two groups have, crosswise. */
AR_NODISCARD ar_status ari_exact_operand_over(ar_ctx *ctx, ar_operand **gives, const ar_parts *b, bool scale,
                                              size_t k_full, ar_comm *const over[2], ar_comm *rows_over,
                                              const char *tag);

struct ar_param_grad {
    size_t n;  /* elements, in the order of the layer's matrix [out, in] */
    ar_buf t;  /* u8 [n] */
    ar_buf hl; /* int64 [2n] */
};

/* The gradient half of the exact arithmetic (exact_grad.c); the slots of ar_arith_ops say what each does. */
AR_NODISCARD ar_status ari_exact_grad_contract(ar_ctx *ctx, const ar_grad_terms *terms, int n, const ar_tensor *x,
                                               size_t samples, ar_comm *x_rows_over);
AR_NODISCARD ar_status ari_exact_grad_rows(ar_ctx *ctx, ar_param *p, const ar_tensor *terms, ar_cbuf row_of);
AR_NODISCARD ar_status ari_exact_grad_sum(ar_ctx *ctx, ar_param *p, ar_row_sum *borrows);
AR_NODISCARD ar_status ari_exact_grad_reduce(ar_ctx *ctx, ar_param *p, ar_comm *over, const char *tag);
AR_NODISCARD ar_status ari_exact_grad_value(ar_ctx *ctx, const ar_tensor *g, const ar_param *p);
AR_NODISCARD ar_status ari_exact_grad_zero(ar_ctx *ctx, ar_param *p);
AR_NODISCARD ar_status ari_exact_grad_ensure(ar_ctx *ctx, ar_param *p);
size_t ari_exact_grad_bytes(const ar_param *p);
void ari_exact_grad_release(ar_param *p, ar_queue *q);

size_t ari_exact_bucket_bytes(size_t n, ar_dtype storage);
AR_NODISCARD ar_status ari_exact_bucket_pack(ar_ctx *ctx, ar_queue *q, ar_buf bucket, size_t n, size_t at,
                                             ar_dtype storage, const ar_param *p);
AR_NODISCARD ar_status ari_exact_bucket_zero(ar_ctx *ctx, ar_queue *q, ar_buf bucket, size_t n, ar_dtype storage);
AR_NODISCARD ar_status ari_exact_bucket_reduce(ar_ctx *ctx, ar_queue *q, ar_buf bucket, size_t n, ar_dtype storage,
                                               ar_comm *over, const size_t *counts, const char *tag);
AR_NODISCARD ar_status ari_exact_bucket_put(ar_ctx *ctx, ar_queue *q, ar_buf bucket, ar_cbuf x, size_t n);
AR_NODISCARD ar_status ari_exact_bucket_take(ar_ctx *ctx, ar_queue *q, ar_buf y, ar_cbuf bucket, size_t n, size_t at,
                                             size_t count, ar_dtype storage);
AR_NODISCARD ar_status ari_exact_bucket_unpack(ar_ctx *ctx, ar_queue *q, ar_param *p, ar_cbuf bucket, size_t n,
                                               size_t at, ar_dtype storage);

#endif
