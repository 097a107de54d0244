/* SPDX-License-Identifier: Apache-2.0 */
/* Functions that several layers share: taps by path and part, shapes, redistribution between tensor-parallel ranks,
 * dropout. */
#pragma once

#include "anyrank/arith.h"
#include "anyrank/layers.h"
#include "anyrank/loss.h"
#include "anyrank/parallel.h"
#include "anyrank/param.h"
#include "ref/context/context.h"
#include "ref/core/size.h"
#include "ref/record/ledger.h"

ARI_OWNER(ar_loss, ar_loss_destroy)
ARI_OWNER(ar_module, ar_module_destroy)
ARI_OWNER(ar_saved, ar_saved_destroy)

/* Taps of "base" or "base.part". Dimension 0 is the samples, of which this rank may hold only some
 * (ari_ctx_place_batch). With three or more dimensions the last but one is the positions, of which it may hold only
 * some (ari_local_positions). */
/** Taps a value between the tensor-parallel regions, [.., s, features]: replicated, or with sequence parallelism the
 *  rank's positions. */
AR_NODISCARD ar_status ari_tap_tokens(ar_ctx *ctx, const char *base, const char *part, char pass, const ar_tensor *t);
/** Taps a value of which every rank of the tensor-parallel group holds all positions and features. */
AR_NODISCARD ar_status ari_tap_full(ar_ctx *ctx, const char *base, const char *part, char pass, const ar_tensor *t);
/** Taps a value sharded along dimension `dim`, whose full extent is `full`; `copies` neighbouring ranks have each
 *  part. */
AR_NODISCARD ar_status ari_tap_copies(ar_ctx *ctx, const char *base, const char *part, char pass, const ar_tensor *t,
                                      int dim, size_t full, int copies);
/** Taps an attention value [b, heads, rows, keys]: `heads` query heads from head_start on, the positions of the queries
 *  `rows` among all `seq`, and all keys or a digest of them; replicated on `copies` adjacent tensor-parallel ranks. */
AR_NODISCARD ar_status ari_tap_queries(ar_ctx *ctx, const char *base, const char *part, char pass, const ar_tensor *t,
                                       size_t heads, size_t head_start, int copies, const ar_positions *rows,
                                       size_t seq);
/** Taps a host number like ari_tap_world. */
AR_NODISCARD ar_status ari_tap_number(ar_ctx *ctx, const char *name, char pass, float value);
/** Taps a value of the whole world, such as the loss, in which no dimension is sharded. */
AR_NODISCARD ar_status ari_tap_world(ar_ctx *ctx, const char *name, char pass, const ar_tensor *t);

/** AR_ERR_SHAPE, naming `name` and `label`, unless t is contiguous, has tokens and `features` features. */
AR_NODISCARD ar_status ari_check_features(const char *name, const char *label, const ar_tensor *t, size_t features);
/** Checks that t is F32 or BF16 like `like`, contiguous, and of the shape of `like`, with at least one dimension.
 *  Errors: AR_ERR_DTYPE, AR_ERR_SHAPE, naming `label`. */
AR_NODISCARD ar_status ari_check_rows(const char *label, const ar_tensor *t, const ar_tensor *like);
/** AR_ERR_SHAPE, naming p, unless it is a vector as long as x's rows. */
AR_NODISCARD ar_status ari_check_vector(const ar_param *p, const ar_tensor *x);
/** Computes which rows of a vocabulary this rank holds: ids [start, start + rows). */
void ari_local_ids(ar_ctx *ctx, size_t vocab, size_t *start, size_t *rows);
/** x's shape and dtype with another last extent. */
AR_NODISCARD ar_status ari_like(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, size_t features);
/** Does the same with another extent of the dimension before the last. */
AR_NODISCARD ar_status ari_like_tokens(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, size_t positions,
                                       size_t features);
/** Separates the pairs (0, 1), (2, 3), .. of the source's last features into all even and then all odd ones, or the
 *  reverse. */
