/* SPDX-License-Identifier: Apache-2.0 */
/* Plans as lists of rules: built by calls, and asked for the rule of a module. */
#include "ref/models/plan.h"

#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "anyrank/config.h"
#include "ref/core/size.h"
#include "ref/core/text.h"
#include "ref/layers/layers_private.h"
#include "ref/layers/parts.h"
#include "ref/models/placement.h"
#include "ref/models/plan_private.h"
#include "ref/placement/placement_private.h"

/* --- building ----------------------------------------------------------------------------------------------------- */

void ar_plan_fini(ar_plan *p)
{
    free(p->rule);
    free(p->file);
    *p = (ar_plan){0};
}

ar_status ar_plan_empty(ar_plan *p, const char *name)
{
    *p = (ar_plan){0};
    AR_TRY(ari_alloc((void **)&p->file, strlen(name) + 1, 1, "the name of a plan"));
    memcpy(p->file, name, strlen(name) + 1);
    return AR_OK;
}

ar_status ari_plan_put(ar_plan *p, const ar_plan_rule *rule)
{
    if (p->rules == AR_PLAN_RULES)
        return ar_error_set(AR_ERR_ARG, "plan: no room for the rule '%s': a plan has at most %d", ARI_SHOW(rule->glob),
                            AR_PLAN_RULES);
    /* Memory holds a power of two of rules and grows when it is full. */
    if ((p->rules & (p->rules - 1)) == 0) {
        ar_plan_rule *rules = realloc(p->rule, (p->rules ? 2 * p->rules : 1) * sizeof *rules);
        if (!rules)
            return ar_error_set(AR_ERR_MEMORY, "no memory for %zu rules of a plan", p->rules + 1);
        p->rule = rules;
    }
    p->rule[p->rules++] = *rule;
    return AR_OK;
}

/* Adds a rule without declarations. The length of the glob has been checked, or the glob is a family's. */
static ar_status put_rule(ar_plan *p, ar_style style, const char *glob)
{
    ar_plan_rule rule = {.style = style};
    snprintf(rule.glob, sizeof rule.glob, "%s", glob);
    return ari_plan_put(p, &rule);
}

ar_status ari_plan_default(ar_plan *p, ar_arch arch)
{
    char glob[AR_PLAN_GLOB];
    ar_status st = AR_OK;
    *p = (ar_plan){0};
    AR_TRY(ari_arch_expect(arch));
    const ari_family *f = ari_family_of(arch);
    for (const ari_family_part *part = f->part; part->path && st == AR_OK; part++) {
        if (ari_is_mtp_part(part->role)) /* replicate without a rule */
            continue;
        ari_role_path(glob, sizeof glob, arch, "*", part->role);
        st = put_rule(p, ari_part_kind_of(part->role)->style, glob);
    }
    if (st != AR_OK)
        ar_plan_fini(p);
    return st;
}

const char *ari_plan_file(const ar_plan *p)
{
    return p->file ? p->file : "plan";
}

bool ari_plan_is_default(const ar_plan *p)
{
    return p->rules == 0 && !p->file;
}

static const ar_style mlp_styles[][2] = {[AR_MLP_COLUMN_ROW] = {AR_STYLE_COLWISE, AR_STYLE_ROWWISE},
                                         [AR_MLP_ROW_COLUMN] = {AR_STYLE_ROWWISE, AR_STYLE_COLWISE}};

static ar_status put_mlp_order(ar_plan *p, ar_arch arch, ar_mlp_order order)
{
    for (const ari_family_part *part = ari_family_of(arch)->part; part->path; part++) {
        char glob[AR_PLAN_GLOB];
        if (!ari_is_mlp_part(part->role))
            continue;
        ari_role_path(glob, sizeof glob, arch, "*", part->role);
        AR_TRY(put_rule(p, mlp_styles[order][part->role == ARI_DOWN], glob));
    }
    return AR_OK;
}

