/* SPDX-License-Identifier: Apache-2.0 */
/* Record of a rank's steps: inputs, outputs, parameters and collectives of each operation. Layers add their operations,
 * and the dry communicator adds its calls. Lint and the flow table read it. Each value has a number: a consumer gets
 * the number of the value that its producer wrote, and a copy has the number of its source.
 * Nothing is recorded in a context that checks placements. There a pass fails if a value is not placed over the
 * tensor-parallel ranks as an operation needs it. */
#pragma once

#include "anyrank/context.h"
#include "anyrank/param.h"
#include "anyrank/placement.h"

/* Kinds of operations, and their names in reports. */
/* clang-format off */
#define ARI_LEDGER_TABLE(X)                                                                                           \
    X(BROADCAST, "broadcast")             /* a parameter made equal over dp */                                        \
    X(AGREEMENT, "agreement")             /* that ranks have the same parameters */                                   \
    X(TARGETS, "targets")                 /* the number that the loss is divided by */                                \
    X(COUNTS, "router sum")               /* a layer's routes or losses of its router */                              \
    X(LOGITS_MAX, "logits maximum")       /* a layer's heads, for QK-Clip */                                          \
    X(EMBEDDING, "embedding")             /* rows of the table of tokens */                                           \
    X(POSITIONS, "positions")             /* learned ones, added */                                                   \
    X(NORM, "norm")                                                                                                   \
    X(REDISTRIBUTE, "redistribute")       /* the same value, placed otherwise */                                      \
    X(PRODUCT, "product")                 /* Y = X W^T of weights that share X; backward: the dX that they share */   \
    X(BIAS, "bias")                       /* added to the product */                                                  \
    X(JOIN, "join")                       /* latent attention: queries, keys joined with the shared features, values */    \
    X(ROPE, "rope")                                                                                                   \
    X(HEADS, "heads for positions")       /* exchange among neighbours: fewer heads with all their positions, and
                                             back */       \
    X(RING, "keys and values round")      /* of all positions, from place to place */                                 \
    X(ATTENTION, "attention")             /* scores, softmax, probabilities times values */                           \
    X(ACTIVATION, "activation")                                                                                       \
    X(GATE, "gate product")               /* act(gate) * up */                                                        \
    X(ROUTE, "route")                     /* a token's experts, and their weights, by its logits */                   \
    X(DISPATCH, "dispatch")               /* tokens to the rows of their experts */                                   \
    X(COMBINE, "combine")                 /* rows of a token weighted and added up */                                 \
    X(DROPOUT, "dropout")                                                                                             \
    X(RESIDUAL, "residual")                                                                                           \
    X(SUM, "sum")                         /* two values, element by element */                                        \
    X(MULTIPLY, "product of elements")                                                                                \
    X(LOSS, "loss")                       /* its terms, one a token */                                                \
    X(WEIGHT_GRADIENT, "weight gradient") /* a parameter's, of the rank's own samples */                              \
    X(SEND, "send")                       /* between stages of a pipeline */                                          \
    X(RECEIVE, "receive")                                                                                             \
    X(REPORT, "report")                   /* a value that a module reports as placed so */                            \
    X(LOSS_SUM, "loss sum")                                                                                           \
    X(GRADIENT_SUM, "gradient sum")       /* a bucket's, or a parameter's */                                          \
    X(UNUSED, "unused parameters")        /* parameters that got no gradient on any rank */                           \
    X(GRADIENT_NORM, "gradient norm")                                                                                 \
    X(MATRIX, "matrix update")            /* a matrix that Muon updates */                                            \
    X(UPDATE, "update")                   /* of the weights by the optimizer */                                       \
    X(WEIGHT_GATHER, "weight gather")     /* ZeRO: of a bucket */
/* clang-format on */
typedef enum ari_ledger_kind {
#define ARI_LEDGER_ENUM(name, text) ARI_LEDGER_##name,
    ARI_LEDGER_TABLE(ARI_LEDGER_ENUM)
#undef ARI_LEDGER_ENUM
        ARI_LEDGER_KINDS
} ari_ledger_kind;
/** "gradient sum". Static storage. */
const char *ari_ledger_kind_name(ari_ledger_kind k);

/* Input or output of an operation on this rank. */
typedef struct ari_ledger_value {
    size_t id; /* its number; 0: no operation has made it */
    ar_dtype dtype;
    int ndim;
    size_t shape[AR_MAX_DIMS];
} ari_ledger_value;

typedef struct ari_ledger_param {
    char name[128];
    ar_placement placement; /* over the tensor-parallel ranks */
    int ndim;
    size_t shape[AR_MAX_DIMS], local[AR_MAX_DIMS]; /* of all ranks together; of this one */
    bool trained;
    bool expert;  /* its copies are on other ranks than those of parameters outside of experts */
    bool is_tied; /* of both ends of a pipeline, which have terms of its gradient */
} ari_ledger_param;

