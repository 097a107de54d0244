/* SPDX-License-Identifier: Apache-2.0 */
/* The rules of types on the operations of a user's module. */
#include "verify/check/check_run.h"

enum { ACTIVATION_DIMS = 3 }; /* [b, s, features] */

/* Dimensions of records count from the end. */
static ar_placement from_start(ar_placement p)
{
    return p.kind == AR_SHARD && p.dim < 0 ? (ar_placement){AR_SHARD, p.dim + ACTIVATION_DIMS} : p;
}

static ar_placement from_end(ar_placement p)
{
    return p.kind == AR_SHARD ? (ar_placement){AR_SHARD, p.dim - ACTIVATION_DIMS} : p;
}

static bool broken(ari_lint_verdict *v, ar_lint_rule rule, ar_placement has, ar_placement needs)
{
    *v = (ari_lint_verdict){.broken = true, .rule = rule, .makes = needs, .has = has, .needs = needs};
    return true;
}

/* Taken as `needs`, and is not. */
static bool misplaced(ari_lint_verdict *v, ar_placement has, ar_placement needs)
{
    const bool sums = ari_lint_partial(needs);
    if (ari_lint_same(has, needs))
        return false;
    if (sums && !ari_lint_partial(has))
        return broken(v, ari_lint_whole(has) ? AR_LINT_redundant_reduction : AR_LINT_wrong_reduction, has, needs);
    *v = ari_lint_mismatch(has, needs);
    return true;
}

static bool incomplete(ari_lint_verdict *v, ar_placement has, ar_placement needs)
{
    if (ari_lint_same(has, needs))
        return false;
    if (ari_lint_whole(has))
        return broken(v, AR_LINT_redundant_reduction, has, needs);
    return broken(v, AR_LINT_unsummed_gradient, has, needs);
}

bool ari_lint_noted(ari_lint_verdict *v, const ari_ledger_record *r)
{
    const ar_placement a = from_start(r->in[0].at), b = from_start(r->in[1].at), needs = from_start(r->needs);
    const bool both = r->in[0].known && r->in[1].known;
    bool found = false;
    if (r->kind == ARI_LEDGER_ADDS || r->kind == ARI_LEDGER_MULTIPLIES) {
        if (!both)
            return false;
        *v = ari_lint_add(a, b);
        found = v->broken;
        if (r->kind == ARI_LEDGER_MULTIPLIES)
            found = ari_lint_partial(a) && ari_lint_partial(b) && broken(v, AR_LINT_product_of_partials, a, b);
    } else if (!r->in[0].known) {
        return false;
    } else if (r->kind == ARI_LEDGER_TAKES) {
        found = misplaced(v, a, needs);
    } else if (r->kind == ARI_LEDGER_GRADIENT) {
        found = incomplete(v, a, needs);
    } else {
        *v = r->kind == ARI_LEDGER_ALONG ? ari_lint_along(a, ACTIVATION_DIMS - 1, false)
                                         : ari_lint_elementwise(a, false);
        found = v->broken;
    }
    if (found) {
        v->has = from_end(v->has);
        v->needs = from_end(v->needs);
    }
    return found;
}
