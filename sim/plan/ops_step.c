/* SPDX-License-Identifier: Apache-2.0 */
/* What is outside of the passes: parameters made equal at the start; of a step the sums over ranks, in buckets, and the
 * update. */
#include "sim/plan/ops_impl.h"

#include "ref/core/size.h"

/* --- the parameters of a rank ------------------------------------------------------------------------------------- */

typedef struct part {
    ari_role role;
    bool bias;
} part;

enum { PARTS = 20 };
typedef struct part_list {
    part at[PARTS];
    size_t n;
} part_list;

/* In the order of their registration: before the blocks, of each block, after them. */
typedef struct params {
    part_list before, block, after;
    size_t n;
} params;

typedef struct param {
    size_t layer;
    part of;
    ari_op_value value;
    size_t elements; /* of this rank */
} param;

static void add(const ari_walk *w, part_list *list, ari_role role)
{
    list->at[list->n++] = (part){role, false};
    if (ari_walk_has_bias(w, role))
        list->at[list->n++] = (part){role, true};
}

static void add_block(const ari_walk *w, part_list *list)
{
    add(w, list, ARI_NORM1);
    add(w, list, w->packed ? ARI_QKV : ARI_Q);
    if (!w->packed) {
        add(w, list, ARI_K);
        add(w, list, ARI_V);
    }
    add(w, list, ARI_OUT);
    add(w, list, ARI_NORM2);
    add(w, list, w->config->gated ? ARI_GATE : ARI_FIRST);
    if (w->config->gated)
        add(w, list, ARI_UP);
    add(w, list, ARI_DOWN);
}

static params params_of(ari_walk *w)
{
    const ar_config *c = w->config;
    params p = {.n = 0};
    add(w, &p.before, ARI_TOKENS);
    if (c->learned_positions)
        add(w, &p.before, ARI_POSITIONS);
    add_block(w, &p.block);
    if (c->final_norm)
        add(w, &p.after, ARI_FINAL_NORM);
    if (w->head && !c->tied)
        add(w, &p.after, ARI_HEAD);
    p.n = ari_walk_add(w, p.before.n + p.after.n, ari_walk_mul(w, c->layers, p.block.n));
    return p;
}

static size_t local_elements(ari_walk *w, const ari_op_value *v)
{
    size_t n = 1;
    for (int d = 0; d < v->ndim; d++)
        n = ari_walk_mul(w, n, v->local[d]);
    return n;
}

/* Parameter i in that order; the walk is at its layer then. */
static param param_at(ari_walk *w, const params *p, size_t i)
{
    const size_t in_blocks = w->config->layers * p->block.n, at = i - p->before.n;
    param one = {.layer = ARI_NO_LAYER};
    if (i < p->before.n) {
        one.of = p->before.at[i];
    } else if (at < in_blocks) {
        one.layer = at / p->block.n;
        one.of = p->block.at[at % p->block.n];
    } else {
        one.of = p->after.at[at - in_blocks];
    }
    if (one.layer != w->layer)
        ari_walk_layer(w, one.layer);
    one.value = ari_walk_param(w, one.of.role, one.of.bias);
    one.elements = local_elements(w, &one.value);
    return one;
}

static const char *suffix(part p)
{
    return p.bias ? ".bias" : ".weight";
}

/* --- buckets ------------------------------------------------------------------------------------------------------ */

/* Parameters share a bucket that are stored alike, summed over the same groups, and of as many elements on every tp
 * rank, or all of them not. */
enum { UNEVEN = 4, SPREAD = 2, NARROW = 1, BUCKET_KINDS = 8 };

/* A place in the order of packing: by `major`, then by `minor`. */
typedef struct place {
    size_t major, minor;
} place;

typedef struct bucket {
    param first;
    int kind;
    size_t elements, params;
    place last;          /* of its last parameter in the order of packing */
    ari_op_param latest; /* in that of the backward pass, of this bucket and those before it */
} bucket;

static bool before(place a, place b)
{
    return a.major < b.major || (a.major == b.major && a.minor < b.minor);
}

/* Bytes of the gradient in fp32 on the tp rank that has most, the first. */
static size_t bytes_of(ari_walk *w, const param *p)
{
    const ar_placement tp = p->value.at[ARI_AXIS_TP];
    size_t n = sizeof(float), start = 0, extent = 0;
    for (int d = 0; d < p->value.ndim; d++) {
        const bool cut = tp.kind == AR_SHARD && tp.dim == d;
        ar_split_uneven(p->value.shape[d], cut ? (int)(w->ranks[ARI_AXIS_TP] / p->value.copies) : 1, 0, &start,
                        &extent);
        n = ari_walk_mul(w, n, extent);
    }
    return n;
}

