/* SPDX-License-Identifier: Apache-2.0 */
/* The NCCL communicator between four processes, on the emulated device, over a library that stands for NCCL
 * (fake_nccl.c): every collective against its definition, and what happens when something is wrong. */
#include <pthread.h>

#include "anyrank/queue.h"
#include "gpu/cluster/nccl/comm.h"
#include "gpu/cluster/process/process.h"
#include "gpu/device_private.h"
#include "ref/comm/comm_private.h"
#include "ref/core/clock.h"
#include "tests/gpu/fake_nccl_lazy.h"
#include "tests/process/forked.h"
#include "tests/sim/batch.h"

enum { RANKS = 4 };
#define LIMIT_NS UINT64_C(600000000000) /* a guard: nothing waits for it */

typedef struct rank_of {
    ar_process *process;
    ar_device *device;
    ar_queue *queue;
    ar_comm *world;
} rank_of;

static ar_status rank_begin(rank_of *r, const ar_process_options *o)
{
    *r = (rank_of){.process = NULL};
    setenv("ANYRANK_NCCL", TEST_BUILD_DIR "/tests/fake_nccl.so", 1);
    ar_process_options joining = *o;
    joining.timeout_ns = LIMIT_NS; /* many processes start at the same time */
    AR_TRY(ari_process_file_create(&r->process, &joining));
    r->process->options.timeout_ns = o->timeout_ns; /* of what follows */
    AR_TRY(ari_device_emulated_create(&r->device));
    AR_TRY(r->device->ops->queue_create(r->device, &r->queue, AR_QUEUE_INLINE, "test"));
    return ari_nccl_comm_create(&r->world, r->process, r->device);
}

static void rank_end(rank_of *r)
{
    ar_comm_destroy(r->world);
    ar_queue_destroy(r->queue);
    ar_device_destroy(r->device);
    ar_process_destroy(r->process);
}

static ar_process_options options_of(uint64_t timeout_ns, bool check_calls)
{
    return (ar_process_options){.transport = AR_TRANSPORT_NCCL, .timeout_ns = timeout_ns, .check_calls = check_calls};
}

/* A rank that does `fn` with its world, and its error if it fails. */
typedef ar_status (*rank_fn)(rank_of *r);

static ar_status rank_run(const ar_process_options *o, rank_fn fn)
{
    rank_of r;
    char why[FORKED_TEXT];
    ar_status st = rank_begin(&r, o);
    if (st == AR_OK)
        st = fn(&r);
    snprintf(why, sizeof why, "%s", ar_error_message());
    rank_end(&r);
    return st == AR_OK ? AR_OK : ar_error_set(st, "%s", why);
}

static ar_status all_kinds(rank_of *rank)
{
    OWNED(ar_queue_destroy) ar_queue *queue = NULL;
    AR_TRY(rank->device->ops->queue_create(rank->device, &queue, AR_QUEUE_THREAD, "comm"));
    return check_groups(rank->world, ROUND_A_RING, rank->device, rank->queue, queue);
}

static ar_status kinds_checked(int rank, void *arg)
{
    const ar_process_options o = options_of(LIMIT_NS, true);
    (void)rank, (void)arg;
    return rank_run(&o, all_kinds);
}

static ar_status kinds_unchecked(int rank, void *arg)
{
    const ar_process_options o = options_of(LIMIT_NS, false);
    (void)rank, (void)arg;
    return rank_run(&o, all_kinds);
}

static void works(int n, forked_fn fn, const char *what)
{
    forked f = forked_run(n, fn, NULL, -1, what);
    forked_expect(&f, -1, AR_OK, "", what);
    forked_end_all(&f);
}

/* From now on first calls wait for what is under way, in this process and those that it starts. */
static void be_lazy(void)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%ld/fd/%d", (long)getpid(), memfd_create("lazy", 0));
    setenv("FAKE_NCCL_LAZY", path, 1);
}

