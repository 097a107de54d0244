/* SPDX-License-Identifier: Apache-2.0 */
/* The experts' weights may be of one expert or of all, gate and up apart or packed, stored either way: of the forms
 * that names leave open, the one that gives the reference is taken. */
#include "verify/diagnose/replay/experts.h"

#include <ctype.h>
#include <stdlib.h>

#include "verify/diagnose/hypothesis.h"

enum { FUNCTIONS = 4, FORMS = 16 * ARI_EXPERT_WEIGHTS * FUNCTIONS, MOST_UNROUTED = 128, MOST_WORK = 1 << 28 };

/* --- parameters --------------------------------------------------------------------------------------------------- */

bool ari_is_within(const ari_case *c, const ar_dump_tensor *t)
{
    return strncmp(t->name, c->own.name, c->own.stem) == 0 && t->name[c->own.stem] == '.';
}

/* What follows "PATH.experts." and the expert's number, SIZE_MAX: it has none. NULL: another tensor's name. */
static const char *leaf_of(size_t *expert, const ari_case *c, const ar_dump_tensor *t)
{
    const char *name = ari_is_within(c, t) ? strstr(t->name, ".experts.") : NULL;
    name = name ? name + strlen(".experts.") : NULL;
    *expert = SIZE_MAX;
    for (const char *at = name; at; at = strchr(at, '.') ? strchr(at, '.') + 1 : NULL) {
        char *end;
        const size_t number = (size_t)strtoul(at, &end, 10);
        if (!isdigit((unsigned char)*at) || *end != '.')
            continue;
        *expert = number;
        return end + 1;
    }
    return name;
}

static bool add_leaf(ari_experts *e, const ar_dump_tensor *t, const char *name, size_t length, size_t expert)
{
    const bool stacked = expert == SIZE_MAX, is_bias = length > 4 && memcmp(name + length - 4, "bias", 4) == 0;
    const int dims = (stacked ? 3 : 2) - is_bias;
    ari_expert_leaf *const leaves = is_bias ? e->bias : e->leaf;
    size_t *const known = is_bias ? &e->biases : &e->leaves, k = 0;
    while (k < *known && (leaves[k].length != length || memcmp(leaves[k].name, name, length) != 0))
        k++;
    if (k == ARI_EXPERT_WEIGHTS || t->ndim != dims || (stacked ? t->shape[0] - 1 : expert) >= ARI_MOST_EXPERTS)
        return false;
    ari_expert_leaf *l = &leaves[k];
    const size_t rows = is_bias ? 1 : t->shape[dims - 2];
    if (k == *known) {
        *l = (ari_expert_leaf){.name = name, .length = length, .rows = rows, .cols = t->shape[dims - 1]};
        ++*known;
    }
    const size_t first = stacked ? 0 : expert, end = stacked ? t->shape[0] : expert + 1;
    for (size_t i = first; i < end; i++) {
        if (l->of[i] || rows != l->rows || t->shape[dims - 1] != l->cols)
            return false;
        l->of[i] = t;
        l->n++;
    }
    e->n = end > e->n ? end : e->n;
    return true;
}

/* The experts' weights; false: none, or such as are not known. */
static bool find_leaves(ari_experts *e)
{
    bool known = true;
    for (ari_walk w = ari_replay_weights(e->p.c, e->p.c->known->reference); known && ari_walk_next(&w);) {
        size_t expert;
        const char *name = leaf_of(&expert, e->p.c, w.t);
        known = !name || add_leaf(e, w.t, name, w.key.stem - (size_t)(name - w.t->name), expert);
    }
    for (size_t k = 0; k < e->leaves; k++)
        known = known && e->leaf[k].n == e->n && e->leaf[k].rows * e->leaf[k].cols <= ARI_MOST_WEIGHT &&
                (e->biases == 0 || e->bias[k].n == e->n);
    return known && e->leaves >= 2 && e->n >= 2 && (e->biases == 0 || e->biases == e->leaves);
}

