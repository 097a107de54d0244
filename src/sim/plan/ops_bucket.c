/* SPDX-License-Identifier: Apache-2.0 */
/* The parameters of a rank, and the buckets in which their gradients move. */
#include "sim/plan/ops_impl.h"

#include "ref/core/size.h"

/* --- the parameters of a rank ------------------------------------------------------------------------------------- */

static void add(const ari_op_builder *w, ari_part_list *list, ari_role role)
{
    list->at[list->n++] = (ari_param_part){role, false};
    if (ari_op_builder_has_bias(w, role))
        list->at[list->n++] = (ari_param_part){role, true};
}

static void add_block(const ari_op_builder *w, ari_part_list *list)
{
    const bool before = w->config->norm_place != AR_NORM_AFTER, after = w->config->norm_place != AR_NORM_BEFORE;
    if (before)
        add(w, list, ARI_NORM1);
    add(w, list, w->form.packed ? ARI_QKV : ARI_Q);
    if (!w->form.packed) {
        add(w, list, ARI_K);
        add(w, list, ARI_V);
    }
    if (w->config->qk_norm != AR_QK_NORM_NONE) {
        add(w, list, ARI_Q_NORM);
        add(w, list, ARI_K_NORM);
    }
    add(w, list, ARI_OUT);
    if (after)
        add(w, list, ARI_ATTENTION_NORM);
    if (before)
        add(w, list, ARI_NORM2);
    add(w, list, w->form.gate_up ? ARI_GATE_UP : w->config->gated ? ARI_GATE : ARI_FIRST);
    if (w->config->gated && !w->form.gate_up)
        add(w, list, ARI_UP);
    add(w, list, ARI_DOWN);
    if (after)
        add(w, list, ARI_MLP_NORM);
}

/* The head's weight where it is tied is the table of tokens, which the first stage has. */
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
}

ari_params ari_op_builder_all_params(ari_op_builder *w)
{
    ari_params p = {.n = 0};
    add_ends(w, &p);
    add_block(w, &p.block);
    for (size_t stage = w->at[ARI_AXIS_PP]; stage < w->stages; stage += w->ranks[ARI_AXIS_PP]) {
        size_t begin = 0, end = 0;
        ari_op_builder_stage_layers(w, stage, &begin, &end);
        p.layers += end - begin;
    }
    p.n = ari_op_builder_add(w, p.before.n + p.after.n, ari_op_builder_mul(w, p.layers, p.block.n));
    return p;
}

/* The i-th of the rank's layers. */
static size_t own_layer(const ari_op_builder *w, size_t i)
{
    size_t begin = 0, end = 0;
    for (size_t stage = w->at[ARI_AXIS_PP]; stage < w->stages; stage += w->ranks[ARI_AXIS_PP]) {
        ari_op_builder_stage_layers(w, stage, &begin, &end);
        if (i < end - begin)
            break;
        i -= end - begin;
    }
    return begin + i;
}

static size_t local_elements(ari_op_builder *w, const ari_op_value *v)
{
    size_t n = 1;
    for (int d = 0; d < v->ndim; d++)
        n = ari_op_builder_mul(w, n, v->local[d]);
    return n;
}

