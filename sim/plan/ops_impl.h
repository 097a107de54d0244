/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "sim/plan/ops.h"

/* Values side by side: activations, or their gradients. */
typedef struct ari_values {
    ari_op_value at[ARI_OP_VALUES];
    int n;
} ari_values;

/* An operation of a section's forward pass, for its backward pass: the numbers of what it takes and makes. */
typedef struct ari_forward {
    ari_operation_kind kind;
    ari_role role;
    size_t in[ARI_OP_VALUES], out[ARI_OP_VALUES];
} ari_forward;

/* Scopes of a section's values: made by its forward pass, recomputed for its backward pass, and gradients. */
typedef enum ari_scope { ARI_SCOPE_FORWARD, ARI_SCOPE_RECOMPUTED, ARI_SCOPE_GRADIENTS, ARI_SCOPES } ari_scope;
enum { ARI_FORWARDS = 48 };

/* A layer of the rank, by number, and where its parameters begin among those of the blocks. */
typedef struct ari_unit_place {
    size_t unit, layer, begin;
    const struct ari_part_list *parts; /* NULL: none yet */
} ari_unit_place;

/* A parameter of a layer, and its elements on this rank; 0: not known yet. */
typedef struct ari_known_param {
    ari_op_value value;
    size_t elements;
} ari_known_param;

/* The step's form of computation and storage, the same throughout. */
typedef struct ari_step_form {
    bool exact, sp;
    ar_dtype activations, matrices; /* as new activations, and parameters of two dimensions, are stored */
    bool by_tokens;                 /* what the plan is asked for (ari_plan_by_tokens); one rank has all of them */
    bool overlaps;                  /* collectives of tokens go beside products */
    bool packed;                    /* q, k and v are one parameter */
    bool gate_up;                   /* gate and up are one */
    bool head;                      /* an LM head and a cross-entropy; without, the loss sums the output */
} ari_step_form;

/* Which values there are where the walk is, by their numbers. */
typedef struct ari_edges {
    size_t values, section;  /* as in ari_operations_values; of the model: 0, what comes before the blocks; block 0, ..;
                                what comes after them; blocks for further tokens, with their heads */
    size_t made[ARI_SCOPES]; /* in the section so far */
    ari_values now;          /* what the next operation takes */
    size_t entered, skip;    /* the value that the block takes; what goes past the branch, or its gradient */
    bool unseen;             /* nothing is visited: a forward pass is gone through for the numbers of its values */
    ari_forward forward[ARI_FORWARDS]; /* of the section, where its backward pass follows */
    int forwards;
} ari_edges;

/* Builds a rank's operations in their order and visits each. The first error, an overflow or the visitor's, stays in
 * `st`; results after it are undefined, and nothing more is visited. */
