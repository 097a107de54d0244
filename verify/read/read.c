/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "ref/core/atomic_file.h"
#include "ref/io/safetensors_private.h"
#include "verify/read/dump.h"
#include "verify/read/dump_private.h"

/* Elements that are converted or added up at a time. */
#define BLOCK 2048

static ar_status check_range(const ar_dump_tensor *t, size_t start, size_t count)
{
    if (start > t->count || count > t->count - start)
        return ar_error_set(AR_ERR_ARG, "tensor '%s': elements %zu and %zu more, it has %zu", ARI_SHOW(t->name), start,
                            count, t->count);
    if (ar_dtype_bytes(t->dtype) == 0)
        return ar_error_set(AR_ERR_DTYPE, "tensor '%s' is %s: elements of less than 8 bits are not read one by one",
                            ARI_SHOW(t->name), ar_dtype_name(t->dtype));
    return AR_OK;
}

/* The runs of all boxes, of copies only the first. */
static ar_status each_run(const ar_dump_tensor *t, size_t start, size_t count,
                          ar_status (*f)(void *user, const ari_dump_run *run), void *user)
{
    for (size_t i = 0; i < t->parts; i++)
        for (size_t k = 0; k < t->part[i].boxes; k++)
            if (t->part[i].box[k].replica == 0)
                AR_TRY(ari_dump_each_run(t, &t->part[i], &t->part[i].box[k], start, count, f, user));
    return AR_OK;
}

/* --- parts put together ------------------------------------------------------------------------------------------- */
typedef struct sum {
    const ar_dump_tensor *t;
    size_t start;
    double *total;
} sum;

static ar_status add_run(void *user, const ari_dump_run *run)
{
    const sum *s = user;
    char raw[BLOCK * sizeof(double)];
    double x[BLOCK];
    ari_dump_copy_run(raw, run, ar_dtype_bytes(s->t->dtype));
    AR_TRY(ari_values_to_f64(s->t->dtype, raw, run->count, x));
    for (size_t i = 0; i < run->count; i++)
        s->total[run->full - s->start + i] += x[i];
    return AR_OK;
}

static ar_status read_sum(const ar_dump_tensor *t, size_t start, size_t count, char *out)
{
    const size_t bytes = ar_dtype_bytes(t->dtype);
    if (t->dtype != AR_F64 && t->dtype != AR_F32 && t->dtype != AR_F16 && t->dtype != AR_BF16)
        return ar_error_set(AR_ERR_DTYPE, "tensor '%s' is to be summed over ranks, but is %s, expected a float dtype",
                            ARI_SHOW(t->name), ar_dtype_name(t->dtype));
    for (size_t offset = 0; offset < count; offset += BLOCK) {
        const size_t n = count - offset < BLOCK ? count - offset : BLOCK;
        double total[BLOCK];
        for (size_t i = 0; i < n; i++)
            total[i] = -0.0; /* -0, because adding any x to it gives x */
        sum s = {t, start + offset, total};
        AR_TRY(each_run(t, s.start, n, add_run, &s));
        AR_TRY(ari_values_of_f64(t->dtype, total, n, out + offset * bytes));
    }
    return AR_OK;
}

ar_status ar_dump_read(const ar_dump_tensor *t, size_t start, size_t count, void *out)
{
    AR_TRY(check_range(t, start, count));
    const size_t bytes = ar_dtype_bytes(t->dtype);
    if (count == 0)
        return AR_OK;
    if (t->whole != NULL) {
        memcpy(out, (const char *)t->whole + start * bytes, count * bytes);
        return AR_OK;
    }
    if (t->parts > 0 && t->part[0].partial)
        return read_sum(t, start, count, out);
    for (size_t i = 0; i < t->parts; i++)
        for (size_t k = 0; k < t->part[i].boxes; k++)
            if (t->part[i].box[k].replica == 0)
                ari_dump_copy_box(out, t, t->part[i].entry->data, &t->part[i].box[k], start, count);
    return AR_OK;
}

/* --- converted ---------------------------------------------------------------------------------------------------- */
typedef struct numbers {
    const ar_dump_tensor *t;
    double *f64; /* values as float or as double; one of the two pointers is set */
    float *f32;
    size_t start; /* index in the full tensor of the first element */
    size_t added; /* number of elements so far */
} numbers;

static ar_status convert(const numbers *o, const void *raw, size_t count, size_t out_offset)
{
    if (o->f64 != NULL)
        return ari_values_to_f64(o->t->dtype, raw, count, o->f64 + out_offset);
    return ari_values_to_f32(o->t->dtype, raw, count, o->f32 + out_offset);
}

static ar_status convert_at(const numbers *o, const ari_dump_run *run, size_t out_offset)
{
    const size_t bytes = ar_dtype_bytes(o->t->dtype);
    if (run->step == bytes)
        return convert(o, run->data, run->count, out_offset);
    for (size_t offset = 0; offset < run->count; offset += BLOCK) {
        char raw[BLOCK * sizeof(double)];
        const size_t n = run->count - offset < BLOCK ? run->count - offset : BLOCK;
        const ari_dump_run block = {run->data + offset * run->step, run->step, run->full + offset, n};
        ari_dump_copy_run(raw, &block, bytes);
        AR_TRY(convert(o, raw, n, out_offset + offset));
    }
    return AR_OK;
}

static ar_status convert_run(void *user, const ari_dump_run *run)
{
    const numbers *o = user;
    return convert_at(o, run, run->full - o->start);
}

static ar_status append_run(void *user, const ari_dump_run *run)
{
    numbers *o = user;
    AR_TRY(convert_at(o, run, o->added));
    o->added += run->count;
    return AR_OK;
}

static ar_status check_numbers(const ar_dump_tensor *t, size_t start, size_t count)
{
    AR_TRY(check_range(t, start, count));
    if (t->dtype == AR_C64)
        return ar_error_set(AR_ERR_DTYPE, "tensor '%s' is C64, expected real numbers", ARI_SHOW(t->name));
    return AR_OK;
}

static ar_status read_numbers(const ar_dump_tensor *t, size_t start, size_t count, numbers *o)
{
    const size_t bytes = ar_dtype_bytes(t->dtype);
    AR_TRY(check_numbers(t, start, count));
    if (t->whole != NULL)
        return convert(o, (const char *)t->whole + start * bytes, count, 0);
    if (t->parts == 0 || !t->part[0].partial)
        return each_run(t, start, count, convert_run, o);
    for (size_t offset = 0; offset < count; offset += BLOCK) {
        char raw[BLOCK * sizeof(double)];
        const size_t n = count - offset < BLOCK ? count - offset : BLOCK;
        AR_TRY(ar_dump_read(t, start + offset, n, raw));
        AR_TRY(convert(o, raw, n, offset));
    }
    return AR_OK;
}

ar_status ari_dump_read_f64(const ar_dump_tensor *t, size_t start, size_t count, double *out)
{
    return read_numbers(t, start, count, &(numbers){.t = t, .f64 = out, .start = start});
}

ar_status ar_dump_read_f32(const ar_dump_tensor *t, size_t start, size_t count, float *out)
{
    return read_numbers(t, start, count, &(numbers){.t = t, .f32 = out, .start = start});
}

ar_status ari_dump_part_f32(const ar_dump_tensor *t, const ar_dump_part *p, float *out)
{
    numbers o = {.t = t, .f32 = out};
    AR_TRY(check_numbers(t, 0, 0));
    for (size_t k = 0; k < p->boxes; k++)
        AR_TRY(ari_dump_each_run(t, p, &p->box[k], 0, t->count, append_run, &o));
    return AR_OK;
}
