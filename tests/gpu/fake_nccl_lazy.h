/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Of the stand-in for NCCL: what a GPU does where memory is allocated, or a kernel is loaded, for the first call of a
 * communicator: it waits until nothing else of its process is under way. Two processes whose first calls are under way
 * in different orders then wait for each other. All processes write into one file what they wait for, so that a circle
 * is found by looking, without a clock. */
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { LAZY_ENTRIES = 1024 };

typedef enum lazy_state { LAZY_IDLE, LAZY_WAITS, LAZY_RUNS } lazy_state;

/* A communicator of a process, or of a rank that is a thread. */
typedef struct lazy_entry {
    pid_t process; /* the thread's */
    uint64_t id;   /* the same in all processes */
    int call;      /* its last */
    lazy_state state;
    bool can_end; /* of the search for a circle */
} lazy_entry;

typedef struct lazy_board {
    atomic_int locked;
    int n;
    lazy_entry entry[LAZY_ENTRIES];
} lazy_board;

typedef struct lazy_comm {
    lazy_board *board; /* NULL: calls wait for nothing */
    lazy_entry *own;
    bool had_first;
} lazy_comm;

static inline void lazy_lock(lazy_board *b)
{
    while (atomic_exchange(&b->locked, 1))
        usleep(10);
}

static inline void lazy_unlock(lazy_board *b)
{
    atomic_store(&b->locked, 0);
}

/* NULL: no path. */
static inline lazy_board *lazy_open(const char *path)
{
    if (!path)
        return NULL;
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0 || ftruncate(fd, sizeof(lazy_board)) != 0)
        abort();
    lazy_board *b = mmap(NULL, sizeof *b, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return b != MAP_FAILED ? b : NULL;
}

static inline lazy_comm lazy_create(const char *path, uint64_t id)
{
    lazy_comm c = {.board = NULL};
    lazy_board *b = lazy_open(path);
    if (!b)
        return c;
    lazy_lock(b);
    if (b->n == LAZY_ENTRIES)
        abort();
    c.own = &b->entry[b->n++];
    *c.own = (lazy_entry){.process = gettid(), .id = id};
    lazy_unlock(b);
    c.board = b;
    return c;
}

static inline void lazy_set(const lazy_comm *c, lazy_state s)
{
    if (!c->board)
        return;
    lazy_lock(c->board);
    c->own->call += s == LAZY_WAITS;
    c->own->state = s;
    lazy_unlock(c->board);
}

static inline void lazy_begin(const lazy_comm *c)
{
    lazy_set(c, LAZY_WAITS);
}

static inline void lazy_end(const lazy_comm *c)
{
    lazy_set(c, LAZY_IDLE);
}

static inline void lazy_destroy(const lazy_comm *c)
{
    if (c->board) {
        lazy_end(c);
        munmap(c->board, sizeof *c->board);
    }
}

/* Whether nothing else of the process runs, or, with `ends`, nothing that cannot end. */
static inline bool lazy_is_alone(const lazy_board *b, const lazy_entry *e, bool ends)
{
    for (const lazy_entry *o = b->entry; o < b->entry + b->n; o++) {
        if (o != e && o->process == e->process && o->state == LAZY_RUNS && !(ends && o->can_end))
            return false;
    }
    return true;
}

/* Whether a call of the process is under way. */
static inline bool lazy_runs(lazy_board *b, pid_t process)
{
    const lazy_entry here = {.process = process};
    lazy_lock(b);
    const bool runs = !lazy_is_alone(b, &here, false);
    lazy_unlock(b);
    return runs;
}

/* Whether a call that runs could end: each other member is in it too, or past it, or may still come to it. */
static inline bool lazy_can_end(const lazy_board *b, const lazy_entry *e)
{
    for (const lazy_entry *o = b->entry; o < b->entry + b->n; o++) {
        if (o->id == e->id && o->call <= e->call && o->state == LAZY_WAITS && !lazy_is_alone(b, o, true))
            return false;
    }
    return true;
}

/* A call that waits: lets it begin where it may. False: it waits on. *stuck: for ever, in a circle. */
static inline bool lazy_may_begin(lazy_comm *c, bool *stuck)
{
    lazy_board *b = c->board;
    *stuck = false;
    if (!b || c->own->state == LAZY_RUNS)
        return true;
    lazy_lock(b);
    const bool may = c->had_first || lazy_is_alone(b, c->own, false);
    if (may) {
        c->own->state = LAZY_RUNS;
        c->had_first = true;
    } else {
        bool more = true;
        for (lazy_entry *e = b->entry; e < b->entry + b->n; e++)
            e->can_end = false;
        while (more) {
            more = false;
            for (lazy_entry *e = b->entry; e < b->entry + b->n; e++) {
                if (e->state != LAZY_RUNS || e->can_end || !lazy_can_end(b, e))
                    continue;
                e->can_end = more = true;
            }
        }
        *stuck = !lazy_is_alone(b, c->own, true);
    }
    lazy_unlock(b);
    return may;
}
