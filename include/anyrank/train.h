/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_TRAIN_H
#define ANYRANK_TRAIN_H

#include "anyrank/ddp.h"
#include "anyrank/loss.h"
#include "anyrank/model.h"
#include "anyrank/optimizer.h"
#include "anyrank/parallel.h"

AR_BEGIN_DECLS

/* The training step: forward and backward passes of all micro-batches, reduction of the gradients, gradient clipping,
 * update of the weights. Functions with a context are collective over its groups. */

/** An optimizer: the state (such as moments) of a list of parameters, sharded like the parameters. */
typedef struct ar_optimizer ar_optimizer;
/** Creates an optimizer for n different parameters. Borrows the parameters and the context's device until
 *  ar_optimizer_destroy, with which the caller releases *out; copies the options. A parameter that is frozen now gets
 *  no state and is never updated; one that is frozen or without gradient (ar_param.has_grad) in a step is not updated
 *  in that step. For a parameter stored in bf16 the optimizer keeps fp32 weights, which a step updates and rounds to
 *  bf16; bf16 weights that were set in between replace them. Errors: AR_ERR_ARG (an option out of range, a parameter
 *  listed twice), AR_ERR_MEMORY, AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ar_optimizer_create(ar_optimizer **out, ar_ctx *ctx, ar_param *const *params, size_t n,
                                           const ar_optimizer_options *o);
/** Creates an optimizer for ZeRO: each data-parallel rank updates its shards of the buckets of `ddp`, which was created
 *  with ar_ddp_options.zero 1, 2 or 3; below stage 3 the other ranks then receive the new weights. Borrows ddp until
 *  ar_optimizer_destroy, which must come before ar_ddp_destroy. Errors: as ar_optimizer_create; AR_ERR_ARG (the ddp was
 *  created without ZeRO). */
AR_NODISCARD ar_status ar_optimizer_create_sharded(ar_optimizer **out, ar_ctx *ctx, ar_ddp *ddp,
                                                   const ar_optimizer_options *o);
/** Frees an optimizer. Accepts NULL. */
void ar_optimizer_destroy(ar_optimizer *o);
/** Updates every parameter once, from its gradient times `scale` (fl32(g*scale), for clipping; 1: none), and increments
 *  its version. Then reports the new values and the moments to the tap (passes 'n', 'm', 'v'). Collective over the
 *  data-parallel group if ZeRO shards the parameters. Errors: AR_ERR_ARG (the optimizer was not created for the ZeRO
 *  shards of these gradients; no weight is changed), those of the device and the communicators. */
AR_NODISCARD ar_status ar_optimizer_step(ar_optimizer *o, ar_ctx *ctx, float scale);
/** Callback that receives this rank's part of one optimizer state of parameter p. state: "exp_avg", "exp_avg_sq"
 *  (Adam), "momentum_buffer" (SGD), "master" (fp32 weights of bf16 storage). local: the fp32 values in host memory;
 *  layout: their elements of the full tensor in its Hugging Face shape. Both are valid during the call. */
typedef ar_status (*ar_optimizer_state_fn)(void *user, const ar_param *p, const char *state, const ar_tensor *local,
                                           const ar_layout *layout);

/** Calls emit for every optimizer state of this rank. Errors: those of emit. */
AR_NODISCARD ar_status ar_optimizer_save(ar_optimizer *o, ar_ctx *ctx, ar_optimizer_state_fn emit, void *user);
/** Restores the optimizer as it was after `steps` steps, under the same or another layout. find(user, param, state,
 *  count) returns the `count` fp32 values of the full tensor of that parameter's state, row-major, borrowed, or NULL if
 *  it has none. Errors: AR_ERR_NOT_FOUND (find returned NULL; the message names parameter and state), those of the
 *  device. */
AR_NODISCARD ar_status ar_optimizer_load(ar_optimizer *o, ar_ctx *ctx, uint64_t steps,
                                         const float *(*find)(void *user, const char *param, const char *state,
                                                              size_t count),
                                         void *user);

/** Computes *norm = sqrt(sum g^2) over the reduced gradients of n trainable parameters, in which each element of the full
 *  tensors counts once; the same bits on every rank (numerics.md, section 4, has the order of the sum). To clip at c,
 *  pass ar_optimizer_step the scale c/(norm + 1e-6) if that is below 1. NaN if a gradient is not finite. Collective over
 *  the tensor-parallel group, and with ZeRO over the data-parallel group. Errors: those of the communicators. */
AR_NODISCARD ar_status ar_gradient_norm(float *norm, ar_ctx *ctx, ar_param *const *params, size_t n);

