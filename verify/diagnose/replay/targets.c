/* SPDX-License-Identifier: Apache-2.0 */
/* The loss computed again from the logits: which tokens are targets, of which logits, and by how many it is divided. */
#include "anyrank/parallel.h"
#include "ref/models/parallel_private.h"
#include "verify/diagnose/hypothesis.h"
#include "verify/diagnose/replay/loss.h"

enum { MOST_MICRO = 32 };

/* True if a sum over n targets gives the loss, divided by n or by the reference's number of targets. */
static bool gives(const ari_losses *l, const ari_loss_side *s, double sum, size_t n)
{
    const double unsure = 2.0 * ARI_OF_A_MEAN + 0.1 * l->c->relative;
    return n > 0 && (ari_is_near(s->value, sum / (double)n, unsure) ||
                     ari_is_near(s->value, sum / (double)l->of[0].targets, unsure));
}

/* --- readings of the labels --------------------------------------------------------------------------------------- */

/* Which token's id is a token's label. */
typedef struct reading {
    long shift;     /* tokens on */
    size_t chunks;  /* each of so many ranks has shifted among its own; 0: all are shifted before they are cut */
    bool zigzag;    /* the rank has the r-th chunk from either end */
    bool every;     /* the last token of a packed document has a label too */
    size_t samples; /* so many samples on */
    size_t plain;   /* of so many ranks, whose tokens are a zigzag's and whose labels are contiguous chunks'; 0: none */
    size_t masked;  /* of so many ranks, each of which counts the targets of the first part; 0: none */
    size_t from, to; /* of each `group` samples these alone */
    size_t group;
} reading;

/* Token i's label, l->vocabulary: it is no target. A label from another place is a target if that place is one in the
 * reference. That of a row's last token, where data have one more, is what its gradient says there. */
static size_t label_of(const ari_losses *l, const ari_loss_side *s, const reading *r, size_t i)
{
    const size_t at = i % l->seq, size = r->chunks ? l->seq / r->chunks : l->seq, chunk = at / size;
    const size_t row = (i - at + r->samples * l->seq) % l->tokens;
    size_t index = at,
           from = r->plain ? ari_place_in_ring(&index, l->seq, r->plain, true, at) * (l->seq / r->plain) : 0;
    from += index;
    size_t own = from; /* where it is among the tokens of its rank */
    if (r->masked)
        (void)ari_place_in_ring(&own, l->seq, r->masked, r->zigzag, at);
    const bool counts = r->every || (r->samples || r->plain || r->masked ? l->of[0].counts[row + own] : s->counts[i]);
    const bool in_group = r->group == 0 || (i / l->seq % r->group >= r->from && i / l->seq % r->group < r->to);
    size_t to = from + (size_t)r->shift;
    if (r->chunks && (at + 1) % size == 0)
        to = r->zigzag && chunk < r->chunks / 2 ? (r->chunks - 1 - chunk) * size : l->seq + 1;
    if (!counts || !in_group || to > l->seq) /* before the first: larger than any */
        return l->vocabulary;
    const size_t last = row + l->seq - 1;
    return to < l->seq                               ? l->ids[row + to]
           : l->of[0].label && l->of[0].counts[last] ? l->of[0].label[last]
                                                     : l->vocabulary;
}

/* The sum of their terms; *n of them. */
static double sum_of(const ari_losses *l, const ari_loss_side *s, const reading *r, size_t *n)
{
    double sum = 0.0;
    *n = 0;
    for (size_t i = 0; i < l->tokens; i++) {
        const size_t label = label_of(l, s, r, i);
        if (label >= l->vocabulary)
            continue;
        sum += ari_loss_entropy(l, s, i, label);
        ++*n;
    }
    return sum;
}

/* True if the other's labels have this reading: by its gradient of each token, else by the loss and the tokens with a
 * gradient. */
static bool is_read_so(const ari_losses *l, const ari_loss_side *s, const reading *r)
{
    size_t n;
    for (size_t i = 0; i < l->tokens && r->group == 0; i++) {
        const size_t label = label_of(l, s, r, i);
        if ((s->of_dump && (label < l->vocabulary) != s->counts[i]) ||
            (s->label && label < l->vocabulary && s->label[i] != label))
            return false;
    }
    if (s->label && r->group == 0)
        return true;
    const double sum = sum_of(l, s, r, &n);
    return isfinite(s->value) && gives(l, s, sum, n);
}

