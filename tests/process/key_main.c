/* SPDX-License-Identifier: Apache-2.0 */
/* Who may join: processes with the job's key, and without one those of this machine. Started as torchrun would. */
#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>

#include "gpu/cluster/process/handshake.h"
#include "gpu/cluster/process/process.h"
#include "tests/process/forked.h"

enum { RANKS = 3 };
#define LIMIT_NS UINT64_C(600000000000) /* a guard: nothing waits for it */
#define SHORT_NS UINT64_C(100000000)

static const char key[] = "0123456789abcdef0123456789abcdef", other_key[] = "0123456789abcdef0123456789abcdeg";

/* What the processes of a case are started with. */
typedef struct start {
    uint64_t timeout_ns;
    const char *key[RANKS];
    const char *host; /* NULL: loopback */
    bool machines, open_store;
    int closes; /* the test's own listener, which a fork has too; 0: none */
} start;

static void set_or_not(const char *name, const char *value)
{
    if (value)
        setenv(name, value, 1);
    else
        unsetenv(name);
}

/* Joins, and gets a word from rank 0. */
static ar_status meet(int rank, void *arg)
{
    const start *s = arg;
    const ar_process_options o = {
        .transport = AR_TRANSPORT_NCCL, .timeout_ns = s->timeout_ns, .open_store = s->open_store};
    ar_process *p = NULL;
    uint64_t word = rank == 0 ? 4711 : 0;
    set_or_not("ANYRANK_JOB_KEY", s->key[rank]);
    if (s->closes > 0)
        close(s->closes);
    if (s->host)
        setenv("MASTER_ADDR", s->host, 1);
    if (s->machines)
        unsetenv("LOCAL_WORLD_SIZE");
    AR_TRY(ari_process_tcp_create(&p, &o));
    ar_status st = ar_process_broadcast(p, &word, sizeof word);
    if (st == AR_OK && word != 4711)
        st = ar_error_set(AR_ERR_INTERNAL, "another word was broadcast");
    ar_process_destroy(p);
    return st;
}

static void all_end(start s, ar_status st, const char *words, const char *what)
{
    forked f = forked_run(RANKS, meet, &s, -1, what);
    forked_expect(&f, -1, st, words, what);
    forked_end_all(&f);
}

static void one_key(void)
{
    all_end((start){.timeout_ns = LIMIT_NS, .key = {key, key, key}}, AR_OK, "", "one key");
}

/* Process 0 says it too, when its time is over: a longer one, where one of the others did not come within it. */
static void two_keys(const char *first, const char *last, const char *to_first, const char *to_last, const char *what)
{
    start s = {.timeout_ns = SHORT_NS, .key = {first, first, last}};
    for (bool enough = false; !enough; s.timeout_ns *= 4) {
        forked f = forked_run(RANKS, meet, &s, -1, what);
        const forked_end *e = f.end;
        const bool told_first = e[0].status == AR_ERR_TIMEOUT && strstr(e[0].text, to_first) &&
                                strstr(e[0].text, " s: rank 2; "); /* rank 1 has come */
        const bool told_last = e[2].status == AR_ERR_ARG && strstr(e[2].text, to_last);
        enough = s.timeout_ns > LIMIT_NS / 4 || (told_first && told_last);
        check(!enough || told_first, what, e[0].text);
        check(!enough || told_last, what, e[2].text);
        forked_end_all(&f);
    }
}

static void other_keys(void)
{
    two_keys(key, NULL, "process 0 has a job key and another process has none",
             "process 0 has a job key and this process has none", "one without a key");
    two_keys(NULL, key, "another process has a job key and process 0 has none",
             "this process has a job key and process 0 has none", "one with a key");
    two_keys(key, other_key, "process 0 and another process have different job keys",
             "process 0 and this process have different job keys", "another key");
}

