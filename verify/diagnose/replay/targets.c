/* SPDX-License-Identifier: Apache-2.0 */
/* The loss computed again from the logits: which tokens are targets, of which logits, by how many it is divided, and what
 * label smoothing e and z-loss c it has (anyrank/batch.h, ar_loss_options). */
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/replay/replay.h"

/* One dump's side of the loss. The cross-entropy of token i against id j is lse[i] less its logit of j. */
typedef struct side {
    float *logits; /* [samples, seq, vocabulary] */
    double *lse;   /* [samples, seq] */
    bool *counts;  /* [samples, seq]: the loss depends on this token's logits */
    bool of_dump;  /* a dump says so; else it is all tokens but each sample's last */
    size_t targets;
    double value; /* the loss */
    /* What e and c are here, and what they may be off by. */
    struct options {
        bool known;
        double smoothing, z, smoothing_unsure, z_unsure;
    } options;
} side;

typedef struct losses {
    const ari_case *c;
    size_t samples, seq, vocabulary, tokens;
    size_t *ids; /* [samples, seq] */
    side of[2];  /* the reference, the other */
} losses;

enum { MOST_LOGITS = 1 << 24 };

static const ar_dump_tensor *find_any(const ari_case *c, const ar_dump *dump, char pass)
{
    static const ari_role roles[] = {ARI_LOGITS, ARI_HEAD_LOGITS, ARI_HEAD, ARI_FINAL_NORM};
    const ar_dump_tensor *t = NULL;
    for (size_t i = 0; i < (pass == 'f' ? 3 : 4) && !t; i++)
        t = ari_replay_value(c, dump, roles[i], pass);
    return t && t->ndim == 3 ? t : NULL;
}

/* A token that is no target leaves no gradient. */
static ar_status read_counts(side *s, const losses *l, const ar_dump *dump)
{
    const ar_dump_tensor *t = find_any(l->c, dump, 'b');
    const bool held = t && t->shape[0] == l->samples && t->shape[1] == l->seq && t->shape[2] > 0;
    float *row = NULL;
    ar_status st = AR_OK;
    AR_TRY(ARI_ALLOC_ZERO(&s->counts, l->tokens, "targets"));
    AR_TRY(ARI_ALLOC(&row, held ? t->shape[2] : 1, "targets"));
    s->of_dump = held;
    for (size_t i = 0; i < l->tokens; i++) {
        s->counts[i] = !held && i % l->seq + 1 < l->seq;
        if (held)
            AR_TRY_TO(done, st, ar_dump_read_f32(t, i * t->shape[2], t->shape[2], row));
        for (size_t k = 0; held && k < t->shape[2]; k++)
            s->counts[i] = s->counts[i] || row[k] != 0.0f;
        s->targets += s->counts[i];
    }
done:
    free(row);
    return st;
}

static ar_status read_side(side *s, bool *held, losses *l, const ar_dump *dump)
{
    const ar_dump_tensor *t = find_any(l->c, dump, 'f');
    *held = t && t->count > 0 && t->count <= MOST_LOGITS && t->shape[1] > 1 &&
            (l->tokens == 0 || (t->shape[0] == l->samples && t->shape[1] == l->seq && t->shape[2] == l->vocabulary));
    if (!*held)
        return AR_OK;
    l->samples = t->shape[0], l->seq = t->shape[1], l->vocabulary = t->shape[2];
    l->tokens = l->samples * l->seq;
    AR_TRY(ARI_ALLOC(&s->logits, t->count, t->name));
    AR_TRY(ARI_ALLOC(&s->lse, l->tokens, t->name));
    AR_TRY(ar_dump_read_f32(t, 0, t->count, s->logits));
    for (size_t i = 0; i < l->tokens; i++) {
        const float *row = s->logits + i * l->vocabulary;
        /* In float: gcc 12 for aarch64 fails internally at a largest double of widened floats. */
        float top = -HUGE_VALF;
        double sum = 0.0;
        for (size_t k = 0; k < l->vocabulary; k++)
            top = fmaxf(top, row[k]);
        for (size_t k = 0; k < l->vocabulary; k++)
            sum += exp((double)row[k] - (double)top);
        s->lse[i] = (double)top + log(sum);
    }
    return read_counts(s, l, dump);
}

