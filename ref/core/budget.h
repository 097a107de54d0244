/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CORE_BUDGET_H
#define ARI_CORE_BUDGET_H

/** Cores of the machine this process may run on (its affinity mask), at least 1. */
int ari_cores(void);

/** Threads that the kernels of one of `ranks` rank threads may use out of `threads` for the whole process: an equal
 * share, rounded down, at least 1. So ranks * share <= threads wherever there are at least as many threads as ranks,
 * and one thread a rank otherwise: rank threads and the threads of their kernels never oversubscribe on top of each
 * other. */
int ari_core_budget(int threads, int ranks);

#endif
