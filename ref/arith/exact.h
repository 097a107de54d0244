/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "ref/arith/operand.h"
#include "ref/context/context.h"
#include "ref/numerics/integer_sum.h"

struct ar_operand {
    ari_extents x;
    size_t k_full;
    ar_comm *k_groups[2];         /* groups that shard K; NULL: none */
    ar_packed *packed;            /* [batch, rows, k] */
    ar_buf c;                     /* int32 [batch, k], of B; ptr NULL: not equilibrated */
    ar_buf e;                     /* int32 [batch, rows] */
    bool is_cached;               /* owned by a parameter's cache: c and e are device memory of their own */
    struct ar_param_cache *cache; /* that has it; NULL: none */
    bool part;                    /* of another operand: c and e are its */
    bool narrow;                  /* of 15 bits */
    size_t counted;               /* bytes of `packed` in the step's memory; 0: kept */
};

/* Elements [start, start + count) of sums [batch, rows, cols], row-major, and what rounds them. */
typedef struct ari_sum_slice {
    ar_buf s; /* int64 [count] of `limbs` */
    int limbs;
    ar_buf sent; /* what ari_exact_slice sent on another queue, until round */
    size_t start, count, rows, cols;
    ar_cbuf e, f;  /* int32, of matrix 0 */
    size_t e_step; /* from one matrix's row exponents to the next's */
} ari_sum_slice;

/** Elements [offset, offset + s->count) of y = the slice rounded, matrix by matrix. y F32 or BF16, contiguous. */
AR_NODISCARD ar_status ari_exact_round_slice(ar_ctx *ctx, const ar_tensor *y, size_t offset, const ari_sum_slice *s);
/** Sums over the group of all `s->count` elements: each rank keeps a slice. `s->s` was memory of the step, and is the
 *  slice's afterwards. Done on q, where `reduced` is recorded unless that is the context's queue; `s->sent` ends
 *  once it is. */
AR_NODISCARD ar_status ari_exact_slice(ar_ctx *ctx, ari_sum_slice *s, ar_queue *q, ar_event *reduced, ar_comm *group,
                                       const char *tag);
/** y = all ranks' rounded slices; the own one is at its place. */
AR_NODISCARD ar_status ari_exact_gather(ar_ctx *ctx, const ar_tensor *y, ar_comm *group);
/** e = the maximum over a group, of n exponents; NULL: nothing to do. */
AR_NODISCARD ar_status ari_exact_max(ar_ctx *ctx, ar_comm *group, ar_buf e, size_t n, const char *tag);

/** operand_b over terms that the ranks of two groups have, crosswise. */
AR_NODISCARD ar_status ari_exact_operand_over(ar_ctx *ctx, ar_operand **out, const ar_parts *b, bool scale,
                                              size_t k_full, ar_comm *const k_groups[2], ar_comm *rows_over,
                                              const char *tag);

/** Slot grad_complete. */
AR_NODISCARD ar_status ari_exact_grad_complete(ar_ctx *ctx, ar_queue *q, ar_param *p);
/** Slot grad_bucket. */
AR_NODISCARD ar_status ari_exact_grad_bucket(ar_ctx *ctx, ar_queue *q, ar_buf *borrows, ar_param *p);
/** Has t and hl, with the value that there is. */
AR_NODISCARD ar_status ari_exact_grad_reopen(ar_ctx *ctx, ar_queue *q, ar_param_grad *g);
/** Implements the slot operand_done. Frees a saved operand in a step that uses each weight once
 *  (ari_ctx.operands_once). */
void ari_exact_operand_done(ar_ctx *ctx, const ar_operand *o);

