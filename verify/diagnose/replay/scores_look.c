/* SPDX-License-Identifier: Apache-2.0 */
/* Routers: weights and choices that another form of the router gives, and choices that none does. */
#include "verify/diagnose/replay/scores.h"

#include "verify/diagnose/hypothesis.h"

/* Of fewer tokens, groups that the reference has not may explain a near tie by accident. */
enum { LEAST_ROWS = 4 };

/* --- the bias of later samples ------------------------------------------------------------------------------------ */

/* True if the first of `pieces` equal numbers of samples are right, and the next one's experts are those of a bias that
 * has moved by the first one's counts. */
static bool is_moved(ari_scored *s, const ari_score_choice *base, const uint8_t *is, double by, size_t pieces)
{
    double bias[ARI_MOST_SCORED];
    const size_t each = s->tokens / pieces;
    if (memcmp(is, s->chosen[0], each * s->n) != 0)
        return false;
    for (size_t i = 0; i < s->n; i++) {
        const double mean = (double)(each * s->k) / (double)s->n;
        size_t own = 0;
        for (size_t t = 0; t < each; t++)
            own += is[t * s->n + i];
        bias[i] = s->bias[i] + ((double)own < mean ? by : (double)own > mean ? -by : 0.0);
    }
    for (size_t t = each; t < 2 * each; t++) {
        ari_scored_choose(s->chosen[1], s, t, base, bias);
        if (memcmp(s->chosen[1], is + t * s->n, s->n) != 0)
            return false;
    }
    return true;
}

static ar_status look_at_moved(ari_trace *t, ari_scored *s, const ari_case *c, const ari_score_choice *base,
                               const uint8_t *is)
{
    double before[ARI_MOST_SCORED], after[ARI_MOST_SCORED], by = 0.0;
    bool held = false;
    AR_TRY(ari_scored_bias(before, after, &held, c, s->n));
    for (size_t i = 0; i < s->n && held; i++)
        by = fmax(by, fabs(after[i] - before[i]));
    for (size_t pieces = 2; pieces <= s->samples && by > 0.0; pieces++) {
        if (s->samples % pieces != 0 || !is_moved(s, base, is, by, pieces))
            continue;
        ARI_FINDING(t, ARI_FOUND_SCORES, ARI_IF(OF_MICRO), {"by", .number = by},
                    {"first", .count = s->samples / pieces});
        return AR_OK;
    }
    return AR_OK;
}

/* --- numbers of experts ------------------------------------------------------------------------------------------- */

/* The experts of tokens by number, [tokens][k]. */
typedef struct choices {
    const ari_case *c;
    const float *ref, *val;
    size_t k, samples;
    size_t rows, first; /* tokens with other experts, and the first of them */
} choices;

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

static choices choices_of(const ari_case *c, const float *ref, const float *val, size_t k, size_t samples)
{
    choices o = {.c = c, .ref = ref, .val = val, .k = k, .samples = samples};
    for (size_t row = 0; row < c->grid.rows; row++) {
        const float *was = ref + row * k, *is = val + row * k;
        if (isnan(only_in(was, is, k)) && isnan(only_in(is, was, k)))
            continue;
        o.first = o.rows++ == 0 ? row : o.first;
    }
    return o;
}

/* How many there are, and which expert the first token goes to instead. */
static void say_choices(ari_trace *t, const choices *o)
{
    const size_t seq = o->c->grid.rows / o->samples;
    const float *ref = o->ref + o->first * o->k, *val = o->val + o->first * o->k;
    const float was = only_in(ref, val, o->k), is = only_in(val, ref, o->k);
    ARI_FACTS(t, {"rows", .count = o->rows}, {"k", .count = o->k});
    ari_text who = ari_list(t, "who");
    ari_say(&who, "token %zu of sample %zu", o->first % seq, o->first / seq);
    if (!isnan(is) && !isnan(was))
        ari_say(&who, " goes to expert %.0f instead of %.0f", (double)is, (double)was);
    else
        ari_say(&who, isnan(is) ? " lacks expert %.0f" : " goes to expert %.0f too", (double)(isnan(is) ? was : is));
}

/* --- other experts by no form ------------------------------------------------------------------------------------- */

/* Two logits that bf16 does not keep apart differ by at most this share of them. */
#define NEAR_TIE 0x1p-7

/* By how much the logits of those chosen fall short at most, and how large logits are there. */
typedef struct shortfall {
    double gap, size;
    bool foreign; /* some number is no expert's */
} shortfall;

static void add_row(shortfall *f, const float *z, const float *ref, const float *val, size_t k, size_t n)
{
    double lost = -HUGE_VAL, taken = HUGE_VAL;
    for (size_t j = 0; j < k; j++) {
        if (!(ref[j] >= 0.0f && ref[j] < (float)n && val[j] >= 0.0f && val[j] < (float)n)) {
            f->foreign = true;
            return;
        }
        lost = has_expert(val, k, ref[j]) ? lost : fmax(lost, (double)z[(size_t)ref[j]]);
        taken = has_expert(ref, k, val[j]) ? taken : fmin(taken, (double)z[(size_t)val[j]]);
    }
    if (lost > -HUGE_VAL && lost - taken >= f->gap) {
        f->gap = lost - taken;
        f->size = fmax(fabs(lost), fabs(taken));
    }
}

