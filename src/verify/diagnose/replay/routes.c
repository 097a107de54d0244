/* SPDX-License-Identifier: Apache-2.0 */
/* Routing computed again: the weights of a token's experts from the logits, the logits' gradient from that of the
 * weights. Experts are those whose weight is not zero. */
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/replay/search.h"

enum { MOST_ELEMENTS = 1 << 22 };

/* A router's rows, [tokens][n]. */
typedef struct routes {
    const ari_case *c;
    size_t tokens, n;
    float *z, *weight, *g; /* logits; of the gradient of logits: weights and their gradient */
    double *p;             /* the softmax of a row of z, [n] */
} routes;

ar_status ari_replay_rows(float **gives, bool *held, const ari_case *c, size_t count, ari_role role, char pass)
{
    const ar_dump_tensor *t = ari_replay_value(c, c->known->reference, role, pass);
    const ar_dump_tensor *other = t && c->known->other ? ar_dump_find(c->known->other, t->name) : NULL;
    float *x = NULL;
    *held = *held && t && t->count == count && (!other || other->count == count);
    if (!*held)
        return AR_OK;
    AR_TRY(ari_read_values(gives, t));
    if (!other)
        return AR_OK;
    const ar_status st = ari_read_values(&x, other);
    for (size_t i = 0; st == AR_OK && i < count && *held; i++)
        *held = fabs((double)x[i] - (double)(*gives)[i]) <= ARI_SUMS * (1.0 + fabs((double)(*gives)[i]));
    free(x);
    return st;
}

static ar_status read_rows(float **gives, bool *held, const routes *r, ari_role role, char pass)
{
    return ari_replay_rows(gives, held, r->c, r->tokens * r->n, role, pass);
}

static void softmax(routes *r, size_t t)
{
    for (size_t i = 0; i < r->n; i++)
        r->p[i] = (double)r->z[t * r->n + i];
    (void)ari_softmax(r->p, r->p, r->n);
}

static bool is_off(const routes *r, double expected, float x)
{
    const double off = fabs(expected - (double)x);
    return !(off <= r->c->absolute + (ARI_SUMS + r->c->relative) * fabs(expected));
}

/* --- weights ------------------------------------------------------------------------------------------------------ */

/* Functions of the logits of a token's experts. The reference's is one of the first two. */
enum { NORMALISED, PLAIN, SOFTER, SOFT_AGAIN, SIGMOID, SIGMOID_NORMALISED, EQUAL, ONES, LOGITS, FUNCTIONS };
static const char *const function_names[] = {"a softmax, normalised over the experts chosen",
                                             "a softmax, not normalised",
                                             "a second softmax, over the experts chosen, of the first one's values",
                                             "a second softmax, over all experts, of the first one's values",
                                             "a sigmoid",
                                             "a sigmoid, normalised over the experts chosen",
                                             "one share for each expert chosen",
                                             "1",
                                             "the logits themselves"};

static double term_of(const routes *r, size_t function, size_t t, size_t i)
{
    const double z = (double)r->z[t * r->n + i];
    switch (function) {
    case NORMALISED:
    case PLAIN:
        return r->p[i];
    case SOFTER:
    case SOFT_AGAIN:
        return exp(r->p[i]);
    case SIGMOID:
    case SIGMOID_NORMALISED:
        return 1.0 / (1.0 + exp(-z));
    case LOGITS:
        return z;
    default:
        return 1.0;
    }
}

/* What the terms of the experts of row x are divided by. */
static double divisor_of(const routes *r, size_t function, size_t t, const float *x)
{
    const bool of_all = function == SOFT_AGAIN;
    double sum = 0.0;
    for (size_t i = 0; i < r->n; i++)
        sum += x[i] != 0.0f || of_all ? term_of(r, function, t, i) : 0.0;
    return function == PLAIN || function == SIGMOID || function == ONES || function == LOGITS ? 1.0 : sum;
}

