/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/cluster/process/store.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "gpu/cluster/process/flight.h"
#include "ref/comm/comm_impl.h"
#include "ref/core/clock.h"
#include "ref/core/os/threads.h"
#include "ref/core/size.h"
#include "ref/core/status_private.h"

/* Longest wait for views, once one process is late. */
#define VIEWS_NS UINT64_C(500000000)
/* Longest wait for process 0's verdict on a failure: what it waits for views, and more. */
#define VERDICT_NS UINT64_C(2000000000)
/* Ticks between two looks for processes that have died. */
enum { ENDED_TICKS = 10 };

typedef enum message_kind {
    PART = 1, /* of a value */
    END,      /* to process 0: a verdict, whose reason it finds in all processes' views where `with_views` */
    VERDICT,  /* by process 0: the first failure */
    SHOW,     /* by process 0: give your view */
    VIEW,     /* to process 0: the view */
    BYE       /* this process calls nothing more */
} message_kind;

/* Followed by the ranks that it is about, int32_t [ranks], and the text. */
typedef struct verdict {
    int32_t status; /* of those ranks; of the others AR_ERR_ABORTED; AR_OK: the views say */
    int32_t ranks, with_views, unused;
} verdict;

struct ari_store {
    ari_link *link;
    uint64_t timeout_ns;
    pthread_t thread;
    bool started, said_bye;
    atomic_bool stops;
    pthread_mutex_t watch_lock; /* recursive; held while a watcher is called */
    ari_watcher watcher;
    bool watcher_heard;    /* of the failure */
    pthread_mutex_t lock;  /* of the failure and `left_ns` */
    uint64_t *left_ns;     /* [size] */
    _Atomic(ar_status) st; /* of those whom the failure is about; set after what follows, which then stays */
    bool own;              /* this process is one of them */
    char *text;
    pthread_mutex_t pump; /* held by whoever takes messages in; taken after no other lock but the watcher's */
    /* guarded by `pump` */
    ari_message *parts; /* that no call has asked for yet */
    bool shows;         /* this process is to give its view */
    /* of process 0 */
    bool decided;
    ari_message *end; /* that waits for views */
    uint64_t views_until_ns;
    ari_flight_view *view; /* [size] */
};

ari_message *ari_message_create(int kind, int from_rank, uint64_t bytes)
{
    ari_message *m = bytes < SIZE_MAX - sizeof *m ? malloc(sizeof *m + (size_t)bytes + 1) : NULL;
    if (!m)
        return NULL;
    *m = (ari_message){.kind = kind, .from_rank = from_rank, .bytes = bytes};
    m->data[bytes] = '\0';
    return m;
}

ari_message *ari_message_copy(const ari_message *m)
{
    ari_message *copy = ari_message_create(m->kind, m->from_rank, m->bytes);
    if (!copy)
        return NULL;
    copy->group = m->group;
    copy->seq = m->seq;
    ari_copy_bytes(copy->data, m->data, (size_t)m->bytes);
    return copy;
}

static ari_message *new_message(const ari_store *s, message_kind kind, const void *bytes, size_t size)
{
    ari_message *m = ari_message_create((int)kind, s->link->rank, size);
    if (m)
        ari_copy_bytes(m->data, bytes, size);
    return m;
}

static bool send_message(ari_store *s, const ari_message *m, const int *to, int n)
{
    return m && s->link->ops->send(s->link, to, n, m);
}

static void send_to_others(ari_store *s, const ari_message *m)
{
    int n = 0;
    ARI_OWNED int *to = calloc((size_t)s->link->size, sizeof *to);
    for (int r = 0; to && r < s->link->size; r++) {
        if (r != s->link->rank)
            to[n++] = r;
    }
    if (to && n > 0)
        (void)send_message(s, m, to, n);
}

/* --- the failure -------------------------------------------------------------------------------------------------- */

static void keep_failure(ari_store *s, ar_status st, bool own, const char *text)
{
    pthread_mutex_lock(&s->lock);
    if (s->st == AR_OK) {
        s->text = strdup(text);
        s->own = own;
        s->st = st;
    }
    pthread_mutex_unlock(&s->lock);
}

