/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_DIAGNOSE_EXPLAIN_SAMPLE_H
#define ARI_VERIFY_DIAGNOSE_EXPLAIN_SAMPLE_H

#include "anyrank/dump.h"

/* Every n-th index of a tensor's dimensions as a tensor of its own. Blocks, heads, shards and their order stay what
 * they are, only smaller, and so does every rank's part: a part's box is that of the sampled elements in it. */
typedef struct ari_sample {
    ar_dump_tensor tensor;
    ar_dump_part *part;
    ar_dump_box *box;
} ari_sample;

/** Of each dimension which index is taken, 1: every one, so that at most `most` elements are left. The largest
 * dimensions are thinned first, those of equal size alike, by powers of two. */
void ari_sample_steps(size_t *step, const ar_dump_tensor *t, size_t most);
/** Elements that are left. */
size_t ari_sample_count(const size_t *step, const ar_dump_tensor *t);
/** Borrows the tensor, which has parts. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_sample_init(ari_sample *s, const ar_dump_tensor *t, const size_t *step);
void ari_sample_fini(ari_sample *s);

#endif
