/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/layers.h"

/* Functions of anyrank/layers.h for the library, the command and the tests alone. */

AR_BEGIN_DECLS

/** A router and experts in an MLP's place. With z = x*Wr^T, p = softmax(z) and K the k experts with the largest z, the
 *  lower number where two are equal:
 *
 *    y = sum over j in K, ascending, of w_j*expert_j(x)      w_j = p_j, or p_j / sum over K of p
 *      + sigmoid(x*v^T)*shared(x)
 *
 *  each expert a gated MLP (Shazeer et al. 2017, arXiv:1701.06538; Jiang et al. 2024, arXiv:2401.04088).
 *  The router's own losses are those of the context's options (ar_router_losses). Of an expert the unit of a gradient's
 *  sum is a sample's tokens that go to it. X, Y [.., hidden] as the split has
 *  them. Parameters: name.gate.weight [E, hidden], name.experts.N.*, name.shared_expert.*, name.shared_expert_gate.
 *  With scores, a = sigmoid(z), K by a + bias (ar_device_ops.route) and w_j = scale*a_j / (sum over K of a +
 *  1e-20), or scale*a_j; the bias, name.gate.e_score_correction_bias [E], has no gradient. Errors of its passes: also AR_ERR_DATA (a logit is not a number). */
AR_NODISCARD ar_status ari_experts_create(ar_module **gives, ar_ctx *ctx, const char *name,
                                          const ar_experts_options *o);

AR_END_DECLS
