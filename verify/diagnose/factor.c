/* SPDX-License-Identifier: Apache-2.0 */
/* The reference times a number: one for all that differs, or one for each rank; and the loss. */
#include <stdlib.h>

#include "verify/diagnose/case.h"
#include "verify/diagnose/roles.h"

/* --- what a factor is called -------------------------------------------------------------------------------------- */

/* What noise leaves unknown of a factor: six times its standard error, relative to it. */
static double uncertainty(const ari_sums *s)
{
    const double error = sqrt(fmax(ari_factor_left(s), 0.0) / (double)s->n / s->rr) / fabs(ari_factor_of(s));
    return fmin(fmax(2e-5, 6.0 * error), 3e-3);
}

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

void ari_name_number(ari_trace *t, double factor, double apart)
{
    const char *sign = factor < 0.0 ? "-" : "";
    const double size = fabs(factor) < 1.0 ? 1.0 / fabs(factor) : fabs(factor), power = nearbyint(log2(size));
    int p = 0, q = 0;
    t->is |= (fabs(factor) < 1.0 ? ARI_IF(INVERSE) : 0) | (factor < 0.0 ? ARI_IF(NEGATIVE) : 0);
    const char *over = t->is & ARI_IF(INVERSE) ? "1/" : "";
    if (ari_is_near(fabs(factor), 1.0, 2e-5)) {
        t->is |= ARI_IF(ONE);
        ari_words(t, "name", "%s1", sign);
        return;
    }
    if (power >= 8.0 && ari_is_near(size, exp2(power), apart)) {
        t->is |= ARI_IF(POWER);
        ari_words(t, "name", "%s2^%s%.0f", sign, t->is & ARI_IF(INVERSE) ? "-" : "", power);
        return;
    }
    for (int n = 2; n <= ARI_MOST_RANKS; n++) {
        const bool whole = ari_is_near(size, n, apart);
        if (!whole && (n > 32 || !ari_is_near(size * size, n, apart) || nearbyint(sqrt(n)) * nearbyint(sqrt(n)) == n))
            continue;
        t->is |= whole ? ARI_IF(COUNT) : ARI_IF(ROOT);
        ari_count(t, "n", (size_t)n);
        if (whole)
            ari_words(t, "name", "%s%s%d", sign, over, n);
        else
            ari_words(t, "name", "%.6g (%s%ssqrt(%d))", factor, sign, over, n);
        return;
    }
    if (is_fraction(fabs(factor), apart, &p, &q)) {
        t->is |= ARI_IF(FRACTION);
        ari_words(t, "name", "%.6g (%s%d/%d)", factor, sign, p, q);
        return;
    }
    ari_words(t, "name", "%.6g", factor);
}

/* What dropout keeps of a value, 1 - p, is the share of elements that are not zero: whether the factor is that of the
 * reference's, to four standard errors, and what differs lies anywhere, to six along every dimension. */
static void name_dropped(ari_trace *t, const ari_case *c, double factor)
{
    const ari_grid *g = &c->grid;
    size_t zeros = 0;
    for (size_t i = 0; i < g->count; i++)
        zeros += g->d->reference[i] == 0.0f;
    const double n = (double)g->count, kept = 1.0 - (double)zeros / n;
    if (!ari_is_activation(g->d) || zeros < 16 || c->survey.different * 100 < (g->count - zeros) * 99 ||
        fabs(factor - kept) > 4.0 * sqrt(kept * (1.0 - kept) / n))
        return;
    for (int dim = 0; dim < g->nd; dim++) {
        const double size = n / (double)g->shape[dim], most = 6.0 * sqrt(size * kept * (1.0 - kept)) + 4.0;
        for (size_t i = 0; i < g->shape[dim]; i++) {
            if (fabs((double)c->survey.hits[dim][i] - size * kept) > most)
                return;
        }
    }
    t->is |= ARI_IF(ZERO);
    t->less = 5;
    ari_number(t, "percent", 100.0 * (1.0 - kept));
}

