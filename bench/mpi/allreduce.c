/* SPDX-License-Identifier: Apache-2.0 */
/* MPI_Allreduce timed as `anyrank bench allreduce` times its own: the same values, blocks and repetitions. A program of
 * its own, which bench/allreduce_peers.py compiles for each MPI; no part of the build.
 *
 *   mpicc -O3 -o allreduce bench/mpi/allreduce.c && mpirun -n 4 ./allreduce BYTES f32|i64 REPETITIONS LIMIT
 *
 * LIMIT: seconds after which no further repetition begins. Rank 0 prints one line of JSON. */
#include <inttypes.h>
#include <mpi.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define BLOCK_SECONDS 0.004
enum { MOST_CALLS = 1 << 16, LINE = 64, MOST_REPETITIONS = 1000 };

typedef struct bench {
    int rank, ranks;
    size_t bytes, count;
    bool f32;
    void *in, *out;
} bench;

static void fail(const char *why)
{
    fprintf(stderr, "allreduce: %s\n", why);
    MPI_Abort(MPI_COMM_WORLD, 1);
    exit(1);
}

/* One clock for all processes of the machine, which MPI_Wtime need not be. */
static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void fill(const bench *b)
{
    for (size_t i = 0; i < b->count; i++) {
        const int64_t value = (int64_t)(i % 1021) + 3 * b->rank;
        if (b->f32)
            ((float *)b->in)[i] = (float)value;
        else
            ((int64_t *)b->in)[i] = value;
    }
    memset(b->out, 0, b->bytes);
}

static void check_sum(const bench *b)
{
    for (size_t i = 0; i < b->count; i++) {
        const int64_t expected = b->ranks * (int64_t)(i % 1021) + 3 * (int64_t)b->ranks * (b->ranks - 1) / 2;
        if (b->f32 ? ((const float *)b->out)[i] != (float)expected : ((const int64_t *)b->out)[i] != expected)
            fail("a wrong sum");
    }
}

static void calls_of(const bench *b, size_t calls)
{
    for (size_t i = 0; i < calls; i++)
        if (MPI_Allreduce(b->in, b->out, (int)b->count, b->f32 ? MPI_FLOAT : MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD) !=
            MPI_SUCCESS)
            fail("MPI_Allreduce failed");
}

/* Of one call, from the moment in which the first rank begins to that in which the last one ends; the same on every
 * rank. */
static double time_block(const bench *b, size_t calls)
{
    MPI_Barrier(MPI_COMM_WORLD);
    const double begin = now();
    calls_of(b, calls);
    const double end = now();
    double span[2] = {-begin, end};
    MPI_Allreduce(MPI_IN_PLACE, span, 2, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return (span[1] + span[0]) / (double)calls;
}

static size_t block_size(const bench *b)
{
    size_t calls = 1;
    double seconds = time_block(b, 1); /* warms caches and page tables */
    for (;;) {
        seconds = time_block(b, calls);
        if (seconds * (double)calls >= 0.5 * BLOCK_SECONDS || calls >= MOST_CALLS)
            break;
        calls *= 2;
    }
    const double wanted = BLOCK_SECONDS / seconds;
    return wanted >= MOST_CALLS ? MOST_CALLS : wanted > 1.0 ? (size_t)wanted : 1;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void measure(const bench *b, size_t repetitions, double limit)
{
    double times[MOST_REPETITIONS], spent = 0.0;
    size_t n = 0;
    fill(b);
    calls_of(b, 1);
    check_sum(b);
    const size_t calls = block_size(b);
    while (n < repetitions && (n == 0 || spent < limit)) {
        times[n] = time_block(b, calls);
        spent += times[n++] * (double)calls;
    }
    memset(b->out, 0, b->bytes);
    calls_of(b, 1);
    check_sum(b);
    qsort(times, n, sizeof *times, by_value);
    const double median = 0.5 * (times[(n - 1) / 2] + times[n / 2]);
    if (b->rank == 0)
        printf("{\"ranks\": %d, \"bytes\": %zu, \"numerics\": \"%s\", \"seconds\": %.9g, \"spread\": %.4g, "
               "\"repetitions\": %zu}\n",
               b->ranks, b->bytes, b->f32 ? "f32" : "i64", median, (times[n - 1] - times[0]) / median, n);
}

int main(int argc, char **argv)
{
    bench b = {0};
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &b.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &b.ranks);
    if (argc != 5)
        fail("BYTES f32|i64 REPETITIONS LIMIT expected");
    b.bytes = strtoull(argv[1], NULL, 10);
    b.f32 = strcmp(argv[2], "f32") == 0;
    const size_t element = b.f32 ? sizeof(float) : sizeof(int64_t), repetitions = strtoull(argv[3], NULL, 10);
    b.count = b.bytes / element;
    if (b.count == 0 || b.bytes % element != 0 || b.count > INT32_MAX || repetitions == 0 ||
        repetitions > MOST_REPETITIONS)
        fail("whole elements and 1 to 1000 repetitions expected");
    b.in = aligned_alloc(LINE, (b.bytes + LINE - 1) / LINE * LINE);
    b.out = aligned_alloc(LINE, (b.bytes + LINE - 1) / LINE * LINE);
    if (!b.in || !b.out)
        fail("no memory");
    measure(&b, repetitions, strtod(argv[4], NULL));
    free(b.in);
    free(b.out);
    MPI_Finalize();
    return 0;
}
