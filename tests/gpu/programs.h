/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The main functions that tests/gpu/programs.c chooses from: tests/CMakeLists.txt compiles each of these programs with
 * its main named so, and with this file. */
int anyrank_main(int argc, char **argv);
int conformance_main_main(int argc, char **argv);
int gpu_smoke_main(int argc, char **argv);
int bench_gemm_main(int argc, char **argv);
int bench_block_main(int argc, char **argv);
int bench_nccl_main(int argc, char **argv);