struct ar_param_grad {
    size_t n;      /* elements, in the order of the layer's matrix [out, in] */
    ar_buf hl;     /* int64 [2n], and behind them t; ptr NULL: there is a value, or nothing */
    ar_buf t;      /* u8 [n] */
    ar_buf value;  /* fp32 [n], of a complete one; ptr NULL: it is in hl and t */
    bool is_empty; /* of its values: whatever these hold counts as zero */
    bool narrow;   /* stored as bf16 */
};
/** True if no value was added so far; from here on there is one. */
static inline bool ari_exact_grad_begins(ar_param_grad *g)
{
    const bool was_empty = g->is_empty;
    g->is_empty = false;
    return was_empty;
}

/** Initialises a gradient with zeros if nothing was added, for callers that add to it or write only a part of it. */
AR_NODISCARD ar_status ari_exact_grad_zeros(ar_ctx *ctx, ar_queue *q, ar_param_grad *g);
/* Blocks of rows, each of which one rank of a group receives in full. */
typedef struct ari_row_blocks {
    ar_comm *group;
    size_t blocks;
    const int *owner;   /* [blocks], the rank */
    const size_t *rows; /* [ranks, blocks], what each has, block after block */
} ari_row_blocks;

/* Destinations of moved rows, shared by all values with such rows. */
typedef struct ari_moved_rows {
    ar_ctx *ctx;
    ar_comm *group;
    size_t rows;             /* that come here, or are here, of the blocks that are this rank's */
    size_t *sent;            /* rows that go to each rank, then rows that come from each; owned */
    ar_tensor leave, arrive; /* int64, of the step */
} ari_moved_rows;
/** Begins moving rows. Call ari_moved_rows_end, also if it fails. Sends nothing that is all zero. */
AR_NODISCARD ar_status ari_moved_rows_init(ari_moved_rows *m, ar_ctx *ctx, const ari_row_blocks *row_blocks);
void ari_moved_rows_end(ari_moved_rows *m);
/** y [m->rows, n], of the step = the rows of x [rows, n] of this rank's blocks, block after block. Collective. */
AR_NODISCARD ar_status ari_move_rows(ar_tensor *y, const ar_tensor *x, const ari_moved_rows *m, const char *tag);

/* --- the two widths (numerics.md, section 2) ---------------------------------------------------------------------- */

/** Returns true if integers have 15 bits where this arithmetic multiplies by a parameter, unless it multiplies by
 *  peaked gradients, */
static inline bool ari_exact_narrow_use(const ar_ctx *ctx, ar_operand_use use)
{
    return ctx->arith->precision == AR_PRECISION_BF16 && use != AR_USE_PEAKED;
}
/** and in sums over `terms` positions or features of a head. */
static inline bool ari_exact_is_narrow(const ar_ctx *ctx, size_t terms)
{
    return ctx->arith->precision == AR_PRECISION_BF16 && terms <= ARI_CONTRACT_NARROW_TERMS;
}
static inline unsigned ari_exact_form(bool is_left, bool narrow)
{
    return (is_left ? AR_PACKED_LEFT : 0u) | (narrow ? AR_PACKED_NARROW : 0u);
}
/** Returns the number of int64 in a sum of `terms` terms. */
static inline int ari_exact_limbs(bool narrow, size_t terms)
{
    return narrow ? 1 : ari_contract_limbs(terms);
}

#define ARI_DECLARE_EXACT(slot) extern __typeof__(*((ar_arith_ops *)0)->slot) ari_exact_##slot;
ARI_ARITH_SLOTS(ARI_DECLARE_EXACT)
ARI_DECLARE_EXACT(bucket_put)
ARI_DECLARE_EXACT(contract_groups)
ARI_DECLARE_EXACT(grad_groups)
#undef ARI_DECLARE_EXACT

/** Room for integers, which a step's memory counts, and its end. */
AR_NODISCARD ar_status ari_exact_new_packed(ar_ctx *ctx, ar_packed **out, size_t batch, size_t rows, size_t k,
                                            unsigned form);
/** Accepts NULL. */
void ari_exact_end_packed(ar_ctx *ctx, ar_packed *p);
