/* SPDX-License-Identifier: Apache-2.0 */
/* The rules of types along one axis. A value that every rank has goes with anything; parts go with the same parts;
 * terms of a sum go only through what is linear in them, for f(a) + f(b) is f(a + b) there and nowhere else. */
#include "verify/lint/lint.h"

static const ar_placement whole = {AR_INVARIANT, 0}, term = {AR_PARTIAL_SUM, 0};
enum { TOKENS = 1, FEATURES = 2 }; /* dimensions of an activation */

bool ari_lint_whole(ar_placement p)
{
    return p.kind == AR_REPLICATE || p.kind == AR_INVARIANT;
}

bool ari_lint_partial(ar_placement p)
{
    return p.kind == AR_PARTIAL_SUM || p.kind == AR_PARTIAL_MAX;
}

bool ari_lint_same(ar_placement a, ar_placement b)
{
    return (ari_lint_whole(a) && ari_lint_whole(b)) || (a.kind == b.kind && (a.kind != AR_SHARD || a.dim == b.dim));
}

static bool cut_at(ar_placement p, int dim)
{
    return p.kind == AR_SHARD && p.dim == dim;
}

bool ari_lint_by_expert(ar_placement p)
{
    return cut_at(p, ARI_LINT_BY_EXPERT);
}

static ar_placement part(int dim)
{
    return (ar_placement){AR_SHARD, dim};
}

static ari_lint_verdict makes(ar_placement p)
{
    return (ari_lint_verdict){.makes = p};
}

static ari_lint_verdict broken(ar_lint_rule rule, ar_placement has, ar_placement needs)
{
    return (ari_lint_verdict){.broken = true, .rule = rule, .makes = needs, .has = has, .needs = needs};
}

ari_lint_verdict ari_lint_mismatch(ar_placement has, ar_placement needs)
{
    if (ari_lint_partial(has))
        return broken(AR_LINT_missing_reduction, has, needs);
    if (ari_lint_partial(needs))
        return broken(AR_LINT_whole_added_to_partial, has, needs);
    if (ari_lint_whole(needs))
        return broken(AR_LINT_missing_gather, has, needs);
    return broken(ari_lint_whole(has) ? AR_LINT_missing_slice : AR_LINT_wrong_placement, has, needs);
}

/* The product of X [.., k] with a matrix that is cut along its outputs, along k, or not at all. */
static ari_lint_verdict contract(ar_placement x, ar_placement w, int outputs)
{
    if (ari_lint_partial(w))
        return broken(ari_lint_partial(x) ? AR_LINT_product_of_partials : AR_LINT_missing_reduction, w, whole);
    if (ari_lint_whole(w)) /* and linear in x */
        return cut_at(x, FEATURES) ? ari_lint_mismatch(x, whole) : makes(ari_lint_whole(x) ? whole : x);
    if (ari_lint_by_expert(w)) /* each rank has the rows of its own */
        return ari_lint_by_expert(x) ? makes(x) : ari_lint_mismatch(x, w);
    if (cut_at(w, outputs))
        return ari_lint_whole(x) ? makes(part(FEATURES)) : ari_lint_mismatch(x, (ar_placement){AR_REPLICATE, 0});
    return cut_at(x, FEATURES) ? makes(term) : ari_lint_mismatch(x, part(FEATURES));
}

ari_lint_verdict ari_lint_product(ar_placement x, ar_placement w)
{
    return contract(x, w, 0);
}

ari_lint_verdict ari_lint_product_dx(ar_placement dy, ar_placement w)
{
    return contract(dy, w, 1);
}

ari_lint_verdict ari_lint_product_dw(ar_placement x, ar_placement dy)
{
    if (ari_lint_partial(x) || ari_lint_partial(dy)) {
        const bool both = ari_lint_partial(x) && ari_lint_partial(dy), linear = ari_lint_whole(x) || ari_lint_whole(dy);
        if (!both && linear)
            return makes(term);
        return broken(both ? AR_LINT_product_of_partials : AR_LINT_missing_reduction, ari_lint_partial(dy) ? dy : x,
                      whole);
    }
    if (ari_lint_whole(x) && ari_lint_whole(dy))
        return makes(whole);
    if (ari_lint_by_expert(x) && ari_lint_by_expert(dy))
        return makes(x);
    if (cut_at(x, FEATURES) && ari_lint_whole(dy))
        return makes(part(1));
    if (cut_at(dy, FEATURES) && ari_lint_whole(x))
        return makes(part(0));
    if (x.kind == dy.kind && x.dim == dy.dim && x.dim != FEATURES)
        return makes(term); /* each rank has its own samples or tokens of both */
    return ari_lint_mismatch(ari_lint_whole(x) ? dy : x, whole);
}

