/* SPDX-License-Identifier: Apache-2.0 */
/* The update of a router's bias computed again: each expert's moves by one number, up where it has fewer tokens than
 * the mean and down where it has more. Which tokens were counted, how often, and how exactly? */
#include <stdlib.h>

#include "verify/diagnose/replay/scores.h"

enum { MOST_MOVES = 1 << 20 };
/* Counts that bf16 does not keep apart differ by at most this share. */
#define NEAR_MEAN 0x1p-7

typedef struct update {
    const ari_case *c;
    ari_scored s;
    size_t seq;
    double by; /* what an expert's bias moves by */
    double before[ARI_MOST_SCORED], after[ARI_MOST_SCORED];
    int move[ARI_MOST_SCORED]; /* of the copy that is looked at, in multiples of `by` */
} update;

/* Which tokens are counted: of blocks of `each` samples those of one in `pieces`, and of `places` of positions, in a
 * zigzag or not, one. */
typedef struct tokens {
    size_t each, pieces, piece, places, place;
    bool zigzag;
} tokens;

static bool counts(const update *u, const tokens *of, size_t t)
{
    size_t index;
    const size_t sample = t / u->seq, at = t % u->seq;
    if (of->pieces > 0 && sample / of->each % of->pieces != of->piece)
        return false;
    return of->places < 2 || ari_place_in_ring(&index, u->seq, of->places, of->zigzag, at) == of->place;
}

/* The sign of sum n - E*n_i for each expert, added to `move`; chosen: [tokens][n]. */
static void add_signs(int *move, const update *u, const tokens *of, const uint8_t *chosen)
{
    size_t count[ARI_MOST_SCORED] = {0}, sum = 0;
    const size_t n = u->s.n;
    for (size_t t = 0; t < u->s.tokens; t++) {
        for (size_t i = 0; i < n && counts(u, of, t); i++) {
            count[i] += chosen[t * n + i];
            sum += chosen[t * n + i];
        }
    }
    for (size_t i = 0; i < n; i++)
        move[i] += sum > n * count[i] ? 1 : sum < n * count[i] ? -1 : 0;
}

static bool moves_by(const update *u, const tokens *of, const uint8_t *chosen)
{
    int move[ARI_MOST_SCORED] = {0};
    add_signs(move, u, of, chosen);
    return memcmp(move, u->move, u->s.n * sizeof *move) == 0;
}

/* Fills u->move from an after-value of each expert; false: some is no multiple. */
static bool take_moves(update *u, const double *after)
{
    for (size_t i = 0; i < u->s.n; i++) {
        const double m = (after[i] - u->before[i]) / u->by, near = round(m);
        if (!(fabs(near) < (double)MOST_MOVES) ||
            !(fabs(m - near) * u->by <= 0x1p-22 * (fabs(after[i]) + fabs(u->before[i])) + 1e-3 * u->by))
            return false;
        u->move[i] = (int)near;
    }
    return true;
}

/* One rank's copy. False: it has no whole one, or it does not move so. */
static bool take_copy(update *u, int rank)
{
    double after[ARI_MOST_SCORED];
    size_t held = 0;
    for (ari_run run = ari_runs_of_rank(&u->c->grid, rank); ari_runs_next(&run);) {
        for (size_t i = 0; i < run.count; i++, held++)
            after[run.index + i] = (double)run.value[i];
    }
    return held == u->s.n && take_moves(u, after);
}

/* --- hypotheses --------------------------------------------------------------------------------------------------- */

/* Moved once for each of `pieces` micro-batches, which `ranks` ranks have of their own samples. */
static bool moves_with_each(const update *u, size_t ranks, size_t pieces)
{
    int move[ARI_MOST_SCORED] = {0};
    tokens of = {.each = u->s.samples / ranks / pieces, .pieces = pieces};
    for (; of.piece < pieces; of.piece++)
        add_signs(move, u, &of, u->s.chosen[0]);
    return memcmp(move, u->move, u->s.n * sizeof *move) == 0;
}

static void look_at_pieces(ari_trace *t, const update *u)
{
    int most = 0;
    for (size_t i = 0; i < u->s.n; i++)
        most = abs(u->move[i]) > most ? abs(u->move[i]) : most;
    for (size_t pieces = 2; pieces <= u->s.samples; pieces++) {
        for (size_t ranks = 1; ranks * pieces <= u->s.samples; ranks++) {
            if (u->s.samples % (ranks * pieces) != 0 || !moves_with_each(u, ranks, pieces))
                continue;
            ari_trace_set(t, ARI_FOUND_COUNTS, ARI_IF(OF_MICRO));
            ari_words(t, "updates", "%zu", pieces);
            return;
        }
    }
    if (most < 2)
        return;
    ari_trace_set(t, ARI_FOUND_COUNTS, ARI_IF(OF_MICRO));
    ari_words(t, "updates", "%d or more", most);
}

