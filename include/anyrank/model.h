/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_MODEL_H
#define ANYRANK_MODEL_H

#include "anyrank/module.h"
#include "anyrank/plan.h"

AR_BEGIN_DECLS

/* Whole models out of layers, from a config. Names and numbers of parameters are Hugging Face's. */
typedef struct ar_model ar_model;

/** Builds this rank's part; collective over the context's group. Values undefined until ar_model_fresh or ari_model_set.
 *  plan NULL: the default. Gives; ar_model_destroy. */
AR_NODISCARD ar_status ar_model_create(ar_model **out, ar_ctx *ctx, const ar_config *c, const ar_plan *plan);
/** Accepts NULL. */
void ar_model_destroy(ar_model *m);
/** The model as a list of modules, of which a rank of a pipeline has its own: its parameters are in the order of their first
 *  use; each block is a unit of a data-parallel object (ddp.h). Borrowed. */
ar_module *ar_model_module(ar_model *m);
/** Fresh weights by name, made equal over the data-parallel group, then a tap ':init' of each. */
AR_NODISCARD ar_status ar_model_fresh(ar_model *m, ar_ctx *ctx, uint64_t seed);

AR_END_DECLS
#endif
