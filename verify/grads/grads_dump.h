/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_GRADS_GRADS_DUMP_H
#define ARI_VERIFY_GRADS_GRADS_DUMP_H

#include "anyrank/grads.h"
#include "verify/grads/gather.h"
#include "verify/writer/dump_ranks.h"

/* Who listens to the ranks of a run: the gatherer of outputs and gradients, and where they are asked for, a listener
 * for each rank. */
typedef struct ari_grads_taps {
    ari_gatherer *outputs;
    ari_dump_ranks ranks; /* none: not asked for */
    struct ari_grads_tap *tap;
    void **user; /* [world], for ari_grads_tap_fn */
} ari_grads_taps;

AR_NODISCARD ar_status ari_grads_taps_create(ari_grads_taps *t, ari_gatherer *outputs, const ar_grads_options *o);
void ari_grads_taps_fini(ari_grads_taps *t);
/** An ar_tap_fn. */
AR_NODISCARD ar_status ari_grads_tap_fn(void *user, const ar_tap_event *event);

/** Puts together what the ranks kept, as full tensors of the gatherer's file `file` under the names of the ranks'
 *  dumps. keep: the ranks still have their parts then. Errors: AR_ERR_MEMORY, AR_ERR_ARG (a name too long). */
AR_NODISCARD ar_status ari_grads_merge(ari_grads_taps *t, int file, bool keep);
/** The text of ANYRANK_PLACEMENT of such a file, in execution order. Gives; free(). */
AR_NODISCARD ar_status ari_grads_order(char **gives, const ari_gatherer *g, int file);

#endif
