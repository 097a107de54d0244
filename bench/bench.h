/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_BENCH_BENCH_H
#define ARI_BENCH_BENCH_H

#include <stddef.h>

#include "anyrank/config.h"
#include "anyrank/context.h"
#include "anyrank/ddp.h"
#include "anyrank/device.h"
#include "anyrank/parallel.h"
#include "anyrank/run.h"
#include "anyrank/sim.h"

/* The measurements. Each times what it compares side by side, in repetitions that run one after the other, so that a
 * machine that changes its speed changes it for all; what only warms caches, page tables and BLIS's buffers is not
 * counted. A row's seconds and ratios are medians over the repetitions; its spread is (largest - smallest)/median of
 * its ratio, or of its seconds where that ratio is 1. Nothing is printed. Call ar_cpu_select_kernels before.
 * Errors of all: AR_ERR_ARG (no repetitions), AR_ERR_MEMORY, AR_ERR_OVERFLOW, those of the device and of the ranks. */

/* --- products: which NULL is the CPU ------------------------------------------------------------------------------ */

/* The price of an exact product: Y[m,n] = X[m,k] W[n,k]^T on one device, exact against native (fp32), in one process
 * and, on the CPU, on the same number of threads. */
typedef struct ar_bench_gemm_row {
    size_t batch, m, n, k;             /* in: the shape; batch matrices */
    double native_gflops;              /* median rate of the native product, 2*batch*m*n*k operations */
    double exact_over_native;          /* median ratio of times, everything included: c, e, f, both operands packed */
    double exact_over_native_prepared; /* the same with W's c, f and integers made before, as weights are */
    double spread;                     /* of the first ratio */
    double pedantic_over_native;       /* median of sgemm's time as ANYRANK_SGEMM=pedantic has it; NaN: not on a GPU */
    /* Of one more prepared product: X's exponents and integers; the products; the pass that puts their sums together,
     * NaN where the device does both at once. */
    double pack_seconds, products_seconds, sums_seconds;
} ar_bench_gemm_row;

#define ARI_BENCH_GEMM_SHAPES 6
/** The shapes that take the device's time, not a user's. The CPU's: those of a transformer block of width 768 on 1024
 *  tokens, then attention's at 12 heads, 2 sequences of 512. A GPU's: 4096^3; a block of width 4096 on 2048 tokens;
 *  attention at 32 heads, 2 sequences of 1024. */
const ar_bench_gemm_row *ari_bench_gemm_shapes_for(const ar_device_choice *which);
/** Fills what is measured of *row. On a GPU it sets ANYRANK_SGEMM for a while: no other thread may use the environment.
 *  Errors: also AR_ERR_ARG (a zero size, threads < 1). */
AR_NODISCARD ar_status ari_bench_gemm(ar_bench_gemm_row *row, const ar_device_choice *which, int threads,
                                      size_t repetitions);

/* The price of a weight gradient in exact numerics, where each sequence is a contraction of its own whose rounded
 * values go into the order-independent accumulator: dW[out,in] = sum over sequences of dY^T X. */
typedef struct ar_bench_grad_row {
    size_t out, in, tokens, seq; /* in: tokens/seq sequences */
    double seconds;              /* median */
    double over_contraction;     /* median of (time)/(time of one exact contraction over all the tokens) */
    double over_native;          /* median of (time)/(time of sgemm) */
    double spread;               /* of the first ratio */
} ar_bench_grad_row;

/* The MLP of width 768 and 3072, 1024 tokens in sequences of 512, 128 and 32. */
#define ARI_BENCH_GRAD_SHAPES 3
extern const ar_bench_grad_row ari_bench_grad_shapes[ARI_BENCH_GRAD_SHAPES];
/** Fills the last four fields of *row. Errors: also AR_ERR_ARG (a zero size, seq that does not divide tokens). */
AR_NODISCARD ar_status ari_bench_grad(ar_bench_grad_row *row, const ar_device_choice *which, int threads,
                                      size_t repetitions);

/* What a kernel costs that memory bounds, on tensors [rows, cols], beside a copy by the same device and threads that
 * reads and writes as many bytes in all. */
typedef struct ar_bench_kernel_row {
    const char *name;
    ar_dtype dtype; /* F32 or BF16 */
    size_t rows, cols;
    size_t bytes;     /* an element, of the tensors that one call reads and writes at the least */
    double seconds;   /* median of a call */
    double gbps;      /* those bytes in that time */
    double over_copy; /* median of (time)/(time of the copy) */
    double spread;    /* of that ratio */
} ar_bench_kernel_row;