/* --- by the sizes of a run whose ranks are seen ------------------------------------------------------------------- */

/* Where every dY is the same, a bias gradient over the wrong axis counts features in place of tokens. */
static bool is_features_per_token(const ari_difference *d, double factor)
{
    const double tokens = (double)d->batch * (double)d->seq;
    return d->pass == 'g' && ari_is_bias(d) && tokens > 0.0 &&
           ari_is_near(factor, (double)d->copy[0].shape[0] / tokens, 1e-5);
}

/* Of a row-parallel bias alone a factor is the tensor-parallel group's, which holds it whole: one of the data-parallel
 * or the context-parallel group would be in every gradient. */
static bool is_of_tp(const ari_difference *d)
{
    const bool row_bias = d->pass == 'g' && d->ndim == 1 && (ari_name_is(d->name) & ARI_IS_ROW_PARALLEL);
    return ari_along(d, ARI_CUTS_FEATURES) > 1 && (ari_along(d, ARI_CUTS_DATA) == 1 || row_bias);
}

/* The other axes that have as many ranks as the one whose number the factor is: ", or over tp". */
static void say_as_many(ari_trace *t, const ari_difference *d)
{
    int ranks = 0;
    ari_text text = ari_list(t, "as_many");
    for (int i = ARI_LAYOUT_DP; i < ARI_LAYOUT_AXES; i++)
        ranks = t->is & ari_of_axis(i) ? ari_along(d, ari_layout_axes[i].axes) : ranks;
    for (int i = ARI_LAYOUT_DP; i < ARI_LAYOUT_AXES && ranks > 1; i++) {
        if (ari_along(d, ari_layout_axes[i].axes) == ranks && !(t->is & ari_of_axis(i)))
            ari_say(&text, ", or the same over %s", ari_layout_axes[i].name);
    }
}

/* A number of ranks; that of tensor-parallel ones is N. */
static bool name_by_ranks(ari_trace *t, const ari_difference *d, double factor, double tolerance)
{
    for (int i = 2 * ARI_LAYOUT_DP; i < 2 * ARI_LAYOUT_AXES; i++) {
        const ari_layout_axis *axis = &ari_layout_axes[i / 2];
        const bool inverse = i % 2, tp = axis->axes == ARI_CUTS_FEATURES;
        const int n = ari_along(d, axis->axes);
        if (n == 1 || (!tp && is_of_tp(d) && ari_along(d, ARI_CUTS_FEATURES) == n) ||
            !ari_is_near(factor, inverse ? 1.0 / n : n, tolerance))
            continue;
        t->is |= ARI_IF(NAMED) | ari_of_axis(i / 2) | (inverse ? ARI_IF(INVERSE) : 0);
        ari_words(t, "name", "%.6g = %s%s", factor, inverse ? "1/" : "", tp ? "N" : axis->name);
        say_as_many(t, d);
        return true;
    }
    return false;
}

static bool name_by_sizes(ari_trace *t, const ari_difference *d, double factor, double tolerance)
{
    const double n = ari_along(d, ARI_CUTS_FEATURES), b = (double)d->batch, micro = d->micro_batches;
    const double tokens = d->seq > 1 ? b * (double)(d->seq - 1) : 0.0;
    const struct {
        double value;
        const char *text;
        ari_properties is;
    } known[] = {
        {micro > 1 ? 1 / micro : 0, "1/m", ARI_IF(OF_MICRO) | ARI_IF(INVERSE)},
        {2, "2", ARI_IF(TWICE)},
        {0.5, "1/2", ARI_IF(TWICE) | ARI_IF(INVERSE)},
        {-1, "-1", ARI_IF(ONE) | ARI_IF(NEGATIVE)},
        {n > 2 ? sqrt(n) : 0, "the square root of N", 0},
        {n > 2 ? n * n : 0, "N^2", 0},
        {n > 2 ? 1 / (n * n) : 0, "1/N^2", 0},
        {b > 1 ? b : 0, "the batch", 0},
        {b > 1 ? 1 / b : 0, "1/batch", 0},
        {tokens, "T, the number of targets", 0},
        {tokens > 0 ? 1 / tokens : 0, "1/T, of the number of targets", 0},
    };
    if (name_by_ranks(t, d, factor, tolerance))
        return true;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (known[i].value == 0.0 || !ari_is_near(factor, known[i].value, tolerance))
            continue;
        t->is |= ARI_IF(NAMED) | known[i].is;
        ari_words(t, "name", "%.6g = %s", factor, known[i].text);
        say_as_many(t, d);
        return true;
    }
    ari_words(t, "name", "%.6g", factor);
    return false;
}

