/* SPDX-License-Identifier: Apache-2.0 */
/* Processes without MPI: the launcher's variables number them, and a file that all of them see carries their messages,
 * NCCL's id among them. Process 0 makes it anew; the others ask it to let them in, so that no file of an earlier run is
 * taken for this one's. A message is appended in one piece. A process holds a lock on a byte of its own as long as it
 * lives. File systems without locks lack this sign of a death, and nothing there keeps the messages of several machines
 * from overwriting each other. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "gpu/cluster/process/process.h"
#include "gpu/cluster/process/process_private.h"
#include "ref/comm/comm_impl.h"
#include "ref/core/clock.h"
#include "ref/core/queue_impl.h"
#include "ref/core/size.h"
#include "ref/core/text.h"

enum { MOST_RANKS = 1 << 20, LOCK_NS = 50000 };
/* Byte whose lock says that rank 0 lives; those of the others follow. Byte 0 is locked for each message. */
#define FIRST_LIFE ((off_t)1 << 40)
/* Longest wait for the lock once it could not be had: the process that holds it has probably been stopped. */
#define STOPPED_NS UINT64_C(500000000)

/* Followed by the ranks that it is for, int32_t [ranks], and the message's data. */
typedef struct record {
    uint64_t ranks, group, seq, bytes;
    int32_t kind, from_rank;
} record;

typedef struct file_link {
    ari_link base; /* first */
    const char *path;
    int fd;             /* -1: not open */
    bool has_locks;     /* the file system has */
    uint64_t lock_ns;   /* longest wait for the lock before a message is written */
    off_t read, known;  /* up to where messages were taken, and the file's size at the last look */
    ari_message *hello; /* the first message to process 0, until it has answered */
    bool heard;         /* it has */
    atomic_bool joined; /* all processes have come */
    pthread_mutex_t lock;
} file_link;

/* --- messages ----------------------------------------------------------------------------------------------------- */

static bool lock_byte(const file_link *f, int command, short type, off_t byte, struct flock *gives)
{
    *gives = (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    return fcntl(f->fd, command, gives) == 0;
}

static void unlock_messages(const file_link *f)
{
    struct flock lock;
    (void)lock_byte(f, F_SETLK, F_UNLCK, 0, &lock);
}

/* True if the file is locked, or the file system has no locks. */
static bool lock_messages(const file_link *f, short type, uint64_t wait_ns)
{
    const uint64_t deadline = ari_deadline_ns(ari_now_ns(), wait_ns);
    struct flock lock;
    bool locked;
    while (!(locked = lock_byte(f, F_SETLK, type, 0, &lock)) && f->has_locks && ari_now_ns() < deadline)
        nanosleep(&(struct timespec){.tv_nsec = LOCK_NS}, NULL);
    return locked || !f->has_locks;
}

/* Writes all of a message or none of it, since readers would take what follows part of one for the rest. Without locks
 * the part stays: another process may have appended a message to it. */
static bool write_message(const file_link *f, const char *cursor, size_t bytes, off_t *offset)
{
    struct stat info;
    if (fstat(f->fd, &info) != 0)
        return false;
    *offset = info.st_size;
    while (bytes > 0) {
        const ssize_t n = write(f->fd, cursor, bytes);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            const int error = n < 0 ? errno : ENOSPC;
            if (f->has_locks && ftruncate(f->fd, info.st_size) != 0)
                return false;
            errno = error;
            return false;
        }
        cursor += n;
        bytes -= (size_t)n;
    }
    return true;
}

