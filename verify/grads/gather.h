/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_GRADS_GATHER_H
#define ARI_VERIFY_GRADS_GATHER_H

#include "anyrank/context.h"
#include "run/full_set.h"

/* Full tensors put together from what the ranks tap. Ranks share one gatherer; each writes its own boxes only. */
typedef struct ari_gathered {
    char tap[160]; /* name of the tap */
    char pass;
    ari_full_tensor full; /* with its name in the file */
    int file;             /* which file it goes to */
} ari_gathered;

typedef struct ari_gatherer {
    ari_gathered *list;
    size_t count, capacity;
} ari_gatherer;

/** Wants a tensor; values are zero until a rank taps it. */
AR_NODISCARD ar_status ari_gather_want(ari_gatherer *g, const char *tap, char pass, const char *name, int ndim,
                                       const size_t *shape, int file);
/** An ar_tap_fn; user: the ari_gatherer, the same for all ranks. */
AR_NODISCARD ar_status ari_gather_tap(void *user, const ar_tap_event *event);
void ari_gatherer_fini(ari_gatherer *g);
/** Whether every element of every wanted tensor was reported once: AR_ERR_INTERNAL names the first tensor that was
 *  not. */
AR_NODISCARD ar_status ari_gather_check(const ari_gatherer *g);
enum { ARI_GATHER_FILES = 3 };
/** Writes all files, file i to path[i]: each whole before the first gets its name, so that a failure leaves what was
 *  there. files: at most ARI_GATHER_FILES. placement[i]: the text of ANYRANK_PLACEMENT of file i, or NULL. */
AR_NODISCARD ar_status ari_gather_write(const ari_gatherer *g, int files, const char *const *path,
                                        const char *const *placement);
/** SHA-256 over all tensors of the first `files` files, by name. */
AR_NODISCARD ar_status ari_gather_hash(const ari_gatherer *g, int files, char hex[65]);

#endif
