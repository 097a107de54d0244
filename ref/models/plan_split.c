/* SPDX-License-Identifier: Apache-2.0 */
/* What a plan makes of a model: how each part is cut, and how values are placed between the parts. What a rule declares
 * of an input or an output is believed where a value of its shape is there, as PyTorch believes it of a local tensor;
 * else it is refused. A value that keeps its placement (use_local_output false) has to be what is declared. */
#include <stdio.h>
#include <string.h>

#include "ref/core/text.h"
#include "ref/layers/parts.h"
#include "ref/models/plan.h"

/* A plan seen from one layer of a model, or (ARI_NO_BLOCK) from outside of them. */
typedef struct view {
    const ar_plan *p;
    const ar_config *c;
    const ari_family *f;
    size_t layer;
    ar_placement stream; /* of values between the modules */
    bool strict;         /* nothing is believed */
} view;
#define ARI_NO_BLOCK SIZE_MAX

static const ar_placement replicated = {AR_REPLICATE, 0};

static view view_of(const ar_plan *p, const ar_config *c, size_t layer, bool sequence)
{
    return (view){.p = p,
                  .c = c,
                  .f = ari_family_of(c->arch),
                  .layer = layer,
                  .stream = sequence ? ari_shard_tokens : replicated};
}

static const char *path_of(const view *v, char path[AR_PLAN_GLOB], ari_role role)
{
    char number[24];
    snprintf(number, sizeof number, "%zu", v->layer);
    ari_role_path(path, AR_PLAN_GLOB, v->c->arch, number, role);
    return path;
}
#define PATH(v, role) path_of((v), (char[AR_PLAN_GLOB]){0}, (role))

static const ar_plan_rule *rule_of(const view *v, ari_role role, bool prepares)
{
    return ari_plan_rule_of(v->p, v->c->arch, PATH(v, role), prepares);
}

/* --- declared placements ------------------------------------------------------------------------------------------ */

/* A placement of [b, s, features] with its dimension counted from the end. */
static ar_placement from_end(ar_placement p)
{
    if (p.kind == AR_SHARD && p.dim >= 0)
        p.dim -= 3;
    return p;
}

/* Whether a value that is placed as `there` has the shape, on each rank, of one that is placed as declared. */
static bool fits(ar_placement declared, ar_placement there)
{
    if (declared.kind == AR_PARTIAL_MAX)
        return false;
    return (declared.kind == AR_SHARD) == (there.kind == AR_SHARD) &&
           (declared.kind != AR_SHARD || declared.dim == there.dim);
}

/* As users write it. */
static const char *shown(char text[AR_PLACEMENT_TEXT], ar_placement p)
{
    if (ari_placed_by_tokens(p))
        p.dim = 1;
    return ar_placement_text(text, p);
}
#define SHOW(p) shown((char[AR_PLACEMENT_TEXT]){0}, (p))

static ar_status wrong(const view *v, const ar_plan_rule *rule, ari_role role, const char *what, ar_placement declared,
                       const char *would_fit)
{
    return ar_error_set(AR_ERR_UNSUPPORTED, "%s: rule %zu, '%s': %s of %s is declared %s; %s would fit",
                        ARI_SHOW(ari_plan_file(v->p)), (size_t)(rule - v->p->rule) + 1, ARI_SHOW(rule->glob), what,
                        PATH(v, role), SHOW(declared), would_fit);
}

/* Whether a value that `maker` left as `there` can be taken for one that is placed as declared. */
static bool passes(const view *v, const ar_plan_rule *maker, ar_placement declared, ar_placement there)
{
    const bool known = v->strict || (maker && maker->global_output);
    return known ? ari_placed_alike(declared, there) : fits(declared, there);
}

/* *p = what is declared of a value that `maker` left, placed as `there`. */
static ar_status believe(const view *v, const ar_plan_rule *rule, ari_role role, const char *what,
                         ar_placement declared, const ar_plan_rule *maker, ar_placement there, ar_placement *p)
{
    *p = from_end(declared);
    return passes(v, maker, *p, there) ? AR_OK : wrong(v, rule, role, what, declared, SHOW(there));
}

