/* SPDX-License-Identifier: Apache-2.0 */
#include <signal.h>
#include <sys/resource.h>

#include "io/st_bytes.h"
#include "ref/core/tensor_private.h"
#include "ref/io/file.h"
#include "ref/io/safetensors_private.h"
#include "tests/support/folder.h"

TestSuite(safetensors_write, .init = folder_begin, .fini = folder_end);

static unsigned char *slurp(const char *path, size_t *n)
{
    unsigned char *bytes = NULL;
    cr_assert_ok(ari_file_read(&bytes, n, path, SIZE_MAX - 1));
    return bytes;
}

Test(safetensors_write, header_is_the_official_librarys_to_the_byte)
{
    static const float one[3] = {1, 2, 3};
    static const uint8_t two[2] = {7, 9};
    static const char *const meta[] = {"format", "pt", "quote\"\n\x01", "\xe2\x80\x94/"};
    const ar_st_tensor t[] = {{.name = "b", .dtype = AR_U8, .ndim = 1, .shape = {2}, .data = two},
                              {.name = "z", .dtype = AR_F32, .ndim = 0, .data = one},
                              {.name = "a\\", .dtype = AR_F32, .ndim = 2, .shape = {1, 2}, .data = one + 1}};
    static const char header[] = "{\"__metadata__\":{\"format\":\"pt\",\"quote\\\"\\n\\u0001\":\"\xe2\x80\x94/\"},"
                                 "\"a\\\\\":{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":[0,8]},"
                                 "\"z\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[8,12]},"
                                 "\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[12,14]}}";
    const char *path = in_folder("x.safetensors");
    cr_assert_ok(ari_st_write(path, t, 3, meta, 2));
    size_t n = 0;
    OWNED(free) unsigned char *bytes = slurp(path, &n);
    const size_t padded = (sizeof header - 1 + 7) / 8 * 8;
    uint64_t length = 0;
    memcpy(&length, bytes, 8);
    cr_expect_eq(length, padded);
    cr_assert_eq(n, 8 + padded + 14);
    cr_expect_eq(memcmp(bytes + 8, header, sizeof header - 1), 0, "%.*s", (int)padded, bytes + 8);
    for (size_t i = sizeof header - 1; i < padded; i++)
        cr_expect_eq(bytes[8 + i], ' ');
    cr_expect_eq(memcmp(bytes + 8 + padded, one + 1, 8), 0);
    cr_expect_eq(memcmp(bytes + 8 + padded + 8, one, 4), 0);
    cr_expect_eq(memcmp(bytes + 8 + padded + 12, two, 2), 0);
    cr_expect_eq(count_files(NULL), 1);
}

Test(safetensors_write, every_dtype_comes_back)
{
    unsigned char data[64];
    char names[AR_DTYPE_COUNT][16];
    ar_st_tensor t[AR_DTYPE_COUNT];
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (unsigned char)(37 * i + 5);
    memset(t, 0, sizeof t);
    for (int i = 0; i < AR_DTYPE_COUNT; i++) {
        snprintf(names[i], sizeof names[i], "t.%s", ar_dtype_name((ar_dtype)i));
        t[i] = (ar_st_tensor){.name = names[i], .dtype = (ar_dtype)i, .ndim = 2, .shape = {2, 4}, .data = data};
    }
    const char *path = in_folder("x.safetensors");
    cr_assert_ok(ari_st_write(path, t, AR_DTYPE_COUNT, NULL, 0));
    OWNED(ari_st_close) ar_st_file *f = NULL;
    cr_assert_ok(ari_st_open(&f, path));
    cr_expect_eq(ari_st_tensor_count(f), AR_DTYPE_COUNT);
    for (int i = 0; i < AR_DTYPE_COUNT; i++) {
        const ar_st_entry *e = ari_st_find(f, names[i]);
        cr_assert_not_null(e);
        cr_expect_eq(e->dtype, (ar_dtype)i);
        cr_expect_eq(e->count, 8);
        cr_expect_eq(e->bytes, ari_dtype_bits((ar_dtype)i)); /* 8 elements of so many bits */
        cr_expect_eq(memcmp(e->data, data, e->bytes), 0);
    }
}

