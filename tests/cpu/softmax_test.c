/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/cpu/row_support.h"

/* Local probabilities [b, heads, s, s] that stand at head `head_start` of `all_heads`; the first half of the heads, if
 * they are even, are one KV head's group. */
typedef struct shape {
    size_t b, heads, s, head_start, all_heads;
    size_t window; /* 0: none */
} shape;

static size_t group_of(const shape *o)
{
    return o->heads % 2 == 0 ? o->heads / 2 : 1;
}

/* All of them. */
static ar_scores whole(const shape *o)
{
    const size_t group = group_of(o), kv = o->heads / group;
    return (ar_scores){
        .kv_heads = kv, .group = group, .rows = o->s, .seq = o->s, .part = {0, o->b * kv, 0, group * o->s, 0, o->s}};
}

static const shape shapes[] = {{1, 1, 1, 0, 1, 0},   {2, 3, 3, 0, 3, 0}, {2, 2, 7, 1, 4, 0},   {1, 2, 33, 2, 4, 0},
                               {2, 1, 100, 1, 2, 0}, {2, 2, 7, 1, 4, 3}, {1, 2, 33, 2, 4, 1},  {2, 1, 100, 1, 2, 40},
                               {1, 1, 9, 0, 1, 9},   {1, 1, 9, 0, 1, 8}, {1, 1, 9, 0, 1, 1000}};
#define SHAPES (sizeof shapes / sizeof *shapes)

/* Every way a mask may be given: bit 0 causal, bit 1 padding, bits 2 to 4 the additive one: none, then its two
 * broadcast flags (one batch, one head). */
#define MASKS 20

typedef struct masks {
    ar_mask mask;
    bool causal;
    int32_t *visible;
    uint8_t *padding;
    float *additive;
} masks;

/* The keys that the rows see by order. */
static int32_t *new_visible(const shape *o, bool causal)
{
    int32_t *keys = malloc(o->b * o->s * 2 * sizeof *keys);
    for (size_t i = 0; i < o->b * o->s; i++) {
        const size_t q = i % o->s;
        keys[2 * i] = (int32_t)(o->window > 0 && q >= o->window ? q - o->window + 1 : 0);
        keys[2 * i + 1] = (int32_t)(causal ? q + 1 : o->s);
    }
    return keys;
}

static masks masks_new(const shape *o, int which)
{
    masks m = {.mask = {.head_start = o->head_start}, .causal = which & 1, .visible = new_visible(o, which & 1)};
    m.mask.visible.ptr = m.visible;
    uint64_t state = 77 + (uint64_t)which;
    if (which & 2) {
        m.padding = malloc(o->b * o->s);
        for (size_t i = 0; i < o->b * o->s; i++)
            m.padding[i] = (uint8_t)(next_random(&state) % 4 != 0);
        memset(m.padding, 0, o->s / 2); /* left padding: with causality some queries of sample 0 see nothing */
        m.mask.padding.ptr = m.padding;
    }
    if (which >= 4) {
        m.mask.mask_batch = (which - 4) & 4 ? 1 : o->b;
        m.mask.mask_heads = (which - 4) & 8 ? 1 : o->all_heads;
        const size_t n = m.mask.mask_batch * m.mask.mask_heads * o->s * o->s;
        m.additive = malloc(n * sizeof *m.additive);
        for (size_t i = 0; i < n; i++)
            m.additive[i] = next_random(&state) % 5 == 0 ? -INFINITY : next_value(&state, ORDINARY);
        m.mask.additive.ptr = m.additive;
    }
    return m;
}

/* The additive mask's entry for a place, 0 without one. */
static float additive_at(const masks *m, const shape *o, size_t i, size_t h, size_t q, size_t k)
{
    if (!m->additive)
        return 0.0f;
    const size_t batch = m->mask.mask_batch == 1 ? 0 : i;
    const size_t head = m->mask.mask_heads == 1 ? 0 : o->head_start + h;
    return m->additive[((batch * m->mask.mask_heads + head) * o->s + q) * o->s + k];
}

static bool visible(const masks *m, const shape *o, size_t i, size_t h, size_t q, size_t k)
{
    return !(m->causal && k > q) && !(o->window > 0 && k + o->window <= q) &&
           !(m->padding && m->padding[i * o->s + k] == 0) && additive_at(m, o, i, h, q, k) != -INFINITY;
}

