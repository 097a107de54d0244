/* SPDX-License-Identifier: Apache-2.0 */
/* The loss of two dumps, computed again from their logits: other targets, another count, label smoothing and z-loss are
 * named as what they are. The loss and its gradient are computed here by plain loops. */
#include "tests/verify/replay_support.h"

/* --- targets -------------------------------------------------------------------------------------------------------- */

typedef struct loss_case {
    size_t shift, divisor; /* divisor 0: the number of targets */
    bool all;              /* tokens without a target count too */
    const char *cause;
    size_t chunks; /* labels are shifted in each of so many alone; 0: in the sample */
    bool zigzag;   /* the r-th chunk from either end follow each other */
    bool but_one;  /* the first target does not count */
} loss_case;

/* The row whose id is the row's label; B * S: it has none. */
static size_t label_of(const loss_case *p, size_t row)
{
    const size_t size = p->chunks ? S / p->chunks : S, at = row % S, chunk = at / size;
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
        counts[row] = label < B * S && (is_target(row) || (p->all && row % S + 1 < S)) && !(p->but_one && row == 0);
        for (size_t i = 0; i < IDS && counts[row]; i++)
            sum += exp((double)logits[row * IDS + i]);
        total += counts[row] ? log(sum) - (double)logits[row * IDS + id_at(label)] : 0.0;
        n += counts[row];
    }
    return total / (double)(p->divisor ? p->divisor : n);
}

static const loss_case loss_cases[] = {
    {2, 0, false, "labels_shifted", 0, false, false}, {0, 0, false, "labels_shifted", 0, false, false},
    {1, 0, true, "ignored_labels", 0, false, false},  {1, B *S, false, "target_count", 0, false, false},
    {1, 20, false, "target_count", 0, false, false},  {1, 0, false, "labels_shifted", 2, false, false},
    {1, 0, false, "labels_shifted", 4, true, false},  {1, 0, false, "labels_shifted", 4, false, false},
    {1, 0, false, "target_count", 0, false, true},
};

/* names: of the embedding, its weight, the head and its weight. */
static ar_verify_row look_at_loss(const loss_case *p, int ranks, const char *const names[5])
{
    made m = {.ranks = ranks};
    bool counts[2][B * S];
    const loss_case right = {1, 0, false, NULL, 0, false, false};
    const float *table = put(&m, names[0], 2, IDS, H, 0);
    look_up(put(&m, names[1], 3, B, S, H), table);
    (void)put(&m, names[2], 2, IDS, H, 0);
    const float *logits = put(&m, names[3], 3, B, S, IDS);
    float *dx = put(&m, names[4], 3, B, S, H), *dy = other_of(&m);
    float *loss = put(&m, "loss:fwd", 0, 0, 0, 0);
    *loss = (float)loss_of(logits, &right, counts[0]);
    *other_of(&m) = (float)loss_of(logits, p, counts[1]);
    for (size_t i = 0; i < B * S * H; i++) {
        dx[i] *= counts[0][i / H] ? 1.0f : 0.0f;
        dy[i] *= counts[1][i / H] ? 1.0f : 0.0f;
    }
    return look(&m, 0.0);
}

static const char *const known_names[] = {"tok_embeddings.weight:init", "tok_embeddings:fwd",
                                          "output_layer.weight:init", "output_layer:fwd", "output_layer:bwd"};
static const char *const own_names[] = {"tok.weight:init", "tok:fwd", "top.weight:init", "top:fwd", "top:bwd"};

Test(replay_loss, one_mistake_of_the_loss_is_named)
{
    for (size_t k = 0; k < sizeof loss_cases / sizeof *loss_cases; k++) {
        const ar_verify_row row = look_at_loss(&loss_cases[k], 4, known_names);
        cr_expect_str_eq(row.evidence.cause, loss_cases[k].cause, "%s", row.hint);
    }
}

Test(replay_loss, an_embedding_and_a_head_are_known_by_their_shapes)
{
    for (size_t k = 0; k < sizeof loss_cases / sizeof *loss_cases; k++) {
        const ar_verify_row row = look_at_loss(&loss_cases[k], 4, own_names);
        cr_expect_str_eq(row.evidence.cause, loss_cases[k].cause, "%s", row.hint);
    }
}