/* Writes out the default plan if the plan is the default. */
static ar_status write_out(ar_plan *p, ar_arch arch)
{
    const ar_mlp_order order = p->mlp_order;
    if (!ari_plan_is_default(p))
        return AR_OK;
    AR_TRY(ari_plan_default(p, arch));
    return order == AR_MLP_COLUMN_ROW ? AR_OK : put_mlp_order(p, arch, order);
}

ar_status ar_plan_add(ar_plan *p, ar_arch arch, const char *glob, ar_style style)
{
    if (strlen(glob) >= AR_PLAN_GLOB)
        return ar_error_set(AR_ERR_ARG, "plan: the glob '%s' has %zu bytes; %d are possible", ARI_SHOW(glob),
                            strlen(glob), AR_PLAN_GLOB - 1);
    AR_TRY(write_out(p, arch));
    return put_rule(p, style, glob);
}

ar_status ari_plan_add_mlp_order(ar_plan *p, ar_arch arch, ar_mlp_order order)
{
    AR_TRY(ari_arch_expect(arch));
    if (!ari_plan_is_default(p))
        return put_mlp_order(p, arch, order);
    p->mlp_order = order;
    return AR_OK;
}

/* --- asking ------------------------------------------------------------------------------------------------------- */

/* Returns a path below the base model ("model.", "transformer."), which tp_plan omits; a path that is not below one is
 * returned unchanged. */
static const char *below_base(ar_arch arch, const char *path)
{
    const char *blocks = ari_family_of(arch)->blocks, *dot = strchr(blocks, '.');
    const size_t prefix = dot ? (size_t)(dot + 1 - blocks) : 0;
    return strncmp(path, blocks, prefix) == 0 ? path + prefix : path;
}

static bool is_wild(char c)
{
    return c == '*' || c == '?' || c == '[' || c == '\\';
}

/* The text before the first wildcard decides most often, and a plan may have thousands of globs. */
bool ari_glob_matches(const char *glob, const char *path)
{
    for (; *glob == *path && !is_wild(*glob); glob++, path++) {
        if (*glob == '\0')
            return true;
    }
    return is_wild(*glob) && fnmatch(glob, path, 0) == 0;
}

static bool matches(const ar_plan_rule *rule, const char *path, const char *below)
{
    return ari_glob_matches(rule->glob, path) || (below != path && ari_glob_matches(rule->glob, below));
}

/* Modules of several parts, whose inputs are prepared; a part has a style. */
static const ari_role prepared[] = {ARI_ATTENTION, ARI_MLP, ARI_EXPERTS};
enum { PREPARED = sizeof prepared / sizeof *prepared };

static bool is_prepared(ari_role role)
{
    return role == prepared[0] || role == prepared[1] || role == prepared[2];
}

/* Paths of a role's module; empty if it has no second one. */
typedef struct paths {
    char role_path[AR_PLAN_GLOB], stacked_path[AR_PLAN_GLOB];
} paths;

static paths paths_of(ar_arch arch, const char *layer, ari_role role)
{
    paths p = {{0}, {0}};
    ari_role_path(p.role_path, sizeof p.role_path, arch, layer, role);
    (void)ari_stacked_path(p.stacked_path, sizeof p.stacked_path, arch, layer, role);
    return p;
}

static bool matches_paths(const ar_plan_rule *rule, ar_arch arch, const paths *p)
{
    return matches(rule, p->role_path, below_base(arch, p->role_path)) ||
           (p->stacked_path[0] && matches(rule, p->stacked_path, below_base(arch, p->stacked_path)));
}

const ar_plan_rule *ari_plan_rule_of(const ar_plan *p, ar_arch arch, const char *layer, ari_role role)
{
    if (p->rules == 0)
        return NULL;
    const paths role_paths = paths_of(arch, layer, role);
    for (size_t i = p->rules; i-- > 0;) {
        if ((p->rule[i].style == AR_STYLE_PREPARE) == is_prepared(role) &&
            matches_paths(&p->rule[i], arch, &role_paths))
            return &p->rule[i];
    }
    return NULL;
}