/* *p = what is declared that a value is to be made: whole, shards of features, or of tokens where that is possible. */
static ar_status wanted(const view *v, const ar_plan_rule *rule, ari_role role, const char *what, ar_placement declared,
                        bool tokens, ar_placement *p)
{
    *p = from_end(declared);
    if (ari_placed_whole(*p) || ari_placed_by_features(*p) || (tokens && ari_placed_by_tokens(*p)))
        return AR_OK;
    return wrong(v, rule, role, what, declared, tokens ? "R, S(1) or S(-1)" : "R or S(-1)");
}

/* Of a part that has no choice: what its rule declares is what is there. */
static ar_status check_declared(const view *v, const ar_plan_rule *rule, ari_role role, ar_placement in,
                                ar_placement out)
{
    if (rule->input[0].given && !ari_placed_alike(from_end(rule->input[0].from), in))
        return wrong(v, rule, role, "the input", rule->input[0].from, SHOW(in));
    if (rule->output.given && !ari_placed_alike(from_end(rule->output.to), out))
        return wrong(v, rule, role, "the output", rule->output.to, SHOW(out));
    return AR_OK;
}

/* Whether values can be placed by tokens here: a sequence then divides. */
static bool has_tokens(const view *v)
{
    return ari_placed_by_tokens(v->stream);
}

/* --- styles ------------------------------------------------------------------------------------------------------- */

static ar_style style_of(const view *v, ari_role role)
{
    return ari_plan_style_of(v->p, v->c->arch, role, PATH(v, role));
}

static ar_status misfit(const view *v, ari_role role, const char *fits)
{
    return ar_error_set(AR_ERR_UNSUPPORTED, "%s: %s is %s; %s", ARI_SHOW(ari_plan_file(v->p)), PATH(v, role),
                        ar_style_name(style_of(v, role)), fits);
}

/* --- linear layers ------------------------------------------------------------------------------------------------ */

static ar_placement natural_input(ar_style style)
{
    return style == AR_STYLE_ROWWISE ? ari_shard_features : replicated;
}

static ar_placement natural_output(ar_style style)
{
    return style == AR_STYLE_COLWISE ? ari_shard_features : replicated;
}

/* What is declared of the layer's input, where a value that `maker` left, placed as `there`, arrives; `else_from`
 * without a declaration. */
static ar_status input_of(const view *v, ari_role role, const ar_plan_rule *maker, ar_placement there,
                          ar_placement else_from, ar_placement *from)
{
    const ar_plan_rule *rule = rule_of(v, role, false);
    *from = else_from;
    if (!rule || !rule->input[0].given)
        return AR_OK;
    return believe(v, rule, role, "the input", rule->input[0].from, maker, there, from);
}

/* What its output is to be; `else_to` without a declaration. Terms of a sum are what rowwise layers have. */
static ar_status output_of(const view *v, ari_role role, ar_style style, bool tokens, ar_placement else_to,
                           ar_placement *to)
{
    const ar_plan_rule *rule = rule_of(v, role, false);
    *to = else_to;
    if (!rule || !rule->output.given)
        return AR_OK;
    *to = rule->output.to;
    if (style == AR_STYLE_ROWWISE && to->kind == AR_PARTIAL_SUM)
        return AR_OK;
    return wanted(v, rule, role, "the output", rule->output.to, tokens, to);
}

/* --- attention, MLP ----------------------------------------------------------------------------------------------- */

/* The layers of an attention or an MLP: those that share its input, and the last one. norm: before it. */
typedef struct branch {
    ari_role module, norm, first[3], second;
    int n;
} branch;

static branch branch_of(const ari_family *f, bool attention)
{
    static const ari_role of_attention[] = {ARI_QKV, ARI_Q, ARI_K, ARI_V},
                          of_mlp[] = {ARI_FIRST, ARI_GATE_UP, ARI_GATE, ARI_UP};
    const ari_role *all = attention ? of_attention : of_mlp;
    branch s = {.module = attention ? ARI_ATTENTION : ARI_MLP,
                .norm = attention ? ARI_NORM1 : ARI_NORM2,
                .second = attention ? ARI_OUT : ARI_DOWN};
    for (size_t i = 0; i < 4; i++) {
        if (ari_part_path(f, all[i]))
            s.first[s.n++] = all[i];
    }
    return s;
}

