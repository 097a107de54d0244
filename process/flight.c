/* SPDX-License-Identifier: Apache-2.0 */
#include "process/flight.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/comm/rendezvous_impl.h"
#include "ref/core/ranks.h"
#include "ref/core/size.h"

/* --- the recorder ------------------------------------------------------------------------------------------------- */

ar_status ari_flight_add(ari_flight *f, ari_flight_group **gives, uint64_t id, const int *rank, int n)
{
    ari_flight_group *g = NULL;
    AR_TRY(ari_alloc_zero((void **)&g, 1, sizeof *g, "a group of ranks"));
    const ar_status st = ari_alloc((void **)&g->rank, (size_t)n, sizeof *rank, "a group of ranks");
    if (st != AR_OK) {
        free(g);
        return st;
    }
    memcpy(g->rank, rank, (size_t)n * sizeof *rank);
    g->id = id;
    g->n = n;
    ari_ranks_describe(rank, n, g->ranks, sizeof g->ranks);
    g->next = f->groups;
    f->groups = g;
    *gives = g;
    return AR_OK;
}

void ari_flight_remove(ari_flight *f, ari_flight_group *g)
{
    ari_flight_group **at = &f->groups;
    while (*at && *at != g)
        at = &(*at)->next;
    if (!*at)
        return;
    *at = g->next;
    free(g->rank);
    free(g);
}

static void keep_counts(size_t *to, const size_t *from, int n)
{
    if (from)
        memcpy(to, from, (size_t)(n < ARI_FLIGHT_COUNTS ? n : ARI_FLIGHT_COUNTS) * sizeof *to);
}

uint64_t ari_flight_enter(ari_flight *f, ari_flight_group *g, const ari_call *call, int n, uint64_t now_ns)
{
    const uint64_t number = f->calls++;
    ari_flight_call *c = &f->call[number % ARI_FLIGHT_CALLS];
    const size_t tag = strnlen(call->tag, sizeof c->tag - 1);
    c->group = g->id;
    c->seq = ++g->entered;
    c->since_ns = now_ns;
    c->done = false;
    c->call = *call;
    c->n = n;
    keep_counts(c->counts, call->counts, n);
    keep_counts(c->recv_counts, call->recv_counts, n);
    memcpy(c->tag, call->tag, tag);
    c->tag[tag] = '\0';
    return number;
}

static ari_flight_call *call_at(ari_flight *f, uint64_t number)
{
    return f->calls - number <= ARI_FLIGHT_CALLS ? &f->call[number % ARI_FLIGHT_CALLS] : NULL;
}

void ari_flight_begin(ari_flight *f, uint64_t number, uint64_t now_ns)
{
    ari_flight_call *c = call_at(f, number);
    if (c && !c->done)
        c->since_ns = now_ns;
}

void ari_flight_done(ari_flight *f, uint64_t number, uint64_t now_ns)
{
    ari_flight_call *c = call_at(f, number);
    if (c) {
        c->done = true;
        c->since_ns = now_ns;
    }
}

/* --- views: a head, groups with their ranks, calls from the oldest to the newest ---------------------------------- */

typedef struct view_head {
    uint32_t groups, calls;
} view_head;
typedef struct view_group {
    uint64_t id, entered;
    int32_t n;
    char ranks[ARI_FLIGHT_RANKS];
} view_group;

enum { WHAT_BYTES = 160 };
typedef struct view_call {
    uint64_t group, seq, since_ns; /* since_ns: before the view was taken */
    int32_t kind;
    uint32_t done;
    char what[WHAT_BYTES]; /* without its tag */
    char tag[ARI_FLIGHT_TAG];
} view_call;

static view_call view_of(const ari_flight_call *c, uint64_t now_ns)
{
    view_call v = {.group = c->group, .seq = c->seq, .kind = (int32_t)c->call.kind, .done = c->done};
    ari_call call = c->call;
    call.tag = "";
    call.counts = call.counts ? c->counts : NULL;
    call.recv_counts = call.recv_counts ? c->recv_counts : NULL;
    v.since_ns = now_ns > c->since_ns ? now_ns - c->since_ns : 0; /* two machines' clocks have nothing in common */
    ari_call_describe(&call, c->n < ARI_FLIGHT_COUNTS ? c->n : ARI_FLIGHT_COUNTS, v.what, sizeof v.what);
    memcpy(v.tag, c->tag, sizeof v.tag);
    return v;
}

