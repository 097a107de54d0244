/* SPDX-License-Identifier: Apache-2.0 */
/* Selections of rows, and the cross-entropy over a shard of the vocabulary. */
#include <string.h>

#include "gpu/conformance.h"
#include "ref/numerics/scalar.h"

void rows_in_range_cases(device_pair *p)
{
    static const int64_t starts[] = {0, 5, -3, INT64_MAX - 10, INT64_MIN};
    static const int64_t counts[] = {10, 0, 1, INT64_MAX};
    size_t n;
    for (size_t i = 0; (n = pair_size(p, i)) != SIZE_MAX && pair_goes_on(p); i++) {
        const int64_t start = starts[i % 5], count = counts[i % 4];
        const bool in_place = pair_below(p, 3) == 0;
        PAIR_CASE(p, "n %zu, [%lld, + %lld)%s", n, (long long)start, (long long)count, in_place ? ", in place" : "");
        const pair_buf ids = pair_integers(p, "ids", PAIR_W64, n, start - (start > INT64_MIN ? 2 : 0), 16);
        const pair_buf row_of = pair_words(p, "row_of", PAIR_W64, n);
        for (size_t k = 0; k < n && ids.host; k += 7)
            ((int64_t *)ids.host)[k] = (int64_t)pair_random(p);
        PAIR_RUN(p, rows_in_range, in_place ? ids.at[s] : row_of.at[s], ar_const(ids.at[s]), n, start, count);
    }
}

static pair_tensor logits_of(device_pair *p, pair_buf b, size_t n, size_t v_local)
{
    return pair_stored(p, pair_view(b, 2, (const size_t[]){n, v_local}));
}

/* What a rank with v_local columns of v holds, as other slots and other ranks would have left it. */
typedef struct loss {
    size_t n, v_local, v;
    pair_tensor logits;
    pair_buf key, sum, row_of, valid;
} loss;

static int32_t key_of_row(const float *x, size_t n)
{
    int32_t top = INT32_MIN;
    for (size_t j = 0; j < n; j++) {
        const int32_t key = ari_key32(x[j]);
        top = key > top ? key : top;
    }
    return top;
}

static loss new_loss(device_pair *p, size_t n, size_t v_local, size_t v)
{
    loss o = {.n = n, .v_local = v_local, .v = v};
    const pair_buf values = pair_rows(p, "logits", n, v_local, PAIR_CALM_ROWS);
    o.logits = logits_of(p, values, n, v_local);
    o.key = pair_zeros(p, "key", PAIR_W32, n);
    o.sum = pair_zeros(p, "sum", PAIR_W64, n);
    o.row_of = pair_integers(p, "row_of", PAIR_W64, n, v_local < v || v_local == 0 ? -1 : 0,
                             v_local + (v_local < v || v_local == 0 ? 1 : 0));
    o.valid = pair_bytes(p, "valid", n, 6);
    const int32_t bits = ari_rowsum_bits(v);
    for (size_t t = 0; t < n && o.sum.host && o.key.host; t++) {
        const float *x = (const float *)values.host + t * v_local;
        int32_t key = key_of_row(x, v_local);
        if (v_local < v && key != INT32_MAX) { /* another shard may hold a larger one */
            const int32_t other = ari_key32(pair_value(p, PAIR_ORDINARY));
            key = other > key ? other : key;
        }
        int64_t sum = key == INT32_MAX ? 0 : (int64_t)1 << (bits - 1); /* the largest term is 1 */
        for (size_t j = 0; j < v_local && key != INT32_MAX; j++)
            sum += ari_rowsum_quantise((double)ari_softmax_exp(x[j], ari_key32_value(key)), 1, bits);
        ((int32_t *)o.key.host)[t] = key;
        ((int64_t *)o.sum.host)[t] = sum;
    }
    return o;
}

/* Shards of every width, the whole vocabulary or a part of it. */
static void every_shard(device_pair *p, void (*one)(device_pair *, size_t n, size_t v_local, size_t v))
{
    static const size_t widths[] = {0, 1, 2, 31, 32, 33, 255, 256, 257, 1000, 4097};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
        for (size_t more = 0; more < 3 && pair_goes_on(p); more++) {
            const size_t v_local = p->round > 0 ? pair_below(p, 1200) : widths[i];
            const size_t v = more == 0 && v_local > 0 ? v_local : more == 1 ? 2 * v_local + 1 : (size_t)1 << 30;
            one(p, v_local > 1000 ? 5 : 1 + pair_below(p, 20), v_local, v);
        }
    one(p, 0, 33, 33);
}

static void ce_max_case(device_pair *p, size_t n, size_t v_local, size_t v)
{
    (void)v;
    PAIR_CASE(p, "%zu rows of %zu", n, v_local);
    const pair_buf logits = pair_rows(p, "logits", n, v_local, PAIR_EACH_ROW), key = pair_words(p, "key", PAIR_W32, n);
    const pair_tensor x = logits_of(p, logits, n, v_local);
    PAIR_RUN(p, ce_max, key.at[s], &x.at[s]);
}

PAIR_CASES(ce_max, every_shard)

