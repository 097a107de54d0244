/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_LAYERS_H
#define ANYRANK_LAYERS_H

#include "anyrank/module.h"
#include "anyrank/placement.h"

AR_BEGIN_DECLS

/* Layers over the tensor-parallel group of the context they are made with: N ranks, r this one. Weights are [out, in].
 * X is [.., features]; leading dimensions are flattened to tokens, and whose sample's they are says ari_ctx_samples.
 * Y, dX are tensors of the step. All are collective: every rank of the group calls them in the same order.
 * Errors of every constructor: AR_ERR_INDIVISIBLE (names the parameter, the dimension, its size and N), AR_ERR_ARG,
 * AR_ERR_MEMORY; of forward and backward: AR_ERR_SHAPE, and what the communicator gives. */

/* --- the conjugate operators -------------------------------------------------------------------------------------- */

/* Each is a redistribution over the tensor-parallel group (parallelism.md), and its backward the transpose:
 * <A x, y> = <x, A^T y>. The letters are those of Korthikanti et al. 2022, arXiv:2205.05198, section 4, with * for a
 * bar (f* is the g of Shoeybi et al. 2019, arXiv:1909.08053, section 3). fp32, sums in the communicator's order. x
 * contiguous, equal parts on all ranks; *y becomes a tensor of the step, and y may be x. Errors:
 * AR_ERR_INDIVISIBLE, AR_ERR_ARG (too few dimensions), AR_ERR_SHAPE (x not contiguous), AR_ERR_MEMORY, what the
 * communicator gives. */

/** f, I -> R: copy to the region: y = x; its transpose is an all-reduce. Shapes equal. */
AR_NODISCARD ar_status ar_copy_to_region(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x);
AR_NODISCARD ar_status ar_copy_to_region_backward(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy);
/** f*, P(sum) -> I: reduce from the region: y = sum over ranks of x; its transpose is the identity (each rank's y is
 *  the same value, counted once). */
AR_NODISCARD ar_status ar_reduce_from_region(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x);
AR_NODISCARD ar_status ar_reduce_from_region_backward(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy);
/** S(-1) -> I: gather along features: x [.., f/N] -> y [.., f]; its transpose takes the own block. */
AR_NODISCARD ar_status ar_gather_from_region(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x);
AR_NODISCARD ar_status ar_gather_from_region_backward(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy);
/** I -> S(-1): scatter along features: x [.., f] -> the own block [.., f/N]; its transpose gathers. */
AR_NODISCARD ar_status ar_scatter_to_region(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x);
AR_NODISCARD ar_status ar_scatter_to_region_backward(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy);

/* The two of sequence parallelism, where between the regions rank r holds positions [r*s/N, (r+1)*s/N) of every
 * sequence. */
/** g, S(-2) -> R: gather along the sequence, x [.., s/N, f] -> y [.., s, f]; each rank's y then meets other weights, so
 *  its transpose is a reduce-scatter. */
AR_NODISCARD ar_status ar_gather_tokens(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x);
AR_NODISCARD ar_status ar_gather_tokens_backward(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy);
/** g*, P(sum) -> S(-2): reduce-scatter along the sequence, the ranks' x [.., s, f] added up -> the own positions y
 *  [.., s/N, f]; its transpose is an all-gather. */
AR_NODISCARD ar_status ar_scatter_tokens(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x);
AR_NODISCARD ar_status ar_scatter_tokens_backward(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy);

/** f, or with sequence parallelism g: what enters a tensor-parallel region. And f*, or g*: what leaves it. */
AR_NODISCARD ar_status ar_enter_region(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x);
AR_NODISCARD ar_status ar_enter_region_backward(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy);
AR_NODISCARD ar_status ar_leave_region(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x);
AR_NODISCARD ar_status ar_leave_region_backward(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy);

/* --- splits ------------------------------------------------------------------------------------------------------- */

