/* SPDX-License-Identifier: Apache-2.0 */
/* A trace as a page of its own. The page is sim/trace_page.html, which the build puts into the library; what it shows
 * is written into it where it says so. */
#include <inttypes.h>
#include <string.h>

#include "sim/trace_view.h"

/* Made by cmake/Embed.cmake. */
extern const unsigned char ari_trace_page[];
extern const unsigned long ari_trace_page_bytes;

static const char place_of_data[] = "@DATA@";

static void put_string(FILE *t, const char *string)
{
    fprintf(t, ",");
    ari_text_string(t, string);
}

/* The order of the fields is the page's: see `read` there. */
static void put_record(FILE *t, const ari_trace_view *v, const ari_view_lane *lane, size_t i)
{
    const ari_record *r = lane->shown[i];
    const uint64_t begin = ari_view_begin(v, r), length = ari_view_end(v, r) - begin;
    static const char letters[] = "swcqt";
    fprintf(t, "%s[\"%c\",%" PRIu64 ",%" PRIu64 ",%u", i > 0 ? ",\n" : "", letters[r->kind], begin, length,
            (unsigned)r->depth);
    switch (r->kind) {
    case ARI_RECORD_WORK:
        fprintf(t, ",%.17g", r->flops);
        break;
    case ARI_RECORD_TRANSFER:
        fprintf(t, ",%d,%" PRIu64, r->peer, r->bytes);
        break;
    case ARI_RECORD_SPAN:
    case ARI_RECORD_WAIT:
        put_string(t, r->name);
        break;
    case ARI_RECORD_COLLECTIVE: {
        const ari_rendezvous *m = &v->rendezvous[lane->rendezvous[i]];
        fprintf(t, ",%" PRIu64 ",%zu,\"%s\"", ari_view_waiting(v, m, r), lane->rendezvous[i],
                ari_kind_name(r->op_kind));
        put_string(t, r->name);
        fprintf(t, ",%" PRIu64 ",%" PRIu64, r->bytes_read, r->bytes_written);
        if (r->broken) /* maybe for the reason that members called different things */
            fprintf(t, ",\"%s\",\"%s\",%zu,%d", ar_dtype_name(r->dtype), ari_op_name(r->op), r->count, r->root);
        break;
    }
    }
    fprintf(t, "]");
}

static void put_lanes(FILE *t, const ari_trace_view *v)
{
    fprintf(t, "\"lanes\":[");
    for (size_t i = 0; i < v->lane_count; i++) {
        const ari_view_lane *lane = &v->lanes[i];
        fprintf(t, "%s{\"rank\":%d,\"track\":%d,\"name\":", i > 0 ? ",\n" : "", lane->rank, lane->track);
        ari_text_string(t, lane->name);
        fprintf(t, ",\"records\":[");
        for (size_t k = 0; k < lane->count; k++)
            put_record(t, v, lane, k);
        fprintf(t, "]}");
    }
    fprintf(t, "]");
}

/* Facts of a collective that all members share. */
static void put_meetings(FILE *t, const ari_trace_view *v)
{
    fprintf(t, "\"rendezvous\":[");
    for (size_t i = 0; i < v->rendezvous_count; i++) {
        const ari_rendezvous *m = &v->rendezvous[i];
        const ari_record *r = m->of;
        char ranks[256];
        ari_view_ranks(v, m, ranks, sizeof ranks);
        fprintf(t, "%s[%" PRIu64 ",%" PRIu64 ",\"%s\",%d,\"%s\",\"%s\",%zu,%d,%" PRIu64 ",%d]", i > 0 ? ",\n" : "",
                r->group, r->seq, ranks, r->ranks, ar_dtype_name(r->dtype), ari_op_name(r->op), r->count, m->last,
                m->came_ns - v->start_ns, r->root);
    }
    fprintf(t, "]");
}

static void put_summary(FILE *t, const ar_trace *trace, ar_trace_clock clock)
{
    ar_trace_summary s;
    if (ar_trace_summarise(&s, trace, clock) != AR_OK) {
        fprintf(t, "\"summary\":null");
        return;
    }
    fprintf(t,
            "\"summary\":{\"seconds\":%.17g,\"compute\":%.17g,\"communication\":%.17g,\"exposed\":%.17g,"
            "\"overlap\":%.17g,\"bytes\":%" PRIu64 ",\"collectives\":%zu,",
            s.seconds, s.compute, s.communication, s.exposed, s.overlap, s.bytes, s.collectives);
    fprintf(t, "\"path\":{\"compute\":%.17g,\"communication\":%.17g,\"wait\":%.17g},\"longest\":[", s.path_compute,
            s.path_communication, s.path_wait);
    for (size_t i = 0; i < s.parts; i++) {
        fprintf(t, "%s[%d,%.17g", i > 0 ? "," : "", s.longest[i].rank, s.longest[i].seconds);
        put_string(t, s.longest[i].what);
        fprintf(t, "]");
    }
    fprintf(t, "]}");
}

static void put_data(FILE *t, const ari_trace_view *v, const ar_trace *trace, const char *title)
{
    fprintf(t, "{\"title\":");
    ari_text_string(t, title);
    fprintf(t, ",\"clock\":\"%s\",\"cut\":%s,\"ranks\":%d,\"end\":%" PRIu64 ",\n",
            v->clock == AR_TRACE_REAL ? "real" : "virtual", v->cut ? "true" : "false", v->ranks,
            v->end_ns - v->start_ns);
    put_summary(t, trace, v->clock);
    fprintf(t, ",\n");
    put_meetings(t, v);
    fprintf(t, ",\n");
    put_lanes(t, v);
    fprintf(t, "}");
}

ar_status ar_trace_write_html(const ar_trace *t, ar_trace_clock clock, const char *title, const char *path)
{
    if (!t)
        return ar_error_set(AR_ERR_ARG, "ar_trace_write_html: the trace is missing");
    const char *page = (const char *)ari_trace_page, *data = strstr(page, place_of_data);
    if (!data)
        return ar_error_set(AR_ERR_INTERNAL, "the page of the timeline has no place for a trace");
    const char *rest = data + sizeof place_of_data - 1;
    ARI_ENDED(ari_trace_view_fini) ari_trace_view view = {0};
    ari_trace_text *text = NULL;
    AR_TRY(ari_trace_view_init(&view, t, clock));
    AR_TRY(ari_text_create(&text, path));
    fwrite(page, 1, (size_t)(data - page), text->to);
    put_data(text->to, &view, t, title ? title : "");
    fwrite(rest, 1, ari_trace_page_bytes - (size_t)(rest - page), text->to);
    return ari_text_end(text, AR_OK);
}
