/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "ref/core/clock.h"
#include "ref/core/text.h"
#include "verify/grads/grads.h"
#include "verify/logprobs/logprobs.h"
#include "verify/plan/estimate.h"
#include "verify/reference/sensitivity.h"
#include "verify/run/cluster_run.h"

/* Logits of a batch that are in memory at once, at most, where a row has less. */
#define LOGITS_BYTES ((size_t)64 << 20)
/* Places of a row in which all sequences stand. */
enum { PACKED_MOST = 4096 };

/* --- rows --------------------------------------------------------------------------------------------------------- */

/* A sequence of n tokens in a batch: its first token is place `start` of a row. */
typedef struct span {
    size_t sequence, row, start, n;
} span;

typedef struct rows {
    ar_batch batch;
    int64_t *ids, *positions; /* [b, s]; positions NULL: 0 .. s-1 */
    uint8_t *padding;         /* NULL: all is attended to */
    span *span;               /* [sequences] */
    size_t spans;
    ari_arena arena; /* of these */
} rows;

static size_t longest_of(const ari_sequences *s)
{
    size_t most = 0;
    for (size_t i = 0; i < s->count; i++)
        most = s->list[i].n > most ? s->list[i].n : most;
    return most;
}

static size_t total_of(const ari_sequences *s)
{
    size_t n = 0;
    for (size_t i = 0; i < s->count; i++)
        n += s->list[i].n;
    return n;
}

static bool is_packed(ari_lp_reading r)
{
    return r == ARI_PACKED_TOGETHER || r == ARI_PACKED_RESTARTS;
}

static bool is_padded(ari_lp_reading r)
{
    return r == ARI_PADDED_POSITIONS || r == ARI_PADDING_ATTENDED;
}

bool ari_lp_reading_fits(const ari_sequences *s, const ar_config *c, ari_lp_reading r)
{
    const size_t longest = longest_of(s), total = total_of(s);
    const bool counts = c->rope.kind || c->learned_positions;
    bool prompts = false, shorter = false;
    for (size_t i = 0; i < s->count; i++) {
        prompts = prompts || s->list[i].prompt > 0;
        shorter = shorter || s->list[i].n < longest;
    }
    switch (r) {
    case ARI_ALONE:
        return true;
    case ARI_FROM_ONE:
        return counts && longest < c->max_positions;
    case ARI_RESPONSE_RESTARTS:
        return counts && prompts;
    case ARI_PADDED_POSITIONS:
        return counts && shorter;
    case ARI_PADDING_ATTENDED:
        return shorter;
    case ARI_PACKED_TOGETHER:
        return s->count > 1 && total <= PACKED_MOST && (!counts || total <= c->max_positions);
    case ARI_PACKED_RESTARTS:
        return s->count > 1 && total <= PACKED_MOST && counts;
    case ARI_READINGS:
        break;
    }
    return false;
}

static ar_status rows_init(rows *r, const ar_config *c, size_t b, size_t n, size_t spans, ari_lp_reading reading)
{
    size_t all;
    r->spans = spans;
    AR_TRY(ari_mul_size(&all, b, n));
    AR_TRY(ARI_TAKE(&r->ids, &r->arena, all, "tokens of a batch"));
    AR_TRY(ARI_TAKE(&r->span, &r->arena, spans, "sequences of a batch"));
    if (reading != ARI_ALONE && reading != ARI_PADDING_ATTENDED && reading != ARI_PACKED_TOGETHER)
        AR_TRY(ARI_TAKE(&r->positions, &r->arena, all, "positions of a batch"));
    if (reading == ARI_PADDED_POSITIONS)
        AR_TRY(ARI_TAKE(&r->padding, &r->arena, all, "padding of a batch"));
    for (size_t i = 0; i < all; i++)
        r->ids[i] = c->pads ? (int64_t)c->pad_id : 0;
    r->batch =
        (ar_batch){.batch = b, .seq = n, .input_ids = r->ids, .position_ids = r->positions, .padding_mask = r->padding};
    return AR_OK;
}

static void put(rows *r, size_t i, const ari_sequences *s, span at, ari_lp_reading reading)
{
    const ari_sequence *q = &s->list[at.sequence];
    const size_t first = at.row * r->batch.seq + at.start;
    r->span[i] = at;
    for (size_t t = 0; t < q->n; t++) {
        r->ids[first + t] = q->tokens[t];
        if (r->padding)
            r->padding[first + t] = 1;
        if (!r->positions)
            continue;
        const bool response = reading == ARI_RESPONSE_RESTARTS && q->prompt > 0 && t >= q->prompt;
        const size_t more = reading == ARI_FROM_ONE ? 1 : reading == ARI_PADDED_POSITIONS ? at.start : 0;
        r->positions[first + t] = (int64_t)(response ? t - q->prompt : t + more);
    }
}

