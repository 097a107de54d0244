/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/diagnose/replay/experts.h"

#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/hypothesis.h"

/* Candidates: the reference's sum; each expert's output as it is, or their mean; times the weight twice; the weight at
 * the expert's input; gate and up exchanged. */
enum { WEIGHTED, BARE, MEAN, WEIGHTED_TWICE, INPUT_WEIGHTED, GATED_BY_UP, CANDIDATES };

/* --- the experts -------------------------------------------------------------------------------------------------- */

/* Finds the weights of the case's layer as they were before the first step; *held: there are all three of each. */
static ar_status find_weights(ari_experts *e, bool *held)
{
    static const ari_role roles[ARI_EXPERT_WEIGHTS] = {
        [ARI_OF_GATE] = ARI_EXPERT_GATE, [ARI_OF_UP] = ARI_EXPERT_UP, [ARI_OF_DOWN] = ARI_EXPERT_DOWN};
    const ari_case *c = e->p.c;
    const ar_dump *dump = c->known->reference;
    const long layer = ari_order_of(c->reference->name, c->path).layer;
    size_t found = 0;
    AR_TRY(ARI_ALLOC_ZERO(&e->of, e->n, "experts"));
    for (size_t i = 0; i < ar_dump_count(dump); i++) {
        const ar_dump_tensor *t = ar_dump_at(dump, i);
        const ari_order_key key = ari_order_of(t->name, ar_dump_path(dump));
        const ari_role role = ari_module_of(t->name, key.stem).role;
        const size_t expert = ari_expert_of(t->name);
        for (size_t k = 0; k < ARI_EXPERT_WEIGHTS; k++) {
            if (role != roles[k] || key.layer != layer || (key.pass != 'i' && key.pass != 'w') || expert >= e->n ||
                t->ndim != 2 || t->shape[k == ARI_OF_DOWN ? 0 : 1] != e->cols)
                continue;
            found += e->of[expert][k] == NULL;
            e->of[expert][k] = t;
            e->width = t->shape[k == ARI_OF_DOWN ? 1 : 0];
        }
    }
    *held = found == e->n * ARI_EXPERT_WEIGHTS && e->width * e->cols <= ARI_MOST_WEIGHT;
    for (size_t i = 0; i < e->n && *held; i++) {
        for (size_t k = 0; k < ARI_EXPERT_WEIGHTS; k++)
            *held = *held && e->of[i][k]->count == e->width * e->cols;
    }
    return AR_OK;
}

void ari_expert_run(double *y, ari_experts *e, double scale, bool exchanged)
{
    const size_t cols = e->cols;
    const float *first = e->w[exchanged ? ARI_OF_UP : ARI_OF_GATE], *second = e->w[exchanged ? ARI_OF_GATE : ARI_OF_UP];
    for (size_t f = 0; f < e->width; f++) {
        double gate = 0.0, up = 0.0;
        for (size_t i = 0; i < cols; i++) {
            gate += (double)first[f * cols + i] * scale * (double)e->x[i];
            up += (double)second[f * cols + i] * scale * (double)e->x[i];
        }
        e->act[f] = gate / (1.0 + exp(-gate)) * up;
    }
    for (size_t i = 0; i < cols; i++) {
        y[i] = 0.0;
        for (size_t f = 0; f < e->width; f++)
            y[i] += (double)e->w[ARI_OF_DOWN][i * e->width + f] * e->act[f];
    }
}

static ar_status run_slot(ari_experts *e, ari_expert_slot *s)
{
    for (size_t k = 0; k < ARI_EXPERT_WEIGHTS; k++)
        AR_TRY(ar_dump_read_f32(e->of[s->expert][k], 0, e->width * e->cols, e->w[k]));
    for (size_t k = 0; k < 3; k++) {
        AR_TRY(ARI_ALLOC(&s->y[k], e->cols, "an expert's output"));
        ari_expert_run(s->y[k], e, k == 1 ? s->weight : 1.0, k == 2);
    }
    return AR_OK;
}