/* The tensors of the kernels. */
typedef struct ari_kernel_bench ari_kernel_bench;

#define ARI_BENCH_KERNELS 34
/** Gives; ari_kernel_bench_destroy. Errors: also AR_ERR_ARG (no rows, or less than two columns). */
AR_NODISCARD ar_status ari_kernel_bench_create(ari_kernel_bench **gives, size_t rows, size_t cols,
                                               const ar_device_choice *which, int threads);
/** Accepts NULL. */
void ari_kernel_bench_destroy(ari_kernel_bench *b);
/** Kernel i, 0 <= i < ARI_BENCH_KERNELS. Fills row[0], fp32, and row[1], bf16, where the kernel has that: *n rows.
 *  Errors: also AR_ERR_ARG (another number). */
AR_NODISCARD ar_status ari_bench_kernel(ar_bench_kernel_row row[2], size_t *n, ari_kernel_bench *b, size_t i,
                                        size_t repetitions);

/* --- fused kernels ------------------------------------------------------------------------------------------------ */

/* What a backward kernel saves that also adds up its parameters' gradients, and the gradient that goes past it, in the
 * pass in which it makes dX; and dropout that adds the residual. Beside the same done one thing after the other. */
typedef struct ar_bench_fused_row {
    const char *kernel;        /* in: static storage */
    ar_numerics numerics;      /* in */
    const char *numerics_name; /* its name */
    size_t rows, cols;         /* in: the shape, elements of one tensor */
    double bytes;              /* that the kernel reads and writes, of fp32 tensors, an element */
    double bytes_apart;        /* that one thing after the other does */
    double seconds;            /* median of the kernel */
    double gbps;               /* its bytes over that time */
    double apart_over;         /* median of (time one after the other)/(time) */
    double spread;             /* of that ratio */
} ar_bench_fused_row;

#define ARI_BENCH_FUSED 6
/** Kernel i, 0 <= i < ARI_BENCH_FUSED, with the shape that takes the device's time: of the CPU's blocks of width 768,
 *  of a GPU's of width 4096. */
ar_bench_fused_row ari_bench_fused_at(size_t i, ar_numerics numerics, const ar_device_choice *which);
/** Fills the last six fields of *row. Errors: also AR_ERR_ARG (another kernel, a zero size). */
AR_NODISCARD ar_status ari_bench_fused(ar_bench_fused_row *row, const ar_device_choice *which, int threads,
                                       size_t repetitions);

/* --- blocks and steps --------------------------------------------------------------------------------------------- */

/* One of two sides, of which the first is the reference, beside the reference's matrix products run alone. */
typedef struct ar_bench_side_row {
    double seconds;       /* median */
    double gflops;        /* rate of the matrix products' operations in that time */
    double gemm_fraction; /* median of (time of the same matrix products alone, by sgemm)/(time) */
    double over_first;    /* median of (time)/(time of the first side) */
    double spread;        /* of that ratio; of the seconds in the first side's row */
} ar_bench_side_row;

/** The blocks that stand for the usual ones. Width 768, 12 heads: "gpt2" with LayerNorm, GELU and an MLP of 3072,
 *  "llama" with RMSNorm, rotary positions and a gated MLP of 2048. large: width 4096, 32 heads, 8 KV heads, an MLP of
 *  11008: "gpt" with LayerNorm, GELU and two matrices in the MLP (132 M parameters), "llama" with three (177 M). NULL
 *  after the last. bench/torch_block.py has the same. */
const ar_config *ari_bench_block_config(bool large, size_t i);

/* A slot of the device's table in one pass. */
typedef struct ar_bench_slot_row {
    const char *slot; /* static storage */
    const char *part; /* of its calls; NULL: the slot. Static storage */
    size_t calls;
    double seconds, share; /* of the pass, which takes longer than without being timed so */
    size_t bytes;          /* of the tensors that the calls were given; 0: none, or buffers of unknown size */
} ar_bench_slot_row;

enum { ARI_BENCH_SLOTS = 100 };
typedef struct ar_bench_block_row {
    ar_bench_side_row time;
    size_t parameters;                        /* of the block */
    ar_bench_slot_row slots[ARI_BENCH_SLOTS]; /* longest first; the last: what is between slots */
    size_t n_slots;                           /* 0: not asked for */
} ar_bench_block_row;