/* sqrt((fan_in + fan_out) / (the shard's)): Xavier's scale from the shard's sizes; 0 if this is not such a tensor. */
static double shard_scale(const ari_difference *d, const size_t *local)
{
    if (d->pass != 'i' || d->ndim != 2 || local[0] + local[1] == 0)
        return 0.0;
    return sqrt(((double)d->shape[0] + (double)d->shape[1]) / ((double)local[0] + (double)local[1]));
}

static void found_seen(ari_trace *t, const ari_case *c, int rank, double factor, double tolerance)
{
    const ari_difference *d = c->grid.d;
    const size_t *local = d->copy[rank].shape;
    const double scale = shard_scale(d, local);
    ari_found(t, ARI_FOUND_FACTOR, 0);
    ari_number(t, "factor", factor);
    ari_list(t, "fit");
    t->less = name_by_sizes(t, d, factor, tolerance) || d->pass == 'i' ? 5 : 15;
    name_dropped(t, c, factor);
    if (is_features_per_token(d, factor)) {
        t->is |= ARI_IF(FEATURES);
        ari_count(t, "features", local[0]);
        ari_count(t, "tokens", d->batch * d->seq);
    } else if (scale > 1.0 && ari_is_near(factor, scale, 1e-5)) {
        t->is |= ARI_IF(OF_SHARDS);
        ari_words(t, "fans", "sqrt((%zu + %zu) / (%zu + %zu))", d->shape[0], d->shape[1], local[0], local[1]);
    } else if (d->pass == 'i' && d->ranks > 1 && ari_is_near(factor, sqrt((double)d->ranks), 1e-5)) {
        t->is |= ARI_IF(ROOT);
    }
}

/* --- the same in other tensors of the dumps ----------------------------------------------------------------------- */

enum { TENSORS_ASKED = 12, ELEMENTS_ASKED = 512 };

/* Whether this factor takes the reference's first elements of another tensor to the other's: 1, 0, or -1 where they
 * say nothing. */
static int factor_in(const ar_dump_tensor *r, const ar_dump_tensor *v, double factor)
{
    float a[ELEMENTS_ASKED], b[ELEMENTS_ASKED];
    const size_t n = r->count < ELEMENTS_ASKED ? r->count : ELEMENTS_ASKED, from = (r->count - n) / 2;
    ari_sums s = {0};
    if (ar_dump_read_f32(r, from, n, a) != AR_OK || ar_dump_read_f32(v, from, n, b) != AR_OK)
        return -1;
    for (size_t i = 0; i < n; i++)
        ari_sums_add(&s, (double)b[i], (double)a[i]);
    if (!(s.rr > 0.0) || !(s.vv > 0.0))
        return -1;
    return ari_is_near(ari_factor_of(&s), factor, 1e-4) && ari_factor_left(&s) <= 1e-6 * s.vv;
}