ar_style ari_style_in(ari_role role, ar_style s)
{
    if (role == ARI_TOKENS && s == AR_STYLE_ROWWISE)
        return AR_STYLE_VOCAB;
    if (role == ARI_TOKENS && s == AR_STYLE_COLWISE)
        return AR_STYLE_HIDDEN;
    return role == ARI_HEAD && s == AR_STYLE_COLWISE ? AR_STYLE_VOCAB : s;
}

ar_style ari_plan_style_of(const ar_plan *p, ari_role role, const ar_plan_rule *rule)
{
    if (ari_plan_is_default(p))
        return ari_is_mlp_part(role) ? mlp_styles[p->mlp_order][role == ARI_DOWN] : ari_part_kind_of(role)->style;
    return rule ? ari_style_in(role, rule->style) : AR_STYLE_REPLICATE;
}

bool ari_plan_sequence(const ar_plan *p)
{
    bool any = false;
    for (size_t i = 0; i < p->rules && !any; i++)
        any = p->rule[i].style == AR_STYLE_SEQUENCE;
    return any;
}

/* --- one module, as the plan has it ------------------------------------------------------------------------------- */

ar_status ari_ruled_misfit(const ari_ruled *m, const char *fits)
{
    return ar_error_set(AR_ERR_UNSUPPORTED, "%s: %s is %s; %s", ARI_SHOW(ari_plan_file(m->plan)), ARI_SHOW(m->name),
                        ari_style_name(m->style), fits);
}

const char *ari_ruled_show(char text[AR_PLACEMENT_TEXT], const ari_ruled *m, ar_placement p)
{
    if (!m->is_user_module && ari_placed_by_tokens(p))
        p.dim = 1;
    return ari_placement_name(text, p);
}

ar_status ari_ruled_wrong(const ari_ruled *m, const char *label, ar_placement declared, const char *fits, ...)
{
    char sentence[80];
    ARI_FORMAT(sentence, fits);
    return ar_error_set(AR_ERR_UNSUPPORTED, "%s: rule %zu, '%s': %s of %s is declared %s; %s",
                        ARI_SHOW(ari_plan_file(m->plan)), (size_t)(m->rule - m->plan->rule) + 1,
                        ARI_SHOW(m->rule->glob), label, ARI_SHOW(m->name), ARI_PLACED(m, declared), sentence);
}

ar_placement ari_ruled_from_end(ar_placement p)
{
    if (p.kind == AR_SHARD && p.dim >= 0)
        p.dim -= 3;
    return p;
}

bool ari_ruled_possible(ar_placement p, bool tokens)
{
    return ari_placed_full(p) || ari_placed_by_features(p) || (tokens && ari_placed_by_tokens(p));
}

/* Returns true if placement `actual` gives each rank the same shape as the declared placement. */
static bool fits_placement(ar_placement declared, ar_placement actual)
{
    if (declared.kind == AR_PARTIAL_MAX)
        return false;
    return (declared.kind == AR_SHARD) == (actual.kind == AR_SHARD) &&
           (declared.kind != AR_SHARD || declared.dim == actual.dim);
}

bool ari_ruled_passes(const ari_ruled *m, const ar_plan_rule *maker, ar_placement declared, ar_placement actual)
{
    const bool is_strict = m->strict || (maker && maker->global_output);
    return is_strict ? ari_placed_equal(declared, actual) : fits_placement(declared, actual);
}

ar_status ari_ruled_believe(const ari_ruled *m, const char *label, ar_placement declared, const ar_plan_rule *maker,
                            ar_placement actual, ar_placement *p)
{
    *p = ari_ruled_from_end(declared);
    return ari_ruled_passes(m, maker, *p, actual)
               ? AR_OK
               : ari_ruled_wrong(m, label, declared, "%s would fit", ARI_PLACED(m, actual));
}

ar_status ari_ruled_input(const ari_ruled *m, const ar_plan_rule *maker, ar_placement actual, ar_placement else_from,
                          ar_placement *from_placement)
{
    *from_placement = else_from;
    if (!m->rule || !m->rule->input[0].is_declared)
        return AR_OK;
    return ari_ruled_believe(m, "the input", m->rule->input[0].src, maker, actual, from_placement);
}

