/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/compare.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"

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

/* A run of elements along the last dimension of a box. */
typedef struct run {
    const float *local;
    ptrdiff_t stride;
    size_t count, full, local_index;
} run;

static void compare_run(ari_finding *f, const run *r, const float *reference)
{
    for (size_t i = 0; i < r->count; i++) {
        const float actual = r->local[(ptrdiff_t)i * r->stride], expected = reference[r->full + i];
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

/* Walks the runs of all boxes. What a run does: compare, and copy into the gathered tensor. */
static void walk(ari_finding *f, const ar_tap_event *e, const float *reference, float *gathered)
{
    const ar_layout *o = e->layout;
    const int nd = o->ndim;
    for (size_t k = 0; k < o->nbox; k++) {
        const ar_box *b = &o->box[k];
        size_t runs = 1;
        for (int d = 0; d + 1 < nd; d++)
            runs *= b->extent[d];
        const size_t width = nd > 0 ? b->extent[nd - 1] : 1;
        for (size_t i = 0; i < runs && width > 0; i++) {
            size_t rest = i, full = 0, full_stride = 1, index = 0, index_stride = 1;
            ptrdiff_t offset = 0;
            for (int d = nd - 1; d >= 0; d--) {
                const size_t x = d == nd - 1 ? 0 : rest % b->extent[d];
                rest = d == nd - 1 ? rest : rest / b->extent[d];
                full += (b->global[d] + x) * full_stride;
                index += (b->local[d] + x) * index_stride;
                offset += (ptrdiff_t)(b->local[d] + x) * e->local->stride[d];
                full_stride *= o->shape[d];
                index_stride *= e->local->shape[d];
            }
            const run r = {(const float *)e->local->data.ptr + offset, nd > 0 ? e->local->stride[nd - 1] : 1, width,
                           full, index};
            compare_run(f, &r, reference);
            if (o->replica != 0)
                continue;
            f->covered += width;
            for (size_t j = 0; gathered && j < width; j++)
                gathered[full + j] = r.local[(ptrdiff_t)j * r.stride];
        }
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
    f->seen = true;
    f->replicated = e->layout->replicas > 1;
    f->layout = *e->layout;
    f->ndim = e->local->ndim;
    memcpy(f->shape, e->local->shape, sizeof f->shape);
    walk(f, e, c->reference->tensor[i].values, c->gathered ? c->gathered[i] : NULL);
    if (f->different > 0 && c->kept_count < ARI_KEPT_COPIES)
        return keep_copy(c, i, e->local);
    return AR_OK;
}

ari_verdict ari_verdict_of(const ari_comparator *ranks, int n, size_t tensor)
{
    ari_verdict v = {.complete = true, .rank = -1};
    size_t covered = 0;
    for (int r = 0; r < n; r++) {
        const ari_finding *f = &ranks[r].finding[tensor];
        v.complete = v.complete && f->seen;
        covered += f->covered;
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
    v.complete = v.complete && covered == ranks[0].reference->tensor[tensor].count;
    return v;
}

/* The reference's values at the places of a layout's boxes. */
static void copy_boxes(float *local, const ari_finding *f, const float *reference)
{
    const ar_layout *o = &f->layout;
    for (size_t k = 0; k < o->nbox; k++) {
        const ar_box *b = &o->box[k];
        size_t count = 1;
        for (int d = 0; d < o->ndim; d++)
            count *= b->extent[d];
        for (size_t i = 0; i < count; i++) {
            size_t rest = i, full = 0, full_stride = 1, index = 0, index_stride = 1;
            for (int d = o->ndim - 1; d >= 0; d--) {
                const size_t x = rest % b->extent[d];
                rest /= b->extent[d];
                full += (b->global[d] + x) * full_stride;
                index += (b->local[d] + x) * index_stride;
                full_stride *= o->shape[d];
                index_stride *= f->shape[d];
            }
            local[index] = reference[full];
        }
    }
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
    if (kept)
        memcpy(*gives, kept, count * sizeof(float));
    else
        copy_boxes(*gives, f, c->reference->tensor[tensor].values);
    return AR_OK;
}