typedef struct ari_op_builder {
    const ari_step_case *c;
    const ar_config *config;
    size_t ranks[ARI_PLACED_AXES], at[ARI_PLACED_AXES]; /* along each axis; where this one is */
    size_t stages, stage;                               /* of the pipeline; the one that the walk is in */
    bool first, last;                                   /* the rank has the first stage; the last */
    bool pipeline;                                      /* the walk goes through the stages of all ranks */
    /* Of what all ranks have, and [1] of experts: the ranks over which gradients are summed; of them, those that share
     * out what ZeRO does; this one's number among these. */
    size_t summing[2], sharing[2], sharing_rank[2];
    size_t ep;                    /* who share out the experts */
    size_t experts, first_expert; /* of this rank, of each layer that has any */
    ari_unit_place unit_at;       /* of the parameter before */
    bool whole, apart;            /* these are not cut over tp; they have groups of their own */
    /* 1 + the kind of a role's weight, and bias, where layers are split alike; 0: not known yet. */
    unsigned char kind[ARI_ROLES][2];
    ari_known_param known[ARI_ROLES][2]; /* the same; of role 0 any that is not */
    ari_step_form form;
    ari_operation_pass pass;
    ar_pp_kind part;            /* of it */
    bool deferred;              /* building what a backward pass for the input defers to that for the weights */
    bool x_scaled;              /* a weight before has met the same x, whose exponents are known */
    bool in_experts;            /* of rows of a token's experts, and weights of all experts */
    size_t layer, micro, times; /* as in ari_operation */
    ar_outer_split outer;
    ar_block_split block;   /* of the layer; of no use outside of the blocks */
    size_t split;           /* the layer that it was read for; ARI_NO_LAYER: none yet */
    size_t all, own;        /* samples of the pass: of all dp ranks, of this one */
    size_t tokens;          /* of `own`, at this rank's positions */
    bool regathered, stays; /* as in ari_operation */
    bool recomputed;        /* as in ari_operation: the walk is in the forward pass, that of the operations is not */
    ar_recompute within;
    bool multiplied;   /* what is gathered next is multiplied then */
    bool every_bucket; /* visits buckets that nothing moves too */
    bool absent, unit; /* the rank has no samples of the micro-batch; what it does all the same, for what is shared */
    bool counting;     /* in the pass that counts the routes */
    bool passed[3][AR_MAX_STAGES]; /* forward, backward, counting: the stage has had one since the weights changed */
    ari_operation op;              /* the next to be visited */
    ari_edges edges;
    ari_operation_visitor visit;
    void *user;
    ar_status st;
} ari_op_builder;

/** a*b and a+b; 0 after an error. */
size_t ari_op_builder_mul(ari_op_builder *w, size_t a, size_t b);
size_t ari_op_builder_add(ari_op_builder *w, size_t a, size_t b);
/** The layers [*begin, *end) of a stage. */
void ari_op_builder_stage_layers(const ari_op_builder *w, size_t stage, size_t *begin, size_t *end);
/** The same with the blocks for further tokens, which follow the layers of the last stage. */
void ari_op_builder_stage_blocks(const ari_op_builder *w, size_t stage, size_t *begin, size_t *end);
/** Goes to a layer, ARI_NO_LAYER or a block, whose splits it reads from the plan. */
void ari_op_builder_layer(ari_op_builder *w, size_t layer);

/* An operation: begun, its values and collectives added, visited. */
ari_operation *ari_op_builder_begin(ari_op_builder *w, ari_operation_kind kind, ari_role role);
void ari_op_builder_visit(ari_op_builder *w);
/** Visits an operation of a pass whose inputs have their numbers: numbers what it makes, unless it has done that
 *  itself, and leaves that for the next one. */
void ari_op_builder_make(ari_op_builder *w);
/** The i-th value that there is, or what it is a part of, held to be v. */
ari_op_value ari_op_builder_held(const ari_op_builder *w, ari_op_value v, int i);
/** The number of the first value that there is. */
static inline size_t ari_op_builder_now(const ari_op_builder *w)
{
    return w->edges.now.at[0].id;
}
/** Begins an operation from what there is, so many values, to one of these features, all placed alike. */
ari_operation *ari_op_builder_local(ari_op_builder *w, ari_operation_kind kind, ari_role role, int inputs,
                                    size_t features, ar_placement at);
/** A number for a value of the operation that has been begun. */
size_t ari_op_builder_new_value(ari_op_builder *w);
/** The section's input; in a backward pass its gradient. */
size_t ari_op_builder_stream_value(const ari_op_builder *w, size_t section);
/** The stage's message of this pass: the one sent to it, or what it receives of that. */
size_t ari_op_builder_message_value(const ari_op_builder *w, size_t stage, bool received);
/** The section's forward pass, walked through without output; NULL: it has none. */
ari_forward *ari_op_builder_forward_of(ari_op_builder *w, ari_operation_kind kind, ari_role role);

/** A collective in the operation that has been begun; none in a group of one, or where its weights are not new. What is
 *  exchanged of the experts' weights each has by itself. */
