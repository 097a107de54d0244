/* SPDX-License-Identifier: Apache-2.0 */
/* Attention computed again from q, k and v: scale, mask, rotary embedding, order of heads. */
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/replay/replay.h"

enum { MOST_HEAD = 256, MOST_MISTAKES = 80, MOST_SCORES = 1 << 28 };

typedef enum pairs { NO_PAIRS, HALVES, NEIGHBOURS } pairs;
/* q|k|v; for each KV head its queries, k, v; or its k, v, queries */
typedef enum packing { SEPARATE, STRAIGHT, BY_HEADS, KEYS_FIRST } packing;

typedef struct recipe {
    pairs pairs;
    packing packing;
    size_t head, turned;          /* turned: features of a head that are rotated, the first ones */
    double theta, stretch, scale; /* stretch divides positions; scale: of 1/sqrt(head) */
    double cap;                   /* of scores: cap tanh(score / cap); 0: none */
    bool not_q, not_k, of_v, turned_back, tiled, feature_major, by_lane, exchanged, reversed, over_queries;
    bool not_own;        /* the query's own key is unseen */
    size_t ahead;        /* keys after the query that it sees */
    size_t window;       /* keys that it sees in all; 0: all */
    size_t cut;          /* from it on a second document; 0: none */
    size_t from, hidden; /* so many keys from this one on are unseen */
    size_t restart;
} recipe;

typedef struct attention {
    ari_probe p;
    float *x[3]; /* q, k, v of the sample, [seq][width]; of a packed one x[0] alone */
    size_t width[3];
    size_t q, kv;                       /* features of q, of k */
    double *k, *one, *weight, *context; /* [seq][head], [head], [seq], [tokens][q] */
    double *cosine, *sine;              /* [seq][head / 2] of the recipe */
    double *column;                     /* [seq]: of each key, the logarithm of the sum over queries */
} attention;

/* --- one recipe --------------------------------------------------------------------------------------------------- */

/* Where a head of q (0), k (1) or v (2) begins in a row. */
static size_t start_of(const attention *a, const recipe *r, unsigned of, size_t head)
{
    const size_t d = r->head, group = a->q / a->kv;
    const size_t keys = r->packing == KEYS_FIRST ? 0 : group, queries = r->packing == KEYS_FIRST ? 2 : 0;
    if (r->packing >= BY_HEADS && of == 0)
        return (head / group * (group + 2) + queries + head % group) * d;
    if (r->packing >= BY_HEADS)
        return (head * (group + 2) + keys + of - 1) * d;
    if (r->feature_major)
        return head;
    return (r->packing == STRAIGHT && of > 0 ? a->q + (of - 1) * a->kv : 0) + head * d;
}

/* A head's vector, turned as its position has it. */
static void take(double *out, const attention *a, const recipe *r, unsigned which, size_t head, size_t token)
{
    const unsigned of = r->exchanged && which < 2 ? 1U - which : which, from = r->packing == SEPARATE ? of : 0;
    const size_t d = r->head, n = (which == 0 ? a->q : a->kv) / d, step = r->feature_major ? n : 1;
    const float *x = a->x[from] + token * a->width[from] + start_of(a, r, of, head);
    for (size_t i = 0; i < d; i++)
        out[i] = (double)x[i * step];
    if (r->pairs == NO_PAIRS || (which == 0 ? r->not_q : which == 1 ? r->not_k : !r->of_v))
        return;
    const size_t half = r->turned / 2;
    for (size_t i = 0; i < half; i++) {
        const size_t u = r->pairs == HALVES ? i : 2 * i, w = r->pairs == HALVES ? i + half : 2 * i + 1;
        const double s = a->sine[token * half + i], co = a->cosine[token * half + i], x0 = out[u], x1 = out[w];
        out[u] = x0 * co - x1 * s;
        out[w] = x1 * co + x0 * s;
    }
}