static void unchecked(void)
{
    be_lazy();
    works(RANKS, kinds_unchecked, "every kind");
}

/* NCCL cannot split: its communicators come of an id each. */
static void checked(void)
{
    setenv("FAKE_NCCL_VERSION", "21706", 1);
    works(RANKS, kinds_checked, "every kind, compared");
}

static ar_status alone(rank_of *rank)
{
    ar_comm *half = NULL;
    ar_status st = ar_comm_split(&half, rank->world, 0, 0);
    for (int i = 0; i < 60 && st == AR_OK; i++)
        st = check_seed((uint64_t)i, i % 2 ? half : rank->world, ROUND_A_RING, rank->device, rank->queue, rank->queue);
    ar_comm_destroy(half);
    return st;
}

static ar_status one_process(int rank, void *arg)
{
    const ar_process_options o = options_of(LIMIT_NS, true);
    (void)rank, (void)arg;
    return rank_run(&o, alone);
}

static void one(void)
{
    works(1, one_process, "one process");
}

/* How many ranks of a case are in the call that they cannot end, or have left it out; shared by its processes. */
static atomic_int *stuck;

typedef struct hurried {
    ari_nccl_world *world;
    uint64_t since_ns; /* its last call begins after this */
    int n;             /* how many must have come before the time is over */
    pthread_t thread;
} hurried;

/* Whether all that the rank called before is known to be done, and where `in_call`, a later call is under way. */
static bool is_settled(ari_nccl_world *w, uint64_t since_ns, bool in_call)
{
    bool settled = true;
    pthread_mutex_lock(&w->lock);
    for (const ari_flight_call *c = w->flight.open; c; c = c->next)
        settled = settled && c->since_ns >= since_ns;
    settled = settled && (w->flight.open || !in_call);
    pthread_mutex_unlock(&w->lock);
    return settled;
}

/* Until `n` ranks have come here. False: the world has failed before. */
static bool meet(ari_nccl_world *w, uint64_t since_ns, bool in_call, int n)
{
    bool counted = false;
    while (atomic_load(stuck) < n) {
        if (ari_nccl_world_status(w) != AR_OK)
            return false;
        if (!counted && is_settled(w, since_ns, in_call)) {
            atomic_fetch_add(stuck, 1);
            counted = true;
        }
        forked_sleep(0.001);
    }
    return true;
}

static void *hurry(void *arg)
{
    hurried *h = arg;
    if (meet(h->world, h->since_ns, true, h->n)) {
        pthread_mutex_lock(&h->world->lock);
        h->world->timeout_ns = 0;
        pthread_mutex_unlock(&h->world->lock);
    }
    return NULL;
}

static ari_nccl_world *world_of(const rank_of *rank)
{
    return ((ari_nccl_comm *)rank->world)->world;
}

/* The rank's next call never ends: its timeout is over as soon as n ranks have come to what they do. */
static void hurry_begin(hurried *h, const rank_of *rank, int n)
{
    *h = (hurried){.world = world_of(rank), .since_ns = ari_now_ns(), .n = n};
    if (pthread_create(&h->thread, NULL, hurry, h) != 0)
        exit(2);
}

/* For calls that do not fit each other: where calls are compared, that ends them. */
static void hurry_unless_compared(hurried *h, const rank_of *rank)
{
    *h = (hurried){.n = 0};
    if (!world_of(rank)->checks_calls)
        hurry_begin(h, rank, RANKS);
}

static ar_status hurry_end(hurried *h, ar_status st)
{
    if (h->n > 0)
        pthread_join(h->thread, NULL);
    return st;
}

/* Until the world has failed: the next call hears of it. n: the rank leaves out a call in which the others are stuck;
 * 0: it does not. */
static void until_failed(const rank_of *rank, int n)
{
    (void)meet(world_of(rank), ari_now_ns(), false, n);
    while (ari_nccl_world_status(world_of(rank)) == AR_OK)
        forked_sleep(0.001);
}

