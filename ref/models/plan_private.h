/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/plan.h"

/* Private functions of anyrank/plan.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Creates the default plan of an architecture: embedding and LM head divided by vocabulary; q, k, v and the MLP's
 *  first layer colwise; the attention's output and the MLP's second layer rowwise; norms replicated. Errors:
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_plan_default(ar_plan *p, ar_arch arch);
/** Splits every MLP in this order; the default plan stays without rules. Errors as ar_plan_add. */
AR_NODISCARD ar_status ari_plan_add_mlp_order(ar_plan *p, ar_arch arch, ar_mlp_order order);
/** Compute a plan's split of a block, and of the parts outside of blocks. sequence: between the branches values are
 *  sharded by tokens (sequence parallelism), otherwise replicated. Errors: AR_ERR_UNSUPPORTED, which names the module,
 *  its style or placement and the possible ones. */
AR_NODISCARD ar_status ari_plan_block(const ar_plan *p, const ar_config *c, size_t layer, bool sequence,
                                      ar_block_split *split);
/** Derives a plan's split of everything outside of the blocks. sequence: values between the branches are sharded by
 *  tokens (sequence parallelism), otherwise replicated. Errors: AR_ERR_UNSUPPORTED, naming the module, its style or
 *  placement and the possible ones. */
AR_NODISCARD ar_status ari_plan_outer(const ar_plan *p, const ar_config *c, bool sequence, ar_outer_split *split);
/** Returns true if some rule of the plan has the sequence-parallel style. */
bool ari_plan_sequence(const ar_plan *p);
/** Returns true if values between the branches are sharded by tokens, that is, with sequence parallelism. On a single
 *  rank, which always has all tokens, the plan's declarations decide. */
bool ari_plan_by_tokens(const ar_plan *p, int tp, bool sp);
/** Checks that this version supports the plan's split of a model, with or without sequence parallelism. Errors:
 *  AR_ERR_NOT_FOUND (a glob matches no module), AR_ERR_UNSUPPORTED (names the module, its style or placement and the
 *  possible ones), AR_ERR_ARG (norms in sequence style without sequence parallelism). */
AR_NODISCARD ar_status ari_plan_check(const ar_plan *p, const ar_config *c, bool sequence);
/** Checks on several ranks that every declared placement is the actual one, so that results equal those of one rank;
 *  the plan is one that ari_plan_check accepts. Errors: AR_ERR_UNSUPPORTED (names rule, module and both placements). */
AR_NODISCARD ar_status ari_plan_check_declared(const ar_plan *p, const ar_config *c, bool sequence);

AR_END_DECLS