ar_status ari_ruled_target(const ari_ruled *m, const char *label, ar_placement declared, bool tokens, bool terms,
                           ar_placement *p)
{
    *p = ari_ruled_from_end(declared);
    if (ari_ruled_possible(*p, tokens) || (terms && p->kind == AR_PARTIAL_SUM))
        return AR_OK;
    return ari_ruled_wrong(m, label, declared,
                           m->is_user_module
                               ? (terms ? "R, S(-1), S(1) and P(sum) are possible" : "R, S(-1) and S(1) are possible")
                               : (tokens ? "R, S(1) or S(-1) would fit" : "R or S(-1) would fit"));
}

ar_status ari_ruled_output(const ari_ruled *m, bool tokens, bool terms, ar_placement else_to,
                           ar_placement *to_placement)
{
    *to_placement = else_to;
    if (!m->rule || !m->rule->output.is_declared)
        return AR_OK;
    return ari_ruled_target(m, "the output", m->rule->output.dst, tokens, terms, to_placement);
}

ar_placement ari_ruled_makes(ar_style style)
{
    return style == AR_STYLE_COLWISE ? ari_shard_features : ari_replicated;
}

ar_status ari_ruled_linear(const ari_ruled *m, const ar_plan_rule *maker, ar_placement actual, ar_placement else_from,
                           ar_linear_split *split)
{
    split->style = m->style;
    if (m->style != AR_STYLE_COLWISE && m->style != AR_STYLE_ROWWISE && m->style != AR_STYLE_REPLICATE)
        return ari_ruled_misfit(m, m->is_user_module ? "a linear layer is colwise, rowwise or replicate"
                                                     : "colwise, rowwise and replicate are possible");
    return ari_ruled_input(m, maker, actual, else_from, &split->input);
}

/* Checks that m with this split forms one GEMM with the first of the layers that share its input. */
static ar_status check_alike(const ari_ruled *m, const ar_linear_split *s, const ari_ruled *first_layer,
                             const ar_linear_split *split)
{
    const bool moved = !ari_placed_equal(s->input, split->input) || !ari_placed_equal(s->output, split->output);
    const char *file = ARI_SHOW(ari_plan_file(m->plan));
    if (s->style != split->style || (moved && m->is_user_module))
        return ar_error_set(AR_ERR_UNSUPPORTED, "%s: %s is %s, but %s, which has the same input, %s%s%s; give both one",
                            file, ARI_SHOW(m->name), ari_style_name(s->style), ARI_SHOW(first_layer->name),
                            m->is_user_module ? "is " : "", ari_style_name(split->style),
                            m->is_user_module ? " or leaves another placement" : "");
    if (!moved)
        return AR_OK;
    return ar_error_set(AR_ERR_UNSUPPORTED,
                        "%s: %s has input %s and output %s, but %s, which is one product with it, %s and %s; give both "
                        "the same",
                        file, m->name, ARI_PLACED(m, s->input), ARI_PLACED(m, s->output), first_layer->name,
                        ARI_PLACED(m, split->input), ARI_PLACED(m, split->output));
}

ar_status ari_ruled_first(const ari_ruled *m, const ari_ruled *first_layer, const ar_plan_rule *maker,
                          ar_placement actual, bool tokens, ar_linear_split *split)
{
    ar_linear_split s;
    AR_TRY(ari_ruled_linear(m, maker, actual, actual, &s));
    AR_TRY(ari_ruled_output(m, tokens, s.style == AR_STYLE_ROWWISE && !m->is_user_module, ari_ruled_makes(s.style),
                            &s.output));
    if (m == first_layer)
        *split = s;
    return check_alike(m, &s, first_layer, split);
}

