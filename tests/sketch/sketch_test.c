/* SPDX-License-Identifier: Apache-2.0 */
/* Sketches of ranks' parts add up to the full tensor's, whatever the layout, and tell how far two tensors differ. */
#include "anyrank/sketch.h"

#include "ref/core/float_bits.h"
#include "ref/core/tensor_private.h"
#include "tests/support/test.h"

enum { MOST = 1 << 16, DRAWN = 1000, MOST_PARTS = 64 };

static uint64_t state;

static uint64_t draw(uint64_t n)
{
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (state >> 33) % n;
}

static double draw_normal(void)
{
    double x = 0.0;
    for (int i = 0; i < 12; i++)
        x += (double)draw(1 << 24) / (1 << 24);
    return x - 6.0;
}

/* A tensor in memory, row-major, and the sketch of the whole. */
typedef struct whole {
    ar_dtype dtype;
    int ndim;
    size_t shape[AR_ST_MAX_DIMS], elements, bytes;
    unsigned char *data;
    ar_sketch sketch;
} whole;

static ar_dump_box box_of(const whole *w)
{
    ar_dump_box box = {.replicas = 1};
    size_t n = 1;
    for (int d = w->ndim; d-- > 0; n *= w->shape[d]) {
        box.extent[d] = w->shape[d];
        box.stride[d] = n;
    }
    return box;
}

static void draw_whole(whole *w, ar_dtype dtype, int ndim)
{
    *w = (whole){.dtype = dtype, .ndim = ndim, .elements = 1, .bytes = ari_dtype_bits(dtype) / 8};
    for (int d = 0; d < ndim; d++) {
        const size_t most = ndim == 1 ? MOST - 1 : ndim == 2 ? 255 : 39;
        w->shape[d] = 1 + draw(most);
        w->elements *= w->shape[d];
    }
    w->data = malloc(w->elements * w->bytes);
    for (size_t i = 0; i < w->elements; i++) {
        const double x = draw(8) == 0 ? 0.0 : draw_normal();
        const uint64_t integer = (uint64_t)(int64_t)(x * 100.0);
        const float single = draw(4096) == 0 ? (draw(2) ? NAN : -INFINITY) : (float)x;
        const uint16_t half = (uint16_t)(ari_bits32(single) >> 16);
        const void *from = dtype == AR_F32 ? (const void *)&single : dtype == AR_F64 ? (const void *)&x : &integer;
        memcpy(w->data + i * w->bytes, ari_dtype_bits(dtype) == 16 ? (const void *)&half : from, w->bytes);
    }
    const ar_dump_box box = box_of(w);
    cr_assert_ok(ar_sketch_init(&w->sketch, dtype, ndim, w->shape));
    cr_assert_ok(ar_sketch_add(&w->sketch, w->data, &box));
}

static void whole_fini(whole *w)
{
    ar_sketch_fini(&w->sketch);
    free(w->data);
}

/* Adds a box of the tensor from a copy of its own, which has the box's elements alone, its dimensions in another order. */
static void add_copy(ar_sketch *s, const whole *w, const size_t *start, const size_t *extent)
{
    ar_dump_box source = box_of(w), box = {.replicas = 1, .offset = draw(3)};
    size_t n = 1;
    const int rotation = (int)draw((uint64_t)(w->ndim > 0 ? w->ndim : 1));
    for (int i = w->ndim; i-- > 0;) {
        const int d = (i + rotation) % w->ndim;
        box.global[d] = start[d];
        box.extent[d] = extent[d];
        box.stride[d] = n;
        n *= extent[d];
    }
    OWNED(free) unsigned char *copy = malloc((n + box.offset) * w->bytes + 1);
    size_t index[AR_ST_MAX_DIMS] = {0};
    for (size_t k = 0; k < n; k++) {
        size_t from = 0, to = box.offset;
        for (int d = 0; d < w->ndim; d++) {
            from += (start[d] + index[d]) * source.stride[d];
            to += index[d] * box.stride[d];
        }
        memcpy(copy + to * w->bytes, w->data + from * w->bytes, w->bytes);
        for (int d = w->ndim; d-- > 0 && ++index[d] == extent[d];)
            index[d] = 0;
    }
    cr_assert_ok(ar_sketch_add(s, copy, &box));
}

/* Cuts a dimension at drawn places and gives the pieces to ranks in a drawn order: uneven shards, zigzag halves, packed
 * blocks, experts; of two dimensions also grids. */