typedef struct ar_bench_block_options {
    const ar_config *config;
    size_t batch, seq;
    const ar_device_choice *which; /* NULL: the CPU */
    ar_precision precision;        /* of the native side */
    int threads;
    size_t repetitions;
    bool profile; /* one more pass of each side, of which each slot is timed */
} ar_bench_block_options;

/** What a transformer block costs on one rank, forward and backward. row[0]: native in that precision, row[1]: exact.
 *  Weights count as changed before each pass: the exact arithmetic quantises them anew, as a training step would.
 *  Errors: also AR_ERR_ARG (a size of 0), those of ari_profile_begin. */
AR_NODISCARD ar_status ari_bench_block(ar_bench_block_row row[2], const ar_bench_block_options *o);

typedef struct ar_bench_step_options {
    ar_run run; /* ddp: of the parallelism dp alone */
    const ar_config *config;
    const int64_t *input_ids; /* [batch, seq] */
    size_t repetitions;
} ar_bench_step_options;

/** What a training step costs under a layout: AdamW, gradients clipped to a norm of 1; no baseline, nobody listens.
 *  row[0]: one rank on the same cores, row[1]: the layout. A repetition makes the model on one rank, takes some steps,
 *  runs the matrix products of the whole model, and does the same in the layout. Errors: also those of the layout. */
AR_NODISCARD ar_status ari_bench_step(ar_bench_side_row row[2], const ar_bench_step_options *o);

/* What data parallelism adds to a training step: the same ranks, each with its share of the samples, once with their
 * gradients summed in buckets and once without, each rank for itself. AdamW; no clipping, nobody listens. */
typedef struct ar_bench_ddp_row {
    bool alone;          /* the step without DDP; what follows of buckets is 0 */
    size_t bucket_bytes; /* given: the option */
    ar_bucket_mode mode; /* given */
    size_t buckets;
    uint64_t all_reduces, bytes; /* of rank 0, in one step */
    double virtual_seconds;      /* of one step, by the clock of o->run.sim.cluster; 0: there is none */
    double seconds;              /* median of one step */
    double over_alone;           /* median of (time)/(time of the step without DDP) */
    double spread;               /* of that ratio; of the seconds where alone */
} ar_bench_ddp_row;

/** The step without DDP, then every capacity, a parameter each to 25 MiB, eager and overlapped. Returns how many. */
enum { ARI_BENCH_DDP_ROWS = 13 };
size_t ari_bench_ddp_rows(ar_bench_ddp_row rows[ARI_BENCH_DDP_ROWS]);
/** Fills rows[0..n), whose first is the step without DDP. A repetition takes some steps of every row, one row
 *  after another. Errors: also AR_ERR_ARG (no row). */
AR_NODISCARD ar_status ari_bench_ddp(ar_bench_ddp_row *rows, size_t n, const ar_bench_step_options *o);

/* --- all-reduces -------------------------------------------------------------------------------------------------- */

/* What an all-reduce (sum, not in place) between simulated ranks costs, beside a copy with the same traffic: each
 * rank's thread copies its input to its output, so that, as in the all-reduce, every input is read once and every
 * output written once. */
typedef struct ar_bench_allreduce_row {
    int ranks;
    size_t bytes;   /* of one rank's input */
    ar_dtype dtype; /* AR_F32 or AR_I64 */
    ar_sim_algorithm algorithm;
    double seconds;      /* median of one all-reduce */
    double bus_gbps;     /* 2(N-1)/N * bytes in that time: what each link of a ring would carry */
    double over_copy;    /* median of (time)/(time of the copy) */
    double spread;       /* of that ratio */
    double copy_seconds; /* median of the copy */
    const char *copy;    /* the fastest of the simple copies. Static storage */
} ar_bench_allreduce_row;

enum { ARI_BENCH_ALLREDUCE_SIZES = 7 };
/** 1 KiB to 100 MiB. */
extern const size_t ari_bench_allreduce_sizes[ARI_BENCH_ALLREDUCE_SIZES];

/** Fills in what was measured; the first four fields say what to measure. A repetition is a block of all-reduces, one
 *  right after the other, and a block of each kind of copy, each block long enough to be timed, from the moment in
 *  which its first rank begins to that in which its last one ends. All work on the same memory; what was summed is
 *  compared with what it must be. Errors: also AR_ERR_ARG (no ranks, bytes that are no whole elements), AR_ERR_DTYPE,
 *  AR_ERR_DATA (a wrong sum). */
AR_NODISCARD ar_status ari_bench_allreduce(ar_bench_allreduce_row *row, uint64_t timeout_ns, size_t repetitions);

#endif
