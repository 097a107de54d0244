/* SPDX-License-Identifier: Apache-2.0 */
/* The parameters of a rank, in the order of their registration. */
#include "sim/plan/ops_impl.h"

#include "ref/core/size.h"

static void add(const ari_op_builder *w, ari_part_list *list, ari_role role)
{
    list->at[list->parts++] = (ari_param_part){role, false};
    if (ari_op_builder_has_bias(w, role))
        list->at[list->parts++] = (ari_param_part){role, true};
    list->n = list->parts;
}

static void add_mlp(const ari_op_builder *w, ari_part_list *list)
{
    add(w, list, w->form.gate_up ? ARI_GATE_UP : w->config->gated ? ARI_GATE : ARI_FIRST);
    if (w->config->gated && !w->form.gate_up)
        add(w, list, ARI_UP);
    add(w, list, ARI_DOWN);
}

static void add_experts(const ari_op_builder *w, ari_part_list *list)
{
    add(w, list, ARI_ROUTER);
    if (ar_config_router_bias(w->config))
        add(w, list, ARI_ROUTER_BIAS);
    list->first = list->parts;
    add(w, list, ARI_EXPERT_GATE);
    add(w, list, ARI_EXPERT_UP);
    add(w, list, ARI_EXPERT_DOWN);
    list->of_each = list->parts - list->first;
    if (w->config->experts.shared == 0)
        return;
    add(w, list, ARI_SHARED_GATE);
    add(w, list, ARI_SHARED_UP);
    add(w, list, ARI_SHARED_DOWN);
    if (!w->config->experts.ungated)
        add(w, list, ARI_SHARED_SHARE);
}

static void add_latent(const ari_op_builder *w, ari_part_list *list)
{
    const bool rank = w->config->latent.q_rank > 0;
    add(w, list, rank ? ARI_Q_A : ARI_Q);
    add(w, list, ARI_KV_A);
    if (rank) {
        add(w, list, ARI_Q_A_NORM);
        add(w, list, ARI_Q_B);
    }
    add(w, list, ARI_KV_A_NORM);
    add(w, list, ARI_KV_B);
}

static void add_block(ari_op_builder *w, ari_part_list *list, void (*mlp)(const ari_op_builder *w, ari_part_list *list))
{
    const bool before = w->config->norm_place != AR_NORM_AFTER, after = w->config->norm_place != AR_NORM_BEFORE;
    if (before)
        add(w, list, ARI_NORM1);
    if (w->config->latent.kv_rank > 0)
        add_latent(w, list);
    else
        add(w, list, w->form.packed ? ARI_QKV : ARI_Q);
    if (!w->form.packed && w->config->latent.kv_rank == 0) {
        add(w, list, ARI_K);
        add(w, list, ARI_V);
    }
    if (w->config->qk_norm != AR_QK_NORM_NONE) {
        add(w, list, ARI_Q_NORM);
        add(w, list, ARI_K_NORM);
    }
    if (w->config->sinks)
        add(w, list, ARI_SINKS);
    add(w, list, ARI_OUT);
    if (after)
        add(w, list, ARI_ATTENTION_NORM);
    if (before && w->config->residual != AR_RESIDUAL_PARALLEL_ONE_NORM)
        add(w, list, ARI_NORM2);
    mlp(w, list);
    if (after)
        add(w, list, ARI_MLP_NORM);
}

static void count_parts(ari_op_builder *w, ari_part_list *list)
{
    list->n = ari_op_builder_add(w, list->parts - list->of_each, ari_op_builder_mul(w, list->of_each, w->experts));
}

static void add_further(ari_op_builder *w, ari_part_list *list)
{
    add(w, list, ARI_TOKENS_NORM);
    add(w, list, ARI_ENTERED_NORM);
    add(w, list, ARI_JOINED);
    add_block(w, list, ar_config_has_experts(w->config, w->config->layers) ? add_experts : add_mlp);
    add(w, list, ARI_MTP_NORM);
}

