/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/data_private.h"
#include "ref/io/config_private.h"
#include "ref/io/safetensors_private.h"
#include "run/token_files.h"
#include "support/row.h"
#include "verify/run/data_private.h"

static void expect_tokens(const ar_data *d, const int64_t *want, size_t n)
{
    int64_t got[16];
    cr_assert_eq(ari_data_tokens(d), n);
    cr_assert_ok(ari_data_read(d, got, 0, n));
    cr_assert_eq(memcmp(got, want, n * sizeof *got), 0);
}

Test(data, tokens_of_one_two_and_four_bytes_have_the_lowest_first)
{
    static const struct {
        const char *bytes;
        size_t n;
        ar_data_format asked, format;
        int64_t tokens[3];
        size_t count;
    } files[] = {{"a\0\xff", 3, AR_DATA_AUTO, AR_DATA_BYTES, {'a', 0, 255}, 3},
                 {"\x01\x02\xff\xff", 4, AR_DATA_U16, AR_DATA_U16, {0x0201, 0xffff}, 2},
                 {"\x01\x02\x03\x04\xff\xff\xff\xff", 8, AR_DATA_U32, AR_DATA_U32, {0x04030201, 0xffffffff}, 2}};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        OWNED(ari_data_close) ar_data *d = NULL;
        cr_assert_ok(open_bytes(&d, files[i].bytes, files[i].n, files[i].asked));
        cr_assert_eq(ari_data_format_of(d), files[i].format);
        expect_tokens(d, files[i].tokens, files[i].count);
    }
}

Test(data, a_tensor_of_tokens_is_read_row_after_row)
{
    const size_t shape[2] = {2, 3};
    const int32_t narrow[6] = {1, 2, 3, 4, 5, 70000};
    const int64_t wide[6] = {1, 2, 3, 4, 5, 70000};
    OWNED(ari_data_close) ar_data *d = NULL;
    cr_assert_ok(open_tensor(&d, "input_ids", AR_I32, 2, shape, narrow));
    cr_assert_eq(ari_data_format_of(d), AR_DATA_SAFETENSORS);
    cr_assert_eq(ari_data_rows(d), 2);
    expect_tokens(d, wide, 6);
    ari_data_close(d);
    cr_assert_ok(open_tensor(&d, "tokens", AR_I64, 1, (const size_t[]){6}, wide));
    cr_assert_eq(ari_data_rows(d), 1);
    expect_tokens(d, wide, 6);
}

Test(data, a_tensor_of_another_name_type_or_shape_is_refused)
{
    const int64_t zero[8] = {0};
    const size_t shape[3] = {2, 2, 2}, none[2] = {0, 4};
    ar_data *d = NULL;
    cr_assert_refused(open_tensor(&d, "text", AR_I64, 1, shape, zero), AR_ERR_FORMAT, "'input_ids' or 'tokens'");
    cr_assert_refused(open_tensor(&d, "tokens", AR_F32, 1, shape, zero), AR_ERR_FORMAT, "'tokens' is F32");
    cr_assert_eq(open_tensor(&d, "tokens", AR_I64, 3, shape, zero), AR_ERR_FORMAT);
    cr_assert_eq(open_tensor(&d, "tokens", AR_I64, 0, shape, zero), AR_ERR_FORMAT);
    cr_assert_eq(open_tensor(&d, "tokens", AR_I64, 2, none, zero), AR_ERR_DATA);
    cr_assert_eq(open_bytes(&d, "\xff\xff\xff\xff\xff\xff\xff\xff", 8, AR_DATA_SAFETENSORS), AR_ERR_FORMAT);
    cr_assert_null(d);
}

Test(data, an_empty_file_and_half_a_token_are_refused)
{
    static const struct {
        const char *bytes;
        ar_data_format format;
        const char *says;
    } files[] = {{"", AR_DATA_BYTES, "is empty"},
                 {"", AR_DATA_U32, "is empty"},
                 {"abc", AR_DATA_U16, "has 3 bytes, expected a multiple of the 2"},
                 {"abcdef", AR_DATA_U32, "has 6 bytes, expected a multiple of the 4"}};
    static const char *const paths[] = {"/nonexistent/text", "/tmp", "/dev/zero"};
    ar_data *d = NULL;
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        cr_assert_refused(open_bytes(&d, files[i].bytes, strlen(files[i].bytes), files[i].format), AR_ERR_DATA,
                          files[i].says);
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++)
        cr_assert_eq(ari_data_open(&d, paths[i], AR_DATA_BYTES), AR_ERR_IO, "%s", paths[i]);
    cr_assert_null(d);
}

