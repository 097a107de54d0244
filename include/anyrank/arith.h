/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_ARITH_H
#define ANYRANK_ARITH_H

#include "anyrank/context.h"
#include "anyrank/param.h"

AR_BEGIN_DECLS

/* The arithmetic of a context: a table of functions for matrix products and gradient sums, on any device and
 * communicator. Layers call it without knowing which of the two it is:
 *
 *   exact:  integer arithmetic (numerics.md): results have the same bits however K, rows or samples are sharded
 *   native: the device's GEMM with fp32 accumulation; sums over ranks in ring order
 *
 * A contraction is the matrix product C[i,j] = sum_k A[i,k]*B[j,k]; its terms are the A[i,k]*B[j,k]. Its steps are
 *   operand_b -> operand_a -> contract -> fold -> round,
 * B first because its column exponents scale A. Fold reduces a sum whose terms are spread over ranks; round converts it
 * to fp32 or bf16, once. Operands and sums are freed when the training step ends. Functions are collective over the
 * communicators that they are given. */
typedef struct ar_operand ar_operand; /* a matrix in the form that contract multiplies */
typedef struct ar_sum ar_sum;         /* an unrounded product of two operands */

/* Matrices concatenated along K (columns) or along rows. With n > 1 they are 2-D views. */
typedef struct ar_parts {
    int n;                        /* number of matrices */
    ar_tensor part[AR_MAX_PARTS]; /* [.., rows, k] views */
    bool along_k;                 /* false: along rows */
} ar_parts;

/* A contraction whose A arrives block by block and whose terms are on several ranks: dK and dV of attention. The caller
 * passes all blocks twice: first to measure their exponents, then to add their products. */
typedef struct ar_blocks ar_blocks;
/* Size and groups of a contraction by blocks. */
typedef struct ar_blocks_options {
    size_t rows;       /* rows of each matrix of A, and of the result over all ranks of `places` */
    size_t k_full;     /* length of K over all ranks */
    ar_comm *places;   /* reduce-scatter group: its ranks hold different terms and get equal parts of the result's rows
                          in rank order; NULL: none */
    ar_comm *replicas; /* all-reduce group: its ranks hold different terms of the same rows; NULL: none */
    const char *tag;   /* of the collectives */
} ar_blocks_options;

/* How a sum is reduced over the ranks of a group that each hold some of its terms. */
typedef enum ar_fold {
    AR_KEEP,        /* not at all: this rank's sum is complete */
    AR_ALL,         /* all-reduce */
    AR_SCATTER_ROWS /* reduce-scatter: rank r of N gets rows [r*m/N, (r+1)*m/N) of m; N divides m */
} ar_fold;

/* Element-wise work fused with the rounding of a sum y. */
typedef struct ar_epilogue {
    ar_cbuf bias;        /* fp32 [columns], added to y; ptr NULL: none */
    ar_activation act;   /* AR_ACT_NONE: no activation */
    const ar_tensor *z;  /* output act(y), of y's shape; unused with AR_ACT_NONE */
    const ar_band *band; /* the part of the product that is needed (device.h), for sums that are not folded; borrowed
                            until round returns; NULL: all of it */
} ar_epilogue;

/* Output gradients dy that contribute dy^T x to the gradient of the parameter `param`. */
typedef struct ar_grad_terms {
    ar_param *param; /* the parameter */
    ar_tensor dy;    /* [tokens, out], a 2-D view */
} ar_grad_terms;

/* Rows of a matrix sorted into n groups, such as the tokens of each expert. Group i has rows [first[i], first[i+1]),
 * sorted by sample: sample s of group i has rows first[i] + [e[s], e[s+1]) with e = sample + i*(samples + 1). The
 * tensor-parallel ranks hold the same rows of a sample, the ranks of `comm` other rows. Arrays are borrowed host
 * memory. */
typedef struct ar_groups {
    size_t n, samples;    /* number of groups, of samples */
    size_t longest;       /* most rows of a sample in one group, over all ranks of `comm` */
    ar_comm *comm;        /* NULL: this rank alone */
    const size_t *first;  /* [n + 1] */
    const size_t *sample; /* [n, samples + 1] */
    const size_t *known;  /* [ranks of comm, n, samples]: row counts of every rank, for dry runs, which exchange no
                             data; NULL: the ranks exchange them */
} ar_groups;

