/* SPDX-License-Identifier: Apache-2.0 */
/* Digests of rows: what any bit of a row, and its place, changes. */
#include <string.h>

#include "ref/numerics/digest.h"
#include "tests/support/test.h"

enum { N = 300 };

static uint64_t digest_of(const float *row, size_t n)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += ari_digest_term(row[i], i);
    return sum;
}

static bool same_numbers(uint64_t a, uint64_t b)
{
    return ari_digest_number(a, 0) == ari_digest_number(b, 0) && ari_digest_number(a, 1) == ari_digest_number(b, 1);
}

Test(digest, every_bit_and_place_of_a_row_changes_it)
{
    float row[N];
    for (size_t i = 0; i < N; i++)
        row[i] = 1.0f / (float)(i + 3);
    const uint64_t whole = digest_of(row, N);
    for (size_t i = 0; i < N; i++)
        for (int bit = 0; bit < 32; bit++) {
            float other[N];
            memcpy(other, row, sizeof row);
            const uint32_t bits = ari_bits32(row[i]) ^ (uint32_t)1 << bit;
            memcpy(&other[i], &bits, sizeof bits);
            cr_assert(!same_numbers(whole, digest_of(other, N)), "element %zu, bit %d", i, bit);
        }
    float swapped[N];
    memcpy(swapped, row, sizeof row);
    swapped[7] = row[8];
    swapped[8] = row[7];
    cr_expect(!same_numbers(whole, digest_of(swapped, N)));
}

Test(digest, zeros_of_masked_keys_add_nothing)
{
    const float row[4] = {0.25f, 0.75f, 0.0f, 0.0f};
    cr_expect(digest_of(row, 4) == digest_of(row, 2));
    cr_expect(ari_digest_term(-0.0f, 3) != 0);
}

/* Both numbers are integers below 2^24, which fp32 holds. */
Test(digest, is_two_numbers_of_24_bits)
{
    cr_expect(ari_digest_number(UINT64_MAX, 0) == 0x1p24f - 1.0f && ari_digest_number(UINT64_MAX, 1) == 0x1p24f - 1.0f);
    cr_expect(ari_digest_number((uint64_t)1 << 40, 0) == 1.0f && ari_digest_number((uint64_t)1 << 16, 1) == 1.0f);
}
