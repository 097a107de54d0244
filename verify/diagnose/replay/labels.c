/* SPDX-License-Identifier: Apache-2.0 */
/* Labels and weights that are others on some ranks or in some samples, whatever the loss makes of them: the labels by
 * the gradient of each token, the weights by that gradient as a multiple of the reference's. */
#include "verify/diagnose/hypothesis.h"
#include "verify/diagnose/replay/loss.h"

enum { FEWEST_MOVED = 4, SAMPLES_SAID = 12 };

/* True if a rank holds one of the tokens, of whose gradient t is. */
static bool holds(const ar_dump_tensor *t, int rank, const bool *token, size_t seq)
{
    for (size_t p = 0; p < t->parts; p++) {
        for (size_t b = 0; t->part[p].rank == rank && b < t->part[p].boxes; b++) {
            const ar_dump_box *box = &t->part[p].box[b];
            for (size_t i = 0; i < box->extent[0] * box->extent[1]; i++) {
                if (token[(box->global[0] + i / box->extent[1]) * seq + box->global[1] + i % box->extent[1]])
                    return true;
            }
        }
    }
    return false;
}

/* " on rank 1 alone", " on ranks 0, 2 alone"; nothing where every rank with targets has such tokens. */
static void say_holders(ari_text *text, const ari_losses *l, const bool *token)
{
    const ar_dump_tensor *t = ari_loss_tensor(l->c, l->c->known->other, 'b');
    const int ranks = t ? ar_dump_ranks(l->c->known->other) : 0;
    int n = 0, of = 0, said = 0;
    for (int r = 0; r < ranks; r++) {
        n += holds(t, r, token, l->seq);
        of += holds(t, r, l->of[0].counts, l->seq);
    }
    for (int r = 0; r < ranks && n < of; r++) {
        if (holds(t, r, token, l->seq))
            ari_say(text, said++ ? ", %d" : n == 1 ? " on rank %d" : " on ranks %d", r);
    }
    ari_say(text, said ? " alone" : "");
}

/* By how many tokens labels are moved: so many of those that differ are the reference's `by` tokens on, and none is
 * another. */
static bool is_moved(const ari_losses *l, const bool *wrong, size_t n, long by)
{
    size_t fits = 0;
    for (size_t i = 0; i < l->tokens; i++) {
        const size_t from = i + (size_t)by; /* before the first: larger than any */
        if (!wrong[i] || !l->of[1].counts[i] || from >= l->tokens || !l->of[0].counts[from])
            continue;
        if (l->of[0].label[from] != l->of[1].label[i])
            return false;
        fits++;
    }
    return fits >= FEWEST_MOVED && 2 * fits >= n;
}

/* True if the gradients of the tokens that count on both sides are one multiple of the reference's, as other tokens
 * leave them; a term that is added to the loss does not. */
static ar_status has_same_gradients(bool *same, const ari_losses *l)
{
    const ar_dump_tensor *ref = l->of[0].gradient, *other = l->of[1].gradient;
    const double allowed = fmax(ARI_FIT, 4.0 * l->c->relative * l->c->relative);
    double first = 0.0, times = 0.0;
    *same = true;
    for (size_t i = 0; i < l->tokens && *same && ari_same_shape(ref, other); i++) {
        ari_fit f = {0};
        if (!l->of[0].counts[i] || !l->of[1].counts[i])
            continue;
        AR_TRY(ari_fit_read(&f, other, ref, i * ref->shape[2], ref->shape[2]));
        *same = ari_fit_one(&times, &f) <= allowed && (first == 0.0 || ari_is_near(times, first, sqrt(allowed)));
        first = times;
    }
    return AR_OK;
}

static void compare_labels(ari_trace *t, const ari_losses *l, bool *wrong)
{
    const ari_loss_side *ref = &l->of[0], *other = &l->of[1];
    const bool labels = ref->label && other->label;
    size_t n = 0, more = 0, less = 0, first = l->tokens;
    for (size_t i = 0; i < l->tokens; i++) {
        const bool both = ref->counts[i] && other->counts[i];
        wrong[i] = ref->counts[i] != other->counts[i] || (both && labels && ref->label[i] != other->label[i]);
        more += other->counts[i] && !ref->counts[i];
        less += ref->counts[i] && !other->counts[i];
        n += wrong[i];
        first = both && wrong[i] && first == l->tokens ? i : first;
    }
    if (n == 0 || (first == l->tokens && (more == 0 || less > 0)))
        return;
    ARI_FINDING(t, ARI_FOUND_TARGETS, first == l->tokens ? ARI_IF(PADDED) : ARI_IF(SOME), {"more", .count = more},
                {"targets", .count = ref->targets}, {"n", .count = n});
    ari_text text = ari_list(t, "where");
    say_holders(&text, l, wrong);
    text = ari_list(t, "which");
    long by = first == l->tokens ? (long)l->tokens : 1 - (long)l->tokens;
    while (by < (long)l->tokens && (by == 0 || !is_moved(l, wrong, n, by)))
        by++;
    if (by < (long)l->tokens)
        ari_say(&text, "; they are those of the token %ld %s", by < 0 ? -by : by, by < 0 ? "before" : "further on");
    else if (first < l->tokens)
        ari_say(&text, "; the first at [%zu,%zu], %zu in place of %zu", first / l->seq, first % l->seq,
                other->label[first], ref->label[first]);
}