static void add_cut(ar_sketch *ranks, int world, const whole *w, int dim, const size_t *start, const size_t *extent)
{
    size_t left = extent[dim], first = start[dim], begin[AR_ST_MAX_DIMS], part[AR_ST_MAX_DIMS];
    memcpy(begin, start, sizeof begin);
    memcpy(part, extent, sizeof part);
    while (left > 0) {
        const size_t n = 1 + draw(left < 50 ? left : 50 + draw(left - 49));
        begin[dim] = first;
        part[dim] = n;
        if (dim + 1 < w->ndim && draw(3) == 0)
            add_cut(ranks, world, w, dim + 1, begin, part);
        else
            add_copy(&ranks[draw((uint64_t)world)], w, begin, part);
        first += n;
        left -= n;
    }
}

/* Rank r's flat share of ZeRO: elements [first, end) of the row-major tensor, which has two dimensions. */
static void add_flat(ar_sketch *s, const whole *w, size_t first, size_t end)
{
    while (first < end) {
        const size_t column = first % w->shape[1], width = w->shape[1] - column;
        const size_t n = end - first < width ? end - first : width;
        add_copy(s, w, (size_t[]){first / w->shape[1], column}, (size_t[]){1, n});
        first += n;
    }
}

static void expect_equal(const ar_sketch *a, const ar_sketch *b, const char *what)
{
    ar_sketch_difference d;
    cr_assert_ok(ar_sketch_compare(&d, a, b));
    cr_expect(d.same_bits && d.rows == 0, "%s: %zu rows", what, d.rows);
    cr_expect(a->zeros == b->zeros && a->nan == b->nan && a->inf == b->inf && a->places == b->places &&
                  a->first == b->first && a->last == b->last,
              "%s: counts", what);
    cr_expect(a->max_abs == b->max_abs, "%s: %g and %g", what, a->max_abs, b->max_abs);
    const double near = 1e-13 * (double)(a->count + 1) * (a->max_abs + 1e-300);
    for (size_t i = 0; i < a->blocks * AR_SKETCH_BUCKETS; i++)
        cr_assert(fabs(a->bucket[i] - b->bucket[i]) <= near, "%s: bucket %zu: %.17g and %.17g", what, i, a->bucket[i],
                  b->bucket[i]);
    cr_expect(fabs(a->sum - b->sum) <= near, "%s: sums", what);
}

Test(sketch, those_of_parts_add_up_and_one_bit_shows, .timeout = 300)
{
    static const ar_dtype dtypes[] = {AR_F32, AR_F32, AR_BF16, AR_F64, AR_I64, AR_U8};
    for (state = 1; state <= DRAWN;) {
        const uint64_t round = state;
        char what[64];
        snprintf(what, sizeof what, "draw %d", (int)round);
        whole w;
        const int ndim = (int)draw(4);
        draw_whole(&w, dtypes[draw(6)], ndim);
        const int world = 1 + (int)draw(4);
        ar_sketch rank[4], sum;
        cr_assert_ok(ar_sketch_init(&sum, w.dtype, ndim, w.shape));
        for (int r = 0; r < world; r++)
            cr_assert_ok(ar_sketch_init(&rank[r], w.dtype, ndim, w.shape));
        if (ndim == 2 && draw(3) == 0) {
            for (int r = 0; r < world; r++)
                add_flat(&rank[r], &w, w.elements * (size_t)r / (size_t)world,
                         w.elements * (size_t)(r + 1) / (size_t)world);
        } else if (ndim > 0) {
            add_cut(rank, world, &w, 0, (size_t[AR_ST_MAX_DIMS]){0}, w.shape);
        } else {
            add_copy(&rank[0], &w, NULL, NULL);
        }
        for (int r = 0; r < world; r++) {
            cr_assert_ok(ar_sketch_merge(&sum, &rank[r], false));
            ar_sketch_fini(&rank[r]);
        }
        expect_equal(&w.sketch, &sum, what);
        cr_expect_eq(sum.count, w.elements, "%s", what);
        ar_sketch_fini(&sum);

        const size_t changed = draw(w.elements * w.bytes), element = changed / w.bytes;
        w.data[changed] ^= (unsigned char)(1u << draw(8));
        ar_sketch other;
        const ar_dump_box box = box_of(&w);
        cr_assert_ok(ar_sketch_init(&other, w.dtype, ndim, w.shape));
        cr_assert_ok(ar_sketch_add(&other, w.data, &box));
        ar_sketch_difference d;
        cr_assert_ok(ar_sketch_compare(&d, &w.sketch, &other));
        cr_expect(!d.same_bits && d.rows == (ndim > 1), "%s: a bit is another", what);
        cr_expect(ndim < 2 || d.row == element / w.sketch.row, "%s: row %zu of element %zu", what, d.row, element);
        ar_sketch_fini(&other);
        whole_fini(&w);
        state = round + 1;
    }
}

