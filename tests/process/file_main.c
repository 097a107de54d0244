/* SPDX-License-Identifier: Apache-2.0 */
/* Processes that find each other by a file: four of this machine, started as torchrun would. */
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "gpu/cluster/process/process.h"
#include "gpu/cluster/process/process_private.h"
#include "tests/process/forked.h"
#include "tests/support/scoped.h"

enum { RANKS = 4 };
#define LIMIT_NS UINT64_C(600000000000) /* a guard: nothing waits for it */
#define SHORT_NS UINT64_C(1000000000)

static ar_status join(ar_process **p, uint64_t timeout_ns)
{
    const ar_process_options o = {.transport = AR_TRANSPORT_NCCL, .timeout_ns = timeout_ns};
    return ari_process_file_create(p, &o);
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
    ar_status st = ari_process_gather(p, (void **)&all, sizes, bytes, own);
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
    AR_TRY(expect(ar_process_rank(p) == rank && ari_process_size(p) == RANKS, "another rank or size"));
    for (int i = 0; i < 20; i++) {
        uint64_t word = rank == 0 ? (uint64_t)i * 77 : 0;
        AR_TRY(ari_process_broadcast(p, &word, sizeof word));
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
    ar_status st = ari_process_gather(p, &all, NULL, &byte, 1);
    if (st == AR_OK)
        st = ari_process_broadcast(p, &byte, 1); /* those that only gave hear of it here */
    return st;
}

static ar_status one_aborts(int rank, void *arg)
{
    (void)arg;
    OWNED(ar_process_destroy) ar_process *p = NULL;
    char byte = 0;
    AR_TRY(join(&p, LIMIT_NS));
    if (rank == 3)
        ari_process_abort(p, AR_ERR_DATA, "the loss is NaN");
    while (rank == 0 && atomic_load(arrived) < RANKS - 1)
        forked_sleep(0.001); /* it computes: the others, which wait for its broadcast, hear before it comes */
    OWNED(free) void *all = NULL;
    ar_status st = ari_process_broadcast(p, &byte, 1);
    if (rank == 0 && st == AR_OK) /* which waits for nobody: the word may still be on its way to this thread */
        st = ari_process_gather(p, &all, NULL, "", 0);
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
    st = ari_process_gather(p, &all, NULL, "", 0);
    if (rank == 0)
        atomic_fetch_add(arrived, 1); /* it has waited long enough */
    if (st == AR_OK)
        st = ari_process_broadcast(p, &(char){0}, 1);
    ar_process_destroy(p);
    if (rank == 0 && st == AR_ERR_TIMEOUT)
        st = AR_ERR_ABORTED; /* it keeps its own status */
    return st;
}

/* Until `arrived` is another number, or the world has failed. */
static void wait_while(ar_process *p, int number)
{
    while (atomic_load(arrived) == number && ari_store_status(p->store) == AR_OK)
        forked_sleep(0.001);
}

static off_t size_of_file(void)
{
    struct stat info = {.st_size = -1};
    (void)stat(getenv("ANYRANK_NCCL_ID_FILE"), &info);
    return info.st_size;
}

/* A process that locks the file as for a message, and writes none. */
static pid_t start_locker(void)
{
    int ready[2];
    char byte;
    if (pipe(ready) != 0)
        return -1;
    const pid_t pid = fork();
    if (pid == 0) {
        struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 1};
        const int fd = open(getenv("ANYRANK_NCCL_ID_FILE"), O_RDWR);
        if (fcntl(fd, F_SETLKW, &lock) == 0 && write(ready[1], "x", 1) == 1)
            pause();
        _exit(1);
    }
    close(ready[1]);
    const bool locked = read(ready[0], &byte, 1) == 1;
    close(ready[0]);
    return locked ? pid : -1;
}

