/* SPDX-License-Identifier: Apache-2.0 */
/* The operations of a training step in the order in which a rank executes them: what each works on, how that is placed
 * on the ranks, what moves and what is multiplied. From config, plan, layout and batch alone: nothing here looks at a
 * run, allocates or knows a thread, so that a rank of any world can be asked (planner.md). */
#pragma once

#include "anyrank/config.h"
#include "anyrank/context.h"
#include "anyrank/model.h"
#include "anyrank/placement.h"
#include "anyrank/run.h"
#include "ref/core/axis.h"
#include "ref/core/role.h"
#include "sim/plan/case.h"

/* Kind, and its name in reports. */
/* clang-format off */
#define ARI_OPERATION_TABLE(X)                                                                                        \
    X(BROADCAST, "broadcast")             /* a parameter made equal over dp */                                        \
    X(AGREEMENT, "agreement")             /* that the dp ranks have the same parameters */                            \
    X(TARGETS, "targets")                 /* the number that the loss is divided by */                                \
    X(ROUTER_SUM, "router sum")           /* of a layer's routes, or its router's losses; of all layers' */             \
    X(LOGITS_MAX, "logits maximum")       /* of a layer's heads, for QK-Clip */                                        \
    X(FURTHER_SUM, "further loss sum")    /* of a further token's losses */                                           \
    X(EMBEDDING, "embedding")             /* rows of the table of tokens */                                           \
    X(POSITIONS, "positions")             /* learned ones, added */                                                   \
    X(NORM, "norm")                                                                                                   \
    X(REDISTRIBUTE, "redistribute")       /* the same value, placed otherwise */                                      \
    X(PRODUCT, "product")                 /* Y = X W^T of weights that share X; backward: the dX that they share */   \
    X(BIAS, "bias")                       /* added to the product */                                                  \
    X(JOIN, "join")                       /* latent attention's queries, keys with what all heads share, values */ \
    X(ROPE, "rope")                                                                                                   \
    X(HEADS, "heads for positions")       /* among neighbours: fewer heads, of all their positions; and back */       \
    X(RING, "keys and values round")      /* of all positions, from place to place */                                 \
    X(ATTENTION, "attention")             /* scores, softmax, probabilities times values */                           \
    X(ACTIVATION, "activation")                                                                                       \
    X(GATE, "gate product")               /* act(gate) * up */                                                        \
    X(ROUTE, "route")                     /* a token's experts, and their weights, by its logits */                   \
    X(DISPATCH, "dispatch")               /* tokens to the rows of their experts */                                   \
    X(COMBINE, "combine")                 /* those of a token weighted and added up */                                \
    X(DROPOUT, "dropout")                                                                                             \
    X(RESIDUAL, "residual")                                                                                           \
    X(LOSS, "loss")                       /* its terms, one a token */                                                \
    X(WEIGHT_GRADIENT, "weight gradient") /* a parameter's, of the rank's own samples */                              \
    X(DEFERRED, "deferred")               /* input: X, outputs: dY, for weight gradients made later */                \
    X(SEND, "send")                       /* between stages of a pipeline */                                          \
    X(RECEIVE, "receive")                                                                                             \
    X(LOSS_SUM, "loss sum")                                                                                           \
    X(GRADIENT_SUM, "gradient sum")       /* of a bucket */                                                           \
    X(UNUSED, "unused parameters")        /* which of them got no gradient on any rank */                             \
    X(GRADIENT_NORM, "gradient norm")                                                                                 \
    X(VERIFY, "verify")                   /* gradients and copies compared between ranks */                           \
    X(MATRIX, "matrix update")            /* of one by Muon, put together */                                          \
    X(MATRIX_PRODUCT, "matrix product")   /* of one that stays cut: its norm, or a turn of Newton-Schulz */            \
    X(UPDATE, "update")                   /* of the weights by the optimizer */                                       \
    X(WEIGHT_GATHER, "weight gather")     /* ZeRO: of a bucket */