/* A small all_reduce on device memory. */
static ar_status sum(rank_of *rank, ar_comm *c, size_t count, ar_dtype t, const char *tag)
{
    ar_device *d = rank->device;
    ar_buf b;
    AR_TRY(d->ops->alloc(d, rank->queue, &b, count * ar_dtype_bytes(t)));
    AR_TRY(d->ops->zero(d, rank->queue, b, count * ar_dtype_bytes(t)));
    ar_status st = ar_comm_all_reduce(c, rank->queue, b, ar_const(b), count, t, AR_SUM, tag);
    if (st == AR_OK)
        st = ar_queue_sync(rank->queue, 0);
    d->ops->free(d, rank->queue, b);
    return st;
}

static ar_status other_count(rank_of *rank)
{
    hurried h;
    AR_TRY(sum(rank, rank->world, 8, AR_I64, "first"));
    hurry_unless_compared(&h, rank);
    return hurry_end(&h, sum(rank, rank->world, ar_comm_rank(rank->world) == 2 ? 7 : 8, AR_I64, "second"));
}

static ar_status swapped(rank_of *rank)
{
    const bool other = ar_comm_rank(rank->world) == 1;
    AR_TRY(sum(rank, rank->world, 8, AR_I64, other ? "b" : "a"));
    return sum(rank, rank->world, 8, AR_I64, other ? "a" : "b");
}

static ar_status one_missing(rank_of *rank)
{
    AR_TRY(sum(rank, rank->world, 8, AR_I64, "first"));
    if (ar_comm_rank(rank->world) == 3) {
        until_failed(rank, RANKS); /* it hears of the end of the world in its next call */
        return sum(rank, rank->world, 8, AR_I64, "late");
    }
    hurried h;
    hurry_begin(&h, rank, RANKS);
    ar_status st = hurry_end(&h, sum(rank, rank->world, 8, AR_I64, "second"));
    const ar_status again = sum(rank, rank->world, 8, AR_I64, "third");
    if (st != AR_OK && again == AR_OK)
        st = ar_error_set(AR_ERR_INTERNAL, "a call after the end of the world");
    return st;
}

static ar_status missing_in_half(rank_of *rank)
{
    ar_comm *half = NULL;
    const int r = ar_comm_rank(rank->world);
    AR_TRY(ar_comm_split(&half, rank->world, r / 2, 0));
    ar_status st = sum(rank, half, 8, AR_F32, "first");
    if (st == AR_OK && r == 0) {
        hurried h;
        hurry_begin(&h, rank, RANKS);
        st = hurry_end(&h, sum(rank, half, 8, AR_F32, "second"));
    }
    if (st == AR_OK && r > 0)
        until_failed(rank, RANKS);
    if (st == AR_OK)
        st = sum(rank, rank->world, 8, AR_F32, "third");
    char why[FORKED_TEXT];
    snprintf(why, sizeof why, "%s", ar_error_message());
    ar_comm_destroy(half);
    return st == AR_OK ? AR_OK : ar_error_set(st, "%s", why);
}

static ar_status killed(rank_of *rank)
{
    AR_TRY(sum(rank, rank->world, 8, AR_I64, "first"));
    if (ar_comm_rank(rank->world) == 2)
        raise(SIGKILL);
    return sum(rank, rank->world, 8, AR_I64, "second");
}

static ar_status aborted(rank_of *rank)
{
    AR_TRY(sum(rank, rank->world, 8, AR_I64, "first"));
    if (ar_comm_rank(rank->world) == 1)
        ari_comm_abort(rank->world, AR_ERR_DATA, "the loss is NaN");
    return sum(rank, rank->world, 8, AR_I64, "second");
}

