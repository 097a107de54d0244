/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_LINT_H
#define ANYRANK_LINT_H

#include "anyrank/run.h"

AR_BEGIN_DECLS

/* A layout judged without a number: every value of a training step gets a type along each axis of the mesh
 * (anyrank/placement.h), and every operation a rule that says which types it takes and makes. planner.md has both.
 * Sources: spmd_types (github.com/meta-pytorch/spmd_types, DESIGN.md), whose replicate, invariant, varying and partial
 * are R, I, S(d) and P(sum) here; JAX's varying manual axes (jax.shard_map, check_vma). */

/* Rule, and what breaks it. */
/* clang-format off */
#define AR_LINT_RULE_TABLE(X)                                                                                         \
    X(missing_reduction, "terms of a sum are used as if they were the sum")                                           \
    X(missing_gather, "a part is used where the whole is needed")                                                     \
    X(missing_slice, "the whole is used where each rank's own part belongs")                                          \
    X(wrong_placement, "a value is cut otherwise than its use needs")                                                 \
    X(redundant_reduction, "a value that every rank has is summed: it becomes that many times as large")              \
    X(redundant_gather, "a value that every rank has is gathered")                                                    \
    X(wrong_reduction, "parts of different elements are added")                                                       \
    X(wrong_group, "a collective joins other ranks than those whose values belong together")                          \
    X(nonlinear_of_partial, "a function that is not linear is applied to the terms of a sum")                         \
    X(whole_added_to_partial, "every rank adds the same value to its term of a sum: it counts once for each rank")    \
    X(product_of_partials, "terms of two sums are multiplied")                                                        \
    X(unsummed_gradient, "ranks share a parameter, and their terms of its gradient are not summed")                   \
    X(missing_gradient, "a use of a parameter adds nothing to its gradient")                                          \
    X(missing_backward, "an operation has no backward pass: its gradient ends there")                                 \
    X(missing_forward, "a backward operation has none of the forward pass that it belongs to")                        \
    X(repeated_operation, "the same operation is there twice")                                                        \
    X(local_count, "the loss is divided by another number than the targets of all samples")                           \
    X(missing_broadcast, "ranks use weights that each has drawn for itself")                                          \
    X(wrong_extent, "a rank's part is not as long as the placement makes it")                                         \
    X(unmatched_message, "a stage of a pipeline sends what no other receives, or waits for what no other sends")      \
    X(wrong_stage, "an operation is on a stage of the pipeline that does not have its layer")
/* clang-format on */
typedef enum ar_lint_rule {
#define AR_LINT_RULE_ENUM(name, text) AR_LINT_##name,
    AR_LINT_RULE_TABLE(AR_LINT_RULE_ENUM)
#undef AR_LINT_RULE_ENUM
        AR_LINT_RULES
} ar_lint_rule;

enum { AR_LINT_MODULE = 240, AR_LINT_PLACED = 48, AR_LINT_REPAIR = 200 }; /* bytes, each with the final 0 */
typedef struct ar_lint_finding {
    ar_lint_rule rule;
    char module[AR_LINT_MODULE];  /* "model.layers.*.mlp.down_proj.bias": * stands for all layers; "" of no part */
    const char *operation, *pass; /* "product", "backward". Static storage */
    size_t first_layer, layers;   /* that have it; 0 layers: outside of the blocks */
    const char *axis;             /* "tp", "dp", "KV copies"; "": every rank. Static storage */
    char has[AR_LINT_PLACED];     /* "P(sum)", or a shape; "V": different on every rank, and no part of anything */
    char needs[AR_LINT_PLACED];
    char repair[AR_LINT_REPAIR]; /* "all-reduce over tp" */
} ar_lint_finding;

typedef struct ar_lint_report {
    size_t operations, values; /* that were typed: those of one rank, or of all stages of a pipeline;
                                  equal micro-batches once */
    size_t count;
    ar_lint_finding *finding; /* [count], in the order in which a step comes to them */
} ar_lint_report;

AR_END_DECLS
#endif