void ari_op_builder_call(ari_op_builder *w, ari_call_kind kind, ari_over over, size_t elements, ar_dtype dtype,
                         ari_call_often often, ari_role role, const char *tag);
/** True if the integers of a sum over so many positions have fewer bits, as those of products with a weight do. */
bool ari_op_builder_is_narrow(const ari_op_builder *w, size_t terms);
/** An all-to-all in which each rank gets its share of n sums from the others, in so many bytes each. */
void ari_op_builder_send_sums(ari_op_builder *w, ari_over over, size_t n, size_t width, ari_call_often often,
                              ari_role role, const char *tag);
/** The way back: an all-gather of n sums, of so many elements each. */
void ari_op_builder_gather_sums(ari_op_builder *w, ari_over over, size_t n, size_t width, ar_dtype dtype,
                                ari_call_often often, ari_role role, const char *tag);
/** A reduce-scatter of n exact sums of so many products; narrow: of bf16 numbers, whose sums fit one int64. */
void ari_op_builder_scatter_sums(ari_op_builder *w, ari_over over, size_t n, size_t terms, bool narrow, ari_role role,
                                 const char *tag);
/** The collective that has been added last happens so many times. */
void ari_op_builder_repeat(ari_op_builder *w, size_t times);

/* Placements over tp. */
extern const ar_placement ari_whole, ari_by_tokens, ari_by_features;
/** A plan's placement, with the dimension of a shard counted from the first. */
ar_placement ari_op_builder_placed(ar_placement p);
bool ari_op_builder_same(ar_placement a, ar_placement b);
/** Between the tensor-parallel regions: by tokens with sequence parallelism, else whole. */
ar_placement ari_op_builder_stream(const ari_op_builder *w);
/** This rank's extents of a value that is placed so. */
void ari_op_builder_place(const ari_op_builder *w, ari_op_value *v);
/** ari_op_value.by_expert of what experts have. */
ari_axes ari_op_builder_apart(const ari_op_builder *w);
/** An activation [b, s, features], or of rows of experts. copies as in ari_op_value. */
ari_op_value ari_op_builder_activation(ari_op_builder *w, size_t features, ar_placement tp, size_t copies);
/** Rows of the rank's part of an activation. */
size_t ari_op_builder_rows(ari_op_builder *w);
/** A parameter of the layer that the walk is at, in products of the experts one of each. */
ari_op_value ari_op_builder_param(ari_op_builder *w, ari_role role, bool bias);
/** True if the layer's heads are split over the ranks. */
bool ari_op_builder_by_heads(const ari_op_builder *w);
/** Ranks that hold one KV head of the layer between them: of those of tp, or in attention (heads) of these and of the
 *  neighbours with which they exchange heads for positions. */
size_t ari_op_builder_kv_copies(const ari_op_builder *w, bool heads);
/** Ranks of a group. */
size_t ari_op_builder_ranks(const ari_op_builder *w, ari_over over);
/** Positions of a sequence that this rank has between the tensor-parallel regions. */
size_t ari_op_builder_positions(const ari_op_builder *w);
/** Ranks that share the positions of a sequence. */
size_t ari_op_builder_cp(const ari_op_builder *w);
/** Copies of a weight's part, by its role. */
size_t ari_op_builder_copies(const ari_op_builder *w, ari_role role);
bool ari_op_builder_has_bias(const ari_op_builder *w, ari_role role);

/** Makes the gradient of one parameter: an operation, visited. x NULL: out of dy alone. */
void ari_op_builder_weight_gradient(ari_op_builder *w, ari_role role, bool bias, const ari_op_value *x,
                                    const ari_op_value *dy);
/** That of a norm's weight. */
void ari_op_builder_norm_gradient(ari_op_builder *w, ari_role role, const ari_op_value *dy);

/* --- products (ops_product.c) ------------------------------------------------------------------------------------- */

