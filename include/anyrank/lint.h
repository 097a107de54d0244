/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_LINT_H
#define ANYRANK_LINT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "anyrank/status.h"

AR_BEGIN_DECLS

/* The lint: a static check of a parallel layout. Every value of a training step gets a placement (placement.h) along
 * each axis of the device mesh as its type, and every operation a typing rule; planner.md lists them. Nothing is
 * computed. Sources: spmd_types (github.com/meta-pytorch/spmd_types, DESIGN.md), whose replicate, invariant, varying
 * and partial are R, I, S(d) and P(sum) here; JAX's varying manual axes (jax.shard_map, check_vma). */

/* The rules, X(name, how a step violates it). */
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
    X(unmatched_message, "a stage of a pipeline sends what no other receives, or waits for what no other sends")      \
    X(wrong_stage, "an operation is on a stage of the pipeline that does not have its layer")
/* clang-format on */
typedef enum ar_lint_rule {
#define AR_LINT_RULE_ENUM(name, text) AR_LINT_##name,
    AR_LINT_RULE_TABLE(AR_LINT_RULE_ENUM)
#undef AR_LINT_RULE_ENUM
        AR_LINT_RULES
} ar_lint_rule;

enum { AR_LINT_MODULE = 240, AR_LINT_PLACED = 48, AR_LINT_REPAIR = 200 }; /* bytes of the texts below, with final 0 */
/** A violation of a rule. */
typedef struct ar_lint_finding {
    ar_lint_rule rule;
    char module[AR_LINT_MODULE];  /* "model.layers.*.mlp.down_proj.bias", * for all layers; "": no particular module */
    const char *operation, *pass; /* such as "product", "backward". Static storage */
    size_t first_layer, layers;   /* first layer with the violation; number of them; 0: outside of the blocks */
    const char *axis;             /* mesh axis "tp", "dp", "KV copies", ..; "": all ranks. Static storage */
    char has[AR_LINT_PLACED];     /* the value's placement, "P(sum)", or its shape; "V": different on every rank without
                                     being a shard or partial sum */
    char needs[AR_LINT_PLACED];   /* the placement or shape that the operation needs */
    char repair[AR_LINT_REPAIR];  /* suggested repair, "all-reduce over tp" */
} ar_lint_finding;

/** Result of the lint. */
typedef struct ar_lint_report {
    size_t operations, values; /* checked: of one rank, or of one per pipeline stage; equal micro-batches once */
    size_t count;              /* number of findings */
    ar_lint_finding *finding;  /* [count], in execution order */
} ar_lint_report;

AR_END_DECLS
#endif
