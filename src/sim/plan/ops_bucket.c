/* SPDX-License-Identifier: Apache-2.0 */
/* The parameters of a rank, and the buckets in which their gradients move. */
#include "sim/plan/ops_impl.h"

#include "ref/core/size.h"

/* --- the parameters of a rank ------------------------------------------------------------------------------------- */

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
        add(w, &p->after, ARI_TOKENS);
}

/* The i-th of the rank's layers. */
static size_t own_layer(const ari_op_builder *w, size_t i)
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

/* True if each of the rank's layers has experts, or none, and no other parts. */
static bool same_parts(const ari_params *p)
{
    return p->mtp == 0 && (p->with_experts == 0 || p->with_experts == p->layers);
}

/* Layers with the same parts: without experts, with them, for further tokens. */
enum { PARTS_OF_MLP, PARTS_OF_EXPERTS, PARTS_OF_FURTHER, PARTS_KINDS };
static int parts_kind(const ari_op_builder *w, size_t layer)
{
    return layer >= w->config->layers                ? PARTS_OF_FURTHER
           : ar_config_has_experts(w->config, layer) ? PARTS_OF_EXPERTS
                                                     : PARTS_OF_MLP;
}

static const ari_part_list *parts_of_kind(const ari_params *p, int kind)
{
    return kind == PARTS_OF_FURTHER ? &p->further : kind == PARTS_OF_EXPERTS ? &p->experts : &p->block;
}

/* The parts of that layer. */
static const ari_part_list *parts_of(const ari_op_builder *w, const ari_params *p, size_t unit)
{
    if (same_parts(p))
        return p->with_experts > 0 ? &p->experts : &p->block;
    return parts_of_kind(p, parts_kind(w, own_layer(w, unit)));
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
    p.n = ari_op_builder_add(w, p.before.n + p.after.n, p.in_blocks);
    return p;
}