/* Split of a plan's module over the tensor-parallel ranks (anyrank/plan.h). */
typedef enum ar_style {
    AR_STYLE_REPLICATE, /* whole on every rank */
    AR_STYLE_COLWISE,   /* rows of W [out, in]: the output is sharded along features; of an embedding: hidden */
    AR_STYLE_ROWWISE,   /* columns of W: the output is a sum over the ranks; of an embedding: vocab */
    AR_STYLE_VOCAB,     /* rows of an embedding or LM head, uneven where the vocabulary does not divide */
    AR_STYLE_HIDDEN,    /* columns of an embedding: the output is sharded along features */
    AR_STYLE_SEQUENCE,  /* of a norm: whole on every rank, which takes its own positions (sequence parallelism) */
    AR_STYLE_PREPARE,   /* of a module of others: only says how its inputs and outputs are placed */
    AR_STYLES
} ar_style;

/** A linear layer Y = X W^T + b: how W is cut, and how X and Y [.., s, features] are placed over the ranks outside of
 *  it. Placements of activations are R (or I, the same numbers), S(-2), S(-1) and P(sum), S counted from the end.
 *
 *    style      takes X   makes Y   backward: takes dY   makes dX
 *    colwise    R         S(-1)     S(-1)                P(sum)
 *    rowwise    S(-1)     P(sum)    R                    S(-1)
 *    replicate  R         R         R                    R
 *
 *  What is between `from` and what the style takes, and between what it makes and `to`, is redistributed; backward the
 *  transpose. Nothing checks `from`: an X that is placed otherwise and has the shape of `from` is taken for it. A `to`
 *  of P(sum) leaves rowwise terms as they are, each rank's rounded; for other styles it is AR_ERR_ARG. */
typedef struct ar_linear_split {
    ar_style style; /* AR_STYLE_COLWISE, _ROWWISE or _REPLICATE */
    ar_placement from, to;
} ar_linear_split;

/** A redistribution over the tensor-parallel ranks; none where both are the same. */
typedef struct ar_tp_redistribution {
    ar_placement from, to;
} ar_tp_redistribution;

/** An attention or an MLP: what its input is made, the first layers, which share that input, what is between them (by
 *  heads or features where first.to is S(-1), else whole on every rank), the last layer, what its output is made. */
typedef struct ar_branch_split {
    ar_tp_redistribution enter;
    ar_linear_split first, second;
    ar_tp_redistribution leave;
    /* Of experts: the one that all tokens go to is whole on every rank, where the others may be cut. */
    bool shared_whole;
} ar_branch_split;

/* --- linear layers ------------------------------------------------------------------------------------------------ */

typedef struct ar_linear_options {
    bool bias;
    bool gather_output;    /* column: Y is gathered along features; else it stays sharded */
    bool input_is_sharded; /* row: X is this rank's features already; else the own slice is taken */
} ar_linear_options;

/** Column-parallel: W_r = rows block [out/N, in], b_r = block [out/N].
 *    forward   Y_r = X W_r^T + b_r          X replicated [.., in], Y_r [.., out/N] (gather_output: [.., out])
 *    backward  dX = sum_r dY_r W_r          an all-reduce
 *              dW_r = dY_r^T X, db_r = sum_t dY_r
 *  With sequence parallelism X and dX are the rank's own positions [.., s/N, in]: X is gathered along the sequence, and
 *  dX is a reduce-scatter along it. Y_r has all positions; with gather_output, the own ones.
 *  Parameters: name.weight [out, in], name.bias [out]. Taps: name:fwd, name:bwd (dX), gradients. */
AR_NODISCARD ar_status ar_column_linear_create(ar_module **out, ar_ctx *ctx, const char *name, size_t in_features,
                                               size_t out_features, const ar_linear_options *o);
/** Row-parallel: W_r = columns block [out, in/N], b whole, added once after the sum.
 *    forward   Y = sum_r X_r W_r^T + b      an all-reduce; Y replicated [.., out]
 *    backward  dX_r = dY W_r (input not sharded: gathered along features), dW_r = dY^T X_r, db = sum_t dY
 *  With sequence parallelism Y and dY are the rank's own positions [.., s/N, out]: Y is a reduce-scatter along the
 *  sequence, dY is gathered along it, and db is of the own positions until the gradients are reduced. X_r has all
 *  positions; an X that is not sharded along features has the own ones, and is gathered.
 *  Parameters and taps as above. */
AR_NODISCARD ar_status ar_row_linear_create(ar_module **out, ar_ctx *ctx, const char *name, size_t in_features,
                                            size_t out_features, const ar_linear_options *o);

/* --- norms (replicated) ------------------------------------------------------------------------------------------- */