/* Of other tensors of the same pass: how many have the factor too, of how many asked. */
static void ask_others(const ari_case *c, double factor, size_t *same, size_t *asked)
{
    const ar_dump *r = c->known->reference, *v = c->known->other;
    *same = *asked = 0;
    const size_t all = r && v ? ar_dump_count(r) : 0, step = all / TENSORS_ASKED + 1;
    for (size_t i = 0; i < all && *asked < TENSORS_ASKED; i += step) {
        const ar_dump_tensor *a = ar_dump_at(r, i), *b = a ? ar_dump_find(v, a->name) : NULL;
        if (!b || a == c->full || a->count != b->count || a->count < 8 ||
            ari_order_of(a->name, c->path).pass != c->grid.d->pass)
            continue;
        const int answer = factor_in(a, b, factor);
        *same += answer == 1;
        *asked += answer >= 0;
    }
}

/* --- a factor of each stage of a pipeline ------------------------------------------------------------------------- */

enum { MOST_LAYERS = 512, LEVELS_SAID = 6 };

/* Adds what gradients of a layer say of the factor that takes the reference's to these. */
static bool add_layer(ari_sums *layers, const ari_case *c, const ar_dump_tensor *v)
{
    float a[ELEMENTS_ASKED], b[ELEMENTS_ASKED];
    const ari_order_key key = ari_order_of(v->name, c->path);
    const ar_dump_tensor *r = ar_dump_find(c->known->reference, v->name);
    const size_t layer = (size_t)labs(key.layer); /* which run from the last to the first */
    if (key.pass != 'g' || key.step != c->grid.d->step || layer >= MOST_LAYERS ||
        ari_section_of(ari_module_of(v->name, key.stem).role) != ARI_IN_BLOCKS)
        return true;
    const size_t n = v->count < ELEMENTS_ASKED ? v->count : ELEMENTS_ASKED, from = (v->count - n) / 2;
    if (!r || r->count != v->count || ar_dump_read_f32(r, from, n, a) != AR_OK ||
        ar_dump_read_f32(v, from, n, b) != AR_OK)
        return false;
    layers[layer].n += n;
    for (size_t i = 0; i < n; i++)
        ari_sums_add(&layers[layer], (double)b[i], (double)a[i]);
    return true;
}

/* The factor of each layer's gradients, from the last layer to the first; 0: they are no multiples of the
 * reference's. */
static size_t factors_of_layers(double *factor, const ari_case *c)
{
    const ar_dump *other = c->known->other ? c->known->other : c->grid.d->gradients_here;
    ari_sums layers[MOST_LAYERS] = {{0}};
    size_t n = 0;
    for (size_t i = 0; other && c->known->reference && i < ar_dump_count(other); i++) {
        if (!add_layer(layers, c, ar_dump_at(other, i)))
            return 0;
    }
    for (size_t layer = MOST_LAYERS; layer-- > 0;) {
        const ari_sums *s = &layers[layer];
        if (s->n == 0 && n == 0)
            continue;
        if (!(s->rr > 0.0) || !(s->vv > 0.0) || !(ari_factor_left(s) <= 1e-6 * s->vv))
            return 0;
        factor[n++] = ari_factor_of(s);
    }
    return n;
}

/* Runs of layers with one factor, the last layers first: where there are several, stages multiply the gradient that
 * they pass on; by one number each time, where the runs' factors are geometric. */
static void look_at_stages(ari_trace *t, const ari_case *c)
{
    double factor[MOST_LAYERS], ratio = 0.0, before = 0.0;
    const size_t n = factors_of_layers(factor, c);
    size_t levels = 0;
    bool steady = true;
    ari_text text = ari_list(t, "levels");
    for (size_t i = 0, end; i < n; i = end) {
        end = i + 1;
        while (end < n && ari_is_near(factor[end], factor[i], 1e-4))
            end++;
        if (levels == 1)
            ratio = factor[i] / before;
        steady = steady && (levels == 0 || ari_is_near(factor[i] / before, ratio, 1e-3));
        before = factor[i];
        if (++levels > LEVELS_SAID)
            continue;
        ari_say(&text, "%s%zu", levels > 1 ? ", " : "", n - end);
        if (end - i > 1)
            ari_say(&text, " to %zu", n - 1 - i);
        ari_say(&text, " times %.4g", factor[i]);
    }
    if (levels < 2 || (!c->grid.d->pipeline && !(c->grid.d->hidden && steady && levels > 2)))
        return;
    ari_number(t, "ratio", ratio);
    t->is |= ARI_IF(STAGES) | (steady && levels > 2 ? ARI_IF(ALL) : 0);
}