ar_status ari_ruled_tokens(const ari_ruled *m, ar_embedding_split *split)
{
    static const ar_embedding_split splits[] = {[AR_STYLE_VOCAB] = AR_EMBEDDING_VOCAB,
                                                [AR_STYLE_HIDDEN] = AR_EMBEDDING_HIDDEN,
                                                [AR_STYLE_REPLICATE] = AR_EMBEDDING_WHOLE};
    if (m->style != AR_STYLE_VOCAB && m->style != AR_STYLE_HIDDEN && m->style != AR_STYLE_REPLICATE)
        return ari_ruled_misfit(m, "vocab (rowwise), hidden (colwise) and replicate are possible");
    *split = splits[m->style];
    return AR_OK;
}

/* --- names -------------------------------------------------------------------------------------------------------- */

static bool matches_role(const ar_plan_rule *rule, ar_arch arch, const char *layer, ari_role role)
{
    const paths role_paths = paths_of(arch, layer, role);
    return matches_paths(rule, arch, &role_paths);
}

/* Returns true if the rule matches a module of its kind in a layer, or outside of all layers (NULL): parts have styles,
 * while inputs of attentions, MLPs and experts are prepared. */
static bool matches_in(const ar_plan_rule *rule, ar_arch arch, const char *layer)
{
    bool found = false;
    for (int i = 0; i < PREPARED && layer && rule->style == AR_STYLE_PREPARE; i++) {
        const bool exists = prepared[i] != ARI_EXPERTS || ari_part_path(ari_family_of(arch), ARI_ROUTER);
        found = found || (exists && matches_role(rule, arch, layer, prepared[i]));
    }
    if (rule->style == AR_STYLE_PREPARE)
        return found;
    for (const ari_family_part *part = ari_family_of(arch)->part; part->path; part++) {
        if ((ari_section_of(part->role) == ARI_IN_BLOCKS) == (layer != NULL) &&
            matches_role(rule, arch, layer, part->role))
            return true;
    }
    return false;
}

/* Writes the part's path, in the first block if it is in a block, that is nearest to the rule's; otherwise that of the
 * attention's output. */
static void nearest_part(char out[AR_PLAN_GLOB], const ar_plan_rule *rule, ar_arch arch)
{
    char path[ARI_ROLES][AR_PLAN_GLOB];
    const char *candidate[ARI_ROLES];
    size_t n = 0;
    for (const ari_family_part *part = ari_family_of(arch)->part; part->path && n < ARI_ROLES; part++, n++) {
        ari_role_path(path[n], sizeof path[n], arch, "0", part->role);
        candidate[n] = path[n];
    }
    const char *found = ari_nearest(rule->glob, candidate, n);
    if (found)
        snprintf(out, AR_PLAN_GLOB, "%s", found);
    else
        ari_role_path(out, AR_PLAN_GLOB, arch, "0", ARI_OUT);
}

static ar_status check_glob(const ar_plan *p, const ar_config *c, const ar_plan_rule *rule)
{
    const bool prepares = rule->style == AR_STYLE_PREPARE;
    char number[24], near[AR_PLAN_GLOB];
    bool found = matches_in(rule, c->arch, NULL);
    for (size_t layer = 0; layer < ar_config_blocks(c) && !found; layer++) {
        snprintf(number, sizeof number, "%zu", layer);
        found = matches_in(rule, c->arch, number);
    }
    if (found)
        return AR_OK;
    if (prepares)
        ari_role_path(near, sizeof near, c->arch, "0", ARI_ATTENTION);
    else
        nearest_part(near, rule, c->arch);
    return ar_error_set(AR_ERR_NOT_FOUND, "%s: rule %zu, '%s': no module of %s that %s has this name; %s is one",
                        ARI_SHOW(ari_plan_file(p)), (size_t)(rule - p->rule) + 1, ARI_SHOW(rule->glob),
                        ARI_SHOW(c->name), prepares ? "has others in it and can be prepared" : "has parameters", near);
}

ar_status ari_plan_check_globs(const ar_plan *p, const ar_config *c)
{
    for (size_t i = 0; i < p->rules; i++)
        AR_TRY(check_glob(p, c, &p->rule[i]));
    return AR_OK;
}
