/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/dump/placement.h"

#include <stdio.h>
#include <string.h>

#include "ref/core/os/os.h"

/* Cuts within cuts, and pairs of boxes that are compared because nothing separates them: nobody shards like that, but a
 * file may say anything, and opening it has to end. */
#define MAX_DEPTH 48
#define MAX_COMPARED ((size_t)1 << 25)

typedef struct region {
    int ndim;
    ar_dump_box at; /* its `global` and `extent` */
} region;

const char *ari_region_text(char text[ARI_REGION_TEXT], int ndim, const size_t *start, const size_t *extent)
{
    size_t n = 0;
    text[n++] = '[';
    for (int d = 0; d < ndim; d++)
        n += (size_t)snprintf(text + n, ARI_REGION_TEXT - n, "%s%zu:%zu", d == 0 ? "" : ", ", start[d],
                              start[d] + extent[d]);
    snprintf(text + n, ARI_REGION_TEXT - n, "]");
    return text;
}

static int compare_starts(const void *a, const void *b, void *dim)
{
    const int d = *(const int *)dim;
    const size_t x = ((const ari_cover_box *)a)->box->global[d], y = ((const ari_cover_box *)b)->box->global[d];
    return x < y ? -1 : x > y;
}

static size_t end_of(const ari_cover_box *b, int d)
{
    return b->box->global[d] + b->box->extent[d];
}

static bool gap(ari_cover *result, const region *r, int d, size_t from, size_t to)
{
    if (from >= to)
        return false;
    result->fault = ARI_COVER_GAP;
    result->all = true;
    memcpy(result->start, r->at.global, sizeof r->at.global);
    memcpy(result->extent, r->at.extent, sizeof r->at.extent);
    result->start[d] = from;
    result->extent[d] = to - from;
    return true;
}

static bool overlap(ari_cover *result, int ndim, const ari_cover_box *a, const ari_cover_box *b)
{
    const ar_dump_box *x = a->box, *y = b->box;
    for (int d = 0; d < ndim; d++) {
        if (!ari_overlap(&result->start[d], &result->extent[d], x->global[d], x->extent[d], y->global[d], y->extent[d]))
            return false;
    }
    result->fault = ARI_COVER_OVERLAP;
    result->owner[0] = a->owner;
    result->owner[1] = b->owner;
    return true;
}

/* Boxes that no plane separates: two of them overlap, or they are wound around each other. */
static void compare_all(ari_cover *result, const region *r, const ari_cover_box *box, size_t n)
{
    size_t held = 0;
    for (size_t i = 0; i < n; i++) {
        held += ari_dump_box_count(r->ndim, box[i].box);
        for (size_t k = 0; k < i; k++)
            if (overlap(result, r->ndim, &box[k], &box[i]))
                return;
        result->compared += i;
        if (result->compared > MAX_COMPARED) {
            result->fault = ARI_COVER_IRREGULAR;
            return;
        }
    }
    if (held == ari_dump_box_count(r->ndim, &r->at))
        return;
    gap(result, r, 0, r->at.global[0], r->at.global[0] + r->at.extent[0]);
    result->all = false;
}

static void divide(ari_cover *result, const region *r, ari_cover_box *box, size_t n, int depth);

/* Sorts the boxes along d and divides them wherever all before end and all others begin. False: that is nowhere. */
static bool divide_along(ari_cover *result, const region *r, ari_cover_box *box, size_t n, int depth, int d)
{
    size_t first = 0, end = r->at.global[d];
    bool divided = false;
    ari_sort(box, n, sizeof *box, compare_starts, &d);
    for (size_t i = 0; i <= n; i++) {
        const size_t start = i < n ? box[i].box->global[d] : r->at.global[d] + r->at.extent[d];
        if (start >= end && i > 0) {
            if (gap(result, r, d, end, start))
                return true;
            if (i == n && first == 0)
                return false;
            region piece = *r;
            piece.at.global[d] = box[first].box->global[d];
            piece.at.extent[d] = end - piece.at.global[d];
            divide(result, &piece, box + first, i - first, depth + 1);
            divided = true;
            first = i;
            if (result->fault != ARI_COVERED)
                return true;
        } else if (i == 0 && gap(result, r, d, end, start)) {
            return true;
        }
        if (i < n && end_of(&box[i], d) > end)
            end = end_of(&box[i], d);
    }
    return divided;
}

static void divide(ari_cover *result, const region *r, ari_cover_box *box, size_t n, int depth)
{
    for (int d = 0; d < r->ndim && depth < MAX_DEPTH; d++)
        if (divide_along(result, r, box, n, depth, d))
            return;
    if (n > 1)
        compare_all(result, r, box, n);
}

void ari_cover_check(ari_cover *result, int ndim, const size_t *shape, ari_cover_box *box, size_t n)
{
    region all = {.ndim = ndim};
    *result = (ari_cover){.fault = ARI_COVERED};
    memcpy(all.at.extent, shape, (size_t)ndim * sizeof *shape);
    if (n > 0) {
        divide(result, &all, box, n, 0);
        return;
    }
    result->fault = ARI_COVER_GAP;
    result->all = true;
    memcpy(result->extent, shape, (size_t)ndim * sizeof *shape);
}