/* True if a reading differs from the reference's in a token that counts. */
static bool is_another(const ari_losses *l, const reading *r)
{
    const reading right = {.shift = 1};
    size_t i = 0;
    while (i < l->tokens && (!l->of[0].counts[i] || label_of(l, &l->of[0], r, i) == label_of(l, &l->of[0], &right, i)))
        i++;
    return i < l->tokens;
}

static bool try_reading(ari_trace *t, const ari_losses *l, const ari_loss_side *s, const reading *r,
                        ari_properties flags)
{
    if (!is_another(l, r) || !is_read_so(l, s, r))
        return false;
    ARI_FINDING(t, ARI_FOUND_TARGETS, flags, {"by", .number = r->samples ? (double)r->samples : (double)r->shift},
                {"ranks", .count = r->plain + r->masked > 0 ? r->plain + r->masked
                                   : r->zigzag              ? r->chunks / 2
                                                            : r->chunks},
                {"order", .text = r->zigzag ? ", the r-th chunk from either end each" : ""},
                {"which", .text = r->from > 0 ? "last" : "first"}, {"n", .count = r->to - r->from},
                {"of", .count = r->group}, {"targets", .count = l->of[0].targets});
    return true;
}

/* True if a micro-batch may have n of a rank's samples. */
static bool is_micro_batch(const ari_losses *l, size_t n, size_t group)
{
    const size_t micro = (size_t)l->c->facts.micro_batches;
    return micro > 0 ? micro > 1 && (n == group / micro || n == (group + micro - 1) / micro) : group % n == 0;
}

/* Labels shifted after the cut, within documents or over their ends: no run has more chunks than ranks; or the terms of
 * the first or the last samples of each data-parallel rank alone, divided by all targets. */
static void find_part(ari_trace *t, const ari_losses *l, const ari_loss_side *s)
{
    const size_t known = (size_t)ari_ranks_along(&l->c->known->mesh, ARI_ALL_AXES & ~(ari_axes)ARI_CUTS_LAYERS);
    const size_t dp = l->c->facts.dp > 1 ? (size_t)l->c->facts.dp : 1, group = l->samples / dp;
    for (size_t n = 2; n <= 2 * (size_t)ARI_MOST_RANKS && n < l->seq && t->kind == ARI_FOUND_NOTHING; n++) {
        for (size_t form = 0; form < (n >= 4 && n % 2 == 0 ? 4 : 2) && t->kind == ARI_FOUND_NOTHING; form++) {
            const reading r = {.shift = 1, .chunks = n, .zigzag = form >= 2, .every = form % 2 == 1};
            if (l->seq % n == 0 && (known == 0 || known % (r.zigzag ? n / 2 : n) == 0))
                try_reading(t, l, s, &r, ARI_IF(SHIFT) | ARI_IF(BLOCKS));
        }
    }
    for (size_t n = 2; n <= ARI_MOST_RANKS && 2 * n <= l->seq && t->kind == ARI_FOUND_NOTHING; n++) {
        if (l->seq % (2 * n) == 0 && (known == 0 || known % n == 0))
            try_reading(t, l, s, &(reading){.shift = 1, .plain = n}, ARI_IF(TOKENS));
        for (int zigzag = 0; zigzag < 2 && (known == 0 || known % n == 0) && t->kind == ARI_FOUND_NOTHING; zigzag++) {
            if (l->seq % (zigzag ? 2 * n : n) == 0)
                try_reading(t, l, s, &(reading){.shift = 1, .masked = n, .zigzag = zigzag}, ARI_IF(OF_CP));
        }
    }
    for (size_t k = 1; k < 2 * group && l->samples % dp == 0 && t->kind == ARI_FOUND_NOTHING; k++) {
        const bool last = k > group;
        const reading r = {.shift = 1, .group = group, .from = last ? 2 * group - k : 0, .to = last ? group : k};
        if (k != group)
            try_reading(t, l, s, &r, ARI_IF(SAMPLES) | (is_micro_batch(l, r.to - r.from, group) ? 0 : ARI_IF(COUNT)));
    }
}

