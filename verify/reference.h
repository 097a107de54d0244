/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_REFERENCE_H
#define ARI_VERIFY_REFERENCE_H

#include "anyrank/baseline.h"
#include "anyrank/safetensors.h"

/* The baseline's tensors, in execution order. */
typedef struct ari_ref_tensor {
    char name[160];
    char pass; /* 'i', 'f', 'b', 'g' */
    int ndim;
    size_t shape[AR_MAX_DIMS];
    size_t count;
    float *values; /* row-major */
} ari_ref_tensor;

typedef struct ari_reference {
    ari_ref_tensor *tensor;
    size_t count, capacity;
    size_t *by_name; /* indices sorted by (name, pass), after ari_reference_finish */
    double loss;
    double max_error_vs_f64; /* worst |exact - f64| / max |f64| over all gradients; NaN: not measured */
} ari_reference;

/** An ar_baseline_emit that appends; user: an ari_reference, zeroed before the first. */
AR_NODISCARD ar_status ari_reference_emit(void *user, const char *name, char pass, int ndim, const size_t *shape,
                                          const double *values);
AR_NODISCARD ar_status ari_reference_finish(ari_reference *r);
void ari_reference_fini(ari_reference *r);
/** Index of a tensor, or r->count if there is none. */
size_t ari_reference_find(const ari_reference *r, const char *name, char pass);
/** Elements of all tensors together. */
size_t ari_reference_elements(const ari_reference *r);
/** SHA-256 over all tensors of one pass ('i': weights, 'g': gradients), as io/hash.h defines it. `values`: NULL, or one
 *  array per tensor in place of the reference's own. */
AR_NODISCARD ar_status ari_reference_hash(char hex[65], const ari_reference *r, char pass, float *const *values);
/** ":init", ":fwd", ":bwd", ":grad". */
const char *ari_pass_suffix(char pass);
/** "init", "forward", "backward" (gradients belong to the backward pass). */
const char *ari_pass_name(char pass);

#endif
