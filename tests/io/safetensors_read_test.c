/* SPDX-License-Identifier: Apache-2.0 */
#include <sys/resource.h>
#include <sys/stat.h>

#include "io/st_bytes.h"
#include "ref/io/file.h"
#include "ref/io/safetensors.h"
#include "ref/io/safetensors_private.h"
#include "support/quoted.h"
#include "support/together.h"

/* ' stands for " in what these make. */
#define T(name, dtype, shape, begin, end) \
    "'" name "':{'dtype':'" dtype "','shape':" shape ",'data_offsets':[" #begin "," #end "]}"
#define A "{" T("a", "U8", "[1]", 0, 1)
#define JSON_RULE "InvalidHeaderDeserialization"

/* Ways to break the format as JSON or in a member: each of the texts, between which are bars, in the place of @. */
static const struct {
    const char *header, *texts;
} malformed[] = {
    {"@",
     "|   |[]|'a'|null|{|}|{}x|{} {}|\xEF\xBB\xBF{}|{} // comment|{/* */}|{,}|{'a'}|{'a':}|{'a':,}|{'a'|{'a|{'a\\|{'a':|"
     "{'a':{|{'a':]}|{'a':[}]}|{a:{}}|{1:{}}|{'a' " T("a", "U8", "[1]", 0, 1) "}"},
    {"{'a':@}", "nul|null|3|[]|'b'|{}"},
    {A "@", ",}|]|" T("b", "U8", "[1]", 1, 2) "}"},
    {"{" T("@", "U8", "[1]", 0, 1) "}", "a\n|a\\x|\\u00|a\\u0000b|\\ud800|\\udc00\\ud800"},
    {A "," T("@", "U8", "[1]", 1, 2) "}", "a|\\u0061"},
    {"{'a':{@}}", "'shape':[1],'data_offsets':[0,1]|'dtype':'U8','data_offsets':[0,1]|'dtype':'U8','shape':[1]|"
                  "'dtype':'U8','dtype':'U8','shape':[1],'data_offsets':[0,1]|"
                  "'dtype':'U8','shape':[1],'shape':[1],'data_offsets':[0,1]|"
                  "'dtype':'U8','shape':[1],'data_offsets':[0,1],'data_offsets':[0,1]|"
                  "'dtype':'U8','shape':[1],'data_offsets':[0,1],'data_off\\u0073ets':[0,1]|"
                  "'dtype':8,'shape':[1],'data_offsets':[0,1]"},
    {"{" T("a", "@", "[1]", 0, 1) "}", "F12|f32|F8_E4M3FNUZ|"},
    {"{" T("a", "U8", "@", 0, 1) "}", "1|null|{}|[1.0]|[1e0]|[-1]|[-0]|[01]|[+1]|[0x1]|[true]|['1']|[1,]|[[1]]|[1e400]|"
                                      "[18446744073709551616]|[18446744073709551617]|[99999999999999999999999999]"},
    {"{'a':{'dtype':'U8','shape':[1],'data_offsets':@}}", "[0,1.0]|[-1,0]|[-0,1]|[0]|[]|[0,1,1]|1|null"},
    {"{'__metadata__':@}", "[]|1|nul|{'a':1}|{'a':null}|{'a':{}}|{'a':'b',}|{'a':'\\u0000'}|{'a':'b','a':'b'}|"
                           "{'a':'b','c':'d','\\u0061':'b'}"},
    {"{'__metadata__':{},@}", "'__metadata__':{}|'__metadata\\u005f_':null"},
};

typedef struct bad_case {
    const char *header;
    size_t data;
    const char *rule;
} bad_case;

