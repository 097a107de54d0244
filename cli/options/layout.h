/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CLI_LAYOUT_H
#define ARI_CLI_LAYOUT_H

#include <jansson.h>

#include "anyrank/run.h"
#include "cli/options/args.h"

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

/* Options of an ari_layout_values: how data moves; what the ranks compute on; how a training step is split besides tp;
 * how the data-parallel ranks sum their gradients. */
extern const ari_option ari_movement_options[], ari_device_options[], ari_step_layout_options[], ari_bucket_options[];

/* Rows whose help is the subcommand's; ARI_VALUES has an ari_layout_values called `layout`. */
#define ARI_LAYOUT_OPTIONS(tp_help, numerics_help)                                                                 \
    ARI_OPTION_INT("tp", layout.tp, 1, 4096, "N", tp_help,                                                         \
                   .more = "More than the model's KV heads are possible: then several ranks hold copies of one."), \
        ARI_OPTION_GROUP(ari_movement_options, layout),                                                            \
        ARI_OPTION_ENUM("numerics", layout.numerics, ari_numerics_names, numerics_help),                           \
        ARI_OPTION_GROUP(ari_device_options, layout)
#define ARI_LAYOUT_DDP_OPTIONS(bytes_help)                                                                       \
    ARI_OPTION_INT("zero", layout.zero, 0, 1, "STAGE",                                                           \
                   "1: each rank of --dp keeps its share of the optimizer's state and updates its share of the " \
                   "weights (ZeRO-1); 0: each does all (default 0)"),                                            \
        ARI_OPTION_BYTES("bucket-bytes", layout.bucket_bytes, 0, 0, "BYTES", bytes_help,                         \
                         .more = "The bits do not depend on it in exact numerics."),                             \
        ARI_OPTION_GROUP(ari_bucket_options, layout)
#define ARI_PRECISION_OPTION                                                                                        \
    ARI_OPTION_ENUM("precision", layout.precision, ari_precision_names,                                             \
                    "with --numerics native, of products: f32, tf32 or bf16; sums and all else fp32 (default f32)", \
                    .more = "What enters a product is rounded to TF32 or bf16, and with bf16 what leaves one too.")

/** Whether any option asks for one layout. */
bool ari_layout_given(const ari_layout_values *v);
/** Refuses the choices of later versions (AR_ERR_UNSUPPORTED), options that mean nothing without another (AR_ERR_ARG),
 *  and what the device refuses. */
AR_NODISCARD ar_status ari_layout_check(const ari_layout_values *v);
/** Refuses a precision other than fp32 of exact numerics (AR_ERR_ARG). */
AR_NODISCARD ar_status ari_precision_check(int precision, int numerics);
/** Puts what they ask for into a run, with process and threads: its layout, how gradients are summed over dp (buckets of
 *  AR_BUCKET_BYTES unless given), the device, numerics if given, the cluster. After ari_layout_check. */
void ari_layout_run(ar_run *run, const ari_layout_values *v, const ari_common *common);
/** What --device names, a name that ari_layout_check has let pass; the CPU where it is not given. */
ar_device_choice ari_layout_device(const ari_layout_values *v);
/** The device's name, and a GPU's own and number, into a result. */
void ari_device_json(json_t *o, const ar_device_choice *c);
uint64_t ari_layout_timeout_ns(const ari_layout_values *v);
/** The default plan, or the one that --mlp-order asks for. */
AR_NODISCARD ar_status ari_layout_plan(const ari_layout_values *v, ar_arch arch, ar_plan *plan);

enum { ARI_LAYOUT_TEXT = 128 };
/** ar_parallel_text, and behind it the samples of each data-parallel rank where they are not equally many: "dp=3
 *  (3+3+2)". Writes into text[0 .. ARI_LAYOUT_TEXT) and gives it back. */
const char *ari_layout_text(char *text, const ar_parallel *p, size_t batch);
/* The same as an expression, in storage that lives to the end of the enclosing block. */
#define ARI_LAYOUT(p, batch) ari_layout_text((char[ARI_LAYOUT_TEXT]){0}, (p), (batch))
/** The layout as an object, with the samples of each data-parallel rank. Gives; NULL without memory. */
json_t *ari_layout_json(const ar_parallel *p, size_t batch);

#endif
