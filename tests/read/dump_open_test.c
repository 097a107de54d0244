/* SPDX-License-Identifier: Apache-2.0 */
#include "read/folder.h"
#include "ref/io/safetensors_private.h"
#include "verify/read/dump_private.h"

TestSuite(dump_open, .init = folder_begin, .fini = folder_end);

static const size_t two[] = {2};
static const float low[] = {1, 2}, high[] = {3, 4};

Test(dump_open, a_file_is_its_tensors_by_name)
{
    const float x[] = {1, -2, 3, 4, 5, 6};
    const ar_st_tensor t[] = {{"z", AR_F32, 2, {2, 3}, x}, {"a", AR_F32, 0, {0}, x + 1}};
    const char *const metadata[] = {"model", "tiny"};
    OWNED(ar_dump_close) ar_dump *d = NULL;
    const char *path = in_folder("f.safetensors");
    cr_assert_ok(ari_st_write(path, t, 2, metadata, 1));
    cr_assert_ok(ar_dump_open(&d, path, NULL));
    cr_expect_eq(ar_dump_count(d), 2);
    cr_expect_str_eq(ar_dump_at(d, 0)->name, "a");
    cr_expect_str_eq(ar_dump_at(d, 1)->name, "z");
    cr_expect_null(ar_dump_at(d, 2));
    cr_expect_null(ar_dump_find(d, "b"));
    const ar_dump_tensor *z = ar_dump_find(d, "z");
    cr_expect_eq(z->count, 6);
    cr_expect_eq(z->order, SIZE_MAX);
    cr_expect_eq(memcmp(z->whole, x, sizeof x), 0);
    double y[2];
    cr_assert_ok(ari_dump_read_f64(z, 1, 2, y));
    cr_expect(y[0] == -2 && y[1] == 3);
    cr_expect_eq(ari_dump_read_f64(z, 5, 2, y), AR_ERR_ARG);
    cr_expect_eq(ari_dump_read_f64(z, SIZE_MAX, 2, y), AR_ERR_ARG);
    cr_expect_eq(ar_dump_ranks(d), 0);
    cr_expect_str_eq(ar_dump_path(d), path);
    cr_expect_str_eq(ar_dump_metadata(d, "model"), "tiny");
    cr_expect_null(ar_dump_metadata(d, "other"));
}

Test(dump_open, a_checkpoint_in_shards_is_one_dump)
{
    put_tensor("s1.safetensors", "a", 1, two, low, NULL, NULL);
    put_tensor("s2.safetensors", "b", 1, two, high, NULL, NULL);
    put_text("model.safetensors.index.json", "{\"weight_map\":{\"a\":\"s1.safetensors\",\"b\":\"s2.safetensors\"}}");
    const char *index = in_folder("model.safetensors.index.json");
    const char *const paths[] = {folder, index};
    for (int i = 0; i < 2; i++) {
        OWNED(ar_dump_close) ar_dump *d = NULL;
        cr_assert_ok(ar_dump_open(&d, paths[i], NULL));
        cr_expect_eq(ar_dump_count(d), 2);
        const ar_dump_tensor *b = ar_dump_find(d, "b");
        cr_expect_eq(memcmp(b->whole, high, sizeof high), 0);
        cr_expect_eq(b->part[0].rank, -1);
        cr_expect_not_null(strstr(b->part[0].file, "s2.safetensors"));
    }
    put_text("model.safetensors.index.json", "{\"weight_map\":{\"a\":\"s1.safetensors\",\"b\":\"../s2.safetensors\"}}");
    expect_error(AR_ERR_FORMAT, "InvalidIndex", "../s2.safetensors");
}

Test(dump_open, a_checkpoints_own_file_goes_before_others_of_the_folder)
{
    put_tensor("model.safetensors", "a", 1, two, low, NULL, NULL);
    put_tensor("grads.safetensors", "a", 1, two, high, NULL, NULL);
    OWNED(ar_dump_close) ar_dump *d = open_folder();
    cr_expect_eq(ar_dump_find(d, "a")->parts, 1);
    cr_expect_eq(memcmp(ar_dump_find(d, "a")->whole, low, sizeof low), 0);
}

