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
#include <time.h>
#include <unistd.h>

#include "anyrank/queue.h"
#include "gpu/cluster/process/process_private.h"
#include "ref/comm/comm_private.h"
#include "ref/core/clock.h"
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

static void sleep_s(double s)
{
    nanosleep(&(struct timespec){.tv_sec = (time_t)s, .tv_nsec = (long)((s - (double)(time_t)s) * 1e9)}, NULL);
}

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
    need(plain(w), "the first all_reduce"); /* so that each has made it, however late the second is */
    if (w->r != 1)
        return plain(w);
    ari_comm_abort(w->c, AR_ERR_DATA, "the loss is not a number");
    return AR_ERR_DATA;
}

static ar_status process_fails(world *w)
{
    if (w->r != 2)
        return plain(w);
    ari_process_abort(w->p, AR_ERR_IO, "no room left on the disk");
    return AR_ERR_IO;
}

static ar_status host_fails(world *w)
{
    void *all = NULL;
    size_t sizes[RANKS];
    if (w->r == 2) {
        ari_process_abort(w->p, AR_ERR_IO, "no such file");
        return AR_ERR_IO;
    }
    return ari_process_gather(w->p, &all, sizes, "x", 1);
}

static ar_status host_late(world *w)
{
    void *all = NULL;
    size_t sizes[RANKS];
    if (w->r == 1)
        sleep_s(2 * w->timeout_s + 0.1);
    return ari_process_gather(w->p, &all, sizes, "x", 1);
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
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    need(ar_queue_create(&q, AR_QUEUE_THREAD, "lane"), "a queue");
    if (w->r == 1)
        need(ar_queue_host(q, drop_lane, NULL), "a task");
    const ar_status st = ar_comm_all_reduce(w->c, q, out, in, 8, AR_F32, AR_SUM, "on a thread");
    const ar_status ended = ar_queue_sync(q, 0);
    return st == AR_OK ? ended : st;
}

typedef struct scenario {
    const char *name;
    ar_status (*act)(world *w);
    const char *expected; /* what each rank gets, by a letter of is_expected */
    const char *says;     /* what all are told: parts, between them '|' */
    bool by_timeout;      /* it ends no earlier, but for the rank `culprit`; 0: for none */
    int culprit;
} scenario;

/* What is compared, and how it is worded, is alike on every transport: sim/message_test.c has each part of a call. */
static const scenario scenarios[] = {
    {"another kind", other_kind, "MMMM",
     .says =
         "ranks 0 and 2 disagree in collective #2 of ranks 0-3|kind all_reduce against broadcast|all_reduce #1 step"},
    {"another share", other_share, "MMMM", .says = "rank 1 sends 2 elements to rank 3, which expects 1"},
    {"another batch", other_batch, "MMMM", .says = "message 0 from rank 0 to rank 1: 5 elements are sent, 4 expected"},
    {"another message", other_message, "MMAA", .says = "rank 0 sends 5 elements of F32 to rank 1, which expects 4"},
    {"a late rank", late, "LLLL",
     .says =
         "in all_reduce(F32, count 8, sum) 'step', collective #2 of ranks 0-3, for rank 3|all_reduce #1 step|running",
     .by_timeout = true, .culprit = 3},
    {"a late rank of a group", late_in_group, "LLLL",
     .says = "rank 1 waited|'in a group', collective #1 of ranks 1, 3, for rank 3", .by_timeout = true},
    {"ranks that wait for each other", crossed, "LLLL", .says = "'crossed', collective #1 of ranks|for rank",
     .by_timeout = true},
    {"an abort", aborts, "ADAA", .says = "rank 1 aborted: the loss is not a number|all_reduce #1 step"},
    {"a process that fails", process_fails, "AAIA", .says = "rank 2 failed with AR_ERR_IO: no room left on the disk"},
    {"a failure while the host's bytes move", host_fails, "A-I-", .says = "rank 2 failed with AR_ERR_IO: no such file"},
    {"a late process of a gather", host_late, "T---", .says = "rank 0 waited|s in a gather of the processes for rank 1",
     .by_timeout = true, .culprit = 1},
    {"a rank that returns early", returns_early, "MMOM",
     .says = "rank 2 returned while rank|waits for it in all_reduce(|collective #2 of ranks 0-3|returned"},
    {"a stopped process", stopped, "LLLL", .says = "for rank 3|no answer", .by_timeout = true, .culprit = 3},
    {"a process stopped in the middle", stopped_in_the_middle, "LLLL", .says = "waited|'large'|no answer",
     .by_timeout = true, .culprit = 3},
    {"a queue that failed before", on_thread, "ADAA", .says = "rank 1 aborted: what came before it failed"},
};