static void fill_angles(attention *a, const recipe *r)
{
    const size_t n = r->turned / 2;
    for (size_t i = 0; i < n && r->pairs != NO_PAIRS; i++) {
        const double speed = pow(r->theta, -2.0 * (double)i / (double)r->turned) / r->stretch;
        for (size_t token = 0; token < a->p.seq; token++) {
            const double angle = (double)(r->restart ? token % r->restart : token) * speed;
            a->cosine[token * n + i] = cos(angle);
            a->sine[token * n + i] = r->turned_back ? -sin(angle) : sin(angle);
        }
    }
}

static bool is_seen(const recipe *r, size_t query, size_t key)
{
    return !(key >= r->from && key - r->from < r->hidden) && !(r->not_own && key == query) &&
           (key <= query || key - query <= r->ahead) && (r->window == 0 || key + r->window > query) &&
           (query < r->cut || key >= r->cut);
}

/* A query's scores, its vector in a->one; returns the largest. */
static double score(attention *a, const recipe *r, size_t head, size_t query)
{
    const size_t d = r->head;
    const double scale = r->scale / sqrt((double)d);
    double top = -HUGE_VAL;
    take(a->one, a, r, 0, head, query);
    for (size_t k = 0; k < a->p.seq; k++) {
        double sum = 0.0;
        for (size_t i = 0; is_seen(r, query, k) && i < d; i++)
            sum += a->one[i] * a->k[k * d + i];
        sum = r->cap > 0.0 ? r->cap * tanh(sum * scale / r->cap) : sum * scale;
        a->weight[k] = is_seen(r, query, k) ? sum : -HUGE_VAL;
        top = fmax(top, a->weight[k]);
    }
    return top;
}

static void fill_columns(attention *a, const recipe *r, size_t head)
{
    for (size_t k = 0; k < a->p.seq; k++)
        a->column[k] = -HUGE_VAL;
    for (size_t query = 0; query < a->p.seq; query++) {
        (void)score(a, r, head, query);
        for (size_t k = 0; k < a->p.seq; k++) {
            const double x = fmax(a->column[k], a->weight[k]), y = fmin(a->column[k], a->weight[k]);
            a->column[k] = isfinite(x) ? x + log1p(exp(y - x)) : x;
        }
    }
}

/* The softmax of a token's scores, and the mean of v by it, which goes to a row of heads as head `to`. */
static void attend(attention *a, const recipe *r, size_t head, size_t kv, size_t query, double *row, size_t to)
{
    const size_t d = r->head, step = r->by_lane ? a->q / d : 1;
    double *out = row + (r->by_lane ? to : to * d);
    const double top = score(a, r, head, query);
    double sum = 0.0;
    for (size_t i = 0; i < d; i++)
        out[i * step] = 0.0;
    for (size_t k = 0; k < a->p.seq; k++) {
        const double e = isfinite(a->weight[k]) ? exp(a->weight[k] - (r->over_queries ? a->column[k] : top)) : 0.0;
        if (e == 0.0)
            continue;
        sum += e;
        take(a->one, a, r, 2, kv, k);
        for (size_t i = 0; i < d; i++)
            out[i * step] += e * a->one[i];
    }
    for (size_t i = 0; i < d && !r->over_queries; i++)
        out[i * step] /= sum; /* NaN where it sees no key: what comes out then is every program's own choice */
}

/* All heads of the probe's tokens; token by token through the last layer. */
static void replay(attention *a, const recipe *r)
{
    const size_t d = r->head, heads = a->q / d, groups = a->kv / d;
    size_t taken = SIZE_MAX;
    fill_angles(a, r);
    for (size_t h = 0; h < heads; h++) {
        const size_t kv = r->tiled ? h % groups : h / (heads / groups), to = r->reversed ? heads - 1 - h : h;
        for (size_t k = 0; kv != taken && k < a->p.seq; k++)
            take(a->k + k * d, a, r, 1, kv, k);
        taken = kv;
        if (r->over_queries)
            fill_columns(a, r, h);
        for (size_t k = 0; k < a->p.tokens; k++)
            attend(a, r, h, kv, a->p.token[k], a->context + k * a->q, to);
    }
    for (size_t k = 0; k < a->p.tokens; k++)
        ari_probe_put(&a->p, k, a->context + k * a->q);
}

/* --- numbers of a recipe ------------------------------------------------------------------------------------------ */

