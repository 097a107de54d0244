/* SPDX-License-Identifier: Apache-2.0 */
/* Internals of plans: rules by module path (plan.c), and reading them from a file (plan_file.c). */
#pragma once

#include <jansson.h>

#include "anyrank/plan.h"
#include "ref/models/family.h"

/** Appends a rule without adding the default rules first. Errors: AR_ERR_ARG (full), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_plan_put(ar_plan *p, const ar_plan_rule *rule);

/** Returns the plan's file name for messages. */
const char *ari_plan_file(const ar_plan *p);
/** Returns true if the plan is the architecture's default, without further rules. */
bool ari_plan_is_default(const ar_plan *p);

/** Returns the rules as the array of a plan file, with aliases expanded to globs and a tp_plan's names replaced by
 *  their meaning. Release *out with json_decref. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_plan_rules_json(json_t **out, const ar_plan *p);
/** Computes the SHA-256 of that array's compact text, which depends on the rules and not on the file's formatting.
 *  Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_plan_hash(char hex[65], const ar_plan *p);

/** True if a rule's glob matches a literal path. */
bool ari_glob_matches(const char *glob, const char *path);
/** Checks that every rule matches a module of its kind. Errors: AR_ERR_NOT_FOUND (names the rule and a module). */
AR_NODISCARD ar_status ari_plan_check_globs(const ar_plan *p, const ar_config *c);
/** Returns the last rule that matches a part (or of the rules that prepare a module of parts) by its path or by the
 *  path that transformers has in memory (placement.h); NULL: none. layer: as in ari_role_path. Borrowed. */
const ar_plan_rule *ari_plan_rule_of(const ar_plan *p, ar_arch arch, const char *layer, ari_role role);
/** Returns a rule's style in the terms of the part: rowwise for the embedding is vocab. */
ar_style ari_style_in(ari_role role, ar_style s);
/** Returns the style that this rule gives a part, in the rule's terms. */
ar_style ari_plan_style_of(const ar_plan *p, ari_role role, const ar_plan_rule *rule);

/* Module as a plan sees it: a model's (plan_split.c) or a user's (plan_walk.c). A declared placement of an input or
 * output of a model's part is trusted if a value of its shape arrives, as PyTorch trusts it for a local tensor, and
 * refused otherwise. A value that carries its placement (use_local_output false), and every value of a user's module,
 * must have the declared placement. */
typedef struct ari_ruled {
    const ar_plan *plan;
    const ar_plan_rule *rule; /* last matching rule; NULL: none */
    ar_style style;           /* in the terms of the module */
    bool strict;              /* nothing is believed */
    bool is_user_module;      /* true for a user's module, whose checks are always strict */
    char name[AR_PLAN_GLOB];  /* path of the module */
} ari_ruled;

/** Writes a placement for a message, as users write it, in storage that lives to the end of the enclosing block. */
#define ARI_PLACED(m, p) ari_ruled_show((char[AR_PLACEMENT_TEXT]){0}, (m), (p))
const char *ari_ruled_show(char text[AR_PLACEMENT_TEXT], const ari_ruled *m, ar_placement p);
/** Sets AR_ERR_UNSUPPORTED because a value cannot have its declared placement; `fits` is a sentence with the possible
 *  one. */
AR_NODISCARD ar_status ari_ruled_wrong(const ari_ruled *m, const char *label, ar_placement declared, const char *fits,
                                       ...) AR_PRINTF(4, 5);
/** Reports that the module cannot have its style: AR_ERR_UNSUPPORTED. */
AR_NODISCARD ar_status ari_ruled_misfit(const ari_ruled *m, const char *fits);

/** A placement of [b, s, features] with its dimension counted from the end. */
ar_placement ari_ruled_from_end(ar_placement p);
/** Returns true if a value can be redistributed to p: replicated, shards of features, or shards of tokens if that is
 *  possible. */
bool ari_ruled_possible(ar_placement p, bool tokens);
/** Returns true if a value that `maker` left with placement `actual` can be used as if it had the declared
 *  placement. */
bool ari_ruled_passes(const ari_ruled *m, const ar_plan_rule *maker, ar_placement declared, ar_placement actual);
/** Sets *p to the declared placement of such a value. */
AR_NODISCARD ar_status ari_ruled_believe(const ari_ruled *m, const char *label, ar_placement declared,
                                         const ar_plan_rule *maker, ar_placement actual, ar_placement *p);
/** Sets *from_placement to the declared placement of the input if such a value arrives, or to else_from without a
 *  declaration. */
AR_NODISCARD ar_status ari_ruled_input(const ari_ruled *m, const ar_plan_rule *maker, ar_placement actual,
                                       ar_placement else_from, ar_placement *from_placement);
/** Sets *p to the declared target placement of a value. terms: it may be terms of a sum. */
AR_NODISCARD ar_status ari_ruled_target(const ari_ruled *m, const char *label, ar_placement declared, bool tokens,
                                        bool terms, ar_placement *p);
/** Sets *to_placement to the output's required placement; else_to if none is declared. */
AR_NODISCARD ar_status ari_ruled_output(const ari_ruled *m, bool tokens, bool terms, ar_placement else_to,
                                        ar_placement *to_placement);

/** Placement of the output of a linear layer of this style. */
ar_placement ari_ruled_makes(ar_style style);
/** Determines the style of a linear layer, and its input like ari_ruled_input. */
AR_NODISCARD ar_status ari_ruled_linear(const ari_ruled *m, const ar_plan_rule *maker, ar_placement actual,
                                        ar_placement else_from, ar_linear_split *split);
/** Computes *split for the first of several layers that share an input and form one GEMM, and compares the other
 *  layers' rules with it. */
AR_NODISCARD ar_status ari_ruled_first(const ari_ruled *m, const ari_ruled *first_layer, const ar_plan_rule *maker,
                                       ar_placement actual, bool tokens, ar_linear_split *split);
AR_NODISCARD ar_status ari_ruled_tokens(const ari_ruled *m, ar_embedding_split *split);