/* The head's weight where it is tied is the table of tokens, which the first stage has. Blocks for further tokens take
 * it too. */
static void add_ends(const ari_op_builder *w, ari_params *p)
{
    const ar_config *c = w->config;
    if (w->first)
        add(w, &p->before, ARI_TOKENS);
    if (w->first && c->learned_positions)
        add(w, &p->before, ARI_POSITIONS);
    if (w->last && c->final_norm)
        add(w, &p->after, ARI_FINAL_NORM);
    if (w->last && w->form.head && !(c->tied && w->first))
        add(w, &p->after, c->tied ? ARI_TOKENS : ARI_HEAD);
    if (w->last && !w->first && c->mtp > 0 && !c->tied)
        add(w, &p->last, ARI_TOKENS);
}

size_t ari_op_builder_own_layer(const ari_op_builder *w, size_t i)
{
    size_t begin = 0, end = 0;
    for (size_t stage = w->at[ARI_AXIS_PP]; stage < w->stages; stage += w->ranks[ARI_AXIS_PP]) {
        ari_op_builder_stage_blocks(w, stage, &begin, &end);
        if (i < end - begin)
            break;
        i -= end - begin;
    }
    return begin + i;
}

bool ari_op_builder_same_parts(const ari_params *p)
{
    return p->mtp == 0 && (p->with_experts == 0 || p->with_experts == p->layers);
}

int ari_op_builder_parts_kind(const ari_op_builder *w, size_t layer)
{
    return layer >= w->config->layers                ? ARI_PARTS_OF_FURTHER
           : ar_config_has_experts(w->config, layer) ? ARI_PARTS_OF_EXPERTS
                                                     : ARI_PARTS_OF_MLP;
}

static const ari_part_list *parts_of_kind(const ari_params *p, int kind)
{
    return kind == ARI_PARTS_OF_FURTHER ? &p->further : kind == ARI_PARTS_OF_EXPERTS ? &p->experts : &p->block;
}

const ari_part_list *ari_op_builder_parts_of(const ari_op_builder *w, const ari_params *p, size_t unit)
{
    if (ari_op_builder_same_parts(p))
        return p->with_experts > 0 ? &p->experts : &p->block;
    return parts_of_kind(p, ari_op_builder_parts_kind(w, ari_op_builder_own_layer(w, unit)));
}

ari_params ari_op_builder_all_params(ari_op_builder *w)
{
    ari_params p = {.n = 0};
    w->unit_at.parts = NULL;
    add_ends(w, &p);
    add_block(w, &p.block, add_mlp);
    add_block(w, &p.experts, add_experts);
    add_further(w, &p.further);
    count_parts(w, &p.block);
    count_parts(w, &p.experts);
    count_parts(w, &p.further);
    p.mtp = w->last ? w->config->mtp : 0;
    for (size_t stage = w->at[ARI_AXIS_PP]; stage < w->stages; stage += w->ranks[ARI_AXIS_PP]) {
        size_t begin = 0, end = 0;
        ari_op_builder_stage_blocks(w, stage, &begin, &end);
        p.layers += end - begin;
        for (size_t layer = begin; layer < end && w->config->experts.n > 0; layer++)
            p.with_experts += ar_config_has_experts(w->config, layer);
    }
    const bool experts = ar_config_has_experts(w->config, w->config->layers);
    const size_t more = p.further.n - (experts ? p.experts.n : p.block.n);
    p.in_blocks = ari_op_builder_add(w, ari_op_builder_mul(w, p.layers - p.with_experts, p.block.n),
                                     ari_op_builder_mul(w, p.with_experts, p.experts.n));
    p.in_blocks = ari_op_builder_add(w, p.in_blocks, ari_op_builder_mul(w, p.mtp, more));
    p.in_layers = p.in_blocks - p.mtp * p.further.n;
    p.n = ari_op_builder_add(w, p.before.n + p.after.n + p.last.n, p.in_blocks);
    return p;
}