ar_status ari_store_failure(const ari_store *s, bool *own, const char **text)
{
    const ar_status st = atomic_load(&s->st);
    *own = st != AR_OK && s->own;
    *text = st == AR_OK ? "" : s->text ? s->text : ari_status_text(st);
    return st;
}

ar_status ari_store_status(ari_store *s)
{
    bool own;
    const char *text;
    const ar_status st = ari_store_failure(s, &own, &text);
    return st == AR_OK ? AR_OK : ar_error_set(own ? st : AR_ERR_ABORTED, "%s", text);
}

/* NULL: no memory. */
static ari_message *new_verdict(const ari_store *s, message_kind kind, verdict v, const int *rank, const char *text)
{
    const size_t ranks = (size_t)v.ranks * sizeof *rank, length = strlen(text);
    ari_message *m = ari_message_create((int)kind, s->link->rank, sizeof v + ranks + length);
    if (!m)
        return NULL;
    memcpy(m->data, &v, sizeof v);
    ari_copy_bytes(m->data + sizeof v, rank, ranks);
    memcpy(m->data + sizeof v + ranks, text, length);
    return m;
}

/* False: the message is no verdict. *rank [v->ranks] and *text are the message's. */
static bool read_verdict(const ari_message *m, verdict *v, const int **rank, const char **text)
{
    if (m->bytes < sizeof *v)
        return false;
    memcpy(v, m->data, sizeof *v);
    if (v->ranks < 0 || (uint64_t)v->ranks > (m->bytes - sizeof *v) / sizeof **rank)
        return false;
    *rank = (const int *)(const void *)(m->data + sizeof *v);
    *text = (const char *)(*rank + v->ranks);
    return true;
}

static bool is_among(int rank, const int *ranks, int n)
{
    int i = 0;
    while (i < n && ranks[i] != rank)
        i++;
    return i < n;
}

static void take_verdict(ari_store *s, const ari_message *m)
{
    verdict v;
    const int *rank;
    const char *text;
    if (read_verdict(m, &v, &rank, &text))
        keep_failure(s, (ar_status)v.status, is_among(s->link->rank, rank, v.ranks), text);
}

/* --- process 0 decides; `pump` is held ---------------------------------------------------------------------------- */

static void decide(ari_store *s, ar_status st, const int *rank, int n, const char *text)
{
    ARI_OWNED ari_message *m = new_verdict(s, VERDICT, (verdict){.status = st, .ranks = n}, rank, text);
    s->decided = true;
    send_to_others(s, m);
    keep_failure(s, st, is_among(0, rank, n), text);
}

/* m is owned. */
static void take_end(ari_store *s, ari_message *m)
{
    ARI_OWNED ari_message *owned = m;
    verdict v;
    const int *rank;
    const char *text;
    if (s->decided || !read_verdict(m, &v, &rank, &text) || (v.with_views && s->end))
        return;
    if (!v.with_views) {
        decide(s, (ar_status)v.status, rank, v.ranks, text);
        return;
    }
    owned = NULL;
    s->end = m;
    s->views_until_ns = ari_now_ns() + VIEWS_NS;
    s->shows = true;
    ARI_OWNED ari_message *show = new_message(s, SHOW, NULL, 0);
    send_to_others(s, show);
}

/* The views are here, or those that are. */
static void report_ranks(ari_store *s)
{
    const int size = s->link->size;
    verdict v;
    const int *rank;
    const char *text;
    char line[1024];
    int n = 0;
    ARI_OWNED ari_message *end = s->end;
    ARI_OWNED bool *own = calloc((size_t)size, sizeof *own);
    ARI_OWNED int *about = calloc((size_t)size, sizeof *about);
    s->end = NULL;
    if (s->decided || !own || !about || !read_verdict(end, &v, &rank, &text))
        return;
    snprintf(line, sizeof line, "%s", text);
    ar_status st = (ar_status)v.status;
    for (int r = 0; r < size; r++) {
        own[r] = is_among(r, rank, v.ranks);
        s->view[r].left = ari_store_left_ns(s, r) != 0;
    }
    if (st == AR_OK)
        st = ari_flight_judge(s->view, size, end->from_rank, own, line, sizeof line);
    for (int r = 0; r < size; r++) {
        if (own[r])
            about[n++] = r;
    }
    ARI_OWNED char *report = ari_flight_report(s->view, size, line);
    decide(s, st, about, n, report ? report : line);
}

