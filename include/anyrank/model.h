/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_MODEL_H
#define ANYRANK_MODEL_H

#include "anyrank/arch.h"
#include "anyrank/module.h"
#include "anyrank/plan.h"

AR_BEGIN_DECLS

/* A complete language model, built from a config. Parameters have Hugging Face's names and shapes. Functions with a
 * context are collective over its groups. */
typedef struct ar_model ar_model; /* one rank's part of the model */

/** Builds this rank's part of a model. Weights are undefined until they are initialised (ar_model_fresh) or loaded.
 *  plan: how modules are sharded over the tensor-parallel ranks; NULL: the architecture's default. The caller releases
 *  *out with ar_model_destroy. */
AR_NODISCARD ar_status ar_model_create(ar_model **out, ar_ctx *ctx, const ar_config *config, const ar_plan *plan);
/** Frees a model. Accepts NULL. */
void ar_model_destroy(ar_model *model);
/** Returns the model as a sequential module (in a pipeline: this rank's stages), owned by the model. Its parameters are
 *  in the order of first use; each block is a unit for ZeRO (ddp.h). */
ar_module *ar_model_module(ar_model *model);
/** Initialises all weights randomly, from `seed` and the parameter's name, broadcasts them over the data-parallel
 *  group, and reports each to the tap with pass 'i'. */
AR_NODISCARD ar_status ar_model_fresh(ar_model *model, ar_ctx *ctx, uint64_t seed);

AR_END_DECLS
#endif
