/* SPDX-License-Identifier: Apache-2.0 */
/* Derives a plan's split of a model: the split of each part, and the placement of values between parts. */
#include <stdio.h>
#include <string.h>

#include "anyrank/config.h"
#include "ref/core/text.h"
#include "ref/layers/layers_private.h"
#include "ref/layers/parts.h"
#include "ref/models/plan.h"
#include "ref/models/plan_private.h"

/* A plan as it applies to one layer of a model or, with ARI_NO_BLOCK, outside of the layers. */
typedef struct view {
    const ar_plan *p;
    const ar_config *c;
    const ari_family *f;
    size_t layer;
    ar_placement stream; /* placement of values between the modules */
    bool strict;         /* nothing is believed */
} view;
#define ARI_NO_BLOCK SIZE_MAX

static view view_of(const ar_plan *p, const ar_config *c, size_t layer, bool sequence)
{
    return (view){.p = p,
                  .c = c,
                  .f = ari_family_of(c->arch),
                  .layer = layer,
                  .stream = sequence ? ari_shard_tokens : ari_replicated};
}

/* True if values can be sharded by tokens here: a sequence then divides. */
static bool has_tokens(const view *v)
{
    return ari_placed_by_tokens(v->stream);
}

/* Returns the rule of a part, or of a module with several parts, whose input is prepared. */
static ari_ruled ruled_part(const view *v, ari_role role)
{
    ari_ruled m = {.plan = v->p, .strict = v->strict};
    char number[24];
    snprintf(number, sizeof number, "%zu", v->layer);
    ari_role_path(m.name, sizeof m.name, v->c->arch, number, role);
    m.rule = ari_plan_rule_of(v->p, v->c->arch, number, role);
    m.style = ari_plan_style_of(v->p, role, m.rule);
    return m;
}

/* Checks, for a part without a choice, that its rule declares the actual placement. */
static ar_status check_declared(const ari_ruled *part, ar_placement input_placement, ar_placement out)
{
    ari_ruled m = *part;
    ar_placement declared;
    m.strict = true;
    AR_TRY(ari_ruled_input(&m, NULL, input_placement, input_placement, &declared));
    return m.rule && m.rule->output.is_declared
               ? ari_ruled_believe(&m, "the output", m.rule->output.dst, NULL, out, &declared)
               : AR_OK;
}

/* --- attention, MLP ----------------------------------------------------------------------------------------------- */

/* The layers of an attention or an MLP: those that share its input, and the last one. norm: the norm before it. */
typedef struct branch {
    ari_role module, norm, first_roles[3], second;
    int n;
} branch;

static branch branch_of(const view *v, bool attention)
{
    static const ari_role of_attention[] = {ARI_QKV, ARI_Q, ARI_Q_B, ARI_K, ARI_V, ARI_KV_B},
                          of_mlp[] = {ARI_FIRST, ARI_GATE_UP, ARI_GATE, ARI_UP};
    const ari_role *candidates = attention ? of_attention : of_mlp;
    const bool first_norm = attention || v->c->residual == AR_RESIDUAL_PARALLEL_ONE_NORM;
    branch s = {.module = attention ? ARI_ATTENTION : ARI_MLP,
                .norm = first_norm ? ARI_NORM1 : ARI_NORM2,
                .second = attention ? ARI_OUT : ARI_DOWN};
    for (size_t i = 0; i < (attention ? 6 : 4); i++) {
        if (ari_part_path(v->f, candidates[i]) && ari_part_present(v->c, candidates[i]))
            s.first_roles[s.n++] = candidates[i];
    }
    return s;
}

/* A rule's entry for the first input, by position or by the name that Hugging Face and PyTorch's examples use. */
static const ar_plan_value *first_input(const ar_plan_rule *rule)
{
    for (int i = 0; i < AR_PLAN_ARGUMENTS; i++) {
        const ar_plan_value *input = &rule->input[i];
        const bool named = strcmp(input->name, "hidden_states") == 0 || strcmp(input->name, "x") == 0;
        if (input->is_declared && (named || (i == 0 && !input->name[0])))
            return input;
    }
    return NULL;
}

