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
#define ARI_LEDGER_TABLE(X)                                                                                \
    X(BROADCAST, "broadcast")             /* makes a parameter equal over dp */                            \
    X(AGREEMENT, "agreement")             /* checks that ranks have the same parameters */                 \
    X(TARGETS, "targets")                 /* the divisor of the loss */                                    \
    X(COUNTS, "router sum")               /* sums of a layer's routes or router losses */                  \
    X(LOGITS_MAX, "logits maximum")       /* a layer's heads, for QK-Clip */                               \
    X(EMBEDDING, "embedding")             /* rows of the table of tokens */                                \
    X(POSITIONS, "positions")             /* addition of learned positions */                              \
    X(NORM, "norm")                                                                                        \
    X(REDISTRIBUTE, "redistribute")       /* the same value with another placement */                      \
    X(PRODUCT, "product")                 /* Y = X W^T for weights that share X; backward: their dX */     \
    X(BIAS, "bias")                       /* added to the product */                                       \
    X(JOIN, "join")                       /* latent attention: queries, joined keys, values */             \
    X(ROPE, "rope")                                                                                        \
    X(HEADS, "heads for positions")       /* exchange of heads for positions among neighbours, and back */ \
    X(RING, "keys and values round")      /* keys and values of all positions passed around the ring */    \
    X(ATTENTION, "attention")             /* scores, softmax, probabilities times values */                \
    X(ACTIVATION, "activation")                                                                            \
    X(GATE, "gate product")               /* act(gate) * up */                                             \
    X(ROUTE, "route")                     /* a token's experts and their weights, from its logits */       \
    X(DISPATCH, "dispatch")               /* tokens to the rows of their experts */                        \
    X(COMBINE, "combine")                 /* rows of a token weighted and added up */                      \
    X(DROPOUT, "dropout")                                                                                  \
    X(RESIDUAL, "residual")                                                                                \
    X(SUM, "sum")                         /* two values, element by element */                             \
    X(MULTIPLY, "product of elements")                                                                     \
    X(LOSS, "loss")                       /* the loss's terms, one per token */                            \
    X(WEIGHT_GRADIENT, "weight gradient") /* a parameter's gradient over the rank's samples */             \
    X(SEND, "send")                       /* between stages of a pipeline */                               \
    X(RECEIVE, "receive")                                                                                  \
    X(REPORT, "report")                   /* a value whose placement a module reports */                   \
    X(LOSS_SUM, "loss sum")                                                                                \
    X(GRADIENT_SUM, "gradient sum")       /* a bucket's, or a parameter's */                               \
    X(UNUSED, "unused parameters")        /* parameters without a gradient on any rank */                  \
    X(GRADIENT_NORM, "gradient norm")                                                                      \
    X(MATRIX, "matrix update")            /* update of a matrix by Muon */                                 \
    X(UPDATE, "update")                   /* update of the weights by the optimizer */                     \
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
    size_t id; /* the value's number; 0: not made by any operation */
    ar_dtype dtype;
    int ndim;
    size_t shape[AR_MAX_DIMS];
} ari_ledger_value;

typedef struct ari_ledger_param {
    char name[128];
    ar_placement placement; /* over the tensor-parallel ranks */
    int ndim;
    size_t shape[AR_MAX_DIMS], local[AR_MAX_DIMS]; /* shape over all ranks, and this rank's shape */
    bool trained;
    bool expert;  /* its copies are on other ranks than those of parameters outside of experts */
    bool is_tied; /* true if both ends of a pipeline use it and have terms of its gradient */
} ari_ledger_param;

/* A collective of more than one rank, as this rank called it. */
typedef struct ari_ledger_call {
    unsigned kind; /* ari_kind (ref/comm/call.h) */
    ar_dtype dtype;
    int group, ranks; /* group of the collective, an ari_over (ref/core/axis.h) or -1, and its number of ranks */
    int peer;         /* send, recv */
    size_t count;     /* number of elements; for a call with counts, summed over all ranks; for an all-to-all 0 */
    uint64_t bytes;   /* bytes that this rank sends */
    char tag[160], queue[24];
} ari_ledger_call;