ar_status ari_loss_labels_compare(ari_trace *t, const ari_losses *l)
{
    bool *wrong = NULL, same = true;
    if (!l->of[0].of_dump || !l->of[1].of_dump)
        return AR_OK;
    AR_TRY(ARI_TAKE(&wrong, l->c->arena, l->tokens, "labels"));
    compare_labels(t, l, wrong);
    if (t->kind != ARI_FOUND_NOTHING && (t->flags & ARI_IF(PADDED)))
        AR_TRY(has_same_gradients(&same, l));
    if (!same)
        ari_trace_clear(t);
    return AR_OK;
}

/* The weight of a sample's tokens; 0: they have several, or there are no targets. */
static double weight_of(const ari_losses *l, size_t sample, size_t *targets)
{
    double weight = 0.0;
    *targets = 0;
    for (size_t i = sample * l->seq; i < (sample + 1) * l->seq; i++) {
        if (!l->of[0].counts[i])
            continue;
        if (*targets > 0 && !ari_is_near(l->weight[i], weight, ARI_KNOWN))
            return 0.0;
        weight = l->weight[i];
        ++*targets;
    }
    return weight;
}

/* Finds a weight for each label, if tokens of one label have one weight and labels have several. */
static ar_status find_label_weights(ari_trace *t, const ari_losses *l)
{
    enum { FEWEST_AGREED = 8 };
    double *of = NULL, low = HUGE_VAL, high = 0.0;
    size_t agreed = 0;
    AR_TRY(ARI_TAKE(&of, l->c->arena, l->vocabulary, "weights of labels"));
    for (size_t i = 0; l->weight && i < l->tokens; i++) {
        const size_t label = !l->of[0].counts[i]           ? l->vocabulary
                             : l->of[0].label              ? l->of[0].label[i]
                             : l->ids && i + 1 < l->tokens ? l->ids[i + 1]
                                                           : l->vocabulary;
        if (label >= l->vocabulary)
            continue;
        if (of[label] > 0.0 && !ari_is_near(l->weight[i], of[label], ARI_KNOWN))
            return AR_OK;
        agreed += of[label] > 0.0;
        of[label] = l->weight[i];
        low = fmin(low, l->weight[i]);
        high = fmax(high, l->weight[i]);
    }
    if (agreed >= FEWEST_AGREED && low > 0.0 && high > low * (1.0 + 10.0 * ARI_KNOWN))
        ARI_FINDING(t, ARI_FOUND_TARGETS, ARI_IF(ROWS) | ARI_IF(IDS), {"low", .number = low}, {"high", .number = high});
    return AR_OK;
}

/* Samples that each have one weight. */
static void find_sample_weights(ari_trace *t, const ari_losses *l)
{
    const int dp = l->c->facts.dp > 1 ? l->c->facts.dp : 1, micro = l->c->facts.micro_batches;
    const double parts = dp * (micro > 1 ? micro : 1);
    double last = 0.0, inverse = 0.0, of_all = 0.0;
    size_t groups = 0, samples = 0, targets;
    char said[160];
    ari_text list = ari_text_in(said, sizeof said);
    for (size_t s = 0; l->weight && s < l->samples; s++) {
        const double w = weight_of(l, s, &targets);
        if (targets > 0 && !(w > 0.0))
            return;
        if (targets == 0)
            continue;
        of_all += 1.0 / w;
        if (++samples <= SAMPLES_SAID)
            ari_say(&list, samples > 1 ? ", %.4g" : "%.4g", w);
        if (groups == 0 || !ari_is_near(w, last, ARI_KNOWN)) {
            groups++;
            inverse += 1.0 / w;
        }
        last = w;
    }
    /* One weight is a factor; and ranks or micro-batches that each divide by their own count have a mean of means, or
     * the sum, whether neighbours' counts are equal or not. */
    const double mean = of_all / (double)samples;
    if (groups < 2 || ari_is_near(inverse, 1.0, ARI_KNOWN) || ari_is_near(inverse, (double)groups, ARI_KNOWN) ||
        (parts > 1.0 && (ari_is_near(mean, 1.0, ARI_KNOWN) || ari_is_near(mean * parts, 1.0, ARI_KNOWN))))
        return;
    ari_trace_set(t, ARI_FOUND_TARGETS, ARI_IF(ROWS));
    ari_words(t, "weights", samples > SAMPLES_SAID ? "%s, .." : "%s", said);
}

ar_status ari_loss_weights_compare(ari_trace *t, const ari_losses *l)
{
    find_sample_weights(t, l);
    return t->kind == ARI_FOUND_NOTHING ? find_label_weights(t, l) : AR_OK;
}
