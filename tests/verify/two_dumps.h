/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Two dumps, made of tensors that are equal until a test spoils one, and what is said of them. */
#include "ref/core/tensor_private.h"
#include "ref/io/safetensors_private.h"
#include "tests/support/noise.h"
#include "tests/support/test.h"
#include "tests/verify/verify_support.h"
#include "verify/diagnose/diagnose.h"

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

/* What is said of the last tensor. */
static inline ar_verify_row look(made *m, ari_explain_case c)
{
    SCOPED(two_files_end) const two_files f = two_files_make();
    ar_verify_row row = {.name = m->tensor[0][m->n - 1].name};
    OWNED(ar_dump_close) ar_dump *reference = NULL, *other = NULL;
    made_write(m, &f);
    cr_assert_ok(ar_dump_open(&reference, f.reference, NULL));
    cr_assert_ok(ar_dump_open(&other, f.other, NULL));
    c.reference = reference;
    c.other = other;
    cr_assert_ok(ari_explain(&row, ar_dump_find(reference, row.name), ar_dump_find(other, row.name), &c));
    made_free(m);
    return row;
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

/* The cause, or another one where a ! precedes it, and words of the hint, which may be NULL; number: the case. */
static inline void expect_row(const ar_verify_row *row, const char *cause, const char *words, size_t number)
{
    const bool not = cause[0] == '!';
    const char *said = row->evidence.cause ? row->evidence.cause : "none";
    cr_expect((strcmp(said, cause + not ) == 0) != not &&(!words || strstr(row->hint, words)),
              "case %zu, %s: expected %s, '%s'\n  cause   %s\n  pattern %s\n  hint    %s", number, row->name, cause,
              words ? words : "", said, row->pattern, row->hint);
}

#define ONE_RANK .mesh = {{1, 1, 1, 1, 1}}

/* The cause of the last tensor's difference to a run on so many tensor-parallel ranks. */
static inline void expect_cause_on(int ranks, made *m, const char *cause, const char *words, size_t number)
{
    const ar_verify_row row = look(m, (ari_explain_case){.mesh = ari_ranks_of(&(ar_parallel){.tp = ranks})});
    expect_row(&row, cause, words, number);
}

static inline void expect_cause(made *m, const char *cause, const char *words, size_t number)
{
    expect_cause_on(1, m, cause, words, number);
}

/* out = w x, w [outs, ins]. */
static inline void multiply(float *out, const float *w, const double *x, size_t outs, size_t ins)
{
    for (size_t i = 0; i < outs; i++) {
        double sum = 0.0;
        for (size_t k = 0; k < ins; k++)
            sum += x[k] * (double)w[i * ins + k];
        out[i] = (float)sum;
    }
}

/* The cause of the first difference in such a report. */
static inline void expect_first(made *m, ar_verify_options o, const char *cause, const char *words, size_t number)
{
    OWNED(ar_verify_report_destroy) ar_verify_report *r = judge(m, o);
    cr_assert(!r->same, "case %zu: expected %s", number, cause);
    expect_row(&r->row[r->first], cause, words, number);
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
