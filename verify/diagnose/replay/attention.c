/* SPDX-License-Identifier: Apache-2.0 */
/* Attention computed again from q, k and v: first the recipe of the reference is found, then the fault that turns it
 * into the other's. Both searches use one table of the values that a number of a recipe may take. */
#include <stdlib.h>

#include "verify/diagnose/hypothesis.h"
#include "verify/diagnose/replay/recipe.h"
#include "verify/diagnose/replay/search.h"

/* --- what a number of a recipe becomes ---------------------------------------------------------------------------- */

typedef enum becomes {
    TO,      /* each of the row's numbers */
    TIMES,   /* what it is, times each */
    POWERS,  /* what it is, to the power of a head's share of the width, or of the turned features' share of a head */
    COUNTS,  /* 1, 2, .., from 64 on powers of 2 */
    EVEN,    /* 2, 4, .., to a head's features */
    FIRST,   /* the first token that is wrong */
    REST,    /* how many there are from it on */
    ALL,     /* how many there are */
    BETWEEN, /* the best one between the row's two numbers */
} becomes;

/* Conditions under which a row is tried; MAY_BE: a reference may be so. */
enum {
    TURNED = 1,
    SLOPED = 2,
    CAUSAL = 4,
    OPEN = 8,
    CAPPED = 16,
    WINDOWED = 64,
    WIDE = 16384, /* no window */
    GROUPED = 128,
    EQUAL = 256, /* as many heads of k as of q */
    TOGETHER = 512,
    SEPARATE = 1024,
    BY_KV_HEADS = 2048,
    SHORT = 4096, /* few enough tokens for every query's scores */
    MAY_BE = 8192,
    UNTURNED = 65536,
    PARTIAL = 131072, /* some of a head's features are turned, and some not */
    SUNK = 262144,    /* the dump has sinks */
    DOCUMENTED = 524288,
    WHOLE = 1048576,   /* all heads, whose places may change */
    PARTLY = 32,       /* some heads, of which the others are right */
    OF_WEIGHTS = 32768 /* softmax's own weights serve as scores */
};

typedef struct row {
    size_t at; /* in a recipe */
    becomes by;
    unsigned when;
    ari_properties flags;
    const char *fact; /* the number's name; NULL: not stated */
    double number[8];
    int numbers;
    size_t with; /* at: another number, which becomes `to`; 0: none. NAN: the first wrong token */
    double to;
} row;

#define AT(field) offsetof(ari_recipe, field)
#define ROW(field, by, when, is, fact, ...)                                                                  \
    {                                                                                                        \
        AT(field), by, when, is, fact, {__VA_ARGS__}, sizeof((double[]){__VA_ARGS__}) / sizeof(double), 0, 0 \
    }
#define WITH(field, by, when, is, fact, other, to, ...)                                                               \
    {                                                                                                                 \
        AT(field), by, when, is, fact, {__VA_ARGS__}, sizeof((double[]){__VA_ARGS__}) / sizeof(double), AT(other), to \
    }
#define IF ARI_IF
#define BASES 1e3, 1e4, 1e5, 2.5e5, 5e5, 1e6, 5e6, 1e7
#define RINGS 2, -2, 3, -3, 4, -4, 8, -8

/* Bases that models have, and factors of rope_scaling, are tried one by one: far positions turn so often that a search
 * would miss them. */