/* Checks that masks and positions are replicated. */
static ar_status check_other_inputs(const ari_ruled *m, const ar_plan_value *first_argument)
{
    for (int i = 0; i < AR_PLAN_ARGUMENTS; i++) {
        const ar_plan_value *argument = &m->rule->input[i];
        if (!argument->is_declared || argument == first_argument)
            continue;
        const ar_placement odd = ari_placed_full(argument->src) ? argument->dst : argument->src;
        if (!ari_placed_full(odd))
            return ari_ruled_wrong(m, "another input than the first", odd, "R would fit");
    }
    return AR_OK;
}

/* Applies the module's rule to its input, which has placement `arrives`, for all its layers at once. *maker: the rule
 * that determines the layers' input. */
static ar_status split_input(const view *v, ari_role before, const ari_ruled *m, ar_placement arrives,
                             ar_tp_redistribution *change, const ar_plan_rule **maker)
{
    const bool normed = ari_part_path(v->f, before) && ar_config_norm_before(v->c);
    const ar_plan_rule *norm = normed ? ruled_part(v, before).rule : NULL;
    const ar_plan_value *input = m->rule ? first_input(m->rule) : NULL;
    *change = (ar_tp_redistribution){arrives, arrives};
    *maker = input ? m->rule : norm;
    if (m->rule)
        AR_TRY(check_other_inputs(m, input));
    if (!input)
        return AR_OK;
    AR_TRY(ari_ruled_believe(m, "the input that arrives", input->src, norm, arrives, &change->src));
    return ari_ruled_target(m, "the input that is wanted", input->dst, has_tokens(v), false, &change->dst);
}

static ar_placement natural_input(ar_style style)
{
    return style == AR_STYLE_ROWWISE ? ari_shard_features : ari_replicated;
}

/* Determines the last layer's style and input. As in PyTorch, nothing inside a module is moved without a rule: without
 * a declaration the layer's input has its style's placement. */
static ar_status split_second(const ari_ruled *m, const ari_ruled *first_layer, const ar_linear_split *before,
                              ar_linear_split *split)
{
    const ar_placement actual = before->output;
    AR_TRY(ari_ruled_linear(m, first_layer->rule, actual, natural_input(m->style), split));
    if (ari_ruled_passes(m, first_layer->rule, split->input, actual))
        return AR_OK;
    return ar_error_set(AR_ERR_UNSUPPORTED,
                        "%s: %s is %s and %s behind it %s, which takes %s where %s arrives; declare its input %s, or "
                        "the output of the former %s",
                        ARI_SHOW(ari_plan_file(m->plan)), first_layer->name, ari_style_name(before->style), m->name,
                        ari_style_name(split->style), ARI_PLACED(m, split->input), ARI_PLACED(m, actual),
                        ARI_PLACED(m, actual), ARI_PLACED(m, split->input));
}

/* Determines the last layer's output, and its conversion by the module's rule. */
static ar_status split_output(const view *v, const ari_ruled *module, const ari_ruled *last_layer,
                              ar_linear_split *second, ar_tp_redistribution *change)
{
    const ar_plan_value *out = module->rule && module->rule->output.is_declared ? &module->rule->output : NULL;
    ar_placement natural = v->stream;
    *change = (ar_tp_redistribution){v->stream, v->stream};
    if (out) {
        const char *label = "the output that is wanted";
        AR_TRY(ari_ruled_target(module, label, out->dst, has_tokens(v), false, &change->dst));
        AR_TRY(ari_ruled_believe(module, label, out->dst, NULL, v->stream, &change->dst));
        change->src = ari_ruled_from_end(out->src);
        natural = change->src.kind == AR_PARTIAL_SUM ? ari_replicated : change->src;
    }
    AR_TRY(ari_ruled_output(last_layer, has_tokens(v), second->style == AR_STYLE_ROWWISE, natural, &second->output));
    if (out)
        return ari_ruled_believe(module, "the output that there is", out->src, last_layer->rule, second->output,
                                 &change->src);
    return ari_ruled_passes(last_layer, last_layer->rule, second->output, v->stream)
               ? AR_OK
               : ari_ruled_wrong(last_layer, "the output", last_layer->rule->output.dst, "%s would fit",
                                 ARI_PLACED(last_layer, v->stream));
}

