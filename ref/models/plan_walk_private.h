/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/plan_walk.h"

/* Private functions of anyrank/plan_walk.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Create an MLP and an attention like ar_mlp_create and ar_attention_create; o->split is ignored. Each linear layer is
 *  looked up by its own name. Layers that share the input need the same style and output placement, and an attention's
 *  leave R (every rank has all heads) or S(-1) (heads are sharded). They accept R, or S(1) as it arrives, and leave R
 *  if the last layer's output is not declared. Errors: those of the other functions here. */
AR_NODISCARD ar_status ari_plan_mlp_create(ar_module **result, ar_ctx *ctx, ar_plan_walk *w, const char *name,
                                           const ar_mlp_options *o);
/** Create an MLP and an attention, as ar_mlp_create and ar_attention_create do, ignoring o->split. Each linear layer is
 *  looked up by its name. Layers that share the input need the same style and output; an attention's layers output R
 *  (every rank has all heads) or S(-1) (heads are divided). The modules take R, or S(1) if the input has it, and output
 *  R if the last layer's output is not declared. Errors: as above. */
AR_NODISCARD ar_status ari_plan_attention_create(ar_module **result, ar_ctx *ctx, ar_plan_walk *w, const char *name,
                                                 const ar_attention_options *o);
/** Returns the plan's split of an embedding (vocab, hidden, replicate) for ar_embedding_create, with replicated output.
 *  Errors: AR_ERR_UNSUPPORTED. */
AR_NODISCARD ar_status ari_plan_embedding(ar_embedding_split *split, ar_plan_walk *w, const char *name);
/** Returns the plan's split of an LM head (vocab, with output R gathered, or replicate) for ar_logits_create, with
 *  replicated input. Errors: AR_ERR_UNSUPPORTED. */
AR_NODISCARD ar_status ari_plan_head(ar_linear_split *split, ar_plan_walk *w, const char *name);
/** Returns the part of the current value that a rank holds, for user-defined losses and layers; AR_HELD_UNKNOWN for a
 *  rank's positions, which losses refuse. */
ar_held ari_plan_held(const ar_plan_walk *w);

AR_END_DECLS
