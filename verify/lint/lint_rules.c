/* SPDX-License-Identifier: Apache-2.0 */
/* Type rules along one axis. A replicated value combines with any value, and shards combine with equal shards. Partial
 * sums may pass only through linear functions, because only there f(a) + f(b) = f(a + b). */
#include "verify/lint/lint.h"

static const ar_placement invariant = {AR_INVARIANT, 0}, term = {AR_PARTIAL_SUM, 0};
enum { TOKENS = 1, FEATURES = 2 }; /* dimensions of an activation */

bool ari_lint_replicated(ar_placement p)
{
    return p.kind == AR_REPLICATE || p.kind == AR_INVARIANT;
}

bool ari_lint_partial(ar_placement p)
{
    return p.kind == AR_PARTIAL_SUM || p.kind == AR_PARTIAL_MAX;
}

bool ari_lint_same(ar_placement a, ar_placement b)
{
    return (ari_lint_replicated(a) && ari_lint_replicated(b)) ||
           (a.kind == b.kind && (a.kind != AR_SHARD || a.dim == b.dim));
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

static ari_lint_verdict accept_output(ar_placement p)
{
    return (ari_lint_verdict){.output = p};
}

static ari_lint_verdict broken(ar_lint_rule rule, ar_placement actual, ar_placement required)
{
    return (ari_lint_verdict){.broken = true, .rule = rule, .output = required, .actual = actual, .required = required};
}

ari_lint_verdict ari_lint_mismatch(ar_placement actual, ar_placement required)
{
    if (ari_lint_partial(actual))
        return broken(AR_LINT_missing_reduction, actual, required);
    if (ari_lint_partial(required))
        return broken(AR_LINT_whole_added_to_partial, actual, required);
    if (ari_lint_replicated(required))
        return broken(AR_LINT_missing_gather, actual, required);
    return broken(ari_lint_replicated(actual) ? AR_LINT_missing_slice : AR_LINT_wrong_placement, actual, required);
}

/* Returns the verdict for the product of X [.., k] with a matrix that is divided along its outputs, along k, or not at
 * all. */
static ari_lint_verdict contract(ar_placement x, ar_placement w, int outputs)
{
    if (ari_lint_partial(w))
        return broken(ari_lint_partial(x) ? AR_LINT_product_of_partials : AR_LINT_missing_reduction, w, invariant);
    if (ari_lint_replicated(w)) /* and the operation is linear in x */
        return cut_at(x, FEATURES) ? ari_lint_mismatch(x, invariant)
                                   : accept_output(ari_lint_replicated(x) ? invariant : x);
    if (ari_lint_by_expert(w)) /* each rank has the rows of its experts */
        return ari_lint_by_expert(x) ? accept_output(x) : ari_lint_mismatch(x, w);
    if (cut_at(w, outputs))
        return ari_lint_replicated(x) ? accept_output(part(FEATURES))
                                      : ari_lint_mismatch(x, (ar_placement){AR_REPLICATE, 0});
    return cut_at(x, FEATURES) ? accept_output(term) : ari_lint_mismatch(x, part(FEATURES));
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
        const bool both_partial = ari_lint_partial(x) && ari_lint_partial(dy),
                   linear = ari_lint_replicated(x) || ari_lint_replicated(dy);
        if (!both_partial && linear)
            return accept_output(term);
        return broken(both_partial ? AR_LINT_product_of_partials : AR_LINT_missing_reduction,
                      ari_lint_partial(dy) ? dy : x, invariant);
    }
    if (ari_lint_replicated(x) && ari_lint_replicated(dy))
        return accept_output(invariant);
    if (ari_lint_by_expert(x) && ari_lint_by_expert(dy))
        return accept_output(x);
    if (cut_at(x, FEATURES) && ari_lint_replicated(dy))
        return accept_output(part(1));
    if (cut_at(dy, FEATURES) && ari_lint_replicated(x))
        return accept_output(part(0));
    if (x.kind == dy.kind && x.dim == dy.dim && x.dim != FEATURES)
        return accept_output(term); /* each rank has its samples or tokens of both */
    return ari_lint_mismatch(ari_lint_replicated(x) ? dy : x, invariant);
}

ari_lint_verdict ari_lint_sum_over_tokens(ar_placement dy, int features)
{
    if (cut_at(dy, FEATURES))
        return accept_output(part(features));
    return accept_output(ari_lint_by_expert(dy) ? dy : ari_lint_replicated(dy) ? invariant : term);
}