static const row table[] = {
    ROW(theta, TO, TURNED | MAY_BE, IF(OF_THETA), "factor", BASES),
    ROW(stretch, TO, TURNED | MAY_BE, IF(OF_THETA) | IF(FRACTION), "factor", 2, 3, 4, 8, 16, 32, 0.5, 0.25),
    ROW(theta, POWERS, TURNED, IF(OF_THETA), "factor", 0, 0),
    ROW(turns, TO, TURNED, IF(ZERO), NULL, ARI_NOT_Q, ARI_NOT_K, ARI_NEITHER),
    ROW(turns, TO, TURNED, IF(PAIRS) | IF(ALL), NULL, ARI_V_TOO),
    ROW(turns, TO, TURNED, IF(NEGATIVE), NULL, ARI_BACKWARDS),
    ROW(pairs, TO, TURNED | MAY_BE, IF(PAIRS), NULL, ARI_HALVES, ARI_NEIGHBOURS),
    ROW(turned, EVEN, TURNED | MAY_BE, IF(PAIRS) | IF(COUNT), NULL, 0),
    ROW(turns, TO, PARTIAL | MAY_BE, IF(PAIRS) | IF(LAST), NULL, ARI_THE_LAST, ARI_TURNS_BOTH),
    WITH(theta, TO, UNTURNED, IF(ZERO) | IF(ALL), "factor", pairs, ARI_HALVES, BASES),
    WITH(theta, TO, UNTURNED, IF(ZERO) | IF(ALL), "factor", pairs, ARI_NEIGHBOURS, BASES),
    ROW(restart, FIRST, TURNED, IF(SHIFT), "first", 0),
    ROW(shift, TO, TURNED, IF(SHIFT) | IF(ONE), "shift", 1, -1, 2, -2, 3, -3, 4, -4),
    ROW(times, TO, PARTLY, IF(TWICE) | IF(ZERO), NULL, 0),
    ROW(times, TO, PARTLY, IF(TWICE), NULL, 2, 0.5, 4, 0.25, 8, 0.125, -1),
    ROW(slope, TO, SLOPED, IF(FEATURES) | IF(ZERO), NULL, 0),
    ROW(slope, TIMES, SLOPED, IF(FEATURES) | IF(NEGATIVE), NULL, -1),
    ROW(shards, TO, SLOPED, IF(FEATURES) | IF(OF_TP), NULL, 2, 3, 4, 6, 8, 16, 32, 64),
    ROW(plain, TO, SLOPED | MAY_BE, IF(FEATURES) | IF(ALL), NULL, 0, 1),
    ROW(series, TIMES, SLOPED | MAY_BE, IF(FEATURES) | IF(COUNT), NULL, 2, 0.5, 4, 0.25, 8, 0.125),
    ROW(cap, TO, CAPPED, IF(CUT) | IF(ROOT) | IF(ZERO), NULL, 0),
    ROW(ahead, TO, CAUSAL, IF(CAUSAL) | IF(LAST), NULL, -1),
    ROW(ahead, TO, CAUSAL, IF(CAUSAL) | IF(ONE), NULL, 1),
    ROW(ahead, ALL, CAUSAL, IF(CAUSAL), NULL, 0),
    ROW(ahead, TO, OPEN, IF(CAUSAL) | IF(ALL), NULL, 0),
    ROW(softmax, TO, CAUSAL, IF(CAUSAL) | IF(ROWS), NULL, ARI_OVER_ALL),
    ROW(softmax, TO, CAUSAL, IF(CAUSAL) | IF(SAME), NULL, ARI_UNSEEN_AS_ZERO),
    ROW(softmax, TO, 0, IF(CAUSAL) | IF(EXCHANGED), NULL, ARI_UNSEEN_ALONE),
    ROW(sinks, TO, SUNK | MAY_BE, IF(SOME) | IF(ZERO), NULL, 0, 1),
    ROW(documents, TO, DOCUMENTED, IF(CUT) | IF(SAMPLES) | IF(ALL), NULL, ARI_ONE_DOCUMENT),
    ROW(documents, TO, DOCUMENTED, IF(CUT) | IF(SAMPLES) | IF(ROWS), NULL, ARI_OTHERS),
    WITH(parts, TO, DOCUMENTED, IF(CUT) | IF(SAMPLES) | IF(OF_CP), "ring", documents, ARI_OF_OWN_PART, 2, 3, 4, 8),
    ROW(window, FIRST, WIDE | OF_WEIGHTS, IF(CUT), "window", 0),
    ROW(window, COUNTS, WIDE | MAY_BE | OF_WEIGHTS, IF(CUT), "window", 0),
    ROW(window, TO, WINDOWED, IF(CUT), "window", 0),
    ROW(window, COUNTS, WINDOWED | MAY_BE, IF(CUT) | IF(COUNT), "window", 0),
    ROW(cut, FIRST, 0, IF(CUT) | IF(SAMPLES), "first", 0),
    ROW(hidden, TO, 0, IF(CUT) | IF(LAST), "window", 1, 2, 3, 4, 5, 6, 7, 8),
    ROW(padding, COUNTS, OPEN | MAY_BE, IF(CUT) | IF(PADDED), "padding", 0),
    ROW(padding, TO, 0, IF(CUT) | IF(PADDED) | IF(ZERO), "padding", 0),
    WITH(hidden, TO, 0, IF(CUT) | IF(LAST) | IF(SOME), "window", from, NAN, 1, 2, 3, 4, 5, 6, 7),
    WITH(hidden, REST, 0, IF(CUT) | IF(LAST) | IF(SOME), "window", from, NAN, 0),
    WITH(ring, TO, CAUSAL, IF(CAUSAL) | IF(OF_CP) | IF(TOKENS), NULL, ringed, ARI_RING_MASKED, RINGS),
    WITH(ring, TO, CAUSAL | WINDOWED, IF(CAUSAL) | IF(OF_CP) | IF(TOKENS), NULL, ringed, ARI_RING_CAUSAL, RINGS),
    WITH(ring, TO, CAUSAL, IF(CAUSAL) | IF(OF_CP), NULL, ringed, ARI_RING_OPEN, RINGS),
    WITH(ring, TO, CAUSAL, IF(CUT) | IF(OF_CP) | IF(LAST), NULL, ringed, ARI_RING_STOPS, 3, -3, 4, -4, 8, -8),
    WITH(ring, TO, WINDOWED, IF(CUT) | IF(OF_CP), "window", ringed, ARI_RING_WIDE, RINGS),
    WITH(ring, TO, TURNED, IF(OF_CP) | IF(TOKENS), NULL, ringed, ARI_RING_TURNED, RINGS),
    WITH(ring, TO, TURNED, IF(SHIFT) | IF(OF_CP), NULL, ringed, ARI_RING_RESTARTS, -2, -3, -4, -8),
    WITH(ring, TO, 0, IF(OF_CP) | IF(AVERAGE), NULL, ringed, ARI_RING_APART, RINGS),
    WITH(ring, TO, 0, IF(OF_CP) | IF(POWER), NULL, ringed, ARI_RING_BASE_TWO, RINGS),
    WITH(ring, TO, 0, IF(OF_CP) | IF(SAME), NULL, ringed, ARI_RING_AT_HOME, RINGS),
    ROW(heads, TO, GROUPED, IF(HEADS), NULL, ARI_DEALT_OUT),
    ROW(heads, TO, SEPARATE, IF(PACKED), NULL, ARI_FEATURES_FIRST),
    ROW(heads, TO, WHOLE, IF(PACKED), NULL, ARI_BY_LANE),
    ROW(packing, TO, TOGETHER, IF(PACKED), NULL, ARI_STRAIGHT, ARI_BY_HEADS),
    ROW(packing, TO, BY_KV_HEADS, IF(PACKED) | IF(ONE), NULL, ARI_KEYS_FIRST),
    ROW(heads, TO, EQUAL, IF(EXCHANGED), NULL, ARI_EXCHANGED),
    ROW(heads, TO, WHOLE, IF(INVERSE), NULL, ARI_REVERSED),
    ROW(heads, TO, WHOLE, IF(PACKED) | IF(ROWS), NULL, ARI_FLATTENED),
    ROW(dealt, TO, WHOLE, IF(HEADS) | IF(OF_CP), NULL, 2, 3, 4, 6, 8, 16),
    ROW(softmax, TO, SHORT, IF(INVERSE) | IF(ALL), NULL, ARI_OVER_QUERIES),
    ROW(scale, BETWEEN, MAY_BE | OF_WEIGHTS, IF(ROOT), NULL, 1.0 / 128.0, 128.0),
    ROW(stretch, BETWEEN, TURNED | MAY_BE, IF(OF_THETA) | IF(FRACTION), "factor", 1.0 / 64.0, 64.0),
    ROW(theta, BETWEEN, TURNED | MAY_BE, IF(OF_THETA), "factor", 16.0, 1e8),
    ROW(slope, BETWEEN, SLOPED | MAY_BE, IF(FEATURES), NULL, 1.0 / 128.0, 128.0),
    ROW(cap, BETWEEN, MAY_BE, IF(CUT) | IF(ROOT), "factor", 0.125, 128.0),
    WITH(cap, BETWEEN, CAUSAL, IF(CAUSAL) | IF(SAME) | IF(CUT), "factor", softmax, ARI_UNSEEN_AS_CAP, 0.125, 128.0),
};
enum { ROWS = sizeof table / sizeof *table, MOST_SCORES = 1 << 28 };

