/* SPDX-License-Identifier: Apache-2.0 */
/* Why a side's log-probabilities are not the model's: each mistake predicts numbers from the model's logits, or from
 * another run of the model, and is judged by the share of the squares of the differences that it takes away. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "anyrank/model.h"
#include "ref/core/float_bits.h"
#include "ref/models/family.h"
#include "ref/numerics/scalar.h"
#include "verify/diagnose/case.h"
#include "verify/logprobs/logprobs.h"

enum {
    SECTION, /* no cause: where none is found */
    LOGITS_BF16,
    LOGPROBS_BF16,
    RAW_LOGIT,
    LARGEST,
    ENTROPY,
    SIGN,
    PROBABILITY,
    BASE_2,
    BASE_10,
    NEXT,
    PREVIOUS,
    OF_ROWS, /* those before are predicted place by place */
    TEMPERATURE = OF_ROWS,
    TOP_K,
    TOP_P,
    MIN_P,
    FROM_ONE,
    RESPONSE_RESTARTS,
    PADDED_POSITIONS,
    PADDING,
    TOGETHER,
    OTHER_WEIGHTS,
    STALE_MODULE,
    CAUSES
};

/* A row says what the numbers are and, behind the newline, what to look at; the first is the title of all. */
#define CAUSE(name, says, look)              \
    {                                        \
        .id = (name), .text = says "\n" look \
    }
static const ari_cause causes[CAUSES] = {
    [SECTION] = {.passes = "", .looks = "Log-probabilities of a trainer or a rollout", .text = ""},
    [LOGITS_BF16] = CAUSE("logits_in_bf16", "the logits were rounded to bf16 before the softmax",
                          "the dtype of the head's output: cast it to fp32 before log_softmax"),
    [LOGPROBS_BF16] = CAUSE("logprobs_in_bf16", "the log-probabilities were rounded to bf16",
                            "the dtype of what is returned or stored"),
    [RAW_LOGIT] = CAUSE("raw_logit", "the numbers are logits: no softmax was taken", "log_softmax before the gather"),
    [LARGEST] =
        CAUSE("largest_for_token", "the numbers are those of the most likely token, not of the token that is there",
              "which ids are gathered: the sequence's, not argmax"),
    [ENTROPY] =
        CAUSE("entropy_for_logprob", "the numbers are minus the entropy of each place", "which tensor is returned"),
    [SIGN] = CAUSE("sign_flipped", "the sign is flipped: a loss of each token", "cross_entropy returns -log p"),
    [PROBABILITY] = CAUSE("probability_for_logprob", "the numbers are probabilities, not their logarithms",
                          "softmax for log_softmax"),
    [BASE_2] = CAUSE("logarithm_base_2", "the logarithms are to base 2", "log2 for log"),
    [BASE_10] = CAUSE("logarithm_base_10", "the logarithms are to base 10", "log10 for log"),
    [NEXT] =
        CAUSE("shifted_by_one", "each number is that of the token after it", "logits[:, :-1] against tokens[:, 1:]"),
    [PREVIOUS] =
        CAUSE("shifted_by_one", "each number is that of the token before it", "logits[:, :-1] against tokens[:, 1:]"),
    [TEMPERATURE] = CAUSE("temperature", "the logits were divided by a temperature, {value}",
                          "the sampling temperature: divide by it on both sides, or on neither (vLLM: logprobs_mode)"),
    [TOP_K] = CAUSE("top_k", "the softmax is over the {value} largest logits alone{temperature}",
                    "top_k of the sampler: log-probabilities after it are not the model's (vLLM: logprobs_mode)"),
    [TOP_P] = CAUSE("top_p", "the softmax is over the largest probabilities up to a sum of {value} alone{temperature}",
                    "top_p of the sampler: log-probabilities after it are not the model's (vLLM: logprobs_mode)"),
    [MIN_P] = CAUSE("min_p", "the softmax is over probabilities of at least {value} of the largest alone{temperature}",
                    "min_p of the sampler: log-probabilities after it are not the model's (vLLM: logprobs_mode)"),
    [FROM_ONE] = CAUSE("positions_from_one", "positions count from 1", "position_ids: the first token's is 0"),
    [RESPONSE_RESTARTS] = CAUSE("positions_restart", "positions of the response count from 0 again",
                                "position_ids of the response: they go on behind the prompt's"),
    [PADDED_POSITIONS] = CAUSE("positions_count_padding", "positions count the padding in front of a sequence",
                               "position_ids of left padding: attention_mask.cumsum(-1) - 1"),
    [PADDING] = CAUSE("padding_attended", "the padding in front of a sequence is attended to",
                      "attention_mask with left padding"),
    [TOGETHER] = CAUSE("documents_attended", "packed sequences attend to those before them",
                       "cu_seqlens, or the mask, of packed sequences"),
    [OTHER_WEIGHTS] = CAUSE("other_weights", "the weights are those of the other model",
                            "whether the weights were sent before these tokens were computed"),
    [STALE_MODULE] = CAUSE("module_not_synchronised",
                           "the weights of {value} are those of the other model, all others are this one's",
                           "names and shards of that module in the transfer of weights"),
};