/** Every rank does all rows it is given, which with sequence parallelism are those of its own positions: the gradients
 * are then complete once they are reduced.
 * LayerNorm (Ba, Kiros, Hinton 2016, arXiv:1607.06450) or RMSNorm (Zhang, Sennrich 2019, arXiv:1910.07467) over the
 * last dimension h; the formulas are in numerics.md, section 4. Parameters: name.weight [h], LayerNorm also
 * name.bias [h]. */
AR_NODISCARD ar_status ar_norm_create(ar_module **out, ar_ctx *ctx, const char *name, ar_norm_kind kind, size_t h,
                                      double eps);

/* --- activations, dropout, layers one after the other ------------------------------------------------------------- */

/** y = act(x), element by element, x contiguous. placement: what of x a rank has; AR_HELD_SHARD between a column-parallel
 *  layer and a row-parallel one. Taps: name:fwd, name:bwd, unless AR_HELD_UNKNOWN. Errors: also AR_ERR_ARG
 *  (AR_ACT_NONE). */
AR_NODISCARD ar_status ar_activation_create(ar_module **out, ar_ctx *ctx, const char *name, ar_activation act,
                                            ar_held placement);
/** y = child[n-1](.. child[0](x)). Their names are their own. owned: they are destroyed with it; else they are borrowed
 *  until ar_module_destroy. n = 0: y is x. On error the children stay the caller's. */
AR_NODISCARD ar_status ar_sequential_create(ar_module **out, const char *name, ar_module *const *child, size_t n,
                                            bool owned);
/** Ends a chain of creations that came to `st`: AR_OK: gives a list that owns its children. On any error those that were
 *  made (NULL: not) are destroyed. */
AR_NODISCARD ar_status ar_sequential_made(ar_module **out, const char *name, ar_module *const *child, size_t n,
                                          ar_status st);

/** Cuts a list of modules into the stages of the context's pipeline, and destroys those of other ranks. Its children
 *  [first, first + layers) are shared out as the layers of a model are (ari_stage_layers); the first stage also has those
 *  before them, the last one those after. Between two of them goes one value of each sample, of this shape, whose first
 *  of two dimensions or more are positions. Without a pipeline all stay. ar_module_train_step goes through the stages.
 *  m was made with `own`; what is recomputed are its children: as ar_ctx_options.recompute says of blocks, every n-th of
 *  those layers, or of it what is selective. ZeRO-2 and -3 take each child as a unit (ddp.h).
 *  Errors: AR_ERR_ARG (no list, or one that is cut; children that it has not; the stages of ar_parallel),
 *  AR_ERR_INDIVISIBLE (fewer layers than stages), AR_ERR_UNSUPPORTED (a parameter that two ranks would share,
 *  other than the first and the last, each of which has a copy),
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_sequential_cut(ar_module *m, ar_ctx *ctx, size_t start, size_t layers, int sample_ndim,
                                         const size_t *sample_shape);
/** The same, around the list of a chain of creations, as ar_sequential_made. */
AR_NODISCARD ar_status ar_residual_made(ar_module **out, const char *name, ar_module *const *child, size_t n,
                                        ar_held placement, ar_status st);

/* --- MLP ---------------------------------------------------------------------------------------------------------- */

typedef enum ar_mlp_order {
    AR_MLP_COLUMN_ROW, /* one all-reduce forward, one backward */
    AR_MLP_ROW_COLUMN  /* an all-reduce in the middle and an all-gather at the end */
} ar_mlp_order;
typedef struct ar_mlp_options {
    size_t hidden, ffn;
    ar_activation activation;
    bool gated, bias;
    bool transposed;              /* weights stored [in, out] (GPT-2) */
    bool fused;                   /* gate and up are one parameter [2*ffn, hidden], `first`, without a bias (Phi-3) */
    const ar_branch_split *split; /* borrowed until return; NULL: colwise, then rowwise */
    /* Hugging Face names below the MLP's path; NULL: "fc1", "gate", "fc2" */
    const char *first, *second, *up; /* c_fc / gate_proj, c_proj / down_proj, up_proj */
} ar_mlp_options;
/** act(X W1^T + b1) W2^T + b2, or gated: (act(X Wg^T) * (X Wu^T)) W2^T. X, Y [.., hidden] as the split has them;
 *  without one replicated, with sequence parallelism the own positions. */