AR_NODISCARD ar_status ari_part_pairs(ar_ctx *ctx, const ar_tensor *dst, const ar_tensor *src, bool deinterleave);
/** Adds `extra` to dx and ends `extra`. */
AR_NODISCARD ar_status ari_add_gradient(ar_ctx *ctx, const ar_tensor *dx, ar_tensor *extra);
/** Writes "base.part" to out[cap]; part NULL: "base". Errors: AR_ERR_ARG (too long). */
AR_NODISCARD ar_status ari_path(char *out, size_t cap, const char *base, const char *part);

/* --- placements --------------------------------------------------------------------------------------------------- */

/* Placements of values between layers, [.., s, features], over the tensor-parallel ranks, and their conversions. All
 * tensors are contiguous, of any dtype. */

extern const ar_placement ari_replicated, ari_shard_features, ari_shard_tokens;
/** Returns the placement between the branches of a block: replicated, or with sequence parallelism sharded by
 *  tokens. */
ar_placement ari_placed_stream(const ar_ctx *ctx);

bool ari_placed_full(ar_placement p);
bool ari_placed_by_features(ar_placement p);
bool ari_placed_by_tokens(ar_placement p);
/** Returns true if ranks have equal numbers under both placements: R and I differ only in the gradient. */
bool ari_placed_equal(ar_placement a, ar_placement b);
/** Returns the placement of the gradient of such a value. The gradient of a replicated value or of a term is
 *  replicated; a layer that uses the value separately on each rank has summed the gradient already. */
ar_placement ari_placed_gradient(ar_placement p);
/** The way back, of the gradient. */
ar_tp_redistribution ari_tp_redistribution_backward(ar_tp_redistribution change);

/* Features made of adjacent blocks that are each sharded separately: q | k | v. */
typedef struct ari_features {
    int n;
    size_t width[AR_MAX_PARTS]; /* widths over all ranks */
} ari_features;
size_t ari_features_sum(const ari_features *f);

/** Redistributes x to y over replicated values: an all-gather, an all-reduce in the communicator's order, then the
 *  local part. *y is x if nothing is to be done, otherwise a new tensor, which ari_release_placed frees.
 *  releases_input: x is not needed otherwise, and its memory is freed early. Features of a single block may be sharded
 *  unevenly. Errors: AR_ERR_INDIVISIBLE (positions), those of the communicator. */
AR_NODISCARD ar_status ari_tp_redistribute(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, const ari_features *f,
                                           ar_tp_redistribution change, const char *tag, bool releases_input);
/** Does the same under a separate name in a record of operations; NULL: the name of the running module. */
AR_NODISCARD ar_status ari_tp_redistribute_of(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, const ari_features *f,
                                              ar_tp_redistribution change, const char *tag, bool releases_input,
                                              const char *name);
/* Does the same for a module's hidden features, under the module's name. */
#define ARI_REDISTRIBUTE(m, ctx, y, x, change, ends) \
    ari_tp_redistribute(ctx, y, x, &(ari_features){1, {(m)->o.hidden}}, change, (m)->base.name, ends)
/** Taps a value with these features and this placement. Terms of a sum are tapped as the replicated value that they
 *  stand for. */
AR_NODISCARD ar_status ari_tap_placed(ar_ctx *ctx, const char *base, const char *part, char pass, const ar_tensor *t,
                                      size_t features, ar_placement p);

/** Records that rows of terms are added to p's gradient. The gradient is complete if every rank has all rows, or if p
 *  says so (spread), its own positions of them. Errors: those of ari_ledger_note. */
AR_NODISCARD ar_status ari_note_gradient(ar_ctx *ctx, ar_param *p, const ar_tensor *x, const ar_tensor *dy);

/* --- sequence parallelism ----------------------------------------------------------------------------------------- */

/* Sequence parallelism: between the tensor-parallel regions, rank r of N holds positions [r*s/N, (r+1)*s/N) of every
 * sequence, [.., s/N, features]; inside them it has all positions. The dimensions before the sequence are the samples.
 * The functions below convert between the two; all tensors are contiguous, of any dtype. */

/* Context parallelism: in all layers a rank holds only some positions of every sequence (ari_parallel_positions). A
 * batch has all positions on every rank, and layers take the rank's. With both kinds of parallelism, sequence
 * parallelism divides the positions of the context-parallel rank. */

