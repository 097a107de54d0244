/* SPDX-License-Identifier: Apache-2.0 */
/* The norm of all gradients: which of them, which ranks' parts of them, it counts too often or leaves out. */
#include <ctype.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/hypothesis.h"
#include "verify/diagnose/roles.h"

enum { CHUNK = 4096, MOST_SUMMED = 1 << 26, MOST_GRADIENTS = 4096 };

/* What clip_grad_value_ may be given. Any norm is that of some limit: only one of a round limit says something. */
static const double limits[] = {1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3,
                                0.01, 0.02, 0.05, 0.1,  0.2,  0.5,  1.0,  2.0,  5.0};
enum { LIMITS = sizeof limits / sizeof *limits };

/* One parameter's gradient: the sum of its squares in both dumps, and of those that each rank holds. */
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
    int sharers;
    double square, other, clipped[LIMITS]; /* clipped: of the reference's elements within +-limits */
    double largest, sum;                   /* of the reference's elements' sizes; 0: not known */
} parts;

/* The ranks that share gradients out: those of tensor parallelism, without it those of data parallelism (ZeRO, FSDP). */
static int sharers(int tp, int dp)
{
    return tp > 1 ? tp : dp;
}

static void add_size(parts *all, double size)
{
    all->largest = fmax(all->largest, size);
    all->sum += size;
    for (size_t l = 0; l < LIMITS; l++) {
        const double within = fmin(size, limits[l]);
        all->clipped[l] += within * within;
    }
}

static ar_status add_part(parts *all, const ari_case *c, const ar_dump_tensor *r, const ar_dump_tensor *t)
{
    float x[CHUNK], y[CHUNK];
    part *p = &all->part[all->n++];
    *p = (part){.key = ari_order_of(r->name, c->path), .ndim = r->ndim, .is = ari_name_is(r->name)};
    for (size_t at = 0; at < t->count; at += CHUNK) {
        const size_t n = t->count - at < CHUNK ? t->count - at : CHUNK;
        AR_TRY(ar_dump_read_f32(r, at, n, x));
        AR_TRY(ar_dump_read_f32(t, at, n, y));
        for (size_t k = 0; k < n; k++) {
            p->square += (double)x[k] * (double)x[k];
            p->other += (double)y[k] * (double)y[k];
            add_size(all, fabs((double)x[k]));
        }
        all->differ = all->differ || memcmp(x, y, n * sizeof *x) != 0;
    }
    all->square += p->square;
    all->other += p->other;
    ari_rank_copies ranks = {.copy = NULL};
    AR_TRY(ari_rank_copies_of(&ranks, t, c->known));
    const int shares = sharers(ranks.mesh.along[ARI_AXIS_TP], ranks.mesh.along[ARI_AXIS_DP]);
    all->of_ranks = all->of_ranks && ranks.copy && shares > 1 && shares <= ARI_MOST_RANKS;
    for (int rank = 0; all->of_ranks && rank < shares; rank++) {
        const ari_rank_copy *copy = &ranks.copy[rank];
        const size_t n = copy->local ? ari_volume(copy->shape, copy->ndim) : 0;
        all->sharers = shares;
        for (size_t k = 0; k < n; k++)
            p->held[rank] += (double)copy->local[k] * (double)copy->local[k];
    }
    ari_rank_copies_fini(&ranks);
    return AR_OK;
}

/* Those that a check knows. */
static ar_status parts_of_run(parts *all, const ari_difference *d)
{
    const int tp = d->mesh.along[ARI_AXIS_TP];
    *all = (parts){.of_ranks = tp > 1 && tp <= ARI_MOST_RANKS, .sharers = tp};
    AR_TRY(ARI_ALLOC(&all->part, d->gradients, "gradients"));
    for (all->n = 0; all->n < d->gradients; all->n++) {
        const ari_gradient *g = &d->gradient[all->n];
        part *p = &all->part[all->n];
        *p = (part){.key = ari_order_of(g->name, NULL),
                    .ndim = g->ndim,
                    .is = ari_name_is(g->name),
                    .square = g->square,
                    .other = g->square};
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
    if (c->grid.d->gradient)
        return parts_of_run(all, c->grid.d);
    *all = (parts){.of_ranks = true};
    if (!reference || !other)
        return AR_OK;
    AR_TRY(ARI_ALLOC(&all->part, MOST_GRADIENTS, "gradients"));
    for (size_t i = 0; i < ar_dump_count(other); i++) {
        const ar_dump_tensor *t = ar_dump_at(other, i), *r = ar_dump_find(reference, t->name);
        const ari_order_key key = ari_order_of(t->name, c->path);
        if (key.pass != 'g' || key.step != c->grid.d->step)
            continue;
        elements += t->count;
        if (!r || r->count != t->count || elements > MOST_SUMMED || all->n == MOST_GRADIENTS) {
            all->n = 0;
            return AR_OK;
        }
        AR_TRY(add_part(all, c, r, t));
    }
    return AR_OK;
}

/* --- sets of parameters that a mistake takes together ------------------------------------------------------------- */

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
    double sum = 0.0;
    for (int rank = 0; rank < all->sharers; rank++)
        sum += p->held[rank];
    return all->of_ranks && sum > 1.5 * p->square;
}