/* Form i of those that names leave open. False: it is not that of the shapes. */
static bool take_form(ari_experts *e, size_t i)
{
    const size_t down = i / 16 % ARI_EXPERT_WEIGHTS, first = down == 0,
                 last = e->leaves == 2 ? first
                        : down == 2    ? 1
                                       : 2;
    const ari_expert_form f = {{[ARI_OF_GATE] = first, [ARI_OF_UP] = last, [ARI_OF_DOWN] = down},
                               i & 1,
                               i & 2,
                               i & 4,
                               i & 8 ? ARI_OPEN_WEIGHTS : 0,
                               i / 16 / ARI_EXPERT_WEIGHTS};
    if (down >= e->leaves || (f.in_turn && first != last) || (f.gating && f.function))
        return false;
    const ari_expert_leaf *a = &e->leaf[first], *b = &e->leaf[last], *d = &e->leaf[down];
    e->form = f;
    e->width = f.in_out ? d->rows : d->cols;
    return a->rows == b->rows && a->cols == b->cols && (f.in_out ? d->cols : d->rows) == e->cols &&
           (f.in_out ? a->rows : a->cols) == e->cols &&
           (f.in_out ? a->cols : a->rows) == (first == last ? 2 : 1) * e->width &&
           (e->biases == 0 || (e->bias[down].cols == e->cols && e->bias[first].cols == (f.in_out ? a->cols : a->rows) &&
                               e->bias[last].cols == e->bias[first].cols));
}

/* Of part's weight, or behind its last column its bias. */
static float stored_at(const ari_experts *e, size_t part, size_t row, size_t col)
{
    const ari_expert_form *f = &e->form;
    const bool second = f->swapped != (part == ARI_OF_UP);
    const size_t of = f->of[f->swapped && part != ARI_OF_DOWN ? ARI_OF_UP - part : part];
    const ari_expert_leaf *l = &e->leaf[of];
    if (part != ARI_OF_DOWN && e->leaves == 2)
        row = f->in_turn ? 2 * row + second : row + second * e->width;
    if (col == (f->in_out ? l->rows : l->cols))
        return e->biases ? e->stored[of][l->rows * l->cols + row] : 0.0f;
    return e->stored[of][f->in_out ? col * l->cols + row : row * l->cols + col];
}

static ar_status read_leaf(float *x, const ari_expert_leaf *l, size_t expert)
{
    const size_t each = l->rows * l->cols;
    return ar_dump_read_f32(l->of[expert], l->of[expert]->count > each ? expert * each : 0, each, x);
}

ar_status ari_expert_read(ari_experts *e, size_t expert)
{
    for (size_t k = 0; k < e->leaves; k++) {
        AR_TRY(read_leaf(e->stored[k], &e->leaf[k], expert));
        if (e->biases)
            AR_TRY(read_leaf(e->stored[k] + e->leaf[k].rows * e->leaf[k].cols, &e->bias[k], expert));
    }
    for (size_t part = 0; part < ARI_EXPERT_WEIGHTS; part++) {
        const size_t cols = (part == ARI_OF_DOWN ? e->width : e->cols) + 1;
        for (size_t i = 0; i < (part == ARI_OF_DOWN ? e->cols : e->width) * cols; i++)
            e->w[part][i] = stored_at(e, part, i / cols, i % cols);
    }
    return AR_OK;
}

/* --- what they make ----------------------------------------------------------------------------------------------- */

static double limit(double x, double low)
{
    return fmax(low, fmin(x, 7.0));
}

static double gated(unsigned gating, size_t function, double gate, double up)
{
    if (gating == 0)
        return ari_activation_of(function, gate) * up;
    if (gating & ARI_LIMITED)
        gate = limit(gate, -HUGE_VAL), up = limit(up, -7.0);
    return gate / (1.0 + exp(-(gating & ARI_SLOPE ? 1.702 : 1.0) * gate)) * (gating & ARI_PLUS_ONE ? up + 1.0 : up);
}

