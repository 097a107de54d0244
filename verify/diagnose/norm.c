/* SPDX-License-Identifier: Apache-2.0 */
/* The norm of all gradients: which of them, which ranks' parts of them, it counts too often or leaves out. */
#include <ctype.h>
#include <stdio.h>

#include "verify/diagnose/hypothesis.h"

enum { MOST_SUMMED = 1 << 26, MOST_GRADIENTS = 4096 };

/* Usual limits of clip_grad_value_. Any norm follows from some limit: only a round one is evidence. */
static const double limits[] = {1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3,
                                0.01, 0.02, 0.05, 0.1,  0.2,  0.5,  1.0,  2.0,  5.0};
enum { LIMITS = sizeof limits / sizeof *limits };

/* One parameter's gradient: the sum of its squares in both dumps, and of those that each rank holds, or all ranks of its
 * place along tp, which data-parallel ranks may have as copies or share out (ZeRO, FSDP). */
typedef struct part {
    ari_order_key key;
    int ndim;
    unsigned is; /* ARI_IS_ bits of the name */
    double square, other, held[ARI_MOST_RANKS];
} part;

typedef struct parts {
    part *part;
    size_t n;
    bool differ;   /* a gradient of the other dump is not the reference's */
    bool of_ranks; /* held is known */
    bool of_tp;    /* for each coordinate of tensor parallelism */
    int sharers;
    double square, other, clipped[LIMITS]; /* clipped: of the reference's elements within +-limits */
    double largest, sum;                   /* of the reference's elements' sizes; 0: not known */
    size_t trained;                        /* parameters with a gradient in the other dump alone, and its squares */
    double trained_square;
} parts;

/* Number of ranks that share out gradients: of tensor parallelism or, without it, of data parallelism (ZeRO, FSDP). */
static int sharers(int tp, int dp)
{
    return tp > 1 ? tp : dp;
}

/* An element of both dumps. */
static void add_element(parts *all, part *p, const double *x)
{
    const double size = fabs(x[0]);
    p->square += x[0] * x[0];
    p->other += x[1] * x[1];
    all->differ = all->differ || x[0] != x[1];
    all->largest = fmax(all->largest, size);
    all->sum += size;
    for (size_t l = 0; l < LIMITS; l++) {
        const double within = fmin(size, limits[l]);
        all->clipped[l] += within * within;
    }
}

static ar_status add_part(parts *all, const ari_case *c, const ar_dump_tensor *r, const ar_dump_tensor *t)
{
    const ar_dump_tensor *const both[] = {r, t};
    part *p = &all->part[all->n++];
    *p = (part){.key = ari_order_of(r->name, c->path), .ndim = r->ndim, .is = ari_name_is(r->name)};
    ari_beside b = ari_beside_of(both, 2, 0, t->count);
    while (ari_beside_next(&b))
        add_element(all, p, b.x);
    AR_TRY(b.status);
    all->square += p->square;
    all->other += p->other;
    ari_rank_copies ranks;
    ARI_ARENA_SCOPE(c->arena);
    AR_TRY(ari_rank_copies_of(&ranks, t, c->known, c->arena));
    const int shares = sharers(ranks.mesh.along[ARI_AXIS_TP], ranks.mesh.along[ARI_AXIS_DP]);
    all->of_ranks = all->of_ranks && ranks.copy && shares > 1 && shares <= ARI_MOST_RANKS;
    const int stage =
        ranks.mesh.along[ARI_AXIS_TP] > 1 ? ranks.ranks / ari_at_least_one(ranks.mesh.along[ARI_AXIS_PP]) : shares;
    bool has = false;
    for (int rank = 0; all->of_ranks && rank < ranks.ranks && (rank % stage != 0 || !has); rank++) {
        const ari_rank_copy *copy = &ranks.copy[rank];
        const size_t n = copy->local ? ari_volume(copy->shape, copy->ndim) : 0;
        all->sharers = shares;
        for (size_t k = 0; k < n; k++)
            p->held[rank % shares] += (double)copy->local[k] * (double)copy->local[k];
        has = has || n > 0;
    }
    all->of_tp = ranks.mesh.along[ARI_AXIS_TP] > 1;
    return AR_OK;
}

