/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/tensor.h"

#include <string.h>

static const struct {
    const char *name;
    size_t bits;
} table[AR_DTYPE_COUNT] = {
#define DTYPE_ROW(type, width) [AR_##type] = {#type, width},
    AR_DTYPE_TABLE(DTYPE_ROW)
#undef DTYPE_ROW
};

const char *ar_dtype_name(ar_dtype t)
{
    return (unsigned)t < AR_DTYPE_COUNT ? table[t].name : "?";
}

size_t ar_dtype_bits(ar_dtype t)
{
    return (unsigned)t < AR_DTYPE_COUNT ? table[t].bits : 0;
}

size_t ar_dtype_bytes(ar_dtype t)
{
    const size_t bits = ar_dtype_bits(t);
    return bits % 8 == 0 ? bits / 8 : 0;
}

ar_status ar_dtype_parse(ar_dtype *t, const char *name)
{
    for (int i = 0; i < AR_DTYPE_COUNT; i++) {
        if (strcmp(name, table[i].name) == 0) {
            *t = (ar_dtype)i;
            return AR_OK;
        }
    }
    return ar_error_set(AR_ERR_DTYPE, "'%s' is not a data type (F32, BF16, I64 and the like are)", name);
}