static double entropy(const losses *l, const side *s, size_t token, size_t id)
{
    return s->lse[token] - (double)s->logits[token * l->vocabulary + id];
}

/* The sum over tokens that count on a side whose target, `shift` tokens on, is in their sample; *n of them. */
static double sum_of(const losses *l, const side *s, long shift, size_t *n)
{
    double sum = 0.0;
    *n = 0;
    for (size_t i = 0; i < l->tokens; i++) {
        const long to = (long)(i % l->seq) + shift;
        if (!s->counts[i] || to < 0 || to >= (long)l->seq)
            continue;
        sum += entropy(l, s, i, l->ids[(long)i + shift]);
        ++*n;
    }
    return sum;
}

/* Whether a sum over targets gives the loss, divided by their number or that of the reference. */
static bool gives(const losses *l, const side *s, double sum, size_t n)
{
    const double unsure = 2e-5 + 0.1 * l->c->relative;
    return n > 0 && (ari_is_near(s->value, sum / (double)n, unsure) ||
                     ari_is_near(s->value, sum / (double)l->of[0].targets, unsure));
}

/* Tokens that count on the other side alone, and the other way round. */
static size_t gained(const losses *l, int of)
{
    size_t n = 0;
    for (size_t i = 0; i < l->tokens; i++)
        n += l->of[of].counts[i] && !l->of[!of].counts[i];
    return n;
}

/* The sum is the reference's and its divisor another whole number, but for those that say something else: the number
 * of ranks or micro-batches. */
static void find_count(ari_trace *t, const losses *l, double sum)
{
    const double n = sum / l->of[1].value, whole = nearbyint(n), own = (double)l->of[0].targets;
    const double ratio = whole > own ? whole / own : own / whole, unsure = 2e-6 * n;
    if (!(whole >= 1.0 && whole <= 4.0 * (double)l->tokens && fabs(n - whole) <= unsure && unsure < 0.05) ||
        ratio == nearbyint(ratio))
        return;
    ari_found(t, ARI_FOUND_TARGETS, ARI_IF(COUNT));
    ari_count(t, "n", (size_t)whole);
    ari_words(t, "which", "%s",
              (size_t)whole == l->tokens                                ? ", the number of all tokens"
              : (size_t)whole == l->tokens - l->samples                 ? ", ignored labels counted too"
              : whole == own + 1.0 || whole == own + (double)l->samples ? ", one too many"
                                                                        : "");
}

/* --- labels shifted after the cut --------------------------------------------------------------------------------- */

/* The next position among those of a rank that has one of n chunks, or (zigzag) the r-th from either end; seq: none. */
static size_t next_of_rank(size_t at, size_t seq, size_t n, bool zigzag)
{
    const size_t size = seq / n, chunk = at / size;
    if ((at + 1) % size != 0)
        return at + 1;
    return zigzag && chunk < n / 2 ? (n - 1 - chunk) * size : seq;
}

/* The sum over targets of labels that each rank has shifted among its own positions; *n of them. `every`: also the last
 * token of a packed document has one. *cut: whether a target of the reference has another label, or none. */
static double sum_of_chunks(const losses *l, const side *s, size_t n_chunks, bool zigzag, bool every, size_t *n,
                            bool *cut)
{
    double sum = 0.0;
    *n = 0;
    *cut = false;
    for (size_t i = 0; i < l->tokens; i++) {
        const size_t at = i % l->seq, next = next_of_rank(at, l->seq, n_chunks, zigzag);
        *cut = *cut || (l->of[0].counts[i] && next != at + 1);
        if ((!s->counts[i] && !every) || next >= l->seq)
            continue;
        sum += entropy(l, s, i, l->ids[i - at + next]);
        ++*n;
    }
    return sum;
}

