/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/dump.h"
#include "read/folder.h"
#include "ref/io/safetensors_private.h"

TestSuite(dump_map, .init = folder_begin, .fini = folder_end);

static ar_dump *open_mapped(const char *path, const char *map)
{
    ar_dump *d = NULL;
    put_text("map", map);
    const char *file = in_folder("map");
    cr_assert_ok(ar_dump_open(&d, path, &(ar_dump_options){.map = file}));
    return d;
}

static const size_t two_by_three[] = {2, 3};
static const float low[] = {0, 1, 2, 3, 4, 5}, high[] = {6, 7, 8, 9, 10, 11};

/* Parts that say their place, under other names. */
Test(dump_map, a_mapping_without_files_is_applied_to_full_tensors)
{
    put_tensor("rank-0.safetensors", "a", 2, two_by_three, low, "{\"a\":{\"saved_offsets\":[0,0]}}", NULL);
    put_tensor("rank-1.safetensors", "a", 2, two_by_three, high, "{\"a\":{\"saved_offsets\":[2,0]}}", NULL);
    OWNED(ar_dump_close)
    ar_dump *d = open_mapped(folder, "{\"version\":1,\"tensors\":[{\"match\":\"a\",\"rename\":\"b\"}]}");
    const ar_dump_tensor *b = ar_dump_find(d, "b");
    float x[12];
    cr_assert(b != NULL && b->shape[0] == 4 && b->shape[1] == 3 && b->parts == 2);
    cr_expect(b->part[1].rank == 1 && b->part[1].box[0].global[0] == 2);
    cr_assert_ok(ar_dump_read_f32(b, 0, 12, x));
    for (size_t i = 0; i < 12; i++)
        cr_expect_eq(x[i], (float)i, "element %zu", i);
}

/* Blocks of a full tensor [4,3] whose rows two ranks share: a target lies in one part, or across both. */
Test(dump_map, what_is_taken_out_of_a_full_tensor_comes_from_the_parts_that_hold_it)
{
    put_tensor("rank-0.safetensors", "a", 2, two_by_three, low, "{\"a\":{\"saved_offsets\":[0,0]}}", NULL);
    put_tensor("rank-1.safetensors", "a", 2, two_by_three, high, "{\"a\":{\"saved_offsets\":[2,0]}}", NULL);
    float x[12];
    ar_dump *d = open_mapped(folder, "{\"version\":1,\"tensors\":[{\"match\":\"a\",\"blocks\":[1,2,1],\"into\":[\"q\","
                                     "\"k\",null]}]}");
    const ar_dump_tensor *k = ar_dump_find(d, "k");
    cr_assert(k != NULL && k->shape[0] == 2 && k->shape[1] == 3 && !ar_dump_find(d, "v"));
    cr_assert_ok(ar_dump_read_f32(k, 0, 6, x));
    for (size_t i = 0; i < 6; i++)
        cr_expect_eq(x[i], (float)(3 + i), "element %zu", i);
    ar_dump_close(d);
    d = open_mapped(
        folder, "{\"version\":1,\"tensors\":[{\"match\":\"a\",\"blocks\":[1,2],\"dim\":1,\"into\":[\"q\",\"k\"]}]}");
    k = ar_dump_find(d, "k");
    cr_assert(k != NULL && k->shape[0] == 4 && k->shape[1] == 2);
    cr_assert_ok(ar_dump_read_f32(k, 0, 8, x));
    for (size_t i = 0; i < 8; i++)
        cr_expect_eq(x[i], (float)(i / 2 * 3 + 1 + i % 2), "element %zu", i);
    ar_dump_close(d);
}

