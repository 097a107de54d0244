/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/layers.h"

/* Private functions of anyrank/layers.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Creates a redistribution as a module: y = x with another placement over the tensor-parallel group, and backward the
 *  transpose. It taps nothing, because the full value is unchanged. Dimensions count those of x: S(-1) features, S(-2)
 *  positions. Release it with ar_module_destroy. Errors: AR_ERR_UNSUPPORTED (a P(max)), AR_ERR_ARG (the name is too
 *  long), AR_ERR_MEMORY; forward and backward those of the operators. */
AR_NODISCARD ar_status ari_redistribution_create(ar_module **out, ar_ctx *ctx, const char *name,
                                                 ar_placement from_placement, ar_placement to_placement);
/** "replicate", "colwise", "rowwise", "vocab", "hidden", "sequence", "prepare"; "?". Static storage. */
const char *ari_style_name(ar_style s);
/** Returns a branch's split for layers of these styles between values placed as `stream`. Between the layers a value is
 *  sharded by features if the first layer produces shards and the second accepts them, otherwise it is replicated. */
ar_branch_split ari_branch_of(ar_style first_style, ar_style second, ar_placement stream);
/** Returns the split of an expert branch, whose input and output are replicated so that every rank routes all tokens.
 *  cut: gate and up are colwise and down is rowwise, otherwise all are replicated. */
ar_branch_split ari_experts_split(bool cut, ar_placement stream);
/** Creates y = x + branch(x), both of one shape; placement: the part of it that a rank has. owns_branch: the branch is
 *  destroyed with it, otherwise borrowed; on error the caller keeps it. Taps: name:fwd, name:bwd. */
AR_NODISCARD ar_status ari_residual_create(ar_module **out, const char *name, ar_module *branch, ar_held placement,
                                           bool owns_branch);
/** Multiplies rows by a factor, rounded to fp32, before they are tapped: Gemma's square root of the hidden size.
 *  Without learned positions. */
void ari_embedding_scale(ar_module *embedding, double factor);
/** Uses of an id add nothing to the gradient of its row, as with padding_idx of torch.nn.Embedding. */
void ari_embedding_pad(ar_module *embedding, size_t id);
/** Returns the embedding's parameter; borrowed. */
ar_param *ari_embedding_token(ar_module *embedding);

AR_END_DECLS
