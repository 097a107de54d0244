/* SPDX-License-Identifier: Apache-2.0 */
/* Computes log-probabilities of a batch's labels. Each sequence is computed at its length, so in exact numerics neither
 * the other sequences of the batch nor padding, packing or the layout changes a bit, and in binary64 none of these
 * changes anything either. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "ref/core/atomic_file.h"
#include "ref/core/clock.h"
#include "ref/core/text.h"
#include "ref/io/hash.h"
#include "ref/io/safetensors_private.h"
#include "ref/layers/batch_private.h"
#include "ref/models/family.h"
#include "ref/numerics/scalar.h"
#include "verify/grads/grads.h"
#include "verify/plan/estimate.h"
#include "verify/run/run.h"

/* Maximum size of a group's logits in memory, if one sequence needs less. */
#define LOGITS_BYTES ((size_t)64 << 20)

/* The numbers of all places of the batch, [b, s], and rows of logits. */
typedef struct numbers {
    double *logprob, *entropy, *largest, *lse; /* NaN where no label is predicted */
    unsigned char *logits;                     /* [labels, V] logits; NULL: not requested */
    size_t rows;                               /* number of rows of logits so far */
    double sum;                                /* sum of the log-probabilities */
} numbers;

typedef struct job {
    const ar_grads_options *o;
    const ar_config *config;
    ari_weights *weights; /* NULL: fresh */
    ari_input_batch input;
    size_t *place;                 /* [tokens] position in the batch of each token that is not padding */
    size_t *sequence_begin, count; /* first index in `place` of each sequence, and the end of the last; number of
                                      sequences */
    int64_t *sequence;             /* [b, s] sequence number; -1 for padding */
    size_t labels;                 /* number of predicted labels */
    double *rounding;              /* [ARI_NOISE_SEEDS, b, s]; NULL: not requested */
    ari_arena arena;
} job;

static void job_fini(job *j)
{
    ari_arena_end(&j->arena, NULL);
    ari_input_batch_fini(&j->input);
    ari_weights_destroy(j->weights);
}

/* --- sequences ---------------------------------------------------------------------------------------------------- */

static int64_t label_at(const job *j, size_t place)
{
    const ar_batch *b = &j->input.batch;
    return (b->labels ? b->labels : b->input_ids)[place];
}

/* The documents of every row, without padding. */
static ar_status list_sequences(job *j)
{
    const ar_batch *b = &j->input.batch;
    const size_t place_count = b->batch * b->seq;
    size_t tokens = 0;
    AR_TRY(ARI_TAKE(&j->place, &j->arena, place_count, "places of tokens"));
    AR_TRY(ARI_TAKE(&j->sequence_begin, &j->arena, place_count + 1, "sequences of a batch"));
    AR_TRY(ARI_TAKE(&j->sequence, &j->arena, place_count, "sequences of a batch"));
    for (size_t row = 0; row < b->batch; row++) {
        for (size_t position = 0, end; position < b->seq; position = end) {
            size_t unused;
            const size_t begun = tokens;
            ari_batch_document(b, row, position, &unused, &end);
            for (size_t p = row * b->seq + position; p < row * b->seq + end; p++) {
                const bool is_token = !b->padding_mask || b->padding_mask[p];
                j->sequence[p] = is_token ? (int64_t)j->count : -1;
                if (!is_token)
                    continue;
                j->labels += tokens > begun && label_at(j, p) != AR_IGNORE_INDEX;
                j->place[tokens++] = p;
            }
            j->sequence_begin[j->count] = begun;
            j->count += tokens > begun;
        }
    }
    j->sequence_begin[j->count] = tokens;
    return AR_OK;
}

static size_t length_of(const job *j, size_t sequence)
{
    return j->sequence_begin[sequence + 1] - j->sequence_begin[sequence];
}

/* Consecutive sequences of equal length, as a batch. */
typedef struct group {
    const job *j;
    size_t from_sequence;
    ar_batch batch;
    numbers *out;
    char logits[96]; /* name of the logits in the baseline */
} group;

