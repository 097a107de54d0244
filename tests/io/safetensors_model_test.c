/* SPDX-License-Identifier: Apache-2.0 */
#include "io/st_bytes.h"
#include "ref/io/file.h"
#include "ref/io/safetensors_private.h"
#include "tests/support/folder.h"

TestSuite(safetensors_model, .init = folder_begin, .fini = folder_end);

static void put(const char *name, const void *bytes, size_t n)
{
    cr_assert_ok(ari_file_write(in_folder(name), bytes, n));
}

/* A shard with one-byte tensors, one for each letter of `names`. */
static void put_shard(const char *file, const char *names)
{
    char text[16][2] = {{0}};
    ar_st_tensor t[16];
    const size_t n = strlen(names);
    for (size_t i = 0; i < n; i++) {
        text[i][0] = names[i];
        t[i] = (ar_st_tensor){.name = text[i], .dtype = AR_U8, .ndim = 1, .shape = {1}, .data = &names[i]};
    }
    cr_assert_ok(ari_st_write(in_folder(file), t, n, NULL, 0));
}

static void put_index(const char *map)
{
    char text[1024];
    const int n = snprintf(text, sizeof text, "{\"metadata\":{\"total_size\":3},\"weight_map\":%s}", map);
    put("model.safetensors.index.json", text, (size_t)n);
}

static ar_status try_open(void)
{
    OWNED(ari_st_model_close) ar_st_model *m = NULL;
    const ar_status st = ari_st_model_open(&m, folder);
    cr_expect(st == AR_OK || m == NULL);
    return st;
}

Test(safetensors_model, a_folder_without_weights_gives_none)
{
    ar_st_model *m = (ar_st_model *)folder;
    cr_expect_ok(ari_st_model_open(&m, folder));
    cr_expect_null(m);
    cr_expect_eq(ari_st_model_open(&m, "/no/such/folder"), AR_ERR_IO);
    cr_expect_eq(ari_st_model_open(&m, "/dev/null"), AR_ERR_IO);
    cr_expect_eq(ari_st_model_open(&m, NULL), AR_ERR_IO);
    ari_st_model_close(NULL);
}

Test(safetensors_model, one_file_goes_before_an_index)
{
    OWNED(ari_st_model_close) ar_st_model *m = NULL;
    put_shard("model.safetensors", "ba");
    put_index("{\"x\":\"nowhere\"}");
    cr_assert_ok(ari_st_model_open(&m, folder));
    cr_expect_eq(ari_st_model_count(m), 2);
    cr_expect_eq(*(const char *)ari_st_model_find(m, "b")->data, 'b');
    cr_expect_null(ari_st_model_find(m, "x"));
    cr_expect_null(ari_st_model_at(m, 2));
}

Test(safetensors_model, shards_are_one_collection)
{
    OWNED(ari_st_model_close) ar_st_model *m = NULL;
    put_shard("s1", "ac");
    put_shard("s2", "b");
    put_index("{\"c\":\"s1\",\"b\":\"s2\",\"a\":\"s1\"}");
    cr_assert_ok(ari_st_model_open(&m, folder));
    cr_assert_eq(ari_st_model_count(m), 3);
    for (size_t i = 0; i < 3; i++) {
        const char name[2] = {(char)('a' + i), 0};
        cr_expect_str_eq(ari_st_model_at(m, i)->name, name);
        cr_expect_eq(*(const char *)ari_st_model_find(m, name)->data, name[0]);
    }
    cr_expect_null(ari_st_model_at(m, 3));
    cr_expect_null(ari_st_model_find(m, "d"));
}

