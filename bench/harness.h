/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <jansson.h>

#include "anyrank/device.h"
#include "gpu/profile/profile.h"
#include "ref/core/size.h"
#include "ref/io/hash.h"

ARI_OWNER(ari_profile, ari_profile_end)

/* What the programs of this folder share. Each times what it compares side by side, in repetitions that run one after
 * the other, so that a machine that changes its speed changes it for all; what only warms caches, page tables and
 * BLIS's buffers is not counted. A row's seconds and ratios are medians over the repetitions; its spread is (largest -
 * smallest)/median of its ratio, or of its seconds where that ratio is 1. */

/* --- a program ---------------------------------------------------------------------------------------------------- */

/* An option --NAME of a program: one of the three is where its value goes. */
typedef struct ari_bench_option {
    const char *name, *help;
    size_t *number; /* at least 1 */
    const char **text;
    bool *flag;
} ari_bench_option;

/* A program that runs. It begins with what, threads and repetitions, the defaults of the options --threads and
 * --repetitions; --device and --json are there too. */
typedef struct ari_bench {
    const char *name;
    size_t threads, repetitions;
    ar_device_choice device;
    const char *json; /* NULL: a table on stdout */
    json_t *result;
} ari_bench;

/** Reads the command line, starting the program again once so that OpenMP's threads sleep, and chooses BLAS's kernels.
 *  Exits with 2 and a message for what is wrong, with 0 for --help. */
void ari_bench_begin(ari_bench *b, char **argv, const ari_bench_option *options, size_t n);
/** Adds a row, an object whose members are the columns, to a table ("rows" or "profile"). Takes the row. Errors:
 *  AR_ERR_MEMORY (also for NULL). */
AR_NODISCARD ar_status ari_bench_add(ari_bench *b, const char *table, json_t *row);
/** Prints the tables and the machine, or writes the JSON; in place of them the error, if st is one. Gives the exit
 *  status, 0 or 2. */
int ari_bench_end(ari_bench *b, ar_status st);

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
ari_bench_stat ari_bench_ratio_of(const ari_bench_series *s, size_t side, size_t base_side);

/** One repetition: each side's time, in seconds. */
typedef ar_status (*ari_bench_fn)(void *user, double *times);
/** Creates the series of n repetitions, after `warm` more that are not counted. Errors: AR_ERR_MEMORY, fn's. Destroy
 *  the series also then. */
AR_NODISCARD ar_status ari_bench_repeat(ari_bench_series *s, size_t sides, size_t n, size_t warm, ari_bench_fn fn,
                                        void *user);

/* --- a device ----------------------------------------------------------------------------------------------------- */

/* A device, the queue on which a benchmark's kernels run, and the memory that it has taken. */
typedef struct ari_bench_device {
    ar_device *d;
    ar_queue *q;
    ar_buf *memory; /* [count] */
    size_t count, capacity;
} ari_bench_device;

/** Frees the memory that was taken. Accepts one that is all NULL. */
void ari_bench_free(ari_bench_device *b);
/** Device memory that lasts until ari_bench_free. Errors: AR_ERR_MEMORY, AR_ERR_OVERFLOW, AR_ERR_DEVICE. */
AR_NODISCARD ar_status ari_bench_alloc(ari_bench_device *b, ar_buf *result, size_t bytes);
/** *seconds: when all work enqueued so far is done; on the monotonic clock, and of a CPU device with one thread its
 *  processor time, which other programs do not lengthen. Errors: the queue's first error. */
AR_NODISCARD ar_status ari_bench_clock(const ari_bench_device *b, double *seconds);
/** A contiguous tensor of magnitudes up to 1 and both signs, the same for the same seed on every machine, and one of
 *  the same values in another dtype. Errors: as ari_bench_alloc. */
AR_NODISCARD ar_status ari_bench_tensor(ari_bench_device *b, ar_tensor *result, int ndim, const size_t *shape,
                                        uint64_t seed);
AR_NODISCARD ar_status ari_bench_tensor_as(ari_bench_device *b, ar_tensor *result, const ar_tensor *src,
                                           ar_dtype dtype);
/** Takes the bits of a contiguous tensor's elements to the hash, once all work enqueued so far is done. Errors:
 *  AR_ERR_MEMORY, AR_ERR_OVERFLOW, the queue's first error. */
AR_NODISCARD ar_status ari_bench_take_bits(ari_sha256 *hash, const ari_bench_device *b, const ar_tensor *t);
