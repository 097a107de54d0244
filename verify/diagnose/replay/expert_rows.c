/* SPDX-License-Identifier: Apache-2.0 */
/* Which rows of the experts a token's slots have, where they are not their own. */
#include "verify/diagnose/hypothesis.h"
#include "verify/diagnose/replay/experts.h"

enum { MOST_ROWS = 2048, STARTS = 16, ROUNDS = 8 };
#define MOST_PRODUCTS 2e9

/* By expert and token: what an expert makes of the tokens that the routes send to it, or of all; and the products of
 * these. */
typedef struct rows {
    size_t n;
    struct {
        size_t token, expert;
    } of[MOST_ROWS];
    double *y, *products;       /* [n][cols], [n][n] */
    double with[MOST_ROWS], vv; /* products of a token's row with these, and with itself */
    double enough;              /* of its squares, that rows which are it may leave */
    /* Of the slots that were looked at: their own row, and the one that they have. */
    size_t own[ARI_PROBE_TOKENS * ARI_MOST_SLOTS], is[ARI_PROBE_TOKENS * ARI_MOST_SLOTS], found;
} rows;

static ar_status make_rows(rows *r, ari_experts *e)
{
    const size_t tokens = e->p.c->grid.rows;
    for (size_t at = 0; at < e->n * tokens; at++) {
        const size_t i = at / tokens, t = at % tokens;
        if (e->weight && e->weight[t * e->n + i] == 0.0f)
            continue;
        if (r->n == MOST_ROWS) {
            r->n = 0;
            return AR_OK;
        }
        r->of[r->n].token = t;
        r->of[r->n++].expert = i;
    }
    if ((double)r->n * (double)e->width * (double)e->cols > MOST_PRODUCTS)
        r->n = 0;
    AR_TRY(ARI_TAKE(&r->y, e->p.c->arena, r->n * e->cols + 1, "experts' rows"));
    AR_TRY(ARI_TAKE(&r->products, e->p.c->arena, r->n * r->n + 1, "products of rows"));
    for (size_t i = 0; i < r->n; i++) {
        if (i == 0 || r->of[i].expert != r->of[i - 1].expert)
            AR_TRY(ari_expert_read(e, r->of[i].expert));
        e->x = e->input + r->of[i].token * e->cols;
        ari_expert_run(r->y + i * e->cols, e, ARI_OF_INPUT, 1.0);
        for (size_t k = 0; k <= i; k++) {
            for (size_t f = 0; f < e->cols; f++)
                r->products[i * r->n + k] += r->y[i * e->cols + f] * r->y[k * e->cols + f];
            r->products[k * r->n + i] = r->products[i * r->n + k];
        }
    }
    return AR_OK;
}

/* What these rows, each times a number, leave of the token's. */
static double left_by(double *share, const rows *r, const size_t *pick, size_t n)
{
    double m[(ARI_MOST_SLOTS + 1) * (ARI_MOST_SLOTS + 1)];
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < n; k++)
            m[i * (n + 1) + k] = r->products[pick[i] * r->n + pick[k]];
        m[i * (n + 1) + n] = m[n * (n + 1) + i] = r->with[pick[i]];
    }
    m[n * (n + 1) + n] = r->vv;
    return ari_equations_solve(share, m, n) / r->vv;
}

/* The row at one place that leaves least. */
static double pick_best(double *share, const rows *r, size_t *pick, size_t n, size_t at)
{
    double least = HUGE_VAL;
    size_t best = pick[at];
    for (pick[at] = 0; pick[at] < r->n; pick[at]++) {
        const double left = left_by(share, r, pick, n);
        best = left < least ? pick[at] : best;
        least = fmin(left, least);
    }
    pick[at] = best;
    return left_by(share, r, pick, n);
}

/* n rows that make up the token's: one after the other, then each once more while that leaves less. Begun with each of
 * the first few in turn. */
static bool pick_rows(double *share, const rows *r, size_t *pick, size_t n)
{
    size_t first[STARTS];
    for (size_t s = 0; s < STARTS && s < r->n; s++) {
        double left = HUGE_VAL, most = -1.0;
        first[s] = 0;
        for (size_t i = 0; i < r->n; i++) {
            size_t before = 0;
            const double part = r->with[i] * r->with[i] / r->products[i * r->n + i];
            while (before < s && first[before] != i)
                before++;
            first[s] = before == s && part > most ? i : first[s];
            most = before == s ? fmax(part, most) : most;
        }
        pick[0] = first[s];
        for (size_t at = 1; at < n; at++) {
            pick[at] = 0;
            left = pick_best(share, r, pick, at + 1, at);
        }
        for (size_t round = 0; round < ROUNDS * n && !(left <= r->enough); round++)
            left = pick_best(share, r, pick, n, round % n);
        if (left <= r->enough)
            return true;
    }
    return false;
}