/* Row i of a full tensor [12,1], in two ranks' halves of two blocks each, and a vector that every rank has. */
Test(dump_map, a_mapping_with_files_says_whose_they_are)
{
    for (int r = 0; r < 2; r++) {
        const float first = (float)(3 * r), x[] = {first, first + 1, first + 2, first + 6, first + 7, first + 8}, y = 1;
        const ar_st_tensor t[] = {{"p.w13", AR_F32, 2, {6, 1}, x}, {"p.norm", AR_F32, 1, {1}, &y}};
        char path[128];
        snprintf(path, sizeof path, "%s/part_%02d.safetensors", folder, r);
        cr_assert_ok(ari_st_write(path, t, 2, NULL, 0));
    }
    static const char map[] = "{\"version\":1,\"mesh\":[[\"tp\",2]],\"files\":\"part_{tp}.safetensors\",\"tensors\":[{"
                              "\"match\":\"*.w13\",\"shard\":{\"tp\":0},\"blocks\":[6,6]}]}";
    ar_dump *d = open_mapped(folder, map);
    const ar_dump_tensor *w = ar_dump_find(d, "p.w13");
    float x[12];
    cr_assert(w != NULL && w->count == 12);
    cr_assert_ok(ar_dump_read_f32(w, 0, 12, x));
    for (size_t i = 0; i < 12; i++)
        cr_expect_eq(x[i], (float)i);
    cr_expect_eq(ar_dump_find(d, "p.norm")->part[1].replica, 1);
    cr_expect_eq(ar_dump_ranks(d), 2);
    ar_dump_close(d);

    char path[128];
    snprintf(path, sizeof path, "%s/part_01.safetensors", folder);
    const char *file = in_folder("map");
    unlink(path);
    cr_expect_refused(ar_dump_open(&d, folder, &(ar_dump_options){.map = file}), AR_ERR_FORMAT, "MissingShard: ");
    cr_expect_not_null(strstr(ar_error_message(), "none of rank 1"), "%s", ar_error_message());
}

#define MAP(more) "{\"version\":1,\"mesh\":[[\"tp\",2]]," more "}"

static void rename_file(const char *from, const char *to)
{
    char a[128], b[128];
    snprintf(a, sizeof a, "%s/%s", folder, from);
    snprintf(b, sizeof b, "%s/%s", folder, to);
    cr_assert_eq(rename(a, b), 0);
}

/* Rows 0 and 1 of [4,3] on rank 0, rows 2 and 3 on rank 1. tensor: what each says of its own; rest: what it says of the
 * run; both NULL: nothing. */
static void put_halves(const char *tensor, const char *rest)
{
    for (int r = 0; r < 2; r++) {
        char name[32], text[256] = "";
        snprintf(name, sizeof name, "rank-%d.safetensors", r);
        if (rest != NULL)
            snprintf(text, sizeof text, "{\"version\":1,\"rank\":%d,%s}", r, rest);
        else if (tensor != NULL)
            snprintf(text, sizeof text,
                     "{\"version\":1,\"rank\":%d,\"mesh\":[[\"tp\",2]],\"at\":[%d],\"tensors\":{\"a\":{%s}}}", r, r,
                     tensor);
        put_tensor(name, "a", 2, two_by_three, r == 0 ? low : high, NULL, text[0] == '\0' ? NULL : text);
    }
}

static void expect_rows(ar_dump *d, const char *name)
{
    const ar_dump_tensor *t = ar_dump_find(d, name);
    float x[12];
    cr_assert(t != NULL && t->shape[0] == 4 && t->parts == 2, "%s", name);
    cr_assert_ok(ar_dump_read_f32(t, 0, 12, x));
    for (size_t i = 0; i < 12; i++)
        cr_expect_eq(x[i], (float)i, "%s: element %zu", name, i);
    ar_dump_close(d);
}

static void expect_refused(const char *map, const char *const *words, size_t n)
{
    ar_dump *d = NULL;
    put_text("map", map);
    const char *file = in_folder("map");
    ar_error_clear();
    cr_expect_eq(ar_dump_open(&d, folder, &(ar_dump_options){.map = file}), AR_ERR_FORMAT, "%s", map);
    for (size_t i = 0; i < n; i++)
        cr_expect(strstr(ar_error_message(), words[i]) != NULL, "expected '%s' in: %s", words[i], ar_error_message());
    cr_expect_null(d);
}
#define EXPECT_REFUSED(map, ...) \
    expect_refused(map, (const char *const[]){__VA_ARGS__}, sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *))

#define ROWS "\"tensors\":[{\"match\":\"a\",\"shard\":{\"tp\":0}}]"
#define COLUMNS "\"tensors\":[{\"match\":\"a\",\"shard\":{\"tp\":1}}]"