static int complain(const world *w, const scenario *s, const char *what, const char *text)
{
    if (!w->quiet)
        fprintf(stderr, "failures: %s, rank %d: %s: %s\n", s->name, w->r, what, text);
    return 1;
}

static bool is_expected(char expected, ar_status st)
{
    static const struct {
        char letter;
        ar_status st;
    } statuses[] = {{'O', AR_OK},          {'M', AR_ERR_MISMATCH}, {'A', AR_ERR_ABORTED},
                    {'D', AR_ERR_DATA},    {'I', AR_ERR_IO},       {'T', AR_ERR_TIMEOUT},
                    {'L', AR_ERR_TIMEOUT}, {'L', AR_ERR_ABORTED}}; /* late, where another one was the first to see it */
    bool is = expected == '-'; /* whatever it is, as the rank's part may be over before */
    for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++)
        is = is || (statuses[i].letter == expected && statuses[i].st == st);
    return is;
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
    char says[256];
    snprintf(says, sizeof says, "%s", s->says);
    for (const char *part = strtok(says, "|"); part; part = strtok(NULL, "|")) {
        if (first < 0 || !strstr(all[first], part))
            wrong += complain(w, s, part, first < 0 ? "there is no text" : all[first]);
    }
    return wrong;
}

static void world_begin(world *w, double timeout_s)
{
    const ar_process_options o = {.transport = AR_TRANSPORT_MPI, .timeout_ns = (uint64_t)(timeout_s * 1e9)};
    w->timeout_s = timeout_s;
    need(ar_process_create(&w->p, &o), "a process");
    need(ar_process_comm(&w->c, w->p, NULL), "a communicator");
    need(ar_queue_create(&w->q, AR_QUEUE_INLINE, "main"), "a queue");
    w->r = ar_process_rank(w->p);
}

static void world_end(world *w)
{
    ar_queue_destroy(w->q);
    ar_comm_destroy(w->c);
    ar_process_destroy(w->p);
}

static int run_once(const scenario *s, double timeout_s, bool quiet)
{
    static char text[TEXT];
    world w = {.quiet = quiet};
    world_begin(&w, timeout_s);
    const pid_t own = getpid();
    MPI_Allgather(&own, sizeof own, MPI_BYTE, w.pid, sizeof own, MPI_BYTE, MPI_COMM_WORLD);
    const uint64_t start = ari_now_ns();
    ar_error_clear();
    const ar_status st = s->act(&w);
    const double took = 1e-9 * (double)(ari_now_ns() - start);
    int wrong = 0;
    if (!is_expected(s->expected[w.r], st))
        wrong += complain(&w, s, ar_status_name(st), ar_error_message());
    if ((s->culprit == 0 || w.r != s->culprit) && s->expected[w.r] == 'L' && s->by_timeout && took < timeout_s)
        wrong += complain(&w, s, "it ended before the timeout", "");
    snprintf(text, sizeof text, "%s", st == AR_OK ? "" : ari_comm_error(w.c));
    world_end(&w);
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

static int end_job(const char *how)
{
    SCOPED(world_end) world w = {.quiet = false};
    world_begin(&w, SHORTEST_S);
    if (w.r == 1 && strcmp(how, "killed") == 0)
        raise(SIGKILL);
    if (w.r == 1)
        pause(); /* and never comes */
    const ar_status st = ar_comm_barrier(w.c, w.q, "end");
    if (w.r == 0)
        fprintf(stderr, "%s\n", ari_comm_error(w.c));
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
        const uint64_t start = ari_now_ns();
        wrong += run(&scenarios[i]);
        if (rank == 0)
            printf("%s: %.2f s\n", scenarios[i].name, 1e-9 * (double)(ari_now_ns() - start));
    }
    if (rank == 0)
        printf("%d scenarios of %d processes, %d complaints\n", count, size, wrong);
    MPI_Finalize();
    return wrong != 0 || size != RANKS;
}
