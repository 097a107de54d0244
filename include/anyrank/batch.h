/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_BATCH_H
#define ANYRANK_BATCH_H

#include <stddef.h>
#include <stdint.h>

#define AR_IGNORE_INDEX (-100)
#define AR_SAMPLE_DIMS 3

/** One batch on the host. Borrows its arrays. b = batch, s = seq. A sample is one row. */
typedef struct ar_batch {
    size_t batch, seq;
    const int64_t *input_ids;    /* [b, s], each in [0, vocab) */
    const int64_t *labels;       /* [b, s] or NULL: input_ids. Position s predicts labels[s+1]; AR_IGNORE_INDEX and the
                                    last position of each sample are left out. Of a classifier (loss.h): the classes,
                                    one for each row of logits, not shifted */
    const int64_t *position_ids; /* [b, s], each in [0, the model's positions), or NULL: 0 .. s-1 in every row. Of
                                    rotary and learned positions; masks and windows go by the place in the row */
    const uint8_t *padding_mask; /* [b, s] of 0 (masked key) and 1, or NULL */
    const float *additive_mask;  /* [mask_batch, mask_heads, s, s], or NULL; -inf masks, NaN and +inf are errors */
    size_t mask_batch;           /* b or 1 */
    size_t mask_heads;           /* heads or 1 */
    /* Where these rows stand in the global batch, whose samples data parallelism and micro-batches share out. */
    size_t global_batch; /* samples of it; 0: these rows are all of it, and the two below are not looked at */
    size_t first_sample; /* index of row 0 in it */
    size_t targets;      /* T, its target tokens: what every loss and gradient is divided by */
    /* Of a module whose input is numbers, not ids; zero elsewhere. */
    const float *input; /* [b, the shape of a sample], or NULL */
    int sample_ndim;    /* 1 .. AR_SAMPLE_DIMS */
    size_t sample_shape[AR_SAMPLE_DIMS];
    const float *target; /* [b, target_width]: what a regression should give, or NULL */
    size_t target_width;
} ar_batch;
#endif
