/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "ref/comm/rendezvous_impl.h"

/* Each rank's current activity, and the table of it when the world fails. */

void ari_world_begin(ari_member *m, const ari_call *call)
{
    ari_rank_state *r = &m->group->world->rank[m->rank];
    ari_activity *a = &m->activity;
    const size_t length = strnlen(call->tag, sizeof a->tag - 1);
    pthread_mutex_lock(&r->lock);
    *a = (ari_activity){
        .kind = call->kind, .group = m->group, .seq = m->seq, .since_ns = ari_wait_coarse_ns(), .at = r->now_end};
    memcpy(a->tag, call->tag, length);
    *a->at = a;
    r->now_end = &a->next;
    pthread_mutex_unlock(&r->lock);
}

void ari_world_end(ari_member *m, bool finished)
{
    ari_rank_state *r = &m->group->world->rank[m->rank];
    ari_activity *a = &m->activity;
    pthread_mutex_lock(&r->lock);
    *a->at = a->next;
    if (a->next)
        a->next->at = a->at;
    else
        r->now_end = a->at;
    if (finished)
        r->last = *a;
    r->idle_since_ns = ari_wait_coarse_ns();
    pthread_mutex_unlock(&r->lock);
}

void ari_world_swapped(ari_member *m, const ari_call *call)
{
    ari_rank_state *r = &m->group->world->rank[m->rank];
    const size_t length = strnlen(call->tag, sizeof r->last.tag - 1);
    pthread_mutex_lock(&r->lock);
    r->last.kind = call->kind;
    r->last.group = m->group;
    r->last.seq = m->seq;
    memcpy(r->last.tag, call->tag, length);
    r->last.tag[length] = '\0';
    r->idle_since_ns = ari_wait_coarse_ns();
    pthread_mutex_unlock(&r->lock);
}

/* --- taking views ------------------------------------------------------------------------------------------------- */

/* Kind, number and tag, with room for all of them. */
enum { ACTIVITY_BYTES = 32 + 20 + ARI_TAG_BYTES };

int ari_activity_name(char *text, size_t size, ari_kind kind, uint64_t seq, const char *tag)
{
    return snprintf(text, size, "%s #%llu%s%s", ari_kind_name(kind), (unsigned long long)seq, tag[0] ? " " : "", tag);
}

static int write_activity(char *text, size_t size, const ari_activity *a)
{
    return ari_activity_name(text, size, a->kind, a->seq, a->tag);
}

static double seconds_since(uint64_t since_ns, uint64_t now_ns)
{
    return now_ns > since_ns ? (double)(now_ns - since_ns) * 1e-9 : 0.0;
}

/* All that the rank is in, in one text. Its lock held. */
static void join_activities(const ari_rank_state *r, char *text, size_t size)
{
    static const char more[] = "; ...";
    size_t used = 0;
    for (const ari_activity *a = r->now; a; a = a->next) {
        char one[ACTIVITY_BYTES];
        const size_t length = (size_t)write_activity(one, sizeof one, a) + (used > 0 ? 2 : 0);
        const size_t room = size - used - (a->next ? sizeof more - 1 : 0); /* `more` fits behind all but the last */
        if (used > 0 && length >= room) {
            snprintf(text + used, size - used, "%s", more);
            return;
        }
        snprintf(text + used, room, "%s%s", used > 0 ? "; " : "", one);
        used += length < room ? length : room - 1;
    }
}

/* The rank's lock held. */
static void take_rows(ari_rank_lines *l, const ari_rank_state *r, uint64_t now_ns)
{
    for (const ari_activity *a = r->now; a; a = a->next)
        l->row_count++;
    l->rows = calloc(l->row_count, sizeof *l->rows);
    ari_rank_row *row = l->rows;
    for (const ari_activity *a = r->now; row && a; a = a->next, row++) {
        write_activity(row->current, sizeof row->current, a);
        ari_ranks_describe(a->group->rank, a->group->n, row->group, sizeof row->group);
        row->waiting_s = seconds_since(a->since_ns, now_ns);
    }
}

