/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CLI_LAYOUT_H
#define ARI_CLI_LAYOUT_H

#include <jansson.h>

#include "anyrank/ddp.h"
#include "anyrank/device.h"
#include "anyrank/parallel.h"
#include "anyrank/process.h"
#include "anyrank/sim.h"
#include "cli/args.h"

/* The options that say how a step is split and what runs it: the same for every subcommand that runs one. */
typedef struct ari_layout_values {
    int tp, dp, micro_batches; /* 0: not given */
    bool sp, keep_gathered, forward_first;
    int zero;            /* stage */
    size_t bucket_bytes; /* ARI_LAYOUT_NOT_GIVEN: as the subcommand has it */
    int bucket_mode;
    bool find_unused;
    int mlp_order, collectives, numerics;
    int precision;      /* ar_precision */
    double timeout;     /* seconds */
    const char *device; /* NULL: not given */
} ari_layout_values;

#define ARI_LAYOUT_NOT_GIVEN SIZE_MAX
#define ARI_LAYOUT_DEFAULTS                                   \
    {                                                         \
        .bucket_bytes = ARI_LAYOUT_NOT_GIVEN, .timeout = 60.0 \
    }

extern const char *const ari_mlp_order_names[];
extern const char *const ari_bucket_mode_names[]; /* in the order of ar_bucket_mode */
/* Those of ar_sim_algorithm whose bytes of each rank a layout decides; with the others the last rank to come moves
 * those of all. */
extern const char *const ari_collectives_names[];
extern const char *const ari_numerics_names[];
extern const char *const ari_device_names[];    /* those that completions offer */
extern const char *const ari_precision_names[]; /* in the order of ar_precision */

#define ARI_LAYOUT_AT(values, field) (offsetof(values, layout) + offsetof(ari_layout_values, field))

/* Rows of an option table; `values` is the subcommand's struct, with an ari_layout_values called `layout`. */
#define ARI_LAYOUT_OPTIONS(values, tp_help, numerics_help)                                                       \
    {.name = "tp",                                                                                               \
     .kind = ARI_OPT_INT,                                                                                        \
     .at = ARI_LAYOUT_AT(values, tp),                                                                            \
     .min = 1,                                                                                                   \
     .max = 4096,                                                                                                \
     .value = "N",                                                                                               \
     .help = (tp_help),                                                                                          \
     .more = "More than the model's KV heads are possible: then several ranks hold copies of one."},             \
        {.name = "mlp-order",                                                                                    \
         .kind = ARI_OPT_ENUM,                                                                                   \
         .at = ARI_LAYOUT_AT(values, mlp_order),                                                                 \
         .choices = ari_mlp_order_names,                                                                         \
         .help = "how the MLP's two layers are split (default column-row)"},                                     \
        {.name = "collectives",                                                                                  \
         .kind = ARI_OPT_ENUM,                                                                                   \
         .at = ARI_LAYOUT_AT(values, collectives),                                                               \
         .choices = ari_collectives_names,                                                                       \
         .help = "how the simulated cluster moves data; the bits are the same (default direct)"},                \
        {.name = "timeout",                                                                                      \
         .kind = ARI_OPT_DOUBLE,                                                                                 \
         .at = ARI_LAYOUT_AT(values, timeout),                                                                   \
         .min = 0.01,                                                                                            \
         .max = 86400,                                                                                           \
         .value = "S",                                                                                           \
         .help = "longest wait of a rank for another, in seconds (default 60)",                                  \
         .more = "A rank that waits longer ends the run with a table of who was where."},                        \
        {.name = "numerics",                                                                                     \
         .kind = ARI_OPT_ENUM,                                                                                   \
         .at = ARI_LAYOUT_AT(values, numerics),                                                                  \
         .choices = ari_numerics_names,                                                                          \
         .help = (numerics_help)},                                                                               \
        {.name = "device",                                                                                       \
         .kind = ARI_OPT_STRING,                                                                                 \
         .at = ARI_LAYOUT_AT(values, device),                                                                    \
         .value = "DEVICE",                                                                                      \
         .help = "what the ranks compute on: cpu, cuda (cuda:N: GPU N, which they share) or emulated, the CUDA " \
                 "device's kernels on the host (default cpu)",                                                   \
         .choices = ari_device_names},                                                                           \
        {.name = "cp", .kind = ARI_OPT_LATER},                                                                   \
    {                                                                                                            \
        .name = "pp", .kind = ARI_OPT_LATER                                                                      \
    }

/* The same for what native numerics multiply. */
#define ARI_PRECISION_OPTION(values)                                                                            \
    {                                                                                                           \
        .name = "precision", .kind = ARI_OPT_ENUM, .at = ARI_LAYOUT_AT(values, precision),                      \
        .choices = ari_precision_names,                                                                         \
        .help = "with --numerics native, of products: f32, tf32 or bf16; sums and all else fp32 (default f32)", \
        .more = "What enters a product is rounded to TF32 or bf16, and with bf16 what leaves one too."          \
    }