/* Merges two redistributions if the first one's result is the second one's input. */
static void join_redistributions(ar_branch_split *s)
{
    if (ari_placed_equal(s->enter.dst, s->first.input)) {
        s->first.input = s->enter.src;
        s->enter.dst = s->enter.src;
    }
    if (ari_placed_equal(s->second.output, s->leave.src)) {
        s->second.output = s->leave.dst;
        s->leave.src = s->leave.dst;
    }
}

static ar_status split_branch(const view *v, bool attention, ar_placement arrives, ar_branch_split *s)
{
    const branch b = branch_of(v, attention);
    const bool tokens = has_tokens(v) && !attention; /* a query sees the keys of all tokens */
    const ari_ruled module = ruled_part(v, b.module), first_layer = ruled_part(v, b.first_roles[0]),
                    second = ruled_part(v, b.second);
    const ar_plan_rule *maker = NULL;
    AR_TRY(split_input(v, b.norm, &module, arrives, &s->enter, &maker));
    AR_TRY(ari_ruled_first(&first_layer, &first_layer, maker, s->enter.dst, tokens, &s->first));
    for (int i = 1; i < b.n; i++) {
        const ari_ruled m = ruled_part(v, b.first_roles[i]);
        AR_TRY(ari_ruled_first(&m, &first_layer, maker, s->enter.dst, tokens, &s->first));
    }
    AR_TRY(split_second(&second, &first_layer, &s->first, &s->second));
    AR_TRY(split_output(v, &module, &second, &s->second, &s->leave));
    join_redistributions(s);
    return AR_OK;
}

/* --- norms -------------------------------------------------------------------------------------------------------- */

/* Placement of a norm's input. A plan without norms in sequence style leaves them like the values between branches. */
static ar_status split_norm(const view *v, ari_role role, ar_placement *placement)
{
    const ari_ruled m = ruled_part(v, role);
    if (m.style != AR_STYLE_REPLICATE && m.style != AR_STYLE_SEQUENCE)
        return ari_ruled_misfit(&m, "a norm is replicate or sequence");
    if (m.style == AR_STYLE_SEQUENCE && !has_tokens(v))
        return ar_error_set(AR_ERR_ARG, "%s: %s is in sequence style, which needs sequence parallelism (sp)",
                            ARI_SHOW(ari_plan_file(v->p)), m.name);
    *placement = m.style == AR_STYLE_SEQUENCE || !ari_plan_sequence(v->p) ? v->stream : ari_replicated;
    return check_declared(&m, v->stream, *placement);
}

/* Norms whose placement follows from their input: those of heads, and of a branch's output before it is added to the
 * residual. */
static const ari_role where_fixed[] = {
    ARI_Q_NORM, ARI_K_NORM, ARI_ATTENTION_NORM, ARI_MLP_NORM,     ARI_Q_A_NORM, ARI_KV_A_NORM,
    ARI_Q_A,    ARI_KV_A,   ARI_TOKENS_NORM,    ARI_ENTERED_NORM, ARI_JOINED,   ARI_MTP_NORM};

static ar_status check_fixed_norm(const view *v, ari_role role)
{
    ar_placement placement = v->stream;
    if (!ari_part_path(v->f, role) || !ari_part_present(v->c, role))
        return AR_OK;
    const ari_ruled m = ruled_part(v, role);
    if (ari_is_mtp_part(role) && (!m.rule || v->layer < v->c->layers))
        return AR_OK;
    if (role == ARI_JOINED)
        return m.style == AR_STYLE_REPLICATE ? AR_OK : ari_ruled_misfit(&m, "what joins two values is replicate");
    if (role == ARI_Q_A || role == ARI_KV_A || role == ARI_Q_A_NORM || role == ARI_KV_A_NORM)
        return m.style == AR_STYLE_REPLICATE ? AR_OK : ari_ruled_misfit(&m, "what all heads take is replicate");
    if (role == ARI_Q_NORM || role == ARI_K_NORM)
        return m.style == AR_STYLE_REPLICATE ? AR_OK : ari_ruled_misfit(&m, "a norm of heads is replicate");
    AR_TRY(split_norm(v, role, &placement));
    return ari_placed_equal(placement, v->stream)
               ? AR_OK
               : ari_ruled_misfit(&m, "what is added to the residual is in sequence style, as that is");
}