/* The loss of labels shifted after the cut, within documents or over their ends. No run has more chunks than ranks. */
static void find_chunks(ari_trace *t, const losses *l, const side *s)
{
    const size_t known = (size_t)ari_ranks_along(&l->c->known->mesh, ARI_ALL_AXES & ~(ari_axes)ARI_CUTS_LAYERS);
    for (size_t n = 2; n <= 2 * (size_t)ARI_MOST_RANKS && n < l->seq; n++) {
        const size_t forms = l->seq % n != 0 ? 0 : n >= 4 && n % 2 == 0 ? 4 : 2;
        for (size_t form = 0; form < forms; form++) {
            const bool zigzag = form >= 2, every = form % 2 == 1;
            if (known > 0 && known % (zigzag ? n / 2 : n) != 0)
                continue;
            size_t targets;
            bool cut;
            const double sum = sum_of_chunks(l, s, n, zigzag, every, &targets, &cut);
            if (!cut || !gives(l, &l->of[1], sum, targets))
                continue;
            ari_found(t, ARI_FOUND_TARGETS, ARI_IF(SHIFT) | ARI_IF(BLOCKS));
            ari_count(t, "ranks", zigzag ? n / 2 : n);
            ari_count(t, "targets", l->of[0].targets);
            ari_words(t, "order", zigzag ? ", the r-th chunk from either end each" : "");
            return;
        }
    }
}

/* --- one micro-batch alone ---------------------------------------------------------------------------------------- */

/* The sum over targets of samples [from, to) of every `group` of them. */
static double sum_of_samples(const losses *l, const side *s, size_t group, size_t from, size_t to)
{
    double sum = 0.0;
    for (size_t i = 0; i + 1 < l->tokens; i++) {
        const size_t sample = i / l->seq % group;
        if (s->counts[i] && (i + 1) % l->seq != 0 && sample >= from && sample < to)
            sum += entropy(l, s, i, l->ids[i + 1]);
    }
    return sum;
}

/* The terms of the first or the last samples of each data-parallel rank alone, divided by all targets. */
static void find_micro_batch(ari_trace *t, const losses *l, const side *s)
{
    const size_t dp = l->c->facts.dp > 1 ? (size_t)l->c->facts.dp : 1, group = l->samples / dp;
    const double all = l->of[1].value * (double)l->of[0].targets, unsure = 2e-6 + 0.1 * l->c->relative;
    for (size_t k = 1; k < group && l->samples % dp == 0; k++) {
        const bool last = ari_is_near(all, sum_of_samples(l, s, group, group - k, group), unsure);
        if (!last && !ari_is_near(all, sum_of_samples(l, s, group, 0, k), unsure))
            continue;
        ari_found(t, ARI_FOUND_TARGETS, ARI_IF(SAMPLES));
        ari_words(t, "which", last ? "last" : "first");
        ari_count(t, "n", k);
        ari_count(t, "of", group);
        ari_count(t, "targets", l->of[0].targets);
        return;
    }
}

/* --- label smoothing and z-loss ----------------------------------------------------------------------------------- */

/* Sums over a gradient d of logits, of which a target token's row is, with p = softmax(z) and 1 at y,
 *
 *     d = s (p - 1_y) + s e (1_y - 1/V) + s c 2 lse p,    s = 1/T,
 *
 * so that the row adds up to 2 s c lse. `of_sums`: the rows' sums against their lse. The others are what is left of d
 * without its last term, against the first two. */
typedef struct fit {
    struct {
        double ll, ld, dd;
    } of_sums;
    double pp, pq, qq, pd, qd, dd; /* q = 1_y - 1/V */
    size_t rows, cells;
} fit;

static size_t target_of(const float *d, size_t n)
{
    size_t y = 0;
    for (size_t k = 1; k < n; k++)
        y = d[k] < d[y] ? k : y;
    return y; /* the one logit that a step is to raise */
}