static void find_reading(ari_trace *t, const ari_losses *l, const ari_loss_side *s)
{
    static const long shifts[] = {0, 2, -1, 3};
    for (size_t i = 0; i < sizeof shifts / sizeof *shifts && t->kind == ARI_FOUND_NOTHING; i++)
        try_reading(t, l, s, &(reading){.shift = shifts[i]}, ARI_IF(SHIFT));
    for (size_t k = 1; k < l->samples && t->kind == ARI_FOUND_NOTHING; k++)
        try_reading(t, l, s, &(reading){.shift = 1, .samples = k}, ARI_IF(FOREIGN));
}

/* The sum is the reference's and its divisor another integer, except one with another meaning: the number of ranks or
 * micro-batches. */
static void find_count(ari_trace *t, const ari_losses *l, double sum)
{
    const double n = sum / l->of[1].value, whole = nearbyint(n), own = (double)l->of[0].targets;
    const double ratio = whole > own ? whole / own : own / whole, unsure = ARI_OF_A_MEAN * n;
    if (!(whole >= 1.0 && whole <= 4.0 * (double)l->tokens && fabs(n - whole) <= unsure && unsure < 0.05) ||
        ratio == nearbyint(ratio))
        return;
    const char *which = (size_t)whole == l->tokens                                ? ", the number of all tokens"
                        : (size_t)whole == l->tokens - l->samples                 ? ", ignored labels counted too"
                        : whole == own + 1.0 || whole == own + (double)l->samples ? ", one too many"
                                                                                  : "";
    const double micro = l->c->facts.micro_batches, others = whole * micro / own;
    const bool of_micro = !*which && micro > 1.0 && others == nearbyint(others) && others <= 2.0 * micro;
    ARI_FINDING(t, ARI_FOUND_TARGETS, ARI_IF(COUNT) | (of_micro ? ARI_IF(OF_MICRO) : 0), {"n", .count = (size_t)whole},
                {"which", .text = which}, {"others", .number = others}, {"micro", .number = micro});
}

/* --- what is wrong ------------------------------------------------------------------------------------------------ */

/* Finds micro-batches of one rank each that count more than others, neither as a mean of their means nor as a sum. */
static void find_weights(ari_trace *t, const ari_losses *l)
{
    const int n = l->c->facts.micro_batches, dp = l->c->facts.dp > 1 ? l->c->facts.dp : 1;
    const ar_parallel p = {.tp = 1, .dp = dp, .micro_batches = n};
    double weight[MOST_MICRO] = {0.0}, inverse = 0.0, sum = 0.0, apart = 0.0;
    if (!l->weight || n < 2 || n > MOST_MICRO || l->samples % (size_t)(n * dp) != 0)
        return;
    for (int k = 0; k < n * dp; k++) {
        size_t start = 0, count = 0;
        ari_parallel_rows(&p, l->samples, k / n, k % n, &start, &count);
        for (size_t i = start * l->seq; i < (start + count) * l->seq; i++) {
            const size_t label = l->ids ? label_of(l, &l->of[0], &(reading){.shift = 1}, i) : l->vocabulary;
            if (!l->of[0].counts[i] || (l->ids && label >= l->vocabulary))
                continue;
            weight[k % n] = weight[k % n] == 0.0 ? l->weight[i] : weight[k % n];
            if (!ari_is_near(l->weight[i], weight[k % n], ARI_KNOWN))
                return;
            sum += l->ids ? l->weight[i] * ari_loss_entropy(l, &l->of[1], i, label) : 0.0;
        }
    }
    for (int k = 0; k < n; k++) {
        inverse += 1.0 / weight[k];
        apart = fmax(apart, fabs(weight[k] / weight[0] - 1.0));
    }
    if (!(apart > ARI_KNOWN) || ari_is_near(inverse, 1.0, ARI_KNOWN) || ari_is_near(inverse, n, ARI_KNOWN) ||
        (isfinite(l->of[1].value) && !gives(l, &l->of[1], sum, l->of[0].targets)))
        return;
    ARI_FINDING(t, ARI_FOUND_TARGETS, ARI_IF(OF_MICRO), {"micro", .count = (size_t)n});
    ari_text list = ari_list(t, "weights");
    for (int k = 0; k < n; k++)
        ari_say(&list, "%s%.4g", k > 0 ? ", " : "", weight[k]);
}

