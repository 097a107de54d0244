/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/io/safetensors_private.h"
#include "support/together.h"

/* A value of `bytes` little-endian bytes, read at an odd address. */
static double read_one(ar_dtype dtype, uint64_t bits)
{
    unsigned char at[9] = {0};
    double wide = 0;
    float narrow = 0;
    memcpy(at + 1, &bits, 8);
    cr_assert_ok(ari_values_to_f64(dtype, at + 1, 1, &wide));
    cr_assert_ok(ari_values_to_f32(dtype, at + 1, 1, &narrow));
    const ar_st_entry e = {.name = "x", .dtype = dtype, .count = 1, .bytes = ar_dtype_bytes(dtype), .data = at + 1};
    const bool is_tensor = dtype == AR_F32 || dtype == AR_F64 || dtype == AR_F16 || dtype == AR_BF16;
    const float expected = (float)wide;
    float entry = narrow;
    cr_expect_eq(ari_st_to_f32(&e, &entry), is_tensor ? AR_OK : AR_ERR_DTYPE, "%s", ar_dtype_name(dtype));
    cr_expect_eq(memcmp(&entry, &narrow, sizeof narrow), 0, "%s %lx", ar_dtype_name(dtype), (unsigned long)bits);
    if (!isnan(wide) && dtype != AR_I64 && dtype != AR_U64)
        cr_expect_eq(memcmp(&narrow, &expected, sizeof narrow), 0, "%s %lx", ar_dtype_name(dtype), (unsigned long)bits);
    cr_expect_eq(isnan(narrow) != 0, isnan(wide) != 0);
    return wide;
}