/* True if each wrong copy's update is by the tokens of one of the parts. */
static bool move_by_parts(update *u, tokens *of)
{
    bool all = true;
    for (int r = 0; r < u->c->d->ranks && all; r++) {
        if (u->c->survey.rank[r].different == 0)
            continue;
        bool own = false;
        all = take_copy(u, r);
        for (size_t i = 0; i < of->pieces * of->places && all && !own; i++) {
            of->piece = i / of->places;
            of->place = i % of->places;
            own = moves_by(u, of, u->s.chosen[0]);
        }
        all = all && own;
    }
    return all;
}

static void look_at_parts(ari_trace *t, update *u)
{
    for (size_t n = 2; n <= u->s.samples * u->seq && n <= ARI_MOST_RANKS; n++) {
        for (size_t pieces = 1; pieces <= n; pieces++) {
            tokens of = {.each = u->s.samples / pieces, .pieces = pieces, .places = n / pieces};
            if (n % pieces != 0 || u->s.samples % pieces != 0 || u->seq % of.places != 0)
                continue;
            bool found = move_by_parts(u, &of);
            of.zigzag = !found && of.places > 1 && u->seq % (2 * of.places) == 0;
            found = found || (of.zigzag && move_by_parts(u, &of));
            if (!found)
                continue;
            ARI_FINDING(t, ARI_FOUND_COUNTS, ARI_IF(OF_SHARDS), {"n", .count = n});
            return;
        }
    }
}

/* By the largest scores of all experts, without the bias. */
static bool moves_by_plain(update *u)
{
    const ari_score_choice plain = {.groups = 1, .kept = 1, .unbiased = true};
    for (size_t i = 0; i < u->s.tokens && u->s.z; i++)
        ari_scored_choose(u->s.chosen[1] + i * u->s.n, &u->s, i, &plain, NULL);
    return u->s.z && moves_by(u, &(tokens){.pieces = 0}, u->s.chosen[1]);
}

/* States how far the counts of those that moved otherwise are from the mean, if no further than few bits hide. */
static bool look_near_mean(ari_trace *t, const update *u)
{
    const double mean = (double)(u->s.tokens * u->s.k) / (double)u->s.n;
    double most = 0.0;
    for (size_t i = 0; i < u->s.n; i++) {
        size_t count = 0;
        for (size_t k = 0; k < u->s.tokens; k++)
            count += u->s.chosen[0][k * u->s.n + i];
        if (ari_survey_bit(&u->c->survey, i))
            most = fmax(most, fabs((double)count - mean));
    }
    if (most > NEAR_MEAN * mean)
        return false;
    ARI_FINDING(t, ARI_FOUND_COUNTS, ARI_IF(SAME), {"gap", .number = most}, {"mean", .number = mean});
    return true;
}

/* Equal copies are no ranks' own: of what is known to be of several, parts of the batch come last. */
static void look_at_update(ari_trace *t, update *u)
{
    const bool apart = u->c->survey.disagree > 0;
    int rank = 0;
    while (u->c->survey.rank[rank].different == 0)
        rank++;
    if (!take_copy(u, rank))
        return;
    if (apart)
        look_at_parts(t, u);
    else
        look_at_pieces(t, u);
    if (t->kind == ARI_FOUND_NOTHING && take_copy(u, rank)) {
        const bool plain = moves_by_plain(u);
        if (!plain && !look_near_mean(t, u) && !apart)
            look_at_parts(t, u);
        if (t->kind == ARI_FOUND_NOTHING)
            ari_trace_set(t, ARI_FOUND_COUNTS, plain ? ARI_IF(ZERO) : 0);
    }
    ARI_FACTS(t, {"by", .number = u->by}, {"different", .count = u->c->survey.different});
}

ar_status ari_measure_counts(ari_trace *t, const ari_case *c)
{
    update *u = NULL;
    bool held = false, known = false;
    if (c->role != ARI_ROUTER_BIAS || c->grid.count < 2 || c->grid.count > ARI_MOST_SCORED)
        return AR_OK;
    AR_TRY(ARI_TAKE(&u, c->arena, 1, "the update of a bias"));
    u->c = c;
    AR_TRY(ari_scored_read(&u->s, &held, c));
    if (held && u->s.n == c->grid.count)
        AR_TRY(ari_scored_bias(u->before, u->after, &known, c, c->grid.count));
    if (known && !u->s.known)
        ari_scored_find(&u->s);
    if (known && u->s.known) {
        u->seq = u->s.tokens / u->s.samples;
        for (size_t i = 0; i < u->s.n; i++)
            u->by = fmax(u->by, fabs(u->after[i] - u->before[i]));
        /* The reference's own update is that of its routes. */
        if (u->by > 0.0 && take_moves(u, u->after) && moves_by(u, &(tokens){.pieces = 0}, u->s.chosen[0]))
            look_at_update(t, u);
    }
    return AR_OK;
}