/* `lock` held. *offset: where the message begins. */
static bool append(file_link *f, const int *to, int n, const ari_message *m, off_t *offset)
{
    const record head = {(uint64_t)n, m->group, m->seq, m->bytes, m->kind, m->from_rank};
    const size_t ranks = (size_t)n * sizeof *to, bytes = sizeof head + ranks + (size_t)m->bytes;
    ARI_OWNED char *all = malloc(bytes);
    if (!all)
        return false;
    memcpy(all, &head, sizeof head);
    ari_copy_bytes(all + sizeof head, to, ranks);
    ari_copy_bytes(all + sizeof head + ranks, m->data, (size_t)m->bytes);
    if (!lock_messages(f, F_WRLCK, f->lock_ns)) {
        (void)ar_error_set(AR_ERR_IO,
                           "ANYRANK_NCCL_ID_FILE %s: waited %.3f s for its lock, which each process holds only while "
                           "it writes: has one been stopped?",
                           ARI_SHOW(f->path), (double)f->lock_ns * 1e-9);
        f->lock_ns = STOPPED_NS;
        return false;
    }
    const bool ok = write_message(f, all, bytes, offset);
    if (!ok)
        (void)ar_error_set(AR_ERR_IO, "ANYRANK_NCCL_ID_FILE %s: %s", ARI_SHOW(f->path), strerror(errno));
    unlock_messages(f);
    return ok;
}

/* Whether the file is the one that has this name now. */
static bool is_current(const file_link *f)
{
    struct stat own, named;
    return fstat(f->fd, &own) == 0 && stat(f->path, &named) == 0 && own.st_ino == named.st_ino &&
           own.st_dev == named.st_dev;
}

static void lock_life(file_link *f)
{
    struct flock lock;
    f->has_locks =
        lock_byte(f, F_SETLK, F_WRLCK, FIRST_LIFE + f->base.rank, &lock) || errno == EAGAIN || errno == EACCES;
}

/* Opens the file for the first message to process 0, whose answers come behind it. */
static void say_hello(file_link *f)
{
    if (!f->hello || (f->fd = open(f->path, O_RDWR | O_APPEND | O_CLOEXEC)) < 0)
        return;
    lock_life(f);
    f->known = 0;
    if (append(f, &(int){0}, 1, f->hello, &f->read))
        return;
    close(f->fd);
    f->fd = -1;
}

static bool file_send(ari_link *l, const int *to, int n, const ari_message *m)
{
    file_link *f = (file_link *)l;
    off_t offset;
    pthread_mutex_lock(&f->lock);
    bool ok = f->heard && f->fd >= 0 && append(f, to, n, m, &offset);
    if (!f->heard && !f->hello)
        ok = (f->hello = ari_message_copy(m)) != NULL;
    pthread_mutex_unlock(&f->lock);
    return ok;
}

/* False: it is not there yet, or not all of it. */
static bool is_here(file_link *f, off_t bytes)
{
    struct stat info;
    if (f->read + bytes <= f->known)
        return true;
    (void)lock_messages(f, F_RDLCK, STOPPED_NS); /* a network's file system looks for news then */
    if (fstat(f->fd, &info) == 0)
        f->known = info.st_size;
    unlock_messages(f);
    return f->read + bytes <= f->known;
}

static bool read_at(file_link *f, void *to, size_t bytes, off_t at)
{
    const bool ok = bytes == 0 || pread(f->fd, to, bytes, at) == (ssize_t)bytes;
    if (!ok) /* its writer has taken back a part that was there at the last look */
        f->known = 0;
    return ok;
}

/* *for_this: whether this rank is among those that it is for. NULL: none is there. `lock` held. */
static ari_message *next_message(file_link *f, bool *for_this)
{
    record head;
    if (!is_here(f, sizeof head) || !read_at(f, &head, sizeof head, f->read) || head.ranks > MOST_RANKS)
        return NULL;
    const size_t ranks = (size_t)head.ranks * sizeof(int);
    const off_t data = f->read + (off_t)(sizeof head + ranks), end = data + (off_t)head.bytes;
    ARI_OWNED int *to = malloc(ranks + 1);
    if (!to || !is_here(f, end - f->read) || !read_at(f, to, ranks, data - (off_t)ranks))
        return NULL;
    *for_this = false;
    for (uint64_t i = 0; i < head.ranks; i++)
        *for_this = *for_this || to[i] == f->base.rank;
    ari_message *m = ari_message_create(head.kind, head.from_rank, *for_this ? head.bytes : 0);
    if (!m || !read_at(f, m->data, (size_t)m->bytes, data)) {
        free(m);
        return NULL;
    }
    m->group = head.group;
    m->seq = head.seq;
    f->read = end;
    return m;
}

