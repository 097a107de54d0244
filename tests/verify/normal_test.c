/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/compare/normal.h"

#include "support/together.h"
#include "verify/verify_support.h"

enum { MANY = 64, DRAWN = 9 };

/* A tensor whose draws differ by about `size`, against one that is off by `off` in each element. */
static bool is_normal(float size, float off, bool by_draws)
{
    SCOPED(two_files_end) const two_files f = two_files_make();
    float a[MANY], b[MANY];
    double draws[DRAWN][ARI_NORMAL_SIZES], allowed = 1.0;
    for (int i = 0; i < MANY; i++) {
        a[i] = 1.0f + (float)i / MANY;
        b[i] = a[i] + (i % 2 ? off : -off);
    }
    for (int i = 0; i < DRAWN; i++) {
        draws[i][ARI_NORMAL_RMS] = (double)size * (1.0 + 0.01 * i);
        draws[i][ARI_NORMAL_LARGEST] = 2.0 * (double)size * (1.0 + 0.01 * i);
        draws[i][ARI_NORMAL_TYPICAL] = 1.0;
    }
    const ar_st_tensor reference = vector_of("x:fwd", AR_F32, MANY, a), other = vector_of("x:fwd", AR_F32, MANY, b);
    const ar_st_tensor file[] = {vector_of("x:fwd", AR_F64, 1, &allowed),
                                 {.name = ARI_NORMAL_PREFIX "x:fwd",
                                  .dtype = AR_F64,
                                  .ndim = 2,
                                  .shape = {DRAWN, ARI_NORMAL_SIZES},
                                  .data = draws}};
    write_tensors(f.reference, &reference, 1);
    write_tensors(f.other, &other, 1);
    write_tensors(f.allowed, file, 2);
    const ar_verify_options o = {.reference = f.reference,
                                 .other = f.other,
                                 .rule = by_draws ? AR_VERIFY_SENSITIVITY : AR_VERIFY_TOLERANCE,
                                 .allowed = by_draws ? f.allowed : NULL};
    ar_verify_report *r = NULL;
    ari_normal n = {0};
    cr_assert_eq(ar_verify(&r, &o), AR_OK, "%s", ar_error_message());
    cr_assert_eq(ari_normal_judge(&n, r, o.allowed), AR_OK, "%s", ar_error_message());
    const bool normal = n.normal;
    cr_expect(isnan(n.row[0].percentile) != by_draws || off == 0.0f);
    ari_normal_fini(&n);
    ar_verify_report_destroy(r);
    return normal;
}

CLAIM(a_difference_like_those_of_the_draws_is_normal_and_a_larger_one_is_not)
{
    cr_expect(is_normal(1e-5f, 0.8e-5f, true));
    cr_expect(is_normal(1e-5f, 0.0f, true));
    cr_expect_not(is_normal(1e-5f, 2e-5f, true));
    cr_expect_not(is_normal(1e-5f, 1e-2f, true));
}

CLAIM(without_draws_a_bound_judges)
{
    cr_expect(is_normal(1e-5f, 1e-6f, false));
    cr_expect_not(is_normal(1e-5f, 1e-2f, false));
}

EVERY_CLAIM(normal)
