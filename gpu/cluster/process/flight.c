/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/cluster/process/flight.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/comm/rendezvous_impl.h"
#include "ref/core/size.h"
#include "ref/core/text.h"

/* --- the recorder ------------------------------------------------------------------------------------------------- */

ar_status ari_flight_add(ari_flight *f, ari_flight_group **gives, uint64_t id, const int *rank, int n)
{
    ARI_OWNED ari_flight_group *g = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&g, 1, "a group of ranks"));
    AR_TRY(ari_alloc((void **)&g->rank, (size_t)n, sizeof *rank, "a group of ranks"));
    memcpy(g->rank, rank, (size_t)n * sizeof *rank);
    g->id = id;
    g->n = n;
    ari_ranks_describe(rank, n, g->ranks, sizeof g->ranks);
    g->next = f->groups;
    f->groups = g;
    *gives = g;
    g = NULL;
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

uint64_t ari_flight_id(uint64_t id, uint64_t a, uint64_t b)
{
    const uint64_t words[] = {id, a, b};
    uint64_t hash = UINT64_C(0xcbf29ce484222325); /* FNV-1a, word by word */
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        for (int k = 0; k < 64; k += 8)
            hash = (hash ^ (words[i] >> k & 0xff)) * UINT64_C(0x100000001b3);
    }
    return hash;
}

static void keep_counts(size_t *to, const size_t *from, int n)
{
    if (from)
        memcpy(to, from, (size_t)(n < ARI_FLIGHT_COUNTS ? n : ARI_FLIGHT_COUNTS) * sizeof *to);
}

void ari_flight_init(ari_flight *f)
{
    f->end = &f->open;
}

void ari_flight_enter(ari_flight *f, ari_flight_call *c, ari_flight_group *g, const ari_call *call, uint64_t now_ns)
{
    *c = (ari_flight_call){.group = g->id, .seq = ++g->entered, .since_ns = now_ns, .call = *call, .n = g->n};
    keep_counts(c->counts, call->counts, g->n);
    keep_counts(c->recv_counts, call->recv_counts, g->n);
    memcpy(c->tag, call->tag, strnlen(call->tag, sizeof c->tag - 1));
    *f->end = c;
    f->end = &c->next;
    f->n_open++;
}

void ari_flight_leave(ari_flight *f, ari_flight_call *c, bool done, uint64_t now_ns)
{
    ari_flight_call **at = &f->open;
    while (*at != c)
        at = &(*at)->next;
    *at = c->next;
    if (!c->next)
        f->end = at;
    f->n_open--;
    if (!done)
        return;
    ari_flight_call *kept = &f->done[f->n_done++ % ARI_FLIGHT_CALLS];
    *kept = *c;
    kept->since_ns = now_ns;
}

/* --- as text: "group ID entered n RANKS rank .." and "call GROUP seq since_ns done kind WHAT", tab, tag ----------- */

enum { WHAT_BYTES = 160 };

static void write_call_line(FILE *to, const ari_flight_call *c, bool done, uint64_t now_ns)
{
    char what[WHAT_BYTES];
    ari_call call = c->call;
    call.tag = "";
    call.counts = call.counts ? c->counts : NULL;
    call.recv_counts = call.recv_counts ? c->recv_counts : NULL;
    ari_call_describe(&call, c->n < ARI_FLIGHT_COUNTS ? c->n : ARI_FLIGHT_COUNTS, what, sizeof what);
    /* Since when: before now, for two machines' clocks have nothing in common. */
    fprintf(to, "call %" PRIx64 " %" PRIu64 " %" PRIu64 " %d %d %s\t", c->group, c->seq,
            now_ns > c->since_ns ? now_ns - c->since_ns : 0, done, (int)c->call.kind, what);
    for (const char *t = c->tag; *t; t++)
        fputc((unsigned char)*t < ' ' ? '?' : *t, to);
    fputc('\n', to);
}

