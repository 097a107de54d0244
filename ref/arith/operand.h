/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/arith.h"

/* Slots of ar_arith_ops that each arithmetic fills with a function of the same name. anyrank/arith.h documents them. */
/* clang-format off */
#define ARI_ARITH_SLOTS(X) \
    X(operand_b) X(operand_a) X(param_operand) X(operand_bytes) X(operand_part) X(contract) X(fold) X(round) \
    X(blocks_begin) X(blocks_measure) X(blocks_measured) X(blocks_add) X(blocks_end) X(grad_contract) X(grad_rows) \
    X(grad_sum) X(grad_reduce) X(grad_value) X(grad_zero) X(bucket_bytes) X(bucket_pack) X(bucket_zero) \
    X(bucket_room) X(bucket_reduce) X(bucket_unpack) X(bucket_take) X(grad_ensure) X(grad_bytes) X(grad_release) \
    X(operand_release) X(param_release)
/* clang-format on */

/* Extents of a contraction's operand, checked in the same way by both arithmetics. */
typedef struct ari_extents {
    size_t batch, rows, k;
    int batch_dims;
    size_t batch_shape[AR_MAX_DIMS];
} ari_extents;

/** Computes the extents of `p` as a whole. Errors: AR_ERR_SHAPE (parts do not fit), AR_ERR_ARG, AR_ERR_DTYPE. */
AR_NODISCARD ar_status ari_parts_extents(ari_extents *x, const ar_parts *p);

/** Checks that a product with the rows of `a` can be reduced in this way on this queue. Errors: AR_ERR_INDIVISIBLE (the
 *  rows cannot be scattered), AR_ERR_UNSUPPORTED (scattering several matrices; another queue than the context's without
 *  scattering). */
AR_NODISCARD ar_status ari_check_fold(const ar_ctx *ctx, const ari_extents *a, const ar_queue *q, const ar_comm *group,
                                      ar_fold method, const char *tag);

/** Checks that an operand has this part; several matrices are only used as a whole. Errors: AR_ERR_SHAPE. */
AR_NODISCARD ar_status ari_check_part(const ari_extents *x, const ar_part *part);

/** Checks that b can be the B of a contraction in blocks. Errors: AR_ERR_SHAPE, AR_ERR_INDIVISIBLE (the number of
 *  places does not divide the rows). */
AR_NODISCARD ar_status ari_check_blocks(const ari_extents *b, const ar_blocks_options *o);
/** The number of places. */
static inline size_t ari_places(const ar_blocks_options *o)
{
    return o->places ? (size_t)ar_comm_size(o->places) : 1;
}
/** Returns the part of [places * batch, each, n] for a block of the result: the rows of a place follow all rows of the
 *  previous place. The block's rows belong to one place; with several matrices it has all rows of the only place. */
static inline ar_part ari_place_part(const ar_part *part, size_t batch, size_t place_rows, size_t n)
{
    return (ar_part){.matrix = part->row / place_rows * batch + part->matrix,
                     .matrices = part->matrices,
                     .row = part->row % place_rows,
                     .rows = part->rows,
                     .cols = n};
}

/** Checks that the shapes of A and B match. Errors: AR_ERR_SHAPE. */
AR_NODISCARD ar_status ari_check_pair(const ari_extents *a, const ari_extents *b, const char *tag);

/** Computes how many of `total` elements each rank of a group has, in units of `width`. The parts are equal runs of
 *  full rows if the group divides the rows. Release *out with free(). */
AR_NODISCARD ar_status ari_slice_counts(size_t **out, const ar_comm *group, size_t total, size_t width);

/** Checks that g has `rows` rows, and splits them into samples. Errors: AR_ERR_SHAPE. */
AR_NODISCARD ar_status ari_check_groups(const ar_groups *g, size_t rows, const char *tag);
/** Rows of a group of t, as a view. */
static inline ar_tensor ari_group_rows(const ar_tensor *t, const ar_groups *g, size_t i)
{
    return ar_tensor_slice(t, 0, g->first[i], g->first[i + 1] - g->first[i]);
}

/** Slots contract_groups and grad_groups of native numerics: process one group after the other. */
extern __typeof__(*((ar_arith_ops *)0)->contract_groups) ari_native_contract_groups;
extern __typeof__(*((ar_arith_ops *)0)->grad_groups) ari_native_grad_groups;

/** Returns y itself, or fp32 memory of its shape if y has fewer bits. ari_wide_end rounds that memory to y and frees
 *  it. */
AR_NODISCARD ar_status ari_wide_begin(ar_ctx *ctx, ar_tensor *wide, const ar_tensor *y);
AR_NODISCARD ar_status ari_wide_end(ar_ctx *ctx, const ar_tensor *y, ar_tensor *wide);

/** Allocates p's gradient from dy [tokens, out] and x [tokens, in] if p requires one; *is_trained tells whether it
 *  does. Errors: AR_ERR_SHAPE, those of grad_ensure. */
AR_NODISCARD ar_status ari_grad_begin(ar_ctx *ctx, bool *is_trained, ar_param *p, const ar_tensor *dy,
                                      const ar_tensor *x);

/** Slot operand_done. */
void ari_operand_done(ar_ctx *ctx, const ar_operand *o);

/** Adds the virtual time of a product of operands with these extents. Both arithmetics count the FLOPs of a
 *  floating-point GEMM, so a run in exact numerics predicts the time of the native run. Call it where the product is
 *  computed. */
void ari_work_of_product(const ari_extents *a, const ari_extents *b);
/** Adds the virtual time of a gradient [out, in], a sum over `tokens` tokens. */
void ari_work_of_gradient(size_t out, size_t in_features, size_t tokens);

/** True if a group has peers. */
static inline bool ari_has_peers(ar_comm *c)
{
    return c && ar_comm_size(c) > 1;
}

/** Returns the first element of this rank's share; shares are consecutive in rank order. */
static inline size_t ari_share_start(const ar_comm *c, const size_t *counts)
{
    size_t start = 0;
    for (int r = 0; r < ar_comm_rank(c); r++)
        start += counts[r];
    return start;
}
