/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/run.h"

/* Tensors of each rank that are kept until the end of the run, to be written. */
typedef enum ari_estimate_dump {
    ARI_DUMPS_NOTHING,
    ARI_DUMPS_RESULTS, /* weights, gradients and outputs */
    ARI_DUMPS_ALL,     /* everything that is reported */
    ARI_DUMPS_FIRST    /* only first copies */
} ari_estimate_dump;

/* The run about to start. */
typedef struct ari_estimate_case {
    ar_run run; /* parallel is not looked at */
    const ar_config *config;
    const ar_parallel *parallel; /* [layouts], run one after the other; 1 of a run without a baseline */
    size_t layouts;
    bool f64;       /* the binary64 baseline too */
    bool gradcheck; /* central differences too */
    bool alone;     /* no baseline and nothing to compare with: one layout writes its gradients, or trains */
    int noise_runs; /* baseline runs with errors at the same time, which measure rounding; 0: none */
    size_t bytes_per_tensor, bytes_per_finding; /* if tensors are compared: bytes for each tensor, and for each
                                                   rank's part of it */
    bool saves;                                 /* it writes checkpoints */
    size_t bytes_on_disk; /* of a tensor of the reference from which the disk has it, and not memory */
    ari_estimate_dump dump;
    bool merges; /* saved values are merged into full tensors */
} ari_estimate_case;

typedef struct ari_estimate {
    size_t bytes;   /* of memory at the peak, all ranks and the baseline together: an upper bound, not 1.6 times */
    size_t space;   /* of address space: with the stacks of the ranks' threads, and what the allocator reserves */
    size_t written; /* of the files of a dump, within a tenth */
    double macs;    /* multiply-adds of all steps' forward and backward passes */
    double seconds; /* rough, of the whole */
    size_t available, available_space; /* bytes of memory, and of address space, that this process can still take */
} ari_estimate;

/** Refuses a config with more than 2^14 layers or head features that do not fit, without looking at each layer. Call it
 *  before anything that loops over layers, which would take minutes with 2^31 of them. Errors: AR_ERR_ARG,
 *  AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_estimate_layers(const ar_config *c);
/** Estimates the memory of a run; its layouts are legal (ari_parallel_check). Errors: AR_ERR_OVERFLOW (absurd sizes),
 *  AR_ERR_UNSUPPORTED (the plan of an MLP). */
AR_NODISCARD ar_status ari_estimate_check(ari_estimate *e, const ari_estimate_case *run);
/** AR_ERR_MEMORY... is for the machine; a check that cannot fit is the caller's: AR_ERR_ARG, with both sizes. */
AR_NODISCARD ar_status ari_estimate_fits(const ari_estimate *e);

/** Returns the bytes of memory that this process can still allocate: the least of the system's free memory
 *  (MemAvailable of /proc/meminfo) and what its control group and every group above it leave (version 2: memory.max -
 *  memory.current; version 1: memory.limit_in_bytes - memory.usage_in_bytes). File pages that were not used lately
 *  (inactive_file of memory.stat) count as free, because the kernel drops them before it refuses memory. Values that
 *  cannot be read, "max" and "unlimited" are no limit; SIZE_MAX without any limit. root: prefix of all paths, ""
 *  normally, a folder with proc/ and sys/ in tests. */
size_t ari_available_memory(const char *root);
/** Its limit on address space (ulimit -v) less what it has mapped; SIZE_MAX without one. */
size_t ari_available_space(const char *root);