/* The slots of token k, and the products of what they make together, without a shared expert's part. */
static size_t take_token(ari_expert_term *slot, rows *r, const ari_experts *e, size_t k)
{
    const ari_expert_term *term = e->term + k * e->most, *shared = NULL;
    size_t n = 0;
    for (size_t j = 0; j < e->terms[k]; j++) {
        if (term[j].expert == e->n)
            shared = &term[j];
        else if (ari_expert_is_there(e, term[j].was, term[j].was) && n++ < ARI_MOST_SLOTS)
            slot[n - 1] = term[j];
    }
    r->vv = 0.0;
    memset(r->with, 0, r->n * sizeof *r->with);
    for (size_t f = 0; f < e->cols; f++) {
        const double part = shared ? shared->was * e->y[ARI_OF_INPUT][(k * e->most + e->n) * e->cols + f] : 0.0,
                     v = (double)e->p.val[k][f] - part;
        r->vv += v * v;
        for (size_t i = 0; i < r->n; i++)
            r->with[i] += v * r->y[i * e->cols + f];
    }
    return n;
}

/* Which row each slot of token k has; false: they are no rows, or not times its weights. */
static bool find_sources(rows *r, const ari_experts *e, size_t k)
{
    ari_expert_term slot[ARI_MOST_SLOTS];
    const size_t n = take_token(slot, r, e, k);
    size_t pick[ARI_MOST_SLOTS];
    double share[ARI_MOST_SLOTS];
    if (n == 0 || n > ARI_MOST_SLOTS || !pick_rows(share, r, pick, n))
        return false;
    for (size_t j = 0; j < n; j++) {
        size_t best = 0, own = 0;
        for (size_t i = 1; i < n; i++)
            best = fabs(share[i] - slot[j].was) < fabs(share[best] - slot[j].was) ? i : best;
        if (!ari_is_near(share[best], slot[j].was, e->near))
            return false;
        while (r->of[own].token != e->p.token[k] || r->of[own].expert != slot[j].expert)
            own++;
        r->own[r->found + j] = own;
        r->is[r->found + j] = pick[best];
        share[best] = HUGE_VAL;
    }
    r->found += n;
    return true;
}

/* True if every slot has the next row, or the one before (back), of its own among n equal parts of the tokens. */
static bool are_next(const rows *r, size_t tokens, size_t n, bool back)
{
    bool all = true;
    for (size_t i = 0; i < r->found && all; i++) {
        size_t row = r->own[i];
        do
            row = (row + (back ? r->n - 1 : 1)) % r->n;
        while (r->of[row].token / (tokens / n) != r->of[r->own[i]].token / (tokens / n));
        all = row == r->is[i];
    }
    return all;
}

/* The most ranks, but not one for each expert, that could have both experts of every slot. */
static size_t ranks_of_rows(const rows *r, size_t n_experts)
{
    for (size_t n = n_experts - 1; n > 1; n--) {
        size_t i = 0;
        while (n_experts % n == 0 && i < r->found &&
               r->of[r->own[i]].expert / (n_experts / n) == r->of[r->is[i]].expert / (n_experts / n))
            i++;
        if (n_experts % n == 0 && i == r->found)
            return n;
    }
    return 0;
}

static void found_rows(ari_trace *t, const rows *r, const ari_experts *e, bool all)
{
    const size_t tokens = e->p.c->grid.rows, ranks = all ? ranks_of_rows(r, e->n) : 0;
    size_t moved = 0;
    for (size_t i = 0; i < r->found; i++)
        moved += r->own[i] != r->is[i];
    if (moved == 0)
        return;
    ARI_FINDING(t, ARI_FOUND_EXPERTS, ARI_IF(ROWS), {"moved", .count = moved}, {"slots", .count = r->found},
                {"n", .count = ranks});
    for (size_t n = 1; e->weight && n <= ARI_MOST_RANKS && !(t->flags & ARI_IF(SHIFT)); n++) {
        const bool next = tokens % n == 0 && are_next(r, tokens, n, false);
        if (!next && !(tokens % n == 0 && are_next(r, tokens, n, true)))
            continue;
        t->flags |= ARI_IF(SHIFT);
        ARI_FACTS(t, {"where", .text = next ? "after" : "before"});
    }
    t->flags |= ranks > 0 ? ARI_IF(OF_SHARDS) : 0;
}

/* Among all rows that there may be, those of two tokens are no accident; among those of the routes, all are there. */
ar_status ari_look_at_expert_rows(ari_trace *t, ari_experts *e)
{
    rows *r = NULL;
    size_t found = 0;
    AR_TRY(ARI_TAKE(&r, e->p.c->arena, 1, "experts' rows"));
    r->enough = e->weight ? ari_expert_rounding(e) : ARI_REPLAY_BASE;
    AR_TRY(make_rows(r, e));
    for (size_t k = 0; r->n > 0 && k < e->p.tokens && (found == k || !e->weight); k++)
        found += find_sources(r, e, k);
    if (found == e->p.tokens || (!e->weight && found >= 2))
        found_rows(t, r, e, found == e->p.tokens);
    return AR_OK;
}
