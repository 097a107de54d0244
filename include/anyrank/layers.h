/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_LAYERS_H
#define ANYRANK_LAYERS_H

#include "anyrank/module.h"
#include "anyrank/placement.h"

AR_BEGIN_DECLS

/* Layers (modules of module.h) sharded over the tensor-parallel group of the context that creates them: N ranks, this
 * one is r. Weights are [out, in]. Inputs X are [samples, .., features], with the leading dimensions flattened to
 * tokens; outputs Y and gradients dX are allocated in step memory (context.h). With sequence parallelism (sp) an
 * activation outside of the sharded layers is split by positions: rank r has positions [r*s/N, (r+1)*s/N) of every
 * sequence, called its own positions. Creation, forward and backward are collective: every rank of the group calls them
 * in the same order. The caller releases modules with ar_module_destroy. Names are Hugging Face paths. "Taps" in a
 * comment are the values that a module reports to the context's tap: name:fwd is the output, name:bwd is dX.
 * Errors of every constructor: AR_ERR_INDIVISIBLE (the message names parameter, dimension, size and N), AR_ERR_ARG,
 * AR_ERR_MEMORY; of forward and backward: AR_ERR_SHAPE, those of the communicator. */

/* --- tensor-parallel communication operators ---------------------------------------------------------------------- */

/* The autograd operators of Megatron-LM: each forward function redistributes an activation over the tensor-parallel
 * group, and its _backward function applies the transpose A^T to the gradient, <A x, y> = <x, A^T y>. The
 * (tensor-parallel) region is the part of the model between f and its conjugate f*, where layers are sharded, as from a
 * column-parallel to the next row-parallel layer. Letters are those of Korthikanti et al. 2022, arXiv:2205.05198,
 * section 4, with * for the bar (f* is the g of Shoeybi et al. 2019, arXiv:1909.08053, section 3). Placements
 * (placement.h): R replicated; I replicated, and so is the gradient; S(d) sharded along dimension d; P(sum) partial
 * sums. Inputs are fp32, contiguous and equally large on all ranks; sums run in the communicator's order; *y is
 * allocated in step memory, and y may be x. Errors: AR_ERR_INDIVISIBLE, AR_ERR_ARG (too few dimensions), AR_ERR_SHAPE
 * (x is not contiguous), AR_ERR_MEMORY, those of the communicator. */

/** f, I -> R: y = x at the region's start; backward: all-reduce, dx = sum over ranks of dy. Equal shapes. */
AR_NODISCARD ar_status ar_copy_to_region(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x);
AR_NODISCARD ar_status ar_copy_to_region_backward(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy);
/** f*, P(sum) -> I: all-reduce at the region's end, y = sum over ranks of x; backward: dx = dy, since all ranks hold
 *  the same y and it counts once. Equal shapes. */
AR_NODISCARD ar_status ar_reduce_from_region(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x);
AR_NODISCARD ar_status ar_reduce_from_region_backward(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy);
/** S(-1) -> I: all-gather along features, x [.., f/N] -> y [.., f]; backward: dx is this rank's block of dy. */
AR_NODISCARD ar_status ar_gather_from_region(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x);
AR_NODISCARD ar_status ar_gather_from_region_backward(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy);
/** I -> S(-1): slice along features, y [.., f/N] is this rank's block of x [.., f]; backward: all-gather of dy. */
AR_NODISCARD ar_status ar_scatter_to_region(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x);
AR_NODISCARD ar_status ar_scatter_to_region_backward(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy);

/* The operators at the ends of a region with sequence parallelism. */
/** g, S(-2) -> R: all-gather along the sequence, x [.., s/N, f] -> y [.., s, f]; backward: reduce-scatter of dy,
 *  because each rank multiplies y by other weights. */
AR_NODISCARD ar_status ar_gather_tokens(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x);
AR_NODISCARD ar_status ar_gather_tokens_backward(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy);
/** g*, P(sum) -> S(-2): reduce-scatter along the sequence, y [.., s/N, f] = this rank's positions of the sum over ranks
 *  of x [.., s, f]; backward: all-gather of dy. */
AR_NODISCARD ar_status ar_scatter_tokens(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x);
AR_NODISCARD ar_status ar_scatter_tokens_backward(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy);

/** The operators of the context: ar_enter_region is f, or g with sequence parallelism; ar_leave_region is f* or g*. */
AR_NODISCARD ar_status ar_enter_region(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x);
AR_NODISCARD ar_status ar_enter_region_backward(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy);
AR_NODISCARD ar_status ar_leave_region(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x);
AR_NODISCARD ar_status ar_leave_region_backward(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy);

