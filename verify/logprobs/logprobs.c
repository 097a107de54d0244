/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/logprobs/logprobs.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/atomic_file.h"
#include "ref/core/text.h"
#include "ref/io/hash.h"
#include "ref/io/json.h"
#include "ref/models/family.h"

/* Logits that are kept for an explanation, at most. */
#define KEPT_BYTES ((size_t)64 << 20)
/* How many times what rounding makes a side may be off, as a root mean square and in one place: arithmetics differ in
 * where they round. */
#define ROUNDING_RMS 4.0
#define ROUNDING_WORST 8.0

const char *const ar_logprobs_side_name[AR_LOGPROBS_SIDES] = {
    [AR_LOGPROBS_TRAINER] = "trainer", [AR_LOGPROBS_ROLLOUT] = "rollout"};

typedef struct side_data {
    ari_sequences sequences;
    size_t *of;                 /* [input]: which of its sequences is that one; SIZE_MAX: none */
    ari_lp_claim *claim;        /* [claims] */
    float *row;                 /* [kept][V] */
    size_t claims, every, kept; /* of `every` claims one has its row */
} side_data;

typedef struct top_entry {
    size_t token;
    double logprob;
} top_entry;

typedef struct job {
    const ar_logprobs_options *o;
    ar_logprobs_result *result;
    ari_lp_model model;
    ari_sequences input;
    ari_arena arena;     /* of what follows */
    size_t top;          /* entries that are kept of each place */
    ari_place **place;   /* [input] */
    top_entry **largest; /* [input], n*top of each; NULL: not asked for */
    side_data side[AR_LOGPROBS_SIDES];
} job;

static void job_fini(job *j)
{
    for (int k = 0; k < AR_LOGPROBS_SIDES; k++)
        ari_sequences_fini(&j->side[k].sequences);
    ari_sequences_fini(&j->input);
    ari_arena_end(&j->arena, NULL);
    ari_weights_destroy(j->model.weights);
    ari_weights_destroy(j->model.other);
}

/* --- what is given ------------------------------------------------------------------------------------------------ */

static ar_status copy_sequences(ari_sequences *to, const ari_sequences *from)
{
    for (size_t i = 0; i < from->count; i++) {
        ari_sequence *q;
        AR_TRY(ari_sequences_add(&q, to, from->list[i].n, false));
        q->prompt = from->list[i].prompt;
        memcpy(q->tokens, from->list[i].tokens, q->n * sizeof *q->tokens);
    }
    return AR_OK;
}

static bool same_tokens(const ari_sequence *a, const ari_sequence *b)
{
    return a->n == b->n && memcmp(a->tokens, b->tokens, a->n * sizeof *a->tokens) == 0;
}

/* Finds each of a side's sequences in the input, equal ones in their order. */
static ar_status match(job *j, int k)
{
    side_data *d = &j->side[k];
    AR_TRY(ARI_TAKE(&d->of, &j->arena, j->input.count, "sequences of a side"));
    for (size_t i = 0; i < j->input.count; i++)
        d->of[i] = SIZE_MAX;
    for (size_t i = 0; i < d->sequences.count; i++) {
        size_t at = i; /* mostly they are in the same order */
        const ari_sequence *q = &d->sequences.list[i];
        if (at >= j->input.count || d->of[at] != SIZE_MAX || !same_tokens(q, &j->input.list[at]))
            for (at = 0; at < j->input.count; at++)
                if (d->of[at] == SIZE_MAX && same_tokens(q, &j->input.list[at]))
                    break;
        if (at == j->input.count)
            return ar_error_set(
                AR_ERR_DATA,
                "%s: sequence %zu, of %zu token%s, is not among those of %s: both have to be of the same "
                "tokens",
                ARI_SHOW(j->o->side[k]), i, q->n, ARI_PLURAL(q->n),
                ARI_SHOW(j->o->input ? j->o->input : j->o->side[k == 0]));
        d->of[at] = i;
        if (j->input.list[at].prompt == 0)
            j->input.list[at].prompt = q->prompt;
    }
    return AR_OK;
}

