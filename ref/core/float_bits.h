/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CORE_FLOAT_BITS_H
#define ARI_CORE_FLOAT_BITS_H

#include <stdint.h>
#include <string.h>

#include "ref/core/host_device.h"

/* A floating-point value as its bits, and back. */

ARI_FN uint32_t ari_bits32(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

ARI_FN float ari_float32(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

ARI_FN uint64_t ari_bits64(double x)
{
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

ARI_FN double ari_float64(uint64_t u)
{
    double x;
    memcpy(&x, &u, sizeof x);
    return x;
}

#endif
