/* SPDX-License-Identifier: Apache-2.0 */
/* A dump of ranks: what their parts say, and what the whole says where parts say nothing. */
#include "ref/core/tensor_private.h"
#include "ref/io/safetensors_private.h"
#include "tests/dump/folder.h"
#include "tests/support/noise.h"
#include "verify/diagnose/diagnose.h"

TestSuite(explain_ranks, .init = folder_begin, .fini = folder_end);

enum { ROWS = 24, COLS = 16, COUNT = ROWS * COLS };

/* Element i of the tensor in a rank's part, where the reference has x = noise(i). */
typedef float element_of(int rank, size_t i, float x);
#define VALUE(name, expression)                    \
    static float name(int rank, size_t i, float x) \
    {                                              \
        (void)rank, (void)i, (void)x;              \
        return (float)(expression);                \
    }

VALUE(four_times_on_rank_2, rank == 2 ? 4.0f * x : x)
VALUE(reversed_then_nan, rank == 0 ? noise((ROWS - 1 - i / COLS) * COLS + i % COLS) : i % 5 == 2 ? NAN : x)
/* Together .58 of the reference, and something else. */
VALUE(like_a_part, 0.29f * x + 0.15f * noise(i + 7000))
VALUE(halves_of_each, 0.5f * x * (1.0f + 2e-3f * noise(i + 7000)))
VALUE(mean_of_shards, 0.5f * (noise(i % (COUNT / 2)) + noise(i % (COUNT / 2) + COUNT / 2)))
VALUE(parts_of_a_sum, rank == 0 ? 0.3f * noise(i + 7000) : x - 0.3f * noise(i + 7000))
/* Rank 1 holds rows 4..7, 12..15, 20..23; its second box is wrong. */
VALUE(zeros_in_second_box, i / COLS >= 12 && i / COLS < 16 ? 0.0f : x)
VALUE(shard_of_next, noise((i + COUNT / 4) % COUNT) + 2e-6f * noise(i % (COUNT / 4) + 99))
VALUE(rounded, x + 2e-6f * noise(i % (COUNT / 4) + 99))

#define UP "model.layers.0.mlp.up_proj.weight"
#define EXTRA "model.layers.0.mlp.extra.weight:grad"
static const struct {
    const char *name;
    enum { SHARDED, WHOLE, PACKED, SUMMED } how;
    int ranks;
    element_of *is;
    const char *pattern, *hint; /* what each contains */
    const char *along;          /* the dimension of the mesh; NULL: tp, beside a dp of 1 */
    double rtol;
} cases[] = {
    {UP ":grad", SHARDED, 4, four_times_on_rank_2, "on rank 2 only", "4", NULL, 0.0},
    /* However well the first copy is explained, the second's values are not numbers. */
    {UP ":grad", WHOLE, 2, reversed_then_nan, "NaN on rank 1;", "not a number", "dp", 0.0},
    /* Of a sum that is taken of all ranks' parts none is missing, however alike it is. */
    {"model.layers.0.mlp.down_proj:fwd", SUMMED, 2, like_a_part, "", "no known trace", NULL, 0.0},
    /* What each of two ranks holds alike was reduced, whatever its size. */
    {EXTRA, WHOLE, 2, halves_of_each, "whose copies are equal", "divided by 2 once more", NULL, 0.02},
    {UP ":grad", SHARDED, 2, mean_of_shards, "each the mean of 2 shards' values",
     "averaged over ranks that hold different parts", NULL, 0.0},
    {EXTRA, WHOLE, 2, parts_of_a_sum, "the copies differ from each other", "missing all-reduce over tp", NULL, 0.0},
    /* Along a dimension that the mesh has, whatever else such parts may be of. */
    {"model.embed_tokens.weight:grad", WHOLE, 2, parts_of_a_sum, "the copies differ", "over pp: ", "pp", 0.0},
    {"model.embed_tokens.weight:grad", WHOLE, 2, parts_of_a_sum, "the copies differ", "over dp: ", "dp", 0.0},
    {"model.embed_tokens.weight:grad", WHOLE, 2, parts_of_a_sum, "the copies differ", "over dp_shard: ", "dp_shard",
     0.0},
    {"model.embed_tokens.weight:grad", WHOLE, 2, parts_of_a_sum, "the copies differ", "over ep: ", "ep", 0.0},
    {"transformer.h.0.attn.c_attn.weight:grad", PACKED, 2, zeros_in_second_box, "rows 12..15", "zero", NULL, 0.0},
    {"transformer.h.0.attn.c_attn.weight:grad", PACKED, 2, zeros_in_second_box, "on rank 1 only", "rank 1", NULL, 0.0},
    {UP, SHARDED, 4, shard_of_next, "on all 4 ranks", "shards in rotated order", NULL, 0.0},
    {UP ":grad", SHARDED, 4, rounded, "", "rounding", NULL, 0.0},
};