/** Returns this rank's positions in a sequence of seq: its context-parallel ones inside the tensor-parallel regions, or
 *  (stream) between them, where sequence parallelism gives it a part of those. */
ar_positions ari_local_positions(const ar_ctx *ctx, size_t seq, bool stream);
/** Returns the number of positions of a sequence of which a rank has `local_count`, ignoring sequence parallelism. */
size_t ari_all_positions(const ar_ctx *ctx, size_t local_count);
/** Returns the number of ranks that share the positions of a sequence: 1 without sequence parallelism. */
static inline size_t ari_sequence_ranks(const ar_ctx *ctx)
{
    return ari_ctx_sp(ctx) ? (size_t)ar_comm_size(ctx->tp) : 1;
}
/** Checks that the context's groups can shard a sequence. Errors: those of ari_parallel_check_sequence. */
AR_NODISCARD ar_status ari_check_sequence(const ar_ctx *ctx, size_t seq);
/** Target of the i-th of a row's own positions (ari_batch_target). */
int64_t ari_local_target(const ar_ctx *ctx, const ar_batch *batch, size_t row, const ar_positions *positions, size_t i);
/** Computes the position of each of this rank's tokens (ari_batch_position), int64 on the device. */
AR_NODISCARD ar_status ari_token_positions(ar_ctx *ctx, ar_tensor *position_ids, const ar_batch *batch,
                                           const ar_positions *positions);
/** Returns the token of [b, s] for row i of this rank's token rows inside the tensor-parallel regions: sample by
 *  sample, or (rank_major) in the order of the tensor-parallel ranks that hold the positions. */
size_t ari_token_at(const ar_ctx *ctx, const ar_batch *batch, size_t i, bool rank_major);
/** Returns the number of positions per sample in a module's batch; 1: it has none. */
size_t ari_batch_positions(const ar_batch *batch);
/* Batch as a loss over this rank's positions reads it: `labels` and `target` belong to its positions and `seq` is their
 * number if there is a label for each position; without labels the next ids are the labels. */
typedef struct ari_local_batch {
    ar_batch batch;
    int64_t *labels; /* labels of this rank's positions, owned, as is target; NULL: the batch's */
    float *target;
} ari_local_batch;
/** Initialises this rank's part of a batch. stream: as in ari_local_positions. predicts_next: each id has a label, and
 *  each position uses the next one's, as without labels. The caller calls ari_local_batch_fini, also after a failure.
 *  Errors: AR_ERR_UNSUPPORTED (no positions to shard), those of ari_check_sequence, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_local_batch_init(ari_local_batch *o, const ar_ctx *ctx, const ar_batch *batch, bool stream,
                                            bool predicts_next);
void ari_local_batch_fini(ari_local_batch *o);
/** Redistributes from shards of features with all positions to the placement between regions: replicated, or with sp
 *  the local positions with all features by an all-to-all; and the gradient's way back. y is never x. */
AR_NODISCARD ar_status ari_features_to_stream(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, const char *tag);
AR_NODISCARD ar_status ari_stream_to_features(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, const char *tag);
/** Creates a tensor for this rank's positions of x [.., s, ..], with `features` features. Errors:
 *  AR_ERR_INDIVISIBLE. */
AR_NODISCARD ar_status ari_like_own_tokens(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, size_t features);

/** Orders the rows [tokens, f] of x [.., s, f] by the ranks that hold them, as a reduce-scatter distributes them: all
 *  samples' positions of rank 0, then those of rank 1. It is a copy, or x's own memory with one sample; release it with
 *  ari_release_placed. Errors: AR_ERR_INDIVISIBLE. */
AR_NODISCARD ar_status ari_rank_major(ar_ctx *ctx, ar_tensor *rows, const ar_tensor *x);
/** Only all-gathers: rows [tokens, f] in rank order. */
AR_NODISCARD ar_status ari_gather_rank_major(ar_ctx *ctx, ar_tensor *rows, const ar_tensor *x, const char *tag);

