/* SPDX-License-Identifier: Apache-2.0 */
/* Sequence parallelism: between the tensor-parallel regions rank r of N holds positions [r*s/N, (r+1)*s/N) of every
 * sequence, [.., s/N, features]; inside them it sees all positions. What moves between the two. All of it is contiguous
 * fp32; the dimensions before the sequence are the samples. */
#ifndef ARI_LAYERS_SEQUENCE_H
#define ARI_LAYERS_SEQUENCE_H

#include "anyrank/layers.h"
#include "ref/core/context.h"

/** The ranks that share the positions of a sequence: 1 without sequence parallelism. */
size_t ari_sequence_ranks(const ar_ctx *ctx);
/** The token of [b, s] that row i of the token rows is: i, or in the order of the ranks that hold the positions. */
size_t ari_token_at(const ar_ctx *ctx, const ar_batch *batch, size_t i);
/** y [.., s, f] of all ranks' x [.., s/N, f]: an all-gather, put in the order of the sequences. */
AR_NODISCARD ar_status ari_gather_tokens(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, const char *tag);
/** The own positions of an x that is whole here. Errors: AR_ERR_INDIVISIBLE. */
AR_NODISCARD ar_status ari_own_tokens(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x);
/** A fresh tensor for the own positions of x [.., s, ..], with `features` features. Errors: AR_ERR_INDIVISIBLE. */
AR_NODISCARD ar_status ari_like_own_tokens(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, size_t features);

/** Rows [tokens, f] of x [.., s, f] in the order of the ranks that hold them, which is how a reduce-scatter hands them
 *  out: all samples' positions of rank 0, then those of rank 1. A copy, or with one sample x's own memory;
 *  ari_release_rows. Errors: AR_ERR_INDIVISIBLE. */
AR_NODISCARD ar_status ari_rank_major(ar_ctx *ctx, ar_tensor *rows, const ar_tensor *x);
void ari_release_rows(ar_ctx *ctx, ar_tensor *rows, const ar_tensor *x);
/** The all-gather alone: rows [tokens, f] in that order. */
AR_NODISCARD ar_status ari_gather_rank_major(ar_ctx *ctx, ar_tensor *rows, const ar_tensor *x, const char *tag);
/** y [.., s/N, f] = the own positions of the fp32 sum over ranks of x [.., s, f]: a reduce-scatter. */
AR_NODISCARD ar_status ari_scatter_tokens(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, const char *tag);
/** y [.., s/N, f] = the own positions of rows [tokens, f] in the order of the ranks, of which one rank has each and the
 * others zero bits: a selection, on int32. `y` has its shape. */
AR_NODISCARD ar_status ari_select_tokens(ar_ctx *ctx, const ar_tensor *y, const ar_tensor *rows, const char *tag);

#endif
