/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "ref/core/atomic_file.h"
#include "ref/core/size.h"

/* Reading and writing of files in one piece. */

/** Joins "FOLDER/NAME". Release *out with free(); NULL after an error. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_file_path(char **out, const char *folder, const char *name);

/** Does the same in an arena; folder "": NAME alone. */
AR_NODISCARD ar_status ari_arena_path(ari_arena *a, char **out, const char *folder, const char *name);

/** Returns the path of a model's config: config.json in a folder, or `path` itself. Release *out with free(). Errors:
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_config_path(char **out, const char *path);

/** True if a folder exists there, perhaps by way of a link. */
bool ari_is_folder(const char *path);
/** Creates a folder and its missing parents. Errors: AR_ERR_IO, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_folder_make(const char *path);
/** Creates a folder NAME-XXXXXX for temporary files in TMPDIR or /tmp and writes its path to path[0, cap). The caller
 *  removes the folder. After an error path is "". Errors: AR_ERR_IO. */
AR_NODISCARD ar_status ari_folder_make_temporary(char *path, size_t cap, const char *name);
/** Reports whether a folder contains this file. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_file_is_in(bool *exists, const char *folder, const char *name);

/** Opens a regular file for reading and gets its size. A directory, pipe or device is refused instead of blocking.
 *  Errors: AR_ERR_IO. The caller closes *fd. */
AR_NODISCARD ar_status ari_file_open(int *fd, size_t *bytes, const char *path);
/** Closes *fd, unless it is -1. */
void ari_file_close(const int *fd);

/** Reads exactly `bytes` bytes from `offset`. Errors: AR_ERR_IO, also if the file has become shorter. */
AR_NODISCARD ar_status ari_file_pread(int fd, void *out, size_t bytes, size_t offset, const char *path);

/** Maps all `bytes` bytes for reading. Errors: AR_ERR_IO, also if the file's size has changed; AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_file_map(void **map, int fd, size_t bytes, const char *path);
/** Drops mapped pages that have been read. They are read from the file again if needed. */
void ari_pages_drop(const void *data, size_t bytes);

/** Reads a whole regular file of at most `limit` bytes; a 0 byte follows the contents. Release *out with free().
 *  Errors: AR_ERR_IO, AR_ERR_OVERFLOW (longer than `limit`), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_file_read(unsigned char **out, size_t *length, const char *path, size_t limit);

/** Writes data that is complete in memory as one file through ref/core/atomic_file.h; path "-" is stdout. */
AR_NODISCARD ar_status ari_file_write(const char *path, const void *data, size_t bytes);

/* --- files of other programs -------------------------------------------------------------------------------------- */

/* Files and folders of other programs that look like the requested one but have a different format. They are recognised
 * by content and refused by their format's name, with the lines of Python that convert them. */

/* The purpose for which a file was opened. */
typedef enum ari_requested {
    ARI_WANT_TENSORS, /* a safetensors file */
    ARI_WANT_TOKENS,  /* bytes, u16 or u32, contiguous */
    ARI_WANT_TEXT     /* JSON, a mapping, a text */
} ari_requested;

#define ARI_FORMAT_HEAD 64 /* number of bytes that identify a format */
/** Refuses a file that begins like one of NumPy, PyTorch, GGUF, HDF5, Arrow, Parquet, gzip or zstd. head: the file's
 *  first n bytes, at most ARI_FORMAT_HEAD. Errors: AR_ERR_FORMAT, which names the format and how to convert it. */
AR_NODISCARD ar_status ari_unsupported_format_check(const char *path, const void *head, size_t n,
                                                    ari_requested requested);
enum { ARI_FORMAT_CONVERSION = 1536 };
/** Does the same for an open file of `bytes` bytes. Errors: also AR_ERR_IO. */
AR_NODISCARD ar_status ari_unsupported_format_check_file(int fd, size_t bytes, const char *path,
                                                         ari_requested requested);

/** Does what ari_file_read does for a text file: JSON, a mapping, or a text to train on. Errors: also AR_ERR_FORMAT, as
 *  above. */
AR_NODISCARD ar_status ari_file_read_text(unsigned char **out, size_t *length, const char *path, size_t limit);

/** Refuses a folder whose model is in files that are not supported: PyTorch's, an adapter's, shards without their
 *  index, torch.distributed.checkpoint, DeepSpeed, Megatron, GGUF, TensorFlow, Flax. Such files next to
 *  model.safetensors or its index are ignored. AR_OK: there are none.
 *  Errors: AR_ERR_FORMAT, with the file, its format and how to convert it; AR_ERR_IO, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_unsupported_format_check_folder(const char *folder);

/* --- bundled data ------------------------------------------------------------------------------------------------- */

/* Names that ar_model_path resolves, ending with NULL. The first three models are small; the others have a config.json
 * but no weights. */
extern const char *const ari_model_names[];

/** Checks that the data directory exists. Errors: AR_ERR_NOT_FOUND, which names every folder that was searched. */
AR_NODISCARD ar_status ari_data_dir_check(void);
/** Reads the training text: `path`, or text.txt in the data directory if it is NULL. One byte is one token, so any file
 *  will do. Release *out with free(). Errors: AR_ERR_IO, AR_ERR_MEMORY, AR_ERR_DATA (empty), AR_ERR_OVERFLOW (more than
 *  4 GiB), those of ari_data_dir_check. */
AR_NODISCARD ar_status ari_text_load(unsigned char **out, size_t *length, const char *path);
