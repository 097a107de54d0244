/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "planner/estimate.h"
#include "ref/core/size.h"
#include "run/cluster_run.h"
#include "verify/grads/grads.h"
#include "verify/logprobs/logprobs.h"
#include "verify/reference/sensitivity.h"

/* Logits of a batch that are in memory at once, at most, where a row has less. */
#define LOGITS_BYTES ((size_t)64 << 20)
/* Places of a row in which all sequences stand. */
enum { PACKED_MOST = 4096 };

/* --- rows --------------------------------------------------------------------------------------------------------- */

/* A sequence in a batch: its first token is place `start` of a row. */
typedef struct span {
    size_t sequence, row, start;
} span;

typedef struct rows {
    ar_batch batch;
    int64_t *ids, *positions; /* [b, s]; positions NULL: 0 .. s-1 */
    uint8_t *padding;         /* NULL: all is attended to */
    span *span;               /* [sequences] */
    size_t spans;
} rows;

static void rows_fini(rows *r)
{
    free(r->ids);
    free(r->positions);
    free(r->padding);
    free(r->span);
    *r = (rows){.ids = NULL};
}

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
    ar_status st = AR_OK;
    *r = (rows){.spans = spans};
    AR_TRY(ari_mul_size(&all, b, n));
    AR_TRY_TO(failed, st, ARI_ALLOC(&r->ids, all, "tokens of a batch"));
    AR_TRY_TO(failed, st, ARI_ALLOC(&r->span, spans, "sequences of a batch"));
    if (reading != ARI_ALONE && reading != ARI_PADDING_ATTENDED && reading != ARI_PACKED_TOGETHER)
        AR_TRY_TO(failed, st, ARI_ALLOC_ZERO(&r->positions, all, "positions of a batch"));
    if (reading == ARI_PADDED_POSITIONS)
        AR_TRY_TO(failed, st, ARI_ALLOC_ZERO(&r->padding, all, "padding of a batch"));
    for (size_t i = 0; i < all; i++)
        r->ids[i] = c->pads ? (int64_t)c->pad_id : 0;
    r->batch =
        (ar_batch){.batch = b, .seq = n, .input_ids = r->ids, .position_ids = r->positions, .padding_mask = r->padding};
    return AR_OK;
failed:
    rows_fini(r);
    return st;
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
        put(r, i, s, (span){sequence, packed ? 0 : i, packed ? start : n - own}, reading);
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

static ar_status run_rows(ari_lp_model *m, const rows *r, ari_logits_fn fn, void *user)
{
    const size_t world = (size_t)ar_parallel_world(&m->run.parallel), n = r->batch.seq, v = m->config->vocab;
    ari_gatherer g = {0};
    ari_cluster_result done = {.reports = NULL};
    void **users = NULL;
    ar_status st = AR_OK;
    AR_TRY_TO(end, st, ari_gather_want_logits(&g, m->config, &r->batch, 0));
    AR_TRY_TO(end, st, ARI_ALLOC(&users, world, "listeners of the ranks"));
    for (size_t i = 0; i < world; i++)
        users[i] = &g;
    AR_TRY_TO(end, st,
              ari_cluster_run(&done, &(ari_cluster_options){.run = m->run,
                                                            .config = m->config,
                                                            .batch = &r->batch,
                                                            .weights = m->weights ? find_weights : NULL,
                                                            .weights_user = m,
                                                            .forward_only = true,
                                                            .tap = ari_gather_tap,
                                                            .tap_user = users}));
    AR_TRY_TO(end, st, ari_gather_check(&g));
    m->seconds += done.seconds;
    for (size_t i = 0; i < r->spans && st == AR_OK; i++)
        st = fn(user, r->span[i].sequence, g.list[0].full.values + (r->span[i].row * n + r->span[i].start) * v);
end:
    free(done.reports);
    free(done.loss);
    free(users);
    ari_gatherer_fini(&g);
    return st;
}