/* A collective of more than one rank, as the rank called it. */
typedef struct ari_ledger_call {
    unsigned kind; /* ari_kind (ref/comm/call.h) */
    ar_dtype dtype;
    int group, ranks; /* group of the collective, an ari_over (ref/core/axis.h) or -1, and its number of ranks */
    int peer;         /* send, recv */
    size_t count;     /* elements of the call: of a v-form, of all ranks together; of an all-to-all 0 */
    uint64_t bytes;   /* that this rank sends */
    char tag[160], queue[24];
} ari_ledger_call;

enum { ARI_LEDGER_VALUES = 3 };
typedef struct ari_ledger_operation {
    ari_ledger_kind kind;
    char name[128];        /* module, or parameter */
    const char *operation; /* static storage: the kind's name, or a library function's */
    char pass;             /* 'f', 'b'; 's': outside of both */
    bool is_recomputed;    /* in a backward pass, an operation of the forward pass once more */
    size_t sample;         /* the first of its micro-batch */
    int inputs, outputs;
    ari_ledger_value input[ARI_LEDGER_VALUES], out[ARI_LEDGER_VALUES];
    size_t first_use, uses;  /* its parameters: ari_ledger.use */
    bool needs_so, makes_so; /* the next two are declared */
    ar_placement input_placement,
        output_placement;     /* over tp: of the first input, of the outputs. Dimensions count from the end */
    int copies;               /* of attention: ranks that have a copy of its KV heads */
    bool counting;            /* in a pass that comes first, to count the routes */
    double multiply_adds;     /* of attention: 2mnk of them are flops */
    size_t first_call, calls; /* since the operation before it: ari_ledger.call */
} ari_ledger_operation;

typedef struct ari_ledger {
    bool strict; /* a value that is not placed as declared ends the pass */
    const char *module;
    char pass;
    size_t ids;
    double work;                      /* multiply-adds of attention since the last operation */
    struct ari_ledger_memory *memory; /* memory in which values are */
    size_t memories, memory_room;
    ari_ledger_operation *operation;
    size_t operations, operation_room;
    ari_ledger_param *param;
    size_t params, param_room;
    size_t *use; /* indices of parameters */
    size_t uses, use_room;
    ari_ledger_call *call; /* in the order of the calls */
    size_t calls, call_room;
    size_t noted; /* calls that operations have */
} ari_ledger;
/** c writes into it from now on; l must outlive the context. NULL: nothing. */
void ari_ledger_use(ar_ctx *c, ari_ledger *l);
/** From now on a value of c that is not placed as declared ends the pass. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_ledger_check(ar_ctx *c);
/** Frees what it holds. */
void ari_ledger_fini(ari_ledger *l);

struct ari_call;
/** Adds a collective of `ranks` ranks in which this rank sends `bytes` bytes. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_ledger_call_add(ari_ledger *l, const struct ari_call *call, int group, int ranks,
                                           uint64_t bytes);
/** Memory [dst, dst + bytes) has become a copy of the value at `src`. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_ledger_copy(ari_ledger *l, const void *dst, size_t bytes, const void *src);

/** Records attention products that the rank has computed; does nothing in a context that is not watched. */
void ari_ledger_work(const ar_ctx *c, double multiply_adds);

/* The innermost module that runs, and its pass. */
typedef struct ari_ledger_place {
    const char *module;
    char pass;
} ari_ledger_place;
ari_ledger_place ari_ledger_enter(ar_ctx *c, const char *module, char pass);
void ari_ledger_leave(ar_ctx *c, ari_ledger_place outer);

/** The operation's module, "layers.0.q_proj", or the parameter of a gradient, "layers.0.q_proj.weight". */
void ari_ledger_module(char *out, size_t cap, const ari_ledger_operation *op);

/* Completed operation, as its layer records it. */
typedef struct ari_note {
    ari_ledger_kind kind;
    const char *name;      /* of a module or parameter, whose "weight" is left out; NULL: the module that runs */
    const char *operation; /* NULL: the kind's name */
    const ar_tensor *input[ARI_LEDGER_VALUES], *out[ARI_LEDGER_VALUES]; /* up to the first NULL */
    ar_param *const *param;                                             /* [params] */
    size_t params;
    const ar_placement *placed; /* over tp: of the parameters, which may be copies; NULL: as their shapes say */
    const ar_placement *input_placement,
        *output_placement; /* over tp, of input[0] and of all outputs; NULL: as it comes */
    char pass;             /* 0: the pass of the running module */
    const ar_comm *copies; /* for attention: ranks with copies of its KV heads; NULL: none */
} ari_note;
/** Errors: AR_ERR_DATA (strict: names module, rank and both placements), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_ledger_note(const ar_ctx *c, const ari_note *n);
/** ARI_NOTE(ctx, .kind = ARI_LEDGER_NORM, .in = {&x}, .out = {&y}): nothing in a context that does not watch. */
#define ARI_NOTE(ctx, ...) ((ctx)->ledger ? ari_ledger_note((ctx), &(ari_note){__VA_ARGS__}) : AR_OK)
