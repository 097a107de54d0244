/* SPDX-License-Identifier: Apache-2.0 */
/* What stands for NCCL where there is no GPU: a shared library with NCCL's functions (those of
 * gpu/cluster/nccl/nccl.h), between processes of one machine, on memory of the emulated device, which it reaches by the
 * device's copies alone. Data move through pipes in memory that all processes map. A communicator that is not to block
 * gets on with its call whenever the thread that called asks for its state; one that is, until it is done. What NCCL
 * leaves undefined hangs here: calls that do not fit each other. Reductions have the order of a ring. A communicator
 * that was destroyed or aborted must not be used any more, nor be aborted while a thread is inside of a call with it:
 * that ends the process.
 *
 * FAKE_NCCL_GPU        the bus id of this process's GPU; unset: each thread that asks has another one
 * FAKE_NCCL_VERSION    what ncclGetVersion gives
 * FAKE_NCCL_LAZY       a file that all processes have: the first call of a communicator waits until no other one of
 *                      the process is under way, as where memory or a kernel is made for it (lazy.h); a circle of such
 *                      waits is an error of NCCL's
 * FAKE_NCCL_ERROR      "async": communicators fail after their second call; "init": making one fails;
 *                      "split": a split fails, and its thread writes the result only when it is aborted; "hang": making
 *                      one never ends; "dwell": a call takes a while to return */
#include <pthread.h>
#include <stdio.h>
#include <time.h>

#include "gpu/cluster/nccl/nccl.h"
#include "ref/core/reduce.h"
#include "tests/gpu/fake_nccl_lazy.h"
#include "tests/support/scoped.h"

enum { RANKS_MOST = 16, PIPE_BYTES = 1 << 16, PATH_BYTES = 64 };
enum { SUCCESS = 0, SYSTEM_ERROR = 2, INTERNAL_ERROR = 3, INVALID_USAGE = 5, REMOTE_ERROR = 6, IN_PROGRESS = 7 };

/* From one rank to another: a piece of a message, while `full`. */
typedef struct pipe_of {
    _Atomic uint32_t full;
    uint32_t bytes;
    uint64_t total; /* of the message */
    char data[PIPE_BYTES];
} pipe_of;

/* What a rank wants of a split, and memory for the group, if it is the group's first. */
typedef struct wish {
    _Atomic int number; /* of the split */
    int color, key;
    char path[PATH_BYTES];
} wish;

typedef struct shared {
    _Atomic int come, gone;
    wish wish[2][RANKS_MOST]; /* of even and of odd splits: no rank begins the next but one before all are done */
    pipe_of pipe[];           /* [n][n]: from, to */
} shared;

typedef struct message message;
typedef struct action action;

typedef struct fake_comm {
    int n, rank;
    shared *s; /* NULL: not made yet */
    size_t bytes;
    bool blocking, joining, finalizing;
    bool fails; /* by itself */
    atomic_bool freed;
    atomic_int inside;
    int calls, asked; /* asked: how often for its state since the last call ended */
    int result;
    /* what is under way */
    pthread_t caller;
    message *messages;
    action *actions;
    int splits, own_fd;
    void **made; /* where the split that is under way puts what it gives */
    lazy_comm lazy;
    uint64_t peers; /* that it has exchanged with, a bit each */
    int groups;     /* calls so far */
    struct fake_comm *next;
} fake_comm;

static _Atomic(fake_comm *) ended; /* never freed, so that their use is seen */

static const char *_Atomic last_error = "said the stand-in";

static bool error_wanted(const char *which)
{
    const char *is = getenv("FAKE_NCCL_ERROR");
    return is && strcmp(is, which) == 0;
}

static void wrong(const char *what)
{
    fprintf(stderr, "fake_nccl: %s\n", what);
    abort();
}

static void enter(fake_comm *c)
{
    atomic_fetch_add(&c->inside, 1);
    if (atomic_load(&c->freed))
        wrong("a communicator is used that was destroyed or aborted");
}

static int leave(fake_comm *c, int result)
{
    atomic_fetch_sub(&c->inside, 1);
    return result;
}

struct message {
    struct message *next;
    fake_comm *c;
    int peer;
    bool send;
    char *at;
    size_t bytes, done;
    bool ended;
};

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
        if (!e->ended && e->peer == m->peer && e->send == m->send)
            return true;
    }
    return false;
}

/* Whether all have ended; each that can gets on. */
static bool move_on(message *first)
{
    bool all = true;
    for (message *m = first; m; m = m->next) {
        while (!m->ended && !has_to_wait(first, m) && step(m)) {
        }
        all = all && m->ended;
    }
    return all;
}

