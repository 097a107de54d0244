/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CLI_BENCH_REPORT_H
#define ARI_CLI_BENCH_REPORT_H

#include "bench/allreduce.h"
#include "bench/block.h"
#include "bench/ddp.h"
#include "bench/gemm.h"
#include "bench/grad.h"
#include "bench/step.h"
#include "cli/command.h"

/* What `bench` tells: a table for people, and {"rows": [...]} for programs. */

AR_NODISCARD ar_status ari_bench_print_gemm(const ar_bench_gemm_row *rows, size_t n, int threads);
json_t *ari_bench_json_gemm(const ar_bench_gemm_row *rows, size_t n);

AR_NODISCARD ar_status ari_bench_print_grad(const ar_bench_grad_row *rows, size_t n, int threads);
json_t *ari_bench_json_grad(const ar_bench_grad_row *rows, size_t n);

/* A block in one of the numerics. */
typedef struct ari_bench_block_line {
    const char *block, *numerics;
    size_t batch, seq;
    ar_bench_block_row row;
} ari_bench_block_line;
AR_NODISCARD ar_status ari_bench_print_block(const ari_bench_block_line *lines, size_t n, int threads);
json_t *ari_bench_json_block(const ari_bench_block_line *lines, size_t n);

/* A step in one layout and one of the numerics. */
typedef struct ari_bench_step_line {
    ar_parallel parallel;
    ar_numerics numerics;
    ar_bench_step_row row;
} ari_bench_step_line;
AR_NODISCARD ar_status ari_bench_print_step(const ari_bench_step_line *lines, size_t n, const ar_bench_step_options *o);
json_t *ari_bench_json_step(const ari_bench_step_line *lines, size_t n, const ar_bench_step_options *o);

AR_NODISCARD ar_status ari_bench_print_ddp(const ar_bench_ddp_row *rows, size_t n, const ar_bench_ddp_options *o);
json_t *ari_bench_json_ddp(const ar_bench_ddp_row *rows, size_t n, const ar_bench_ddp_options *o);

extern const char *const ari_bench_dtype_names[];     /* "f32", "i64" */
extern const char *const ari_bench_algorithm_names[]; /* in the order of ar_sim_algorithm */
AR_NODISCARD ar_status ari_bench_print_allreduce(const ar_bench_allreduce_row *rows, size_t n);
json_t *ari_bench_json_allreduce(const ar_bench_allreduce_row *rows, size_t n);

#endif
