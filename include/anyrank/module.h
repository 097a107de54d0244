/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_MODULE_H
#define ANYRANK_MODULE_H

#include "anyrank/arith.h"
#include "anyrank/batch.h"

AR_BEGIN_DECLS

/* Activations kept for the backward pass: an explicit object, one per forward in flight, never in the module. */
typedef struct ar_saved ar_saved;
/** Gives an empty one; ar_saved_destroy. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_saved_create(ar_saved **out);
/** Accepts NULL. */
void ar_saved_destroy(ar_saved *s);
/** Keeps a view under (owner, slot). A module used twice in one forward pushes twice. s == NULL: does nothing.
 *  Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_saved_push(ar_saved *s, const void *owner, int slot, const ar_tensor *t);
/** Takes back the newest view under (owner, slot). Errors: AR_ERR_ARG (backward without its forward). */
AR_NODISCARD ar_status ar_saved_pop(ar_saved *s, const void *owner, int slot, ar_tensor *t);

/* A module: named parameters, forward, backward, children. A module of a user fills the table and puts an ar_module
 * first in its struct; modules.md has one in full. What it need not do: count its parameters' uses, call hooks,
 * report y and dx (`tap`), sum gradients over ranks. What it must:
 *   - treat dimension 0 of an activation as samples, of which data-parallel ranks and micro-batches hold any number,
 * and let no sample see another;
 *   - keep what its backward pass needs with ar_saved_push, not in itself: several forward passes may be in flight;
 *   - add to gradients by ar_ctx_arith(ctx)->grad_rows and grad_contract, in which the order of samples, micro-batches
 *     and ranks leaves no trace;
 *   - multiply matrices by ar_contract or the arithmetic's own slots, and go through the device's table for the rest;
 *   - call collectives in the same order on every rank of the group. */
typedef struct ar_module ar_module;
typedef struct ar_module_ops {
    const char *kind; /* static storage: "column_linear" */
    /* required: *y becomes a tensor of the step (y may be a view of x). saved == NULL: no backward will follow. batch
     * may be NULL where the module does not look at it. */
    ar_status (*forward)(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                         const ar_batch *batch);
    /* required: *dx becomes a tensor of the step, gradients are added to the parameters. dx == NULL: not wanted. */
    ar_status (*backward)(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                          const ar_batch *batch);
    /* optional: once more what forward keeps in `saved`, from the same x; for ar_module_recompute, which else calls
     * forward. What y alone needs, such as the last product of all, it leaves out. */
    ar_status (*recompute)(ar_module *m, ar_ctx *ctx, ar_saved *saved, const ar_tensor *x, const ar_batch *batch);
    /* optional: own parameters without the children's, and the children, in order; returns
     * how many there are and writes at most cap of them */
    size_t (*params)(const ar_module *m, ar_param **out, size_t cap);
    size_t (*children)(const ar_module *m, ar_module **out, size_t cap);
    void (*destroy)(ar_module *m); /* frees m; NULL: what the arrays below have, and m with free() */
    /* in place of params and children, arrays of them in the module's struct, which are its own: where they begin
     * (offsetof), and how many there are. What is all zero was not made, and does not count */
    size_t params_at, params_count;
    size_t children_at, children_count;
    bool takes_ids; /* forward takes the batch's ids and does not look at x, which may be nothing */
    bool selective; /* AR_RECOMPUTE_SELECTIVE recomputes it: its values take memory rather than time, as attention's */
} ar_module_ops;

/* The part of a value that a rank of the tensor-parallel group holds. */
typedef enum ar_held {
    AR_HELD_UNKNOWN, /* unknown: the module taps its own values */
    AR_HELD_WHOLE,   /* all of it (with sequence parallelism, of three dimensions or more: its own positions) */
    AR_HELD_SHARD    /* its block of the features, which are split evenly */
} ar_held;
typedef enum ar_pass { AR_FORWARD, AR_BACKWARD } ar_pass;
/** Calls before and after each pass of a module; a failure ends the pass. */
typedef struct ar_module_hook {
    ar_status (*begin)(void *user, ar_pass pass);
    ar_status (*end)(void *user, ar_pass pass);
    void *user; /* borrowed */
} ar_module_hook;
/** A module whose weights a data-parallel object gathers together, and whose gradients it reduces together
 *  (anyrank/ddp.h). */
typedef struct ar_unit {
    ar_module *module; /* borrowed */
    int stage;         /* of this rank's in a pipeline; 0 without */
} ar_unit;

