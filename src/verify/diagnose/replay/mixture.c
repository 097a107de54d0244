/* SPDX-License-Identifier: Apache-2.0 */
/* A mixture of experts of which no dump has the routes: how much of each expert there is in a token's row, by least
 * squares over what all experts of the layer make of the module's input. Their weights may be of one expert or of all,
 * gate and up apart or packed, stored either way. A shared expert's output is one more term. The experts' activation is
 * silu. */
#include <ctype.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/hypothesis.h"
#include "verify/diagnose/replay/replay.h"

enum { GATE, UP, DOWN, LEAVES, FORMS = 8 * LEAVES, MOST_EXPERTS = 128, MOST_WEIGHT = 1 << 22, MOST_WORK = 1 << 28 };

/* Parameters of the experts with one name: of all of them, or one of each. */
typedef struct leaf {
    const char *name; /* "w1", "gate_proj.weight" */
    size_t length, n, rows, cols;
    const ar_dump_tensor *of[MOST_EXPERTS];
} leaf;

/* Which leaf is what, and how it is stored. */
typedef struct form {
    size_t of[LEAVES]; /* gate and up are one leaf where they are packed */
    bool swapped;      /* up is what its name or place says is gate */
    bool in_turn;      /* packed: row by row, not one half after the other */
    bool in_out;       /* [in, out] */
} form;

typedef struct mixture {
    ari_probe p;
    leaf leaf[LEAVES];
    size_t leaves, n, width, cols, terms; /* terms: n, and one if there is a shared expert */
    form form;
    float *w[LEAVES], *x;    /* by leaf, of one expert; [cols]: a token's input */
    double *act, *y, *spare; /* [width]; [tokens][terms][cols]; two rows */
    double *equations, *at;  /* [terms][terms + 1]; [terms + 1] */
    double *was, *is;        /* [tokens][terms]: how much of each there is in a token's row */
    double near;             /* what differs less than this share is equal */
} mixture;

/* --- parameters --------------------------------------------------------------------------------------------------- */

/* True for a tensor of a module within the case's own. */
static bool is_within(const ari_case *c, const ar_dump_tensor *t)
{
    const ari_order_key own = ari_order_of(c->reference->name, c->path);
    return strncmp(t->name, own.name, own.stem) == 0 && t->name[own.stem] == '.';
}