Test(data, a_name_that_does_not_tell_the_format_is_refused_until_told)
{
    ar_data *d = NULL;
    SCOPED(temp_end) const temp_path file = temp_bytes(".bin", "\1\0\2\0", 4);
    cr_expect_refused(ari_data_open(&d, file.path, AR_DATA_AUTO), AR_ERR_ARG, "u16");
    cr_expect_ok(ari_data_open(&d, file.path, AR_DATA_U16));
    ari_data_close(d);
    unlink(file.path);
    cr_expect_eq(ari_data_open(&d, file.path, AR_DATA_U16), AR_ERR_IO, "it is not there");
    cr_assert_str_eq(ari_data_format_name(AR_DATA_SAFETENSORS), "safetensors");
}

/* Texts and numbers, other members, an empty line, an empty document, no newline at the end. */
Test(data, a_line_of_json_is_a_document)
{
    static const int64_t tokens[] = {'a', 'b', 0xc3, 0xbc, 7, 2147483647, 'c'};
    static const bool begins[] = {true, false, false, false, true, false, true};
    OWNED(ari_data_close) ar_data *d = NULL;
    cr_assert_ok(open_lines(&d, "{\"text\": \"ab\\u00fc\", \"id\": 3}\n\n{\"input_ids\": [7, 2147483647]}\r\n"
                                "{\"text\": \"\"}\n{\"text\": \"c\"}"));
    cr_assert_eq(ari_data_format_of(d), AR_DATA_JSONL);
    cr_assert_eq(ari_data_rows(d), 1);
    cr_assert_eq(ari_data_documents(d), 3);
    expect_tokens(d, tokens, 7);
    for (size_t i = 0; i < 7; i++)
        cr_expect_eq(ari_data_document_begins(d, i), begins[i], "token %zu", i);
    cr_expect_eq(ari_data_check_vocab(d, 256), AR_ERR_DATA);
}

Test(data, lines_that_are_no_documents_are_named)
{
    static const struct {
        const char *lines, *says;
        ar_status status;
    } cases[] = {{"{\"text\": \"a\"}\n{\"text\": 3}\n", "line 2: expected an object", AR_ERR_FORMAT},
                 {"{\"text\": \"a\", \"input_ids\": [1]}\n", "and not both", AR_ERR_FORMAT},
                 {"{\"text\": \"a\", \"input_ids\": 1}\n", "and not both", AR_ERR_FORMAT},
                 {"{\"text\": null, \"input_ids\": [1]}\n", "and not both", AR_ERR_FORMAT},
                 {"{\"text\": \"a\"}\n{\"input_ids\": [1], \"labels\": [1]}\n", "line 2: 'labels'", AR_ERR_UNSUPPORTED},
                 {"[1, 2]\n", "line 1: expected an object", AR_ERR_FORMAT},
                 {"{\"text\": \"a\"}\n\n{\"text\": \"b\n", "line 3", AR_ERR_FORMAT},
                 {"{\"input_ids\": [1, -1]}\n", "line 1: token 1", AR_ERR_DATA},
                 {"{\"input_ids\": [1.0]}\n", "line 1: token 0", AR_ERR_DATA},
                 {"{\"input_ids\": [2147483648]}\n", "token 0", AR_ERR_DATA},
                 {"\n{\"text\": \"\"}\n", "is empty", AR_ERR_DATA}};
    ar_data *d = NULL;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cr_expect_eq(open_lines(&d, cases[i].lines), cases[i].status, "case %zu: %s", i, ar_error_message());
        cr_expect(error_says(cases[i].says), "case %zu: %s", i, ar_error_message());
        cr_assert_null(d);
    }
}

/* The header of an array would be read as tokens. */
Test(data, files_of_other_programs_are_refused_in_every_format)
{
    static const ar_data_format formats[] = {AR_DATA_BYTES, AR_DATA_U16, AR_DATA_U32};
    static const struct {
        const char *bytes, *what;
    } files[] = ROW({"\x93NUMPY\1\0", "np.load("}, {"PK\3\4", "torch.load("}, {"\x89HDF\r\n\x1a\n", "h5py"},
                    {"GGUF\3\0\0\0", "GGUF"}, {"(\xb5/\xfd", "zstd"});
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        char bytes[64] = {0};
        memcpy(bytes, files[i].bytes, strlen(files[i].bytes));
        for (size_t k = 0; k < 3; k++) {
            ar_data *d = NULL;
            cr_expect_refused(open_bytes(&d, bytes, sizeof bytes, formats[k]), AR_ERR_FORMAT, files[i].what);
        }
    }
    OWNED(ari_data_close) ar_data *d = NULL;
    cr_expect_ok(open_bytes(&d, "GGUF is a format", 16, AR_DATA_BYTES));
}