/* And the rule of the official library that it breaks. */
static const bad_case bad_layout[] = {
    {"{" T("a", "U8", "[1]", 1, 2) "}", 2, "InvalidOffset"},
    {"{" T("a", "U8", "[1]", 0, 1) "," T("b", "U8", "[1]", 2, 3) "}", 3, "InvalidOffset"},
    {"{" T("a", "U8", "[2]", 0, 2) "," T("b", "U8", "[2]", 1, 3) "}", 3, "InvalidOffset"},
    {"{" T("a", "U8", "[2]", 0, 2) "," T("b", "U8", "[2]", 0, 2) "}", 2, "InvalidOffset"},
    {"{" T("a", "U8", "[1]", 1, 0) "}", 1, "InvalidOffset"},
    {"{" T("a", "U8", "[1]", 9223372036854775807, 0) "}", 1, "InvalidOffset"},
    {"{" T("a", "U8", "[4]", 0, 4) "," T("b", "F32", "[0]", 2, 2) "}", 4, "InvalidOffset"},
    {"{" T("a", "U8", "[2]", 0, 1) "}", 1, "TensorInvalidInfo"},
    {"{" T("a", "U8", "[1]", 0, 2) "}", 2, "TensorInvalidInfo"},
    {"{" T("a", "F32", "[]", 0, 0) "}", 0, "TensorInvalidInfo"},
    {"{" T("a", "F32", "[1]", 0, 1) "}", 1, "TensorInvalidInfo"},
    {"{" T("a", "U8", "[0]", 0, 1) "}", 1, "TensorInvalidInfo"},
    {"{" T("a", "U8", "[1]", 0, 9223372036854775807) "}", 1, "TensorInvalidInfo"},
    {"{" T("a", "U8", "[4294967296,4294967296]", 0, 0) "}", 0, "ValidationOverflow"},
    {"{" T("a", "U8", "[4294967296,4294967296,0]", 0, 0) "}", 0, "ValidationOverflow"},
    {"{" T("a", "F64", "[2305843009213693952]", 0, 0) "}", 0, "ValidationOverflow"},
    {"{" T("a", "U8", "[2305843009213693952]", 0, 0) "}", 0, "ValidationOverflow"},
    /* The product that wraps to 4 elements, 16 bytes, in readers that do not check it. */
    {"{" T("a", "F32", "[4194305,4194305,211106198978564]", 0, 16) "}", 16, "ValidationOverflow"},
    {"{" T("a", "F4", "[1]", 0, 1) "}", 1, "MisalignedSlice"},
    {"{" T("a", "F6_E2M3", "[3]", 0, 2) "}", 2, "MisalignedSlice"},
    {"{" T("a", "F6_E3M2", "[1]", 0, 0) "}", 0, "MisalignedSlice"},
    {"{" T("a", "U8", "[1]", 0, 1) "}", 2, "MetadataIncompleteBuffer"},
    {"{" T("a", "U8", "[2]", 0, 2) "}", 1, "MetadataIncompleteBuffer"},
    {"{" T("a", "U8", "[4611686018427387904,0]", 0, 0) "}", 1, "MetadataIncompleteBuffer"},
    {"{}", 1, "MetadataIncompleteBuffer"},
    {"{'__metadata__':{}}", 8, "MetadataIncompleteBuffer"},
};

static void expect_rule(const char *header, size_t n, size_t data, const char *rule)
{
    const ar_status st = st_try(st_bytes(header, n, data));
    cr_expect_eq(st, AR_ERR_FORMAT, "%s: %s %s", header, ar_status_name(st), ar_error_message());
    cr_expect(names_rule(rule), "%s: expected %s, got %s", header, rule, ar_error_message());
}

static ar_status try_quoted(const char *header, size_t data)
{
    OWNED(free) char *text = quoted(header);
    return st_try(st_bytes(text, strlen(text), data));
}

CLAIM(malformed_members_are_named)
{
    for (size_t i = 0; i < sizeof malformed / sizeof *malformed; i++) {
        OWNED(free) char *header = quoted(malformed[i].header), *texts = quoted(malformed[i].texts), *rest = texts;
        const char *const place = strchr(header, '@');
        for (char *text; (text = strsep(&rest, "|"));) {
            char whole[400];
            const int n = snprintf(whole, sizeof whole, "%.*s%s%s", (int)(place - header), header, text, place + 1);
            expect_rule(whole, (size_t)n, 4, JSON_RULE);
        }
    }
    expect_rule("{}\0", 3, 0, JSON_RULE);
    expect_rule("{}\0\0\0\0", 6, 0, JSON_RULE);
    expect_rule("{'a':{}}", 8, 0, JSON_RULE);
}