/* Callback that creates operand B of group 0, 1, .. when contract_groups reaches it. */
typedef struct ar_group_operands {
    ar_status (*make)(ar_ctx *ctx, const ar_operand **out, const void *user, size_t group);
    const void *user; /* argument of make */
} ar_group_operands;

/* A gradient bucket of n elements consists of arrays of n numbers; this one begins at byte offset*n of the bucket. */
typedef struct ar_bucket_array {
    size_t offset;
    ar_dtype dtype; /* of its numbers */
} ar_bucket_array;
#define AR_BUCKET_ARRAYS 3 /* most arrays of a bucket */

/* Upper bounds on the number of terms in an element of a bucket. They decide how many bits exact sums send. */
typedef struct ar_most_terms {
    size_t before; /* on each rank before the reduction */
    size_t after;  /* after it, if reductions follow; 0: none do, and ranks may get rounded sums */
} ar_most_terms;

/* Which product uses a parameter as its operand B. */
typedef enum ar_operand_use {
    AR_USE_FORWARD,  /* Y = X W^T: K is the parameter's columns */
    AR_USE_BACKWARD, /* dX = dY W: K is the parameter's rows */
    AR_USE_PEAKED    /* dX = dY W for gradients of logits, of which a few are far larger than all others */
} ar_operand_use;

/* The function table of an arithmetic. */
struct ar_arith_ops {
    const char *name;       /* "exact", "native" */
    ar_precision precision; /* of the products */
    /* Creates operand B. k_full: length of K over all ranks. k_over: the group that shards K; NULL: none. rows_over:
     * the group that shards B's rows; NULL: none. scale: exponents of B's columns scale A (false for attention scores
     * and their gradients, K = head_dim). */
    ar_status (*operand_b)(ar_ctx *ctx, const ar_operand **out, const ar_parts *b, bool scale, size_t k_full,
                           ar_comm *k_over, ar_comm *rows_over, const char *tag);
    /* Creates operand A to be multiplied with b: scaled by the exponents of b's columns, and with K sharded as in b. */
    ar_status (*operand_a)(ar_ctx *ctx, const ar_operand **out, const ar_parts *a, const ar_operand *b,
                           const char *tag);
    /* Returns operand B made of the matrices W [out, in] of n parameters: for AR_USE_FORWARD their rows concatenated,
     * else their transposes concatenated along K. The operand is cached with the parameters until one of their versions
     * changes, or a version of params[n, watched): parameters that are part of other ranks' operands, since all ranks
     * of the groups must rebuild together. */
    ar_status (*param_operand)(ar_ctx *ctx, const ar_operand **borrows, ar_param *const *params, int n, int watched,
                               ar_operand_use use, size_t k_full, ar_comm *k_over, ar_comm *rows_over);
    /* Returns the bytes of the operands cached with this parameter (an operand of several parameters is cached with the
     * first). Those of a parameter gathered by ZeRO-3 count as step memory. */
    size_t (*operand_bytes)(const ar_param *p);
    /* Creates an operand that is a block (rows and columns) of `full`, an operand of operand_a or operand_b that must
     * outlive it; it keeps the full operand's exponents. Of a batch of matrices the part has all rows and columns, of
     * concatenated parts all columns. Only a sum over all columns may be folded. */
    ar_status (*operand_part)(ar_ctx *ctx, const ar_operand **out, const ar_operand *full, const ar_part *part);
    /* Frees an operand before the step ends, after all sums that use it were rounded. */
    void (*operand_done)(ar_ctx *ctx, const ar_operand *o);
    /* Computes the product of two operands. */
    ar_status (*contract)(ar_ctx *ctx, ar_sum **out, const ar_operand *a, const ar_operand *b);
    /* Reduces a sum over `group`. The collective is enqueued on q: the context's queue or, with AR_SCATTER_ROWS, a
     * communication queue that alone uses `group`. In the second case the context's queue can run other products
     * meanwhile; round waits for the collective, and the operands must live until then. Errors: AR_ERR_UNSUPPORTED
     * (another queue without AR_SCATTER_ROWS), AR_ERR_INDIVISIBLE, those of queue and communicator. */
    ar_status (*fold)(ar_ctx *ctx, ar_sum *s, ar_queue *q, ar_comm *group, ar_fold method, const char *tag);
    /* Rounds a sum to y [batch.., m, n], applies the epilogue (NULL: none) and frees the sum. After AR_SCATTER_ROWS y
     * has this rank's rows only. y is contiguous; if the sum was not folded, contiguity along n suffices. */
    ar_status (*round)(ar_ctx *ctx, const ar_tensor *y, ar_sum *s, const ar_epilogue *epilogue);

