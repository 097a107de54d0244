/* SPDX-License-Identifier: Apache-2.0 */
#include <unistd.h>

#include "tests/sim/plain.h"
#include "tests/support/small.h"

/* Random collectives on random groups and queues, with and without a fault, against the plain definitions. A program of
 * its own, so that it runs under the thread and address sanitizers. usage: stress [first seed [worlds]] */

enum { OPS = 30, PARTITIONS = 4, WORLDS = 150 };
/* Short where the world is to fail anyway; the default elsewhere, so that a busy machine is no fault. */
#define FAULT_TIMEOUT_NS ((uint64_t)200000000)

typedef enum fault { NO_FAULT, SKIP, RETURN_OK, RETURN_ERROR, ABORT, OTHER_KIND, TASK_FAILS, TOO_LATE, FAULTS } fault;
static const char *const fault_names[FAULTS] = {"none",  "skip",       "return ok",  "return error",
                                                "abort", "other kind", "task fails", "too late"};

typedef struct op {
    int partition;
    int groups;
    coll_case k[8]; /* one for each group of the partition */
} op;

typedef struct world {
    int n;
    fault fault;
    int fault_rank, fault_op;
    ar_queue_kind queue[PARTITIONS];
    op ops[OPS];
} world;

/* The groups: everybody; neighbours in pairs; every other rank; halves in falling order. */
static int color_of(int partition, int r, int n)
{
    return partition == 0 ? 0 : partition == 1 ? r / 2 : partition == 2 ? r % 2 : 2 * r / n;
}

static int group_size(int partition, int n)
{
    return partition == 0 ? n : partition == 1 ? 2 : n / 2;
}

static uint64_t draw(uint64_t *state, uint64_t below)
{
    *state = plain_hash(*state);
    return *state % below;
}

static void draw_case(coll_case *k, uint64_t *rng, int n)
{
    const size_t largest = draw(rng, 10) == 0 ? 9000 : 60;
    k->kind = (case_kind)draw(rng, CASE_KINDS);
    k->dtype = plain_dtypes[draw(rng, PLAIN_DTYPES)];
    k->op = (ar_op)draw(rng, PLAIN_OPS);
    k->n = n;
    k->root = (int)draw(rng, (uint64_t)n);
    k->in_place = draw(rng, 2) != 0;
    k->count = draw(rng, largest);
    for (int p = 0; p < n; p++) {
        k->counts[p] = draw(rng, 3) == 0 ? 0 : draw(rng, largest / (size_t)n);
        for (int q = 0; q < n; q++)
            k->sends[p][q] = draw(rng, 3) == 0 ? 0 : draw(rng, largest / (size_t)n);
    }
}

static void draw_world(world *w, uint64_t seed)
{
    uint64_t rng = seed;
    *w = (world){.n = 2 << draw(&rng, 3)};
    w->fault = draw(&rng, 2) ? NO_FAULT : (fault)draw(&rng, FAULTS);
    w->fault_rank = (int)draw(&rng, (uint64_t)w->n);
    w->fault_op = (int)draw(&rng, OPS);
    for (int p = 0; p < PARTITIONS; p++)
        w->queue[p] = draw(&rng, 2) ? AR_QUEUE_THREAD : AR_QUEUE_INLINE;
    for (int i = 0; i < OPS; i++) {
        op *o = &w->ops[i];
        /* A group of one has nobody to notice a fault, so the op with the fault is everybody's. */
        o->partition = i == w->fault_op ? 0 : (int)draw(&rng, PARTITIONS);
        const int size = group_size(o->partition, w->n);
        o->groups = w->n / size;
        for (int g = 0; g < o->groups; g++) {
            draw_case(&o->k[g], &rng, size);
            case_init(&o->k[g], seed + (uint64_t)(100 * i + g));
        }
    }
}

static ar_status fail_task(void *arg)
{
    (void)arg;
    return ar_error_set(AR_ERR_DATA, "a task failed on purpose");
}

/* Does the fault. *done: the rank returns at once with the result. */
static ar_status do_fault(const world *w, ar_comm *c, ar_queue *q, bool *done)
{
    *done = w->fault == RETURN_OK || w->fault == RETURN_ERROR;
    ar_status st = AR_OK;
    switch (w->fault) {
    case RETURN_ERROR:
        return ar_error_set(AR_ERR_DATA, "returns on purpose");
    case ABORT:
        ar_comm_abort(c, AR_ERR_IO, "aborts on purpose");
        return AR_OK;
    case OTHER_KIND:
        st = ar_comm_barrier(c, q, "wrong");
        return st;
    case TASK_FAILS:
        st = ar_queue_host(q, fail_task, NULL);
        return st;
    case TOO_LATE:
        while (!ar_comm_error(c)[0]) /* somebody has had to wait for too long */
            usleep(1000);
        return AR_OK;
    default:
        return AR_OK;
    }
}

static ar_status run_ops(const world *w, ar_comm *const *comm, ar_queue *const *queue, int r)
{
    for (int i = 0; i < OPS; i++) {
        const op *o = &w->ops[i];
        const coll_case *k = &o->k[o->groups == 1 ? 0 : color_of(o->partition, r, w->n)];
        if (w->fault != NO_FAULT && i == w->fault_op && r == w->fault_rank) {
            bool done = false;
            const ar_status st = do_fault(w, comm[0], queue[0], &done);
            if (done || st != AR_OK)
                return st;
            if (w->fault == SKIP)
                continue;
        }
        AR_TRY(case_call(k, comm[o->partition], queue[o->partition], "stress"));
    }
    for (int p = 0; p < PARTITIONS; p++)
        AR_TRY(ar_queue_sync(queue[p], 0));
    return AR_OK;
}