Test(sketch, those_of_summands_add_up, .timeout = 60)
{
    for (state = 1; state < 200;) {
        const uint64_t round = state;
        const size_t shape[] = {1 + draw(200), 1 + draw(200)}, n = shape[0] * shape[1];
        float *term[2] = {malloc(n * sizeof(float)), malloc(n * sizeof(float))};
        OWNED(free) float *sum = malloc(n * sizeof *sum);
        for (size_t i = 0; i < n; i++) { /* integers, of which each sum is exact */
            term[0][i] = (float)draw(1 << 12) - 2048.0f;
            term[1][i] = (float)draw(1 << 12) - 2048.0f;
            sum[i] = term[0][i] + term[1][i];
        }
        ar_sketch expected, total;
        const ar_dump_box box = {.extent = {shape[0], shape[1]}, .stride = {shape[1], 1}, .replicas = 1};
        cr_assert_ok(ar_sketch_init(&expected, AR_F32, 2, shape));
        cr_assert_ok(ar_sketch_add(&expected, sum, &box));
        cr_assert_ok(ar_sketch_init(&total, AR_F32, 2, shape));
        for (int k = 0; k < 2; k++) {
            ar_sketch part;
            cr_assert_ok(ar_sketch_init(&part, AR_F32, 2, shape));
            cr_assert_ok(ar_sketch_add(&part, term[k], &box));
            cr_assert_ok(ar_sketch_merge(&total, &part, k > 0));
            ar_sketch_fini(&part);
            free(term[k]);
        }
        cr_expect_eq(memcmp(expected.bucket, total.bucket, expected.blocks * AR_SKETCH_BUCKETS * sizeof(double)), 0);
        cr_expect_eq(expected.sum, total.sum);
        ar_sketch_fini(&expected);
        ar_sketch_fini(&total);
        state = round + 1;
    }
}

/* --- digests ------------------------------------------------------------------------------------------------------ */

