/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/data.h"

/* Private functions of anyrank/data.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Opens a token file; path NULL: the bundled text (bytes). The caller releases it with ari_data_close. Errors:
 *  AR_ERR_IO; AR_ERR_DATA (empty, or a size that is no multiple of the token size); AR_ERR_FORMAT (safetensors:
 *  malformed, or without the tensor in its type and shape; jsonl: the message names the malformed line); AR_ERR_ARG
 *  (the name does not show the format); AR_ERR_MEMORY. Threads: many threads may read open data. */
AR_NODISCARD ar_status ari_data_open(ar_data **out, const char *path, ar_data_format format);
/** Accepts NULL. */
void ari_data_close(ar_data *d);
/** Returns the path that was opened, also for the bundled text. Borrowed. */
const char *ari_data_path(const ar_data *d);
/** Never AR_DATA_AUTO. */
ar_data_format ari_data_format_of(const ar_data *d);
/** Returns the number of tokens. */
size_t ari_data_tokens(const ar_data *d);
/** Returns the number of rows of equal length in which the tokens come: 1, or a tensor's rows. */
size_t ari_data_rows(const ar_data *d);
/** Returns the number of documents that the data itself marks: lines of JSON, otherwise rows. */
size_t ari_data_documents(const ar_data *d);
/** Returns true if a document begins at this token. token < ari_data_tokens(d). */
bool ari_data_document_begins(const ar_data *d, size_t token);
/** Computes the SHA-256 of the file's bytes (for safetensors, of the whole file) in lower-case hexadecimal, as
 *  sha256sum prints it. Reads the whole file. Errors: AR_ERR_MEMORY, AR_ERR_INTERNAL, AR_ERR_IO. */
AR_NODISCARD ar_status ari_data_hash(const ar_data *d, char hex[65]);
/** Reads tokens [start, start + count), row after row. Errors: AR_ERR_ARG (beyond the end), AR_ERR_IO (also if the file
 *  has become shorter). */
AR_NODISCARD ar_status ari_data_read(const ar_data *d, int64_t *out, size_t start, size_t count);
/** Checks that every token is in [0, vocab). Errors: AR_ERR_DATA, naming the first token outside, its position, and the
 *  smallest sufficient vocabulary; AR_ERR_IO. */
AR_NODISCARD ar_status ari_data_check_vocab(const ar_data *d, size_t vocab);
/** Creates a loader. Borrows the data until ari_loader_destroy; copies the options. Errors: AR_ERR_ARG, AR_ERR_DATA (a
 *  token outside the vocabulary; rows shorter than one window; packed data of one document without a separator),
 *  AR_ERR_UNSUPPORTED (more than 2^32 windows), AR_ERR_OVERFLOW, AR_ERR_MEMORY. Threads: a loader belongs to one
 *  thread; create one for each rank. */
AR_NODISCARD ar_status ari_loader_create(ar_loader **out, const ar_data *d, const ar_loader_options *o);
/** Accepts NULL. */
void ari_loader_destroy(ar_loader *l);
/** Windows of an epoch. */
size_t ari_loader_windows(const ar_loader *l);
/** Returns the global batch of a step in host memory: input_ids [batch, seq], labels NULL (the ids themselves), no
 *  masks; with documents if packed. The loader owns its arrays, which are valid until the next call. Every step costs
 *  the same: one shuffle if it is in a different epoch than the previous call's. Errors: AR_ERR_ARG (step 0),
 *  AR_ERR_OVERFLOW (beyond epoch 2^32). */
AR_NODISCARD ar_status ari_loader_batch(ar_loader *l, ar_batch *out, uint64_t step);
/** Returns the windows of a step's samples, out[batch]. Errors: those of ari_loader_batch. */
AR_NODISCARD ar_status ari_loader_samples(ar_loader *l, size_t *out, uint64_t step);

AR_END_DECLS
