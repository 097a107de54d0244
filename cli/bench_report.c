/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_report.h"

#include "cli/options/layout.h"
#include "cli/table.h"
#include "ref/io/json.h"

ar_status ari_bench_print_gemm(const ar_bench_gemm_row *rows, size_t n, int threads)
{
    static const ari_column columns[] = {{"batch", ARI_RIGHT},
                                         {"m", ARI_RIGHT},
                                         {"n", ARI_RIGHT},
                                         {"k", ARI_RIGHT},
                                         {"native GF/s", ARI_RIGHT},
                                         {"exact/native", ARI_RIGHT},
                                         {"weights prepared", ARI_RIGHT},
                                         {"spread", ARI_RIGHT}};
    ari_table *t = NULL;
    AR_TRY(ari_table_create(&t, columns, sizeof columns / sizeof *columns));
    for (size_t i = 0; i < n; i++) {
        ari_table_cell(t, "%zu", rows[i].batch);
        ari_table_cell(t, "%zu", rows[i].m);
        ari_table_cell(t, "%zu", rows[i].n);
        ari_table_cell(t, "%zu", rows[i].k);
        ari_table_cell(t, "%.1f", rows[i].native_gflops);
        ari_table_cell(t, "%.2f", rows[i].exact_over_native);
        ari_table_cell(t, "%.2f", rows[i].exact_over_native_prepared);
        ari_table_cell(t, "%.0f %%", 100.0 * rows[i].spread);
    }
    const ar_status st = ari_table_print(t, stdout, 0);
    ari_table_destroy(t);
    printf(
        "\nY[m,n] = X[m,k] W[n,k]^T, %d thread%s; time of the exact product over that of sgemm, medians. 'weights\n"
        "prepared': W's exponents and integers were made before, as in a training step. 'spread': of the repetitions'\n"
        "exact/native, (largest - smallest)/median.\n",
        threads, threads == 1 ? "" : "s");
    return st;
}

json_t *ari_bench_json_gemm(const ar_bench_gemm_row *rows, size_t n)
{
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++)
        json_array_append_new(list, json_pack("{s:I, s:I, s:I, s:I, s:o, s:o, s:o, s:o}", "batch",
                                              (json_int_t)rows[i].batch, "m", (json_int_t)rows[i].m, "n",
                                              (json_int_t)rows[i].n, "k", (json_int_t)rows[i].k, "native_gflops",
                                              ari_json_number(rows[i].native_gflops), "exact_over_native",
                                              ari_json_number(rows[i].exact_over_native), "exact_over_native_prepared",
                                              ari_json_number(rows[i].exact_over_native_prepared), "spread",
                                              ari_json_number(rows[i].spread)));
    return list;
}

ar_status ari_bench_print_grad(const ar_bench_grad_row *rows, size_t n, int threads)
{
    static const ari_column columns[] = {{"out", ARI_RIGHT},      {"in", ARI_RIGHT},
                                         {"tokens", ARI_RIGHT},   {"seq", ARI_RIGHT},
                                         {"time", ARI_RIGHT},     {"of one contraction", ARI_RIGHT},
                                         {"of sgemm", ARI_RIGHT}, {"spread", ARI_RIGHT}};
    ari_table *t = NULL;
    AR_TRY(ari_table_create(&t, columns, sizeof columns / sizeof *columns));
    for (size_t i = 0; i < n; i++) {
        ari_table_cell(t, "%zu", rows[i].out);
        ari_table_cell(t, "%zu", rows[i].in);
        ari_table_cell(t, "%zu", rows[i].tokens);
        ari_table_cell(t, "%zu", rows[i].seq);
        ari_table_cell(t, "%s", ARI_SECONDS(rows[i].seconds));
        ari_table_cell(t, "%.2f", rows[i].over_contraction);
        ari_table_cell(t, "%.2f", rows[i].over_native);
        ari_table_cell(t, "%.0f %%", 100.0 * rows[i].spread);
    }
    const ar_status st = ari_table_print(t, stdout, 0);
    ari_table_destroy(t);
    printf("\nThe exact gradient of a weight [out, in], %d thread%s: each sequence's contraction is rounded and goes "
           "into\n"
           "the accumulator. Medians of its time over that of one exact contraction over all tokens, and of sgemm.\n"
           "'spread': of the first ratio, (largest - smallest)/median.\n",
           threads, threads == 1 ? "" : "s");
    return st;
}

