/* SPDX-License-Identifier: Apache-2.0 */
/* Orders the steps of a redistribution. All ranks of a mesh compute the order from the same data and therefore make the
 * same calls. */
#include "anyrank/placement.h"
#include "ref/placement/placement_private.h"

static bool is_partial(ar_placement p)
{
    return p.kind == AR_PARTIAL_SUM || p.kind == AR_PARTIAL_MAX;
}

static bool is_whole(ar_placement p)
{
    return p.kind == AR_REPLICATE || p.kind == AR_INVARIANT;
}

/* State of a redistribution. */
typedef struct walk {
    const ar_mesh *mesh;
    const ar_placement *target;
    int ndim;
    ar_placement current[AR_MESH_DIMS];
} walk;

/* Returns true if the ranks along dimension m do not yet hold their target values. A replicated value is its own
 * maximum. */
static bool pending(const walk *w, int m)
{
    const ar_placement current = w->current[m], target = w->target[m];
    return !ari_placement_same(current, target, w->ndim) &&
           !(is_whole(current) && (is_whole(target) || target.kind == AR_PARTIAL_MAX));
}

/* Determines the next step of dimension m. Returns false if the conversion takes two steps; then this is the first of
 * them, to R. */
static ar_redistribution_step step_of(const walk *w, int m)
{
    ar_redistribution_step s = {.dim = m, .src = w->current[m], .dst = w->target[m]};
    if (is_partial(s.src)) {
        s.dst = is_partial(s.dst) ? (ar_placement){0} : s.dst;
        s.move = s.dst.kind == AR_SHARD ? AR_MOVE_REDUCE_SCATTER : AR_MOVE_ALL_REDUCE;
    } else if (s.src.kind == AR_SHARD) {
        s.dst = s.dst.kind == AR_PARTIAL_MAX ? (ar_placement){0} : s.dst;
        s.move = s.dst.kind == AR_SHARD         ? AR_MOVE_ALL_TO_ALL
                 : s.dst.kind == AR_PARTIAL_SUM ? AR_MOVE_PAD
                                                : AR_MOVE_ALL_GATHER;
    } else {
        s.move = s.dst.kind == AR_SHARD ? AR_MOVE_SLICE : AR_MOVE_FIRST;
    }
    return s;
}

static bool both_cut(const walk *w, ar_placement a, ar_placement b)
{
    return a.kind == AR_SHARD && ari_placement_same(a, b, w->ndim);
}

/* Returns the innermost mesh dimension inside m that shards the tensor dimension which a step along m splits or
 * gathers; -1: none. */
static int inner_cut(const walk *w, const ar_redistribution_step *s)
{
    for (int i = w->mesh->ndim - 1; i > s->dim; i--) {
        if (both_cut(w, s->src, w->current[i]) || both_cut(w, s->dst, w->current[i]))
            return i;
    }
    return -1;
}

/* Returns true if an outer mesh dimension must first split or gather the tensor dimension that the step splits. */
static bool outer_first(const walk *w, const ar_redistribution_step *s)
{
    for (int o = 0; o < s->dim; o++) {
        if (pending(w, o) && (both_cut(w, s->dst, w->current[o]) || both_cut(w, s->dst, w->target[o])))
            return true;
    }
    return false;
}

/* Determines the next step; returns false if none is left. */
static bool next_step(ar_redistribution_step *step, const walk *w)
{
    bool found = false, any = false;
    int blocked_by = -1;
    for (int m = 0; m < w->mesh->ndim; m++) {
        if (!pending(w, m))
            continue;
        const ar_redistribution_step s = step_of(w, m);
        const int inner = inner_cut(w, &s);
        /* the outermost pending dimension does not wait for an outer one */
        blocked_by = any ? blocked_by : inner;
        any = true;
        if (inner < 0 && !outer_first(w, &s) && (!found || s.move < step->move)) {
            *step = s;
            found = true;
        }
    }
    if (any && !found)
        *step = (ar_redistribution_step){blocked_by, AR_MOVE_ALL_GATHER, w->current[blocked_by], {AR_REPLICATE, 0}};
    return any;
}

/* Sums and maxima do not commute, so the result for partial sums together with partial maxima is undefined. */
static ar_status check_list(const ar_mesh *mesh, const ar_placement *p, int ndim)
{
    bool has_kind[AR_PLACEMENT_KINDS] = {false};
    for (int m = 0; m < mesh->ndim; m++) {
        AR_TRY(ari_placement_check(p[m], ndim));
        has_kind[p[m].kind] = true;
    }
    char text[128];
    if (has_kind[AR_PARTIAL_SUM] && has_kind[AR_PARTIAL_MAX])
        return ar_error_set(AR_ERR_ARG, "%s: a maximum of sums or a sum of maxima? Use one of the two",
                            ari_placements_text(text, sizeof text, p, mesh->ndim));
    return AR_OK;
}

static ar_status check_redistribution(const ar_mesh *mesh, const ar_redistribution *r)
{
    if (r->ndim < 0 || r->ndim > AR_MAX_DIMS)
        return ar_error_set(AR_ERR_ARG, "a tensor has 0 to %d dimensions, not %d", AR_MAX_DIMS, r->ndim);
    if (mesh->ndim < 0 || mesh->ndim > AR_MESH_DIMS)
        return ar_error_set(AR_ERR_ARG, "a mesh has 0 to %d dimensions, not %d", AR_MESH_DIMS, mesh->ndim);
    AR_TRY(check_list(mesh, r->src, r->ndim));
    return check_list(mesh, r->dst, r->ndim);
}

ar_status ari_redistribution_steps(ar_redistribution_step *steps, size_t *n, const ar_mesh *mesh,
                                   const ar_redistribution *r)
{
    walk w = {.mesh = mesh, .target = r->dst, .ndim = r->ndim};
    ar_redistribution_step s;
    AR_TRY(check_redistribution(mesh, r));
    for (int m = 0; m < mesh->ndim; m++)
        w.current[m] = r->src[m];
    /* A dimension takes at most two steps: it is gathered or reduced once, and then becomes its target, which no outer
     * dimension can block any more. */
    for (*n = 0; next_step(&s, &w); (*n)++) {
        if (*n == AR_REDISTRIBUTION_STEPS)
            return ar_error_set(AR_ERR_INTERNAL, "a redistribution of more than %d steps", AR_REDISTRIBUTION_STEPS);
        steps[*n] = s;
        w.current[s.dim] = s.dst;
    }
    return AR_OK;
}

ar_status ar_redistribution_backward(ar_redistribution *back, const ar_mesh *mesh, const ar_redistribution *r)
{
    ar_redistribution b = *r;
    for (int m = 0; m < mesh->ndim; m++) {
        AR_TRY(ari_placement_gradient(&b.src[m], r->dst[m]));
        AR_TRY(ari_placement_gradient(&b.dst[m], r->src[m]));
    }
    *back = b;
    return AR_OK;
}
