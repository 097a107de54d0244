/* SPDX-License-Identifier: Apache-2.0 */
/* Processes that find each other by sockets: four of this machine, started as torchrun would. */
#include <stdatomic.h>

#include "gpu/cluster/process/process.h"
#include "tests/process/forked.h"
#include "tests/support/scoped.h"

enum { RANKS = 4 };
#define LIMIT_NS UINT64_C(600000000000) /* a guard: nothing waits for it */
#define SHORT_NS UINT64_C(1000000000)

static ar_status join(ar_process **p, uint64_t timeout_ns)
{
    const ar_process_options o = {.transport = AR_TRANSPORT_NCCL, .timeout_ns = timeout_ns};
    return ari_process_tcp_create(p, &o);
}

static ar_status expect(bool ok, const char *what)
{
    return ok ? AR_OK : ar_error_set(AR_ERR_INTERNAL, "%s", what);
}

/* Rank r gives r megabytes and r bytes, so that more is under way than sockets hold. */
static ar_status gather_and_check(ar_process *p)
{
    const size_t mega = 1 << 20, own = (size_t)ar_process_rank(p) * (mega + 1);
    size_t sizes[RANKS];
    OWNED(free) char *bytes = malloc(own + 1);
    OWNED(free) char *all = NULL;
    memset(bytes, 'a' + ar_process_rank(p), own);
    ar_status st = ar_process_gather(p, (void **)&all, sizes, bytes, own);
    size_t at = 0;
    for (int r = 0; st == AR_OK && all && r < RANKS; r++) {
        st = expect(sizes[r] == (size_t)r * (mega + 1), "another size arrived");
        for (size_t i = 0; st == AR_OK && i < sizes[r]; i++)
            st = expect(all[at + i] == 'a' + r, "other bytes arrived");
        at += sizes[r];
    }
    if (st == AR_OK)
        st = expect((all != NULL) == (ar_process_rank(p) == 0), "gathered in another place");
    return st;
}

static ar_status all_calls(int rank, void *arg)
{
    (void)arg;
    OWNED(ar_process_destroy) ar_process *p = NULL;
    AR_TRY(join(&p, LIMIT_NS));
    AR_TRY(expect(ar_process_rank(p) == rank && ar_process_size(p) == RANKS, "another rank or size"));
    for (int i = 0; i < 20; i++) {
        uint64_t word = rank == 0 ? (uint64_t)i * 77 : 0;
        AR_TRY(ar_process_broadcast(p, &word, sizeof word));
        AR_TRY(expect(word == (uint64_t)i * 77, "another word was broadcast"));
        if (i % 10 == 0)
            AR_TRY(gather_and_check(p));
    }
    return AR_OK;
}

static ar_status all_calls_late(int rank, void *arg)
{
    forked_sleep(rank == 0 ? 0.2 : 0);
    return all_calls(rank, arg);
}

/* How many have come to where a rank waits for them; shared by the processes of a case. */
static atomic_int *arrived;

static ar_status killed_in_gather(int rank, void *arg)
{
    (void)arg;
    OWNED(ar_process_destroy) ar_process *p = NULL;
    AR_TRY(join(&p, LIMIT_NS));
    if (rank == 2) {
        forked_sleep(0.05);
        raise(SIGKILL);
    }
    OWNED(free) void *all = NULL;
    char byte = 'x';
    ar_status st = ar_process_gather(p, &all, NULL, &byte, 1);
    if (st == AR_OK)
        st = ar_process_broadcast(p, &byte, 1); /* those that only gave hear of it here */
    return st;
}

static ar_status one_aborts(int rank, void *arg)
{
    (void)arg;
    OWNED(ar_process_destroy) ar_process *p = NULL;
    char byte = 0;
    AR_TRY(join(&p, LIMIT_NS));
    if (rank == 3)
        ar_process_abort(p, AR_ERR_DATA, "the loss is NaN");
    while (rank == 0 && atomic_load(arrived) < RANKS - 1)
        forked_sleep(0.001); /* it computes: the others, which wait for its broadcast, hear before it comes */
    OWNED(free) void *all = NULL;
    ar_status st = ar_process_broadcast(p, &byte, 1);
    if (rank == 0 && st == AR_OK) /* which waits for nobody: the word may still be on its way to this thread */
        st = ar_process_gather(p, &all, NULL, "", 0);
    atomic_fetch_add(arrived, 1);
    if (rank == 3 && st == AR_ERR_DATA)
        st = ar_error_set(AR_ERR_ABORTED, "rank 3 aborted: the loss is NaN"); /* it keeps its own status */
    return st;
}