const ari_cause *ari_lp_causes(size_t *n)
{
    *n = CAUSES;
    return causes;
}

/* --- the best so far ---------------------------------------------------------------------------------------------- */

typedef struct search {
    const ari_lp_case *c;
    double squares; /* of all differences */
    int cause;
    double left;       /* squares that the best leaves */
    ari_trace trace;   /* the facts of its sentence */
    double *predicted; /* [claims] */
} search;

static double square_of(double predicted, const ari_lp_claim *one)
{
    const double off = predicted - one->given, plain = one->given - one->reference;
    return isfinite(off) ? off * off : plain * plain + 1.0; /* it says that this cannot be */
}

static void note(search *s, int cause, double left, const char *value, const char *temperature)
{
    if (!(left < s->left))
        return;
    s->cause = cause;
    s->left = left;
    ari_trace_set(&s->trace, ARI_FOUND_NOTHING, 0);
    ari_words(&s->trace, "value", "%s", value);
    ari_words(&s->trace, "temperature", "%s", temperature);
}

/* Nothing is left but rounding. */
static bool is_found(const search *s)
{
    const double rounding = 4.0 * s->c->rounding;
    return s->left <= 0.001 * s->squares ||
           (s->left <= 0.1 * s->squares && s->left <= rounding * rounding * (double)s->c->claims);
}

/* --- place by place ----------------------------------------------------------------------------------------------- */

static float to_bf16(float x)
{
    return ari_f32_of_bf16(ari_bf16_of_f32(x));
}

static double rounded_row(const float *row, size_t v, int64_t token)
{
    double m = -INFINITY, l = 0.0;
    for (size_t j = 0; j < v; j++) {
        const double z = (double)to_bf16(row[j]);
        m = z > m ? z : m; /* no fmax: gcc 12 for ARM64 breaks off where it vectorises it */
    }
    for (size_t j = 0; j < v; j++)
        l += exp((double)to_bf16(row[j]) - m);
    return (double)to_bf16(row[token]) - m - log(l);
}

static double predict(const search *s, const ari_lp_claim *one, int cause)
{
    const ari_sequence *q = &s->c->sequences->list[one->sequence];
    const ari_place *p = s->c->place[one->sequence];
    const double lp = one->reference;
    switch (cause) {
    case LOGITS_BF16:
        return rounded_row(one->row, s->c->model->config->vocab, q->tokens[one->at]);
    case LOGPROBS_BF16:
        return (double)to_bf16((float)lp);
    case RAW_LOGIT:
        return (double)one->row[q->tokens[one->at]];
    case LARGEST:
        return p[one->at].largest;
    case ENTROPY:
        return -p[one->at].entropy;
    case SIGN:
        return -lp;
    case PROBABILITY:
        return exp(lp);
    case BASE_2:
        return lp / log(2.0);
    case BASE_10:
        return lp / log(10.0);
    case NEXT:
        return one->at + 1 < q->n ? p[one->at + 1].logprob : one->given;
    default:
        return one->at > 1 ? p[one->at - 1].logprob : one->given;
    }
}

