/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_SIM_PLAN_OPS_IMPL_H
#define ARI_SIM_PLAN_OPS_IMPL_H

#include "sim/plan/ops.h"

/* A walk over the operations of a rank. The first error, an overflow or the visitor's, stays in `st`; what is worked
 * out after it means nothing, and nothing more is visited. */
typedef struct ari_walk {
    const ari_step_case *c;
    const ar_config *config;
    size_t ranks[ARI_PLACED_AXES], at[ARI_PLACED_AXES]; /* along each axis; where this one is */
    size_t summing, summing_rank; /* the ranks over which gradients are summed; this one's number among them */
    bool exact, sp;
    ar_dtype activations, matrices; /* as new activations, and parameters of two dimensions, are stored */
    bool by_tokens;                 /* what the plan is asked for (ar_plan_by_tokens); one rank has all of them */
    bool overlaps;                  /* collectives of tokens go beside products */
    bool packed;                    /* q, k and v are one parameter */
    bool head;                      /* an LM head and a cross-entropy; without, the loss sums the output */
    ari_operation_pass pass;
    size_t layer, micro, times; /* as in ari_operation */
    ar_outer_split outer;
    ar_block_split block; /* of the layer; of no use outside of the blocks */
    size_t all, own;      /* samples of the pass: of all dp ranks, of this one */
    size_t tokens;        /* of `own`, at this rank's positions */
    bool again, stays;    /* as in ari_operation */
    bool recomputed;      /* as in ari_operation: the walk is in the forward pass, that of the operations is not */
    ar_recompute within;
    bool multiplied;   /* what is gathered next is multiplied then */
    bool every_bucket; /* visits buckets that nothing moves too */
    bool fresh[2];     /* forward, backward: no pass has been since the weights changed */
    ari_operation op;  /* the next to be visited */
    ari_operation_visitor visit;
    void *user;
    ar_status st;
} ari_walk;

/** a*b and a+b; 0 after an error. */
size_t ari_walk_mul(ari_walk *w, size_t a, size_t b);
size_t ari_walk_add(ari_walk *w, size_t a, size_t b);
/** Goes to a layer, ARI_NO_LAYER or a block, whose splits it reads from the plan. */
void ari_walk_layer(ari_walk *w, size_t layer);

/* An operation: begun, its values and collectives added, visited. */
ari_operation *ari_walk_begin(ari_walk *w, ari_operation_kind kind, ari_role role);
void ari_walk_visit(ari_walk *w);
/** A collective in the operation that has been begun; none in a group of one, or where its weights are not new. */
void ari_walk_call(ari_walk *w, ari_call_kind kind, ari_call_group over, size_t elements, ar_dtype dtype,
                   ari_call_often often, ari_role role, const char *tag);
/** The collective that has been added last is of tokens that a product takes or makes: where collectives go beside
 *  products it does, cut into chunks of each rank's tokens, or whole. */
void ari_walk_beside(ari_walk *w, bool cut);
/** The collective that has been added last happens so many times. */
void ari_walk_repeat(ari_walk *w, size_t times);

/* Placements over tp. */
extern const ar_placement ari_whole, ari_by_tokens, ari_by_features;
/** A plan's placement, with the dimension of a shard counted from the first. */
ar_placement ari_walk_placed(ar_placement p);
bool ari_walk_same(ar_placement a, ar_placement b);
/** Between the tensor-parallel regions: by tokens with sequence parallelism, else whole. */
ar_placement ari_walk_stream(const ari_walk *w);
/** Of a gradient: whole and used by each rank for itself, it is a sum over them, and so on (ar_placement_gradient). */
ar_placement ari_gradient_of(ar_placement p);
/** This rank's extents of a value that is placed so. */
void ari_walk_place(const ari_walk *w, ari_op_value *v);
/** An activation [b, s, features]. copies as in ari_op_value. */
ari_op_value ari_walk_activation(ari_walk *w, size_t features, ar_placement tp, size_t copies);
/** A parameter of the layer that the walk is at. */
ari_op_value ari_walk_param(ari_walk *w, ari_role role, bool bias);
/** Whether the layer's heads are split over the ranks. */
bool ari_walk_by_heads(const ari_walk *w);
/** Ranks that hold one KV head of the layer between them: of those of tp, or in attention (heads) of these and of the
 *  neighbours with which they exchange heads for positions. */
