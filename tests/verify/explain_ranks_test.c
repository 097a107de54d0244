/* SPDX-License-Identifier: Apache-2.0 */
/* A dump of ranks: what their parts say, and what the whole says where parts say nothing. */
#include "tests/dump/folder.h"
#include "tests/support/noise.h"
#include "verify/diagnose/diagnose.h"

TestSuite(explain_ranks, .init = folder_begin, .fini = folder_end);

enum { ROWS = 24, COLS = 16, COUNT = ROWS * COLS };

/* A reference and a folder with the files of `ranks` ranks, whose parts a test fills. */
typedef struct run {
    const char *name;
    size_t shape[2];
    float reference[COUNT];
    float local[4][COUNT];
    ar_layout layout[4];
    ar_tensor view[4];
    int ranks;
    const char *along; /* the dimension of the mesh; NULL: tp */
    double rtol;
} run;

static void run_begin(run *r, const char *name, int ranks)
{
    *r = (run){.name = name, .shape = {ROWS, COLS}, .ranks = ranks};
    for (size_t i = 0; i < COUNT; i++)
        r->reference[i] = noise(i);
}

/* The reference's values to where the layouts have them. */
static void run_fill(run *r)
{
    for (int rank = 0; rank < r->ranks; rank++) {
        const ar_layout *o = &r->layout[rank];
        const size_t local[2] = {ar_layout_local(o, 0), ar_layout_local(o, 1)};
        cr_assert_ok(ar_tensor_view(&r->view[rank], AR_F32, 2, local, (ar_buf){r->local[rank]}));
        for (size_t b = 0; b < o->nbox; b++) {
            const ar_box *box = &o->box[b];
            for (size_t i = 0; i < box->extent[0]; i++) {
                for (size_t k = 0; k < box->extent[1]; k++)
                    r->local[rank][(box->local[0] + i) * local[1] + box->local[1] + k] =
                        r->reference[(box->global[0] + i) * COLS + box->global[1] + k];
            }
        }
    }
}

static void run_write(run *r)
{
    for (int rank = 0; rank < r->ranks; rank++) {
        ar_dump_place place = {
            .rank = rank, .world = r->ranks, .mesh = {2, {{"dp", 1}, {"tp", r->ranks}}}, .at = {0, rank}};
        if (r->along) {
            place.mesh = (ar_mesh){1, {{"", r->ranks}}};
            place.at[0] = rank;
            snprintf(place.mesh.dim[0].name, sizeof place.mesh.dim[0].name, "%s", r->along);
        }
        const ar_dump_value v = {.name = r->name, .dtype = AR_F32, .local = &r->view[rank], .layout = &r->layout[rank]};
        cr_assert_ok(ar_dump_write(folder, &place, &v, 1, NULL, 0));
    }
}

/* Both texts contain what is expected. */
static void expect_texts(run *r, const char *pattern, const char *hint)
{
    char path[128];
    OWNED(ar_dump_close) ar_dump *reference = NULL, *other = NULL;
    const ar_st_tensor t = {.name = r->name, .dtype = AR_F32, .ndim = 2, .shape = {ROWS, COLS}, .data = r->reference};
    run_write(r);
    cr_assert_ok(ar_dump_open(&other, folder, NULL));
    snprintf(path, sizeof path, "%s-reference.safetensors", folder);
    cr_assert_ok(ar_st_write(path, &t, 1, NULL, 0));
    cr_assert_ok(ar_dump_open(&reference, path, NULL));
    ar_verify_row row = {.name = r->name};
    const ari_explain_case c = {.reference = reference, .other = other, .rtol = r->rtol};
    const ar_dump_tensor *a = ar_dump_find(reference, r->name), *b = ar_dump_find(other, r->name);
    cr_assert(a && b);
    cr_assert_ok(ari_explain(&row, a, b, &c));
    cr_expect(strstr(row.pattern, pattern) && strstr(row.hint, hint), "expected '%s', '%s'\n  pattern %s\n  hint    %s",
              pattern, hint, row.pattern, row.hint);
    unlink(path);
}

static void shard_rows(run *r)
{
    for (int rank = 0; rank < r->ranks; rank++)
        cr_assert_ok(ar_layout_shard(&r->layout[rank], 2, r->shape, 0, rank, r->ranks));
    run_fill(r);
}

static void replicate(run *r)
{
    for (int rank = 0; rank < r->ranks; rank++)
        cr_assert_ok(ar_layout_replicate(&r->layout[rank], 2, r->shape, rank, r->ranks));
    run_fill(r);
}

