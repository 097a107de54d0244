/* SPDX-License-Identifier: Apache-2.0 */
#include "read/folder.h"
#include "ref/io/safetensors_private.h"
#include "verify/read/dump_private.h"

TestSuite(dump_parts, .init = folder_begin, .fini = folder_end);

static const size_t two_by_two[] = {2, 2};
static const float low[] = {1, 2, 3, 4}, high[] = {5, 6, 7, 8};

/* A file of tensor "a" [2,2], whose place PyTorch's text says. */
static void put_at(const char *file, size_t row, size_t column, const float *data)
{
    char dcp[96];
    snprintf(dcp, sizeof dcp, "{\"a\":{\"saved_offsets\":[%zu,%zu]}}", row, column);
    put_tensor(file, "a", 2, two_by_two, data, dcp, NULL);
}

/* The same by our own text: rank of 2, and what is said of the tensor. */
static void put_rank(int rank, const float *data, const char *tensor)
{
    char own[512], file[32];
    snprintf(file, sizeof file, "r%d.safetensors", rank);
    snprintf(own, sizeof own,
             "{\"version\":1,\"rank\":%d,\"world\":2,\"mesh\":[[\"tp\",2]],\"at\":[%d],\"tensors\":{\"a\":%s}}", rank,
             rank, tensor);
    put_tensor(file, "a", 2, two_by_two, data, NULL, own);
}

static void expect_values(const float *expected, size_t n)
{
    OWNED(ar_dump_close) ar_dump *d = open_folder();
    float x[64];
    const ar_dump_tensor *a = ar_dump_find(d, "a");
    cr_assert_eq(a->count, n);
    cr_assert_ok(ar_dump_read_f32(a, 0, n, x));
    cr_expect_eq(memcmp(x, expected, n * sizeof *x), 0);
    for (size_t i = 0; i < n; i++) { /* one by one too */
        float raw = 0;
        cr_assert_ok(ar_dump_read(a, i, 1, &raw));
        cr_expect_eq(raw, expected[i], "element %zu", i);
    }
}

/* What copies of the folder's tensor are told to differ in, as they do. */
static ar_dump_disagreement disagreement(void)
{
    OWNED(ar_dump_close) ar_dump *d = open_folder();
    bool found = false;
    ar_dump_disagreement x;
    cr_assert_ok(ar_dump_replicas(ar_dump_at(d, 0), &found, &x));
    cr_assert(found);
    return x;
}

Test(dump_parts, shards_of_rows_are_put_one_below_the_other)
{
    put_at("shard-00001-model-00001-of-00001.safetensors", 0, 0, low);
    put_at("shard-00002-model-00001-of-00001.safetensors", 2, 0, high);
    expect_values((const float[]){1, 2, 3, 4, 5, 6, 7, 8}, 8);
    OWNED(ar_dump_close) ar_dump *d = open_folder();
    cr_expect_eq(ar_dump_at(d, 0)->part[1].rank, 1);
}

Test(dump_parts, shards_of_columns_are_put_side_by_side)
{
    put_at("rank-0.safetensors", 0, 0, low);
    put_at("rank-1.safetensors", 0, 2, high);
    expect_values((const float[]){1, 2, 5, 6, 3, 4, 7, 8}, 8);
}

Test(dump_parts, copies_that_say_so_are_one_tensor)
{
    put_rank(0, low, "{\"replica\":0,\"replicas\":2}");
    put_rank(1, low, "{\"replica\":1,\"replicas\":2}");
    expect_values(low, 4);
}

Test(dump_parts, the_first_copy_is_the_one_with_number_0)
{
    put_rank(0, low, "{\"replica\":1,\"replicas\":2}");
    put_rank(1, high, "{\"replica\":0,\"replicas\":2}");
    expect_values(high, 4);
}

