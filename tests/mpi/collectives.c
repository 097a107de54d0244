/* SPDX-License-Identifier: Apache-2.0 */
/* Every collective over the processes that mpirun has started, and over as many simulated ranks, with the same inputs:
 * the outputs are to have the same bits. tests/mpi/mpi_test.py starts it. Exit status 0: they have; 77: there is no MPI
 * in this build.
 *
 *     mpirun -n 4 collectives [large]    large: one message of more than 2^31 bytes instead */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "anyrank/process.h"
#include "anyrank/sim.h"

#define REQUIRE(call)                                                                                        \
    do {                                                                                                     \
        const ar_status st_ = (call);                                                                        \
        if (st_ != AR_OK) {                                                                                  \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, ar_status_name(st_), ar_error_message()); \
            _Exit(1);                                                                                        \
        }                                                                                                    \
    } while (0)

static void *need(void *p)
{
    if (!p) {
        fprintf(stderr, "collectives: no memory\n");
        _Exit(1);
    }
    return p;
}

/* --- what a rank got, case after case ----------------------------------------------------------------------------- */

typedef struct record {
    char name[96];
    size_t at, bytes;
} record;

typedef struct results {
    char *bytes;
    size_t used, room;
    record *list;
    size_t count, capacity;
} results;

static void keep(results *r, const char *name, const void *bytes, size_t n)
{
    if (r->used + n > r->room) {
        r->room = 2 * (r->used + n);
        r->bytes = need(realloc(r->bytes, r->room));
    }
    if (r->count == r->capacity) {
        r->capacity = 2 * r->capacity + 64;
        r->list = need(realloc(r->list, r->capacity * sizeof *r->list));
    }
    record *one = &r->list[r->count++];
    snprintf(one->name, sizeof one->name, "%s", name);
    one->at = r->used;
    one->bytes = n;
    if (n > 0)
        memcpy(r->bytes + r->used, bytes, n);
    r->used += n;
}

static int differences(const results *a, const results *b, int rank)
{
    int different = a->count != b->count;
    for (size_t i = 0; i < a->count && i < b->count; i++) {
        const record *x = &a->list[i], *y = &b->list[i];
        if (strcmp(x->name, y->name) == 0 && x->bytes == y->bytes &&
            (x->bytes == 0 || memcmp(a->bytes + x->at, b->bytes + y->at, x->bytes) == 0))
            continue;
        if (different++ < 5)
            fprintf(stderr, "rank %d: %s: other bits than among simulated ranks\n", rank, x->name);
    }
    return different;
}

/* --- a rank's buffers --------------------------------------------------------------------------------------------- */

typedef struct rank {
    ar_comm *c;
    ar_device *d; /* where the data lie; NULL: on the host */
    ar_queue *q;
    results *got; /* NULL: another rank's, of whom nothing is asked */
    int r, n;
} rank;

static const ar_dtype types[] = {AR_F32, AR_F64, AR_BF16, AR_F16, AR_I64, AR_I32, AR_U8};
static const ar_op ops[] = {AR_SUM, AR_MAX, AR_MIN, AR_PROD, AR_AVG};
enum { TYPES = 7, OPS = 5 };

/* Numbers of ordinary size in every type, so that the order of a reduction shows: floats get exponents near 1. */
static void fill(void *to, ar_dtype t, size_t count, unsigned seed)
{
    uint64_t x = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
    for (size_t i = 0; i < count; i++) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        const double value = (double)(int64_t)(x >> 11) * 0x1p-53 * 3.0 - 1.5;
        if (t == AR_F32)
            ((float *)to)[i] = (float)value;
        else if (t == AR_F64)
            ((double *)to)[i] = value;
        else if (t == AR_BF16)
            ((uint16_t *)to)[i] = (uint16_t)(0x3f00u | (x & 0x80ffu));
        else if (t == AR_F16)
            ((uint16_t *)to)[i] = (uint16_t)(0x3800u | (x & 0x87ffu));
        else
            memcpy((char *)to + i * ar_dtype_bytes(t), &x, ar_dtype_bytes(t));
    }
}

