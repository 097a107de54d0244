/* SPDX-License-Identifier: Apache-2.0 */
/* A reference of one tensor, two ranks that listen, and taps of its parts. */
#ifndef TESTS_VERIFY_COMPARE_SUPPORT_H
#define TESTS_VERIFY_COMPARE_SUPPORT_H

#include "tests/verify/support.h"
#include "verify/check/compare.h"

enum { ROWS = 6, COLS = 4, COUNT = ROWS * COLS, RANKS = 2 };
static const size_t full_shape[2] = {ROWS, COLS};

/* A reference of one tensor "w" with values of their own, and its comparators. */
typedef struct fixture {
    ari_reference ref;
    ari_comparator rank[RANKS];
    float values[COUNT];
} fixture;

static inline void fixture_init(fixture *f)
{
    double wide[COUNT];
    *f = (fixture){.ref = {0}};
    for (int i = 0; i < COUNT; i++)
        wide[i] = f->values[i] = (float)(i + 1) * 0.25f;
    cr_assert_ok(ari_reference_emit(&f->ref, "w", 'f', 2, full_shape, wide));
    cr_assert_ok(ari_reference_finish(&f->ref));
    for (int r = 0; r < RANKS; r++)
        cr_assert_ok(ari_comparator_init(&f->rank[r], &f->ref, NULL));
}

static inline void fixture_fini(fixture *f)
{
    for (int r = 0; r < RANKS; r++)
        ari_comparator_fini(&f->rank[r]);
    ari_reference_fini(&f->ref);
}

static inline void tap(ari_comparator *c, const char *name, const float *local, const ar_layout *layout)
{
    const size_t shape[2] = {ar_layout_local(layout, 0), ar_layout_local(layout, 1)};
    float copy[COUNT];
    ar_tensor t;
    memcpy(copy, local, shape[0] * shape[1] * sizeof *copy);
    cr_assert_ok(ar_tensor_view(&t, AR_F32, 2, shape, (ar_buf){copy}));
    const ar_tap_event e = {.name = name, .pass = 'f', .step = 1, .local = &t, .layout = layout};
    cr_assert_ok(ari_comparator_tap(c, &e));
}

/* Rank r of `parts` reports rows of the full values. */
static inline void tap_rows(ari_comparator *c, const float *full, int part, int parts)
{
    ar_layout o;
    cr_assert_ok(ar_layout_shard(&o, 2, full_shape, 0, part, parts));
    tap(c, "w", full + (size_t)part * COUNT / (size_t)parts, &o);
}

static inline void tap_whole(ari_comparator *c, const float *full, int replica, int replicas)
{
    ar_layout o;
    cr_assert_ok(ar_layout_replicate(&o, 2, full_shape, replica, replicas));
    tap(c, "w", full, &o);
}

#endif