/* --- of a run whose ranks are not seen ---------------------------------------------------------------------------- */

/* Whether the factor is the number of the batch's tokens, or of those that have a target; 0: neither. */
static size_t tokens_of(const ari_case *c, double factor)
{
    const ari_difference *d = c->grid.d;
    const size_t counts[] = {d->batch * d->seq, d->seq > 1 ? d->batch * (d->seq - 1) : 0, d->seq};
    const double size = fabs(factor) < 1.0 ? 1.0 / fabs(factor) : fabs(factor);
    for (size_t i = 0; i < 3; i++) {
        if (counts[i] > 8 && ari_is_near(size, (double)counts[i], 1e-4))
            return counts[i];
    }
    return 0;
}

/* Of initial values: Xavier's scale from a shard's sizes; the number of shards, 0: it is not. */
static int fan_shards(const ari_case *c, double factor)
{
    const ari_difference *d = c->grid.d;
    if (d->ndim != 2 || ari_is_activation(d) || d->pass == 'g')
        return 0;
    for (int n = 2; n <= ARI_MOST_RANKS; n++) {
        const double a = (double)d->shape[0], b = (double)d->shape[1], square = factor * factor;
        if (ari_is_near(square, (a + b) / (a / n + b), 2e-5) || ari_is_near(square, (a + b) / (a + b / n), 2e-5))
            return n;
    }
    return 0;
}

/* The largest |value - factor*reference| over what differs; infinity where it does not hold. */
static double worst_left(const ari_case *c, double factor)
{
    const double beside = c->absolute * fmax(1.0, fabs(factor));
    double worst = 0.0;
    for (size_t i = 0; i < c->count; i++) {
        if (!ari_off(c, i))
            continue;
        const double expected = factor * (double)c->ref[i], left = fabs((double)c->val[i] - expected);
        if (!(left <= beside + (c->relative + 0x1p-21) * fabs(expected)))
            return INFINITY;
        worst = left > worst ? left : worst;
    }
    return worst;
}

/* The axes that may have n ranks, as far as they are known; what all tensors have is not tp's. */
static ari_axes axes_of(const ari_case *c, int n, bool everywhere)
{
    const ari_axes kinds[] = {ARI_CUTS_FEATURES, ARI_CUTS_POSITIONS, ARI_CUTS_SAMPLES};
    ari_axes has = 0;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        has |= ari_ranks_along(&c->known->mesh, kinds[i]) == n ? kinds[i] : 0;
    const ari_axes others = has & ~(ari_axes)ARI_CUTS_FEATURES;
    if (others == ARI_CUTS_POSITIONS && (others == has || everywhere))
        return ARI_CUTS_POSITIONS;
    if (others == has && (others & ARI_CUTS_SAMPLES || everywhere))
        return ARI_CUTS_SAMPLES;
    return has == ARI_CUTS_FEATURES      ? has
           : others & ARI_CUTS_POSITIONS ? ARI_CUTS_FEATURES | ARI_CUTS_DATA
                                         : ARI_CUTS_FEATURES | ARI_CUTS_SAMPLES;
}

