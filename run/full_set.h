/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_RUN_FULL_SET_H
#define ARI_RUN_FULL_SET_H

#include "anyrank/process.h"
#include "anyrank/train.h"
#include "run/full_tensor.h"

/* All parameters as full tensors, and on request the optimizer's state, put together from what the ranks hold. The
 * ranks of a world share one set. */
typedef struct ari_full_set ari_full_set;

/** Gives; ari_full_set_destroy, once no rank uses it any more. p: ranks are processes, each with a set of its own, and
 *  process 0's is filled; borrowed. NULL: ranks are threads, which share one. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_full_set_create(ari_full_set **gives, ar_process *p);
/** Accepts NULL. */
void ari_full_set_destroy(ari_full_set *s);
/** Takes this rank's parts of the parameters and, where there is an optimizer, of its state ("<parameter>.<state>"), in
 *  place of what was taken before; then compares all copies. Collective over the context's world, which must be all
 *  ranks; every rank gets the same status and message. Errors: AR_ERR_DATA (copies differ), AR_ERR_MEMORY,
 *  AR_ERR_INTERNAL (parts that do not make a whole), AR_ERR_ARG (the world), what a barrier gives. */
AR_NODISCARD ar_status ari_full_set_take(ari_full_set *s, ar_ctx *ctx, ar_param *const *params, size_t n,
                                         ar_optimizer *optimizer);
/** The ranks agree: AR_OK where all said so, else status and message of the lowest that did not. Collective, as
 *  above. */
AR_NODISCARD ar_status ari_full_set_agree(ari_full_set *s, ar_ctx *ctx, ar_status own);
/** The parameters (state false) or the state (true) by name, as something to write or to hash. For rank 0 between take
 *  and the next agreement, or for anybody once no rank runs. The array is to be freed. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_full_set_entries(const ari_full_set *s, bool state, ar_st_tensor **gives, size_t *n);
/** ari_tensors_hash of the parameters. When, and errors: as above. */
AR_NODISCARD ar_status ari_full_set_hash(const ari_full_set *s, char hex[65]);
/** Frees the tensors; in the same place. */
void ari_full_set_clear(ari_full_set *s);

#endif
