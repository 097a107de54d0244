/* SPDX-License-Identifier: Apache-2.0 */
/* Attention computed by a recipe. */
#include "verify/diagnose/replay/recipe.h"

#include "verify/diagnose/hypothesis.h"
#include "verify/diagnose/replay/search.h"

/* --- heads -------------------------------------------------------------------------------------------------------- */

/* The start of a head of q (0), k (1) or v (2) in a row of the tensor that holds it. */
static size_t start_of(const ari_replayed *a, const ari_recipe *r, size_t of, size_t head)
{
    const size_t d = (size_t)r->head, group = a->q / a->kv, last = r->packing == ARI_KEYS_FIRST ? 2 : 0;
    const size_t own = of == 0 ? group : 1;
    size_t before = 0, all = 0; /* heads of a KV head that are held together */
    for (size_t i = 0; i < 3; i++) {
        const size_t n = a->in[i] != a->in[of] ? 0 : i == 0 ? group : 1;
        before += (i + last) % 3 < (of + last) % 3 ? n : 0;
        all += n;
    }
    return r->packing == ARI_STRAIGHT ? before * a->kv + head * d : (head / own * all + before + head % own) * d;
}

static void turn_head(double *x, const ari_replayed *a, const ari_recipe *r, size_t token)
{
    const size_t half = (size_t)r->turned / 2;
    const bool neighbours = r->pairs == ARI_NEIGHBOURS;
    x += r->turns == ARI_THE_LAST ? (size_t)r->head - 2 * half : 0;
    for (size_t i = 0; i < half; i++) {
        double *u = neighbours ? &x[2 * i] : &x[i], *w = neighbours ? u + 1 : u + half;
        const double sine = a->sine[token * half + i], cosine = a->cosine[token * half + i], was = *u;
        *u = was * cosine - *w * sine;
        *w = *w * cosine + was * sine;
    }
}

static bool is_turned(const ari_recipe *r, size_t of)
{
    const bool not_q = r->turns == ARI_NOT_Q || r->turns == ARI_NEITHER;
    const bool not_k = r->turns == ARI_NOT_K || r->turns == ARI_NEITHER;
    return r->pairs != ARI_NO_PAIRS && (of == 0 ? !not_q : of == 1 ? !not_k : r->turns == ARI_V_TOO);
}

/* A head's vector, turned as its position has it. */
static void take_head(double *out, const ari_replayed *a, const ari_recipe *r, size_t which, size_t head, size_t token)
{
    const size_t of = r->heads == ARI_EXCHANGED && which < 2 ? 1 - which : which, d = (size_t)r->head;
    const bool across = r->heads == ARI_FEATURES_FIRST;
    const size_t step = across ? (which == 0 ? a->q : a->kv) / d : 1;
    const float *x = a->x[a->in[of]] + token * a->width[a->in[of]] + (across ? head : start_of(a, r, of, head));
    for (size_t i = 0; i < d; i++)
        out[i] = (double)x[i * step];
    if (is_turned(r, which))
        turn_head(out, a, r, token);
    if (which == 0 && r->shift != 0.0 && is_turned(r, which))
        turn_head(out, a, r, a->longest);
}

/* Loads the documents of a head's tokens. */
static void load_documents(ari_replayed *a, const ari_recipe *r, size_t head)
{
    const size_t seq = a->longest, parts = r->documents == ARI_OF_OWN_PART ? (size_t)r->parts : 1, n = seq / parts;
    const size_t part = head / (a->q / (size_t)r->head / parts);
    for (size_t token = 0; token < seq; token++)
        a->own[token] =
            r->documents == ARI_ONE_DOCUMENT ? 0.0 : a->document[r->documents == ARI_OTHERS][part * n + token % n];
}

static void load_keys(ari_replayed *a, const ari_recipe *r, size_t kv)
{
    for (size_t k = 0; !a->given && kv != a->taken && k < a->keys; k++)
        take_head(a->k + k * (size_t)r->head, a, r, 1, kv, k);
    a->taken = kv;
}

/* --- tables of a recipe ------------------------------------------------------------------------------------------- */

