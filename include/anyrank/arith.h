/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_ARITH_H
#define ANYRANK_ARITH_H

#include "anyrank/context.h"
#include "anyrank/param.h"

AR_BEGIN_DECLS

/* The arithmetic: what a contraction and a gradient sum are. `exact` and `native` fill the same table over any device
 * and communicator; layers call only this and never ask which it is.
 *
 *   exact:  integers (numerics.md): the result has the same bits however K, the rows or the samples are split
 *   native: fp32 GEMM of the device, fp32 sums in ring order
 *
 * A contraction is C[i,j] = sum_k A[i,k]*B[j,k]: first B (its exponents scale A), then A, then
 *   operand_b -> operand_a -> contract -> fold -> round.
 * Everything given lives until ari_ctx_end_step. Functions are collective over the groups they are given. */
typedef struct ar_operand ar_operand;
typedef struct ar_sum ar_sum;

/* Matrices side by side: along K, or (rows) one under the other. Several parts: 2-D views only. */
typedef struct ar_parts {
    int n;
    ar_tensor part[AR_MAX_PARTS]; /* [.., rows, k] views */
    bool along_k;                 /* else along rows */
} ar_parts;

/* A contraction whose A comes in blocks of rows and terms, and whose terms lie on several ranks: attention's gradients
 * of keys and values. Every block is given twice: first all of them for the exponents, then all of them for the
 * sums. */
typedef struct ar_blocks ar_blocks;
typedef struct ar_blocks_options {
    size_t rows;     /* of each of A's matrices */
    size_t k_full;   /* terms on all ranks together */
    ar_comm *places; /* that have other terms, and of the result equal parts of the rows, in their order; NULL: none */
    ar_comm *replicas; /* that have other terms of the same rows, and all of the result; NULL: none */
    const char *tag;
} ar_blocks_options;

typedef enum ar_fold {
    AR_KEEP,        /* the sum is complete here */
    AR_ALL,         /* partial over the group: reduce, every rank gets all of it */
    AR_SCATTER_ROWS /* partial over the group: reduce, rank r gets rows [r*m/N, (r+1)*m/N) of the m; N divides m */
} ar_fold;

/* Work that follows the one rounding, in the same pass over memory. */
typedef struct ar_epilogue {
    ar_cbuf bias;       /* fp32 [columns]; ptr NULL: none */
    ar_activation act;  /* AR_ACT_NONE: none */
    const ar_tensor *z; /* act(y), of y's shape, where act is not AR_ACT_NONE */
    const ar_band
        *band; /* of the product, where the sum is not folded: borrowed until round returns; NULL: all of it */
} ar_epilogue;

/* A term of a parameter's gradient. */
typedef struct ar_grad_terms {
    ar_param *to;
    ar_tensor dy; /* [tokens, out], a 2-D view */
} ar_grad_terms;

/* Rows in groups: group i has rows [first[i], first[i + 1]), and they lie sample by sample. Of group i those of sample s
 * are rows [of[s], of[s + 1]), of = sample + i*(samples + 1), counted from first[i]. Of a sample the tensor-parallel
 * ranks have the same rows, and the ranks of `over` (NULL: this one) have others, all together at most `longest` in a
 * group. Host memory, borrowed. */
typedef struct ar_groups {
    size_t n, samples, longest;
    ar_comm *over;
    const size_t *first;  /* [n + 1] */
    const size_t *sample; /* [n, samples + 1] */
    const size_t *known;  /* [ranks of over, n, samples]: their rows, of a device without contents; NULL: they tell */
} ar_groups;

/* The B of each group, made in their order when a group's turn comes. */
typedef struct ar_group_operands {
    ar_status (*make)(ar_ctx *ctx, const ar_operand **out, const void *user, size_t group);
    const void *user;
} ar_group_operands;

/* An array of a bucket of n elements, with a number for each: it begins at byte at*n. */
typedef struct ar_bucket_array {
    size_t at;
    ar_dtype dtype;
} ar_bucket_array;
#define AR_BUCKET_ARRAYS 3

/* Of how many values an element of a bucket can be the sum: on each rank before the bucket is summed over a group, and
 * afterwards, where other sums follow; 0: none do, and ranks may get the sums as they are stored. */
typedef struct ar_most_terms {
    size_t before, after;
} ar_most_terms;

/* What a parameter is multiplied by, as the B of a contraction. */
typedef enum ar_operand_use {
    AR_USE_FORWARD,  /* an input: K is the parameter's columns */
    AR_USE_BACKWARD, /* gradients of outputs: K is its rows */
    AR_USE_PEAKED    /* such gradients, of which a few are far larger than the many others: those of logits */
} ar_operand_use;

