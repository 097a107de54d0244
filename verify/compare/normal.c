/* SPDX-License-Identifier: Apache-2.0 */
/* Decides whether two dumps differ as two runs with different rounding do: by runs with random rounding errors if
 * available, otherwise by a bound. */
#include "verify/compare/normal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ref/core/size.h"
#include "ref/core/text.h"
#include "ref/io/json.h"
#include "verify/compare/verify_impl.h"
#include "verify/read/dump_private.h"

/* --- sizes -------------------------------------------------------------------------------------------------------- */

/* Rounding can flip the sign of an Adam step where the gradient itself is rounding. For new weights, therefore, only
 * the typical element counts; for other tensors only root mean square and largest difference count. */
static bool judges(int size, char pass)
{
    return (size == ARI_NORMAL_TYPICAL) == (pass == 'n');
}

/* Returns the difference of one rounding in every element: correct numbers computed in different ways may differ this
 * much, even if no draw changed them. */
static double floor_of(int size, const ar_verify_row *r)
{
    const ari_format f = ari_format_of(r->dtype);
    const double step = f.is_float ? ldexp(1.0, -f.mantissa) : 0.0;
    return size == ARI_NORMAL_RMS       ? r->rms_reference * step / sqrt(12.0)
           : size == ARI_NORMAL_LARGEST ? r->max_reference * step
                                        : sqrt(2.0) - 1.0; /* a difference of one step in every other element */
}

static double typical_of(const ar_verify_row *r)
{
    double digits = 0.0, n = 0.0;
    for (int k = 0; k < AR_VERIFY_ULP_BINS; k++) {
        digits += k * (double)r->ulp_bins[k];
        n += (double)r->ulp_bins[k];
    }
    return n > 0.0 ? exp2(digits / n) - 1.0 : 0.0;
}

/* Returns infinity if only one value is NaN or infinite, or if they differ in kind: no rounding causes that. */
static double distance_of(const ar_verify_element *e)
{
    const double a = e->value[0], b = e->value[1];
    return a == b || (isnan(a) && isnan(b)) ? 0.0 : isfinite(b - a) ? fabs(b - a) : HUGE_VAL;
}

/* A copy of a part that differs from the other copies differs from the reference. */
static double size_of(int size, const ar_verify_row *r)
{
    const double copies = r->copies_differ ? distance_of(&r->first) : 0.0;
    if (isinf(distance_of(&r->worst)) || isinf(copies))
        return INFINITY;
    return size == ARI_NORMAL_RMS ? r->rms : size == ARI_NORMAL_LARGEST ? fmax(r->max_abs, copies) : typical_of(r);
}

static double ratio_over(double x, double y)
{
    return x == 0.0 ? 0.0 : x / y;
}

static bool is_compared(const ar_verify_row *r)
{
    return r->state == AR_VERIFY_SAME || r->state == AR_VERIFY_DIFFERENT || r->state == AR_VERIFY_REPLICAS;
}

/* --- draws -------------------------------------------------------------------------------------------------------- */

/* The differences of all runs from the reference: the draws, and last the run to be judged. Each run is measured by the
 * others only, so that a correct run is equally likely to be any of them (verify.md). */
typedef struct pool {
    size_t runs, tensors;
    double *size;              /* [tensors, ARI_NORMAL_SIZES, runs] */
    double *ratio;             /* [tensors, runs] ratio of the most unusual size to the other runs' median */
    double *greatest, *middle; /* [runs] the greatest and the median of the ratios of all tensors */
    double *scratch;           /* [max(runs, tensors)] */
    ari_arena arena;           /* memory of these arrays */
} pool;

static int by_value(const void *a, const void *b)
{
    ARI_ASCENDING(*(const double *)a, *(const double *)b);
    return 0;
}

static double median_of(double *x, size_t n)
{
    qsort(x, n, sizeof *x, by_value);
    return n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2.0;
}

static double median_of_others(const pool *p, const double *x, size_t run)
{
    size_t n = 0;
    for (size_t i = 0; i < p->runs; i++) {
        if (i != run)
            p->scratch[n++] = x[i];
    }
    return median_of(p->scratch, n);
}