/* --- splits ------------------------------------------------------------------------------------------------------- */

/* How a module's weight is sharded over the tensor-parallel ranks; a plan (plan.h) assigns one to each module. */
typedef enum ar_style {
    AR_STYLE_REPLICATE, /* not sharded */
    AR_STYLE_COLWISE,   /* rows of W [out, in]: the output is sharded by features. For an embedding: as HIDDEN */
    AR_STYLE_ROWWISE,   /* columns of W: the output is a partial sum. For an embedding: as VOCAB */
    AR_STYLE_VOCAB,     /* rows of an embedding or LM head; uneven if N does not divide the vocabulary */
    AR_STYLE_HIDDEN,    /* columns of an embedding: the output is sharded by features */
    AR_STYLE_SEQUENCE,  /* a norm: not sharded, applied to each rank's own positions (sequence parallelism) */
    AR_STYLE_PREPARE,   /* a user's module: only declares the placements of its inputs and outputs */
    AR_STYLES
} ar_style;

/** How a linear layer Y = X W^T + b is sharded, and the placements of its input X and output Y [.., s, features]
 *  outside the layer. Placements of activations are R (or I, the same values), S(-2) by positions, S(-1) by features,
 *  and P(sum).
 *
 *    style      needs X   yields Y  backward: needs dY   yields dX
 *    colwise    R         S(-1)     S(-1)                P(sum)
 *    rowwise    S(-1)     P(sum)    R                    S(-1)
 *    replicate  R         R         R                    R
 *
 *  The layer redistributes its input from `input` to what the style needs, and its output from what the style yields
 *  to `output`; backward the transposes. The layer does not check that X is placed as `input` says if the shape fits.
 *  `output` P(sum) leaves a rowwise output unreduced, each rank's terms rounded; with other styles it is AR_ERR_ARG. */
typedef struct ar_linear_split {
    ar_style style;      /* AR_STYLE_COLWISE, _ROWWISE or _REPLICATE */
    ar_placement input;  /* of the input X */
    ar_placement output; /* of the output Y */
} ar_linear_split;

/** A redistribution of an activation over the tensor-parallel ranks; none if both placements are equal. */
typedef struct ar_tp_redistribution {
    ar_placement src, dst;
} ar_tp_redistribution;

/** How an attention, MLP or experts branch is sharded. Activations between its first and last linear layers are sharded
 *  by heads or features if first.output is S(-1), else whole on every rank. */
typedef struct ar_branch_split {
    ar_tp_redistribution enter; /* of the branch's input */
    ar_linear_split first;      /* the first layers, which share the input: q, k, v; gate, up */
    ar_linear_split second;     /* the last layer: output or down projection */
    ar_tp_redistribution leave; /* of the branch's output */
    bool shared_whole;          /* the shared expert is replicated, even if the routed experts are sharded */
} ar_branch_split;

/* --- linear layers ------------------------------------------------------------------------------------------------ */

/** Options of a column-parallel or row-parallel linear layer. */
typedef struct ar_linear_options {
    bool bias;
    bool gather_output;    /* column-parallel: Y is all-gathered along features; false: it stays sharded */
    bool input_is_sharded; /* row-parallel: X is sharded by features; false: X is whole, the layer slices it */
} ar_linear_options;

/** Creates a column-parallel linear layer: W_r = rows block [out/N, in], b_r = block [out/N].
 *    forward   Y_r = X W_r^T + b_r          X replicated [.., in], Y_r [.., out/N] (gather_output: [.., out])
 *    backward  dX = sum_r dY_r W_r          by an all-reduce
 *              dW_r = dY_r^T X, db_r = sum_t dY_r
 *  With sequence parallelism X and dX are the rank's own positions [.., s/N, in]: the layer all-gathers X and
 *  reduce-scatters dX along the sequence. Y_r has all positions; with gather_output, only the rank's own positions.
 *  Parameters: name.weight [out, in], name.bias [out]. Taps: name:fwd, name:bwd, the parameters' gradients. */
AR_NODISCARD ar_status ar_column_linear_create(ar_module **out, ar_ctx *ctx, const char *name, size_t in_features,
                                               size_t out_features, const ar_linear_options *o);
