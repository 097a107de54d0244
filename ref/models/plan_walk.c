/* SPDX-License-Identifier: Apache-2.0 */
/* Derives the splits of the layers in a user's module from a plan, by name. */
#include "anyrank/plan_walk.h"

#include <stdio.h>
#include <string.h>

#include "ref/context/context.h"
#include "ref/core/text.h"
#include "ref/layers/layers_private.h"
#include "ref/layers/linear/linear.h"
#include "ref/layers/parts.h"
#include "ref/models/plan.h"
#include "ref/models/plan_walk_private.h"
#include "ref/placement/placement_private.h"

/* --- what a plan says of them ------------------------------------------------------------------------------------- */

/* R and I are the same here. */
static ar_placement settled(ar_placement p)
{
    return ari_placed_full(p) ? ari_replicated : p;
}

/* Checks that a placement set by the user is possible for a value between layers. */
static ar_status check_at(ar_plan_walk *w, const char *name)
{
    char text[AR_PLACEMENT_TEXT];
    const ar_placement placement = settled(ari_ruled_from_end(w->placement));
    if (!ari_ruled_possible(placement, true))
        return ar_error_set(AR_ERR_ARG, "%s: what arrives is said to be %s; R, S(-1) and S(1) are possible",
                            ARI_SHOW(name), ari_placement_name(text, w->placement));
    w->placement = placement;
    return AR_OK;
}

/* Looks up a layer of the walk at which w->placement arrives. */
static ar_status ask_own(ari_ruled *m, ar_plan_walk *w, const char *name, ari_role role)
{
    const size_t rules = w->plan ? w->plan->rules : 0;
    ari_text layers = {.buffer = w->layers, .cap = sizeof w->layers, .used = strlen(w->layers)};
    *m = (ari_ruled){.plan = w->plan, .style = AR_STYLE_REPLICATE, .strict = true, .is_user_module = true};
    snprintf(m->name, sizeof m->name, "%s", name);
    AR_TRY(check_at(w, name));
    for (size_t i = 0; i < rules; i++) {
        const ar_plan_rule *r = &w->plan->rule[i];
        if (r->style == AR_STYLE_PREPARE || !ari_glob_matches(r->glob, name))
            continue;
        w->matched[i] = true;
        m->rule = r;
        m->style = ari_style_in(role, r->style);
    }
    ari_say(&layers, "%s%s", layers.used > 0 ? ", " : "", name);
    return AR_OK;
}

/* Looks up a layer that is not linear: its style is one of `styles`, and its input is what arrives. */
static ar_status ask_other(ari_ruled *m, ar_plan_walk *w, const char *name, ari_role role, unsigned styles,
                           const char *possible_are)
{
    ar_placement from_placement;
    AR_TRY(ask_own(m, w, name, role));
    return styles >> m->style & 1 ? ari_ruled_input(m, NULL, w->placement, w->placement, &from_placement)
                                  : ari_ruled_misfit(m, possible_are);
}

/* Returns the output placement: the declared one, otherwise that of the result. Terms that keep their placement would
 * have to be summed, which no layer here declares. */
static ar_status leave_own(const ari_ruled *m, bool terms, ar_placement output_placement, ar_placement *leaves)
{
    AR_TRY(ari_ruled_output(m, true, terms && m->rule && !m->rule->global_output, output_placement, leaves));
    *leaves = settled(*leaves);
    return AR_OK;
}

static ar_status split_linear(ar_linear_split *split, ar_plan_walk *w, const char *name)
{
    ari_ruled m;
    AR_TRY(ask_own(&m, w, name, ARI_FIRST));
    AR_TRY(ari_ruled_linear(&m, NULL, w->placement, w->placement, split));
    split->input = w->placement;
    return leave_own(&m, m.style == AR_STYLE_ROWWISE, ari_ruled_makes(m.style), &split->output);
}

/* Derives the split of an MLP or an attention whose first n layers share its input. It takes all features of its input
 * and outputs all features, possibly as partial sums; *leaves: the output placement. */
