/* SPDX-License-Identifier: Apache-2.0 */
/* What a plan makes of a model: the styles of parts that belong together, and whether what the rules declare of inputs
 * and outputs is what is there. */
#include <stdio.h>
#include <string.h>

#include "ref/core/text.h"
#include "ref/models/plan.h"

/* A plan seen from one layer of a model, or (ARI_NO_BLOCK) from outside of them. */
typedef struct view {
    const ar_plan *p;
    const ar_config *c;
    const ari_family *f;
    size_t layer;
    ar_placement stream; /* of values between the modules */
} view;
#define ARI_NO_BLOCK SIZE_MAX

static const ar_placement replicated = {AR_REPLICATE, 0}, by_tokens = {AR_SHARD, 1}, by_features = {AR_SHARD, -1},
                          partial = {AR_PARTIAL_SUM, 0};

static view view_of(const ar_plan *p, const ar_config *c, size_t layer)
{
    return (view){.p = p, .c = c, .f = ari_family_of(c->arch), .layer = layer, .stream = replicated};
}

static const char *path_of(const view *v, char path[AR_PLAN_GLOB], ari_role role)
{
    char number[24];
    snprintf(number, sizeof number, "%zu", v->layer);
    ari_role_path(path, AR_PLAN_GLOB, v->c->arch, number, role);
    return path;
}
#define PATH(v, role) path_of((v), (char[AR_PLAN_GLOB]){0}, (role))

static const char *file_of(const ar_plan *p)
{
    return p->file ? p->file : "plan";
}

/* Whether both hold the same numbers on every rank: PyTorch's Replicate is R or I. */
static bool same(ar_placement a, ar_placement b)
{
    const bool whole = a.kind == AR_REPLICATE || a.kind == AR_INVARIANT;
    return (whole && (b.kind == AR_REPLICATE || b.kind == AR_INVARIANT)) || ar_placement_same(a, b, 3);
}

/* --- styles ------------------------------------------------------------------------------------------------------- */

static ar_style style_of(const view *v, ari_role role)
{
    return ari_plan_style_of(v->p, v->c->arch, role, PATH(v, role));
}

static ar_status misfit(const view *v, ari_role role, const char *fits)
{
    return ar_error_set(AR_ERR_UNSUPPORTED, "%s: %s is %s; %s", ARI_SHOW(file_of(v->p)), PATH(v, role),
                        ar_style_name(style_of(v, role)), fits);
}

/* The first and the second linear layer of an attention or an MLP, and those that share the first one's input. */
typedef struct pair {
    ari_role first[3], second;
    int n;
} pair;

static pair pair_of(const ari_family *f, bool attention)
{
    static const ari_role of_attention[] = {ARI_QKV, ARI_Q, ARI_K, ARI_V}, of_mlp[] = {ARI_FIRST, ARI_GATE, ARI_UP};
    const ari_role *all = attention ? of_attention : of_mlp;
    pair s = {.second = attention ? ARI_OUT : ARI_DOWN};
    for (size_t i = 0; i < (attention ? 4u : 3u); i++) {
        if (ari_part_path(f, all[i]))
            s.first[s.n++] = all[i];
    }
    return s;
}

/* The style that the first layers have together. */
static ar_status first_style(const view *v, const pair *s, ar_style *style)
{
    *style = style_of(v, s->first[0]);
    for (int i = 1; i < s->n; i++) {
        const ar_style other = style_of(v, s->first[i]);
        if (other != *style)
            return ar_error_set(AR_ERR_UNSUPPORTED, "%s: %s is %s, but %s, which has the same input, %s; give both one",
                                ARI_SHOW(file_of(v->p)), PATH(v, s->first[i]), ar_style_name(other),
                                PATH(v, s->first[0]), ar_style_name(*style));
    }
    return AR_OK;
}

static ar_status pair_misfit(const view *v, const pair *s, const char *fits)
{
    return ar_error_set(AR_ERR_UNSUPPORTED, "%s: %s is %s and %s behind it %s; %s", ARI_SHOW(file_of(v->p)),
                        PATH(v, s->first[0]), ar_style_name(style_of(v, s->first[0])), PATH(v, s->second),
                        ar_style_name(style_of(v, s->second)), fits);
}

