/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_REF_IO_TEXT_H
#define ANYRANK_REF_IO_TEXT_H

#include <stddef.h>

#include "anyrank/status.h"

/** Reads the bytes to train on: `path`, or text.txt in the data directory where it is NULL. One byte is one token, so
 *  any file will do. Errors: AR_ERR_IO, AR_ERR_MEMORY, AR_ERR_DATA (empty), AR_ERR_OVERFLOW (more than 4 GiB). Gives;
 *  free with free(). */
AR_NODISCARD ar_status ari_text_load(unsigned char **gives, size_t *length, const char *path);

#endif