static const struct number {
    size_t at; /* in a recipe */
    double low, high;
    ari_properties is;
    bool turns; /* says something of rotary embedding alone */
} numbers[] = {
    {offsetof(recipe, scale), 1.0 / 128.0, 128.0, ARI_IF(ROOT), false},
    {offsetof(recipe, stretch), 1.0 / 64.0, 64.0, ARI_IF(OF_THETA) | ARI_IF(FRACTION), true},
    {offsetof(recipe, theta), 16.0, 1e8, ARI_IF(OF_THETA), true},
    {offsetof(recipe, cap), 0.125, 128.0, ARI_IF(CUT) | ARI_IF(ROOT), false},
};
enum { NUMBERS = sizeof numbers / sizeof *numbers, CAP = 3 };

static double left_by(attention *a, recipe r, size_t number, double value, double (*left)(const ari_probe *))
{
    memcpy((char *)&r + numbers[number].at, &value, sizeof value);
    replay(a, &r);
    return left(&a->p);
}

/* The value that leaves least: the best of values 1.4 apart, then a search between its neighbours by the golden
 * section. Returns what it leaves; the replay of it comes last. */
static double search(double *value, attention *a, recipe r, size_t number, double (*left)(const ari_probe *))
{
    const struct number *n = &numbers[number];
    const double step = 1.4, golden = 0.6180339887498949;
    double at = n->low, least = HUGE_VAL;
    for (double x = n->low; x < n->high; x *= step) {
        const double of = left_by(a, r, number, x, left);
        at = of < least ? x : at;
        least = fmin(of, least);
    }
    double from = log(at / step), to = log(at * step);
    for (int i = 0; i < 40 && least < 0.5; i++) {
        const double one = to - golden * (to - from), two = from + golden * (to - from);
        if (left_by(a, r, number, exp(one), left) < left_by(a, r, number, exp(two), left))
            to = two;
        else
            from = one;
    }
    *value = exp(0.5 * (from + to));
    return left_by(a, r, number, *value, left);
}

/* --- the reference's recipe --------------------------------------------------------------------------------------- */

/* Of one head size, packing and window: rotary bases and pairings, then masks. */
static void try_head(attention *a, recipe *base, double *least, double *exact, recipe r)
{
    static const double thetas[] = {1e4, 5e5, 1e6, 1e5};
    const size_t first = a->p.token[0], window = r.window;
    for (int mask = 0; mask < (first == 0 ? 2 : 4); mask++) {
        for (int turn = 0; turn < (r.turned < r.head ? 8 : 9) && *least > ARI_REPLAY_EXACT; turn++) {
            r.pairs = turn == 8 ? NO_PAIRS : turn < 4 ? HALVES : NEIGHBOURS;
            r.theta = thetas[turn % 4];
            r.ahead = mask == 1 ? a->p.seq : 0;
            r.window = mask == 2 ? first : window;
            r.cut = mask == 3 ? first : 0;
            replay(a, &r);
            (void)ari_probe_try_base(&a->p, exact);
            const double left = ari_probe_base_left(&a->p);
            *base = left < *least ? r : *base;
            *least = fmin(*least, left);
        }
    }
}

/* A window and a cap of scores, where the nearest recipe is near and not the reference. Long windows are powers of 2. */
static void try_window_and_cap(attention *a, recipe *base, double *least, double *exact)
{
    recipe r = *base;
    double value = 0.0;
    r.cut = 0;
    for (size_t window = 1; window < a->p.seq; window += window < 64 ? 1 : window) {
        r.window = window;
        replay(a, &r);
        const double left = ari_probe_base_left(&a->p);
        *base = left < *least ? r : *base;
        *least = fmin(*least, left);
        (void)ari_probe_try_base(&a->p, exact);
    }
    if (base->window > 0)
        try_head(a, base, least, exact, *base);
    if (*least <= ARI_REPLAY_CAPPED)
        return;
    const double left = search(&value, a, *base, CAP, ari_probe_base_left);
    if (4.0 * left < *least && ari_probe_try_base(&a->p, exact))
        base->cap = value;
}

