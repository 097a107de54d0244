/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of ari_lint: types and their rules (lint_rules.c), the walk that gives every value its type (lint_walk.c),
 * operation by operation (lint_pass.c, lint_step.c), and what it finds (lint.c). */
#pragma once

#include "anyrank/lint.h"
#include "verify/lint/flow.h"

/* --- types -------------------------------------------------------------------------------------------------------- */

/* Along what a value has a type: the axes of the mesh, and the neighbouring ranks that hold copies of a KV head. Those
 * along which experts are apart (ari_expert_axes) are also the ranks that share experts out, and those with the same
 * ones: along these two values of experts have a type, and all others are whole. No axis at all is for reports alone.
 */
enum { ARI_LINT_COPIES = ARI_PLACED_AXES, ARI_LINT_EP, ARI_LINT_EDP, ARI_LINT_AXES, ARI_LINT_NO_AXIS = ARI_LINT_AXES };
/* Dimension of what is cut by expert: V. */
enum { ARI_LINT_BY_EXPERT = AR_MAX_DIMS };
typedef struct ari_lint_type {
    ar_placement at[ARI_LINT_AXES];
} ari_lint_type;

/* A rule's verdict along one axis: the placement that it makes, or the broken rule with the placement found and the
 * right one. */
typedef struct ari_lint_verdict {
    bool broken;
    ar_lint_rule rule;
    ar_placement makes, has, needs;
} ari_lint_verdict;

bool ari_lint_whole(ar_placement p);
bool ari_lint_partial(ar_placement p);
/** True if the ranks have the same numbers: R and I differ in the gradient alone. */
bool ari_lint_same(ar_placement a, ar_placement b);
/** The broken rule of a value that is `has` where `needs` is needed. */
ari_lint_verdict ari_lint_mismatch(ar_placement has, ar_placement needs);

/* Activations are [b, s, features], matrices [out, in]. */
/** Y = X W^T. */
ari_lint_verdict ari_lint_product(ar_placement x, ar_placement w);
/** dX = dY W. */
ari_lint_verdict ari_lint_product_dx(ar_placement dy, ar_placement w);
/** dW = dY^T X, summed over samples and tokens. */
ari_lint_verdict ari_lint_product_dw(ar_placement x, ar_placement dy);
/** The gradient of what was added to, or multiplied with, every token's features: `features` is the dimension of the
 *  parameter that they are. */
ari_lint_verdict ari_lint_sum_over_tokens(ar_placement dy, int features);
ari_lint_verdict ari_lint_add(ar_placement a, ar_placement b);
/** Adds a parameter, whose dimension `features` is the activation's last one, to every token. */
ari_lint_verdict ari_lint_add_parameter(ar_placement x, ar_placement w, int features);
/** A function of each element alone. */
ari_lint_verdict ari_lint_elementwise(ar_placement x, bool linear);
/** A function of all features of a token (norm). */
ari_lint_verdict ari_lint_along(ar_placement x, int dim, bool linear);
/** Attention of queries to keys, or to values: a query sees those of all tokens. */
ari_lint_verdict ari_lint_attend(ar_placement q, ar_placement k);
/** Tokens to the rows of their experts, or back: by weights [b, s, E], of which each rank has those of its tokens. */
ari_lint_verdict ari_lint_by_routes(ar_placement x, ar_placement routes);
/** Rows of a table [ids, features] by id, and the table's gradient. */
ari_lint_verdict ari_lint_lookup(ar_placement ids, ar_placement table);
ari_lint_verdict ari_lint_lookup_gradient(ar_placement dy, ar_placement table);

/* --- findings ----------------------------------------------------------------------------------------------------- */

/* A finding, the operation it is about (of the first of its layers), and the layers. */
typedef struct ari_lint_found {
    ari_flow_row row;
    ar_lint_finding is;
    int axis;
} ari_lint_found;

typedef struct ari_lint_findings {
    ari_lint_found *found;
    size_t count, capacity;
    ar_status st; /* of the first that could not be kept */
} ari_lint_findings;

/** What puts a broken rule right along an axis: "all-reduce over tp". */
void ari_lint_repair_text(char *out, size_t cap, const ari_lint_verdict *v, int along);
/** Adds one; the same of a neighbouring layer, or of another micro-batch, is one with it. `repair` may be NULL: then
 *  the rule's own. */
void ari_lint_find(ari_lint_findings *f, const ari_operation *op, int axis, ar_lint_rule rule, const char *has,
                   const char *needs, const char *repair);
void ari_lint_find_placed(ari_lint_findings *f, const ari_operation *op, int axis, const ari_lint_verdict *v);
/* The groups along those that are no axes of the mesh. */
extern const ari_over ari_lint_groups[ARI_LINT_AXES];
/** "tp". Static storage. */
const char *ari_lint_axis_name(int axis);

/* --- the walk ----------------------------------------------------------------------------------------------------- */

/* A value of a pass, by its number: its type as the operation that made it has stated it. */
typedef struct ari_lint_value {
    ari_lint_type is;
    unsigned parts;  /* that have been made (ari_op_parts) */
    bool recomputed; /* once more, in the backward pass */
    size_t stage;    /* of the pipeline, that has it */
    bool terms;      /* of a sum, which the product `maker` has made and nothing but linear operations has taken yet */
} ari_lint_value;