/* What a row's sink is made of: the sink, m and l. */
typedef struct sunk {
    float sink, max;
    double l;
    bool visible, finite;
} sunk;

/* sink: of the row's head; NULL: none. */
static sunk plain_forward_row(float *p, const float *score, float scale, const masks *m, const shape *o, size_t i,
                              size_t h, size_t q, const float *sink)
{
    const int bits = plain_bits(o->s + (sink != NULL));
    float max = -INFINITY;
    bool finite = true, any = false;
    for (size_t k = 0; k < o->s; k++) {
        p[k] = score[k] * scale;
        if (m->additive && visible(m, o, i, h, q, k))
            p[k] = p[k] + additive_at(m, o, i, h, q, k);
        if (visible(m, o, i, h, q, k)) {
            finite = finite && isfinite(p[k]);
            max = p[k] > max ? p[k] : max;
            any = true;
        }
    }
    max = sink && any && *sink > max ? *sink : max;
    int64_t sum = sink && any && finite ? plain_quantised((double)ari_exp32(*sink - max), 1, bits) : 0;
    for (size_t k = 0; k < o->s; k++) {
        p[k] = visible(m, o, i, h, q, k) ? ari_exp32(p[k] - max) : 0.0f;
        if (finite)
            sum += plain_quantised((double)p[k], 1, bits);
    }
    for (size_t k = 0; k < o->s; k++) {
        const float value = finite ? (float)((double)p[k] / ldexp((double)sum, 1 - bits)) : ari_nan32();
        p[k] = visible(m, o, i, h, q, k) ? value : 0.0f;
    }
    return (sunk){sink ? *sink : 0.0f, max, ldexp((double)sum, 1 - bits), any, finite};
}

/* The gradient of the row's sink. */
static float plain_backward_row(float *ds, float *dp, const float *p, float scale, const masks *m, const shape *o,
                                size_t i, size_t h, size_t q, const sunk *s)
{
    OWNED(free) double *terms = calloc(o->s, sizeof *terms);
    for (size_t k = 0; k < o->s; k++) {
        dp[k] = visible(m, o, i, h, q, k) ? dp[k] : 0.0f;
        terms[k] = (double)p[k] * (double)dp[k];
    }
    const double dot = plain_row_sum(terms, o->s);
    for (size_t k = 0; k < o->s; k++) {
        const float inner = (float)((double)p[k] * ((double)dp[k] - dot));
        ds[k] = visible(m, o, i, h, q, k) ? stored(inner * scale) : 0.0f;
    }
    if (!s->visible)
        return 0.0f;
    const float share = (float)((double)ari_exp32(s->sink - s->max) / s->l);
    return s->finite ? stored((float)-((double)share * dot)) : ari_nan32();
}

/* Special values in every third row only: else every long row would be NaN. */
static float *new_scores(size_t n, size_t s, enum values kind, uint64_t seed)
{
    float *x = new_values(n, kind, seed), *calm = new_values(n, ORDINARY, seed + 1);
    for (size_t i = 0; i < n && kind == SPECIAL; i++)
        x[i] = i / s % 3 == 1 ? x[i] : calm[i];
    free(calm);
    return x;
}

/* A block of the last matrix: some of its rows, and of its keys those from `key` on. */
static ar_scores block_of(const shape *o, size_t row, size_t rows, size_t key, size_t keys)
{
    ar_scores b = whole(o);
    b.part = (ar_part){b.part.matrices - 1, 1, row, rows, key, keys};
    return b;
}

static float *new_block(const ar_scores *b, const float *all)
{
    const ar_part *p = &b->part;
    float *x = malloc(p->rows * p->cols * sizeof *x);
    for (size_t i = 0; i < p->rows; i++)
        memcpy(x + i * p->cols, all + ((p->matrix * b->group * b->rows + p->row + i) * b->seq + p->col),
               p->cols * sizeof *x);
    return x;
}