/* --- experts ------------------------------------------------------------------------------------------------------ */

/* Checks that all experts are sharded or none, and that the shared expert is sharded like them or replicated. */
static ar_status check_expert(const view *v, ari_role role, ar_style expected_style, const char *fits)
{
    if (!ari_part_in_layer(v->c, role, v->layer))
        return AR_OK;
    const ari_ruled m = ruled_part(v, role);
    if (m.style == expected_style)
        return check_declared(&m, expected_style == AR_STYLE_ROWWISE ? ari_shard_features : ari_replicated,
                              expected_style == AR_STYLE_COLWISE ? ari_shard_features : ari_replicated);
    return ari_ruled_misfit(&m, fits);
}

/* Checks that the rule for all experts together declares their output as a sum over ranks. */
static ar_status check_sum(const view *v, bool cut)
{
    const ari_ruled m = ruled_part(v, ARI_EXPERTS);
    const ar_plan_value *out = m.rule ? &m.rule->output : NULL;
    if (!m.rule)
        return AR_OK;
    AR_TRY(check_other_inputs(&m, NULL));
    if (!out->is_declared)
        return AR_OK;
    if (!ari_placed_full(out->dst))
        return ari_ruled_wrong(&m, "the output that is wanted", out->dst, "R would fit");
    return (out->src.kind == AR_PARTIAL_SUM) == cut
               ? AR_OK
               : ari_ruled_wrong(&m, "the output that there is", out->src, "%s would fit", cut ? "P(sum)" : "R");
}

/* Checks that gate, up and down of the experts, or of the shared expert, are either divided or all replicated. */
static ar_status check_cut(const view *v, const ari_role part[3], bool cut, const char *colwise_hint,
                           const char *replicate_hint)
{
    for (size_t i = 0; i < 3; i++) {
        const ar_style style = !cut ? AR_STYLE_REPLICATE : i < 2 ? AR_STYLE_COLWISE : AR_STYLE_ROWWISE;
        const char *fits = !cut ? replicate_hint : i < 2 ? colwise_hint : "behind a colwise gate and up it is rowwise";
        AR_TRY(check_expert(v, part[i], style, fits));
    }
    return AR_OK;
}

static ar_status check_experts(const view *v, bool cut, bool shared_cut)
{
    static const ari_role expert[] = {ARI_EXPERT_GATE, ARI_EXPERT_UP, ARI_EXPERT_DOWN},
                          shared[] = {ARI_SHARED_GATE, ARI_SHARED_UP, ARI_SHARED_DOWN},
                          replicated_roles[] = {ARI_ROUTER, ARI_ROUTER_BIAS, ARI_SHARED_SHARE};
    AR_TRY(check_cut(v, expert, cut, "with the experts' gates colwise all gates and ups are",
                     "with the experts' gates replicate all of them are"));
    AR_TRY(check_cut(v, shared, shared_cut, "with the shared expert's gate colwise its up is too",
                     cut ? "with the shared expert's gate replicate all of it is"
                         : "with the experts' gates replicate all of them are, the shared expert too"));
    for (size_t i = 0; i < sizeof replicated_roles / sizeof *replicated_roles; i++)
        AR_TRY(check_expert(v, replicated_roles[i], AR_STYLE_REPLICATE,
                            "every rank routes all its tokens: a router and the shared expert's gate are replicate"));
    return check_sum(v, cut);
}

