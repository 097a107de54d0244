/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdatomic.h>

#include "anyrank/process.h"
#include "anyrank/safetensors.h"
#include "anyrank/train.h"

/** One full tensor (fp32, host) that several ranks fill from their parts. The ranks share the tensor. Each rank writes
 *  its own boxes, concurrently with the others. */
typedef struct ari_full_tensor {
    char name[160];
    bool state; /* state of an optimizer; otherwise a parameter or a gathered value */
    int ndim;
    size_t shape[AR_MAX_DIMS];
    size_t count;
    float *values;         /* [count] */
    atomic_ushort *writer; /* [count] rank that wrote an element, plus 1; 0: none yet */
    atomic_bool clash;     /* true if two ranks wrote the same element, or one wrote beyond the end; the fields below
                              say which */
    size_t clash_at;
    int clash_ranks[2];
} ari_full_tensor;

/** Largest number of ranks that a writer's number can represent. */
#define ARI_FULL_MAX_RANKS 65534

/** Allocates a full tensor, all zero. Errors: AR_ERR_ARG (the name is too long), AR_ERR_OVERFLOW, AR_ERR_MEMORY. After
 *  an error nothing needs to be released. */
AR_NODISCARD ar_status ari_full_tensor_init(ari_full_tensor *t, const char *name, int ndim, const size_t *shape);
void ari_full_tensor_fini(ari_full_tensor *t);
/** Writes this rank's boxes from `local` (host memory, fp32). For the first copy (replica 0), since no two ranks may
 *  write the same element; ari_full_tensor_check finds clashes. Errors: AR_ERR_INTERNAL (another number of
 *  elements). */
AR_NODISCARD ar_status ari_full_tensor_write(ari_full_tensor *t, int rank, const ar_tensor *local,
                                             const ar_layout *layout);
/** Checks that every element was written exactly once. Errors: AR_ERR_INTERNAL. */
AR_NODISCARD ar_status ari_full_tensor_check(const ari_full_tensor *t);
/** Returns a tensor as an entry to write or hash; borrows. */
ar_st_tensor ari_full_tensor_entry(const ari_full_tensor *t);

/* All parameters as full tensors, and on request the optimizer's state, assembled from the parts of all ranks. The
 * ranks of a world share one set. */
typedef struct ari_full_set ari_full_set;

/** Creates a set of full tensors. Release it with ari_full_set_destroy once no rank uses it. p: ranks are processes,
 *  each with its own set, and process 0's is filled; borrowed. NULL: ranks are threads that share one set. Errors:
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_full_set_create(ari_full_set **out, ar_process *p);
/** Accepts NULL. */
void ari_full_set_destroy(ari_full_set *s);
/** Collects this rank's parts of the parameters and, with an optimizer, of its state ("<parameter>.<state>"), replacing
 *  earlier contents; then compares all copies. Collective over the context's world, which must be all ranks; every rank
 *  gets equal status and message. Errors: AR_ERR_DATA (copies differ), AR_ERR_MEMORY, AR_ERR_INTERNAL (parts that do
 *  not form a full tensor), AR_ERR_ARG (the world), those of a barrier. */
AR_NODISCARD ar_status ari_full_set_take(ari_full_set *s, ar_ctx *ctx, ar_param *const *params, size_t n,
                                         ar_optimizer *optimizer);
/** Agrees on a status: AR_OK if all ranks passed it, otherwise status and message of the lowest rank that did not.
 *  Collective like the functions above. */
AR_NODISCARD ar_status ari_full_set_agree(ari_full_set *s, ar_ctx *ctx, ar_status local_status);
/** Returns the parameters (state false) or the optimizer's state (true), sorted by name, for writing or hashing. Rank 0
 *  may call this between take and the next agreement; when no rank runs, any thread may. The caller frees the array.
 *  Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_full_set_entries(const ari_full_set *s, bool state, ar_st_tensor **out, size_t *n);
/** Computes ari_tensors_hash of the parameters. Callable when ari_full_set_entries is; same errors. */
AR_NODISCARD ar_status ari_full_set_hash(const ari_full_set *s, char hex[65]);
/** Frees the tensors. Callable when ari_full_set_entries is. */
void ari_full_set_clear(ari_full_set *s);