/* Weights that multiply the same input, and what arrives and leaves. Column-parallel weights, whose rows are cut, take
 * a whole input and make shards of features; row-parallel ones take shards of features and make a partial sum; whole
 * ones take and make what is whole. What is between that and the placements on both sides is a redistribution, and
 * backward its transpose. A partial sum is folded where it is wanted, but for shards of features. */
typedef struct ari_linear_ops {
    ari_role part[ARI_OP_VALUES];
    int n;
    ar_linear_split split;             /* placements as ari_op_builder_placed has them */
    ari_role module;                   /* whose input it is that is redistributed */
    bool local;                        /* whole weights multiply what each rank has, placed as that is */
    void (*remake)(ari_op_builder *w); /* what makes the input again for the weights' gradients; NULL: it is kept */
} ari_linear_ops;

void ari_op_builder_linear(ari_op_builder *w, const ari_linear_ops *l);
/** before: the layer that has gone backward before it, behind whose products its input has been gathered again where
 *  collectives go beside products; after: the one that follows, of which this one does that. NULL: none. */
void ari_op_builder_linear_backward(ari_op_builder *w, const ari_linear_ops *l, const ari_linear_ops *before,
                                    const ari_linear_ops *after);
/** Values of a layer's forward pass that its backward pass needs. */
void ari_op_builder_linear_recompute(ari_op_builder *w, const ari_linear_ops *l);
/** Redistributes the next operation's input over tp within a module; nothing if both placements are the same. */
void ari_op_builder_move(ari_op_builder *w, ar_tp_redistribution change, ari_role module);
/** The way back, of the gradient. */
ar_tp_redistribution ari_op_builder_back(ar_tp_redistribution change);
/** The same by the layer itself, which exchanges shards along two dimensions directly: an all-to-all. */
void ari_op_builder_exchange(ari_op_builder *w, ar_placement from, ar_placement to);

/** A call of the pass over values of a weight, in experts of theirs. */
void ari_op_builder_call_for(ari_op_builder *w, ari_call_kind kind, ari_over over, size_t elements, ar_dtype dtype,
                             ari_role role);
/** Of a weight's gradient, what ranks that share a sequence send each other (ops_rows.c). */
void ari_op_builder_share_rows(ari_op_builder *w, const ari_op_value *weight, const ari_op_value *x,
                               const ari_op_value *dy, ari_role role);

/* --- latent attention (ops_latent.c) ------------------------------------------------------------------------------ */
/** From the attention's input, redistributed and then placed as `first` takes it, to queries, keys and values as ari_op_builder_qkv has them; and back, to
 *  the gradient of the input x. */
void ari_op_builder_latent(ari_op_builder *w, ar_tp_redistribution enter, ar_linear_split first);
void ari_op_builder_latent_backward(ari_op_builder *w, ar_tp_redistribution enter, ar_linear_split first, size_t x);

/* --- attention (ops_attention.c) ---------------------------------------------------------------------------------- */
/** Norms of queries and of keys, where the config has them; either pass. */
void ari_op_builder_qk_norms(ari_op_builder *w);
void ari_op_builder_rope(ari_op_builder *w);
/** Queries, keys and values as the projections make them. */
ari_values ari_op_builder_qkv(ari_op_builder *w);
void ari_op_builder_attend(ari_op_builder *w);
void ari_op_builder_attend_backward(ari_op_builder *w);

/* --- experts in the MLP's place (ops_experts.c) ------------------------------------------------------------------- */
/** False: the layer has an MLP. again: what its backward pass needs of the forward pass. */
bool ari_op_builder_experts(ari_op_builder *w, bool again);
bool ari_op_builder_experts_backward(ari_op_builder *w);

/* --- a block (ops_block.c) ---------------------------------------------------------------------------------------- */
/** made: the number of what the norm makes, of its input's gradient backward; 0: a new one. */
void ari_op_builder_norm(ari_op_builder *w, ari_role role, size_t made);
void ari_op_builder_norm_backward(ari_op_builder *w, ari_role role, size_t made);
void ari_op_builder_block(ari_op_builder *w);
void ari_op_builder_block_backward(ari_op_builder *w);

