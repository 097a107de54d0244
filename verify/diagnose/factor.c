/* SPDX-License-Identifier: Apache-2.0 */
/* The reference times a number: one for all that differs, or one for each rank; and the loss. */
#include <stdlib.h>

#include "verify/diagnose/hypothesis.h"

/* A factor nearer to one counts as none. */
#define NONE ARI_SEEN
/* Two factors of one fault, if no noise is known, are this close. */
#define ALIKE (2.0 * ARI_SUMS)

/* --- what a factor is called -------------------------------------------------------------------------------------- */

/* One to three values fit any ratio: such a factor counts only if it is a telling one. */
enum { FEW = 4 };
/* Numbers of the run are distinguished by this much in any noise. */
static const double most_unsure = 3e-3;

/* Above this share of noise in the squares, values are noise rather than multiples. */
static const double most_noise = 0.01;

/* p/q of small numbers: of counts that are divided by. */
static bool is_fraction(double factor, double apart, int *p, int *q)
{
    for (*q = 2; *q <= 9; (*q)++) {
        *p = (int)nearbyint(factor * *q);
        if (*p >= 2 && *p <= 16 && fabs(factor * *q - *p) <= fmin(fmax(2e-6, 0.8 * apart), 2e-4) * *p)
            return true;
    }
    return false;
}

/* By a count that was divided by in place of the targets, if it is one. */
static void name_divisor(ari_trace *t, double factor, size_t targets)
{
    const size_t others = ari_counted_of(factor, targets);
    if (others == 0) {
        ari_words(t, "name", "%.6g", factor);
        return;
    }
    t->flags |= ARI_IF(FRACTION);
    ari_words(t, "name", "%.6g (%zu/%zu, of its %zu targets)", factor, targets, others, targets);
}

void ari_name_number(ari_trace *t, double factor, double apart, size_t targets)
{
    const char *sign = factor < 0.0 ? "-" : "";
    const double size = fabs(factor) < 1.0 ? 1.0 / fabs(factor) : fabs(factor), power = nearbyint(log2(size));
    int p = 0, q = 0;
    t->flags |= (fabs(factor) < 1.0 ? ARI_IF(INVERSE) : 0) | (factor < 0.0 ? ARI_IF(NEGATIVE) : 0);
    const char *over = t->flags & ARI_IF(INVERSE) ? "1/" : "";
    if (ari_is_near(fabs(factor), 1.0, ALIKE)) {
        t->flags |= ARI_IF(ONE);
        ari_words(t, "name", "%s1", sign);
        return;
    }
    if (power >= 8.0 && ari_is_near(size, exp2(power), apart)) {
        t->flags |= ARI_IF(POWER);
        ari_words(t, "name", "%s2^%s%.0f", sign, t->flags & ARI_IF(INVERSE) ? "-" : "", power);
        return;
    }
    for (int n = 2; n <= ARI_MOST_RANKS; n++) {
        const bool whole = ari_is_near(size, n, apart);
        if (!whole && (n > 32 || !ari_is_near(size * size, n, apart) || nearbyint(sqrt(n)) * nearbyint(sqrt(n)) == n))
            continue;
        t->flags |= whole ? ARI_IF(COUNT) : ARI_IF(ROOT);
        ARI_FACTS(t, {"n", .count = (size_t)n});
        if (whole)
            ari_words(t, "name", "%s%s%d", sign, over, n);
        else
            ari_words(t, "name", "%.6g (%s%ssqrt(%d))", factor, sign, over, n);
        return;
    }
    if (is_fraction(fabs(factor), apart, &p, &q)) {
        t->flags |= ARI_IF(FRACTION);
        ari_words(t, "name", "%.6g (%s%d/%d)", factor, sign, p, q);
        return;
    }
    name_divisor(t, factor, targets);
}

static bool is_zero_there(const ari_case *c, size_t i)
{
    return c->d->reference[i] == 0.0f;
}

/* True if the factor is dropout's: the share of nonzero elements is the reference's share times 1 - p within four
 * standard errors, and the zeros are scattered. */
