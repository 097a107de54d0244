/* SPDX-License-Identifier: Apache-2.0 */
/* Division by multiplication against the processor's own. */
#include "ref/numerics/divisor.h"
#include "tests/support/test.h"

static const uint64_t MOST = INT64_MAX;

/* Divisors and quotients around every power of two, of the whole range, and what a seed draws. */
static uint64_t number(uint64_t i)
{
    const uint64_t drawn = (i + 1) * 0x9e3779b97f4a7c15u, power = (uint64_t)1 << (i / 3 % 63);
    return i < 189 ? power - 1 + i % 3 : (drawn ^ drawn >> 29) >> (1 + i % 63);
}
enum { NUMBERS = 700 };

static void expect_quotient(const ari_divisor *d, uint64_t n)
{
    size_t rest = n;
    if (n > MOST)
        return;
    const size_t quotient = ari_divide(d, &rest);
    cr_assert(quotient == n / d->divisor && rest == n % d->divisor, "%llu / %zu is %zu rest %zu", (unsigned long long)n,
              d->divisor, quotient, rest);
}

Test(divisor, quotients_are_the_processors_at_every_edge)
{
    for (uint64_t i = 0; i < NUMBERS; i++) {
        const uint64_t by = number(i);
        if (by == 0 || by > MOST)
            continue;
        const ari_divisor d = ari_divisor_of(by);
        for (uint64_t k = 0; k < NUMBERS; k++) {
            const uint64_t n = number(k), multiple = n % (MOST / by + 1) * by;
            expect_quotient(&d, n);
            expect_quotient(&d, multiple);
            expect_quotient(&d, multiple + by - 1);
        }
        expect_quotient(&d, MOST);
        expect_quotient(&d, MOST / by * by);
        expect_quotient(&d, MOST / by * by - 1);
    }
}

Test(divisor, nothing_is_divided_by_an_extent_of_nothing)
{
    const ari_divisor d = ari_divisor_of(0);
    cr_assert_eq(ari_quotient(&d, 7), 7);
}
