/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_TRAIN_H
#define ANYRANK_TRAIN_H

#include "anyrank/ddp.h"
#include "anyrank/loss.h"
#include "anyrank/model.h"
#include "anyrank/optimizer.h"
#include "anyrank/parallel.h"

AR_BEGIN_DECLS

/* The training step: micro-batches forward and backward, gradients summed over the groups that hold parts of them,
 * clipped, applied. Everything is collective over the groups of the context. */

/** Optimizer state for a list of parameters, element by element where the parameter's own shard is. */
typedef struct ar_optimizer ar_optimizer;
/** Borrows the parameters and the context's device until ar_optimizer_destroy; copies the options. A parameter that
 *  requires no gradient now gets no state and is never updated; one that requires none at a step, or has none
 *  (ar_param.has_grad), not in that step. Of a parameter in bf16 storage it keeps the fp32 weights, which each step
 *  updates and then rounds; weights that are set in between are taken over.
 *  Errors: AR_ERR_ARG (ari_optimizer_check; a parameter twice), AR_ERR_MEMORY, AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ar_optimizer_create(ar_optimizer **out, ar_ctx *ctx, ar_param *const *params, size_t n,
                                           const ar_optimizer_options *o);
/** Accepts NULL. */
void ar_optimizer_destroy(ar_optimizer *o);
/** One update of every parameter from its gradient times `scale` (fl32(g*scale); 1: untouched), and a new version of
 *  each. Then taps of each: ':new', and the moments ':m' and ':v' as far as they are kept. Of shares: collective over
 * the data-parallel group. Errors: AR_ERR_ARG (gradients are shared out, and the optimizer is of whole parameters or of
 * other shares), before any weight has changed; those of the device and the communicators. */
AR_NODISCARD ar_status ar_optimizer_step(ar_optimizer *o, ar_ctx *ctx, float scale);
/** One rank's part of one kind of state of one parameter: "exp_avg", "exp_avg_sq" (Adam), "momentum_buffer" (SGD),
 *  "master" (of bf16 storage). local, fp32: as ar_tap_event has it, with `layout` in the Hugging Face shape; borrowed
 *  during the call. */
typedef ar_status (*ar_optimizer_state_fn)(void *user, const ar_param *p, const char *state, const ar_tensor *local,
                                           const ar_layout *layout);

/** Loss scaling (Micikevicius et al. 2018, arXiv:1710.03740), in native numerics: the gradient of the loss is taken
 *  times S, and the sums of the gradients times 1/S before anything looks at them. Where their norm is then not finite
 *  on any rank, dynamic scaling leaves the update out on all ranks, and S falls; static scaling ends the step with an
 *  error. Plain data; `scale`, `good` and `skipped` go on with each step, in the same way on every rank. */
typedef struct ar_loss_scaling {
    bool dynamic;
    double growth, backoff; /* dynamic: S times growth after `interval` updates in a row, times backoff (not below 1) */
    uint32_t interval;      /* after a step that was left out */
    double scale;           /* S, of the next step */
    uint32_t good;          /* updates since S last changed */
    uint64_t skipped;       /* steps without an update */
} ar_loss_scaling;

typedef struct ar_gradients ar_gradients; /* gradients.h */

typedef struct ar_train_options {
    ar_parallel parallel;
    double clip; /* largest gradient norm; 0: no clipping */
    ar_ddp *
        ddp; /* (ar_ddp_create of ar_model_module) over all parameters of the model that train: sums their gradients over the data-parallel ranks.
                    Borrowed. NULL: each gradient is summed on its own after the last backward pass; no object may hold
                    them then */
    ar_loss_scaling *scaling; /* native numerics only; borrowed, its state goes on. NULL: none */
    ar_gradients *verify; /* asked when the gradients are complete (ar_gradients_verify of them, of the copies of the
                             parameters and of the optimizer's state): an error ends the step with AR_ERR_DATA and one
                             text on all ranks, before any weight has changed. NULL: nobody asks. Borrowed */
    bool forward_only;
} ar_train_options;
typedef struct ar_train_result {
    float loss;
    float norm;          /* of the gradients before clipping; 0 where nothing asked for it */
    bool skipped;        /* the update was left out: loss scaling */
    size_t targets;      /* T, of the global batch */
    size_t stored_bytes; /* step memory after a micro-batch's forward pass, the largest */
} ar_train_result;
/** One step on this rank's rows of a global batch (host; the same on every rank): counts the targets over all
 *  micro-batches and data-parallel ranks, runs the micro-batches, sums the gradients, clips and updates.
 *  optimizer NULL: gradients only. A gradient norm that is not finite while clipping, or with static loss scaling, or
 *  with a dynamic scale that may not fall: AR_ERR_DATA, before any weight has changed. step: 1 for the first. Ends the
 *  step of the context. Errors: also AR_ERR_ARG (a batch without input; the layout of another context; a ddp of another one, or that
 *  does not hold all parameters that train; loss scaling in exact numerics, where
 *  nothing is lost and the baseline has none; ari_loss_scaling_check). */
AR_NODISCARD ar_status ar_train_step(ar_train_result *result, ar_model *m, ar_ctx *ctx, ar_optimizer *optimizer,
                                     const ar_batch *global, uint32_t step, const ar_train_options *o);
/** The same step of any module, judged by a loss; the module's input is ari_batch_input of the batch (loss.h says where
 *  the targets are), and T = 0 gives a loss of NaN and gradients of 0.
 *  Errors: also AR_ERR_UNSUPPORTED (a layout that shares out positions, of samples
 *  without any). */
AR_NODISCARD ar_status ar_module_train_step(ar_train_result *result, ar_module *m, ar_loss *loss, ar_ctx *ctx,
                                            ar_optimizer *optimizer, const ar_batch *global, uint32_t step,
                                            const ar_train_options *o);

/** A module of one's own with its loss and its data, to be trained or checked. */
typedef struct ar_module_case {
    const char *name; /* for reports */
    /* Makes the module and its loss on one rank; called on every rank's own thread, several at a time. They become the
     * caller's, which destroys them, also after an error. */
    ar_status (*build)(void *user, ar_ctx *ctx, ar_module **module, ar_loss **loss);
    /* The global batch of step 1, 2, ..: its arrays are borrowed until the caller returns, so that each step has its own
     * unless all have the same. Called on the calling thread, once for each step. */
    ar_status (*batch)(void *user, int step, ar_batch *batch);
    void *user;
    bool own_weights; /* build gives the parameters their values, the same full tensors under any layout; false: fresh
                         ones by name (ar_module_fresh) */
} ar_module_case;

AR_END_DECLS
#endif