static void name_dropped(ari_trace *t, const ari_case *c, double factor)
{
    const size_t zeros = ari_scattered(c, is_zero_there);
    const double n = (double)c->grid.count, kept = 1.0 - (double)zeros / n;
    if (!ari_is_activation(c->d) || zeros < 16 || (double)c->survey.different < 0.99 * kept * n ||
        fabs(factor - kept) > 4.0 * sqrt(kept * (1.0 - kept) / n))
        return;
    t->flags |= ARI_IF(ZERO);
    t->penalty = 5;
    ARI_FACTS(t, {"percent", .number = 100.0 * (1.0 - kept)});
}

/* For initial values: Xavier's scale from a shard's sizes instead of the full ones. Returns the number of shards; 0:
 * none. */
static int name_fans(ari_trace *t, const ari_case *c, double factor)
{
    const ari_difference *d = c->d;
    const double a = d->ndim == 2 ? (double)d->shape[0] : 0.0, b = d->ndim == 2 ? (double)d->shape[1] : 0.0;
    for (int n = 2; n <= ARI_MOST_RANKS && a > 0.0 && (d->pass == 'i' || (d->hidden && !strchr("fbg", d->pass))); n++) {
        const double square = factor * factor;
        if (!ari_is_near(square, (a + b) / (a / n + b), ALIKE) && !ari_is_near(square, (a + b) / (a + b / n), ALIKE))
            continue;
        t->flags |= ARI_IF(OF_SHARDS);
        ari_words(t, "fans", "the root of a ratio for one of %d shards", n);
        return n;
    }
    return 0;
}

/* --- by the sizes of a run whose ranks are seen ------------------------------------------------------------------- */

/* If only a row-parallel bias, a value or a gradient in a block has the factor, it is the tensor-parallel group's, which
 * holds them whole: a factor of the data-parallel or context-parallel group would be in every gradient. */
static bool is_of_tp(const ari_difference *d)
{
    const bool row_bias = d->pass == 'g' && d->ndim == 1 && (ari_name_is(d->name) & ARI_IS_ROW_PARALLEL);
    const bool block =
        (d->pass == 'f' && !(ari_name_is(d->name) & ARI_IS_LOSS)) ||
        (d->pass == 'b' && ari_section_of(ari_module_of(d->name, strlen(d->name)).role) == ARI_IN_BLOCKS);
    return ari_along(d, ARI_CUTS_FEATURES) > 1 && (ari_along(d, ARI_CUTS_DATA) == 1 || row_bias || block);
}

/* The other axes that have as many ranks as the one whose number the factor is: ", or over tp". */
static void say_as_many(ari_trace *t, const ari_case *c)
{
    char name[ARI_AXES_TEXT];
    int ranks = 0;
    ari_text text = ari_list(t, "as_many");
    for (int i = ARI_LAYOUT_DP; i < ARI_LAYOUT_AXES; i++)
        ranks = t->flags & ari_of_axis(i) ? ari_along(c->d, ari_layout_axes[i].axes) : ranks;
    for (int i = ARI_LAYOUT_DP; i < ARI_LAYOUT_AXES && ranks > 1; i++) {
        if (ari_along(c->d, ari_layout_axes[i].axes) == ranks && !(t->flags & ari_of_axis(i)))
            ari_say(&text, ", or the same over %s", ari_extent_text(name, c->known->other, i));
    }
}

/* A number of the run, and what it and its inverse are called. */
typedef struct number {
    double value; /* at most 1: it says nothing here */
    const char *text, *inverse;
    ari_properties flags;
} number;

static bool is_number(ari_trace *t, const number *n, double factor, double tolerance)
{
    const bool whole = ari_is_near(factor, n->value, tolerance);
    if (!(n->value > 1.0) || (!whole && !ari_is_near(factor, 1.0 / n->value, tolerance)))
        return false;
    t->flags |= ARI_IF(NAMED) | n->flags | (whole ? 0 : ARI_IF(INVERSE));
    ari_words(t, "name", "%.6g = %s%s", factor, whole || n->inverse ? "" : "1/",
              whole || !n->inverse ? n->text : n->inverse);
    return true;
}

/* By the product of several extents of the layout, and of micro-batches: a divisor that leaves out, or has twice, what
 * GA, dp, cp and tp share out. */