/* The style of a linear layer in a block. */
static ar_status linear_style(const view *v, ari_role role, ar_style *style)
{
    *style = style_of(v, role);
    if (*style == AR_STYLE_COLWISE || *style == AR_STYLE_ROWWISE || *style == AR_STYLE_REPLICATE)
        return AR_OK;
    return misfit(v, role, "colwise, rowwise and replicate are possible");
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

/* Masks and positions are whole. */
static ar_status check_other_inputs(const view *v, const ar_plan_rule *rule, ari_role module,
                                    const ar_plan_value *first)
{
    for (int i = 0; i < AR_PLAN_ARGUMENTS; i++) {
        const ar_plan_value *other = &rule->input[i];
        if (!other->given || other == first)
            continue;
        const ar_placement odd = ari_placed_whole(other->from) ? other->to : other->from;
        if (!ari_placed_whole(odd))
            return wrong(v, rule, module, "another input than the first", odd, "R");
    }
    return AR_OK;
}

/* What the module's rule makes of its input, which arrives as `arrives`: for all its layers at once. *maker: whose rule
 * says what they get. */
static ar_status enter(const view *v, const branch *b, ar_placement arrives, ar_hop *hop, const ar_plan_rule **maker)
{
    const bool before = ari_part_path(v->f, b->norm) && ar_config_norm_before(v->c);
    const ar_plan_rule *rule = rule_of(v, b->module, true), *norm = before ? rule_of(v, b->norm, false) : NULL;
    const ar_plan_value *in = rule ? first_input(rule) : NULL;
    *hop = (ar_hop){arrives, arrives};
    *maker = in ? rule : norm;
    if (rule)
        AR_TRY(check_other_inputs(v, rule, b->module, in));
    if (!in)
        return AR_OK;
    AR_TRY(believe(v, rule, b->module, "the input that arrives", in->from, norm, arrives, &hop->from));
    return wanted(v, rule, b->module, "the input that is wanted", in->to, has_tokens(v), &hop->to);
}

/* The first layers have one style, one input and one output: they are one product. */
static ar_status split_first(const view *v, const branch *b, const ar_plan_rule *maker, ar_placement there,
                             ar_linear_split *split)
{
    const bool tokens = has_tokens(v) && b->module == ARI_MLP; /* a query sees the keys of all tokens */
    for (int i = 0; i < b->n; i++) {
        const ari_role role = b->first[i];
        ar_linear_split s;
        AR_TRY(linear_style(v, role, &s.style));
        AR_TRY(input_of(v, role, maker, there, there, &s.from));
        AR_TRY(output_of(v, role, s.style, tokens, natural_output(s.style), &s.to));
        if (i == 0)
            *split = s;
        if (s.style != split->style)
            return ar_error_set(AR_ERR_UNSUPPORTED, "%s: %s is %s, but %s, which has the same input, %s; give both one",
                                ARI_SHOW(ari_plan_file(v->p)), PATH(v, role), ar_style_name(s.style),
                                PATH(v, b->first[0]), ar_style_name(split->style));
        if (!ari_placed_alike(s.from, split->from) || !ari_placed_alike(s.to, split->to))
            return ar_error_set(AR_ERR_UNSUPPORTED,
                                "%s: %s has input %s and output %s, but %s, which is one product with it, %s and %s; "
                                "give both the same",
                                ARI_SHOW(ari_plan_file(v->p)), PATH(v, role), SHOW(s.from), SHOW(s.to),
                                PATH(v, b->first[0]), SHOW(split->from), SHOW(split->to));
    }
    return AR_OK;
}

/* The last layer's style and input. Inside of a module nothing is moved that no rule says, as in PyTorch: without a
 * declaration the layer takes what is its style's. */
static ar_status split_second(const view *v, const branch *b, const ar_linear_split *first, ar_linear_split *split)
{
    const ar_placement there = first->to;
    const ar_plan_rule *maker = rule_of(v, b->first[0], false);
    AR_TRY(linear_style(v, b->second, &split->style));
    AR_TRY(input_of(v, b->second, maker, there, natural_input(split->style), &split->from));
    if (passes(v, maker, split->from, there))
        return AR_OK;
    return ar_error_set(AR_ERR_UNSUPPORTED,
                        "%s: %s is %s and %s behind it %s, which takes %s where %s arrives; declare its input %s, or "
                        "the output of the former %s",
                        ARI_SHOW(ari_plan_file(v->p)), PATH(v, b->first[0]), ar_style_name(first->style),
                        PATH(v, b->second), ar_style_name(split->style), SHOW(split->from), SHOW(there), SHOW(there),
                        SHOW(split->from));
}

/* The last layer's output, and what the module's rule makes of it. */
static ar_status leave(const view *v, const branch *b, ar_linear_split *second, ar_hop *hop)
{
    const ar_plan_rule *around = rule_of(v, b->module, true), *own = rule_of(v, b->second, false);
    const bool prepared = around && around->output.given;
    ar_placement natural = v->stream;
    *hop = (ar_hop){v->stream, v->stream};
    if (prepared) {
        AR_TRY(wanted(v, around, b->module, "the output that is wanted", around->output.to, has_tokens(v), &hop->to));
        if (!fits(hop->to, v->stream))
            return wrong(v, around, b->module, "the output that is wanted", around->output.to, SHOW(v->stream));
        hop->from = from_end(around->output.from);
        natural = hop->from.kind == AR_PARTIAL_SUM ? replicated : hop->from;
    }
    AR_TRY(output_of(v, b->second, second->style, has_tokens(v), natural, &second->to));
    if (prepared)
        return believe(v, around, b->module, "the output that there is", around->output.from, own, second->to,
                       &hop->from);
    return passes(v, own, second->to, v->stream)
               ? AR_OK
               : wrong(v, own, b->second, "the output", own->output.to, SHOW(v->stream));
}

/* One redistribution instead of two, where the first makes what the second begins with. */
static void join(ar_branch_split *s)
{
    if (ari_placed_alike(s->enter.to, s->first.from)) {
        s->first.from = s->enter.from;
        s->enter.to = s->enter.from;
    }
    if (ari_placed_alike(s->second.to, s->leave.from)) {
        s->second.to = s->leave.to;
        s->leave.from = s->leave.to;
    }
}

static ar_status split_branch(const view *v, bool attention, ar_placement arrives, ar_branch_split *s)
{
    const branch b = branch_of(v->f, attention);
    const ar_plan_rule *maker = NULL;
    AR_TRY(enter(v, &b, arrives, &s->enter, &maker));
    AR_TRY(split_first(v, &b, maker, s->enter.to, &s->first));
    AR_TRY(split_second(v, &b, &s->first, &s->second));
    AR_TRY(leave(v, &b, &s->second, &s->leave));
    join(s);
    return AR_OK;
}

/* --- norms -------------------------------------------------------------------------------------------------------- */

/* What a norm works on. A plan without norms in sequence style leaves them where the values between the branches
 * are. */
static ar_status split_norm(const view *v, ari_role role, ar_placement *at)
{
    const ar_style style = style_of(v, role);
    const ar_plan_rule *rule = rule_of(v, role, false);
    if (style != AR_STYLE_REPLICATE && style != AR_STYLE_SEQUENCE)
        return misfit(v, role, "a norm is replicate or sequence");
    if (style == AR_STYLE_SEQUENCE && !has_tokens(v))
        return ar_error_set(AR_ERR_ARG, "%s: %s is in sequence style, which needs sequence parallelism (sp)",
                            ARI_SHOW(ari_plan_file(v->p)), PATH(v, role));
    *at = style == AR_STYLE_SEQUENCE || !ar_plan_sequence(v->p) ? v->stream : replicated;
    return rule ? check_declared(v, rule, role, v->stream, *at) : AR_OK;
}

/* Norms whose place follows from what they are of: heads where those are, what is added to the residual where that is. */
static const ari_role where_fixed[] = {ARI_Q_NORM, ARI_K_NORM, ARI_ATTENTION_NORM, ARI_MLP_NORM};

static ar_status check_fixed_norm(const view *v, ari_role role)
{
    ar_placement at = v->stream;
    if (!ari_part_path(v->f, role) || !ari_part_present(v->c, role))
        return AR_OK;
    if (role == ARI_Q_NORM || role == ARI_K_NORM)
        return style_of(v, role) == AR_STYLE_REPLICATE ? AR_OK : misfit(v, role, "a norm of heads is replicate");
    AR_TRY(split_norm(v, role, &at));
    return ari_placed_alike(at, v->stream)
               ? AR_OK
               : misfit(v, role, "what is added to the residual is in sequence style, as that is");
}

static ar_status split_block(const view *v, ar_block_split *split)
{
    split->norm1 = split->norm2 = v->stream;
    for (size_t i = 0; i < sizeof where_fixed / sizeof *where_fixed; i++)
        AR_TRY(check_fixed_norm(v, where_fixed[i]));
    if (ar_config_norm_before(v->c)) {
        AR_TRY(split_norm(v, ARI_NORM1, &split->norm1));
        AR_TRY(split_norm(v, ARI_NORM2, &split->norm2));
    }
    AR_TRY(split_branch(v, true, split->norm1, &split->attention));
    return split_branch(v, false, split->norm2, &split->mlp);
}

ar_status ar_plan_block(const ar_plan *p, const ar_config *c, size_t layer, bool sequence, ar_block_split *split)
{
    const view v = view_of(p, c, layer, sequence);
    const bool column_row = p->mlp_order == AR_MLP_COLUMN_ROW;
    if (ari_plan_is_default(p)) {
        const ar_branch_split usual = ar_branch_of(AR_STYLE_COLWISE, AR_STYLE_ROWWISE, v.stream);
        const ar_branch_split other = ar_branch_of(AR_STYLE_ROWWISE, AR_STYLE_COLWISE, v.stream);
        *split = (ar_block_split){
            .norm1 = v.stream, .norm2 = v.stream, .attention = usual, .mlp = column_row ? usual : other};
        return AR_OK;
    }
    return split_block(&v, split);
}

/* --- outside of the blocks ---------------------------------------------------------------------------------------- */

/* Whether a tied head can be cut as the table is: along the vocabulary, along what the head sums over, or not. */
static bool cut_alike(ar_style tokens, ar_style head)
{
    return tokens == head || (tokens == AR_STYLE_HIDDEN && head == AR_STYLE_ROWWISE);
}

static ar_status split_head(const view *v, ar_placement arrives, ar_linear_split *split)
{
    const ar_style tokens = style_of(v, ARI_TOKENS), head = style_of(v, ARI_HEAD);
    if (head != AR_STYLE_VOCAB && head != AR_STYLE_ROWWISE && head != AR_STYLE_REPLICATE)
        return misfit(v, ARI_HEAD, "vocab (colwise), rowwise and replicate are possible");
    if (v->c->tied && !cut_alike(tokens, head))
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "%s: %s is %s, but its weight is that of %s, which is %s; give both vocab or replicate, or "
                            "the former rowwise and the latter hidden",
                            ARI_SHOW(ari_plan_file(v->p)), PATH(v, ARI_HEAD), ar_style_name(head), PATH(v, ARI_TOKENS),
                            ar_style_name(tokens));
    split->style = head == AR_STYLE_VOCAB ? AR_STYLE_COLWISE : head;
    const ar_plan_rule *own = rule_of(v, ARI_HEAD, false);
    const ar_plan_rule *norm = ari_part_path(v->f, ARI_FINAL_NORM) ? rule_of(v, ARI_FINAL_NORM, false) : NULL;
    AR_TRY(input_of(v, ARI_HEAD, norm, arrives, arrives, &split->from));
    AR_TRY(output_of(v, ARI_HEAD, split->style, false, natural_output(split->style), &split->to));
    return split->to.kind != AR_PARTIAL_SUM || passes(v, own, split->to, replicated)
               ? AR_OK
               : wrong(v, own, ARI_HEAD, "the output", own->output.to, "R or S(-1)");
}

