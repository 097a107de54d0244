/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_MODULE_H
#define ANYRANK_MODULE_H

#include "anyrank/arith.h"
#include "anyrank/batch.h"

AR_BEGIN_DECLS

/* Activations of one forward pass, saved for its backward pass. Each forward pass in flight has its own ar_saved;
 * modules store no activations themselves. */
typedef struct ar_saved ar_saved;
/** Creates an empty ar_saved; the caller releases *out with ar_saved_destroy. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_saved_create(ar_saved **out);
/** Frees an ar_saved. Accepts NULL. */
void ar_saved_destroy(ar_saved *saved);
/** Saves a view of tensor t under the key (owner, slot): owner is usually the module, slot a number that it chooses. A
 *  key has a stack of views, so that a module may be used several times in one forward pass. Does nothing if saved is
 *  NULL. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_saved_push(ar_saved *saved, const void *owner, int slot, const ar_tensor *t);
/** Removes the newest view under (owner, slot) and copies it to *t. Errors: AR_ERR_ARG (there is none: a backward pass
 *  without forward pass). */
AR_NODISCARD ar_status ar_saved_pop(ar_saved *saved, const void *owner, int slot, ar_tensor *t);

/* A module, as in PyTorch: named parameters, children, a forward and a backward pass. A user-written module fills an
 * ar_module_ops and has an ar_module as first member of its struct; modules.md has a complete example. In these headers
 * x is a module's input, y its output, dx and dy the gradients of the loss with respect to them. Outputs are allocated
 * in step memory (context.h). ar_module_forward and ar_module_backward do the bookkeeping: they count uses of
 * parameters, call hooks, report y and dx to the tap; gradients are reduced over ranks later. User-written modules must
 *   - treat dimension 0 of activations as samples and compute each sample independently of the others, because
 *     data-parallel ranks and micro-batches hold arbitrary numbers of samples;
 *   - save what its backward pass needs with ar_saved_push, not in its struct: several forward passes may be in flight;
 *   - add to gradients with grad_rows and grad_contract of ar_ctx_arith(ctx), whose results do not depend on the order
 *     of samples, micro-batches and ranks;
 *   - multiply matrices with ar_contract or ar_ctx_arith(ctx), and compute everything else with the device's functions;
 *   - call collectives in the same order on every rank of the group. */
typedef struct ar_module ar_module;
/* The function table of a class of modules. */
typedef struct ar_module_ops {
    const char *kind; /* name of the class, such as "column_linear"; static storage */
    /* Required. Computes y from x; *y becomes a tensor in step memory or a view of x. saved NULL: no backward pass will
     * follow. batch may be NULL if the module does not use it. */
    ar_status (*forward)(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                         const ar_batch *batch);
    /* Required. Computes *dx, in step memory, from dy and adds the parameters' gradients. dx NULL: not needed. */
    ar_status (*backward)(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                          const ar_batch *batch);
    /* Optional. For ar_module_recompute: saves again what forward saved, from the same x, without computing y. NULL:
     * forward is called instead. */
    ar_status (*recompute)(ar_module *m, ar_ctx *ctx, ar_saved *saved, const ar_tensor *x, const ar_batch *batch);
    /* Optional. List the module's own parameters (not its children's), and its children, in order: write at most cap
     * pointers to out and return the total number. */
    size_t (*params)(const ar_module *m, ar_param **out, size_t cap);
    size_t (*children)(const ar_module *m, ar_module **out, size_t cap);
    /* Frees m. NULL: the parameters and children in the arrays below are released, then m with free(). */
    void (*destroy)(ar_module *m);
    /* Instead of `params` and `children`: offset (offsetof) and length of an array of ar_param, and of an array of
     * ar_module pointers, in the module's struct, which owns them. All-zero entries are skipped. */
    size_t params_at, params_count;
    size_t children_at, children_count;
    bool takes_ids; /* forward reads token ids from the batch and ignores x, which may be empty */
    bool selective; /* AR_RECOMPUTE_SELECTIVE recomputes this module: its activations are large but cheap */
} ar_module_ops;