static bool name_by_product(ari_trace *t, const ari_case *c, double factor, double tolerance)
{
    enum { MOST = ARI_LAYOUT_AXES + 1 };
    double extent[MOST] = {c->d->micro_batches};
    const char *name[MOST] = {"m"};
    int n = c->d->micro_batches > 1;
    for (int i = 0; i < ARI_LAYOUT_AXES; i++) {
        const int ranks = ari_along(c->d, ari_layout_axes[i].axes);
        if (i == ARI_LAYOUT_PP || ranks <= 1)
            continue;
        extent[n] = ranks;
        name[n++] = ari_layout_axes[i].name;
    }
    for (unsigned set = 1; set < 1u << n; set++) {
        char text[64];
        ari_text to = ari_text_in(text, sizeof text);
        number product = {1.0, text, NULL, ARI_IF(COUNT)};
        int used = 0;
        for (int i = 0; i < n; i++) {
            if (!(set >> i & 1u))
                continue;
            product.value *= extent[i];
            ari_say(&to, "%s%s", used++ > 0 ? "*" : "", name[i]);
        }
        if (used > 1 && is_number(t, &product, factor, tolerance))
            return true;
    }
    return false;
}

/* Of the dump, or as many as there are without ignored labels. */
static size_t targets_of(const ari_case *c)
{
    return c->facts.targets > 0 ? c->facts.targets : c->d->seq > 1 ? c->d->batch * (c->d->seq - 1) : 0;
}

/* By the numbers of the run, the likeliest first: ranks, of which those of tensor parallelism are N, then others. */
static bool name_by_sizes(ari_trace *t, const ari_case *c, double factor, double tolerance)
{
    const ari_difference *d = c->d;
    char name[ARI_AXES_TEXT];
    const double n = ari_along(d, ARI_CUTS_FEATURES), b = (double)d->batch, micro = d->micro_batches;
    const double data = ari_along(d, ARI_CUTS_DATA), both = data > ari_along(d, ARI_CUTS_SAMPLES) ? data : 0.0;
    const double targets = (double)targets_of(c);
    const number sizes[] = {
        {factor < 1.0 ? micro : 0.0, "m", NULL, ARI_IF(OF_MICRO)},
        {2.0, "2", NULL, ARI_IF(TWICE)},
        {d->pass == 'g' ? both : 0.0, "dp*cp", NULL, ARI_IF(COUNT)}, /* over which gradients are added */
        {b, "the batch", "1/batch", 0},
        {targets, "T, the number of targets", "1/T, of the number of targets", 0},
    };
    bool named = ari_is_near(factor, -1.0, tolerance);
    for (int i = ARI_LAYOUT_DP; i < ARI_LAYOUT_AXES && !named; i++) {
        const ari_layout_axis *axis = &ari_layout_axes[i];
        const bool tp = axis->axes == ARI_CUTS_FEATURES;
        const number ranks = {ari_along(d, axis->axes), tp ? "N" : ari_extent_text(name, c->known->other, i), NULL,
                              ari_of_axis(i)};
        named = (tp || !is_of_tp(d) || ranks.value != n) && is_number(t, &ranks, factor, tolerance);
    }
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes && !named; i++)
        named = is_number(t, &sizes[i], factor, tolerance);
    named = named || name_by_product(t, c, factor, tolerance);
    if (!(t->flags & ARI_IF(NAMED)))
        name_divisor(t, factor, c->facts.targets);
    t->flags |= factor < 0.0 && named ? ARI_IF(NAMED) | ARI_IF(ONE) | ARI_IF(NEGATIVE) : 0;
    say_as_many(t, c);
    return named;
}

static void found_seen(ari_trace *t, const ari_case *c, double factor, double tolerance)
{
    const ari_difference *d = c->d;
    ARI_FINDING(t, ARI_FOUND_FACTOR, 0, {"factor", .number = factor});
    ari_list(t, "fit");
    t->penalty = name_by_sizes(t, c, factor, tolerance) || d->pass == 'i' ? 5 : 15;
    name_dropped(t, c, factor);
    if (name_fans(t, c, factor) == 0 && d->pass == 'i' && d->ranks > 1 &&
        ari_is_near(factor, sqrt((double)d->ranks), ARI_SUMS))
        t->flags |= ARI_IF(ROOT);
}

/* --- the same in other tensors of the dumps ----------------------------------------------------------------------- */

