/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/io/json_text.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static bool continues(unsigned char c)
{
    return (c & 0xc0u) == 0x80u;
}

/* Bytes of the UTF-8 character at s, which ends with a 0; 0 if there is none. The second byte of some is restricted: no
 * overlong forms, no surrogates, nothing above U+10FFFF. */
static size_t character(const unsigned char *s)
{
    if (s[0] < 0x80)
        return 1;
    if (s[0] < 0xc2 || s[0] > 0xf4 || !continues(s[1]))
        return 0;
    if (s[0] < 0xe0)
        return 2;
    if ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] > 0x9f) || (s[0] == 0xf0 && s[1] < 0x90) ||
        (s[0] == 0xf4 && s[1] > 0x8f) || !continues(s[2]))
        return 0;
    if (s[0] < 0xf0)
        return 3;
    return continues(s[3]) ? 4 : 0;
}

json_t *ari_json_text(const char *text)
{
    char *clean = strdup(text);
    if (clean == NULL)
        return NULL;
    for (size_t i = 0; clean[i] != '\0';) {
        const size_t n = character((const unsigned char *)clean + i);
        if (n == 0)
            clean[i] = '?';
        i += n == 0 ? 1 : n;
    }
    json_t *o = json_string(clean);
    free(clean);
    return o;
}