/* Heads, packing, rotary base, mask and cap are in no dump. False: none gives the reference. */
static bool find_base(attention *a, recipe *base)
{
    const size_t known = a->p.c->facts.heads ? a->q / a->p.c->facts.heads : 0;
    const packing from = a->x[1] ? SEPARATE : STRAIGHT, to = a->x[1] ? SEPARATE : BY_HEADS;
    double least = HUGE_VAL, exact = HUGE_VAL;
    for (size_t d = MOST_HEAD; d >= 4 && least > ARI_REPLAY_EXACT; d -= 2) {
        if (a->q % d || a->kv % d || (a->q / d) % (a->kv / d) || (known && d != known))
            continue;
        for (packing p = from; p <= to; p++) {
            for (size_t share = 1; share <= 4 && d % (2 * share) == 0; share *= 2) /* partial rotary: 1/2, 1/4 */
                try_head(a, base, &least, &exact,
                         (recipe){.head = d, .turned = d / share, .packing = p, .stretch = 1.0, .scale = 1.0});
        }
    }
    const double noise = a->p.c->relative * a->p.c->relative;
    if (least > ARI_REPLAY_CAPPED + 4.0 * noise && least < 0.5)
        try_window_and_cap(a, base, &least, &exact);
    return exact <= ARI_REPLAY_BASE;
}

/* --- mistakes ----------------------------------------------------------------------------------------------------- */

typedef struct mistake {
    recipe r;
    ari_properties is;
    const char *number; /* what the recipe's value is called; NULL: none */
    double value;
} mistake;

static void add(mistake *m, size_t *n, recipe r, ari_properties is, const char *number, double value)
{
    if (*n < MOST_MISTAKES)
        m[(*n)++] = (mistake){r, is, number, value};
}

/* Bases that models have, and factors of rope_scaling: far positions turn so often that a search would miss them. */
static void add_speeds(mistake *m, size_t *n, const recipe *base)
{
    static const double theta[] = {1e3, 1e4, 1e5, 2.5e5, 5e5, 1e6, 5e6, 1e7};
    static const double stretch[] = {2.0, 3.0, 4.0, 8.0, 16.0, 32.0, 0.5, 0.25};
    for (size_t i = 0; i < 8; i++) {
        recipe r = *base;
        r.theta = theta[i];
        if (r.theta != base->theta)
            add(m, n, r, ARI_IF(OF_THETA), "factor", r.theta);
        r = *base, r.stretch = stretch[i];
        add(m, n, r, ARI_IF(OF_THETA) | ARI_IF(FRACTION), "factor", r.stretch);
    }
}

static void add_rotations(mistake *m, size_t *n, const recipe *base, size_t width, size_t first)
{
    recipe r = *base;
    if (base->pairs == NO_PAIRS)
        return;
    add_speeds(m, n, base);
    for (size_t i = 0; i < 3; i++) {
        r = *base, r.not_q = i != 1, r.not_k = i != 0;
        add(m, n, r, ARI_IF(ZERO), NULL, 0);
    }
    r = *base, r.of_v = true;
    add(m, n, r, ARI_IF(PAIRS) | ARI_IF(ALL), NULL, 0);
    r = *base, r.theta = pow(base->theta, (double)base->head / (double)width);
    add(m, n, r, ARI_IF(OF_THETA), "factor", r.theta);
    r = *base, r.turned_back = true;
    add(m, n, r, ARI_IF(NEGATIVE), NULL, 0);
    r = *base, r.pairs = base->pairs == HALVES ? NEIGHBOURS : HALVES;
    add(m, n, r, ARI_IF(PAIRS), NULL, 0);
    r = *base, r.restart = first;
    if (first > 1)
        add(m, n, r, ARI_IF(SHIFT), "first", (double)first);
}