ari_lint_verdict ari_lint_sum_over_tokens(ar_placement dy, int features)
{
    if (cut_at(dy, FEATURES))
        return makes(part(features));
    return makes(ari_lint_by_expert(dy) ? dy : ari_lint_whole(dy) ? whole : term);
}

ari_lint_verdict ari_lint_add(ar_placement a, ar_placement b)
{
    if (ari_lint_same(a, b))
        return makes(a);
    if (ari_lint_partial(a) || ari_lint_partial(b)) {
        const ar_placement has = ari_lint_partial(a) ? a : b, other = ari_lint_partial(a) ? b : a;
        return broken(ari_lint_whole(other) ? AR_LINT_whole_added_to_partial : AR_LINT_missing_reduction, has, other);
    }
    return ari_lint_mismatch(a, b);
}

ari_lint_verdict ari_lint_add_parameter(ar_placement x, ar_placement w, int features)
{
    if (ari_lint_partial(w))
        return ari_lint_partial(x) ? makes(x) : broken(AR_LINT_missing_reduction, w, whole);
    if (ari_lint_partial(x)) { /* and its sum is still to come */
        ari_lint_verdict v = broken(AR_LINT_whole_added_to_partial, x, whole);
        v.makes = x;
        return v;
    }
    if (ari_lint_by_expert(w))
        return ari_lint_by_expert(x) ? makes(x) : ari_lint_mismatch(x, w);
    if (cut_at(w, features))
        return cut_at(x, FEATURES) ? makes(x) : ari_lint_mismatch(w, whole);
    if (w.kind == AR_SHARD)
        return broken(AR_LINT_wrong_placement, w, whole);
    return cut_at(x, FEATURES) ? ari_lint_mismatch(w, part(features)) : makes(x);
}

ari_lint_verdict ari_lint_elementwise(ar_placement x, bool linear)
{
    return ari_lint_partial(x) && !linear ? broken(AR_LINT_nonlinear_of_partial, x, whole) : makes(x);
}

ari_lint_verdict ari_lint_along(ar_placement x, int dim, bool linear)
{
    return cut_at(x, dim) ? ari_lint_mismatch(x, whole) : ari_lint_elementwise(x, linear);
}

ari_lint_verdict ari_lint_attend(ar_placement q, ar_placement k)
{
    if (ari_lint_partial(q) || ari_lint_partial(k))
        return broken(AR_LINT_nonlinear_of_partial, ari_lint_partial(k) ? k : q, whole);
    if (cut_at(k, TOKENS))
        return ari_lint_mismatch(k, whole);
    if (cut_at(q, TOKENS)) /* each rank has its own queries */
        return ari_lint_whole(k) ? makes(q) : ari_lint_mismatch(k, whole);
    return ari_lint_add(q, k);
}

ari_lint_verdict ari_lint_by_routes(ar_placement x, ar_placement routes)
{
    if (ari_lint_partial(routes))
        return broken(AR_LINT_nonlinear_of_partial, routes, whole);
    if (cut_at(routes, FEATURES)) /* which experts a token has */
        return ari_lint_mismatch(routes, whole);
    if (!ari_lint_whole(routes)) /* each rank has its own tokens */
        return ari_lint_same(x, routes) ? makes(x) : ari_lint_mismatch(x, routes);
    return ari_lint_whole(x) || ari_lint_partial(x) || cut_at(x, FEATURES) ? makes(x) : ari_lint_mismatch(x, whole);
}

ari_lint_verdict ari_lint_lookup(ar_placement ids, ar_placement table)
{
    if (ari_lint_whole(table))
        return makes(ari_lint_whole(ids) ? whole : ids);
    if (!ari_lint_whole(ids)) /* a rank's ids are in other ranks' rows */
        return ari_lint_mismatch(ids, whole);
    return makes(cut_at(table, 0) ? term : part(FEATURES));
}

ari_lint_verdict ari_lint_lookup_gradient(ar_placement dy, ar_placement table)
{
    if (cut_at(table, 0)) /* a token of any rank may be in the own rows */
        return ari_lint_whole(dy) ? makes(table) : ari_lint_mismatch(dy, (ar_placement){AR_REPLICATE, 0});
    if (cut_at(table, 1))
        return cut_at(dy, FEATURES) ? makes(table) : ari_lint_mismatch(dy, part(FEATURES));
    return ari_lint_sum_over_tokens(dy, 1);
}
