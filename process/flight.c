/* SPDX-License-Identifier: Apache-2.0 */
#include "process/flight.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/comm/rendezvous_impl.h"
#include "ref/core/size.h"
#include "ref/core/text.h"

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

/* --- views: a head, groups with their ranks, calls from the oldest to the newest, all of them aligned -------------- */

typedef struct view_head {
    uint32_t groups, calls;
} view_head;

typedef struct view_group {
    uint64_t id, entered;
    int32_t n, unused;
    char ranks[ARI_FLIGHT_RANKS];
    int32_t rank[]; /* [n], and one more where n is odd */
} view_group;

enum { WHAT_BYTES = 160 };
typedef struct view_call {
    uint64_t group, seq, since_ns; /* since_ns: before the view was taken */
    int32_t kind;
    uint32_t done;
    char what[WHAT_BYTES]; /* without its tag */
    char tag[ARI_FLIGHT_TAG];
} view_call;

static size_t group_bytes(int n)
{
    return sizeof(view_group) + ((size_t)n + 1) / 2 * sizeof(uint64_t);
}

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
    *bytes = sizeof head + head.calls * sizeof(view_call);
    for (const ari_flight_group *g = f->groups; g; g = g->next, head.groups++)
        *bytes += group_bytes(g->n);
    char *view = calloc(1, *bytes), *at = view;
    if (!view)
        return NULL;
    memcpy(at, &head, sizeof head);
    at += sizeof head;
    for (const ari_flight_group *g = f->groups; g; at += group_bytes(g->n), g = g->next) {
        view_group *v = (view_group *)(void *)at;
        *v = (view_group){.id = g->id, .entered = g->entered, .n = g->n};
        memcpy(v->ranks, g->ranks, sizeof v->ranks);
        memcpy(v->rank, g->rank, (size_t)g->n * sizeof *v->rank);
    }
    view_call *call = (view_call *)(void *)at;
    for (uint64_t i = f->calls - head.calls; i < f->calls; i++)
        *call++ = view_of(&f->call[i % ARI_FLIGHT_CALLS], now_ns);
    return view;
}

/* A view taken apart. */
typedef struct parts {
    char *group; /* the first */
    view_call *call;
    uint32_t groups, calls;
} parts;

static view_group *group_at(char *at)
{
    return (view_group *)(void *)at;
}

/* The view came over the network: nothing in it is trusted to fit. One that is none has no groups and calls. */
static parts take_apart(const ari_flight_view *v)
{
    view_head head;
    if (!v->bytes || v->size < sizeof head)
        return (parts){.calls = 0};
    memcpy(&head, v->bytes, sizeof head);
    char *at = (char *)v->bytes + sizeof head, *const end = (char *)v->bytes + v->size;
    parts p = {.group = at, .groups = head.groups};
    for (uint32_t i = 0; i < head.groups; i++) {
        const size_t room = (size_t)(end - at);
        view_group *g = group_at(at);
        if (room < sizeof *g || g->n < 1 || (size_t)g->n > room / sizeof *g->rank || group_bytes(g->n) > room)
            return (parts){.calls = 0};
        g->ranks[sizeof g->ranks - 1] = '\0';
        at += group_bytes(g->n);
    }
    const size_t room = (size_t)(end - at) / sizeof *p.call;
    p.call = (view_call *)(void *)at;
    p.calls = head.calls < room ? head.calls : (uint32_t)room;
    for (uint32_t i = 0; i < p.calls; i++) {
        p.call[i].what[WHAT_BYTES - 1] = '\0';
        p.call[i].tag[ARI_FLIGHT_TAG - 1] = '\0';
    }
    return p;
}

static const view_group *find_group(const parts *p, uint64_t id)
{
    char *at = p->group;
    for (uint32_t i = 0; i < p->groups; i++, at += group_bytes(group_at(at)->n)) {
        if (group_at(at)->id == id)
            return group_at(at);
    }
    return NULL;
}

static const view_call *find_call(const parts *p, uint64_t group, uint64_t seq)
{
    for (uint32_t i = 0; i < p->calls; i++) {
        if (p->call[i].group == group && p->call[i].seq == seq)
            return &p->call[i];
    }
    return NULL;
}

/* --- the report --------------------------------------------------------------------------------------------------- */

typedef struct report {
    parts *view; /* [size] */
    int size;
    FILE *to;
} report;

/* A call that has not ended, of one rank. */
typedef struct culprit {
    int rank;
    uint32_t i; /* of its calls */
    const view_call *call;
    const view_group *group;
} culprit;