json_t *ari_bench_json_grad(const ar_bench_grad_row *rows, size_t n)
{
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++)
        json_array_append_new(
            list, json_pack("{s:I, s:I, s:I, s:I, s:o, s:o, s:o, s:o}", "out", (json_int_t)rows[i].out, "in",
                            (json_int_t)rows[i].in, "tokens", (json_int_t)rows[i].tokens, "seq",
                            (json_int_t)rows[i].seq, "seconds", ari_json_number(rows[i].seconds), "over_contraction",
                            ari_json_number(rows[i].over_contraction), "over_native",
                            ari_json_number(rows[i].over_native), "spread", ari_json_number(rows[i].spread)));
    return list;
}

ar_status ari_bench_print_block(const ari_bench_block_line *lines, size_t n, int threads)
{
    static const ari_column columns[] = {{"block", ARI_LEFT},     {"numerics", ARI_LEFT},   {"batch", ARI_RIGHT},
                                         {"seq", ARI_RIGHT},      {"time", ARI_RIGHT},      {"GF/s", ARI_RIGHT},
                                         {"products", ARI_RIGHT}, {"of native", ARI_RIGHT}, {"spread", ARI_RIGHT}};
    ari_table *t = NULL;
    AR_TRY(ari_table_create(&t, columns, sizeof columns / sizeof *columns));
    for (size_t i = 0; i < n; i++) {
        const ar_bench_block_row *row = &lines[i].row;
        ari_table_cell(t, "%s", lines[i].block);
        ari_table_cell(t, "%s", lines[i].numerics);
        ari_table_cell(t, "%zu", lines[i].batch);
        ari_table_cell(t, "%zu", lines[i].seq);
        ari_table_cell(t, "%s", ARI_SECONDS(row->seconds));
        ari_table_cell(t, "%.1f", row->gflops);
        ari_table_cell(t, "%.2f", row->gemm_fraction);
        ari_table_cell(t, "%.2f", row->over_native);
        ari_table_cell(t, "%.0f %%", 100.0 * row->spread);
    }
    const ar_status st = ari_table_print(t, stdout, 0);
    ari_table_destroy(t);
    printf(
        "\nOne transformer block forward and backward, %d thread%s; medians. 'products': time of its matrix products\n"
        "alone, by sgemm, over that of the block. 'of native': over the time of the native block. 'spread': of the\n"
        "times, (largest - smallest)/median.\n",
        threads, threads == 1 ? "" : "s");
    return st;
}

json_t *ari_bench_json_block(const ari_bench_block_line *lines, size_t n)
{
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++) {
        const ar_bench_block_row *row = &lines[i].row;
        json_array_append_new(
            list, json_pack("{s:s, s:s, s:I, s:I, s:o, s:o, s:o, s:o, s:o}", "block", lines[i].block, "numerics",
                            lines[i].numerics, "batch", (json_int_t)lines[i].batch, "seq", (json_int_t)lines[i].seq,
                            "seconds", ari_json_number(row->seconds), "gflops", ari_json_number(row->gflops),
                            "gemm_fraction", ari_json_number(row->gemm_fraction), "over_native",
                            ari_json_number(row->over_native), "spread", ari_json_number(row->spread)));
    }
    return list;
}

ar_status ari_bench_print_step(const ari_bench_step_line *lines, size_t n, const ar_bench_step_options *o)
{
    static const ari_column columns[] = {{"layout", ARI_LEFT}, {"numerics", ARI_LEFT},  {"time", ARI_RIGHT},
                                         {"GF/s", ARI_RIGHT},  {"products", ARI_RIGHT}, {"of tp=1", ARI_RIGHT},
                                         {"spread", ARI_RIGHT}};
    ari_table *t = NULL;
    AR_TRY(ari_table_create(&t, columns, sizeof columns / sizeof *columns));
    for (size_t i = 0; i < n; i++) {
        const ar_bench_step_row *row = &lines[i].row;
        char layout[ARI_LAYOUT_TEXT];
        ari_table_cell(t, "%s", ari_layout_text(layout, &lines[i].parallel, o->run.batch));
        ari_table_cell(t, "%s", ari_numerics_names[lines[i].numerics]);
        ari_table_cell(t, "%s", ARI_SECONDS(row->seconds));
        ari_table_cell(t, "%.1f", row->gflops);
        ari_table_cell(t, "%.2f", row->gemm_fraction);
        ari_table_cell(t, "%.2f", row->over_single);
        ari_table_cell(t, "%.0f %%", 100.0 * row->spread);
    }
    const ar_status st = ari_table_print(t, stdout, 0);
    ari_table_destroy(t);
    printf("\nA training step of %s (AdamW, clipping), batch %zu x seq %zu, %d thread%s in all; medians. 'products': "
           "time\n"
           "of the model's matrix products alone, by sgemm, over that of the step. 'of tp=1': over the time of one "
           "rank's\n"
           "step. 'spread': of that ratio, in the first row of the times, (largest - smallest)/median.\n",
           o->config->name, o->run.batch, o->run.seq, o->run.threads, o->run.threads == 1 ? "" : "s");
    return st;
}