static void take_view(ari_store *s, int rank, const char *text)
{
    free(s->view[rank].text);
    s->view[rank].text = strdup(text);
}

static bool views_are_here(const ari_store *s)
{
    int r = 0;
    while (r < s->link->size && s->view[r].text)
        r++;
    return r == s->link->size || ari_now_ns() >= s->views_until_ns;
}

/* --- taking messages in ------------------------------------------------------------------------------------------- */

static void note_departure(ari_store *s, int rank)
{
    pthread_mutex_lock(&s->lock);
    s->left_ns[rank] = ari_now_ns();
    pthread_mutex_unlock(&s->lock);
}

/* `pump` held; m is owned. */
static void take_message(ari_store *s, ari_message *m)
{
    const int from = m->from_rank;
    if (m->kind == PART) {
        m->next = s->parts;
        s->parts = m;
        return;
    }
    if (m->kind == END) {
        take_end(s, m);
        return;
    }
    if (m->kind == VERDICT)
        take_verdict(s, m);
    else if (m->kind == SHOW)
        s->shows = true;
    else if (m->kind == VIEW)
        take_view(s, from, m->data);
    else if (m->kind == BYE)
        note_departure(s, from);
    free(m);
}

/* False: a watcher is being called, perhaps by a thread that waits for this very view. */
static bool give_view(ari_store *s)
{
    if (pthread_mutex_trylock(&s->watch_lock) != 0)
        return false;
    ARI_OWNED char *view = s->watcher.view ? s->watcher.view(s->watcher.user) : NULL;
    pthread_mutex_unlock(&s->watch_lock);
    const char *text = view ? view : "";
    if (s->link->rank == 0) {
        pthread_mutex_lock(&s->pump);
        take_view(s, 0, text);
        pthread_mutex_unlock(&s->pump);
        return true;
    }
    ARI_OWNED ari_message *m = new_message(s, VIEW, text, strlen(text));
    (void)send_message(s, m, &(int){0}, 1);
    return true;
}

/* What has come. By the store's thread now and then, and by whoever waits. */
static void serve(ari_store *s)
{
    pthread_mutex_lock(&s->pump);
    for (ari_message *m; (m = s->link->ops->receive(s->link));) {
        if (m->from_rank < 0 || m->from_rank >= s->link->size)
            free(m);
        else
            take_message(s, m);
    }
    if (s->end && views_are_here(s))
        report_ranks(s);
    const bool shows = s->shows;
    pthread_mutex_unlock(&s->pump);
    if (!shows || !give_view(s))
        return;
    pthread_mutex_lock(&s->pump);
    s->shows = false;
    pthread_mutex_unlock(&s->pump);
}

/* A wait that is short is spent polling; a long one sleeps, since whom it waits for may compute on this very core. */
enum { YIELDS = 64, NAP_NS = 50000, LONGEST_NAP_NS = 1000000 };

static void take_turn(ari_store *s, unsigned *turn)
{
    const unsigned naps = *turn > YIELDS ? *turn - YIELDS : 0;
    ++*turn;
    if (naps == 0)
        sched_yield();
    else
        nanosleep(&(struct timespec){.tv_nsec = naps < LONGEST_NAP_NS / NAP_NS ? (long)naps * NAP_NS : LONGEST_NAP_NS},
                  NULL);
    serve(s);
}