static void try_rows(search *s)
{
    for (int cause = SECTION + 1; cause < OF_ROWS; cause++) {
        double left = 0.0;
        for (size_t i = 0; i < s->c->claims; i++)
            left += square_of(predict(s, &s->c->claim[i], cause), &s->c->claim[i]);
        note(s, cause, left, "", "");
    }
}

/* --- what a sampler leaves ---------------------------------------------------------------------------------------- */

/* A sampler is believed where it leaves less than this share of what a simpler one leaves: first those with one number,
 * then those with a temperature too. */
#define WORTH_A_NUMBER 0.5

static ar_status try_samplers(search *s)
{
    static const int kinds[ARI_SUPPORTS] = {
        [ARI_ALL] = TEMPERATURE, [ARI_LARGEST_K] = TOP_K, [ARI_LARGEST_P] = TOP_P, [ARI_LEAST_P] = MIN_P};
    ari_sampler found[ARI_SUPPORTS];
    AR_TRY(ari_samplers_fit(found, s->c));
    for (int plain = 1; plain >= 0; plain--) {
        for (int k = 0; k < ARI_SUPPORTS; k++) {
            const ari_sampler *f = &found[k];
            const bool divided = k != ARI_ALL && fabs(f->temperature - 1.0) > 1e-9;
            char value[32], temperature[48] = "";
            if (divided == (plain == 1) || !(f->left < WORTH_A_NUMBER * s->left))
                continue;
            snprintf(value, sizeof value, "%.4g", k == ARI_ALL ? f->temperature : f->number);
            if (divided)
                snprintf(temperature, sizeof temperature, ", after a division by a temperature, %.4g", f->temperature);
            note(s, kinds[k], f->left, value, temperature);
        }
    }
    return AR_OK;
}

/* --- other runs of the model -------------------------------------------------------------------------------------- */

static ar_status note_row(void *user, size_t sequence, size_t at, const double *logits, const ari_place *place)
{
    const search *s = user;
    const size_t i = ari_lp_claim_at(s->c->claim, s->c->claims, sequence, at);
    (void)logits;
    if (i < s->c->claims)
        s->predicted[i] = place->logprob;
    return AR_OK;
}

static ar_status try_run(search *s, int cause, ari_lp_reading reading, const char *replaced)
{
    ari_lp_model m = *s->c->model;
    double left = 0.0;
    if (!ari_lp_reading_fits(s->c->sequences, m.config, reading))
        return AR_OK;
    m.run.parallel = (ar_parallel){.tp = 0};
    m.replaced = replaced;
    AR_TRY(ari_lp_forward(&m, s->c->sequences, reading, note_row, s));
    for (size_t i = 0; i < s->c->claims; i++)
        left += square_of(s->predicted[i], &s->c->claim[i]);
    note(s, cause, left, replaced ? replaced : "", "");
    return AR_OK;
}

static ar_status try_readings(search *s)
{
    static const struct {
        ari_lp_reading reading;
        int cause;
    } all[] = {{ARI_FROM_ONE, FROM_ONE},
               {ARI_RESPONSE_RESTARTS, RESPONSE_RESTARTS},
               {ARI_PADDED_POSITIONS, PADDED_POSITIONS},
               {ARI_PADDING_ATTENDED, PADDING},
               {ARI_PACKED_TOGETHER, TOGETHER},
               {ARI_PACKED_RESTARTS, TOGETHER}};
    for (size_t i = 0; i < sizeof all / sizeof *all && !is_found(s); i++)
        AR_TRY(try_run(s, all[i].cause, all[i].reading, NULL));
    return AR_OK;
}

