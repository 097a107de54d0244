/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_VERIFY_REPLAY_SUPPORT_H
#define TESTS_VERIFY_REPLAY_SUPPORT_H

/* Two dumps, made of tensors that are equal until a test spoils one, and the cause of their last tensor's difference. */
#include <unistd.h>

#include "tests/support/noise.h"
#include "tests/support/test.h"
#include "verify/diagnose/diagnose.h"

enum { MOST = 16 };
enum { B = 2, S = 12, H = 24, IDS = 21 }; /* samples, tokens, width, vocabulary */

typedef struct made {
    ar_st_tensor tensor[2][MOST]; /* of the reference, of the other; each has its own data */
    size_t n;
    int ranks; /* of the other; 0: one */
} made;

static inline size_t count_of(const ar_st_tensor *t)
{
    size_t n = 1;
    for (int i = 0; i < t->ndim; i++)
        n *= t->shape[i];
    return n;
}

/* A tensor of both dumps, as noise; returns the reference's data. The caller sets what is not equal. */
static inline float *put(made *m, const char *name, int ndim, size_t a, size_t b, size_t c)
{
    float *data[2];
    for (int k = 0; k < 2; k++) {
        ar_st_tensor *t = &m->tensor[k][m->n];
        *t = (ar_st_tensor){.name = name, .dtype = AR_F32, .ndim = ndim, .shape = {a, b, c}};
        t->data = data[k] = malloc(count_of(t) * sizeof(float));
        for (size_t i = 0; i < count_of(t); i++)
            data[k][i] = noise(i + 7919 * m->n);
    }
    m->n++;
    return data[0];
}

static inline float *other_of(const made *m)
{
    return (float *)(uintptr_t)m->tensor[1][m->n - 1].data;
}

/* The cause of the last tensor's difference. */
static inline ar_verify_row look(made *m, double rtol)
{
    char path[2][80];
    ar_dump *dump[2];
    ar_verify_row row = {.name = m->tensor[0][m->n - 1].name};
    for (int k = 0; k < 2; k++) {
        snprintf(path[k], sizeof path[k], "/tmp/anyrank-replay-%ld-%d.safetensors", (long)getpid(), k);
        cr_assert_ok(ar_st_write(path[k], m->tensor[k], m->n, NULL, 0));
        cr_assert_ok(ar_dump_open(&dump[k], path[k], NULL));
    }
    const ari_explain_case c = {.reference = dump[0],
                                .other = dump[1],
                                .mesh = ari_ranks_of(&(ar_parallel){.tp = m->ranks ? m->ranks : 1}),
                                .rtol = rtol};
    cr_assert_ok(ari_explain(&row, ar_dump_find(dump[0], row.name), ar_dump_find(dump[1], row.name), &c));
    for (int k = 0; k < 2; k++) {
        ar_dump_close(dump[k]);
        unlink(path[k]);
        for (size_t i = 0; i < m->n; i++)
            free((void *)(uintptr_t)m->tensor[k][i].data);
    }
    return row;
}

/* --- ids ---------------------------------------------------------------------------------------------------------- */

static inline size_t id_at(size_t row)
{
    return (row * 5 + row / 4) % IDS;
}

static inline void look_up(float *out, const float *table)
{
    for (size_t row = 0; row < B * S; row++)
        memcpy(out + row * H, table + id_at(row) * H, H * sizeof *out);
}

#endif
