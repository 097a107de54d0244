/* SPDX-License-Identifier: Apache-2.0 */
#include "io/st_bytes.h"
#include "ref/io/file.h"
#include "ref/io/safetensors_private.h"
#include "tests/support/folder.h"

TestSuite(safetensors_stream, .init = folder_begin, .fini = folder_end);

static void expect_text(const char *name, const char *text)
{
    OWNED(free) unsigned char *bytes = NULL;
    size_t n = 0;
    cr_assert_ok(ari_file_read(&bytes, &n, in_folder(name), 1 << 20));
    cr_expect_str_eq((char *)bytes, text);
}

static const uint16_t half[6] = {1, 2, 3, 4, 5, 6};
static const float single[2] = {1.5f, -2};
static const ar_st_tensor three[3] = {{.name = "h", .dtype = AR_BF16, .ndim = 2, .shape = {2, 3}, .data = half},
                                      {.name = "none", .dtype = AR_F32, .ndim = 1, .shape = {0}},
                                      {.name = "s", .dtype = AR_F32, .ndim = 1, .shape = {2}, .data = single}};

Test(safetensors_stream, pieces_in_any_order_make_the_file_that_is_written_at_once)
{
    static const char *const meta[] = {"format", "pt"};
    unsigned char *bytes[2] = {NULL, NULL};
    size_t n[2] = {0, 0};
    const char *a = in_folder("a"), *b = in_folder("b");
    ar_st_writer *w = NULL;
    cr_assert_ok(ari_st_write(a, three, 3, meta, 1));
    cr_assert_ok(ari_st_writer_open(&w, b, three, 3, meta, 1));
    cr_assert_ok(ari_st_writer_put(w, 0, half, 5));
    cr_assert_ok(ari_st_writer_put(w, 2, single, 8));
    cr_assert_ok(ari_st_writer_put(w, 0, (const char *)half + 5, 0));
    cr_assert_ok(ari_st_writer_put(w, 0, (const char *)half + 5, 7));
    cr_expect_neq(access(b, F_OK), 0, "the file has its name before it is whole");
    cr_assert_ok(ari_st_writer_commit(w));
    cr_assert_ok(ari_file_read(&bytes[0], &n[0], a, 4096));
    cr_assert_ok(ari_file_read(&bytes[1], &n[1], b, 4096));
    cr_assert_eq(n[0], n[1]);
    cr_expect_eq(memcmp(bytes[0], bytes[1], n[0]), 0);
    free(bytes[0]);
    free(bytes[1]);
}

Test(safetensors_stream, a_file_that_is_not_whole_never_appears)
{
    const char *path = in_folder("x");
    ar_st_writer *w = NULL;
    cr_assert_ok(ari_st_writer_open(&w, path, three, 3, NULL, 0));
    cr_assert_ok(ari_st_writer_put(w, 0, half, 12));
    cr_assert_ok(ari_st_writer_put(w, 2, single, 7));
    cr_expect_eq(ari_st_writer_put(w, 2, single, 2), AR_ERR_ARG, "one byte too many");
    cr_expect_eq(ari_st_writer_put(w, 1, single, 1), AR_ERR_ARG);
    cr_expect_eq(ari_st_writer_put(w, 3, single, 1), AR_ERR_ARG);
    cr_expect_eq(ari_st_writer_commit(w), AR_ERR_ARG);
    cr_expect_str_eq(ar_error_message(), "tensor 's': 7 of its 8 bytes were written");
    cr_assert_ok(ari_st_writer_open(&w, path, three, 3, NULL, 0));
    ari_st_writer_discard(w);
    cr_expect_eq(count_files(NULL), 0);
}

Test(safetensors_stream, a_list_that_makes_no_file_is_refused)
{
    const char *path = in_folder("x");
    ar_st_writer *w = NULL;
    const ar_st_tensor twice[2] = {three[0], three[0]};
    cr_expect_eq(ari_st_writer_open(&w, path, twice, 2, NULL, 0), AR_ERR_ARG);
    const ar_st_tensor huge = {.name = "h", .dtype = AR_F32, .ndim = 2, .shape = {SIZE_MAX / 4, 8}};
    cr_expect_eq(ari_st_writer_open(&w, path, &huge, 1, NULL, 0), AR_ERR_OVERFLOW);
    cr_expect_null(w);
}