Test(dump_parts, summands_are_added_and_rounded_once)
{
    const float big[] = {16777216, 1, -0.0f, 1}, one[] = {1, 2, -0.0f, -1};
    put_rank(0, big, "{\"partial\":\"tp\"}");
    put_rank(1, one, "{\"partial\":[\"tp\"]}");
    expect_values((const float[]){16777216, 3, -0.0f, 0}, 4);
}

/* dp 2, tp 2: two copies of two summands. */
Test(dump_parts, copies_of_summands_are_not_added_and_are_compared_with_their_like)
{
    for (int r = 0; r < 4; r++) {
        char own[256], file[32];
        const float x[] = {(float)(r % 2 + 1), 1, 1, r == 3 ? 5 : 1};
        snprintf(file, sizeof file, "r%d.safetensors", r);
        snprintf(own, sizeof own,
                 "{\"version\":1,\"rank\":%d,\"mesh\":[[\"dp\",2],[\"tp\",2]],\"at\":[%d,%d],\"tensors\":{\"a\":"
                 "{\"partial\":\"tp\"}}}",
                 r, r / 2, r % 2);
        put_tensor(file, "a", 2, two_by_two, x, NULL, own);
    }
    expect_values((const float[]){3, 2, 2, 2}, 4);
    const ar_dump_disagreement x = disagreement();
    cr_expect(x.ranks[0] == 1 && x.ranks[1] == 3 && x.index == 3 && x.elements == 1 && x.value[1] == 5);
}

Test(dump_parts, copies_of_elements_of_half_a_byte_are_compared)
{
    static const unsigned char nibbles[2][2] = {{0x21, 0x43}, {0x21, 0x53}};
    for (int r = 0; r < 2; r++) {
        char own[256], path[256];
        const ar_st_tensor t = {"a", AR_F4, 1, {4}, nibbles[r]};
        snprintf(own, sizeof own,
                 "{\"version\":1,\"rank\":%d,\"world\":2,\"mesh\":[[\"tp\",2]],\"at\":[%d],\"tensors\":{\"a\":"
                 "{\"replica\":%d,\"replicas\":2}}}",
                 r, r, r);
        snprintf(path, sizeof path, "%s/r%d.safetensors", folder, r);
        cr_assert_ok(ari_st_write(path, &t, 1, (const char *[]){"ANYRANK_PLACEMENT", own}, 1));
    }
    const ar_dump_disagreement x = disagreement();
    cr_expect(x.ranks[1] == 1 && x.index == 3 && x.elements == 1 && x.count == 4 && isnan(x.value[0]));
}

Test(dump_parts, packed_boxes_go_to_their_blocks)
{
    put_rank(0, low,
             "{\"shape\":[4,2],\"boxes\":[{\"global\":[0,0],\"local\":[0,0],\"extent\":[1,2]},"
             "{\"global\":[2,0],\"local\":[1,0],\"extent\":[1,2]}]}");
    put_rank(1, high,
             "{\"shape\":[4,2],\"boxes\":[{\"global\":[1,0],\"local\":[0,0],\"extent\":[1,2]},"
             "{\"global\":[3,0],\"local\":[1,0],\"extent\":[1,2]}]}");
    expect_values((const float[]){1, 2, 5, 6, 3, 4, 7, 8}, 8);
    OWNED(ar_dump_close) ar_dump *d = open_folder();
    float part[4];
    cr_assert_ok(ari_dump_part_f32(ar_dump_at(d, 0), &ar_dump_at(d, 0)->part[1], part));
    cr_expect_eq(memcmp(part, high, sizeof part), 0);
}

/* Heads of k that two ranks share, while each has a q of its own. */
Test(dump_parts, a_box_may_have_copies_where_others_of_its_part_have_none)
{
    put_rank(0, low,
             "{\"shape\":[3,2],\"boxes\":[{\"global\":[0,0],\"local\":[0,0],\"extent\":[1,2]},"
             "{\"global\":[2,0],\"local\":[1,0],\"extent\":[1,2]}]}");
    put_rank(1, high,
             "{\"shape\":[3,2],\"boxes\":[{\"global\":[1,0],\"local\":[0,0],\"extent\":[1,2]},"
             "{\"global\":[2,0],\"local\":[1,0],\"extent\":[1,2]}]}");
    expect_values((const float[]){1, 2, 5, 6, 3, 4}, 6);
    const ar_dump_disagreement x = disagreement();
    cr_expect(x.index == 4 && x.elements == 2 && x.count == 2 && x.value[0] == 3 && x.value[1] == 7);
}