/* Feature at of gate, or from e->width on of up. */
static double feature(const ari_experts *e, size_t at, double scale)
{
    const float *w = e->w[at < e->width ? ARI_OF_GATE : ARI_OF_UP] + at % e->width * (e->cols + 1);
    double sum = (double)w[e->cols];
    for (size_t i = 0; i < e->cols; i++)
        sum += (double)w[i] * scale * (double)e->x[i];
    return sum;
}

void ari_expert_run(double *y, const ari_experts *e, unsigned made, double weight)
{
    const size_t n = e->width, shares = made >= ARI_TIMES_RANKS ? made / ARI_TIMES_RANKS : 1, each = n / shares;
    made %= ARI_TIMES_RANKS;
    const double scale = made == ARI_OF_WEIGHTED ? weight : 1.0;
    const bool other = made >= ARI_BY_FUNCTION;
    const unsigned gating = other ? made - ARI_BY_FUNCTION : e->form.gating;
    for (size_t f = 0; f < n; f++) {
        size_t at[2] = {f, n + f};
        for (size_t i = 0; i < 2; i++)
            at[i] = made == ARI_GATED_BY_UP ? (at[i] + n) % (2 * n)
                    : made == ARI_OF_HALVES
                        ? (i * each + f % each) % 2 * n + f / each * each + (i * each + f % each) / 2
                    : made == ARI_IN_TURN ? 2 * f + i
                                          : at[i];
        e->act[f] = gated(gating, other ? 0 : e->form.function, feature(e, at[0], scale), feature(e, at[1], scale));
    }
    for (size_t i = 0; i < e->cols; i++) {
        const float *w = e->w[ARI_OF_DOWN] + i * (n + 1);
        y[i] = made == ARI_WITHOUT_BIAS ? 0.0 : (double)w[n];
        for (size_t f = 0; f < n; f++)
            y[i] += (double)w[f] * e->act[f];
    }
}

bool ari_expert_is_there(const ari_experts *e, double share, double was)
{
    return fabs(share) > e->near * (e->weight ? fabs(was) : 1.0);
}

/* False: a token has too many. */
static bool choose_terms(ari_experts *e, bool shared)
{
    for (size_t k = 0; k < e->p.tokens; k++) {
        for (size_t i = 0; i < e->n + shared; i++) {
            if (e->weight && e->weight[e->p.token[k] * e->n + i] == 0.0f)
                continue;
            if (e->terms[k] == e->most)
                return false;
            e->term[k * e->most + e->terms[k]++].expert = i;
        }
    }
    return true;
}

/* What they make of the first tokens of the probe. */
static ar_status run_terms(ari_experts *e, size_t tokens, unsigned made)
{
    for (size_t i = 0; i < e->n; i++) {
        bool read = false;
        for (size_t at = 0; at < tokens * e->most; at++) {
            const ari_expert_term *s = &e->term[at];
            const size_t k = at / e->most;
            if (at % e->most >= e->terms[k] || s->expert != i ||
                (made != ARI_OF_INPUT && !ari_expert_is_there(e, s->was, s->was)))
                continue;
            if (!read)
                AR_TRY(ari_expert_read(e, i));
            read = true;
            e->x = e->input + e->p.token[k] * e->cols;
            ari_expert_run(e->y[made != ARI_OF_INPUT] + at * e->cols, e, made, s->was);
        }
    }
    return AR_OK;
}

/* How much of each term there is in token k's row, the reference's or the other; returns the share of its squares that
 * they leave. */
static double solve(ari_experts *e, size_t k, bool of_reference)
{
    const size_t n = e->terms[k];
    const double *y = e->y[ARI_OF_INPUT] + k * e->most * e->cols;
    const float *row = of_reference ? e->p.ref[k] : e->p.val[k];
    double of_ref = 0.0, *share = e->number, *at = share + e->most + 1;
    memset(e->equations, 0, (n + 1) * (n + 1) * sizeof *e->equations);
    for (size_t i = 0; i < e->cols; i++) {
        for (size_t j = 0; j < n; j++)
            at[j] = y[j * e->cols + i];
        at[n] = (double)row[i];
        ari_equations_add(e->equations, at, n);
        of_ref += pow((double)e->p.ref[k][i], 2.0);
    }
    const double all = e->equations[n * (n + 2)], left = ari_equations_solve(share, e->equations, n);
    if (n == 0 || left == HUGE_VAL)
        return HUGE_VAL;
    for (size_t j = 0; j < n; j++)
        *(of_reference ? &e->term[k * e->most + j].was : &e->term[k * e->most + j].is) = share[j];
    return left / fmax(all, of_ref);
}