/* The slots of the probe's token k; *held: there are not too many. */
static ar_status run_token(ari_experts *e, size_t k, const ar_dump_tensor *x, bool *held)
{
    const size_t row = e->p.token[k];
    AR_TRY(ar_dump_read_f32(x, row * e->cols, e->cols, e->x));
    for (size_t i = 0; i < e->n && *held; i++) {
        ari_expert_slot *s = &e->at[k][e->slots[k]];
        if (e->weight[row * e->n + i] == 0.0f)
            continue;
        *held = e->slots[k] < ARI_MOST_SLOTS;
        if (!*held)
            return AR_OK;
        *s = (ari_expert_slot){.expert = i, .weight = (double)e->weight[row * e->n + i]};
        for (size_t t = 0; t < row; t++)
            s->before += e->weight[t * e->n + i] != 0.0f;
        e->slots[k]++;
        AR_TRY(run_slot(e, s));
    }
    return AR_OK;
}

static void put_candidate(ari_probe *p, void *of, size_t candidate)
{
    ari_experts *e = of;
    for (size_t k = 0; k < p->tokens; k++) {
        for (size_t i = 0; i < e->cols; i++) {
            double sum = 0.0;
            for (size_t j = 0; j < e->slots[k]; j++) {
                const ari_expert_slot *s = &e->at[k][j];
                const double w = s->weight, times[CANDIDATES] = {w, 1.0, 1.0 / (double)e->slots[k], w * w, 1.0, w};
                sum += times[candidate] * s->y[candidate == INPUT_WEIGHTED ? 1 : candidate == GATED_BY_UP ? 2 : 0][i];
            }
            e->act[i] = sum;
        }
        ari_probe_put(p, k, e->act);
    }
}

/* --- what is left out --------------------------------------------------------------------------------------------- */

/* How much of each slot there is in the other's row of token k, by least squares; what they leave of it. */
static double fit_slots(ari_experts *e, size_t k)
{
    const size_t n = e->slots[k];
    double m[ARI_MOST_SLOTS * (ARI_MOST_SLOTS + 1)] = {0.0}, x[ARI_MOST_SLOTS + 1], share[ARI_MOST_SLOTS], left = 0.0,
                                                all = 0.0;
    for (size_t i = 0; i < e->cols; i++) {
        for (size_t j = 0; j < n; j++)
            x[j] = e->at[k][j].weight * e->at[k][j].y[0][i];
        x[n] = (double)e->p.val[k][i];
        ari_equations_add(m, x, n);
    }
    if (n == 0 || !ari_equations_solve(share, m, n))
        return HUGE_VAL;
    for (size_t j = 0; j < n; j++)
        e->at[k][j].share = share[j];
    for (size_t i = 0; i < e->cols; i++) {
        double sum = 0.0;
        for (size_t j = 0; j < n; j++)
            sum += share[j] * e->at[k][j].weight * e->at[k][j].y[0][i];
        left += pow((double)e->p.val[k][i] - sum, 2.0);
        all += pow((double)e->p.ref[k][i], 2.0);
    }
    return left / all;
}

/* Of the slots that were looked at. */
typedef struct missing {
    size_t slots, lacking, expert; /* expert: the only one that is missing; ARI_MOST_EXPERTS: several are */
    size_t last, first;            /* rows of an expert: the last that is there, the first that is not */
} missing;

/* True if each slot is there or not. */
static bool count_missing(missing *m, ari_experts *e)
{
    *m = (missing){.expert = ARI_MOST_EXPERTS, .first = SIZE_MAX};
    for (size_t k = 0; k < e->p.tokens; k++) {
        if (!(fit_slots(e, k) <= ARI_REPLAY_EXACT))
            return false;
        for (size_t j = 0; j < e->slots[k]; j++) {
            const ari_expert_slot *s = &e->at[k][j];
            const bool there = ari_is_near(s->share, 1.0, ARI_KNOWN);
            if (!there && fabs(s->share) > ARI_KNOWN)
                return false;
            m->slots++;
            m->last = there && s->before > m->last ? s->before : m->last;
            if (there)
                continue;
            m->expert = m->lacking == 0 || m->expert == s->expert ? s->expert : ARI_MOST_EXPERTS;
            m->first = s->before < m->first ? s->before : m->first;
            m->lacking++;
        }
    }
    return m->lacking > 0;
}

