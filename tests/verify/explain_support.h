/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_VERIFY_EXPLAIN_SUPPORT_H
#define TESTS_VERIFY_EXPLAIN_SUPPORT_H

/* A reference dump from PyTorch and a second one that a test spoils, as files: every tensor of the reference, with or
 * without the rounding that another program's sums would leave. */
#include <unistd.h>

#include "tests/support/noise.h"
#include "tests/support/test.h"
#include "verify/diagnose/diagnose.h"

#define GQA_GRADS "llama-gqa-tiny/grads.safetensors"
#define GQA_MODEL "llama-gqa-tiny/model.safetensors"
#define GQA_OUTPUTS "llama-gqa-tiny/outputs.safetensors"
#define MQA_GRADS "llama-mqa-tied-tiny/grads.safetensors"
#define GPT2_GRADS "gpt2-tiny/grads.safetensors"
#define GPT2_MODEL "gpt2-tiny/model.safetensors"
#define GPT2_OUTPUTS "gpt2-tiny/outputs.safetensors"

enum { MAX_TENSORS = 64 };

typedef struct dumps {
    char reference_path[512], path[64];
    ar_st_file *file;
    ar_st_tensor tensor[MAX_TENSORS];
    float *data[MAX_TENSORS];
    size_t n;
    ar_dump *reference, *other;
} dumps;

static inline float largest_of(const float *x, size_t n)
{
    float largest = 0.0f;
    for (size_t i = 0; i < n; i++)
        largest = fmaxf(largest, fabsf(x[i]));
    return largest;
}

/* Sums in another order: up to 3e-6 of the largest element. */
static inline void add_rounding(float *x, size_t n)
{
    const float largest = largest_of(x, n);
    for (size_t i = 0; i < n; i++)
        x[i] += 3e-6f * largest * noise(i + n);
}

static inline void dumps_begin(dumps *d, const char *file, bool rounding)
{
    memset(d, 0, sizeof *d);
    snprintf(d->reference_path, sizeof d->reference_path, "%s/%s", TEST_GOLDEN_DIR, file);
    snprintf(d->path, sizeof d->path, "/tmp/anyrank-explain-%ld-%s", (long)getpid(), strrchr(file, '/') + 1);
    cr_assert_ok(ar_st_open(&d->file, d->reference_path));
    d->n = ar_st_count(d->file);
    cr_assert(d->n < MAX_TENSORS);
    for (size_t i = 0; i < d->n; i++) {
        const ar_st_entry *e = ar_st_at(d->file, i);
        d->data[i] = malloc(e->count * sizeof(float));
        cr_assert_ok(ar_st_to_f32(e, d->data[i]));
        if (rounding)
            add_rounding(d->data[i], e->count);
        d->tensor[i] = (ar_st_tensor){.name = e->name, .dtype = AR_F32, .ndim = e->ndim, .data = d->data[i]};
        memcpy(d->tensor[i].shape, e->shape, sizeof e->shape);
    }
}

static inline size_t dumps_index(const dumps *d, const char *name)
{
    size_t i = 0;
    while (i < d->n && strcmp(d->tensor[i].name, name) != 0)
        i++;
    cr_assert(i < d->n, "no tensor %s", name);
    return i;
}

static inline float *dumps_data(dumps *d, const char *name)
{
    return d->data[dumps_index(d, name)];
}

static inline size_t dumps_count(const dumps *d, const char *name)
{
    return ar_st_find(d->file, name)->count;
}

static inline void dumps_write(dumps *d)
{
    cr_assert_ok(ar_st_write(d->path, d->tensor, d->n, NULL, 0));
    cr_assert_ok(ar_dump_open(&d->reference, d->reference_path, NULL));
    cr_assert_ok(ar_dump_open(&d->other, d->path, NULL));
}

static inline void dumps_end(dumps *d)
{
    ar_dump_close(d->reference);
    ar_dump_close(d->other);
    unlink(d->path);
    ar_st_close(d->file);
    for (size_t i = 0; i < d->n; i++)
        free(d->data[i]);
}

/* What is said of one tensor. */
static inline ar_verify_row explained(const dumps *d, const char *name, ari_explain_case c)
{
    ar_verify_row row = {.name = name};
    c.reference = d->reference;
    c.other = d->other;
    const ar_dump_tensor *a = ar_dump_find(d->reference, name), *b = ar_dump_find(d->other, name);
    cr_assert(a && b);
    cr_assert_eq(ari_explain(&row, a, b, &c), AR_OK, "%s: %s", name, ar_error_message());
    return row;
}

#endif
