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
    const ar_parallel *parallel; /* [layouts] run one after the other; 1 for a run without a baseline */
    size_t layouts;
    bool f64;       /* the binary64 baseline too */
    bool gradcheck; /* central differences too */
    bool alone;     /* true: without a baseline and a comparison, when one layout writes its gradients or trains */
    int noise_runs; /* baseline runs with errors at the same time, which measure rounding; 0: none */
    size_t bytes_per_tensor, bytes_per_finding; /* if tensors are compared: bytes for each tensor, and for each
                                                   rank's part of it */
    bool saves;                                 /* it writes checkpoints */
    size_t bytes_on_disk; /* size from which a tensor of the reference is stored on disk instead of in memory */
    ari_estimate_dump dump;
    bool merges; /* saved values are merged into full tensors */
} ari_estimate_case;

typedef struct ari_estimate {
    size_t bytes;   /* peak memory of all ranks and the baseline together: an upper bound, less than 1.6 times the
                       measured value */
    size_t space;   /* address space, including stacks of the ranks' threads and memory reserved by the allocator */
    size_t written; /* bytes of a dump's files, accurate to a tenth */
    double macs;    /* multiply-adds of all steps' forward and backward passes */
    double seconds; /* rough estimate of the total time */
    size_t available, available_space; /* bytes of memory, and of address space, that this process can still allocate */
} ari_estimate;

/** Refuses a config with more than 2^14 layers or head features that do not fit, without looking at each layer. Call it
 *  before anything that loops over layers, which would take minutes with 2^31 of them. Errors: AR_ERR_ARG,
 *  AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_estimate_layers(const ar_config *c);
/** Estimates the memory of a run with legal layouts (ari_parallel_check). Errors: AR_ERR_OVERFLOW (absurd sizes),
 *  AR_ERR_UNSUPPORTED (the plan of an MLP). */
AR_NODISCARD ar_status ari_estimate_check(ari_estimate *e, const ari_estimate_case *run);
/** Checks that the run fits in memory. Errors: AR_ERR_ARG with both sizes. AR_ERR_MEMORY would mean a failure of the
 *  machine, while a check that is too large is the caller's mistake. */
AR_NODISCARD ar_status ari_estimate_fits(const ari_estimate *e);

/** Returns the bytes of memory that this process can still allocate: the least of the system's free memory
 *  (MemAvailable of /proc/meminfo) and what its control group and every group above it leave (version 2: memory.max -
 *  memory.current; version 1: memory.limit_in_bytes - memory.usage_in_bytes). File pages that were not used lately
 *  (inactive_file of memory.stat) count as free, because the kernel drops them before it refuses memory. Values that
 *  cannot be read, "max" and "unlimited" are no limit; SIZE_MAX without any limit. root: prefix of all paths, ""
 *  normally, a folder with proc/ and sys/ in tests. */
size_t ari_available_memory(const char *root);
/** Returns the process's limit on address space (ulimit -v) minus its mapped memory; SIZE_MAX without a limit. */
size_t ari_available_space(const char *root);
