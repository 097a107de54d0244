/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/sim.h"

/* Private functions of anyrank/sim.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** "delay", "stall", ...; "?" for an unknown value. Static storage. */
const char *ari_sim_fault_name(ar_sim_fault_kind k);
/** "corrupt rank 2 collective 14 transfer 0 bit 77". Truncates to size. */
void ari_sim_fault_describe(const ar_sim_fault *f, char *text, size_t size);
/** Parses the text of ari_sim_fault_describe. Errors: AR_ERR_ARG, which names the word and the expected form; *f is
 *  unchanged. */
AR_NODISCARD ar_status ari_sim_fault_parse(ar_sim_fault *f, const char *text);
/** Draws a fault from a seed: any kind, a rank below `ranks`, a collective up to `collectives`, a delay up to
 *  `longest_ns`. The result is the same on every machine. */
ar_sim_fault ari_sim_fault_draw(uint64_t seed, int ranks, uint64_t collectives, uint64_t longest_ns);
/** Describes a cluster, except its GPU, in words that ar_sim_cluster_parse reads (6 digits). Truncates to size. */
void ari_sim_cluster_describe(const ar_sim_cluster *c, char *text, size_t size);
/** Refuses options that are meaningless for any number of ranks, as ar_sim_run does. Errors: AR_ERR_ARG. */
AR_NODISCARD ar_status ari_sim_options_check(const ar_sim_options *o);

AR_END_DECLS
