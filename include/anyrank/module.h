/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_MODULE_H
#define ANYRANK_MODULE_H

#include "anyrank/arith.h"
#include "anyrank/batch.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Activations kept for the backward pass: an explicit object, one per forward in flight, never in the module. */
typedef struct ar_saved ar_saved;
/** Gives an empty one; ar_saved_destroy. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_saved_create(ar_saved **gives);
/** Forgets everything (the tensors belong to the step). Accepts NULL. */
void ar_saved_clear(ar_saved *s);
/** Accepts NULL. */
void ar_saved_destroy(ar_saved *s);
/** Keeps a view under (owner, slot). A module used twice in one forward pushes twice. s == NULL: does nothing.
 *  Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_saved_push(ar_saved *s, const void *owner, int slot, const ar_tensor *t);
/** Takes back the newest view under (owner, slot). Errors: AR_ERR_ARG (backward without its forward). */
AR_NODISCARD ar_status ar_saved_pop(ar_saved *s, const void *owner, int slot, ar_tensor *t);

/* A module: named parameters, forward, backward, children. A module of a user fills the table and puts an ar_module
 * first in its struct. */
typedef struct ar_module ar_module;
typedef struct ar_module_ops {
    const char *kind; /* static storage: "column_linear" */
    /* required: *y becomes a tensor of the step. saved == NULL: no backward will follow. batch may be NULL where the
     * module does not look at it. */
    ar_status (*forward)(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                         const ar_batch *batch);
    /* required: *dx becomes a tensor of the step, gradients are added to the parameters. dx == NULL: not wanted. */
    ar_status (*backward)(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                          const ar_batch *batch);
    /* optional: own parameters without the children's, and the children, in order; returns
     * how many there are and writes at most cap of them */
    size_t (*params)(const ar_module *m, ar_param **out, size_t cap);
    size_t (*children)(const ar_module *m, ar_module **out, size_t cap);
    void (*destroy)(ar_module *m); /* required; frees m */
} ar_module_ops;
struct ar_module {
    const ar_module_ops *ops;
    char name[96]; /* Hugging Face path */
};

/** y = m(x). *y becomes a tensor of the step, so y must not point to x. saved == NULL: no backward will follow.
 * Collective over the groups of ctx. Errors: AR_ERR_SHAPE, AR_ERR_MEMORY, those of the device and the communicator. */
AR_NODISCARD ar_status ar_module_forward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                                         const ar_batch *batch);
/** From dy, the gradient of y, and what the newest forward saved: *dx becomes a tensor of the step (dx == NULL: not
 *  wanted), and the parameters' gradients are added to. Takes back what was saved. Errors: as forward, and AR_ERR_ARG
 *  (no forward has saved). */
AR_NODISCARD ar_status ar_module_backward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx,
                                          const ar_tensor *dy, const ar_batch *batch);
/** All parameters of m and its children, depth first, a shared one once. Borrowed from the modules. Returns how many;
 *  writes at most cap. (With a cap too small for all, a shared one may be counted for each of its uses.) SIZE_MAX
 *  where memory is too short to list them. */
size_t ar_module_params(ar_module *m, ar_param **out, size_t cap, bool trainable_only);
/** ar_params_reduce of all parameters: after the last backward pass of a step. */
AR_NODISCARD ar_status ar_module_reduce_grads(ar_module *m, ar_ctx *ctx);
/** Every parameter's gradient becomes zero. Errors: AR_ERR_MEMORY, those of the device. */
AR_NODISCARD ar_status ar_module_zero_grad(ar_module *m, ar_ctx *ctx);
/** Fresh values for every parameter (ar_param_fresh): the same full tensors on any number of ranks. */
AR_NODISCARD ar_status ar_module_fresh(ar_module *m, ar_ctx *ctx, uint64_t seed);
/** Accepts NULL. */
void ar_module_destroy(ar_module *m);

#ifdef __cplusplus
}
#endif
#endif