/* Chooses the form that gives the reference. */
static ar_status choose_form(ari_experts *e, bool *held)
{
    double least = ARI_REPLAY_BASE;
    ari_expert_form best = {.gating = 0};
    *held = false;
    for (size_t i = 0; i < FORMS; i++) {
        if (!take_form(e, i))
            continue;
        AR_TRY(run_terms(e, 1, ARI_OF_INPUT));
        const double left = solve(e, 0, true);
        if (!(left < least))
            continue;
        *held = true;
        least = left;
        best = e->form;
    }
    e->form = best;
    e->width = e->leaf[best.of[ARI_OF_DOWN]].rows * e->leaf[best.of[ARI_OF_DOWN]].cols / e->cols;
    return AR_OK;
}

/* --- other sums of them ------------------------------------------------------------------------------------------- */

/* Each expert's output times its weight w, or as it is, or their mean, or times the weight twice; or with its last bias
 * as it is. */
typedef enum times { WEIGHTED, BARE, MEAN, TWICE, BARE_BIAS } times;

typedef struct candidate {
    unsigned made;
    times by;
    ari_properties flags;
    const char *how;
} candidate;

static void put_sums(ari_experts *e, const candidate *c)
{
    const double *y = e->y[c->made != ARI_OF_INPUT];
    for (size_t k = 0; k < e->p.tokens; k++) {
        const ari_expert_term *s = e->term + k * e->most;
        size_t routed = 0;
        memset(e->act, 0, e->cols * sizeof *e->act);
        for (size_t j = 0; j < e->terms[k]; j++)
            routed += s[j].expert < e->n && ari_expert_is_there(e, s[j].was, s[j].was);
        for (size_t j = 0; j < e->terms[k]; j++) {
            const double w = s[j].was, by[] = {w, 1.0, 1.0 / (double)routed, w * w, w};
            const bool there = ari_expert_is_there(e, w, w), shared = s[j].expert == e->n;
            const size_t from = (k * e->most + j) * e->cols;
            for (size_t i = from; i < from + e->cols && (there || (c->by == WEIGHTED && c->made == ARI_OF_INPUT)); i++)
                e->act[i - from] +=
                    shared ? w * e->y[0][i] : by[c->by] * y[i] + (c->by == BARE_BIAS ? e->y[0][i] - y[i] : 0.0);
        }
        ari_probe_put(&e->p, k, e->act);
    }
}

