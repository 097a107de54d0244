/* SPDX-License-Identifier: Apache-2.0 */
/* The norm of all gradients: which of them, which ranks' parts of them, it counts too often or leaves out. */
#include <ctype.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/case.h"
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
} parts;

/* The ranks that share gradients out: those of tensor parallelism, without it those of data parallelism (ZeRO, FSDP). */
static int sharers(int tp, int dp)
{
    return tp > 1 ? tp : dp;
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
            for (size_t l = 0; l < LIMITS; l++)
                all->clipped[l] += pow(fmin(fabs((double)x[k]), limits[l]), 2.0);
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
    AR_TRY(ari_alloc((void **)&all->part, d->gradients, sizeof *all->part, "gradients"));
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
    AR_TRY(ari_alloc((void **)&all->part, MOST_GRADIENTS, sizeof *all->part, "gradients"));
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

/* --- the measure -------------------------------------------------------------------------------------------------- */

/* Of the ranks that share the gradients out: the mean of their norms, the root of the sum of all squares they hold. */
static void norms_of_ranks(double *mean, double *root, const parts *all)
{
    double sum = 0.0;
    *mean = 0.0;
    for (int rank = 0; rank < all->sharers; rank++) {
        double own = 0.0;
        for (size_t i = 0; i < all->n; i++)
            own += all->part[i].held[rank];
        *mean += sqrt(own) / all->sharers;
        sum += own;
    }
    *root = sqrt(sum);
}

/* Whether the norm is that of one rank's parts, or lacks one rank's shards. */
static bool leaves_ranks_out(ari_trace *t, const parts *all, double value, double difference)
{
    for (int rank = 0; rank < all->sharers; rank++) {
        double held = 0.0, shards = 0.0;
        for (size_t i = 0; i < all->n; i++) {
            held += all->part[i].held[rank];
            shards += is_replicated(all, &all->part[i]) ? 0.0 : all->part[i].held[rank];
        }
        if (ari_is_near(sqrt(held), value, 1e-6))
            ari_words(t, "which", "the shards of all ranks of their group but rank %d", rank);
        else if (shards > 0.0 && ari_is_near(sqrt(all->square - shards), value, 1e-6) && difference < 0.0)
            ari_words(t, "which", "the shards of rank %d of their group", rank);
        else
            continue;
        return true;
    }
    return false;
}

/* What the gradients say, which are the reference's. */
static void look_at_parts(ari_trace *t, const parts *all, double value, double ref)
{
    const double apart = fabs(all->square - ref * ref), unsure = 3.0 * apart + 0x1p-21 * all->square;
    const double difference = value * value - all->square;
    double mean, root;
    size_t limit = 0;
    if (all->n == 0 || apart > 1e-4 * all->square || !(fabs(difference) > 4.0 * unsure))
        return;
    t->is &= ~ARI_IF(TWICE);
    norms_of_ranks(&mean, &root, all);
    while (limit < LIMITS && !ari_is_near(sqrt(all->clipped[limit]), value, 1e-5))
        limit++;
    if (all->of_ranks && ari_is_near(root, value, 1e-5)) {
        t->is |= ARI_IF(TWICE);
        ari_words(t, "which", "every parameter that ranks share");
        ari_words(t, "often", "once per rank");
    } else if (ari_is_near(value, all->square, 1e-5)) {
        t->is |= ARI_IF(ROOT);
    } else if (all->of_ranks && ari_is_near(mean, value, 1e-5)) {
        t->is |= ARI_IF(AVERAGE);
    } else if (all->of_ranks && leaves_ranks_out(t, all, value, difference)) {
        t->is &= ~ARI_IF(TWICE);
    } else if (find_set(t, all, difference, fmax(unsure, 1e-4 * fabs(difference)), 1)) {
        t->is |= difference > 0.0 ? ARI_IF(TWICE) : 0;
    } else if (limit < LIMITS) {
        t->is |= ARI_IF(CUT);
        ari_number(t, "limit", limits[limit]);
    } else if (difference > 0.0 && all->sharers > 2 && find_set(t, all, difference, unsure, all->sharers - 1)) {
        t->is |= ARI_IF(TWICE); /* a copy that was taken for a shard counts on every rank */
    } else {
        t->is |= ARI_IF(FOREIGN);
    }
    t->is |= ARI_IF(NAMED);
}

/* Whether the squares of the pipeline ranks' norms add up to the reference's. */
static bool is_of_stages(const ari_difference *d, double ref)
{
    const int stages = ari_along(d, ARI_CUTS_LAYERS), each = d->ranks / stages;
    double squares = 0.0;
    for (int r = 0; stages > 1 && r < d->ranks; r += each)
        squares += d->copy[r].local ? pow((double)d->copy[r].local[0], 2.0) : 0.0;
    return stages > 1 && ari_is_near(sqrt(squares), fabs(ref), 1e-5);
}

ar_status ari_measure_norm(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    double low, high, squares = 0.0;
    parts all;
    if (d->pass != 'c' || c->grid.count != 1 || c->survey.total.nan > 0)
        return AR_OK;
    const int shares = sharers(ari_along(d, ARI_CUTS_FEATURES), ari_along(d, ARI_CUTS_SAMPLES));
    for (int r = 0; r < shares; r++)
        squares += d->copy[r].local ? (double)d->copy[r].local[0] * (double)d->copy[r].local[0] : 0.0;
    ari_value_range(&low, &high, c);
    const double ref = (double)d->reference[0];
    const ar_status st = sum_gradients(&all, c);
    if (st == AR_OK) {
        const bool own = all.n > 0 && all.differ && ari_is_near(sqrt(all.other), low, 1e-4) && low == high;
        ari_found(t, ARI_FOUND_NORM,
                  own && !ari_is_near(all.other, all.square, 1e-4) ? ARI_IF(SAME)
                  : low > ref                                      ? ARI_IF(TWICE)
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
