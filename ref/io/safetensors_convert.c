/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <string.h>

#include "ref/core/half.h"
#include "ref/io/file.h"
#include "ref/io/safetensors.h"

ar_status ar_st_to_f32(const ar_st_entry *e, float *out)
{
    const char *data = (const char *)e->data;
    switch (e->dtype) {
    case AR_F32:
        if (e->bytes > 0)
            memcpy(out, data, e->bytes);
        return AR_OK;
    case AR_F64:
        for (size_t i = 0; i < e->count; i++) {
            double x;
            memcpy(&x, data + 8 * i, sizeof x);
            out[i] = (float)x; /* one rounding to nearest even; out of range gives an infinity */
        }
        return AR_OK;
    case AR_F16:
    case AR_BF16:
        for (size_t i = 0; i < e->count; i++) {
            uint16_t h;
            memcpy(&h, data + 2 * i, sizeof h);
            out[i] = e->dtype == AR_F16 ? ari_f32_of_f16(h) : ari_f32_of_bf16(h);
        }
        return AR_OK;
    default:
        return ar_error_set(AR_ERR_DTYPE, "tensor '%s' is %s, expected F32, F64, F16 or BF16", ARI_SHOW(e->name),
                            ar_dtype_name(e->dtype));
    }
}

#define WIDEN(type)                                \
    for (size_t i = 0; i < e->count; i++) {        \
        type x;                                    \
        memcpy(&x, data + sizeof x * i, sizeof x); \
        out[i] = (int64_t)x;                       \
    }                                              \
    return AR_OK

ar_status ar_st_to_i64(const ar_st_entry *e, int64_t *out)
{
    const char *data = (const char *)e->data;
    switch (e->dtype) {
    case AR_BOOL:
    case AR_U8:
        WIDEN(uint8_t);
    case AR_I8:
        WIDEN(int8_t);
    case AR_U16:
        WIDEN(uint16_t);
    case AR_I16:
        WIDEN(int16_t);
    case AR_U32:
        WIDEN(uint32_t);
    case AR_I32:
        WIDEN(int32_t);
    case AR_I64:
        WIDEN(int64_t);
    case AR_U64:
        for (size_t i = 0; i < e->count; i++) {
            uint64_t x;
            memcpy(&x, data + 8 * i, sizeof x);
            if (x > INT64_MAX)
                return ar_error_set(AR_ERR_DATA, "tensor '%s': element %zu is %" PRIu64 ", expected at most 2^63-1",
                                    ARI_SHOW(e->name), i, x);
            out[i] = (int64_t)x;
        }
        return AR_OK;
    default:
        return ar_error_set(AR_ERR_DTYPE, "tensor '%s' is %s, expected an integer dtype", ARI_SHOW(e->name),
                            ar_dtype_name(e->dtype));
    }
}
