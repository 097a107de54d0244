/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/comm.h"
#include "anyrank/queue.h"
#include "tests/sim/batch.h"

/* Random worlds: collectives of every kind, size, type and operation on the world, on sub-groups, on groups that
 * overlap and on groups of groups, with many of them in flight at once. Everything is drawn from one seed. */

enum { COMMS = 7, MOST_OPS = 40, NONE = -1 };

/* A communicator of the world or of another one. */
typedef struct partition {
    int parent;             /* NONE: it is the world */
    int color[PLAIN_RANKS]; /* of each rank of the world; NONE: in no group */
    int key[PLAIN_RANKS];
    int groups;
    int group[PLAIN_RANKS]; /* of each rank of the world, or NONE */
    int index[PLAIN_RANKS]; /* of each rank in its group */
    int size[PLAIN_RANKS];  /* of each group */
    ar_queue_kind queue;
} partition;

typedef struct op {
    char tag[16];
    int on;                   /* partition */
    int after[PLAIN_RANKS];   /* each rank's queue waits for its queue of this partition before; NONE: it does not */
    coll_case k[PLAIN_RANKS]; /* one for each group */
} op;

typedef struct rank_state {
    ar_comm *comm[COMMS];
    ar_queue *queue[COMMS];
    ar_event *event[MOST_OPS];
} rank_state;

typedef struct world {
    uint64_t seed;
    int n, op_count;
    ar_sim_options options;
    partition parts[COMMS];
    op ops[MOST_OPS];
    /* What rank `mistaken` does in place of op `mistaken_op`: *i is the last op that it has done, *done: it returns. */
    ar_status (*instead)(const struct world *w, rank_state *s, int *i, bool *done);
    int mistaken, mistaken_op;
} world;

/* Ranks of one color within one group of the parent form a group, in the order of (key, rank in the parent). */
static inline void find_groups(partition *p, const partition *parent, int n)
{
    p->groups = 0;
    for (int r = 0; r < n; r++) {
        p->group[r] = NONE;
        if (p->color[r] == NONE || (parent && parent->group[r] == NONE))
            continue;
        int before = 0, first = r;
        for (int s = 0; s < n; s++) {
            if (p->color[s] != p->color[r] || (parent && parent->group[s] != parent->group[r]))
                continue;
            const int rank_s = parent ? parent->index[s] : s, rank_r = parent ? parent->index[r] : r;
            before += p->key[s] < p->key[r] || (p->key[s] == p->key[r] && rank_s < rank_r);
            first = s < first ? s : first;
        }
        p->group[r] = first == r ? p->groups++ : p->group[first];
        p->index[r] = before;
        p->size[p->group[r]] = first == r ? 1 : p->size[p->group[r]] + 1;
    }
}

/* The world; pairs of neighbours; every other rank; halves in falling order; any ranks in any order, some in none; and
 * groups of the last two's groups. */
static inline void draw_partition(world *w, int which, uint64_t *rng)
{
    partition *p = &w->parts[which];
    p->parent = which == 0 ? NONE : which == 5 ? 3 : which == 6 ? 4 : 0;
    p->queue = draw(rng, 3) ? AR_QUEUE_THREAD : AR_QUEUE_INLINE;
    for (int r = 0; r < w->n; r++) {
        const int any = (int)draw(rng, 4);
        const int colors[COMMS] = {0, r / 2, r % 2, 2 * r / w->n, any - 1, r % 3, any / 2};
        p->color[r] = colors[which];
        p->key[r] = which == 3 ? -r : which == 4 || which == 6 ? (int)draw(rng, 3) : 0;
    }
    find_groups(p, p->parent == NONE ? NULL : &w->parts[p->parent], w->n);
}

/* A world of n ranks with no ops. Its options are the caller's. */
static inline void draw_groups(world *w, uint64_t seed, int n, uint64_t *rng)
{
    *w = (world){.seed = seed, .n = n, .options.schedule_seed = seed};
    w->options.algorithm = (ar_sim_algorithm)(seed % (AR_SIM_LAST + 1));
    for (int c = 0; c < COMMS; c++)
        draw_partition(w, c, rng);
}

/* The next op. `kinds`: one of the first so many. */
static inline void draw_op(world *w, int on, int kinds, uint64_t *rng)
{
    op *o = &w->ops[w->op_count];
    snprintf(o->tag, sizeof o->tag, "op.%d", w->op_count++);
    o->on = on;
    for (int r = 0; r < w->n; r++)
        o->after[r] = draw(rng, 6) ? NONE : (int)draw(rng, COMMS);
    for (int g = 0; g < w->parts[on].groups; g++) {
        const uint64_t which = draw(rng, 100);
        const uint64_t below = which < 70 ? 64 : which < 92 ? 1500 : which < 99 ? 12000 : 40000;
        draw_case(&o->k[g], rng, w->parts[on].size[g], (size_t)draw(rng, below));
        o->k[g].kind = (case_kind)((int)o->k[g].kind % kinds);
        case_init(&o->k[g], *rng);
    }
}