static ar_status rank_main(ar_comm *c, void *arg)
{
    const world *w = arg;
    const int r = ar_comm_rank(c);
    ar_comm *comm[PARTITIONS] = {c};
    ar_queue *queue[PARTITIONS] = {NULL};
    ar_status st = AR_OK;
    for (int p = 0; p < PARTITIONS && st == AR_OK; p++) {
        st = ar_queue_create(&queue[p], w->queue[p], "stress");
        if (st == AR_OK && p > 0)
            st = ar_comm_split(&comm[p], c, color_of(p, r, w->n), p == 3 ? -r : r);
    }
    if (st == AR_OK)
        st = run_ops(w, comm, queue, r);
    for (int p = 0; p < PARTITIONS; p++)
        ar_queue_destroy(queue[p]);
    for (int p = 1; p < PARTITIONS; p++)
        ar_comm_destroy(comm[p]);
    return st;
}

static bool check_world(world *w, uint64_t seed, ar_sim_algorithm algorithm)
{
    const ar_sim_options o = {.algorithm = algorithm, .timeout_ns = w->fault == NO_FAULT ? 0 : FAULT_TIMEOUT_NS};
    const ar_status st = ar_sim_run(w->n, &o, rank_main, w, NULL);
    char why[256] = "";
    bool good = (st == AR_OK) == (w->fault == NO_FAULT);
    if (!good)
        snprintf(why, sizeof why, "returned %s", ar_status_name(st));
    for (int i = 0; good && st == AR_OK && i < OPS; i++) {
        for (int g = 0; good && g < w->ops[i].groups; g++)
            good = case_holds(&w->ops[i].k[g], why, sizeof why);
    }
    if (!good)
        printf("seed %llu: N %d algorithm %d fault %s: %s\n%s\n", (unsigned long long)seed, w->n, (int)algorithm,
               fault_names[w->fault], why, st == AR_OK ? "" : ar_error_message());
    return good;
}

/* A failure elsewhere while a group is in the middle of a collective: nobody may leave it half-way, since what a rank
 * frees after its error is still read by the others. The sanitizers see it if one does. */
static ar_status reduce_until_the_end(ar_comm *g)
{
    enum { COUNT = 6000 };
    ar_queue *q = NULL;
    AR_TRY(ar_queue_create(&q, AR_QUEUE_INLINE, "stress"));
    ar_status st = AR_OK;
    while (st == AR_OK) {
        float *in = calloc(COUNT, sizeof *in), *out = calloc(COUNT, sizeof *out);
        st = in && out ? ar_comm_all_reduce(g, q, (ar_buf){out}, (ar_cbuf){in}, COUNT, AR_F32, AR_SUM, "until the end")
                       : ar_error_set(AR_ERR_MEMORY, "no memory");
        free(in);
        free(out);
    }
    ar_queue_destroy(q);
    return st;
}

static ar_status abort_while_others_reduce(ar_comm *c, void *arg)
{
    const int r = ar_comm_rank(c);
    ar_comm *g = NULL;
    AR_TRY(ar_comm_split(&g, c, r == 3, r));
    ar_status st = AR_OK;
    if (r == 3) {
        usleep((useconds_t) * (const uint64_t *)arg);
        ar_comm_abort(c, AR_ERR_IO, "on purpose");
    } else {
        st = reduce_until_the_end(g);
    }
    ar_comm_destroy(g);
    return st;
}

static int abort_many_times(uint64_t first)
{
    int bad = 0;
    for (uint64_t i = 0; i < 200; i++) {
        uint64_t delay_us = plain_hash(first + i) % 2000;
        const ar_sim_options o = {.algorithm = (ar_sim_algorithm)(i % 4)};
        bad += ar_sim_run(4, &o, abort_while_others_reduce, &delay_us, NULL) != AR_ERR_IO;
    }
    printf("aborts in the middle: %d of 200 wrong\n", bad);
    return bad;
}

int main(int argc, char **argv)
{
    const uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 0) : 1;
    const uint64_t worlds = argc > 2 ? strtoul(argv[2], NULL, 0) : (uint64_t)by_scale(WORLDS / 3, WORLDS / 2, WORLDS);
    int faults[FAULTS] = {0}, bad = 0;
    unsigned long long collectives = 0;
    world *w = malloc(sizeof *w);
    if (!w)
        return 1;
    alarm(280); /* a hang is a failure, and must not need somebody to notice it */
    printf("seeds %llu to %llu\n", (unsigned long long)first, (unsigned long long)(first + worlds - 1));
    for (uint64_t seed = first; seed < first + worlds; seed++) {
        draw_world(w, seed);
        faults[w->fault]++;
        bad += !check_world(w, seed, (ar_sim_algorithm)(seed % 4));
        for (int i = 0; i < OPS; i++) {
            for (int g = 0; g < w->ops[i].groups; g++) {
                collectives++;
                case_fini(&w->ops[i].k[g]);
            }
        }
    }
    free(w);
    printf("%llu collectives; worlds by fault:", collectives);
    for (int f = 0; f < FAULTS; f++)
        printf(" %s %d%s", fault_names[f], faults[f], f + 1 < FAULTS ? "," : "\n");
    printf("%d worlds wrong\n", bad);
    bad += abort_many_times(first);
    return bad == 0 ? 0 : 1;
}
