/* SPDX-License-Identifier: Apache-2.0 */
/* all_reduce through ar_comm over MPI, beside MPI_Allreduce in the same processes: blocks of calls of both in turn, and
 * the medians. `cmake --build build -t bench_transport`, then
 *
 *   mpirun -n 2 build/tests/bench_transport [REPETITIONS]
 *
 * What ar_comm does more: it compares the calls of all ranks before it moves anything, and adds in one order. */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "anyrank/process.h"
#include "bench/harness.h"

#define BLOCK_SECONDS 0.01

typedef struct bench {
    ar_comm *c;
    ar_queue *q;
    float *in, *out;
    size_t count;
    int calls; /* of a block */
} bench;

static void need(ar_status st)
{
    if (st == AR_OK)
        return;
    fprintf(stderr, "transport: %s\n", ar_error_message());
    MPI_Abort(MPI_COMM_WORLD, 1);
}

/* Seconds of a call, the slowest rank's. */
static double time_block(const bench *b, bool plain, int calls)
{
    MPI_Barrier(MPI_COMM_WORLD);
    const double begin = ari_bench_seconds();
    for (int i = 0; i < calls; i++) {
        if (plain)
            MPI_Allreduce(b->in, b->out, (int)b->count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        else
            need(ar_comm_all_reduce(b->c, b->q, (ar_buf){b->out}, (ar_cbuf){b->in}, b->count, AR_F32, AR_SUM, "bench"));
    }
    double took = (ari_bench_seconds() - begin) / calls;
    MPI_Allreduce(MPI_IN_PLACE, &took, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return took;
}

enum { PLAIN, OWN, SIDES };

static ar_status repetition(void *user, double times[SIDES])
{
    const bench *b = user;
    times[PLAIN] = time_block(b, true, b->calls);
    times[OWN] = time_block(b, false, b->calls);
    return AR_OK;
}

static void measure(bench *b, int rank, size_t repetitions)
{
    ari_bench_series s = {0};
    const double first = time_block(b, false, 3);
    b->calls = first < BLOCK_SECONDS ? (int)(BLOCK_SECONDS / first) : 1;
    need(ari_bench_repeat(&s, SIDES, repetitions, 0, repetition, b));
    if (rank == 0)
        printf("%10zu bytes  MPI_Allreduce %10.2f us  ar_comm %10.2f us  ratio %.2f\n", b->count * sizeof(float),
               ari_bench_times_of(&s, PLAIN).median * 1e6, ari_bench_times_of(&s, OWN).median * 1e6,
               ari_bench_ratio_of(&s, OWN, PLAIN).median);
    ari_bench_series_destroy(&s);
}

int main(int argc, char **argv)
{
    const int wanted = argc > 1 ? atoi(argv[1]) : 21;
    const size_t sizes[] = {4, 1024, 16384, 262144, 4194304, 67108864};
    const size_t most = sizes[sizeof sizes / sizeof *sizes - 1];
    ar_process *p = NULL;
    bench b = {.in = calloc(1, most), .out = calloc(1, most)};
    const ar_process_options o = {.transport = AR_TRANSPORT_MPI};
    need(ar_process_create(&p, &o));
    need(ar_process_comm(&b.c, p, NULL));
    need(ar_queue_create(&b.q, AR_QUEUE_INLINE, "main"));
    need(b.in && b.out ? AR_OK : ar_error_set(AR_ERR_MEMORY, "no memory"));
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        b.count = sizes[i] / sizeof(float);
        measure(&b, ar_process_rank(p), wanted < 1 ? 1 : (size_t)wanted);
    }
    ar_queue_destroy(b.q);
    ar_comm_destroy(b.c);
    ar_process_destroy(p);
    free(b.in);
    free(b.out);
    return 0;
}
