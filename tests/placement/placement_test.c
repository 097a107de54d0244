/* SPDX-License-Identifier: Apache-2.0 */
/* Placements: their texts, their gradients, and what a rank has by them. */
#include "anyrank/placement.h"
#include "ref/placement/placement_private.h"
#include "support/together.h"

CLAIM(every_spelling_is_read_and_the_short_one_is_printed)
{
    static const struct {
        const char *text, *canonical;
    } cases[] = {
        {"R", "R"},
        {"Replicate()", "R"},
        {" R ", "R"},
        {"I", "I"},
        {"Invariant()", "I"},
        {"S(1)", "S(1)"},
        {"Shard(1)", "S(1)"},
        {"Shard(dim=1)", "S(1)"},
        {"S(-1)", "S(-1)"},
        {"Shard(dim=-2)", "S(-2)"},
        {"P(sum)", "P(sum)"},
        {"Partial(sum)", "P(sum)"},
        {"Partial()", "P(sum)"},
        {"P", "P(sum)"},
        {"P(max)", "P(max)"},
        {"Partial(max)", "P(max)"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[AR_PLACEMENT_TEXT];
        ar_placement p, again;
        cr_assert_ok(ari_placement_read(&p, cases[i].text));
        cr_assert_str_eq(ari_placement_name(text, p), cases[i].canonical, "'%s'", cases[i].text);
        cr_assert_ok(ari_placement_read(&again, text));
        cr_assert(p.kind == again.kind && p.dim == again.dim, "%s", text);
    }
    char text[AR_PLACEMENT_TEXT];
    cr_assert_str_eq(ari_placement_name(text, (ar_placement){.kind = AR_PLACEMENT_KINDS}), "?");
}

CLAIM(what_is_no_placement_is_refused)
{
    static const char *const bad[] = {"",      "S",       "S()",    "S(x)",    "S(1",         "S(1))",   "S(--1)",
                                      "S(-)",  "r",       "R()",    "P(avg)",  "P(min)",      "S(1) x",  "Shard",
                                      "S(+1)", "S( 1)",   "S(1.0)", "S(1000)", "Shard(dim=)", "Shard(1", "Replicate",
                                      "R, R",  "\x1b[31m"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        ar_placement p = {AR_SHARD, 7};
        cr_assert_eq(ari_placement_read(&p, bad[i]), AR_ERR_ARG, "'%s'", bad[i]);
        cr_assert(strstr(ar_error_message(), "S(dim)") && !strchr(ar_error_message(), '\x1b'), "%s",
                  ar_error_message());
        cr_assert(p.kind == AR_SHARD && p.dim == 7);
    }
}

CLAIM(lists_are_read_as_python_prints_them)
{
    static const char *const good[] = {"[S(0), R]", "S(0),R", "(Shard(dim=0), Replicate())", " [ S(0) ,R ] ",
                                       "(Shard(dim=0), Replicate(),)"};
    char text[64];
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        ar_placement p[2];
        cr_assert_ok(ar_placements_parse(p, 2, good[i]));
        cr_assert_str_eq(ari_placements_text(text, sizeof text, p, 2), "[S(0), R]");
    }
    ar_placement p[2] = {{AR_PARTIAL_MAX, 0}, {AR_PARTIAL_MAX, 0}};
    cr_assert_ok(ar_placements_parse(p, 1, "(Shard(dim=1),)"));
    cr_assert_ok(ar_placements_parse(p, 1, "Shard(dim=1)"));
    cr_assert(p[0].kind == AR_SHARD && p[0].dim == 1);
    cr_assert_ok(ar_placements_parse(p, 0, "[]"));
    cr_assert_str_eq(ari_placements_text(text, sizeof text, p, 0), "[]");
    static const char *const bad[] = {
        "S(0)", "[S(0), R, R]", "[S(0), ]]", "[S(0),,R]", "[S(0), R", "", "[R, x]", "R,R,", "R,R,R,R,R,R,R,R,R,R,R,R"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        cr_assert_eq(ar_placements_parse(p, 2, bad[i]), AR_ERR_ARG, "'%s'", bad[i]);
        cr_assert(p[0].kind == AR_SHARD && p[1].kind == AR_PARTIAL_MAX);
    }
    char little[8];
    cr_assert_str_eq(ari_placements_text(little, sizeof little, p, 2), "[S(1...");
}