/* The sequences from *from on, as many as one batch takes: all, or neighbours of one length. */
static ar_status take(rows *r, size_t *from, const ari_sequences *s, const ar_config *c, ari_lp_reading reading)
{
    const bool packed = is_packed(reading);
    const size_t n = packed ? total_of(s) : is_padded(reading) ? longest_of(s) : s->list[*from].n;
    const size_t room = LOGITS_BYTES / 4 / c->vocab / n;
    size_t b = 1, start = 0;
    while (!packed && b < room && *from + b < s->count && (is_padded(reading) || s->list[*from + b].n == n))
        b++;
    const size_t spans = packed ? s->count : b;
    AR_TRY(rows_init(r, c, packed ? 1 : b, n, spans, reading));
    for (size_t i = 0; i < spans; i++) {
        const size_t sequence = *from + i, own = s->list[sequence].n;
        put(r, i, s, (span){sequence, packed ? 0 : i, packed ? start : n - own, own}, reading);
        start += own;
    }
    *from += spans;
    return AR_OK;
}

/* --- runs --------------------------------------------------------------------------------------------------------- */

/* Weights of the model, or of the other one in a module's place. */
static const float *find_weights(void *user, const char *name, size_t count)
{
    const ari_lp_model *m = user;
    const size_t n = m->replaced ? strlen(m->replaced) : 0;
    const bool other = m->replaced && (n == 0 || (strncmp(name, m->replaced, n) == 0 && name[n] == '.'));
    return ari_weights_find(other ? m->other : m->weights, name, count);
}

/* Who wants the rows of logits of a batch. */
typedef struct listener {
    const rows *r;
    size_t vocab;
    ari_row_fn fn;
    void *user;
    char logits[96]; /* their name, of the baseline */
} listener;

/* Of the two, logits [b, s, V], one is there: fp32 by which the loss is computed in fp32, or binary64. */
static ar_status give_rows(const listener *l, const float *narrow, const double *wide)
{
    const size_t v = l->vocab;
    ARI_OWNED double *copy = NULL;
    if (narrow)
        AR_TRY(ARI_ALLOC(&copy, v, "a row of logits"));
    for (size_t i = 0; i < l->r->spans; i++) {
        const span *of = &l->r->span[i];
        for (size_t t = 1; t < of->n; t++) {
            const size_t at = of->row * l->r->batch.seq + of->start + t;
            const double *row = wide ? wide + (at - 1) * v : copy;
            for (size_t j = 0; narrow && j < v; j++)
                copy[j] = (double)narrow[(at - 1) * v + j];
            const ari_place place = (narrow ? ari_place_of : ari_place_of_f64)(row, v, l->r->ids[at]);
            AR_TRY(l->fn(l->user, of->sequence, t, row, &place));
        }
    }
    return AR_OK;
}

static ar_status hear_baseline(void *user, const char *name, char pass, int ndim, const size_t *shape,
                               const double *values)
{
    const listener *l = user;
    (void)ndim, (void)shape;
    return pass == 'f' && strcmp(name, l->logits) == 0 ? give_rows(l, NULL, values) : AR_OK;
}

/* Binary64, with the errors of an arithmetic that rounds so where there is a seed. */
static ar_status run_baseline(ari_lp_model *m, listener *l, ar_noise_units noise, uint64_t seed)
{
    const ar_baseline_options run = {.mode = AR_MODE_F64,
                                     .seed = m->run.seed,
                                     .weights = m->weights ? find_weights : NULL,
                                     .weights_user = m,
                                     .emit = hear_baseline,
                                     .emit_user = l,
                                     .forward_only = true,
                                     .noise = noise,
                                     .noise_seed = seed};
    double loss;
    ari_logits_name(l->logits, sizeof l->logits, m->config);
    return ar_baseline_run(m->config, &run, &l->r->batch, &loss);
}

static ar_status run_ranks(ari_lp_model *m, const listener *l)
{
    const rows *r = l->r;
    const size_t world = (size_t)ar_parallel_world(&m->run.parallel);
    ARI_ENDED(ari_gatherer_fini) ari_gatherer g = {0};
    ARI_ENDED(ari_cluster_result_fini) ari_cluster_result done = {.reports = NULL};
    ARI_OWNED void **users = NULL;
    AR_TRY(ari_gather_want_logits(&g, m->config, &r->batch, 0));
    AR_TRY(ARI_ALLOC(&users, world, "listeners of the ranks"));
    for (size_t i = 0; i < world; i++)
        users[i] = &g;
    AR_TRY(ari_cluster_run(&done, &(ari_cluster_options){.run = m->run,
                                                         .config = m->config,
                                                         .batch = &r->batch,
                                                         .weights = m->weights ? find_weights : NULL,
                                                         .weights_user = m,
                                                         .forward_only = true,
                                                         .tap = ari_gather_tap,
                                                         .tap_user = users}));
    AR_TRY(ari_gather_check(&g));
    return give_rows(l, g.list[0].full.values, NULL);
}