/* --- products of user-defined layers ------------------------------------------------------------------------------ */

/** Completes terms: if x stands for the terms of a product with a sharded weight (ar_contract), sets *is_folded and y =
 *  their sum, placed as `to_placement`. Errors: AR_ERR_UNSUPPORTED (another operator completes it), those of the
 *  arithmetic. */
AR_NODISCARD ar_status ari_unsummed_take(bool *is_folded, ar_ctx *ctx, ar_tensor *y, const ar_tensor *x,
                                         ar_placement to_placement, const char *tag);

/** Refuses an x that stands for unsummed terms, except in a dry run for lint. Errors: AR_ERR_ARG (names the weight). */
AR_NODISCARD ar_status ari_unsummed_refuse(const ar_ctx *ctx, const ar_tensor *x, const char *operation);

/* --- dropout ------------------------------------------------------------------------------------------------------ */

/* Dropout (Srivastava et al. 2014) at one place of the model. A mask depends on the seed, the place's name, the step
 * and the element's index in the global batch, never on the rank. So ranks that hold the same value drop the same
 * elements, and a backward pass draws the same mask again. */

/* Names of the places below a module's path. */
#define ARI_DROPPED_PROBS "attn_dropout"      /* dropout of the attention's probabilities */
#define ARI_DROPPED_ATTENTION "resid_dropout" /* dropout of the attention's output */
#define ARI_DROPPED_MLP "dropout"             /* dropout of the MLP's output */

typedef struct ari_dropout {
    char name[128];   /* name of the value after dropout, and of the random stream */
    size_t width;     /* features, or heads */
    size_t positions; /* S_max: the sequence length used to number elements, independent of the batch's lengths */
} ari_dropout;

/** Errors: AR_ERR_ARG (name too long). */
AR_NODISCARD ar_status ari_dropout_init(ari_dropout *d, const char *base, const char *part, size_t width,
                                        size_t positions);
/** True if dropout is on in this context. */
bool ari_dropout_on(const ar_ctx *ctx);
/** Computes y = drop(x) for a value between the regions, [samples, positions, width] (sp: the local positions),
 *  contiguous; y may be x. In the forward pass x is the value, in the backward pass the gradient of the output. Tapped
 *  under the name in this pass ('\0': not tapped). Errors: AR_ERR_SHAPE (more positions than S_max), AR_ERR_OVERFLOW
 *  (an element's index does not fit 64 bits). */
AR_NODISCARD ar_status ari_drop_tokens(const ari_dropout *d, ar_ctx *ctx, char pass, const ar_tensor *y,
                                       const ar_tensor *x);
/** Computes sum = residual + drop(x) of the forward pass in one pass over memory. The dropped value is written, in
 *  place of x, only if it is tapped. Errors: those of ari_drop_tokens. */
AR_NODISCARD ar_status ari_drop_add_tokens(const ari_dropout *d, ar_ctx *ctx, const ar_tensor *sum,
                                           const ar_tensor *residual, const ar_tensor *x);
/** Does the same for a part of all [samples, heads, queries, keys] of a layer, beginning with this element: a sample of
 *  the batch, a head of `width`, and two positions. Not tapped. */
AR_NODISCARD ar_status ari_drop_heads(const ari_dropout *d, ar_ctx *ctx, const ar_tensor *y, const ar_tensor *x,
                                      const size_t origin[AR_MAX_DIMS]);

/* --- paths of parts ----------------------------------------------------------------------------------------------- */

enum { ARI_PART_PATH = 96 }; /* bytes, with the final 0 */
/** Writes the paths of an MLP's linear layers (`up` if it is gated) and of an attention's, only q if q, k and v are
 *  packed. Errors: AR_ERR_ARG (too long). */
AR_NODISCARD ar_status ari_mlp_paths(char first_path[ARI_PART_PATH], char up[ARI_PART_PATH], char second[ARI_PART_PATH],
                                     const char *name, const ar_mlp_options *o);
AR_NODISCARD ar_status ari_attention_paths(char qkv[3][ARI_PART_PATH], char out[ARI_PART_PATH], const char *name,
                                           const ar_attention_options *o);

