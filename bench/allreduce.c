/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "bench/bench.h"
#include "bench/harness.h"
#include "ref/core/size.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef struct allreduce_row {
    int ranks;
    size_t bytes; /* of one rank's input */
    const char *dtype_name, *algorithm_name;
    ar_dtype dtype; /* AR_F32 or AR_I64 */
    ar_sim_algorithm algorithm;
    double seconds;      /* median of one all-reduce */
    double bus_gbps;     /* 2(N-1)/N * bytes in that time: what each link of a ring would carry */
    double over_copy;    /* median of (time)/(time of the copy) */
    double spread;       /* of that ratio */
    double copy_seconds; /* median of the copy */
    const char *copy;    /* the fastest of the simple copies */
} allreduce_row;

/* --- copies ------------------------------------------------------------------------------------------------------- */

enum { LINE = 64 }; /* bytes that a streaming store fills at best */

/* The simple ways of copying memory. Which is the fastest depends on the machine and on what stays in its caches, so a
 * benchmark that measures itself against a copy runs all of them and takes the fastest. */
typedef enum copy_kind {
    COPY_LIBRARY, /* memcpy */
    COPY_STREAM,  /* the widest stores that leave the cache alone */
    COPY_STRING,  /* the processor's own instruction for it (rep movsb) */
    COPY_KINDS
} copy_kind;

static const char *copy_name(copy_kind k)
{
    static const char *const names[COPY_KINDS] = {"memcpy", "streaming stores", "rep movsb"};
    return (unsigned)k < COPY_KINDS ? names[k] : "?";
}

#if defined(__x86_64__)

__attribute__((target("avx512f"))) static void stream_lines_512(char *to, const char *from, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += LINE)
        _mm512_stream_si512((void *)(to + at), _mm512_loadu_si512(from + at));
}

static void stream_lines(char *to, const char *from, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += sizeof(__m128i))
        _mm_stream_si128((void *)(to + at), _mm_loadu_si128((const void *)(from + at)));
}

static void stream(char *to, const char *from, size_t bytes)
{
    const size_t lines = bytes / LINE * LINE;
    if (__builtin_cpu_supports("avx512f"))
        stream_lines_512(to, from, lines);
    else
        stream_lines(to, from, lines);
    _mm_sfence(); /* part of what it costs: streaming stores are not ordered by a later release store */
    memcpy(to + lines, from + lines, bytes - lines);
}

static void string(void *to, const void *from, size_t bytes)
{
    __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
}

#else

static void stream(char *to, const char *from, size_t bytes)
{
    memcpy(to, from, bytes);
}

static void string(void *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
}

#endif

/* to and from are aligned to 64 bytes and do not overlap. Kinds that this machine does not have are memcpy. */
static void copy_bytes(copy_kind k, void *to, const void *from, size_t bytes)
{
    if (k == COPY_STREAM)
        stream(to, from, bytes);
    else if (k == COPY_STRING)
        string(to, from, bytes);
    else
        memcpy(to, from, bytes);
}

/* --- ranks -------------------------------------------------------------------------------------------------------- */

/* Kinds of a repetition: the all-reduce, then the copies. */
enum { ALL_REDUCE, FIRST_COPY, KINDS = FIRST_COPY + COPY_KINDS };

/* A block lasts at least this long, so that neither the clock nor the way out of the barrier before it shows. */
#define BLOCK_SECONDS 0.004
enum { MOST_CALLS = 1 << 16 };

/* One rank's memory, and when it began and ended its last block. */
typedef struct side {
    void *in, *out;
    double begin, end;
} side;

typedef struct bench {
    const allreduce_row *row;
    side *rank;         /* [ranks] */
    ari_bench_series s; /* of KINDS sides */
} bench;

/* State of one rank's thread. */
typedef struct member {
    bench *b;
    ar_comm *comm;
    ar_queue *q;
    side *own;
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
    const size_t count = b->row->bytes / ar_dtype_bytes(b->row->dtype);
    for (size_t i = 0; i < count; i++) {
        if (b->row->dtype == AR_F32)
            ((float *)b->rank[rank].in)[i] = (float)value(rank, i);
        else
            ((int64_t *)b->rank[rank].in)[i] = value(rank, i);
    }
    memset(b->rank[rank].out, 0, b->row->bytes);
}