static const ar_plan_rule *rule_of(const view *v, ari_role role, bool prepares)
{
    return ari_plan_rule_of(v->p, v->c->arch, PATH(v, role), prepares);
}

/* Whether the second layer leaves its partial sums, and the module around it does not add them up either. */
static bool leaves_partial(const view *v, ari_role second, ari_role module)
{
    const ar_plan_rule *rule = rule_of(v, second, false), *around = rule_of(v, module, true);
    const bool left = rule && rule->output.given && rule->output.to.kind == AR_PARTIAL_SUM;
    return left && !(around && around->output.given && around->output.from.kind == AR_PARTIAL_SUM &&
                     around->output.to.kind != AR_PARTIAL_SUM);
}

static ar_status split_attention(const view *v, ar_block_split *split)
{
    const pair s = pair_of(v->f, true);
    const ar_style second = style_of(v, s.second);
    ar_style first;
    AR_TRY(first_style(v, &s, &first));
    split->attention_whole = first == AR_STYLE_REPLICATE && second == AR_STYLE_REPLICATE;
    if (!split->attention_whole && (first != AR_STYLE_COLWISE || second != AR_STYLE_ROWWISE))
        return pair_misfit(v, &s, "colwise then rowwise, or both replicate, are possible in an attention");
    split->attention_partial = second == AR_STYLE_ROWWISE && leaves_partial(v, s.second, ARI_ATTENTION);
    return AR_OK;
}

static ar_status split_mlp(const view *v, ar_block_split *split)
{
    const pair s = pair_of(v->f, false);
    const ar_style second = style_of(v, s.second);
    ar_style first;
    AR_TRY(first_style(v, &s, &first));
    if (first == AR_STYLE_COLWISE && second == AR_STYLE_ROWWISE)
        split->mlp = AR_MLP_COLUMN_ROW;
    else if (first == AR_STYLE_ROWWISE && second == AR_STYLE_COLWISE)
        split->mlp = AR_MLP_ROW_COLUMN;
    else if (first == AR_STYLE_REPLICATE && second == AR_STYLE_REPLICATE)
        split->mlp = AR_MLP_WHOLE;
    else
        return pair_misfit(v, &s,
                           "colwise then rowwise, rowwise then colwise, or both replicate, are possible in an MLP");
    split->mlp_partial = split->mlp == AR_MLP_COLUMN_ROW && leaves_partial(v, s.second, ARI_MLP);
    return AR_OK;
}

ar_status ar_plan_block(const ar_plan *p, const ar_config *c, size_t layer, ar_block_split *split)
{
    const view v = view_of(p, c, layer);
    *split = (ar_block_split){.mlp = p->mlp_order};
    if (ari_plan_is_default(p))
        return AR_OK;
    AR_TRY(split_attention(&v, split));
    return split_mlp(&v, split);
}

static ar_status split_head(const view *v, ar_head_split *split)
{
    const ar_style tokens = style_of(v, ARI_TOKENS), head = style_of(v, ARI_HEAD);
    const ar_plan_rule *rule = rule_of(v, ARI_HEAD, false);
    if (head != AR_STYLE_VOCAB && head != AR_STYLE_REPLICATE)
        return misfit(v, ARI_HEAD, "vocab (colwise) and replicate are possible");
    if (v->c->tied && head != tokens)
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "%s: %s is %s, but its weight is that of %s, which is %s; give both vocab or replicate",
                            ARI_SHOW(file_of(v->p)), PATH(v, ARI_HEAD), ar_style_name(head), PATH(v, ARI_TOKENS),
                            ar_style_name(tokens));
    const bool gathers = rule && rule->output.given && same(rule->output.to, replicated);
    *split = head == AR_STYLE_REPLICATE ? AR_HEAD_WHOLE : gathers ? AR_HEAD_GATHER : AR_HEAD_VOCAB;
    return AR_OK;
}