static ar_status split_experts(const view *v, ar_placement arrives, ar_branch_split *s)
{
    const ari_ruled module = ruled_part(v, ARI_MLP), gate = ruled_part(v, ARI_EXPERT_GATE);
    const bool cut = gate.style == AR_STYLE_COLWISE;
    if (module.rule)
        return ari_ruled_misfit(&module, "a layer's experts take and make what lies between the branches");
    const bool shared_cut = cut && ruled_part(v, ARI_SHARED_GATE).style != AR_STYLE_REPLICATE;
    AR_TRY(check_experts(v, cut, shared_cut));
    *s = ari_experts_split(cut, v->stream);
    s->shared_whole = cut && !shared_cut;
    s->enter.src = arrives;
    return AR_OK;
}

static ar_status split_block(const view *v, ar_block_split *split)
{
    split->norm1 = split->norm2 = v->stream;
    for (size_t i = 0; i < sizeof where_fixed / sizeof *where_fixed; i++)
        AR_TRY(check_fixed_norm(v, where_fixed[i]));
    if (ar_config_norm_before(v->c)) {
        AR_TRY(split_norm(v, ARI_NORM1, &split->norm1));
        split->norm2 = split->norm1;
        if (ari_part_present(v->c, ARI_NORM2))
            AR_TRY(split_norm(v, ARI_NORM2, &split->norm2));
    }
    AR_TRY(split_branch(v, true, split->norm1, &split->attention));
    return ar_config_has_experts(v->c, v->layer) ? split_experts(v, split->norm2, &split->mlp)
                                                 : split_branch(v, false, split->norm2, &split->mlp);
}

ar_status ari_plan_block(const ar_plan *p, const ar_config *c, size_t layer, bool sequence, ar_block_split *split)
{
    AR_TRY(ari_arch_expect(c->arch));
    const view v = view_of(p, c, layer, sequence);
    const bool column_row = p->mlp_order == AR_MLP_COLUMN_ROW;
    if (ari_plan_is_default(p)) {
        const ar_branch_split usual = ari_branch_of(AR_STYLE_COLWISE, AR_STYLE_ROWWISE, v.stream);
        const ar_branch_split row_column = ari_branch_of(AR_STYLE_ROWWISE, AR_STYLE_COLWISE, v.stream);
        *split = (ar_block_split){
            .norm1 = v.stream, .norm2 = v.stream, .attention = usual, .mlp = column_row ? usual : row_column};
        if (ar_config_has_experts(c, layer))
            split->mlp = ari_experts_split(true, v.stream);
        return AR_OK;
    }
    return split_block(&v, split);
}

/* --- outside of the blocks ---------------------------------------------------------------------------------------- */

/* True if a tied head can be split like the table: along the vocabulary, along the summed features, or not. */
static bool cut_alike(ar_style tokens, ar_style head)
{
    return tokens == head || (tokens == AR_STYLE_HIDDEN && head == AR_STYLE_ROWWISE);
}

static ar_status split_head(const view *v, const ari_ruled *tokens, ar_placement arrives, ar_linear_split *split)
{
    const ari_ruled m = ruled_part(v, ARI_HEAD);
    if (m.style != AR_STYLE_VOCAB && m.style != AR_STYLE_ROWWISE && m.style != AR_STYLE_REPLICATE)
        return ari_ruled_misfit(&m, "vocab (colwise), rowwise and replicate are possible");
    if (v->c->tied && !cut_alike(tokens->style, m.style))
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "%s: %s is %s, but its weight is that of %s, which is %s; give both vocab or replicate, or "
                            "the former rowwise and the latter hidden",
                            ARI_SHOW(ari_plan_file(v->p)), m.name, ari_style_name(m.style), tokens->name,
                            ari_style_name(tokens->style));
    split->style = m.style == AR_STYLE_VOCAB ? AR_STYLE_COLWISE : m.style;
    const ar_plan_rule *norm = ari_part_path(v->f, ARI_FINAL_NORM) ? ruled_part(v, ARI_FINAL_NORM).rule : NULL;
    AR_TRY(ari_ruled_input(&m, norm, arrives, arrives, &split->input));
    AR_TRY(
        ari_ruled_output(&m, false, split->style == AR_STYLE_ROWWISE, ari_ruled_makes(split->style), &split->output));
    return split->output.kind != AR_PARTIAL_SUM || ari_ruled_passes(&m, m.rule, split->output, ari_replicated)
               ? AR_OK
               : ari_ruled_wrong(&m, "the output", m.rule->output.dst, "R or S(-1) would fit");
}