/* Begins a group with as many sequences from `first_sequence` on as fit one batch. */
static ar_status begin_group(group *g, ari_arena *arena, const job *j, size_t first_sequence)
{
    const ar_batch *b = &j->input.batch;
    const size_t n = length_of(j, first_sequence), capacity = LOGITS_BYTES / 4 / j->config->vocab / n;
    size_t count = 1;
    while (count < capacity && first_sequence + count < j->count && length_of(j, first_sequence + count) == n)
        count++;
    int64_t *ids = NULL, *positions = NULL;
    AR_TRY(ARI_TAKE(&ids, arena, count * n, "tokens of a group"));
    if (b->position_ids)
        AR_TRY(ARI_TAKE(&positions, arena, count * n, "positions of a group"));
    for (size_t i = 0; i < count * n; i++) {
        const size_t place = j->place[j->sequence_begin[first_sequence] + i];
        ids[i] = b->input_ids[place];
        if (positions)
            positions[i] = b->position_ids[place];
    }
    g->from_sequence = first_sequence;
    g->batch = (ar_batch){.batch = count, .seq = n, .input_ids = ids, .position_ids = positions};
    return AR_OK;
}

/* --- what a row of logits says ------------------------------------------------------------------------------------ */

static void note_row(numbers *out, size_t place, int64_t label, const float *x, size_t v)
{
    const ari_ce_row row = ari_ce_row_of(x, v);
    out->logprob[place] = (double)ari_round32((double)x[label] - row.lse);
    out->entropy[place] = (double)ari_round32(row.lse - (double)row.m - row.moment / row.l);
    out->largest[place] = (double)ari_round32((double)row.m - row.lse);
    out->lse[place] = row.lse;
}

/* Computes a row's log-probability in binary64; each sum runs from the first entry to the last. */
static void note_row_f64(numbers *out, size_t place, int64_t label, const double *x, size_t v)
{
    double m = x[0], l = 0.0, moment = 0.0;
    for (size_t i = 1; i < v; i++)
        m = x[i] > m || isnan(x[i]) ? x[i] : m;
    for (size_t i = 0; i < v; i++) {
        const double e = exp(x[i] - m);
        l += e;
        moment += e > 0.0 ? e * (x[i] - m) : 0.0;
    }
    const double lse = m + log(l);
    out->logprob[place] = x[label] - lse;
    out->entropy[place] = lse - m - moment / l;
    out->largest[place] = m - lse;
    out->lse[place] = lse;
}

/* Records a group's logits [b, s, V], which are given as fp32 or as binary64; the other pointer is NULL. */
static void note_group(const group *g, const float *narrow, const double *wide)
{
    const job *j = g->j;
    const size_t v = j->config->vocab, n = g->batch.seq, bytes = v * (narrow ? sizeof *narrow : sizeof *wide);
    for (size_t i = 0; i < g->batch.batch * n; i++) {
        const size_t place = j->place[j->sequence_begin[g->from_sequence] + i];
        const int64_t label = label_at(j, place);
        if (i % n == 0 || label == AR_IGNORE_INDEX)
            continue;
        const size_t offset = (i - 1) * v;
        if (narrow)
            note_row(g->out, place, label, narrow + offset, v);
        else
            note_row_f64(g->out, place, label, wide + offset, v);
        g->out->sum += g->out->logprob[place];
        if (g->out->logits)
            memcpy(g->out->logits + g->out->rows++ * bytes, narrow ? (const void *)(narrow + offset) : wide + offset,
                   bytes);
    }
}

/* --- runs --------------------------------------------------------------------------------------------------------- */

static ar_status hear_baseline(void *user, const char *name, char pass, int ndim, const size_t *shape,
                               const double *values)
{
    const group *g = user;
    (void)ndim, (void)shape;
    if (pass == 'f' && strcmp(name, g->logits) == 0)
        note_group(g, NULL, values);
    return AR_OK;
}

/* Runs the baseline in binary64. With a seed, adds random errors of the size that the given arithmetic makes. */
static ar_status run_baseline(group *g, ar_noise_units noise, uint64_t seed)
{
    const job *j = g->j;
    const ar_baseline_options run = {.mode = AR_MODE_F64,
                                     .seed = j->o->run.seed,
                                     .weights = j->weights ? ari_weights_find : NULL,
                                     .weights_user = j->weights,
                                     .emit = hear_baseline,
                                     .emit_user = g,
                                     .forward_only = true,
                                     .noise = noise,
                                     .noise_seed = seed};
    double loss;
    ari_logits_name(g->logits, sizeof g->logits, j->config);
    return ar_baseline_run(j->config, &run, &g->batch, &loss);
}

