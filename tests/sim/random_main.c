/* SPDX-License-Identifier: Apache-2.0 */
#include <unistd.h>

#include "tests/sim/batch.h"
#include "tests/support/scoped.h"
#include "tests/support/small.h"

OWNER(coll_case, case_fini)

/* 10,000 collectives of random kind, size, type, operation and group against the plain definitions: on the world, on
 * sub-groups, on groups that overlap and on groups of groups, with many of them in flight at once. A program of its
 * own, so that it runs under the thread and address sanitizers. usage: random [first seed [collectives]] */

enum { COMMS = 7, OPS = 40, COLLECTIVES = 10000, ALGORITHMS = 4, NONE = -1 };
#define TIMEOUT_NS ((uint64_t)120000000000) /* a busy machine is no fault */
static const char *const algorithm_names[ALGORITHMS] = {"auto", "direct", "ring", "last"};

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
    int on;                   /* partition */
    int after[PLAIN_RANKS];   /* each rank's queue waits for its queue of this partition before; NONE: it does not */
    coll_case k[PLAIN_RANKS]; /* one for each group */
} op;

typedef struct world {
    int n;
    ar_sim_options options;
    partition parts[COMMS];
    op ops[OPS];
} world;

typedef struct histogram {
    int kinds[CASE_KINDS][PLAIN_DTYPES], ops[PLAIN_OPS], sizes[PLAIN_RANKS + 1], algorithms[ALGORITHMS], queues[2],
        in_place, special, verified, explored, worlds, collectives;
} histogram;

/* --- drawing ------------------------------------------------------------------------------------------------------ */

/* Ranks of one color within one group of the parent form a group, in the order of (key, rank in the parent). */
static void find_groups(partition *p, const partition *parent, int n)
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
static void draw_partition(world *w, int which, uint64_t *rng)
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

static size_t draw_size(uint64_t *rng)
{
    const uint64_t which = draw(rng, 100);
    return (size_t)draw(rng, which < 70 ? 64 : which < 92 ? 1500 : which < 99 ? 12000 : 40000);
}

static void draw_world(world *w, uint64_t seed)
{
    uint64_t rng = seed;
    w->n = draw(&rng, 12) == 0 ? PLAIN_RANKS : (int)draw(&rng, 8) + 1;
    w->options = (ar_sim_options){.algorithm = (ar_sim_algorithm)(seed % ALGORITHMS),
                                  .timeout_ns = TIMEOUT_NS,
                                  .verify_transfers = draw(&rng, 8) == 0,
                                  .explore = draw(&rng, 8) == 0,
                                  .schedule_seed = seed};
    for (int c = 0; c < COMMS; c++)
        draw_partition(w, c, &rng);
    for (int i = 0; i < OPS; i++) {
        static const int likely[] = {0, 0, 0, 0, 0, 0, 0, 1, 2, 2, 3, 3, 4, 5, 6}; /* large groups more often */
        op *o = &w->ops[i];
        o->on = likely[draw(&rng, sizeof likely / sizeof *likely)];
        for (int r = 0; r < w->n; r++)
            o->after[r] = draw(&rng, 6) ? NONE : (int)draw(&rng, COMMS);
        for (int g = 0; g < w->parts[o->on].groups; g++) {
            draw_case(&o->k[g], &rng, w->parts[o->on].size[g], draw_size(&rng));
            case_init(&o->k[g], rng);
        }
    }
}

/* --- running ------------------------------------------------------------------------------------------------------ */

typedef struct rank_state {
    ar_comm *comm[COMMS];
    ar_queue *queue[COMMS];
    ar_event *event[OPS];
} rank_state;

static ar_status make_groups(const world *w, rank_state *s, int r)
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

/* Everything is enqueued in one order by all ranks, and a queue waits for what was enqueued before alone; so the first
 * collective of that order that has not ended always can. */
static ar_status run_ops(const world *w, rank_state *s, int r)
{
    for (int i = 0; i < OPS; i++) {
        const op *o = &w->ops[i];
        const int group = w->parts[o->on].group[r];
        if (group == NONE)
            continue;
        if (o->after[r] != NONE) {
            AR_TRY(ar_event_create(&s->event[i]));
            AR_TRY(ar_event_record(s->event[i], s->queue[o->after[r]]));
            AR_TRY(ar_queue_wait(s->queue[o->on], s->event[i]));
        }
        AR_TRY(case_call(&o->k[group], s->comm[o->on], s->queue[o->on], "random"));
    }
    for (int c = 0; c < COMMS; c++)
        AR_TRY(ar_queue_sync(s->queue[c], 0));
    return AR_OK;
}