/** Creates a row-parallel linear layer: W_r = columns block [out, in/N]; b is replicated and added once, after the sum.
 *    forward   Y = sum_r X_r W_r^T + b      by an all-reduce; Y replicated [.., out]
 *    backward  dX_r = dY W_r (all-gathered along features unless input_is_sharded), dW_r = dY^T X_r, db = sum_t dY
 *  With sequence parallelism Y and dY are the rank's own positions [.., s/N, out]: the layer reduce-scatters Y and
 *  all-gathers dY along the sequence, and db covers the rank's own positions until gradients are reduced. X_r has all
 *  positions; without input_is_sharded X has the rank's own positions and is all-gathered.
 *  Parameters and taps as for ar_column_linear_create. */
AR_NODISCARD ar_status ar_row_linear_create(ar_module **out, ar_ctx *ctx, const char *name, size_t in_features,
                                            size_t out_features, const ar_linear_options *o);

/* --- norms -------------------------------------------------------------------------------------------------------- */

/** Creates a replicated LayerNorm (Ba, Kiros, Hinton 2016, arXiv:1607.06450) or RMSNorm (Zhang, Sennrich 2019,
 *  arXiv:1910.07467) over the last dimension h; numerics.md, section 4, has the formulas. Every rank normalises all
 *  rows of its input; with sequence parallelism these are its own positions, and the parameters' gradients are complete
 *  only after they are reduced over the tensor-parallel group. Parameters: name.weight [h], LayerNorm also name.bias
 *  [h]. */
AR_NODISCARD ar_status ar_norm_create(ar_module **out, ar_ctx *ctx, const char *name, ar_norm_kind kind, size_t h,
                                      double eps);

/* --- activations and containers ----------------------------------------------------------------------------------- */

/** Creates an element-wise activation y = act(x); x is contiguous. placement: the part of x that each rank holds, such
 *  as AR_HELD_SHARD between a column-parallel and a row-parallel layer. Taps: name:fwd, name:bwd, unless
 *  AR_HELD_UNKNOWN. AR_ERR_ARG: act is AR_ACT_NONE. */
AR_NODISCARD ar_status ar_activation_create(ar_module **out, ar_ctx *ctx, const char *name, ar_activation act,
                                            ar_held placement);
/** Creates dropout (Srivastava et al. 2014) with the context's probability p, ar_ctx_options.dropout: y is 0 with
 *  probability p, else x/(1 - p). x is [samples, width] or [samples, positions, width]. The mask depends on the context's
 *  seed, the name, the step (ar_ctx_begin_step) and the element's index in the full global batch, so that it is the same
 *  under every layout. p = 0: y is x. positions: largest number of positions, 1 if x has no such dimension; width: of
 *  the full x. placement: the part of x that each rank holds. AR_ERR_ARG: placement is AR_HELD_UNKNOWN. */
AR_NODISCARD ar_status ar_dropout_create(ar_module **out, ar_ctx *ctx, const char *name, size_t positions, size_t width,
                                         ar_held placement);
/** Creates a sequential module, y = child[n-1](.. child[0](x)); n = 0: y is x. Children keep their names. owned: the
 *  module destroys its children; false: it borrows them. On error the caller still owns the children. */
AR_NODISCARD ar_status ar_sequential_create(ar_module **out, const char *name, ar_module *const *child, size_t n,
                                            bool owned);
/** Creates a sequential module that owns n children, for use after the calls that created them, whose combined status
 *  is `st`. If st is an error or the creation fails, destroys the children (skipping NULL) and returns the error. */
AR_NODISCARD ar_status ar_sequential_made(ar_module **out, const char *name, ar_module *const *child, size_t n,
                                          ar_status st);

/** Cuts a sequential module m that owns its children into the stages of the context's pipeline, and destroys the
 *  children of other ranks' stages. Children [start, start + layers) are distributed over the stages as
 *  ar_context_pipeline.stages says; the first stage also gets the children before them, the last stage those after. The
 *  activation sent between stages is one tensor of shape sample_shape [sample_ndim] per sample, whose first dimension
 *  is positions if sample_ndim is 2 or more. Without a pipeline m keeps all children. Train the result with
 *  ar_module_train_step. ar_ctx_options.recompute applies to these layers as to a model's blocks; each child is a unit
 *  for ZeRO-2 and -3 (ddp.h). Errors: AR_ERR_ARG (m is no sequential module or already cut; start or layers out of
 *  range; invalid stages), AR_ERR_INDIVISIBLE (fewer layers than stages), AR_ERR_UNSUPPORTED (two ranks would share a
 *  parameter and are not those of the first and the last stage, which may hold copies), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_sequential_cut(ar_module *m, ar_ctx *ctx, size_t start, size_t layers, int sample_ndim,
                                         const size_t *sample_shape);
/** Creates a residual module y = x + f(x), where f is the sequence of n children; ownership and `st` as for
 *  ar_sequential_made. placement: the part of y that each rank holds. */