static ar_status run_ranks(const group *g)
{
    const job *j = g->j;
    const size_t world = (size_t)ar_parallel_world(&j->o->run.parallel);
    ARI_ENDED(ari_gatherer_fini) ari_gatherer gatherer = {0};
    ARI_ENDED(ari_cluster_result_fini) ari_cluster_result cluster_result = {.reports = NULL};
    ARI_OWNED void **users = NULL;
    AR_TRY(ari_gather_want_logits(&gatherer, j->config, &g->batch, 0));
    AR_TRY(ARI_ALLOC(&users, world, "listeners of the ranks"));
    for (size_t i = 0; i < world; i++)
        users[i] = &gatherer;
    AR_TRY(ari_cluster_run(&cluster_result, &(ari_cluster_options){.run = j->o->run,
                                                                   .config = j->config,
                                                                   .batch = &g->batch,
                                                                   .weights = j->weights ? ari_weights_find : NULL,
                                                                   .weights_user = j->weights,
                                                                   .forward_only = true,
                                                                   .tap = ari_gather_tap,
                                                                   .tap_user = users}));
    AR_TRY(ari_gather_check(&gatherer));
    note_group(g, gatherer.list[0].full.values, NULL);
    return AR_OK;
}

/* Computes all sequences; baseline: with plain loops in binary64. */
static ar_status compute(numbers *out, const job *j, bool baseline, ar_noise_units noise, uint64_t seed)
{
    for (size_t first_sequence = 0; first_sequence < j->count;) {
        ARI_ENDED(ari_arena_free) ari_arena arena = {NULL};
        group g = {.j = j, .out = out};
        AR_TRY(begin_group(&g, &arena, j, first_sequence));
        AR_TRY(baseline ? run_baseline(&g, noise, seed) : run_ranks(&g));
        first_sequence += g.batch.batch;
    }
    return AR_OK;
}

static ar_status begin_numbers(numbers *out, ari_arena *arena, size_t places)
{
    double **const arrays[] = {&out->logprob, &out->entropy, &out->largest, &out->lse};
    for (size_t k = 0; k < sizeof arrays / sizeof *arrays; k++) {
        AR_TRY(ARI_TAKE(arrays[k], arena, places, "log-probabilities"));
        for (size_t p = 0; p < places; p++)
            (*arrays[k])[p] = (double)NAN;
    }
    return AR_OK;
}

/* Measures how randomly drawn rounding errors change each log-probability. */
static ar_status measure_rounding(job *j)
{
    const ar_grads_options *o = j->o;
    const size_t places = j->input.batch.batch * j->input.batch.seq;
    numbers exact = {.rows = 0}, noisy = {.rows = 0};
    AR_TRY(begin_numbers(&exact, &j->arena, places));
    AR_TRY(begin_numbers(&noisy, &j->arena, places));
    AR_TRY(ARI_TAKE(&j->rounding, &j->arena, ARI_NOISE_SEEDS * places, "rounding of log-probabilities"));
    for (uint64_t seed = 0; seed <= ARI_NOISE_SEEDS; seed++) {
        if (o->progress)
            o->progress(o->progress_user, (double)seed / (ARI_NOISE_SEEDS + 1), "rounding");
        AR_TRY(compute(seed == 0 ? &exact : &noisy, j, true, ari_sensitivity_noise(o->sensitivity_of), seed));
        for (size_t p = 0; p < places && seed > 0; p++)
            j->rounding[(seed - 1) * places + p] = noisy.logprob[p] - exact.logprob[p];
    }
    return AR_OK;
}

/* --- the file ----------------------------------------------------------------------------------------------------- */

static ar_status write_numbers(ar_grads_result *result, const job *j, const numbers *n)
{
    char vocab[24];
    snprintf(vocab, sizeof vocab, "%zu", j->config->vocab);
    const char *const metadata[] = {"format", "pt", "vocab", vocab};
    const size_t b = j->input.batch.batch, s = j->input.batch.seq;
    const ar_st_tensor tensors[] = {
        {"sequences", AR_I64, 2, {b, s}, j->sequence},
        {"logprobs", AR_F64, 2, {b, s}, n->logprob},
        {"entropies", AR_F64, 2, {b, s}, n->entropy},
        {"largest", AR_F64, 2, {b, s}, n->largest},
        {"lse", AR_F64, 2, {b, s}, n->lse},
        {"logits", j->o->binary64 ? AR_F64 : AR_F32, 2, {j->labels, j->config->vocab}, n->logits},
        {"rounding", AR_F64, 3, {ARI_NOISE_SEEDS, b, s}, j->rounding},
    };
    ar_st_tensor list[sizeof tensors / sizeof *tensors];
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) {
        if (tensors[i].data)
            list[result->tensors++] = tensors[i];
    }
    AR_TRY(ari_tensors_hash(result->outputs_hash, list, result->tensors));
    snprintf(result->file[0], sizeof result->file[0], "%s", j->o->logprobs);
    return ari_st_write(j->o->logprobs, list, result->tensors, metadata, 2);
}