/* An address of this machine that is no loopback address, in a network of this process alone. */
static bool make_network(const char *address)
{
    struct ifreq loopback = {.ifr_name = "lo"}, second = {.ifr_name = "lo:1"};
    struct sockaddr_in a = {.sin_family = AF_INET};
    if (unshare(CLONE_NEWNET) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0)
        return false;
    const int fd = socket(AF_INET, SOCK_DGRAM, 0);
    inet_pton(AF_INET, address, &a.sin_addr);
    memcpy(&second.ifr_addr, &a, sizeof a);
    loopback.ifr_flags = IFF_UP;
    const bool made = ioctl(fd, SIOCSIFFLAGS, &loopback) == 0 && ioctl(fd, SIOCSIFADDR, &second) == 0;
    close(fd);
    return made;
}

static void beyond_loopback(void)
{
    start s = {.timeout_ns = LIMIT_NS, .host = "192.0.2.1", .machines = true};
    all_end(s, AR_ERR_ARG, "ANYRANK_JOB_KEY, or the same ANYRANK_JOB_KEY_FILE, or allow it by open_store",
            "without a key beyond the machine");
    if (!make_network(s.host)) {
        printf("no network namespace here: nothing listens at another address\n");
        return;
    }
    s.open_store = true;
    all_end(s, AR_OK, "", "an open store");
    s.open_store = false;
    s.key[0] = s.key[1] = s.key[2] = key;
    all_end(s, AR_OK, "", "a key beyond the machine");
}

/* A launcher that names the machine by an address that others reach; no one listens there. */
static void one_machine(void)
{
    all_end((start){.timeout_ns = LIMIT_NS, .host = "192.0.2.1"}, AR_OK, "", "one machine by its name");
}

/* Where it was dropped already, that is right too. */
static void put(int fd, const void *bytes, size_t n)
{
    (void)send(fd, bytes, n, MSG_NOSIGNAL);
}

/* What the i-th of a crowd says before it stays: nothing, another language, half an opening, an opening whose challenge
 * it never answers, and a proof that is none. */
static void speak(int fd, int i, const ari_opening *opening)
{
    ari_answer answer = {.hello = {.rank = 1, .size = RANKS, .name = "a stranger"}};
    ari_opening server;
    if (i % 5 == 1)
        put(fd, "GET / HTTP/1.1\r\n\r\n", 18);
    if (i % 5 == 2)
        put(fd, opening, sizeof *opening / 2);
    if (i % 5 >= 3)
        put(fd, opening, sizeof *opening);
    if (i % 5 == 4 && recv(fd, &server, sizeof server, MSG_WAITALL) == (ssize_t)sizeof server) {
        memset(answer.proof, 0x55, sizeof answer.proof);
        put(fd, &answer, sizeof answer);
    }
}

/* Process 0 keeps few of many connections, and lets its own in all the same. */
static void crowd(void)
{
    enum { CROWD = 400, KEPT = 64 };
    start s = {.timeout_ns = LIMIT_NS, .key = {key, key, key}};
    forked f = forked_begin(RANKS);
    const int port = forked_port();
    const ari_key own = {.is_set = true};
    static int fd[CROWD];
    ari_opening opening;
    char byte[64];
    check(ari_opening_make(&opening, &own) == AR_OK, "crowd", "no opening");
    forked_start(&f, 0, port, meet, &s);
    for (int i = 0; i < CROWD; i++) {
        fd[i] = connect_to(port);
        speak(fd[i], i, &opening);
    }
    /* Of those that said too little the youngest are kept: of all but the last 3 * KEPT the connection ends. */
    for (int i = 0; i < CROWD - 3 * KEPT; i++) {
        while (i % 5 != 3 && recv(fd[i], byte, sizeof byte, 0) > 0) {
        }
    }
    for (int r = 1; r < RANKS; r++)
        forked_start(&f, r, port, meet, &s);
    forked_finish(&f, AR_OK, "", "crowd");
    for (int i = 0; i < CROWD; i++)
        close(fd[i]);
}