static ar_status check_sum(const bench *b, int rank)
{
    const size_t count = b->row->bytes / ar_dtype_bytes(b->row->dtype);
    for (size_t i = 0; i < count; i++) {
        const int64_t expected = sum_of_values(b->row->ranks, i);
        const bool same = b->row->dtype == AR_F32 ? ((const float *)b->rank[rank].out)[i] == (float)expected
                                                  : ((const int64_t *)b->rank[rank].out)[i] == expected;
        if (!same)
            return ar_error_set(AR_ERR_DATA, "bench allreduce: element %zu of rank %d is not the sum, %lld", i, rank,
                                (long long)expected);
    }
    return AR_OK;
}

static ar_status calls_of(const member *m, int kind, size_t calls)
{
    const allreduce_row *row = m->b->row;
    const size_t count = row->bytes / ar_dtype_bytes(row->dtype);
    for (size_t i = 0; i < calls; i++) {
        if (kind == ALL_REDUCE)
            AR_TRY(ar_comm_all_reduce(m->comm, m->q, (ar_buf){m->own->out}, (ar_cbuf){m->own->in}, count, row->dtype,
                                      AR_SUM, "bench"));
        else
            copy_bytes((copy_kind)(kind - FIRST_COPY), m->own->out, m->own->in, row->bytes);
    }
    return AR_OK;
}

