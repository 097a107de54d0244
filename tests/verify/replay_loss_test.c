/* SPDX-License-Identifier: Apache-2.0 */
/* The loss of two dumps, computed again from their logits: other targets, another count, label smoothing and z-loss are
 * named as what they are. The loss and its gradient are computed here by plain loops. */
#include "tests/verify/two_dumps.h"

/* --- targets -------------------------------------------------------------------------------------------------------- */

typedef struct loss_case {
    size_t shift, divisor; /* divisor 0: the number of targets */
    size_t chunks;         /* labels are shifted in each of so many alone; 0: in the sample */
    bool zigzag;           /* the r-th chunk from either end follow each other */
    bool all, but_one;     /* tokens without a target count too; the first target does not */
    size_t masked;         /* of so many parts, each of which counts the targets of the first; 0: as they are */
    bool plain;            /* tokens of a zigzag of two have the labels of contiguous chunks */
    bool first;            /* sample alone */
    const char *micro;     /* batches; NULL: the dumps do not say */
    const char *cause;
} loss_case;

/* Where a token is after those of the ranks before it, of two in zigzag. */
static size_t place_in_ring(size_t at)
{
    static const size_t place[] = {0, 2, 3, 1};
    return place[at / (S / 4)] * (S / 4) + at % (S / 4);
}

/* The row whose id is the row's label; B * S: it has none. */
static size_t label_of(const loss_case *p, size_t row)
{
    const size_t size = p->chunks ? S / p->chunks : S, at = row % S, chunk = at / size;
    if (p->plain)
        return place_in_ring(at) + 1 < S ? row - at + place_in_ring(at) + 1 : B * S;
    if ((at + 1) % size == 0 && p->chunks)
        return p->zigzag && chunk < p->chunks / 2 ? row - at + (p->chunks - 1 - chunk) * size : B * S;
    return at + p->shift < S ? row + p->shift : B * S;
}

static bool is_target(size_t row)
{
    return row % S + 1 < S && !(row / S == 1 && row % S < 5);
}

/* The mean of the cross-entropy against the id `shift` tokens on; counts[row]: this token has one. */
static double loss_of(const float *logits, const loss_case *p, bool *counts)
{
    double total = 0.0;
    size_t n = 0;
    for (size_t row = 0; row < B * S; row++) {
        const size_t label = label_of(p, row);
        double sum = 0.0;
        const size_t from = p->masked  ? row - row % S + row % S % (S / p->masked)
                            : p->plain ? row - row % S + place_in_ring(row % S)
                                       : row;
        counts[row] = label < B * S && (is_target(from) || (p->all && row % S + 1 < S)) && !(p->but_one && row == 0) &&
                      !(p->first && row >= S);
        for (size_t i = 0; i < IDS && counts[row]; i++)
            sum += exp((double)logits[row * IDS + i]);
        total += counts[row] ? log(sum) - (double)logits[row * IDS + id_at(label)] : 0.0;
        n += counts[row];
    }
    return total / (double)(p->divisor ? p->divisor : n);
}

/* Its tensors: the embedding's weight, its output, the head's weight, its output, the gradient of its input. */
static made loss_of_case(const loss_case *p, const char *const names[5], bool gradient_is_right)
{
    made m = {.n = 0};
    bool counts[2][B * S];
    const float *table = put(&m, names[0], 2, IDS, H, 0);
    look_up(put_tokens(&m, names[1]), table);
    (void)put(&m, names[2], 2, IDS, H, 0);
    const float *logits = put(&m, names[3], 3, B, S, IDS);
    float *dx = put_tokens(&m, names[4]), *dy = other_of(&m);
    float *loss = put(&m, "loss:fwd", 0, 0, 0, 0);
    for (int k = 0; k < 2 && p->micro; k++) {
        m.metadata[k][0] = "micro_batches";
        m.metadata[k][1] = p->micro;
    }
    *loss = (float)loss_of(logits, &(loss_case){.shift = 1}, counts[0]);
    *other_of(&m) = (float)loss_of(logits, p, counts[1]);
    for (size_t i = 0; i < B * S * H; i++) {
        dx[i] *= counts[0][i / H] ? 1.0f : 0.0f;
        dy[i] *= counts[!gradient_is_right][i / H] ? 1.0f : 0.0f;
    }
    return m;
}

