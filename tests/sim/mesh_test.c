/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "anyrank/sim.h"

TestSuite(mesh, .timeout = 300);

static void check_group(const ar_mesh *m, int rank, const char *dim, const int *want, int n)
{
    int got[64];
    cr_assert_eq(ar_mesh_group(m, rank, dim, got, 64), n);
    for (int i = 0; i < n; i++)
        cr_assert_eq(got[i], want[i], "rank %d %s[%d] is %d, expected %d", rank, dim, i, got[i], want[i]);
}

Test(mesh, sixteen_ranks_with_tp_4_have_the_documented_groups)
{
    const ar_mesh m = {.pp = 1, .dp = 4, .cp = 1, .tp = 4};
    cr_assert_eq(ar_mesh_check(&m, 16), AR_OK);
    for (int rank = 0; rank < 16; rank++) {
        const int tp = rank / 4 * 4, dp = rank % 4;
        check_group(&m, rank, "tp", (const int[]){tp, tp + 1, tp + 2, tp + 3}, 4);
        check_group(&m, rank, "dp", (const int[]){dp, dp + 4, dp + 8, dp + 12}, 4);
        check_group(&m, rank, "pp", &rank, 1);
        check_group(&m, rank, "cp", &rank, 1);
    }
}

Test(mesh, ten_ranks_do_not_make_a_mesh_with_tp_4)
{
    const ar_mesh m = {.pp = 1, .dp = 2, .cp = 1, .tp = 4};
    cr_assert_eq(ar_mesh_check(&m, 10), AR_ERR_INDIVISIBLE);
    cr_assert(strstr(ar_error_message(), "tp 4"), "%s", ar_error_message());
    cr_assert(strstr(ar_error_message(), "10 ranks"), "%s", ar_error_message());
    const ar_mesh huge = {.pp = 1 << 30, .dp = 1 << 30, .cp = 1 << 30, .tp = 1 << 30};
    cr_assert_eq(ar_mesh_check(&huge, 16), AR_ERR_INDIVISIBLE);
    const ar_mesh none = {.pp = 1, .dp = 0, .cp = 1, .tp = 4};
    cr_assert_eq(ar_mesh_check(&none, 4), AR_ERR_ARG);
    cr_assert_eq(ar_mesh_check(NULL, 4), AR_ERR_ARG);
}

Test(mesh, coordinates_and_groups_agree_in_four_dimensions)
{
    const ar_mesh m = {.pp = 2, .dp = 3, .cp = 2, .tp = 2};
    static const char *const dims[] = {"pp", "dp", "cp", "tp"};
    const int extents[] = {2, 3, 2, 2};
    cr_assert_eq(ar_mesh_check(&m, 24), AR_OK);
    for (int rank = 0; rank < 24; rank++) {
        int own[4];
        ar_mesh_coords(&m, rank, &own[0], &own[1], &own[2], &own[3]);
        cr_assert_eq(((own[0] * 3 + own[1]) * 2 + own[2]) * 2 + own[3], rank);
        for (int d = 0; d < 4; d++) {
            int group[8];
            cr_assert_eq(ar_mesh_group(&m, rank, dims[d], group, 8), extents[d]);
            cr_assert_eq(group[own[d]], rank);
            for (int i = 0; i < extents[d]; i++) {
                int at[4];
                ar_mesh_coords(&m, group[i], &at[0], &at[1], &at[2], &at[3]);
                for (int e = 0; e < 4; e++)
                    cr_assert_eq(at[e], e == d ? i : own[e]);
            }
        }
    }
}

Test(mesh, another_name_has_no_group_and_a_short_list_is_not_overrun)
{
    const ar_mesh m = {.pp = 1, .dp = 1, .cp = 1, .tp = 4};
    int got[3] = {-1, -1, -1};
    cr_assert_eq(ar_mesh_group(&m, 0, "ep", got, 3), 0);
    cr_assert_eq(ar_mesh_group(&m, 0, "tp", got, 2), 4);
    cr_assert_eq(got[1], 1);
    cr_assert_eq(got[2], -1);
}