AR_NODISCARD ar_status ar_residual_made(ar_module **out, const char *name, ar_module *const *child, size_t n,
                                        ar_held placement, ar_status st);

/* --- MLP ---------------------------------------------------------------------------------------------------------- */

/* Sharding of the two linear layers of a default plan's MLPs. */
typedef enum ar_mlp_order {
    AR_MLP_COLUMN_ROW, /* column-parallel, then row-parallel: one all-reduce forward, one backward */
    AR_MLP_ROW_COLUMN  /* row-parallel, then column-parallel: an all-reduce between them, an all-gather at the end */
} ar_mlp_order;
/** Options of an MLP. */
typedef struct ar_mlp_options {
    size_t hidden, ffn; /* width of the input and output; width between the layers */
    ar_activation activation;
    bool gated;                   /* act(gate)*up instead of act(fc1) */
    bool bias;                    /* every linear layer has a bias */
    bool transposed;              /* weights stored [in, out] (GPT-2) */
    bool fused;                   /* gate and up are one parameter [2*ffn, hidden], `first`, without a bias (Phi-3) */
    const ar_branch_split *split; /* borrowed until return; NULL: column-parallel, then row-parallel */
    /* Hugging Face names below the MLP's path of the first, last and up projection; NULL: "fc1" (gated: "gate"), "fc2",
     * "up" */
    const char *first, *second, *up;
} ar_mlp_options;
/** Creates an MLP: Y = act(X W1^T + b1) W2^T + b2, or gated: Y = (act(X Wg^T + bg) * (X Wu^T + bu)) W2^T + b2, without
 *  the biases unless options->bias. X, Y [.., hidden] are placed as options->split says; without a split replicated,
 *  with sequence parallelism each rank's own positions. Parameters and taps are those of its linear layers; the tap
 *  "act" has the activation. The caller releases *out with ar_module_destroy. Errors: AR_ERR_ARG, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_mlp_create(ar_module **out, ar_ctx *ctx, const char *name, const ar_mlp_options *o);

/* --- experts ------------------------------------------------------------------------------------------------------ */

/** Options of a mixture-of-experts module. */
typedef struct ar_experts_options {
    size_t hidden;          /* width of the input and output */
    size_t n, per_token;    /* E routed experts; k of them for each token */
    size_t ffn;             /* intermediate width of each expert */
    bool bias;              /* router and the experts' three projections have biases */
    size_t shared;          /* width of a shared expert, which all tokens use, weighted by a sigmoid gate; 0: none */
    bool ungated;           /* the shared expert has no gate */
    bool normalised;        /* the weights of a token's k experts are divided by their sum */
    ar_route_scores scores; /* how the router scores and chooses */
    ar_activation activation;
    double balance_weight; /* weight of the loss AR_BALANCE_LAYERS if the context's options set none; 0: no loss */
    const ar_branch_split *split; /* borrowed until return; NULL: every rank routes all tokens; gate and up are
                                     column-parallel, down row-parallel */
    /* Hugging Face names below the module's path; NULL: the name in quotes. */
    const char *gate, *up, *down; /* projections of an expert, below "experts.N": "gate_proj", "up_proj", "down_proj" */
    const char *shared_name;      /* shared expert: "shared_expert" */
    const char *router;           /* "gate" */
    const char *router_bias;      /* bias added to scores for choosing experts: "gate.e_score_correction_bias" */
} ar_experts_options;
/** Creates a mixture-of-experts module (Shazeer et al. 2017, arXiv:1701.06538; Jiang et al. 2024, arXiv:2401.04088). With
 *  the router's logits z = x Wr^T and p = softmax(z), each token goes to the set K of the k experts with the largest z;
 *  of two equal ones to the expert with the lower number:
 *    y = sum over j in K, ascending, of w_j*expert_j(x) + sigmoid(x v^T)*shared(x)
 *    w_j = p_j, or if `normalised` p_j / sum of p over K
 *  Each expert is a gated MLP. With options->scores the router uses a = sigmoid(z): K has the largest a + bias, and w_j
 *  is scale*a_j, or scale*a_j/(sum of a over K + 1e-20); the bias has no gradient. No token is dropped. The router's own
 *  losses are those of ar_ctx_options.loss. With expert parallelism (ar_expert_groups) each of the ep ranks holds E/ep
 *  experts. X, Y [.., hidden] are placed as options->split says; without a split replicated, with sequence parallelism
 *  each rank's own positions. Parameters: name.gate.weight [E, hidden], name.experts.N.*, name.shared_expert.*,
 *  name.shared_expert_gate, name.gate.e_score_correction_bias [E]. The caller releases *out with ar_module_destroy.
 *  Errors: AR_ERR_ARG, AR_ERR_INDIVISIBLE (ep does not divide E), AR_ERR_MEMORY; of its passes also AR_ERR_DATA (a logit
 *  is NaN). */