static void add_masks(mistake *m, size_t *n, const recipe *base, size_t seq, size_t first)
{
    recipe r = *base;
    if (base->cap > 0.0) {
        r.cap = 0.0;
        add(m, n, r, ARI_IF(CUT) | ARI_IF(ROOT) | ARI_IF(ZERO), NULL, 0);
        r = *base;
    }
    if (base->ahead == 0) {
        r.not_own = true;
        add(m, n, r, ARI_IF(CAUSAL) | ARI_IF(LAST), NULL, 0);
        r = *base, r.ahead = 1;
        add(m, n, r, ARI_IF(CAUSAL) | ARI_IF(ONE), NULL, 0);
        r.ahead = seq;
        add(m, n, r, ARI_IF(CAUSAL), NULL, 0);
    } else {
        r.ahead = 0;
        add(m, n, r, ARI_IF(CAUSAL) | ARI_IF(ALL), NULL, 0);
    }
    r = *base, r.window = base->window ? 0 : first;
    if (first > 0)
        add(m, n, r, ARI_IF(CUT), "window", (double)first);
    r = *base, r.cut = base->cut ? 0 : first;
    if (first > 0)
        add(m, n, r, ARI_IF(CUT) | ARI_IF(SAMPLES), "first", (double)first);
    for (size_t i = 0; i < (first > 0 ? 16 : 8); i++) { /* the first keys; then those from the first wrong token on */
        r = *base, r.from = i < 8 ? 0 : first, r.hidden = i < 15 ? i % 8 + 1 : seq - first;
        if (r.from + r.hidden <= seq && r.hidden < seq)
            add(m, n, r, ARI_IF(CUT) | ARI_IF(LAST) | (i < 8 ? 0 : ARI_IF(SOME)), "window", (double)r.hidden);
    }
}

static void add_heads(mistake *m, size_t *n, const recipe *base, const attention *a)
{
    recipe r = *base;
    r.tiled = true;
    if (a->kv < a->q && a->kv > base->head)
        add(m, n, r, ARI_IF(HEADS), NULL, 0);
    r = *base, r.feature_major = true;
    if (base->packing == SEPARATE)
        add(m, n, r, ARI_IF(PACKED), NULL, 0);
    r = *base, r.by_lane = true;
    add(m, n, r, ARI_IF(PACKED), NULL, 0);
    r = *base, r.packing = base->packing == STRAIGHT ? BY_HEADS : STRAIGHT;
    if (base->packing != SEPARATE)
        add(m, n, r, ARI_IF(PACKED), NULL, 0);
    r.packing = KEYS_FIRST;
    if (base->packing == BY_HEADS)
        add(m, n, r, ARI_IF(PACKED) | ARI_IF(ONE), NULL, 0);
    r = *base, r.exchanged = true;
    if (a->kv == a->q)
        add(m, n, r, ARI_IF(EXCHANGED), NULL, 0);
    r = *base, r.reversed = true;
    add(m, n, r, ARI_IF(INVERSE), NULL, 0);
    r = *base, r.over_queries = true;
    if (a->p.seq * a->p.seq * a->q <= MOST_SCORES)
        add(m, n, r, ARI_IF(INVERSE) | ARI_IF(ALL), NULL, 0);
}

/* A number of the mistake that is found: the best of all. */
static void fit_number(ari_trace *t, attention *a, const recipe *base, size_t number, double *best)
{
    double value = 0.0;
    if (numbers[number].turns && base->pairs == NO_PAIRS)
        return;
    const double left = search(&value, a, *base, number, ari_probe_left);
    if (!(left < *best))
        return;
    *best = left;
    ari_found(t, ARI_FOUND_ATTENTION, numbers[number].is);
    ari_number(t, "factor", value);
}

/* The mistake that leaves least. */
static void find_mistake(ari_trace *t, attention *a, const recipe *base)
{
    mistake m[MOST_MISTAKES];
    double best = ARI_REPLAY_MISTAKE;
    size_t n = 0;
    add_rotations(m, &n, base, a->q, a->p.token[0]);
    add_masks(m, &n, base, a->p.seq, a->p.token[0]);
    add_heads(m, &n, base, a);
    for (size_t i = 0; i < n && best > ARI_REPLAY_EXACT; i++) {
        replay(a, &m[i].r);
        const double left = ari_probe_left(&a->p);
        if (!(left < best))
            continue;
        best = left;
        ari_found(t, ARI_FOUND_ATTENTION, m[i].is);
        if (m[i].number)
            ari_number(t, m[i].number, m[i].value);
        if (m[i].r.from > 0)
            ari_number(t, "from", (double)m[i].r.from);
    }
    for (size_t number = 0; number < NUMBERS && best > ARI_REPLAY_EXACT; number++)
        fit_number(t, a, base, number, &best);
    if (t->kind != ARI_FOUND_NOTHING)
        ari_number(t, "left", best);
}