static void add_row(fit *f, const losses *l, const side *s, size_t token, const float *d, double sc)
{
    const size_t n = l->vocabulary, y = target_of(d, n);
    for (size_t k = 0; k < n; k++) {
        const double p = exp((double)s->logits[token * n + k] - s->lse[token]), one = k == y ? 1.0 : 0.0;
        const double left = (double)d[k] - sc * 2.0 * s->lse[token] * p, a = p - one, b = one - 1.0 / (double)n;
        f->pp += a * a, f->pq += a * b, f->qq += b * b;
        f->pd += a * left, f->qd += b * left, f->dd += left * left;
    }
    f->cells += n;
}

static void add_sum(fit *f, const losses *l, const side *s, size_t token, const float *d)
{
    double sum = 0.0;
    for (size_t k = 0; k < l->vocabulary; k++)
        sum += (double)d[k];
    f->of_sums.ll += s->lse[token] * s->lse[token];
    f->of_sums.ld += s->lse[token] * sum;
    f->of_sums.dd += sum * sum;
    f->rows++;
}

/* e and c from the sums; unknown where the gradient is not of this form to 1 %, as with other scales of rows. */
static void solve(struct options *o, const fit *f, double sc)
{
    const double det = f->pp * f->qq - f->pq * f->pq;
    const double s = (f->qq * f->pd - f->pq * f->qd) / det, se = (f->pp * f->qd - f->pq * f->pd) / det;
    const double left = fmax(f->dd - s * f->pd - se * f->qd, 0.0);
    const double sums_left = fmax(f->of_sums.dd - 2.0 * sc * f->of_sums.ld, 0.0);
    enum { SURE = 10 }; /* standard errors */
    o->known = f->rows > 1 && det > 0.0 && s > 0.0 && left <= 1e-4 * f->dd;
    if (!o->known)
        return;
    o->smoothing = se / s;
    o->z = sc / s;
    o->smoothing_unsure = SURE * sqrt(left / (double)f->cells * f->pp / det) / s + 1e-5;
    o->z_unsure = SURE * sqrt(sums_left / (double)f->rows / (4.0 * f->of_sums.ll)) / s + 1e-8;
}

static const ar_dump_tensor *logits_gradient(const losses *l, const ar_dump *dump)
{
    const ar_dump_tensor *t = find_any(l->c, dump, 'b');
    return t && t->shape[0] == l->samples && t->shape[1] == l->seq && t->shape[2] == l->vocabulary ? t : NULL;
}

static ar_status fit_gradient(side *s, const losses *l, const ar_dump *dump)
{
    const ar_dump_tensor *t = logits_gradient(l, dump);
    fit f = {.rows = 0};
    float *d = NULL;
    ar_status st = AR_OK;
    if (!t)
        return AR_OK;
    AR_TRY(ARI_ALLOC(&d, t->count, t->name));
    AR_TRY_TO(done, st, ar_dump_read_f32(t, 0, t->count, d));
    for (size_t i = 0; i < l->tokens; i++) {
        if (s->counts[i])
            add_sum(&f, l, s, i, d + i * l->vocabulary);
    }
    const double sc = f.of_sums.ll > 0.0 ? f.of_sums.ld / (2.0 * f.of_sums.ll) : 0.0;
    for (size_t i = 0; i < l->tokens; i++) {
        if (s->counts[i])
            add_row(&f, l, s, i, d + i * l->vocabulary, sc);
    }
    solve(&s->options, &f, sc);
done:
    free(d);
    return st;
}

/* A number that someone would write, 0, 0.1, 0.15, 5e-4, within what this one may be off by; false: there is none, or
 * there may well be one by accident. */
static bool settle(double *x, double unsure)
{
    if (fabs(*x) <= unsure) {
        *x = 0.0;
        return true;
    }
    const double step = 0.5 * pow(10.0, floor(log10(fabs(*x) + unsure))), near = step * nearbyint(*x / step);
    const bool is = fabs(*x - near) <= unsure && unsure <= 0.04 * step;
    *x = is ? near : *x;
    return is;
}