/* Of the tokens that are right all experts are there: then no single one is missing, and none before its last row. */
static void count_right(missing *m, const ari_experts *e)
{
    for (size_t i = 0; i < e->n; i++) {
        size_t rows = 0;
        for (size_t t = 0; t < e->p.c->grid.rows; t++) {
            if (e->weight[t * e->n + i] == 0.0f)
                continue;
            if (!ari_row_differs(e->p.c, t)) {
                m->expert = m->expert == i ? ARI_MOST_EXPERTS : m->expert;
                m->last = rows > m->last ? rows : m->last;
            }
            rows++;
        }
    }
}

/* True if of each token the experts of one of n blocks are there, and those of the others are not. */
static bool are_of_blocks(const ari_experts *e, size_t n)
{
    const size_t size = e->n / n;
    bool both = false;
    for (size_t k = 0; k < e->p.tokens; k++) {
        size_t block = SIZE_MAX;
        for (size_t j = 0; j < 2 * e->slots[k]; j++) { /* first those that are there */
            const ari_expert_slot *s = &e->at[k][j % e->slots[k]];
            const bool there = fabs(s->share) > ARI_KNOWN;
            if (there == (j >= e->slots[k]))
                continue;
            if (there ? block != SIZE_MAX && block != s->expert / size : block == s->expert / size)
                return false;
            block = there ? s->expert / size : block;
            both = both || (!there && block != SIZE_MAX);
        }
    }
    for (size_t t = 0; t < e->p.c->grid.rows; t++) {
        size_t block = SIZE_MAX;
        for (size_t i = 0; i < e->n && !ari_row_differs(e->p.c, t); i++) {
            if (e->weight[t * e->n + i] == 0.0f)
                continue;
            if (block != SIZE_MAX && block != i / size)
                return false;
            block = i / size;
        }
    }
    return both;
}

/* The fewest ranks that share out the experts so; 0: none. */
static size_t ranks_of_missing(const ari_experts *e)
{
    size_t n = 2;
    while (n <= e->n && !(e->n % n == 0 && are_of_blocks(e, n)))
        n++;
    return n <= e->n ? n : 0;
}

/* --- the look ----------------------------------------------------------------------------------------------------- */

static ar_status look_at_outputs(ari_trace *t, ari_experts *e, const ar_dump_tensor *x)
{
    static const ari_properties flags[] = {[BARE] = ARI_IF(ZERO),
                                           [MEAN] = ARI_IF(AVERAGE),
                                           [WEIGHTED_TWICE] = ARI_IF(TWICE),
                                           [INPUT_WEIGHTED] = ARI_IF(OF_INPUT),
                                           [GATED_BY_UP] = ARI_IF(EXCHANGED)};
    double left, exact = ARI_REPLAY_EXACT;
    size_t other;
    missing m;
    put_candidate(&e->p, e, WEIGHTED);
    if (!ari_probe_try_base(&e->p, &exact))
        return AR_OK;
    if (count_missing(&m, e)) {
        const size_t ranks = ranks_of_missing(e);
        count_right(&m, e);
        ari_trace_set(t, ARI_FOUND_EXPERTS, ARI_IF(SOME));
        t->flags |= m.expert < ARI_MOST_EXPERTS ? ARI_IF(ONE)
                    : ranks > 0                 ? ARI_IF(OF_SHARDS)
                    : m.last < m.first          ? ARI_IF(CUT)
                                                : 0;
        ari_count(t, "n", ranks);
        ari_count(t, "expert", m.expert);
        ari_count(t, "lacking", m.lacking);
        ari_count(t, "slots", m.slots);
        ari_count(t, "rows", m.first);
    } else if (ari_choose_other(&other, &left, &e->p, put_candidate, e, WEIGHTED, CANDIDATES)) {
        ari_trace_set(t, ARI_FOUND_EXPERTS, flags[other]);
        ari_number(t, "left", left);
    } else {
        return ari_look_at_expert_rows(t, e, x);
    }
    return AR_OK;
}