/* Those who know the job's key, but are of another job, and stay when they were told: none is waited for. */
static void another_job_stays(void)
{
    start s = {.timeout_ns = LIMIT_NS};
    forked f = forked_begin(RANKS);
    const int port = forked_port();
    const ari_key none = {.is_set = false};
    const ari_hello hello = {.rank = 1, .size = RANKS, .job = 1, .name = "another job's"};
    int fd[16];
    forked_start(&f, 0, port, meet, &s);
    for (int i = 0; i < 16; i++) {
        ari_opening opening;
        fd[i] = connect_to(port);
        check(ari_opening_make(&opening, &none) == AR_OK &&
                  ari_handshake_ask(fd[i], &none, &opening, &hello, UINT64_MAX) == ARI_HEARD_PROCESS,
              "another job stays", "not heard");
    }
    for (int r = 1; r < RANKS; r++)
        forked_start(&f, r, port, meet, &s);
    forked_finish(&f, AR_OK, "", "another job stays");
    for (int i = 0; i < 16; i++)
        close(fd[i]);
}

typedef enum impostor { REFLECTS, GUESSES, CLAIMS_NONE, IS_ANOTHER } impostor;

/* Talks to rank 1 as process 0 does, but for the key. */
static void talk(int fd, impostor how)
{
    ari_opening opening;
    ari_answer answer;
    if (recv(fd, &opening, sizeof opening, MSG_WAITALL) != (ssize_t)sizeof opening)
        return;
    if (how == IS_ANOTHER) {
        put(fd, "SSH-2.0-", 8);
        return;
    }
    opening.has_key = how != CLAIMS_NONE;
    put(fd, &opening, sizeof opening); /* the client's own nonce, as its challenge */
    if (how == CLAIMS_NONE || recv(fd, &answer, sizeof answer, MSG_WAITALL) != (ssize_t)sizeof answer)
        return;
    if (how == GUESSES)
        memset(answer.proof, 0xaa, sizeof answer.proof);
    put(fd, answer.proof, sizeof answer.proof);
}

static void impostor_is_refused(impostor how, ar_status st, const char *words)
{
    start s = {.timeout_ns = LIMIT_NS, .key = {key, key, key}};
    forked f = forked_begin(2);
    const int port = forked_port(), listener = listen_at(INADDR_LOOPBACK, port);
    int ended = 0;
    forked_start(&f, 1, port, meet, &s);
    const int fd = accept(listener, NULL, NULL);
    talk(fd, how);
    check(waitpid(f.pid[1], &ended, 0) == f.pid[1] && ended == 0, words, "rank 1 ended badly");
    check(f.end[1].status == st && strstr(f.end[1].text, words), words, f.end[1].text);
    close(fd);
    close(listener);
    forked_end_all(&f);
}

static void impostors(void)
{
    impostor_is_refused(REFLECTS, AR_ERR_ARG, "different job keys");
    impostor_is_refused(GUESSES, AR_ERR_ARG, "different job keys");
    impostor_is_refused(CLAIMS_NONE, AR_ERR_ARG, "this process has a job key and process 0 has none");
    impostor_is_refused(IS_ANOTHER, AR_ERR_IO, "is no process 0 of this program");
}

/* What process 0 does to one that it cannot keep among many: it comes again. */
static void comes_again(void)
{
    start s = {.timeout_ns = LIMIT_NS, .key = {key, key, key}};
    forked f = forked_begin(RANKS);
    const int port = forked_port(), listener = listen_at(INADDR_LOOPBACK, port);
    s.closes = listener;
    forked_start(&f, 1, port, meet, &s);
    close(accept(listener, NULL, NULL)); /* of a process that has closed its own copy of the listener by then */
    close(listener);
    s.closes = 0;
    forked_start(&f, 2, port, meet, &s);
    forked_start(&f, 0, port, meet, &s);
    forked_finish(&f, AR_OK, "", "comes again");
}

static void (*const cases[])(void) = {one_key, other_keys,        beyond_loopback, one_machine,
                                      crowd,   another_job_stays, impostors,       comes_again};

static void run_case(size_t i)
{
    cases[i]();
}

int main(void)
{
    unsetenv("ANYRANK_JOB_KEY_FILE");
    return forked_each(run_case, sizeof cases / sizeof *cases);
}