/* Nothing but a wait of a queue that stands on a stream is left to hear of it. */
static ar_status fails_later(rank_of *rank)
{
    AR_TRY(sum(rank, rank->world, 8, AR_I64, "first"));
    if (ar_comm_rank(rank->world) == 1)
        ari_comm_abort(rank->world, AR_ERR_DATA, "the loss is NaN");
    until_failed(rank, 0);
    return ar_queue_sync(rank->queue, 0);
}

static ar_status async_error(rank_of *rank)
{
    AR_TRY(sum(rank, rank->world, 8, AR_I64, "first"));
    until_failed(rank, 0); /* NCCL fails on rank 1 */
    return sum(rank, rank->world, 8, AR_I64, "second");
}

/* A call of another thread, on a queue of its own. */
typedef struct beside {
    rank_of rank;
    ar_comm *comm;
    pthread_t thread;
    ar_status st;
    atomic_bool ended;
} beside;

static void *call_beside(void *arg)
{
    beside *b = arg;
    b->st = sum(&b->rank, b->comm, 8, AR_I64, "beside");
    atomic_store(&b->ended, true);
    return NULL;
}

static ar_status beside_begin(beside *b, const rank_of *rank, ar_comm *comm)
{
    *b = (beside){.rank = *rank, .comm = comm};
    AR_TRY(rank->device->ops->queue_create(rank->device, &b->rank.queue, AR_QUEUE_INLINE, "beside"));
    return pthread_create(&b->thread, NULL, call_beside, b) == 0 ? AR_OK : ar_error_set(AR_ERR_MEMORY, "no thread");
}

static void beside_end(beside *b)
{
    pthread_join(b->thread, NULL);
    ar_queue_destroy(b->rank.queue);
}

/* Rank 1 aborts while another of its threads is inside of NCCL: its communicator is not freed under that thread. The
 * stand-in ends the process that does. */
static ar_status aborts_inside(rank_of *rank)
{
    pthread_mutex_t *use = &((ari_nccl_comm *)rank->world)->use;
    beside b;
    AR_TRY(beside_begin(&b, rank, rank->world));
    while (!atomic_load(&b.ended) && pthread_mutex_trylock(use) == 0)
        pthread_mutex_unlock(use);
    if (ar_comm_rank(rank->world) == 1)
        ari_comm_abort(rank->world, AR_ERR_DATA, "the loss is NaN");
    beside_end(&b);
    until_failed(rank, 0);
    return sum(rank, rank->world, 8, AR_I64, "next");
}

/* The two ranks have calls of two communicators under way, in different orders: where one of them were the first of its
 * communicator, each rank would wait for the other. */
static ar_status calls_cross(rank_of *rank)
{
    lazy_board *board = lazy_open(getenv("FAKE_NCCL_LAZY"));
    const int r = ar_comm_rank(rank->world);
    ar_comm *comm[2] = {NULL, NULL};
    beside b = {.st = AR_OK};
    AR_TRY(ar_comm_split(&comm[0], rank->world, 0, 0));
    ar_status st = ar_comm_split(&comm[1], rank->world, 0, 0);
    if (st == AR_OK)
        st = beside_begin(&b, rank, comm[r]);
    if (st == AR_OK) {
        while (!atomic_load(&b.ended) && !lazy_runs(board, getpid()))
            forked_sleep(0.0001);
        st = sum(rank, comm[1 - r], 8, AR_I64, "crossing");
        beside_end(&b);
    }
    char why[FORKED_TEXT];
    snprintf(why, sizeof why, "%s", ar_error_message());
    ar_comm_destroy(comm[1]);
    ar_comm_destroy(comm[0]);
    return st == AR_OK ? b.st : ar_error_set(st, "%s", why);
}

static ar_status split_without_one(rank_of *rank)
{
    ar_comm *half = NULL;
    if (ar_comm_rank(rank->world) == 0) {
        until_failed(rank, RANKS);
        return ar_comm_split(&half, rank->world, 0, 0);
    }
    hurried h;
    hurry_begin(&h, rank, RANKS);
    return hurry_end(&h, ar_comm_split(&half, rank->world, 0, 0));
}