typedef enum what { ALL_REDUCE, REDUCE_SCATTER, REDUCE, MOVE } what;

struct action {
    struct action *next;
    what what;
    fake_comm *c;
    ari_nccl_emulated_stream on; /* a copy */
    ar_dtype dtype;
    ar_op op;
    int root;
    size_t count; /* of the result */
    size_t in_bytes, result_bytes;
    char *in;     /* a copy of the input */
    char *others; /* [n] inputs, or what is received */
    char *result;
    void *out; /* of the device; NULL: nothing comes out here */
};

static _Thread_local int depth;
static _Thread_local fake_comm *group_of; /* whose calls the group has; NULL: none yet */
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
    *a = (action){.what = kind,
                  .c = comm,
                  .on = *(const ari_nccl_emulated_stream *)stream,
                  .dtype = dtypes[type],
                  .out = out,
                  .count = result_count};
    a->in_bytes = in_count * e;
    a->result_bytes = result_count * e;
    a->in = malloc(a->in_bytes + 1);
    a->others = malloc(others_count * e + 1);
    a->result = malloc(a->result_bytes + 1);
    if (group_of && group_of != a->c)
        wrong("a group has calls of two communicators");
    if (!group_of)
        enter(a->c);
    group_of = a->c;
    if (a->c->actions || a->c->joining || a->c->made)
        wrong("a communicator is called while another call is in progress");
    if (copy(&a->on, a->in, in, a->in_bytes) != AR_OK)
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
        kernel.pair(to, to, base + (size_t)((first + i) % a->c->n) * stride, count);
}

static int finish(action *a)
{
    const int n = a->c->n;
    if (a->what == ALL_REDUCE) {
        for (int c = 0; c < n; c++) { /* slices as ari_comm_slice cuts them */
            const size_t small = a->count / (size_t)n, larger = a->count % (size_t)n, i = (size_t)c;
            const size_t start = i * small + (i < larger ? i : larger), size = small + (i < larger ? 1 : 0);
            combine(a, a->in_bytes, start, start, size, c + 1);
        }
    } else if (a->what == REDUCE_SCATTER || (a->what == REDUCE && a->c->rank == a->root)) {
        combine(a, a->result_bytes, 0, 0, a->count, (a->what == REDUCE ? a->root : a->c->rank) + 1);
    } else if (a->what == MOVE) {
        memcpy(a->result, a->others, a->out ? a->result_bytes : 0);
    }
    return a->out && copy(&a->on, a->out, a->result, a->result_bytes) != AR_OK ? INTERNAL_ERROR : SUCCESS;
}

static void free_calls(fake_comm *c)
{
    while (c->messages) {
        OWNED(free) message *m = c->messages;
        c->messages = m->next;
    }
    while (c->actions) {
        OWNED(free) action *a = c->actions;
        c->actions = a->next;
        free(a->in);
        free(a->others);
        free(a->result);
    }
}

static void call_on(fake_comm *c)
{
    bool stuck = false;
    const bool begun = lazy_may_begin(&c->lazy, &stuck);
    if (stuck) {
        c->result = INTERNAL_ERROR;
        last_error = "first calls of communicators wait for each other";
    }
    if (!begun || !move_on(c->messages))
        return;
    for (action *a = c->actions; a && c->result == SUCCESS; a = a->next)
        c->result = finish(a);
    free_calls(c);
    lazy_end(&c->lazy);
    c->calls++;
    c->asked = 0;
}

static void split_on(fake_comm *c);

/* As far as it goes now. Whether it goes on. */
static bool get_on(fake_comm *c)
{
    if (c->joining)
        c->joining = atomic_load(&c->s->come) < c->n || error_wanted("hang");
    else if (c->finalizing)
        c->finalizing = atomic_load(&c->s->gone) < c->n;
    else if (c->made)
        split_on(c);
    else if (c->actions)
        call_on(c);
    return c->result == SUCCESS && (c->joining || c->finalizing || c->made || c->actions);
}

static int begin(fake_comm *c)
{
    c->caller = pthread_self();
    while (get_on(c)) {
        if (!c->blocking)
            return IN_PROGRESS;
        nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    }
    return c->result;
}

static int end_group(void)
{
    fake_comm *c = group_of;
    if (!c)
        return SUCCESS;
    c->actions = actions;
    c->messages = messages;
    actions = NULL;
    messages = NULL;
    group_of = NULL;
    c->groups++;
    lazy_begin(&c->lazy);
    if (error_wanted("dwell"))
        nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    return leave(c, begin(c));
}