ar_status ar_plan_outer(const ar_plan *p, const ar_config *c, ar_outer_split *split)
{
    const view v = view_of(p, c, ARI_NO_BLOCK);
    const ar_style tokens = style_of(&v, ARI_TOKENS);
    *split = (ar_outer_split){.tokens = AR_EMBEDDING_VOCAB, .head = AR_HEAD_VOCAB};
    if (tokens == AR_STYLE_HIDDEN)
        split->tokens = AR_EMBEDDING_HIDDEN;
    else if (tokens == AR_STYLE_REPLICATE)
        split->tokens = AR_EMBEDDING_WHOLE;
    else if (tokens != AR_STYLE_VOCAB)
        return misfit(&v, ARI_TOKENS, "vocab (rowwise), hidden (colwise) and replicate are possible");
    return ari_part_path(v.f, ARI_HEAD) ? split_head(&v, &split->head) : AR_OK;
}

/* --- norms, and what has no choice -------------------------------------------------------------------------------- */

static ar_status check_norm(const view *v, ari_role role, bool sequence)
{
    const bool all = ar_plan_sequence(v->p);
    const ar_style style = style_of(v, role);
    if (style != AR_STYLE_REPLICATE && style != AR_STYLE_SEQUENCE)
        return misfit(v, role, "a norm is replicate or sequence");
    if (all != (style == AR_STYLE_SEQUENCE))
        return misfit(v, role, "a norm of the plan is in sequence style: give all of them that style, or none");
    if (all && !sequence)
        return ar_error_set(AR_ERR_ARG, "%s: %s is in sequence style, which needs sequence parallelism (sp)",
                            ARI_SHOW(file_of(v->p)), PATH(v, role));
    return AR_OK;
}

/* --- declared placements ------------------------------------------------------------------------------------------ */

typedef struct placement_text {
    char text[AR_PLACEMENT_TEXT];
} placement_text;
#define SHOW(p) ar_placement_text((placement_text){0}.text, (p))

static ar_status wrong(const view *v, const ar_plan_rule *rule, ari_role role, const char *what, ar_placement declared,
                       const char *fits)
{
    return ar_error_set(AR_ERR_UNSUPPORTED, "%s: rule %zu, '%s': %s of %s is declared %s; %s", ARI_SHOW(file_of(v->p)),
                        (size_t)(rule - v->p->rule) + 1, ARI_SHOW(rule->glob), what, PATH(v, role), SHOW(declared),
                        fits);
}

static ar_status expect(const view *v, const ar_plan_rule *rule, ari_role role, const char *what, ar_placement declared,
                        ar_placement fits)
{
    char text[2 * AR_PLACEMENT_TEXT];
    if (same(declared, fits))
        return AR_OK;
    snprintf(text, sizeof text, "%s would fit", SHOW(fits));
    return wrong(v, rule, role, what, declared, text);
}

/* What a rule says of the first input, by position or as Hugging Face and PyTorch's examples call it. */
static const ar_plan_value *first_input(const ar_plan_rule *rule)
{
    for (int i = 0; i < AR_PLAN_ARGUMENTS; i++) {
        const ar_plan_value *in = &rule->input[i];
        const bool named = strcmp(in->name, "hidden_states") == 0 || strcmp(in->name, "x") == 0;
        if (in->given && (named || (i == 0 && !in->name[0])))
            return in;
    }
    return NULL;
}