/* Rank 1 has both halves of the columns, rank 0 the left and rank 2 the right one. */
Test(dump_parts, copies_that_lie_differently_in_their_files_are_compared)
{
    const float wide[] = {1, 2, 5, 6, 3, 4, 7, 9};
    const size_t two_by_four[] = {2, 4};
    put_at("rank-0.safetensors", 0, 0, low);
    put_at("rank-2.safetensors", 0, 2, high);
    put_tensor("rank-1.safetensors", "a", 2, two_by_four, wide, NULL,
               "{\"version\":1,\"tensors\":{\"a\":{\"shape\":[2,4],\"boxes\":[{\"global\":[0,0],\"local\":[0,0],"
               "\"extent\":[2,2]},{\"global\":[0,2],\"local\":[0,2],\"extent\":[2,2]}]}}}");
    const ar_dump_disagreement x = disagreement();
    cr_expect(x.ranks[0] == 1 && x.ranks[1] == 2 && x.index == 7 && x.elements == 1 && x.count == 4);
    cr_expect(x.value[0] == 9 && x.value[1] == 8);
}

/* The same of rows: what is one run in one file is two in the other. */
Test(dump_parts, copies_of_other_runs_are_compared)
{
    const float wide[] = {1, 2, 5, 6, 3, 4, 7, 9};
    const size_t two_by_four[] = {2, 4};
    put_at("rank-0.safetensors", 0, 0, low);
    put_at("rank-2.safetensors", 2, 0, high);
    put_tensor("rank-1.safetensors", "a", 2, two_by_four, wide, NULL,
               "{\"version\":1,\"tensors\":{\"a\":{\"shape\":[4,2],\"boxes\":[{\"global\":[0,0],\"local\":[0,0],"
               "\"extent\":[2,2]},{\"global\":[2,0],\"local\":[0,2],\"extent\":[2,2]}]}}}");
    const ar_dump_disagreement x = disagreement();
    cr_expect(x.ranks[0] == 1 && x.ranks[1] == 2 && x.index == 7 && x.elements == 1);
}

Test(dump_parts, packed_boxes_that_make_the_whole_are_one)
{
    put_tensor("r0.safetensors", "a", 2, two_by_two, low, NULL,
               "{\"version\":1,\"rank\":0,\"tensors\":{\"a\":{\"boxes\":[{\"global\":[0,0],\"local\":[0,0],\"extent\":"
               "[1,2]},{\"global\":[1,0],\"local\":[1,0],\"extent\":[1,2]}]}}}");
    OWNED(ar_dump_close) ar_dump *d = open_folder();
    cr_expect_not_null(ar_dump_at(d, 0)->whole);
}

/* Two ranks with two samples each, of 2 positions and of 1. */
static void put_samples(const char *name)
{
    static const size_t shapes[][2] = {{2, 2}, {2, 1}};
    for (size_t rank = 0; rank < 2; rank++) {
        char file[32], placement[256];
        snprintf(file, sizeof file, "rank-%zu.safetensors", rank);
        snprintf(placement, sizeof placement,
                 "{\"version\":1,\"rank\":%zu,\"tensors\":{\"%s\":{\"shape\":[4,%zu],\"boxes\":[{\"global\":[%zu,0],"
                 "\"local\":[0,0],\"extent\":[2,%zu]}]}}}",
                 rank, name, 2 - rank, 2 * rank, 2 - rank);
        put_tensor(file, name, 2, shapes[rank], low, NULL, placement);
    }
}