/* The other model's weights in all modules, and in one module after the other. */
static ar_status try_weights(search *s)
{
    static const ari_role ends[] = {ARI_TOKENS, ARI_FINAL_NORM, ARI_HEAD};
    const ar_config *c = s->c->model->config;
    if (!s->c->model->other || is_found(s))
        return AR_OK;
    AR_TRY(try_run(s, OTHER_WEIGHTS, ARI_ALONE, ""));
    for (size_t i = 0; i < c->layers && !is_found(s); i++) {
        ar_block_options unused;
        char name[96];
        AR_TRY(ar_config_block(c, i, &unused, name, sizeof name));
        AR_TRY(try_run(s, STALE_MODULE, ARI_ALONE, name));
    }
    for (size_t i = 0; i < sizeof ends / sizeof *ends && !is_found(s); i++) {
        const char *name = ari_part_path(ari_family_of(c->arch), ends[i]);
        if (name && !(c->tied && ends[i] == ARI_HEAD))
            AR_TRY(try_run(s, STALE_MODULE, ARI_ALONE, name));
    }
    return AR_OK;
}

/* --- all ---------------------------------------------------------------------------------------------------------- */

/* A cause is named where it explains so much. */
#define EXPLAINED_LEAST 0.75
/* Of a side that rounding could have made. */
#define EXPLAINED_ALONE 0.9

/* Differences of a fp32 softmax from ours, which nothing else is to explain. */
#define NOTHING 1e-6

/* Whether what the best cause leaves is little beside how the numbers vary among themselves, or is rounding: any cause
 * with their mean takes away most of what numbers that are far from the model's are off by. */
static bool is_of_each(const search *s)
{
    const size_t n = s->c->claims;
    const double rounding = 4.0 * s->c->rounding;
    double mean = 0.0, vary = 0.0;
    for (size_t i = 0; i < n; i++)
        mean += s->c->claim[i].given / (double)n;
    for (size_t i = 0; i < n; i++)
        vary += (s->c->claim[i].given - mean) * (s->c->claim[i].given - mean);
    return s->left <= (1.0 - EXPLAINED_LEAST) * vary || s->left <= rounding * rounding * (double)n;
}

/* Nothing is said of a side that is as the model but for rounding, unless a cause explains nearly all. */
static void conclude(ar_logprobs_side *side, search *s)
{
    const double explained = s->squares > 0.0 ? 1.0 - s->left / s->squares : 0.0;
    const bool rounds = s->cause == LOGITS_BF16 || s->cause == LOGPROBS_BF16;
    if (!side->off && !(explained >= EXPLAINED_ALONE && side->worst > NOTHING))
        return;
    if (explained < EXPLAINED_LEAST || !is_of_each(s))
        s->cause = SECTION;
    side->off = side->off || !rounds;
    side->explained = explained;
    ari_text says = ari_plain_text_in(side->says, sizeof side->says);
    ari_fill_sentence(&says, &s->trace, NULL, causes[s->cause].text);
    side->cause = causes[s->cause].id;
    if (side->cause) {
        side->look_at = strchr(causes[s->cause].text, '\n') + 1;
        return;
    }
    side->cause = "unknown";
    snprintf(side->says, sizeof side->says, "what was found fits no known cause");
}

ar_status ari_lp_explain(ar_logprobs_side *side, const ari_lp_case *c)
{
    search s = {.c = c, .cause = SECTION};
    ARI_OWNED double *predicted = NULL;
    for (size_t i = 0; i < c->claims; i++)
        s.squares += square_of(c->claim[i].reference, &c->claim[i]);
    s.left = s.squares;
    if (!side->off && side->worst <= NOTHING)
        return AR_OK;
    AR_TRY(ARI_ALLOC(&predicted, c->claims, "predicted log-probabilities"));
    s.predicted = predicted;
    try_rows(&s);
    if (!is_found(&s))
        AR_TRY(try_samplers(&s));
    if (side->off && !is_found(&s))
        AR_TRY(try_readings(&s));
    if (side->off)
        AR_TRY(try_weights(&s));
    conclude(side, &s);
    return AR_OK;
}