/* --- dropout ------------------------------------------------------------------------------------------------------ */

enum { MOST_SHARES = 48 };

/* What each head takes from each key up to the token's own, as the features that are looked at: [heads * keys][outs];
 * of which weight. */
static void fill_shares(attention *a, const recipe *r, size_t token, double (*share)[ARI_PROBE_FEATURES],
                        double *weight)
{
    const size_t d = r->head, heads = a->q / d, keys = token + 1, group = a->q / a->kv;
    for (size_t h = 0; h < heads; h++) {
        double sum = 0.0;
        for (size_t k = 0; k < a->p.seq; k++)
            take(a->k + k * d, a, r, 1, h / group, k);
        const double top = score(a, r, h, token);
        for (size_t k = 0; k < a->p.seq; k++)
            sum += exp(a->weight[k] - top);
        for (size_t k = 0; k < keys; k++) {
            weight[h * keys + k] = exp(a->weight[k] - top) / sum;
            memset(a->context, 0, a->q * sizeof *a->context);
            take(a->one, a, r, 2, h / group, k);
            for (size_t i = 0; i < d; i++)
                a->context[h * d + i] = weight[h * keys + k] * a->one[i];
            ari_probe_put(&a->p, 0, a->context);
            for (size_t i = 0; i < a->p.outs; i++)
                share[h * keys + k][i] = a->p.is[i] - (double)a->p.bias[i];
        }
    }
}

/* Gauss's elimination with the largest pivots; false: the equations say nothing of some unknown. */
static bool solve(double (*m)[MOST_SHARES + 1], size_t n)
{
    for (size_t col = 0; col < n; col++) {
        size_t best = col;
        for (size_t row = col + 1; row < n; row++)
            best = fabs(m[row][col]) > fabs(m[best][col]) ? row : best;
        if (!(fabs(m[best][col]) > 1e-9 * fabs(m[0][0])))
            return false;
        for (size_t i = 0; i <= n; i++) {
            const double x = m[col][i];
            m[col][i] = m[best][i];
            m[best][i] = x;
        }
        for (size_t row = 0; row < n; row++) {
            const double by = row == col ? 0.0 : m[row][col] / m[col][col];
            for (size_t i = col; i <= n; i++)
                m[row][i] -= by * m[col][i];
        }
    }
    for (size_t row = 0; row < n; row++)
        m[row][n] /= m[row][row];
    return true;
}

/* By how much each share counts in the other's values of a token, by least squares; NaN where rounding hides it. Returns
 * how many, 0: unknown. */
static size_t find_counts(double *count, attention *a, const recipe *r, size_t token)
{
    double share[MOST_SHARES][ARI_PROBE_FEATURES], m[MOST_SHARES][MOST_SHARES + 1], weight[MOST_SHARES];
    const size_t n = a->q / r->head * (token + 1), row = a->p.sample * a->p.seq + token, cols = a->p.c->grid.cols;
    if (n > MOST_SHARES || 4 * n > 3 * a->p.outs)
        return 0;
    fill_shares(a, r, token, share, weight);
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k <= n; k++) {
            m[i][k] = 0.0;
            for (size_t f = 0; f < a->p.outs; f++) {
                const double value = (double)a->p.c->val[row * cols + a->p.out[f]] - (double)a->p.bias[f];
                m[i][k] += share[i][f] * (k < n ? share[k][f] : value);
            }
        }
    }
    if (!solve(m, n))
        return 0;
    for (size_t i = 0; i < n; i++)
        count[i] = weight[i] > 0.02 ? m[i][n] : (double)NAN;
    return n;
}

