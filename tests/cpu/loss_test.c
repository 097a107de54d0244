/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/cpu/row_support.h"

TestSuite(loss, .timeout = 300);

/* A whole problem and its definition's results. */
typedef struct problem {
    size_t n, v;
    double targets;
    float *logits, *terms, *dlogits; /* [n, v], [n], [n, v] */
    int64_t *target;                 /* [n] */
    uint8_t *valid;                  /* [n] */
} problem;

static void plain_row(problem *p, size_t t)
{
    const float *x = p->logits + t * p->v;
    float *dx = p->dlogits + t * p->v;
    const int bits = plain_bits(p->v);
    float m = -INFINITY;
    bool finite = true;
    int64_t sum = 0;
    for (size_t j = 0; j < p->v; j++) {
        finite = finite && isfinite(x[j]);
        m = x[j] > m ? x[j] : m;
    }
    for (size_t j = 0; j < p->v && finite; j++)
        sum += plain_quantised((double)ari_exp32(x[j] - m), 1, bits);
    const double l = ldexp((double)sum, 1 - bits);
    const float target = x[p->target[t]];
    const float term = finite ? (float)(((double)m + ari_log64(l)) - (double)target) : ari_nan32();
    p->terms[t] = p->valid[t] ? term : 0.0f;
    for (size_t j = 0; j < p->v; j++) {
        const float prob = finite ? (float)((double)ari_exp32(x[j] - m) / l) : ari_nan32();
        const float difference = prob - ((int64_t)j == p->target[t] ? 1.0f : 0.0f);
        dx[j] = p->valid[t] && p->targets > 0.0 ? stored((float)((double)difference / p->targets)) : 0.0f;
    }
}

static problem problem_new(size_t n, size_t v, enum values kind, double targets)
{
    problem p = {.n = n, .v = v, .targets = targets, .logits = new_values(n * v, kind, 1)};
    float *calm = new_values(n * v, ORDINARY, 2);
    p.terms = calloc(n + 1, sizeof *p.terms);
    p.dlogits = calloc(n * v + 1, sizeof *p.dlogits);
    p.target = calloc(n + 1, sizeof *p.target);
    p.valid = calloc(n + 1, 1);
    for (size_t t = 0; t < n; t++) {
        p.target[t] = (int64_t)(t * 31 % v);
        p.valid[t] = (uint8_t)(t % 5 != 3);
        if (kind == SPECIAL && t % 3 != 1) /* leave finite rows too */
            memcpy(p.logits + t * v, calm + t * v, v * sizeof *calm);
        plain_row(&p, t);
    }
    free(calm);
    return p;
}

static void problem_free(problem *p)
{
    free(p->logits), free(p->terms), free(p->dlogits), free(p->target), free(p->valid);
}

/* What one shard [start, start + count) computes, and what the ranks combine. */
typedef struct shard {
    size_t start, count;
    float *logits, *dlogits;
    int64_t *row_of, *sum;
    int32_t *key, *bits;
} shard;

static shard shard_new(const problem *p, int parts, int part)
{
    shard s = {.start = 0};
    ar_split_uneven(p->v, parts, part, &s.start, &s.count);
    s.logits = malloc(p->n * s.count * 4 + 1);
    s.dlogits = new_values(p->n * s.count, SPECIAL, 5);
    s.row_of = malloc(p->n * 8 + 1), s.sum = malloc(p->n * 8 + 1);
    s.key = malloc(p->n * 4 + 1), s.bits = malloc(p->n * 4 + 1);
    for (size_t t = 0; t < p->n && s.count > 0; t++)
        memcpy(s.logits + t * s.count, p->logits + t * p->v + s.start, s.count * 4);
    return s;
}

static void shard_free(shard *s)
{
    free(s->logits), free(s->dlogits), free(s->row_of), free(s->sum), free(s->key), free(s->bits);
}

/* What the ranks do between the kernels: an integer max of the keys, integer sums of sums and bit patterns. */
static void all_reduce_max(shard *s, int parts, size_t n)
{
    for (size_t t = 0; t < n; t++) {
        int32_t top = INT32_MIN;
        for (int r = 0; r < parts; r++)
            top = s[r].key[t] > top ? s[r].key[t] : top;
        for (int r = 0; r < parts; r++)
            s[r].key[t] = top;
    }
}