static void found_hidden(ari_trace *t, const ari_case *c, const ari_sums *s)
{
    const double factor = ari_factor_of(s), worst = worst_left(c, factor);
    const size_t tokens = tokens_of(c, factor);
    size_t same = 0, asked = 0;
    char over[ARI_AXES_TEXT];
    if (!isfinite(worst) || s->n < 2)
        return;
    ari_found(t, ARI_FOUND_FACTOR, 0);
    ari_number(t, "factor", factor);
    ari_name_number(t, factor, uncertainty(s));
    const int n = (int)ari_value(t, "n"), shards = fan_shards(c, factor);
    const ari_ranks *mesh = &c->known->mesh;
    if (mesh->along[ARI_AXIS_TP] == 1 && mesh->along[ARI_AXIS_DP] == 1 &&
        ari_ranks_along(mesh, ARI_CUTS_POSITIONS) <= 1 && n != c->facts.micro_batches) /* of no ranks */
        t->is &= ~ARI_IF(COUNT);
    t->is |= (shards ? ARI_IF(OF_SHARDS) : 0) | (n == 2 && !(t->is & ARI_IF(ROOT)) ? ARI_IF(TWICE) : 0);
    ari_words(t, "fans", "the root of a ratio for one of %d shards", shards);
    const bool telling =
        (t->is & (ARI_IF(COUNT) | ARI_IF(ROOT) | ARI_IF(POWER) | ARI_IF(OF_SHARDS))) || ari_is_near(factor, -1.0, 2e-5);
    t->less = telling ? 0 : 7;
    name_dropped(t, c, factor);
    if (s->n < 4 && !telling) {
        ari_lost(t);
        return;
    }
    ask_others(c, factor, &same, &asked);
    t->is |= (asked > 0 && same == asked ? ARI_IF(EVERYWHERE) : 0) | (asked > 0 && same == 0 ? ARI_IF(ALONE) : 0) |
             (tokens > 0 ? ARI_IF(TOKENS) : 0);
    ari_count(t, "asked", asked);
    ari_count(t, "tokens", tokens);
    ari_words(t, "what", "%s", tokens == c->grid.d->seq ? "tokens of a sample" : "the batch's tokens or targets");
    ari_words(t, "over", "%s", ari_axes_text(over, axes_of(c, n, t->is & ARI_IF(EVERYWHERE)), " or "));
    ari_words(t, "fit", " (to within %.0e of the largest)", fmax(worst / (c->max_ref * fabs(factor)), 1e-9));
}

/* --- one factor, or one for each rank ----------------------------------------------------------------------------- */

static ari_sums sums_of_tally(const ari_tally *a)
{
    return (ari_sums){a->vr, a->rr, a->vv, a->different};
}

static void measure_hidden(ari_trace *t, const ari_case *c)
{
    const ari_sums s = sums_of_tally(&c->survey.total);
    const double factor = ari_factor_of(&s), left = ari_factor_left(&s);
    if (c->count < 2 || !(s.vv > 0.0) || !(s.rr > 0.0) || !(fabs(factor - 1.0) > 1e-4) || !(fabs(factor) > 1e-9) ||
        !(left <= fmax(1e-4 * s.vv, fmin(0.01 * s.vv, (double)s.n * c->absolute * c->absolute))))
        return;
    found_hidden(t, c, &s);
}

ar_status ari_measure_factor(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    const bool few =
        c->survey.different < 4; /* of one to three values any ratio is constant: only a telling one counts */
    double low = INFINITY, high = -INFINITY;
    int rank = -1;
    if (d->pass == 'n' && d->before) /* most of a weight is the weight before: the update says more */
        return AR_OK;
    if (d->hidden) {
        measure_hidden(t, c);
        if (t->kind == ARI_FOUND_FACTOR && strchr("bg", d->pass))
            look_at_stages(t, c);
        return AR_OK;
    }
    for (int r = 0; r < d->ranks; r++) {
        const ari_sums s = sums_of_tally(&c->survey.rank[r]);
        if (s.n == 0)
            continue;
        const double factor = ari_factor_of(&s);
        if (!(fabs(factor) > 1e-6 && fabs(factor - 1.0) > 1e-4 && ari_factor_left(&s) <= 1e-10 * s.vv))
            return AR_OK;
        low = fmin(low, factor);
        high = fmax(high, factor);
        rank = rank < 0 ? r : rank;
    }
    if (ari_is_near(low, high, 1e-5)) {
        found_seen(t, c, rank, low, few ? 1e-6 : 1e-5);
        if (few && !(t->is & ARI_IF(NAMED)))
            ari_lost(t);
        else if (strchr("bg", d->pass))
            look_at_stages(t, c);
    } else if (!few) {
        ari_found(t, ARI_FOUND_RANK_FACTORS, 0);
        ari_number(t, "low", low);
        ari_number(t, "high", high);
    }
    return AR_OK;
}