struct ar_arith_ops {
    const char *name;       /* "exact", "native" */
    ar_precision precision; /* of the products */
    /* k_full: the length of K on all ranks together. k_over: the group that shards K, or NULL. rows_over: the group
     * that shards B's rows, or NULL. scale: equilibrate by B's columns (false for scores and dP: K = head_dim). */
    ar_status (*operand_b)(ar_ctx *ctx, const ar_operand **out, const ar_parts *b, bool scale, size_t k_full,
                           ar_comm *k_over, ar_comm *rows_over, const char *tag);
    /* A, scaled by b's columns, K sharded as b's. */
    ar_status (*operand_a)(ar_ctx *ctx, const ar_operand **out, const ar_parts *a, const ar_operand *b,
                           const char *tag);
    /* B from parameters' matrices W [out, in]: forward, the rows of all W; else the rows of all W transposed, side by
     * side along K. Kept until a version changes: of its n parameters, or of
     * those in params[n, watched), which other ranks of the groups put into theirs, for all make it anew together. */
    ar_status (*param_operand)(ar_ctx *ctx, const ar_operand **borrows, ar_param *const *params, int n, int watched,
                               ar_operand_use use, size_t k_full, ar_comm *k_over, ar_comm *rows_over);
    /* Bytes of the operands that are kept with a parameter: the first of those that they are made of. While it is
     * gathered (ar_param.share) they count as memory of the step. */
    size_t (*operand_bytes)(const ar_param *p);
    /* Rows and terms (columns) of an operand that operand_a or operand_b gave, which outlives it, with the exponents of
     * the whole. Several matrices: all their rows and terms; of parts side by side: all their terms. A fold follows of
     * whole rows alone. */
    ar_status (*operand_part)(ar_ctx *ctx, const ar_operand **out, const ar_operand *full, const ar_part *part);
    /* Ends an operand that one of these gave before the step does; the sums made of it are rounded. */
    void (*operand_done)(ar_ctx *ctx, const ar_operand *o);
    ar_status (*contract)(ar_ctx *ctx, ar_sum **out, const ar_operand *a, const ar_operand *b);
    /* The collective is enqueued on q: the context's queue or, where the rows are scattered, another one, whose own
     * `over` is; then the context's queue may go on with other products, and what the sum is made of stays until round,
     * which waits. Errors: AR_ERR_UNSUPPORTED (another queue, and all rows are wanted), AR_ERR_INDIVISIBLE, what queue
     * and communicator give. */
    ar_status (*fold)(ar_ctx *ctx, ar_sum *s, ar_queue *q, ar_comm *group, ar_fold method, const char *tag);
    /* y[batch.., m, n] = the sum rounded, then the epilogue (NULL: none); after AR_SCATTER_ROWS y has the own rows. y
     * contiguous, or contiguous along n where the sum was never folded. Ends the sum. */
    ar_status (*round)(ar_ctx *ctx, const ar_tensor *y, ar_sum *s, const ar_epilogue *epilogue);

    /* y [rows, n] = the rows of each group of a [rows, k] times its B^T, of one n and one k, folded over `over` (NULL: not)
     * so that every rank gets all of it, and rounded. Collective: over the groups that shard K, and over `over`, once for
     * all groups of rows. */
    ar_status (*contract_groups)(ar_ctx *ctx, const ar_tensor *y, const ar_tensor *a, const ar_group_operands *b,
                                 const ar_groups *g, ar_comm *group, const char *tag);

    /* b [.., n, k], equilibrated, with all the terms of this rank. Collective over both groups, as the two below that
     * say so. */
    ar_status (*blocks_begin)(ar_ctx *ctx, ar_blocks **out, const ar_tensor *b, const ar_blocks_options *o);
    /* A block of A, at these rows and terms (columns), whose elements outside its blocks are zero. */
    ar_status (*blocks_measure)(ar_ctx *ctx, ar_blocks *s, const ar_part *part, const ar_tensor *a);
    /* All were measured; where no other rank has terms, all of a row before its first is added. Collective. */
    ar_status (*blocks_measured)(ar_ctx *ctx, ar_blocks *s);
    ar_status (*blocks_add)(ar_ctx *ctx, ar_blocks *s, const ar_part *part, const ar_tensor *a);
    /* y [.., rows / places, n], contiguous. AR_KEEP instead of AR_ALL: each replica keeps its own terms. Collective. */
    ar_status (*blocks_end)(ar_ctx *ctx, const ar_tensor *y, ar_blocks *s, ar_fold replicas);

