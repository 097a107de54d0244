/* SPDX-License-Identifier: Apache-2.0 */
/* Time of an all-reduce, a reduce-scatter or an all-gather (sums, not in place) between simulated ranks, threads of
 * this process, next to a copy: each rank's thread copies what is whole to where it is whole, so that, as in an
 * all-reduce, every input is read once and every output written once. A repetition is a block of consecutive
 * collectives and a block of each kind of copy, each long enough to be timed, from the start of its first rank to the
 * end of its last. All use the same memory; what comes out is compared with the expected values.
 *
 *   build/bench/collective [--collective all_gather] [--ranks N] [--bytes D] [--algorithm ring] [--json FILE]
 *
 * bytes      of what is whole: each rank's input, of an all-gather its output
 * bus_gbps   (N-1)/N * bytes, of an all-reduce twice that, in that time: what each link of a ring would carry
 * over_copy  ratio to the time of the fastest copy, which "copy" names */
#include <stdlib.h>
#include <string.h>

#include "anyrank/sim.h"
#include "bench/harness.h"
#include "ref/core/size.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

/* Kinds of a repetition. Which copy is faster depends on the machine and on what stays in its caches. */
enum { COLLECTIVE, MEMCPY, STREAM, KINDS, LINE = 64 };
static const char *const kind_names[KINDS] = {"collective", "memcpy", "streaming stores"};
typedef enum collective { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER } collective;
static const char *const collective_names[] = {"all_reduce", "reduce_scatter", "all_gather", NULL};
static const char *const algorithm_names[] = {"auto", "direct", "ring", "last", NULL}; /* as ar_sim_algorithm */

/* What is measured. */
typedef struct collective_case {
    collective kind;
    int ranks;
    size_t bytes;   /* of what is whole */
    ar_dtype dtype; /* AR_F32 or AR_I64 */
    ar_sim_algorithm algorithm;
} collective_case;

/* Stores that leave the cache alone, where there are such; aligned to a line. */
static void stream(char *dst, const char *src, size_t bytes)
{
    size_t offset = 0;
#if defined(__SSE2__)
    for (; offset + sizeof(__m128i) <= bytes; offset += sizeof(__m128i))
        _mm_stream_si128((void *)(dst + offset), _mm_load_si128((const void *)(src + offset)));
    _mm_sfence(); /* part of what it costs: streaming stores are not ordered by a later release store */
#endif
    memcpy(dst + offset, src + offset, bytes - offset);
}

/* A block lasts at least this long, so that neither the clock nor the way out of the barrier before it shows. */
#define BLOCK_SECONDS 0.004
enum { MOST_CALLS = 1 << 16 };

/* One rank's memory, and when it began and ended its last block. */
typedef struct side {
    void *input, *out;
    double begin, end;
} side;

typedef struct bench {
    const collective_case *bench_case;
    side *rank;         /* [ranks] */
    size_t *share;      /* [ranks] elements of each */
    ari_bench_series s; /* of KINDS sides */
} bench;

/* State of one rank's thread. */
typedef struct member {
    bench *b;
    ar_comm *comm;
    ar_queue *q;
    side *local;
} member;

/* Small integers, so that sums are exact in any order; a chunk in the wrong place shows. */
static int64_t value(int rank, size_t i)
{
    return (int64_t)(i % 1021) + 3 * rank;
}

static int64_t sum_of_values(int ranks, size_t i)
{
    return ranks * (int64_t)(i % 1021) + 3 * (int64_t)ranks * (ranks - 1) / 2;
}

static void fill(const bench *b, int rank)
{
    const size_t count = b->bench_case->bytes / ar_dtype_bytes(b->bench_case->dtype);
    for (size_t i = 0; i < count; i++) {
        if (b->bench_case->dtype == AR_F32)
            ((float *)b->rank[rank].input)[i] = (float)value(rank, i);
        else
            ((int64_t *)b->rank[rank].input)[i] = value(rank, i);
    }
    memset(b->rank[rank].out, 0, b->bench_case->bytes);
}

