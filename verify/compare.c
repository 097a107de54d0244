/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/compare.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"
#include "verify/boxes.h"

static uint32_t bits_of(float x)
{
    uint32_t u = 0;
    memcpy(&u, &x, sizeof u);
    return u;
}

/* Floats in order as integers: -0 and +0 are neighbours. */
static int64_t ordered(float x)
{
    const uint32_t u = bits_of(x);
    return u & 0x80000000u ? -(int64_t)(u & 0x7fffffffu) - 1 : (int64_t)u;
}

uint64_t ari_ulp_distance(float a, float b)
{
    if (bits_of(a) == bits_of(b))
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
    float *gathered; /* NULL: not wanted, or not this rank's to write */
    bool counts;     /* this rank's elements count as covered */
} comparing;

static void compare_run(void *user, const ari_box_run *r)
{
    const comparing *c = user;
    ari_finding *f = c->finding;
    f->covered += c->counts ? r->count : 0;
    for (size_t i = 0; i < r->count; i++) {
        const float actual = r->local[(ptrdiff_t)i * r->stride], expected = c->reference[r->full + i];
        if (c->gathered)
            c->gathered[r->full + i] = actual;
        if (bits_of(actual) == bits_of(expected))
            continue;
        const uint64_t ulp = ari_ulp_distance(actual, expected);
        f->max_ulp = ulp > f->max_ulp ? ulp : f->max_ulp;
        if (f->different == 0 || r->full + i < f->first) {
            f->first = r->full + i;
            f->first_local = r->local_index + i;
            f->actual = actual;
        }
        f->different++;
    }
}

static ar_status keep_copy(ari_comparator *c, size_t tensor, const ar_tensor *t)
{
    ari_kept *k = &c->kept[c->kept_count];
    const size_t count = ar_tensor_count(t);
    AR_TRY(ari_alloc((void **)&k->local, count, sizeof(float), "a copy of a tensor that differs"));
    k->tensor = tensor;
    c->kept_count++;
    for (size_t i = 0; i < count; i++) {
        size_t rest = i;
        ptrdiff_t offset = 0;
        for (int d = t->ndim - 1; d >= 0; d--) {
            offset += (ptrdiff_t)(rest % t->shape[d]) * t->stride[d];
            rest /= t->shape[d];
        }
        k->local[i] = ((const float *)t->data.ptr)[offset];
    }
    return AR_OK;
}

ar_status ari_comparator_tap(void *user, const ar_tap_event *e)
{
    ari_comparator *c = user;
    const size_t i = ari_reference_find(c->reference, e->name, e->pass);
    size_t count = 1;
    for (int d = 0; d < e->layout->ndim; d++)
        count *= e->layout->shape[d];
    if (i == c->reference->count || count != c->reference->tensor[i].count || e->local->dtype != AR_F32) {
        if (!c->unexpected[0])
            snprintf(c->unexpected, sizeof c->unexpected, "%.140s%s", e->name, ari_pass_suffix(e->pass));
        return AR_OK;
    }
    ari_finding *f = &c->finding[i];
    f->repeated = f->seen;
    f->seen = true;
    f->replicated = e->layout->replicas > 1;
    f->layout = *e->layout;
    f->ndim = e->local->ndim;
    memcpy(f->shape, e->local->shape, sizeof f->shape);
    const bool first_copy = e->layout->replica == 0;
    comparing user_data = {f, c->reference->tensor[i].values, c->gathered && first_copy ? c->gathered[i] : NULL,
                           first_copy};
    ari_for_each_run(e->local, e->layout, compare_run, &user_data);
    if (f->different > 0 && c->kept_count < ARI_KEPT_COPIES)
        return keep_copy(c, i, e->local);
    return AR_OK;
}

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

/* Whether the ranks' first copies cover `count` elements once each: as many as there are, and none of them twice. A
 * count alone would take two ranks with the same part for the whole. */
static bool covers_once(const ari_comparator *ranks, int n, size_t tensor, size_t count)
{
    size_t covered = 0;
    for (int r = 0; r < n; r++) {
        const ari_finding *f = &ranks[r].finding[tensor];
        if (!f->seen || f->repeated)
            return false;
        covered += f->covered;
        for (int other = 0; f->layout.replica == 0 && other <= r; other++) {
            const ar_layout *o = &ranks[other].finding[tensor].layout;
            if (o->replica == 0 && !apart(o, &f->layout))
                return false;
        }
    }
    return covered == count;
}

ari_verdict ari_verdict_of(const ari_comparator *ranks, int n, size_t tensor)
{
    ari_verdict v = {.rank = -1};
    for (int r = 0; r < n; r++) {
        const ari_finding *f = &ranks[r].finding[tensor];
        if (!f->replicated)
            v.different += f->different;
        else if (f->different > v.different)
            v.different = f->different;
        v.max_ulp = f->max_ulp > v.max_ulp ? f->max_ulp : v.max_ulp;
        if (f->different > 0 && (v.rank < 0 || f->first < v.first)) {
            v.first = f->first;
            v.first_local = f->first_local;
            v.actual = f->actual;
            v.rank = r;
        }
    }
    v.complete = covers_once(ranks, n, tensor, ranks[0].reference->tensor[tensor].count);
    return v;
}

typedef struct filling {
    float *local;
    const float *reference;
} filling;

static void fill_run(void *user, const ari_box_run *r)
{
    const filling *f = user;
    memcpy(f->local + r->local_index, f->reference + r->full, r->count * sizeof(float));
}

ar_status ari_comparator_copy(float **gives, const ari_comparator *c, size_t tensor)
{
    const ari_finding *f = &c->finding[tensor];
    size_t count = 1;
    for (int d = 0; d < f->ndim; d++)
        count *= f->shape[d];
    const float *kept = NULL;
    for (size_t i = 0; i < c->kept_count; i++)
        kept = c->kept[i].tensor == tensor ? c->kept[i].local : kept;
    if (f->different > 0 && !kept)
        return ar_error_set(AR_ERR_NOT_FOUND, "no copy of tensor %zu was kept", tensor);
    AR_TRY(ari_alloc_zero((void **)gives, count, sizeof(float), "a copy of a tensor"));
    if (kept) {
        memcpy(*gives, kept, count * sizeof(float));
        return AR_OK;
    }
    /* No difference: the reference's values at the places of the boxes. */
    ar_tensor view;
    filling user = {*gives, c->reference->tensor[tensor].values};
    AR_TRY(ar_tensor_view(&view, AR_F32, f->ndim, f->shape, (ar_buf){*gives}));
    ari_for_each_run(&view, &f->layout, fill_run, &user);
    return AR_OK;
}