static ar_status split_outer(const view *v, ar_outer_split *split)
{
    const ar_style tokens = style_of(v, ARI_TOKENS);
    *split = (ar_outer_split){.tokens = AR_EMBEDDING_VOCAB, .final_norm = v->stream};
    if (tokens == AR_STYLE_HIDDEN)
        split->tokens = AR_EMBEDDING_HIDDEN;
    else if (tokens == AR_STYLE_REPLICATE)
        split->tokens = AR_EMBEDDING_WHOLE;
    else if (tokens != AR_STYLE_VOCAB)
        return misfit(v, ARI_TOKENS, "vocab (rowwise), hidden (colwise) and replicate are possible");
    if (ari_part_path(v->f, ARI_FINAL_NORM))
        AR_TRY(split_norm(v, ARI_FINAL_NORM, &split->final_norm));
    return ari_part_path(v->f, ARI_HEAD) ? split_head(v, split->final_norm, &split->head) : AR_OK;
}

ar_status ar_plan_outer(const ar_plan *p, const ar_config *c, bool sequence, ar_outer_split *split)
{
    const view v = view_of(p, c, ARI_NO_BLOCK, sequence);
    return split_outer(&v, split);
}

static bool has_placement(const ar_plan_value *v, ar_placement p)
{
    return v->given && (ari_placed_alike(from_end(v->from), p) || ari_placed_alike(from_end(v->to), p));
}