static double value_of(const ari_recipe *r, size_t at)
{
    double value;
    memcpy(&value, (const char *)r + at, sizeof value);
    return value;
}

static unsigned conditions(const ari_replayed *a, const ari_recipe *r)
{
    const bool alone = a->in[0] != a->in[1] && a->in[1] != a->in[2];
    return MAY_BE | OF_WEIGHTS | (a->end > 0 ? PARTLY : WHOLE) | (r->pairs != ARI_NO_PAIRS ? TURNED : UNTURNED) |
           (r->pairs != ARI_NO_PAIRS && r->turned < r->head ? PARTIAL : 0) | (a->sink ? SUNK : 0) |
           (r->documents > 0.0 ? DOCUMENTED : 0) | (r->slope != 0.0 ? SLOPED : 0) | (r->ahead == 0.0 ? CAUSAL : OPEN) |
           (r->cap > 0.0 ? CAPPED : 0) | (r->window > 0.0 ? WINDOWED : WIDE) |
           (a->kv < a->q && (double)a->kv > r->head ? GROUPED : 0) | (a->kv == a->q ? EQUAL : 0) |
           (alone ? SEPARATE : TOGETHER) | (!alone && r->packing == ARI_BY_HEADS ? BY_KV_HEADS : 0) |
           (a->p.seq * a->p.seq * a->q <= MOST_SCORES ? SHORT : 0);
}