static ar_status split_outer(const view *v, ar_outer_split *split)
{
    const ari_ruled tokens = ruled_part(v, ARI_TOKENS);
    *split = (ar_outer_split){.final_norm = v->stream};
    AR_TRY(ari_ruled_tokens(&tokens, &split->tokens));
    if (ari_part_path(v->f, ARI_FINAL_NORM))
        AR_TRY(split_norm(v, ARI_FINAL_NORM, &split->final_norm));
    if (v->c->mtp > 0 && !ari_placed_equal(split->final_norm, v->stream))
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "%s: the last norm is not placed as what lies between the blocks, and blocks for further "
                            "tokens take what it makes; give it the style sequence",
                            ARI_SHOW(ari_plan_file(v->p)));
    return ari_part_path(v->f, ARI_HEAD) ? split_head(v, &tokens, split->final_norm, &split->head) : AR_OK;
}

ar_status ari_plan_outer(const ar_plan *p, const ar_config *c, bool sequence, ar_outer_split *split)
{
    AR_TRY(ari_arch_expect(c->arch));
    const view v = view_of(p, c, ARI_NO_BLOCK, sequence);
    return split_outer(&v, split);
}

static bool has_placement(const ar_plan_value *v, ar_placement p)
{
    return v->is_declared &&
           (ari_placed_equal(ari_ruled_from_end(v->src), p) || ari_placed_equal(ari_ruled_from_end(v->dst), p));
}

bool ari_plan_by_tokens(const ar_plan *p, int tp, bool sp)
{
    bool any = ari_plan_sequence(p);
    for (size_t i = 0; i < p->rules && !any; i++) {
        const ar_plan_rule *rule = &p->rule[i];
        any = has_placement(&rule->output, ari_shard_tokens);
        for (int k = 0; k < AR_PLAN_ARGUMENTS && !any; k++)
            any = has_placement(&rule->input[k], ari_shard_tokens);
    }
    return tp > 1 ? sp : any;
}

/* --- checks ------------------------------------------------------------------------------------------------------- */

/* Checks a table: its ids are replicated on one side. */
static ar_status check_table(const view *v, ari_role role)
{
    if (!ari_part_path(v->f, role))
        return AR_OK;
    const ari_ruled m = ruled_part(v, role);
    if (m.rule && role == ARI_POSITIONS && m.style != AR_STYLE_REPLICATE)
        return ari_ruled_misfit(&m, "learned positions are replicate");
    return check_declared(&m, ari_replicated, v->stream);
}

static ar_status check_splits(view v)
{
    ar_outer_split outer;
    ar_block_split block;
    AR_TRY(split_outer(&v, &outer));
    AR_TRY(check_table(&v, ARI_TOKENS));
    AR_TRY(check_table(&v, ARI_POSITIONS));
    for (v.layer = 0; v.layer < ar_config_blocks(v.c); v.layer++)
        AR_TRY(split_block(&v, &block));
    return AR_OK;
}

ar_status ari_plan_check(const ar_plan *p, const ar_config *c, bool sequence)
{
    AR_TRY(ari_arch_expect(c->arch));
    if (ari_plan_is_default(p))
        return AR_OK;
    AR_TRY(ari_plan_check_globs(p, c));
    return check_splits(view_of(p, c, ARI_NO_BLOCK, sequence));
}

ar_status ari_plan_check_declared(const ar_plan *p, const ar_config *c, bool sequence)
{
    AR_TRY(ari_arch_expect(c->arch));
    view v = view_of(p, c, ARI_NO_BLOCK, sequence);
    v.strict = true;
    return ari_plan_is_default(p) ? AR_OK : check_splits(v);
}