Test(replay_loss, labels_are_not_shifted_in_chunks_of_more_ranks_than_there_are)
{
    const ar_verify_row row = look_at_loss(&(loss_case){1, 0, false, NULL, 4, false, false}, 1, known_names);
    cr_expect_str_neq(row.evidence.cause, "labels_shifted", "%s", row.hint);
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
    look_up(put(&m, "tok_embeddings:fwd", 3, B, S, H), table);
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
        float *dx = put(&m, "lm_head:bwd", 3, B, S, H), *dy = other_of(&m);
        for (size_t i = 0; i < B * S * H; i++)
            dx[i] *= is_target(i / H) ? 1.0f : 0.0f;
        memcpy(dy, dx, B * S * H * sizeof *dy);
    }
    if (what != GRADIENT_ALONE) {
        *put(&m, "loss:fwd", 0, 0, 0, 0) = (float)loss[0];
        *other_of(&m) = (float)loss[1];
    }
    return look(&m, 0.0);
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

static const struct {
    options reference, other;
    const char *cause;
} option_cases[] = {
    {{0.0, 0.0}, {0.1, 0.0}, "label_smoothing"},  {{0.1, 0.0}, {0.0, 0.0}, "label_smoothing"},
    {{0.1, 0.0}, {0.15, 0.0}, "label_smoothing"}, {{0.2, 1e-4}, {0.05, 1e-4}, "label_smoothing"},
    {{0.0, 0.0}, {0.0, 1e-4}, "z_loss"},          {{0.0, 1e-3}, {0.0, 0.0}, "z_loss"},
    {{0.0, 1e-4}, {0.0, 5e-4}, "z_loss"},         {{0.1, 0.0}, {0.1, 1e-3}, "z_loss"},
    {{0.0, 0.0}, {0.1, 1e-3}, "label_smoothing"}, {{0.1, 0.0}, {0.0, 1e-3}, "label_smoothing"},
};

Test(replay_loss, other_smoothing_and_z_loss_are_named_with_both_numbers)
{
    for (size_t i = 0; i < sizeof option_cases / sizeof *option_cases; i++) {
        const options a = option_cases[i].reference, b = option_cases[i].other;
        for (int what = LOSS_AND_GRADIENT; what <= GRADIENT_ALONE; what++) {
            const ar_verify_row row = look_at_options(a, b, (holds)what);
            cr_expect_str_eq(row.evidence.cause, option_cases[i].cause, "case %zu, dump %d: %s", i, what, row.hint);
            if (a.smoothing != b.smoothing) {
                expect_number(&row, "smoothing", b.smoothing);
                expect_number(&row, "smoothing_there", a.smoothing);
            }
            if (a.z != b.z) {
                expect_number(&row, "z", b.z);
                expect_number(&row, "z_there", a.z);
            }
        }
    }
}

