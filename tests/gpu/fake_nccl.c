/* SPDX-License-Identifier: Apache-2.0 */
/* What stands for NCCL where there is no GPU: a shared library with NCCL's functions (those of gpu/nccl/nccl.h),
 * between processes of one machine, on memory of the emulated device, which it reaches by the device's copies alone.
 * Data move through pipes in memory that all processes map; a rank's calls wait for its peers, as NCCL's kernels do,
 * until they come or the communicator is aborted. What NCCL leaves undefined hangs here: calls that do not fit each
 * other. Reductions have the order of a ring.
 *
 * FAKE_NCCL_GPU        the bus id of this process's GPU
 * FAKE_NCCL_VERSION    what ncclGetVersion gives
 * FAKE_NCCL_ERROR      "async": communicators fail 0.2 s after their first call; "init": making one fails;
 *                      "hang": making one never ends */
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "anyrank/device.h"
#include "gpu/nccl/nccl.h"
#include "ref/core/reduce.h"

enum { RANKS_MOST = 16, PIPE_BYTES = 1 << 16 };
enum { SUCCESS = 0, SYSTEM_ERROR = 2, INTERNAL_ERROR = 3, INVALID_USAGE = 5, REMOTE_ERROR = 6 };

/* From one rank to another: a piece of a message, while `full`. */
typedef struct pipe_of {
    _Atomic uint32_t full;
    uint32_t bytes;
    uint64_t total; /* of the message */
    char data[PIPE_BYTES];
} pipe_of;

typedef struct shared {
    _Atomic int come;
    pipe_of pipe[]; /* [n][n]: from, to */
} shared;

typedef struct fake_comm {
    int n, rank;
    shared *s;
    size_t bytes;
    atomic_bool aborted;
    bool fails;                /* by itself */
    _Atomic uint64_t began_ns; /* the first call; 0: none yet */
    struct fake_comm *next;
} fake_comm;

static _Atomic(fake_comm *) comms; /* never freed before the end: one that is aborted may still be in use */

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* --- messages ----------------------------------------------------------------------------------------------------- */

typedef struct message {
    struct message *next;
    fake_comm *c;
    int peer;
    bool send;
    char *at;
    size_t bytes, done;
    bool ended;
} message;

static pipe_of *pipe_for(const message *m)
{
    const int from = m->send ? m->c->rank : m->peer, to = m->send ? m->peer : m->c->rank;
    return &m->c->s->pipe[from * m->c->n + to];
}

/* Whether a piece could be moved. */
static bool step(message *m)
{
    pipe_of *p = pipe_for(m);
    if (atomic_load(&p->full) != (m->send ? 0u : 1u) || (!m->send && p->total != m->bytes))
        return false;
    const size_t left = m->bytes - m->done;
    const size_t piece = m->send ? (left < PIPE_BYTES ? left : PIPE_BYTES) : p->bytes;
    if (m->send) {
        memcpy(p->data, m->at + m->done, piece);
        p->bytes = (uint32_t)piece;
        p->total = m->bytes;
    } else {
        memcpy(m->at + m->done, p->data, piece);
    }
    m->done += piece;
    m->ended = m->done == m->bytes;
    atomic_store(&p->full, m->send ? 1 : 0);
    return true;
}

/* An earlier message of the same pipe has not ended. */
static bool has_to_wait(const message *first, const message *m)
{
    for (const message *e = first; e != m; e = e->next) {
        if (!e->ended && e->c == m->c && e->peer == m->peer && e->send == m->send)
            return true;
    }
    return false;
}

static int move_all(message *first)
{
    for (int idle = 0;;) {
        bool all = true, moved = false;
        for (message *m = first; m; m = m->next) {
            if (m->ended || has_to_wait(first, m))
                continue;
            all = false;
            moved = step(m) || moved;
            if (atomic_load(&m->c->aborted))
                return INTERNAL_ERROR;
        }
        if (all)
            return SUCCESS;
        idle = moved ? 0 : idle + 1;
        if (idle > 100)
            nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
        else
            sched_yield();
    }
}

/* --- groups: what was asked for, until all of it is done at the end ----------------------------------------------- */

typedef enum what { ALL_REDUCE, REDUCE_SCATTER, REDUCE, MOVE } what;