static ar_buf place(const rank *k, size_t bytes)
{
    ar_buf b = {NULL};
    if (k->d)
        REQUIRE(k->d->ops->alloc(k->d, k->q, &b, bytes + 64));
    else
        b.ptr = need(malloc(bytes + 64));
    return b;
}

static void drop(const rank *k, ar_buf b)
{
    if (k->d)
        k->d->ops->free(k->d, k->q, b);
    else
        free(b.ptr);
}

static void put(const rank *k, ar_buf to, const void *from, size_t bytes)
{
    if (bytes > 0 && k->d)
        REQUIRE(k->d->ops->copy(k->d, k->q, to, (ar_cbuf){from}, bytes));
    else if (bytes > 0)
        memcpy(to.ptr, from, bytes);
}

static ar_buf input(const rank *k, ar_dtype t, size_t count, unsigned seed)
{
    const size_t bytes = count * ar_dtype_bytes(t);
    void *host = need(malloc(bytes + 1));
    fill(host, t, count, seed * 64 + (unsigned)k->r);
    const ar_buf b = place(k, bytes);
    put(k, b, host, bytes);
    free(host);
    return b;
}

static void note(const rank *k, ar_buf from, size_t bytes, const char *format, ...)
{
    char name[96];
    va_list args;
    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    void *host = need(malloc(bytes + 1));
    if (bytes > 0 && k->d)
        REQUIRE(k->d->ops->copy(k->d, k->q, (ar_buf){host}, ar_const(from), bytes));
    else if (bytes > 0)
        memcpy(host, from.ptr, bytes);
    REQUIRE(ar_queue_sync(k->q, 0));
    if (k->got)
        keep(k->got, name, host, bytes);
    free(host);
}

/* --- the cases ---------------------------------------------------------------------------------------------------- */

static void reductions(const rank *k, ar_dtype t, ar_op op, size_t count, unsigned seed)
{
    const size_t bytes = count * ar_dtype_bytes(t);
    const int root = (int)(seed % (unsigned)k->n);
    const char *type = ar_dtype_name(t);
    const ar_buf in = input(k, t, count, seed), out = place(k, bytes);
    REQUIRE(ar_comm_all_reduce(k->c, k->q, out, ar_const(in), count, t, op, "all_reduce"));
    note(k, out, bytes, "all_reduce %s op %d count %zu", type, (int)op, count);
    REQUIRE(ar_comm_reduce(k->c, k->q, out, ar_const(in), count, t, op, root, "reduce"));
    if (k->r == root)
        note(k, out, bytes, "reduce %s op %d count %zu root %d", type, (int)op, count, root);
    note(k, in, bytes, "inputs are left alone");
    REQUIRE(ar_comm_reduce(k->c, k->q, in, ar_const(in), count, t, op, root, "reduce in place"));
    if (k->r == root)
        note(k, in, bytes, "reduce in place %s op %d count %zu", type, (int)op, count);
    drop(k, in);
    const ar_buf again = input(k, t, count, seed + 1);
    REQUIRE(ar_comm_all_reduce(k->c, k->q, again, ar_const(again), count, t, op, NULL));
    note(k, again, bytes, "all_reduce in place %s op %d count %zu", type, (int)op, count);
    drop(k, again);
    drop(k, out);
}

/* Uneven counts, one of them 0 where there are ranks enough. */
static void counts_of(const rank *k, size_t *counts, size_t count, size_t *sum, size_t *before)
{
    *sum = *before = 0;
    for (int i = 0; i < k->n; i++) {
        counts[i] = k->n > 2 && i == 1 ? 0 : count / (size_t)k->n + (size_t)i * (count > 4 ? 3 : 0);
        *before = i == k->r ? *sum : *before;
        *sum += counts[i];
    }
}