/* The part of an activation that each tensor-parallel rank holds. */
typedef enum ar_held {
    AR_HELD_UNKNOWN, /* unknown: the module reports the value itself (ar_tap_value) */
    AR_HELD_WHOLE,   /* all features (with sequence parallelism, from 3 dimensions on, of its own positions) */
    AR_HELD_SHARD    /* an equal block of the features */
} ar_held;
typedef enum ar_pass { AR_FORWARD, AR_BACKWARD } ar_pass; /* forward or backward pass */
/** Callbacks before (begin) and after (end) each forward and backward pass of a module. An error ends the pass. */
typedef struct ar_module_hook {
    ar_status (*begin)(void *user, ar_pass pass);
    ar_status (*end)(void *user, ar_pass pass);
    void *user; /* first argument of both; borrowed */
} ar_module_hook;
/** A unit of ZeRO-2 and -3, like an FSDP unit: a module whose weights are gathered together and whose gradients are
 *  reduced together (ddp.h). */
typedef struct ar_unit {
    ar_module *module; /* borrowed */
    int stage;         /* index among this rank's pipeline stages; 0 without a pipeline */
} ar_unit;

/* The base of every module. */
struct ar_module {
    const ar_module_ops *ops;
    char name[96];              /* Hugging Face path */
    ar_held tap;                /* how y is held, which ar_module_forward reports to the tap as name:fwd */
    ar_held tap_dx;             /* how dx is held, which ar_module_backward reports as name:bwd; initially as y */
    bool recomputed;            /* set by ar_module_recompute */
    const ar_module_hook *hook; /* called around each pass; borrowed; NULL: none */
};
/** Initialises the base of a module in memory that the caller has allocated, all zero. ops is borrowed, name is copied;
 *  tap: how each rank holds y and dx. Errors: AR_ERR_ARG (the name is too long, ops lacks a required function). */
AR_NODISCARD ar_status ar_module_init(ar_module *m, const ar_module_ops *ops, const char *name, ar_held tap);
/** Reports an activation t [samples, ..] computed inside a module to the tap, under `name`, with pass 'f' or 'b'.
 *  placement: the part that this rank holds. */
AR_NODISCARD ar_status ar_tap_value(ar_ctx *ctx, const char *name, char pass, const ar_tensor *t, ar_held placement);

/** Runs a module's forward pass, y = m(x). *y becomes a tensor in step memory; y may point to the same struct as x.
 *  saved NULL: no backward pass will follow. batch: NULL if the module does not use it. Collective over the groups of
 *  ctx. Errors: AR_ERR_SHAPE, AR_ERR_MEMORY, those of the device and the communicator. */
AR_NODISCARD ar_status ar_module_forward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                                         const ar_batch *batch);
/** Runs a module's backward pass for the newest forward pass in `saved`, whose entries it removes: computes *dx in step
 *  memory from dy and adds the parameters' gradients. dx may point to the same struct as dy; NULL: not needed. Errors:
 *  as ar_module_forward; AR_ERR_ARG (`saved` has no forward pass of m). */
AR_NODISCARD ar_status ar_module_backward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx,
                                          const ar_tensor *dy, const ar_batch *batch);
/** Turns on activation checkpointing for a module (Chen et al. 2016, arXiv:1604.06174): forward saves only x and frees
 *  all step memory except y; backward first runs the forward pass again from x and frees everything except dx at its
 *  end. The memory of x must not change between the two passes. Results have the same bits, dropout included. The
 *  second forward pass reports nothing to the tap and counts no parameter uses, but it repeats collectives, and its
 *  FLOPs count. Children of m may be checkpointed too. */
void ar_module_recompute(ar_module *m);
/** Lists the parameters of a module and its children, depth first, shared ones once: writes at most cap pointers to out
 *  and returns the total number, SIZE_MAX if out of memory. The modules own the parameters. If cap is too small, a
 *  shared parameter may be counted once for each use. trainable_only: without frozen parameters. */
size_t ar_module_params(ar_module *m, ar_param **out, size_t cap, bool trainable_only);
/** Sets the gradients of all parameters of a module and its children to zero, those of frozen ones too. Errors:
 *  AR_ERR_MEMORY, those of the device. */
AR_NODISCARD ar_status ar_module_zero_grad(ar_module *m, ar_ctx *ctx);
/** Reduces the gradients of all parameters after the last backward pass of a step: over the data-parallel group, and
 *  over the tensor-parallel group where a parameter is `spread`; then reports each gradient to the tap. Collective over
 *  both. */