static ar_status rank_main(ar_comm *c, void *arg)
{
    const world *w = arg;
    const int r = ar_comm_rank(c);
    rank_state s = {.comm = {c}};
    ar_status st = make_groups(w, &s, r);
    if (st == AR_OK)
        st = run_ops(w, &s, r);
    for (int i = 0; i < COMMS; i++)
        ar_queue_destroy(s.queue[i]);
    for (int i = 0; i < OPS; i++)
        ar_event_destroy(s.event[i]);
    for (int i = COMMS - 1; i > 0; i--)
        ar_comm_destroy(s.comm[i]);
    return st;
}

/* --- counting and checking ---------------------------------------------------------------------------------------- */

static int dtype_index(ar_dtype t)
{
    int i = 0;
    while (plain_dtypes[i] != t)
        i++;
    return i;
}

static void count_case(histogram *h, const world *w, const partition *p, const coll_case *k)
{
    const bool reduces = k->kind == ALL_REDUCE || k->kind == REDUCE_SCATTER || k->kind == REDUCE;
    h->kinds[k->kind][dtype_index(k->dtype)]++;
    h->ops[k->op] += reduces;
    h->sizes[k->n]++;
    h->algorithms[w->options.algorithm]++;
    h->queues[p->queue]++;
    h->in_place += case_shares(k, k->root);
    h->special += k->special;
    h->verified += w->options.verify_transfers;
    h->explored += w->options.explore;
    h->collectives++;
}

/* Runs the world, checks and counts all its collectives, and frees them. */
static bool check_world(world *w, uint64_t seed, histogram *h)
{
    char why[256] = "";
    const ar_status st = ar_sim_run(w->n, &w->options, rank_main, w, NULL);
    bool good = st == AR_OK;
    for (int i = 0; i < OPS; i++) {
        const partition *p = &w->parts[w->ops[i].on];
        for (int g = 0; g < p->groups; g++) {
            OWNED(case_fini) coll_case *k = &w->ops[i].k[g];
            good = good && case_holds(k, why, sizeof why);
            count_case(h, w, p, k);
        }
    }
    h->worlds++;
    if (!good)
        printf("seed %llu: N %d, algorithm %s%s%s: %s %s\n", (unsigned long long)seed, w->n,
               algorithm_names[w->options.algorithm], w->options.verify_transfers ? ", verified" : "",
               w->options.explore ? ", explored" : "", why, st == AR_OK ? "" : ar_error_message());
    return good;
}

static void print_histogram(const histogram *h)
{
    printf("%-15s", "");
    for (int t = 0; t < PLAIN_DTYPES; t++)
        printf("%6s", ar_dtype_name(plain_dtypes[t]));
    for (int k = 0; k < CASE_KINDS; k++) {
        printf("\n%-15s", case_names[k]);
        for (int t = 0; t < PLAIN_DTYPES; t++)
            printf("%6d", h->kinds[k][t]);
    }
    printf("\nreductions: sum %d, max %d, min %d, prod %d, avg %d\nranks:", h->ops[AR_SUM], h->ops[AR_MAX],
           h->ops[AR_MIN], h->ops[AR_PROD], h->ops[AR_AVG]);
    for (int n = 1; n <= PLAIN_RANKS; n++)
        printf(" %d: %d%s", n, h->sizes[n], n < PLAIN_RANKS ? "," : "\n");
    printf("algorithms:");
    for (int a = 0; a < ALGORITHMS; a++)
        printf(" %s %d%s", algorithm_names[a], h->algorithms[a], a < ALGORITHMS - 1 ? "," : "\n");
    printf("queues: inline %d, threads %d; in place %d; with NaN and infinities %d; transfers verified %d; schedule "
           "explored %d\n",
           h->queues[AR_QUEUE_INLINE], h->queues[AR_QUEUE_THREAD], h->in_place, h->special, h->verified, h->explored);
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
    alarm(argc > 2 ? 0 : 290); /* a hang is a failure, and must not need somebody to notice it */
    while (h.collectives < collectives) {
        const uint64_t seed = first + (uint64_t)h.worlds;
        draw_world(w, seed);
        bad += !check_world(w, seed, &h);
    }
    print_histogram(&h);
    printf("%d collectives in %d worlds from seed %llu: %d worlds wrong\n", h.collectives, h.worlds,
           (unsigned long long)first, bad);
    if (collectives >= COLLECTIVES && missing(&h) > 0)
        printf("%d of the kinds, types, operations, sizes and algorithms did not occur\n", missing(&h));
    return bad == 0 && (collectives < COLLECTIVES || missing(&h) == 0) ? 0 : 1;
}
