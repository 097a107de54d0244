/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/sim/world.h"
#include "tests/support/small.h"

OWNER(coll_case, case_fini)

/* 10,000 collectives of random kind, size, type, operation and group against the plain definitions: on the world, on
 * sub-groups, on groups that overlap and on groups of groups, with many of them in flight at once. A program of its
 * own, so that it runs under the thread and address sanitizers. usage: random [first seed [collectives]] */

enum { COLLECTIVES = 10000, ALGORITHMS = 4 };
#define TIMEOUT_NS ((uint64_t)120000000000) /* a busy machine is no fault */

/* How often each thing occurred. */
typedef struct histogram {
    int kinds[CASE_KINDS][PLAIN_DTYPES], ops[PLAIN_OPS], sizes[PLAIN_RANKS + 1], algorithms[ALGORITHMS], queues[2],
        in_place, special, verified, explored, worlds, collectives;
} histogram;

static void draw_world(world *w, uint64_t seed)
{
    uint64_t rng = seed;
    draw_groups(w, seed, draw(&rng, 12) == 0 ? PLAIN_RANKS : (int)draw(&rng, 8) + 1, &rng);
    w->options.timeout_ns = TIMEOUT_NS;
    w->options.verify_transfers = draw(&rng, 8) == 0;
    w->options.explore = draw(&rng, 8) == 0;
    draw_ops(w, MOST_OPS, &rng);
}

static int dtype_index(ar_dtype t)
{
    int i = 0;
    while (plain_dtypes[i] != t)
        i++;
    return i;
}

static void count_case(histogram *h, const world *w, const partition *p, const coll_case *k)
{
    const bool reduces = k->kind == ALL_REDUCE || k->kind == REDUCE_SCATTER;
    h->kinds[k->kind][dtype_index(k->dtype)]++;
    h->ops[k->op] += reduces;
    h->sizes[k->n]++;
    h->algorithms[w->options.algorithm]++;
    h->queues[p->queue]++;
    h->in_place += case_shares(k);
    h->special += k->special;
    h->verified += w->options.verify_transfers;
    h->explored += w->options.explore;
    h->collectives++;
}

/* Runs the world, checks and counts all its collectives, and frees them. */
static bool check_world(world *w, uint64_t seed, histogram *h)
{
    char why[256] = "";
    const ar_status st = ar_sim_run(w->n, &w->options, world_rank, w, NULL);
    bool good = st == AR_OK;
    for (int i = 0; i < w->op_count; i++) {
        const partition *p = &w->parts[w->ops[i].on];
        for (int g = 0; g < p->groups; g++) {
            OWNED(case_fini) coll_case *k = &w->ops[i].k[g];
            good = good && case_holds(k, why, sizeof why);
            count_case(h, w, p, k);
        }
    }
    h->worlds++;
    if (!good)
        printf("seed %llu: N %d, algorithm %d%s%s: %s %s\n", (unsigned long long)seed, w->n, (int)w->options.algorithm,
               w->options.verify_transfers ? ", verified" : "", w->options.explore ? ", explored" : "", why,
               st == AR_OK ? "" : ar_error_message());
    return good;
}

/* How many of the things that must occur do not. */
static int missing(const histogram *h)
{
    int none = 0;
    for (int k = 0; k < CASE_KINDS; k++) {
        for (int t = 0; t < PLAIN_DTYPES; t++)
            none += h->kinds[k][t] == 0;
    }
    for (int i = 0; i < PLAIN_OPS; i++)
        none += h->ops[i] == 0;
    for (int n = 1; n <= 8; n++)
        none += h->sizes[n] == 0;
    for (int a = 0; a < ALGORITHMS; a++)
        none += h->algorithms[a] == 0;
    none += h->sizes[PLAIN_RANKS] == 0;
    none += (h->queues[0] == 0) + (h->queues[1] == 0) + (h->in_place == 0) + (h->special == 0);
    return none + (h->verified == 0) + (h->explored == 0);
}

int main(int argc, char **argv)
{
    const uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 0) : 1;
    const int collectives = argc > 2 ? atoi(argv[2]) : small_only() ? COLLECTIVES / 2 : COLLECTIVES;
    histogram h = {.worlds = 0};
    int bad = 0;
    OWNED(free) world *w = malloc(sizeof *w);
    if (!w)
        return 1;
    while (h.collectives < collectives) {
        const uint64_t seed = first + (uint64_t)h.worlds;
        draw_world(w, seed);
        bad += !check_world(w, seed, &h);
    }
    printf("%d collectives in %d worlds from seed %llu: %d worlds wrong\n", h.collectives, h.worlds,
           (unsigned long long)first, bad);
    if (collectives >= COLLECTIVES && missing(&h) > 0)
        printf("%d of the kinds, types, operations, sizes and algorithms did not occur\n", missing(&h));
    return bad == 0 && (collectives < COLLECTIVES || missing(&h) == 0) ? 0 : 1;
}