CLAIM(malformed_layouts_are_named)
{
    for (size_t i = 0; i < sizeof bad_layout / sizeof *bad_layout; i++) {
        OWNED(free) char *header = quoted(bad_layout[i].header);
        expect_rule(header, strlen(header), bad_layout[i].data, bad_layout[i].rule);
    }
}

CLAIM(files_too_short_or_too_long_are_named)
{
    for (size_t n = 0; n < 8; n++) {
        cr_expect_eq(st_try(mem_file_of("\x02\0\0\0\0\0\0\0", n)), AR_ERR_FORMAT);
        cr_expect(names_rule("HeaderTooSmall"), "%zu bytes: %s", n, ar_error_message());
    }
    const uint64_t too_large[] = {100000001,         (uint64_t)1 << 32, INT64_MAX,
                                  (uint64_t)1 << 63, UINT64_MAX - 7,    UINT64_MAX};
    for (size_t i = 0; i < sizeof too_large / sizeof too_large[0]; i++) {
        cr_expect_eq(st_try(st_bytes_claiming(too_large[i], "{}", 2, 0)), AR_ERR_FORMAT);
        cr_expect(names_rule("HeaderTooLarge"), "%s", ar_error_message());
    }
    cr_expect_eq(st_try(mem_file_of("version of git-lfs\noid sha256:0\nsize 9\n", 37)), AR_ERR_FORMAT);
    cr_expect(strstr(ar_error_message(), "git lfs pull"), "%s", ar_error_message());
    const uint64_t too_long[] = {3, 4, 1000, 100000000};
    for (size_t i = 0; i < sizeof too_long / sizeof too_long[0]; i++) {
        cr_expect_eq(st_try(st_bytes_claiming(too_long[i], "{}", 2, 0)), AR_ERR_FORMAT);
        cr_expect(names_rule("InvalidHeaderLength"), "%s", ar_error_message());
    }
}

CLAIM(bytes_that_are_not_utf8_are_an_invalid_header)
{
    static const char *const bad[] = {
        "{\"\xff\":1}", "{\"\xc0\x80\":1}",         "{\"\xed\xa0\x80\":1}",    "{\"\xe2\x82\":1}",
        "{\"\x80\":1}", "{\"\xf4\x90\x80\x80\":1}", "{\"\xf0\x80\x80\x80\":1}"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        expect_rule(bad[i], strlen(bad[i]), 0, "InvalidHeader");
}

CLAIM(every_error_names_the_file_and_the_tensor)
{
    cr_assert_eq(try_quoted("{" T("wte", "U8", "[2]", 0, 1) "}", 1), AR_ERR_FORMAT);
    cr_expect_str_eq(strstr(ar_error_message(), "tensor 'wte'"), "tensor 'wte' U8 [2] [0, 1): has 1 bytes, expected 2");
    cr_expect_says("/proc/self/fd/");
}

/* A name is somebody else's text: it must not reach a terminal as escapes, nor fill the screen. */
CLAIM(messages_show_hostile_names_harmlessly)
{
    char header[4096], name[2048];
    memset(name, 'x', sizeof name);
    memcpy(name, "\\u001b[2J\\n", 10);
    name[sizeof name - 1] = '\0';
    const int n =
        snprintf(header, sizeof header, "{\"%s\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,1]}}", name);
    cr_assert_eq(st_try(st_bytes(header, (size_t)n, 1)), AR_ERR_FORMAT);
    cr_expect_null(strchr(ar_error_message(), '\x1b'));
    cr_expect_null(strchr(ar_error_message(), '\n'));
    cr_expect_lt(strlen(ar_error_message()), 500);
}

CLAIM(what_the_format_allows_is_read)
{
    static const bad_case good[] = {
        {"{}", 0, ""},
        {"{}    ", 0, ""},
        {"  \t\r\n{ } \n", 0, ""},
        {"{'__metadata__':null}", 0, ""},
        {"{'__metadata__':{}}", 0, ""},
        {"{ 'a' : { 'dtype' : 'U8' , 'shape' : [ 1 ] , 'data_offsets' : [ 0 , 1 ] } }", 1, ""},
        {"{" T("", "U8", "[1]", 0, 1) "}", 1, ""},
        {"{" T("a", "F32", "[]", 0, 4) "}", 4, ""},
        {"{" T("a", "F32", "[0]", 0, 0) "}", 0, ""},
        {"{" T("a", "F32", "[0,4611686018427387904,4611686018427387904]", 0, 0) "}", 0, ""},
        {"{" T("a", "F32", "[1,1,1,1,1,1,1,1]", 0, 4) "}", 4, ""},
        {"{" T("b", "U8", "[1]", 1, 2) "," T("a", "U8", "[1]", 0, 1) "}", 2, ""},
        {"{" T("a", "U8", "[1]", 0, 1) "," T("b", "F32", "[1]", 1, 5) "}", 5, ""},
        {"{" T("z", "U8", "[0]", 1, 1) "," T("a", "U8", "[1]", 0, 1) "," T("b", "U8", "[1]", 1, 2) "}", 2, ""},
        {"{" T("a", "F4", "[2]", 0, 1) "," T("b", "F6_E2M3", "[4]", 1, 4) "}", 4, ""},
        {"{'a':{'dtype':'U8','shape':[1],'x':[{},-1.5,1e-0,-0.0,'-0',null],'data_offsets':[0,1]}}", 1, ""},
    };
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++)
        cr_expect_eq(try_quoted(good[i].header, good[i].data), AR_OK, "%s: %s", good[i].header, ar_error_message());
}