/* True if all rows are this function of the logits. */
static bool are(routes *r, size_t function, const float *x)
{
    for (size_t t = 0; t < r->tokens; t++, x += r->n) {
        softmax(r, t);
        const double by = divisor_of(r, function, t, x);
        for (size_t i = 0; i < r->n; i++) {
            if (x[i] != 0.0f && is_off(r, term_of(r, function, t, i) / by, x[i]))
                return false;
        }
    }
    return true;
}

static size_t function_of(routes *r, const float *x, size_t functions)
{
    size_t k = 0;
    while (k < functions && !are(r, k, x))
        k++;
    return k;
}

/* Tokens with other experts, of as many as before. */
typedef struct others {
    size_t rows, k;
    double gap, size; /* by how much the logits of those chosen fall short at most, and how large logits are there */
    bool fewer;       /* some token has another number of experts */
} others;

static void compare_row(others *o, const float *z, const float *ref, const float *val, size_t n)
{
    double lost = -HUGE_VAL, taken = HUGE_VAL;
    size_t k = 0, is = 0, apart = 0;
    for (size_t i = 0; i < n; i++) {
        const bool was = ref[i] != 0.0f, now = val[i] != 0.0f;
        lost = was && !now ? fmax(lost, (double)z[i]) : lost;
        taken = now && !was ? fmin(taken, (double)z[i]) : taken;
        k += was, is += now, apart += was != now;
    }
    o->k = k > o->k ? k : o->k;
    o->fewer = o->fewer || k != is;
    o->rows += apart > 0;
    if (apart > 0 && k == is && lost - taken >= o->gap) {
        o->gap = lost - taken;
        o->size = fmax(fabs(lost), fabs(taken));
    }
}

static others compare_experts(const routes *r)
{
    others o = {.gap = -HUGE_VAL};
    for (size_t t = 0; t < r->tokens; t++)
        compare_row(&o, r->z + t * r->n, r->c->ref + t * r->n, r->c->val + t * r->n, r->n);
    return o;
}

/* Two logits that bf16 does not keep apart differ by at most this share of them. */
#define NEAR_TIE 0x1p-7

static void look_at_weights(ari_trace *t, routes *r)
{
    const size_t base = function_of(r, r->c->ref, PLAIN + 1);
    const others o = compare_experts(r);
    if (base > PLAIN || o.fewer)
        return;
    const size_t is = o.rows > 0 && are(r, base, r->c->val) ? base : function_of(r, r->c->val, FUNCTIONS);
    if (is == FUNCTIONS || (is == base && o.rows == 0))
        return;
    ari_trace_set(t, ARI_FOUND_ROUTES, is == base ? ARI_IF(EXCHANGED) : is == PLAIN ? ARI_IF(ZERO) : 0);
    t->flags |= is == NORMALISED && is != base ? ARI_IF(ONE) : 0;
    t->flags |= is == base && o.gap <= NEAR_TIE * o.size ? ARI_IF(SAME) : 0;
    ari_count(t, "k", o.k);
    ari_count(t, "rows", o.rows);
    ari_number(t, "gap", o.gap);
    ari_words(t, "function", "%s", function_names[is]);
    ari_words(t, "wanted", "%s", function_names[base]);
}

/* --- the choice --------------------------------------------------------------------------------------------------- */

static bool has_expert(const float *row, size_t k, float expert)
{
    size_t j = 0;
    while (j < k && row[j] != expert)
        j++;
    return j < k;
}

/* Of the experts of two rows the first that is in the first one alone; NAN: none. */
static float only_in(const float *row, const float *other, size_t k)
{
    size_t j = 0;
    while (j < k && has_expert(other, k, row[j]))
        j++;
    return j < k ? row[j] : NAN;
}