/* Those that a check knows. */
static ar_status parts_of_run(parts *all, const ari_case *c)
{
    const ari_difference *d = c->d;
    const int tp = d->mesh.along[ARI_AXIS_TP];
    *all = (parts){.of_ranks = tp > 1 && tp <= ARI_MOST_RANKS, .of_tp = true, .sharers = tp};
    AR_TRY(ARI_TAKE(&all->part, c->arena, d->gradients, "gradients"));
    for (all->n = 0; all->n < d->gradients; all->n++) {
        const ari_gradient *g = &d->gradient[all->n];
        part *p = &all->part[all->n];
        *p = (part){.key = ari_order_of(g->name, NULL), .ndim = g->ndim, .is = ari_name_is(g->name)};
        p->square = p->other = g->square;
        if (all->of_ranks)
            memcpy(p->held, g->held, (size_t)tp * sizeof *p->held);
        all->square += p->square;
        all->other += p->other;
    }
    return AR_OK;
}

/* Leaves n at 0 where a dump lacks gradients of the step, or they are too many to add up here. */
static ar_status sum_gradients(parts *all, const ari_case *c)
{
    const ar_dump *reference = c->known->reference, *other = c->known->other;
    size_t elements = 0;
    if (c->d->gradient)
        return parts_of_run(all, c);
    *all = (parts){.of_ranks = true};
    if (!reference || !other)
        return AR_OK;
    AR_TRY(ARI_TAKE(&all->part, c->arena, MOST_GRADIENTS, "gradients"));
    for (ari_walk w = ari_walk_of(other, c->path, "g", c->d->step); ari_walk_next(&w);) {
        const ar_dump_tensor *t = w.t, *r = ari_find_readable(reference, t->name);
        elements += t->count;
        if (!r && elements <= MOST_SUMMED && all->n < MOST_GRADIENTS) {
            ari_fit own = {.n = 0};
            AR_TRY(ari_fit_read(&own, t, t, 0, t->count));
            all->trained_square += own.yy;
            all->trained++;
            continue;
        }
        if (!r || r->count != t->count || elements > MOST_SUMMED || all->n == MOST_GRADIENTS) {
            all->n = 0;
            return AR_OK;
        }
        AR_TRY(add_part(all, c, r, t));
    }
    return AR_OK;
}

static double held_by_all(const parts *all, const part *p)
{
    double sum = 0.0;
    for (int rank = 0; rank < all->sharers; rank++)
        sum += p->held[rank];
    return sum;
}

/* Makes held that of one rank of each coordinate of tensor parallelism, as if it shared nothing with data-parallel ranks:
 * what is cut over tp is there the fewest times. */
static void take_one_copy(parts *all)
{
    double fewest = INFINITY;
    for (size_t i = 0; i < all->n; i++)
        fewest =
            all->part[i].square > 0.0 ? fmin(fewest, held_by_all(all, &all->part[i]) / all->part[i].square) : fewest;
    for (size_t i = 0; i < all->n && all->of_ranks && all->of_tp && fewest > 1.0; i++) {
        for (int rank = 0; rank < all->sharers; rank++)
            all->part[i].held[rank] /= fewest;
    }
}

/* --- sets of parameters that a fault affects together ------------------------------------------------------------- */

bool ari_alike_but_for_numbers(const char *x, size_t nx, const char *y, size_t ny)
{
    const char *const end_x = x + nx, *const end_y = y + ny;
    while (x < end_x && y < end_y) {
        if (isdigit((unsigned char)*x) && isdigit((unsigned char)*y)) {
            while (x < end_x && isdigit((unsigned char)*x))
                x++;
            while (y < end_y && isdigit((unsigned char)*y))
                y++;
        } else if (*x++ != *y++) {
            return false;
        }
    }
    return x == end_x && y == end_y;
}