/* Of two: rank 0's locker has the file until rank 1 has given up. */
static ar_status locked_file(int rank, void *arg)
{
    OWNED(ar_process_destroy) ar_process *p = NULL;
    OWNED(free) void *all = NULL;
    AR_TRY(join(&p, *(const uint64_t *)arg));
    if (rank == 1) {
        wait_while(p, 0);
        const ar_status st = ari_process_gather(p, &all, NULL, "x", 1);
        atomic_store(arrived, 2);
        return st;
    }
    const pid_t locker = start_locker();
    const off_t size = size_of_file();
    atomic_store(arrived, 1);
    wait_while(p, 1);
    const bool is_untouched = size == size_of_file();
    if (locker > 0) {
        kill(locker, SIGKILL);
        waitpid(locker, NULL, 0);
    }
    return expect(locker > 0 && is_untouched, "a message was written into a locked file");
}

static void locked(void)
{
    uint64_t ns = SHORT_NS;
    arrived = mmap(NULL, sizeof *arrived, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (bool joined = false; !joined && arrived != MAP_FAILED; ns *= 4) {
        atomic_store(arrived, 0);
        forked f = forked_run(2, locked_file, &ns, -1, "a locked file");
        const forked_end *e = f.end;
        joined = (e[1].status != AR_ERR_TIMEOUT && e[1].status != AR_ERR_ABORTED) || ns > LIMIT_NS / 4;
        check(!joined || e[0].status == AR_OK, "a locked file", e[0].text);
        check(!joined || (e[1].status == AR_ERR_IO && strstr(e[1].text, "s for its lock")), "a locked file", e[1].text);
        forked_end_all(&f);
    }
}

/* A message for which the disk has too little room is an error, and no part of it stays. */
static ar_status send_too_much(ar_process *p)
{
    struct rlimit limit;
    OWNED(free) char *bytes = calloc(1, 1 << 20);
    OWNED(free) void *all = NULL;
    const off_t size = size_of_file();
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &limit);
    const rlim_t unlimited = limit.rlim_cur;
    limit.rlim_cur = (rlim_t)size + 100;
    setrlimit(RLIMIT_FSIZE, &limit);
    const ar_status st = ari_process_gather(p, &all, NULL, bytes, 1 << 20);
    limit.rlim_cur = unlimited;
    setrlimit(RLIMIT_FSIZE, &limit);
    AR_TRY(expect(st == AR_ERR_IO && strstr(ar_error_message(), strerror(EFBIG)), "it was sent"));
    const bool is_whole = size_of_file() == size || truncate(getenv("ANYRANK_NCCL_ID_FILE"), size) != 0;
    return expect(is_whole, "part of a message is left");
}

/* Afterwards all processes can talk. */
static ar_status full_disk(int rank, void *arg)
{
    OWNED(ar_process_destroy) ar_process *p = NULL;
    AR_TRY(join(&p, *(const uint64_t *)arg));
    if (rank == 2) {
        const ar_status st = send_too_much(p);
        if (st != AR_OK)
            ari_process_abort(p, st, ar_error_message());
        AR_TRY(st);
        p->calls--; /* what the others wait for is still to come */
        atomic_store(arrived, 1);
    }
    wait_while(p, 0);
    for (int i = 0; i < 2; i++)
        AR_TRY(gather_and_check(p));
    return AR_OK;
}

static ar_status only_join(int rank, void *arg)
{
    (void)rank;
    const uint64_t *ns = arg;
    OWNED(ar_process_destroy) ar_process *p = NULL;
    AR_TRY(join(&p, *ns));
    return AR_OK;
}

static ar_status join_as_three(int rank, void *arg)
{
    forked_set("WORLD_SIZE", rank == 2 ? RANKS + 1 : RANKS);
    const ar_status st = only_join(rank, arg);
    return st == AR_ERR_ARG ? AR_ERR_ABORTED : st; /* process 0 keeps its own status */
}