/* The rows' sums of a block that has all their keys, and with them the probabilities of one that has some. */
static void check_blocks(ar_device *d, const shape *o, const masks *m, const float *scores, const float *expected,
                         const float *sinks, const int32_t *max, const double *sum)
{
    const float scale = ari_softmax_scale(16);
    const size_t rows = group_of(o) * o->s, row = rows / 3, key = o->s / 2, all = o->b * o->heads * o->s;
    const ar_scores wide = block_of(o, row, rows - row, 0, o->s);
    const ar_scores narrow = block_of(o, row, (rows - row + 1) / 2, key, o->s - key);
    const size_t first = wide.part.matrix * rows + row;
    OWNED(free) int32_t *found = calloc(all, sizeof *found);
    OWNED(free) double *l = calloc(all, sizeof *l);
    OWNED(free) float *x = new_block(&wide, scores), *want = new_block(&wide, expected);
    assert_ok(ari_cpu_softmax_forward(d, NULL, buf(x), cbuf(x), cbuf(sinks), buf(found), buf(l), false, scale, &wide,
                                      &m->mask));
    assert_bits(x, want, (rows - row) * o->s, "rows of a block");
    for (size_t i = first; i < first + rows - row; i++) {
        const bool finite = max[i] != INT32_MIN && max[i] != INT32_MAX;
        cr_assert_eq(found[i], max[i], "maximum of row %zu", i);
        cr_assert(!finite || memcmp(&l[i], &sum[i], sizeof l[i]) == 0, "sum of row %zu", i);
    }
    free(x), free(want);
    x = new_block(&narrow, scores), want = new_block(&narrow, expected);
    assert_ok(ari_cpu_softmax_forward(d, NULL, buf(x), cbuf(x), cbuf(sinks), buf(found), buf(l), true, scale, &narrow,
                                      &m->mask));
    assert_bits(x, want, narrow.part.rows * narrow.part.cols, "keys of a block");
}

/* Gradients of some keys' scores, from the rows' D. */
static void check_backward_blocks(ar_device *d, const shape *o, const masks *m, const float *probs, const float *dprobs,
                                  const float *expected, double *dot)
{
    const size_t rows = group_of(o) * o->s, row = rows / 4, key = o->s / 3;
    const ar_scores narrow = block_of(o, row, rows - row, key, o->s - key);
    OWNED(free) float *p = new_block(&narrow, probs), *dp = new_block(&narrow, dprobs);
    OWNED(free) float *want = new_block(&narrow, expected);
    assert_ok(ari_cpu_softmax_backward(d, NULL, buf(dp), cbuf(p), buf(dp), buf(dot), true, ari_softmax_scale(16),
                                       &narrow, &m->mask));
    assert_bits(dp, want, narrow.part.rows * narrow.part.cols, "ds of a block");
}