static void scattered(const rank *k, ar_dtype t, ar_op op, size_t count, unsigned seed)
{
    size_t counts[64], sum, before;
    counts_of(k, counts, count, &sum, &before);
    const size_t e = ar_dtype_bytes(t);
    const char *type = ar_dtype_name(t);
    const ar_buf in = input(k, t, sum, seed), out = place(k, counts[k->r] * e);
    REQUIRE(ar_comm_reduce_scatter(k->c, k->q, out, ar_const(in), counts, t, op, "reduce_scatter"));
    note(k, out, counts[k->r] * e, "reduce_scatter %s op %d count %zu", type, (int)op, count);
    note(k, in, sum * e, "reduce_scatter leaves its input alone");
    REQUIRE(ar_comm_reduce_scatter(k->c, k->q, ar_buf_at(in, before * e), ar_const(in), counts, t, op, "in place"));
    note(k, ar_buf_at(in, before * e), counts[k->r] * e, "reduce_scatter in place %s count %zu", type, count);
    drop(k, in);
    drop(k, out);
}

static void gathered(const rank *k, ar_dtype t, size_t count, unsigned seed)
{
    size_t counts[64], sum, before;
    counts_of(k, counts, count, &sum, &before);
    const size_t e = ar_dtype_bytes(t);
    const int root = (int)(seed % (unsigned)k->n);
    const ar_buf in = input(k, t, counts[k->r], seed), whole = place(k, sum * e);
    REQUIRE(ar_comm_all_gather(k->c, k->q, whole, ar_const(in), counts, t, "all_gather"));
    note(k, whole, sum * e, "all_gather count %zu", count);
    const ar_buf part = input(k, t, sum, seed + 1);
    REQUIRE(ar_comm_all_gather(k->c, k->q, part, ar_cbuf_at(ar_const(part), before * e), counts, t, "in place"));
    note(k, part, sum * e, "all_gather in place count %zu", count);
    REQUIRE(ar_comm_gather(k->c, k->q, whole, ar_const(in), counts, t, root, "gather"));
    if (k->r == root)
        note(k, whole, sum * e, "gather count %zu root %d", count, root);
    const ar_buf own = place(k, counts[k->r] * e);
    REQUIRE(ar_comm_scatter(k->c, k->q, own, ar_const(part), counts, t, root, "scatter"));
    note(k, own, counts[k->r] * e, "scatter count %zu root %d", count, root);
    drop(k, own);
    drop(k, part);
    drop(k, in);
    drop(k, whole);
}

static void transposed(const rank *k, ar_dtype t, size_t count, unsigned seed)
{
    size_t send[64], receive[64], sent = 0, received = 0;
    const size_t e = ar_dtype_bytes(t);
    for (int i = 0; i < k->n; i++) {
        send[i] = count / 4 * (size_t)(k->r + 1) + (size_t)i;
        receive[i] = count / 4 * (size_t)(i + 1) + (size_t)k->r;
        sent += send[i];
        received += receive[i];
    }
    const ar_buf in = input(k, t, sent, seed), out = place(k, received * e);
    REQUIRE(ar_comm_all_to_all(k->c, k->q, out, ar_const(in), send, receive, t, "all_to_all"));
    note(k, out, received * e, "all_to_all count %zu", count);
    drop(k, in);
    const ar_buf all = input(k, t, count, seed + 1);
    REQUIRE(ar_comm_broadcast(k->c, k->q, all, count, t, (int)(seed % (unsigned)k->n), "broadcast"));
    note(k, all, count * e, "broadcast count %zu", count);
    drop(k, all);
    drop(k, out);
}

/* To the right, to the left, and to itself; then pairs. */
static void messages(const rank *k, ar_dtype t, size_t count, unsigned seed)
{
    const size_t e = ar_dtype_bytes(t);
    const int right = (k->r + 1) % k->n, left = (k->r + k->n - 1) % k->n;
    const ar_buf in = input(k, t, count + 1, seed), out = place(k, 3 * (count + 1) * e);
    const ar_p2p batch[] = {{right, true, in, count},
                            {left, false, out, count},
                            {k->r, true, in, count + 1},
                            {left, true, in, count + 1},
                            {right, false, ar_buf_at(out, count * e), count + 1},
                            {k->r, false, ar_buf_at(out, (2 * count + 1) * e), count + 1}};
    if (k->n > 2)
        REQUIRE(ar_comm_exchange(k->c, k->q, batch, 6, t, "exchange"));
    else
        REQUIRE(ar_comm_exchange(k->c, k->q, batch, 0, t, "nothing to exchange"));
    if (k->n > 2)
        note(k, out, (3 * count + 2) * e, "exchange count %zu", count);
    for (int twice = 0; twice < 2 && k->n % 2 == 0; twice++) {
        if (k->r % 2 == 0)
            REQUIRE(ar_comm_send(k->c, k->q, ar_const(in), count, t, k->r + 1, "send"));
        else
            REQUIRE(ar_comm_recv(k->c, k->q, out, count, t, k->r - 1, "recv"));
        if (k->r % 2 == 1)
            note(k, out, count * e, "message %d count %zu", twice, count);
    }
    REQUIRE(ar_comm_barrier(k->c, k->q, "barrier"));
    drop(k, in);
    drop(k, out);
}

