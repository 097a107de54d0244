/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/sketch.h"

#include <math.h>
#include <string.h>

#include "ref/core/size.h"

enum { BUCKETS = AR_SKETCH_BUCKETS };

static bool has_sketch(ar_dtype t)
{
    switch (t) {
    case AR_BOOL:
    case AR_U8:
    case AR_I8:
    case AR_I16:
    case AR_U16:
    case AR_F16:
    case AR_BF16:
    case AR_I32:
    case AR_U32:
    case AR_F32:
    case AR_F64:
    case AR_I64:
    case AR_U64:
        return true;
    default:
        return false;
    }
}

static size_t parts_of(size_t n, size_t part)
{
    return n / part + (n % part != 0);
}

ar_status ar_sketch_init(ar_sketch *s, ar_dtype dtype, int ndim, const size_t *shape)
{
    *s = (ar_sketch){.dtype = dtype, .ndim = ndim, .elements = 1, .first = UINT64_MAX};
    if (!has_sketch(dtype))
        return ar_error_set(AR_ERR_DTYPE, "sketch: %s has none", ar_dtype_name(dtype));
    for (int d = 0; d < ndim; d++) {
        s->shape[d] = shape[d];
        AR_TRY(ari_mul_size(&s->elements, s->elements, shape[d]));
    }
    const size_t block = parts_of(s->elements, AR_SKETCH_BLOCKS);
    s->block = parts_of(block, AR_SKETCH_GROUP) * AR_SKETCH_GROUP;
    s->block = s->block < AR_SKETCH_LEAST ? AR_SKETCH_LEAST : s->block;
    s->blocks = parts_of(s->elements, s->block);
    if (ndim > 1 && s->elements > 0) {
        s->row = shape[ndim - 1] * parts_of(s->elements / shape[ndim - 1], AR_SKETCH_ROWS);
        s->rows = parts_of(s->elements, s->row);
    }
    AR_TRY(ARI_ALLOC_ZERO(&s->bucket, s->blocks * BUCKETS, "a sketch's buckets"));
    return ARI_ALLOC_ZERO(&s->row_digest, s->rows, "a sketch's row digests");
}

void ar_sketch_fini(ar_sketch *s)
{
    free(s->bucket);
    free(s->row_digest);
    *s = (ar_sketch){0};
}

static ar_status check_shapes(const ar_sketch *a, const ar_sketch *b)
{
    const bool equal = a->ndim == b->ndim && memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0;
    return equal ? AR_OK : ar_error_set(AR_ERR_SHAPE, "sketch: the tensors have other shapes");
}

ar_status ar_sketch_merge(ar_sketch *s, const ar_sketch *part, bool summand)
{
    AR_TRY(check_shapes(s, part));
    if (s->dtype != part->dtype)
        return ar_error_set(AR_ERR_DTYPE, "sketch: %s and %s", ar_dtype_name(s->dtype), ar_dtype_name(part->dtype));
    for (size_t i = 0; i < s->blocks * BUCKETS; i++)
        s->bucket[i] += part->bucket[i];
    for (size_t i = 0; i < s->rows; i++)
        s->row_digest[i] += part->row_digest[i];
    s->digest += part->digest;
    s->places += part->places;
    s->nan += part->nan;
    s->inf += part->inf;
    s->sum += part->sum;
    if (summand || part->summed) { /* other figures of a sum cannot be derived from those of its summands */
        s->summed = true;
        s->max_abs += part->max_abs;
        return AR_OK;
    }
    s->count += part->count;
    s->zeros += part->zeros;
    s->sum_squares += part->sum_squares;
    s->max_abs = part->max_abs > s->max_abs ? part->max_abs : s->max_abs;
    if (part->first <= part->last) {
        const bool is_empty = s->first > s->last;
        s->first = is_empty || part->first < s->first ? part->first : s->first;
        s->last = is_empty || part->last > s->last ? part->last : s->last;
    }
    return AR_OK;
}

static double largest_bucket(const ar_sketch *s)
{
    double largest = 0.0;
    for (size_t i = 0; i < s->blocks * BUCKETS; i++)
        largest = fabs(s->bucket[i]) > largest || isnan(s->bucket[i]) ? fabs(s->bucket[i]) : largest;
    return largest;
}