/* Judges a tensor by its most unusual size. */
static void tell_size(ari_normal_row *r, const double *x, size_t draws, double ratio)
{
    size_t below = 0;
    for (size_t i = 0; i < draws; i++)
        below += x[i] < x[draws];
    r->ratio = ratio;
    r->percentile = 100.0 * (double)below / (double)(draws + 1);
}

static void fill_ratios(const pool *p, const ari_normal *n)
{
    for (size_t k = 0; k < p->tensors * ARI_NORMAL_SIZES * p->runs; k++) {
        const size_t run = k % p->runs, t = k / p->runs / ARI_NORMAL_SIZES;
        const int s = (int)(k / p->runs % ARI_NORMAL_SIZES);
        const ar_verify_row *row = n->row[t].row;
        if (!judges(s, row->pass))
            continue;
        const double baseline = fmax(median_of_others(p, &p->size[k - run], run), floor_of(s, row));
        const double ratio = ratio_over(p->size[k], baseline);
        double *max_ratio = &p->ratio[t * p->runs + run];
        if (run == n->draws && ratio >= *max_ratio)
            tell_size(&n->row[t], &p->size[k - run], n->draws, ratio);
        *max_ratio = fmax(*max_ratio, ratio);
    }
}

/* True if rounding reaches the tensor: initial values are the same in all draws. */
static bool is_reached(const pool *p, size_t t)
{
    for (size_t i = 0; i + 1 < p->runs; i++) {
        if (p->ratio[t * p->runs + i] > 0.0)
            return true;
    }
    return false;
}

static void fill_statistics(const pool *p)
{
    for (size_t i = 0; i < p->runs; i++) {
        size_t n = 0;
        for (size_t t = 0; t < p->tensors; t++) {
            const double x = p->ratio[t * p->runs + i];
            p->greatest[i] = fmax(p->greatest[i], x);
            if (is_reached(p, t))
                p->scratch[n++] = x;
        }
        p->middle[i] = n > 0 ? median_of(p->scratch, n) : 0.0;
    }
}

/* Returns how unusual a run is, by its most unusual tensor or by all tensors. */
static double unusual(const pool *p, size_t run)
{
    return fmax(ratio_over(p->greatest[run], median_of_others(p, p->greatest, run)),
                ratio_over(p->middle[run], median_of_others(p, p->middle, run)));
}

static void judge_pool(ari_normal *n, const pool *p)
{
    fill_ratios(p, n);
    fill_statistics(p);
    n->statistic = unusual(p, n->draws);
    for (size_t i = 0; i < n->draws; i++) {
        const double x = unusual(p, i);
        n->max_statistic = fmax(n->max_statistic, x);
        n->more_unusual += x >= n->statistic;
    }
    n->normal = n->more_unusual > 0;
}

/* Reads a tensor's draws, [draws, ARI_NORMAL_SIZES], into the pool. */
static ar_status read_draws(const pool *p, size_t t, const ar_dump_tensor *draw_tensor)
{
    double *x = &p->size[t * ARI_NORMAL_SIZES * p->runs];
    for (size_t i = 0; i + 1 < p->runs; i++) {
        double sizes[ARI_NORMAL_SIZES];
        AR_TRY(ari_dump_read_f64(draw_tensor, i * ARI_NORMAL_SIZES, ARI_NORMAL_SIZES, sizes));
        for (size_t s = 0; s < ARI_NORMAL_SIZES; s++) {
            if (!(sizes[s] >= 0.0))
                return ar_error_set(AR_ERR_DATA, "%s: a difference of %g; expected a number of 0 or more",
                                    ARI_SHOW(draw_tensor->name), sizes[s]);
            x[s * p->runs + i] = sizes[s];
        }
    }
    return AR_OK;
}

static ar_status find_draws(const ar_dump_tensor **found, const ar_dump *d, const char *tensor, size_t draws)
{
    char name[1024];
    const int n = snprintf(name, sizeof name, "%s%s", ARI_NORMAL_PREFIX, tensor);
    *found = n < (int)sizeof name ? ar_dump_find(d, name) : NULL;
    if (!*found)
        return ar_error_set(AR_ERR_NOT_FOUND,
                            "%s: has no differences of draws for %s; anyrank.rounding.measure writes "
                            "them (ignore leaves a tensor out)",
                            ARI_SHOW(ar_dump_path(d)), ARI_SHOW(tensor));
    const ar_dump_tensor *t = *found;
    if (t->ndim != 2 || t->shape[1] != ARI_NORMAL_SIZES || t->shape[0] < 2 || (draws && t->shape[0] != draws))
        return ar_error_set(AR_ERR_FORMAT,
                            "%s: %s: expected the %d sizes of two or more draws, as many as of the others",
                            ARI_SHOW(ar_dump_path(d)), ARI_SHOW(name), ARI_NORMAL_SIZES);
    return AR_OK;
}