AR_NODISCARD ar_status ar_experts_create(ar_module **out, ar_ctx *ctx, const char *name, const ar_experts_options *o);

/* --- attention ---------------------------------------------------------------------------------------------------- */

/** Options of an attention module. */
typedef struct ar_attention_options {
    size_t hidden, heads, kv_heads, head_dim; /* input width, query heads, KV heads, features of a head */
    bool qkv_bias, out_bias;                  /* projections that have biases */
    const ar_branch_split *split;             /* borrowed until return; NULL: q, k, v column-parallel (by heads), out
                                                 row-parallel */
    bool causal;
    size_t window; /* sliding window: query i does not attend to keys j with j + window <= i; 0: none */
    ar_rope rope;
    size_t max_positions; /* longest sequence; rows of the RoPE tables */
    bool fused;           /* q|k|v are one parameter; N must divide kv_heads */
    bool by_head;         /* with fused: rows are ordered by head, each head's q|k|v (GPT-NeoX); kv_heads == heads */
    bool transposed;      /* weights stored [in, out] (GPT-2) */
    ar_qk_norm qk_norm;   /* RMSNorms of queries and keys before RoPE, with norm_eps */
    bool norm_plus_one;   /* gains of these norms are 1 + their weights */
    double norm_eps;
    double query_scalar; /* scores are divided by its square root; 0: head_dim */
    double score_cap;    /* c > 0: scores become c*tanh(score/c) before mask and softmax */
    bool sinks;          /* attention sinks: name.sinks [heads], logits in the softmax's denominator only */
    ar_latent latent;    /* kv_rank > 0: multi-head latent attention; kv_heads == heads */
    /* Hugging Face names below the module's path; NULL: "q" (of the fused parameter: "qkv"), "k", "v", "out" */
    const char *q, *k, *v, *out;
    const char *q_norm, *k_norm; /* NULL: "q_norm", "k_norm" */
    /* Names of latent attention's low-rank projections and norms, required; without q_rank `q` replaces q_* */
    const char *q_a, *q_a_norm, *q_b, *kv_a, *kv_a_norm, *kv_b;
} ar_attention_options;
/** Creates multi-head, grouped-query or multi-query attention. X, Y [b, s, hidden] are placed as options->split says;
 *  without a split replicated (sp: each rank's own positions). Masks come from the batch. Heads are sharded if the
 *  split leaves q, k and v as S(-1): rank r has query heads [r*heads/N, (r+1)*heads/N) and KV heads [r*kv_heads/N,
 *  (r+1)*kv_heads/N), or if N > kv_heads the KV head floor(r*kv_heads/N), which N/kv_heads adjacent ranks hold copies
 *  of. Otherwise every rank has all heads. Context-parallel ranks (ar_context_groups) hold their own positions of X and
 *  Y; inside attention each of the I ranks of `inner` works on 1/I of its tensor-parallel rank's heads (or on a copy of
 *  a KV head) at the positions of all I. AR_ERR_INDIVISIBLE unless N divides heads, and N divides kv_heads or is a
 *  multiple of it; and I likewise divides a rank's heads. */
AR_NODISCARD ar_status ar_attention_create(ar_module **out, ar_ctx *ctx, const char *name,
                                           const ar_attention_options *o);

/* --- block -------------------------------------------------------------------------------------------------------- */

