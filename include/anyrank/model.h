/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_MODEL_H
#define ANYRANK_MODEL_H

#include "anyrank/module.h"
#include "anyrank/plan.h"

AR_BEGIN_DECLS

/* Whole models out of layers, from a config. Names and numbers of parameters are Hugging Face's. */
typedef struct ar_model ar_model;

/** Checks a layout of `ranks` tensor-parallel ranks without building anything. Errors: AR_ERR_INDIVISIBLE (names the
 *  dimension, its size and the number of ranks), AR_ERR_UNSUPPORTED (the plan), AR_ERR_ARG (ranks < 1). */
AR_NODISCARD ar_status ar_config_check_tp(const ar_config *c, int ranks, const ar_plan *plan);
/** Checks that `inner` context-parallel neighbours (ar_parallel) can share the heads of each of those ranks, KV heads
 *  also as copies. Errors: AR_ERR_INDIVISIBLE (names the heads and what would be right), AR_ERR_ARG (inner < 1). */
AR_NODISCARD ar_status ar_config_check_inner(const ar_config *c, int ranks, int inner, const ar_plan *plan);
/** Number of parameters (elements) of the whole model. Errors: AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ar_config_parameters(const ar_config *c, size_t *out);

/** Builds this rank's part; collective over the context's group. Values undefined until ar_model_fresh or ar_model_set.
 *  plan NULL: the default. Gives; ar_model_destroy. */
AR_NODISCARD ar_status ar_model_create(ar_model **gives, ar_ctx *ctx, const ar_config *c, const ar_plan *plan);
/** Accepts NULL. */
void ar_model_destroy(ar_model *m);
/** The model as a list of modules, of which a rank of a pipeline has its own: its parameters are in the order of their first
 *  use; each block is a unit of a data-parallel object (ddp.h). Borrowed. */
ar_module *ar_model_module(ar_model *m);
/** Fresh weights by name, made equal over the data-parallel group, then a tap ':init' of each. */
AR_NODISCARD ar_status ar_model_fresh(ar_model *m, ar_ctx *ctx, uint64_t seed);
/** Given weights: find(user, name, count) returns `count` fp32 values of the full tensor, borrowed, or NULL (then
 *  AR_ERR_NOT_FOUND). Then a tap ':init' of each. */
AR_NODISCARD ar_status ar_model_set(ar_model *m, ar_ctx *ctx, const float *(*find)(void *, const char *, size_t),
                                    void *user);
/** Forward through all of it, up to the loss's terms, which are added to those of earlier micro-batches. saved NULL: no
 *  backward follows. Errors: also AR_ERR_ARG (a stage of a pipeline). */
AR_NODISCARD ar_status ar_model_forward(ar_model *m, ar_ctx *ctx, ar_saved *saved, const ar_batch *batch);
/** The loss of all micro-batches and data-parallel ranks since ar_model_zero_grad, tapped as "loss": the terms' sum
 *  over `targets`, the target tokens of the global batch (0: the loss is NaN), or the sum itself where the model has no
 *  LM head; the routers' own losses, layer by layer; and those of further tokens, over theirs (ar_batch.mtp_targets). The same on every rank. Collective over the context's groups,
 *  the pipeline too. */
AR_NODISCARD ar_status ar_model_loss(ar_model *m, ar_ctx *ctx, float *loss, size_t targets);
/** Backward from the loss; gradients are added to the parameters. */
AR_NODISCARD ar_status ar_model_backward(ar_model *m, ar_ctx *ctx, ar_saved *saved, const ar_batch *batch);
/** Gradients and the loss's terms become zero. */
AR_NODISCARD ar_status ar_model_zero_grad(ar_model *m, ar_ctx *ctx);
/** The options of block `layer` of a config, and the names of its parts; its split is the caller's (ar_plan_block).
 *  `name` (cap bytes) becomes its path. */
AR_NODISCARD ar_status ar_config_block(const ar_config *c, size_t layer, ar_block_options *o, char *name, size_t cap);

AR_END_DECLS
#endif