/* Another sum of the experts' outputs, or of other outputs: that which leaves least of what differs. */
static ar_status look_at_sums(ari_trace *t, ari_experts *e)
{
    const unsigned is = e->form.gating, other = is ^ ARI_OPEN_WEIGHTS;
    const candidate all[] = {
        {ARI_OF_INPUT, BARE, ARI_IF(ZERO), ""},
        {ARI_OF_INPUT, MEAN, ARI_IF(AVERAGE), ""},
        {ARI_OF_INPUT, TWICE, ARI_IF(TWICE), ""},
        {ARI_OF_WEIGHTED, BARE, ARI_IF(OF_INPUT), ""},
        {ARI_GATED_BY_UP, WEIGHTED, ARI_IF(EXCHANGED), ""},
        {ARI_OF_HALVES, WEIGHTED, ARI_IF(PACKED), "columns that have them in turn, read as two halves"},
        {ARI_OF_HALVES | 2 * ARI_TIMES_RANKS, WEIGHTED, ARI_IF(PACKED), "halves of each of 2 ranks' columns in turn"},
        {ARI_OF_HALVES | 4 * ARI_TIMES_RANKS, WEIGHTED, ARI_IF(PACKED), "halves of each of 4 ranks' columns in turn"},
        {ARI_OF_HALVES | 8 * ARI_TIMES_RANKS, WEIGHTED, ARI_IF(PACKED), "halves of each of 8 ranks' columns in turn"},
        {ARI_IN_TURN, WEIGHTED, ARI_IF(PACKED), "two halves, read as columns that have them in turn"},
        {ARI_WITHOUT_BIAS, BARE_BIAS, ARI_IF(LAST) | ARI_IF(ONE), ""},
        {ARI_WITHOUT_BIAS, WEIGHTED, ARI_IF(LAST), ""},
        {ARI_BY_FUNCTION | other, WEIGHTED, ARI_IF(ALL), is ? "silu(gate)*up" : "GPT-OSS's, of limits and up + 1"},
        {ARI_BY_FUNCTION, WEIGHTED, ARI_IF(ALL), "with silu"},
        {ARI_BY_FUNCTION | (is ^ ARI_SLOPE), WEIGHTED, ARI_IF(ALL), is ? "with silu" : "with sigmoid(1.702*gate)"},
        {ARI_BY_FUNCTION | (is ^ ARI_PLUS_ONE), WEIGHTED, ARI_IF(ALL), is ? "with up, not up + 1" : "with up + 1"},
        {ARI_BY_FUNCTION | (is ^ ARI_LIMITED), WEIGHTED, ARI_IF(ALL), is ? "without limits" : "with limits of 7"},
    };
    double left = ARI_REPLAY_MISTAKE, base = HUGE_VAL;
    put_sums(e, &(candidate){ARI_OF_INPUT, WEIGHTED, 0, ""});
    if (!ari_probe_try_base(&e->p, &base))
        return AR_OK;
    for (const candidate *c = all; c < all + sizeof all / sizeof *all; c++) {
        if (c->made >= ARI_TIMES_RANKS && e->width % (c->made / ARI_TIMES_RANKS) != 0)
            continue;
        if (c->made != ARI_OF_INPUT)
            AR_TRY(run_terms(e, e->p.tokens, c->made));
        put_sums(e, c);
        if (!(ari_probe_left(&e->p, false) < left))
            continue;
        left = ari_probe_left(&e->p, false);
        ARI_FINDING(t, ARI_FOUND_EXPERTS, c->flags, {"how", .text = c->how}, {"left", .number = left});
    }
    return AR_OK;
}

/* --- the look ----------------------------------------------------------------------------------------------------- */

static ar_status alloc_experts(ari_experts *e)
{
    const size_t outputs = e->p.tokens * e->most * e->cols;
    size_t largest = 0, most = e->cols;
    for (size_t k = 0; k < e->leaves; k++) {
        const ari_expert_leaf *l = &e->leaf[k];
        const size_t with_bias = (l->rows + 1) * (l->cols + 1);
        largest = with_bias > largest ? with_bias : largest;
        most += l->rows + l->cols;
    }
    for (size_t k = 0; k < ARI_EXPERT_WEIGHTS; k++) {
        AR_TRY(ARI_TAKE(&e->stored[k], e->p.c->arena, largest, "an expert's weights"));
        AR_TRY(ARI_TAKE(&e->w[k], e->p.c->arena, largest, "an expert's weights"));
    }
    for (size_t k = 0; k < 2; k++)
        AR_TRY(ARI_TAKE(&e->y[k], e->p.c->arena, outputs, "experts' outputs"));
    AR_TRY(ARI_TAKE(&e->act, e->p.c->arena, most, "an expert's features"));
    AR_TRY(ARI_TAKE(&e->equations, e->p.c->arena, (e->most + 1) * (e->most + 1), "equations"));
    AR_TRY(ARI_TAKE(&e->number, e->p.c->arena, 2 * (e->most + 1), "equations"));
    return ARI_TAKE(&e->term, e->p.c->arena, e->p.tokens * e->most, "shares of experts");
}

/* True if the reference's rows are these sums, by the weights of the routes where a dump has them. *sums: the other
 * dump's are such sums too. */