static ar_status split_whole(rank_of *rank)
{
    ar_comm *whole = NULL;
    const ar_status st = ar_comm_split(&whole, rank->world, 0, 0);
    ar_comm_destroy(whole);
    return st;
}

static ar_status message_of_other_size(rank_of *rank)
{
    ar_device *d = rank->device;
    const int r = ar_comm_rank(rank->world);
    ar_buf b;
    AR_TRY(d->ops->alloc(d, rank->queue, &b, 64));
    AR_TRY(d->ops->zero(d, rank->queue, b, 64));
    ar_status st = AR_OK;
    hurried h;
    hurry_unless_compared(&h, rank);
    if (r == 1)
        st = ar_comm_send(rank->world, rank->queue, ar_const(b), 8, AR_F32, 2, "activations");
    else if (r == 2)
        st = ar_comm_recv(rank->world, rank->queue, b, 16, AR_F32, 1, "activations");
    d->ops->free(d, rank->queue, b);
    return hurry_end(&h, st == AR_OK ? sum(rank, rank->world, 1, AR_F32, "end") : st);
}

/* A world in which something goes wrong. Every rank, but the killed one, gets `words`: those of the bits of `own` with
 * the status `st`, all others with `others`. */
typedef struct wrong {
    rank_fn fn;
    ar_status st;
    unsigned own;
    ar_status others;
    const char *words, *what;
    bool compares, shares;             /* options */
    uint64_t timeout_ns;               /* 0: LIMIT_NS */
    const char *gpu, *error, *version; /* of rank 1, and the GPU of all but rank 0: variables of the stand-in */
    int killed;                        /* 0: none */
} wrong;

static ar_status go_wrong(int rank, void *arg)
{
    const wrong *w = arg;
    ar_process_options o = options_of(w->timeout_ns ? w->timeout_ns : LIMIT_NS, w->compares);
    o.share_gpus = w->shares;
    if (w->gpu && rank != 0)
        setenv("FAKE_NCCL_GPU", w->gpu, 1);
    if (w->error && rank == 1)
        setenv("FAKE_NCCL_ERROR", w->error, 1);
    if (w->version && rank == 1)
        setenv("FAKE_NCCL_VERSION", w->version, 1);
    return rank_run(&o, w->fn);
}

