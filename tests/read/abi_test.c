/* SPDX-License-Identifier: Apache-2.0 */
/* What other languages load: the same as anyrank/dump.h, in plain types and text. */
#include <jansson.h>

#include "anyrank/abi.h"
#include "read/folder.h"
#include "ref/io/safetensors_private.h"

OWNER(ar_abi_dump, ar_abi_dump_close)

TestSuite(abi, .init = folder_begin, .fini = folder_end);

static const size_t two_by_two[] = {2, 2};

/* Rank 0 and 1 hold rows of "w", and copies of "norm" that differ in one element. */
static ar_abi_dump *two_ranks(void)
{
    static const char *const place[] = {
        "{\"version\":1,\"rank\":0,\"world\":2,\"mesh\":[[\"tp\",2]],\"at\":[0],\"order\":[\"w\",\"norm\"],\"tensors\":"
        "{\"w\":{\"shape\":[4,2]},\"norm\":{\"replica\":0,\"replicas\":2}}}",
        "{\"version\":1,\"rank\":1,\"world\":2,\"mesh\":[[\"tp\",2]],\"at\":[1],\"order\":[\"w\",\"norm\"],\"tensors\":"
        "{\"w\":{\"shape\":[4,2]},\"norm\":{\"replica\":1,\"replicas\":2}}}"};
    static const char *const dcp[] = {"{\"w\":{\"saved_offsets\":[0,0]}}", "{\"w\":{\"saved_offsets\":[2,0]}}"};
    static const float w[2][4] = {{1, 2, 3, 4}, {5, 6, 7, 8}};
    static const float norm[2][2] = {{1, 1}, {1, 3}};
    for (int r = 0; r < 2; r++) {
        char path[128];
        snprintf(path, sizeof path, "%s/rank-0000%d.safetensors", folder, r);
        const ar_st_tensor t[] = {{"w", AR_F32, 2, {2, 2}, w[r]}, {"norm", AR_F32, 1, {2}, norm[r]}};
        const char *const metadata[] = {"DCP_SHARDING_INFO", dcp[r], "ANYRANK_PLACEMENT", place[r], "model", "tiny"};
        cr_assert_ok(ari_st_write(path, t, 2, metadata, 3));
    }
    ar_abi_dump *d = NULL;
    cr_assert_eq(ar_abi_dump_open(&d, folder, NULL), AR_OK, "%s", ar_abi_error());
    return d;
}

static void expect_json(char *text, const char *expected)
{
    cr_assert_not_null(text);
    json_t *got = json_loads(text, JSON_DECODE_ANY, NULL), *want = json_loads(expected, JSON_DECODE_ANY, NULL);
    cr_assert_not_null(want);
    cr_expect(json_equal(got, want), "%s\nexpected %s", text, expected);
    json_decref(got);
    json_decref(want);
    ar_abi_free(text);
}

Test(abi, a_dump_of_ranks_is_read_as_full_tensors)
{
    OWNED(ar_abi_dump_close) ar_abi_dump *d = two_ranks();
    cr_assert_eq(ar_abi_dump_count(d), 2);
    cr_expect_str_eq(ar_abi_tensor_name(ar_abi_dump_at(d, 0)), "norm");
    cr_expect_null(ar_abi_dump_at(d, 2));
    cr_expect_null(ar_abi_dump_find(d, "v"));
    const ar_abi_tensor *w = ar_abi_dump_find(d, "w");
    cr_expect_eq(w, ar_abi_dump_at(d, 1));
    cr_expect_lt(ar_abi_tensor_order(w), ar_abi_tensor_order(ar_abi_dump_at(d, 0)));
    float x[8];
    cr_expect_eq(ar_abi_tensor_bytes(w), sizeof x);
    cr_assert_eq(ar_abi_tensor_read(w, x, sizeof x), AR_OK, "%s", ar_abi_error());
    for (int i = 0; i < 8; i++)
        cr_expect_eq(x[i], (float)(i + 1));
    cr_expect_str_eq(ar_abi_dump_metadata(d, "model"), "tiny");
    cr_expect_null(ar_abi_dump_metadata(d, "other"));
}