/* An attention or an MLP gathers its input once for all its children, and adds up what its last layer left. */
static ar_status check_module(const view *v, ari_role module, bool partial_inside)
{
    const ar_plan_rule *rule = rule_of(v, module, true);
    if (!rule)
        return AR_OK;
    const ar_plan_value *in = first_input(rule);
    for (int i = 0; i < AR_PLAN_ARGUMENTS; i++) {
        const ar_plan_value *other = &rule->input[i];
        if (!other->given || other == in)
            continue;
        AR_TRY(expect(v, rule, module, "another input than the first", other->from, replicated));
        AR_TRY(expect(v, rule, module, "another input than the first", other->to, replicated));
    }
    if (in) {
        AR_TRY(expect(v, rule, module, "the input that arrives", in->from, v->stream));
        AR_TRY(expect(v, rule, module, "the input that is wanted", in->to, replicated));
    }
    if (!rule->output.given)
        return AR_OK;
    AR_TRY(
        expect(v, rule, module, "the output that there is", rule->output.from, partial_inside ? partial : v->stream));
    return expect(v, rule, module, "the output that is wanted", rule->output.to, v->stream);
}

/* Of q, k, v, or the first layers of an MLP: their module may have gathered the input. */
static ar_placement arrives_inside(const view *v, ari_role module)
{
    const ar_plan_rule *rule = rule_of(v, module, true);
    const ar_plan_value *in = rule ? first_input(rule) : NULL;
    return in ? in->to : v->stream;
}

static bool row_leaves_partial(const ar_plan_rule *rule)
{
    return rule->output.given && rule->output.to.kind == AR_PARTIAL_SUM;
}

static ar_status check_pair(const view *v, bool attention)
{
    const pair s = pair_of(v->f, attention);
    const ari_role module = attention ? ARI_ATTENTION : ARI_MLP;
    const ar_style first = style_of(v, s.first[0]), second = style_of(v, s.second);
    const ar_placement middle = first == AR_STYLE_COLWISE ? by_features : replicated;
    const ar_plan_rule *rule = rule_of(v, s.second, false);
    const bool left = rule && second == AR_STYLE_ROWWISE && first == AR_STYLE_COLWISE && row_leaves_partial(rule);
    AR_TRY(check_module(v, module, left));
    if (rule && rule->input[0].given)
        AR_TRY(expect(v, rule, s.second, "the input", rule->input[0].from, middle));
    if (rule && rule->output.given && !left)
        AR_TRY(expect(v, rule, s.second, "the output", rule->output.to, v->stream));
    if (left && v->stream.kind == AR_SHARD && leaves_partial(v, s.second, module))
        return wrong(v, rule, s.second, "the output", partial,
                     "what follows has a rank's own positions, and S(1) would fit");
    for (int i = 0; i < s.n; i++) {
        rule = rule_of(v, s.first[i], false);
        if (rule && rule->input[0].given)
            AR_TRY(expect(v, rule, s.first[i], "the input", rule->input[0].from, arrives_inside(v, module)));
        if (rule && rule->output.given)
            AR_TRY(expect(v, rule, s.first[i], "the output", rule->output.to, middle));
    }
    return AR_OK;
}

/* A part with the stream on both sides, or with `in` before it and `out` behind. */
static ar_status check_part(const view *v, ari_role role, ar_placement in, ar_placement out)
{
    const ar_plan_rule *rule = ari_part_path(v->f, role) ? rule_of(v, role, false) : NULL;
    if (rule && rule->input[0].given)
        AR_TRY(expect(v, rule, role, "the input", rule->input[0].from, in));
    return rule && rule->output.given ? expect(v, rule, role, "the output", rule->output.to, out) : AR_OK;
}

static ar_status check_block(const view *v, bool sequence)
{
    ar_block_split unused;
    AR_TRY(ar_plan_block(v->p, v->c, v->layer, &unused));
    AR_TRY(check_norm(v, ARI_NORM1, sequence));
    AR_TRY(check_norm(v, ARI_NORM2, sequence));
    AR_TRY(check_part(v, ARI_NORM1, v->stream, v->stream));
    AR_TRY(check_part(v, ARI_NORM2, v->stream, v->stream));
    AR_TRY(check_pair(v, true));
    return check_pair(v, false);
}