/* The first element of a rank's share. */
static size_t start_of(const bench *b, int rank)
{
    size_t start = 0;
    for (int r = 0; r < rank; r++)
        start += b->share[r];
    return start;
}

/* Element i of what is whole: a sum, or of an all-gather the value of the rank whose share it is in. */
static int64_t expected_at(const bench *b, size_t i)
{
    int rank = 0;
    if (b->bench_case->kind != ALL_GATHER)
        return sum_of_values(b->bench_case->ranks, i);
    while (start_of(b, rank + 1) <= i)
        rank++;
    return value(rank, i - start_of(b, rank));
}

static ar_status check_output(const bench *b, int rank)
{
    const bool shared = b->bench_case->kind == REDUCE_SCATTER;
    const size_t start = shared ? start_of(b, rank) : 0;
    const size_t count = shared ? b->share[rank] : b->bench_case->bytes / ar_dtype_bytes(b->bench_case->dtype);
    const void *out = b->rank[rank].out;
    for (size_t i = 0; i < count; i++) {
        const int64_t expected = expected_at(b, start + i);
        const bool equal = b->bench_case->dtype == AR_F32 ? ((const float *)out)[i] == (float)expected
                                                          : ((const int64_t *)out)[i] == expected;
        if (!equal)
            return ar_error_set(AR_ERR_DATA, "element %zu of rank %d is not %lld", i, rank, (long long)expected);
    }
    return AR_OK;
}

static ar_status call(const member *m)
{
    const collective_case *bench_case = m->b->bench_case;
    const ar_buf out = {m->local->out};
    const ar_cbuf input = {m->local->input};
    if (bench_case->kind == ALL_REDUCE)
        return ar_comm_all_reduce(m->comm, m->q, out, input, bench_case->bytes / ar_dtype_bytes(bench_case->dtype),
                                  bench_case->dtype, AR_SUM, "bench");
    return bench_case->kind == REDUCE_SCATTER
               ? ar_comm_reduce_scatter(m->comm, m->q, out, input, m->b->share, bench_case->dtype, AR_SUM, "bench")
               : ar_comm_all_gather(m->comm, m->q, out, input, m->b->share, bench_case->dtype, "bench");
}

static ar_status calls_of(const member *m, int kind, size_t calls)
{
    const collective_case *bench_case = m->b->bench_case;
    for (size_t i = 0; i < calls; i++) {
        if (kind == COLLECTIVE)
            AR_TRY(call(m));
        else if (kind == MEMCPY)
            memcpy(m->local->out, m->local->input, bench_case->bytes);
        else
            stream(m->local->out, m->local->input, bench_case->bytes);
    }
    return AR_OK;
}

/* Every rank learns the same time, of one call. */
static ar_status time_block(const member *m, int kind, size_t calls, double *seconds)
{
    AR_TRY(ar_comm_barrier(m->comm, m->q, "bench: begin"));
    m->local->begin = ari_bench_seconds();
    AR_TRY(calls_of(m, kind, calls));
    m->local->end = ari_bench_seconds();
    AR_TRY(ar_comm_barrier(m->comm, m->q, "bench: end"));
    const side *rank = m->b->rank;
    double begin = rank[0].begin, end = rank[0].end;
    for (int i = 1; i < m->b->bench_case->ranks; i++) {
        begin = rank[i].begin < begin ? rank[i].begin : begin;
        end = rank[i].end > end ? rank[i].end : end;
    }
    *seconds = (end - begin) / (double)calls;
    return AR_OK;
}

/* The number of calls in a block. Every rank reads the same times, and so computes the same number. */
static ar_status block_size(const member *m, int kind, size_t *calls)
{
    double seconds = 0.0;
    *calls = 1;
    AR_TRY(time_block(m, kind, 1, &seconds)); /* warms caches and page tables */
    do {
        AR_TRY(time_block(m, kind, *calls, &seconds));
        if (seconds * (double)*calls >= 0.5 * BLOCK_SECONDS)
            break;
        *calls *= 2;
    } while (*calls < MOST_CALLS);
    const double target_calls = seconds > 0.0 ? BLOCK_SECONDS / seconds : MOST_CALLS;
    *calls = target_calls >= MOST_CALLS ? MOST_CALLS : target_calls > 1.0 ? (size_t)target_calls : 1;
    return AR_OK;
}

