/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/sketch.h"

#include <math.h>
#include <string.h>

#include "ref/core/float_bits.h"
#include "ref/core/scheduler.h"
#include "ref/core/size.h"
#include "ref/core/tensor_private.h"

/* Elements are processed in groups of 64, whose first index is a multiple of 64. One hash of the group's number
 * determines its key, all signs, and the rotations of the buckets. A lane is an element's position in its group. */
enum { GROUP = AR_SKETCH_GROUP, BUCKETS = AR_SKETCH_BUCKETS };
/* Inlines the function into each clone of ARI_SIMD. */
#define INLINED static inline __attribute__((always_inline))

/* Random bits of a number. */
INLINED uint64_t random_bits(uint64_t x)
{
    return ari_splitmix(&x);
}

typedef struct keys {
    uint64_t factor;      /* odd factor of the group in the digest */
    uint64_t signs;       /* bit j: sign of lane j in its bucket */
    uint32_t rotation[2]; /* rotations of the buckets for lanes [0, 32) and [32, 64) */
} keys;

INLINED uint64_t factor_of(uint64_t group)
{
    return random_bits(group) | 1;
}

static keys keys_of(uint64_t group)
{
    const uint64_t a = random_bits(group), b = random_bits(a), c = random_bits(b);
    return (keys){factor_of(group), b, {(uint32_t)c % BUCKETS, (uint32_t)(c >> 32) % BUCKETS}};
}

/* Lane j's factor in the digest, in two halves. Its last eight bits are 4j + 1. Therefore the sum of two factors has
 * one trailing zero bit and their difference at most seven, and a product with a group's key loses no more bits than
 * that. */
typedef struct lanes {
    uint32_t low[GROUP], high[GROUP];
} lanes;

static void lanes_init(lanes *l)
{
    for (uint64_t j = 0; j < GROUP; j++) {
        const uint64_t factor = (random_bits((UINT64_C(1) << 32) + j) | UINT64_C(255)) - 254 + 4 * j;
        l->low[j] = (uint32_t)factor;
        l->high[j] = (uint32_t)(factor >> 32);
    }
}

/* A group's elements: their bits (for 64-bit types the upper half), and their values, 0 where they are not finite. */
typedef struct group {
    uint32_t bits[GROUP], high[GROUP];
    float value[GROUP];
    double wide[GROUP]; /* values of types other than float */
} group;

/* Sums over the groups of one block and row. */
typedef struct sums {
    uint64_t digest, zeros;
    double sum, squares, largest;
} sums;

/* Maps 32 bits one-to-one so that a change of any bit, including the sign, affects the lowest bits. */
INLINED uint32_t spread(uint32_t u)
{
    u = (u ^ u >> 16) * 0x9e3779b1u;
    return u ^ u >> 15;
}

/* Computes mix(i, u) for lanes [begin, end): the group's key times the sum of spread(u) times the lane's factor. */
INLINED void mix(sums *s, const uint32_t *bits, const lanes *l, uint64_t factor, int begin, int end)
{
    uint64_t low = 0;
    uint32_t high = 0;
    for (int j = begin; j < end; j++) {
        const uint32_t u = spread(bits[j]);
        low += (uint64_t)u * l->low[j];
        high += u * l->high[j];
    }
    s->digest += factor * (low + ((uint64_t)high << 32));
}

/* Adds floats to the buckets. Half a group is written twice in succession, so that reading from an offset rotates
 * it. */