void *ari_flight_pack(const ari_flight *f, uint64_t now_ns, size_t *bytes)
{
    view_head head = {.calls = (uint32_t)(f->calls < ARI_FLIGHT_CALLS ? f->calls : ARI_FLIGHT_CALLS)};
    size_t size = sizeof head + head.calls * sizeof(view_call);
    for (const ari_flight_group *g = f->groups; g; g = g->next, head.groups++)
        size += sizeof(view_group) + (size_t)g->n * sizeof(int);
    char *view = malloc(size), *at = view;
    if (!view)
        return NULL;
    memcpy(at, &head, sizeof head);
    at += sizeof head;
    for (const ari_flight_group *g = f->groups; g; g = g->next) {
        view_group v = {.id = g->id, .entered = g->entered, .n = g->n};
        memcpy(v.ranks, g->ranks, sizeof v.ranks);
        memcpy(at, &v, sizeof v);
        memcpy(at + sizeof v, g->rank, (size_t)g->n * sizeof(int));
        at += sizeof v + (size_t)g->n * sizeof(int);
    }
    for (uint64_t i = f->calls - head.calls; i < f->calls; i++) {
        const view_call c = view_of(&f->call[i % ARI_FLIGHT_CALLS], now_ns);
        memcpy(at, &c, sizeof c);
        at += sizeof c;
    }
    *bytes = size;
    return view;
}

/* A view taken apart. It came over the network: nothing in it is trusted to fit. */
typedef struct parts {
    view_head head;
    const char *group_at, *call_at; /* unaligned */
    const char *end;
} parts;

static bool group_next(const parts *p, const char **at, view_group *g, const char **ranks)
{
    if ((size_t)(p->end - *at) < sizeof *g)
        return false;
    memcpy(g, *at, sizeof *g);
    g->ranks[sizeof g->ranks - 1] = '\0';
    *ranks = *at + sizeof *g;
    if (g->n < 1 || (size_t)g->n > (size_t)(p->end - *ranks) / sizeof(int))
        return false;
    *at = *ranks + (size_t)g->n * sizeof(int);
    return true;
}

/* False, and no groups and calls in it: it is none. */
static bool take_apart(parts *p, const ari_flight_view *v)
{
    *p = (parts){.head = {0}};
    if (v->size < sizeof p->head || !v->bytes)
        return false;
    memcpy(&p->head, v->bytes, sizeof p->head);
    p->group_at = (const char *)v->bytes + sizeof p->head;
    p->end = (const char *)v->bytes + v->size;
    p->call_at = p->group_at;
    for (uint32_t i = 0; i < p->head.groups; i++) {
        view_group g;
        const char *ranks;
        if (!group_next(p, &p->call_at, &g, &ranks)) {
            *p = (parts){.head = {0}};
            return false;
        }
    }
    const size_t room = (size_t)(p->end - p->call_at) / sizeof(view_call);
    p->head.calls = p->head.calls < room ? p->head.calls : (uint32_t)room;
    return true;
}

static view_call nth_call(const parts *p, uint32_t i)
{
    view_call c;
    memcpy(&c, p->call_at + i * sizeof c, sizeof c);
    c.what[sizeof c.what - 1] = '\0';
    c.tag[sizeof c.tag - 1] = '\0';
    return c;
}

static bool find_group(const parts *p, uint64_t id, view_group *g, const char **ranks)
{
    const char *at = p->group_at;
    for (uint32_t i = 0; i < p->head.groups && group_next(p, &at, g, ranks); i++) {
        if (g->id == id)
            return true;
    }
    return false;
}

static bool find_call(const parts *p, uint64_t group, uint64_t seq, view_call *c)
{
    for (uint32_t i = 0; i < p->head.calls; i++) {
        *c = nth_call(p, i);
        if (c->group == group && c->seq == seq)
            return true;
    }
    return false;
}

static int rank_at(const char *ranks, int i)
{
    int r;
    memcpy(&r, ranks + (size_t)i * sizeof r, sizeof r);
    return r;
}