static void all_reduce_sums(shard *s, int parts, size_t n)
{
    for (size_t t = 0; t < n; t++) {
        uint64_t sum = 0;
        uint32_t bits = 0;
        for (int r = 0; r < parts; r++) {
            sum += (uint64_t)s[r].sum[t];
            bits += (uint32_t)s[r].bits[t];
        }
        for (int r = 0; r < parts; r++) {
            s[r].sum[t] = (int64_t)sum;
            memcpy(&s[r].bits[t], &bits, 4);
        }
    }
}

static void check_backward(const problem *p, shard *s, int parts, ar_device *d, bool in_place)
{
    for (int r = 0; r < parts; r++) {
        float *to = in_place ? s[r].logits : s[r].dlogits;
        assert_ok(ari_cpu_ce_backward(d, NULL, buf(to), cbuf(s[r].logits), cbuf(s[r].key), cbuf(s[r].sum),
                                      cbuf(s[r].row_of), cbuf(p->valid), p->targets, p->n, s[r].count, p->v));
        for (size_t t = 0; t < p->n; t++)
            assert_bits(to + t * s[r].count, p->dlogits + t * p->v + s[r].start, s[r].count, "dlogits");
    }
}

static void check(size_t n, size_t v, enum values kind, int parts, int threads, double targets)
{
    ar_device d = test_device(threads);
    problem p = problem_new(n, v, kind, targets);
    shard s[5];
    float *terms = new_values(n, ORDINARY, 6);
    for (int r = 0; r < parts; r++) {
        s[r] = shard_new(&p, parts, r);
        assert_ok(ari_cpu_rows_in_range(&d, NULL, buf(s[r].row_of), cbuf(p.target), n, (int64_t)s[r].start,
                                        (int64_t)s[r].count));
        assert_ok(ari_cpu_ce_max(&d, NULL, buf(s[r].key), cbuf(s[r].logits), n, s[r].count));
        for (size_t t = 0; t < n && s[r].count == 0; t++)
            cr_assert_eq(s[r].key[t], INT32_MIN);
    }
    all_reduce_max(s, parts, n);
    for (int r = 0; r < parts; r++) {
        assert_ok(ari_cpu_ce_sum(&d, NULL, buf(s[r].sum), cbuf(s[r].logits), cbuf(s[r].key), n, s[r].count, v));
        for (size_t t = 0; t < n; t++)
            cr_assert(s[r].key[t] != INT32_MAX || s[r].sum[t] == 0);
        assert_ok(ari_cpu_ce_target(&d, NULL, buf(s[r].bits), cbuf(s[r].logits), cbuf(s[r].row_of), n, s[r].count));
    }
    all_reduce_sums(s, parts, n);
    assert_ok(
        ari_cpu_ce_terms(&d, NULL, buf(terms), cbuf(s[0].key), cbuf(s[0].sum), cbuf(s[0].bits), cbuf(p.valid), n, v));
    assert_bits(terms, p.terms, n, "terms");
    check_backward(&p, s, parts, &d, false);
    check_backward(&p, s, parts, &d, true);
    for (int r = 0; r < parts; r++)
        shard_free(&s[r]);
    free(terms);
    problem_free(&p);
}

Test(loss, and_its_gradient_match_the_formulas_on_any_number_of_shards)
{
    static const size_t widths[] = {1, 3, 7, 33, 100, 257, 513};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
        for (int kind = 0; kind < VALUE_KINDS; kind++)
            for (int parts = 1; parts <= 5; parts++) /* more parts than columns: empty shards */
                for (int threads = 1; threads <= 2; threads++)
                    check(ROWS, widths[i], (enum values)kind, parts, threads, 105.0);
}

Test(loss, without_targets_or_rows_is_zero)
{
    check(7, 33, SPECIAL, 2, 1, 0.0);
    check(0, 33, ORDINARY, 2, 1, 0.0);
}