char *ari_flight_text(const ari_flight *f, uint64_t now_ns)
{
    char *text = NULL;
    size_t length = 0;
    FILE *to = open_memstream(&text, &length);
    if (!to)
        return NULL;
    for (const ari_flight_group *g = f->groups; g; g = g->next) {
        fprintf(to, "group %" PRIx64 " %" PRIu64 " %d %s", g->id, g->entered, g->n, g->ranks);
        for (int i = 0; i < g->n; i++)
            fprintf(to, " %d", g->rank[i]);
        fputc('\n', to);
    }
    for (uint64_t i = f->n_done > ARI_FLIGHT_CALLS ? f->n_done - ARI_FLIGHT_CALLS : 0; i < f->n_done; i++)
        write_call_line(to, &f->done[i % ARI_FLIGHT_CALLS], true, now_ns);
    for (const ari_flight_call *c = f->open; c; c = c->next)
        write_call_line(to, c, false, now_ns);
    if (ari_text_closed(to, &text))
        return text;
    free(text);
    return NULL;
}

/* Contents of a line. */
typedef struct view_group {
    uint64_t id, entered;
    int n;
    char ranks[ARI_FLIGHT_RANKS];
    int *rank; /* [n] */
} view_group;

typedef struct view_call {
    uint64_t group, seq, since_ns; /* since_ns: before the text was made */
    int kind, done;
    char what[WHAT_BYTES]; /* without its tag */
    char tag[ARI_FLIGHT_TAG];
} view_call;

/* A rank's text. It came over the network: nothing in it is trusted to fit. */
typedef struct view {
    view_group *group;
    view_call *call;
    int groups, calls;
} view;

static bool read_group(view_group *g, const char *line)
{
    int at = 0, i = 0;
    *g = (view_group){.n = 0};
    if (sscanf(line, "group %" SCNx64 " %" SCNu64 " %d %47s%n", &g->id, &g->entered, &g->n, g->ranks, &at) != 4 ||
        g->n < 1 || (size_t)g->n > strlen(line) || !(g->rank = calloc((size_t)g->n, sizeof *g->rank)))
        return false;
    for (int used = 0; i < g->n && sscanf(line + at, "%d%n", &g->rank[i], &used) == 1; i++)
        at += used;
    if (i < g->n)
        free(g->rank);
    return i == g->n;
}

static bool read_call(view_call *c, const char *line)
{
    *c = (view_call){.kind = 0};
    return sscanf(line, "call %" SCNx64 " %" SCNu64 " %" SCNu64 " %d %d %159[^\t\n]\t%71[^\n]", &c->group, &c->seq,
                  &c->since_ns, &c->done, &c->kind, c->what, c->tag) >= 6;
}

static view read_view(const char *text)
{
    view v = {.groups = 0};
    size_t lines = 1;
    for (const char *c = text ? text : ""; *c; c++)
        lines += *c == '\n';
    v.group = text ? calloc(lines, sizeof *v.group) : NULL;
    v.call = text ? calloc(lines, sizeof *v.call) : NULL;
    for (const char *line = text; v.group && v.call && *line; line += line[strcspn(line, "\n")] == '\n') {
        v.groups += read_group(&v.group[v.groups], line);
        v.calls += read_call(&v.call[v.calls], line);
        line += strcspn(line, "\n");
    }
    return v;
}

static void free_view(view *v)
{
    for (int i = 0; i < v->groups; i++)
        free(v->group[i].rank);
    free(v->group);
    free(v->call);
}

static const view_group *find_group(const view *v, uint64_t id)
{
    for (int i = 0; i < v->groups; i++) {
        if (v->group[i].id == id)
            return &v->group[i];
    }
    return NULL;
}

static const view_call *find_call(const view *v, uint64_t group, uint64_t seq)
{
    for (int i = 0; i < v->calls; i++) {
        if (v->call[i].group == group && v->call[i].seq == seq)
            return &v->call[i];
    }
    return NULL;
}

/* --- the report --------------------------------------------------------------------------------------------------- */

typedef struct report {
    view *view; /* [size] */
    int size;
    FILE *to;
} report;

static bool read_report(report *r, const ari_flight_view *views, int ranks)
{
    *r = (report){.view = calloc((size_t)ranks, sizeof *r->view), .size = ranks};
    for (int i = 0; r->view && i < ranks; i++)
        r->view[i] = read_view(views[i].text);
    return r->view != NULL;
}

static void free_report(report *r)
{
    for (int i = 0; i < r->size; i++)
        free_view(&r->view[i]);
    free(r->view);
}