struct ar_module {
    const ar_module_ops *ops;
    char name[96];              /* Hugging Face path */
    ar_held tap;                /* what ar_module_forward reports to a listener: y as name:fwd */
    ar_held tap_dx;             /* and _backward: dx as name:bwd; to be set where it is held otherwise than y */
    bool recomputed;            /* ar_module_recompute */
    const ar_module_hook *hook; /* borrowed; NULL: none */
};
/** Fills in a module whose memory is the caller's: its table and its name. Errors: AR_ERR_ARG (the name is too long, a
 *  required slot is missing). */
AR_NODISCARD ar_status ar_module_init(ar_module *m, const ar_module_ops *ops, const char *name, ar_held tap);
/** Reports a value that arises inside a module: activations [samples, ..], placed as ari_ctx_place_batch says. */
AR_NODISCARD ar_status ar_tap_value(ar_ctx *ctx, const char *name, char pass, const ar_tensor *t, ar_held placement);

/** y = m(x). *y becomes a tensor of the step, and y may be x. saved == NULL: no backward will follow.
 * Collective over the groups of ctx. Errors: AR_ERR_SHAPE, AR_ERR_MEMORY, those of the device and the communicator. */
AR_NODISCARD ar_status ar_module_forward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                                         const ar_batch *batch);
/** From dy, the gradient of y, and what the newest forward saved: *dx becomes a tensor of the step, and dx may be dy (dx == NULL:
 *  not wanted), and the parameters' gradients are added to. Takes back what was saved. Errors: as forward, and AR_ERR_ARG
 *  (no forward has saved). */
AR_NODISCARD ar_status ar_module_backward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx,
                                          const ar_tensor *dy, const ar_batch *batch);
/** From now on m's forward pass is computed again in its backward pass, in place of being kept (activation
 *  checkpointing: Chen et al. 2016, arXiv:1604.06174): forward keeps x alone and gives back all memory of the step that
 *  it took but for y, backward begins with a second forward pass from that x and at its end gives back all but dx. x
 *  and what it is a view of must not change between the two. Same bits, dropout included; the second pass reports
 *  nothing to a listener and counts no use of a parameter, but it calls the collectives of the first again, and its
 *  work is counted. m may have children that are recomputed too. */
void ar_module_recompute(ar_module *m);
/** All parameters of m and its children, depth first, a shared one once. Borrowed from the modules. Returns how many;
 *  writes at most cap. (With a cap too small for all, a shared one may be counted for each of its uses.) SIZE_MAX
 *  where memory is too short to list them. */
size_t ar_module_params(ar_module *m, ar_param **out, size_t cap, bool trainable_only);
/** ari_params_reduce of all parameters: after the last backward pass of a step. */
AR_NODISCARD ar_status ar_module_reduce_grads(ar_module *m, ar_ctx *ctx);
/** Fresh values for every parameter (ari_param_fresh): the same full tensors on any number of ranks. */
AR_NODISCARD ar_status ar_module_fresh(ar_module *m, ar_ctx *ctx, uint64_t seed);
/** Accepts NULL. */
void ar_module_destroy(ar_module *m);

/* --- what layers of one's own are made of ------------------------------------------------------------------------- */

/** A parameter "module.part" that every rank of the tensor-parallel group holds whole; its gradient must come out equal
 * on all of them; but with sequence parallelism a vector is used on each rank's own positions, and its gradient summed
 * over them (p->spread: false where it is used inside a tensor-parallel region). fan_in and fan_out are the last and the
 * first extent; the standard deviation of AR_INIT_NORMAL is 0.02 unless p->init_range is set. Errors: as
 * ar_param_init. */
AR_NODISCARD ar_status ar_param_init_whole(ar_param *p, ar_ctx *ctx, const char *module, const char *part, int ndim,
                                           const size_t *shape, ar_init_scheme init);
/** A matrix "module.part" of this full shape, of which each tensor-parallel rank has an equal block of dimension `dim`:
 *  0, rows of W [out, in] (column-parallel), or 1, columns (row-parallel). Errors: also AR_ERR_INDIVISIBLE. */
AR_NODISCARD ar_status ar_param_init_shard(ar_param *p, ar_ctx *ctx, const char *module, const char *part,
                                           const size_t shape[2], int dim, ar_init_scheme init);
/* An output becomes a tensor of the step, in fresh memory. It may be one of the inputs, unless the function says
 * otherwise: all are read as they were. */

/** A fresh tensor of the step with x's shape and dtype. */
AR_NODISCARD ar_status ar_like(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x);
/** y [.., n] = v [n] for every row, contiguous: what multiplies or is added row by row. y becomes a tensor of the step
 *  with x's shape. Errors: AR_ERR_SHAPE (v is not as long as x's rows). */