/** How a transformer block is sharded: the placements of its norms' inputs, and its two branches. */
typedef struct ar_block_split {
    ar_placement norm1, norm2; /* R or S(-2) */
    ar_branch_split attention, mlp;
} ar_block_split;
/** Options of a transformer block. */
typedef struct ar_block_options {
    ar_norm_kind norm;
    double norm_eps;
    ar_norm_place norm_place;
    bool norm_plus_one; /* gains of norms are 1 + their weights */
    bool norm_no_bias;  /* LayerNorm without bias */
    ar_residual residual;
    const ar_block_split *split; /* borrowed until return; NULL: the splits of the attention and MLP options, with norms
                                    placed as the activations between these */
    /* Hugging Face names below the block's path; NULL: "norm1", "norm2", "attention", "mlp", "attention_norm",
     * "mlp_norm" */
    const char *norm1, *norm2, *attention_name, *mlp_name;
    const char *attention_norm, *mlp_norm; /* norms of the outputs of attention and MLP */
    ar_attention_options attention;
    ar_mlp_options mlp;
    ar_experts_options experts; /* replaces the MLP if n > 0 */
    double branch_scale;        /* factor of attention's and the MLP's outputs, rounded to fp32; 0: none */
    size_t index;               /* of the block in the model, for ar_recomputation.every */
} ar_block_options;
/** Creates a transformer block:
 *    AR_NORM_BEFORE                 r = x + attention(norm1(x)), y = r + mlp(norm2(r))
 *    AR_NORM_AFTER                  r = x + attention_norm(attention(x)), y = r + mlp_norm(mlp(r))
 *    AR_NORM_AROUND                 both kinds of norms
 *    AR_RESIDUAL_PARALLEL           y = (x + attention(norm1(x))) + mlp(norm2(x))
 *    AR_RESIDUAL_PARALLEL_ONE_NORM  y = (x + attention(norm1(x))) + mlp(norm1(x)); there is no norm2
 *  Attention or the whole block is recomputed in the backward pass as ar_ctx_options.recompute says for its index. */
AR_NODISCARD ar_status ar_block_create(ar_module **out, ar_ctx *ctx, const char *name, const ar_block_options *o);

/* --- embedding and loss ------------------------------------------------------------------------------------------- */

/* How an embedding table [V, h] is sharded over the tensor-parallel ranks. */
typedef enum ar_embedding_split {
    AR_EMBEDDING_VOCAB,  /* by rows, ceil(V/N) on each rank (fewer on the last ones); outputs are combined by a
                            reduction to which one rank contributes each row */
    AR_EMBEDDING_HIDDEN, /* by columns, h/N on each rank; outputs are all-gathered along features (sp: an all-to-all
                            from features to positions) */
    AR_EMBEDDING_WHOLE   /* replicated; no communication in the forward pass */
} ar_embedding_split;
/** Creates a token embedding [vocab, h], with learned position embeddings [positions, h] (replicated) if `position` is
 *  not NULL. It reads the batch's token ids and ignores x, so it must be the first module, and it has no dx. y [b, s,
 *  h] = token row + position row; with sequence parallelism only the rank's own positions. With AR_EMBEDDING_VOCAB the
 *  rows are combined by an int32 all-reduce of bit patterns (sp: reduce-scatter). Backward communicates only if dy
 *  covers the rank's own positions: it is all-gathered, or with AR_EMBEDDING_HIDDEN exchanged for the rank's features
 *  by an all-to-all. Names: token, such as "transformer.wte" (the parameter is name.weight), and position; sum: tap
 *  name of token + position; NULL: token's name. init_range: standard deviation of fresh weights. Errors: also
 *  AR_ERR_INDIVISIBLE (AR_EMBEDDING_HIDDEN: N does not divide h); of forward AR_ERR_DATA (an id outside the
 *  vocabulary), AR_ERR_SHAPE (more tokens than positions), AR_ERR_ARG (a batch without ids). */
AR_NODISCARD ar_status ar_embedding_create(ar_module **out, ar_ctx *ctx, ar_embedding_split split, const char *token,
                                           size_t vocab, size_t h, double init_range, const char *position,
                                           size_t positions, const char *sum);

/** Creates an LM head: logits X W^T with W [vocab, h], for ar_cross_entropy_create (with AR_HELD_SHARD if the split
 *  leaves S(-1)). split NULL: column-parallel, each rank has ceil(vocab/N) of the logits. tied: the embedding's
 *  parameter, borrowed and sharded as the split says; NULL: a separate parameter name.weight. */
AR_NODISCARD ar_status ar_logits_create(ar_module **out, ar_ctx *ctx, const ar_linear_split *split, const char *name,
                                        size_t vocab, size_t h, ar_param *tied);

AR_END_DECLS
#endif