enum { ELEMENTS_ASKED = 512, MOST_LAYERS = 512, LEVELS_SAID = 6 };

/* The factor in other tensors. */
typedef struct others {
    size_t same, asked;           /* of the pass: how many have the factor too, of how many */
    size_t same_experts, experts; /* of these, experts' gradients */
    ari_fit layer[MOST_LAYERS];   /* of each layer's gradients; layers run from the last to the first */
} others;

static void count_factor(others *o, const ari_case *c, const ar_dump_tensor *r, const ar_dump_tensor *v, double factor)
{
    const ari_order_key key = ari_order_of(r->name, c->path);
    const size_t n = r->count < ELEMENTS_ASKED ? r->count : ELEMENTS_ASKED, layer = (size_t)labs(key.layer);
    ari_fit f = {0};
    double own;
    if (!v || v->count != r->count || ari_fit_read(&f, v, r, (r->count - n) / 2, n) != AR_OK)
        return;
    if (key.pass == 'g' && key.step == c->d->step && layer < MOST_LAYERS &&
        ari_section_of(ari_module_of(r->name, key.stem).role) == ARI_IN_BLOCKS) {
        ari_fit *all = &o->layer[layer];
        all->yy += f.yy, all->ya += f.ya, all->aa += f.aa, all->n += f.n;
    }
    if (r == c->full || key.pass != c->d->pass || r->count < 8 || !(f.aa > 0.0) || !(f.yy > 0.0))
        return;
    const bool same = ari_fit_one(&own, &f) <= ARI_FIT && ari_is_near(own, factor, ARI_SEEN);
    const bool expert = key.pass == 'g' && ari_expert_of(r->name) != SIZE_MAX;
    o->same += same;
    o->asked++;
    o->same_experts += expert && same;
    o->experts += expert;
}

/* The factor of each layer's gradients, from the last layer to the first; 0: they are no multiples of the
 * reference's. */
static size_t factors_of_layers(double *factor, const others *o)
{
    size_t n = 0;
    for (size_t layer = MOST_LAYERS; layer-- > 0;) {
        if (o->layer[layer].n == 0 && n == 0)
            continue;
        if (!(ari_fit_one(&factor[n++], &o->layer[layer]) <= ARI_FIT))
            return 0;
    }
    return n;
}

/* Runs of layers with one factor, the last layers first: where there are several, stages multiply the gradient that
 * they pass on; by one number each time, where the runs' factors are geometric. */
static void look_at_stages(ari_trace *t, const ari_case *c, const others *o)
{
    double factor[MOST_LAYERS], ratio = 0.0, before = 0.0;
    const size_t n = strchr("bg", c->d->pass) ? factors_of_layers(factor, o) : 0;
    size_t levels = 0;
    bool steady = true;
    ari_text text = ari_list(t, "levels");
    for (size_t i = 0, end; i < n; i = end) {
        end = i + 1;
        while (end < n && ari_is_near(factor[end], factor[i], ARI_SEEN))
            end++;
        if (levels == 1)
            ratio = factor[i] / before;
        steady = steady && (levels == 0 || ari_is_near(factor[i] / before, ratio, ARI_KNOWN));
        before = factor[i];
        if (++levels > LEVELS_SAID)
            continue;
        ari_say(&text, "%s%zu", levels > 1 ? ", " : "", n - end);
        if (end - i > 1)
            ari_say(&text, " to %zu", n - 1 - i);
        ari_say(&text, " times %.4g", factor[i]);
    }
    if (levels < 2 || (!c->d->pipeline && !(c->d->hidden && steady && levels > 2)))
        return;
    ARI_FACTS(t, {"ratio", .number = ratio});
    t->flags |= ARI_IF(STAGES) | (steady && levels > 2 ? ARI_IF(ALL) : 0);
}

/* --- one of a tensor's two parts ---------------------------------------------------------------------------------- */

/* Latent attention's matrix that makes what keys are made of, and the key that all heads share: if the rows of one
 * alone have the factor, the ranks completed the two apart. */
