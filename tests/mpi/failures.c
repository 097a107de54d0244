/* SPDX-License-Identifier: Apache-2.0 */
/* How four processes end when one of them fails: each case in a world of its own, within one run of MPI, which is the
 * program's own. What every rank gets, that all have the same text, what is in it, and how long it took.
 * tests/mpi/mpi_test.py starts it.
 *
 *     mpirun -n 4 failures [serialized]      serialized: an MPI that takes one thread at a time
 *     mpirun -n 4 failures killed|stuck      one case that ends the launcher's job instead */
#include <mpi.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "anyrank/process.h"
#include "tests/support/scoped.h"

enum { RANKS = 4, TEXT = 16384 };
/* Nobody's, where none is to end by a timeout. */
#define LONG_S 600.0
/* How long a rank may take to come on time depends on the machine: where it took longer than the timeout, the case runs
 * again with one four times as long. The last one counts. */
#define SHORTEST_S 0.3
#define LONGEST_S 30.0

typedef struct world {
    ar_process *p;
    ar_comm *c;
    ar_queue *q;
    int r;
    pid_t pid[RANKS];
    double timeout_s;
    bool quiet; /* a complaint is no more than a reason to try again */
} world;

static void need(ar_status st, const char *what)
{
    if (st == AR_OK)
        return;
    fprintf(stderr, "failures: %s: %s\n", what, ar_error_message());
    _Exit(1);
}

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void sleep_s(double s)
{
    nanosleep(&(struct timespec){.tv_sec = (time_t)s, .tv_nsec = (long)((s - (double)(time_t)s) * 1e9)}, NULL);
}

/* --- cases: what rank w->r does ----------------------------------------------------------------------------------- */

static float a[64], b[64];
static const ar_buf out = {b};
static const ar_cbuf in = {a};

static ar_status plain(world *w)
{
    return ar_comm_all_reduce(w->c, w->q, out, in, 8, AR_F32, AR_SUM, "step");
}

static ar_status other_kind(world *w)
{
    need(plain(w), "the first all_reduce");
    return w->r == 2 ? ar_comm_broadcast(w->c, w->q, out, 8, AR_F32, 0, "step") : plain(w);
}

static ar_status other_dtype(world *w)
{
    return ar_comm_all_reduce(w->c, w->q, out, in, 8, w->r == 3 ? AR_I32 : AR_F32, AR_SUM, "step");
}

static ar_status other_op(world *w)
{
    return ar_comm_all_reduce(w->c, w->q, out, in, 8, AR_F32, w->r == 1 ? AR_MAX : AR_SUM, "step");
}

static ar_status other_count(world *w)
{
    return ar_comm_all_reduce(w->c, w->q, out, in, w->r == 1 ? 9 : 8, AR_F32, AR_SUM, "step");
}

static ar_status other_root(world *w)
{
    return ar_comm_reduce(w->c, w->q, out, in, 8, AR_F32, AR_SUM, w->r == 3 ? 1 : 0, "step");
}

static ar_status other_counts(world *w)
{
    const size_t counts[RANKS] = {1, 2, w->r == 2 ? 4 : 3, 1};
    return ar_comm_all_gather(w->c, w->q, out, in, counts, AR_F32, "step");
}

static ar_status other_tag(world *w)
{
    return ar_comm_all_reduce(w->c, w->q, out, in, 8, AR_F32, AR_SUM, w->r == 2 ? "layers.1.up" : "layers.0.up");
}

static ar_status other_share(world *w)
{
    const size_t send[RANKS] = {2, 2, 2, 2}, receive[RANKS] = {2, w->r == 3 ? 1 : 2, 2, 2};
    return ar_comm_all_to_all(w->c, w->q, out, in, send, receive, AR_F32, "step");
}

static ar_status other_batch(world *w)
{
    const ar_p2p send = {1, true, {a}, 5}, receive = {0, false, {b}, 4};
    return ar_comm_exchange(w->c, w->q, w->r == 0 ? &send : &receive, w->r < 2, AR_F32, "step");
}

static ar_status other_message(world *w)
{
    if (w->r == 0)
        return ar_comm_send(w->c, w->q, in, 5, AR_F32, 1, "step");
    return w->r == 1 ? ar_comm_recv(w->c, w->q, out, 4, AR_F32, 0, "step") : plain(w);
}

static ar_status late(world *w)
{
    AR_TRY(plain(w));
    if (w->r == 3)
        sleep_s(2 * w->timeout_s + 0.1);
    return plain(w);
}

/* Rank 3 never comes to the group of ranks 1 and 3, in which it has place 1: rank 1 tells the others when it has given
 * up, by messages of the test's own. */
