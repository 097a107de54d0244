/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_REF_IO_FILE_H
#define ANYRANK_REF_IO_FILE_H

#include <stdbool.h>
#include <stddef.h>

#include "anyrank/status.h"

/* Whole files in, whole files out. Everything the project writes appears by rename, so a reader never sees half a file
 * and a failure leaves what was there before. */

/** Opens a regular file for reading and tells its size. A directory, a pipe or a device is refused instead of waited
 *  for. Errors: AR_ERR_IO. The caller closes *fd. */
AR_NODISCARD ar_status ari_file_open(int *fd, size_t *bytes, const char *path);

/** Reads exactly `bytes` bytes from `offset`. Errors: AR_ERR_IO, also where the file became shorter meanwhile. */
AR_NODISCARD ar_status ari_file_pread(int fd, void *out, size_t bytes, size_t offset, const char *path);

/** Reads a whole regular file of at most `limit` bytes; a 0 byte follows the contents. Errors: AR_ERR_IO,
 *  AR_ERR_OVERFLOW (longer than `limit`), AR_ERR_MEMORY. Gives; free with free(). */
AR_NODISCARD ar_status ari_file_read(unsigned char **gives, size_t *length, const char *path, size_t limit);

/** A file being written without a name in the folder of its final one, or under a temporary name where the file system
 *  has no unnamed files (or /proc is missing). However the process ends, an unnamed file leaves nothing behind. A path
 *  that names a device or a pipe is written directly: replacing /dev/null by a file would be worse than no atomicity.
 */
typedef struct ari_out ari_out;
AR_NODISCARD ar_status ari_out_create(ari_out **gives, const char *path);
/** Whether ari_out_create would succeed now, so that long work does not end in vain. A device or a pipe is not opened.
 *  Errors: as ari_out_create. */
AR_NODISCARD ar_status ari_out_check(const char *path);
AR_NODISCARD ar_status ari_out_write(ari_out *o, const void *data, size_t bytes);
/** Syncs, closes and names the file, in place of what had its name. On failure nothing is left behind. Frees `o` in
 *  both cases. */
AR_NODISCARD ar_status ari_out_commit(ari_out *o);
/** The same for files that belong together: all are synced before the first gets its name, so that a full or broken
 *  disk leaves every old file. Only a failure to rename can still part them. Frees every list[i] in both cases; NULLs
 *  are passed over. */
AR_NODISCARD ar_status ari_out_commit_all(ari_out *const *list, size_t n);
/** Closes and removes the file. Accepts NULL. */
void ari_out_discard(ari_out *o);

/** The three steps above for data that is whole in memory; path "-" is stdout. */
AR_NODISCARD ar_status ari_file_write(const char *path, const void *data, size_t bytes);

/** `text` for a message: at most cap - 1 bytes, control characters as '?', an ellipsis where it was cut. Returns
 *  `out`. Names in files of others may hold anything, terminal escapes included. */
const char *ari_printable(char *out, size_t cap, const char *text);
#define ARI_PRINTABLE 160
/** The same as an expression, in storage that lives to the end of the enclosing block. */
#define ARI_SHOW(text) ari_printable((char[ARI_PRINTABLE]){0}, ARI_PRINTABLE, (text))

#endif
