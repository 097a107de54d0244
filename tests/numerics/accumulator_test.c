/* SPDX-License-Identifier: Apache-2.0 */
/* The accumulator against its plain definition: exact sums of nine slices of all values, or of 22 narrow ones, of which slices t and t-1 count, t
 * the highest slice that any value reaches. design/numerics.md, section 3. */
#include "ref/numerics/accumulator.h"
#include "ref/numerics/philox.h"
#include "support/together.h"

__extension__ typedef __int128 wide_int;

typedef struct state {
    uint8_t t;
    int64_t h, l;
} state;

/* A claim of slices of both widths. */
static bool narrow = false;
#define CLAIM_OF_BOTH(name)          \
    static void name##_of_one(void); \
    CLAIM(name)                      \
    {                                \
        narrow = false;              \
        name##_of_one();             \
        narrow = true;               \
        name##_of_one();             \
        narrow = false;              \
    }                                \
    static void name##_of_one(void)

static void add(state *s, float v)
{
    ari_acc_add(&s->t, &s->h, &s->l, v, narrow);
}

static void merge(state *s, const state *other)
{
    ari_acc_merge(&s->t, &s->h, &s->l, other->t, other->h, other->l);
}

static uint32_t value_bits(const state *s)
{
    return ari_bits32(ari_acc_value(s->t, s->h, s->l, narrow));
}

/* |v|*2^149 bit by bit: no shift arithmetic in common with the header. */
static int plain_slice(float v, int b, int64_t *slice)
{
    const int width = narrow ? 13 : 32;
    const double scaled = ldexp(fabs((double)v), 149 - width * b); /* slice b is the end of its integer part */
    const double above = floor(ldexp(scaled, -width));
    const double bits = floor(scaled - ldexp(above, width));
    *slice = v < 0.0f ? -(int64_t)bits : (int64_t)bits;
    return scaled >= 1.0;
}

/* The value by definition, of all n values at once. */
static uint32_t plain_sum(const float *v, size_t n)
{
    wide_int sums[22] = {0};
    int t = 0;
    const int width = narrow ? 13 : 32, slices = narrow ? 22 : 9;
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(v[i]))
            return ARI_NAN_BITS;
        for (int b = 0; b < slices; b++) {
            int64_t slice;
            if (plain_slice(v[i], b, &slice) != 0)
                t = b > t ? b : t;
            sums[b] += slice;
        }
    }
    const double high = (double)(int64_t)sums[t], low = t > 0 ? (double)(int64_t)sums[t - 1] : 0.0;
    const float sum = (float)ldexp(ldexp(high, width) + low, width * (t - 1) - 149);
    return ari_bits32(narrow ? ari_f32_of_bf16(ari_bf16_of_f32(sum)) : sum);
}

static uint32_t sum_in_order(const float *v, size_t n)
{
    state s = {0};
    for (size_t i = 0; i < n; i++)
        add(&s, v[i]);
    return value_bits(&s);
}

/* A stream of random words for one test. */
typedef struct dice {
    uint64_t key, next;
} dice;

static uint32_t roll(dice *d, uint32_t below)
{
    const uint32_t word = ari_random_u32(d->key, d->next++, 0, 0);
    return below == 0 ? word : word % below;
}

/* Any finite pattern, or one near the middle of a random narrow range of exponents. */
static float random_value(dice *d, uint32_t centre, uint32_t spread)
{
    uint32_t exponent = centre + roll(d, spread);
    exponent = exponent > 254 ? 254 : exponent;
    return ari_float32((roll(d, 0) & 0x807fffffu) | (exponent << 23));
}

/* Splits v over some shards, some of them empty, fills them in random order and merges them in random pairs. */
static uint32_t sum_in_shards(dice *d, float *v, size_t n)
{
    state shards[8] = {{0}};
    size_t count = 1 + roll(d, 8);
    for (size_t i = n; i-- > 0;) {
        const size_t other = roll(d, (uint32_t)i + 1);
        const float swap = v[i];
        v[i] = v[other];
        v[other] = swap;
        add(&shards[roll(d, (uint32_t)count)], v[i]);
    }
    for (; count > 1; count--) {
        const size_t into = roll(d, (uint32_t)count - 1);
        merge(&shards[into], &shards[count - 1]);
    }
    return value_bits(&shards[0]);
}

