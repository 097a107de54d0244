/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/plan.h"

#include <fnmatch.h>
#include <stdio.h>
#include <string.h>

#include "ref/models/names.h"

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

/* "model.layers.LAYER.self_attn.q_proj"; module NULL: directly below the block. */
static void block_path(char out[AR_PLAN_GLOB], ar_arch arch, const char *layer, const char *module, const char *part)
{
    snprintf(out, AR_PLAN_GLOB, "%s.%s.%s%s%s", ari_outer_names_of(arch)->blocks, layer, module ? module : "",
             module ? "." : "", part);
}

static void put_in_blocks(ar_plan *p, ar_style style, ar_arch arch, const char *module, const char *part)
{
    char glob[AR_PLAN_GLOB];
    if (!part)
        return;
    block_path(glob, arch, "*", module, part);
    put(p, style, glob);
}

void ar_plan_default(ar_plan *p, ar_arch arch)
{
    const ari_outer_names *n = ari_outer_names_of(arch);
    const ari_block_names *b = ari_block_names_of(arch);
    *p = (ar_plan){0};
    put(p, AR_STYLE_VOCAB, n->token);
    if (n->position)
        put(p, AR_STYLE_REPLICATE, n->position);
    put_in_blocks(p, AR_STYLE_REPLICATE, arch, NULL, b->norm1);
    put_in_blocks(p, AR_STYLE_COLWISE, arch, b->attention, b->q);
    put_in_blocks(p, AR_STYLE_COLWISE, arch, b->attention, b->k);
    put_in_blocks(p, AR_STYLE_COLWISE, arch, b->attention, b->v);
    put_in_blocks(p, AR_STYLE_ROWWISE, arch, b->attention, b->out);
    put_in_blocks(p, AR_STYLE_REPLICATE, arch, NULL, b->norm2);
    put_in_blocks(p, AR_STYLE_COLWISE, arch, b->mlp, b->first);
    put_in_blocks(p, AR_STYLE_COLWISE, arch, b->mlp, b->up);
    put_in_blocks(p, AR_STYLE_ROWWISE, arch, b->mlp, b->second);
    if (n->final_norm)
        put(p, AR_STYLE_REPLICATE, n->final_norm);
    if (n->head)
        put(p, AR_STYLE_VOCAB, n->head);
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

ar_status ar_plan_add_mlp_order(ar_plan *p, ar_arch arch, ar_mlp_order order)
{
    const ari_block_names *b = ari_block_names_of(arch);
    const bool column_first = order == AR_MLP_COLUMN_ROW;
    const char *const parts[] = {b->first, b->up, b->second};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        char glob[AR_PLAN_GLOB];
        if (!parts[i])
            continue;
        block_path(glob, arch, "*", b->mlp, parts[i]);
        AR_TRY(ar_plan_add(p, arch, glob, (i == 2) != column_first ? AR_STYLE_COLWISE : AR_STYLE_ROWWISE));
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

static ar_style style_in_mlp(const ar_plan *p, const ar_config *c, size_t layer, const char *part,
                             char name[AR_PLAN_GLOB])
{
    char number[24];
    snprintf(number, sizeof number, "%zu", layer);
    block_path(name, c->arch, number, ari_block_names_of(c->arch)->mlp, part);
    return ar_plan_style(p, c->arch, name);
}

ar_status ar_plan_mlp_order(const ar_plan *p, const ar_config *c, size_t layer, ar_mlp_order *order)
{
    const ari_block_names *b = ari_block_names_of(c->arch);
    char name[AR_PLAN_GLOB];
    const ar_style second = style_in_mlp(p, c, layer, b->second, name);
    const ar_style first = style_in_mlp(p, c, layer, b->first, name);
    const bool column_row = first == AR_STYLE_COLWISE && second == AR_STYLE_ROWWISE;
    const bool row_column = first == AR_STYLE_ROWWISE && second == AR_STYLE_COLWISE;
    if (!column_row && !row_column)
        return ar_error_set(
            AR_ERR_UNSUPPORTED,
            "plan: %s is %s and %s of the same MLP %s; colwise then rowwise, or rowwise then colwise, are "
            "possible",
            name, ar_style_name(first), b->second, ar_style_name(second));
    if (b->up && style_in_mlp(p, c, layer, b->up, name) != first)
        return ar_error_set(AR_ERR_UNSUPPORTED, "plan: %s is not split as %s is (%s)", name, b->first,
                            ar_style_name(first));
    *order = column_row ? AR_MLP_COLUMN_ROW : AR_MLP_ROW_COLUMN;
    return AR_OK;
}

static ar_status expect(const ar_plan *p, const ar_config *c, const char *name, ar_style possible)
{
    const ar_style s = ar_plan_style(p, c->arch, name);
    if (s == possible)
        return AR_OK;
    return ar_error_set(AR_ERR_UNSUPPORTED, "plan: %s is %s; this version has it %s only", name, ar_style_name(s),
                        ar_style_name(possible));
}

static ar_status check_block(const ar_plan *p, const ar_config *c, size_t layer)
{
    const ari_block_names *b = ari_block_names_of(c->arch);
    const struct {
        const char *module, *part;
        ar_style style;
    } parts[] = {{NULL, b->norm1, AR_STYLE_REPLICATE},     {b->attention, b->q, AR_STYLE_COLWISE},
                 {b->attention, b->k, AR_STYLE_COLWISE},   {b->attention, b->v, AR_STYLE_COLWISE},
                 {b->attention, b->out, AR_STYLE_ROWWISE}, {NULL, b->norm2, AR_STYLE_REPLICATE}};
    char name[AR_PLAN_GLOB], number[24];
    snprintf(number, sizeof number, "%zu", layer);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (!parts[i].part)
            continue;
        block_path(name, c->arch, number, parts[i].module, parts[i].part);
        AR_TRY(expect(p, c, name, parts[i].style));
    }
    ar_mlp_order unused;
    return ar_plan_mlp_order(p, c, layer, &unused);
}

ar_status ar_plan_check(const ar_plan *p, const ar_config *c)
{
    const ari_outer_names *n = ari_outer_names_of(c->arch);
    AR_TRY(expect(p, c, n->token, AR_STYLE_VOCAB));
    if (n->position)
        AR_TRY(expect(p, c, n->position, AR_STYLE_REPLICATE));
    for (size_t i = 0; i < c->layers; i++)
        AR_TRY(check_block(p, c, i));
    if (n->final_norm)
        AR_TRY(expect(p, c, n->final_norm, AR_STYLE_REPLICATE));
    return n->head ? expect(p, c, n->head, AR_STYLE_VOCAB) : AR_OK;
}