static ar_status split_branch(ar_branch_split *split, ar_placement *leaves, ar_plan_walk *w,
                              const char *const *first_names, int n, const char *second)
{
    ar_linear_split *const in_split = &split->first, *const out = &split->second;
    ari_ruled m, layers[3];
    for (int i = 0; i < n; i++) {
        AR_TRY(ask_own(&layers[i], w, first_names[i], ARI_FIRST));
        AR_TRY(ari_ruled_first(&layers[i], &layers[0], NULL, w->placement, true, in_split));
    }
    const ar_placement placement = w->placement;
    in_split->input = ari_placed_by_features(placement) ? ari_replicated : placement;
    in_split->output = w->placement = settled(in_split->output);
    const ar_status st = ask_own(&m, w, second, ARI_FIRST);
    w->placement = placement;
    AR_TRY(st);
    AR_TRY(ari_ruled_linear(&m, NULL, in_split->output, in_split->output, out));
    AR_TRY(leave_own(&m, m.style == AR_STYLE_ROWWISE, ari_replicated, leaves));
    out->input = in_split->output;
    out->output = ari_placed_by_features(*leaves) ? ari_replicated : *leaves;
    split->enter = (ar_tp_redistribution){in_split->input, in_split->input};
    split->leave = (ar_tp_redistribution){out->output, out->output};
    return AR_OK;
}

/* Places a norm or an element-wise layer: the latter as the value arrives unless a rule says otherwise. */
static ar_status place_norm(ar_placement *input_placement, ar_placement *leaves, ar_plan_walk *w, const char *name,
                            bool elementwise)
{
    ari_ruled m;
    AR_TRY(ask_other(&m, w, name, ARI_NORM1, 1u << AR_STYLE_REPLICATE | 1u << AR_STYLE_SEQUENCE,
                     elementwise ? "what works element by element is replicate or sequence"
                                 : "a norm is replicate or sequence"));
    *input_placement = m.style == AR_STYLE_SEQUENCE ? ari_shard_tokens
                       : elementwise && !m.rule     ? w->placement
                                                    : ari_replicated;
    return leave_own(&m, false, *input_placement, leaves);
}

/* --- a layer between two redistributions -------------------------------------------------------------------------- */

typedef struct planned {
    ar_ctx *ctx;
    ar_plan_walk *w;
    const char *name;
    ar_module *part[3]; /* [parts]: an optional redistribution, the layer, an optional redistribution */
    size_t parts;
    size_t sp_index;    /* index of the layer if it uses or produces positions, as under sequence parallelism; else
                           SIZE_MAX */
    bool has_positions; /* some value here is placed by positions */
    ar_placement output_placement; /* placement of the layer's output */
} planned;

/* Adds a redistribution that keeps replicated values and gradients replicated: I. */
static ar_status add_declared(planned *m, ar_placement from_placement, ar_placement to_placement)
{
    const ar_placement invariant = {AR_INVARIANT, 0};
    m->has_positions = m->has_positions || ari_placed_by_tokens(from_placement) || ari_placed_by_tokens(to_placement);
    return ari_redistribution_create(&m->part[m->parts], m->ctx, m->name,
                                     ari_placed_full(from_placement) ? invariant : from_placement,
                                     ari_placed_full(to_placement) ? invariant : to_placement);
}

static ar_status add_move(planned *m, ar_placement from_placement, ar_placement to_placement)
{
    if (!ari_placed_equal(from_placement, to_placement)) {
        AR_TRY(add_declared(m, from_placement, to_placement));
        m->parts++;
    }
    m->has_positions = m->has_positions || ari_placed_by_tokens(from_placement);
    return AR_OK;
}