/* --- saved activations -------------------------------------------------------------------------------------------- */

/** Return the number of saved views, and drop the views saved after an earlier number. NULL: no views. */
size_t ari_saved_count(const ar_saved *s);
void ari_saved_cut(ar_saved *s, size_t count);
/** Returns the newest view under (owner, slot) without removing it. Errors: those of ar_saved_pop. */
AR_NODISCARD ar_status ari_saved_newest(const ar_saved *s, const void *owner, int slot, ar_tensor *t);

/* --- modules ------------------------------------------------------------------------------------------------------ */

/** Allocates a module of `bytes` bytes that begins with an ar_module and is otherwise zero. Complete it, then pass it
 *  to ari_module_end. Errors: AR_ERR_MEMORY, those of ar_module_init. */
AR_NODISCARD ar_status ari_module_begin(void **out, size_t bytes, const ar_module_ops *ops, const char *name,
                                        ar_held tap);
/* Does the same with the type that *gives points to. */
#define ARI_MODULE_BEGIN(gives, ops, name, tap) ari_module_begin((void **)(gives), sizeof **(gives), ops, name, tap)
/** Sets *out = m, or destroys m if its completion failed. Returns st. */
AR_NODISCARD ar_status ari_module_end(ar_module **out, ar_module *m, ar_status st);
/** Does the same as ar_sequential_create, but only child `sp_index` runs as under sequence parallelism (SIZE_MAX:
 *  none). positions: a value is placed by positions, so every input has three dimensions. */
AR_NODISCARD ar_status ari_sequential_create(ar_module **out, const char *name, ar_module *const *child, size_t n,
                                             bool owns_children, size_t sp_index, bool positions);
/* Shape of a sample of the value between stages. The first of two or more dimensions is positions; 0: those of the
 * batch. */
typedef struct ari_between {
    int ndim;
    size_t shape[AR_SAMPLE_DIMS];
} ari_between;
/* Facts about the routers below a module: whether they have losses, whether a step counts routes first, and the number
 * of experts per layer if all layers are balanced together, otherwise 0. */
typedef struct ari_routers {
    bool losses, counts;
    size_t experts;
} ari_routers;
/* A child of a list that is cut into the stages of a pipeline. */
typedef struct ari_staged {
    int rank, stage; /* rank: of the pipeline; stage: of that rank, ascending, or -1: no pass uses it */
    size_t layer;    /* layer number over all ranks, in whose order the routers' losses are added */
    bool unit;       /* true if the child is a unit of a data-parallel object, provided that it has parameters */
    bool uncounted;  /* a pass that only counts routes ends before this module */
} ari_staged;
typedef struct ari_stages {
    int n;         /* number of stages on this rank */
    size_t layers; /* number of layers over all ranks */
    ari_between boundary;
    ari_routers routers; /* routers of all ranks */
    /* a child's results are in memory that nothing else uses: a gradient is released after its use, and a value is sent
     * to another stage without a copy */
    bool fresh;
    size_t depths;      /* number of further tokens that are predicted */
    ar_module *further; /* module with the last stage, if there is one (ari_further_create) */
} ari_stages;
/** Removes the children that do not belong to the context's pipeline rank from a list of modules. child: [children of
 *  the list]. Errors: AR_ERR_ARG (not a list), AR_ERR_UNSUPPORTED (two ranks other than the first and the last share a
 *  parameter), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_sequential_keep(ar_module *m, const ari_staged *child, const ari_stages *s,
                                           const ar_ctx *ctx);
/** Returns the stages of a list; NULL: m has not been divided, or is no list. *child: stage of each child; borrowed. */
const ari_stages *ari_sequential_stages(const ar_module *m, const ari_staged **child);
/** Sets what a module recomputes in its backward pass: everything, the selective parts, or nothing. Errors:
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_module_recompute(ar_module *m, ar_recompute mode);
/** Sets recomputation for every r->every-th child of the children [begin, end) of a list, starting with the first.
 *  Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_sequential_recompute(ar_module *base, size_t begin, size_t end, const ar_recomputation *r);
/** Lists the units of a sharded list, each once, in the order of a forward pass through this rank's stages. Writes at
 *  most cap and returns their number. *root: the stage of this rank with its other parameters, if it has any. */
