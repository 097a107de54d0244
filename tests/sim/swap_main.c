/* SPDX-License-Identifier: Apache-2.0 */
#include <sched.h>
#include <stdint.h>
#include <stdio.h>

#include "anyrank/sim.h"
#include "ref/core/os/threads.h"
#include "ref/core/wait.h"
#include "tests/support/scoped.h"
#include "tests/support/small.h"

/* Two ranks that each have a core meet for short sums without a gate, and turn back to it where one is late or calls
 * something else. Here they come in all possible orders: with pauses of random length between calls, among longer calls
 * and other kinds, until one of them calls something else. usage: swap [rounds [seed]] */

enum { CALLS = 4000, MOST = 700 };

typedef struct round {
    uint64_t seed;
    int odd_call; /* the call in which rank 1 differs; CALLS: none */
    int odd_way;
} round;

static uint64_t draw(uint64_t *state, uint64_t below)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (*state >> 33) % below;
}

static void pause_for(uint64_t kind, uint64_t turns)
{
    if (kind == 0)
        sched_yield();
    for (uint64_t i = 0; kind == 1 && i < turns; i++)
        ari_wait_relax();
}

static ar_status check_sum(const int32_t *out, size_t count, int call)
{
    for (size_t i = 0; i < count; i++) {
        const int32_t expected = 3 * call + 2 * (int32_t)i + 1;
        if (out[i] != expected)
            return ar_error_set(AR_ERR_DATA, "call %d element %zu: %d in place of %d", call, i, out[i], expected);
    }
    return AR_OK;
}

static ar_status differ(ar_comm *c, ar_queue *q, int way, int32_t *x, size_t count)
{
    const ar_buf out = {x};
    switch (way) {
    case 0:
        return ar_comm_all_reduce(c, q, out, ar_const(out), count + 1, AR_I32, AR_SUM, "sum");
    case 1:
        return ar_comm_all_reduce(c, q, out, ar_const(out), count, AR_I32, AR_MAX, "sum");
    case 2:
        return ar_comm_all_reduce(c, q, out, ar_const(out), count, AR_F32, AR_SUM, "sum");
    case 3:
        return ar_comm_all_reduce(c, q, out, ar_const(out), count, AR_I32, AR_SUM, "another tag");
    default:
        return ar_comm_barrier(c, q, "barrier");
    }
}

static ar_status sums(ar_comm *c, ar_queue *q, const round *r)
{
    const int rank = ar_comm_rank(c);
    uint64_t alike = r->seed, own = r->seed + 77 * (uint64_t)(rank + 1);
    int32_t in[MOST + 1] = {0}, out[MOST + 1];
    for (int call = 0; call < CALLS; call++) {
        const size_t count = draw(&alike, MOST);
        const bool in_place = draw(&alike, 2) == 0;
        const uint64_t kind = draw(&own, 12), turns = draw(&own, 300);
        pause_for(kind, turns);
        for (size_t i = 0; i < count; i++)
            in[i] = (rank + 1) * call + (int32_t)i + rank;
        int32_t *to = in_place ? in : out;
        if (draw(&alike, 20) == 0)
            AR_TRY(ar_comm_barrier(c, q, "barrier"));
        if (call == r->odd_call && rank == 1)
            AR_TRY(differ(c, q, r->odd_way, in, count));
        else
            AR_TRY(ar_comm_all_reduce(c, q, (ar_buf){to}, (ar_cbuf){in}, count, AR_I32, AR_SUM, "sum"));
        if (call != r->odd_call)
            AR_TRY(check_sum(to, count, call));
    }
    return AR_OK;
}

static ar_status rank_main(ar_comm *c, void *arg)
{
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    AR_TRY(ar_queue_create(&q, AR_QUEUE_INLINE, "swap"));
    return sums(c, q, arg);
}

/* Whether the world ended as it should. */
static bool run(const round *r)
{
    round copy = *r;
    const bool differs = r->odd_call < CALLS;
    const ar_status st = ar_sim_run(2, NULL, rank_main, &copy, NULL);
    const bool good =
        differs ? st == AR_ERR_MISMATCH && strstr(ar_error_message(), "disagree in collective") != NULL : st == AR_OK;
    if (!good)
        printf("seed %llu, call %d way %d: %s: %s\n", (unsigned long long)r->seed, r->odd_call, r->odd_way,
               ar_status_name(st), st == AR_OK ? "" : ar_error_message());
    return good;
}

int main(int argc, char **argv)
{
    const uint64_t rounds = argc > 1 ? strtoull(argv[1], NULL, 0) : small_only() ? 10 : 40;
    uint64_t state = argc > 2 ? strtoull(argv[2], NULL, 0) : 1;
    int bad = 0;
    for (uint64_t i = 0; i < rounds; i++) {
        const uint64_t seed = draw(&state, UINT64_C(1) << 31);
        const int odd_call = (int)draw(&state, CALLS), odd_way = (int)draw(&state, 5);
        const round r = {seed, i % 2 ? odd_call : CALLS, odd_way};
        bad += !run(&r);
    }
    printf("%llu rounds of %d sums, %d wrong; %d core(s)\n", (unsigned long long)rounds, CALLS, bad, ari_cores());
    return bad == 0 ? 0 : 1;
}
