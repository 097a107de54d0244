/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_SIM_SOAK_WORLD_H
#define TESTS_SIM_SOAK_WORLD_H

#include <unistd.h>

#include "ref/core/clock.h"
#include "tests/sim/batch.h"

/* Random worlds for the soak: collectives of every kind on overlapping groups and queues, with faults of the transport
 * and mistakes of the program. Everything is drawn from one seed. */

enum { SOAK_RANKS = 8, SOAK_PARTITIONS = 4, SOAK_OPS = 14, SOAK_FAULTS = 3 };
#define SOAK_MS ((uint64_t)1000000)

typedef enum mistake {
    NO_MISTAKE,
    RETURN_OK,
    RETURN_ERROR,
    ABORT,
    OTHER_KIND,
    OTHER_COUNT,
    OTHER_ORDER,
    SKIP_ONE,
    TASK_FAILS,
    TOO_LATE,
    MISTAKES
} mistake;
static const char *const mistake_names[MISTAKES] = {"none",       "return ok",   "return error", "abort",
                                                    "other kind", "other count", "other order",  "skip one",
                                                    "task fails", "too late"};

typedef struct soak_op {
    int partition;
    char tag[16];
    coll_case k[SOAK_RANKS]; /* one for each group of the partition, by color */
} soak_op;

typedef struct soak_world {
    uint64_t seed;
    int n;
    ar_sim_options o;
    ar_sim_fault fault[SOAK_FAULTS];
    mistake mistake;
    int mistaken, mistaken_op; /* rank; op, of the whole world */
    int color[SOAK_PARTITIONS][SOAK_RANKS], size[SOAK_PARTITIONS][SOAK_RANKS];
    bool falling[SOAK_PARTITIONS]; /* groups in falling order of ranks */
    ar_queue_kind queue[SOAK_PARTITIONS];
    soak_op op[SOAK_OPS];
    /* What each rank returned, and when. */
    ar_status st[SOAK_RANKS];
    char message[SOAK_RANKS][768];
    uint64_t returned_ns[SOAK_RANKS];
} soak_world;

/* --- drawing ------------------------------------------------------------------------------------------------------ */

static inline void draw_groups(soak_world *w, uint64_t *rng)
{
    for (int p = 0; p < SOAK_PARTITIONS; p++) {
        const int colors = p == 0 ? 1 : 1 + (int)draw(rng, 3);
        w->falling[p] = p > 0 && draw(rng, 2);
        w->queue[p] = draw(rng, 2) ? AR_QUEUE_THREAD : AR_QUEUE_INLINE;
        for (int r = 0; r < w->n; r++) {
            w->color[p][r] = (int)draw(rng, (uint64_t)colors);
            w->size[p][w->color[p][r]]++;
        }
    }
}

/* An op of the whole world, in which a rank that does something else is noticed. */
static inline void draw_mistake(soak_world *w, uint64_t *rng)
{
    w->mistake = w->n > 1 && draw(rng, 3) == 0 ? (mistake)(1 + draw(rng, MISTAKES - 1)) : NO_MISTAKE;
    if (w->mistake == TOO_LATE && w->o.explore) /* where no time passes */
        w->mistake = SKIP_ONE;
    w->mistaken = (int)draw(rng, (uint64_t)w->n);
    w->mistaken_op = (int)draw(rng, SOAK_OPS - 1);
}

static inline void draw_op(soak_world *w, int i, uint64_t *rng)
{
    soak_op *o = &w->op[i];
    const bool everybody = w->mistake != NO_MISTAKE && (i == w->mistaken_op || i == w->mistaken_op + 1);
    o->partition = everybody ? 0 : (int)draw(rng, SOAK_PARTITIONS);
    snprintf(o->tag, sizeof o->tag, "op.%d", i);
    for (int g = 0; g < SOAK_RANKS; g++) {
        coll_case *k = &o->k[g];
        if (w->size[o->partition][g] == 0)
            continue;
        draw_case(k, rng, w->size[o->partition][g], draw(rng, draw(rng, 12) == 0 ? 9000 : 60));
        if (everybody)
            k->kind = (case_kind)draw(rng, 2); /* takes counts, and the whole group */
        case_init(k, w->seed + (uint64_t)(100 * i + g));
    }
}

static inline void draw_faults(soak_world *w, uint64_t *rng)
{
    const size_t count = (size_t)draw(rng, SOAK_FAULTS + 1);
    bool may_miss = false;
    for (size_t i = 0; i < count; i++) {
        ar_sim_fault *f = &w->fault[i];
        *f = ar_sim_fault_draw(draw(rng, UINT64_MAX), w->n, SOAK_OPS + 6, SOAK_MS);
        if (f->kind == AR_SIM_DELAY && draw(rng, 3) == 0)
            f->ns = 700 * SOAK_MS; /* past every timeout */
        may_miss |= f->kind == AR_SIM_STALL || (f->kind == AR_SIM_DELAY && f->ns > SOAK_MS);
    }
    w->o.faults = w->fault;
    w->o.fault_count = count;
    may_miss |= w->mistake == TOO_LATE;
    /* Short where somebody is to be missed; elsewhere a busy machine must be no fault. */
    w->o.timeout_ns = may_miss ? (100 + draw(rng, 200)) * SOAK_MS : 0;
}

static inline void draw_soak(soak_world *w, uint64_t seed)
{
    uint64_t rng = seed;
    *w = (soak_world){.seed = seed, .n = 1 + (int)draw(&rng, SOAK_RANKS)};
    w->o.algorithm = (ar_sim_algorithm)draw(&rng, 4);
    w->o.verify_transfers = draw(&rng, 2) != 0;
    w->o.explore = draw(&rng, 5) == 0;
    w->o.schedule_seed = seed;
    draw_groups(w, &rng);
    draw_mistake(w, &rng);
    for (int i = 0; i < SOAK_OPS; i++)
        draw_op(w, i, &rng);
    draw_faults(w, &rng);
}