AR_NODISCARD ar_status ar_spread_rows(ar_ctx *ctx, ar_tensor *y, const ar_tensor *v, const ar_tensor *x);
/** Element by element, of contiguous tensors of one shape: y = fl32(a + b), y = fl32(a * b). y becomes a tensor of the
 *  step. Errors: AR_ERR_SHAPE. */
AR_NODISCARD ar_status ar_add(ar_ctx *ctx, ar_tensor *y, const ar_tensor *a, const ar_tensor *b);
AR_NODISCARD ar_status ar_mul(ar_ctx *ctx, ar_tensor *y, const ar_tensor *a, const ar_tensor *b);
/** Y [.., out] = X W^T for a parameter W [out, in], and its gradients: dX = dY W, W's gradient += dY^T X. dx NULL: not
 *  wanted. Every sum is rounded once in the exact numerics. W is whole on every rank (with sequence parallelism X and dY
 *  are its own positions, which are gathered for W's gradient), or cut (ar_param_init_shard): by rows, X is R, Y its
 *  features, and dX the terms of a sum; by columns, X is its features, dY R, and Y the terms of a sum. Terms are NaN
 *  until the operator that follows has added them up: ar_leave_region takes Y, ar_enter_region_backward dX (layers.h).
 *  Errors: AR_ERR_SHAPE. */
AR_NODISCARD ar_status ar_contract(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, ar_param *w);
AR_NODISCARD ar_status ar_contract_backward(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy, const ar_tensor *x,
                                            ar_param *w);
/** dX = dY[0] W[0] + .. + dY[n - 1] W[n - 1] of up to AR_MAX_PARTS weights with one X, as of a gated MLP, as one sum, and
 *  their gradients. Terms of several products cannot be added before they are complete. Errors: also AR_ERR_ARG. */
AR_NODISCARD ar_status ar_contract_backward_all(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy, const ar_tensor *x,
                                                ar_param *const *w, size_t n);
/* Fused operators, each one pass over its tensors: contiguous [.., n], F32 or BF16 (one dtype), computed in fp32, with
 * the formulas and roundings of numerics.md, section 4. What they make belongs to the step; sums over rows go into
 * the parameters' gradients as grad_rows' do, and a frozen parameter gets none. Errors of all: AR_ERR_SHAPE,
 * AR_ERR_DTYPE, AR_ERR_ARG, AR_ERR_MEMORY; nothing is written then. */

/** x becomes x + bias, in place, which is what the backward pass takes, and y = act(x + bias). bias [n]; NULL: none.
 *  y must not be x. GELU: Hendrycks, Gimpel 2016, arXiv:1606.08415; SiLU: Elfwing, Uchibe, Doya 2017, arXiv:1702.03118. Errors: also
 *  AR_ERR_ARG (AR_ACT_NONE; y is x). */
AR_NODISCARD ar_status ar_bias_act_forward(ar_ctx *ctx, ar_tensor *y, ar_tensor *x, const ar_param *bias,
                                           ar_activation act);
/** dx = dy * act'(x), of the x that the forward pass left, and bias's gradient [n] += the rows of dx. */
AR_NODISCARD ar_status ar_bias_act_backward(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy, const ar_tensor *x,
                                            ar_param *bias, ar_activation act);

/* Values that a norm's backward pass takes besides its input. */
typedef struct ar_norm_saved {
    ar_tensor mean, rstd; /* of each row: f64 [rows], which RMSNorm leaves undefined, and f32 [rows] */
} ar_norm_saved;
/** With xhat = (x - mean)*rstd and g = dy*gain: dx = (g - sum(g)/n - xhat*sum(g*xhat)/n)*rstd, for RMSNorm without the
 *  sum of g. gain's gradient += the rows of dy*xhat, offset's += those of dy. residual, of x's shape, is the gradient
 *  that went past the norm: *sum = residual + dx; NULL: sum is not made, and may be NULL.
 *  Errors: also AR_ERR_ARG (dx is sum). */
AR_NODISCARD ar_status ar_norm_backward(ar_ctx *ctx, ar_norm_kind kind, ar_tensor *dx, ar_tensor *sum,
                                        const ar_tensor *dy, const ar_tensor *x, const ar_norm_saved *saved,
                                        ar_param *gain, ar_param *offset, const ar_tensor *residual);
/** p's gradient += the sum of the rows of terms [.., n]: of a bias, dY itself. p is a vector [n]. */
AR_NODISCARD ar_status ar_grad_add_rows(ar_ctx *ctx, ar_param *p, const ar_tensor *terms);

AR_END_DECLS
#endif