/* The file of one rank of case k. */
static void write_rank(size_t k, int rank)
{
    static const size_t shape[] = {ROWS, COLS}, blocks[] = {8, 8, 8};
    const int n = cases[k].ranks;
    float local[COUNT];
    ar_layout o;
    ar_tensor view;
    cr_assert_ok(cases[k].how == SHARDED  ? ar_layout_shard(&o, 2, shape, 0, rank, n)
                 : cases[k].how == WHOLE  ? ari_layout_replicate(&o, 2, shape, rank, n)
                 : cases[k].how == SUMMED ? ari_layout_replicate(&o, 2, shape, 0, 1)
                                          : ari_layout_packed(&o, 2, shape, 0, blocks, 3, rank, n));
    for (size_t b = 0; b < o.nbox; b++) {
        for (size_t i = 0; i < o.box[b].extent[0] * COLS; i++) {
            const size_t at = o.box[b].global[0] * COLS + i;
            local[o.box[b].local[0] * COLS + i] = cases[k].is(rank, at, noise(at));
        }
    }
    const size_t own[] = {ari_layout_local(&o, 0), COLS};
    cr_assert_ok(ar_tensor_view(&view, AR_F32, 2, own, (ar_buf){local}));
    ar_dump_place place = {.rank = rank, .world = n, .mesh = {2, {{"dp", 1}, {"tp", n}}}, .at = {0, rank}};
    if (cases[k].along) {
        place.mesh = (ar_mesh){1, {{"", n}}};
        place.at[0] = rank;
        snprintf(place.mesh.dim[0].name, sizeof place.mesh.dim[0].name, "%s", cases[k].along);
    }
    const ar_dump_value v = {.name = cases[k].name,
                             .dtype = AR_F32,
                             .local = &view,
                             .layout = &o,
                             .partial = cases[k].how == SUMMED ? "tp" : NULL};
    cr_assert_ok(ar_dump_write(folder, &place, &v, 1, NULL, 0));
}

Test(explain_ranks, what_ranks_hold_is_named)
{
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        const char *name = cases[k].name;
        char path[128];
        float values[COUNT];
        OWNED(ar_dump_close) ar_dump *reference = NULL, *other = NULL;
        for (size_t i = 0; i < COUNT; i++)
            values[i] = noise(i);
        for (int rank = 0; rank < cases[k].ranks; rank++)
            write_rank(k, rank);
        const ar_st_tensor t = {.name = name, .dtype = AR_F32, .ndim = 2, .shape = {ROWS, COLS}, .data = values};
        snprintf(path, sizeof path, "%s-reference.safetensors", folder);
        cr_assert_ok(ar_dump_open(&other, folder, NULL));
        cr_assert_ok(ari_st_write(path, &t, 1, NULL, 0));
        cr_assert_ok(ar_dump_open(&reference, path, NULL));
        ar_verify_row row = {.name = name};
        const ari_explain_case c = {.reference = reference, .other = other, .rtol = cases[k].rtol};
        cr_assert_ok(ari_explain(&row, ar_dump_find(reference, name), ar_dump_find(other, name), &c));
        cr_expect(strstr(row.pattern, cases[k].pattern) && strstr(row.hint, cases[k].hint),
                  "case %zu: expected '%s', '%s'\n  pattern %s\n  hint    %s", k, cases[k].pattern, cases[k].hint,
                  row.pattern, row.hint);
        unlink(path);
        folder_end();
        folder_begin();
    }
}

/* The last two ranks of four have the tensor: its first part is not rank 0's. */
Test(explain_ranks, the_rank_of_a_difference_is_the_one_that_wrote_the_part_not_the_part_s_number)
{
    static const char placement[] = "{\"version\":1,\"rank\":%d,\"world\":4,\"tensors\":{\"a\":{\"shape\":[4]}},"
                                    "\"order\":[\"a\"]}";
    const size_t four[] = {4}, two[] = {2};
    const float x[] = {1, 2, 3, 4};
    char reference[256];
    for (size_t wrong = 0; wrong < 4; wrong++) {
        float y[] = {1, 2, 3, 4};
        y[wrong] = 9;
        snprintf(reference, sizeof reference, "%s", put_tensor(".reference.safetensors", "a", 1, four, x, NULL, NULL));
        for (int part = 0; part < 2; part++) {
            char file[32], offset[64], own[160];
            snprintf(file, sizeof file, "rank-%d.safetensors", part + 2);
            snprintf(offset, sizeof offset, "{\"a\":{\"saved_offsets\":[%d]}}", 2 * part);
            snprintf(own, sizeof own, placement, part + 2);
            put_tensor(file, "a", 1, two, y + (size_t)2 * (size_t)part, offset, own);
        }
        OWNED(ar_verify_report_destroy) ar_verify_report *r = NULL;
        const ar_verify_options o = {.reference = reference, .other = folder};
        cr_assert_ok(ar_verify(&r, &o));
        cr_assert_eq(r->rows, 1);
        cr_expect(r->row[0].state == AR_VERIFY_DIFFERENT && r->row[0].first.index == wrong, "element %zu",
                  r->row[0].first.index);
        cr_expect_eq(r->row[0].ranks[0], wrong < 2 ? 2 : 3, "element %zu is of rank %d", wrong, r->row[0].ranks[0]);
    }
}