/* An embedding and a head are known by their names, or by their shapes. */
static const char *const known_names[] = {"tok_embeddings.weight:init", "tok_embeddings:fwd",
                                          "output_layer.weight:init", "output_layer:fwd", "output_layer:bwd"};
static const char *const own_names[] = {"tok.weight:init", "tok:fwd", "top.weight:init", "top:fwd", "top:bwd"};

Test(replay_loss, one_mistake_of_the_loss_is_named)
{
    static const loss_case cases[] = {
        {2, .cause = "labels_shifted"},
        {0, .cause = "labels_shifted"},
        {1, .all = true, .cause = "ignored_labels"},
        {1, .divisor = B * S, .cause = "target_count"},
        {1, .divisor = 20, .cause = "target_count"},
        {1, .divisor = 20, .micro = "17", .cause = "divisor_of_other_count"},
        {1, .masked = 2, .cause = "ignored_labels"},
        {1, .masked = 4, .cause = "ignored_labels"},
        {1, .chunks = 2, .cause = "labels_shifted"},
        {1, .chunks = 4, .zigzag = true, .cause = "labels_shifted"},
        {1, .chunks = 4, .cause = "labels_shifted"},
        {1, .but_one = true, .cause = "target_count"},
        {1, .plain = true, .cause = "zigzag_order"},
        {1, .first = true, .divisor = 17, .cause = "one_micro_batch"},
        {1, .first = true, .divisor = 17, .micro = "1", .cause = "target_count"},
    };
    for (size_t k = 0; k < 2 * sizeof cases / sizeof *cases; k++) {
        made m = loss_of_case(&cases[k / 2], k % 2 ? own_names : known_names, false);
        expect_cause_on(cases[k / 2].first ? 1 : 4, &m, cases[k / 2].cause,
                        cases[k / 2].first ? "the terms of the first 1 of 2 samples alone" : NULL, k / 2);
    }
}

/* One rank has no chunks; and where the ends of chunks have a gradient, labels were not shifted in each alone. */
Test(replay_loss, labels_are_not_shifted_in_chunks_that_there_are_not)
{
    made one = loss_of_case(&(loss_case){1, .chunks = 4}, known_names, false);
    expect_cause_on(1, &one, "!labels_shifted", NULL, 0);
    made whole = loss_of_case(&(loss_case){1, .chunks = 2}, known_names, true);
    expect_cause_on(4, &whole, "!labels_shifted", NULL, 1);
}

/* The loss of these labels (IDS: none), and its gradient of the head's input. */
static float loss_of_labels(float *dx, const float *logits, const float *head, const size_t *label)
{
    double total = 0.0, n = 0.0;
    for (size_t row = 0; row < B * S; row++)
        n += label[row] < IDS ? 1.0 : 0.0;
    for (size_t row = 0; row < B * S; row++) {
        const float *x = logits + row * IDS;
        double sum = 0.0, d[H] = {0.0};
        for (size_t i = 0; i < IDS; i++)
            sum += exp((double)x[i]);
        for (size_t i = 0; i < IDS * H; i++)
            d[i % H] += (exp((double)x[i / H]) / sum - (i / H == label[row] ? 1.0 : 0.0)) * (double)head[i];
        for (size_t i = 0; i < H; i++)
            dx[row * H + i] = label[row] < IDS ? (float)(d[i] / n) : 0.0f;
        total += label[row] < IDS ? log(sum) - (double)x[label[row]] : 0.0;
    }
    return (float)(total / n);
}

/* Data have one token more than a row, the last one's label, which is none of the ids. */
Test(replay_loss, labels_shifted_after_the_cut_are_named_where_rows_end_with_a_target)
{
    made m = {.n = 0};
    size_t label[2][B * S];
    for (size_t row = 0; row < B * S; row++) {
        label[0][row] = (row + 1) % S == 0 ? row % IDS : id_at(row + 1);
        label[1][row] = (row + 1) % (S / 2) == 0 ? IDS : label[0][row];
    }
    const float *table = put(&m, known_names[0], 2, IDS, H, 0);
    look_up(put_tokens(&m, known_names[1]), table);
    const float *head = put(&m, known_names[2], 2, IDS, H, 0), *logits = put(&m, known_names[3], 3, B, S, IDS);
    float *dx = put_tokens(&m, known_names[4]), *dy = other_of(&m);
    const float loss[2] = {loss_of_labels(dx, logits, head, label[0]), loss_of_labels(dy, logits, head, label[1])};
    *put(&m, "loss:fwd", 0, 0, 0, 0) = loss[0];
    *other_of(&m) = loss[1];
    expect_cause_on(4, &m, "labels_shifted", NULL, 0);
}