static bool is_replicated(const parts *all, const part *p)
{
    return all->of_ranks && held_by_all(all, p) > 1.5 * p->square;
}

enum { ITSELF, EXPERTS, KIND, NORMS, DIMENSIONS, LAYER, REPLICATED, SETS };

static bool in_set(const parts *all, int set, const part *of, const part *p)
{
    switch (set) {
    case ITSELF:
        return of == p;
    case EXPERTS:
        return of->is & p->is & ARI_IS_EXPERT;
    case KIND:
        return ari_alike_but_for_numbers(of->key.name, of->key.stem, p->key.name, p->key.stem);
    case NORMS:
        return of->is & p->is & ARI_IS_NORM;
    case DIMENSIONS:
        return (of->ndim == 1) == (p->ndim == 1);
    case LAYER:
        return of->key.section == p->key.section && of->key.layer == p->key.layer;
    default:
        return all->of_ranks && is_replicated(all, of) == is_replicated(all, p);
    }
}

static void name_set(ari_trace *t, int set, const part *of, size_t n, bool once)
{
    const char *const words[] = {"",
                                 " and all other weights of experts",
                                 " and its like in other layers",
                                 " and all other norms",
                                 of->ndim == 1 ? " and all others of one dimension" : " and all other matrices",
                                 " and the rest of its layer",
                                 " and all others that ranks share as it"};
    ari_words(t, "which", "%.*s%s (%zu parameter%s)", (int)of->key.stem, of->key.name, words[set], n, ARI_PLURAL(n));
    ARI_FACTS(t, {"often", .text = once ? "once more" : "once per rank"});
}

/* The error of a norm's square, and a candidate's tolerance. */
typedef struct sought {
    double value, difference, within, unsure;
} sought;

/* The smallest set that was left out, counted once more or once per rank; or the one parameter whose norm it is. */
static void find_set(ari_trace *t, const parts *all, const sought *s)
{
    enum { LEFT_OUT, ONCE_MORE, PER_RANK, ALONE, WAYS };
    const double times[WAYS] = {-1.0, 1.0, all->sharers > 2 ? all->sharers - 1.0 : 0.0, 1.0};
    static const ari_properties flags[WAYS] = {0, ARI_IF(TWICE), ARI_IF(TWICE), ARI_IF(ONE)};
    size_t fewest = SIZE_MAX;
    ari_properties found = 0;
    for (size_t i = 0; i < all->n * SETS; i++) {
        const int set = (int)(i / all->n);
        const part *of = &all->part[i % all->n];
        double sum = 0.0;
        size_t n = 0;
        for (size_t k = 0; k < all->n; k++) {
            const bool in = in_set(all, set, of, &all->part[k]);
            sum += in ? all->part[k].square : 0.0;
            n += in;
        }
        for (int way = 0; way < (set == ITSELF ? WAYS : ALONE) && n > 0 && n < fewest && n < all->n; way++) {
            const double off = times[way] * sum - (way == ALONE ? s->value * s->value : s->difference);
            if (!(fabs(off) <= (way == ALONE || way == PER_RANK ? s->unsure : s->within)))
                continue;
            fewest = n;
            found = flags[way];
            name_set(t, set, of, n, way != PER_RANK);
        }
    }
    t->flags |= fewest < SIZE_MAX ? found : ARI_IF(FOREIGN);
}

/* The gradients of one kind of module: all its parameters in all layers. */
typedef struct kind {
    const part *first;
    size_t stem, n;
    double square;
} kind;

/* Where it is known which parameters ranks share, those alone. */
static size_t find_kinds(kind *kinds, size_t most, const parts *all)
{
    size_t n = 0;
    for (size_t i = 0; i < all->n; i++) {
        const part *p = &all->part[i];
        size_t stem = p->key.stem, k = 0;
        while (stem > 0 && p->key.name[stem - 1] != '.')
            stem--;
        if (all->of_ranks && !is_replicated(all, p))
            continue;
        while (k < n && !ari_alike_but_for_numbers(kinds[k].first->key.name, kinds[k].stem, p->key.name, stem))
            k++;
        if (k == most)
            return 0;
        if (k == n)
            kinds[n++] = (kind){.first = p, .stem = stem};
        kinds[k].square += p->square;
        kinds[k].n++;
    }
    return n;
}

