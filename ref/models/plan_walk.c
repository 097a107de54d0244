/* SPDX-License-Identifier: Apache-2.0 */
/* Layers of a user's module, each split as a plan says of its name. */
#include "anyrank/plan_walk.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/context/context.h"
#include "ref/core/text.h"
#include "ref/layers/linear/linear.h"
#include "ref/layers/parts.h"
#include "ref/models/plan.h"

static const ar_placement whole = {AR_REPLICATE, 0}, features = {AR_SHARD, -1}, by_tokens = {AR_SHARD, -2},
                          partial = {AR_PARTIAL_SUM, 0};
enum { NDIM = 3 }; /* of the values that declarations speak of, [samples, positions, features] */

static bool same(ar_placement a, ar_placement b)
{
    return ar_placement_same(a, b, NDIM);
}

/* --- rules -------------------------------------------------------------------------------------------------------- */

static ar_status refuse(const ar_plan_walk *w, const ar_plan_rule *rule, const char *name, const char *what,
                        ar_placement p, const char *fits)
{
    char text[AR_PLACEMENT_TEXT];
    return ar_error_set(AR_ERR_UNSUPPORTED, "%s: rule %zu, '%s': the %s of %s is declared %s; %s",
                        ARI_SHOW(ari_plan_file(w->plan)), (size_t)(rule - w->plan->rule) + 1, ARI_SHOW(rule->glob),
                        what, ARI_SHOW(name), ar_placement_text(text, p), fits);
}

/* R and I are the same here, and dimensions count from the end. False: another placement. */
static bool normalise(ar_placement *p)
{
    const ar_placement known[] = {whole, features, by_tokens, partial};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (!same(p->kind == AR_INVARIANT ? whole : *p, known[i]))
            continue;
        *p = known[i];
        return true;
    }
    return false;
}

/* What a user has set: a placement that a value between layers can have. */
static ar_status check_at(ar_plan_walk *w, const char *name)
{
    char text[AR_PLACEMENT_TEXT];
    const ar_placement at = w->at;
    if (normalise(&w->at) && w->at.kind != AR_PARTIAL_SUM)
        return AR_OK;
    w->at = at;
    return ar_error_set(AR_ERR_ARG, "%s: what arrives is said to be %s; R, S(-1) and S(1) are possible", ARI_SHOW(name),
                        ar_placement_text(text, at));
}

/* The rule of a layer (the last that matches; NULL: none) and its style, one of those of `styles`. The declared input
 * is what arrives. */
static ar_status ask(ar_plan_walk *w, const char *name, ari_role role, unsigned styles, const char *fits,
                     const ar_plan_rule **rule, ar_style *style)
{
    const size_t rules = w->plan ? w->plan->rules : 0;
    ari_text layers = {.at = w->layers, .cap = sizeof w->layers, .used = strlen(w->layers)};
    *rule = NULL;
    AR_TRY(check_at(w, name));
    for (size_t i = 0; i < rules; i++) {
        const ar_plan_rule *r = &w->plan->rule[i];
        if (r->style == AR_STYLE_PREPARE || !ari_glob_matches(r->glob, name))
            continue;
        w->matched[i] = true;
        *rule = r;
    }
    ari_say(&layers, "%s%s", layers.used > 0 ? ", " : "", name);
    *style = *rule ? ari_style_in(role, (*rule)->style) : AR_STYLE_REPLICATE;
    if (!(styles >> *style & 1))
        return ar_error_set(AR_ERR_UNSUPPORTED, "%s: %s is %s; %s", ARI_SHOW(ari_plan_file(w->plan)), ARI_SHOW(name),
                            ar_style_name(*style), fits);
    const ar_plan_value *in = *rule ? &(*rule)->input[0] : NULL;
    ar_placement declared = in ? in->from : whole;
    if (!in || !in->given || (normalise(&declared) && same(declared, w->at)))
        return AR_OK;
    char arrives[AR_PLACEMENT_TEXT + 16], text[AR_PLACEMENT_TEXT];
    snprintf(arrives, sizeof arrives, "%s would fit", ar_placement_text(text, w->at));
    return refuse(w, *rule, name, "input", in->from, arrives);
}