/* Number i of a row; NAN: none. */
static double number_of(const row *m, int i, const ari_replayed *a, const ari_recipe *r)
{
    const double is = value_of(r, m->at), first = (double)a->p.token[0], seq = (double)a->longest, none = (double)NAN;
    if (m->by == COUNTS) {
        const double count = i < 64 ? i + 1 : ldexp(64.0, i - 63);
        return count < seq ? count : none;
    }
    if (m->by == EVEN)
        return 2.0 * i + 2.0 <= r->head ? 2.0 * i + 2.0 : none;
    if (i >= m->numbers)
        return none;
    switch (m->by) {
    case TIMES:
        return is * m->number[i];
    case POWERS:
        return pow(is, i == 0 ? r->head / (double)a->q : r->turned / r->head);
    case FIRST:
        return first > 0.0 ? first : is;
    case REST:
        return seq - first;
    case ALL:
        return seq;
    default:
        return m->number[i];
    }
}

/* A recipe with a row's number; false: it is the same, or none. */
static bool change(ari_recipe *r, const row *m, const ari_replayed *a, const ari_recipe *from, double value)
{
    const double to = isnan(m->to) ? (double)a->p.token[0] : m->to, seq = (double)a->p.seq;
    *r = *from;
    memcpy((char *)r + m->at, &value, sizeof value);
    if (m->with)
        memcpy((char *)r + m->with, &to, sizeof to);
    return value != value_of(from, m->at) && r->turned <= r->head && fmod(r->turned, 2.0) == 0.0 && r->series >= 1.0 &&
           fmod((double)a->q / r->head, r->shards) == 0.0 &&
           (r->parts == 0.0 || (fmod((double)a->q / r->head, r->parts) == 0.0 && fmod(seq, r->parts) == 0.0)) &&
           (r->dealt == 0.0 || fmod((double)a->q / r->head, r->dealt) == 0.0) && r->hidden < (double)a->keys &&
           r->from + r->hidden <= (double)a->keys && (!m->with || to > 0.0) && (!r->ringed || a->keys == a->p.seq) &&
           (!r->ringed || fmod((double)a->p.seq, r->ring < 0.0 ? -2.0 * r->ring : r->ring) == 0.0);
}

/* --- the search --------------------------------------------------------------------------------------------------- */

typedef struct best {
    double left;
    ari_recipe r;
    const row *by; /* NULL: nothing was found */
} best;

static double try_one(best *b, ari_replayed *a, const ari_recipe *r, const row *by, bool of_base)
{
    ari_recipe_replay(a, r);
    const double left = ari_probe_left(&a->p, of_base);
    if (left < b->left)
        *b = (best){left, *r, by};
    return left;
}

/* A token's residual under the recipe. */
static double left_at(ari_replayed *a, const ari_recipe *r, size_t token, const float *values)
{
    const ari_probe was = a->p;
    const size_t rows = was.seq * (was.heads ? was.heads : 1);
    a->p.tokens = 1;
    a->p.token[0] = token;
    a->p.ref[0] = values + (was.sample * rows + token) * was.c->grid.cols;
    ari_recipe_replay(a, r);
    const double left = ari_probe_left(&a->p, true);
    a->p = was;
    return left;
}

static double try_number(best *b, const row *m, ari_replayed *a, const ari_recipe *from, double value, bool of_base)
{
    ari_recipe r;
    return change(&r, m, a, from, value) ? try_one(b, a, &r, m, of_base) : HUGE_VAL;
}

