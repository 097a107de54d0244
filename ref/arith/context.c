/* SPDX-License-Identifier: Apache-2.0 */
/* Context with the arithmetic of its options, which checks placements if the options or the build ask for it. */
#include "ref/context/context.h"
#include "anyrank/arith.h"
#include "ref/arith/arith_private.h"
#include "ref/core/text.h"
#include "ref/record/ledger.h"

#ifdef NDEBUG
static const ar_declared_check by_build = AR_DECLARED_TRUSTED;
#else
static const ar_declared_check by_build = AR_DECLARED_CHECKED;
#endif

ar_status ar_ctx_create(ar_ctx **out, const ar_ctx_options *o)
{
    const bool native = o->numerics == AR_NUMERICS_NATIVE;
    const ar_declared_check declared = o->placements == AR_DECLARED_BY_BUILD ? by_build : o->placements;
    ARI_OWNED_BY(ar_ctx_destroy) ar_ctx *c = NULL;
    AR_TRY(ari_check_choice("placements", (int)o->placements, AR_DECLARED_TRUSTED + 1));
    AR_TRY(ari_ctx_create(&c, o, native ? ari_arith_native(o->precision) : ari_arith_exact(o->precision)));
    if (declared == AR_DECLARED_CHECKED)
        AR_TRY(ari_ledger_check(c));
    ARI_GIVE(out, c);
    return AR_OK;
}