static int ascending(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

enum { GROUPS = 256, LANES = AR_SKETCH_GROUP };

/* What the change of each element from one value to another adds to the digest: [LANES][GROUPS]. */
static uint64_t *digest_changes(ar_dtype dtype, const void *before, const void *after)
{
    const size_t n = (size_t)GROUPS * LANES;
    uint64_t *change = malloc(n * sizeof *change);
    for (size_t i = 0; i < n; i++) {
        ar_sketch s;
        const ar_dump_box box = {.global = {i}, .extent = {1}, .stride = {1}, .replicas = 1};
        cr_assert_ok(ar_sketch_init(&s, dtype, 1, &n));
        cr_assert_ok(ar_sketch_add(&s, before, &box));
        const uint64_t first = s.digest;
        s.digest = 0;
        cr_assert_ok(ar_sketch_add(&s, after, &box));
        change[i % LANES * GROUPS + i / LANES] = s.digest - first;
        ar_sketch_fini(&s);
    }
    return change;
}

/* Of 2^26 checkerboards, two groups by two lanes, none leaves the digest as it was: of changes of all four elements, and
 * of ones that change in one direction and back, as exchanged elements of a mask do. */
static void expect_no_equal_digests(const char *what, ar_dtype dtype, const void *before, const void *after)
{
    OWNED(free) uint64_t *change = digest_changes(dtype, before, after), *sum = malloc(2 * GROUPS * sizeof *sum);
    size_t equal[2] = {0, 0};
    for (size_t i = 0; i < LANES; i++) {
        for (size_t j = 0; j < i; j++) {
            for (size_t g = 0; g < GROUPS; g++) {
                sum[g] = change[i * GROUPS + g] + change[j * GROUPS + g];
                sum[GROUPS + g] = -sum[g];
            }
            qsort(sum, 2 * GROUPS, sizeof *sum, ascending);
            for (size_t g = 1; g < 2 * GROUPS; g++)
                equal[0] += sum[g] == sum[g - 1];
            for (size_t g = 0; g < GROUPS; g++)
                sum[g] = change[i * GROUPS + g] - change[j * GROUPS + g];
            qsort(sum, GROUPS, sizeof *sum, ascending);
            for (size_t g = 1; g < GROUPS; g++)
                equal[1] += sum[g] == sum[g - 1];
        }
    }
    cr_expect(equal[0] == 0 && equal[1] == 0, "%s: %zu changes and %zu exchanges have the same digest", what, equal[0],
              equal[1]);
}

Test(sketch, no_checkerboard_of_changes_has_the_same_digest, .timeout = 300)
{
    const uint16_t bf16[] = {0x3f80, 0xbf80};
    const float f32[] = {0.75f, -0.75f};
    const uint8_t mask[] = {0, 1};
    expect_no_equal_digests("signs of bf16", AR_BF16, &bf16[0], &bf16[1]);
    expect_no_equal_digests("signs of fp32", AR_F32, &f32[0], &f32[1]);
    expect_no_equal_digests("a mask", AR_U8, &mask[0], &mask[1]);
}

Test(sketch, digests_of_nan_and_infinities_have_places_and_signs)
{
    static float x[3][200];
    ar_sketch s[3];
    const size_t n = 200;
    const ar_dump_box box = {.extent = {200}, .stride = {1}, .replicas = 1};
    x[0][70] = x[1][71] = NAN;
    x[2][70] = -NAN; /* other bits, and the same place */
    x[0][90] = x[1][90] = x[2][90] = INFINITY;
    for (int k = 0; k < 3; k++) {
        cr_assert_ok(ar_sketch_init(&s[k], AR_F32, 1, &n));
        cr_assert_ok(ar_sketch_add(&s[k], x[k], &box));
    }
    cr_expect(s[0].nan == 1 && s[0].inf == 1 && s[0].places != s[1].places && s[0].places == s[2].places);
    for (int k = 0; k < 3; k++)
        ar_sketch_fini(&s[k]);
}

/* --- sizes -------------------------------------------------------------------------------------------------------- */

/* How a drawn difference is made: over all elements, over some blocks, in one, or as a factor of all. */
typedef enum kind { EVERYWHERE, SOME_BLOCKS, ONE_BLOCK, FACTOR, KINDS } kind;

typedef struct counts {
    int drawn[KINDS], near[KINDS], block_right[KINDS];
} counts;

static void draw_difference(counts *c, kind k)
{
    const size_t shape[] = {300 + draw(256), 300 + draw(512)}, n = shape[0] * shape[1];
    const double size = pow(10.0, -1.0 - (double)draw(6)),
                 factor = 1.0 + pow(10.0, -(double)draw(4)) * (double)(1 + draw(9));
    OWNED(free) double *a = malloc(n * sizeof *a), *b = malloc(n * sizeof *b);
    ar_sketch x, y;
    cr_assert_ok(ar_sketch_init(&x, AR_F64, 2, shape));
    cr_assert_ok(ar_sketch_init(&y, AR_F64, 2, shape));
    const size_t blocks = k == ONE_BLOCK ? 1 : 16 + draw(x.blocks - 16), first = draw(x.blocks - blocks + 1);
    const size_t columns = draw(2) ? shape[1] : 1 + draw(4); /* a few columns alone, as of one feature */
    double exact = 0.0;
    for (size_t i = 0; i < n; i++) {
        a[i] = draw_normal();
        const size_t block = i / x.block;
        const bool within = k == EVERYWHERE || (block >= first && block < first + blocks);
        const bool spoiled = within && (k == ONE_BLOCK || i % shape[1] < columns);
        b[i] = k == FACTOR ? a[i] * factor : spoiled ? a[i] + size * draw_normal() : a[i];
        exact += (b[i] - a[i]) * (b[i] - a[i]);
    }
    const ar_dump_box box = {.extent = {shape[0], shape[1]}, .stride = {shape[1], 1}, .replicas = 1};
    cr_assert_ok(ar_sketch_add(&x, a, &box));
    cr_assert_ok(ar_sketch_add(&y, b, &box));
    ar_sketch_difference d;
    cr_assert_ok(ar_sketch_compare(&d, &x, &y));
    c->drawn[k]++;
    if (k == FACTOR)
        c->near[k] += fabs(d.factor - factor) <= 1e-3 && d.factor_left < 1e-3;
    else
        c->near[k] += fabs(d.norm / sqrt(exact) - 1.0) <= (k == ONE_BLOCK ? 0.35 : 0.1);
    c->block_right[k] += d.block >= first && d.block < first + blocks;
    ar_sketch_fini(&x);
    ar_sketch_fini(&y);
}

/* Of 500 differences: the size within 10 % in 95 % of those over 16 blocks and more, within 35 % in one block; each
 * factor within 1e-3; the block in 95 %. */
Test(sketch, sizes_factors_and_blocks_are_estimated, .timeout = 300)
{
    counts c = {0};
    state = 7;
    for (int i = 0; i < 500; i++)
        draw_difference(&c, (kind)(i % KINDS));
    for (int k = 0; k < FACTOR; k++)
        cr_expect(c.near[k] >= 0.95 * c.drawn[k], "kind %d: the size of %d of %d", k, c.near[k], c.drawn[k]);
    cr_expect_eq(c.near[FACTOR], c.drawn[FACTOR]);
    cr_expect(c.block_right[ONE_BLOCK] >= 0.95 * c.drawn[ONE_BLOCK] &&
                  c.block_right[SOME_BLOCKS] >= 0.95 * c.drawn[SOME_BLOCKS],
              "blocks: %d and %d", c.block_right[ONE_BLOCK], c.block_right[SOME_BLOCKS]);
}