CLAIM(a_gradient_is_placed_by_the_rule_and_twice_it_is_the_value)
{
    static const char *const pairs[][2] = {{"R", "P(sum)"}, {"I", "I"}, {"S(2)", "S(2)"}, {"P(sum)", "R"}};
    for (size_t i = 0; i < 4; i++) {
        ar_placement p, want, g, back;
        cr_assert_ok(ari_placement_read(&p, pairs[i][0]));
        cr_assert_ok(ari_placement_read(&want, pairs[i][1]));
        cr_assert_ok(ari_placement_gradient(&g, p));
        cr_assert(ari_placement_same(g, want, 3), "%s", pairs[i][0]);
        cr_assert_ok(ari_placement_gradient(&back, g));
        cr_assert(ari_placement_same(back, p, 3), "%s", pairs[i][0]);
    }
    ar_placement g;
    cr_assert_eq(ari_placement_gradient(&g, (ar_placement){AR_PARTIAL_MAX, 0}), AR_ERR_UNSUPPORTED);
    cr_assert(ari_placement_same((ar_placement){AR_SHARD, -1}, (ar_placement){AR_SHARD, 2}, 3));
    cr_assert_not(ari_placement_same((ar_placement){AR_SHARD, -1}, (ar_placement){AR_SHARD, 2}, 4));
    cr_assert(ari_placement_same((ar_placement){AR_REPLICATE, 5}, (ar_placement){AR_REPLICATE, 0}, 1));
}

static ar_status place(ar_layout *o, const ar_mesh *mesh, int rank, const char *list, const size_t *shape, bool uneven)
{
    ar_placement p[AR_MESH_DIMS];
    int at[AR_MESH_DIMS];
    AR_TRY(ar_placements_parse(p, mesh->ndim, list));
    ari_mesh_coords(mesh, rank, at);
    return ari_placements_layout(o, mesh, at, p, 2, shape, uneven);
}

/* Every element of the tensor is on as many ranks as there are replicas, times the terms of a partial one. */
static void check_cover(const ar_mesh *mesh, const char *list, const size_t *shape, int times)
{
    int seen[64] = {0}, copies[64] = {0};
    for (int rank = 0; rank < 6; rank++) {
        ar_layout o;
        cr_assert_ok(place(&o, mesh, rank, list, shape, true));
        cr_assert(o.replica >= 0 && o.replica < o.replicas);
        for (size_t i = 0; i < shape[0] * shape[1] && o.nbox; i++) {
            const size_t at[2] = {i / shape[1], i % shape[1]};
            const ar_box *b = &o.box[0];
            const bool in = at[0] - b->global[0] < b->extent[0] && at[1] - b->global[1] < b->extent[1];
            cr_assert(b->local[0] == 0 && b->local[1] == 0 && o.nbox == 1);
            seen[i] += in;
            copies[i] += in && o.replica == 0;
        }
    }
    for (size_t i = 0; i < shape[0] * shape[1]; i++)
        cr_assert(seen[i] == times && copies[i] > 0, "%s: element %zu is on %d ranks, expected %d", list, i, seen[i],
                  times);
}

CLAIM(ranks_share_out_a_tensor_however_it_does_not_divide)
{
    const ar_mesh m = {2, {{"dp", 2}, {"tp", 3}}};
    static const size_t shapes[][2] = {{6, 9}, {7, 5}, {1, 2}, {0, 4}, {5, 8}};
    for (size_t s = 0; s < 5; s++) {
        check_cover(&m, "[R, R]", shapes[s], 6);
        check_cover(&m, "[S(0), S(1)]", shapes[s], 1);
        check_cover(&m, "[S(0), S(0)]", shapes[s], 1);
        check_cover(&m, "[S(1), S(1)]", shapes[s], 1);
        check_cover(&m, "[S(-1), I]", shapes[s], 3);
        check_cover(&m, "[R, S(0)]", shapes[s], 2);
        check_cover(&m, "[P(sum), S(0)]", shapes[s], 2);
        check_cover(&m, "[P(max), R]", shapes[s], 6);
    }
}