static ar_status measure(const member *m)
{
    const int rank = ar_comm_rank(m->comm);
    size_t calls[KINDS];
    fill(m->b, rank);
    AR_TRY(calls_of(m, COLLECTIVE, 1));
    AR_TRY(check_output(m->b, rank));
    for (int k = 0; k < KINDS; k++)
        AR_TRY(block_size(m, k, &calls[k]));
    for (size_t i = 0; i < m->b->s.n; i++) {
        for (int k = 0; k < KINDS; k++) {
            double seconds = 0.0;
            AR_TRY(time_block(m, k, calls[k], &seconds));
            if (rank == 0)
                m->b->s.times[i * KINDS + (size_t)k] = seconds;
        }
    }
    /* The copies have written over what the collective gave: the last word is its own. */
    AR_TRY(calls_of(m, COLLECTIVE, 1));
    return check_output(m->b, rank);
}

static ar_status rank_main(ar_comm *comm, void *arg)
{
    bench *b = arg;
    member m = {.b = b, .comm = comm, .local = &b->rank[ar_comm_rank(comm)]};
    AR_TRY(ar_queue_create(&m.q, AR_QUEUE_INLINE, "main"));
    const ar_status st = measure(&m);
    ar_queue_destroy(m.q);
    return st;
}

static ar_status create_memory(bench *b)
{
    size_t bytes = 0;
    AR_TRY(ari_add_size(&bytes, b->bench_case->bytes, LINE - 1));
    bytes = bytes / LINE * LINE;
    for (int i = 0; i < b->bench_case->ranks; i++) {
        b->rank[i].input = aligned_alloc(LINE, bytes);
        b->rank[i].out = aligned_alloc(LINE, bytes);
        if (!b->rank[i].input || !b->rank[i].out)
            return ar_error_set(AR_ERR_MEMORY, "no memory for %d ranks of 2 x %zu bytes", b->bench_case->ranks, bytes);
    }
    return AR_OK;
}

static void destroy_memory(bench *b)
{
    for (int i = 0; b->rank && i < b->bench_case->ranks; i++) {
        free(b->rank[i].input);
        free(b->rank[i].out);
    }
    free(b->rank);
    free(b->share);
    ari_bench_series_destroy(&b->s);
}