/* --- the ends of a model (ops_ends.c) ------------------------------------------------------------------------------- */
void ari_op_builder_embedding(ari_op_builder *w);
void ari_op_builder_embedding_backward(ari_op_builder *w);
void ari_op_builder_loss(ari_op_builder *w);
void ari_op_builder_loss_backward(ari_op_builder *w);
/** What a block for a further token multiplies: two values side by side; backward their gradients apart. */
void ari_op_builder_side_by_side(ari_op_builder *w, size_t tokens, size_t entered);

/* --- the stage that the walk is in (ops_model.c) ------------------------------------------------------------------ */
/** The stage's message from its neighbour, or to it, in this pass; nothing without a neighbour. */
void ari_op_builder_message(ari_op_builder *w, bool sends);
/** Makes this value, of the model's width, the next operation's input. */
void ari_op_builder_take(ari_op_builder *w, size_t id);
void ari_op_builder_dropout(ari_op_builder *w, ari_role role);
/** A layer's placements as ari_op_builder_placed has them. */
ar_linear_split ari_op_builder_placed_split(ar_linear_split s);
void ari_op_builder_forward(ari_op_builder *w);
void ari_op_builder_backward(ari_op_builder *w);

/* --- parameters (ops_registered.c) and buckets (ops_bucket.c) ------------------------------------------------------ */

typedef struct ari_param_part {
    ari_role role;
    bool bias;
} ari_param_part;

enum { ARI_PARTS = 32 };
/* Parts in their order. Those at [first, first + of_each) each of the experts has in turn. */
typedef struct ari_part_list {
    ari_param_part at[ARI_PARTS];
    size_t parts, first, of_each;
    size_t n; /* parameters */
} ari_part_list;

/* In the order of their registration: before the layers, of each of the rank's layers, which has an MLP or experts,
 * after them, of blocks for further tokens, last. */
typedef struct ari_params {
    ari_part_list before, block, experts, after, further, last; /* block, experts, further: of one block */
    size_t layers, with_experts;                                /* blocks of the rank; of them, those with experts */
    size_t mtp;                                                 /* of them, those for further tokens, at the end */
    size_t in_layers, in_blocks, n;                             /* of layers, and of all blocks; in all */
} ari_params;

typedef struct ari_one_param {
    size_t layer, unit; /* unit: the i-th of the rank's layers; the number of them: none */
    ari_param_part of;
    size_t expert;
    size_t before, after; /* it and so many of the experts' before it, and after it, are of the same size */
    ari_op_value value;
    size_t elements; /* of this rank */
} ari_one_param;

/* Parameters share a bucket that are stored alike, summed over the same groups, and of as many elements on every tp
 * rank, or all of them not. Of those in bf16 tables of tokens and positions have one apart: their elements are sums of
 * many values, and move in more bytes. */
enum {
    ARI_KIND_TABLE = 64,
    ARI_KIND_EXPERT = 16,
    ARI_KIND_ENDS = 8,
    ARI_KIND_UNEVEN = 4,
    ARI_KIND_SPREAD = 2,
    ARI_KIND_NARROW = 1,
    ARI_KIND_MATRIX = 32,
    ARI_BUCKET_KINDS = 128
};

/* A place in the order of packing: by `major`, then by `minor`. */
typedef struct ari_bucket_place {
    size_t major, minor;
} ari_bucket_place;

/* A bucket; with shared-out gradients (ZeRO-2) it belongs to one unit. */
typedef struct ari_op_builder_bucket {
    size_t unit;
    ari_one_param first;
    int kind;
    size_t elements, params;
    ari_bucket_place last; /* of its last parameter in the order of packing */
    ari_op_param latest;   /* in that of the backward pass, of this bucket and those before it */
    bool by_token;         /* an element can be the sum of a value a token, */
    bool by_any;           /* or of any number of values */
} ari_op_builder_bucket;

