/* SPDX-License-Identifier: Apache-2.0 */
/* Parts of ar_grads: reading its input, gathering results, writing files. */
#pragma once

#include "anyrank/grads.h"
#include "ref/core/size.h"
#include "verify/reference/sensitivity.h"
#include "verify/run/cluster_run.h"
#include "verify/run/full_set.h"
#include "verify/writer/dump_ranks.h"

/* Places of the result's files. */
enum { ARI_OUTPUTS_FILE, ARI_GRADS_FILE, ARI_ACTIVATIONS_FILE, ARI_RANKS_FOLDER, ARI_ALLOWED_FILE };

/* --- what is gathered (gather.c) ---------------------------------------------------------------------------------- */

/* A full tensor assembled from tapped parts of the ranks. All ranks share one gatherer, and each writes only its
 * boxes. */
typedef struct ari_gathered {
    char tap[160]; /* name of the tap */
    char pass;
    ari_full_tensor full; /* the tensor, named as in the file */
    int file;             /* index of the file that contains the tensor */
} ari_gathered;

typedef struct ari_gatherer {
    ari_gathered *list;
    size_t count, capacity;
    /* config whose parameters have transformers' in-memory names in files; NULL: names of checkpoints */
    const ar_config *stacked;
} ari_gatherer;

/** Requests a tensor. Its values are zero until a rank reports them. */
AR_NODISCARD ar_status ari_gather_want(ari_gatherer *g, const char *tap, char pass, const char *name, int ndim,
                                       const size_t *shape, int file);
/** Writes the name of the tap of the logits from which a model with a head computes its loss. */
void ari_logits_name(char *name, size_t cap, const ar_config *c);
/** Requests the logits [b, s, V] under that tap. */
AR_NODISCARD ar_status ari_gather_want_logits(ari_gatherer *g, const ar_config *c, const ar_batch *b, int file);
/** Collects a reported value. Has the type ar_tap_fn; user: the ari_gatherer that all ranks share. */
AR_NODISCARD ar_status ari_gather_tap(void *user, const ar_tap_event *event);
void ari_gatherer_fini(ari_gatherer *g);
/** Checks that every element of every requested tensor was reported exactly once. AR_ERR_INTERNAL names the first
 *  tensor that was not. */
AR_NODISCARD ar_status ari_gather_check(const ari_gatherer *g);
enum { ARI_GATHER_FILES = 3 };
/** Writes all files, file i to path[i]. Every file is complete before the first is renamed, so a failure keeps the
 *  existing files. targets: of the batch. files: at most ARI_GATHER_FILES. placement[i]: value of ANYRANK_PLACEMENT in
 *  file i, or NULL. */
AR_NODISCARD ar_status ari_gather_write(const ari_gatherer *g, size_t targets, int files, const char *const *path,
                                        const char *const *placement);
/** SHA-256 over all tensors of the first `files` files, by name. */
AR_NODISCARD ar_status ari_gather_hash(const ari_gatherer *g, int files, char hex[65]);

/* Listeners of a run's ranks: the gatherer of outputs and gradients, and if requested a dump listener for each rank. */
typedef struct ari_grads_taps {
    ari_gatherer *outputs;
    ari_dump_ranks ranks; /* empty: not requested */
    ari_tap_pair *tap;    /* [world] */
    void **user;          /* [world] the same listeners, for ari_tap_both */
} ari_grads_taps;

AR_NODISCARD ar_status ari_grads_taps_create(ari_grads_taps *t, ari_gatherer *outputs, const ar_grads_options *o);
void ari_grads_taps_fini(ari_grads_taps *t);
/** Assembles the ranks' tensors as full tensors of the gatherer's file `file`, named as in the ranks' dumps.
 *  is_retained: the ranks keep their parts. Errors: AR_ERR_MEMORY, AR_ERR_ARG (a name is too long). */
AR_NODISCARD ar_status ari_grads_merge(ari_grads_taps *t, int file, bool is_retained);
/** Returns the text of ANYRANK_PLACEMENT for such a file, in execution order. Release *out with free(). */
AR_NODISCARD ar_status ari_grads_order(char **out, const ari_gatherer *g, int file);
/** Writes allowances of all tensors of a reference; requested tensors also appear under their names in the files. */
AR_NODISCARD ar_status ari_gather_write_allowed(const ari_gatherer *g, const ari_reference *ref, const char *path,
                                                ar_sensitivity sensitivity, const char *hash);

/* --- log-probabilities (logprobs.c) ------------------------------------------------------------------------------- */

/** Runs ar_grads if `logprobs` is given. */
AR_NODISCARD ar_status ari_grads_logprobs(ar_grads_result *result, const ar_grads_options *o);

/* --- a batch (input_batch.c) -------------------------------------------------------------------------------------- */

/* A batch read from a file, with the arrays it owns. */
typedef struct ari_input_batch {
    ar_batch batch;
    ari_arena arena;   /* owns the batch's arrays */
    char note[4][320]; /* notes on what the user may not expect; "" if unused */
} ari_input_batch;

/** Loads a batch: input_ids [b, s]; optionally labels [b, s], position_ids [b|1, s], attention_mask ([b, s] of 0 and 1,
 *  or additive [b|1, heads|1, s, s]), and cu_seqlens, the bounds of packed documents: [n + 1] from 0 to b*s including
 *  every row's end, or [b, n + 1], each from 0 to s. transformers' cu_seq_lens_q and _k mean the same. Errors: those of
 *  the file; AR_ERR_NOT_FOUND, AR_ERR_SHAPE, AR_ERR_DTYPE, AR_ERR_DATA by tensor and index; AR_ERR_UNSUPPORTED (any
 *  other tensor, which would be ignored; positions for a model without them). */
AR_NODISCARD ar_status ari_input_batch_load(ari_input_batch *b, const ar_config *c, const char *path);
void ari_input_batch_fini(ari_input_batch *b);

/* --- a block (block_case.c) --------------------------------------------------------------------------------------- */

/* A transformer block with given inputs: a folder with case.json (batch, seq, hidden, heads, kv_heads, ffn, causal,
 * eps, activation) and inputs.safetensors (x, dy [b, s, h]; ln1_weight, ln1_bias, wq, wk, wv, wo, ln2_weight, ln2_bias,
 * w1, b1, w2, b2; weights [out, in]). The block is layer 0 of a stack. */
typedef struct ari_block_case {
    ar_config config;
    ar_batch batch; /* sizes only */
    ar_plan plan;
    float *values[16]; /* x, dy, then the parameters, in a fixed order */
} ari_block_case;

AR_NODISCARD ar_status ari_block_case_load(ari_block_case *b, const char *folder);
void ari_block_case_fini(ari_block_case *b);
/** Wants y, dx and d<parameter> in file 0. */
AR_NODISCARD ar_status ari_block_case_want(const ari_block_case *b, ari_gatherer *g);
/** Runs the baseline for the case with the options o and the case's weights. Errors: those of ari_baseline_block. */
AR_NODISCARD ar_status ari_block_case_baseline(const ari_block_case *b, const ar_baseline_options *o);
/** Runs forward and backward on one rank; user: the case. Collective. */
AR_NODISCARD ar_status ari_block_case_run(void *user, ar_ctx *ctx);
