/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/numerics/rope_check.h"
#include "support/row.h"
#include "tests/cpu/row_support.h"

Test(rope, tables_hold_cos_and_sin_of_position_times_frequency)
{
    static const size_t dims[] = {2, 6, 16, 66, 200, 514};
    static const double factors[] = {1.0, 4.0, 3.0};
    for (size_t i = 0; i < 6; i++)
        for (size_t f = 0; f < 3; f++) {
            ar_device d = test_device(1 + (int)(i & 1u));
            const size_t positions = 131, half = dims[i] / 2;
            OWNED(free) float *c = new_values(positions * half, ORDINARY, 1), *s = new_copy(c, positions * half);
            const ar_rope rope = {.kind = AR_ROPE_LINEAR, .theta = 10000.0, .factor = factors[f]};
            assert_ok(ari_cpu_rope_tables(&d, NULL, buf(c), buf(s), positions, dims[i], &rope));
            for (size_t n = 0; n < positions * half; n++) {
                const double exponent = -(2.0 * (double)(n % half) / (double)dims[i]);
                const float inv_freq = (float)((double)(float)ari_exp64(exponent * ari_log64(10000.0)) / factors[f]);
                const float angle = (float)(n / half) * inv_freq;
                const float expected_c = ari_cos32(angle), expected_s = ari_sin32(angle);
                assert_bits(&c[n], &expected_c, 1, "cos");
                assert_bits(&s[n], &expected_s, 1, "sin");
            }
        }
}

#define LLAMA3_OF(by, low, high, n)                                                                           \
    {                                                                                                         \
        .kind = AR_ROPE_LLAMA3, .theta = 1e4, .factor = by, .low_freq_factor = low, .high_freq_factor = high, \
        .original_positions = n                                                                               \
    }

static const ar_rope plain = {.kind = AR_ROPE_DEFAULT, .theta = 1e4};

Test(rope, tables_refuse_what_has_no_meaning)
{
    ar_device d = test_device(1);
    float c[4] = {7, 7, 7, 7}, s[4] = {7, 7, 7, 7};
    cr_assert_eq(ari_cpu_rope_tables(&d, NULL, buf(c), buf(s), 1, 3, &plain), AR_ERR_ARG);
    cr_assert_eq(ari_cpu_rope_tables(&d, NULL, buf(c), buf(s), ((size_t)1 << 20) + 1, 2, &plain), AR_ERR_ARG);
    const ar_rope bad[] = {
        {.kind = AR_ROPE_LINEAR, .theta = 1e4, .factor = 0.0},
        {.kind = AR_ROPE_DEFAULT, .theta = -1.0},
        {.kind = AR_ROPE_DEFAULT, .theta = 1e4, .rotary_dim = 3},
        {.kind = AR_ROPE_DEFAULT, .theta = 1e4, .rotary_dim = 6},
        {.kind = AR_ROPE_DYNAMIC, .theta = 1e4, .factor = 2.0, .original_positions = 0},
        {.kind = AR_ROPE_DYNAMIC, .theta = 1e4, .factor = 2.0, .original_positions = 8, .rotary_dim = 2},
        ROW(.kind = AR_ROPE_YARN, .theta = 1e4, .factor = 2.0, .beta_fast = 1.0, .beta_slow = 2.0,
            .original_positions = 8),
        ROW(.kind = AR_ROPE_YARN, .theta = 1.0, .factor = 2.0, .beta_fast = 2.0, .beta_slow = 1.0,
            .original_positions = 8),
        {.kind = AR_ROPE_LONGROPE, .theta = 1e4, .factor = 2.0, .original_positions = 8, .short_factor = {1.0f, 1.0f}},
        ROW(.kind = AR_ROPE_LONGROPE, .theta = 1e4, .factor = 2.0, .original_positions = 1,
            .short_factor = {1.0f, 1.0f}, .long_factor = {1.0f, 1.0f}),
        LLAMA3_OF(0.0, 1.0, 4.0, 64),
        LLAMA3_OF(8.0, 0.0, 4.0, 64),
        LLAMA3_OF(8.0, 4.0, 4.0, 64),
        LLAMA3_OF(8.0, 4.0, 1.0, 64)};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        cr_assert_eq(ari_cpu_rope_tables(&d, NULL, buf(c), buf(s), 1, 4, &bad[i]), AR_ERR_ARG, "case %zu", i);
    cr_assert(c[0] == 7.0f && s[0] == 7.0f);
    assert_ok(ari_cpu_rope_tables(&d, NULL, buf(c), buf(s), 0, 2, &plain));
    assert_ok(ari_cpu_rope_tables(&d, NULL, buf(c), buf(s), 1, 2, &plain));
    cr_assert(c[0] == 1.0f && ari_bits32(s[0]) == 0);
}