ari_lint_verdict ari_lint_add(ar_placement a, ar_placement b)
{
    if (ari_lint_same(a, b))
        return accept_output(a);
    if (ari_lint_partial(a) || ari_lint_partial(b)) {
        const ar_placement partial = ari_lint_partial(a) ? a : b, addend = ari_lint_partial(a) ? b : a;
        return broken(ari_lint_replicated(addend) ? AR_LINT_whole_added_to_partial : AR_LINT_missing_reduction, partial,
                      addend);
    }
    return ari_lint_mismatch(a, b);
}

ari_lint_verdict ari_lint_add_parameter(ar_placement x, ar_placement w, int features)
{
    if (ari_lint_partial(w))
        return ari_lint_partial(x) ? accept_output(x) : broken(AR_LINT_missing_reduction, w, invariant);
    if (ari_lint_partial(x)) { /* and the reduction of X is still pending */
        ari_lint_verdict v = broken(AR_LINT_whole_added_to_partial, x, invariant);
        v.output = x;
        return v;
    }
    if (ari_lint_by_expert(w))
        return ari_lint_by_expert(x) ? accept_output(x) : ari_lint_mismatch(x, w);
    if (cut_at(w, features))
        return cut_at(x, FEATURES) ? accept_output(x) : ari_lint_mismatch(w, invariant);
    if (w.kind == AR_SHARD)
        return broken(AR_LINT_wrong_placement, w, invariant);
    return cut_at(x, FEATURES) ? ari_lint_mismatch(w, part(features)) : accept_output(x);
}

ari_lint_verdict ari_lint_elementwise(ar_placement x, bool linear)
{
    return ari_lint_partial(x) && !linear ? broken(AR_LINT_nonlinear_of_partial, x, invariant) : accept_output(x);
}

ari_lint_verdict ari_lint_along(ar_placement x, int dim, bool linear)
{
    return cut_at(x, dim) ? ari_lint_mismatch(x, invariant) : ari_lint_elementwise(x, linear);
}

ari_lint_verdict ari_lint_attend(ar_placement q, ar_placement k)
{
    if (ari_lint_partial(q) || ari_lint_partial(k))
        return broken(AR_LINT_nonlinear_of_partial, ari_lint_partial(k) ? k : q, invariant);
    if (cut_at(k, TOKENS))
        return ari_lint_mismatch(k, invariant);
    if (cut_at(q, TOKENS)) /* each rank has its queries */
        return ari_lint_replicated(k) ? accept_output(q) : ari_lint_mismatch(k, invariant);
    return ari_lint_add(q, k);
}

ari_lint_verdict ari_lint_by_routes(ar_placement x, ar_placement routes)
{
    if (ari_lint_partial(routes))
        return broken(AR_LINT_nonlinear_of_partial, routes, invariant);
    if (cut_at(routes, FEATURES)) /* selects the experts of a token */
        return ari_lint_mismatch(routes, invariant);
    if (!ari_lint_replicated(routes)) /* each rank has its tokens */
        return ari_lint_same(x, routes) ? accept_output(x) : ari_lint_mismatch(x, routes);
    return ari_lint_replicated(x) || ari_lint_partial(x) || cut_at(x, FEATURES) ? accept_output(x)
                                                                                : ari_lint_mismatch(x, invariant);
}

ari_lint_verdict ari_lint_lookup(ar_placement ids, ar_placement table)
{
    if (ari_lint_replicated(table))
        return accept_output(ari_lint_replicated(ids) ? invariant : ids);
    if (!ari_lint_replicated(ids)) /* ids of a rank select rows on other ranks */
        return ari_lint_mismatch(ids, invariant);
    return accept_output(cut_at(table, 0) ? term : part(FEATURES));
}

ari_lint_verdict ari_lint_lookup_gradient(ar_placement dy, ar_placement table)
{
    if (cut_at(table, 0)) /* tokens of any rank may select rows of this rank */
        return ari_lint_replicated(dy) ? accept_output(table) : ari_lint_mismatch(dy, (ar_placement){AR_REPLICATE, 0});
    if (cut_at(table, 1))
        return cut_at(dy, FEATURES) ? accept_output(table) : ari_lint_mismatch(dy, part(FEATURES));
    return ari_lint_sum_over_tokens(dy, 1);
}