/* sunk: every head has a sink. */
static void check_with(const shape *o, int which, enum values kind, int threads, bool sunk_too)
{
    const size_t s = o->s, rows = o->b * o->heads * s, n = rows * s;
    const float scale = ari_softmax_scale(16);
    ar_device d = test_device(threads);
    masks m = masks_new(o, which);
    float *scores = new_scores(n, s, kind, 1), *dp = new_scores(n, s, kind, 2);
    float *p = new_values(n, SPECIAL, 3), *ds = new_values(n, SPECIAL, 4);
    float *given = new_values(o->heads, ORDINARY, 5), *sinks = sunk_too ? given : NULL;
    float *terms = new_values(rows, SPECIAL, 6), *expected_terms = new_copy(terms, rows);
    float *expected_p = new_copy(p, n), *expected_ds = new_copy(p, n), *expected_dp = new_copy(dp, n);
    for (size_t r = 0; r < rows; r++) {
        const size_t i = r / s / o->heads, h = r / s % o->heads, q = r % s;
        const sunk of =
            plain_forward_row(expected_p + r * s, scores + r * s, scale, &m, o, i, h, q, sinks ? sinks + h : NULL);
        const float term = plain_backward_row(expected_ds + r * s, expected_dp + r * s, expected_p + r * s, scale, &m,
                                              o, i, h, q, &of);
        expected_terms[(i * s + q) * o->heads + h] = term;
    }
    const ar_scores all = whole(o);
    int32_t *max = calloc(rows, sizeof *max);
    double *sum = calloc(rows, sizeof *sum), *dot = calloc(rows, sizeof *dot);
    assert_ok(ari_cpu_softmax_forward(&d, NULL, buf(p), cbuf(scores), cbuf(sinks), buf(max), buf(sum), false, scale,
                                      &all, &m.mask));
    assert_bits(p, expected_p, n, "probs");
    check_blocks(&d, o, &m, scores, expected_p, sinks, max, sum);
    assert_ok(ari_cpu_softmax_forward(&d, NULL, buf(scores), cbuf(scores), cbuf(sinks), buf(max), buf(sum), true, scale,
                                      &all, &m.mask));
    assert_bits(scores, expected_p, n, "probs in the scores' place, again");
    float *dp_again = new_copy(dp, n);
    assert_ok(ari_cpu_softmax_backward(&d, NULL, buf(ds), cbuf(p), buf(dp), buf(dot), false, scale, &all, &m.mask));
    assert_bits(ds, expected_ds, n, "ds");
    assert_bits(dp, expected_dp, n, "dprobs, masked keys set to +0");
    check_backward_blocks(&d, o, &m, p, dp_again, expected_ds, dot);
    const ar_tensor of_rows = {.dtype = AR_F32,
                               .ndim = 3,
                               .shape = {o->b, s, o->heads},
                               .stride = {(ptrdiff_t)(s * o->heads), (ptrdiff_t)o->heads, 1},
                               .data = buf(terms)};
    if (sinks) {
        assert_ok(ari_cpu_sinks_backward(&d, NULL, &of_rows, cbuf(sinks), cbuf(max), cbuf(sum), cbuf(dot)));
        assert_bits(terms, expected_terms, rows, "gradients of sinks");
    }
    free(given), free(terms), free(expected_terms);
    assert_ok(ari_cpu_softmax_backward(&d, NULL, buf(dp), cbuf(p), buf(dp), buf(dot), true, scale, &all, &m.mask));
    assert_bits(dp, expected_ds, n, "ds in the place of dprobs, again");
    free(scores), free(dp), free(dp_again), free(p), free(ds), free(expected_p), free(expected_ds), free(expected_dp);
    free(max), free(sum), free(dot), free(m.visible), free(m.padding), free(m.additive);
}

static void check(const shape *o, int which, enum values kind, int threads)
{
    check_with(o, which, kind, threads, false);
    check_with(o, which, kind, threads, true);
}

Test(softmax, forward_and_backward_match_the_formulas_under_every_mask)
{
    for (size_t i = 0; i < SHAPES; i++)
        for (int which = 0; which < MASKS; which++)
            for (int kind = 0; kind < VALUE_KINDS; kind++)
                check(&shapes[i], which, (enum values)kind, 1);
}

Test(softmax, two_threads_give_the_same_bits)
{
    const shape o = {2, 2, 100, 1, 3, 0}; /* 40,000 elements: enough for a second thread */
    for (int which = 0; which < MASKS; which++)
        check(&o, which, SPECIAL, 2);
    const shape wide = {1, 1, 257, 0, 1, 50};
    check(&wide, 1, ORDINARY, 2);
}

/* Five keys of a sequence that is too long to be held: the sum's terms have the bits that so many need. */
Test(softmax, of_a_long_sequence_uses_fewer_bits)
{
    enum { keys = 5, seq = 1 << 23 };
    const ar_scores block = {.kv_heads = 1, .group = 1, .rows = 1, .seq = seq, .part = {0, 1, 0, 1, 0, keys}};
    const float scores[keys] = {0.0f, -11.3f, -12.1f, -13.7f, -14.9f};
    const int32_t seen[2] = {0, keys};
    const ar_mask mask = {.visible = cbuf(seen)};
    ar_device d = test_device(1);
    float p[keys];
    int32_t max = 0;
    double l = 0.0, expected[2];
    for (int i = 0; i < 2; i++) {
        const int bits = plain_bits(i ? keys : seq);
        int64_t sum = 0;
        for (size_t k = 0; k < keys; k++)
            sum += plain_quantised((double)ari_exp32(scores[k]), 1, bits);
        expected[i] = ldexp((double)sum, 1 - bits);
    }
    assert_ok(ari_cpu_softmax_forward(&d, NULL, buf(p), cbuf(scores), (ar_cbuf){NULL}, buf(&max), buf(&l), false, 1.0f,
                                      &block, &mask));
    cr_assert_eq(l, expected[0], "%a, expected %a", l, expected[0]);
    cr_assert_neq(expected[0], expected[1], "fewer bits would not show");
}
