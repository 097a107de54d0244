/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CLI_NET_FAULT_H
#define ARI_CLI_NET_FAULT_H

#include "anyrank/sim.h"

/** The transport's fault that a text names, as ar_sim_fault_describe writes it; or "seed:N": one drawn for so many
 *  ranks. Errors: AR_ERR_ARG, what is wrong with the text or a rank that is not there. */
AR_NODISCARD ar_status ari_net_fault_parse(ar_sim_fault *f, const char *text, int ranks);

#endif