/* The next one after `k`, which begins with zeros. */
static bool next_open(const report *r, culprit *k)
{
    for (k->i += k->call ? 1 : 0; k->rank < r->size; k->rank++, k->i = 0) {
        const parts *p = &r->view[k->rank];
        for (; k->i < p->calls; k->i++) {
            k->call = &p->call[k->i];
            k->group = find_group(p, k->call->group);
            if (!k->call->done && k->group)
                return true;
        }
    }
    return false;
}

/* Of "send(F32, count 8, peer 1)": from "F32" on; the p of "peer" is the first after dtype and count. */
static const char *content_of(const view_call *c)
{
    const char *open = strchr(c->what, '(');
    return open ? open : "";
}

/* What two ranks report of one collective must be the same, but for what may differ between ranks. */
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

/* The first collective of the call's group, as far back as is known, in which two members disagree. */
static bool write_mismatch(const report *r, const culprit *k)
{
    const uint64_t known = k->call->seq > ARI_FLIGHT_CALLS ? k->call->seq - ARI_FLIGHT_CALLS : 0;
    for (uint64_t seq = known + 1; seq <= k->call->seq; seq++) {
        const view_call *first = NULL;
        int a = -1;
        for (int i = 0; i < k->group->n; i++) {
            const int b = k->group->rank[i];
            const view_call *other = valid_rank(r, b) ? find_call(&r->view[b], k->call->group, seq) : NULL;
            if (first && other && !agree(first, other)) {
                fprintf(r->to, "ranks %d and %d disagree in ", a, b);
                write_collective(r->to, first, k->group);
                fprintf(r->to, ": rank %d calls ", a);
                write_call(r->to, first);
                fprintf(r->to, ", rank %d calls ", b);
                write_call(r->to, other);
                return true;
            }
            a = first ? a : b;
            first = first ? first : other;
        }
    }
    return false;
}

static void write_wait(const report *r, const culprit *k)
{
    int missing = 0;
    fprintf(r->to, "rank %d waited %.3f s in ", k->rank, (double)k->call->since_ns * 1e-9);
    write_call(r->to, k->call);
    fprintf(r->to, ", ");
    write_collective(r->to, k->call, k->group);
    for (int i = 0; i < k->group->n; i++) {
        const int b = k->group->rank[i];
        const view_group *there = valid_rank(r, b) ? find_group(&r->view[b], k->group->id) : NULL;
        if (valid_rank(r, b) && !(there && there->entered >= k->call->seq))
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
    for (const view_call *c = p->call; c < p->call + p->calls; c++) {
        if (!c->done)
            continue;
        name_call(last, sizeof last, c);
        idle_s = (double)c->since_ns * 1e-9;
    }
    for (const view_call *c = p->call; c < p->call + p->calls; c++) {
        if (c->done)
            continue;
        name_call(now, sizeof now, c);
        const view_group *g = find_group(p, c->group);
        fprintf(r->to, "\n%9s  %-36s  %-36s  %-12s  %.3f s", lines ? "" : who, lines ? "" : last, now,
                g ? g->ranks : "", (double)c->since_ns * 1e-9);
        lines++;
    }
    if (!lines && p->call)
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

/* What happened, to the report's text; gives the call it is about, none: call is NULL. */
static ar_status write_first_line(const report *r, int late, culprit *about)
{
    for (culprit k = {.rank = 0}; next_open(r, &k);) {
        *about = k;
        if (write_mismatch(r, &k))
            return AR_ERR_MISMATCH;
    }
    *about = (culprit){.rank = 0};
    for (culprit k = {.rank = 0}; next_open(r, &k);) { /* the one that has waited longest: the others' follow from it */
        if (!about->call || k.call->since_ns > about->call->since_ns)
            *about = k;
    }
    if (about->call)
        write_wait(r, about);
    else
        fprintf(r->to, "rank %d waited too long for another process", late);
    return AR_ERR_TIMEOUT;
}

ar_status ari_flight_report(const ari_flight_view *views, int size, int late, bool *own, char **gives)
{
    report r = {.view = calloc((size_t)size, sizeof *r.view), .size = size};
    size_t length = 0;
    culprit about = {.rank = 0};
    *gives = NULL;
    r.to = r.view ? open_memstream(gives, &length) : NULL;
    if (!r.to) {
        free(r.view);
        return AR_ERR_TIMEOUT;
    }
    for (int i = 0; i < size; i++)
        r.view[i] = take_apart(&views[i]);
    const ar_status st = write_first_line(&r, late, &about);
    own[late] = st == AR_ERR_TIMEOUT; /* else it is one of many that wait for those that disagree */
    for (int i = 0; about.call && i < about.group->n; i++) {
        if (valid_rank(&r, about.group->rank[i]))
            own[about.group->rank[i]] = true;
    }
    write_table(&r);
    free(r.view);
    if (fclose(r.to) != 0) {
        free(*gives);
        *gives = NULL;
    }
    return st;
}