static void enter_unit(ari_op_builder *w, const ari_params *p, size_t unit)
{
    w->unit_at.unit = unit;
    w->unit_at.layer = ari_op_builder_own_layer(w, unit);
    w->unit_at.parts = parts_of_kind(p, ari_op_builder_parts_kind(w, w->unit_at.layer));
}

/* The layer of the blocks' parameter `at`, from that of the one before: they are gone through in their order, or in
 * reverse. */
static const ari_unit_place *unit_of(ari_op_builder *w, const ari_params *p, size_t at)
{
    ari_unit_place *u = &w->unit_at;
    if (!u->parts) {
        u->begin = 0;
        enter_unit(w, p, 0);
    }
    while (at < u->begin) {
        enter_unit(w, p, u->unit - 1);
        u->begin -= u->parts->n;
    }
    while (at >= u->begin + u->parts->n) {
        u->begin += u->parts->n;
        enter_unit(w, p, u->unit + 1);
    }
    return u;
}

static size_t local_elements(ari_op_builder *w, const ari_op_value *v)
{
    size_t n = 1;
    for (int d = 0; d < v->ndim; d++)
        n = ari_op_builder_mul(w, n, v->local[d]);
    return n;
}

/* The part at a place of a list. Those of the experts, which are cut along the same features, are all of one size,
 * where there are no biases. */
static void take_part(const ari_op_builder *w, ari_one_param *one, const ari_part_list *list, size_t at)
{
    const size_t each = list->of_each, all = each * w->experts, in = at - list->first;
    if (each == 0 || at < list->first) {
        one->of = list->at[at];
    } else if (in < all) {
        one->of = list->at[list->first + in % each];
        one->expert = w->first_expert + in / each;
        one->before = w->config->experts.bias ? 0 : in;
        one->after = w->config->experts.bias ? 0 : all - 1 - in;
    } else {
        one->of = list->at[at - all + each];
    }
}

/* Where parameter i is among those of the blocks, of which those for further tokens come behind what is after the
 * layers. False: it is of none; then it is the *at-th of *outer. */
static bool is_in_block(const ari_params *p, size_t i, size_t *at, const ari_part_list **outer)
{
    *outer = i < p->before.n ? &p->before : &p->after;
    *at = i < p->before.n ? i : i - p->before.n;
    if (i < p->before.n || *at < p->in_layers)
        return i >= p->before.n;
    *at -= p->in_layers;
    if (*at < p->after.n)
        return false;
    *at += p->in_layers - p->after.n;
    if (*at < p->in_blocks)
        return true;
    *outer = &p->last;
    *at -= p->in_blocks;
    return false;
}

ari_one_param ari_op_builder_locate(ari_op_builder *w, const ari_params *p, size_t i)
{
    ari_one_param one = {.layer = ARI_NO_LAYER, .unit = p->layers};
    const ari_part_list *outer = NULL;
    size_t at = 0;
    if (is_in_block(p, i, &at, &outer)) {
        const ari_unit_place *u = unit_of(w, p, at);
        one.unit = u->unit;
        one.layer = u->layer;
        take_part(w, &one, u->parts, at - u->begin);
    } else {
        one.of = outer->at[at];
    }
    return one;
}

/* The same; the walk is at its layer then. */
ari_one_param ari_op_builder_param_at(ari_op_builder *w, const ari_params *p, size_t i)
{
    ari_one_param one = ari_op_builder_locate(w, p, i);
    if (one.layer != w->layer)
        ari_op_builder_layer(w, one.layer);
    const bool alike = one.layer != ARI_NO_LAYER && w->c->run.plan.rules == 0;
    ari_known_param *known = &w->known[alike ? one.of.role : 0][one.of.bias];
    if (!alike || known->elements == 0) {
        known->value = ari_op_builder_param(w, one.of.role, one.of.bias);
        known->elements = local_elements(w, &known->value);
    }
    one.value = known->value;
    one.elements = known->elements;
    return one;
}
