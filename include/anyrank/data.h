/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_DATA_H
#define ANYRANK_DATA_H

#include <stdbool.h>
#include <stdint.h>

#include "anyrank/batch.h"
#include "anyrank/status.h"

AR_BEGIN_DECLS

/* Tokens to train on, and the global batch of any step of a run: a function of the data, the seed and the step alone,
 * never of ranks, layouts, micro-batches or of what was read before. */
typedef struct ar_data ar_data;

typedef enum ar_data_format {
    AR_DATA_AUTO, /* by the end of the name: .safetensors, .jsonl, .u16, .u32; anything else: bytes, but for .bin, .npy,
                      .gz and .zst, which do not say what they hold and are refused */
    AR_DATA_BYTES, /* one byte is one token: any file will do */
    AR_DATA_U16,   /* little-endian, without a header */
    AR_DATA_U32,
    AR_DATA_SAFETENSORS, /* a tensor `input_ids` or `tokens`, I32 or I64: [n], or [rows, s] */
    AR_DATA_JSONL        /* an object a line, with a string `text`, whose bytes are tokens, or a list `input_ids`: a
                            document each, one row in all. Held in memory; the other formats are read as needed */
} ar_data_format;

/** "auto", "bytes", "u16", "u32", "safetensors", "jsonl". Static storage. */
const char *ar_data_format_name(ar_data_format format);

/** Opens a token file; path NULL: the bundled text (bytes). Gives; ar_data_close. Errors: AR_ERR_IO; AR_ERR_DATA
 * (empty, or a size that is no multiple of the tokens'); AR_ERR_FORMAT (safetensors: malformed, without the tensor, or
 * with one of another type or shape; jsonl: a line that is no such object, which is named); AR_ERR_ARG (a name that
 * does not tell the format); AR_ERR_MEMORY. Threads: open data may be read by many. */
AR_NODISCARD ar_status ar_data_open(ar_data **gives, const char *path, ar_data_format format);
/** Accepts NULL. */
void ar_data_close(ar_data *d);
/** The path that was opened (the bundled text's own). Borrowed. */
const char *ar_data_path(const ar_data *d);
/** Never AR_DATA_AUTO. */
ar_data_format ar_data_format_of(const ar_data *d);
/** All tokens, and in how many rows of the same length they come: 1, or a tensor's rows. */
size_t ar_data_tokens(const ar_data *d);
size_t ar_data_rows(const ar_data *d);
/** Documents of which the data itself tells: the lines of JSON, else the rows. */
size_t ar_data_documents(const ar_data *d);
/** True if one of them begins at this token. token < ar_data_tokens(d). */
bool ar_data_document_begins(const ar_data *d, size_t token);
/** SHA-256 of the file's bytes (of a safetensors file: all of it), lower-case hexadecimal; what sha256sum prints.
 *  Reads the whole file. Errors: AR_ERR_MEMORY, AR_ERR_INTERNAL, AR_ERR_IO. */
AR_NODISCARD ar_status ar_data_hash(const ar_data *d, char hex[65]);
/** Tokens [start, start + count), row after row. Errors: AR_ERR_ARG (beyond the end), AR_ERR_IO (also where the file
 *  has become shorter). */
AR_NODISCARD ar_status ar_data_read(const ar_data *d, int64_t *out, size_t start, size_t count);
/** Checks that every token is in [0, vocab). Errors: AR_ERR_DATA, naming the first that is not, its position, and the
 *  smallest vocabulary that has them all; AR_ERR_IO. */
AR_NODISCARD ar_status ar_data_check_vocab(const ar_data *d, size_t vocab);

#define AR_NO_SEPARATOR SIZE_MAX
/** Packed samples: windows run on over the ends of documents, each sample says which documents it holds
 *  (ar_batch.documents), and attention, positions and predictions keep to them. A document that a window's end cuts
 *  goes on in the next window as a document of its own, whose positions begin at 0; nothing is padded, and nothing is
 *  left out but what is too short for a window at the end of the data. So Megatron-LM packs with --reset-position-ids,
 *  --reset-attention-mask and --eod-mask-loss. */
typedef struct ar_packing {
    bool on;          /* false: samples know of no documents, and none crosses the end of a row of the data */
    size_t separator; /* a token that ends a document, as its last token, besides those of which the data itself tells
                         (ar_data_documents); AR_NO_SEPARATOR: there is none */
} ar_packing;

/* Samples are the data's windows of `seq` tokens, one after another without overlap from the start of each row (packed:
 * of the data); the last tokens of a row, too few for a window, are left out. An epoch is all windows once, in an order
 * of its own: the Fisher-Yates shuffle of (seed, epoch), numerics.md, section 5. The batch of step t = 1, 2, .. is
 * samples (t - 1)*batch .. t*batch - 1 of the epochs 0, 1, .. one after another, so a batch may hold the end of one and
 * the start of the next. */
typedef struct ar_loader ar_loader;
typedef struct ar_loader_options {
    size_t batch, seq; /* samples of the global batch, tokens of a sample; from 1 */
    size_t vocab;      /* checked; 0: not */
    uint64_t seed;
    bool in_order; /* no shuffle: every epoch has the windows in the data's order */
    ar_packing packing;
} ar_loader_options;
/** Borrows the data until ar_loader_destroy; copies the options. Gives. Errors: AR_ERR_ARG, AR_ERR_DATA (a token
 *  outside the vocabulary; rows shorter than one window; packed data of one document without a separator),
 *  AR_ERR_UNSUPPORTED (more than 2^32 windows), AR_ERR_OVERFLOW, AR_ERR_MEMORY. Threads: a loader belongs to one; make
 *  one for each rank. */
AR_NODISCARD ar_status ar_loader_create(ar_loader **gives, const ar_data *d, const ar_loader_options *o);
/** Accepts NULL. */
void ar_loader_destroy(ar_loader *l);
/** Windows of an epoch. */
size_t ar_loader_windows(const ar_loader *l);
/** The global batch of a step (host): input_ids of [batch, seq], labels NULL (the ids themselves), no masks; packed:
 *  documents. Its arrays are the loader's, valid until the next call. Any step costs the same: one shuffle where it
 *  lies in another epoch than the last call's. Errors: AR_ERR_ARG (step 0), AR_ERR_OVERFLOW (beyond epoch 2^32). */
AR_NODISCARD ar_status ar_loader_batch(ar_loader *l, ar_batch *out, uint64_t step);
/** Which windows these samples are: out[batch]. Errors: as ar_loader_batch. */
AR_NODISCARD ar_status ar_loader_samples(ar_loader *l, size_t *out, uint64_t step);

AR_END_DECLS
#endif