/* What the layer leaves: what the rule declares, or else what it makes. Terms that keep their placement would have to be
 * added up, which no layer here declares. */
static ar_status output(const ar_plan_walk *w, const ar_plan_rule *rule, const char *name, ar_placement makes,
                        bool may_be_partial, ar_placement *leaves)
{
    *leaves = makes;
    if (!rule || !rule->output.given)
        return AR_OK;
    *leaves = rule->output.to;
    may_be_partial = may_be_partial && !rule->global_output;
    if (normalise(leaves) && (may_be_partial || leaves->kind != AR_PARTIAL_SUM))
        return AR_OK;
    return refuse(w, rule, name, "output", rule->output.to,
                  may_be_partial ? "R, S(-1), S(1) and P(sum) are possible" : "R, S(-1) and S(1) are possible");
}

/* --- a layer between two redistributions -------------------------------------------------------------------------- */

typedef struct planned {
    ar_module base;
    ar_module *part[3]; /* [parts]: a redistribution where there is one, the layer, another */
    size_t parts;
    size_t layer;       /* of the parts */
    bool by_positions;  /* the layer takes or makes a rank's positions, as layers do under sequence parallelism */
    bool has_positions; /* some value here is placed by positions */
} planned;

static ar_status check_positions(const planned *m, const ar_tensor *t)
{
    if (!m->has_positions || t->ndim >= NDIM)
        return AR_OK;
    return ar_error_set(AR_ERR_SHAPE,
                        "%s: the plan splits positions, S(1), and the value has %d dimensions, expected [samples, "
                        "positions, features]; features are S(-1)",
                        m->base.name, t->ndim);
}

/* The layer itself runs as under sequence parallelism, and no other part of the module does. */
static bool enter(const planned *m, ar_ctx *ctx, size_t i)
{
    const bool before = ctx->sp;
    ctx->sp = before || (m->by_positions && i == m->layer);
    return before;
}

static ar_status forward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                         const ar_batch *batch)
{
    const planned *m = (const planned *)base;
    ar_tensor in = *x;
    *y = in;
    AR_TRY(check_positions(m, x));
    for (size_t i = 0; i < m->parts; i++) {
        const bool sp = enter(m, ctx, i);
        const ar_status st = ar_module_forward(m->part[i], ctx, saved, y, &in, batch);
        ctx->sp = sp;
        AR_TRY(st);
        in = *y;
    }
    return AR_OK;
}

static ar_status backward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                          const ar_batch *batch)
{
    const planned *m = (const planned *)base;
    ar_tensor d = *dy, next = d;
    for (size_t i = m->parts; i-- > 0;) {
        const bool sp = enter(m, ctx, i);
        const ar_status st = ar_module_backward(m->part[i], ctx, saved, i > 0 || dx ? &next : NULL, &d, batch);
        ctx->sp = sp;
        AR_TRY(st);
        d = next;
    }
    if (dx)
        *dx = d;
    return AR_OK;
}

static size_t children(const ar_module *base, ar_module **out, size_t cap)
{
    const planned *m = (const planned *)base;
    for (size_t i = 0; i < m->parts && i < cap; i++)
        out[i] = m->part[i];
    return m->parts;
}

static void destroy(ar_module *base)
{
    planned *m = (planned *)base;
    for (size_t i = 0; i < m->parts; i++)
        ar_module_destroy(m->part[i]);
    free(m);
}