static void note_counts(const rank *k)
{
    uint64_t moved[2];
    ar_comm_counted(k->c, &moved[0], &moved[1]);
    if (k->got)
        keep(k->got, "bytes counted", moved, sizeof moved);
}

/* Every kind on one communicator. */
static void all_kinds(const rank *k, size_t largest)
{
    const size_t sizes[] = {0, 1, 1023, largest};
    unsigned seed = 1;
    for (int t = 0; t < TYPES; t++) {
        for (int o = 0; o < OPS; o++) {
            reductions(k, types[t], ops[o], 37, seed++);
            scattered(k, types[t], ops[o], 41, seed++);
        }
    }
    for (int s = 0; s < 4; s++) {
        reductions(k, s % 2 ? AR_F32 : AR_BF16, AR_SUM, sizes[s], seed++);
        reductions(k, AR_I64, AR_MAX, sizes[s], seed++);
        scattered(k, AR_F32, AR_SUM, sizes[s], seed++);
        gathered(k, types[s], sizes[s], seed++);
        transposed(k, types[3 + s], sizes[s], seed++);
        messages(k, types[s], sizes[s], seed++);
    }
    note_counts(k);
}

/* Two groups, in the order of their keys, which is the ranks' backwards, each with one of its own; and one of all but
 * the first. */
static void groups(const rank *k)
{
    rank half = *k, rest = *k, again = *k;
    REQUIRE(ar_comm_split(&half.c, k->c, k->r % 2, -k->r));
    half.r = ar_comm_rank(half.c);
    half.n = ar_comm_size(half.c);
    reductions(&half, AR_F32, AR_SUM, 1001, 3);
    messages(&half, AR_F64, 100, 4);
    REQUIRE(ar_comm_split(&again.c, half.c, 0, half.r)); /* both halves at once */
    again.r = half.r;
    again.n = half.n;
    reductions(&again, AR_I64, AR_SUM, 7, 6);
    ar_comm_destroy(again.c);
    REQUIRE(ar_comm_split(&rest.c, k->c, k->r > 0 ? 7 : -1, 0));
    if (rest.c) {
        rest.r = ar_comm_rank(rest.c);
        rest.n = ar_comm_size(rest.c);
        gathered(&rest, AR_I32, 500, 5);
    }
    note_counts(&half);
    ar_comm_destroy(rest.c);
    ar_comm_destroy(half.c);
}

/* Three communicators at once, each on a thread of its own, begun in another order on each rank. */
static void at_once(const rank *k)
{
    enum { LANES = 3, COUNT = 5000 };
    ar_comm *c[LANES];
    ar_queue *q[LANES];
    float *in = need(malloc(COUNT * sizeof *in)), *out = need(calloc(LANES * COUNT, sizeof *out));
    for (int i = 0; i < LANES; i++) {
        REQUIRE(ar_comm_split(&c[i], k->c, 0, i == 1 ? -k->r : 0));
        REQUIRE(ar_queue_create(&q[i], AR_QUEUE_THREAD, "lane"));
    }
    fill(in, AR_F32, COUNT, 77u + (unsigned)k->r);
    for (int round = 0; round < 8; round++) {
        for (int i = 0; i < LANES; i++) {
            const int lane = (i + k->r) % LANES;
            const ar_buf to = {out + (size_t)lane * COUNT};
            REQUIRE(ar_comm_all_reduce(c[lane], q[lane], to, round ? ar_const(to) : (ar_cbuf){in}, COUNT, AR_F32,
                                       AR_AVG, "lane"));
        }
    }
    for (int i = 0; i < LANES; i++) {
        REQUIRE(ar_queue_sync(q[i], 0));
        ar_queue_destroy(q[i]);
        ar_comm_destroy(c[i]);
    }
    if (k->got)
        keep(k->got, "three communicators at once", out, LANES * COUNT * sizeof *out);
    free(in);
    free(out);
}