CLAIM(nine_dimensions_are_unsupported_not_malformed)
{
    cr_expect_eq(try_quoted("{" T("a", "U8", "[1,1,1,1,1,1,1,1,1]", 0, 1) "}", 1), AR_ERR_UNSUPPORTED);
}

/* An ignored field with `depth` arrays in one another, inside the description's own braces. */
static ar_status try_depth(size_t depth)
{
    static const char head[] = "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"x\":";
    OWNED(free) char *text = malloc(sizeof head + 2 * depth + 2);
    cr_assert_not_null(text);
    memcpy(text, head, sizeof head - 1);
    memset(text + sizeof head - 1, '[', depth);
    memset(text + sizeof head - 1 + depth, ']', depth);
    memcpy(text + sizeof head - 1 + 2 * depth, "}}", 2);
    return st_try(st_bytes(text, sizeof head + 1 + 2 * depth, 1));
}

CLAIM(nesting_is_limited)
{
    cr_expect_ok(try_depth(100));
    cr_expect_ok(try_depth(127));
    const size_t deep[] = {128, 2000, 3000, 1000000, 20000000};
    for (size_t i = 0; i < sizeof deep / sizeof deep[0]; i++) {
        cr_expect_eq(try_depth(deep[i]), AR_ERR_FORMAT);
        cr_expect(names_rule(JSON_RULE), "%s", ar_error_message());
    }
}

static size_t peak_kib(void)
{
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    return (size_t)use.ru_maxrss;
}

/* As a tree, every "{}," of the first header would take some 250 bytes: 80 times the header. The bound leaves room for
 * the copies that the test itself makes and for a sanitizer that keeps freed memory back. */
CLAIM(a_large_header_takes_memory_in_proportion)
{
    const size_t n = (size_t)24 << 20;
    OWNED(free) char *text = malloc(n);
    cr_assert_not_null(text);
    static const char head[] = "{\"a\":{\"x\":[";
    memcpy(text, head, sizeof head - 1);
    for (size_t i = sizeof head - 1; i < n; i++)
        text[i] = "{},"[(i - (sizeof head - 1)) % 3];
    memcpy(text + n - 5, "0]}} ", 5);
    const size_t before = peak_kib();
    cr_expect_eq(st_try(st_bytes(text, n, 0)), AR_ERR_FORMAT);
    cr_expect(names_rule(JSON_RULE), "%s", ar_error_message());
    memset(text, ' ', n);
    memcpy(text, "{}", 2);
    cr_expect_ok(st_try(st_bytes(text, n, 0)));
    cr_expect_lt(peak_kib() - before, 10 * (n >> 10));
}

