/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/numerics/philox.h"
#include "support/together.h"

typedef struct known_answer {
    uint32_t ctr[4], key[2], out[4];
} known_answer;

/* Random123's kat_vectors, philox4x32 with 10 rounds: zeros, ones, digits of pi. */
static const known_answer known_answers[] = {
    {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}},
    {{0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu},
     {0xffffffffu, 0xffffffffu},
     {0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}},
    {{0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u},
     {0xa4093822u, 0x299f31d0u},
     {0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}},
};

CLAIM(gives_the_published_vectors)
{
    for (size_t i = 0; i < 3; i++) {
        uint32_t out[4];
        ari_philox4x32(known_answers[i].ctr, known_answers[i].key, out);
        for (int lane = 0; lane < 4; lane++)
            cr_assert(out[lane] == known_answers[i].out[lane], "vector %zu lane %d: %08x", i, lane, out[lane]);
    }
}

CLAIM(element_step_and_use_fill_the_counter)
{
    const uint64_t key = 0x299f31d0a4093822u, index = (0x85a308d3243f6a88u << 2) | 3u;
    const uint32_t step = 0x13198a2eu, use = 0x03707344u;
    const uint32_t ctr[4] = {0x243f6a88u, 0x85a308d3u & 0x3fffffffu, step, use}, halves[2] = {0xa4093822u, 0x299f31d0u};
    uint32_t want[4];
    ari_philox4x32(ctr, halves, want);
    for (uint32_t lane = 0; lane < 4; lane++)
        cr_assert(ari_random_u32(key, (index & ~(uint64_t)3) | lane, step, use) == want[lane], "lane %u", lane);
}

CLAIM(fnv1a_gives_the_published_hashes)
{
    cr_assert(ari_fnv1a("") == 0xcbf29ce484222325u);
    cr_assert(ari_fnv1a("a") == 0xaf63dc4c8601ec8cu);
    cr_assert(ari_fnv1a("foobar") == 0x85944171f73967e8u);
}

CLAIM(stream_key_hashes_the_seed_bytes_then_the_name)
{
    cr_assert(ari_stream_key(0x6a72656469762031u, "x") == ari_fnv1a("1 viderjx"));
    cr_assert(ari_stream_key(1, "w") != ari_stream_key(2, "w"));
    cr_assert(ari_stream_key(1, "w") != ari_stream_key(1, "v"));
}

CLAIM(unit_lies_strictly_inside_the_interval)
{
    cr_assert(ari_random_unit(0) == 0x1p-33 && ari_random_unit(UINT32_MAX) == 1.0 - 0x1p-33);
    cr_assert(isfinite(ari_random_normal(0, 0, 1.0)));
}

/* Known answers of the two streams; values computed once with the definitions in 50 decimal digits, by a Philox of its
 * own. */
CLAIM(uniform_stream_has_known_bits)
{
    static const uint32_t want[] = {0xbc91ac6bu, 0x3bf4fb2cu, 0xbbce601du, 0x3c8a3790u,
                                    0xbbada980u, 0xbb243ea5u, 0xbc8d4a8fu, 0xbc057a0du};
    const uint64_t key = ari_stream_key(1234, "layers.0.mlp.fc1.weight");
    for (uint64_t i = 0; i < 8; i++)
        cr_assert(ari_bits32(ari_random_uniform(key, i, 0.03125)) == want[i], "element %d: %08x", (int)i,
                  ari_bits32(ari_random_uniform(key, i, 0.03125)));
}

CLAIM(normal_stream_has_known_bits)
{
    static const uint32_t want[] = {0xbcd1b9fbu, 0xbcc4015cu, 0x3b5e1f8cu, 0xbcdc48ecu,
                                    0xbcd25fe6u, 0x3bd89df5u, 0xbcc18b30u, 0x3ccf0265u};
    const uint64_t key = ari_stream_key(1234, "layers.0.mlp.fc1.weight");
    for (uint64_t i = 0; i < 8; i++)
        cr_assert(ari_bits32(ari_random_normal(key, i, 0.02)) == want[i], "element %d: %08x", (int)i,
                  ari_bits32(ari_random_normal(key, i, 0.02)));
}

/* Values computed once by a Philox of its own: 1 is kept. */
CLAIM(dropout_stream_keeps_known_elements)
{
    static const struct {
        double p;
        uint32_t step;
        const char *kept;
    } known[] = {{0.1, 1, "1111111111111011111011001011111111101111111111110011111111111111"},
                 {0.1, 2, "1111111111111111111101011111111111111110111111011111111111011111"},
                 {0.5, 1, "0101000101100001101010001000111010100001110100110001111110100101"}};
    const uint64_t key = ari_stream_key(1234, "transformer.drop");
    for (size_t k = 0; k < 3; k++) {
        for (uint64_t i = 0; i < 64; i++)
            cr_assert_eq(ari_dropout_keep(key, i, known[k].step, ari_dropout_threshold(known[k].p)),
                         known[k].kept[i] == '1', "p %g, step %u, element %d", known[k].p, known[k].step, (int)i);
    }
    cr_assert(ari_random_u32(key, ((uint64_t)1 << 40) + 5, 7, 0) == 0x4941a56eu);
    cr_assert(ari_random_u32(key, UINT64_MAX, 7, 0) == 0x4c9075b0u);
}