/* z: the logits [tokens][n] of both; NULL: not known, or they differ. */
static void found_others(ari_trace *t, const choices *o, const float *z, size_t n)
{
    shortfall f = {.gap = -HUGE_VAL, .foreign = !z};
    for (size_t row = 0; row < o->c->grid.rows && !f.foreign; row++)
        add_row(&f, z + row * n, o->ref + row * o->k, o->val + row * o->k, o->k, n);
    const bool ties = !f.foreign && f.gap >= 0.0 && f.gap <= NEAR_TIE * f.size;
    ARI_FINDING(t, ARI_FOUND_CHOICE,
                o->rows == 0 ? ARI_IF(SHIFT)
                : f.foreign  ? ARI_IF(FOREIGN)
                : ties       ? ARI_IF(SAME)
                             : 0,
                {"gap", .number = f.gap});
    say_choices(t, o);
}

/* --- other experts by another form -------------------------------------------------------------------------------- */

static void found_choice(ari_trace *t, const choices *o, const ari_score_choice *is, const ari_score_choice *base)
{
    ari_trace_set(t, ARI_FOUND_SCORES, ARI_IF(BLOCKS));
    ari_say_choice(t, "of", is);
    ari_say_choice(t, "wanted", base);
    say_choices(t, o);
}

static ar_status look_at_choice(ari_trace *t, ari_scored *s, const choices *o)
{
    uint8_t *is = NULL;
    ari_reading base, now;
    if (!s->known || s->k != o->k || o->rows == 0 ||
        !ari_scored_search(&base, s, &(ari_reading_of){.experts = s->chosen[0]}, NULL))
        return AR_OK;
    AR_TRY(ARI_TAKE(&is, o->c->arena, s->tokens * s->n, "experts of tokens"));
    for (size_t i = 0; i < s->tokens * s->k; i++) {
        if (!(o->val[i] >= 0.0f && o->val[i] < (float)s->n))
            return AR_OK;
        is[i / s->k * s->n + (size_t)o->val[i]] = 1;
    }
    if ((base.by.groups > 1 || o->rows >= LEAST_ROWS) &&
        ari_scored_search(&now, s, &(ari_reading_of){.experts = is}, &base))
        found_choice(t, o, &now.by, &base.by);
    else
        AR_TRY(look_at_moved(t, s, o->c, &base.by, is));
    if (t->kind != ARI_FOUND_NOTHING)
        say_choices(t, o);
    return AR_OK;
}

/* --- weights ------------------------------------------------------------------------------------------------------ */

/* The weights of those chosen, or their numbers, [tokens][k] of a row's n; false: some row has not so many. */
static bool take_chosen(float *out, bool numbers, const ari_scored *s, const float *x)
{
    for (size_t t = 0; t < s->tokens; t++, x += s->n) {
        size_t k = 0;
        for (size_t i = 0; i < s->n; i++) {
            if (x[i] != 0.0f && k++ < s->k)
                out[t * s->k + k - 1] = numbers ? (float)i : x[i];
        }
        if (k != s->k)
            return false;
    }
    return true;
}

static void compare_readings(ari_trace *t, const ari_reading *base, const ari_reading *now)
{
    const size_t f = now->function;
    const double was = base->factor, is = now->factor;
    const bool other = f > ARI_BIASED_SCORES || now->by.softmax != base->by.softmax;
    if (!other && f == base->function && ari_is_near(is, was, ARI_SEEN))
        return;
    ARI_FINDING(t, ARI_FOUND_SCORES,
                other                    ? 0
                : f == base->function    ? ARI_IF(COUNT)
                : f >= ARI_BIASED_SHARES ? ARI_IF(SHIFT)
                : f == ARI_SHARES_OF_ALL ? ARI_IF(ALL)
                : f == ARI_SHARES        ? ARI_IF(ONE)
                                         : ARI_IF(ZERO),
                {"function", .text = ari_function_text(now)}, {"reference", .text = ari_function_text(base)},
                {"was", .number = was}, {"is", .number = is},
                {"how", .text = ari_is_near(is, 1.0, ARI_SEEN)         ? ": it is left out"
                                : ari_is_near(is, was * was, ARI_SEEN) ? ": it is applied twice"
                                                                       : ""});
}

/* Numbers of the experts of two choices that are not known from the dumps. */
static ar_status compare_choices(ari_trace *t, ari_scored *s, const ari_case *c, const ari_score_choice *base,
                                 const ari_score_choice *now)
{
    const ari_score_choice *by[] = {base, now};
    const size_t each = s->tokens * s->k;
    float *number = NULL;
    AR_TRY(ARI_TAKE(&number, c->arena, 2 * each, "experts of tokens"));
    for (size_t i = 0, n = 0; i < 2 * s->tokens; i++) {
        ari_scored_choose(s->chosen[1], s, i % s->tokens, by[i / s->tokens], NULL);
        for (size_t expert = 0; expert < s->n; expert++) {
            if (s->chosen[1][expert])
                number[n++] = (float)expert;
        }
    }
    const choices o = choices_of(c, number, number + each, s->k, s->samples);
    if (base->groups > 1 || o.rows >= LEAST_ROWS)
        found_choice(t, &o, now, base);
    return AR_OK;
}

