/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_IO_JSON_TEXT_H
#define ARI_IO_JSON_TEXT_H

#include <jansson.h>

/** A JSON string of a text that may hold any bytes, as the names of folders do: what is not UTF-8 becomes '?', byte by
 *  byte. (jansson makes no string of it, and an object that lacks one is silently not made.) Gives; NULL without
 *  memory. */
json_t *ari_json_text(const char *text);

#endif