bool ar_plan_by_tokens(const ar_plan *p, int tp, bool sp)
{
    bool any = ar_plan_sequence(p);
    for (size_t i = 0; i < p->rules && !any; i++) {
        const ar_plan_rule *rule = &p->rule[i];
        any = has_placement(&rule->output, ari_shard_tokens);
        for (int k = 0; k < AR_PLAN_ARGUMENTS && !any; k++)
            any = has_placement(&rule->input[k], ari_shard_tokens);
    }
    return tp > 1 ? sp : any;
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
    view v = view_of(p, c, ARI_NO_BLOCK, false);
    bool found = matches_in(&v, rule);
    for (v.layer = 0; v.layer < c->layers && !found; v.layer++)
        found = matches_in(&v, rule);
    if (found)
        return AR_OK;
    const bool prepares = rule->style == AR_STYLE_PREPARE;
    const ari_role near = prepares ? ARI_ATTENTION : nearest_part(&v, rule);
    v.layer = ari_section_of(near) == ARI_IN_BLOCKS ? 0 : ARI_NO_BLOCK;
    return ar_error_set(AR_ERR_NOT_FOUND, "%s: rule %zu, '%s': no module of %s that %s has this name; %s is one",
                        ARI_SHOW(ari_plan_file(p)), (size_t)(rule - p->rule) + 1, ARI_SHOW(rule->glob),
                        ARI_SHOW(c->name), prepares ? "has others in it and can be prepared" : "has parameters",
                        PATH(&v, near));
}

