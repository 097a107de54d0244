/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_PLAN_H
#define ANYRANK_PLAN_H

#include "anyrank/arch.h"
#include "anyrank/layers.h"
#include "anyrank/placement.h"

AR_BEGIN_DECLS

/* A parallel plan says how each module is sharded over the tensor-parallel ranks, like the plan of PyTorch's
 * parallelize_module and Hugging Face's tp_plan. It is a list of rules, each a glob of module paths (fnmatch(3); '*'
 * also matches dots) and a style; the last rule that matches a module's Hugging Face path applies. A glob may omit the
 * prefix of the base model ("layers.*.mlp.up_proj" for "model.layers..."). planner.md explains plans and plan files. */
#define AR_PLAN_RULES 4096  /* most rules of a plan: enough for one per module of a model with 400 layers */
#define AR_PLAN_GLOB 128    /* bytes of a glob or a module's path, with the final 0 */
#define AR_PLAN_ARGUMENTS 8 /* most inputs of a module that a rule can describe, by position or by keyword */
#define AR_PLAN_ARGUMENT 32 /* bytes of a keyword, with the final 0 */

/** A rule's declaration of the placements of a module's input or output over the tensor-parallel ranks. As in PyTorch,
 *  a value of the right shape is trusted to be placed as declared, unless it carries its placement (global_output) or
 *  ar_ctx_options.placements asks for checks. */
typedef struct ar_plan_value {
    bool is_declared;            /* the rule declares this value; false: the style's default */
    char name[AR_PLAN_ARGUMENT]; /* an input's keyword; "": by position */
    ar_placement src, dst;       /* redistribution of the value. AR_STYLE_PREPARE: from the actual to the wanted
                                    placement. Other styles: an input's `src` is how it arrives, an output's `dst` how
                                    it leaves; the respective other one follows from the style */
} ar_plan_value;

/** One rule: modules whose paths match `glob` get `style`. */
typedef struct ar_plan_rule {
    char glob[AR_PLAN_GLOB]; /* "model.layers.*.mlp.down_proj" */
    ar_style style;
    ar_plan_value input[AR_PLAN_ARGUMENTS]; /* positional inputs first, at their positions; then keywords */
    ar_plan_value output;                   /* declared output */
    bool global_output; /* PyTorch's use_local_output=False: the output carries its placement, which the next
                           declaration must match */
} ar_plan_rule;

/** A parallel plan. {0} (no rules, no file) is the architecture's default plan. In a plan from a file or from
 *  ar_plan_empty, modules without a matching rule are replicated. A copy of the struct borrows rules and file. */
typedef struct ar_plan {
    ar_mlp_order mlp_order; /* sharding of MLPs in the default plan */
    size_t rules;           /* number of rules */
    ar_plan_rule *rule;     /* [rules]; owned, freed by ar_plan_fini */
    char *file;             /* name of the plan or its file, for messages; owned; NULL: none */
} ar_plan;
/** Frees a plan's rules and name. */
void ar_plan_fini(ar_plan *p);

/** Initialises *p as a plan without rules, called `name` in messages, which replicates every module. Release it with
 *  ar_plan_fini. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_plan_empty(ar_plan *p, const char *name);
/** Appends a rule to a plan; a plan {0} first gets the rules of `arch`'s default plan. Errors: AR_ERR_ARG (glob too
 *  long, more than AR_PLAN_RULES rules), AR_ERR_MEMORY. On error the plan's effect is unchanged. */
AR_NODISCARD ar_status ar_plan_add(ar_plan *p, ar_arch arch, const char *glob, ar_style style);

/** Reads a plan from a JSON file: either {"rules": [..]}, or Hugging Face's tp_plan, an object that maps globs to style
 *  names (planner.md has both). The old contents of *p are ignored; release it with ar_plan_fini after AR_OK. It is not
 *  checked that a model can be sharded by the plan. Errors: AR_ERR_FORMAT (not JSON; an unknown key, style or
 *  placement; arguments of the wrong form; circular aliases; a glob with two styles; the message names file and rule),
 *  AR_ERR_UNSUPPORTED (a tp_plan style for experts), AR_ERR_OVERFLOW (more than AR_PLAN_RULES rules), AR_ERR_IO,
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_plan_load(ar_plan *p, const char *path);
/** Parses a plan from JSON text of `length` bytes, as ar_plan_load; `name` is used in messages. */
AR_NODISCARD ar_status ar_plan_parse(ar_plan *p, const char *text, size_t length, const char *name);

/** How a plan shards the parts of a model outside its blocks. */
typedef struct ar_outer_split {
    ar_embedding_split tokens; /* the token embedding */
    ar_placement final_norm;   /* placement of the final norm's input */
    ar_linear_split head;      /* the LM head */
} ar_outer_split;

AR_END_DECLS
#endif