/* Returns the power of two by which buckets are multiplied, so that no square overflows and no significant one
 * underflows. Infinite sums of finite elements remain infinite. */
static double scale_of(double largest)
{
    return largest > 0.0 && isfinite(largest) ? ldexp(1.0, -ilogb(largest)) : 1.0;
}

/* Returns the square root of the sum of squares: exact if the squares of the elements are known and in range, otherwise
 * estimated from the buckets. */
static double norm_of(double *error, const ar_sketch *s)
{
    *error = 0.0;
    if (!s->summed && (s->max_abs == 0.0 || (s->sum_squares > 1e-290 && isfinite(s->sum_squares))))
        return sqrt(s->sum_squares);
    const double scale = scale_of(largest_bucket(s));
    double squares = 0.0, fourth = 0.0;
    for (size_t b = 0; b < s->blocks; b++) {
        double block = 0.0;
        for (size_t i = b * BUCKETS; i < (b + 1) * BUCKETS; i++)
            block += s->bucket[i] * scale * (s->bucket[i] * scale);
        squares += block;
        fourth += block * block;
    }
    *error = squares > 0.0 ? 0.5 * sqrt(2.0 / BUCKETS * fourth) / squares : 0.0;
    return sqrt(squares) / scale;
}

/* Sums of squares and products of a block's buckets, all of them times `scale`. */
typedef struct products {
    double aa, ab, dd;
} products;

static products block_products(const ar_sketch *a, const ar_sketch *b, size_t block, double scale)
{
    products p = {0};
    for (size_t i = block * BUCKETS; i < (block + 1) * BUCKETS; i++) {
        const double x = a->bucket[i] * scale, y = b->bucket[i] * scale;
        p.aa += x * x;
        p.ab += x * y;
        p.dd += (y - x) * (y - x);
    }
    return p;
}

/* Compares row digests, if both sketches have them for the same type, and counts rows that differ. */
static void compare_rows(ar_sketch_difference *d, const ar_sketch *a, const ar_sketch *b)
{
    d->row = SIZE_MAX;
    const bool digests = a->dtype == b->dtype && a->rows == b->rows && !a->summed && !b->summed;
    for (size_t i = a->rows; digests && i-- > 0;) {
        if (a->row_digest[i] != b->row_digest[i]) {
            d->rows++;
            d->row = i;
        }
    }
}

ar_status ar_sketch_compare(ar_sketch_difference *d, const ar_sketch *a, const ar_sketch *b)
{
    AR_TRY(check_shapes(a, b));
    const bool digests = a->dtype == b->dtype && !a->summed && !b->summed;
    *d = (ar_sketch_difference){.same_bits = digests && a->digest == b->digest && a->count == b->count};
    d->norm_a = norm_of(&d->norm_a_error, a);
    const double scale = scale_of(fmax(largest_bucket(a), largest_bucket(b)));
    double aa = 0.0, ab = 0.0, dd = 0.0, fourth = 0.0, largest = 0.0, residual = 0.0;
    for (size_t i = 0; i < a->blocks; i++) {
        const products p = block_products(a, b, i, scale);
        aa += p.aa;
        ab += p.ab;
        dd += p.dd;
        fourth += p.dd * p.dd;
        d->block = p.dd > largest ? i : d->block;
        largest = p.dd > largest ? p.dd : largest;
    }
    d->norm = sqrt(dd) / scale;
    d->factor = aa > 0.0 ? ab / aa : (double)NAN;
    d->block_share = dd > 0.0 ? largest / dd : 0.0;
    /* var(dd) <= sum over blocks of 2/32 dd_b^2, and a square root has half the relative error of its argument. */
    d->norm_error = dd > 0.0 ? 0.5 * sqrt(2.0 / BUCKETS * fourth) / dd : 0.0;
    for (size_t i = 0; i < a->blocks; i++)
        d->blocks += block_products(a, b, i, scale).dd > 1e-6 * largest;
    for (size_t i = 0; i < a->blocks * BUCKETS && aa > 0.0; i++) {
        const double x = (b->bucket[i] - d->factor * a->bucket[i]) * scale;
        residual += x * x;
    }
    d->factor_left = dd > 0.0 ? sqrt(residual / dd) : 0.0;
    compare_rows(d, a, b);
    return AR_OK;
}
