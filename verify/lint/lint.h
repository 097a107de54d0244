/* SPDX-License-Identifier: Apache-2.0 */
/* Internal interface of ari_lint: types and their rules (lint_rules.c), the walk through a record that derives each
 * value's type (lint_record.c), the rules of each operation (lint_kinds.c), and findings (lint_find.c). */
#pragma once

#include "anyrank/lint.h"
#include "anyrank/run.h"
#include "ref/core/axis.h"
#include "ref/record/ledger.h"

/* --- types -------------------------------------------------------------------------------------------------------- */

/* Axes along which a value has a type: those of the mesh, and the adjacent ranks that hold copies of a KV head. The
 * axes of experts (ari_expert_axes) are the ranks that shard experts and the ranks with the same experts: along these
 * two only values of experts have a type, and all others are replicated. ARI_LINT_NO_AXIS is only for reports. */
enum { ARI_LINT_COPIES = ARI_PLACED_AXES, ARI_LINT_EP, ARI_LINT_EDP, ARI_LINT_AXES, ARI_LINT_NO_AXIS = ARI_LINT_AXES };
/* Dimension of a value sharded by expert: V. */
enum { ARI_LINT_BY_EXPERT = AR_MAX_DIMS };
typedef struct ari_lint_type {
    ar_placement placement[ARI_LINT_AXES];
} ari_lint_type;

/* Verdict of a rule along one axis: the resulting placement, or the violated rule with the actual and the required
 * placement. */
typedef struct ari_lint_verdict {
    bool broken;
    ar_lint_rule rule;
    ar_placement output, actual, required;
} ari_lint_verdict;

bool ari_lint_replicated(ar_placement p);
bool ari_lint_partial(ar_placement p);
bool ari_lint_by_expert(ar_placement p);
/** Returns true if ranks have equal numbers under both placements: R and I differ only in the gradient. */
bool ari_lint_same(ar_placement a, ar_placement b);
/** Returns the violated rule of a value that is `actual` where `required` is needed. */
ari_lint_verdict ari_lint_mismatch(ar_placement actual, ar_placement required);

/* Activations are [b, s, features], matrices [out, in]. */
/** Y = X W^T. */
ari_lint_verdict ari_lint_product(ar_placement x, ar_placement w);
/** dX = dY W. */
ari_lint_verdict ari_lint_product_dx(ar_placement dy, ar_placement w);
/** dW = dY^T X, summed over samples and tokens. */
ari_lint_verdict ari_lint_product_dw(ar_placement x, ar_placement dy);
/** Returns the verdict on a gradient summed over tokens, of what was added to or multiplied with every token's
 *  features. `features`: the parameter's dimension of features. */
ari_lint_verdict ari_lint_sum_over_tokens(ar_placement dy, int features);
ari_lint_verdict ari_lint_add(ar_placement a, ar_placement b);
/** Returns the verdict for adding a parameter, whose dimension `features` is the activation's last one, to every
 *  token. */
ari_lint_verdict ari_lint_add_parameter(ar_placement x, ar_placement w, int features);
/** Returns the verdict on a function of each element. */
ari_lint_verdict ari_lint_elementwise(ar_placement x, bool linear);
/** A function of all features of a token (norm). */
ari_lint_verdict ari_lint_along(ar_placement x, int dim, bool linear);
/** Returns the verdict on attention of queries to keys, or to values: a query sees those of all tokens. */
ari_lint_verdict ari_lint_attend(ar_placement q, ar_placement k);
/** Returns the verdict on moving tokens to the rows of their experts or back by weights [b, s, E]. Each rank has the
 *  weights of its tokens. */
ari_lint_verdict ari_lint_by_routes(ar_placement x, ar_placement routes);
/** Rows of a table [ids, features] by id, and the table's gradient. */
ari_lint_verdict ari_lint_lookup(ar_placement ids, ar_placement table);
ari_lint_verdict ari_lint_lookup_gradient(ar_placement dy, ar_placement table);

/* --- records ------------------------------------------------------------------------------------------------------ */

/* A layout in the form that lint needs. */
typedef struct ari_lint_layout {
    size_t size[ARI_LINT_AXES]; /* number of ranks along each axis; axes of size 1 are not checked */
    ari_axes expert_axes;       /* axes along which ranks hold different experts */
    bool separate_experts;      /* true if experts have replicas on other ranks than the remaining parameters */
    bool zero;                  /* true if ranks that replicate a parameter each update a shard of it */
    bool replicates;            /* true if several ranks have each shard */
    bool complete;              /* true if every operation is recorded: for a bundled model, but not for a user's
                                   module */
} ari_lint_layout;
ari_lint_layout ari_lint_layout_of(const ar_parallel *p);
/** Records a step of the first rank of each stage. record: [stages], zeroed before and released by ari_ledger_fini,
 *  also after an error. The run becomes a simpler one with the same placements. Errors: those of ari_cluster_dry,
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_lint_record(ari_ledger *record, ar_run *run, const ar_config *config);

/* Placements of an operation's inputs and outputs. */
typedef struct ari_lint_placed {
    bool takes_known[ARI_LEDGER_VALUES], makes_known[ARI_LEDGER_VALUES];
    ari_lint_type input_types[ARI_LEDGER_VALUES], output_types[ARI_LEDGER_VALUES];
} ari_lint_placed;
/** Adds the findings in the records of each stage's first rank, in order of the stages. placed: for each record an
 *  array with an element per operation; NULL: not wanted. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_lint_records(ar_lint_report *r, ari_lint_placed *const *placed, const ari_ledger *records,
                                        size_t n, const ari_lint_layout *layout);

/** The placement of a parameter along each axis. */
void ari_lint_place_param(ari_lint_type *type, const ari_ledger_param *p, const ari_lint_layout *layout);
/** Returns the number of a module's layer; SIZE_MAX: it is in no layer. */
size_t ari_lint_layer(const char *name);

/* --- repairs ------------------------------------------------------------------------------------------------------ */

/** Writes what repairs a violated rule along an axis, such as "all-reduce over tp". */
void ari_lint_repair_text(char *out, size_t cap, const ari_lint_verdict *v, int along);
/* The groups along axes that are no axes of the mesh. */
extern const ari_over ari_lint_groups[ARI_LINT_AXES];
/** "tp". Static storage. */
const char *ari_lint_axis_name(int axis);