AR_NODISCARD ar_status ar_module_reduce_grads(ar_module *m, ar_ctx *ctx);
/** Initialises every parameter randomly; an element of the full tensor depends only on seed, parameter name and its
 *  index, not on the parallel layout. */
AR_NODISCARD ar_status ar_module_fresh(ar_module *m, ar_ctx *ctx, uint64_t seed);
/** Destroys a module and the parameters and children that it owns. Accepts NULL. */
void ar_module_destroy(ar_module *m);

/* --- building blocks of user-written layers ----------------------------------------------------------------------- */

/** Initialises *p as a parameter called "module.part" that is replicated over the tensor-parallel ranks. Its gradient
 *  must be equal on all of them; except that with sequence parallelism a 1-D parameter's gradient covers each rank's
 *  own positions and is summed over the ranks (p->spread is set; clear it for a parameter used between ar_enter_region
 *  and ar_leave_region). fan_in and fan_out are the last and the first extent of shape [ndim]; the standard deviation
 *  of AR_INIT_NORMAL is 0.02 unless p->init_range is set afterwards. Errors: as ar_param_init. */
AR_NODISCARD ar_status ar_param_init_whole(ar_param *p, ar_ctx *ctx, const char *module, const char *part, int ndim,
                                           const size_t *shape, ar_init_scheme init);
/** Initialises *p as a matrix called "module.part" of the full `shape` [out, in] that is sharded evenly over the
 *  tensor-parallel ranks along dimension `dim`: 0 for rows (column-parallel), 1 for columns (row-parallel). Errors: as
 *  ar_param_init, AR_ERR_INDIVISIBLE. */
AR_NODISCARD ar_status ar_param_init_shard(ar_param *p, ar_ctx *ctx, const char *module, const char *part,
                                           const size_t shape[2], int dim, ar_init_scheme init);
/* The functions below allocate their output tensors in step memory. An output pointer may equal an input pointer unless
 * the function says otherwise: inputs are read first. */

/** Allocates *y in step memory with x's shape and dtype; its contents are undefined. */
AR_NODISCARD ar_status ar_like(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x);
/** Broadcasts a vector: y [.., n] has x's shape, is contiguous, and each of its rows is v [n]. Errors: AR_ERR_SHAPE (v
 *  is not as long as x's rows). */
AR_NODISCARD ar_status ar_spread_rows(ar_ctx *ctx, ar_tensor *y, const ar_tensor *v, const ar_tensor *x);
/** ar_add, ar_mul: compute y = fl32(a + b), y = fl32(a * b) element by element for contiguous tensors of one shape.
 *  fl32 is rounding to fp32. Errors: AR_ERR_SHAPE. */
AR_NODISCARD ar_status ar_add(ar_ctx *ctx, ar_tensor *y, const ar_tensor *a, const ar_tensor *b);
AR_NODISCARD ar_status ar_mul(ar_ctx *ctx, ar_tensor *y, const ar_tensor *a, const ar_tensor *b);
/** ar_contract computes Y [.., out] = X W^T for a parameter W [out, in]; ar_contract_backward computes dX = dY W (dx
 *  NULL: not needed) and adds dY^T X to W's gradient. Exact numerics round each sum once. W may be
 *    replicated                X and Y whole; with sequence parallelism each rank has its own positions of X and dY,
 *                              which are gathered for W's gradient
 *    sharded by rows           (ar_param_init_shard, dim 0) X replicated, Y sharded by features, dX a partial sum
 *    sharded by columns        (dim 1) X sharded by features, dY replicated, Y a partial sum
 *  A partial sum must be reduced next: Y by ar_leave_region, dX by ar_enter_region_backward (layers.h). Until then its
 *  elements are NaN. Errors: AR_ERR_SHAPE. */
AR_NODISCARD ar_status ar_contract(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, ar_param *w);
AR_NODISCARD ar_status ar_contract_backward(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy, const ar_tensor *x,
                                            ar_param *w);
/** Backward pass of n <= AR_MAX_PARTS products with the same input X, as gate and up of a gated MLP: computes dX =
 *  dY[0] W[0] + .. + dY[n-1] W[n-1] as one sum and adds dY[i]^T X to the gradient of each W[i]. Use it instead of
 *  adding the dX of several ar_contract_backward, which may be partial sums. Errors: AR_ERR_SHAPE, AR_ERR_ARG. */
