/* SPDX-License-Identifier: Apache-2.0 */
/* Internals of a training step: what is trained, and loss scaling. */
#pragma once

#include "anyrank/train.h"

/* What a step trains: a module, or a rank's part of one, and its loss. */
typedef struct ari_trained {
    ar_module *module;
    ar_loss *loss;     /* NULL: a pipeline's rank that does not have the model's last stage */
    ar_param **params; /* [n] all parameters of the module */
    size_t n;
} ari_trained;

/** Runs the n micro-batches of this pipeline rank forward and backward through its stages, in the order of the layout's
 *  schedule. max_batches: the largest number on a data-parallel rank. A failure ends the world with a message that
 *  names stage and micro-batch. Collective over the pipeline and the groups within its ranks. Errors: those of the
 *  passes, the queues and the communicators. */
AR_NODISCARD ar_status ari_pipeline_run(const ari_trained *trained, ar_ctx *ctx, const ar_batch *micro, size_t n,
                                        size_t max_batches, const ar_train_options *o, ar_train_result *result);

/* --- loss scaling ------------------------------------------------------------------------------------------------- */

/** Sets *finite to true if the norm of the gradients is finite on every rank of the context's groups; all ranks get the
 *  same answer. Collective over the tensor-parallel, data-parallel and pipeline groups. */
AR_NODISCARD ar_status ari_scaling_finite(bool *finite, ar_ctx *ctx, float norm);