static int kind_of(const ari_walk *w, const param *p)
{
    const ar_placement tp = p->value.at[ARI_AXIS_TP];
    const bool uneven = tp.kind == AR_SHARD && p->value.shape[tp.dim] % (w->ranks[ARI_AXIS_TP] / p->value.copies) != 0;
    return (uneven ? UNEVEN : 0) + (tp.kind == AR_REPLICATE ? SPREAD : 0) + (p->value.dtype == AR_BF16 ? NARROW : 0);
}

static place place_of(ari_walk *w, const params *all, const param *p, size_t i)
{
    if (w->c->run.ddp.order == AR_BUCKETS_BY_SIZE)
        return (place){SIZE_MAX - bytes_of(w, p), i};
    return (place){0, all->n - 1 - i};
}

/* Whether the backward pass makes the gradient of a after that of b: from the last layer to the first, in a block in the
 * order in which its parts get theirs, a bias after its weight, and the embedding at the end. */
static bool made_after(const ari_op_param *a, const ari_op_param *b)
{
    static const int order[ARI_ROLES] = {
        [ARI_DOWN] = 1,  [ARI_FIRST] = 2,  [ARI_GATE] = 2,      [ARI_UP] = 3,   [ARI_NORM2] = 4,
        [ARI_OUT] = 5,   [ARI_QKV] = 6,    [ARI_Q] = 6,         [ARI_K] = 7,    [ARI_V] = 8,
        [ARI_NORM1] = 9, [ARI_TOKENS] = 1, [ARI_POSITIONS] = 2, [ARI_HEAD] = 1, [ARI_FINAL_NORM] = 2};
    static const int sections[] = {[ARI_BEFORE_BLOCKS] = 2, [ARI_IN_BLOCKS] = 1, [ARI_AFTER_BLOCKS] = 0};
    const int sa = sections[ari_section_of(a->role)], sb = sections[ari_section_of(b->role)];
    if (sa != sb)
        return sa > sb;
    if (a->layer != b->layer)
        return a->layer < b->layer;
    return a->role == b->role ? a->bias : order[a->role] > order[b->role];
}