static void ce_sum_case(device_pair *p, size_t n, size_t v_local, size_t v)
{
    PAIR_CASE(p, "%zu rows of %zu of %zu", n, v_local, v);
    const loss o = new_loss(p, n, v_local, v);
    const pair_buf sum = pair_words(p, "sum", PAIR_W64, n);
    PAIR_RUN(p, ce_sum, sum.at[s], &o.logits.at[s], ar_const(o.key.at[s]), v);
}

PAIR_CASES(ce_sum, every_shard)

/* Exponents as of rows that lie in part on other ranks, and those of rows of zeros and of rows with a NaN. */
static void ce_logits_case(device_pair *p, size_t n, size_t v_local, size_t v)
{
    PAIR_CASE(p, "%zu rows of %zu of %zu", n, v_local, v);
    const pair_buf logits = pair_rows(p, "logits", n, v_local, PAIR_EACH_ROW);
    const pair_tensor x = logits_of(p, logits, n, v_local);
    const pair_buf e = pair_zeros(p, "e", PAIR_W32, n), sum = pair_words(p, "sum", PAIR_W64, n);
    for (size_t t = 0; t < n && e.host; t++) {
        int32_t largest = ARI_EXP_ZERO;
        for (size_t j = 0; j < v_local; j++) {
            const int32_t one = ari_exponent32(((const float *)logits.host)[t * v_local + j]);
            largest = one > largest ? one : largest;
        }
        const bool known = largest != ARI_EXP_ZERO && largest != ARI_EXP_NONFINITE;
        ((int32_t *)e.host)[t] = known ? largest + (int32_t)pair_below(p, 3) : largest;
    }
    PAIR_RUN(p, ce_logits, sum.at[s], &x.at[s], ar_const(e.at[s]), v);
}

PAIR_CASES(ce_logits, every_shard)

static void ce_target_case(device_pair *p, size_t n, size_t v_local, size_t v)
{
    PAIR_CASE(p, "%zu rows of %zu of %zu", n, v_local, v);
    const pair_buf logits = pair_rows(p, "logits", n, v_local, PAIR_ANY), bits = pair_words(p, "bits", PAIR_W32, n);
    const pair_buf row_of = pair_integers(p, "row_of", PAIR_W64, n, -1, v_local + 1);
    const pair_tensor x = logits_of(p, logits, n, v_local);
    PAIR_RUN(p, ce_target, bits.at[s], &x.at[s], ar_const(row_of.at[s]));
}

PAIR_CASES(ce_target, every_shard)

static const ar_loss_options loss_options[] = {
    {0}, {.label_smoothing = 0.1}, {.z_loss = 1e-4}, {.label_smoothing = 0.75, .z_loss = 0.5}};

static void ce_terms_case(device_pair *p, size_t n, size_t v_local, size_t v)
{
    PAIR_CASE(p, "%zu rows of %zu of %zu", n, v_local, v);
    const loss o = new_loss(p, n, v_local, v);
    const pair_buf terms = pair_words(p, "terms", PAIR_W32, n), bits = pair_floats(p, "bits", n, PAIR_SPECIAL);
    const ar_loss_options *options = &loss_options[pair_below(p, 4)];
    const bool smoothed = options->label_smoothing > 0.0;
    const int64_t most = (int64_t)1 << 60;
    const pair_buf e = smoothed ? pair_integers(p, "e", PAIR_W32, n, -150, 278) : pair_none();
    const pair_buf sums = smoothed ? pair_integers(p, "sums", PAIR_W64, n, -most, 2 * (uint64_t)most) : pair_none();
    for (size_t t = 0; t < n && e.host; t += 5)
        ((int32_t *)e.host)[t] = t % 2 ? ARI_EXP_ZERO : ARI_EXP_NONFINITE;
    PAIR_RUN(p, ce_terms, terms.at[s], ar_const(o.key.at[s]), ar_const(o.sum.at[s]), ar_const(bits.at[s]),
             ar_const(o.valid.at[s]), ar_const(e.at[s]), ar_const(sums.at[s]), options, n, v);
}

PAIR_CASES(ce_terms, every_shard)

static void ce_backward_case(device_pair *p, size_t n, size_t v_local, size_t v)
{
    static const double targets[] = {105.0, 3.0, 0.0};
    const double t = targets[pair_below(p, 3)];
    const bool in_place = pair_below(p, 2);
    const ar_loss_options *options = &loss_options[pair_below(p, 4)];
    PAIR_CASE(p, "%zu rows of %zu of %zu, %g targets%s", n, v_local, v, t, in_place ? ", in place" : "");
    const loss o = new_loss(p, n, v_local, v);
    const pair_tensor apart = logits_of(p, pair_words(p, "dlogits", PAIR_W32, n * v_local), n, v_local);
    PAIR_RUN(p, ce_backward, in_place ? &o.logits.at[s] : &apart.at[s], &o.logits.at[s], ar_const(o.key.at[s]),
             ar_const(o.sum.at[s]), ar_const(o.row_of.at[s]), ar_const(o.valid.at[s]), options, t, v);
}

PAIR_CASES(ce_backward, every_shard)