Test(dump_open, files_of_other_names_are_read_one_after_the_other)
{
    put_tensor("x.safetensors", "a", 1, two, low, NULL, NULL);
    put_tensor("y.safetensors", "b", 1, two, high, NULL, NULL);
    put_tensor(".hidden.safetensors", "a", 1, two, high, NULL, NULL);
    put_text("note.txt", "nothing");
    OWNED(ar_dump_close) ar_dump *d = open_folder();
    cr_expect_eq(ar_dump_count(d), 2);
    cr_expect_eq(ar_dump_ranks(d), 0);
}

Test(dump_open, files_that_name_the_same_tensor_are_ranks_with_copies)
{
    put_tensor("x-rank2.safetensors", "a", 1, two, low, NULL, NULL);
    put_tensor("x-rank10.safetensors", "a", 1, two, high, NULL, NULL);
    OWNED(ar_dump_close) ar_dump *d = open_folder();
    const ar_dump_tensor *a = ar_dump_find(d, "a");
    cr_expect_eq(ar_dump_ranks(d), 2);
    cr_assert_eq(a->parts, 2);
    cr_expect_eq(a->part[0].rank, 2);
    cr_expect_eq(a->part[1].rank, 10);
    cr_expect(a->part[1].replica == 1 && a->part[1].replicas == 2);
    cr_expect_eq(memcmp(a->whole, low, sizeof low), 0);
    bool found = false;
    ar_dump_disagreement x;
    cr_assert_ok(ar_dump_replicas(a, &found, &x));
    cr_assert(found);
    cr_expect(x.ranks[0] == 2 && x.ranks[1] == 10 && x.index == 0 && x.elements == 2 && x.count == 2);
    cr_expect(x.value[0] == 1 && x.value[1] == 3);
}

Test(dump_open, parts_without_a_placement_are_not_guessed)
{
    const size_t one[] = {1};
    put_tensor("rank-0.safetensors", "a", 1, two, low, NULL, NULL);
    put_tensor("rank-1.safetensors", "a", 1, one, high, NULL, NULL);
    expect_error(AR_ERR_FORMAT, "InvalidPlacement: tensor 'a'", "a mapping that says so");
}

Test(dump_open, what_is_not_there_is_an_io_error)
{
    ar_dump *d = NULL;
    cr_expect_eq(ar_dump_open(&d, "/nonexistent/x.safetensors", NULL), AR_ERR_IO);
    cr_expect_eq(ar_dump_open(&d, "/nonexistent/x.npy", NULL), AR_ERR_IO);
    cr_expect_eq(ar_dump_open(&d, "/nonexistent/x.json", NULL), AR_ERR_IO);
    expect_error(AR_ERR_IO, folder, "without .safetensors or .npy files");
    put_text("rank-00000.safetensors.part", "half");
    expect_error(AR_ERR_IO, folder, "rank-00000.safetensors.part is of a run that still goes on, or was killed");
    cr_expect_eq(ar_dump_open(&d, NULL, NULL), AR_ERR_ARG);
    cr_expect_null(d);
}

Test(dump_open, a_file_of_a_rank_alone_is_what_it_holds)
{
    OWNED(ar_dump_close) ar_dump *d = NULL;
    const char *path = put_tensor("rank-1.safetensors", "a", 1, two, high, "{\"a\":{\"saved_offsets\":[2]}}",
                                  "{\"version\":1,\"rank\":1,\"world\":2,\"tensors\":{\"a\":{\"shape\":[4]}},"
                                  "\"order\":[\"a\"]}");
    cr_assert_ok(ar_dump_open(&d, path, NULL));
    cr_expect_eq(ar_dump_at(d, 0)->shape[0], 2);
    cr_expect_eq(ar_dump_at(d, 0)->order, 0);
    cr_expect_eq(ar_dump_ranks(d), 0);
}

Test(dump_open, elements_of_half_a_byte_are_only_had_as_a_whole)
{
    const unsigned char nibbles[] = {0x21, 0x43};
    const ar_st_tensor t = {"a", AR_F4, 1, {4}, nibbles};
    char out[4];
    OWNED(ar_dump_close) ar_dump *d = NULL;
    const char *path = in_folder("f.safetensors");
    cr_assert_ok(ari_st_write(path, &t, 1, NULL, 0));
    cr_assert_ok(ar_dump_open(&d, path, NULL));
    cr_expect_eq(memcmp(ar_dump_at(d, 0)->whole, nibbles, 2), 0);
    cr_expect_eq(ar_dump_read(ar_dump_at(d, 0), 0, 2, out), AR_ERR_DTYPE);
}
