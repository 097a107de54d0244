/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/tensor_private.h"
#include "tests/cpu/row_support.h"

/* A whole problem and its definition's results. */
typedef struct problem {
    size_t n, v;
    double targets;
    ar_loss_options o;
    float *logits, *terms, *dlogits; /* [n, v], [n], [n, v] */
    int64_t *target;                 /* [n] */
    uint8_t *valid;                  /* [n] */
} problem;

/* The mean of finite logits, which label smoothing needs. */
static double plain_mean(const problem *p, const float *x)
{
    OWNED(free) double *wide = calloc(p->v, sizeof *wide);
    for (size_t j = 0; j < p->v; j++)
        wide[j] = (double)x[j];
    const double mean = p->o.label_smoothing > 0.0 ? plain_row_sum(wide, p->v) / (double)p->v : 0.0;
    return mean;
}

static void plain_row(problem *p, size_t t)
{
    const float *x = p->logits + t * p->v;
    float *dx = p->dlogits + t * p->v;
    const int bits = plain_bits(p->v);
    const double e = p->o.label_smoothing, c = p->o.z_loss;
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
    const double lse = (double)m + ari_log64(l), target = (double)x[p->target[t]];
    const double term = (1.0 - e) * (lse - target) + e * (lse - (finite ? plain_mean(p, x) : 0.0)) + c * lse * lse;
    p->terms[t] = p->valid[t] ? finite ? (float)term : ari_nan32() : 0.0f;
    for (size_t j = 0; j < p->v; j++) {
        const float prob = finite ? (float)((double)ari_exp32(x[j] - m) / l) : ari_nan32();
        const double label = ((int64_t)j == p->target[t] ? 1.0 - e : 0.0) + e / (double)p->v;
        const float difference = (float)((double)prob * (1.0 + 2.0 * c * lse) - label);
        dx[j] = p->valid[t] && p->targets > 0.0 ? stored((float)((double)difference / p->targets)) : 0.0f;
    }
}

static problem problem_new(size_t n, size_t v, enum values kind, double targets, const ar_loss_options *o)
{
    problem p = {.n = n, .v = v, .targets = targets, .o = *o, .logits = new_values(n * v, kind, 1)};
    OWNED(free) float *calm = new_values(n * v, ORDINARY, 2);
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
    int64_t *row_of, *sum; /* sum: of the exponentials, then of the logits */
    int32_t *key, *bits;   /* key: of the largest logit, then the exponent of the logits */
} shard;

static shard shard_new(const problem *p, int parts, int part)
{
    shard s = {.start = 0};
    ari_split_uneven(p->v, parts, part, &s.start, &s.count);
    s.logits = malloc(p->n * s.count * 4 + 1);
    s.dlogits = new_values(p->n * s.count, SPECIAL, 5);
    s.row_of = malloc(p->n * 8 + 1), s.sum = malloc(p->n * 16 + 1);
    s.key = malloc(p->n * 8 + 1), s.bits = malloc(p->n * 4 + 1);
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
    for (size_t t = 0; t < 2 * n; t++) {
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
        uint64_t sum = 0, values = 0;
        uint32_t bits = 0;
        for (int r = 0; r < parts; r++) {
            sum += (uint64_t)s[r].sum[t];
            values += (uint64_t)s[r].sum[n + t];
            bits += (uint32_t)s[r].bits[t];
        }
        for (int r = 0; r < parts; r++) {
            s[r].sum[t] = (int64_t)sum;
            s[r].sum[n + t] = (int64_t)values;
            memcpy(&s[r].bits[t], &bits, 4);
        }
    }
}

static void check_backward(const problem *p, shard *s, int parts, ar_device *d, bool in_place)
{
    for (int r = 0; r < parts; r++) {
        float *to = in_place ? s[r].logits : s[r].dlogits;
        assert_ok(ari_cpu_ce_backward(d, NULL, rows_of(to, p->n, s[r].count), rows_of(s[r].logits, p->n, s[r].count),
                                      cbuf(s[r].key), cbuf(s[r].sum), cbuf(s[r].row_of), cbuf(p->valid), &p->o,
                                      p->targets, p->v));
        for (size_t t = 0; t < p->n; t++)
            assert_bits(to + t * s[r].count, p->dlogits + t * p->v + s[r].start, s[r].count, "dlogits");
    }
}

/* The sums of one shard, once the maxima are known. */
static void sum_up(const problem *p, shard *s, ar_device *d)
{
    assert_ok(ari_cpu_ce_sum(d, NULL, buf(s->sum), rows_of(s->logits, p->n, s->count), cbuf(s->key), p->v));
    assert_ok(
        ari_cpu_ce_logits(d, NULL, buf(s->sum + p->n), rows_of(s->logits, p->n, s->count), cbuf(s->key + p->n), p->v));
    for (size_t t = 0; t < p->n; t++)
        cr_assert(s->key[t] != INT32_MAX || (s->sum[t] == 0 && s->sum[p->n + t] == 0));
    assert_ok(ari_cpu_ce_target(d, NULL, buf(s->bits), rows_of(s->logits, p->n, s->count), cbuf(s->row_of)));
}

