/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_PLAN_WALK_H
#define ANYRANK_PLAN_WALK_H

#include "anyrank/plan.h"

AR_BEGIN_DECLS

/* A plan for a module of one's own: its layers are made in the order in which values pass through them, and each is
 * split as the plan says of its name. What a rank holds of the value that arrives at the next layer is `at`: a layer
 * that needs another placement redistributes it first. modules.md has an example.
 *
 * Of a rule, the input's declaration has to be what arrives, and the output's is what the layer leaves, redistributed
 * where it makes another; without one it leaves what it makes:
 *
 *    layer    style       takes                         makes
 *    linear   colwise     R, or S(1) as it arrives      S(-1)
 *             rowwise     S(-1)                         R; S(1) or P(sum) where that is declared
 *             replicate   R                             R
 *    norm     replicate   R                             R
 *             sequence    S(1)                          S(1)
 *    others   (no rule)   what arrives                  the same
 *             replicate   R                             R
 *             sequence    S(1)                          S(1)
 *
 * The others work element by element: activations and dropout. S(-1) are a rank's features, S(1) its positions of
 * values [samples, positions, features], R values that every rank has. A P(sum) that is declared is never added up:
 * the ranks continue with their terms as if each were the sum, which is wrong on more than one of them, and
 * ar_check_module proves it. All walks of a case make the same calls on every rank. */
typedef struct ar_plan_walk {
    const ar_plan *plan; /* borrowed; NULL, or without rules: every layer is replicated */
    ar_placement at;     /* zero: whole on every rank. A value with two uses is walked from the same `at` twice */
    bool matched[AR_PLAN_RULES]; /* rules that match a layer so far */
    char layers[192];            /* names of the layers so far, for messages */
} ar_plan_walk;

/** A linear layer, y = x W^T + b, with parameters name.weight [out, in] and name.bias [out]. Gives; ar_module_destroy.
 *  Errors: AR_ERR_UNSUPPORTED (its style or a declaration; names the rule, the layer and what would fit; a context with
 *  sequence parallelism, which is a plan's to say here), AR_ERR_ARG (w->at is no placement
 *  of a value between layers), and those of ar_column_linear_create. On error w->at is as before. Of forward: also
 *  AR_ERR_SHAPE (positions of a value that has none). */
AR_NODISCARD ar_status ar_plan_linear_create(ar_module **out, ar_ctx *ctx, ar_plan_walk *w, const char *name,
                                             size_t in_features, size_t out_features, bool bias);
/** A norm, as ar_norm_create has it. Errors: as above. */
AR_NODISCARD ar_status ar_plan_norm_create(ar_module **out, ar_ctx *ctx, ar_plan_walk *w, const char *name,
                                           ar_norm_kind kind, size_t h, double eps);
/** Element-wise modules, as of ar_activation_create and ari_dropout_create, on the part that a rank holds. Errors: as
 *  above. */
AR_NODISCARD ar_status ar_plan_activation_create(ar_module **out, ar_ctx *ctx, ar_plan_walk *w, const char *name,
                                                 ar_activation act);
/** A module that places the value otherwise: w->at becomes `target`, one of R, S(-1) and S(1). Where `target` is what is there
 *  it returns its input. Errors: AR_ERR_UNSUPPORTED (another placement), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_plan_redistribute_create(ar_module **out, ar_ctx *ctx, ar_plan_walk *w, const char *name,
                                                   ar_placement target);
#define AR_PLAN_OUTPUT (-1)
/** What prepares a value for a module of one's own, or its output for what comes next, as a plan's `prepare` rule of the
 *  module's name says: a redistribution from what is declared to what is wanted, which w->at becomes; the value itself
 *  where no rule names it. Of an argument: its position from 0, and its keyword or NULL; of the output: AR_PLAN_OUTPUT.
 *  What is declared is trusted, as PyTorch's PrepareModuleInput does. Where it is wrong, a context that checks
 *  placements ends the pass, ar_inspect_module has a finding, and ar_check_module a difference. Errors: AR_ERR_UNSUPPORTED (other
 *  placements than R, S(-1), S(1), and from P(sum)), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_plan_prepare_create(ar_module **out, ar_ctx *ctx, ar_plan_walk *w, const char *name,
                                              int position, const char *keyword);
/** After the last layer: checks that every rule of the plan has matched one. module: whose layers they are, for the
 *  message. Errors: AR_ERR_NOT_FOUND (names the rule, and the layers that there are). */
AR_NODISCARD ar_status ar_plan_end(const ar_plan_walk *w, const char *module);

AR_END_DECLS
#endif