/* Begins a layer with inputs and outputs in these placements. Until end_layer() the context is set for its creation. */
static ar_status begin_layer(planned *m, ar_ctx *ctx, ar_plan_walk *w, const char *name, ar_placement input_placement,
                             ar_placement output_placement)
{
    *m = (planned){.ctx = ctx, .w = w, .name = name, .output_placement = output_placement};
    if (ctx->sp)
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "%s: the context has sequence parallelism (sp); here a plan asks for it, by norms in "
                            "sequence style and outputs S(1): leave sp out",
                            ARI_SHOW(name));
    AR_TRY(add_move(m, w->placement, input_placement));
    ctx->sp = ari_placed_by_tokens(input_placement) || ari_placed_by_tokens(output_placement);
    m->sp_index = ctx->sp ? m->parts : SIZE_MAX;
    return AR_OK;
}

/* Ends a layer: creates the module from its parts. st: status of the layer's creation, which is the next part unless it
 * failed; leaves: placement of its value. */
static ar_status end_layer(ar_module **result, planned *m, ar_placement leaves, ar_status st)
{
    m->ctx->sp = false;
    if (st == AR_OK) {
        m->parts += m->part[m->parts] != NULL;
        st = add_move(m, m->output_placement, leaves);
    }
    if (st == AR_OK)
        st = ari_sequential_create(result, m->name, m->part, m->parts, true, m->sp_index, m->has_positions);
    for (size_t i = 0; i < m->parts && st != AR_OK; i++)
        ar_module_destroy(m->part[i]);
    /* Terms that are not summed are treated as the sum. */
    if (st == AR_OK)
        m->w->placement = leaves.kind == AR_PARTIAL_SUM ? ari_replicated : leaves;
    return st;
}

/* --- layers ------------------------------------------------------------------------------------------------------- */

/* Creates a linear layer that redistributes its input and output itself. */
ar_status ar_plan_linear_create(ar_module **result, ar_ctx *ctx, ar_plan_walk *w, const char *name, size_t in_features,
                                size_t out, bool bias)
{
    ar_linear_split split;
    planned m;
    AR_TRY(split_linear(&split, w, name));
    AR_TRY(begin_layer(&m, ctx, w, name, split.input, split.output));
    return end_layer(result, &m, split.output,
                     ari_linear_module_create(&m.part[m.parts], ctx, name, in_features, out, bias, split));
}

ar_status ari_plan_mlp_create(ar_module **result, ar_ctx *ctx, ar_plan_walk *w, const char *name,
                              const ar_mlp_options *o)
{
    char first_path[ARI_PART_PATH], up[ARI_PART_PATH], second[ARI_PART_PATH];
    ar_branch_split split;
    ar_placement leaves;
    ar_mlp_options options = *o;
    planned m;
    AR_TRY(ari_mlp_paths(first_path, up, second, name, o));
    AR_TRY(
        split_branch(&split, &leaves, w, (const char *const[]){first_path, up}, o->gated && !o->fused ? 2 : 1, second));
    options.split = &split;
    AR_TRY(begin_layer(&m, ctx, w, name, split.first.input, split.second.output));
    return end_layer(result, &m, leaves, ar_mlp_create(&m.part[m.parts], ctx, name, &options));
}

ar_status ari_plan_attention_create(ar_module **result, ar_ctx *ctx, ar_plan_walk *w, const char *name,
                                    const ar_attention_options *o)
{
    char qkv[3][ARI_PART_PATH], out[ARI_PART_PATH];
    ar_branch_split split;
    ar_placement leaves;
    ar_attention_options options = *o;
    planned m;
    AR_TRY(ari_attention_paths(qkv, out, name, o));
    AR_TRY(split_branch(&split, &leaves, w, (const char *const[]){qkv[0], qkv[1], qkv[2]}, o->fused ? 1 : 3, out));
    if (ari_placed_by_tokens(split.first.output))
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "%s: %s leaves S(1), but a query sees all keys; R and S(-1) are possible",
                            ARI_SHOW(ari_plan_file(w->plan)), ARI_SHOW(qkv[0]));
    options.split = &split;
    AR_TRY(begin_layer(&m, ctx, w, name, split.first.input, split.second.output));
    return end_layer(result, &m, leaves, ar_attention_create(&m.part[m.parts], ctx, name, &options));
}

