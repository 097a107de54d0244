/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_PLAN_H
#define ANYRANK_PLAN_H

#include "anyrank/config.h"
#include "anyrank/layers.h"

AR_BEGIN_DECLS

/* A parallel plan: which module is split how, by name globs (fnmatch(3), '*' also matches dots), as PyTorch's
 * parallelize_module has them. The last rule that matches a module's Hugging Face path decides. */
typedef enum ar_style {
    AR_STYLE_REPLICATE, /* whole on every rank */
    AR_STYLE_COLWISE,   /* rows of W [out, in]: the output is sharded along features */
    AR_STYLE_ROWWISE,   /* columns of W: the output is a sum over the ranks */
    AR_STYLE_VOCAB      /* rows of an embedding or LM head, uneven where the vocabulary does not divide */
} ar_style;
/** "replicate", "colwise", "rowwise", "vocab". Static storage. */
const char *ar_style_name(ar_style s);

#define AR_PLAN_RULES 24
#define AR_PLAN_GLOB 128 /* bytes of a glob or a module's path, with the final 0 */
typedef struct ar_plan_rule {
    char glob[AR_PLAN_GLOB]; /* "model.layers.*.mlp.down_proj" */
    ar_style style;
} ar_plan_rule;

/** Plain data. No rules at all, as in `ar_plan plan = {0}`, means the architecture's default plan. */
typedef struct ar_plan {
    size_t rules;
    ar_plan_rule rule[AR_PLAN_RULES];
} ar_plan;

/** The default plan of an architecture: embedding and LM head by vocabulary, q, k, v and the MLP's first layer colwise,
 * the attention's output and the MLP's second layer rowwise, norms replicated. */
void ar_plan_default(ar_plan *p, ar_arch arch);
/** Adds a rule after the others (to an empty plan: after the default ones). Errors: AR_ERR_ARG (glob too long, or too
 * many rules). */
AR_NODISCARD ar_status ar_plan_add(ar_plan *p, ar_arch arch, const char *glob, ar_style style);
/** Splits every MLP the other way: first layer rowwise, second colwise. Errors as ar_plan_add. */
AR_NODISCARD ar_status ar_plan_add_mlp_order(ar_plan *p, ar_arch arch, ar_mlp_order order);
/** The style of a module, "model.layers.3.mlp.down_proj"; AR_STYLE_REPLICATE where no rule matches. */
ar_style ar_plan_style(const ar_plan *p, ar_arch arch, const char *module);
/** How block `layer` splits its MLP. Errors: AR_ERR_UNSUPPORTED, naming the module, where its two layers are not
 *  colwise then rowwise or the other way round. */
AR_NODISCARD ar_status ar_plan_mlp_order(const ar_plan *p, const ar_config *c, size_t layer, ar_mlp_order *order);
/** Whether this version can split a model so. Errors: AR_ERR_UNSUPPORTED, naming the module, its style and those
 * possible. */
AR_NODISCARD ar_status ar_plan_check(const ar_plan *p, const ar_config *c);

AR_END_DECLS
#endif