Test(data, an_id_outside_the_vocabulary_is_named_with_its_place)
{
    OWNED(ari_data_close) ar_data *d = NULL;
    cr_assert_ok(open_bytes(&d, "abz", 3, AR_DATA_BYTES));
    cr_assert_ok(ari_data_check_vocab(d, 256));
    cr_assert_ok(ari_data_check_vocab(d, 'z' + 1));
    cr_assert_eq(ari_data_check_vocab(d, 'b'), AR_ERR_DATA);
    cr_assert(error_says("token 1 is 98") && error_says("ids 0 to 97") && error_says("needs a vocabulary of 123"), "%s",
              ar_error_message());
    ari_data_close(d);
    cr_assert_ok(open_bytes(&d, "\xff", 1, AR_DATA_BYTES));
    cr_assert_eq(ari_data_check_vocab(d, 255), AR_ERR_DATA);
    cr_assert_ok(ari_data_check_vocab(d, 256));
    ari_data_close(d);
    const int64_t tokens[6] = {0, 1, 2, 3, 4, -7};
    cr_assert_ok(open_tensor(&d, "tokens", AR_I64, 2, (const size_t[]){2, 3}, tokens));
    cr_assert_refused(ari_data_check_vocab(d, 10), AR_ERR_DATA,
                      "token 5 (row 1, place 2) is -7, expected an id from 0 to 9");
}

Test(data, tokens_beyond_the_end_are_not_read)
{
    OWNED(ari_data_close) ar_data *d = NULL;
    int64_t out[4];
    cr_assert_ok(open_bytes(&d, "abcd", 4, AR_DATA_BYTES));
    cr_assert_ok(ari_data_read(d, out, 4, 0));
    cr_assert_eq(ari_data_read(d, out, 3, 2), AR_ERR_ARG);
    cr_assert_eq(ari_data_read(d, out, SIZE_MAX, 2), AR_ERR_ARG);
}

/* FIPS 180-2, appendix B.1. */
Test(data, the_hash_is_that_of_the_file)
{
    OWNED(ari_data_close) ar_data *d = NULL;
    char hex[65];
    cr_assert_ok(open_bytes(&d, "abc", 3, AR_DATA_BYTES));
    cr_assert_ok(ari_data_hash(d, hex));
    cr_assert_str_eq(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

Test(data, without_a_path_it_is_the_bundled_text)
{
    OWNED(ari_data_close) ar_data *d = NULL;
    cr_assert_ok(ari_data_open(&d, NULL, AR_DATA_AUTO));
    cr_assert_eq(strncmp(ari_data_path(d), ari_data_dir(), strlen(ari_data_dir())), 0);
    cr_assert_ok(ari_data_check_vocab(d, 256));
}

/* More tokens than are read at once, behind another tensor, and the first place of what is wrong. */
Test(data, tokens_of_a_large_tensor_are_those_that_were_written)
{
    enum { ROWS = 30, ROW = 1001, N = ROWS * ROW };
    static int64_t ids[N], got[N];
    static const float before[3] = {1, 2, 3};
    SCOPED(temp_end) const temp_path file = temp_file(".safetensors");
    OWNED(ari_data_close) ar_data *d = NULL;
    for (size_t i = 0; i < N; i++)
        ids[i] = (int64_t)(i * 7 % 1000);
    ids[N - 1] = 1234;
    const ar_st_tensor t[] = {
        {.name = "before", .dtype = AR_F32, .ndim = 1, .shape = {3}, .data = before},
        {.name = "input_ids", .dtype = AR_I64, .ndim = 2, .shape = {ROWS, ROW}, .data = ids},
        {.name = "zero", .dtype = AR_F32, .ndim = 1, .shape = {3}, .data = before},
    };
    cr_assert_ok(ari_st_write(file.path, t, 3, NULL, 0));
    cr_assert_ok(ari_data_open(&d, file.path, AR_DATA_AUTO));
    cr_assert_ok(ari_data_read(d, got, 0, N));
    cr_assert_eq(memcmp(got, ids, sizeof ids), 0);
    cr_assert_ok(ari_data_check_vocab(d, 1235));
    cr_assert_refused(ari_data_check_vocab(d, 1000), AR_ERR_DATA, "token 30029 (row 29, place 1000) is 1234");
    cr_assert_eq(truncate(file.path, 4000), 0);
    cr_assert_refused(ari_data_read(d, got, 0, N), AR_ERR_IO, "became shorter");
    cr_assert_eq(ari_data_check_vocab(d, 1235), AR_ERR_IO);
}