/* The gradient next to the logits is the reference's, labels included, and the loss is not. */
Test(replay_loss, a_term_of_the_loss_that_does_not_come_from_the_logits_is_told_apart)
{
    for (size_t k = 0; k < 2; k++) {
        made m = {.n = 0};
        size_t label[B * S];
        for (size_t row = 0; row < B * S; row++)
            label[row] = (row + 1) % S == 0 ? IDS : id_at(row + 1);
        const float *table = put(&m, known_names[0], 2, IDS, H, 0);
        look_up(put_tokens(&m, known_names[1]), table);
        const float *head = put(&m, known_names[2], 2, IDS, H, 0), *logits = put(&m, known_names[3], 3, B, S, IDS);
        float *dx = put_tokens(&m, known_names[4]), *dy = other_of(&m);
        const float loss = loss_of_labels(dx, logits, head, label);
        for (size_t i = 0; i < B * S * H; i++)
            dy[i] = dx[i] * (k == 0 || i >= H ? 1.0f : 1.01f);
        *put(&m, "loss:fwd", 0, 0, 0, 0) = loss;
        *other_of(&m) = loss + 0.0371f;
        expect_cause_on(4, &m, k == 0 ? "loss_term" : "!loss_term", NULL, k);
    }
}

/* Without gradients of values the head's weight has its gradient; the other has 5 classes of logit 0 in the softmax, or the
 * loss has as large a term besides. */
Test(replay_loss, padding_in_the_softmax_is_named)
{
    for (size_t k = 0; k < 3; k++) {
        made m = {.n = 0};
        double more = 0.0;
        const float *table = put(&m, known_names[0], 2, IDS, H, 0);
        look_up(put_tokens(&m, known_names[1]), table);
        (void)put(&m, known_names[2], 2, IDS, H, 0);
        const float *logits = put(&m, known_names[3], 3, B, S, IDS);
        put(&m, "output_layer.weight:grad", 2, IDS, H, 0)[3] += k == 2 ? 0.0f : 1.0f;
        for (size_t row = 0; row < B * S; row++) {
            double sum = 0.0;
            for (size_t i = 0; i < IDS; i++)
                sum += exp((double)logits[row * IDS + i]);
            more += (row + 1) % S == 0 ? 0.0 : log1p((k == 1 ? 5.3 : 5.0) / sum) / (B * (S - 1));
        }
        *put(&m, "loss:fwd", 0, 0, 0, 0) = 3.25f;
        *other_of(&m) = (float)(3.25 + more);
        expect_cause_on(4, &m,
                        k == 0   ? "vocabulary_padding"
                        : k == 2 ? "loss_term"
                                 : "!vocabulary_padding",
                        k == 0 ? "has 5 more" : NULL, k);
    }
}

/* --- label smoothing and z-loss ----------------------------------------------------------------------------------- */

typedef struct options {
    double smoothing, z;
} options;

/* The loss of the next ids, whose targets are those of is_target, and its gradient of the logits. */
static double smoothed(float *d, const float *logits, options o)
{
    double total = 0.0, t = 0.0;
    for (size_t row = 0; row < B * S; row++)
        t += is_target(row) ? 1.0 : 0.0;
    for (size_t row = 0; row < B * S; row++) {
        const float *x = logits + row * IDS;
        const size_t y = is_target(row) ? id_at(row + 1) : 0;
        double sum = 0.0, mean = 0.0;
        for (size_t i = 0; i < IDS; i++) {
            sum += exp((double)x[i]);
            mean += (double)x[i] / IDS;
        }
        const double lse = log(sum);
        for (size_t i = 0; i < IDS; i++) {
            const double p = exp((double)x[i]) / sum, one = i == y ? 1.0 : 0.0;
            const double g = p * (1.0 + 2.0 * o.z * lse) - (1.0 - o.smoothing) * one - o.smoothing / IDS;
            d[row * IDS + i] = is_target(row) ? (float)(g / t) : 0.0f;
        }
        if (is_target(row))
            total += (1.0 - o.smoothing) * (lse - (double)x[y]) + o.smoothing * (lse - mean) + o.z * lse * lse;
    }
    return total / t;
}

