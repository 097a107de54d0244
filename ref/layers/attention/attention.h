/* SPDX-License-Identifier: Apache-2.0 */
/* Internals of the attention layer: the module, and the steps between its two linear layers. */
#pragma once

#include "ref/layers/attention/context_parallel.h"
#include "ref/layers/linear/linear.h"

/* Norms of queries and keys. */
typedef struct ari_qk_norm {
    char name[2][ARI_PART_PATH];
    ar_param gain[2];
} ari_qk_norm;

typedef struct ari_attention {
    ar_module base;
    ar_attention_options o;
    ar_branch_split split;
    char qkv_name[3][ARI_PART_PATH], out_name[ARI_PART_PATH];
    ari_linear qkv, out;       /* the projections; qkv is not used by latent attention */
    struct ari_latent *latent; /* owned; NULL: no latent attention */
    ari_qk_norm norm;
    ar_param sinks;         /* [heads] if the options have sinks */
    size_t heads, kv_heads; /* heads on this tensor-parallel rank */
    size_t value_dim;       /* features of a value */
    size_t group_full;      /* query heads per KV head, counted over all ranks */
    int copies, kv_copies;  /* numbers of tensor-parallel ranks that hold each query head and each KV head */
    ar_comm *replicas;      /* ranks, among the tensor-parallel ranks and their inner neighbours, that work on this
                               rank's KV head but on none of its query heads; borrowed; NULL: none */
    ari_ring_transfers hops;
    int32_t *largest; /* QK-Clip: [heads of the model] ari_key32 of the largest logit in this step; NULL: not
                         requested */
    uint32_t largest_step;
    float *clip;              /* clip factors of the local features of q | k | v, then of those of all heads */
    ari_dropout dropout;      /* dropout of the probabilities */
    ar_buf cos, sin;          /* [positions, rotated pairs], computed for the longest sequence so far */
    size_t positions, length; /* length: ari_rope_length for which they were computed */
    ar_device *device;        /* the device that owns the tables */
} ari_attention;

/** View of features [b, s, width]: every `every`-th head of d from `first_head` on, [b, s, heads, d]. */
ar_tensor ari_heads_view(const ar_tensor *features, size_t first_head, size_t heads, size_t every, size_t d);
/** Returns queries (which 0), keys or values in the projections' output, or their gradients, as a view [b, s, heads,
 *  d]. */
ar_tensor ari_heads_of(const ari_attention *m, const ar_tensor *qkv, int which);
/** Returns the last part of a path inside the attention, relative to the attention's path. */
const char *ari_leaf_of(const ari_attention *m, const char *path);
/** Taps queries (which 0), keys or values [b, s, heads, d] of any strides as features [b, s, heads * d], one head after
 *  the other. */
AR_NODISCARD ar_status ari_tap_heads(const ari_attention *m, ar_ctx *ctx, int which, const char *part, char pass,
                                     const ar_tensor *t);
/** Computes the heads' concatenated outputs [b, s, heads * d] from the projections' output [b, s, q | k | v], which it
 *  releases. Taps the values in between. Errors: those of the device. */
AR_NODISCARD ar_status ari_attend(ari_attention *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *context, ar_tensor *qkv,
                                  const ar_batch *batch);
/** Computes the gradient of the projections' output from that of the heads' outputs. Releases the saved activations.
 *  Errors: those of the device and the communicator. */
AR_NODISCARD ar_status ari_attend_backward(ari_attention *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dqkv,
                                           const ar_tensor *dcontext);

/* --- queries, keys and values by low-rank projections (latent.c) -------------------------------------------------- */

/** Creates the layers of m->latent, or sets it to NULL if the options have none. Release it with ari_latent_destroy,
 *  also after an error. */
AR_NODISCARD ar_status ari_latent_create(ari_attention *m, ar_ctx *ctx);
void ari_latent_destroy(ari_attention *m);
size_t ari_latent_params(ari_attention *m, ar_param **out, size_t cap);
/** Sets the factors by which QK-Clip multiplies the rows of the head-sharded layers, borrowed; does nothing without
 *  latent attention. */
void ari_latent_clip(ari_attention *m, const float *queries, const float *keys);
/** Computes q | k | v of this rank's heads, [b, s, ..], from the attention's input with the placement that its layers
 *  need. */
AR_NODISCARD ar_status ari_latent_forward(ari_attention *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *qkv,
                                          const ar_tensor *x);
/** Computes the backward pass; dx NULL: not wanted. Collective over the tensor-parallel ranks. */
AR_NODISCARD ar_status ari_latent_backward(ari_attention *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx,
                                           const ar_tensor *dqkv);

/* --- QK-Clip (qk_clip.c) ------------------------------------------------------------------------------------------ */

/** Returns the memory for the largest logits of this step; *out NULL: not requested. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_qk_clip_track(int32_t **out, ari_attention *m, const ar_ctx *ctx);
/** Returns the module as an attention; NULL: another kind of module. */
ari_attention *ari_attention_of(ar_module *m);

/* --- norms of queries (which 0) and keys (1) (qk_norm.c) ---------------------------------------------------------- */

bool ari_qk_normed(const ari_attention *m);
/** Initialises the norms' parameters if the attention has them. Call _fini in any case, also after an error. */
AR_NODISCARD ar_status ari_qk_norm_init(ari_attention *m, ar_ctx *ctx);
void ari_qk_norm_fini(ari_attention *m);
size_t ari_qk_norm_params(ari_attention *m, ar_param **out, size_t cap);
/** Normalises x, a view of the projections' output, to y [b, s, heads, d], a view of *memory, which the caller
 *  releases. Collective over the tensor-parallel ranks if a norm covers all heads. */
AR_NODISCARD ar_status ari_qk_norm_forward(ari_attention *m, ar_ctx *ctx, ar_saved *saved, int which, ar_tensor *y,
                                           ar_tensor *memory, const ar_tensor *x);
/** Turns the gradient of y, a view of such a shape, into that of x. */
AR_NODISCARD ar_status ari_qk_norm_backward(ari_attention *m, ar_ctx *ctx, ar_saved *saved, int which,
                                            const ar_tensor *g);
