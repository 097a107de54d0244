/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "anyrank/safetensors.h"
#include "anyrank/status.h"

/** Processes whole blocks of 64 bytes with the compression function of FIPS 180-4, section 6.2.2. */
typedef void ari_sha256_blocks_fn(uint32_t state[8], const unsigned char *data, size_t blocks);

/** SHA-256 (FIPS 180-4) of bytes that arrive in pieces: init, any number of updates, final. No call can fail, and
 *  nothing needs to be freed. */
typedef struct ari_sha256 {
    uint32_t state[8];
    unsigned char rest[64]; /* bytes of the unfinished block: the first (length % 64) ones are used */
    uint64_t bytes;         /* length of the message so far, below 2^61 */
    ari_sha256_blocks_fn *blocks;
} ari_sha256;
void ari_sha256_init(ari_sha256 *s);
/** data may be NULL if bytes is 0. */
void ari_sha256_update(ari_sha256 *s, const void *data, size_t bytes);
/** Writes 64 lower-case hexadecimal digits and a 0 byte; the next call is init. */
void ari_sha256_final(ari_sha256 *s, char hex[65]);
/** Length of a hash in bytes. */
enum { ARI_SHA256_BYTES = 32 };
void ari_sha256_digest(ari_sha256 *s, unsigned char digest[ARI_SHA256_BYTES]);
/** Does all three steps for bytes that are complete in memory. */
void ari_sha256_of(char hex[65], const void *data, size_t bytes);
/** Implementations of the block function: in plain C, and by the processor's instructions if it has them (otherwise the
 *  plain one again). */
ari_sha256_blocks_fn ari_sha256_blocks_portable;
ari_sha256_blocks_fn *ari_sha256_fastest(void);

/** Computes one hash over named tensors, independent of their order: for each name in byte order, SHA-256 takes the
 *  name, a 0 byte, the dtype's name, a 0 byte, the shape as "[64,256]" ("[]" for a scalar), a 0 byte and the row-major
 *  little-endian data. Errors: AR_ERR_ARG (a NULL or repeated name, missing data), AR_ERR_OVERFLOW, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_tensors_hash(char hex[65], const ar_st_tensor *tensors, size_t n);
