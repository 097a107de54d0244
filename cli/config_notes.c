/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/config_notes.h"

enum { NOTE_TEXT = 160 };

static size_t notes_of(const ar_config *c)
{
    return c->unknown_keys <= AR_CONFIG_NOTES ? c->unknown_keys : AR_CONFIG_NOTES + 1;
}

static const char *note_text(char out[NOTE_TEXT], const ar_config *c, size_t i)
{
    const size_t more = c->unknown_keys - i;
    if (i < AR_CONFIG_NOTES)
        snprintf(out, NOTE_TEXT, "config.json: key '%s' is not known here and was ignored", c->unknown[i]);
    else
        snprintf(out, NOTE_TEXT, "config.json: %zu more key%s not known here and %s ignored", more,
                 more == 1 ? " is" : "s are", more == 1 ? "was" : "were");
    return out;
}

void ari_config_notes_print(FILE *to, const ar_config *c)
{
    char text[NOTE_TEXT];
    for (size_t i = 0; i < notes_of(c); i++)
        fprintf(to, "note: %s\n", note_text(text, c, i));
}

json_t *ari_config_notes_json(const ar_config *c)
{
    char text[NOTE_TEXT];
    json_t *notes = json_array();
    for (size_t i = 0; i < notes_of(c); i++)
        json_array_append_new(notes, json_string(note_text(text, c, i)));
    if (json_array_size(notes) == notes_of(c))
        return notes;
    json_decref(notes);
    return NULL;
}