void ari_value_range(double *low, double *high, const ari_case *c)
{
    ari_runs it = ari_runs_of(&c->grid);
    ari_run run;
    *low = INFINITY;
    *high = -INFINITY;
    while (ari_runs_next(&it, &run)) {
        *low = fmin(*low, (double)run.value[0]);
        *high = fmax(*high, (double)run.value[0]);
    }
}

/* --- the loss ----------------------------------------------------------------------------------------------------- */

/* How many ranks' whole vocabularies would make the value: the loss is larger by the logarithm; 0: none. */
static int vocabularies(const ari_case *c, double value, double ref)
{
    const ari_difference *d = c->grid.d;
    for (int n = d->hidden ? 2 : d->ranks; n <= (d->hidden ? ARI_MOST_RANKS : d->ranks); n++) {
        const double unsure = d->hidden ? 1e-5 * (1.0 + fabs(ref)) + 0.5 * c->relative * fabs(value) : 1e-5;
        if (n > 1 && fabs(value - ref - log((double)n)) <= unsure && log1p(1.0 / n) >= 2.0 * unsure)
            return n;
    }
    return 0;
}

/* The count that the sum over `targets` was divided by, if it is an integer but for the rounding of both losses, and
 * such an integer says something; 0: it is not. */
static size_t count_of_loss(size_t targets, double value, double ref)
{
    const double n = (double)targets * ref / value, unsure = 0x1p-22 * n;
    const bool whole = n > 0.5 && unsure < 1e-3 && fabs(n - rint(n)) <= unsure;
    return whole && rint(n) != (double)targets ? (size_t)rint(n) : 0;
}

ar_status ari_measure_loss(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    const bool loss = ari_name_is(d->name) & ARI_IS_LOSS;
    double low, high;
    if (c->grid.count != 1 || c->survey.total.nan > 0 || (!d->hidden && (d->pass != 'f' || !loss)))
        return AR_OK;
    ari_value_range(&low, &high, c);
    const double ref = (double)d->reference[0];
    const int n = c->survey.disagree > 0 ? 0 : vocabularies(c, low, ref);
    const size_t targets = low == high && d->seq > 1 ? d->batch * (d->seq - 1) : 0;
    const size_t count = count_of_loss(targets, low, ref);
    if (d->hidden && (!isfinite(low) || !isfinite(ref) || ref == 0.0 || ari_is_near(low / ref, 1.0, 2e-5)))
        return AR_OK;
    ari_found(t, ARI_FOUND_LOSS, n > 0 ? ARI_IF(LOG) : 0);
    ari_number(t, "low", low);
    ari_number(t, "high", high);
    ari_number(t, "reference", ref);
    ari_number(t, "off", low - ref);
    ari_number(t, "percent", 100.0 * (low - ref) / fabs(ref));
    if (n > 0) {
        ari_count(t, "n", (size_t)n);
        ari_number(t, "log", log((double)n));
    } else if (!d->hidden && count > 0) {
        t->is |= ARI_IF(TOKENS);
        ari_count(t, "targets", targets);
        ari_count(t, "divisor", count);
    } else if (d->hidden) {
        ari_name_number(t, low / ref, 2e-5);
        t->is |= t->is & (ARI_IF(POWER) | ARI_IF(ROOT)) ? ARI_IF(NAMED) : 0;
        if (!loss && !(t->is & (ARI_IF(COUNT) | ARI_IF(ROOT) | ARI_IF(POWER) | ARI_IF(ONE) | ARI_IF(FRACTION))))
            ari_lost(t);
    }
    return AR_OK;
}
