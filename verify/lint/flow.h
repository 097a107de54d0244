/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "sim/plan/ops.h"

/* The operations of one rank as people read them: each once, with the range of the layers that do the same. */
typedef struct ari_flow_row {
    ari_operation op; /* of the first of them, and of the rank's first micro-batch */
    size_t layers;    /* that do the same, one after the other; 1 outside of the blocks */
} ari_flow_row;

/* Totals of a pass, every layer and micro-batch counted. */
typedef struct ari_flow_total {
    size_t calls;
    double bytes; /* that the rank sends; a ring's share of its group's */
    double multiply_adds;
} ari_flow_total;

typedef struct ari_flow {
    ari_flow_row *row;
    size_t count, capacity;
    size_t micro_batches; /* that the rank goes through: those with samples */
    ari_flow_total total[ARI_PASS_STEP + 1];
} ari_flow;

typedef struct ari_flow_options {
    int rank;         /* whose, of the world */
    bool passes_only; /* forward passes alone: neither the backward passes nor what is outside of both */
    bool each_layer;  /* a row for every layer */
} ari_flow_options;

/** Gives the rows of a step; ari_flow_fini in every case. The case is a legal one (ar_run_check). Errors: those of
 *  ari_operations, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_flow_init(ari_flow *f, const ari_step_case *c, const ari_flow_options *o);
void ari_flow_fini(ari_flow *f);

/** The bytes that one rank of the group sends in a call. */
double ari_call_sent(const ari_op_call *call);

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