typedef struct action {
    struct action *next;
    what what;
    fake_comm *c;
    const ari_nccl_emulated_stream *on;
    ar_dtype dtype;
    ar_op op;
    int root;
    size_t count; /* of the result */
    size_t in_bytes, result_bytes;
    char *in;     /* a copy of the input */
    char *others; /* [n] inputs, or what is received */
    char *result;
    void *out; /* of the device; NULL: nothing comes out here */
} action;

static _Thread_local int depth;
static _Thread_local action *actions, **actions_end;
static _Thread_local message *messages, **messages_end;

static void add_message(fake_comm *c, int peer, bool send, char *at, size_t bytes)
{
    message *m = calloc(1, sizeof *m);
    if (!m || bytes == 0) {
        free(m);
        return;
    }
    *m = (message){.c = c, .peer = peer, .send = send, .at = at, .bytes = bytes};
    if (!messages)
        messages_end = &messages;
    *messages_end = m;
    messages_end = &m->next;
}

static ar_status copy(const ari_nccl_emulated_stream *on, void *to, const void *from, size_t bytes)
{
    return bytes == 0 ? AR_OK : on->device->ops->copy(on->device, on->queue, (ar_buf){to}, (ar_cbuf){from}, bytes);
}

static size_t bytes_of(ar_dtype t)
{
    return t == AR_U8 ? 1 : t == AR_BF16 || t == AR_F16 ? 2 : t == AR_F32 || t == AR_I32 ? 4 : 8;
}

static action *add_action(what kind, void *comm, void *stream, int type, const void *in, size_t in_count,
                          size_t others_count, void *out, size_t result_count)
{
    static const ar_dtype dtypes[] = {
        [ARI_NCCL_U8] = AR_U8,   [ARI_NCCL_I32] = AR_I32, [ARI_NCCL_I64] = AR_I64,  [ARI_NCCL_F16] = AR_F16,
        [ARI_NCCL_F32] = AR_F32, [ARI_NCCL_F64] = AR_F64, [ARI_NCCL_BF16] = AR_BF16};
    action *a = calloc(1, sizeof *a);
    const size_t e = bytes_of(dtypes[type]);
    *a = (action){.what = kind, .c = comm, .on = stream, .dtype = dtypes[type], .out = out, .count = result_count};
    a->in_bytes = in_count * e;
    a->result_bytes = result_count * e;
    a->in = malloc(a->in_bytes + 1);
    a->others = malloc(others_count * e + 1);
    a->result = malloc(a->result_bytes + 1);
    uint64_t never = 0;
    (void)atomic_compare_exchange_strong(&a->c->began_ns, &never, now_ns());
    if (copy(a->on, a->in, in, a->in_bytes) != AR_OK)
        abort();
    if (!actions)
        actions_end = &actions;
    *actions_end = a;
    actions_end = &a->next;
    return a;
}

/* result[start, start + count) from the ranks' inputs, which lie at others + r * stride, in the order from `first`
 * on. */
static void combine(const action *a, size_t stride, size_t from, size_t start, size_t count, int first)
{
    const ari_reduce kernel = ari_reduce_kernel(a->dtype, a->op);
    const size_t e = bytes_of(a->dtype);
    char *to = a->result + start * e;
    const char *base = a->others + from * e;
    memcpy(to, base + (size_t)(first % a->c->n) * stride, count * e);
    for (int i = 1; i < a->c->n; i++)
        kernel.two(to, to, base + (size_t)((first + i) % a->c->n) * stride, count);
    if (kernel.finish)
        kernel.finish(to, count, a->c->n);
}

static int finish(action *a)
{
    const int n = a->c->n;
    if (a->what == ALL_REDUCE) {
        for (int c = 0; c < n; c++) { /* slices as ar_comm_slice cuts them */
            const size_t small = a->count / (size_t)n, larger = a->count % (size_t)n, i = (size_t)c;
            const size_t start = i * small + (i < larger ? i : larger), size = small + (i < larger ? 1 : 0);
            combine(a, a->in_bytes, start, start, size, c + 1);
        }
    } else if (a->what == REDUCE_SCATTER || (a->what == REDUCE && a->c->rank == a->root)) {
        combine(a, a->result_bytes, 0, 0, a->count, (a->what == REDUCE ? a->root : a->c->rank) + 1);
    } else if (a->what == MOVE) {
        memcpy(a->result, a->others, a->out ? a->result_bytes : 0);
    }
    return a->out && copy(a->on, a->out, a->result, a->result_bytes) != AR_OK ? INTERNAL_ERROR : SUCCESS;
}