/* Parameter i in that order; the walk is at its layer then. */
ari_one_param ari_op_builder_param_at(ari_op_builder *w, const ari_params *p, size_t i)
{
    const size_t in_blocks = p->layers * p->block.n, at = i - p->before.n;
    ari_one_param one = {.layer = ARI_NO_LAYER};
    if (i < p->before.n) {
        one.of = p->before.at[i];
    } else if (at < in_blocks) {
        one.layer = own_layer(w, at / p->block.n);
        one.of = p->block.at[at % p->block.n];
    } else {
        one.of = p->after.at[at - in_blocks];
    }
    if (one.layer != w->layer)
        ari_op_builder_layer(w, one.layer);
    one.value = ari_op_builder_param(w, one.of.role, one.of.bias);
    one.elements = local_elements(w, &one.value);
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

static int kind_of(const ari_op_builder *w, const ari_one_param *p)
{
    const ar_placement tp = p->value.at[ARI_AXIS_TP];
    const bool uneven = tp.kind == AR_SHARD && p->value.shape[tp.dim] % (w->ranks[ARI_AXIS_TP] / p->value.copies) != 0;
    const bool spread = tp.kind == AR_REPLICATE && w->ranks[ARI_AXIS_TP] > 1;
    const bool ends = p->value.at[ARI_AXIS_PP].kind == AR_REPLICATE;
    return (ends ? ARI_KIND_ENDS : 0) + (uneven ? ARI_KIND_UNEVEN : 0) + (spread ? ARI_KIND_SPREAD : 0) +
           (p->value.dtype == AR_BF16 ? ARI_KIND_NARROW : 0);
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

/* True if the backward pass makes the gradient of a after that of b: from the last layer to the first, in a block in
 * the order of its parts, a bias after its weight, and the embedding at the end. */
static bool made_after(const ari_op_builder *w, const ari_op_param *a, const ari_op_param *b)
{
    static const int order[ARI_ROLES] = {
        [ARI_MLP_NORM] = 1, [ARI_DOWN] = 2,      [ARI_FIRST] = 3,  [ARI_GATE] = 3,
        [ARI_GATE_UP] = 3,  [ARI_UP] = 4,        [ARI_NORM2] = 5,  [ARI_ATTENTION_NORM] = 6,
        [ARI_OUT] = 7,      [ARI_Q_NORM] = 8,    [ARI_K_NORM] = 9, [ARI_QKV] = 10,
        [ARI_Q] = 10,       [ARI_K] = 11,        [ARI_V] = 12,     [ARI_NORM1] = 13,
        [ARI_TOKENS] = 1,   [ARI_POSITIONS] = 2, [ARI_HEAD] = 1,   [ARI_FINAL_NORM] = 2};
    static const int sections[] = {[ARI_BEFORE_BLOCKS] = 2, [ARI_IN_BLOCKS] = 1, [ARI_AFTER_BLOCKS] = 0};
    const int sa = sections[section_of(w, a->role)], sb = sections[section_of(w, b->role)];
    if (sa != sb)
        return sa > sb;
    if (a->layer != b->layer)
        return a->layer < b->layer;
    return a->role == b->role ? a->bias : order[a->role] > order[b->role];
}

/* Units by number: the rank's layers in their order, then the root unit; or all parameters. */
static bool in_unit(const ari_params *all, size_t unit, size_t i)
{
    const size_t begin = all->before.n, end = begin + all->layers * all->block.n;
    if (unit == ARI_ALL_UNITS)
        return true;
    return i >= begin && i < end ? (i - begin) / all->block.n == unit : unit == all->layers;
}

/* The parameter of this kind that comes next after a place (NULL: the first); false: there is none. */
static bool next_param(ari_op_builder *w, const ari_params *all, size_t unit, int kind, const ari_bucket_place *after,
                       ari_one_param *next, ari_bucket_place *at)
{
    const bool by_size = w->c->run.ddp.order == AR_BUCKETS_BY_SIZE;
    bool found = false;
    for (size_t i = !by_size && after ? all->n - 1 - after->minor : all->n; i-- > 0 && w->st == AR_OK;) {
        if (!in_unit(all, unit, i))
            continue;
        const ari_one_param p = ari_op_builder_param_at(w, all, i);
        const ari_bucket_place here = place_of(w, all, &p, i);
        if (kind_of(w, &p) != kind || (after && !before(*after, here)) || (found && !before(here, *at)))
            continue;
        *next = p;
        *at = here;
        found = true;
        if (!by_size)
            break;
    }
    return found;
}

/* Next fit: parameters are added until one does not fit. */
static bool next_bucket(ari_op_builder *w, const ari_params *all, size_t unit, int kind, ari_op_builder_bucket *b)
{
    const size_t capacity = w->c->run.ddp.bucket_bytes;
    const ari_bucket_place begin = b->last;
    const bool more = b->params > 0;
    ari_one_param p;
    ari_bucket_place at;
    size_t filled = 0;
    if (!next_param(w, all, unit, kind, more ? &begin : NULL, &p, &at))
        return false;
    *b = (ari_op_builder_bucket){.first = p, .kind = kind, .latest = {p.layer, p.of.role, p.of.bias}};
    do {
        const size_t bytes = bytes_of(w, &p);
        if (b->params > 0 && (capacity == 0 || filled > capacity || bytes > capacity - filled))
            break;
        filled = ari_op_builder_add(w, filled, bytes);
        b->elements = ari_op_builder_add(w, b->elements, p.elements);
        b->params++;
        b->last = at;
        const ari_op_param here = {p.layer, p.of.role, p.of.bias};
        b->latest = made_after(w, &here, &b->latest) ? here : b->latest;
    } while (next_param(w, all, unit, kind, &b->last, &p, &at));
    return true;
}

/* True if bucket a completes before b: in the order of packing, except that a bucket which the other end of a pipeline
 * must complete too comes last. */
static bool completes_before(const ari_op_builder_bucket *a, const ari_op_builder_bucket *b)
{
    const int ends_a = a->kind & ARI_KIND_ENDS, ends_b = b->kind & ARI_KIND_ENDS;
    return ends_a == ends_b ? before(a->last, b->last) : ends_a < ends_b;
}

/* The kinds of the unit's parameters, as bits. Without a plan of its own each layer has the same. */
static unsigned kinds_in(ari_op_builder *w, const ari_params *all, size_t unit)
{
    const bool alike = w->c->run.plan.rules == 0 && unit == ARI_ALL_UNITS;
    const size_t begin = all->before.n, end = begin + all->layers * all->block.n;
    unsigned kinds = 0;
    for (size_t i = 0; i < all->n && w->st == AR_OK; i++) {
        if (alike && i == begin + all->block.n)
            i = end;
        if (i >= all->n || !in_unit(all, unit, i))
            continue;
        const ari_one_param p = ari_op_builder_param_at(w, all, i);
        kinds |= 1u << kind_of(w, &p);
    }
    return kinds;
}

/* Calls f, unless NULL, for each bucket of the unit, the first of which has the number `index`. Returns the number of
 * the one after them. */
static size_t each_of(ari_op_builder *w, const ari_params *all, size_t unit, size_t index, ari_bucket_fn f)
{
    ari_op_builder_bucket open[ARI_BUCKET_KINDS] = {{.params = 0}};
    bool any[ARI_BUCKET_KINDS];
    const unsigned kinds = kinds_in(w, all, unit);
    for (int k = 0; k < ARI_BUCKET_KINDS; k++)
        any[k] = kinds & 1u << k && next_bucket(w, all, unit, k, &open[k]);
    ari_op_param latest = {ARI_NO_LAYER, ARI_HEAD, false}; /* none is made before it */
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
        any[first] = next_bucket(w, all, unit, first, &open[first]);
    }
    ari_op_builder_layer(w, ARI_NO_LAYER);
    return index;
}

/* The number of a unit's first bucket. Without a plan of its own each layer has as many. */
static size_t first_of(ari_op_builder *w, const ari_params *all, size_t unit)
{
    const size_t before = all->layers - (unit < all->layers ? unit + 1 : 0);
    size_t index = 0;
    if (before > 0 && w->c->run.plan.rules == 0)
        return before * each_of(w, all, 0, 0, NULL);
    for (size_t k = all->layers; k-- > all->layers - before;)
        index = each_of(w, all, k, index, NULL);
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