AR_NODISCARD ar_status ar_mlp_create(ar_module **out, ar_ctx *ctx, const char *name, const ar_mlp_options *o);

/* --- experts ------------------------------------------------------------------------------------------------------ */

typedef struct ar_experts_options {
    size_t hidden;
    size_t n, per_token; /* E experts, k of them for each token */
    size_t ffn;          /* width of each */
    bool bias;           /* of the router and of all three products of an expert */
    size_t shared;       /* width of one more, to which all tokens go, with a gate of its own; 0: none */
    bool ungated;        /* or without that gate */
    bool normalised;     /* a token's weights are divided by their sum */
    ar_route_scores scores;
    ar_activation activation;
    double balance_weight;        /* of AR_BALANCE_LAYERS, where the context's options balance nothing; 0: none */
    const ar_branch_split *split; /* borrowed until return; NULL: ari_experts_split, cut */
    const char *gate, *up, *down; /* of an expert, below "experts.N"; NULL: "gate_proj", "up_proj", "down_proj" */
    const char *shared_name;      /* of that one; NULL: "shared_expert" */
    const char *router;           /* NULL: "gate" */
    const char *router_bias;      /* by which scores choose; NULL: "gate.e_score_correction_bias" */
} ar_experts_options;

/* --- attention ---------------------------------------------------------------------------------------------------- */

typedef struct ar_attention_options {
    size_t hidden, heads, kv_heads, head_dim;
    bool qkv_bias, out_bias;
    const ar_branch_split *split; /* borrowed until return; NULL: colwise, then rowwise, the heads split */
    bool causal;
    size_t window; /* sliding window: key j of query i is masked where j + window <= i; 0: none */
    ar_rope rope;
    size_t max_positions; /* rows of the rotary tables */
    bool fused;           /* q | k | v are one parameter, of which no rank holds a copy of a KV head */
    bool by_head;         /* of fused: each head's q | k | v, one after the other (GPT-NeoX); kv_heads is heads */
    bool transposed;      /* weights stored [in, out] (GPT-2) */
    ar_qk_norm qk_norm;   /* RMSNorms of queries and of keys, with norm_eps, before the rotation */
    bool norm_plus_one;   /* whose gains are 1 + their weights */
    double norm_eps;
    double query_scalar; /* scores are divided by its root; 0: head_dim */
    double score_cap;    /* c > 0: scores become c*tanh(score/c) */
    bool sinks;          /* one logit a head, name.sinks [heads], in the softmax's denominator alone */
    ar_latent latent;    /* kv_rank > 0: q, k and v are made by low-rank projections, with as many KV heads as heads */
    /* Hugging Face names below the path; NULL: "q" (fused, where it names the one parameter: "qkv"), "k", "v", "out" */
    const char *q, *k, *v, *out;
    const char *q_norm, *k_norm; /* likewise; NULL: "q_norm", "k_norm" */
    /* likewise, of latent attention, which needs them; without q_rank the queries are `q`'s */
    const char *q_a, *q_a_norm, *q_b, *kv_a, *kv_a_norm, *kv_b;
} ar_attention_options;
/** Multi-head, grouped-query or multi-query attention. Heads are split over ranks where q, k and v leave as S(-1), else
 *  every rank has all of them. Split, rank r has query heads [r*heads/N, ..) and KV heads [r*kv_heads/N, ..), or with
 *  more ranks than KV heads the one KV head floor(r*kv_heads/N), of which N/kv_heads neighbouring ranks then hold equal
 *  copies. Context-parallel ranks (ar_context_groups) have the heads of their tensor-parallel rank and their own
 *  positions of X and Y; between the projections I inner neighbours each work on 1/I of those heads, or on copies of a
 *  KV head, at all their positions. AR_ERR_INDIVISIBLE unless N divides heads, and divides kv_heads or is a multiple of
 *  it (as a colwise layer has copies), and I the same of a rank's heads. X, Y [b, s, hidden] as the split has them;
 *  without one replicated (sp: the own positions). Masks come from the batch. */
AR_NODISCARD ar_status ar_attention_create(ar_module **out, ar_ctx *ctx, const char *name,
                                           const ar_attention_options *o);