/* The best of values 1.4 apart, then a search between its neighbours by the golden section. */
static void fit(best *b, const row *m, ari_replayed *a, const ari_recipe *from, bool of_base)
{
    const double step = 1.4, golden = 0.6180339887498949;
    double at = m->number[0], least = HUGE_VAL;
    for (double x = m->number[0]; x < m->number[1]; x *= step) {
        const double left = try_number(b, m, a, from, x, of_base);
        at = left < least ? x : at;
        least = fmin(left, least);
    }
    double low = log(at / step), high = log(at * step);
    for (int i = 0; i < 40 && least < 0.5; i++) {
        const double one = high - golden * (high - low), two = low + golden * (high - low);
        if (try_number(b, m, a, from, exp(one), of_base) < try_number(b, m, a, from, exp(two), of_base))
            high = two;
        else
            low = one;
    }
}

/* The best recipe one row away from `from`, of those with all of `when`. A fitted number explains some of the rounding
 * too, and has to leave far less than a mistake without one. */
static void search(best *b, ari_replayed *a, const ari_recipe *from, unsigned when, bool of_base)
{
    for (const row *m = table; m < table + ROWS && b->left > ARI_REPLAY_EXACT; m++) {
        const best before = *b;
        if ((m->when & ~conditions(a, from)) || (when & ~m->when))
            continue;
        for (int i = 0; m->by != BETWEEN && !isnan(number_of(m, i, a, from)); i++)
            (void)try_number(b, m, a, from, number_of(m, i, a, from), of_base);
        if (m->by == BETWEEN)
            fit(b, m, a, from, of_base);
        if (m->by == BETWEEN && !of_base && before.by && 4.0 * b->left > before.left)
            *b = before;
    }
}

/* --- the reference's recipe --------------------------------------------------------------------------------------- */

/* Documents that share a row are found before anything else is known, since the first token of each sees only itself.
 * Fills the reference's documents, given its heads by r; false: there is one. */
static bool find_documents(ari_replayed *a, ari_recipe r)
{
    double *document = a->document[0];
    size_t begin = 0;
    r.window = 1.0;
    for (size_t token = 0; token < a->p.seq && (conditions(a, &r) & SHORT); token++) {
        const bool begins = left_at(a, &r, token, a->p.c->ref) <= ARI_REPLAY_BASE;
        if (token == 0 && !begins)
            return false;
        begin += token > 0 && begins;
        document[token] = (double)begin;
    }
    return begin > 0 && 4 * begin < a->p.seq;
}

/* The other's documents: each token is of one of those before it or begins one, whichever gives its values. */
static void find_other_documents(ari_replayed *a, ari_recipe r)
{
    double *document = a->document[1], documents = 0.0;
    r.documents = ARI_OTHERS;
    memset(document, 0, a->p.seq * sizeof *document);
    for (size_t token = 1; token < a->p.seq; token++) {
        double least = HUGE_VAL, nearest_one = 0.0;
        for (double i = 0.0; i <= documents + 1.0; i++) {
            const double of = i == 0.0 ? document[token - 1] : documents + 2.0 - i;
            document[token] = of;
            const double left = left_at(a, &r, token, a->p.c->val);
            if (4.0 * left < least) {
                least = left;
                nearest_one = of;
            }
        }
        document[token] = nearest_one;
        documents = fmax(nearest_one, documents);
    }
}

/* Starts with rotary bases, or ALiBi and none, for one head size, packing and pairing; masks come later. */
static void start(best *b, ari_replayed *a, ari_recipe r)
{
    static const double theta[] = {1e4, 5e5, 1e6, 1e5};
    const double first = (double)a->p.token[0];
    for (int mask = 0; mask < (first > 0.0 ? 3 : 2); mask++) {
        for (int turn = 0; turn < (r.pairs == ARI_NO_PAIRS ? 2 : 4) && b->left > ARI_REPLAY_EXACT; turn++) {
            r.theta = r.pairs == ARI_NO_PAIRS ? 0.0 : theta[turn];
            r.slope = r.pairs == ARI_NO_PAIRS && turn == 1;
            r.ahead = mask == 1 ? (double)a->longest : 0.0;
            r.window = mask == 2 ? first : 0.0;
            (void)try_one(b, a, &r, NULL, true);
        }
    }
}

enum { MOST_STEPS = 6 };
static const double most_left = 0.7; /* a recipe that leaves more has nothing of the reference */

