/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
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
    char folder[32], path[40]; /* of the file by which they meet */
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

static inline void forked_set(const char *name, int value)
{
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

/* The variables of torchrun. */
static inline void forked_environment(int rank, const forked *f)
{
    forked_set("RANK", rank);
    forked_set("WORLD_SIZE", f->n);
    forked_set("LOCAL_RANK", rank);
    setenv("ANYRANK_NCCL_ID_FILE", f->path, 1);
}

static inline forked forked_begin(int n)
{
    forked f = {.n = n};
    f.end = mmap(NULL, FORKED_MOST * sizeof *f.end, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    snprintf(f.folder, sizeof f.folder, "/tmp/anyrank-forked-XXXXXX");
    if (f.end == MAP_FAILED || !mkdtemp(f.folder))
        exit(2);
    snprintf(f.path, sizeof f.path, "%s/id", f.folder);
    return f;
}

static inline void forked_start(forked *f, int rank, forked_fn fn, void *arg)
{
    fflush(stdout);
    f->end[rank].status = AR_ERR_INTERNAL; /* what one that dies leaves */
    f->pid[rank] = fork();
    if (f->pid[rank] != 0)
        return;
    forked_environment(rank, f);
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
    unlink(f->path); /* one is left behind where rank 0 was killed */
    rmdir(f->folder);
}

static inline forked forked_run(int n, forked_fn fn, void *arg, int killed, const char *what)
{
    forked f = forked_begin(n);
    for (int r = 0; r < n; r++)
        forked_start(&f, r, fn, arg);
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