/* Adds to o what a token's experts have of the logits that the reference's have not. */
static void compare_choice(others *o, const float *z, const float *ref, const float *val, size_t k, size_t n)
{
    double lost = -HUGE_VAL, taken = HUGE_VAL;
    for (size_t j = 0; j < k; j++) {
        if (!(ref[j] >= 0.0f && ref[j] < (float)n && val[j] >= 0.0f && val[j] < (float)n)) {
            o->fewer = true;
            return;
        }
        lost = has_expert(val, k, ref[j]) ? lost : fmax(lost, (double)z[(size_t)ref[j]]);
        taken = has_expert(ref, k, val[j]) ? taken : fmin(taken, (double)z[(size_t)val[j]]);
    }
    if (lost > -HUGE_VAL && lost - taken >= o->gap) {
        o->gap = lost - taken;
        o->size = fmax(fabs(lost), fabs(taken));
    }
}

/* The fact "who": which expert the token of this row goes to instead. */
static void say_token(ari_trace *t, const ari_case *c, size_t row)
{
    const size_t k = c->grid.cols, seq = c->grid.nd > 2 ? c->grid.shape[c->grid.nd - 2] : c->grid.rows;
    const float *ref = c->ref + row * k, *val = c->val + row * k;
    const float was = only_in(ref, val, k), is = only_in(val, ref, k);
    ari_text who = ari_list(t, "who");
    ari_say(&who, "token %zu", row % seq);
    if (c->grid.nd > 2)
        ari_say(&who, " of sample %zu", row / seq);
    if (!isnan(is) && !isnan(was))
        ari_say(&who, " goes to expert %.0f instead of %.0f", (double)is, (double)was);
    else
        ari_say(&who, isnan(is) ? " lacks expert %.0f" : " goes to expert %.0f too", (double)(isnan(is) ? was : is));
}

/* A row of the case has a token's experts. z: the logits [tokens, r->n] of both; NULL: not known, or they differ. */
static void look_at_choice(ari_trace *t, const routes *r, const float *z)
{
    const ari_case *c = r->c;
    const size_t k = c->grid.cols;
    others o = {.k = k, .gap = -HUGE_VAL};
    size_t first = c->grid.rows;
    for (size_t row = 0; row < c->grid.rows; row++) {
        const float *ref = c->ref + row * k, *val = c->val + row * k;
        if (isnan(only_in(ref, val, k)) && isnan(only_in(val, ref, k)))
            continue;
        first = first == c->grid.rows ? row : first;
        o.rows++;
        if (z)
            compare_choice(&o, z + row * r->n, ref, val, k, r->n);
    }
    const bool moved = first < c->grid.rows;
    ari_trace_set(t, ARI_FOUND_CHOICE, !moved ? ARI_IF(SHIFT) : !z || o.fewer ? ARI_IF(FOREIGN) : 0);
    t->flags |= moved && z && !o.fewer && o.gap >= 0.0 && o.gap <= NEAR_TIE * o.size ? ARI_IF(SAME) : 0;
    say_token(t, c, moved ? first : 0);
    ari_count(t, "rows", o.rows);
    ari_count(t, "k", k);
    ari_number(t, "gap", o.gap);
}

/* --- the gradient of the logits ----------------------------------------------------------------------------------- */

/* Forms of it: of normalised weights and of others, the reference's; of the experts chosen alone; with the sum that
 * weights are divided by taken for a constant. */
enum { OF_NORMALISED, OF_PLAIN, OF_CHOSEN, SUM_DETACHED, FORMS };

static void expected_row(double *dz, routes *r, size_t form, size_t t)
{
    const float *w = r->weight + t * r->n, *g = r->g + t * r->n;
    double chosen = 0.0, sum = 0.0;
    softmax(r, t);
    for (size_t i = 0; i < r->n; i++)
        chosen += w[i] != 0.0f ? r->p[i] : 0.0;
    const double by = form == OF_NORMALISED || form == SUM_DETACHED ? chosen : 1.0;
    for (size_t i = 0; i < r->n; i++)
        sum += w[i] != 0.0f ? r->p[i] / by * (double)g[i] : 0.0;
    for (size_t i = 0; i < r->n; i++) {
        const double of_all = r->p[i] * (form == OF_NORMALISED || form == OF_CHOSEN ? 0.0 : -sum);
        const double own = form == SUM_DETACHED ? (double)g[i] / by - sum : ((double)g[i] - sum) / by;
        dz[i] = w[i] != 0.0f ? r->p[i] * own : of_all;
    }
}