/* One number after the other, as long as each leaves less. */
static void improve(best *b, ari_replayed *a, double enough)
{
    for (int i = 0; i < MOST_STEPS && b->left > enough && b->left < most_left; i++) {
        best next = *b;
        search(&next, a, &b->r, MAY_BE, true);
        if (!(1.2 * next.left < b->left))
            return;
        *b = next;
    }
}

/* The nearest of the usual recipes of a pairing and cap, in which documents share the row or not, improved; where keys
 * of padding are unseen, each size of heads is improved, as none is near without that. */
static void find_recipe(best *b, ari_replayed *a, ari_recipe r, double enough)
{
    const size_t heads = a->p.heads ? a->p.heads : a->sinks ? a->sinks : a->p.c->facts.heads;
    const bool padded = r.padding > 0.0;
    best own = *b;
    r.padding = 0.0;
    for (size_t d = ARI_MOST_HEAD; d >= 4 && b->left > ARI_REPLAY_EXACT; d -= 2) {
        if (a->q % d || a->kv % d || (a->q / d) % (a->kv / d) || (heads && d * heads != a->q))
            continue;
        for (int packing = ARI_STRAIGHT; packing <= (a->in[1] == a->in[2] ? ARI_BY_HEADS : ARI_STRAIGHT); packing++) {
            r.head = r.turned = (double)d;
            r.packing = packing;
            r.series = (double)(a->q / d);
            r.sinks = a->sinks * d == a->q;
            if (r.documents > 0.0 && !find_documents(a, r))
                continue;
            for (size_t share = 1; share <= 4 && d % (2 * share) == 0; share *= 2) { /* partial rotary: 1/2, 1/4 */
                r.turned = (double)(d / share);
                start(padded ? &own : b, a, r);
            }
        }
        if (padded)
            improve(&own, a, enough);
        *b = own.left < b->left ? own : *b;
        own.left = HUGE_VAL;
    }
    improve(b, a, enough);
}

/* Heads, packing, rotary base, mask and cap are in no dump. False: no recipe gives the reference. */
static bool find_base(ari_replayed *a, ari_recipe *base)
{
    static const int pairings[] = {ARI_HALVES, ARI_NEIGHBOURS, ARI_NO_PAIRS};
    /* Large scores without a cap yield nothing. */
    static const double documents[] = {0.0, ARI_REFERENCES, 0.0, 0.0, 0.0}, cap[] = {0.0, 0.0, 0.0, 4.0, 32.0},
                        padded[] = {0.0, 0.0, 1.0, 0.0, 0.0};
    enum { PAIRINGS = sizeof pairings / sizeof *pairings, ATTEMPTS = sizeof cap / sizeof *cap };
    const double enough = ARI_REPLAY_CAPPED + 4.0 * a->p.c->relative * a->p.c->relative;
    double exact = HUGE_VAL;
    best b = {.left = HUGE_VAL};
    for (size_t i = 0;
         i < ATTEMPTS * PAIRINGS && b.left > (i < 3 * PAIRINGS || i % PAIRINGS ? enough : ARI_REPLAY_BASE); i++) {
        best own = {.left = HUGE_VAL};
        find_recipe(&own, a,
                    (ari_recipe){.pairs = pairings[i % PAIRINGS],
                                 .documents = documents[i / PAIRINGS],
                                 .cap = cap[i / PAIRINGS],
                                 .padding = padded[i / PAIRINGS],
                                 .theta = 1.0,
                                 .stretch = 1.0,
                                 .scale = 1.0,
                                 .shards = 1.0,
                                 .times = 1.0},
                    enough);
        b = own.left < b.left ? own : b;
    }
    if (!(b.left <= ARI_REPLAY_BASE) || b.r.window == 1.0) /* v alone, which is then what was mixed of it already */
        return false;
    *base = b.r;
    if (base->documents > 0.0)
        (void)find_documents(a, *base); /* as its heads have them */
    ari_recipe_replay(a, base);
    return ari_probe_try_base(&a->p, &exact);
}

/* A mistake in one of n equal parts of the heads alone, of rows with all of `when`. Only one that is found stays chosen. */
static void search_parts(best *b, ari_replayed *a, const ari_recipe *base, size_t n, unsigned when)
{
    const size_t heads = a->q / (size_t)base->head;
    for (size_t i = 0; n > 1 && heads % n == 0 && i < n && !b->by; i++) {
        ari_recipe_fix_others(a, base, heads / n * i, heads / n * (i + 1));
        search(b, a, base, when, false);
    }
    if (!b->by)
        a->first = a->end = 0;
}