static ar_status one_never_comes(int rank, void *arg)
{
    (void)arg;
    ar_process *p = NULL;
    AR_TRY(join(&p, LIMIT_NS));
    if (rank == 0) /* the others wait for it, perhaps since before it waits */
        p->options.timeout_ns = SHORT_NS / 2;
    OWNED(free) void *all = NULL;
    ar_status st = AR_OK;
    while (rank == 1 && atomic_load(arrived) == 0)
        forked_sleep(0.001);
    st = ar_process_gather(p, &all, NULL, "", 0);
    if (rank == 0)
        atomic_fetch_add(arrived, 1); /* it has waited long enough */
    if (st == AR_OK)
        st = ar_process_broadcast(p, &(char){0}, 1);
    ar_process_destroy(p);
    if (rank == 0 && st == AR_ERR_TIMEOUT)
        st = AR_ERR_ABORTED; /* it keeps its own status */
    return st;
}

static ar_status two_programs(int rank, void *arg)
{
    (void)arg;
    OWNED(ar_process_destroy) ar_process *p = NULL;
    char byte = 0;
    OWNED(free) void *all = NULL;
    AR_TRY(join(&p, LIMIT_NS));
    ar_status st = rank == 1 ? ar_process_gather(p, &all, NULL, &byte, 1) : ar_process_broadcast(p, &byte, 1);
    if (st == AR_OK)
        st = ar_process_gather(p, &all, NULL, &byte, 1);
    if (st == AR_OK)
        st = ar_process_broadcast(p, &byte, 1);
    return st == AR_ERR_MISMATCH ? AR_ERR_ABORTED : st;
}

static ar_status only_join(int rank, void *arg)
{
    (void)rank;
    const uint64_t *ns = arg;
    OWNED(ar_process_destroy) ar_process *p = NULL;
    AR_TRY(join(&p, *ns));
    return AR_OK;
}

static ar_status join_as_two(int rank, void *arg)
{
    forked_set("RANK", rank == 3 ? 2 : rank);
    return only_join(rank, arg);
}

static ar_status join_as_three(int rank, void *arg)
{
    forked_set("WORLD_SIZE", rank == 2 ? RANKS + 1 : RANKS);
    return only_join(rank, arg);
}

static ar_status one_stays_away(int rank, void *arg)
{
    return rank == 2 ? ar_error_set(AR_ERR_TIMEOUT, "s: rank 2") : only_join(rank, arg);
}

/* Three come, of which one goes again before the fourth is there. */
static ar_status one_goes(int rank, void *arg)
{
    const uint64_t *ns = arg;
    uint64_t longer = 8 * *ns;
    if (rank == 1)
        alarm((unsigned)(*ns / SHORT_NS)); /* the end of the process */
    return rank == 2 ? ar_error_set(AR_ERR_ABORTED, "rank 1 (process") : only_join(rank, &longer);
}

/* A web client, one that says half a greeting, one that says nothing: the others come together all the same. */
static void strangers(void)
{
    uint64_t ns = LIMIT_NS;
    forked f = forked_begin(RANKS);
    const int port = forked_port();
    char answer[8];
    for (int r = 0; r < RANKS - 1; r++)
        forked_start(&f, r, port, only_join, &ns);
    int fd[3];
    for (int i = 0; i < 3; i++)
        fd[i] = connect_to(port);
    check(write(fd[0], "GET / HTTP/1.1\r\n\r\n", 18) == 18, "strangers", "nothing written");
    check(write(fd[1], "anyrank", 8) == 8, "strangers", "nothing written");
    check(read(fd[0], answer, sizeof answer) <= 0, "strangers", "a web client was answered");
    forked_start(&f, RANKS - 1, port, only_join, &ns);
    forked_finish(&f, AR_OK, "", "strangers");
    for (int i = 0; i < 3; i++)
        close(fd[i]);
}

static ar_status join_other_job(int rank, void *arg)
{
    if (rank == 3)
        setenv("ANYRANK_JOB", "another", 1);
    return only_join(rank, arg);
}