/* --- the report --------------------------------------------------------------------------------------------------- */

typedef struct report {
    parts *view; /* [size] */
    int size;
    bool *own;
    FILE *to;
} report;

/* A call that has not ended, of one rank. */
typedef struct culprit {
    int rank;
    view_call call;
    view_group group;
    const char *ranks;
} culprit;

/* Calls f for every call that has not ended, until it returns true. */
static bool any_open(const report *r, culprit *k, bool (*f)(const report *r, const culprit *k, culprit *found),
                     culprit *found)
{
    for (k->rank = 0; k->rank < r->size; k->rank++) {
        const parts *p = &r->view[k->rank];
        for (uint32_t i = 0; i < p->head.calls; i++) {
            k->call = nth_call(p, i);
            if (!k->call.done && find_group(p, k->call.group, &k->group, &k->ranks) && f(r, k, found))
                return true;
        }
    }
    return false;
}

/* The one that has waited longest: the others' are its consequences. */
static bool keep_longest(const report *r, const culprit *k, culprit *found)
{
    (void)r;
    if (found->rank < 0 || k->call.since_ns > found->call.since_ns)
        *found = *k;
    return false;
}

/* Of "send(F32, count 8, peer 1)": from "F32" on; the p of "peer" is the first after dtype and count. */
static const char *content_of(const view_call *c)
{
    const char *open = strchr(c->what, '(');
    return open ? open : "";
}

/* What two ranks say of one collective must be the same, but for what each may say in its own way. */
static bool agree(const view_call *a, const view_call *b)
{
    const bool message = (a->kind == ARI_SEND || a->kind == ARI_RECV) && (b->kind == ARI_SEND || b->kind == ARI_RECV);
    const bool tags = !a->tag[0] || !b->tag[0] || strcmp(a->tag, b->tag) == 0;
    if (message)
        return strncmp(content_of(a), content_of(b), strcspn(content_of(a), "p")) == 0;
    if (a->kind != b->kind)
        return false;
    if (a->kind == ARI_SPLIT)
        return true;
    if (a->kind == ARI_ALL_TO_ALL || a->kind == ARI_EXCHANGE)
        return strcspn(a->what, ",") == strcspn(b->what, ",") && strncmp(a->what, b->what, strcspn(a->what, ",")) == 0;
    return tags && strcmp(a->what, b->what) == 0;
}

static void write_call(FILE *to, const view_call *c)
{
    fprintf(to, c->tag[0] ? "%s '%s'" : "%s", c->what, c->tag);
}

static void write_collective(FILE *to, const view_call *c, const view_group *g)
{
    fprintf(to, "%s #%llu of ranks %s", c->kind == ARI_SEND || c->kind == ARI_RECV ? "message" : "collective",
            (unsigned long long)c->seq, g->ranks);
}

static bool valid_rank(const report *r, int rank)
{
    return rank >= 0 && rank < r->size;
}

/* The first collective of the call's group, as far back as is known, about which two members say different things. */
static bool write_mismatch(const report *r, const culprit *k, culprit *found)
{
    const uint64_t known = k->call.seq > ARI_FLIGHT_CALLS ? k->call.seq - ARI_FLIGHT_CALLS : 0;
    for (uint64_t seq = known + 1; seq <= k->call.seq; seq++) {
        view_call first, other;
        int a = -1;
        for (int i = 0; i < k->group.n; i++) {
            const int b = rank_at(k->ranks, i);
            if (!valid_rank(r, b) || !find_call(&r->view[b], k->call.group, seq, a < 0 ? &first : &other))
                continue;
            if (a >= 0 && !agree(&first, &other)) {
                fprintf(r->to, "ranks %d and %d disagree in ", a, b);
                write_collective(r->to, &first, &k->group);
                fprintf(r->to, ": rank %d calls ", a);
                write_call(r->to, &first);
                fprintf(r->to, ", rank %d calls ", b);
                write_call(r->to, &other);
                *found = *k;
                return true;
            }
            a = a < 0 ? b : a;
        }
    }
    return false;
}