/* Tables have the ids, which are whole, on one side. */
static ar_status check_table(const view *v, ari_role role)
{
    const ar_plan_rule *rule = ari_part_path(v->f, role) ? rule_of(v, role, false) : NULL;
    if (rule && role == ARI_POSITIONS && style_of(v, role) != AR_STYLE_REPLICATE)
        return misfit(v, role, "learned positions are replicate");
    return rule ? check_declared(v, rule, role, replicated, v->stream) : AR_OK;
}

static ar_status check_splits(view v)
{
    ar_outer_split outer;
    ar_block_split block;
    AR_TRY(split_outer(&v, &outer));
    AR_TRY(check_table(&v, ARI_TOKENS));
    AR_TRY(check_table(&v, ARI_POSITIONS));
    for (v.layer = 0; v.layer < v.c->layers; v.layer++)
        AR_TRY(split_block(&v, &block));
    return AR_OK;
}

ar_status ar_plan_check(const ar_plan *p, const ar_config *c, bool sequence)
{
    if (ari_plan_is_default(p))
        return AR_OK;
    for (size_t i = 0; i < p->rules; i++)
        AR_TRY(check_glob(p, c, &p->rule[i]));
    return check_splits(view_of(p, c, ARI_NO_BLOCK, sequence));
}

ar_status ar_plan_check_declared(const ar_plan *p, const ar_config *c, bool sequence)
{
    view v = view_of(p, c, ARI_NO_BLOCK, sequence);
    v.strict = true;
    return ari_plan_is_default(p) ? AR_OK : check_splits(v);
}