/* What smoothing and z-loss add to the mean of the cross-entropies, for 1 of each. */
static void terms_of(const losses *l, const side *s, double *smoothing, double *z)
{
    *smoothing = *z = 0.0;
    for (size_t i = 0; i < l->tokens; i++) {
        double mean = 0.0;
        for (size_t k = 0; s->counts[i] && k < l->vocabulary; k++)
            mean += (double)s->logits[i * l->vocabulary + k] / (double)l->vocabulary;
        if (!s->counts[i])
            continue;
        *smoothing += ((double)s->logits[i * l->vocabulary + l->ids[i + 1]] - mean) / (double)s->targets;
        *z += s->lse[i] * s->lse[i] / (double)s->targets;
    }
}

/* From the loss alone, which is one number for two unknowns: the one that then is what someone would write, if the other
 * is not. With a gradient: whether the loss is what its e and c make of it. */
static void fit_value(side *s, const losses *l)
{
    struct options *o = &s->options;
    size_t n;
    double per_smoothing, per_z;
    const double unsure = (2e-6 + 0.1 * l->c->relative) * fabs(s->value), sum = sum_of(l, s, 1, &n);
    if (n == 0 || n != s->targets) {
        o->known = false;
        return;
    }
    terms_of(l, s, &per_smoothing, &per_z);
    const double more = s->value - sum / (double)n;
    if (o->known) {
        const double off = o->smoothing_unsure * fabs(per_smoothing) + o->z_unsure * per_z;
        o->known = fabs(more - o->smoothing * per_smoothing - o->z * per_z) <= 10.0 * unsure + off;
        return;
    }
    double e = more / per_smoothing, c = more / per_z;
    const bool smoothed = settle(&e, unsure / fabs(per_smoothing)) && e >= 0.0 && e < 1.0;
    const bool z = settle(&c, unsure / per_z) && c >= 0.0 && c < 1.0;
    const bool plain = fabs(more) <= unsure;
    o->known = plain || smoothed != z;
    o->smoothing = !plain && smoothed ? e : 0.0;
    o->z = !plain && z ? c : 0.0;
}

static void find_options(ari_trace *t, losses *l)
{
    struct options *ref = &l->of[0].options, *other = &l->of[1].options;
    if (!ref->known || !other->known)
        return;
    const bool smoothing = fabs(ref->smoothing - other->smoothing) > ref->smoothing_unsure + other->smoothing_unsure,
               z = fabs(ref->z - other->z) > ref->z_unsure + other->z_unsure;
    if (!smoothing && !z)
        return;
    for (int k = 0; k < 2; k++) {
        settle(&l->of[k].options.smoothing, l->of[k].options.smoothing_unsure);
        settle(&l->of[k].options.z, l->of[k].options.z_unsure);
    }
    ari_found(t, ARI_FOUND_LOSS_OPTIONS, (smoothing ? ARI_IF(FRACTION) : 0) | (z ? ARI_IF(LOG) : 0));
    ari_number(t, "smoothing", other->smoothing);
    ari_number(t, "smoothing_there", ref->smoothing);
    ari_number(t, "z", other->z);
    ari_number(t, "z_there", ref->z);
}

/* --- what is wrong ------------------------------------------------------------------------------------------------ */

