/* SPDX-License-Identifier: Apache-2.0 */
#include <unistd.h>

#include "ref/comm/comm_private.h"
#include "tests/sim/plain.h"
#include "tests/support/small.h"
#include "tests/support/test.h"

/* The ring is a ring: at step s of the reduce-scatter rank r sends chunk (r - 1 - s) mod N, at step s of the all-gather
 * chunk (r - s) mod N, and it reads nobody's memory but its left neighbour's. A chain is the ring without the hop that
 * ends in the first of its ranks. */
enum { MOST_STEPS = 64 };

typedef struct log_of_rank {
    ar_ring_step step[MOST_STEPS];
    int n;
} log_of_rank;

typedef struct ring_run {
    coll_case k;
    log_of_rank log[8]; /* each rank's thread writes its own */
    uint64_t read[8], written[8];
    int slow_rank, slow_step; /* this rank pauses after this step; -1: none */
} ring_run;

static void note_step(void *user, const ar_ring_step *step)
{
    ring_run *run = user;
    log_of_rank *log = &run->log[step->rank];
    if (step->rank == run->slow_rank && log->n == run->slow_step)
        usleep(2000);
    if (log->n < MOST_STEPS)
        log->step[log->n++] = *step;
}

static ar_status run_case(ar_comm *c, void *arg)
{
    ring_run *run = arg;
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    AR_TRY(ar_queue_create(&q, AR_QUEUE_INLINE, "test"));
    const ar_status st = case_call(&run->k, c, q, "ring");
    const int r = ar_comm_rank(c);
    ar_comm_counted(c, &run->read[r], &run->written[r]);
    return st;
}

static void start_ring(ring_run *run)
{
    case_init(&run->k, 3);
    const ar_sim_options o = {.algorithm = AR_SIM_RING, .ring_trace = note_step, .ring_trace_user = run};
    cr_assert_ok(ar_sim_run(run->k.n, &o, run_case, run, NULL));
}

static void run_ring(ring_run *run, case_kind kind, int n, size_t count)
{
    *run = (ring_run){.k = {.kind = kind, .dtype = AR_F32, .op = AR_SUM, .n = n, .count = count}, .slow_rank = -1};
    for (int r = 0; r < n; r++)
        run->k.counts[r] = kind == ALL_REDUCE ? 0 : count + (size_t)r;
    start_ring(run);
}

static int modulo(int a, int n)
{
    return ((a % n) + n) % n;
}

static size_t chunk_bytes(const ring_run *run, int c)
{
    size_t start, size;
    ari_comm_slice(run->k.count, run->k.n, c, &start, &size);
    return 4 * (run->k.kind == ALL_REDUCE ? size : run->k.counts[c]);
}

/* `first`: the sent chunk of step s is r + first - s. */
static void check_phase(const ring_run *run, int r, int at, int phase, int first)
{
    const int n = run->k.n;
    for (int s = 0; s < n - 1; s++) {
        const ar_ring_step *e = &run->log[r].step[at + s];
        cr_assert_eq(e->rank, r);
        cr_assert_eq(e->phase, phase);
        cr_assert_eq(e->step, s);
        cr_assert_eq(e->chunk, modulo(r + first - s, n), "N %d rank %d phase %d step %d sends %d", n, r, phase, s,
                     e->chunk);
        cr_assert_eq(e->read_from, modulo(r - 1, n), "N %d rank %d reads rank %d", n, r, e->read_from);
        cr_assert_eq(e->read_chunk, modulo(r - 1 + first - s, n), "N %d rank %d receives %d", n, r, e->read_chunk);
        cr_assert_eq(e->bytes, chunk_bytes(run, e->read_chunk));
    }
}

/* What was traced is all that was read, and nothing was written into another rank's memory. */
static void check_bytes(ring_run *run)
{
    for (int r = 0; r < run->k.n; r++) {
        uint64_t traced = 0;
        for (int i = 0; i < run->log[r].n; i++)
            traced += run->log[r].step[i].bytes;
        cr_assert_eq(run->read[r], traced);
        cr_assert_eq(run->written[r], 0);
    }
    case_fini(&run->k);
}

static const int sizes[] = {1, 2, 3, 4, 5, 7, 8};