/* What the dumps hold of the loss. */
typedef enum holds { LOSS_AND_GRADIENT, GRADIENT_ALONE, LOSS_ALONE } holds;

static ar_verify_row look_at_options(options reference, options other, holds what)
{
    made m = {.n = 0};
    const float *table = put(&m, "tok_embeddings.weight:init", 2, IDS, H, 0);
    look_up(put_tokens(&m, "tok_embeddings:fwd"), table);
    float *logits = put(&m, "lm_head:fwd", 3, B, S, IDS);
    for (size_t i = 0; i < B * S * IDS; i++)
        logits[i] *= 3.0f;
    memcpy(other_of(&m), logits, B * S * IDS * sizeof *logits);
    float d[2][B * S * IDS];
    const double loss[2] = {smoothed(d[0], logits, reference), smoothed(d[1], logits, other)};
    if (what != LOSS_ALONE) {
        memcpy(put(&m, "lm_head.logits:bwd", 3, B, S, IDS), d[0], sizeof d[0]);
        memcpy(other_of(&m), d[1], sizeof d[1]);
    } else { /* which tokens are targets, of the gradient of the head's input */
        float *dx = put_tokens(&m, "lm_head:bwd"), *dy = other_of(&m);
        for (size_t i = 0; i < B * S * H; i++)
            dx[i] *= is_target(i / H) ? 1.0f : 0.0f;
        memcpy(dy, dx, B * S * H * sizeof *dy);
    }
    if (what != GRADIENT_ALONE) {
        *put(&m, "loss:fwd", 0, 0, 0, 0) = (float)loss[0];
        *other_of(&m) = (float)loss[1];
    }
    return look(&m, (ari_explain_case){ONE_RANK});
}

static void expect_number(const ar_verify_row *row, const char *name, double value)
{
    for (size_t i = 0; i < row->evidence.numbers; i++) {
        if (strcmp(row->evidence.number[i].name, name) == 0) {
            cr_expect_float_eq(row->evidence.number[i].value, value, 1e-12, "%s: %s", name, row->hint);
            return;
        }
    }
    cr_expect_fail("no %s in: %s", name, row->hint);
}

/* One number, the loss alone, says which of the two options it is where only one of them comes out as a number that
 * someone would write. */