static int end_alone(void)
{
    return depth > 0 ? SUCCESS : end_group();
}

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

/* Memory without a name, which the others reach by this process's descriptor: nothing is left behind. The descriptor,
 * or -1. */
static int new_memory(char *path, size_t size)
{
    const int fd = memfd_create("fake_nccl", MFD_CLOEXEC);
    memset(path, 0, size);
    snprintf(path, size, "/proc/%ld/fd/%d", (long)getpid(), fd);
    return fd;
}

int ncclGetUniqueId(ari_nccl_id *id)
{
    return new_memory(id->internal, PATH_BYTES) < 0 ? SYSTEM_ERROR : SUCCESS;
}

static uint64_t hash_of(const char *text)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (; *text; text++)
        hash = (hash ^ (unsigned char)*text) * 0x100000001b3u;
    return hash;
}

/* One of n, on the memory of that path, which waits for the others. */
static fake_comm *join(const char *path, int n, int rank, bool blocking)
{
    const size_t bytes = sizeof(shared) + (size_t)(n * n) * sizeof(pipe_of);
    const int fd = n <= RANKS_MOST ? open(path, O_RDWR | O_CLOEXEC) : -1;
    fake_comm *c = fd >= 0 && ftruncate(fd, (off_t)bytes) == 0 ? calloc(1, sizeof *c) : NULL;
    shared *s = c ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    if (fd >= 0)
        close(fd);
    if (s == MAP_FAILED) {
        free(c);
        return NULL;
    }
    *c = (fake_comm){.n = n, .rank = rank, .s = s, .bytes = bytes, .blocking = blocking, .joining = true};
    c->caller = pthread_self();
    c->fails = error_wanted("async");
    c->lazy = lazy_create(getenv("FAKE_NCCL_LAZY"), hash_of(path));
    atomic_fetch_add(&s->come, 1);
    return c;
}

int ncclCommInitRankConfig(void **comm, int n, ari_nccl_id id, int rank, ari_nccl_config *config)
{
    fake_comm *c = error_wanted("init") ? NULL : join(id.internal, n, rank, !config || config->blocking != 0);
    *comm = c;
    return c ? begin(c) : SYSTEM_ERROR;
}

int ncclCommSplit(void *comm, int color, int key, void **made, ari_nccl_config *config);
int ncclCommSplit(void *comm, int color, int key, void **made, ari_nccl_config *config)
{
    fake_comm *c = comm;
    enter(c);
    if (c->actions || c->joining || c->made)
        wrong("a communicator is split while another call is in progress");
    wish *w = &c->s->wish[++c->splits % 2][c->rank];
    (void)config;
    w->color = color;
    w->key = key;
    c->own_fd = new_memory(w->path, sizeof w->path);
    c->made = made;
    *made = NULL;
    atomic_store(&w->number, c->splits);
    return leave(c, begin(c));
}

/* Once all have said what they want. */
static void split_on(fake_comm *c)
{
    const wish *all = c->s->wish[c->splits % 2], *own = &all[c->rank], *first = own;
    int n = 0, rank = 0;
    for (int i = 0; i < c->n; i++) {
        if (atomic_load(&all[i].number) != c->splits)
            return;
    }
    if (error_wanted("split")) {
        close(c->own_fd);
        c->result = REMOTE_ERROR;
        return;
    }
    for (const wish *w = all; w < all + c->n; w++) {
        const bool before = w->key < own->key || (w->key == own->key && w < own);
        if (w->color != own->color)
            continue;
        n++;
        rank += before;
        first = w->key < first->key || (w->key == first->key && w < first) ? w : first;
    }
    fake_comm *part = own->color == ARI_NCCL_NO_COLOR ? NULL : join(first->path, n, rank, c->blocking);
    if (own != first || !part)
        close(c->own_fd); /* of no use to any */
    c->result = part || own->color == ARI_NCCL_NO_COLOR ? SUCCESS : SYSTEM_ERROR;
    *c->made = part;
    c->made = NULL;
}

static int end_comm(fake_comm *c)
{
    if (atomic_load(&c->inside) > 0)
        wrong("a communicator ends while a thread is inside of a call with it");
    if (atomic_exchange(&c->freed, true))
        wrong("a communicator ends twice");
    if (c->made) { /* the thread that splits may write until here */
        nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
        *c->made = NULL;
    }
    free_calls(c);
    lazy_destroy(&c->lazy);
    munmap(c->s, c->bytes);
    c->next = atomic_load(&ended);
    while (!atomic_compare_exchange_weak(&ended, &c->next, c)) {
    }
    return SUCCESS;
}