static void take_view(ari_rank_lines *l, ari_rank_state *r, uint64_t now_ns)
{
    ari_rank_view *v = &l->view;
    pthread_mutex_lock(&r->lock);
    if (r->last.group)
        write_activity(v->last, sizeof v->last, &r->last);
    else
        snprintf(v->last, sizeof v->last, "none");
    const ari_activity *oldest = r->now;
    if (oldest) {
        ari_ranks_describe(oldest->group->rank, oldest->group->n, v->now.group, sizeof v->now.group);
        join_activities(r, v->now.current, sizeof v->now.current);
        take_rows(l, r, now_ns);
    } else {
        snprintf(v->now.current, sizeof v->now.current, "%s",
                 atomic_load(&r->returned) == ARI_RUNS ? "running" : "returned");
    }
    v->now.waiting_s = seconds_since(oldest ? oldest->since_ns : r->idle_since_ns, now_ns);
    pthread_mutex_unlock(&r->lock);
}

void ari_world_take_views(ari_world *w)
{
    const uint64_t now = ari_wait_now_ns();
    for (int i = 0; i < w->ranks; i++)
        take_view(&w->lines[i], &w->rank[i], now);
}

/* --- the table ---------------------------------------------------------------------------------------------------- */

static size_t rows_of(const ari_rank_lines *l)
{
    return l->rows ? l->row_count : 1;
}

static const ari_rank_row *row_at(const ari_rank_lines *l, size_t i)
{
    return l->rows ? &l->rows[i] : &l->view.now;
}

static bool same_place(const ari_rank_lines *a, const ari_rank_lines *b)
{
    bool same = strcmp(a->view.last, b->view.last) == 0 && rows_of(a) == rows_of(b);
    for (size_t i = 0; same && i < rows_of(a); i++) {
        const ari_rank_row *x = row_at(a, i), *y = row_at(b, i);
        same = strcmp(x->current, y->current) == 0 && strcmp(x->group, y->group) == 0;
    }
    return same;
}

/* The table's columns are as wide as what is in them, names of layers and tensors among it. */
typedef struct widths {
    int last, now, group;
} widths;

static void widen_column(int *width, const char *text)
{
    const int length = (int)strlen(text);
    *width = length > *width ? length : *width;
}

static widths widths_of(const ari_rank_lines *of, int ranks)
{
    widths width = {36, 36, 12};
    for (int i = 0; i < ranks; i++) {
        widen_column(&width.last, of[i].view.last);
        for (size_t k = 0; k < rows_of(&of[i]); k++) {
            widen_column(&width.now, row_at(&of[i], k)->current);
            widen_column(&width.group, row_at(&of[i], k)->group);
        }
    }
    return width;
}

static void write_row(FILE *to, const widths *width, const char *who, const char *last, const ari_rank_row *row,
                      const char *time)
{
    fprintf(to, "\n%9s  %-*s  %-*s  %-*s  %s", who, width->last, last, width->now, row->current, width->group,
            row->group, time);
}

/* Neighbouring ranks that were at the same place share their lines, so that the table of a large world can be read; a
 * rank in several collectives has a line for each, the oldest first. */
static void write_table(FILE *to, const ari_rank_lines *of, int ranks)
{
    const widths width = widths_of(of, ranks);
    write_row(to, &width, "rank", "last finished", &(ari_rank_row){.current = "now", .group = "with ranks"}, "for");
    for (int first = 0, end; first < ranks; first = end) {
        const ari_rank_lines *l = &of[first];
        for (end = first + 1; end < ranks && same_place(l, &of[end]);)
            end++;
        char who[32];
        snprintf(who, sizeof who, end == first + 1 ? "%d" : "%d-%d", first, end - 1);
        for (size_t i = 0; i < rows_of(l); i++) {
            const ari_rank_row *row = row_at(l, i);
            double longest = row->waiting_s;
            for (int k = first + 1; k < end; k++) {
                const double waits = row_at(&of[k], i)->waiting_s;
                longest = waits > longest ? waits : longest;
            }
            char time[32];
            snprintf(time, sizeof time, "%.3f s", longest);
            write_row(to, &width, i == 0 ? who : "", i == 0 ? l->view.last : "", row, time);
        }
    }
}

char *ari_rank_table(const char *line, const ari_rank_lines *of, int ranks)
{
    char *text = NULL;
    size_t size = 0;
    FILE *to = open_memstream(&text, &size);
    if (!to)
        return NULL;
    fputs(line, to);
    write_table(to, of, ranks);
    if (ari_text_closed(to, &text))
        return text;
    free(text);
    return NULL;
}