/** Loss scaling (Micikevicius et al. 2018, arXiv:1710.03740), for native numerics (ar_numerics in context.h): backward
 *  passes start from the loss's gradient times a scale S, and the reduced gradients are multiplied by 1/S. If their
 *  norm is then not finite, dynamic scaling skips the update on all ranks and lowers S; static scaling ends the step
 *  with an error. Plain data; each step updates scale, good and skipped, equally on every rank. */
typedef struct ar_loss_scaling {
    bool dynamic;   /* false: static */
    double growth;  /* dynamic: S is multiplied by growth after `interval` consecutive updates */
    double backoff; /* dynamic: S is multiplied by backoff, but not below 1, after a skipped step */
    uint32_t interval;
    double scale;     /* S of the next step */
    uint32_t good;    /* consecutive updates since S last changed */
    uint64_t skipped; /* number of skipped steps */
} ar_loss_scaling;
/** Returns the defaults of PyTorch's GradScaler: growth 2, backoff 0.5, interval 2000, scale 65536. */
ar_loss_scaling ar_loss_scaling_defaults(bool dynamic);

struct ar_gradients; /* verifies gradients across ranks: gradients.h */

/** Options of a training step. */
typedef struct ar_train_options {
    ar_parallel parallel; /* the parallel layout that the context was created for */
    double clip;          /* largest gradient norm; 0: no clipping */
    ar_ddp *ddp;          /* reduces the gradients over the data-parallel ranks; it must hold all trainable parameters
                             of the model (create it from ar_model_module). Borrowed. NULL: each gradient is reduced
                             separately after the last backward pass, and no ar_ddp may hold the parameters */
    ar_loss_scaling *scaling;    /* borrowed and updated; native numerics only; NULL: no loss scaling */
    struct ar_gradients *verify; /* verifies gradients, copies of parameters and optimizer state across ranks before the
                                 update (ar_gradients_verify); a problem ends the step with AR_ERR_DATA and the same
                                 message on all ranks, and no weight is changed. Borrowed. NULL: no verification */
    bool forward_only;           /* only computes the loss */
} ar_train_options;
/** Results of a training step. */
typedef struct ar_train_result {
    float loss;
    float norm;          /* gradient norm before clipping; 0 if no option needs it */
    bool skipped;        /* loss scaling skipped the update */
    size_t targets;      /* T, the number of targets of the global batch */
    size_t stored_bytes; /* largest step memory after a micro-batch's forward pass */
} ar_train_result;
/** Runs one training step of a model on this rank's rows of the global batch, which every rank passes in host memory:
 *  counts the targets of the global batch, runs the micro-batches' forward and backward passes, reduces and clips the
 *  gradients, updates the weights, and frees the step memory. optimizer NULL: no update. step: 1 for the first. Errors:
 *  AR_ERR_DATA (the gradient norm is not finite while clipping, with static loss scaling, or with a dynamic scale that
 *  cannot fall; no weight is changed), AR_ERR_ARG (a batch without input; a layout or ddp of another context; a ddp
 *  without some trainable parameter; loss scaling in exact numerics or out of range), those of device and
 *  communicators. */
AR_NODISCARD ar_status ar_train_step(ar_train_result *result, ar_model *m, ar_ctx *ctx, ar_optimizer *optimizer,
                                     const ar_batch *global, uint32_t step, const ar_train_options *o);
/** Runs one training step of a module with a loss, as ar_train_step. The module's input is the batch's `input` [b,
 *  sample_shape..] or its token ids [b, s] (AR_I64); each rank gets its own rows and positions. Without targets (T = 0)
 *  the loss is NaN and gradients are 0. Errors: also AR_ERR_UNSUPPORTED (the layout shards positions, but samples have
 *  fewer than two dimensions). */
AR_NODISCARD ar_status ar_module_train_step(ar_train_result *result, ar_module *m, ar_loss *loss, ar_ctx *ctx,
                                            ar_optimizer *optimizer, const ar_batch *global, uint32_t step,
                                            const ar_train_options *o);

/** A training problem defined by the user: a module, its loss and its batches. ar_training_options.module trains it,
 *  ar_check_module checks it. */
typedef struct ar_module_case {
    const char *name; /* for reports */
    /* Creates module and loss on one rank; called on every rank's thread, several at a time. The library destroys both,
     * also those that are set when build returns an error. */
    ar_status (*build)(void *user, ar_ctx *ctx, ar_module **module, ar_loss **loss);
    /* Fills *batch with the global batch of step 1, 2, .. Its arrays are borrowed until the training run or check
     * returns, so different batches need different arrays. Called once for each step, on the calling thread. */
    ar_status (*batch)(void *user, int step, ar_batch *batch);
    void *user;       /* first argument of build and batch */
    bool own_weights; /* build sets the parameters' values, to shards of the same full tensors under every layout;
                         false: the library calls ar_module_fresh */
} ar_module_case;

AR_END_DECLS
#endif