/* ref, val: [tokens][k]. Weights alone show a choice, too, where a dump has no numbers. */
static ar_status look_at_weights(ari_trace *t, ari_scored *s, const ari_case *c, const float *ref, const float *val)
{
    ari_reading base, now;
    if (!ari_scored_search(&base, s, &(ari_reading_of){s->known ? s->chosen[0] : NULL, ref}, NULL) ||
        !ari_scored_search(&now, s, &(ari_reading_of){s->known ? s->chosen[0] : NULL, val}, &base))
        return AR_OK;
    if (s->k == 1 && base.function == ARI_SHARES) /* all ones, whatever the scores */
        base.by.softmax = now.by.softmax;
    if (memcmp(&base.by, &now.by, sizeof base.by) != 0 && !s->known)
        return compare_choices(t, s, c, &base.by, &now.by);
    compare_readings(t, &base, &now);
    return AR_OK;
}

/* The gradient of a router's input is multiplied by the factor of its weights, or divided. */
static void look_at_factor(ari_trace *t, ari_scored *s, const ari_case *c)
{
    const ari_fit f = ari_fit_of(&c->survey.total);
    ari_reading base;
    double times;
    if (ari_fit_one(&times, &f) > ARI_UNFITTED ||
        !ari_scored_search(&base, s, &(ari_reading_of){.weight = s->weight}, NULL) ||
        ari_is_near(base.factor, 1.0, ARI_SEEN) ||
        !(ari_is_near(times, base.factor, ARI_SEEN) || ari_is_near(times * base.factor, 1.0, ARI_SEEN)))
        return;
    ARI_FINDING(t, ARI_FOUND_SCORES, ARI_IF(COUNT), {"times", .number = times});
}

/* Of a tensor of all experts' weights, those of the chosen; if others are chosen, these. */
static ar_status look_at_all_weights(ari_trace *t, ari_scored *s, const ari_case *c)
{
    float *ref = NULL, *val = NULL;
    if (!s->known || s->k == 0 || s->k > ARI_MOST_CHOSEN || c->count != s->tokens * s->n)
        return AR_OK;
    AR_TRY(ARI_TAKE(&ref, c->arena, s->tokens * s->k, "weights of tokens"));
    AR_TRY(ARI_TAKE(&val, c->arena, s->tokens * s->k, "weights of tokens"));
    if (!take_chosen(ref, true, s, c->ref) || !take_chosen(val, true, s, c->val))
        return AR_OK;
    const choices o = choices_of(c, ref, val, s->k, s->samples);
    if (o.rows > 0)
        AR_TRY(look_at_choice(t, s, &o));
    if (o.rows > 0 && t->kind == ARI_FOUND_NOTHING)
        found_others(t, &o, s->z, s->n);
    if (o.rows == 0 && take_chosen(ref, false, s, c->ref) && take_chosen(val, false, s, c->val))
        return look_at_weights(t, s, c, ref, val);
    return AR_OK;
}

/* A row of the case has the numbers of a token's experts. held: the logits are known, and those of both dumps. */
static ar_status look_at_numbers(ari_trace *t, ari_scored *s, const ari_case *c, bool held)
{
    const choices o = choices_of(c, c->ref, c->val, c->grid.cols,
                                 held             ? s->samples
                                 : c->grid.nd > 2 ? c->grid.shape[0]
                                                  : 1);
    if (held)
        AR_TRY(look_at_choice(t, s, &o));
    if (t->kind == ARI_FOUND_NOTHING)
        found_others(t, &o, held ? s->z : NULL, s->n);
    return AR_OK;
}

ar_status ari_measure_scores(ari_trace *t, const ari_case *c)
{
    const bool forward = c->d->pass == 'f';
    ari_scored s;
    bool held = false;
    if (c->role != ARI_ROUTER && !(forward && (c->role == ARI_CHOSEN || c->role == ARI_ROUTES)))
        return AR_OK;
    AR_TRY(ari_scored_read(&s, &held, c));
    held = held && c->grid.rows == s.tokens && s.k <= ARI_MOST_CHOSEN;
    if (c->role == ARI_CHOSEN)
        AR_TRY(look_at_numbers(t, &s, c, held));
    else if (held && c->role == ARI_ROUTES)
        AR_TRY(look_at_all_weights(t, &s, c));
    else if (held && s.weight && !forward)
        look_at_factor(t, &s, c);
    else if (held && s.weight && c->grid.cols == s.k)
        AR_TRY(look_at_weights(t, &s, c, c->ref, c->val));
    return AR_OK;
}
