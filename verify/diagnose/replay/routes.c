/* SPDX-License-Identifier: Apache-2.0 */
/* A router's backward pass computed again: the logits' gradient from that of the weights. Experts are those whose weight
 * is not zero. */
#include "verify/diagnose/hypothesis.h"
#include "verify/diagnose/replay/scores.h"

enum { MOST_ELEMENTS = 1 << 22 };

/* A router's rows, [tokens][n]. */
typedef struct routes {
    const ari_case *c;
    size_t tokens, n;
    float *z, *weight, *g; /* logits, weights and their gradient */
    double *p;             /* the scores of a row of z, [n] */
} routes;

/* --- the gradient of the logits ----------------------------------------------------------------------------------- */

/* With scores p, a softmax or sigmoids, w = p, or p over the sum of the experts chosen, and m the sum of w g, the
 * gradient of a softmax's logits is w g less a part of m for each: w m where only the experts chosen are in the sum that
 * w is divided by, p m where it is a softmax over all. A sigmoid's is (1 - p)(w g - w m), without w m where there is no
 * such sum. */
typedef struct form {
    bool sigmoids, normalised, over_all;
} form;

/* True if all rows are of this form; fills the factor of the weights. */
static bool is_form(double *factor, const routes *r, form f, const float *x)
{
    ari_fit fit = {0};
    for (size_t t = 0; t < r->tokens; t++) {
        const float *weight = r->weight + t * r->n, *g = r->g + t * r->n;
        double sum = 0.0, m = 0.0;
        ari_router_scores(r->p, r->z + t * r->n, r->n, !f.sigmoids);
        for (size_t i = 0; i < r->n; i++) {
            sum += weight[i] != 0.0f ? r->p[i] : 0.0;
            m += weight[i] != 0.0f ? r->p[i] * (double)g[i] : 0.0;
        }
        const double by = f.normalised ? sum : 1.0;
        for (size_t i = 0; i < r->n; i++) {
            const double w = weight[i] != 0.0f ? r->p[i] / by : 0.0, of_all = f.sigmoids ? 0.0 : r->p[i];
            const double slope = f.sigmoids ? 1.0 - r->p[i] : 1.0;
            ari_fit_add(&fit, (double)x[t * r->n + i], slope * (w * (double)g[i] - (f.over_all ? of_all : w) * m / by),
                        0.0);
        }
    }
    const double unsure = ARI_SUMS + r->c->relative;
    return ari_fit_one(factor, &fit) <= unsure * unsure;
}

static void compare_forms(ari_trace *t, const routes *r, form base, double was)
{
    for (int i = 0; i < 4; i++) {
        const form f = {base.sigmoids, i % 2, i / 2};
        const bool same = f.normalised == base.normalised && f.over_all == base.over_all;
        double is, there;
        if (!is_form(&is, r, f, r->c->val) || same == ari_is_near(is, was, ARI_SEEN) ||
            (!same && is_form(&there, r, f, r->c->ref))) /* where all experts are chosen forms are one */
            continue;
        ARI_FINDING(t, same ? ARI_FOUND_SCORES : ARI_FOUND_ROUTER,
                    same                         ? ARI_IF(COUNT)
                    : f.normalised == f.over_all ? (f.normalised ? ARI_IF(CUT) : ARI_IF(SOME))
                    : f.normalised               ? ARI_IF(ONE)
                                                 : ARI_IF(ZERO),
                    {"times", .number = is / was});
        return;
    }
}

static void look_at_gradient(ari_trace *t, const routes *r)
{
    static const form references[] = {
        {false, true, false}, {false, false, true}, {true, true, false}, {true, false, true}};
    double was;
    for (size_t i = 0; i < sizeof references / sizeof *references; i++) {
        if (!is_form(&was, r, references[i], r->c->ref))
            continue;
        compare_forms(t, r, references[i], was);
        return;
    }
}

/* --- the gradient of the weights ---------------------------------------------------------------------------------- */

/* True if of each token the gradients for one of n blocks of experts are right, and all others zero. */
static bool is_of_blocks(const ari_case *c, size_t n)
{
    const size_t cols = c->grid.cols, size = cols / n;
    bool both = false;
    for (size_t t = 0; t < c->grid.rows; t++) {
        const float *ref = c->ref + t * cols, *val = c->val + t * cols;
        size_t block = SIZE_MAX;
        for (size_t i = 0; i < 2 * cols; i++) { /* first those that are there */
            const bool off = ari_off(c, t * cols + i % cols);
            if (off ? val[i % cols] != 0.0f : i < cols && ref[i] != 0.0f && block != SIZE_MAX && block != i / size)
                return false;
            if (i >= cols && off && block == i % cols / size)
                return false;
            block = i < cols && !off && ref[i] != 0.0f ? i / size : block;
            both = both || (off && block != SIZE_MAX);
        }
    }
    return both;
}

ar_status ari_measure_routes(ari_trace *t, const ari_case *c)
{
    routes r = {.c = c, .tokens = c->grid.rows, .n = c->grid.cols};
    bool held = true;
    if (c->count > MOST_ELEMENTS)
        return AR_OK;
    for (size_t n = 2; c->role == ARI_ROUTES && n <= c->grid.cols && t->kind == ARI_FOUND_NOTHING; n++) {
        if (c->grid.cols % n == 0 && is_of_blocks(c, n))
            ARI_FINDING(t, ARI_FOUND_ROUTES, ARI_IF(OF_SHARDS), {"n", .count = n});
    }
    if (c->role != ARI_ROUTER_LOGITS)
        return AR_OK;
    AR_TRY(ari_replay_rows(&r.z, &held, c, c->count, ARI_ROUTER, 'f'));
    bool weighed = held;
    AR_TRY(ari_replay_rows(&r.weight, &weighed, c, c->count, ARI_ROUTES, 'f'));
    AR_TRY(ari_replay_rows(&r.g, &weighed, c, c->count, ARI_ROUTES, 'b'));
    AR_TRY(ARI_TAKE(&r.p, c->arena, r.n, "a row of logits"));
    if (weighed)
        look_at_gradient(t, &r);
    return held && t->kind == ARI_FOUND_NOTHING ? ari_replay_balance(t, c, r.z) : AR_OK;
}
