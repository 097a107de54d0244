/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_BATCH_H
#define ANYRANK_BATCH_H

#include <stddef.h>
#include <stdint.h>

#define AR_IGNORE_INDEX (-100)

/** One batch on the host. Borrows its arrays. b = batch, s = seq. A sample is one row. */
typedef struct ar_batch {
    size_t batch, seq;
    const int64_t *input_ids;    /* [b, s], each in [0, vocab) */
    const int64_t *labels;       /* [b, s] or NULL: input_ids. Position s predicts labels[s+1]; AR_IGNORE_INDEX and the
                                    last position of each sample are left out */
    const uint8_t *padding_mask; /* [b, s] of 0 (masked key) and 1, or NULL */
    const float *additive_mask;  /* [mask_batch, mask_heads, s, s], or NULL; -inf masks, NaN and +inf are errors */
    size_t mask_batch;           /* b or 1 */
    size_t mask_heads;           /* heads or 1 */
    /* Where these rows stand in the global batch, whose samples data parallelism and micro-batches share out. */
    size_t global_batch; /* samples of it; 0: these rows are all of it, and the two below are not looked at */
    size_t first_sample; /* index of row 0 in it */
    size_t targets;      /* T, its target tokens: what every loss and gradient is divided by */
} ar_batch;
#endif