static bool is_form(routes *r, double *dz, size_t form, const float *x)
{
    for (size_t t = 0; t < r->tokens; t++) {
        expected_row(dz, r, form, t);
        for (size_t i = 0; i < r->n; i++) {
            if (is_off(r, dz[i], x[t * r->n + i]))
                return false;
        }
    }
    return true;
}

static size_t form_of(routes *r, double *dz, const float *x)
{
    size_t k = 0;
    while (k < FORMS && !is_form(r, dz, k, x))
        k++;
    return k;
}

static ar_status look_at_gradient(ari_trace *t, routes *r)
{
    static const ari_properties flags[] = {[OF_NORMALISED] = ARI_IF(ONE),
                                           [OF_PLAIN] = ARI_IF(ZERO),
                                           [OF_CHOSEN] = ARI_IF(SOME),
                                           [SUM_DETACHED] = ARI_IF(CUT)};
    double *dz = NULL;
    bool held = true;
    AR_TRY(read_rows(&r->weight, &held, r, ARI_ROUTES, 'f'));
    AR_TRY(read_rows(&r->g, &held, r, ARI_ROUTES, 'b'));
    if (!held)
        return AR_OK;
    AR_TRY(ARI_ALLOC(&dz, r->n, "a row of logits"));
    const size_t base = form_of(r, dz, r->c->ref), is = base <= OF_PLAIN ? form_of(r, dz, r->c->val) : FORMS;
    free(dz);
    if (is < FORMS && is != base)
        ari_trace_set(t, ARI_FOUND_ROUTER, flags[is]);
    return AR_OK;
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

static void look_at_blocks(ari_trace *t, const ari_case *c)
{
    for (size_t n = 2; n <= c->grid.cols && t->kind == ARI_FOUND_NOTHING; n++) {
        if (c->grid.cols % n != 0 || !is_of_blocks(c, n))
            continue;
        ari_trace_set(t, ARI_FOUND_ROUTES, ARI_IF(OF_SHARDS));
        ari_count(t, "n", n);
    }
}

ar_status ari_measure_routes(ari_trace *t, const ari_case *c)
{
    const ari_role role = ari_replay_role(c);
    const bool forward = c->grid.d->pass == 'f';
    routes r = {.c = c, .tokens = c->grid.rows, .n = c->grid.cols};
    bool held = true;
    ar_status st = AR_OK;
    if (c->count > MOST_ELEMENTS)
        return AR_OK;
    if (role == ARI_ROUTES && !forward)
        look_at_blocks(t, c);
    if (role == ARI_CHOSEN && forward) {
        const ar_dump_tensor *z = ari_replay_value(c, c->known->reference, ARI_ROUTER, 'f');
        r.n = z && z->count % r.tokens == 0 && z->count <= MOST_ELEMENTS ? z->count / r.tokens : 0;
        if (r.n > 0)
            st = read_rows(&r.z, &held, &r, ARI_ROUTER, 'f');
        if (st == AR_OK)
            look_at_choice(t, &r, held && r.n > 0 ? r.z : NULL);
        goto done;
    }
    if (role != (forward ? ARI_ROUTES : ARI_ROUTER_LOGITS))
        return AR_OK;
    AR_TRY_TO(done, st, read_rows(&r.z, &held, &r, ARI_ROUTER, 'f'));
    AR_TRY_TO(done, st, ARI_ALLOC(&r.p, r.n, "a row of logits"));
    if (held && forward)
        look_at_weights(t, &r);
    else if (held)
        st = look_at_gradient(t, &r);
    if (held && !forward && st == AR_OK && t->kind == ARI_FOUND_NOTHING)
        st = ari_replay_balance(t, c, r.z);
done:
    free(r.z);
    free(r.weight);
    free(r.g);
    free(r.p);
    return st;
}