static inline void soak_fini(soak_world *w)
{
    for (int i = 0; i < SOAK_OPS; i++) {
        for (int g = 0; g < SOAK_RANKS; g++) {
            if (w->size[w->op[i].partition][g] > 0)
                case_fini(&w->op[i].k[g]);
        }
    }
}

/* Everything as it was before the run. */
static inline void soak_reset(soak_world *w)
{
    for (int i = 0; i < SOAK_OPS; i++) {
        for (int g = 0; g < SOAK_RANKS; g++) {
            for (int r = 0; r < w->size[w->op[i].partition][g]; r++)
                case_reset(&w->op[i].k[g], r);
        }
    }
}

/* Collectives that the rank takes part in where nothing goes wrong: splits, then what it calls. */
static inline uint64_t soak_collectives(const soak_world *w, int r)
{
    uint64_t n = SOAK_PARTITIONS - 1;
    for (int i = 0; i < SOAK_OPS; i++) {
        const int p = w->op[i].partition;
        const coll_case *k = &w->op[i].k[w->color[p][r]];
        n += k->kind == SEND_RECV ? 2 * (uint64_t)(k->n - 1) : 1;
    }
    return n;
}

/* --- running ------------------------------------------------------------------------------------------------------ */

static inline ar_status soak_call(const soak_world *w, int i, ar_comm *const *comm, ar_queue *const *queue)
{
    const soak_op *o = &w->op[i];
    const int r = ar_comm_rank(comm[0]);
    return case_call(&o->k[w->color[o->partition][r]], comm[o->partition], queue[o->partition], o->tag);
}

static inline ar_status fail_task(void *arg)
{
    (void)arg;
    return ar_error_set(AR_ERR_DATA, "a task failed on purpose");
}

/* One element less; where there is none, another kind. */
static inline ar_status soak_other_count(const soak_world *w, int i, ar_comm *const *comm, ar_queue *const *queue)
{
    coll_case other = w->op[i].k[0];
    size_t *count = other.kind == ALL_REDUCE ? &other.count : &other.counts[w->n - 1];
    if (*count == 0)
        return ar_comm_barrier(comm[0], queue[0], w->op[i].tag);
    --*count;
    return case_call(&other, comm[0], queue[0], w->op[i].tag);
}

/* *next: the op to go on with. *done: the rank returns at once. */
static inline ar_status do_mistake(const soak_world *w, int i, ar_comm *const *comm, ar_queue *const *queue, int *next,
                                   bool *done)
{
    *next = i + 1;
    *done = w->mistake == RETURN_OK || w->mistake == RETURN_ERROR;
    switch (w->mistake) {
    case RETURN_ERROR:
        return ar_error_set(AR_ERR_DATA, "returns on purpose");
    case ABORT:
        ar_comm_abort(comm[0], AR_ERR_IO, "aborts on purpose");
        return AR_OK;
    case OTHER_KIND:
        return ar_comm_barrier(comm[0], queue[0], w->op[i].tag);
    case OTHER_COUNT:
        return soak_other_count(w, i, comm, queue);
    case TASK_FAILS:
        return ar_queue_host(queue[0], fail_task, NULL);
    case TOO_LATE:
        while (!ar_comm_error(comm[0])[0]) /* somebody has had to wait for too long */
            usleep(1000);
        return AR_OK;
    case OTHER_ORDER:
        *next = i + 2;
        AR_TRY(soak_call(w, i + 1, comm, queue));
        return soak_call(w, i, comm, queue);
    default:
        return AR_OK;
    }
}

static inline ar_status soak_ops(const soak_world *w, ar_comm *const *comm, ar_queue *const *queue)
{
    const int r = ar_comm_rank(comm[0]);
    for (int i = 0; i < SOAK_OPS;) {
        int next = i + 1;
        bool done = false;
        if (w->mistake != NO_MISTAKE && i == w->mistaken_op && r == w->mistaken) {
            const ar_status st = do_mistake(w, i, comm, queue, &next, &done);
            if (done || st != AR_OK)
                return st;
        } else {
            AR_TRY(soak_call(w, i, comm, queue));
        }
        i = next;
    }
    for (int p = 0; p < SOAK_PARTITIONS; p++)
        AR_TRY(ar_queue_sync(queue[p], 0));
    return AR_OK;
}

static inline ar_status soak_rank(ar_comm *c, void *arg)
{
    soak_world *w = arg;
    const int r = ar_comm_rank(c);
    ar_comm *comm[SOAK_PARTITIONS] = {c};
    ar_queue *queue[SOAK_PARTITIONS] = {NULL};
    ar_status st = AR_OK;
    for (int p = 0; p < SOAK_PARTITIONS && st == AR_OK; p++) {
        st = ar_queue_create(&queue[p], w->queue[p], "soak");
        if (st == AR_OK && p > 0)
            st = ar_comm_split(&comm[p], c, w->color[p][r], w->falling[p] ? -r : r);
    }
    if (st == AR_OK)
        st = soak_ops(w, comm, queue);
    w->returned_ns[r] = ari_now_ns();
    snprintf(w->message[r], sizeof w->message[r], "%s", st == AR_OK ? "" : ar_error_message());
    for (int p = 0; p < SOAK_PARTITIONS; p++)
        ar_queue_destroy(queue[p]);
    for (int p = 1; p < SOAK_PARTITIONS; p++)
        ar_comm_destroy(comm[p]);
    w->st[r] = st;
    return st == AR_OK ? AR_OK : ar_error_set(st, "%s", w->message[r]);
}

#endif
