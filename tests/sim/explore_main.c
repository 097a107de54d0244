/* SPDX-License-Identifier: Apache-2.0 */
#include <unistd.h>

#include "ref/core/clock.h"
#include "tests/sim/batch.h"
#include "tests/sim/orderings.h"
#include "tests/support/scoped.h"
#include "tests/support/small.h"

/* Schedules by seed, in a program of its own, so that the sanitizers see them: programs whose mistake only some orders
 * show, from several first seeds, with how many runs each needed; and random collectives on queues, against their plain
 * definitions, without faults and with. The mended programs also run as the system schedules them, where the thread
 * sanitizer sees races that a schedule of one lane at a time hides.
 * usage: explore [first seeds [seeds of the mended programs [seeds of the collectives]]] */

enum { FIRST_SEEDS = 10, MENDED_SEEDS = 200, COLLECTIVE_SEEDS = 300, MOST_SEEDS = 1000, SYSTEM_RUNS = 20 };

static double seconds_since(uint64_t start_ns)
{
    return (double)(ari_now_ns() - start_ns) * 1e-9;
}

/* Returns how many seeds it took, 0 where none showed it. */
static uint64_t find(const ordering *o, uint64_t first)
{
    bool mended = false;
    uint64_t failing = 0;
    const ar_status st = ar_sim_explore(ORDERING_RANKS, NULL, o->rank, &mended, NULL, first, MOST_SEEDS, &failing);
    if (st == AR_OK)
        return 0;
    char message[4096];
    snprintf(message, sizeof message, "%s", ar_error_message());
    const ar_sim_options again = {.explore = true, .schedule_seed = failing};
    const bool same = st == o->fails && ar_sim_run(ORDERING_RANKS, &again, o->rank, &mended, NULL) == st &&
                      strcmp(ar_error_message(), message) == 0;
    if (!same)
        printf("seed %llu: %s\nthen:\n%s\n", (unsigned long long)failing, message, ar_error_message());
    return same ? failing - first + 1 : 0;
}

static int check_ordering(const ordering *o, uint64_t firsts, uint64_t seeds)
{
    uint64_t most = 0, sum = 0, failing = 0;
    int bad = 0;
    for (uint64_t i = 0; i < firsts; i++) {
        const uint64_t needed = find(o, 1 + i * MOST_SEEDS);
        bad += needed == 0;
        most = needed > most ? needed : most;
        sum += needed;
    }
    bool mended = true;
    const uint64_t start = ari_now_ns();
    const ar_status st = ar_sim_explore(ORDERING_RANKS, NULL, o->rank, &mended, NULL, 1, seeds, &failing);
    if (st != AR_OK)
        printf("%s\n", ar_error_message());
    printf(
        "%s: found after %.1f seeds on average, %llu at most, not found or not replayed %d of %llu times; mended: %s "
        "under %llu seeds, %.0f runs/s\n",
        o->name, (double)sum / (double)firsts, (unsigned long long)most, bad, (unsigned long long)firsts,
        ar_status_name(st), (unsigned long long)seeds, (double)seeds / seconds_since(start));
    return bad + (st != AR_OK);
}

/* --- random collectives ------------------------------------------------------------------------------------------- */

enum { RANKS = 4, OPS = 8, GROUPS = 2 };

/* Group 0: everybody; group 1: pairs. Each has a queue of its own, so the two overtake each other. */
typedef struct plan {
    coll_case k[OPS][2]; /* of a pair: one for each */
    int group[OPS];
} plan;

static void draw_plan(plan *p, uint64_t seed)
{
    uint64_t rng = seed;
    for (int i = 0; i < OPS; i++) {
        p->group[i] = (int)draw(&rng, GROUPS);
        for (int g = 0; g <= p->group[i]; g++) {
            draw_case(&p->k[i][g], &rng, p->group[i] ? 2 : RANKS, draw(&rng, 40));
            case_init(&p->k[i][g], seed + (uint64_t)(10 * i + g));
        }
    }
}

static bool finish_plan(plan *p, char *why, size_t size)
{
    bool good = true;
    for (int i = 0; i < OPS; i++) {
        for (int g = 0; g <= p->group[i]; g++) {
            good = good && case_holds(&p->k[i][g], why, size);
            case_fini(&p->k[i][g]);
        }
    }
    return good;
}