size_t ari_sequential_units(const ar_module *m, ar_unit *out, size_t cap, int *root);

/* --- passes of a rank's part -------------------------------------------------------------------------------------- */

/* Functions for stages: of a module with its loss, or stage i of a list that has been divided. */
/** Creates a tensor for the value between two stages: an activation or its gradient. */
AR_NODISCARD ar_status ari_stage_between(const ar_module *m, ar_ctx *ctx, ar_tensor *t, const ar_batch *batch);
/** Computes y from x. The first stage uses the batch instead of x, and the last one adds the loss's terms instead of
 *  returning y. Errors: also AR_ERR_SHAPE (the value's shape is not the one for which the list was divided). */
AR_NODISCARD ar_status ari_stage_forward(ar_module *m, ar_loss *loss, ar_ctx *ctx, ar_saved *saved, int i, ar_tensor *y,
                                         const ar_tensor *x, const ar_batch *batch);
/** Computes dx from dy, which the last stage derives from the loss; the first stage returns no dx. Ends dy. */
AR_NODISCARD ar_status ari_stage_backward(ar_module *m, ar_loss *loss, ar_ctx *ctx, ar_saved *saved, int i,
                                          ar_tensor *dx, const ar_tensor *dy, const ar_batch *batch);
/** Returns the number of further tokens, each of which has its own T. */
size_t ari_trained_depths(const ar_module *m);
/** Counts this rank's part of T, the number of targets of each loss: the targets at the rank's positions in these rows.
 *  Adds to count. loss is NULL if another pipeline rank has the loss. Errors: those of ar_loss_targets. */
AR_NODISCARD ar_status ari_trained_targets(size_t count[1 + AR_MAX_MTP], const ar_module *m, const ar_loss *loss,
                                           const ar_ctx *ctx, const ar_batch *batch);
/** The targets of the further tokens in the global batch, which a forward pass sets too. */
void ari_trained_further(ar_module *m, const size_t *targets);
/** Zeroes gradients, the loss's terms, and the routers' counts. */
AR_NODISCARD ar_status ari_trained_zero(ar_module *m, ar_loss *loss, ar_ctx *ctx);
/** Computes the loss of all micro-batches and data-parallel ranks, including those of routers and of further tokens.
 *  All ranks of a pipeline get the same value. */
AR_NODISCARD ar_status ari_trained_loss(ar_module *m, ar_loss *loss, ar_ctx *ctx, float *value, size_t targets);
/** Calls f for m and all modules below it, depth first, until a call fails. Errors: that of f; AR_ERR_MEMORY. */
/** Computes the factor of each parameter of q and k for QK-Clip from this step's logits. bound 0: does nothing.
 *  Collective over the ranks with other heads or tokens. */
AR_NODISCARD ar_status ari_qk_clip_prepare(ar_module *m, ar_ctx *ctx, double bound);
AR_NODISCARD ar_status ari_module_each(ar_module *m, ar_status (*f)(void *user, ar_module *m), void *user);
/** Lists a module's parameters, each once, in the order of ar_module_params. Release *out with free(). Errors:
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_module_list(ar_param ***out, size_t *n, ar_module *m);

/* Work that backward passes have deferred (ar_ctx.deferred), in order: products for weight gradients, and parameters
 * that are complete afterwards. {0}: none. */
typedef struct ari_deferred {
    struct ari_deferred_job *head, *tail;
} ari_deferred;
typedef ar_status (*ari_deferred_fn)(ar_ctx *ctx, const void *job);
/** Calls run(ctx, job) now, or later in ari_deferred_run if ctx->deferred is set. A deferred call gets a copy of the
 *  job's bytes, and the step memory of a and b (either may be NULL) stays allocated until it has run. Errors: those of
 *  run, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_defer(ar_ctx *ctx, ari_deferred_fn run, const void *job, size_t bytes, const ar_tensor *a,
                                 const ar_tensor *b);
/** Runs all deferred work up to the first failure; l is empty afterwards. Errors: those of the work. */
AR_NODISCARD ar_status ari_deferred_run(ar_ctx *ctx, ari_deferred *l);
/** Drops the deferred work. */
void ari_deferred_drop(ar_ctx *ctx, ari_deferred *l);