Test(dump_parts, samples_that_ranks_pad_to_their_own_lengths_are_no_tensor)
{
    char text[160];
    put_samples("x:fwd@2");
    OWNED(ar_dump_close) ar_dump *d = open_folder();
    cr_expect_eq(ar_dump_count(d), 0u);
    cr_expect(ari_dump_is_ragged(d, "x:fwd@2", text));
    cr_expect_str_eq(text, "[4,2] on rank 0, [4,1] on rank 1: each pads to its own longest sample");
    cr_expect_not(ari_dump_is_ragged(d, "x:fwd", text));
}

Test(dump_parts, weights_have_one_length)
{
    put_samples("x:grad");
    expect_error(AR_ERR_FORMAT, "InvalidPlacement: tensor 'x:grad'", "[4,1]");
}

Test(dump_parts, dtypes_agree)
{
    const double d[] = {1, 2, 3, 4};
    const ar_st_tensor t = {"a", AR_F64, 2, {2, 2}, d};
    put_at("rank-0.safetensors", 0, 0, low);
    const char *path = in_folder("rank-1.safetensors");
    cr_assert_ok(ari_st_write(path, &t, 1, NULL, 0));
    expect_error(AR_ERR_FORMAT, "InvalidPlacement: tensor 'a'", "F64");
}

Test(dump_parts, execution_orders_of_ranks_become_one)
{
    const float x = 0;
    static const char *const names[] = {"a", "b", "c"};
    ar_st_tensor t[3];
    for (int i = 0; i < 3; i++)
        t[i] = (ar_st_tensor){names[i], AR_F32, 0, {0}, &x};
    const char *const first[] = {"ANYRANK_PLACEMENT", "{\"version\":1,\"rank\":0,\"order\":[\"c\",\"a\",\"gone\"]}"};
    const char *const second[] = {"ANYRANK_PLACEMENT", "{\"version\":1,\"rank\":1,\"order\":[\"c\",\"b\",\"a\"]}"};
    const char *path = in_folder("0.safetensors");
    cr_assert_ok(ari_st_write(path, t, 3, first, 1));
    path = in_folder("1.safetensors");
    cr_assert_ok(ari_st_write(path, t, 3, second, 1));
    OWNED(ar_dump_close) ar_dump *d = open_folder();
    cr_expect_eq(ar_dump_find(d, "c")->order, 0);
    cr_expect_eq(ar_dump_find(d, "b")->order, 1);
    cr_expect_eq(ar_dump_find(d, "a")->order, 2);
    cr_expect_null(ar_dump_metadata(d, "ANYRANK_PLACEMENT"));
}