static void find_mistake(ari_trace *t, ari_replayed *a, const ari_recipe *base, unsigned when)
{
    best b = {.left = ARI_REPLAY_MISTAKE};
    ari_recipe from = *base;
    for (int i = 0; i < (base->documents > 0.0 ? 2 : 1) && b.left > ARI_REPLAY_EXACT; i++) {
        from.restart = -(double)i; /* positions go on over documents, or not: in the reference it is the same */
        if (from.documents > 0.0)
            find_other_documents(a, from);
        search(&b, a, &from, when, false);
    }
    const size_t heads = a->q / (size_t)base->head,
                 tp = (size_t)ari_ranks_along(&a->p.c->known->mesh, ARI_CUTS_FEATURES);
    if (!b.by)
        search_parts(&b, a, base, tp, when);
    if (!b.by)
        search_parts(&b, a, base, heads, when | PARTLY);
    if (!b.by)
        return;
    const double was = value_of(base, b.by->at), now = value_of(&b.r, b.by->at);
    const ari_properties part = a->end == 0 ? 0 : a->end - a->first == 1 ? IF(BLOCKS) : IF(OF_SHARDS);
    ARI_FINDING(t, ARI_FOUND_ATTENTION, b.by->flags | part | (a->given ? IF(LOG) : 0), {"head", .count = a->first},
                {"last", .count = a->end - (a->end > 0)}, {"heads", .count = heads}, {"was", .number = was},
                {"now", .number = now}, {"times", .number = now / was});
    if (b.by->fact)
        ARI_FACTS(t, {b.by->fact, .number = now != 0.0 ? now : was});
    ARI_FACTS(t, {"from", .number = b.r.from}, {"ring", .count = (size_t)fabs(b.r.ring + b.r.parts)},
              {"left", .number = b.left});
}

/* --- q, k and v --------------------------------------------------------------------------------------------------- */

enum { MOST_VALUES = 8, Q = 0, K = 1, V = 2 };

/* Values of attention that may hold q, k and v: by their roles the three alone, or all that the module's parts give. */
typedef struct values {
    const ar_dump_tensor *of[MOST_VALUES];
    size_t n;
    bool named;
} values;

static values values_of(const ari_case *c)
{
    static const ari_role roles[3][3] = {
        {ARI_Q_NORM, ARI_Q, ARI_Q_HEADS}, {ARI_K_NORM, ARI_K, ARI_K_HEADS}, {ARI_V, ARI_V_HEADS, ARI_V_HEADS}};
    const ar_dump_tensor *packed = ari_replay_input(c, ARI_QKV);
    values v = {.named = true};
    for (size_t i = 0; i < 3; i++) {
        v.of[i] = packed;
        for (size_t k = 0; k < 3 && !v.of[i]; k++)
            v.of[i] = ari_replay_input(c, roles[i][k]);
        v.n += v.of[i] != NULL;
    }
    if (v.n < 3) {
        v.named = false;
        v.n = ari_replay_parts(v.of, MOST_VALUES, c);
    }
    return v;
}

/* True if three values, of which one tensor may hold several, have the widths of q, k and v; with this number of KV
 * heads if q's width is unknown. */
static bool may_be(ari_replayed *a, const ar_dump_tensor *const x[3], size_t kv_heads)
{
    const size_t samples = a->p.c->grid.shape[0], rows = samples * a->p.seq, width = x[Q]->count / rows;
    const bool all = x[Q] == x[K], two = x[K] == x[V];
    const size_t heads = a->p.heads;
    a->keys = x[K]->ndim == 3 && x[Q]->ndim == 3 && x[K]->shape[1] <= a->longest ? x[K]->shape[1] : a->p.seq;
    const size_t last = x[V]->count / (samples * a->keys);
    if (x[Q]->count % rows || x[V]->count % (samples * a->keys) || x[K]->count != x[V]->count || (all && !two) ||
        x[Q] == (all ? NULL : x[V]))
        return false;
    if (heads)
        a->q = all ? width / (heads + 2 * kv_heads) * heads : width;
    a->kv = all ? (width > a->q ? width - a->q : 0) / 2 : two ? last / 2 : last;
    for (size_t i = 0; i < 3; i++)
        a->in[i] = i > Q && x[i] == x[i - 1] ? a->in[i - 1] : i;
    return a->kv > 0 && a->q % a->kv == 0 && (all ? a->q + 2 * a->kv == width : a->q == width) &&
           (!heads || (a->q % heads == 0 && a->q / heads * kv_heads == a->kv));
}