Test(safetensors_stream, a_plan_fills_files_in_order_and_gives_large_tensors_their_own)
{
    static const size_t bytes[] = {4, 4, 2, 9, 1, 0, 8, 0}, expected[] = {0, 0, 1, 2, 3, 3, 4, 4};
    ar_st_tensor t[8];
    size_t shard[8], shards = 0;
    for (size_t i = 0; i < 8; i++)
        t[i] = (ar_st_tensor){.name = "w", .dtype = AR_U8, .ndim = 1, .shape = {bytes[i]}};
    cr_assert_ok(ari_st_shard_plan(shard, &shards, t, 8, 8));
    cr_expect_eq(memcmp(shard, expected, sizeof expected), 0);
    cr_expect_eq(shards, 5);
    cr_assert_ok(ari_st_shard_plan(shard, &shards, t, 8, SIZE_MAX));
    cr_expect_eq(shards, 1);
    cr_assert_ok(ari_st_shard_plan(shard, &shards, t, 0, 8));
    cr_expect_eq(shards, 1);
    cr_expect_eq(ari_st_shard_plan(shard, &shards, t, 8, 0), AR_ERR_ARG);
    cr_assert_ok(ari_st_shard_plan(shard, &shards, t + 3, 2, 8)); /* 9 bytes first: no empty file before it */
    cr_expect(shard[0] == 0 && shard[1] == 1 && shards == 2);
}

Test(safetensors_stream, shards_and_their_index_are_read_back)
{
    static const char *const meta[] = {"format", "pt"};
    char name[AR_ST_SHARD_NAME];
    size_t shard[3], shards = 0;
    cr_assert_ok(ari_st_shard_plan(shard, &shards, three, 3, 12));
    cr_assert(shards == 2 && shard[1] == 0 && shard[2] == 1);
    cr_assert_ok(ari_st_write(in_folder(ari_st_shard_name(name, 0, shards)), three, 2, meta, 1));
    cr_assert_ok(ari_st_write(in_folder(ari_st_shard_name(name, 1, shards)), three + 2, 1, meta, 1));
    cr_assert_ok(ari_st_write_index(folder, three, 3, shard, shards));
    expect_text("model.safetensors.index.json", "{\n  \"metadata\": {\n    \"total_size\": 20\n  },\n"
                                                "  \"weight_map\": {\n"
                                                "    \"h\": \"model-00001-of-00002.safetensors\",\n"
                                                "    \"none\": \"model-00001-of-00002.safetensors\",\n"
                                                "    \"s\": \"model-00002-of-00002.safetensors\"\n  }\n}\n");
    OWNED(ari_st_model_close) ar_st_model *m = NULL;
    cr_assert_ok(ari_st_model_open(&m, folder));
    cr_expect_eq(ari_st_model_count(m), 3);
    cr_expect_eq(memcmp(ari_st_model_find(m, "h")->data, half, 12), 0);
    cr_expect_eq(memcmp(ari_st_model_find(m, "s")->data, single, 8), 0);
    cr_expect_str_eq(ari_st_shard_name(name, 0, 1), "model.safetensors");
}

Test(safetensors_stream, an_index_never_stands_behind_a_file_that_hides_it)
{
    const ar_st_tensor twice[3] = {three[0], three[2], three[0]};
    const size_t shard[3] = {0, 0, 1};
    cr_expect_eq(ari_st_write_index(folder, twice, 3, shard, 2), AR_ERR_ARG, "a name in two files");
    cr_assert_ok(ari_st_write(in_folder("model.safetensors"), three, 3, NULL, 0));
    cr_expect_refused(ari_st_write_index(folder, three, 3, shard, 2), AR_ERR_ARG, "write to another folder");
    cr_expect_eq(count_files(NULL), 1);
}