/* The numbers of a side, and room for the rows of some. */
static ar_status list_claims(job *j, int k)
{
    side_data *d = &j->side[k];
    const size_t v = j->model.config->vocab, room = KEPT_BYTES / 4 / v;
    for (int listed = 0; listed < 2; listed++) {
        size_t n = 0;
        for (size_t i = 0; i < j->input.count; i++) {
            const ari_sequence *q = d->of[i] == SIZE_MAX ? NULL : &d->sequences.list[d->of[i]];
            for (size_t t = 1; q && t < q->n; t++) {
                if (isnan(q->given[t]))
                    continue;
                if (listed)
                    d->claim[n] = (ari_lp_claim){.sequence = i, .at = t, .given = q->given[t]};
                n++;
            }
        }
        if (n == 0)
            return ar_error_set(AR_ERR_DATA, "%s: has no log-probability of any token after the first of its sequence",
                                ARI_SHOW(j->o->side[k]));
        if (!listed)
            AR_TRY(ARI_TAKE(&d->claim, &j->arena, n, "log-probabilities of a side"));
        d->claims = n;
    }
    d->every = room > 0 ? (d->claims + room - 1) / room : d->claims;
    d->kept = (d->claims + d->every - 1) / d->every;
    size_t floats;
    AR_TRY(ari_mul_size(&floats, d->kept, v));
    return ARI_TAKE(&d->row, &j->arena, floats, "rows of logits");
}

static ar_status read_all(job *j)
{
    const ar_config *c = j->model.config;
    const ar_logprobs_options *o = j->o;
    for (int k = 0; k < AR_LOGPROBS_SIDES; k++) {
        if (o->side[k])
            AR_TRY(ari_sequences_read(&j->side[k].sequences, c, o->side[k], true));
    }
    if (o->input)
        AR_TRY(ari_sequences_read(&j->input, c, o->input, false));
    for (int k = 0; k < AR_LOGPROBS_SIDES && j->input.count == 0; k++)
        AR_TRY(copy_sequences(&j->input, &j->side[k].sequences));
    for (int k = 0; k < AR_LOGPROBS_SIDES; k++) {
        if (o->side[k])
            AR_TRY(match(j, k));
        if (o->side[k])
            AR_TRY(list_claims(j, k));
    }
    return AR_OK;
}

/* --- the model's numbers ------------------------------------------------------------------------------------------ */

/* The `top` largest, of equal ones the lower token first. */
static void find_largest(top_entry *out, size_t top, const double *logits, size_t v, double lse, bool binary64)
{
    size_t n = 0;
    for (size_t x = 0; x < v; x++) {
        size_t at = n < top ? n++ : top;
        if (at == top && !(logits[x] > out[top - 1].logprob))
            continue;
        at = at == top ? top - 1 : at;
        for (; at > 0 && logits[x] > out[at - 1].logprob; at--)
            out[at] = out[at - 1];
        out[at] = (top_entry){x, logits[x]};
    }
    for (size_t i = 0; i < n; i++)
        out[i].logprob = binary64 ? out[i].logprob - lse : (double)(float)(out[i].logprob - lse);
}

size_t ari_lp_claim_at(const ari_lp_claim *claim, size_t n, size_t sequence, size_t at)
{
    size_t low = 0;
    ARI_BISECT(low, n, i, claim[i].sequence < sequence || (claim[i].sequence == sequence && claim[i].at < at))
    return low < n && claim[low].sequence == sequence && claim[low].at == at ? low : n;
}

static void keep_row(side_data *d, size_t v, size_t sequence, size_t at, const double *logits, const ari_place *place)
{
    const size_t i = ari_lp_claim_at(d->claim, d->claims, sequence, at);
    if (i == d->claims)
        return;
    d->claim[i].reference = place->logprob;
    if (i % d->every != 0)
        return;
    float *row = d->row + i / d->every * v;
    for (size_t k = 0; k < v; k++)
        row[k] = (float)logits[k];
    d->claim[i].row = row;
}

static ar_status take_row(void *user, size_t sequence, size_t at, const double *logits, const ari_place *place)
{
    job *j = user;
    const size_t v = j->model.config->vocab;
    j->place[sequence][at] = *place;
    if (j->largest)
        find_largest(j->largest[sequence] + at * j->top, j->top, logits, v, place->lse, j->o->binary64);
    for (int k = 0; k < AR_LOGPROBS_SIDES; k++)
        keep_row(&j->side[k], v, sequence, at, logits, place);
    return AR_OK;
}

