/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <unistd.h>

#include "ref/comm/comm_private.h"
#include "sim/sim_private.h"
#include "tests/sim/world.h"

/* Random worlds for the soak, with faults of the transport and mistakes of the program. */

enum { SOAK_RANKS = 8, SOAK_OPS = 14, SOAK_FAULTS = 3 };
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

typedef struct soak_world {
    world w; /* first: what its ranks are given */
    ar_sim_fault fault[SOAK_FAULTS];
    mistake mistake;
    /* What each rank returned. */
    ar_status st[SOAK_RANKS];
    char message[SOAK_RANKS][768];
} soak_world;

static inline ar_status fail_task(void *arg)
{
    (void)arg;
    return ar_error_set(AR_ERR_DATA, "a task failed on purpose");
}

/* One element less; where there is none, another kind. */
static inline ar_status other_count(const world *w, rank_state *s, int i)
{
    coll_case other = w->ops[i].k[0];
    size_t *count = other.kind == ALL_REDUCE ? &other.count : &other.counts[w->n - 1];
    if (*count == 0)
        return ar_comm_barrier(s->comm[0], s->queue[0], w->ops[i].tag);
    --*count;
    return case_call(&other, s->comm[0], s->queue[0], w->ops[i].tag);
}

static inline ar_status do_mistake(const world *w, rank_state *s, int *i, bool *done)
{
    const int at = *i;
    const mistake m = ((const soak_world *)(const void *)w)->mistake;
    *done = m == RETURN_OK;
    switch (m) {
    case RETURN_ERROR:
        return ar_error_set(AR_ERR_DATA, "returns on purpose");
    case ABORT:
        ari_comm_abort(s->comm[0], AR_ERR_IO, "aborts on purpose");
        return AR_OK;
    case OTHER_KIND:
        return ar_comm_barrier(s->comm[0], s->queue[0], w->ops[at].tag);
    case OTHER_COUNT:
        return other_count(w, s, at);
    case TASK_FAILS:
        return ar_queue_host(s->queue[0], fail_task, NULL);
    case TOO_LATE:
        while (!ari_comm_error(s->comm[0])[0]) /* somebody has had to wait for too long */
            usleep(1000);
        return AR_OK;
    case OTHER_ORDER:
        ++*i;
        AR_TRY(run_op(w, s, at + 1));
        return run_op(w, s, at);
    default:
        return AR_OK;
    }
}

static inline void draw_faults(soak_world *w, uint64_t *rng)
{
    const size_t count = (size_t)draw(rng, SOAK_FAULTS + 1);
    bool may_miss = false;
    for (size_t i = 0; i < count; i++) {
        ar_sim_fault *f = &w->fault[i];
        *f = ari_sim_fault_draw(draw(rng, UINT64_MAX), w->w.n, SOAK_OPS + 6, SOAK_MS);
        if (f->kind == AR_SIM_DELAY && draw(rng, 3) == 0)
            f->ns = 700 * SOAK_MS; /* past every timeout */
        may_miss |= f->kind == AR_SIM_STALL || (f->kind == AR_SIM_DELAY && f->ns > SOAK_MS);
    }
    w->w.options.faults = w->fault;
    w->w.options.fault_count = count;
    may_miss |= w->mistake == TOO_LATE;
    /* Short where somebody is to be missed; elsewhere a busy machine must be no fault. */
    w->w.options.timeout_ns = may_miss ? (100 + draw(rng, 200)) * SOAK_MS : 0;
}

/* A mistake is made in an op of the whole world, in which a rank that does something else is noticed, as in the
 * next. */
static inline void draw_mistake(soak_world *w, uint64_t *rng)
{
    w->mistake = w->w.n > 1 && draw(rng, 3) == 0 ? (mistake)(1 + draw(rng, MISTAKES - 1)) : NO_MISTAKE;
    if (w->mistake == TOO_LATE && w->w.options.explore) /* where no time passes */
        w->mistake = SKIP_ONE;
    w->w.instead = w->mistake == NO_MISTAKE ? NULL : do_mistake;
    w->w.mistaken = (int)draw(rng, (uint64_t)w->w.n);
    w->w.mistaken_op = (int)draw(rng, SOAK_OPS - 1);
}

static inline void draw_soak(soak_world *w, uint64_t seed)
{
    uint64_t rng = seed;
    *w = (soak_world){.mistake = NO_MISTAKE};
    draw_groups(&w->w, seed, 1 + (int)draw(&rng, SOAK_RANKS), &rng);
    w->w.options.verify_transfers = draw(&rng, 2) != 0;
    w->w.options.explore = draw(&rng, 5) == 0;
    draw_mistake(w, &rng);
    draw_ops(&w->w, w->mistake == NO_MISTAKE ? SOAK_OPS : w->w.mistaken_op, &rng);
    for (int i = 0; i < 2 && w->w.op_count < SOAK_OPS; i++)
        draw_op(&w->w, 0, 2, &rng); /* takes counts, and the whole world */
    draw_ops(&w->w, SOAK_OPS - w->w.op_count, &rng);
    draw_faults(w, &rng);
}

/* Collectives that the rank takes part in where nothing goes wrong: splits, then what it calls. */
static inline uint64_t soak_collectives(const soak_world *soak, int r)
{
    const world *w = &soak->w;
    uint64_t n = 0;
    for (int c = 1; c < COMMS; c++)
        n += w->parts[w->parts[c].parent].group[r] != NONE;
    for (int i = 0; i < w->op_count; i++) {
        const int group = w->parts[w->ops[i].on].group[r];
        const coll_case *k = &w->ops[i].k[group == NONE ? 0 : group];
        n += group == NONE ? 0 : k->kind == SEND_RECV ? 2 * (uint64_t)(k->n - 1) : 1;
    }
    return n;
}

static inline ar_status soak_rank(ar_comm *c, void *arg)
{
    soak_world *w = arg;
    const int r = ar_comm_rank(c);
    w->st[r] = world_rank(c, &w->w);
    snprintf(w->message[r], sizeof w->message[r], "%s", w->st[r] == AR_OK ? "" : ar_error_message());
    return w->st[r];
}
