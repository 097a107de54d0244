/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/diagnose/explain_sample.h"

#include <stdlib.h>

#include "ref/core/size.h"

static size_t thinned(size_t n, size_t step)
{
    return n / step + (n % step != 0);
}

size_t ari_sample_count(const size_t *step, const ar_dump_tensor *t)
{
    size_t n = 1;
    for (int d = 0; d < t->ndim; d++)
        n *= thinned(t->shape[d], step[d]);
    return n;
}

void ari_sample_steps(size_t *step, const ar_dump_tensor *t, size_t most)
{
    for (int d = 0; d < t->ndim; d++)
        step[d] = 1;
    while (ari_sample_count(step, t) > most) {
        size_t largest = 0;
        for (int d = 0; d < t->ndim; d++)
            largest = thinned(t->shape[d], step[d]) > largest ? thinned(t->shape[d], step[d]) : largest;
        for (int d = 0; d < t->ndim; d++)
            step[d] *= thinned(t->shape[d], step[d]) == largest ? 2 : 1;
    }
}

/* The sampled elements of a box; false where there are none. */
static bool thin_box(ar_dump_box *to, const ar_dump_box *from, const size_t *step, int ndim)
{
    *to = *from;
    for (int d = 0; d < ndim; d++) {
        const size_t first = thinned(from->global[d], step[d]);
        const size_t end = thinned(from->global[d] + from->extent[d], step[d]);
        if (first >= end)
            return false;
        to->global[d] = first;
        to->extent[d] = end - first;
        to->at += (first * step[d] - from->global[d]) * from->stride[d];
        to->stride[d] = from->stride[d] * step[d];
    }
    return true;
}

ar_status ari_sample_init(ari_sample *s, const ar_dump_tensor *t, const size_t *step)
{
    size_t boxes = 0;
    *s = (ari_sample){.tensor = *t};
    for (size_t i = 0; i < t->parts; i++)
        boxes += t->part[i].boxes;
    AR_TRY(ari_alloc((void **)&s->part, t->parts, sizeof *s->part, t->name));
    const ar_status st = ari_alloc((void **)&s->box, boxes, sizeof *s->box, t->name);
    if (st != AR_OK) {
        ari_sample_fini(s);
        return st;
    }
    for (int d = 0; d < t->ndim; d++)
        s->tensor.shape[d] = thinned(t->shape[d], step[d]);
    s->tensor.count = ari_sample_count(step, t);
    s->tensor.whole = NULL;
    s->tensor.part = s->part;
    ar_dump_box *box = s->box;
    for (size_t i = 0; i < t->parts; i++) {
        s->part[i] = t->part[i];
        s->part[i].box = box;
        s->part[i].boxes = 0;
        for (size_t b = 0; b < t->part[i].boxes; b++) {
            const bool kept = thin_box(&box[s->part[i].boxes], &t->part[i].box[b], step, t->ndim);
            s->part[i].boxes += kept;
        }
        box += s->part[i].boxes;
    }
    return AR_OK;
}

void ari_sample_fini(ari_sample *s)
{
    free(s->part);
    free(s->box);
    *s = (ari_sample){.box = NULL};
}