static ar_status fill_pool(pool *p, ari_normal *n, const ar_dump *d)
{
    for (size_t t = 0; t < n->rows; t++) {
        const ar_verify_row *row = n->row[t].row;
        const ar_dump_tensor *draw_tensor = NULL;
        AR_TRY(find_draws(&draw_tensor, d, row->name, n->draws));
        if (t == 0) {
            n->draws = draw_tensor->shape[0];
            p->runs = n->draws + 1;
            p->tensors = n->rows;
            AR_TRY(ARI_TAKE(&p->size, &p->arena, p->tensors * ARI_NORMAL_SIZES * p->runs, "differences of draws"));
            AR_TRY(ARI_TAKE(&p->ratio, &p->arena, p->tensors * p->runs, "differences of draws"));
            AR_TRY(ARI_TAKE(&p->greatest, &p->arena, p->runs, "differences of draws"));
            AR_TRY(ARI_TAKE(&p->middle, &p->arena, p->runs, "differences of draws"));
            AR_TRY(ARI_TAKE(&p->scratch, &p->arena, p->tensors + p->runs, "differences of draws"));
        }
        AR_TRY(read_draws(p, t, draw_tensor));
        for (int s = 0; s < ARI_NORMAL_SIZES; s++)
            p->size[(t * ARI_NORMAL_SIZES + (size_t)s) * p->runs + n->draws] = size_of(s, row);
    }
    return AR_OK;
}

/* Returns true if the file has draws. A file may hold allowances only, like the file of grads --sensitivity. */
static bool has_draws(const ar_dump *d)
{
    for (size_t i = 0; i < ar_dump_count(d); i++) {
        if (strncmp(ar_dump_at(d, i)->name, ARI_NORMAL_PREFIX, strlen(ARI_NORMAL_PREFIX)) == 0)
            return true;
    }
    return false;
}

/* Judges by draws; leaves n->draws at 0 if the file has none. */
static ar_status judge_by_draws(ari_normal *n, const char *draws)
{
    pool p = {0};
    ar_dump *d = NULL;
    ar_status st = ar_dump_open(&d, draws, NULL);
    if (st == AR_OK && has_draws(d))
        st = fill_pool(&p, n, d);
    if (st == AR_OK && n->draws > 0)
        judge_pool(n, &p);
    ar_dump_close(d);
    ari_arena_end(&p.arena, NULL);
    return st;
}

bool ari_normal_find_draws(char *path, size_t cap, const char *reference)
{
    const char *slash = strrchr(reference, '/');
    const int folder = slash ? (int)(slash - reference) + 1 : 0;
    int n = snprintf(path, cap, "%s/allowed.safetensors", reference);
    if (n > 0 && (size_t)n < cap && access(path, R_OK) == 0)
        return true;
    n = snprintf(path, cap, "%.*sallowed.safetensors", folder, reference);
    return n > 0 && (size_t)n < cap && access(path, R_OK) == 0; /* a truncated path would name another file */
}

/* --- the bound ---------------------------------------------------------------------------------------------------- */

/* Deviations that bound a sum of independent errors, and additional deviations for the largest element of a tensor: a
 * normal variable exceeds six deviations once in 10^9. */
static const double max_deviations = 8.0, within_largest = 6.0;

/* Returns the roundoffs that an operation adds to a value, relative to the tensor: its own rounding, and that of the
 * longest sum, formed in fp32 (Higham and Mary 2019: the square root of its length). */
static double roundings(const ari_normal *n, double step)
{
    double longest = 1.0;
    for (size_t t = 0; t < n->rows; t++) {
        const ar_verify_row *r = n->row[t].row;
        const double last_extent = r->ndim > 0 ? (double)r->shape[r->ndim - 1] : 1.0;
        longest = fmax(longest, fmax(last_extent, last_extent > 0.0 ? (double)r->elements / last_extent : 1.0));
    }
    return step + fmin(step, 0x1p-24) * sqrt(longest);
}

