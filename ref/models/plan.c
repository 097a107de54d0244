/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/plan.h"

#include <fnmatch.h>
#include <stdio.h>
#include <string.h>

#include "ref/models/family.h"

const char *ar_style_name(ar_style s)
{
    static const char *const names[] = {[AR_STYLE_REPLICATE] = "replicate",
                                        [AR_STYLE_COLWISE] = "colwise",
                                        [AR_STYLE_ROWWISE] = "rowwise",
                                        [AR_STYLE_VOCAB] = "vocab"};
    return (unsigned)s < sizeof names / sizeof *names ? names[s] : "?";
}

static void put(ar_plan *p, ar_style style, const char *glob)
{
    ar_plan_rule *r = &p->rule[p->rules++];
    r->style = style;
    memcpy(r->glob, glob, strlen(glob) + 1); /* ar_plan_add has checked its length; the default's are short */
}

void ar_plan_default(ar_plan *p, ar_arch arch)
{
    const ari_family *f = ari_family_of(arch);
    char glob[AR_PLAN_GLOB];
    *p = (ar_plan){0};
    for (const ari_family_part *part = f->part; part->path; part++) {
        ari_role_path(glob, sizeof glob, arch, "*", part->role);
        put(p, ari_part_kind_of(part->role)->style, glob);
    }
}

ar_status ar_plan_add(ar_plan *p, ar_arch arch, const char *glob, ar_style style)
{
    if (p->rules == 0)
        ar_plan_default(p, arch);
    if (p->rules == AR_PLAN_RULES || strlen(glob) >= sizeof p->rule[0].glob)
        return ar_error_set(AR_ERR_ARG, "plan: no room for the rule '%s' (at most %d rules of %zu bytes)", glob,
                            AR_PLAN_RULES, sizeof p->rule[0].glob - 1);
    put(p, style, glob);
    return AR_OK;
}

static bool in_mlp(const ari_family_part *p)
{
    return p->role == ARI_FIRST || p->role == ARI_GATE || p->role == ARI_UP || p->role == ARI_DOWN;
}

ar_status ar_plan_add_mlp_order(ar_plan *p, ar_arch arch, ar_mlp_order order)
{
    const ari_family *f = ari_family_of(arch);
    const bool column_first = order == AR_MLP_COLUMN_ROW;
    for (const ari_family_part *part = f->part; part->path; part++) {
        char glob[AR_PLAN_GLOB];
        if (!in_mlp(part))
            continue;
        ari_role_path(glob, sizeof glob, arch, "*", part->role);
        AR_TRY(
            ar_plan_add(p, arch, glob, (part->role == ARI_DOWN) != column_first ? AR_STYLE_COLWISE : AR_STYLE_ROWWISE));
    }
    return AR_OK;
}

ar_style ar_plan_style(const ar_plan *p, ar_arch arch, const char *module)
{
    ar_plan fallback;
    if (p->rules == 0) {
        ar_plan_default(&fallback, arch);
        p = &fallback;
    }
    for (size_t i = p->rules; i-- > 0;) {
        if (fnmatch(p->rule[i].glob, module, 0) == 0)
            return p->rule[i].style;
    }
    return AR_STYLE_REPLICATE;
}

/* The style of a part of a layer, whose full path goes to `name`. */
static ar_style style_of(const ar_plan *p, const ar_config *c, size_t layer, const ari_family_part *part,
                         char name[AR_PLAN_GLOB])
{
    char number[24];
    snprintf(number, sizeof number, "%zu", layer);
    ari_role_path(name, AR_PLAN_GLOB, c->arch, number, part->role);
    return ar_plan_style(p, c->arch, name);
}

static ar_style style_of_role(const ar_plan *p, const ar_config *c, size_t layer, ari_role role,
                              char name[AR_PLAN_GLOB])
{
    const ari_family_part part = {role, ari_part_path(ari_family_of(c->arch), role)};
    return style_of(p, c, layer, &part, name);
}

ar_status ar_plan_mlp_order(const ar_plan *p, const ar_config *c, size_t layer, ar_mlp_order *order)
{
    const ari_family *f = ari_family_of(c->arch);
    const ari_role one = ari_part_path(f, ARI_GATE) ? ARI_GATE : ARI_FIRST;
    char name[AR_PLAN_GLOB];
    const ar_style second = style_of_role(p, c, layer, ARI_DOWN, name), first = style_of_role(p, c, layer, one, name);
    const bool column_row = first == AR_STYLE_COLWISE && second == AR_STYLE_ROWWISE;
    const bool row_column = first == AR_STYLE_ROWWISE && second == AR_STYLE_COLWISE;
    if (!column_row && !row_column)
        return ar_error_set(
            AR_ERR_UNSUPPORTED,
            "plan: %s is %s and %s of the same MLP %s; colwise then rowwise, or rowwise then colwise, are possible",
            name, ar_style_name(first), ari_part_leaf(f, ARI_DOWN), ar_style_name(second));
    if (ari_part_path(f, ARI_UP) && style_of_role(p, c, layer, ARI_UP, name) != first)
        return ar_error_set(AR_ERR_UNSUPPORTED, "plan: %s is not split as %s is (%s)", name, ari_part_leaf(f, one),
                            ar_style_name(first));
    *order = column_row ? AR_MLP_COLUMN_ROW : AR_MLP_ROW_COLUMN;
    return AR_OK;
}

static ar_status expect(const ar_plan *p, const ar_config *c, size_t layer, const ari_family_part *part)
{
    char name[AR_PLAN_GLOB];
    const ar_style s = style_of(p, c, layer, part, name), possible = ari_part_kind_of(part->role)->style;
    if (s == possible)
        return AR_OK;
    return ar_error_set(AR_ERR_UNSUPPORTED, "plan: %s is %s; this version has it %s only", name, ar_style_name(s),
                        ar_style_name(possible));
}

/* The parts of a section as the default plan has them, but for the MLP. */
static ar_status check_section(const ar_plan *p, const ar_config *c, size_t layer, ari_section section)
{
    for (const ari_family_part *part = ari_family_of(c->arch)->part; part->path; part++) {
        if (ari_section_of(part->role) == section && !in_mlp(part))
            AR_TRY(expect(p, c, layer, part));
    }
    return AR_OK;
}

ar_status ar_plan_check(const ar_plan *p, const ar_config *c)
{
    ar_mlp_order unused;
    AR_TRY(check_section(p, c, 0, ARI_BEFORE_BLOCKS));
    for (size_t i = 0; i < c->layers; i++) {
        AR_TRY(check_section(p, c, i, ARI_IN_BLOCKS));
        AR_TRY(ar_plan_mlp_order(p, c, i, &unused));
    }
    return check_section(p, c, 0, ARI_AFTER_BLOCKS);
}
