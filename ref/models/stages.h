/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/arch.h"
#include "anyrank/parallel.h"

/** Checks a layout's stages, as part of ari_parallel_check. */
AR_NODISCARD ar_status ari_stages_check(const ar_parallel *p, const ar_config *c);

/** Writes the stages as "3,5,4"; "" if they are even. */
#define ARI_STAGES_TEXT (6 * AR_MAX_STAGES + 1)
void ari_stages_text(char out[ARI_STAGES_TEXT], const ar_stages *s);

/** Checks that a layout's user-defined schedule matches its ranks, stages and micro-batches. Errors: AR_ERR_ARG. */
AR_NODISCARD ar_status ari_given_schedule_check(const ar_parallel *p);

/** Does the same as ar_parallel_groups_begin. wrong_stride injects a fault: the ranks that reduce gradients are
 *  neighbours instead of strided. */
AR_NODISCARD ar_status ari_groups_begin(ar_parallel_groups *out, ar_comm *world, const ar_parallel *p,
                                        bool wrong_stride);

/** Inserts lines after the first line of a message, which name the stages of the message's ranks, one line each for up
 *  to four ranks. Without a pipeline the message is unchanged. */
void ari_name_ranks(char *out, size_t cap, const char *message, const ar_parallel *p, size_t layers);