#define AT(offsets) "{\"a\":{\"saved_offsets\":[" offsets "]}}"
#define OWN(rest) "{\"version\":1," rest "}"
#define RANK(r, tensor) \
    OWN("\"rank\":" #r ",\"world\":2,\"mesh\":[[\"tp\",2]],\"at\":[" #r "],\"tensors\":{\"a\":{" tensor "}}")
#define COPY(r, k, n) RANK(r, "\"replica\":" #k ",\"replicas\":" #n)
#define SUMMAND(r) RANK(r, "\"partial\":\"tp\"")
#define WORLD(r, n) OWN("\"rank\":" #r ",\"world\":" #n)
#define MESH(r, name) OWN("\"rank\":" #r ",\"mesh\":[[\"" name "\",2]]")
#define STAGE(r, place) OWN("\"rank\":" #r ",\"mesh\":[[\"pp\",2]],\"at\":[" #place "]")

/* What two files say of tensors [2,2], whose second is "b" if it says at which stage it is, and the error of it. */
static const char *const refused[][4] = {
    /* gaps */
    {AT("0,0"), AT("4,0"), "MissingShard: ", "tensor 'a': no rank holds [2:4, 0:2]"},
    {RANK(0, "\"shape\":[4,2],\"boxes\":[{\"global\":[0,0],\"local\":[0,0],\"extent\":[2,2]}]"), NULL,
     "MissingShard: ", "no rank holds [2:4, 0:2]; no file of rank 1"},
    {OWN("\"rank\":1,\"world\":2147483647,\"tensors\":{\"a\":{\"shape\":[4,2]}}"), NULL,
     "MissingShard: ", "no rank holds [2:4, 0:2]; no file of rank 0, 2, 3, 4 and 2147483642 more"},
    {AT("268435456,268435456"), AT("0,0"), "MissingShard: ", "no rank holds [2:268435456, 0:268435458]"},
    {AT("9223372036854775807,9223372036854775807"), AT("0,0"), "InvalidPlacement: ", "too many elements"},
    /* overlaps, and copies */
    {AT("0,0"), AT("1,0"),
     "OverlappingShards: ", "tensor 'a': rank 0 and rank 1 both hold [1:2, 0:2], in boxes that are not the same"},
    {OWN("\"rank\":3"), OWN("\"rank\":3"),
     "OverlappingShards: ", "rank 3 and rank 3 both hold [0:2, 0:2], in two files"},
    {COPY(0, 0, 2), COPY(1, 0, 2), "OverlappingShards: ", "rank 0 and rank 1 both hold [0:2, 0:2], as the same copy"},
    {COPY(0, 0, 1), COPY(1, 0, 1), "OverlappingShards: ", "each as the only one"},
    {COPY(0, 0, 1), COPY(1, 0, 2), "InvalidPlacement: ", "rank 0 tells of 1 copies, rank 1 of 2"},
    {COPY(0, 0, 3), COPY(1, 2, 3), "MissingShard: ", "copy 1 of 3 of [0:2, 0:2] is in no file"},
    {COPY(0, 0, 3), COPY(1, 1, 3), "MissingShard: ", "copy 2 of 3 of [0:2, 0:2] is in no file"},
    /* summands */
    {SUMMAND(0), RANK(1, ""), "InvalidPlacement: ", "rank 0 says that it is to be summed, rank 1 does not"},
    {SUMMAND(0), NULL, "MissingShard: ", "1 ranks hold summands of [0:2, 0:2], expected 2"},
    /* the world and the mesh */
    {WORLD(0, 2), WORLD(1, 3), "InvalidPlacement: ", "tell of different numbers of ranks"},
    {MESH(0, "tp"), MESH(1, "dp"), "InvalidPlacement: ", "tell of different meshes"},
    {OWN("\"rank\":4"), OWN("\"world\":3"), "InvalidPlacement: ", "a file of rank 4 in a world of 3"},
    {STAGE(0, 1), STAGE(1, 1), "InvalidPlacement: ", "ranks 0 and 1 are at one place in the mesh"},
    {STAGE(0, 1), STAGE(0, 0), "InvalidPlacement: ", "tell of different places in the mesh for one rank"},
};

Test(dump_parts, what_does_not_fit_together_is_refused)
{
    static const char *const file[2][2] = {{"x.safetensors", "y.safetensors"},
                                           {"rank-0.safetensors", "rank-1.safetensors"}};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        for (int k = 0; k < 2 && refused[i][k] != NULL; k++) {
            const char *says = refused[i][k];
            const bool dcp = strncmp(says, "{\"a\"", 4) == 0;
            put_tensor(file[dcp][k], k == 1 && strstr(says, "\"pp\"") ? "b" : "a", 2, two_by_two, k == 0 ? low : high,
                       dcp ? says : NULL, dcp ? NULL : says);
        }
        const ar_status st = try_folder();
        cr_expect(st == AR_ERR_FORMAT && strncmp(ar_error_message(), refused[i][2], strlen(refused[i][2])) == 0 &&
                      error_says(refused[i][3]),
                  "%s and %s: expected %s.. %s: %s", refused[i][0], refused[i][1] ? refused[i][1] : "nothing",
                  refused[i][2], refused[i][3], ar_error_message());
        folder_end();
        folder_begin();
    }
}