int ncclCommFinalize(void *comm)
{
    fake_comm *c = comm;
    enter(c);
    c->finalizing = true;
    atomic_fetch_add(&c->s->gone, 1);
    return leave(c, begin(c));
}

int ncclCommDestroy(void *comm)
{
    if (!((fake_comm *)comm)->blocking && atomic_load(&((fake_comm *)comm)->s->gone) == 0)
        wrong("a communicator is destroyed before it was finalized");
    return end_comm(comm);
}

int ncclCommAbort(void *comm)
{
    return end_comm(comm);
}

int ncclCommGetAsyncError(void *comm, int *result)
{
    fake_comm *c = comm;
    enter(c);
    const bool busy = c->joining || c->finalizing || c->made || c->actions;
    const bool goes_on = busy && (!pthread_equal(c->caller, pthread_self()) || get_on(c));
    c->asked += !busy;
    *result = c->result != SUCCESS ? c->result : goes_on ? IN_PROGRESS : SUCCESS;
    if (c->fails && c->calls >= 2 && c->asked >= 2)
        *result = REMOTE_ERROR;
    return leave(c, SUCCESS);
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
    return last_error;
}

const char *ari_nccl_emulated_gpu(void)
{
    static _Thread_local char own[32];
    const char *is = getenv("FAKE_NCCL_GPU");
    snprintf(own, sizeof own, "0000:%04lx:00.0", (long)gettid() & 0xffff);
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

static ar_op op_of(int op)
{
    return op == ARI_NCCL_MAX ? AR_MAX : op == ARI_NCCL_MIN ? AR_MIN : AR_SUM;
}

/* Every member gets `bytes` bytes of each other's input: those from its place times `step` on. */
static int exchange_all(fake_comm *c, action *a, size_t bytes, size_t step)
{
    for (int p = 0; p < c->n; p++) {
        char *part = a->in + (size_t)p * step, *other = a->others + (size_t)p * bytes;
        if (p == c->rank) {
            memcpy(other, part, bytes);
            continue;
        }
        add_message(c, p, true, part, bytes);
        add_message(c, p, false, other, bytes);
    }
    return end_alone();
}

int ncclAllReduce(const void *send, void *recv, size_t count, int type, int op, void *comm, void *stream)
{
    fake_comm *c = comm;
    action *a = add_action(ALL_REDUCE, comm, stream, type, send, count, (size_t)c->n * count, recv, count);
    a->op = op_of(op);
    return exchange_all(c, a, a->in_bytes, 0);
}

int ncclReduceScatter(const void *send, void *recv, size_t count, int type, int op, void *comm, void *stream)
{
    fake_comm *c = comm;
    const size_t whole = (size_t)c->n * count;
    action *a = add_action(REDUCE_SCATTER, comm, stream, type, send, whole, whole, recv, count);
    a->op = op_of(op);
    return exchange_all(c, a, a->result_bytes, a->result_bytes);
}

int ncclReduce(const void *send, void *recv, size_t count, int type, int op, int root, void *comm, void *stream)
{
    fake_comm *c = comm;
    const bool is_root = c->rank == root;
    action *a = add_action(REDUCE, comm, stream, type, send, count, is_root ? (size_t)c->n * count : 0,
                           is_root ? recv : NULL, count);
    a->op = op_of(op);
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
    return exchange_all(c, a, a->in_bytes, 0);
}

/* NCCL makes a connection with the first exchange that needs it, and waits for the peer: all are to be made by a
 * communicator's first two calls, which are nobody's. */
static void connect_to(fake_comm *c, int peer)
{
    _Static_assert(RANKS_MOST <= 64, "a bit for each rank");
    if (peer != c->rank && !(c->peers >> peer & 1) && c->groups >= 2)
        wrong("a connection to a peer is made in the middle of a run");
    c->peers |= (uint64_t)1 << peer;
}

int ncclSend(const void *send, size_t count, int type, int peer, void *comm, void *stream)
{
    action *a = add_action(MOVE, comm, stream, type, send, count, 0, NULL, 0);
    connect_to(comm, peer);
    add_message(comm, peer, true, a->in, a->in_bytes);
    return end_alone();
}

int ncclRecv(void *recv, size_t count, int type, int peer, void *comm, void *stream)
{
    action *a = add_action(MOVE, comm, stream, type, NULL, 0, count, recv, count);
    connect_to(comm, peer);
    add_message(comm, peer, false, a->others, a->result_bytes);
    return end_alone();
}