json_t *ari_bench_json_step(const ari_bench_step_line *lines, size_t n, const ar_bench_step_options *o)
{
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++) {
        const ar_bench_step_row *row = &lines[i].row;
        char layout[ARI_LAYOUT_TEXT];
        ar_parallel_text(layout, sizeof layout, &lines[i].parallel);
        json_array_append_new(list,
                              json_pack("{s:s, s:s, s:s, s:I, s:I, s:o, s:o, s:o, s:o, s:o}", "model", o->config->name,
                                        "layout", layout, "numerics", ari_numerics_names[lines[i].numerics], "batch",
                                        (json_int_t)o->run.batch, "seq", (json_int_t)o->run.seq, "seconds",
                                        ari_json_number(row->seconds), "gflops", ari_json_number(row->gflops),
                                        "gemm_fraction", ari_json_number(row->gemm_fraction), "over_single",
                                        ari_json_number(row->over_single), "spread", ari_json_number(row->spread)));
    }
    return list;
}

/* "1 KiB", "25 MiB"; what is not a whole number of either, in bytes. */
static void size_cell(ari_table *t, size_t bytes)
{
    if (bytes % 1048576 == 0)
        ari_table_cell(t, "%zu MiB", bytes / 1048576);
    else if (bytes % 1024 == 0)
        ari_table_cell(t, "%zu KiB", bytes / 1024);
    else
        ari_table_cell(t, "%zu B", bytes);
}

static const char *const bucket_modes[] = {[AR_BUCKETS_OVERLAP] = "overlap", [AR_BUCKETS_EAGER] = "eager"};

ar_status ari_bench_print_ddp(const ar_bench_ddp_row *rows, size_t n, const ar_bench_ddp_options *o)
{
    static const ari_column columns[] = {{"capacity", ARI_RIGHT},    {"mode", ARI_LEFT},   {"buckets", ARI_RIGHT},
                                         {"all-reduces", ARI_RIGHT}, {"MB", ARI_RIGHT},    {"time", ARI_RIGHT},
                                         {"of no DDP", ARI_RIGHT},   {"spread", ARI_RIGHT}};
    ari_table *t = NULL;
    AR_TRY(ari_table_create(&t, columns, sizeof columns / sizeof *columns));
    for (size_t i = 0; i < n; i++) {
        const ar_bench_ddp_row *row = &rows[i];
        if (row->alone || row->bucket_bytes == 0)
            ari_table_cell(t, "%s", row->alone ? "no DDP" : "a parameter");
        else
            size_cell(t, row->bucket_bytes);
        ari_table_cell(t, "%s", row->alone ? "" : bucket_modes[row->mode]);
        ari_table_cell(t, "%zu", row->buckets);
        ari_table_cell(t, "%llu", (unsigned long long)row->all_reduces);
        ari_table_cell(t, "%.1f", 1e-6 * (double)row->bytes);
        ari_table_cell(t, "%s", ARI_SECONDS(row->seconds));
        ari_table_cell(t, "%.2f", row->over_alone);
        ari_table_cell(t, "%.0f %%", 100.0 * row->spread);
    }
    const ar_status st = ari_table_print(t, stdout, 0);
    ari_table_destroy(t);
    printf(
        "\nA training step of %s (AdamW, %s), batch %zu x seq %zu, dp=%d, %d thread%s in all; medians. 'no DDP': the\n"
        "same ranks with the same samples, each for itself. 'all-reduces', 'MB': of rank 0 in one step, bytes read "
        "and\n"
        "written between ranks. 'spread': of the ratio, in the first row of the times, (largest - smallest)/median.\n",
        o->config->name, ari_numerics_names[o->run.numerics], o->run.batch, o->run.seq,
        ar_parallel_world(&o->run.parallel), o->run.threads, o->run.threads == 1 ? "" : "s");
    return st;
}

