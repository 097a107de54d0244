/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

#include "ref/core/float_bits.h"

/* Numbers in a row's digest. Probabilities of more than AR_SCORES_WHOLE keys, and their gradients, are compared by
 * digests of their rows. */
enum { ARI_DIGEST = 2 };
#define ARI_DIGESTED "_rows" /* suffix of the name of a digested tensor */

/* Returns the term that element `key` adds to the digest of its row; +0 adds 0. It is the finaliser of MurmurHash3
 * (Appleby 2011). */
ARI_FN uint64_t ari_digest_term(float x, uint64_t key)
{
    const uint32_t bits = ari_bits32(x);
    uint64_t h = (key + 1) << 32 | bits;
    h = (h ^ h >> 33) * UINT64_C(0xff51afd7ed558ccd);
    h = (h ^ h >> 33) * UINT64_C(0xc4ceb9fe1a85ec53);
    return bits == 0 ? 0 : h ^ h >> 33;
}

/* Returns half i of a digest as a number that fp32 represents exactly: 24 of 48 bits. */
ARI_FN float ari_digest_number(uint64_t digest, int i)
{
    return (float)(digest >> (i == 0 ? 40 : 16) & 0xffffff);
}
