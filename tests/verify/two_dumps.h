/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Two dumps, made of tensors that are equal until a test spoils one, and what is said of them. */
#include "anyrank/verify.h"
#include "ref/core/size.h"
#include "ref/core/tensor_private.h"
#include "ref/io/safetensors_private.h"
#include "tests/support/noise.h"
#include "tests/support/test.h"
#include "tests/verify/verify_support.h"

enum { MOST = 40 };
enum { B = 2, S = 12, H = 24, IDS = 21 }; /* samples, tokens, width, vocabulary */

typedef struct made {
    ar_st_tensor tensor[2][MOST]; /* of the reference, of the other; each has its own data */
    size_t n;
    const char *metadata[2][2]; /* a key and its value of each; NULL: none */
} made;

static inline size_t count_of(const ar_st_tensor *t)
{
    return ari_volume(t->shape, t->ndim);
}

/* The data of a tensor, reference's or other's. */
static inline float *data_of(const made *m, int side, size_t i)
{
    return (float *)(uintptr_t)m->tensor[side][i].data;
}

/* A tensor of both dumps with this data each, which is copied; NULL: noise. */
static inline void put_pair(made *m, ar_st_tensor t, const void *reference, const void *other)
{
    const void *from[] = {reference, other};
    const size_t count = count_of(&t), bytes = (count * ari_dtype_bits(t.dtype) + 7) / 8;
    cr_assert_lt(m->n, MOST);
    for (int k = 0; k < 2; k++) {
        float *data = malloc(bytes + 1);
        cr_assert_not_null(data);
        if (from[k])
            memcpy(data, from[k], bytes);
        for (size_t i = 0; i < count && !from[k]; i++)
            data[i] = noise(i + 7919 * m->n);
        t.data = data;
        m->tensor[k][m->n] = t;
    }
    m->n++;
}

/* A tensor of both dumps, as noise; returns the reference's data. The caller sets what is not equal. */
static inline float *put(made *m, const char *name, int ndim, size_t a, size_t b, size_t c)
{
    put_pair(m, (ar_st_tensor){.name = name, .dtype = AR_F32, .ndim = ndim, .shape = {a, b, c}}, NULL, NULL);
    return data_of(m, 0, m->n - 1);
}

/* Such a tensor of tokens, [B, S, H]. */
static inline float *put_tokens(made *m, const char *name)
{
    return put(m, name, 3, B, S, H);
}

static inline float *other_of(const made *m)
{
    return data_of(m, 1, m->n - 1);
}

static inline void made_write(const made *m, const two_files *f)
{
    for (int k = 0; k < 2; k++)
        cr_assert_ok(
            ari_st_write(k ? f->other : f->reference, m->tensor[k], m->n, m->metadata[k], m->metadata[k][0] != NULL));
}

static inline void made_free(made *m)
{
    for (size_t i = 0; i < 2 * m->n; i++)
        free((void *)(uintptr_t)m->tensor[i % 2][i / 2].data);
    m->n = 0;
}

/* The report on both dumps, which is the caller's. */
static inline ar_verify_report *judge(made *m, ar_verify_options o)
{
    SCOPED(two_files_end) const two_files f = two_files_make();
    ar_verify_report *r = NULL;
    made_write(m, &f);
    o.reference = f.reference;
    o.other = f.other;
    cr_assert_ok(ar_verify(&r, &o));
    made_free(m);
    return r;
}

/* The report on one vector against another by `o`. */
static inline ar_verify_report *verify_vectors(ar_verify_options o, ar_dtype dtype, size_t n, const void *a,
                                               const void *b)
{
    made m = {.n = 0};
    put_pair(&m, vector_of("x", dtype, n, NULL), a, b);
    return judge(&m, o);
}

/* A vector of both dumps, of this data each. */
static inline void put_vectors(made *m, const char *name, size_t n, const float *reference, const float *other)
{
    put_pair(m, vector_of(name, AR_F32, n, NULL), reference, other);
}

static inline size_t id_at(size_t row)
{
    return (row * 5 + row / 4) % IDS;
}

static inline void look_up(float *out, const float *table)
{
    for (size_t row = 0; row < B * S; row++)
        memcpy(out + row * H, table + id_at(row) * H, H * sizeof *out);
}