CLAIM_OF_BOTH(random_multisets_in_any_order_and_grouping_match_the_definition)
{
    dice d = {0x5eed, 0};
    float v[200];
    size_t added = 0;
    for (uint32_t trial = 0; added < 200000; trial++) {
        const size_t n = 1 + roll(&d, 200);
        const uint32_t centre = roll(&d, 255), spread = 1 + roll(&d, trial % 2 == 0 ? 20 : 255);
        for (size_t i = 0; i < n; i++)
            v[i] = random_value(&d, centre, spread);
        if (n > 2 && trial % 3 == 0)
            v[1] = -v[0]; /* exact cancellation */
        const uint32_t want = plain_sum(v, n);
        cr_assert(sum_in_order(v, n) == want, "trial %u in order: %08x, expected %08x", trial, sum_in_order(v, n),
                  want);
        for (int again = 0; again < 3; again++) {
            const uint32_t got = sum_in_shards(&d, v, n);
            cr_assert(got == want, "trial %u in shards: %08x, expected %08x", trial, got, want);
        }
        added += n;
    }
}

CLAIM(a_single_value_comes_back_unchanged)
{
    for (uint64_t u = 0; u <= UINT32_MAX; u += 10007) {
        const float v = ari_float32((uint32_t)u);
        const uint32_t want = !isfinite(v) ? ARI_NAN_BITS : (uint32_t)u;
        cr_assert(sum_in_order(&v, 1) == want, "%08x came back as %08x", (uint32_t)u, sum_in_order(&v, 1));
    }
}

/* Narrow slices keep its first 14 bits or more, and bf16 has 8. */
CLAIM(a_single_narrow_value_comes_back_as_bf16)
{
    narrow = true;
    for (uint64_t u = 0; u <= UINT32_MAX; u += 10007) {
        const float v = ari_float32((uint32_t)u), got = ari_float32(sum_in_order(&v, 1));
        if (isfinite(v) && isfinite(got))
            cr_assert(fabs((double)got - (double)v) <= fabs((double)v) * 0x1.08p-8 + 0x1p-134, "%a as %a", (double)v,
                      (double)got);
    }
    narrow = false;
}

CLAIM_OF_BOTH(minus_zero_and_cancellation_give_plus_zero)
{
    const float zeros[] = {-0.0f, -0.0f}, cancelled[] = {0x1p100f, 0x1.8p-149f, -0x1p100f};
    cr_assert(sum_in_order(zeros, 2) == 0u);
    cr_assert(sum_in_order(cancelled, 3) == 0u, "the term far below the largest is dropped in every order");
    cr_assert(sum_in_order(NULL, 0) == 0u, "the identity is +0");
}

CLAIM(overflow_of_fp32_is_infinity_and_can_be_taken_back)
{
    const float up[] = {0x1.fffffep127f, 0x1.fffffep127f};
    const float back[] = {0x1.fffffep127f, 0x1.fffffep127f, 0x1.fffffep127f, -0x1.fffffep127f, -0x1.fffffep127f};
    cr_assert(sum_in_order(up, 2) == 0x7f800000u);
    cr_assert(sum_in_order(back, 5) == 0x7f7fffffu, "the sum itself is finite, whatever its prefixes are");
}

CLAIM_OF_BOTH(a_non_finite_value_absorbs_everything)
{
    static const uint32_t bad[] = {0x7f800000u, 0xff800000u, 0x7fc00000u, 0xff800001u};
    for (size_t i = 0; i < 4; i++) {
        state s = {0}, t = {0}, clean = {0};
        add(&s, 3.0f);
        add(&s, ari_float32(bad[i]));
        add(&s, 0x1p127f);
        cr_assert(s.t == ARI_ACC_NONFINITE && s.h == 0 && s.l == 0);
        add(&clean, 5.0f);
        merge(&t, &s);
        merge(&t, &clean);
        merge(&clean, &s);
        cr_assert(value_bits(&s) == ARI_NAN_BITS && value_bits(&t) == ARI_NAN_BITS &&
                  value_bits(&clean) == ARI_NAN_BITS);
        cr_assert(clean.t == ARI_ACC_NONFINITE && clean.h == 0 && clean.l == 0);
    }
}