    /* Grouped GEMM: y [rows, n] = for the rows of each group g of a [rows, k] the product with the group's B^T (each B
     * is [n, k]), all-reduced over `group` (NULL: not) and rounded. Collective over the ranks that shard K and, once
     * for all groups of rows, over `group`. */
    ar_status (*contract_groups)(ar_ctx *ctx, const ar_tensor *y, const ar_tensor *a, const ar_group_operands *b,
                                 const ar_groups *g, ar_comm *group, const char *tag);

    /* Begins a contraction by blocks with operand b [.., n, k], this rank's terms. This function, blocks_measured and
     * blocks_end are collective over options->places and options->replicas. */
    ar_status (*blocks_begin)(ar_ctx *ctx, ar_blocks **out, const ar_tensor *b, const ar_blocks_options *o);
    /* Measures the exponents of a block of A: `part` is its rows and columns. A is zero outside of its blocks. */
    ar_status (*blocks_measure)(ar_ctx *ctx, ar_blocks *s, const ar_part *part, const ar_tensor *a);
    /* Ends the measuring: call it after all blocks were measured. Without other ranks, measuring all blocks of a row
     * before the row's first blocks_add suffices. */
    ar_status (*blocks_measured)(ar_ctx *ctx, ar_blocks *s);
    /* Adds the product of a block of A, measured before, and b to the result. */
    ar_status (*blocks_add)(ar_ctx *ctx, ar_blocks *s, const ar_part *part, const ar_tensor *a);
    /* Reduces and rounds the result to the contiguous y [.., rows / ranks of places, n] and frees s. replicas: AR_ALL,
     * or AR_KEEP, with which each rank of options->replicas gets the sum of its own terms only. */
    ar_status (*blocks_end)(ar_ctx *ctx, const ar_tensor *y, ar_blocks *s, ar_fold replicas);

