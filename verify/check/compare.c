/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/check/compare.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/boxes.h"
#include "ref/core/host_view.h"
#include "ref/core/size.h"
#include "ref/numerics/bits.h"

/* Floats in order as integers: -0 and +0 are neighbours. */
static int64_t ordered(float x)
{
    const uint32_t u = ari_bits32(x);
    return u & 0x80000000u ? -(int64_t)(u & 0x7fffffffu) - 1 : (int64_t)u;
}

uint64_t ari_ulp_distance(float a, float b)
{
    if (ari_bits32(a) == ari_bits32(b))
        return 0;
    if (a != a || b != b)
        return UINT32_MAX;
    const int64_t d = ordered(a) - ordered(b);
    return (uint64_t)(d < 0 ? -d : d);
}

ar_status ari_comparator_init(ari_comparator *c, const ari_reference *reference, float *const *gathered)
{
    *c = (ari_comparator){.reference = reference, .gathered = gathered};
    return ari_alloc_zero((void **)&c->finding, reference->count, sizeof *c->finding, "findings");
}

void ari_comparator_fini(ari_comparator *c)
{
    for (size_t i = 0; i < c->kept_count; i++)
        free(c->kept[i].local);
    free(c->finding);
    *c = (ari_comparator){0};
}

typedef struct comparing {
    ari_finding *finding;
    const float *reference;
    double allowed;
    const float *beside; /* NULL: nothing */
    float *gathered;     /* NULL: not wanted, or not this rank's to write */
    size_t before;       /* elements of earlier reports that stand before this one in the local tensor */
} comparing;

/* |difference| over what is allowed: infinite where only one of the two is a number, or nothing is allowed. */
static double ratio_of(float actual, float expected, double allowed)
{
    if (actual == expected || (actual != actual && expected != expected))
        return 0.0;
    const double difference = fabs((double)actual - (double)expected);
    return isfinite(difference) ? difference / allowed : (double)INFINITY;
}

static void compare_run(void *user, const ari_box_run *r)
{
    const comparing *c = user;
    ari_finding *f = c->finding;
    f->covered += r->count;
    for (size_t i = 0; i < r->count; i++) {
        const float actual = r->local[(ptrdiff_t)i * r->stride], expected = c->reference[r->full + i];
        if (c->gathered) /* atomic: two ranks may take the same part for theirs, and that is a finding, no race */
            __atomic_store(&c->gathered[r->full + i], &actual, __ATOMIC_RELAXED);
        if (ari_bits32(actual) == ari_bits32(expected))
            continue;
        if (c->allowed > 0.0) {
            const double beside = c->beside ? (double)c->beside[r->full + i] : 0.0;
            const double ratio = ratio_of(actual, expected, c->allowed + beside);
            f->max_ratio = ratio > f->max_ratio ? ratio : f->max_ratio;
            if (ratio <= 1.0)
                continue;
        }
        const uint64_t ulp = ari_ulp_distance(actual, expected);
        f->max_ulp = ulp > f->max_ulp ? ulp : f->max_ulp;
        if (f->different == 0 || r->full + i < f->first) {
            f->first = r->full + i;
            f->first_local = c->before + r->local_index + i;
            f->actual = actual;
        }
        f->different++;
    }
}

/* --- reports of one tensor that become one part ------------------------------------------------------------------- */

static size_t count_of(int ndim, const size_t *shape)
{
    size_t count = 1;
    for (int d = 0; d < ndim; d++)
        count *= shape[d];
    return count;
}

static bool same_but_rows(const ar_box *a, const ar_box *b, int ndim)
{
    for (int d = 1; d < ndim; d++) {
        if (a->global[d] != b->global[d] || a->local[d] != b->local[d] || a->extent[d] != b->extent[d])
            return false;
    }
    return a->local[0] == 0 && b->local[0] == 0;
}

typedef enum place { NOWHERE, AFTER, BEFORE } place;

/* Where the rows of a report stand: directly after those there are, directly before them, or neither. */
static place place_of(const ari_finding *f, const ar_layout *o, const ar_tensor *t)
{
    const ar_layout *have = &f->layout;
    const int nd = o->ndim;
    if (nd < 1 || have->ndim != nd || f->ndim != t->ndim || have->nbox != o->nbox || have->replica != o->replica ||
        have->replicas != o->replicas || memcmp(have->shape, o->shape, (size_t)nd * sizeof *o->shape) != 0)
        return NOWHERE;
    bool after = true, before = true;
    for (size_t k = 0; k < o->nbox; k++) {
        const ar_box *a = &have->box[k], *b = &o->box[k];
        if (!same_but_rows(a, b, nd) || a->extent[0] != f->shape[0] || b->extent[0] != t->shape[0])
            return NOWHERE;
        after = after && a->global[0] + a->extent[0] == b->global[0];
        before = before && b->global[0] + b->extent[0] == a->global[0];
    }
    return after ? AFTER : before ? BEFORE : NOWHERE;
}