/* The files say whose they are, by their names or in words, and the mapping the rest. */
Test(dump_map, a_rule_adds_to_what_files_say)
{
    static const char *const owns[] = {NULL, "\"assumed\":true,\"replicas\":2", "\"assumed\":true,\"shape\":[2,3]"};
    for (size_t i = 0; i < sizeof owns / sizeof *owns; i++) {
        put_halves(owns[i], NULL);
        expect_rows(open_mapped(folder, MAP(ROWS)), "a");
        expect_rows(open_mapped(folder, MAP("\"files\":\"rank-{tp}.safetensors\"," ROWS)), "a");
    }
    put_halves("\"partial\":\"tp\"", NULL);
    OWNED(ar_dump_close)
    ar_dump *d = open_mapped(folder, MAP("\"tensors\":[{\"match\":\"a\",\"partial\":\"tp\",\"rename\":\"b\"}]"));
    float x = 0;
    cr_assert_ok(ar_dump_read_f32(ar_dump_find(d, "b"), 5, 1, &x));
    cr_expect_eq(x, 5.0f + 11.0f);
}

/* A placement that DCP_SHARDING_INFO and the rule both tell, alike; and a rule for the tensor's name alone. */
Test(dump_map, a_rule_that_says_the_same_is_accepted)
{
    put_tensor("rank-0.safetensors", "a", 2, two_by_three, low, "{\"a\":{\"saved_offsets\":[0,0]}}", NULL);
    put_tensor("rank-1.safetensors", "a", 2, two_by_three, high, "{\"a\":{\"saved_offsets\":[2,0]}}", NULL);
    expect_rows(open_mapped(folder, MAP(ROWS)), "a");
    expect_rows(open_mapped(folder, MAP("\"files\":\"rank-{tp}.safetensors\"," ROWS)), "a");
    expect_rows(open_mapped(folder, MAP("\"tensors\":[{\"match\":\"a\",\"rename\":\"b\"}]")), "b");
}

Test(dump_map, a_contradiction_names_both_sides)
{
    put_tensor("rank-0.safetensors", "a", 2, two_by_three, low, "{\"a\":{\"saved_offsets\":[0,0]}}", NULL);
    put_tensor("rank-1.safetensors", "a", 2, two_by_three, high, "{\"a\":{\"saved_offsets\":[2,0]}}", NULL);
    EXPECT_REFUSED(MAP(COLUMNS), "map: rule 1 ('a'): tensor 'a' of rank 0", "by the rule it is [0:2, 0:3] of [2,6]",
                   "/rank-0.safetensors itself [0:2, 0:3] of [4,3]");
    EXPECT_REFUSED(MAP("\"tensors\":[{\"match\":\"a\",\"partial\":\"tp\"}]"), "a summand of [0:2, 0:3] of [2,3]");
    put_halves("\"replicas\":2", NULL);
    EXPECT_REFUSED(MAP(ROWS), "[0:2, 0:3] of [4,3]", "itself [0:2, 0:3] of [2,3]");
    EXPECT_REFUSED("{\"version\":1,\"mesh\":[[\"dp\",2]],\"tensors\":[]}", "key 'mesh'", "rank-0.safetensors",
                   "another mesh");
    EXPECT_REFUSED("{\"version\":1,\"mesh\":[[\"tp\",4]],\"tensors\":[]}", "key 'mesh'", "another mesh");
    put_halves(NULL, "\"world\":3");
    EXPECT_REFUSED(MAP(ROWS), "key 'mesh': 2 ranks, but ", "says that there are 3");
    put_halves(NULL, "\"order\":[\"a\"]");
    rename_file("rank-0.safetensors", "other-1.safetensors");
    rename_file("rank-1.safetensors", "other-0.safetensors");
    EXPECT_REFUSED(MAP("\"files\":\"other-{tp}.safetensors\"," ROWS), "rank 0 by its name, rank 1 by what it says");
}

Test(dump_map, a_mapping_that_is_not_there_or_malformed_is_an_error)
{
    ar_dump *d = NULL;
    put_tensor("a.safetensors", "a", 2, two_by_three, low, NULL, NULL);
    cr_expect_eq(ar_dump_open(&d, folder, &(ar_dump_options){.map = "/nonexistent"}), AR_ERR_IO);
    put_text("map", "{}");
    const char *file = in_folder("map");
    cr_expect_eq(ar_dump_open(&d, folder, &(ar_dump_options){.map = file}), AR_ERR_FORMAT);
    cr_expect_eq(strncmp(ar_error_message(), "InvalidMapping: ", 16), 0, "%s", ar_error_message());
    cr_expect_null(d);
}