static int end_group(void)
{
    int result = move_all(messages);
    while (messages) {
        message *m = messages;
        messages = m->next;
        free(m);
    }
    while (actions) {
        action *a = actions;
        actions = a->next;
        result = result == SUCCESS ? finish(a) : result;
        free(a->in);
        free(a->others);
        free(a->result);
        free(a);
    }
    return result;
}

static int end_alone(void)
{
    return depth > 0 ? SUCCESS : end_group();
}

/* --- NCCL's functions --------------------------------------------------------------------------------------------- */

#define EXPORT(name, arguments) int nccl##name arguments;
ARI_NCCL_TABLE(EXPORT)
#undef EXPORT
const char *ncclGetErrorString(int result);
const char *ncclGetLastError(void *comm);
const char *ari_nccl_emulated_gpu(void);

int ncclGetVersion(int *version)
{
    const char *is = getenv("FAKE_NCCL_VERSION");
    *version = is ? atoi(is) : 22809;
    return SUCCESS;
}

/* Memory without a name, which the others reach by this process's descriptor: nothing is left behind. */
int ncclGetUniqueId(ari_nccl_id *id)
{
    const int fd = memfd_create("fake_nccl", MFD_CLOEXEC);
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "/proc/%ld/fd/%d", (long)getpid(), fd);
    return fd < 0 ? SYSTEM_ERROR : SUCCESS;
}

static bool error_wanted(const char *which)
{
    const char *is = getenv("FAKE_NCCL_ERROR");
    return is && strcmp(is, which) == 0;
}

int ncclCommInitRank(void **comm, int n, ari_nccl_id id, int rank)
{
    fake_comm *c = calloc(1, sizeof *c);
    const size_t bytes = sizeof(shared) + (size_t)(n * n) * sizeof(pipe_of);
    const int fd = c && n <= RANKS_MOST ? open(id.internal, O_RDWR | O_CLOEXEC) : -1;
    if (error_wanted("init") || fd < 0 || ftruncate(fd, (off_t)bytes) != 0) {
        if (fd >= 0)
            close(fd);
        free(c);
        return SYSTEM_ERROR;
    }
    *c = (fake_comm){.n = n, .rank = rank, .bytes = bytes, .fails = error_wanted("async")};
    c->s = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (c->s == MAP_FAILED)
        return SYSTEM_ERROR;
    atomic_fetch_add(&c->s->come, 1);
    while (atomic_load(&c->s->come) < n || error_wanted("hang"))
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    c->next = atomic_load(&comms);
    while (!atomic_compare_exchange_weak(&comms, &c->next, c)) {
    }
    *comm = c;
    return SUCCESS;
}

int ncclCommDestroy(void *comm)
{
    munmap(((fake_comm *)comm)->s, ((fake_comm *)comm)->bytes);
    return SUCCESS;
}

int ncclCommAbort(void *comm)
{
    atomic_store(&((fake_comm *)comm)->aborted, true);
    return SUCCESS;
}

int ncclCommGetAsyncError(void *comm, int *result)
{
    const fake_comm *c = comm;
    const uint64_t began = atomic_load(&c->began_ns);
    *result = c->fails && began > 0 && now_ns() - began > 200000000u ? REMOTE_ERROR : SUCCESS;
    return SUCCESS;
}

const char *ncclGetErrorString(int result)
{
    return result == REMOTE_ERROR   ? "remote process exited or there was a network error"
           : result == SUCCESS      ? "no error"
           : result == SYSTEM_ERROR ? "unhandled system error"
                                    : "internal error";
}

const char *ncclGetLastError(void *comm)
{
    (void)comm;
    return "said the stand-in";
}

const char *ari_nccl_emulated_gpu(void)
{
    static char own[32];
    const char *is = getenv("FAKE_NCCL_GPU");
    snprintf(own, sizeof own, "0000:%04lx:00.0", (long)getpid() & 0xffff);
    return is ? is : own;
}

int ncclGroupStart(void)
{
    depth++;
    return SUCCESS;
}

int ncclGroupEnd(void)
{
    if (depth == 0)
        return INVALID_USAGE;
    return --depth > 0 ? SUCCESS : end_group();
}