Test(replay_loss, other_smoothing_and_z_loss_are_named_with_both_numbers)
{
    static const struct {
        options reference, other;
        bool by_loss; /* which says it as well */
        const char *cause;
    } cases[] = {
        {{0.0, 0.0}, {0.1, 0.0}, true, "label_smoothing"},   {{0.1, 0.0}, {0.0, 0.0}, true, "label_smoothing"},
        {{0.1, 0.0}, {0.15, 0.0}, false, "label_smoothing"}, {{0.2, 1e-4}, {0.05, 1e-4}, false, "label_smoothing"},
        {{0.0, 0.0}, {0.0, 1e-4}, true, "z_loss"},           {{0.0, 1e-3}, {0.0, 0.0}, true, "z_loss"},
        {{0.0, 1e-4}, {0.0, 5e-4}, false, "z_loss"},         {{0.1, 0.0}, {0.1, 1e-3}, false, "z_loss"},
        {{0.0, 0.0}, {0.1, 1e-3}, false, "label_smoothing"}, {{0.1, 0.0}, {0.0, 1e-3}, true, "label_smoothing"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const options a = cases[i].reference, b = cases[i].other;
        for (int what = LOSS_AND_GRADIENT; what <= (cases[i].by_loss ? LOSS_ALONE : GRADIENT_ALONE); what++) {
            const ar_verify_row row = look_at_options(a, b, (holds)what);
            expect_row(&row, cases[i].cause, NULL, i);
            if (a.smoothing != b.smoothing && what != LOSS_ALONE) {
                expect_number(&row, "smoothing", b.smoothing);
                expect_number(&row, "smoothing_there", a.smoothing);
            }
            if (a.z != b.z && what != LOSS_ALONE) {
                expect_number(&row, "z", b.z);
                expect_number(&row, "z_there", a.z);
            }
        }
    }
}

/* The reference's z-loss is of its targets. */
Test(replay_loss, a_z_loss_of_all_tokens_is_named)
{
    for (size_t k = 0; k < 2; k++) {
        const options o = {k ? 0.1 : 0.0, 0.01};
        made m = {.n = 0};
        float d[B * S * IDS];
        double more = 0.0, t = 0.0;
        const float *table = put(&m, "tok_embeddings.weight:init", 2, IDS, H, 0);
        look_up(put_tokens(&m, "tok_embeddings:fwd"), table);
        const float *logits = put(&m, "lm_head:fwd", 3, B, S, IDS);
        const double loss = smoothed(d, logits, o);
        memcpy(put(&m, "lm_head.logits:bwd", 3, B, S, IDS), d, sizeof d);
        memcpy(other_of(&m), d, sizeof d);
        for (size_t row = 0; row < B * S; row++) {
            double sum = 0.0;
            for (size_t i = 0; i < IDS; i++)
                sum += exp((double)logits[row * IDS + i]);
            more += is_target(row) ? 0.0 : o.z * log(sum) * log(sum);
            t += is_target(row) ? 1.0 : 0.0;
        }
        *put(&m, "loss:fwd", 0, 0, 0, 0) = (float)loss;
        *other_of(&m) = (float)(loss + more / t);
        expect_cause(&m, "z_loss", "of all 24 tokens, where the reference has that of its 17 targets", k);
    }
}

/* No smoothing is seen in a loss that is wrong otherwise, with its right gradient beside it or without. */
Test(replay_loss, another_mistake_is_not_called_an_option)
{
    static const double factors[] = {1.0123, 0.97531, 1.00071, 1.0333};
    for (size_t i = 0; i < 2 * sizeof factors / sizeof *factors; i++) {
        made m = {.n = 0};
        float d[B * S * IDS];
        const float *table = put(&m, "tok_embeddings.weight:init", 2, IDS, H, 0);
        look_up(put_tokens(&m, "tok_embeddings:fwd"), table);
        const float loss = (float)smoothed(d, put(&m, "lm_head:fwd", 3, B, S, IDS), (options){0.1, 1e-4});
        const ar_st_tensor t = {.name = "lm_head.logits:bwd", .dtype = AR_F32, .ndim = 3, .shape = {B, S, IDS}};
        if (i % 2)
            put_pair(&m, t, d, d);
        *put(&m, "loss:fwd", 0, 0, 0, 0) = loss;
        *other_of(&m) = (float)((double)loss * factors[i / 2]);
        const ar_verify_row row = look(&m, (ari_explain_case){ONE_RANK});
        expect_row(&row, "!label_smoothing", NULL, i);
        expect_row(&row, "!z_loss", NULL, i);
    }
}

/* --- what the gradient of the head's input says ------------------------------------------------------------------- */

/* The gradient (p - 1_y) W of a token's logits, whose label is y, with p of the logits times `times`, in y's shard of the
 * vocabulary alone. Returns the loss. */
static double gradient_of(float *d, const float *logits, const float *w, size_t y, double times, size_t shards)
{
    double sum = 0.0;
    for (size_t k = 0; k < IDS; k++)
        sum += exp(times * (double)logits[k]);
    for (size_t i = 0; i < H; i++) {
        double g = 0.0;
        for (size_t k = 0; k < IDS; k++)
            g += k * shards / IDS != y * shards / IDS
                     ? 0.0
                     : (exp(times * (double)logits[k]) / sum - (k == y ? 1.0 : 0.0)) * (double)w[k * H + i];
        d[i] = (float)(times * g / 40.0);
    }
    return log(sum) - times * (double)logits[y];
}

Test(replay_loss, other_labels_are_known_by_the_gradient)
{
    static const struct {
        size_t samples;                    /* on */
        bool inverse;                      /* tokens that are no targets count, and no others */
        size_t by;                         /* of the second sample: its labels are so many ids on */
        float times;                       /* and count so often */
        const char *cause, *words, *micro; /* batches; NULL: the dumps do not say */
        float more, term;                  /* what odd labels count, and what is added to all gradients, besides */
    } cases[] = {{1, false, 0, 1.0f, "labels_of_other_samples", NULL, NULL, 0.0f, 0.0f},
                 {0, true, 0, 1.0f, "ignored_labels", "inverted", NULL, 0.0f, 0.0f},
                 {0, false, 1, 1.0f, "other_labels", " 6 of 17 targets", NULL, 0.0f, 0.0f},
                 {0, false, 0, 2.0f, "samples_weighted", "times 1, 2,", NULL, 0.0f, 0.0f},
                 {0, false, 0, 2.0f, "micro_batches_weighted", "of 2 the gradients count 1, 2 times", "2", 0.0f, 0.0f},
                 {0, false, 0, 1.0f, "samples_weighted", "from 1 to 1.5, one for each label", NULL, 0.5f, 0.0f},
                 {0, false, 0, 1.0f, "!ignored_labels", NULL, NULL, 0.0f, 0.05f}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        made m = {.n = 0};
        for (int k = 0; k < 2 && cases[i].micro; k++) {
            m.metadata[k][0] = "micro_batches";
            m.metadata[k][1] = cases[i].micro;
        }
        const float *table = put(&m, "tok_embeddings.weight:init", 2, IDS, H, 0);
        look_up(put_tokens(&m, "tok_embeddings:fwd"), table);
        const float *w = put(&m, "lm_head.weight:init", 2, IDS, H, 0), *logits = put(&m, "lm_head:fwd", 3, B, S, IDS);
        float *d = put_tokens(&m, "lm_head:bwd"), *e = other_of(&m);
        memset(d, 0, B * S * H * sizeof *d);
        memset(e, 0, B * S * H * sizeof *e);
        for (size_t row = 0; row < B * S; row++) {
            const size_t there = (row + cases[i].samples * S) % (B * S);
            if (is_target(row))
                gradient_of(d + row * H, logits + row * IDS, w, id_at(row + 1), 1.0, 1);
            if (cases[i].inverse ? row % S + 1 < S && !is_target(row) : is_target(there))
                gradient_of(e + row * H, logits + row * IDS, w,
                            (id_at(there + 1) + (row / S == 1 ? cases[i].by : 0)) % IDS, 1.0, 1);
            for (size_t k = row * H; k < (row + 1) * H; k++)
                e[k] = e[k] * (row / S == 1 ? cases[i].times : 1.0f) *
                           (1.0f + cases[i].more * (float)(id_at(row + 1) % 2)) +
                       cases[i].term * noise(k + 77);
        }
        expect_cause(&m, cases[i].cause, cases[i].words, i);
    }
}

/* The head has a weight of its own, or the embedding's, which its shapes say. */
Test(replay_loss, a_scale_of_the_logits_and_a_shard_s_own_gradient_are_named)
{
    static const struct {
        double times;
        size_t shards;
        const char *cause, *words;
    } cases[] = {{1.0 / 0.7, 1, "logits_scale", "times 1.429"},
                 {0.5, 1, "logits_scale", "times 0.5"},
                 {1.0, 3, "collective_without_backward", "alone, of 3"}};
    for (size_t k = 0; k < 2 * sizeof cases / sizeof *cases; k++) {
        const double times = cases[k / 2].times;
        double loss[2] = {0.0};
        made m = {.n = 0};
        const float *table = put(&m, own_names[0], 2, IDS, H, 0);
        look_up(put_tokens(&m, own_names[1]), table);
        const float *w = k % 2 ? table : put(&m, own_names[2], 2, IDS, H, 0);
        const float *logits = put(&m, own_names[3], 3, B, S, IDS);
        float *d = put_tokens(&m, own_names[4]), *e = other_of(&m);
        memset(d, 0, B * S * H * sizeof *d);
        memset(e, 0, B * S * H * sizeof *e);
        for (size_t row = 0; row < B * S; row++) {
            if (!is_target(row))
                continue;
            const size_t y = id_at(row + 1);
            loss[0] += gradient_of(d + row * H, logits + row * IDS, w, y, 1.0, 1) / 17.0;
            loss[1] += gradient_of(e + row * H, logits + row * IDS, w, y, times, cases[k / 2].shards) / 17.0;
        }
        if (times != 1.0) {
            *put(&m, "loss:fwd", 0, 0, 0, 0) = (float)loss[0];
            *other_of(&m) = (float)loss[1];
        }
        expect_cause_on(3, &m, cases[k / 2].cause, cases[k / 2].words, k);
    }
}

/* Of the loss's gradient the rows of targets are not zero, as many as the factor is. */
Test(replay_loss, a_sum_over_the_targets_is_known_by_rows_with_a_gradient)
{
    made m = {.n = 0};
    float *d = put_tokens(&m, "lm_head:bwd"), *e = other_of(&m);
    for (size_t i = 0; i < B * S * H; i++) {
        d[i] *= is_target(i / H) ? 1.0f : 0.0f;
        e[i] = 17.0f * d[i];
    }
    expect_cause(&m, "sum_over_tokens", NULL, 0);
}