/* Replays attention of these three values. */
static ar_status replay_of(bool *found, ari_trace *t, ari_replayed *a, const ar_dump_tensor *const x[3])
{
    ARI_ARENA_SCOPE(a->p.c->arena);
    bool held = true;
    ari_recipe base;
    for (size_t i = 0; i < 3 && held; i++) {
        ari_probe of = a->p;
        of.seq = i > Q ? a->keys : of.seq;
        a->x[i] = NULL;
        if (a->in[i] == i)
            AR_TRY(ari_probe_read_input(&a->x[i], &a->width[i], &held, &of, x[i]));
    }
    *found = held && find_base(a, &base);
    if (*found)
        find_mistake(t, a, &base, 0);
    if (*found && t->kind == ARI_FOUND_NOTHING && !a->p.heads)
        ari_recipe_find_dropout(t, a, &base);
    return AR_OK;
}

/* Replays a softmax of the logarithms of the reference's weights, when q and k are unknown. */
static void replay_weights(ari_trace *t, ari_replayed *a)
{
    const ari_recipe base = {.head = 1.0, .scale = 1.0, .stretch = 1.0, .series = 1.0, .shards = 1.0, .times = 1.0};
    double exact = HUGE_VAL;
    a->q = a->kv = a->p.heads;
    a->given = a->p.c->ref + a->p.sample * a->out * a->p.seq;
    ari_recipe_replay(a, &base);
    if (ari_probe_try_base(&a->p, &exact))
        find_mistake(t, a, &base, OF_WEIGHTS);
}

/* A parameter of attention that has as many numbers as there may be heads, and is no layer's weight or bias. */
static ar_status read_sinks(ari_replayed *a)
{
    const ar_dump_tensor *t = ari_replay_sinks(a->p.c);
    if (!t || a->p.heads || t->count * 2 > a->q || a->q % t->count)
        return AR_OK;
    a->sinks = t->count;
    return ari_read_values(&a->sink, t, a->p.c->arena);
}

static ar_status replay_all(ari_trace *t, ari_replayed *a)
{
    const values v = values_of(a->p.c);
    const size_t heads = a->p.heads ? a->p.heads : 1;
    bool found = false;
    a->keys = a->longest = a->p.seq;
    for (size_t i = 0; i < v.n && !a->p.heads; i++)
        a->longest = v.of[i]->ndim == 3 && v.of[i]->shape[1] > a->longest ? v.of[i]->shape[1] : a->longest;
    AR_TRY(ari_recipe_init(a));
    AR_TRY(read_sinks(a));
    for (size_t i = 0; i < (v.named ? 1 : v.n * v.n * v.n) && !found; i++) {
        const ar_dump_tensor *const x[3] = {v.of[v.named ? 0 : i / v.n / v.n], v.of[v.named ? 1 : i / v.n % v.n],
                                            v.of[v.named ? 2 : i % v.n]};
        for (size_t kv = heads; kv > 0 && !found; kv--) {
            if (heads % kv == 0 && may_be(a, x, kv))
                AR_TRY(replay_of(&found, t, a, x));
        }
    }
    if (!found && a->p.heads)
        replay_weights(t, a);
    return AR_OK;
}

/* --- the measure -------------------------------------------------------------------------------------------------- */

ar_status ari_measure_attention(ari_trace *t, const ari_case *c)
{
    const bool scores = ari_are_scores(c), mixed = scores || c->role == ARI_CONTEXT;
    ari_replayed a = {.k = NULL};
    bool held = true;
    if (!scores && !(ari_may_replay(c) && (mixed || c->role == ARI_OUT || c->role == ARI_ATTENTION ||
                                           (c->role == ARI_NO_ROLE && memchr(c->own.name, '.', c->own.stem)))))
        return AR_OK;
    ari_probe_choose(&a.p, c);
    if (!mixed)
        AR_TRY(ari_probe_read_layer(&a.p, &held, c->role == ARI_NO_ROLE ? c->role : ARI_OUT));
    a.q = mixed ? c->grid.cols : a.p.in; /* of scores it is not known yet */
    a.out = scores ? a.p.heads * a.p.seq : a.q;
    return held ? replay_all(t, &a) : AR_OK;
}