/* Two or three kinds of modules that were left out or counted once more, what ranks share once per rank: so many sets
 * are tried that only what rounding leaves is near enough. */
static ari_properties find_several(ari_trace *t, const parts *all, const sought *s)
{
    enum { MOST_KINDS = 24 };
    kind kinds[MOST_KINDS];
    const size_t n = find_kinds(kinds, MOST_KINDS, all);
    const bool per_rank = all->of_ranks && s->difference > 0.0;
    const double wanted = fabs(s->difference) / (per_rank ? all->sharers - 1.0 : 1.0);
    for (size_t i = 0; i < n * n * n; i++) {
        const size_t of[] = {i % n, i / n % n, i / n / n}; /* the first and the second alike: there are two */
        const size_t from = of[0] == of[1] ? 1 : 0;
        const double sum = (from == 0 ? kinds[of[0]].square : 0.0) + kinds[of[1]].square + kinds[of[2]].square;
        if (of[0] > of[1] || of[1] >= of[2] || !(fabs(sum - wanted) <= s->unsure))
            continue;
        ari_text text = ari_list(t, "which");
        for (size_t k = from; k < 3; k++)
            ari_say(&text, "%s%.*s",
                    k == from ? ""
                    : k == 2  ? " and "
                              : ", ",
                    (int)kinds[of[k]].stem - 1, kinds[of[k]].first->key.name);
        ari_say(&text, ", in all layers,");
        ARI_FACTS(t, {"often", .text = per_rank ? "once per rank" : "once more"});
        return s->difference > 0.0 ? ARI_IF(TWICE) : ARI_IF(SOME);
    }
    return 0;
}

/* --- what a wrong norm may be ------------------------------------------------------------------------------------- */

/* Numbers computed from the same gradients are as near as this, for they are sums of many. */
#define SAME_NORM ARI_SUMS

/* True if the value is a number of the same gradients. */
static bool is_it(ari_trace *t, double value, double number, ari_properties flags, const char *which)
{
    if (!ari_is_near(number, value, SAME_NORM))
        return false;
    t->flags |= flags;
    ARI_FACTS(t, {"which", .text = which});
    return true;
}

/* The number that sharers make of all that each holds, and of its shards alone. */
static bool is_of_ranks(ari_trace *t, const parts *all, double value)
{
    double squares = 0.0, norms = 0.0;
    bool is = false;
    for (int rank = 0; rank < all->sharers && !is; rank++) {
        double held = 0.0, shards = 0.0;
        char others[64], mine[64];
        for (size_t i = 0; i < all->n; i++) {
            const part *p = &all->part[i];
            held += all->of_ranks ? p->held[rank] : 0.0;
            shards += is_replicated(all, p) ? 0.0 : p->held[rank];
        }
        squares += held, norms += sqrt(held);
        snprintf(others, sizeof others, "the shards of all ranks of their group but rank %d", rank);
        snprintf(mine, sizeof mine, "the shards of rank %d of their group", rank);
        is = value * value < all->square && (is_it(t, value, sqrt(held), 0, others) ||
                                             (shards > 0.0 && is_it(t, value, sqrt(all->square - shards), 0, mine)));
    }
    return is || is_it(t, value, sqrt(squares), ARI_IF(TWICE), "every parameter that ranks share") ||
           is_it(t, value, norms / all->sharers, ARI_IF(AVERAGE), "") || is_it(t, value, norms, ARI_IF(COUNT), "");
}

