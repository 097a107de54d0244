/* SPDX-License-Identifier: Apache-2.0 */
/* A context with the arithmetic that its options name. */
#include "ref/context/context.h"
#include "anyrank/arith.h"

ar_status ar_ctx_create(ar_ctx **gives, const ar_ctx_options *o)
{
    return ari_ctx_create(gives, o,
                          o->numerics == AR_NUMERICS_NATIVE ? ar_arith_native(o->precision) : ar_arith_exact());
}
