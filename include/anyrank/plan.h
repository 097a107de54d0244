/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_PLAN_H
#define ANYRANK_PLAN_H

#include "anyrank/config.h"
#include "anyrank/layers.h"
#include "anyrank/placement.h"

AR_BEGIN_DECLS

/* A parallel plan: which module is split how, by name globs (fnmatch(3), '*' also matches dots), as PyTorch's
 * parallelize_module and Hugging Face's tp_plan have them. The last rule that matches a module's Hugging Face path
 * decides; a glob may leave out the prefix of the base model ("layers.*.mlp.up_proj" for "model.layers...").
 * planner.md explains plans and the file that holds one. */
#define AR_PLAN_RULES 4096  /* the most of a plan: a model of 400 layers, each module by itself */
#define AR_PLAN_GLOB 128    /* bytes of a glob or a module's path, with the final 0 */
#define AR_PLAN_ARGUMENTS 8 /* inputs of a module that a rule can name, by position or by keyword */
#define AR_PLAN_ARGUMENT 32 /* bytes of a keyword, with the final 0 */

/** An input or an output as a rule declares it, over the tensor-parallel ranks. It is trusted for any value of its
 *  shape, as PyTorch does, unless the value keeps its placement (global_output) or the run asks
 *  ari_plan_check_declared. */
typedef struct ar_plan_value {
    bool given;
    char name[AR_PLAN_ARGUMENT]; /* keyword; "": by position */
    ar_placement from, to;       /* of a style that splits: from of an input is what arrives, to of an output is what
                                    leaves, and the others are the style's own. prepare: from actual to desired */
} ar_plan_value;

typedef struct ar_plan_rule {
    char glob[AR_PLAN_GLOB]; /* "model.layers.*.mlp.down_proj" */
    ar_style style;
    ar_plan_value input[AR_PLAN_ARGUMENTS]; /* those by position first, each at its place */
    ar_plan_value output;
    bool global_output; /* PyTorch's use_local_output=False: the output keeps its placement, and what is declared of it
                           next has to be that */
} ar_plan_rule;

/** No rules and no file, as in `ar_plan plan = {0}`, means the architecture's default plan; of a plan from a file a
 *  module that no rule matches is replicated. A copy of the struct borrows the rules. */
typedef struct ar_plan {
    ar_mlp_order mlp_order; /* of the default plan */
    size_t rules;
    ar_plan_rule *rule; /* owned; ar_plan_fini */
    char *file;         /* whose it is, for messages; owned; NULL: built by calls */
} ar_plan;
void ar_plan_fini(ar_plan *p);

/** A plan of no rules that replicates every module, called `name` in messages; rules that are added stand alone, as
 *  those of a file do. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_plan_empty(ar_plan *p, const char *name);
/** Adds a rule after the others (to {0}: after the default ones of that architecture). Errors: AR_ERR_ARG (glob too
 *  long, or more than AR_PLAN_RULES), AR_ERR_MEMORY. On error the plan is as before, or the default. */
AR_NODISCARD ar_status ar_plan_add(ar_plan *p, ar_arch arch, const char *glob, ar_style style);

/** A plan out of a JSON file: {"rules": [..]}, or Hugging Face's tp_plan, an object from globs to the names of its
 *  styles (planner.md has both). *p needs no value before; ar_plan_fini after AR_OK. Whether a model can be split so
 *  is another question: ari_plan_check.
 *  Errors: AR_ERR_FORMAT (not JSON; or names file, rule and what would be right: an unknown key or style, a placement
 *  that is none, arguments of the wrong form, aliases in a circle, one glob twice with two styles), AR_ERR_UNSUPPORTED
 *  (a style of tp_plan for experts), AR_ERR_OVERFLOW (more than AR_PLAN_RULES), AR_ERR_IO, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_plan_load(ar_plan *p, const char *path);
/** The same from text; `name` is for messages. */
AR_NODISCARD ar_status ar_plan_parse(ar_plan *p, const char *text, size_t length, const char *name);

/** A plan's split of the parts outside the blocks. */
typedef struct ar_outer_split {
    ar_embedding_split tokens;
    ar_placement final_norm; /* what it works on */
    ar_linear_split head;
} ar_outer_split;

AR_END_DECLS
#endif
