/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/harness.h"
#include "anyrank/queue.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/device_private.h"
#include "ref/core/clock.h"
#include "ref/core/device_private.h"
#include "ref/core/os/os.h"
#include "ref/cpu/device_private.h"
#include "ref/io/json.h"

/* --- a program ---------------------------------------------------------------------------------------------------- */

static void refuse(const ari_bench *b, const char *message, const char *option)
{
    fprintf(stderr, "%s: %s%s (--help lists the options)\n", b->name, message, option);
    exit(2);
}

static void print_help(const ari_bench *b, const ari_bench_option *options, size_t n)
{
    printf("usage: %s [options]\n", b->name);
    for (size_t i = 0; i < n; i++)
        printf("  --%-12s %s\n", options[i].name, options[i].help);
    exit(0);
}

/* The value of an option is the next argument; gives the last one that was read. */
static char **read_option(const ari_bench *b, const ari_bench_option *o, char **argument)
{
    char *end = NULL;
    if (o->flag) {
        *o->flag = true;
        return argument;
    }
    const char *value = *++argument;
    if (!value)
        refuse(b, "no value for --", o->name);
    else if (o->text)
        *o->text = value;
    else if (errno = 0, *o->number = strtoul(value, &end, 10), errno || *end || *value == '-' || *o->number == 0)
        refuse(b, "a number from 1 on is needed for --", o->name);
    return argument;
}

void ari_bench_begin(ari_bench *b, char **argv, const ari_bench_option *options, size_t n)
{
    enum { COMMON = 4, MOST = 16 };
    const char *device = NULL;
    const ari_bench_option common[COMMON] = {
        {"device", "cpu, cuda, cuda:N or emulated (default cpu)", .text = &device},
        {"threads", "of the processor", .number = &b->threads},
        {"repetitions", "of which the medians are printed", .number = &b->repetitions},
        {"json", "FILE, or - for stdout: JSON in place of tables", .text = &b->json}};
    ari_bench_option known_options[MOST];
    memcpy(known_options, options, n * sizeof *known_options);
    memcpy(known_options + n, common, sizeof common);
    ari_threads_sleep(argv);
    for (char **a = argv + 1; *a; a++) {
        size_t i = 0;
        while (i < n + COMMON && (strncmp(*a, "--", 2) != 0 || strcmp(*a + 2, known_options[i].name) != 0))
            i++;
        if (strcmp(*a, "--help") == 0)
            print_help(b, known_options, n + COMMON);
        if (i == n + COMMON)
            refuse(b, "unknown option ", *a);
        else
            a = read_option(b, &known_options[i], a);
    }
    if (device && ari_device_choice_parse(&b->device, device) != AR_OK)
        refuse(b, ar_error_message(), "");
    if (b->threads > 4096 || b->repetitions > 100000)
        refuse(b, "more than 4096 threads or 100000 repetitions", "");
    ari_cpu_select_kernels();
    ar_cpu_info cpu;
    ari_cpu_info_get(&cpu);
    b->result = json_pack("{s:s, s:s, s:i, s:{s:s, s:s, s:s, s:s, s:s, s:s}}", "what", b->name, "device",
                          ari_device_kind_name(b->device.kind), "threads", (int)b->threads, "machine", "cpu", cpu.cpu,
                          "features", cpu.features, "blas", cpu.blas, "version", cpu.blas_version, "kernels",
                          cpu.blas_kernels, "reason", cpu.blas_reason);
}

ar_status ari_bench_add(ari_bench *b, const char *table, json_t *row)
{
    if (!json_object_get(b->result, table))
        json_object_set_new(b->result, table, json_array());
    if (json_array_append_new(json_object_get(b->result, table), row) != 0)
        return ar_error_set(AR_ERR_MEMORY, "%s: no memory for a row of its %s", b->name, table);
    return AR_OK;
}

enum { CELL = 25, MOST_COLUMNS = 16 };

static void format_cell(char text[CELL], const json_t *value)
{
    if (json_is_integer(value))
        snprintf(text, CELL, "%lld", (long long)json_integer_value(value));
    else if (json_is_real(value))
        snprintf(text, CELL, "%.4g", json_real_value(value));
    else
        snprintf(text, CELL, "%s", json_is_string(value) ? json_string_value(value) : "-");
}

/* The first pass measures the columns, the second prints them, the members' names above. */
static void print_table(json_t *rows)
{
    int widths[MOST_COLUMNS] = {0};
    for (int pass = 0; pass < 2; pass++) {
        for (size_t i = 0; i <= json_array_size(rows); i++) {
            const char *key;
            json_t *value;
            size_t column = 0;
            json_object_foreach(json_array_get(rows, i > 0 ? i - 1 : 0), key, value)
            {
                char text[CELL];
                format_cell(text, value);
                const char *shown = i > 0 ? text : key;
                int *width = &widths[column++ % MOST_COLUMNS];
                if (pass == 1)
                    printf("%*s  ", *width, shown);
                else if (*width < (int)strlen(shown))
                    *width = (int)strlen(shown);
            }
            if (pass == 1)
                putchar('\n');
        }
    }
    putchar('\n');
}

static ar_status write_result(const ari_bench *b)
{
    if (b->json)
        AR_TRY(ari_json_save(b->result, b->json));
    if (b->json && strcmp(b->json, "-") == 0)
        return AR_OK;
    const char *key;
    json_t *value;
    json_object_foreach(b->result, key, value)
    {
        if (json_is_array(value))
            print_table(value);
    }
    json_object_foreach(json_object_get(b->result, "machine"), key, value)
        printf("%s: %s\n", key, json_string_value(value));
    return AR_OK;
}