/* One number says which of the two it is where only one of them comes out as a number that someone would write. */
Test(replay_loss, without_a_gradient_the_loss_says_it_where_one_option_differs)
{
    static const struct {
        options reference, other;
        const char *cause;
    } rows[] = {{{0.0, 0.0}, {0.1, 0.0}, "label_smoothing"},
                {{0.1, 0.0}, {0.0, 0.0}, "label_smoothing"},
                {{0.0, 0.0}, {0.0, 1e-4}, "z_loss"},
                {{0.0, 1e-3}, {0.0, 0.0}, "z_loss"},
                {{0.1, 0.0}, {0.0, 1e-3}, "label_smoothing"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const ar_verify_row row = look_at_options(rows[i].reference, rows[i].other, LOSS_ALONE);
        cr_expect_str_eq(row.evidence.cause, rows[i].cause, "row %zu: %s", i, row.hint);
    }
}

/* No smoothing is seen in a loss or a gradient that is wrong otherwise. */
Test(replay_loss, another_mistake_is_not_called_an_option)
{
    static const double loss_factors[] = {1.0123, 0.97531, 1.00071, 1.0333};
    for (size_t i = 0; i < sizeof loss_factors / sizeof *loss_factors; i++) {
        for (int gradient = 0; gradient < 2; gradient++) {
            made m = {.n = 0};
            float d[B * S * IDS];
            const float *table = put(&m, "tok_embeddings.weight:init", 2, IDS, H, 0);
            look_up(put(&m, "tok_embeddings:fwd", 3, B, S, H), table);
            const float *logits = put(&m, "lm_head:fwd", 3, B, S, IDS);
            const float loss = (float)smoothed(d, logits, (options){0.1, 1e-4});
            if (gradient) {
                memcpy(put(&m, "lm_head.logits:bwd", 3, B, S, IDS), d, sizeof d);
                memcpy(other_of(&m), d, sizeof d);
            }
            *put(&m, "loss:fwd", 0, 0, 0, 0) = loss;
            *other_of(&m) = (float)((double)loss * loss_factors[i]);
            const ar_verify_row row = look(&m, 0.0);
            cr_expect(strcmp(row.evidence.cause, "label_smoothing") != 0 && strcmp(row.evidence.cause, "z_loss") != 0,
                      "%g: %s", loss_factors[i], row.hint);
        }
    }
}

/* --- what the gradient of the head's input says ------------------------------------------------------------------- */

/* The gradient (p - 1_y) W of a token's logits, whose label is y. */
static void gradient_of(float *d, const float *logits, const float *w, size_t y)
{
    double sum = 0.0;
    for (size_t k = 0; k < IDS; k++)
        sum += exp((double)logits[k]);
    for (size_t i = 0; i < H; i++) {
        double g = 0.0;
        for (size_t k = 0; k < IDS; k++)
            g += (exp((double)logits[k]) / sum - (k == y ? 1.0 : 0.0)) * (double)w[k * H + i];
        d[i] = (float)(g / 40.0);
    }
}

static ar_verify_row look_at_labels(size_t samples, bool inverse)
{
    made m = {.n = 0};
    const float *table = put(&m, "tok_embeddings.weight:init", 2, IDS, H, 0);
    look_up(put(&m, "tok_embeddings:fwd", 3, B, S, H), table);
    const float *w = put(&m, "lm_head.weight:init", 2, IDS, H, 0);
    const float *logits = put(&m, "lm_head:fwd", 3, B, S, IDS);
    float *d = put(&m, "lm_head:bwd", 3, B, S, H), *e = other_of(&m);
    memset(d, 0, B * S * H * sizeof *d);
    memset(e, 0, B * S * H * sizeof *e);
    for (size_t row = 0; row < B * S; row++) {
        const size_t there = (row + samples * S) % (B * S);
        const bool counts = inverse ? row % S + 1 < S && !is_target(row) : is_target(there);
        if (is_target(row))
            gradient_of(d + row * H, logits + row * IDS, w, id_at(row + 1));
        if (counts)
            gradient_of(e + row * H, logits + row * IDS, w, id_at(there + 1));
    }
    return look(&m, 0.0);
}

Test(replay_loss, labels_of_other_samples_are_known_by_the_gradient)
{
    const ar_verify_row row = look_at_labels(1, false);
    cr_expect_str_eq(row.evidence.cause, "labels_of_other_samples", "%s", row.hint);
}

Test(replay_loss, an_inverted_mask_of_labels_is_named)
{
    const ar_verify_row row = look_at_labels(0, true);
    cr_expect_str_eq(row.evidence.cause, "ignored_labels", "%s", row.hint);
    cr_expect(strstr(row.hint, "inverted"), "%s", row.hint);
}

/* The ends of the chunks have a gradient: labels were not shifted in each alone, whatever the loss is. */
Test(replay_loss, a_loss_that_has_the_chunks_ends_is_not_shifted_in_each)
{
    made m = {.ranks = 4};
    bool counts[2][B * S];
    const loss_case right = {1, 0, false, NULL, 0, false, false}, cut = {1, 0, false, NULL, 2, false, false};
    const float *table = put(&m, "tok_embeddings.weight:init", 2, IDS, H, 0);
    look_up(put(&m, "tok_embeddings:fwd", 3, B, S, H), table);
    const float *logits = put(&m, "lm_head:fwd", 3, B, S, IDS);
    float *dx = put(&m, "lm_head:bwd", 3, B, S, H);
    float *loss = put(&m, "loss:fwd", 0, 0, 0, 0);
    *loss = (float)loss_of(logits, &right, counts[0]);
    *other_of(&m) = (float)loss_of(logits, &cut, counts[1]);
    for (size_t i = 0; i < B * S * H; i++)
        ((float *)(uintptr_t)m.tensor[1][3].data)[i] = dx[i] *= counts[0][i / H] ? 1.0f : 0.0f;
    const ar_verify_row row = look(&m, 0.0);
    cr_expect_str_neq(row.evidence.cause, "labels_shifted", "%s", row.hint);
}