/** Calls ari_param_done for the module's direct parameters, for a layer that a caller runs without
 *  ar_module_backward. */
AR_NODISCARD ar_status ari_module_done(ar_module *m, ar_ctx *ctx);

/** Run an embedding's forward pass, with its rows tapped as `name`, and its backward pass. */
AR_NODISCARD ar_status ari_embedding_forward_as(ar_module *e, ar_ctx *ctx, ar_saved *saved, ar_tensor *y,
                                                const ar_batch *batch, const char *name);
AR_NODISCARD ar_status ari_embedding_backward(ar_module *e, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx,
                                              const ar_tensor *dy, const ar_batch *batch);

/** Creates a norm of this name in a block for values with this placement, as the block's options say. Errors: those of
 *  ari_norm_create. */
AR_NODISCARD ar_status ari_block_norm(ar_module **out, ar_ctx *ctx, const char *block, const char *part,
                                      const ar_block_options *o, ar_placement placement);

/* A block for a further token, of multi-token prediction (mtp.c). */
typedef struct ari_mtp_options {
    const ar_block_options *block;
    ar_module *embedding;                                                 /* the model's embedding; borrowed */
    const char *tokens, *tokens_norm, *entered_norm, *joined, *made_norm; /* below the block's path */
} ari_mtp_options;
/** Creates a block for multi-token prediction. With the id e of the next position:
 *    y = norm(block(M [norm(Emb(e)) | norm(x)]))
 *  (DeepSeek-V3, arXiv:2412.19437, equations 21 and 22, in the order of its and Megatron's weights). x and y are as
 *  between blocks; the batch is ari_batch_roll's. Release it with ar_module_destroy. */
AR_NODISCARD ar_status ari_mtp_create(ar_module **out, ar_ctx *ctx, const char *name, const ari_mtp_options *o);

/** Creates the head of a chain of such blocks: y = x, which the first block reads. The chain runs after the loss of y
 *  in the forward pass and before it in the backward pass; backward adds its gradient. Release it with
 *  ar_module_destroy. */
AR_NODISCARD ar_status ari_further_create(ar_module **out, ar_ctx *ctx, const char *name, double weight);
/** Adds one more block with its head and loss, whose weight is the total weight divided by the number of losses.
 *  Modules are borrowed; the chain owns the loss. */
void ari_further_add(ar_module *further, ar_module *block, ar_module *head, ar_loss *loss);
AR_NODISCARD ar_status ari_further_forward(ar_module *further, ar_ctx *ctx, ar_saved *saved, const ar_batch *batch);
AR_NODISCARD ar_status ari_further_backward(ar_module *further, ar_ctx *ctx, ar_saved *saved, const ar_batch *batch);
/** Computes the further losses, each over its own targets of the global batch, which a forward pass also sets. */
AR_NODISCARD ar_status ari_further_loss(ar_module *further, ar_ctx *ctx, double *sum);
void ari_further_set_targets(ar_module *further, const size_t *targets);
AR_NODISCARD ar_status ari_further_zero(ar_module *further, ar_ctx *ctx);

typedef struct ari_norm_options {
    ar_norm_kind kind;
    size_t h;
    double eps;
    bool plus_one; /* the gain is 1 + the weight */
    bool no_bias;  /* LayerNorm has no offset */
} ari_norm_options;
/** Creates a norm that works on values placed as change.dst, replicated or by tokens, of an input placed as change.src.
 *  In ar_norm_create both are the placement between the branches. Errors: those of ar_norm_create. */
AR_NODISCARD ar_status ari_norm_create(ar_module **out, ar_ctx *ctx, const char *name, const ari_norm_options *o,
                                       ar_tp_redistribution change);
