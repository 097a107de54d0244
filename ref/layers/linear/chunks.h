/* SPDX-License-Identifier: Apache-2.0 */
/* Values sharded by tokens, split into chunks so that the collective of one chunk overlaps with the product of another
 * (ar_parallel.overlap). */
#pragma once

#include "ref/layers/parts.h"

/* Chunks of positions: chunk i has the positions [i * each, (i + 1) * each) of each rank's positions of every sample,
 * and the last chunk has the rest. Its rows are ordered by rank, and within a rank by sample, as an all-gather produces
 * them and a reduce-scatter consumes them. */
typedef struct ari_chunks {
    size_t n; /* number of chunks; 1: not divided */
    size_t ranks, samples;
    size_t local_seq, chunk_seq; /* positions of a rank, and of a chunk */
} ari_chunks;

/** Divides x [.., s, f] with all positions, or (is_local) the rank's part of it, into ctx->overlap chunks of equal
 *  length, or fewer if there are fewer positions; one chunk without overlap or without sequence parallelism. */
ari_chunks ari_chunks_of(const ar_ctx *ctx, const ar_tensor *x, bool is_local);
/** The rows of chunk i, of all ranks. */
size_t ari_chunk_rows(const ari_chunks *c, size_t i);
/** Returns chunk i of a contiguous t, with all or the rank's positions, as a view [ranks or 1, samples, positions,
 *  f]. */
ar_tensor ari_chunk_view(const ari_chunks *c, const ar_tensor *t, size_t i, bool is_local);
/** Puts the rows of chunk i [rows, f], contiguous, to their places in t. */
AR_NODISCARD ar_status ari_chunk_put(ar_ctx *ctx, const ari_chunks *c, const ar_tensor *t, size_t i, bool is_local,
                                     const ar_tensor *rows);

/* All-gather of x, the local positions, in chunks on the queue of ari_ctx_overlapped: chunk i + 1 is gathered while the
 * context's queue works on chunk i. Needs memory for two chunks. An object of the step. */
typedef struct ari_gathering ari_gathering;
/** Enqueues the gather of the first chunk. x is borrowed and must exist until the last chunk has arrived. Collective
 *  over tp, as are the following functions. Errors: those of memory, device, queue and communicator. */
AR_NODISCARD ar_status ari_gather_begin(ar_ctx *ctx, ari_gathering **out, const ar_tensor *x, const ari_chunks *c,
                                        const char *tag);
/** Returns the rows of chunk i, for i from 0 in order, after the context's queue has waited for them, and enqueues the
 *  next chunk. The rows are valid until the next call. Errors: also the first error of the queue. */
AR_NODISCARD ar_status ari_gather_chunk(ar_ctx *ctx, ari_gathering *g, size_t i, ar_tensor *rows);
/** Ends a gathering after everything has arrived. */
void ari_gather_end(ar_ctx *ctx, ari_gathering *g);
/** Returns in *gathered all of a gathering with one chunk, ordered by sequence, as a tensor of the step. Ends the
 *  gathering. */
AR_NODISCARD ar_status ari_gather_full(ar_ctx *ctx, ari_gathering *g, ar_tensor *gathered);