static ar_status compute(job *j)
{
    const size_t n = j->input.count;
    j->top = j->o->top < j->model.config->vocab ? j->o->top : j->model.config->vocab;
    AR_TRY(ARI_TAKE(&j->place, &j->arena, n, "log-probabilities"));
    if (j->top > 0)
        AR_TRY(ARI_TAKE(&j->largest, &j->arena, n, "largest log-probabilities"));
    for (size_t i = 0; i < n; i++) {
        AR_TRY(ARI_TAKE(&j->place[i], &j->arena, j->input.list[i].n, "log-probabilities"));
        if (j->largest)
            AR_TRY(ARI_TAKE(&j->largest[i], &j->arena, j->input.list[i].n * j->top, "largest log-probabilities"));
    }
    return ari_lp_forward(&j->model, &j->input, ARI_ALONE, take_row, j);
}

static int compare_digests(const void *a, const void *b)
{
    return memcmp(a, b, ARI_SHA256_BYTES);
}

/* Of each sequence one, over its tokens and their log-probabilities; of these one, in the order of their bytes. */
static ar_status hash_all(char hex[65], job *j)
{
    unsigned char(*digest)[ARI_SHA256_BYTES];
    ari_sha256 h;
    AR_TRY(ARI_TAKE(&digest, &j->arena, j->input.count, "hashes of sequences"));
    for (size_t i = 0; i < j->input.count; i++) {
        const ari_sequence *q = &j->input.list[i];
        ari_sha256_init(&h);
        ari_sha256_update(&h, q->tokens, q->n * sizeof *q->tokens);
        for (size_t t = 1; t < q->n; t++)
            ari_sha256_update(&h, &j->place[i][t].logprob, sizeof j->place[i][t].logprob);
        ari_sha256_digest(&h, digest[i]);
    }
    qsort(digest, j->input.count, sizeof *digest, compare_digests);
    ari_sha256_of(hex, digest, j->input.count * sizeof *digest);
    return AR_OK;
}

static ar_status sum_up(job *j)
{
    ar_logprobs_result *r = j->result;
    double sum = 0.0, entropy = 0.0;
    r->sequences = j->input.count;
    for (size_t i = 0; i < j->input.count; i++) {
        for (size_t t = 1; t < j->input.list[i].n; t++) {
            sum += j->place[i][t].logprob;
            entropy += j->place[i][t].entropy;
            r->tokens++;
        }
    }
    r->mean = r->tokens ? sum / (double)r->tokens : 0.0;
    r->entropy = r->tokens ? entropy / (double)r->tokens : 0.0;
    return hash_all(r->hash, j);
}

/* --- the sides ---------------------------------------------------------------------------------------------------- */

static void note_place(ar_logprobs_side *s, const ari_lp_claim *one, int64_t token)
{
    size_t at = s->places < AR_LOGPROBS_WORST ? s->places++ : AR_LOGPROBS_WORST;
    const ar_logprobs_place p = {one->sequence, one->at, token, one->given, one->reference};
    const double off = fabs(p.given - p.reference);
    if (at == AR_LOGPROBS_WORST) {
        at--;
        if (!(off > fabs(s->place[at].given - s->place[at].reference)))
            return;
    }
    for (; at > 0 && off > fabs(s->place[at - 1].given - s->place[at - 1].reference); at--)
        s->place[at] = s->place[at - 1];
    s->place[at] = p;
}

static void judge(job *j, int k)
{
    const side_data *d = &j->side[k];
    const ar_logprobs_result *r = j->result;
    ar_logprobs_side *s = &j->result->side[k];
    const double bound = j->o->within > 0.0 ? j->o->within : ROUNDING_WORST * r->rounding_worst;
    double squares = 0.0, sum = 0.0;
    size_t beyond = 0, finite = 0;
    s->tokens = d->claims;
    for (size_t i = 0; i < d->claims; i++) {
        const ari_lp_claim *one = &d->claim[i];
        const double off = one->given - one->reference;
        note_place(s, one, j->input.list[one->sequence].tokens[one->at]);
        s->worst = fmax(s->worst, isnan(off) ? (double)INFINITY : fabs(off));
        beyond += fabs(off) <= bound ? 0 : 1;
        if (!isfinite(off))
            continue;
        squares += off * off;
        sum += off;
        finite++;
    }
    s->rms = finite ? sqrt(squares / (double)finite) : (double)INFINITY;
    s->mean = finite ? sum / (double)finite : (double)INFINITY;
    s->share_off = (double)beyond / (double)d->claims;
    s->off = beyond > 0 || (!(j->o->within > 0.0) && s->rms > ROUNDING_RMS * r->rounding_rms);
}