ar_status ari_lp_forward(ari_lp_model *m, const ari_sequences *s, ari_lp_reading reading, ari_logits_fn fn, void *user)
{
    for (size_t from = 0; from < s->count;) {
        rows r;
        AR_TRY(take(&r, &from, s, m->config, reading));
        const ar_status st = run_rows(m, &r, fn, user);
        rows_fini(&r);
        AR_TRY(st);
    }
    return AR_OK;
}

ar_status ari_lp_check(const ari_lp_model *m, const ari_sequences *s)
{
    ari_estimate e;
    ari_estimate_case size = {
        .run = m->run, .config = m->config, .parallel = &m->run.parallel, .layouts = 1, .alone = true};
    size.run.batch = 1;
    for (size_t i = 0; i < s->count; i++) {
        if (i > 0 && s->list[i].n == s->list[i - 1].n)
            continue;
        size.run.seq = s->list[i].n;
        const ar_status st = ar_run_check(&size.run, m->config);
        if (st != AR_OK)
            return ar_error_set(st, "sequence %zu, of %zu tokens: %s", i, s->list[i].n, ar_error_message());
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
    const ar_batch *batch;
    char name[96];
    size_t vocab;
    double quiet[ROUNDED_TOKENS]; /* log-probabilities without rounding */
    bool noisy;
    double squares, worst;
    size_t terms;
} rounding;

static double logprob64(const double *z, size_t v, size_t token)
{
    double m = z[0], l = 0.0;
    for (size_t j = 1; j < v; j++)
        m = fmax(m, z[j]);
    for (size_t j = 0; j < v; j++)
        l += exp(z[j] - m);
    return z[token] - m - log(l);
}

static ar_status note_logits(void *user, const char *name, char pass, int ndim, const size_t *shape,
                             const double *values)
{
    rounding *r = user;
    (void)ndim, (void)shape;
    if (pass != 'f' || strcmp(name, r->name) != 0)
        return AR_OK;
    for (size_t t = 1; t < r->batch->seq; t++) {
        const double x = logprob64(values + (t - 1) * r->vocab, r->vocab, (size_t)r->batch->input_ids[t]);
        if (r->noisy) {
            const double off = fabs(x - r->quiet[t]);
            r->squares += off * off;
            r->worst = fmax(r->worst, off);
            r->terms++;
        }
        r->quiet[t] = r->noisy ? r->quiet[t] : x;
    }
    return AR_OK;
}

ar_status ari_lp_rounding(double *rms, double *worst, ari_lp_model *m, const ari_sequences *s,
                          const ar_logprobs_options *o)
{
    const ari_sequence *q = &s->list[0];
    for (size_t i = 1; i < s->count; i++)
        q = s->list[i].n > q->n ? &s->list[i] : q;
    const ar_batch batch = {.batch = 1, .seq = q->n < ROUNDED_TOKENS ? q->n : ROUNDED_TOKENS, .input_ids = q->tokens};
    rounding r = {.batch = &batch, .vocab = m->config->vocab};
    ari_logits_name(r.name, sizeof r.name, m->config);
    ar_baseline_options run = {.mode = AR_MODE_F64,
                               .seed = m->run.seed,
                               .weights = m->weights ? find_weights : NULL,
                               .weights_user = m,
                               .emit = note_logits,
                               .emit_user = &r,
                               .forward_only = true,
                               .noise = ari_sensitivity_noise(o->of)};
    for (uint64_t seed = 0; seed <= ARI_NOISE_SEEDS; seed++) {
        double loss;
        r.noisy = seed > 0;
        run.noise_seed = seed;
        if (o->progress)
            o->progress(o->progress_user, (double)seed / (ARI_NOISE_SEEDS + 1), "what rounding makes");
        AR_TRY(ar_baseline_run(m->config, &run, &batch, &loss));
    }
    *rms = r.terms > 0 ? sqrt(r.squares / (double)r.terms) : 0.0;
    *worst = r.worst;
    return AR_OK;
}
