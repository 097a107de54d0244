/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "ref/arith/operand.h"
#include "ref/context/context.h"
#include "ref/numerics/integer_sum.h"

struct ar_operand {
    ari_extents x;
    size_t k_full;
    ar_comm *k_groups[2];         /* groups that shard K; NULL: none */
    ar_packed *packed;            /* [batch, rows, k] integers */
    ar_buf c;                     /* int32 [batch, k] column exponents of B; ptr NULL: not equilibrated */
    ar_buf e;                     /* int32 [batch, rows] */
    bool is_cached;               /* true if a parameter's cache owns it; c and e are then separate device memory */
    struct ar_param_cache *cache; /* the cache; NULL: none */
    bool part;                    /* true for a part of another operand, which owns c and e */
    bool narrow;                  /* true for operands of 15 bits */
    size_t counted;               /* bytes of `packed` in the step's memory; 0: cached */
};

/* Elements [start, start + count) of sums [batch, rows, cols], row-major, and what is needed to round them. */
typedef struct ari_sum_slice {
    ar_buf s; /* int64 [count] of `limbs` */
    int limbs;
    ar_buf sent; /* data sent on another queue by ari_exact_slice, until they are rounded */
    size_t start, count, rows, cols;
    ar_cbuf e, f;  /* int32, of matrix 0 */
    size_t e_step; /* distance between the row exponents of consecutive matrices */
} ari_sum_slice;

/** Elements [offset, offset + s->count) of y = the slice rounded, matrix by matrix. y F32 or BF16, contiguous. */
AR_NODISCARD ar_status ari_exact_round_slice(ar_ctx *ctx, const ar_tensor *y, size_t offset, const ari_sum_slice *s);
/** Reduces all `s->count` elements over the group, so that each rank keeps a slice. `s->s` was memory of the step and
 *  is the slice's afterwards. Runs on q, where `reduced` is recorded unless q is the context's queue; `s->sent` ends
 *  after that. */
AR_NODISCARD ar_status ari_exact_slice(ar_ctx *ctx, ari_sum_slice *s, ar_queue *q, ar_event *reduced, ar_comm *group,
                                       const char *tag);
/** Gathers all ranks' rounded slices to y, in which this rank's slice is already in place. */
AR_NODISCARD ar_status ari_exact_gather(ar_ctx *ctx, const ar_tensor *y, ar_comm *group);
/** Computes the maximum of n exponents e over a group; group NULL: does nothing. */
AR_NODISCARD ar_status ari_exact_max(ar_ctx *ctx, ar_comm *group, ar_buf e, size_t n, const char *tag);

/** Does what operand_b does, for terms divided among the ranks of two crossing groups. */
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
    ar_buf hl;     /* int64 [2n] followed by t; ptr NULL: there is a value, or nothing */
    ar_buf t;      /* u8 [n] */
    ar_buf value;  /* fp32 [n] if complete; ptr NULL: the sum is in hl and t */
    bool is_empty; /* true if its contents are undefined and count as zero */
    bool narrow;   /* stored as bf16 */
};
/** Returns true if no value has been added so far, and marks that one will be. */
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
    const int *owner;   /* [blocks] rank that owns each block */
    const size_t *rows; /* [ranks, blocks] rows of each rank, block after block */
} ari_row_blocks;

/* Destinations of moved rows, shared by all values with such rows. */
typedef struct ari_moved_rows {
    ar_ctx *ctx;
    ar_comm *group;
    size_t rows;             /* number of rows that arrive at or stay on this rank, in this rank's blocks */
    size_t *sent;            /* number of rows sent to each rank, then received from each; owned */
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

/** Create and end memory for integers, which counts as step memory. */
AR_NODISCARD ar_status ari_exact_new_packed(ar_ctx *ctx, ar_packed **out, size_t batch, size_t rows, size_t k,
                                            unsigned form);
/** Accepts NULL. */
void ari_exact_end_packed(ar_ctx *ctx, ar_packed *p);
