/* SPDX-License-Identifier: Apache-2.0 */
/* Into how many pieces should an all-gather be cut, so that multiplying hides it? Eight simulated ranks run the
 * program, and virtual time says what it would take on eight GPUs. The closed form is t_a + (K-1) max(t_a, t_g) + t_g,
 * where t_a and t_g are what gathering and multiplying one of K pieces take. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "anyrank/sim.h"

enum { RANKS = 8, TOKENS = 2048, WIDTH = 4096, OUT = 4096, MOST_PIECES = 16 };
static const size_t BYTES = (size_t)TOKENS * WIDTH * 2; /* X in 16 bits, of all ranks together */

typedef struct job {
    size_t pieces;
    uint8_t *x; /* [RANKS][BYTES] */
} job;

/* Gathers the pieces on a queue of their own, and multiplies each when it has come. */
static ar_status gather_and_multiply(ar_comm *world, void *arg)
{
    const job *j = (const job *)arg;
    const size_t piece = BYTES / j->pieces, own = piece / RANKS;
    uint8_t *x = j->x + (size_t)ar_comm_rank(world) * BYTES;
    size_t counts[RANKS];
    ar_queue *comm = NULL;
    ar_event *came[MOST_PIECES] = {NULL};
    ar_status st = ar_queue_create(&comm, AR_QUEUE_THREAD, "comm");
    for (int r = 0; r < RANKS; r++)
        counts[r] = own;
    for (size_t k = 0; k < j->pieces && st == AR_OK; k++) {
        const ar_buf out = {x + k * piece}, in = {x + k * piece + (size_t)ar_comm_rank(world) * own};
        AR_TRY_TO(done, st, ar_event_create(&came[k]));
        AR_TRY_TO(done, st, ar_comm_all_gather(world, comm, out, ar_const(in), counts, AR_U8, "X"));
        AR_TRY_TO(done, st, ar_event_record(came[k], comm));
    }
    for (size_t k = 0; k < j->pieces && st == AR_OK; k++) {
        AR_TRY_TO(done, st, ar_event_sync(came[k], 0));
        ar_trace_begin("X W^T");
        ar_trace_work(2.0 * TOKENS * WIDTH * OUT / (double)j->pieces);
        ar_trace_end();
    }
done:
    ar_queue_destroy(comm);
    for (size_t k = 0; k < j->pieces; k++)
        ar_event_destroy(came[k]);
    return st;
}

int main(void)
{
    job j = {.x = (uint8_t *)calloc(RANKS, BYTES)};
    ar_sim_cluster gpus;
    bool as_predicted = j.x && ar_sim_cluster_parse(&gpus, "inside=2us:300GB/s flops=400T") == AR_OK;
    printf("pieces  t_a us  t_g us  closed form  virtual time  exposed\n");
    for (j.pieces = 1; as_predicted && j.pieces <= MOST_PIECES; j.pieces *= 2) {
        const double k = (double)j.pieces, part = (RANKS - 1) / (double)RANKS;
        const double t_a = (RANKS - 1) * gpus.inside.latency_s + part * (double)BYTES / k / gpus.inside.bytes_per_s;
        const double t_g = 2.0 * TOKENS * WIDTH * OUT / k / gpus.flops, t = t_a + (k - 1) * fmax(t_a, t_g) + t_g;
        ar_trace_summary s = {.seconds = 0};
        ar_sim_options o = {.cluster = &gpus};
        as_predicted = ar_trace_create(&o.trace) == AR_OK && !ar_sim_run(RANKS, &o, gather_and_multiply, &j, NULL) &&
                       !ar_trace_summarise(&s, o.trace, AR_TRACE_VIRTUAL) && fabs(s.seconds - t) <= 0.01 * t;
        ar_trace_destroy(o.trace);
        printf("%6zu  %6.1f  %6.1f  %8.1f us  %9.1f us  %4.1f us\n", j.pieces, t_a * 1e6, t_g * 1e6, t * 1e6,
               s.seconds * 1e6, s.exposed * 1e6);
    }
    free(j.x);
    return as_predicted ? 0 : 1;
}