/* A thread of a rank splits while others do: each group has messages of its own all the same. */
typedef struct splitter {
    ar_comm *c;
    float *sum;
} splitter;

static ar_status split_and_sum(void *arg, ar_queue *on)
{
    enum { COUNT = 1000, TIMES = 6 };
    splitter *s = arg;
    for (int i = 0; i < TIMES; i++) {
        ar_comm *part = NULL;
        AR_TRY(ar_comm_split(&part, s->c, 1, 0));
        const ar_buf sum = {s->sum};
        const ar_status st = ar_comm_all_reduce(part, on, sum, ar_const(sum), COUNT, AR_F32, AR_AVG, "part");
        ar_comm_destroy(part);
        AR_TRY(st);
    }
    return AR_OK;
}

static void splits_at_once(const rank *k)
{
    enum { LANES = 3, COUNT = 1000 };
    splitter s[LANES];
    ar_queue *q[LANES];
    for (int i = 0; i < LANES; i++) {
        s[i].sum = need(malloc(COUNT * sizeof *s[i].sum));
        fill(s[i].sum, AR_F32, COUNT, (unsigned)(k->r * LANES + i));
        REQUIRE(ar_comm_split(&s[i].c, k->c, 0, 0));
        REQUIRE(ar_queue_create(&q[i], AR_QUEUE_THREAD, "lane"));
    }
    for (int i = 0; i < LANES; i++) {
        const int lane = (i + k->r) % LANES;
        REQUIRE(ar_queue_chain(q[lane], split_and_sum, &s[lane]));
    }
    for (int i = 0; i < LANES; i++) {
        REQUIRE(ar_queue_sync(q[i], 0));
        if (k->got)
            keep(k->got, "splits at once", s[i].sum, COUNT * sizeof *s[i].sum);
        ar_queue_destroy(q[i]);
        ar_comm_destroy(s[i].c);
        free(s[i].sum);
    }
}

/* --- two ways ----------------------------------------------------------------------------------------------------- */

typedef struct whole {
    results got;
    int of; /* the rank whose results are kept */
    size_t largest;
    bool emulated;
} whole;

static void with_queue(ar_comm *c, ar_device *d, results *got, size_t largest)
{
    rank k = {.c = c, .d = d, .got = got, .r = ar_comm_rank(c), .n = ar_comm_size(c)};
    if (d)
        REQUIRE(d->ops->queue_create(d, &k.q, AR_QUEUE_INLINE, "main"));
    else
        REQUIRE(ar_queue_create(&k.q, AR_QUEUE_INLINE, "main"));
    all_kinds(&k, largest);
    groups(&k);
    at_once(&k);
    splits_at_once(&k);
    ar_queue_destroy(k.q);
}

static ar_status simulated(ar_comm *c, void *arg)
{
    whole *w = arg;
    with_queue(c, NULL, ar_comm_rank(c) == w->of ? &w->got : NULL, w->largest);
    return AR_OK;
}

static int compare_with_simulated(ar_process *p, ar_device *d, size_t largest)
{
    whole reference = {.of = ar_process_rank(p), .largest = largest};
    results got = {0};
    ar_comm *c = NULL;
    REQUIRE(ar_sim_run(ar_process_size(p), &(ar_sim_options){.algorithm = AR_SIM_RING}, simulated, &reference, NULL));
    REQUIRE(ar_process_comm(&c, p, d));
    with_queue(c, d, &got, largest);
    ar_comm_destroy(c);
    const int different = differences(&got, &reference.got, ar_process_rank(p));
    if (ar_process_rank(p) == 0)
        printf("%zu outputs of %zu bytes, %d of them different\n", got.count, got.used, different);
    free(got.bytes);
    free(got.list);
    free(reference.got.bytes);
    free(reference.got.list);
    return different;
}

/* --- what is moved for the host ----------------------------------------------------------------------------------- */

