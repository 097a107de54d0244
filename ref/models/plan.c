/* SPDX-License-Identifier: Apache-2.0 */
/* Plans as lists of rules: built by calls, and asked for the rule of a module. */
#include "ref/models/plan.h"

#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"
#include "ref/core/text.h"

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
    /* Room is for a power of two of rules, and is made where that is full. */
    if ((p->rules & (p->rules - 1)) == 0) {
        ar_plan_rule *more = realloc(p->rule, (p->rules ? 2 * p->rules : 1) * sizeof *more);
        if (!more)
            return ar_error_set(AR_ERR_MEMORY, "no memory for %zu rules of a plan", p->rules + 1);
        p->rule = more;
    }
    p->rule[p->rules++] = *rule;
    return AR_OK;
}

/* A rule without declarations; the glob's length has been checked, or is a family's. */
static ar_status put(ar_plan *p, ar_style style, const char *glob)
{
    ar_plan_rule rule = {.style = style};
    snprintf(rule.glob, sizeof rule.glob, "%s", glob);
    return ari_plan_put(p, &rule);
}

ar_status ar_plan_default(ar_plan *p, ar_arch arch)
{
    const ari_family *f = ari_family_of(arch);
    char glob[AR_PLAN_GLOB];
    ar_status st = AR_OK;
    *p = (ar_plan){0};
    for (const ari_family_part *part = f->part; part->path && st == AR_OK; part++) {
        ari_role_path(glob, sizeof glob, arch, "*", part->role);
        st = put(p, ari_part_kind_of(part->role)->style, glob);
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
        if (!ari_plan_in_mlp(part->role))
            continue;
        ari_role_path(glob, sizeof glob, arch, "*", part->role);
        AR_TRY(put(p, mlp_styles[order][part->role == ARI_DOWN], glob));
    }
    return AR_OK;
}

/* Writes the default plan out, where that is what the plan is. */
static ar_status write_out(ar_plan *p, ar_arch arch)
{
    const ar_mlp_order order = p->mlp_order;
    if (!ari_plan_is_default(p))
        return AR_OK;
    AR_TRY(ar_plan_default(p, arch));
    return order == AR_MLP_COLUMN_ROW ? AR_OK : put_mlp_order(p, arch, order);
}

ar_status ar_plan_add_rule(ar_plan *p, ar_arch arch, const ar_plan_rule *rule)
{
    AR_TRY(write_out(p, arch));
    return ari_plan_put(p, rule);
}

ar_status ar_plan_add(ar_plan *p, ar_arch arch, const char *glob, ar_style style)
{
    if (strlen(glob) >= AR_PLAN_GLOB)
        return ar_error_set(AR_ERR_ARG, "plan: the glob '%s' has %zu bytes; %d are possible", ARI_SHOW(glob),
                            strlen(glob), AR_PLAN_GLOB - 1);
    AR_TRY(write_out(p, arch));
    return put(p, style, glob);
}

ar_status ar_plan_add_mlp_order(ar_plan *p, ar_arch arch, ar_mlp_order order)
{
    if (!ari_plan_is_default(p))
        return put_mlp_order(p, arch, order);
    p->mlp_order = order;
    return AR_OK;
}

bool ari_plan_in_mlp(ari_role role)
{
    return role == ARI_FIRST || role == ARI_GATE_UP || role == ARI_GATE || role == ARI_UP || role == ARI_DOWN;
}

/* --- asking ------------------------------------------------------------------------------------------------------- */

/* A path below the base model ("model.", "transformer."), which tp_plan leaves out; the path itself where it is not
 * below one. */
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

/* What stands before the first wildcard decides most often, and a plan may have thousands of globs. */
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

bool ari_plan_matches(const ar_plan_rule *rule, ar_arch arch, const char *path)
{
    return matches(rule, path, below_base(arch, path));
}

const ar_plan_rule *ari_plan_rule_of(const ar_plan *p, ar_arch arch, const char *path, bool prepares)
{
    const char *below = below_base(arch, path);
    for (size_t i = p->rules; i-- > 0;) {
        if ((p->rule[i].style == AR_STYLE_PREPARE) == prepares && matches(&p->rule[i], path, below))
            return &p->rule[i];
    }
    return NULL;
}

/* The part of a family whose path this is; NULL: none. */
static const ari_family_part *part_of(ar_arch arch, const char *path)
{
    for (const ari_family_part *part = ari_family_of(arch)->part; part->path; part++) {
        char glob[AR_PLAN_GLOB];
        ari_role_path(glob, sizeof glob, arch, "*", part->role);
        if (fnmatch(glob, path, 0) == 0)
            return part;
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

ar_style ari_plan_style_of(const ar_plan *p, ar_arch arch, ari_role role, const char *path)
{
    const ar_plan_rule *rule = ari_plan_rule_of(p, arch, path, false);
    if (ari_plan_is_default(p))
        return ari_plan_in_mlp(role) ? mlp_styles[p->mlp_order][role == ARI_DOWN] : ari_part_kind_of(role)->style;
    return rule ? ari_style_in(role, rule->style) : AR_STYLE_REPLICATE;
}

bool ar_plan_sequence(const ar_plan *p)
{
    bool any = false;
    for (size_t i = 0; i < p->rules && !any; i++)
        any = p->rule[i].style == AR_STYLE_SEQUENCE;
    return any;
}

ar_style ar_plan_style(const ar_plan *p, ar_arch arch, const char *module)
{
    const ari_family_part *part = part_of(arch, module);
    if (part)
        return ari_plan_style_of(p, arch, part->role, module);
    const ar_plan_rule *rule = ari_plan_rule_of(p, arch, module, false);
    return rule ? rule->style : AR_STYLE_REPLICATE;
}