/* The parameter of this kind that comes next after a place (NULL: the first); false: there is none. */
static bool next_param(ari_walk *w, const params *all, int kind, const place *after, param *next, place *at)
{
    const bool by_size = w->c->run.ddp.order == AR_BUCKETS_BY_SIZE;
    bool found = false;
    for (size_t i = !by_size && after ? all->n - 1 - after->minor : all->n; i-- > 0 && w->st == AR_OK;) {
        const param p = param_at(w, all, i);
        const place here = place_of(w, all, &p, i);
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
static bool next_bucket(ari_walk *w, const params *all, int kind, bucket *b)
{
    const size_t capacity = w->c->run.ddp.bucket_bytes;
    const place begin = b->last;
    const bool more = b->params > 0;
    param p;
    place at;
    size_t filled = 0;
    if (!next_param(w, all, kind, more ? &begin : NULL, &p, &at))
        return false;
    *b = (bucket){.first = p, .kind = kind, .latest = {p.layer, p.of.role, p.of.bias}};
    do {
        const size_t bytes = bytes_of(w, &p);
        if (b->params > 0 && (capacity == 0 || filled > capacity || bytes > capacity - filled))
            break;
        filled = ari_walk_add(w, filled, bytes);
        b->elements = ari_walk_add(w, b->elements, p.elements);
        b->params++;
        b->last = at;
        const ari_op_param here = {p.layer, p.of.role, p.of.bias};
        b->latest = made_after(&here, &b->latest) ? here : b->latest;
    } while (next_param(w, all, kind, &b->last, &p, &at));
    return true;
}

/* Calls f for each bucket, in the order in which they become complete. */
static void each_bucket(ari_walk *w, const params *all, void (*f)(ari_walk *w, const bucket *b, size_t index))
{
    bucket open[BUCKET_KINDS] = {{.params = 0}};
    bool any[BUCKET_KINDS];
    for (int k = 0; k < BUCKET_KINDS; k++)
        any[k] = next_bucket(w, all, k, &open[k]);
    ari_op_param latest = {ARI_NO_LAYER, ARI_HEAD, false}; /* none is made before it */
    for (size_t index = 0; w->st == AR_OK; index++) {
        int first = -1;
        for (int k = 0; k < BUCKET_KINDS; k++) {
            if (any[k] && (first < 0 || before(open[k].last, open[first].last)))
                first = k;
        }
        if (first < 0)
            break;
        latest = made_after(&open[first].latest, &latest) ? open[first].latest : latest;
        open[first].latest = latest;
        ari_walk_layer(w, open[first].first.layer);
        f(w, &open[first], index);
        any[first] = next_bucket(w, all, first, &open[first]);
    }
    ari_walk_layer(w, ARI_NO_LAYER);
}

/* --- sums over ranks ---------------------------------------------------------------------------------------------- */

/* Of n terms. Exact: the accumulator's index and its two int64. To a share of them on each rank: the index is needed
 * whole, to which the own terms are raised before they are added. */
static void sum_terms(ari_walk *w, ari_call_group over, size_t n, ar_dtype dtype, bool shares, ari_role role,
                      const char *tag)
{
    const ari_call_kind kind = shares ? ARI_CALL_REDUCE_SCATTER : ARI_CALL_ALL_REDUCE;
    if (!w->exact) {
        ari_walk_call(w, kind, over, n, dtype, ARI_EACH_STEP, role, tag);
        return;
    }
    ari_walk_call(w, ARI_CALL_ALL_REDUCE, over, n, AR_U8, ARI_EACH_STEP, role, tag);
    ari_walk_call(w, kind, over, shares ? n : ari_walk_mul(w, 2, n), AR_I64, ARI_EACH_STEP, role, tag);
    if (shares)
        ari_walk_call(w, kind, over, n, AR_I64, ARI_EACH_STEP, role, tag);
}

static bool shares(const ari_walk *w)
{
    return w->c->run.parallel.zero > 0 && w->summing > 1;
}

/* Places a value over all axes along which gradients are summed. */
static void over_dp(ari_op_value *v, ar_placement p)
{
    for (int axis = ARI_AXIS_DP; axis <= ARI_AXIS_INNER; axis++)
        v->at[axis] = p;
}

/* A run of n elements; whole on each of the N ranks over which gradients are summed, or each has its share, the first
 * (n mod N) of one more. */
static ari_op_value run_of(const ari_walk *w, size_t n, ar_dtype dtype, bool share)
{
    ari_op_value v = {.dtype = dtype, .ndim = 1, .shape = {n}, .local = {n}, .copies = 1};
    for (int axis = 0; axis < ARI_PLACED_AXES; axis++)
        v.at[axis] = ari_whole;
    if (share) {
        over_dp(&v, (ar_placement){AR_SHARD, 0});
        v.local[0] = n / w->summing + (w->summing_rank < n % w->summing);
    }
    return v;
}

static ari_operation *begin_bucket(ari_walk *w, ari_operation_kind kind, const bucket *b, size_t index)
{
    ari_operation *op = ari_walk_begin(w, kind, b->first.of.role);
    op->bucket = index;
    op->params = b->params;
    op->last = b->latest;
    op->made = ari_whole;
    return op;
}

/* With buckets that overlap the backward pass its collectives are on their queue. */
static void beside_passes(ari_walk *w)
{
    for (int i = 0; i < w->op.calls; i++)
        w->op.call[i].queue = w->c->run.ddp.mode == AR_BUCKETS_OVERLAP ? ARI_ON_BUCKETS : ARI_ON_MAIN;
}

static void sum_bucket(ari_walk *w, const bucket *b, size_t index)
{
    const bool spread = (b->kind & SPREAD) != 0;
    const ar_dtype dtype = b->kind & NARROW ? AR_BF16 : AR_F32;
    const ar_placement partial = {AR_PARTIAL_SUM, 0};
    ari_operation *op = begin_bucket(w, ARI_OPERATION_GRADIENT_SUM, b, index);
    ari_op_value *in = &op->input[op->inputs++];
    *in = run_of(w, b->elements, dtype, false);
    over_dp(in, partial);
    in->at[ARI_AXIS_TP] = op->made = spread ? partial : ari_whole;
    op->output[op->outputs++] = run_of(w, b->elements, dtype, shares(w));
    op->output[0].bias = b->first.of.bias;
    if (spread)
        sum_terms(w, ARI_OVER_TP, b->elements, dtype, false, b->first.of.role, suffix(b->first.of));
    sum_terms(w, ARI_OVER_DP, b->elements, dtype, shares(w), b->first.of.role, suffix(b->first.of));
    beside_passes(w);
    if (op->calls > 0 || w->every_bucket)
        ari_walk_visit(w);
}

static void gather_bucket(ari_walk *w, const bucket *b, size_t index)
{
    const ar_dtype dtype = b->kind & NARROW ? AR_BF16 : AR_F32;
    ari_operation *op = begin_bucket(w, ARI_OPERATION_WEIGHT_GATHER, b, index);
    op->input[op->inputs++] = run_of(w, b->elements, dtype, true);
    op->output[op->outputs++] = run_of(w, b->elements, dtype, false);
    op->output[0].bias = b->first.of.bias;
    ari_walk_call(w, ARI_CALL_ALL_GATHER, ARI_OVER_DP, b->elements, dtype, ARI_EACH_STEP, ARI_NO_ROLE, "model");
    ari_walk_visit(w);
}

/* An operation that is nothing but its collectives. */
static void begin_sum(ari_walk *w, ari_operation_kind kind, size_t n, ar_dtype dtype)
{
    ari_operation *op = ari_walk_begin(w, kind, ARI_NO_ROLE);
    op->made = ari_whole;
    op->input[op->inputs++] = run_of(w, n, dtype, false);
    over_dp(&op->input[0], (ar_placement){AR_PARTIAL_SUM, 0});
    op->output[op->outputs++] = run_of(w, n, dtype, false);
}

static void visit_if_moved(ari_walk *w)
{
    if (w->op.calls > 0)
        ari_walk_visit(w);
}

/* --- the start ---------------------------------------------------------------------------------------------------- */

/* Two words: a hash of the parameters, and their number. */
static void agree(ari_walk *w)
{
    begin_sum(w, ARI_OPERATION_AGREEMENT, 2, AR_I64);
    ari_walk_call(w, ARI_CALL_ALL_GATHER, ARI_OVER_DP, ari_walk_mul(w, 2, w->summing), AR_I64, ARI_AT_START,
                  ARI_NO_ROLE, "parameters of data parallelism");
    visit_if_moved(w);
}

void ari_walk_start(ari_walk *w)
{
    const params all = params_of(w);
    w->pass = ARI_PASS_START;
    for (size_t i = 0; i < all.n && w->summing > 1 && w->st == AR_OK; i++) {
        const param p = param_at(w, &all, i);
        ari_operation *op = ari_walk_begin(w, ARI_OPERATION_BROADCAST, p.of.role);
        op->made = p.value.at[ARI_AXIS_TP];
        op->input[op->inputs++] = op->output[op->outputs++] = p.value;
        ari_walk_call(w, ARI_CALL_BROADCAST, ARI_OVER_DP, p.elements, p.value.dtype, ARI_AT_START, p.of.role,
                      suffix(p.of));
        ari_walk_visit(w);
    }
    ari_walk_layer(w, ARI_NO_LAYER);
    if (!w->c->forward_only)
        agree(w);
}

/* --- the step ----------------------------------------------------------------------------------------------------- */

void ari_walk_before(ari_walk *w)
{
    w->pass = ARI_PASS_STEP;
    begin_sum(w, ARI_OPERATION_TARGETS, 1, AR_I64);
    ari_walk_call(w, ARI_CALL_ALL_REDUCE, ARI_OVER_DP, 1, AR_I64, ARI_EACH_STEP, ARI_NO_ROLE, "targets");
    visit_if_moved(w);
}

/* Without a head each rank's terms are those of its own tokens. */
static void sum_loss(ari_walk *w)
{
    begin_sum(w, ARI_OPERATION_LOSS_SUM, 1, AR_F32);
    if (w->sp && !w->head) {
        w->op.input[0].at[ARI_AXIS_TP] = (ar_placement){AR_PARTIAL_SUM, 0};
        sum_terms(w, ARI_OVER_TP, 1, AR_F32, false, ARI_NO_ROLE, "loss");
    }
    sum_terms(w, ARI_OVER_DP, 1, AR_F32, false, ARI_NO_ROLE, "loss");
    visit_if_moved(w);
}

/* A byte for each parameter. */
static void find_unused(ari_walk *w, const params *all)
{
    begin_sum(w, ARI_OPERATION_UNUSED, all->n, AR_U8);
    ari_walk_call(w, ARI_CALL_ALL_REDUCE, ARI_OVER_DP, all->n, AR_U8, ARI_EACH_STEP, ARI_NO_ROLE, "used parameters");
    beside_passes(w);
    visit_if_moved(w);
}

/* An exponent, then two int64, over the ranks that hold different elements. */
static void norm_of_gradients(ari_walk *w)
{
    static const char tag[] = "grad_norm";
    begin_sum(w, ARI_OPERATION_GRADIENT_NORM, 1, AR_F32);
    w->op.input[0].at[ARI_AXIS_TP] = (ar_placement){AR_PARTIAL_SUM, 0};
    over_dp(&w->op.input[0], shares(w) ? (ar_placement){AR_PARTIAL_SUM, 0} : ari_whole);
    for (int i = 0; i < 2; i++) {
        const size_t n = i == 0 ? 1 : 2;
        const ar_dtype dtype = i == 0 ? AR_I32 : AR_I64;
        ari_walk_call(w, ARI_CALL_ALL_REDUCE, ARI_OVER_TP, n, dtype, ARI_EACH_STEP, ARI_NO_ROLE, tag);
        if (shares(w))
            ari_walk_call(w, ARI_CALL_ALL_REDUCE, ARI_OVER_DP, n, dtype, ARI_EACH_STEP, ARI_NO_ROLE, tag);
    }
    ari_walk_visit(w);
}

/* What each rank says of each of its parameters, and of itself, goes over tp, then over dp (docs/gradients.md). */
static void verify(ari_walk *w, const params *all)
{
    enum { WORDS_OF_A_PARAMETER = 16, WORDS_OF_A_RANK = 2 };
    static const char tag[] = "gradients:verify";
    const size_t words = ari_walk_add(w, ari_walk_mul(w, all->n, WORDS_OF_A_PARAMETER), WORDS_OF_A_RANK);
    const size_t of_tp = ari_walk_mul(w, w->ranks[ARI_AXIS_TP], words);
    begin_sum(w, ARI_OPERATION_VERIFY, words, AR_I64);
    ari_walk_call(w, ARI_CALL_ALL_GATHER, ARI_OVER_TP, of_tp, AR_I64, ARI_EACH_VERIFIED_STEP, ARI_NO_ROLE, tag);
    ari_walk_call(w, ARI_CALL_ALL_GATHER, ARI_OVER_DP, ari_walk_mul(w, w->summing, of_tp), AR_I64,
                  ARI_EACH_VERIFIED_STEP, ARI_NO_ROLE, tag);
    ari_walk_visit(w);
}

/* Of all elements that the rank holds; with ZeRO each rank updates its share of every bucket, then gathers them. */
static void update(ari_walk *w, const params *all)
{
    size_t held = 0;
    for (size_t i = 0; i < all->n && w->st == AR_OK; i++)
        held = ari_walk_add(w, held, param_at(w, all, i).elements);
    ari_walk_layer(w, ARI_NO_LAYER);
    ari_operation *op = ari_walk_begin(w, ARI_OPERATION_UPDATE, ARI_NO_ROLE);
    op->made = ari_whole;
    op->params = all->n;
    op->input[op->inputs++] = op->output[op->outputs++] = run_of(w, held, AR_F32, shares(w));
    ari_walk_visit(w);
    if (shares(w))
        each_bucket(w, all, gather_bucket);
}

void ari_walk_params(ari_walk *w, ari_param_visitor visit)
{
    const params all = params_of(w);
    for (size_t i = 0; i < all.n && w->st == AR_OK; i++) {
        const param p = param_at(w, &all, i);
        if (w->st == AR_OK)
            w->st = visit(w->user, p.layer, &p.value);
    }
}

void ari_walk_buckets(ari_walk *w)
{
    const params all = params_of(w);
    w->pass = ARI_PASS_STEP;
    w->every_bucket = true;
    each_bucket(w, &all, sum_bucket);
}

void ari_walk_after(ari_walk *w)
{
    const params all = params_of(w);
    const bool eager = w->c->run.ddp.mode == AR_BUCKETS_EAGER, updates = w->c->run.steps > 0;
    w->pass = ARI_PASS_STEP;
    w->micro = 0;
    if (!w->c->forward_only && !eager)
        each_bucket(w, &all, sum_bucket);
    sum_loss(w);
    if (w->c->forward_only)
        return;
    if (eager)
        each_bucket(w, &all, sum_bucket);
    if (w->c->run.ddp.find_unused)
        find_unused(w, &all);
    if (w->c->run.clip > 0.0 && updates)
        norm_of_gradients(w);
    if (w->c->verified > 0)
        verify(w, &all);
    if (updates)
        update(w, &all);
}
