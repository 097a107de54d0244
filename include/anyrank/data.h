/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_DATA_H
#define ANYRANK_DATA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "anyrank/status.h"

AR_BEGIN_DECLS

/* Training data. The global batch of a step is a function of the data, the seed and the step number alone: it does not
 * depend on ranks, parallel layout, micro-batches or earlier reads. */
typedef struct ar_data ar_data; /* an open file of tokens */

/* Format of a training data file. */
typedef enum ar_data_format {
    /* Chosen by the file name's suffix: .safetensors, .jsonl, .u16, .u32, else bytes. Names ending in .bin, .npy, .gz
     * or .zst are refused, because these suffixes do not determine the contents. */
    AR_DATA_AUTO,
    AR_DATA_BYTES,       /* each byte is a token; any file */
    AR_DATA_U16,         /* token ids as little-endian 16-bit integers, without a header */
    AR_DATA_U32,         /* token ids as little-endian 32-bit integers, without a header */
    AR_DATA_SAFETENSORS, /* a tensor `input_ids` or `tokens` of I32 or I64, [n] or [rows, s] */
    /* Each line is a JSON object and one document: either a string `text`, whose bytes are the tokens, or a list
     * `input_ids`. The documents form one row. The file is held in memory; other formats are read on demand. */
    AR_DATA_JSONL
} ar_data_format;

#define AR_NO_SEPARATOR SIZE_MAX /* no separator token */
/** Options of sample packing. A packed sample is a window of `seq` tokens that may cross the ends of documents;
 *  ar_batch.documents says which document each token belongs to, and attention, positions and predictions stay inside a
 *  document. A document that a window's end cuts continues in the next window as a separate document whose positions
 *  start at 0. Nothing is padded; only a remainder shorter than a window at the end of the data is dropped. Megatron-LM
 *  packs the same way with --reset-position-ids, --reset-attention-mask and --eod-mask-loss. */
typedef struct ar_packing {
    bool enabled;     /* false: ar_batch.documents is NULL, and no sample crosses the end of a row of the data */
    size_t separator; /* id of a token that ends a document and is its last token, in addition to the data's own
                         document ends (lines of JSON, else rows); AR_NO_SEPARATOR: none */
} ar_packing;

/* A loader cuts data into samples: consecutive windows of `seq` tokens without overlap, from the start of each row
 * (with packing: of the data); a remainder shorter than a window is dropped. Each epoch contains every window once, in
 * the order of the Fisher-Yates shuffle of (seed, epoch) (numerics.md, section 5). Step t = 1, 2, .. uses samples (t -
 * 1)*batch to t*batch - 1 of the concatenated epochs 0, 1, .., so a batch may span two epochs. */
typedef struct ar_loader ar_loader;
typedef struct ar_loader_options {
    size_t batch, seq;  /* samples of the global batch, tokens of a sample; each at least 1 */
    size_t vocab;       /* vocabulary size; larger token ids are an error; 0: not checked */
    uint64_t seed;      /* of the shuffles */
    bool in_order;      /* no shuffle: every epoch has the windows in the data's order */
    ar_packing packing; /* of documents into samples */
} ar_loader_options;

AR_END_DECLS
#endif
