/* SPDX-License-Identifier: Apache-2.0 */
/* Softmax attention: queries at some positions of every sequence, over the keys and values of all positions. */
#pragma once

#include "ref/layers/attention/blocks.h"
#include "ref/layers/parts.h"

/* A rank's part of an attention. Query heads are ordered by KV head, heads/kv_heads for each. */
typedef struct ari_core {
    const char *name;       /* the attention's path, for tags and taps */
    size_t heads, kv_heads; /* heads on this rank */
    size_t heads_full;      /* query heads of the model */
    size_t head_start;      /* the model's number of the first head on this rank */
    size_t group_full;      /* query heads per KV head, counted over all ranks */
    int copies;             /* number of tensor-parallel ranks that compute the same heads */
    ar_comm *replicas;      /* ranks that work on the same KV head and other query heads; NULL: none */
    size_t seq;             /* keys, values */
    ar_positions rows;      /* positions of the queries, in order */
    bool causal;
    size_t window;              /* 0: no window */
    double query_scalar, cap;   /* scores are divided by the square root of the first, and limited by the second; cap
                                   0: no limit */
    const ari_dropout *dropout; /* dropout of the probabilities */
    ar_param *sinks;            /* one logit per head, for the local heads from first_sink on; NULL: no sinks */
    size_t first_sink;
    int32_t *largest; /* [heads_full]: ari_key32 of each head's largest logit so far, updated; NULL: not recorded */
} ari_core;

/** Computes o = softmax(q k^T / sqrt(d)) v. q: [b, heads, rows, d]; o: the same with v's features; k, v: [b,
 *  kv_heads, seq, d] in the order of positions, v with its own number of features. o is a new tensor. Taps the
 *  probabilities. Saves what the backward pass needs in addition to q, k and v under `owner`. Errors: those of
 *  device and arithmetic. */
AR_NODISCARD ar_status ari_core_forward(const ari_core *c, ar_ctx *ctx, ar_saved *saved, const void *owner,
                                        ar_tensor *o, const ar_tensor *q, const ar_tensor *k, const ar_tensor *v,
                                        const ar_batch *batch);

/** Computes the gradients of q, k and v from dout, the gradient of o, as new tensors: g[0] [b, heads, rows, d], g[1],
 *  g[2] [b, kv_heads, rows, d], each with the features of its value, for the keys and values at the positions of the
 *  local queries. A KV head's dk and dv are one contraction over the query heads of its group and all queries, on
 *  whichever ranks they are, and are complete on every rank of `replicas`. Collective over replicas and the ring. Adds
 *  to the gradient of the sinks. Releases the saved activations. */
AR_NODISCARD ar_status ari_core_backward(const ari_core *c, ar_ctx *ctx, ar_saved *saved, const void *owner,
                                         ar_tensor g[3], const ar_tensor *dout, const ar_tensor *q, const ar_tensor *k,
                                         const ar_tensor *v);

/* Saved activations of an attention besides q, k and v. An object of the step. */
typedef struct ari_core_saved {
    size_t batch;
    ari_keys *visible;                 /* [b, rows], in host memory: the keys that a query sees by order alone; NULL:
                                          no documents */
    ari_keys *visible_union;           /* [rows], in host memory: the keys that it sees in any sample; NULL: not read */
    ar_tensor keys, padding, additive; /* keys on the device, and the masks; additive: for this rank's rows */
    ar_tensor max, sum;                /* maxima (int32) and sums (f64) of the scores' rows, [b * heads * rows] */
} ari_core_saved;

/** Creates an empty state with the masks of a batch. It lives until the end of the step or until ari_step_disown.
 *  Errors: AR_ERR_MEMORY, AR_ERR_SHAPE (a sequence too long to number), those of the device. */
AR_NODISCARD ar_status ari_core_masks(const ari_core *c, ar_ctx *ctx, ari_core_saved **out, const ar_batch *batch);
/** Returns the masks in the form of the device's slots. */
ar_mask ari_core_mask(const ari_core *c, const ari_core_saved *state);
/** Returns the order of positions, without documents. */
ari_order ari_core_order(const ari_core *c);