static ar_status one_stays_away(int rank, void *arg)
{
    if (rank == 2)
        return ar_error_set(AR_ERR_ABORTED, "s in a gather of the processes for rank 2");
    const ar_status st = only_join(rank, arg);
    return st == AR_ERR_TIMEOUT ? AR_ERR_ABORTED : st; /* process 0 keeps its own status */
}

/* What an earlier run left: a file that has rank 0's answers to others, and one of another program. */
static void earlier_run(void)
{
    static const char *const contents[] = {"",
                                           "no file of ours, and longer than the head of a message of one would be"};
    uint64_t ns = LIMIT_NS;
    for (size_t i = 0; i < 1 + sizeof contents / sizeof *contents; i++) {
        forked f = forked_begin(RANKS);
        FILE *left = fopen(f.path, "w");
        if (!left || (i > 0 && fputs(contents[i - 1], left) < 0) || fclose(left) != 0)
            exit(2);
        for (int r = 1; r < RANKS; r++)
            forked_start(&f, r, all_calls, &ns);
        forked_sleep(0.05); /* in which they take it for theirs */
        forked_start(&f, 0, all_calls, &ns);
        check(forked_wait(&f, -1), "an earlier run's file", "a process ended badly");
        forked_expect(&f, -1, AR_OK, "", "an earlier run's file");
        check(access(f.path, F_OK) != 0, "an earlier run's file", "a file is left");
        forked_end_all(&f);
    }
}

typedef struct variables {
    const char *what, *set, *words;
} variables;

static ar_status join_with(int rank, void *arg)
{
    const variables *v = arg;
    static const char *const all[] = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "ANYRANK_NCCL_ID_FILE"};
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
    {"rank too large", "RANK=2 WORLD_SIZE=2 LOCAL_RANK=0", "RANK is 2 and WORLD_SIZE is 2"},
    {"no number", "RANK=1x WORLD_SIZE=2 LOCAL_RANK=0", "RANK is '1x'"},
    {"negative", "RANK=-1 WORLD_SIZE=2 LOCAL_RANK=0", "RANK is '-1'"},
    {"huge", "RANK=99999999999999999999 WORLD_SIZE=2 LOCAL_RANK=0", "RANK is '999"},
    {"local rank too large", "RANK=0 WORLD_SIZE=2 LOCAL_RANK=2", "LOCAL_RANK is 2 and WORLD_SIZE is 2"},
    {"no file", "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0", "name a file by ANYRANK_NCCL_ID_FILE"},
    {"no such folder", "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 ANYRANK_NCCL_ID_FILE=/nonexistent/id",
     "ANYRANK_NCCL_ID_FILE /nonexistent/id: No such file or directory"},
    {"nobody else", "RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 ANYRANK_NCCL_ID_FILE=/nonexistent/id",
     "for rank 0; ANYRANK_NCCL_ID_FILE, here /nonexistent/id, must name one file for all"},
    {"half of Slurm", "SLURM_PROCID=0 SLURM_LOCALID=0", "SLURM_NTASKS is not set"},
    {"Slurm without a file", "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0", "name a file by ANYRANK_NCCL_ID_FILE"},
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
    {"killed in a gather", killed_in_gather, AR_ERR_ABORTED, "rank 2 is gone", .ns = LIMIT_NS, .killed = 2},
    {"one aborts", one_aborts, AR_ERR_ABORTED, "rank 3 aborted: the loss is NaN", .ns = LIMIT_NS},
    {"a message that the disk has no room for", full_disk, AR_OK, "", .ns = LIMIT_NS},
    {"one does not come", one_never_comes, AR_ERR_ABORTED, "for rank 1", .ns = LIMIT_NS},
    {"another size", join_as_three, AR_ERR_ABORTED, "rank 2 was started as one of 5 processes, process 0 as one of 4",
     .ns = LIMIT_NS},
    {"one stays away", one_stays_away, AR_ERR_ABORTED, "s in a gather of the processes for rank 2", .ns = SHORT_NS,
     .in_time = true},
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

static void (*const others[])(void) = {earlier_run, environment, locked};

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
