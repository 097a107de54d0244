/* SPDX-License-Identifier: Apache-2.0 */
/* What several layers need: taps by path and part, shapes, moves along features. */
#ifndef ARI_LAYERS_PARTS_H
#define ARI_LAYERS_PARTS_H

#include "anyrank/layers.h"
#include "ref/core/context.h"

/* Taps of "base" or "base.part". Dimension 0 is the samples, of which this rank may hold some only (ar_ctx_place). */
/** A value between the tensor-parallel regions, [.., s, features]: whole on every rank, or with sequence parallelism
 * the rank's positions. */
AR_NODISCARD ar_status ari_tap_tokens(ar_ctx *ctx, const char *base, const char *part, char pass, const ar_tensor *t);
/** A value of which every rank of the tensor-parallel group holds all positions and features. */
AR_NODISCARD ar_status ari_tap_whole(ar_ctx *ctx, const char *base, const char *part, char pass, const ar_tensor *t);
/** A value sharded along dimension `dim`, whose full extent is `full`. */
AR_NODISCARD ar_status ari_tap_shard(ar_ctx *ctx, const char *base, const char *part, char pass, const ar_tensor *t,
                                     int dim, size_t full);
/** The same where every part is on `copies` neighbouring ranks. */
AR_NODISCARD ar_status ari_tap_copies(ar_ctx *ctx, const char *base, const char *part, char pass, const ar_tensor *t,
                                      int dim, size_t full, int copies);

/** AR_ERR_SHAPE, naming `name` and `what`, unless t is contiguous, has tokens and `features` features. */
AR_NODISCARD ar_status ari_check_features(const char *name, const char *what, const ar_tensor *t, size_t features);
/** The ids whose rows of a vocabulary of `vocab` this rank holds: [start, start + rows). */
void ari_own_ids(ar_ctx *ctx, size_t vocab, size_t *start, size_t *rows);
/** x's shape with another last extent. */
AR_NODISCARD ar_status ari_like(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, size_t features);
/** The own block of features of a replicated x (contiguous), as a fresh contiguous tensor. */
AR_NODISCARD ar_status ari_own_features(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x);
/** Value of the whole world: no dimension is shared out (the loss). */
AR_NODISCARD ar_status ari_tap_world(ar_ctx *ctx, const char *name, char pass, const ar_tensor *t);

/** All ranks' features side by side. x contiguous, of equal width on every rank. */
AR_NODISCARD ar_status ari_gather_features(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, const char *tag);
/** "base.part" into out[cap]; part NULL: base. Errors: AR_ERR_ARG (too long). */
AR_NODISCARD ar_status ari_path(char *out, size_t cap, const char *base, const char *part);

/** Errors: AR_ERR_DATA (a position of the batch, with its place, that is not in [0, positions)). */
AR_NODISCARD ar_status ari_check_positions(const ar_batch *batch, size_t positions);

#endif