/* On any partition, large groups more often. */
static inline void draw_ops(world *w, int count, uint64_t *rng)
{
    static const int likely[] = {0, 0, 0, 0, 0, 0, 0, 1, 2, 2, 3, 3, 4, 5, 6};
    while (count-- > 0)
        draw_op(w, likely[draw(rng, sizeof likely / sizeof *likely)], CASE_KINDS, rng);
}

static inline ar_status make_groups(const world *w, rank_state *s, int r)
{
    for (int c = 0; c < COMMS; c++) {
        const partition *p = &w->parts[c];
        AR_TRY(ar_queue_create(&s->queue[c], p->queue, "random"));
        if (c == 0 || !s->comm[p->parent])
            continue;
        AR_TRY(ar_comm_split(&s->comm[c], s->comm[p->parent], p->color[r], p->key[r]));
        const int group = p->group[r];
        if ((s->comm[c] != NULL) != (group != NONE))
            return ar_error_set(AR_ERR_DATA, "communicator %d: rank %d is in a group, or in none, by mistake", c, r);
        if (group != NONE && (ar_comm_rank(s->comm[c]) != p->index[r] || ar_comm_size(s->comm[c]) != p->size[group]))
            return ar_error_set(AR_ERR_DATA, "communicator %d: rank %d has a wrong place", c, r);
    }
    return AR_OK;
}

static inline ar_status run_op(const world *w, rank_state *s, int i)
{
    const op *o = &w->ops[i];
    const int r = ar_comm_rank(s->comm[0]), group = w->parts[o->on].group[r];
    if (group == NONE)
        return AR_OK;
    if (o->after[r] != NONE) {
        AR_TRY(ar_event_create(&s->event[i]));
        AR_TRY(ar_event_record(s->event[i], s->queue[o->after[r]]));
        AR_TRY(ar_queue_wait(s->queue[o->on], s->event[i]));
    }
    return case_call(&o->k[group], s->comm[o->on], s->queue[o->on], o->tag);
}

/* Everything is enqueued in one order by all ranks, and a queue waits for what was enqueued before alone; so the first
 * collective of that order that has not ended always can. */
static inline ar_status run_ops(const world *w, rank_state *s)
{
    const int r = ar_comm_rank(s->comm[0]);
    for (int i = 0; i < w->op_count; i++) {
        bool done = false;
        if (w->instead && i == w->mistaken_op && r == w->mistaken)
            AR_TRY(w->instead(w, s, &i, &done));
        else
            AR_TRY(run_op(w, s, i));
        if (done)
            return AR_OK;
    }
    for (int c = 0; c < COMMS; c++)
        AR_TRY(ar_queue_sync(s->queue[c], 0));
    return AR_OK;
}

static inline ar_status world_rank(ar_comm *c, void *arg)
{
    const world *w = arg;
    rank_state s = {.comm = {c}};
    char why[768];
    ar_status st = make_groups(w, &s, ar_comm_rank(c));
    if (st == AR_OK)
        st = run_ops(w, &s);
    snprintf(why, sizeof why, "%s", st == AR_OK ? "" : ar_error_message());
    for (int i = 0; i < COMMS; i++)
        ar_queue_destroy(s.queue[i]);
    for (int i = 0; i < w->op_count; i++)
        ar_event_destroy(s.event[i]);
    for (int i = COMMS - 1; i > 0; i--)
        ar_comm_destroy(s.comm[i]);
    return st == AR_OK ? AR_OK : ar_error_set(st, "%s", why);
}

/* What is done with every case of the world, as long as it is true. */
static inline bool world_each(world *w, bool (*visit)(coll_case *k, void *arg), void *arg)
{
    bool all = true;
    for (int i = 0; i < w->op_count; i++) {
        for (int g = 0; g < w->parts[w->ops[i].on].groups; g++)
            all = all && visit(&w->ops[i].k[g], arg);
    }
    return all;
}

static inline bool visit_holds(coll_case *k, void *why)
{
    return case_holds(k, why, 256);
}

static inline bool visit_reset(coll_case *k, void *unused)
{
    (void)unused;
    for (int r = 0; r < k->n; r++)
        case_reset(k, r);
    return true;
}

static inline bool visit_fini(coll_case *k, void *unused)
{
    (void)unused;
    case_fini(k);
    return true;
}