CLAIM(dropout_thresholds_are_floored_and_scales_rounded_once)
{
    cr_assert(ari_dropout_threshold(0.1) == 429496729u && ari_dropout_threshold(0.3) == 1288490188u);
    cr_assert(ari_dropout_threshold(0.0) == 0 && ari_dropout_threshold(1.0 - 0x1p-53) == UINT32_MAX);
    cr_assert(ari_bits32(ari_dropout_scale(0.1)) == 0x3f8e38e4u && ari_bits32(ari_dropout_scale(0.3)) == 0x3fb6db6eu);
    cr_assert(ari_bits32(ari_dropout_scale(0.5)) == 0x40000000u && ari_bits32(ari_dropout_scale(0.0)) == 0x3f800000u);
    /* A division in binary32 gives other bits of these. */
    cr_assert(ari_bits32(ari_dropout_scale(0.15)) == 0x3f969697u && ari_bits32(ari_dropout_scale(0.6)) == 0x40200000u);
    cr_assert(ari_bits32(ari_dropout_scale(0.9)) == 0x41200000u);
}

/* Of element 5. */
static float init_value(ar_init_scheme scheme, uint64_t key, size_t fan_in, size_t fan_out, double range)
{
    float x;
    ari_init_values(&x, scheme, key, 5, 1, fan_in, fan_out, range);
    return x;
}

CLAIM(schemes_use_the_fans_of_the_full_tensor)
{
    const uint64_t key = ari_stream_key(1, "w");
    const double std = sqrt(2.0 / (768.0 + 2048.0));
    cr_assert(fabs(std - 0.026650) < 5e-7);
    cr_assert(init_value(AR_INIT_XAVIER_NORMAL, key, 768, 2048, 0.0) == ari_random_normal(key, 5, std));
    cr_assert(fabs(1.0 / sqrt(11008.0) - 0.009531) < 5e-7);
    cr_assert(init_value(AR_INIT_UNIFORM_BIAS, key, 11008, 1, 0.0) == ari_random_uniform(key, 5, 1.0 / sqrt(11008.0)));
    cr_assert(init_value(AR_INIT_KAIMING_UNIFORM, key, 64, 1, 0.0) == ari_random_uniform(key, 5, 0.125));
    cr_assert(init_value(AR_INIT_NORMAL, key, 1, 1, 0.02) == ari_random_normal(key, 5, 0.02));
    cr_assert(init_value(AR_INIT_ONES, key, 1, 1, 0.0) == 1.0f);
    cr_assert(ari_bits32(init_value(AR_INIT_ZEROS, key, 1, 1, 0.0)) == 0u);
}

CLAIM(a_run_of_initial_values_is_what_each_element_draws)
{
    enum { MOST = 150, GUARD = 1 };
    const uint64_t key = ari_stream_key(3, "run"), starts[] = {0, 1, 2, 3, 31, 32, 1000003, (UINT64_C(1) << 34) - 5};
    const size_t counts[] = {0, 1, 2, 3, 4, 29, 32, 33, MOST};
    for (size_t i = 0; i < sizeof starts / sizeof *starts * (sizeof counts / sizeof *counts); i++) {
        const uint64_t first = starts[i % 8];
        const size_t count = counts[i / 8];
        float normal[MOST + GUARD], uniform[MOST + GUARD];
        normal[count] = uniform[count] = 7.0f;
        ari_init_values(normal, AR_INIT_NORMAL, key, first, count, 1, 1, 0.02);
        ari_init_values(uniform, AR_INIT_KAIMING_UNIFORM, key, first, count, 48, 1, 0.0);
        for (size_t k = 0; k < count; k++) {
            const float z = ari_random_normal(key, first + k, 0.02),
                        u = ari_random_uniform(key, first + k, 1 / sqrt(48.0));
            cr_assert(ari_bits32(normal[k]) == ari_bits32(z) && ari_bits32(uniform[k]) == ari_bits32(u),
                      "element %zu of %zu from %llu on: %a and %a, expected %a and %a", k, count,
                      (unsigned long long)first, (double)normal[k], (double)uniform[k], (double)z, (double)u);
        }
        cr_assert(normal[count] == 7.0f && uniform[count] == 7.0f, "%zu values: one more is written", count);
    }
}

EVERY_CLAIM(philox)