json_t *ari_bench_json_ddp(const ar_bench_ddp_row *rows, size_t n, const ar_bench_ddp_options *o)
{
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++) {
        const ar_bench_ddp_row *row = &rows[i];
        json_t *one = json_pack("{s:s, s:i, s:s, s:I, s:I, s:b}", "model", o->config->name, "ranks",
                                ar_parallel_world(&o->run.parallel), "numerics", ari_numerics_names[o->run.numerics],
                                "batch", (json_int_t)o->run.batch, "seq", (json_int_t)o->run.seq, "ddp", !row->alone);
        json_object_set_new(one, "bucket_bytes",
                            row->alone ? json_null() : json_integer((json_int_t)row->bucket_bytes));
        json_object_set_new(one, "mode", row->alone ? json_null() : json_string(bucket_modes[row->mode]));
        json_object_set_new(one, "buckets", json_integer((json_int_t)row->buckets));
        json_object_set_new(one, "all_reduces", json_integer((json_int_t)row->all_reduces));
        json_object_set_new(one, "bytes", json_integer((json_int_t)row->bytes));
        json_object_set_new(one, "seconds", ari_json_number(row->seconds));
        json_object_set_new(one, "over_alone", ari_json_number(row->over_alone));
        json_object_set_new(one, "spread", ari_json_number(row->spread));
        json_array_append_new(list, one);
    }
    return list;
}

const char *const ari_bench_dtype_names[] = {"f32", "i64", NULL};
const char *const ari_bench_algorithm_names[] = {"auto", "direct", "ring", "last", NULL};

static void time_cell(ari_table *t, double seconds)
{
    if (seconds < 0.9995e-3)
        ari_table_cell(t, "%.2f us", 1e6 * seconds);
    else
        ari_table_cell(t, "%.2f ms", 1e3 * seconds);
}

ar_status ari_bench_print_allreduce(const ar_bench_allreduce_row *rows, size_t n)
{
    static const ari_column columns[] = {{"ranks", ARI_RIGHT}, {"size", ARI_RIGHT},         {"type", ARI_LEFT},
                                         {"how", ARI_LEFT},    {"time", ARI_RIGHT},         {"bus GB/s", ARI_RIGHT},
                                         {"copy", ARI_RIGHT},  {"times a copy", ARI_RIGHT}, {"spread", ARI_RIGHT}};
    ari_table *t = NULL;
    AR_TRY(ari_table_create(&t, columns, sizeof columns / sizeof *columns));
    for (size_t i = 0; i < n; i++) {
        ari_table_cell(t, "%d", rows[i].ranks);
        size_cell(t, rows[i].bytes);
        ari_table_cell(t, "%s", ari_bench_dtype_names[rows[i].dtype == AR_I64]);
        ari_table_cell(t, "%s", ari_bench_algorithm_names[rows[i].algorithm]);
        time_cell(t, rows[i].seconds);
        ari_table_cell(t, "%.2f", rows[i].bus_gbps);
        time_cell(t, rows[i].copy_seconds);
        ari_table_cell(t, "%.2f", rows[i].over_copy);
        ari_table_cell(t, "%.0f %%", 100.0 * rows[i].spread);
    }
    const ar_status st = ari_table_print(t, stdout, 0);
    ari_table_destroy(t);
    printf(
        "\nOne all-reduce (sum) between N ranks, which are threads of this process, each with an input and an output "
        "of\n"
        "this size; medians. 'bus': 2(N-1)/N x size over the time, the rate of each link of a ring that took as long.\n"
        "'copy': the same threads each copy their input to their output, so the memory has the same traffic; the\n"
        "fastest of memcpy, streaming stores and rep movsb. 'spread': of times a copy, (largest - smallest)/median.\n");
    return st;
}

json_t *ari_bench_json_allreduce(const ar_bench_allreduce_row *rows, size_t n)
{
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++)
        json_array_append_new(
            list,
            json_pack("{s:i, s:I, s:s, s:s, s:o, s:o, s:o, s:o, s:s, s:o}", "ranks", rows[i].ranks, "bytes",
                      (json_int_t)rows[i].bytes, "numerics", ari_bench_dtype_names[rows[i].dtype == AR_I64],
                      "algorithm", ari_bench_algorithm_names[rows[i].algorithm], "seconds",
                      ari_json_number(rows[i].seconds), "bus_gbps", ari_json_number(rows[i].bus_gbps), "over_copy",
                      ari_json_number(rows[i].over_copy), "copy_seconds", ari_json_number(rows[i].copy_seconds), "copy",
                      rows[i].copy, "spread", ari_json_number(rows[i].spread)));
    return list;
}