static ari_message *next_for_this(file_link *f)
{
    bool for_this = false;
    ari_message *m = NULL;
    while (f->fd >= 0 && (m = next_message(f, &for_this)) && !for_this)
        free(m);
    f->heard = f->heard || m;
    return m;
}

/* A file of an earlier run, which has no answer, is left as soon as process 0 has replaced it. */
static ari_message *file_receive(ari_link *l)
{
    file_link *f = (file_link *)l;
    pthread_mutex_lock(&f->lock);
    ari_message *m = next_for_this(f);
    if (!f->heard && f->fd >= 0 && !is_current(f)) {
        m = next_for_this(f); /* process 0 answers before it removes the file */
        if (!m) {
            close(f->fd);
            f->fd = -1;
        }
    }
    if (!f->heard && f->fd < 0 && f->path)
        say_hello(f);
    pthread_mutex_unlock(&f->lock);
    return m;
}

static int file_find_ended(ari_link *l, int rank, char *text, size_t size)
{
    const file_link *f = (const file_link *)l;
    struct flock lock;
    for (int r = rank; atomic_load(&f->joined) && r < l->size; r++) {
        if (r == l->rank || !lock_byte(f, F_GETLK, F_WRLCK, FIRST_LIFE + r, &lock) || lock.l_type != F_UNLCK)
            continue;
        snprintf(text, size, "rank %d is gone: its process has ended", r);
        return r;
    }
    return -1;
}

static void file_destroy(ari_link *l)
{
    file_link *f = (file_link *)l;
    if (f->fd >= 0 && l->rank == 0 && is_current(f))
        unlink(f->path);
    if (f->fd >= 0)
        close(f->fd);
    pthread_mutex_destroy(&f->lock);
    free(f->hello);
    free(f);
}

static const ari_link_ops file_ops = {file_send, file_receive, file_find_ended, file_destroy};

/* Process 0: a new file, which takes the name of an earlier one once it can be used. */
static ar_status make_file(file_link *f)
{
    char other[4096 + 32];
    snprintf(other, sizeof other, "%s.%ld", f->path, (long)getpid());
    unlink(other);
    f->fd = open(other, O_RDWR | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, S_IRUSR | S_IWUSR);
    if (f->fd >= 0)
        lock_life(f);
    f->heard = true;
    if (f->fd >= 0 && rename(other, f->path) == 0)
        return AR_OK;
    const int error = errno;
    unlink(other);
    return ar_error_set(AR_ERR_IO, "ANYRANK_NCCL_ID_FILE %s: %s", ARI_SHOW(f->path), strerror(error));
}

/* --- what a launcher says ----------------------------------------------------------------------------------------- */

/* "" counts as not set, as launchers and shells pass variables on. */
static const char *variable(const char *name)
{
    const char *value = getenv(name);
    return value && value[0] ? value : NULL;
}

static ar_status read_number(int *out, const char *name, int least, int most)
{
    const char *value = variable(name);
    if (!value)
        return ar_error_set(AR_ERR_ARG, "the environment variable %s is not set", name);
    uint64_t n = 0;
    const char *end = NULL;
    if (!ari_natural(&n, value, &end) || *end || n < (uint64_t)least || n > (uint64_t)most)
        return ar_error_set(AR_ERR_ARG, "%s is '%s': a number from %d to %d expected", name, ARI_SHOW(value), least,
                            most);
    *out = (int)n;
    return AR_OK;
}