/* clang-format on */
typedef enum ari_operation_kind {
#define ARI_OPERATION_ENUM(name, text) ARI_OPERATION_##name,
    ARI_OPERATION_TABLE(ARI_OPERATION_ENUM)
#undef ARI_OPERATION_ENUM
        ARI_OPERATION_KINDS
} ari_operation_kind;
/** "gradient sum". Static storage. */
const char *ari_operation_name(ari_operation_kind k);

typedef enum ari_operation_pass {
    ARI_PASS_START,
    ARI_PASS_FORWARD,
    ARI_PASS_BACKWARD,
    ARI_PASS_STEP
} ari_operation_pass;
/** "forward". Static storage. */
const char *ari_operation_pass_name(ari_operation_pass p);

/* Values are placed along all axes. Along a pipeline each rank has values of its own: there only what several of them
 * have, or have terms of, is placed. */
/** Ranks along it. */
size_t ari_axis_ranks(const ar_parallel *p, int axis);

/* A value: an activation [b, s, features], a parameter (a matrix as the layer has it, [out, in], also where it is
 * stored transposed), a gradient. Between DISPATCH and COMBINE an activation [b, s*k, features] has a row for each of a
 * token's k experts, and a weight stands for those of all experts. What ROUTE makes, [b, s, E], is 0 but for a token's
 * experts.
 *
 * A value of a pass has a number. In one micro-batch an operation makes it, once, and every operation that takes it
 * after that, or passes it on as it is, has its number, on every rank and stage and in every walk, as it was made: of
 * that shape, placed so. It stays until the last operation that has its number as an input or in `saved`, and nothing
 * else stays between the passes. A value that holds the parts of one parameter side by side (q | k | v, gate | up) may
 * be taken, and its gradient made, part by part: they have its number, and roles of their own. Number 0 is what no pass
 * makes, or what outlives it: tokens, parameters and their gradients, buckets, counts, the loss of a step.
 * tests/verify/ops_edges_test.c holds this on random layouts. */
typedef struct ari_op_value {
    size_t id;     /* its number */
    size_t of;     /* of a gradient: the number of the value that it is the gradient of, as the operation's forward pass
                      has made it (an input) or taken it (an output) */
    ari_role role; /* whose parameter it is; of parts side by side also the activation */
    bool bias;
    ar_dtype dtype;
    int ndim;
    size_t shape[AR_MAX_DIMS]; /* of all ranks together */
    size_t local[AR_MAX_DIMS]; /* of this rank */
    ar_placement at[ARI_PLACED_AXES];
    size_t copies;  /* so many neighbours among the ranks that share its heads hold the same part: KV heads; else 1 */
    size_t experts; /* of so many of them a matrix each, of that shape; 0: one parameter */
    size_t expert;  /* the number of the first */
    ari_axes by_expert; /* of experts, or of rows for them, where other ranks have copies of these than of what else
                           there is: along these axes each rank has those of its own, and `at` is what it would be if
                           each had all experts; 0: along none */
} ari_op_value;

typedef enum ari_call_kind {
    ARI_CALL_ALL_REDUCE,
    ARI_CALL_REDUCE_SCATTER,
    ARI_CALL_ALL_GATHER,
    ARI_CALL_BROADCAST,
    ARI_CALL_ALL_TO_ALL,
    ARI_CALL_EXCHANGE, /* each rank sends its elements to the next one of a ring */
    ARI_CALL_SEND,     /* to one rank, for which it is a recv */
    ARI_CALL_RECV
} ari_call_kind;
/** "all_reduce". Static storage. */
const char *ari_call_name(ari_call_kind k);

typedef enum ari_call_often {
    ARI_AT_START,     /* once a run */
    ARI_EACH_PASS,    /* of each micro-batch; its elements are proportional to the samples */
    ARI_EACH_VERSION, /* in the first micro-batch after the weights have changed */
    ARI_EACH_MICRO,   /* for each of them, whatever samples it has */
    ARI_EACH_STEP,
    ARI_EACH_VERIFIED_STEP
} ari_call_often;