static ar_status check_outer(const view *v, bool sequence)
{
    ar_outer_split split;
    AR_TRY(ar_plan_outer(v->p, v->c, &split));
    if (ari_part_path(v->f, ARI_POSITIONS) && style_of(v, ARI_POSITIONS) != AR_STYLE_REPLICATE)
        return misfit(v, ARI_POSITIONS, "learned positions are replicate");
    if (ari_part_path(v->f, ARI_FINAL_NORM))
        AR_TRY(check_norm(v, ARI_FINAL_NORM, sequence));
    AR_TRY(check_part(v, ARI_TOKENS, replicated, v->stream));
    AR_TRY(check_part(v, ARI_POSITIONS, replicated, v->stream));
    AR_TRY(check_part(v, ARI_FINAL_NORM, v->stream, v->stream));
    return check_part(v, ARI_HEAD, v->stream, split.head == AR_HEAD_VOCAB ? by_features : replicated);
}

/* --- names -------------------------------------------------------------------------------------------------------- */

/* Whether the rule matches a module of its kind: parts have styles, an attention and an MLP are prepared. */
static bool matches_in(const view *v, const ar_plan_rule *rule)
{
    if (rule->style == AR_STYLE_PREPARE)
        return v->layer != ARI_NO_BLOCK && (ari_plan_matches(rule, v->c->arch, PATH(v, ARI_ATTENTION)) ||
                                            ari_plan_matches(rule, v->c->arch, PATH(v, ARI_MLP)));
    for (const ari_family_part *part = v->f->part; part->path; part++) {
        const bool here = (ari_section_of(part->role) == ARI_IN_BLOCKS) == (v->layer != ARI_NO_BLOCK);
        if (here && ari_plan_matches(rule, v->c->arch, PATH(v, part->role)))
            return true;
    }
    return false;
}

/* The part, of the first block where it is in one, whose path is nearest to the rule's; else the attention's output. */
static ari_role nearest_part(const view *v, const ar_plan_rule *rule)
{
    char path[ARI_ROLES][AR_PLAN_GLOB];
    const char *candidate[ARI_ROLES];
    size_t n = 0;
    for (const ari_family_part *part = v->f->part; part->path && n < ARI_ROLES; part++, n++) {
        view at = *v;
        at.layer = ari_section_of(part->role) == ARI_IN_BLOCKS ? 0 : ARI_NO_BLOCK;
        candidate[n] = path_of(&at, path[n], part->role);
    }
    const char *found = ari_nearest(rule->glob, candidate, n);
    for (size_t i = 0; i < n; i++) {
        if (candidate[i] == found)
            return v->f->part[i].role;
    }
    return ARI_OUT;
}

static ar_status check_glob(const ar_plan *p, const ar_config *c, const ar_plan_rule *rule)
{
    view v = view_of(p, c, ARI_NO_BLOCK);
    bool found = matches_in(&v, rule);
    for (v.layer = 0; v.layer < c->layers && !found; v.layer++)
        found = matches_in(&v, rule);
    if (found)
        return AR_OK;
    const bool prepares = rule->style == AR_STYLE_PREPARE;
    const ari_role near = prepares ? ARI_ATTENTION : nearest_part(&v, rule);
    v.layer = ari_section_of(near) == ARI_IN_BLOCKS ? 0 : ARI_NO_BLOCK;
    return ar_error_set(AR_ERR_NOT_FOUND, "%s: rule %zu, '%s': no module of %s that %s has this name; %s is one",
                        ARI_SHOW(file_of(p)), (size_t)(rule - p->rule) + 1, ARI_SHOW(rule->glob), ARI_SHOW(c->name),
                        prepares ? "has others in it and can be prepared" : "has parameters", PATH(&v, near));
}

ar_status ar_plan_check(const ar_plan *p, const ar_config *c, bool sequence)
{
    view v = view_of(p, c, ARI_NO_BLOCK);
    if (ari_plan_is_default(p))
        return AR_OK;
    v.stream = sequence ? by_tokens : replicated;
    for (size_t i = 0; i < p->rules; i++)
        AR_TRY(check_glob(p, c, &p->rule[i]));
    AR_TRY(check_outer(&v, sequence));
    for (v.layer = 0; v.layer < c->layers; v.layer++)
        AR_TRY(check_block(&v, sequence));
    return AR_OK;
}