static ar_status explain(job *j, int k)
{
    side_data *d = &j->side[k];
    ari_lp_claim *kept;
    size_t n = 0;
    AR_TRY(ARI_TAKE(&kept, &j->arena, d->kept, "log-probabilities with their logits"));
    for (size_t i = 0; i < d->claims; i++) {
        if (d->claim[i].row && isfinite(d->claim[i].given) && isfinite(d->claim[i].reference))
            kept[n++] = d->claim[i];
    }
    const ari_lp_case c = {.model = &j->model,
                           .sequences = &j->input,
                           .place = j->place,
                           .claim = kept,
                           .claims = n,
                           .rounding = j->result->rounding_rms};
    return n > 0 ? ari_lp_explain(&j->result->side[k], &c) : AR_OK;
}

static ar_status compare(job *j)
{
    ar_logprobs_result *r = j->result;
    if (!(j->o->within > 0.0))
        AR_TRY(ari_lp_rounding(&r->rounding_rms, &r->rounding_worst, &j->model, &j->input, j->o));
    for (int k = 0; k < AR_LOGPROBS_SIDES; k++) {
        if (!j->o->side[k])
            continue;
        judge(j, k);
        if (j->o->progress)
            j->o->progress(j->o->progress_user, (k + 0.5) / AR_LOGPROBS_SIDES, "causes");
        AR_TRY(explain(j, k));
    }
    return AR_OK;
}

/* --- the file ----------------------------------------------------------------------------------------------------- */

static json_t *number(double x)
{
    return isfinite(x) ? json_real(x) : isnan(x) ? json_null() : ari_json_number(x);
}

static json_t *top_json(const top_entry *e, size_t top)
{
    json_t *list = json_array();
    for (size_t i = 0; i < top; i++)
        json_array_append_new(list, json_pack("[I, o]", (json_int_t)e[i].token, number(e[i].logprob)));
    return list;
}

static json_t *line_of(const job *j, size_t i)
{
    const ari_sequence *q = &j->input.list[i];
    json_t *o = json_object(), *tokens = json_array(), *logprobs = json_array(), *entropies = json_array();
    json_t *largest = json_array();
    for (size_t t = 0; t < q->n; t++) {
        json_array_append_new(tokens, json_integer((json_int_t)q->tokens[t]));
        json_array_append_new(logprobs, t ? number(j->place[i][t].logprob) : json_null());
        json_array_append_new(entropies, t ? number(j->place[i][t].entropy) : json_null());
        json_array_append_new(largest, t && j->top ? top_json(j->largest[i] + t * j->top, j->top) : json_null());
    }
    json_object_set_new(o, "tokens", tokens);
    json_object_set_new(o, "logprobs", logprobs);
    json_object_set_new(o, "entropies", entropies);
    json_object_set(o, "top", j->top ? largest : NULL);
    json_decref(largest);
    for (int k = 0; k < AR_LOGPROBS_SIDES; k++) {
        const side_data *d = &j->side[k];
        if (!d->of || d->of[i] == SIZE_MAX)
            continue;
        json_t *given = json_array();
        for (size_t t = 0; t < q->n; t++)
            json_array_append_new(given, number(d->sequences.list[d->of[i]].given[t]));
        json_object_set_new(o, ar_logprobs_side_name[k], given);
    }
    return o;
}