static bool solve_all(ari_experts *e, bool *sums)
{
    double worst = 0.0, of_other = 0.0;
    for (size_t k = 0; k < e->p.tokens; k++) {
        worst = fmax(worst, solve(e, k, true));
        of_other = fmax(of_other, solve(e, k, false));
    }
    *sums = of_other <= ARI_REPLAY_BASE;
    e->near = fmax(ARI_KNOWN, 4.0 * sqrt(*sums ? fmax(worst, of_other) : worst));
    bool held = worst <= (e->weight ? ari_expert_rounding(e) : ARI_REPLAY_BASE);
    for (size_t at = 0; e->weight && held && at < e->p.tokens * e->most; at++) {
        const ari_expert_term *s = &e->term[at];
        held = at % e->most >= e->terms[at / e->most] ||
               ari_is_near(s->was, (double)e->weight[e->p.token[at / e->most] * e->n + s->expert], e->near);
    }
    return held;
}

static ar_status look_at_experts(ari_trace *t, ari_experts *e, const float *shared)
{
    bool held = false, sums = false, others = false;
    AR_TRY(alloc_experts(e));
    if (!choose_terms(e, shared != NULL))
        return AR_OK;
    for (size_t at = 0; shared && at < e->p.tokens * e->cols; at++) {
        const size_t k = at / e->cols, i = at % e->cols;
        e->y[ARI_OF_INPUT][(k * e->most + e->n) * e->cols + i] = (double)shared[e->p.token[k] * e->cols + i];
    }
    AR_TRY(choose_form(e, &held));
    if (!held || e->p.tokens * e->most > MOST_WORK / (e->width * e->cols))
        return AR_OK;
    AR_TRY(run_terms(e, e->p.tokens, ARI_OF_INPUT));
    if (!solve_all(e, &sums))
        return AR_OK;
    if (sums)
        AR_TRY(ari_look_at_expert_shares(t, &others, e));
    if (t->kind == ARI_FOUND_NOTHING && (others || !sums))
        AR_TRY(look_at_sums(t, e));
    if (t->kind == ARI_FOUND_NOTHING && !sums)
        return ari_look_at_expert_rows(t, e);
    if (t->kind == ARI_FOUND_NOTHING && others && !e->weight)
        ari_trace_set(t, ARI_FOUND_MIXTURE, 0);
    return AR_OK;
}

ar_status ari_measure_experts(ari_trace *t, const ari_case *c)
{
    const ar_dump_tensor *routes = ari_replay_input(c, ARI_ROUTES), *shared = NULL; /* what a shared expert makes */
    ari_experts *e = NULL;
    float *made = NULL;
    bool held = true;
    if (!ari_may_replay(c) || (routes && c->role != ARI_EXPERTS))
        return AR_OK;
    for (ari_walk w = ari_walk_of(c->known->reference, NULL, "f", c->own.step);
         !routes && !shared && ari_walk_next(&w);) {
        if (ari_is_within(c, w.t) && w.t->count == c->count && strstr(w.t->name + c->own.stem, "shared"))
            shared = w.t;
    }
    AR_TRY(ARI_TAKE(&e, c->arena, 1, "experts"));
    ari_probe_choose_rows(&e->p, c);
    e->cols = c->grid.cols;
    if (e->p.tokens == 0 || !find_leaves(e) || (routes ? routes->count > ARI_MOST_WEIGHT : e->n > MOST_UNROUTED))
        return AR_OK;
    e->most = routes ? ARI_MOST_SLOTS : e->n + (shared != NULL);
    AR_TRY(ari_replay_rows(&e->input, &held, c, c->count, ARI_NORM2, 'f'));
    if (routes)
        AR_TRY(ari_right_rows(&e->weight, &held, c, e->n * c->grid.rows, routes));
    if (shared)
        AR_TRY(ari_right_rows(&made, &held, c, c->count, shared));
    /* Of so many terms any row would be a sum. */
    return held && (routes || 2 * e->most <= e->cols) ? look_at_experts(t, e, made) : AR_OK;
}