static ar_status time_case(ari_bench *out, const collective_case *bench_case)
{
    ARI_ENDED(destroy_memory) bench b = {.bench_case = bench_case};
    const ar_sim_options options = {.algorithm = bench_case->algorithm, .timeout_ns = 60000000000u};
    if (bench_case->bytes % ar_dtype_bytes(bench_case->dtype) != 0)
        return ar_error_set(AR_ERR_ARG, "%zu bytes are no whole number of elements of %zu bytes", bench_case->bytes,
                            ar_dtype_bytes(bench_case->dtype));
    AR_TRY(ari_alloc_zero((void **)&b.rank, (size_t)bench_case->ranks, sizeof *b.rank, "the benchmark's ranks"));
    AR_TRY(ari_alloc_zero((void **)&b.share, (size_t)bench_case->ranks, sizeof *b.share, "the ranks' shares"));
    for (size_t r = 0, n = bench_case->bytes / ar_dtype_bytes(bench_case->dtype), ranks = (size_t)bench_case->ranks;
         r < ranks; r++)
        b.share[r] = n / ranks + (r < n % ranks);
    AR_TRY(ari_bench_series_create(&b.s, KINDS, out->repetitions));
    AR_TRY(create_memory(&b));
    AR_TRY(ar_sim_run(bench_case->ranks, &options, rank_main, &b, NULL));
    const double copies[2] = {ari_bench_times_of(&b.s, MEMCPY).median, ari_bench_times_of(&b.s, STREAM).median};
    const size_t fastest_copy = copies[0] <= copies[1] ? MEMCPY : STREAM;
    const ari_bench_stat ratio = ari_bench_ratio_of(&b.s, COLLECTIVE, fastest_copy);
    const double seconds = ari_bench_times_of(&b.s, COLLECTIVE).median, ranks = bench_case->ranks;
    const double ways = bench_case->kind == ALL_REDUCE ? 2.0 : 1.0;
    return ari_bench_add(out, "rows",
                         json_pack("{s:s, s:i, s:I, s:s, s:s, s:f, s:f, s:f, s:f, s:s, s:f}", "collective",
                                   collective_names[bench_case->kind], "ranks", bench_case->ranks, "bytes",
                                   (json_int_t)bench_case->bytes, "numerics",
                                   bench_case->dtype == AR_F32 ? "f32" : "i64", "algorithm",
                                   algorithm_names[bench_case->algorithm], "seconds", seconds, "bus_gbps",
                                   1e-9 * ways * (ranks - 1.0) / ranks * (double)bench_case->bytes / seconds,
                                   "over_copy", ratio.median, "copy_seconds", copies[fastest_copy - MEMCPY], "copy",
                                   kind_names[fastest_copy], "spread", ratio.spread));
}

/* Every number of ranks, both types, every size; 0: those in use. */
static ar_status time_cases(ari_bench *out, size_t ranks, size_t bytes, const char *algorithm, const char *kind)
{
    static const size_t sizes[] = {1024, 4096, 16384, 65536, 1048576, 26214400, 104857600};
    static const ar_dtype dtypes[] = {AR_F32, AR_I64};
    collective_case bench_case = {.algorithm = AR_SIM_AUTO};
    while (algorithm_names[bench_case.algorithm] && strcmp(algorithm_names[bench_case.algorithm], algorithm) != 0)
        bench_case.algorithm++;
    while (collective_names[bench_case.kind] && strcmp(collective_names[bench_case.kind], kind) != 0)
        bench_case.kind++;
    if (!collective_names[bench_case.kind])
        return ar_error_set(AR_ERR_ARG, "--collective is all_reduce, reduce_scatter or all_gather");
    if (!algorithm_names[bench_case.algorithm] || ranks == 1 || ranks > 4096)
        return ar_error_set(AR_ERR_ARG, "--algorithm is auto, direct, ring or last, --ranks from 2 to 4096");
    for (size_t r = ranks ? ranks : 2; r <= (ranks ? ranks : 8); r *= 2) {
        for (size_t t = 0; t < 2; t++) {
            for (size_t i = 0; i < (bytes ? 1 : sizeof sizes / sizeof *sizes); i++) {
                bench_case.ranks = (int)r;
                bench_case.dtype = dtypes[t];
                bench_case.bytes = bytes ? bytes : sizes[i];
                AR_TRY(time_case(out, &bench_case));
            }
        }
    }
    return AR_OK;
}

int main(int argc, char **argv)
{
    size_t ranks = 0, bytes = 0;
    const char *algorithm = "auto", *kind = "all_reduce";
    const ari_bench_option options[] = {
        {"collective", "all_reduce, reduce_scatter or all_gather (default all_reduce)", .text = &kind},
        {"ranks", "simulated ranks (default: 2, 4 and 8)", .number = &ranks},
        {"bytes", "of what is whole (default: seven sizes, 1 KiB to 100 MiB)", .number = &bytes},
        {"algorithm", "auto, direct, ring or last: how data moves (default auto)", .text = &algorithm}};
    ari_bench b = {.name = "collective", .threads = 1, .repetitions = 15};
    (void)argc;
    ari_bench_begin(&b, argv, options, sizeof options / sizeof *options);
    return ari_bench_end(&b, time_cases(&b, ranks, bytes, algorithm, kind));
}
