/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/io/text.h"

#include <stdio.h>
#include <stdlib.h>

#include "anyrank/config.h"
#include "ref/io/file.h"
#include "ref/io/foreign.h"

#define MAX_TEXT_BYTES ((size_t)1 << 32)

ar_status ari_text_load(unsigned char **gives, size_t *length, const char *path)
{
    char *bundled = NULL;
    if (path == NULL && asprintf(&bundled, "%s/text.txt", ar_data_dir()) < 0)
        return ar_error_set(AR_ERR_MEMORY, "text.txt: no memory for its path");
    const char *name = path == NULL ? bundled : path;
    unsigned char *text = NULL;
    size_t bytes = 0;
    ar_status st = ari_foreign_read_text(&text, &bytes, name, MAX_TEXT_BYTES);
    if (st == AR_OK && bytes == 0) {
        free(text);
        st = ar_error_set(AR_ERR_DATA, "%s: is empty, expected text", ARI_SHOW(name));
    }
    free(bundled);
    if (st != AR_OK)
        return st;
    *gives = text;
    *length = bytes;
    return AR_OK;
}