static void enter_unit(ari_op_builder *w, const ari_params *p, size_t unit)
{
    w->unit_at.unit = unit;
    w->unit_at.layer = own_layer(w, unit);
    w->unit_at.parts = parts_of_kind(p, parts_kind(w, w->unit_at.layer));
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

/* Parameter i in that order, but for its value. */
static ari_one_param locate_param(ari_op_builder *w, const ari_params *p, size_t i)
{
    const size_t at = i - p->before.n;
    ari_one_param one = {.layer = ARI_NO_LAYER, .unit = p->layers};
    if (i < p->before.n) {
        one.of = p->before.at[i];
    } else if (at < p->in_blocks) {
        const ari_unit_place *u = unit_of(w, p, at);
        one.unit = u->unit;
        one.layer = u->layer;
        take_part(w, &one, u->parts, at - u->begin);
    } else {
        one.of = p->after.at[at - p->in_blocks];
    }
    return one;
}

/* The same; the walk is at its layer then. */
ari_one_param ari_op_builder_param_at(ari_op_builder *w, const ari_params *p, size_t i)
{
    ari_one_param one = locate_param(w, p, i);
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

/* --- buckets ------------------------------------------------------------------------------------------------------ */

static bool before(ari_bucket_place a, ari_bucket_place b)
{
    return a.major < b.major || (a.major == b.major && a.minor < b.minor);
}

/* Bytes of the gradient in fp32 on the tp rank that has most, the first. */
static size_t bytes_of(ari_op_builder *w, const ari_one_param *p)
{
    const ar_placement tp = p->value.at[ARI_AXIS_TP];
    size_t n = sizeof(float), start = 0, extent = 0;
    for (int d = 0; d < p->value.ndim; d++) {
        const bool cut = tp.kind == AR_SHARD && tp.dim == d;
        ar_split_uneven(p->value.shape[d], cut ? (int)(w->ranks[ARI_AXIS_TP] / p->value.copies) : 1, 0, &start,
                        &extent);
        n = ari_op_builder_mul(w, n, extent);
    }
    return n;
}

/* -1: without a gradient, in no bucket. */
static int kind_of(const ari_op_builder *w, const ari_one_param *p)
{
    if (p->of.role == ARI_ROUTER_BIAS)
        return -1;
    const ar_placement tp = p->value.at[ARI_AXIS_TP];
    const bool uneven = tp.kind == AR_SHARD && p->value.shape[tp.dim] % (w->ranks[ARI_AXIS_TP] / p->value.copies) != 0;
    const bool spread = tp.kind == AR_REPLICATE && w->ranks[ARI_AXIS_TP] > 1;
    const bool ends = p->value.at[ARI_AXIS_PP].kind == AR_REPLICATE;
    return (w->apart && ari_is_expert_part(p->of.role) ? ARI_KIND_EXPERT : 0) + (ends ? ARI_KIND_ENDS : 0) +
           (uneven ? ARI_KIND_UNEVEN : 0) + (spread ? ARI_KIND_SPREAD : 0) +
           (p->value.dtype == AR_BF16 ? ARI_KIND_NARROW : 0) +
           (ari_op_by_muon(w->c, p->of.role, p->of.bias) ? ARI_KIND_MATRIX : 0);
}

static ari_bucket_place place_of(ari_op_builder *w, const ari_params *all, const ari_one_param *p, size_t i)
{
    if (w->c->run.ddp.order == AR_BUCKETS_BY_SIZE)
        return (ari_bucket_place){SIZE_MAX - bytes_of(w, p), i};
    return (ari_bucket_place){0, all->n - 1 - i};
}

/* A tied head of a rank that has no embedding comes after the blocks. */
static ari_section section_of(const ari_op_builder *w, ari_role role)
{
    return role == ARI_TOKENS && !w->first ? ARI_AFTER_BLOCKS : ari_section_of(role);
}

/* In the order of the backward pass: blocks for further tokens, what comes after the layers, the layers, what comes
 * before. */
static int turn_of(const ari_op_builder *w, const ari_op_param *p)
{
    static const int sections[] = {[ARI_BEFORE_BLOCKS] = 3, [ARI_IN_BLOCKS] = 2, [ARI_AFTER_BLOCKS] = 1};
    return p->layer != ARI_NO_LAYER && p->layer >= w->config->layers ? 0 : sections[section_of(w, p->role)];
}

/* True if the backward pass makes the gradient of a after that of b: from the last layer to the first, in a block in
 * the order of its parts, a bias after its weight, and the embedding at the end. Those of all experts are made together.
 */
static bool made_after(const ari_op_builder *w, const ari_op_param *a, const ari_op_param *b)
{
    static const int order[ARI_ROLES] = {[ARI_EXPERT_GATE] = 2,
                                         [ARI_EXPERT_UP] = 2,
                                         [ARI_EXPERT_DOWN] = 2,
                                         [ARI_SHARED_DOWN] = 3,
                                         [ARI_SHARED_GATE] = 3,
                                         [ARI_SHARED_UP] = 3,
                                         [ARI_SHARED_SHARE] = 4,
                                         [ARI_ROUTER] = 4,
                                         [ARI_MLP_NORM] = 1,
                                         [ARI_DOWN] = 2,
                                         [ARI_FIRST] = 3,
                                         [ARI_GATE] = 3,
                                         [ARI_GATE_UP] = 3,
                                         [ARI_UP] = 4,
                                         [ARI_NORM2] = 5,
                                         [ARI_ATTENTION_NORM] = 6,
                                         [ARI_OUT] = 7,
                                         [ARI_Q_NORM] = 8,
                                         [ARI_K_NORM] = 9,
                                         [ARI_QKV] = 14,
                                         [ARI_SINKS] = 8,
                                         [ARI_KV_B] = 8,
                                         [ARI_KV_A_NORM] = 9,
                                         [ARI_Q_B] = 10,
                                         [ARI_Q_A_NORM] = 11,
                                         [ARI_Q_A] = 12,
                                         [ARI_KV_A] = 13,
                                         [ARI_Q] = 14,
                                         [ARI_K] = 15,
                                         [ARI_V] = 16,
                                         [ARI_NORM1] = 17,
                                         [ARI_TOKENS] = 1,
                                         [ARI_POSITIONS] = 2,
                                         [ARI_HEAD] = 2,
                                         [ARI_FINAL_NORM] = 3,
                                         [ARI_JOINED] = 18,
                                         [ARI_ENTERED_NORM] = 19,
                                         [ARI_TOKENS_NORM] = 20};
    const int sa = turn_of(w, a), sb = turn_of(w, b);
    if (sa != sb)
        return sa > sb;
    if (a->layer != b->layer)
        return a->layer < b->layer;
    return a->role == b->role ? a->bias : order[a->role] > order[b->role];
}

/* Units by number: the rank's layers in their order, then the root unit; or all parameters. A unit's are at
 * [begin, end) but for what is left out. */
typedef struct unit_span {
    size_t begin, end, left_out, left_out_end;
} unit_span;

static unit_span span_of(const ari_op_builder *w, const ari_params *all, size_t unit)
{
    const size_t begin = all->before.n;
    unit_span s = {.end = all->n};
    if (unit == all->layers) {
        s.left_out = begin;
        s.left_out_end = begin + all->in_blocks;
    } else if (unit != ARI_ALL_UNITS) {
        s.begin = begin;
        for (size_t k = 0; k < unit; k++)
            s.begin += parts_of(w, all, k)->n;
        s.end = s.begin + parts_of(w, all, unit)->n;
    }
    return s;
}

static bool left_out(const unit_span *s, size_t i)
{
    return i >= s->left_out && i < s->left_out_end;
}

/* True if the parameter is of another kind, by one of its role before it. */
static bool is_of_other_kind(const ari_op_builder *w, const ari_param_part *of, int kind)
{
    const int known = w->kind[of->role][of->bias];
    return w->c->run.plan.rules == 0 && known > 0 && known - 1 != kind;
}

/* From the last registered to the first. */
static bool next_in_reverse(ari_op_builder *w, const ari_params *all, const unit_span *s, int kind,
                            const ari_bucket_place *after, ari_one_param *next, ari_bucket_place *at)
{
    for (size_t i = after ? all->n - 1 - after->minor : s->end; i-- > s->begin && w->st == AR_OK;) {
        if (left_out(s, i))
            continue;
        const ari_one_param here = locate_param(w, all, i);
        if (!is_of_other_kind(w, &here.of, kind)) {
            *next = ari_op_builder_param_at(w, all, i);
            *at = place_of(w, all, next, i);
            const int found = kind_of(w, next);
            w->kind[here.of.role][here.of.bias] = (unsigned char)(found + 1);
            if (found == kind)
                return true;
        }
        i -= here.before;
    }
    return false;
}

/* The next one of the size of that at `after`, or the first of the next smaller size. */
static bool next_by_size(ari_op_builder *w, const ari_params *all, const unit_span *s, int kind,
                         const ari_bucket_place *after, ari_one_param *next, ari_bucket_place *at)
{
    bool found = false;
    for (int same = after ? 1 : 0; same >= 0 && !found; same--) {
        for (size_t i = same ? after->minor + 1 : s->begin; i < s->end && w->st == AR_OK && !(same && found); i++) {
            if (left_out(s, i))
                continue;
            const ari_one_param p = ari_op_builder_param_at(w, all, i);
            const ari_bucket_place here = place_of(w, all, &p, i);
            const bool size = same ? here.major == after->major : !after || here.major > after->major;
            if (kind_of(w, &p) == kind && size && (!found || here.major < at->major)) {
                *next = p;
                *at = here;
                found = true;
            }
            i += p.after;
        }
    }
    return found;
}

/* The parameter of this kind that comes next after a place (NULL: the first); false: there is none. */
static bool next_param(ari_op_builder *w, const ari_params *all, const unit_span *s, int kind,
                       const ari_bucket_place *after, ari_one_param *next, ari_bucket_place *at)
{
    return (w->c->run.ddp.order == AR_BUCKETS_BY_SIZE ? next_by_size : next_in_reverse)(w, all, s, kind, after, next,
                                                                                        at);
}

/* How many parameters fit into a bucket, of those from p on that have its size. The first always does. */
static size_t fitting(const ari_op_builder *w, const ari_one_param *p, size_t bytes, size_t filled, bool empty)
{
    const size_t run = 1 + (w->c->run.ddp.order == AR_BUCKETS_BY_SIZE ? p->after : p->before);
    const size_t capacity = w->c->run.ddp.bucket_bytes, left = filled < capacity ? capacity - filled : 0;
    const size_t fit = capacity == 0 || filled > capacity ? 0 : bytes == 0 ? run : left / bytes;
    return empty && fit == 0 ? 1 : fit < run ? fit : run;
}

/* Next fit: parameters are added until one does not fit. */
static bool next_bucket(ari_op_builder *w, const ari_params *all, const unit_span *s, int kind,
                        ari_op_builder_bucket *b)
{
    const ari_bucket_place begin = b->last;
    const bool more = b->params > 0;
    ari_one_param p;
    ari_bucket_place at;
    size_t filled = 0;
    if (!next_param(w, all, s, kind, more ? &begin : NULL, &p, &at))
        return false;
    *b = (ari_op_builder_bucket){.first = p, .kind = kind, .latest = {p.layer, p.of.role, p.of.bias}};
    do {
        const size_t bytes = bytes_of(w, &p), n = fitting(w, &p, bytes, filled, b->params == 0);
        if (n == 0)
            break;
        filled = ari_op_builder_add(w, filled, ari_op_builder_mul(w, n, bytes));
        b->elements = ari_op_builder_add(w, b->elements, ari_op_builder_mul(w, n, p.elements));
        b->params += n;
        b->last = (ari_bucket_place){at.major, at.minor + n - 1};
        const ari_op_param here = {p.layer, p.of.role, p.of.bias};
        b->latest = made_after(w, &here, &b->latest) ? here : b->latest;
    } while (next_param(w, all, s, kind, &b->last, &p, &at));
    return true;
}

/* True if bucket a completes before b: in the order of packing, except that a bucket which the other end of a pipeline
 * must complete too comes last. */
static bool completes_before(const ari_op_builder_bucket *a, const ari_op_builder_bucket *b)
{
    const int ends_a = a->kind & ARI_KIND_ENDS, ends_b = b->kind & ARI_KIND_ENDS;
    return ends_a == ends_b ? before(a->last, b->last) : ends_a < ends_b;
}

/* The kinds of the unit's parameters, as bits. Without a plan of its own each layer has those of others of its parts. */
static uint64_t kinds_in(ari_op_builder *w, const ari_params *all, size_t unit)
{
    const bool alike = w->c->run.plan.rules == 0 && unit == ARI_ALL_UNITS && same_parts(all) && all->layers > 0;
    const unit_span s = span_of(w, all, unit);
    const size_t begin = all->before.n, end = begin + all->in_blocks;
    uint64_t kinds = 0;
    for (size_t i = s.begin; i < s.end && w->st == AR_OK; i++) {
        if (alike && i == begin + parts_of(w, all, 0)->n)
            i = end;
        if (i >= s.end || left_out(&s, i))
            continue;
        const ari_one_param p = ari_op_builder_param_at(w, all, i);
        const int kind = kind_of(w, &p);
        kinds |= kind < 0 ? 0 : (uint64_t)1 << kind;
        i += p.after;
    }
    return kinds;
}

/* Calls f, unless NULL, for each bucket of the unit, the first of which has the number `index`. Returns the number of
 * the one after them. */
static size_t each_of(ari_op_builder *w, const ari_params *all, size_t unit, size_t index, ari_bucket_fn f)
{
    ari_op_builder_bucket open[ARI_BUCKET_KINDS] = {{.params = 0}};
    bool any[ARI_BUCKET_KINDS];
    const unit_span s = span_of(w, all, unit);
    const uint64_t kinds = kinds_in(w, all, unit);
    for (int k = 0; k < ARI_BUCKET_KINDS; k++)
        any[k] = (kinds >> k & 1) != 0 && next_bucket(w, all, &s, k, &open[k]);
    /* None is made before it. */
    ari_op_param latest = {ARI_NO_LAYER, ARI_HEAD, false};
    if (w->config->mtp > 0)
        latest = (ari_op_param){ar_config_blocks(w->config) - 1, ARI_MTP_NORM, false};
    for (; w->st == AR_OK; index++) {
        int first = -1;
        for (int k = 0; k < ARI_BUCKET_KINDS; k++) {
            if (any[k] && (first < 0 || completes_before(&open[k], &open[first])))
                first = k;
        }
        if (first < 0)
            break;
        latest = made_after(w, &open[first].latest, &latest) ? open[first].latest : latest;
        open[first].latest = latest;
        open[first].unit = unit < all->layers ? own_layer(w, unit) : ARI_NO_LAYER;
        ari_op_builder_layer(w, open[first].first.layer);
        if (f)
            f(w, &open[first], index);
        any[first] = next_bucket(w, all, &s, first, &open[first]);
    }
    ari_op_builder_layer(w, ARI_NO_LAYER);
    return index;
}

/* The number of a unit's first bucket. Without a plan of its own each layer with experts has as many, and each without.
 */
static size_t first_of(ari_op_builder *w, const ari_params *all, size_t unit)
{
    const size_t before = all->layers - (unit < all->layers ? unit + 1 : 0);
    size_t index = 0, known[PARTS_KINDS] = {0};
    for (size_t k = all->layers; k-- > all->layers - before;) {
        size_t *n = &known[parts_kind(w, own_layer(w, k))];
        if (*n == 0 || w->c->run.plan.rules > 0)
            *n = each_of(w, all, k, 0, NULL);
        index += *n;
    }
    return index;
}

void ari_op_builder_each_bucket(ari_op_builder *w, const ari_params *all, size_t unit, ari_bucket_fn f)
{
    size_t k = 0, index = 0;
    if (ari_op_builder_zero(w) < 2) {
        each_of(w, all, ARI_ALL_UNITS, 0, f);
        return;
    }
    if (unit == ARI_ALL_UNITS) {
        for (k = all->layers; k-- > 0;)
            index = each_of(w, all, k, index, f);
        each_of(w, all, all->layers, index, f);
        return;
    }
    while (k < all->layers && own_layer(w, k) != unit)
        k++;
    each_of(w, all, k, first_of(w, all, k), f);
}