/* The official library wrote these files; writing what was read must give its bytes. */
Test(safetensors_write, golden_files_are_written_back_to_the_byte)
{
    static const char *const files[] = {"gpt2-tiny/model", "gpt2-tiny/grads", "llama-gqa-tiny/model",
                                        "llama-mqa-tied-tiny/outputs", "block-gqa/expected_f64"};
    char golden[512];
    const char *path = in_folder("x.safetensors");
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        snprintf(golden, sizeof golden, "%s/%s.safetensors", TEST_GOLDEN_DIR, files[i]);
        OWNED(ari_st_close) ar_st_file *f = NULL;
        cr_assert_ok(ari_st_open(&f, golden));
        const size_t n = ari_st_tensor_count(f);
        OWNED(free) ar_st_tensor *t = calloc(n, sizeof *t);
        cr_assert_not_null(t);
        for (size_t k = 0; k < n; k++) {
            const ar_st_entry *e = ari_st_at(f, n - 1 - k); /* any order will do */
            t[k] = (ar_st_tensor){.name = e->name, .dtype = e->dtype, .ndim = e->ndim, .data = e->data};
            memcpy(t[k].shape, e->shape, sizeof e->shape);
        }
        const char *const meta[] = {"format", ari_st_metadata(f, "format")};
        cr_assert_ok(ari_st_write(path, t, n, meta, meta[1] != NULL));
        size_t a = 0, b = 0;
        OWNED(free) unsigned char *mine = slurp(path, &a), *theirs = slurp(golden, &b);
        cr_expect(a == b && memcmp(mine, theirs, a) == 0, "%s", golden);
    }
}

Test(safetensors_write, an_empty_file_and_an_empty_tensor_are_files)
{
    const char *path = in_folder("x.safetensors");
    OWNED(ari_st_close) ar_st_file *f = NULL;
    cr_assert_ok(ari_st_write(path, NULL, 0, NULL, 0));
    cr_assert_ok(ari_st_open(&f, path));
    cr_expect_eq(ari_st_tensor_count(f), 0);
    ari_st_close(f);
    const ar_st_tensor t = {.name = "", .dtype = AR_F32, .ndim = 2, .shape = {0, 4}};
    cr_assert_ok(ari_st_write(path, &t, 1, NULL, 0));
    cr_assert_ok(ari_st_open(&f, path));
    cr_expect_eq(ari_st_find(f, "")->count, 0);
}

Test(safetensors_write, what_cannot_be_read_back_is_refused)
{
    static const float x[4] = {0};
    const ar_st_tensor good = {.name = "a", .dtype = AR_F32, .ndim = 1, .shape = {4}, .data = x};
    ar_st_tensor bad[8];
    for (size_t i = 0; i < 8; i++)
        bad[i] = good;
    bad[0].name = NULL;
    bad[1].name = "__metadata__";
    bad[2].name = "\xff";
    bad[3].ndim = 9;
    bad[4].ndim = -1;
    bad[5].dtype = AR_DTYPE_COUNT;
    bad[6].data = NULL;
    bad[7].dtype = AR_F6_E2M3, bad[7].shape[0] = 3;
    const char *path = in_folder("x.safetensors");
    for (size_t i = 0; i < 8; i++)
        cr_expect_eq(ari_st_write(path, &bad[i], 1, NULL, 0), AR_ERR_ARG, "%zu", i);
    const ar_st_tensor twice[] = {good, {.name = "b", .dtype = AR_U8, .ndim = 1, .shape = {1}, .data = x}, good};
    cr_expect_refused(ari_st_write(path, twice, 3, NULL, 0), AR_ERR_ARG, "'a' is there twice");
    ar_st_tensor huge = good;
    huge.ndim = 2, huge.shape[0] = huge.shape[1] = (size_t)1 << 32;
    cr_expect_eq(ari_st_write(path, &huge, 1, NULL, 0), AR_ERR_OVERFLOW);
    static const char *const same[] = {"k", "1", "k", "2"}, *const missing[] = {"k", NULL};
    cr_expect_eq(ari_st_write(path, &good, 1, same, 2), AR_ERR_ARG);
    cr_expect_eq(ari_st_write(path, &good, 1, missing, 1), AR_ERR_ARG);
    cr_expect_eq(count_files(NULL), 0);
}

