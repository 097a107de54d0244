/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_PLAN_NAMES_H
#define ARI_PLAN_NAMES_H

#include "plan/flow.h"

/* Names in a model's own words of what sim/plan lists by role and layer: it shares no table with what it checks. */

/** The tag by which a trace names the collective. */
void ari_operation_tag(char *out, size_t cap, const ar_config *c, const ari_operation *op, const ari_op_call *call);

/** The subject of a row: "model.layers.*.self_attn.q_proj, k_proj, v_proj", "model.layers.0-3.mlp", "model.norm.weight
 *  and 7 more" for a bucket. "" if it concerns no part of the model. */
void ari_flow_title(char *out, size_t cap, const ar_config *c, const ari_flow_row *row);

#endif