/* Which of the rank's queues makes it. What is not on the main one goes on while that computes. */
typedef enum ari_call_queue {
    ARI_ON_MAIN,
    ARI_ON_BUCKETS,         /* sums of gradients */
    ARI_ON_TP,              /* tokens gathered for a product, or scattered from one */
    ARI_ON_WEIGHTS,         /* ZeRO-3: gathered for the passes */
    ARI_ON_SEND_ACTIVATION, /* between stages */
    ARI_ON_RECV_ACTIVATION,
    ARI_ON_SEND_GRADIENT,
    ARI_ON_RECV_GRADIENT,
    ARI_CALL_QUEUES
} ari_call_queue;
/** "main". Static storage. */
const char *ari_call_queue_name(ari_call_queue q);

/* A collective. */
typedef struct ari_op_call {
    ari_call_kind kind;
    ari_over over;
    size_t ranks;    /* of the group */
    size_t elements; /* in full length; of an exchange that a rank sends, of an all-to-all that all ranks send others */
    size_t sliced;   /* 0, or they are of the rank's own slice, and those of all slices are so many */
    size_t row;      /* elements that no rank's part of them divides */
    size_t chunk;    /* it is cut along each rank's tokens into calls of so many, the last of what is left; else all */
    ar_dtype dtype;
    ari_call_often often;
    ari_call_queue queue;
    size_t repeats;  /* so many such calls follow each other: the hops of a ring, a sum for each sample; else 1 */
    size_t experts;  /* 0, or the repeats: each has the tag of another expert, */
    size_t expert;   /* from this one on */
    bool routed;     /* its elements depend on the routes: as many as if every expert had as many tokens */
    ari_role role;   /* its tag is the path of that part, and `tag` behind it; ARI_NO_ROLE: `tag` alone */
    const char *tag; /* static storage */
} ari_op_call;

/* A parameter. */
typedef struct ari_op_param {
    size_t layer;
    ari_role role;
    bool bias;
} ari_op_param;

#define ARI_OP_VALUES 3
#define ARI_OP_CALLS 16
typedef struct ari_operation {
    ari_operation_kind kind;
    ari_operation_pass pass;
    size_t layer;    /* ARI_NO_LAYER: outside of the blocks */
    size_t stage;    /* of the pipeline, in the passes; outside of them the rank's first */
    ar_pp_kind part; /* of a schedule, in the passes: what the operation is of, a backward pass or half of one */
    size_t micro;    /* the rank's micro-batch, in its passes */
    size_t times;    /* micro-batches that do the same, this and later ones */
    ari_role role;
    size_t expert;       /* of a parameter, or of the first of a bucket, if it is an expert's */
    bool regathered;     /* backward: of a value of the forward pass, not of a gradient */
    bool counting;       /* forward: of a pass that comes first, to count the routes */
    bool recomputed;     /* backward: an operation of the forward pass, computed again before those of its gradients */
    ar_recompute within; /* the part of the layer that is computed again, if the operation is of one: either pass */
    bool stays;          /* forward, a redistribution: its input stays for the backward pass, which does it again */
    int inputs, weights, outputs, calls;
    ari_op_value input[ARI_OP_VALUES], weight[ARI_OP_VALUES], output[ARI_OP_VALUES];
    size_t saved[ARI_OP_VALUES]; /* backward: values of the forward pass that it reads besides its inputs */
    int saves;
    ar_placement produced_as; /* of the outputs over tp before the collectives: a partial sum, or as they are */
    ari_op_call call[ARI_OP_CALLS];
    double multiply_adds; /* of this rank's products: 2mnk of them are its flops */
    size_t bucket;        /* of a bucket: its number */
    size_t params;        /* of a bucket, or of all: parameters */
    ari_op_param last;    /* of a bucket and those before it: the one whose gradient the backward pass makes last */
} ari_operation;
#define ARI_NO_LAYER SIZE_MAX

typedef ar_status (*ari_operation_visitor)(void *user, const ari_operation *op);