/* --- block -------------------------------------------------------------------------------------------------------- */

/** A block: what each norm works on, and its two branches. */
typedef struct ar_block_split {
    ar_placement norm1, norm2; /* R or S(-2) */
    ar_branch_split attention, mlp;
} ar_block_split;
typedef struct ar_block_options {
    ar_norm_kind norm;
    double norm_eps;
    ar_norm_place norm_place;
    bool norm_plus_one; /* gains are 1 + weights */
    bool norm_no_bias;  /* LayerNorm without an offset */
    ar_residual residual;
    const ar_block_split *split; /* borrowed until return; NULL: that of the attention's and the MLP's options, norms on
                                    what is between them */
    /* below the block's path; NULL: "norm1", "norm2", "attention", "mlp", "attention_norm", "mlp_norm" */
    const char *norm1, *norm2, *attention_name, *mlp_name;
    const char *attention_norm, *mlp_norm; /* of what attention and MLP make */
    ar_attention_options attention;
    ar_mlp_options mlp;
    ar_experts_options experts; /* in the MLP's place where n > 0 */
    double branch_scale;        /* what attention and MLP add is multiplied by it, rounded to fp32; 0: it is not */
    size_t index;               /* among the model's blocks, of which ar_ctx_options.recompute takes every n-th */
} ar_block_options;
/** Transformer block: r = x + attention(norm1(x)); y = r + mlp(norm2(r)). With norms after them (AR_NORM_AFTER) r = x +
 *  attention_norm(attention(x)), y = r + mlp_norm(mlp(r)), or both (AR_NORM_AROUND). A parallel residual is y = (x +
 *  attention(norm1(x))) + mlp(norm2(x)), with one norm mlp(norm1(x)), and has no norm2. As ar_ctx_options.recompute says
 *  of its index, its attention or all of it is recomputed (ar_module_recompute). */
AR_NODISCARD ar_status ar_block_create(ar_module **out, ar_ctx *ctx, const char *name, const ar_block_options *o);

/* --- embedding and loss ------------------------------------------------------------------------------------------- */

/* Split of its table [V, h]. */
typedef enum ar_embedding_split {
    AR_EMBEDDING_VOCAB, /* rank r has ceil(V/N) rows (the last ranks fewer): the output is a selection over the ranks */
    AR_EMBEDDING_HIDDEN, /* columns, h/N on each rank: the output is sharded along features, then gathered (sp: an
                            all-to-all from features to positions) */
    AR_EMBEDDING_WHOLE   /* every rank has all of it, and nothing moves forward */
} ar_embedding_split;
/** The first module of a list: it takes the batch's ids and does not look at x, and there is no dx. y [b, s, h] = token rows
 *  (by vocabulary a selection: an int32 all-reduce of bit patterns) + position rows; with sequence parallelism the own
 *  positions of it (a reduce-scatter). Optionally learned positions [positions, h], replicated. Names: token
 *  "transformer.wte" (its parameter adds ".weight"), position likewise or NULL, and `sum` the name under which token +
 *  position is tapped, NULL: the token's. Backward moves nothing between ranks, but for a dy that is the own positions: it
 *  is gathered, or by hidden exchanged for the own features. Gives; ar_module_destroy. Errors: also AR_ERR_INDIVISIBLE
 *  (hidden: N does not divide h); of forward AR_ERR_DATA (an id outside the vocabulary), AR_ERR_SHAPE (more tokens than
 *  positions), AR_ERR_ARG (a batch without ids). */
AR_NODISCARD ar_status ar_embedding_create(ar_module **out, ar_ctx *ctx, ar_embedding_split split, const char *token,
                                           size_t vocab, size_t h, double init_range, const char *position,
                                           size_t positions, const char *sum);

/** Logits X W^T with W [V, h], for ar_cross_entropy_create (AR_HELD_SHARD where the split leaves S(-1)). split NULL: colwise,
 *  the logits a shard of ceil(V/N) of them a rank. tied: the embedding's parameter, borrowed, cut as the split says; NULL:
 *  an own one, name.weight. */
AR_NODISCARD ar_status ar_logits_create(ar_module **out, ar_ctx *ctx, const ar_linear_split *split, const char *name,
                                        size_t vocab, size_t h, ar_param *tied);

AR_END_DECLS
#endif