/* The stranger is told at once; the others wait on for their own rank 3. */
static void another_job(void)
{
    uint64_t ns = LIMIT_NS;
    forked f = forked_begin(RANKS);
    const int port = forked_port();
    int how = 0;
    for (int r = 0; r < RANKS; r++)
        forked_start(&f, r, port, join_other_job, &ns);
    check(waitpid(f.pid[3], &how, 0) == f.pid[3] && how == 0, "another job", "the stranger ended badly");
    check(f.end[3].status == AR_ERR_ARG && strstr(f.end[3].text, "another job"), "another job", f.end[3].text);
    for (int r = 0; r < 3; r++)
        check(waitpid(f.pid[r], &how, WNOHANG) == 0, "another job", "one that did not wait");
    for (int r = 0; r < 3; r++) {
        kill(f.pid[r], SIGKILL);
        waitpid(f.pid[r], &how, 0);
    }
    forked_end_all(&f);
}

/* Rank 0 finds the port taken, by one that speaks no language of ours. */
static void port_taken(void)
{
    uint64_t ns = SHORT_NS;
    forked f = forked_begin(2);
    const int port = forked_port(), fd = listen_at(INADDR_LOOPBACK, port);
    for (int r = 0; r < 2; r++)
        forked_start(&f, r, port, only_join, &ns);
    check(forked_wait(&f, -1), "port taken", "a process ended badly");
    check(f.end[0].status == AR_ERR_IO && strstr(f.end[0].text, "ANYRANK_PORT"), "port taken", f.end[0].text);
    check(f.end[1].status == AR_ERR_TIMEOUT, "port taken", f.end[1].text);
    forked_end_all(&f);
    close(fd);
}

typedef struct variables {
    const char *what, *set, *words;
} variables;

static ar_status join_with(int rank, void *arg)
{
    const variables *v = arg;
    static const char *const all[] = {"RANK",        "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                                      "MASTER_ADDR", "MASTER_PORT"};
    static char set[256]; /* stays in the environment */
    (void)rank;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        unsetenv(all[i]);
    snprintf(set, sizeof set, "%s", v->set);
    for (char *one = strtok(set, " "); one; one = strtok(NULL, " "))
        putenv(one);
    uint64_t ns = SHORT_NS / 20;
    return only_join(0, &ns);
}

static const variables wrong[] = {
    {"nothing set", "", "neither RANK and WORLD_SIZE"},
    {"no world size", "RANK=0", "WORLD_SIZE is not set"},
    {"no rank", "WORLD_SIZE=2", "RANK is not set"},
    {"no local rank", "RANK=0 WORLD_SIZE=2", "LOCAL_RANK is not set"},
    {"no address", "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0", "MASTER_ADDR is not set"},
    {"no port", "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=::1", "MASTER_PORT is not"},
    {"rank too large", "RANK=2 WORLD_SIZE=2 LOCAL_RANK=0", "RANK is 2 and WORLD_SIZE is 2"},
    {"no number", "RANK=1x WORLD_SIZE=2 LOCAL_RANK=0", "RANK is '1x'"},
    {"negative", "RANK=-1 WORLD_SIZE=2 LOCAL_RANK=0", "RANK is '-1'"},
    {"huge", "RANK=99999999999999999999 WORLD_SIZE=2 LOCAL_RANK=0", "RANK is '999"},
    {"no such port", "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=::1 MASTER_PORT=65536", "MASTER_PORT is '65536'"},
    {"no such host",
     "RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=300.1.1.1.1 MASTER_PORT=9 ANYRANK_JOB_KEY=0123456789abcdef",
     "MASTER_ADDR '300.1.1.1.1': "},
    {"a key that can be guessed",
     "RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=::1 MASTER_PORT=9 ANYRANK_JOB_KEY=secret",
     "the job key of ANYRANK_JOB_KEY has 6 characters"},
    {"half of Slurm", "SLURM_PROCID=0 SLURM_LOCALID=0", "SLURM_NTASKS is not set"},
    {"Slurm without an address", "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0", "MASTER_ADDR is not set"},
    {"Slurm's list of hosts",
     "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_STEP_NODELIST=127.0.0.[1-4,9] SLURM_JOB_ID=4711",
     "did not answer at 127.0.0.1, port 14711"},
    {"two machines of Slurm",
     "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_NNODES=2 SLURM_STEP_NODELIST=192.0.2.[1-2] SLURM_JOB_ID=4711",
     "MASTER_ADDR '192.0.2.1' is no loopback address, and whoever reaches port 14711 could join the job"},
    {"one machine of Slurm, by its name",
     "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1 SLURM_NNODES=1 SLURM_STEP_NODELIST=192.0.2.1 SLURM_JOB_ID=4711",
     "did not answer at 127.0.0.1, port 14711"},
};

static void environment(void)
{
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        variables v = wrong[i];
        forked f = forked_run(1, join_with, &v, -1, v.what);
        check(f.end[0].status != AR_OK && strstr(f.end[0].text, v.words), v.what, f.end[0].text);
        forked_end_all(&f);
    }
}

