/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_PLAN_NAMES_H
#define ARI_PLAN_NAMES_H

#include "plan/flow.h"

/* Names in a model's own words of what sim/plan lists by role and layer: it shares no table with what it checks. */

/** The path of a role's module or value. layer, expert: the texts of their numbers, of no use for other roles. */
void ari_path_of(char *out, size_t cap, const ar_config *c, const char *layer, const char *expert, ari_role role);

/** The tag by which a trace names the collective; where each expert has its own (ari_op_call.experts), that of this one
 *  of them, or of ARI_EVERY_EXPERT. */
#define ARI_EVERY_EXPERT SIZE_MAX
void ari_operation_tag(char *out, size_t cap, const ar_config *c, const ari_operation *op, const ari_op_call *call,
                       size_t expert);

/** The subject of a row: "model.layers.*.self_attn.q_proj, k_proj, v_proj", "model.layers.0-3.mlp", "model.norm.weight
 *  and 7 more" for a bucket. "" if it concerns no part of the model. */
void ari_flow_title(char *out, size_t cap, const ar_config *c, const ari_flow_row *row);

/** How ranks along an axis hold a value: "S(0)", "I"; "V": each what its experts have. Returns out. */
const char *ari_placed_along(char out[AR_PLACEMENT_TEXT], const ari_op_value *v, int axis);

#endif