ari_params ari_op_builder_all_params(ari_op_builder *w);
/** The i-th of the rank's blocks, and the parts of that one. */
size_t ari_op_builder_own_layer(const ari_op_builder *w, size_t i);
const ari_part_list *ari_op_builder_parts_of(const ari_op_builder *w, const ari_params *p, size_t unit);
/* Layers with the same parts: without experts, with them, for further tokens. */
enum { ARI_PARTS_OF_MLP, ARI_PARTS_OF_EXPERTS, ARI_PARTS_OF_FURTHER, ARI_PARTS_KINDS };
int ari_op_builder_parts_kind(const ari_op_builder *w, size_t layer);
/** True if each of the rank's blocks has experts, or none, and no other parts. */
bool ari_op_builder_same_parts(const ari_params *p);
/** Parameter i in that order, but for its value. */
ari_one_param ari_op_builder_locate(ari_op_builder *w, const ari_params *p, size_t i);
/** The same with it; the walk is at its layer then. */
ari_one_param ari_op_builder_param_at(ari_op_builder *w, const ari_params *p, size_t i);

/* A unit of those that ZeRO-2 reduces one after the other: a layer, or ARI_NO_LAYER, the root unit; of all buckets. */
enum { ARI_ALL_UNITS = SIZE_MAX - 1 };
typedef void (*ari_bucket_fn)(ari_op_builder *w, const ari_op_builder_bucket *b, size_t index);
/** Calls f for each bucket of a unit, in the order in which they become complete. */
void ari_op_builder_each_bucket(ari_op_builder *w, const ari_params *all, size_t unit, ari_bucket_fn f);
/** The most values of which a rank's element of the bucket is the sum, where it is summed over a group: one for each
 *  part of the samples that it has, of a micro-batch or of the step, or that those ranks have whose sums it got or whose
 *  tokens its experts have; two for each token of a table whose rows a sample can have several times; SIZE_MAX:
 *  any number. */
size_t ari_op_builder_most_values(ari_op_builder *w, const ari_op_builder_bucket *b, ari_over over,
                                  ari_call_often often);
/** Bytes of a gradient's state, the sum of at most so many values, on its way: the one value that there is, or an
 *  index and two numbers that have 32 bits of each value. */
size_t ari_op_builder_state_bytes(size_t values, bool narrow);

/* --- outside of the passes (ops_step.c) --------------------------------------------------------------------------- */

/** ZeRO's stage; 1 where one rank has all shares. */
int ari_op_builder_zero(const ari_op_builder *w);
/** Before a unit's pass: ZeRO-3 gathers its weights. */
void ari_op_builder_unit_begins(ari_op_builder *w, size_t unit);
/** After its backward pass, and after that of its stage: ZeRO-2 reduces its gradients where they are due. */
void ari_op_builder_unit_ends(ari_op_builder *w, size_t unit);
void ari_op_builder_stage_ends(ari_op_builder *w, size_t begin, size_t end);
void ari_op_builder_start(ari_op_builder *w);
void ari_op_builder_before(ari_op_builder *w);
void ari_op_builder_counts(ari_op_builder *w);
/** The matrices that Muon makes orthogonal of a weight v, as inputs of the operation, and their products. */
void ari_op_builder_muon(const ari_op_builder *w, ari_operation *op, const ari_op_value *v);
/** True if each tensor-parallel rank has a part of the longer side of all blocks of a weight v, the operation's inputs. */
bool ari_op_builder_muon_stays_cut(const ari_op_builder *w, const ari_operation *op, const ari_op_value *v);
/** Of a block [m, n] cut along n: the exponent and the squares of its norm; five times X X^T, whose terms are on all ranks,
 * its square, and their sum times X, whose rows' exponents all share. */
void ari_op_builder_muon_cut(ari_op_builder *w, ari_role role, size_t m, size_t n);
void ari_op_builder_after(ari_op_builder *w);
void ari_op_builder_buckets(ari_op_builder *w);