static void join(ari_finding *f, const ar_layout *o, const ar_tensor *t, place where)
{
    for (size_t k = 0; k < o->nbox; k++) {
        f->layout.box[k].extent[0] += o->box[k].extent[0];
        if (where == BEFORE)
            f->layout.box[k].global[0] = o->box[k].global[0];
    }
    f->shape[0] += t->shape[0];
    if (where == BEFORE)
        f->first_local += ar_tensor_count(t);
}

static void first_report(ari_finding *f, const ar_layout *o, const ar_tensor *t)
{
    f->seen = true;
    f->layout = *o;
    f->ndim = t->ndim;
    memcpy(f->shape, t->shape, sizeof f->shape);
}

/* --- copies that are kept ----------------------------------------------------------------------------------------- */

typedef struct filling {
    float *local;
    const float *reference;
} filling;

static void fill_run(void *user, const ari_box_run *r)
{
    const filling *f = user;
    memcpy(f->local + r->local_index, f->reference + r->full, r->count * sizeof(float));
}

/* What a rank holds where nothing differs: the reference's values at the places of the boxes. */
static ar_status fill_from_reference(float *local, const ari_finding *f, const ari_ref_tensor *reference)
{
    ar_tensor view;
    filling user = {local, reference->values};
    AR_TRY(ar_tensor_view(&view, AR_F32, f->ndim, f->shape, (ar_buf){local}));
    ari_for_each_run(&view, &f->layout, fill_run, &user);
    return AR_OK;
}

static ari_kept *find_kept(ari_comparator *c, size_t tensor)
{
    for (size_t i = 0; i < c->kept_count; i++) {
        if (c->kept[i].tensor == tensor)
            return &c->kept[i];
    }
    return NULL;
}

/* A slot for a tensor: a free one, or that of the last in execution order if it comes after this one. A tensor that
 * lost its slot is not kept again: those that are kept then all come before it. */
static ari_kept *slot_for(ari_comparator *c, size_t tensor)
{
    if (c->kept_count < ARI_KEPT_COPIES) {
        c->kept[c->kept_count] = (ari_kept){.tensor = tensor};
        return &c->kept[c->kept_count++];
    }
    ari_kept *last = &c->kept[0];
    for (size_t i = 1; i < c->kept_count; i++)
        last = c->kept[i].tensor > last->tensor ? &c->kept[i] : last;
    if (last->tensor < tensor)
        return NULL;
    free(last->local);
    *last = (ari_kept){.tensor = tensor};
    return last;
}

/* Keeps what a finding of `had` elements has become by a report: the earlier rows, kept or without a difference, and
 * the new ones after or before them. */
static ar_status keep_report(ari_comparator *c, size_t tensor, const ari_finding *had, size_t had_count,
                             const ar_tensor *t, place where)
{
    const size_t count = ar_tensor_count(t);
    ari_kept *k = find_kept(c, tensor);
    float *whole = NULL;
    if (!k)
        k = slot_for(c, tensor);
    if (!k)
        return AR_OK;
    AR_TRY(ari_alloc((void **)&whole, had_count + count, sizeof *whole, "a copy of a tensor that differs"));
    float *earlier = whole + (where == BEFORE ? count : 0), *now = whole + (where == BEFORE ? 0 : had_count);
    ar_status st = AR_OK;
    if (k->local)
        memcpy(earlier, k->local, had_count * sizeof *whole);
    else if (had_count > 0)
        st = fill_from_reference(earlier, had, &c->reference->tensor[tensor]);
    ari_pack_elements(now, t);
    free(k->local);
    k->local = whole;
    return st;
}

/* --- the tap ------------------------------------------------------------------------------------------------------ */

static ar_status add_report(ari_comparator *c, size_t i, const ar_tap_event *e)
{
    const ari_ref_tensor *reference = &c->reference->tensor[i];
    ari_finding *f = &c->finding[i];
    const ari_finding had = *f;
    const size_t had_count = had.seen ? count_of(had.ndim, had.shape) : 0;
    const place where = had.seen ? place_of(f, e->layout, e->local) : AFTER;
    if (where == NOWHERE)
        f->broken = true;
    else if (had.seen)
        join(f, e->layout, e->local, where);
    else
        first_report(f, e->layout, e->local);
    comparing user = {f,
                      reference->values,
                      reference->allowed,
                      reference->beside,
                      c->gathered && e->layout->replica == 0 ? c->gathered[i] : NULL,
                      where == AFTER ? had_count : 0};
    ari_for_each_run(e->local, e->layout, compare_run, &user);
    if (f->different > 0 && where != NOWHERE)
        return keep_report(c, i, &had, had_count, e->local, where);
    return AR_OK;
}