Test(abi, what_a_dump_holds_is_described_as_json)
{
    OWNED(ar_abi_dump_close) ar_abi_dump *d = two_ranks();
    char expected[512];
    snprintf(expected, sizeof expected, "{\"path\":\"%s\",\"tensors\":2,\"ranks\":2,\"mesh\":[[\"tp\",2]]}", folder);
    expect_json(ar_abi_dump_json(d), expected);
    snprintf(expected, sizeof expected,
             "{\"name\":\"w\",\"dtype\":\"F32\",\"shape\":[4,2],\"parts\":["
             "{\"rank\":0,\"file\":\"%s/rank-00000.safetensors\",\"replica\":0,\"replicas\":1,\"partial\":false,"
             "\"boxes\":[{\"global\":[0,0],\"extent\":[2,2]}]},"
             "{\"rank\":1,\"file\":\"%s/rank-00001.safetensors\",\"replica\":0,\"replicas\":1,\"partial\":false,"
             "\"boxes\":[{\"global\":[2,0],\"extent\":[2,2]}]}]}",
             folder, folder);
    expect_json(ar_abi_tensor_json(ar_abi_dump_find(d, "w")), expected);
}

Test(abi, copies_that_differ_are_told_with_ranks_and_values)
{
    OWNED(ar_abi_dump_close) ar_abi_dump *d = two_ranks();
    char *text = NULL;
    cr_assert_eq(ar_abi_tensor_replicas(ar_abi_dump_find(d, "w"), &text), AR_OK, "%s", ar_abi_error());
    expect_json(text, "null");
    cr_assert_eq(ar_abi_tensor_replicas(ar_abi_dump_find(d, "norm"), &text), AR_OK, "%s", ar_abi_error());
    expect_json(text, "{\"ranks\":[0,1],\"index\":1,\"elements\":1,\"count\":2,\"values\":[1.0,3.0]}");
}

Test(abi, an_error_is_a_status_and_a_message)
{
    ar_abi_dump *d = NULL;
    const char *path = in_folder("none");
    cr_expect_eq(ar_abi_dump_open(&d, path, NULL), AR_ERR_IO);
    cr_expect_null(d);
    cr_expect_not_null(strstr(ar_abi_error(), path), "%s", ar_abi_error());
    cr_expect_eq(ar_abi_dump_open(&d, NULL, NULL), AR_ERR_ARG);
    cr_expect_eq(ar_abi_dump_open(NULL, path, NULL), AR_ERR_ARG);
    put_tensor("f.safetensors", "a", 2, two_by_two, (const float[]){1, 2, 3, 4}, NULL, NULL);
    path = in_folder("f.safetensors");
    cr_assert_eq(ar_abi_dump_open(&d, path, NULL), AR_OK, "%s", ar_abi_error());
    float x[4] = {0};
    cr_expect_eq(ar_abi_tensor_read(ar_abi_dump_find(d, "a"), x, 12), AR_ERR_ARG);
    cr_expect_not_null(strstr(ar_abi_error(), "room for 12 bytes, expected 16"), "%s", ar_abi_error());
    cr_expect_eq(ar_abi_tensor_read(ar_abi_dump_find(d, "a"), NULL, 16), AR_ERR_ARG);
    cr_expect_eq(ar_abi_tensor_read_part(ar_abi_dump_find(d, "a"), 1, x, 4), AR_ERR_ARG);
    cr_expect_eq(ar_abi_tensor_read_part(ar_abi_dump_find(d, "a"), 0, x, 3), AR_ERR_ARG);
    cr_expect_not_null(strstr(ar_abi_error(), "room for 3 elements of part 0, expected 4"), "%s", ar_abi_error());
    ar_abi_dump_close(d);
    path = in_folder("no-map.json");
    cr_expect_eq(ar_abi_dump_open(&d, folder, path), AR_ERR_IO);
    ar_abi_dump_close(NULL);
}

Test(abi, elements_of_less_than_a_byte_are_refused)
{
    const char *path = in_folder("f.safetensors");
    const ar_st_tensor t[] = {{"a", AR_F4, 1, {4}, "\x12\x34"}, {"b", AR_F32, 2, {2, 0}, ""}};
    cr_assert_ok(ari_st_write(path, t, 2, NULL, 0));
    OWNED(ar_abi_dump_close) ar_abi_dump *d = NULL;
    cr_assert_eq(ar_abi_dump_open(&d, path, NULL), AR_OK, "%s", ar_abi_error());
    char x[2];
    cr_expect_eq(ar_abi_tensor_read(ar_abi_dump_find(d, "a"), x, 0), AR_ERR_DTYPE);
    cr_expect_eq(ar_abi_tensor_read(ar_abi_dump_find(d, "b"), NULL, 0), AR_OK, "%s", ar_abi_error());
}

Test(abi, number_and_version_are_those_of_the_header_and_the_project)
{
    cr_expect_eq(ar_abi_number(), AR_ABI_NUMBER);
    cr_expect_not_null(strchr(ar_abi_version(), '.'));
}
