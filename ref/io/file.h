/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_REF_IO_FILE_H
#define ANYRANK_REF_IO_FILE_H

#include <stddef.h>

#include "ref/core/out.h"

/* Whole files in, whole files out. */

/** "FOLDER/NAME". Errors: AR_ERR_MEMORY. Gives; free, NULL after an error. */
AR_NODISCARD ar_status ari_file_path(char **gives, const char *folder, const char *name);

/** Opens a regular file for reading and tells its size. A directory, a pipe or a device is refused instead of waited
 *  for. Errors: AR_ERR_IO. The caller closes *fd. */
AR_NODISCARD ar_status ari_file_open(int *fd, size_t *bytes, const char *path);

/** Reads exactly `bytes` bytes from `offset`. Errors: AR_ERR_IO, also where the file became shorter meanwhile. */
AR_NODISCARD ar_status ari_file_pread(int fd, void *out, size_t bytes, size_t offset, const char *path);

/** Maps all `bytes` bytes for reading. Errors: AR_ERR_IO, also where the file has another size by now;
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_file_map(void **map, int fd, size_t bytes, const char *path);

/** Reads a whole regular file of at most `limit` bytes; a 0 byte follows the contents. Errors: AR_ERR_IO,
 *  AR_ERR_OVERFLOW (longer than `limit`), AR_ERR_MEMORY. Gives; free with free(). */
AR_NODISCARD ar_status ari_file_read(unsigned char **gives, size_t *length, const char *path, size_t limit);

/** Writes data that is whole in memory as one file of ref/core/out.h; path "-" is stdout. */
AR_NODISCARD ar_status ari_file_write(const char *path, const void *data, size_t bytes);

#endif
