/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/sim_private.h"
#include "tests/sim/orderings.h"
#include "tests/sim/world.h"
#include "tests/support/small.h"

/* Schedules by seed, in a program of its own, so that the sanitizers see them: programs whose mistake only some orders
 * show, from several first seeds; and random collectives on queues, against their plain definitions, without faults and
 * with.
 * usage: explore [first seeds [seeds of the mended programs [seeds of the collectives]]] */

enum { FIRST_SEEDS = 10, MENDED_SEEDS = 200, COLLECTIVE_SEEDS = 300, MOST_SEEDS = 1000 };

/* Whether one of the seeds from `first` on shows the mistake, and again when it is replayed. */
static bool found(const ordering *o, uint64_t first)
{
    bool mended = false;
    uint64_t failing = 0;
    const ar_status st = ar_sim_explore(ORDERING_RANKS, NULL, o->rank, &mended, NULL, first, MOST_SEEDS, &failing);
    if (st == AR_OK)
        return false;
    char line[80], message[4096];
    snprintf(message, sizeof message, "%s", ar_error_message());
    snprintf(line, sizeof line, "\nschedule seed %llu replays this run", (unsigned long long)failing);
    bool same =
        st == o->fails && strlen(message) > strlen(line) && strcmp(message + strlen(message) - strlen(line), line) == 0;
    ar_sim_schedule schedule[2];
    for (int i = 0; i < 2; i++) {
        const ar_sim_options again = {.explore = true, .schedule_seed = failing, .schedule = &schedule[i]};
        same = same && ar_sim_run(ORDERING_RANKS, &again, o->rank, &mended, NULL) == st &&
               strcmp(ar_error_message(), message) == 0;
    }
    same = same && schedule[0].hash == schedule[1].hash && schedule[0].choices == schedule[1].choices;
    if (!same)
        printf("seed %llu: %s\nthen:\n%s\n", (unsigned long long)failing, message, ar_error_message());
    return same;
}

static int check_ordering(const ordering *o, uint64_t firsts, uint64_t seeds)
{
    uint64_t failing = 0;
    int bad = 0;
    for (uint64_t i = 0; i < firsts; i++)
        bad += !found(o, 1 + i * MOST_SEEDS);
    bool mended = true;
    const ar_status st = ar_sim_explore(ORDERING_RANKS, NULL, o->rank, &mended, NULL, 1, seeds, &failing);
    if (st != AR_OK)
        printf("%s\n", ar_error_message());
    printf("%s: not found or not replayed %d of %llu times; mended: %s under %llu seeds\n", o->name, bad,
           (unsigned long long)firsts, ar_status_name(st), (unsigned long long)seeds);
    return bad + (st != AR_OK);
}

enum { RANKS = 4, OPS = 8 };

/* What a run of a world comes to, without a fault or with one, where transfers are verified. */
typedef struct outcome {
    ar_status st;
    ar_sim_schedule schedule;
    bool holds; /* every result is what it should be */
    char message[8192], why[256];
} outcome;

static void run_seed(outcome *x, world *w, uint64_t seed, bool with_fault)
{
    uint64_t rng = seed;
    const ar_sim_fault fault = ari_sim_fault_draw(seed, RANKS, OPS, 1000000000);
    memset(x, 0, sizeof *x);
    draw_groups(w, seed, RANKS, &rng);
    draw_ops(w, OPS, &rng);
    w->options.explore = true;
    w->options.schedule = &x->schedule;
    w->options.verify_transfers = with_fault;
    w->options.faults = &fault;
    w->options.fault_count = with_fault;
    x->st = ar_sim_run(RANKS, &w->options, world_rank, w, NULL);
    snprintf(x->message, sizeof x->message, "%s", x->st == AR_OK ? "" : ar_error_message());
    x->holds = world_each(w, visit_holds, x->why);
    world_each(w, visit_fini, NULL);
}

/* Without a fault all is right; with one, one seed gives one outcome, message included, and none is a wrong result. */
static int check_seeds(uint64_t seeds, bool with_fault)
{
    int bad = 0;
    uint64_t failed = 0;
    OWNED(free) world *w = malloc(sizeof *w);
    OWNED(free) outcome *x = malloc(2 * sizeof *x);
    for (uint64_t seed = 1; w && x && seed <= seeds; seed++) {
        for (int again = 0; again <= with_fault; again++)
            run_seed(&x[again], w, seed, with_fault);
        failed += x->st != AR_OK;
        if ((x->st == AR_OK ? !x->holds : !with_fault) || (with_fault && memcmp(&x[0], &x[1], sizeof *x) != 0)) {
            printf("seed %llu: %s%s\nthen\n%s\n", (unsigned long long)seed, x[0].message, x[0].why,
                   with_fault ? x[1].message : "");
            bad++;
        }
    }
    printf("%llu worlds of random collectives%s, of which %llu end early: %d wrong\n", (unsigned long long)seeds,
           with_fault ? " with a fault, twice" : "", (unsigned long long)failed, bad);
    return bad + (!w || !x);
}

static uint64_t argument(int argc, char **argv, int i, uint64_t otherwise)
{
    return argc > i ? strtoull(argv[i], NULL, 0) : otherwise;
}

int main(int argc, char **argv)
{
    const uint64_t share = (uint64_t)by_scale(4, 3, 1);
    int bad = 0;
    for (int i = 0; i < ORDERINGS; i++)
        bad += check_ordering(&orderings[i], argument(argc, argv, 1, FIRST_SEEDS / share),
                              argument(argc, argv, 2, MENDED_SEEDS / share));
    for (int with_fault = 0; with_fault < 2; with_fault++)
        bad += check_seeds(argument(argc, argv, 3, COLLECTIVE_SEEDS / share), with_fault);
    return bad == 0 ? 0 : 1;
}