    /* Adds the sum over samples of dy^T x to the gradient of each of n parameters with the same input x; dy [tokens,
     * out] and x [tokens, in] are 2-D views of `samples` equally long samples. x_rows_over: the group that shards x's
     * features; NULL: none. Frozen parameters are skipped, as in grad_rows. */
    ar_status (*grad_contract)(ar_ctx *ctx, const ar_grad_terms *terms, int n, const ar_tensor *x, size_t samples,
                               ar_comm *x_rows_over);
    /* As grad_contract, by groups: adds to the gradient of sums[i*n + j], for group i and j < n, the sum over samples
     * of dy[j]^T x over the group's rows; dy[j] [rows, out], x [rows, in]. Collective, also for empty groups. */
    ar_status (*grad_groups)(ar_ctx *ctx, ar_param *const *sums, const ar_tensor *dy, int n, const ar_tensor *x,
                             const ar_groups *g, ar_comm *x_rows_over, const char *tag);
    /* Adds rows to a gradient: grad(p)[row_of[r]] += terms[r]; terms [n, cols] is a 2-D view, row_of int64 [n] device
     * memory (negative: skip the row); row_of.ptr NULL: p is 1-D and gets the sum of all rows. */
    ar_status (*grad_rows)(ar_ctx *ctx, ar_param *p, const ar_tensor *terms, ar_cbuf row_of);
    /* Returns the gradient accumulator of a 1-D parameter, for kernels that compute and add terms in one pass, and
     * marks the gradient as present; for a frozen parameter an empty ar_row_sum. Valid until param_release. */
    ar_status (*grad_sum)(ar_ctx *ctx, ar_param *p, ar_row_sum *borrows);
    /* All-reduces the gradient over a group in place, like bucket_reduce of a bucket with this parameter only. */
    ar_status (*grad_reduce)(ar_ctx *ctx, ar_param *p, ar_comm *group, const char *tag);
    /* Writes the rounded gradient to g, a contiguous tensor of the parameter's stored shape on this rank. */
    ar_status (*grad_value)(ar_ctx *ctx, const ar_tensor *g, const ar_param *p);
    /* Sets the gradient to zero. */
    ar_status (*grad_zero)(ar_ctx *ctx, ar_param *p);
    /* A bucket: the unrounded gradients of several parameters, n elements in total, in one buffer of device memory.
     * Bucket functions take a queue because they also run on communication queues; they use no step memory. storage:
     * AR_F32 or AR_BF16, the dtype that values are rounded to (in native numerics also that of the sums).
     * bucket_bytes returns the bytes of a bucket of n elements. */
    size_t (*bucket_bytes)(size_t n, ar_dtype storage);
    /* Copies the gradient of p, zeros if it has none, to bucket elements [offset, offset + elements of p). */
    ar_status (*bucket_pack)(ar_ctx *ctx, ar_queue *q, ar_buf bucket, size_t n, size_t offset, ar_dtype storage,
                             const ar_param *p);
    /* Sets all elements of a bucket to zero. */
    ar_status (*bucket_zero)(ar_ctx *ctx, ar_queue *q, ar_buf bucket, size_t n, ar_dtype storage);
    /* Returns the bytes of the room that bucket_reduce over this group needs; 0: none. With counts NULL as many on each
     * rank. */
    size_t (*bucket_room)(size_t n, ar_dtype storage, const ar_comm *group, const size_t *counts);
    /* Sums a bucket over a group. counts NULL: all-reduce. Otherwise counts [ranks] has sum n and rank r gets only the
     * sums of elements [offset, offset + counts[r]), offset = counts[0] + .. + counts[r-1], in place; the others become
     * undefined. room: device memory of at least bucket_room bytes, whose contents are lost. terms: bounds that let
     * exact numerics send fewer bytes; NULL: not known. */
    ar_status (*bucket_reduce)(ar_ctx *ctx, ar_queue *q, ar_buf bucket, ar_buf room, size_t n, ar_dtype storage,
                               ar_comm *group, const size_t *counts, const ar_most_terms *terms, const char *tag);
    /* Copies bucket elements [offset, offset + elements of p) to p's gradient; grad_ensure must come first. */
    ar_status (*bucket_unpack)(ar_ctx *ctx, ar_queue *q, ar_param *p, ar_cbuf bucket, size_t n, size_t offset,
                               ar_dtype storage);
    /* For sums over ranks of other fp32 values (redistribute.h): the arrays that a bucket consists of. Moving or
     * zeroing the same elements in each array moves or zeroes elements of the bucket. 0 arrays: the arithmetic sums
     * plain numbers in the communicator's order, and bucket_put is NULL. */
    int bucket_arrays;
    ar_bucket_array bucket_array[AR_BUCKET_ARRAYS];
    /* Fills a bucket from x, fp32 [n], contiguous. */
    ar_status (*bucket_put)(ar_ctx *ctx, ar_queue *q, ar_buf bucket, ar_cbuf x, size_t n, ar_dtype storage);
    /* Rounds bucket elements [offset, offset + count) to y, fp32 [count], contiguous. Available without arrays too. */
    ar_status (*bucket_take)(ar_ctx *ctx, ar_queue *q, ar_buf y, ar_cbuf bucket, size_t n, size_t offset, size_t count,
                             ar_dtype storage);
    /* A gradient as a bucket of its elements alone, in place. NULL: it is packed and unpacked. */
    ar_status (*grad_bucket)(ar_ctx *ctx, ar_queue *q, ar_buf *borrows, ar_param *p);
    /* The gradient gets no more terms in this step: keeps its value, rounded, in less memory, on the queue. A term that
     * comes all the same is added to that. NULL: there is no smaller form. */
    ar_status (*grad_complete)(ar_ctx *ctx, ar_queue *q, ar_param *p);
    /* Allocates a parameter's gradient, with value zero, unless it is allocated. */
    ar_status (*grad_ensure)(ar_ctx *ctx, ar_param *p);
    /* Returns the bytes of the gradient's memory; 0 before the first term is added. */
    size_t (*grad_bytes)(const ar_param *p);
    /* Free memory that the arithmetic keeps with a parameter: grad_release the gradient, operand_release the cached
     * operands (both in the order of q, as ar_device_ops.free), param_release both, when no queue uses them. */
    void (*grad_release)(ar_param *p, ar_queue *q);
    void (*operand_release)(ar_param *p, ar_queue *q);
    void (*param_release)(ar_param *p);
};

/** Returns the arithmetic of a context. Static storage. */
const ar_arith_ops *ar_ctx_arith(const ar_ctx *ctx);

AR_END_DECLS
#endif