ar_status ar_plan_norm_create(ar_module **result, ar_ctx *ctx, ar_plan_walk *w, const char *name, ar_norm_kind kind,
                              size_t h, double eps)
{
    ar_placement placement, leaves;
    planned m;
    AR_TRY(place_norm(&placement, &leaves, w, name, false));
    AR_TRY(begin_layer(&m, ctx, w, name, placement, placement));
    return end_layer(result, &m, leaves, ar_norm_create(&m.part[m.parts], ctx, name, kind, h, eps));
}

/* Each rank has whole positions, on which the layer works as under sequence parallelism. */
static ar_held held_of(ar_placement p)
{
    return ari_placed_by_features(p) ? AR_HELD_SHARD : AR_HELD_WHOLE;
}

ar_status ar_plan_activation_create(ar_module **result, ar_ctx *ctx, ar_plan_walk *w, const char *name,
                                    ar_activation act)
{
    ar_placement placement, leaves;
    planned m;
    AR_TRY(place_norm(&placement, &leaves, w, name, true));
    AR_TRY(begin_layer(&m, ctx, w, name, placement, placement));
    return end_layer(result, &m, leaves, ar_activation_create(&m.part[m.parts], ctx, name, act, held_of(placement)));
}

ar_status ar_plan_dropout_create(ar_module **result, ar_ctx *ctx, ar_plan_walk *w, const char *name, size_t positions,
                                 size_t width)
{
    ar_placement placement, leaves;
    planned m;
    AR_TRY(place_norm(&placement, &leaves, w, name, true));
    AR_TRY(begin_layer(&m, ctx, w, name, placement, placement));
    return end_layer(result, &m, leaves,
                     ar_dropout_create(&m.part[m.parts], ctx, name, positions, width, held_of(placement)));
}

ar_status ar_plan_redistribute_create(ar_module **result, ar_ctx *ctx, ar_plan_walk *w, const char *name,
                                      ar_placement to_placement)
{
    char text[AR_PLACEMENT_TEXT];
    const ar_placement p = settled(ari_ruled_from_end(to_placement));
    planned m;
    AR_TRY(check_at(w, name));
    if (!ari_ruled_possible(p, true))
        return ar_error_set(AR_ERR_UNSUPPORTED, "%s: to %s; R, S(-1) and S(1) are possible", ARI_SHOW(name),
                            ari_placement_name(text, to_placement));
    AR_TRY(begin_layer(&m, ctx, w, name, p, p));
    return end_layer(result, &m, p, AR_OK);
}

/* --- modules of one's own ----------------------------------------------------------------------------------------- */

/* Returns the last prepare rule's value for an argument or output of the module `name`; NULL: no rule. */
static const ar_plan_value *prepared(ar_plan_walk *w, const char *name, int position, const char *keyword)
{
    const ar_plan_rule *r = NULL;
    for (size_t i = 0; w->plan && i < w->plan->rules; i++) {
        if (w->plan->rule[i].style != AR_STYLE_PREPARE || !ari_glob_matches(w->plan->rule[i].glob, name))
            continue;
        w->matched[i] = true;
        r = &w->plan->rule[i];
    }
    if (!r || position == AR_PLAN_OUTPUT)
        return r && r->output.is_declared ? &r->output : NULL;
    for (int i = 0; i < AR_PLAN_ARGUMENTS; i++) {
        const ar_plan_value *v = &r->input[i];
        if (v->is_declared && (v->name[0] ? keyword && strcmp(v->name, keyword) == 0 : i == position))
            return v;
    }
    return NULL;
}