/* Judges by the bound for a number of operations, each with errors of its own. A gradient that is 0 except for
 * rounding, such as a key's bias, has errors as large as the other gradients of its pass. After an update of Adam no
 * such bound holds. */
static void judge_by_bound(ari_normal *n, double step)
{
    double sum[256] = {0.0}, count[256] = {0.0};
    n->normal = true;
    for (size_t t = 0; t < n->rows; t++) {
        const ar_verify_row *r = n->row[t].row;
        sum[(unsigned char)r->pass] += r->rms_reference;
        count[(unsigned char)r->pass] += r->rms_reference > 0.0;
    }
    const double unit_bound = max_deviations * roundings(n, step);
    for (size_t t = 0; t < n->rows; t++) {
        ari_normal_row *row = &n->row[t];
        const ar_verify_row *r = row->row;
        const double usual = ratio_over(sum[(unsigned char)r->pass], count[(unsigned char)r->pass]);
        const double bound = unit_bound * sqrt((double)t + 1.0);
        row->percentile = (double)NAN;
        if (r->pass == 'n' || r->step > 1)
            continue;
        row->ratio =
            fmax(ratio_over(size_of(ARI_NORMAL_RMS, r), bound * fmax(r->rms_reference, usual)),
                 ratio_over(size_of(ARI_NORMAL_LARGEST, r), within_largest * bound * fmax(r->max_reference, usual)));
        n->normal = n->normal && row->ratio <= 1.0;
    }
}

/* --- the answer --------------------------------------------------------------------------------------------------- */

/* Finds the coarsest format among the tensors, whose rounding dominates. */
static double find_precision(ari_normal *n, const ar_verify_report *r)
{
    static const char *const names[] = {[AR_F64] = "fp64", [AR_F32] = "fp32", [AR_F16] = "fp16", [AR_BF16] = "bf16"};
    ari_format coarsest = ari_format_of(AR_F64);
    for (size_t t = 0; t < n->rows; t++) {
        const ari_format f = ari_format_of(n->row[t].row->dtype);
        coarsest = f.is_float && f.mantissa < coarsest.mantissa ? f : coarsest;
    }
    const size_t dtype_index = (size_t)coarsest.dtype;
    const char *name = dtype_index < sizeof names / sizeof *names && names[dtype_index] ? names[dtype_index]
                                                                                        : ar_dtype_name(coarsest.dtype);
    const bool is_format = r->allows[0] && !strchr(r->allows, ' '); /* a format, as of grads --sensitivity */
    snprintf(n->precision, sizeof n->precision, "%s", is_format ? r->allows : name);
    return ldexp(1.0, -coarsest.mantissa);
}

/* Reports a difference that is not a difference of values. */
static bool tell_other_kind(ari_normal *n, const ar_verify_report *r)
{
    static const char *const kinds[] = {[AR_VERIFY_SHAPE] = "has another shape",
                                        [AR_VERIFY_DTYPE] = "has another dtype",
                                        [AR_VERIFY_MISSING] = "is only in the reference",
                                        [AR_VERIFY_UNEXPECTED] = "is only in the other dump",
                                        [AR_VERIFY_REPLICAS] = "has copies that differ from each other"};
    for (size_t i = 0; i < r->rows; i++) {
        const ar_verify_state state = r->row[i].state;
        if (is_compared(&r->row[i]) && (state != AR_VERIFY_REPLICAS || r->rule != AR_VERIFY_SENSITIVITY))
            continue;
        n->normal = false;
        snprintf(n->sentence, sizeof n->sentence, "This difference is not normal: %s %s", ARI_SHOW(r->row[i].name),
                 kinds[state]);
        return true;
    }
    return false;
}

static void tell_normal(ari_normal *n)
{
    const ari_normal_row *worst = &n->row[0];
    if (n->draws > 0)
        snprintf(n->sentence, sizeof n->sentence,
                 "This difference is normal: %zu of %zu runs that err by rounding in %s alone are as unusual; the most "
                 "unusual tensor, %s, differs by %.3g times what it explains",
                 n->more_unusual, n->draws, n->precision, ARI_SHOW(worst->row->name), worst->ratio);
    else
        snprintf(
            n->sentence, sizeof n->sentence,
            "This difference is normal as far as a bound says: rounding in %s may explain all of it, %s reaches %.3g "
            "of its bound",
            n->precision, ARI_SHOW(worst->row->name), worst->ratio);
}

