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

#define AR_NO_SEPARATOR SIZE_MAX
/** Packed samples: windows run on over the ends of documents, each sample says which documents it holds
 *  (ar_batch.documents), and attention, positions and predictions keep to them. A document that a window's end cuts
 *  goes on in the next window as a document of its own, whose positions begin at 0; nothing is padded, and nothing is
 *  left out but what is too short for a window at the end of the data. So Megatron-LM packs with --reset-position-ids,
 *  --reset-attention-mask and --eod-mask-loss. */
typedef struct ar_packing {
    bool on;          /* false: samples know of no documents, and none crosses the end of a row of the data */
    size_t separator; /* a token that ends a document, as its last token, besides those of which the data itself tells
                         (ari_data_documents); AR_NO_SEPARATOR: there is none */
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

AR_END_DECLS
#endif
