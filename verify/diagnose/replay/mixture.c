/* SPDX-License-Identifier: Apache-2.0 */
/* How much of each expert there is in a token's row, where the reference has another number. */
#include "verify/diagnose/hypothesis.h"
#include "verify/diagnose/replay/experts.h"

static bool is_same(const ari_experts *e, double a, double b)
{
    return fabs(a - b) <= e->near * (e->weight ? fabs(b) : fmax(1.0, fabs(b)));
}

static bool is_there(const ari_experts *e, double share)
{
    return ari_expert_is_there(e, share, share);
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

static void note_number(double *number, bool first, double x, const ari_experts *e)
{
    *number = first || is_same(e, x, *number) ? x : (double)NAN;
}

static void note_token(finding *f, const ari_experts *e, size_t k)
{
    const ari_expert_term *term = e->term + k * e->most;
    double sum = 0.0, sum_was = 0.0, by = (double)NAN;
    size_t gone = 0, came = 0, held = 0, n = e->terms[k];
    if (n > 0 && term[n - 1].expert == e->n) {
        n--;
        f->shared = f->shared && is_same(e, term[n].is, term[n].was);
        note_number(&f->of_shared, k == 0, term[n].is / term[n].was, e);
    }
    for (size_t j = 0; j < n; j++) {
        const double was = term[j].was, is = term[j].is;
        const bool there = is_there(e, was), same = is_same(e, is, was), is_in = ari_expert_is_there(e, is, was);
        size_t at = 0;
        sum += is, sum_was += was;
        f->routed = f->routed && same;
        f->left_out = f->left_out && (same || (there && !is_in));
        f->slots += there;
        came += !same && is_in;
        by = there && by != by ? is / was : by;
        f->scaled = f->scaled && is_same(e, is, there ? by * was : 0.0);
        if (!there || same)
            continue;
        f->lacking += !is_in;
        gone++;
        while (at < n && (is_same(e, term[at].was, term[at].is) || !is_same(e, term[at].is, was)))
            at++;
        held += at < n;
    }
    f->elsewhere = f->elsewhere && gone == held && came == gone;
    f->moved += held;
    note_number(&f->times, k == 0, by, e);
    note_number(&f->sum, k == 0, sum, e);
    note_number(&f->sum_was, k == 0, sum_was, e);
}

/* --- what is left out --------------------------------------------------------------------------------------------- */

/* Which of the routes' slots are missing. */
typedef struct missing {
    size_t expert;      /* the only one that is; ARI_MOST_EXPERTS: several are */
    size_t last, first; /* rows of an expert: the last that is there, the first that is not */
} missing;

static void note_missing(missing *m, const ari_experts *e, size_t token, size_t expert, bool there, bool first)
{
    size_t before = 0; /* tokens that the routes send to the expert before this one */
    for (size_t t = 0; t < token; t++)
        before += e->weight[t * e->n + expert] != 0.0f;
    m->last = there && before > m->last ? before : m->last;
    if (there)
        return;
    m->expert = first || m->expert == expert ? expert : ARI_MOST_EXPERTS;
    m->first = before < m->first ? before : m->first;
}

static missing find_missing(const ari_experts *e)
{
    missing m = {.expert = ARI_MOST_EXPERTS, .first = SIZE_MAX};
    bool first = true;
    for (size_t at = 0; at < e->p.tokens * e->most; at++) {
        const ari_expert_term *s = &e->term[at];
        const bool there = ari_expert_is_there(e, s->is, s->was);
        if (at % e->most >= e->terms[at / e->most])
            continue;
        note_missing(&m, e, e->p.token[at / e->most], s->expert, there, first);
        first = first && there;
    }
    /* Of the tokens that are right all experts are there: no single one is missing, and none before its last row. */
    for (size_t at = 0; at < e->p.c->grid.rows * e->n; at++) {
        const size_t token = at / e->n, expert = at % e->n;
        if (e->weight[at] == 0.0f || ari_row_differs(e->p.c, token))
            continue;
        note_missing(&m, e, token, expert, true, false);
        m.expert = m.expert == expert ? ARI_MOST_EXPERTS : m.expert;
    }
    return m;
}

/* True if of each token the experts of one of n blocks are there, and those of the others are not. */
static bool are_of_blocks(const ari_experts *e, size_t n)
{
    const size_t size = e->n / n;
    bool both = false;
    for (size_t k = 0; k < e->p.tokens; k++) {
        size_t block = SIZE_MAX;
        for (size_t j = 0; j < 2 * e->terms[k]; j++) { /* first those that are there */
            const ari_expert_term *s = &e->term[k * e->most + j % e->terms[k]];
            const bool there = ari_expert_is_there(e, s->is, s->was);
            if (there == (j >= e->terms[k]))
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

static void say_missing(ari_trace *t, const ari_experts *e)
{
    const missing m = find_missing(e);
    size_t ranks = 2; /* the fewest that share out the experts so */
    while (ranks <= e->n && !(e->n % ranks == 0 && are_of_blocks(e, ranks)))
        ranks++;
    ranks = ranks <= e->n ? ranks : 0;
    t->flags |= m.expert < ARI_MOST_EXPERTS ? ARI_IF(ONE)
                : ranks > 0                 ? ARI_IF(OF_SHARDS)
                : m.last < m.first          ? ARI_IF(CUT)
                                            : 0;
    ARI_FACTS(t, {"n", .count = ranks}, {"expert", .count = m.expert}, {"rows", .count = m.first});
}

/* --- without routes ----------------------------------------------------------------------------------------------- */

/* The experts that have others' tokens, as "1 for 4". */
static void say_moved(ari_trace *t, const ari_experts *e)
{
    ari_text who = ari_list(t, "who");
    size_t said = 0;
    for (size_t j = 0; j < e->n * e->n && said < 4; j++) {
        const size_t from = j / e->n, to = j % e->n;
        bool is = false;
        for (size_t k = 0; k < e->p.tokens; k++) {
            const ari_expert_term *a = &e->term[k * e->most + from], *b = &e->term[k * e->most + to];
            is = is || (is_there(e, a->was) && !is_same(e, a->is, a->was) && !is_same(e, b->is, b->was) &&
                        is_same(e, b->is, a->was));
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
static ar_status look_for_weights(ari_trace *t, const ari_experts *e, const ar_dump_tensor *of)
{
    const ari_case *c = e->p.c;
    const size_t each = of->count / c->grid.rows;
    bool are = ari_is_within(c, of) && ari_order_of(of->name, c->path).pass == 'f' && of->count <= ARI_MOST_WEIGHT &&
               of->count == c->grid.rows * each && each <= e->n;
    float *x = NULL;
    if (!are)
        return AR_OK;
    ARI_ARENA_SCOPE(c->arena);
    AR_TRY(ari_read_values(&x, of, c->arena));
    for (size_t i = 0; i < e->p.tokens * e->most && are; i++) {
        const ari_expert_term *s = &e->term[i];
        if (s->expert < e->n && is_there(e, s->was))
            are = is_in(x + e->p.token[i / e->most] * each, each, s->was) && is_in(x, of->count, s->is);
    }
    if (are) {
        ARI_FINDING(t, ARI_FOUND_MIXTURE, ARI_IF(ROWS), {"weights", .text = of->name});
    }
    return AR_OK;
}

/* What scaled or exchanged numbers show, where the dump has no routes that tell them. */
static ar_status look_at_numbers(ari_trace *t, const ari_experts *e, const finding *f)
{
    const ar_dump *dump = e->p.c->known->reference;
    if (f->scaled)
        ari_trace_set(t, ARI_FOUND_MIXTURE,
                      !isnan(f->times) && e->p.tokens > 1 ? ARI_IF(COUNT) | ARI_IF(SAME)
                      : is_same(e, f->sum_was, 1.0)       ? ARI_IF(ZERO)
                      : is_same(e, f->sum, 1.0)           ? ARI_IF(ONE)
                                                          : ARI_IF(COUNT));
    else if (f->elsewhere)
        ari_trace_set(t, ARI_FOUND_MIXTURE, ARI_IF(EXCHANGED));
    for (size_t i = 0; i < ar_dump_count(dump) && t->kind == ARI_FOUND_NOTHING; i++)
        AR_TRY(look_for_weights(t, e, ar_dump_at(dump, i)));
    if (t->kind != ARI_FOUND_NOTHING)
        say_moved(t, e);
    return AR_OK;
}

ar_status ari_look_at_expert_shares(ari_trace *t, bool *others, const ari_experts *e)
{
    finding f = {.shared = true, .routed = true, .left_out = true, .elsewhere = true, .scaled = true};
    for (size_t k = 0; k < e->p.tokens; k++)
        note_token(&f, e, k);
    const bool counted = f.of_shared > 1.5 && is_same(e, f.of_shared, rint(f.of_shared));
    *others = f.shared && !f.routed;
    if (f.shared == f.routed || (f.routed && isnan(f.of_shared)))
        return AR_OK;
    if (f.routed && is_same(e, f.of_shared, 0.0))
        ari_trace_set(t, ARI_FOUND_SHARED_EXPERT, ARI_IF(ZERO));
    else if (f.routed)
        ari_trace_set(t, ARI_FOUND_MIXTURE, counted ? ARI_IF(ALL) : ARI_IF(FRACTION));
    else if (f.left_out)
        ari_trace_set(t, ARI_FOUND_EXPERTS, ARI_IF(SOME));
    else if (!e->weight)
        AR_TRY(look_at_numbers(t, e, &f));
    if (f.left_out && !f.routed && e->weight)
        say_missing(t, e);
    ARI_FACTS(t, {"lacking", .count = f.lacking}, {"moved", .count = f.moved}, {"slots", .count = f.slots},
              {"times", .number = f.routed ? f.of_shared : f.times});
    return AR_OK;
}