static void goes_wrong(const wrong *of)
{
    wrong w = *of;
    stuck = mmap(NULL, sizeof *stuck, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (stuck == MAP_FAILED)
        exit(2);
    forked f = forked_run(RANKS, go_wrong, &w, w.killed > 0 ? w.killed : -1, w.what);
    for (int r = 0; r < RANKS; r++) {
        char detail[FORKED_TEXT + 64];
        const ar_status want = w.own >> r & 1 ? w.st : w.others;
        snprintf(detail, sizeof detail, "rank %d: %s '%s', expected %s with '%s'", r, ar_status_name(f.end[r].status),
                 f.end[r].text, ar_status_name(want), w.words);
        if (w.killed == 0 || r != w.killed)
            check(f.end[r].status == want && strstr(f.end[r].text, w.words), w.what, detail);
    }
    forked_end_all(&f);
}

static ar_status crossing(int rank, void *arg)
{
    const ar_process_options o = options_of(LIMIT_NS, false);
    (void)rank, (void)arg;
    return rank_run(&o, calls_cross);
}

static void first_calls(void)
{
    be_lazy();
    works(2, crossing, "calls in different orders");
}

static ar_status look_at_environment(rank_of *rank)
{
    const char *id = getenv("NCCL_HOSTID"), *name = getenv("NCCL_SOCKET_IFNAME");
    char want[32];
    snprintf(want, sizeof want, "anyrank-%d-", ar_comm_rank(rank->world));
    const char *const connect = getenv("NCCL_RUNTIME_CONNECT");
    if (!connect || strcmp(connect, "0") != 0)
        return ar_error_set(AR_ERR_INTERNAL, "NCCL would connect when it has to");
    if (!id || strncmp(id, want, strlen(want)) != 0 || !name || strcmp(name, "lo") != 0)
        return ar_error_set(AR_ERR_INTERNAL, "NCCL would see one host");
    return sum(rank, rank->world, 8, AR_I64, "first");
}

/* The four have to meet within the timeout, which takes as long as the machine is busy: a longer one, if it was too
 * short. The last one counts. */
static void no_end_of_start(void)
{
    static const char words[] = "to which all have come: a GPU or the network stands still";
    uint64_t timeout_ns = 500000000;
    for (bool met = false; !met; timeout_ns *= 4) {
        wrong w = {.fn = all_kinds, .timeout_ns = timeout_ns, .error = "hang"};
        forked f = forked_run(RANKS, go_wrong, &w, -1, "NCCL does not start");
        met = timeout_ns > LIMIT_NS / 4;
        for (int r = 0; r < RANKS; r++)
            met = met || strstr(f.end[r].text, words);
        for (int r = 0; r < RANKS && met; r++)
            check(f.end[r].status == AR_ERR_TIMEOUT && strstr(f.end[r].text, words), "NCCL does not start",
                  f.end[r].text);
        forked_end_all(&f);
    }
}

static ar_status without_library(int rank, void *arg)
{
    const ar_process_options o = options_of(LIMIT_NS, false);
    const char *const name = arg;
    rank_of r = {.process = NULL};
    (void)rank;
    setenv("ANYRANK_NCCL", name, 1);
    AR_TRY(ari_process_file_create(&r.process, &o));
    AR_TRY(ari_device_emulated_create(&r.device));
    const ar_status st = ari_nccl_comm_create(&r.world, r.process, r.device);
    char why[FORKED_TEXT];
    snprintf(why, sizeof why, "%s", ar_error_message());
    rank_end(&r);
    return st == AR_OK ? AR_OK : ar_error_set(st, "%s", why);
}

static void no_library(void)
{
    char missing_file[] = "/nonexistent/libnccl.so.2", other[] = "libm.so.6";
    forked f = forked_run(1, without_library, missing_file, -1, "no NCCL");
    forked_expect(&f, -1, AR_ERR_UNSUPPORTED, "NCCL cannot be loaded: /nonexistent/libnccl.so.2", "no NCCL");
    forked_end_all(&f);
    f = forked_run(1, without_library, other, -1, "another library");
    forked_expect(&f, -1, AR_ERR_UNSUPPORTED, "libm.so.6 is no NCCL that can be used: it has no nccl",
                  "another library");
    forked_end_all(&f);
}

static const wrong all_wrong[] = {
    {other_count, AR_ERR_MISMATCH, 0xf, AR_OK,
     "ranks 0 and 2 disagree in collective #3 of ranks 0-3: rank 0 calls all_reduce(I64, count 8, sum) "
     "'second', rank 2 calls all_reduce(I64, count 7, sum) 'second': count 8 against 7",
     "a mismatch, compared", .compares = true},
    {other_count, AR_ERR_MISMATCH, 0xf, AR_OK,
     "ranks 0 and 2 disagree in collective #3 of ranks 0-3: rank 0 calls all_reduce(I64, count 8, sum) "
     "'second', rank 2 calls all_reduce(I64, count 7, sum) 'second'",
     "a mismatch, after the timeout", .compares = false},
    {swapped, AR_ERR_MISMATCH, 0xf, AR_OK, "tag 'a' against 'b', so they call in different orders",
     "another order, compared", .compares = true},
    {one_missing, AR_ERR_TIMEOUT, 0xf, AR_OK,
     "s in all_reduce(I64, count 8, sum) 'second', collective #3 of ranks 0-3, for rank 3\n", "one is missing",
     .compares = false},
    {one_missing, AR_ERR_TIMEOUT, 0xf, AR_OK, "collective #3 of ranks 0-3, for rank 3\n", "one is missing, compared",
     .compares = true},
    {missing_in_half, AR_ERR_TIMEOUT, 0x3, AR_ERR_ABORTED,
     "s in all_reduce(F32, count 8, sum) 'second', collective #2 of ranks 0-1, for rank 1\n",
     "one is missing in a group", .compares = false},
    {killed, AR_OK, 0, AR_ERR_ABORTED, "another rank failed: rank 2 is gone", "one is killed", .compares = false,
     .killed = 2},
    {aborted, AR_ERR_DATA, 0x2, AR_ERR_ABORTED, "rank 1 aborted: the loss is NaN", "one aborts", .compares = false},
    {fails_later, AR_ERR_DATA, 0x2, AR_ERR_ABORTED, "rank 1 aborted: the loss is NaN", "a wait hears of an abort",
     .compares = false},
    {aborts_inside, AR_ERR_DATA, 0x2, AR_ERR_ABORTED, "rank 1 aborted: the loss is NaN", "an abort beside a call",
     .compares = false, .error = "dwell"},
    {async_error, AR_ERR_DEVICE, 0x2, AR_ERR_ABORTED,
     "rank 1: NCCL: remote process exited or there was a network error: said the stand-in",
     "an error of NCCL's own threads", .compares = false, .error = "async"},
    {split_whole, AR_ERR_DEVICE, 0x2, AR_ERR_ABORTED,
     "remote process exited or there was a network error: said the stand-in", "a split that fails", .compares = false,
     .error = "split"},
    {split_without_one, AR_ERR_TIMEOUT, 0xf, AR_OK, "collective #2 of ranks 0-3, for rank 0\n", "split without one",
     .compares = false},
    {message_of_other_size, AR_ERR_MISMATCH, 0x6, AR_ERR_ABORTED,
     "ranks 1 and 2 disagree in message #1 of ranks 1-2: rank 1 calls send(F32, count 8, peer 2) "
     "'activations', rank 2 calls recv(F32, count 16, peer 1) 'activations'",
     "a message of another size", .compares = false},
    {message_of_other_size, AR_ERR_MISMATCH, 0x6, AR_ERR_ABORTED,
     "rank 1 sends 8 elements of F32 to rank 2, which expects 16", "a message of another size, compared",
     .compares = true},
    {all_kinds, AR_ERR_ARG, 0xf, AR_OK, "ranks 1 and 2 are both on the GPU 0000:3b:00.0 of ", "two on one GPU",
     .compares = false, .gpu = "0000:3b:00.0"},
    {look_at_environment, AR_OK, 0, AR_OK, "", "two on one GPU, on purpose", .compares = false, .gpu = "0000:3b:00.0",
     .shares = true},
    {all_kinds, AR_ERR_ARG, 0xf, AR_OK, "rank 0 has NCCL 22809 and rank 1 has NCCL 22105", "two versions",
     .compares = false, .version = "22105"},
    {all_kinds, AR_ERR_DEVICE, 0x2, AR_ERR_ABORTED,
     "NCCL cannot make a communicator: unhandled system error: said the stand-in", "NCCL fails to start",
     .compares = false, .error = "init"},
};

enum { WRONG = sizeof all_wrong / sizeof *all_wrong };

static void run_case(size_t i)
{
    static void (*const others[])(void) = {unchecked, checked, one, first_calls, no_end_of_start, no_library};
    if (i < WRONG)
        goes_wrong(&all_wrong[i]);
    else
        others[i - WRONG]();
}

int main(void)
{
    ar_device *d = NULL;
    if (ari_device_emulated_create(&d) == AR_ERR_UNSUPPORTED) {
        printf("skipped: %s\n", ar_error_message());
        return 77;
    }
    ar_device_destroy(d);
    return forked_each(run_case, WRONG + 6);
}