INLINED void add_floats(sums *s, double *bucket, const float *value, const keys *k)
{
    uint32_t largest = 0, zeros = 0; /* of the bits without the sign, which have the order of the magnitudes */
    double sum[8] = {0}, squares[8] = {0};
    const uint32_t low = (uint32_t)k->signs, high = (uint32_t)(k->signs >> 32);
    float twice[2][2 * BUCKETS];
    for (int j = 0; j < BUCKETS; j++) {
        const float x = ari_float32(ari_bits32(value[j]) ^ (low << (31 - j) & 0x80000000u));
        const float y = ari_float32(ari_bits32(value[j + BUCKETS]) ^ (high << (31 - j) & 0x80000000u));
        twice[0][j] = x;
        twice[0][j + BUCKETS] = x;
        twice[1][j] = y;
        twice[1][j + BUCKETS] = y;
    }
    const float *x = twice[0] + BUCKETS - k->rotation[0], *y = twice[1] + BUCKETS - k->rotation[1];
    for (int j = 0; j < BUCKETS; j++)
        bucket[j] += (double)x[j] + (double)y[j];
    for (int j = 0; j < GROUP; j += 8) {
        for (int i = 0; i < 8; i++) {
            const double v = (double)value[j + i];
            sum[i] += v;
            squares[i] += v * v;
        }
    }
    for (int j = 0; j < GROUP; j++) {
        const uint32_t magnitude = ari_bits32(value[j]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
        zeros += magnitude == 0;
    }
    for (int i = 0; i < 8; i++) {
        s->sum += sum[i];
        s->squares += squares[i];
    }
    s->zeros += zeros;
    const double max_abs = (double)ari_float32(largest);
    s->largest = max_abs > s->largest ? max_abs : s->largest;
}

/* Does the same for values that are not floats. */
static void add_wide(sums *s, double *bucket, const double *value, const keys *k)
{
    for (uint32_t half = 0; half < 2; half++) {
        const double *x = value + half * BUCKETS;
        const uint32_t signs = (uint32_t)(k->signs >> half * BUCKETS);
        for (uint32_t j = 0; j < BUCKETS; j++)
            bucket[(j + k->rotation[half]) % BUCKETS] += signs >> j & 1 ? -x[j] : x[j];
    }
    for (int j = 0; j < GROUP; j++) {
        const double x = value[j];
        s->sum += x;
        s->squares += x * x;
        s->zeros += x == 0.0;
        s->largest = fabs(x) > s->largest ? fabs(x) : s->largest;
    }
}

/* The bits and values of a whole group of short floats, and whether all are finite. */
INLINED bool load_floats(uint32_t *bits, float *value, const unsigned char *p, ar_dtype t)
{
    uint16_t half[GROUP];
    uint32_t largest = 0;
    if (t == AR_F32) {
        memcpy(bits, p, GROUP * sizeof *bits);
        memcpy(value, p, GROUP * sizeof *value);
    } else {
        memcpy(half, p, sizeof half);
        for (int j = 0; j < GROUP; j++) {
            bits[j] = half[j];
            value[j] = t == AR_F16 ? ari_f32_of_f16(half[j]) : ari_f32_of_bf16(half[j]);
        }
    }
    for (int j = 0; j < GROUP; j++) {
        const uint32_t magnitude = ari_bits32(value[j]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest < 0x7f800000u;
}

/* Adds up to n whole groups while their elements are finite. Returns the number of groups. */
INLINED size_t add_groups_of(sums *s, double *bucket, const lanes *l, const unsigned char *p, ar_dtype t,
                             uint64_t number, size_t n)
{
    const size_t bytes = GROUP * (t == AR_F32 ? sizeof(float) : sizeof(uint16_t));
    for (size_t i = 0; i < n; i++) {
        uint32_t bits[GROUP];
        float value[GROUP];
        if (!load_floats(bits, value, p + i * bytes, t))
            return i;
        const keys k = keys_of(number + i);
        mix(s, bits, l, k.factor, 0, GROUP);
        add_floats(s, bucket, value, &k);
    }
    return n;
}

ARI_SIMD static size_t add_groups(sums *s, double *bucket, const lanes *l, const unsigned char *p, ar_dtype t,
                                  uint64_t number, size_t n)
{
    switch (t) {
    case AR_F32:
        return add_groups_of(s, bucket, l, p, AR_F32, number, n);
    case AR_BF16:
        return add_groups_of(s, bucket, l, p, AR_BF16, number, n);
    case AR_F16:
        return add_groups_of(s, bucket, l, p, AR_F16, number, n);
    default:
        return 0;
    }
}

#define LOAD_INTEGERS(type)                              \
    do {                                                 \
        type number;                                     \
        memcpy(&number, p, sizeof number);               \
        g->bits[j] = (uint32_t)(uint64_t)number;         \
        g->high[j] = (uint32_t)((uint64_t)number >> 32); \
        g->wide[j] = (double)number;                     \
    } while (0)

/* Element j of a group, from memory. */
static void load(group *g, int j, ar_dtype t, const unsigned char *p)
{
    uint16_t half;
    double x;
    switch (t) {
    case AR_F32:
        memcpy(&g->bits[j], p, sizeof g->bits[j]);
        g->value[j] = ari_float32(g->bits[j]);
        break;
    case AR_BF16:
    case AR_F16:
        memcpy(&half, p, sizeof half);
        g->bits[j] = half;
        g->value[j] = t == AR_F16 ? ari_f32_of_f16(half) : ari_f32_of_bf16(half);
        break;
    case AR_F64:
        memcpy(&x, p, sizeof x);
        g->bits[j] = (uint32_t)ari_bits64(x);
        g->high[j] = (uint32_t)(ari_bits64(x) >> 32);
        g->wide[j] = x;
        break;
    case AR_I8:
        LOAD_INTEGERS(int8_t);
        break;
    case AR_I16:
        LOAD_INTEGERS(int16_t);
        break;
    case AR_U16:
        LOAD_INTEGERS(uint16_t);
        break;
    case AR_I32:
        LOAD_INTEGERS(int32_t);
        break;
    case AR_U32:
        LOAD_INTEGERS(uint32_t);
        break;
    case AR_I64:
        LOAD_INTEGERS(int64_t);
        break;
    case AR_U64:
        LOAD_INTEGERS(uint64_t);
        break;
    default:
        LOAD_INTEGERS(uint8_t);
        break;
    }
}

static bool is_short_float(ar_dtype t)
{
    return t == AR_F32 || t == AR_BF16 || t == AR_F16;
}

static bool has_high_bits(ar_dtype t)
{
    return t == AR_F64 || t == AR_I64 || t == AR_U64;
}

ARI_SIMD static void mix_group(sums *s, const uint32_t *bits, const lanes *l, uint64_t factor)
{
    mix(s, bits, l, factor, 0, GROUP);
}

static void mix_lanes(sums *s, const uint32_t *bits, const lanes *l, uint64_t factor, int begin, int end)
{
    if (end - begin == GROUP)
        mix_group(s, bits, l, factor);
    else
        mix(s, bits, l, factor, begin, end);
}

/* Lanes [begin, end) of a group, of any type and any values. */
static void add_group(ar_sketch *s, sums *sum, double *bucket, const lanes *l, group *g, uint64_t number, int begin,
                      int end)
{
    const keys k = keys_of(number);
    mix_lanes(sum, g->bits, l, k.factor, begin, end);
    if (has_high_bits(s->dtype)) /* uses another key, as for another group */
        mix_lanes(sum, g->high, l, factor_of(~number), begin, end);
    for (int j = begin; j < end; j++) {
        double x = is_short_float(s->dtype) ? (double)g->value[j] : g->wide[j];
        if (isfinite(x))
            continue;
        s->nan += isnan(x) != 0;
        s->inf += isinf(x) != 0;
        s->places += random_bits(4 * (number * GROUP + (uint64_t)j) + (isnan(x) ? 1u : x > 0.0 ? 2u : 3u));
        g->value[j] = 0.0f;
        g->wide[j] = 0.0;
        sum->zeros--;
    }
    sum->zeros -= (uint64_t)(GROUP - (end - begin)); /* lanes without an element */
    if (is_short_float(s->dtype))
        add_floats(sum, bucket, g->value, &k);
    else
        add_wide(sum, bucket, g->wide, &k);
}

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Adjacent elements of the full tensor within one block and one row digest, `stride` elements apart. */
typedef struct run {
    const unsigned char *values;
    size_t stride, bytes; /* bytes: size of an element */
    uint64_t index;
    size_t n;
} run;

/* Returns true if element i of a run is zero. */
static bool is_zero(const ar_sketch *s, const run *r, size_t i)
{
    group g = {0};
    load(&g, 0, s->dtype, r->values + i * r->stride * r->bytes);
    return is_short_float(s->dtype) ? g.value[0] == 0.0f : g.wide[0] == 0.0;
}

/* Updates the first and the last nonzero index for a run that has nonzero elements. */
static void note_ends(ar_sketch *s, const run *r)
{
    const bool is_empty = s->first > s->last;
    size_t i = 0, end = r->n;
    if (is_empty || r->index < s->first) {
        while (is_zero(s, r, i))
            i++;
        s->first = is_empty || r->index + i < s->first ? r->index + i : s->first;
    }
    if (is_empty || r->index + end - 1 > s->last) {
        while (is_zero(s, r, end - 1))
            end--;
        s->last = is_empty || r->index + end - 1 > s->last ? r->index + end - 1 : s->last;
    }
}

static void add_run(ar_sketch *s, const lanes *l, const run *r)
{
    sums sum = {0};
    double *bucket = s->bucket + r->index / s->block * BUCKETS;
    size_t i = 0;
    while (i < r->n) {
        const uint64_t number = (r->index + i) / GROUP;
        const int begin = (int)((r->index + i) % GROUP);
        const size_t full_groups = begin == 0 && r->stride == 1 ? (r->n - i) / GROUP : 0;
        const size_t added_groups =
            add_groups(&sum, bucket, l, r->values + i * r->bytes, s->dtype, number, full_groups);
        if (added_groups > 0) {
            i += added_groups * GROUP;
            continue;
        }
        group g = {0};
        const int end = r->n - i < (size_t)(GROUP - begin) ? begin + (int)(r->n - i) : GROUP;
        for (int j = begin; j < end; j++)
            load(&g, j, s->dtype, r->values + (i + (size_t)(j - begin)) * r->stride * r->bytes);
        add_group(s, &sum, bucket, l, &g, number, begin, end);
        i += (size_t)(end - begin);
    }
    s->digest += sum.digest;
    if (s->rows > 0)
        s->row_digest[r->index / s->row] += (uint32_t)sum.digest;
    s->count += r->n;
    s->zeros += sum.zeros;
    s->sum += sum.sum;
    s->sum_squares += sum.squares;
    s->max_abs = sum.largest > s->max_abs ? sum.largest : s->max_abs;
    if (sum.zeros < r->n)
        note_ends(s, r);
}

/* Adds the elements of one or several consecutive rows of a box, split at the ends of blocks and row digests. */
static void add_line(ar_sketch *s, const lanes *l, run line)
{
    while (line.n > 0) {
        size_t n = smaller(line.n, s->block - line.index % s->block);
        if (s->rows > 0)
            n = smaller(n, s->row - line.index % s->row);
        const run part = {line.values, line.stride, line.bytes, line.index, n};
        add_run(s, l, &part);
        line.values += n * line.stride * line.bytes;
        line.index += n;
        line.n -= n;
    }
}

ar_status ar_sketch_add(ar_sketch *s, const void *values, const ar_dump_box *box)
{
    size_t n = 1, line = 1, weight[AR_ST_MAX_DIMS], index[AR_ST_MAX_DIMS] = {0};
    int outer = s->ndim; /* dimensions [outer, ndim) are contiguous and form one line */
    for (int d = s->ndim; d-- > 0; n *= s->shape[d]) {
        weight[d] = n;
        if (box->global[d] > s->shape[d] || box->extent[d] > s->shape[d] - box->global[d])
            return ar_error_set(AR_ERR_SHAPE, "sketch: a box has elements [%zu, %zu) of dimension %d, which has %zu",
                                box->global[d], box->global[d] + box->extent[d], d, s->shape[d]);
        const bool is_contiguous = outer == s->ndim || (box->extent[d + 1] == s->shape[d + 1] && outer == d + 1 &&
                                                        box->stride[d] == box->stride[d + 1] * box->extent[d + 1]);
        if (is_contiguous) {
            outer = d;
            line *= box->extent[d];
        }
    }
    size_t lines = 1;
    for (int d = 0; d < outer; d++)
        lines *= box->extent[d];
    if (line == 0 || lines == 0)
        return AR_OK;
    const size_t bytes = ari_dtype_bits(s->dtype) / 8, stride = s->ndim > 0 ? box->stride[s->ndim - 1] : 1;
    lanes l;
    lanes_init(&l);
    for (size_t k = 0; k < lines; k++) {
        run r = {(const unsigned char *)values + box->offset * bytes, stride, bytes, 0, line};
        for (int d = 0; d < s->ndim; d++) {
            r.index += (uint64_t)((box->global[d] + index[d]) * weight[d]);
            r.values += index[d] * box->stride[d] * bytes;
        }
        add_line(s, &l, r);
        for (int d = outer; d-- > 0 && ++index[d] == box->extent[d];)
            index[d] = 0;
    }
    return AR_OK;
}