/* torchrun's variables, or Slurm's. Errors: AR_ERR_ARG, naming the variable that is missing or makes no sense. */
static ar_status read_place(ar_process *p)
{
    static const char *const torch[] = {"RANK", "WORLD_SIZE", "LOCAL_RANK"};
    static const char *const step[] = {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"};
    static const char *const job[] = {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"};
    const bool by_torch = variable(torch[0]) || variable(torch[1]);
    const char *const *names = by_torch ? torch : variable(step[1]) ? step : job;
    if (!by_torch && !variable(job[0]))
        return ar_error_set(AR_ERR_ARG,
                            "no launcher started this process: neither RANK and WORLD_SIZE (torchrun) nor SLURM_PROCID "
                            "(srun) are set; by hand, set RANK, WORLD_SIZE, LOCAL_RANK and ANYRANK_NCCL_ID_FILE");
    AR_TRY(read_number(&p->size, names[1], 1, MOST_RANKS));
    AR_TRY(read_number(&p->rank, names[0], 0, MOST_RANKS));
    AR_TRY(read_number(&p->local_rank, names[2], 0, MOST_RANKS));
    if (p->rank < p->size && p->local_rank < p->size)
        return AR_OK;
    const int wrong = p->rank < p->size ? 2 : 0;
    return ar_error_set(AR_ERR_ARG, "%s is %d and %s is %d: ranks go from 0 to %d", names[wrong],
                        wrong ? p->local_rank : p->rank, names[1], p->size, p->size - 1);
}

/* --- the process -------------------------------------------------------------------------------------------------- */

/* One process alone needs no file. */
static ar_status make_link(ari_link **gives, const ar_process *p)
{
    const char *path = variable("ANYRANK_NCCL_ID_FILE");
    file_link *f = NULL;
    if (p->size > 1 && (!path || strlen(path) >= 4096))
        return ar_error_set(AR_ERR_ARG,
                            "%d processes were started, and not by MPI: name a file by ANYRANK_NCCL_ID_FILE, the same "
                            "for all of them, in a folder that they all see; or start them by mpirun, with a build "
                            "that has MPI",
                            p->size);
    AR_TRY(ARI_ALLOC_ZERO(&f, 1, "a process"));
    f->base = (ari_link){.ops = &file_ops, .rank = p->rank, .size = p->size};
    f->path = p->size > 1 ? path : NULL;
    f->lock_ns = p->options.timeout_ns;
    f->fd = -1;
    pthread_mutex_init(&f->lock, NULL);
    const ar_status st = f->path && p->rank == 0 ? make_file(f) : AR_OK;
    if (st != AR_OK)
        file_destroy(&f->base);
    else
        *gives = &f->base;
    return st;
}

/* Whether all mean the same number of processes; else the world ends. */
static bool sizes_agree(const ar_process *p, const int *size)
{
    char why[160];
    int r = 0;
    while (r < p->size && size[r] == p->size)
        r++;
    if (r == p->size)
        return true;
    snprintf(why, sizeof why, "rank %d was started as one of %d processes, process 0 as one of %d", r, size[r],
             p->size);
    ari_store_fail(p->store, AR_ERR_ARG, why);
    return false;
}

/* Until all have come. */
static ar_status meet(ar_process *p, file_link *f)
{
    ARI_OWNED int *size = NULL;
    ar_status st = ari_process_gather(p, (void **)&size, NULL, &p->size, sizeof p->size);
    if (st == AR_OK)
        st = size && !sizes_agree(p, size) ? ari_store_status(p->store) : ari_process_broadcast(p, &(char){0}, 1);
    atomic_store(&f->joined, st == AR_OK);
    if (st != AR_ERR_TIMEOUT)
        return st;
    const ari_outcome late = ari_outcome_of(st);
    return ar_error_set(st, "%.600s; ANYRANK_NCCL_ID_FILE, here %.300s, must name one file for all, that all see",
                        late.message, f->path);
}

ar_status ari_process_file_create(ar_process **gives, const ar_process_options *o)
{
    ARI_OWNED ar_process *memory = NULL;
    ari_link *link = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&memory, 1, "a process"));
    *memory = (ar_process){.ops = &ari_process_store_ops, .options = *o};
    AR_TRY(read_place(memory));
    AR_TRY(make_link(&link, memory));
    AR_TRY(ari_store_create(&memory->store, link, o->timeout_ns));
    ar_process *p = memory;
    memory = NULL;
    const ar_status st = meet(p, (file_link *)link);
    if (st == AR_OK) {
        *gives = p;
        return AR_OK;
    }
    const ari_outcome kept = ari_outcome_of(st);
    ar_process_destroy(p);
    return ari_outcome_status(&kept);
}