/* torchrun listens on MASTER_PORT itself, as here somebody does: the next port is used. IPv6 too. */
static ar_status join_beside_store(int rank, void *arg)
{
    setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
    if (*(const bool *)arg)
        setenv("MASTER_ADDR", "::1", 1);
    return all_calls(rank, NULL);
}

static bool has_ipv6(void)
{
    struct sockaddr_in6 a = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    const int fd = socket(AF_INET6, SOCK_STREAM, 0);
    const bool has = fd >= 0 && bind(fd, (struct sockaddr *)&a, sizeof a) == 0;
    if (fd >= 0)
        close(fd);
    return has;
}

static void torchrun(void)
{
    for (int six = 0; six <= has_ipv6(); six++) {
        bool arg = six;
        forked f = forked_begin(RANKS);
        const int port = forked_port(), fd = listen_at(INADDR_ANY, port);
        for (int r = 0; r < RANKS; r++)
            forked_start(&f, r, port, join_beside_store, &arg);
        forked_finish(&f, AR_OK, "", six ? "torchrun, IPv6" : "torchrun");
        close(fd);
    }
}

/* Four processes that do the same; all but the killed one end with this status and these words. */
typedef struct world_case {
    const char *what;
    forked_fn fn;
    ar_status st;
    const char *words;
    uint64_t ns; /* given to fn */
    int killed;  /* 0: none */
    bool in_time;
} world_case;

static const world_case worlds[] = {
    {"four processes", all_calls, AR_OK, "", .ns = LIMIT_NS},
    {"rank 0 comes late", all_calls_late, AR_OK, "", .ns = LIMIT_NS},
    {"killed in a gather", killed_in_gather, AR_ERR_ABORTED, "rank 2 (process", .ns = LIMIT_NS, .killed = 2},
    {"one aborts", one_aborts, AR_ERR_ABORTED, "rank 3 aborted: the loss is NaN", .ns = LIMIT_NS},
    {"one does not come", one_never_comes, AR_ERR_ABORTED, "for rank 1", .ns = LIMIT_NS},
    {"two programs", two_programs, AR_ERR_ABORTED, "processes disagree", .ns = LIMIT_NS},
    {"two of one rank", join_as_two, AR_ERR_ARG, "two processes have rank 2", .ns = LIMIT_NS},
    {"another size", join_as_three, AR_ERR_ARG, "rank 2 (process", .ns = LIMIT_NS},
    {"one stays away", one_stays_away, AR_ERR_TIMEOUT, "s: rank 2", .ns = SHORT_NS, .in_time = true},
    {"one goes again", one_goes, AR_ERR_ABORTED, "rank 1 (process", .ns = SHORT_NS, .killed = 1, .in_time = true},
};
enum { WORLDS = sizeof worlds / sizeof *worlds };

/* How long ranks take to come depends on the machine: where that is what a case is about, it has a longer time, if
 * it was too short for one of them. The last time counts. */
static void run_world(const world_case *w)
{
    const int killed = w->killed > 0 ? w->killed : -1;
    uint64_t ns = w->ns;
    arrived = mmap(NULL, sizeof *arrived, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (arrived == MAP_FAILED)
        exit(2);
    for (bool enough = false; !enough; ns *= 4) {
        forked f = forked_run(RANKS, w->fn, &ns, killed, w->what);
        enough = true;
        for (int r = 0; r < RANKS; r++)
            enough = enough && (r == killed || strstr(f.end[r].text, w->words));
        enough = enough || !w->in_time || ns > LIMIT_NS / 4;
        if (enough)
            forked_expect(&f, killed, w->st, w->words, w->what);
        forked_end_all(&f);
    }
}

static void (*const others[])(void) = {strangers, another_job, port_taken, torchrun, environment};

static void run_case(size_t i)
{
    if (i < WORLDS)
        run_world(&worlds[i]);
    else
        others[i - WORLDS]();
}

int main(void)
{
    return forked_each(run_case, WORLDS + sizeof others / sizeof *others);
}