static bool is_another_norm(ari_trace *t, const parts *all, double value)
{
    for (size_t l = 0; l < LIMITS; l++) {
        ARI_FACTS(t, {"limit", .number = limits[l]});
        if (is_it(t, value, sqrt(all->clipped[l]), ARI_IF(CUT), ""))
            return true;
    }
    return is_it(t, value, all->square, ARI_IF(ROOT), "") ||
           is_it(t, value, all->largest, ARI_IF(POWER), "the largest of all elements' sizes (norm_type inf)") ||
           is_it(t, value, all->sum, ARI_IF(POWER), "the sum of all elements' sizes (norm_type 1)");
}

/* The squares added over ranks that have all of what is counted. */
static bool is_of_copies(ari_trace *t, const parts *all, double value, const ari_case *c)
{
    bool is = false;
    for (int i = ARI_LAYOUT_DP; i < ARI_LAYOUT_AXES && !is; i++) {
        const ari_axes axes = ari_layout_axes[i].axes;
        const double n = fmax(ari_ranks_along(&c->known->mesh, axes), ari_along(c->d, axes));
        is = n > 1.0 && is_it(t, value, sqrt(n * all->square), ARI_IF(TWICE), "all parameters");
    }
    return is;
}

/* Explains the norm by gradients that are the reference's. */
static void look_at_parts(ari_trace *t, const parts *all, double value, double ref, const ari_case *c)
{
    const double apart = fabs(all->square - ref * ref), unsure = 3.0 * apart + ARI_ROUNDINGS * all->square;
    const double difference = value * value - all->square;
    const sought s = {value, difference, fmax(unsure, ARI_SEEN * fabs(difference)), unsure};
    if (all->n == 0 || apart > ARI_SEEN * all->square || !(fabs(difference) > 4.0 * unsure))
        return;
    t->flags &= ~ARI_IF(TWICE);
    if (!is_of_ranks(t, all, value) && !is_another_norm(t, all, value) && !is_of_copies(t, all, value, c))
        find_set(t, all, &s);
    const ari_properties several = t->flags & ARI_IF(FOREIGN) ? find_several(t, all, &s) : 0;
    t->flags ^= several ? several | ARI_IF(FOREIGN) : 0;
}

/* The root of the squares of every so manieth rank's norm. */
static double root_over(const ari_difference *d, int each, int n)
{
    double squares = 0.0;
    for (int r = 0; r < n * each; r += each)
        squares += d->copy[r].local ? pow((double)d->copy[r].local[0], 2.0) : 0.0;
    return sqrt(squares);
}

/* True if the stages' squares add up to the reference's, apart from one parameter that two stages have. */
static bool is_of_stages(const parts *all, double root, double ref)
{
    bool is = ari_is_near(root, fabs(ref), SAME_NORM);
    for (size_t i = 0; i < all->n && !is; i++)
        is = ari_is_near(root, sqrt(ref * ref + all->part[i].square), SAME_NORM);
    return is;
}

/* True if a number has bf16's precision, which one in 65536 has by chance. */
static bool is_in_bf16(double number)
{
    int exponent;
    const double mantissa = 0x1p8 * frexp(number, &exponent);
    return mantissa == rint(mantissa);
}

/* The block of each copy, of n blocks of all experts, with whose squares alone the copy's norm is; false: of none. */
static bool are_of_blocks(const parts *all, const ari_case *c, size_t experts, size_t n, size_t *low, size_t *high)
{
    double rest = 0.0, *block = NULL;
    bool is = true;
    if (ARI_TAKE(&block, c->arena, n, "norms of experts") != AR_OK)
        return false;
    for (size_t i = 0; i < all->n; i++) {
        const size_t expert = ari_expert_of(all->part[i].key.name);
        *(expert < experts ? &block[expert / (experts / n)] : &rest) += all->part[i].square;
    }
    *low = SIZE_MAX;
    *high = 0;
    for (int r = 0; r < c->d->ranks && is; r++) {
        const ari_rank_copy *copy = &c->d->copy[r];
        size_t b = 0;
        while (copy->local && b < n && !ari_is_near((double)copy->local[0], sqrt(rest + block[b]), SAME_NORM))
            b++;
        is = b < n;
        *low = copy->local && b < *low ? b : *low;
        *high = copy->local && b > *high ? b : *high;
    }
    return is && *low != SIZE_MAX;
}

