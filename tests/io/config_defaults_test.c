/* SPDX-License-Identifier: Apache-2.0 */
/* What a config.json leaves out is what transformers' own class has. tests/golden/defaults.json holds the keys of files
 * that say sizes alone, beside all that transformers makes of them: any of these, said as well, changes nothing. */
#include <jansson.h>

#include "anyrank/config.h"
#include "tests/support/test.h"

/* The model of an object; what is ignored with a note is no part of it. */
static ar_config read(const json_t *object, const char *called)
{
    OWNED(free) char *text = json_dumps(object, 0);
    ar_config c;
    memset(&c, 0, sizeof c);
    cr_assert_eq(ar_config_parse(&c, text, strlen(text), "x/config.json"), AR_OK, "%s: %s", called, ar_error_message());
    c.config_dropout = 0.0;
    c.unknown_keys = 0;
    memset(c.unknown, 0, sizeof c.unknown);
    return c;
}

Test(config_defaults, every_key_that_is_left_out_has_the_value_of_transformers)
{
    json_error_t error;
    json_t *all = json_load_file(TEST_GOLDEN_DIR "/defaults.json", 0, &error);
    cr_assert_not_null(all, "%s", error.text);
    json_t *configs = json_object_get(all, "configs"), *one, *value;
    size_t i, keys = 0;
    const char *key;
    json_array_foreach(configs, i, one)
    {
        const json_t *stated = json_object_get(one, "stated");
        const char *type = json_string_value(json_object_get(stated, "model_type"));
        const ar_config expected = read(stated, type);
        json_object_foreach(json_object_get(one, "full"), key, value)
        {
            json_t *more = json_copy((json_t *)(uintptr_t)stated);
            cr_assert_eq(json_object_set(more, key, value), 0);
            const ar_config c = read(more, key);
            cr_expect(memcmp(&c, &expected, sizeof c) == 0, "%s: '%s' has another default", type, key);
            json_decref(more);
            keys++;
        }
    }
    cr_expect(i >= 12 && keys >= 400, "%zu files, %zu keys", i, keys);
    json_decref(all);
}
