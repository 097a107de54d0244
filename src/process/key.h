/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_PROCESS_KEY_H
#define ARI_PROCESS_KEY_H

#include <stdbool.h>

#include "ref/io/hash.h"

/* The secret by which the processes of a job know each other. */
typedef struct ari_key {
    bool is_set;
    unsigned char at[ARI_SHA256_BYTES];
} ari_key;

/** The hash of ANYRANK_JOB_KEY, or of what the file that ANYRANK_JOB_KEY_FILE names holds; spaces and line ends behind
 *  it do not count. Not set where neither is. Errors: AR_ERR_ARG, saying what would be right: both, a key that can be
 *  guessed by trying, a file that others can read; AR_ERR_IO. */
AR_NODISCARD ar_status ari_key_read(ari_key *k);
/** A new one. Errors: AR_ERR_IO. */
AR_NODISCARD ar_status ari_key_make(ari_key *k);

#endif