AR_NODISCARD ar_status ar_contract_backward_all(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy, const ar_tensor *x,
                                                ar_param *const *w, size_t n);
/* Fused operators, each one pass over contiguous tensors [.., n] of one dtype, F32 or BF16. They compute in fp32 with
 * the formulas and roundings of numerics.md, section 4, allocate outputs in step memory, and add sums over rows to the
 * gradients of parameters like grad_rows (arith.h), skipping frozen parameters. Errors: AR_ERR_SHAPE, AR_ERR_DTYPE,
 * AR_ERR_ARG, AR_ERR_MEMORY; on error nothing is written. */

/** Computes x = x + bias in place and y = act(x). bias [n]; NULL: none. The backward pass needs the new x. GELU:
 *  Hendrycks, Gimpel 2016, arXiv:1606.08415; SiLU: Elfwing, Uchibe, Doya 2017, arXiv:1702.03118. AR_ERR_ARG: act is
 *  AR_ACT_NONE, or y is x. */
AR_NODISCARD ar_status ar_bias_act_forward(ar_ctx *ctx, ar_tensor *y, ar_tensor *x, const ar_param *bias,
                                           ar_activation act);
/** Computes dx = dy * act'(x) with the x that ar_bias_act_forward left, and adds the sum of dx's rows to bias's
 *  gradient [n] (bias NULL: none). */
AR_NODISCARD ar_status ar_bias_act_backward(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy, const ar_tensor *x,
                                            ar_param *bias, ar_activation act);

/* Row statistics that a norm's forward pass saves for the backward pass. */
typedef struct ar_norm_saved {
    ar_tensor mean; /* f64 [rows]; undefined for RMSNorm */
    ar_tensor rstd; /* f32 [rows]: 1/standard deviation, 1/root mean square for RMSNorm */
} ar_norm_saved;
/** Forward pass of a norm over the last dimension n of x, with the mean and the variance taken over it:
 *    AR_NORM_LAYER  y = (x - mean)*rstd*gain + offset, rstd = 1/sqrt(variance + eps)
 *                   (LayerNorm: Ba, Kiros, Hinton 2016, arXiv:1607.06450; the variance is the biased one)
 *    AR_NORM_RMS    y = x*rstd*gain, rstd = 1/sqrt(sum(x^2)/n + eps)
 *                   (RMSNorm: Zhang, Sennrich 2019, arXiv:1910.07467)
 *  gain, offset [n]; offset NULL: none. Writes the row statistics to *saved, in step memory. AR_ERR_ARG: eps is negative
 *  or NaN, RMSNorm with an offset, y points into *saved. */
AR_NODISCARD ar_status ar_norm_forward(ar_ctx *ctx, ar_norm_kind kind, ar_tensor *y, ar_norm_saved *saved,
                                       const ar_tensor *x, const ar_param *gain, const ar_param *offset, double eps);
/** Backward pass of a norm over the last dimension n. With xhat = (x - mean)*rstd and g = dy*gain it computes
 *  dx = (g - sum(g)/n - xhat*sum(g*xhat)/n)*rstd (RMSNorm: mean 0, without the term sum(g)/n), and adds the sums over
 *  rows of dy*xhat and dy to the gradients of gain and offset. residual: the gradient of the residual connection around
 *  the norm, of x's shape; *sum becomes residual + dx. residual NULL: sum is not computed and may be NULL. AR_ERR_ARG:
 *  dx is sum. */
AR_NODISCARD ar_status ar_norm_backward(ar_ctx *ctx, ar_norm_kind kind, ar_tensor *dx, ar_tensor *sum,
                                        const ar_tensor *dy, const ar_tensor *x, const ar_norm_saved *saved,
                                        ar_param *gain, ar_param *offset, const ar_tensor *residual);
/** Adds the sum of the rows of terms [.., n] to the gradient of a 1-D parameter p [n]; for a bias terms is dY. */
AR_NODISCARD ar_status ar_grad_add_rows(ar_ctx *ctx, ar_param *p, const ar_tensor *terms);

AR_END_DECLS
#endif