static void fill_angles(ari_replayed *a, const ari_recipe *r)
{
    const size_t n = (size_t)r->turned / 2;
    const bool restart = r->restart > 0.0;
    for (size_t i = 0; i < n && r->pairs != ARI_NO_PAIRS; i++) {
        const double speed = pow(r->theta, -2.0 * (double)i / r->turned) / r->stretch;
        for (size_t token = 0, first = 0; token < a->longest; token++) {
            if (r->restart < 0.0 && token > 0 && a->document[0][token] != a->document[0][token - 1])
                first = token;
            const bool ordered = r->ringed == ARI_RING_TURNED || r->ringed == ARI_RING_RESTARTS;
            double position = ordered ? a->order[token] : (double)(token - first);
            if (r->ringed == ARI_RING_RESTARTS)
                position = fmod(position, (double)a->p.seq / fabs(r->ring));
            const double angle = (restart ? fmod(position, r->restart) : position) * speed;
            a->cosine[token * n + i] = cos(angle);
            a->sine[token * n + i] = r->turns == ARI_BACKWARDS ? -sin(angle) : sin(angle);
        }
        a->cosine[a->longest * n + i] = cos(r->shift * speed);
        a->sine[a->longest * n + i] = sin(r->shift * speed);
    }
}

/* With a number of heads that is no power of 2, those after the largest power below it have every second slope of the
 * series for twice as many. */
static double slope_of(const ari_replayed *a, const ari_recipe *r, size_t head)
{
    const size_t heads = a->q / (size_t)r->head;
    const double own = (double)(head % (heads / (size_t)r->shards));
    const double power = r->plain ? r->series : exp2(floor(log2(r->series)));
    return r->slope * exp2(-8.0 / power * (own < power ? own + 1.0 : own - power + 0.5));
}

/* --- weights ------------------------------------------------------------------------------------------------------ */

static bool is_seen(const ari_replayed *a, const ari_recipe *r, size_t query, size_t key)
{
    const bool masked = r->ringed == ARI_RING_MASKED, other = a->place[query] != a->place[key];
    const double q = masked ? a->order[query] : (double)query, k = masked ? a->order[key] : (double)key;
    const bool wide = r->window == 0.0 || (r->ringed == ARI_RING_WIDE && other);
    if (r->ringed == ARI_RING_OPEN && other)
        return true;
    if (r->ringed == ARI_RING_STOPS &&
        fmod(a->place[query] - a->place[key] + fabs(r->ring), fabs(r->ring)) == fabs(r->ring) - 1.0)
        return false;
    const bool before = r->ringed == ARI_RING_CAUSAL ? a->order[key] <= a->order[query] : k <= q + r->ahead;
    return !(k >= r->from && k < r->from + r->hidden) && k < (double)a->keys - r->padding && before &&
           (wide || k + r->window > q) && (q < r->cut || k >= r->cut) && a->own[query] == a->own[key];
}

/* A query's scores; none where a key is unseen. */
static void score(ari_replayed *a, const ari_recipe *r, size_t head, size_t query)
{
    const size_t d = (size_t)r->head;
    const double scale = r->scale / sqrt(r->head), slope = r->slope != 0.0 ? slope_of(a, r, head) : 0.0;
    if (!a->given)
        take_head(a->one, a, r, 0, head, query);
    for (size_t k = 0; k < a->keys; k++) {
        double sum = a->given ? log((double)a->given[(head * a->p.seq + query) * a->p.seq + k]) : 0.0;
        a->weight[k] = r->softmax == ARI_UNSEEN_AS_ZERO ? 0.0 : r->softmax == ARI_UNSEEN_AS_CAP ? -r->cap : -HUGE_VAL;
        if (r->softmax != ARI_OVER_ALL && is_seen(a, r, query, k) == (r->softmax == ARI_UNSEEN_ALONE))
            continue;
        for (size_t i = 0; i < d && !a->given; i++)
            sum += a->one[i] * a->k[k * d + i];
        sum = r->cap > 0.0 ? r->cap * tanh(sum * scale / r->cap) : sum * scale;
        a->weight[k] = sum - slope * ((double)query - (double)k);
    }
}

static void fill_columns(ari_replayed *a, const ari_recipe *r, size_t head)
{
    for (size_t k = 0; k < a->keys; k++)
        a->column[k] = -HUGE_VAL;
    for (size_t query = 0; query < a->p.seq; query++) {
        score(a, r, head, query);
        for (size_t k = 0; k < a->keys; k++) {
            const double x = fmax(a->column[k], a->weight[k]), y = fmin(a->column[k], a->weight[k]);
            a->column[k] = isfinite(x) ? x + log1p(exp(y - x)) : x;
        }
    }
}

/* The softmax of scores of the keys of a place, NAN: of all, and a score without a key; returns what it counts among
 * several, 0 without any. */
static double normalise(ari_replayed *a, double place, double sink, bool base_two)
{
    double share = 0.0, top = sink, sum = 0.0;
    for (size_t k = 0; k < a->keys; k++)
        top = isnan(place) || a->place[k] == place ? fmax(top, a->weight[k]) : top;
    for (size_t k = 0; k < a->keys; k++) {
        if (!isnan(place) && a->place[k] != place)
            continue;
        a->weight[k] = isfinite(a->weight[k]) ? exp(a->weight[k] - top) : 0.0;
        sum += a->weight[k];
    }
    sum += isfinite(sink) ? exp(sink - top) : 0.0;
    if (sum > 0.0)
        share = base_two ? exp2(top + log(sum)) : 1.0;
    for (size_t k = 0; k < a->keys; k++)
        a->weight[k] *= (isnan(place) || a->place[k] == place) && sum > 0.0 ? share / sum : 1.0;
    return share;
}

