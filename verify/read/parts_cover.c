/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/read/placement.h"

#include <stdio.h>
#include <string.h>

#include "ref/core/os/os.h"

/* Limits for nested cuts and for pairs of boxes to compare. No real sharding reaches them, but a file can contain
 * anything, and opening it has to end. */
#define MAX_DEPTH 48
#define MAX_COMPARED ((size_t)1 << 25)

typedef struct region {
    int ndim;
    ar_dump_box box; /* the box, by its `global` and `extent` */
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

static bool gap(ari_cover *result, const region *r, int d, size_t begin, size_t end)
{
    if (begin >= end)
        return false;
    result->fault = ARI_COVER_GAP;
    result->is_full = true;
    memcpy(result->start, r->box.global, sizeof r->box.global);
    memcpy(result->extent, r->box.extent, sizeof r->box.extent);
    result->start[d] = begin;
    result->extent[d] = end - begin;
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

/* Compares all boxes in pairs if no plane separates them: two of them overlap, or they are interlocked. */
static void compare_all(ari_cover *result, const region *r, const ari_cover_box *box, size_t n)
{
    size_t covered = 0;
    for (size_t i = 0; i < n; i++) {
        covered += ari_dump_box_count(r->ndim, box[i].box);
        for (size_t k = 0; k < i; k++)
            if (overlap(result, r->ndim, &box[k], &box[i]))
                return;
        result->compared += i;
        if (result->compared > MAX_COMPARED) {
            result->fault = ARI_COVER_IRREGULAR;
            return;
        }
    }
    if (covered == ari_dump_box_count(r->ndim, &r->box))
        return;
    gap(result, r, 0, r->box.global[0], r->box.global[0] + r->box.extent[0]);
    result->is_full = false;
}

static void divide(ari_cover *result, const region *r, ari_cover_box *box, size_t n, int depth);

/* Sorts the boxes along d and splits them wherever all earlier boxes end before all later ones begin. Returns false if
 * there is no such place. */
static bool divide_along(ari_cover *result, const region *r, ari_cover_box *box, size_t n, int depth, int d)
{
    size_t first_box = 0, end = r->box.global[d];
    bool divided = false;
    ari_sort(box, n, sizeof *box, compare_starts, &d);
    for (size_t i = 0; i <= n; i++) {
        const size_t start = i < n ? box[i].box->global[d] : r->box.global[d] + r->box.extent[d];
        if (start >= end && i > 0) {
            if (gap(result, r, d, end, start))
                return true;
            if (i == n && first_box == 0)
                return false;
            region piece = *r;
            piece.box.global[d] = box[first_box].box->global[d];
            piece.box.extent[d] = end - piece.box.global[d];
            divide(result, &piece, box + first_box, i - first_box, depth + 1);
            divided = true;
            first_box = i;
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
    region full_region = {.ndim = ndim};
    *result = (ari_cover){.fault = ARI_COVERED};
    memcpy(full_region.box.extent, shape, (size_t)ndim * sizeof *shape);
    if (n > 0) {
        divide(result, &full_region, box, n, 0);
        return;
    }
    result->fault = ARI_COVER_GAP;
    result->is_full = true;
    memcpy(result->extent, shape, (size_t)ndim * sizeof *shape);
}
