/* SPDX-License-Identifier: Apache-2.0 */
/* Inside of plans: rules of modules, by path (plan.c), read from a file (plan_file.c), made into splits (plan_split.c).
 */
#ifndef ARI_MODELS_PLAN_H
#define ARI_MODELS_PLAN_H

#include <jansson.h>

#include "anyrank/plan.h"
#include "ref/models/family.h"

/** Adds a rule at the end, without the default ones before it. Errors: AR_ERR_ARG (full), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_plan_put(ar_plan *p, const ar_plan_rule *rule);

/** What messages call it. */
const char *ari_plan_file(const ar_plan *p);
/** Whether it is the architecture's own, without rules. */
bool ari_plan_is_default(const ar_plan *p);

/** Its rules as the array that a file has, in which aliases are globs and a tp_plan's names are what they mean. Gives;
 *  json_decref. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_plan_rules_json(json_t **gives, const ar_plan *p);
/** The SHA-256 of that array's compact text: of what the plan says, whatever its file looks like. Errors:
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_plan_hash(char hex[65], const ar_plan *p);

bool ari_plan_in_mlp(ari_role role);

/** Whether a rule's glob matches a path as it is. */
bool ari_glob_matches(const char *glob, const char *path);
/** Whether the rule's glob matches a module's path, with or without the base model's prefix. */
bool ari_plan_matches(const ar_plan_rule *rule, ar_arch arch, const char *path);
/** The last rule that matches the path, of those that prepare or of the others; NULL: none. Borrows. */
const ar_plan_rule *ari_plan_rule_of(const ar_plan *p, ar_arch arch, const char *path, bool prepares);
/** A rule's style in the words of the part that it is for: rowwise of the embedding is vocab. */
ar_style ari_style_in(ari_role role, ar_style s);
/** The style of a part, in the words of what it is: rowwise of the embedding is vocab. */
ar_style ari_plan_style_of(const ar_plan *p, ar_arch arch, ari_role role, const char *path);

#endif