static void look_at_latents(ari_trace *t, const ari_case *c)
{
    size_t from, to, n = c->grid.shape[0];
    if (ari_module_within(c->d->name).role != ARI_KV_A || c->d->pass != 'g')
        return;
    ari_bounding_range(c, 0, &from, &to);
    if (to - from == n || (from > 0 && to < n) || c->survey.hit[0] != to - from)
        return;
    t->flags |= ARI_IF(BLOCKS);
    ARI_FACTS(t, {"first_row", .count = from}, {"last_row", .count = to - 1},
              {"which", .text = from == 0 ? "latents" : "shared key"});
}

/* Asks all tensors for the factor. OF_EP: all experts' gradients have it, as this one, and nothing else has. */
static void look_at_others(ari_trace *t, others *o, const ari_case *c, double factor)
{
    const ar_dump *r = c->known->reference, *v = c->known->other ? c->known->other : c->d->gradients_here;
    memset(o, 0, sizeof *o);
    for (size_t i = 0; r && v && i < ar_dump_count(r); i++)
        count_factor(o, c, ar_dump_at(r, i), ar_dump_find(v, ar_dump_at(r, i)->name), factor);
    if ((c->is & ARI_IS_EXPERT) && o->experts > 0 && o->same_experts == o->experts && o->same == o->same_experts &&
        o->asked > o->experts)
        t->flags |= ARI_IF(OF_EP);
    ARI_FACTS(t, {"experts", .count = o->experts});
    look_at_stages(t, c, o);
    look_at_latents(t, c);
}

/* --- of a run whose ranks are not seen ---------------------------------------------------------------------------- */

/* The number of the batch's tokens, or of those with a target, if the factor is that; else 0. */
static size_t tokens_of(const ari_case *c, double factor)
{
    const ari_grid *g = &c->grid;
    size_t rows = 0; /* with a gradient: of the loss's inputs, the tokens with a target */
    for (size_t row = 0; g->nd == 3 && g->d->pass == 'b' && row < g->rows; row++) {
        size_t i = row * g->cols;
        while (i < (row + 1) * g->cols && g->d->reference[i] == 0.0f)
            i++;
        rows += i < (row + 1) * g->cols;
    }
    const size_t counts[] = {c->d->batch * c->d->seq, targets_of(c), c->d->seq, rows};
    const double size = fabs(factor) < 1.0 ? 1.0 / fabs(factor) : fabs(factor);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        if (counts[i] > 8 && ari_is_near(size, (double)counts[i], ARI_SEEN))
            return counts[i];
    }
    return 0;
}

static double times_factor(const ari_hypothesis *h, const ari_run *run, size_t i)
{
    return h->factor * (double)run->ref[i];
}

/* True if ranks of the layout, micro-batches or some of both can be so many; if the layout is known. */
static bool may_be_number(const ari_case *c, int n)
{
    const int ranks = ari_ranks_along(&c->known->mesh, ARI_ALL_AXES), micro = c->facts.micro_batches;
    return ranks < 2 || n <= 2 || (micro == 0 && c->d->pipeline) || ranks * (micro > 1 ? micro : 1) % n == 0;
}

static void found_hidden(ari_trace *t, const ari_case *c, double factor, double unsure, const ari_residual *left)
{
    const size_t tokens = tokens_of(c, factor);
    char over[ARI_AXES_TEXT];
    others o;
    ari_trace_set(t, ARI_FOUND_FACTOR, 0);
    ari_explained(t, left);
    ARI_FACTS(t, {"factor", .number = factor});
    ari_name_number(t, factor, unsure, c->facts.targets);
    const int n = (int)ari_value(t, "n");
    name_fans(t, c, factor);
    t->flags |= (n == 2 && !(t->flags & ARI_IF(ROOT)) ? ARI_IF(TWICE) : 0) | (tokens > 0 ? ARI_IF(TOKENS) : 0);
    const bool may_be_micro = c->facts.micro_batches == 0 && c->d->pipeline; /* of unknown number */
    if ((ari_is_alone(c) && n != c->facts.micro_batches && !may_be_micro) || !may_be_number(c, n)) /* of no ranks */
        t->flags &= ~ARI_IF(COUNT);
    const bool telling = t->flags & (ARI_IF(COUNT) | ARI_IF(ROOT) | ARI_IF(POWER) | ARI_IF(OF_SHARDS) | ARI_IF(ONE));
    t->penalty = telling ? 0 : 7;
    name_dropped(t, c, factor);
    if (left->held < FEW && !telling) {
        ari_trace_clear(t);
        return;
    }
    look_at_others(t, &o, c, factor);
    t->flags |=
        (o.asked > 0 && o.same == o.asked ? ARI_IF(EVERYWHERE) : 0) | (o.asked > 0 && o.same == 0 ? ARI_IF(ALONE) : 0);
    ARI_FACTS(t, {"asked", .count = o.asked}, {"tokens", .count = tokens},
              {"what", .text = tokens == c->d->seq ? "tokens of a sample" : "the batch's tokens or targets"},
              {"over", .text = ari_axes_text(over, c, ari_axes_of_ranks(c, n), " or ")});
    ari_words(t, "fit", " (to within %.0e of the largest)", fmax(left->worst / (c->max_ref * fabs(factor)), 1e-9));
}