/* Frequencies before and after, as transformers 5.17 with torch 2.11 computed them on a CPU (ROPE_INIT_FUNCTIONS
 * ["llama3"]): Llama 3.1's own scaling, and two others; kept, blended and slowed ones. */
Test(rope, scaling_of_llama_3_has_the_bits_of_hugging_face)
{
    static const ar_rope own = LLAMA3_OF(8.0, 1.0, 4.0, 8192), narrow = LLAMA3_OF(4.0, 1.0, 3.0, 64),
                         odd = LLAMA3_OF(32.0, 0.7, 2.9, 333);
    static const struct {
        const ar_rope *scaling;
        float before, after;
    } cases[] = {
        {&own, 0x1.0p+0f, 0x1.0p+0f},
        {&own, 0x1.a4ee40p-9f, 0x1.a4ee40p-9f},
        {&own, 0x1.175482p-9f, 0x1.67a23ap-10f},
        {&own, 0x1.72ba42p-10f, 0x1.132ba4p-11f},
        {&own, 0x1.ec07d4p-11f, 0x1.765ba4p-13f},
        {&own, 0x1.46831ap-11f, 0x1.46831ap-14f},
        {&narrow, 0x1.43dd28p-2f, 0x1.43dd28p-2f},
        {&narrow, 0x1.6c4534p-3f, 0x1.93e70ep-4f},
        {&narrow, 0x1.99b7d2p-4f, 0x1.a5530cp-6f},
        {&narrow, 0x1.ccd606p-5f, 0x1.ccd606p-7f},
        {&odd, 0x1.99999ap-4f, 0x1.99999ap-4f},
        {&odd, 0x1.7c3d2ap-5f, 0x1.32904ep-5f},
        {&odd, 0x1.60fb8cp-6f, 0x1.3ed0e6p-8f},
        {&odd, 0x1.47ae14p-7f, 0x1.47ae14p-12f},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const float after = ari_rope_llama3(cases[i].before, cases[i].scaling);
        cr_expect_eq(ari_bits32(after), ari_bits32(cases[i].after), "case %zu: %a, expected %a", i, (double)after,
                     (double)cases[i].after);
    }
}

/* Frequencies of a sequence's length and the factor of cosines and sines, as transformers 5.23 with torch 2.15 computed
 * them on a CPU: two that grow with the sequence; kept, blended and slowed ones, also where the ramp begins between two
 * pairs; a list of factors. */
