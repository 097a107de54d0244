/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "anyrank/process.h"

/* Processes that a test starts as a launcher would: each a fork with the variables of its rank. */
enum { FORKED_MOST = 8, FORKED_TEXT = 4096 };

/* How a process ended. */
typedef struct forked_end {
    ar_status status;
    char text[FORKED_TEXT];
} forked_end;

typedef struct forked {
    int n;
    pid_t pid[FORKED_MOST];
    forked_end *end; /* [n], shared with the processes */
} forked;

/* What a process does. Its status and message are kept. */
typedef ar_status (*forked_fn)(int rank, void *arg);

static int failures;

static void check(bool ok, const char *what, const char *detail)
{
    if (!ok) {
        failures++;
        printf("FAILED: %s: %s\n", what, detail);
    }
}

static inline void forked_sleep(double s)
{
    const struct timespec t = {(time_t)s, (long)((s - (double)(time_t)s) * 1e9)};
    nanosleep(&t, NULL);
}

static inline int forked_bind(int port, int *fd)
{
    struct sockaddr_in a = {
        .sin_family = AF_INET, .sin_port = htons((unsigned short)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof a;
    *fd = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(*fd, (struct sockaddr *)&a, sizeof a) != 0 || getsockname(*fd, (struct sockaddr *)&a, &length) != 0)
        return -1;
    return ntohs(a.sin_port);
}

/* Held until the process ends, and by nobody else: a name of this machine for a port that is about to be used. */
static inline bool forked_reserve(int port)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    snprintf(a.sun_path + 1, sizeof a.sun_path - 1, "anyrank-test-port-%d", port);
    if (fd >= 0 && bind(fd, (struct sockaddr *)&a, sizeof a) == 0)
        return true;
    close(fd);
    return false;
}

/* A port that nobody has, nor the next one: below those that connections are given, so that none of many worlds that
 * begin at the same time gets it in between. */
static inline int forked_port(void)
{
    enum { FIRST = 10000, PAIRS = 11000, TURNS = 2000 }; /* nccl_command_test.py has those from 32001 on */
    for (int turn = 0; turn < TURNS; turn++) {
        const int port = FIRST + 2 * (((int)getpid() + turn * 61) % PAIRS);
        int fd = -1, next = -1;
        const bool both = forked_reserve(port) && forked_bind(port, &fd) > 0 && forked_bind(port + 1, &next) > 0;
        close(fd);
        close(next);
        if (both)
            return port;
    }
    exit(2);
}

static inline void forked_set(const char *name, int value)
{
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

/* The variables of torchrun. */
static inline void forked_environment(int rank, int n, int port)
{
    forked_set("RANK", rank);
    forked_set("WORLD_SIZE", n);
    forked_set("LOCAL_RANK", rank);
    forked_set("LOCAL_WORLD_SIZE", n);
    forked_set("MASTER_PORT", port);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
}

static inline forked forked_begin(int n)
{
    forked f = {.n = n};
    f.end = mmap(NULL, FORKED_MOST * sizeof *f.end, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (f.end == MAP_FAILED)
        exit(2);
    return f;
}

static inline void forked_start(forked *f, int rank, int port, forked_fn fn, void *arg)
{
    fflush(stdout);
    f->end[rank].status = AR_ERR_INTERNAL; /* what one that dies leaves */
    f->pid[rank] = fork();
    if (f->pid[rank] != 0)
        return;
    forked_environment(rank, f->n, port);
    const ar_status st = fn(rank, arg);
    snprintf(f->end[rank].text, FORKED_TEXT, "%s", st == AR_OK ? "" : ar_error_message());
    f->end[rank].status = st;
    exit(0); /* not _exit: leaks are looked for */
}

/* False: one ended by itself badly, as a sanitizer makes it. `killed`: but for this one; -1: none. */
static inline bool forked_wait(forked *f, int killed)
{
    bool ok = true;
    for (int r = 0; r < f->n; r++) {
        int how = 0;
        if (f->pid[r] <= 0 || waitpid(f->pid[r], &how, 0) != f->pid[r])
            exit(2);
        ok = ok && (r == killed || how == 0);
    }
    return ok;
}

static inline void forked_end_all(forked *f)
{
    munmap(f->end, FORKED_MOST * sizeof *f->end);
}

static inline forked forked_run(int n, forked_fn fn, void *arg, int killed, const char *what)
{
    forked f = forked_begin(n);
    const int port = forked_port();
    for (int r = 0; r < n; r++)
        forked_start(&f, r, port, fn, arg);
    check(forked_wait(&f, killed), what, "a process ended badly");
    return f;
}

/* Every rank but `except` ended with this status and these words. */
static inline void forked_expect(const forked *f, int except, ar_status st, const char *words, const char *what)
{
    for (int r = 0; r < f->n; r++) {
        char detail[FORKED_TEXT + 128];
        const forked_end *e = &f->end[r];
        snprintf(detail, sizeof detail, "rank %d: %s '%s', expected %s with '%s'", r, ar_status_name(e->status),
                 e->text, ar_status_name(st), words);
        if (r != except)
            check(e->status == st && strstr(e->text, words), what, detail);
    }
}

/* Those that were started one by one have ended, all with this status and these words. */
static inline void forked_finish(forked *f, ar_status st, const char *words, const char *what)
{
    check(forked_wait(f, -1), what, "a process ended badly");
    forked_expect(f, -1, st, words, what);
    forked_end_all(f);
}

/* run(0), .., run(n - 1), each in its own process, all at the same time. Returns main's status. */
static inline int forked_each(void (*run)(size_t i), size_t n)
{
    int bad = 0;
    for (size_t i = 0; i < n; i++) {
        const pid_t pid = fork();
        if (pid < 0)
            return 2;
        if (pid > 0)
            continue;
        run(i);
        fflush(stdout);
        exit(failures ? 1 : 0);
    }
    for (size_t i = 0; i < n; i++) {
        int how = 0;
        bad += wait(&how) < 0 || how != 0;
    }
    printf("%zu cases, %d failed\n", n, bad);
    return bad ? 1 : 0;
}

static inline int listen_at(uint32_t address, int port)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(address)};
    const int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    a.sin_port = htons((unsigned short)port);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    check(bind(fd, (struct sockaddr *)&a, sizeof a) == 0 && listen(fd, 8) == 0, "a listener", strerror(errno));
    return fd;
}

/* The first that listens there. */
static inline int connect_to(int port)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    a.sin_port = htons((unsigned short)port);
    for (int i = 0; i < 60000; i++) {
        const int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, (struct sockaddr *)&a, sizeof a) == 0)
            return fd;
        close(fd);
        forked_sleep(0.01);
    }
    return -1;
}