static void write_wait(const report *r, const culprit *k)
{
    int missing = 0;
    fprintf(r->to, "rank %d waited %.3f s in ", k->rank, (double)k->call.since_ns * 1e-9);
    write_call(r->to, &k->call);
    fprintf(r->to, ", ");
    write_collective(r->to, &k->call, &k->group);
    for (int i = 0; i < k->group.n; i++) {
        const int b = rank_at(k->ranks, i);
        view_group g;
        const char *ranks;
        if (!valid_rank(r, b) || (find_group(&r->view[b], k->call.group, &g, &ranks) && g.entered >= k->call.seq))
            continue;
        fprintf(r->to, missing++ ? ", %d" : ", for rank %d", b);
    }
    if (!missing)
        fprintf(r->to, ", to which all have come: a GPU or the network stands still");
}

/* --- the table, as ari_world_write_table writes it ---------------------------------------------------------------- */

static void name_call(char *text, size_t size, const view_call *c)
{
    snprintf(text, size, "%s #%llu%s%s", ari_kind_name((ari_kind)c->kind), (unsigned long long)c->seq,
             c->tag[0] ? " " : "", c->tag);
}

/* One line for each call that a rank is in, the oldest first, or one that says what it does instead. */
static void write_rank(const report *r, int rank)
{
    const parts *p = &r->view[rank];
    char who[16], last[128] = "none", now[128];
    int lines = 0;
    double idle_s = 0;
    snprintf(who, sizeof who, "%d", rank);
    for (uint32_t i = 0; i < p->head.calls; i++) {
        const view_call c = nth_call(p, i);
        if (!c.done)
            continue;
        name_call(last, sizeof last, &c);
        idle_s = (double)c.since_ns * 1e-9;
    }
    for (uint32_t i = 0; i < p->head.calls; i++) {
        const view_call c = nth_call(p, i);
        view_group g = {.ranks = ""};
        const char *ranks;
        if (c.done)
            continue;
        name_call(now, sizeof now, &c);
        (void)find_group(p, c.group, &g, &ranks);
        fprintf(r->to, "\n%9s  %-36s  %-36s  %-12s  %.3f s", lines ? "" : who, lines ? "" : last, now, g.ranks,
                (double)c.since_ns * 1e-9);
        lines++;
    }
    if (!lines && p->call_at)
        fprintf(r->to, "\n%9s  %-36s  %-36s  %-12s  %.3f s", who, last, "running", "", idle_s);
    else if (!lines)
        fprintf(r->to, "\n%9s  %-36s  %-36s", who, "", "did not answer, or has not begun");
}

static void write_table(const report *r)
{
    fprintf(r->to, "\n%9s  %-36s  %-36s  %-12s  %s", "rank", "last finished", "now", "with ranks", "for");
    for (int i = 0; i < r->size; i++)
        write_rank(r, i);
}

ar_status ari_flight_report(const ari_flight_view *views, int size, int late, bool *own, char **gives)
{
    report r = {.view = calloc((size_t)size, sizeof *r.view), .size = size, .own = own};
    size_t length = 0;
    ar_status st = AR_ERR_TIMEOUT;
    *gives = NULL;
    r.to = r.view ? open_memstream(gives, &length) : NULL;
    if (!r.to) {
        free(r.view);
        return st;
    }
    for (int i = 0; i < size; i++)
        (void)take_apart(&r.view[i], &views[i]); /* one that is no view has nothing in it */
    culprit each, k = {.rank = -1};
    own[late] = true;
    if (any_open(&r, &each, write_mismatch, &k))
        st = AR_ERR_MISMATCH;
    else if (!any_open(&r, &each, keep_longest, &k) && k.rank < 0)
        fprintf(r.to, "rank %d waited too long for another process", late);
    else
        write_wait(&r, &k);
    if (st == AR_ERR_MISMATCH) /* the one that was late first is one of many that wait for these */
        own[late] = false;
    for (int i = 0; k.rank >= 0 && i < k.group.n; i++) {
        if (valid_rank(&r, rank_at(k.ranks, i)))
            own[rank_at(k.ranks, i)] = true;
    }
    write_table(&r);
    free(r.view);
    if (fclose(r.to) != 0) {
        free(*gives);
        *gives = NULL;
    }
    return st;
}