static void check(size_t n, size_t v, enum values kind, int parts, int threads, double targets,
                  const ar_loss_options *o)
{
    ar_device d = test_device(threads);
    SCOPED(problem_free) problem p = problem_new(n, v, kind, targets, o);
    shard s[5];
    OWNED(free) float *terms = new_values(n, ORDINARY, 6);
    for (int r = 0; r < parts; r++) {
        s[r] = shard_new(&p, parts, r);
        const ar_tensor rows = view2(s[r].logits, n, s[r].count, s[r].count);
        assert_ok(ari_cpu_rows_in_range(&d, NULL, buf(s[r].row_of), cbuf(p.target), n, (int64_t)s[r].start,
                                        (int64_t)s[r].count));
        assert_ok(ari_cpu_ce_max(&d, NULL, buf(s[r].key), rows_of(s[r].logits, n, s[r].count)));
        assert_ok(ari_cpu_row_exponents(&d, NULL, buf(s[r].key + n), &rows, cbuf(NULL), 1, false, false));
        for (size_t t = 0; t < n && s[r].count == 0; t++)
            cr_assert(s[r].key[t] == INT32_MIN && s[r].key[n + t] == INT32_MIN);
    }
    all_reduce_max(s, parts, n);
    for (int r = 0; r < parts; r++)
        sum_up(&p, &s[r], &d);
    all_reduce_sums(s, parts, n);
    const bool smoothed = o->label_smoothing > 0.0;
    assert_ok(ari_cpu_ce_terms(&d, NULL, buf(terms), cbuf(s[0].key), cbuf(s[0].sum), cbuf(s[0].bits), cbuf(p.valid),
                               cbuf(smoothed ? s[0].key + n : NULL), cbuf(smoothed ? s[0].sum + n : NULL), o, n, v));
    assert_bits(terms, p.terms, n, "terms");
    check_backward(&p, s, parts, &d, false);
    check_backward(&p, s, parts, &d, true);
    for (int r = 0; r < parts; r++)
        shard_free(&s[r]);
}

static const ar_loss_options losses[] = {
    {0}, {.label_smoothing = 0.1}, {.z_loss = 1e-4}, {.label_smoothing = 0.75, .z_loss = 0.5}};
enum { LOSSES = sizeof losses / sizeof *losses };

Test(loss, and_its_gradient_match_the_formulas_on_any_number_of_shards)
{
    static const size_t widths[] = {1, 3, 7, 33, 100, 257, 513};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
        for (int kind = 0; kind < VALUE_KINDS; kind++)
            for (int parts = 1; parts <= 5; parts++) /* more parts than columns: empty shards */
                for (int threads = 1; threads <= 2; threads++)
                    check(ROWS, widths[i], (enum values)kind, parts, threads, 105.0,
                          &losses[((int)i + kind + parts + 2 * threads) % LOSSES]);
}

Test(loss, without_targets_or_rows_is_zero)
{
    for (int o = 0; o < LOSSES; o++) {
        check(7, 33, SPECIAL, 2, 1, 0.0, &losses[o]);
        check(0, 33, ORDINARY, 2, 1, 0.0, &losses[o]);
    }
}

/* Four classes, logits 1, 1, 1 and -3 of which class 0 is the target: e = 1/2 halves its label and adds 1/8 to all. */
Test(loss, of_smoothed_labels_is_as_computed_by_hand)
{
    const ar_loss_options o = {.label_smoothing = 0.5, .z_loss = 2.0};
    const double lse = 1.0061045;
    const double expected = 0.5 * (lse - 1.0) + 0.5 * (lse - 0.0) + 2.0 * lse * lse;
    cr_expect_float_eq(ari_ce_term(lse, 1.0f, 0.0, &o), expected, 1e-6);
    cr_expect_eq(ari_ce_label(1, 4, &o), 0.625);
    cr_expect_eq(ari_ce_label(0, 4, &o), 0.125);
    cr_expect_eq(ari_ce_weight(0.75, &o), 4.0);
    cr_expect_eq(ari_ce_dlogit(0.25f, 4.0, 0.625, 3.0), 0.125f);
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
    assert_ok(ari_cpu_ce_max(&d, NULL, buf(key), rows_of(x, 1, 4)));
    assert_ok(ari_cpu_ce_sum(&d, NULL, buf(sum), rows_of(x, 1, 4), cbuf(key), v));
    for (size_t j = 0; j < 4; j++)
        expected += plain_quantised((double)ari_exp32(x[j] - 2.0f), 1, 31);
    cr_assert_eq(sum[0], expected);
    const double l = ldexp((double)expected, 1 - 31);
    const float expected_term = (float)((2.0 + ari_log64(l)) - 1.0);
    assert_ok(ari_cpu_ce_target(&d, NULL, buf(bits), rows_of(x, 1, 4), cbuf(row_of)));
    assert_ok(ari_cpu_ce_terms(&d, NULL, buf(term), cbuf(key), cbuf(sum), cbuf(bits), cbuf(valid), cbuf(NULL),
                               cbuf(NULL), &losses[0], 1, v));
    assert_bits(term, &expected_term, 1, "term");
    for (size_t j = 0; j < 4; j++) {
        const float p = (float)((double)ari_exp32(x[j] - 2.0f) / l), difference = p - (j == 1 ? 1.0f : 0.0f);
        expected_dx[j] = (float)((double)difference / 3.0);
    }
    assert_ok(ari_cpu_ce_backward(&d, NULL, rows_of(dx, 1, 4), rows_of(x, 1, 4), cbuf(key), cbuf(sum), cbuf(row_of),
                                  cbuf(valid), &losses[0], 3.0, v));
    assert_bits(dx, expected_dx, 4, "dlogits");
}

Test(loss, a_target_keeps_its_bits)
{
    ar_device d = test_device(1);
    const float x[] = {1, -0.0f, 3, 4};
    const int64_t row_of[] = {1, -1};
    int32_t bits[2];
    assert_ok(ari_cpu_ce_target(&d, NULL, buf(bits), rows_of(x, 2, 2), cbuf(row_of)));
    cr_assert_eq((uint32_t)bits[0], 0x80000000u);
    cr_assert_eq(bits[1], 0);
}
