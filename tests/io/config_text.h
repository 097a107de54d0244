/* SPDX-License-Identifier: Apache-2.0 */
/* Configs of a few keys, which the tests change one at a time. In these texts ' stands for ". */
#pragma once

#include "anyrank/config.h"
#include "support/quoted.h"
#include "support/together.h"

/* The object `base` with the members `more`, of which null may be spelled 'removed': the key is not there. */
static inline ar_status config_parse(ar_config *c, const char *base, const char *more)
{
    char members[2000];
    const char *key;
    json_t *value;
    void *next;
    snprintf(members, sizeof members, "{%s}", more);
    json_t *o = quoted_json(base), *change = quoted_json(members);
    cr_assert_eq(json_object_update(o, change), 0);
    json_object_foreach_safe(o, next, key, value)
    {
        if (json_is_string(value) && strcmp(json_string_value(value), "removed") == 0)
            json_object_del(o, key);
    }
    OWNED(free) char *text = json_dumps(o, 0);
    json_decref(o);
    json_decref(change);
    ar_error_clear();
    return ar_config_parse(c, text, strlen(text), "x/config.json");
}

static inline ar_config config_read(const char *base, const char *more)
{
    ar_config c;
    cr_assert_eq(config_parse(&c, base, more), AR_OK, "%s: %s", more, ar_error_message());
    return c;
}

typedef struct refused_config {
    const char *base, *more, *says; /* says NULL: the key that `more` begins with */
} refused_config;

/* The message says the file too, and the config stays as it was. */
static inline void config_refused(const char *base, const char *more, const char *says)
{
    ar_config c, before;
    char key[64];
    memset(&c, 0x5a, sizeof c);
    memset(&before, 0x5a, sizeof before);
    snprintf(key, sizeof key, "%.*s", (int)strcspn(more, ":"), more);
    cr_expect_eq(config_parse(&c, base, more), AR_ERR_CONFIG, "not refused: %s with %s", base, more);
    cr_expect(error_says(says ? says : key) && error_says("x/config.json"), "%s: %s", more, ar_error_message());
    cr_expect_eq(memcmp(&c, &before, sizeof c), 0, "%s wrote", more);
}

static inline void configs_refused(const refused_config *cases, size_t n)
{
    for (size_t i = 0; i < n; i++)
        config_refused(cases[i].base, cases[i].more, cases[i].says);
}

/* Each of the values that an object lists for each key, alone: refused by the key's name, or accepted. */
static inline void config_each(const char *base, const char *lists, bool refused)
{
    json_t *all = quoted_json(lists), *values, *value;
    const char *key;
    size_t i;
    json_object_foreach(all, key, values)
    {
        json_array_foreach(values, i, value)
        {
            OWNED(free) char *text = json_dumps(value, JSON_ENCODE_ANY);
            char more[400];
            snprintf(more, sizeof more, "'%s':%s", key, text);
            if (refused)
                config_refused(base, more, NULL);
            else
                config_read(base, more);
        }
    }
    json_decref(all);
}
