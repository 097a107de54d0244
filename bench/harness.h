/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/config.h"
#include "anyrank/device.h"
#include "gpu/profile/profile.h"
#include "ref/core/size.h"
#include "ref/io/hash.h"

ARI_OWNER(ari_profile, ari_profile_end)

/* Clock, repetitions and statistics that the measurements share. */

/** Seconds on the monotonic clock. */
double ari_bench_seconds(void);

/* --- repetitions -------------------------------------------------------------------------------------------------- */

/* The middle of some repetitions and how far apart they lie. */
typedef struct ari_bench_stat {
    double median;
    double spread; /* (largest - smallest)/median */
} ari_bench_stat;

/* The times of n repetitions of several sides that are compared. */
typedef struct ari_bench_series {
    size_t sides, n;
    double *times; /* [n, sides] */
    double *work;  /* [n] */
} ari_bench_series;

/** n > 0. Errors: AR_ERR_MEMORY. Destroy it also then. */
AR_NODISCARD ar_status ari_bench_series_create(ari_bench_series *s, size_t sides, size_t n);
void ari_bench_series_destroy(ari_bench_series *s);
/** Statistics of one side's times; of their ratios to another side's, repetition by repetition. */
ari_bench_stat ari_bench_times_of(const ari_bench_series *s, size_t side);
ari_bench_stat ari_bench_ratio_of(const ari_bench_series *s, size_t side, size_t to);

/** One repetition: each side's time, in seconds. */
typedef ar_status (*ari_bench_fn)(void *user, double *times);
/** Creates the series of n repetitions, after `warm` more that are not counted. Errors: AR_ERR_MEMORY, fn's. Destroy
 *  the series also then. */
AR_NODISCARD ar_status ari_bench_repeat(ari_bench_series *s, size_t sides, size_t n, size_t warm, ari_bench_fn fn,
                                        void *user);
/* One of several sides, of which the first is the reference, beside the reference's matrix products run alone. */
typedef struct ari_bench_side {
    double seconds;       /* median */
    double gflops;        /* rate of the matrix products' operations in that time */
    double gemm_fraction; /* median of (time of the same matrix products alone, by sgemm)/(time) */
    double over_first;    /* median of (time)/(time of the first side) */
    double spread;        /* of that ratio; of the seconds in the first side's row */
} ari_bench_side;
/** The sides from repetitions of one time more: the reference, its matrix products alone, the other sides.
 *  operations: of the products. Errors: the same. */
AR_NODISCARD ar_status ari_bench_sides(ari_bench_side *row, size_t sides, double operations, size_t n, size_t warm,
                                       ari_bench_fn fn, void *user);

/* --- a device ----------------------------------------------------------------------------------------------------- */

/* A device, the queue on which a benchmark's kernels run, and the memory that it has taken. */
typedef struct ari_bench_device {
    ar_device *d;
    ar_queue *q;
    ar_buf *memory; /* [count] */
    size_t count, capacity;
} ari_bench_device;

/** which NULL: the CPU device, with `threads` threads. Errors: those of ar_device_create. On error *b is all NULL. */
AR_NODISCARD ar_status ari_bench_device_create(ari_bench_device *b, const ar_device_choice *which, int threads);
/** Frees its memory too. Accepts one that is all NULL. */
void ari_bench_device_destroy(ari_bench_device *b);
/** Frees the memory alone. */
void ari_bench_free(ari_bench_device *b);
/** Device memory that ends with the device. Errors: AR_ERR_MEMORY, AR_ERR_OVERFLOW, AR_ERR_DEVICE. */
AR_NODISCARD ar_status ari_bench_alloc(ari_bench_device *b, ar_buf *gives, size_t bytes);
/** *seconds: when all work enqueued so far is done; on the monotonic clock, and of a CPU device with one thread its
 *  processor time, which other programs do not lengthen. Errors: the queue's first error. */
AR_NODISCARD ar_status ari_bench_clock(const ari_bench_device *b, double *seconds);
/** Such memory of n fp32 words: values of magnitudes up to 1 and both signs, the same for the same seed on every
 *  machine. Errors: the same. */
AR_NODISCARD ar_status ari_bench_values(ari_bench_device *b, ar_buf *gives, size_t n, uint64_t seed);
/** A contiguous tensor of such values, and one of the same values in another dtype. Errors: the same. */
AR_NODISCARD ar_status ari_bench_tensor(ari_bench_device *b, ar_tensor *gives, int ndim, const size_t *shape,
                                        uint64_t seed);
AR_NODISCARD ar_status ari_bench_tensor_as(ari_bench_device *b, ar_tensor *gives, const ar_tensor *of, ar_dtype dtype);

/** Takes the bits of a contiguous tensor's elements to the hash, once all work enqueued so far is done. Errors:
 *  AR_ERR_MEMORY, AR_ERR_OVERFLOW, the queue's first error. */
AR_NODISCARD ar_status ari_bench_take_bits(ari_sha256 *to, const ari_bench_device *b, const ar_tensor *t);

/* --- matrix products of a model ----------------------------------------------------------------------------------- */

/* C[m,n] (+)= A[m,k] B[n,k]^T, `batch` times; a transposed operand has its rows side by side in memory. */
typedef struct ari_gemm_shape {
    size_t times; /* how often it occurs */
    size_t batch, m, n, k;
    bool a_transposed, b_transposed, add;
} ari_gemm_shape;

#define ARI_GEMM_LIST_MAX 64
/* The matrix products of some piece of a model, as its native arithmetic asks the device for them. All of them work on
 * the same three arrays. */
typedef struct ari_gemm_list {
    ari_bench_device *on; /* borrowed; the arrays are its memory */
    size_t n;
    ari_gemm_shape shape[ARI_GEMM_LIST_MAX];
    ar_buf a, b, c;
} ari_gemm_list;

/** Forward and backward of the first block of `config`, all parameters and the input's gradient included. Experts are
 *  taken to have as many rows each. Errors: AR_ERR_MEMORY, AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_gemm_list_create(ari_gemm_list *list, ari_bench_device *on, const ar_config *config,
                                            size_t batch, size_t seq);
/** Runs all of them, one after the other. */
AR_NODISCARD ar_status ari_gemm_list_run(const ari_gemm_list *list, double *seconds);
/** Multiplications and additions. */
double ari_gemm_list_operations(const ari_gemm_list *list);
