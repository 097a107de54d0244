/* SPDX-License-Identifier: Apache-2.0 */
/* The step memory of a rank, operation by operation: what each takes, what it gives back, what stays for the backward
 * pass (docs/planner.md). Sizes come from the list of operations, lifetimes from the layers' own order, which
 * tests/planner/own_test.c holds to what runs count. */
#ifndef ARI_PLANNER_OWN_H
#define ARI_PLANNER_OWN_H

#include "planner/planner.h"

/* A value on its way from one operation to the next. */
typedef struct ari_account_value {
    double bytes;
    ari_memory_kind kind;
    bool kept; /* whoever takes it does not give it back: it stays for the backward pass, or another owner ends it */
} ari_account_value;

/* An input that is gathered beside earlier products, for the gradient of the weight of this role. */
typedef struct ari_account_early {
    ari_role role;
    double bytes; /* 0: there is none */
} ari_account_early;

/* The blocks in which an attention goes through its scores: the most bytes that one takes forward, in the two loops of
 * the backward pass, and where the second makes it again; bytes of the last one's scores and their gradients. Of so many
 * samples, a window, heads. */
typedef struct ari_account_blocks {
    size_t samples, window, heads; /* samples 0: none are known */
    double most[4], last;
    bool whole, several; /* of matrices; there is more than one */
} ari_account_blocks;

/* What a micro-batch holds in a stage, from its forward pass to the end of its backward pass, or of the half of that
 * which makes the gradients of weights. */
typedef struct ari_account_life {
    double held[ARI_MEMORY_KINDS];
    double received[2];             /* bytes from the neighbouring stage: forward, backward */
    double later[ARI_MEMORY_KINDS]; /* stays after a backward pass for the input */
} ari_account_life;

/* A unit of ZeRO-2 and -3: a block, or what is outside of them. */
typedef struct ari_account_unit {
    double weights, gradients, bucket; /* bytes when they are whole; of its largest bucket */
    double operands;                   /* kept with the weights, now */
    bool gathered, whole;              /* the weights: where they arrive; as values of their own */
    bool made, due;                    /* the gradients: whole; to be reduced */
} ari_account_unit;

typedef struct ari_account {
    const ari_step_case *c;
    const ar_config *config;
    size_t tp, tp_rank, cp_rank;
    bool first_stage; /* the rank has it */
    bool exact, head; /* head: logits */
    ar_dtype activations;
    double word;   /* bytes of a number of those */
    bool sequence; /* as ar_plan_block wants it */
    ar_embedding_split tokens;
    double now, peak, stored;                              /* bytes: held, at most, after the fullest forward pass */
    double held[ARI_MEMORY_KINDS], most[ARI_MEMORY_KINDS]; /* of `now`; of `stored` */
    double operands;                                       /* kept with the weights */
    ari_account_life *lives;                               /* of the rank's stages and micro-batches */
    ari_account_life *life;                                /* of the pass */
    int zero;                                              /* stage; 1 where one rank has all shares */
    bool beside;                                           /* what units gather and reduce goes beside the passes */
    ari_account_unit *unit;                                /* [layers + 1]: of each layer, then the root unit */
    ari_account_unit *in_flight;                           /* whose gradients are being reduced; NULL: none */
    ari_account_life of_units;
    size_t at; /* the layer whose unit is at work; ARI_NO_LAYER: none */
    /* The pass. */
    bool passing, absent; /* absent: the others make it, with samples that this rank has not */
    ari_operation_pass pass;
    ar_pp_kind part;
    size_t stage, micro, layer;
    bool passed[2][AR_MAX_STAGES]; /* forward, backward: a pass of the stage has made the kept operands */
    ari_account_value x;           /* what the next operation takes: a value, backward its gradient */
    bool gathered;                 /* x: for the product that comes, which ends it */
    ari_op_call comes;             /* x comes in chunks, for the product that comes; */
    bool in_chunks;                /* whether it does */
    ari_account_value all;         /* what is put together of them */
    bool moves;                    /* what an MLP's first layer makes is redistributed: its activation is by itself */
    /* The backward pass. */
    bool open, summed;           /* a linear layer: its dX has been made; its weights' gradients have begun */
    ari_account_value dy, given; /* of the open layer, or of the one that comes: as it takes it, as it was given */
    bool puts_off;               /* it has left its weights' gradients for later */
    double together;             /* bytes of its X that were gathered again */
    double kept;                 /* of a layer whose weights' gradients are made later: bytes of its X and dY */
    ari_account_early early[2];  /* what is gathered again before its layer opens */
    double rows;                 /* bytes of gradients of the table's rows: until they are added up */
    bool placing;                /* x is on its way from `given` to what the layer takes */
    double dropped;              /* bytes of what a dropout made of the gradient, beside which that stays */
    ari_account_value residual;  /* the gradient that goes past the attention or the MLP */
    double block;                /* bytes of the gradient that the block was given */
    ari_account_blocks blocks;
    /* A part of a layer that is computed again: its forward pass holds nothing but what comes out when it has ended,
     * and so does its backward pass. */
    ar_recompute within; /* AR_RECOMPUTE_NONE: not in one */
    size_t part_layer;
    double outside[ARI_MEMORY_KINDS]; /* of `now`, when it began */
    double later[ARI_MEMORY_KINDS];   /* of the life's */
    bool again;                       /* in its second forward pass */
    double queries;                   /* bytes beside norms of queries and keys: of queries by heads, beside that of
                                         keys; backward of all gradients by heads and of the context's */
    bool prepared;                    /* that has made the input of its first product; else the part was given it */
    ari_account_value waiting;        /* the gradient, until that has ended */
} ari_account;

