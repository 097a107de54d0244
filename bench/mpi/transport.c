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
#include <time.h>

#include "anyrank/process.h"

#define BLOCK_SECONDS 0.01
enum { MOST = 201 };

typedef struct bench {
    ar_comm *c;
    ar_queue *q;
    float *in, *out;
    size_t count;
} bench;

static void need(ar_status st)
{
    if (st == AR_OK)
        return;
    fprintf(stderr, "transport: %s\n", ar_error_message());
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Seconds of a call, the slowest rank's. */
static double time_block(const bench *b, bool plain, int calls)
{
    MPI_Barrier(MPI_COMM_WORLD);
    const double begin = now_s();
    for (int i = 0; i < calls; i++) {
        if (plain)
            MPI_Allreduce(b->in, b->out, (int)b->count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        else
            need(ar_comm_all_reduce(b->c, b->q, (ar_buf){b->out}, (ar_cbuf){b->in}, b->count, AR_F32, AR_SUM, "bench"));
    }
    double took = (now_s() - begin) / calls;
    MPI_Allreduce(MPI_IN_PLACE, &took, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return took;
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, int n)
{
    qsort(x, (size_t)n, sizeof *x, ascending);
    return x[n / 2];
}

static void measure(const bench *b, int rank, int repetitions)
{
    double plain[MOST], own[MOST], ratio[MOST];
    double first = time_block(b, false, 3);
    const int calls = first < BLOCK_SECONDS ? (int)(BLOCK_SECONDS / first) : 1;
    for (int i = 0; i < repetitions; i++) {
        plain[i] = time_block(b, true, calls);
        own[i] = time_block(b, false, calls);
        ratio[i] = own[i] / plain[i];
    }
    const double p = median(plain, repetitions), o = median(own, repetitions), r = median(ratio, repetitions);
    if (rank == 0)
        printf("%10zu bytes  MPI_Allreduce %10.2f us  ar_comm %10.2f us  ratio %.2f\n", b->count * sizeof(float),
               p * 1e6, o * 1e6, r);
}

int main(int argc, char **argv)
{
    const int wanted = argc > 1 ? atoi(argv[1]) : 21, repetitions = wanted < 1 ? 1 : wanted > MOST ? MOST : wanted;
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
        measure(&b, ar_process_rank(p), repetitions);
    }
    ar_queue_destroy(b.q);
    ar_comm_destroy(b.c);
    ar_process_destroy(p);
    free(b.in);
    free(b.out);
    return 0;
}