int ncclAllReduce(const void *send, void *recv, size_t count, int type, int op, void *comm, void *stream)
{
    fake_comm *c = comm;
    action *a = add_action(ALL_REDUCE, comm, stream, type, send, count, (size_t)c->n * count, recv, count);
    static const ar_op ops[] = {AR_SUM, AR_PROD, AR_MAX, AR_MIN, AR_AVG};
    a->op = ops[op];
    for (int p = 0; p < c->n; p++) {
        char *other = a->others + (size_t)p * a->in_bytes;
        memcpy(other, a->in, a->in_bytes);
        if (p == c->rank)
            continue;
        add_message(c, p, true, a->in, a->in_bytes);
        add_message(c, p, false, other, a->in_bytes);
    }
    return end_alone();
}

int ncclReduceScatter(const void *send, void *recv, size_t count, int type, int op, void *comm, void *stream)
{
    fake_comm *c = comm;
    const size_t whole = (size_t)c->n * count;
    action *a = add_action(REDUCE_SCATTER, comm, stream, type, send, whole, whole, recv, count);
    static const ar_op ops[] = {AR_SUM, AR_PROD, AR_MAX, AR_MIN, AR_AVG};
    a->op = ops[op];
    for (int p = 0; p < c->n; p++) {
        char *part = a->in + (size_t)p * a->result_bytes, *other = a->others + (size_t)p * a->result_bytes;
        if (p == c->rank) {
            memcpy(other, part, a->result_bytes);
            continue;
        }
        add_message(c, p, true, part, a->result_bytes);
        add_message(c, p, false, other, a->result_bytes);
    }
    return end_alone();
}

int ncclReduce(const void *send, void *recv, size_t count, int type, int op, int root, void *comm, void *stream)
{
    fake_comm *c = comm;
    const bool is_root = c->rank == root;
    action *a = add_action(REDUCE, comm, stream, type, send, count, is_root ? (size_t)c->n * count : 0,
                           is_root ? recv : NULL, count);
    static const ar_op ops[] = {AR_SUM, AR_PROD, AR_MAX, AR_MIN, AR_AVG};
    a->op = ops[op];
    a->root = root;
    if (!is_root)
        add_message(c, root, true, a->in, a->in_bytes);
    for (int p = 0; is_root && p < c->n; p++) {
        char *other = a->others + (size_t)p * a->in_bytes;
        if (p == root)
            memcpy(other, a->in, a->in_bytes);
        else
            add_message(c, p, false, other, a->in_bytes);
    }
    return end_alone();
}

int ncclBroadcast(const void *send, void *recv, size_t count, int type, int root, void *comm, void *stream)
{
    fake_comm *c = comm;
    const bool is_root = c->rank == root;
    action *a = add_action(MOVE, comm, stream, type, send, is_root ? count : 0, count, recv, count);
    if (is_root)
        memcpy(a->others, a->in, a->in_bytes);
    for (int p = 0; is_root && p < c->n; p++) {
        if (p != root)
            add_message(c, p, true, a->in, a->in_bytes);
    }
    if (!is_root)
        add_message(c, root, false, a->others, a->result_bytes);
    return end_alone();
}

int ncclAllGather(const void *send, void *recv, size_t count, int type, void *comm, void *stream)
{
    fake_comm *c = comm;
    const size_t whole = (size_t)c->n * count;
    action *a = add_action(MOVE, comm, stream, type, send, count, whole, recv, whole);
    for (int p = 0; p < c->n; p++) {
        char *other = a->others + (size_t)p * a->in_bytes;
        if (p == c->rank) {
            memcpy(other, a->in, a->in_bytes);
            continue;
        }
        add_message(c, p, true, a->in, a->in_bytes);
        add_message(c, p, false, other, a->in_bytes);
    }
    return end_alone();
}

int ncclSend(const void *send, size_t count, int type, int peer, void *comm, void *stream)
{
    action *a = add_action(MOVE, comm, stream, type, send, count, 0, NULL, 0);
    add_message(comm, peer, true, a->in, a->in_bytes);
    return end_alone();
}

int ncclRecv(void *recv, size_t count, int type, int peer, void *comm, void *stream)
{
    action *a = add_action(MOVE, comm, stream, type, NULL, 0, count, recv, count);
    add_message(comm, peer, false, a->others, a->result_bytes);
    return end_alone();
}