/* Ends the world; returns once it has. */
static void end_world(ari_store *s, verdict v, const int *rank, const char *why)
{
    const uint64_t deadline = ari_now_ns() + VERDICT_NS;
    ari_message *m = new_verdict(s, END, v, rank, why);
    bool sent = m != NULL;
    if (m && s->link->rank == 0) {
        pthread_mutex_lock(&s->pump);
        take_end(s, m);
        pthread_mutex_unlock(&s->pump);
    } else {
        sent = send_message(s, m, &(int){0}, 1);
        free(m);
    }
    for (unsigned turn = 0; sent && atomic_load(&s->st) == AR_OK && ari_now_ns() < deadline;)
        take_turn(s, &turn);
    if (v.status == AR_OK)
        keep_failure(s, AR_ERR_TIMEOUT, true, "a rank waited too long, and process 0 does not answer");
    else
        keep_failure(s, (ar_status)v.status, true, why);
}

void ari_store_fail(ari_store *s, ar_status st, const char *why)
{
    if (atomic_load(&s->st) == AR_OK)
        end_world(s, (verdict){.status = st, .ranks = 1}, &s->link->rank, why);
}

void ari_store_report(ari_store *s, ar_status st, const int *rank, int n, const char *line)
{
    if (atomic_load(&s->st) == AR_OK)
        end_world(s, (verdict){.status = st, .ranks = n, .with_views = true}, rank, line);
}

void ari_store_late(ari_store *s)
{
    ari_store_report(s, AR_OK, NULL, 0, "");
}

void ari_store_agree_failed(ari_store *s, ar_status st, const int *rank, int n)
{
    char why[1024];
    snprintf(why, sizeof why, "%s", ar_error_message());
    keep_failure(s, st, true, why); /* whatever others of the group have said before */
    end_world(s, (verdict){.status = st, .ranks = n}, rank, why);
    (void)ar_error_set(st, "%s", why);
}

/* --- values ------------------------------------------------------------------------------------------------------- */

ar_status ari_store_set(ari_store *s, uint64_t group, uint64_t seq, const int *to, int n, const void *bytes,
                        size_t size)
{
    AR_TRY(ari_store_status(s));
    ARI_OWNED ari_message *m = new_message(s, PART, bytes, size);
    if (!m)
        return ar_error_set(AR_ERR_MEMORY, "no memory for %zu bytes to other processes", size);
    m->group = group;
    m->seq = seq;
    if (n == 0 || send_message(s, m, to, n))
        return AR_OK;
    AR_TRY(ari_store_status(s));
    return ar_error_set(AR_ERR_IO, "nothing can be sent to other processes: %s", ar_error_message());
}

/* A value that a call waits for. */
typedef struct wanted {
    uint64_t group, seq;
    const int *rank;
    int n;
    ari_message **part; /* [n]; NULL: this process's own, or not come */
} wanted;

/* How many parts have not come. */
static int take_parts(ari_store *s, wanted *x)
{
    int missing = 0;
    pthread_mutex_lock(&s->pump);
    for (int i = 0; i < x->n; i++) {
        ari_message **at = &s->parts;
        while (*at && !((*at)->group == x->group && (*at)->seq == x->seq && (*at)->from_rank == x->rank[i]))
            at = &(*at)->next;
        if (*at && !x->part[i]) {
            x->part[i] = *at;
            *at = x->part[i]->next;
        }
        missing += !x->part[i] && x->rank[i] != s->link->rank;
    }
    pthread_mutex_unlock(&s->pump);
    return missing;
}

/* Ends the world; who: as of ari_store_get. */
static void be_late(ari_store *s, const wanted *x, const char *who)
{
    char text[512];
    if (!who) {
        ari_store_late(s);
        return;
    }
    size_t used = (size_t)snprintf(text, sizeof text, "%.256s for rank", who);
    for (int i = 0, k = 0; i < x->n && used + 16 < sizeof text; i++) {
        if (!x->part[i] && x->rank[i] != s->link->rank)
            used += (size_t)snprintf(text + used, sizeof text - used, "%s %d", k++ > 0 ? "," : "", x->rank[i]);
    }
    ari_store_fail(s, AR_ERR_TIMEOUT, text);
}

/* Parts that have come are given, whatever has failed since. */
static ar_status await_parts(ari_store *s, wanted *x, uint64_t timeout_ns, const char *who)
{
    const uint64_t deadline = ari_deadline_ns(ari_now_ns(), timeout_ns);
    serve(s);
    for (unsigned turn = 0; take_parts(s, x) > 0; take_turn(s, &turn)) {
        AR_TRY(ari_store_status(s));
        if (ari_now_ns() > deadline)
            be_late(s, x, who);
    }
    return AR_OK;
}

