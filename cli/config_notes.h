/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CLI_CONFIG_NOTES_H
#define ARI_CLI_CONFIG_NOTES_H

#include <jansson.h>
#include <stdio.h>

#include "anyrank/config.h"

/** A line for each key of a config.json that nobody knows, and one for those whose names were not kept: "note:
 *  config.json: key 'foo' is not known here and was ignored". On stderr, so that a report stays what it is. */
void ari_config_notes_print(FILE *to, const ar_config *c);
/** The same texts, without "note: ", as an array of strings. Gives; NULL without memory. */
json_t *ari_config_notes_json(const ar_config *c);

#endif