Test(explain_ranks, one_rank_s_factor_is_that_rank_s)
{
    run r;
    run_begin(&r, "model.layers.0.mlp.up_proj.weight:grad", 4);
    shard_rows(&r);
    for (size_t i = 0; i < COUNT / 4; i++)
        r.local[2][i] *= 4.0f;
    expect_texts(&r, "on rank 2 only", "4");
}

/* What each of two ranks holds alike was reduced, whatever its size. */
Test(explain_ranks, equal_copies_lack_no_reduction)
{
    run r;
    run_begin(&r, "model.layers.0.mlp.extra.weight:grad", 2);
    replicate(&r);
    r.rtol = 0.02;
    for (size_t i = 0; i < COUNT; i++)
        r.local[0][i] = r.local[1][i] = 0.5f * r.reference[i] * (1.0f + 2e-3f * noise(i + 7000));
    expect_texts(&r, "whose copies are equal", "divided by 2 once more");
}

Test(explain_ranks, shards_that_were_averaged_are_of_the_wrong_group)
{
    run r;
    run_begin(&r, "model.layers.0.mlp.up_proj.weight:grad", 2);
    shard_rows(&r);
    for (size_t i = 0; i < COUNT / 2; i++)
        r.local[0][i] = r.local[1][i] = 0.5f * (r.reference[i] + r.reference[i + COUNT / 2]);
    expect_texts(&r, "each the mean of 2 shards' values", "averaged over ranks that hold different parts");
}

Test(explain_ranks, parts_that_add_up_lack_an_all_reduce)
{
    run r;
    run_begin(&r, "model.layers.0.mlp.extra.weight:grad", 2);
    replicate(&r);
    for (size_t i = 0; i < COUNT; i++) {
        r.local[0][i] = 0.3f * noise(i + 7000);
        r.local[1][i] = r.reference[i] - r.local[0][i];
    }
    expect_texts(&r, "the copies differ from each other", "missing all-reduce over tp");
}

/* Along a dimension that the mesh has, whatever else such parts may be of. */
Test(explain_ranks, parts_of_stages_are_reduced_over_pp)
{
    static const char *const along[] = {"pp", "dp", "dp_shard"}, *const said[] = {
                                                                     "over pp: ", "over dp: ", "over dp: "};
    for (size_t k = 0; k < sizeof along / sizeof *along; k++) {
        run r;
        run_begin(&r, "model.embed_tokens.weight:grad", 2);
        r.along = along[k];
        replicate(&r);
        for (size_t i = 0; i < COUNT; i++) {
            r.local[0][i] = 0.3f * noise(i + 7000);
            r.local[1][i] = r.reference[i] - r.local[0][i];
        }
        expect_texts(&r, "the copies differ from each other", said[k]);
    }
}

Test(explain_ranks, a_packed_part_is_found_in_its_boxes)
{
    run r;
    run_begin(&r, "transformer.h.0.attn.c_attn.weight:grad", 2);
    for (int rank = 0; rank < 2; rank++)
        cr_assert_ok(ar_layout_packed(&r.layout[rank], 2, r.shape, 0, (const size_t[]){8, 8, 8}, 3, rank, 2));
    run_fill(&r);
    /* Rank 1 holds rows 4..7, 12..15, 20..23; its second box is wrong. */
    for (size_t i = 4 * COLS; i < 8 * COLS; i++)
        r.local[1][i] = 0.0f;
    expect_texts(&r, "rows 12..15", "zero");
    expect_texts(&r, "on rank 1 only", "rank 1");
}

Test(explain_ranks, shards_at_each_other_s_place_are_seen_beside_rounding)
{
    run r;
    run_begin(&r, "model.layers.0.mlp.up_proj.weight", 4);
    shard_rows(&r);
    for (int rank = 0; rank < 4; rank++) {
        for (size_t i = 0; i < COUNT / 4; i++)
            r.local[rank][i] = r.reference[(size_t)((rank + 1) % 4) * (COUNT / 4) + i] + 2e-6f * noise(i + 99);
    }
    expect_texts(&r, "on all 4 ranks", "shards in rotated order");
}

Test(explain_ranks, rounding_on_ranks_is_rounding)
{
    run r;
    run_begin(&r, "model.layers.0.mlp.up_proj.weight:grad", 4);
    shard_rows(&r);
    for (int rank = 0; rank < 4; rank++) {
        for (size_t i = 0; i < COUNT / 4; i++)
            r.local[rank][i] += 2e-6f * noise(i + 99);
    }
    expect_texts(&r, "", "rounding");
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
