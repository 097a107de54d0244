/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "ref/core/size.h"
#include "ref/core/text.h"

/* Writes files completely or not at all. Every file of the project appears by a rename, so readers never see a partial
 * file, and a failure keeps the old file. */

/** File being written without a name in the folder of its final one, or under a temporary name if the file system
 *  has no unnamed files (or /proc is missing). However the process ends, an unnamed file leaves nothing behind. A
 *  path that names a device or a pipe is written directly: replacing /dev/null by a file would be worse than a lack
 *  of atomicity. */
typedef struct ari_atomic_file ari_atomic_file;
AR_NODISCARD ar_status ari_atomic_file_create(ari_atomic_file **out, const char *path);
/** Checks that ari_atomic_file_create would succeed now, so that long work is not done in vain. A device or a pipe is
 *  not opened. Errors: as ari_atomic_file_create. */
AR_NODISCARD ar_status ari_atomic_file_check(const char *path);
AR_NODISCARD ar_status ari_atomic_file_write(ari_atomic_file *o, const void *data, size_t bytes);
/** Returns a stream that continues after the last ari_atomic_file_write; write nothing else until it is closed. Errors:
 *  AR_ERR_IO. */
AR_NODISCARD ar_status ari_atomic_file_stream(FILE **out, const ari_atomic_file *o);
/** Ends the stream in any case. Errors: AR_ERR_IO if any written data was lost. */
AR_NODISCARD ar_status ari_atomic_file_stream_end(FILE *f, const ari_atomic_file *o);
/** Syncs, closes and names the file, replacing any file of that name. On failure nothing is left behind. Afterwards `o`
 *  can only be discarded. */
AR_NODISCARD ar_status ari_atomic_file_commit(ari_atomic_file *o);
/** Does the same for files that belong together: all are synced before the first one gets its name, so a full or broken
 *  disk leaves every old file. Only a failed rename can still separate them. Frees every list[i] in either case; NULLs
 *  are skipped. */
AR_NODISCARD ar_status ari_atomic_file_commit_all(ari_atomic_file *const *list, size_t n);
/** Closes and removes the file. Accepts NULL. */
void ari_atomic_file_discard(ari_atomic_file *o);
ARI_OWNER(ari_atomic_file, ari_atomic_file_discard)

/** Sets and returns AR_ERR_IO, or AR_ERR_MEMORY if that is the reason: "PATH: cannot ACTION: REASON" with the reason
 *  from errno. */
ar_status ari_io_fail(const char *action, const char *path);

/* Linux transfers at most 0x7ffff000 bytes per call; a smaller limit keeps the arithmetic away from SSIZE_MAX. */
#define ARI_TRANSFER_BYTES ((size_t)1 << 30)
