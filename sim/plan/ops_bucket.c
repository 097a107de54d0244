/* SPDX-License-Identifier: Apache-2.0 */
/* The buckets in which the gradients of a rank's parameters move. */
#include "sim/plan/ops_impl.h"

#include <string.h>

#include "ref/core/size.h"
#include "ref/core/tensor_private.h"
#include "ref/models/parallel_private.h"
#include "ref/placement/parallel_private.h"

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
        ari_split_uneven(p->value.shape[d], cut ? (int)(w->ranks[ARI_AXIS_TP] / p->value.copies) : 1, 0, &start,
                         &extent);
        n = ari_op_builder_mul(w, n, extent);
    }
    return n;
}

static bool is_table(ari_role role)
{
    return role == ARI_TOKENS || role == ARI_POSITIONS;
}

static int kind_of_value(const ari_op_builder *w, const ari_op_value *v)
{
    const ar_placement tp = v->at[ARI_AXIS_TP];
    const bool uneven = tp.kind == AR_SHARD && v->shape[tp.dim] % (w->ranks[ARI_AXIS_TP] / v->copies) != 0;
    const bool spread = tp.kind == AR_REPLICATE && w->ranks[ARI_AXIS_TP] > 1;
    const bool ends = v->at[ARI_AXIS_PP].kind == AR_REPLICATE;
    const bool half = v->dtype == AR_BF16;
    return (w->apart && ari_is_expert_part(v->role) ? ARI_KIND_EXPERT : 0) + (ends ? ARI_KIND_ENDS : 0) +
           (uneven ? ARI_KIND_UNEVEN : 0) + (spread ? ARI_KIND_SPREAD : 0) + (half ? ARI_KIND_NARROW : 0) +
           (half && is_table(v->role) ? ARI_KIND_TABLE : 0) +
           (ari_op_by_muon(w->c, v->role, v->bias) ? ARI_KIND_MATRIX : 0);
}

