/* SPDX-License-Identifier: Apache-2.0 */
/* The list of int8 products that a library refused, and what is asked for of all. */
#include "gpu/native.h"
#include "gpu/report/device_private.h"
#include "gpu/report/refused.h"
#include "tests/support/test.h"

Test(refused_products, are_listed_by_shape)
{
    char text[200];
    cr_assert_eq(ari_gpu_refused_products(text, sizeof text), 0);
    cr_assert_str_eq(text, "none");
    ari_gpu_note_refused(1, 4, 16, 2);
    ari_gpu_note_refused(17, 8, 64, 1);
    ari_gpu_note_refused(1, 4, 16, 2);
    cr_assert_eq(ari_gpu_refused_products(text, sizeof text), 3);
    cr_assert_str_eq(text, "3: 2 x [1, 4] of 16 terms (2), 1 x [17, 8] of 64 terms (1)");
}

Test(refused_products, are_counted_where_the_list_or_the_text_ends)
{
    char text[1000], little[10];
    for (size_t m = 1; m <= 50; m++)
        ari_gpu_note_refused(m, 4, 16, 1);
    cr_assert_eq(ari_gpu_refused_products(text, sizeof text), 50);
    cr_assert_not_null(strstr(text, ", other shapes (38)"), "%s", text);
    cr_assert_eq(ari_gpu_refused_products(little, sizeof little), 50);
    cr_assert_str_eq(little, "50: 1 x [");
}

static void expect_refusal(const char *variable, const char *value)
{
    ari_imma imma;
    setenv(variable, value, 1);
    cr_assert_eq(ari_imma_choose(&imma), AR_ERR_ARG, "%s=%s", variable, value);
    cr_assert_says(variable);
    unsetenv(variable);
}

Test(refused_products, the_environment_keeps_products_from_the_library)
{
    ari_imma imma;
    cr_assert_ok(ari_imma_choose(&imma));
    cr_assert(imma.path == ARI_IMMA_AUTO && imma.min_rows == 0);
    setenv(ARI_IMMA_VARIABLE, "imma10", 1);
    setenv(ARI_IMMA_ROWS_VARIABLE, "17", 1);
    cr_assert_ok(ari_imma_choose(&imma));
    cr_assert(imma.path == ARI_IMMA_10 && imma.min_rows == 17);
    expect_refusal(ARI_IMMA_VARIABLE, "imma12");
    expect_refusal(ARI_IMMA_ROWS_VARIABLE, "-1");
    expect_refusal(ARI_IMMA_ROWS_VARIABLE, "17x");
    expect_refusal(ARI_IMMA_ROWS_VARIABLE, "9999999999999999999999");
}