static ar_status write_lines(const job *j)
{
    ARI_OWNED_BY(ari_atomic_file_discard) ari_atomic_file *f = NULL;
    AR_TRY(ari_atomic_file_create(&f, j->o->out));
    for (size_t i = 0; i < j->input.count; i++) {
        json_t *line = line_of(j, i);
        ARI_OWNED char *text =
            line ? json_dumps(line, JSON_COMPACT | JSON_REAL_PRECISION(j->o->binary64 ? 17 : 9)) : NULL;
        json_decref(line);
        if (!text)
            return ar_error_set(AR_ERR_MEMORY, "%s: no memory for a line", ARI_SHOW(j->o->out));
        AR_TRY(ari_atomic_file_write(f, text, strlen(text)));
        AR_TRY(ari_atomic_file_write(f, "\n", 1));
    }
    return ari_atomic_file_commit(f);
}

/* --- all ---------------------------------------------------------------------------------------------------------- */

static ar_status check_given(const ar_logprobs_options *o)
{
    const ar_run *r = &o->run;
    if (!r->model || (!o->input && !o->side[0] && !o->side[1]))
        return ar_error_set(AR_ERR_ARG, "log-probabilities need a model and tokens: an input, or a side's file");
    if (r->batch > 0 || r->seq > 0 || r->steps > 0 || r->clip != 0.0 || r->dropout != 0.0 || r->process)
        return ar_error_set(AR_ERR_ARG, "log-probabilities are made of given sequences, without an update, by ranks "
                                        "that are threads: batch, seq, steps, clip and dropout are 0");
    if (!(o->within >= 0.0) || isinf(o->within))
        return ar_error_set(AR_ERR_ARG, "what a side may be off is a finite number from 0, not %g", o->within);
    AR_TRY(ari_check_choice("arithmetic of the sides", (int)o->of, AR_SENSITIVITY_COUNT));
    if (o->binary64 &&
        (ar_parallel_world(&r->parallel) > 1 || r->parallel.recompute.what != AR_RECOMPUTE_NONE ||
         r->numerics != AR_NUMERICS_EXACT || r->precision != AR_PRECISION_F32 || r->device.kind != AR_DEVICE_CPU))
        return ar_error_set(AR_ERR_ARG, "binary64 log-probabilities are the baseline's, in plain loops on one rank: "
                                        "expected no layout, exact numerics, precision f32 and the CPU");
    AR_TRY(ari_run_check_numerics(r));
    return o->out && strcmp(o->out, "-") != 0 ? ari_atomic_file_check(o->out) : AR_OK;
}

static ar_status load_other(job *j, const ar_config *c)
{
    char folder[512];
    ar_config other;
    if (!j->o->other)
        return AR_OK;
    if (!j->model.weights)
        return ar_error_set(AR_ERR_ARG, "the other model's weights are compared with the model's, and %s has none",
                            ARI_SHOW(j->o->run.model));
    ar_run run = j->o->run;
    run.model = j->o->other;
    AR_TRY(ari_run_config(&other, folder, sizeof folder, &run));
    AR_TRY(ari_weights_load(&j->model.other, c, folder));
    return j->model.other ? AR_OK : ar_error_set(AR_ERR_NOT_FOUND, "%s: there are no weights", ARI_SHOW(j->o->other));
}

static ar_status run_job(job *j)
{
    char folder[512];
    ar_config *c = &j->result->config;
    AR_TRY(ari_run_config(c, folder, sizeof folder, &j->o->run));
    if (!ari_part_path(ari_family_of(c->arch), ARI_HEAD))
        return ar_error_set(AR_ERR_UNSUPPORTED, "%s has no head, and so no log-probabilities",
                            ARI_SHOW(j->o->run.model));
    AR_TRY(read_all(j));
    AR_TRY(ari_lp_check(&j->model, &j->input));
    AR_TRY(ari_weights_load(&j->model.weights, c, folder));
    j->result->fresh = j->model.weights == NULL;
    AR_TRY(load_other(j, c));
    AR_TRY(compute(j));
    AR_TRY(sum_up(j));
    AR_TRY(compare(j));
    j->result->seconds = j->model.seconds;
    return j->o->out ? write_lines(j) : AR_OK;
}

ar_status ar_logprobs(ar_logprobs_result *result, const ar_logprobs_options *o)
{
    *result = (ar_logprobs_result){.sequences = 0};
    AR_TRY(check_given(o));
    ARI_ENDED(job_fini)
    job j = {.o = o, .result = result, .model = {.run = o->run, .config = &result->config, .binary64 = o->binary64}};
    return run_job(&j);
}
