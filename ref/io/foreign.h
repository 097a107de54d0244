/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_IO_FOREIGN_H
#define ARI_IO_FOREIGN_H

#include <stddef.h>

#include "anyrank/status.h"

/* Files and folders of other programs, that look like what is asked for and are something else: recognised by what they
 * are, refused by that name, with the lines of Python that convert them. */

/* What a file was opened for. */
typedef enum ari_wanted {
    ARI_WANT_TENSORS, /* a safetensors file */
    ARI_WANT_TOKENS,  /* bytes, u16 or u32, one after the other */
    ARI_WANT_TEXT     /* JSON, a mapping, a text */
} ari_wanted;

#define ARI_FOREIGN_HEAD 64 /* bytes by which a file is recognised */
/** Refuses a file that begins as one of NumPy, PyTorch, GGUF, HDF5, Arrow, Parquet, gzip or zstd does. head: its first
 * n bytes, ARI_FOREIGN_HEAD if it has as many. Errors: AR_ERR_FORMAT, with what it is and how to convert it. */
AR_NODISCARD ar_status ari_foreign_refuse(const char *path, const void *head, size_t n, ari_wanted wanted);
/** The same of an open file of `bytes` bytes. Errors: also AR_ERR_IO. */
AR_NODISCARD ar_status ari_foreign_refuse_file(int fd, size_t bytes, const char *path, ari_wanted wanted);

/** ari_file_read of a text: JSON, a mapping, a text to train on. Errors: also AR_ERR_FORMAT, as above. */
AR_NODISCARD ar_status ari_foreign_read_text(unsigned char **gives, size_t *length, const char *path, size_t limit);

/** Refuses a folder that holds a model's tensors in files that are not read: of PyTorch, of an adapter, shards without
 *  their index, torch.distributed.checkpoint, DeepSpeed, Megatron, GGUF, TensorFlow, Flax. Files beside
 *  model.safetensors are no matter: ask where there is neither it nor its index. AR_OK: there is none of these.
 *  Errors: AR_ERR_FORMAT, with the file, what it is and how to convert it; AR_ERR_IO, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_foreign_refuse_folder(const char *folder);

#endif