ar_status ari_right_value(const ar_dump_tensor **t, const ari_case *c, ari_role role, size_t count)
{
    ari_fit f = {0};
    double p;
    *t = ari_replay_input(c, role);
    const ar_dump_tensor *other = *t && c->known->other ? ar_dump_find(c->known->other, (*t)->name) : NULL;
    if (*t && ((*t)->count != count || (other && other->count != count)))
        *t = NULL;
    if (!*t || !other)
        return AR_OK;
    AR_TRY(ari_fit_read(&f, other, *t, 0, count));
    const double left = ari_fit_one(&p, &f);
    if (!(left <= ARI_FIT) || !ari_is_near(p, 1.0, ARI_KNOWN))
        *t = NULL;
    return AR_OK;
}

static ar_status look_at_experts(ari_trace *t, ari_experts *e)
{
    const ari_case *c = e->p.c;
    const ar_dump_tensor *x, *routes = ari_replay_input(c, ARI_ROUTES);
    bool held = false;
    e->n = routes ? routes->count / c->grid.rows : 0;
    AR_TRY(ari_right_value(&x, c, ARI_NORM2, c->count));
    AR_TRY(ari_right_value(&routes, c, ARI_ROUTES, e->n * c->grid.rows));
    if (!x || !routes || e->n == 0 || e->n >= ARI_MOST_EXPERTS || routes->count > ARI_MOST_WEIGHT)
        return AR_OK;
    AR_TRY(find_weights(e, &held));
    if (!held)
        return AR_OK;
    AR_TRY(ARI_ALLOC(&e->x, e->cols, x->name));
    AR_TRY(ARI_ALLOC(&e->weight, routes->count, routes->name));
    AR_TRY(ar_dump_read_f32(routes, 0, routes->count, e->weight));
    AR_TRY(ARI_ALLOC(&e->act, e->width > e->cols ? e->width : e->cols, "an expert's features"));
    for (size_t k = 0; k < ARI_EXPERT_WEIGHTS; k++)
        AR_TRY(ARI_ALLOC(&e->w[k], e->width * e->cols, "an expert's weights"));
    for (size_t k = 0; k < e->p.tokens && held; k++)
        AR_TRY(run_token(e, k, x, &held));
    return held ? look_at_outputs(t, e, x) : AR_OK;
}

static void experts_fini(ari_experts *e)
{
    for (size_t i = 0; i < ARI_PROBE_TOKENS * ARI_MOST_SLOTS; i++) {
        for (size_t k = 0; k < 3; k++)
            free(e->at[i / ARI_MOST_SLOTS][i % ARI_MOST_SLOTS].y[k]);
    }
    for (size_t k = 0; k < ARI_EXPERT_WEIGHTS; k++)
        free(e->w[k]);
    free(e->of);
    free(e->x);
    free(e->weight);
    free(e->act);
}

ar_status ari_measure_experts(ari_trace *t, const ari_case *c)
{
    ari_experts *e = NULL;
    if (ari_replay_role(c) != ARI_EXPERTS || !ari_may_replay(c))
        return AR_OK;
    AR_TRY(ARI_ALLOC_ZERO(&e, 1, "experts"));
    ari_probe_choose_rows(&e->p, c);
    e->cols = c->grid.cols;
    const ar_status st = look_at_experts(t, e);
    experts_fini(e);
    free(e);
    return st;
}
