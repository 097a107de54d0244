/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/logprobs/logprobs.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Places that a search goes by, fewer of them where a vocabulary is large; all are counted at its end. */
enum { LOOKED_AT = 64, LOOKED_AT_LEAST = 16 };
#define LOOKED_LOGITS ((size_t)1 << 20)
enum { NUMBERS = 48, TEMPERATURES = 48, PASSES = 3 };

/* What is tried: temperatures, and a support's numbers. */
typedef struct grid {
    size_t temperatures, numbers[ARI_SUPPORTS];
    double temperature[TEMPERATURES], number[ARI_SUPPORTS][NUMBERS];
} grid;

typedef struct fit {
    const ari_lp_case *c;
    size_t v, step; /* of so many places one is looked at */
    float *sorted;  /* [v], a row's logits, the largest first */
    double *mass;   /* [v], of the largest 1, 2, .. logits, over that of the largest */
    double left[ARI_SUPPORTS][TEMPERATURES][NUMBERS];
} fit;

/* --- a row -------------------------------------------------------------------------------------------------------- */

static int descending(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

static void sort_row(fit *f, const float *row)
{
    memcpy(f->sorted, row, f->v * sizeof *row);
    qsort(f->sorted, f->v, sizeof *f->sorted, descending);
}

static void sum_row(fit *f, double temperature)
{
    double sum = 0.0;
    for (size_t j = 0; j < f->v; j++) {
        sum += exp(((double)f->sorted[j] - (double)f->sorted[0]) / temperature);
        f->mass[j] = sum;
    }
}

/* How many of the sorted row stay. */
static size_t kept(const fit *f, ari_support support, double temperature, double number)
{
    size_t low = 0; /* of the last one that stays */
    if (support == ARI_ALL)
        return f->v;
    if (support == ARI_LARGEST_K)
        return number < (double)f->v ? (size_t)number : f->v;
    const double wanted = number * f->mass[f->v - 1], least = (double)f->sorted[0] + temperature * log(number);
    ARI_BISECT(low, f->v - 1, i,
               support == ARI_LARGEST_P ? !(f->mass[i] >= wanted) : !((double)f->sorted[i + 1] < least))
    return low + 1;
}

static double square_left(const fit *f, const ari_lp_claim *one, ari_support support, double temperature, double number)
{
    const float x = one->row[f->c->sequences->list[one->sequence].tokens[one->at]];
    const size_t n = kept(f, support, temperature, number);
    const double plain = one->given - one->reference;
    if (x < f->sorted[n - 1])
        return plain * plain + 1.0; /* no sampler takes a token that it has left out */
    const double off = ((double)x - (double)f->sorted[0]) / temperature - log(f->mass[n - 1]) - one->given;
    return isfinite(off) ? off * off : plain * plain + 1.0;
}

/* --- the search --------------------------------------------------------------------------------------------------- */

static void look(fit *f, const grid *g)
{
    memset(f->left, 0, sizeof f->left);
    for (size_t i = 0; i < f->c->claims; i += f->step) {
        const ari_lp_claim *one = &f->c->claim[i];
        sort_row(f, one->row);
        for (size_t t = 0; t < g->temperatures; t++) {
            sum_row(f, g->temperature[t]);
            for (int k = 0; k < ARI_SUPPORTS; k++)
                for (size_t n = 0; n < g->numbers[k]; n++)
                    f->left[k][t][n] += square_left(f, one, (ari_support)k, g->temperature[t], g->number[k][n]);
        }
    }
}

/* The best of the first `temperatures`. */
static ari_sampler best_of(const fit *f, const grid *g, int k, size_t temperatures)
{
    ari_sampler best = {.temperature = 1.0, .left = (double)INFINITY};
    for (size_t t = 0; t < temperatures; t++) {
        for (size_t n = 0; n < g->numbers[k]; n++) {
            if (f->left[k][t][n] < best.left)
                best = (ari_sampler){g->temperature[t], g->number[k][n], f->left[k][t][n]};
        }
    }
    return best;
}

static void add_number(grid *g, int k, double number)
{
    if (g->numbers[k] < NUMBERS)
        g->number[k][g->numbers[k]++] = number;
}

/* The first temperature is 1, by itself. */
static void begin_grid(grid *g)
{
    *g = (grid){.temperatures = 1, .temperature = {1.0}};
    add_number(g, ARI_ALL, 0.0);
}

static void coarse_grid(grid *g)
{
    static const double k[] = {1,  2,  3,  4,   5,   8,   10,  16,  20,  25,  32,   40,
                               50, 64, 80, 100, 128, 200, 256, 400, 512, 800, 1000, 1024};
    static const double m[] = {0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5};
    begin_grid(g);
    for (double t = 0.1; t < 2.01; t += 0.05)
        g->temperature[g->temperatures++] = t;
    for (double t = 2.5; t < 6.0; t *= 1.4)
        g->temperature[g->temperatures++] = t;
    for (size_t i = 0; i < sizeof k / sizeof *k; i++)
        add_number(g, ARI_LARGEST_K, k[i]);
    for (double p = 0.05; p < 0.96; p += 0.025)
        add_number(g, ARI_LARGEST_P, p);
    add_number(g, ARI_LARGEST_P, 0.98);
    add_number(g, ARI_LARGEST_P, 0.99);
    add_number(g, ARI_LARGEST_P, 0.995);
    add_number(g, ARI_LARGEST_P, 0.999);
    for (size_t i = 0; i < sizeof m / sizeof *m; i++)
        add_number(g, ARI_LEAST_P, m[i]);
}

/* Around the best sampler of a kind. */
static void fine_grid(grid *g, int k, const ari_sampler *best, int pass)
{
    const double step = pass == 1 ? 0.005 : 0.0005;
    begin_grid(g);
    for (int i = -20; i <= 20; i++) {
        const double t = best->temperature + i * step, p = best->number + i * step / 2.0;
        if (t > 0.02)
            g->temperature[g->temperatures++] = t;
        if (k == ARI_LARGEST_K && best->number + i >= 1.0 && pass == 1)
            add_number(g, k, best->number + i);
        if (k == ARI_LARGEST_P && p > 0.0 && p < 1.0)
            add_number(g, k, p);
        if (k == ARI_LEAST_P)
            add_number(g, k, best->number * pow(pass == 1 ? 1.03 : 1.002, i));
    }
    if (k != ARI_ALL)
        add_number(g, k, best->number);
    for (int other = 0; other < ARI_SUPPORTS; other++)
        g->numbers[other] = other == k ? g->numbers[other] : 0;
}

/* Another temperature than 1 has to leave less than half. */
static ari_sampler choose(const fit *f, const grid *g, int k)
{
    const ari_sampler plain = best_of(f, g, k, 1), any = best_of(f, g, k, g->temperatures);
    return k == ARI_ALL || any.left < 0.5 * plain.left ? any : plain;
}

static double left_of(fit *f, size_t step, ari_support support, const ari_sampler *s)
{
    double left = 0.0;
    for (size_t i = 0; i < f->c->claims; i += step) {
        sort_row(f, f->c->claim[i].row);
        sum_row(f, s->temperature);
        left += square_left(f, &f->c->claim[i], support, s->temperature, s->number);
    }
    return left;
}

static double rounded(double x, int digits)
{
    const double unit = pow(10.0, floor(log10(x)) + 1.0 - digits);
    return rint(x / unit) * unit;
}

/* Many a number of a support leaves the same, and a temperature's neighbours nearly so: the one of the fewest
 * digits. */
static void make_round(fit *f, ari_support support, ari_sampler *s)
{
    s->left = left_of(f, f->step, support, s);
    for (int field = 0; field < 2; field++) {
        for (int digits = 1; digits <= 4; digits++) {
            ari_sampler plain = *s;
            double *x = field == 0 ? &plain.temperature : &plain.number;
            if (!(*x > 0.0))
                break;
            *x = rounded(*x, digits);
            plain.left = left_of(f, f->step, support, &plain);
            if (plain.left <= 1.02 * s->left) {
                *s = plain;
                break;
            }
        }
    }
}

ar_status ari_samplers_fit(ari_sampler found[ARI_SUPPORTS], const ari_lp_case *c)
{
    ARI_OWNED fit *f = NULL;
    ARI_OWNED float *sorted = NULL;
    ARI_OWNED double *mass = NULL;
    grid g;
    AR_TRY(ARI_ALLOC_ZERO(&f, 1, "a search"));
    f->c = c;
    f->v = c->model->config->vocab;
    const size_t room = LOOKED_LOGITS / f->v, looked = room > LOOKED_AT         ? LOOKED_AT
                                                       : room < LOOKED_AT_LEAST ? LOOKED_AT_LEAST
                                                                                : room;
    f->step = c->claims > looked ? c->claims / looked : 1;
    AR_TRY(ARI_ALLOC(&sorted, f->v, "a row of logits"));
    AR_TRY(ARI_ALLOC(&mass, f->v, "a row of logits"));
    f->sorted = sorted;
    f->mass = mass;
    coarse_grid(&g);
    look(f, &g);
    for (int k = 0; k < ARI_SUPPORTS; k++)
        found[k] = choose(f, &g, k);
    for (int k = 0; k < ARI_SUPPORTS; k++) {
        for (int pass = 1; pass < PASSES; pass++) {
            fine_grid(&g, k, &found[k], pass);
            look(f, &g);
            found[k] = choose(f, &g, k);
        }
        make_round(f, (ari_support)k, &found[k]);
        found[k].left = left_of(f, 1, (ari_support)k, &found[k]);
    }
    return AR_OK;
}