/* Every rank learns the same time, of one call. */
static ar_status time_block(const member *m, int kind, size_t calls, double *seconds)
{
    AR_TRY(ar_comm_barrier(m->comm, m->q, "bench: begin"));
    m->own->begin = ari_bench_seconds();
    AR_TRY(calls_of(m, kind, calls));
    m->own->end = ari_bench_seconds();
    AR_TRY(ar_comm_barrier(m->comm, m->q, "bench: end"));
    const side *rank = m->b->rank;
    double begin = rank[0].begin, end = rank[0].end;
    for (int i = 1; i < m->b->row->ranks; i++) {
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
    const double wanted = seconds > 0.0 ? BLOCK_SECONDS / seconds : MOST_CALLS;
    *calls = wanted >= MOST_CALLS ? MOST_CALLS : wanted > 1.0 ? (size_t)wanted : 1;
    return AR_OK;
}

static ar_status measure(const member *m)
{
    const int rank = ar_comm_rank(m->comm);
    size_t calls[KINDS];
    fill(m->b, rank);
    AR_TRY(calls_of(m, ALL_REDUCE, 1));
    AR_TRY(check_sum(m->b, rank));
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
    /* The copies have written over what the all-reduce gave: the last word is its own. */
    AR_TRY(calls_of(m, ALL_REDUCE, 1));
    return check_sum(m->b, rank);
}

static ar_status rank_main(ar_comm *comm, void *arg)
{
    bench *b = arg;
    member m = {.b = b, .comm = comm, .own = &b->rank[ar_comm_rank(comm)]};
    AR_TRY(ar_queue_create(&m.q, AR_QUEUE_INLINE, "main"));
    const ar_status st = measure(&m);
    ar_queue_destroy(m.q);
    return st;
}

/* Beside the copy that took least. */
static void summarise(allreduce_row *row, const ari_bench_series *s)
{
    size_t best = FIRST_COPY;
    for (size_t k = FIRST_COPY; k < KINDS; k++) {
        const double median = ari_bench_times_of(s, k).median;
        if (k == FIRST_COPY || median < row->copy_seconds) {
            row->copy_seconds = median;
            best = k;
        }
    }
    const ari_bench_stat ratio = ari_bench_ratio_of(s, ALL_REDUCE, best);
    const double ranks = row->ranks;
    row->seconds = ari_bench_times_of(s, ALL_REDUCE).median;
    row->bus_gbps = 1e-9 * 2.0 * (ranks - 1.0) / ranks * (double)row->bytes / row->seconds;
    row->over_copy = ratio.median;
    row->spread = ratio.spread;
    row->copy = copy_name((copy_kind)(best - FIRST_COPY));
}

static ar_status create_memory(bench *b)
{
    size_t bytes = 0;
    AR_TRY(ari_add_size(&bytes, b->row->bytes, LINE - 1));
    bytes = bytes / LINE * LINE;
    for (int i = 0; i < b->row->ranks; i++) {
        b->rank[i].in = aligned_alloc(LINE, bytes);
        b->rank[i].out = aligned_alloc(LINE, bytes);
        if (!b->rank[i].in || !b->rank[i].out)
            return ar_error_set(AR_ERR_MEMORY, "bench allreduce: no memory for %d ranks of 2 x %zu bytes",
                                b->row->ranks, bytes);
    }
    return AR_OK;
}

static void destroy_memory(bench *b)
{
    for (int i = 0; b->rank && i < b->row->ranks; i++) {
        free(b->rank[i].in);
        free(b->rank[i].out);
    }
    free(b->rank);
    ari_bench_series_destroy(&b->s);
}

static ar_status time_row(allreduce_row *row, const ari_bench_session *s)
{
    ARI_ENDED(destroy_memory) bench b = {.row = row};
    const ar_sim_options options = {.algorithm = row->algorithm, .timeout_ns = ari_layout_timeout_ns(&s->v->r)};
    if (row->bytes % ar_dtype_bytes(row->dtype) != 0)
        return ar_error_set(AR_ERR_ARG, "bench allreduce: %zu bytes are no whole number of elements of %zu bytes",
                            row->bytes, ar_dtype_bytes(row->dtype));
    AR_TRY(ari_alloc_zero((void **)&b.rank, (size_t)row->ranks, sizeof *b.rank, "the benchmark's ranks"));
    AR_TRY(ari_bench_series_create(&b.s, KINDS, s->repetitions));
    AR_TRY(create_memory(&b));
    AR_TRY(ar_sim_run(row->ranks, &options, rank_main, &b, NULL));
    summarise(row, &b.s);
    return AR_OK;
}

/* --- the benchmark ------------------------------------------------------------------------------------------------ */

enum { SIZES = 7, MOST_ROWS = 3 * 2 * SIZES };

/* The rows that the options ask for: every number of ranks, of every type, in every size. */
static size_t rows_of(const ari_bench_options *v, allreduce_row *rows)
{
    static const size_t sizes[SIZES] = {1024, 4096, 16384, 65536, 1048576, 26214400, 104857600};
    static const int ranks[] = {2, 4, 8};
    static const ar_dtype dtypes[] = {AR_F32, AR_I64};
    size_t n = 0;
    for (size_t r = 0; r < (v->ranks ? 1 : sizeof ranks / sizeof *ranks); r++)
        for (size_t t = 0; t < 2; t++)
            for (size_t i = 0; (v->dtype < 0 || (size_t)v->dtype == t) && i < (v->bytes ? 1 : SIZES); i++)
                rows[n++] = (allreduce_row){.ranks = v->ranks ? v->ranks : ranks[r],
                                            .bytes = v->bytes ? v->bytes : sizes[i],
                                            .dtype_name = ari_bench_dtype_names[t],
                                            .algorithm_name = ari_bench_algorithm_names[v->algorithm],
                                            .dtype = dtypes[t],
                                            .algorithm = (ar_sim_algorithm)v->algorithm};
    return n;
}

#define ARI_ROW allreduce_row
static const ari_field allreduce_fields[] = {
    ARI_FIELD("ranks", "ranks", INT, ranks),
    ARI_FIELD("bytes", "size", BYTES, bytes),
    ARI_FIELD("numerics", "type", TEXT, dtype_name),
    ARI_FIELD("algorithm", "how", TEXT, algorithm_name),
    ARI_FIELD("seconds", "time", MILLISECONDS, seconds),
    ARI_FIELD("bus_gbps", "bus GB/s", RATIO, bus_gbps),
    ARI_FIELD("over_copy", NULL, RATIO, over_copy),
    ARI_FIELD("copy_seconds", "copy", MILLISECONDS, copy_seconds),
    ARI_FIELD("copy", NULL, TEXT, copy),
    ARI_FIELD(NULL, "times a copy", RATIO, over_copy),
    ARI_FIELD("spread", "spread", SHARE, spread),
};
#undef ARI_ROW

ar_status ari_bench_allreduce(ari_bench_session *s)
{
    allreduce_row rows[MOST_ROWS];
    const size_t n = rows_of(s->v, rows);
    for (size_t i = 0; i < n; i++) {
        ari_bench_progress(s, i, n);
        AR_TRY(time_row(&rows[i], s));
    }
    return ari_bench_end(
        s, ARI_ROWS(allreduce_fields, rows, n), 0,
        "\nOne all-reduce (sum) between N ranks, which are threads of this process, each with an input and an "
        "output of\nthis size; medians. 'bus': 2(N-1)/N x size over the time, the rate of each link of a ring that "
        "took as long.\n'copy': the same threads each copy their input to their output, so the memory has the same "
        "traffic; the\nfastest of memcpy, streaming stores and rep movsb. 'spread': of times a copy, (largest - "
        "smallest)/median.\n");
}
