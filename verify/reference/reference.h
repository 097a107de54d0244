/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/baseline.h"
#include "anyrank/check.h"
#include "anyrank/safetensors.h"
#include "ref/core/size.h"

/* The baseline's tensors, in execution order. */
typedef struct ari_ref_tensor {
    char name[160];
    char pass; /* 'i', 'f', 'b', 'g', 'c', 'n', 'm', 'v' */
    int step;  /* step number from 1 */
    int ndim;
    size_t shape[AR_MAX_DIMS];
    size_t count;
    float *values;       /* row-major */
    bool on_disk;        /* true if the values are in a file (ari_reference_rest) */
    double allowed;      /* largest |difference| that is not a difference; 0: only equal bits are the same */
    float *allowed_each; /* [count] additional allowance for each element; NULL: none */
} ari_ref_tensor;

typedef struct ari_reference {
    ari_ref_tensor *tensor;
    size_t count, capacity;
    size_t *by_name;          /* indices sorted by (name, pass, step), after ari_reference_finish */
    int step;                 /* the current step; 0 before the first step, whose tensors belong to step 1 */
    size_t kinks;             /* number of arguments near a kink (ari_sensitivity_allow) */
    double loss;              /* large enough for the loss of a run of one step */
    size_t padding;           /* further rows at the end of a run's batch, which are not compared */
    ar_check_vacuous vacuous; /* set by ari_reference_finish */
} ari_reference;

/** Appends an emitted tensor. Has the type ar_baseline_emit; user: an ari_reference, all zero at first. */
AR_NODISCARD ar_status ari_reference_emit(void *user, const char *name, char pass, int ndim, const size_t *shape,
                                          const double *values);
/** The begin_step of ar_baseline_options; user as above. */
void ari_reference_begin(void *user, int step);
/** Returns the baseline's exact options for a run with fresh weights. Its listener is `reference` (NULL: none). A
 *  native run is compared with exact fp32 results, whatever its own precision is. */
ar_baseline_options ari_reference_options(const ar_run *run, ari_reference *reference);
AR_NODISCARD ar_status ari_reference_finish(ari_reference *r);
/** Sets only `vacuous`, also for a run that ended early. */
void ari_reference_find_vacuous(ari_reference *r);
void ari_reference_fini(ari_reference *r);
/* Size in bytes from which a tensor is stored on disk. */
enum { ARI_REFERENCE_LARGE = 1 << 20 };
/** Allocates memory for a tensor's values: large tensors on the disk if there is space. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_reference_allocate(ari_ref_tensor *t);
/** Allows the memory of values that are not needed at the moment to be paged out. */
void ari_reference_rest(const ari_ref_tensor *t);
/** Returns the index of a tensor in a step, or in the first step, or r->count if there is none. */
size_t ari_reference_find_in(const ari_reference *r, const char *name, char pass, int step);
size_t ari_reference_find(const ari_reference *r, const char *name, char pass);
/** Returns true if the tensor is a final weight (after the last step; an initial weight if there was no update) or a
 *  gradient of the last step. */
bool ari_reference_is_weight(const ari_reference *r, size_t tensor);
bool ari_reference_is_gradient(const ari_reference *r, size_t tensor);
/** Elements of all tensors together. */
size_t ari_reference_elements(const ari_reference *r);
/** Returns the index of the outputs of the last step: the last tensor of its forward pass before the loss. r->count:
 *  none. */
size_t ari_reference_outputs(const ari_reference *r);
/** Returns true if a tensor of this name has integer values, which files store as I32. The name may be a dump's or the
 *  tensor's. */
bool ari_is_of_integers(const char *name);
/** Converts n floats with integer values to int32. */
AR_NODISCARD ar_status ari_integers_of(int32_t **out, ari_arena *arena, const float *values, size_t n);
/** Makes those of n tensors I32. */
AR_NODISCARD ar_status ari_entries_as_stored(ari_arena *arena, ar_st_tensor *entry, size_t n);
/** Returns a tensor as an entry to write or hash; borrows. */
ar_st_tensor ari_reference_entry(const ari_ref_tensor *t, const char *name);
/** Computes SHA-256 over the final weights and over the last step's gradients, as io/hash.h defines it. `values`: NULL,
 *  or per tensor an array that replaces the reference's values, or NULL. */
AR_NODISCARD ar_status ari_reference_hashes(char weights[65], char gradients[65], const ari_reference *r,
                                            float *const *values);
/** Computes the same hash over the outputs; "" if there are none. */
AR_NODISCARD ar_status ari_reference_outputs_hash(char outputs[65], const ari_reference *r);
/** Formats the tensor's name in a dump: "NAME:fwd", from the second step on "NAME:fwd@2". Returns false if the name is
 *  too long. */
enum { ARI_REFERENCE_NAME = 192 };
bool ari_dump_name(char name[ARI_REFERENCE_NAME], const char *tensor, char pass, uint32_t step);
/** ":init", ":fwd", ":bwd", ":grad", ":clip", ":new". */
const char *ari_pass_suffix(char pass);
/** "init", "forward", "backward" (gradients belong to the backward pass), "clip", "update". */
const char *ari_pass_name(char pass);
