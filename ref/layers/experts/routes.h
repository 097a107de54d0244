/* SPDX-License-Identifier: Apache-2.0 */
/* Routes of a pass's tokens. Slot i = t*k + j is the j-th of the k experts of token t, ascending. The slots sorted by
 * expert, then by number, are the rows that a rank sends. A rank's experts work on rows sorted by expert, then by
 * sample, then by sending rank, so the rows of a sample are contiguous. If every rank has all experts, both are the
 * same rows. */
#pragma once

#include "ref/layers/parts.h"

typedef struct ari_routes {
    size_t k;          /* experts of a token */
    ar_groups groups;  /* rows of each of this rank's experts */
    ar_tensor place;   /* int64 [slots] row of each slot among the sent rows; of the step */
    ar_tensor slot_of; /* int64 [slots] slot of each sent row; of the step */
    size_t rows;       /* rows of the experts on this rank */
    /* only with expert-parallel ranks, else NULL */
    size_t *sends, *receives; /* rows to and from each rank */
    ar_tensor arrived,
        departed; /* int64 [rows]: index of each expert row among the received rows (for gathered tokens, its slot
                     among all ranks'), and the index from which it is sent back */
    size_t *first_row, *sample, *known_rows; /* arrays of `groups` */
    ari_arena memory;                        /* memory of these arrays and of the numbers of rows */
} ari_routes;

/* Inputs of the routes. */
typedef struct ari_routing {
    const ar_tensor
        *gathered_experts; /* int32 [ranks, tokens, k] on the device: experts for the tokens of all expert-parallel
                              ranks */
    size_t experts;        /* number of experts in the layer */
    size_t samples;        /* number of this rank's samples, each a run of consecutive tokens */
    const char *name;      /* name of the router, for messages */
} ari_routing;

/** Gathers expert [tokens, k], which ends, into *gathered. Collective over the expert-parallel ranks. */
AR_NODISCARD ar_status ari_routes_gather(ar_ctx *ctx, ar_tensor *gathered, ar_tensor *expert, const char *tag);
/** Returns this rank's part of *gathered, [tokens, k], as a view. */
ar_tensor ari_routes_local(const ar_ctx *ctx, const ar_tensor *gathered);
/** Creates y, f32, for a listener. value NULL: [.., k], the experts [tokens, k] as numbers; otherwise [.., experts], +0
 *  except for the values [tokens, k] of each token's experts. x gives y's other extents. */
AR_NODISCARD ar_status ari_routes_as_numbers(ar_ctx *ctx, ar_tensor *y, const ar_tensor *expert, const ar_tensor *value,
                                             size_t experts, const ar_tensor *x);
/** Computes the routes. Call ari_routes_end, also if it fails. Errors: AR_ERR_DATA (a token's logit is NaN; the message
 *  names it), AR_ERR_MEMORY, those of the device. */
AR_NODISCARD ar_status ari_routes_make(ari_routes *gives, ar_ctx *ctx, const ari_routing *routing);
void ari_routes_end(ari_routes *r, ar_ctx *ctx);
/** Dispatches rows: y [rows, h] for this rank's experts from all ranks' tokens x [.., h], times the weights of their
 *  slots [tokens, k] (NULL: unweighted). The second function returns the rows of this rank's slots from the experts'
 *  rows, which it releases if there are peers. */
AR_NODISCARD ar_status ari_routes_send(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, const ar_tensor *weight,
                                       const ari_routes *r, const char *tag);
AR_NODISCARD ar_status ari_routes_return(ar_ctx *ctx, ar_tensor *y, ar_tensor *x, const ari_routes *r, const char *tag);
/** Computes y, shaped like x: for each token the sum of its slots' expert rows, times their weights unless weight is
 *  NULL. */
AR_NODISCARD ar_status ari_routes_combine(ar_ctx *ctx, ar_tensor *y, const ar_tensor *rows, const ar_tensor *weight,
                                          const ari_routes *r, const ar_tensor *x);