/* A query's weights; NaN if it sees no key: its output then depends on the implementation. */
static void weigh_keys(ari_replayed *a, const ari_recipe *r, size_t head, size_t query)
{
    const bool base_two = r->ringed == ARI_RING_BASE_TWO, apart = r->ringed == ARI_RING_APART || base_two;
    const double sink = r->sinks > 0.0 ? (double)a->sink[head] : -HUGE_VAL;
    double seen = 0.0;
    score(a, r, head, query);
    for (size_t k = 0; r->softmax == ARI_OVER_QUERIES && k < a->keys; k++)
        a->weight[k] = isfinite(a->weight[k]) ? exp(a->weight[k] - a->column[k]) : 0.0;
    if (r->softmax == ARI_OVER_QUERIES)
        return;
    for (double place = 0.0; place < (apart ? fabs(r->ring) : 1.0); place++)
        seen += normalise(a, apart ? place : (double)NAN, sink, base_two);
    for (size_t k = 0; k < a->keys; k++)
        a->weight[k] = r->softmax == ARI_OVER_ALL && !is_seen(a, r, query, k) ? 0.0 : a->weight[k] / seen;
}

/* --- outputs ------------------------------------------------------------------------------------------------------ */

static size_t kv_head(const ari_replayed *a, const ari_recipe *r, size_t head)
{
    const size_t groups = a->kv / (size_t)r->head;
    return r->heads == ARI_DEALT_OUT ? head % groups : head / (a->q / a->kv);
}

/* The mean of v by a head's weights, in the place of a head of a row. */
static void mix_values(ari_replayed *a, const ari_recipe *r, size_t head, size_t query, size_t slot, double *row)
{
    const size_t d = (size_t)r->head, heads = a->q / d, parts = (size_t)r->dealt, part = parts ? heads / parts : heads;
    const size_t at = parts ? slot % part * parts + slot / part : slot;
    const size_t to = r->heads == ARI_REVERSED ? heads - 1 - at : at;
    const size_t step = r->heads == ARI_BY_LANE ? heads : 1;
    double *out = row + (step > 1 ? to : to * d);
    for (size_t i = 0; i < d; i++)
        out[i * step] = 0.0;
    for (size_t k = 0; k < a->keys; k++) {
        if (a->weight[k] == 0.0)
            continue;
        const double chunk = r->ringed == ARI_RING_AT_HOME ? (double)a->p.seq / fabs(r->ring) : 0.0;
        const double from =
            chunk > 0.0 ? a->back[(size_t)(a->place[query] * chunk + fmod(a->order[k], chunk))] : (double)k;
        take_head(a->one, a, r, 2, kv_head(a, r, head), (size_t)from);
        for (size_t i = 0; i < d; i++)
            out[i * step] += r->times * a->weight[k] * a->one[i];
    }
}

static void prepare(ari_replayed *a, const ari_recipe *r)
{
    const size_t seq = a->longest, n = (size_t)fabs(r->ring);
    a->taken = SIZE_MAX;
    for (size_t token = 0; token < seq; token++) {
        size_t index = token;
        a->place[token] = r->ringed ? (double)ari_place_in_ring(&index, seq, n, r->ring < 0.0, token) : 0.0;
        a->order[token] = r->ringed ? a->place[token] * (double)(seq / n) + (double)index : (double)token;
        a->back[(size_t)a->order[token]] = (double)token;
    }
    fill_angles(a, r);
}

void ari_recipe_replay(ari_replayed *a, const ari_recipe *r)
{
    const size_t heads = a->q / (size_t)r->head;
    prepare(a, r);
    if (a->end > 0)
        memcpy(a->context, a->others, a->p.tokens * a->out * sizeof *a->context);
    for (size_t h = a->first; h < (a->end > 0 ? a->end : heads); h++) {
        load_keys(a, r, kv_head(a, r, h));
        load_documents(a, r, h);
        if (r->softmax == ARI_OVER_QUERIES)
            fill_columns(a, r, h);
        for (size_t k = 0; k < a->p.tokens; k++) {
            double *row = a->context + k * a->out;
            const size_t at = a->p.token[k] * heads + h; /* of all [heads, seq] */
            const bool flat = r->heads == ARI_FLATTENED;
            const size_t head = flat ? at / a->p.seq : h, token = flat ? at % a->p.seq : a->p.token[k];
            load_keys(a, r, kv_head(a, r, head));
            load_documents(a, r, head);
            weigh_keys(a, r, head, token);
            if (a->p.heads)
                memcpy(row + h * a->p.seq, a->weight, a->p.seq * sizeof *row);
            else
                mix_values(a, r, head, token, h, row);
        }
    }
    for (size_t k = 0; k < a->p.tokens; k++)
        ari_probe_put(&a->p, k, a->context + k * a->out);
}

