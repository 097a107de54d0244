/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/clock.h"
#include "ref/core/scheduler.h"
#include "support/small.h"
#include "tests/support/test.h"
#include "verify/read/placement.h"

#define MAX_BOXES 64

static size_t below(uint64_t *state, size_t n)
{
    return (size_t)(ari_splitmix(state) % n);
}

/* Divides a box in two, again and again, at planes that are drawn. */
static size_t shatter(uint64_t *state, int ndim, const size_t *shape, ar_dump_box *box, size_t n)
{
    size_t count = 1;
    memset(box, 0, sizeof *box);
    memcpy(box->extent, shape, (size_t)ndim * sizeof *shape);
    for (size_t tries = 0; tries < 4 * n && count < n; tries++) {
        ar_dump_box *b = &box[below(state, count)];
        const int d = (int)below(state, (size_t)ndim);
        if (b->extent[d] < 2)
            continue;
        const size_t cut = 1 + below(state, b->extent[d] - 1);
        box[count] = *b;
        box[count].global[d] += cut;
        box[count++].extent[d] -= cut;
        b->extent[d] = cut;
    }
    return count;
}

/* How often each element is held, one by one. */
static ari_cover_fault mark(int ndim, const size_t *shape, const ar_dump_box *box, size_t n)
{
    bool gap = false, twice = false;
    for (size_t i = 0; i < ari_volume(shape, ndim); i++) {
        size_t held = 0;
        for (size_t k = 0; k < n; k++) {
            size_t rest = i;
            bool in = true;
            for (int d = ndim - 1; d >= 0; d--) {
                const size_t x = rest % shape[d];
                rest /= shape[d];
                in &= x >= box[k].global[d] && x < box[k].global[d] + box[k].extent[d];
            }
            held += in;
        }
        gap |= held == 0;
        twice |= held > 1;
    }
    return twice && gap ? ARI_COVER_IRREGULAR : twice ? ARI_COVER_OVERLAP : gap ? ARI_COVER_GAP : ARI_COVERED;
}

static ari_cover check(int ndim, const size_t *shape, const ar_dump_box *box, size_t n)
{
    ari_cover result;
    OWNED(free) ari_cover_box *list = calloc(n + 1, sizeof *list);
    cr_assert_not_null(list);
    for (size_t i = 0; i < n; i++)
        list[i] = (ari_cover_box){&box[i], i};
    ari_cover_check(&result, ndim, shape, list, n);
    return result;
}

/* Identity: as counting every element says. Where there is a gap and an overlap, either may be told. */
Test(parts_cover, drawn_boxes_are_judged_as_by_counting_elements)
{
    uint64_t state = 1;
    size_t seen[4] = {0};
    for (int trial = 0; trial < (small_only() ? 300 : 3000); trial++) {
        ar_dump_box box[MAX_BOXES + 1];
        size_t shape[4];
        const int ndim = 1 + (int)below(&state, 4);
        for (int d = 0; d < ndim; d++)
            shape[d] = 1 + below(&state, 6);
        size_t n = shatter(&state, ndim, shape, box, 1 + below(&state, 12));
        const size_t change = below(&state, 4);
        ar_dump_box *b = &box[below(&state, n)];
        const int d = (int)below(&state, (size_t)ndim);
        if (change == 1 && b->extent[d] > 1)
            b->extent[d]--;
        if (change == 2 && b->global[d] + b->extent[d] < shape[d])
            b->extent[d]++;
        if (change == 3 && b->global[d] > 0)
            b->global[d]--;
        const ari_cover_fault expected = mark(ndim, shape, box, n);
        const ari_cover result = check(ndim, shape, box, n);
        seen[expected]++;
        if (expected == ARI_COVER_IRREGULAR)
            cr_assert(result.fault == ARI_COVER_GAP || result.fault == ARI_COVER_OVERLAP, "trial %d", trial);
        else
            cr_assert_eq(result.fault, expected, "trial %d: %d, expected %d", trial, result.fault, expected);
    }
    for (int i = 0; i < 4; i++)
        cr_expect_gt(seen[i], 10, "of kind %d", i);
}