static int host_moves(ar_process *p)
{
    const int r = ar_process_rank(p), n = ar_process_size(p);
    char word[16] = "nothing", own[64];
    if (r == 0)
        snprintf(word, sizeof word, "from zero");
    REQUIRE(ar_process_broadcast(p, word, sizeof word));
    const size_t length = (size_t)r * 7;
    memset(own, 'a' + r, sizeof own);
    void *all = NULL;
    size_t sizes[64];
    REQUIRE(ar_process_gather(p, &all, sizes, own, length));
    int wrong = strcmp(word, "from zero") != 0 || (r != 0 && all != NULL);
    const char *at = all;
    for (int i = 0; r == 0 && i < n; i++) {
        wrong += sizes[i] != (size_t)i * 7;
        for (size_t k = 0; k < sizes[i]; k++)
            wrong += *at++ != 'a' + i;
    }
    free(all);
    const int local = ar_process_local_rank(p);
    REQUIRE(ar_process_gather(p, &all, sizes, &local, sizeof local));
    if (r == 0) {
        int machines = 0;
        for (int i = 0; i < n; i++)
            machines += ((const int *)all)[i] == 0;
        printf("%d processes on %d machine%s\n", n, machines, machines == 1 ? "" : "s");
    }
    free(all);
    if (wrong)
        fprintf(stderr, "rank %d: a broadcast or a gather for the host gave something else\n", r);
    return wrong;
}

/* --- more than an int counts -------------------------------------------------------------------------------------- */

static int large(ar_process *p)
{
    const size_t count = ((size_t)1 << 31) + 4097;
    const int r = ar_process_rank(p);
    unsigned char *bytes = need(malloc(count));
    ar_comm *c = NULL;
    ar_queue *q = NULL;
    REQUIRE(ar_process_comm(&c, p, NULL));
    REQUIRE(ar_queue_create(&q, AR_QUEUE_INLINE, "main"));
    for (size_t i = 0; i < count; i++)
        bytes[i] = (unsigned char)(r == 0 ? i * 7 + i / 256 : 1);
    if (r == 0)
        REQUIRE(ar_comm_send(c, q, (ar_cbuf){bytes}, count, AR_U8, 1, "large"));
    else if (r == 1)
        REQUIRE(ar_comm_recv(c, q, (ar_buf){bytes}, count, AR_U8, 0, "large"));
    int wrong = 0;
    for (size_t i = 0; r < 2 && i < count; i++)
        wrong += bytes[i] != (unsigned char)(i * 7 + i / 256);
    for (size_t i = 0; i < count; i++)
        bytes[i] = (unsigned char)(i % 13);
    REQUIRE(ar_comm_all_reduce(c, q, (ar_buf){bytes}, (ar_cbuf){bytes}, count, AR_U8, AR_SUM, "large"));
    for (size_t i = 0; i < count; i++)
        wrong += bytes[i] != (unsigned char)(i % 13 * (size_t)ar_process_size(p));
    ar_queue_destroy(q);
    ar_comm_destroy(c);
    free(bytes);
    if (wrong)
        fprintf(stderr, "rank %d: %d wrong bytes of %zu\n", r, wrong, count);
    return wrong;
}

static int emulated(ar_process *p)
{
    ar_device *d = NULL;
    const ar_status st = ar_device_emulated_create(&d);
    if (st == AR_ERR_UNSUPPORTED)
        return 0;
    REQUIRE(st);
    const int different = compare_with_simulated(p, d, 2000);
    ar_device_destroy(d);
    return different;
}

int main(int argc, char **argv)
{
    ar_process *p = NULL;
    const ar_process_options o = {.transport = AR_TRANSPORT_MPI};
    const ar_status st = ar_process_create(&p, &o);
    if (st == AR_ERR_UNSUPPORTED) {
        printf("%s\n", ar_error_message());
        return 77;
    }
    REQUIRE(st);
    int wrong = host_moves(p);
    if (argc > 1 && strcmp(argv[1], "large") == 0)
        wrong += large(p);
    else
        wrong += compare_with_simulated(p, NULL, 100003) + emulated(p);
    ar_process_destroy(p);
    return wrong != 0;
}