/* A norm with the experts of one expert-parallel rank alone: the fewest ranks that it fits. */
static void look_at_experts(ari_trace *t, const parts *all, const ari_case *c, double ref)
{
    size_t experts = 0, low = 0, high = 0;
    for (size_t i = 0; i < all->n; i++) {
        const size_t expert = ari_expert_of(all->part[i].key.name);
        experts = expert != SIZE_MAX && expert + 1 > experts ? expert + 1 : experts;
    }
    if (fabs(all->square - ref * ref) > ARI_SEEN * all->square)
        return;
    for (size_t n = 2; n <= experts && !(t->flags & ARI_IF(OF_EP)); n++) {
        if (experts % n != 0 || !are_of_blocks(all, c, experts, n, &low, &high))
            continue;
        t->flags |= ARI_IF(OF_EP) | (low < high ? ARI_IF(APART) : 0);
        ARI_FACTS(t, {"n", .count = n}, {"first", .count = low * (experts / n)},
                  {"last", .count = (low + 1) * (experts / n) - 1});
    }
}

ar_status ari_measure_norm(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->d;
    char over[ARI_AXES_TEXT];
    double low, high;
    parts all;
    if (c->grid.count != 1)
        return AR_OK;
    const int shares = sharers(ari_along(d, ARI_CUTS_FEATURES), ari_along(d, ARI_CUTS_SAMPLES));
    const int stages = ari_along(d, ARI_CUTS_LAYERS);
    ari_value_range(&low, &high, c);
    const double ref = (double)d->reference[0];
    AR_TRY(sum_gradients(&all, c));
    take_one_copy(&all);
    const bool own = all.n > 0 && all.differ && ari_is_near(sqrt(all.other), low, ARI_SEEN) && low == high;
    ari_trace_set(t, ARI_FOUND_NORM,
                  own && !ari_is_near(all.other, all.square, ARI_SEEN) ? ARI_IF(SAME)
                  : low > ref                                          ? ARI_IF(TWICE)
                                                                       : 0);
    if (stages > 1 && is_of_stages(&all, root_over(d, d->ranks / stages, stages), ref))
        t->flags |= ARI_IF(STAGES);
    ari_extent_text(over, c->known->other, ari_along(d, ARI_CUTS_FEATURES) > 1 ? ARI_LAYOUT_TP : ARI_LAYOUT_DP);
    const char *shared = "what ranks share (norms, biases, KV heads, a tied weight)";
    ARI_FACTS(t, {"low", .number = low}, {"high", .number = high}, {"reference", .number = ref},
              {"root", .number = root_over(d, 1, shares)}, {"sharers", .count = (size_t)shares}, {"over", .text = over},
              {"everywhere", .text = d->hidden ? "" : " on every rank"}, {"often", .text = "once per rank"},
              {"which", .text = low > ref ? shared : "some of them"}, {"times", .number = low / ref},
              {"expected", .number = ref / low}, {"trained", .count = all.trained});
    if (all.trained > 0 && ari_is_near(low, sqrt(ref * ref + all.trained_square), ARI_SEEN))
        t->flags |= ARI_IF(OF_GRADIENT);
    else if (!(t->flags & ARI_IF(SAME)))
        look_at_experts(t, &all, c, ref);
    if (!(t->flags & (ARI_IF(OF_GRADIENT) | ARI_IF(SAME) | ARI_IF(OF_EP))) && low == high)
        look_at_parts(t, &all, low, ref, c);
    if (t->flags & ARI_IF(FOREIGN) && is_in_bf16(low) && !is_in_bf16(ref) && ari_is_near(low, ref, 0.1))
        t->flags |= ARI_IF(FRACTION);
    return AR_OK;
}