/** name.weight [h] of a norm, replicated. */
AR_NODISCARD ar_status ari_norm_gain_init(ar_param *p, ar_ctx *ctx, const char *name, size_t h, bool plus_one);
/** Computes ar_norm_backward into dx and sum, which the caller provides; dx may be dy. counts: this rank's rows
 *  contribute to the gradients of gain and offset. Errors: those of ar_norm_backward. */
AR_NODISCARD ar_status ari_norm_gradients(ar_ctx *ctx, ar_norm_kind kind, const ar_tensor *dx, const ar_tensor *sum,
                                          const ar_tensor *dy, const ar_tensor *x, const ar_norm_saved *saved,
                                          ar_param *gain, ar_param *offset, const ar_tensor *residual, bool counts);
/** Runs the backward pass together with the residual: dx = the norm's input gradient (tapped), *sum = residual + dx,
 *  both placed like the input. residual NULL: sum is not written. */
AR_NODISCARD ar_status ari_norm_backward(ar_module *norm, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, ar_tensor *sum,
                                         const ar_tensor *dy, const ar_tensor *residual);

/* Largest number of boxes of a share. A share is a run of elements of the layer's matrix in row-major order, which is
 * how its gradient is stored. As a tensor it is up to two boxes for each dimension except the last, plus one: the end
 * of a row, full rows, the beginning of a row. */
#define ARI_RUN_BOXES (2 * AR_MAX_DIMS - 1)
typedef struct ari_run_box {
    size_t origin[AR_MAX_DIMS], extent[AR_MAX_DIMS];
} ari_run_box;

/** Decomposes elements [start, start + count) of a row-major tensor into consecutive boxes. Returns their number, at
 *  most ARI_RUN_BOXES. The elements must lie within the tensor. */
size_t ari_run_boxes(ari_run_box *out, int ndim, const size_t *shape, size_t start, size_t count);
/** Describes the elements [start, start + count) of a parameter's matrix as boxes between a tensor of its value's shape
 *  and the full tensor, with the replicas over the tensor-parallel group, over both ends of a pipeline, and of the
 *  share. Errors: AR_ERR_UNSUPPORTED (more than AR_MAX_BOXES). */
AR_NODISCARD ar_status ari_share_layout(ar_layout *o, const ar_param *p, const ar_ctx *ctx, size_t start, size_t count);
/** Returns the layout of the full parameter as one of the copies that the tensor-parallel and the data-parallel ranks
 *  hold, and for a tied table both ends of a pipeline. */
ar_layout ari_full_layout(const ar_param *p, const ar_ctx *ctx);
/** Returns true if data-parallel ranks shard the value: `value` has memory only while it is gathered. */
static inline bool ari_value_is_shared(const ar_param *p)
{
    return p->share && p->share->value.ptr;
}
/** Returns a parameter's value as this rank holds it between uses, and its position in the full tensor with all its
 *  copies. *t is the value itself, or a new step tensor of its shape in which only the elements of this rank's shard
 *  are defined. End with ari_value_end. */
AR_NODISCARD ar_status ari_value_begin(ar_tensor *t, ar_layout *o, ar_ctx *ctx, const ar_param *p);
void ari_value_end(ar_tensor *t, ar_ctx *ctx, const ar_param *p);
/** Taps the parameter's value. */
AR_NODISCARD ar_status ari_value_tap(const ar_param *p, ar_ctx *ctx, char pass);
/** Copy elements [start, start + count) of the matrix in a tensor of the value's shape (`value`: any device memory) to
 *  the contiguous `run`, or back. The dtype is value's. */
AR_NODISCARD ar_status ari_share_get(ar_ctx *ctx, ar_buf run, const ar_param *p, const ar_tensor *value, size_t start,
                                     size_t count);
AR_NODISCARD ar_status ari_share_put(ar_ctx *ctx, ar_cbuf run, const ar_param *p, const ar_tensor *value, size_t start,
                                     size_t count);

/** Elements of the full tensor. */
size_t ari_layout_count(const ar_layout *o);
/** Copies a rank's boxes from the full tensor to host memory for `local`, of which only the shape is used. Both are
 *  row-major. */
void ari_layout_take(float *host, const ar_tensor *local, const ar_layout *o, const float *full);