void ari_recipe_fix_others(ari_replayed *a, const ari_recipe *r, size_t first, size_t end)
{
    a->first = a->end = 0;
    ari_recipe_replay(a, r);
    memcpy(a->others, a->context, a->p.tokens * a->out * sizeof *a->others);
    a->first = first;
    a->end = end;
}

double ari_recipe_share(ari_replayed *a, const ari_recipe *r, size_t head, size_t query, size_t key)
{
    prepare(a, r);
    load_keys(a, r, kv_head(a, r, head));
    load_documents(a, r, head);
    weigh_keys(a, r, head, query);
    for (size_t k = 0; k < a->keys; k++)
        a->weight[k] = k == key ? a->weight[k] : 0.0;
    memset(a->context, 0, a->q * sizeof *a->context);
    mix_values(a, r, head, query, head, a->context);
    ari_probe_put(&a->p, 0, a->context);
    return a->weight[key];
}

/* --- dropout ------------------------------------------------------------------------------------------------------ */

enum { MOST_SHARES = 48, MOST_TOKENS = 3 };

/* Fits, by least squares over the probed features, how often the other's value of a token counts each head's share of
 * each key up to the token itself; NaN if rounding hides it. Returns the number of counts, 0: unknown. */
static size_t find_counts(double *count, ari_replayed *a, const ari_recipe *r, size_t token)
{
    const size_t n = a->q / (size_t)r->head * (token + 1), at = a->p.sample * a->p.seq + token;
    double share[ARI_PROBE_FEATURES][MOST_SHARES + 1], m[(MOST_SHARES + 1) * (MOST_SHARES + 1)] = {0.0},
                                                                                            weight[MOST_SHARES];
    if (n > MOST_SHARES || 4 * n > 3 * a->p.outs)
        return 0;
    for (size_t i = 0; i < n; i++) {
        weight[i] = ari_recipe_share(a, r, i / (token + 1), token, i % (token + 1));
        for (size_t f = 0; f < a->p.outs; f++)
            share[f][i] = a->p.is[f] - (double)a->p.bias[f];
    }
    for (size_t f = 0; f < a->p.outs; f++) {
        share[f][n] = (double)a->p.c->val[at * a->p.c->grid.cols + a->p.out[f]] - (double)a->p.bias[f];
        ari_equations_add(m, share[f], n);
    }
    if (ari_equations_solve(count, m, n) == HUGE_VAL)
        return 0;
    for (size_t i = 0; i < n; i++)
        count[i] = weight[i] > 0.02 ? count[i] : (double)NAN;
    return n;
}

void ari_recipe_find_dropout(ari_trace *t, ari_replayed *a, const ari_recipe *base)
{
    double count[MOST_TOKENS * MOST_SHARES];
    size_t n = 0;
    for (size_t token = 0; a->p.w && base->ahead == 0.0 && token < MOST_TOKENS && token < a->p.seq; token++)
        n += find_counts(count + n, a, base, token);
    (void)ari_dropped(t, ARI_FOUND_ATTENTION, count, n);
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

ar_status ari_recipe_init(ari_replayed *a)
{
    const size_t seq = a->longest;
    AR_TRY(ARI_TAKE(&a->k, a->p.c->arena, (seq + 1) * ARI_MOST_HEAD, "keys"));
    AR_TRY(ARI_TAKE(&a->cosine, a->p.c->arena, (seq + 1) * ARI_MOST_HEAD, "angles"));
    AR_TRY(ARI_TAKE(&a->weight, a->p.c->arena, 8 * seq, "scores"));
    AR_TRY(ARI_TAKE(&a->context, a->p.c->arena, 2 * ARI_PROBE_TOKENS * a->out, "context"));
    a->one = a->k + seq * ARI_MOST_HEAD;
    a->others = a->context + ARI_PROBE_TOKENS * a->out;
    a->sine = a->cosine + (seq + 1) * (ARI_MOST_HEAD / 2);
    a->column = a->weight + seq;
    a->place = a->column + seq;
    a->order = a->place + seq;
    a->back = a->order + seq;
    a->own = a->back + seq;
    a->document[0] = a->own + seq;
    a->document[1] = a->document[0] + seq;
    return AR_OK;
}