/* A redistribution keeps values and gradients whole where they are whole: I. */
static ar_status add_move(planned *m, ar_ctx *ctx, ar_placement from, ar_placement to)
{
    const ar_placement invariant = {AR_INVARIANT, 0};
    m->has_positions = m->has_positions || same(from, by_tokens) || same(to, by_tokens);
    if (same(from, to))
        return AR_OK;
    AR_TRY(ar_redistribution_create(&m->part[m->parts], ctx, m->base.name, same(from, whole) ? invariant : from,
                                    same(to, whole) ? invariant : to));
    m->parts++;
    return AR_OK;
}

/* What a layer is made of, and how. */
typedef struct layer_spec {
    ar_placement takes, makes, leaves;
    ar_status (*create)(ar_module **gives, ar_ctx *ctx, const char *name, const void *what);
    const void *what;
} layer_spec;

static ar_status complete(planned *m, ar_ctx *ctx, ar_placement at, const layer_spec *s)
{
    AR_TRY(add_move(m, ctx, at, s->takes));
    if (s->create) {
        m->by_positions = same(s->takes, by_tokens) || same(s->makes, by_tokens);
        m->layer = m->parts;
        const bool sp = enter(m, ctx, m->layer);
        const ar_status st = s->create(&m->part[m->parts], ctx, m->base.name, s->what);
        ctx->sp = sp;
        AR_TRY(st);
        m->parts++;
    }
    return add_move(m, ctx, s->makes, s->leaves);
}

static ar_status create(ar_module **gives, ar_ctx *ctx, ar_plan_walk *w, const char *name, const layer_spec *s)
{
    static const ar_module_ops ops = {
        .kind = "planned", .forward = forward, .backward = backward, .children = children, .destroy = destroy};
    planned *m = NULL;
    if (ctx->sp)
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "%s: the context has sequence parallelism (sp); here a plan asks for it, by norms in "
                            "sequence style and outputs S(1): leave sp out",
                            ARI_SHOW(name));
    AR_TRY(ari_module_begin((void **)&m, sizeof *m, &ops, name, AR_HELD_UNTOLD));
    AR_TRY(ari_module_end(gives, &m->base, complete(m, ctx, w->at, s)));
    /* Terms that nobody adds up are taken for the sum. */
    w->at = s->leaves.kind == AR_PARTIAL_SUM ? whole : s->leaves;
    return AR_OK;
}

/* --- layers ------------------------------------------------------------------------------------------------------- */

/* The style of a linear layer, and its rule. */
static ar_status ask_linear(ar_plan_walk *w, const char *name, const ar_plan_rule **rule, ar_style *style)
{
    return ask(w, name, ARI_FIRST, 1u << AR_STYLE_COLWISE | 1u << AR_STYLE_ROWWISE | 1u << AR_STYLE_REPLICATE,
               "a linear layer is colwise, rowwise or replicate", rule, style);
}

static ar_placement made_by(ar_style style)
{
    return style == AR_STYLE_COLWISE ? features : whole;
}

typedef struct linear_layer {
    size_t in, out;
    bool bias;
    ar_linear_split split;
} linear_layer;

static ar_status create_linear(ar_module **gives, ar_ctx *ctx, const char *name, const void *what)
{
    const linear_layer *l = what;
    return ari_linear_module_create(gives, ctx, name, l->in, l->out, l->bias, l->split);
}

/* It redistributes what arrives and what it makes itself. */
ar_status ar_plan_linear_create(ar_module **gives, ar_ctx *ctx, ar_plan_walk *w, const char *name, size_t in,
                                size_t out, bool bias)
{
    const ar_plan_rule *rule;
    linear_layer l = {.in = in, .out = out, .bias = bias};
    AR_TRY(ask_linear(w, name, &rule, &l.split.style));
    l.split.from = w->at;
    AR_TRY(output(w, rule, name, made_by(l.split.style), l.split.style == AR_STYLE_ROWWISE, &l.split.to));
    const ar_placement to = l.split.to;
    const layer_spec s = {.takes = w->at, .makes = to, .leaves = to, .create = create_linear, .what = &l};
    return create(gives, ctx, w, name, &s);
}