/* -1: without a gradient, in no bucket. */
static int kind_of(const ari_op_builder *w, const ari_one_param *p)
{
    return p->of.role == ARI_ROUTER_BIAS ? -1 : kind_of_value(w, &p->value);
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

/* Units by number: the rank's blocks in their order, then the root unit; or all parameters. A unit's are at
 * [begin, end), but for those of blocks where it is the root. */
typedef struct unit_span {
    size_t begin, end;
    const ari_params *root; /* NULL: it is not */
} unit_span;

static unit_span span_of(const ari_op_builder *w, const ari_params *all, size_t unit)
{
    unit_span s = {.end = all->n, .root = unit == all->layers ? all : NULL};
    if (unit < all->layers) {
        s.begin = all->before.n + (unit < all->layers - all->mtp ? 0 : all->after.n);
        for (size_t k = 0; k < unit; k++)
            s.begin += ari_op_builder_parts_of(w, all, k)->n;
        s.end = s.begin + ari_op_builder_parts_of(w, all, unit)->n;
    }
    return s;
}

static bool left_out(ari_op_builder *w, const unit_span *s, size_t i)
{
    return s->root && ari_op_builder_locate(w, s->root, i).unit < s->root->layers;
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
        if (left_out(w, s, i))
            continue;
        const ari_one_param here = ari_op_builder_locate(w, all, i);
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
            if (left_out(w, s, i))
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

/* It and those of its size that follow it in the order of packing. */
static size_t run_of(const ari_op_builder *w, const ari_one_param *p)
{
    return 1 + (w->c->run.ddp.order == AR_BUCKETS_BY_SIZE ? p->after : p->before);
}

/* How many parameters fit into a bucket, of those from p on that have its size. The first always does. */
static size_t fitting(const ari_op_builder *w, const ari_one_param *p, size_t bytes, size_t filled, bool empty)
{
    const size_t run = run_of(w, p);
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
        b->by_any = b->by_any || (p.value.ndim < 2);
        b->by_token = b->by_token || p.of.role == ARI_TOKENS || (p.of.role == ARI_POSITIONS && w->c->repeats);
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

/* The kinds of the unit's parameters. Without a plan of its own each layer has those of others of its parts. */
static void find_kinds(bool any[ARI_BUCKET_KINDS], ari_op_builder *w, const ari_params *all, size_t unit)
{
    const bool alike =
        w->c->run.plan.rules == 0 && unit == ARI_ALL_UNITS && ari_op_builder_same_parts(all) && all->layers > 0;
    const unit_span s = span_of(w, all, unit);
    const size_t begin = all->before.n, end = begin + all->in_blocks;
    memset(any, 0, ARI_BUCKET_KINDS * sizeof *any);
    for (size_t i = s.begin; i < s.end && w->st == AR_OK; i++) {
        if (alike && i == begin + ari_op_builder_parts_of(w, all, 0)->n)
            i = end;
        if (i >= s.end || left_out(w, &s, i))
            continue;
        const ari_one_param p = ari_op_builder_param_at(w, all, i);
        const int kind = kind_of(w, &p);
        if (kind >= 0)
            any[kind] = true;
        i += p.after;
    }
}

/* Calls f, unless NULL, for each bucket of the unit, the first of which has the number `index`. Returns the number of
 * the one after them. */
static size_t each_of(ari_op_builder *w, const ari_params *all, size_t unit, size_t index, ari_bucket_fn f)
{
    ari_op_builder_bucket open[ARI_BUCKET_KINDS] = {{.params = 0}};
    bool any[ARI_BUCKET_KINDS];
    const unit_span s = span_of(w, all, unit);
    find_kinds(any, w, all, unit);
    for (int k = 0; k < ARI_BUCKET_KINDS; k++)
        any[k] = any[k] && next_bucket(w, all, &s, k, &open[k]);
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
        open[first].unit = unit < all->layers ? ari_op_builder_own_layer(w, unit) : ARI_NO_LAYER;
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
    size_t index = 0, known[ARI_PARTS_KINDS] = {0};
    for (size_t k = all->layers; k-- > all->layers - before;) {
        size_t *n = &known[ari_op_builder_parts_kind(w, ari_op_builder_own_layer(w, k))];
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
    while (k < all->layers && ari_op_builder_own_layer(w, k) != unit)
        k++;
    each_of(w, all, k, first_of(w, all, k), f);
}

size_t ari_op_builder_most_values(ari_op_builder *w, const ari_op_builder_bucket *b, ari_over over,
                                  ari_call_often often)
{
    const ar_parallel *p = &w->c->run.parallel;
    const size_t before = w->summing[0] / ari_op_builder_ranks(w, over);
    size_t start = 0, samples = 0, parts = 0;
    if (b->by_any)
        return SIZE_MAX;
    ari_gradient_moves(p, w->c->run.seq, &parts);
    const size_t each = ari_op_builder_mul(w, 1 + w->config->mtp, b->by_token ? 2 * w->c->run.seq : parts);
    const bool apart = often == ARI_EACH_MICRO && ari_passes_apart(p);
    ari_parallel_rows(apart ? p : &(ar_parallel){.dp = p->dp}, w->c->run.batch, 0, 0, &start, &samples);
    return ari_op_builder_mul(w, ari_op_builder_mul(w, samples, each), before > 1 ? before : 1);
}

size_t ari_op_builder_state_bytes(size_t values, bool narrow)
{
    /* The last bytes hold any number. */
    static const int bits[2][6] = {{0, 7, 15, 23, 31}, {0, 3, 7, 15, 26, 31}};
    static const size_t bytes[2][6] = {{4, 11, 13, 15, 17}, {4, 5, 6, 8, 11, 13}};
    const int last = narrow ? 5 : 4;
    int i = 0;
    while (i < last && values > (size_t)1 << bits[narrow][i])
        i++;
    return bytes[narrow][i];
}