Test(safetensors_model, an_index_that_contradicts_its_shards_is_refused)
{
    static const struct {
        const char *map, *rule;
    } cases[] = {{"{\"a\":\"s1\",\"c\":\"s1\",\"b\":\"s2\",\"d\":\"s2\"}", "TensorNotFound"},
                 {"{\"a\":\"s2\",\"c\":\"s1\",\"b\":\"s2\"}", "TensorNotFound"},
                 {"{\"a\":\"s1\",\"b\":\"s2\"}", "InvalidIndex"},
                 {"{\"a\":\"s1\",\"c\":\"../s1\",\"b\":\"s2\"}", "InvalidIndex"},
                 {"{\"a\":\"s1\",\"c\":\"/s1\",\"b\":\"s2\"}", "InvalidIndex"},
                 {"{\"a\":\"s1\",\"c\":\"..\",\"b\":\"s2\"}", "InvalidIndex"},
                 {"{\"a\":\"s1\",\"c\":\".\",\"b\":\"s2\"}", "InvalidIndex"},
                 {"{\"a\":\"s1\",\"c\":\"\",\"b\":\"s2\"}", "InvalidIndex"},
                 {"{\"a\":\"s1\",\"c\":1,\"b\":\"s2\"}", "InvalidIndex"},
                 {"[]", "InvalidIndex"},
                 {"null", "InvalidIndex"}};
    put_shard("s1", "ac");
    put_shard("s2", "b");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        put_index(cases[i].map);
        cr_expect_eq(try_open(), AR_ERR_FORMAT, "%s", cases[i].map);
        cr_expect(names_rule(cases[i].rule), "%s: %s", cases[i].map, ar_error_message());
    }
    put_shard("s2", "bc");
    put_index("{\"a\":\"s1\",\"c\":\"s1\",\"b\":\"s2\"}");
    cr_expect_eq(try_open(), AR_ERR_FORMAT);
    cr_expect(names_rule("InvalidIndex") && strstr(ar_error_message(), "also found in 's2'"), "%s", ar_error_message());
}

Test(safetensors_model, a_damaged_index_or_shard_is_refused)
{
    put("model.safetensors.index.json", "[]", 2);
    cr_expect_eq(try_open(), AR_ERR_FORMAT);
    put("model.safetensors.index.json", "{", 1);
    cr_expect_eq(try_open(), AR_ERR_FORMAT);
    put("model.safetensors.index.json", "{\"weight_map\":{\"a\":\"s1\",\"a\":\"s1\"}}", 35);
    cr_expect_eq(try_open(), AR_ERR_FORMAT); /* a repeated name */
    put_index("{\"a\":\"s1\"}");
    cr_expect_eq(try_open(), AR_ERR_IO); /* no such shard */
    cr_expect_says("s1");
    put("s1", "not a header", 12);
    cr_expect_eq(try_open(), AR_ERR_FORMAT);
    cr_assert_eq(symlink("nowhere", in_folder("model.safetensors")), 0);
    cr_expect_eq(try_open(), AR_ERR_IO); /* a dangling link is not an absence */
}

/* The names that the three models' documentation promises. */
Test(safetensors_model, golden_models_have_the_expected_names)
{
    static const struct {
        const char *model, *present, *absent;
        size_t count, rows, columns;
    } cases[] = {
        {"gpt2-tiny", "transformer.h.1.attn.c_attn.weight", "lm_head.weight", 28, 64, 192},
        {"llama-gqa-tiny", "model.layers.1.self_attn.k_proj.weight", "model.layers.2.mlp.up_proj.weight", 21, 16, 64},
        {"llama-mqa-tied-tiny", "model.layers.0.self_attn.v_proj.weight", "lm_head.weight", 20, 12, 48}};
    for (size_t i = 0; i < 3; i++) {
        char path[512];
        OWNED(ari_st_model_close) ar_st_model *m = NULL;
        snprintf(path, sizeof path, "%s/%s", TEST_GOLDEN_DIR, cases[i].model);
        cr_assert_ok(ari_st_model_open(&m, path));
        cr_expect_eq(ari_st_model_count(m), cases[i].count);
        const ar_st_entry *e = ari_st_model_find(m, cases[i].present);
        cr_assert_not_null(e, "%s", cases[i].present);
        cr_expect(e->dtype == AR_F32 && e->ndim == 2 && e->shape[0] == cases[i].rows &&
                  e->shape[1] == cases[i].columns);
        cr_expect_null(ari_st_model_find(m, cases[i].absent));
    }
}
