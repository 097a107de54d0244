/* SPDX-License-Identifier: Apache-2.0 */
#include "io/st_bytes.h"
#include "ref/io/file.h"
#include "ref/io/json.h"
#include "support/together.h"
#include "tests/support/temporary.h"

static ar_status parse(const char *text)
{
    json_t *value = NULL;
    const ar_status st = ari_json_parse(&value, text, strlen(text), "x.json");
    json_decref(value);
    return st;
}

CLAIM(what_is_not_json_is_refused_with_its_place)
{
    char bad[] =
        "|{|{}x|{\"a\":1,\"a\":2}|[1,]|01|[1e400]|\xff|[\"\\u0000\"]|nul|\xEF\xBB\xBF{}|{'a':1}|[NaN]|[\"\xc0\xaf\"]|"
        "[Infinity]|[1 2]|[9223372036854775808]";
    char *rest = bad;
    for (const char *text; (text = strsep(&rest, "|"));)
        cr_expect_eq(parse(text), AR_ERR_FORMAT, "%s: %s", text, ar_error_message());
    cr_expect_refused(parse("{\n \"a\": 1,\n \"b\" 2}"), AR_ERR_FORMAT, "x.json: not JSON: line 3, column");
    cr_expect_refused(parse("{\"b\" 2}"), AR_ERR_FORMAT, "x.json: not JSON: column");
    json_t *value = NULL;
    cr_expect_refused(ari_json_parse(&value, "{}\n\0\0", 5, "x.json"), AR_ERR_FORMAT, "not JSON: byte 3 of 5 is NUL");
}

/* jansson's own limit of 2048 levels keeps its recursion off the end of the stack. */
CLAIM(deep_nesting_is_refused)
{
    const size_t depth[] = {2000, 3000, 1000000};
    for (size_t i = 0; i < 3; i++) {
        OWNED(free) char *text = malloc(2 * depth[i] + 1);
        cr_assert_not_null(text);
        memset(text, '[', depth[i]);
        memset(text + depth[i], ']', depth[i]);
        text[2 * depth[i]] = '\0';
        cr_expect_eq(parse(text), i == 0 ? AR_OK : AR_ERR_FORMAT);
    }
}

CLAIM(too_much_is_refused_before_it_is_read)
{
    json_t *value = NULL;
    const size_t n = ARI_JSON_MAX_BYTES + 1;
    OWNED(free) char *text = malloc(n);
    cr_assert_not_null(text);
    memset(text, ' ', n);
    cr_expect_eq(ari_json_parse(&value, text, n, "x"), AR_ERR_OVERFLOW);
    memset(text, '[', ARI_JSON_MAX_VALUES);
    cr_expect_eq(ari_json_parse(&value, text, ARI_JSON_MAX_VALUES, "x"), AR_ERR_OVERFLOW);
    cr_expect_null(value);
}

CLAIM(a_file_is_loaded_or_the_error_names_it)
{
    json_t *value = NULL;
    const mem_file m = mem_file_of("{\"k\": [1, 2.5]}\n", 16);
    cr_assert_ok(ari_json_load(&value, m.path));
    cr_expect_eq(json_real_value(json_array_get(json_object_get(value, "k"), 1)), 2.5);
    json_decref(value);
    cr_expect_refused(ari_json_load(&value, "/no/such.json"), AR_ERR_IO, "/no/such.json");
    cr_expect_eq(ari_json_load(&value, "/"), AR_ERR_IO);
}

CLAIM(members_of_the_wrong_kind_are_named)
{
    json_t *o = json_pack("{s:i,s:f,s:s,s:b,s:n,s:[],s:{}}", "int", 7, "real", 0.5, "text", "t", "yes", 1, "null",
                          "list", "map");
    const ari_json_at at = {o, "x.json", AR_ERR_CONFIG};
    size_t size = 11;
    double real = 11;
    bool flag = false;
    const char *text = "unset";
    const json_t *value = NULL;
    cr_expect(ari_json_size(&at, "int", 7, 7, &size) == AR_OK && size == 7);
    cr_expect(ari_json_real(&at, "int", &real) == AR_OK && real == 7);
    cr_expect(ari_json_real(&at, "real", &real) == AR_OK && real == 0.5);
    cr_expect(ari_json_bool(&at, "yes", &flag) == AR_OK && flag);
    cr_expect(ari_json_string(&at, "text", &text) == AR_OK && strcmp(text, "t") == 0);
    cr_expect(ari_json_array(&at, "list", &value) == AR_OK && json_is_array(value));
    cr_expect(ari_json_object(&at, "map", &value) == AR_OK && json_is_object(value));
    cr_expect_eq(ari_json_size(&at, "int", 8, 9, &size), AR_ERR_CONFIG);
    cr_expect_str_eq(ar_error_message(), "x.json: key 'int' is 7, expected an integer from 8 to 9");
    cr_expect_eq(ari_json_size(&at, "int", 0, 6, &size), AR_ERR_CONFIG);
    cr_expect_eq(ari_json_size(&at, "real", 0, 9, &size), AR_ERR_CONFIG);
    cr_expect_eq(ari_json_size(&at, "none", 0, 9, &size), AR_ERR_CONFIG);
    cr_expect_str_eq(ar_error_message(), "x.json: key 'none' is missing, expected an integer");
    cr_expect_eq(ari_json_size(&at, "null", 0, 9, &size), AR_ERR_CONFIG);
    cr_expect_eq(ari_json_real(&at, "text", &real), AR_ERR_CONFIG);
    cr_expect_str_eq(ar_error_message(), "x.json: key 'text' is a string, expected a number");
    cr_expect_eq(ari_json_bool(&at, "int", &flag), AR_ERR_CONFIG);
    cr_expect_eq(ari_json_string(&at, "yes", &text), AR_ERR_CONFIG);
    cr_expect_eq(ari_json_array(&at, "map", &value), AR_ERR_CONFIG);
    cr_expect_eq(ari_json_object(&at, "list", &value), AR_ERR_CONFIG);
    size = 11;
    cr_expect(ari_json_size_or(&at, "none", 0, 9, &size) == AR_OK && size == 11);
    cr_expect(ari_json_size_or(&at, "null", 0, 9, &size) == AR_OK && size == 11);
    cr_expect_eq(ari_json_size_or(&at, "text", 0, 9, &size), AR_ERR_CONFIG);
    cr_expect(ari_json_bool_or(&at, "none", &flag) == AR_OK && flag);
    cr_expect_eq(ari_json_real_or(&at, "list", &real), AR_ERR_CONFIG);
    cr_expect_eq(ari_json_string_or(&at, "int", &text), AR_ERR_CONFIG);
    json_decref(o);
}

