/* SPDX-License-Identifier: Apache-2.0 */
/* Values sharded by tokens, split into chunks so that the collective of one chunk overlaps with the product of another
 * (ar_parallel.overlap). */
#pragma once

#include "ref/layers/parts.h"

/* Chunks of positions: chunk i has the positions [i * each, (i + 1) * each) of each rank's positions of every sample,
 * and the last chunk has the rest. Its rows are ordered by rank, and within a rank by sample, as an all-gather produces
 * them and a reduce-scatter consumes them. */
typedef struct ari_chunks {
    size_t n; /* 1: nothing is cut */
    size_t ranks, samples;
    size_t local_seq, chunk_seq; /* positions: of a rank; of a chunk */
} ari_chunks;

/** Cuts x [.., s, f] of all positions, or (own) the rank's part of it, into ctx->overlap chunks of equal length, or as
 *  many as have a position; one chunk without overlap or without sequence parallelism. */
ari_chunks ari_chunks_of(const ar_ctx *ctx, const ar_tensor *x, bool is_local);
/** The rows of chunk i, of all ranks. */
size_t ari_chunk_rows(const ari_chunks *c, size_t i);
/** Chunk i of a contiguous t, all positions or the own ones, as a view [ranks or 1, samples, positions, f]. */
ar_tensor ari_chunk_view(const ari_chunks *c, const ar_tensor *t, size_t i, bool is_local);
/** Puts the rows of chunk i [rows, f], contiguous, to their places in t. */
AR_NODISCARD ar_status ari_chunk_put(ar_ctx *ctx, const ari_chunks *c, const ar_tensor *t, size_t i, bool is_local,
                                     const ar_tensor *rows);

/* All-gather of x, the local positions, in chunks on the queue of ari_ctx_overlapped: chunk i + 1 is gathered while the
 * context's queue works on chunk i. Needs memory for two chunks. An object of the step. */
typedef struct ari_gathering ari_gathering;
/** Enqueues the first chunk. x, which is borrowed, stays until the last has come. Collective over tp, as is what
 *  follows. Errors: what memory, device, queue and communicator give. */
AR_NODISCARD ar_status ari_gather_begin(ar_ctx *ctx, ari_gathering **out, const ar_tensor *x, const ari_chunks *c,
                                        const char *tag);
/** Rows of chunk i, in their turn from 0 on, once the context's queue has waited for them; the chunk after it is
 *  enqueued. Until the next call. Errors: also the first one of the queue. */
AR_NODISCARD ar_status ari_gather_chunk(ar_ctx *ctx, ari_gathering *g, size_t i, ar_tensor *rows);
/** Ends it, once all has come. */
void ari_gather_end(ar_ctx *ctx, ari_gathering *g);
/** whole = all of a gathering of one chunk, in the order of the sequences: a tensor of the step. Ends the gathering. */
AR_NODISCARD ar_status ari_gather_full(ar_ctx *ctx, ari_gathering *g, ar_tensor *gathered);