Test(ring, a_sum_takes_the_first_round_a_gather_the_second_and_an_all_reduce_both)
{
    static ring_run run;
    static const struct {
        case_kind kind;
        size_t count;
        int rounds, phase, first; /* of the first round */
    } kinds[] = {{ALL_REDUCE, 29, 2, 0, -1}, {REDUCE_SCATTER, 3, 1, 0, -1}, {ALL_GATHER, 3, 1, 1, 0}};
    for (size_t i = 0; i < 3 * sizeof sizes / sizeof *sizes; i++) {
        const int n = sizes[i / 3], rounds = kinds[i % 3].rounds;
        run_ring(&run, kinds[i % 3].kind, n, kinds[i % 3].count);
        for (int r = 0; r < n; r++) {
            cr_assert_eq(run.log[r].n, rounds * (n - 1));
            check_phase(&run, r, 0, kinds[i % 3].phase, kinds[i % 3].first);
            if (rounds == 2)
                check_phase(&run, r, n - 1, 1, 0);
        }
        check_bytes(&run);
    }
}

enum { SEGMENT = 65536 }; /* elements of F32 that travel at once */

/* The rank p places behind the root receives segment s-p+1 at step s, and sends segment s-p where it has one and is
 * not the end. */
static void check_chain(ring_run *run)
{
    const int n = run->k.n;
    const size_t count = run->k.count;
    const int segments = (int)((count + SEGMENT - 1) / SEGMENT);
    for (int r = 0; r < n; r++) {
        const int place = modulo(r - run->k.root, n);
        cr_assert_eq(run->log[r].n, place == 0 ? 0 : segments);
        for (int i = 0; i < run->log[r].n; i++) {
            const ar_ring_step *e = &run->log[r].step[i];
            const size_t rest = count - (size_t)i * SEGMENT;
            cr_assert_eq(e->rank, r);
            cr_assert_eq(e->phase, 1);
            cr_assert_eq(e->step, i + place - 1);
            cr_assert_eq(e->read_from, modulo(r - 1, n), "N %d rank %d reads rank %d", n, r, e->read_from);
            cr_assert_eq(e->read_chunk, i);
            cr_assert_eq(e->chunk, place < n - 1 ? i - 1 : -1, "N %d rank %d step %d sends %d", n, r, i, e->chunk);
            cr_assert_eq(e->bytes, 4 * (rest < SEGMENT ? rest : SEGMENT));
        }
    }
}

Test(ring, a_broadcast_is_a_chain_that_begins_at_the_root)
{
    static ring_run run;
    static const size_t counts[] = {0, 1, 29, SEGMENT, SEGMENT + 1, 3 * SEGMENT + 5};
    for (int n = 2; n < 6; n++) {
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
            run = (ring_run){.slow_rank = -1};
            run.k = (coll_case){.kind = BROADCAST, .dtype = AR_F32, .n = n, .count = counts[i], .root = n - 1};
            start_ring(&run);
            check_chain(&run);
            check_bytes(&run);
        }
    }
}

/* A rank that falls behind is overtaken as far as the steps allow: what it has not read yet must still be there. */
static void run_slow(coll_case k, int rank, int step)
{
    static ring_run run;
    char why[256];
    run = (ring_run){.k = k, .slow_rank = rank, .slow_step = step};
    start_ring(&run);
    cr_assert(case_holds(&run.k, why, sizeof why), "rank %d slow after step %d: %s", rank, step, why);
    case_fini(&run.k);
}

Test(ring, a_slow_rank_at_any_step_does_not_change_a_bit)
{
    static const case_kind kinds[] = {ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER};
    for (int variant = 0; variant < 3 * 2 * 3; variant++) {
        const int n = 3 + variant / 6;
        coll_case k = {.kind = kinds[variant / 2 % 3], .dtype = AR_F32, .n = n, .count = 101, .in_place = variant % 2};
        for (int r = 0; r < n; r++)
            k.counts[r] = k.kind == ALL_REDUCE ? 0 : (size_t)(20 + r);
        for (int slow = 0; slow < n * 2 * (n - 1); slow++)
            run_slow(k, slow % n, slow / n);
    }
}

Test(ring, a_slow_rank_in_a_chain_does_not_change_a_bit)
{
    const coll_case k = {.kind = BROADCAST, .dtype = AR_F32, .n = 4, .count = 5 * SEGMENT + 7, .root = 2};
    for (int slow = 0; slow < 4 * 4; slow += by_scale(3, 3, 1))
        run_slow(k, slow % 4, slow / 4);
}