/* --- one factor, or one for each rank ----------------------------------------------------------------------------- */

static void measure_hidden(ari_trace *t, const ari_case *c)
{
    const ari_fit f = ari_fit_of(&c->survey.total);
    ari_hypothesis h = {.expect = times_factor, .c = c, .differs_only = true};
    ari_residual left;
    if (f.n < 2 || !(f.yy > 0.0) || !(f.aa > 0.0))
        return;
    const double noise = ari_fit_one(&h.factor, &f);
    if (noise <= most_noise && fabs(h.factor - 1.0) > NONE && ari_holds_all(&left, &h))
        found_hidden(t, c, h.factor, fmin(fmax(ALIKE, ari_fit_unsure(&f)), most_unsure), &left);
}

/* True if the rows that differ are neither one block nor the same ones of each of several blocks, as ranks or
 * micro-batches have, and all others are right. */
static ar_status are_some_rows(bool *are, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    size_t blocks = 0, wrong = 0;
    bool *off = NULL;
    *are = g->d->pass == 'b' && g->nd > 1;
    AR_TRY(ARI_TAKE(&off, c->arena, g->rows, g->d->name));
    for (size_t row = 0; row < g->rows && *are; row++) {
        size_t differ = 0, values = 0;
        for (size_t i = row * g->cols; i < (row + 1) * g->cols; i++) {
            differ += ari_off(c, i);
            values += g->d->reference[i] != 0.0f;
        }
        off[row] = differ > 0;
        wrong += off[row];
        blocks += off[row] && (row == 0 || !off[row - 1]);
        *are = values > 0 && (differ == 0 || 2 * differ >= values);
    }
    *are = *are && blocks > 1 && wrong < g->rows;
    for (size_t n = 2; 2 * n <= g->rows && *are; n++) {
        size_t i = g->rows / n;
        while (i < g->rows && off[i] == off[i - g->rows / n])
            i++;
        *are = g->rows % n != 0 || i < g->rows;
    }
    return AR_OK;
}

static void measure_seen(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->d;
    const bool few = c->survey.different < FEW;
    double low = INFINITY, high = -INFINITY;
    for (int r = 0; r < d->ranks; r++) {
        const ari_fit f = ari_fit_of(&c->survey.rank[r]);
        double factor;
        if (f.n == 0)
            continue;
        ari_fit_one(&factor, &f);
        if (!ari_is_multiple(c, &f) || !(fabs(factor - 1.0) > fmax(NONE, ari_fit_unsure(&f))))
            return;
        low = fmin(low, factor);
        high = fmax(high, factor);
    }
    if (ari_is_near(low, high, ARI_SUMS)) {
        others o;
        found_seen(t, c, low, few ? 0.1 * ARI_SUMS : ARI_SUMS);
        look_at_others(t, &o, c, low);
        if (few && !(t->flags & ARI_IF(NAMED)))
            ari_trace_clear(t);
    } else if (!few) {
        ARI_FINDING(t, ARI_FOUND_RANK_FACTORS, 0, {"low", .number = low}, {"high", .number = high});
    }
}

ar_status ari_measure_factor(ari_trace *t, const ari_case *c)
{
    bool rows = false;
    if (c->d->pass == 'n' && c->d->before) /* most of a weight is the weight before: the update says more */
        return AR_OK;
    if (c->d->hidden)
        measure_hidden(t, c);
    else
        measure_seen(t, c);
    if (t->kind == ARI_FOUND_FACTOR)
        AR_TRY(are_some_rows(&rows, c));
    t->flags |= rows ? ARI_IF(ROWS) : 0;
    return AR_OK;
}