    /* For each of n parameters multiplied by the same x: gradient += sum over samples of dy^T x, with dy [tokens, out],
     * x [tokens, in] 2-D views, `samples` runs of `tokens/samples` tokens. x_rows_over: the group that shards x's
     * features, or NULL. Neither this nor grad_rows computes anything for a frozen parameter. */
    ar_status (*grad_contract)(ar_ctx *ctx, const ar_grad_terms *terms, int n, const ar_tensor *x, size_t samples,
                               ar_comm *x_rows_over);
    /* The same of each group's rows of x [rows, in] for n parameters: sums[i*n + j]'s gradient += the sum over samples of
     * the rows of dy[j] [rows, out] in group i, transposed, times x. Collective, also for groups without rows. */
    ar_status (*grad_groups)(ar_ctx *ctx, ar_param *const *sums, const ar_tensor *dy, int n, const ar_tensor *x,
                             const ar_groups *g, ar_comm *x_rows_over, const char *tag);
    /* grad(p)[row_of[r]] += terms[r], terms [n, cols] a 2-D view; row_of int64 [n] on the device (negative: skip), or
     * ptr NULL: all into the one row of a vector parameter. */
    ar_status (*grad_rows)(ar_ctx *ctx, ar_param *p, const ar_tensor *terms, ar_cbuf row_of);
    /* The accumulator of grad_rows for a vector parameter, for a kernel that makes the terms and adds them in one pass;
     * then the parameter has a gradient. For a frozen one no sum is wanted. Borrowed until param_release. */
    ar_status (*grad_sum)(ar_ctx *ctx, ar_param *p, ar_row_sum *borrows);
    /* Sums the gradient over a group (data parallelism), where it is: as bucket_reduce does a bucket of it alone. */
    ar_status (*grad_reduce)(ar_ctx *ctx, ar_param *p, ar_comm *group, const char *tag);
    /* g (local, contiguous, the parameter's stored shape) = the gradient. */
    ar_status (*grad_value)(ar_ctx *ctx, const ar_tensor *g, const ar_param *p);
    ar_status (*grad_zero)(ar_ctx *ctx, ar_param *p);
    /* A bucket: the gradients of several parameters, n elements together, in one piece of device memory, in the form
     * that is summed. These take a queue, for they also run on a communication queue, and take no memory of the step.
     * storage: AR_F32, or AR_BF16: the values are rounded to it (native: the sums). */
    size_t (*bucket_bytes)(size_t n, ar_dtype storage);
    /* bucket[offset, offset + elements of p) = the gradient of p, or zero where it has none. */
    ar_status (*bucket_pack)(ar_ctx *ctx, ar_queue *q, ar_buf bucket, size_t n, size_t offset, ar_dtype storage,
                             const ar_param *p);
    ar_status (*bucket_zero)(ar_ctx *ctx, ar_queue *q, ar_buf bucket, size_t n, ar_dtype storage);
    /* Sums the bucket over a group. most: so that in storage AR_BF16 exact numerics move no more bytes than these terms
     * need; NULL: not known. counts NULL: all of it on every rank. Else [ranks of the group], of sum n: rank r gets its
     * elements [counts[0] + .. + counts[r-1], + counts[r]) only, at their place; the others are undefined. */
    ar_status (*bucket_reduce)(ar_ctx *ctx, ar_queue *q, ar_buf bucket, size_t n, ar_dtype storage, ar_comm *group,
                               const size_t *counts, const ar_most_terms *terms, const char *tag);
    /* The gradient of p = bucket[offset, offset + elements of p). Its memory must exist (grad_ensure). */
    ar_status (*bucket_unpack)(ar_ctx *ctx, ar_queue *q, ar_param *p, ar_cbuf bucket, size_t n, size_t offset,
                               ar_dtype storage);
    /* Sums over ranks of fp32 values that are no gradients (anyrank/redistribute.h). The arrays of a bucket: what is
     * done to each of them alike, as moving elements or zeros, is done to the sums. 0: there is no put, for a sum is of
     * the numbers themselves, in the communicator's order. */
    int bucket_arrays;
    ar_bucket_array bucket_array[AR_BUCKET_ARRAYS];
    /* bucket = x; x fp32 [n] contiguous. */
    ar_status (*bucket_put)(ar_ctx *ctx, ar_queue *q, ar_buf bucket, ar_cbuf x, size_t n, ar_dtype storage);
    /* y = bucket[offset, offset + count), also where there are no arrays; y fp32 [count] contiguous. */
    ar_status (*bucket_take)(ar_ctx *ctx, ar_queue *q, ar_buf y, ar_cbuf bucket, size_t n, size_t offset, size_t count,
                             ar_dtype storage);
    /* Makes the memory of a gradient (zero), if it has none. */
    ar_status (*grad_ensure)(ar_ctx *ctx, ar_param *p);
    /* Bytes that the gradient takes now: 0 before the first contribution. */
    size_t (*grad_bytes)(const ar_param *p);
    /* Frees what the arithmetic keeps with a parameter, as ar_device_ops.free does: the gradient, the operands; both,
     * where nothing is to come on any queue. */
    void (*grad_release)(ar_param *p, ar_queue *q);
    void (*operand_release)(ar_param *p, ar_queue *q);
    void (*param_release)(ar_param *p);
};

/** The context's own. */
const ar_arith_ops *ar_ctx_arith(const ar_ctx *c);

AR_END_DECLS
#endif