/* A call that has not ended, of one rank. */
typedef struct culprit {
    int rank;
    int i; /* of its calls */
    const view_call *call;
    const view_group *group;
} culprit;

/* The next one after `k`, which begins with zeros. */
static bool next_open(const report *r, culprit *k)
{
    for (k->i += k->call ? 1 : 0; k->rank < r->size; k->rank++, k->i = 0) {
        const view *p = &r->view[k->rank];
        for (; k->i < p->calls; k->i++) {
            k->call = &p->call[k->i];
            k->group = find_group(p, k->call->group);
            if (!k->call->done && k->group)
                return true;
        }
    }
    return false;
}

/* The arguments of "send(F32, count 8, peer 1)" from "F32" on; the p of "peer" is the first after dtype and count. */
static const char *content_of(const view_call *c)
{
    const char *open = strchr(c->what, '(');
    return open ? open : "";
}

/* Two ranks' reports of one collective must be equal, except for what may differ between ranks. */
static bool same_call(const view_call *a, const view_call *b)
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
            if (first && other && !same_call(first, other)) {
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

/* Writes the event to the report's text; gives the call that it concerns, none: call is NULL. */
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

ar_status ari_flight_judge(const ari_flight_view *views, int ranks, int late, bool *own, char *line, size_t size)
{
    report r;
    culprit about = {.rank = 0};
    ar_status st = AR_ERR_TIMEOUT;
    snprintf(line, size, "a rank waited too long, and no memory is left to say more");
    own[late] = true;
    if (!read_report(&r, views, ranks))
        return st;
    line[size - 1] = '\0'; /* a text that is cut off ends without one of its own */
    r.to = fmemopen(line, size - 1, "w");
    if (r.to) {
        st = write_first_line(&r, late, &about);
        fclose(r.to);
    }
    own[late] = st == AR_ERR_TIMEOUT; /* else it is one of many that wait for those that disagree */
    for (int i = 0; about.call && i < about.group->n; i++) {
        if (valid_rank(&r, about.group->rank[i]))
            own[about.group->rank[i]] = true;
    }
    free_report(&r);
    return st;
}

/* --- the table ---------------------------------------------------------------------------------------------------- */

static ari_rank_row row_of(const view *p, const view_call *c)
{
    ari_rank_row row = {.waiting_s = (double)c->since_ns * 1e-9};
    const view_group *g = find_group(p, c->group);
    ari_activity_name(row.current, sizeof row.current, (ari_kind)c->kind, c->seq, c->tag);
    snprintf(row.group, sizeof row.group, "%.*s", (int)sizeof row.group - 1, g ? g->ranks : "");
    return row;
}

static ari_rank_lines lines_of(const view *p, bool left)
{
    ari_rank_lines l = {.view = {.last_finished = "none"}};
    l.rows = calloc((size_t)p->calls, sizeof *l.rows);
    for (const view_call *c = p->call; l.rows && c < p->call + p->calls; c++) {
        const ari_rank_row row = row_of(p, c);
        if (!c->done)
            l.rows[l.row_count++] = row;
        else
            snprintf(l.view.last_finished, sizeof l.view.last_finished, "%s", row.current);
        l.view.current_row.waiting_s = row.waiting_s;
    }
    if (l.row_count > 0)
        return l;
    free(l.rows);
    l.rows = NULL;
    snprintf(l.view.current_row.current, sizeof l.view.current_row.current, "%s", left ? "returned" : "running");
    return l;
}

char *ari_flight_report(const ari_flight_view *views, int ranks, const char *line)
{
    static const ari_rank_lines silent = {.view = {.last_finished = "?", .current_row = {.current = "no answer"}}};
    report r;
    char *text = NULL;
    ARI_OWNED ari_rank_lines *of = calloc((size_t)ranks, sizeof *of);
    if (of && read_report(&r, views, ranks)) {
        for (int i = 0; i < ranks; i++)
            of[i] = views[i].text ? lines_of(&r.view[i], views[i].left) : silent;
        text = ari_rank_table(line, of, ranks);
        free_report(&r);
    }
    for (int i = 0; of && i < ranks; i++)
        free(of[i].rows);
    return text;
}