int ari_bench_end(ari_bench *b, ar_status st)
{
    if (st == AR_OK)
        st = write_result(b);
    json_decref(b->result);
    if (st != AR_OK)
        fprintf(stderr, "%s: %s\n", b->name, ar_error_message());
    return st == AR_OK ? 0 : 2;
}

double ari_bench_seconds(void)
{
    return 1e-9 * (double)ari_now_ns();
}

/* --- repetitions -------------------------------------------------------------------------------------------------- */

ar_status ari_bench_series_create(ari_bench_series *s, size_t sides, size_t n)
{
    *s = (ari_bench_series){.sides = sides, .n = n};
    AR_TRY(ari_alloc_zero((void **)&s->times, n, (sides + 1) * sizeof(double), "the benchmark's times"));
    s->work = s->times + sides * n;
    return AR_OK;
}

void ari_bench_series_destroy(ari_bench_series *s)
{
    free(s->times);
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static ari_bench_stat stat_of_work(const ari_bench_series *s)
{
    qsort(s->work, s->n, sizeof *s->work, by_value);
    const double median = 0.5 * (s->work[(s->n - 1) / 2] + s->work[s->n / 2]);
    return (ari_bench_stat){.median = median, .spread = (s->work[s->n - 1] - s->work[0]) / median};
}

ari_bench_stat ari_bench_times_of(const ari_bench_series *s, size_t side)
{
    for (size_t i = 0; i < s->n; i++)
        s->work[i] = s->times[i * s->sides + side];
    return stat_of_work(s);
}

ari_bench_stat ari_bench_ratio_of(const ari_bench_series *s, size_t side, size_t base_side)
{
    for (size_t i = 0; i < s->n; i++)
        s->work[i] = s->times[i * s->sides + side] / s->times[i * s->sides + base_side];
    return stat_of_work(s);
}

ar_status ari_bench_repeat(ari_bench_series *s, size_t sides, size_t n, size_t warm, ari_bench_fn fn, void *user)
{
    AR_TRY(ari_bench_series_create(s, sides, n));
    for (size_t i = 0; i < warm; i++)
        AR_TRY(fn(user, s->times));
    for (size_t i = 0; i < n; i++)
        AR_TRY(fn(user, s->times + i * sides));
    return AR_OK;
}

/* --- a device ----------------------------------------------------------------------------------------------------- */

void ari_bench_free(ari_bench_device *b)
{
    for (size_t i = 0; i < b->count; i++)
        b->d->ops->free(b->d, b->q, b->memory[i]);
    free(b->memory);
    b->memory = NULL;
    b->count = b->capacity = 0;
}

ar_status ari_bench_alloc(ari_bench_device *b, ar_buf *result, size_t bytes)
{
    AR_TRY(ARI_GROW(&b->memory, &b->capacity, b->count, "a benchmark's memory"));
    AR_TRY(b->d->ops->alloc(b->d, b->q, result, bytes));
    b->memory[b->count++] = *result;
    return AR_OK;
}

ar_status ari_bench_clock(const ari_bench_device *b, double *seconds)
{
    AR_TRY(ar_queue_sync(b->q, 0));
    *seconds = 1e-9 * (double)ari_device_clock_ns(b->d);
    return AR_OK;
}

/* A linear congruence (Knuth's MMIX constants); magnitudes lie within a factor of four of each other as blocks. */
static void fill(float *x, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        const float unit = (float)((int64_t)(seed >> 40) - (1 << 23)) * 0x1p-23f;
        x[i] = unit * (float)(1 + (seed >> 62)) * 0.25f;
    }
}

static ar_status take_values(ari_bench_device *b, ar_buf *result, size_t n, uint64_t seed)
{
    size_t bytes = 0;
    ARI_OWNED void *values = NULL;
    AR_TRY(ari_mul_size(&bytes, n, sizeof(float)));
    AR_TRY(ari_bench_alloc(b, result, bytes));
    if (b->d->ops->host_reaches) {
        fill(result->ptr, n, seed);
        return AR_OK;
    }
    AR_TRY(ari_alloc(&values, n, sizeof(float), "a benchmark's values"));
    fill(values, n, seed);
    AR_TRY(b->d->ops->copy(b->d, b->q, *result, (ar_cbuf){values}, bytes));
    return ar_queue_sync(b->q, 0);
}

ar_status ari_bench_tensor(ari_bench_device *b, ar_tensor *result, int ndim, const size_t *shape, uint64_t seed)
{
    size_t count = 1;
    ar_buf memory = {NULL};
    for (int i = 0; i < ndim; i++)
        AR_TRY(ari_mul_size(&count, count, shape[i]));
    AR_TRY(take_values(b, &memory, count, seed));
    return ar_tensor_view(result, AR_F32, ndim, shape, memory);
}

ar_status ari_bench_tensor_as(ari_bench_device *b, ar_tensor *result, const ar_tensor *src, ar_dtype dtype)
{
    *result = *src;
    result->dtype = dtype;
    AR_TRY(ari_bench_alloc(b, &result->data, ar_tensor_count(src) * ar_dtype_bytes(dtype)));
    return b->d->ops->copy_strided(b->d, b->q, result, src);
}

ar_status ari_bench_take_bits(ari_sha256 *hash, const ari_bench_device *b, const ar_tensor *t)
{
    size_t bytes = 0;
    ARI_OWNED void *host = NULL;
    AR_TRY(ari_mul_size(&bytes, ar_tensor_count(t), ar_dtype_bytes(t->dtype)));
    AR_TRY(ari_alloc(&host, bytes, 1, "a benchmark's result"));
    AR_TRY(b->d->ops->copy(b->d, b->q, (ar_buf){host}, ar_const(t->data), bytes));
    AR_TRY(ar_queue_sync(b->q, 0));
    ari_sha256_update(hash, host, bytes);
    return AR_OK;
}