/* --- an MLP, an attention ----------------------------------------------------------------------------------------- */

/* The first layers, which share their input: all of one style and output. */
static ar_status split_first(ar_plan_walk *w, const char *const *name, int n, ar_linear_split *split)
{
    for (int i = 0; i < n; i++) {
        const ar_linear_split before = *split;
        const ar_plan_rule *rule;
        AR_TRY(ask_linear(w, name[i], &rule, &split->style));
        AR_TRY(output(w, rule, name[i], made_by(split->style), false, &split->to));
        if (i > 0 && (before.style != split->style || !same(before.to, split->to)))
            return ar_error_set(AR_ERR_UNSUPPORTED,
                                "%s: %s is %s, but %s, which has the same input, is %s or leaves another placement; "
                                "give both one",
                                ARI_SHOW(ari_plan_file(w->plan)), ARI_SHOW(name[i]), ar_style_name(split->style),
                                ARI_SHOW(name[0]), ar_style_name(before.style));
    }
    return AR_OK;
}

/* The module takes all features of what arrives and, but for terms of a sum, makes all of them; *leaves is what is to
 * leave. */
static ar_status split_branch(ar_plan_walk *w, const char *const *first, int n, const char *second,
                              ar_branch_split *split, ar_placement *leaves)
{
    const ar_placement at = w->at, takes = same(at, features) ? whole : at;
    const ar_plan_rule *rule;
    AR_TRY(split_first(w, first, n, &split->first));
    w->at = split->first.to;
    const ar_status st = ask_linear(w, second, &rule, &split->second.style);
    w->at = at;
    AR_TRY(st);
    AR_TRY(output(w, rule, second, whole, split->second.style == AR_STYLE_ROWWISE, leaves));
    split->first.from = takes;
    split->second.from = split->first.to;
    split->second.to = same(*leaves, features) ? whole : *leaves;
    split->enter = (ar_hop){takes, takes};
    split->leave = (ar_hop){split->second.to, split->second.to};
    return AR_OK;
}

static ar_status create_mlp(ar_module **gives, ar_ctx *ctx, const char *name, const void *what)
{
    return ar_mlp_create(gives, ctx, name, what);
}

ar_status ar_plan_mlp_create(ar_module **gives, ar_ctx *ctx, ar_plan_walk *w, const char *name, const ar_mlp_options *o)
{
    char first[ARI_PART_PATH], up[ARI_PART_PATH], second[ARI_PART_PATH];
    ar_branch_split split = {.enter = {whole, whole}};
    ar_mlp_options with = *o;
    layer_spec s = {.create = create_mlp, .what = &with};
    AR_TRY(ari_mlp_paths(first, up, second, name, o));
    AR_TRY(split_branch(w, (const char *const[]){first, up}, o->gated && !o->fused ? 2 : 1, second, &split, &s.leaves));
    with.split = &split;
    s.takes = split.first.from;
    s.makes = split.second.to;
    return create(gives, ctx, w, name, &s);
}

static ar_status create_attention(ar_module **gives, ar_ctx *ctx, const char *name, const void *what)
{
    return ar_attention_create(gives, ctx, name, what);
}

ar_status ar_plan_attention_create(ar_module **gives, ar_ctx *ctx, ar_plan_walk *w, const char *name,
                                   const ar_attention_options *o)
{
    char qkv[3][ARI_PART_PATH], out[ARI_PART_PATH];
    ar_branch_split split = {.enter = {whole, whole}};
    ar_attention_options with = *o;
    layer_spec s = {.create = create_attention, .what = &with};
    AR_TRY(ari_attention_paths(qkv, out, name, o));
    AR_TRY(split_branch(w, (const char *const[]){qkv[0], qkv[1], qkv[2]}, o->fused ? 1 : 3, out, &split, &s.leaves));
    if (same(split.first.to, by_tokens))
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "%s: %s leaves S(1), but a query sees all keys; R and S(-1) are possible",
                            ARI_SHOW(ari_plan_file(w->plan)), ARI_SHOW(qkv[0]));
    with.split = &split;
    s.takes = split.first.from;
    s.makes = split.second.to;
    return create(gives, ctx, w, name, &s);
}