/* --- all ---------------------------------------------------------------------------------------------------------- */

/* Refuses a layout that a length of the sequences does not allow. */
static ar_status check_lengths(const job *j)
{
    ari_estimate e;
    const ar_grads_options *o = j->o;
    ari_estimate_case size = {.run = o->run,
                              .config = j->config,
                              .parallel = &o->run.parallel,
                              .layouts = 1,
                              .alone = true,
                              .noise_runs = o->sensitivity || o->binary64};
    size_t longest = 0;
    size.run.batch = 1;
    for (size_t i = 0; i < j->count; i++) {
        const size_t n = length_of(j, i);
        longest = n > longest ? n : longest;
        if (i > 0 && n == length_of(j, i - 1))
            continue;
        size.run.seq = n;
        const ar_status st = ar_run_check(&size.run, j->config);
        if (st != AR_OK)
            return ar_error_set(st, "%s: sequence %zu, of %zu token%s: %s", ARI_SHOW(o->input), i, n, ARI_PLURAL(n),
                                ar_error_message());
    }
    size.run.seq = longest;
    AR_TRY(ari_run_check_declared(&size.run, j->config));
    AR_TRY(ari_estimate_check(&e, &size));
    return ari_estimate_fits(&e);
}

static ar_status check_given(const ar_grads_options *o)
{
    const ar_run *r = &o->run;
    if (!r->model || o->out || o->stacked || o->per_rank || o->activations || r->fault ||
        r->loss.label_smoothing != 0.0 || r->loss.z_loss != 0.0 || r->sim.trace || r->sim.cluster)
        return ar_error_set(AR_ERR_ARG,
                            "log-probabilities are those of a model and written alone, by forward passes: no block, "
                            "output folder, fault, trace, cluster, label smoothing or z-loss goes with them");
    if (o->binary64 &&
        (ar_parallel_world(&r->parallel) > 1 || r->parallel.recompute.part != AR_RECOMPUTE_NONE ||
         r->numerics != AR_NUMERICS_EXACT || r->precision != AR_PRECISION_F32 || r->device.kind != AR_DEVICE_CPU))
        return ar_error_set(AR_ERR_ARG, "binary64 log-probabilities are the baseline's, in plain loops on one rank: "
                                        "expected no layout, exact numerics, precision f32 and the CPU");
    return ari_atomic_file_check(o->logprobs);
}

static ar_status read_input(job *j)
{
    const char *path = ARI_SHOW(j->o->input);
    AR_TRY(ari_input_batch_load(&j->input, j->config, j->o->input));
    if (j->input.batch.additive_mask)
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "%s: attention_mask has 4 dimensions; of log-probabilities expected [b, s] of 0 and 1, "
                            "which says what is padding",
                            path);
    AR_TRY(list_sequences(j));
    return j->count > 0 ? AR_OK : ar_error_set(AR_ERR_DATA, "%s: all of it is padding", path);
}

ar_status ari_grads_logprobs(ar_grads_result *result, const ar_grads_options *o)
{
    char folder[512];
    const uint64_t begun = ari_now_ns();
    ar_config *c = &result->config;
    ARI_ENDED(job_fini) job j = {.o = o, .config = c};
    numbers n = {.rows = 0};
    size_t bytes;
    AR_TRY(check_given(o));
    AR_TRY(ari_run_config(c, folder, sizeof folder, &o->run));
    if (!ari_part_path(ari_family_of(c->arch), ARI_HEAD))
        return ar_error_set(AR_ERR_UNSUPPORTED, "%s has no head, and so no log-probabilities", ARI_SHOW(o->run.model));
    AR_TRY(read_input(&j));
    AR_TRY(check_lengths(&j));
    AR_TRY(ari_weights_load(&j.weights, c, folder));
    AR_TRY(begin_numbers(&n, &j.arena, j.input.batch.batch * j.input.batch.seq));
    AR_TRY(ari_mul_size(&bytes, j.labels, c->vocab * (o->binary64 ? sizeof(double) : sizeof(float))));
    if (o->logits)
        AR_TRY(ARI_TAKE(&n.logits, &j.arena, bytes, "rows of logits"));
    AR_TRY(compute(&n, &j, o->binary64, (ar_noise_units){.inner = 0.0}, 0));
    if (o->sensitivity)
        AR_TRY(measure_rounding(&j));
    result->fresh = j.weights == NULL;
    result->batch = j.input.batch.batch;
    result->loss = (float)(-n.sum / (double)j.labels);
    result->seconds = 1e-9 * (double)(ari_now_ns() - begun);
    return write_numbers(result, &j, &n);
}