Test(rope, dynamic_yarn_and_longrope_have_the_bits_of_hugging_face)
{
    static const struct {
        ar_rope rope;
        size_t d, length;
        float attention, frequency[10];
    } cases[] = {
        {{.kind = AR_ROPE_DYNAMIC, .theta = 100.0, .factor = 4.0, .original_positions = 24},
         12,
         40,
         1.0f,
         {1.0f, 0x1.6e884ap-2f, 0x1.0664fcp-3f, 0x1.77b014p-5f, 0x1.0cf2dcp-6f, 0x1.81126ap-8f}},
        {{.kind = AR_ROPE_DYNAMIC, .theta = 500000.0, .factor = 2.5, .original_positions = 8192},
         10,
         30000,
         1.0f,
         {1.0f, 0x1.64f2dcp-5f, 0x1.f1b456p-10f, 0x1.5afb72p-14f, 0x1.e3cedcp-19f}},
        {{.kind = AR_ROPE_YARN,
          .theta = 1000.0,
          .factor = 4.0,
          .beta_fast = 4.0,
          .beta_slow = 0.25,
          .truncate = true,
          .original_positions = 64},
         20,
         1,
         0x1.237d38p+0f,
         {1.0f, 0x1.009b9cp-1f, 0x1.b544e8p-3f, 0x1.68f586p-4f, 0x1.1c48bcp-5f, 0x1.9e7c7p-7f, 0x1.03ab3ap-8f,
          0x1.044916p-9f, 0x1.04e74cp-10f, 0x1.0585e8p-11f}},
        {{.kind = AR_ROPE_YARN,
          .theta = 10000.0,
          .factor = 10.0,
          .beta_fast = 2.0,
          .beta_slow = 0.5,
          .mscale = 1.5,
          .mscale_all_dim = 0.5,
          .original_positions = 16},
         12,
         1,
         0x1.34dc44p+0f,
         {1.0f, 0x1.1ad30cp-5f, 0x1.3030eep-8f, 0x1.0624dep-10f, 0x1.c3d14ep-13f, 0x1.855d6p-15f}},
        {{.kind = AR_ROPE_LONGROPE,
          .theta = 10000.0,
          .factor = 3.0,
          .original_positions = 32,
          .short_factor = {1.0f, 1.02f, 1.05f, 1.1f, 1.3f, 1.7f},
          .long_factor = {1.1f, 1.5f, 2.3f, 4.1f, 7.7f, 9.3f}},
         12,
         33,
         0x1.25c94ep+0f,
         {0x1.d1745cp-1f, 0x1.2626f2p-3f, 0x1.4aa47ep-6f, 0x1.3fb014p-9f, 0x1.256358p-12f, 0x1.a2abf8p-15f}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const ar_rope at = ari_rope_at(&cases[i].rope, cases[i].length, cases[i].d);
        const float attention = ari_rope_attention(&cases[i].rope);
        assert_bits(&attention, &cases[i].attention, 1, "attention factor");
        for (size_t k = 0; k < cases[i].d / 2; k++) {
            const float f = ari_rope_frequency(&at, k, cases[i].d);
            cr_expect_eq(ari_bits32(f), ari_bits32(cases[i].frequency[k]), "case %zu, pair %zu: %a, expected %a", i, k,
                         (double)f, (double)cases[i].frequency[k]);
        }
    }
}

Test(rope, frequencies_change_where_a_sequence_becomes_longer_than_the_first_ones)
{
    const ar_rope dynamic = {.kind = AR_ROPE_DYNAMIC, .theta = 100.0, .factor = 4.0, .original_positions = 24};
    const ar_rope longrope = {.kind = AR_ROPE_LONGROPE, .theta = 100.0, .original_positions = 24};
    for (size_t length = 1; length <= 24; length++)
        cr_expect(ari_rope_length(&dynamic, length) == 0 && ari_rope_length(&longrope, length) == 0);
    cr_expect(ari_rope_length(&dynamic, 25) != ari_rope_length(&dynamic, 26));
    cr_expect(ari_rope_length(&longrope, 25) == 1 && ari_rope_length(&longrope, 26) == 1);
    cr_expect_eq(ari_rope_at(&dynamic, 24, 12).theta, 100.0);
    cr_expect(ari_rope_at(&dynamic, 25, 12).theta > 100.0);
}

Test(rope, tables_hold_the_frequencies_of_llama_3)
{
    ar_rope scaling = LLAMA3_OF(4.0, 1.0, 3.0, 64);
    scaling.theta = 316.0;
    ar_device d = test_device(1);
    float c[3 * 10], s[3 * 10];
    assert_ok(ari_cpu_rope_tables(&d, NULL, buf(c), buf(s), 3, 20, &scaling));
    for (size_t i = 0; i < 10; i++) {
        const float f = ari_rope_llama3(ari_rope_inv_freq(316.0, i, 20), &scaling), angle = 2.0f * f;
        const float expected = ari_sin32(angle);
        assert_bits(&s[20 + i], &expected, 1, "sin");
    }
}

/* Extents of a rotation and where its input and output lie. */
typedef struct rope_case {
    size_t b, s, heads, d;
    size_t pad; /* elements beside the heads in a row of the input, as k and v beside q */
} rope_case;

/* [b, s, heads, d] as columns of rows that are `ld` long. */
static ar_tensor in_rows(float *p, const rope_case *c, size_t ld)
{
    ar_tensor t = {.dtype = AR_F32, .ndim = 4, .shape = {c->b, c->s, c->heads, c->d}, .data = {p}};
    t.stride[0] = (ptrdiff_t)(c->s * ld);
    t.stride[1] = (ptrdiff_t)ld;
    t.stride[2] = (ptrdiff_t)c->d;
    t.stride[3] = 1;
    return t;
}

/* [b, s, heads, d] that lies in memory as [b, heads, s, d]. */
static ar_tensor by_heads(float *p, const rope_case *c)
{
    ar_tensor t = in_rows(p, c, c->heads * c->d);
    t.stride[1] = (ptrdiff_t)c->d;
    t.stride[2] = (ptrdiff_t)(c->s * c->d);
    return t;
}

static float at(const ar_tensor *t, size_t b, size_t s, size_t h, size_t i)
{
    return ((const float *)t->data.ptr)[(ptrdiff_t)b * t->stride[0] + (ptrdiff_t)s * t->stride[1] +
                                        (ptrdiff_t)h * t->stride[2] + (ptrdiff_t)i];
}

static void check_head(const ar_tensor *y, const ar_tensor *x, const float *cos, const float *sin, int direction,
                       size_t b, size_t s, size_t h)
{
    const size_t half = x->shape[3] / 2;
    for (size_t i = 0; i < half; i++) {
        const float x1 = at(x, b, s, h, i), x2 = at(x, b, s, h, half + i);
        const float c = cos[s * half + i], sn = direction < 0 ? -sin[s * half + i] : sin[s * half + i];
        const float a1 = x1 * c, a2 = x2 * sn, b1 = x2 * c, b2 = x1 * sn;
        const float y1 = stored(a1 - a2), y2 = stored(b1 + b2);
        const float got1 = at(y, b, s, h, i), got2 = at(y, b, s, h, half + i);
        assert_bits(&got1, &y1, 1, "first half");
        assert_bits(&got2, &y2, 1, "second half");
    }
}

static void check(const rope_case *c, enum values kind, int direction, int threads)
{
    ar_device dev = test_device(threads);
    const size_t width = c->heads * c->d, ld = width + c->pad, n = c->b * c->s * ld, half = c->d / 2;
    float *in = new_values(n, kind, 1), *original = new_copy(in, n),
          *out = new_values(c->b * c->s * width, ORDINARY, 2);
    float *cos = malloc(c->s * half * sizeof *cos), *sin = malloc(c->s * half * sizeof *sin);
    assert_ok(ari_cpu_rope_tables(&dev, NULL, buf(cos), buf(sin), c->s, c->d, &plain));
    const ar_tensor x = in_rows(in, c, ld), kept = in_rows(original, c, ld), y = by_heads(out, c);
    assert_ok(ari_cpu_rope(&dev, NULL, &y, &x, cbuf(cos), cbuf(sin), direction));
    assert_bits(in, original, n, "the input");
    assert_ok(ari_cpu_rope(&dev, NULL, &x, &x, cbuf(cos), cbuf(sin), direction)); /* in place */
    for (size_t r = 0; r < c->b * c->s * c->heads; r++) {
        check_head(&y, &kept, cos, sin, direction, r / c->heads / c->s, r / c->heads % c->s, r % c->heads);
        check_head(&x, &kept, cos, sin, direction, r / c->heads / c->s, r / c->heads % c->s, r % c->heads);
    }
    for (size_t i = 0; i < n; i++)
        cr_assert(i % ld < width || ari_bits32(in[i]) == ari_bits32(original[i]), "a column beside the heads changed");
    free(in), free(original), free(out), free(cos), free(sin);
}

Test(rope, rotates_strided_views_forward_and_backward)
{
    static const rope_case cases[] = {{1, 1, 1, 2, 0},   {2, 3, 1, 6, 5},     {2, 7, 3, 14, 28},
                                      {1, 33, 2, 66, 1}, {2, 257, 3, 64, 64}, {1, 0, 2, 4, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int kind = 0; kind < VALUE_KINDS; kind++)
            for (int variant = 0; variant < 4; variant++)
                check(&cases[i], (enum values)kind, variant & 1 ? -1 : 1, 1 + variant / 2);
}

Test(rope, position_zero_is_the_identity_and_a_right_angle_swaps_the_halves)
{
    ar_device dev = test_device(1);
    float x[] = {1, 2, 3, 4, 5, 6, 7, 8}, y[8];
    const float cos[] = {1, 1, 0, 0}, sin[] = {0, 0, 1, 1}, expected[] = {1, 2, 3, 4, -7, -8, 5, 6};
    const rope_case c = {1, 2, 1, 4, 0};
    const ar_tensor from = in_rows(x, &c, 4), to = in_rows(y, &c, 4);
    assert_ok(ari_cpu_rope(&dev, NULL, &to, &from, cbuf(cos), cbuf(sin), 1));
    assert_bits(y, expected, 8, "forward");
    assert_ok(ari_cpu_rope(&dev, NULL, &to, &to, cbuf(cos), cbuf(sin), -1));
    assert_bits(y, x, 8, "and back");
}