/* True if the reference's labels are the next ids. */
static bool are_next_ids(const ari_losses *l)
{
    const reading right = {.shift = 1};
    const ari_loss_side *ref = &l->of[0];
    size_t n;
    const double sum = sum_of(l, ref, &right, &n);
    return n == ref->targets &&
           (isfinite(ref->value) ? gives(l, ref, sum, n) : ref->label && is_read_so(l, ref, &right));
}

static void look_at(ari_trace *t, const ari_losses *l)
{
    const reading right = {.shift = 1};
    const ari_loss_side *ref = &l->of[0], *other = &l->of[1];
    const bool of_loss = isfinite(ref->value);
    size_t n, more = 0, less = 0; /* tokens that count on one side alone */
    if (!are_next_ids(l))
        return;
    for (size_t i = 0; i < l->tokens; i++) {
        more += other->counts[i] && !ref->counts[i];
        less += ref->counts[i] && !other->counts[i];
    }
    const bool told = other->of_dump && ref->of_dump;
    const double same = sum_of(l, other, &right, &n);
    find_reading(t, l, other);
    if (t->kind == ARI_FOUND_NOTHING && told && more > 0 && less == ref->targets) {
        ARI_FINDING(t, ARI_FOUND_TARGETS, ARI_IF(PADDED) | ARI_IF(EXCHANGED), {"more", .count = more});
    }
    if (t->kind == ARI_FOUND_NOTHING && more == 0 && less == 0) {
        find_weights(t, l);
        if (t->kind == ARI_FOUND_NOTHING && of_loss)
            find_count(t, l, same);
    }
    if (t->kind == ARI_FOUND_NOTHING)
        find_part(t, l, other);
    if (t->kind == ARI_FOUND_NOTHING && of_loss && less > 0 && more == 0 &&
        gives(l, other, same, ref->targets - less)) {
        ARI_FINDING(t, ARI_FOUND_TARGETS, ARI_IF(COUNT) | ARI_IF(CUT), {"less", .count = less});
    }
    if (t->kind != ARI_FOUND_NOTHING)
        ARI_FACTS(t, {"targets", .count = ref->targets});
}

/* What has gradients that are no cross-entropy's may have none for another reason than being no target. */
static ar_status compare_labels(ari_trace *t, const ari_losses *l)
{
    const bool fit = fmax(l->of[0].left, l->of[1].left) <= ARI_REPLAY_MISTAKE;
    return fit || (l->ids && are_next_ids(l)) ? ari_loss_labels_compare(t, l) : AR_OK;
}

/* True if each token's gradient next to the logits is the reference's; where neither dump has any, that of the head's
 * weight, which other logits' gradients would change. */
static ar_status has_right_gradient(bool *right, const ari_losses *l)
{
    const ari_case *c = l->c;
    const ar_dump_tensor *w = ari_replay_parameter(c, ARI_HEAD, ".weight"), *head = NULL, *own = NULL;
    if (w)
        head = ari_tensor_of_step(c->known->reference, w->name, strcspn(w->name, ":"), "grad", c->own.step);
    if (head)
        own = ari_find_readable(c->known->other, head->name);
    ari_fit f = {0};
    double times;
    size_t i = 0;
    while (l->weight && i < l->tokens && (l->weight[i] == 0.0 || ari_is_near(l->weight[i], 1.0, ARI_SEEN)))
        i++;
    *right = l->weight && l->of[1].of_dump && i == l->tokens;
    if (l->of[0].of_dump || l->of[1].of_dump || !own || own->count != head->count)
        return AR_OK;
    AR_TRY(ari_fit_read(&f, own, head, 0, head->count));
    *right = ari_fit_one(&times, &f) <= ARI_FIT && ari_is_near(times, 1.0, ARI_SEEN);
    return AR_OK;
}

/* Classes of padding, whose logits are 0, count in the softmax: k of them add log(1 + k exp(-lse)) to each term,
 * whatever its label. */
static double of_padding(const ari_losses *l, double k)
{
    double more = 0.0;
    for (size_t i = 0; i < l->tokens; i++)
        more += l->of[0].counts[i] ? log1p(k * exp(-l->of[0].lse[i])) / (double)l->of[0].targets : 0.0;
    return more;
}

