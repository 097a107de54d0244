/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/parallel.h"

/** As ar_parallel_groups_begin; wrong_stride, a fault: the ranks that sum gradients are neighbours too. */
AR_NODISCARD ar_status ari_groups_begin(ar_parallel_groups *gives, ar_comm *world, const ar_parallel *p,
                                        bool wrong_stride);

/** Lists, behind the first line of a message, which stages the ranks have that it names, a line for each of up to four;
 *  without a pipeline it is the message. */
void ari_name_ranks(char *out, size_t cap, const char *message, const ar_parallel *p, size_t layers);