static void look_at(ari_trace *t, const losses *l)
{
    static const long shifts[] = {0, 2, -1, 3};
    const side *ref = &l->of[0], *other = &l->of[1];
    size_t n;
    const double sum = sum_of(l, ref, 1, &n);
    if (n != ref->targets || !gives(l, ref, sum, n))
        return;
    const size_t more = gained(l, 1), less = gained(l, 0);
    const double same = sum_of(l, other, 1, &n);
    for (size_t i = 0; i < 4 && t->kind == ARI_FOUND_NOTHING; i++) {
        size_t shifted;
        const double of_shift = sum_of(l, other, shifts[i], &shifted);
        if (!gives(l, other, of_shift, shifted))
            continue;
        ari_found(t, ARI_FOUND_TARGETS, ARI_IF(SHIFT));
        ari_number(t, "by", (double)shifts[i]);
    }
    if (t->kind == ARI_FOUND_NOTHING && other->of_dump && ref->of_dump && more > 0 && less == 0) {
        ari_found(t, ARI_FOUND_TARGETS, ARI_IF(PADDED));
        ari_count(t, "more", more);
    } else if (t->kind == ARI_FOUND_NOTHING && more == 0 && less == 0) {
        find_count(t, l, same);
    }
    if (t->kind == ARI_FOUND_NOTHING)
        find_chunks(t, l, other);
    if (t->kind == ARI_FOUND_NOTHING)
        find_micro_batch(t, l, other);
    if (t->kind == ARI_FOUND_NOTHING && less > 0 && more == 0 && gives(l, other, same, ref->targets - less)) {
        ari_found(t, ARI_FOUND_TARGETS, ARI_IF(COUNT) | ARI_IF(CUT));
        ari_count(t, "less", less);
    }
    if (t->kind != ARI_FOUND_NOTHING)
        ari_count(t, "targets", ref->targets);
}

/* Of the loss, with the ids of the batch: its options where gradients of logits say them, then its targets, then its
 * options where the loss alone does. */
static void look_at_loss(ari_trace *t, losses *l)
{
    bool of_gradients = true;
    for (int k = 0; k < 2; k++) {
        of_gradients = of_gradients && l->of[k].options.known;
        fit_value(&l->of[k], l);
    }
    if (of_gradients)
        find_options(t, l);
    if (t->kind == ARI_FOUND_NOTHING)
        look_at(t, l);
    if (t->kind == ARI_FOUND_NOTHING && !of_gradients)
        find_options(t, l);
}

ar_status ari_measure_targets(ari_trace *t, const ari_case *c)
{
    losses l = {.c = c};
    const ari_difference *d = c->grid.d;
    const bool of_loss = c->count == 1 && d->pass == 'f' && (ari_name_is(d->name) & ARI_IS_LOSS);
    /* Of a loss that differs first, before which all is right, the reference's logits are the other's too. */
    const ar_dump *dumps[2] = {c->known->reference, c->known->other ? c->known->other : c->known->reference};
    const bool alone = !c->known->other;
    bool held =
        (c->known->other || of_loss) && (of_loss ? isfinite(c->val[0]) && isfinite(c->ref[0])
                                                 : d->pass == 'b' && (ari_name_is(d->name) & ARI_IS_LOGITS) != 0);
    ar_status st = AR_OK;
    for (int k = 0; k < 2 && held; k++) {
        AR_TRY_TO(done, st, read_side(&l.of[k], &held, &l, dumps[k]));
        if (held && !alone)
            AR_TRY_TO(done, st, fit_gradient(&l.of[k], &l, dumps[k]));
        l.of[k].value = of_loss ? (double)(k == 0 ? c->ref[0] : c->val[0]) : 0.0;
    }
    if (held && of_loss)
        AR_TRY_TO(done, st, ari_replay_ids(&l.ids, c, l.tokens));
    for (size_t i = 0; l.ids && i < l.tokens; i++)
        held = held && l.ids[i] < l.vocabulary;
    if (held && l.ids && alone) {
        find_chunks(t, &l, &l.of[0]);
        if (t->kind == ARI_FOUND_NOTHING)
            find_micro_batch(t, &l, &l.of[0]);
    } else if (held && l.ids)
        look_at_loss(t, &l);
    else if (held && !alone)
        find_options(t, &l);
done:
    for (int k = 0; k < 2; k++) {
        free(l.of[k].logits);
        free(l.of[k].lse);
        free(l.of[k].counts);
    }
    free(l.ids);
    return st;
}