CLAIM(every_dtype_reads_as_a_number)
{
    static const struct {
        ar_dtype dtype;
        uint64_t bits;
        double value;
    } cases[] = {
        {AR_BOOL, 1, 1},
        {AR_U8, 0xff, 255},
        {AR_I8, 0x80, -128},
        {AR_I16, 0x8000, -32768},
        {AR_U16, 0xffff, 65535},
        {AR_I32, 0x80000000, -2147483648.0},
        {AR_U32, 0xffffffff, 4294967295.0},
        {AR_I64, 0x8000000000000000, -0x1p63},
        {AR_I64, 0x20000000000001, 0x1p53},
        {AR_U64, 0xffffffffffffffff, 0x1p64},
        {AR_F16, 0x0001, 0x1p-24},
        {AR_F16, 0xfbff, -65504},
        {AR_F16, 0x7c00, (double)INFINITY},
        {AR_F16, 0xfc00, -(double)INFINITY},
        {AR_F16, 0x7bff, 65504},
        {AR_F16, 0x0400, 0x1p-14},
        {AR_F16, 0x03ff, 0x1.ff8p-15},
        {AR_F16, 0x8001, -0x1p-24},
        {AR_F64, 0x3ff0000010000000, 0x1.000001p0}, /* ties, to even, and what is beside them */
        {AR_F64, 0x3ff0000030000000, 0x1.000003p0},
        {AR_F64, 0x3ff0000010000001, 0x1.0000010000001p0},
        {AR_F64, 0xfe37e43c8800759c, -1e300},
        {AR_F64, 0x3690000000000000, 0x1p-150},
        {AR_F64, 0x3698000000000000, 0x1.8p-150},
        {AR_BF16, 0x3f81, 1.0078125},
        {AR_BF16, 0x0001, 0x1p-133},
        {AR_F32, 0x3fc00000, 1.5},
        {AR_F32, 0x00000001, 0x1p-149},
        {AR_F64, 0x3ff8000000000000, 1.5},
        {AR_F64, 0x0000000000000001, 0x1p-1074},
        {AR_F8_E5M2, 0x01, 0x1p-16},
        {AR_F8_E5M2, 0x7b, 57344},
        {AR_F8_E5M2, 0xfc, -(double)INFINITY},
        {AR_F8_E5M2, 0x3e, 1.5},
        {AR_F8_E4M3, 0x01, 0x1p-9},
        {AR_F8_E4M3, 0x07, 0x7p-9},
        {AR_F8_E4M3, 0x08, 0x1p-6},
        {AR_F8_E4M3, 0x38, 1},
        {AR_F8_E4M3, 0x7e, 448},
        {AR_F8_E4M3, 0xfe, -448},
        {AR_F8_E8M0, 0x00, 0x1p-127},
        {AR_F8_E8M0, 0x01, 0x1p-126},
        {AR_F8_E8M0, 0x7f, 1},
        {AR_F8_E8M0, 0xfe, 0x1p127},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        cr_expect(read_one(cases[i].dtype, cases[i].bits) == cases[i].value, "case %zu (%s): %a", i,
                  ar_dtype_name(cases[i].dtype), read_one(cases[i].dtype, cases[i].bits));
    cr_expect(signbit(read_one(AR_F8_E4M3, 0x80)) && signbit(read_one(AR_F8_E5M2, 0x80)));
    cr_expect(signbit(read_one(AR_F16, 0x8000)) && signbit(read_one(AR_F64, (uint64_t)1 << 63)));
}

CLAIM(not_a_number_stays_one)
{
    static const struct {
        ar_dtype dtype;
        uint64_t bits;
    } cases[] = {
        {AR_F8_E4M3, 0x7f}, {AR_F8_E4M3, 0xff}, {AR_F8_E8M0, 0xff}, {AR_F8_E5M2, 0x7d},   {AR_F8_E5M2, 0xff},
        {AR_F16, 0x7c01},   {AR_F16, 0xfe00},   {AR_BF16, 0x7f81},  {AR_F32, 0x7f800001}, {AR_F64, 0x7ff0000000000001}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        cr_expect(isnan(read_one(cases[i].dtype, cases[i].bits)), "case %zu", i);
    static const uint16_t half = 0x7e01; /* what says which NaN it is stays */
    uint32_t wide = 0;
    float out = 0;
    cr_assert_ok(ari_values_to_f32(AR_F16, &half, 1, &out));
    memcpy(&wide, &out, sizeof wide);
    cr_expect_eq(wide, 0x7fc02000u, "%x", wide);
}

/* Every value of the 8-bit floats is between its neighbours: 2^mantissa bits to a power of two, and none left out. */
CLAIM(eight_bit_floats_ascend)
{
    for (unsigned bits = 1; bits < 0x7f; bits++)
        cr_expect(read_one(AR_F8_E4M3, bits) > read_one(AR_F8_E4M3, bits - 1) &&
                      read_one(AR_F8_E4M3, bits | 0x80) == -read_one(AR_F8_E4M3, bits),
                  "%02x", bits);
    for (unsigned bits = 1; bits <= 0x7c; bits++)
        cr_expect(read_one(AR_F8_E5M2, bits) > read_one(AR_F8_E5M2, bits - 1), "%02x", bits);
    for (unsigned bits = 1; bits < 0xff; bits++)
        cr_expect(read_one(AR_F8_E8M0, bits) == 2 * read_one(AR_F8_E8M0, bits - 1), "%02x", bits);
}

CLAIM(integers_and_doubles_round_once_to_fp32)
{
    static const uint64_t above = 0x4000004000000001; /* nearest double is a tie between two floats */
    float out = 0;
    cr_assert_ok(ari_values_to_f32(AR_I64, &above, 1, &out));
    cr_expect_eq(out, 0x1.000002p62f);
    cr_assert_ok(ari_values_to_f32(AR_U64, &above, 1, &out));
    cr_expect_eq(out, 0x1.000002p62f);
    static const double tie = 0x1.000001p0, over = 0x1p128;
    cr_assert_ok(ari_values_to_f32(AR_F64, &tie, 1, &out));
    cr_expect_eq(out, 1.0f);
    cr_assert_ok(ari_values_to_f32(AR_F64, &over, 1, &out));
    cr_expect(isinf(out));
}

/* The second of each pair rounds wrongly where it goes through a nearest fp32 first. */
CLAIM(doubles_round_once_to_half_precision)
{
    static const struct {
        ar_dtype dtype;
        double value;
        uint16_t bits;
    } cases[] = {
        {AR_F16, 0x1.002p0, 0x3c00},
        {AR_F16, 0x1.0020000001p0, 0x3c01},
        {AR_F16, 0x1.005ffffffffp0, 0x3c01},
        {AR_F16, 65519.999999, 0x7bff},
        {AR_F16, 65520, 0x7c00},
        {AR_F16, 1e300, 0x7c00},
        {AR_F16, 0x1p-25, 0x0000},
        {AR_F16, 0x1.0000000001p-25, 0x0001},
        {AR_F16, -1e-300, 0x8000},
        {AR_BF16, 0x1.01p0, 0x3f80},
        {AR_BF16, 0x1.0100000001p0, 0x3f81},
        {AR_BF16, -0x1.02ffffffffp0, 0xbf81},
        {AR_BF16, 0x1.fep127, 0x7f7f},
        {AR_BF16, 0x1.ffp127, 0x7f80},
        {AR_BF16, 0x1p-134, 0x0000},
        {AR_BF16, 0x1.0000000001p-134, 0x0001},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        unsigned char out[3] = {0};
        uint16_t bits = 0;
        cr_assert_ok(ari_values_of_f64(cases[i].dtype, &cases[i].value, 1, out + 1));
        memcpy(&bits, out + 1, 2);
        cr_expect_eq(bits, cases[i].bits, "case %zu (%a): %04x", i, cases[i].value, bits);
    }
    const double special[2] = {(double)INFINITY, (double)NAN};
    uint16_t half[2];
    cr_assert_ok(ari_values_of_f64(AR_BF16, special, 2, half));
    cr_expect(half[0] == 0x7f80 && (half[1] & 0x7fffu) > 0x7f80u);
    cr_assert_ok(ari_values_of_f64(AR_F16, special, 2, half));
    cr_expect(half[0] == 0x7c00 && (half[1] & 0x7fffu) > 0x7c00u);
}

CLAIM(what_is_no_number_is_named)
{
    static const ar_dtype none[] = {AR_C64, AR_F4, AR_F6_E2M3, AR_F6_E3M2};
    for (size_t i = 0; i < 4; i++) {
        double wide = 0;
        float narrow = 0;
        cr_expect_eq(ari_values_to_f32(none[i], "abcd", 1, &narrow), AR_ERR_DTYPE);
        cr_expect_eq(ari_values_to_f64(none[i], "abcd", 1, &wide), AR_ERR_DTYPE);
        cr_expect_eq(ari_values_of_f64(none[i], &wide, 1, &narrow), AR_ERR_DTYPE);
    }
}

EVERY_CLAIM(values)