Test(loss, of_equal_logits_is_log_of_their_number)
{
    ar_device d = test_device(1);
    const float x[] = {2, 2, 2, 2}, quarter[] = {0.125f, 0.125f, -0.375f, 0.125f};
    const int64_t row_of[] = {2};
    const uint8_t valid[] = {1};
    int32_t key[1], bits[1];
    int64_t sum[1];
    float term[1], dx[4];
    assert_ok(ari_cpu_ce_max(&d, NULL, buf(key), cbuf(x), 1, 4));
    assert_ok(ari_cpu_ce_sum(&d, NULL, buf(sum), cbuf(x), cbuf(key), 1, 4, 4));
    cr_assert_eq(sum[0], (int64_t)4 << 39); /* 4*exp(0) with exponent 1 and P' = 40 */
    assert_ok(ari_cpu_ce_target(&d, NULL, buf(bits), cbuf(x), cbuf(row_of), 1, 4));
    assert_ok(ari_cpu_ce_terms(&d, NULL, buf(term), cbuf(key), cbuf(sum), cbuf(bits), cbuf(valid), 1, 4));
    const float log4 = 1.3862943611198906f;
    assert_bits(term, &log4, 1, "term");
    assert_ok(
        ari_cpu_ce_backward(&d, NULL, buf(dx), cbuf(x), cbuf(key), cbuf(sum), cbuf(row_of), cbuf(valid), 2.0, 1, 4, 4));
    assert_bits(dx, quarter, 4, "dlogits");
}

/* A shard of four columns of a vocabulary of 2^30: P' = min(40, 62 - 31). The rest of it is as if exp had
 * underflowed. */
Test(loss, of_a_huge_vocabulary_uses_fewer_bits)
{
    ar_device d = test_device(1);
    const size_t v = (size_t)1 << 30;
    const float x[] = {2, 1, 0.5f, -3};
    const int64_t row_of[] = {1};
    const uint8_t valid[] = {1};
    int32_t key[1], bits[1];
    int64_t sum[1], expected = 0;
    float term[1], dx[4], expected_dx[4];
    assert_ok(ari_cpu_ce_max(&d, NULL, buf(key), cbuf(x), 1, 4));
    assert_ok(ari_cpu_ce_sum(&d, NULL, buf(sum), cbuf(x), cbuf(key), 1, 4, v));
    for (size_t j = 0; j < 4; j++)
        expected += plain_quantised((double)ari_exp32(x[j] - 2.0f), 1, 31);
    cr_assert_eq(sum[0], expected);
    const double l = ldexp((double)expected, 1 - 31);
    const float expected_term = (float)((2.0 + ari_log64(l)) - 1.0);
    assert_ok(ari_cpu_ce_target(&d, NULL, buf(bits), cbuf(x), cbuf(row_of), 1, 4));
    assert_ok(ari_cpu_ce_terms(&d, NULL, buf(term), cbuf(key), cbuf(sum), cbuf(bits), cbuf(valid), 1, v));
    assert_bits(term, &expected_term, 1, "term");
    for (size_t j = 0; j < 4; j++) {
        const float p = (float)((double)ari_exp32(x[j] - 2.0f) / l), difference = p - (j == 1 ? 1.0f : 0.0f);
        expected_dx[j] = (float)((double)difference / 3.0);
    }
    assert_ok(
        ari_cpu_ce_backward(&d, NULL, buf(dx), cbuf(x), cbuf(key), cbuf(sum), cbuf(row_of), cbuf(valid), 3.0, 1, 4, v));
    assert_bits(dx, expected_dx, 4, "dlogits");
}

Test(loss, a_target_keeps_its_bits)
{
    ar_device d = test_device(1);
    const float x[] = {1, -0.0f, 3, 4};
    const int64_t row_of[] = {1, -1};
    int32_t bits[2];
    assert_ok(ari_cpu_ce_target(&d, NULL, buf(bits), cbuf(x), cbuf(row_of), 2, 2));
    cr_assert_eq((uint32_t)bits[0], 0x80000000u);
    cr_assert_eq(bits[1], 0);
}
