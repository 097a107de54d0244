/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_WRITER_DUMP_FOLDER_H
#define ARI_VERIFY_WRITER_DUMP_FOLDER_H

#include "anyrank/parallel.h"

/* Folders that a dump may take: what is not an earlier dump's is somebody's, and stays. */

/** The folder itself, if it is not there yet; its parent is. Errors: AR_ERR_IO. */
AR_NODISCARD ar_status ari_folder_make(const char *path);

/** Refuses a folder that holds anything but the files of an earlier dump of ranks. One that is not there is fine.
 *  Errors: AR_ERR_IO (names what is in the way). */
AR_NODISCARD ar_status ari_dump_folder_check(const char *folder);
/** Removes a folder of an earlier dump of ranks; one that is not there is fine. Errors: as above. */
AR_NODISCARD ar_status ari_dump_folder_remove(const char *folder);

/* A check's folder: a file of the reference, one of what it may differ by, and a folder of ranks for each layout. */
#define ARI_DUMP_REFERENCE "reference.safetensors"
#define ARI_DUMP_ALLOWED "allowed.safetensors"
/** Refuses a folder that holds anything but an earlier check's dump. One that is not there is fine. Errors:
 *  AR_ERR_IO. */
AR_NODISCARD ar_status ari_dump_check_folder_check(const char *folder);
/** Makes it, and removes what an earlier check left in it. Errors: as above. */
AR_NODISCARD ar_status ari_dump_check_folder_clear(const char *folder);
/** "tp2-sp", "dp2-tp2-zero1", "tp1": ar_parallel_text as a file's name. */
void ari_dump_layout_name(char *out, size_t cap, const ar_parallel *p);

#endif