/* --- norms, and what works element by element --------------------------------------------------------------------- */

typedef struct norm_spec {
    ar_norm_kind kind;
    size_t h;
    double eps;
} norm_spec;

static ar_status create_norm(ar_module **gives, ar_ctx *ctx, const char *name, const void *what)
{
    const norm_spec *s = what;
    return ar_norm_create(gives, ctx, name, s->kind, s->h, s->eps);
}

ar_status ar_plan_norm_create(ar_module **gives, ar_ctx *ctx, ar_plan_walk *w, const char *name, ar_norm_kind kind,
                              size_t h, double eps)
{
    const norm_spec norm = {kind, h, eps};
    const ar_plan_rule *rule;
    ar_style style;
    layer_spec s = {.create = create_norm, .what = &norm};
    AR_TRY(ask(w, name, ARI_NORM1, 1u << AR_STYLE_REPLICATE | 1u << AR_STYLE_SEQUENCE,
               "a norm is replicate or sequence", &rule, &style));
    s.takes = s.makes = style == AR_STYLE_SEQUENCE ? by_tokens : whole;
    AR_TRY(output(w, rule, name, s.makes, false, &s.leaves));
    return create(gives, ctx, w, name, &s);
}

/* Element by element, on what arrives where no rule says another. */
static ar_status create_elementwise(ar_module **gives, ar_ctx *ctx, ar_plan_walk *w, const char *name, layer_spec *s)
{
    const ar_plan_rule *rule;
    ar_style style;
    AR_TRY(ask(w, name, ARI_NORM1, 1u << AR_STYLE_REPLICATE | 1u << AR_STYLE_SEQUENCE,
               "what works element by element is replicate or sequence", &rule, &style));
    s->takes = s->makes = style == AR_STYLE_SEQUENCE ? by_tokens : rule ? whole : w->at;
    AR_TRY(output(w, rule, name, s->makes, false, &s->leaves));
    return create(gives, ctx, w, name, s);
}

/* Of a rank's positions, which it works on as under sequence parallelism, it has the whole. */
static ar_held held_of(ar_placement p)
{
    return same(p, features) ? AR_HELD_SHARD : AR_HELD_WHOLE;
}

typedef struct activation_spec {
    ar_activation act;
    const layer_spec *layer;
} activation_spec;

static ar_status create_activation(ar_module **gives, ar_ctx *ctx, const char *name, const void *what)
{
    const activation_spec *s = what;
    return ar_activation_create(gives, ctx, name, s->act, held_of(s->layer->takes));
}

ar_status ar_plan_activation_create(ar_module **gives, ar_ctx *ctx, ar_plan_walk *w, const char *name,
                                    ar_activation act)
{
    layer_spec s = {.create = create_activation};
    const activation_spec what = {act, &s};
    s.what = &what;
    return create_elementwise(gives, ctx, w, name, &s);
}

typedef struct dropout_spec {
    size_t positions, width;
    const layer_spec *layer;
} dropout_spec;

static ar_status create_dropout(ar_module **gives, ar_ctx *ctx, const char *name, const void *what)
{
    const dropout_spec *s = what;
    return ar_dropout_create(gives, ctx, name, s->positions, s->width, held_of(s->layer->takes));
}

ar_status ar_plan_dropout_create(ar_module **gives, ar_ctx *ctx, ar_plan_walk *w, const char *name, size_t positions,
                                 size_t width)
{
    layer_spec s = {.create = create_dropout};
    const dropout_spec what = {positions, width, &s};
    s.what = &what;
    return create_elementwise(gives, ctx, w, name, &s);
}

