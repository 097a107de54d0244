/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_PLAN_WALK_H
#define ANYRANK_PLAN_WALK_H

#include "anyrank/plan.h"

AR_BEGIN_DECLS

/* Applies a parallel plan to a user-written module. The module creates its layers in the order in which an activation
 * passes through them, and each layer is sharded by the rule for its name. The walk tracks the activation's
 * `placement`; a layer that needs another placement redistributes its input first. modules.md has an example.
 *
 * A rule's declared input must be the activation's placement; its declared output is the placement that the layer's
 * output is redistributed to. Without declarations:
 *
 *    layer    style       needs                         yields
 *    linear   colwise     R, or S(1) as it arrives      S(-1)
 *             rowwise     S(-1)                         R; S(1) or P(sum) where that is declared
 *             replicate   R                             R
 *    norm     replicate   R                             R
 *             sequence    S(1)                          S(1)
 *    others   (no rule)   any placement                 the same
 *             replicate   R                             R
 *             sequence    S(1)                          S(1)
 *
 * Others are element-wise layers: activation functions and dropout. For activations [samples, positions, features]
 * S(-1) means sharded by features, S(1) by positions, R replicated. An output declared as P(sum) is never reduced: each
 * rank continues with its partial sum, which is wrong with more than one rank, as ar_check_module shows. Every rank
 * must make the same calls. */
typedef struct ar_plan_walk {
    const ar_plan *plan;         /* borrowed; NULL or without rules: every layer is replicated */
    ar_placement placement;      /* placement of the activation; initially {0}, R. If an activation feeds two layers,
                                    reset `placement` before creating the second one */
    bool matched[AR_PLAN_RULES]; /* rules that matched a layer */
    char layers[192];            /* names of the layers created, for messages */
} ar_plan_walk;

/** Creates a linear layer y = x W^T + b with parameters name.weight [out, in] and name.bias [out]; the caller releases
 *  *out with ar_module_destroy. Errors: AR_ERR_UNSUPPORTED (a style or declaration that does not fit, the message names
 *  rule, layer and what would fit; a context with sequence parallelism, which the plan must express instead),
 *  AR_ERR_ARG (walk->placement is invalid), those of ar_column_linear_create. On error walk->placement is unchanged.
 *  Errors of forward: also AR_ERR_SHAPE (S(1) of an activation without positions). */
AR_NODISCARD ar_status ar_plan_linear_create(ar_module **out, ar_ctx *ctx, ar_plan_walk *walk, const char *name,
                                             size_t in_features, size_t out_features, bool bias);
/** Creates a norm, as ar_norm_create. Errors: as ar_plan_linear_create. */
AR_NODISCARD ar_status ar_plan_norm_create(ar_module **out, ar_ctx *ctx, ar_plan_walk *walk, const char *name,
                                           ar_norm_kind kind, size_t h, double eps);
/** Creates an element-wise activation function, as ar_activation_create, on the part of the activation that a rank
 *  holds. Errors: as ar_plan_linear_create. */
AR_NODISCARD ar_status ar_plan_activation_create(ar_module **out, ar_ctx *ctx, ar_plan_walk *walk, const char *name,
                                                 ar_activation act);
/** Creates dropout, as ar_dropout_create, on the part of the activation that a rank holds. Errors: as
 *  ar_plan_linear_create. */
AR_NODISCARD ar_status ar_plan_dropout_create(ar_module **out, ar_ctx *ctx, ar_plan_walk *walk, const char *name,
                                              size_t positions, size_t width);
/** Creates a module that redistributes the activation to `target`, one of R, S(-1) and S(1), and sets walk->placement
 *  to it. If the activation is already placed so, the module returns its input. Errors: AR_ERR_UNSUPPORTED (another
 *  placement), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_plan_redistribute_create(ar_module **out, ar_ctx *ctx, ar_plan_walk *walk, const char *name,
                                                   ar_placement target);
#define AR_PLAN_OUTPUT (-1) /* position of ar_plan_prepare_create: the module's output */
/** Creates a module that prepares an input or the output of the user's module `name` as the plan's rule with
 *  AR_STYLE_PREPARE for it says: it redistributes from the declared to the wanted placement and sets walk->placement to
 *  the latter. Without such a rule it returns its input. position: of the argument, from 0, with its keyword or NULL;
 *  AR_PLAN_OUTPUT: the output. The declared placement is trusted, as by PyTorch's PrepareModuleInput; if it is wrong, a
 *  context that checks placements ends the pass, ar_inspect_module reports a finding and ar_check_module a difference.
 *  Errors: AR_ERR_UNSUPPORTED (placements other than R, S(-1), S(1), and P(sum) as declared one), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_plan_prepare_create(ar_module **out, ar_ctx *ctx, ar_plan_walk *walk, const char *name,
                                              int position, const char *keyword);
/** Ends a walk after the last layer: checks that every rule of the plan has matched a layer. module: the module's name,
 *  for the message. Errors: AR_ERR_NOT_FOUND (the message names the rule and all layers). */
AR_NODISCARD ar_status ar_plan_end(const ar_plan_walk *walk, const char *module);

AR_END_DECLS
#endif