/* Five boxes around each other: no plane separates them. */
Test(parts_cover, boxes_that_no_plane_separates_are_compared)
{
    const size_t shape[] = {3, 3};
    ar_dump_box box[] = {{.global = {0, 0}, .extent = {1, 2}},
                         {.global = {0, 2}, .extent = {2, 1}},
                         {.global = {2, 1}, .extent = {1, 2}},
                         {.global = {1, 0}, .extent = {2, 1}},
                         {.global = {1, 1}, .extent = {1, 1}}};
    cr_expect_eq(check(2, shape, box, 5).fault, ARI_COVERED);
    const ari_cover gap = check(2, shape, box, 4);
    cr_expect(gap.fault == ARI_COVER_GAP && !gap.is_full);
    box[4].extent[1] = 2;
    const ari_cover twice = check(2, shape, box, 5);
    cr_expect(twice.fault == ARI_COVER_OVERLAP && twice.start[0] == 1 && twice.start[1] == 2);
    cr_expect_eq(twice.owner[0] + twice.owner[1], 5);
}

Test(parts_cover, a_gap_says_where_it_is)
{
    const size_t shape[] = {8, 6};
    const ar_dump_box box[] = {{.global = {0, 0}, .extent = {4, 6}},
                               {.global = {4, 0}, .extent = {4, 3}},
                               {.global = {4, 4}, .extent = {4, 2}}};
    const ari_cover gap = check(2, shape, box, 3);
    char text[ARI_REGION_TEXT];
    cr_expect(gap.fault == ARI_COVER_GAP && gap.is_full);
    cr_expect_str_eq(ari_region_text(text, 2, gap.start, gap.extent), "[4:8, 3:4]");
}

/* A tensor of 2^60 elements in 10^5 boxes, as a grid; then one of them twice as wide. Marking would take years. */
Test(parts_cover, a_hundred_thousand_boxes_take_no_time)
{
    const size_t shape[] = {(size_t)1 << 20, (size_t)1 << 20, (size_t)1 << 20};
    const size_t parts[] = {16, 64, 98}, n = 16 * 64 * 98;
    OWNED(free) ar_dump_box *box = calloc(n, sizeof *box);
    cr_assert_not_null(box);
    for (size_t i = 0; i < n; i++) {
        size_t rest = i * 48271 % n; /* in no order: the factor is prime to n */
        for (int d = 0; d < 3; d++) {
            const size_t k = rest % parts[d], step = shape[d] / parts[d];
            rest /= parts[d];
            box[i].global[d] = k * step;
            box[i].extent[d] = k + 1 == parts[d] ? shape[d] - k * step : step;
        }
    }
    const uint64_t start = ari_now_ns();
    cr_expect_eq(check(3, shape, box, n).fault, ARI_COVERED);
    box[n / 2].extent[1]++;
    const ari_cover result = check(3, shape, box, n);
    cr_expect(result.fault == ARI_COVER_OVERLAP || result.fault == ARI_COVER_GAP);
    box[n / 2].extent[1]--;
    cr_expect_eq(check(3, shape, box, n - 1).fault, ARI_COVER_GAP);
    cr_expect_lt(ari_now_ns() - start, 20000000000u);
}

/* Herringbone: dominoes of which no plane separates any. Returns how many; NULL counts them. */
static size_t herringbone(ar_dump_box *box, size_t size)
{
    size_t n = 0;
    for (size_t y = 0; y < size; y++)
        for (size_t x = 0; x < size; x++) {
            const size_t kind = (x + 3 * y) % 4; /* 0, 1: a lying one's halves; 3, 2: a standing one's */
            const bool first = kind == 0 || kind == 3 || (kind == 1 && x == 0) || (kind == 2 && y == 0);
            if (!first)
                continue;
            if (box != NULL)
                box[n] = (ar_dump_box){
                    .global = {y, x}, .extent = {kind == 3 && y + 1 < size ? 2 : 1, kind == 0 && x + 1 < size ? 2 : 1}};
            n++;
        }
    return n;
}

/* An answer of some kind, soon. */
Test(parts_cover, what_is_hopelessly_tangled_ends)
{
    const size_t small[] = {40, 40}, large[] = {200, 200}, n = herringbone(NULL, 200);
    OWNED(free) ar_dump_box *box = calloc(n, sizeof *box);
    cr_assert_not_null(box);
    cr_expect_eq(check(2, small, box, herringbone(box, 40)).fault, ARI_COVERED);
    cr_expect_eq(check(2, large, box, herringbone(box, 200)).fault, ARI_COVER_IRREGULAR);
}