/* What a walk visits. */
typedef enum ari_op_extent {
    ARI_OPS_STEP, /* what rank `rank` of the world does from its first weight to the end of its first step */
    /* The same with one pass for all micro-batches of as many samples (ari_operation.times), but in exact numerics for
     * the first, which has the exchanges of new weights. So no number of them costs anything. */
    ARI_OPS_ONCE,
    ARI_OPS_PASSES, /* the passes alone of that */
    /* The same of rank 0 and all ranks of its pipeline together: outside of the passes one after the other; a pass goes
     * through all stages. */
    ARI_OPS_PIPELINE,
    /* The same in parts, which together hold every collective of a run, each as often as ari_call_often says: before
     * the first step; one pass of all samples through the rank's stages by the ranks that share them, the first since
     * the weights changed; what is outside of the passes in a step. */
    ARI_OPS_START,
    ARI_OPS_COUNTING, /* the forward pass that counts the routes; nothing where a step has none (ari_step_counts) */
    ARI_OPS_FORWARD,
    ARI_OPS_BACKWARD,
    ARI_OPS_OUTSIDE,
    ARI_OPS_BUCKETS, /* the gradient sum of every bucket, also of those that nothing moves */
} ari_op_extent;

/** Visits what `which` says. A status of the visitor other than AR_OK ends the walk and is its result. The case is a
 *  legal one (ar_run_check). Errors: AR_ERR_OVERFLOW, AR_ERR_UNSUPPORTED (the plan). */
AR_NODISCARD ar_status ari_operations(const ari_step_case *c, ari_op_extent which, int rank,
                                      ari_operation_visitor visit, void *user);

/** Bits of the parts of its number that a value is: all of them, or by its role of those side by side. */
unsigned ari_op_parts(const ari_op_value *v);
/** n: the values of micro-batch m have numbers from m*n + 1 to m*n + n - 1. */
size_t ari_operations_values(const ari_step_case *c);

typedef ar_status (*ari_param_visitor)(void *user, size_t layer, const ari_op_value *v);
/** Visits the rank's parameters in the order of their registration, a tied one once. Errors: as above. */
AR_NODISCARD ar_status ari_operations_params(const ari_step_case *c, int rank, ari_param_visitor visit, void *user);

/** True if a parameter belongs to a norm. */
bool ari_op_builder_is_norm(ari_role role);
/** True if Muon updates a parameter: a linear layer's weight, but no head, router or shared expert's gate. */
bool ari_op_by_muon(const ari_step_case *c, ari_role role, bool bias);
/** True if the backward pass recomputes a block, or its attention. */
bool ari_step_recomputes(const ari_step_case *c, size_t layer);
/** Keys that the queries at [first, first + count) see, all together, of those before them and themselves; of a
 *  window's (0: none) as many at most. */
double ari_keys_seen(size_t first, size_t count, size_t window);
/** Elements of the rank's own part of a value, of all experts. */
double ari_op_elements(const ari_op_value *v);
/** The number of calls that a call is cut into, and the elements of the i-th of them. */
size_t ari_call_chunks(const ari_op_call *call);
size_t ari_call_chunk(const ari_op_call *call, size_t i);
/** Bytes of an element of a call's dtype, times its elements, times how often a ring passes them: what all ranks of the
 *  group move together, (N-1)*D for a reduce-scatter, an all-gather or a broadcast of D bytes, twice that for an
 *  all-reduce; D for an all-to-all and a send, nothing more for its recv; N*D for each hop of an exchange. Errors:
 *  AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_call_bytes(size_t *bytes, const ari_op_call *call);
/** True for no layer of the model: what comes before them or after them, where blocks for further tokens are. */
static inline bool ari_outside_layers(const ar_config *c, size_t layer)
{
    return layer >= c->layers;
}
/** True if a step goes forward twice, first to count the routes (ar_router_losses). */
bool ari_step_counts(const ari_step_case *c);
/** How often the rows of a layer's experts are exchanged for the tokens of a pass and its gradients. */
size_t ari_routed_exchanges(const ari_step_case *c, size_t layer);

/** Bytes moved between ranks from the first weight to the last step, all ranks together: the start (parameters made
 * equal over dp) and max(steps, 1) steps. A sum over the operations (parallelism.md has it as a table). Errors:
 * AR_ERR_OVERFLOW, AR_ERR_UNSUPPORTED (the plan). */
AR_NODISCARD ar_status ari_traffic_bytes(uint64_t *bytes, const ari_step_case *c);
