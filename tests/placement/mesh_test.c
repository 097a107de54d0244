/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/placement.h"
#include "ref/placement/placement_private.h"
#include "support/together.h"

static void check_group(const ar_mesh *m, int rank, const char *name, const int *want, int n)
{
    int got[64];
    cr_assert_eq(ari_mesh_group(m, rank, ari_mesh_find(m, name), got, 64), n);
    for (int i = 0; i < n; i++)
        cr_assert_eq(got[i], want[i], "rank %d %s[%d] is %d, expected %d", rank, name, i, got[i], want[i]);
}

CLAIM(sixteen_ranks_with_tp_4_have_the_documented_groups)
{
    const ar_mesh m = {4, {{"pp", 1}, {"dp", 4}, {"cp", 1}, {"tp", 4}}};
    cr_assert_ok(ari_mesh_check(&m, 16));
    for (int rank = 0; rank < 16; rank++) {
        const int tp = rank / 4 * 4, dp = rank % 4;
        check_group(&m, rank, "tp", (const int[]){tp, tp + 1, tp + 2, tp + 3}, 4);
        check_group(&m, rank, "dp", (const int[]){dp, dp + 4, dp + 8, dp + 12}, 4);
        check_group(&m, rank, "pp", &rank, 1);
        check_group(&m, rank, "cp", &rank, 1);
    }
}

CLAIM(ten_ranks_do_not_make_a_mesh_with_tp_4)
{
    const ar_mesh m = {2, {{"dp", 2}, {"tp", 4}}};
    cr_assert_refused(ari_mesh_check(&m, 10), AR_ERR_INDIVISIBLE, "tp 4");
    cr_assert_says("10 ranks");
    const ar_mesh huge = {4, {{"pp", 1 << 30}, {"dp", 1 << 30}, {"cp", 1 << 30}, {"tp", 1 << 30}}};
    cr_assert_eq(ari_mesh_check(&huge, 16), AR_ERR_INDIVISIBLE);
    cr_assert_ok(ari_mesh_check(&(ar_mesh){0}, 1));
    cr_assert_eq(ari_mesh_check(&(ar_mesh){0}, 2), AR_ERR_INDIVISIBLE);
}

CLAIM(what_is_no_mesh_is_refused)
{
    ar_mesh unended = {1, {{"tp", 4}}};
    memset(unended.dim[0].name, 'x', AR_MESH_NAME);
    const ar_mesh bad[] = {{2, {{"dp", 0}, {"tp", 4}}},    {1, {{"", 4}}},
                           {2, {{"tp", 2}, {"tp", 2}}},    {-1, {{"tp", 4}}},
                           {AR_MESH_DIMS + 1, {{"a", 1}}}, unended};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        cr_assert_eq(ari_mesh_check(&bad[i], 4), AR_ERR_ARG, "mesh %zu", i);
    cr_assert_eq(ari_mesh_check(NULL, 4), AR_ERR_ARG);
    cr_assert_eq(ari_mesh_check(&(ar_mesh){0}, 0), AR_ERR_ARG);
}

CLAIM(coordinates_and_groups_agree_in_four_dimensions)
{
    const ar_mesh m = {4, {{"pp", 2}, {"dp", 3}, {"cp", 2}, {"tp", 2}}};
    cr_assert_ok(ari_mesh_check(&m, 24));
    for (int rank = 0; rank < 24; rank++) {
        int own[4];
        ari_mesh_coords(&m, rank, own);
        cr_assert_eq(((own[0] * 3 + own[1]) * 2 + own[2]) * 2 + own[3], rank);
        for (int d = 0; d < 4; d++) {
            int group[8];
            cr_assert_eq(ari_mesh_group(&m, rank, d, group, 8), m.dim[d].size);
            cr_assert_eq(group[own[d]], rank);
            for (int i = 0; i < m.dim[d].size; i++) {
                int at[4];
                ari_mesh_coords(&m, group[i], at);
                for (int e = 0; e < 4; e++)
                    cr_assert_eq(at[e], e == d ? i : own[e]);
            }
        }
    }
}

CLAIM(another_name_has_no_group_and_a_short_list_is_not_overrun)
{
    const ar_mesh m = {1, {{"tp", 4}}};
    int got[3] = {-1, -1, -1};
    cr_assert_eq(ari_mesh_find(&m, "ep"), -1);
    cr_assert_eq(ari_mesh_group(&m, 0, ari_mesh_find(&m, "ep"), got, 3), 0);
    cr_assert_eq(ari_mesh_group(&m, 0, 0, got, 2), 4);
    cr_assert_eq(got[1], 1);
    cr_assert_eq(got[2], -1);
}

CLAIM(meshes_are_the_same_by_names_sizes_and_order)
{
    const ar_mesh m = {2, {{"dp", 2}, {"tp", 4}}};
    const ar_mesh others[] = {
        {1, {{"dp", 2}}}, {2, {{"dp", 2}, {"tp", 2}}}, {2, {{"dp", 2}, {"cp", 4}}}, {2, {{"tp", 4}, {"dp", 2}}}};
    cr_assert(ari_mesh_same(&m, &(ar_mesh){2, {{"dp", 2}, {"tp", 4}}}));
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        cr_assert_not(ari_mesh_same(&m, &others[i]), "%zu", i);
}

EVERY_CLAIM(mesh)
