/* SPDX-License-Identifier: Apache-2.0 */
/* The random streams of a model: one for each parameter's fresh values, one for each place that drops elements. Two
 * with the same key would hold the same numbers. */
#ifndef ARI_MODELS_STREAMS_H
#define ARI_MODELS_STREAMS_H

#include "anyrank/config.h"

typedef struct ari_random_stream {
    uint64_t key;
    char name[160];
} ari_random_stream;

/** Sorts by key. Errors: AR_ERR_UNSUPPORTED (two keys are equal; names both). */
AR_NODISCARD ar_status ari_streams_distinct(ari_random_stream *s, size_t n);
/** Whether all of a model's have keys of their own with this seed. Errors: that, AR_ERR_MEMORY, AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_streams_check(const ar_config *c, uint64_t seed);

#endif