CLAIM_OF_BOTH(empty_shards_change_nothing)
{
    state s = {0};
    const state empty = {0};
    add(&s, -1.25f);
    add(&s, 0x1p-40f);
    const state before = s;
    merge(&s, &empty);
    cr_assert(s.t == before.t && s.h == before.h && s.l == before.l);
    state other = empty;
    merge(&other, &before);
    cr_assert(other.t == before.t && other.h == before.h && other.l == before.l);
}

CLAIM_OF_BOTH(two_phases_give_the_same_state)
{
    dice d = {0x2f, 0};
    for (int trial = 0; trial < 3000; trial++) {
        float v[16];
        state one = {0}, two = {0};
        int top = 0;
        for (size_t i = 0; i < 16; i++) {
            v[i] = random_value(&d, roll(&d, 200), 60);
            add(&one, v[i]);
            top = ari_acc_top(v[i], narrow) > top ? ari_acc_top(v[i], narrow) : top;
        }
        ari_acc_raise(&two.t, &two.h, &two.l, (uint8_t)top);
        for (size_t i = 16; i-- > 0;) {
            two.h += ari_acc_slice(v[i], two.t, narrow);
            two.l += ari_acc_slice(v[i], two.t - 1, narrow);
        }
        cr_assert(one.t == two.t && one.h == two.h && one.l == two.l, "trial %d", trial);
    }
}

CLAIM(raising_by_one_keeps_a_slice_and_by_two_keeps_none)
{
    state s = {2, 7, 9};
    ari_acc_raise(&s.t, &s.h, &s.l, 1);
    cr_assert(s.t == 2 && s.h == 7 && s.l == 9);
    ari_acc_raise(&s.t, &s.h, &s.l, 3);
    cr_assert(s.t == 3 && s.h == 0 && s.l == 7);
    ari_acc_raise(&s.t, &s.h, &s.l, 5);
    cr_assert(s.t == 5 && s.h == 0 && s.l == 0);
}

CLAIM_OF_BOTH(slices_cut_the_value_at_every_exponent)
{
    for (uint32_t exponent = 0; exponent < 255; exponent++)
        for (uint32_t fraction = 1; fraction < 0x800000u; fraction = fraction * 3 + 1) {
            const float v = ari_float32(0x80000000u | (exponent << 23) | fraction);
            int top = 0;
            for (int b = 0; b < (narrow ? 22 : 9); b++) {
                int64_t want;
                if (plain_slice(v, b, &want) != 0)
                    top = b;
                cr_assert(ari_acc_slice(v, b, narrow) == want, "%a slice %d", (double)v, b);
            }
            cr_assert(ari_acc_top(v, narrow) == top, "%a top %d", (double)v, top);
            cr_assert(ari_acc_slice(v, -1, narrow) == 0 && ari_acc_slice(v, ARI_ACC_NONFINITE, narrow) == 0);
        }
}

/* 2^31 values of the largest slice stay within int64; checked at the edge by merging full states. */
CLAIM(two_to_the_31_largest_slices_fit)
{
    state s = {0};
    add(&s, 0x1.fffffep74f); /* its 24 bits are the top ones of slice 6: 2^32 - 2^8 */
    state doubled = s;
    for (int i = 0; i < 31; i++) {
        const state copy = doubled;
        merge(&doubled, &copy);
    }
    cr_assert(s.h == 0xffffff00LL && doubled.h == s.h * (1LL << 31) && doubled.l == s.l * (1LL << 31));
    cr_assert(value_bits(&doubled) == ari_bits32(0x1.fffffep105f));
}

EVERY_CLAIM(accumulator)