CLAIM(a_header_of_exactly_the_cap_is_read)
{
    const size_t n = 100000000;
    OWNED(free) char *text = malloc(n);
    cr_assert_not_null(text);
    memset(text, ' ', n);
    memcpy(text + n / 2, "{}", 2);
    cr_expect_ok(st_try(st_bytes(text, n, 0)));
}

CLAIM(too_many_metadata_keys_are_refused)
{
    OWNED(free) char *text = NULL;
    size_t n = 0;
    FILE *f = open_memstream(&text, &n);
    cr_assert_not_null(f);
    fputs("{\"__metadata__\":{\"k\":\"\"", f);
    for (size_t i = 0; i < ARI_ST_MAX_METADATA; i++)
        fprintf(f, ",\"%zu\":\"\"", i);
    fputs("}}", f);
    fclose(f);
    cr_expect_refused(st_try(st_bytes(text, n, 0)), AR_ERR_FORMAT, "too many keys");
}

CLAIM(what_is_no_regular_file_is_an_io_error)
{
    ar_st_file *f = NULL;
    char fifo[] = "/tmp/anyrank-fifo-XXXXXX";
    cr_expect_eq(ari_st_open(&f, "/"), AR_ERR_IO);
    cr_expect_eq(ari_st_open(&f, "/dev/zero"), AR_ERR_IO);
    cr_expect_refused(ari_st_open(&f, "/no/such/file"), AR_ERR_IO, "/no/such/file");
    cr_assert_not_null(mkdtemp(fifo));
    cr_expect_eq(ari_st_open(&f, fifo), AR_ERR_IO);
    rmdir(fifo);
    cr_assert_eq(mkfifo(fifo, 0600), 0);
    cr_expect_eq(ari_st_open(&f, fifo), AR_ERR_IO); /* and does not wait for a writer */
    unlink(fifo);
    cr_expect_null(f);
}

CLAIM(a_file_that_shrinks_meanwhile_is_an_io_error)
{
    char bytes[16];
    const mem_file m = mem_file_of("0123456789", 10);
    cr_assert_ok(ari_file_pread(m.fd, bytes, 10, 0, m.path));
    cr_assert_eq(ftruncate(m.fd, 4), 0);
    cr_expect_refused(ari_file_pread(m.fd, bytes, 10, 0, m.path), AR_ERR_IO, "shorter");
}

CLAIM(entries_come_in_the_order_of_the_header_and_by_name)
{
    OWNED(free)
    char *header = quoted(
        "{'__metadata__':{'format':'pt','':'empty'}," T("b", "U8", "[2,3]", 4, 10) "," T("a", "I16", "[2]", 0, 4) "}");
    const mem_file m = st_bytes(header, strlen(header), 10);
    OWNED(ari_st_close) ar_st_file *f = NULL;
    cr_assert_ok(ari_st_open(&f, m.path));
    cr_assert_eq(ari_st_tensor_count(f), 2);
    const ar_st_entry *b = ari_st_at(f, 0), *a = ari_st_at(f, 1);
    cr_expect_str_eq(b->name, "b");
    cr_expect_eq(b->dtype, AR_U8);
    cr_expect(b->ndim == 2 && b->shape[0] == 2 && b->shape[1] == 3 && b->count == 6 && b->bytes == 6);
    cr_expect_eq(memcmp(b->data, "\4\5\6\7\10\11", 6), 0);
    cr_expect(a->count == 2 && a->bytes == 4 && a->dtype == AR_I16);
    cr_expect_eq(memcmp(a->data, "\0\1\2\3", 4), 0);
    cr_expect_null(ari_st_at(f, 2));
    cr_expect_null(ari_st_at(f, SIZE_MAX));
    cr_expect_eq(ari_st_find(f, "a"), a);
    cr_expect_eq(ari_st_find(f, "b"), b);
    cr_expect_null(ari_st_find(f, "c"));
    cr_expect_null(ari_st_find(f, ""));
    cr_expect_str_eq(ari_st_metadata(f, "format"), "pt");
    cr_expect_str_eq(ari_st_metadata(f, ""), "empty");
    cr_expect_null(ari_st_metadata(f, "none"));
    ari_st_close(NULL);
    close(m.fd);
}

EVERY_CLAIM(safetensors_read)