static ar_status join_parts(const wanted *x, const void *bytes, size_t size, ari_gather_result *gives)
{
    const size_t head = ((size_t)x->n + 1) * sizeof(size_t);
    size_t total = head, offset = 0;
    void *memory = NULL;
    for (int i = 0; i < x->n; i++)
        AR_TRY(ari_add_size(&total, total, x->part[i] ? (size_t)x->part[i]->bytes : size));
    AR_TRY(ari_alloc(&memory, total, 1, "bytes from other processes"));
    size_t *start = memory;
    char *at = (char *)memory + head;
    for (int i = 0; i < x->n; i++) {
        const size_t count = x->part[i] ? (size_t)x->part[i]->bytes : size;
        start[i] = offset;
        ari_copy_bytes(at + offset, x->part[i] ? x->part[i]->data : bytes, count);
        offset += count;
    }
    start[x->n] = offset;
    *gives = (ari_gather_result){.at = at, .start = start, .memory = memory};
    return AR_OK;
}

ar_status ari_store_get(ari_store *s, uint64_t group, uint64_t seq, const int *rank, int n, const void *bytes,
                        size_t size, uint64_t timeout_ns, const char *who, ari_gather_result *gives)
{
    ARI_OWNED ari_message **part = NULL;
    AR_TRY(ari_store_status(s));
    AR_TRY(ARI_ALLOC_ZERO(&part, (size_t)n, "bytes from other processes"));
    wanted x = {.group = group, .seq = seq, .rank = rank, .n = n, .part = part};
    ar_status st = await_parts(s, &x, timeout_ns, who);
    if (st == AR_OK)
        st = join_parts(&x, bytes, size, gives);
    for (int i = 0; i < n; i++)
        free(part[i]);
    return st;
}

ar_status ari_store_exchange(ari_store *s, uint64_t group, uint64_t seq, const int *rank, int n, const void *bytes,
                             size_t size, ari_gather_result *gives)
{
    int others = 0;
    ARI_OWNED int *to = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&to, (size_t)n, "ranks"));
    for (int i = 0; i < n; i++) {
        if (rank[i] != s->link->rank)
            to[others++] = rank[i];
    }
    AR_TRY(ari_store_set(s, group, seq, to, others, bytes, size));
    return ari_store_get(s, group, seq, rank, n, bytes, size, s->timeout_ns, NULL, gives);
}

/* --- the thread --------------------------------------------------------------------------------------------------- */

/* Processes that died without a BYE: process 0 looks at all others, each of them at process 0. */
static void look_for_ended(ari_store *s)
{
    char text[256];
    const bool first = s->link->rank == 0;
    int r = s->link->ops->find_ended(s->link, first ? 1 : 0, text, sizeof text);
    while (r >= 0 && (first || r == 0)) {
        serve(s); /* its last words */
        if (ari_store_left_ns(s, r) == 0 && first)
            end_world(s, (verdict){.status = AR_ERR_ABORTED}, NULL, text);
        else if (ari_store_left_ns(s, r) == 0)
            keep_failure(s, AR_ERR_ABORTED, true, text);
        r = s->link->ops->find_ended(s->link, r + 1, text, sizeof text);
    }
}

static void call_watcher(ari_store *s)
{
    pthread_mutex_lock(&s->watch_lock);
    const ari_watcher w = s->watcher;
    if (w.failed && !s->watcher_heard && atomic_load(&s->st) != AR_OK) {
        s->watcher_heard = true;
        w.failed(w.user);
    }
    if (w.tick)
        w.tick(w.user);
    pthread_mutex_unlock(&s->watch_lock);
}

static void *serve_main(void *arg)
{
    ari_store *s = arg;
    for (unsigned tick = 0; !atomic_load(&s->stops); tick++) {
        serve(s);
        if (tick % ENDED_TICKS == 0 && atomic_load(&s->st) == AR_OK)
            look_for_ended(s);
        call_watcher(s);
        nanosleep(&(struct timespec){.tv_nsec = ARI_TICK_MS * 1000000L}, NULL);
    }
    return NULL;
}