/* What follows "PATH.experts." and the expert's number, SIZE_MAX: it has none. NULL: another tensor's name. */
static const char *leaf_of(size_t *expert, const ari_case *c, const ar_dump_tensor *t)
{
    const char *name = is_within(c, t) ? strstr(t->name, ".experts.") : NULL;
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

static bool add_leaf(mixture *m, const ar_dump_tensor *t, const char *name, size_t length, size_t expert)
{
    const int dims = expert == SIZE_MAX ? 3 : 2;
    size_t k = 0;
    while (k < m->leaves && (m->leaf[k].length != length || memcmp(m->leaf[k].name, name, length) != 0))
        k++;
    if (k == LEAVES || t->ndim != dims || (dims == 2 ? expert : t->shape[0] - 1) >= MOST_EXPERTS)
        return false;
    leaf *l = &m->leaf[k];
    if (k == m->leaves) {
        *l = (leaf){.name = name, .length = length, .rows = t->shape[dims - 2], .cols = t->shape[dims - 1]};
        m->leaves++;
    }
    const size_t first = dims == 2 ? expert : 0, end = dims == 2 ? expert + 1 : t->shape[0];
    for (size_t i = first; i < end; i++) {
        if (l->of[i] || t->shape[dims - 2] != l->rows || t->shape[dims - 1] != l->cols)
            return false;
        l->of[i] = t;
        l->n++;
    }
    m->n = end > m->n ? end : m->n;
    return true;
}

/* The experts' initial weights; false: none, or such as are not known. */
static bool find_leaves(mixture *m)
{
    const ari_case *c = m->p.c;
    const ar_dump *dump = c->known->reference;
    bool known = true;
    for (size_t i = 0; i < ar_dump_count(dump) && known; i++) {
        const ar_dump_tensor *t = ar_dump_at(dump, i);
        const ari_order_key key = ari_order_of(t->name, ar_dump_path(dump));
        size_t expert;
        const char *name = key.pass == 'i' || key.pass == 'w' ? leaf_of(&expert, c, t) : NULL;
        known = !name || add_leaf(m, t, name, key.stem - (size_t)(name - t->name), expert);
    }
    for (size_t k = 0; k < m->leaves; k++)
        known = known && m->leaf[k].n == m->n && m->leaf[k].rows * m->leaf[k].cols <= MOST_WEIGHT;
    return known && m->leaves >= 2 && m->n >= 2;
}

static ar_status read_expert(mixture *m, size_t expert)
{
    for (size_t k = 0; k < m->leaves; k++) {
        const leaf *l = &m->leaf[k];
        const size_t each = l->rows * l->cols, from = l->of[expert]->ndim == 3 ? expert * each : 0;
        AR_TRY(ar_dump_read_f32(l->of[expert], from, each, m->w[k]));
    }
    return AR_OK;
}

/* --- one expert --------------------------------------------------------------------------------------------------- */

/* Form i of those that names leave open. False: it is not that of the shapes. */
static bool take_form(mixture *m, size_t i)
{
    const size_t down = i / 8, first = down == 0, last = m->leaves == 2 ? first : down == 2 ? 1 : 2;
    const form f = {{[GATE] = first, [UP] = last, [DOWN] = down}, i & 1, i & 2, i & 4};
    if (down >= m->leaves || (f.in_turn && first != last))
        return false;
    const leaf *a = &m->leaf[first], *b = &m->leaf[last], *d = &m->leaf[down];
    m->form = f;
    m->width = f.in_out ? d->rows : d->cols;
    return a->rows == b->rows && a->cols == b->cols && (f.in_out ? d->cols : d->rows) == m->cols &&
           (f.in_out ? a->rows : a->cols) == m->cols &&
           (f.in_out ? a->cols : a->rows) == (first == last ? 2 : 1) * m->width;
}

static double weight_at(const mixture *m, size_t part, size_t row, size_t col)
{
    const form *f = &m->form;
    const size_t of = f->of[f->swapped && part != DOWN ? UP - part : part], second = f->swapped != (part == UP);
    if (part != DOWN && m->leaves == 2)
        row = f->in_turn ? 2 * row + second : row + second * m->width;
    return (double)m->w[of][f->in_out ? col * m->leaf[of].cols + row : row * m->leaf[of].cols + col];
}

/* y = W2 (silu(W1 (scale x)) * W3 (scale x)). */
static void run_expert(double *y, mixture *m, double scale)
{
    for (size_t f = 0; f < m->width; f++) {
        double gate = 0.0, up = 0.0;
        for (size_t i = 0; i < m->cols; i++) {
            gate += weight_at(m, GATE, f, i) * scale * (double)m->x[i];
            up += weight_at(m, UP, f, i) * scale * (double)m->x[i];
        }
        m->act[f] = gate / (1.0 + exp(-gate)) * up;
    }
    for (size_t i = 0; i < m->cols; i++) {
        y[i] = 0.0;
        for (size_t f = 0; f < m->width; f++)
            y[i] += weight_at(m, DOWN, i, f) * m->act[f];
    }
}

/* What all experts make of the first tokens of the probe. */
static ar_status run_experts(mixture *m, const ar_dump_tensor *x, size_t tokens)
{
    for (size_t j = 0; j < m->n; j++) {
        AR_TRY(read_expert(m, j));
        for (size_t k = 0; k < tokens; k++) {
            AR_TRY(ar_dump_read_f32(x, m->p.token[k] * m->cols, m->cols, m->x));
            run_expert(m->y + (k * m->terms + j) * m->cols, m, 1.0);
        }
    }
    return AR_OK;
}

/* How much of each term there is in a row of token k; returns the share of its squares that they leave. */
static double solve(double *share, const mixture *m, size_t k, const float *row)
{
    const size_t n = m->terms;
    const double *y = m->y + k * n * m->cols;
    double left = 0.0, all = 0.0;
    memset(m->equations, 0, n * (n + 1) * sizeof *m->equations);
    for (size_t i = 0; i < m->cols; i++) {
        for (size_t j = 0; j < n; j++)
            m->at[j] = y[j * m->cols + i];
        m->at[n] = (double)row[i];
        ari_equations_add(m->equations, m->at, n);
    }
    if (!ari_equations_solve(share, m->equations, n))
        return HUGE_VAL;
    for (size_t i = 0; i < m->cols; i++) {
        double off = (double)row[i];
        for (size_t j = 0; j < n; j++)
            off -= share[j] * y[j * m->cols + i];
        left += off * off;
        all += (double)row[i] * (double)row[i];
    }
    return left / all;
}

/* Chooses the form that gives the reference. */
static ar_status choose_form(mixture *m, bool *held, const ar_dump_tensor *x)
{
    double least = ARI_REPLAY_BASE;
    form best = {{0}, false, false, false};
    *held = false;
    for (size_t i = 0; i < FORMS; i++) {
        if (!take_form(m, i))
            continue;
        AR_TRY(run_experts(m, x, 1));
        const double left = solve(m->was, m, 0, m->p.ref[0]);
        if (!(left < least))
            continue;
        *held = true;
        least = left;
        best = m->form;
    }
    m->form = best;
    m->width = m->leaf[best.of[DOWN]].rows * m->leaf[best.of[DOWN]].cols / m->cols;
    return AR_OK;
}

/* --- what there is ------------------------------------------------------------------------------------------------ */

static bool is_there(const mixture *m, double share)
{
    return fabs(share) > m->near;
}

static bool is_same(const mixture *m, double a, double b)
{
    return fabs(a - b) <= m->near * fmax(1.0, fabs(b));
}

/* Of the tokens that were looked at. */
typedef struct finding {
    size_t slots, lacking, moved;
    bool shared, routed;      /* as in the reference */
    bool left_out, elsewhere; /* slots lack their expert, or another expert has their weight */
    bool scaled;              /* each token's experts by one number of its own */
    double times, of_shared;  /* what all of the routed ones, or the shared one, are multiplied by; NaN */
    double sum, sum_was;      /* of a token's weights; NaN: not one number */
} finding;

static void note_number(double *number, bool first, double x, const mixture *m)
{
    *number = first || is_same(m, x, *number) ? x : (double)NAN;
}

static void note_token(finding *f, const mixture *m, size_t k)
{
    const double *was = m->was + k * m->terms, *is = m->is + k * m->terms;
    double sum = 0.0, sum_was = 0.0, by = (double)NAN;
    size_t gone = 0, came = 0, held = 0;
    for (size_t j = 0; j < m->n; j++) {
        const bool there = is_there(m, was[j]), same = is_same(m, is[j], was[j]);
        size_t at = 0;
        sum += is[j], sum_was += was[j];
        f->routed = f->routed && same;
        f->left_out = f->left_out && (same || (there && !is_there(m, is[j])));
        f->slots += there;
        came += !same && is_there(m, is[j]);
        by = there && by != by ? is[j] / was[j] : by;
        f->scaled = f->scaled && is_same(m, is[j], there ? by * was[j] : 0.0);
        if (!there || same)
            continue;
        f->lacking += !is_there(m, is[j]);
        gone++;
        while (at < m->n && (is_same(m, was[at], is[at]) || !is_same(m, is[at], was[j])))
            at++;
        held += at < m->n;
    }
    f->elsewhere = f->elsewhere && gone == held && came == gone;
    f->moved += held;
    note_number(&f->times, k == 0, by, m);
    note_number(&f->sum, k == 0, sum, m);
    note_number(&f->sum_was, k == 0, sum_was, m);
    if (m->terms > m->n) {
        f->shared = f->shared && is_same(m, is[m->n], was[m->n]);
        note_number(&f->of_shared, k == 0, is[m->n] / was[m->n], m);
    }
}

/* The experts that have others' tokens, as "1 for 4". */
static void say_moved(ari_trace *t, const mixture *m)
{
    ari_text who = ari_list(t, "who");
    size_t said = 0;
    for (size_t j = 0; j < m->n * m->n && said < 4; j++) {
        const size_t from = j / m->n, to = j % m->n;
        bool is = false;
        for (size_t k = 0; k < m->p.tokens; k++) {
            const double *was = m->was + k * m->terms, *here = m->is + k * m->terms;
            is = is || (is_there(m, was[from]) && !is_same(m, here[from], was[from]) &&
                        !is_same(m, here[to], was[to]) && is_same(m, here[to], was[from]));
        }
        if (is)
            ari_say(&who, "%s%zu for %zu", said++ ? ", " : "", to, from);
    }
}

static bool is_in(const float *x, size_t n, double share)
{
    size_t i = 0;
    while (i < n && !ari_is_near(share, (double)x[i], ARI_KNOWN))
        i++;
    return i < n;
}

/* A tensor that has each token's weights in its row, and those that the token has here in rows of others. */
static ar_status look_for_weights(ari_trace *t, const mixture *m, const ar_dump_tensor *of)
{
    const ari_case *c = m->p.c;
    const size_t each = of->count / c->grid.rows;
    bool are = is_within(c, of) && ari_order_of(of->name, c->path).pass == 'f' && of->count <= MOST_WEIGHT &&
               of->count == c->grid.rows * each && each <= m->n;
    float *x = NULL;
    if (!are)
        return AR_OK;
    AR_TRY(ARI_ALLOC(&x, of->count, of->name));
    const ar_status st = ar_dump_read_f32(of, 0, of->count, x);
    for (size_t i = 0; i < m->p.tokens * m->terms && st == AR_OK && are; i++) {
        if (i % m->terms < m->n && is_there(m, m->was[i]))
            are = is_in(x + m->p.token[i / m->terms] * each, each, m->was[i]) && is_in(x, of->count, m->is[i]);
    }
    if (are) {
        t->flags |= ARI_IF(ROWS);
        ari_words(t, "weights", "%s", of->name);
    }
    free(x);
    return st;
}

static ar_status look_at_shares(ari_trace *t, const mixture *m)
{
    finding f = {.shared = true, .routed = true, .left_out = true, .elsewhere = true, .scaled = true};
    for (size_t k = 0; k < m->p.tokens; k++)
        note_token(&f, m, k);
    const bool counted = f.of_shared > 1.5 && is_same(m, f.of_shared, rint(f.of_shared));
    if (f.shared == f.routed || (f.routed && !counted && !is_same(m, f.of_shared, 0.0)))
        return AR_OK;
    if (f.routed)
        ari_trace_set(t, counted ? ARI_FOUND_MIXTURE : ARI_FOUND_SHARED_EXPERT, counted ? ARI_IF(ALL) : ARI_IF(ZERO));
    else if (f.left_out)
        ari_trace_set(t, ARI_FOUND_EXPERTS, ARI_IF(SOME));
    else if (f.scaled)
        ari_trace_set(t, ARI_FOUND_MIXTURE,
                      is_same(m, f.sum_was, 1.0) ? ARI_IF(ZERO)
                      : is_same(m, f.sum, 1.0)   ? ARI_IF(ONE)
                                                 : ARI_IF(COUNT));
    else
        ari_trace_set(t, ARI_FOUND_MIXTURE, f.elsewhere ? ARI_IF(EXCHANGED) : 0);
    ari_count(t, "lacking", f.lacking);
    ari_count(t, "moved", f.moved);
    ari_count(t, "slots", f.slots);
    ari_number(t, "times", f.routed ? f.of_shared : f.times);
    say_moved(t, m);
    for (size_t i = 0; i < ar_dump_count(m->p.c->known->reference) && t->flags == 0; i++)
        AR_TRY(look_for_weights(t, m, ar_dump_at(m->p.c->known->reference, i)));
    return AR_OK;
}

/* --- what is not a sum of these ----------------------------------------------------------------------------------- */

/* The row of token k if each weight multiplies what its expert gets; gives the share of the other's squares that it
 * leaves. */
static ar_status weigh_inputs(double *left, mixture *m, size_t k, const ar_dump_tensor *x)
{
    const double *was = m->was + k * m->terms, *shared = m->y + (k * m->terms + m->n) * m->cols;
    double off = 0.0, all = 0.0, *sum = m->spare, *y = m->spare + m->cols;
    memset(sum, 0, m->cols * sizeof *sum);
    AR_TRY(ar_dump_read_f32(x, m->p.token[k] * m->cols, m->cols, m->x));
    for (size_t j = 0; j < m->n; j++) {
        if (!is_there(m, was[j]))
            continue;
        AR_TRY(read_expert(m, j));
        run_expert(y, m, was[j]);
        for (size_t i = 0; i < m->cols; i++)
            sum[i] += y[i];
    }
    for (size_t i = 0; i < m->cols; i++) {
        const double v = (double)m->p.val[k][i];
        off += pow(v - sum[i] - (m->terms > m->n ? was[m->n] * shared[i] : 0.0), 2.0);
        all += v * v;
    }
    *left = off / all;
    return AR_OK;
}

/* Rows of all tokens: what each expert makes of each. */
typedef struct rows {
    double *y; /* [tokens][n][cols] */
    size_t tokens;
} rows;

static bool has_row(const rows *r, const mixture *m, const double *row)
{
    double most = 0.0;
    for (size_t f = 0; f < m->cols; f++)
        most += ARI_REPLAY_BASE * row[f] * row[f];
    for (size_t i = 0; i < r->tokens * m->n; i++) {
        double off = 0.0;
        for (size_t f = 0; f < m->cols && off <= most; f++)
            off += pow(row[f] - r->y[i * m->cols + f], 2.0);
        if (off <= most)
            return true;
    }
    return false;
}

/* True if one of the token's experts, or two (one != other), made their rows of another token, and the others theirs of
 * this one. */
static bool have_others(const rows *r, const mixture *m, size_t k, size_t one, size_t other)
{
    const double *was = m->was + k * m->terms, *y = m->y + k * m->terms * m->cols;
    double *left = m->spare, *second = left + m->cols;
    bool have = false;
    for (size_t f = 0; f < m->cols; f++) {
        left[f] = (double)m->p.val[k][f];
        for (size_t j = 0; j < m->terms; j++)
            left[f] -= j == one || j == other ? 0.0 : was[j] * y[j * m->cols + f];
    }
    for (size_t i = 0; i < (one == other ? 1 : r->tokens * m->n) && !have; i++) {
        for (size_t f = 0; f < m->cols; f++)
            second[f] = (left[f] - (one == other ? 0.0 : was[one] * r->y[i * m->cols + f])) / was[other];
        have = has_row(r, m, second);
    }
    return have;
}

static bool has_some_elsewhere(const rows *r, const mixture *m, size_t k)
{
    const double *was = m->was + k * m->terms;
    bool has = false;
    for (size_t i = 0; i < m->n * m->n && !has; i++) {
        const size_t one = i / m->n, other = i % m->n;
        has = one <= other && is_there(m, was[one]) && is_there(m, was[other]) && have_others(r, m, k, one, other);
    }
    return has;
}

/* Two tokens with a row of another token's are no accident. */
static ar_status look_at_rows(ari_trace *t, mixture *m, const ar_dump_tensor *x)
{
    rows r = {.tokens = m->p.c->grid.rows};
    size_t found = 0;
    ar_status st = AR_OK;
    if (r.tokens * m->n * m->cols > MOST_WEIGHT || r.tokens > MOST_WORK / (m->n * m->width * m->cols))
        return AR_OK;
    AR_TRY(ARI_ALLOC(&r.y, r.tokens * m->n * m->cols, "rows of experts"));
    for (size_t j = 0; j < m->n; j++) {
        AR_TRY_TO(done, st, read_expert(m, j));
        for (size_t i = 0; i < r.tokens; i++) {
            AR_TRY_TO(done, st, ar_dump_read_f32(x, i * m->cols, m->cols, m->x));
            run_expert(r.y + (i * m->n + j) * m->cols, m, 1.0);
        }
    }
    for (size_t k = 0; k < m->p.tokens; k++)
        found += has_some_elsewhere(&r, m, k);
    if (found >= 2)
        ari_trace_set(t, ARI_FOUND_MIXTURE, ARI_IF(TOKENS));
    ari_count(t, "found", found);
    ari_count(t, "tokens", m->p.tokens);
done:
    free(r.y);
    return st;
}

/* --- the look ----------------------------------------------------------------------------------------------------- */

/* True if the other dump has the same, or has it not. */
static ar_status is_right(bool *right, const ari_case *c, const ar_dump_tensor *t)
{
    const ar_dump_tensor *other = t && c->known->other ? ar_dump_find(c->known->other, t->name) : NULL;
    ari_fit f = {0};
    double p = 1.0;
    *right = t && t->count == c->count && (!other || other->count == c->count);
    if (!*right || !other)
        return AR_OK;
    AR_TRY(ari_fit_read(&f, other, t, 0, t->count));
    *right = ari_fit_one(&p, &f) <= ARI_FIT && ari_is_near(p, 1.0, ARI_KNOWN);
    return AR_OK;
}

/* What a shared expert makes; NULL: there is none. */
static const ar_dump_tensor *find_shared(const ari_case *c)
{
    const ar_dump *dump = c->known->reference;
    const ari_order_key own = ari_order_of(c->reference->name, c->path);
    for (size_t i = 0; i < ar_dump_count(dump); i++) {
        const ar_dump_tensor *t = ar_dump_at(dump, i);
        const ari_order_key key = ari_order_of(t->name, ar_dump_path(dump));
        if (is_within(c, t) && key.pass == 'f' && key.step == own.step && t->count == c->count &&
            strstr(t->name + own.stem, "shared"))
            return t;
    }
    return NULL;
}

static ar_status alloc_mixture(mixture *m)
{
    size_t most = 0;
    for (size_t k = 0; k < m->leaves; k++) {
        AR_TRY(ARI_ALLOC(&m->w[k], m->leaf[k].rows * m->leaf[k].cols, m->leaf[k].name));
        most += m->leaf[k].rows + m->leaf[k].cols;
    }
    AR_TRY(ARI_ALLOC(&m->x, m->cols, "a token"));
    AR_TRY(ARI_ALLOC(&m->act, most, "an expert's features"));
    AR_TRY(ARI_ALLOC_ZERO(&m->y, m->p.tokens * m->terms * m->cols, "experts' outputs"));
    AR_TRY(ARI_ALLOC(&m->spare, 2 * m->cols, "rows"));
    AR_TRY(ARI_ALLOC(&m->equations, m->terms * (m->terms + 1), "equations"));
    AR_TRY(ARI_ALLOC(&m->at, m->terms + 1, "equations"));
    AR_TRY(ARI_ALLOC(&m->was, m->p.tokens * m->terms, "shares of experts"));
    return ARI_ALLOC(&m->is, m->p.tokens * m->terms, "shares of experts");
}

/* y of the shared expert, for all tokens of the probe. */
static ar_status read_shared(mixture *m, const ar_dump_tensor *shared)
{
    for (size_t k = 0; shared && k < m->p.tokens; k++) {
        AR_TRY(ar_dump_read_f32(shared, m->p.token[k] * m->cols, m->cols, m->x));
        for (size_t i = 0; i < m->cols; i++)
            m->y[(k * m->terms + m->n) * m->cols + i] = (double)m->x[i];
    }
    return AR_OK;
}

static ar_status look_at_mixture(ari_trace *t, mixture *m, const ar_dump_tensor *x, const ar_dump_tensor *shared)
{
    bool held = false, sums = true, inputs = true;
    double worst = 0.0, most = 0.0;
    AR_TRY(alloc_mixture(m));
    AR_TRY(read_shared(m, shared));
    AR_TRY(choose_form(m, &held, x));
    if (!held || m->p.tokens * m->n > MOST_WORK / (m->width * m->cols))
        return AR_OK;
    AR_TRY(run_experts(m, x, m->p.tokens));
    for (size_t k = 0; k < m->p.tokens; k++) {
        worst = fmax(worst, solve(m->was + k * m->terms, m, k, m->p.ref[k]));
        sums = solve(m->is + k * m->terms, m, k, m->p.val[k]) <= ARI_REPLAY_BASE && sums;
    }
    if (!(worst <= ARI_REPLAY_BASE))
        return AR_OK;
    m->near = fmax(ARI_KNOWN, 4.0 * sqrt(worst));
    if (sums)
        return look_at_shares(t, m);
    for (size_t k = 0; k < m->p.tokens && inputs; k++) {
        double left = HUGE_VAL;
        AR_TRY(weigh_inputs(&left, m, k, x));
        inputs = left <= ARI_REPLAY_BASE;
        most = fmax(most, left);
    }
    if (!inputs)
        return look_at_rows(t, m, x);
    ari_trace_set(t, ARI_FOUND_EXPERTS, ARI_IF(OF_INPUT));
    ari_number(t, "left", most);
    return AR_OK;
}

static void mixture_free(mixture *m)
{
    for (size_t k = 0; k < LEAVES; k++)
        free(m->w[k]);
    free(m->x);
    free(m->act);
    free(m->y);
    free(m->spare);
    free(m->equations);
    free(m->at);
    free(m->was);
    free(m->is);
    free(m);
}

ar_status ari_measure_mixture(ari_trace *t, const ari_case *c)
{
    const ar_dump_tensor *x = ari_replay_input(c, ARI_NORM2), *shared = find_shared(c);
    mixture *m = NULL;
    bool right = false, same = true;
    if (!ari_may_replay(c) || ari_replay_input(c, ARI_ROUTES))
        return AR_OK;
    AR_TRY(ARI_ALLOC_ZERO(&m, 1, "experts"));
    ari_probe_choose_rows(&m->p, c);
    m->cols = c->grid.cols;
    ar_status st = AR_OK;
    if (m->p.tokens == 0 || !find_leaves(m))
        goto done;
    m->terms = m->n + (shared != NULL);
    AR_TRY_TO(done, st, is_right(&right, c, x));
    if (shared)
        AR_TRY_TO(done, st, is_right(&same, c, shared));
    if (right && same && 2 * m->terms <= m->cols) /* else any row would be such a sum */
        st = look_at_mixture(t, m, x, shared);
done:
    mixture_free(m);
    return st;
}