size_t ari_walk_kv_copies(const ari_walk *w, bool heads);
/** Ranks that share the positions of a sequence. */
size_t ari_walk_cp(const ari_walk *w);
/** Copies of a weight's part, by its role. */
size_t ari_walk_copies(const ari_walk *w, ari_role role);
bool ari_walk_has_bias(const ari_walk *w, ari_role role);

/** Makes the gradient of one parameter out of `input` [0 .. n): an operation, visited. */
void ari_walk_weight_gradient(ari_walk *w, ari_role role, bool bias, const ari_op_value *x, const ari_op_value *dy);

/* --- products (ops_product.c) ------------------------------------------------------------------------------------- */

/* Activations side by side, of which each is cut by itself. */
typedef struct ari_row_ops {
    int n;
    size_t width[ARI_OP_VALUES];
    ari_role role[ARI_OP_VALUES];
} ari_row_ops;

/* Weights that multiply the same input, and what arrives and leaves. Column-parallel weights, whose rows are cut, take
 * a whole input and make shards of features; row-parallel ones take shards of features and make a partial sum; whole
 * ones take and make what is whole. What is between that and the placements on both sides is a redistribution, and
 * backward its transpose. A partial sum is folded where it is wanted, but for shards of features. */
typedef struct ari_linear_ops {
    ari_role part[ARI_OP_VALUES];
    int n;
    ar_linear_split split; /* placements as ari_walk_placed has them */
    ari_role module;       /* whose input it is that is redistributed */
} ari_linear_ops;

void ari_walk_linear(ari_walk *w, const ari_linear_ops *l);
/** before: the layer that has gone backward before it, behind whose products its input has been gathered again where
 *  collectives go beside products; after: the one that follows, of which this one does that. NULL: none. */
void ari_walk_linear_backward(ari_walk *w, const ari_linear_ops *l, const ari_linear_ops *before,
                              const ari_linear_ops *after);
/** Of its forward pass what its backward pass needs. */
void ari_walk_linear_again(ari_walk *w, const ari_linear_ops *l);
/** The same values placed otherwise over tp: an operation, visited; none where both are the same. By tokens and by
 *  features change into each other over the whole. */
void ari_walk_redistribute(ari_walk *w, const ari_row_ops *x, ar_hop hop, ari_role role, ari_role tagged,
                           const char *tag);
/** By a module itself, of its input or output. */
void ari_walk_move(ari_walk *w, ar_hop hop, ari_role module);
/** The way back, of the gradient. */
ar_hop ari_walk_back(ar_hop hop);
/** The same by the layer itself, which exchanges shards along two dimensions directly: an all-to-all. */
void ari_walk_exchange(ari_walk *w, size_t features, ar_placement from, ar_placement to, ari_role role);

/* --- attention (ops_attention.c) ---------------------------------------------------------------------------------- */
void ari_walk_rope(ari_walk *w);
void ari_walk_attend(ari_walk *w);
void ari_walk_attend_backward(ari_walk *w);

/* --- the model (ops_model.c) -------------------------------------------------------------------------------------- */
void ari_walk_forward(ari_walk *w);
void ari_walk_backward(ari_walk *w);

/* --- outside of the passes (ops_step.c) --------------------------------------------------------------------------- */
void ari_walk_start(ari_walk *w);
void ari_walk_before(ari_walk *w);
void ari_walk_after(ari_walk *w);
void ari_walk_params(ari_walk *w, ari_param_visitor visit);
void ari_walk_buckets(ari_walk *w);

#endif