static ar_status late_in_group(world *w)
{
    OWNED(ar_comm_destroy) ar_comm *group = NULL;
    char over = 0;
    ar_status st = ar_comm_split(&group, w->c, w->r % 2, 0);
    if (w->r == 1) {
        if (st == AR_OK)
            st = ar_comm_all_reduce(group, w->q, out, in, 8, AR_F32, AR_SUM, "in a group");
        for (int i = 0; i < RANKS; i++) {
            if (i != 1)
                MPI_Send(&over, 1, MPI_CHAR, i, 0, MPI_COMM_WORLD);
        }
    } else {
        MPI_Recv(&over, 1, MPI_CHAR, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        st = plain(w);
    }
    return st;
}

/* Each of two waits where the other is not. */
static ar_status crossed(world *w)
{
    ar_comm *half = NULL, *other = NULL;
    ar_status st = ar_comm_split(&half, w->c, w->r / 2, 0);
    if (st == AR_OK)
        st = ar_comm_split(&other, w->c, w->r % 2, 0);
    ar_comm *first = w->r == 0 || w->r == 3 ? half : other;
    if (st == AR_OK)
        st = ar_comm_all_reduce(first, w->q, out, in, 8, AR_F32, AR_SUM, "crossed");
    ar_comm_destroy(half);
    ar_comm_destroy(other);
    return st;
}

static ar_status aborts(world *w)
{
    if (w->r != 1)
        return plain(w);
    ar_comm_abort(w->c, AR_ERR_DATA, "the loss is not a number");
    return AR_ERR_DATA;
}

static ar_status process_fails(world *w)
{
    if (w->r != 2)
        return plain(w);
    ar_process_abort(w->p, AR_ERR_IO, "no room left on the disk");
    return AR_ERR_IO;
}

static ar_status host_fails(world *w)
{
    void *all = NULL;
    size_t sizes[RANKS];
    if (w->r == 2) {
        ar_process_abort(w->p, AR_ERR_IO, "no such file");
        return AR_ERR_IO;
    }
    return ar_process_gather(w->p, &all, sizes, "x", 1);
}

static ar_status host_late(world *w)
{
    void *all = NULL;
    size_t sizes[RANKS];
    if (w->r == 1)
        sleep_s(2 * w->timeout_s + 0.1);
    return ar_process_gather(w->p, &all, sizes, "x", 1);
}

static ar_status returns_early(world *w)
{
    need(plain(w), "the first all_reduce");
    return w->r == 2 ? AR_OK : plain(w);
}

/* Does not even listen. */
static ar_status stopped(world *w)
{
    if (w->r == 3)
        raise(SIGSTOP);
    const ar_status st = plain(w);
    if (w->r == 0)
        kill(w->pid[3], SIGCONT);
    return st;
}

/* In the middle: large enough that the transfer needs both sides all the time. */
static ar_status stopped_in_the_middle(world *w)
{
    const size_t count = (size_t)1 << 20;
    OWNED(free) float *x = calloc(count, sizeof *x);
    need(x ? AR_OK : AR_ERR_MEMORY, "memory");
    ar_status st = AR_OK;
    for (int i = 0; st == AR_OK && i < 1000000; i++) {
        if (w->r == 3 && i == 3)
            raise(SIGSTOP);
        st = ar_comm_all_reduce(w->c, w->q, (ar_buf){x}, (ar_cbuf){x}, count, AR_F32, AR_MAX, "large");
    }
    if (w->r == 0)
        kill(w->pid[3], SIGCONT);
    return st;
}

static ar_status drop_lane(void *unused)
{
    (void)unused;
    return ar_error_set(AR_ERR_DATA, "what came before it failed");
}

/* A thread's queue that failed before the call is reached. */
static ar_status on_thread(world *w)
{
    ar_queue *q = NULL;
    need(ar_queue_create(&q, AR_QUEUE_THREAD, "lane"), "a queue");
    if (w->r == 1)
        need(ar_queue_host(q, drop_lane, NULL), "a task");
    const ar_status st = ar_comm_all_reduce(w->c, q, out, in, 8, AR_F32, AR_SUM, "on a thread");
    const ar_status ended = ar_queue_sync(q, 0);
    ar_queue_destroy(q);
    return st == AR_OK ? ended : st;
}

enum {
    NO_ONE = -1,
    LATE = 1, /* no status: AR_ERR_TIMEOUT, or AR_ERR_ABORTED where another one was the first to see it */
    FREE = 2  /* no status: whatever it is, as the rank's part may be over before */
};

typedef struct scenario {
    const char *name;
    ar_status (*act)(world *w);
    int expected[RANKS]; /* what each rank gets */
    const char *says[4]; /* what all are told */
    bool by_timeout;     /* it ends no earlier */
    int culprit;         /* whose own time does not matter */
} scenario;

#define MISMATCH AR_ERR_MISMATCH, AR_ERR_MISMATCH, AR_ERR_MISMATCH, AR_ERR_MISMATCH
static const scenario scenarios[] = {
    {"another kind",
     other_kind,
     {MISMATCH},
     {"ranks 0 and 2 disagree in collective #2 of ranks 0-3", "kind all_reduce against broadcast",
      "all_reduce #1 step"},
     false,
     NO_ONE},
    {"another dtype", other_dtype, {MISMATCH}, {"ranks 0 and 3 disagree", "dtype F32 against I32"}, false, NO_ONE},
    {"another operation", other_op, {MISMATCH}, {"ranks 0 and 1 disagree", "operation sum against max"}, false, NO_ONE},
    {"another count", other_count, {MISMATCH}, {"ranks 0 and 1 disagree", "count 8 against 9"}, false, NO_ONE},
    {"another root", other_root, {MISMATCH}, {"ranks 0 and 3 disagree", "root 0 against 1"}, false, NO_ONE},
    {"other counts",
     other_counts,
     {MISMATCH},
     {"ranks 0 and 2 disagree", "count of rank 2: 3 against 4"},
     false,
     NO_ONE},
    {"another tag", other_tag, {MISMATCH}, {"tag 'layers.0.up' against 'layers.1.up'"}, false, NO_ONE},
    {"another share", other_share, {MISMATCH}, {"rank 1 sends 2 elements to rank 3, which expects 1"}, false, NO_ONE},
    {"another batch",
     other_batch,
     {MISMATCH},
     {"message 0 from rank 0 to rank 1: 5 elements are sent, 4 expected"},
     false,
     NO_ONE},
    {"another message",
     other_message,
     {AR_ERR_MISMATCH, AR_ERR_MISMATCH, AR_ERR_ABORTED, AR_ERR_ABORTED},
     {"rank 0 sends 5 elements of F32 to rank 1, which expects 4"},
     false,
     NO_ONE},
    {"a late rank",
     late,
     {LATE, LATE, LATE, LATE},
     {"in all_reduce(F32, count 8, sum) 'step', collective #2 of ranks 0-3, for rank 3", "all_reduce #1 step",
      "running"},
     true,
     3},
    {"a late rank of a group",
     late_in_group,
     {LATE, LATE, LATE, LATE},
     {"rank 1 waited", "'in a group', collective #1 of ranks 1, 3, for rank 3"},
     true,
     NO_ONE},
    {"ranks that wait for each other",
     crossed,
     {LATE, LATE, LATE, LATE},
     {"'crossed', collective #1 of ranks", "for rank"},
     true,
     NO_ONE},
    {"an abort",
     aborts,
     {AR_ERR_ABORTED, AR_ERR_DATA, AR_ERR_ABORTED, AR_ERR_ABORTED},
     {"rank 1 aborted: the loss is not a number", "all_reduce #1 step"},
     false,
     NO_ONE},
    {"a process that fails",
     process_fails,
     {AR_ERR_ABORTED, AR_ERR_ABORTED, AR_ERR_IO, AR_ERR_ABORTED},
     {"rank 2 failed with AR_ERR_IO: no room left on the disk"},
     false,
     NO_ONE},
    {"a failure while the host's bytes move",
     host_fails,
     {AR_ERR_ABORTED, FREE, AR_ERR_IO, FREE},
     {"rank 2 failed with AR_ERR_IO: no such file"},
     false,
     NO_ONE},
    {"a late process of a gather",
     host_late,
     {AR_ERR_TIMEOUT, FREE, FREE, FREE},
     {"rank 0 waited", "s in a gather of the processes for rank 1"},
     true,
     1},
    {"a rank that returns early",
     returns_early,
     {AR_ERR_MISMATCH, AR_ERR_MISMATCH, AR_OK, AR_ERR_MISMATCH},
     {"rank 2 returned while rank", "waits for it in all_reduce(", "collective #2 of ranks 0-3", "returned"},
     false,
     NO_ONE},
    {"a stopped process", stopped, {LATE, LATE, LATE, LATE}, {"for rank 3", "no answer"}, true, 3},
    {"a process stopped in the middle",
     stopped_in_the_middle,
     {LATE, LATE, LATE, LATE},
     {"waited", "'large'", "no answer"},
     true,
     3},
    {"a queue that failed before",
     on_thread,
     {AR_ERR_ABORTED, AR_ERR_DATA, AR_ERR_ABORTED, AR_ERR_ABORTED},
     {"rank 1 aborted: what came before it failed"},
     false,
     NO_ONE},
};

/* --- a case ------------------------------------------------------------------------------------------------------- */

static int complain(const world *w, const scenario *s, const char *what, const char *text)
{
    if (!w->quiet)
        fprintf(stderr, "failures: %s, rank %d: %s: %s\n", s->name, w->r, what, text);
    return 1;
}

static bool is_expected(int expected, ar_status st)
{
    return expected == FREE || expected == (int)st ||
           (expected == LATE && (st == AR_ERR_TIMEOUT || st == AR_ERR_ABORTED));
}

/* The text of the ranks that got an error is one. */
static int compare_texts(const world *w, const scenario *s, const char *text)
{
    static char all[RANKS][TEXT];
    int wrong = 0, first = -1;
    MPI_Allgather(text, TEXT, MPI_CHAR, all, TEXT, MPI_CHAR, MPI_COMM_WORLD);
    for (int i = 0; i < RANKS; i++) {
        first = first < 0 && all[i][0] ? i : first;
        if (w->r == 0 && all[i][0] && strcmp(all[i], all[first]) != 0)
            wrong = complain(w, s, "another text than the first one", all[i]);
    }
    if (w->r != 0)
        return 0;
    for (size_t i = 0; i < sizeof s->says / sizeof *s->says && s->says[i]; i++) {
        if (first < 0 || !strstr(all[first], s->says[i]))
            wrong += complain(w, s, s->says[i], first < 0 ? "there is no text" : all[first]);
    }
    return wrong;
}

static int run_once(const scenario *s, double timeout_s, bool quiet)
{
    static char text[TEXT];
    world w = {.timeout_s = timeout_s, .quiet = quiet};
    const ar_process_options o = {.transport = AR_TRANSPORT_MPI, .timeout_ns = (uint64_t)(timeout_s * 1e9)};
    need(ar_process_create(&w.p, &o), "a process");
    need(ar_process_comm(&w.c, w.p, NULL), "a communicator");
    need(ar_queue_create(&w.q, AR_QUEUE_INLINE, "main"), "a queue");
    w.r = ar_process_rank(w.p);
    const pid_t own = getpid();
    MPI_Allgather(&own, sizeof own, MPI_BYTE, w.pid, sizeof own, MPI_BYTE, MPI_COMM_WORLD);
    const double start = now_s();
    ar_error_clear();
    const ar_status st = s->act(&w);
    const double took = now_s() - start;
    int wrong = 0;
    if (!is_expected(s->expected[w.r], st))
        wrong += complain(&w, s, ar_status_name(st), ar_error_message());
    if (w.r != s->culprit && s->expected[w.r] == LATE && s->by_timeout && took < timeout_s)
        wrong += complain(&w, s, "it ended before the timeout", "");
    snprintf(text, sizeof text, "%s", st == AR_OK ? "" : ar_comm_error(w.c));
    ar_queue_destroy(w.q);
    ar_comm_destroy(w.c);
    ar_process_destroy(w.p);
    wrong += compare_texts(&w, s, text);
    MPI_Allreduce(MPI_IN_PLACE, &wrong, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    return wrong;
}

static int run(const scenario *s)
{
    double timeout_s = s->by_timeout ? SHORTEST_S : LONG_S;
    while (timeout_s < LONGEST_S && run_once(s, timeout_s, true) != 0)
        timeout_s *= 4;
    return timeout_s < LONGEST_S ? 0 : run_once(s, timeout_s, false);
}

/* --- what ends the job -------------------------------------------------------------------------------------------- */

static int end_job(const char *how)
{
    OWNED(ar_process_destroy) ar_process *p = NULL;
    OWNED(ar_comm_destroy) ar_comm *c = NULL;
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    const ar_process_options o = {.transport = AR_TRANSPORT_MPI, .timeout_ns = (uint64_t)(SHORTEST_S * 1e9)};
    need(ar_process_create(&p, &o), "a process");
    need(ar_process_comm(&c, p, NULL), "a communicator");
    need(ar_queue_create(&q, AR_QUEUE_INLINE, "main"), "a queue");
    const bool culprit = ar_process_rank(p) == 1;
    if (culprit && strcmp(how, "killed") == 0)
        raise(SIGKILL);
    if (culprit)
        pause(); /* and never comes */
    const ar_status st = ar_comm_barrier(c, q, "end");
    if (ar_process_rank(p) == 0)
        fprintf(stderr, "%s\n", ar_comm_error(c));
    return st != AR_OK;
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "serialized") != 0)
        return end_job(argv[1]);
    int size = 0, rank = 0, level = 0, wrong = 0;
    MPI_Init_thread(NULL, NULL, argc > 1 ? MPI_THREAD_SERIALIZED : MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    const int count = (int)(sizeof scenarios / sizeof *scenarios);
    for (int i = 0; size == RANKS && i < count; i++) {
        const double start = now_s();
        wrong += run(&scenarios[i]);
        if (rank == 0)
            printf("%s: %.2f s\n", scenarios[i].name, now_s() - start);
    }
    if (rank == 0)
        printf("%d scenarios of %d processes, %d complaints\n", count, size, wrong);
    MPI_Finalize();
    return wrong != 0 || size != RANKS;
}