/** Bytes of the rank's own part. */
double ari_account_bytes(const ari_op_value *v);
/** Of all of n values. */
double ari_account_values(int n, const ari_op_value *v);
void ari_account_take(ari_account *a, ari_memory_kind kind, double bytes);
void ari_account_give(ari_account *a, ari_memory_kind kind, double bytes);
/** Takes them and gives them back. */
void ari_account_touch(ari_account *a, double bytes);

/* A product of `batch` matrices [rows, k] and [cols, k]. */
typedef struct ari_account_product {
    double batch, rows, cols, k;
    bool scaled;             /* exact: by an exponent of each of B's columns */
    const ari_operation *of; /* B is kept with its weights; NULL: it is memory of the step */
    bool along_k;            /* the weights lie side by side along k: of dX */
    const ari_op_call *fold; /* what adds the ranks' parts of it up; NULL: nothing */
    size_t rank;             /* of this one among those */
    double apart;            /* bytes of a result whose chunks are each made apart, and then put to their place */
} ari_account_product;
/** What it takes while it is computed, besides its result. */
void ari_account_multiply(ari_account *a, const ari_account_product *p);
/** The same of an A that comes in chunks, of which two are there; each is multiplied by itself. */
void ari_account_multiply_chunks(ari_account *a, const ari_account_product *p, const ari_op_call *gather);
/** Bytes of a copy of a product's `rows` bytes of A in the order in which its sum is scattered: rank by rank, chunk by
 *  chunk. */
double ari_account_ordered(const ari_operation *op, double rows);
/** Whether an operation's input comes, or its sum goes, in chunks beside products. */
bool ari_account_is_cut(const ari_operation *op);
/** Whether this rank counts a weight's part of dX: of those that hold copies of it the first does. */
static inline bool ari_account_counts(const ari_account *a, const ari_op_value *weight)
{
    return a->tp_rank % weight->copies == 0;
}
/** Bytes of the copy of n numbers of an operand that native numerics make where they multiply fewer bits than it
 *  has. */
double ari_account_copied(const ari_account *a, ar_dtype dtype, double n);
/** The collective that adds up an operation's parts; NULL: none. */
const ari_op_call *ari_account_fold(const ari_account *a, const ari_operation *op);

/** An operation of either pass begins: with it a part may, or may have ended before. */
void ari_account_part(ari_account *a, const ari_operation *op);
/** The end of a part, if the walk is in one: x has come out of it. */
void ari_account_leave(ari_account *a);

/* --- passes ------------------------------------------------------------------------------------------------------- */

/** An operation of a pass. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_account_forward(ari_account *a, const ari_operation *op);
AR_NODISCARD ar_status ari_account_backward(ari_account *a, const ari_operation *op);
/** An operation of the half of a backward pass that makes the gradients of weights. */
void ari_account_weights(ari_account *a, const ari_operation *op);
/** After the last operation of a backward pass. */
void ari_account_backward_end(ari_account *a);

/* --- units: ZeRO-2 and -3 (own_units.c); below that these do nothing ---------------------------------------------- */

/** The unit of a layer; ARI_NO_LAYER: the root unit. */
ari_account_unit *ari_account_unit_of(const ari_account *a, size_t layer);
/** A pass begins; one that the rank misses ends too, but for the reductions after it. */
void ari_account_units_begin(ari_account *a);
/** Before an operation of a pass. */
void ari_account_units_see(ari_account *a, const ari_operation *op);
/** The unit at work, if any, has gone through its pass. */
void ari_account_unit_ends(ari_account *a);
/** An operation outside of the passes; NULL: after the last. */
void ari_account_units_step(ari_account *a, const ari_operation *op);
/** Bytes of an operand that is kept with its weight, if that ends with the unit; passed: a pass of the stage has made
 *  what stays for the step. Whether it does. */
bool ari_account_unit_keeps(ari_account *a, double bytes, bool passed);

/** Where an operation's values are counted. */
ari_memory_kind ari_account_kind(const ari_operation *op);
/** Whether an operation of this role is a norm, or makes a norm's input. */
bool ari_account_is_norm(ari_role role);
/** Bytes of the gain that a norm makes of its weight while it works, and of the means and scales of its rows. */
double ari_account_gain(const ari_account *a, const ari_operation *op);
double ari_account_norm_rows(const ari_operation *op);
/** Norms of queries and keys, and what gathers all heads for one, in either pass (own_attention.c). */
bool ari_account_is_qk_norm(ari_role role);
void ari_account_qk_gather(ari_account *a, const ari_operation *op);
void ari_account_qk_norm(ari_account *a, const ari_operation *op);
void ari_account_qk_norm_backward(ari_account *a, const ari_operation *op);
/** Tokens of an activation [b, s, ..] on this rank. */
double ari_account_tokens(const ari_op_value *v);
bool ari_account_is_shard(const ari_op_value *v, int dim);
/** Gives a value back unless it is kept; then it is nothing. */
void ari_account_finish(ari_account *a, ari_account_value *v);
/** The result of a redistribution, and what putting it together takes. */
void ari_account_redistribute(ari_account *a, const ari_operation *op, ari_memory_kind kind);
/** Counts an operand of weights in one orientation, with an exponent of each row and each column. */
void ari_account_keep_operand(ari_account *a, double rows, double k);
/** What a loss over logits keeps besides them. */
double ari_account_loss(const ari_account *a, double tokens);

/** Attention forward, and backward (own_attention.c). Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_account_attend(ari_account *a, const ari_operation *op);
AR_NODISCARD ar_status ari_account_attend_backward(ari_account *a, const ari_operation *op);

#endif