static ar_status run_plan(ar_comm *c, void *arg)
{
    const plan *p = arg;
    const int r = ar_comm_rank(c);
    ar_comm *comm[GROUPS] = {c};
    ar_queue *queue[GROUPS] = {NULL};
    ar_status st = ar_comm_split(&comm[1], c, r / 2, r);
    for (int g = 0; g < GROUPS && st == AR_OK; g++)
        st = ar_queue_create(&queue[g], AR_QUEUE_THREAD, "collectives");
    for (int i = 0; i < OPS && st == AR_OK; i++) {
        const int g = p->group[i];
        st = case_call(&p->k[i][g ? r / 2 : 0], comm[g], queue[g], "random");
    }
    for (int g = 0; g < GROUPS; g++) {
        if (st == AR_OK)
            st = ar_queue_sync(queue[g], 0);
    }
    for (int g = 0; g < GROUPS; g++)
        ar_queue_destroy(queue[g]);
    ar_comm_destroy(comm[1]);
    return st;
}

static int check_collectives(uint64_t seeds)
{
    int bad = 0;
    OWNED(free) plan *p = malloc(sizeof *p);
    if (!p)
        return 1;
    const uint64_t start = ari_now_ns();
    for (uint64_t seed = 1; seed <= seeds; seed++) {
        const ar_sim_options o = {
            .explore = true, .schedule_seed = seed, .algorithm = (ar_sim_algorithm)(seed % (AR_SIM_LAST + 1))};
        char why[256] = "";
        draw_plan(p, seed);
        const ar_status st = ar_sim_run(RANKS, &o, run_plan, p, NULL);
        if (!finish_plan(p, why, sizeof why) || st != AR_OK) {
            printf("seed %llu: %s\n%s\n", (unsigned long long)seed, st == AR_OK ? "" : ar_error_message(), why);
            bad++;
        }
    }
    printf("%llu worlds of random collectives: %d wrong, %.0f runs/s\n", (unsigned long long)seeds, bad,
           (double)seeds / seconds_since(start));
    return bad;
}

/* --- faults ------------------------------------------------------------------------------------------------------- */

typedef struct outcome {
    ar_status st;
    ar_sim_schedule schedule;
    bool holds; /* every result is what it should be */
    char message[8192];
} outcome;

static void run_with_fault(outcome *x, plan *p, uint64_t seed)
{
    const ar_sim_fault fault = ar_sim_fault_draw(seed, RANKS, OPS, 1000000000);
    const ar_sim_options o = {.explore = true,
                              .schedule_seed = seed,
                              .schedule = &x->schedule,
                              .algorithm = (ar_sim_algorithm)(seed % (AR_SIM_LAST + 1)),
                              .verify_transfers = true,
                              .faults = &fault,
                              .fault_count = 1};
    char why[256];
    memset(x, 0, sizeof *x);
    draw_plan(p, seed);
    x->st = ar_sim_run(RANKS, &o, run_plan, p, NULL);
    snprintf(x->message, sizeof x->message, "%s", x->st == AR_OK ? "" : ar_error_message());
    x->holds = finish_plan(p, why, sizeof why);
}

/* One seed gives one outcome, message included, and none is a wrong result. */
static int check_faults(uint64_t seeds)
{
    int bad = 0;
    uint64_t failed = 0;
    OWNED(free) plan *p = malloc(sizeof *p);
    OWNED(free) outcome *x = malloc(2 * sizeof *x);
    const uint64_t start = ari_now_ns();
    for (uint64_t seed = 1; p && x && seed <= seeds; seed++) {
        run_with_fault(&x[0], p, seed);
        run_with_fault(&x[1], p, seed);
        failed += x->st != AR_OK;
        if ((x->st == AR_OK && !x->holds) || memcmp(&x[0], &x[1], sizeof *x) != 0) {
            printf("seed %llu: %s\nthen\n%s\n", (unsigned long long)seed, x[0].message, x[1].message);
            bad++;
        }
    }
    printf("%llu faults, of which %llu end the world: %d wrong or different from run to run, %.0f runs/s\n",
           (unsigned long long)seeds, (unsigned long long)failed, bad, 2 * (double)seeds / seconds_since(start));
    bad += !p || !x;
    return bad;
}

static uint64_t argument(int argc, char **argv, int i, uint64_t otherwise)
{
    return argc > i ? strtoull(argv[i], NULL, 0) : otherwise;
}

int main(int argc, char **argv)
{
    const uint64_t share = (uint64_t)by_scale(4, 3, 1);
    int bad = 0;
    alarm(280); /* a hang is a failure, and must not need somebody to notice it */
    for (int i = 0; i < ORDERINGS; i++)
        bad += check_ordering(&orderings[i], argument(argc, argv, 1, FIRST_SEEDS / share),
                              argument(argc, argv, 2, MENDED_SEEDS / share));
    bad += check_collectives(argument(argc, argv, 3, COLLECTIVE_SEEDS / share));
    bad += check_faults(argument(argc, argv, 3, COLLECTIVE_SEEDS / share));
    return bad == 0 ? 0 : 1;
}