enum { ARI_LEDGER_VALUES = 3 };
typedef struct ari_ledger_operation {
    ari_ledger_kind kind;
    char name[128];        /* module, or parameter */
    const char *operation; /* static storage: the kind's name, or a library function's */
    char pass;             /* 'f' forward, 'b' backward, 's' outside of both */
    bool is_recomputed;    /* true for an operation of the forward pass that the backward pass repeats */
    size_t sample;         /* first sample of the micro-batch */
    int inputs, outputs;
    ari_ledger_value input[ARI_LEDGER_VALUES], out[ARI_LEDGER_VALUES];
    size_t first_use, uses;  /* the operation's parameters in ari_ledger.use */
    bool needs_so, makes_so; /* the next two are declared */
    ar_placement input_placement,
        output_placement;     /* placement over tp of the first input and of the outputs; dimensions count from the
                                 end */
    int copies;               /* for attention: number of ranks that have a copy of its KV heads */
    bool counting;            /* true in an extra first pass that counts the routes */
    double multiply_adds;     /* for attention: multiply-adds, of which 2mnk are flops */
    size_t first_call, calls; /* calls since the preceding operation, in ari_ledger.call */
} ari_ledger_operation;

typedef struct ari_ledger {
    bool strict; /* true: a value whose placement differs from the declared one ends the pass */
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
    ari_ledger_call *call; /* calls in order */
    size_t calls, call_room;
    size_t noted; /* number of calls assigned to operations */
} ari_ledger;
/** Makes c record into the ledger, which must outlive the context. NULL: stops recording. */
void ari_ledger_use(ar_ctx *c, ari_ledger *l);
/** Makes c check placements: a value whose placement differs from the declared one ends the pass. Errors:
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_ledger_check(ar_ctx *c);
/** Frees the ledger's memory. */
void ari_ledger_fini(ari_ledger *l);

struct ari_call;
/** Adds a collective of `ranks` ranks in which this rank sends `bytes` bytes. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_ledger_call_add(ari_ledger *l, const struct ari_call *call, int group, int ranks,
                                           uint64_t bytes);
/** Records that [dst, dst + bytes) has become a copy of the value at `src`. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_ledger_copy(ari_ledger *l, const void *dst, size_t bytes, const void *src);

/** Records attention products that the rank has computed; does nothing in a context that is not watched. */
void ari_ledger_work(const ar_ctx *c, double multiply_adds);

/* The innermost running module and its pass. */
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
    const char *name;      /* name of a module or parameter without "weight"; NULL: the running module */
    const char *operation; /* NULL: the kind's name */
    const ar_tensor *input[ARI_LEDGER_VALUES], *out[ARI_LEDGER_VALUES]; /* up to the first NULL */
    ar_param *const *param;                                             /* [params] */
    size_t params;
    const ar_placement *placed; /* placement over tp of the parameters, which may be copies; NULL: derived from their
                                   shapes */
    const ar_placement *input_placement,
        *output_placement; /* placements over tp of input[0] and of all outputs; NULL: any */
    char pass;             /* 0: the pass of the running module */
    const ar_comm *copies; /* for attention: ranks with copies of its KV heads; NULL: none */
} ari_note;
/** Records an operation. Errors: AR_ERR_DATA (strict: names module, rank and both placements), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_ledger_note(const ar_ctx *c, const ari_note *n);
/** Records an operation, for example ARI_NOTE(ctx, .kind = ARI_LEDGER_NORM, .in = {&x}, .out = {&y}). Does nothing in a
 *  context without a ledger. */
#define ARI_NOTE(ctx, ...) ((ctx)->ledger ? ari_ledger_note((ctx), &(ari_note){__VA_ARGS__}) : AR_OK)