ar_status ar_plan_redistribute_create(ar_module **gives, ar_ctx *ctx, ar_plan_walk *w, const char *name,
                                      ar_placement to)
{
    char text[AR_PLACEMENT_TEXT];
    ar_placement p = to;
    AR_TRY(check_at(w, name));
    if (!normalise(&p) || p.kind == AR_PARTIAL_SUM)
        return ar_error_set(AR_ERR_UNSUPPORTED, "%s: to %s; R, S(-1) and S(1) are possible", ARI_SHOW(name),
                            ar_placement_text(text, to));
    const layer_spec s = {.takes = p, .makes = p, .leaves = p};
    return create(gives, ctx, w, name, &s);
}

/* --- embeddings and heads ----------------------------------------------------------------------------------------- */

ar_status ar_plan_embedding(ar_embedding_split *split, ar_plan_walk *w, const char *name)
{
    const ar_plan_rule *rule;
    ar_style style;
    ar_placement leaves;
    AR_TRY(ask(w, name, ARI_TOKENS, 1u << AR_STYLE_VOCAB | 1u << AR_STYLE_HIDDEN | 1u << AR_STYLE_REPLICATE,
               "vocab (rowwise), hidden (colwise) and replicate are possible", &rule, &style));
    AR_TRY(output(w, rule, name, whole, false, &leaves));
    if (!same(leaves, whole))
        return refuse(w, rule, name, "output", leaves, "R would fit");
    *split = style == AR_STYLE_VOCAB    ? AR_EMBEDDING_VOCAB
             : style == AR_STYLE_HIDDEN ? AR_EMBEDDING_HIDDEN
                                        : AR_EMBEDDING_WHOLE;
    w->at = whole;
    return AR_OK;
}

ar_status ar_plan_head(ar_linear_split *split, ar_plan_walk *w, const char *name)
{
    const ar_plan_rule *rule;
    ar_style style;
    ar_placement leaves;
    char text[AR_PLACEMENT_TEXT];
    AR_TRY(ask(w, name, ARI_HEAD, 1u << AR_STYLE_VOCAB | 1u << AR_STYLE_REPLICATE,
               "vocab (colwise) and replicate are possible", &rule, &style));
    if (!same(w->at, whole))
        return ar_error_set(AR_ERR_UNSUPPORTED, "%s: %s arrives, and a head takes R: redistribute before it",
                            ARI_SHOW(name), ar_placement_text(text, w->at));
    AR_TRY(output(w, rule, name, style == AR_STYLE_VOCAB ? features : whole, false, &leaves));
    if (!same(leaves, whole) && !(style == AR_STYLE_VOCAB && same(leaves, features)))
        return refuse(w, rule, name, "output", leaves, style == AR_STYLE_VOCAB ? "S(-1) and R fit" : "R would fit");
    *split = (ar_linear_split){style == AR_STYLE_VOCAB ? AR_STYLE_COLWISE : style, whole, leaves};
    w->at = leaves;
    return AR_OK;
}

ar_held ar_plan_held(const ar_plan_walk *w)
{
    return same(w->at, whole) ? AR_HELD_WHOLE : same(w->at, features) ? AR_HELD_SHARD : AR_HELD_UNTOLD;
}

ar_status ar_plan_end(const ar_plan_walk *w, const char *module)
{
    for (size_t i = 0; w->plan && i < w->plan->rules; i++) {
        const ar_plan_rule *r = &w->plan->rule[i];
        if (!w->matched[i])
            return ar_error_set(AR_ERR_NOT_FOUND, "%s: rule %zu, '%s': %s; the layers of %s are %s",
                                ARI_SHOW(ari_plan_file(w->plan)), i + 1, ARI_SHOW(r->glob),
                                r->style == AR_STYLE_PREPARE
                                    ? "a module of one's own is not prepared: declare inputs and outputs of its layers"
                                    : "no layer has this name",
                                ARI_SHOW(module), ARI_SHOW(w->layers));
    }
    return AR_OK;
}
