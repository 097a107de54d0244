/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdatomic.h>

#include "anyrank/process.h"
#include "anyrank/safetensors.h"
#include "anyrank/train.h"

/** One full tensor (fp32, host) that is put together from the parts of several ranks. Ranks share it; each writes its
 *  own boxes, at the same time as others. */
typedef struct ari_full_tensor {
    char name[160];
    bool state; /* state of an optimizer; otherwise a parameter or a gathered value */
    int ndim;
    size_t shape[AR_MAX_DIMS];
    size_t count;
    float *values;         /* [count] */
    atomic_ushort *writer; /* [count] rank that wrote an element, plus 1; 0: none yet */
    atomic_bool clash;     /* two ranks wrote the same element, or one beyond the end: the fields below say which */
    size_t clash_at;
    int clash_ranks[2];
} ari_full_tensor;

/** Largest number of ranks that a writer's number can represent. */
#define ARI_FULL_MAX_RANKS 65534

/** Values are zero until a rank writes them. Errors: AR_ERR_ARG (the name is too long), AR_ERR_OVERFLOW, AR_ERR_MEMORY.
 *  On an error there is nothing to end. */
AR_NODISCARD ar_status ari_full_tensor_init(ari_full_tensor *t, const char *name, int ndim, const size_t *shape);
void ari_full_tensor_fini(ari_full_tensor *t);
/** Writes this rank's boxes, which no other rank may write: the first copy (replica 0). `local` is host memory, fp32.
 *  Errors: AR_ERR_INTERNAL (another number of elements). What clashes is found by ari_full_tensor_check. */
AR_NODISCARD ar_status ari_full_tensor_write(ari_full_tensor *t, int rank, const ar_tensor *local,
                                             const ar_layout *layout);
/** Checks that every element was written once. Errors: AR_ERR_INTERNAL. */
AR_NODISCARD ar_status ari_full_tensor_check(const ari_full_tensor *t);
/** Returns a tensor as an entry to write or hash; borrows. */
ar_st_tensor ari_full_tensor_entry(const ari_full_tensor *t);

/* All parameters as full tensors, and on request the optimizer's state, put together from what the ranks hold. The
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
/** The parameters (state false) or the state (true) by name, as something to write or to hash. For rank 0 between take
 *  and the next agreement, or for anybody once no rank runs. The array is to be freed. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_full_set_entries(const ari_full_set *s, bool state, ar_st_tensor **out, size_t *n);
/** ari_tensors_hash of the parameters. When, and errors: as above. */
AR_NODISCARD ar_status ari_full_set_hash(const ari_full_set *s, char hex[65]);
/** Frees the tensors; in the same place. */
void ari_full_set_clear(ari_full_set *s);
