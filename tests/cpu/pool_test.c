/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/cpu/device.h"
#include "tests/support/test.h"

/* The memory of a CPU device: what is kept, and that it is little more than was needed. */
#define MIB ((size_t)1 << 20)

static void *get(ari_pool *p, size_t bytes)
{
    void *memory = NULL;
    cr_assert_ok(ari_pool_alloc(p, &memory, bytes));
    cr_assert_not_null(memory);
    cr_assert_eq((uintptr_t)memory % 64, 0, "%zu bytes at %p", bytes, memory);
    memset(memory, 0xa5, bytes);
    return memory;
}

static void skip_where_nothing_is_kept(void)
{
#if defined(ARI_SANITIZED)
    cr_skip_test("under sanitizers every buffer comes and goes");
#endif
}

Test(pool, gives_back_the_newest_block_of_a_size)
{
    skip_where_nothing_is_kept();
    SCOPED(ari_pool_fini) ari_pool p;
    ari_pool_init(&p);
    void *a = get(&p, MIB), *b = get(&p, MIB), *other = get(&p, 3 * MIB);
    cr_assert(a != b && a != other && b != other);
    ari_pool_free(&p, a);
    ari_pool_free(&p, other);
    ari_pool_free(&p, b);
    void *again = get(&p, MIB), *older = get(&p, MIB);
    cr_expect_eq(again, b);
    cr_expect_eq(older, a);
    cr_expect_eq(get(&p, 3 * MIB), other);
    ari_pool_free(&p, again);
    ari_pool_free(&p, older);
    ari_pool_free(&p, other);
}

Test(pool, takes_a_larger_block_only_if_it_wastes_little)
{
    skip_where_nothing_is_kept();
    SCOPED(ari_pool_fini) ari_pool p;
    ari_pool_init(&p);
    void *large = get(&p, 8 * MIB), *larger = get(&p, 9 * MIB), *more = get(&p, 20 * MIB);
    ari_pool_free(&p, more);
    ari_pool_free(&p, larger);
    ari_pool_free(&p, large);
    void *small = get(&p, 6 * MIB); /* three quarters of the smallest */
    cr_expect(small != large && small != larger);
    void *most = get(&p, 7 * MIB); /* seven eighths of 8 MiB */
    cr_expect_eq(most, large);
    void *other = get(&p, 8 * MIB); /* of which there is none left, but 9 MiB */
    cr_expect_eq(other, larger);
    ari_pool_free(&p, small);
    ari_pool_free(&p, most);
    ari_pool_free(&p, other);
}

Test(pool, holds_little_more_than_was_needed_at_once)
{
    enum { BUFFERS = 40 };
    SCOPED(ari_pool_fini) ari_pool p;
    void *held[BUFFERS] = {NULL};
    size_t bytes[BUFFERS] = {0}, needed = 0, most = 0;
    uint64_t state = 7;
    ari_pool_init(&p);
    for (int i = 0; i < 4000; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u; /* Knuth's MMIX */
        const size_t at = (size_t)(state >> 33) % BUFFERS;
        if (held[at]) {
            cr_assert_eq(((unsigned char *)held[at])[bytes[at] - 1], (unsigned char)at, "somebody else wrote here");
            ari_pool_free(&p, held[at]);
            held[at] = NULL;
            needed -= bytes[at];
        } else {
            bytes[at] = (1 + (size_t)(state >> 45) % 40) * 32768 - 64; /* with its header a multiple of 32 KiB */
            held[at] = get(&p, bytes[at]);
            memset(held[at], (int)at, bytes[at]);
            needed += bytes[at];
        }
        most = needed > most ? needed : most;
        /* blocks in use are up to an eighth larger than what was asked for */
        cr_assert(p.in_use + p.cached <= most + most / ARI_POOL_SLACK + most / 7 + 64 * BUFFERS,
                  "%zu in use and %zu kept, %zu needed at most", p.in_use, p.cached, most);
    }
    for (size_t i = 0; i < BUFFERS; i++)
        ari_pool_free(&p, held[i]);
    cr_assert_eq(p.in_use, 0);
    cr_assert_eq(p.requested, 0);
}

Test(pool, keeps_no_more_blocks_than_its_list_has_places)
{
    enum { MORE = ARI_POOL_KEPT + 20 };
    SCOPED(ari_pool_fini) ari_pool p;
    void *held[MORE];
    ari_pool_init(&p);
    for (size_t i = 0; i < MORE; i++)
        held[i] = get(&p, MIB / 8);
    for (size_t i = 0; i < MORE; i++)
        ari_pool_free(&p, held[i]);
    cr_assert(p.n <= ARI_POOL_KEPT);
    cr_assert_eq(p.cached, p.n * (MIB / 8 + 64));
}

Test(pool, survives_requests_that_cannot_be_met)
{
    SCOPED(ari_pool_fini) ari_pool p;
    void *memory = NULL;
    ari_pool_init(&p);
    void *first = get(&p, MIB);
    ari_pool_free(&p, first);
    cr_expect_eq(ari_pool_alloc(&p, &memory, SIZE_MAX), AR_ERR_OVERFLOW);
#if !defined(ARI_SANITIZED) /* a sanitizer's allocator ends the process */
    cr_expect_eq(ari_pool_alloc(&p, &memory, SIZE_MAX / 4), AR_ERR_MEMORY);
    cr_expect_eq(p.n, 0, "what was kept went back before the request was refused");
#endif
    cr_expect_null(memory);
    cr_expect_eq(p.in_use, 0);
    cr_expect_eq(p.requested, 0);
    ari_pool_free(&p, get(&p, 0));
    ari_pool_free(&p, NULL);
    ari_pool_free(&p, get(&p, 2 * MIB));
    cr_expect(p.in_use + p.cached <= 2 * MIB + 64, "a refused request must not count as a need");
}

/* Two phases of a step whose buffers have no size in common, and of which neither needs more than the slack. */
Test(pool, keeps_what_another_phase_of_a_step_needs)
{
    skip_where_nothing_is_kept();
    enum { STEPS = 3 };
    SCOPED(ari_pool_fini) ari_pool p;
    void *was = NULL;
    ari_pool_init(&p);
    for (int i = 0; i < STEPS; i++) {
        void *large = get(&p, 16 * MIB);
        ari_pool_free(&p, large);
        void *small = get(&p, 2 * MIB), *other = get(&p, MIB);
        ari_pool_free(&p, other);
        ari_pool_free(&p, small);
        cr_expect(i == 0 || large == was, "step %d asked the system for 16 MiB again", i);
        was = large;
    }
}