CLAIM(numbers_that_json_cannot_spell_are_strings)
{
    json_t *list = json_array();
    const double x[] = {0.1, -0.0, NAN, INFINITY, -INFINITY, 1e308, 5e-324};
    for (size_t i = 0; i < 7; i++)
        json_array_append_new(list, ari_json_number(x[i]));
    SCOPED(temp_end) const temp_path file = temp_file(".json");
    cr_assert_ok(ari_json_save(list, file.path));
    json_t *back = NULL;
    cr_assert_ok(ari_json_load(&back, file.path));
    for (size_t i = 0; i < 7; i++) {
        static const char *const words[] = {NULL, NULL, "NaN", "Infinity", "-Infinity", NULL, NULL};
        const json_t *v = json_array_get(back, i);
        const double y = json_real_value(v);
        if (words[i] != NULL)
            cr_expect_str_eq(json_string_value(v), words[i]);
        else
            cr_expect_eq(memcmp(&y, &x[i], sizeof y), 0, "%a", y);
    }
    OWNED(free) unsigned char *text = NULL;
    size_t n = 0;
    cr_assert_ok(ari_file_read(&text, &n, file.path, 1000));
    cr_expect_eq(text[n - 1], '\n');
    json_decref(back);
    cr_expect_eq(ari_json_save(list, "/no/such/folder/x.json"), AR_ERR_IO);
    cr_expect_eq(ari_json_save(list, "/dev/full"), AR_ERR_IO);
    json_decref(list);
}

CLAIM(a_dash_is_standard_output)
{
    char path[] = "/tmp/anyrank-stdout-XXXXXX";
    const int fd = mkstemp(path), keep = dup(STDOUT_FILENO);
    json_t *value = json_pack("{s:i}", "a", 1);
    cr_assert(fd >= 0 && keep >= 0 && dup2(fd, STDOUT_FILENO) >= 0);
    const ar_status st = ari_json_save(value, "-");
    dup2(keep, STDOUT_FILENO);
    char text[32] = {0};
    cr_expect_eq(pread(fd, text, sizeof text - 1, 0), 13);
    cr_expect_str_eq(text, "{\n  \"a\": 1\n}\n");
    cr_expect_ok(st);
    json_decref(value);
    close(fd);
    close(keep);
    unlink(path);
}

static size_t allocations_left;

static void *scarce_malloc(size_t bytes)
{
    return allocations_left == 0 || --allocations_left == 0 ? NULL : malloc(bytes);
}

/* Every allocation fails in turn, and with it all that follow. A string is left out: jansson calls one that it has no
 * room for an invalid token. */
CLAIM(no_memory_is_not_an_error_of_the_text)
{
    static const char text[] = "[1, [2.5, [], true], null, [-3, 4e2, 5, 6, 7, 8, 9, 10, 11]]";
    size_t n = 1;
    json_set_alloc_funcs(scarce_malloc, free);
    for (;; n++) {
        allocations_left = n;
        const ar_status st = parse(text);
        if (st == AR_OK)
            break;
        cr_assert_eq(st, AR_ERR_MEMORY, "allocation %zu: %s", n, ar_error_message());
        cr_assert_says("x.json");
    }
    cr_expect_gt(n, 15, "only %zu allocations", n);
    allocations_left = SIZE_MAX;
    cr_expect_eq(parse("[1 2]"), AR_ERR_FORMAT); /* and an error of the text is none of memory */
    json_set_alloc_funcs(malloc, free);
}

EVERY_CLAIM(json)