CLAIM(the_outer_dimension_cuts_first)
{
    const ar_mesh m = {2, {{"dp", 2}, {"tp", 3}}};
    static const size_t start[6] = {0, 2, 4, 5, 7, 9}, count[6] = {2, 2, 1, 2, 2, 1}; /* 10 = 5 + 5, 5 = 2 + 2 + 1 */
    for (int rank = 0; rank < 6; rank++) {
        ar_layout o;
        cr_assert_ok(place(&o, &m, rank, "[S(1), S(1)]", (const size_t[]){4, 10}, true));
        cr_assert_eq(o.box[0].global[1], start[rank]);
        cr_assert_eq(o.box[0].extent[1], count[rank]);
        cr_assert_eq(o.box[0].extent[0], 4);
    }
}

CLAIM(replicas_are_numbered_over_the_dimensions_that_replicate)
{
    const ar_mesh m = {3, {{"a", 2}, {"b", 2}, {"c", 2}}};
    for (int rank = 0; rank < 8; rank++) {
        ar_layout o;
        cr_assert_ok(place(&o, &m, rank, "[R, S(0), I]", (const size_t[]){4, 1}, false));
        cr_assert_eq(o.replicas, 4);
        cr_assert_eq(o.replica, rank / 4 * 2 + rank % 2);
    }
}

CLAIM(what_a_tensor_cannot_have_is_refused_by_name)
{
    const ar_mesh m = {2, {{"dp", 2}, {"tp", 3}}};
    const size_t shape[2] = {4, 9};
    ar_layout o;
    cr_assert_ok(place(&o, &m, 0, "[S(0), S(1)]", shape, false));
    cr_assert_eq(place(&o, &m, 0, "[R, S(0)]", shape, false), AR_ERR_INDIVISIBLE);
    cr_assert(strstr(ar_error_message(), "4 elements") && strstr(ar_error_message(), "3 ranks of 'tp'"), "%s",
              ar_error_message());
    cr_assert_refused(place(&o, &m, 0, "[R, S(2)]", shape, true), AR_ERR_ARG, "-2 to 1");
    cr_assert_eq(place(&o, &m, 0, "[R, S(-3)]", shape, true), AR_ERR_ARG);
    const ar_placement p[2] = {{AR_SHARD, 0}, {AR_PLACEMENT_KINDS, 0}};
    cr_assert_eq(ari_placements_layout(&o, &m, (const int[]){0, 0}, p, 2, shape, true), AR_ERR_ARG);
    cr_assert_eq(ari_placements_layout(&o, &m, (const int[]){0, 3}, (ar_placement[2]){{0}}, 2, shape, true),
                 AR_ERR_ARG);
    cr_assert_eq(ari_placements_layout(&o, &m, (const int[]){0, 0}, p, 5, shape, true), AR_ERR_ARG);
    cr_assert_refused(ari_placements_layout(&o, &(ar_mesh){1, {{"tp", 1}}}, (const int[]){0}, p, 0, NULL, true),
                      AR_ERR_ARG, "scalar");
}

/* Texts out of pieces of placements: whatever is read is printed so that it is read again. */
CLAIM(drawn_texts_are_refused_or_read_as_they_are_printed)
{
    static const char *const pieces[] = {"R", "I",    "S(",     "P(",          "1",        "-",   "0",
                                         ")", "sum",  "max",    ",",           "(",        "[",   "]",
                                         " ", "dim=", "Shard(", "Replicate()", "Partial(", "S(1)"};
    uint64_t state = 7;
    int good = 0;
    for (int i = 0; i < 50000; i++) {
        char text[96] = "", printed[96];
        ar_placement p[2], again[2];
        state = state * 6364136223846793005u + 1442695040888963407u;
        for (uint64_t k = 0, draw = state; k < 1 + (state >> 60) % 6;
             k++, draw = draw * 2862933555777941757u + 3037000493u)
            strcat(text, pieces[(draw >> 33) % (sizeof pieces / sizeof *pieces)]);
        if (ar_placements_parse(p, 2, text) != AR_OK)
            continue;
        good++;
        ari_placements_text(printed, sizeof printed, p, 2);
        cr_assert_eq(ar_placements_parse(again, 2, printed), AR_OK, "'%s' as '%s'", text, printed);
        cr_assert(memcmp(p, again, sizeof p) == 0, "'%s' as '%s'", text, printed);
    }
    cr_assert_gt(good, 20);
}

EVERY_CLAIM(placement)