ar_status ar_plan_prepare_create(ar_module **result, ar_ctx *ctx, ar_plan_walk *w, const char *name, int position,
                                 const char *keyword)
{
    const ar_plan_value *v = prepared(w, name, position, keyword);
    const ar_placement saved_placement = w->placement,
                       to_placement = settled(ari_ruled_from_end(v ? v->dst : saved_placement));
    ari_text layers = {.buffer = w->layers, .cap = sizeof w->layers, .used = strlen(w->layers)};
    planned m;
    if (position < AR_PLAN_OUTPUT)
        return ar_error_set(AR_ERR_ARG, "%s: argument %d, expected a position from 0, or AR_PLAN_OUTPUT", name,
                            position);
    if (!v || !ari_ruled_possible(to_placement, true))
        return ar_plan_redistribute_create(result, ctx, w, name, to_placement);
    w->placement = to_placement;
    ar_status st = begin_layer(&m, ctx, w, name, to_placement, to_placement);
    /* Runs also if both placements are equal, because the arriving value is compared with the declared placement. */
    if (st == AR_OK)
        st = end_layer(result, &m, to_placement, add_declared(&m, settled(ari_ruled_from_end(v->src)), to_placement));
    if (st != AR_OK)
        w->placement = saved_placement;
    else if (position == 0)
        ari_say(&layers, "%s%s", layers.used > 0 ? ", " : "", name);
    return st;
}

/* --- embeddings and heads ----------------------------------------------------------------------------------------- */

ar_status ari_plan_embedding(ar_embedding_split *split, ar_plan_walk *w, const char *name)
{
    ari_ruled m;
    ar_placement leaves;
    AR_TRY(ask_own(&m, w, name, ARI_TOKENS));
    AR_TRY(ari_ruled_tokens(&m, split));
    AR_TRY(ari_ruled_input(&m, NULL, w->placement, w->placement, &leaves));
    AR_TRY(leave_own(&m, false, ari_replicated, &leaves));
    if (!ari_placed_full(leaves))
        return ari_ruled_wrong(&m, "the output", leaves, "R would fit");
    w->placement = ari_replicated;
    return AR_OK;
}

ar_status ari_plan_head(ar_linear_split *split, ar_plan_walk *w, const char *name)
{
    ari_ruled m;
    ar_placement leaves;
    char text[AR_PLACEMENT_TEXT];
    AR_TRY(ask_other(&m, w, name, ARI_HEAD, 1u << AR_STYLE_VOCAB | 1u << AR_STYLE_REPLICATE,
                     "vocab (colwise) and replicate are possible"));
    if (!ari_placed_full(w->placement))
        return ar_error_set(AR_ERR_UNSUPPORTED, "%s: %s arrives, and a head takes R: redistribute before it",
                            ARI_SHOW(name), ari_placement_name(text, w->placement));
    const bool vocab = m.style == AR_STYLE_VOCAB;
    AR_TRY(leave_own(&m, false, vocab ? ari_shard_features : ari_replicated, &leaves));
    if (!ari_placed_full(leaves) && !(vocab && ari_placed_by_features(leaves)))
        return ari_ruled_wrong(&m, "the output", leaves, vocab ? "S(-1) and R fit" : "R would fit");
    *split = (ar_linear_split){vocab ? AR_STYLE_COLWISE : m.style, ari_replicated, leaves};
    w->placement = leaves;
    return AR_OK;
}

ar_held ari_plan_held(const ar_plan_walk *w)
{
    const ar_placement placement = ari_ruled_from_end(w->placement);
    return ari_placed_full(placement)          ? AR_HELD_WHOLE
           : ari_placed_by_features(placement) ? AR_HELD_SHARD
                                               : AR_HELD_UNKNOWN;
}

ar_status ar_plan_end(const ar_plan_walk *w, const char *module)
{
    for (size_t i = 0; w->plan && i < w->plan->rules; i++) {
        const ar_plan_rule *r = &w->plan->rule[i];
        if (!w->matched[i])
            return ar_error_set(AR_ERR_NOT_FOUND, "%s: rule %zu, '%s': %s; the layers of %s are %s",
                                ARI_SHOW(ari_plan_file(w->plan)), i + 1, ARI_SHOW(r->glob),
                                r->style == AR_STYLE_PREPARE ? "no module with this name is prepared"
                                                             : "no layer has this name",
                                ARI_SHOW(module), ARI_SHOW(w->layers));
    }
    return AR_OK;
}
