/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "support/match.h"

/* What the tests of whole steps train on. */
enum { BATCHES_STEPS = 4, BATCHES_TOKENS = 64 };

/* One batch a step, in memory that the next call takes again. uneven: sample k has k targets, the last of which is its
 * last token; otherwise each has all. */
static inline ar_batch *batches(size_t samples, size_t seq, bool uneven)
{
    static int64_t ids[BATCHES_STEPS][BATCHES_TOKENS], labels[BATCHES_STEPS][BATCHES_TOKENS];
    static ar_batch b[BATCHES_STEPS];
    for (size_t step = 0; step < BATCHES_STEPS; step++) {
        for (size_t i = 0; i < samples * seq; i++) {
            const size_t sample = i / seq, position = i % seq;
            ids[step][i] = (int64_t)((i * 7 + step * 3 + (uneven ? sample : 0)) % 11);
            labels[step][i] = position + sample >= seq ? ids[step][i] : AR_IGNORE_INDEX;
        }
        b[step] = (ar_batch){.batch = samples, .seq = seq, .input_ids = ids[step]};
        b[step].labels = uneven ? labels[step] : NULL;
    }
    return b;
}

/* Heads that `kv` ranks share. */
static inline ar_config config_of(ar_arch arch, size_t layers, size_t kv)
{
    ar_config c = match_config(arch, layers);
    c.kv_heads = kv;
    return c;
}