/* Whether the shares of the first tokens, which have few, each count not at all or one number of times. */
static void find_dropout(ari_trace *t, attention *a, const recipe *base)
{
    double count[3 * MOST_SHARES], times = 0.0;
    size_t n = 0, zero = 0, known = 0;
    fill_angles(a, base);
    for (size_t token = 0; a->p.w && base->ahead == 0 && token < 3 && token < a->p.seq; token++)
        n += find_counts(count + n, a, base, token);
    for (size_t i = 0; i < n; i++)
        times = fmax(times, count[i]);
    for (size_t i = 0; i < n; i++) {
        known += isnan(count[i]) ? 0 : 1;
        zero += fabs(count[i]) < 1e-3;
        if (fabs(count[i]) >= 1e-3 && !ari_is_near(count[i], times, 1e-3))
            return;
    }
    if (known < 8 || zero == 0 || zero == known || !(times > 1.01))
        return;
    ari_found(t, ARI_FOUND_ATTENTION, ARI_IF(FRACTION));
    ari_number(t, "factor", times);
    ari_number(t, "rate", 1.0 - 1.0 / times);
}

/* --- the measure -------------------------------------------------------------------------------------------------- */

/* q, k and v of the probe's sample, normalised where the model does that; *held: the reference has them. */
static ar_status read_inputs(attention *a, bool *held)
{
    static const ari_role roles[] = {ARI_Q, ARI_K, ARI_V}, normed[] = {ARI_Q_NORM, ARI_K_NORM, ARI_V};
    const ari_case *c = a->p.c;
    const ar_dump_tensor *packed = ari_replay_input(c, ARI_QKV);
    *held = true;
    for (size_t i = 0; i < (packed ? 1 : 3) && *held; i++) {
        const ar_dump_tensor *x = packed ? packed : ari_replay_input(c, normed[i]);
        x = x ? x : ari_replay_input(c, roles[i]);
        AR_TRY(ari_probe_read_input(&a->x[i], &a->width[i], held, &a->p, x));
    }
    const bool in = *held && packed && a->q < a->width[0]; /* q's width is what the last layer reads */
    a->kv = in ? (a->width[0] - a->q) / 2 : packed ? 0 : a->width[1];
    *held = *held && a->kv > 0 && a->q % a->kv == 0 &&
            (packed ? a->q + 2 * a->kv == a->width[0] : a->q == a->width[0] && a->kv == a->width[2]);
    return AR_OK;
}

static ar_status replay_all(ari_trace *t, attention *a)
{
    recipe base = {.pairs = NO_PAIRS};
    AR_TRY(ARI_ALLOC(&a->k, (a->p.seq + 1) * MOST_HEAD, "keys"));
    AR_TRY(ARI_ALLOC(&a->cosine, a->p.seq * MOST_HEAD, "angles"));
    AR_TRY(ARI_ALLOC(&a->weight, 2 * a->p.seq, "scores"));
    AR_TRY(ARI_ALLOC(&a->context, ARI_PROBE_TOKENS * a->q, "context"));
    a->column = a->weight + a->p.seq;
    a->one = a->k + a->p.seq * MOST_HEAD;
    a->sine = a->cosine + a->p.seq * (MOST_HEAD / 2);
    if (!find_base(a, &base))
        return AR_OK;
    find_mistake(t, a, &base);
    if (t->kind == ARI_FOUND_NOTHING)
        find_dropout(t, a, &base);
    return AR_OK;
}

ar_status ari_measure_attention(ari_trace *t, const ari_case *c)
{
    const ari_role role = ari_replay_role(c);
    attention a = {.k = NULL};
    ar_status st = AR_OK;
    bool held = true;
    if (!ari_may_replay(c) || (role != ARI_OUT && role != ARI_ATTENTION && role != ARI_CONTEXT))
        return AR_OK;
    ari_probe_choose(&a.p, c);
    if (role != ARI_CONTEXT)
        AR_TRY_TO(done, st, ari_probe_read_layer(&a.p, &held, ARI_OUT, 0));
    a.q = role == ARI_CONTEXT ? c->grid.cols : a.p.in;
    if (held)
        AR_TRY_TO(done, st, read_inputs(&a, &held));
    if (held)
        st = replay_all(t, &a);
done:
    for (size_t i = 0; i < 3; i++)
        free(a.x[i]);
    free(a.k);
    free(a.weight);
    free(a.context);
    free(a.cosine);
    ari_probe_fini(&a.p);
    return st;
}