static void find_padding(ari_trace *t, const ari_losses *l)
{
    const double off = l->of[1].value - l->of[0].value, unsure = 2.0 * ARI_OF_A_MEAN * fabs(l->of[1].value);
    double low = 0.0, high = 4.0 * (double)l->vocabulary;
    for (int i = 0; i < 60; i++)
        *(of_padding(l, 0.5 * (low + high)) < off ? &low : &high) = 0.5 * (low + high);
    const double k = nearbyint(low), apart = of_padding(l, k) - off;
    if (k >= 1.0 && k < 2.0 * (double)l->vocabulary && fabs(apart) <= unsure && 50.0 * unsure < off / k) {
        ARI_FINDING(t, ARI_FOUND_LOSS_OPTIONS, ARI_IF(PADDED), {"padding", .count = (size_t)k});
    }
}

/* Explains the loss with the batch's ids: its options if gradients of logits determine them, then its targets, then its
 * options by the loss alone. */
static ar_status look_at_loss(ari_trace *t, ari_losses *l)
{
    bool of_gradients = true;
    for (int k = 0; k < 2; k++) {
        of_gradients = of_gradients && l->of[k].options.known;
        ari_loss_extra_fit(&l->of[k], l);
    }
    if (of_gradients)
        ari_loss_extra_compare(t, l);
    if (t->kind == ARI_FOUND_NOTHING)
        ari_loss_extra_of_all(t, l);
    if (t->kind == ARI_FOUND_NOTHING)
        look_at(t, l);
    if (t->kind == ARI_FOUND_NOTHING)
        AR_TRY(compare_labels(t, l));
    if (t->kind == ARI_FOUND_NOTHING) {
        double times;
        AR_TRY(ari_loss_scale_find(&times, l));
        if (times > 0.0) {
            ARI_FINDING(t, ARI_FOUND_LOSS_OPTIONS, ARI_IF(POWER), {"times", .number = times});
        }
    }
    if (t->kind == ARI_FOUND_NOTHING && !of_gradients)
        ari_loss_extra_compare(t, l);
    bool right = false;
    if (t->kind == ARI_FOUND_NOTHING)
        AR_TRY(ari_loss_weights_compare(t, l));
    if (t->kind == ARI_FOUND_NOTHING)
        AR_TRY(has_right_gradient(&right, l));
    if (right) {
        ARI_FINDING(t, ARI_FOUND_LOSS_OPTIONS, ARI_IF(ALONE), {"off", .number = l->of[1].value - l->of[0].value});
    } else if (t->kind == ARI_FOUND_NOTHING)
        find_padding(t, l);
    return AR_OK;
}

/* Explains the gradient that is next to the logits. */
static ar_status look_at_gradient(ari_trace *t, ari_losses *l)
{
    ari_loss_extra_compare(t, l);
    if (l->ids && t->kind == ARI_FOUND_NOTHING)
        look_at(t, l);
    if (t->kind != ARI_FOUND_NOTHING)
        return AR_OK;
    AR_TRY(ari_loss_shards_find(l));
    if (l->of[1].shards > 0) {
        ARI_FINDING(t, ARI_FOUND_TARGETS, ARI_IF(OF_SHARDS), {"ranks", .count = l->of[1].shards});
        return AR_OK;
    }
    AR_TRY(compare_labels(t, l));
    return t->kind == ARI_FOUND_NOTHING ? ari_loss_weights_compare(t, l) : AR_OK;
}

ar_status ari_measure_targets(ari_trace *t, const ari_case *c)
{
    ari_losses l = {.c = c};
    const bool of_loss = c->count == 1 && c->d->pass == 'f' && (c->is & ARI_IS_LOSS);
    const bool alone = !c->known->other;
    /* Logits, or the head's input, by name or shape. */
    const bool of_logits = (c->is & (ARI_IS_LOGITS | ARI_IS_HEAD)) ||
                           ari_replay_value(c, c->known->reference, ARI_HEAD, 'b') == c->reference;
    bool held = of_loss ? isfinite(c->val[0]) && isfinite(c->ref[0]) : !alone && c->d->pass == 'b' && of_logits;
    AR_TRY(ari_losses_read(&l, &held, of_loss));
    l.of[1].of_dump = l.of[1].of_dump && !alone;
    if (held && l.ids && alone)
        find_part(t, &l, &l.of[1]);
    else if (held && l.ids && of_loss)
        AR_TRY(look_at_loss(t, &l));
    else if (held && !alone)
        AR_TRY(look_at_gradient(t, &l));
    else if (of_loss && !alone)
        AR_TRY(ari_loss_classes_compare(t, c));
    return AR_OK;
}