/* A limit on file sizes stands for the full disk; /dev/full is one. */
Test(safetensors_write, a_full_disk_is_an_io_error_and_leaves_what_was_there)
{
    static const float x[65536] = {1};
    const ar_st_tensor t = {.name = "a", .dtype = AR_F32, .ndim = 1, .shape = {65536}, .data = x};
    const char *path = in_folder("x.safetensors");
    cr_assert_ok(ari_file_write(path, "old", 3));
    signal(SIGXFSZ, SIG_IGN);
    const struct rlimit small = {4096, RLIM_INFINITY}, none = {RLIM_INFINITY, RLIM_INFINITY};
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &small), 0);
    const ar_status st = ari_st_write(path, &t, 1, NULL, 0);
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &none), 0);
    cr_expect_refused(st, AR_ERR_IO, path);
    cr_expect_eq(count_files(NULL), 1);
    size_t n = 0;
    OWNED(free) unsigned char *bytes = slurp(path, &n);
    cr_expect(n == 3 && memcmp(bytes, "old", 3) == 0);
    cr_expect_eq(ari_st_write("/dev/full", &t, 1, NULL, 0), AR_ERR_IO);
    struct stat info;
    cr_expect(stat("/dev/full", &info) == 0 && S_ISCHR(info.st_mode)); /* still a device */
}

Test(safetensors_write, a_path_that_cannot_be_written_is_an_io_error)
{
    cr_expect_eq(ari_st_write("/no/such/folder/x.safetensors", NULL, 0, NULL, 0), AR_ERR_IO);
    cr_expect_eq(ari_st_write("/tmp", NULL, 0, NULL, 0), AR_ERR_IO);
    cr_expect_eq(ari_st_write("", NULL, 0, NULL, 0), AR_ERR_ARG);
    cr_expect_eq(ari_st_write(NULL, NULL, 0, NULL, 0), AR_ERR_ARG);
}

Test(safetensors_write, a_link_to_a_file_stays_a_link)
{
    const char *path = in_folder("real"), *link = in_folder("link");
    struct stat info;
    cr_assert_ok(ari_file_write(path, "old", 3));
    cr_assert_eq(symlink("real", link), 0);
    cr_assert_ok(ari_file_write(link, "newer", 5));
    cr_expect(lstat(link, &info) == 0 && S_ISLNK(info.st_mode));
    cr_expect(stat(path, &info) == 0 && info.st_size == 5);
}

Test(safetensors_write, integers_of_every_width_and_sign_widen)
{
    static const unsigned char ff[8] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f};
    static const struct {
        ar_dtype dtype;
        int64_t want;
    } cases[] = {{AR_BOOL, 255},       {AR_U8, 255}, {AR_I8, -1},         {AR_U16, 65535},    {AR_I16, -1},
                 {AR_U32, UINT32_MAX}, {AR_I32, -1}, {AR_I64, INT64_MAX}, {AR_U64, INT64_MAX}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int64_t out = 0;
        const ar_st_entry e = {
            .name = "x", .dtype = cases[i].dtype, .count = 1, .bytes = ar_dtype_bytes(cases[i].dtype), .data = ff};
        cr_expect_ok(ari_st_to_i64(&e, &out));
        cr_expect_eq(out, cases[i].want, "%s: %lld", ar_dtype_name(cases[i].dtype), (long long)out);
    }
    const uint64_t big = (uint64_t)1 << 63;
    int64_t out = 0;
    float f = 0;
    ar_st_entry e = {.name = "ids", .dtype = AR_U64, .count = 1, .bytes = 8, .data = &big};
    cr_expect_eq(ari_st_to_i64(&e, &out), AR_ERR_DATA);
    cr_expect_refused(ari_st_to_f32(&e, &f), AR_ERR_DTYPE, "'ids' is U64");
    e.dtype = AR_F32;
    cr_expect_eq(ari_st_to_i64(&e, &out), AR_ERR_DTYPE);
}