/* A parameter: where it is used, and what came back. */
typedef struct ari_lint_param {
    bool known;
    size_t layer;
    ari_role role;
    bool bias;
    int uses, gradients; /* in the pass */
    size_t broadcast[2]; /* of so many, equal over dp since the start: on the first rank of a pipeline, on another */
    bool seen[ARI_LINT_AXES]; /* its gradient has terms along the axis, and is counted */
    ari_lint_type is;         /* where it was met first */
} ari_lint_param;

/* Types of values that outlive the passes. */
typedef struct ari_lint_step {
    ari_lint_type targets, loss, weights;
    ar_placement summed;           /* gradients over dp, after their sums */
    size_t partial[ARI_LINT_AXES]; /* parameters whose gradients are terms along the axis, each rank's */
    size_t reduced[ARI_LINT_AXES]; /* those that buckets sum */
    size_t gathers;                /* parameters whose shares are gathered */
} ari_lint_step;

typedef struct ari_lint_state {
    const ari_step_case *c;
    ari_lint_findings *f;
    ar_lint_report *counts;
    size_t size[ARI_LINT_AXES]; /* ranks along it; along one of 1 nothing has a type */
    bool head;                  /* the loss is divided by a number of targets */
    bool apart;                 /* experts have copies on other ranks than what else there is */
    ari_operation_pass pass;    /* of the operation before */
    size_t micro;
    ari_lint_value *value; /* [ari_operations_values], of the micro-batch */
    ari_operation maker;
    ari_lint_param *param; /* [places], by layer and role */
    size_t params;         /* that are known, and that several ranks have */
    ari_lint_step step;
} ari_lint_state;

/** Before the first operation. Gives what ari_lint_fini frees, also after an error. Errors: AR_ERR_OVERFLOW,
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_lint_begin(ari_lint_state *l, ari_lint_findings *f, ar_lint_report *counts,
                                      const ari_step_case *c);
/** Types an operation; a visitor, whose user is the state. Errors: AR_ERR_MEMORY. */
ar_status ari_lint_visit(void *user, const ari_operation *op);
/** After the last one: what must be so by then. */
AR_NODISCARD ar_status ari_lint_end(ari_lint_state *l);
void ari_lint_fini(ari_lint_state *l);

/** Places a value along all axes over which gradients are summed. */
void ari_lint_over_dp(ari_lint_type *v, ar_placement p);
/** The first of those axes that has more than one rank; ARI_LINT_NO_AXIS: none. */
int ari_lint_dp_axis(const ari_lint_state *l);
/** The type that the list states for a value. */
ari_lint_type ari_lint_stated(const ari_op_value *v);
/** The value that an operation takes or makes as `v` of the list, of which `has` is known: what the list says where
 *  that is the same, else a finding. */
ari_lint_type ari_lint_agree(ari_lint_state *l, const ari_operation *op, const ari_op_value *v, ari_lint_type has);
/** Keeps a verdict of a rule: what it makes, and a finding where it is broken. */
void ari_lint_judge(ari_lint_state *l, const ari_operation *op, int axis, ari_lint_type *out, ari_lint_verdict v);
/** Applies the operation's collectives to n values that are reduced one after the other; tags, unless NULL, say which
 *  call is which value's. `to`: what comes out according to the list. */
void ari_lint_collectives(ari_lint_state *l, const ari_operation *op, ari_lint_type *v, int n, const char *const *tags,
                          const ari_op_value *to);
/** The same, of which the list says `end`. */
void ari_lint_collectives_to(ari_lint_state *l, const ari_operation *op, ari_lint_type *v, int n,
                             const char *const *tags, const ari_lint_type *end);
/** The axis along which a parameter's copies are; ARI_LINT_NO_AXIS: it has none. */
int ari_lint_axis_of_copies(const ari_lint_state *l, const ari_op_value *v);
/** Parameters of a role in a layer: as many as the rank's experts, or one. */
size_t ari_lint_like(const ari_lint_state *l, ari_role role);
/** The parameter, with its first placement kept; of an expert's role all of them. */
ari_lint_param *ari_lint_parameter(ari_lint_state *l, size_t layer, const ari_op_value *v);

/** The value of that number in the micro-batch that the walk is in; of number 0 one that is never made. */
ari_lint_value *ari_lint_value_of(const ari_lint_state *l, size_t id);
/** Input i as it has been made; where it has not, a finding, and what the list says. */
ari_lint_type ari_lint_input(ari_lint_state *l, const ari_operation *op, int i);
/** Makes output i, of which the rules say that it is `is`. */
void ari_lint_output(ari_lint_state *l, const ari_operation *op, int i, ari_lint_type is);

/** Types one operation of a pass (lint_pass.c), and one outside of the passes (lint_step.c). */
void ari_lint_pass_operation(ari_lint_state *l, const ari_operation *op);
void ari_lint_step_operation(ari_lint_state *l, const ari_operation *op);
/** Checks at the end of a micro-batch's two passes, and of the step. */
void ari_lint_end_of_passes(ari_lint_state *l);
void ari_lint_end_of_step(ari_lint_state *l);