double ari_value_range(double *low, double *high, const ari_case *c)
{
    double sum = 0.0;
    *low = INFINITY;
    *high = -INFINITY;
    for (ari_run run = ari_runs_of(&c->grid); ari_runs_next(&run);) {
        *low = fmin(*low, (double)run.value[0]);
        *high = fmax(*high, (double)run.value[0]);
        sum += (double)run.value[0];
    }
    return sum / c->d->ranks;
}

/* --- the loss ----------------------------------------------------------------------------------------------------- */

/* The number of ranks whose whole vocabularies would make the value, the loss being larger by the logarithm; 0: none.
 * */
static int vocabularies(const ari_case *c, double value, double ref)
{
    const ari_difference *d = c->d;
    const double unsure = d->hidden ? ARI_SUMS * (1.0 + fabs(ref)) + 0.5 * c->relative * fabs(value) : ARI_SUMS;
    const int most = d->hidden ? ARI_MOST_RANKS : d->ranks;
    for (int n = d->hidden || most < 2 ? 2 : most; n <= most; n++) {
        if (fabs(value - ref - log((double)n)) <= unsure && log1p(1.0 / n) >= 2.0 * unsure)
            return n;
    }
    return 0;
}

ar_status ari_measure_loss(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->d;
    const bool loss = c->is & ARI_IS_LOSS;
    double low, high;
    if (c->grid.count != 1 || (!d->hidden && (d->pass != 'f' || !loss)))
        return AR_OK;
    const double mean = ari_value_range(&low, &high, c), ref = (double)d->reference[0];
    const bool average = fabs(mean - ref) <= fmin(ARI_OF_A_MEAN * fabs(ref), 0.01 * (high - low));
    const int n = c->survey.disagree > 0 ? 0 : vocabularies(c, low, ref);
    const size_t targets = low == high ? targets_of(c) : 0;
    /* The count that the sum over them was divided by, if it is an integer within the rounding of both losses and that
     * is significant. */
    const double divisor = (double)targets * ref / low, unsure = 0x1p-22 * divisor;
    const bool counted = divisor > 0.5 && unsure < ARI_KNOWN && fabs(divisor - rint(divisor)) <= unsure &&
                         rint(divisor) != (double)targets;
    if (d->hidden && (!isfinite(low) || !isfinite(ref) || ref == 0.0 || ari_is_near(low / ref, 1.0, ALIKE)))
        return AR_OK;
    ARI_FINDING(t, ARI_FOUND_LOSS,
                (n > 0     ? ARI_IF(LOG)
                 : average ? ARI_IF(AVERAGE)
                           : 0) |
                    (ari_apart_over(d) & ARI_CUTS_FEATURES ? ARI_IF(OF_TP) : 0),
                {"low", .number = low}, {"high", .number = high}, {"reference", .number = ref},
                {"off", .number = low - ref}, {"percent", .number = 100.0 * (low - ref) / fabs(ref)});
    if (n > 0) {
        ARI_FACTS(t, {"n", .count = (size_t)n}, {"log", .number = log((double)n)});
    } else if (!d->hidden && counted) {
        t->flags |= ARI_IF(TOKENS);
        ARI_FACTS(t, {"targets", .count = targets}, {"divisor", .count = (size_t)rint(divisor)});
    } else if (d->hidden) {
        ari_name_number(t, low / ref, ALIKE, c->facts.targets);
        t->flags &= may_be_number(c, (int)ari_value(t, "n")) ? ~(ari_properties)0 : ~ARI_IF(COUNT);
        t->flags |= t->flags & (ARI_IF(POWER) | ARI_IF(ROOT)) || ari_value(t, "n") > 0.0 ? ARI_IF(NAMED) : 0;
        if (!loss && !(t->flags & (ARI_IF(COUNT) | ARI_IF(ROOT) | ARI_IF(POWER) | ARI_IF(ONE) | ARI_IF(FRACTION))))
            ari_trace_clear(t);
    }
    return AR_OK;
}