ar_status ari_lp_forward(ari_lp_model *m, const ari_sequences *s, ari_lp_reading reading, ari_row_fn fn, void *user)
{
    for (size_t from = 0; from < s->count;) {
        const uint64_t begun = ari_now_ns();
        rows r = {.ids = NULL};
        ar_status st = take(&r, &from, s, m->config, reading);
        listener l = {.r = &r, .vocab = m->config->vocab, .fn = fn, .user = user};
        if (st == AR_OK)
            st = m->binary64 ? run_baseline(m, &l, (ar_noise_units){.inner = 0.0}, 0) : run_ranks(m, &l);
        ari_arena_end(&r.arena, NULL);
        m->seconds += 1e-9 * (double)(ari_now_ns() - begun);
        AR_TRY(st);
    }
    return AR_OK;
}

ar_status ari_lp_check(const ari_lp_model *m, const ari_sequences *s)
{
    ari_estimate e;
    ari_estimate_case size = {.run = m->run,
                              .config = m->config,
                              .parallel = &m->run.parallel,
                              .layouts = 1,
                              .alone = true,
                              .noise_runs = m->binary64};
    size.run.batch = 1;
    for (size_t i = 0; i < s->count; i++) {
        if (i > 0 && s->list[i].n == s->list[i - 1].n)
            continue;
        size.run.seq = s->list[i].n;
        const ar_status st = ar_run_check(&size.run, m->config);
        if (st != AR_OK)
            return ar_error_set(st, "sequence %zu, of %zu token%s: %s", i, s->list[i].n, ARI_PLURAL(s->list[i].n),
                                ar_error_message());
    }
    size.run.seq = longest_of(s);
    AR_TRY(ari_run_check_declared(&size.run, m->config));
    AR_TRY(ari_estimate_check(&e, &size));
    return ari_estimate_fits(&e);
}

/* --- rounding ----------------------------------------------------------------------------------------------------- */

/* Tokens of the longest sequence that the baseline computes. */
enum { ROUNDED_TOKENS = 64 };

typedef struct rounding {
    double quiet[ROUNDED_TOKENS]; /* log-probabilities without rounding */
    bool noisy;
    double squares, worst;
    size_t terms;
} rounding;

static ar_status note_rounding(void *user, size_t sequence, size_t t, const double *logits, const ari_place *place)
{
    rounding *r = user;
    (void)sequence, (void)logits;
    if (!r->noisy) {
        r->quiet[t] = place->logprob;
        return AR_OK;
    }
    const double off = fabs(place->logprob - r->quiet[t]);
    r->squares += off * off;
    r->worst = fmax(r->worst, off);
    r->terms++;
    return AR_OK;
}

ar_status ari_lp_rounding(double *rms, double *worst, ari_lp_model *m, const ari_sequences *s,
                          const ar_logprobs_options *o)
{
    ari_sequence longest = s->list[0];
    for (size_t i = 1; i < s->count; i++)
        longest = s->list[i].n > longest.n ? s->list[i] : longest;
    longest.n = longest.n < ROUNDED_TOKENS ? longest.n : ROUNDED_TOKENS;
    const ari_sequences one = {.list = &longest, .count = 1};
    rows of = {.ids = NULL};
    size_t from = 0;
    rounding r = {.noisy = false};
    ar_status st = take(&of, &from, &one, m->config, ARI_ALONE);
    listener l = {.r = &of, .vocab = m->config->vocab, .fn = note_rounding, .user = &r};
    for (uint64_t seed = 0; seed <= ARI_NOISE_SEEDS && st == AR_OK; seed++) {
        r.noisy = seed > 0;
        if (o->progress)
            o->progress(o->progress_user, (double)seed / (ARI_NOISE_SEEDS + 1), "what rounding makes");
        st = run_baseline(m, &l, ari_sensitivity_noise(o->of), seed);
    }
    ari_arena_end(&of.arena, NULL);
    *rms = r.terms > 0 ? sqrt(r.squares / (double)r.terms) : 0.0;
    *worst = r.worst;
    return st;
}