static void tell_not_normal(ari_normal *n)
{
    const ari_normal_row *worst = &n->row[0];
    char rest[160] = "at most, by a bound";
    if (n->draws > 0)
        snprintf(rest, sizeof rest,
                 "(the difference is %.3g times as unusual as a draw, the most unusual of %zu draws %.3g)",
                 n->statistic, n->draws, n->max_statistic);
    snprintf(n->sentence, sizeof n->sentence,
             "This difference is not normal: %s differs by %.3g times what rounding in %s explains %s",
             ARI_SHOW(worst->row->name), worst->ratio, n->precision, rest);
}

static int more_unusual_first(const void *a, const void *b)
{
    const ari_normal_row *x = a, *y = b;
    return x->ratio != y->ratio ? (x->ratio > y->ratio ? -1 : 1) : x->row < y->row ? -1 : x->row > y->row;
}

static bool has_equal_bits(const ar_verify_report *r)
{
    bool equal = r->missing + r->unexpected == 0;
    for (size_t i = 0; i < r->rows; i++)
        equal = equal && is_compared(&r->row[i]) && r->row[i].bits_different == 0 && !r->row[i].copies_differ;
    return equal;
}

ar_status ari_normal_judge(ari_normal *n, const ar_verify_report *r, const char *draws)
{
    *n = (ari_normal){0};
    AR_TRY(ARI_ALLOC_ZERO(&n->row, r->rows, "tensors"));
    for (size_t i = 0; i < r->rows; i++) {
        const ar_verify_row *row = &r->row[i];
        if (!is_compared(row))
            continue;
        n->row[n->rows++] = (ari_normal_row){.row = row,
                                             .rms = ratio_over(row->rms, row->rms_reference),
                                             .largest = ratio_over(row->max_abs, row->max_reference)};
    }
    const double step = find_precision(n, r);
    if (has_equal_bits(r)) {
        n->normal = true;
        snprintf(n->sentence, sizeof n->sentence,
                 "This difference is normal: there is none, %zu tensor%s have equal bits", n->rows,
                 ARI_PLURAL(n->rows));
        return AR_OK;
    }
    if (draws && n->rows > 0)
        AR_TRY(judge_by_draws(n, draws));
    if (n->draws == 0)
        judge_by_bound(n, step);
    qsort(n->row, n->rows, sizeof *n->row, more_unusual_first);
    if (tell_other_kind(n, r))
        return AR_OK;
    if (n->normal)
        tell_normal(n);
    else
        tell_not_normal(n);
    return AR_OK;
}

void ari_normal_fini(ari_normal *n)
{
    free(n->row);
    *n = (ari_normal){0};
}

json_t *ari_normal_json(const ari_normal *n)
{
    json_t *o = json_object(), *rows = json_array();
    json_object_set_new(o, "is_normal", json_boolean(n->normal));
    json_object_set_new(o, "sentence", ari_json_text(n->sentence));
    json_object_set_new(o, "precision", json_string(n->precision));
    json_object_set_new(o, "draws", json_integer((json_int_t)n->draws));
    json_object_set_new(o, "draws_as_unusual", json_integer((json_int_t)n->more_unusual));
    json_object_set_new(o, "unusual", ari_json_number(n->statistic));
    json_object_set_new(o, "most_unusual_draw", ari_json_number(n->max_statistic));
    for (size_t i = 0; i < n->rows; i++) {
        const ari_normal_row *r = &n->row[i];
        json_array_append_new(rows, json_pack("{s:o, s:o, s:o, s:o, s:o}", "tensor", ari_json_text(r->row->name), "rms",
                                              ari_json_number(r->rms), "largest", ari_json_number(r->largest), "ratio",
                                              ari_json_number(r->ratio), "percentile",
                                              isnan(r->percentile) ? json_null() : json_real(r->percentile)));
    }
    json_object_set_new(o, "tensors", rows);
    return o;
}
