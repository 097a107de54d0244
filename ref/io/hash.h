/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_REF_IO_HASH_H
#define ANYRANK_REF_IO_HASH_H

#include <stddef.h>

#include "anyrank/safetensors.h"
#include "anyrank/status.h"

/** SHA-256 (FIPS 180-4) of bytes that come in pieces: init, update any number of times, final. */
typedef struct ari_sha256 {
    void *context; /* NULL before init and after final */
} ari_sha256;
/** Errors: AR_ERR_MEMORY; AR_ERR_INTERNAL where the crypto library refuses (SHA-256 switched off, or no memory for a
 * part of it that does not say so). Empties the thread's queue of OpenSSL errors. */
AR_NODISCARD ar_status ari_sha256_init(ari_sha256 *s);
AR_NODISCARD ar_status ari_sha256_update(ari_sha256 *s, const void *data, size_t bytes);
/** Writes 64 lower-case hexadecimal digits and a 0 byte, and frees the state. */
AR_NODISCARD ar_status ari_sha256_final(ari_sha256 *s, char hex[65]);
/** Frees the state without a result, for error paths. Safe after final. */
void ari_sha256_drop(ari_sha256 *s);
/** The three in one, of bytes that are all there. Errors: those. */
AR_NODISCARD ar_status ari_sha256_of(char hex[65], const void *data, size_t bytes);

/** One hash over named tensors, independent of the order they come in: for each name in byte order, SHA-256 takes the
 *  name, a 0 byte, the dtype's name, a 0 byte, the shape as "[64,256]" ("[]" for a scalar), a 0 byte and the row-major
 *  little-endian data. Errors: AR_ERR_ARG (a NULL or repeated name, missing data), AR_ERR_OVERFLOW, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_tensors_hash(char hex[65], const ar_st_tensor *tensors, size_t n);

#endif