enum { ITSELF, KIND, NORMS, DIMENSIONS, LAYER, REPLICATED, SETS };

static bool in_set(const parts *all, int set, const part *of, const part *p)
{
    switch (set) {
    case ITSELF:
        return of == p;
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

static void name_set(ari_trace *t, int set, const part *of, size_t n, int more)
{
    const char *const words[] = {"",
                                 " and its like in other layers",
                                 " and all other norms",
                                 of->ndim == 1 ? " and all others of one dimension" : " and all other matrices",
                                 " and the rest of its layer",
                                 " and all others that ranks share as it"};
    ari_words(t, "which", "%.*s%s (%zu parameter%s)", (int)of->key.stem, of->key.name, words[set], n,
              n == 1 ? "" : "s");
    ari_words(t, "often", "%s", more == 1 ? "once more" : "once per rank");
}

/* The smallest set whose squares, left out or counted `more` times too often, make the difference; false: none. */
static bool find_set(ari_trace *t, const parts *all, double difference, double unsure, int more)
{
    size_t fewest = SIZE_MAX;
    for (int set = 0; set < SETS; set++) {
        for (size_t i = 0; i < all->n; i++) {
            double sum = 0.0;
            size_t n = 0;
            for (size_t k = 0; k < all->n; k++) {
                if (!in_set(all, set, &all->part[i], &all->part[k]))
                    continue;
                sum += all->part[k].square;
                n++;
            }
            if (n == 0 || n >= fewest || n == all->n || !(fabs(more * sum - fabs(difference)) <= unsure))
                continue;
            fewest = n;
            name_set(t, set, &all->part[i], n, more);
        }
    }
    return fewest < SIZE_MAX;
}

/* --- what a wrong norm may be ------------------------------------------------------------------------------------- */

/* Numbers computed from the same gradients are as near as this, for they are sums of many. */
#define SAME_NORM ARI_SUMS

/* Whether the norm is that of one rank's parts, or lacks one rank's shards. */
static bool leaves_ranks_out(ari_trace *t, const parts *all, double value)
{
    for (int rank = 0; rank < all->sharers; rank++) {
        double held = 0.0, shards = 0.0;
        for (size_t i = 0; i < all->n; i++) {
            held += all->part[i].held[rank];
            shards += is_replicated(all, &all->part[i]) ? 0.0 : all->part[i].held[rank];
        }
        if (ari_is_near(sqrt(held), value, 0.1 * SAME_NORM))
            ari_words(t, "which", "the shards of all ranks of their group but rank %d", rank);
        else if (shards > 0.0 && ari_is_near(sqrt(all->square - shards), value, 0.1 * SAME_NORM))
            ari_words(t, "which", "the shards of rank %d of their group", rank);
        else
            continue;
        return true;
    }
    return false;
}

/* Other numbers of the same gradients: whether the value is one. */
static bool is_another_norm(ari_trace *t, const parts *all, double value)
{
    double squares = 0.0, mean = 0.0; /* of what each sharer holds: all squares, and the mean of norms */
    size_t limit = 0;
    for (int rank = 0; all->of_ranks && rank < all->sharers; rank++) {
        double own = 0.0;
        for (size_t i = 0; i < all->n; i++)
            own += all->part[i].held[rank];
        mean += sqrt(own) / all->sharers;
        squares += own;
    }
    while (limit < LIMITS && !ari_is_near(sqrt(all->clipped[limit]), value, SAME_NORM))
        limit++;
    const struct {
        double number;
        ari_properties is;
        const char *words;
    } others[] = {{sqrt(squares), ARI_IF(TWICE), "every parameter that ranks share"},
                  {all->square, ARI_IF(ROOT), ""},
                  {mean, ARI_IF(AVERAGE), ""},
                  {all->largest, ARI_IF(POWER), "the largest of all elements' sizes (norm_type inf)"},
                  {all->sum, ARI_IF(POWER), "the sum of all elements' sizes (norm_type 1)"},
                  {limit < LIMITS ? value : 0.0, ARI_IF(CUT), ""}};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        if (!ari_is_near(others[i].number, value, SAME_NORM))
            continue;
        t->is |= others[i].is;
        ari_words(t, "which", "%s", others[i].words);
        ari_words(t, "often", "once per rank");
        ari_number(t, "limit", limit < LIMITS ? limits[limit] : 0.0);
        return true;
    }
    return false;
}

/* What the gradients say, which are the reference's. */
static void look_at_parts(ari_trace *t, const parts *all, double value, double ref)
{
    const double apart = fabs(all->square - ref * ref), unsure = 3.0 * apart + ARI_ROUNDINGS * all->square;
    const double difference = value * value - all->square;
    if (all->n == 0 || apart > ARI_SEEN * all->square || !(fabs(difference) > 4.0 * unsure))
        return;
    t->is = (t->is & ~ARI_IF(TWICE)) | ARI_IF(NAMED);
    if (is_another_norm(t, all, value) || (difference < 0.0 && leaves_ranks_out(t, all, value)))
        return;
    const bool found = find_set(t, all, difference, fmax(unsure, ARI_SEEN * fabs(difference)), 1) ||
                       (difference > 0.0 && all->sharers > 2 && find_set(t, all, difference, unsure, all->sharers - 1));
    t->is |= !found ? ARI_IF(FOREIGN) : difference > 0.0 ? ARI_IF(TWICE) : 0;
}

/* Whether the squares of the pipeline ranks' norms add up to the reference's. */
static bool is_of_stages(const ari_difference *d, double ref)
{
    const int stages = ari_along(d, ARI_CUTS_LAYERS), each = d->ranks / stages;
    double squares = 0.0;
    for (int r = 0; stages > 1 && r < d->ranks; r += each)
        squares += d->copy[r].local ? pow((double)d->copy[r].local[0], 2.0) : 0.0;
    return stages > 1 && ari_is_near(sqrt(squares), fabs(ref), SAME_NORM);
}

ar_status ari_measure_norm(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    double low, high, squares = 0.0;
    parts all;
    if (c->grid.count != 1)
        return AR_OK;
    const int shares = sharers(ari_along(d, ARI_CUTS_FEATURES), ari_along(d, ARI_CUTS_SAMPLES));
    for (int r = 0; r < shares; r++)
        squares += d->copy[r].local ? (double)d->copy[r].local[0] * (double)d->copy[r].local[0] : 0.0;
    ari_value_range(&low, &high, c);
    const double ref = (double)d->reference[0];
    const ar_status st = sum_gradients(&all, c);
    if (st == AR_OK) {
        const bool own = all.n > 0 && all.differ && ari_is_near(sqrt(all.other), low, ARI_SEEN) && low == high;
        ari_found(t, ARI_FOUND_NORM,
                  own && !ari_is_near(all.other, all.square, ARI_SEEN) ? ARI_IF(SAME)
                  : low > ref                                          ? ARI_IF(TWICE)
                                                                       : 0);
        t->is |= is_of_stages(d, ref) ? ARI_IF(STAGES) : 0;
        ari_number(t, "low", low);
        ari_number(t, "high", high);
        ari_number(t, "reference", ref);
        ari_number(t, "root", sqrt(squares));
        ari_count(t, "sharers", (size_t)shares);
        ari_words(t, "over", ari_along(d, ARI_CUTS_FEATURES) > 1 ? "tp" : "dp");
        ari_words(t, "everywhere", "%s", d->hidden ? "" : " on every rank");
        ari_number(t, "times", low / ref);
        ari_number(t, "expected", ref / low);
        if (!(t->is & ARI_IF(SAME)) && low == high)
            look_at_parts(t, &all, low, ref);
    }
    free(all.part);
    return st;
}