void ari_store_watch(ari_store *s, const ari_watcher *w)
{
    pthread_mutex_lock(&s->watch_lock);
    s->watcher = w ? *w : (ari_watcher){.user = NULL};
    s->watcher_heard = false;
    pthread_mutex_unlock(&s->watch_lock);
}

/* --- beginning and end -------------------------------------------------------------------------------------------- */

static void free_store(ari_store *s)
{
    if (s->started) {
        atomic_store(&s->stops, true);
        pthread_join(s->thread, NULL);
    }
    for (ari_message *m = s->parts, *next; m; m = next) {
        next = m->next;
        free(m);
    }
    for (int r = 0; s->view && r < s->link->size; r++)
        free(s->view[r].text);
    s->link->ops->destroy(s->link);
    pthread_mutex_destroy(&s->lock);
    pthread_mutex_destroy(&s->pump);
    pthread_mutex_destroy(&s->watch_lock);
    free(s->end);
    free(s->view);
    free(s->left_ns);
    free(s->text);
    free(s);
}

/* s owns its link. */
static ar_status begin_store(ari_store *s)
{
    pthread_mutexattr_t again; /* a watcher may find the failure itself */
    pthread_mutexattr_init(&again);
    pthread_mutexattr_settype(&again, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&s->watch_lock, &again);
    pthread_mutexattr_destroy(&again);
    pthread_mutex_init(&s->pump, NULL); /* mutexes of Linux need nothing that could be missing */
    pthread_mutex_init(&s->lock, NULL);
    AR_TRY(ARI_ALLOC_ZERO(&s->left_ns, (size_t)s->link->size, "what processes share"));
    AR_TRY(ARI_ALLOC_ZERO(&s->view, (size_t)s->link->size, "what processes share"));
    const int rc = ari_thread_create(&s->thread, serve_main, s);
    s->started = rc == 0;
    return rc == 0 ? AR_OK : ar_error_set(AR_ERR_MEMORY, "no thread for what processes share: %s", strerror(rc));
}

ar_status ari_store_create(ari_store **gives, ari_link *link, uint64_t timeout_ns)
{
    ari_store *s = NULL;
    ar_status st = ARI_ALLOC_ZERO(&s, 1, "what processes share");
    if (st != AR_OK) {
        link->ops->destroy(link);
        return st;
    }
    s->link = link;
    s->timeout_ns = timeout_ns;
    st = begin_store(s);
    if (st == AR_OK)
        *gives = s;
    else
        free_store(s);
    return st;
}

uint64_t ari_store_left_ns(ari_store *s, int rank)
{
    pthread_mutex_lock(&s->lock);
    const uint64_t since = s->left_ns[rank];
    pthread_mutex_unlock(&s->lock);
    return since;
}

static bool all_have_left(ari_store *s)
{
    int r = 0;
    while (r < s->link->size && (r == s->link->rank || ari_store_left_ns(s, r) != 0))
        r++;
    return r == s->link->size;
}

bool ari_store_leave(ari_store *s, uint64_t after_failure_ns)
{
    if (!s->said_bye) {
        ARI_OWNED ari_message *m = new_message(s, BYE, NULL, 0);
        note_departure(s, s->link->rank);
        send_to_others(s, m);
        s->said_bye = true;
    }
    uint64_t deadline = ari_deadline_ns(ari_now_ns(), s->timeout_ns);
    bool failed = false;
    serve(s);
    for (unsigned turn = 0; !all_have_left(s) && ari_now_ns() < deadline; take_turn(s, &turn)) {
        if (!failed && atomic_load(&s->st) != AR_OK)
            deadline = ari_deadline_ns(ari_now_ns(), after_failure_ns);
        failed = failed || atomic_load(&s->st) != AR_OK;
    }
    return all_have_left(s);
}

void ari_store_destroy(ari_store *s)
{
    if (!s)
        return;
    ari_store_watch(s, NULL);
    if (!s->said_bye)
        (void)ari_store_leave(s, 0);
    free_store(s);
}
