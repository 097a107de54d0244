/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_RUN_FULL_TENSOR_H
#define ARI_RUN_FULL_TENSOR_H

#include <stdatomic.h>
#include <stdbool.h>

#include "anyrank/safetensors.h"
#include "anyrank/tensor.h"

/** One full tensor (fp32, host) that is put together from the parts of several ranks. Ranks share it; each writes its
 *  own boxes, at the same time as others. */
typedef struct ari_full_tensor {
    char name[160];
    int ndim;
    size_t shape[AR_MAX_DIMS];
    size_t count;
    float *values;         /* [count] */
    atomic_ushort *writer; /* [count] the rank that wrote an element, plus 1; 0: none has */
    atomic_bool clash;     /* two ranks wrote the same element, or one beyond the end: the fields below say which */
    size_t clash_at;
    int clash_ranks[2];
} ari_full_tensor;

/** Ranks of a world that a writer's number can tell. */
#define ARI_FULL_MAX_RANKS 65534

/** Values are zero until a rank writes them. Errors: AR_ERR_ARG (the name is too long), AR_ERR_OVERFLOW, AR_ERR_MEMORY.
 *  On an error there is nothing to end. */
AR_NODISCARD ar_status ari_full_tensor_init(ari_full_tensor *t, const char *name, int ndim, const size_t *shape);
void ari_full_tensor_fini(ari_full_tensor *t);
/** Writes this rank's boxes, which no other rank may write: the first copy (replica 0). `local` is host memory, fp32.
 *  Errors: AR_ERR_INTERNAL (another number of elements). What clashes is found by ari_full_tensor_check. */
AR_NODISCARD ar_status ari_full_tensor_write(ari_full_tensor *t, int rank, const ar_tensor *local,
                                             const ar_layout *layout);
/** Whether this rank's boxes have the bits that were written: once all ranks have. Errors: AR_ERR_DATA (names tensor,
 *  element, both ranks), AR_ERR_INTERNAL (another number of elements). */
AR_NODISCARD ar_status ari_full_tensor_compare(const ari_full_tensor *t, int rank, const ar_tensor *local,
                                               const ar_layout *layout);
/** Whether every element was written once. Errors: AR_ERR_INTERNAL. */
AR_NODISCARD ar_status ari_full_tensor_check(const ari_full_tensor *t);
/** As something to write or to hash; borrows. */
ar_st_tensor ari_full_tensor_entry(const ari_full_tensor *t);

#endif
