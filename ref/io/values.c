/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <string.h>

#include "ref/core/float_bits.h"
#include "ref/io/safetensors.h"
#include "ref/io/safetensors_private.h"

/* The magnitude's 7 bits, shifted to the position of fp32's bits, are the value times 2^(7-127), including subnormals,
 * so the product is exact. The format has no infinities, and one NaN of each sign. */
static inline float f32_of_e4m3(uint8_t b)
{
    const uint32_t sign = (uint32_t)(b & 0x80u) << 24, magnitude = b & 0x7fu;
    const uint32_t number = ari_bits32(ari_float32(magnitude << 20) * 0x1p120f);
    return ari_float32(sign | (magnitude == 0x7fu ? 0x7fc00000u : number));
}

/* The upper half of an F16. */
static inline float f32_of_e5m2(uint8_t b)
{
    return ari_f32_of_f16((uint16_t)(b << 8));
}

/* Converts 2^(b-127), an exponent of fp32, whose smallest value is subnormal; 255 is the only NaN. */
static inline float f32_of_e8m0(uint8_t b)
{
    const uint32_t exponent = (uint32_t)b << 23;
    return ari_float32(b == 0 ? 0x00400000u : b == 0xff ? 0x7fc00000u : exponent);
}

/* Rounds to odd: bits that fp32 cannot represent are cut off and set the last bit to 1. The following rounding to at
 * most 22 bits then sees on which side of a tie the value lies, and is the only rounding. */
static inline float f32_to_odd(double x)
{
    const float nearest = (float)x;
    const double back = (double)nearest;
    const uint32_t bits = ari_bits32(nearest);
    const uint32_t cut = (back < 0 ? -back : back) > (x < 0 ? -x : x) ? bits - 1 : bits;
    return ari_float32(back == x || x != x ? bits : cut | 1u);
}

#define EACH(type, value)                          \
    for (size_t i = 0; i < count; i++) {           \
        type x;                                    \
        memcpy(&x, from + sizeof x * i, sizeof x); \
        out[i] = (value);                          \
    }                                              \
    return AR_OK

/* One conversion for each dtype, as a loop simple enough for the compiler to vectorise. */
#define DEFINE_TO(name, result)                                                                  \
    ar_status name(ar_dtype dtype, const void *data, size_t count, result *out)                  \
    {                                                                                            \
        const char *from = (const char *)data;                                                   \
        switch (dtype) {                                                                         \
        case AR_BOOL:                                                                            \
        case AR_U8:                                                                              \
            EACH(uint8_t, (result)x);                                                            \
        case AR_I8:                                                                              \
            EACH(int8_t, (result)x);                                                             \
        case AR_F8_E5M2:                                                                         \
            EACH(uint8_t, (result)f32_of_e5m2(x));                                               \
        case AR_F8_E4M3:                                                                         \
            EACH(uint8_t, (result)f32_of_e4m3(x));                                               \
        case AR_F8_E8M0:                                                                         \
            EACH(uint8_t, (result)f32_of_e8m0(x));                                               \
        case AR_I16:                                                                             \
            EACH(int16_t, (result)x);                                                            \
        case AR_U16:                                                                             \
            EACH(uint16_t, (result)x);                                                           \
        case AR_F16:                                                                             \
            EACH(uint16_t, (result)ari_f32_of_f16(x));                                           \
        case AR_BF16:                                                                            \
            EACH(uint16_t, (result)ari_f32_of_bf16(x));                                          \
        case AR_I32:                                                                             \
            EACH(int32_t, (result)x);                                                            \
        case AR_U32:                                                                             \
            EACH(uint32_t, (result)x);                                                           \
        case AR_F32:                                                                             \
            EACH(float, (result)x);                                                              \
        case AR_F64:                                                                             \
            EACH(double, (result)x);                                                             \
        case AR_I64:                                                                             \
            EACH(int64_t, (result)x);                                                            \
        case AR_U64:                                                                             \
            EACH(uint64_t, (result)x);                                                           \
        default:                                                                                 \
            return ar_error_set(AR_ERR_DTYPE, "values of dtype %s are not converted to numbers", \
                                ar_dtype_name(dtype));                                           \
        }                                                                                        \
    }
DEFINE_TO(ari_values_to_f64, double)
DEFINE_TO(ari_values_to_f32, float)

#define EACH_OF(type, value)                     \
    for (size_t i = 0; i < count; i++) {         \
        const type x = (value);                  \
        memcpy(to + sizeof x * i, &x, sizeof x); \
    }                                            \
    return AR_OK

ar_status ari_values_of_f64(ar_dtype dtype, const double *values, size_t count, void *out)
{
    char *to = (char *)out;
    switch (dtype) {
    case AR_F64:
        EACH_OF(double, values[i]);
    case AR_F32:
        EACH_OF(float, (float)values[i]);
    case AR_F16:
        EACH_OF(uint16_t, ari_f16_of_f32(f32_to_odd(values[i])));
    case AR_BF16:
        EACH_OF(uint16_t, ari_bf16_of_f32(f32_to_odd(values[i])));
    default:
        return ar_error_set(AR_ERR_DTYPE, "numbers are converted to F64, F32, F16 or BF16, not to %s",
                            ar_dtype_name(dtype));
    }
}

/* --- whole tensors ------------------------------------------------------------------------------------------------ */

ar_status ari_st_to_f32(const ar_st_entry *e, float *out)
{
    if (e->dtype != AR_F32 && e->dtype != AR_F64 && e->dtype != AR_F16 && e->dtype != AR_BF16)
        return ar_error_set(AR_ERR_DTYPE, "tensor '%s' is %s, expected F32, F64, F16 or BF16", ARI_SHOW(e->name),
                            ar_dtype_name(e->dtype));
    return ari_values_to_f32(e->dtype, e->data, e->count, out);
}

ar_status ari_st_to_i64(const ar_st_entry *e, int64_t *out)
{
    const char *from = (const char *)e->data;
    const size_t count = e->count;
    switch (e->dtype) {
    case AR_BOOL:
    case AR_U8:
        EACH(uint8_t, (int64_t)x);
    case AR_I8:
        EACH(int8_t, (int64_t)x);
    case AR_U16:
        EACH(uint16_t, (int64_t)x);
    case AR_I16:
        EACH(int16_t, (int64_t)x);
    case AR_U32:
        EACH(uint32_t, (int64_t)x);
    case AR_I32:
        EACH(int32_t, (int64_t)x);
    case AR_I64:
        EACH(int64_t, (int64_t)x);
    case AR_U64:
        for (size_t i = 0; i < count; i++) {
            uint64_t x;
            memcpy(&x, from + 8 * i, sizeof x);
            if (x > INT64_MAX)
                return ar_error_set(AR_ERR_DATA, "tensor '%s': element %zu is %" PRIu64 ", expected at most 2^63-1",
                                    ARI_SHOW(e->name), i, x);
            out[i] = (int64_t)x;
        }
        return AR_OK;
    default:
        return ar_error_set(AR_ERR_DTYPE, "tensor '%s' is %s, expected integers: I64 or I32", ARI_SHOW(e->name),
                            ar_dtype_name(e->dtype));
    }
}