ar_status ari_comparator_tap(void *user, const ar_tap_event *e)
{
    ari_comparator *c = user;
    const size_t i = ari_reference_find_in(c->reference, e->name, e->pass, (int)e->step);
    if (i < c->reference->count && count_of(e->layout->ndim, e->layout->shape) == c->reference->tensor[i].count &&
        e->local->dtype == AR_F32)
        return add_report(c, i, e);
    if (!c->unexpected[0])
        snprintf(c->unexpected, sizeof c->unexpected, "%.140s%s", e->name, ari_pass_suffix(e->pass));
    return AR_OK;
}

/* --- what all ranks say ------------------------------------------------------------------------------------------- */

static bool overlap(const ar_box *a, const ar_box *b, int ndim)
{
    for (int d = 0; d < ndim; d++) {
        if (a->global[d] + a->extent[d] <= b->global[d] || b->global[d] + b->extent[d] <= a->global[d])
            return false;
    }
    return true;
}

/* Whether no element stands in two boxes of a and b (of one layout with itself: in two of its boxes). */
static bool apart(const ar_layout *a, const ar_layout *b)
{
    if (a->ndim != b->ndim || memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) != 0)
        return false;
    for (size_t i = 0; i < a->nbox; i++) {
        for (size_t k = a == b ? i + 1 : 0; k < b->nbox; k++) {
            if (overlap(&a->box[i], &b->box[k], a->ndim))
                return false;
        }
    }
    return true;
}

/* Whether of every replica the ranks that hold it cover the tensor's `count` elements once each: as many as there are,
 * and none of them twice. A count alone would take two ranks with the same part for the whole. */
static bool covers_once(const ari_comparator *ranks, int n, size_t tensor, size_t count)
{
    size_t covered = 0;
    int replicas = 0;
    for (int r = 0; r < n; r++) {
        const ari_finding *f = &ranks[r].finding[tensor];
        if (!f->seen)
            continue;
        replicas = replicas ? replicas : f->layout.replicas;
        if (f->broken || f->layout.replicas != replicas || f->layout.replica < 0 || f->layout.replica >= replicas)
            return false;
        covered += f->covered;
        for (int other = 0; other <= r; other++) {
            const ari_finding *o = &ranks[other].finding[tensor];
            if (o->seen && o->layout.replica == f->layout.replica && !apart(&o->layout, &f->layout))
                return false;
        }
    }
    /* Within a replica nothing stands twice, so that this sum is reached only if every replica is whole. */
    return replicas > 0 && covered == count * (size_t)replicas;
}

/* Elements that differ in one replica, over all ranks that hold a part of it. */
static size_t different_in(const ari_comparator *ranks, int n, size_t tensor, int replica)
{
    size_t different = 0;
    for (int r = 0; r < n; r++) {
        const ari_finding *f = &ranks[r].finding[tensor];
        different += f->layout.replica == replica ? f->different : 0;
    }
    return different;
}

ari_verdict ari_verdict_of(const ari_comparator *ranks, int n, size_t tensor)
{
    ari_verdict v = {.rank = -1};
    for (int r = 0; r < n; r++) {
        const ari_finding *f = &ranks[r].finding[tensor];
        v.max_ulp = f->max_ulp > v.max_ulp ? f->max_ulp : v.max_ulp;
        v.max_ratio = f->max_ratio > v.max_ratio ? f->max_ratio : v.max_ratio;
        if (f->different == 0)
            continue;
        const size_t different = different_in(ranks, n, tensor, f->layout.replica);
        v.different = different > v.different ? different : v.different;
        if (v.rank < 0 || f->first < v.first) {
            v.first = f->first;
            v.first_local = f->first_local;
            v.actual = f->actual;
            v.rank = r;
        }
    }
    v.complete = covers_once(ranks, n, tensor, ranks[0].reference->tensor[tensor].count);
    return v;
}

ar_status ari_comparator_copy(float **gives, const ari_comparator *c, size_t tensor)
{
    const ari_finding *f = &c->finding[tensor];
    const size_t count = f->seen ? count_of(f->ndim, f->shape) : 0;
    const float *kept = NULL;
    for (size_t i = 0; i < c->kept_count; i++)
        kept = c->kept[i].tensor == tensor ? c->kept[i].local : kept;
    if (f->different > 0 && !kept)
        return ar_error_set(AR_ERR_NOT_FOUND, "no copy of tensor %zu was kept", tensor);
    AR_TRY(ari_alloc_zero((void **)gives, count, sizeof(float), "a copy of a tensor"));
    if (kept)
        memcpy(*gives, kept, count * sizeof(float));
    else if (count > 0)
        return fill_from_reference(*gives, f, &c->reference->tensor[tensor]);
    return AR_OK;
}