/* The same for what else splits a training step. */
#define ARI_LAYOUT_STEP_OPTIONS(values)                                                                       \
    {.name = "sp",                                                                                            \
     .kind = ARI_OPT_FLAG,                                                                                    \
     .at = ARI_LAYOUT_AT(values, sp),                                                                         \
     .help = "sequence parallel beside --tp: each rank holds a part of every sequence between the regions"},  \
        {.name = "keep-gathered",                                                                             \
         .kind = ARI_OPT_FLAG,                                                                                \
         .at = ARI_LAYOUT_AT(values, keep_gathered),                                                          \
         .help = "with --sp: keep gathered inputs for the backward pass, in place of gathering them again"},  \
        {.name = "dp",                                                                                        \
         .kind = ARI_OPT_INT,                                                                                 \
         .at = ARI_LAYOUT_AT(values, dp),                                                                     \
         .min = 1,                                                                                            \
         .max = 4096,                                                                                         \
         .value = "N",                                                                                        \
         .help = "data-parallel ranks, or groups of --tp ranks: each holds some of the sequences",            \
         .more = "Ranks need not hold equally many."},                                                        \
        {.name = "micro-batches",                                                                             \
         .kind = ARI_OPT_INT,                                                                                 \
         .at = ARI_LAYOUT_AT(values, micro_batches),                                                          \
         .min = 1,                                                                                            \
         .max = 1e9,                                                                                          \
         .value = "M",                                                                                        \
         .help = "pieces in which a rank goes through its sequences; gradients are accumulated (default 1)"}, \
    {                                                                                                         \
        .name = "forward-first", .kind = ARI_OPT_FLAG, .at = ARI_LAYOUT_AT(values, forward_first),            \
        .help = "all micro-batches go forward before the first goes backward"                                 \
    }

/* The same for how the data-parallel ranks share their gradients out. */
#define ARI_LAYOUT_DDP_OPTIONS(values, bytes_help)                                                                  \
    {.name = "zero",                                                                                                \
     .kind = ARI_OPT_INT,                                                                                           \
     .at = ARI_LAYOUT_AT(values, zero),                                                                             \
     .min = 0,                                                                                                      \
     .max = 1,                                                                                                      \
     .value = "STAGE",                                                                                              \
     .help = "1: each rank of --dp keeps its share of the optimizer's state and updates its share of the "          \
             "weights (ZeRO-1); 0: each does all (default 0)"},                                                     \
        {.name = "bucket-bytes",                                                                                    \
         .kind = ARI_OPT_BYTES,                                                                                     \
         .at = ARI_LAYOUT_AT(values, bucket_bytes),                                                                 \
         .value = "BYTES",                                                                                          \
         .help = (bytes_help),                                                                                      \
         .more = "The bits do not depend on it in exact numerics."},                                                \
        {.name = "bucket-mode",                                                                                     \
         .kind = ARI_OPT_ENUM,                                                                                      \
         .at = ARI_LAYOUT_AT(values, bucket_mode),                                                                  \
         .choices = ari_bucket_mode_names,                                                                          \
         .help = "overlap: each bucket is reduced while the backward pass goes on; eager: all after it "            \
                 "(default overlap)"},                                                                              \
    {                                                                                                               \
        .name = "find-unused", .kind = ARI_OPT_FLAG, .at = ARI_LAYOUT_AT(values, find_unused),                      \
        .help = "the ranks of --dp agree which parameters got a gradient; the others are left alone",               \
        .more = "They keep no gradient, and their optimizer state stays as it is. Without this option a parameter " \
                "without gradient is an error that names it."                                                       \
    }

/** Whether any option asks for one layout. */
bool ari_layout_given(const ari_layout_values *v);
/** The layout that the options ask for. */
ar_parallel ari_layout_parallel(const ari_layout_values *v);
/** Refuses the choices of later versions (AR_ERR_UNSUPPORTED), options that mean nothing without another (AR_ERR_ARG),
 *  and what the device refuses. */
AR_NODISCARD ar_status ari_layout_check(const ari_layout_values *v);
/** Refuses a precision other than fp32 of exact numerics (AR_ERR_ARG). */
AR_NODISCARD ar_status ari_precision_check(int precision, int numerics);
/** How gradients are summed over dp: ar_ddp_defaults with what the options say; `capacity` where they name none. */
ar_ddp_options ari_layout_ddp(const ari_layout_values *v, size_t capacity);
/** What --device names, a name that ari_layout_check has let pass; the CPU where it is not given. */
ar_device_choice ari_layout_device(const ari_layout_values *v);
enum { ARI_DEVICE_TEXT = 160 };
/** What the ranks of a run compute on, in words: "4 ranks share GPU 0 (NVIDIA H200)"; "" for the CPU. world 0: runs of
 *  different numbers. p: ranks are processes, NULL: threads. Writes into text[0 .. ARI_DEVICE_TEXT) and gives it
 *  back. */
const char *ari_device_text(char *text, const ar_device_choice *c, int world, const ar_process *p);
/** The device's name, and a GPU's own and number, into a result. */
void ari_device_json(json_t *o, const ar_device_choice *c);
ar_sim_algorithm ari_layout_algorithm(const ari_layout_values *v);
uint64_t ari_layout_timeout_ns(const ari_layout_values *v);
/** The default plan, or the one that --mlp-order asks for. */
AR_NODISCARD ar_status ari_layout_plan(const ari_layout_values *v, ar_arch arch, ar_plan *plan);

enum { ARI_LAYOUT_TEXT = 128 };
/** ar_parallel_text, and behind it the samples of each data-parallel rank where they are not equally many: "dp=3
 *  (3+3+2)". Writes into text[0 .. ARI_LAYOUT_TEXT) and gives it back. */
const char *ari_layout_text(char *text, const ar_parallel *p, size_t batch);
/** Samples of a data-parallel rank. */
size_t ari_layout_samples(const ar_parallel *p, size_t batch, int dp_rank);
/** The layout as an object, with the samples of each data-parallel rank. Gives; NULL without memory. */
json_t *ari_layout_json(const ar_parallel *p, size_t batch);

#endif
